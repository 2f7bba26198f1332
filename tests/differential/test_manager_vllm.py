"""`LockstepKVCacheManager` against vLLM's own `KVCacheManager`: the same calls on the same requests, compared in full.

Everything that vLLM's other parts can see is compared after every call, what they read past the manager included.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from stock import MAX_MODEL_LEN, Config, configs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import Request, RequestStatus

from lockstep_kv.vllm import LockstepKVCacheManager
from lockstep_kv.vllm.hashing import request_block_hasher

if TYPE_CHECKING:
    from collections.abc import Callable

init_none_hash(sha256)


class Life:
    """One engine's requests, and both managers that serve them."""

    def __init__(self, config: Config, options: dict[str, Any]) -> None:
        arguments = config.arguments(zeroes=options["zeroes"])
        arguments |= {name: options[name] for name in ("log_stats", "watermark", "enable_kv_cache_events")}
        collectors = [KVCacheMetricsCollector(1.0) if options["metrics"] else None for _ in range(2)]
        self.config = config
        self.theirs = KVCacheManager(**arguments, metrics_collector=collectors[0])
        self.ours = LockstepKVCacheManager(**arguments, metrics_collector=collectors[1])
        self.hasher = request_block_hasher(config.hash_tokens, sha256)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.deferred: list[list[list[Any]]] = []
        self.touched: list[list[list[Any]]] = []
        self.born = 0

    def both(self, call: Callable[[Any], Any]) -> Any:
        """Call both managers; their answers must be equal, as ids."""
        theirs, ours = plain(call(self.theirs)), plain(call(self.ours))
        assert ours == theirs
        return theirs

    def start(self, prompt: list[int], salt: str | None, report: str) -> None:
        # Under context parallelism vLLM's full report fails or names the wrong tokens.
        report = report if self.config.dcp == 1 else "incremental"
        sampling = SamplingParams(max_tokens=64, extra_args={"kv_cache_report_mode": report})
        request = Request(f"r{self.born}", prompt, sampling, None, block_hasher=self.hasher, cache_salt=salt)
        self.born += 1
        self.waiting.append(request)

    def admit(self, request: Request, chunk: int, lookahead: int, external: int, reserved: int, flags: int) -> None:
        """What the scheduler does for a waiting request."""
        found = [manager.get_computed_blocks(request) for manager in (self.theirs, self.ours)]
        assert plain(found[0]) == plain(found[1])
        for manager in (self.theirs, self.ours):
            manager.record_prefix_cache_stats(request, found[0][1])
        num_hit = found[0][1]
        request.shared_prefix_boundary = found[0][2]
        external = min(external, request.num_tokens - 1 - num_hit)
        chunk = min(chunk, request.num_tokens - num_hit - external)
        delay = bool(flags & 1 and external)
        answers = []
        for manager, (blocks, _, _) in zip((self.theirs, self.ours), found, strict=True):
            kept = manager.truncate_computed_blocks(blocks, num_hit) if flags & 8 else blocks
            answer = manager.allocate_slots(
                request,
                0 if delay else chunk,
                num_new_computed_tokens=num_hit,
                new_computed_blocks=kept,
                num_lookahead_tokens=0 if delay else lookahead,
                num_external_computed_tokens=external,
                delay_cache_blocks=delay,
                full_sequence_must_fit=bool(flags & 2),
                reserved_blocks=reserved,
                has_scheduled_reqs=bool(flags & 4),
                skip_zeroing_group_ids=(0,) if delay else (),
            )
            answers.append(plain(answer))
        assert answers[0] == answers[1]
        if answers[0] is None:
            return
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit + external + (0 if delay else chunk)
        if delay:
            self.both(lambda manager: manager.cache_blocks(request, request.num_computed_tokens))

    def step(self, request: Request, chunk: int, drafts: int, accepted: int, reserved: int) -> None:
        """A prompt's next chunk, or a decoded token with drafts of which some are accepted."""
        left = request.num_tokens - request.num_computed_tokens
        if left <= 0:
            if request.num_tokens + drafts + 1 >= MAX_MODEL_LEN:
                return
            request.append_output_token_ids(7)
            left = 1
        chunk = min(chunk, left)
        drafts = drafts if chunk == left else 0
        answer = self.both(
            lambda manager: manager.allocate_slots(
                request, chunk + drafts, num_lookahead_tokens=drafts, reserved_blocks=reserved
            )
        )
        if answer is None:
            return
        request.num_computed_tokens += chunk
        for _ in range(min(accepted, drafts)):
            request.append_output_token_ids(9)
            request.num_computed_tokens += 1

    def preempt(self, request: Request) -> None:
        self.end(request, later=False)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.append(request)

    def end(self, request: Request, *, later: bool) -> None:
        self.running.remove(request)
        if later:
            pair = [manager.pop_blocks_for_free(request) for manager in (self.theirs, self.ours)]
            assert plain(pair[0]) == plain(pair[1])
            self.deferred.append(pair)
        else:
            self.both(lambda manager: manager.free(request))

    def drain(self, held: list[list[list[Any]]]) -> None:
        """Give back what was held first."""
        if held:
            theirs, ours = held.pop(0)
            self.theirs.block_pool.free_blocks(reversed(theirs))
            self.ours.block_pool.free_blocks(reversed(ours))

    def touch(self, ids: list[int]) -> None:
        """What a connector does to keep blocks, and one that it takes for itself."""
        pools = (self.theirs.block_pool, self.ours.block_pool)
        known = [block_id for block_id in dict.fromkeys(ids) if 0 < block_id < self.config.num_blocks]
        held = [[pool.blocks[block_id] for block_id in known] for pool in pools]
        for pool, blocks in zip(pools, held, strict=True):
            pool.touch(blocks)
        if pools[0].get_num_free_blocks():
            taken = [pool.get_new_blocks(1) for pool in pools]
            assert plain(taken[0]) == plain(taken[1])
            held = [[*blocks, *more] for blocks, more in zip(held, taken, strict=True)]
        self.touched.append(held)

    def compare(self) -> None:
        """Everything that other parts of vLLM can see is equal."""
        theirs, ours = self.theirs, self.ours
        pool, view = theirs.block_pool, ours.block_pool
        assert ours.usage == theirs.usage
        assert view.get_num_free_blocks() == pool.get_num_free_blocks() == view.free_block_queue.num_free_blocks
        assert plain(view.free_block_queue.get_all_free_blocks()) == plain(pool.free_block_queue.get_all_free_blocks())
        for block, other in zip(pool.blocks[1:], view.blocks[1:], strict=True):
            assert (other.ref_cnt, other.block_hash, other.is_null) == (block.ref_cnt, block.block_hash, block.is_null)
            extra = pool.cached_block_hashes_by_block.get(block.block_id) or set()
            assert set(view.cached_block_hashes_by_block.get(block.block_id) or ()) == extra
            for key in filter(None, [block.block_hash, *extra]):
                found = pool.cached_block_hash_to_block.get_one_block(key)
                assert view.cached_block_hash_to_block.get_one_block(key).block_id == found.block_id
        for request in self.running:
            self.both(self.reader(request))
        for request in self.running + self.waiting:
            self.both(self.finder(request))
        self.both(lambda manager: manager.take_events())
        self.both(lambda manager: manager.take_new_block_ids())
        watched = (theirs.metrics_collector, ours.metrics_collector)
        if watched[0] is not None and watched[1] is not None:
            assert list(watched[1].block_metrics) == list(watched[0].block_metrics)
            for evicted, other in zip(watched[0].drain_events(), watched[1].drain_events(), strict=True):
                assert len(evicted.reuse_gaps_seconds) == len(other.reuse_gaps_seconds)
        ours._core.audit()

    def reader(self, request: Request) -> Callable[[Any], Any]:
        """All that can be read of a running request."""
        name = request.request_id
        nothing: tuple[list[Any], ...] = tuple([] for _ in self.config.groups)

        def read(manager: Any) -> Any:
            views = manager.coordinator.single_type_managers
            return [
                manager.get_block_ids(name),
                manager.get_blocks(name).get_unhashed_block_ids_all_groups(),
                manager.get_block_ids_for_computed_tokens(name, 13),
                manager.estimate_cached_tokens(request),
                manager.coordinator.get_num_blocks_to_allocate(name, 700, nothing, 0, 0, 0, 700),
                [(len(view.req_to_blocks[name]), view.num_cached_block.get(name) or 0) for view in views],
                [(view.block_size, view.use_eagle, view.kv_cache_group_id) for view in views],
            ]

        return read

    def finder(self, request: Request) -> Callable[[Any], Any]:
        """What lookups past the manager find."""
        limit = min(40, request.num_tokens - 1)
        hybrid = self.config.enable_caching and len(self.config.groups) > 1

        def find(manager: Any) -> Any:
            found = [manager.coordinator.find_longest_cache_hit(request.block_hashes, limit)]
            if hybrid:
                found.append(manager.coordinator.find_longest_cache_hit_per_group(request.block_hashes, limit))
            return found

        return find


def plain(answer: Any) -> Any:
    """An answer with blocks as ids."""
    if hasattr(answer, "get_block_ids"):
        return answer.get_block_ids()
    if hasattr(answer, "block_id"):
        return answer.block_id
    if isinstance(answer, list | tuple):
        return [plain(item) for item in answer]
    return answer


SMALL = st.integers(0, 9)
FEW = st.sampled_from([0, 0, 0, 3])
OPERATIONS = st.one_of(
    st.tuples(
        st.just("start"),
        st.integers(0, 2),
        st.sampled_from([1, 7, 8, 16, 17, 31, 32, 33, 48, 64, 65, 90]),
        st.sampled_from([None, None, None, "salt"]),
        st.sampled_from(["incremental", "incremental", "full"]),
    ),
    st.tuples(st.just("admit"), SMALL, st.sampled_from([5, 16, 90]), FEW, st.sampled_from([0, 0, 5, 17]), FEW, SMALL),
    st.tuples(st.just("admit"), SMALL, st.just(90), FEW, st.just(0), FEW, SMALL),
    st.tuples(st.just("step"), SMALL, st.integers(1, 40), FEW, st.integers(0, 3), FEW),
    st.tuples(st.just("step"), SMALL, st.integers(1, 40), FEW, st.integers(0, 3), FEW),
    st.tuples(st.just("step"), SMALL, st.integers(1, 40), FEW, st.integers(0, 3), FEW),
    st.tuples(st.just("preempt"), SMALL),
    st.tuples(st.just("end"), SMALL, st.booleans()),
    st.tuples(st.just("end"), SMALL, st.booleans()),
    st.tuples(st.just("drain")),
    st.tuples(st.just("touch"), st.lists(st.integers(0, 89), max_size=3)),
    st.tuples(st.just("untouch")),
    st.tuples(st.just("evict"), st.lists(st.integers(0, 89), max_size=3)),
    st.tuples(st.just("reset")),
)
OPTIONS = st.fixed_dictionaries(
    {
        "log_stats": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.05]),
        "metrics": st.booleans(),
        "zeroes": st.booleans(),
        "enable_kv_cache_events": st.booleans(),
    }
)


def carry_out(life: Life, operation: tuple[Any, ...]) -> None:  # noqa: C901 - a table
    match operation:
        case ("start", family, length, salt, report):
            life.start([family * 1000 + at for at in range(length)], salt, report)
        case ("admit", which, *how) if life.waiting:
            life.admit(life.waiting[which % len(life.waiting)], *how)
        case ("step", which, *how) if life.running:
            life.step(life.running[which % len(life.running)], *how)
        case ("preempt", which) if life.running:
            life.preempt(life.running[which % len(life.running)])
        case ("end", which, later) if life.running:
            life.end(life.running[which % len(life.running)], later=later)
        case ("drain",):
            life.drain(life.deferred)
        case ("touch", ids):
            life.touch(ids)
        case ("untouch",):
            life.drain(life.touched)
        case ("evict", ids):
            known = {block_id for block_id in ids if block_id < life.config.num_blocks}
            life.both(lambda manager: manager.evict_blocks(known))
        case ("reset",):
            life.both(lambda manager: manager.reset_prefix_cache())
            life.both(lambda manager: [vars(stats) for stats in [manager.make_prefix_cache_stats()] if stats])


@settings(
    max_examples=int(os.environ.get("LOCKSTEP_KV_EXAMPLES", "300")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(configs(), OPTIONS, st.lists(OPERATIONS, min_size=20, max_size=60))
def test_every_call_gives_what_vllm_gives(
    config: Config, options: dict[str, Any], operations: list[tuple[Any, ...]]
) -> None:
    random.seed(0)
    life = Life(config, options)
    for operation in operations:
        note(f"{operation}")
        carry_out(life, operation)
        life.compare()
    for request in list(life.running):
        life.end(request, later=False)
    while life.deferred or life.touched:
        life.drain(life.deferred)
        life.drain(life.touched)
        life.compare()
    assert life.ours.block_pool.get_num_free_blocks() == config.num_blocks - 1
