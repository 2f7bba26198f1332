"""Random configurations for vLLM's `KVCacheManager`, as vLLM takes them and as a coordinator does. Needs vLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
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
    extra: int = 0
    """Tokens kept behind a sliding window."""
    replayed: bool = False
    """Whether a sliding window is computed anew for every request."""
    mode: str = "none"
    """Which states are kept."""
    drafts: int = 0
    """Blocks for the states behind drafts."""
    checkpoint: int | None = None
    """At which distances from its start a step can save a state."""

    @property
    def is_cacheable(self) -> bool:
        return not self.replayed and self.kind not in ("circular_buffer", "cross_attention")

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
        spec: Any
        if self.kind == "mamba":
            spec = MambaSpec(
                block_size=self.block_size,
                shapes=((self.width,),),
                dtypes=(torch.float32,),
                mamba_cache_mode=self.mode,
                num_speculative_blocks=self.drafts,
                num_prefill_checkpoint_blocks=int(self.checkpoint is not None),
                prefill_checkpoint_alignment=self.checkpoint,
            )
            return KVCacheGroupSpec([f"layer.{number}"], spec, is_eagle_group=self.is_eagle)
        common: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": 1,
            "head_size": self.width,
            "dtype": torch.float32,
            "dcp_sharded": self.sharded,
        }
        match self.kind:
            case "sliding_window" if self.replayed:
                window = {"sliding_window": self.local, "extra_retained_tokens": self.extra}
                spec = SlidingWindowMLASpec(**common, **window, bounded_replay=True)
            case "sliding_window":
                spec = SlidingWindowSpec(**common, sliding_window=self.local, extra_retained_tokens=self.extra)
            case "reference_window":
                spec = RSWASpec(**common, rswa_window=self.local)
            case "chunked_local":
                spec = ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.local)
            case "circular_buffer":
                spec = CircularBufferSpec(**common)
            case "cross_attention":
                spec = CrossAttentionSpec(**common)
            case "mla":
                spec = MLAAttentionSpec(**common)
            case _:
                spec = FullAttentionSpec(**common)
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
    lookahead: int = 0
    """Tokens behind a prompt's chunk that a draft model reads."""
    finer: int = 1
    """Block hashes are of so many times fewer tokens than the blocks need."""
    shared_prefix: bool = False
    """Whether states are published where a shared prefix ends."""
    prefill_ranks: int = 1

    @property
    def has_states(self) -> bool:
        return any(group.kind == "mamba" for group in self.groups)

    @property
    def spans(self) -> list[int]:
        """Tokens per block of each group."""
        return [group.block_size * (self.dcp if group.sharded else 1) for group in self.groups]

    @property
    def hash_tokens(self) -> int:
        """Tokens per block hash."""
        found = [span for span, group in zip(self.spans, self.groups, strict=True) if group.is_cacheable]
        common = math.gcd(*(found or self.spans))
        return common if len(self.groups) == 1 or common % self.finer else common // self.finer

    @property
    def retention_interval(self) -> int | None:
        """Every how many tokens windows keep blocks."""
        if self.retention is None or any(group.kind in ("sliding_window", "mamba") for group in self.groups):
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
            "num_prefill_lookahead": self.lookahead,
            "enable_mamba_shared_prefix_checkpoint": self.shared_prefix,
            "pcp_world_size": self.prefill_ranks,
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


@st.composite
def all_configs(draw: st.DrawFn) -> Config:
    """Configurations of every kind that vLLM and the plugin serve alike."""
    family = draw(st.sampled_from(["plain", "plain", "states", "states", "states", "odd", "encoder"]))
    if family == "plain":
        config = draw(configs())
        keeps_all = all(group.kind in ("full", "mla") for group in config.groups)
        ranks = draw(st.sampled_from([1, 1, 2])) if keeps_all else 1
        finer = draw(st.sampled_from([1, 1, 2]))
        return replace(config, **draw(_draft_reads(config)), finer=finer, prefill_ranks=ranks)
    if family == "encoder":
        groups = [draw(group_of("full", 1)), Group("cross_attention", draw(st.sampled_from([2, 4])), True, 8, False)]
        return draw(_around(tuple(draw(st.permutations(groups))), 1, caching=[False]))
    dcp = draw(st.sampled_from([1, 1, 1, 2]))
    groups = [draw(group_of(draw(st.sampled_from(["full", "windows", "mla"])), dcp))]
    if family == "odd":
        groups += draw(st.lists(odd_group(dcp), min_size=1, max_size=2))
        return draw(_around(tuple(draw(st.permutations(groups))), dcp))
    groups += draw(st.lists(st.one_of(group_of("full", dcp), odd_group(dcp)), max_size=1))
    mode = draw(st.sampled_from(["align", "align", "align", "all", "none"]))
    block_size = draw(st.sampled_from([8, 16]))
    state = Group(
        kind="mamba",
        block_size=block_size,
        sharded=False,
        width=8,
        is_eagle=False,
        mode=mode,
        drafts=draw(st.sampled_from([0, 0, 1, 2])),
        checkpoint=draw(st.sampled_from([None, 1, 2, 4])) if mode == "align" else None,
    )
    groups += [state] * draw(st.integers(1, 2))
    if draw(st.booleans()):
        # What vLLM brings about by padding: all blocks span the same tokens.
        groups = [replace(group, block_size=block_size) for group in groups if group.kind != "circular_buffer"]
    alone = draw(st.integers(0, 9)) == 0
    config = draw(_around((state,) if alone else tuple(draw(st.permutations(groups))), dcp))
    if mode != "align" and config.enable_caching and len({*config.spans}) > 1:
        # vLLM takes hashes of the least common multiple then, which no block of less tokens has.
        return replace(config, enable_caching=False)
    return config


@st.composite
def odd_group(draw: st.DrawFn, dcp: int) -> Group:
    """A window that is not shared or keeps more than it needs, a reference window, or a buffer."""
    kind = draw(st.sampled_from(["sliding_window", "sliding_window", "reference_window", "circular_buffer"]))
    windowed = kind != "circular_buffer"
    return Group(
        kind=kind,
        block_size=draw(st.sampled_from([2, 4, 8])),
        sharded=dcp == 1 or kind == "reference_window",
        width=8,
        is_eagle=False,
        local=draw(st.sampled_from([1, 3, 5, 9, 30])) if windowed else None,
        extra=draw(st.sampled_from([0, 1, 5])) if kind == "sliding_window" else 0,
        replayed=kind == "sliding_window" and draw(st.booleans()),
    )


@st.composite
def _draft_reads(draw: st.DrawFn, config: Config) -> dict[str, Any]:
    """A draft model of several modules, where its lookahead is not longer than what hits leave it."""
    if not config.use_eagle:
        return {}
    if any(group.mode == "align" for group in config.groups):
        # With more, vLLM publishes states of other tokens than those it names.
        return {"lookahead": draw(st.sampled_from([0, 1]))}
    return {"lookahead": min(draw(st.sampled_from([0, 0, 1, 2, 3])), math.lcm(*config.spans))}


@st.composite
def _around(draw: st.DrawFn, groups: tuple[Group, ...], dcp: int, caching: list[bool] | None = None) -> Config:
    """A configuration with these groups."""
    config = Config(
        groups=groups,
        num_blocks=draw(st.sampled_from([12, 24, 40, 60, 90, 160])),
        dcp=dcp,
        enable_caching=draw(st.sampled_from(caching or [True, True, True, False])),
        use_eagle=draw(st.sampled_from([False, False, True])),
        in_flight=draw(st.sampled_from([None, None, 8, 64])),
        retention=draw(st.sampled_from([None, None, 0, 0, 1, 2])),
        finer=draw(st.sampled_from([1, 1, 2, 4])),
        shared_prefix=draw(st.booleans()),
    )
    return replace(config, **draw(_draft_reads(config)))
