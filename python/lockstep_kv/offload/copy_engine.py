"""Copies between a cache's blocks and rows of host memory, as jobs that run beside everything else."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep_kv.arguments import MAX_INT64, checked_int
from lockstep_kv.errors import ArgumentTypeError, ConfigError, LockstepKVError
from lockstep_kv.offload.host_pool import HostPool
from lockstep_kv.offload.row_format import RowFormat
from lockstep_kv.offload.transfers import Direction, Transfer, plan_transfer

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import SupportsIndex

__all__ = ["CopyEngine", "FinishedCopy", "RunningCopy", "log_failure"]

_logger = logging.getLogger(__name__)


class FinishedCopy(NamedTuple):
    """How a job ended. A failed one (`ok` False) counts 0 bytes; what it was to write holds no defined content."""

    job_id: int
    ok: bool
    num_bytes: int
    seconds: float


class RunningCopy(ABC):
    """A job that was started."""

    @abstractmethod
    def done(self) -> bool:
        """Tell, without waiting, whether the job has ended."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the job has ended. Does not raise if it failed."""

    @abstractmethod
    def outcome(self) -> tuple[bool, float]:
        """Return whether the job, which has ended, succeeded, and how many seconds the copy took."""

    def make_compute_wait(self) -> None:
        """Let what is computed from now on come after the job. Waits for the job where compute is not asynchronous."""
        self.wait()


class _EmptyCopy(RunningCopy):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def outcome(self) -> tuple[bool, float]:
        return True, 0.0


class CopyEngine(ABC):
    """Runs store and load jobs between the sets of a `RowFormat` and the rows of a `HostPool`.

    Jobs of one direction run in the order of their submission, the two directions beside each other. A job is open from
    its submission until `finished` has reported it; while it is open its id cannot be used again, and its blocks and
    rows are the caller's to keep apart from those of other open jobs. The engine uses the pool and does not own it:
    shut the engine down first. Meant for one thread.

    Every refused call raises `ConfigError` (`ArgumentTypeError` for wrong types) naming the value, and copies nothing.
    """

    def __init__(self, row_format: RowFormat, pool: HostPool) -> None:
        if not isinstance(row_format, RowFormat):
            raise ArgumentTypeError(f"row_format must be a RowFormat, got {type(row_format).__name__}")
        if not isinstance(pool, HostPool):
            raise ArgumentTypeError(f"pool must be a HostPool, got {type(pool).__name__}")
        if pool.row_bytes < row_format.row_bytes:
            raise ConfigError(f"pool must have rows of {row_format.row_bytes} bytes, got {pool.row_bytes}")
        self.row_format = row_format
        self.pool = pool
        # Both in the order of submission.
        self._running: dict[int, RunningCopy] = {}
        self._transfers: dict[int, Transfer] = {}
        self._open = True

    def submit_store(self, job_id: SupportsIndex, set_id: SupportsIndex, blocks: Any, rows: Any, slots: Any) -> None:
        """Start copying blocks of a set to the host: `blocks[i]` to slot `slots[i]` of row `rows[i]`.

        The blocks' content is what everything that was computed before this call has written. No blocks is a job too.
        Two blocks must not go to one place.
        """
        self._submit(Direction.STORE, job_id, set_id, blocks, rows, slots)

    def submit_load(self, job_id: SupportsIndex, set_id: SupportsIndex, blocks: Any, rows: Any, slots: Any) -> None:
        """Start copying to blocks of a set from the host: `blocks[i]` from slot `slots[i]` of row `rows[i]`.

        Starts after everything that was computed before this call. Read the blocks only after `wait` or
        `make_compute_wait`. A block must not be named twice.
        """
        self._submit(Direction.LOAD, job_id, set_id, blocks, rows, slots)

    def finished(self) -> list[FinishedCopy]:
        """Return the jobs that ended since the last call, each once, without waiting for others."""
        ended = [job_id for job_id, running in self._running.items() if running.done()]
        finished = []
        for job_id in ended:
            ok, seconds = self._running.pop(job_id).outcome()
            num_bytes = self._transfers.pop(job_id).num_bytes
            finished.append(FinishedCopy(job_id, ok, num_bytes if ok else 0, seconds))
        return finished

    def wait(self, job_ids: Iterable[SupportsIndex]) -> None:
        """Return when these open jobs have ended, well or not. `finished` still reports them."""
        for running in self._opened(job_ids):
            running.wait()

    def make_compute_wait(self, job_ids: Iterable[SupportsIndex]) -> None:
        """Let what the current stream computes from now on come after these open jobs, without holding up this thread.

        On the CPU, where computing is not asynchronous, this is `wait`.
        """
        for running in self._opened(job_ids):
            running.make_compute_wait()

    def shutdown(self) -> None:
        """Let all open jobs end and free what the engine holds. `finished` still reports; nothing can be submitted.

        Shutting down twice is allowed.
        """
        if self._open:
            self._open = False
            for running in self._running.values():
                running.wait()
            self._close()

    @abstractmethod
    def _start(self, transfer: Transfer) -> RunningCopy:
        """Start a job that has blocks. What goes wrong is logged and told by the `RunningCopy`, never raised."""

    @abstractmethod
    def _close(self) -> None:
        """Free what the engine holds. All jobs have ended."""

    def _submit(
        self, direction: Direction, job_id: SupportsIndex, set_id: SupportsIndex, blocks: Any, rows: Any, slots: Any
    ) -> None:
        if not self._open:
            raise LockstepKVError("the copy engine is shut down")
        job_id = _checked_job_id(job_id)
        if job_id in self._running:
            raise ConfigError(f"job_id {job_id} is open already")
        transfer = plan_transfer(self.row_format, self.pool, direction, set_id, blocks, rows, slots)
        self._running[job_id] = self._start(transfer) if len(transfer.blocks) else _EmptyCopy()
        self._transfers[job_id] = transfer

    def _opened(self, job_ids: Iterable[SupportsIndex]) -> list[RunningCopy]:
        """Return the jobs with these ids, all of them open."""
        try:
            ids = [_checked_job_id(job_id) for job_id in job_ids]
        except TypeError as error:
            if isinstance(error, ArgumentTypeError):
                raise
            raise ArgumentTypeError(f"job_ids must be ints, got {type(job_ids).__name__}") from None
        for job_id in ids:
            if job_id not in self._running:
                raise ConfigError(f"job_ids: job {job_id} is not open")
        return [self._running[job_id] for job_id in ids]


def log_failure(transfer: Transfer, error: Exception) -> None:
    """Write one line about a copy that failed."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    what = f"{transfer.direction.value} of {len(transfer.blocks)} blocks of set {transfer.set_id}"
    _logger.error("%s failed: %s", what, text)


def _checked_job_id(job_id: SupportsIndex) -> int:
    return checked_int("job_id", job_id, low=0, high=MAX_INT64)
