"""Where an indexer cache of fewer shards than ranks has its tokens: kernel pages, slots and lengths of one rank.

vLLM gives a layer the tables of its group: block ids that stand for `block_size * ranks` tokens, and slots and lengths
for as many shards as ranks. What is computed here from them stays on their device and waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["PAD", "IndexerTables"]

PAD = -1
"""The slot of a token that this rank does not hold, and of padding."""


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
    def shard(self) -> int:
        """Which shard this rank holds: ranks of one shard are `shards` apart."""
        return self.rank % self.shards

    def kernel_block_table(self, block_table: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The kernel pages of each request: (requests, width) ids become (requests, width * pages_per_block)."""
        pages = self.pages_per_block
        steps = torch.arange(pages, dtype=block_table.dtype, device=block_table.device)
        table = (block_table.unsqueeze(-1) * pages + steps).flatten(1)
        if out is None:
            return table
        out = out[: table.shape[0], : table.shape[1]]
        return out.copy_(table)

    def slots(self, positions: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        """The slots of tokens: (tokens,) positions, and (tokens, width) rows of the blocks of their requests."""
        tokens_per_block = self.kernel_block_size * self.ranks
        blocks = block_ids.gather(1, (positions // tokens_per_block).unsqueeze(1)).squeeze(1).long()
        offset = positions % tokens_per_block
        turn = self.interleave * self.shards
        owner = offset // self.interleave % self.shards
        local = offset // turn * self.interleave + offset % self.interleave
        slots = blocks * (self.kernel_block_size * self.pages_per_block) + local
        return torch.where(owner == self.shard, slots, PAD)

    def slot_mapping(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """The slots of a batch's tokens, in the shape of vLLM's own: (padded tokens,), padding PAD."""
        starts, device = common.query_start_loc, common.seq_lens.device
        count = common.num_actual_tokens
        token = torch.arange(count, device=device)
        request = torch.searchsorted(starts[1:].contiguous(), token, right=True).clamp_(max=common.num_reqs - 1)
        behind = starts[request + 1] - token
        positions = (common.seq_lens[request] - behind).clamp_(min=0).long()
        slots = self.slots(positions, common.block_table_tensor[request])
        mapping = torch.full_like(common.slot_mapping, PAD)
        # Tokens that vLLM has padded have no slot in its mapping either, unless another shard holds them.
        real = token < starts[common.num_reqs]
        mapping[:count] = torch.where(real, slots, PAD).to(mapping.dtype)
        return mapping

    def local_seq_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many of the first `seq_lens` tokens this rank holds."""
        if self.shards == 1:
            return seq_lens
        turn = self.interleave * self.shards
        whole = seq_lens // turn * self.interleave
        rest = (seq_lens % turn - self.shard * self.interleave).clamp(0, self.interleave)
        return whole + rest
