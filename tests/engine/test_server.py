"""`vllm serve` on the CPU, stock and with the plugin: HTTP answers, metrics, steps, KV events, and how it fails."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from engine_run import tokens
from engines import MODELS
from server import EventSubscriber, Server

if TYPE_CHECKING:
    from pathlib import Path

LLAMA = MODELS["llama"]
# Convolutions beside attention: vLLM keeps their state in a Mamba group.
LFM2 = MODELS["lfm2"]
SMALL_POOL = ["--num-gpu-blocks-override=40"]
ROOMY_POOL = ["--num-gpu-blocks-override=160"]
MODES = {"off": "KVCacheManager", "require": "LockstepKVCacheManager"}
METRICS = [
    "vllm:cache_config_info",
    "vllm:kv_block_idle_before_evict_seconds_count",
    "vllm:kv_block_lifetime_seconds_count",
    "vllm:kv_block_reuse_gap_seconds_count",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:prompt_tokens_total",
]
# Prompts of which the second half finds the first half's blocks, some of them evicted in between.
PROMPTS = [
    *(tokens(1, 200) + [last] * 40 for last in range(6, 12)),
    *(tokens(seed, count) for seed, count in ((2, 400), (3, 400), (4, 64), (5, 400), (2, 400), (4, 96), (6, 900))),
    *(tokens(1, 200) + [last] * 40 for last in range(6, 12)),
    *(tokens(seed, count) for seed, count in ((6, 900), (3, 400), (4, 64))),
]
LAST = tokens(99, 32)


@dataclass
class Served:
    """What one server did."""

    answers: list[dict[str, Any]]
    streamed: list[int]
    usage: float
    metrics: dict[str, float]
    steps: list[dict[str, Any]]
    events: list[tuple[int, Any]]
    concurrent: list[list[int]]
    all_steps: list[dict[str, Any]]


def serve(folder: Path, mode: str) -> Served:
    """Send one request after the other, then the same ones at once."""
    with EventSubscriber() as subscriber:
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": subscriber.endpoint}
        arguments = [*SMALL_POOL, f"--kv-events-config={json.dumps(events)}"]
        arguments += ["--kv-cache-metrics", "--kv-cache-metrics-sample=1.0"]
        # The prefix cache can be reset in development mode only.
        with Server(folder / mode, mode, LLAMA, arguments, {"VLLM_SERVER_DEV_MODE": "1"}) as server:
            server.wait_ready()
            answers = [server.complete(prompt, max_tokens=20) for prompt in PROMPTS]
            answers += [server.complete(tokens(7, 200), max_tokens=5, cache_salt=salt) for salt in ("a", "a", "b")]
            full = {"kv_cache_report_mode": "full"}
            answers.append(server.complete(tokens(7, 200), max_tokens=5, cache_salt="a", vllm_xargs=full))
            answers.append(server.complete(tokens(7, 200), max_tokens=5, session_id="chat"))
            streamed, usage = server.usage_while_streaming(tokens(8, 100), max_tokens=800)
            assert server.reset_prefix_cache()
            answers.append(server.complete(LAST, max_tokens=5))
            metrics = server.metrics_at_rest(METRICS)
            steps = server.steps()
            received = subscriber.until_stored(LAST)
            with ThreadPoolExecutor(8) as threads:
                asked = [threads.submit(server.complete, prompt, max_tokens=150) for prompt in PROMPTS[:16]]
                concurrent = [done.result()["tokens"] for done in asked]
            return Served(answers, streamed, usage, metrics, steps, received, concurrent, server.steps())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Served]:
    """Stock's server, and the plugin's."""
    folder = tmp_path_factory.mktemp("served")
    return serve(folder, "off"), serve(folder, "require")


def test_answers_and_steps(served: tuple[Served, Served]) -> None:
    stock, ours = served
    for one, manager in zip(served, MODES.values(), strict=True):
        assert {step.pop("manager") for step in one.steps} == {manager}
    assert ours.answers == stock.answers
    assert ours.streamed == stock.streamed
    for number, (step, expected) in enumerate(zip(ours.steps, stock.steps, strict=True)):
        assert step == expected, f"step {number}"
    # The prompts do what they are for.
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in ours.answers]
    assert cached[:6] == [0] + [192] * 5
    assert 0 in cached[13:22]
    assert any(cached[13:22])
    assert cached[22:27] == [0, 192, 0, 192, 0]
    assert cached[-1] == 0


def test_metrics(served: tuple[Served, Served]) -> None:
    stock, ours = served
    assert ours.metrics == stock.metrics
    assert {series.split("{")[0] for series in ours.metrics} == set(METRICS)
    totals = {series.split("{")[0]: value for series, value in ours.metrics.items()}
    assert totals["vllm:kv_cache_usage_perc"] == 0
    assert 0 < totals["vllm:prefix_cache_hits_total"] < totals["vllm:prefix_cache_queries_total"]
    assert totals["vllm:kv_block_lifetime_seconds_count"] > 0
    assert totals["vllm:kv_block_reuse_gap_seconds_count"] > 0
    for one in served:
        assert one.usage in {step["usage"] for step in one.steps if step["usage"]}


def test_kv_events(served: tuple[Served, Served]) -> None:
    stock, ours = served
    for number, (event, expected) in enumerate(zip(ours.events, stock.events, strict=False)):
        assert event == expected, f"event {number}"
    assert len(ours.events) == len(stock.events)
    assert {rank for rank, _ in ours.events} == {0}
    events = [event for _, event in ours.events]
    assert {event["type"] for event in events} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    stored = [event for event in events if event["type"] == "BlockStored"]
    assert any("a" in (key or ()) for event in stored for key in event["extra_keys"] or ())
    assert any(event.get("session_id") == "chat" for event in stored)


def test_concurrent_requests(served: tuple[Served, Served]) -> None:
    for one, manager in zip(served, MODES.values(), strict=True):
        # The first 20 tokens of the same prompts, sent one by one.
        alone = [answer["tokens"] for answer in one.answers[:16]]
        assert [found[:20] for found in one.concurrent] == alone
        steps = one.all_steps[len(one.steps) :]
        assert {step["manager"] for step in steps} == {manager}
        assert max(len(step["scheduled"]) for step in steps) > 4
        assert any(step["preempted"] for step in steps)
    assert served[0].concurrent == served[1].concurrent


def test_two_data_parallel_ranks(tmp_path: Path) -> None:
    found = []
    for mode, manager in MODES.items():
        arguments = [*SMALL_POOL, "--data-parallel-size=2", "--api-server-count=1"]
        environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        with Server(tmp_path / mode, mode, LLAMA, arguments, environment) as server:
            server.wait_ready()
            answers = [
                server.complete(prompt, rank=rank, max_tokens=20)
                for prompt in (*PROMPTS[:2], tokens(2, 700), tokens(3, 700), *PROMPTS[:2])
                for rank in (0, 1, 0)
            ]
            metrics = server.metrics_at_rest(METRICS)
            steps = server.steps()
        assert {step.pop("manager") for step in steps} == {manager}
        found.append((answers, metrics, steps))
    stock, ours = found
    assert ours == stock
    answers, metrics, _ = ours
    # Each rank has a cache of its own: the second one misses what the first one has, and the third request hits.
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[:6] == [0, 0, 224, 192, 192, 224]
    assert len([series for series in metrics if series.startswith("vllm:prefix_cache_hits_total")]) == 2


def test_an_unknown_value_of_the_switch(tmp_path: Path) -> None:
    with Server(tmp_path / "maybe", "maybe", LLAMA, SMALL_POOL, {}) as server:
        assert server.wait_ended() == 1
    ours = [line for line in server.log.splitlines() if "lockstep" in line.lower()]
    assert ours == ["lockstep-kv: LOCKSTEP_KV must be one of off, on, require, got 'maybe'"]
    assert "Traceback" not in server.log


def test_a_model_with_states_is_served(tmp_path: Path) -> None:
    with Server(tmp_path / "require", "require", LFM2, ROOMY_POOL, {}) as server:
        server.wait_ready()
        assert len(server.complete(tokens(1, 100), max_tokens=5)["tokens"]) == 5
        assert {step["manager"] for step in server.steps()} == {"LockstepKVCacheManager"}


# A hit could lack a block of its last chunk. vLLM's attention refuses such chunks too, when a request comes.
ODD_CHUNKS = {**MODELS["llama4"], "attention_chunk_size": 72}
REASON = "attention_chunk_size must be a multiple of the tokens per block 32, got 72"


def test_a_model_that_is_not_covered_is_left_to_stock(tmp_path: Path) -> None:
    with Server(tmp_path / "on", "on", ODD_CHUNKS, ROOMY_POOL, {}) as server:
        server.wait_ready()
    ours = [line for line in server.log.splitlines() if "lockstep-kv" in line.lower()]
    assert len(ours) == 1
    assert ours[0].endswith(f"lockstep-kv is off for this engine, vLLM's own manager runs: {REASON}")


def test_a_model_that_is_not_covered_fails_if_the_plugin_is_required(tmp_path: Path) -> None:
    with Server(tmp_path / "require", "require", ODD_CHUNKS, ROOMY_POOL, {}) as server:
        assert server.wait_ended() != 0
    assert f"LOCKSTEP_KV=require, but {REASON}" in server.log
