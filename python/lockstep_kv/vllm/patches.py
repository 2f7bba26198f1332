"""Every place where vLLM is told to use this package. Nothing else of vLLM is touched."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from lockstep_kv.errors import ConfigError
from lockstep_kv.vllm import plugin
from lockstep_kv.vllm.coverage import NotCoveredError
from lockstep_kv.vllm.hashing import request_block_hasher
from lockstep_kv.vllm.manager import LockstepKVCacheManager
from lockstep_kv.vllm.shards import requested_shards

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["PATCHES", "Patch", "apply", "restore"]

_logger = logging.getLogger(plugin.LOGGER)
_spec_class = vars(OffloadingSpecFactory)["get_spec_cls"].__func__
_make_groups = parallel_state.initialize_model_parallel


@dataclass(frozen=True, slots=True)
class Patch:
    """One attribute of one module or class of vLLM that is replaced."""

    module: str
    owner: str
    """The class inside the module; empty for the module itself."""
    name: str
    replacement: Callable[..., Any]
    why: str
    needs_import: bool = True
    """Whether the module is imported to patch it; if not, it is patched if something else has imported it."""


def _new_manager(cls: type[KVCacheManager], *args: Any, **kwargs: Any) -> KVCacheManager:
    """Make a `LockstepKVCacheManager` where a plain `KVCacheManager` is asked for, if it can do what is asked."""
    if cls is KVCacheManager and plugin.mode() != "off":
        try:
            LockstepKVCacheManager.check_covered(*args, **kwargs)
        except NotCoveredError as error:
            if plugin.mode() == "require":
                # vLLM buries the error of an engine core in tracebacks; the log has it on one line.
                _logger.error("lockstep-kv: %s=require, but %s", plugin.SWITCH, error)  # noqa: TRY400
                raise ConfigError(f"{plugin.SWITCH}=require, but {error}") from None
            _logger.warning("lockstep-kv is off for this engine, vLLM's own manager runs: %s", error)
        else:
            _logger.info("lockstep-kv manages the KV cache blocks")
            return object.__new__(LockstepKVCacheManager)
    return object.__new__(cls)


def _offloading_spec(cls: type[OffloadingSpecFactory], extra_config: Mapping[str, Any]) -> Any:
    """Offload as vLLM is told to; here if it is not told how and what is asked for is covered."""
    if "spec_name" not in extra_config and plugin.mode() != "off":
        from lockstep_kv.vllm.offload_spec import LockstepOffloadingSpec  # noqa: PLC0415 - for offload only

        reason = LockstepOffloadingSpec.not_covered(extra_config)
        if reason is None:
            return LockstepOffloadingSpec
        if plugin.mode() == "require":
            raise ConfigError(f"{plugin.SWITCH}=require, but {reason}")
        _logger.warning("lockstep-kv does not offload, vLLM's own offload runs: %s", reason)
    return _spec_class(cls, extra_config)


@functools.wraps(_make_groups)
def _make_groups_and_shards(*args: Any, **kwargs: Any) -> None:
    """Make the groups of ranks, and then what indexers of fewer shards than ranks need, before there is a model."""
    _make_groups(*args, **kwargs)
    if requested_shards() is not None:
        from lockstep_kv.vllm import indexer_patches  # noqa: PLC0415 - imports models

        indexer_patches.prepare(get_current_vllm_config())


def _plain_new(cls: type[Any], *_: Any, **__: Any) -> Any:
    """Make what is asked for."""
    return object.__new__(cls)


PATCHES = (
    Patch(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        "__new__",
        _new_manager,
        "whoever constructs a KVCacheManager gets a LockstepKVCacheManager, which is one",
    ),
    Patch(
        "vllm.v1.core.kv_cache_utils",
        "",
        "get_request_block_hasher",
        request_block_hasher,
        "blocks are hashed natively, with the same digests",
    ),
    Patch(
        "vllm.v1.engine.core",
        "",
        "get_request_block_hasher",
        request_block_hasher,
        "the engine core has imported the function by name",
        needs_import=False,
    ),
    Patch(
        "vllm.v1.kv_offload.factory",
        "OffloadingSpecFactory",
        "get_spec_cls",
        _offloading_spec,
        "native offload, as by --kv-offloading-size, runs here unless a spec is named",
    ),
    Patch(
        "vllm.distributed.parallel_state",
        "",
        "initialize_model_parallel",
        _make_groups_and_shards,
        "a worker prepares its indexer's shards, if the switches ask for fewer than ranks; otherwise nothing happens",
    ),
)

_MISSING = object()
_applied: list[tuple[Patch, Any, Any]] = []


def apply(patches: Sequence[Patch] = PATCHES) -> None:
    """Put patches in place; those that are stay as they are."""
    for patch in patches:
        owner = _owner(patch)
        if owner is None or any(patch is done for done, _, _ in _applied):
            continue
        _applied.append((patch, owner, vars(owner).get(patch.name, _MISSING)))
        replacement: Any = patch.replacement
        if patch.name == "__new__":
            replacement = staticmethod(replacement)
        elif isinstance(vars(owner).get(patch.name), classmethod):
            replacement = classmethod(replacement)
        setattr(owner, patch.name, replacement)


def restore() -> None:
    """Take all patches back, for tests that compare with stock in one process."""
    while _applied:
        patch, owner, original = _applied.pop()
        # A class that once had a __new__ of its own needs one for good: object.__new__ would refuse its arguments.
        setattr(owner, patch.name, staticmethod(_plain_new) if original is _MISSING else original)


def _owner(patch: Patch) -> Any:
    """The module or class to patch; None if it need not be patched now."""
    module = sys.modules.get(patch.module)
    if module is None:
        if not patch.needs_import:
            return None
        module = importlib.import_module(patch.module)
    return getattr(module, patch.owner) if patch.owner else module
