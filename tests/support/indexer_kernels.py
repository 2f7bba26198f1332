"""Plain torch forms of the CUDA kernels that vLLM 0.32's sparse indexer calls, token by token. Needs vLLM.

Only arithmetic and memory access are filled in: what is read, scored, chosen and sent is up to vLLM. An indexer's page
is the values of its tokens, 128 bytes each, and behind them their scales, 4 bytes each. Scores outside the bounds that
a kernel is given are NaN, so that whoever reads them chooses nonsense.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers import sparse_attn_indexer as scoring
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla import indexer as metadata

__all__ = ["PAGE", "fill_in", "keys_of", "places", "split_rows", "token_bytes"]

PAGE = 64
"""Tokens of a page."""
_WIDTH = 128
_FP8 = torch.float8_e4m3fn


def fill_in() -> None:
    """Put the forms below where vLLM looks its kernels up, in this process."""
    ops.cp_gather_indexer_k_quant_cache = gather_keys
    ops.indexer_k_quant_and_cache = write_keys
    ops.top_k_per_row_prefill = best_of_prefill
    scoring.fp8_fp4_mqa_logits = prefill_scores
    scoring.fp8_fp4_paged_mqa_logits = decode_scores
    scoring.get_indexer_topk = lambda _: best_of_decode
    scoring._assert_cutedsl_dcp_merge_supported = lambda *_: None
    kernels: Any = ModuleType("dcp_indexer_cutedsl")
    kernels.pack_dcp_topk_candidates_cutedsl = pack_candidates
    kernels.stable_topk_from_gathered_candidates_cutedsl = best_of_candidates
    sys.modules["vllm.model_executor.kernels.attention.dsa.dcp_indexer_cutedsl"] = kernels
    CpuCommunicator.all_gatherv = all_gatherv


def split_rows(rows: int) -> None:
    """Let rows of long prefills be split as on CUDA, from so many rows a rank on; 0 for never."""

    class Cuda:
        def __getattr__(self, name: str) -> Any:
            return (lambda: True) if name == "is_cuda" else getattr(current_platform, name)

    metadata.current_platform = Cuda() if rows else current_platform
    metadata.MIN_TP_SHARD_ROWS_PER_RANK = rows


def places(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages of tokens, (tokens, 1), and in them the bytes of their values and scales, (tokens, 132)."""
    page, place = slots // PAGE, slots % PAGE
    values = place[:, None] * _WIDTH + torch.arange(_WIDTH)
    scales = PAGE * _WIDTH + place[:, None] * 4 + torch.arange(4)
    return page[:, None], torch.cat([values, scales], dim=1)


def token_bytes(pages: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The bytes of tokens, (tokens, 132). pages: (pages, 64, 132)."""
    return pages.reshape(len(pages), -1)[places(slots)]


def keys_of(found: torch.Tensor) -> torch.Tensor:
    """Keys of tokens from their bytes, (tokens, 132) to (tokens, 128)."""
    scales = found[:, _WIDTH:].contiguous().view(torch.float32)
    return found[:, :_WIDTH].contiguous().view(_FP8).double() * scales.double()


def score(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The scores of keys (n, 128) for one query (heads, 128) with its weights (heads,)."""
    products = (query.double()[:, None] * keys[None]).sum(-1).relu()
    return (products * weights.double()[:, None]).sum(0).float()


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of so many highest scores, the first of equal ones first; -1 behind them."""
    assert not scores.isnan().any(), "a score outside the bounds was read"
    order = torch.sort(scores, descending=True, stable=True).indices[:count].int()
    return torch.nn.functional.pad(order, (0, count - len(order)), value=-1)


def gather_keys(
    cache: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, ends: torch.Tensor
) -> None:
    """Copy the first keys of each request one after the other. ends: (requests + 1,), how many before each."""
    bounds = ends.tolist()
    for request in range(len(bounds) - 1):
        place = torch.arange(bounds[request + 1] - bounds[request])
        found = token_bytes(cache, table[request].long()[place // PAGE] * PAGE + place % PAGE)
        rows = slice(bounds[request], bounds[request + 1])
        values.view(torch.uint8)[rows] = found[:, :_WIDTH]
        scales[rows] = found[:, _WIDTH:]


def write_keys(keys: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, _: int, __: str) -> None:
    """Write keys (tokens, 128) with a power of two as scale; those of slot -1 are left out."""
    held = slots >= 0
    largest = keys.abs().amax(-1, keepdim=True).float().clamp(min=1e-4)
    scales = torch.exp2(torch.ceil(torch.log2(largest / 448)))
    found = torch.cat([(keys / scales).to(_FP8).view(torch.uint8), scales.view(torch.uint8)], dim=1)
    cache.view(len(cache), -1)[places(slots[held])] = found[held]


def prefill_scores(
    query: Any, keys: Any, weights: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Scores of the gathered keys from `starts` to `ends` of each row, (rows, keys)."""
    values, scales = keys
    found = torch.cat([values.view(torch.uint8), scales[:, None].view(torch.uint8)], dim=1)
    every = keys_of(found)
    logits = torch.full((len(query[0]), len(every)), torch.nan)
    for row, (first, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        logits[row, first:end] = score(query[0][row], weights[row], every[first:end])
    return logits


def decode_scores(
    query: Any,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    _: torch.Tensor,
    max_model_len: int,
    **__: Any,
) -> torch.Tensor:
    """Scores of the first keys of each request, (requests * new tokens, max_model_len)."""
    requests, new = query[0].shape[:2]
    logits = torch.full((requests * new, max_model_len), torch.nan)
    for row in range(requests * new):
        place = torch.arange(int(lengths.reshape(requests, -1)[row // new, row % new]))
        slots = table[row // new].long()[place // PAGE] * PAGE + place % PAGE
        found = keys_of(token_bytes(cache.squeeze(-2), slots))
        logits[row, : len(place)] = score(query[0][row // new, row % new], weights[row], found)
    return logits


def best_of_prefill(
    logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, *sizes: int
) -> None:
    """Write the places of the best keys of each row, from its start on."""
    for row, (first, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        out[row] = best(logits[row, first:end], sizes[-1])


def best_of_decode(logits: torch.Tensor, lengths: torch.Tensor, _: int, out: torch.Tensor, count: int, __: int) -> None:
    """Write the places of the best of the first keys of each row."""
    for row, length in enumerate(lengths.flatten().tolist()):
        out[row] = best(logits[row, :length], count)


def pack_candidates(
    logits: torch.Tensor,
    places: torch.Tensor,
    packed: torch.Tensor,
    rank: int,
    ranks: int,
    interleave: int,
    starts: torch.Tensor | None,
) -> None:
    """Write the score and the position in the text of each place that a rank has chosen, (rows, count, 2)."""
    packed[..., 0], packed[..., 1] = -torch.inf, -1
    for row, of_row in enumerate(places.tolist()):
        for at, place in enumerate(of_row):
            if place >= 0:
                turn, within = divmod(place, interleave)
                packed[row, at, 0] = logits[row, place + (0 if starts is None else int(starts[row]))]
                packed[row, at, 1] = (turn * ranks + rank) * interleave + within


def best_of_candidates(gathered: torch.Tensor, count: int, out: torch.Tensor) -> None:
    """Write the positions of the best candidates of each row, the first of equal ones first."""
    for row, candidates in enumerate(gathered):
        named = candidates[candidates[:, 1] >= 0]
        named = named[torch.argsort(named[:, 1])]
        chosen = best(named[:, 0], count)
        out[row] = torch.where(chosen >= 0, named[chosen.long(), 1].int(), -1) if len(named) else -1


def all_gatherv(self: Any, part: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """Put the parts of all ranks one behind the other, of which each has its own size."""
    assert dim == 0
    padded = part.new_zeros((max(sizes), *part.shape[1:]))
    padded[: len(part)] = part
    every = part.new_empty((len(sizes), *padded.shape))
    torch.distributed.all_gather_into_tensor(every.flatten(0, 1), padded, group=self.device_group)
    return torch.cat([of_rank[:size] for of_rank, size in zip(every, sizes, strict=True)])
