"""What the ranks tell each other: every collective goes through here and is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

__all__ = ["Sent", "Wire", "shard_groups"]


@dataclass
class Sent:
    """What one rank has sent to others. entries: rows of the tensors, once for each receiver."""

    calls: int = 0
    entries: int = 0
    num_bytes: int = 0


def shard_groups(ranks: int, shards: int) -> list[list[int]]:
    """The ranks that hold one whole copy of a cache between them: contiguous runs of `shards` ranks."""
    return [list(range(first, first + shards)) for first in range(0, ranks, shards)]


@dataclass
class Wire:
    """The collectives of one rank. groups: by shards, the shard group that this rank is in."""

    rank: int
    groups: dict[int, dist.ProcessGroup]
    sent: dict[str, Sent] = field(default_factory=dict)

    @classmethod
    def of_world(cls) -> Wire:
        """Make the shard groups of all sizes. Every rank must call this at the same time."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine: dict[int, dist.ProcessGroup] = {}
        for shards in range(2, ranks + 1):
            for members in shard_groups(ranks, shards) if ranks % shards == 0 else []:
                group = dist.new_group(members)
                if rank in members:
                    mine[shards] = group
        return cls(rank, mine)

    def gather(self, what: str, tensor: torch.Tensor, shards: int) -> list[torch.Tensor]:
        """Gather one tensor of each member of this rank's shard group, in the order of ranks.

        what: the name to count under. tensor: of the same shape on all members, shape (..., numbers of one entry).
        """
        if shards == 1:
            return [tensor]
        count = self.sent.setdefault(what, Sent())
        count.calls += 1
        count.entries += tensor[..., 0].numel() * (shards - 1)
        count.num_bytes += tensor.nbytes * (shards - 1)
        gathered = [torch.empty_like(tensor) for _ in range(shards)]
        dist.all_gather(gathered, tensor.contiguous(), group=self.groups[shards])
        return gathered
