"""Where vLLM's indexer is told of its shards, and whether it can have them: in a worker, before the model is made."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from lockstep_kv.models import SPARSE_MLA_MODEL_TYPES
from lockstep_kv.vllm import plugin, replica_groups
from lockstep_kv.vllm.patches import Patch, apply
from lockstep_kv.vllm.shards import REPLICATE, SHARDS, shards_of_layer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["prepare"]

_logger = logging.getLogger(plugin.LOGGER)


def prepare(vllm_config: VllmConfig) -> None:
    """Make what fewer indexer shards than ranks need in this worker, if the switches ask for them.

    Every worker has to call it, after vLLM has made its groups of ranks. Does nothing for a model without an indexer.
    Raises `ValueError` and `NotImplementedError` for what `shards_of_layer` refuses, and `NotImplementedError` for a
    model, a runner or a platform whose indexer cannot have shards of its own.
    """
    parallel = vllm_config.parallel_config
    text = vllm_config.model_config.hf_text_config
    if not hasattr(text, "index_topk"):
        _logger.warning("%s and %s change nothing: the model has no sparse indexer", REPLICATE, SHARDS)
        return
    shards = shards_of_layer(vllm_config, 0)
    ranks = parallel.decode_context_parallel_size
    if shards == ranks:
        return
    asked = f"{shards} indexer shards on {ranks} ranks"
    if text.model_type not in SPARSE_MLA_MODEL_TYPES:
        raise NotImplementedError(f"{asked} are not there for models of type {text.model_type}")
    if not vllm_config.use_v2_model_runner:
        raise NotImplementedError(f"{asked} need vLLM's V2 model runner: set VLLM_USE_V2_MODEL_RUNNER=1")
    if not current_platform.is_cuda():
        raise NotImplementedError(f"{asked} need the indexer kernels of CUDA, got {current_platform.device_name}")
    if parallel.enable_elastic_ep:
        raise NotImplementedError(f"{asked} are not there with elastic expert parallelism")
    if shards > 1:
        replica_groups.build(parallel.tensor_parallel_size, shards)
    apply(_patches())
    _logger.info("the sparse indexer has %s", asked)


def _patches() -> tuple[Patch, ...]:
    """Every place where vLLM's indexer is told of its shards. What is imported here imports the model."""
    from lockstep_kv.vllm import indexer_cache, indexer_scoring, indexer_writing  # noqa: PLC0415

    scoring = "vllm.model_executor.layers.sparse_attn_indexer"
    layer = "vllm.models.deepseek_v32.attention"
    return (
        Patch(
            "vllm.model_executor.models.deepseek_v2",
            "DeepseekV32IndexerCache",
            "__new__",
            indexer_cache.new_indexer_cache,
            "whoever makes the cache of a layer with fewer shards than ranks gets a LockstepIndexerCache, which is one",
        ),
        Patch(
            layer,
            "DeepseekV32Attention",
            "forward",
            indexer_writing.forward,
            "the fused layer takes the indexer's slots from the tables of its group, not from its metadata",
        ),
        Patch(
            layer,
            "",
            "fused_norm_rope",
            indexer_writing.write_keys_apart,
            "the fused kernel writes no key of a token whose latent vector another rank holds",
        ),
        Patch(
            layer,
            "",
            "sparse_attn_indexer",
            indexer_scoring.score,
            "the fused layer says how many decode ranks there are, not how many shards",
        ),
        Patch(
            scoring,
            "SparseAttnIndexer",
            "__init__",
            indexer_scoring.init_indexer_op,
            "the scoring layer takes its world from the decode ranks, not from its cache",
        ),
        Patch(
            scoring,
            "",
            "_merge_dcp_topk_global",
            indexer_scoring.merge_candidates,
            "candidates are merged among all decode ranks, not among those of a shard group",
        ),
        Patch(
            scoring,
            "",
            "PrefillRowShard",
            indexer_scoring.ReplicaRowShard,
            "rows are split among all tensor-parallel ranks or not at all, not among the copies of a shard",
        ),
        Patch(
            scoring,
            "",
            "_reserve_row_shard_exchange_transient",
            indexer_scoring.reserve_row_exchange,
            "no memory is set aside for split rows where there are several decode ranks",
        ),
        Patch(
            "vllm.v1.attention.backends.mla.indexer",
            "BuildPrefillChunkMetadataKernel",
            "get_warmup_keys",
            indexer_scoring.prefill_warmup_keys,
            "the kernel is compiled before the first batch for the world of the decode ranks only",
        ),
    )
