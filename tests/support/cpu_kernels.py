"""Plain torch forms of what vLLM 0.32 has for GPUs only, so that more cache kinds run on the CPU. Needs vLLM.

Only arithmetic is filled in; which blocks it reads and writes is up to vLLM. Missing on the CPU are:

* `torch.ops._C.selective_scan_fwd`, the prefill of Mamba 1; besides, the step of its decode is given states without
  the dimension that only Mamba 2 has, and its linear layers transposed inputs, which the CPU's products refuse;
* the states in the middle of a prefill of Mamba 2, which vLLM keeps in checkpoint blocks: the CPU's scan returns the
  last states only, and what stores them is a Triton kernel;
* two of the five entries of a table that DeepSeek-V4's metadata holds for schedules of GPU kernels; besides, the kernel
  that looks up the slots of its windows takes the interpreter most of its time.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.mamba import mamba_mixer, mamba_mixer2
from vllm.model_executor.layers.mamba.ops import ssd_combined
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
from vllm.v1.attention.backends.mla.sparse_swa import ComputeSWAIndicesAndLensKernel

__all__ = ["fill_in"]

_scan_chunks = ssd_combined._mamba_chunk_scan_combined_fwd


def fill_in() -> None:
    """Put the forms below where vLLM looks its kernels up, in this process."""
    utils.cpu_unquantized_gemm = linear
    mamba_mixer.selective_scan_fn = selective_scan
    mamba_mixer.selective_state_update = selective_state_update
    mamba_mixer2.store_prefill_checkpoint = store_prefill_checkpoint
    ssd_combined._mamba_chunk_scan_combined_fwd = mamba2_scan
    DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = no_tile_schedules
    ComputeSWAIndicesAndLensKernel.__call__ = window_slots


def linear(layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The CPU's product of a linear layer, for any order of the input in memory."""
    product: torch.Tensor = layer.cpu_linear(x.contiguous(), weight, bias)
    return product


def selective_scan(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    z: torch.Tensor,
    delta_bias: torch.Tensor | None,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Mamba 1 over several requests, with softplus. u, delta and z are [channels, tokens], B and C [states, tokens]."""
    steps = torch.nn.functional.softplus(delta.float() + (0 if delta_bias is None else delta_bias[:, None]))
    inputs = u.float()
    out = inputs * D[:, None]
    starts = query_start_loc.tolist()
    for at, (first, end) in enumerate(itertools.pairwise(starts)):
        block = int(cache_indices[at])
        state = ssm_states[block].float() if has_initial_state[at] else torch.zeros_like(ssm_states[block].float())
        for token in range(first, end):
            step = steps[:, token, None]
            state = state * torch.exp(step * A) + step * B[:, token].float() * inputs[:, token, None]
            out[:, token] += state @ C[:, token].float()
        ssm_states[block] = state
    return (out * torch.nn.functional.silu(z.float())).to(u.dtype)


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor,  # noqa: N803
    dt_bias: torch.Tensor | None,
    *,
    z: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """One token of each request through Mamba 1, with softplus. x, dt and z are [requests, channels]."""
    blocks = state_batch_indices.flatten().long()
    steps = torch.nn.functional.softplus(dt.float() + (0 if dt_bias is None else dt_bias))[:, :, None]
    inputs = x.float()
    new = state[blocks].float() * torch.exp(steps * A) + steps * B.float()[:, None] * inputs[:, :, None]
    state[blocks] = new.to(state.dtype)
    scanned = (new * C.float()[:, None]).sum(-1) + inputs * D
    out.copy_(scanned * torch.nn.functional.silu(z.float()))


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    chunk_size: int,
    out: torch.Tensor,
    *,
    initial_states: torch.Tensor | None,
    return_intermediate_states: bool,
    seq_idx: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_chunk_seqlens: torch.Tensor,
    **more: Any,
) -> torch.Tensor:
    """The CPU's scan; if the states at the ends of all chunks are asked for, once per chunk."""
    if not return_intermediate_states:
        last: torch.Tensor = _scan_chunks(
            x, dt, A, B, C, chunk_size, out, initial_states=initial_states, cu_seqlens=cu_seqlens, **more
        )
        return last
    ends: list[torch.Tensor] = []
    bounds = itertools.pairwise(cu_chunk_seqlens.tolist())
    for chunk, ((first, end), request) in enumerate(zip(bounds, seq_idx.tolist(), strict=True)):
        begins = chunk == 0 or request != int(seq_idx[chunk - 1])
        states = None if initial_states is None else initial_states[request : request + 1]
        before = states if begins else ends[-1]
        tokens = slice(first, end)
        one = torch.tensor([0, end - first], dtype=torch.int32)
        arguments = (x[tokens], dt[tokens], A, B[tokens], C[tokens], chunk_size, out[tokens])
        ends.append(_scan_chunks(*arguments, initial_states=before, cu_seqlens=one, **more))
    return torch.cat(ends)


def store_prefill_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> None:
    """Store the states at a position inside each request's chunk of the prompt in the block reserved for it."""
    offsets, blocks = checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist()
    for at, (offset, block) in enumerate(zip(offsets, blocks, strict=True)):
        if offset:
            end = int(query_start_loc[at]) + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk_idx[at]]


def no_tile_schedules(_: Any, num_decode_tokens: int) -> dict[str, None]:  # noqa: ARG001
    """No schedule for any layer type."""
    return dict.fromkeys(("swaonly", "c1a", "c2a", "c4a", "c128a"))


def window_slots(
    _: Any,
    swa_indices: torch.Tensor,
    swa_lens: torch.Tensor,
    window_size: int,
    index_width: int,
    __: torch.Tensor,
    ___: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    token_to_req_indices: torch.Tensor,
    is_valid_token: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    replay_start: torch.Tensor,
    *,
    num_tokens: int,
    token_offset: int,
    **____: Any,
) -> None:
    """The slots of the tokens that each token's window holds, and how many they are; -1 behind them."""
    tokens = torch.arange(token_offset, token_offset + num_tokens)
    requests = token_to_req_indices[tokens].long()
    ends = seq_lens[requests] - query_start_loc[requests + 1] + tokens + 1
    starts = torch.maximum(ends - window_size, replay_start[requests]).clamp(min=0)
    valid = is_valid_token[tokens]
    swa_lens[:num_tokens] = torch.where(valid, ends - starts, 0)
    positions = starts[:, None] + torch.arange(index_width)
    blocks = block_table[requests[:, None], (positions // block_size).clamp(max=block_table.shape[1] - 1)]
    slots = blocks * block_size + positions % block_size
    inside = valid[:, None] & (positions < ends[:, None])
    swa_indices[:num_tokens, ..., :index_width].view(num_tokens, index_width).copy_(torch.where(inside, slots, -1))
