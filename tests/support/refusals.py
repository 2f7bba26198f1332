"""Objects in the middle of their work, and the check that a bad call is refused and changes nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from lockstep_kv import (
    BlockPool,
    Coordinator,
    CoordinatorConfig,
    GroupSpec,
    LayerSpec,
    LockstepKVError,
    plan_layout,
)
from lockstep_kv.models import model_groups

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_LEN = 64
HASHES = [bytes([at]) * 32 for at in range(16)]
ROOT = bytes(32)
PAIR = [GroupSpec("mla", 4, [LayerSpec("ckv", 64)]), GroupSpec("mla", 8, [LayerSpec("indexer", 8)], kv_shards=1)]
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 64,
}


def pair_config(**changes: Any) -> CoordinatorConfig:
    """Two ranks, one lockstep set of 8 tokens per block, 9 blocks."""
    good: dict[str, Any] = {"groups": PAIR, "num_blocks": 9, "dcp_world_size": 2, "max_model_len": MAX_LEN}
    return CoordinatorConfig(**{**good, **changes})


def model(**options: Any) -> object:
    """Plan the groups of a small model at 16 tokens per block."""
    return model_groups(MODEL, **{"block_size": 16, "dcp_world_size": 1, **options})


def plan(**options: Any) -> object:
    """Plan the layout of the pair, with 99 blocks unless told otherwise."""
    return plan_layout(
        **{"groups": PAIR, "dcp_world_size": 2, "max_model_len": MAX_LEN, **({"num_blocks": 99} | options)}
    )


@dataclass
class World:
    """A coordinator and a pool in the middle of their work.

    Request "a" holds blocks 1 to 3; 1 and 2 were published, but 2 was evicted after `stale` was found, so that `fresh`
    is 8 tokens long. `foreign` is another coordinator's. Block 4 is pinned. In the pool block 1 is held and published,
    and block 2 is held twice.
    """

    c: Coordinator = field(default_factory=lambda: Coordinator(pair_config(enable_events=True)))
    p: BlockPool = field(default_factory=lambda: BlockPool(5))

    def __post_init__(self) -> None:
        self.c.allocate("a", 24)
        self.c.cache("a", HASHES, 16)
        self.c.pin([4])
        self.stale = self.c.find_longest_hit(HASHES, 16)
        self.c.evict([2])
        self.fresh = self.c.find_longest_hit(HASHES, 16)
        self.foreign = Coordinator(pair_config()).find_longest_hit(HASHES, 16)
        self.p.take(2)
        self.p.add_ref([2])
        self.p.publish(1, b"key")

    def state(self) -> tuple[object, ...]:
        """Return the digests, and what they leave out."""
        c, p = self.c, self.p
        return c.state_digest(), c.stats(), c.free_order(), c.block_ids("a"), p.state_digest(), p.free_order()


def check_refused(call: Callable[[World], object], error: type[LockstepKVError], *shown: str | int) -> None:
    """Check that a call is refused, with these words and whole numbers in its message, and changes nothing."""
    world = World()
    before = world.state()
    with pytest.raises(LockstepKVError) as caught:
        call(world)
    assert caught.type is error
    message = str(caught.value)
    for part in shown:
        found = part in message if isinstance(part, str) else re.search(rf"(?<![\w-]){part}(?!\w)", message)
        assert found, f"{message!r} lacks {part!r}"
    assert len(message) < 400
    assert "\n" not in message
    assert world.state() == before
    world.c.audit()
    world.p.audit()


def short(value: object) -> str:
    """Return an id for a value: its type and the start of its text."""
    return f"{type(value).__name__} {str(value)[:24]!a}"


def table(
    rows: Sequence[tuple[str, Any]], values: Sequence[object], fits: Callable[[Any, Any], bool] = lambda _, __: False
) -> pytest.MarkDecorator:
    """Every parameter with every value that does not fit it."""
    cases = [(f"{at}-{name}", name, row, value) for at, (name, row) in enumerate(rows) for value in values]
    return pytest.mark.parametrize(
        ("parameter", "row", "value"),
        [
            pytest.param(name, row, value, id=f"{number} {short(value)}")
            for number, name, row, value in cases
            if not fits(row, value)
        ],
    )
