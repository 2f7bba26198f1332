"""What other parts of vLLM can see of its own `KVCacheManager` and of ours: all of it must be equal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stock_events import comparable

if TYPE_CHECKING:
    from collections.abc import Callable

    from lives import Life
    from vllm.v1.request import Request

__all__ = ["compare", "plain"]


def plain(answer: Any) -> Any:
    """An answer with blocks as ids."""
    if hasattr(answer, "get_block_ids"):
        return answer.get_block_ids()
    if hasattr(answer, "block_id"):
        return answer.block_id
    if isinstance(answer, list | tuple):
        return [plain(item) for item in answer]
    return answer


def compare(life: Life) -> None:
    """Everything that other parts of vLLM can see is equal."""
    theirs, ours = life.theirs, life.ours
    pool, view = theirs.block_pool, ours.block_pool
    assert ours.usage == theirs.usage
    assert view.get_num_free_blocks() == pool.get_num_free_blocks() == view.free_block_queue.num_free_blocks
    assert plain(view.free_block_queue.get_all_free_blocks()) == plain(pool.free_block_queue.get_all_free_blocks())
    for block, other in zip(pool.blocks[1:], view.blocks[1:], strict=True):
        assert (other.ref_cnt, other.block_hash, other.is_null) == (block.ref_cnt, block.block_hash, block.is_null)
        assert other.block_hash_num_tokens == block.block_hash_num_tokens
        extra = pool.cached_block_hashes_by_block.get(block.block_id) or set()
        assert set(view.cached_block_hashes_by_block.get(block.block_id) or ()) == extra
        for key in filter(None, [block.block_hash, *extra]):
            found = pool.cached_block_hash_to_block.get_one_block(key)
            assert view.cached_block_hash_to_block.get_one_block(key).block_id == found.block_id
    for request in life.running:
        life.both(_reader(life, request))
    for request in life.running + life.waiting:
        life.both(_finder(life, request))
    events = [comparable(manager.take_events(), life.config) for manager in (theirs, ours)]
    assert events[1] == events[0]
    # vLLM notes the null block as well after a load that failed.
    life.both(lambda manager: [block_id for block_id in manager.take_new_block_ids() if block_id])
    watched = (theirs.metrics_collector, ours.metrics_collector)
    if watched[0] is not None and watched[1] is not None:
        assert list(watched[1].block_metrics) == list(watched[0].block_metrics)
        for evicted, other in zip(watched[0].drain_events(), watched[1].drain_events(), strict=True):
            assert len(evicted.reuse_gaps_seconds) == len(other.reuse_gaps_seconds)
    ours._core.audit()


def _reader(life: Life, request: Request) -> Callable[[Any], Any]:
    """All that can be read of a running request."""
    name = request.request_id
    nothing: tuple[list[Any], ...] = tuple([] for _ in life.config.groups)

    def read(manager: Any) -> Any:
        views = manager.coordinator.single_type_managers
        return [
            manager.get_block_ids(name),
            manager.get_blocks(name).get_unhashed_block_ids_all_groups(),
            manager.get_block_ids_for_computed_tokens(name, 13),
            manager.estimate_cached_tokens(request),
            # With the cap, because without it vLLM's question changes what the next step saves.
            manager.coordinator.get_num_blocks_to_allocate(
                name, 500, nothing, 70, request.num_computed_tokens, request.num_computed_tokens, 490, True, 300
            ),
            [(len(view.req_to_blocks.get(name, ())), view.num_cached_block.get(name) or 0) for view in views],
            [(view.block_size, view.use_eagle, view.kv_cache_group_id) for view in views],
            [(view.has_positionally_stable_blocks, view.records_new_block_ids) for view in views],
            [view.supports_fine_grained_hash_lookup for view in views if view.kv_cache_spec.prefix_cacheable],
        ]

    return read


def _finder(life: Life, request: Request) -> Callable[[Any], Any]:
    """What lookups past the manager find."""
    limit = min(40, request.num_tokens - 1)
    hybrid = life.config.enable_caching and len(life.config.groups) > 1

    def find(manager: Any) -> Any:
        found = [manager.coordinator.find_longest_cache_hit(request.block_hashes, limit)]
        if hybrid:
            found.append(manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, limit))
            found.append(manager.coordinator.full_attention_group_id)
        return found

    return find
