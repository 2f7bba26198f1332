"""Faults that hybrid coordinators of other engines had, played through here: groups of several kinds over one pool.

F(b) is full attention of b tokens per block, S(b, w) a window of w tokens, M(b) a recurrent state per b tokens. Blocks
without a hash that become free are taken again first, those with a hash last, and rows are released last block first:
where ids depend on that, they are those of this order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
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

from lockstep_kv.block_table import PAD, slot_mapping, table_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from lockstep_kv import Coordinator, GroupSpec

HASHES = block_hashes(16)


# A state is published before it is written.


@pytest.mark.parametrize("is_confirmed", [False, True])
@pytest.mark.parametrize("mode", ["align", "all", "none"])
def test_a_state_of_a_step_that_never_ran_is_not_hit(mode: str, *, is_confirmed: bool) -> None:
    """Fault 20: a recurrent state is published when its step is scheduled, and that step never runs.

    Excluded by construction for those who publish a step when its results are in: `allocate` publishes nothing.
    """
    c = coordinator(full(4), state(4, mode), num_blocks=20)
    c.allocate("r1", 8)
    # The second step is scheduled while the first is in flight.
    c.new_step()
    assert c.find_longest_hit(HASHES[:3], 11).num_tokens == 0
    if is_confirmed:
        c.cache("r1", HASHES, 8)
        c.new_step()
    c.free("r1")
    hit = c.find_longest_hit(HASHES[:3], 11)
    assert hit.num_tokens == (8 if is_confirmed else 0)
    assert (c.lookup(HASHES[1]) is not None) is is_confirmed
    assert c.allocate("r3", 12, hit=hit) is not None
    c.free("r3")
    check_all_given_back(c)


@pytest.mark.parametrize("mode", ["align", "all", "none"])
def test_a_state_published_in_a_step_waits_for_the_next_one(mode: str) -> None:
    """Fault 20: a state that is published when its step is scheduled is used before that step has run.

    Until `new_step` says that it is written a request that would start from it waits, and changes nothing.
    """
    c = coordinator(full(4), state(4, mode), num_blocks=20)
    c.allocate_slots("r1", 8, block_hashes=HASHES, cache_tokens=8, num_prompt_tokens=12, prefill_end=12)
    hit = c.find_longest_hit(HASHES[:3], 11)
    with unchanged(c):
        assert c.allocate("r2", 12, hit=hit) is None
    # The step never runs: its request ends, and its blocks are forgotten before the next step begins.
    blocks = [block for row in c.block_ids("r1") for block in row]
    c.free("r1")
    with unchanged(c):
        assert c.allocate("r3", 12, hit=hit) is None, "a request that ends does not say that its step has run"
    c.evict(blocks)
    c.new_step()
    assert c.find_longest_hit(HASHES[:3], 11).num_tokens == 0
    assert c.lookup(HASHES[1]) is None
    check_all_given_back(c)


def states_in_flight(*, is_confirmed: bool) -> tuple[Any, Any]:
    """A manager whose scheduler has scheduled and published 8 tokens of a prompt and then begun its next step.

    vLLM's scheduler publishes when it schedules, and counts a request's tokens in flight until their step is confirmed.
    """
    m = manager(full(4), state(4, "align"), num_blocks=20)
    r1 = request("r1", 12, 4)
    m.new_step_starts()
    assert m.allocate_slots(r1, 8) is not None
    r1.num_computed_tokens = 8
    r1.num_in_flight_tokens = 0 if is_confirmed else 8
    m.new_step_starts()
    return m, r1


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_under_vllm_nobody_starts_from_a_state_whose_step_is_in_flight(*, is_confirmed: bool) -> None:
    """Fault 20: the guard of a published state is lifted by the next schedule while its step is still in flight."""
    m, r1 = states_in_flight(is_confirmed=is_confirmed)
    r2 = request("r2", 12, 4)
    blocks, tokens, _ = m.get_computed_blocks(r2)
    starts = m.allocate_slots(r2, 12 - tokens, tokens, blocks) is not None
    assert (starts and tokens > 0) is is_confirmed, f"{tokens} tokens are hit"
    m.free(r2)
    m.free(r1)
    check_all_given_back(m._core)


@pytest.mark.parametrize("is_confirmed", [False, True])
def test_under_vllm_an_aborted_step_leaves_no_state_behind(*, is_confirmed: bool) -> None:
    """Fault 20: a prefill is aborted while its step is in flight, and the retry resumes from a state never written."""
    m, r1 = states_in_flight(is_confirmed=is_confirmed)
    m.free(r1)
    m.new_step_starts()
    assert m.get_computed_blocks(request("r3", 12, 4))[1] == (8 if is_confirmed else 0)
    check_all_given_back(m._core)


# How long a hit is.


def test_a_draft_model_drops_one_block_however_often_groups_are_asked() -> None:
    """Fault 21: each time a group is asked again at a shorter length it drops one more block, down to no hit at all."""
    groups = (full(4), window(4, 8), window(4, 12))
    c = coordinator(*groups, num_blocks=40, use_eagle=True)
    c.allocate("a", 40)
    c.cache("a", HASHES, 40)
    rows = c.block_ids("a")
    for _ in range(2):
        hit = c.find_longest_hit(HASHES[:10], 40)
        assert hit.num_tokens == 36, "40 tokens less one block"
        assert hit.block_ids == (rows[0][:9], [0] * 7 + rows[1][7:9], [0] * 6 + rows[2][6:9])
    c.allocate("b", 41, hit=hit)
    c.free("a")
    c.free("b")
    check_all_given_back(c)


@pytest.mark.parametrize("draft_first", [False, True])
@pytest.mark.parametrize(("num_draft_tokens", "expected"), [(36, 32), (32, 16)])
def test_the_draft_model_s_block_is_dropped_before_the_hit_is_aligned(
    num_draft_tokens: int, expected: int, *, draft_first: bool
) -> None:
    """Fault 22: the hit is aligned before the draft block is dropped, and once more after it: 16 in both cases."""
    groups: list[GroupSpec] = [full(16), full(4, is_eagle=True)]
    target, draft = (1, 0) if draft_first else (0, 1)
    c = coordinator(*(groups[::-1] if draft_first else groups), num_blocks=40, use_eagle=True)
    c.allocate("a", 36)
    c.cache("a", HASHES, 36)
    rows = c.block_ids("a")
    assert (c.num_published("a")[target], c.num_published("a")[draft]) == (2, 9)
    c.evict(rows[draft][num_draft_tokens // 4 :])
    hit = c.find_longest_hit(HASHES[:10], 40)
    assert hit.num_tokens == expected
    assert hit.block_ids[target] == rows[target][: expected // 16]
    assert hit.block_ids[draft] == rows[draft][: expected // 4]
    c.free("a")
    check_all_given_back(c)


@pytest.mark.parametrize(("sizes", "unit", "expected"), [((6, 8), 24, 24), ((6, 12), 12, 36)])
def test_hits_are_multiples_of_the_blocks_common_multiple(sizes: tuple[int, int], unit: int, expected: int) -> None:
    """Fault 23: blocks that do not divide each other make the unit of hits, and so what is lost of each hit, large."""
    c = coordinator(*map(full, sizes), num_blocks=40)
    assert math.lcm(*(s.tokens_per_block for s in c.sets)) == unit
    hashes = block_hashes(40 // c.hash_block_tokens)
    c.allocate("a", 40)
    c.cache("a", hashes, 40)
    hit = c.find_longest_hit(hashes, 40)
    assert hit.num_tokens == expected == 40 // unit * unit
    assert [len(row) for row in hit.block_ids] == [expected // size for size in sizes]
    c.free("a")
    check_all_given_back(c)


@pytest.mark.parametrize("sizes", [(6, 8), (6, 12)])
def test_the_unit_of_hits_that_vllm_is_told_is_the_one_of_lookups(sizes: tuple[int, int]) -> None:
    """Fault 23: the alignment that is reported is not the one that lookups use."""
    groups = [full(size) for size in sizes]
    m = manager(*groups, num_blocks=40)
    unit = math.lcm(*sizes)
    assert m.coordinator.scheduler_block_size == unit
    assert {view.cache_hit_alignment_tokens for view in m.coordinator.single_type_managers} == {unit}
    a, b = (request(name, 41, math.gcd(*sizes)) for name in "ab")
    assert m.allocate_slots(a, 41) is not None
    assert m.get_computed_blocks(b)[1] == 40 // unit * unit

    from lockstep_kv.vllm.coverage import NotCoveredError

    for other in (unit // 2, unit * 2):
        with pytest.raises(NotCoveredError, match=str(other)):
            manager(*groups, num_blocks=40, scheduler_block_size=other)


# In which order blocks come back.


def finished_later(c: Coordinator, rows: tuple[list[int], ...]) -> None:
    """End the request two steps late: each row is given back by itself, as `free` does it."""
    before = c.free_order()
    assert c.detach("r") == [block for row in rows for block in row]
    for _ in range(2):
        c.new_step()
        assert (c.num_free_blocks, c.free_order()) == (2, before), "free before the fence has passed"
    for row in rows:
        c.unpin(row[::-1])


@pytest.mark.parametrize("is_published", [True, False])
@pytest.mark.parametrize("finish", [lambda c, _: c.free("r"), finished_later], ids=["at once", "later"])
def test_blocks_that_are_given_back_later_come_back_in_the_same_order(
    finish: Callable[[Coordinator, tuple[list[int], ...]], None], *, is_published: bool
) -> None:
    """Fault 24: a deferred free gives all groups back as one reversed list, so that their order is reversed too."""
    c = coordinator(full(4), full(4), num_blocks=9)
    c.allocate("r", 12)
    rows = c.block_ids("r")
    assert (rows, c.free_order()) == (([1, 2, 3], [4, 5, 6]), [7, 8])
    if is_published:
        c.cache("r", HASHES, 12)
    finish(c, rows)
    # Without hashes each row goes to the head of the queue, so that the last one is taken first.
    assert c.free_order() == ([7, 8, 3, 2, 1, 6, 5, 4] if is_published else [6, 5, 4, 3, 2, 1, 7, 8])
    check_all_given_back(c)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_under_vllm_a_deferred_free_keeps_the_order_of_the_groups(*, is_deferred: bool) -> None:
    """Fault 24: vLLM's scheduler gives back what `pop_blocks_for_free` returned as one reversed list."""
    m = manager(full(4), full(4), num_blocks=9)
    r = request("r", 12, 4)
    assert m.allocate_slots(r, 12).get_block_ids() == ([1, 2, 3], [4, 5, 6])
    if is_deferred:
        blocks = m.pop_blocks_for_free(r)
        assert m.block_pool.get_num_free_blocks() == 2
        m.block_pool.free_blocks(reversed(blocks))
    else:
        m.free(r)
    assert m._core.free_order() == [7, 8, 3, 2, 1, 6, 5, 4]
    check_all_given_back(m._core)


# What is taken, cleared and shown.


def in_chunks(c: Coordinator, name: str, hashes: list[bytes]) -> set[int]:
    """Compute a prompt of 16 tokens in 4 chunks and end it. Returns the blocks it has had."""
    seen: set[int] = set()
    for end in range(4, 17, 4):
        c.release_skipped(name, end - 4) if end > 4 else None
        order = c.free_order()
        hashed = [block for block in order if c.hashes_of(block)]
        assert order[len(order) - len(hashed) :] == hashed, "a block without a hash is behind one that has one"
        assert c.allocate(name, end) is not None
        c.cache(name, hashes, end, num_prompt_tokens=16)
        seen.update(block for row in c.block_ids(name) for block in row if block)
    c.free(name)
    return seen


def test_what_is_cached_stays_while_blocks_without_a_hash_are_free() -> None:
    """Fault 25: blocks that are cached are taken although free ones without a hash are there.

    Here the window publishes only what a hit at the prompt's end needs; its other blocks go to the head of the queue.
    """
    c = coordinator(full(4), window(4, 4), num_blocks=13, retention_interval=0)
    first = in_chunks(c, "a", HASHES)
    # The window's last block has no hash: b takes it again, and no other block of a.
    unhashed = {block for block in first if not c.hashes_of(block)}
    second = in_chunks(c, "b", block_hashes(4, family=1))
    assert (len(first), len(second)) == (6, 6)
    assert first & second == unhashed
    assert len(unhashed) == 1
    assert c.stats()["evicted_blocks"] == 0
    hit = c.find_longest_hit(HASHES[:4], 15)
    assert hit.num_tokens == 12
    assert [[block > 0 for block in row] for row in hit.block_ids] == [[True] * 3, [False, False, True]]
    check_all_given_back(c)


def test_where_all_of_a_window_is_published_the_same_load_evicts_the_prefix() -> None:
    """Fault 25: the world above without the selective publication, to show that it can lose the hit."""
    c = coordinator(full(4), window(4, 4), num_blocks=13)
    assert len(in_chunks(c, "a", HASHES)) == 8
    in_chunks(c, "b", block_hashes(4, family=1))
    assert c.find_longest_hit(HASHES[:4], 15).num_tokens == 0
    check_all_given_back(c)


def test_blocks_that_held_a_state_are_to_be_cleared_once_when_attention_takes_them() -> None:
    """Fault 26: attention reads what a recurrent state has left in a block."""
    c = coordinator(full(4), state(4, "all"), num_blocks=9, notes_new_blocks=True)
    assert c.allocate("m", 4) == ([1], [2])
    assert c.take_new_blocks() == [1]
    c.free("m")
    # Both went to the head of the queue, the state's block in front.
    assert c.allocate("f", 12) == ([2, 1, 3], [4, 5, 6])
    assert sorted(c.take_new_blocks()) == [1, 2, 3]
    assert c.take_new_blocks() == []
    c.cache("f", HASHES, 12)
    c.free("f")
    c.new_step()
    hit = c.find_longest_hit(HASHES[:4], 12)
    assert c.allocate("g", 12, hit=hit) == ([], [])
    assert c.block_ids("g")[0] == [2, 1, 3]
    assert c.take_new_blocks() == [], "a hit is cleared"
    c.free("g")
    check_all_given_back(c)


def test_nothing_is_to_be_cleared_where_no_state_is() -> None:
    """Fault 26: without states nothing needs clearing, and nothing is noted unless it is asked for."""
    c = coordinator(full(4), num_blocks=9)
    c.allocate("f", 12)
    assert c.take_new_blocks() == []
    c.free("f")
    check_all_given_back(c)


def test_rows_do_not_keep_the_ids_of_blocks_that_were_given_back() -> None:
    """Fault 27: a worker's row is only appended to, so that it keeps blocks which by then belong to somebody else.

    Excluded by construction: `table_row` makes whole rows, with null blocks behind the request's own.
    """
    c = coordinator(window(4, 4), num_blocks=6)
    table = np.full((2, 6), -1)

    def publish(name: str, at: int) -> list[int]:
        table[at] = table_row(c.block_ids(name)[0], width=table.shape[1])
        row: list[int] = table[at].tolist()
        return row

    c.allocate("r1", 12)
    assert publish("r1", 0) == [1, 2, 3, 0, 0, 0]
    c.release_skipped("r1", 12)
    assert publish("r1", 0) == [0, 0, 3, 0, 0, 0], "before anybody gets 1 and 2"
    # Given back last block first, without hashes: they are taken again at once.
    assert c.allocate("r2", 16) == ([2, 1, 4, 5],)
    publish("r2", 1)
    assert not {1, 2} & set(table[0].tolist())
    geometry: dict[str, Any] = {"block_size": 4, "kernel_block_size": 4, "kv_shards": 1, "rank": 0}
    slots = slot_mapping(range(12), table[0], **geometry)
    assert slots.tolist() == [PAD] * 8 + [12, 13, 14, 15], "nothing is written to a block that was given back"

    c.free("r1")
    assert c.allocate("r3", 4) == ([3],)
    assert publish("r3", 0) == [3, 0, 0, 0, 0, 0], "nothing is left of the row's last user"
    c.free("r2")
    c.free("r3")
    check_all_given_back(c)
