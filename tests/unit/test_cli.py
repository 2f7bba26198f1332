"""The command line: measured capacities, JSON beside tables, and one line with exit code 2 for what cannot be done."""

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
from lockstep_kv import ConfigError, cli
from lockstep_kv.trace import generate_trace

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from lockstep_kv.commands import app, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep_kv.trace import TraceRequest

DATA = Path(__file__).parents[1] / "data"
GLM = str(DATA / "glm-5.2-config.json")
DEEPSEEK = str(DATA / "deepseek-v3.2-config.json")

# Six runs of GLM-5.2 in a published benchmark, all with one memory setting, with 656-byte records and without the draft
# layer: ranks, indexer shards, tokens that fitted, blocks, GB that these come to.
MEASURED = [
    (2, 2, 1_040_128, 8126, 28.052),
    (4, 4, 2_088_704, 8159, 28.166),
    (4, 2, 1_984_256, 7751, 28.133),
    (8, 8, 4_174_336, 8153, 28.145),
    (8, 1, 3_063_296, 5983, 28.084),
    (8, 4, 3_964_928, 7744, 28.107),
]
MEAN_GB = sum(row[-1] for row in MEASURED) / len(MEASURED)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep out what would make rich take the captured output for a terminal, or a narrow one."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
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


def invoke(*arguments: object, code: int = 0) -> str:
    """What a command prints on standard output; nothing goes to standard error."""
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert (result.exit_code, result.stderr) == (code, "")
    return result.stdout


def plan(config: str, *options: object, code: int = 0) -> dict[str, Any]:
    planned: dict[str, Any] = json.loads(invoke("plan", "--config", config, *options, "--json", code=code))
    return planned


def table_rows(text: str) -> list[list[str]]:
    """The cells of a table's rows below the title, its head included; two blanks at least are between cells."""
    lines = [line.strip() for line in text.splitlines()[1:]]
    return [re.split(r"\s{2,}", line) for line in lines if line and "─" not in line]


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


@pytest.mark.parametrize(("ranks", "shards", "tokens", "blocks", "gigabytes"), MEASURED)
def test_plan_comes_out_at_what_was_measured(
    ranks: int, shards: int, tokens: int, blocks: int, gigabytes: float
) -> None:
    options = (
        "--kv-cache-dtype",
        "fp8_ds_mla",
        "--dcp",
        ranks,
        "--indexer-shards",
        shards,
        "--no-mtp",
        "--max-model-len",
        102_400,
    )
    (choice,) = plan(GLM, "--kv-bytes", f"{MEAN_GB:.3f}GB", *options)["choices"]
    assert choice["capacity_tokens"] == pytest.approx(tokens, rel=0.005)
    assert choice["blocks"] == pytest.approx(blocks, rel=0.005)
    assert choice["blocks"] * choice["bytes_per_block"] == pytest.approx(gigabytes * 1e9, rel=0.005)
    assert choice["tokens_per_block"] == [64 * ranks]
    # One block's bytes do not depend on the budget, so with the budget of that run the blocks come out exactly.
    available = blocks * choice["bytes_per_block"]
    assert available / 1e9 == pytest.approx(gigabytes, abs=0.0005)
    (exact,) = plan(GLM, "--kv-bytes", available, *options)["choices"]
    assert (exact["blocks"], exact["capacity_tokens"]) == (blocks, tokens)


def test_plan_compares_choices() -> None:
    planned = plan(
        GLM,
        "--kv-bytes",
        "28.1GB",
        "--kv-cache-dtype",
        "fp8_ds_mla",
        "--dcp",
        8,
        "--indexer-shards",
        "0,4,2,1",
        "--no-mtp",
    )
    assert (planned["max_model_len"], planned["kv_bytes"], planned["dcp"]) == (1_048_576, 28_100_000_000, 8)
    choices = planned["choices"]
    assert [choice["indexer_shards"] for choice in choices] == [8, 4, 2, 1]
    assert [choice["bytes_per_block"] for choice in choices] == [3_452_160, 3_629_568, 3_984_384, 4_694_016]
    assert [choice["sets"] for choice in choices] == [[[0]], [[0, 1]], [[0, 1]], [[0, 1]]]
    assert [choice["cost"] for choice in choices] == pytest.approx([0, 0.0489, 0.1336, 0.2646], abs=0.0002)
    for choice in choices:
        assert choice["blocks"] == 28_100_000_000 // choice["bytes_per_block"]
        assert choice["capacity_tokens"] == choice["blocks"] * 512
        assert choice["max_concurrency"] == choice["blocks"] / 2048
        assert choice["why_separate"] == []


# 61 layers of 656 bytes and as many indexers of 132, in blocks of 64 tokens; the draft layer adds one of each, sharded.
@pytest.mark.parametrize(
    ("ranks", "shards", "mtp", "bytes_per_block"),
    [
        (8, 8, False, 61 * 64 * 656 + 61 * 64 * 132),
        (8, 1, False, 61 * 64 * 656 + 61 * 512 * 132),
        (4, 2, False, 61 * 64 * 656 + 61 * 128 * 132),
        (1, 1, False, 61 * 64 * 656 + 61 * 64 * 132),
        (8, 8, True, 62 * 64 * 656 + 62 * 64 * 132),
        (8, 1, True, 62 * 64 * 656 + 61 * 512 * 132 + 64 * 132),
    ],
)
def test_plan_of_deepseek(ranks: int, shards: int, mtp: bool, bytes_per_block: int) -> None:  # noqa: FBT001
    options = [
        "--kv-cache-dtype",
        "fp8_ds_mla",
        "--dcp",
        ranks,
        "--indexer-shards",
        shards,
        *([] if mtp else ["--no-mtp"]),
    ]
    planned = plan(DEEPSEEK, "--kv-bytes", "40GiB", *options)
    (choice,) = planned["choices"]
    assert choice["bytes_per_block"] == bytes_per_block
    assert choice["blocks"] == 40 * 2**30 // bytes_per_block
    assert choice["tokens_per_block"] == [64 * ranks]
    assert planned["max_model_len"] == json.loads(Path(DEEPSEEK).read_text(encoding="utf-8"))["max_position_embeddings"]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GLM, ["--kv-bytes", "28.1GB", "--kv-cache-dtype", "fp8_ds_mla", "--dcp", 8, "--indexer-shards", "8,4,2,1"]),
        (GLM, ["--kv-bytes", "28.1GB", "--dcp", 4, "--indexer-shards", "4,1", "--max-model-len", 100_000, "--no-mtp"]),
        (DEEPSEEK, ["--kv-bytes", "40GiB", "--dcp", 2, "--indexer-shards", "0,1", "--block-size", 128]),
    ],
)
def test_the_table_of_plan_says_what_its_json_says(config: str, options: list[object]) -> None:
    planned = plan(config, *options)
    text = invoke("plan", "--config", config, *options)
    assert text.startswith(f"Requests of up to {planned['max_model_len']:,} tokens")
    choices = planned["choices"]
    sets = [" ".join("{" + ", ".join(map(str, groups)) + "}" for groups in choice["sets"]) for choice in choices]
    spans = [" / ".join(f"{tokens:,}" for tokens in choice["tokens_per_block"]) for choice in choices]
    assert table_rows(text) == [
        ["indexer shards", *(str(choice["indexer_shards"]) for choice in choices)],
        ["bytes per block, on one rank", *(f"{choice['bytes_per_block']:,}" for choice in choices)],
        ["tokens per block, per set", *spans],
        ["blocks", *(f"{choice['blocks']:,}" for choice in choices)],
        ["capacity in tokens", *(f"{choice['capacity_tokens']:,}" for choice in choices)],
        ["requests at once", *(f"{choice['max_concurrency']:.2f}" for choice in choices)],
        ["cost, of the best above", *(f"{choice['cost']:.2%}" for choice in choices)],
        ["sets of groups in lockstep", *sets],
    ]
    assert all(len(line) <= 80 for line in text.splitlines()), "fits a narrow terminal"


def test_plan_takes_a_model_s_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(Path(GLM).read_bytes())
    options = ("--kv-bytes", "100GB", "--dcp", 8)
    assert plan(str(tmp_path), *options) == plan(GLM, *options)


def test_plan_says_which_choice_does_not_fit() -> None:
    options = ("--kv-bytes", "28.1GB", "--dcp", 8, "--indexer-shards", "8,1", "--max-model-len", 3_500_000)
    planned = plan(GLM, "--kv-cache-dtype", "fp8_ds_mla", *options)
    fits, does_not = planned["choices"]
    assert (fits["cost"], does_not["indexer_shards"], set(does_not)) == (0, 1, {"indexer_shards", "does_not_fit"})
    assert "3500000" in does_not["does_not_fit"]
    text = invoke("plan", "--config", GLM, "--kv-cache-dtype", "fp8_ds_mla", *options)
    assert table_rows(text)[0] == ["indexer shards", "8"]
    assert f"1 indexer shards: {does_not['does_not_fit']}" in text.splitlines()


def test_plan_fails_when_nothing_fits() -> None:
    planned = plan(GLM, "--kv-bytes", "1MB", "--dcp", 8, "--indexer-shards", "8,1", code=1)
    assert ["blocks" in choice for choice in planned["choices"]] == [False, False]
    assert "1 indexer shards: a request of max_model_len" in invoke(
        "plan", "--config", GLM, "--kv-bytes", "1MB", code=1
    )


def test_plan_of_full_attention_divides_the_heads(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    facts = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    config.write_text(json.dumps(facts), encoding="utf-8")
    options = ("--kv-bytes", "10GB", "--block-size", 16, "--max-model-len", 4096, "--tp", 4)
    (choice,) = plan(str(config), *options)["choices"]
    # Keys and values of two heads of 128 elements of two bytes.
    assert choice["bytes_per_block"] == 32 * 16 * 2 * 2 * 128 * 2


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1", 1),
        ("28145000000", 28_145_000_000),
        ("1kB", 1000),
        ("1MB", 10**6),
        ("1GB", 10**9),
        ("1TB", 10**12),
        ("1KiB", 1024),
        ("1MiB", 2**20),
        ("1GiB", 2**30),
        ("1TiB", 2**40),
        ("1B", 1),
        ("28.145GB", 28_145_000_000),
        # A float would come out at 1,001 below.
        ("1.001kB", 1001),
        ("4.35GB", 4_350_000_000),
        ("0.5KiB", 512),
        ("1.5TiB", 3 * 2**39),
        ("2 GB", 2 * 10**9),
        (" 2GB\n", 2 * 10**9),
        ("007", 7),
        ("9" * 28, 10**28 - 1),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "B",
        "one",
        "-1",
        "-1GB",
        "+1",
        "1e9",
        "0x10",
        "1,000",
        "1_000",
        "1.",
        ".5",
        "1.5.2GB",
        "nan",
        "inf",
        "1  GB",
        "1GB 2",
        "1gb",
        "1KB",
        "1PB",
        "1GBB",
        "1BB",
        "1iB",
        "1GB/s",
        "\u0663GB",
        "\u00b2",
    ],
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(text)
    assert str(caught.value).startswith("a size must be bytes or a number with one of kB, MB, ")
    assert str(caught.value).endswith(f", got {text!r}")


@pytest.mark.parametrize("unit", ["k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"])
def test_a_unit_without_its_b_is_not_taken_for_bytes(unit: str) -> None:
    try:
        size = parse_bytes(f"3{unit}")
    except ConfigError:
        return
    assert size == parse_bytes(f"3{unit}B")


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
