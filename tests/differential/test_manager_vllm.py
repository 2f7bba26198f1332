"""`LockstepKVCacheManager` against vLLM's own `KVCacheManager`: the same calls on the same requests, compared in full.

`python -m tests.differential --hours 1` leads random lives for as long as wanted.
"""

from __future__ import annotations

import os
import random
import sys

import pytest

os.environ.setdefault("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from operations import lead
from rounds import Rounds
from stock import Config, Group

SECONDS = float(os.environ.get("LOCKSTEP_KV_SECONDS", "60"))
OPTIONS = {"log_stats": True, "watermark": 0.0, "metrics": False, "zeroes": False, "enable_kv_cache_events": True}


def test_every_call_gives_what_vllm_gives(capsys: pytest.CaptureFixture[str]) -> None:
    """Random lives over random configurations of all kinds. The seed is logged, a difference told as a small test."""
    rounds = Rounds(random.randrange(2**32))
    first = rounds.seed
    try:
        rounds.lead_for(SECONDS)
    except Exception:
        with capsys.disabled():
            sys.stdout.write(f"\nround with seed {rounds.seed}:\n{rounds.smallest}\n")
        raise
    with capsys.disabled():
        sys.stdout.write(f"\n{rounds.lives:,} lives, {rounds.steps:,} steps, seeds {first} to {rounds.seed - 1}\n")
    kinds = {"full", "mla", "sliding_window", "reference_window", "chunked_local", "circular_buffer", "cross_attention"}
    assert kinds | {"mamba none", "mamba all", "mamba align"} <= set(rounds.seen) or rounds.lives < 500


def test_a_block_given_back_twice_at_once_is_queued_last() -> None:
    """Two requests go on from one state inside a block in one step: their copies give it back twice at once."""
    full = Group("full", 2, sharded=True, width=8, is_eagle=False)
    state = Group("mamba", 8, sharded=False, width=8, is_eagle=False, mode="align")
    config = Config((full, state), num_blocks=9, dcp=1, enable_caching=True, use_eagle=False)
    admit = ("admit all", 0)
    prompts = [("start", 0, length, None, "incremental") for length in (7, 8)]
    _, steps = lead(config, OPTIONS, [*prompts, admit, ("tick",), ("preempt", 0), admit, admit])
    assert steps > len(prompts) + 5


def test_a_store_that_tells_of_no_hash_parts_no_removals() -> None:
    """Where no state is kept, vLLM tells of a store without hashes between the removals of two groups."""
    state = Group("mamba", 16, sharded=False, width=8, is_eagle=False, mode="align")
    full = Group("full", 16, sharded=True, width=8, is_eagle=False)
    config = Config(
        (state, full, full), num_blocks=12, dcp=1, enable_caching=True, use_eagle=True, finer=2, retention=0
    )
    admit = ("admit all", 0)
    prompts = [("start", 3, 1, None, "incremental"), admit, ("start", 3, 31, None, "incremental"), admit]
    steps = [("end", 0, True), ("step", 0, 15, 0, 0, 0, False), ("step", 0, 1, 3, 0, 0, False)]
    lead(config, OPTIONS, [*prompts, *steps])
