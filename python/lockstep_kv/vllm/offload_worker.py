"""The copies that vLLM's offloading connector asks one worker for, as jobs of a `CopyEngine`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from lockstep_kv.vllm.offload_manager import HostRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

    from lockstep_kv.offload import CopyEngine, HostPool

__all__ = ["LockstepOffloadingWorker"]


@dataclass
class _Job:
    """One of vLLM's jobs: the copies of it that are open, one for each group, and what those that ended came to."""

    copies: set[int]
    ok: bool = True
    num_bytes: int = 0
    seconds: float = 0.0


class LockstepOffloadingWorker(OffloadingWorker):
    """Runs the jobs of one worker. A job is a copy for each group that it has blocks of."""

    def __init__(self, engine: CopyEngine, pool: HostPool, blocks_per_row: int) -> None:
        self.engine, self.pool = engine, pool
        self._blocks_per_row = blocks_per_row
        self._numbers = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self._job_of_copy: dict[int, int] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Start to copy blocks to rows."""
        return self._submit(job_id, src_spec, dst_spec, self.engine.submit_store)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start to copy rows to blocks."""
        return self._submit(job_id, dst_spec, src_spec, self.engine.submit_load)

    def get_finished(self) -> list[TransferResult]:
        """The jobs that ended since the last call."""
        ended = []
        for copy in self.engine.finished():
            job_id = self._job_of_copy.pop(copy.job_id)
            job = self._jobs[job_id]
            job.copies.remove(copy.job_id)
            job.ok &= copy.ok
            job.num_bytes += copy.num_bytes
            job.seconds = max(job.seconds, copy.seconds)
            if not job.copies:
                del self._jobs[job_id]
                ended.append(TransferResult(job_id, job.ok, job.num_bytes, job.seconds))
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Return when these jobs have ended; those that are not open have."""
        self.engine.wait([copy for job_id in job_ids if job_id in self._jobs for copy in self._jobs[job_id].copies])

    def shutdown(self) -> None:
        """Let all jobs end and give the host's memory back."""
        self.engine.shutdown()
        self.pool.close()

    def _submit(self, job_id: int, blocks: GPULoadStoreSpec, host: LoadStoreSpec, submit: Callable[..., None]) -> bool:
        """Start a job's copies: each group has the next of the blocks, and as many of the next rows as they lie in."""
        if not isinstance(host, HostRows):
            raise TypeError(f"job {job_id} must name rows of the host's memory, got {type(host).__name__}")
        ids, rows = blocks.block_ids, host.block_ids
        job = self._jobs[job_id] = _Job(set())
        first, row = 0, 0
        for group, (count, start) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if count == 0 and group + 1 < len(blocks.group_sizes):
                continue
            places = range(start % self._blocks_per_row, start % self._blocks_per_row + count)
            number = next(self._numbers)
            submit(
                number,
                group,
                ids[first : first + count],
                [rows[row + place // self._blocks_per_row] for place in places],
                [place % self._blocks_per_row for place in places],
            )
            job.copies.add(number)
            self._job_of_copy[number] = job_id
            first += count
            row += -(-places.stop // self._blocks_per_row) if count else 0
        return True
