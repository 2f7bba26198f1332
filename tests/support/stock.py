"""Random configurations for vLLM's `KVCacheManager`, as vLLM takes them and as a coordinator does. Needs vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

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
    local: int | None = None
    """Window or chunk, in tokens."""

    def ours(self, number: int) -> GroupSpec:
        # Only equality of the page size matters here, as it decides which groups vLLM looks up together.
        layer = LayerSpec(f"layer.{number}", self.block_size * self.width)
        shards = None if self.sharded else 1
        return GroupSpec(
            self.kind,
            self.block_size,
            [layer],
            kv_shards=shards,
            sliding_window=self.local if self.kind == "sliding_window" else None,
            attention_chunk_size=self.local if self.kind == "chunked_local" else None,
            is_eagle=self.is_eagle,
        )

    def theirs(self, number: int) -> KVCacheGroupSpec:
        common: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": self.width,
            "dtype": torch.float32,
            "dcp_sharded": self.sharded,
        }
        spec: Any
        if self.kind == "sliding_window":
            spec = SlidingWindowSpec(**common, sliding_window=self.local)
        elif self.kind == "chunked_local":
            spec = ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.local)
        else:
            spec = (MLAAttentionSpec if self.kind == "mla" else FullAttentionSpec)(**common)
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
    in_flight: int | None = None
    retention: int | None = None
    """In multiples of the alignment."""

    @property
    def spans(self) -> list[int]:
        """Tokens per block of each group."""
        return [group.block_size * (self.dcp if group.sharded else 1) for group in self.groups]

    @property
    def hash_tokens(self) -> int:
        """Tokens per block hash."""
        return math.gcd(*self.spans)

    @property
    def retention_interval(self) -> int | None:
        """Every how many tokens windows keep blocks."""
        if self.retention is None or any(group.kind == "sliding_window" for group in self.groups):
            return None if self.retention is None else self.retention * math.lcm(*self.spans)
        return 0

    def arguments(self, *, zeroes: bool = False) -> dict[str, Any]:
        """What a `KVCacheManager` is made with. zeroes: whether workers are told which new blocks to zero."""
        return {
            "kv_cache_config": (ZeroedConfig if zeroes else KVCacheConfig)(
                num_blocks=self.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[group.theirs(at) for at, group in enumerate(self.groups)],
                prefix_cache_retention_interval=self.retention_interval,
            ),
            "max_model_len": MAX_MODEL_LEN,
            "scheduler_block_size": math.lcm(*self.spans),
            "hash_block_size": self.hash_tokens,
            "enable_caching": self.enable_caching,
            "use_eagle": self.use_eagle,
            "enable_kv_cache_events": True,
            "dcp_world_size": self.dcp,
            "max_in_flight_tokens": self.in_flight,
        }


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Configurations that vLLM and a coordinator serve alike."""
    dcp = draw(st.sampled_from([1, 1, 2, 4]))
    # MLA groups of mixed shards and one span move in lockstep here and not in vLLM, so groups of a configuration are
    # all of one kind, and MLA groups are all sharded. On one rank vLLM can still tell a sharded spec from one that is
    # not, and would not look the two up together; here they are the same geometry.
    kind = draw(st.sampled_from(["full", "mla", "windows", "windows", "chunks"]))
    if kind == "chunks":
        groups = draw(chunked_groups())
        dcp = 1
    else:
        groups = tuple(draw(st.lists(group_of(kind, dcp), min_size=1, max_size=3)))
    if kind != "chunks" and draw(st.booleans()):
        groups = tuple(replace(group, is_eagle=draw(st.booleans())) for group in groups)
    return Config(
        groups=groups,
        num_blocks=draw(st.sampled_from([9, 24, 40, 60, 90])),
        dcp=dcp,
        enable_caching=draw(st.sampled_from([True, True, True, False])),
        use_eagle=kind != "chunks" and (draw(st.booleans()) or any(group.is_eagle for group in groups)),
        in_flight=draw(st.sampled_from([None, None, 8, 64])),
        retention=draw(st.sampled_from([None, None, 0, 0, 1, 2])),
    )


@st.composite
def group_of(draw: st.DrawFn, kind: str, dcp: int) -> Group:
    """A group of full attention or MLA, or of either full attention or a window, which is the same on every rank."""
    if kind == "windows":
        kind = draw(st.sampled_from(["full", "sliding_window", "sliding_window"]))
    window = kind == "sliding_window"
    return Group(
        kind=kind,
        block_size=draw(st.sampled_from([2, 4, 8])),
        sharded=dcp == 1 or (not window and (kind == "mla" or draw(st.booleans()))),
        width=draw(st.sampled_from([8, 16])),
        is_eagle=False,
        local=draw(st.sampled_from([1, 3, 4, 5, 9, 16, 30])) if window else None,
    )


@st.composite
def chunked_groups(draw: st.DrawFn) -> tuple[Group, ...]:
    """Groups of chunks, alone or with full attention. vLLM wants blocks of one size then."""
    block_size = draw(st.sampled_from([2, 4, 8]))
    common: dict[str, Any] = {"block_size": block_size, "sharded": True, "width": 8, "is_eagle": False}
    full = Group(kind="full", **common)
    chunks = [
        Group(kind="chunked_local", local=block_size * draw(st.sampled_from([1, 2, 3, 8])), **common)
        for _ in range(draw(st.integers(1, 2)))
    ]
    return (*([full] if draw(st.booleans()) else []), *chunks)
