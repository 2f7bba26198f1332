"""Random lives in rounds: led until the time is over, or until one shows a difference, which is made small and told."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from operations import OPERATIONS, OPTIONS, lead
from stock import Config, all_configs

if TYPE_CHECKING:
    from collections.abc import Callable

    from lives import Life

__all__ = ["Rounds"]

_LIVES = 200
"""Per round."""

_SCRIPT = '''"""Run with pytest, tests/support on the path."""

from operations import lead
from stock import Config, Group


def test_this_life() -> None:
    lead(
        {config!r},
        {options!r},
        [
{operations}
        ],
    )
'''


class Rounds:
    """The lives led so far."""

    def __init__(self, first_seed: int) -> None:
        self.seed = first_seed
        """Of the next round."""
        self.lives = 0
        self.steps = 0
        self.seen: collections.Counter[str] = collections.Counter()
        """Steps by kind of group, and how often what is rare came up."""
        self.smallest = ""
        """The smallest life that shows a difference, as a test."""

    def lead_for(self, seconds: float, tell: Callable[[Rounds], None] = lambda _: None) -> None:
        """Lead rounds until the time is over. Raises what the first life that differs raises."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.lead_round(end)
            self.seed += 1
            tell(self)

    def lead_round(self, end: float) -> None:
        """Lead one round, or a part of it if the time is over before."""

        @seed(self.seed)
        @settings(
            max_examples=_LIVES,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(all_configs(), OPTIONS, st.lists(OPERATIONS, min_size=20, max_size=60))
        def lives(config: Config, options: dict[str, Any], operations: list[tuple[Any, ...]]) -> None:
            if not self.smallest and time.monotonic() > end:
                return
            operations = [operation for operation in operations if operation != ("rest",)]
            try:
                life, steps = lead(config, options, operations)
            except BaseException:
                # The last one that fails is the smallest.
                listed = "\n".join(f"            {operation!r}," for operation in operations)
                self.smallest = _SCRIPT.format(config=config, options=options, operations=listed)
                raise
            self._note(config, life, steps)

        lives()

    def _note(self, config: Config, life: Life, steps: int) -> None:
        self.lives += 1
        self.steps += steps
        for kind in {group.kind if group.kind != "mamba" else f"mamba {group.mode}" for group in config.groups}:
            self.seen[kind] += steps
        self.seen.update(life.seen)
