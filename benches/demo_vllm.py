"""A real vLLM engine on the CPU, stock and with the plugin, on the same prompts: its results and the manager's time.

Each side is a process of its own with a small Llama of random weights. Tokens and cached tokens must be equal. Needs
vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

MODELS = Path(__file__).resolve().parents[1] / "tests" / "data" / "tiny-models.json"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The model is too small to gain from threads.
    "OMP_NUM_THREADS": "1",
}
TIMED = (
    "get_computed_blocks",
    "allocate_slots",
    "free",
    "cache_blocks",
    "get_blocks",
    "take_new_block_ids",
    "take_kv_cache_block_copies",
    "take_boundary_state_offloads",
    "new_step_starts",
)


def time_manager(manager: Any) -> dict[str, float]:
    """Count the seconds and calls of the manager's methods from now on."""
    spent = {"seconds": 0.0, "calls": 0.0}

    def timed(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **kwargs)
            spent["seconds"] += time.perf_counter() - start
            spent["calls"] += 1
            return result

        return call

    for name in TIMED:
        setattr(manager, name, timed(getattr(manager, name)))
    return spent


def run_engine(folder: str, requests: int, output: str) -> None:
    """One side."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        block_size=32,
        num_gpu_blocks_override=1200,
        max_num_seqs=256,
        seed=1,
    )
    core: Any = llm.llm_engine.engine_core
    manager = core.engine_core.scheduler.kv_cache_manager
    sampling = SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True, detokenize=False)
    shared = [at * 7 % 990 + 5 for at in range(256)]
    prompts: Any = [{"prompt_token_ids": shared + [at % 900 + 50] * (at % 60 + 1)} for at in range(requests)]
    llm.generate(prompts[:4], sampling, use_tqdm=False)
    llm.reset_prefix_cache()
    spent = time_manager(manager)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=sys.stderr.isatty())
    seconds = time.perf_counter() - start
    found = {
        "manager": type(manager).__name__,
        "tokens": [list(one.outputs[0].token_ids) for one in outputs],
        "cached": [one.num_cached_tokens for one in outputs],
        "seconds": seconds,
        **{f"manager_{name}": value for name, value in spent.items()},
    }
    Path(output).write_text(json.dumps(found), encoding="utf-8")


def main(
    requests: Annotated[int, typer.Option(help="Prompts, with 256 tokens in common.", min=1)] = 512,
    side: Annotated[str, typer.Option(help="Run one side with this model folder.", hidden=True)] = "",
    output: Annotated[str, typer.Option(help="Where that side writes.", hidden=True)] = "",
) -> None:
    """Run both sides and compare."""
    if side:
        run_engine(side, requests, output)
        return
    sides = {}
    with tempfile.TemporaryDirectory() as folder:
        model = json.loads(MODELS.read_text(encoding="utf-8"))["llama"]
        (Path(folder) / "config.json").write_text(json.dumps(model), encoding="utf-8")
        for mode in ("off", "require"):
            output = f"{folder}/{mode}.json"
            command = [sys.executable, __file__, "--requests", str(requests), "--side", folder, "--output", output]
            subprocess.run(command, env={**os.environ, **ENVIRONMENT, "LOCKSTEP_KV": mode}, check=True)  # noqa: S603
            sides[mode] = json.loads(Path(output).read_text(encoding="utf-8"))
    stock, ours = sides["off"], sides["require"]
    table = Table(
        "", stock["manager"], ours["manager"], title=f"{requests} requests of 128 tokens", title_justify="left"
    )
    table.add_row("tokens made", *(f"{sum(map(len, side['tokens'])):,}" for side in (stock, ours)))
    table.add_row("cached tokens", *(f"{sum(side['cached']):,}" for side in (stock, ours)))
    table.add_row("seconds in all", *(f"{side['seconds']:.2f}" for side in (stock, ours)))
    table.add_row("seconds in the manager", *(f"{side['manager_seconds']:.3f}" for side in (stock, ours)))
    table.add_row("calls of the manager", *(f"{side['manager_calls']:,.0f}" for side in (stock, ours)))
    console = Console()
    console.print(table)
    for what in ("tokens", "cached"):
        if stock[what] != ours[what]:
            sys.exit(f"demo-vllm: {what} differ")
    ratio = stock["manager_seconds"] / ours["manager_seconds"]
    console.print(f"Tokens and cached tokens are equal; the manager takes {ratio:.1f} times less time.")


if __name__ == "__main__":
    typer.run(main)
