"""From token positions to cache slots on one rank, and the rows of block ids that the workers keep.

One block id stands for a *span* of `block_size * kv_shards` tokens. On one rank its page holds `block_size` of them:
those whose run of `interleave` tokens is this rank's turn. A slot counts records from the start of a layer's pages, so
a page that kernels read as several kernel pages (`kernel_block_size` tokens each) has the same slots in both readings:
`block_id * block_size + local == kernel_id * kernel_block_size + local % kernel_block_size`.

Every function takes sequences of ints, numpy arrays or torch tensors. A torch tensor in gives a torch tensor out on the
same device, without waiting for the device; everything else gives a numpy array. Results are int64.

Wrong types raise `ArgumentTypeError`, wrong values `ConfigError`; both name the argument and the value. Values inside
a tensor that is not on the CPU are not looked at, because that would wait for the device: there negative block ids
count as null and negative lengths as 0.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from lockstep_kv.arguments import MAX_INT64, checked_int, host_ints
from lockstep_kv.errors import ArgumentTypeError, ConfigError

if TYPE_CHECKING:
    from typing import SupportsIndex

    import torch
    from numpy.typing import ArrayLike, NDArray

__all__ = [
    "NULL_BLOCK",
    "PAD",
    "global_positions",
    "kernel_block_ids",
    "local_seq_lens",
    "padded_table_width",
    "slot_mapping",
    "table_row",
    "table_width",
]

PAD = -1
"""The slot of a token that this rank does not store."""

NULL_BLOCK = 0
"""The block id that stands for no block."""

# The widest kernel page, in tokens, that the indexer's kernels read at once.
_INDEXER_KERNEL_TOKENS = 128


@overload
def slot_mapping(
    positions: torch.Tensor,
    block_ids: torch.Tensor | ArrayLike,
    *,
    block_size: SupportsIndex,
    kernel_block_size: SupportsIndex,
    kv_shards: SupportsIndex,
    rank: SupportsIndex,
    interleave: SupportsIndex = 1,
) -> torch.Tensor: ...
@overload
def slot_mapping(
    positions: ArrayLike,
    block_ids: torch.Tensor,
    *,
    block_size: SupportsIndex,
    kernel_block_size: SupportsIndex,
    kv_shards: SupportsIndex,
    rank: SupportsIndex,
    interleave: SupportsIndex = 1,
) -> torch.Tensor: ...
@overload
def slot_mapping(
    positions: ArrayLike,
    block_ids: ArrayLike,
    *,
    block_size: SupportsIndex,
    kernel_block_size: SupportsIndex,
    kv_shards: SupportsIndex,
    rank: SupportsIndex,
    interleave: SupportsIndex = 1,
) -> NDArray[np.int64]: ...
def slot_mapping(
    positions: Any,
    block_ids: Any,
    *,
    block_size: SupportsIndex,
    kernel_block_size: SupportsIndex,
    kv_shards: SupportsIndex,
    rank: SupportsIndex,
    interleave: SupportsIndex = 1,
) -> Any:
    """Map the tokens at `positions` to slots on `rank`.

    positions: token positions, any shape; negative ones are padding.
    block_ids: manager block ids, the row of one request, shape (blocks,), or a row for each position, shape
        (*positions, blocks); 0 is the null block.
    block_size: tokens of one block on one rank.
    kernel_block_size: tokens of one kernel page; divides `block_size`.
    kv_shards: distinct shards of the group; `rank` holds shard `rank % kv_shards`.
    rank: this rank inside the decode-context-parallel group.
    interleave: consecutive tokens that go to one shard; divides `kernel_block_size` if there are several shards.

    Returns slots of the shape of `positions`; `PAD` for padding, for tokens of other shards, outside the row and in
    the null block.
    """
    block_size = checked_int("block_size", block_size, low=1)
    pages = _pages_per_block(block_size, kernel_block_size)
    shards, turn, run = _shard(kv_shards, rank, interleave, block_size // pages)
    xp, (position, row) = _arrays(positions=positions, block_ids=block_ids)
    if row.ndim != 1 and tuple(row.shape[:-1]) != tuple(position.shape):
        raise ConfigError(f"block_ids must be one row, or one per position, got shape {tuple(row.shape)}")
    _check_range("block_ids", row, low=0, high=MAX_INT64 // block_size - 1)

    width = row.shape[-1]
    if width == 0:
        return xp.full_like(position, PAD)
    span = block_size * shards
    entry = position // span
    in_row = (position >= 0) & (entry < width)
    entry = xp.where(in_row, entry, 0)
    block_id = row[entry] if row.ndim == 1 else _entries(xp, row, entry)
    offset = position % span
    owned = offset // run % shards == turn
    local = offset // (run * shards) * run + offset % run
    return xp.where(in_row & owned & (block_id > NULL_BLOCK), block_id * block_size + local, PAD)


@overload
def local_seq_lens(
    seq_lens: torch.Tensor, *, kv_shards: SupportsIndex, rank: SupportsIndex, interleave: SupportsIndex = 1
) -> torch.Tensor: ...
@overload
def local_seq_lens(
    seq_lens: ArrayLike, *, kv_shards: SupportsIndex, rank: SupportsIndex, interleave: SupportsIndex = 1
) -> NDArray[np.int64]: ...
def local_seq_lens(
    seq_lens: Any, *, kv_shards: SupportsIndex, rank: SupportsIndex, interleave: SupportsIndex = 1
) -> Any:
    """Count how many of the first `seq_lens` tokens `rank` stores.

    seq_lens: tokens of each request over all ranks, any shape.
    kv_shards, rank, interleave: as in `slot_mapping`.

    Returns lengths of the shape of `seq_lens`; over the ranks of one shard group they add up to `seq_lens`.
    """
    shards, turn, run = _shard(kv_shards, rank, interleave)
    _, (length,) = _arrays(seq_lens=seq_lens)
    _check_range("seq_lens", length, low=0, high=MAX_INT64)

    length = length.clip(min=0)
    whole = length // run // shards * run
    rest = length - whole * shards
    local = whole + (rest - turn * run).clip(0, run)
    return np.asarray(local) if isinstance(local, np.generic) else local


@overload
def global_positions(
    local: torch.Tensor, *, kv_shards: SupportsIndex, rank: SupportsIndex, interleave: SupportsIndex = 1
) -> torch.Tensor: ...
@overload
def global_positions(
    local: ArrayLike, *, kv_shards: SupportsIndex, rank: SupportsIndex, interleave: SupportsIndex = 1
) -> NDArray[np.int64]: ...
def global_positions(
    local: Any, *, kv_shards: SupportsIndex, rank: SupportsIndex, interleave: SupportsIndex = 1
) -> Any:
    """Turn the numbers of a request's tokens among those that `rank` stores into their positions in the request.

    The way back from `local_seq_lens`: token number n of a rank, counted from 0, makes its length n + 1.

    local: numbers of tokens on the rank, any shape; negative ones are padding.
    kv_shards, rank, interleave: as in `slot_mapping`.

    Returns positions of the shape of `local`; `PAD` for padding.
    """
    shards, turn, run = _shard(kv_shards, rank, interleave)
    xp, (number,) = _arrays(local=local)
    _check_range("local", number, low=-(MAX_INT64 // shards), high=MAX_INT64 // shards - run)
    position = (number // run * shards + turn) * run + number % run
    return xp.where(number < 0, PAD, position)


@overload
def kernel_block_ids(
    block_ids: torch.Tensor, *, block_size: SupportsIndex, kernel_block_size: SupportsIndex
) -> torch.Tensor: ...
@overload
def kernel_block_ids(
    block_ids: ArrayLike, *, block_size: SupportsIndex, kernel_block_size: SupportsIndex
) -> NDArray[np.int64]: ...
def kernel_block_ids(block_ids: Any, *, block_size: SupportsIndex, kernel_block_size: SupportsIndex) -> Any:
    """List the kernel pages of manager blocks: block b is pages b * k .. b * k + k - 1.

    k = block_size / kernel_block_size. A null block becomes k null pages.

    block_ids: manager block ids, shape (..., blocks).

    Returns kernel page ids, shape (..., blocks * k).
    """
    pages = _pages_per_block(checked_int("block_size", block_size, low=1), kernel_block_size)
    xp, (ids,) = _arrays(block_ids=block_ids)
    if ids.ndim == 0:
        raise ConfigError("block_ids must be at least one row, got a single number")
    _check_range("block_ids", ids, low=0, high=MAX_INT64 // pages - 1)

    where = {} if xp is np else {"device": ids.device}
    page = ids[..., None] * pages + xp.arange(pages, dtype=xp.int64, **where)
    kernel_ids = xp.where(ids[..., None] > NULL_BLOCK, page, NULL_BLOCK)
    return kernel_ids.reshape((*ids.shape[:-1], ids.shape[-1] * pages))


@overload
def table_row(block_ids: torch.Tensor, *, width: SupportsIndex) -> torch.Tensor: ...
@overload
def table_row(block_ids: ArrayLike, *, width: SupportsIndex) -> NDArray[np.int64]: ...
def table_row(block_ids: Any, *, width: SupportsIndex) -> Any:
    """Make one whole row of a block table: the request's block ids, then null blocks.

    Write the whole row each time: then nothing stays behind of blocks that were given back or of the row's last user.

    block_ids: shape (blocks,). width: entries of a row, at least as many.

    Returns shape (width,).
    """
    width = checked_int("width", width, low=0)
    xp, (ids,) = _arrays(block_ids=block_ids)
    if ids.ndim != 1:
        raise ConfigError(f"block_ids must be one row, got shape {tuple(ids.shape)}")
    if len(ids) > width:
        raise ConfigError(f"block_ids holds {len(ids)} blocks, but a row has width {width}")
    _check_range("block_ids", ids, low=0, high=MAX_INT64)

    where = {} if xp is np else {"device": ids.device}
    row = xp.zeros(width, dtype=xp.int64, **where)
    row[: len(ids)] = ids
    return row


def table_width(
    max_model_len: SupportsIndex,
    *,
    block_size: SupportsIndex,
    kv_shards: SupportsIndex,
    extra_slots: SupportsIndex = 0,
) -> int:
    """Count the entries of a row of one group that holds `max_model_len` tokens.

    extra_slots: entries behind these, for example for speculative blocks.
    """
    length = checked_int("max_model_len", max_model_len, low=1, high=MAX_INT64)
    span = checked_int("block_size", block_size, low=1) * checked_int("kv_shards", kv_shards, low=1)
    return -(-length // span) + checked_int("extra_slots", extra_slots, low=0)


def padded_table_width(width: SupportsIndex, *, block_size: SupportsIndex) -> int:
    """Round `width` up to the steps of 128 tokens in which the indexer's kernels read a row.

    block_size: tokens of one kernel page. Pages over 128 tokens need no padding; smaller ones must divide 128.
    """
    width = checked_int("width", width, low=0)
    block_size = checked_int("block_size", block_size, low=1)
    if block_size > _INDEXER_KERNEL_TOKENS:
        return width
    if _INDEXER_KERNEL_TOKENS % block_size:
        raise ConfigError(f"block_size must divide {_INDEXER_KERNEL_TOKENS} or be larger, got {block_size}")
    step = _INDEXER_KERNEL_TOKENS // block_size
    return -(-width // step) * step


def _entries(xp: Any, rows: Any, entry: Any) -> Any:
    """The entry of each row: rows of shape (*entry, blocks)."""
    taken = np.take_along_axis(rows, entry[..., None], -1) if xp is np else rows.gather(-1, entry[..., None])
    return taken[..., 0]


def _arrays(**arguments: Any) -> tuple[Any, list[Any]]:
    """Return numpy or torch, whichever the arguments call for, and the arguments as its int64 arrays."""
    # Only a caller that has imported torch can pass a tensor, so torch is never imported here.
    torch = sys.modules.get("torch")
    tensors = {} if torch is None else {n: v for n, v in arguments.items() if isinstance(v, torch.Tensor)}
    if torch is None or not tensors:
        return np, [host_ints(name, value) for name, value in arguments.items()]

    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) > 1:
        where = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ConfigError(f"tensors must be on one device, got {where}")
    (device,) = devices
    signed = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
    arrays = []
    for name, value in arguments.items():
        if name not in tensors:
            arrays.append(torch.tensor(host_ints(name, value), device=device))
        elif value.dtype in signed:
            arrays.append(value.to(torch.int64))
        else:
            raise ArgumentTypeError(f"{name} must be ints, got a tensor of {value.dtype}")
    return torch, arrays


def _check_range(name: str, values: Any, *, low: int, high: int) -> None:
    """Refuse values outside low..high, where looking at them costs no wait for a device."""
    if 0 in values.shape or not (isinstance(values, np.ndarray) or values.device.type == "cpu"):
        return
    least, most = int(values.min()), int(values.max())
    if least < low or most > high:
        raise ConfigError(f"{name} must be between {low} and {high}, got {least if least < low else most}")


def _pages_per_block(block_size: int, kernel_block_size: SupportsIndex) -> int:
    """Count the kernel pages in one manager block."""
    kernel = checked_int("kernel_block_size", kernel_block_size, low=1)
    if block_size % kernel:
        raise ConfigError(f"kernel_block_size must divide block_size {block_size}, got {kernel}")
    return block_size // kernel


def _shard(
    kv_shards: SupportsIndex, rank: SupportsIndex, interleave: SupportsIndex, kernel_block_size: int | None = None
) -> tuple[int, int, int]:
    """Return the shards, this rank's shard and the tokens of one run; runs must divide a kernel page."""
    shards = checked_int("kv_shards", kv_shards, low=1)
    turn = checked_int("rank", rank, low=0) % shards
    run = checked_int("interleave", interleave, low=1)
    if shards == 1:
        # All tokens are here, in order, whatever the interleave.
        return 1, 0, 1
    if kernel_block_size is not None and kernel_block_size % run:
        raise ConfigError(f"interleave must divide kernel_block_size {kernel_block_size}, got {run}")
    return shards, turn, run
