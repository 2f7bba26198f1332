"""CuPy, imported when a GPU is used and not before."""

from __future__ import annotations

from typing import Any

from lockstep_kv.errors import ConfigError

__all__ = ["cupy_module"]


def cupy_module() -> Any:
    """Return the module `cupy`. Raises `ConfigError` where it cannot be imported, with what to install."""
    try:
        import cupy  # noqa: PLC0415 - it is not needed without a GPU
    except ImportError as error:
        raise ConfigError(
            f"offload from a GPU needs CuPy: install lockstep-kv[cuda12] or lockstep-kv[cuda13] ({error})"
        ) from None
    return cupy
