"""Runs vLLM 0.32 on a `Coordinator`: a plugin that puts `LockstepKVCacheManager` where vLLM makes its `KVCacheManager`.

The environment variable `LOCKSTEP_KV` switches it: unset or `off`; `on` (what is not covered runs on vLLM's own
manager, and one log line says why); `require` (start-up fails instead). No file of vLLM is changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep_kv.vllm.manager import LockstepKVCacheManager

__all__ = ["LockstepKVCacheManager"]


def __getattr__(name: str) -> Any:
    # Imported when it is asked for, because it imports vLLM.
    if name == "LockstepKVCacheManager":
        from lockstep_kv.vllm.manager import LockstepKVCacheManager  # noqa: PLC0415

        return LockstepKVCacheManager
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
