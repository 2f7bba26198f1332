"""One copy job: which blocks go to or come from which places in the host's rows, checked, and as pieces of memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep_kv.arguments import checked_int, flat_ints
from lockstep_kv.errors import ConfigError

if TYPE_CHECKING:
    from typing import SupportsIndex

    from numpy.typing import NDArray

    from lockstep_kv.offload.host_pool import HostPool
    from lockstep_kv.offload.row_format import PageSet, RowFormat

__all__ = ["Direction", "Pieces", "Transfer", "plan_transfer"]

# Block 0 is the null block: it stands for no block and holds nothing.
_FIRST_BLOCK = 1


class Direction(Enum):
    """Which way a copy goes: `STORE` from the device to the host, `LOAD` from the host to the device."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, eq=False)
class Transfer:
    """A checked job: block `blocks[i]` of the set and slot `slots[i]` of row `rows[i]`, in the host's order.

    `host_offsets[i]` is where the slot starts, in bytes from the first row.
    """

    direction: Direction
    set_id: int
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    host_offsets: NDArray[np.int64]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Pieces:
    """Runs of bytes that are contiguous on both sides: `sizes[i]` bytes at addresses `device[i]` and `host[i]`."""

    device: NDArray[np.int64]
    host: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, transfer: Transfer, page_set: PageSet, host_address: int) -> Pieces:
        """Find the longest pieces of a job's pages. host_address: where the first row starts."""
        layers = page_set.layers
        address, stride, page, row_offset, storage = (
            np.array([getattr(layer, what) for layer in layers], dtype=np.int64)
            for what in ("address", "block_stride", "page_bytes", "row_offset", "storage")
        )
        count = len(transfer.blocks)
        device = (address + transfer.blocks[:, None] * stride).ravel()
        host = (host_address + transfer.host_offsets[:, None] + row_offset).ravel()
        sizes, storage = np.tile(page, count), np.tile(storage, count)
        if not count:
            return cls(device, host, sizes)
        # Two allocations that happen to be neighbours are not one piece: a copy must stay inside one.
        goes_on = (
            (device[1:] == device[:-1] + sizes[:-1])
            & (host[1:] == host[:-1] + sizes[:-1])
            & (storage[1:] == storage[:-1])
        )
        starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        return cls(device[starts], host[starts], np.add.reduceat(sizes, starts))


def plan_transfer(
    row_format: RowFormat,
    pool: HostPool,
    direction: Direction,
    set_id: SupportsIndex,
    blocks: Any,
    rows: Any,
    slots: Any,
) -> Transfer:
    """Check a job and put it in the order of the host's memory.

    blocks, rows, slots: flat sequences of ints of one length: device block ids, rows of the pool, block slots in them.

    Raises `ArgumentTypeError` for what are no ints, `ConfigError` for values out of range, for the null block, for
    lengths that differ and for two copies to one place.
    """
    set_id = checked_int("set_id", set_id, low=0, high=len(row_format.sets) - 1)
    page_set = row_format.sets[set_id]
    ids = flat_ints("blocks", blocks, low=_FIRST_BLOCK, high=page_set.num_blocks - 1)
    row_ids = flat_ints("rows", rows, low=0, high=pool.num_rows - 1)
    slot_ids = flat_ints("slots", slots, low=0, high=row_format.blocks_per_row - 1)
    for name, values in (("rows", row_ids), ("slots", slot_ids)):
        if len(values) != len(ids):
            raise ConfigError(f"{name} must be as many as blocks, {len(ids)}, got {len(values)}")
    offsets = row_ids * pool.row_stride + slot_ids * page_set.bytes_per_block
    if direction is Direction.STORE:
        again = _repeated(offsets)
        if again is not None:
            raise ConfigError(f"rows and slots must name a place once, got row {row_ids[again]} slot {slot_ids[again]}")
    else:
        again = _repeated(ids)
        if again is not None:
            raise ConfigError(f"blocks must name a block once, got {ids[again]}")
    order = np.argsort(offsets, kind="stable")
    num_bytes = len(ids) * page_set.bytes_per_block
    return Transfer(direction, set_id, ids[order], row_ids[order], slot_ids[order], offsets[order], num_bytes)


def _repeated(values: NDArray[np.int64]) -> int | None:
    """Return the index of a value that occurred before, or None."""
    order = np.argsort(values, kind="stable")
    same = np.flatnonzero(values[order][1:] == values[order][:-1])
    return int(order[same[0] + 1]) if same.size else None
