"""`lockstep-kv plan`: measured capacities, and the same figures as JSON and in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from command_line import DEEPSEEK, GLM, invoke, plan, table_rows

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
    table, _, said = text.partition("\nTry ")
    assert table_rows(table) == [
        ["indexer shards", *(str(choice["indexer_shards"]) for choice in choices)],
        ["bytes per block, on one rank", *(f"{choice['bytes_per_block']:,}" for choice in choices)],
        ["tokens per block, per set", *spans],
        ["blocks", *(f"{choice['blocks']:,}" for choice in choices)],
        ["capacity in tokens", *(f"{choice['capacity_tokens']:,}" for choice in choices)],
        ["requests at once", *(f"{choice['max_concurrency']:.2f}" for choice in choices)],
        ["cost, of the best above", *(f"{choice['cost']:.2%}" for choice in choices)],
        ["candidates merged per query", *(f"{choice['candidates_merged']:,}" for choice in choices)],
        ["context scored by a rank", *(f"{choice['context_scored']:.1%}" for choice in choices)],
        ["sets of groups in lockstep", *sets],
    ]
    assert planned["advice"] == (f"Try {' '.join(said.split())}" if said else None)
    assert all(len(line) <= 80 for line in text.splitlines()), "fits a narrow terminal"


@pytest.mark.parametrize(
    ("shards", "merged", "scored"),
    [(8, 16_384, 1 / 8), (4, 8192, 1 / 4), (2, 4096, 1 / 2), (1, 0, 1)],
)
def test_what_a_number_of_shards_asks_of_a_step(shards: int, merged: int, scored: float) -> None:
    """The best 2,048 of each shard are merged, and a rank scores its shard."""
    (choice,) = plan(GLM, "--kv-bytes", "28.1GB", "--dcp", 8, "--indexer-shards", shards)["choices"]
    assert (choice["candidates_merged"], choice["context_scored"]) == (merged, scored)


@pytest.mark.parametrize(("shards", "first"), [("8,4,2,1", 4), ("1,2,8", 2), ("0,4", 4)])
def test_plan_says_which_number_of_shards_to_try_first(shards: str, first: int) -> None:
    options = ("--kv-bytes", "28.1GB", "--kv-cache-dtype", "fp8_ds_mla", "--dcp", 8, "--indexer-shards", shards)
    assert plan(GLM, *options)["advice"].startswith(f"Try {first} indexer shards first: they cost ")


@pytest.mark.parametrize("shards", ["8", "8,1", "1"])
def test_plan_says_nothing_where_no_number_of_shards_is_partial(shards: str) -> None:
    assert plan(GLM, "--kv-bytes", "28.1GB", "--dcp", 8, "--indexer-shards", shards)["advice"] is None


def test_the_page_on_replication_has_the_figures_of_plan() -> None:
    """Its table: what was measured, and what `plan` says for the mean of the runs' memory."""
    page = (Path(__file__).parents[2] / "docs" / "replication.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    by_topology = {(row[0], row[1]): row for row in rows if len(row) == 8}
    options = ("--kv-cache-dtype", "fp8_ds_mla", "--no-mtp", "--max-model-len", 102_400)
    for ranks, shards, tokens, blocks, _ in MEASURED:
        (choice,) = plan(GLM, "--kv-bytes", f"{MEAN_GB:.3f}GB", "--dcp", ranks, "--indexer-shards", shards, *options)[
            "choices"
        ]
        row = by_topology[f"{ranks}", f"{shards}"]
        assert row[4:] == [f"{tokens:,}", f"{choice['capacity_tokens']:,}", f"{blocks:,}", f"{choice['blocks']:,}"]


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
