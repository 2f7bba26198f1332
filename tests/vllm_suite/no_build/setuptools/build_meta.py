"""What pip asks of a build tool before it hands out a source package: nothing to install first, a name and a version.

vLLM's own answer would take a compiler and the build tools of its kernels.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["get_requires_for_build_wheel", "prepare_metadata_for_build_wheel"]

NAME, VERSION = "vllm", "0.32.0"


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:
    """Ask for nothing."""
    del config_settings
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:
    """Write the least that pip reads."""
    del config_settings
    folder = Path(metadata_directory) / f"{NAME}-{VERSION}.dist-info"
    folder.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")
    return folder.name
