"""Replays a trace through a coordinator, to see what a load would hit, evict and have to wait for."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from lockstep_kv.arguments import checked_int
from lockstep_kv.errors import ConfigError
from lockstep_kv.trace import TRACE_BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep_kv._core import Coordinator, PrefixHit
    from lockstep_kv.trace import TraceRequest

__all__ = ["Observer", "ReplayReport", "longest_request", "replay"]


P = ParamSpec("P")
R = TypeVar("R")


class Observer(Protocol):
    """Sees what happens to a request's blocks. Block ids come as one list per group."""

    def hit(self, request: TraceRequest, hit: PrefixHit) -> None:
        """A prefix was found; nothing has been allocated for the request yet."""

    def allocated(self, request: TraceRequest, block_ids: tuple[list[int], ...], num_hit_tokens: int) -> None:
        """The request has all its blocks, those of the hit first; nothing has been published yet."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """What a replay came to. Shares are between 0 and 1."""

    requests: int
    rejected: int
    """Requests that do not fit even in an empty pool."""
    refusals: int
    """Allocations that had to wait for an older request to finish."""
    input_tokens: int
    hit_tokens: int
    allocated_blocks: int
    """Block ids handed out, hits left out."""
    evicted_blocks: int
    peak_held_blocks: int
    num_blocks: int
    seconds: float
    """Time spent in the coordinator's calls."""

    @property
    def hit_rate(self) -> float:
        """Hit tokens per input token."""
        return self.hit_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def peak_usage(self) -> float:
        """Most blocks held at once, as a share of the usable ones."""
        return self.peak_held_blocks / max(1, self.num_blocks - 1)

    @property
    def blocks_per_second(self) -> float:
        """Blocks handed out per second of the coordinator's time."""
        return self.allocated_blocks / self.seconds if self.seconds else 0.0


def longest_request(requests: Sequence[TraceRequest]) -> int:
    """The longest request of a trace, in tokens; 0 if there are none."""
    return max((request.input_length + request.output_length for request in requests), default=0)


def replay(
    requests: Sequence[TraceRequest],
    coordinator: Coordinator,
    *,
    concurrency: int = 1,
    observer: Observer | None = None,
    advance: Callable[[int], None] | None = None,
) -> ReplayReport:
    """Run all requests in order and report.

    Each request looks up at most its input less one token, is given slots for input and output, publishes the full
    blocks of its input, and finishes when `concurrency` younger ones hold their blocks or when a younger one does not
    fit. `advance` is called with the number of requests done since the last call.

    Raises `ConfigError` if the coordinator's block hashes neither divide nor are multiples of 512 tokens.
    """
    concurrency = checked_int("concurrency", concurrency, low=1)
    hash_tokens = coordinator.hash_block_tokens
    if hash_tokens % TRACE_BLOCK_TOKENS and TRACE_BLOCK_TOKENS % hash_tokens:
        raise ConfigError(
            f"hash_block_tokens must divide {TRACE_BLOCK_TOKENS} or be a multiple of it to replay a trace, "
            f"got {hash_tokens}"
        )
    before = coordinator.stats()
    run = _Run(coordinator, observer)
    for number, request in enumerate(requests):
        if len(run.running) == concurrency:
            run.finish_oldest()
        run.start(str(number), request)
        if advance is not None:
            advance(1)
    while run.running:
        run.finish_oldest()
    after = coordinator.stats()
    return ReplayReport(
        requests=len(requests),
        rejected=run.rejected,
        refusals=after["refusals"] - before["refusals"] - run.rejected,
        input_tokens=sum(request.input_length for request in requests),
        hit_tokens=run.hit_tokens,
        allocated_blocks=after["taken_blocks"] - before["taken_blocks"],
        evicted_blocks=after["evicted_blocks"] - before["evicted_blocks"],
        peak_held_blocks=after["peak_held_blocks"],
        num_blocks=coordinator.num_blocks,
        seconds=run.seconds,
    )


class _Run:
    """The requests that hold their blocks, and what came of the others so far."""

    def __init__(self, coordinator: Coordinator, observer: Observer | None) -> None:
        self.coordinator = coordinator
        self.observer = observer
        self.running: deque[str] = deque()
        self.rejected = 0
        self.hit_tokens = 0
        self.seconds = 0.0

    def start(self, name: str, request: TraceRequest) -> None:
        """Give a request its blocks, as soon as enough older ones have finished."""
        hashes = _block_hashes(request, self.coordinator.hash_block_tokens)
        while not (allocated := self._try_to_start(name, request, hashes)) and self.running:
            self.finish_oldest()
        if not allocated:
            self.rejected += 1

    def finish_oldest(self) -> None:
        """Free the request that has held its blocks the longest."""
        self._timed(self.coordinator.free, self.running.popleft())

    def _try_to_start(self, name: str, request: TraceRequest, hashes: list[bytes]) -> bool:
        """Look up, allocate and publish; false if too few blocks are free."""
        coordinator = self.coordinator
        hit = self._timed(coordinator.find_longest_hit, hashes, request.input_length - 1)
        if self.observer is not None and hit.num_tokens:
            self.observer.hit(request, hit)
        num_tokens = request.input_length + request.output_length
        if self._timed(coordinator.allocate, name, num_tokens, hit=hit) is None:
            return False
        self.running.append(name)
        # A request that waited looked its prefix up more than once, so the coordinator's own count is higher.
        self.hit_tokens += hit.num_tokens
        if self.observer is not None:
            self.observer.allocated(request, coordinator.block_ids(name), hit.num_tokens)
        self._timed(coordinator.cache, name, hashes, request.input_length)
        return True

    def _timed(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call, and add the time it took."""
        start = time.perf_counter()
        result = call(*args, **kwargs)
        self.seconds += time.perf_counter() - start
        return result


def _block_hashes(request: TraceRequest, hash_tokens: int) -> list[bytes]:
    """The hashes of a request's full blocks of `hash_tokens` tokens: equal ids give equal hashes, and only they."""
    count = request.input_length // hash_tokens
    if hash_tokens >= TRACE_BLOCK_TOKENS:
        # A hash names the whole prefix that ends with its block, as a hash id does.
        ids_per_hash = hash_tokens // TRACE_BLOCK_TOKENS
        return [request.hash_ids[(at + 1) * ids_per_hash - 1].to_bytes(32, "big") for at in range(count)]
    per_id = TRACE_BLOCK_TOKENS // hash_tokens
    return [
        request.hash_ids[at // per_id].to_bytes(16, "big") + (at % per_id).to_bytes(16, "big") for at in range(count)
    ]
