"""What each kind of cache needs, gives back and can be hit by, beyond full attention."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep_kv import ConfigError, Coordinator, CoordinatorConfig, GroupSpec, LayerSpec, hash_blocks

ROOT = bytes(32)
TOKENS = list(range(200))


def group(kind: str, block_size: int = 4, **options: Any) -> GroupSpec:
    return GroupSpec(kind, block_size, [LayerSpec(f"{kind}.{block_size}", 8)], **options)


def coordinator(*groups: GroupSpec, num_blocks: int = 40, **options: Any) -> Coordinator:
    return Coordinator(CoordinatorConfig(list(groups), num_blocks, max_model_len=256, **options))


def hashes(c: Coordinator, tokens: int) -> list[bytes]:
    return hash_blocks(TOKENS[:tokens], c.hash_block_tokens, none_hash=ROOT)


def run(c: Coordinator, name: str, num_tokens: int, prompt: int, **options: Any) -> tuple[list[int], ...] | None:
    """One step: slots for so many tokens, which are published."""
    new = c.allocate_slots(
        name,
        num_tokens,
        block_hashes=hashes(c, max(num_tokens, prompt)),
        cache_tokens=num_tokens,
        num_prompt_tokens=prompt,
        **options,
    )
    c.audit()
    return new


def end(c: Coordinator, *names: str) -> None:
    """Every request ends and everything held for copies is given back: no block stays held."""
    for name in names:
        c.free(name)
    for _, *pair in c.take_block_copies():
        c.unpin(pair)
    c.audit()
    assert c.num_free_blocks == c.num_blocks - 1


# Reference windows.


def test_a_reference_window_keeps_the_prompt_and_the_last_tokens() -> None:
    c = coordinator(group("reference_window", sliding_window=6))
    assert c.allocate("a", 40) == ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10],)
    c.release_skipped("a", 30, num_prompt_tokens=10)
    # The prompt ends inside the third block; 24 tokens are behind the window, 20 of them in whole blocks.
    assert c.block_ids("a") == ([1, 2, 3, 0, 0, 0, 7, 8, 9, 10],)
    c.release_skipped("a", 30)
    assert c.block_ids("a") == ([1, 2, 3, 0, 0, 0, 7, 8, 9, 10],), "nothing is given back if the prompt is not known"
    assert c.free_order()[:3] == [6, 5, 4]
    end(c, "a")


# Circular buffers.


def test_a_circular_buffer_is_one_block_and_never_shared() -> None:
    c = coordinator(group("full"), group("circular_buffer"))
    assert run(c, "a", 20, 20) == ([1, 2, 3, 4, 5], [6])
    assert run(c, "a", 24, 20) == ([7], [])
    hit = c.find_longest_hit(hashes(c, 20), 19)
    assert (hit.num_tokens, hit.block_ids) == (16, ([1, 2, 3, 4], []))
    assert c.allocate("b", 20, hit=hit) == ([8], [9])
    end(c, "a", "b")


def test_a_buffer_is_taken_with_what_is_loaded() -> None:
    c = coordinator(group("full"), group("circular_buffer"))
    assert c.allocate("a", 20, num_external_tokens=16) == ([6], [])
    assert c.block_ids("a") == ([1, 2, 3, 4, 6], [5])
    end(c, "a")


# Cross attention.


def test_cross_attention_holds_the_encoders_tokens() -> None:
    c = coordinator(group("full"), group("cross_attention", 8), enable_caching=False)
    assert c.allocate("a", 3, num_encoder_tokens=30) == ([1], [2, 3, 4, 5])
    assert c.allocate("a", 5) == ([6], [])
    assert c.blocks_needed("b", 4, num_encoder_tokens=9) == 3
    end(c, "a")
    with pytest.raises(ConfigError, match="enable_caching"):
        coordinator(group("full"), group("cross_attention"))


# Windows that are not shared.


def test_a_window_that_is_computed_anew_is_not_found_and_starts_with_null_blocks() -> None:
    c = coordinator(group("full"), group("sliding_window", sliding_window=5, prefix_cacheable=False))
    run(c, "a", 20, 20)
    hit = c.find_longest_hit(hashes(c, 20), 19)
    assert (hit.num_tokens, hit.block_ids[1]) == (16, [])
    assert c.allocate("b", 20, hit=hit) == ([11], [12, 13])
    assert c.block_ids("b")[1] == [0, 0, 0, 12, 13]
    end(c, "a", "b")


def test_a_window_keeps_what_a_draft_model_may_compute_again() -> None:
    rows = []
    for extra in (0, 4):
        c = coordinator(group("sliding_window", sliding_window=5, extra_retained_tokens=extra))
        c.allocate("a", 20)
        c.release_skipped("a", 20)
        rows.append(c.block_ids("a")[0])
    assert rows == [[0, 0, 0, 0, 5], [0, 0, 0, 4, 5]]


# Recurrent state.


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_before_the_last_are_given_back(mode: str) -> None:
    c = coordinator(group("mamba", mamba_cache_mode=mode, num_speculative_blocks=1))
    assert c.allocate("a", 10) == ([1, 2, 3, 4],), "three blocks of tokens, one for drafts"
    c.release_skipped("a", 9)
    assert c.block_ids("a") == ([0, 0, 3, 4],)
    end(c, "a")


def test_a_hit_needs_the_last_state_only_and_not_in_the_same_step() -> None:
    c = coordinator(group("full"), group("mamba", mamba_cache_mode="all"))
    run(c, "a", 12, 12)
    hit = c.find_longest_hit(hashes(c, 16), 15)
    assert (hit.num_tokens, hit.block_ids) == (12, ([1, 2, 3], [0, 0, 6]))
    digest = c.state_digest()
    assert c.allocate("b", 16, hit=hit) is None, "the state is written while this step runs"
    assert c.state_digest() == digest
    c.new_step()
    assert c.allocate("b", 16, hit=hit) == ([7], [8])
    assert c.block_ids("b") == ([1, 2, 3, 7], [0, 0, 6, 8])
    end(c, "a", "b")


def test_an_aligned_row_has_blocks_only_where_a_step_ends() -> None:
    c = coordinator(group("mamba", mamba_cache_mode="align", num_speculative_blocks=1))
    assert run(c, "a", 8, 17) == ([0, 1, 2],)
    assert run(c, "a", 16, 17, computed_tokens=8, processed_tokens=8) == ([2, 3],), "the block for drafts moves on"
    assert c.block_ids("a") == ([0, 1, 0, 2, 3],)
    run(c, "a", 17, 17, computed_tokens=16, processed_tokens=16)
    # A step writes where drafts were, and the state that the step before started from is not needed any more.
    assert c.block_ids("a") == ([0, 0, 0, 2, 3, 4],)
    assert [(name, group, tokens) for name, group, _, tokens in c.take_state_offers()] == [("a", 0, 8), ("a", 0, 16)]
    end(c, "a")


FINE = (group("full", 8), group("mamba", 16, mamba_cache_mode="align"))


def test_a_hit_inside_blocks_is_copied_before_the_request_writes_to_it() -> None:
    c = coordinator(*FINE, hash_block_tokens=4)
    assert c.has_fine_grained_hits
    # The scheduler ends the step where a resent prompt can go on.
    run(c, "a", 28, 30)
    c.new_step()
    hit = c.find_longest_hit(hashes(c, 30), 29)
    assert hit.num_tokens == 28
    full, state = hit.block_ids
    new = run(c, "b", 30, 30, hit=hit)
    assert new is not None
    copies = c.take_block_copies()
    assert [(number, source) for number, source, _ in copies] == [(0, full[-1]), (1, state[-1])]
    assert c.block_ids("b") == ([*full[:-1], copies[0][2]], [0, copies[1][2]])
    assert [row[0] for row in new] == [copies[0][2], copies[1][2]], "the copy is what is new"
    # Both ends of a copy stay held until it is made, whoever ends before that.
    c.free("a")
    c.free("b")
    assert [c.ref_count(block) for _, *pair in copies for block in pair] == [1, 1, 1, 1]
    for _, *pair in copies:
        c.unpin(pair)
    end(c)


def test_a_running_request_keeps_its_block_and_the_copy_is_found() -> None:
    c = coordinator(*FINE, hash_block_tokens=4)
    run(c, "a", 28, 30)
    state = c.block_ids("a")[1][-1]
    c.new_step()
    run(c, "a", 30, 30, computed_tokens=28, processed_tokens=28)
    (copy,) = c.take_block_copies()
    assert copy[:2] == (1, state)
    assert c.block_ids("a")[1][-1] == state
    assert c.find_longest_hit(hashes(c, 30), 29).block_ids[1] == [0, copy[2]]
    assert c.take_state_offers()[-1] == ("a", 1, copy[2], 28)
    c.unpin(copy[1:])
    end(c, "a")


def test_a_request_that_ends_where_its_prompt_state_is_offers_it() -> None:
    c = coordinator(*FINE, hash_block_tokens=4)
    run(c, "a", 28, 30)
    state = c.block_ids("a")[1][-1]
    assert c.take_final_states("a", 28, is_in_flight=False) == [("a", 1, state, 28)]
    assert c.take_final_states("a", 28, is_in_flight=False) == [], "once"
    run(c, "b", 28, 30)
    assert c.take_final_states("b", 28, is_in_flight=True) == []
    end(c, "a", "b")


def test_a_state_saved_inside_a_step_has_a_block_of_its_own() -> None:
    saved = group("mamba", 16, mamba_cache_mode="align", checkpoint_alignment=4)
    c = coordinator(group("full", 8), saved, hash_block_tokens=4)
    assert run(c, "a", 40, 40) == ([1, 2, 3, 4, 5], [0, 6, 7])
    assert c.checkpoint("a", 1) == (36, 1), (
        "the last length a resent prompt can go on from, in the block before the last"
    )
    c.new_step()
    assert c.find_longest_hit(hashes(c, 40), 39).block_ids == ([1, 2, 3, 4, 5], [0, 0, 6])
    end(c, "a")


def test_a_lookahead_publishes_no_state_that_is_not_there() -> None:
    """A draft model of several modules computes the last tokens again: the state before them is not in the block."""
    c = coordinator(*FINE, hash_block_tokens=4, use_eagle=True, num_prefill_lookahead=3)
    for num_tokens in (24, 26, 28, 30):
        run(c, "a", num_tokens, 32, computed_tokens=num_tokens - 2)
    assert all(c.key_tokens(block) % 16 == 0 for block in c.block_ids("a")[1])
    end(c, "a")


# Lockstep.

CKV = GroupSpec("mla", 8, [LayerSpec("ckv", 64)])
INDEXER = GroupSpec("mla", 32, [LayerSpec("indexer", 8)], kv_shards=1)


def test_a_lockstep_set_is_copied_once() -> None:
    c = coordinator(CKV, INDEXER, group("mamba", 16, mamba_cache_mode="align"), dcp_world_size=4, hash_block_tokens=8)
    assert [s.group_ids for s in c.sets] == [(0, 1), (2,)]
    run(c, "a", 56, 60)
    c.new_step()
    hit = c.find_longest_hit(hashes(c, 60), 59)
    assert (hit.num_tokens, hit.block_ids[0]) == (56, hit.block_ids[1])
    run(c, "b", 60, 60, hit=hit)
    copies = c.take_block_copies()
    assert [number for number, *_ in copies] == [0, 2]
    rows = c.block_ids("b")
    assert rows[0] == rows[1]
    assert rows[0][-1] == copies[0][2]
    for _, *pair in copies:
        c.unpin(pair)
    end(c, "a", "b")


def test_what_one_group_of_a_set_loads_is_cleared_for_none() -> None:
    c = coordinator(CKV, INDEXER, group("full", 8, kv_shards=1), dcp_world_size=4, notes_new_blocks=True)
    new = c.allocate_slots("a", 64, num_external_tokens=64, uncleared_groups=[1])
    assert new == ()
    assert c.block_ids("a")[:2] == ([1, 2], [1, 2])
    assert c.take_new_blocks() == list(range(3, 11)), (
        "the blocks of the set are written by the load, once for all members"
    )
    c.note_unwritten("a", 32)
    assert c.take_new_blocks() == [2, 7, 8, 9, 10]
    assert c.take_new_blocks() == []
    with pytest.raises(ConfigError, match="token 8 is not the first"):
        c.note_unwritten("a", 8)
    end(c, "a")
