"""Runs one real vLLM engine with the mixed model on the CPU and writes what came out as JSON.

Usage: mixed_mla_run.py FOLDER OUTPUT.json SCENE,SCENE,... '{"engine": "arguments"}'. Needs vLLM. vLLM starts its
workers with "spawn", which runs this file's top level again in each: what is registered here is registered there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mixed_mla_caches
import mixed_mla_model
import mixed_mla_platform
import numpy as np
import tiny_weights

from lockstep_kv.vllm import shards

if TYPE_CHECKING:
    from vllm import LLM

mixed_mla_platform.fill_in()
mixed_mla_model.register()
tiny_weights.register()
shards.register_switches()


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 131 + at * 7 + at * at) % 990 + 5 for at in range(count)]


def ask(llm: LLM, prompts: list[list[int]], count: int) -> Any:
    import engine_run

    return engine_run.generate(llm, [engine_run.prompt(one) for one in prompts], max_tokens=count, ignore_eos=True)


def shared(llm: LLM) -> Any:
    """Prompts that are cut in chunks, share half, and come again."""
    prompts = [tokens(95, 280), tokens(95, 140) + tokens(96, 140), tokens(97, 280)]
    return ask(llm, prompts, 12) + ask(llm, prompts[:2], 12)


def evicted(llm: LLM) -> Any:
    """One prompt after the other, two of them again: the pool does not hold all."""
    return [one for seed in (2, 3, 4, 2, 4) for one in ask(llm, [tokens(seed, 270)], 8)]


def growing(llm: LLM) -> Any:
    """Answers that outgrow the pool together."""
    return ask(llm, [tokens(120 + at, 40) for at in range(8)], 80)


def wrong_slots(llm: LLM) -> Any:
    """As `shared`, but an indexer of fewer shards writes to vLLM's slots."""
    return wrong(llm, "slots")


def wrong_merge(llm: LLM) -> Any:
    """As `shared`, but each rank takes the best tokens of its own shard for the best of all."""
    return wrong(llm, "merge")


def wrong(llm: LLM, fault: str) -> Any:
    assert llm.reset_prefix_cache()
    llm.collective_rpc(mixed_mla_caches.go_wrong, args=(fault,))
    return shared(llm)


SCENES = {scene.__name__: scene for scene in (shared, evicted, growing, wrong_slots, wrong_merge)}


def plan(llm: LLM) -> dict[str, Any]:
    """What vLLM's planner has made."""
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    (size,) = {tensor.size for tensor in config.kv_cache_tensors}
    return {
        "groups": [sorted(group.layer_names) for group in config.kv_cache_groups],
        "blocks": config.num_blocks,
        "bytes_per_block": size // config.num_blocks,
    }


def main() -> None:
    import engine_run
    from vllm import LLM

    folder, output, scenes, arguments = sys.argv[1:]
    Path(folder, "config.json").write_text(json.dumps(mixed_mla_model.CONFIG), encoding="utf-8")
    llm = LLM(folder, **(engine_run.DEFAULTS | json.loads(arguments)))
    config = llm.llm_engine.vllm_config
    found: dict[str, Any] = {
        "plan": plan(llm),
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "scenes": {},
    }
    for name in scenes.split(","):
        if name.startswith("wrong"):
            save_caches(llm, Path(folder, "caches.npz"))
        found["scenes"][name] = SCENES[name](llm)
    if not name.startswith("wrong"):
        save_caches(llm, Path(folder, "caches.npz"))
    Path(output).write_text(json.dumps(found), encoding="utf-8")


def save_caches(llm: LLM, file: Path) -> None:
    """What every rank has in every cache before anything goes wrong, as "rank layer"."""
    ranks = llm.collective_rpc(mixed_mla_caches.contents)
    np.savez(file, **{f"{rank} {name}": held for rank, of_rank in enumerate(ranks) for name, held in of_rank.items()})


if __name__ == "__main__":
    main()
