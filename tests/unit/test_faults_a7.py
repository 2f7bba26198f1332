"""Faults that other engines had with loads that fail or outlive their request, and with events, played through here.

Blocks without a hash that become free are taken again first, those with a hash last, and rows are released last block
first: where ids depend on that, they are those of this order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fault_worlds import (
    block_hashes,
    check_all_given_back,
    coordinator,
    full,
    manager,
    request,
    state,
    unchanged,
    window,
)

from lockstep_kv import BlockStored, DoubleFreeError, OffloadIndex, UnknownRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep_kv import Coordinator

HASHES = block_hashes(16)


# Who owns the blocks that a load writes.


def aborted_load() -> tuple[Coordinator, list[int]]:
    """A pool of 4 blocks, 2 of which an external tier writes for a request that was aborted meanwhile."""
    c = coordinator(full(4), num_blocks=5)
    assert c.allocate("r1", 8, num_external_tokens=8) == ([],), "blocks for external tokens are not new ones"
    blocks = c.detach("r1")
    assert blocks == [1, 2]
    check_fenced(c)
    return c, blocks


def check_fenced(c: Coordinator) -> None:
    """The load is pending: its blocks cannot be handed out, and nobody can hit them."""
    assert c.num_free_blocks == 2
    assert c.free_order() == [3, 4]
    assert c.find_longest_hit(HASHES, 15).num_tokens == 0
    with unchanged(c):
        assert c.allocate("r2", 12) is None


def test_an_aborted_load_s_blocks_are_held_until_it_has_completed() -> None:
    """Fault 47: an abort frees blocks at once that a load still writes, or its completion is lost and they leak."""
    c, blocks = aborted_load()
    with unchanged(c), pytest.raises(UnknownRequestError):
        c.free("r1")
    c.unpin(blocks[::-1])
    assert c.num_free_blocks == 4
    with unchanged(c), pytest.raises(DoubleFreeError):
        c.unpin(blocks[::-1])
    assert c.allocate("r2", 12) == ([2, 1, 3],), "given back last block first, without hashes"
    c.free("r2")
    check_all_given_back(c)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_late_completion_of_an_expired_load_changes_nothing(*, is_taken: bool) -> None:
    """Fault 47: a load never completes and its blocks leak for ever; or it does so late and frees them again.

    When a load has expired is for its owner to say. Whoever has the blocks by then keeps them.
    """
    c, blocks = aborted_load()
    for _ in range(2):
        c.new_step()
        check_fenced(c)
    # The third tick: the lease is over.
    c.unpin(blocks[::-1])
    assert c.num_free_blocks == 4
    if is_taken:
        assert c.allocate("r2", 12) == ([2, 1, 3],)
    with unchanged(c), pytest.raises(DoubleFreeError):
        c.unpin(blocks[::-1])
    assert c.num_free_blocks == (1 if is_taken else 4)
    if is_taken:
        assert [c.ref_count(block) for block in (1, 2, 3)] == [1, 1, 1]
        c.free("r2")
    check_all_given_back(c)


@pytest.mark.parametrize("receives_first", [True, False])
def test_blocks_that_are_received_and_sent_are_free_after_both(*, receives_first: bool) -> None:
    """Fault 47: a load and a store of the same blocks count as one transfer, and the first completion frees them."""
    c = coordinator(full(4), num_blocks=5)
    c.allocate("r1", 8, num_external_tokens=8)
    sent = c.block_ids("r1")[0]
    c.pin(sent)
    received = c.detach("r1")
    assert [c.ref_count(block) for block in received] == [2, 2]
    first, second = (received, sent) if receives_first else (sent, received)
    c.unpin(first)
    check_fenced(c)
    c.unpin(second)
    assert c.num_free_blocks == 4
    with unchanged(c), pytest.raises(DoubleFreeError):
        c.unpin(first)
    check_all_given_back(c)


def test_under_vllm_an_aborted_load_s_blocks_are_held_until_its_connector_is_done() -> None:
    """Fault 47: the same through the calls of vLLM's scheduler, which keeps the blocks of a request that loads."""
    m = manager(full(4), num_blocks=5)
    r1, r2 = request("r1", 9, 4), request("r2", 12, 4)
    assert m.allocate_slots(r1, 0, num_external_computed_tokens=8, delay_cache_blocks=True) is not None
    blocks = m.pop_blocks_for_free(r1)
    assert [block.block_id for block in blocks] == [1, 2]
    with unchanged(m._core):
        m.free(r1)
        assert m.get_computed_blocks(r2)[1] == 0
        assert m.allocate_slots(r2, 12) is None
    m.block_pool.free_blocks(reversed(blocks))
    assert m.block_pool.get_num_free_blocks() == 4
    with unchanged(m._core), pytest.raises(DoubleFreeError):
        m.block_pool.free_blocks(reversed(blocks))
    assert m.allocate_slots(r2, 12) is not None
    m.free(r2)
    check_all_given_back(m._core)


# Loads that fail.


def test_a_failed_load_is_not_found_in_the_pool() -> None:
    """Fault 47: a block whose load has failed still looks like a hit.

    Excluded by construction: blocks for external tokens are not published before `cache` is called, after the load.
    """
    c = coordinator(full(4), num_blocks=5)
    c.allocate("r1", 12, num_external_tokens=8)
    assert c.find_longest_hit(HASHES, 11).num_tokens == 0
    c.free("r1")
    hit = c.find_longest_hit(HASHES, 11)
    assert hit.num_tokens == 0
    assert c.allocate("r1", 12, hit=hit) is not None, "computed here"
    c.cache("r1", HASHES, 12)
    assert c.find_longest_hit(HASHES, 11).num_tokens == 8
    c.free("r1")
    check_all_given_back(c)


def test_under_vllm_blocks_of_a_failed_load_are_forgotten() -> None:
    """Fault 47: vLLM publishes a load's blocks when it schedules it, and takes them back if the load fails."""
    m = manager(full(4), num_blocks=9)
    r1, r2 = request("r1", 13, 4), request("r2", 13, 4)
    assert m.allocate_slots(r1, 5, num_external_computed_tokens=8) is not None
    (row,) = m.get_block_ids("r1")
    m.evict_blocks(set(row))
    assert m.get_computed_blocks(r2)[1] == 0
    m.free(r1)
    assert m.get_computed_blocks(r1)[1] == 0
    assert m.allocate_slots(r1, 13) is not None, "computed here"
    assert m.get_computed_blocks(r2)[1] == 12
    m.free(r1)
    check_all_given_back(m._core)


def test_a_failing_load_from_the_tier_is_tried_twice_at_most() -> None:
    """Fault 47: the key of a load that fails stays a hit, and the request tries the same load for ever.

    A load has no outcome of its own here: whoever sees one fail can no longer trust the tier, and resets it.
    """
    index = OffloadIndex(4)
    index.prepare_store(HASHES[:2])
    index.complete_store(HASHES[:2])
    attempts = 0
    while index.lookup(HASHES[0]) == "hit":
        attempts += 1
        assert attempts <= 2
        index.prepare_load(HASHES[:1])
        index.reset()
        index.complete_load(HASHES[:1])
        index.audit()
    assert [index.lookup(key) for key in HASHES[:2]] == ["miss", "miss"]
    assert index.num_free_slots == 4
    with unchanged(index), pytest.raises(DoubleFreeError):
        index.complete_load(HASHES[:1])


def test_a_failed_store_is_never_a_hit() -> None:
    """Fault 47: a key whose store has failed looks like a hit."""
    index = OffloadIndex(4)
    index.prepare_store(HASHES[:2])
    index.complete_store(HASHES[:1], success=False)
    index.complete_store(HASHES[1:2])
    assert [index.lookup(key) for key in HASHES[:2]] == ["miss", "hit"]
    assert index.num_free_slots == 3
    index.audit()


# Events.


def stored(c: Coordinator) -> list[BlockStored]:
    """The events of blocks that became findable since the last call."""
    return [event for event in c.take_events() if isinstance(event, BlockStored)]


def test_an_event_s_parent_is_of_the_request_s_chain() -> None:
    """Fault 47: an event's parent is the block stored last, whoever stored it, not the one before in the chain."""
    c = coordinator(full(4), num_blocks=9, enable_events=True)
    c.allocate("a", 8)
    c.cache("a", HASHES, 8)
    c.allocate("other", 4)
    c.cache("other", block_hashes(1, family=1), 4)
    assert [(event.block_hashes, event.parent_block_hash) for event in stored(c)] == [
        (HASHES[:2], None),
        (block_hashes(1, family=1), None),
    ]
    hit = c.find_longest_hit(HASHES[:4], 15)
    c.allocate("b", 16, hit=hit)
    c.cache("b", HASHES, 16)
    (event,) = stored(c)
    assert (event.block_hashes, event.parent_block_hash) == (HASHES[2:4], HASHES[1])
    assert (event.start_token, event.end_token) == (8, 16)
    for name in ("a", "other", "b"):
        c.free(name)
    check_all_given_back(c)


def test_an_event_names_no_hash_for_a_null_slot() -> None:
    """Fault 47: null slots of a window are left in the list of what was stored, so that hashes and tokens shift."""
    c = coordinator(window(4, 8), num_blocks=9, enable_events=True)
    c.allocate("a", 16)
    c.release_skipped("a", 16)
    assert c.block_ids("a") == ([0, 0, 3, 4],)
    c.cache("a", HASHES, 16)
    (event,) = stored(c)
    assert (event.block_hashes, event.block_starts, event.parent_block_hash) == (HASHES[2:4], [8, 12], None)
    c.free("a")
    check_all_given_back(c)


def test_under_vllm_the_tokens_of_a_null_slot_are_not_in_the_event() -> None:
    """Fault 47: the event of blocks behind null slots carries the tokens of these slots too."""
    m = manager(window(4, 8), num_blocks=9)
    r = request("r", 16, 4)
    m.allocate_slots(r, 16, delay_cache_blocks=True)
    m.remove_skipped_blocks("r", 16)
    assert m.get_block_ids("r") == ([0, 0, 3, 4],)
    m.cache_blocks(r, 16)
    (event,) = m.take_events()
    assert len(event.block_hashes) == 2
    assert list(event.token_ids) == list(range(8, 16))
    m.free(r)
    check_all_given_back(m._core)


def chain() -> Iterator[Coordinator]:
    """One group of full attention, with a hit on what another request has stored."""
    c = coordinator(full(4), num_blocks=20, enable_events=True)
    for name, end in (("a", 12), ("b", 32)):
        hit = c.find_longest_hit(HASHES[:3], 12)
        c.allocate(name, end, hit=hit)
        c.cache(name, HASHES, end)
        yield c


def slid_window() -> Iterator[Coordinator]:
    """A window that has slid before anything is published."""
    c = coordinator(window(4, 8), num_blocks=20, enable_events=True)
    for end in (16, 20, 24):
        c.allocate("a", end)
        c.release_skipped("a", 16)
        c.cache("a", HASHES, end)
        yield c


def aligned_states() -> Iterator[Coordinator]:
    """States at the ends of steps, with null slots between them."""
    c = coordinator(full(4), state(4, "align"), num_blocks=20, enable_events=True)
    for end in (8, 16, 24):
        c.allocate_slots("a", end, computed_tokens=end - 8, block_hashes=HASHES, cache_tokens=end, num_prompt_tokens=24)
        yield c


def thinned_out_window() -> Iterator[Coordinator]:
    """A window that publishes only the blocks before every 16th token."""
    c = coordinator(window(4, 4), num_blocks=20, enable_events=True, retention_interval=16)
    for end in range(4, 33, 4):
        c.allocate("a", end)
        c.cache("a", HASHES, end, num_prompt_tokens=32)
        yield c


@pytest.mark.parametrize("life", [chain, slid_window, aligned_states, thinned_out_window])
def test_an_event_s_parent_was_reported_before(life: Callable[[], Iterator[Coordinator]]) -> None:
    """Fault 47: an event names a parent that was never reported in its group, so that readers cannot attach it."""
    reported: set[tuple[int, bytes]] = set()
    for c in life():
        for event in stored(c):
            parent = event.parent_block_hash
            assert parent is None or (event.group_id, parent) in reported, f"tokens {event.start_token} and on"
            reported.update((event.group_id, digest) for digest in event.block_hashes)
        c.audit()
    assert reported
