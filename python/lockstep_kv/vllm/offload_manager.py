"""Which chunks lie in which rows of the host's memory, as vLLM's offloading connector asks: over an `OffloadIndex`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    RequestOffloadingContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from lockstep_kv._core import OffloadIndex

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from typing import Literal

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

__all__ = ["HostRows", "LockstepOffloadingManager"]

_FOUND = {"hit": LookupResult.HIT, "pending": LookupResult.HIT_PENDING, "miss": LookupResult.MISS}


class HostRows(BlockIDsLoadStoreSpec):
    """The rows of the host's memory for the chunks of a job, in order; `block_ids` has their numbers."""


class LockstepOffloadingManager(OffloadingManager):
    """The index of the host's memory. Keys are vLLM's: a chunk's hash and the number of its group."""

    def __init__(self, num_rows: int, policy: Literal["lru", "arc"], *, enable_events: bool) -> None:
        self._num_rows, self._policy = num_rows, policy
        self.index = OffloadIndex(num_rows, policy)
        self._events: list[OffloadingEvent] | None = [] if enable_events else None

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Offload what a request computes, and nothing that it found."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:  # noqa: ARG002
        """Whether a chunk can be loaded; a chunk that is still being stored is pending."""
        return _FOUND[self.index.lookup(key)]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:  # noqa: ARG002
        """The host's memory."""
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> HostRows:  # noqa: ARG002
        """The rows of chunks, which stay until `complete_load`."""
        return HostRows(self.index.prepare_load(list(keys)))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """One load of each chunk has ended."""
        self.index.complete_load(list(keys))

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """Make chunks recent, those of the beginning of a prompt most."""
        self.index.touch(list(keys))

    def prepare_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,  # noqa: ARG002
    ) -> PrepareStoreOutput | None:
        """Rows for the chunks that are not there; None if there is no room even if others go."""
        plan = self.index.prepare_store(list(keys))
        if plan is None:
            return None
        self._tell(plan.evicted, removed=True)
        return PrepareStoreOutput(plan.keys, HostRows(plan.slots), plan.evicted)

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,  # noqa: ARG002
        success: bool = True,
    ) -> None:
        """The stores of chunks have ended: they can be loaded, or are forgotten if that failed."""
        done = list(keys)
        self.index.complete_store(done, success)
        if success:
            self._tell(done, removed=False)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """What was stored and removed since the last call."""
        if self._events:
            told, self._events = self._events, []
            yield from told

    def reset_cache(self) -> None:
        """Forget all chunks.

        vLLM reports nothing of the jobs before a reset, and lets none of them run beside those after it: no row has to
        be kept for them.
        """
        self.index = OffloadIndex(self._num_rows, self._policy)

    def _tell(self, keys: list[bytes], *, removed: bool) -> None:
        if keys and self._events is not None:
            self._events.append(OffloadingEvent(keys, Medium.CPU, removed))
