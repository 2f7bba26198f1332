"""The memory of a cache on one rank: one allocation, seen as the pages of its layers. Needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lockstep_kv.arguments import checked_int, flat_ints
from lockstep_kv.errors import ArgumentTypeError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import SupportsIndex

    from lockstep_kv._core import GroupSpec, Layout, LayoutTensor

__all__ = ["POISON", "CachePool"]

POISON = 0xDB
"""The byte that `poison_blocks` writes: as bfloat16 a number near -1e17, as an index far out of range."""

_MAX_BYTE = 255


@dataclass(frozen=True)
class _Run:
    """Consecutive layers of one group with one page size and one distance between layers; all in bytes."""

    offset: int
    layers: int
    layer_stride: int
    page: int
    block_stride: int


class CachePool:
    """One backing allocation of `layout.total_bytes` bytes, and views of it.

    layout, groups: what `plan_layout` returned and what it was given.
    device: where to allocate; the memory starts as zeros.
    backing: memory to use instead, a contiguous 1-D uint8 tensor of at least `layout.total_bytes` bytes; `device` is
        then not looked at.

    All views share the memory. Sets alias: a block id belongs to one set at a time, and its bytes to that set.
    """

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[GroupSpec],
        device: torch.device | str = "cpu",
        *,
        backing: torch.Tensor | None = None,
    ) -> None:
        given = [[(layer.name, layer.page_bytes) for layer in group.layers] for group in groups]
        planned: list[list[LayoutTensor]] = [[] for _ in groups]
        for tensor in layout.tensors:
            if tensor.group_id < len(planned):
                planned[tensor.group_id].append(tensor)
        if len(layout.tensors) != sum(map(len, given)) or given != [[(t.layer, t.page) for t in g] for g in planned]:
            raise ConfigError("groups must be those that the layout was planned for, got other layers or pages")
        if backing is None:
            backing = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=device)
        elif backing.dtype != torch.uint8 or backing.ndim != 1 or not backing.is_contiguous():
            shape = tuple(backing.shape)
            raise ConfigError(f"backing must be a contiguous 1-D uint8 tensor, got {backing.dtype} of shape {shape}")
        elif backing.numel() < layout.total_bytes:
            raise ConfigError(f"backing must hold {layout.total_bytes} bytes, got {backing.numel()}")

        self.layout = layout
        self.groups = tuple(groups)
        self.backing = backing
        self._layers = {tensor.layer: tensor for tensor in layout.tensors}
        self._runs = [_runs(group) for group in planned]

    @property
    def num_blocks(self) -> int:
        """Blocks, the null block included."""
        return self.layout.num_blocks

    def layer(self, name: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """View a layer's pages, shape (num_blocks, block_size, record): one record of `dtype` elements per token.

        Contiguous where the layout puts the layer's pages one after the other. Raises `ConfigError` if there is no such
        layer or its records are not whole elements.
        """
        tensor, block_size, record, item = self._geometry(name, dtype)
        shape = (self.num_blocks, block_size, record // item)
        return self._view(dtype, shape, (tensor.block_stride // item, record // item, 1), tensor.offset)

    def kernel_pages(
        self, name: str, kernel_block_size: SupportsIndex, dtype: torch.dtype = torch.uint8
    ) -> torch.Tensor:
        """View a layer's pages as kernels read them, shape (num_blocks * k, kernel_block_size, record).

        k = block_size / kernel_block_size; block b is kernel pages b * k .. b * k + k - 1. Raises `ConfigError` if
        `kernel_block_size` does not divide the layer's block_size, or if k > 1 and the layout puts other layers' pages
        between this layer's, so that kernel pages have no single stride.
        """
        tensor, block_size, record, item = self._geometry(name, dtype)
        kernel = checked_int("kernel_block_size", kernel_block_size, low=1)
        if block_size % kernel:
            raise ConfigError(f"kernel_block_size must divide block_size {block_size} of layer {name!r}, got {kernel}")
        split = block_size // kernel
        if split > 1 and tensor.block_stride != tensor.page:
            raise ConfigError(
                f"kernel_block_size must be {block_size} for layer {name!r}, got {kernel}: its pages of {tensor.page} "
                f"bytes lie {tensor.block_stride} bytes apart"
            )
        shape = (self.num_blocks * split, kernel, record // item)
        stride = tensor.block_stride if split == 1 else kernel * record
        return self._view(dtype, shape, (stride // item, record // item, 1), tensor.offset)

    def group(self, group_id: SupportsIndex) -> torch.Tensor:
        """View all pages of a group as bytes, shape (num_layers, num_blocks, page_bytes).

        Raises `ConfigError` if the group's layers differ in page_bytes.
        """
        at = checked_int("group_id", group_id, low=0, high=len(self.groups) - 1)
        if len(self._runs[at]) != 1:
            pages = sorted({layer.page_bytes for layer in self.groups[at].layers})
            raise ConfigError(f"group_id {at} has layers with pages of {pages} bytes, so it has no single view")
        return self._run_view(self._runs[at][0])

    def zero_blocks(self, block_ids: Sequence[SupportsIndex], group_ids: Sequence[SupportsIndex] | None = None) -> None:
        """Write zeros to the pages of these blocks, in all groups or in `group_ids`.

        Raises `ConfigError` for the null block and for ids out of range, before anything is written.
        """
        self._fill(block_ids, group_ids, 0)

    def poison_blocks(
        self,
        block_ids: Sequence[SupportsIndex],
        group_ids: Sequence[SupportsIndex] | None = None,
        pattern: SupportsIndex = POISON,
    ) -> None:
        """Write the byte `pattern` all over the pages of these blocks, so that a read before a write shows.

        Raises `ConfigError` as `zero_blocks` does, and for a pattern outside 0..255.
        """
        self._fill(block_ids, group_ids, checked_int("pattern", pattern, low=0, high=_MAX_BYTE))

    def is_poisoned(
        self,
        block_ids: Sequence[SupportsIndex],
        group_ids: Sequence[SupportsIndex] | None = None,
        pattern: SupportsIndex = POISON,
    ) -> list[bool]:
        """Tell for each block whether every byte of its pages is still `pattern`. Waits for the device.

        Raises `ConfigError` as `poison_blocks` does.
        """
        byte = checked_int("pattern", pattern, low=0, high=_MAX_BYTE)
        ids = self._checked_blocks(block_ids)
        poisoned = torch.ones(len(ids), dtype=torch.bool, device=self.backing.device)
        for view in self._run_views(group_ids):
            for layer in view:
                poisoned &= (layer[ids] == byte).all(dim=1)
        return [bool(flag) for flag in poisoned.tolist()]

    def _fill(self, block_ids: Any, group_ids: Any, byte: int) -> None:
        ids = self._checked_blocks(block_ids)
        views = list(self._run_views(group_ids))
        for view in views:
            view.index_fill_(1, ids, byte)

    def _checked_blocks(self, block_ids: Any) -> torch.Tensor:
        """Return the ids on the pool's device, none of them the null block or out of range."""
        if isinstance(block_ids, torch.Tensor):
            if block_ids.dtype.is_floating_point or block_ids.dtype.is_complex or block_ids.dtype == torch.bool:
                raise ArgumentTypeError(f"block_ids must be ints, got a tensor of {block_ids.dtype}")
            block_ids = block_ids.cpu().numpy()
        ids = flat_ints("block_ids", block_ids, low=1, high=self.num_blocks - 1)
        return torch.tensor(ids, device=self.backing.device)

    def _run_views(self, group_ids: Any) -> Iterator[torch.Tensor]:
        """View the runs of all groups, or of the groups with these ids."""
        if group_ids is None:
            group_ids = range(len(self.groups))
        for at in flat_ints("group_ids", group_ids, low=0, high=len(self.groups) - 1):
            for run in self._runs[at]:
                yield self._run_view(run)

    def _run_view(self, run: _Run) -> torch.Tensor:
        shape = (run.layers, self.num_blocks, run.page)
        return self._view(torch.uint8, shape, (run.layer_stride, run.block_stride, 1), run.offset)

    def _geometry(self, name: str, dtype: torch.dtype) -> tuple[LayoutTensor, int, int, int]:
        """Return a layer's place, its block_size, and the bytes of a record and of an element; all whole elements."""
        if not isinstance(name, str):
            raise ArgumentTypeError(f"name must be a str, got {type(name).__name__}")
        if not isinstance(dtype, torch.dtype):
            raise ArgumentTypeError(f"dtype must be a torch.dtype, got {type(dtype).__name__}")
        tensor = self._layers.get(name)
        if tensor is None:
            raise ConfigError(f"name {name!r} is not a layer of this layout")
        block_size = self.groups[tensor.group_id].block_size
        if tensor.page % block_size:
            raise ConfigError(f"layer {name!r}: pages of {tensor.page} bytes do not hold {block_size} equal records")
        record = tensor.page // block_size
        for what, size in (
            ("records of", record),
            ("pages at multiples of", tensor.block_stride),
            ("a first page at", tensor.offset),
            ("memory at", self.backing.storage_offset()),
        ):
            if size % dtype.itemsize:
                raise ConfigError(f"layer {name!r} has {what} {size} bytes: no whole {dtype} of {dtype.itemsize} bytes")
        return tensor, block_size, record, dtype.itemsize

    def _view(
        self, dtype: torch.dtype, shape: tuple[int, int, int], stride: tuple[int, int, int], offset: int
    ) -> torch.Tensor:
        """View the memory with a stride in elements and an offset in bytes."""
        whole = self.backing.numel() // dtype.itemsize * dtype.itemsize
        elements = self.backing[:whole].view(dtype)
        return elements.as_strided(shape, stride, elements.storage_offset() + offset // dtype.itemsize)


def _runs(tensors: list[LayoutTensor]) -> list[_Run]:
    """Gather the layers of one group in as few runs as possible."""
    runs: list[_Run] = []
    for tensor in tensors:
        last = runs[-1] if runs else None
        if last is not None and (last.page, last.block_stride) == (tensor.page, tensor.block_stride):
            stride = last.layer_stride if last.layers > 1 else tensor.offset - last.offset
            if tensor.offset == last.offset + last.layers * stride:
                runs[-1] = _Run(last.offset, last.layers + 1, stride, last.page, last.block_stride)
                continue
        # With one layer the distance between layers is not used, but must be a valid stride.
        runs.append(_Run(tensor.offset, 1, tensor.page, tensor.page, tensor.block_stride))
    return runs
