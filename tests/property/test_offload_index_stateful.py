"""The index of a host tier against a small model in plain Python, over random sequences of calls.

The model knows the order of eviction of the least-recently-used policy. For the adaptive policy it takes over what was
evicted, once it has seen that the choice was allowed. The same goes for which of the free slots are used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lockstep_kv import ConfigError, DoubleFreeError, OffloadIndex

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = [bytes([number]) * (1 + 3 * number) for number in range(12)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=5)


@dataclass
class Transfer:
    """A store, or one load, in flight."""

    key: bytes
    slot: int
    forgotten: bool = False


@dataclass
class Model:
    num_slots: int
    # Ready keys and their slots, the least recently used first.
    ready: dict[bytes, int] = field(default_factory=dict)
    # Transfers in the order in which they were prepared.
    stores: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)

    def writing(self) -> dict[bytes, int]:
        return {store.key: store.slot for store in self.stores if not store.forgotten}

    def used(self) -> set[int]:
        return {transfer.slot for transfer in self.stores + self.loads} | set(self.ready.values())

    def lookup(self, key: bytes) -> str:
        return "hit" if key in self.ready else "pending" if key in self.writing() else "miss"

    def evictable(self, given: list[bytes]) -> list[bytes]:
        read = {load.key for load in self.loads if not load.forgotten}
        return [key for key in self.ready if key not in read and key not in given]

    def use(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if key in self.ready:
                self.ready[key] = self.ready.pop(key)


class Machine(RuleBasedStateMachine):
    index: OffloadIndex
    model: Model

    @initialize(num_slots=st.integers(1, 6), policy=st.sampled_from(["lru", "arc"]))
    def make(self, num_slots: int, policy: Any) -> None:
        self.index = OffloadIndex(num_slots, policy)
        self.model = Model(num_slots)

    def refused(self, error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> None:
        digest, stats = self.index.state_digest(), self.index.stats()
        with pytest.raises(error):
            call()
        assert (self.index.state_digest(), self.index.stats()) == (digest, stats)

    @rule(keys=some_keys)
    def prepare_store(self, keys: list[bytes]) -> None:
        new = [key for key in dict.fromkeys(keys) if self.model.lookup(key) == "miss"]
        num_free = self.model.num_slots - len(self.model.used())
        evictable = self.model.evictable(keys)
        digest = self.index.state_digest()
        plan = self.index.prepare_store(keys)
        if len(new) > num_free + len(evictable):
            assert plan is None
            assert self.index.state_digest() == digest
            return
        assert plan is not None
        assert plan.keys == new
        assert len(set(plan.slots)) == len(plan.slots) == len(new)
        assert len(plan.evicted) == max(0, len(new) - num_free)
        if self.index.policy == "lru":
            assert plan.evicted == evictable[: len(plan.evicted)]
        assert set(plan.evicted) <= set(evictable)
        free = set(range(self.model.num_slots)) - self.model.used()
        assert set(plan.slots[:num_free]) <= free
        assert plan.slots[num_free:] == [self.model.ready.pop(key) for key in plan.evicted]
        self.model.stores += map(Transfer, new, plan.slots)

    @rule(keys=some_keys, success=st.booleans())
    def complete_any_stores(self, keys: list[bytes], success: bool) -> None:  # noqa: FBT001
        held = Counter(store.key for store in self.model.stores)
        asked = Counter(keys)
        errors: set[type[Exception]] = {DoubleFreeError for key, count in asked.items() if count > held[key]}
        errors |= {ConfigError for key, count in asked.items() if 1 < count <= held[key]}
        if errors:
            self.refused(tuple(errors), lambda: self.index.complete_store(keys, success))
        else:
            self.finish_stores(keys, success=success)

    @precondition(lambda self: self.model.stores)
    @rule(data=st.data(), success=st.sampled_from([True, True, True, False]))
    def complete_stores(self, data: st.DataObject, success: bool) -> None:  # noqa: FBT001
        keys = list(dict.fromkeys(store.key for store in self.model.stores))
        self.finish_stores(data.draw(st.lists(st.sampled_from(keys), unique=True)), success=success)

    def finish_stores(self, keys: list[bytes], *, success: bool) -> None:
        self.index.complete_store(keys, success)
        for key in reversed(keys):
            store = next(store for store in self.model.stores if store.key == key)
            self.model.stores.remove(store)
            if success and not store.forgotten:
                self.model.ready[key] = store.slot

    @rule(keys=some_keys)
    def prepare_load(self, keys: list[bytes]) -> None:
        if any(key not in self.model.ready for key in keys):
            self.refused(ConfigError, lambda: self.index.prepare_load(keys))
            keys = [key for key in keys if key in self.model.ready]
        slots = self.index.prepare_load(keys)
        assert slots == [self.model.ready[key] for key in keys]
        self.model.loads += map(Transfer, keys, slots)
        self.model.use(keys)

    @rule(keys=some_keys)
    def complete_any_loads(self, keys: list[bytes]) -> None:
        held = Counter(load.key for load in self.model.loads)
        if Counter(keys) <= held:
            self.finish_loads(keys)
        else:
            self.refused(DoubleFreeError, lambda: self.index.complete_load(keys))

    @precondition(lambda self: self.model.loads)
    @rule(data=st.data())
    def complete_loads(self, data: st.DataObject) -> None:
        keys = data.draw(st.permutations([load.key for load in self.model.loads]))
        self.finish_loads(keys[: data.draw(st.integers(0, len(keys)))])

    def finish_loads(self, keys: list[bytes]) -> None:
        self.index.complete_load(keys)
        for key in keys:
            self.model.loads.remove(next(load for load in self.model.loads if load.key == key))

    @rule(keys=some_keys)
    def touch(self, keys: list[bytes]) -> None:
        self.index.touch(keys)
        self.model.use(keys)

    @rule()
    def reset(self) -> None:
        self.index.reset()
        self.model.ready.clear()
        for transfer in self.model.stores + self.model.loads:
            transfer.forgotten = True

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.audit()
        assert [self.index.lookup(key) for key in KEYS] == [self.model.lookup(key) for key in KEYS]
        assert self.index.num_free_slots == self.model.num_slots - len(self.model.used())
        stats = self.index.stats()
        assert stats["writing_slots"] == len(self.model.writing())
        assert stats["idle_slots"] == len(self.model.evictable([]))
        assert stats["idle_slots"] + stats["reading_slots"] == len(self.model.ready)

    def teardown(self) -> None:
        if not hasattr(self, "index"):
            return
        while self.model.stores:
            self.finish_stores([self.model.stores[0].key], success=True)
        self.finish_loads([load.key for load in self.model.loads])
        self.index.reset()
        assert self.index.num_free_slots == self.model.num_slots
        assert self.index.state_digest() == OffloadIndex(self.model.num_slots, self.index.policy).state_digest()


TestOffloadIndex = Machine.TestCase
TestOffloadIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
