"""The cache of a DeepSeek-V3.2 or GLM-5 indexer that has fewer shards than there are ranks: its layer and its backend.

The pages of one block lie one after the other, so that what the planner sees as one long page per block is for the
kernels `ranks / shards` pages of their own size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from lockstep_kv.vllm.indexer_metadata import LockstepIndexerMetadataBuilder
from lockstep_kv.vllm.shards import shards_of_layer, with_shards

if TYPE_CHECKING:
    import torch
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

__all__ = ["LockstepIndexerBackend", "LockstepIndexerCache", "new_indexer_cache"]


class LockstepIndexerBackend(DeepseekV32IndexerBackend):
    """vLLM's indexer, with metadata of an indexer's own shards."""

    @staticmethod
    def get_name() -> str:
        """Name it in vLLM's logs."""
        return "LOCKSTEP_INDEXER"

    @staticmethod
    def get_builder_cls() -> type[LockstepIndexerMetadataBuilder]:
        """Name what makes its metadata."""
        return LockstepIndexerMetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Those where a layer's blocks lie one after the other, with nothing between their pages."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)


class LockstepIndexerCache(DeepseekV32IndexerCache):
    """An indexer's cache of `shards` distinct shards among `ranks` ranks, of which this rank holds `shard`."""

    def __init__(self, head_dim: int, dtype: torch.dtype, prefix: str, cache_config: CacheConfig) -> None:
        super().__init__(head_dim, dtype, prefix, cache_config)
        config = get_current_vllm_config()
        self.ranks: int = config.parallel_config.decode_context_parallel_size
        self.shards: int = shards_of_layer(config, extract_layer_index(prefix))
        self.shard: int = get_dcp_group().rank_in_group % self.shards if self.shards > 1 else 0

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take blocks as the pages that the kernels know.

        (blocks, 1, tokens, bytes) become (blocks * pages, tokens / pages, bytes). Raises `NotImplementedError` if other
        layers' pages lie between the blocks.
        """
        blocks, _, tokens, width = kv_cache.shape
        if kv_cache.stride(0) != tokens * width:
            raise NotImplementedError(
                f"{self.prefix}: {self.shards} indexer shards need blocks one after the other, but with this KV cache "
                f"layout they lie {kv_cache.stride(0)} bytes apart instead of {tokens * width}"
            )
        pages = self.ranks // self.shards
        self.kv_cache = kv_cache.view(blocks * pages, tokens // pages, width)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """The spec of vLLM's cache, for this one's shards."""
        return with_shards(super().get_kv_cache_spec(vllm_config), self.shards, self.ranks)

    def get_attn_backend(self) -> type[LockstepIndexerBackend]:
        """The backend for this cache's shards."""
        return LockstepIndexerBackend


def new_indexer_cache(
    cls: type[DeepseekV32IndexerCache],
    head_dim: int,  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
    prefix: str,
    *_: Any,
    **__: Any,
) -> DeepseekV32IndexerCache:
    """Make a `LockstepIndexerCache` where a plain cache is asked for and its layer has fewer shards than ranks.

    Raises `NotImplementedError` if such a layer has another cache of its own.
    """
    config = get_current_vllm_config()
    shards = shards_of_layer(config, extract_layer_index(prefix))
    if shards == config.parallel_config.decode_context_parallel_size:
        return object.__new__(cls)
    if cls is not DeepseekV32IndexerCache:
        raise NotImplementedError(f"{prefix}: a {cls.__name__} cannot have {shards} shards")
    return object.__new__(LockstepIndexerCache)
