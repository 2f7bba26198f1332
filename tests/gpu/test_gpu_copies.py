"""Copies on a real GPU: every byte compared on both paths, ordered with the compute stream, and how fast they are."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device", allow_module_level=True)
pytest.importorskip("cupy", reason="CuPy is not installed")

from offload_worlds import KINDS, random_world, round_trips

from lockstep_kv import ConfigError
from lockstep_kv.offload import GpuCopyEngine, HostPool, RowFormat, dma_path
from lockstep_kv.offload.path_cache import PathCache
from lockstep_kv.offload.path_choice import PathChooser
from lockstep_kv.offload.path_measurement import PathMeasurement, machine_name

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep_kv.offload.path_choice import JobShape
    from lockstep_kv.offload.transfers import Transfer

pytestmark = pytest.mark.gpu

PATHS = ("dma", "kernel")
PIECE_BY_PIECE = "dma without batches"
DEVICE = "cuda:0"


def only(path: str) -> PathChooser:
    """A chooser of one path, which measures nothing."""

    def measure(path: str, shape: JobShape) -> float:
        raise AssertionError((path, shape))

    return PathChooser([path], measure, machine="", cache=None)


@pytest.mark.parametrize("path", [*PATHS, PIECE_BY_PIECE])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_what_was_stored_is_what_is_loaded(path: str, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == PIECE_BY_PIECE:
        path = "dma"
        monkeypatch.setattr(dma_path, "_batch_function", lambda: None)
    world = random_world(kind, seed, device=DEVICE, pinned=True)
    engine = GpuCopyEngine(world.row_format, world.pool, chooser=only(path))
    round_trips(world, engine, random.Random(seed))
    engine.shutdown()
    world.pool.close()


@pytest.mark.parametrize("path", PATHS)
def test_many_pieces_in_one_job(path: str) -> None:
    """More than a batch of the driver holds, and more units of work than thread blocks."""
    pages = torch.randint(256, (20_001, 1000), dtype=torch.uint8, device=DEVICE)
    row_format = RowFormat([[pages]], blocks_per_row=20_000)
    pool = HostPool(row_format.row_bytes, row_format.row_bytes, pinned=True)
    engine = GpuCopyEngine(row_format, pool, chooser=only(path))
    blocks = random.Random(0).sample(range(1, 20_001), 20_000)
    content = pages[blocks].cpu()
    engine.submit_store(1, 0, blocks, [0] * len(blocks), range(len(blocks)))
    engine.wait([1])
    assert torch.equal(pool.memory[: content.numel()].view_as(content), content)
    pages.fill_(0)
    engine.submit_load(2, 0, blocks[::-1], [0] * len(blocks), range(len(blocks)))
    engine.make_compute_wait([2])
    assert torch.equal(pages[blocks[::-1]].cpu(), content)
    assert [(job.job_id, job.ok) for job in engine.finished()] == [(1, True), (2, True)]
    engine.shutdown()
    pool.close()


@pytest.mark.parametrize("path", PATHS)
def test_copies_are_ordered_with_the_compute_stream(path: str) -> None:
    """A store reads what was computed before it, a load waits for it, and what is computed later waits for the load."""
    pages = torch.zeros(9, 1 << 20, dtype=torch.uint8, device=DEVICE)
    row_format = RowFormat([[pages]], blocks_per_row=1)
    pool = HostPool(8 << 20, 1 << 20, pinned=True)
    engine = GpuCopyEngine(row_format, pool, chooser=only(path))
    ids = list(range(1, 9))
    torch.cuda.synchronize()
    compute = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(compute):
        for turn in range(1, 6):
            # Long enough that a copy which does not wait reads or is overwritten.
            torch.cuda._sleep(20_000_000)
            pages.fill_(turn)
            start = time.perf_counter()
            engine.submit_store(1, 0, ids, [row - 1 for row in ids], [0] * 8)
            assert time.perf_counter() - start < 1
            engine.wait([1])
            assert (pool.memory == turn).all()
            torch.cuda._sleep(20_000_000)
            pages.fill_(0)
            engine.submit_load(2, 0, ids, [row - 1 for row in ids], [0] * 8)
            engine.make_compute_wait([2])
            seen = pages[1:].clone()
            compute.synchronize()
            assert (seen == turn).all()
            assert {job.job_id for job in engine.finished()} == {1, 2}
    engine.shutdown()
    pool.close()


def test_a_failing_copy_ends_its_job_only(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    world = random_world("hybrid", 3, device=DEVICE, pinned=True)
    engine = GpuCopyEngine(world.row_format, world.pool, chooser=only("dma"))

    class Failing:
        def enqueue(self, transfer: Transfer, *_: object) -> object:
            raise RuntimeError(f"no copy of set {transfer.set_id}")

    working = engine._paths["dma"]
    monkeypatch.setitem(engine._paths, "dma", Failing())
    engine.submit_store(1, 0, [1], [0], [0])
    monkeypatch.setitem(engine._paths, "dma", working)
    engine.submit_store(2, 0, [1], [0], [0])
    engine.wait([1, 2])
    assert [(job.job_id, job.ok) for job in engine.finished()] == [(1, False), (2, True)]
    assert [record.getMessage() for record in caplog.records] == [
        "store of 1 blocks of set 0 failed: RuntimeError: no copy of set 0"
    ]
    engine.shutdown()
    world.pool.close()


@pytest.mark.parametrize("path", PATHS)
def test_shutting_down_lets_open_jobs_end(path: str) -> None:
    pages = torch.ones(9, 1 << 20, dtype=torch.uint8, device=DEVICE)
    row_format = RowFormat([[pages]], blocks_per_row=1)
    pool = HostPool(8 << 20, 1 << 20, pinned=True)
    engine = GpuCopyEngine(row_format, pool, chooser=only(path))
    torch.cuda._sleep(200_000_000)
    engine.submit_store(1, 0, range(1, 9), range(8), [0] * 8)
    engine.submit_load(2, 0, [], [], [])
    assert [job.job_id for job in engine.finished()] == [2]
    engine.shutdown()
    assert (pool.memory == 1).all()
    assert [(job.job_id, job.ok) for job in engine.finished()] == [(1, True)]
    pool.close()


def test_the_engine_measures_once_and_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    world = random_world("lockstep", 1, device=DEVICE, pinned=True)
    start = time.perf_counter()
    GpuCopyEngine(world.row_format, world.pool).shutdown()
    first = time.perf_counter() - start
    device = torch.device(DEVICE)
    kept = PathCache(tmp_path / "lockstep-kv" / "copy-paths.json").load(machine_name(device))
    assert kept is not None
    print(f"\nmeasured in {first:.1f} s on {machine_name(device)}; microseconds by dma, by kernel:")
    for direction, size, pieces, taken in kept:
        print(f"{direction:5} {pieces:5} x {size:7} bytes: " + " ".join(f"{taken[path] * 1e6:9.0f}" for path in PATHS))

    def measured_again(*_: object) -> float:
        raise AssertionError

    monkeypatch.setattr(PathMeasurement, "seconds", measured_again)
    engine = GpuCopyEngine(world.row_format, world.pool)
    round_trips(world, engine, random.Random(1))
    engine.shutdown()
    world.pool.close()


def test_page_locked_rows_are_needed() -> None:
    world = random_world("lockstep", 1, device=DEVICE, pinned=True)
    plain = HostPool(world.row_format.row_bytes, world.row_format.row_bytes, pinned=False)
    with pytest.raises(ConfigError, match="pool must be page-locked, got plain memory"):
        GpuCopyEngine(world.row_format, plain)
    world.pool.close()


@pytest.mark.parametrize("path", PATHS)
def test_bandwidth(path: str) -> None:
    """Print gigabytes per second for pages of several sizes, blocks in random order, both ways."""
    total = 256 << 20
    pool = HostPool(total, total, pinned=True)
    print(f"\n{path}: GB/s by bytes per page: store, load")
    for page in (1 << 10, 1000, 8 << 10, 36 << 10, 256 << 10, 2 << 20):
        count = total // page
        pages = torch.zeros(count + 1, page, dtype=torch.uint8, device=DEVICE)
        row_format = RowFormat([[pages]], blocks_per_row=count)
        engine = GpuCopyEngine(row_format, pool, chooser=only(path))
        blocks = random.Random(0).sample(range(1, count + 1), count)
        job = (0, blocks, [0] * count, range(count))
        speeds = []
        for submit in (engine.submit_store, engine.submit_load):
            for warm in (False, True):
                start = time.perf_counter()
                submit(1, *job)
                engine.wait([1])
                seconds = time.perf_counter() - start
                (done,) = engine.finished()
                assert done.ok
                if warm:
                    speeds.append(f"{done.num_bytes / done.seconds / 1e9:6.1f} ({done.num_bytes / seconds / 1e9:.1f})")
        print(f"{page:8}: {', '.join(speeds)} (in brackets: preparing the job included)")
        engine.shutdown()
    pool.close()
