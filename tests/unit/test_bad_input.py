"""Bad input to every call: refused with the exact error class and the value in the message, and nothing changes.

Numbers, ids, hashes, strings and flags are tables of parameters, each tried with every bad value of its kind. What does
not fit a table is listed at the end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lockstep_kv import (
    ArgumentTypeError,
    BlockPool,
    ConfigError,
    Coordinator,
    CoordinatorConfig,
    DoubleFreeError,
    GroupSpec,
    LayerSpec,
    LockstepKVError,
    PoolExhaustedError,
    StaleHitError,
    UnknownRequestError,
    hash_blocks,
    none_hash,
    plan_layout,
)
from lockstep_kv.block_table import (
    kernel_block_ids,
    local_seq_lens,
    padded_table_width,
    slot_mapping,
    table_row,
    table_width,
)
from lockstep_kv.models import model_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_LEN = 64
HASHES = [bytes([at]) * 32 for at in range(16)]
ROOT = bytes(32)
PAIR = [GroupSpec("mla", 4, [LayerSpec("ckv", 64)]), GroupSpec("mla", 8, [LayerSpec("indexer", 8)], kv_shards=1)]
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 64,
}


def pair_config(**changes: Any) -> CoordinatorConfig:
    """Two ranks, one lockstep set of 8 tokens per block, 9 blocks."""
    good: dict[str, Any] = {"groups": PAIR, "num_blocks": 9, "dcp_world_size": 2, "max_model_len": MAX_LEN}
    return CoordinatorConfig(**{**good, **changes})


@dataclass
class World:
    """A coordinator and a pool in the middle of their work.

    Request "a" holds blocks 1 to 3; 1 and 2 were published, but 2 was evicted after `stale` was found, so that `fresh`
    is 8 tokens long. `foreign` is another coordinator's. Block 4 is pinned. In the pool block 1 is held and published,
    and block 2 is held twice.
    """

    c: Coordinator = field(default_factory=lambda: Coordinator(pair_config(enable_events=True)))
    p: BlockPool = field(default_factory=lambda: BlockPool(5))

    def __post_init__(self) -> None:
        self.c.allocate("a", 24)
        self.c.cache("a", HASHES, 16)
        self.c.pin([4])
        self.stale = self.c.find_longest_hit(HASHES, 16)
        self.c.evict([2])
        self.fresh = self.c.find_longest_hit(HASHES, 16)
        self.foreign = Coordinator(pair_config()).find_longest_hit(HASHES, 16)
        self.p.take(2)
        self.p.add_ref([2])
        self.p.publish(1, b"key")

    def state(self) -> tuple[object, ...]:
        """Return the digests, and what they leave out."""
        c, p = self.c, self.p
        return c.state_digest(), c.stats(), c.free_order(), c.block_ids("a"), p.state_digest(), p.free_order()


def check_refused(call: Callable[[World], object], error: type[LockstepKVError], *shown: str | int) -> None:
    """Check that a call is refused, with these words and whole numbers in its message, and changes nothing."""
    world = World()
    before = world.state()
    with pytest.raises(LockstepKVError) as caught:
        call(world)
    assert caught.type is error
    message = str(caught.value)
    for part in shown:
        found = part in message if isinstance(part, str) else re.search(rf"(?<![\w-]){part}(?!\w)", message)
        assert found, f"{message!r} lacks {part!r}"
    assert len(message) < 400
    assert "\n" not in message
    assert world.state() == before
    world.c.audit()
    world.p.audit()


def short(value: object) -> str:
    """Return an id for a value: its type and the start of its text."""
    return f"{type(value).__name__} {str(value)[:24]!a}"


def table(
    rows: Sequence[tuple[str, Any]], values: Sequence[object], fits: Callable[[Any, Any], bool] = lambda _, __: False
) -> pytest.MarkDecorator:
    """Every parameter with every value that does not fit it."""
    cases = [(f"{at}-{name}", name, row, value) for at, (name, row) in enumerate(rows) for value in values]
    return pytest.mark.parametrize(
        ("parameter", "row", "value"),
        [
            pytest.param(name, row, value, id=f"{number} {short(value)}")
            for number, name, row, value in cases
            if not fits(row, value)
        ],
    )


# Integers.


@dataclass(frozen=True)
class Int:
    """A parameter that takes integers from `low` to `high`, and None if `none`."""

    call: Callable[[World, Any], object]
    low: int
    high: int = 2**64 - 1
    none: bool = False


def model(**options: Any) -> object:
    return model_groups(MODEL, **{"block_size": 16, "dcp_world_size": 1, **options})


def plan(**options: Any) -> object:
    return plan_layout(
        **{"groups": PAIR, "dcp_world_size": 2, "max_model_len": MAX_LEN, **({"num_blocks": 99} | options)}
    )


def slots(**options: Any) -> object:
    good = {"positions": [1], "block_ids": [5], "block_size": 8, "kernel_block_size": 8, "kv_shards": 2, "rank": 1}
    return slot_mapping(**{**good, **options})


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


# Hashes and keys.


@dataclass(frozen=True)
class Hashes:
    """A call that takes block hashes, and how many it reads before the one that is bad."""

    call: Callable[[World, Any], object]
    read: int


HASH_LISTS: list[tuple[str, Hashes]] = [
    ("block_hashes", Hashes(lambda w, v: w.c.find_longest_hit(v, 24), 1)),
    ("block_hashes", Hashes(lambda w, v: w.c.cache("a", v, 24), 2)),
    ("block_hashes", Hashes(lambda w, v: w.c.cache("a", v, 24, num_prompt_tokens=23), 2)),
]
# Here one bytes object stands alone.
BYTES: list[tuple[str, Callable[[World, Any], object]]] = [
    ("block_hash", lambda w, v: w.c.lookup(v)),
    ("parent", lambda _, v: hash_blocks([1], 1, parent=v, none_hash=ROOT)),
    ("none_hash", lambda _, v: hash_blocks([1], 1, none_hash=v)),
]
KEYS: list[tuple[str, Callable[[World, Any], object]]] = [
    ("key", lambda w, v: w.p.publish(1, v)),
    ("key", lambda w, v: w.p.lookup(v)),
]
NOT_BYTES = [True, 5, 1.0, "x" * 32, bytearray(32), [bytes(32)], [[bytes(32)]]]


@table(HASH_LISTS, [None, 5, True, "x" * 32, b"x" * 32, bytearray(32), dict.fromkeys(HASHES)])
def test_hashes_that_are_no_list(parameter: str, row: Hashes, value: object) -> None:
    check_refused(lambda world: row.call(world, value), ArgumentTypeError, parameter, repr(value)[:80])


@table(HASH_LISTS, [None, *NOT_BYTES])
def test_hashes_of_the_wrong_type(parameter: str, row: Hashes, value: object) -> None:
    words = (f"{parameter}[{row.read}]", repr(value)[:80])
    check_refused(lambda world: row.call(world, [*HASHES[: row.read], value]), ArgumentTypeError, *words)


@table(HASH_LISTS, [0, 1, 15, 17, 31, 33, 64])
def test_hashes_of_the_wrong_length(parameter: str, row: Hashes, value: int) -> None:
    words = (f"{parameter}[{row.read}]", "16 or 32", f"got {value}")
    check_refused(lambda world: row.call(world, [*HASHES[: row.read], bytes(value)]), ConfigError, *words)


@table([*BYTES, *KEYS], [None, *NOT_BYTES], lambda row, value: value is None and row is BYTES[1][1])
def test_bytes_of_the_wrong_type(parameter: str, row: Callable[[World, Any], object], value: object) -> None:
    check_refused(lambda world: row(world, value), ArgumentTypeError, parameter, repr(value)[:80])


@table(BYTES, [0, 1, 15, 17, 31, 33, 64])
def test_one_hash_of_the_wrong_length(parameter: str, row: Callable[[World, Any], object], value: int) -> None:
    words = ("a block hash" if parameter == "block_hash" else parameter, "16 or 32", f"got {value}")
    check_refused(lambda world: row(world, bytes(value)), ConfigError, *words)


@table(KEYS, [0, 41, 1000])
def test_keys_of_the_wrong_length(parameter: str, row: Callable[[World, Any], object], value: int) -> None:
    check_refused(lambda world: row(world, bytes(value)), ConfigError, parameter, "1 to 40", f"got {value}")


# Strings and flags.

TEXTS: list[tuple[str, Callable[[World, Any], object]]] = [
    ("name", lambda _, v: LayerSpec(v, 8)),
    ("kind", lambda _, v: GroupSpec(v, 4, [])),
    ("request_id", lambda w, v: w.c.allocate(v, 8)),
    ("request_id", lambda w, v: w.c.cache(v, HASHES, 8)),
    ("request_id", lambda w, v: w.c.release_skipped(v, 8)),
    ("request_id", lambda w, v: w.c.free(v)),
    ("request_id", lambda w, v: w.c.block_ids(v)),
    ("algo", lambda _, v: hash_blocks([1], 1, algo=v, none_hash=ROOT)),
    ("algo", lambda _, v: none_hash(v)),
    ("seed", lambda _, v: none_hash(seed=v)),
]
FLAGS: list[tuple[str, Callable[[World, Any], object]]] = [
    ("is_eagle", lambda _, v: GroupSpec("full", 4, [], is_eagle=v)),
    ("enable_caching", lambda _, v: pair_config(enable_caching=v)),
    ("use_eagle", lambda _, v: pair_config(use_eagle=v)),
    ("enable_events", lambda _, v: pair_config(enable_events=v)),
    ("enable_caching", lambda _, v: BlockPool(4, v)),
    ("include_mtp", lambda _, v: model(include_mtp=v)),
]


@table(TEXTS, [None, 5, True, 1.0, b"a", ["a"], ("a",)], lambda row, value: value is None and row is TEXTS[-1][1])
def test_strings_of_the_wrong_type(parameter: str, row: Callable[[World, Any], object], value: object) -> None:
    check_refused(lambda world: row(world, value), ArgumentTypeError, parameter, repr(value))


@table(TEXTS, ["\ud800", "a\udfff"])
def test_strings_that_are_no_unicode(parameter: str, row: Callable[[World, Any], object], value: str) -> None:
    check_refused(lambda world: row(world, value), ConfigError, parameter, ascii(value))


@table(FLAGS, [None, 0, 1, 1.0, "True", b"", []])
def test_flags_of_the_wrong_type(parameter: str, row: Callable[[World, Any], object], value: object) -> None:
    check_refused(lambda world: row(world, value), ArgumentTypeError, parameter, type(value).__name__)


# Objects.

LISTS: list[tuple[str, Callable[[World, Any], object]]] = [
    ("layers", lambda _, v: GroupSpec("full", 4, v)),
    ("groups", lambda _, v: pair_config(groups=v)),
    ("groups", lambda _, v: plan(groups=v)),
]
OBJECTS: list[tuple[str, Callable[[World, Any], object]]] = [
    ("config", lambda _, v: Coordinator(v)),
    ("hit", lambda w, v: w.c.allocate("b", 8, hit=v)),
]


@table([*LISTS, *OBJECTS], [None, 5, True, "full", b"full", 1.0], lambda row, v: v is None and row is OBJECTS[1][1])
def test_objects_of_the_wrong_type(parameter: str, row: Callable[[World, Any], object], value: object) -> None:
    check_refused(lambda world: row(world, value), ArgumentTypeError, parameter, repr(value))


@table(LISTS, [None, 5, "full", [LayerSpec("x", 8)], [PAIR[0]], pair_config()])
def test_items_of_the_wrong_type(parameter: str, row: Callable[[World, Any], object], value: object) -> None:
    check_refused(lambda world: row(world, [value]), ArgumentTypeError, f"{parameter}[0]", repr(value)[:80])


# All else.


def of_kind(kind: str, **options: Any) -> GroupSpec:
    return GroupSpec(kind, 4, [LayerSpec(kind, 8)], **options)


NOT_SUPPORTED = [
    of_kind("mamba"),
    of_kind("cross_attention"),
]


@pytest.mark.parametrize("group", NOT_SUPPORTED, ids=lambda group: group.kind)
def test_kinds_that_are_not_supported_yet(group: GroupSpec) -> None:
    words = ("group 2", group.kind, "not supported")
    check_refused(lambda _: Coordinator(pair_config(groups=[*PAIR, group])), ConfigError, *words)
    check_refused(lambda _: plan(groups=[*PAIR, group]), ConfigError, *words)


WIDE = [GroupSpec("full", 2**32 - at, [LayerSpec(f"{at}", 8)], kv_shards=1) for at in (1, 2, 3)]
LONG = [GroupSpec("full", 1, [LayerSpec(f"{at}", 8)]) for at in range(2)]
OTHERS: dict[str, tuple[Callable[[World], object], type[LockstepKVError], tuple[str, ...]]] = {
    # Groups.
    "unknown kind": (lambda _: GroupSpec("MLA", 4, []), ConfigError, ('"MLA"', "full, mla")),
    "empty kind": (lambda _: GroupSpec("", 4, []), ConfigError, ('""',)),
    "window of full": (lambda _: of_kind("full", sliding_window=8), ConfigError, ("sliding_window", "8")),
    "chunk of mla": (lambda _: of_kind("mla", attention_chunk_size=8), ConfigError, ("attention_chunk_size", "8")),
    "no window": (lambda _: of_kind("sliding_window"), ConfigError, ("sliding_window is missing",)),
    "no chunk": (lambda _: of_kind("chunked_local"), ConfigError, ("attention_chunk_size is missing",)),
    "sharded state": (lambda _: of_kind("mamba", kv_shards=2), ConfigError, ("mamba", "kv_shards 2")),
    "sharded encoder": (lambda _: of_kind("cross_attention", kv_shards=2), ConfigError, ("kv_shards 2",)),
    "too many bytes": (
        lambda _: GroupSpec("full", 4, [LayerSpec("x", 2**63), LayerSpec("y", 2**63)]).bytes_per_block,
        ConfigError,
        ("page_bytes", "full group"),
    ),
    # Configurations and layouts.
    "no groups": (lambda _: pair_config(groups=[]), ConfigError, ("groups", "got none")),
    "hash size": (lambda _: pair_config(hash_block_tokens=3), ConfigError, ("hash_block_tokens", "8", "3")),
    "no common multiple": (lambda _: pair_config(groups=WIDE), ConfigError, ("common multiple", str(2**32 - 1))),
    "no layers": (lambda _: plan(groups=[GroupSpec("full", 4, [])]), ConfigError, ("group 0", "layers")),
    "one name twice": (lambda _: plan(groups=[PAIR[0], PAIR[0]]), ConfigError, ("group 1", '"ckv"')),
    "no size": (lambda _: plan(num_blocks=None), ConfigError, ("available_bytes", "num_blocks")),
    "blocks over bytes": (lambda _: plan(num_blocks=99, available_bytes=99 * 72 - 1), ConfigError, ("99", "7127")),
    "bytes over 64 bits": (lambda _: plan(num_blocks=2**60), ConfigError, (str(2**60), "72")),
    # The blocks of all sets together are counted without wrapping round.
    "two long sets": (
        lambda _: plan(groups=LONG, dcp_world_size=1, max_model_len=2**63),
        ConfigError,
        (str(2**63), str(2**64)),
    ),
    "one very long set": (
        lambda _: plan(groups=LONG[:1], dcp_world_size=1, max_model_len=2**64 - 1),
        ConfigError,
        (str(2**64 - 1), str(2**64 * 8)),
    ),
    # Hashes.
    "unknown algorithm": (lambda _: hash_blocks([1], 1, algo="md5", none_hash=ROOT), ConfigError, ('"md5"', "xxhash")),
    "tokens of bytes": (lambda _: hash_blocks(b"abc", 1, none_hash=ROOT), ArgumentTypeError, ("b'abc'",)),
    "nested tokens": (
        lambda _: hash_blocks([[1, 2]], 1, none_hash=ROOT),  # type: ignore[list-item]
        ArgumentTypeError,
        ("token_ids[0]", "[1, 2]"),
    ),
    "too few extra keys": (
        lambda _: hash_blocks([1, 2], 1, extra_keys=[None], none_hash=ROOT),
        ConfigError,
        ("extra_keys", "2", "got 1"),
    ),
    # Requests.
    "cache unknown": (lambda w: w.c.cache("nobody", HASHES, 8), UnknownRequestError, ('"nobody"',)),
    "release_skipped unknown": (lambda w: w.c.release_skipped("nobody", 8), UnknownRequestError, ('"nobody"',)),
    "free unknown": (lambda w: w.c.free("nobody"), UnknownRequestError, ('"nobody"',)),
    "block_ids unknown": (lambda w: w.c.block_ids("nobody"), UnknownRequestError, ('"nobody"',)),
    "stale hit": (lambda w: w.c.allocate("b", 24, hit=w.stale), StaleHitError, ("block 2",)),
    "foreign hit": (lambda w: w.c.allocate("b", 24, hit=w.foreign), ConfigError, ("another coordinator",)),
    "hit for a running request": (
        lambda w: w.c.allocate("a", 32, hit=w.fresh),
        ConfigError,
        ('"a"', "hit of 8"),
    ),
    "external tokens for a running request": (
        lambda w: w.c.allocate("a", 32, num_external_tokens=5),
        ConfigError,
        ('"a"', "5 external"),
    ),
    "hit over num_tokens": (lambda w: w.c.allocate("b", 7, hit=w.fresh), ConfigError, ("hit of 8", "num_tokens 7")),
    "hit and external tokens over num_tokens": (
        lambda w: w.c.allocate("b", 20, hit=w.fresh, num_external_tokens=2**64 - 1),
        ConfigError,
        ("hit of 8", str(2**64 - 1), "20"),
    ),
    "too few hashes": (lambda w: w.c.cache("a", HASHES[:2], 24), ConfigError, ("2 hashes", "3 are needed")),
    # References and pins.
    "double release": (lambda w: w.p.release([1, 2, 1]), DoubleFreeError, ("block 1", "2 times", "has 1")),
    "release of a free block": (lambda w: w.p.release([2, 4]), DoubleFreeError, ("block 4", "1 times", "has 0")),
    "double unpin": (lambda w: w.c.unpin([4, 4]), DoubleFreeError, ("block 4", "2 times", "has 1")),
    "unpin of a row's block": (lambda w: w.c.unpin([4, 1]), DoubleFreeError, ("block 1", "1 times", "has 0")),
    "key of a free block": (lambda w: w.p.publish(4, b"other"), ConfigError, ("block 4", "free")),
    "key of the null block": (lambda w: w.p.publish(0, b"other"), ConfigError, ("block 0", "null block")),
}


@pytest.mark.parametrize(("call", "error", "shown"), OTHERS.values(), ids=list(OTHERS))
def test_other_bad_input(
    call: Callable[[World], object], error: type[LockstepKVError], shown: tuple[str | int, ...]
) -> None:
    check_refused(call, error, *shown)


def test_a_request_too_large_to_count_is_refused_like_any_that_does_not_fit() -> None:
    # Two sets of 2**63 blocks each: the sum does not fit in 64 bits.
    c = Coordinator(CoordinatorConfig(LONG, 9, max_model_len=2**64 - 1))
    before = c.state_digest()
    for tokens in (2**63, 2**64 - 1):
        assert c.allocate("a", tokens) is None
        assert c.state_digest() == before
        assert c.num_requests == 0


def test_slots_too_many_to_count_are_slots() -> None:
    # Two blocks of nearly 2**64 tokens each.
    group = GroupSpec("full", 2**32 - 1, [])
    c = Coordinator(CoordinatorConfig([group], 9, dcp_world_size=2**32 - 1, max_model_len=2**64 - 1))
    c.allocate("a", 2**64 - 1)
    c.cache("a", HASHES, 2**64 - 1)
    assert c.lookup(HASHES[0]) == (1,)


def test_a_pool_without_caching_publishes_nothing() -> None:
    pool = BlockPool(4, enable_caching=False)
    pool.take(1)
    before = pool.state_digest()
    with pytest.raises(ConfigError, match="block 1 cannot be published: caching is off"):
        pool.publish(1, b"key")
    assert pool.state_digest() == before
