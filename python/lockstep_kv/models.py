"""From a model's published `config.json` to cache groups.

The groups are geometry only: which layers cache what, in pages of how many bytes, on how many shards. Whether a draft
model reads a group (`GroupSpec.is_eagle`) is the engine's choice and is left at False.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep_kv._core import GroupSpec, LayerSpec
from lockstep_kv.arguments import checked_int
from lockstep_kv.errors import ArgumentTypeError, ConfigError

if TYPE_CHECKING:
    from typing import SupportsIndex

__all__ = ["MAX_DCP_WORLD_SIZE", "MODEL_TYPES", "SPARSE_MLA_MODEL_TYPES", "load_config", "model_groups"]

MAX_DCP_WORLD_SIZE = 64

SPARSE_MLA_MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Those of `MODEL_TYPES` with a sparse indexer."""
_MLA = ("deepseek_v2", "deepseek_v3")
_FULL = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
MODEL_TYPES = (*SPARSE_MLA_MODEL_TYPES, *_MLA, *_FULL)
"""The values of `model_type` that `model_groups` knows."""

_ELEMENT_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# Records of 512 latent and 64 RoPE elements with their scales.
_PACKED_MLA_BYTES = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 432, "nvfp4_ds_mla_fp8_rope": 368}
_PACKED_MLA_ELEMENTS = (512, 64)
# The indexer caches one byte per element and one float32 scale per 128 elements.
_INDEXER_SCALE_ELEMENTS = 128
_INDEXER_SCALE_BYTES = 4
_MAX_LAYERS = 10_000


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a `config.json`, or the one in a model's folder.

    Raises `ConfigError` naming the path if it cannot be read or is not a JSON object.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"path must be a path, got {type(path).__name__}")
    file = Path(path)
    if file.is_dir():
        file /= "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # ValueError covers text that is not UTF-8, not JSON, or a path with a null character.
        raise ConfigError(f"cannot read model config {str(path)!r}: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model config {str(path)!r} must hold a JSON object, got {type(config).__name__}")
    return config


def model_groups(
    config: Mapping[str, Any] | str | os.PathLike[str],
    *,
    kv_cache_dtype: str = "auto",
    block_size: SupportsIndex,
    dcp_world_size: SupportsIndex,
    indexer_shards: SupportsIndex = 0,
    include_mtp: bool = True,
    tensor_parallel_size: SupportsIndex = 1,
) -> list[GroupSpec]:
    """List the cache groups of a model on one rank.

    config: the content of `config.json`, or the path of it or of its folder.
    kv_cache_dtype: "auto", "bfloat16", "float16"; "fp8" except for sparse MLA; for MLA also "fp8_ds_mla" (656 bytes a
        token and layer), "nvfp4_ds_mla" (432) and "nvfp4_ds_mla_fp8_rope" (368).
    block_size: tokens of one block on one rank, for the main cache.
    dcp_world_size: ranks of the decode-context-parallel group, 1 to 64. The main cache has that many shards.
    indexer_shards: 0 = as many shards as the main cache; otherwise a divisor of `dcp_world_size` (1 = replicated).
        With fewer shards than the main cache the indexer is a group of its own, with longer blocks of the same span.
    include_mtp: whether to count the multi-token-prediction layers. Their indexers are always sharded like the main
        cache and belong to its group, so the layers of that group may differ in `page_bytes`.
    tensor_parallel_size: divides the KV heads of full attention; no effect on MLA.

    Returns one group, or the main group and the indexer's. Raises `ConfigError` naming the value that cannot be used.
    """
    if not isinstance(config, Mapping):
        config = load_config(config)
    if not isinstance(kv_cache_dtype, str):
        raise ArgumentTypeError(f"kv_cache_dtype must be a str, got {type(kv_cache_dtype).__name__}")
    if not isinstance(include_mtp, bool):
        raise ArgumentTypeError(f"include_mtp must be a bool, got {type(include_mtp).__name__}")
    block_size = checked_int("block_size", block_size, low=1)
    ranks = checked_int("dcp_world_size", dcp_world_size, low=1, high=MAX_DCP_WORLD_SIZE)
    shards = checked_int("indexer_shards", indexer_shards, low=0)
    tp = checked_int("tensor_parallel_size", tensor_parallel_size, low=1)

    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(f"unknown model_type {model_type!r}; known model types: {', '.join(MODEL_TYPES)}")
    if shards and model_type not in SPARSE_MLA_MODEL_TYPES:
        raise ConfigError(f"indexer_shards must be 0 for {model_type}, which has no indexer, got {shards}")
    if model_type in _FULL:
        return [_full_group(config, kv_cache_dtype, block_size, ranks, tp)]
    if shards and ranks % shards:
        raise ConfigError(f"indexer_shards must be 0 or a divisor of dcp_world_size {ranks}, got {shards}")
    return _mla_groups(config, kv_cache_dtype, block_size, ranks, shards or ranks, include_mtp=include_mtp)


def _mla_groups(
    config: Mapping[str, Any],
    kv_cache_dtype: str,
    block_size: int,
    ranks: int,
    indexer_shards: int,
    *,
    include_mtp: bool,
) -> list[GroupSpec]:
    """List the main group of a latent-attention model and, where it differs in shards, the indexer's."""
    sparse = config["model_type"] in SPARSE_MLA_MODEL_TYPES
    record = _mla_record_bytes(config, kv_cache_dtype, sparse=sparse)
    num_layers = _field(config, "num_hidden_layers", high=_MAX_LAYERS)
    num_mtp = _field(config, "num_nextn_predict_layers", default=0, low=0, high=_MAX_LAYERS) if include_mtp else 0
    mtp = range(num_layers, num_layers + num_mtp)
    main = [_attention_layer(layer, block_size * record) for layer in (*range(num_layers), *mtp)]
    if not sparse:
        return [GroupSpec("mla", block_size, main, kv_shards=ranks)]

    record = _indexer_record_bytes(config)
    layers = _indexer_layers(config, num_layers)
    # Indexers with the main cache's shards have its span and join its group; the others need a group of their own.
    joining = [*layers, *mtp] if indexer_shards == ranks else [*mtp]
    apart = [] if indexer_shards == ranks else layers
    main += [_indexer_layer(layer, block_size * record) for layer in joining]
    groups = [GroupSpec("mla", block_size, main, kv_shards=ranks)]
    if apart:
        longer = block_size * (ranks // indexer_shards)
        pages = [_indexer_layer(layer, longer * record) for layer in apart]
        groups.append(GroupSpec("mla", longer, pages, kv_shards=indexer_shards))
    return groups


def _full_group(config: Mapping[str, Any], kv_cache_dtype: str, block_size: int, ranks: int, tp: int) -> GroupSpec:
    """Describe the group of a model whose layers all keep keys and values of every token."""
    if kv_cache_dtype not in _ELEMENT_BYTES:
        raise _unknown_dtype(config, kv_cache_dtype, _ELEMENT_BYTES)
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False:
        raise ConfigError(f"sliding_window {window!r} is not supported: only full attention is")
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ConfigError(f"layer_types must be a list, got {layer_types!r}")
        other = [kind for kind in layer_types if kind != "full_attention"]
        if other:
            raise ConfigError(f"layer_types holds {other[0]!r}, which is not supported: only full attention is")

    num_heads = _field(config, "num_attention_heads")
    kv_heads = _field(config, "num_key_value_heads", default=num_heads)
    if config.get("head_dim") is not None:
        head_dim = _field(config, "head_dim")
    else:
        hidden_size = _field(config, "hidden_size")
        if hidden_size % num_heads:
            raise ConfigError(f"num_attention_heads {num_heads} must divide hidden_size, got {hidden_size}")
        head_dim = hidden_size // num_heads
    if kv_heads % tp and tp % kv_heads:
        raise ConfigError(f"tensor_parallel_size must divide num_key_value_heads {kv_heads} or be a multiple, got {tp}")
    if ranks > 1 and tp < kv_heads * ranks:
        # The ranks share out the tokens of heads that they would otherwise all hold copies of.
        raise ConfigError(
            f"dcp_world_size {ranks} with num_key_value_heads {kv_heads} needs tensor_parallel_size of at least "
            f"{kv_heads * ranks}, got {tp}"
        )
    record = 2 * max(1, kv_heads // tp) * head_dim * _ELEMENT_BYTES[kv_cache_dtype]
    num_layers = _field(config, "num_hidden_layers", high=_MAX_LAYERS)
    return GroupSpec(
        "full", block_size, [_attention_layer(n, block_size * record) for n in range(num_layers)], kv_shards=ranks
    )


def _mla_record_bytes(config: Mapping[str, Any], kv_cache_dtype: str, *, sparse: bool) -> int:
    """Count the bytes of one token in one layer's latent cache."""
    latent, rope = _field(config, "kv_lora_rank"), _field(config, "qk_rope_head_dim")
    # "fp8" names different records in different sparse back ends; the packed names do not.
    plain = {name: size for name, size in _ELEMENT_BYTES.items() if size > 1 or not sparse}
    if kv_cache_dtype in plain:
        return (latent + rope) * plain[kv_cache_dtype]
    if kv_cache_dtype not in _PACKED_MLA_BYTES:
        raise _unknown_dtype(config, kv_cache_dtype, {**plain, **_PACKED_MLA_BYTES})
    if (latent, rope) != _PACKED_MLA_ELEMENTS:
        raise ConfigError(
            f"kv_cache_dtype {kv_cache_dtype!r} packs kv_lora_rank 512 and qk_rope_head_dim 64, got {latent} and {rope}"
        )
    return _PACKED_MLA_BYTES[kv_cache_dtype]


def _indexer_record_bytes(config: Mapping[str, Any]) -> int:
    """Count the bytes of one token in one layer's indexer cache."""
    elements = _field(config, "index_head_dim")
    if elements % _INDEXER_SCALE_ELEMENTS:
        raise ConfigError(f"index_head_dim must be a multiple of {_INDEXER_SCALE_ELEMENTS}, got {elements}")
    return elements + elements // _INDEXER_SCALE_ELEMENTS * _INDEXER_SCALE_BYTES


def _indexer_layers(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """List the layers that run an indexer; the others reuse the choice of the last one that did."""
    kinds = config.get("indexer_types")
    pattern = config.get("index_topk_pattern")
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str):
            raise ConfigError(f"index_topk_pattern must be a str of F and S, got {pattern!r}")
        kinds = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) < num_layers:
            shown = f"{len(kinds)}" if isinstance(kinds, list) else repr(kinds)
            raise ConfigError(f"indexer_types must list num_hidden_layers {num_layers} entries, got {shown}")
        other = [kind for kind in kinds if kind not in ("full", "shared")]
        if other:
            raise ConfigError(f"indexer_types must hold 'full' and 'shared', got {other[0]!r}")
        return [layer for layer in range(num_layers) if kinds[layer] == "full"]
    every = _field(config, "index_topk_freq", default=1)
    skip = _field(config, "index_skip_topk_offset", default=2, low=0)
    return [layer for layer in range(num_layers) if max(layer - skip + 1, 0) % every == 0]


def _attention_layer(layer: int, page_bytes: int) -> LayerSpec:
    return LayerSpec(f"model.layers.{layer}.self_attn.attn", page_bytes)


def _indexer_layer(layer: int, page_bytes: int) -> LayerSpec:
    return LayerSpec(f"model.layers.{layer}.self_attn.indexer.k_cache", page_bytes)


def _field(
    config: Mapping[str, Any], name: str, *, default: int | None = None, low: int = 1, high: int = 2**31 - 1
) -> int:
    """Read an int of the config; a field that is missing or null has the default."""
    value = config.get(name)
    if value is None:
        if default is None:
            raise ConfigError(f"model config lacks {name}, which {config.get('model_type')} needs")
        return default
    return checked_int(name, value, low=low, high=high)


def _unknown_dtype(config: Mapping[str, Any], kv_cache_dtype: str, known: Mapping[str, int]) -> ConfigError:
    return ConfigError(
        f"unknown kv_cache_dtype {kv_cache_dtype!r} for {config.get('model_type')}; known: {', '.join(known)}"
    )
