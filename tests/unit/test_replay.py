"""Replays: the shared trace's ground truth, small loads counted by hand, and what an observer sees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lockstep_kv import ConfigError, Coordinator, CoordinatorConfig, GroupSpec, LayerSpec
from lockstep_kv.replay import ReplayReport, longest_request, replay
from lockstep_kv.trace import TraceRequest, generate_trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep_kv import PrefixHit

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "mooncake_conversation_trace.jsonl"


def one_group(block_tokens: int = 512) -> list[GroupSpec]:
    return [GroupSpec("full", block_tokens, [LayerSpec("layer", 1)], kv_shards=1)]


def make_coordinator(
    usable_blocks: int, groups: Sequence[GroupSpec] | None = None, *, ranks: int = 1, **options: Any
) -> Coordinator:
    """Make a coordinator with this many blocks beside the null block."""
    options = {"max_model_len": 2**20, **options}
    return Coordinator(CoordinatorConfig(groups or one_group(), usable_blocks + 1, dcp_world_size=ranks, **options))


def request(tokens: int, output: int, *hash_ids: int) -> TraceRequest:
    assert len(hash_ids) == -(-tokens // 512)
    return TraceRequest(0, tokens, output, hash_ids)


def run(requests: Sequence[TraceRequest], usable_blocks: int, **options: Any) -> ReplayReport:
    """Replay on one group of 512-token blocks, and see that nothing stays behind."""
    coordinator = make_coordinator(usable_blocks)
    report = replay(requests, coordinator, **options)
    assert_idle(coordinator)
    assert (report.requests, report.num_blocks) == (len(requests), usable_blocks + 1)
    return report


def assert_idle(coordinator: Coordinator) -> None:
    assert coordinator.num_free_blocks == coordinator.num_blocks - 1
    assert coordinator.num_requests == 0
    coordinator.audit()


def counts(report: ReplayReport) -> tuple[int, int, int, int, int, int]:
    """Hit tokens, handed out, evicted, refusals, rejected, most held."""
    return (
        report.hit_tokens,
        report.allocated_blocks,
        report.evicted_blocks,
        report.refusals,
        report.rejected,
        report.peak_held_blocks,
    )


def unlimited_hits(requests: Sequence[TraceRequest], block_tokens: int) -> int:
    """Count by plain prefixes what an unlimited pool of blocks of this size hits."""
    published: set[tuple[object, ...]] = set()
    hits = 0
    for one in requests:
        # A token is its hash id and its place in it.
        prefixes = [
            (*one.hash_ids[: end // 512], (one.hash_ids[(end - 1) // 512], end % 512))
            for end in range(block_tokens, one.input_length + 1, block_tokens)
        ]
        found = 0
        while (found + 1) * block_tokens < one.input_length and prefixes[found] in published:
            found += 1
        hits += found * block_tokens
        published.update(prefixes)
    return hits


@pytest.mark.parametrize(("num_blocks", "hit_tokens"), [(5_984, 21_203_968), (50_000, 52_593_152)])
def test_ground_truth_of_the_shared_trace(num_blocks: int, hit_tokens: int) -> None:
    if not TRACE.exists():
        pytest.skip(f"{TRACE} is not there")
    report = run(read_trace(TRACE), num_blocks - 1)
    assert (report.requests, report.input_tokens, report.hit_tokens) == (12_031, 144_793_823, hit_tokens)
    assert report.hit_rate == hit_tokens / 144_793_823
    assert (report.rejected, report.refusals) == (0, 0)


# The counts are (hit tokens, handed out, evicted, refusals, rejected, most held).
@pytest.mark.parametrize(
    ("requests", "usable_blocks", "concurrency", "expected"),
    [
        pytest.param([request(1000, 24, 0, 1)], 8, 1, (0, 2, 0, 0, 0, 2), id="output fills the last block"),
        pytest.param([request(1000, 25, 0, 1)], 8, 1, (0, 3, 0, 0, 0, 3), id="output needs one block more"),
        pytest.param(
            [request(1000, 0, 0, 1), request(1100, 0, 0, 2, 3)], 8, 1, (512, 4, 0, 0, 0, 3), id="one block shared"
        ),
        pytest.param(
            [request(1024, 0, 0, 1), request(1024, 0, 0, 1)],
            8,
            1,
            (512, 3, 0, 0, 0, 2),
            id="last token is not looked up",
        ),
        pytest.param(
            [request(1024, 0, 0, 1), request(1025, 0, 0, 1, 2)], 8, 1, (1024, 3, 0, 0, 0, 3), id="whole input is shared"
        ),
        pytest.param(
            [request(1000, 600, 0, 1), request(1600, 0, 0, 1, 2, 3)],
            9,
            1,
            (512, 7, 0, 0, 0, 4),
            id="partial block and output are not published",
        ),
        pytest.param([request(100, 0, 0), request(100, 0, 0)], 8, 1, (0, 2, 0, 0, 0, 1), id="less than a block"),
        pytest.param(
            # The second takes all four blocks, two of them published; the third takes three of the second's.
            [request(1025, 0, 0, 1, 2), request(2048, 0, 10, 11, 12, 13), request(1025, 0, 0, 1, 2)],
            4,
            1,
            (0, 10, 5, 0, 0, 4),
            id="evicted before it comes again",
        ),
        pytest.param(
            # The tail of a request goes first: its first block is still there for the third.
            [request(1536, 0, 0, 1, 2), request(1024, 0, 10, 11), request(1024, 0, 0, 3)],
            4,
            1,
            (512, 6, 2, 0, 0, 3),
            id="tails go first",
        ),
        pytest.param([request(1025, 0, 0, 1, 2)], 3, 1, (0, 3, 0, 0, 0, 3), id="just fits"),
        pytest.param(
            [request(1025, 0, 0, 1, 2), request(512, 0, 5), request(513, 0, 5, 6)],
            2,
            1,
            (512, 2, 0, 0, 1, 2),
            id="one too long for the pool",
        ),
        pytest.param(
            [request(1024, 0, 0, 1), request(1024, 0, 2, 3), request(1536, 0, 4, 5, 6)],
            4,
            3,
            (0, 7, 3, 2, 0, 4),
            id="the third waits for two",
        ),
        pytest.param(
            [request(1024, 0, 0, 1), request(1024, 0, 2, 3), request(1536, 0, 4, 5, 6)],
            6,
            2,
            (0, 7, 1, 0, 0, 5),
            id="the oldest has finished when the third comes",
        ),
        pytest.param(
            [request(1024, 0, 0, 1), request(2560, 0, 2, 3, 4, 5, 6), request(1025, 0, 0, 1, 7)],
            4,
            2,
            (1024, 3, 0, 1, 1, 3),
            id="waits and is too long all the same",
        ),
        pytest.param(
            # The third finds block 0 twice, once before and once after it has waited; it counts once.
            [request(1024, 0, 0, 1), request(1024, 0, 0, 2), request(1536, 0, 0, 3, 4)],
            4,
            3,
            (1024, 5, 1, 1, 0, 4),
            id="a hit counts once though it was looked up again",
        ),
    ],
)
def test_loads_counted_by_hand(
    requests: list[TraceRequest], usable_blocks: int, concurrency: int, expected: tuple[int, ...]
) -> None:
    assert counts(run(requests, usable_blocks, concurrency=concurrency)) == expected


def test_shared_blocks_are_held_once() -> None:
    requests = [request(1024, 0, 0, 1), request(1025, 0, 0, 1, 2), request(1025, 0, 0, 1, 3)]
    assert counts(run(requests, 8, concurrency=3)) == (2048, 4, 0, 0, 0, 4)


def test_shares_of_a_report() -> None:
    report = run([request(1024, 0, 0, 1), request(1025, 0, 0, 1, 2)], 8)
    assert report.hit_rate == 1024 / 2049
    assert report.peak_usage == 3 / 8
    assert report.seconds > 0
    assert report.blocks_per_second == 3 / report.seconds


def test_a_second_replay_counts_only_itself() -> None:
    coordinator = make_coordinator(8)
    requests = [request(1024, 0, 0, 1), request(1025, 0, 0, 1, 2)]
    first, second = replay(requests, coordinator), replay(requests, coordinator)
    assert (first.hit_tokens, second.hit_tokens) == (1024, 512 + 1024)
    assert (first.allocated_blocks, second.allocated_blocks) == (3, 2)
    assert_idle(coordinator)


def test_length_of_the_longest_request() -> None:
    assert longest_request([request(100, 5, 0), request(90, 20, 1), request(105, 0, 2)]) == 110


@pytest.mark.parametrize("concurrency", [1, 2, 7, 1000])
def test_a_pool_that_holds_everything_hits_the_same_at_any_concurrency(concurrency: int) -> None:
    requests = generate_trace(120, seed=1)
    report = run(requests, 4000, concurrency=concurrency)
    assert (report.evicted_blocks, report.refusals, report.rejected) == (0, 0, 0)
    assert report.hit_tokens == unlimited_hits(requests, 512) > 0


@pytest.mark.parametrize("block_tokens", [32, 64, 128, 256, 512, 1024, 2048])
def test_block_sizes_on_an_unlimited_pool(block_tokens: int) -> None:
    requests = generate_trace(120, seed=2)
    total = sum(-(-(one.input_length + one.output_length) // block_tokens) for one in requests)
    coordinator = make_coordinator(total, one_group(block_tokens))
    report = replay(requests, coordinator, concurrency=3)
    assert_idle(coordinator)
    assert report.evicted_blocks == 0
    assert report.hit_tokens == unlimited_hits(requests, block_tokens)
    # No input ends with a block, and partial blocks are not shared: smaller blocks have nothing more to find.
    assert all(one.input_length % 512 for one in requests)
    whole = unlimited_hits(requests, 512)
    assert (report.hit_tokens == whole) if block_tokens <= 512 else (0 < report.hit_tokens < whole)


@pytest.mark.parametrize(
    ("block_tokens", "hit_tokens"), [(1, 2047), (64, 1984), (256, 1792), (512, 1536), (1024, 1024), (2048, 0)]
)
def test_block_sizes_on_one_input_twice(block_tokens: int, hit_tokens: int) -> None:
    requests = [request(2048, 0, 0, 1, 2, 3)] * 2
    assert unlimited_hits(requests, block_tokens) == hit_tokens
    assert replay(requests, make_coordinator(5000, one_group(block_tokens))).hit_tokens == hit_tokens


@pytest.mark.parametrize("block_tokens", [256, 1024])
def test_equal_ids_in_other_places_are_other_blocks_of_another_size(block_tokens: int) -> None:
    # Ids 0 and 4 differ, and so do all that follow them.
    requests = [request(2049, 0, 0, 1, 2, 3, 9), request(2049, 0, 4, 5, 6, 7, 10), request(1025, 0, 0, 1, 11)]
    assert replay(requests, make_coordinator(100, one_group(block_tokens))).hit_tokens == 1024


@pytest.mark.parametrize("block_tokens", [3, 48, 384, 513, 768, 1000])
def test_block_sizes_that_do_not_fit_a_trace(block_tokens: int) -> None:
    coordinator = make_coordinator(10, one_group(block_tokens))
    with pytest.raises(ConfigError) as caught:
        replay([request(100, 0, 0)], coordinator)
    assert str(caught.value) == (
        f"hash_block_tokens must divide 512 or be a multiple of it to replay a trace, got {block_tokens}"
    )
    assert_idle(coordinator)


@pytest.mark.parametrize(("concurrency", "shown"), [(0, "0"), (-3, "-3"), (1.5, "float 1.5"), (True, "bool True")])
def test_concurrency_that_cannot_be(concurrency: Any, shown: str) -> None:
    with pytest.raises(ConfigError, match=rf"^concurrency must be .*got {shown}$"):
        replay([request(100, 0, 0)], make_coordinator(10), concurrency=concurrency)


def test_progress_is_told_once_per_request() -> None:
    done: list[int] = []
    run([request(100, 0, 0), request(5000, 0, *range(10)), request(100, 0, 0)], 4, advance=done.append)
    assert done == [1, 1, 1]


class Seen:
    """Writes down what an observer sees, and how the coordinator stands then."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.events: list[tuple[Any, ...]] = []

    def hit(self, request: TraceRequest, hit: PrefixHit) -> None:
        stats = self.coordinator.stats()
        self.events.append(("hit", request, hit.num_tokens, hit.block_ids, stats["taken_blocks"], stats["keys"]))

    def allocated(self, request: TraceRequest, block_ids: tuple[list[int], ...], num_hit_tokens: int) -> None:
        stats = self.coordinator.stats()
        self.events.append(("allocated", request, num_hit_tokens, block_ids, stats["taken_blocks"], stats["keys"]))


def test_an_observer_sees_the_hit_before_and_the_rows_after() -> None:
    coordinator = make_coordinator(8)
    seen = Seen(coordinator)
    first, second = request(1024, 10, 0, 1), request(1025, 0, 0, 1, 2)
    replay([first, second], coordinator, observer=seen)
    # A fresh pool hands blocks out in order, and block 3 comes back first because nothing can be found in it. Taken
    # blocks and keys tell that the hit comes before the allocation, and the allocation before the publication.
    assert seen.events == [
        ("allocated", first, 0, ([1, 2, 3],), 3, 0),
        ("hit", second, 1024, ([1, 2],), 3, 2),
        ("allocated", second, 1024, ([1, 2, 3],), 4, 2),
    ]


def test_an_observer_sees_every_look_up_of_a_request_that_waits_and_no_rejected_one() -> None:
    coordinator = make_coordinator(4)
    seen = Seen(coordinator)
    requests = [
        request(1024, 0, 0, 1),
        request(1024, 0, 0, 2),
        request(1536, 0, 0, 3, 4),
        request(2560, 0, *range(9, 14)),
    ]
    replay(requests, coordinator, concurrency=3, observer=seen)
    assert [(event[0], requests.index(event[1])) for event in seen.events] == [
        ("allocated", 0),
        ("hit", 1),
        ("allocated", 1),
        ("hit", 2),
        ("hit", 2),
        ("allocated", 2),
    ]
    assert_idle(coordinator)


@pytest.mark.parametrize(
    ("spans", "ranks"),
    [
        pytest.param([(64, 8), (128, 4)], 8, id="lockstep pair"),
        pytest.param([(64, 8), (512, 1)], 8, id="replicated pair"),
        pytest.param([(256, 2), (64, 2)], 2, id="two sets"),
    ],
)
def test_an_observer_gets_one_row_per_group(spans: list[tuple[int, int]], ranks: int) -> None:
    groups = [
        GroupSpec("mla", block_size, [LayerSpec(f"layer.{at}", block_size)], kv_shards=shards)
        for at, (block_size, shards) in enumerate(spans)
    ]
    coordinator = make_coordinator(3000, groups, ranks=ranks)
    seen = Seen(coordinator)
    requests = generate_trace(40, seed=5)
    report = replay(requests, coordinator, concurrency=4, observer=seen)
    assert_idle(coordinator)
    assert report.hit_tokens > 0

    tokens = [block_size * shards for block_size, shards in spans]
    hits = {id(event[1]): event for event in seen.events if event[0] == "hit"}
    rows_seen = [event for event in seen.events if event[0] == "allocated"]
    assert [event[1] for event in rows_seen] == requests
    for _, one, num_hit_tokens, rows, _, _ in rows_seen:
        assert [len(row) for row in rows] == [-(-(one.input_length + one.output_length) // span) for span in tokens]
        assert all(1 <= block_id < coordinator.num_blocks for row in rows for block_id in row)
        assert all(len(set(row)) == len(row) for row in rows)
        if len(coordinator.sets) == 1:
            assert rows[0] == rows[1]
        else:
            assert not set(rows[0]) & set(rows[1])
        if num_hit_tokens:
            _, _, hit_tokens, hit_rows, _, _ = hits[id(one)]
            assert hit_tokens == num_hit_tokens
            shared = [num_hit_tokens // span for span in tokens]
            assert [row[:count] for row, count in zip(rows, shared, strict=True)] == list(hit_rows)


def test_a_lockstep_pair_hits_what_its_span_hits() -> None:
    requests = generate_trace(150, seed=6)
    pair = [
        GroupSpec("mla", 64, [LayerSpec("main", 64)], kv_shards=8),
        GroupSpec("mla", 512, [LayerSpec("indexer", 512)], kv_shards=1),
    ]
    for usable_blocks in (60, 100, 400):
        coordinator = make_coordinator(usable_blocks, pair, ranks=8)
        report = replay(requests, coordinator, concurrency=2)
        assert_idle(coordinator)
        assert counts(report) == counts(run(requests, usable_blocks, concurrency=2))
        assert report.evicted_blocks > 0


@pytest.mark.parametrize("seed", range(5))
def test_nothing_stays_behind_on_a_small_pool(seed: int) -> None:
    requests = generate_trace(150, seed=seed)
    reports = [run(requests, 30, concurrency=concurrency) for concurrency in (1, 4, 50)]
    # What does not fit in an empty pool does not depend on who else is there.
    too_long = sum(-(-(one.input_length + one.output_length) // 512) > 30 for one in requests)
    assert {report.rejected for report in reports} == {too_long}
    assert reports[0].refusals == 0 < reports[1].refusals
    assert all(0 < report.peak_held_blocks <= 30 for report in reports)
    assert all(report.evicted_blocks > 0 for report in reports)
