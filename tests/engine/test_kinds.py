"""Every kind of cache that vLLM 0.32 runs on the CPU: a real engine, stock and with the plugin, does the same.

The weights make each token depend on all before it. What vLLM has for GPUs only is filled in by `cpu_kernels`, or its
Triton kernels run in Triton's interpreter; which blocks they read and write is up to vLLM either way.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import engines
import torch
from engines import MODELS, SYNC

if TYPE_CHECKING:
    from pathlib import Path

# With what vLLM lacks on the CPU filled in.
assert_same = functools.partial(engines.assert_same, program="kinds_run.py")
GREEDY = "shared_prefixes,eviction,preemption,chunked_prefill,aborts,reset,salted,one_by_one"
# With speculation vLLM 0.32 on the CPU draws differently each time it starts, so that nothing is sampled there.
MANY = f"{GREEDY},several_answers"
TINY = {"load_format": "tiny", "block_size": 32, **SYNC}
# What it is depends on the processor otherwise, and the size of a block on it.
STATE = {"mamba_ssm_cache_dtype": "float32"}
INTERPRETED = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
NO_CACHING = {"enable_prefix_caching": False}


@dataclass(frozen=True)
class Case:
    """A model, and what its scenes have to show."""

    model: str
    blocks: int
    engine: dict[str, Any] = field(default_factory=dict)
    scenes: str = MANY
    environment: dict[str, str] = field(default_factory=dict)
    hits: bool = True
    preempts: bool = True
    has_gaps: bool = False
    """Rows have null blocks, where the group has given blocks back or never had them."""


CASES = {
    "sliding window": Case("gemma3", 90, has_gaps=True),
    "chunked local": Case("llama4", 100, has_gaps=True),
    "mamba, align": Case("lfm2", 46, has_gaps=True),
    "mamba, none": Case("lfm2", 40, NO_CACHING, hits=False),
    "mamba alone, align": Case("mamba", 7, {**STATE, "enable_prefix_caching": True, "dtype": "float32"}, has_gaps=True),
    "mamba alone, none": Case("mamba2", 6, STATE, hits=False, preempts=False),
    "mamba, align, checkpoints": Case("zamba2", 46, STATE, has_gaps=True),
    "mamba, align, hits inside a block": Case("granite_hybrid", 24, {**STATE, "prefix_match_unit": 32}, has_gaps=True),
    "mamba, align, gated delta rule": Case("qwen3_next", 24, STATE, has_gaps=True),
    "reference window": Case("deepseek_rswa", 40, scenes=f"{MANY},long_answers"),
    "circular buffer": Case("ring", 80),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kind(tmp_path: Path, case: Case) -> None:
    engine = {**TINY, "num_gpu_blocks_override": case.blocks, **case.engine}
    found, steps = assert_same(tmp_path, case.model, case.scenes, engine, case.environment)
    assert any(step["preempted"] for step in steps) == case.preempts
    assert any(0 in row for step in steps for _, _, rows in step["new"] for row in rows) == case.has_gaps
    scenes = found["scenes"]
    hits = [cached for _, cached in scenes["shared_prefixes"] + scenes["eviction"] + scenes["one_by_one"]]
    assert any(hits) == case.hits
    if case.hits:
        # Some prompts that came before are found, others are evicted.
        assert 0 in [cached for _, cached in scenes["eviction"]][7:]
        assert any(cached for _, cached in scenes["eviction"][7:])
    if "long_answers" in scenes:
        # Three times 570 tokens are 54 blocks; of each request the prompt's 3 and the window's 3 are held.
        assert min(step["free"] for step in steps[-400:]) == case.blocks - 1 - 18


# What a model that listens needs beside its configuration: it does not start without a tokenizer.
LISTENING = {
    "preprocessor_config.json": {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": 16,
        "chunk_length": 2,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": 16_000,
        "padding_value": 0.0,
        "return_attention_mask": False,
    },
    "tokenizer_config.json": {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor"},
    "vocab.json": {"<|endoftext|>": 0, "<|startoftranscript|>": 1, "a": 2},
    "merges.txt": "#version: 0.2\n",
}


def test_cross_attention(tmp_path: Path) -> None:
    engine = {**TINY, "num_gpu_blocks_override": 40, "max_model_len": 256, "skip_tokenizer_init": False}
    found, steps = assert_same(tmp_path, "whisper", "spoken", engine, files=LISTENING)
    assert any(step["preempted"] for step in steps)
    spoken = [outputs[0] for outputs, _ in found["scenes"]["spoken"]]
    assert len({tuple(one) for one in spoken}) == len(spoken)
    # The second group holds what was heard, from the start.
    assert {len(rows[1]) for step in steps for _, _, rows in step["new"]} == {4}


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's kernels for it need AMX")
def test_windows_of_latents_in_blocks_of_several_sizes(tmp_path: Path) -> None:
    engine = {**TINY, "block_size": 256, "num_gpu_blocks_override": 200}
    found, steps = assert_same(tmp_path, "deepseek_v4", "short,growing", engine, INTERPRETED)
    assert any(step["preempted"] for step in steps)
    assert any(cached for _, cached in found["scenes"]["short"])
    # Six groups, and windows of which a request that hits has the end only.
    assert any(len(rows) == 6 and rows[0][0] == 0 for step in steps for _, _, rows in step["new"])


@pytest.mark.parametrize(("method", "scenes"), [("ngram", "short"), ("eagle", GREEDY), ("draft_model", GREEDY)])
def test_speculation(tmp_path: Path, method: str, scenes: str) -> None:
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "ngram":
        speculation["prompt_lookup_max"] = 3
    else:
        # The draft of one layer guesses; the model itself is always right.
        draft = tmp_path / "draft"
        draft.mkdir()
        model = MODELS["eagle" if method == "eagle" else "llama"]
        (draft / "config.json").write_text(json.dumps(model), encoding="utf-8")
        speculation["model"] = str(draft)
    engine = {**TINY, "num_gpu_blocks_override": 44}
    _, steps = assert_same(tmp_path, "llama", scenes, engine | {"speculative_config": speculation})
    assert any(step["preempted"] for step in steps) == (scenes == GREEDY)


def test_speculation_beside_a_mamba_group_without_caching(tmp_path: Path) -> None:
    engine = {**TINY, **STATE, **NO_CACHING, "num_gpu_blocks_override": 30}
    engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    _, steps = assert_same(tmp_path, "qwen3_next", GREEDY, engine)
    assert any(step["preempted"] for step in steps)


def test_speculation_beside_a_mamba_group(tmp_path: Path) -> None:
    engine = {**TINY, **STATE, "num_gpu_blocks_override": 32}
    engine |= {"prefix_match_unit": 32, "enable_mamba_shared_prefix_checkpoint": True}
    engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 2}
    found, steps = assert_same(tmp_path, "qwen3_next", "short", engine, INTERPRETED)
    assert any(step["preempted"] for step in steps)
    # Blocks are of 96 tokens: a state was found inside one.
    assert any(cached % 96 for _, cached in found["scenes"]["short"])
