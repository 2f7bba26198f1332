"""The coordinator against vLLM's own `KVCacheManager`, call by call, over random configurations and request lives.

After every operation everything observable is compared: ids, hits, refusals, rows, the order of the free queue, usage
and events. vLLM is the judge; where it is not installed these tests are skipped.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from lockstep_kv import (
    AllBlocksCleared,
    BlockStored,
    Coordinator,
    CoordinatorConfig,
)

os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from stock import MAX_MODEL_LEN, Config, configs
from stock_events import comparable
from vllm.distributed import kv_events
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable

init_none_hash(sha256)


class Pair:
    """Both managers and the requests they serve."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.theirs = KVCacheManager(**config.arguments())
        self.ours = Coordinator(
            CoordinatorConfig(
                [group.ours(at) for at, group in enumerate(config.groups)],
                config.num_blocks,
                dcp_world_size=config.dcp,
                enable_caching=config.enable_caching,
                max_model_len=MAX_MODEL_LEN,
                use_eagle=config.use_eagle,
                enable_events=True,
                max_in_flight_tokens=config.in_flight,
                retention_interval=config.retention_interval,
            )
        )
        self.hasher: Callable[[Request], Any] = get_request_block_hasher(config.hash_tokens, sha256)
        self.all: dict[str, Request] = {}
        self.running: list[Request] = []

    def start(self, prompt: list[int], chunk: int, lookahead: int, external: int, reserved: int) -> None:
        """A new request: look up, allocate the first chunk behind hits and external tokens, publish."""
        name = f"r{len(self.all)}"
        request = Request(name, prompt, SamplingParams(max_tokens=64), None, block_hasher=self.hasher)
        self.all[name] = request
        blocks, num_hit, request.shared_prefix_boundary = self.theirs.get_computed_blocks(request)
        hit = self.ours.find_longest_hit(request.block_hashes, len(prompt) - 1)
        assert hit.num_tokens == num_hit
        assert hit.block_ids == blocks.get_block_ids()
        external = min(external, len(prompt) - 1 - num_hit)
        chunk = min(chunk, len(prompt) - num_hit - external)
        got = self.theirs.allocate_slots(
            request,
            chunk,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=external,
            reserved_blocks=reserved,
        )
        total = num_hit + external + chunk
        new = self.ours.allocate(
            name,
            min(total + lookahead, MAX_MODEL_LEN),
            hit=hit,
            num_external_tokens=external,
            reserved_blocks=reserved,
        )
        self.finish_step(request, got, new, total)

    def step(self, request: Request, chunk: int, lookahead: int, reserved: int) -> None:
        """The next chunk of a prompt, or a decoded token."""
        left = request.num_tokens - request.num_computed_tokens
        if left <= 0:
            request.append_output_token_ids(7)
            left = 1
        chunk = min(chunk, left)
        total = request.num_computed_tokens + chunk
        got = self.theirs.allocate_slots(request, chunk, num_lookahead_tokens=lookahead, reserved_blocks=reserved)
        # vLLM gives back what windows do not need before it allocates, even if that fails.
        self.ours.release_skipped(request.request_id, request.num_computed_tokens)
        num_tokens = min(total + lookahead, MAX_MODEL_LEN)
        new = self.ours.allocate(request.request_id, num_tokens, reserved_blocks=reserved)
        self.finish_step(request, got, new, total)

    def finish_step(self, request: Request, got: Any, new: tuple[list[int], ...] | None, total: int) -> None:
        assert (got is None) == (new is None)
        if got is None:
            return
        assert got.get_block_ids() == new
        self.ours.cache(
            request.request_id,
            request.block_hashes,
            min(total, request.num_tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            shared_prefix_boundary=request.shared_prefix_boundary,
        )
        request.num_computed_tokens = total
        if request not in self.running:
            self.running.append(request)

    def end(self, request: Request) -> None:
        self.running.remove(request)
        self.theirs.free(request)
        self.ours.free(request.request_id)

    def compare(self) -> None:
        """Everything that can be observed is equal."""
        pool = self.theirs.block_pool
        assert self.ours.num_free_blocks == pool.get_num_free_blocks()
        assert self.ours.free_order() == [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert self.ours.usage == self.theirs.usage
        for request in self.running:
            assert self.ours.block_ids(request.request_id) == self.theirs.get_block_ids(request.request_id)
        for block in pool.blocks[1:]:
            assert self.ours.ref_count(block.block_id) == block.ref_cnt
        ours = [self.event(event) for event in self.ours.take_events()]
        assert comparable(ours, self.config) == comparable(self.theirs.take_events(), self.config)
        self.ours.audit()

    def event(self, event: Any) -> kv_events.KVCacheEvent:
        """One of our events as vLLM would put it."""
        if isinstance(event, AllBlocksCleared):
            return kv_events.AllBlocksCleared()
        if not isinstance(event, BlockStored):
            return kv_events.BlockRemoved([event.block_hash], medium="GPU", group_idx=event.group_id)
        request = self.all[event.request_id]
        kind, window = self.theirs.kv_cache_event_metadata[event.group_id]
        return kv_events.BlockStored(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=list(request.all_token_ids[event.start_token : event.end_token]),
            block_size=event.block_tokens,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None] * len(event.block_hashes) or None,
            group_idx=event.group_id,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
        )


SMALL = st.integers(1, 40)
# Prompts are cut from a few sequences, so that they share prefixes.
START = st.tuples(
    st.just("start"),
    st.integers(0, 2),
    st.sampled_from([1, 7, 8, 16, 17, 31, 32, 33, 48, 64, 65, 90]),
    st.sampled_from([5, 16, 90, 90]),
    st.sampled_from([0, 0, 0, 3]),
    st.sampled_from([0, 0, 0, 5, 17]),
    st.sampled_from([0, 0, 0, 2]),
)
STEP = st.tuples(st.just("step"), st.integers(0, 9), SMALL, st.sampled_from([0, 0, 3]), st.sampled_from([0, 0, 0, 2]))
END = st.tuples(st.just("end"), st.integers(0, 9))
OPERATIONS = st.one_of(
    START,
    START,
    STEP,
    STEP,
    STEP,
    END,
    END,
    st.tuples(st.just("evict"), st.lists(st.integers(0, 59), max_size=3)),
    st.tuples(st.just("reset")),
)


def carry_out(pair: Pair, operation: tuple[Any, ...]) -> None:
    match operation:
        case ("start", family, length, chunk, lookahead, external, reserved):
            prompt = [family * 1000 + at for at in range(length)]
            pair.start(prompt, chunk, lookahead, external, reserved)
        case ("step", which, chunk, lookahead, reserved) if pair.running:
            pair.step(pair.running[which % len(pair.running)], chunk, lookahead, reserved)
        case ("end", which) if pair.running:
            pair.end(pair.running[which % len(pair.running)])
        case ("evict", ids):
            known = [block for block in dict.fromkeys(ids) if block < pair.ours.num_blocks]
            # vLLM takes a set, whose order its events follow.
            pair.theirs.evict_blocks(set(known))
            pair.ours.evict(list(set(known)))
        case ("reset",):
            assert pair.ours.reset_prefix_cache() == pair.theirs.reset_prefix_cache()


@settings(
    max_examples=int(os.environ.get("LOCKSTEP_KV_EXAMPLES", "400")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(configs(), st.lists(OPERATIONS, min_size=20, max_size=60))
def test_every_call_gives_what_vllm_gives(config: Config, operations: list[tuple[Any, ...]]) -> None:
    pair = Pair(config)
    for operation in operations:
        note(f"{operation}")
        carry_out(pair, operation)
        pair.compare()
    for request in list(pair.running):
        pair.end(request)
        pair.compare()
