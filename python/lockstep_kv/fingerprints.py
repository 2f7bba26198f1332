"""Real pages on every rank whose bytes name the content they stand for, to catch a wrong id, shard or offset.

Records are one byte per token and layer: a hash of the token's block content and place, plus a salt of the layer. A
page is written whole, and read back whole through each rank's block table. Needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from lockstep_kv._core import GroupSpec, LayerSpec, plan_layout
from lockstep_kv.block_table import PAD, kernel_block_ids, slot_mapping
from lockstep_kv.errors import ConfigError, LockstepKVError
from lockstep_kv.tensors import CachePool
from lockstep_kv.trace import TRACE_BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from lockstep_kv._core import PrefixHit
    from lockstep_kv.trace import TraceRequest

__all__ = ["FingerprintedRanks", "WrongPageError", "shrunk"]

# Odd constants with well spread bits (the golden ratio, and those of splitmix64).
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_PLACE = np.uint64(0xC2B2AE3D27D4EB4F)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
# Content that no other request shares is numbered from here; hash ids of traces are below.
_PRIVATE = 2**63


class WrongPageError(LockstepKVError):
    """A page does not hold the content that it was found under."""


def shrunk(groups: Sequence[GroupSpec]) -> list[GroupSpec]:
    """The same groups with records of one byte per token and layer."""
    return [
        GroupSpec(
            group.kind,
            group.block_size,
            [LayerSpec(layer.name, group.block_size) for layer in group.layers],
            kv_shards=group.kv_shards,
        )
        for group in groups
    ]


class _Group:
    """One group on all ranks: its pages, and which token of a block each slot of a page holds."""

    def __init__(self, group: GroupSpec, number: int, pools: list[CachePool], kernel_block_size: int) -> None:
        self.number = number
        self.block_size = group.block_size
        self.kernel_block_size = kernel_block_size
        self.shards = group.resolved_kv_shards(len(pools))
        self.num_layers = len(group.layers)
        # The pools' own memory as numpy sees it, per rank: shapes (layers, kernel pages) and (layers, slots). Kernel
        # pages are items of their own, because numpy copies a large item several times faster than its parts.
        pages = [pool.group(number).numpy().reshape(self.num_layers, -1) for pool in pools]
        self.kernel_pages = [view.view(np.dtype((np.void, kernel_block_size))) for view in pages]
        self.slots = pages
        # No two layers of a rank have one salt: there are fewer than 256, and groups start at different ones.
        first = sum(len(other.layers) for other in pools[0].groups[:number])
        self.salt = (np.arange(first, first + self.num_layers) * 37).astype(np.uint8)
        self.token_of_slot = [self._token_of_slot(rank) for rank in range(len(pools))]
        self._check_shards()

    def map(self, positions: NDArray[np.int64], row: list[int], rank: int) -> NDArray[np.int64]:
        """Slots of token positions of a request on a rank."""
        return slot_mapping(
            positions,
            row,
            block_size=self.block_size,
            kernel_block_size=self.kernel_block_size,
            kv_shards=self.shards,
            rank=rank,
        )

    def kernel_row(self, row: list[int]) -> NDArray[np.int64]:
        """The kernel pages of a row of blocks."""
        return kernel_block_ids(row, block_size=self.block_size, kernel_block_size=self.kernel_block_size)

    def pages(self, shard: int, prints: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What the pages of these blocks hold on a shard's ranks, shape (layers, slots)."""
        records = prints.take(self.token_of_slot[shard], axis=1)
        return records.reshape(1, -1) + self.salt[:, None]

    def read(self, rank: int, kernel_row: NDArray[np.int64]) -> NDArray[np.uint8]:
        """What these kernel pages hold on a rank, shape (layers, slots)."""
        return self.kernel_pages[rank].take(kernel_row, axis=1).view(np.uint8)

    def write(self, rank: int, kernel_row: NDArray[np.int64], pages: NDArray[np.uint8]) -> None:
        """Fill these kernel pages on a rank."""
        self.kernel_pages[rank][:, kernel_row] = pages.view(self.kernel_pages[rank].dtype)

    def _token_of_slot(self, rank: int) -> NDArray[np.int64]:
        """For each slot of a page on this rank the token of the block that lies there, from the slot mapping."""
        tokens = np.arange(self.block_size * self.shards)
        slots = self.map(tokens, [1], rank)
        owned = slots != PAD
        token_of_slot = np.full(self.block_size, PAD)
        token_of_slot[slots[owned] - self.block_size] = tokens[owned]
        if owned.sum() != self.block_size or (token_of_slot == PAD).any():
            raise WrongPageError(f"group {self.number}, rank {rank}: the slot mapping does not fill a page")
        return token_of_slot

    def _check_shards(self) -> None:
        """Each token of a block lies on exactly one rank of every run of `shards` ranks, the same in every run."""
        for first in range(0, len(self.token_of_slot), self.shards):
            run = self.token_of_slot[first : first + self.shards]
            tokens = np.sort(np.concatenate(run))
            same = all(np.array_equal(a, b) for a, b in zip(run, self.token_of_slot, strict=False))
            if not same or not np.array_equal(tokens, np.arange(self.block_size * self.shards)):
                raise WrongPageError(
                    f"group {self.number}: the ranks from {first} on do not share out a block's tokens"
                )


class FingerprintedRanks:
    """The pages of all ranks of a decode-context-parallel group, as an observer of a replay.

    groups: shrunk groups whose blocks span 512 tokens, as the trace's do; others raise `ConfigError`.
    num_blocks: blocks, the null block included.
    """

    def __init__(
        self, groups: Sequence[GroupSpec], *, num_blocks: int, dcp_world_size: int, kernel_block_size: int = 64
    ) -> None:
        for number, group in enumerate(groups):
            span = group.tokens_per_block(dcp_world_size)
            if span != TRACE_BLOCK_TOKENS:
                raise ConfigError(
                    f"group {number} spans {span} tokens per block, a trace's blocks {TRACE_BLOCK_TOKENS}"
                )
        layout = plan_layout(groups, dcp_world_size=dcp_world_size, num_blocks=num_blocks, max_model_len=1)
        pools = [CachePool(layout, groups) for _ in range(dcp_world_size)]
        self.bytes_in_all = layout.total_bytes * dcp_world_size
        self.num_ranks = dcp_world_size
        self.num_blocks = num_blocks
        self.pages_written = 0
        self.pages_verified = 0
        self._groups = [_Group(group, at, pools, kernel_block_size) for at, group in enumerate(groups)]
        self._private = _PRIVATE
        self._sampled_rank = 0

    def table_row(self, rank: int, group: int, block_ids: list[int]) -> list[int]:
        """A request's row in a rank's block table. Tests override this to see that a wrong row is caught."""
        del rank, group
        return block_ids

    def hit(self, request: TraceRequest, hit: PrefixHit) -> None:
        """Read every page of a prefix hit on every rank. Raises `WrongPageError` if one holds other content."""
        content = np.array(request.hash_ids[: hit.num_tokens // TRACE_BLOCK_TOKENS], dtype=np.uint64)
        prints = _fingerprints(content)
        # On one rank at a time, one token per block is also looked for where the slot mapping says, without the detour
        # over pages.
        sample = np.arange(len(content)) * TRACE_BLOCK_TOKENS + (content % TRACE_BLOCK_TOKENS).astype(np.int64)
        self._sampled_rank = (self._sampled_rank + 1) % self.num_ranks
        for group, block_ids in zip(self._groups, hit.block_ids, strict=True):
            expected = [group.pages(shard, prints) for shard in range(group.shards)]
            for rank, row, kernel_row in self._rows(group, block_ids):
                self._verify_pages(group, rank, row, kernel_row, expected[rank % group.shards])
                if rank == self._sampled_rank:
                    self._verify_tokens(group, rank, row, prints, sample)
            self.pages_verified += len(content) * group.num_layers * self.num_ranks

    def allocated(self, request: TraceRequest, block_ids: tuple[list[int], ...], num_hit_tokens: int) -> None:
        """Write every page of the request's new blocks on every rank."""
        first = num_hit_tokens // TRACE_BLOCK_TOKENS
        full = request.input_length // TRACE_BLOCK_TOKENS
        num_private = len(block_ids[0]) - full
        private = range(self._private, self._private + num_private)
        self._private += num_private
        content = np.array([*request.hash_ids[first:full], *private], dtype=np.uint64)
        prints = _fingerprints(content)
        for group, row in zip(self._groups, block_ids, strict=True):
            pages = [group.pages(shard, prints) for shard in range(group.shards)]
            for rank, _, kernel_row in self._rows(group, row[first:]):
                group.write(rank, kernel_row, pages[rank % group.shards])
            self.pages_written += len(content) * group.num_layers * self.num_ranks

    def _rows(self, group: _Group, block_ids: list[int]) -> Iterator[tuple[int, list[int], NDArray[np.int64]]]:
        """Each rank with its row of these blocks, as blocks and as kernel pages."""
        kernel_row = group.kernel_row(block_ids)
        for rank in range(self.num_ranks):
            row = self.table_row(rank, group.number, block_ids)
            if row is not block_ids and not all(0 <= block < self.num_blocks for block in row):
                raise WrongPageError(f"group {group.number}, rank {rank}: the row {row} names no block of the pool")
            yield rank, row, kernel_row if row is block_ids else group.kernel_row(row)

    def _verify_pages(
        self,
        group: _Group,
        rank: int,
        row: list[int],
        kernel_row: NDArray[np.int64],
        expected: NDArray[np.uint8],
    ) -> None:
        found = group.read(rank, kernel_row)
        if found.shape == expected.shape and np.array_equal(found.view(np.int64), expected.view(np.int64)):
            return
        where = f"group {group.number}, rank {rank}"
        if found.shape != expected.shape:
            raise WrongPageError(f"{where}: the row {row} has another length than the prefix hit")
        layer, slot = np.argwhere(found != expected)[0].tolist()
        block, slot = divmod(slot, group.block_size)
        token = block * TRACE_BLOCK_TOKENS + int(group.token_of_slot[rank][slot])
        raise WrongPageError(
            f"{where}, layer {layer}, block {row[block]}: token {token} of a prefix hit is not what was written for it"
        )

    def _verify_tokens(
        self, group: _Group, rank: int, row: list[int], prints: NDArray[np.uint8], sample: NDArray[np.int64]
    ) -> None:
        slots = group.map(sample, row, rank)
        owned = np.flatnonzero(slots != PAD)
        expected_owned = (sample % group.shards == rank % group.shards).sum()
        found = group.slots[rank].take(slots[owned], axis=1)
        expected = prints[owned, sample[owned] % TRACE_BLOCK_TOKENS] + group.salt[:, None]
        if len(owned) != expected_owned or not np.array_equal(found, expected):
            raise WrongPageError(
                f"group {group.number}, rank {rank}: the slot mapping of tokens {sample.tolist()} finds other content"
            )


def _fingerprints(content: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """One byte per token of each block, shape (blocks, 512)."""
    mixed = (content * _SPREAD)[:, None] + np.arange(1, TRACE_BLOCK_TOKENS + 1, dtype=np.uint64) * _PLACE
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX
    return (mixed >> np.uint64(56)).astype(np.uint8)
