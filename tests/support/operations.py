"""The operations that a life consists of: drawn at random, and carried out one after the other."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from comparison import compare
from hypothesis import strategies as st
from lives import Admission, Life, StockFailedError

if TYPE_CHECKING:
    from stock import Config

__all__ = ["OPERATIONS", "OPTIONS", "lead"]

SMALL = st.integers(0, 9)
FEW = st.sampled_from([0, 0, 0, 3])
IDS = st.lists(st.integers(0, 89), max_size=3)
ARGUMENTS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "rest": (),
    "start": (
        st.sampled_from([0, 0, 0, 1]),
        st.sampled_from([1, 7, 8, 16, 17, 31, 32, 33, 48, 64, 65, 90]),
        st.sampled_from([None, None, None, "salt"]),
        st.sampled_from(["incremental", "incremental", "full"]),
    ),
    "admit": (SMALL, st.sampled_from([5, 16, 90, 90]), FEW, st.sampled_from([0, 0, 5, 17, 40]), FEW, SMALL),
    "admit all": (SMALL,),
    "step": (SMALL, st.integers(1, 40), FEW, st.integers(0, 3), FEW, st.booleans()),
    "tick": (),
    "preempt": (SMALL,),
    "end": (SMALL, st.booleans()),
    "drain": (),
    "touch": (IDS,),
    "release": (),
    "evict": (IDS,),
    "reset": (),
}
WEIGHTS = {"start": 6, "admit": 4, "admit all": 6, "step": 9, "tick": 6, "end": 3}
# The first is what operations that do not matter for a failure shrink to.
NAMES = st.sampled_from([name for name in ARGUMENTS for _ in range(WEIGHTS.get(name, 1))])
OPERATIONS: st.SearchStrategy[tuple[Any, ...]] = NAMES.flatmap(lambda name: st.tuples(st.just(name), *ARGUMENTS[name]))
OPTIONS = st.fixed_dictionaries(
    {
        "log_stats": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.05]),
        "metrics": st.booleans(),
        "zeroes": st.booleans(),
        "enable_kv_cache_events": st.booleans(),
    }
)


def _carry_out(life: Life, operation: tuple[Any, ...]) -> None:  # noqa: C901 - a table
    """Do one thing to both managers."""
    match operation:
        case ("start", family, length, salt, report):
            life.start([family * 1000 + at for at in range(length)], salt, report)
        case ("admit", which, *how) if life.waiting:
            life.admit(life.waiting[which % len(life.waiting)], Admission(*how))
        case ("admit all", which) if life.waiting:
            life.admit(life.waiting[which % len(life.waiting)], Admission(90, 0, 0, 0, 0))
        case ("step", which, *how, settles) if life.running:
            life.step(life.running[which % len(life.running)], *how, settles=settles)
        case ("tick",):
            life.tick()
        case ("preempt", which) if life.running:
            life.preempt(life.running[which % len(life.running)])
        case ("end", which, later) if life.running:
            life.end(life.running[which % len(life.running)], later=later)
        case ("drain",):
            life.drain(life.deferred)
        case ("touch", ids):
            life.touch(ids)
        case ("release",):
            life.drain(life.held)
        case ("evict", ids):
            known = {block_id for block_id in ids if block_id < life.config.num_blocks}
            life.both(lambda manager: manager.evict_blocks(known))
        case ("reset",):
            life.both(lambda manager: manager.reset_prefix_cache())
            life.both(lambda manager: [vars(stats) for stats in [manager.make_prefix_cache_stats()] if stats])


def lead(config: Config, options: dict[str, Any], operations: list[tuple[Any, ...]]) -> tuple[Life, int]:
    """Lead a life from its beginning to its end and compare after every step. Returns it and the number of steps."""
    random.seed(0)
    life = Life(config, options)
    steps = 0
    try:
        for operation in operations:
            _carry_out(life, operation)
            compare(life)
            steps += 1
        for request in list(life.running):
            life.end(request, later=False)
        life.tick()
        while life.deferred or life.held:
            life.drain(life.deferred)
            life.drain(life.held)
            compare(life)
            steps += 1
    except StockFailedError:
        life.seen["vLLM failed half way"] += 1
        return life, steps
    assert life.ours.block_pool.get_num_free_blocks() == config.num_blocks - 1
    return life, steps
