"""Native offload in real vLLM engines on the CPU: a pool too small for the prompts, and a host tier behind it.

The weights make each token depend on all before it, so that a wrong byte shows. Mixed caches on several ranks are in
`test_mixed_mla`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import engines
import torch
from engines import ASYNC, SYNC
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from lockstep_kv.errors import ConfigError, DoubleFreeError
from lockstep_kv.tensors import POISON
from lockstep_kv.vllm import patches, plugin
from lockstep_kv.vllm.offload_manager import HostRows, LockstepOffloadingManager
from lockstep_kv.vllm.offload_spec import LockstepOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from lockstep_kv.vllm.offload_worker import LockstepOffloadingWorker

# In a real engine.

HOST = {"kv_offloading_size": 0.05}
TINY = {"load_format": "tiny", "block_size": 32, "max_model_len": 544}


@pytest.mark.parametrize(
    ("model", "small", "large", "scheduling"),
    [("llama", 20, 200, SYNC), ("llama", 20, 200, ASYNC), ("gemma3", 52, 300, SYNC)],
    ids=["full attention", "full attention, async", "windows and full attention"],
)
def test_tokens_of_a_small_pool_with_a_host_tier(
    tmp_path: Path, model: str, small: int, large: int, scheduling: dict[str, Any]
) -> None:
    pools: dict[str, dict[str, Any]] = {
        "large": {"num_gpu_blocks_override": large},
        "small": {"num_gpu_blocks_override": small},
        "host": {"num_gpu_blocks_override": small, **HOST},
    }
    scenes = {"large": "returning", "small": "returning", "host": "returning,poisoned_host"}

    def run(name: str) -> Any:
        (tmp_path / name).mkdir()
        engine = {**TINY, **pools[name], **scheduling}
        return engines.run(tmp_path / name, "require", model, scenes[name], engine, {}, {}, "kinds_run.py")

    with ThreadPoolExecutor(2) as threads:
        found = dict(zip(pools, threads.map(run, pools), strict=True))
    scene = {name: outcome["scenes"]["returning"] for name, (outcome, _) in found.items()}
    tokens = {name: [answers for answers, _ in scene[name]] for name in pools}
    hits = {name: [cached for _, cached in scene[name]][5:10] for name in pools}
    assert tokens["host"] == tokens["large"]
    assert sum(hits["small"]) < sum(hits["host"]) == sum(hits["large"])
    assert len({str(answer) for answer in tokens["large"]}) > 5, "prompts have answers of their own"
    # The same prompts once more, after the host's memory was overwritten: it is really read.
    poisoned = [answers for answers, _ in found["host"][0]["scenes"]["poisoned_host"]]
    assert poisoned != tokens["host"]


# Who offloads.


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def switch(value: str) -> None:
        monkeypatch.setenv(plugin.SWITCH, value)
        plugin.register()

    patches.restore()
    yield switch
    patches.restore()


def test_offload_runs_here_unless_a_spec_is_named(applied: Any) -> None:
    stock = OffloadingSpecFactory.get_spec_cls({})
    applied("on")
    assert OffloadingSpecFactory.get_spec_cls({"cpu_bytes_to_use": 1}) is LockstepOffloadingSpec
    assert OffloadingSpecFactory.get_spec_cls({"spec_name": "CPUOffloadingSpec"}) is stock
    named = {"spec_name": "LockstepOffloadingSpec", "spec_module_path": LockstepOffloadingSpec.__module__}
    assert OffloadingSpecFactory.get_spec_cls(named) is LockstepOffloadingSpec
    patches.restore()
    assert OffloadingSpecFactory.get_spec_cls({}) is stock


def test_options_of_vllm_s_own_offload(applied: Any) -> None:
    stock = OffloadingSpecFactory.get_spec_cls({})
    applied("on")
    assert OffloadingSpecFactory.get_spec_cls({"store_threshold": 2}) is stock
    applied("require")
    with pytest.raises(ConfigError, match="=require, but store_threshold is not there for this offload, got 2"):
        OffloadingSpecFactory.get_spec_cls({"store_threshold": 2})


def spec_of(total: int, *, per_block: int = 1000, workers: int = 2, blocks_per_chunk: int = 1, **extra: Any) -> Any:
    config = SimpleNamespace(
        extra_config={"cpu_bytes_to_use": total, **extra},
        enable_kv_cache_events=True,
        groups=(SimpleNamespace(tokens_per_block=16),),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk),
        worker_kv_bytes_per_block=per_block,
        parallel=SimpleNamespace(world_size=workers),
    )
    return LockstepOffloadingSpec(config)


def test_rows_share_the_memory_of_all_workers() -> None:
    """1,000 bytes take 1,008: rows start at multiples of 16."""
    assert spec_of(20_160).num_rows == 10
    assert spec_of(20_159).num_rows == 9
    assert spec_of(20_160, blocks_per_chunk=3).num_rows == 20_160 // 2 // 3008


@pytest.mark.parametrize("total", [0, None, 2015, -5])
def test_memory_that_holds_no_row_is_refused(total: Any) -> None:
    with pytest.raises(ConfigError, match=f"a row of 1008 bytes for each of 2 workers, got {total or 0}$"):
        spec_of(total)


def test_a_host_tier_holds_twice_the_chunks_of_one_key_per_group() -> None:
    """VLLM has a key for each group, and each key takes a row for the bytes of all groups."""
    latent, indexer, total = 3 * 27_648, 2 * 33_792, 10**9
    ours = spec_of(total, per_block=latent + indexer, workers=1).num_rows
    theirs = total // (-(-(latent + indexer) // 4096) * 4096) // 2
    assert ours / theirs == pytest.approx(2, rel=0.02)


# The index, as the connector asks.

CONTEXT = ReqContext("r")


def keys(*numbers: int) -> list[Any]:
    return [make_offload_key(bytes([number]) * 32, 0) for number in numbers]


def test_the_manager_s_calls() -> None:
    manager = LockstepOffloadingManager(2, "lru", enable_events=True)
    (first, second, third) = keys(1, 2, 3)
    plan = manager.prepare_store([first, second], CONTEXT)
    assert plan is not None
    assert (plan.keys_to_store, plan.store_spec.block_ids.tolist(), plan.evicted_keys) == ([first, second], [0, 1], [])
    assert manager.lookup(first, CONTEXT) is LookupResult.HIT_PENDING
    manager.complete_store([first], CONTEXT)
    manager.complete_store([second], CONTEXT, success=False)
    assert [manager.lookup(key, CONTEXT) for key in (first, second)] == [LookupResult.HIT, LookupResult.MISS]
    assert manager.prepare_load([first], CONTEXT).block_ids.tolist() == [0]
    assert manager.prepare_store([second, third], CONTEXT) is None, "what is read stays"
    manager.complete_load([first], CONTEXT)
    with pytest.raises(DoubleFreeError):
        manager.complete_load([first], CONTEXT)
    plan = manager.prepare_store([second, third], CONTEXT)
    assert plan is not None
    assert plan.evicted_keys == [first]
    told = [(event.keys, event.removed) for event in manager.take_events()]
    assert told == [([first], False), ([first], True)]
    assert list(manager.take_events()) == []
    manager.reset_cache()
    assert [manager.lookup(key, CONTEXT) for key in (second, third)] == [LookupResult.MISS] * 2
    assert manager.index.num_free_slots == 2


# The copies, as the connector asks.


def worker_of(blocks_per_chunk: int) -> tuple[LockstepOffloadingWorker, list[torch.Tensor]]:
    """A worker of two groups: the first of two layers, the second of one whose pages lie apart."""
    memory = torch.arange(9 * 40, dtype=torch.int32).to(torch.int8).view(9, 40)
    layers = [torch.randint(-99, 99, (9, 24), dtype=torch.int8), torch.randint(-99, 99, (9, 8), dtype=torch.int8)]
    layers.append(memory[:, 8:24])
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(layer, layer.shape[1]) for layer in layers],
        [[CanonicalKVCacheRef(0, 24), CanonicalKVCacheRef(1, 8)], [CanonicalKVCacheRef(2, 16)]],
    )
    total = 2 * 8 * 32 * blocks_per_chunk
    return spec_of(total, per_block=32, workers=2, blocks_per_chunk=blocks_per_chunk).get_worker(caches), layers


@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_what_is_stored_is_loaded_to_other_blocks(blocks_per_chunk: int) -> None:
    """Both groups in one job. A load may begin inside a chunk."""
    worker, layers = worker_of(blocks_per_chunk)
    before = [layer.clone() for layer in layers]
    blocks = [3, 7, 1, 5, 2, 8][: 2 * blocks_per_chunk]
    rows = HostRows([4, 0, 6, 2])
    worker.submit_store(11, GPULoadStoreSpec(blocks * 2, [len(blocks)] * 2, [0, 2 * blocks_per_chunk]), rows)
    worker.wait({11, 99})
    (stored,) = worker.get_finished()
    assert (stored.job_id, stored.success, stored.transfer_size) == (11, True, len(blocks) * (32 + 16))
    for layer in layers:
        layer.fill_(POISON - 256)
    # The last block of the first chunk and all of the second.
    found, targets = blocks[blocks_per_chunk - 1 :], [6, 4, 8, 1][: blocks_per_chunk + 1]
    starts = [blocks_per_chunk - 1, 3 * blocks_per_chunk - 1]
    worker.submit_load(12, rows, GPULoadStoreSpec(targets * 2, [len(targets)] * 2, starts))
    worker.wait({12})
    assert [result.success for result in worker.get_finished()] == [True]
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[targets], was[found])
        others = [block for block in range(9) if block not in targets]
        assert (layer[others] == POISON - 256).all()
    worker.shutdown()


def test_a_job_without_blocks_ends() -> None:
    worker, _ = worker_of(1)
    worker.submit_store(3, GPULoadStoreSpec([], [0, 0], [0, 0]), HostRows([]))
    worker.wait({3})
    assert [(result.job_id, result.success, result.transfer_size) for result in worker.get_finished()] == [(3, True, 0)]
    worker.shutdown()
