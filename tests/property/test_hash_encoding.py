"""Block hashes against pickle, cbor2 and xxhash themselves, over tokens and keys of every form they may take.

Pickle writes an object that comes again as a back-reference, so the keys are built from shared objects as well as from
equal copies of them.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any

import cbor2
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep_kv import hash_blocks, none_hash

if TYPE_CHECKING:
    from collections.abc import Callable


def pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


REFERENCE: dict[str, tuple[Callable[[object], bytes], Callable[[bytes], bytes]]] = {
    "sha256": (pickled, sha256),
    "sha256_cbor": (cbor, sha256),
    "xxhash": (pickled, xxh3),
    "xxhash_cbor": (cbor, xxh3),
}
EVERY_ALGO = pytest.mark.parametrize("algo", list(REFERENCE))
FRAME = 64 * 1024


def reference(
    algo: str, tokens: list[int], block_tokens: int, parent: bytes, keys: list[tuple[Any, ...] | None] | None
) -> list[bytes]:
    """Hash block by block, as the definition says."""
    encode, digest = REFERENCE[algo]
    hashes = []
    for block in range(len(tokens) // block_tokens):
        part = tuple(tokens[block * block_tokens : (block + 1) * block_tokens])
        parent = digest(encode((parent, part, keys[block] if keys is not None else None)))
        hashes.append(parent)
    return hashes


def copy_of(value: Any) -> Any:
    """Make an equal object that is not the same one, where there can be two."""
    match value:
        case str():
            return "".join(list(value))
        case bytes():
            return bytes(bytearray(value))
        case tuple():
            return (*value[:1], *value[1:])
        case _:
            return value


POWERS = [1 << bits for bits in (0, 8, 15, 16, 31, 32, 39, 47, 63)]
EDGES = sorted({sign * power + off for power in POWERS for sign in (1, -1) for off in (-1, 0, 1)})
TOKEN = st.one_of(
    st.integers(0, 2**17),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([edge for edge in EDGES if -(2**63) <= edge < 2**63]),
)
# 2**2039 is where pickle's short form of an integer ends.
INTEGER = st.one_of(
    st.integers(),
    st.sampled_from(EDGES),
    st.builds(
        lambda bits, off, sign: sign * ((1 << bits) + off),
        st.one_of(st.integers(0, 130), st.integers(2030, 2050)),
        st.integers(-1, 1),
        st.sampled_from([1, -1]),
    ),
)
FLOAT = st.one_of(st.floats(), st.floats(width=32), st.floats(width=16))
LENGTH = st.sampled_from([0, 1, 2, 254, 255, 256, 257])
TEXT = st.one_of(st.text(), st.builds(lambda char, length: char * length, st.sampled_from("aé€😀"), LENGTH))
BYTES = st.one_of(st.binary(), st.builds(lambda length: b"\7" * length, LENGTH))
HASH = st.one_of(st.binary(min_size=32, max_size=32), st.binary(min_size=16, max_size=16))


class Builder:
    """Builds values; strings, byte strings and tuples may come again, as the same object or as a copy."""

    def __init__(self, draw: st.DrawFn, pool: list[Any]) -> None:
        self.draw = draw
        self.pool = pool

    def value(self, depth: int) -> Any:
        kinds = ["plain", "text", "bytes", "same", "copy"] + (["tuple"] * 3 if depth else [])
        match self.draw(st.sampled_from(kinds)):
            case "plain":
                return self.draw(st.one_of(st.none(), st.booleans(), INTEGER, FLOAT))
            case "text":
                made = self.draw(TEXT)
            case "bytes":
                made = self.draw(BYTES)
            case "tuple":
                made = self.tuple(depth - 1)
            case "same":
                return self.draw(st.sampled_from(self.pool))
            case _:
                made = copy_of(self.draw(st.sampled_from(self.pool)))
        self.pool.append(made)
        return made

    def tuple(self, depth: int) -> tuple[Any, ...]:
        return tuple([self.value(depth) for _ in range(self.draw(st.integers(0, 5)))])


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[int], int, bytes, list[tuple[Any, ...] | None] | None]:
    """Draw tokens, the block size, the parent and the extra keys. The parent object may be among the keys."""
    block_tokens = draw(st.one_of(st.integers(1, 5), st.sampled_from([16, 64])))
    num_blocks = draw(st.integers(0, 3))
    rest = draw(st.integers(0, block_tokens - 1))
    count = block_tokens * num_blocks + rest
    pattern = draw(st.lists(TOKEN, min_size=1, max_size=20))
    tokens = [pattern[at % len(pattern)] for at in range(count)]
    parent = draw(HASH)
    builder = Builder(draw, [parent])
    keys = [builder.tuple(3) if draw(st.integers(0, 3)) else None for _ in range(num_blocks)]
    return tokens, block_tokens, parent, keys if draw(st.integers(0, 5)) else None


@EVERY_ALGO
@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=chains(), as_parent=st.booleans())
def test_hashes_equal_their_definition(
    algo: str,
    chain: tuple[list[int], int, bytes, list[tuple[Any, ...] | None] | None],
    *,
    as_parent: bool,
) -> None:
    tokens, block_tokens, parent, keys = chain
    expected = reference(algo, tokens, block_tokens, parent, keys)
    if as_parent:
        got = hash_blocks(tokens, block_tokens, algo=algo, parent=parent, extra_keys=keys, none_hash=bytes(16))
    else:
        got = hash_blocks(tokens, block_tokens, algo=algo, extra_keys=keys, none_hash=parent)
    assert got == expected


@st.composite
def long_blocks(draw: st.DrawFn) -> tuple[list[int], tuple[Any, ...] | None]:
    """Draw a block whose tokens alone, or whose keys, reach over the end of a frame."""
    width = draw(st.sampled_from([2, 3, 5, 10]))
    value = {2: 200, 3: 60000, 5: 129279, 10: 2**63 - 1}[width]
    # Just short of one or two frames, or just over, with a few tokens of other widths among them.
    count = max(1, draw(st.sampled_from([0, 1, 1, 2])) * FRAME // width + draw(st.integers(-60, 30)))
    tokens = [value] * count
    for at, other in draw(st.lists(st.tuples(st.integers(0, count - 1), TOKEN), max_size=10)):
        tokens[at] = other
    pool: list[Any] = [draw(st.sampled_from("xé")) * (FRAME // 2 + draw(st.integers(-40, 5))), b"\7" * FRAME]
    pool += ["y" * (FRAME + draw(st.integers(-2, 2))), b"z" * (FRAME - draw(st.integers(0, 200)))]
    builder = Builder(draw, pool)
    return tokens, builder.tuple(2) if draw(st.booleans()) else None


@EVERY_ALGO
@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(block=long_blocks(), parent=HASH)
def test_blocks_over_the_borders_of_frames(
    algo: str, block: tuple[list[int], tuple[Any, ...] | None], parent: bytes
) -> None:
    tokens, keys = block
    expected = reference(algo, tokens, len(tokens), parent, [keys])
    assert hash_blocks(tokens, len(tokens), algo=algo, extra_keys=[keys], none_hash=parent) == expected


@EVERY_ALGO
@settings(max_examples=50, deadline=None)
@given(count=st.integers(240, 300), again=st.lists(st.integers(0, 239), max_size=20), parent=HASH)
def test_more_objects_than_one_byte_can_number(algo: str, count: int, again: list[int], parent: bytes) -> None:
    objects: list[Any] = [("o" if at % 2 else (str(at),)) for at in range(count)]
    keys = (*objects, *(objects[at] for at in again), *objects[-20:])
    expected = reference(algo, [1, 2], 2, parent, [keys])
    assert hash_blocks([1, 2], 2, algo=algo, extra_keys=[keys], none_hash=parent) == expected


@EVERY_ALGO
@settings(max_examples=200, deadline=None)
@given(seed=st.one_of(TEXT, st.builds(lambda more: "s" * (FRAME + more), st.integers(-300, 3))))
def test_seeds(algo: str, seed: str) -> None:
    encode, digest = REFERENCE[algo]
    assert none_hash(algo, seed) == digest(encode(seed))
