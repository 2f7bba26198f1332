"""Times the ways to copy on a GPU, on scratch memory of their own."""

from __future__ import annotations

import time
from typing import Self

import numpy as np
import torch

import lockstep_kv
from lockstep_kv.offload.copy_paths import CopyStream, copy_stream, usable_paths
from lockstep_kv.offload.cupy_access import cupy_module
from lockstep_kv.offload.host_pool import HostPool
from lockstep_kv.offload.path_choice import MEASURED_JOBS, JobShape
from lockstep_kv.offload.row_format import RowFormat
from lockstep_kv.offload.transfers import Pieces, plan_transfer

__all__ = ["PathMeasurement", "machine_name"]

_REPEATS = 3


class PathMeasurement:
    """Copies jobs of a given shape on a CUDA device.

    Takes scratch memory for the largest of `MEASURED_JOBS` when first asked for a time, about 65 MiB on the device and
    half of that on the host, and gives it back at the end of `with`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch: tuple[torch.Tensor, HostPool, CopyStream] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._scratch is not None:
            self._scratch[1].close()
            self._scratch = None

    def seconds(self, path: str, shape: JobShape) -> float:
        """Return the shortest time that a job took, from its submission to its end."""
        memory, pool, stream = self._scratch_memory()
        row_format, blocks = _scattered(memory, shape)
        one_way = usable_paths(row_format, pool)[path]
        count = len(blocks)
        slots = np.arange(count)
        transfer = plan_transfer(row_format, pool, shape.direction, 0, blocks, np.zeros_like(slots), slots)
        taken = []
        with torch.cuda.device(self._device), cupy_module().cuda.Device(self._device.index):
            # The first time compiles and warms up.
            for _ in range(1 + _REPEATS):
                start = time.perf_counter()
                pieces = Pieces.of(transfer, row_format.sets[0], pool.memory.data_ptr())
                kept = one_way.enqueue(transfer, pieces, stream)
                stream.torch.synchronize()
                taken.append(time.perf_counter() - start)
                del kept
        return min(taken[1:])

    def _scratch_memory(self) -> tuple[torch.Tensor, HostPool, CopyStream]:
        if self._scratch is None:
            on_host = max(shape.piece_bytes * shape.num_pieces for shape in MEASURED_JOBS)
            on_device = max(shape.piece_bytes * (2 * shape.num_pieces + 1) for shape in MEASURED_JOBS)
            memory = torch.zeros(on_device, dtype=torch.uint8, device=self._device)
            torch.cuda.synchronize(self._device)
            self._scratch = memory, HostPool(on_host, on_host, pinned=True), copy_stream(self._device)
        return self._scratch


def machine_name(device: torch.device) -> str:
    """Return what measurements are valid for: the device, the driver and this package's version."""
    driver = cupy_module().cuda.runtime.driverGetVersion()
    return f"{torch.cuda.get_device_name(device)}, driver {driver}, lockstep-kv {lockstep_kv.__version__}"


def _scattered(memory: torch.Tensor, shape: JobShape) -> tuple[RowFormat, np.ndarray]:
    """Return a set of one layer in this memory, and blocks with a gap between any two, so that no pieces merge."""
    num_blocks = 2 * shape.num_pieces + 1
    pages = memory[: num_blocks * shape.piece_bytes].view(num_blocks, shape.piece_bytes)
    return RowFormat([[pages]], blocks_per_row=shape.num_pieces), np.arange(1, num_blocks, 2)
