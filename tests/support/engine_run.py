"""Runs one real vLLM engine on the CPU through a number of scenes and prints what came out as JSON.

Usage: engine_run.py MODEL_FOLDER OUTPUT.json SCENE,SCENE,... '{"engine": "arguments"}'. Needs vLLM. The arguments may
replace the weights of the format "dummy", the start without a tokenizer, and the rest of `DEFAULTS`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

GREEDY = {"temperature": 0.0, "detokenize": False}
DEFAULTS = {"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "seed": 1}


def tokens(seed: int, count: int) -> list[int]:
    """A sequence of its own for each seed; sequences of one seed share their beginning."""
    return [(seed * 131 + at * 7 + at * at) % 990 + 5 for at in range(count)]


def prompt(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": ids, **more}


def generate(llm: LLM, prompts: list[dict[str, Any]], **sampling: Any) -> list[Any]:
    """Tokens and cached tokens of each output."""
    outputs = llm.generate(prompts, SamplingParams(**{**GREEDY, **sampling}), use_tqdm=False)
    return [[[list(o.token_ids) for o in output.outputs], output.num_cached_tokens] for output in outputs]


def shared_prefixes(llm: LLM) -> Any:
    start = tokens(1, 200)
    prompts = [prompt(start + [number] * 40) for number in range(6, 16)]
    return generate(llm, prompts, max_tokens=20) + generate(llm, prompts, max_tokens=20)


def eviction(llm: LLM) -> Any:
    found = []
    for seed in (2, 3, 4, 5, 6, 7, 8, 2, 8, 3, 7):
        found += generate(llm, [prompt(tokens(seed, 400))], max_tokens=5)
    return found


def preemption(llm: LLM) -> Any:
    return generate(llm, [prompt(tokens(20 + at, 150)) for at in range(12)], max_tokens=150)


def chunked_prefill(llm: LLM) -> Any:
    return generate(llm, [prompt(tokens(40, 900)), prompt(tokens(41, 30)), prompt(tokens(40, 700))], max_tokens=10)


def one_by_one(llm: LLM) -> Any:
    """For engines in another process, where requests that are sent together may arrive apart."""
    found = []
    for seed, count in ((1, 300), (1, 320), (2, 500), (3, 700), (1, 300), (4, 900), (2, 500), (5, 900), (1, 300)):
        found += generate(llm, [prompt(tokens(seed, count))], max_tokens=20)
    return found


def aborts(llm: LLM) -> Any:
    engine = llm.llm_engine
    sampling = SamplingParams(**GREEDY, max_tokens=60, ignore_eos=True)
    names = [engine.add_request(f"abort-{at}", prompt(tokens(50 + at, 100)), sampling) for at in range(6)]
    names = [name or f"abort-{at}" for at, name in enumerate(names)]
    found: dict[str, Any] = {}
    for step in range(200):
        if step in (0, 3, 9):
            engine.abort_request([names[step % 4]])
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        if not engine.has_unfinished_requests():
            break
    return sorted(map(str, found.values())) + generate(llm, [prompt(tokens(50, 100))], max_tokens=5)


def reset(llm: LLM) -> Any:
    first = generate(llm, [prompt(tokens(60, 300))] * 2, max_tokens=3)
    done = llm.reset_prefix_cache()
    return [first, done, generate(llm, [prompt(tokens(60, 300))], max_tokens=3)]


def several_samples(llm: LLM) -> Any:
    return generate(llm, [prompt(tokens(70, 130))], n=3, temperature=0.8, seed=7, max_tokens=40)


def several_answers(llm: LLM) -> Any:
    """Not seeded: vLLM 0.32 on the CPU cannot take back what a seeded request drew for a part of its prompt."""
    return generate(llm, [prompt(tokens(70, 130))], n=3, temperature=0.8, max_tokens=40)


def salted(llm: LLM) -> Any:
    ids = tokens(80, 200)
    salts: list[dict[str, Any]] = [{}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    return [generate(llm, [prompt(ids, **salt)], max_tokens=3) for salt in salts]


def prompt_logprobs(llm: LLM) -> Any:
    ids = [prompt(tokens(90, 100))]
    return generate(llm, ids, max_tokens=3) + generate(llm, ids, max_tokens=3, prompt_logprobs=1)


def returning(llm: LLM) -> Any:
    """Prompts that do not fit the pool together, again in another order, and then several at once."""
    lengths = {2: 400, 3: 330, 4: 470, 5: 260, 6: 400}
    found = []
    for seed in (2, 3, 4, 5, 6, 4, 2, 6, 3, 5):
        found += generate(llm, [prompt(tokens(seed, lengths[seed]))], max_tokens=12, ignore_eos=True)
    together = [prompt(tokens(seed, lengths[seed])) for seed in (6, 2, 5, 3)]
    return found + generate(llm, together, max_tokens=40, ignore_eos=True)


def poison(worker: Any) -> None:  # noqa: ARG001 - vLLM calls it with the worker
    """Overwrite the host tier of a worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().connector_worker.worker.pool.memory.fill_(0x3F)


def poisoned_host(llm: LLM) -> Any:
    """As `returning`, with a host tier that holds something else."""
    llm.collective_rpc(poison)
    return returning(llm)


def short(llm: LLM) -> Any:
    """For engines that take long for a step: prompts that share half, are cut in chunks, grow, and come again."""
    ids = tokens(95, 280)
    prompts = [prompt(ids), prompt(ids[:140] + tokens(96, 140)), prompt(tokens(97, 280))]
    return [
        found
        for asked in (prompts, [prompt(tokens(98, 400))], prompts)
        for found in generate(llm, asked, max_tokens=12, ignore_eos=True)
    ]


def growing(llm: LLM) -> Any:
    """As `short`: more requests than it has, with answers longer than their prompts."""
    return generate(llm, [prompt(tokens(120 + at, 40)) for at in range(8)], max_tokens=80, ignore_eos=True)


def long_answers(llm: LLM) -> Any:
    return generate(llm, [prompt(tokens(100 + at, 70)) for at in range(3)], max_tokens=500, ignore_eos=True)


def spoken(llm: LLM) -> Any:
    """For models that listen: a tone and the start of a transcript each, twice. Sampled, so that all logits count."""
    times = np.arange(32_000, dtype=np.float32) / 16_000
    tones = [(np.sin(2 * np.pi * 110 * (1 + at) * times) * (1 + at) / 12, 16_000) for at in range(12)]
    prompts = [
        {
            "encoder_prompt": prompt([], multi_modal_data={"audio": tone}),
            "decoder_prompt": prompt([3, *tokens(110 + at, 10)]),
        }
        for at, tone in enumerate(tones)
    ]
    twice = (generate(llm, prompts, max_tokens=100, temperature=1.0, ignore_eos=True) for _ in range(2))
    return [found for one in twice for found in one]


SCENES: dict[str, Callable[[LLM], Any]] = {
    scene.__name__: scene
    for scene in (
        shared_prefixes,
        eviction,
        preemption,
        chunked_prefill,
        one_by_one,
        aborts,
        reset,
        several_samples,
        several_answers,
        salted,
        prompt_logprobs,
        returning,
        poisoned_host,
        short,
        growing,
        long_answers,
        spoken,
    )
}


def main() -> None:
    folder, output, scenes, arguments = sys.argv[1:]
    llm = LLM(folder, **(DEFAULTS | json.loads(arguments)))
    found = {name: SCENES[name](llm) for name in scenes.split(",")}
    metrics = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if metric.name in ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions")
    }
    Path(output).write_text(json.dumps({"scenes": found, "metrics": metrics}), encoding="utf-8")


if __name__ == "__main__":
    main()
