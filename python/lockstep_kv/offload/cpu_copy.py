"""The copy engine for a cache in the host's own memory: one thread per direction, no GPU."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from lockstep_kv.errors import ConfigError
from lockstep_kv.offload.copy_engine import CopyEngine, RunningCopy, log_failure
from lockstep_kv.offload.transfers import Direction

if TYPE_CHECKING:
    from lockstep_kv.offload.host_pool import HostPool
    from lockstep_kv.offload.row_format import RowFormat
    from lockstep_kv.offload.transfers import Transfer

__all__ = ["CpuCopyEngine"]


class CpuCopyEngine(CopyEngine):
    """Copies tensors on the CPU. Jobs run in a thread per direction, so they overlap with the caller as on a GPU."""

    def __init__(self, row_format: RowFormat, pool: HostPool) -> None:
        super().__init__(row_format, pool)
        if row_format.device.type != "cpu":
            raise ConfigError(f"row_format must have its tensors on the CPU, got {row_format.device}")
        self._threads = {
            direction: ThreadPoolExecutor(1, thread_name_prefix=f"lockstep-kv-{direction.value}")
            for direction in Direction
        }
        # A row seen as its block slots, for every layer: shape (num_rows, blocks_per_row, page_bytes).
        self._places = [
            [
                pool.memory.as_strided(
                    (pool.num_rows, row_format.blocks_per_row, layer.page_bytes),
                    (pool.row_stride, page_set.bytes_per_block, 1),
                    pool.memory.storage_offset() + layer.row_offset,
                )
                for layer in page_set.layers
            ]
            for page_set in row_format.sets
        ]

    def copy(self, transfer: Transfer) -> None:
        """Copy one job's bytes. Called in the thread of the job's direction; raises if the copy fails."""
        blocks, rows, slots = (torch.from_numpy(ids) for ids in (transfer.blocks, transfer.rows, transfer.slots))
        tensors = self.row_format.sets[transfer.set_id].tensors
        for pages, places in zip(tensors, self._places[transfer.set_id], strict=True):
            if transfer.direction is Direction.STORE:
                places[rows, slots] = pages[blocks]
            else:
                pages[blocks] = places[rows, slots]

    def _start(self, transfer: Transfer) -> RunningCopy:
        return _ThreadedCopy(self._threads[transfer.direction].submit(self._timed_copy, transfer))

    def _timed_copy(self, transfer: Transfer) -> tuple[bool, float]:
        start = time.perf_counter()
        try:
            self.copy(transfer)
        except Exception as error:  # noqa: BLE001 - whatever a copy raises ends its job, not the thread
            log_failure(transfer, error)
            return False, time.perf_counter() - start
        return True, time.perf_counter() - start

    def _close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown()
        self._places.clear()


class _ThreadedCopy(RunningCopy):
    def __init__(self, future: Future[tuple[bool, float]]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        wait([self._future])

    def outcome(self) -> tuple[bool, float]:
        return self._future.result()
