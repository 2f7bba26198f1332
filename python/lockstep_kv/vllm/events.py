"""KV cache events as vLLM publishes them, with the tokens and keys of the requests they are about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

import lockstep_kv

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

    from lockstep_kv._core import Coordinator, PrefixHit

__all__ = ["EventQueue"]


class EventQueue:
    """The coordinator's events, translated while the request that caused them is at hand."""

    def __init__(self, coordinator: Coordinator, kinds: tuple[tuple[str, int | None], ...]) -> None:
        """Make a queue. kinds: per group what vLLM calls its spec, and its sliding window."""
        self.enabled = coordinator.config.enable_events
        self._coordinator = coordinator
        self._kinds = kinds
        self._queue: list[KVCacheEvent] = []

    def collect(self, request: Request | None = None) -> None:
        """Translate what has happened since the last call. request: the one whose blocks were published, if any."""
        if not self.enabled:
            return
        for event in self._coordinator.take_events():
            match event:
                case lockstep_kv.BlockStored():
                    assert request is not None  # noqa: S101 - only publishing stores
                    self._stored(
                        request,
                        event.group_id,
                        event.block_hashes,
                        event.block_starts,
                        event.parent_block_hash,
                        range(event.start_token, event.end_token),
                        event.block_tokens,
                    )
                case lockstep_kv.BlockRemoved():
                    block_hash: Any = event.block_hash
                    hashes = [maybe_convert_block_hash(block_hash)]
                    self._queue.append(BlockRemoved(hashes, medium=MEDIUM_GPU, group_idx=event.group_id))
                case _:
                    self._queue.append(AllBlocksCleared())

    def reused(self, request: Request, hit: PrefixHit, spans: list[int], hash_tokens: int) -> None:
        """Report a prefix hit as if it had been stored, for requests that ask for the full report."""
        num_tokens = hit.num_tokens
        for group, (span, blocks) in enumerate(zip(spans, hit.block_ids, strict=True)):
            if not blocks:
                continue
            per_block = span // hash_tokens
            hashes: list[Any] = list(request.block_hashes[per_block - 1 : num_tokens // hash_tokens : per_block])
            if hashes:
                end = len(hashes) * span
                self._stored(request, group, hashes, list(range(0, end, span)), None, range(end), span)

    def pending(self) -> list[KVCacheEvent]:
        """What has not been taken yet."""
        return self._queue

    def take(self) -> list[KVCacheEvent]:
        """Hand out and forget the events."""
        self.collect()
        taken, self._queue = self._queue, []
        return taken

    def _stored(
        self,
        request: Request,
        group: int,
        hashes: list[Any],
        starts: list[int],
        parent: Any,
        tokens: range,
        block_tokens: int,
    ) -> None:
        lora = request.lora_request
        kind, sliding_window = self._kinds[group]
        self._queue.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(block_hash) for block_hash in hashes],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=request.all_token_ids[tokens.start : tokens.stop],
                block_size=block_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_GPU,
                lora_name=lora.name if lora else None,
                extra_keys=to_event_extra_keys(_extra_keys(request, starts, block_tokens)),
                group_idx=group,
                session_id=request.session_id,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=sliding_window,
            )
        )


def _extra_keys(request: Request, starts: list[int], block_tokens: int) -> list[tuple[Any, ...] | None]:
    """What entered the hashes of these blocks beside their tokens."""
    keys = []
    at = 0
    for start in starts:
        key, at = generate_block_hash_extra_keys(request, start, start + block_tokens, at)
        keys.append(key)
    return keys
