"""What a decode step of one request costs by the blocks that the request has already, for every kind of cache.

Timed: `allocate_slots` for one token more, with what windows and states give back and what is published.
"""

from __future__ import annotations

import platform
import statistics
import time
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lockstep_kv import Coordinator, CoordinatorConfig, GroupSpec, LayerSpec

BLOCK = 4
LENGTHS = (1_000, 10_000, 100_000)
STEPS = 400
KINDS: dict[str, list[dict[str, Any]]] = {
    "full": [{"kind": "full"}],
    "mla, lockstep pair": [{"kind": "mla"}, {"kind": "mla", "block_size": 2 * BLOCK, "kv_shards": 1}],
    "sliding_window": [{"kind": "sliding_window", "sliding_window": 512}],
    "reference_window": [{"kind": "reference_window", "sliding_window": 512}],
    "chunked_local": [{"kind": "chunked_local", "attention_chunk_size": 1024}],
    "mamba all": [{"kind": "mamba", "mamba_cache_mode": "all"}],
    "mamba align": [{"kind": "mamba", "mamba_cache_mode": "align"}],
    "full, circular_buffer": [{"kind": "full"}, {"kind": "circular_buffer"}],
    "full, sliding_window, mamba align": [
        {"kind": "full"},
        {"kind": "sliding_window", "sliding_window": 512},
        {"kind": "mamba", "mamba_cache_mode": "align"},
    ],
}


def coordinator(groups: list[dict[str, Any]], blocks: int) -> Coordinator:
    """A coordinator of these groups with room for a request of so many blocks in each."""
    specs = [
        GroupSpec(**{"block_size": BLOCK, "layers": [LayerSpec(f"layer.{at}", 8)], **group})
        for at, group in enumerate(groups)
    ]
    ranks = 2 if len({group["kind"] for group in groups}) == 1 < len(groups) else 1
    room = (len(groups) + 1) * (blocks + STEPS) + 100
    return Coordinator(CoordinatorConfig(specs, room, dcp_world_size=ranks, max_model_len=4 * BLOCK * (blocks + STEPS)))


def step_nanoseconds(groups: list[dict[str, Any]], blocks: int) -> float:
    """The median of some steps of a request that has so many blocks."""
    c = coordinator(groups, blocks)
    span = c.sets[0].tokens_per_block
    computed = span * blocks
    hashes = [at.to_bytes(32, "big") for at in range(computed // c.hash_block_tokens + 2 * STEPS)]
    prompt = computed // 2
    # Grown in a few steps, so that windows and states have given back what they do not need.
    for end in (prompt, computed - span, computed):
        grow(c, hashes, prompt, end)
    times = []
    for at in range(STEPS):
        start = time.perf_counter_ns()
        grow(c, hashes, prompt, computed + at + 1)
        times.append(time.perf_counter_ns() - start)
        c.new_step()
        c.take_state_offers()
    return statistics.median(times)


def grow(c: Coordinator, hashes: list[bytes], prompt: int, tokens: int) -> None:
    """One step up to so many tokens."""
    c.allocate_slots(
        "request",
        tokens,
        processed_tokens=max(tokens - 1, 1),
        computed_tokens=tokens - 1,
        block_hashes=hashes,
        cache_tokens=tokens,
        num_prompt_tokens=prompt,
    )


def main() -> None:
    """Print the table."""
    console = Console()
    table = Table("kind", *[f"{length:,}" for length in LENGTHS], "last : first", title="nanoseconds a step, by blocks")
    for name, groups in track(KINDS.items(), console=console):
        times = [step_nanoseconds(groups, length) for length in LENGTHS]
        table.add_row(name, *[f"{ns:,.0f}" for ns in times], f"{times[-1] / times[0]:.2f}")
    console.print(table)
    console.print(f"medians of {STEPS} steps, Python {platform.python_version()}, {platform.machine()}")


if __name__ == "__main__":
    main()
