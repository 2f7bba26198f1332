"""One rank of the tiny model: its pages, which tokens it chooses, and its part of attention."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from sparse_mla_model import Model, Projected, index_scores
from sparse_mla_modes import MAX_MODEL_LEN, CacheKind, Mode
from torch.nn.functional import pad

from lockstep_kv.block_table import PAD, kernel_block_ids, table_row, table_width

if TYPE_CHECKING:
    from sparse_mla_scheduler import Plan, Work
    from sparse_mla_wire import Wire

__all__ = ["Rank", "best", "merge_outputs", "row_slices"]

_NAN_BYTE = 0xFF
"""All bytes so make a float64 NaN: a record that is read before it was written turns the logits into NaN."""


class Rank:
    """The caches of one rank, and the forward pass over them."""

    def __init__(self, mode: Mode, rank: int, wire: Wire) -> None:
        self.mode, self.rank, self.wire = mode, rank, wire
        self.model = Model()
        self.cache = mode.pool()
        self.pages = {
            (kind.name, layer): self.cache.kernel_pages(kind.layer(layer), kind.kernel, torch.float64)
            for kind in mode.kinds
            for layer in range(self.model.shape.layers)
        }

    def step(self, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the tokens of all works, N in all, one work after the other.

        Returns logits, shape (N, vocab), and the positions that were chosen, shape (layers, N, top_k).
        """
        if plan.new_blocks:
            self.cache.poison_blocks(plan.new_blocks, pattern=_NAN_BYTE)
        tokens = torch.tensor([token for work in plan.works for token in work.tokens])
        tables = {kind.name: self._table(kind, plan.works) for kind in self.mode.kinds}
        slots = {
            kind.name: torch.cat(
                [
                    kind.slots(work.positions, row, self.rank)
                    for work, row in zip(plan.works, tables[kind.name], strict=True)
                ]
            )
            for kind in self.mode.kinds
        }
        all_chosen: list[torch.Tensor] = []

        def attend(layer: int, projected: Projected) -> torch.Tensor:
            self._write(self.mode.ckv, layer, slots["ckv"], projected.ckv)
            self._write(self.mode.indexer, layer, slots["indexer"], projected.index_key)
            chosen = self._choose(layer, projected, plan, tables["indexer"])
            all_chosen.append(chosen)
            owned = [
                self.mode.ckv.slots(chosen[rows], row, self.rank)
                for rows, row in zip(row_slices(plan), tables["ckv"], strict=True)
            ]
            return self._attend(layer, projected, torch.cat(owned))

        logits = self.model.forward(tokens, torch.cat([work.positions for work in plan.works]), attend)
        return logits, torch.stack(all_chosen)

    def records(self, kind: CacheKind, work: Work, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Read back what this rank holds of the first `count` tokens of a request.

        Returns their positions, shape (held,), and records, shape (layers, held, record).
        """
        row = self._table(kind, [work])[0]
        slots = kind.slots(torch.arange(count), row, self.rank)
        held = (slots != PAD).nonzero()[:, 0]
        layers = range(self.model.shape.layers)
        return held, torch.stack([self._read(kind, layer, slots[held]) for layer in layers])

    def _table(self, kind: CacheKind, works: list[Work]) -> torch.Tensor:
        """The block table of a cache, shape (works, width)."""
        width = table_width(MAX_MODEL_LEN, block_size=kind.block_size, kv_shards=kind.shards)
        return torch.stack([table_row(torch.tensor(work.rows[kind.group]), width=width) for work in works])

    def _write(self, kind: CacheKind, layer: int, slots: torch.Tensor, records: torch.Tensor) -> None:
        """Write the records whose slots are on this rank; slots: shape (N,), records: shape (N, record)."""
        held = slots != PAD
        self.pages[kind.name, layer][slots[held] // kind.kernel, slots[held] % kind.kernel] = records[held]

    def _read(self, kind: CacheKind, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Read records, shape of `slots` and (record,) behind it; of the null block where the slot is `PAD`."""
        at = slots.clamp(min=0)
        return self.pages[kind.name, layer][at // kind.kernel, at % kind.kernel]

    def _choose(self, layer: int, projected: Projected, plan: Plan, table: torch.Tensor) -> torch.Tensor:
        """Choose the tokens to attend to: positions, best first, then -1; shape (N, top_k).

        Each rank finds the best of its own shard. They are the best of all only after the shard group has merged them.
        """
        kind, top_k = self.mode.indexer, self.model.shape.top_k
        parts: list[torch.Tensor] = []
        for work, rows, row in zip(plan.works, row_slices(plan), table, strict=True):
            visible = kind.lengths(work.positions + 1, self.rank)
            held = int(visible[-1])
            ids = kernel_block_ids(row, block_size=kind.block_size, kernel_block_size=kind.kernel)
            keys = self.pages[kind.name, layer][ids[: -(-held // kind.kernel)]].flatten(0, 1)[:held]
            scores = index_scores(projected.index_query[rows], projected.index_weight[rows], keys)
            scores = scores.masked_fill(torch.arange(held) >= visible[:, None], -torch.inf)
            positions = kind.positions(held, self.rank).expand(len(visible), held)
            parts.append(torch.stack(best(scores, positions, top_k), dim=-1))
        own = torch.cat(parts)
        if self.mode.choice == "union":
            return own[..., 1].long()
        if self.mode.choice == "share":
            few = top_k // self.mode.ranks
            return pad(own[:, :few, 1].long(), (0, top_k - few), value=-1)
        gathered = self.wire.gather("candidates", own, kind.shards)
        scores, positions = torch.cat(gathered, dim=1).unbind(-1)
        return best(scores, positions.long(), top_k)[1].long()

    def _attend(self, layer: int, projected: Projected, slots: torch.Tensor) -> torch.Tensor:
        """Attend to the records at these slots, shape (N, top_k), and merge over all ranks.

        Returns values, shape (N, H, value).
        """
        latent = self.model.shape.latent
        records = self._read(self.mode.ckv, layer, slots)
        query = self.model.absorbed_query(layer, projected)
        match = torch.einsum("nhr,nkr->nhk", query, records) * self.model.scale
        match = match.masked_fill((slots == PAD)[:, None], -torch.inf)
        weight = match.logsumexp(dim=-1, keepdim=True)
        share = torch.exp(match - weight.masked_fill(weight.isinf(), 0))
        output = torch.einsum("nhk,nkl->nhl", share, records[..., :latent])
        gathered = self.wire.gather("outputs", torch.cat([output, weight], dim=-1), self.mode.ranks)
        return self.model.values(layer, merge_outputs(torch.stack(gathered)))


def row_slices(plan: Plan) -> list[slice]:
    """Where the tokens of each work are among all tokens of the step."""
    ends = list(accumulate(len(work.tokens) for work in plan.works))
    return [slice(end - len(work.tokens), end) for work, end in zip(plan.works, ends, strict=True)]


def best(scores: torch.Tensor, positions: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the `count` best, of equal ones the earlier positions; a score of -inf is none.

    scores, positions: shape (N, any).

    Returns scores, then -inf, and positions, then -1, both of the scores' dtype and shape (N, count).
    """
    order = positions.argsort(dim=1)
    scores, positions = scores.gather(1, order), positions.gather(1, order)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    positions = positions.gather(1, order).to(scores.dtype).masked_fill(scores.isinf(), -1)
    missing = max(count - scores.shape[1], 0)
    scores = pad(scores[:, :count], (0, missing), value=-torch.inf)
    return scores, pad(positions[:, :count], (0, missing), value=-1)


def merge_outputs(parts: torch.Tensor) -> torch.Tensor:
    """Merge what D ranks found by attending to parts of the tokens.

    parts: shape (D, N, H, latent + 1); the last number is the logarithm of the sum of the exponentials, -inf where the
        rank had no token.

    Returns what attending to all tokens gives, shape (N, H, latent).
    """
    outputs, weights = parts[..., :-1], parts[..., -1:]
    return (torch.softmax(weights, dim=0) * outputs).sum(dim=0)
