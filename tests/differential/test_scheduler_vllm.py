"""vLLM's own `Scheduler` with a fake model runner, twice: with vLLM's manager and with the plugin's.

Both get the same thousands of requests, and all that comes out of them is compared after every step: what is scheduled
with which blocks, tokens, finish reasons, statistics, KV cache events. LOCKSTEP_KV_SEED gives another random run.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from fake_runner import FakeRunner
from recording import step_record
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lockstep_kv.vllm import LockstepKVCacheManager, patches, plugin
from lockstep_kv.vllm.hashing import request_block_hasher

if TYPE_CHECKING:
    from collections.abc import Callable

SEED = int(os.environ.get("LOCKSTEP_KV_SEED", "1"))
VOCABULARY = 1000
MAX_MODEL_LEN = 640
MAX_PROMPT = 600
NUM_DRAFTS = 3
MODELS = Path(__file__).resolve().parents[1] / "data" / "tiny-models.json"


@dataclass(frozen=True)
class Variant:
    """An engine, and how many requests it gets."""

    requests: int
    block_sizes: tuple[int, ...] = (16,)
    num_blocks: int = 150
    is_async: bool = False
    drafter: str = ""
    drafting_group: int | None = None
    caching: bool = True
    watermark: float = 0.0
    whole_prompts: bool = True
    """Whether a request starts only if all of its prompt fits."""
    deferred: bool = False
    """Blocks are given back only after the steps in flight, as a KV connector needs it."""

    @property
    def max_drafts(self) -> int:
        return NUM_DRAFTS if self.drafter else 0

    def vllm_config(self, folder: Path) -> VllmConfig:
        model = json.loads(MODELS.read_text(encoding="utf-8"))["llama"]
        (folder / "config.json").write_text(json.dumps(model), encoding="utf-8")
        model = ModelConfig(
            str(folder), skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, enforce_eager=True, seed=0
        )
        cache = CacheConfig(block_size=self.block_sizes[0], enable_prefix_caching=self.caching)
        cache.num_gpu_blocks = self.num_blocks
        speculation = None
        if self.drafter:
            options = {"prompt_lookup_max": 3} if self.drafter == "ngram" else {"model": str(folder)}
            speculation = SpeculativeConfig(
                method=self.drafter,
                num_speculative_tokens=NUM_DRAFTS,
                target_model_config=model,
                target_parallel_config=ParallelConfig(),
                **options,
            )
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=24,
                max_num_batched_tokens=256,
                max_model_len=MAX_MODEL_LEN,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                watermark=self.watermark,
                scheduler_reserve_full_isl=self.whole_prompts,
            ),
            speculative_config=speculation,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=self.caching, publisher="null"),
            device_config=DeviceConfig("cpu"),
            load_config=LoadConfig(load_format="dummy"),
        )
        # vLLM turns it off on the CPU.
        config.scheduler_config.async_scheduling = self.is_async
        return config

    def cache_config(self) -> KVCacheConfig:
        groups = [
            KVCacheGroupSpec(
                [f"layer.{at}"],
                FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.float32),
                is_eagle_group=at == self.drafting_group,
            )
            for at, block_size in enumerate(self.block_sizes)
        ]
        return KVCacheConfig(num_blocks=self.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class Side:
    """One engine: a scheduler, its runner and its requests."""

    def __init__(self, variant: Variant, config: VllmConfig) -> None:
        cache_config = variant.cache_config()
        block_size, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(cache_config, config)
        self.scheduler: Any = (AsyncScheduler if variant.is_async else Scheduler)(
            config,
            cache_config,
            StructuredOutputManager(config),
            block_size,
            hash_block_size,
            include_finished_set=True,
            log_stats=True,
        )
        self.scheduler.kv_event_publisher = self
        self.scheduler.defer_block_free = variant.deferred
        self.manager = self.scheduler.kv_cache_manager
        # As the engine core makes it, which hashes only what somebody looks up.
        self.hasher = kv_cache_utils.get_request_block_hasher(hash_block_size, sha256) if variant.caching else None
        self.hasher_maker = kv_cache_utils.get_request_block_hasher
        self.runner = FakeRunner(SEED, VOCABULARY, variant.max_drafts)
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[tuple[Any, Any]] = deque()
        self.numbers: dict[str, int] = {}
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        """Take the place of vLLM's publisher of KV cache events."""
        self.events += batch.events

    def schedule(self) -> Any:
        """Start a step."""
        plan = self.scheduler.schedule()
        self.in_flight.append((plan, self.runner.execute(plan)))
        return plan

    def update(self, *, with_drafts: bool) -> Any:
        """Finish the oldest step. Times are taken out of what it gives."""
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        if with_drafts:
            self.scheduler.update_draft_token_ids(self.runner.take_drafts())
        for to_client in outputs.values():
            to_client.timestamp = 1.0
            for output in to_client.outputs:
                for event in output.events or ():
                    event.timestamp = 0.0
        return outputs


class Life:
    """Both engines and those who send them requests."""

    def __init__(self, variant: Variant, theirs: Side, ours: Side) -> None:
        self.variant = variant
        self.theirs, self.ours = self.sides = (theirs, ours)
        self.random = random.Random(SEED)
        self.families = [self.random.choices(range(VOCABULARY), k=MAX_PROMPT) for _ in range(40)]
        self.finished: deque[list[int]] = deque(maxlen=30)
        self.seen: Counter[str] = Counter()
        self.born = 0
        self.steps = 0

    def both(self, call: Callable[[Side], Any]) -> Any:
        """Ask both; their answers must be equal."""
        theirs, ours = call(self.theirs), call(self.ours)
        assert ours == theirs, f"step {self.steps}, seed {SEED}"
        return theirs

    def run(self) -> None:
        quiet = False
        while self.born < self.variant.requests or self.busy():
            if not self.busy():
                quiet = False
                self.when_idle()
            elif self.random.random() < 0.003:
                quiet = True
            if not quiet and self.born < self.variant.requests and len(self.theirs.requests) < 60:
                for _ in range(self.random.choice([0, 0, 0, 1, 1, 2, 12])):
                    self.arrive()
            self.step()
            if self.steps % 500 == 0:
                self.compare_pools()
        self.compare_pools()
        assert self.both(lambda side: side.manager.block_pool.get_num_free_blocks()) == self.variant.num_blocks - 1

    def busy(self) -> bool:
        return bool(self.both(lambda side: side.scheduler.has_requests() or bool(side.in_flight)))

    def when_idle(self) -> None:
        self.seen["idle"] += 1
        if self.random.random() < 0.5:
            assert self.both(lambda side: side.scheduler.reset_prefix_cache())

    def arrive(self) -> None:
        """A new request."""
        chance = self.random.random
        options: dict[str, Any] = {"max_tokens": self.random.randint(1, 60)}
        if chance() < 0.05:
            # The prompt's tokens are then not read from the cache.
            options["prompt_logprobs"] = 1
        if chance() < 0.1:
            options["stop_token_ids"] = list(range(0, VOCABULARY, 25))
        if chance() < 0.1:
            options["extra_args"] = {"kv_cache_report_mode": "full"}
        sampling = SamplingParams(**options)
        salt = self.random.choice("ab") if chance() < 0.1 else None
        prompt = self.prompt()
        client = self.random.randrange(2)
        for side in self.sides:
            request = Request(
                f"r{self.born}",
                prompt,
                sampling,
                None,
                client_index=client,
                arrival_time=float(self.born),
                cache_salt=salt,
                block_hasher=side.hasher,
            )
            side.requests[request.request_id] = request
            side.scheduler.add_request(request)
        self.born += 1

    def prompt(self) -> list[int]:
        """What many begin with, or what somebody has been answered, and something new."""
        if self.finished and self.random.random() < 0.2:
            begin = self.random.choice(self.finished)
        else:
            begin = self.families[int(40 * self.random.random() ** 2)][: int(MAX_PROMPT * self.random.random() ** 2)]
        end = self.random.choices(range(VOCABULARY), k=self.random.choice([1, 1, 16, 33, 120]))
        return [*begin, *end][:MAX_PROMPT]

    def step(self) -> None:
        """What an engine core does: schedule, and finish a step unless another one can be started before."""
        self.steps += 1
        depth = 2 if self.variant.is_async else 1
        executed = False
        if self.both(lambda side: side.scheduler.has_requests()):
            plans = [side.schedule() for side in self.sides]
            executed = self.compare_plans(*plans)
            self.disturb()
            if len(self.theirs.in_flight) < depth and (
                executed or self.both(lambda side: side.scheduler.has_requests())
            ):
                return
        elif not self.theirs.in_flight:
            return
        # Drafts come with a step's tokens only where the scheduler does not run ahead.
        with_drafts = bool(self.variant.drafter) and depth == 1 and executed
        outputs = self.both(lambda side: side.update(with_drafts=with_drafts))
        events = self.both(lambda side: side.events)
        for event in events:
            self.seen[type(event).__name__] += 1
        for side in self.sides:
            side.events = []
        self.note(outputs)

    def disturb(self) -> None:
        """Aborts and resets, while a step is under way."""
        chance = self.random.random()
        if chance < 0.05 and self.theirs.requests:
            self.abort(self.random.choice(list(self.theirs.requests)))
        elif chance < 0.0505:
            self.abort(None)
        elif chance < 0.053:
            self.both(lambda side: side.scheduler.reset_prefix_cache())
        elif chance < 0.054:
            self.seen["reset while running"] += self.both(reset_while_running)

    def abort(self, request_id: str | None) -> None:
        """Abort one request, or all."""
        aborted = self.both(
            lambda side: [
                request.request_id
                for request in side.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
            ]
        )
        for name in aborted:
            self.end(name)
            self.seen["aborted"] += 1

    def end(self, request_id: str) -> None:
        """Compare both sides' request for the last time."""
        self.both(
            lambda side: (
                side.requests[request_id].block_hashes,
                list(side.requests[request_id].all_token_ids),
                side.requests[request_id].status,
                side.requests[request_id].num_preemptions,
            )
        )
        self.finished.append(list(self.theirs.requests[request_id].all_token_ids))
        for side in self.sides:
            del side.requests[request_id]

    def compare_plans(self, theirs: Any, ours: Any) -> bool:
        """Returns whether there is something to execute."""
        plans = (theirs, ours)
        records = [step_record(plan, side.manager, side.numbers) for plan, side in zip(plans, self.sides, strict=True)]
        assert [record.pop("manager") for record in records] == ["KVCacheManager", "LockstepKVCacheManager"]
        assert records[1] == records[0], f"step {self.steps}, seed {SEED}"
        # The record is what is easy to read; this is all of it.
        assert ours == theirs, f"step {self.steps}, seed {SEED}"
        self.seen["preempted"] += len(records[0]["preempted"])
        self.seen["resumed"] += len(records[0]["resumed"])
        self.seen["deferred frees"] += len(self.theirs.scheduler.deferred_frees)
        self.seen["drafts"] += len(theirs.scheduled_spec_decode_tokens)
        self.seen["chunks"] += sum(self.theirs.requests[name].is_prefill_chunk for name in theirs.num_scheduled_tokens)
        return bool(theirs.total_num_scheduled_tokens)

    def note(self, outputs: dict[int, Any]) -> None:
        for to_client in outputs.values():
            for output in to_client.outputs:
                if output.prefill_stats is not None:
                    self.seen["hit tokens"] += output.prefill_stats.num_cached_tokens
                if output.finish_reason is not None:
                    self.seen[str(output.finish_reason)] += 1
                    self.end(output.request_id)

    def compare_pools(self) -> None:
        """Compare every block."""
        self.both(
            lambda side: [block.block_id for block in side.manager.block_pool.free_block_queue.get_all_free_blocks()]
        )
        # Block 0 belongs to nobody.
        self.both(lambda side: [(block.ref_cnt, block.block_hash) for block in side.manager.block_pool.blocks[1:]])
        self.both(lambda side: {name: side.manager.get_block_ids(name) for name in side.requests})
        self.ours.manager._core.audit()
        self.seen["compared pools"] += 1


def reset_while_running(side: Side) -> bool:
    """Preempt all requests and forget all hashes."""
    try:
        done: bool = side.scheduler.reset_prefix_cache(reset_running_requests=True)
    except RuntimeError:
        # vLLM's scheduler does not do it while blocks wait for steps in flight.
        assert side.scheduler.deferred_frees
        return False
    return done


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Life:
    """An engine as it is, and one that the plugin has been loaded for."""
    variant: Variant = request.param
    print(f"LOCKSTEP_KV_SEED={SEED}")  # noqa: T201 - pytest shows it when the test fails
    kv_cache_utils.init_none_hash(sha256)
    config = variant.vllm_config(tmp_path)
    patches.restore()
    theirs = Side(variant, config)
    monkeypatch.setenv(plugin.SWITCH, "require")
    plugin.register()
    try:
        ours = Side(variant, config)
    finally:
        patches.restore()
    assert type(theirs.manager) is KVCacheManager
    assert type(ours.manager) is LockstepKVCacheManager
    assert theirs.hasher_maker is not request_block_hasher
    assert ours.hasher_maker is request_block_hasher
    return Life(variant, theirs, ours)


SYNC = Variant(20_000)
ASYNC = Variant(3000, is_async=True)
VARIANTS = {
    "sync": SYNC,
    "async": ASYNC,
    "async_deferred": replace(ASYNC, requests=1000, deferred=True),
    "two_groups": Variant(2000, block_sizes=(16, 32), num_blocks=230),
    "watermark": Variant(1000, watermark=0.05, whole_prompts=False),
    "no_caching": Variant(1000, caching=False),
    "ngram": Variant(1000, drafter="ngram"),
    "eagle": Variant(1000, drafter="eagle"),
    "eagle_async_two_groups": Variant(
        1000, block_sizes=(16, 16), num_blocks=260, drafter="eagle", drafting_group=1, is_async=True
    ),
}


@pytest.mark.parametrize("life", VARIANTS.values(), ids=VARIANTS, indirect=True)
def test_every_step_is_the_same(life: Life) -> None:
    life.run()
    # What makes it worth comparing has happened.
    seen, variant = life.seen, life.variant
    print(f"{life.steps} steps: {dict(seen)}")  # noqa: T201 - the same
    wanted = {"preempted": variant.requests // 200, "chunks": variant.requests // 4, "aborted": variant.requests // 50}
    wanted |= dict.fromkeys(["resumed", "stop", "length", "idle"], 1)
    if variant.caching:
        # Removed are blocks that are evicted one by one.
        wanted |= {"BlockRemoved": 10 * variant.num_blocks, "AllBlocksCleared": 1, "hit tokens": 10 * variant.requests}
    if variant.drafter:
        wanted["drafts"] = variant.requests
    if variant.deferred:
        wanted["deferred frees"] = 1
    assert {what: seen[what] for what, count in wanted.items() if seen[what] < count} == {}
