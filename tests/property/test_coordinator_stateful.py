"""The coordinator against a plain model, call by call, over random configurations and lives of requests.

Pools are small and prompts share prefixes, so that blocks are reused, evicted and fought for. After every call all that
can be observed is compared. A call that is refused must be refused for a reason the model knows, and change nothing.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_model import Cleared, PlainCoordinator, PlainHit, Removed, Stored, same_outcome

from lockstep_kv import (
    BlockRemoved,
    BlockStored,
    ConfigError,
    Coordinator,
    CoordinatorConfig,
    GroupSpec,
    LayerSpec,
    PrefixHit,
    UnknownRequestError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MODEL_LEN = 96
NAMES = ["a", "b", "c", "d", ""]
HUGE = [2**31, 2**32, 2**63, 2**64 - 1]


@st.composite
def configs(draw: st.DrawFn) -> CoordinatorConfig:
    """One group, several, or a lockstep set beside which there may be others. In step are spans of `base` per rank."""
    ranks = draw(st.sampled_from([1, 2, 2, 3, 4, 4, 6, 8]))
    divisors = [shards for shards in range(1, ranks + 1) if ranks % shards == 0]
    base = draw(st.sampled_from([2, 1, 4]))
    mark_some = draw(st.booleans())
    sure_pair = ranks > 1 and draw(st.sampled_from([True, True, False]))

    def group(number: int) -> GroupSpec:
        shards = draw(st.sampled_from(divisors))
        in_step = draw(st.booleans())
        if sure_pair and number < 2:
            in_step, shards = True, ranks if number == 0 else draw(st.sampled_from(divisors[:-1]))
        return GroupSpec(
            "mla" if in_step else draw(st.sampled_from(["full", "mla"])),
            base * ranks // shards if in_step else draw(st.sampled_from([4, 8, 2, 1])),
            # The page decides which plain groups are looked up together.
            draw(st.sampled_from([[], [LayerSpec(f"layer.{number}", 8)], [LayerSpec(f"layer.{number}", 16)]])),
            kv_shards=draw(st.sampled_from([shards, None])) if shards == ranks else shards,
            is_eagle=mark_some and draw(st.booleans()),
        )

    groups = [group(number) for number in range(draw(st.sampled_from([2, 2, 3, 4] if sure_pair else [1, 1, 2, 3])))]
    common = math.gcd(*(group.tokens_per_block(ranks) for group in groups))
    return CoordinatorConfig(
        groups,
        draw(st.sampled_from([40, 25, 60, 90, 16, 9, 5, 1])),
        dcp_world_size=ranks,
        enable_caching=draw(st.sampled_from([True, True, True, False])),
        hash_block_tokens=draw(st.sampled_from([None, *(n for n in range(1, common + 1) if common % n == 0)])),
        max_model_len=MAX_MODEL_LEN,
        use_eagle=draw(st.booleans()),
        enable_events=draw(st.sampled_from([True, True, False])),
    )


def hashes_of(family: int, tokens: int, hash_tokens: int) -> list[bytes]:
    """Return the hashes of a prompt's start. Two families share their first 8 tokens, and two their first 24."""

    def digest(end: int) -> bytes:
        origin = 0 if end <= {0: 0, 1: 8, 2: 24, 3: 0}[family] else family
        return hashlib.sha256(f"{origin}:{end}".encode()).digest()[: 16 if family == 3 else 32]

    return [digest(end) for end in range(hash_tokens, tokens + 1, hash_tokens)]


FAMILY = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3])
TOKENS = st.integers(0, MAX_MODEL_LEN)
# Whole blocks of most configurations, and one token less or more.
PROMPT = st.sampled_from([24, 48, 16, 32, 8, 23, 33, 12, 25, 1, 7, 64])
FEW = st.sampled_from([0, 0, 0, 0, 0, 0, 1, 3, 9])
BLOCKS = st.lists(st.sampled_from([*range(1, 10), *range(1, 61), 0, -1, 99, *HUGE]), max_size=4)
# Also a number of tokens that no request can have.
ANY_TOKENS = st.one_of(TOKENS, TOKENS, TOKENS, st.sampled_from([MAX_MODEL_LEN + 1, *HUGE]))


class CoordinatorMachine(RuleBasedStateMachine):
    """The same calls on both coordinators."""

    @initialize(config=configs())
    def make(self, config: CoordinatorConfig) -> None:
        note(f"{config.groups}")
        self.config = config
        self.real = Coordinator(config)
        self.plain = PlainCoordinator(config)
        self.other = Coordinator(config).find_longest_hit([], 9)
        # All that was ever found, the stale hits too.
        self.hits: list[tuple[PrefixHit, PlainHit]] = []
        self.families: dict[str, int] = {}

    def both(self, real: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        outcome = same_outcome(real, plain, self.real.state_digest)
        if outcome is None:
            return None
        assert outcome[0] == outcome[1]
        return outcome[0]

    def unchanged(self, call: Callable[[], Any]) -> Any:
        before = self.real.state_digest()
        result = call()
        assert self.real.state_digest() == before
        return result

    def find(self, family: int, num_hashed: int, max_tokens: int) -> tuple[PrefixHit, PlainHit]:
        hashes = hashes_of(family, num_hashed, self.plain.hash_tokens)
        hit = self.unchanged(lambda: self.real.find_longest_hit(hashes, max_tokens))
        expected = self.plain.find_longest_hit(hashes, max_tokens)
        assert (hit.num_tokens, hit.block_ids) == (expected.num_tokens, self.plain.by_group(expected.rows))
        if hit.num_tokens:
            self.hits.append((hit, expected))
        return hit, expected

    def take(
        self, name: str, tokens: int, hit: tuple[PrefixHit, PlainHit] | None, external: int, reserved: int
    ) -> bool:
        """Allocate, and return whether there were blocks enough."""
        real_hit, plain_hit = hit or (None, None)

        def plain() -> tuple[list[int], ...] | None:
            rows = self.plain.allocate(name, tokens, hit=plain_hit, external=external, reserved=reserved)
            return None if rows is None else self.plain.by_group(rows)

        before = self.real.state_digest()
        new = self.both(
            lambda: self.real.allocate(
                name, tokens, hit=real_hit, num_external_tokens=external, reserved_blocks=reserved
            ),
            plain,
        )
        assert new is not None or self.real.state_digest() == before
        return new is not None

    def publish(self, name: str, family: int, tokens: int, prompt: int | None, missing: int) -> None:
        hashes = hashes_of(family, MAX_MODEL_LEN, self.plain.hash_tokens)
        if self.plain.hashes_needed(name, tokens, prompt):
            hashes = hashes[: self.plain.hashes_needed(name, tokens, prompt) - missing]
        self.both(
            lambda: self.real.cache(name, hashes, tokens, num_prompt_tokens=prompt),
            lambda: self.plain.cache(name, hashes, tokens, prompt),
        )

    def slots(self, name: str) -> int:
        rows = self.plain.requests[name].rows
        return min(MAX_MODEL_LEN, *(len(row) * span for row, span in zip(rows, self.plain.spans, strict=True)))

    @rule(family=FAMILY, num_hashed=TOKENS, max_tokens=ANY_TOKENS)
    def lookup(self, family: int, num_hashed: int, max_tokens: int) -> None:
        self.find(family, num_hashed, max_tokens)

    @rule(data=st.data(), prompts=st.lists(st.tuples(FAMILY, PROMPT), min_size=1, max_size=3), reserved=FEW)
    def start(self, data: st.DataObject, prompts: list[tuple[int, int]], reserved: int) -> None:
        """Requests come: look each up, give it slots, publish its prompt. Slots past the prompt are speculative."""
        idle = [name for name in NAMES if name not in self.plain.requests]
        for name, (family, prompt) in zip(idle, prompts, strict=False):
            hit = self.find(family, prompt, prompt - 1)
            if self.hits and data.draw(st.sampled_from([False, False, True])):
                hit = data.draw(st.sampled_from(self.hits[-6:]))
            tokens = max(prompt, hit[0].num_tokens)
            external = min(data.draw(FEW), tokens - hit[0].num_tokens)
            if self.take(name, tokens + data.draw(FEW), hit, external, reserved):
                self.families[name] = family
                self.publish(name, family, tokens, data.draw(st.sampled_from([None, prompt])), 0)
            self.all_is_equal()

    @precondition(lambda self: self.plain.requests)
    @rule(data=st.data(), by=st.sampled_from([1, 2, 5, 12, 0]), reserved=st.sampled_from([0, 0, 0, 2, 99]))
    def grow(self, data: st.DataObject, by: int, reserved: int) -> None:
        """Ask for more tokens, or for none that have no slot yet."""
        name = data.draw(st.sampled_from(sorted(self.plain.requests)))
        tokens = min(MAX_MODEL_LEN, self.slots(name) - 1 + by)
        if self.take(name, tokens, None, 0, reserved):
            self.publish(name, self.families[name], data.draw(st.integers(0, tokens)), None, 0)

    @rule(data=st.data(), name=st.sampled_from(NAMES), tokens=ANY_TOKENS, external=st.one_of(FEW, FEW, ANY_TOKENS))
    def allocate_anything(self, data: st.DataObject, name: str, tokens: int, external: int) -> None:
        """Any numbers, and any hit that was ever found, fresh or stale."""
        hit = data.draw(st.sampled_from([None, *self.hits[-6:]]))
        is_new = name not in self.plain.requests
        if self.take(name, tokens, hit, external, data.draw(st.one_of(FEW, st.sampled_from(HUGE)))) and is_new:
            self.families[name] = data.draw(FAMILY)

    @precondition(lambda self: self.plain.requests)
    @rule(data=st.data(), family=FAMILY, missing=st.sampled_from([0, 0, 0, 1]))
    def cache(self, data: st.DataObject, family: int, missing: int) -> None:
        """Publish what has slots; now and then under the hashes of another prompt, or too few."""
        name = data.draw(st.sampled_from(sorted(self.plain.requests)))
        family = data.draw(st.sampled_from([self.families[name]] * 3 + [family]))
        tokens = data.draw(st.integers(0, self.slots(name)))
        self.publish(name, family, tokens, data.draw(st.sampled_from([None, tokens, tokens // 2])), missing)

    @rule(name=st.sampled_from(NAMES), family=FAMILY, tokens=ANY_TOKENS, prompt=st.one_of(st.none(), ANY_TOKENS))
    def cache_anything(self, name: str, family: int, tokens: int, prompt: int | None) -> None:
        self.publish(name, family, tokens, prompt, 0)

    @precondition(lambda self: self.plain.requests)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.plain.requests))))

    def end(self, name: str) -> None:
        self.both(lambda: self.real.free(name), lambda: self.plain.free(name))
        self.families.pop(name, None)

    @rule(name=st.sampled_from(NAMES), tokens=ANY_TOKENS)
    def release_skipped(self, name: str, tokens: int) -> None:
        """Full attention needs all of it."""
        self.unchanged(
            lambda: self.both(
                lambda: self.real.release_skipped(name, tokens), lambda: self.plain.release_skipped(name, tokens)
            )
        )

    @rule(blocks=BLOCKS)
    def pin(self, blocks: list[int]) -> None:
        self.both(lambda: self.real.pin(blocks), lambda: self.plain.pin(blocks))

    @rule(data=st.data(), anything=BLOCKS)
    def unpin(self, data: st.DataObject, anything: list[int]) -> None:
        pins = data.draw(st.permutations(self.plain.pins))[: data.draw(st.integers(0, 5))]
        blocks = data.draw(st.sampled_from([pins, pins, anything, pins + anything]))
        self.both(lambda: self.real.unpin(blocks), lambda: self.plain.unpin(blocks))

    @rule(data=st.data(), blocks=BLOCKS)
    def evict(self, data: st.DataObject, blocks: list[int]) -> None:
        """Evict anything, or a block that was once hit."""
        if self.hits and data.draw(st.sampled_from([False, True])):
            hit, _ = data.draw(st.sampled_from(self.hits[-6:]))
            blocks = [data.draw(st.sampled_from(hit.block_ids[-1]))]
        self.both(lambda: self.real.evict(blocks), lambda: self.plain.evict(blocks))

    @rule(give_back=st.sampled_from([False, False, False, True]))
    def reset(self, *, give_back: bool) -> None:
        if give_back:
            self.end_all()
        done = self.both(self.real.reset_prefix_cache, self.plain.reset_prefix_cache)
        assert done or not give_back

    @rule(name=st.sampled_from(NAMES))
    def nonsense(self, name: str) -> None:
        """Not even the model would take these."""
        calls: list[Callable[[], object]] = [
            lambda: self.real.allocate(name, 9, hit=self.other),
            lambda: self.real.allocate(name, True, reserved_blocks=2**64),
            lambda: self.real.cache(name, 5, 1),  # type: ignore[arg-type]
            lambda: self.real.find_longest_hit(5, 1),  # type: ignore[arg-type]
            lambda: self.real.pin([1, [1]]),  # type: ignore[list-item]
            lambda: self.real.unpin([*self.plain.pins, -1]),
            lambda: self.real.evict([1, "1"]),  # type: ignore[list-item]
            lambda: self.real.free("nobody"),
            lambda: self.real.block_ids("nobody"),
        ]
        before = self.real.state_digest()
        for call in calls:
            with pytest.raises((ConfigError, UnknownRequestError)):
                call()
            assert self.real.state_digest() == before

    @rule()
    def take_events(self) -> None:
        assert [plain_event(event) for event in self.real.take_events()] == self.plain.take_events()

    @invariant()
    def all_is_equal(self) -> None:
        real, plain = self.real, self.plain
        real.audit()
        assert [list(s.group_ids) for s in real.sets] == plain.sets
        assert [s.tokens_per_block for s in real.sets] == plain.spans
        assert real.hash_block_tokens == plain.hash_tokens
        assert real.num_requests == len(plain.requests)
        for name, request in plain.requests.items():
            assert real.block_ids(name) == plain.by_group(request.rows)
        assert real.free_order() == plain.pool.queue
        assert real.num_free_blocks == len(plain.pool.queue)
        assert [real.ref_count(block) for block in range(plain.pool.num_blocks)] == plain.pool.refs
        usable = plain.pool.num_blocks - 1
        assert real.usage == (1 - len(plain.pool.queue) / usable if usable else 0)
        assert real.stats() == plain.stats()
        for digest in {digest for (digest, _), _ in plain.pool.entries}:
            assert real.lookup(digest) == plain.lookup(digest)

    def end_all(self) -> None:
        for name in list(self.plain.requests):
            self.end(name)
        pins = list(self.plain.pins)
        self.both(lambda: self.real.unpin(pins), lambda: self.plain.unpin(pins))

    def teardown(self) -> None:
        """I7: when all requests have ended and nothing is pinned, everything is free."""
        if not hasattr(self, "real"):
            return
        self.end_all()
        self.take_events()
        self.all_is_equal()
        assert self.real.num_free_blocks == self.real.num_blocks - 1


def plain_event(event: object) -> Stored | Removed | Cleared:
    """One of the coordinator's events as the model puts it."""
    if isinstance(event, BlockStored):
        return Stored(*(getattr(event, name) for name in Stored._fields))
    if isinstance(event, BlockRemoved):
        return Removed(event.group_id, event.block_hash)
    return Cleared()


CoordinatorMachine.TestCase.settings = settings(
    max_examples=600, stateful_step_count=50, deadline=None, print_blob=True
)
TestCoordinator = CoordinatorMachine.TestCase
