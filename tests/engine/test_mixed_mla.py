"""Two caches with different numbers of shards in real vLLM engines on the CPU, on 1, 2 and 4 decode ranks.

The model is the tests' own, in plain torch: a latent cache and a sparse indexer in each layer, and seeded weights with
which each token depends on those before it. Planner, scheduler, workers, block tables and collectives are vLLM's.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import numpy as np
from recording import RECORD

from lockstep_kv.vllm.shards import REPLICATE, SHARDS

SUPPORT = Path(__file__).resolve().parents[1] / "support"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM would give each rank a memory node of its own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
}
ENGINE = {
    "load_format": "tiny",
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "async_scheduling": False,
    "scheduler_cls": "recording.RecordingScheduler",
}
LAYERS = 2
LATENT_BYTES, INDEX_BYTES = 32 * 4, 16 * 4
"""Of one token in one layer."""


@dataclass(frozen=True)
class Mode:
    """One engine. Pools hold 704 tokens or 768, and vLLM's null block."""

    ranks: int
    shards: int
    blocks: int
    scenes: str
    switch: tuple[str, str] | None = None
    interleave: int = 1
    ours: bool = True


ONE = Mode(1, 1, 24, "shared,evicted,growing")
SHARDED = Mode(2, 2, 12, "shared,evicted,growing,wrong_merge")
REPLICATED = Mode(2, 1, 12, "shared,evicted,growing,wrong_slots", (REPLICATE, "1"))
STOCK = Mode(2, 1, 12, "shared,evicted,growing", (REPLICATE, "1"), ours=False)
PARTIAL = Mode(4, 2, 7, "shared,evicted", (SHARDS, "2"), interleave=16)
NAMES = {ONE: "one rank", SHARDED: "sharded", REPLICATED: "replicated", STOCK: "stock", PARTIAL: "partial"}
several_ranks = pytest.mark.parametrize("mode", [SHARDED, REPLICATED, STOCK, PARTIAL], ids=NAMES.get)
two_ranks = pytest.mark.parametrize("mode", [SHARDED, REPLICATED, STOCK], ids=NAMES.get)


@dataclass(frozen=True)
class Run:
    """What came out of an engine, what was scheduled in each step, and what was in the caches in the end."""

    output: dict[str, Any]
    steps: list[dict[str, Any]]
    caches: dict[str, np.ndarray[Any, Any]]

    def tokens(self, scene: str) -> list[list[int]]:
        return [answer for ((answer,), _) in self.output["scenes"][scene]]

    def hits(self, scene: str) -> list[int]:
        return [cached for _, cached in self.output["scenes"][scene]]


@functools.cache
def run_of(mode: Mode) -> Run:
    """Run an engine once in a process of its own, with one process for each rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record, output, caches = folder / "record.jsonl", folder / "output.json", folder / "caches.npz"
        path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
        env = {key: value for key, value in os.environ.items() if key not in (REPLICATE, SHARDS)}
        env |= {**ENVIRONMENT, RECORD: str(record), "PYTHONPATH": path}
        env |= {"LOCKSTEP_KV": "require" if mode.ours else "off"} | dict([mode.switch] if mode.switch else [])
        engine = ENGINE | {
            "tensor_parallel_size": mode.ranks,
            "decode_context_parallel_size": mode.ranks,
            "num_gpu_blocks_override": mode.blocks,
            "cp_kv_cache_interleave_size": mode.interleave,
        }
        command: list[str | Path] = [
            sys.executable,
            SUPPORT / "mixed_mla_run.py",
            folder,
            output,
            mode.scenes,
            json.dumps(engine),
        ]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        steps = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
        assert {step.pop("manager") for step in steps} == {"LockstepKVCacheManager" if mode.ours else "KVCacheManager"}
        return Run(json.loads(output.read_text(encoding="utf-8")), steps, dict(np.load(caches)))


@several_ranks
def test_the_greedy_tokens_are_those_of_one_rank(mode: Mode) -> None:
    one, several = run_of(ONE), run_of(mode)
    for scene in mode.scenes.split(","):
        if not scene.startswith("wrong"):
            assert several.tokens(scene) == one.tokens(scene), scene


@pytest.mark.parametrize(("mode", "scene"), [(SHARDED, "wrong_merge"), (REPLICATED, "wrong_slots")], ids=str)
def test_tokens_tell_what_goes_wrong(mode: Mode, scene: str) -> None:
    """Without the merge of candidates, or with vLLM's slots for a replicated indexer, no answer stays the same."""
    right, wrong = run_of(mode).tokens("shared"), run_of(mode).tokens(scene)
    assert all(one != other for one, other in zip(right, wrong, strict=True))


@several_ranks
def test_one_group_and_the_bytes_of_its_blocks(mode: Mode) -> None:
    plan = run_of(mode).output["plan"]
    (names,) = plan["groups"]
    assert len(names) == 2 * LAYERS
    assert plan["blocks"] == mode.blocks
    copies = mode.ranks // mode.shards
    assert plan["bytes_per_block"] == LAYERS * 32 * (LATENT_BYTES + copies * INDEX_BYTES)


def test_a_replicated_indexer_takes_more_bytes_per_block() -> None:
    sharded, replicated = (run_of(mode).output["plan"]["bytes_per_block"] for mode in (SHARDED, REPLICATED))
    assert (sharded, replicated) == (12_288, 16_384)


def test_every_step_and_block_is_the_same_with_either_indexer() -> None:
    sharded, replicated = run_of(SHARDED), run_of(REPLICATED)
    assert blocks_of_requests(sharded) == blocks_of_requests(replicated)
    for number, (step, other) in enumerate(zip(sharded.steps, replicated.steps, strict=True)):
        assert step == other, f"step {number}"


def test_vllm_s_own_manager_does_the_same() -> None:
    stock, ours = run_of(STOCK), run_of(REPLICATED)
    for number, (step, other) in enumerate(zip(stock.steps, ours.steps, strict=False)):
        assert step == other, f"step {number}"
    for scene in STOCK.scenes.split(","):
        assert stock.output["scenes"][scene] == ours.output["scenes"][scene]


@two_ranks
def test_the_load_chunks_hits_evicts_and_preempts(mode: Mode) -> None:
    run = run_of(mode)
    assert run.output["prefix_caching"]
    assert run.output["chunked_prefill"]
    first = run.steps[0]
    assert first["scheduled"] == [[0, 128]], "a prompt of 280 tokens in chunks"
    assert any({count for _, count in step["scheduled"]} > {1} for step in run.steps), "decodes beside a prefill"
    assert run.hits("shared") == [0, 128, 0, 256, 256]
    assert run.hits("evicted") == [0, 0, 0, 128, 256], "256 without evictions"
    assert sum(len(step["preempted"]) for step in run.steps) >= 3
    assert any(step["resumed"] for step in run.steps)
    assert sum(map(len, blocks_of_requests(run).values())) > 3 * mode.blocks, "blocks are used again"


def test_a_replicated_cache_holds_all_shards_bit_by_bit() -> None:
    """Every block of every rank, those of requests that are long gone included; the null block is never written."""
    sharded, replicated = run_of(SHARDED).caches, run_of(REPLICATED).caches
    for layer in range(LAYERS):
        parts = [sharded[f"{rank} layers.{layer}.indexer.cache"] for rank in range(2)]
        whole = np.stack(parts, axis=2).reshape(SHARDED.blocks, 64, 16)
        for rank in range(2):
            assert np.array_equal(whole, replicated[f"{rank} layers.{layer}.indexer.cache"])
            latent = f"{rank} layers.{layer}.attn"
            assert np.array_equal(sharded[latent], replicated[latent])
    for cache in (*sharded.values(), *replicated.values()):
        assert (cache[1:] != 0).any(axis=(1, 2)).all()
        assert not cache[0].any()


def test_ranks_of_one_shard_hold_the_same() -> None:
    caches = run_of(PARTIAL).caches
    for layer in range(LAYERS):
        held = [caches[f"{rank} layers.{layer}.indexer.cache"] for rank in range(4)]
        assert held[0].shape == (PARTIAL.blocks, 64, 16)
        assert np.array_equal(held[0], held[2])
        assert np.array_equal(held[1], held[3])
        assert not np.array_equal(held[0], held[1])


def blocks_of_requests(run: Run) -> dict[int, list[int]]:
    """All blocks that each request was given, in order."""
    blocks: dict[int, list[int]] = {}
    for step in run.steps:
        for request, _, rows in step["new"] + step["cached"]:
            (row,) = rows or [[]]
            blocks.setdefault(request, []).extend(row)
    return blocks
