"""What the command line's commands do, in terms of typer and rich."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import textwrap
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lockstep_kv._core import Coordinator, CoordinatorConfig, GroupSpec, LayerSpec, __version__, plan_layout
from lockstep_kv.arguments import checked_int
from lockstep_kv.capacity import compare_shards, layout_figures, which_first
from lockstep_kv.errors import ConfigError
from lockstep_kv.models import load_config, model_groups
from lockstep_kv.replay import longest_request, replay
from lockstep_kv.trace import TRACE_BLOCK_TOKENS, generate_trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lockstep_kv.demo import DemoResult
    from lockstep_kv.replay import ReplayReport

__all__ = ["app", "parse_bytes"]

app = typer.Typer(
    help="KV-cache blocks in which groups that belong together move in lockstep.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_err = Console(stderr=True)

_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_UNITS["TiB"] = 2**40
_DEMO_REQUESTS = 6000
# What a measured deployment of GLM-5.2 with a replicated indexer had.
_REPLAY_BLOCKS = 5984
_FILE_WIDTH = 160

Config = Annotated[Path, typer.Option("--config", help="The model's config.json, or its folder.")]
CacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="auto, bfloat16, float16, fp8; for MLA fp8_ds_mla, nvfp4_ds_mla, nvfp4_ds_mla_fp8_rope.",
    ),
]
Dcp = Annotated[int, typer.Option("--dcp", help="Ranks in the decode-context-parallel group.")]
BlockSize = Annotated[int, typer.Option(help="Tokens of one block on one rank.")]
TensorParallel = Annotated[int, typer.Option("--tp", help="Divides the KV heads of full attention.")]
Mtp = Annotated[bool, typer.Option(help="Count the multi-token-prediction layers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def parse_bytes(text: str) -> int:
    """Read a size: bytes, or a number with kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024).

    Raises `ConfigError` for anything else.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if match is not None and not match[2] and "." in match[1]:
        raise ConfigError(f"a size in bytes must be whole, got {text!r}: a unit is missing")
    if match is None or match[2] not in {*_UNITS, "B"}:
        known = ", ".join(unit for unit in _UNITS if unit)
        raise ConfigError(f"a size must be bytes or a number with one of {known}, got {text!r}")
    return int(Fraction(match[1]) * _UNITS.get(match[2], 1))


def _version(value: bool) -> None:  # noqa: FBT001 - typer's signature
    if value:
        typer.echo(f"lockstep-kv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """KV-cache blocks in which groups that belong together move in lockstep."""
    del version


@app.command()
def plan(
    *,
    config: Config,
    kv_bytes: Annotated[str, typer.Option(help="Bytes for the cache on one rank, such as 28.1GB.")],
    kv_cache_dtype: CacheDtype = "auto",
    dcp: Dcp = 1,
    indexer_shards: Annotated[
        str,
        typer.Option(
            help="Choices to compare, such as 8,4,2,1; 0 = as sharded as the main cache. Multi-token-prediction layers "
            "keep the main cache's shards."
        ),
    ] = "0",
    block_size: BlockSize = 64,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest request in tokens; the model's own if not given.")
    ] = None,
    tensor_parallel_size: TensorParallel = 1,
    mtp: Mtp = True,
    as_json: AsJson = False,
) -> None:
    """Show how many tokens fit, and what replicating the indexer costs."""
    available = parse_bytes(kv_bytes)
    facts = load_config(config)
    length = max_model_len if max_model_len is not None else facts.get("max_position_embeddings")
    if length is None:
        raise ConfigError("the model config has no max_position_embeddings: give --max-model-len")
    length = checked_int("--max-model-len or max_position_embeddings", length, low=1)
    rows = compare_shards(
        facts,
        _numbers(indexer_shards),
        available_bytes=available,
        max_model_len=length,
        kv_cache_dtype=kv_cache_dtype,
        block_size=block_size,
        dcp_world_size=dcp,
        include_mtp=mtp,
        tensor_parallel_size=tensor_parallel_size,
    )
    advice = which_first(rows, dcp)
    if as_json:
        _print_json({"max_model_len": length, "kv_bytes": available, "dcp": dcp, "choices": rows, "advice": advice})
    else:
        _print_plan(rows, length)
        if advice is not None:
            _print(textwrap.fill(advice, 80))
    if not any("blocks" in row for row in rows):
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    """Read numbers separated by commas."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--indexer-shards must be numbers separated by commas, got {text!r}") from None


def _print_plan(rows: list[dict[str, Any]], max_model_len: int) -> None:
    fitting = [row for row in rows if "blocks" in row]
    if fitting:
        table = _table(f"Requests of up to {max_model_len:,} tokens", "indexer shards", fitting)
        _add_row(table, "bytes per block, on one rank", (f"{row['bytes_per_block']:,}" for row in fitting))
        spans = [" / ".join(f"{tokens:,}" for tokens in row["tokens_per_block"]) for row in fitting]
        _add_row(table, "tokens per block, per set", spans)
        _add_row(table, "blocks", (f"{row['blocks']:,}" for row in fitting))
        _add_row(table, "capacity in tokens", (f"{row['capacity_tokens']:,}" for row in fitting))
        _add_row(table, "requests at once", (f"{row['max_concurrency']:.2f}" for row in fitting))
        _add_row(table, "cost, of the best above", (f"{row['cost']:.2%}" for row in fitting))
        if all("candidates_merged" in row for row in fitting):
            _add_row(table, "candidates merged per query", (f"{row['candidates_merged']:,}" for row in fitting))
            _add_row(table, "context scored by a rank", (f"{row['context_scored']:.1%}" for row in fitting))
        sets = (" ".join("{" + ", ".join(map(str, groups)) + "}" for groups in row["sets"]) for row in fitting)
        _add_row(table, "sets of groups in lockstep", sets)
        _print(table)
    notes = [f"{row['indexer_shards']} indexer shards: {row['does_not_fit']}" for row in rows if "blocks" not in row]
    for note in notes + [note for row in fitting for note in row["why_separate"]]:
        _print(note)


@app.command(name="replay")
def replay_trace(
    *,
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's format, one JSON object per line.")],
    num_blocks: Annotated[
        int | None, typer.Option(help="Blocks in the pool, the null block included. [default: 5984, or by --kv-bytes]")
    ] = None,
    kv_bytes: Annotated[
        str | None, typer.Option(help="With --config: bytes for the cache on one rank, instead of --num-blocks.")
    ] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens per block, without --config. [default: 512]")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests that hold their blocks at once.")] = 1,
    config: Annotated[Path | None, typer.Option(help="A model's config.json, to replay on its groups.")] = None,
    kv_cache_dtype: CacheDtype = "auto",
    dcp: Dcp = 1,
    indexer_shards: Annotated[int, typer.Option(help="0 = as sharded as the main cache.")] = 0,
    block_size: BlockSize = 64,
    tensor_parallel_size: TensorParallel = 1,
    mtp: Mtp = True,
    as_json: AsJson = False,
) -> None:
    """Replay a trace to see what it would hit, evict and have to wait for."""
    requests = read_trace(trace)
    longest = longest_request(requests)
    if config is None:
        if kv_bytes is not None:
            raise ConfigError(f"--kv-bytes needs --config, got {kv_bytes!r} without it")
        tokens = TRACE_BLOCK_TOKENS if block_tokens is None else block_tokens
        groups = [GroupSpec("full", tokens, [LayerSpec("layer", 1)], kv_shards=1)]
    else:
        if block_tokens is not None:
            raise ConfigError(f"--block-tokens is for replays without --config, got {block_tokens}")
        groups = model_groups(
            config,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            dcp_world_size=dcp,
            indexer_shards=indexer_shards,
            include_mtp=mtp,
            tensor_parallel_size=tensor_parallel_size,
        )
    if kv_bytes is not None:
        if num_blocks is not None:
            raise ConfigError(f"give --num-blocks or --kv-bytes, got {num_blocks} and {kv_bytes!r}")
        available = parse_bytes(kv_bytes)
        layout = plan_layout(groups, dcp_world_size=dcp, available_bytes=available, max_model_len=longest)
        num_blocks = layout.num_blocks
    elif num_blocks is None:
        num_blocks = _REPLAY_BLOCKS
    coordinator = Coordinator(CoordinatorConfig(groups, num_blocks, dcp_world_size=dcp, max_model_len=longest))
    with _progress() as progress:
        task = progress.add_task("replay", total=len(requests))
        report = replay(
            requests,
            coordinator,
            concurrency=concurrency,
            advance=lambda done: progress.advance(task, done),
        )
    figures = _report_figures(report)
    if as_json:
        _print_json(figures)
    else:
        table = Table(title=f"{escape(trace.name)} on {num_blocks:,} blocks", show_header=False, box=box.SIMPLE_HEAD)
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        for name, value in figures.items():
            table.add_row(name.replace("_", " "), _figure(name, value))
        _print(table)
        if report.rejected:
            _print(f"{report.rejected:,} requests were rejected: they do not fit even in an empty pool.")


def _report_figures(report: ReplayReport) -> dict[str, Any]:
    return {
        **dataclasses.asdict(report),
        "hit_rate": report.hit_rate,
        "peak_usage": report.peak_usage,
        "blocks_per_second": report.blocks_per_second,
    }


def _figure(name: str, value: float) -> str:
    if name in ("hit_rate", "peak_usage"):
        return f"{value:.3%}"
    return f"{value:,.3f}" if name == "seconds" else f"{value:,.0f}"


@app.command()
def demo(
    *,
    trace: Annotated[
        Path | None, typer.Option(help="A trace in Mooncake's format; a generated one if not given.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Only the first so many requests.")] = None,
    concurrency: Annotated[int, typer.Option(help="Requests that hold their blocks at once.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Run the main job: GLM-5.2's groups on 8 ranks, every page of every prefix hit read back and compared."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("torch is missing: pip install 'lockstep-kv[torch]'")
    from lockstep_kv.demo import INDEXER_SHARDS, run_demo  # noqa: PLC0415 - imports torch

    if requests is not None:
        checked_int("--requests", requests, low=1)
    load = generate_trace(requests or _DEMO_REQUESTS) if trace is None else read_trace(trace)[:requests]
    results = []
    with _progress() as progress:
        task = progress.add_task("demo", total=len(load) * len(INDEXER_SHARDS))
        for result in run_demo(load, concurrency=concurrency, advance=lambda done: progress.advance(task, done)):
            progress.update(task, description=f"{result.indexer_shards} indexer shards done")
            results.append(result)
    if as_json:
        _print_json([_demo_figures(result) for result in results])
    else:
        _print_demo(results, trace)


def _demo_figures(result: DemoResult) -> dict[str, Any]:
    return {
        "indexer_shards": result.indexer_shards,
        **layout_figures(result.layout),
        **_report_figures(result.report),
        "shrunk_bytes": result.shrunk_bytes,
        "pages_written": result.pages_written,
        "pages_verified": result.pages_verified,
        "total_seconds": result.seconds,
    }


def _print_demo(results: list[DemoResult], trace: Path | None) -> None:
    load = "a generated load" if trace is None else trace.name
    rows = [{"indexer_shards": result.indexer_shards} for result in results]
    table = _table(
        f"GLM-5.2 at DCP8, {results[0].report.requests:,} requests of {escape(load)}", "indexer shards", rows
    )
    reports = [result.report for result in results]
    _add_row(table, "bytes per block, on one rank", (f"{result.layout.bytes_per_block:,}" for result in results))
    _add_row(table, "blocks", (f"{result.layout.num_blocks:,}" for result in results))
    _add_row(table, "capacity in tokens", (f"{result.layout.capacity_tokens:,}" for result in results))
    _add_row(table, "hit rate", (f"{report.hit_rate:.2%}" for report in reports))
    _add_row(table, "blocks evicted", (f"{report.evicted_blocks:,}" for report in reports))
    _add_row(table, "blocks handed out per second", (f"{report.blocks_per_second:,.0f}" for report in reports))
    _add_row(table, "pages written, on all ranks", (f"{result.pages_written:,}" for result in results))
    _add_row(table, "pages read back and compared", (f"{result.pages_verified:,}" for result in results))
    _add_row(table, "shrunk tensors of all ranks (MB)", (f"{result.shrunk_bytes / 1e6:,.0f}" for result in results))
    _add_row(table, "seconds in all", (f"{result.seconds:.1f}" for result in results))
    _print(table)
    _print("Every page of every prefix hit was read back on all 8 ranks and holds what was written for it.")


def _table(title: str, choice: str, rows: list[dict[str, Any]]) -> Table:
    """A table with one column per choice, which fits a narrow terminal."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    table.add_column(choice)
    for row in rows:
        table.add_column(str(row["indexer_shards"]), justify="right", no_wrap=True)
    return table


def _add_row(table: Table, name: str, figures: Iterable[str]) -> None:
    table.add_row(name, *figures)


def _print(what: Table | str) -> None:
    """Print to standard output, in full width where that is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(what, markup=False, soft_wrap=isinstance(what, str))


def _progress() -> Progress:
    """A progress bar on standard error, silent where that is not a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal)


def _print_json(value: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    typer.echo(json.dumps(value, indent=2))
