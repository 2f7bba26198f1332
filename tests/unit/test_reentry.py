"""Calls from finalizers and from the arguments' own code, which may come while another call is under way."""

from __future__ import annotations

import gc
import random
from typing import TYPE_CHECKING, Any

import pytest

from lockstep_kv import BlockPool, Coordinator, CoordinatorConfig, GroupSpec, LayerSpec, hash_blocks

if TYPE_CHECKING:
    from collections.abc import Callable


def coordinator(num_groups: int) -> Coordinator:
    groups = [GroupSpec("full", 4, [LayerSpec(f"{at}", 4)]) for at in range(num_groups)]
    return Coordinator(CoordinatorConfig(groups, 400_000, max_model_len=64))


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_a_finalizer_can_free_whenever_it_runs(num_groups: int) -> None:
    live = coordinator(num_groups)
    draw = random.Random(0)

    class Owner:
        def __init__(self, name: str) -> None:
            self.name = name
            # A cycle: only the collector ends it, in the middle of whatever makes an object.
            self.itself = self
            live.allocate(name, 1)

        def __del__(self) -> None:
            live.free(self.name)

    kept: list[Any] = []
    for at in range(5000):
        Owner(f"owner{at}")
        kept.append([[] for _ in range(draw.randrange(12))])
        kept.append(live.allocate(f"kept{at}", 1))
        kept.append(live.block_ids(f"kept{at}"))
        live.free(f"kept{at}")
    gc.collect()
    assert live.num_requests == 0
    live.audit()


def test_a_finalizer_can_release_whenever_it_runs() -> None:
    pool = BlockPool(100_000)

    class Owner:
        def __init__(self) -> None:
            self.itself = self
            self.blocks = pool.take(2)

        def __del__(self) -> None:
            pool.release(self.blocks)

    kept = []
    for _ in range(5000):
        Owner()
        kept.append(pool.take(1))
    gc.collect()
    assert pool.num_free_blocks == 100_000 - 1 - len(kept)
    pool.audit()


class Failing:
    """An int whose own code fails in a way that is not about its type."""

    def __index__(self) -> int:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "call",
    [
        lambda: BlockPool(9).take(Failing()),
        lambda: BlockPool(9).add_ref([Failing()]),
        lambda: coordinator(1).allocate("a", Failing()),
        lambda: hash_blocks([Failing()], 1, none_hash=bytes(32)),  # type: ignore[list-item]
    ],
)
def test_what_fails_in_an_argument_s_own_code_is_passed_on(call: Callable[[], object]) -> None:
    with pytest.raises(KeyboardInterrupt):
        call()
