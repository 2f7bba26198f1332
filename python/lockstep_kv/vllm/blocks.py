"""Blocks as vLLM's callers see them: ids first, objects only for those who ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId

    from lockstep_kv._core import Coordinator, PrefixHit
    from lockstep_kv.vllm.pool_view import BlockPoolView

__all__ = ["BlockView", "IdBlocks"]


class BlockView:
    """One block, read from the coordinator whenever it is looked at. Has the attributes of vLLM's `KVCacheBlock`."""

    __slots__ = ("_coordinator", "block_id", "pool")

    def __init__(self, pool: BlockPoolView, coordinator: Coordinator, block_id: int) -> None:
        self.pool = pool
        self._coordinator = coordinator
        self.block_id = block_id

    @property
    def ref_cnt(self) -> int:
        """References: one per request and lockstep set that uses the block, and one per pin."""
        return self._coordinator.ref_count(self.block_id)

    @property
    def is_null(self) -> bool:
        """Whether this is the block that stands where nothing is kept."""
        return self.block_id == 0

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """The first hash that the block can be found by, with its group; None if there is none."""
        hashes = self.all_hashes
        return hashes[0] if hashes else None

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Leading tokens of a request up to the end of what `block_hash` stands for; None if there is none."""
        return self._coordinator.key_tokens(self.block_id) or None

    @property
    def all_hashes(self) -> list[BlockHashWithGroupId]:
        """All hashes that the block can be found by, in the order of publication."""
        hashes: list[tuple[Any, int]] = list(self._coordinator.hashes_of(self.block_id))
        return [make_block_hash_with_group_id(block_hash, group) for block_hash, group in hashes]

    def __repr__(self) -> str:
        return f"BlockView(block_id={self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r})"


class IdBlocks(KVCacheBlocks):
    """A `KVCacheBlocks` that carries ids, one list per group, and makes block objects only when `blocks` is read."""

    __slots__ = ("_pool", "hit", "ids")

    def __init__(self, ids: tuple[list[int], ...], pool: BlockPoolView, hit: PrefixHit | None = None) -> None:
        self.ids = ids
        self.hit = hit
        self._pool = pool

    @property
    def blocks(self) -> tuple[Sequence[Any], ...]:
        """The block objects, one list per group."""
        blocks = self._pool.blocks
        return tuple([blocks[block_id] for block_id in row] for row in self.ids)

    def get_block_ids(
        self,
        allow_none: bool = False,
        *,
        group_ids: Sequence[int] | None = None,
    ) -> tuple[list[int], ...] | None:
        """The ids of the groups; None if that is allowed and there are none."""
        rows = self.ids if group_ids is None else tuple(self.ids[group] for group in group_ids)
        if allow_none and not any(rows):
            return None
        return tuple(map(list, rows))

    def get_unhashed_block_ids(self) -> list[int]:
        """The ids of the only group's blocks that cannot be found by a hash."""
        if len(self.ids) != 1:
            raise AssertionError("Only one group is supported")
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Per group the ids of real blocks that cannot be found by a hash."""
        return [
            [block.block_id for block in row if block.block_hash is None and not block.is_null] for row in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, of as many groups."""
        return KVCacheBlocks(tuple(() for _ in self.ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        rows = other.get_block_ids()
        return IdBlocks(tuple([*row, *more] for row, more in zip(self.ids, rows, strict=True)), self._pool)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVCacheBlocks) and self.get_block_ids() == other.get_block_ids()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"IdBlocks({self.ids})"
