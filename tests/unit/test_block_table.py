"""Slots, local lengths and rows of block tables, by worked numbers."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lockstep_kv import ArgumentTypeError, ConfigError
from lockstep_kv.block_table import (
    PAD,
    global_positions,
    kernel_block_ids,
    local_seq_lens,
    padded_table_width,
    slot_mapping,
    table_row,
    table_width,
)


def slots(positions: Any, block_ids: Any, shards: int, rank: int, **sizes: int) -> list[int]:
    """Map with pages of 64 tokens unless told otherwise."""
    sizes = {"block_size": 64, "kernel_block_size": 64, **sizes}
    result: list[int] = slot_mapping(positions, block_ids, kv_shards=shards, rank=rank, **sizes).tolist()
    return result


def test_sharded_cache_takes_every_fourth_token() -> None:
    assert slots(range(8), [5], 4, 2) == [PAD, PAD, 320, PAD, PAD, PAD, 321, PAD]


def test_replicated_block_is_four_kernel_pages() -> None:
    sizes = {"block_size": 256, "kernel_block_size": 64}
    assert slots(range(8), [5], 1, 2, **sizes) == list(range(1280, 1288))
    assert slots([63, 64, 255], [5], 1, 2, **sizes) == [1343, 1344, 1535]
    assert kernel_block_ids([5], **sizes).tolist() == [20, 21, 22, 23]


def test_interleave_of_16_takes_every_fourth_run() -> None:
    positions = [31, 32, 47, 48, 96, 111, 112, 256, 288]
    expected = [PAD, 320, 335, PAD, 336, 351, PAD, PAD, 576]
    assert slots(positions, [5, 9], 4, 2, interleave=16) == expected


@pytest.mark.parametrize("rank", range(4))
def test_two_shards_on_four_ranks_are_held_twice(rank: int) -> None:
    sizes = {"block_size": 128, "kernel_block_size": 64}
    even = [640, PAD, 641, PAD, PAD, 704, PAD]
    odd = [PAD, 640, PAD, 641, 703, PAD, 704]
    assert slots([0, 1, 2, 3, 127, 128, 129], [5], 2, rank, **sizes) == (odd if rank % 2 else even)
    assert kernel_block_ids([5], **sizes).tolist() == [10, 11]


@pytest.mark.parametrize(("interleave", "owners"), [(1, [10, 9]), (2, [10, 9]), (4, [11, 8])])
def test_every_token_has_one_owner_and_a_slot_of_its_own(interleave: int, owners: list[int]) -> None:
    per_rank = [
        slots(range(19), [5, 7, 2], 2, rank, block_size=4, kernel_block_size=4, interleave=interleave)
        for rank in range(2)
    ]
    assert all((left == PAD) != (right == PAD) for left, right in zip(*per_rank, strict=True))
    stored = [[slot for slot in rank if slot != PAD] for rank in per_rank]
    assert [len(rank) for rank in stored] == owners
    assert [len(set(rank)) for rank in stored] == owners
    if interleave == 1:
        assert (per_rank[0][0], per_rank[1][1], per_rank[0][8]) == (20, 20, 28)


def test_padding_null_blocks_and_positions_outside_the_row_have_no_slot() -> None:
    sizes = {"block_size": 4, "kernel_block_size": 4}
    assert slots([-1, -100, 0, 4, 8, 12, 2**40, 2**63 - 1], [3, 0, 4], 1, 0, **sizes) == [
        PAD,
        PAD,
        12,
        PAD,
        16,
        PAD,
        PAD,
        PAD,
    ]
    assert slots([0, 1], [], 1, 0, **sizes) == [PAD, PAD]
    assert slots([], [3], 1, 0, **sizes) == []
    assert slots([0, 7, 8], [0, 3], 2, 0, **sizes) == [PAD, PAD, 12]


def test_positions_of_any_shape_keep_it() -> None:
    sizes = {"block_size": 4, "kernel_block_size": 2, "kv_shards": 2, "rank": 1}
    grid = slot_mapping([[0, 1, 2], [3, 8, 9]], [5, 7], **sizes)
    assert grid.dtype == np.int64
    assert grid.tolist() == [[PAD, 20, PAD], [21, PAD, 28]]
    one = slot_mapping(9, [5, 7], **sizes)
    assert one.shape == ()
    assert one.dtype == np.int64
    assert int(one) == 28
    assert slot_mapping(np.uint64(9), np.array([5, 7], np.uint8), **sizes) == 28


def test_slots_beyond_32_bits_are_exact() -> None:
    assert slots([3], [2**40], 1, 0) == [2**46 + 3]
    assert slots([2**33], np.ones(2**16 + 1, np.int64), 2**11, 0) == [64 + 0]


def test_widths_count_each_group_s_own_span() -> None:
    assert table_width(131_072, block_size=64, kv_shards=4) == 512
    assert table_width(131_072, block_size=256, kv_shards=1) == 512
    assert table_width(64, block_size=4, kv_shards=2) == 8
    assert table_width(64, block_size=4, kv_shards=1) == 16
    assert table_width(64, block_size=4, kv_shards=1, extra_slots=2) == 18
    assert table_width(65, block_size=4, kv_shards=2) == 9


@pytest.mark.parametrize(("extra_slots", "width"), [(0, 16), (2, 18)])
def test_the_last_entry_of_a_row_is_writable_and_the_next_is_not_there(extra_slots: int, width: int) -> None:
    assert table_width(64, block_size=4, kv_shards=1, extra_slots=extra_slots) == width
    row = table_row(range(1, width + 1), width=width)
    last = width * 4 - 1
    assert slots([last, last + 1], row, 1, 0, block_size=4, kernel_block_size=4) == [width * 4 + 3, PAD]


def test_indexer_rows_are_padded_to_steps_of_128_tokens() -> None:
    width = table_width(480_000, block_size=64, kv_shards=4)
    assert (width, padded_table_width(width, block_size=64)) == (1875, 1876)
    assert [padded_table_width(1875, block_size=size) for size in (1, 16, 32, 128, 256)] == [
        1920,
        1880,
        1876,
        1875,
        1875,
    ]
    with pytest.raises(ConfigError, match="block_size must divide 128 or be larger, got 48"):
        padded_table_width(1875, block_size=48)


def test_lockstep_groups_write_null_slots_nowhere() -> None:
    row = [3, 0, 2]
    sharded = [slots(range(24), row, 2, rank, block_size=4, kernel_block_size=4) for rank in range(2)]
    replicated = slots(range(24), row, 1, 0, block_size=8, kernel_block_size=4)
    for rank in (*sharded, replicated):
        assert rank[8:16] == [PAD] * 8
        assert all(slot >= 8 for slot in rank if slot != PAD)
    assert table_width(24, block_size=4, kv_shards=2) == table_width(24, block_size=8, kv_shards=1) == 3


def test_null_blocks_stay_null_in_kernel_ids() -> None:
    ids = kernel_block_ids([[1, 0], [2, 3]], block_size=8, kernel_block_size=4)
    assert ids.dtype == np.int64
    assert ids.tolist() == [[2, 3, 0, 0], [4, 5, 6, 7]]
    assert kernel_block_ids([], block_size=8, kernel_block_size=4).tolist() == []
    assert kernel_block_ids([7], block_size=8, kernel_block_size=8).tolist() == [7]


def test_a_row_keeps_nothing_of_its_last_user() -> None:
    assert table_row([0, 0, 3], width=5).tolist() == [0, 0, 3, 0, 0]
    assert table_row([4], width=5).tolist() == [4, 0, 0, 0, 0]
    assert table_row([], width=2).tolist() == [0, 0]
    with pytest.raises(ConfigError, match="block_ids holds 3 blocks, but a row has width 2"):
        table_row([1, 2, 3], width=2)


@pytest.mark.parametrize(
    ("length", "shards", "interleave", "expected"),
    [
        (17, 4, 1, [5, 4, 4, 4]),
        (17, 4, 16, [16, 1, 0, 0]),
        (33, 4, 16, [16, 16, 1, 0]),
        (100, 4, 16, [32, 32, 20, 16]),
        (100, 8, 1, [13, 13, 13, 13, 12, 12, 12, 12]),
        (100, 1, 16, [100]),
        (0, 2, 1, [0, 0]),
    ],
)
def test_local_lengths(length: int, shards: int, interleave: int, expected: list[int]) -> None:
    found = [int(local_seq_lens(length, kv_shards=shards, rank=r, interleave=interleave)) for r in range(shards)]
    assert found == expected


def test_local_lengths_of_many_requests() -> None:
    assert local_seq_lens([17, 33, 65], kv_shards=4, rank=2).tolist() == [4, 8, 16]
    # Localised after the expansion per drafted token, as the indexer needs them.
    assert local_seq_lens([8, 9, 10], kv_shards=2, rank=1).tolist() == [4, 4, 5]
    drafted = np.array([[9, 10, 11], [12, 13, 14], [0, 0, 0]])
    assert local_seq_lens(drafted, kv_shards=4, rank=2).tolist() == [[2, 2, 3], [3, 3, 3], [0, 0, 0]]
    drafted[:2] += 4
    assert local_seq_lens(drafted, kv_shards=4, rank=2).tolist() == [[3, 3, 4], [4, 4, 4], [0, 0, 0]]
    # Ranks of one shard hold the same tokens.
    assert (
        local_seq_lens([17, 33], kv_shards=2, rank=3).tolist() == local_seq_lens([17, 33], kv_shards=2, rank=1).tolist()
    )


def test_a_row_for_each_position() -> None:
    torch = pytest.importorskip("torch")
    sizes = {"block_size": 4, "kernel_block_size": 2, "kv_shards": 2, "rank": 1}
    positions = [[1, 3], [8, -1]]
    rows = [[[5, 6], [7, 8]], [[9, 3], [1, 2]]]
    expected = [
        [int(slot_mapping([at], row, **sizes)[0]) for at, row in zip(line, of_line, strict=True)]
        for line, of_line in zip(positions, rows, strict=True)
    ]
    assert expected == [[20, 29], [PAD, PAD]]
    assert slot_mapping(positions, rows, **sizes).tolist() == expected
    assert slot_mapping(torch.tensor(positions), torch.tensor(rows), **sizes).tolist() == expected


def test_positions_of_a_rank_s_tokens() -> None:
    assert global_positions([0, 1, 2, -1], kv_shards=4, rank=2).tolist() == [2, 6, 10, PAD]
    assert global_positions(range(5), kv_shards=2, rank=3, interleave=2).tolist() == [2, 3, 6, 7, 10]
    assert global_positions([0, 7], kv_shards=1, rank=5, interleave=16).tolist() == [0, 7]
    with pytest.raises(ConfigError, match="local must be between"):
        global_positions([2**62], kv_shards=4, rank=0)


def test_torch_in_torch_out() -> None:
    torch = pytest.importorskip("torch")
    sizes = {"block_size": 64, "kernel_block_size": 64, "kv_shards": 4, "rank": 2}
    for positions, row in (
        (torch.arange(8), torch.tensor([5], dtype=torch.int32)),
        (torch.arange(8, dtype=torch.int32), [5]),
        (range(8), torch.tensor([5])),
        (torch.arange(8), np.array([5])),
    ):
        found = slot_mapping(positions, row, **sizes)
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.int64
        assert found.tolist() == [PAD, PAD, 320, PAD, PAD, PAD, 321, PAD]
    assert slot_mapping(torch.tensor(6), [5], **sizes).shape == ()
    assert slot_mapping(torch.arange(2), [], **sizes).tolist() == [PAD, PAD]
    assert local_seq_lens(torch.tensor([17, 33, 65]), kv_shards=4, rank=2).tolist() == [4, 8, 16]
    assert kernel_block_ids(torch.tensor([5, 0]), block_size=128, kernel_block_size=64).tolist() == [10, 11, 0, 0]
    assert table_row(torch.tensor([5, 6]), width=3).tolist() == [5, 6, 0]
    for wrong in (torch.tensor([1.0]), torch.tensor([True])):
        with pytest.raises(ArgumentTypeError, match="positions must be ints, got a tensor of torch"):
            slot_mapping(wrong, [5], **sizes)
    with pytest.raises(ConfigError, match=r"block_ids must be between 0 and .*, got -1"):
        slot_mapping(torch.arange(2), torch.tensor([-1]), **sizes)
    with pytest.raises(ConfigError, match="tensors must be on one device, got positions on cpu, block_ids on meta"):
        slot_mapping(torch.arange(2), torch.zeros(1, dtype=torch.int64, device="meta"), **sizes)


def test_results_stay_on_the_device() -> None:
    torch = pytest.importorskip("torch")
    # The meta device has no values, so anything that would wait for them fails.
    positions = torch.zeros(3, 2, dtype=torch.int64, device="meta")
    found = slot_mapping(positions, [5], block_size=4, kernel_block_size=4, kv_shards=2, rank=0)
    assert (found.device.type, tuple(found.shape)) == ("meta", (3, 2))
    assert local_seq_lens(positions, kv_shards=2, rank=0).device.type == "meta"
    assert kernel_block_ids(positions, block_size=4, kernel_block_size=2).shape == (3, 4)
    assert table_row(positions[:, 0], width=5).device.type == "meta"


def test_torch_is_not_imported_for_lists() -> None:
    code = (
        "import sys; from lockstep_kv.block_table import slot_mapping\n"
        "slot_mapping([1], [5], block_size=4, kernel_block_size=4, kv_shards=2, rank=0)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603


GOOD: dict[str, Any] = {
    "positions": [1],
    "block_ids": [5],
    "block_size": 8,
    "kernel_block_size": 4,
    "kv_shards": 2,
    "rank": 1,
    "interleave": 2,
}


@pytest.mark.parametrize("value", [True, 2.0, "2", None, [2], np.float64(2), np.bool_(True)])
@pytest.mark.parametrize("name", ["block_size", "kernel_block_size", "kv_shards", "rank", "interleave"])
def test_sizes_of_the_wrong_type(name: str, value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{name} must be an int, got "):
        slot_mapping(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_size", 0, "block_size must be between 1 and 2147483647, got 0"),
        ("block_size", 2**64, "block_size must be between 1 and 2147483647, got 18446744073709551616"),
        # Named, because pytest cannot print the number either.
        pytest.param(
            *(
                "block_size",
                10**5000,
                "block_size must be between 1 and 2147483647, got a number of thousands of digits",
            ),
            id="huge",
        ),
        ("kernel_block_size", 3, "kernel_block_size must divide block_size 8, got 3"),
        ("kernel_block_size", -4, "kernel_block_size must be between 1 and 2147483647, got -4"),
        ("kernel_block_size", 16, "kernel_block_size must divide block_size 8, got 16"),
        ("kv_shards", 0, "kv_shards must be between 1 and 2147483647, got 0"),
        ("rank", -1, "rank must be between 0 and 2147483647, got -1"),
        ("interleave", 0, "interleave must be between 1 and 2147483647, got 0"),
        ("interleave", 8, "interleave must divide kernel_block_size 4, got 8"),
        ("interleave", 3, "interleave must divide kernel_block_size 4, got 3"),
        ("block_ids", [1, -2], "block_ids must be between 0 and 1152921504606846974, got -2"),
        ("block_ids", [2**62], "block_ids must be between 0 and 1152921504606846974, got 4611686018427387904"),
        ("block_ids", [2**63], "block_ids must fit in 64 bits, got 9223372036854775808"),
        ("block_ids", [2**70], "block_ids must fit in 64 bits, got list [1180591620717411303424]"),
        (
            "block_ids",
            [[1], [2]],
            "block_ids must be one row, or one per position, got shape (2, 1)",
        ),
        ("block_ids", 1, "block_ids must be one row, or one per position, got shape ()"),
    ],
)
def test_values_that_cannot_be_used(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        slot_mapping(**{**GOOD, name: value})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "value", [[1.0], [True], [1, True], [[1], [True]], "12", b"12", None, [[1], [2, 3]], {1}, [None]]
)
@pytest.mark.parametrize("name", ["positions", "block_ids"])
def test_arrays_of_the_wrong_type(name: str, value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{name} must be ints"):
        slot_mapping(**{**GOOD, name: value})


def test_one_shard_takes_any_interleave() -> None:
    found = slot_mapping([0, 9], [5, 6], block_size=8, kernel_block_size=4, kv_shards=1, rank=3, interleave=7)
    assert found.tolist() == [40, 49]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: local_seq_lens([3, -1], kv_shards=2, rank=0), "seq_lens must be between 0 and .*, got -1"),
        (lambda: local_seq_lens([1.5], kv_shards=2, rank=0), "seq_lens must be ints, got list"),
        (lambda: local_seq_lens([1], kv_shards=2, rank=0, interleave=True), "interleave must be an int, got bool True"),
        (lambda: kernel_block_ids(3, block_size=8, kernel_block_size=4), "got a single number"),
        (
            lambda: kernel_block_ids([-3], block_size=8, kernel_block_size=4),
            "block_ids must be between 0 and .*, got -3",
        ),
        (
            lambda: kernel_block_ids([3], block_size=8, kernel_block_size=3),
            "kernel_block_size must divide block_size 8",
        ),
        (lambda: table_row([[1]], width=2), r"block_ids must be one row, got shape \(1, 1\)"),
        (lambda: table_row([1], width=-1), "width must be between 0 and .*, got -1"),
        (lambda: table_width(0, block_size=8, kv_shards=1), "max_model_len must be between 1 and"),
        (lambda: table_width(8, block_size=8, kv_shards=1, extra_slots=-1), "extra_slots must be between 0 and"),
    ],
)
def test_other_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
