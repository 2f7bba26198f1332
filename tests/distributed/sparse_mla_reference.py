"""The right answer: the whole sequence at once in one process, dense caches, no pages, no shards, no absorption.

Shares with the ranks only what a layer projects. Tokens are chosen by sorting Python numbers, and attention unpacks
keys and values from the latents, as the formula is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from sparse_mla_model import Model, Projected, index_scores

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Reference", "reference"]


@dataclass(frozen=True)
class Reference:
    """What the model makes of T tokens.

    logits: shape (T, vocab). chosen: the positions each token attends to, best first, then -1; shape (layers, T,
    top_k). ckv, index_key: the records of all tokens, shape (layers, T, record). ties: how often, over layers and
    tokens, the last token chosen and the first one left out had the same score.
    """

    logits: torch.Tensor
    chosen: torch.Tensor
    ckv: torch.Tensor
    index_key: torch.Tensor
    ties: int


@cache
def reference(tokens: tuple[int, ...]) -> Reference:
    """Run the tokens through the model."""
    model = Model()
    shape, count = model.shape, len(tokens)
    chosen = torch.full((shape.layers, count, shape.top_k), -1)
    records: list[Projected] = []
    ties = 0

    def attend(layer: int, projected: Projected) -> torch.Tensor:
        nonlocal ties
        records.append(projected)
        scores = index_scores(projected.index_query, projected.index_weight, projected.index_key).tolist()
        mask = torch.full((count, count), -torch.inf, dtype=torch.float64)
        for at in range(count):
            best = _best_first(scores[at][: at + 1])
            ties += len(best) > shape.top_k and scores[at][best[shape.top_k - 1]] == scores[at][best[shape.top_k]]
            best = best[: shape.top_k]
            chosen[layer, at, : len(best)] = torch.tensor(best)
            mask[at, best] = 0
        latent, rotary = projected.ckv[:, : shape.latent], projected.ckv[:, shape.latent :]
        keys = torch.einsum("tl,hle->the", latent, model.key_up[layer])
        values = torch.einsum("tl,hlv->thv", latent, model.value_up[layer])
        match = torch.einsum("nhe,the->hnt", projected.query_nope, keys)
        match = match + torch.einsum("nhr,tr->hnt", projected.query_rope, rotary)
        return torch.einsum("hnt,thv->nhv", torch.softmax(match * model.scale + mask, dim=-1), values)

    logits = model.forward(torch.tensor(tokens), torch.arange(count), attend)
    ckv = torch.stack([layer.ckv for layer in records])
    return Reference(logits, chosen, ckv, torch.stack([layer.index_key for layer in records]), ties)


def _best_first(scores: Sequence[float]) -> list[int]:
    """Positions by falling score; of equal ones the earlier first."""
    return sorted(range(len(scores)), key=lambda at: (-scores[at], at))
