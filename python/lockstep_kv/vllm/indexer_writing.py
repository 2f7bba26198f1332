"""How the keys of an indexer of fewer shards than ranks get into its cache, in vLLM's fused layer.

The layer writes both caches in one kernel. That kernel skips a token whose latent vector another rank holds, and takes
the slots of the group for both. An indexer with shards of its own has slots of its own, also for tokens whose latent
vector is elsewhere, so that its keys are written in a launch of their own.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.forward_context import get_forward_context
from vllm.models.deepseek_v32 import attention

from lockstep_kv.vllm.indexer_cache import LockstepIndexerCache

if TYPE_CHECKING:
    import torch

__all__ = ["forward", "write_keys_apart"]

_forward = attention.DeepseekV32Attention.forward
_write = attention.fused_norm_rope
_LATENT = ("mla_kv_cache", "mla_kv_cache_dtype", "mla_k_scale", "q_c_out", "kv_c_out", "k_pe_out")
"""What only the latent cache's half of the kernel needs."""


@functools.wraps(_forward)
def forward(self: attention.DeepseekV32Attention, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
    """Attend as vLLM does; the indexer's slots are those of its metadata."""
    cache = None if self.indexer is None else self.indexer.k_cache
    context = get_forward_context()
    # There is no metadata while vLLM measures what it needs.
    if isinstance(cache, LockstepIndexerCache) and isinstance(context.attn_metadata, dict):
        context.slot_mapping[cache.prefix] = context.attn_metadata[cache.prefix].slot_mapping
    attended: torch.Tensor = _forward(self, positions, hidden_states)
    return attended


@functools.wraps(_write)
def write_keys_apart(
    *args: Any,
    slot_mapping: torch.Tensor | None = None,
    indexer_slot_mapping: torch.Tensor | None = None,
    indexer_k_cache: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Norm, rotate and write as vLLM does, in two launches if the indexer has slots of its own.

    Returns the normed queries.
    """
    together = indexer_k_cache is None or indexer_slot_mapping is None or indexer_slot_mapping is slot_mapping
    queries: torch.Tensor = _write(
        *args,
        slot_mapping=slot_mapping,
        indexer_slot_mapping=indexer_slot_mapping,
        indexer_k_cache=indexer_k_cache if together else None,
        **kwargs,
    )
    if not together:
        _write(
            *args,
            slot_mapping=indexer_slot_mapping,
            indexer_slot_mapping=indexer_slot_mapping,
            indexer_k_cache=indexer_k_cache,
            **{name: value for name, value in kwargs.items() if name not in _LATENT},
        )
    return queries
