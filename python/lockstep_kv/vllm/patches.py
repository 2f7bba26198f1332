"""Every place where vLLM is told to use this package. Nothing else of vLLM is touched."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager

from lockstep_kv.errors import ConfigError
from lockstep_kv.vllm import plugin
from lockstep_kv.vllm.coverage import NotCoveredError
from lockstep_kv.vllm.hashing import request_block_hasher
from lockstep_kv.vllm.manager import LockstepKVCacheManager

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PATCHES", "Patch", "apply", "restore"]

_logger = logging.getLogger(plugin.LOGGER)


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


def _plain_new(cls: type[KVCacheManager], *_: Any, **__: Any) -> KVCacheManager:
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
)

_MISSING = object()
_originals: list[tuple[Any, str, Any]] = []


def apply() -> None:
    """Put all patches in place. Does nothing if they are."""
    if _originals:
        return
    for patch in PATCHES:
        owner = _owner(patch)
        if owner is not None:
            _originals.append((owner, patch.name, vars(owner).get(patch.name, _MISSING)))
            replacement: Any = patch.replacement
            setattr(owner, patch.name, staticmethod(replacement) if patch.owner else replacement)


def restore() -> None:
    """Take all patches back, for tests that compare with stock in one process."""
    while _originals:
        owner, name, original = _originals.pop()
        # A class that once had a __new__ of its own needs one for good: object.__new__ would refuse its arguments.
        setattr(owner, name, staticmethod(_plain_new) if original is _MISSING else original)


def _owner(patch: Patch) -> Any:
    """The module or class to patch; None if it need not be patched now."""
    modules = {module.__name__: module for module in (kv_cache_utils, sys.modules[KVCacheManager.__module__])}
    module = modules.get(patch.module) or sys.modules.get(patch.module)
    if module is None:
        if patch.needs_import:
            raise ConfigError(f"vLLM has no module {patch.module}")
        return None
    return getattr(module, patch.owner) if patch.owner else module
