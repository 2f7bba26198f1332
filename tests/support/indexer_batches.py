"""Specs of the two caches of a sparse MLA model, and batches, as vLLM's planner and builders get them. Needs vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole

from lockstep_kv.vllm import shards

__all__ = ["common", "indexer", "latent"]


def latent(record: int) -> MLAAttentionSpec:
    """The spec of a latent cache of so many bytes a token."""
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, max_tp_shards=1, head_size=record, dtype=torch.uint8)


def indexer(num_shards: int, ranks: int) -> MLAAttentionSpec:
    """The spec of an indexer's cache of so many shards."""
    spec = MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    return shards.with_shards(spec, num_shards, ranks)


def common(table: list[list[int]], seq_lens: list[int], query_lens: list[int], padded: int = 0) -> Any:
    """The metadata of a batch, of which some tokens at the end are padding."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    count = int(starts[-1]) + padded
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(seq_lens),
        num_actual_tokens=count,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.tensor(table, dtype=torch.int32),
        slot_mapping=torch.zeros(count + 2, dtype=torch.int64),
    )
