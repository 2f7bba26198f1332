"""vLLM's KV events as far as they are right, to be compared with ours. Needs vLLM."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from stock import Config

__all__ = ["comparable"]


def comparable(events: list[Any], config: Config) -> list[Any]:
    """Events, in a form in which both sides are equal.

    Removals that follow each other are sorted: vLLM keeps a block's further hashes in a set. Of groups that do not
    publish all blocks it tells the tokens of the others as well, with parents that nobody was told of: of them only
    the hashes are left.
    """
    # First what is left of each event: vLLM also tells of stores without any hash, which part no removals.
    left = [one for event in events for one in _by_hash(event, config)]
    told: list[Any] = []
    for removals, group in itertools.groupby(left, key=lambda event: isinstance(event, BlockRemoved)):
        run = list(group)
        told += sorted(run, key=repr) if removals else run
    return told


def _by_hash(event: Any, config: Config) -> list[Any]:
    if not isinstance(event, BlockStored) or config.groups[event.group_idx or 0].kind in ("full", "mla"):
        return [event]
    keys = event.extra_keys or [None] * len(event.block_hashes)
    return [(event.group_idx, *pair) for pair in zip(event.block_hashes, keys, strict=True)]
