"""Where an indexer cache of fewer shards than ranks has its tokens: kernel pages, slots and lengths of one rank.

vLLM gives a layer the tables of its group: block ids that stand for `block_size * ranks` tokens, and slots and lengths
for as many shards as ranks. What is computed here from them stays on their device and waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep_kv.block_table import PAD, kernel_block_ids, local_seq_lens, slot_mapping

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["IndexerTables"]


@dataclass(frozen=True)
class IndexerTables:
    """The place of a rank among the shards of an indexer cache."""

    kernel_block_size: int
    """Tokens of a kernel's page."""
    ranks: int
    """Decode ranks."""
    shards: int
    """Distinct shards among them."""
    rank: int
    """This rank, among all."""
    interleave: int = 1
    """Tokens side by side on a rank."""

    @property
    def pages_per_block(self) -> int:
        """Kernel pages of one block on this rank."""
        return self.ranks // self.shards

    @property
    def block_size(self) -> int:
        """Tokens of one block on this rank."""
        return self.kernel_block_size * self.pages_per_block

    def kernel_block_table(self, block_table: torch.Tensor) -> torch.Tensor:
        """The kernel pages of each request: (requests, width) ids become (requests, width * pages_per_block)."""
        pages = kernel_block_ids(block_table, block_size=self.block_size, kernel_block_size=self.kernel_block_size)
        return pages.to(block_table.dtype)

    def slots(self, positions: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """The slots of tokens: (tokens,) positions, and (tokens, width) rows of the blocks of their requests."""
        return slot_mapping(
            positions,
            block_ids,
            block_size=self.block_size,
            kernel_block_size=self.kernel_block_size,
            kv_shards=self.shards,
            rank=self.rank,
            interleave=self.interleave,
        )

    def slot_mapping(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """The slots of a batch's tokens, in the shape of vLLM's own: (padded tokens,).

        PAD for padding, and for requests that vLLM makes up to warm up: their rows name the null block only.
        """
        starts, count = common.query_start_loc, common.num_actual_tokens
        token = torch.arange(count, device=common.seq_lens.device)
        request = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=common.num_reqs - 1)
        position = common.seq_lens[request].long() - (starts[request + 1] - token)
        # Tokens behind the last request are padding.
        position = torch.where(token < starts[common.num_reqs], position, PAD)
        mapping = torch.full_like(common.slot_mapping, PAD)
        slots = self.slots(position, common.block_table_tensor[request])
        mapping[:count] = torch.where(slots < self.block_size, PAD, slots)
        return mapping

    def local_seq_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many of the first `seq_lens` tokens this rank holds."""
        held = local_seq_lens(seq_lens, kv_shards=self.shards, rank=self.rank, interleave=self.interleave)
        return held.to(seq_lens.dtype)
