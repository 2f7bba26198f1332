"""Copy jobs while they run and when they fail: order, waiting, ids, and the end of an engine."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from lockstep_kv import ArgumentTypeError, ConfigError, LockstepKVError
from lockstep_kv.offload import CpuCopyEngine, HostPool, RowFormat
from lockstep_kv.offload.transfers import Direction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep_kv.offload.transfers import Transfer

SECONDS = 30


class Held(CpuCopyEngine):
    """Stores and loads wait until they are let go, direction by direction; blocks named `broken` cannot be copied."""

    def __init__(self, *, broken: int = 0) -> None:
        self.layer = torch.arange(80, dtype=torch.uint8).view(10, 8)
        self.before = self.layer.clone()
        row_format = RowFormat([[self.layer]], blocks_per_row=1)
        super().__init__(row_format, HostPool(10 * 16, 16, pinned=False))
        self.go = {direction: threading.Event() for direction in Direction}
        self.order: list[int] = []
        self.broken = broken

    def copy(self, transfer: Transfer) -> None:
        assert self.go[transfer.direction].wait(SECONDS)
        if self.broken in transfer.blocks:
            raise OSError(f"block {self.broken}\nis broken")
        self.order.append(int(transfer.blocks[0]))
        super().copy(transfer)

    def let_go(self) -> None:
        for event in self.go.values():
            event.set()


@pytest.fixture
def held() -> Iterator[Callable[..., Held]]:
    engines = []

    def make(**options: int) -> Held:
        engines.append(Held(**options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.let_go()
        engine.shutdown()


def test_jobs_run_beside_the_caller(held: Callable[..., Held]) -> None:
    engine = held()
    engine.submit_store(1, 0, [3], [5], [0])
    assert engine.finished() == []
    assert (engine.pool.row(5) == 0).all()
    engine.let_go()
    engine.wait([1])
    assert torch.equal(engine.pool.row(5)[:8], engine.layer[3])
    (job,) = engine.finished()
    assert (job.job_id, job.ok, job.num_bytes) == (1, True, 8)
    assert job.seconds > 0
    assert engine.finished() == []


def test_directions_do_not_wait_for_each_other(held: Callable[..., Held]) -> None:
    engine = held()
    engine.submit_store(1, 0, [3], [5], [0])
    engine.submit_load(2, 0, [4], [6], [0])
    engine.go[Direction.LOAD].set()
    engine.wait([2])
    assert [job.job_id for job in engine.finished()] == [2]
    engine.let_go()
    engine.wait([1])
    assert [job.job_id for job in engine.finished()] == [1]


def test_jobs_of_one_direction_run_in_order(held: Callable[..., Held]) -> None:
    engine = held()
    for block in (5, 2, 9, 1):
        engine.submit_store(block, 0, [block], [block], [0])
    engine.let_go()
    engine.wait([1])
    assert engine.order == [5, 2, 9, 1]
    assert [job.job_id for job in engine.finished()] == [5, 2, 9, 1]


def test_waiting_waits(held: Callable[..., Held]) -> None:
    engine = held()
    engine.submit_load(1, 0, [3], [5], [0])
    for wait in (engine.wait, engine.make_compute_wait):
        engine.go[Direction.LOAD].clear()
        engine.submit_load(2, 0, [4], [5], [0])
        timer = threading.Timer(0.05, engine.let_go)
        timer.start()
        start = time.perf_counter()
        wait([2, 1, 2])
        assert time.perf_counter() - start > 0.04
        assert (engine.layer[4] == 0).all()
        assert {job.job_id for job in engine.finished()} >= {2}
        engine.go[Direction.LOAD].clear()
        engine.submit_load(1, 0, [3], [5], [0])
        timer.join()
    engine.wait([])


def test_empty_jobs_end_at_once(held: Callable[..., Held]) -> None:
    engine = held()
    engine.submit_store(1, 0, [3], [5], [0])
    engine.submit_store(2, 0, [], [], [])
    engine.submit_load(3, 0, (), (), ())
    engine.wait([2, 3])
    engine.make_compute_wait([2, 3])
    assert engine.finished() == [(2, True, 0, 0.0), (3, True, 0, 0.0)]


def test_a_failing_copy_ends_its_job_only(held: Callable[..., Held], caplog: pytest.LogCaptureFixture) -> None:
    engine = held(broken=4)
    engine.let_go()
    with caplog.at_level(logging.ERROR, "lockstep_kv.offload"):
        engine.submit_store(1, 0, [3], [0], [0])
        engine.submit_store(2, 0, [4, 5], [1, 2], [0, 0])
        engine.submit_load(3, 0, [4], [0], [0])
        engine.submit_store(4, 0, [6], [3], [0])
        engine.wait([1, 2, 3, 4])
    assert [(job.job_id, job.ok, job.num_bytes) for job in engine.finished()] == [
        (1, True, 8),
        (2, False, 0),
        (3, False, 0),
        (4, True, 8),
    ]
    assert sorted(record.getMessage() for record in caplog.records) == [
        "load of 1 blocks of set 0 failed: OSError: block 4 is broken",
        "store of 2 blocks of set 0 failed: OSError: block 4 is broken",
    ]
    assert (engine.pool.row(1) == 0).all()
    assert torch.equal(engine.layer, engine.before)
    engine.broken = 0
    engine.submit_store(2, 0, [4], [1], [0])
    engine.wait([2])
    assert torch.equal(engine.pool.row(1)[:8], engine.layer[4])


def test_an_id_is_used_once_at_a_time(held: Callable[..., Held]) -> None:
    engine = held()
    engine.submit_store(7, 0, [3], [5], [0])
    engine.submit_store(8, 0, [], [], [])
    for job_id in (7, 8):
        for submit in (engine.submit_store, engine.submit_load):
            with pytest.raises(ConfigError, match=f"job_id {job_id} is open already"):
                submit(job_id, 0, [4], [6], [0])
    engine.let_go()
    engine.wait([7])
    # Ended, but not reported yet.
    with pytest.raises(ConfigError, match="job_id 7 is open already"):
        engine.submit_store(7, 0, [4], [6], [0])
    assert engine.order == [3]
    assert len(engine.finished()) == 2
    engine.submit_store(7, 0, [4], [6], [0])
    engine.wait([7])
    assert torch.equal(engine.pool.row(6)[:8], engine.layer[4])


@pytest.mark.parametrize(
    ("job_id", "error", "message"),
    [
        (-1, ConfigError, "job_id must be between 0 and 9223372036854775807, got -1"),
        (2**63, ConfigError, "job_id must be between 0 and 9223372036854775807, got 9223372036854775808"),
        ("1", ArgumentTypeError, "job_id must be an int, got str '1'"),
        (True, ArgumentTypeError, "job_id must be an int, got bool True"),
    ],
)
def test_bad_ids(held: Callable[..., Held], job_id: Any, error: type[Exception], message: str) -> None:
    engine = held()
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (engine.submit_store, (job_id, 0, [3], [5], [0])),
        (engine.submit_load, (job_id, 0, [3], [5], [0])),
        (engine.wait, ([job_id],)),
        (engine.make_compute_wait, ([job_id],)),
    ]
    for call, arguments in calls:
        with pytest.raises(error) as caught:
            call(*arguments)
        assert str(caught.value) == message
    assert engine.finished() == []


def test_only_open_jobs_can_be_waited_for(held: Callable[..., Held]) -> None:
    engine = held()
    engine.submit_store(1, 0, [3], [5], [0])
    waits: list[Any] = [engine.wait, engine.make_compute_wait]
    for wait in waits:
        # Refused before anything is waited for.
        with pytest.raises(ConfigError, match="job_ids: job 2 is not open"):
            wait([1, 2])
        with pytest.raises(ArgumentTypeError, match="job_ids must be ints, got int"):
            wait(1)
    engine.let_go()
    engine.wait([1])
    engine.finished()
    with pytest.raises(ConfigError, match="job_ids: job 1 is not open"):
        engine.wait([1])


def test_shutting_down_lets_open_jobs_end() -> None:
    engine = Held(broken=4)
    for block in (3, 4, 5):
        engine.submit_store(block, 0, [block], [block], [0])
    engine.submit_load(9, 0, [9], [9], [0])
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-kv")]
    assert len(threads) >= 2
    timer = threading.Timer(0.05, engine.let_go)
    timer.start()
    engine.shutdown()
    engine.shutdown()
    assert not any(thread.is_alive() for thread in threads)
    assert torch.equal(engine.pool.row(5)[:8], engine.before[5])
    for submit in (engine.submit_store, engine.submit_load):
        with pytest.raises(LockstepKVError, match="the copy engine is shut down"):
            submit(1, 0, [3], [5], [0])
    engine.wait([3])
    assert [(job.job_id, job.ok) for job in engine.finished()] == [(3, True), (4, False), (5, True), (9, True)]
    engine.pool.close()
    timer.join()
