"""The switches for fewer indexer shards, and what vLLM's own planner and tables make of them. Needs vLLM."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
import vllm.envs
from indexer_batches import common, indexer, latent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.v1.core import kv_cache_utils as planner
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import customize_attention_spec

from lockstep_kv.vllm import shards
from lockstep_kv.vllm.indexer_cache import LockstepIndexerBackend
from lockstep_kv.vllm.indexer_tables import IndexerTables


def vllm_config(ranks: int, *, length: int = 262_144, prefill_ranks: int = 1, override: int | None = None) -> Any:
    """As much of vLLM's configuration as its planner reads, for a model of 78 layers."""
    layout = KVCacheLayout.LBNHC
    return SimpleNamespace(
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=override,
            prefix_cache_retention_interval=None,
            block_size=64,
            prefix_match_unit=None,
            enable_prefix_caching=True,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=ranks,
            prefill_context_parallel_size=prefill_ranks,
            tensor_parallel_size=ranks,
        ),
        model_config=SimpleNamespace(
            max_model_len=length,
            original_max_model_len=length,
            hf_text_config=SimpleNamespace(num_hidden_layers=78),
        ),
        speculative_config=None,
        kv_transfer_config=None,
        num_prefill_lookahead_tokens=0,
        device_config=SimpleNamespace(device_type="cpu"),
    )


def layers(record: int, num_shards: int, ranks: int, latents: int = 78, indexers: int = 21) -> dict[str, KVCacheSpec]:
    specs: dict[str, KVCacheSpec] = {f"layers.{at}.attn": latent(record) for at in range(latents)}
    return specs | {f"layers.{at}.indexer": indexer(num_shards, ranks) for at in range(indexers)}


def plan(config: Any, specs: dict[str, KVCacheSpec], available: int) -> KVCacheConfig:
    (planned,) = planner.get_kv_cache_configs(config, [specs], [available])
    return planned


# The switches.


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (shards.REPLICATE, shards.SHARDS):
        monkeypatch.delenv(name, raising=False)


def test_vllm_knows_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.envs, "environment_variables", dict(vllm.envs.environment_variables))
    shards.register_switches()
    monkeypatch.setenv(shards.SHARDS, "4")
    assert vllm.envs.environment_variables[shards.SHARDS]() == 4
    assert vllm.envs.environment_variables[shards.REPLICATE]() == 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_off_means_as_many_shards_as_ranks(ranks: int) -> None:
    config = vllm_config(ranks)
    assert shards.shards_of_layer(config, 3) == ranks
    spec = indexer(ranks, ranks)
    assert spec.tokens_per_state == 1
    assert shards.shards_of(spec, ranks) == ranks


@pytest.mark.parametrize(
    ("replicate", "count", "ranks", "expected"),
    [("1", "0", 2, 1), ("1", "1", 8, 1), ("0", "1", 8, 1), ("0", "2", 8, 2), ("0", "4", 8, 4), ("0", "8", 8, 8)],
)
def test_what_the_switches_ask_for(
    monkeypatch: pytest.MonkeyPatch, replicate: str, count: str, ranks: int, expected: int
) -> None:
    monkeypatch.setenv(shards.REPLICATE, replicate)
    monkeypatch.setenv(shards.SHARDS, count)
    config = vllm_config(ranks)
    assert shards.shards_of_layer(config, 77) == expected
    assert shards.shards_of_layer(config, 78) == ranks, "a draft layer stays as it is"
    assert shards.shards_of_layer(config, None) == ranks
    assert shards.shards_of(indexer(expected, ranks), ranks) == expected


@pytest.mark.parametrize("count", [3, 5, 6, 7, 9])
def test_shards_must_divide_the_ranks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv(shards.SHARDS, str(count))
    with pytest.raises(ValueError, match=f"positive divisor of the 8 decode ranks, got {count}"):
        shards.shards_of_layer(vllm_config(8), 0)
    assert shards.shards_of_layer(vllm_config(8), 78) == 8, "nothing is checked for a draft layer"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        (shards.REPLICATE, "2", "must be 0 or 1, got 2"),
        (shards.REPLICATE, "yes", "must be a whole number, got 'yes'"),
        (shards.SHARDS, "-1", "a number of shards, got -1"),
        (shards.SHARDS, "1.5", "must be a whole number, got '1.5'"),
    ],
)
def test_bad_values_are_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        shards.shards_of_layer(vllm_config(8), 0)


def test_the_switches_must_not_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shards.REPLICATE, "1")
    monkeypatch.setenv(shards.SHARDS, "2")
    with pytest.raises(ValueError, match="means one shard, but VLLM_DCP_INDEXER_SHARDS=2"):
        shards.shards_of_layer(vllm_config(4), 0)


@pytest.mark.parametrize(("ranks", "prefill_ranks"), [(16, 1), (4, 2)])
def test_ranks_that_are_not_supported(monkeypatch: pytest.MonkeyPatch, ranks: int, prefill_ranks: int) -> None:
    monkeypatch.setenv(shards.REPLICATE, "1")
    with pytest.raises(NotImplementedError, match=f"got {ranks} and {prefill_ranks}"):
        shards.shards_of_layer(vllm_config(ranks, prefill_ranks=prefill_ranks), 0)


# vLLM's planner.


def test_bytes_add_up_and_blocks_do_not() -> None:
    """Twice the memory of the longest request, and vLLM's null block."""
    config = vllm_config(4)
    per_block = 3 * 27_648 + 2 * 33_792
    assert per_block == 150_528
    planned = plan(config, layers(432, 1, 4, latents=3, indexers=2), 2 * 154_140_672 + per_block)
    assert planned.num_blocks == 2048 + 1
    assert len(planned.kv_cache_groups) == 1, "a lockstep set is one group of vLLM's"
    assert planner.resolve_kv_cache_block_sizes(planned, config) == (256, 256)
    concurrency = planner.get_max_concurrency_for_kv_cache_config(config, planned)
    assert concurrency == 2049 / 1024


def test_every_layer_has_a_region_of_its_own() -> None:
    planned = plan(vllm_config(4), layers(432, 1, 4, latents=3, indexers=2), 10**9)
    regions = []
    for tensor in planned.kv_cache_tensors:
        size = tensor.block_stride * planned.num_blocks
        regions += [(tensor.offset + at * tensor.layer_stride, size) for at in range(len(tensor.layers))]
    regions.sort()
    assert len(regions) == 5
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(regions))
    assert regions[-1][0] + regions[-1][1] <= planned.kv_cache_tensors[0].size


TOPOLOGIES = [
    (2, 2, 177_408, 128),
    (2, 1, 354_816, 128),
    (4, 2, 354_816, 256),
    (4, 1, 709_632, 256),
    (8, 4, 354_816, 512),
    (8, 2, 709_632, 512),
    (8, 1, 1_419_264, 512),
]


@pytest.mark.parametrize(("ranks", "count", "indexer_bytes", "span"), TOPOLOGIES)
@pytest.mark.parametrize(("record", "latent_bytes"), [(656, 3_274_752), (432, 2_156_544), (368, 1_837_056)])
def test_glm(ranks: int, count: int, indexer_bytes: int, span: int, record: int, latent_bytes: int) -> None:
    """78 latent caches and 21 indexers: bytes of a block, and the tokens that it stands for."""
    config = vllm_config(ranks)
    per_block = latent_bytes + indexer_bytes
    planned = plan(config, layers(record, count, ranks), 5000 * per_block + 1)
    assert planned.num_blocks == 5000
    assert planner.resolve_kv_cache_block_sizes(planned, config) == (span, span)


def test_the_smallest_rank_and_an_override_decide_for_all() -> None:
    config = vllm_config(4)
    specs = layers(656, 1, 4)
    per_block = 3_984_384
    planned = planner.get_kv_cache_configs(config, [specs, specs], [3000 * per_block, 2000 * per_block])
    assert [one.num_blocks for one in planned] == [2000, 2000]
    assert [one.kv_cache_tensors[0].size for one in planned] == [2000 * per_block] * 2
    overridden = plan(vllm_config(4, override=1500), specs, 3000 * per_block)
    assert overridden.num_blocks == 1500


def test_what_does_not_fit_is_refused_with_the_length_that_would() -> None:
    specs = layers(656, 1, 4)
    with pytest.raises(ValueError, match="estimated maximum model length is 256000"):
        plan(vllm_config(4), specs, 1001 * 3_984_384)


def test_capacity_over_vllm_s_best_for_the_same_caches() -> None:
    """What vLLM itself can do: the indexer as a group of its own, of larger blocks that are not sharded."""
    ranks, available = 4, 10**10
    alone = MLAAttentionSpec(block_size=256, num_kv_heads=1, head_size=132, dtype=torch.uint8, dcp_sharded=False)
    two: dict[str, KVCacheSpec] = {f"layers.{at}.attn": latent(656) for at in range(78)}
    two |= {f"layers.{at}.indexer": alone for at in range(21)}
    ours = vllm_config(ranks)
    tokens, _ = planner.get_kv_cache_capacity(ours, plan(ours, layers(656, 1, ranks), available))
    theirs = vllm_config(ranks)
    theirs.cache_config.get_resolved_kv_cache_layout = lambda: KVCacheLayout.BLHNC
    separate = plan(theirs, two, available)
    assert len(separate.kv_cache_groups) == 2
    their_tokens, _ = planner.get_kv_cache_capacity(theirs, separate)
    assert tokens / their_tokens >= 1.6


def test_what_the_backend_asks_of_blocks_leaves_them_side_by_side() -> None:
    """VLLM lets a backend with kernels of one page size ask for an alignment of its blocks."""
    specs = layers(656, 1, 4, latents=3, indexers=2)
    for name in specs:
        if "indexer" in name:
            specs[name] = customize_attention_spec(LockstepIndexerBackend, specs[name])
    planned = plan(vllm_config(4), specs, 10**9)
    pages = {name: tensor.block_stride for tensor in planned.kv_cache_tensors for name in tensor.layers}
    assert set(pages.values()) == {64 * 656, 256 * 132}
    assert pages["layers.0.indexer"] == 256 * 132


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BHLNC])
def test_a_layout_that_cannot_hold_pages_of_two_sizes_is_refused(layout: KVCacheLayout) -> None:
    config = vllm_config(4)
    config.cache_config.get_resolved_kv_cache_layout = lambda: layout
    with pytest.raises(ValueError, match="cannot express this model's mixed page sizes"):
        plan(config, layers(656, 1, 4), 10**10)


# Tables of one rank.


def test_a_replicated_cache_has_a_slot_for_every_token() -> None:
    tables = IndexerTables(kernel_block_size=64, ranks=4, shards=1, rank=2)
    slots = tables.slots(torch.tensor([0, 7, 63, 64, 255]), torch.tensor([[5]] * 5))
    assert slots.tolist() == [1280, 1287, 1343, 1344, 1535]
    assert tables.kernel_block_table(torch.tensor([[5, 9]])).tolist() == [[20, 21, 22, 23, 36, 37, 38, 39]]
    lengths = torch.tensor([17, 300])
    assert tables.local_seq_lens(lengths).tolist() == [17, 300]


@pytest.mark.parametrize("rank", range(4))
def test_ranks_of_one_shard_have_the_same_slots(rank: int) -> None:
    tables = IndexerTables(kernel_block_size=64, ranks=4, shards=2, rank=rank)
    slots = tables.slots(torch.tensor([0, 1, 2, 3, 127, 128, 129]), torch.tensor([[5]] * 7))
    held = [[640, -1, 641, -1, -1, 704, -1], [-1, 640, -1, 641, 703, -1, 704]]
    assert slots.tolist() == held[rank % 2]
    assert tables.kernel_block_table(torch.tensor([[5]])).tolist() == [[10, 11]]


def test_a_sharded_cache_has_vllm_s_slots() -> None:
    tables = IndexerTables(kernel_block_size=64, ranks=4, shards=4, rank=2)
    slots = tables.slots(torch.arange(8), torch.tensor([[5]] * 8))
    assert slots.tolist() == [-1, -1, 320, -1, -1, -1, 321, -1]
    wide = IndexerTables(kernel_block_size=64, ranks=4, shards=4, rank=2, interleave=16)
    at = torch.tensor([31, 32, 47, 48, 96, 111, 112, 256, 288])
    rows = torch.tensor([[5, 9]] * len(at))
    assert wide.slots(at, rows).tolist() == [-1, 320, 335, -1, 336, 351, -1, -1, 576]
    assert [
        IndexerTables(64, 4, 4, rank, 16).local_seq_lens(torch.tensor([17, 33, 100])).tolist() for rank in range(4)
    ] == [[16, 16, 32], [1, 16, 32], [0, 1, 20], [0, 0, 16]]


def test_the_tokens_of_a_batch_find_their_requests() -> None:
    """Two requests: one decodes, one computes three tokens of its prompt; two tokens are padding."""
    tables = IndexerTables(kernel_block_size=2, ranks=2, shards=1, rank=1)
    batch = common([[3, 4], [7, 0]], seq_lens=[6, 4], query_lens=[1, 3], padded=2)
    assert tables.slot_mapping(batch).tolist() == [4 * 4 + 1, 7 * 4 + 1, 7 * 4 + 2, 7 * 4 + 3, -1, -1, -1, -1]


# What a connector sees.


@pytest.mark.parametrize(("count", "record"), [(1, 432), (2, 432), (4, 656)])
def test_offloading_sees_one_group_with_the_bytes_of_both_caches(count: int, record: int) -> None:
    """One key for a block of both caches: vLLM makes a key for each group, and gives it a row for the bytes of all."""
    config = vllm_config(4)
    config.kv_transfer_config = SimpleNamespace(kv_connector_extra_config={}, engine_id="e")
    config.kv_events_config = None
    config.use_v2_model_runner = True
    config.cache_config.cache_dtype = "fp8_ds_mla"
    config.cache_config.kv_cache_layout = "LBNHC"
    vars(config.model_config).update(use_mla=True, model="m", dtype=torch.bfloat16)
    ranks = {"pipeline_parallel_size": 1, "world_size": 4, "rank": 0, "distributed_executor_backend": "mp"}
    replicas = {"data_parallel_index": 0, "data_parallel_size": 1, "data_parallel_rank_local": None}
    vars(config.parallel_config).update(ranks, **replicas, nnodes_within_dp=1)
    planned = plan(config, layers(record, count, 4, latents=3, indexers=2), 10**9)
    seen = build_offloading_config(config, planned)
    (group,) = seen.groups
    assert (group.tokens_per_block, seen.cache.tokens_per_hash) == (256, 256)
    assert len(group.layer_names) == 5
    assert seen.worker_kv_bytes_per_block == 3 * 64 * record + 2 * 64 * 132 * (4 // count)
    assert not seen.replicated_layout
    assert not seen.parallel.is_parallelism_agnostic
