"""vLLM's native offload on our index, host pool and copies: what vLLM makes in its scheduler and in each worker."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingSpec

from lockstep_kv.errors import ConfigError
from lockstep_kv.offload import CpuCopyEngine, GpuCopyEngine, HostPool, RowFormat
from lockstep_kv.offload.host_pool import ROW_ALIGNMENT, round_up
from lockstep_kv.vllm import plugin
from lockstep_kv.vllm.offload_manager import LockstepOffloadingManager
from lockstep_kv.vllm.offload_worker import LockstepOffloadingWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCaches
    from vllm.v1.kv_offload.config import OffloadingConfig

_logger = logging.getLogger(plugin.LOGGER)

__all__ = ["LockstepOffloadingSpec"]

_NOT_THERE = ("store_threshold", "cache_policy_module_path", "canonical_layout")
"""Options of vLLM's own offload."""


class LockstepOffloadingSpec(OffloadingSpec):
    """Offload to the memory of the host, of GPUs and of engines on the CPU.

    What `kv_connector_extra_config` may hold: `cpu_bytes_to_use`, bytes of host memory for all workers together;
    `eviction_policy`, "lru" or "arc"; `blocks_per_chunk` or `block_size`; `offload_prompt_only`. A lockstep set is one
    group of vLLM's, so that one key and one row of memory hold a chunk of all its caches.

    Raises `ConfigError` naming the value if the memory does not hold one row, or for options of vLLM's own that are not
    there: `store_threshold`, `cache_policy_module_path`, `canonical_layout`.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        reason = self.not_covered(self.extra_config)
        if reason is not None:
            raise ConfigError(reason)
        self.row_bytes = round_up(max(config.worker_kv_bytes_per_block, 1) * self.blocks_per_chunk, ROW_ALIGNMENT)
        total = int(self.extra_config.get("cpu_bytes_to_use") or 0)
        self.worker_bytes = total // config.parallel.world_size
        self.num_rows = self.worker_bytes // self.row_bytes
        if self.num_rows < 1:
            raise ConfigError(
                f"cpu_bytes_to_use must hold a row of {self.row_bytes} bytes for each of {config.parallel.world_size} "
                f"workers, got {total}"
            )
        _logger.info("lockstep-kv offloads to %d rows of %d bytes on each worker", self.num_rows, self.row_bytes)
        self._manager: LockstepOffloadingManager | None = None
        self._worker: LockstepOffloadingWorker | None = None

    @staticmethod
    def not_covered(extra_config: Mapping[str, Any]) -> str | None:
        """Say why vLLM's own offload has to run with these options, or on this machine; None if it has not."""
        for name in _NOT_THERE:
            if extra_config.get(name):
                return f"{name} is not there for this offload, got {extra_config[name]!r}"
        if not (current_platform.is_cuda() or current_platform.is_cpu()):
            return f"this offload is for CUDA and the CPU, not for {current_platform.device_name}"
        if current_platform.is_cuda() and find_spec("cupy") is None:
            return "this offload needs CuPy on a GPU: install lockstep-kv[cuda12] or lockstep-kv[cuda13]"
        return None

    def get_manager(self) -> LockstepOffloadingManager:
        """The index, on the scheduler's side."""
        if self._manager is None:
            policy: Any = self.extra_config.get("eviction_policy", "lru")
            self._manager = LockstepOffloadingManager(
                self.num_rows, policy, enable_events=self.kv_events_config.enable_kv_cache_events
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> LockstepOffloadingWorker:
        """The copies of one worker, between its cache and its part of the host's memory."""
        if self._worker is None:
            sets = [
                [_pages(kv_caches.tensors[ref.tensor_idx].tensor) for ref in refs] for refs in kv_caches.group_data_refs
            ]
            row_format = RowFormat(sets, blocks_per_row=self.blocks_per_chunk)
            on_gpu = row_format.device.type == "cuda"
            pool = HostPool(self.num_rows * self.row_bytes, self.row_bytes, pinned=on_gpu)
            engine = GpuCopyEngine(row_format, pool) if on_gpu else CpuCopyEngine(row_format, pool)
            self._worker = LockstepOffloadingWorker(engine, pool, self.blocks_per_chunk)
        return self._worker


def _pages(tensor: torch.Tensor) -> torch.Tensor:
    """A layer's pages, (num_blocks, page) bytes."""
    return tensor if tensor.ndim == 2 else tensor.flatten(1)  # noqa: PLR2004
