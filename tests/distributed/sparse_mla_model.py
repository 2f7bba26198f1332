"""A tiny sparse-MLA transformer in the manner of DeepSeek-V3.2, with random weights, in float64.

Each layer caches two records per token: a latent with its rotary key (CKV), and the key of the *lightning indexer*,
which scores all past tokens and leaves attention the best `top_k`. How records are stored, and how tokens are chosen
and attended to, is the caller's: `Model.forward` hands each layer's projections to a function.

Shapes: N tokens, H heads, G heads of the indexer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SHAPE", "Model", "Projected", "Shape", "index_scores"]

DTYPE = torch.float64


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    layers: int = 3
    vocab: int = 41
    hidden: int = 24
    heads: int = 3
    nope: int = 6
    rope: int = 4
    latent: int = 8
    value: int = 6
    index_heads: int = 2
    index: int = 6
    mlp: int = 32
    top_k: int = 8

    @property
    def ckv(self) -> int:
        """Numbers in a record of the latent cache."""
        return self.latent + self.rope


SHAPE = Shape()


@dataclass(frozen=True)
class Projected:
    """What one layer makes of N tokens before it attends.

    ckv: records for the latent cache, shape (N, latent + rope), the rotary key last.
    index_key: records for the indexer's cache, shape (N, index).
    query_nope, query_rope: shapes (N, H, nope) and (N, H, rope).
    index_query, index_weight: shapes (N, G, index) and (N, G).
    """

    ckv: torch.Tensor
    index_key: torch.Tensor
    query_nope: torch.Tensor
    query_rope: torch.Tensor
    index_query: torch.Tensor
    index_weight: torch.Tensor


class Model:
    """The weights, the same on every rank for one seed, and what does not depend on where the caches lie."""

    def __init__(self, shape: Shape = SHAPE, seed: int = 20) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*sizes: int, fan: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator, dtype=DTYPE) * (1.5 / math.sqrt(fan))

        s, d = shape, shape.hidden
        self.shape = shape
        self.scale = (s.nope + s.rope) ** -0.5
        self.embedding = random(s.vocab, d, fan=1)
        self.head = random(d, s.vocab, fan=d)
        self.to_ckv = random(s.layers, d, s.ckv, fan=d)
        self.to_query = random(s.layers, d, s.heads * (s.nope + s.rope), fan=d)
        self.key_up = random(s.layers, s.heads, s.latent, s.nope, fan=s.latent)
        self.value_up = random(s.layers, s.heads, s.latent, s.value, fan=s.latent)
        self.to_out = random(s.layers, s.heads * s.value, d, fan=s.heads * s.value)
        self.to_index_key = random(s.layers, d, s.index, fan=d)
        self.to_index_query = random(s.layers, d, s.index_heads * s.index, fan=d)
        self.to_index_weight = random(s.layers, d, s.index_heads, fan=d)
        self.mlp_in = random(s.layers, d, s.mlp, fan=d)
        self.mlp_out = random(s.layers, s.mlp, d, fan=s.mlp)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Callable[[int, Projected], torch.Tensor]
    ) -> torch.Tensor:
        """Run the N tokens at `positions` through all layers.

        tokens, positions: shape (N,). attend: takes a layer and its projections, returns values, shape (N, H, value).

        Returns logits, shape (N, vocab).
        """
        hidden = self.embedding[tokens]
        for layer in range(self.shape.layers):
            values = attend(layer, self.project(layer, _norm(hidden), positions))
            hidden = hidden + values.flatten(1) @ self.to_out[layer]
            hidden = hidden + torch.relu(_norm(hidden) @ self.mlp_in[layer]) @ self.mlp_out[layer]
        return _norm(hidden) @ self.head

    def project(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> Projected:
        """Project normed hidden states, shape (N, hidden)."""
        s = self.shape
        ckv = hidden @ self.to_ckv[layer]
        query = (hidden @ self.to_query[layer]).reshape(-1, s.heads, s.nope + s.rope)
        index_query = (hidden @ self.to_index_query[layer]).reshape(-1, s.index_heads, s.index)
        return Projected(
            ckv=torch.cat([_norm(ckv[:, : s.latent]), _rotate(ckv[:, s.latent :], positions)], dim=-1),
            index_key=self._rotate_some(_norm(hidden @ self.to_index_key[layer]), positions),
            query_nope=query[..., : s.nope],
            query_rope=_rotate(query[..., s.nope :], positions),
            index_query=self._rotate_some(index_query, positions),
            index_weight=hidden @ self.to_index_weight[layer],
        )

    def absorbed_query(self, layer: int, projected: Projected) -> torch.Tensor:
        """Queries that are compared with CKV records as they lie in the cache, shape (N, H, latent + rope)."""
        latent = torch.einsum("nhe,hle->nhl", projected.query_nope, self.key_up[layer])
        return torch.cat([latent, projected.query_rope], dim=-1)

    def values(self, layer: int, latent: torch.Tensor) -> torch.Tensor:
        """Turn attention's sums of latents, shape (N, H, latent), into values, shape (N, H, value)."""
        return torch.einsum("nhl,hlv->nhv", latent, self.value_up[layer])

    def _rotate_some(self, vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first `rope` numbers of each vector."""
        rope = self.shape.rope
        return torch.cat([_rotate(vectors[..., :rope], positions), vectors[..., rope:]], dim=-1)


def index_scores(query: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Score S cached tokens for N queries: the weighted sum over heads of ReLU(query . key).

    query: shape (N, G, index). weight: shape (N, G). keys: shape (S, index).

    Returns scores, shape (N, S). A token that no head likes scores exactly 0, so ties do happen.
    """
    return torch.einsum("ngs,ng->ns", torch.relu(torch.einsum("ngi,si->ngs", query, keys)), weight)


def _norm(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * (vectors.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()


def _rotate(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn pairs of numbers by angles that depend on the position; vectors: shape (N, ..., rope)."""
    half = vectors.shape[-1] // 2
    angle = positions[:, None] * torch.logspace(0, -1, half, dtype=DTYPE)
    angle = angle.reshape(len(positions), *[1] * (vectors.ndim - 2), half)
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()],
        dim=-1,
    )
