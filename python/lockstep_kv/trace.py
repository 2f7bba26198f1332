"""Requests of a recorded or generated load: lengths, and which leading blocks of 512 tokens requests share."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep_kv.arguments import checked_int
from lockstep_kv.errors import ArgumentTypeError, ConfigError, LockstepKVError

__all__ = ["TRACE_BLOCK_TOKENS", "TraceRequest", "generate_trace", "read_trace"]

TRACE_BLOCK_TOKENS = 512
"""Tokens that one hash id stands for; the last one of a request may stand for fewer."""

_LONGEST = 2**31 - 1
# A generated load has so many conversations at a time, of up to so many tokens: more than the smaller caches hold.
_TALKS = 400
_LONGEST_TALK = 96 * TRACE_BLOCK_TOKENS
# Of generated requests, so many are a later turn of a conversation.
_NEXT_TURN_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Requests whose first n hash ids are equal share their first n blocks of 512 tokens."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: str | os.PathLike[str]) -> list[TraceRequest]:
    """Read a trace in Mooncake's format: one JSON object per line, empty lines left out.

    Raises `ConfigError` naming the file, the line and what is wrong with it.
    """
    requests = []
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError(f"path must be a path, got {type(path).__name__} {path!r}")
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    requests.append(_parsed(line, f"{path}, line {number}"))
    except LockstepKVError:
        raise
    except (OSError, ValueError) as error:
        # A ValueError is text that is not UTF-8, or a path that no file can have.
        raise ConfigError(f"cannot read trace {str(path)!r}: {error}") from None
    if not requests:
        raise ConfigError(f"trace {str(path)!r} holds no requests")
    return requests


def _parsed(line: str, where: str) -> TraceRequest:
    """Read one line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be a JSON object, got {type(record).__name__}")
    missing = [name for name in ("timestamp", "input_length", "output_length", "hash_ids") if name not in record]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    hash_ids = record["hash_ids"]
    if not isinstance(hash_ids, list):
        raise ConfigError(f"{where}: hash_ids must be a list, got {type(hash_ids).__name__}")

    def number(name: str, value: Any, low: int, high: int = _LONGEST) -> int:
        return checked_int(f"{where}: {name}", value, low=low, high=high)

    input_length = number("input_length", record["input_length"], 1)
    expected = -(-input_length // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != expected:
        raise ConfigError(
            f"{where}: hash_ids must hold {expected} ids for input_length {input_length}, got {len(hash_ids)}"
        )
    return TraceRequest(
        timestamp_ms=number("timestamp", record["timestamp"], 0, 2**63 - 1),
        input_length=input_length,
        output_length=number("output_length", record["output_length"], 0),
        hash_ids=tuple(number("hash_ids", hash_id, 0, 2**63 - 1) for hash_id in hash_ids),
    )


def generate_trace(num_requests: int, *, seed: int = 0) -> list[TraceRequest]:
    """Make requests of multi-turn conversations that share a few system prompts; equal seeds give equal traces.

    Each turn's input is the conversation so far and a new message, so its leading blocks are those of the turn before.
    """
    num_requests = checked_int("num_requests", num_requests, low=1)
    draw = random.Random(seed)  # noqa: S311 - a load, not a secret
    next_id = 0

    def new_ids(count: int) -> list[int]:
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    system_prompts = [new_ids(draw.randint(1, 8)) for _ in range(4)]
    # A conversation: its full blocks, and its length in tokens.
    conversations: list[tuple[list[int], int]] = []
    requests: list[TraceRequest] = []
    for at in range(num_requests):
        if conversations and draw.random() < _NEXT_TURN_SHARE:
            blocks, length = conversations.pop(draw.randrange(len(conversations)))
        else:
            blocks = list(draw.choice(system_prompts))
            length = len(blocks) * TRACE_BLOCK_TOKENS
        length += draw.randint(20, 4000)
        output = draw.randint(1, 1000)
        full = length // TRACE_BLOCK_TOKENS
        blocks = blocks + new_ids(full - len(blocks))
        # The last block is partial: no other request shares it.
        tail = new_ids(1) if length % TRACE_BLOCK_TOKENS else []
        requests.append(TraceRequest(at * 250, length, output, tuple(blocks + tail)))
        length += output
        if length < _LONGEST_TALK:
            conversations.append((blocks + new_ids(length // TRACE_BLOCK_TOKENS - full), length))
            del conversations[:-_TALKS]
    return requests
