"""How an indexer of fewer shards than ranks scores: between which ranks candidates are merged and rows are split.

vLLM's scoring is told the number of decode ranks by its callers. Here it is told the number of shards instead; what it
sends then goes to the ranks that hold the other shards, and with one shard it sends no candidates.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_dcp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as scoring
from vllm.model_executor.layers.sparse_attn_indexer import PrefillRowShard
from vllm.model_executor.warmup.jit_warmup_triton_helper import triton_scalar_specialization_rep
from vllm.v1.attention.backends.mla.indexer import (
    BuildPrefillChunkMetadataKernel,
    tp_prefill_row_sharding_supported,
)

from lockstep_kv.vllm.indexer_cache import LockstepIndexerCache
from lockstep_kv.vllm.indexer_metadata import ReplicaPrefill
from lockstep_kv.vllm.replica_groups import query_split_group, shard_group
from lockstep_kv.vllm.shards import shards_of_layer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = [
    "ReplicaRowShard",
    "init_indexer_op",
    "merge_candidates",
    "prefill_warmup_keys",
    "reserve_row_exchange",
    "score",
]

_score = scoring.sparse_attn_indexer
_init_indexer_op = scoring.SparseAttnIndexer.__init__
_merge_candidates = scoring._merge_dcp_topk_global  # noqa: SLF001
_reserve_row_exchange = scoring._reserve_row_shard_exchange_transient  # noqa: SLF001
_prefill_warmup_keys = BuildPrefillChunkMetadataKernel.get_warmup_keys


@functools.wraps(_score)
def score(hidden_states: torch.Tensor, k_cache_prefix: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Score as vLLM does, for the world and the rank of the layer's own cache."""
    cache = get_forward_context().no_compile_layers.get(k_cache_prefix)
    if isinstance(cache, LockstepIndexerCache):
        kwargs |= {"dcp_rank": cache.shard, "dcp_world_size": cache.shards}
    chosen: torch.Tensor = _score(hidden_states, k_cache_prefix, *args, **kwargs)
    return chosen


@functools.wraps(_init_indexer_op)
def init_indexer_op(self: scoring.SparseAttnIndexer, k_cache: Any, *args: Any, **kwargs: Any) -> None:
    """Make vLLM's scoring layer; it keeps the world and the rank of its cache."""
    _init_indexer_op(self, k_cache, *args, **kwargs)
    if isinstance(k_cache, LockstepIndexerCache):
        self.dcp_world_size, self.dcp_rank = k_cache.shards, k_cache.shard


@functools.wraps(_merge_candidates)
def merge_candidates(
    logits: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    dcp_rank: int,
    dcp_world_size: int,
    cp_interleave: int,
    row_starts: torch.Tensor | None = None,
) -> None:
    """Merge each rank's best tokens (rows, topk) with those of the ranks that hold the other shards, in place.

    Local positions become positions in the text; -1 where there are too few.
    """
    if dcp_world_size <= 1:
        return
    if dcp_world_size == get_dcp_group().world_size:
        _merge_candidates(
            logits, topk_indices, topk_tokens, dcp_rank, dcp_world_size, cp_interleave, row_starts=row_starts
        )
        return
    scoring._assert_cutedsl_dcp_merge_supported(logits, topk_indices, topk_tokens)  # noqa: SLF001
    from vllm.model_executor.kernels.attention.dsa import dcp_indexer_cutedsl as kernels  # noqa: PLC0415 - needs CUDA

    packed = torch.empty((*topk_indices.shape, 2), dtype=torch.float32, device=topk_indices.device)
    kernels.pack_dcp_topk_candidates_cutedsl(
        logits, topk_indices, packed, dcp_rank, dcp_world_size, cp_interleave, row_starts
    )
    gathered = shard_group(dcp_world_size).all_gather(packed, dim=1)
    kernels.stable_topk_from_gathered_candidates_cutedsl(gathered, topk_tokens, out=topk_indices)


class ReplicaRowShard(PrefillRowShard):
    """The rows of a prefill that this rank scores, of those that every rank with its shard could score."""

    @classmethod
    def from_metadata(cls, prefill_metadata: Any, num_decode_tokens: int) -> PrefillRowShard | None:
        """Split as vLLM does, among all ranks, unless the rows are split among the copies of a shard."""
        if not isinstance(prefill_metadata, ReplicaPrefill):
            return PrefillRowShard.from_metadata(prefill_metadata, num_decode_tokens)
        return cls(num_decode_tokens, prefill_metadata.row_shard_sizes, query_split_group().rank_in_group)

    def exchange_topk(self, topk_buffer: torch.Tensor, width: int) -> None:
        """Bring together what the copies of the shard have chosen for their rows, in place."""
        # Kept until the end of the call: the copy that the gather queues reads it.
        own = topk_buffer[self.start : self.stop, :width].contiguous()
        rows = slice(self.num_decode_tokens, self.num_decode_tokens + sum(self.sizes))
        topk_buffer[rows, :width] = query_split_group().all_gatherv(own, dim=0, sizes=self.sizes)


@functools.wraps(_reserve_row_exchange)
def reserve_row_exchange(topk_indices_buffer: torch.Tensor, device: torch.device) -> None:
    """Use as much memory while vLLM measures what it needs as the exchange of split rows will."""
    _reserve_row_exchange(topk_indices_buffer, device)
    config = get_current_vllm_config_or_none()
    if config is None:
        return
    parallel = config.parallel_config
    shards = shards_of_layer(config, 0)
    if shards == parallel.decode_context_parallel_size:
        return
    if tp_prefill_row_sharding_supported(config, 1, False, parallel.tensor_parallel_size // shards):
        rows, width = topk_indices_buffer.shape
        torch.empty((2 * rows, width), dtype=topk_indices_buffer.dtype, device=device)


@functools.wraps(_prefill_warmup_keys)
def prefill_warmup_keys(self: BuildPrefillChunkMetadataKernel, vllm_config: VllmConfig) -> list[Any]:
    """What vLLM compiles before the first batch, and the same for the world and the rank of a shard."""
    keys: list[Any] = _prefill_warmup_keys(self, vllm_config)
    shards = shards_of_layer(vllm_config, 0)
    if shards == vllm_config.parallel_config.decode_context_parallel_size:
        return keys
    rank = get_dcp_group().rank_in_group % shards
    own = {"dcp_rank": triton_scalar_specialization_rep(rank), "dcp_world": triton_scalar_specialization_rep(shards)}
    return list(dict.fromkeys([*keys, *(replace(key, **own) for key in keys)]))
