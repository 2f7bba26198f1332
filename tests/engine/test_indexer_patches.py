"""Indexers of fewer shards than ranks in vLLM's layers: who gets one, who is refused, and what it is told of a batch.

In one process, so that the group of decode ranks is a stand-in. With processes: `test_indexer_worker`.
"""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from indexer_batches import common, indexer
from vllm.distributed import parallel_state
from vllm.model_executor.layers import sparse_attn_indexer as scoring
from vllm.model_executor.models import deepseek_v2
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v32 import attention
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend, DeepseekV32IndexerMetadataBuilder
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import AttentionGroup, customize_attention_spec

from lockstep_kv.vllm import indexer_cache, indexer_metadata, indexer_patches, patches, plugin, replica_groups, shards
from lockstep_kv.vllm.indexer_cache import LockstepIndexerBackend, LockstepIndexerCache

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE = "model.layers.3.self_attn.indexer.k_cache"


def vllm_config(ranks: int, *, drafts: int = 0, length: int = 4096, **parallel: Any) -> Any:
    """As much of vLLM's configuration as its indexer reads."""
    speculation = SimpleNamespace(num_speculative_tokens=drafts, enable_adaptive_verification=False)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{
                "decode_context_parallel_size": ranks,
                "prefill_context_parallel_size": 1,
                "tensor_parallel_size": ranks,
                "cp_kv_cache_interleave_size": 1,
                "enable_elastic_ep": False,
            }
            | parallel
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
        model_config=SimpleNamespace(
            max_model_len=length,
            hf_text_config=SimpleNamespace(num_hidden_layers=78, index_topk=2048, model_type="glm_moe_dsa"),
        ),
        attention_config=SimpleNamespace(
            sparse_mla_prefill_workspace_factor=5, resolve_indexer_kv_dtype=lambda default: default
        ),
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(block_size=64),
        speculative_config=speculation if drafts else None,
        num_speculative_tokens=drafts,
        use_v2_model_runner=True,
    )


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (shards.REPLICATE, shards.SHARDS, plugin.SWITCH):
        monkeypatch.delenv(name, raising=False)
    patches.restore()
    yield
    patches.restore()


def configure(monkeypatch: pytest.MonkeyPatch, config: Any, rank: int = 0) -> None:
    """Make it the configuration that vLLM's layers find, on one of its ranks."""
    ranks = config.parallel_config.decode_context_parallel_size
    for module in (deepseek_v2, indexer_cache):
        monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    group = SimpleNamespace(rank_in_group=rank, world_size=ranks, ranks=list(range(ranks)))
    monkeypatch.setattr(parallel_state, "_DCP", group)


def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check of the platform pass."""
    monkeypatch.setattr(indexer_patches, "current_platform", SimpleNamespace(is_cuda=lambda: True))


def prepared(monkeypatch: pytest.MonkeyPatch, config: Any, switch: str, value: str, rank: int = 0) -> None:
    """Prepare a worker as `initialize_model_parallel` does, but for the groups of a partial indexer."""
    monkeypatch.setenv(switch, value)
    on_cuda(monkeypatch)
    monkeypatch.setattr(replica_groups, "build", lambda *_: None)
    configure(monkeypatch, config, rank)
    indexer_patches.prepare(config)


def new_cache(prefix: str = WHOLE) -> Any:
    return DeepseekV32IndexerCache(
        head_dim=132, dtype=torch.uint8, prefix=prefix, cache_config=SimpleNamespace(block_size=64)
    )


# Who gets one.


def test_with_no_switch_nothing_of_the_indexer_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        [vars(DeepseekV32IndexerCache).get("__new__"), vars(scoring.SparseAttnIndexer)["__init__"]],
        [scoring.PrefillRowShard, scoring._merge_dcp_topk_global, attention.fused_norm_rope],
        [attention.sparse_attn_indexer, attention.DeepseekV32Attention.forward],
    ]
    monkeypatch.setenv(plugin.SWITCH, "on")
    plugin.register()
    monkeypatch.setattr(patches, "_make_groups", lambda *_, **__: None)
    parallel_state.initialize_model_parallel(8, 1, 1, 8)
    assert found == [
        [vars(DeepseekV32IndexerCache).get("__new__"), vars(scoring.SparseAttnIndexer)["__init__"]],
        [scoring.PrefillRowShard, scoring._merge_dcp_topk_global, attention.fused_norm_rope],
        [attention.sparse_attn_indexer, attention.DeepseekV32Attention.forward],
    ]


def test_a_worker_prepares_once_it_has_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(4)
    calls: list[Any] = []
    monkeypatch.setenv(plugin.SWITCH, "on")
    monkeypatch.setenv(shards.REPLICATE, "1")
    plugin.register()
    monkeypatch.setattr(patches, "_make_groups", lambda *sizes: calls.append(sizes))
    monkeypatch.setattr(patches, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(indexer_patches, "prepare", calls.append)
    parallel_state.initialize_model_parallel(4, 1, 1, 4)
    assert calls == [(4, 1, 1, 4), config]


@pytest.mark.parametrize(
    ("switch", "value", "ranks", "rank", "expected"),
    [
        (shards.REPLICATE, "1", 4, 3, (1, 0)),
        (shards.SHARDS, "1", 2, 1, (1, 0)),
        (shards.SHARDS, "2", 4, 3, (2, 1)),
        (shards.SHARDS, "4", 8, 6, (4, 2)),
    ],
)
def test_a_target_layer_s_cache_has_its_shards(
    monkeypatch: pytest.MonkeyPatch, switch: str, value: str, ranks: int, rank: int, expected: tuple[int, int]
) -> None:
    config = vllm_config(ranks)
    prepared(monkeypatch, config, switch, value, rank)
    cache = new_cache()
    assert type(cache) is LockstepIndexerCache
    assert isinstance(cache, DeepseekV32IndexerCache)
    assert (cache.shards, cache.shard) == expected
    assert cache.get_attn_backend() is LockstepIndexerBackend
    assert cache.get_kv_cache_spec(config) == indexer(expected[0], ranks)
    assert config.compilation_config.static_forward_context == {WHOLE: cache}
    op = object.__new__(scoring.SparseAttnIndexer)
    monkeypatch.setattr("lockstep_kv.vllm.indexer_scoring._init_indexer_op", lambda *_, **__: None)
    scoring.SparseAttnIndexer.__init__(op, cache)
    assert (op.dcp_world_size, op.dcp_rank) == expected


def test_a_draft_layer_s_cache_stays_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(4)
    prepared(monkeypatch, config, shards.REPLICATE, "1")
    cache = new_cache("model.layers.78.self_attn.indexer.k_cache")
    assert type(cache) is DeepseekV32IndexerCache
    assert cache.get_attn_backend() is DeepseekV32IndexerBackend
    assert cache.get_kv_cache_spec(config) == indexer(4, 4)


def test_a_layer_with_a_cache_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pooled(DeepseekV32IndexerCache):  # type: ignore[misc]
        pass

    prepared(monkeypatch, vllm_config(4), shards.REPLICATE, "1")
    with pytest.raises(NotImplementedError, match=f"^{WHOLE}: a Pooled cannot have 1 shards$"):
        Pooled(132, torch.uint8, WHOLE, SimpleNamespace(block_size=64))


def test_after_restoring_vllm_s_own_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [scoring.PrefillRowShard, attention.fused_norm_rope, scoring.SparseAttnIndexer.__init__]
    config = vllm_config(4)
    prepared(monkeypatch, config, shards.REPLICATE, "1")
    assert scoring.PrefillRowShard is not before[0]
    patches.restore()
    assert [scoring.PrefillRowShard, attention.fused_norm_rope, scoring.SparseAttnIndexer.__init__] == before
    assert type(new_cache()) is DeepseekV32IndexerCache


# Who is refused, before there is a model.


@pytest.mark.parametrize(
    ("environment", "change", "error", "words"),
    [
        ({shards.SHARDS: "3"}, {}, ValueError, "must be a positive divisor of the 8 decode ranks, got 3"),
        ({shards.REPLICATE: "1", shards.SHARDS: "2"}, {}, ValueError, "=1 means one shard, but VLLM_DCP_INDEXER_"),
        ({shards.REPLICATE: "1"}, {"prefill_context_parallel_size": 2}, NotImplementedError, "got 8 and 2"),
        ({shards.REPLICATE: "1"}, {"decode_context_parallel_size": 16}, NotImplementedError, "got 16 and 1"),
        ({shards.REPLICATE: "1"}, {"enable_elastic_ep": True}, NotImplementedError, "elastic expert parallelism"),
        ({shards.REPLICATE: "1"}, {"runner": False}, NotImplementedError, "V2 model runner: set VLLM_USE_V2_MODEL_"),
        ({shards.REPLICATE: "1"}, {"model_type": "deepseek_v4"}, NotImplementedError, "models of type deepseek_v4"),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    change: dict[str, Any],
    error: type[Exception],
    words: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    on_cuda(monkeypatch)
    config = vllm_config(8)
    config.use_v2_model_runner = change.pop("runner", True)
    config.model_config.hf_text_config.model_type = change.pop("model_type", "glm_moe_dsa")
    vars(config.parallel_config).update(change)
    with pytest.raises(error, match=words):
        indexer_patches.prepare(config)
    assert not patches._applied


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shards.SHARDS, "2")
    with pytest.raises(NotImplementedError, match="2 indexer shards on 4 ranks need the indexer kernels of CUDA, got"):
        indexer_patches.prepare(vllm_config(4))


def test_a_model_without_an_indexer_is_told_that_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(shards.REPLICATE, "1")
    config = vllm_config(4)
    del config.model_config.hf_text_config.index_topk
    logger = logging.getLogger(plugin.LOGGER)
    logger.addHandler(caplog.handler)
    indexer_patches.prepare(config)
    logger.removeHandler(caplog.handler)
    assert "change nothing: the model has no sparse indexer" in caplog.text


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({shards.REPLICATE: "2"}, f"{shards.REPLICATE} must be 0 or 1, got 2"),
        ({shards.SHARDS: "x"}, f"{shards.SHARDS} must be a whole number, got 'x'"),
        ({shards.REPLICATE: "1", shards.SHARDS: "4"}, f"{shards.REPLICATE}=1 means one shard, but {shards.SHARDS}=4"),
    ],
)
def test_bad_switches_end_the_process_with_one_line(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], line: str
) -> None:
    monkeypatch.setenv(plugin.SWITCH, "on")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        plugin.register()
    assert caught.value.code == f"lockstep-kv: {line}"


# Its memory.


def test_its_pages_are_those_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(monkeypatch, vllm_config(4), shards.REPLICATE, "1")
    cache = new_cache()
    memory = torch.arange(3 * 256 * 132, dtype=torch.int32).to(torch.uint8)
    cache.bind_kv_cache(memory.view(3, 1, 256, 132))
    assert cache.kv_cache.shape == (12, 64, 132)
    assert cache.kv_cache.is_contiguous()
    assert cache.kv_cache.data_ptr() == memory.data_ptr()


def test_blocks_with_other_pages_between_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(monkeypatch, vllm_config(4), shards.REPLICATE, "1")
    memory = torch.zeros(3, 2, 1, 256, 132, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="they lie 67584 bytes apart instead of 33792"):
        new_cache().bind_kv_cache(memory[:, 0])


def test_only_layouts_with_a_layer_s_blocks_side_by_side_are_offered() -> None:
    layouts = LockstepIndexerBackend.supported_kv_cache_layouts()
    assert set(layouts) == {layout for layout in KVCacheLayout if layout.is_layer_compact and layout.is_block_compact}


# What it is told of a batch.


def builder_of(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: int, rank: int, *, drafts: int = 0, length: int = 4096
) -> DeepseekV32IndexerMetadataBuilder:
    """The builder that vLLM's worker makes for a layer of so many shards."""
    config = vllm_config(ranks, drafts=drafts, length=length)
    configure(monkeypatch, config, rank)
    backend = LockstepIndexerBackend if count < ranks else DeepseekV32IndexerBackend
    spec = customize_attention_spec(backend, indexer(count, ranks))
    group = AttentionGroup(backend, [WHOLE], spec, 0)
    group.create_metadata_builders(config, torch.device("cpu"), kernel_block_size=64)
    return group.get_metadata_builder()


def decodes(table: list[list[int]], seq_lens: list[int], query_lens: list[int] | None = None, width: int = 0) -> Any:
    """A batch of decodes, whose rows are so wide at least."""
    rows = [row + [0] * (width - len(row)) for row in table]
    batch = common(rows, seq_lens, query_lens or [1] * len(seq_lens))
    batch.dcp_local_seq_lens = torch.zeros(len(seq_lens), dtype=torch.int32)
    return batch


def test_one_shard_is_a_world_of_one_with_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of(monkeypatch, 1, 4, rank=2)
    assert (builder.dcp_world_size, builder.dcp_rank) == (1, 0)
    metadata = builder.build(0, decodes([[5, 9], [7, 0]], [300, 17]))
    decode = metadata.decode
    assert decode.global_seq_lens is None, "nothing is merged"
    assert decode.seq_lens.tolist() == [[300], [17]]
    assert decode.block_table.tolist() == [[20, 21, 22, 23, 36, 37, 38, 39], [28, 29, 30, 31, 0, 0, 0, 0]]
    # Position 299 is the 44th of block 9, 16 is in block 7.
    assert metadata.slot_mapping[:2].tolist() == [9 * 256 + 43, 7 * 256 + 16]
    assert metadata.slot_mapping[2:].tolist() == [-1, -1]


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_one_shard_are_told_the_same(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    builder = builder_of(monkeypatch, 2, 4, rank)
    assert (builder.dcp_world_size, builder.dcp_rank, int(builder.dcp_rank_tensor)) == (2, rank % 2, rank % 2)
    metadata = builder.build(0, decodes([[5, 9], [5, 0]], [18, 131]))
    assert metadata.decode.global_seq_lens.tolist() == [18, 131]
    assert metadata.decode.seq_lens.tolist() == [[[9], [66]], [[9], [65]]][rank % 2]
    # Positions 17 and 130: 17 is the second shard's 8th, 130 the first shard's 65th.
    assert metadata.slot_mapping[:2].tolist() == [[-1, 705], [648, -1]][rank % 2]
    assert metadata.decode.block_table.tolist() == [[10, 11, 18, 19], [10, 11, 0, 0]]


@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (2, 4)])
def test_lengths_are_cut_after_speculated_tokens_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: int
) -> None:
    """Ten tokens of which three are new, on the second of two shards: cut first, it would be 3, 4 and 5."""
    builder = builder_of(monkeypatch, count, ranks, rank=1, drafts=2)
    # As wide as the runner makes rows for 4,096 tokens.
    metadata = builder.build(0, decodes([[5], [6]], [10, 4], [3, 1], width=64 // ranks))
    assert metadata.decode.seq_lens.flatten().tolist() == [4, 4, 5, 2]
    assert metadata.decode.global_seq_lens.tolist() == [8, 9, 10, 4]


def test_one_shard_keeps_the_lengths_of_speculated_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of(monkeypatch, 1, 2, rank=1, drafts=2)
    metadata = builder.build(0, decodes([[5], [6]], [10, 4], [3, 1], width=32))
    assert metadata.decode.seq_lens.flatten().tolist() == [8, 9, 10, 4]
    assert metadata.decode.block_table[:, :2].tolist() == [[10, 11]] * 3 + [[12, 13]]


def test_lengths_of_padding_are_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of(monkeypatch, 1, 2, rank=0, drafts=1)
    metadata = builder.build(0, decodes([[0], [6]], [0, 5], [2, 2]))
    assert metadata.decode.seq_lens.tolist() == [[0, 0], [4, 5]]


@pytest.mark.parametrize(("count", "pages"), [(4, 1), (2, 2), (1, 4)])
def test_rows_are_as_wide_as_the_runner_s(monkeypatch: pytest.MonkeyPatch, count: int, pages: int) -> None:
    """480,000 tokens on 4 ranks are 1,875 blocks of 64; the runner makes rows of 1,876."""
    builder = builder_of(monkeypatch, count, 4, rank=0, length=480_000)
    assert builder.expanded_block_table_buffer.shape[1] == 1876 * pages


def test_made_up_requests_have_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """While graphs are captured all rows name the null block, which is never written."""
    builder = builder_of(monkeypatch, 1, 4, rank=0)
    metadata = builder.build_for_cudagraph_capture(decodes([[0, 0], [0, 0]], [1, 200]))
    assert metadata.slot_mapping.tolist() == [-1] * 4


def test_graphs_find_every_batch_at_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of(monkeypatch, 2, 4, rank=3)
    first = builder.build(0, decodes([[5, 9], [7, 0]], [200, 17]))
    held = (first.slot_mapping.data_ptr(), first.block_table.data_ptr())
    second = builder.build(0, decodes([[3, 4], [2, 1], [8, 0]], [250, 180, 90]))
    assert (second.slot_mapping.data_ptr(), second.block_table.data_ptr()) == held


# Groups of ranks.

EIGHT = [list(range(8))]


@pytest.mark.parametrize(
    ("count", "shard", "query_split"),
    [
        (8, EIGHT, [[rank] for rank in range(8)]),
        (4, [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (2, [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (1, [[rank] for rank in range(8)], EIGHT),
    ],
)
def test_groups_of_eight_ranks(count: int, shard: list[list[int]], query_split: list[list[int]]) -> None:
    assert replica_groups.replica_ranks(EIGHT, count) == (shard, query_split)


def test_tensor_parallel_groups_never_mix() -> None:
    shard, query_split = replica_groups.replica_ranks([[0, 1, 2, 3], [4, 5, 6, 7]], 2)
    assert shard == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert query_split == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize("count", [3, 5, 0, -2])
def test_shards_that_do_not_divide_the_ranks(count: int) -> None:
    with pytest.raises(ValueError, match=f"must divide the 8 tensor-parallel ranks, got {count}"):
        replica_groups.replica_ranks(EIGHT, count)


def test_a_group_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, vllm_config(4))
    assert replica_groups.shard_group(4) is parallel_state._DCP
    built = replica_groups.ReplicaGroups(SimpleNamespace(world_size=2), SimpleNamespace(world_size=2))
    monkeypatch.setattr(replica_groups, "_built", built)
    assert replica_groups.shard_group(2) is built.shard
    assert replica_groups.query_split_group() is built.query_split
    with pytest.raises(RuntimeError, match="of 3 indexer shards: the decode group has 4 ranks, that of shards 2"):
        replica_groups.shard_group(3)


# Whether vLLM's own still fit.

RELIED_ON = {
    "DeepseekV32IndexerCache.__new__": "",
    "DeepseekV32Attention.forward": "self positions hidden_states",
    ".fused_norm_rope": "slot_mapping indexer_slot_mapping indexer_k_cache mla_kv_cache mla_kv_cache_dtype mla_k_scale "
    "q_c_out kv_c_out k_pe_out",
    ".sparse_attn_indexer": "hidden_states k_cache_prefix dcp_rank dcp_world_size",
    "SparseAttnIndexer.__init__": "self k_cache",
    "._merge_dcp_topk_global": "logits topk_indices topk_tokens dcp_rank dcp_world_size cp_interleave row_starts",
    ".PrefillRowShard": "num_decode_tokens sizes rank",
    "._reserve_row_shard_exchange_transient": "topk_indices_buffer device",
    "BuildPrefillChunkMetadataKernel.get_warmup_keys": "self vllm_config",
}
"""The parameters of each patch point that are used by name."""


@pytest.mark.parametrize("patch", indexer_patches._patches(), ids=lambda patch: f"{patch.owner}.{patch.name}")
def test_each_patch_point_has_the_parameters_that_are_relied_on(patch: patches.Patch) -> None:
    module = __import__(patch.module, fromlist=["x"])
    owner = getattr(module, patch.owner) if patch.owner else module
    names = RELIED_ON[f"{patch.owner}.{patch.name}"].split()
    if not names:
        assert "__new__" not in inspect.getsource(owner)
        return
    parameters = list(inspect.signature(getattr(owner, patch.name)).parameters)
    assert [name for name in names if name not in parameters] == []


def test_the_builder_has_what_ours_builds_on() -> None:
    assert list(inspect.signature(DeepseekV32IndexerMetadataBuilder.build).parameters) == list(
        inspect.signature(indexer_metadata.LockstepIndexerMetadataBuilder.build).parameters
    )
    assert DeepseekV32IndexerMetadataBuilder.requires_block_table_width
    for name in ("get_kv_cache_spec", "bind_kv_cache", "get_attn_backend"):
        ours, theirs = getattr(LockstepIndexerCache, name), getattr(DeepseekV32IndexerCache, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
