"""Copies between a GPU and page-locked memory by the GPU's copy engines (DMA)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from lockstep_kv.offload.cupy_access import cupy_module
from lockstep_kv.offload.transfers import Direction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lockstep_kv.offload.copy_paths import CopyStream
    from lockstep_kv.offload.transfers import Pieces, Transfer

__all__ = ["CopyAttributes", "DmaPath", "batch_prototype"]

# Drivers were seen to fail on batches of about 50,000 pieces.
_BATCH_PIECES = 4096
# The first CUDA version with batched copies; the form of the call that it has, later drivers have too.
_BATCH_VERSION = 12_080
# The driver's CU_MEMCPY_SRC_ACCESS_ORDER_STREAM.
_IN_STREAM_ORDER = 1


class DmaPath:
    """Copies piece by piece with the GPU's copy engines; in batches where the driver has them (CUDA 12.8 and later)."""

    def __init__(self) -> None:
        self._batch = _batch_function()

    def enqueue(self, transfer: Transfer, pieces: Pieces, stream: CopyStream) -> object:
        """Put a job's copy on a stream; return what must be kept until it is done."""
        store = transfer.direction is Direction.STORE
        to, source = (pieces.host, pieces.device) if store else (pieces.device, pieces.host)
        pointer = stream.torch.cuda_stream
        if self._batch is None:
            runtime = cupy_module().cuda.runtime
            kind = runtime.memcpyDeviceToHost if store else runtime.memcpyHostToDevice
            for one_to, one_from, size in zip(to.tolist(), source.tolist(), pieces.sizes.tolist(), strict=True):
                runtime.memcpyAsync(one_to, one_from, size, kind, pointer)
            return pieces
        for start in range(0, len(to), _BATCH_PIECES):
            part = slice(start, start + _BATCH_PIECES)
            _copy_batch(self._batch, to[part], source[part], pieces.sizes[part], pointer)
        return pieces


class _Location(ctypes.Structure):
    """The driver's CUmemLocation. Ignored for memory like ours."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """The driver's CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def _copy_batch(
    function: Any, to: NDArray[np.int64], source: NDArray[np.int64], sizes: NDArray[np.int64], stream: int
) -> None:
    """Put a batch of copies on a stream. Raises `RuntimeError` with the driver's error code if it refuses."""
    attributes = CopyAttributes(_IN_STREAM_ORDER)
    # The attributes apply from the first copy on.
    first = ctypes.c_size_t(0)
    failed = ctypes.c_size_t(0)
    code = function(
        to.ctypes.data,
        source.ctypes.data,
        sizes.ctypes.data,
        len(sizes),
        ctypes.byref(attributes),
        ctypes.byref(first),
        1,
        ctypes.byref(failed),
        stream,
    )
    if code:
        raise RuntimeError(f"cuMemcpyBatchAsync of {len(sizes)} pieces failed with error {code}")


def _batch_function() -> Any:
    """Return the driver's batched copy, or None where the driver has none.

    It is asked for by version: later drivers have a second form of the call under the same name.
    """
    try:
        find = ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2
    except (OSError, AttributeError):
        return None
    find.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    address, status = ctypes.c_void_p(), ctypes.c_int()
    code = find(b"cuMemcpyBatchAsync", ctypes.byref(address), _BATCH_VERSION, 0, ctypes.byref(status))
    if code or address.value is None:
        return None
    return batch_prototype()(address.value)


def batch_prototype() -> Any:
    """Return the type of the driver's batched copy, made by an address into the function that is there."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    # To, from, sizes, count, attributes, where each applies from, their number, which copy failed, stream.
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
