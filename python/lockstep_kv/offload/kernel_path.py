"""Copies between a GPU and page-locked memory by our own kernels."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

import numpy as np
import torch

from lockstep_kv.errors import ConfigError
from lockstep_kv.offload.cupy_access import cupy_module
from lockstep_kv.offload.transfers import Direction

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lockstep_kv.offload.copy_paths import CopyStream
    from lockstep_kv.offload.host_pool import HostPool
    from lockstep_kv.offload.row_format import PageSet, RowFormat
    from lockstep_kv.offload.transfers import Pieces, Transfer

__all__ = ["SLICE_BYTES", "KernelPath", "kernel_arguments", "kernel_source", "member_records", "slices_per_page"]

SLICE_BYTES = 16 * 1024
"""What one thread block copies at a time: each of 256 threads four words of 16 bytes. A multiple of 16."""

_THREADS = 256
# Copies wait for the bus most of the time, so few thread blocks fill it, and other work keeps the GPU's processors.
_THREAD_BLOCKS = 64


class KernelPath:
    """Copies page by page with kernels that read or write the host's memory over the bus.

    Raises `ConfigError` where the GPU cannot reach page-locked memory by the host's addresses.
    """

    def __init__(self, row_format: RowFormat, pool: HostPool) -> None:
        cupy = cupy_module()
        runtime = cupy.cuda.runtime
        same_address = runtime.cudaDevAttrCanUseHostPointerForRegisteredMem
        if not runtime.deviceGetAttribute(same_address, row_format.device.index):
            raise ConfigError(f"{row_format.device} cannot reach page-locked memory by the host's addresses")
        source = kernel_source()
        names = {Direction.STORE: "store_pages", Direction.LOAD: "load_pages"}
        self._kernels = {way: cupy.RawKernel(source, name, ("-std=c++17",)) for way, name in names.items()}
        self._host = pool.memory.data_ptr()
        self._device = row_format.device
        self._members = [torch.from_numpy(member_records(one)).to(self._device) for one in row_format.sets]
        self._slices = [slices_per_page(one) for one in row_format.sets]

    def enqueue(self, transfer: Transfer, pieces: Pieces, stream: CopyStream) -> object:
        """Put a job's copy on a stream; return what must be kept until it is done."""
        del pieces  # Kernels do not gain from longer pieces.
        count = len(transfer.blocks)
        given = torch.from_numpy(np.stack((transfer.blocks, transfer.host_offsets))).pin_memory()
        with torch.cuda.stream(stream.torch):
            job = given.to(self._device, non_blocking=True)
        members = self._members[transfer.set_id]
        slices = self._slices[transfer.set_id]
        arguments = kernel_arguments(
            members=members.data_ptr(),
            num_members=len(members),
            blocks=job[0].data_ptr(),
            host_offsets=job[1].data_ptr(),
            num_blocks=count,
            host=self._host,
            slices=slices,
            slice_bytes=SLICE_BYTES,
        )
        thread_blocks = min(count * len(members) * slices, _THREAD_BLOCKS)
        with stream.cupy:
            self._kernels[transfer.direction]((thread_blocks,), (_THREADS,), arguments)
        return given, job


def kernel_source() -> str:
    """Return the source of the kernels `store_pages` and `load_pages`."""
    return resources.files("lockstep_kv.offload").joinpath("copy_pages.cu").read_text(encoding="utf-8")


def kernel_arguments(
    *,
    members: int,
    num_members: int,
    blocks: int,
    host_offsets: int,
    num_blocks: int,
    host: int,
    slices: int,
    slice_bytes: int,
) -> tuple[np.int64, ...]:
    """Return the arguments of both kernels, 8 bytes each; `members`, `blocks`, `host_offsets`, `host` are addresses."""
    given = (members, num_members, blocks, host_offsets, num_blocks, host, slices, slice_bytes)
    return tuple(np.int64(one) for one in given)


def member_records(page_set: PageSet) -> NDArray[np.int64]:
    """Return the kernels' `Member` records of a set, one row per layer."""
    rows = [(layer.address, layer.block_stride, layer.page_bytes, layer.row_offset) for layer in page_set.layers]
    return np.array(rows, dtype=np.int64)


def slices_per_page(page_set: PageSet, slice_bytes: int = SLICE_BYTES) -> int:
    """Return how many slices the longest page of a set has."""
    return -(-max(layer.page_bytes for layer in page_set.layers) // slice_bytes)
