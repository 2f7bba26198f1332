"""Real vLLM engines on the CPU, stock and with the plugin, each in its own process. Everything they do must be equal.

Compared are tokens, cached tokens, metrics, and for every step which requests it ran, with which new blocks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recording import RECORD

__all__ = ["ASYNC", "MODELS", "SYNC", "Outcome", "assert_same"]

SUPPORT = Path(__file__).resolve().parent
MODELS: dict[str, dict[str, Any]] = json.loads(
    (SUPPORT.parent / "data" / "tiny-models.json").read_text(encoding="utf-8")
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
ENGINE = {"max_model_len": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 256, "disable_log_stats": False}
SYNC = {"scheduler_cls": "recording.RecordingScheduler", "async_scheduling": False}
ASYNC = {"scheduler_cls": "recording.RecordingAsyncScheduler", "async_scheduling": True}
MODES = {"off": "KVCacheManager", "require": "LockstepKVCacheManager"}
SECONDS = 600

Outcome = tuple[dict[str, Any], list[dict[str, Any]]]
"""What came out of the scenes, and what was scheduled in each step."""


def run(
    folder: Path,
    mode: str,
    model: str,
    scenes: str,
    engine: dict[str, Any],
    environment: dict[str, str],
    files: dict[str, Any],
    program: str,
) -> Outcome:
    """Run one engine in a folder of its own. files: beside the model's configuration. program: of this folder."""
    folder = folder / mode
    folder.mkdir()
    for name, content in ({"config.json": MODELS[model]} | files).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    record, output = folder / "record.jsonl", folder / "output.json"
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **ENVIRONMENT, **environment, "LOCKSTEP_KV": mode, RECORD: str(record), "PYTHONPATH": path}
    command: list[str | Path] = [sys.executable, SUPPORT / program, folder, output, scenes]
    command.append(json.dumps(ENGINE | engine))
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert {step.pop("manager") for step in steps} == {MODES[mode]}
    return json.loads(output.read_text(encoding="utf-8")), steps


def assert_same(
    folder: Path,
    model: str,
    scenes: str,
    engine: dict[str, Any],
    environment: dict[str, str] | None = None,
    files: dict[str, Any] | None = None,
    program: str = "engine_run.py",
) -> Outcome:
    """Run both ways at once and compare. Returns what the plugin's engine did."""
    with ThreadPoolExecutor(len(MODES)) as threads:
        asked = [
            threads.submit(run, folder, mode, model, scenes, engine, environment or {}, files or {}, program)
            for mode in MODES
        ]
        (stock, stock_steps), (ours, our_steps) = (one.result() for one in asked)
    for name, expected in stock["scenes"].items():
        assert ours["scenes"][name] == expected, name
    assert ours == stock
    for number, (step, stock_step) in enumerate(zip(our_steps, stock_steps, strict=True)):
        assert step == stock_step, f"step {number}"
    return ours, our_steps
