"""vLLM's coordinator and its managers for code that reaches past the manager.

They read the core's coordinator and hold no second copy of its state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.single_type_kv_cache_manager import CrossAttentionManager
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec

from lockstep_kv.errors import UnknownRequestError
from lockstep_kv.vllm.blocks import BlockView

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.request import Request

    from lockstep_kv._core import Coordinator
    from lockstep_kv.vllm.manager import LockstepKVCacheManager
    from lockstep_kv.vllm.pool_view import BlockPoolView

__all__ = ["CoordinatorView", "HybridCoordinatorView", "ManagerView"]

_FINE_GRAINED = ("full", "reference_window", "mamba")
"""Kinds whose hits can end inside a block."""


class _Row(Sequence[BlockView]):
    """The blocks of a request in one group as they are when they are looked at; those it had last once it has ended."""

    def __init__(self, coordinator: Coordinator, pool: BlockPoolView, group: int, request_id: str) -> None:
        self._coordinator = coordinator
        self._pool = pool
        self._group = group
        self._request_id = request_id
        self._last = coordinator.block_ids(request_id)[group]

    def _ids(self) -> list[int]:
        with contextlib.suppress(UnknownRequestError):
            self._last = self._coordinator.block_ids(self._request_id)[self._group]
        return self._last

    def __len__(self) -> int:
        return len(self._ids())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, at: Any) -> Any:
        ids = self._ids()[at]
        return [self._pool.blocks[block_id] for block_id in ids] if isinstance(ids, list) else self._pool.blocks[ids]


class _RowsOfGroup(Mapping[str, _Row]):
    """The blocks of each request in one group."""

    def __init__(self, coordinator: Coordinator, pool: BlockPoolView, group: int) -> None:
        self._coordinator = coordinator
        self._pool = pool
        self._group = group

    def __getitem__(self, request_id: str) -> _Row:
        try:
            return _Row(self._coordinator, self._pool, self._group, request_id)
        except UnknownRequestError:
            raise KeyError(request_id) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._coordinator.request_ids())

    def __len__(self) -> int:
        return self._coordinator.num_requests


class _PublishedOfGroup(Mapping[str, int]):
    """How many leading blocks of each request are published in one group."""

    def __init__(self, coordinator: Coordinator, group: int) -> None:
        self._coordinator = coordinator
        self._group = group

    def __getitem__(self, request_id: str) -> int:
        try:
            return self._coordinator.num_published(request_id)[self._group]
        except UnknownRequestError:
            raise KeyError(request_id) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._coordinator.request_ids())

    def __len__(self) -> int:
        return self._coordinator.num_requests


class _Checkpoints(Mapping[str, tuple[int, int]]):
    """The states that running steps save before their ends: per request the tokens before it and its place."""

    def __init__(self, coordinator: Coordinator, group: int) -> None:
        self._coordinator = coordinator
        self._group = group

    def __getitem__(self, request_id: str) -> tuple[int, int]:
        try:
            found = self._coordinator.checkpoint(request_id, self._group)
        except UnknownRequestError:
            found = None
        if found is None:
            raise KeyError(request_id)
        return found

    def __iter__(self) -> Iterator[str]:
        names = self._coordinator.request_ids()
        return (name for name in names if self._coordinator.checkpoint(name, self._group) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ManagerView:
    """One group. Has the attributes of vLLM's `SingleTypeKVCacheManager` that other parts of vLLM use."""

    retains_longer_hit = False

    def __init__(
        self,
        coordinator: Coordinator,
        pool: BlockPoolView,
        spec: KVCacheSpec,
        group: int,
        scheduler_block_size: int,
        *,
        drops: bool,
        zeroes: bool,
    ) -> None:
        config = coordinator.config
        ours = config.groups[group]
        self.kv_cache_spec = spec
        self.kv_cache_group_id = group
        self.block_pool = pool
        self._null_block = pool.null_block
        self.block_size = ours.tokens_per_block(config.dcp_world_size)
        self.dcp_world_size = config.dcp_world_size if spec.dcp_sharded else 1
        self.pcp_world_size = 1
        self.enable_caching = config.enable_caching
        self.use_eagle = drops
        self._kind = ours.kind
        self._moves_blocks = ours.mamba_cache_mode == "align"
        self._zeroes = zeroes
        self.req_to_blocks = _RowsOfGroup(coordinator, pool, group)
        self.num_cached_block = _PublishedOfGroup(coordinator, group)
        self._checkpoints = _Checkpoints(coordinator, group)
        # Hits across groups are multiples of this.
        is_fine, unit = coordinator.has_fine_grained_hits, coordinator.hash_block_tokens
        self.cache_hit_alignment_tokens = unit if is_fine else scheduler_block_size

    @property
    def supports_fine_grained_hash_lookup(self) -> bool:  # type: ignore[override, unused-ignore]
        """Whether hits can end inside a block."""
        return self._kind in _FINE_GRAINED

    @property
    def has_positionally_stable_blocks(self) -> bool:
        """Whether a block stays at its place: states of mode "align" move inside a row."""
        return not self._moves_blocks

    @property
    def records_new_block_ids(self) -> bool:
        """Whether new blocks are zeroed."""
        return self._zeroes and self._kind not in ("mamba", "circular_buffer")


class CrossAttentionView(ManagerView, CrossAttentionManager):
    """The view of a group of cross attention: vLLM's coordinators ask for this class."""


class CoordinatorView:
    """Has the attributes and methods of vLLM's `KVCacheCoordinator` that other parts of vLLM use."""

    def __init__(
        self,
        manager: LockstepKVCacheManager,
        coordinator: Coordinator,
        kv_cache_config: KVCacheConfig,
        scheduler_block_size: int,
    ) -> None:
        self._manager = manager
        self._coordinator = coordinator
        self.block_pool = manager.block_pool
        self.kv_cache_config = kv_cache_config
        self.scheduler_block_size = scheduler_block_size
        self.hash_block_size = manager.block_pool.hash_block_size
        self.enable_partial_hash_hits = coordinator.has_fine_grained_hits
        self.num_reprefillable_tokens = max(0, coordinator.config.num_prefill_lookahead - 1)
        self.dcp_world_size = coordinator.config.dcp_world_size
        groups = range(len(kv_cache_config.kv_cache_groups))
        self.eagle_group_ids = {group for group in groups if coordinator.config.groups[group].is_eagle}
        if coordinator.config.use_eagle and not self.eagle_group_ids:
            self.eagle_group_ids = set(groups)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        full = (group for group in groups if isinstance(specs[group], FullAttentionSpec))
        self.full_attention_group_id: int | None = next(full, None)
        # Groups of one spec are looked up together, so all of them leave their last block if one is marked.
        found = [group for group in self.eagle_group_ids if specs[group].prefix_cacheable]
        marked = [specs[group] for group in found] if coordinator.config.enable_caching else []
        self.single_type_managers = tuple(
            (CrossAttentionView if isinstance(specs[group], CrossAttentionSpec) else ManagerView)(
                coordinator,
                manager.block_pool,
                specs[group],
                group,
                scheduler_block_size,
                drops=specs[group] in marked,
                zeroes=kv_cache_config.needs_kv_cache_zeroing,
            )
            for group in groups
        )
        self.group_block_sizes = tuple(view.block_size for view in self.single_type_managers)

    @property
    def retention_interval(self) -> int | None:
        """Every how many tokens windows and states keep blocks."""
        return self._coordinator.config.retention_interval

    @retention_interval.setter
    def retention_interval(self, interval: int | None) -> None:
        self._coordinator.set_retention_interval(interval)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[BlockView], ...], int, int]:
        """The blocks of the longest common hit, its tokens, and how many more only some groups have."""
        hit = self._coordinator.find_longest_hit(block_hashes, max_cache_hit_length)
        return self._views(hit.block_ids), hit.num_tokens, hit.num_uncached_tokens

    def find_longest_cache_hit_per_group(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[BlockView], ...], tuple[int, ...]]:
        """What each group would hit by itself: its blocks, and its tokens."""
        found = self._coordinator.find_hit_per_group(block_hashes, max_cache_hit_length)
        return self._views(row for row, _ in found), tuple(tokens for _, tokens in found)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[BlockView], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """How many free blocks the request would take to have slots for `num_tokens` tokens."""
        rows = [[block.block_id for block in row] for row in new_computed_blocks]
        hit = self._coordinator.hit_of(rows, num_local_computed_tokens) if any(rows) else None
        return self._coordinator.blocks_needed(
            request_id,
            num_tokens,
            main_tokens=num_tokens_main_model,
            num_encoder_tokens=num_encoder_tokens,
            hit=hit,
            computed_tokens=total_computed_tokens,
            prefill_end=prefill_end,
            capped=apply_admission_cap,
        )

    def get_blocks(self, request_id: str) -> tuple[list[BlockView], ...]:
        """The request's blocks, one list per group."""
        return self._views(self._manager.get_block_ids(request_id))

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the request's full blocks."""
        self._manager.cache_blocks(request, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """End a request."""
        self._manager.free_by_id(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[BlockView]:
        """End a request and keep its blocks held until `block_pool.free_blocks` gives them back."""
        return self._manager.pop_blocks_by_id(request_id)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that windows and chunks do not need any more."""
        self._manager.remove_skipped_blocks(request_id, processed_computed_tokens, num_prompt_tokens)

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes, if no block is held."""
        done: bool = self.block_pool.reset_prefix_cache()
        return done

    def new_step_starts(self) -> None:
        """Tell that a step begins."""
        self._manager.new_step_starts()

    def _views(self, rows: Any) -> tuple[list[BlockView], ...]:
        blocks = self.block_pool.blocks
        return tuple([blocks[block_id] for block_id in row] for row in rows)


class HybridCoordinatorView(CoordinatorView, HybridKVCacheCoordinator):
    """The view where several groups are cached: vLLM's offloading connector asks for this class."""
