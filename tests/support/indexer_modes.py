"""The load that vLLM's indexer is given on several ranks, and where each of its tokens has to be. Needs torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["BLOCKS", "CHOSEN", "MODES", "POSITIONS", "Mode", "Work"]

CHOSEN = 16
"""Tokens that the indexer chooses."""
BLOCKS = 16
"""Blocks of a rank's memory; block 0 is the null block."""
PAGE = 64
"""Tokens of a kernel's page, and of a latent block on one rank."""

POSITIONS = {"a": 340, "b": 80, "c": 340}
"""The longest that each request gets. The first 256 tokens of "c" are those of "a", found as a prefix."""
_SHARED = 256
_TABLES = {"a": [3, 9, 6, 12, 1, 14], "b": [5, 8, 10, 2, 11, 13], "c": [15, 7, 4]}

Work = tuple[str, int, int]
"""A request, and from where to where its tokens are computed in a step."""

_STEPS: list[list[Work]] = [
    [("a", 0, 200)],
    [("a", 200, 300), ("b", 0, 66)],
    [("a", 300, 301), ("b", 66, 67), ("c", 256, 330)],
    [("a", 301, 302), ("b", 67, 68), ("c", 330, 331)],
]
_SPECULATED: dict[int, list[list[Work]]] = {
    1: [[("a", 0, 90), ("b", 0, 10)], [("a", 90, 92), ("b", 10, 11)]],
    2: [[("a", 0, 90), ("b", 0, 10)], [("a", 90, 93), ("b", 10, 11)], [("a", 91, 94), ("b", 11, 14)]],
}
"""By how many tokens are speculated; some are computed again, since they were rejected."""
_SHORT: list[list[Work]] = [[("a", 0, 70)]]


@dataclass(frozen=True)
class Mode:
    """One way to spread the indexer's cache over the decode ranks of a world."""

    name: str
    ranks: int
    """Decode ranks."""
    shards: int
    layer: str = "fused"
    """Which of vLLM's layers: "fused" as in DeepSeek-V3.2, or "scoring" alone, which writes its keys itself."""
    interleave: int = 1
    drafts: int = 0
    """Tokens that are speculated in each step."""
    split_rows: bool = False
    without: tuple[str, str] | None = None
    """A patch that is taken back, by its owner and name: what must then go wrong shows that it is needed."""

    @property
    def reference(self) -> str:
        """The name of the mode of one rank with the same load."""
        return f"{self.layer}, {self.drafts} drafts"

    @property
    def steps(self) -> list[list[Work]]:
        """The load."""
        if self.without is not None:
            return _SHORT
        return _SPECULATED.get(self.drafts, _STEPS)

    def table(self, request: str) -> list[int]:
        """The blocks of a request; each holds 64 tokens on every rank."""
        own = _TABLES[request]
        return own if request != "c" else _TABLES["a"][: _SHARED // (PAGE * self.ranks)] + own

    def slots(self, request: str, positions: torch.Tensor, rank: int, shards: int) -> torch.Tensor:
        """Where a cache of so many shards has tokens on a rank: page times 64, and the place in it; -1 elsewhere."""
        found = []
        for position in positions.tolist():
            turn, within = divmod(position, self.interleave)
            place = turn // shards * self.interleave + within
            block, inside = divmod(place, PAGE * self.ranks // shards)
            here = turn % shards == rank % shards
            found.append(self.table(request)[block] * PAGE * (self.ranks // shards) + inside if here else -1)
        return torch.tensor(found)


_LAYER = "DeepseekV32Attention"

MODES = {
    1: [
        *(Mode(f"fused, {drafts} drafts", 1, 1, drafts=drafts) for drafts in (0, 1, 2)),
        Mode("scoring, 0 drafts", 1, 1, "scoring"),
    ],
    2: [
        Mode("replicated", 2, 1),
        Mode("replicated, rows split", 2, 1, split_rows=True),
        Mode("replicated, one draft", 2, 1, drafts=1),
        Mode("replicated, scoring alone", 2, 1, "scoring"),
        Mode("sharded", 2, 2),
        Mode("without its slots", 2, 1, without=(_LAYER, "forward")),
        Mode("without its launch", 2, 1, without=("", "fused_norm_rope")),
        Mode("without its world", 2, 1, without=("", "sparse_attn_indexer")),
        Mode("scoring alone, without its world", 2, 1, "scoring", without=("SparseAttnIndexer", "__init__")),
    ],
    4: [
        Mode("replicated", 4, 1),
        Mode("partly replicated", 4, 2),
        Mode("partly replicated, interleaved", 4, 2, interleave=4),
        Mode("partly replicated, rows split", 4, 2, split_rows=True),
        Mode("partly replicated, one draft", 4, 2, drafts=1),
        Mode("partly replicated, two drafts", 4, 2, drafts=2),
        Mode("partly replicated, scoring alone", 4, 2, "scoring"),
        Mode("sharded", 4, 4),
        Mode("without its group", 4, 2, without=("", "_merge_dcp_topk_global")),
    ],
}
"""By the number of processes."""
