"""What the bytes of a block are: the pages of its set's layers on the device, packed into rows of host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep_kv.arguments import checked_int
from lockstep_kv.errors import ArgumentTypeError, ConfigError
from lockstep_kv.offload.host_pool import ROW_ALIGNMENT, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import SupportsIndex

__all__ = ["LayerPages", "PageSet", "RowFormat"]


# The dimensions of a layer's pages.
_BLOCK_AND_BYTE = 2


@dataclass(frozen=True)
class LayerPages:
    """Where the pages of one layer lie, all in bytes.

    The page of block b is the `page_bytes` bytes at `address + b * block_stride`; in a block's place in a row it
    starts `row_offset` bytes in. `storage` is the address of the allocation that the pages lie in.
    """

    address: int
    block_stride: int
    page_bytes: int
    row_offset: int
    storage: int


class PageSet:
    """The layers that share block ids, and how the pages of one block are packed: one after the other, in order.

    tensors: views of the pages as bytes, each of shape (num_blocks, page_bytes).
    """

    def __init__(self, name: str, tensors: Any) -> None:
        if not isinstance(tensors, list | tuple):
            raise ArgumentTypeError(f"{name} must be a list of tensors, got {type(tensors).__name__}")
        if not tensors:
            raise ConfigError(f"{name} must hold a tensor, got none")
        self.tensors = tuple(_pages_as_bytes(f"{name}[{at}]", tensor) for at, tensor in enumerate(tensors))
        self.num_blocks = self.tensors[0].shape[0]
        layers, offset = [], 0
        for at, tensor in enumerate(self.tensors):
            blocks, page = tensor.shape
            if blocks != self.num_blocks:
                raise ConfigError(f"{name}[{at}] must have {self.num_blocks} blocks as {name}[0] has, got {blocks}")
            storage = tensor.untyped_storage().data_ptr()
            layers.append(LayerPages(tensor.data_ptr(), tensor.stride(0), page, offset, storage))
            offset += page
        self.layers = tuple(layers)
        self.bytes_per_block = offset


class RowFormat:
    """The sets of a cache on one rank, and the row of host memory that can hold blocks of any one of them.

    sets: for each set a list with one tensor per layer, of shape (num_blocks, page) and any dtype. A page's elements
        are contiguous; pages may lie any distance apart. All on one device, a CPU or a CUDA device. The tensors are
        used in place, never copied.
    blocks_per_row: block slots in one row. Slot j of a row starts `j * bytes_per_block` bytes into the row, where
        `bytes_per_block` is that of the set the row is used for.

    `row_bytes` is what the largest set needs, rounded up to `ROW_ALIGNMENT`.
    """

    def __init__(self, sets: Sequence[Sequence[torch.Tensor]], *, blocks_per_row: SupportsIndex) -> None:
        if not isinstance(sets, list | tuple):
            raise ArgumentTypeError(f"sets must be a list of lists of tensors, got {type(sets).__name__}")
        if not sets:
            raise ConfigError("sets must hold a set, got none")
        self.blocks_per_row = checked_int("blocks_per_row", blocks_per_row, low=1)
        self.sets = tuple(PageSet(f"sets[{at}]", tensors) for at, tensors in enumerate(sets))
        self.device = self.sets[0].tensors[0].device
        for at, page_set in enumerate(self.sets):
            for layer, tensor in enumerate(page_set.tensors):
                if tensor.device != self.device:
                    raise ConfigError(f"sets[{at}][{layer}] must be on {self.device}, got {tensor.device}")
        largest = max(page_set.bytes_per_block for page_set in self.sets)
        self.row_bytes = round_up(self.blocks_per_row * largest, ROW_ALIGNMENT)


def _pages_as_bytes(name: str, tensor: Any) -> torch.Tensor:
    """Return the same pages as uint8, shape (num_blocks, page_bytes)."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.device.type not in {"cpu", "cuda"} or tensor.layout != torch.strided:
        raise ConfigError(f"{name} must be a plain tensor on a CPU or CUDA device, got {tensor.layout} {tensor.device}")
    shape, stride = tuple(tensor.shape), tensor.stride()
    if tensor.ndim != _BLOCK_AND_BYTE or 0 in shape:
        raise ConfigError(f"{name} must have shape (num_blocks, page), got {shape}")
    # A stride along a dimension of one element is never used.
    if shape[1] > 1 and stride[1] != 1:
        raise ConfigError(f"{name} must have contiguous pages, got strides {stride} of shape {shape}")
    if shape[0] > 1 and stride[0] < shape[1]:
        raise ConfigError(f"{name} must have pages that do not overlap, got strides {stride} of shape {shape}")
    return tensor.detach().as_strided(shape, (stride[0], 1)).view(torch.uint8)
