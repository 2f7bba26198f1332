"""Compares numbers of indexer shards for a model: what fits, and what each asks of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep_kv._core import Layout, plan_layout
from lockstep_kv.arguments import checked_int
from lockstep_kv.errors import ConfigError
from lockstep_kv.models import SPARSE_MLA_MODEL_TYPES, model_groups

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["compare_shards", "layout_figures", "which_first"]


def compare_shards(
    facts: Mapping[str, Any],
    choices: Iterable[int],
    *,
    available_bytes: int,
    max_model_len: int,
    dcp_world_size: int,
    **geometry: Any,
) -> list[dict[str, Any]]:
    """The figures of each number of indexer shards, in order; 0 = as many as the main cache has.

    facts: the model's configuration. geometry: what else `model_groups` takes. A choice that does not fit has its
    reason as "does_not_fit". "cost" is the part of the capacity of the best choice that this one has not. Raises
    `ConfigError` for what `model_groups` refuses.
    """
    rows: list[dict[str, Any]] = []
    for choice in choices:
        groups = model_groups(facts, dcp_world_size=dcp_world_size, indexer_shards=choice, **geometry)
        row: dict[str, Any] = {"indexer_shards": choice or dcp_world_size}
        try:
            layout = plan_layout(
                groups, dcp_world_size=dcp_world_size, available_bytes=available_bytes, max_model_len=max_model_len
            )
        except ConfigError as error:
            row["does_not_fit"] = str(error)
        else:
            row |= layout_figures(layout) | _indexer_work(facts, row["indexer_shards"])
        rows.append(row)
    most = max((row["capacity_tokens"] for row in rows if "blocks" in row), default=0)
    for row in rows:
        if "blocks" in row:
            row["cost"] = 1 - row["capacity_tokens"] / most
    return rows


def layout_figures(layout: Layout) -> dict[str, Any]:
    """The figures of one choice."""
    return {
        "bytes_per_block": layout.bytes_per_block,
        "tokens_per_block": [s.tokens_per_block for s in layout.sets],
        "blocks": layout.num_blocks,
        "capacity_tokens": layout.capacity_tokens,
        "max_concurrency": layout.max_concurrency,
        "sets": [list(s.group_ids) for s in layout.sets],
        "why_separate": [s.why_separate for s in layout.sets if s.why_separate is not None],
    }


def which_first(rows: list[dict[str, Any]], dcp_world_size: int) -> str | None:
    """Which number of indexer shards to try first; None if there is nothing to choose."""
    fitting = [row for row in rows if "blocks" in row]
    partial = [row for row in fitting if 1 < row["indexer_shards"] < dcp_world_size and "candidates_merged" in row]
    if len(fitting) < 2 or not partial:  # noqa: PLR2004
        return None
    first = max(partial, key=lambda row: row["indexer_shards"])
    return (
        f"Try {first['indexer_shards']} indexer shards first: they cost {first['cost']:.1%} of the capacity. Fewer "
        "shards merge less between ranks, but every rank scores more of the context, which tells in long ones. "
        "The project's docs/replication.md has measured runs."
    )


def _indexer_work(facts: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """What a sparse indexer of so many shards does for each query in each of its layers; empty without one."""
    if facts.get("model_type") not in SPARSE_MLA_MODEL_TYPES or "index_topk" not in facts:
        return {}
    best = checked_int("index_topk", facts["index_topk"], low=1)
    return {"candidates_merged": shards * best if shards > 1 else 0, "context_scored": 1 / shards}
