"""A real vLLM engine on the CPU as it is, stock and with the plugin, does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from engines import ASYNC, SYNC, assert_same

ALL = (
    "shared_prefixes,eviction,preemption,chunked_prefill,aborts,reset,several_samples,salted,prompt_logprobs,one_by_one"
)
SMALL_POOL = {"block_size": 32, "num_gpu_blocks_override": 40}


@pytest.mark.parametrize("scheduling", [SYNC, ASYNC], ids=["sync", "async"])
def test_full_attention(tmp_path: Path, scheduling: dict[str, Any]) -> None:
    found, steps = assert_same(tmp_path, "llama", ALL, {**SMALL_POOL, **scheduling})
    # The scenes do what they are for.
    assert any(step["preempted"] for step in steps)
    assert any(step["resumed"] for step in steps)
    assert any(count < 900 and count > 200 for step in steps for _, count in step["scheduled"])
    scenes = found["scenes"]
    assert max(cached for _, cached in scenes["shared_prefixes"]) > 0
    assert [cached for _, cached in scenes["eviction"]][-4:] != [0, 0, 0, 0]
    assert 0 in [cached for _, cached in scenes["eviction"]][7:]
    assert scenes["reset"][1] is True
    assert scenes["reset"][2][0][1] == 0
    assert [group[0][1] > 0 for group in scenes["salted"]] == [False, True, False, True, False]
    assert found["metrics"]["vllm:num_preemptions"] > 0


def test_latent_attention(tmp_path: Path) -> None:
    # On the CPU vLLM turns prefix caching and chunked prefill off for MLA.
    scenes = "shared_prefixes,preemption,aborts,several_samples,one_by_one"
    # Its kernel for processors with AMX takes other blocks than the one for all.
    block_size = 32 if "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8") else 16
    pool = {"block_size": block_size, "num_gpu_blocks_override": 1280 // block_size}
    engine = {**pool, "max_num_batched_tokens": 1024, **SYNC}
    _, steps = assert_same(tmp_path, "deepseek_v2", scenes, engine)
    assert any(step["preempted"] for step in steps)


def test_sliding_windows(tmp_path: Path) -> None:
    engine = {"block_size": 32, "num_gpu_blocks_override": 90, **SYNC}
    found, steps = assert_same(tmp_path, "gemma3", ALL, engine)
    assert any(step["preempted"] for step in steps)
    assert max(cached for _, cached in found["scenes"]["shared_prefixes"]) > 0
    # Blocks behind the window are given back while the request runs.
    assert any(0 in row for step in steps for _, _, rows in step["new"] for row in rows)


def test_an_engine_core_in_another_process(tmp_path: Path) -> None:
    assert_same(tmp_path, "llama", "one_by_one", {**SMALL_POOL, **SYNC}, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"})


def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    engine = {**SMALL_POOL, **SYNC, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert_same(tmp_path, "llama", "one_by_one", engine, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"})
