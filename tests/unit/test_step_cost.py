"""A step costs the same however many blocks a request has."""

from __future__ import annotations

import pytest

from steps_by_length import KINDS, step_nanoseconds


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_depend_on_the_blocks_before_it(kind: str) -> None:
    # Work for every block would take 50 times as long; the rest is room for a busy machine.
    few, many = (min(step_nanoseconds(KINDS[kind], blocks) for _ in range(3)) for blocks in (400, 20_000))
    assert many < 8 * few
