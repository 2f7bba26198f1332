"""vLLM's `KVCacheManager` on a `Coordinator`: the same constructor and methods, one crossing per operation."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from lockstep_kv._core import Coordinator, PrefixHit
from lockstep_kv.errors import UnknownRequestError
from lockstep_kv.vllm.blocks import BlockView, IdBlocks
from lockstep_kv.vllm.coordinator_view import CoordinatorView, HybridCoordinatorView
from lockstep_kv.vllm.coverage import NotCoveredError, coordinator_config
from lockstep_kv.vllm.events import EventQueue
from lockstep_kv.vllm.pool_view import BlockPoolView

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from lockstep_kv._core import CoordinatorConfig

__all__ = ["LockstepKVCacheManager"]

_KEEPS_ALL = {"full", "mla", "circular_buffer", "cross_attention"}
"""Kinds that give nothing back before their request ends."""
_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class LockstepKVCacheManager(KVCacheManager):
    """Give requests their blocks, find cached prefixes, and say what is evicted.

    Takes what vLLM's `KVCacheManager` takes. Raises `NotCoveredError` where a coordinator would not do the same.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
    ) -> None:
        # The parent's constructor would make vLLM's own coordinator.
        if watermark < 0:
            raise AssertionError("watermark must be non-negative")
        config = coordinator_config(
            kv_cache_config,
            max_model_len=max_model_len,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            num_prefill_lookahead=num_prefill_lookahead,
            max_in_flight_tokens=max_in_flight_tokens,
            enable_kv_cache_events=enable_kv_cache_events,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            enable_mamba_shared_prefix_checkpoint=enable_mamba_shared_prefix_checkpoint,
            metrics_collector=metrics_collector,
        )
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.retained_hit_group_ids: tuple[int, ...] = ()
        self.kv_cache_config = kv_cache_config
        self.num_kv_cache_groups = len(kv_cache_config.kv_cache_groups)
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.kv_cache_event_metadata = tuple(
            (get_kv_cache_spec_kind(group.kv_cache_spec).value, get_kv_cache_spec_sliding_window(group.kv_cache_spec))
            for group in kv_cache_config.kv_cache_groups
        )
        self._core = Coordinator(config)
        self.mamba_shared_prefix_checkpoint = self._core.publishes_shared_prefix
        self._events = EventQueue(self._core, self.kv_cache_event_metadata)
        self._watched = enable_kv_cache_events or metrics_collector is not None
        self.block_pool: Any = BlockPoolView(self._core, self._events, metrics_collector, hash_block_size)
        view = HybridCoordinatorView if enable_caching and self.num_kv_cache_groups > 1 else CoordinatorView
        self.empty_kv_cache_blocks = IdBlocks(tuple([] for _ in range(self.num_kv_cache_groups)), self.block_pool)
        self.coordinator: Any = view(self, self._core, kv_cache_config, scheduler_block_size)
        kinds = {group.kind for group in config.groups}
        self._has_states = "mamba" in kinds
        # Requests that have published states since their steps last came back.
        self._writers: dict[str, Request] = {}
        # Nothing is to be told or reserved: the calls of running requests take the short way.
        self._can_grow = enable_caching and not (self._watched or self._has_states or self.watermark_blocks)
        self._drops_blocks = not kinds <= _KEEPS_ALL

    @classmethod
    def check_covered(cls, *args: Any, **kwargs: Any) -> CoordinatorConfig:
        """Raise `NotCoveredError` with the reason if an engine with these arguments needs vLLM's own manager."""
        try:
            bound = inspect.signature(cls.__init__).bind(None, *args, **kwargs)
        except TypeError as error:
            raise NotCoveredError(
                f"this vLLM gives its KV cache manager arguments that are not known: {error}"
            ) from None
        bound.apply_defaults()
        names = inspect.signature(coordinator_config).parameters
        return coordinator_config(**{name: bound.arguments[name] for name in names})

    # What the scheduler calls for every request and step.

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int, int]:
        """The longest cached prefix: its blocks, its tokens, and where a longer one ends that only some groups have."""
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0, 0
        hit = self._core.find_longest_hit(request.block_hashes, request.num_tokens - 1)
        num_tokens = hit.num_tokens
        uncached = hit.num_uncached_tokens
        boundary = num_tokens + uncached if uncached else 0
        if not num_tokens:
            return self.empty_kv_cache_blocks, 0, boundary
        if self.enable_kv_cache_events and getattr(request, "kv_cache_report_mode", "incremental") == "full":
            spans = [view.block_size for view in self.coordinator.single_type_managers]
            self._events.reused(request, hit, spans, self._core.hash_block_tokens)
        return IdBlocks(hit.block_ids, self.block_pool, hit), num_tokens, boundary

    def get_computed_blocks_for_connector(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        """`get_computed_blocks` for a request of which a connector may have more, and whether states lag behind.

        A connector can bring the state that a hit lacks, so that the hit is as long as that of the attention groups. It
        does not bring what one of those lacks before that: then, unlike in vLLM, all groups are cut to what they share.
        """
        if self._has_states and self.enable_caching and not request.skip_reading_prefix_cache:
            found = self._core.find_hit_per_group(request.block_hashes, request.num_tokens - 1)
            groups = self._core.config.groups
            of_attention = {
                tokens
                for group, spec, (_, tokens) in zip(groups, self.kv_cache_config.kv_cache_groups, found, strict=True)
                if group.kind != "mamba" and spec.kv_cache_spec.prefix_cacheable
            }
            if len(of_attention) > 1:
                return *self.get_computed_blocks(request), False
        result: tuple[KVCacheBlocks, int, int, bool] = super().get_computed_blocks_for_connector(request)
        return result

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Give the request slots for its next tokens and publish those that are final; None if too few are free."""
        if num_new_tokens == 0 and num_external_computed_tokens == 0 and num_new_computed_tokens == 0:
            raise ValueError("num_new_tokens must be greater than 0 when there are no computed tokens to adopt")
        limit = self.max_model_len
        computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        computed = computed if computed < limit else limit
        num_tokens = computed + num_new_tokens
        with_lookahead = num_tokens + num_lookahead_tokens
        slots = with_lookahead if with_lookahead < limit else limit
        request_tokens = request.num_tokens
        cached = num_tokens if num_tokens < request_tokens else request_tokens
        if (
            self._can_grow
            and new_computed_blocks is None
            and not (num_external_computed_tokens or full_sequence_must_fit or reserved_blocks or delay_cache_blocks)
            and not num_encoder_tokens
        ):
            new = self._core.grow(
                request.request_id,
                slots,
                max(0, computed - request.num_in_flight_tokens) if self._drops_blocks else 0,
                request.block_hashes,
                cached,
                request.num_prompt_tokens,
                request.shared_prefix_boundary,
            )
            if not new:
                return None if new is None else self.empty_kv_cache_blocks
            return IdBlocks(new, self.block_pool)
        options: dict[str, Any] = {}
        if full_sequence_must_fit or reserved_blocks or self.watermark_blocks:
            watermark = self.watermark_blocks if has_scheduled_reqs and request.status in _WAITING else 0
            options["reserved_blocks"] = reserved_blocks
            options["watermark_blocks"] = watermark
            options["whole_tokens"] = min(request_tokens, limit) if full_sequence_must_fit else 0
        if self._drops_blocks:
            options["processed_tokens"] = max(0, computed - request.num_in_flight_tokens)
        if self._has_states:
            self._writers[request.request_id] = request
            options["main_tokens"] = num_tokens if num_tokens < limit else limit
            options["computed_tokens"] = request.num_computed_tokens
            # Where the scheduler sees the prefill end: a resumed request computes its output tokens anew.
            options["prefill_end"] = max(request.num_prompt_tokens, request_tokens - 1)
        if self.enable_caching and not delay_cache_blocks:
            options["block_hashes"] = request.block_hashes
            options["cache_tokens"] = cached
            options["shared_prefix_boundary"] = request.shared_prefix_boundary
        hit = self._hit(new_computed_blocks, num_new_computed_tokens)
        new = self._core.allocate_slots(
            request.request_id,
            slots,
            hit=hit,
            num_external_tokens=num_external_computed_tokens,
            num_encoder_tokens=num_encoder_tokens,
            num_prompt_tokens=request.num_prompt_tokens,
            uncleared_groups=skip_zeroing_group_ids,
            **options,
        )
        if new is None:
            return None
        if self._watched:
            self._events.collect(request)
            self.block_pool.tell_uses()
        return IdBlocks(new, self.block_pool) if new else self.empty_kv_cache_blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the full blocks of the request's first tokens."""
        if self.enable_caching:
            self._core.cache(
                request.request_id,
                request.block_hashes,
                num_computed_tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                shared_prefix_boundary=request.shared_prefix_boundary,
                computed_tokens=request.num_computed_tokens,
            )
            if self._watched:
                self._events.collect(request)
                self.block_pool.tell_uses()

    def free(self, request: Request) -> None:
        """End a request. One that holds nothing, as it was aborted before it got blocks, is no error."""
        self._give_up(request)
        self.free_by_id(request.request_id)

    def _give_up(self, request: Request) -> None:
        """Forget the states of a step that is in flight: whether it writes them is not known any more."""
        if self._has_states and request.num_in_flight_tokens:
            self._core.forget_unwritten(request.request_id, _processed(request))

    def free_by_id(self, request_id: str) -> None:
        """End a request."""
        try:
            self._core.free(request_id)
        except UnknownRequestError:
            return

    def pop_blocks_for_free(self, request: Request) -> list[Any]:
        """End a request and keep its blocks held until `block_pool.free_blocks` gives them back."""
        self._give_up(request)
        return self.pop_blocks_by_id(request.request_id)

    def pop_blocks_by_id(self, request_id: str) -> list[BlockView]:
        """End a request and keep its blocks held.

        vLLM gives them back last to first: the last group stands first, so that this is the order of `free`.
        """
        try:
            rows = self._core.block_ids(request_id)
            self._core.detach(request_id)
        except UnknownRequestError:
            return []
        blocks = self.block_pool.blocks
        return [blocks[block_id] for row in reversed(rows) for block_id in row]

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give back the blocks that windows, chunks and states do not need any more."""
        if self._drops_blocks:
            try:
                self._core.release_skipped(request_id, processed_computed_tokens, num_prompt_tokens=num_prompt_tokens)
            except UnknownRequestError:
                return

    def new_step_starts(self) -> None:
        """Tell that a step begins: states of earlier ones can be hit now, unless their steps are in flight."""
        if self._has_states:
            self._writers = {name: request for name, request in self._writers.items() if request.num_in_flight_tokens}
            self._core.new_step({name: _processed(request) for name, request in self._writers.items()})

    # Reading.

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's blocks."""
        try:
            ids = self._core.block_ids(request_id)
        except UnknownRequestError:
            return self.empty_kv_cache_blocks
        return IdBlocks(ids, self.block_pool)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The ids of the request's blocks, one list per group."""
        try:
            return self._core.block_ids(request_id)
        except UnknownRequestError:
            return tuple([] for _ in range(self.num_kv_cache_groups))

    def estimate_cached_tokens(self, request: Request) -> int:
        """How many leading tokens of the request can be found again."""
        try:
            return self._core.findable_tokens(request.request_id)
        except UnknownRequestError:
            return 0

    def create_kv_cache_blocks(self, blocks: tuple[Any, ...]) -> KVCacheBlocks:
        """The result that carries these blocks."""
        if not any(blocks):
            return self.empty_kv_cache_blocks
        return IdBlocks(tuple([block.block_id for block in row] for row in blocks), self.block_pool)

    def truncate_computed_blocks(self, blocks: KVCacheBlocks, num_computed_tokens: int) -> KVCacheBlocks:
        """The part of a lookup's result that covers the first tokens, an exact number of blocks in each group."""
        rows: list[list[int]] = []
        views = self.coordinator.single_type_managers
        for row, view, group in zip(blocks.get_block_ids(), views, self.kv_cache_config.kv_cache_groups, strict=True):
            if not group.kv_cache_spec.prefix_cacheable:
                rows.append([])
                continue
            count, rest = divmod(num_computed_tokens, view.block_size)
            # An external tier can have the state that a hit lacks.
            may_be_short = self._core.config.groups[view.kv_cache_group_id].kind == "mamba"
            if rest or (count > len(row) and not may_be_short):
                raise AssertionError(f"{num_computed_tokens} tokens are no whole blocks of a hit of {len(row)} blocks")
            rows.append(row[:count])
        return IdBlocks(tuple(rows), self.block_pool) if any(rows) else self.empty_kv_cache_blocks

    # Side channels.

    def take_events(self) -> list[KVCacheEvent]:
        """Hand out the events since the last call."""
        return self._events.take()

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Forget the hashes of these blocks."""
        self.block_pool.evict_blocks(block_ids)

    def take_new_block_ids(self) -> list[int]:
        """Hand out the blocks to zero that were taken since the last call."""
        return self._core.take_new_blocks()

    def record_blocks_for_zeroing(self, request_id: str, start_token: int) -> None:
        """Hand the request's blocks from this token on out to be zeroed, as a load has left them unwritten."""
        self._core.note_unwritten(request_id, start_token)

    def take_kv_cache_block_copies(self) -> tuple[list[KVCacheBlockCopy], list[Any]]:
        """Hand out the copies that the step must make, and the blocks that are held for them."""
        copies = self._core.take_block_copies()
        held = [self.block_pool.blocks[block_id] for _, *pair in copies for block_id in pair]
        return [KVCacheBlockCopy(src_block_id=source, dst_block_id=copy) for _, source, copy in copies], held

    def take_boundary_state_offloads(self) -> dict[str, list[tuple[int, int, int]]]:
        """Hand out the states that can be stored elsewhere: per request (group, block, tokens before it)."""
        offloads: dict[str, list[tuple[int, int, int]]] = {}
        for request_id, group, block_id, tokens in self._core.take_state_offers() if self._has_states else ():
            offloads.setdefault(request_id, []).append((group, block_id, tokens))
        return offloads

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """Take from a request that ends the states inside a block that are still as its prompt left them."""
        offers = self._core.take_final_states(
            request.request_id, request.num_computed_tokens, is_in_flight=request.num_in_flight_tokens != 0
        )
        return [(group, block_id, tokens) for _, group, block_id, tokens in offers]

    def _hit(self, blocks: KVCacheBlocks | None, num_tokens: int) -> PrefixHit | None:
        """The hit that a lookup's result carries, or one on the blocks that somebody put together."""
        if blocks is None or blocks is self.empty_kv_cache_blocks:
            return None
        hit = blocks.hit if isinstance(blocks, IdBlocks) else None
        if hit is None or hit.num_tokens != num_tokens:
            ids = blocks.get_block_ids()
            hit = self._core.hit_of(ids, num_tokens) if any(ids) else None
        return hit


def _processed(request: Request) -> int:
    """The tokens of a request whose steps have come back."""
    processed: int = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, processed)
