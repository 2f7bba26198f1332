"""The ways to copy between a GPU and page-locked memory, and the streams they are put on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from lockstep_kv.errors import ConfigError
from lockstep_kv.offload.cupy_access import cupy_module
from lockstep_kv.offload.dma_path import DmaPath
from lockstep_kv.offload.kernel_path import KernelPath

if TYPE_CHECKING:
    from lockstep_kv.offload.host_pool import HostPool
    from lockstep_kv.offload.row_format import RowFormat
    from lockstep_kv.offload.transfers import Pieces, Transfer

__all__ = ["CopyPath", "CopyStream", "copy_stream", "usable_paths"]

_logger = logging.getLogger(__name__)


class CopyStream(NamedTuple):
    """One stream: CuPy owns it, torch has a view of it."""

    cupy: Any
    torch: torch.cuda.Stream


class CopyPath(Protocol):
    """A way to copy."""

    def enqueue(self, transfer: Transfer, pieces: Pieces, stream: CopyStream) -> object:
        """Put a job's copy on a stream; return what must be kept until it is done. Raises if that fails."""


def copy_stream(device: torch.device) -> CopyStream:
    """Return a new stream that does not wait for the default stream."""
    cupy = cupy_module()
    with cupy.cuda.Device(device.index):
        owner = cupy.cuda.Stream(non_blocking=True)
    return CopyStream(owner, torch.cuda.ExternalStream(owner.ptr, device=device))  # type: ignore[no-untyped-call]


def usable_paths(row_format: RowFormat, pool: HostPool) -> dict[str, CopyPath]:
    """Return the ways to copy that work here, by name: "dma", and "kernel" where the GPU reaches the host's memory."""
    paths: dict[str, CopyPath] = {"dma": DmaPath()}
    try:
        paths["kernel"] = KernelPath(row_format, pool)
    except ConfigError as error:
        _logger.warning("copies by kernels are not possible: %s", error)
    return paths
