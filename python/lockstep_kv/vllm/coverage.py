"""What of a vLLM configuration a coordinator can serve, and the groups it needs for it."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import KVCacheGroupRole, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from lockstep_kv._core import CoordinatorConfig, GroupSpec, LayerSpec
from lockstep_kv.errors import ConfigError, LockstepKVError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

__all__ = ["NotCoveredError", "coordinator_config"]


_KINDS: dict[Any, str] = {
    FullAttentionManager: "full",
    SlidingWindowManager: "sliding_window",
    ChunkedLocalAttentionManager: "chunked_local",
}


class NotCoveredError(LockstepKVError):
    """A feature of this engine is not covered: vLLM's own manager has to run."""


def coordinator_config(
    kv_cache_config: KVCacheConfig,
    *,
    max_model_len: int,
    scheduler_block_size: int,
    hash_block_size: int,
    enable_caching: bool,
    use_eagle: bool,
    num_prefill_lookahead: int,
    max_in_flight_tokens: int | None,
    enable_kv_cache_events: bool,
    dcp_world_size: int,
    pcp_world_size: int,
) -> CoordinatorConfig:
    """Translate what vLLM gives its manager.

    Raises `NotCoveredError` with the reason if a coordinator would not do exactly what vLLM's manager does.
    """
    if not kv_cache_config.kv_cache_groups:
        raise NotCoveredError("the model has no KV cache")
    if pcp_world_size > 1:
        raise NotCoveredError(f"prefill context parallelism over {pcp_world_size} ranks is not covered")
    if num_prefill_lookahead > 1:
        raise NotCoveredError(f"a prefill lookahead of {num_prefill_lookahead} tokens is not covered")
    groups = [_group(group, at, dcp_world_size) for at, group in enumerate(kv_cache_config.kv_cache_groups)]
    _check_classes(kv_cache_config.kv_cache_groups, groups)
    spans = [group.tokens_per_block(dcp_world_size) for group in groups]
    if scheduler_block_size != math.lcm(*spans):
        raise NotCoveredError(
            f"a scheduler block size of {scheduler_block_size} is not covered where blocks span {spans} tokens"
        )
    if any(span % hash_block_size for span in spans):
        raise NotCoveredError(f"block hashes of {hash_block_size} tokens do not divide blocks of {spans} tokens")
    interval = kv_cache_config.prefix_cache_retention_interval
    windows = any(group.sliding_window is not None for group in groups)
    if interval and (interval < 0 or interval % scheduler_block_size or not windows):
        raise NotCoveredError(f"a prefix cache retention interval of {interval} tokens does not fit the model")
    try:
        return CoordinatorConfig(
            groups,
            kv_cache_config.num_blocks,
            dcp_world_size=dcp_world_size,
            enable_caching=enable_caching,
            hash_block_tokens=hash_block_size,
            max_model_len=max_model_len,
            use_eagle=use_eagle,
            enable_events=enable_kv_cache_events,
            max_in_flight_tokens=max_in_flight_tokens,
            retention_interval=interval,
        )
    except ConfigError as error:
        raise NotCoveredError(str(error)) from None


def _group(group: KVCacheGroupSpec, number: int, dcp_world_size: int) -> GroupSpec:
    """The group as the core knows it. MLA groups are `full`: vLLM keeps each for itself."""
    spec = group.kv_cache_spec
    manager = KVCacheSpecRegistry.get_manager_class(spec, group.role)
    inner = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    kind = _KINDS.get(manager)
    special = group.role != KVCacheGroupRole.DEFAULT or group.host_resident
    if kind is None or special or not spec.prefix_cacheable:
        raise NotCoveredError(f"KV cache group {number} of kind {type(inner).__name__} is not covered")
    if getattr(inner, "extra_retained_tokens", 0):
        raise NotCoveredError(f"KV cache group {number} keeps {inner.extra_retained_tokens} tokens behind its window")
    try:
        return GroupSpec(
            kind,
            spec.block_size,
            [LayerSpec(f"{number}", spec.page_size_bytes)],
            kv_shards=dcp_world_size if spec.dcp_sharded else 1,
            sliding_window=inner.sliding_window if kind == "sliding_window" else None,
            attention_chunk_size=inner.attention_chunk_size if kind == "chunked_local" else None,
            is_eagle=group.is_eagle_group,
        )
    except ConfigError as error:
        raise NotCoveredError(f"KV cache group {number}: {error}") from None


def _check_classes(theirs: list[KVCacheGroupSpec], ours: list[GroupSpec]) -> None:
    """Refuse draft marks that would mean something else: vLLM looks up together by spec, we by geometry."""
    for (at, a), (other, b) in itertools.combinations(enumerate(ours), 2):
        same_geometry = _geometry(a) == _geometry(b)
        same_spec = theirs[at].kv_cache_spec == theirs[other].kv_cache_spec
        if same_geometry != same_spec and a.is_eagle != b.is_eagle:
            raise NotCoveredError(f"KV cache groups {at} and {other} of one geometry have different specs")


def _geometry(group: GroupSpec) -> tuple[object, ...]:
    """What makes a coordinator look groups up together."""
    shape = (group.block_size, group.kv_shards, group.layers[0].page_bytes)
    return group.kind, group.sliding_window, group.attention_chunk_size, *shape
