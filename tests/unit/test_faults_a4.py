"""Faults that other engines had in admission, preemption and the reported capacity, played through here.

F(b) is full attention of b tokens per block, S(b, w) a window of w tokens, M(b) a recurrent state per b tokens. Blocks
without a hash that become free are taken again first, those with a hash last, and rows are released last block first:
where ids depend on that, they are those of this order.
"""

from __future__ import annotations

from typing import Any

import pytest
from fault_worlds import (
    block_hashes,
    check_all_given_back,
    coordinator,
    free_but_for,
    full,
    manager,
    request,
    state,
    unchanged,
    window,
)

from lockstep_kv import ConfigError, GroupSpec, LayerSpec, Layout, plan_layout
from lockstep_kv.replay import replay
from lockstep_kv.trace import TRACE_BLOCK_TOKENS, TraceRequest

HASHES = block_hashes(16)


def plan(*groups: GroupSpec, **options: Any) -> Layout:
    """The layout of one rank, for requests of up to 64 tokens unless told otherwise."""
    return plan_layout(groups, **{"dcp_world_size": 1, "max_model_len": 64, **options})


# Requests that can never fit.


def test_a_pool_too_small_for_the_longest_request_is_refused_at_start_up() -> None:
    """Fault 28: a length that is legal for the model but can never fit is found out only when a request has it."""
    with pytest.raises(ConfigError, match=r"needs 16 blocks .* but only 11 blocks fit"):
        plan(full(4), num_blocks=11)
    assert plan(full(4), num_blocks=11, max_model_len=40).blocks_per_request == 10


def test_a_request_that_can_never_fit_does_not_hold_up_the_one_behind_it() -> None:
    """Fault 28: the first of the queue is retried for ever, and nobody behind it runs."""
    # The longest request that the pool can hold, which is what start-up has told.
    c = coordinator(full(4), num_blocks=11, max_model_len=40)
    with unchanged(c), pytest.raises(ConfigError, match="max_model_len 40, got 60"):
        c.allocate("r1", 60)
    assert c.allocate("r2", 8) == ([1, 2],)
    c.free("r2")

    # Whoever starts without that check can still tell "never" from "not now" when the request arrives.
    c = coordinator(full(4), num_blocks=11)
    assert c.blocks_needed("r1", 60) == 15 > c.num_blocks - 1
    with unchanged(c):
        assert c.allocate("r1", 60) is None
    assert c.allocate("r2", 8) == ([1, 2],)
    c.free("r2")
    check_all_given_back(c)


def test_a_replay_rejects_a_request_that_can_never_fit_and_goes_on() -> None:
    """Fault 28: the same in the one place of this package that keeps a queue."""
    c = coordinator(full(TRACE_BLOCK_TOKENS), num_blocks=11, max_model_len=16 * TRACE_BLOCK_TOKENS)
    load = [TraceRequest(0, blocks * TRACE_BLOCK_TOKENS, 0, tuple(range(blocks))) for blocks in (15, 2)]
    report = replay(load, c)
    assert (report.requests, report.rejected, report.refusals, report.allocated_blocks) == (2, 1, 0, 2)
    check_all_given_back(c)


def test_the_null_block_is_not_counted_as_room_for_the_longest_request() -> None:
    """Fault 29: a pool is compared with its total of blocks although one is reserved, and a full request hangs."""
    with pytest.raises(ConfigError, match=r"needs 16 blocks .* but only 16 blocks fit"):
        plan(full(4), num_blocks=16)
    with pytest.raises(ConfigError, match="at least 68 bytes"):
        plan(full(4), available_bytes=16 * 4)
    assert plan(full(4), num_blocks=16, max_model_len=60).num_blocks == 16
    assert plan(full(4), available_bytes=17 * 4).num_blocks == 17

    c = coordinator(full(4), num_blocks=17)
    for tokens in range(1, 65):
        assert c.allocate("a", tokens) is not None
        assert c.usage == -(-tokens // 4) / 16 <= 1
    assert c.num_free_blocks == 0
    c.free("a")
    assert c.usage == 0
    check_all_given_back(c)


# Windows.


@pytest.mark.parametrize("num_free", [1, 2])
def test_a_running_window_is_refused_or_gets_what_it_takes(num_free: int) -> None:
    """Fault 30: a window is admitted by its cap and allocated by its real slots, and fails with an exception."""
    c = coordinator(window(4, 8), num_blocks=20, max_in_flight_tokens=8)
    for end in range(8, 33, 8):
        assert c.allocate_slots("r", end, processed_tokens=end - 8) is not None
    c.release_skipped("r", 32)
    (row,) = c.block_ids("r")
    assert [block > 0 for block in row] == [False] * 6 + [True] * 2
    held = free_but_for(c, num_free)
    assert c.blocks_needed("r", 40) == 2
    if num_free == 1:
        with unchanged(c):
            assert c.allocate("r", 40) is None
            assert c.allocate_slots("r", 40, processed_tokens=32, whole_tokens=40) is None
        assert c.block_ids("r") == (row,)
    else:
        assert c.allocate_slots("r", 40, processed_tokens=32, whole_tokens=40) is not None
        (longer,) = c.block_ids("r")
        assert (len(longer), sum(block > 0 for block in longer), c.num_free_blocks) == (10, 4, 0)
        assert c.blocks_needed("new", 40, capped=True) == 5, "the cap holds what the request has"
    c.free("r")
    c.unpin(held)
    check_all_given_back(c)


def test_a_window_over_a_block_s_border_needs_two_blocks() -> None:
    """Fault 32: a window that is no longer than a block is planned with one block, and decoding gets stuck."""
    options = {"max_model_len": 10, "max_in_flight_tokens": 1}
    with pytest.raises(ConfigError, match=r"needs 2 blocks .* but only 2 blocks fit"):
        plan(window(4, 3), num_blocks=2, **options)
    assert plan(window(4, 3), num_blocks=3, **options).blocks_per_request == 2

    # With one usable block, which start-up refuses, these positions of a decoded request have no slot.
    c = coordinator(window(4, 3), num_blocks=2, **options)
    stuck = [at for at in range(10) if c.allocate_slots("r", at + 1, processed_tokens=at) is None]
    assert stuck == [4, 5, 8, 9]
    c.free("r")
    check_all_given_back(c)


@pytest.mark.parametrize(("num_requests", "num_blocks"), [(1, 3), (3, 7)])
def test_decoding_requests_of_a_window_fit_where_they_are_planned_to(num_requests: int, num_blocks: int) -> None:
    """Fault 32: several requests that decode at once block each other in a pool that was sized for them."""
    c = coordinator(window(4, 3), num_blocks=num_blocks, max_model_len=10, max_in_flight_tokens=1)
    names = [f"r{number}" for number in range(num_requests)]
    for at in range(10):
        for name in names:
            assert c.allocate_slots(name, at + 1, processed_tokens=at) is not None, at
            assert sum(block > 0 for block in c.block_ids(name)[0]) <= 2
    for name in names:
        c.free(name)
    check_all_given_back(c)


@pytest.mark.parametrize("kind", ["circular_buffer", "mamba"])
def test_a_full_pool_does_not_block_a_request_that_takes_nothing_from_it(kind: str) -> None:
    """Fault 32: a group of constant size that is full vetoes a request that needs no more of it.

    Excluded by construction: what counts is the sum of the blocks that a request will take, and here that is 0.
    """
    constant = state(64, "none") if kind == "mamba" else GroupSpec(kind, 4, [LayerSpec("ring", 4)])
    c = coordinator(full(4), constant, num_blocks=12, enable_caching=False)
    assert c.allocate("r", 5) is not None
    held = free_but_for(c, 0)
    assert c.blocks_needed("r", 8) == 0
    assert c.allocate("r", 8) == ([], [])
    with unchanged(c):
        assert c.allocate("r", 9) is None
    c.unpin(held[:1])
    new = c.allocate("r", 9)
    assert new == ([held[0]], [])
    c.free("r")
    c.unpin(held[1:])
    check_all_given_back(c)


# Preemption.


@pytest.mark.parametrize("is_published", [True, False])
def test_a_victim_with_fenced_blocks_frees_nothing_yet_and_no_second_one_is_needed(*, is_published: bool) -> None:
    """Fault 31: a victim's blocks are fenced by the step in flight, so that one request after the other is preempted.

    Whom to preempt is the scheduler's choice. Here the count of free blocks does not move until the fence has passed,
    so that it can see that the next victim would not help either.
    """
    c = coordinator(full(4), num_blocks=7)
    for name in ("r1", "r2", "r3"):
        c.allocate(name, 8)
        if is_published:
            c.cache(name, block_hashes(2, family=int(name[1])), 8)
    # The pass while the step is in flight: r1 needs a block, and r3 is preempted.
    with unchanged(c):
        assert c.allocate("r1", 9) is None
    fenced = c.detach("r3")
    assert (fenced, c.num_free_blocks) == ([5, 6], 0)
    with unchanged(c):
        assert c.allocate("r1", 9) is None
    assert c.block_ids("r1") == ([1, 2],)
    # The step is confirmed.
    c.unpin(fenced[::-1])
    assert c.num_free_blocks == 2
    assert c.allocate("r1", 9) == ([6],)
    assert sorted(c.request_ids()) == ["r1", "r2"], "one victim was enough"
    c.free("r1")
    c.free("r2")
    check_all_given_back(c)


# Estimates and what is taken.

EXTERNAL = [
    pytest.param(mode, drafts, need, id=f"{mode} {drafts} drafts")
    for mode in ("align", "all", "none")
    for drafts, need in ((0, 2), (2, 4))
]


@pytest.mark.parametrize(("mode", "drafts", "need"), EXTERNAL)
def test_a_state_that_is_loaded_and_the_running_one_both_take_a_block(mode: str, drafts: int, need: int) -> None:
    """Fault 33: an external hit on a state takes one block more than was tested, and the allocation fails half way."""
    c = coordinator(state(4, mode, drafts=drafts), num_blocks=12)
    held = free_but_for(c, need - 1)
    with unchanged(c):
        assert c.allocate("r", 12, num_external_tokens=8) is None
    c.unpin(held[:1])
    assert c.allocate("r", 12, num_external_tokens=8) is not None
    assert c.num_free_blocks == 0
    (row,) = c.block_ids("r")
    assert [block > 0 for block in row] == [False] + [True] * need
    c.free("r")
    c.unpin(held[1:])
    check_all_given_back(c)


@pytest.mark.parametrize(("mode", "drafts", "need"), EXTERNAL)
def test_the_estimate_for_a_loaded_state_is_what_is_taken(mode: str, drafts: int, need: int) -> None:
    """Fault 33: the estimate for an external hit on a state is one block short."""
    c = coordinator(state(4, mode, drafts=drafts), num_blocks=12)
    assert c.blocks_needed("r", 12, computed_tokens=8) == need


@pytest.mark.parametrize("slots", [33, 32])
def test_what_admission_counts_is_what_a_request_comes_to_hold(slots: int) -> None:
    """Fault 34: admission leaves out the slot of the last sampled token, and an admitted request fails while decoding.

    A prompt of 16 tokens and 17 new ones: 33 slots where the last token gets one, 32 where it does not.
    """
    blocks = -(-slots // 16)
    c = coordinator(full(16), num_blocks=blocks)
    with unchanged(c):
        assert c.allocate_slots("r", 16, whole_tokens=slots) is None, "one block too few"
    c = coordinator(full(16), num_blocks=blocks + 1)
    assert c.blocks_needed("r", slots) == blocks
    assert c.allocate_slots("r", 16, whole_tokens=slots) is not None
    for tokens in range(17, slots + 1):
        assert c.allocate("r", tokens) is not None, f"admitted, but no slot for token {tokens}"
    assert (len(c.block_ids("r")[0]), c.num_free_blocks) == (blocks, 0)
    c.free("r")
    check_all_given_back(c)


def test_the_question_counts_what_the_allocation_takes_at_every_length() -> None:
    """Fault 34: the test before an allocation and the allocation itself count by different rules."""
    groups = (full(16), window(4, 7), window(8, 3))
    c = coordinator(*groups, num_blocks=60, max_in_flight_tokens=8)
    for tokens in range(1, 65):
        c.release_skipped("r", tokens - 1) if tokens > 1 else None
        for name, end in (("r", tokens), ("new", tokens)):
            need, free = c.blocks_needed(name, end), c.num_free_blocks
            assert c.allocate(name, end) is not None
            assert free - c.num_free_blocks == need
        c.free("new")
    c.free("r")
    check_all_given_back(c)


@pytest.mark.parametrize(("new_tokens", "num_blocks"), [(1, 2), (17, 3)])
def test_under_vllm_a_request_completes_in_the_blocks_of_the_tokens_it_computes(
    new_tokens: int, num_blocks: int
) -> None:
    """Fault 34: the last sampled token is never computed, so that it has no slot: 1 block for one token, 2 for 17."""
    m = manager(full(16), num_blocks=num_blocks)
    r = request("r", 16, 16)
    assert m.allocate_slots(r, 16, full_sequence_must_fit=True) is not None
    r.num_computed_tokens = 16
    r.append_output_token_ids(7)
    for _ in range(new_tokens - 1):
        assert m.allocate_slots(r, 1) is not None
        r.num_computed_tokens += 1
        r.append_output_token_ids(7)
    assert r.num_output_tokens == new_tokens
    assert (m.block_pool.get_num_free_blocks(), m.usage) == (0, 1)
    m.free(r)
    check_all_given_back(m._core)


# Capacity.

MIXED = (full(16), window(16, 32), window(2, 4))
OF_MIXED = {"max_model_len": 256, "max_in_flight_tokens": 32}


def test_capacity_is_counted_by_what_each_group_holds() -> None:
    """Fault 35: the capacity is guessed from the number of groups or the smallest block: 66 or 1600 tokens."""
    layout = plan(*MIXED, num_blocks=101, **OF_MIXED)
    each = [plan(group, num_blocks=101, **OF_MIXED).blocks_per_request for group in MIXED]
    assert (each, layout.blocks_per_request) == ([16, 5, 19], 40)
    assert each[2] / layout.blocks_per_request == 0.475
    # 640 tokens, or 646 if the null block counts.
    assert 640 <= layout.capacity_tokens <= 646


def test_as_many_of_the_longest_requests_fit_as_are_reported() -> None:
    """Fault 35: the report promises more requests at once than the pool holds."""
    num_blocks = 101
    c = coordinator(*MIXED, num_blocks=num_blocks, **OF_MIXED)
    admitted = []
    for name in ("r1", "r2", "r3"):
        for end in range(32, 257, 32):
            whole = 256 if end == 32 else 0
            if c.allocate_slots(name, end, processed_tokens=end - 32, whole_tokens=whole) is None:
                assert end == 32, "admitted, but stuck before its end"
                break
            held = [sum(block > 0 for block in row) for row in c.block_ids(name)]
            assert all(count <= most for count, most in zip(held, (16, 5, 19), strict=True))
        else:
            admitted.append(name)
    assert admitted == ["r1", "r2"]
    assert len(admitted) == int(plan(*MIXED, num_blocks=num_blocks, **OF_MIXED).max_concurrency)
    for name in admitted:
        c.free(name)
    check_all_given_back(c)
