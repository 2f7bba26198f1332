"""The main job: GLM-5.2's groups at DCP 8 under a trace, with every page of every hit read back and compared.

Three ways to hold the indexer in one memory budget: sharded over all 8 ranks, partly replicated (4 shards), replicated.
Blocks and capacity are those of the real records (656 bytes per token and layer for the main cache, 132 for the
indexer); behind them stand real tensors on all 8 ranks, with records shrunk to one byte. The multi-token-prediction
layer is left out. Needs torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep_kv._core import Coordinator, CoordinatorConfig, Layout, plan_layout
from lockstep_kv.fingerprints import FingerprintedRanks, shrunk
from lockstep_kv.models import model_groups
from lockstep_kv.replay import ReplayReport, longest_request, replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lockstep_kv.trace import TraceRequest

__all__ = ["DCP_WORLD_SIZE", "INDEXER_SHARDS", "KV_BYTES", "DemoResult", "run_demo"]

DCP_WORLD_SIZE = 8
INDEXER_SHARDS = (8, 4, 1)
KV_BYTES = 28_145_000_000
"""Bytes for the cache on one rank: what a measured deployment had."""

# The facts of GLM-5.2's published configuration that decide about its cache.
_GLM_5_2 = {
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 78,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
}
_BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class DemoResult:
    """One way to hold the indexer, and what came of it."""

    indexer_shards: int
    layout: Layout
    """The real layout of one rank."""
    shrunk_bytes: int
    """Bytes of the tensors of all ranks."""
    report: ReplayReport
    pages_written: int
    pages_verified: int
    seconds: float
    """Everything: replay, writing and reading back."""


def run_demo(
    requests: Sequence[TraceRequest],
    *,
    indexer_shards: Sequence[int] = INDEXER_SHARDS,
    kv_bytes: int = KV_BYTES,
    concurrency: int = 8,
    make_ranks: Callable[..., FingerprintedRanks] = FingerprintedRanks,
    advance: Callable[[int], None] | None = None,
) -> Iterator[DemoResult]:
    """Replay the requests once per number of indexer shards and check every page; yields a result after each.

    concurrency: requests that hold their blocks at once. make_ranks: makes the pages, for tests that break them.
    advance: called with the number of requests done since the last call.

    Raises `WrongPageError` if a page does not hold the content it was found under.
    """
    longest = longest_request(requests)
    for shards in indexer_shards:
        start = time.perf_counter()
        groups = model_groups(
            _GLM_5_2,
            kv_cache_dtype="fp8_ds_mla",
            block_size=_BLOCK_SIZE,
            dcp_world_size=DCP_WORLD_SIZE,
            indexer_shards=shards,
            include_mtp=False,
        )
        layout = plan_layout(groups, dcp_world_size=DCP_WORLD_SIZE, available_bytes=kv_bytes, max_model_len=longest)
        small = shrunk(groups)
        ranks = make_ranks(small, num_blocks=layout.num_blocks, dcp_world_size=DCP_WORLD_SIZE)
        config = CoordinatorConfig(
            small, layout.num_blocks, dcp_world_size=DCP_WORLD_SIZE, max_model_len=longest, enable_events=False
        )
        report = replay(requests, Coordinator(config), concurrency=concurrency, observer=ranks, advance=advance)
        yield DemoResult(
            indexer_shards=shards,
            layout=layout,
            shrunk_bytes=ranks.bytes_in_all,
            report=report,
            pages_written=ranks.pages_written,
            pages_verified=ranks.pages_verified,
            seconds=time.perf_counter() - start,
        )
