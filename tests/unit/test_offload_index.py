"""The index of a host tier through its Python surface: what each call gives, and that a refused one changes nothing."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

import lockstep_kv
from lockstep_kv import ArgumentTypeError, ConfigError, DoubleFreeError, OffloadIndex, StorePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

A, B, C, D, E = (bytes([letter]) * 32 for letter in b"abcde")


def stored(keys: Sequence[bytes], num_slots: int = 4, policy: Any = "lru") -> OffloadIndex:
    """An index in which these keys are ready, the last most recent."""
    index = OffloadIndex(num_slots, policy)
    for key in keys:
        assert index.prepare_store([key]) is not None
        index.complete_store([key])
    return index


def planned(plan: StorePlan | None) -> tuple[list[bytes], list[int], list[bytes]]:
    assert plan is not None
    return plan.keys, plan.slots, plan.evicted


def test_a_store_is_pending_until_it_is_complete() -> None:
    index = OffloadIndex(4)
    assert (index.num_slots, index.num_free_slots, index.num_keys, index.policy) == (4, 4, 0, "lru")
    assert planned(index.prepare_store((A, B, A))) == ([A, B], [0, 1], [])
    assert [index.lookup(key) for key in (A, B, C)] == ["pending", "pending", "miss"]
    index.complete_store([A])
    index.complete_store([B], success=False)
    assert [index.lookup(key) for key in (A, B, C)] == ["hit", "miss", "miss"]
    assert planned(index.prepare_store([A])) == ([], [], [])
    assert (index.num_free_slots, index.num_keys) == (3, 1)
    index.audit()


def test_a_plan_is_a_value() -> None:
    plan = OffloadIndex(4).prepare_store([A])
    assert plan == OffloadIndex(4).prepare_store([A])
    assert plan != OffloadIndex(4).prepare_store([B])
    assert repr(plan) == "StorePlan(1 keys, 0 evicted)"
    with pytest.raises(AttributeError):
        plan.slots = []  # type: ignore[misc, union-attr]
    with pytest.raises(TypeError):
        StorePlan()


def test_full_tiers_evict_and_refuse_with_none() -> None:
    index = stored([A, B], num_slots=2)
    assert index.prepare_load([B, B]) == [1, 1]
    assert planned(index.prepare_store([C])) == ([C], [0], [A])
    before = index.state_digest()
    assert index.prepare_store([D]) is None, "B is read, C is written"
    assert index.state_digest() == before
    index.complete_load([B])
    assert index.prepare_store([D]) is None
    index.complete_load([B])
    assert index.prepare_store([B, D]) is None, "a key of the call is not evicted for another"
    assert planned(index.prepare_store([D])) == ([D], [1], [B])
    index.audit()


def test_touching_and_loading_are_uses_and_looking_up_is_not() -> None:
    index = stored([A, B, C, D])
    index.touch([B, E, A])
    assert index.prepare_load([C]) == [2]
    index.complete_load([C])
    index.lookup(D)
    assert planned(index.prepare_store([E]))[2] == [D]
    assert planned(index.prepare_store([D]))[2] == [A]
    assert index.stats()["evicted"] == 2


def test_adaptive_replacement_keeps_what_is_used_again() -> None:
    index = stored([A, B, C], num_slots=3, policy="arc")
    assert index.policy == "arc"
    index.touch([A])
    assert planned(index.prepare_store([D]))[2] == [B]
    assert planned(index.prepare_store([E]))[2] == [C]
    assert index.lookup(A) == "hit"
    index.audit()


def test_a_reset_lets_transfers_drain() -> None:
    index = stored([A], num_slots=3)
    index.prepare_store([B])
    index.prepare_load([A])
    index.reset()
    assert [index.lookup(key) for key in (A, B)] == ["miss", "miss"]
    assert (index.num_free_slots, index.stats()["draining_slots"]) == (1, 2)
    assert planned(index.prepare_store([B])) == ([B], [2], [])
    index.complete_store([B])
    assert index.lookup(B) == "pending", "the older store was completed"
    index.complete_store([B])
    index.complete_load([A])
    assert (index.lookup(B), index.num_free_slots) == ("hit", 2)
    index.audit()


def test_stats_say_what_happened_and_what_slots_are_used_for() -> None:
    index = stored([A, B])
    index.prepare_store([C])
    index.prepare_load([A, A])
    assert index.stats() == {
        "stored": 2,
        "evicted": 0,
        "failed_stores": 0,
        "dropped_stores": 0,
        "loads": 2,
        "free_slots": 1,
        "writing_slots": 1,
        "idle_slots": 1,
        "reading_slots": 1,
        "draining_slots": 0,
        "keys": 3,
    }
    assert repr(index) == "OffloadIndex(4 slots, 1 free)"


@pytest.mark.parametrize("num_slots", [0, 2**27 + 1, 2**32, 2**63, 2**64, -1])
def test_impossible_sizes_are_refused(num_slots: int) -> None:
    with pytest.raises(ConfigError, match="num_slots"):
        OffloadIndex(num_slots)


@pytest.mark.parametrize("num_slots", [None, "4", 4.0, True, b"4", [4]])
def test_sizes_of_a_wrong_type_are_refused(num_slots: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="num_slots"):
        OffloadIndex(num_slots)


@pytest.mark.parametrize("policy", ["", "LRU", "fifo", "lru "])
def test_unknown_policies_are_refused_by_name(policy: Any) -> None:
    with pytest.raises(ConfigError, match=f'policy must be .*"{policy}"'):
        OffloadIndex(4, policy)


@pytest.mark.parametrize("policy", [None, 1, b"lru", ["lru"]])
def test_policies_of_a_wrong_type_are_refused(policy: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="policy"):
        OffloadIndex(4, policy)


CALLS: list[Callable[[OffloadIndex, Any], object]] = [
    lambda index, keys: index.prepare_store(keys),
    lambda index, keys: index.complete_store(keys),
    lambda index, keys: index.complete_store(keys, success=False),
    lambda index, keys: index.prepare_load(keys),
    lambda index, keys: index.complete_load(keys),
    lambda index, keys: index.touch(keys),
]


def in_use() -> OffloadIndex:
    """A is ready and read once, B is ready, C is being written."""
    index = stored([A, B])
    index.prepare_store([C])
    index.prepare_load([A])
    return index


def refused(index: OffloadIndex, call: Callable[[], object], error: type[Exception], match: str) -> None:
    digest, stats = index.state_digest(), index.stats()
    with pytest.raises(error, match=match):
        call()
    assert (index.state_digest(), index.stats()) == (digest, stats)
    index.audit()


@pytest.mark.parametrize("call", CALLS)
def test_bad_keys_are_refused_and_change_nothing(call: Callable[[OffloadIndex, Any], object]) -> None:
    index = in_use()
    for keys in (None, 7, A, "abc", {A}.__iter__(), object()):
        refused(index, lambda keys=keys: call(index, keys), ArgumentTypeError, "keys must be a sequence")  # type: ignore[misc]
    for item in (None, 7, "abc", bytearray(A), [A]):
        refused(index, lambda item=item: call(index, [A, item]), ArgumentTypeError, r"keys\[1\] must be bytes")  # type: ignore[misc]
    for key in (b"", bytes(41)):
        refused(index, lambda key=key: call(index, [A, key]), ConfigError, r"keys\[1\].*1 to 40 bytes")  # type: ignore[misc]


def test_lookup_refuses_bad_keys() -> None:
    index = in_use()
    for key in (None, "abc", 7, [A]):
        refused(index, lambda key=key: index.lookup(key), ArgumentTypeError, "key must be bytes")  # type: ignore[misc]
    for length in (0, 41):
        refused(index, lambda length=length: index.lookup(bytes(length)), ConfigError, "1 to 40 bytes")  # type: ignore[misc]
    assert index.lookup(bytes(40)) == "miss"


def test_success_is_a_bool() -> None:
    index = in_use()
    for success in (None, 1, "yes"):
        refused(index, lambda success=success: index.complete_store([C], success), ArgumentTypeError, "success")  # type: ignore[misc]


def test_transfers_complete_once() -> None:
    index = in_use()
    for keys in ([A], [D], [C, C], [C, A]):
        for success in (True, False):
            call = lambda keys=keys, success=success: index.complete_store(keys, success)  # noqa: E731
            refused(index, call, DoubleFreeError, "stores in flight")
    for keys in ([B], [C], [D], [A, A], [A, B]):
        refused(index, lambda keys=keys: index.complete_load(keys), DoubleFreeError, "loads in flight")  # type: ignore[misc]
    index.complete_store([C])
    index.complete_load([A])
    refused(index, lambda: index.complete_store([C]), DoubleFreeError, C.hex())
    refused(index, lambda: index.complete_load([A]), DoubleFreeError, A.hex())


def test_only_ready_keys_are_loaded() -> None:
    index = in_use()
    refused(index, lambda: index.prepare_load([A, C]), ConfigError, f"{C.hex()}.*being written")
    refused(index, lambda: index.prepare_load([A, D]), ConfigError, f"{D.hex()}.*not stored")


def test_the_surface_is_exported_and_documented() -> None:
    for name in ("OffloadIndex", "StorePlan"):
        cls = getattr(lockstep_kv, name)
        assert name in lockstep_kv.__all__
        assert cls.__module__ == "lockstep_kv"
        for member, value in vars(cls).items():
            assert member.startswith("_") or inspect.getdoc(value), f"{name}.{member}"
