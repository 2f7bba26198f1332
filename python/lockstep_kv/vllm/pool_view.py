"""vLLM's block pool for code that reaches past the manager: reads and acts on the coordinator, holds no second copy.

References that such code takes are pins: `touch` and `get_new_blocks` pin, `free_blocks` unpins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lockstep_kv.vllm.blocks import BlockView

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId

    from lockstep_kv._core import Coordinator
    from lockstep_kv.vllm.events import EventQueue

__all__ = ["BlockPoolView"]


class _Blocks(Sequence[BlockView]):
    """All blocks by id. Objects are made when they are asked for, and then kept, so that a block is one object."""

    def __init__(self, pool: BlockPoolView, coordinator: Coordinator) -> None:
        self._pool = pool
        self._coordinator = coordinator
        self._made: dict[int, BlockView] = {}

    def __len__(self) -> int:
        return self._coordinator.num_blocks

    def __getitem__(self, block_id: Any) -> Any:
        if isinstance(block_id, slice):
            return [self[at] for at in range(*block_id.indices(len(self)))]
        block = self._made.get(block_id)
        if block is None:
            if not -len(self) <= block_id < len(self):
                raise IndexError(f"block {block_id} does not exist: the pool has {len(self)} blocks")
            at = block_id % len(self)
            block = self._made.setdefault(at, BlockView(self._pool, self._coordinator, at))
        return block


class _FreeBlockQueue:
    """The free blocks in the order in which they will be taken."""

    def __init__(self, blocks: _Blocks, coordinator: Coordinator) -> None:
        self._blocks = blocks
        self._coordinator = coordinator

    @property
    def num_free_blocks(self) -> int:
        return self._coordinator.num_free_blocks

    def get_all_free_blocks(self) -> list[BlockView]:
        return [self._blocks[block_id] for block_id in self._coordinator.free_order()]

    def iter_blocks_after(self, cursor: BlockView | None) -> Iterator[BlockView]:
        """The free blocks behind the cursor, which is free itself; all if there is none."""
        order = self._coordinator.free_order()
        first = 0 if cursor is None else order.index(cursor.block_id) + 1
        return (self._blocks[block_id] for block_id in order[first:])


class _CachedBlocks:
    """Blocks by hash and group."""

    def __init__(self, blocks: _Blocks, coordinator: Coordinator) -> None:
        self._blocks = blocks
        self._coordinator = coordinator

    def get_one_block(self, key: BlockHashWithGroupId) -> BlockView | None:
        """The first block published under this hash in this group."""
        block_id = self._coordinator.lookup_in_group(key[:-4], int.from_bytes(key[-4:], "big"))
        return None if block_id is None else self._blocks[block_id]

    def contain(self, key: BlockHashWithGroupId, block_id: int) -> bool:
        """Whether this block can be found by this hash."""
        return key in self._blocks[block_id].all_hashes

    def __len__(self) -> int:
        return self._coordinator.stats()["keys"]


class _SecondaryHashes:
    """Per block the hashes beside its first one."""

    def __init__(self, blocks: _Blocks) -> None:
        self._blocks = blocks

    def get(self, block_id: int, default: Any = None) -> Any:
        hashes = self._blocks[block_id].all_hashes[1:]
        return set(hashes) if hashes else default


class BlockPoolView:
    """Has the attributes and methods of vLLM's `BlockPool` that other parts of vLLM use."""

    medium = "GPU"

    def __init__(
        self,
        coordinator: Coordinator,
        events: EventQueue,
        metrics_collector: KVCacheMetricsCollector | None,
        hash_block_size: int,
    ) -> None:
        self._coordinator = coordinator
        self._events = events
        self.metrics_collector = metrics_collector
        self.num_gpu_blocks = coordinator.num_blocks
        self.enable_caching = coordinator.config.enable_caching
        self.enable_kv_cache_events = coordinator.config.enable_events
        self.hash_block_size = hash_block_size
        self.blocks = _Blocks(self, coordinator)
        self.null_block: BlockView = self.blocks[0]
        self.free_block_queue = _FreeBlockQueue(self.blocks, coordinator)
        self.cached_block_hash_to_block = _CachedBlocks(self.blocks, coordinator)
        self.cached_block_hashes_by_block = _SecondaryHashes(self.blocks)

    @property
    def kv_event_queue(self) -> list[KVCacheEvent]:
        """The events that have not been taken yet."""
        return self._events.pending()

    def get_num_free_blocks(self) -> int:
        """Blocks that can be taken."""
        return self._coordinator.num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks in use."""
        return self._coordinator.usage

    def get_cached_block(self, block_hash: BlockHash, kv_cache_group_ids: list[int]) -> list[BlockView] | None:
        """The block of each of these groups under this hash; None if one of them has none."""
        found = [self._coordinator.lookup_in_group(block_hash, group) for group in kv_cache_group_ids]
        return None if None in found else [self.blocks[block_id] for block_id in found]

    def get_new_blocks(self, num_blocks: int) -> list[BlockView]:
        """Take blocks; the caller gives them back with `free_blocks`. Raises `ValueError` if fewer are free."""
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        taken = self._coordinator.take_pinned(num_blocks)
        self.tell_uses()
        return [self.blocks[block_id] for block_id in taken]

    def touch(self, blocks: Sequence[BlockView]) -> None:
        """Hold these blocks; the caller gives them back with `free_blocks`."""
        ids = [block.block_id for block in blocks if not block.is_null]
        self._coordinator.pin(ids)
        self.tell_uses()

    def free_blocks(self, ordered_blocks: Iterable[BlockView]) -> None:
        """Give back what `touch`, `get_new_blocks` or `pop_blocks_for_free` held; the first is evicted first."""
        self._coordinator.unpin([block.block_id for block in ordered_blocks if not block.is_null])

    def is_block_writable(self, block: BlockView) -> bool:
        """Whether the only holder of a block may change it."""
        return not block.is_null and block.ref_cnt == 1 and block.block_hash is None

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the hashes of these blocks."""
        self._coordinator.evict(list(block_ids))
        self._events.collect()
        self.tell_uses()

    def reset_prefix_cache(self) -> bool:
        """Forget all hashes, if no block is held."""
        if not self._coordinator.reset_prefix_cache():
            return False
        self._events.collect()
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """Hand out the events since the last call."""
        return self._events.take()

    def tell_uses(self) -> None:
        """Tell the metrics collector, if there is one, how blocks were used since the last call."""
        collector = self.metrics_collector
        if collector is None:
            return
        for use, block_id in self._coordinator.take_uses():
            block = self.blocks[block_id]
            if use == "used":
                collector.on_block_accessed(block)
                continue
            if use == "dropped" or self.enable_caching:
                collector.on_block_evicted(block)
            if use == "taken":
                collector.on_block_allocated(block)

    def __iter__(self) -> Iterator[BlockView]:
        return iter(self.blocks)
