"""What an indexer of fewer shards than ranks is told of a batch: its own pages, slots, lengths, world and rank.

vLLM's builder takes them from the number of decode ranks and from the tables of the whole group. Here it is given
those of the indexer instead, and does the rest: lengths are cut to a rank after speculated tokens are told apart, and
with one shard nothing is cut and nothing is merged, since each rank sees every token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_dcp_group
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerMetadataBuilder,
    DeepseekV32IndexerPrefillMetadata,
    balanced_prefill_row_shard,
    tp_prefill_row_sharding_supported,
)

from lockstep_kv.vllm.indexer_tables import IndexerTables
from lockstep_kv.vllm.shards import shards_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

__all__ = ["LockstepIndexerMetadataBuilder", "ReplicaPrefill"]


@dataclass
class ReplicaPrefill(DeepseekV32IndexerPrefillMetadata):
    """A prefill whose rows are split between the ranks that hold the same shard; `row_shard_sizes` has one of each."""


class LockstepIndexerMetadataBuilder(DeepseekV32IndexerMetadataBuilder):
    """vLLM's builder, for a cache of fewer shards than ranks."""

    def __init__(
        self,
        kv_cache_spec: MLAAttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        *,
        block_table_width: int,
    ) -> None:
        ranks: int = vllm_config.parallel_config.decode_context_parallel_size
        shards = shards_of(kv_cache_spec, ranks)
        width = block_table_width * (ranks // shards)
        page = replace(kv_cache_spec, tokens_per_state=1)
        super().__init__(page, layer_names, vllm_config, device, block_table_width=width)
        rank: int = get_dcp_group().rank_in_group if ranks > 1 else 0
        self.tables = IndexerTables(
            page.block_size, ranks, shards, rank=rank, interleave=self.cp_kv_cache_interleave_size
        )
        # From here on the base class knows of as many ranks as there are shards.
        self.dcp_world_size, self.dcp_rank = shards, rank % shards
        self.dcp_rank_tensor.fill_(self.dcp_rank)
        scheduler = vllm_config.scheduler_config
        # CUDA graphs are captured with the addresses of these.
        self.page_table = torch.zeros(scheduler.max_num_seqs, width, dtype=torch.int32, device=device)
        self.slots = torch.zeros(scheduler.max_num_batched_tokens, dtype=torch.int64, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> DeepseekV32IndexerMetadata:
        """The metadata of a batch; its tables and slots lie in memory that stays."""
        metadata = super().build(common_prefix_len, self._of_shards(common_attn_metadata), fast_build)
        if self.dcp_world_size > 1 and metadata.prefill is not None:
            metadata.prefill = self._split_rows(metadata.prefill, common_attn_metadata, metadata.num_decodes)
        return metadata

    def _of_shards(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch as an indexer of so many ranks as there are shards would see it."""
        rows, columns = common.block_table_tensor.shape
        pages = self.page_table[:rows, : columns * self.tables.pages_per_block]
        pages.copy_(self.tables.kernel_block_table(common.block_table_tensor))
        slots = self.slots[: len(common.slot_mapping)]
        slots.copy_(self.tables.slot_mapping(common))
        # That there are lengths of this rank tells vLLM's builder to cut them and to merge; it computes them itself.
        cut: Any = common.dcp_local_seq_lens if self.dcp_world_size > 1 else None
        return replace(common, block_table_tensor=pages, slot_mapping=slots, dcp_local_seq_lens=cut)

    def _split_rows(
        self, prefill: DeepseekV32IndexerPrefillMetadata, common: CommonAttentionMetadata, num_decodes: int
    ) -> DeepseekV32IndexerPrefillMetadata:
        """Let each copy of a shard score a part of the rows, where vLLM would if every rank had all tokens.

        With one shard vLLM's builder does so itself.
        """
        replicas = self.tp_size // self.dcp_world_size
        if not tp_prefill_row_sharding_supported(self.vllm_config, 1, self.use_pcp, replicas):
            return prefill
        queries = torch.diff(common.query_start_loc_cpu[num_decodes : common.num_reqs + 1])
        lengths = common.seq_lens_cpu_upper_bound[num_decodes : common.num_reqs]
        sizes = balanced_prefill_row_shard(lengths, queries, 1, replicas)
        return prefill if sizes is None else ReplicaPrefill(prefill.chunks, prefill.max_prefill_seq_len, sizes)
