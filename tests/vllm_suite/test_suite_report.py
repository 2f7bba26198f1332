"""The judgement on vLLM's own tests: an exact list of exceptions, and enough that passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from suite_report import Result, judge, read_exceptions, read_report

if TYPE_CHECKING:
    from pathlib import Path

OURS = ("lockstep",)
PASSED = Result(passed=True, managers=OURS)
FAILED = Result(passed=False, managers=OURS, message="AttributeError: no _cache")


def named(**results: Result) -> dict[str, Result]:
    return {f"a.py::{name}": result for name, result in results.items()}


def many(result: Result, count: int = 99) -> dict[str, Result]:
    return {f"b.py::test[{at}]": result for at in range(count)}


def test_equal_runs_are_good() -> None:
    verdict = judge(many(PASSED), many(PASSED), [])
    assert verdict.good
    assert (verdict.ran, verdict.share) == (99, 1.0)


def test_a_failure_has_to_be_listed() -> None:
    stock, ours = many(PASSED) | named(x=PASSED), many(PASSED) | named(x=FAILED)
    verdict = judge(stock, ours, [])
    assert not verdict.good
    assert verdict.unlisted == {"a.py::x": "AttributeError: no _cache"}
    listed = judge(stock, ours, ["a.py::x"])
    assert listed.good
    assert (listed.rows["a.py"].exceptions, listed.total.ours) == (1, 99)


def test_a_test_that_is_not_run_fails() -> None:
    verdict = judge(many(PASSED) | named(x=PASSED), many(PASSED), [])
    assert verdict.unlisted == {"a.py::x": "was not run"}


@pytest.mark.parametrize(
    ("stock", "ours", "why"), [(PASSED, PASSED, "passes"), (FAILED, FAILED, "stock does not pass it")]
)
def test_the_list_has_nothing_too_much(stock: Result, ours: Result, why: str) -> None:
    verdict = judge(many(PASSED) | named(x=stock), many(PASSED) | named(x=ours), ["a.py::x"])
    assert verdict.obsolete == {"a.py::x": why}
    assert not verdict.good


def test_what_stock_fails_is_not_asked() -> None:
    verdict = judge(many(PASSED) | named(x=FAILED), many(PASSED) | named(x=FAILED), [])
    assert verdict.good
    assert "a.py" not in verdict.rows


def test_too_many_exceptions_are_not_good() -> None:
    listed = [f"b.py::test[{at}]" for at in range(6)]
    verdict = judge(many(PASSED), many(PASSED) | dict.fromkeys(listed, FAILED), listed)
    assert not verdict.unlisted
    assert not verdict.good


@pytest.mark.parametrize("managers", [(), ("stock: not covered",)])
def test_tests_on_other_managers_do_not_raise_the_share(managers: tuple[str, ...]) -> None:
    others = Result(passed=True, managers=managers)
    verdict = judge(many(PASSED) | named(x=PASSED), many(others) | named(x=FAILED), ["a.py::x"])
    assert (verdict.ran, verdict.ran_and_passed) == (1, 0)
    assert not verdict.good


def test_who_managed_is_counted_apart() -> None:
    reason = "a prefill lookahead of 3 tokens is not covered"
    fell_back = Result(passed=True, managers=(f"stock: {reason}",))
    mixed = Result(passed=True, managers=("lockstep", f"stock: {reason}"))
    verdict = judge(
        named(x=PASSED, y=PASSED, z=PASSED, w=PASSED),
        named(x=PASSED, y=fell_back, z=mixed, w=Result(passed=True)),
        [],
    )
    row = verdict.rows["a.py"]
    assert (row.ours, row.lockstep, row.mixed, row.fell_back, row.no_manager) == (4, 1, 1, 1, 1)
    assert verdict.reasons == {reason: ["a.py::y", "a.py::z"]}


def write_report(folder: Path, cases: str) -> Path:
    path = folder / "report.xml"
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>", encoding="utf-8")
    return path


def case(node: str, inside: str = "", properties: str = "") -> str:
    properties = f'<property name="nodeid" value="{node}"/>{properties}'
    return f'<testcase name="{node}"><properties>{properties}</properties>{inside}</testcase>'


def test_a_report_is_read(tmp_path: Path) -> None:
    made = '<property name="manager" value="lockstep"/><property name="manager" value="stock: no"/>'
    cases = (
        case("a.py::x", properties=made)
        + case("a.py::y", '<failure message="E: no&#10;more"/>')
        + case("a.py::z", "<skipped/>")
        + case("a.py::w", '<error message="teardown"/>')
    )
    results = read_report(write_report(tmp_path, cases))
    assert results == {
        "a.py::x": Result(passed=True, managers=("lockstep", "stock: no")),
        "a.py::y": Result(passed=False, message="E: no"),
        "a.py::z": Result(passed=False),
        "a.py::w": Result(passed=False, message="teardown"),
    }
    assert results["a.py::x"].fell_back == ["no"]


def test_a_file_that_cannot_be_imported_is_no_result(tmp_path: Path) -> None:
    broken = '<testcase name="a.py"><error message="collection failure">No module named ray</error></testcase>'
    with pytest.raises(ValueError, match="No module named ray"):
        read_report(write_report(tmp_path, case("a.py::x") + broken))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[exception]]\nwhy = "w"\ntests = ["x"]', "internal, why and tests"),
        ('[[exception]]\ninternal = "i"\nwhy = ""\ntests = ["x"]', "internal, why and tests"),
        ('[[exception]]\ninternal = "i"\nwhy = "w"\ntests = ["x"]\n' * 2, "listed twice: x"),
        ('[[exception]]\ninternal = "i"\nwhy = "w"\ntests = ["x", "x"]\n', "listed twice: x"),
    ],
)
def test_a_list_without_reasons_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "exceptions.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_exceptions(path)
