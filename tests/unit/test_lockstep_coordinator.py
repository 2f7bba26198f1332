"""The life of a mixed MLA pair under DCP4: a sharded latent cache and a replicated indexer that share one row.

vLLM-style managers count one reference per group, so there a block held by one request of a pair has two. Here a set
has one row and so one reference per holder: where such a test would say 2, these say 1, and both mean "one request".
"""

from __future__ import annotations

import pytest

from lockstep_kv import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ConfigError,
    Coordinator,
    CoordinatorConfig,
    GroupSpec,
    LayerSpec,
    StaleHitError,
)

CKV = GroupSpec("mla", 64, [LayerSpec("target", 64 * 432)])
INDEXER = GroupSpec("mla", 256, [LayerSpec("indexer", 256 * 132)], kv_shards=1)


def coordinator(num_blocks: int = 5, **options: bool | int) -> Coordinator:
    config = CoordinatorConfig([CKV, INDEXER], num_blocks, dcp_world_size=4, max_model_len=1024, **options)  # type: ignore[arg-type]
    return Coordinator(config)


def hashes(count: int, first: int = 0) -> list[bytes]:
    """Block hashes of one sequence."""
    return [bytes([at]) * 32 for at in range(first, first + count)]


def test_a_pair_shares_ids_hashes_and_eviction_order() -> None:
    c = coordinator()
    assert [(s.group_ids, s.tokens_per_block) for s in c.sets] == [((0, 1), 256)]
    assert c.hash_block_tokens == 256

    first = c.allocate("a", 1024)
    assert first == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert c.num_free_blocks == 0
    assert [c.ref_count(block) for block in range(1, 5)] == [1] * 4
    c.cache("a", hashes(4), 1024)
    for number, digest in enumerate(hashes(4), start=1):
        assert c.lookup(digest) == (number, number)

    c.free("a")
    assert c.num_free_blocks == 4
    assert c.free_order() == [4, 3, 2, 1]

    # The last token is computed again, so at most three of the four blocks are a hit.
    hit = c.find_longest_hit(hashes(4), 1023)
    assert hit.num_tokens == 768
    assert hit.block_ids == ([1, 2, 3], [1, 2, 3])
    assert c.allocate("b", 1024, hit=hit) == ([4], [4])
    assert c.block_ids("b") == first
    assert [c.ref_count(block) for block in range(1, 5)] == [1] * 4
    assert c.lookup(hashes(4)[3]) is None, "taken for the last block, so its old content is gone in both groups"
    c.audit()


def test_taking_the_tail_block_forgets_both_groups_keys() -> None:
    c = coordinator()
    c.allocate("a", 1024)
    c.cache("a", hashes(4), 1024)
    c.free("a")
    assert c.allocate("b", 1) == ([4], [4])
    assert c.lookup(hashes(4)[3]) is None
    assert [c.lookup(digest) for digest in hashes(3)] == [(1, 1), (2, 2), (3, 3)]


def test_external_blocks_are_taken_once_for_the_pair() -> None:
    c = coordinator()
    assert c.allocate("a", 256, num_external_tokens=256) == ([], [])
    assert c.block_ids("a") == ([1], [1])
    assert c.num_free_blocks == 3
    assert c.ref_count(1) == 1


def test_hits_of_all_sets_are_referenced_before_any_block_is_taken() -> None:
    c = coordinator()
    c.allocate("a", 512)
    c.cache("a", hashes(2), 512)
    c.free("a")
    hit = c.find_longest_hit(hashes(2), 511)
    assert c.free_order() == [3, 4, 2, 1]
    assert c.allocate("b", 1024, hit=hit, num_external_tokens=512) == ([2], [2])
    assert c.block_ids("b")[0] == [1, 3, 4, 2]
    c.audit()


def test_a_partial_key_is_replaced_in_both_groups_when_the_block_is_full() -> None:
    # With a draft model the block behind the last common boundary is published too, so a prompt's end inside it is.
    c = coordinator(hash_block_tokens=64, enable_events=True, use_eagle=True)
    fine = hashes(8)
    c.allocate("a", 512)
    c.cache("a", fine, 384, num_prompt_tokens=384)
    assert c.lookup(fine[5]) == (2, 2)
    c.take_events()
    c.cache("a", fine, 512)
    assert c.lookup(fine[5]) is None
    assert c.lookup(fine[7]) == (2, 2)
    assert [(type(e), e.group_id) for e in c.take_events() if not isinstance(e, AllBlocksCleared)] == [
        (BlockRemoved, 0),
        (BlockRemoved, 1),
        (BlockStored, 0),
        (BlockStored, 1),
    ]
    c.audit()


def test_partial_keys_of_a_pair_go_together() -> None:
    c = coordinator(hash_block_tokens=64, enable_events=True)
    c.allocate("a", 512)
    fine = hashes(8)
    c.cache("a", fine, 256, num_prompt_tokens=193)
    assert [c.lookup(digest) for digest in fine[:4]] == [None, None, (1, 1), (1, 1)]
    c.take_events()
    c.evict([1])
    assert [c.lookup(digest) for digest in fine[:4]] == [None] * 4
    gone = [BlockRemoved.__name__, fine[3], 0], [BlockRemoved.__name__, fine[3], 1]
    events = [[type(e).__name__, e.block_hash, e.group_id] for e in c.take_events() if isinstance(e, BlockRemoved)]
    assert events[:2] == list(gone)
    assert len(events) == 4


def test_growth_and_release_in_steps() -> None:
    c = coordinator(num_blocks=6)
    for step in range(1, 5):
        assert c.allocate("a", 256 * step) == ([step], [step])
        c.cache("a", hashes(4), 256 * step)
    assert c.num_free_blocks == 1
    assert {c.ref_count(block) for block in range(1, 5)} == {1}
    c.free("a")
    assert c.num_free_blocks == 5
    assert c.find_longest_hit(hashes(4), 1023).num_tokens == 768


def test_events_name_every_member_group() -> None:
    c = coordinator(enable_events=True)
    c.allocate("a", 512)
    c.cache("a", hashes(2), 256)
    c.cache("a", hashes(2), 512)
    stored = c.take_events()
    assert all(isinstance(event, BlockStored) for event in stored)
    assert [(e.group_id, e.block_hashes, e.parent_block_hash) for e in stored if isinstance(e, BlockStored)] == [
        (0, hashes(1), None),
        (1, hashes(1), None),
        (0, hashes(1, 1), hashes(1)[0]),
        (1, hashes(1, 1), hashes(1)[0]),
    ]
    assert {e.block_tokens for e in stored if isinstance(e, BlockStored)} == {256}
    c.free("a")
    c.allocate("b", 1024)
    removed = c.take_events()
    assert [(e.group_id, e.block_hash) for e in removed if isinstance(e, BlockRemoved)] == [
        (0, hashes(2)[1]),
        (1, hashes(2)[1]),
        (0, hashes(2)[0]),
        (1, hashes(2)[0]),
    ]
    c.free("b")
    assert c.reset_prefix_cache()
    assert [type(event) for event in c.take_events()] == [AllBlocksCleared]


def test_a_draft_model_drops_one_span_of_the_pair() -> None:
    # Marked in one group or in none, the pair drops one block of 256 tokens. As with any several groups in vLLM the
    # lookup may match one block past the limit first: all 1024 tokens match, and 768 remain.
    for eagle in ([False, False], [True, False], [False, True]):
        groups = [
            GroupSpec(spec.kind, spec.block_size, spec.layers, kv_shards=spec.kv_shards, is_eagle=marked)
            for spec, marked in zip([CKV, INDEXER], eagle, strict=True)
        ]
        config = CoordinatorConfig(groups, 9, dcp_world_size=4, max_model_len=2048, use_eagle=True)
        c = Coordinator(config)
        c.allocate("a", 1024)
        c.cache("a", hashes(4), 1024)
        assert c.find_longest_hit(hashes(4), 1023).num_tokens == 768
        assert c.find_longest_hit(hashes(3), 767).num_tokens == 512


def test_refusals_change_nothing_and_reserved_blocks_stay() -> None:
    c = coordinator()
    c.allocate("a", 512)
    before = c.state_digest()
    assert c.allocate("b", 768) is None
    assert c.allocate("b", 512, reserved_blocks=1) is None
    assert c.state_digest() == before
    assert c.allocate("b", 256, reserved_blocks=1) == ([3], [3])
    assert c.stats()["refusals"] == 2


def test_a_hit_goes_stale_with_its_blocks() -> None:
    c = coordinator(num_blocks=6)
    c.allocate("a", 512)
    c.cache("a", hashes(2), 512)
    hit = c.find_longest_hit(hashes(2), 512)
    c.evict([2])
    before = c.state_digest()
    with pytest.raises(StaleHitError, match="block 2"):
        c.allocate("b", 768, hit=hit)
    assert c.state_digest() == before
    other = coordinator(num_blocks=6)
    with pytest.raises(ConfigError, match="another coordinator"):
        other.allocate("b", 768, hit=hit)


def test_an_unrelated_eviction_leaves_a_hit_fresh() -> None:
    c = coordinator(num_blocks=6)
    c.allocate("a", 512)
    c.cache("a", hashes(2), 512)
    c.allocate("b", 256)
    c.cache("b", hashes(1, 9), 256)
    hit = c.find_longest_hit(hashes(2), 512)
    c.evict([3])
    assert c.allocate("c", 768, hit=hit) == ([4], [4])


def test_a_partly_replicated_indexer_moves_in_lockstep_too() -> None:
    groups = [GroupSpec("mla", 64, []), GroupSpec("mla", 128, [], kv_shards=4)]
    c = Coordinator(CoordinatorConfig(groups, 9, dcp_world_size=8, max_model_len=4096))
    assert [(s.group_ids, s.tokens_per_block) for s in c.sets] == [((0, 1), 512)]
    assert c.allocate("a", 513) == ([1, 2], [1, 2])
