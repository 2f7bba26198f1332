"""The load format "tiny": seeded weights with which each token depends on all tokens before it. Needs vLLM.

The weights of vLLM's own format "dummy" lie within a thousandth of zero. A model with them repeats a function of its
last token, whatever is in its caches, so that equal tokens would say nothing about them.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

if TYPE_CHECKING:
    from vllm.config import ModelConfig

__all__ = ["register"]


def fill(name: str, tensor: torch.Tensor) -> None:
    """Overwrite a weight with numbers that depend on its name, of a size that fits its use."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    last = name.rsplit(".", 1)[-1]
    if last == "A":  # a state's decay: negative
        low, high = -1.5, -0.2
    elif last in ("A_log", "dt_bias"):
        low, high = -1.0, 0.5
    elif tensor.ndim < 2:
        low, high = (0.5, 1.5) if last in ("weight", "D") else (-0.1, 0.1)
    else:
        inputs = math.prod(tensor.shape[1:]) if ".conv" in name else tensor.shape[-1]
        high = math.sqrt(3 / inputs)
        low = -high
    tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)


class TinyLoader(DummyModelLoader):  # type: ignore[misc]
    """Fills a model's weights; reads nothing."""

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:  # noqa: ARG002
        """Fill what a checkpoint would hold."""
        weights: dict[str, Any] = model.state_dict()
        for name, tensor in weights.items():
            if tensor.is_floating_point():
                fill(name, tensor)


def register() -> None:
    """Make the format known to vLLM, in this process."""
    register_model_loader("tiny")(TinyLoader)
