"""How many shards of a sparse indexer's cache there are across the ranks of decode context parallelism.

Two environment variables choose it. The answer is carried by the layer's spec: a block holds the tokens of as many
shards as are left out, so that the indexer's pages and those of the latent cache stay on one block id, one row and one
group of vLLM. vLLM's planner, scheduler, tables and connectors then need not know of it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import vllm.envs
from vllm.v1.kv_cache_interface import MLAAttentionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = [
    "REPLICATE",
    "SHARDS",
    "register_switches",
    "requested_shards",
    "shards_of",
    "shards_of_layer",
    "with_shards",
]

REPLICATE = "VLLM_DCP_REPLICATE_INDEXER_CACHE"
"""0 or 1: every rank holds the whole indexer cache."""
SHARDS = "VLLM_DCP_INDEXER_SHARDS"
"""0 (as the ranks), or a divisor of the ranks: so many distinct shards."""
_RANKS = range(2, 9)


def register_switches() -> None:
    """Tell vLLM of the two variables, so that it does not warn of them and hands them on to its workers."""
    vllm.envs.environment_variables[REPLICATE] = lambda: _number(REPLICATE)
    vllm.envs.environment_variables[SHARDS] = lambda: _number(SHARDS)


def requested_shards() -> int | None:
    """What the variables ask for; None if they ask for nothing.

    Raises `ValueError` for what is no number, and if the two contradict each other.
    """
    replicate, shards = _number(REPLICATE), _number(SHARDS)
    if replicate not in (0, 1):
        raise ValueError(f"{REPLICATE} must be 0 or 1, got {replicate}")
    if shards < 0:
        raise ValueError(f"{SHARDS} must be 0 or a number of shards, got {shards}")
    if replicate and shards not in (0, 1):
        raise ValueError(f"{REPLICATE}=1 means one shard, but {SHARDS}={shards}")
    return 1 if replicate else shards or None


def shards_of_layer(vllm_config: VllmConfig, layer_index: int | None) -> int:
    """How many shards of this layer's indexer cache there are: as many as ranks, unless the variables say less.

    Layers of a draft model, which come behind the model's own, stay as they are. Raises `ValueError` if the number does
    not divide the ranks, and `NotImplementedError` for ranks, or prefill ranks, that are not supported.
    """
    parallel = vllm_config.parallel_config
    ranks: int = parallel.decode_context_parallel_size
    layers = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
    if ranks <= 1 or layer_index is None or layers is None or layer_index >= layers:
        return ranks
    shards = requested_shards() or ranks
    if shards == ranks:
        return ranks
    prefill_ranks = parallel.prefill_context_parallel_size
    if ranks not in _RANKS or prefill_ranks != 1:
        raise NotImplementedError(
            f"{shards} indexer shards need 2 to 8 decode ranks and one prefill rank, got {ranks} and {prefill_ranks}"
        )
    if ranks % shards:
        raise ValueError(f"{SHARDS} must be a positive divisor of the {ranks} decode ranks, got {shards}")
    return shards


def with_shards(spec: MLAAttentionSpec, shards: int, ranks: int) -> MLAAttentionSpec:
    """The spec of a cache of only so many shards: each rank's block holds `ranks / shards` times the tokens."""
    return spec if shards == ranks else replace(spec, tokens_per_state=Fraction(shards, ranks))


def shards_of(spec: KVCacheSpec, ranks: int) -> int:
    """How many shards a layer's spec stands for on so many ranks."""
    if not spec.dcp_sharded:
        return 1
    per_state = spec.tokens_per_state if isinstance(spec, MLAAttentionSpec) else 1
    return int(ranks * per_state) if isinstance(per_state, Fraction) and per_state < 1 else ranks


def _number(name: str) -> int:
    value = os.environ.get(name, "0") or "0"
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
