"""The command line: JSON beside tables, and one line with exit code 2 for what cannot be done."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import lockstep_kv
from lockstep_kv import cli
from lockstep_kv.trace import generate_trace

pytest.importorskip("typer")
pytest.importorskip("rich")

from command_line import DATA, GLM, TERMINAL, invoke, table_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep_kv.trace import TraceRequest


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep out what would make rich take the captured output for a terminal, or a narrow one."""
    for name in TERMINAL:
        monkeypatch.delenv(name, raising=False)


class Outcome(NamedTuple):
    code: object
    out: str
    err: str


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """The whole command line in this process: call it with the arguments."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["lockstep-kv", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        # Typer may colour what it says about options where it thinks it is in a CI job.
        out, err = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in capsys.readouterr())
        return Outcome(caught.value.code or 0, out, err)

    return call


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> Path:
    lines = [
        json.dumps(
            {
                "timestamp": request.timestamp_ms,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids,
            }
        )
        for request in requests
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two requests that share a block and one that is too long for ten blocks."""
    path = tmp_path / "three.jsonl"
    records = [
        {"timestamp": 0, "input_length": 1000, "output_length": 24, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 1100, "output_length": 0, "hash_ids": [0, 2, 3]},
        {"timestamp": 0, "input_length": 5100, "output_length": 100, "hash_ids": list(range(10, 20))},
    ]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def test_replay_sizes_the_pool_by_bytes(trace: Path) -> None:
    model = ("--config", GLM, "--kv-cache-dtype", "fp8_ds_mla", "--dcp", 8, "--indexer-shards", 1, "--no-mtp")
    figures = json.loads(invoke("replay", trace, *model, "--kv-bytes", "28.145GB", "--json"))
    assert (figures["num_blocks"], figures["hit_tokens"]) == (5995, 512)
    assert json.loads(invoke("replay", trace, *model, "--json"))["num_blocks"] == 5984


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kv-bytes", "1GB"), "--kv-bytes needs --config, got '1GB'"),
        (("--config", GLM, "--block-tokens", "16"), "--block-tokens is for replays without --config, got 16"),
        (("--config", GLM, "--kv-bytes", "1GB", "--num-blocks", "9"), "got 9 and '1GB'"),
    ],
)
def test_replay_refuses_options_that_contradict(
    main: Callable[..., Outcome], trace: Path, options: tuple[str, ...], words: str
) -> None:
    outcome = main("replay", trace, *options)
    assert outcome.code == 2
    assert words in outcome.err


def test_replay_as_json(trace: Path) -> None:
    figures = json.loads(invoke("replay", trace, "--num-blocks", 11, "--json"))
    assert figures.pop("seconds") > 0
    assert figures.pop("blocks_per_second") > 0
    assert figures == {
        "requests": 3,
        "rejected": 1,
        "refusals": 0,
        "input_tokens": 7200,
        "hit_tokens": 512,
        "allocated_blocks": 4,
        "evicted_blocks": 0,
        "peak_held_blocks": 3,
        "num_blocks": 11,
        "hit_rate": 512 / 7200,
        "peak_usage": 3 / 10,
    }


def test_the_table_of_replay_says_what_its_json_says(trace: Path) -> None:
    options = (trace, "--num-blocks", 5000, "--block-tokens", 64, "--concurrency", 2)
    text = invoke("replay", *options)
    assert "three.jsonl on 5,000 blocks" in text
    shown = dict(table_rows(text))
    figures = json.loads(invoke("replay", *options, "--json"))
    assert [name.replace("_", " ") for name in figures] == list(shown)
    assert shown["hit rate"] == f"{figures['hit_rate']:.3%}"
    assert shown["peak usage"] == f"{figures['peak_usage']:.3%}"
    for name in ("requests", "input_tokens", "hit_tokens", "allocated_blocks", "peak_held_blocks", "num_blocks"):
        assert shown[name.replace("_", " ")] == f"{figures[name]:,}"


def test_a_file_name_in_brackets_is_shown_whole(trace: Path) -> None:
    bracketed = trace.rename(trace.with_name("load[red].jsonl"))
    assert "load[red].jsonl on 5,984 blocks" in invoke("replay", bracketed)


@pytest.mark.parametrize("shards", [0, 4, 1])
def test_replay_on_a_model_s_groups(tmp_path: Path, shards: int) -> None:
    path = write_trace(tmp_path / "load.jsonl", generate_trace(80))
    plain = json.loads(invoke("replay", path, "--num-blocks", 150, "--concurrency", 2, "--json"))
    model = ("--config", GLM, "--kv-cache-dtype", "fp8_ds_mla", "--dcp", 8, "--indexer-shards", shards)
    figures = json.loads(invoke("replay", path, *model, "--num-blocks", 150, "--concurrency", 2, "--json"))
    assert plain["evicted_blocks"] > 0
    for name in ("seconds", "blocks_per_second"):
        del plain[name], figures[name]
    # A lockstep set spans 512 tokens and counts as one.
    assert figures == plain


BAD_VALUES = [
    (["plan", "--config", GLM, "--kv-bytes", "28XB"], "'28XB'"),
    (["plan", "--config", GLM, "--kv-bytes", "-1GB"], "'-1GB'"),
    (["plan", "--config", GLM, "--kv-bytes", ""], "''"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--dcp", "8", "--indexer-shards", "3"], "got 3"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--dcp", "8", "--indexer-shards", "8,16"], "got 16"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--indexer-shards", "1,,2"], "'1,,2'"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--indexer-shards", "all"], "'all'"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--indexer-shards=-1"], "got -1"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--dcp", "0"], "got 0"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--dcp", "65"], "got 65"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--block-size", "0"], "got 0"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--block-size", str(2**70)], str(2**70)),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--tp", "0"], "got 0"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--kv-cache-dtype", "int4"], "'int4'"),
    (["plan", "--config", GLM, "--kv-bytes", "1GB", "--kv-cache-dtype", "fp8"], "'fp8'"),
    (["plan", "--config", "/no/such.json", "--kv-bytes", "1GB"], "'/no/such.json'"),
    (["plan", "--config", __file__, "--kv-bytes", "1GB"], __file__),
    (["replay", "/no/such.jsonl"], "'/no/such.jsonl'"),
    (["replay", str(DATA)], str(DATA)),
    (["replay", GLM], f"{GLM}, line 1"),
    (["replay", "TRACE", "--num-blocks", "0"], "got 0"),
    (["replay", "TRACE", "--num-blocks", str(2**70)], str(2**70)),
    (["replay", "TRACE", "--block-tokens", "0"], "got 0"),
    (["replay", "TRACE", "--block-tokens", "384"], "got 384"),
    (["replay", "TRACE", "--concurrency", "0"], "got 0"),
    (["replay", "TRACE", "--config", GLM, "--dcp", "8", "--indexer-shards", "5"], "got 5"),
    (["replay", "TRACE", "--config", GLM, "--kv-cache-dtype", "int4"], "'int4'"),
    (["replay", "TRACE", "--config", GLM, "--dcp", "3"], "got 192"),
    (["replay", "TRACE", "--dcp", "0"], "got 0"),
]


@pytest.mark.parametrize(("arguments", "named"), BAD_VALUES)
def test_a_bad_value_is_named_on_one_line(
    main: Callable[..., Outcome], trace: Path, arguments: list[str], named: str
) -> None:
    outcome = main(*(str(trace) if argument == "TRACE" else argument for argument in arguments))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("lockstep-kv: ")
    assert named in outcome.err
    assert outcome.err.endswith("\n")
    assert len(outcome.err.splitlines()) == 1


def test_a_longest_request_of_no_tokens_is_a_bad_value(main: Callable[..., Outcome]) -> None:
    outcome = main("plan", "--config", GLM, "--kv-bytes", "28GB", "--max-model-len", 0)
    assert (outcome.code, outcome.out) == (2, "")
    assert "got 0" in outcome.err


def test_a_config_without_a_length_asks_for_one(main: Callable[..., Outcome], tmp_path: Path) -> None:
    facts = json.loads(Path(GLM).read_text(encoding="utf-8"))
    del facts["max_position_embeddings"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(facts), encoding="utf-8")
    outcome = main("plan", "--config", config, "--kv-bytes", "28GB")
    assert outcome == (
        2,
        "",
        "lockstep-kv: the model config has no max_position_embeddings: give --max-model-len\n",
    )
    assert main("plan", "--config", config, "--kv-bytes", "28GB", "--max-model-len", 1000).code == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "--config", GLM, "--kv-bytes", "1GB", "--bogus"], "--bogus"),
        (["replay", "x.jsonl", "--bogus=3"], "--bogus"),
        (["plan", "--config", GLM], "--kv-bytes"),
        (["plan", "--kv-bytes", "1GB"], "--config"),
        (["plan", "--config", GLM, "--kv-bytes", "1GB", "--dcp", "many"], "--dcp"),
        (["replay", "x.jsonl", "--num-blocks", "1.5"], "--num-blocks"),
        (["bogus"], "bogus"),
        (["replay", "x.jsonl", "y.jsonl"], "y.jsonl"),
    ],
)
def test_wrong_usage_names_the_option(main: Callable[..., Outcome], arguments: list[str], named: str) -> None:
    outcome = main(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert named in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("package", ["typer", "rich", "torch"])
def test_a_missing_package_is_named(
    main: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name, *rest)
    )
    extra = "torch" if package == "torch" else "cli"
    assert main("demo") == (2, "", f"lockstep-kv: {package} is missing: pip install 'lockstep-kv[{extra}]'\n")


def test_version_and_help(main: Callable[..., Outcome]) -> None:
    assert main("--version") == (0, f"lockstep-kv {lockstep_kv.__version__}\n", "")
    for option in ("--help", "-h"):
        outcome = main(option)
        assert outcome.code == 0
        assert all(command in outcome.out for command in ("plan", "replay", "demo"))
    outcome = main("plan", "-h")
    assert outcome.code == 0
    assert "--kv-bytes" in outcome.out


def test_demo_prints_one_column_per_choice(request: pytest.FixtureRequest, trace: Path) -> None:
    torch = pytest.importorskip("torch")
    # Several threads per operation would spin for each other on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    results = json.loads(invoke("demo", "--trace", trace, "--requests", 2, "--json"))
    assert [result["indexer_shards"] for result in results] == [8, 4, 1]
    assert [result["blocks"] for result in results] == [8152, 7754, 5995]
    for result in results:
        assert (result["requests"], result["hit_tokens"]) == (2, 512)
        assert (result["pages_written"], result["pages_verified"]) == (4 * 99 * 8, 99 * 8)
    text = invoke("demo", "--trace", trace, "--requests", 2)
    assert "GLM-5.2 at DCP8, 2 requests of three.jsonl" in text
    assert table_rows(text)[:3] == [
        ["indexer shards", "8", "4", "1"],
        ["bytes per block, on one rank", "3,452,160", "3,629,568", "4,694,016"],
        ["blocks", "8,152", "7,754", "5,995"],
    ]
    assert "Every page of every prefix hit was read back" in text


@pytest.mark.parametrize("requests", [0, -1])
@pytest.mark.parametrize("generated", [True, False])
def test_demo_needs_a_request(
    main: Callable[..., Outcome],
    monkeypatch: pytest.MonkeyPatch,
    trace: Path,
    requests: int,
    generated: bool,  # noqa: FBT001
) -> None:
    pytest.importorskip("torch")
    # The load is not to be run, should it be accepted.
    monkeypatch.setattr("lockstep_kv.demo.run_demo", lambda *_, **__: iter(()))
    outcome = main("demo", *([] if generated else ["--trace", trace]), f"--requests={requests}", "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"got {requests}" in outcome.err


def run_process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lockstep_kv.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)  # noqa: S603


def test_the_real_command(trace: Path) -> None:
    result = run_process("replay", trace, "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["hit_tokens"] == 512
    result = run_process("replay", trace, "--num-blocks", 0)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == ["lockstep-kv: num_blocks must be between 1 and 134217728, got 0"]


def test_a_reader_that_has_read_enough(trace: Path) -> None:
    command = [sys.executable, "-m", "lockstep_kv.cli", "replay", str(trace), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        code = process.wait(timeout=60)
    assert (code, err) == (1, "")
