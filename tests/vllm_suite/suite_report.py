"""Reads the reports of both runs and judges them by the list of exceptions."""

from __future__ import annotations

import tomllib
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

__all__ = ["LEAST_SHARE", "Result", "Row", "Verdict", "judge", "read_exceptions", "read_report"]

LEAST_SHARE = 0.95
"""Of the tests that stock passes and that make a manager of ours, how many have to pass."""
STOCK = "stock: "


@dataclass(frozen=True, slots=True)
class Result:
    """One test in one run."""

    passed: bool
    managers: tuple[str, ...] = ()
    """`lockstep`, or `stock: ` and a reason, for each different answer that the test got when it made a manager."""
    message: str = ""
    """Why it did not pass."""

    @property
    def on_lockstep(self) -> bool:
        """Whether a manager of ours was made."""
        return "lockstep" in self.managers

    @property
    def fell_back(self) -> list[str]:
        """The reasons why vLLM's own managers were made."""
        return [answer.removeprefix(STOCK) for answer in self.managers if answer.startswith(STOCK)]


@dataclass(slots=True)
class Row:
    """How many tests of one file, all of which stock passes."""

    stock: int = 0
    ours: int = 0
    """Pass with lockstep-kv loaded."""
    lockstep: int = 0
    """Of these, made managers of ours alone."""
    mixed: int = 0
    """Of these, made managers of ours and of vLLM's own."""
    fell_back: int = 0
    """Of these, made managers of vLLM's own alone."""
    no_manager: int = 0
    """Of these, made none."""
    exceptions: int = 0
    """Fail and are listed."""

    def add(self, result: Result, *, listed: bool) -> None:
        self.stock += 1
        self.ours += result.passed
        self.exceptions += listed and not result.passed
        if result.passed:
            self.lockstep += result.on_lockstep and not result.fell_back
            self.mixed += result.on_lockstep and bool(result.fell_back)
            self.fell_back += bool(result.fell_back) and not result.on_lockstep
            self.no_manager += not result.managers


@dataclass(slots=True)
class Verdict:
    """What the comparison says."""

    rows: dict[str, Row] = field(default_factory=dict)
    total: Row = field(default_factory=Row)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    """Per reason to fall back, the tests."""
    unlisted: dict[str, str] = field(default_factory=dict)
    """Tests that only stock passes and that are not listed, with the message."""
    obsolete: dict[str, str] = field(default_factory=dict)
    """Listed tests that pass or that stock does not pass, with which of the two it is."""
    ran: int = 0
    """Tests that stock passes and that make a manager of ours."""
    ran_and_passed: int = 0

    @property
    def share(self) -> float:
        """How many of the tests that make a manager of ours pass."""
        return self.ran_and_passed / self.ran if self.ran else 0.0

    @property
    def good(self) -> bool:
        """Whether the list is exact and the share is high enough."""
        return not self.unlisted and not self.obsolete and self.share >= LEAST_SHARE


def read_report(path: Path) -> dict[str, Result]:
    """The tests of a JUnit report by node id.

    Raises `ValueError` if something fails that is no test, such as a file that cannot be imported.
    """
    results = {}
    for case in ET.parse(path).getroot().iter("testcase"):  # noqa: S314 - pytest wrote it
        properties = [(one.get("name"), one.get("value", "")) for one in case.iter("property")]
        failures = [*case.iter("failure"), *case.iter("error")]
        message = (failures[0].get("message") or "").splitlines()[:1] if failures else []
        node = dict(properties).get("nodeid")
        if node is not None:
            managers = tuple(value for name, value in properties if name == "manager")
            passed = not failures and case.find("skipped") is None
            results[node] = Result(passed, managers, "".join(message))
        elif failures:
            raise ValueError(f"{case.get('name')}: {''.join(message)}: {(failures[0].text or '')[-2000:]}")
    return results


def read_exceptions(path: Path) -> set[str]:
    """The listed tests.

    Raises `ValueError` if one is listed twice or an entry does not say what its tests reach into.
    """
    listed: set[str] = set()
    for entry in tomllib.loads(path.read_text(encoding="utf-8")).get("exception", []):
        if not all(entry.get(key) for key in ("internal", "why", "tests")):
            raise ValueError(f"{path}: an exception has to have internal, why and tests: {entry}")
        for test in entry["tests"]:
            if test in listed:
                raise ValueError(f"{path}: listed twice: {test}")
            listed.add(test)
    return listed


def judge(stock: Mapping[str, Result], ours: Mapping[str, Result], listed: Iterable[str]) -> Verdict:
    """Compare the runs."""
    verdict = Verdict()
    listed = set(listed)
    missing = Result(passed=False, message="was not run")
    for test, result in ((test, ours.get(test, missing)) for test, result in stock.items() if result.passed):
        for row in (verdict.rows.setdefault(test.partition("::")[0], Row()), verdict.total):
            row.add(result, listed=test in listed)
        for reason in result.fell_back:
            verdict.reasons.setdefault(reason, []).append(test)
        if result.on_lockstep:
            verdict.ran += 1
            verdict.ran_and_passed += result.passed
        if not result.passed and test not in listed:
            verdict.unlisted[test] = result.message
    for test in sorted(listed):
        if not stock.get(test, missing).passed:
            verdict.obsolete[test] = "stock does not pass it"
        elif ours.get(test, missing).passed:
            verdict.obsolete[test] = "passes"
    return verdict
