"""A decode step of 1,000 running requests through vLLM's own manager and the plugin's, in turns, in one process.

Timed per request: `allocate_slots` for one token and reading the new block ids, as the scheduler does. Needs vLLM 0.32.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from lockstep_kv.vllm import LockstepKVCacheManager

PROMPT = 200
STEPS = 40


def manager(cls: type[Any], *, window: bool) -> Any:
    """A manager of one full-attention group, or of that and a sliding window."""
    shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if window:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=512)))
    return cls(
        KVCacheConfig(40_000, [], groups),
        max_model_len=4096,
        scheduler_block_size=16,
        hash_block_size=16,
        max_in_flight_tokens=8192,
    )


def decode(serves: Any, requests: int) -> float:
    """Microseconds per request and step."""
    hasher = get_request_block_hasher(16, sha256)
    sampling = SamplingParams(max_tokens=500)
    running = [Request(str(at), [at] * PROMPT, sampling, None, block_hasher=hasher) for at in range(requests)]
    for request in running:
        serves.allocate_slots(request, PROMPT)
        request.num_computed_tokens = PROMPT
    seconds = 0.0
    for _ in range(STEPS):
        for request in running:
            request.append_output_token_ids(7)
        start = time.perf_counter()
        for request in running:
            serves.allocate_slots(request, 1).get_block_ids(allow_none=True)
        seconds += time.perf_counter() - start
        for request in running:
            request.num_computed_tokens += 1
    return seconds / STEPS / requests * 1e6


def main(
    pairs: Annotated[int, typer.Option(help="Pairs of runs, each side first in turn.", min=1)] = 7,
    requests: Annotated[int, typer.Option(help="Running requests.", min=1)] = 1000,
) -> None:
    """Print the time of both sides and their ratio."""
    init_none_hash(sha256)
    table = Table("groups", "vLLM 0.32 (us)", "here (us)", "ratio, median", "ratio, range")
    for window, name in ((False, "full"), (True, "full, sliding window")):
        times: dict[type[Any], list[float]] = {KVCacheManager: [], LockstepKVCacheManager: []}
        for pair in track(range(pairs), description=name, console=Console(stderr=True)):
            for cls in list(times) if pair % 2 == 0 else list(times)[::-1]:
                gc.collect()
                times[cls].append(decode(manager(cls, window=window), requests))
        stock, ours = times.values()
        ratios = sorted(a / b for a, b in zip(stock, ours, strict=True))
        medians = (f"{statistics.median(side):.2f}" for side in (stock, ours))
        table.add_row(name, *medians, f"{statistics.median(ratios):.1f}", f"{ratios[0]:.1f} to {ratios[-1]:.1f}")
    console = Console()
    console.print(table)
    console.print(f"{pairs} pairs, Python {platform.python_version()}, garbage collector on, {platform.machine()}")


if __name__ == "__main__":
    typer.run(main)
