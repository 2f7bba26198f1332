"""Copies between caches of random layouts and host memory: every byte compared, and wrong ones noticed."""

from __future__ import annotations

import ctypes
import random
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from offload_worlds import KINDS, OffloadWorld, ended, random_job, random_world, round_trips

from lockstep_kv.offload import CpuCopyEngine, HostPool
from lockstep_kv.offload.transfers import Direction, Pieces

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep_kv.offload.transfers import Transfer

SEEDS = range(12)


class PiecesOnCpu(CpuCopyEngine):
    """Copies the pieces that a GPU's copy engines would be given."""

    def copy(self, transfer: Transfer) -> None:
        page_set = self.row_format.sets[transfer.set_id]
        pieces = Pieces.of(transfer, page_set, self.pool.memory.data_ptr())
        store = transfer.direction is Direction.STORE
        to, source = (pieces.host, pieces.device) if store else (pieces.device, pieces.host)
        for one_to, one_from, size in zip(to.tolist(), source.tolist(), pieces.sizes.tolist(), strict=True):
            ctypes.memmove(one_to, one_from, size)


@pytest.mark.parametrize("make_engine", [CpuCopyEngine, PiecesOnCpu])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_stored_is_what_is_loaded(make_engine: type[CpuCopyEngine], kind: str, seed: int) -> None:
    world = random_world(kind, seed)
    engine = make_engine(world.row_format, world.pool)
    round_trips(world, engine, random.Random(seed))
    engine.shutdown()
    world.pool.close()


def stored_block(world: OffloadWorld, engine: CpuCopyEngine, set_id: int = 0) -> Tensor:
    """Store block 1 of a set to slot 0 of row 2, poison it, and return what it held."""
    content = world.block_bytes(set_id, 1)
    engine.submit_store(0, set_id, [1], [2], [0])
    assert ended(engine, 0)[0]
    world.cache.poison_blocks([1])
    return content


def loaded(world: OffloadWorld, engine: CpuCopyEngine, set_id: int, row: int = 2) -> Tensor:
    engine.submit_load(1, set_id, [1], [row], [0])
    assert ended(engine, 1)[0]
    return world.block_bytes(0, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wrong_set_or_row_shows_as_other_bytes(seed: int) -> None:
    world = random_world("hybrid", seed)
    engine = CpuCopyEngine(world.row_format, world.pool)
    content = stored_block(world, engine)
    for set_id, row in ((1, 2), (2, 2), (0, 3)):
        assert not torch.equal(loaded(world, engine, set_id, row), content), (world.log, set_id, row)
    assert torch.equal(loaded(world, engine, 0), content), world.log
    engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_another_rank_s_rows_show_as_other_bytes(kind: str) -> None:
    ours, theirs = random_world(kind, 1), random_world(kind, 1)
    theirs.cache.backing.bitwise_not_()
    own, crossed = (CpuCopyEngine(ours.row_format, one.pool) for one in (ours, theirs))
    other = CpuCopyEngine(theirs.row_format, theirs.pool)
    content = stored_block(ours, own)
    stored_block(theirs, other)
    assert not torch.equal(loaded(ours, crossed, 0), content), ours.log
    assert torch.equal(loaded(ours, own, 0), content), ours.log
    for engine in (own, crossed, other):
        engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_copy_shows_as_poison(kind: str) -> None:
    class Forgetful(CpuCopyEngine):
        def copy(self, transfer: Transfer) -> None:
            if transfer.direction is Direction.STORE:
                super().copy(transfer)

    world = random_world(kind, 2)
    engine = Forgetful(world.row_format, world.pool)
    with pytest.raises(AssertionError, match=f"{kind}, seed 2"):
        round_trips(world, engine, random.Random(2), jobs=20)
    engine.shutdown()


def test_random_jobs_are_of_all_kinds() -> None:
    """Empty jobs, jobs of several blocks, of neighbours that merge and of single pages all come up."""
    merged, counts = set(), set()
    for seed in SEEDS:
        for kind in KINDS:
            world = random_world(kind, seed)
            rng = random.Random(seed)
            for _ in range(6):
                set_id, blocks, rows, slots = random_job(world, rng)
                pages = len(blocks) * len(world.row_format.sets[set_id].layers)
                engine = CpuCopyEngine(world.row_format, world.pool)
                engine.submit_store(0, set_id, blocks, rows, slots)
                transfer = engine._transfers[0]
                page_set = world.row_format.sets[set_id]
                pieces = Pieces.of(transfer, page_set, world.pool.memory.data_ptr())
                merged.add((len(pieces.sizes) > 1) - (len(pieces.sizes) < pages))
                counts.add(len(blocks))
                engine.shutdown()
            world.pool.close()
    assert counts == set(range(9))
    assert merged == {-1, 0, 1}


def test_tensors_of_any_type_and_distance() -> None:
    wide = torch.randn(5, 12).to(torch.bfloat16)
    sets = [[wide[:, 2:9], torch.arange(20, dtype=torch.float32).view(5, 4)], [wide[:4, 0:1]]]
    from lockstep_kv.offload import RowFormat

    row_format = RowFormat(sets, blocks_per_row=2)
    assert [one.bytes_per_block for one in row_format.sets] == [7 * 2 + 16, 2]
    assert row_format.row_bytes == 64
    pool = HostPool(64 * 3, row_format.row_bytes, pinned=False)
    engine = CpuCopyEngine(row_format, pool)
    before = [tensor.clone() for one in sets for tensor in one]
    untouched = wide.clone()
    engine.submit_store(1, 0, [4, 2], [0, 2], [1, 0])
    engine.submit_store(2, 1, [3], [1], [1])
    engine.wait([1, 2])
    for tensor in sets[0]:
        tensor[[4, 2]] = 0
    wide[3, 0] = 0
    engine.submit_load(3, 0, [4, 2], [0, 2], [1, 0])
    engine.submit_load(4, 1, [3], [1], [1])
    engine.wait([3, 4])
    assert [job.ok for job in engine.finished()] == [True] * 4
    assert all(torch.equal(*pair) for pair in zip(before, [t for one in sets for t in one], strict=True))
    assert torch.equal(wide, untouched)
    engine.shutdown()
