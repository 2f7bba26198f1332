"""What of a vLLM configuration a coordinator can serve, and the groups it needs for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    CircularBufferManager,
    CrossAttentionManager,
    FullAttentionManager,
    MambaManager,
    RSWAManager,
    SinkFullAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import KVCacheGroupRole, SinkFullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from lockstep_kv._core import CoordinatorConfig, GroupSpec, LayerSpec
from lockstep_kv.errors import ConfigError, LockstepKVError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

__all__ = ["NotCoveredError", "coordinator_config"]


_KINDS: dict[Any, str] = {
    FullAttentionManager: "full",
    # Sinks are part of the prompt as far as blocks go.
    SinkFullAttentionManager: "full",
    RSWAManager: "reference_window",
    SlidingWindowManager: "sliding_window",
    ChunkedLocalAttentionManager: "chunked_local",
    MambaManager: "mamba",
    CircularBufferManager: "circular_buffer",
    CrossAttentionManager: "cross_attention",
}
_ALL_TOKENS = ("full", "reference_window")


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
    enable_mamba_shared_prefix_checkpoint: bool,
    metrics_collector: object | None,
) -> CoordinatorConfig:
    """Translate what vLLM gives its manager.

    Raises `NotCoveredError` with the reason if a coordinator would not do exactly what vLLM's manager does.
    """
    theirs = kv_cache_config.kv_cache_groups
    if not theirs:
        raise NotCoveredError("the model has no KV cache")
    groups = [_group(group, at, dcp_world_size) for at, group in enumerate(theirs)]
    if pcp_world_size > 1 and enable_caching:
        _check_prefill_ranks(theirs, groups, pcp_world_size)
    interval = kv_cache_config.prefix_cache_retention_interval
    thins_out = any(group.kind in ("sliding_window", "mamba") for group in groups)
    if interval and (interval < 0 or interval % scheduler_block_size or not thins_out):
        raise NotCoveredError(f"a prefix cache retention interval of {interval} tokens does not fit the model")
    if enable_caching:
        _check_sizes([group.tokens_per_block(dcp_world_size) for group in groups], scheduler_block_size)
        if len(groups) == 1 and hash_block_size != scheduler_block_size:
            raise NotCoveredError(f"block hashes of {hash_block_size} tokens for blocks of {scheduler_block_size}")
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
            num_prefill_lookahead=num_prefill_lookahead,
            publishes_shared_prefix=bool(enable_mamba_shared_prefix_checkpoint),
            lookup_classes=_lookup_classes(theirs),
            notes_new_blocks=kv_cache_config.needs_kv_cache_zeroing,
            notes_uses=metrics_collector is not None,
        )
    except ConfigError as error:
        raise NotCoveredError(str(error)) from None


def _group(group: KVCacheGroupSpec, number: int, dcp_world_size: int) -> GroupSpec:
    """The group as the core knows it. MLA groups are `full`: vLLM keeps each for itself."""
    spec = group.kv_cache_spec
    manager = KVCacheSpecRegistry.get_manager_class(spec, group.role)
    inner = spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    kind = _KINDS.get(manager)
    if group.role != KVCacheGroupRole.DEFAULT or group.host_resident:
        raise NotCoveredError(f"KV cache group {number} is one of HiSparse, which is not covered")
    if kind is None:
        raise NotCoveredError(f"KV cache group {number} of kind {type(inner).__name__} is not covered")
    sharded = spec.dcp_sharded and dcp_world_size > 1
    if sharded and kind in ("circular_buffer", "cross_attention"):
        raise NotCoveredError(f"KV cache group {number} of kind {type(inner).__name__} is not covered on several ranks")
    try:
        return GroupSpec(
            kind,
            spec.block_size,
            # vLLM plans the memory, and its specs say which groups are looked up together: the size is not looked at.
            [LayerSpec(f"{number}", 1)],
            kv_shards=dcp_world_size if spec.dcp_sharded and kind != "mamba" else 1,
            is_eagle=group.is_eagle_group,
            **_options(kind, group, inner, number),
        )
    except ConfigError as error:
        raise NotCoveredError(f"KV cache group {number}: {error}") from None


def _options(kind: str, group: KVCacheGroupSpec, inner: Any, number: int) -> dict[str, Any]:
    """What only groups of this kind have."""
    match kind:
        case "sliding_window":
            return {
                "sliding_window": inner.sliding_window,
                "extra_retained_tokens": inner.extra_retained_tokens,
                "prefix_cacheable": group.kv_cache_spec.prefix_cacheable,
            }
        case "reference_window":
            return {"sliding_window": inner.rswa_window}
        case "chunked_local":
            return {"attention_chunk_size": inner.attention_chunk_size}
        case "mamba":
            saves = inner.mamba_cache_mode == "align" and inner.num_prefill_checkpoint_blocks > 0
            return {
                "mamba_cache_mode": inner.mamba_cache_mode,
                "num_speculative_blocks": inner.num_speculative_blocks,
                "checkpoint_alignment": inner.prefill_checkpoint_alignment if saves else None,
            }
    if isinstance(inner, SinkFullAttentionSpec) and (not inner.sink_len or inner.sink_len % inner.block_size):
        raise NotCoveredError(f"KV cache group {number}: sinks of {inner.sink_len} tokens are not whole blocks")
    return {}


def _check_sizes(spans: list[int], scheduler_block_size: int) -> None:
    if scheduler_block_size != math.lcm(*spans):
        raise NotCoveredError(
            f"a scheduler block size of {scheduler_block_size} is not covered where blocks span {spans} tokens"
        )


def _check_prefill_ranks(theirs: list[KVCacheGroupSpec], ours: list[GroupSpec], ranks: int) -> None:
    """Prefill ranks change no block, but vLLM allows them for full attention and replicated draft groups only."""
    for at, (group, spec) in enumerate(zip(theirs, ours, strict=True)):
        replicated = len(ours) > 1 and spec.kind != "mamba" and not group.kv_cache_spec.dcp_sharded
        if spec.kind not in _ALL_TOKENS and not replicated:
            raise NotCoveredError(f"KV cache group {at} is not covered on {ranks} prefill ranks")


def _lookup_classes(groups: list[KVCacheGroupSpec]) -> list[int]:
    """Number the groups by spec: vLLM looks those of one spec up together."""
    specs = [group.kv_cache_spec for group in groups]
    return [specs.index(spec) for spec in specs]
