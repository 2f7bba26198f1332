"""From model configurations to cache groups."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lockstep_kv import ArgumentTypeError, ConfigError, GroupSpec
from lockstep_kv.models import MODEL_TYPES, load_config, model_groups

DATA = Path(__file__).parents[1] / "data"
GLM = DATA / "glm-5.2-config.json"
DEEPSEEK = DATA / "deepseek-v3.2-config.json"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
PLAIN_MLA: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def groups(config: Mapping[str, Any] | Path, **options: Any) -> list[GroupSpec]:
    """Plan for four ranks and blocks of 64 tokens unless told otherwise."""
    return model_groups(config, **{"block_size": 64, "dcp_world_size": 4, **options})


def indexer_layers(group: GroupSpec) -> list[int]:
    return [int(layer.name.split(".")[2]) for layer in group.layers if layer.name.endswith("indexer.k_cache")]


def test_glm_runs_the_indexer_in_21_of_its_78_layers() -> None:
    main, indexer = groups(GLM, indexer_shards=1, kv_cache_dtype="fp8_ds_mla", include_mtp=False)
    assert (main.kind, main.block_size, main.kv_shards, len(main.layers)) == ("mla", 64, 4, 78)
    assert {layer.page_bytes for layer in main.layers} == {64 * 656}
    assert (indexer.kind, indexer.block_size, indexer.kv_shards, len(indexer.layers)) == ("mla", 256, 1, 21)
    assert {layer.page_bytes for layer in indexer.layers} == {256 * 132}
    assert indexer_layers(indexer) == [0, 1, *range(2, 78, 4)]
    assert main.layers[77].name == "model.layers.77.self_attn.attn"
    assert indexer.layers[0].name == "model.layers.0.self_attn.indexer.k_cache"


def test_a_draft_layer_keeps_its_indexer_sharded_beside_the_main_cache() -> None:
    main, indexer = groups(GLM, indexer_shards=1, kv_cache_dtype="nvfp4_ds_mla")
    assert len(main.layers) == 79 + 1
    assert main.layers[78].name == "model.layers.78.self_attn.attn"
    assert (main.layers[79].name, main.layers[79].page_bytes) == ("model.layers.78.self_attn.indexer.k_cache", 64 * 132)
    assert len(indexer.layers) == 21
    assert main.bytes_per_block + indexer.bytes_per_block == 2_902_272


@pytest.mark.parametrize("shards", [0, 4])
def test_an_indexer_of_the_main_cache_s_shards_is_in_its_group(shards: int) -> None:
    (main,) = groups(GLM, indexer_shards=shards, kv_cache_dtype="fp8_ds_mla", include_mtp=False)
    assert (main.block_size, main.kv_shards, main.bytes_per_block) == (64, 4, 3_452_160)
    assert len(indexer_layers(main)) == 21
    (with_mtp,) = groups(GLM, indexer_shards=shards, kv_cache_dtype="fp8_ds_mla")
    assert with_mtp.bytes_per_block == 3_452_160 + 64 * 656 + 64 * 132


@pytest.mark.parametrize(
    ("ranks", "shards", "block_size"), [(4, 1, 256), (4, 2, 128), (8, 1, 512), (8, 4, 128), (8, 2, 256)]
)
def test_fewer_shards_make_longer_blocks_of_one_span(ranks: int, shards: int, block_size: int) -> None:
    main, indexer = groups(GLM, dcp_world_size=ranks, indexer_shards=shards)
    assert (indexer.block_size, indexer.kv_shards) == (block_size, shards)
    assert main.tokens_per_block(ranks) == indexer.tokens_per_block(ranks) == 64 * ranks


def test_deepseek_v32_runs_the_indexer_in_every_layer() -> None:
    main, indexer = groups(DEEPSEEK, indexer_shards=2, kv_cache_dtype="fp8_ds_mla")
    assert len(main.layers) == 62 + 1
    assert indexer_layers(indexer) == list(range(61))
    assert indexer_layers(main) == [61]


def test_the_config_s_own_list_of_indexers_comes_first() -> None:
    config = load_config(GLM)
    kinds = ["full" if layer % 13 == 0 else "shared" for layer in range(78)]
    assert indexer_layers(groups({**config, "indexer_types": kinds}, indexer_shards=1)[1]) == list(range(0, 78, 13))
    pattern = "".join("F" if kind == "full" else "S" for kind in kinds)
    assert indexer_layers(groups({**config, "index_topk_pattern": pattern}, indexer_shards=1)[1]) == list(
        range(0, 78, 13)
    )
    without_rule = {name: value for name, value in config.items() if not name.startswith("index_topk_")}
    assert len(groups(without_rule, indexer_shards=1)[1].layers) == 78
    (alone,) = groups({**config, "indexer_types": ["shared"] * 78}, indexer_shards=1, include_mtp=False)
    assert len(alone.layers) == 78


@pytest.mark.parametrize(
    ("dtype", "record"),
    [
        ("auto", 1152),
        ("bfloat16", 1152),
        ("float16", 1152),
        ("fp8", 576),
        ("fp8_ds_mla", 656),
        ("nvfp4_ds_mla", 432),
        ("nvfp4_ds_mla_fp8_rope", 368),
    ],
)
def test_records_of_latent_attention(dtype: str, record: int) -> None:
    (main,) = groups(PLAIN_MLA, kv_cache_dtype=dtype)
    assert (len(main.layers), {layer.page_bytes for layer in main.layers}) == (62, {64 * record})
    if dtype != "fp8":
        main, indexer = groups(DEEPSEEK, kv_cache_dtype=dtype, indexer_shards=1)
        assert (main.layers[0].page_bytes, indexer.layers[0].page_bytes) == (64 * record, 256 * 132)


def test_full_attention_keeps_keys_and_values_of_its_share_of_heads() -> None:
    (group,) = groups(LLAMA, dcp_world_size=1)
    assert (group.kind, group.block_size, group.kv_shards, len(group.layers)) == ("full", 64, 1, 32)
    assert group.layers[0].page_bytes == 64 * 2 * 8 * 128 * 2
    (fp8,) = groups(LLAMA, dcp_world_size=1, kv_cache_dtype="fp8", tensor_parallel_size=4)
    assert fp8.layers[0].page_bytes == 64 * 2 * 2 * 128
    (copies,) = groups(LLAMA, dcp_world_size=2, tensor_parallel_size=16)
    assert (copies.layers[0].page_bytes, copies.kv_shards) == (64 * 2 * 1 * 128 * 2, 2)
    (wide,) = groups({**LLAMA, "head_dim": 256}, dcp_world_size=1)
    assert wide.layers[0].page_bytes == 64 * 2 * 8 * 256 * 2
    (every_head,) = groups({**LLAMA, "num_key_value_heads": None}, dcp_world_size=1)
    assert every_head.layers[0].page_bytes == 64 * 2 * 32 * 128 * 2


def test_an_unused_window_is_no_window() -> None:
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}
    assert groups(config, dcp_world_size=1)[0].kind == "full"
    assert groups({**LLAMA, "layer_types": ["full_attention"] * 32}, dcp_world_size=1)[0].kind == "full"
    with pytest.raises(ConfigError, match="sliding_window 4096 is not supported"):
        groups({**LLAMA, "model_type": "mistral", "sliding_window": 4096}, dcp_world_size=1)
    with pytest.raises(ConfigError, match="layer_types holds 'sliding_attention'"):
        groups({**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}, dcp_world_size=1)


def test_a_folder_stands_for_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(GLM.read_text())
    assert load_config(tmp_path) == load_config(str(GLM)) == json.loads(GLM.read_text())
    assert groups(tmp_path) == groups(GLM)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"{", "Expecting property name"),
        (b"[1]", "must hold a JSON object, got list"),
        (b"\xff\xfe\xff", "can't decode"),
        (b"[" * 100_000, "recursion"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "some-config.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_are_none() -> None:
    with pytest.raises(ArgumentTypeError, match="path must be a path, got int"):
        load_config(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot read model config"):
        load_config("a\0b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"indexer_shards": 3}, "indexer_shards must be 0 or a divisor of dcp_world_size 4, got 3"),
        ({"indexer_shards": 8}, "indexer_shards must be 0 or a divisor of dcp_world_size 4, got 8"),
        ({"indexer_shards": -1}, "indexer_shards must be between 0 and 2147483647, got -1"),
        ({"dcp_world_size": 0}, "dcp_world_size must be between 1 and 64, got 0"),
        ({"dcp_world_size": 65}, "dcp_world_size must be between 1 and 64, got 65"),
        ({"block_size": 0}, "block_size must be between 1 and 2147483647, got 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be between 1 and 2147483647, got 0"),
        ({"kv_cache_dtype": "int4"}, "unknown kv_cache_dtype 'int4' for glm_moe_dsa; known: auto, bfloat16"),
        ({"kv_cache_dtype": "fp8"}, "unknown kv_cache_dtype 'fp8' for glm_moe_dsa; known: auto, bfloat16"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        groups(GLM, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 64.0}, "block_size must be an int, got float 64.0"),
        ({"dcp_world_size": True}, "dcp_world_size must be an int, got bool True"),
        ({"include_mtp": 1}, "include_mtp must be a bool, got int"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype must be a str, got NoneType"),
    ],
)
def test_options_of_the_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        groups(GLM, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA, {"model_type": "mamba2"}, "unknown model_type 'mamba2'; known model types: deepseek_v32, glm_moe_dsa"),
        (LLAMA, {"model_type": None}, "unknown model_type None"),
        (LLAMA, {"model_type": ["llama"]}, "unknown model_type ['llama']"),
        (LLAMA, {"num_hidden_layers": None}, "model config lacks num_hidden_layers, which llama needs"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers must be between 1 and 10000, got 1000000000"),
        (LLAMA, {"num_hidden_layers": "32"}, "num_hidden_layers must be an int, got str '32'"),
        (LLAMA, {"num_hidden_layers": 32.0}, "num_hidden_layers must be an int, got float 32.0"),
        (LLAMA, {"hidden_size": 4097}, "num_attention_heads 32 must divide hidden_size, got 4097"),
        (LLAMA, {"hidden_size": None}, "model config lacks hidden_size, which llama needs"),
        (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads must be between 1 and"),
        (LLAMA, {"layer_types": "full"}, "layer_types must be a list, got 'full'"),
        (PLAIN_MLA, {"kv_lora_rank": None}, "model config lacks kv_lora_rank, which deepseek_v3 needs"),
        (
            PLAIN_MLA,
            {"num_nextn_predict_layers": -1},
            "num_nextn_predict_layers must be between 0 and 10000, got -1",
        ),
        ("glm", {"index_head_dim": None}, "model config lacks index_head_dim, which glm_moe_dsa needs"),
        ("glm", {"index_head_dim": 96}, "index_head_dim must be a multiple of 128, got 96"),
        ("glm", {"index_topk_freq": 0}, "index_topk_freq must be between 1 and 2147483647, got 0"),
        ("glm", {"indexer_types": ["full"]}, "indexer_types must list num_hidden_layers 78 entries, got 1"),
        ("glm", {"indexer_types": "full"}, "indexer_types must list num_hidden_layers 78 entries, got 'full'"),
        ("glm", {"indexer_types": ["half"] * 78}, "indexer_types must hold 'full' and 'shared', got 'half'"),
        ("glm", {"index_topk_pattern": "X" * 78}, "indexer_types must hold 'full' and 'shared', got 'X'"),
        ("glm", {"index_topk_pattern": 4}, "index_topk_pattern must be a str of F and S, got 4"),
    ],
)
def test_configs_that_cannot_be_used(base: dict[str, Any] | str, change: dict[str, Any], message: str) -> None:
    config = load_config(GLM) if isinstance(base, str) else base
    with pytest.raises(ConfigError) as caught:
        groups({**config, **change}, dcp_world_size=1)
    assert str(caught.value).startswith(message)


def test_full_attention_has_no_packed_records() -> None:
    with pytest.raises(ConfigError, match="unknown kv_cache_dtype 'fp8_ds_mla' for llama; known: auto, bfloat16"):
        groups(LLAMA, dcp_world_size=1, kv_cache_dtype="fp8_ds_mla")


def test_packed_records_hold_one_shape_only() -> None:
    with pytest.raises(ConfigError, match="packs kv_lora_rank 512 and qk_rope_head_dim 64, got 256 and 64"):
        groups({**PLAIN_MLA, "kv_lora_rank": 256}, kv_cache_dtype="fp8_ds_mla")


def test_models_without_an_indexer_refuse_shards_of_it() -> None:
    for config in (LLAMA, PLAIN_MLA):
        with pytest.raises(ConfigError, match="which has no indexer, got 1"):
            groups(config, indexer_shards=1)


def test_context_parallel_ranks_need_copies_of_the_heads() -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size must divide num_key_value_heads 8 or be a multiple, got 3"
    ):
        groups(LLAMA, dcp_world_size=1, tensor_parallel_size=3)
    with pytest.raises(ConfigError, match="needs tensor_parallel_size of at least 16, got 8"):
        groups(LLAMA, dcp_world_size=2, tensor_parallel_size=8)


def test_known_types_are_listed() -> None:
    assert {"deepseek_v32", "glm_moe_dsa", "deepseek_v2", "deepseek_v3", "llama"} <= set(MODEL_TYPES)


def test_errors_survive_a_process_border() -> None:
    with pytest.raises(ConfigError) as caught:
        groups({})
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
