"""Layouts by worked numbers: bytes per block, capacity, the cost of replication, and where pages lie."""

from pathlib import Path
from typing import Any

import pytest

from lockstep_kv import ConfigError, Coordinator, CoordinatorConfig, GroupSpec, LayerSpec, Layout, plan_layout
from lockstep_kv.models import model_groups

GLM = Path(__file__).parents[1] / "data" / "glm-5.2-config.json"
DTYPES = {656: "fp8_ds_mla", 432: "nvfp4_ds_mla", 368: "nvfp4_ds_mla_fp8_rope"}


def group(name: str, block_size: int, record: int, *, count: int = 1, kind: str = "mla", shards: int = 1) -> GroupSpec:
    layers = [LayerSpec(f"{name}.{layer}", block_size * record) for layer in range(count)]
    return GroupSpec(kind, block_size, layers, kv_shards=shards)


def glm_layout(record: int, ranks: int, shards: int, **options: Any) -> Layout:
    """Lay out GLM-5.2 without its draft layer in 64-token blocks, with records of this many bytes."""
    include_mtp = options.pop("include_mtp", False)
    groups = model_groups(
        GLM,
        kv_cache_dtype=DTYPES[record],
        block_size=64,
        dcp_world_size=ranks,
        indexer_shards=shards,
        include_mtp=include_mtp,
    )
    options = {"max_model_len": 102_400, **options}
    if not {"num_blocks", "available_bytes"} & set(options):
        options["num_blocks"] = 10_000
    return plan_layout(groups, dcp_world_size=ranks, **options)


def set_members(groups: list[GroupSpec], ranks: int) -> list[tuple[int, ...]]:
    layout = plan_layout(groups, dcp_world_size=ranks, num_blocks=1000, max_model_len=1024)
    coordinator = Coordinator(CoordinatorConfig(groups, 1000, dcp_world_size=ranks, max_model_len=1024))
    members = [found.group_ids for found in layout.sets]
    assert members == [found.group_ids for found in coordinator.sets]
    return members


def test_a_replicated_pair_shares_ids_and_sums_bytes() -> None:
    groups = [group("target", 64, 432, count=3, shards=4), group("indexer", 256, 132, count=2)]
    need = 154_140_672
    layout = plan_layout(groups, dcp_world_size=4, available_bytes=2 * need, max_model_len=262_144)
    assert layout.bytes_per_block == 82_944 + 67_584 == 150_528
    assert layout.blocks_per_request == 1024
    assert layout.blocks_per_request * layout.bytes_per_block == need
    assert (layout.num_blocks, layout.max_concurrency, layout.capacity_tokens) == (2048, 2.0, 2 * 262_144)
    # Dense pages of each layer, in a region of its own.
    assert all(tensor.block_stride == tensor.page for tensor in layout.tensors)
    assert sum(tensor.size for tensor in layout.tensors) == layout.total_bytes == 2 * need
    ends = [0] + [tensor.offset + tensor.size for tensor in layout.tensors]
    assert [tensor.offset for tensor in layout.tensors] == ends[:-1]
    (only,) = layout.sets
    assert (only.group_ids, only.tokens_per_block, only.is_lockstep) == ((0, 1), 256, True)


SHARDED = [(ranks, 0) for ranks in (2, 4, 8)]
HALF = [(2, 1), (4, 2), (8, 4)]
QUARTER = [(4, 1), (8, 2)]


@pytest.mark.parametrize(
    ("record", "topologies", "bytes_per_block"),
    [
        (656, SHARDED, 3_452_160),
        (656, HALF, 3_629_568),
        (656, QUARTER, 3_984_384),
        (656, [(8, 1)], 4_694_016),
        (432, SHARDED, 2_333_952),
        (432, HALF, 2_511_360),
        (432, QUARTER, 2_866_176),
        (432, [(8, 1)], 3_575_808),
        (368, SHARDED, 2_014_464),
        (368, HALF, 2_191_872),
        (368, QUARTER, 2_546_688),
        (368, [(8, 1)], 3_256_320),
    ],
)
def test_bytes_per_block_of_glm(record: int, topologies: list[tuple[int, int]], bytes_per_block: int) -> None:
    for ranks, shards in topologies:
        layout = glm_layout(record, ranks, shards)
        assert layout.bytes_per_block == bytes_per_block
        assert [found.tokens_per_block for found in layout.sets] == [64 * ranks]


BUDGET = 3_426_112_942


@pytest.mark.parametrize(("max_model_len", "blocks_per_request"), [(225_000, 879), (300_000, 1172)])
def test_a_reported_capacity_comes_out_to_the_token(max_model_len: int, blocks_per_request: int) -> None:
    layout = glm_layout(432, 4, 1, available_bytes=BUDGET, max_model_len=max_model_len, include_mtp=True)
    assert (layout.bytes_per_block, layout.num_blocks) == (2_902_272, 1180)
    assert (layout.blocks_per_request, layout.capacity_tokens) == (blocks_per_request, 302_047)


def test_a_replicated_draft_indexer_would_cost_ten_blocks() -> None:
    groups = [group("ckv", 64, 432, count=79, shards=4), group("indexer", 256, 132, count=22)]
    layout = plan_layout(groups, dcp_world_size=4, available_bytes=BUDGET, max_model_len=225_000)
    assert layout.num_blocks == 1170


@pytest.mark.parametrize(
    ("ranks", "shards", "tokens", "blocks", "gigabytes"),
    [
        (2, 0, 1_040_128, 8126, 28.052),
        (4, 0, 2_088_704, 8159, 28.166),
        (4, 2, 1_984_256, 7751, 28.133),
        (8, 0, 4_174_336, 8153, 28.145),
        (8, 1, 3_063_296, 5983, 28.084),
        (8, 4, 3_964_928, 7744, 28.107),
    ],
)
def test_measured_runs_fit_one_budget(ranks: int, shards: int, tokens: int, blocks: int, gigabytes: float) -> None:
    layout = glm_layout(656, ranks, shards, num_blocks=blocks)
    assert layout.capacity_tokens == tokens
    assert layout.total_bytes == blocks * layout.bytes_per_block
    assert layout.total_bytes / 1e9 == pytest.approx(gigabytes, abs=0.0005)
    # All six ran with one memory setting.
    assert layout.total_bytes == pytest.approx(28.109e9, rel=0.005)


def percent_lost(record: int, ranks: int, shards: int, *, include_mtp: bool = False) -> float:
    """Tokens that fewer shards cost, in percent of what a fully sharded cache would hold."""
    whole = glm_layout(record, ranks, 0, include_mtp=include_mtp)
    partial = glm_layout(record, ranks, shards, include_mtp=include_mtp)
    assert whole.sets[0].tokens_per_block == partial.sets[0].tokens_per_block
    return round(100 * (1 - whole.bytes_per_block / partial.bytes_per_block), 2)


@pytest.mark.parametrize(
    ("record", "losses"),
    [
        (656, [4.89, 13.36, 26.46, 4.89, 13.36]),
        (432, [7.06, 18.57, 34.73, 7.06, 18.57]),
        (368, [8.09, 20.90, 38.14, 8.09, 20.90]),
    ],
)
def test_what_replication_costs(record: int, losses: list[float]) -> None:
    assert [percent_lost(record, ranks, 1) for ranks in (2, 4, 8)] == losses[:3]
    assert percent_lost(record, 4, 2) == percent_lost(record, 8, 4) == losses[3]
    assert percent_lost(record, 8, 2) == losses[4]


@pytest.mark.parametrize(("record", "loss"), [(656, 26.17), (432, 34.38), (368, 37.77)])
def test_what_replication_costs_beside_a_sharded_draft(record: int, loss: float) -> None:
    assert percent_lost(record, 8, 1, include_mtp=True) == loss


@pytest.mark.parametrize(
    ("record", "replicated", "sharded"),
    [
        (656, [28_356, 15_564, 9_168], [26_970, 13_485, 6_742.5]),
        (432, [19_620, 11_196, 6_984], [18_234, 9_117, 4_558.5]),
        (368, [17_124, 9_948, 6_360], [15_738, 7_869, 3_934.5]),
    ],
)
def test_bytes_per_token_and_rank(record: int, replicated: list[int], sharded: list[float]) -> None:
    for shards, expected in ((1, replicated), (0, sharded)):
        layouts = [glm_layout(record, ranks, shards) for ranks in (2, 4, 8)]
        assert [layout.bytes_per_block / layout.sets[0].tokens_per_block for layout in layouts] == expected


def test_the_measured_cost_of_full_replication() -> None:
    assert round(100 * (1 - 3_063_296 / 4_174_336), 3) == 26.616
    ratio = glm_layout(656, 8, 1).bytes_per_block / glm_layout(656, 8, 0).bytes_per_block
    assert round(ratio, 3) == 1.360


def test_unequal_spans_stay_apart_and_say_why() -> None:
    groups = [group("sharded", 64, 432, shards=4), group("replicated", 64, 132)]
    coordinator = Coordinator(CoordinatorConfig(groups, 100, dcp_world_size=4, max_model_len=1024))
    assert [found.tokens_per_block for found in coordinator.sets] == [256, 64]
    assert coordinator.hash_block_tokens == 64
    assert [found.is_lockstep for found in coordinator.sets] == [False, False]
    for found in coordinator.sets:
        assert found.why_separate is not None
        assert "256" in found.why_separate
        assert "64" in found.why_separate
    layout = plan_layout(groups, dcp_world_size=4, num_blocks=100, max_model_len=1024)
    assert layout.blocks_per_request == 4 + 16
    assert layout.bytes_per_block == 64 * 432


def test_partial_replication_on_eight_ranks_is_one_set_of_unpadded_pages() -> None:
    groups = [group("target", 64, 656, count=78, shards=8), group("indexer", 128, 132, count=21, shards=4)]
    layout = plan_layout(groups, dcp_world_size=8, num_blocks=100, max_model_len=1024)
    (only,) = layout.sets
    assert (only.group_ids, only.tokens_per_block) == ((0, 1), 64 * 8)
    assert 64 * 8 == 128 * 4
    assert {(tensor.group_id, tensor.page) for tensor in layout.tensors} == {(0, 64 * 656), (1, 128 * 132)}


def test_what_does_not_move_in_lockstep() -> None:
    pair = [group("a", 64, 432, shards=4), group("b", 256, 132)]
    assert set_members(pair, 4) == [(0, 1)]
    assert set_members([group("a", 64, 432), group("b", 256, 132)], 1) == [(0,), (1,)]
    assert set_members([pair[0], group("b", 64, 132)], 4) == [(0,), (1,)]
    assert set_members([pair[0], group("b", 256, 132, kind="full")], 4) == [(0,), (1,)]
    assert set_members([pair[0], group("b", 64, 132, shards=4)], 4) == [(0,), (1,)]


def test_groups_of_one_block_size_stay_apart_by_kind_and_shards() -> None:
    groups = [group("a", 64, 432, shards=4), group("b", 64, 132), group("c", 64, 100, kind="full")]
    assert set_members(groups, 4) == [(0,), (1,), (2,)]


def test_a_third_group_does_not_break_a_pair() -> None:
    groups = [group("a", 64, 432, shards=4), group("c", 64, 100, kind="full", shards=4), group("b", 256, 132)]
    assert set_members(groups, 4) == [(0, 2), (1,)]


def test_equal_pages_in_a_set_are_distinct_regions() -> None:
    # 64 tokens of 128 bfloat16 elements and 256 tokens of 32: both 16,384 bytes.
    groups = [group("target", 64, 256, shards=4), group("indexer", 256, 64)]
    layout = plan_layout(groups, dcp_world_size=4, num_blocks=3, max_model_len=512)
    found = [(tensor.layer, tensor.offset, tensor.page, tensor.size) for tensor in layout.tensors]
    assert found == [("target.0", 0, 16_384, 49_152), ("indexer.0", 49_152, 16_384, 49_152)]


def test_sets_share_their_bytes() -> None:
    groups = [group("a", 16, 100, kind="full", count=2), group("b", 32, 25, kind="full", count=3)]
    layout = plan_layout(groups, dcp_world_size=1, num_blocks=50, max_model_len=64)
    assert layout.bytes_per_block == 3200
    places = [(tensor.offset, tensor.block_stride) for tensor in layout.tensors]
    assert places == [(0, 3200), (1600, 3200), (0, 3200), (800, 3200), (1600, 3200)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["available_bytes", "num_blocks"]),
        ({"num_blocks": 4}, ["1024", "4"]),
        ({"num_blocks": 100, "available_bytes": 1000}, ["num_blocks", "100", "1000"]),
        ({"available_bytes": 5 * 61_440 - 1}, ["1024", str(5 * 61_440)]),
        ({"num_blocks": 100, "max_model_len": 0}, ["max_model_len", "0"]),
        ({"num_blocks": 100, "dcp_world_size": 3}, ["kv_shards", "3", "4"]),
        ({"num_blocks": 2**64}, ["num_blocks", str(2**64)]),
        ({"num_blocks": 100, "groups": []}, ["groups"]),
    ],
)
def test_refusals_name_the_values(options: dict[str, Any], words: list[str]) -> None:
    groups = [group("a", 64, 432, shards=4), group("b", 256, 132)]
    with pytest.raises(ConfigError) as caught:
        plan_layout(**{"groups": groups, "dcp_world_size": 4, "max_model_len": 1024, **options})
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


def test_five_blocks_hold_four_blocks_of_tokens() -> None:
    groups = [group("a", 64, 432, shards=4), group("b", 256, 132)]
    layout = plan_layout(groups, dcp_world_size=4, available_bytes=5 * 61_440, max_model_len=1024)
    assert (layout.num_blocks, layout.bytes_per_block) == (5, 61_440)
