"""A small JSON file in the user's cache directory: what was measured, by machine."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["PathCache", "default_cache_file"]

_logger = logging.getLogger(__name__)

_FORMAT = 1


def default_cache_file() -> Path | None:
    """Return the file in $XDG_CACHE_HOME, or in ~/.cache where that is no absolute path; None if there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(given) if Path(given).is_absolute() else Path("~/.cache").expanduser()
    except RuntimeError:
        return None
    return folder / "lockstep-kv" / "copy-paths.json"


class PathCache:
    """Keeps one JSON value per machine. What goes wrong is logged in one line and never raised: it is only a cache."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def load(self, machine: str) -> Any:
        """Return what was saved for the machine, or None."""
        return self._machines().get(machine)

    def save(self, machine: str, value: object) -> None:
        """Save a value for the machine beside those of others. Readers see the old file or the new one, whole."""
        text = json.dumps({"format": _FORMAT, "machines": {**self._machines(log=False), machine: value}})
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # A folder of its own, so that nothing is left over if writing fails.
            with tempfile.TemporaryDirectory(dir=self.file.parent) as folder:
                new = Path(folder, self.file.name)
                new.write_text(text, encoding="utf-8")
                new.replace(self.file)
        except OSError as error:
            _logger.warning("cannot write %s: %s", self.file, error)

    def _machines(self, *, log: bool = True) -> dict[str, Any]:
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                return {}
            return dict(content["machines"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError) as error:
            if log:
                _logger.warning("%s is not used: %s: %s", self.file, type(error).__name__, error)
            return {}
