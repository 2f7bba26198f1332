"""A small model with a latent cache and a sparse indexer in each layer, in plain torch, for vLLM's engine. Needs vLLM.

The indexer scores all tokens before a token and chooses the best; attention looks at these only. Each rank of decode
context parallelism attends to the chosen tokens that it holds, and outputs are merged by their log-sum-exp. Heads are
split over the same ranks. Sums are in float64, so that the number of ranks hardly shows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from mixed_mla_caches import IndexerCache, LatentCache, Request
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.models.registry import ModelRegistry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig

__all__ = ["CONFIG", "TOP_K", "register"]

TOP_K = 24
LATENT, INDEX, INDEX_HEADS = 32, 16, 2
CONFIG = {
    "architectures": ["MixedMlaForCausalLM"],
    # One KV head, so that vLLM allows as many decode ranks as heads. Not a type that the CPU's platform takes for MLA.
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}


def weight(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(*shape), requires_grad=False)


def normed(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def best(scores: torch.Tensor, positions: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of each row, of equals the first in the text; what is missing is -inf and -1. Both are (rows, any)."""
    order = positions.argsort(dim=1)
    scores, positions = scores.gather(1, order), positions.gather(1, order)
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    positions = positions.gather(1, order).masked_fill(scores == -math.inf, -1)
    missing = max(count - scores.shape[1], 0)
    scores = torch.nn.functional.pad(scores[:, :count], (0, missing), value=-math.inf)
    return scores, torch.nn.functional.pad(positions[:, :count], (0, missing), value=-1)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """That of every decode rank, in order."""
    group = get_dcp_group()
    whole: torch.Tensor = group.all_gather(tensor.contiguous().flatten(), dim=0)
    return whole.view(group.world_size, *tensor.shape)


class Indexer(torch.nn.Module):
    """Chooses the tokens that a token looks at."""

    def __init__(self, width: int, layer: int, prefix: str) -> None:
        super().__init__()
        self.query, self.key = weight(INDEX_HEADS * INDEX, width), weight(INDEX, width)
        self.cache = IndexerCache(INDEX, layer, f"{prefix}.cache")

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Positions, (tokens, TOP_K)."""
        part = self.cache.part()
        if part is None:
            return torch.full((len(hidden), TOP_K), -1)
        self.cache.write(part, hidden @ self.key.T)
        queries = (hidden @ self.query.T).double().view(-1, INDEX_HEADS, INDEX)
        scores = torch.full((len(hidden), TOP_K), -math.inf, dtype=torch.float64)
        chosen = torch.full((len(hidden), TOP_K), -1)
        for request in part.requests:
            rows = slice(request.first, request.end)
            keys, held = self.cache.read(request)
            found = torch.einsum("thc,kc->thk", queries[rows], keys).relu().sum(1)
            found = found.masked_fill(held > positions[rows, None], -math.inf)
            scores[rows], chosen[rows] = best(found, held.expand(len(found), -1), TOP_K)
        if self.cache.shards > 1 and self.cache.fault != "merge":
            scores, chosen = (self.of_shard_group(gathered(one)) for one in (scores, chosen))
            _, chosen = best(scores, chosen, TOP_K)
        return chosen

    def of_shard_group(self, candidates: torch.Tensor) -> torch.Tensor:
        """Of all ranks' candidates those of the ranks that hold the shards once, side by side."""
        first = self.cache.rank // self.cache.shards * self.cache.shards
        return torch.cat(list(candidates[first : first + self.cache.shards]), dim=1)


class Attention(torch.nn.Module):
    """Attention to the chosen tokens, over vectors that keys and values share."""

    def __init__(self, width: int, heads: int, layer: int, prefix: str) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.latent, self.out = (
            weight(heads * LATENT, width),
            weight(LATENT, width),
            weight(width, heads * LATENT),
        )
        self.indexer = Indexer(width, layer, f"{prefix}.indexer")
        self.cache = LatentCache(LATENT, layer, f"{prefix}.attn")

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        chosen = self.indexer(hidden, positions)
        part = self.cache.part()
        if part is None:
            return torch.zeros_like(hidden)
        self.cache.write(part, hidden @ self.latent.T)
        ranks, rank = self.cache.ranks, self.cache.rank
        own = self.heads // ranks
        mine = slice(rank * own * LATENT, (rank + 1) * own * LATENT)
        queries = (hidden @ self.query[mine].T).view(-1, own, LATENT)
        if ranks > 1:
            # Every rank has its own tokens only, so that it needs all heads' queries.
            queries = torch.cat(list(gathered(queries)), dim=1)
        output = torch.zeros(queries.shape, dtype=torch.float64)
        lse = torch.full(queries.shape[:2], -math.inf, dtype=torch.float64)
        for request in part.requests:
            rows = slice(request.first, request.end)
            output[rows], lse[rows] = self.attend(queries[rows].double(), chosen[rows], request)
        if ranks > 1:
            shares = gathered(lse).softmax(dim=0)
            output = (gathered(output) * shares.unsqueeze(-1)).sum(0)[:, rank * own : (rank + 1) * own]
        mixed = output.flatten(1) @ self.out[:, mine].T.double()
        # Not vLLM's sum over the ranks, which is float32 only on the CPU: on four ranks it left sums that differ from
        # rank to rank in their last bits, and copies of an indexer have to choose the same tokens.
        return (gathered(mixed).sum(0) if ranks > 1 else mixed).float()

    def attend(
        self, queries: torch.Tensor, chosen: torch.Tensor, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp over the chosen tokens that this rank holds; zeros and -inf if it holds none."""
        latents, held = self.cache.read(request)
        # One place more for the tokens that are missing.
        wanted = torch.zeros(len(queries), request.length + 1, dtype=torch.bool)
        wanted.scatter_(1, chosen.where(chosen >= 0, request.length), value=True)
        match = torch.einsum("thc,kc->thk", queries, latents) / math.sqrt(LATENT)
        match = match.masked_fill(~wanted[:, held].unsqueeze(1), -math.inf)
        lse = match.logsumexp(dim=-1)
        shares = (match - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp()
        return torch.einsum("thk,kc->thc", shares, latents), lse


class Layer(torch.nn.Module):
    """Attention and what follows it."""

    def __init__(self, width: int, inner: int, heads: int, layer: int, prefix: str) -> None:
        super().__init__()
        self.attention = Attention(width, heads, layer, prefix)
        self.up, self.down = weight(inner, width), weight(width, inner)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(normed(hidden), positions)
        return hidden + (normed(hidden) @ self.up.T).relu() @ self.down.T


class MixedMlaForCausalLM(torch.nn.Module):
    """The whole model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:  # noqa: ARG002
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.width = width = config.hidden_size
        self.embedding, self.head = weight(config.vocab_size, width), weight(config.vocab_size, width)
        self.layers = torch.nn.ModuleList(
            Layer(width, config.intermediate_size, config.num_attention_heads, at, f"layers.{at}")
            for at in range(config.num_hidden_layers)
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[input_ids]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,  # noqa: ARG002
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        rates = 0.01 ** (torch.arange(self.width // 2) / (self.width // 2))
        angles = positions.unsqueeze(1) * rates
        hidden = normed(hidden) + torch.cat([angles.sin(), angles.cos()], dim=1) / 2
        for layer in self.layers:
            hidden = layer(hidden, positions)
        return normed(hidden)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states @ self.head.T

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:  # noqa: ARG002
        return set()


def register() -> None:
    """Make the model known to vLLM, in this process."""
    ModelRegistry.register_model("MixedMlaForCausalLM", MixedMlaForCausalLM)
