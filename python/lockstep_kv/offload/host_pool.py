"""Memory of the host, cut into rows of one size. Page-locked for a GPU, plain for a cache on the CPU. Needs torch."""

from __future__ import annotations

import contextlib
import mmap
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep_kv.arguments import MAX_INT64, checked_int
from lockstep_kv.errors import ArgumentTypeError, ConfigError, LockstepKVError
from lockstep_kv.offload.cupy_access import cupy_module

if TYPE_CHECKING:
    from typing import SupportsIndex

__all__ = ["ROW_ALIGNMENT", "HostPool", "round_up"]

ROW_ALIGNMENT = 16
"""Every row starts at a multiple of so many bytes: the widest access of the copy kernels."""

_MAX_ALIGNMENT = 2**30
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class HostPool:
    """Rows of host memory for one rank.

    num_bytes: memory to take at most; holds `num_bytes // row_stride` rows.
    row_bytes: bytes of one row that can be used. `row_stride`, the distance between rows, is `row_bytes` rounded up to
        `ROW_ALIGNMENT`.
    pinned: page-lock the memory and let the GPU reach it by the same address; needs a CUDA device and CuPy.
    alignment: the first row starts at a multiple of so many bytes; a power of two, at least `ROW_ALIGNMENT`.

    Raises `ConfigError` naming the value if it holds no row, is more than the host has left, or cannot be page-locked.
    The memory starts as zeros. Plain memory is taken from the system when it is first written.
    """

    def __init__(
        self, num_bytes: SupportsIndex, row_bytes: SupportsIndex, *, pinned: bool, alignment: SupportsIndex = 4096
    ) -> None:
        num_bytes = checked_int("num_bytes", num_bytes, low=1, high=MAX_INT64)
        self.row_bytes = checked_int("row_bytes", row_bytes, low=1, high=MAX_INT64 - ROW_ALIGNMENT)
        alignment = checked_int("alignment", alignment, low=ROW_ALIGNMENT, high=_MAX_ALIGNMENT)
        if alignment & (alignment - 1):
            raise ConfigError(f"alignment must be a power of two, got {alignment}")
        if not isinstance(pinned, bool):
            raise ArgumentTypeError(f"pinned must be a bool, got {type(pinned).__name__}")
        self.row_stride = round_up(self.row_bytes, ROW_ALIGNMENT)
        self.num_rows = num_bytes // self.row_stride
        if self.num_rows == 0:
            raise ConfigError(f"num_bytes must hold one row of {self.row_stride} bytes, got {num_bytes}")
        left = host_bytes_left()
        if left is not None and num_bytes > left:
            raise ConfigError(f"num_bytes must fit in the host's free memory of {left} bytes, got {num_bytes}")
        if pinned and not torch.cuda.is_available():
            raise ConfigError("pinned must be False where there is no CUDA device, got True")

        self.pinned = pinned
        used = self.num_rows * self.row_stride
        memory = torch.frombuffer(_mapped(used + alignment), dtype=torch.uint8)
        start = -memory.data_ptr() % alignment
        self._memory: torch.Tensor | None = memory[start : start + used]
        if pinned:
            _page_lock(self._memory)

    @property
    def memory(self) -> torch.Tensor:
        """All rows, 1-D uint8, `num_rows * row_stride` bytes. Raises `LockstepKVError` after `close`."""
        if self._memory is None:
            raise LockstepKVError("the host pool is closed")
        return self._memory

    def row(self, index: SupportsIndex) -> torch.Tensor:
        """View one row, 1-D uint8 of `row_bytes` bytes. Raises `ConfigError` for an index out of range."""
        index = checked_int("index", index, low=0, high=self.num_rows - 1)
        return self.memory[index * self.row_stride :][: self.row_bytes]

    def close(self) -> None:
        """Give the memory back; plain memory that is still viewed stays until the last view goes.

        No copy may be under way. Closing twice is allowed.
        """
        memory, self._memory = self._memory, None
        if memory is not None and self.pinned:
            _page_unlock(memory)


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `number`."""
    return -(-number // multiple) * multiple


def host_bytes_left() -> int | None:
    """Return how much memory this process can still take without swapping, or None where the system does not say."""
    limits = []
    with contextlib.suppress(OSError, ValueError, StopIteration, IndexError):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        limits.append(int(line.split()[1]) * 1024)
    # A container's limit. Without one the file says "max", which is no number.
    with contextlib.suppress(OSError, ValueError):
        maximum = int((_CGROUP / "memory.max").read_text())
        limits.append(max(0, maximum - int((_CGROUP / "memory.current").read_text())))
    return min(limits) if limits else None


def _mapped(num_bytes: int) -> mmap.mmap:
    """Map memory of zeros. It is given back when nothing refers to it any more."""
    try:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"num_bytes: the system refuses to map {num_bytes} bytes: {error}") from None


def _page_lock(memory: torch.Tensor) -> None:
    runtime = _cuda_runtime()
    # Valid for all devices, and mapped into their address space.
    flags = runtime.hostAllocPortable | runtime.hostAllocMapped
    try:
        runtime.hostRegister(memory.data_ptr(), memory.numel(), flags)
    except runtime.CUDARuntimeError as error:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit} bytes"
        raise ConfigError(
            f"num_bytes: cannot page-lock {memory.numel()} bytes: {error} (the limit on locked memory is {allowed})"
        ) from None


def _page_unlock(memory: torch.Tensor) -> None:
    _cuda_runtime().hostUnregister(memory.data_ptr())


def _cuda_runtime() -> Any:
    # CuPy's binding rather than torch's: it clears the error of a call that failed, which would otherwise come up in
    # the next unrelated call.
    return cupy_module().cuda.runtime
