"""Bad input to every call: refused with the exact error class and the value in the message, and nothing changes.

Hashes, strings, flags and objects are tables of parameters, each tried with every bad value of its kind. What does not
fit a table is listed at the end. Numbers have a file of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from refusals import HASHES, PAIR, ROOT, World, check_refused, model, pair_config, plan, table

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
    StaleHitError,
    UnknownRequestError,
    hash_blocks,
    none_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable

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


def of_kind(kind: str, **options: Any) -> GroupSpec:
    return GroupSpec(kind, 4, [LayerSpec(kind, 8)], **options)


# Strings and flags.

TEXTS: list[tuple[str, Callable[[World, Any], object]]] = [
    ("name", lambda _, v: LayerSpec(v, 8)),
    ("kind", lambda _, v: GroupSpec(v, 4, [])),
    ("request_id", lambda w, v: w.c.allocate(v, 8)),
    ("request_id", lambda w, v: w.c.cache(v, HASHES, 8)),
    ("request_id", lambda w, v: w.c.release_skipped(v, 8)),
    ("request_id", lambda w, v: w.c.free(v)),
    ("request_id", lambda w, v: w.c.block_ids(v)),
    ("request_id", lambda w, v: w.c.take_final_states(v, 8)),
    ("request_id", lambda w, v: w.c.note_unwritten(v, 8)),
    ("request_id", lambda w, v: w.c.checkpoint(v, 0)),
    ("mamba_cache_mode", lambda _, v: of_kind("mamba", mamba_cache_mode=v)),
    ("algo", lambda _, v: hash_blocks([1], 1, algo=v, none_hash=ROOT)),
    ("algo", lambda _, v: none_hash(v)),
    ("seed", lambda _, v: none_hash(seed=v)),
]
OPTIONAL = [TEXTS[-1][1], dict(TEXTS)["mamba_cache_mode"]]
FLAGS: list[tuple[str, Callable[[World, Any], object]]] = [
    ("is_eagle", lambda _, v: GroupSpec("full", 4, [], is_eagle=v)),
    ("enable_caching", lambda _, v: pair_config(enable_caching=v)),
    ("use_eagle", lambda _, v: pair_config(use_eagle=v)),
    ("enable_events", lambda _, v: pair_config(enable_events=v)),
    ("prefix_cacheable", lambda _, v: of_kind("sliding_window", sliding_window=8, prefix_cacheable=v)),
    ("publishes_shared_prefix", lambda _, v: pair_config(publishes_shared_prefix=v)),
    ("notes_new_blocks", lambda _, v: pair_config(notes_new_blocks=v)),
    ("notes_uses", lambda _, v: pair_config(notes_uses=v)),
    ("is_in_flight", lambda w, v: w.c.take_final_states("a", 8, is_in_flight=v)),
    ("capped", lambda w, v: w.c.blocks_needed("a", 8, capped=v)),
    ("enable_caching", lambda _, v: BlockPool(4, v)),
    ("include_mtp", lambda _, v: model(include_mtp=v)),
]


@table(TEXTS, [None, 5, True, 1.0, b"a", ["a"], ("a",)], lambda row, value: value is None and row in OPTIONAL)
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
    ("lookup_classes", lambda _, v: pair_config(lookup_classes=v)),
    ("uncleared_groups", lambda w, v: w.c.allocate_slots("b", 8, uncleared_groups=v)),
    ("layers", lambda _, v: GroupSpec("full", 4, v)),
    ("groups", lambda _, v: pair_config(groups=v)),
    ("groups", lambda _, v: plan(groups=v)),
]
OBJECTS: list[tuple[str, Callable[[World, Any], object]]] = [
    ("config", lambda _, v: Coordinator(v)),
    ("hit", lambda w, v: w.c.allocate("b", 8, hit=v)),
]


NOT_NEEDED = [OBJECTS[1][1], LISTS[0][1], LISTS[1][1]]


@table([*LISTS, *OBJECTS], [None, 5, True, "full", b"full", 1.0], lambda row, v: v is None and row in NOT_NEEDED)
def test_objects_of_the_wrong_type(parameter: str, row: Callable[[World, Any], object], value: object) -> None:
    check_refused(lambda world: row(world, value), ArgumentTypeError, parameter, repr(value))


@table(
    LISTS,
    [None, 5, "full", [LayerSpec("x", 8)], [PAIR[0]], pair_config()],
    lambda row, v: v == 5 and row in NOT_NEEDED,
)
def test_items_of_the_wrong_type(parameter: str, row: Callable[[World, Any], object], value: object) -> None:
    check_refused(lambda world: row(world, [value]), ArgumentTypeError, f"{parameter}[0]", repr(value)[:80])


# All else.


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
    "unknown mode": (lambda _: of_kind("mamba", mamba_cache_mode="some"), ConfigError, ('"some"', "none, all, align")),
    "mode of full": (lambda _: of_kind("full", mamba_cache_mode="all"), ConfigError, ("mamba_cache_mode", "full")),
    "drafts of full": (lambda _: of_kind("full", num_speculative_blocks=1), ConfigError, ("num_speculative_blocks",)),
    "checkpoints of mode all": (
        lambda _: of_kind("mamba", mamba_cache_mode="all", checkpoint_alignment=4),
        ConfigError,
        ("checkpoint_alignment", "align", "4"),
    ),
    "no window of the prompt": (lambda _: of_kind("reference_window"), ConfigError, ("sliding_window is missing",)),
    "retained by full": (
        lambda _: of_kind("full", extra_retained_tokens=3),
        ConfigError,
        ("extra_retained_tokens", "3"),
    ),
    "full that is not shared": (lambda _: of_kind("full", prefix_cacheable=False), ConfigError, ("prefix_cacheable",)),
    "sharded buffer": (lambda _: of_kind("circular_buffer", kv_shards=2), ConfigError, ("kv_shards 2",)),
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
    "two modes": (
        lambda _: pair_config(groups=[of_kind("mamba"), of_kind("mamba", mamba_cache_mode="all")]),
        ConfigError,
        ("mamba_cache_mode", '"none"', '"all"'),
    ),
    "shared encoder": (lambda _: pair_config(groups=[of_kind("cross_attention")]), ConfigError, ("enable_caching",)),
    "unplanned encoder": (
        lambda _: plan(groups=[of_kind("cross_attention")]),
        ConfigError,
        ("max_encoder_tokens", "got 0"),
    ),
    "too few classes": (lambda _: pair_config(lookup_classes=[0]), ConfigError, ("lookup_classes", "2", "got 1")),
    "classes of two kinds": (
        lambda _: pair_config(groups=[of_kind("full"), of_kind("mamba")], dcp_world_size=1, lookup_classes=[0, 0]),
        ConfigError,
        ("lookup_classes", "groups 0 and 1"),
    ),
    "long lookahead": (
        lambda _: pair_config(use_eagle=True, num_prefill_lookahead=9),
        ConfigError,
        ("num_prefill_lookahead", "8", "got 9"),
    ),
    "odd interval": (lambda w: w.c.set_retention_interval(12), ConfigError, ("retention_interval", "8", "12")),
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
    "blocks of a group that is not there": (
        lambda w: w.c.allocate_slots("b", 8, uncleared_groups=[2]),
        ConfigError,
        ("group 2", "2 groups"),
    ),
    "checkpoint unknown": (lambda w: w.c.checkpoint("nobody", 0), UnknownRequestError, ('"nobody"',)),
    "note_unwritten unknown": (lambda w: w.c.note_unwritten("nobody", 0), UnknownRequestError, ('"nobody"',)),
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
