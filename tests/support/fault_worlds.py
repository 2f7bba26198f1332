"""Small worlds in which the faults of other block managers are played through, and the checks at their ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from lockstep_kv import Coordinator, CoordinatorConfig, GroupSpec, LayerSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "block_hashes",
    "check_all_given_back",
    "coordinator",
    "free_but_for",
    "full",
    "manager",
    "request",
    "state",
    "unchanged",
    "window",
]

MAX_MODEL_LEN = 64


class _Digested(Protocol):
    def state_digest(self) -> int: ...
    def audit(self) -> None: ...


def full(block_size: int, *, is_eagle: bool = False) -> GroupSpec:
    """Full attention."""
    return GroupSpec("full", block_size, [LayerSpec(f"full {block_size}", block_size)], is_eagle=is_eagle)


def window(block_size: int, tokens: int) -> GroupSpec:
    """A sliding window of so many tokens, the current one included."""
    layer = LayerSpec(f"window {block_size} {tokens}", block_size)
    return GroupSpec("sliding_window", block_size, [layer], sliding_window=tokens)


def state(block_size: int, mode: str, *, drafts: int = 0) -> GroupSpec:
    """Recurrent state, one per so many tokens."""
    layer = LayerSpec(f"state {block_size}", 8)
    return GroupSpec("mamba", block_size, [layer], mamba_cache_mode=mode, num_speculative_blocks=drafts)


def coordinator(*groups: GroupSpec, num_blocks: int, **options: Any) -> Coordinator:
    """A coordinator for requests of up to 64 tokens unless told otherwise."""
    return Coordinator(CoordinatorConfig(groups, num_blocks, **{"max_model_len": MAX_MODEL_LEN, **options}))


def block_hashes(count: int, family: int = 0) -> list[bytes]:
    """The block hashes of one sequence. Sequences of different families share no prefix."""
    return [bytes([family, number]) * 16 for number in range(1, count + 1)]


def free_but_for(c: Coordinator, count: int) -> list[int]:
    """Hold all free blocks but so many. Returns those held, which are pinned."""
    return c.take_pinned(c.num_free_blocks - count)


@contextmanager
def unchanged(world: _Digested) -> Iterator[None]:
    """Check that what is done inside changes nothing."""
    before = world.state_digest()
    yield
    assert world.state_digest() == before
    world.audit()


def check_all_given_back(c: Coordinator) -> None:
    """I7: no request is left and every block but the null block is free."""
    c.audit()
    assert c.num_requests == 0
    assert c.num_free_blocks == c.num_blocks - 1
    assert not any(c.ref_count(block) for block in range(c.num_blocks))


def manager(*groups: GroupSpec, num_blocks: int, **arguments: Any) -> Any:
    """A `LockstepKVCacheManager` for these groups on one rank. Skips the test if vLLM is not installed."""
    pytest.importorskip("vllm.v1", reason="vLLM is not installed")
    from stock import Config, Group

    from lockstep_kv.vllm import LockstepKVCacheManager

    theirs = tuple(
        Group(
            group.kind,
            group.block_size,
            sharded=group.kind != "mamba",
            width=8,
            is_eagle=group.is_eagle,
            local=group.sliding_window,
            mode=group.mamba_cache_mode or "none",
            drafts=group.num_speculative_blocks,
        )
        for group in groups
    )
    config = Config(theirs, num_blocks, dcp=1, enable_caching=True, use_eagle=False)
    return LockstepKVCacheManager(**{**config.arguments(), **arguments})


def request(name: str, num_tokens: int, hash_tokens: int) -> Any:
    """A vLLM request whose prompt is the first so many tokens of one sequence, to be made after its manager."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.request import Request

    from lockstep_kv.vllm.hashing import request_block_hasher

    init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=MAX_MODEL_LEN)
    hasher = request_block_hasher(hash_tokens, sha256)
    return Request(name, list(range(num_tokens)), sampling, None, block_hasher=hasher)
