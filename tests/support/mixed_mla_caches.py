"""The two caches of the mixed model as vLLM's engine sees them: latent vectors, and a sparse indexer's. Needs vLLM.

Each is a layer with a spec, a backend and a builder of its own. The latent cache takes its slots and lengths from vLLM,
the indexer's takes them from `IndexerTables`. What is computed from the caches is in `mixed_mla_model`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole
from vllm.v1.kv_cache_layout import KVCacheLayout

from lockstep_kv.block_table import PAD
from lockstep_kv.vllm.indexer_tables import IndexerTables
from lockstep_kv.vllm.shards import shards_of, shards_of_layer, with_shards

__all__ = ["IndexerCache", "LatentCache", "Request", "contents", "go_wrong"]


@dataclass
class Request:
    """One request in one step."""

    first: int
    """Its first token in the batch."""
    end: int
    """Behind its last."""
    length: int
    """Tokens with those of this step."""
    held: int
    """How many of them this rank holds."""
    pages: torch.Tensor
    """The pages that hold them."""


@dataclass
class Part:
    """One cache on one rank in one step."""

    slots: torch.Tensor
    requests: list[Request]


def held_positions(count: int, shard: int, shards: int, interleave: int) -> torch.Tensor:
    """The positions of the first tokens that a shard holds."""
    at = torch.arange(count)
    return (at // interleave * shards + shard) * interleave + at % interleave


def rank_and_interleave(vllm_config: VllmConfig) -> tuple[int, int]:
    parallel = vllm_config.parallel_config
    several = parallel.decode_context_parallel_size > 1
    return get_dcp_group().rank_in_group if several else 0, parallel.cp_kv_cache_interleave_size


class Builder(AttentionMetadataBuilder[Part]):  # type: ignore[misc]
    """Finds the slots of a batch's tokens, and the pages and lengths of its requests."""

    def __init__(self, spec: MLAAttentionSpec, names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(spec, names, vllm_config, device)
        self.ranks: int = vllm_config.parallel_config.decode_context_parallel_size
        self.rank, self.interleave = rank_and_interleave(vllm_config)

    @abc.abstractmethod
    def places(self, common: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots of tokens, pages of requests, lengths of requests on this rank."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Part:  # noqa: ARG002, FBT001, FBT002
        common = common_attn_metadata
        slots, pages, held = self.places(common)
        starts, lengths = common.query_start_loc.tolist(), common.seq_lens.tolist()
        requests = [
            Request(starts[at], starts[at + 1], lengths[at], int(held[at]), pages[at]) for at in range(common.num_reqs)
        ]
        return Part(slots[: common.num_actual_tokens].clone(), requests)


class LatentBuilder(Builder):
    """As vLLM says."""

    def places(self, common: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        held = common.seq_lens if self.ranks == 1 else common.dcp_local_seq_lens
        return common.slot_mapping, common.block_table_tensor, held


class IndexerBuilder(Builder):
    """As our tables say. With as many shards as ranks that is what vLLM says."""

    def places(self, common: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.kv_cache_spec
        shards = shards_of(spec, self.ranks)
        tables = IndexerTables(spec.block_size, self.ranks, shards, self.rank, self.interleave)
        slots = tables.slot_mapping(common)
        held = tables.local_seq_lens(common.seq_lens)
        if shards == self.ranks:
            count = common.num_actual_tokens
            assert torch.equal(slots[:count], common.slot_mapping[:count])
            assert self.ranks == 1 or torch.equal(held, common.dcp_local_seq_lens)
        elif IndexerCache.fault == "slots":
            slots = common.slot_mapping
        return slots, tables.kernel_block_table(common.block_table_tensor), held


class Backend(AttentionBackend):  # type: ignore[misc]
    """Storage only: the model computes."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32]
    builder: ClassVar[type[Builder]]

    @classmethod
    def get_name(cls) -> str:
        return cls.__name__

    @staticmethod
    def get_impl_cls() -> Any:
        raise TypeError("this backend only stores: the model attends itself")

    @classmethod
    def get_builder_cls(cls) -> type[Builder]:
        return cls.builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class LatentBackend(Backend):
    """Of the latent cache."""

    builder = LatentBuilder


class IndexerBackend(Backend):
    """Of the indexer's cache."""

    builder = IndexerBuilder


class Cache(torch.nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """A cache of one vector for each token."""

    backend: ClassVar[type[Backend]]
    role: ClassVar[SparseCacheRole]

    def __init__(self, width: int, layer: int, prefix: str) -> None:
        super().__init__()
        self.width, self.layer, self.prefix = width, layer, prefix
        self.kv_cache = torch.tensor([])
        config = get_current_vllm_config()
        self.block_size: int = config.cache_config.block_size
        self.ranks: int = config.parallel_config.decode_context_parallel_size
        self.rank, self.interleave = rank_and_interleave(config)
        config.compilation_config.static_forward_context[prefix] = self

    @property
    def shards(self) -> int:
        """Distinct shards among the ranks."""
        return self.ranks

    def get_attn_backend(self) -> type[Backend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        """One vector for each token, as MLA's caches have them."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.width,
            dtype=vllm_config.model_config.dtype,
            cache_role=self.role,
        )

    def part(self) -> Part | None:
        """What is cached in a step; None if vLLM only tries the model."""
        found = get_forward_context().attn_metadata
        part: Part | None = None if found is None else found[self.prefix]
        return part

    def write(self, part: Part, vectors: torch.Tensor) -> None:
        """Store the vectors of the tokens that this rank holds."""
        mine = (part.slots != PAD).nonzero().squeeze(1)
        self.kv_cache.view(-1, self.width)[part.slots[mine]] = vectors[mine]

    def read(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """The vectors of a request that this rank holds, and their positions."""
        pages = self.kv_cache.view(-1, self.block_size, self.width)
        needed = request.pages[: -(-request.held // self.block_size)]
        vectors = pages[needed.long()].flatten(0, 1)[: request.held]
        shard = self.rank % self.shards
        return vectors.double(), held_positions(request.held, shard, self.shards, self.interleave)


class LatentCache(Cache):
    """Sharded over all ranks."""

    backend = LatentBackend
    role = SparseCacheRole.SPARSE


class IndexerCache(Cache):
    """Sharded as the switches say."""

    backend = IndexerBackend
    role = SparseCacheRole.INDEXER
    fault: ClassVar[str] = ""
    """What goes wrong on purpose: "slots" (few shards, but vLLM's slots), "merge" (candidates are not merged)."""

    def __init__(self, width: int, layer: int, prefix: str) -> None:
        super().__init__(width, layer, prefix)
        self.count = shards_of_layer(get_current_vllm_config(), layer)

    @property
    def shards(self) -> int:
        return self.count

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MLAAttentionSpec:
        return with_shards(super().get_kv_cache_spec(vllm_config), self.shards, self.ranks)


def go_wrong(worker: Any, fault: str) -> None:  # noqa: ARG001
    """Make a worker err from now on."""
    IndexerCache.fault = fault


def contents(worker: Any) -> dict[str, Any]:
    """All that a worker has in its caches: for each layer (blocks, tokens of a block, width)."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    return {name: layer.kv_cache.squeeze(1).numpy().copy() for name, layer in layers.items()}
