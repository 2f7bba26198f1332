"""Traces: what is read, what is refused with which words, and what a generated load promises."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep_kv import ConfigError
from lockstep_kv.trace import TRACE_BLOCK_TOKENS, TraceRequest, generate_trace, read_trace

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [3, 4]}


def write(folder: Path, *lines: str | dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: object) -> str:
    """The one line with which reading this path is refused."""
    with pytest.raises(ConfigError) as caught:
        read_trace(path)  # type: ignore[arg-type]
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def common_prefix(a: TraceRequest, b: TraceRequest) -> int:
    ids = zip(a.hash_ids, b.hash_ids, strict=False)
    return next((at for at, (x, y) in enumerate(ids) if x != y), min(len(a.hash_ids), len(b.hash_ids)))


def test_reads_one_request_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, {**GOOD, "timestamp": 6, "input_length": 512, "hash_ids": [9]})
    expected = [TraceRequest(5, 1000, 7, (3, 4)), TraceRequest(6, 512, 7, (9,))]
    assert read_trace(path) == expected
    assert read_trace(str(path)) == expected


def test_empty_lines_and_other_fields_are_passed_over(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, but not in a file.
    more = json.dumps({**GOOD, "model": "x\u2028y"}, ensure_ascii=False)
    assert read_trace(write(tmp_path, "", more, "  \t", GOOD, "")) == [TraceRequest(5, 1000, 7, (3, 4))] * 2


def test_lines_may_end_as_on_windows(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes((json.dumps(GOOD) + "\r\n").encode() * 2)
    assert len(read_trace(path)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"timestamp": 0},
        {"timestamp": 2**63 - 1},
        {"output_length": 0},
        {"output_length": 2**31 - 1},
        {"input_length": 1, "hash_ids": [0]},
        {"input_length": 512, "hash_ids": [0]},
        {"input_length": 513, "hash_ids": [0, 2**63 - 1]},
    ],
)
def test_least_and_greatest_values(tmp_path: Path, change: dict[str, Any]) -> None:
    record: dict[str, Any] = {**GOOD, **change}
    (request,) = read_trace(write(tmp_path, record))
    assert request == TraceRequest(
        record["timestamp"], record["input_length"], record["output_length"], tuple(record["hash_ids"])
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON: Expecting property name"),
        ("timestamp", "not JSON: Expecting value"),
        (json.dumps(GOOD) * 2, "not JSON: Extra data"),
        ('{"timestamp": ' + "9" * 5000 + "}", "not JSON: Exceeds the limit (4300 digits)"),
        ("[" * 200_000, "not JSON: "),
        ("[1, 2]", "must be a JSON object, got list"),
        ("7", "must be a JSON object, got int"),
        ("null", "must be a JSON object, got NoneType"),
        ("{}", "timestamp is missing"),
    ],
)
def test_lines_that_are_no_request(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, GOOD, "", line)
    assert refusal(path).startswith(f"{path}, line 3: {words}")


@pytest.mark.parametrize("field", list(GOOD))
def test_missing_fields_are_named(tmp_path: Path, field: str) -> None:
    path = write(tmp_path, GOOD, {name: value for name, value in GOOD.items() if name != field})
    assert refusal(path) == f"{path}, line 2: {field} is missing"


@pytest.mark.parametrize("field", ["timestamp", "input_length", "output_length", "hash_ids"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("5", "str '5'"),
        (5.0, "float 5.0"),
        (float("nan"), "float nan"),
        (float("inf"), "float inf"),
        (None, "NoneType None"),
        (True, "bool True"),
        ([5], "list [5]"),
        ({"a": 5}, "dict {'a': 5}"),
        ("x" * 5000, "str 'xxx"),
        ("two\nlines", r"str 'two\nlines'"),
    ],
)
def test_values_of_another_type(tmp_path: Path, field: str, value: object, shown: str) -> None:
    path = write(tmp_path, {**GOOD, field: [3, value] if field == "hash_ids" else value})
    message = refusal(path)
    assert message.startswith(f"{path}, line 1: {field} must be an int, got {shown}")
    assert len(message) < len(str(path)) + 200


@pytest.mark.parametrize(("value", "kind"), [({"a": 1}, "dict"), ("34", "str"), (34, "int"), (None, "NoneType")])
def test_hash_ids_that_are_no_list(tmp_path: Path, value: object, kind: str) -> None:
    path = write(tmp_path, {**GOOD, "hash_ids": value})
    assert refusal(path) == f"{path}, line 1: hash_ids must be a list, got {kind}"


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        ("timestamp", -1, f"0 and {2**63 - 1}"),
        ("timestamp", 2**63, f"0 and {2**63 - 1}"),
        ("input_length", 0, f"1 and {2**31 - 1}"),
        ("input_length", -1, f"1 and {2**31 - 1}"),
        ("input_length", 2**31, f"1 and {2**31 - 1}"),
        ("input_length", 10**60, f"1 and {2**31 - 1}"),
        ("output_length", -1, f"0 and {2**31 - 1}"),
        ("output_length", 2**31, f"0 and {2**31 - 1}"),
        ("hash_ids", -1, f"0 and {2**63 - 1}"),
        ("hash_ids", 2**63, f"0 and {2**63 - 1}"),
    ],
)
def test_values_out_of_range(tmp_path: Path, field: str, value: int, limits: str) -> None:
    path = write(tmp_path, GOOD, {**GOOD, field: [3, value] if field == "hash_ids" else value})
    assert refusal(path) == f"{path}, line 2: {field} must be between {limits}, got {value}"


def test_an_int_of_thousands_of_digits_is_shown_in_part(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "output_length": 10**4000})
    assert refusal(path).endswith("got 1" + "0" * 79 + "...")


@pytest.mark.parametrize(
    ("length", "hash_ids", "expected"),
    [(512, [], 1), (512, [1, 2], 1), (513, [1], 2), (1024, [1, 2, 3], 2), (2**31 - 1, [1], 4_194_304)],
)
def test_one_hash_id_per_512_tokens(tmp_path: Path, length: int, hash_ids: list[int], expected: int) -> None:
    path = write(tmp_path, {**GOOD, "input_length": length, "hash_ids": hash_ids})
    assert refusal(path) == (
        f"{path}, line 1: hash_ids must hold {expected} ids for input_length {length}, got {len(hash_ids)}"
    )


@pytest.mark.parametrize("content", ["", "\n", "\n \n\t\n"])
def test_files_without_requests(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, content)
    assert refusal(path) == f"trace {str(path)!r} holds no requests"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        assert refusal(path).startswith(f"cannot read trace {str(path)!r}: ")
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(json.dumps(GOOD).encode() + b'\n{"model": "\xe9"}\n')
    message = refusal(latin)
    assert message.startswith(f"cannot read trace {str(latin)!r}: ")
    assert "0xe9" in message


def test_a_path_with_a_null_character() -> None:
    assert refusal("a\0b").startswith("cannot read trace 'a\\x00b': ")


@given(
    st.lists(
        st.builds(
            lambda timestamp, ids, last, output: TraceRequest(
                timestamp, (len(ids) - 1) * TRACE_BLOCK_TOKENS + last, output, tuple(ids)
            ),
            st.integers(0, 2**63 - 1),
            st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=8),
            st.integers(1, TRACE_BLOCK_TOKENS),
            st.integers(0, 2**31 - 1),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, requests: list[TraceRequest]) -> None:
    folder = tmp_path_factory.mktemp("trace")
    lines = [
        {
            "timestamp": request.timestamp_ms,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": request.hash_ids,
        }
        for request in requests
    ]
    assert read_trace(write(folder, *lines)) == requests


def test_equal_seeds_make_equal_loads() -> None:
    assert generate_trace(50, seed=3) == generate_trace(50, seed=3)
    assert generate_trace(50) == generate_trace(50, seed=0)
    assert generate_trace(50, seed=3) != generate_trace(50, seed=4)
    assert len(generate_trace(1)) == 1


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "between 1 and"), (-1, "got -1"), (2**31, f"got {2**31}"), (True, "got bool True"), (1.5, "got float 1.5")],
)
def test_counts_that_cannot_be_generated(count: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^num_requests must be") as caught:
        generate_trace(count)
    assert words in str(caught.value)


@pytest.mark.parametrize("seed", range(4))
def test_generated_requests_are_well_formed(tmp_path: Path, seed: int) -> None:
    requests = generate_trace(200, seed=seed)
    lines = [
        {
            "timestamp": request.timestamp_ms,
            "input_length": request.input_length,
            "output_length": request.output_length,
            "hash_ids": list(request.hash_ids),
        }
        for request in requests
    ]
    assert read_trace(write(tmp_path, *lines)) == requests
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    # A hash id names the whole prefix that ends with it: it has one place and one id before it.
    before: dict[int, tuple[int, int]] = {}
    for request in requests:
        for at, (parent, child) in enumerate(zip((-1, *request.hash_ids), request.hash_ids, strict=False)):
            assert before.setdefault(child, (at, parent)) == (at, parent)


@pytest.mark.parametrize("seed", range(4))
def test_generated_turns_share_the_turn_before(seed: int) -> None:
    requests = generate_trace(200, seed=seed)
    prompts: dict[int, int] = {}
    turns = 0
    for at, request in enumerate(requests):
        earlier = [(common_prefix(other, request), other) for other in requests[:at]]
        for shared, other in earlier:
            if 0 < shared < other.input_length // TRACE_BLOCK_TOKENS:
                # Not the whole of the other one's full blocks: what two conversations share is a system prompt.
                assert prompts.setdefault(request.hash_ids[0], shared) == shared <= 8
        turns_before = [
            other
            for shared, other in earlier
            if shared == other.input_length // TRACE_BLOCK_TOKENS > prompts.get(request.hash_ids[0], 8)
        ]
        turns += bool(turns_before)
        for other in turns_before:
            # The conversation so far holds the answer, and there is a new message.
            assert request.input_length > other.input_length + other.output_length
    assert 0 < len(prompts) <= 4
    assert turns > 60


@pytest.mark.parametrize("seed", range(4))
def test_a_partial_last_block_is_not_shared(seed: int) -> None:
    requests = generate_trace(200, seed=seed)
    tails = [request.hash_ids[-1] for request in requests if request.input_length % TRACE_BLOCK_TOKENS]
    assert len(set(tails)) == len(tails)
    full = {
        hash_id for request in requests for hash_id in request.hash_ids[: request.input_length // TRACE_BLOCK_TOKENS]
    }
    assert not full & set(tails)
