"""Calls the command line inside the test's process. Needs typer and rich."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lockstep_kv.commands import app

__all__ = ["DATA", "DEEPSEEK", "GLM", "TERMINAL", "invoke", "plan", "table_rows"]

DATA = Path(__file__).parents[1] / "data"
GLM = str(DATA / "glm-5.2-config.json")
DEEPSEEK = str(DATA / "deepseek-v3.2-config.json")

TERMINAL = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS")
"""What would make rich take the captured output for a terminal, or a narrow one."""


def invoke(*arguments: object, code: int = 0) -> str:
    """What a command prints on standard output; nothing goes to standard error."""
    result = CliRunner(env=dict.fromkeys(TERMINAL)).invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (code, "")
    return result.stdout


def plan(config: str, *options: object, code: int = 0) -> dict[str, Any]:
    planned: dict[str, Any] = json.loads(invoke("plan", "--config", config, *options, "--json", code=code))
    return planned


def table_rows(text: str) -> list[list[str]]:
    """The cells of a table's rows below the title, its head included; two blanks at least are between cells."""
    lines = [line.strip() for line in text.splitlines()[1:]]
    return [re.split(r"\s{2,}", line) for line in lines if line and "─" not in line]
