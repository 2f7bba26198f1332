"""The coordinator's calls for serving engines: slots in one call, detached requests, and what can be read of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lockstep_kv import Coordinator, CoordinatorConfig, GroupSpec, LayerSpec
from lockstep_kv.errors import (
    ArgumentTypeError,
    ConfigError,
    DoubleFreeError,
    LockstepKVError,
    PoolExhaustedError,
    StaleHitError,
    UnknownRequestError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

HASHES = [bytes([at]) * 32 for at in range(1, 9)]


def coordinator(*groups: GroupSpec, num_blocks: int = 20) -> Coordinator:
    groups = groups or (GroupSpec("full", 4, [LayerSpec("full", 4)]),)
    return Coordinator(CoordinatorConfig(list(groups), num_blocks, max_model_len=64))


def window() -> GroupSpec:
    return GroupSpec("sliding_window", 4, [LayerSpec("window", 8)], sliding_window=5)


def test_slots_and_publication_are_one_call() -> None:
    c = coordinator()
    assert c.allocate_slots("a", 10, block_hashes=HASHES, cache_tokens=10, num_prompt_tokens=10) == ([1, 2, 3],)
    assert c.num_published("a") == (2,)
    assert c.findable_tokens("a") == 8
    # Nothing new is an empty tuple, too few blocks are None.
    assert c.allocate_slots("a", 11) == ()
    assert c.grow("a", 12, 0, HASHES, 12, 10, 0) == ()
    assert c.num_published("a") == (3,)
    assert c.allocate_slots("b", 64, reserved_blocks=1) is None
    assert c.allocate_slots("b", 4, whole_tokens=64, watermark_blocks=1) is None
    assert c.allocate_slots("b", 4, whole_tokens=64) == ([4],)
    assert c.blocks_needed("b", 64) == 15


def test_either_all_is_done_or_nothing() -> None:
    c = coordinator()
    before = c.state_digest()
    for hashes, error in (
        (HASHES[:1], ConfigError),
        ([*HASHES[:1], b"short"], ConfigError),
        ([1, 2], ArgumentTypeError),
    ):
        with pytest.raises(error):
            c.allocate_slots("a", 10, block_hashes=hashes, cache_tokens=10)  # type: ignore[arg-type]
        assert c.state_digest() == before
        assert c.num_requests == 0


def test_a_detached_request_s_blocks_are_held_until_they_are_given_back() -> None:
    c = coordinator()
    c.allocate_slots("a", 12, block_hashes=HASHES, cache_tokens=12)
    blocks = c.detach("a")
    assert (blocks, c.num_requests, c.num_free_blocks) == ([1, 2, 3], 0, 16)
    c.audit()
    c.unpin(blocks[::-1])
    assert c.free_order()[-3:] == [3, 2, 1]
    with pytest.raises(DoubleFreeError):
        c.unpin(blocks)
    taken = c.take_pinned(2)
    assert [c.ref_count(block) for block in taken] == [1, 1]
    c.unpin(taken)
    c.audit()


def test_windows_give_back_first_and_keep_it_given() -> None:
    c = coordinator(window())
    c.allocate_slots("a", 12)
    assert c.allocate_slots("a", 13, processed_tokens=12, reserved_blocks=30) is None
    assert c.block_ids("a") == ([0, 0, 3],)
    assert c.detach("a") == [0, 0, 3]


def test_what_blocks_stand_for() -> None:
    c = coordinator(GroupSpec("full", 4, [LayerSpec("full", 4)]), window())
    c.allocate_slots("a", 16, block_hashes=HASHES, cache_tokens=16, num_prompt_tokens=16)
    assert c.request_ids() == ["a"]
    assert c.hashes_of(1) == [(HASHES[0], 0)]
    assert c.hashes_of(5) == [(HASHES[0], 1)]
    assert c.lookup_in_group(HASHES[0], 1) == 5
    assert c.lookup_in_group(HASHES[7], 0) is None
    c.evict([5, 6])
    assert c.find_hit_per_group(HASHES, 15) == (([1, 2, 3], 12), ([0, 0, 7], 12))
    hit = c.hit_of(([1, 2, 3], [0, 0, 7]), 12)
    assert (hit.num_tokens, hit.num_uncached_tokens) == (12, 0)
    assert c.allocate("b", 13, hit=hit) == ([9], [10])
    assert c.block_ids("b") == ([1, 2, 3, 9], [0, 0, 7, 10])


CALLS: dict[str, tuple[Callable[[Coordinator], object], type[LockstepKVError]]] = {
    "slots of a wrong name": (lambda c: c.allocate_slots(1, 4), ArgumentTypeError),  # type: ignore[arg-type]
    "no slots": (lambda c: c.allocate_slots("b", 0), ConfigError),
    "slots beyond the longest request": (lambda c: c.allocate_slots("b", 65), ConfigError),
    "publication without hashes": (lambda c: c.allocate_slots("b", 4, cache_tokens=4), ConfigError),
    "a negative reserve": (lambda c: c.allocate_slots("b", 4, watermark_blocks=-1), ConfigError),
    "a huge reserve": (lambda c: c.allocate_slots("b", 4, reserved_blocks=2**64), ConfigError),
    "a hit that is none": (lambda c: c.allocate_slots("b", 4, hit=3), ArgumentTypeError),  # type: ignore[arg-type]
    "growth beyond the longest request": (lambda c: c.grow("a", 65, 0, HASHES, 4, 4, 0), ConfigError),
    "growth with a wrong length": (lambda c: c.grow("a", "5", 0, HASHES, 4, 4, 0), ArgumentTypeError),  # type: ignore[arg-type]
    "growth without hashes": (lambda c: c.grow("a", 9, 0, [], 8, 8, 0), ConfigError),
    "detaching nobody": (lambda c: c.detach("b"), UnknownRequestError),
    "publication of nobody": (lambda c: c.num_published("b"), UnknownRequestError),
    "an estimate of nobody": (lambda c: c.findable_tokens("b"), UnknownRequestError),
    "hashes of no block": (lambda c: c.hashes_of(20), ConfigError),
    "a group that is not there": (lambda c: c.lookup_in_group(HASHES[0], 1), ConfigError),
    "a hash of no length": (lambda c: c.lookup_in_group(b"", 0), ConfigError),
    "more than there is": (lambda c: c.take_pinned(20), PoolExhaustedError),
    "a hit of too few rows": (lambda c: c.hit_of((), 4), ConfigError),
    "a hit of too few blocks": (lambda c: c.hit_of(([1],), 8), ConfigError),
    "a hit on the null block": (lambda c: c.hit_of(([0],), 4), ConfigError),
    "a hit on a block without content": (lambda c: c.hit_of(([9],), 4), ConfigError),
}


@pytest.mark.parametrize(("call", "error"), CALLS.values(), ids=CALLS)
def test_bad_input_changes_nothing(call: Callable[[Coordinator], object], error: type[LockstepKVError]) -> None:
    c = coordinator()
    c.allocate_slots("a", 8, block_hashes=HASHES, cache_tokens=4)
    before = c.state_digest()
    with pytest.raises(LockstepKVError) as caught:
        call(c)
    assert caught.type is error
    assert c.state_digest() == before
    c.audit()


def test_a_stale_hit_is_refused_everywhere() -> None:
    c = coordinator()
    c.allocate_slots("a", 8, block_hashes=HASHES, cache_tokens=8)
    hit = c.find_longest_hit(HASHES, 8)
    c.evict([2])
    before = c.state_digest()
    for call in (lambda: c.blocks_needed("b", 9, hit=hit), lambda: c.allocate_slots("b", 9, hit=hit)):
        with pytest.raises(StaleHitError):
            call()
    assert c.state_digest() == before
