"""What vLLM 0.32 lacks on the CPU for decode context parallelism, in plain torch. Needs vLLM.

One function only: the slots of a batch's tokens. The CPU build computes them in C++ and asserts that there is one rank;
the Triton kernel that knows of several has no form for the CPU. vLLM's other obstacle, the Triton kernel that merges
attention's outputs between ranks, is not met: the test's model merges them itself.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from vllm.utils import cpu_triton_utils

if TYPE_CHECKING:
    import torch

__all__ = ["fill_in"]


def slot_mapping(  # noqa: PLR0917 - vLLM's signature
    num_tokens: int,
    max_num_tokens: int,  # noqa: ARG001
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,  # noqa: ARG001
    slot_mapping: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,  # noqa: N803
    TOTAL_CP_WORLD_SIZE: int = 1,  # noqa: N803
    TOTAL_CP_RANK: int = 0,  # noqa: N803
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,  # noqa: N803
    PAD_ID: int = -1,  # noqa: N803
    BLOCK_SIZE: int = 1024,  # noqa: ARG001, N803
) -> None:
    """Write the slots of all tokens, token by token: as plain as can be, since the cache is judged by them."""
    slot_mapping[num_tokens:] = PAD_ID
    starts, places = query_start_loc.tolist(), positions[:num_tokens].tolist()
    for request, (first, end) in enumerate(itertools.pairwise(starts)):
        for token in range(first, min(end, num_tokens)):
            block, offset = divmod(places[token], KV_CACHE_BLOCK_SIZE * TOTAL_CP_WORLD_SIZE)
            turn, within = divmod(offset, CP_KV_CACHE_INTERLEAVE_SIZE)
            turn, owner = divmod(turn, TOTAL_CP_WORLD_SIZE)
            slot = int(block_table[request, block]) * KV_CACHE_BLOCK_SIZE + turn * CP_KV_CACHE_INTERLEAVE_SIZE + within
            slot_mapping[token] = slot if owner == TOTAL_CP_RANK else PAD_ID


def fill_in() -> None:
    """Put it where a worker of vLLM's for the CPU looks its kernels up when it starts, in this process."""
    cpu_triton_utils._compute_slot_mapping_kernel_impl = slot_mapping
