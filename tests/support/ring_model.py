"""A Llama whose first layer also keeps a circular buffer, for vLLM's engine. Needs vLLM.

vLLM 0.32 has circular buffers in models for GPUs only (DeepSeek-V4.1, Qwen4-Exp, GLM-5.3): there they hold the tokens
of a group that is not yet compressed. Here each token of a group adds the token before it from there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = ["register"]

GROUP = 8
"""Tokens of a group, which is what a buffer holds."""


@dataclass
class RingMetadata:
    """Of one step."""

    starts: list[int]
    """Where each request's tokens begin, and the end of the last."""
    computed: list[int]
    """Each request's tokens before this step."""
    blocks: list[int]
    """Each request's block."""


class RingBuilder(AttentionMetadataBuilder[RingMetadata]):  # type: ignore[misc]
    """Reads the block table of the buffers."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> RingMetadata:  # noqa: ARG002, FBT001, FBT002
        """Look up the block of each request."""
        common = common_attn_metadata
        starts = common.query_start_loc.tolist()
        counts = [end - first for first, end in itertools.pairwise(starts)]
        computed = [end - count for end, count in zip(common.seq_lens.tolist(), counts, strict=False)]
        return RingMetadata(starts, computed, common.block_table_tensor[:, 0].tolist())


class RingBackend(AttentionBackend):  # type: ignore[misc]
    """Storage only."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "RING"

    @staticmethod
    def get_impl_cls() -> Any:
        raise TypeError("this backend only stores: the model reads the ring itself")

    @staticmethod
    def get_builder_cls() -> type[RingBuilder]:
        return RingBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class Ring(torch.nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """The buffer, one block for each request."""

    def __init__(self, width: int, prefix: str) -> None:
        super().__init__()
        self.width, self.prefix = width, prefix
        self.kv_cache = torch.tensor([])
        config = get_current_vllm_config()
        self.dtype = config.model_config.dtype
        config.compilation_config.static_forward_context[prefix] = self

    def get_attn_backend(self) -> type[RingBackend]:
        return RingBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> CircularBufferSpec:
        """One vector for each token of a group, in a block of the size of the attention's."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        shape = {"num_kv_heads": model.get_num_kv_heads(parallel), "head_size": model.get_head_size()}
        attention = FullAttentionSpec(block_size=vllm_config.cache_config.block_size, dtype=self.dtype, **shape)
        vectors = {"num_kv_heads": 1, "head_size": self.width, "head_size_v": 0, "dtype": self.dtype}
        return CircularBufferSpec(block_size=GROUP, page_size_padded=attention.page_size_bytes, **vectors)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add the vector of the token before it in its group to each token's; buffer the last ones."""
        found = get_forward_context().attn_metadata
        if found is None:
            return hidden
        step: RingMetadata = found[self.prefix]
        out = hidden.clone()
        for at, (first, end) in enumerate(itertools.pairwise(step.starts)):
            ring = self.kv_cache[step.blocks[at]].view(GROUP, self.width)
            for token in range(first, end):
                place = (step.computed[at] + token - first) % GROUP
                if place:
                    out[token] += ring[place - 1]
                ring[place] = hidden[token]
        return out


class RingLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """A decoder layer, the first one with a buffer before it."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "", **more: Any) -> None:
        super().__init__(vllm_config, prefix, **more)
        width = vllm_config.model_config.hf_config.hidden_size
        self.ring = Ring(width, f"{prefix}.ring") if prefix.endswith(".0") else None

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = hidden_states if self.ring is None else self.ring(hidden_states)
        out: tuple[torch.Tensor, torch.Tensor] = super().forward(positions, mixed, residual)
        return out


class RingForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """The whole model."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=RingLayer)


def register() -> None:
    """Make the model known to vLLM, in this process."""
    ModelRegistry.register_model("RingForCausalLM", RingForCausalLM)
