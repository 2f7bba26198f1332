"""The copy engine for a cache on a GPU: a stream per direction beside the compute stream. Needs CuPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lockstep_kv.errors import ConfigError
from lockstep_kv.offload.copy_engine import CopyEngine, RunningCopy, log_failure
from lockstep_kv.offload.copy_paths import copy_stream, usable_paths
from lockstep_kv.offload.cupy_access import cupy_module
from lockstep_kv.offload.path_cache import PathCache, default_cache_file
from lockstep_kv.offload.path_choice import PathChooser
from lockstep_kv.offload.path_measurement import PathMeasurement, machine_name
from lockstep_kv.offload.transfers import Direction, Pieces

if TYPE_CHECKING:
    from lockstep_kv.offload.host_pool import HostPool
    from lockstep_kv.offload.row_format import RowFormat
    from lockstep_kv.offload.transfers import Transfer

__all__ = ["GpuCopyEngine"]


class GpuCopyEngine(CopyEngine):
    """Copies between tensors on a CUDA device and page-locked rows.

    Stores and loads both start after what the caller's current stream was given before. Everything that reads loaded
    blocks must come after the load: by `wait`, or by `make_compute_wait`, which only orders the streams.

    chooser: which of the paths "dma" and "kernel" a job takes; None measures them on this machine, once per machine.
    """

    def __init__(self, row_format: RowFormat, pool: HostPool, *, chooser: PathChooser | None = None) -> None:
        super().__init__(row_format, pool)
        self.device = row_format.device
        if self.device.type != "cuda":
            raise ConfigError(f"row_format must have its tensors on a CUDA device, got {self.device}")
        if not pool.pinned:
            raise ConfigError("pool must be page-locked, got plain memory")
        self._paths = usable_paths(row_format, pool)
        if chooser is None:
            with PathMeasurement(self.device) as measurement:
                file = default_cache_file()
                cache = PathCache(file) if file is not None else None
                machine = machine_name(self.device)
                chooser = PathChooser(tuple(self._paths), measurement.seconds, machine=machine, cache=cache)
        unknown = sorted(set(chooser.paths) - set(self._paths))
        if unknown:
            raise ConfigError(f"chooser must choose among {sorted(self._paths)}, got {unknown}")
        self._chooser = chooser
        self._streams = {direction: copy_stream(self.device) for direction in Direction}

    def _start(self, transfer: Transfer) -> RunningCopy:
        stream = self._streams[transfer.direction]
        pieces = Pieces.of(transfer, self.row_format.sets[transfer.set_id], self.pool.memory.data_ptr())
        with torch.cuda.device(self.device), cupy_module().cuda.Device(self.device.index):
            running = _StreamedCopy(transfer, self.device)
            try:
                # Stores read what was computed; loads overwrite blocks that may still be read, or zeroed.
                stream.torch.wait_stream(torch.cuda.current_stream(self.device))
                running.start.record(stream.torch)
                path = self._chooser.choose(transfer.direction, len(pieces.sizes), transfer.num_bytes)
                running.keep = self._paths[path].enqueue(transfer, pieces, stream)
            except Exception as error:  # noqa: BLE001 - whatever a copy raises ends its job, not the engine
                running.fail(error)
            # After a failure too: some of the pieces may be under way.
            running.record_end(stream.torch)
        return running

    def _close(self) -> None:
        self._paths.clear()
        self._streams.clear()


class _StreamedCopy(RunningCopy):
    def __init__(self, transfer: Transfer, device: torch.device) -> None:
        self.keep: object = None
        self.start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._transfer = transfer
        self._device = device
        self._failed = False

    def fail(self, error: Exception) -> None:
        """Note and log that the copy failed; once, whatever else goes wrong after that."""
        if not self._failed:
            self._failed = True
            log_failure(self._transfer, error)

    def record_end(self, stream: torch.cuda.Stream) -> None:
        try:
            self._end.record(stream)
        except Exception as error:  # noqa: BLE001 - a broken device ends its jobs, not the engine
            self.fail(error)

    def done(self) -> bool:
        try:
            return bool(self._end.query())  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - a broken device ends its jobs, not the engine
            self.fail(error)
            return True

    def wait(self) -> None:
        try:
            self._end.synchronize()
        except Exception as error:  # noqa: BLE001 - a broken device ends its jobs, not the engine
            self.fail(error)

    def make_compute_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)

    def outcome(self) -> tuple[bool, float]:
        self.keep = None
        if self._failed:
            return False, 0.0
        try:
            return True, self.start.elapsed_time(self._end) / 1000
        except Exception as error:  # noqa: BLE001 - a broken device ends its jobs, not the engine
            self.fail(error)
            return False, 0.0
