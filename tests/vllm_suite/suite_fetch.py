"""Lays vLLM's own tests into `build/vllm_suite`: `source` from vLLM's source package, and `hub`, an offline model hub.

The package comes through pip, as pip is set up here, and pip checks its sum. The hub holds just the configurations of
the models that the tests name: they make schedulers, no model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

__all__ = ["FOLDER", "HUB", "SOURCE", "fetch"]

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "vllm_suite"
SOURCE = FOLDER / "source"
HUB = FOLDER / "hub"
WANTED = "source.txt"
MODELS = "models.json"


def fetch() -> None:
    """Do nothing if everything is there, as these files ask for it."""
    wanted = "".join((HERE / name).read_text(encoding="utf-8") for name in (WANTED, MODELS))
    done = FOLDER / "fetched"
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    _unpack(_download())
    _make_hub()
    done.write_text(wanted, encoding="utf-8")


def _download() -> Path:
    """The source package. Ends the process with one line if pip does not get it."""
    folder = FOLDER / "download"
    options = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), "-r", str(HERE / WANTED)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(HERE / "no_build")}, check=False)  # noqa: S603
    if done.returncode:
        sys.exit(f"vllm-suite: pip could not download what {HERE / WANTED} asks for")
    (package,) = folder.glob("vllm-*.tar.gz")
    return package


def _unpack(package: Path) -> None:
    """Lay out the tests, and the settings that they run under, and drop the package."""
    with tarfile.open(package) as archive:
        for member in archive:
            _, _, name = member.name.partition("/")
            if name == "pyproject.toml" or name.startswith("tests/"):
                member.name = name
                archive.extract(member, SOURCE, filter="data")
    shutil.rmtree(package.parent)


def _make_hub() -> None:
    """Lay out the models' configurations as Hugging Face's cache has them."""
    models = json.loads((HERE / MODELS).read_text(encoding="utf-8"))
    for name, config in models.items():
        folder = HUB / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = folder / "snapshots" / "local"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("local", encoding="utf-8")
