"""The ways to hold the two caches of the tiny model on the ranks of a DCP group, as groups for the allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from sparse_mla_model import SHAPE

from lockstep_kv import CoordinatorConfig, GroupSpec, LayerSpec, plan_layout
from lockstep_kv.block_table import global_positions, local_seq_lens, slot_mapping
from lockstep_kv.tensors import CachePool

if TYPE_CHECKING:
    from lockstep_kv import Layout

__all__ = ["MAX_MODEL_LEN", "MODES", "NUM_BLOCKS", "SPAN", "CacheKind", "Mode"]

SPAN = 16
"""Tokens of one block id over all ranks, in every mode: so all modes of one pool size run the same schedule."""

NUM_BLOCKS = 11
MAX_MODEL_LEN = 112

_NUMBER_BYTES = 8


@dataclass(frozen=True)
class CacheKind:
    """One of the two caches that every layer has.

    group: its group's number. record: float64 numbers per token. block_size, shards, interleave, kernel: as in
    `lockstep_kv.block_table`.
    """

    name: str
    group: int
    record: int
    block_size: int
    shards: int
    interleave: int
    kernel: int

    def layer(self, layer: int) -> str:
        return f"layers.{layer}.{self.name}"

    def slots(self, positions: torch.Tensor, row: torch.Tensor, rank: int) -> torch.Tensor:
        """Slots of the tokens at `positions` (any shape) of a request with this row of a block table."""
        return slot_mapping(
            positions,
            row,
            block_size=self.block_size,
            kernel_block_size=self.kernel,
            kv_shards=self.shards,
            rank=rank,
            interleave=self.interleave,
        )

    def lengths(self, lengths: torch.Tensor, rank: int) -> torch.Tensor:
        """How many of the first `lengths` tokens the rank stores."""
        return local_seq_lens(lengths, kv_shards=self.shards, rank=rank, interleave=self.interleave)

    def positions(self, count: int, rank: int) -> torch.Tensor:
        """Positions of the first `count` tokens that the rank stores, shape (count,)."""
        return global_positions(torch.arange(count), kv_shards=self.shards, rank=rank, interleave=self.interleave)


@dataclass(frozen=True)
class Mode:
    """One way to hold the caches.

    ranks: D. index_shards: distinct shards of the indexer's cache. interleave: consecutive tokens of the latent cache
    on one rank. apart: the sharded indexer as a group, and so a set, of its own, instead of in the latents' group.
    choice: "merged" is right; the others show what goes wrong: "union" attends to the best `top_k` of every shard,
    "share" to the best `top_k / D` of every shard.
    """

    ranks: int
    index_shards: int
    interleave: int = 1
    apart: bool = False
    choice: Literal["merged", "union", "share"] = "merged"

    @property
    def name(self) -> str:
        held = {1: "replicated", self.ranks: "sharded"}.get(self.index_shards, "partial")
        extras = ["apart"] * self.apart + [self.choice] * (self.choice != "merged")
        return "-".join([f"D{self.ranks}", held, f"i{self.interleave}", *extras])

    @property
    def joined(self) -> bool:
        """The indexer's layers are in the group of the latents: equal shards need no group of their own."""
        return self.index_shards == self.ranks and not self.apart

    @property
    def num_blocks(self) -> int:
        """Blocks for the same number of tokens in every mode, and the null block. Two sets take two ids per span."""
        return (NUM_BLOCKS - 1) * (1 + self.apart) + 1

    @property
    def ckv(self) -> CacheKind:
        block_size = SPAN // self.ranks
        # Pages of two sets lie block by block, and kernels then take them whole.
        kernel = block_size if self.apart else 4
        return CacheKind("ckv", 0, SHAPE.ckv, block_size, self.ranks, self.interleave, kernel)

    @property
    def indexer(self) -> CacheKind:
        block_size = SPAN // self.index_shards
        kernel = block_size if self.apart else 4
        return CacheKind("indexer", 0 if self.joined else 1, SHAPE.index, block_size, self.index_shards, 1, kernel)

    @property
    def kinds(self) -> tuple[CacheKind, CacheKind]:
        return self.ckv, self.indexer

    def groups(self) -> list[GroupSpec]:
        def layers(kind: CacheKind) -> list[LayerSpec]:
            page = kind.block_size * kind.record * _NUMBER_BYTES
            return [LayerSpec(kind.layer(layer), page) for layer in range(SHAPE.layers)]

        ckv, indexer = self.kinds
        if self.joined:
            return [GroupSpec("mla", ckv.block_size, layers(ckv) + layers(indexer), kv_shards=ckv.shards)]
        return [GroupSpec("mla", kind.block_size, layers(kind), kv_shards=kind.shards) for kind in self.kinds]

    def layout(self) -> Layout:
        return plan_layout(
            self.groups(), dcp_world_size=self.ranks, num_blocks=self.num_blocks, max_model_len=MAX_MODEL_LEN
        )

    def pool(self) -> CachePool:
        return CachePool(self.layout(), self.groups())

    def config(self) -> CoordinatorConfig:
        return CoordinatorConfig(self.groups(), self.num_blocks, dcp_world_size=self.ranks, max_model_len=MAX_MODEL_LEN)


MODES = {
    2: [Mode(2, 2), Mode(2, 2, interleave=4), Mode(2, 1), Mode(2, 1, interleave=2)],
    4: [
        Mode(4, 4),
        Mode(4, 2),
        Mode(4, 1),
        Mode(4, 4, interleave=4),
        Mode(4, 2, interleave=2),
        Mode(4, 1, interleave=4),
        Mode(4, 4, apart=True),
        Mode(4, 4, choice="union"),
        Mode(4, 4, choice="share"),
    ],
}
"""What the processes of each world run, one after the other."""
