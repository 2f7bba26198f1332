"""Slot mapping and local lengths against a plain token-by-token reference, over random geometries."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_kv.block_table import PAD, global_positions, kernel_block_ids, local_seq_lens, slot_mapping, table_width


@dataclass(frozen=True)
class Geometry:
    """A group on one rank, and a request's row of it."""

    block_size: int
    kernel_block_size: int
    kv_shards: int
    interleave: int
    row: list[int]

    @property
    def sizes(self) -> dict[str, Any]:
        return {
            "block_size": self.block_size,
            "kernel_block_size": self.kernel_block_size,
            "kv_shards": self.kv_shards,
            "interleave": self.interleave,
        }


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    interleave = draw(st.sampled_from([1, 2, 3, 4, 16]))
    kernel_block_size = interleave * draw(st.integers(1, 4))
    return Geometry(
        block_size=kernel_block_size * draw(st.integers(1, 4)),
        kernel_block_size=kernel_block_size,
        kv_shards=draw(st.sampled_from([1, 2, 3, 4, 8])),
        interleave=interleave,
        row=draw(st.lists(st.integers(1, 2**33), max_size=4, unique=True)),
    )


def reference_slot(position: int, geometry: Geometry, shard: int) -> int:
    """Deal out the tokens of one block, one at a time, kernel page by kernel page."""
    if position < 0:
        return PAD
    span = geometry.block_size * geometry.kv_shards
    entry = position // span
    if entry >= len(geometry.row) or geometry.row[entry] == 0:
        return PAD
    pages = geometry.block_size // geometry.kernel_block_size
    stored = [0] * geometry.kv_shards
    for offset in range(span):
        owner = offset // geometry.interleave % geometry.kv_shards
        if offset == position % span:
            if owner != shard:
                return PAD
            page, inside = divmod(stored[owner], geometry.kernel_block_size)
            return (geometry.row[entry] * pages + page) * geometry.kernel_block_size + inside
        stored[owner] += 1
    raise AssertionError


@given(geometry=geometries(), rank=st.integers(0, 20), data=st.data())
def test_agrees_with_the_reference(geometry: Geometry, rank: int, data: st.DataObject) -> None:
    span = geometry.block_size * geometry.kv_shards
    row = [data.draw(st.sampled_from([block_id, 0])) for block_id in geometry.row]
    geometry = Geometry(geometry.block_size, geometry.kernel_block_size, geometry.kv_shards, geometry.interleave, row)
    positions = data.draw(st.lists(st.integers(-span, span * (len(row) + 1)), max_size=8))
    found = slot_mapping(positions, row, rank=rank, **geometry.sizes)
    assert found.tolist() == [reference_slot(p, geometry, rank % geometry.kv_shards) for p in positions]


@given(geometry=geometries(), replica=st.integers(0, 3))
def test_every_token_has_one_owner_in_each_shard_group(geometry: Geometry, replica: int) -> None:
    capacity = geometry.block_size * geometry.kv_shards * len(geometry.row)
    ranks = range(replica * geometry.kv_shards, (replica + 1) * geometry.kv_shards)
    slots = [slot_mapping(range(capacity), geometry.row, rank=rank, **geometry.sizes) for rank in ranks]
    stored = np.array([found != PAD for found in slots]).reshape(len(slots), capacity)
    assert (stored.sum(axis=0) == 1).all()
    for found in slots:
        local = found[found != PAD].tolist()
        # Each rank fills its pages, in order and without gaps.
        size = geometry.block_size
        assert local == [block_id * size + inside for block_id in geometry.row for inside in range(size)]


@given(geometry=geometries(), rank=st.integers(0, 8), length=st.integers(0, 600))
def test_local_lengths_count_the_owned_slots(geometry: Geometry, rank: int, length: int) -> None:
    width = table_width(max(length, 1), block_size=geometry.block_size, kv_shards=geometry.kv_shards)
    slots = slot_mapping(range(length), range(1, width + 1), rank=rank, **geometry.sizes)
    layout = {"kv_shards": geometry.kv_shards, "interleave": geometry.interleave}
    assert local_seq_lens(length, rank=rank, **layout) == (slots != PAD).sum()
    assert sum(int(local_seq_lens(length, rank=r, **layout)) for r in range(geometry.kv_shards)) == length


@given(geometry=geometries(), rank=st.integers(0, 8))
def test_kernel_pages_hold_the_slots_of_manager_blocks(geometry: Geometry, rank: int) -> None:
    pages = geometry.block_size // geometry.kernel_block_size
    capacity = geometry.block_size * geometry.kv_shards * len(geometry.row)
    by_block = slot_mapping(range(capacity), geometry.row, rank=rank, **geometry.sizes)
    kernel_row = kernel_block_ids(
        geometry.row, block_size=geometry.block_size, kernel_block_size=geometry.kernel_block_size
    )
    assert len(kernel_row) == pages * len(geometry.row)
    by_page = slot_mapping(
        range(capacity), kernel_row, rank=rank, **{**geometry.sizes, "block_size": geometry.kernel_block_size}
    )
    assert by_block.tolist() == by_page.tolist()


@given(geometry=geometries(), rank=st.integers(0, 8), length=st.integers(0, 500))
def test_positions_are_the_way_back_from_lengths(geometry: Geometry, rank: int, length: int) -> None:
    layout = {"kv_shards": geometry.kv_shards, "rank": rank, "interleave": geometry.interleave}
    held = int(local_seq_lens(length, **layout))
    positions = global_positions(range(held), **layout)
    lengths = [int(local_seq_lens(at, **layout)) for at in range(length + 1)]
    assert positions.tolist() == [at for at in range(length) if lengths[at + 1] > lengths[at]]


@given(geometry=geometries(), rank=st.integers(0, 8), data=st.data())
def test_torch_and_numpy_agree(geometry: Geometry, rank: int, data: st.DataObject) -> None:
    torch = pytest.importorskip("torch")
    shape = data.draw(st.sampled_from([(), (5,), (2, 3), (0,)]))
    count = int(np.prod(shape, dtype=int))
    drawn = data.draw(st.lists(st.integers(-5, 500), min_size=count, max_size=count))
    positions = np.array(drawn, dtype=np.int64).reshape(shape)
    row = np.array(geometry.row, dtype=np.int64)
    layout = {"kv_shards": geometry.kv_shards, "rank": rank, "interleave": geometry.interleave}
    pages = {"block_size": geometry.block_size, "kernel_block_size": geometry.kernel_block_size}
    pairs = [
        (
            slot_mapping(positions, row, rank=rank, **geometry.sizes),
            slot_mapping(torch.from_numpy(positions), torch.from_numpy(row), rank=rank, **geometry.sizes),
        ),
        (
            local_seq_lens(abs(positions), **layout),
            local_seq_lens(torch.from_numpy(abs(positions)) if shape else torch.tensor(abs(int(positions))), **layout),
        ),
        (kernel_block_ids(row, **pages), kernel_block_ids(torch.from_numpy(row), **pages)),
    ]
    for ours, theirs in pairs:
        assert ours.shape == tuple(theirs.shape)
        assert ours.dtype == np.int64
        assert theirs.dtype == torch.int64
        assert ours.tolist() == theirs.tolist()
