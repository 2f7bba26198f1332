"""A model runner without a model: it takes what a scheduler sends to workers and answers with made-up tokens.

Needs vLLM.
"""

from __future__ import annotations

import zlib
from typing import Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

__all__ = ["FakeRunner"]


class FakeRunner:
    """Tokens, drafts and how many drafts are accepted depend only on the seed, the request and the position."""

    def __init__(self, seed: int, vocabulary: int, max_drafts: int = 0) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self._max_drafts = max_drafts
        # Tokens of each request, sampled ones included. As in a worker they may be ahead of the scheduler's.
        self._lengths: dict[str, int] = {}
        self._drafts: dict[str, list[int]] = {}

    def execute(self, plan: Any) -> ModelRunnerOutput:
        """Run one step of a `SchedulerOutput`."""
        for request_id in plan.finished_req_ids:
            self._lengths.pop(request_id, None)
        computed = self._receive(plan)
        sampled: list[list[int]] = []
        self._drafts = {}
        for request_id, scheduled in plan.num_scheduled_tokens.items():
            drafts = plan.scheduled_spec_decode_tokens.get(request_id, ())
            length = self._lengths[request_id]
            if computed[request_id] + scheduled - len(drafts) < length:
                # A part of a prompt, after which nothing is sampled.
                sampled.append([])
                self._drafts[request_id] = []
                continue
            accepted = self._number("accepted", request_id, length) % (len(drafts) + 1)
            tokens = [self.token(request_id, length + at) for at in range(1 + accepted)]
            sampled.append(tokens)
            length = self._lengths[request_id] = length + len(tokens)
            if self._max_drafts:
                count = self._number("drafts", request_id, length) % (self._max_drafts + 1)
                self._drafts[request_id] = [self.token(request_id, length + at) for at in range(count)]
        names = list(plan.num_scheduled_tokens)
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, sampled)

    def take_drafts(self) -> DraftTokenIds:
        """The drafts of the last step's requests."""
        return DraftTokenIds(list(self._drafts), list(self._drafts.values()))

    def token(self, request_id: str, position: int) -> int:
        return self._number("token", request_id, position) % self._vocabulary

    def _receive(self, plan: Any) -> dict[str, int]:
        """Take in the step's requests. Returns the computed tokens of each."""
        computed = {}
        for new in plan.scheduled_new_reqs:
            self._lengths[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for request_id, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            computed[request_id] = tokens
            if request_id in cached.resumed_req_ids:
                # Tokens that were in flight when it was preempted may have been dropped.
                self._lengths[request_id] = len(cached.all_token_ids[request_id])
        return computed

    def _number(self, *what: object) -> int:
        return zlib.crc32(f"{self._seed} {what}".encode())
