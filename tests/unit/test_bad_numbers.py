"""Bad numbers, and lists and arrays of them, to every call: refused by class and value, and nothing changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from refusals import HASHES, MAX_LEN, PAIR, ROOT, World, check_refused, model, pair_config, plan, table

from lockstep_kv import (
    ArgumentTypeError,
    BlockPool,
    ConfigError,
    GroupSpec,
    LayerSpec,
    LockstepKVError,
    PoolExhaustedError,
    hash_blocks,
)
from lockstep_kv.block_table import (
    kernel_block_ids,
    local_seq_lens,
    padded_table_width,
    slot_mapping,
    table_row,
    table_width,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# Integers.


@dataclass(frozen=True)
class Int:
    """A parameter that takes integers from `low` to `high`, and None if `none`."""

    call: Callable[[World, Any], object]
    low: int
    high: int = 2**64 - 1
    none: bool = False


def slots(**options: Any) -> object:
    good = {"positions": [1], "block_ids": [5], "block_size": 8, "kernel_block_size": 8, "kv_shards": 2, "rank": 1}
    return slot_mapping(**{**good, **options})


def window(**options: Any) -> object:
    return GroupSpec("sliding_window", 4, [], sliding_window=8, **options)


def state(**options: Any) -> object:
    return GroupSpec("mamba", 4, [], mamba_cache_mode="align", **options)


SIZE = 2**31 - 1
INTS: list[tuple[str, Int]] = [
    ("page_bytes", Int(lambda _, v: LayerSpec("x", v), 1)),
    ("block_size", Int(lambda _, v: GroupSpec("full", v, []), 1, 2**32 - 1)),
    ("kv_shards", Int(lambda _, v: GroupSpec("mla", 4, [], kv_shards=v), 1, 2**32 - 1, none=True)),
    ("sliding_window", Int(lambda _, v: GroupSpec("sliding_window", 4, [], sliding_window=v), 1, 2**32 - 1, none=True)),
    (
        "attention_chunk_size",
        Int(lambda _, v: GroupSpec("chunked_local", 4, [], attention_chunk_size=v), 1, 2**32 - 1, none=True),
    ),
    ("extra_retained_tokens", Int(lambda _, v: window(extra_retained_tokens=v), 0, 2**32 - 1)),
    ("num_speculative_blocks", Int(lambda _, v: state(num_speculative_blocks=v), 0, 2**32 - 1)),
    ("checkpoint_alignment", Int(lambda _, v: state(checkpoint_alignment=v), 1, 2**32 - 1, none=True)),
    ("num_prefill_lookahead", Int(lambda _, v: pair_config(num_prefill_lookahead=v), 0)),
    ("retention_interval", Int(lambda _, v: pair_config(retention_interval=v), 0, 2**63, none=True)),
    ("max_in_flight_tokens", Int(lambda _, v: pair_config(max_in_flight_tokens=v), 0, none=True)),
    ("lookup_classes[0]", Int(lambda _, v: pair_config(lookup_classes=[v, 0]), 0, 2**32 - 1)),
    ("dcp_world_size", Int(lambda _, v: PAIR[0].resolved_kv_shards(v), 1, 2**32 - 1)),
    ("dcp_world_size", Int(lambda _, v: PAIR[0].tokens_per_block(v), 1, 2**32 - 1)),
    ("num_blocks", Int(lambda _, v: pair_config(num_blocks=v), 1, 2**27)),
    ("dcp_world_size", Int(lambda _, v: pair_config(dcp_world_size=v), 1, 2**32 - 1)),
    ("hash_block_tokens", Int(lambda _, v: pair_config(hash_block_tokens=v), 1, 8, none=True)),
    ("max_model_len", Int(lambda _, v: pair_config(max_model_len=v), 1)),
    ("max_tokens", Int(lambda w, v: w.c.find_longest_hit(HASHES, v), 0)),
    ("num_tokens", Int(lambda w, v: w.c.allocate("b", v), 1, MAX_LEN)),
    ("external", Int(lambda w, v: w.c.allocate("b", MAX_LEN, num_external_tokens=v), 0, MAX_LEN)),
    ("reserved_blocks", Int(lambda w, v: w.c.allocate("b", 1, reserved_blocks=v), 0)),
    ("num_encoder_tokens", Int(lambda w, v: w.c.allocate("b", 1, num_encoder_tokens=v), 0)),
    ("main_tokens", Int(lambda w, v: w.c.allocate_slots("b", 1, main_tokens=v), 1, MAX_LEN, none=True)),
    ("computed_tokens", Int(lambda w, v: w.c.allocate_slots("b", 1, computed_tokens=v), 0)),
    ("prefill_end", Int(lambda w, v: w.c.allocate_slots("b", 1, prefill_end=v), 0)),
    ("uncleared_groups[0]", Int(lambda w, v: w.c.allocate_slots("b", 1, uncleared_groups=[v]), 0, 1)),
    ("num_tokens", Int(lambda w, v: w.c.blocks_needed("b", v), 0)),
    ("start_token", Int(lambda w, v: w.c.note_unwritten("a", v), 0)),
    ("num_computed_tokens", Int(lambda w, v: w.c.take_final_states("a", v), 0)),
    ("group", Int(lambda w, v: w.c.checkpoint("a", v), 0, 1)),
    ("block", Int(lambda w, v: w.c.key_tokens(v), 0, 8)),
    ("interval", Int(lambda w, v: w.c.set_retention_interval(v), 0, 2**63, none=True)),
    ("max_encoder_tokens", Int(lambda _, v: plan(max_encoder_tokens=v), 0)),
    ("num_tokens", Int(lambda w, v: w.c.cache("a", HASHES, v), 0, 24)),
    ("num_prompt_tokens", Int(lambda w, v: w.c.cache("a", HASHES, 1, num_prompt_tokens=v), 0, none=True)),
    ("num_computed_tokens", Int(lambda w, v: w.c.release_skipped("a", v), 0)),
    ("block", Int(lambda w, v: w.c.ref_count(v), 0, 8)),
    ("num_blocks", Int(lambda _, v: BlockPool(v), 1, 2**27)),
    ("id", Int(lambda w, v: w.p.publish(v, b"other"), 0, 4)),
    ("id", Int(lambda w, v: w.p.ref_count(v), 0, 4)),
    ("id", Int(lambda w, v: w.p.keys_of(v), 0, 4)),
    ("dcp_world_size", Int(lambda _, v: plan(dcp_world_size=v), 1, 2**32 - 1)),
    ("num_blocks", Int(lambda _, v: plan(num_blocks=v), 9, 2**64 // 72, none=True)),
    ("available_bytes", Int(lambda _, v: plan(num_blocks=None, available_bytes=v), 9 * 72, none=True)),
    ("max_model_len", Int(lambda _, v: plan(max_model_len=v), 1, 98 * 8)),
    ("block_tokens", Int(lambda _, v: hash_blocks([1, 2], v, none_hash=ROOT), 1)),
    ("token_ids[1]", Int(lambda _, v: hash_blocks([1, v], 2, none_hash=ROOT), -(2**63), 2**63 - 1)),
    ("block_size", Int(lambda _, v: slots(block_size=v), 1, SIZE)),
    ("kernel_block_size", Int(lambda _, v: slots(kernel_block_size=v), 1, 8)),
    ("kv_shards", Int(lambda _, v: slots(kv_shards=v), 1, SIZE)),
    ("rank", Int(lambda _, v: slots(rank=v), 0, SIZE)),
    ("interleave", Int(lambda _, v: slots(interleave=v), 1, 8)),
    ("kv_shards", Int(lambda _, v: local_seq_lens([9], kv_shards=v, rank=0), 1, SIZE)),
    ("rank", Int(lambda _, v: local_seq_lens([9], kv_shards=2, rank=v), 0, SIZE)),
    ("interleave", Int(lambda _, v: local_seq_lens([9], kv_shards=2, rank=0, interleave=v), 1, SIZE)),
    ("block_size", Int(lambda _, v: kernel_block_ids([1], block_size=v, kernel_block_size=1), 1, SIZE)),
    ("kernel_block_size", Int(lambda _, v: kernel_block_ids([1], block_size=8, kernel_block_size=v), 1, 8)),
    ("width", Int(lambda _, v: table_row([], width=v), 0, SIZE)),
    ("max_model_len", Int(lambda _, v: table_width(v, block_size=8, kv_shards=1), 1, 2**63 - 1)),
    ("block_size", Int(lambda _, v: table_width(8, block_size=v, kv_shards=1), 1, SIZE)),
    ("kv_shards", Int(lambda _, v: table_width(8, block_size=8, kv_shards=v), 1, SIZE)),
    ("extra_slots", Int(lambda _, v: table_width(8, block_size=8, kv_shards=1, extra_slots=v), 0, SIZE)),
    ("width", Int(lambda _, v: padded_table_width(v, block_size=8), 0, SIZE)),
    ("block_size", Int(lambda _, v: padded_table_width(8, block_size=v), 1, SIZE)),
    ("block_size", Int(lambda _, v: model(block_size=v), 1, SIZE)),
    ("dcp_world_size", Int(lambda _, v: model(dcp_world_size=v), 1, 64)),
    ("indexer_shards", Int(lambda _, v: model(indexer_shards=v), 0, 0)),
    ("tensor_parallel_size", Int(lambda _, v: model(tensor_parallel_size=v), 1, SIZE)),
]


NOT_INTS = [None, True, "1", b"1", 1.0, [1], [[1]], {1: 1}, np.float64(1), np.bool_(True), np.array([1, 2])]
NUMBERS = [-(2**63) - 1, -(2**63), -1, 0, 2**31, 2**32, 2**63, 2**64, 10**30]


@table(INTS, NOT_INTS, lambda row, value: value is None and row.none)
def test_integers_of_the_wrong_type(parameter: str, row: Int, value: object) -> None:
    check_refused(lambda world: row.call(world, value), ArgumentTypeError, parameter, repr(value))


@table(INTS, NUMBERS, lambda row, value: row.low <= value <= row.high)
def test_integers_out_of_range(parameter: str, row: Int, value: int) -> None:
    del parameter  # What exceeds another number is not always called by its name.
    check_refused(lambda world: row.call(world, value), ConfigError, value)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (-1, ConfigError),
        (3, PoolExhaustedError),
        (2**31, PoolExhaustedError),
        (2**63, PoolExhaustedError),
        (2**64 - 1, PoolExhaustedError),
        (2**64, ConfigError),
        (10**30, ConfigError),
    ],
)
def test_more_blocks_than_are_free(value: int, error: type[LockstepKVError]) -> None:
    check_refused(lambda world: world.p.take(value), error, str(value))


@pytest.mark.parametrize("shards", [3, 4, 5, 7, 16])
def test_shards_that_do_not_divide_the_ranks(shards: int) -> None:
    group = GroupSpec("mla", 4, [LayerSpec("x", 8)], kv_shards=shards)
    words = ("kv_shards", str(shards), "2")
    check_refused(lambda _: group.resolved_kv_shards(2), ConfigError, *words)
    check_refused(lambda _: group.tokens_per_block(2), ConfigError, *words)
    check_refused(lambda _: pair_config(groups=[PAIR[1], group]), ConfigError, "group 1", *words)
    check_refused(lambda _: plan(groups=[group]), ConfigError, "group 0", *words)


# Lists of ints.


@dataclass(frozen=True)
class Ids:
    """A call that takes block ids, an id that it takes, and whether it takes the null block."""

    call: Callable[[World, Any], object]
    good: int
    null: bool = False


IDS: list[tuple[str, Ids]] = [
    ("block_ids", Ids(lambda w, v: w.c.pin(v), 1)),
    ("block_ids", Ids(lambda w, v: w.c.unpin(v), 4)),
    ("block_ids", Ids(lambda w, v: w.c.evict(v), 1, null=True)),
    ("ids", Ids(lambda w, v: w.p.add_ref(v), 1)),
    ("ids", Ids(lambda w, v: w.p.release(v), 1)),
    ("ids", Ids(lambda w, v: w.p.evict(v), 1, null=True)),
]
NOT_LISTS = [None, 1, True, 1.0, "1", b"\1", bytearray(b"\1"), {1: 1}]


@table(IDS, NOT_LISTS)
def test_block_ids_that_are_no_list(parameter: str, row: Ids, value: object) -> None:
    check_refused(lambda world: row.call(world, value), ArgumentTypeError, parameter, repr(value))


@table(IDS, [*NOT_INTS, (1,)])
def test_block_ids_of_the_wrong_type(parameter: str, row: Ids, value: object) -> None:
    words = (f"{parameter}[1]", repr(value))
    check_refused(lambda world: row.call(world, [row.good, value]), ArgumentTypeError, *words)


@table(IDS, [0, -1, 9, 2**31, 2**32 - 1, 2**32, 2**63, 2**64, 10**30], lambda row, value: value == 0 and row.null)
def test_block_ids_out_of_range(parameter: str, row: Ids, value: int) -> None:
    word = parameter if not 0 <= value < 2**32 else "null block" if value == 0 else "block"
    check_refused(lambda world: row.call(world, [row.good, value]), ConfigError, word, value)


@dataclass(frozen=True)
class Array:
    """A call that takes an array of ints from `low` to `high`."""

    call: Callable[[Any], object]
    low: int
    high: int = 2**63 - 1


ARRAYS: list[tuple[str, Array]] = [
    # A negative position is padding.
    ("positions", Array(lambda v: slots(positions=v), -(2**63))),
    ("block_ids", Array(lambda v: slots(block_ids=v), 0, (2**63 - 1) // 8 - 1)),
    ("seq_lens", Array(lambda v: local_seq_lens(v, kv_shards=2, rank=0), 0)),
    ("block_ids", Array(lambda v: kernel_block_ids(v, block_size=8, kernel_block_size=4), 0, (2**63 - 1) // 2 - 1)),
    ("block_ids", Array(lambda v: table_row(v, width=9), 0)),
]


@table(ARRAYS, [None, "1", b"1", True, 1.0, [None], [True], [1, True], [1.0], ["1"], [[1], [1, 2]], [[1], 2], {1: 1}])
def test_arrays_of_the_wrong_type(parameter: str, row: Array, value: object) -> None:
    check_refused(lambda _: row.call(value), ArgumentTypeError, parameter, repr(value))


@table(
    ARRAYS, [-(2**63) - 1, -(2**63), -1, 2**62, 2**63, 2**64, 10**30], lambda row, value: row.low <= value <= row.high
)
def test_arrays_out_of_range(parameter: str, row: Array, value: int) -> None:
    check_refused(lambda _: row.call([1, value]), ConfigError, parameter, value)
