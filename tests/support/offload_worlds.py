"""Caches of random layouts beside a host pool, and random jobs on them of which every byte is compared."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from lockstep_kv import Coordinator, CoordinatorConfig, GroupSpec, LayerSpec, plan_layout
from lockstep_kv.offload import CopyEngine, FinishedCopy, HostPool, RowFormat
from lockstep_kv.offload.host_pool import ROW_ALIGNMENT, round_up
from lockstep_kv.tensors import CachePool

if TYPE_CHECKING:
    from collections.abc import Sequence

_Item = TypeVar("_Item")

KINDS = ("lockstep", "hybrid", "odd pages", "one layer")


@dataclass
class OffloadWorld:
    """A cache on one rank, the views of its sets' layers, and the host's rows."""

    cache: CachePool
    row_format: RowFormat
    pool: HostPool
    log: str

    def block_bytes(self, set_id: int, block: int) -> torch.Tensor:
        """The bytes of a block on the device, packed as a row has them, on the CPU."""
        return torch.cat([tensor[block] for tensor in self.row_format.sets[set_id].tensors]).cpu()

    def place(self, set_id: int, row: int, slot: int) -> torch.Tensor:
        """The bytes of one slot of a row."""
        size = self.row_format.sets[set_id].bytes_per_block
        return self.pool.row(row)[slot * size : (slot + 1) * size]


def random_groups(kind: str, rng: random.Random) -> tuple[list[GroupSpec], int]:
    """Return groups of one kind of layout and the number of ranks."""

    def layers(name: str, pages: Sequence[int]) -> list[LayerSpec]:
        return [LayerSpec(f"{name}{at}", page) for at, page in enumerate(pages)]

    if kind == "lockstep":
        ranks = rng.choice([2, 4])
        main, indexer = rng.choice([(64, 24), (656, 132), (30, 7)])
        return [
            GroupSpec("mla", 4, layers("main", [4 * main] * rng.randint(1, 3)), kv_shards=ranks),
            GroupSpec("mla", 4 * ranks, layers("indexer", [4 * ranks * indexer] * rng.randint(1, 3)), kv_shards=1),
        ], ranks
    if kind == "hybrid":
        page = rng.choice([16, 48, 100])
        return [
            GroupSpec("full", 4, layers("full", [4 * page] * 3)),
            GroupSpec("sliding_window", 4, layers("window", [4 * page] * 2), sliding_window=8),
            GroupSpec("full", 8, layers("small", [8 * 5, 8 * 9])),
        ], 1
    if kind == "odd pages":
        pages = [rng.choice([1, 7, 15, 17, 33, 129, 1023]) for _ in range(rng.randint(2, 5))]
        return [GroupSpec("full", 1, layers("odd", pages))], 1
    return [GroupSpec("full", 4, layers("only", [4 * rng.choice([16, 37])]))], 1


def random_world(kind: str, seed: int, *, device: str = "cpu", pinned: bool = False) -> OffloadWorld:
    """Make a cache of random bytes at an address that is aligned to nothing, and a pool of a few rows."""
    rng = random.Random(f"{kind} {seed}")
    groups, ranks = random_groups(kind, rng)
    layout = plan_layout(groups, dcp_world_size=ranks, num_blocks=rng.randint(10, 24), max_model_len=8)
    config = CoordinatorConfig(groups, num_blocks=layout.num_blocks, dcp_world_size=ranks, max_model_len=8)
    start = rng.choice([0, 0, 1, 8])
    backing = torch.zeros(start + layout.total_bytes + 64, dtype=torch.uint8, device=device)
    cache = CachePool(layout, groups, backing=backing[start:])
    generator = torch.Generator().manual_seed(seed)
    cache.backing.copy_(torch.randint(256, cache.backing.shape, dtype=torch.uint8, generator=generator))
    sets = [
        [
            cache.backing.as_strided((layout.num_blocks, tensor.page), (tensor.block_stride, 1), start + tensor.offset)
            for tensor in layout.tensors
            if tensor.group_id in one.group_ids
        ]
        for one in Coordinator(config).sets
    ]
    row_format = RowFormat(sets, blocks_per_row=rng.randint(1, 3))
    # Rows may be longer than they need to be, and of a length that is no multiple of their alignment.
    row_bytes = row_format.row_bytes + rng.choice([0, 1, 20])
    pool = HostPool(rng.randint(6, 12) * round_up(row_bytes, ROW_ALIGNMENT), row_bytes, pinned=pinned)
    return OffloadWorld(cache, row_format, pool, f"{kind}, seed {seed}, {len(sets)} sets on {device}")


def round_trips(world: OffloadWorld, engine: CopyEngine, rng: random.Random, *, jobs: int = 6) -> None:
    """Store blocks, poison them, load them into others, and compare the whole cache and the whole pool each time."""
    device, host = world.cache.backing.cpu().clone(), world.pool.memory.clone()
    for job in range(0, 2 * jobs, 2):
        set_id, blocks, rows, slots = random_job(world, rng)
        page_set = world.row_format.sets[set_id]
        wanted = [world.block_bytes(set_id, block) for block in blocks]
        engine.submit_store(job, set_id, blocks, rows, slots)
        assert ended(engine, job) == (True, len(blocks) * page_set.bytes_per_block), world.log
        for content, row, slot in zip(wanted, rows, slots, strict=True):
            start = row * world.pool.row_stride + slot * page_set.bytes_per_block
            host[start : start + page_set.bytes_per_block] = content
        assert torch.equal(world.pool.memory, host), world.log
        assert torch.equal(world.cache.backing.cpu(), device), world.log

        world.cache.poison_blocks(blocks)
        # On the CPU `cpu` alone would give the cache's own memory.
        device = world.cache.backing.cpu().clone()
        targets = rng.sample(range(1, page_set.num_blocks), len(blocks))
        engine.submit_load(job + 1, set_id, targets, rows, slots)
        assert ended(engine, job + 1) == (True, len(blocks) * page_set.bytes_per_block), world.log
        write_blocks(world, device, set_id, targets, wanted)
        assert torch.equal(world.cache.backing.cpu(), device), world.log
        assert torch.equal(world.pool.memory, host), world.log


def write_blocks(
    world: OffloadWorld, device: torch.Tensor, set_id: int, blocks: Sequence[int], content: Sequence[torch.Tensor]
) -> None:
    """Write packed blocks to a copy of the cache's memory, page by page."""
    base = world.cache.backing.data_ptr()
    for layer in world.row_format.sets[set_id].layers:
        for block, packed in zip(blocks, content, strict=True):
            start = layer.address - base + block * layer.block_stride
            device[start : start + layer.page_bytes] = packed[layer.row_offset : layer.row_offset + layer.page_bytes]


def random_job(world: OffloadWorld, rng: random.Random) -> tuple[int, list[int], list[int], list[int]]:
    """Return a set, some of its blocks (often neighbours) and as many places in the pool (often neighbours)."""
    set_id = rng.randrange(len(world.row_format.sets))
    num_blocks = world.row_format.sets[set_id].num_blocks
    slots = world.row_format.blocks_per_row
    places = [(row, slot) for row in range(world.pool.num_rows) for slot in range(slots)]
    count = rng.randint(0, min(num_blocks - 1, len(places), 8))
    blocks = _some(list(range(1, num_blocks)), count, rng)
    chosen = _some(places, count, rng)
    if rng.random() < 0.5:
        pairs = list(zip(blocks, chosen, strict=True))
        rng.shuffle(pairs)
        blocks, chosen = [block for block, _ in pairs], [place for _, place in pairs]
    return set_id, blocks, [row for row, _ in chosen], [slot for _, slot in chosen]


def _some(items: list[_Item], count: int, rng: random.Random) -> list[_Item]:
    """Return some items: any ones, or neighbours."""
    if rng.random() < 0.3:
        return rng.sample(items, count)
    start = rng.randint(0, len(items) - count)
    return items[start : start + count]


def ended(engine: CopyEngine, job_id: int) -> tuple[bool, int]:
    """Wait for the only open job; return whether it succeeded and the bytes that it counts."""
    engine.wait([job_id])
    (job,) = engine.finished()
    assert isinstance(job, FinishedCopy)
    assert job.job_id == job_id
    assert job.seconds >= 0
    return job.ok, job.num_bytes
