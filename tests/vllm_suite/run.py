"""Runs vLLM's own tests on vLLM's own manager and on ours, and compares: `make test-vllm-suite`. Needs vLLM.

Fails if a test that stock passes fails here and is not in `exceptions.toml`, if one that is listed does not fail, or if
too few pass. Everything downloaded and written is in `build/vllm_suite`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from suite_fetch import FOLDER, HUB, SOURCE, fetch
from suite_report import LEAST_SHARE, Result, Verdict, judge, read_exceptions, read_report

HERE = Path(__file__).resolve().parent
CORE = "tests/v1/core"
CONNECTOR = "tests/v1/kv_connector/unit"
MODES = ("off", "on")
"""What `LOCKSTEP_KV` is: first stock, then ours."""
FILES = (
    f"{CORE}/prefix_cache/test_mamba_eagle_resume_checkpoint.py",
    f"{CORE}/prefix_cache/test_partial_prefix_cache_hits.py",
    f"{CORE}/prefix_cache/test_partial_prefix_cache_primitives.py",
    f"{CORE}/test_async_scheduler.py",
    f"{CORE}/test_contiguous_kv_packing.py",
    f"{CORE}/test_deferred_block_free.py",
    f"{CORE}/test_kv_cache_metrics.py",
    f"{CORE}/test_kv_cache_utils.py",
    f"{CORE}/test_mamba_align_chunk_split.py",
    f"{CORE}/test_prefix_caching.py",
    f"{CORE}/test_prefix_replay.py",
    f"{CORE}/test_priority_preemption_bug.py",
    f"{CORE}/test_scheduler.py",
    f"{CORE}/test_single_type_kv_cache_manager.py",
    f"{CORE}/test_swa_inflight_window_free.py",
    f"{CORE}/test_worker_slot_overflow.py",
    "tests/v1/ec_connector/unit/test_ec_transfer_params.py",
    "tests/v1/engine/test_kv_cache_group_metadata.py",
    f"{CONNECTOR}/offloading_connector",
    f"{CONNECTOR}/test_cache_pollution_prevention.py",
    f"{CONNECTOR}/test_decode_bench_connector.py",
    f"{CONNECTOR}/test_error_propagation.py",
    f"{CONNECTOR}/test_hisparse_connector.py",
    f"{CONNECTOR}/test_invalid_blocks_correctness.py",
    f"{CONNECTOR}/test_kv_load_failure_recovery.py",
    f"{CONNECTOR}/test_multi_connector.py",
    f"{CONNECTOR}/test_nixl_simple_cpu_offload.py",
    f"{CONNECTOR}/test_remote_decode_lifecycle.py",
    f"{CONNECTOR}/test_remote_prefill_lifecycle.py",
    f"{CONNECTOR}/test_scheduler_kv_connector_override.py",
    "tests/v1/simple_kv_offload/test_scheduler.py",
    "tests/v1/spec_decode/test_dynamic_sd.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
)
"""Those in which a `KVCacheManager` is made, and three about its parts."""


def run_side(console: Console, mode: str, files: tuple[str, ...]) -> None:
    """Make the report of one run. mode: what `LOCKSTEP_KV` is. Ends the process if pytest does not get through."""
    console.print(f"LOCKSTEP_KV={mode}: (what needs a GPU, model files or other packages fails on both sides)")
    report = FOLDER / f"{mode}.xml"
    report.unlink(missing_ok=True)
    options = ["-c", "pyproject.toml", "--noconftest", "-p", "no:cacheprovider", "-p", "suite_recorder"]
    output = ["-q", "--no-summary", "--tb=short", "--timeout=300", f"--junitxml={report}"]
    environment = {
        "LOCKSTEP_KV": mode,
        "PYTHONPATH": str(HERE),
        "HF_HOME": str(HUB),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore::DeprecationWarning",
    }
    command = [sys.executable, "-m", "pytest", *options, *output, *files]
    done = subprocess.run(command, cwd=SOURCE, env={**os.environ, **environment}, check=False)  # noqa: S603
    if done.returncode not in (0, 1):
        sys.exit(f"vllm-suite: pytest ended with {done.returncode}; its report, as far as it got: {report}")


def read_side(mode: str) -> dict[str, Result]:
    """The results of one run. Ends the process if there are none."""
    try:
        return read_report(FOLDER / f"{mode}.xml")
    except FileNotFoundError as error:
        sys.exit(f"vllm-suite: there is no report of a run: {error.filename}")
    except ValueError as error:
        sys.exit(f"vllm-suite: {error}")


def print_table(console: Console, verdict: Verdict) -> None:
    """Print one row per file that makes a manager."""
    table = Table(
        title="Tests that stock vLLM passes, and how they went with lockstep-kv", title_justify="left", box=None
    )
    table.add_column("tests/v1", no_wrap=True)
    for name in ("stock", "ours", "on ours", "on both", "fell back", "no manager", "listed"):
        table.add_column(name, justify="right", no_wrap=True)
    managed = {name: row for name, row in sorted(verdict.rows.items()) if row.no_manager < row.stock}
    for name, row in [*managed.items(), ("all, others included", verdict.total)]:
        cells = (row.stock, row.ours, row.lockstep, row.mixed, row.fell_back, row.no_manager, row.exceptions)
        table.add_row(escape(name.removeprefix("tests/v1/")), *map(str, cells))
    console.print(table)
    others = [Path(name).name for name in verdict.rows if name not in managed]
    if others:
        console.print(escape(f"No manager is made in the others: {', '.join(others)}"))


def print_fallbacks(console: Console, verdict: Verdict) -> None:
    """Say which tests ran on vLLM's own manager, so that nobody takes them for coverage."""
    for reason, tests in sorted(verdict.reasons.items(), key=lambda one: -len(one[1])):
        files = Counter(Path(test.partition("::")[0]).name for test in tests)
        where = ", ".join(f"{name} {count}" for name, count in files.items())
        console.print(escape(f"fell back: {reason}: {len(tests)} ({where})"))
    lines = sorted(f"{test}\t{reason}\n" for reason, tests in verdict.reasons.items() for test in tests)
    path = FOLDER / "fell_back.tsv"
    path.write_text("".join(lines), encoding="utf-8")
    if lines:
        console.print(escape(f"each of them: {path}"))


def print_differences(console: Console, verdict: Verdict) -> None:
    """Say what the list of exceptions lacks and has too much, as it is written there."""
    for title, tests in (
        ("fail, and are not listed", verdict.unlisted),
        ("are listed, and do not fail", verdict.obsolete),
    ):
        if tests:
            console.print(f"{len(tests)} tests {title}:")
        for test, message in tests.items():
            console.print(escape(f"    {json.dumps(test)},  # {message}"))


def main(
    files: Annotated[list[str] | None, typer.Argument(help="Only these of the files, as the table names them.")] = None,
    *,
    again: Annotated[bool, typer.Option(help="Compare the reports of the last runs, without new ones.")] = False,
) -> None:
    """Run both sides and compare."""
    fetch()
    chosen = tuple(name for name in FILES if not files or any(name.endswith(one) for one in files))
    if not chosen:
        sys.exit(f"vllm-suite: none of the files ends with {', '.join(files or [])}")
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 150)
    if not again:
        for mode in MODES:
            run_side(console, mode, chosen)
    stock, ours = (read_side(mode) for mode in MODES)
    listed = read_exceptions(HERE / "exceptions.toml")
    verdict = judge(stock, ours, [test for test in listed if test.startswith(chosen)])
    print_table(console, verdict)
    print_fallbacks(console, verdict)
    print_differences(console, verdict)
    console.print(
        f"Of the {verdict.ran} tests that make a manager of ours and that stock passes, {verdict.ran_and_passed} pass: "
        f"{verdict.share:.1%}; at least {LEAST_SHARE:.0%} have to."
    )
    if not verdict.good:
        sys.exit("vllm-suite: failed")


if __name__ == "__main__":
    typer.run(main)
