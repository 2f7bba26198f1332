"""The life of an engine's requests, led through vLLM's own `KVCacheManager` and through ours at once.

What each call answers is compared.
"""

from __future__ import annotations

import collections
import functools
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from comparison import plain
from stock import MAX_MODEL_LEN
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from lockstep_kv.vllm import LockstepKVCacheManager
from lockstep_kv.vllm.hashing import request_block_hasher

if TYPE_CHECKING:
    from collections.abc import Callable

    from stock import Config

__all__ = ["Admission", "Life", "StockFailedError"]

init_none_hash(sha256)
# A reset that does not happen is part of the lives.
logging.getLogger("vllm.v1.core.block_pool").setLevel(logging.ERROR)


class StockFailedError(Exception):
    """vLLM's manager has failed in a way that is known, and where ours does not: there is nothing to compare with."""


class Admission(NamedTuple):
    """How the scheduler takes in a waiting request."""

    chunk: int
    lookahead: int
    external: int
    reserved: int
    flags: int

    @property
    def loads_later(self) -> bool:
        """The external tokens are loaded in the background."""
        return bool(self.flags & 1 and self.external)

    @property
    def must_fit_whole(self) -> bool:
        return bool(self.flags & 2)

    @property
    def others_run(self) -> bool:
        return bool(self.flags & 4)

    @property
    def is_cut(self) -> bool:
        return bool(self.flags & 8)

    @property
    def load_fails(self) -> bool:
        return self.flags == 9


class Life:
    """One engine's requests, and both managers that serve them."""

    def __init__(self, config: Config, options: dict[str, Any]) -> None:
        arguments = config.arguments(zeroes=options["zeroes"])
        arguments |= {name: options[name] for name in ("log_stats", "watermark", "enable_kv_cache_events")}
        collectors = [KVCacheMetricsCollector(1.0) if options["metrics"] else None for _ in range(2)]
        self.config = config
        self.zeroes = options["zeroes"]
        self.theirs = KVCacheManager(**arguments, metrics_collector=collectors[0])
        self.ours = LockstepKVCacheManager(**arguments, metrics_collector=collectors[1])
        self.hasher = request_block_hasher(config.hash_tokens, sha256)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.deferred: list[list[list[Any]]] = []
        self.held: list[list[list[Any]]] = []
        self.born = 0
        self.seen: collections.Counter[str] = collections.Counter()
        """How often what is rare came up."""
        self.splitter = self._splitter() if any(group.mode == "align" for group in config.groups) else None

    def both(self, call: Callable[[Any], Any]) -> Any:
        """Call both managers; their answers must be equal, as ids."""
        theirs, ours = plain(call(self.theirs)), plain(call(self.ours))
        assert ours == theirs
        return theirs

    def _splitter(self) -> Any:
        """As much of a scheduler as vLLM's rule for the ends of steps looks at."""
        states = [group for group in self.config.groups if group.mode == "align"]
        coordinator = self.theirs.coordinator
        return SimpleNamespace(
            cache_config=SimpleNamespace(block_size=states[0].block_size),
            block_size=self.theirs.coordinator.scheduler_block_size,
            hash_block_size=self.config.hash_tokens,
            mamba_partial_cache_hit=coordinator.enable_partial_hash_hits
            and self.config.hash_tokens < coordinator.scheduler_block_size,
            mamba_shared_prefix_checkpoint=self.theirs.mamba_shared_prefix_checkpoint,
            mamba_has_prefill_checkpoint_blocks=all(group.checkpoint is not None for group in states),
            mamba_prefill_checkpoint_alignment=states[0].checkpoint,
            use_eagle_block_drop=self.config.use_eagle,
            max_num_scheduled_tokens=MAX_MODEL_LEN,
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        )

    def split(self, request: Request, chunk: int, local: int = 0, external: int = 0) -> int:
        """Where vLLM's scheduler ends a step of so many tokens."""
        if self.splitter is None:
            return chunk
        tokens: int = Scheduler._mamba_block_aligned_split(self.splitter, request, chunk, local, external)
        return tokens

    def start(self, prompt: list[int], salt: str | None, report: str) -> None:
        # Under context parallelism, and where hits end inside blocks, vLLM's full report fails or names wrong tokens.
        whole = self.config.dcp == 1 and not self.theirs.coordinator.enable_partial_hash_hits
        extra = {"kv_cache_report_mode": report if whole else "incremental"}
        sampling = SamplingParams(max_tokens=64, extra_args=extra)
        request = Request(f"r{self.born}", prompt, sampling, None, block_hasher=self.hasher, cache_salt=salt)
        self.born += 1
        self.waiting.append(request)

    def look_up(self, request: Request, external: int) -> tuple[list[Any], int, int]:
        """What the scheduler finds for a waiting request: both results, the hit, and what a connector adds to it."""
        unit = max(group.block_size for group in self.config.groups) if self.config.has_states else 1
        if not external or not self.config.has_states or self.attention_lags(request):
            found: list[tuple[Any, ...]] = [
                manager.get_computed_blocks(request) for manager in (self.theirs, self.ours)
            ]
        else:
            found = [manager.get_computed_blocks_for_connector(request) for manager in (self.theirs, self.ours)]
        assert plain(found[0]) == plain(found[1])
        num_hit = found[0][1]
        external = min(external, request.num_tokens - 1 - num_hit)
        if self.config.has_states:
            # A connector adds whole blocks to whole blocks.
            external = 0 if num_hit % unit else external - external % unit
            if external == 0 and len(found[0]) > 3 and found[0][3]:
                found = [manager.get_computed_blocks(request) for manager in (self.theirs, self.ours)]
                assert plain(found[0]) == plain(found[1])
                num_hit = found[0][1]
        return found, num_hit, external

    def attention_lags(self, request: Request) -> bool:
        """Whether groups of attention would be hit by different lengths: vLLM takes the first one's for all then."""
        coordinator = self.theirs.coordinator
        if not self.config.enable_caching or len(self.config.groups) == 1:
            return False
        _, found = coordinator.find_longest_cache_hit_per_group(request.block_hashes, request.num_tokens - 1)
        groups = zip(self.config.groups, found, strict=True)
        return len({tokens for group, tokens in groups if group.kind != "mamba" and group.is_cacheable}) > 1

    def admit(self, request: Request, how: Admission) -> None:
        """What the scheduler does for a waiting request."""
        found, num_hit, external = self.look_up(request, how.external)
        for manager in (self.theirs, self.ours):
            manager.record_prefix_cache_stats(request, num_hit)
        request.shared_prefix_boundary = found[0][2]
        how = how._replace(external=external)
        chunk = min(how.chunk, request.num_tokens - num_hit - external)
        chunk = 0 if how.loads_later else self.split(request, chunk, num_hit, external)
        if not chunk and not how.loads_later:
            return

        def allocate(manager: Any, result: tuple[Any, ...]) -> Any:
            cut = how.is_cut and num_hit % self.theirs.coordinator.scheduler_block_size == 0 and len(result) == 3
            return manager.allocate_slots(
                request,
                chunk,
                num_new_computed_tokens=num_hit,
                new_computed_blocks=manager.truncate_computed_blocks(result[0], num_hit) if cut else result[0],
                num_lookahead_tokens=0 if how.loads_later else how.lookahead,
                num_external_computed_tokens=external,
                delay_cache_blocks=how.loads_later,
                num_encoder_tokens=request.num_prompt_tokens if self.has_encoder else 0,
                full_sequence_must_fit=how.must_fit_whole,
                reserved_blocks=how.reserved,
                has_scheduled_reqs=how.others_run,
                skip_zeroing_group_ids=(0,) if how.loads_later else (),
            )

        answers = []
        for manager, result in zip((self.theirs, self.ours), found, strict=True):
            answers.append(self.answer_or_failure(manager, external, functools.partial(allocate, manager, result)))
        if self.copies_unwritten(num_hit, answers):
            answers[1] = self.in_the_next_step(lambda: plain(allocate(self.ours, found[1])))
        short = external and self.splitter is not None and answers[0] is not None and answers[1] is None
        if answers[0] == "failed" or short:
            assert answers[1] is None, "ours finds that it does not fit"
            self.ours._core.audit()
            raise StockFailedError
        assert answers[0] == answers[1]
        if answers[0] is None:
            self.seen["refusals"] += 1
            return
        self.seen["admissions"] += 1
        self.seen["hits"] += num_hit > 0
        self.seen["hits inside a block"] += any(num_hit % span for span in self.config.spans)
        self.seen["external"] += external > 0
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_hit + external + chunk
        if how.loads_later:
            self.load(request, num_hit, fails=how.load_fails)

    def answer_or_failure(self, manager: Any, external: int, call: Callable[[], Any]) -> Any:
        """What an admission answers, as ids. "failed" where vLLM's manager fails half way."""
        try:
            return plain(call())
        except ValueError as error:
            # vLLM's test of aligned states leaves out what an external tier loads.
            if manager is not self.theirs or not external or "free blocks from the pool" not in str(error):
                raise
            return "failed"

    def copies_unwritten(self, num_hit: int, answers: list[Any]) -> bool:
        """Whether ours, and not vLLM's, refuses a hit that ends inside a block of attention, which is copied."""
        groups = zip(self.config.spans, self.config.groups, strict=True)
        is_copied = any(num_hit % span for span, group in groups if group.kind != "mamba")
        return is_copied and answers[0] not in (None, "failed") and answers[1] is None

    def in_the_next_step(self, call: Callable[[], Any]) -> Any:
        """What a call answers once the step has been written that it has to wait for."""
        self.seen["hits in what a step is writing"] += 1
        self.both(lambda manager: manager.new_step_starts())
        answer = call()
        self.both(lambda manager: manager.new_step_starts())
        return answer

    def carry_on(self, request: Request, num_tokens: int) -> None:
        """One step of a waiting request that finds nothing."""
        self.both(lambda manager: manager.allocate_slots(request, num_tokens))
        self.waiting.remove(request)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_tokens

    @property
    def has_encoder(self) -> bool:
        return any(group.kind == "cross_attention" for group in self.config.groups)

    def load(self, request: Request, num_hit: int, *, fails: bool) -> None:
        """A load in the background comes to its end."""
        if fails and not self.config.has_states:
            unit = self.theirs.coordinator.scheduler_block_size
            request.num_computed_tokens = max(num_hit, request.num_computed_tokens // 2) // unit * unit
            if not request.num_computed_tokens:
                self.preempt(request)
                return
            if self.zeroes:
                start = request.num_computed_tokens
                self.both(lambda manager: manager.record_blocks_for_zeroing(request.request_id, start))
        self.both(lambda manager: manager.cache_blocks(request, request.num_computed_tokens))

    def step(self, request: Request, chunk: int, drafts: int, accepted: int, reserved: int, *, settles: bool) -> None:
        """A prompt's next chunk, or a decoded token with drafts of which some are accepted."""
        left = request.num_tokens - request.num_computed_tokens
        if left <= 0:
            if request.num_tokens + 2 * drafts + 1 >= MAX_MODEL_LEN:
                return
            request.append_output_token_ids(7)
            left = 1
        chunk = self.split(request, min(chunk, left))
        if not chunk:
            return
        # Drafts come behind the last token. Where steps save states inside, vLLM takes them for tokens of the prompt.
        decodes = chunk == left and (self.splitter is None or request.num_output_tokens > 0)
        drafts = drafts if decodes else 0
        answer = self.both(
            lambda manager: manager.allocate_slots(
                request, chunk + drafts, num_lookahead_tokens=drafts, reserved_blocks=reserved
            )
        )
        if answer is None:
            self.seen["refusals"] += 1
            return
        self.seen["checkpoints"] += len(getattr(self.theirs.coordinator.single_type_managers[-1], "_checkpoints", ()))
        request.num_computed_tokens += chunk
        for _ in range(min(accepted, drafts)):
            request.append_output_token_ids(9)
            request.num_computed_tokens += 1
        # Async scheduling: the results of the last step, or of none, are in. vLLM lets states in flight be hit.
        request.num_in_flight_tokens = 0 if settles or self.config.has_states else chunk

    def preempt(self, request: Request) -> None:
        self.end(request, later=False)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_in_flight_tokens = 0
        request.num_preemptions += 1
        self.waiting.append(request)

    def end(self, request: Request, *, later: bool) -> None:
        self.seen["final states"] += len(self.both(lambda manager: manager.finalize_partial_tail_offloads(request)))
        self.running.remove(request)
        if later:
            # vLLM gives the groups back in the wrong order then: from the last to the first.
            rows = self.theirs.get_blocks(request.request_id).blocks
            self.theirs.pop_blocks_for_free(request)
            pair = [[block for row in reversed(rows) for block in row], self.ours.pop_blocks_for_free(request)]
            assert plain(pair[0]) == plain(pair[1])
            self.deferred.append(pair)
        else:
            self.both(lambda manager: manager.free(request))

    def tick(self) -> None:
        """A step of the scheduler ends and a new one begins. What copies hold is given back later."""
        self.seen["offers"] += len(self.both(lambda manager: manager.take_boundary_state_offloads()))
        copies = [manager.take_kv_cache_block_copies() for manager in (self.theirs, self.ours)]
        assert copies[0][0] == copies[1][0]
        assert plain(copies[0][1]) == plain(copies[1][1])
        self.seen["copies"] += len(copies[0][0])
        if copies[0][0]:
            self.held.append([blocks[::-1] for _, blocks in copies])
        self.both(lambda manager: manager.new_step_starts())

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
        # Blocks for drafts belong to their request alone.
        known = [block_id for block_id in known if not self.config.has_states or pools[0].blocks[block_id].block_hash]
        held = [[pool.blocks[block_id] for block_id in known] for pool in pools]
        for pool, blocks in zip(pools, held, strict=True):
            pool.touch(blocks)
        if pools[0].get_num_free_blocks():
            taken = [pool.get_new_blocks(1) for pool in pools]
            assert plain(taken[0]) == plain(taken[1])
            held = [[*blocks, *more] for blocks, more in zip(held, taken, strict=True)]
        self.held.append(held)
