"""Random configurations for vLLM's `KVCacheManager`, as vLLM takes them and as a coordinator does. Needs vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec

from lockstep_kv import GroupSpec, LayerSpec

MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Group:
    """One group of a configuration, for both sides."""

    kind: str
    block_size: int
    sharded: bool
    width: int
    is_eagle: bool

    def ours(self, number: int) -> GroupSpec:
        # Only equality of the page size matters here, as it decides which groups vLLM looks up together.
        layer = LayerSpec(f"layer.{number}", self.block_size * self.width)
        shards = None if self.sharded else 1
        return GroupSpec(self.kind, self.block_size, [layer], kv_shards=shards, is_eagle=self.is_eagle)

    def theirs(self, number: int) -> KVCacheGroupSpec:
        cls = MLAAttentionSpec if self.kind == "mla" else FullAttentionSpec
        spec = cls(
            block_size=self.block_size,
            num_kv_heads=1,
            head_size=self.width,
            dtype=torch.float32,
            dcp_sharded=self.sharded,
        )
        return KVCacheGroupSpec([f"layer.{number}"], spec, is_eagle_group=self.is_eagle)


class ZeroedConfig(KVCacheConfig):  # type: ignore[misc]
    """A model whose new blocks are zeroed."""

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        return True


@dataclass(frozen=True)
class Config:
    """A configuration, for both sides."""

    groups: tuple[Group, ...]
    num_blocks: int
    dcp: int
    enable_caching: bool
    use_eagle: bool

    @property
    def spans(self) -> list[int]:
        """Tokens per block of each group."""
        return [group.block_size * (self.dcp if group.sharded else 1) for group in self.groups]

    @property
    def hash_tokens(self) -> int:
        """Tokens per block hash."""
        return math.gcd(*self.spans)

    def arguments(self, *, zeroes: bool = False) -> dict[str, Any]:
        """What a `KVCacheManager` is made with. zeroes: whether workers are told which new blocks to zero."""
        return {
            "kv_cache_config": (ZeroedConfig if zeroes else KVCacheConfig)(
                num_blocks=self.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[group.theirs(at) for at, group in enumerate(self.groups)],
            ),
            "max_model_len": MAX_MODEL_LEN,
            "scheduler_block_size": math.lcm(*self.spans),
            "hash_block_size": self.hash_tokens,
            "enable_caching": self.enable_caching,
            "use_eagle": self.use_eagle,
            "enable_kv_cache_events": True,
            "dcp_world_size": self.dcp,
        }


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Configurations that vLLM and a coordinator serve alike."""
    dcp = draw(st.sampled_from([1, 1, 2, 4]))
    # MLA groups of mixed shards and one span move in lockstep here and not in vLLM, so groups of a configuration are
    # all of one kind, and MLA groups are all sharded. On one rank vLLM can still tell a sharded spec from one that is
    # not, and would not look the two up together; here they are the same geometry.
    kind = draw(st.sampled_from(["full", "mla"]))
    group = st.builds(
        Group,
        kind=st.just(kind),
        block_size=st.sampled_from([2, 4, 8]),
        sharded=st.just(True) if kind == "mla" or dcp == 1 else st.booleans(),
        width=st.sampled_from([8, 16]),
        is_eagle=st.booleans() if draw(st.booleans()) else st.just(False),
    )
    groups = tuple(draw(st.lists(group, min_size=1, max_size=3)))
    return Config(
        groups=groups,
        num_blocks=draw(st.sampled_from([9, 24, 40, 60, 90])),
        dcp=dcp,
        enable_caching=draw(st.sampled_from([True, True, True, False])),
        use_eagle=draw(st.booleans()) or any(group.is_eagle for group in groups),
    )
