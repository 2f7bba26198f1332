"""The plugin: its switch, its patches, what it covers, and that all of it still fits the installed vLLM."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import Config, Group
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing as vllm_hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from lockstep_kv.errors import ConfigError
from lockstep_kv.vllm import LockstepKVCacheManager, patches, plugin
from lockstep_kv.vllm.blocks import BlockView, IdBlocks
from lockstep_kv.vllm.coordinator_view import CoordinatorView, ManagerView
from lockstep_kv.vllm.coverage import NotCoveredError
from lockstep_kv.vllm.hashing import request_block_hasher
from lockstep_kv.vllm.pool_view import BlockPoolView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ONE = Config((Group("full", 16, sharded=True, width=8, is_eagle=False),), 20, 1, enable_caching=True, use_eagle=False)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the plugin logs, whether or not vLLM's logger passes it on to the root, where pytest listens."""
    logger = logging.getLogger(plugin.LOGGER)
    logger.addHandler(caplog.handler)
    logger.propagate = False
    caplog.set_level(logging.WARNING, plugin.LOGGER)
    yield caplog
    logger.propagate = True
    logger.removeHandler(caplog.handler)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Switches the plugin as LOCKSTEP_KV would; taken back afterwards."""

    def switch(value: str) -> None:
        monkeypatch.setenv(plugin.SWITCH, value)
        plugin.register()

    patches.restore()
    yield switch
    patches.restore()


# The switch.


@pytest.mark.parametrize(
    ("value", "mode"), [(None, "off"), ("", "off"), ("off", "off"), ("on", "on"), ("require", "require")]
)
def test_the_switch(monkeypatch: pytest.MonkeyPatch, value: str | None, mode: str) -> None:
    monkeypatch.delenv(plugin.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(plugin.SWITCH, value)
    assert plugin.mode() == mode


@pytest.mark.parametrize("value", ["maybe", "ON", "1", " on"])
def test_an_unknown_value_ends_the_process_with_one_line(applied: Callable[[str], None], value: str) -> None:
    with pytest.raises(SystemExit) as caught:
        applied(value)
    assert caught.value.code == f"lockstep-kv: LOCKSTEP_KV must be one of off, on, require, got {value!r}"


def test_off_touches_nothing(applied: Callable[[str], None]) -> None:
    applied("off")
    assert type(KVCacheManager(**ONE.arguments())) is KVCacheManager


@pytest.mark.parametrize("installed", ["0.31.2", "0.33.0", "1.0"])
def test_an_unknown_version(
    applied: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture, installed: str
) -> None:
    monkeypatch.setattr(plugin, "version", lambda _: installed)
    applied("on")
    assert type(KVCacheManager(**ONE.arguments())) is KVCacheManager
    assert logged.messages == [f"lockstep-kv is off: vLLM {installed} is not supported: supported is 0.32"]
    with pytest.raises(SystemExit, match=f"^lockstep-kv: vLLM {installed} is not supported"):
        applied("require")


def test_the_installed_version_is_supported() -> None:
    assert plugin.unsupported_version() is None


# The patches.


@pytest.mark.parametrize("mode", ["on", "require"])
def test_whoever_makes_a_manager_gets_ours(applied: Callable[[str], None], mode: str) -> None:
    applied(mode)
    applied(mode)
    manager = KVCacheManager(**ONE.arguments())
    assert type(manager) is LockstepKVCacheManager
    assert isinstance(manager, KVCacheManager)
    patches.restore()
    assert type(KVCacheManager(**ONE.arguments())) is KVCacheManager


@pytest.mark.parametrize("patch", patches.PATCHES, ids=lambda patch: f"{patch.module}.{patch.owner}.{patch.name}")
def test_each_patch_point_is_there_and_fits(patch: patches.Patch) -> None:
    patches.restore()
    module = __import__(patch.module, fromlist=["x"])
    owner = getattr(module, patch.owner) if patch.owner else module
    original = inspect.getattr_static(owner, patch.name)
    original = original.__func__ if isinstance(original, classmethod) else original
    if patch.name == "__new__":
        assert "__new__" not in inspect.getsource(owner), "vLLM defines none, so that nothing is replaced"
        return
    assert signature(original) == signature(patch.replacement)


def signature(function: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of the parameters."""
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")}


# Methods that work on a `LockstepKVCacheManager` as they are.
INHERITED = {
    "get_block_ids_for_computed_tokens",
    "get_num_common_prefix_blocks",
    "make_prefix_cache_stats",
    "prefix_cache_lookup_enabled",
    "record_prefix_cache_stats",
    "reset_prefix_cache",
    "usage",
}
OWN = {"check_covered", "free_by_id", "pop_blocks_by_id"}


def test_the_manager_has_vllm_s_methods_and_no_method_is_new_to_us() -> None:
    overridden = {name for name in vars(LockstepKVCacheManager) if not name.startswith("_")} - OWN
    assert overridden | INHERITED == public(KVCacheManager)
    assert not overridden & INHERITED


@pytest.mark.parametrize("name", sorted(vars(LockstepKVCacheManager).keys() - OWN))
def test_overridden_signatures(name: str) -> None:
    ours, theirs = vars(LockstepKVCacheManager).get(name), vars(KVCacheManager).get(name)
    if inspect.isfunction(ours) and theirs is not None:
        assert signature(ours) == signature(theirs)


@pytest.mark.parametrize(
    ("view", "stock", "own"),
    [
        (BlockPoolView, BlockPool, {"tell_uses"}),
        (CoordinatorView, HybridKVCacheCoordinator, set()),
        (ManagerView, FullAttentionManager, set()),
        (IdBlocks, KVCacheBlocks, {"blocks", "hit", "ids"}),
    ],
)
def test_the_views_have_nothing_that_vllm_has_not(view: type, stock: type, own: set[str]) -> None:
    made_in_init = set(inspect.getsource(inspect.getmodule(stock) or stock).split())
    for name in public(view) - own:
        assert hasattr(stock, name) or f"self.{name}" in made_in_init or f"self.{name}:" in made_in_init, name
        ours = inspect.getattr_static(view, name)
        if inspect.isfunction(ours):
            assert [one[0] for one in signature(ours)] == [one[0] for one in signature(getattr(stock, name))], name


# What is covered.

SPEC: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def config(*specs: KVCacheSpec, **more: Any) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer.{at}"], spec) for at, spec in enumerate(specs)]
    return KVCacheConfig(20, [], groups, **more)


UNCOVERED: list[tuple[dict[str, Any], str]] = [
    (
        {"kv_cache_config": config(SinkFullAttentionSpec(**SPEC, sink_len=20))},
        "sinks of 20 tokens are not whole blocks",
    ),
    ({"kv_cache_config": config(CrossAttentionSpec(**SPEC))}, "cannot be cached"),
    ({"kv_cache_config": config(FullAttentionSpec(**SPEC), CircularBufferSpec(**SPEC)), "dcp_world_size": 2}, "ranks"),
    ({"kv_cache_config": config(SlidingWindowSpec(**SPEC, sliding_window=32)), "pcp_world_size": 2}, "2 prefill ranks"),
    ({"kv_cache_config": config(), "enable_caching": False}, "the model has no KV cache"),
    ({"num_prefill_lookahead": 17, "use_eagle": True}, "num_prefill_lookahead must be at most"),
    ({"scheduler_block_size": 32}, "a scheduler block size of 32"),
    ({"hash_block_size": 5}, "block hashes of 5 tokens"),
    ({"something_new": 1}, "arguments that are not known: got an unexpected keyword argument 'something_new'"),
]
# Of these vLLM's own manager says the same sooner or later.
STOCK_REFUSES = ("not whole blocks", "2 prefill ranks", "ranks", "must be at most", "not known", "5 tokens", "of 32")


def hisparse() -> KVCacheConfig:
    made = config(FullAttentionSpec(**SPEC))
    made.kv_cache_groups[0] = replace(made.kv_cache_groups[0], role=KVCacheGroupRole.HISPARSE_SOURCE)
    return made


@pytest.mark.parametrize(("options", "reason"), [*UNCOVERED, ({"kv_cache_config": hisparse()}, "one of HiSparse")])
def test_what_is_not_covered_runs_on_stock_or_fails_with_the_reason(
    applied: Callable[[str], None], logged: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    arguments = ONE.arguments() | options
    with pytest.raises(NotCoveredError) as caught:
        LockstepKVCacheManager.check_covered(**arguments)
    assert reason in str(caught.value)
    applied("require")
    with pytest.raises(ConfigError) as failed:
        KVCacheManager(**arguments)
    assert str(failed.value) == f"LOCKSTEP_KV=require, but {caught.value}"
    applied("on")
    if any(words in str(caught.value) for words in STOCK_REFUSES):
        return
    assert type(KVCacheManager(**arguments)) is KVCacheManager
    assert logged.messages == [
        f"lockstep-kv: LOCKSTEP_KV=require, but {caught.value}",
        f"lockstep-kv is off for this engine, vLLM's own manager runs: {caught.value}",
    ]


# Hashes and results.


ALGORITHMS = [vllm_hashing.sha256, vllm_hashing.sha256_cbor, vllm_hashing.xxhash, vllm_hashing.xxhash_cbor]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ALGORITHMS),
    st.integers(1, 70),
    st.sampled_from([None, "salt"]),
    st.booleans(),
    st.lists(st.integers(1, 40), max_size=4),
)
def test_hashes_are_vllm_s_as_tokens_arrive(
    function: Callable[[Any], bytes],
    length: int,
    salt: str | None,
    with_lora: bool,  # noqa: FBT001
    arrivals: list[int],
) -> None:
    kv_cache_utils.init_none_hash(function)
    requests = []
    for make in (kv_cache_utils.get_request_block_hasher, request_block_hasher):
        lora = LoRARequest("adapter", 1, "folder") if with_lora else None
        hasher = make(16, function)
        prompt = list(range(length))
        requests.append(
            Request(
                "r", prompt, SamplingParams(max_tokens=9), None, cache_salt=salt, lora_request=lora, block_hasher=hasher
            )
        )
    for count in arrivals:
        for request in requests:
            request.append_output_token_ids(list(range(count)))
    stock, ours = requests
    assert ours.block_hashes == stock.block_hashes
    assert len(ours.block_hashes) == ours.num_tokens // 16


def test_an_unknown_hash_function_is_left_to_vllm() -> None:
    def own(value: Any) -> bytes:
        digest: bytes = vllm_hashing.sha256(("own", value))
        return digest

    kv_cache_utils.init_none_hash(vllm_hashing.sha256)
    requests = [
        Request("r", list(range(40)), SamplingParams(max_tokens=9), None, block_hasher=make(16, own))
        for make in (kv_cache_utils.get_request_block_hasher, request_block_hasher)
    ]
    assert requests[0].block_hashes == requests[1].block_hashes


def test_results_are_ids_until_somebody_asks_for_blocks() -> None:
    manager = LockstepKVCacheManager(**ONE.arguments())
    request = Request(
        "r",
        list(range(70)),
        SamplingParams(max_tokens=9),
        None,
        block_hasher=request_block_hasher(16, vllm_hashing.sha256),
    )
    found = manager.allocate_slots(request, 70)
    assert isinstance(found, IdBlocks)
    assert not manager.block_pool.blocks._made.keys() - {0}
    assert found.get_block_ids() == ([1, 2, 3, 4, 5],)
    assert found.get_block_ids(group_ids=[0]) == ([1, 2, 3, 4, 5],)
    assert [block.block_id for block in found.blocks[0]] == [1, 2, 3, 4, 5]
    assert all(isinstance(block, BlockView) for block in found.blocks[0])
    assert found.blocks[0][0] is manager.block_pool.blocks[1]
    assert found.get_unhashed_block_ids() == [5]
    assert (found + found).get_block_ids() == ([1, 2, 3, 4, 5, 1, 2, 3, 4, 5],)
    assert found.new_empty().get_block_ids(allow_none=True) is None
    assert found == manager.get_blocks("r")
    # Nothing new is vLLM's shared empty result.
    request.num_computed_tokens = 70
    request.append_output_token_ids(7)
    assert manager.allocate_slots(request, 1) is manager.empty_kv_cache_blocks
    manager.free(request)
    manager.free(request)
    assert manager.get_block_ids("r") == ([],)
    assert manager.pop_blocks_for_free(request) == []


def test_several_cached_groups_have_the_coordinator_that_connectors_ask_for() -> None:
    two = replace(ONE, groups=(ONE.groups[0], replace(ONE.groups[0], width=16)))
    assert isinstance(LockstepKVCacheManager(**two.arguments()).coordinator, HybridKVCacheCoordinator)
    assert not isinstance(LockstepKVCacheManager(**ONE.arguments()).coordinator, HybridKVCacheCoordinator)


def test_a_full_report_names_the_hit_s_tokens() -> None:
    """Under context parallelism, where vLLM's own report fails."""
    sharded = Config(
        (Group("full", 4, sharded=True, width=8, is_eagle=False),), 20, 2, enable_caching=True, use_eagle=False
    )
    manager = LockstepKVCacheManager(**sharded.arguments())
    hasher = request_block_hasher(8, vllm_hashing.sha256)
    sampling = SamplingParams(max_tokens=9, extra_args={"kv_cache_report_mode": "full"})
    requests = [Request(name, list(range(30)), sampling, None, block_hasher=hasher) for name in ("first", "second")]
    manager.allocate_slots(requests[0], 30)
    stored = manager.take_events()
    assert [(event.token_ids, event.block_size) for event in stored] == [(list(range(24)), 8)]
    assert manager.get_computed_blocks(requests[1])[1] == 24
    (reused,) = manager.take_events()
    assert (reused.token_ids, reused.block_size) == (list(range(24)), 8)
    assert reused.block_hashes == stored[0].block_hashes
