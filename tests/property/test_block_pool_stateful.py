"""The block pool against a plain model, call by call, over random calls on few blocks, so that calls collide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from plain_model import PlainPool, same_outcome

from lockstep_kv import BlockPool

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = st.lists(st.sampled_from([*range(1, 7), *range(1, 13), 0, -1, 99, 2**31, 2**32, 2**64]), max_size=4)
# A short key, the zeros behind which are not part of it, and the longest.
KEYS = st.sampled_from([b"a", b"a\0", b"b", b"c" * 32, b"d" * 40])


class PoolMachine(RuleBasedStateMachine):
    """The same calls on both pools."""

    @initialize(num_blocks=st.integers(1, 12), enable_caching=st.sampled_from([True, True, True, False]))
    def make(self, num_blocks: int, *, enable_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, enable_caching)
        self.plain = PlainPool(num_blocks, enable_caching=enable_caching)

    def both(self, real: Callable[[], Any], plain: Callable[[], Any]) -> None:
        outcome = same_outcome(real, plain, self.pool.state_digest)
        if outcome is not None:
            assert outcome[0] == outcome[1]

    def held(self, data: st.DataObject) -> list[int]:
        """Draw references that are held, some of them several times."""
        references = [block for block, refs in enumerate(self.plain.refs) for _ in range(refs)]
        return data.draw(st.permutations(references))[: data.draw(st.sampled_from([99, 4, 2, 1]))]

    @rule(count=st.sampled_from([0, 1, 1, 2, 3, 5, 12, 2**32, 2**64 - 1]))
    def take(self, count: int) -> None:
        self.both(lambda: self.pool.take(count), lambda: self.plain.take(count))

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """Hold once more what is held."""
        blocks = self.held(data)
        self.both(lambda: self.pool.add_ref(blocks), lambda: self.plain.add_ref(blocks))

    @rule(blocks=BLOCKS)
    def add_ref(self, blocks: list[int]) -> None:
        self.both(lambda: self.pool.add_ref(blocks), lambda: self.plain.add_ref(blocks))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held(data)
        self.both(lambda: self.pool.release(blocks), lambda: self.plain.release(blocks))

    @rule(blocks=BLOCKS)
    def release_any(self, blocks: list[int]) -> None:
        self.both(lambda: self.pool.release(blocks), lambda: self.plain.release(blocks))

    @rule(data=st.data(), key=KEYS)
    def publish(self, data: st.DataObject, key: bytes) -> None:
        for block in dict.fromkeys(self.held(data)):
            self.publish_any(block, key)

    @rule(block=st.integers(-1, 12), key=KEYS)
    def publish_any(self, block: int, key: bytes) -> None:
        self.both(lambda: self.pool.publish(block, key), lambda: self.plain.publish(block, (key, 0)))

    @rule(blocks=BLOCKS)
    def evict(self, blocks: list[int]) -> None:
        self.both(lambda: self.pool.evict(blocks), lambda: self.plain.evict(blocks))

    @rule()
    def reset(self) -> None:
        self.both(self.pool.reset, self.plain.reset)

    @rule(key=KEYS)
    def lookup(self, key: bytes) -> None:
        before = self.pool.state_digest()
        assert self.pool.lookup(key) == self.plain.lookup((key, 0))
        assert self.pool.state_digest() == before

    @invariant()
    def all_is_equal(self) -> None:
        everything = range(self.plain.num_blocks)
        self.pool.audit()
        assert self.pool.num_blocks == self.plain.num_blocks
        assert self.pool.free_order() == self.plain.queue
        assert self.pool.num_free_blocks == len(self.plain.queue)
        assert [self.pool.ref_count(block) for block in everything] == self.plain.refs
        carried = [[key for key, _ in self.plain.keys_of(block)] for block in everything]
        assert [self.pool.keys_of(block) for block in everything] == carried

    def teardown(self) -> None:
        """I7: when everything is given back, everything is free."""
        if not hasattr(self, "pool"):
            return
        self.pool.release([block for block, refs in enumerate(self.plain.refs) for _ in range(refs)])
        self.pool.audit()
        assert self.pool.num_free_blocks == self.pool.num_blocks - 1
        assert self.pool.reset()


PoolMachine.TestCase.settings = settings(max_examples=500, stateful_step_count=40, deadline=None, print_blob=True)
TestBlockPool = PoolMachine.TestCase
