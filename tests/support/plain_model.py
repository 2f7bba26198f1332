"""The pool and the coordinator as the specification tells them: plain lists, and all of them read to find anything.

Tests run the same calls on these and on the real ones and compare. Nothing here is fast, and nothing is shared with
the code under test but the specs it is configured with.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import pytest

from lockstep_kv import (
    ConfigError,
    DoubleFreeError,
    LockstepKVError,
    PoolExhaustedError,
    StaleHitError,
    UnknownRequestError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from lockstep_kv import CoordinatorConfig, GroupSpec

Rows = list[list[int]]
R = TypeVar("R")
P = TypeVar("P")


class RefusedError(Exception):
    """A call must be refused with one of these classes, and change nothing."""

    def __init__(self, reasons: Iterable[type[LockstepKVError]]) -> None:
        self.reasons = tuple(reasons)
        super().__init__(self.reasons)


def refuse_if(reasons: Sequence[type[LockstepKVError]]) -> None:
    if reasons:
        raise RefusedError(reasons)


def same_outcome(real: Callable[[], R], plain: Callable[[], P], digest: Callable[[], int]) -> tuple[R, P] | None:
    """Call both and return what they return, or None if both refuse for one reason and the real one is unchanged."""
    before = digest()
    try:
        expected = plain()
    except RefusedError as refused:
        reasons = refused.reasons
    else:
        return real(), expected
    with pytest.raises(reasons) as caught:
        real()
    assert caught.type in reasons
    assert digest() == before, f"{caught.value!r} has changed the state"
    return None


class Loss(NamedTuple):
    """A block that lost its keys."""

    block: int
    keys: list[tuple[bytes, int]]


class PlainPool:
    """A list for the queue, a count per block, and one list of all (key, block) in the order of publication.

    A key is opaque bytes and a number, which the coordinator uses for its sets.
    """

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.queue = list(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.entries: list[tuple[tuple[bytes, int], int]] = []
        self.losses: list[Loss] = []
        self.taken = self.evicted = self.published = self.peak_held = 0

    def exists(self, block: int) -> bool:
        return 0 <= block < self.num_blocks

    def is_real(self, block: int) -> bool:
        return block != 0 and self.exists(block)

    @property
    def num_held(self) -> int:
        return sum(refs > 0 for refs in self.refs)

    def keys_of(self, block: int) -> list[tuple[bytes, int]]:
        return [key for key, other in self.entries if other == block]

    def lookup(self, key: tuple[bytes, int]) -> int | None:
        return next((block for other, block in self.entries if other == key), None)

    def take(self, count: int) -> list[int]:
        refuse_if([PoolExhaustedError] if count > len(self.queue) else [])
        taken = [self.queue.pop(0) for _ in range(count)]
        for block in taken:
            self.evicted += bool(self.keys_of(block))
            self.forget(block)
            self.refs[block] = 1
        self.taken += count
        self.peak_held = max(self.peak_held, self.num_held)
        return taken

    def add_ref(self, blocks: Sequence[int]) -> None:
        refuse_if([ConfigError for block in blocks if not self.is_real(block)])
        for block in blocks:
            if block in self.queue:
                self.queue.remove(block)
            self.refs[block] += 1
        self.peak_held = max(self.peak_held, self.num_held)

    def release(self, blocks: Sequence[int]) -> None:
        """Of what becomes free, blocks without a key go to the head as one batch, the others to the tail.

        A block that is given back several times has its place where it comes last.
        """
        reasons: list[type[LockstepKVError]] = [ConfigError for block in blocks if not self.is_real(block)]
        reasons += [DoubleFreeError for b in blocks if self.is_real(b) and blocks.count(b) > self.refs[b]]
        refuse_if(reasons)
        for block in blocks:
            self.refs[block] -= 1
        freed = [block for block in reversed(dict.fromkeys(reversed(blocks))) if self.refs[block] == 0]
        head = [block for block in freed if not self.keys_of(block)]
        self.queue = head + self.queue + [block for block in freed if self.keys_of(block)]

    def publish(self, block: int, key: tuple[bytes, int]) -> None:
        refuse_if([ConfigError] if not self.enable_caching or not self.is_real(block) or not self.refs[block] else [])
        if key not in self.keys_of(block):
            self.entries.append((key, block))
            self.published += 1

    def forget(self, block: int) -> None:
        keys = self.keys_of(block)
        self.entries = [entry for entry in self.entries if entry[1] != block]
        if keys:
            self.losses.append(Loss(block, keys))

    def evict(self, blocks: Sequence[int]) -> None:
        refuse_if([ConfigError for block in blocks if not self.exists(block)])
        for block in blocks:
            self.forget(block)

    def reset(self) -> bool:
        idle = self.num_held == 0
        if idle:
            self.entries = []
        return idle


@dataclass
class PlainHit:
    """A prefix that was found, and whether one of its blocks has lost its keys since."""

    num_tokens: int
    rows: Rows
    stale: bool = False


@dataclass
class PlainRequest:
    """One row of block ids per set, and how many leading blocks are not published again."""

    rows: Rows
    published: list[int]


class Stored(NamedTuple):
    group_id: int
    request_id: str
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    start_token: int
    block_tokens: int


class Removed(NamedTuple):
    group_id: int
    block_hash: bytes


class Cleared(NamedTuple):
    pass


def form_sets(groups: Sequence[GroupSpec], ranks: int) -> list[list[int]]:
    """MLA groups of equal span move together if they are not all on equally many shards."""
    sets: list[list[int]] = []
    for at, group in enumerate(groups):
        if any(at in members for members in sets):
            continue
        span = group.tokens_per_block(ranks)
        peers = [i for i, other in enumerate(groups) if other.kind == "mla" and other.tokens_per_block(ranks) == span]
        mixed = len({groups[peer].kv_shards or ranks for peer in peers}) > 1
        sets.append(peers if group.kind == "mla" and ranks > 1 and mixed else [at])
    return sets


def form_drops(config: CoordinatorConfig, sets: list[list[int]]) -> list[bool]:
    """Which sets leave their last block: those with a marked group, and plain groups of the same geometry.

    If a draft model reads the cache and no group is marked, all do.
    """
    groups = config.groups
    if config.use_eagle and not any(group.is_eagle for group in groups):
        return [True] * len(sets)

    def geometry(members: list[int]) -> tuple[object, ...]:
        if len(members) > 1:
            return tuple(members)
        group = groups[members[0]]
        page = group.layers[0].page_bytes if group.layers else None
        return group.kind, group.block_size, group.tokens_per_block(config.dcp_world_size), page

    marked = [geometry(members) for members in sets if any(groups[group].is_eagle for group in members)]
    return [geometry(members) in marked for members in sets]


@dataclass
class PlainCoordinator:
    """Requests over a plain pool."""

    config: CoordinatorConfig
    requests: dict[str, PlainRequest] = field(default_factory=dict)
    pins: list[int] = field(default_factory=list)
    covered: dict[int, int] = field(default_factory=dict)
    hits: list[PlainHit] = field(default_factory=list)
    events: list[Stored | Removed | Cleared] = field(default_factory=list)
    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    allocations: int = 0
    refusals: int = 0

    def __post_init__(self) -> None:
        ranks = self.config.dcp_world_size
        self.sets = form_sets(self.config.groups, ranks)
        self.spans = [self.config.groups[members[0]].tokens_per_block(ranks) for members in self.sets]
        self.drops = form_drops(self.config, self.sets)
        self.alone = len(self.config.groups) == 1
        self.hash_tokens = self.config.hash_block_tokens or math.gcd(*self.spans)
        self.alignment = math.lcm(*self.spans)
        self.pool = PlainPool(self.config.num_blocks)

    def by_group(self, rows: Rows) -> tuple[list[int], ...]:
        """Rows per set as the caller sees them: one per group."""
        groups = range(len(self.config.groups))
        set_of = [next(at for at, members in enumerate(self.sets) if group in members) for group in groups]
        return tuple(list(rows[at]) for at in set_of)

    def note(self, event: Stored | Removed | Cleared) -> None:
        if self.config.enable_events:
            self.events.append(event)

    def settle_losses(self) -> None:
        """What lost its keys is gone for every member group, and hits that name it are stale."""
        for loss in self.pool.losses:
            for hit in self.hits:
                hit.stale |= any(loss.block in row for row in hit.rows)
            for block_hash, at in loss.keys:
                for group in self.sets[at]:
                    self.note(Removed(group, block_hash))
        self.pool.losses = []

    # Looking up.

    def full_hashes(self, hashes: Sequence[bytes], at: int) -> list[bytes]:
        """The hashes that end with a block of the set."""
        per_block = self.spans[at] // self.hash_tokens
        return list(hashes[per_block - 1 :: per_block])

    def find_longest_hit(self, hashes: Sequence[bytes], max_tokens: int) -> PlainHit:
        """The longest multiple of the alignment that every set has, where it leaves a block with that block on top.

        A group alone looks no further than `max_tokens` for the block it leaves.
        """
        runs = []
        tokens = max_tokens if self.config.enable_caching else 0
        for at, span in enumerate(self.spans):
            found = (self.pool.lookup((digest, at)) for digest in self.full_hashes(hashes, at))
            run = [block for block in takewhile(lambda block: block is not None, found) if block is not None]
            count = min(len(run), max_tokens // span) if self.alone else len(run)
            tokens = min(tokens, max(count - self.drops[at], 0) * span)
            runs.append(run)
        tokens -= tokens % self.alignment
        self.lookups += 1
        # A counter of 64 bits that stops at its end.
        self.lookup_tokens = min(self.lookup_tokens + max_tokens, 2**64 - 1)
        self.hit_tokens += tokens
        hit = PlainHit(tokens, [run[: tokens // span] for run, span in zip(runs, self.spans, strict=True)])
        self.hits.append(hit)
        return hit

    def lookup(self, block_hash: bytes) -> tuple[int, ...] | None:
        blocks = [self.pool.lookup((block_hash, at)) for at in range(len(self.sets))]
        if None in blocks:
            return None
        return tuple(row[0] for row in self.by_group([[block] for block in blocks if block is not None]))

    # Allocating.

    def allocate(
        self,
        name: str,
        tokens: int,
        *,
        hit: PlainHit | None = None,
        external: int = 0,
        reserved: int = 0,
    ) -> Rows | None:
        """The new ids per set, or None if too few blocks are free."""
        hit = hit or PlainHit(0, [[] for _ in self.sets])
        computed = hit.num_tokens + external
        reasons: list[type[LockstepKVError]] = []
        if not max(computed, 1) <= tokens <= self.config.max_model_len or (name in self.requests and computed):
            reasons.append(ConfigError)
        if hit.stale:
            reasons.append(StaleHitError)
        refuse_if(reasons)

        empty = PlainRequest([[] for _ in self.sets], [0] * len(self.sets))
        request = self.requests.get(name, empty)
        external_counts, new_counts = [], []
        for row, hit_row, span in zip(request.rows, hit.rows, self.spans, strict=True):
            there = len(row) + len(hit_row)
            loaded = max(there, -(-computed // span))
            external_counts.append(loaded - there)
            new_counts.append(max(loaded, -(-tokens // span)) - loaded)
        # Hits that nobody holds leave the queue as well.
        idle = sum(self.pool.refs[block] == 0 for row in hit.rows for block in row)
        if sum(external_counts) + sum(new_counts) + idle > len(self.pool.queue) - reserved:
            self.refusals += 1
            return None

        self.allocations += 1
        self.requests[name] = request
        for at, hit_row in enumerate(hit.rows):
            self.pool.add_ref(hit_row)
            request.rows[at] += hit_row
            request.published[at] += len(hit_row)
        for row, count in zip(request.rows, external_counts, strict=True):
            row.extend(self.pool.take(count))
        new = [self.pool.take(count) for count in new_counts]
        for row, taken in zip(request.rows, new, strict=True):
            row.extend(taken)
        self.settle_losses()
        return new

    # Publishing.

    def useful(self, at: int, tokens: int) -> int:
        """Tokens that can be hit later, of the first `tokens`."""
        aligned = tokens - tokens % self.alignment
        if self.alone:
            return tokens
        return min(tokens, aligned + self.spans[at]) if self.drops[at] and aligned else aligned

    def tail(self, at: int, tokens: int, prompt: int | None) -> int | None:
        """The number of hashes up to the prompt's last one, if that ends inside a block that can be hit."""
        if prompt is None:
            return None
        count = (prompt if self.drops[at] else max(prompt - 1, 0)) // self.hash_tokens
        end = count * self.hash_tokens
        return count if end % self.spans[at] and end <= self.useful(at, tokens) else None

    def fits(self, request: PlainRequest, tokens: int) -> bool:
        return all(tokens <= len(row) * span for row, span in zip(request.rows, self.spans, strict=True))

    def hashes_needed(self, name: str, tokens: int, prompt: int | None) -> int:
        """How many hashes `cache` needs; 0 if there is nothing to publish."""
        request = self.requests.get(name)
        if request is None or not self.config.enable_caching or not self.fits(request, tokens):
            return 0
        counts = [0]
        for at, span in enumerate(self.spans):
            end = self.useful(at, tokens) // span
            counts.append(end * span // self.hash_tokens if end > request.published[at] else 0)
            tail = self.tail(at, tokens, prompt)
            counts.append(tail if tail and tail * self.hash_tokens < len(request.rows[at]) * span else 0)
        return max(counts)

    def cache(self, name: str, hashes: Sequence[bytes], tokens: int, prompt: int | None) -> None:
        request = self.requests.get(name)
        if request is None:
            raise RefusedError([UnknownRequestError])
        if not self.config.enable_caching:
            return
        if not self.fits(request, tokens) or self.hashes_needed(name, tokens, prompt) > len(hashes):
            raise RefusedError([ConfigError])
        for at, (row, span) in enumerate(zip(request.rows, self.spans, strict=True)):
            first, end = request.published[at], self.useful(at, tokens) // span
            if first < end:
                full = self.full_hashes(hashes, at)
                for place, (block, digest) in enumerate(zip(row[first:end], full[first:end], strict=True), first):
                    if (digest, at) not in self.pool.keys_of(block):
                        self.pool.forget(block)
                        self.settle_losses()
                    self.publish(block, (digest, at), (place + 1) * span)
                parent = full[first - 1] if first else None
                self.note_stored(at, name, full[first:end], parent, first * span, span)
                request.published[at] = end
            tail = self.tail(at, tokens, prompt)
            if tail is not None and tail * self.hash_tokens < len(row) * span:
                self.publish_tail(name, hashes, at, tail)

    def publish(self, block: int, key: tuple[bytes, int], tokens: int) -> None:
        """`tokens`: leading tokens of the request up to the end of what the key stands for."""
        if not self.pool.keys_of(block):
            self.covered[block] = tokens
        self.pool.publish(block, key)

    def publish_tail(self, name: str, hashes: Sequence[bytes], at: int, count: int) -> None:
        """A key that covers more than the block's first one takes the place of all that the block was known by."""
        tokens = count * self.hash_tokens
        block, key = self.requests[name].rows[at][tokens // self.spans[at]], (hashes[count - 1], at)
        if key in self.pool.keys_of(block):
            return
        if self.pool.keys_of(block) and self.covered[block] < tokens:
            self.pool.forget(block)
            self.settle_losses()
        self.publish(block, key, tokens)
        parent = hashes[count - 2] if count > 1 else None
        self.note_stored(at, name, [key[0]], parent, (count - 1) * self.hash_tokens, self.hash_tokens)

    def note_stored(
        self, at: int, name: str, hashes: list[bytes], parent: bytes | None, start: int, block_tokens: int
    ) -> None:
        for group in self.sets[at]:
            self.note(Stored(group, name, list(hashes), parent, start, block_tokens))

    # Giving back.

    def free(self, name: str) -> None:
        """Each set's row is given back last block first."""
        if name not in self.requests:
            raise RefusedError([UnknownRequestError])
        for row in self.requests.pop(name).rows:
            self.pool.release(row[::-1])

    def release_skipped(self, name: str, _: int) -> None:
        """Nothing: full attention and MLA need all of it."""
        if name not in self.requests:
            raise RefusedError([UnknownRequestError])

    def pin(self, blocks: Sequence[int]) -> None:
        self.pool.add_ref(blocks)
        self.pins += blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        reasons: list[type[LockstepKVError]] = [ConfigError for block in blocks if not self.pool.is_real(block)]
        reasons += [DoubleFreeError for b in blocks if self.pool.is_real(b) and blocks.count(b) > self.pins.count(b)]
        refuse_if(reasons)
        for block in blocks:
            self.pins.remove(block)
        self.pool.release(blocks)

    def evict(self, blocks: Sequence[int]) -> None:
        self.pool.evict(blocks)
        self.settle_losses()

    def reset_prefix_cache(self) -> bool:
        carried = {block for _, block in self.pool.entries}
        done = self.pool.reset()
        if done:
            for hit in self.hits:
                hit.stale |= any(block in carried for row in hit.rows for block in row)
            self.note(Cleared())
        return done

    # Looking on.

    def take_events(self) -> list[Stored | Removed | Cleared]:
        events, self.events = self.events, []
        return events

    def stats(self) -> dict[str, int]:
        return {
            "lookups": self.lookups,
            "lookup_tokens": self.lookup_tokens,
            "hit_tokens": self.hit_tokens,
            "allocations": self.allocations,
            "refusals": self.refusals,
            "taken_blocks": self.pool.taken,
            "evicted_blocks": self.pool.evicted,
            "published_keys": self.pool.published,
            "peak_held_blocks": self.pool.peak_held,
            "held_blocks": self.pool.num_held,
            "free_blocks": len(self.pool.queue),
            "keys": len(self.pool.entries),
            "requests": len(self.requests),
        }
