"""The scheduler of the test: continuous batching over one `Coordinator`, with chunks, prefix hits and preemption."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from sparse_mla_model import SHAPE

from lockstep_kv import Coordinator, hash_blocks, none_hash

if TYPE_CHECKING:
    from lockstep_kv import CoordinatorConfig

__all__ = ["Admission", "Job", "Plan", "Scheduler", "Work", "jobs"]

_NONE_HASH = none_hash("sha256")


@dataclass(frozen=True)
class Job:
    """A request: `prompt`, behind all tokens of the request `after` once that has ended, and `new_tokens` to make."""

    name: str
    prompt: tuple[int, ...]
    new_tokens: int
    after: str | None = None


def jobs() -> list[Job]:
    """The load: a shared prefix, prompts of many chunks and of one, turns of conversations; too much for the pool."""
    rng = random.Random(9)

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(SHAPE.vocab), k=count))

    shared = some(32)
    return [
        Job("a", shared + some(9), 14),
        Job("b", shared + some(21), 20),
        Job("c", some(58), 24),
        Job("d", some(7), 10),
        Job("e", some(5), 12, after="a"),
        Job("f", some(17), 8, after="b"),
        Job("g", some(3), 9, after="c"),
        Job("h", shared[:16], 6),
        Job("i", shared + some(2), 5),
    ]


@dataclass(frozen=True)
class Work:
    """What one step computes of one request.

    tokens: the tokens at positions start, start + 1, ... rows: the block ids of the request, one row per group.
    samples: the last of the tokens is the newest, and its logits give the next one. ends: that one is the last.
    """

    name: str
    start: int
    tokens: tuple[int, ...]
    rows: tuple[list[int], ...]
    samples: bool
    ends: bool

    @property
    def positions(self) -> torch.Tensor:
        return torch.arange(self.start, self.start + len(self.tokens))


@dataclass(frozen=True)
class Plan:
    """One step. new_blocks: the ids that were handed out for it, whose old content is gone."""

    works: list[Work]
    new_blocks: list[int]


@dataclass(frozen=True)
class Admission:
    """A request was taken in. evicted: the blocks that the pool had evicted by then."""

    name: str
    hit_tokens: int
    resumed: bool
    evicted: int


@dataclass
class _Live:
    name: str
    tokens: list[int]
    end: int
    computed: int = 0
    resumed: bool = False


@dataclass
class Scheduler:
    """Decides for all ranks. `plan` and `update` take turns; both audit the coordinator."""

    config: CoordinatorConfig
    budget: int = 24
    max_running: int = 4
    admissions: list[Admission] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: dict[str, tuple[int, ...]] = field(default_factory=dict)
    trace: list[Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(self.config)
        self.follow_ups = [job for job in jobs() if job.after is not None]
        self.waiting = [self._start(job, ()) for job in jobs() if job.after is None]
        self.running: list[_Live] = []
        self.new_blocks: list[int] = []

    def plan(self) -> Plan | None:
        """Decide a step, or None if all requests have ended."""
        if not self.running and not self.waiting:
            assert not self.follow_ups
            return None
        self.new_blocks = []
        works: list[Work] = []
        budget, preempted = self.budget, len(self.preempted)
        # Those in front take blocks from those behind, so that the list shrinks only behind the one that is served.
        for live in list(self.running):
            count = min(len(live.tokens) - live.computed, budget)
            if live in self.running and count and self._grow(live, count):
                works.append(self._work(live, count))
                budget -= count
        while self.waiting and budget and len(self.running) < self.max_running and len(self.preempted) == preempted:
            count = self._admit(self.waiting[0], budget)
            if not count:
                break
            self.running.append(self.waiting.pop(0))
            works.append(self._work(self.running[-1], count))
            budget -= count
        self.coordinator.audit()
        assert works, "a request that is alone fits"
        self.trace.append(Plan(works, self.new_blocks))
        return self.trace[-1]

    def update(self, sampled: dict[str, int]) -> None:
        """Take note that the step was computed, and of the tokens that it gave."""
        for work in self.trace[-1].works:
            live = next(live for live in self.running if live.name == work.name)
            live.computed += len(work.tokens)
            self.coordinator.cache(live.name, self._hashes(live), live.computed)
            if work.samples:
                live.tokens.append(sampled[work.name])
            if work.ends:
                self.coordinator.free(live.name)
                self.running.remove(live)
                self.finished[live.name] = tuple(live.tokens)
                ready = [job for job in self.follow_ups if job.after == live.name]
                self.follow_ups = [job for job in self.follow_ups if job.after != live.name]
                self.waiting += [self._start(job, self.finished[live.name]) for job in ready]
        self.coordinator.audit()

    def _start(self, job: Job, before: tuple[int, ...]) -> _Live:
        tokens = [*before, *job.prompt]
        return _Live(job.name, tokens, len(tokens) + job.new_tokens)

    def _hashes(self, live: _Live) -> list[bytes]:
        return hash_blocks(live.tokens, self.coordinator.hash_block_tokens, none_hash=_NONE_HASH)

    def _grow(self, live: _Live, count: int) -> bool:
        """Find room for `count` more tokens; False if that took the request itself out."""
        while (new := self.coordinator.allocate(live.name, live.computed + count)) is None:
            victim = self.running.pop()
            self.coordinator.free(victim.name)
            self.preempted.append(victim.name)
            victim.computed, victim.resumed = 0, True
            self.waiting.insert(0, victim)
            if victim is live:
                return False
        self._note(new)
        return True

    def _admit(self, live: _Live, budget: int) -> int:
        """Find the request's prefix and room for some tokens behind it. Returns how many, 0 if there is no room."""
        hit = self.coordinator.find_longest_hit(self._hashes(live), len(live.tokens) - 1)
        count = min(len(live.tokens) - hit.num_tokens, budget)
        evicted = self.coordinator.stats()["evicted_blocks"]
        new = self.coordinator.allocate(live.name, hit.num_tokens + count, hit=hit)
        if new is None:
            return 0
        self._note(new)
        live.computed = hit.num_tokens
        self.admissions.append(Admission(live.name, hit.num_tokens, live.resumed, evicted))
        return count

    def _note(self, new: tuple[list[int], ...]) -> None:
        # Groups of one set name the same ids.
        self.new_blocks += sorted({block for row in new for block in row})

    def _work(self, live: _Live, count: int) -> Work:
        end = live.computed + count
        samples = end == len(live.tokens)
        return Work(
            name=live.name,
            start=live.computed,
            tokens=tuple(live.tokens[live.computed : end]),
            rows=self.coordinator.block_ids(live.name),
            samples=samples,
            ends=samples and end + 1 == live.end,
        )
