"""One rank of a world in which vLLM's sparse indexer runs on the CPU. Needs vLLM.

Usage: indexer_world.py RANK PROCESSES FOLDER

Runs all modes of so many processes one after the other, each with vLLM's own groups of ranks, layer, metadata and
Triton kernels, the latter in Triton's interpreter; CUDA kernels are those of indexer_kernels.py and attention is left
out. Writes what the rank's memory holds, what was scored, chosen and sent to FOLDER/RANK.pt.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

os.environ |= {"TRITON_INTERPRET": "1", "LOCKSTEP_KV": "on", "VLLM_USE_V2_MODEL_RUNNER": "1"}

from kinds_run import offer_triton

offer_triton()  # vLLM looks when it is imported.

import indexer_kernels
import torch
from indexer_modes import BLOCKS, CHOSEN, MODES, PAGE, Mode, Work
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.models.deepseek_v32 import attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.utils import AttentionGroup, customize_attention_spec
from vllm.v1.worker.workspace import init_workspace_manager

from lockstep_kv.vllm import indexer_patches, patches, plugin, replica_groups, shards

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "model.layers.3.self_attn"
KEYS = f"{PREFIX}.indexer.k_cache"
POISON = 0xA5
HIDDEN, LATENT, ROPE, HEADS, QUERY = 32, 64, 64, 2, 48


class Layer:
    """One layer of DeepSeek-V3.2 on one rank, without attention: the latent cache, the indexer and its cache."""

    def __init__(self, config: Any, mode: Mode, rank: int) -> None:
        self.config, self.mode, self.rank = config, mode, rank
        torch.manual_seed(7)
        hf = SimpleNamespace(index_topk=CHOSEN, index_n_heads=HEADS, index_head_dim=128, qk_rope_head_dim=ROPE)
        self.buffer = torch.full((512, CHOSEN), -1, dtype=torch.int32)
        self.indexer = attention.DeepseekV32Indexer(
            config, hf, HIDDEN, QUERY, None, config.cache_config, self.buffer, f"{PREFIX}.indexer"
        )
        for parameter in self.indexer.parameters():
            torch.nn.init.normal_(parameter.data)
        for part in (self.indexer.wq_b, self.indexer.wk_weights_proj):
            part.quant_method.process_weights_after_loading(part)
        cache = self.indexer.k_cache
        spec = cache.get_kv_cache_spec(config)
        tokens = PAGE * (mode.ranks // mode.shards)
        self.keys = torch.full((BLOCKS, 1, tokens, 132), POISON, dtype=torch.uint8)
        cache.bind_kv_cache(self.keys)
        backend = cache.get_attn_backend()
        group = AttentionGroup(backend, [KEYS], customize_attention_spec(backend, spec), 0)
        group.create_metadata_builders(config, torch.device("cpu"), kernel_block_size=PAGE)
        self.builder = group.get_metadata_builder()
        self.latents = torch.full((BLOCKS, PAGE, LATENT + ROPE), 7.25)
        self.attention = self._attention()
        self.scored: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Queries and their weights, of each step."""

    def step(self, works: list[Work], number: int) -> torch.Tensor:
        """Compute the tokens of a step and return what the indexer chose for each, (tokens, CHOSEN)."""
        positions = torch.cat([torch.arange(first, end) for _, first, end in works])
        count, generator = len(positions), torch.Generator().manual_seed(number)
        hidden = torch.randn(512, HIDDEN, generator=generator)[:count]
        slots = torch.cat(
            [self.mode.slots(name, torch.arange(*span), self.rank, self.mode.ranks) for name, *span in works]
        )
        common = self._common(works, positions, slots)
        metadata = self.builder.build(0, common)
        layers = self.config.compilation_config.static_forward_context
        both = {KEYS: metadata, self.attention.layer_name: SimpleNamespace(num_actual_tokens=0)}
        # vLLM gives each layer the slots of its group, which is one here.
        context = ForwardContext(layers, both, {self.attention.layer_name: slots, KEYS: slots})
        with override_forward_context(context):
            if self.mode.layer == "fused":
                self.attention.forward(positions, hidden)
            else:
                query = torch.randn(512, HEADS, 128, generator=generator)[:count].to(torch.float8_e4m3fn)
                keys = torch.randn(512, 128, generator=generator)[:count]
                weights = torch.rand(512, HEADS, generator=generator)[:count]
                self.scored.append((query, weights))
                self.indexer.indexer_op.forward_cuda(hidden, query, keys, weights)
        return self.buffer[:count].clone()

    def _common(self, works: list[Work], positions: torch.Tensor, slots: torch.Tensor) -> CommonAttentionMetadata:
        """What vLLM's runner tells of a batch."""
        mode = self.mode
        width = 512 // (PAGE * mode.ranks)
        rows = [(mode.table(name) + [0] * width)[:width] for name, _, _ in works]
        lengths = torch.tensor([end for _, _, end in works], dtype=torch.int32)
        starts = torch.tensor([0] + [end - first for _, first, end in works]).cumsum(0).to(torch.int32)
        held = torch.tensor(
            [int((mode.slots(name, torch.arange(end), self.rank, mode.ranks) >= 0).sum()) for name, _, end in works],
            dtype=torch.int32,
        )
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(works),
            num_actual_tokens=len(positions),
            max_query_len=int(torch.diff(starts).max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=torch.tensor(rows, dtype=torch.int32),
            slot_mapping=slots,
            dcp_local_seq_lens=held if mode.ranks > 1 else None,
        )

    def _attention(self) -> Any:
        """The layer without what attends: only what its `forward` reads."""
        layer: Any = object.__new__(attention.DeepseekV32Attention)
        torch.nn.Module.__init__(layer)

        def linear(rows: int, columns: int) -> Any:
            weight = torch.randn(columns, rows)
            return lambda tokens: (tokens @ weight.T, None)

        group = SimpleNamespace(rank_in_group=self.rank)
        vars(layer).update(
            layer_name=f"{PREFIX}.attn",
            indexer=self.indexer,
            topk_indices_buffer=self.buffer,
            skip_topk=False,
            use_pcp=False,
            pcp_shard_decode_requests=False,
            hisparse_cache=None,
            dcp_manager=SimpleNamespace(group=group) if self.mode.ranks > 1 else None,
            impl=SimpleNamespace(prepare_for_batch=lambda _: None, record_logical_topk_ready=lambda: None),
            kv_cache=self.latents,
            kv_cache_dtype="auto",
            q_lora_rank=QUERY,
            kv_lora_rank=LATENT,
            qk_rope_head_dim=ROPE,
            qk_nope_head_dim=16,
            qk_head_dim=16 + ROPE,
            v_head_dim=8,
            num_heads=1,
            num_local_heads=1,
            fused_qkv_a_proj=linear(HIDDEN, QUERY + LATENT + ROPE),
            q_b_proj=linear(QUERY, 16 + ROPE),
            o_proj=lambda tokens: (tokens, None),
            q_a_layernorm=SimpleNamespace(weight=torch.ones(QUERY), variance_epsilon=1e-6),
            kv_a_layernorm=SimpleNamespace(weight=torch.ones(LATENT), variance_epsilon=1e-6),
            rotary_emb=SimpleNamespace(cos_sin_cache=torch.randn(512, ROPE)),
            indexer_rope_emb=SimpleNamespace(cos_sin_cache=torch.randn(512, ROPE)),
            W_UK_T=torch.randn(1, 16, LATENT),
            _k_scale=torch.ones(1),
            _q_scale=torch.ones(1),
            _fp8_query=False,
            _fp8_kv_needs_view=False,
            _index_rope_interleave=False,
            _dense_mha_metadata_layer_name="",
            _vllm_config=self.config,
            _use_sparse_mha=lambda _: False,
        )
        self.config.compilation_config.static_forward_context[layer.layer_name] = layer
        return layer


def configuration(mode: Mode, processes: int) -> Any:
    """As much of vLLM's configuration as there is without a model."""
    config = VllmConfig()
    config.parallel_config = ParallelConfig(
        tensor_parallel_size=processes,
        decode_context_parallel_size=mode.ranks,
        cp_kv_cache_interleave_size=mode.interleave,
    )
    config.model_config = SimpleNamespace(
        is_moe=False,
        max_model_len=512,
        hf_text_config=SimpleNamespace(num_hidden_layers=61, index_topk=CHOSEN, model_type="deepseek_v32"),
    )
    config.cache_config.block_size = PAGE
    config.kernel_config.enable_jit_warmup = False
    config.attention_config.sparse_mla_prefill_workspace_factor = 1
    config.scheduler_config.max_num_batched_tokens = 512
    config.scheduler_config.max_num_seqs = 8
    drafts = SimpleNamespace(num_speculative_tokens=mode.drafts, enable_adaptive_verification=False)
    config.speculative_config = drafts if mode.drafts else None
    return config


def take_back(owner: str, name: str) -> None:
    """Put back what vLLM has in the place of one patch."""
    (found,) = [one for one in patches._applied if (one[0].owner, one[0].name) == (owner, name)]
    _, place, before = found
    setattr(place, name, before)


@contextmanager
def watched(layer: Layer) -> Iterator[list[tuple[str, str, int]]]:
    """What is sent between ranks, as group, call and numbers sent; and what the layer scores, into `scored`."""
    sent: list[tuple[str, str, int]] = []
    score = attention.sparse_attn_indexer
    calls = {name: getattr(GroupCoordinator, name) for name in ("all_gather", "all_gatherv", "all_reduce", "broadcast")}

    def counting(name: str) -> Any:
        def call(self: GroupCoordinator, part: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.world_size > 1:
                sent.append((self.unique_name.split(":")[0], name, part.numel()))
            return calls[name](self, part, *args, **kwargs)

        return call

    def scoring(*args: Any, **kwargs: Any) -> torch.Tensor:
        layer.scored.append((args[3], args[6]))
        chosen: torch.Tensor = score(*args, **kwargs)
        return chosen

    for name in calls:
        setattr(GroupCoordinator, name, counting(name))
    attention.sparse_attn_indexer = scoring
    yield sent
    attention.sparse_attn_indexer = score
    for name, call in calls.items():
        setattr(GroupCoordinator, name, call)


def run(mode: Mode, rank: int, processes: int, identity: str) -> dict[str, Any]:
    """One mode on this rank: its memory, what was scored, chosen and sent in all steps."""
    # The name under which the ranks share memory.
    os.environ["VLLM_DIST_IDENT"] = f"{identity}-{mode.name}".replace(" ", "-")
    os.environ[shards.SHARDS] = str(mode.shards) if mode.shards < mode.ranks else "0"
    indexer_kernels.split_rows(8 if mode.split_rows else 0)
    plugin.register()
    config = configuration(mode, processes)
    with set_current_vllm_config(config):
        parallel_state.initialize_model_parallel(processes, 1, 1, mode.ranks)
        if mode.without is not None:
            take_back(*mode.without)
        layer = Layer(config, mode, rank)
        with watched(layer) as sent:
            chosen = [layer.step(works, number) for number, works in enumerate(mode.steps)]
    replica_groups.forget()
    parallel_state.destroy_model_parallel()
    patches.restore()
    memory = {"keys": layer.keys.reshape(-1, PAGE, 132), "latents": layer.latents}
    return memory | {"scored": layer.scored, "chosen": chosen, "sent": sent}


def main(rank: int, processes: int, folder: Path) -> None:
    """Run all modes on this rank."""
    torch.set_num_threads(1)
    indexer_kernels.fill_in()
    # That the kernels are CUDA's is all that the patches ask of the platform.
    vars(indexer_patches)["current_platform"] = SimpleNamespace(is_cuda=lambda: True)
    init_workspace_manager(torch.device("cpu"))
    with set_current_vllm_config(VllmConfig()):
        meeting = f"file://{folder / 'meeting'}"
        parallel_state.init_distributed_environment(processes, rank, meeting, rank, "gloo")
    found = {mode.name: run(mode, rank, processes, folder.name) for mode in MODES[processes]}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
