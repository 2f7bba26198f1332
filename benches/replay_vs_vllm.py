"""The same requests through stock vLLM's `KVCacheManager` and through a `Coordinator`, in turns, in one process.

Both sides replay a trace one request after the other on blocks of 512 tokens: look up, allocate, publish, free. Only
these calls are timed; requests and their block hashes are made beforehand. Hit tokens must be equal. Needs vLLM 0.32.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from lockstep_kv import Coordinator, CoordinatorConfig, GroupSpec, LayerSpec
from lockstep_kv.replay import longest_request, replay
from lockstep_kv.trace import TRACE_BLOCK_TOKENS, read_trace

if TYPE_CHECKING:
    from lockstep_kv.trace import TraceRequest


def stock_manager(num_blocks: int, max_model_len: int) -> KVCacheManager:
    """A stock manager with one full-attention group."""
    spec = FullAttentionSpec(block_size=TRACE_BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        max_model_len=max_model_len,
        scheduler_block_size=TRACE_BLOCK_TOKENS,
        hash_block_size=TRACE_BLOCK_TOKENS,
    )


def stock_request(number: int, request: TraceRequest, sampling: SamplingParams, tokens: list[int]) -> Request:
    """A request of vLLM's with the trace's block hashes."""
    made = Request(str(number), tokens[: request.input_length], sampling, None)
    full = request.input_length // TRACE_BLOCK_TOKENS
    made.block_hashes = [hash_id.to_bytes(32, "big") for hash_id in request.hash_ids[:full]]
    return made


def replay_stock(requests: list[TraceRequest], manager: KVCacheManager) -> tuple[int, float]:
    """Hit tokens, and seconds in the manager's calls."""
    sampling = SamplingParams(max_tokens=1)
    tokens = [0] * longest_request(requests)
    hit_tokens = 0
    seconds = 0.0
    for number, request in enumerate(requests):
        made = stock_request(number, request, sampling, tokens)
        start = time.perf_counter()
        blocks, num_hit, _ = manager.get_computed_blocks(made)
        allocated = manager.allocate_slots(
            made,
            request.input_length - num_hit,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=blocks,
            num_lookahead_tokens=request.output_length,
        )
        seconds += time.perf_counter() - start
        if allocated is None:
            continue
        hit_tokens += num_hit
        start = time.perf_counter()
        manager.free(made)
        seconds += time.perf_counter() - start
    return hit_tokens, seconds


def coordinator(num_blocks: int, max_model_len: int) -> Coordinator:
    """Ours, with the same group."""
    groups = [GroupSpec("full", TRACE_BLOCK_TOKENS, [LayerSpec("layer", 1)])]
    return Coordinator(CoordinatorConfig(groups, num_blocks, max_model_len=max_model_len))


def main(
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's format.")],
    pairs: Annotated[int, typer.Option(help="Pairs of runs, each side first in turn.")] = 7,
    num_blocks: Annotated[list[int], typer.Option(help="Pool sizes to compare at.")] = [5984, 50000],  # noqa: B006
) -> None:
    """Print the time of both sides and their ratio."""
    requests = read_trace(trace)
    longest = longest_request(requests)
    table = Table("blocks", "hit tokens", "vLLM 0.32 (s)", "here (s)", "ratio, median", "ratio, range")
    for blocks in num_blocks:
        times: dict[str, list[float]] = {"stock": [], "ours": []}
        hits: dict[str, Any] = {}
        for pair in track(range(pairs), description=f"{blocks} blocks", console=Console(stderr=True)):
            for side in ("stock", "ours") if pair % 2 == 0 else ("ours", "stock"):
                gc.collect()
                if side == "stock":
                    hits[side], seconds = replay_stock(requests, stock_manager(blocks, longest))
                else:
                    report = replay(requests, coordinator(blocks, longest))
                    hits[side], seconds = report.hit_tokens, report.seconds
                times[side].append(seconds)
        if hits["stock"] != hits["ours"]:
            raise SystemExit(f"hit tokens differ at {blocks} blocks: {hits}")
        ratios = sorted(a / b for a, b in zip(times["stock"], times["ours"], strict=True))
        table.add_row(
            f"{blocks:,}",
            f"{hits['ours']:,}",
            f"{statistics.median(times['stock']):.3f}",
            f"{statistics.median(times['ours']):.3f}",
            f"{statistics.median(ratios):.1f}",
            f"{ratios[0]:.1f} to {ratios[-1]:.1f}",
        )
    console = Console()
    console.print(table)
    console.print(f"{pairs} pairs, Python {platform.python_version()}, garbage collector on, {platform.machine()}")


if __name__ == "__main__":
    typer.run(main)
