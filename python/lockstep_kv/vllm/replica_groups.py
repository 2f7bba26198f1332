"""Which ranks hold an indexer's shards once, and which hold the same shard, where there are fewer shards than ranks.

Among the ranks of tensor parallelism, neighbours as many as shards hold the whole indexer once: a shard group, inside
which candidates are merged. Ranks in the same place of their shard groups hold the same shard: a query-split group,
inside which rows can be split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import (
    get_dcp_group,
    get_world_group,
    init_model_parallel_group,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.distributed.parallel_state import GroupCoordinator

__all__ = ["ReplicaGroups", "build", "forget", "query_split_group", "replica_ranks", "shard_group"]


@dataclass(frozen=True)
class ReplicaGroups:
    """The groups of this rank."""

    shard: GroupCoordinator
    """The ranks that hold all shards once."""
    query_split: GroupCoordinator
    """The ranks that hold this rank's shard."""


_built: ReplicaGroups | None = None


def replica_ranks(tensor_ranks: Sequence[Sequence[int]], shards: int) -> tuple[list[list[int]], list[list[int]]]:
    """Shard groups and query-split groups of the ranks of each tensor-parallel group.

    Raises `ValueError` if the number of shards does not divide a group.
    """
    shard_groups: list[list[int]] = []
    query_split_groups: list[list[int]] = []
    for ranks in tensor_ranks:
        if shards < 1 or len(ranks) % shards:
            raise ValueError(f"indexer shards must divide the {len(ranks)} tensor-parallel ranks, got {shards}")
        runs = [list(ranks[at : at + shards]) for at in range(0, len(ranks), shards)]
        shard_groups += runs
        query_split_groups += [[run[place] for run in runs] for place in range(shards)]
    return shard_groups, query_split_groups


def build(tensor_parallel_size: int, shards: int) -> None:
    """Make the groups of this process. Every process of the world has to call it, once, with the same numbers.

    Raises `RuntimeError` if they are there already, or if a shard group would not hold every shard.
    """
    global _built  # noqa: PLW0603 - vLLM's groups are of the process, too
    if _built is not None:
        raise RuntimeError("the groups of indexer shards are there already")
    world = range(torch.distributed.get_world_size())
    tensor_ranks = [world[at : at + tensor_parallel_size] for at in range(0, len(world), tensor_parallel_size)]
    shard_ranks, query_split_ranks = replica_ranks(tensor_ranks, shards)
    own, backend = get_world_group(), torch.distributed.get_backend(get_world_group().device_group)
    groups = ReplicaGroups(
        shard=init_model_parallel_group(shard_ranks, own.local_rank, backend, group_name="indexer_shard"),
        query_split=init_model_parallel_group(
            query_split_ranks, own.local_rank, backend, group_name="indexer_query_split"
        ),
    )
    decode_ranks = get_dcp_group().ranks
    held = sorted(decode_ranks.index(rank) % shards for rank in groups.shard.ranks if rank in decode_ranks)
    if held != list(range(shards)):
        raise RuntimeError(f"ranks {groups.shard.ranks} hold the indexer shards {held} of {shards}")
    _built = groups


def forget() -> None:
    """Destroy the groups."""
    global _built  # noqa: PLW0603
    if _built is not None:
        _built.shard.destroy()
        _built.query_split.destroy()
        _built = None


def shard_group(shards: int) -> GroupCoordinator:
    """The ranks between which candidates of an indexer of so many shards are merged."""
    decode = get_dcp_group()
    if shards == decode.world_size:
        return decode
    if _built is not None and shards == _built.shard.world_size:
        return _built.shard
    partial = None if _built is None else _built.shard.world_size
    raise RuntimeError(
        f"no group of {shards} indexer shards: the decode group has {decode.world_size} ranks, that of shards {partial}"
    )


def query_split_group() -> GroupCoordinator:
    """The ranks that hold this rank's shard."""
    if _built is None:
        raise RuntimeError("there is no group of ranks with the same indexer shard")
    return _built.query_split
