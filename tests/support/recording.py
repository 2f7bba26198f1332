"""Schedulers that write what they schedule to the file named by LOCKSTEP_KV_TEST_RECORD, one JSON object per step.

vLLM takes them through `scheduler_cls`, in whatever process its engine core runs. Requests are numbered in the order in
which they are first scheduled, because vLLM adds random suffixes to them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

__all__ = ["RECORD", "RecordingAsyncScheduler", "RecordingScheduler", "step_record"]

RECORD = "LOCKSTEP_KV_TEST_RECORD"


def step_record(output: Any, manager: Any, numbers: dict[str, int]) -> dict[str, Any]:
    """What a step did to the blocks. numbers: the requests seen so far."""

    def number(request_id: str) -> int:
        return numbers.setdefault(request_id, len(numbers))

    cached = output.scheduled_cached_reqs
    return {
        "manager": type(manager).__name__,
        "new": [(number(new.req_id), new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs],
        "cached": [
            (number(name), computed, ids)
            for name, computed, ids in zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            )
        ],
        "resumed": sorted(number(name) for name in cached.resumed_req_ids),
        "scheduled": sorted((number(name), count) for name, count in output.num_scheduled_tokens.items()),
        "preempted": sorted(number(name) for name in output.preempted_req_ids or ()),
        "free": manager.block_pool.get_num_free_blocks(),
        "usage": manager.usage,
    }


class _Recording:
    """Writes a line per step. Mixed in before a scheduler."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        manager = self.kv_cache_manager  # type: ignore[attr-defined]
        numbers: dict[str, int] = self.__dict__.setdefault("record_numbers", {})
        with Path(os.environ[RECORD]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(step_record(output, manager, numbers)) + "\n")
        return output


class RecordingScheduler(_Recording, Scheduler):  # type: ignore[misc]
    """vLLM's scheduler."""


class RecordingAsyncScheduler(_Recording, AsyncScheduler):  # type: ignore[misc]
    """vLLM's scheduler that runs ahead of the workers."""
