"""The main job on a small load, and that pages which are really wrong are found and named."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from lockstep_kv import Coordinator, CoordinatorConfig, GroupSpec, LayerSpec
from lockstep_kv.replay import replay
from lockstep_kv.trace import TraceRequest, generate_trace

pytest.importorskip("torch")

from lockstep_kv import fingerprints
from lockstep_kv.block_table import kernel_block_ids, slot_mapping
from lockstep_kv.demo import DCP_WORLD_SIZE, INDEXER_SHARDS, run_demo
from lockstep_kv.errors import ConfigError
from lockstep_kv.fingerprints import FingerprintedRanks, WrongPageError, shrunk
from lockstep_kv.tensors import CachePool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lockstep_kv import PrefixHit
    from lockstep_kv.demo import DemoResult

REQUESTS = generate_trace(60)
# Little more than the longest request needs, so that blocks are evicted and used again.
KV_BYTES = 500_000_000
LAYERS = 78 + 21
RANKS = 8
MAIN_LAYERS = 2

# Two prefixes of three blocks each that share their first, and a request that finds each of them.
FIRST = TraceRequest(0, 1600, 100, (0, 1, 2, 3))
OTHER = TraceRequest(0, 1700, 100, (0, 11, 12, 13))
FIRST_AGAIN = TraceRequest(0, 1700, 100, (0, 1, 2, 23))
OTHER_AGAIN = TraceRequest(0, 1600, 100, (0, 11, 12, 33))
# One token of each block of a hit is looked for through the slot mapping, on one rank per hit: token id % 512. Here
# these are on three different shards, and after eight hits all ranks have had their turn.
ROUNDS = [TraceRequest(0, 1600 + at, 0, (3, 12, 21, 100 + at)) for at in range(9)]
FOUR = [FIRST, OTHER, FIRST_AGAIN, OTHER_AGAIN]


def demo(shards: int, make_ranks: Callable[..., FingerprintedRanks] = FingerprintedRanks) -> DemoResult:
    (result,) = run_demo(REQUESTS, indexer_shards=[shards], kv_bytes=KV_BYTES, make_ranks=make_ranks)
    return result


def small_groups(shards: int) -> list[GroupSpec]:
    """Two main layers on 8 shards, and one indexer layer on as many shards as asked for."""
    main = [LayerSpec(f"main.{layer}", 64) for layer in range(MAIN_LAYERS)]
    longer = 512 // shards
    return [
        GroupSpec("mla", 64, main, kv_shards=8),
        GroupSpec("mla", longer, [LayerSpec("indexer", longer)], kv_shards=shards),
    ]


def small_ranks(shards: int, kind: type[FingerprintedRanks] = FingerprintedRanks) -> FingerprintedRanks:
    return kind(small_groups(shards), num_blocks=20, dcp_world_size=RANKS)


def small_coordinator(shards: int) -> Coordinator:
    return Coordinator(CoordinatorConfig(small_groups(shards), 20, dcp_world_size=RANKS, max_model_len=4096))


def play(shards: int, ranks: FingerprintedRanks, requests: list[TraceRequest] | None = None) -> Coordinator:
    """Replay the small load on small groups."""
    coordinator = small_coordinator(shards)
    replay(requests or FOUR, coordinator, concurrency=4, observer=ranks)
    return coordinator


@contextmanager
def wrong_page(group: int | None = None, rank: int | None = None, words: str = "") -> Iterator[None]:
    """Expect that a wrong page is found in this group and on this rank; None stands for any."""
    with pytest.raises(WrongPageError) as caught:
        yield
    message = str(caught.value)
    found = re.match(r"group (\d+), rank (\d+)\b", message)
    assert found is not None, message
    assert group in (None, int(found[1])), message
    assert rank in (None, int(found[2])), message
    assert words in message, message


class FaultyRanks(FingerprintedRanks):
    """Ranks of which one gets a wrong row in one group, when it reads or when it writes but not both.

    A rank that always calls block 3 by the name of block 4 and the other way round is not wrong.
    """

    group = 0
    rank = 0
    when = "reads"
    fault: Callable[[list[int]], list[int]]
    phase = ""

    def hit(self, request: TraceRequest, hit: PrefixHit) -> None:
        self.phase = "reads"
        super().hit(request, hit)

    def allocated(self, request: TraceRequest, block_ids: tuple[list[int], ...], num_hit_tokens: int) -> None:
        self.phase = "writes"
        super().allocated(request, block_ids, num_hit_tokens)

    def table_row(self, rank: int, group: int, block_ids: list[int]) -> list[int]:
        row = super().table_row(rank, group, block_ids)
        if (self.group, self.rank, self.when) == (group, rank, self.phase):
            return type(self).fault(row)
        return row


def faulty(fault: Callable[[list[int]], list[int]], *, group: int, rank: int, when: str = "reads") -> type[FaultyRanks]:
    names = {"fault": staticmethod(fault), "group": group, "rank": rank, "when": when}
    return type("Faulty", (FaultyRanks,), names)


def swapped(row: list[int]) -> list[int]:
    """The row with its first two ids swapped."""
    return [*row[1::-1], *row[2:]]


def neighbour(row: list[int]) -> list[int]:
    """The row with the block beside its last one."""
    return [*row[:-1], row[-1] - 1 if row[-1] > 1 else 2]


def null(row: list[int]) -> list[int]:
    """The row with the null block in place of its first one."""
    return [0, *row[1:]]


def one_late(row: list[int]) -> list[int]:
    """The row with each id one place too late."""
    return [row[-1], *row[:-1]]


def one_for_all(row: list[int]) -> list[int]:
    """The first block in every place."""
    return row[:1] * len(row)


FAULTS = [swapped, neighbour, null, one_late, one_for_all]
PLACES = [(8, 0, 0), (4, 0, 7), (4, 1, 3), (1, 0, 5), (1, 1, 6)]


@pytest.mark.parametrize("concurrency", [1, 8])
def test_every_page_of_every_hit_is_right(concurrency: int) -> None:
    done: list[int] = []
    results = list(run_demo(REQUESTS, kv_bytes=KV_BYTES, concurrency=concurrency, advance=done.append))
    assert [result.indexer_shards for result in results] == list(INDEXER_SHARDS) == [8, 4, 1]
    assert sum(done) == 3 * len(REQUESTS)
    for result, bytes_per_block in zip(results, [3_452_160, 3_629_568, 4_694_016], strict=True):
        # The real layout, and behind it pages of one byte per token on all ranks.
        assert result.layout.bytes_per_block == bytes_per_block
        assert result.report.num_blocks == result.layout.num_blocks == KV_BYTES // bytes_per_block
        shrunk_block = 64 * 78 + 512 // result.indexer_shards * 21
        assert result.shrunk_bytes == shrunk_block * result.layout.num_blocks * DCP_WORLD_SIZE
        assert result.report.requests == len(REQUESTS)
        assert (result.report.rejected, result.seconds > 0) == (0, True)
        # Blocks are used again, so a stale page would show.
        assert result.report.evicted_blocks > 50
        assert result.pages_written == result.report.allocated_blocks * LAYERS * DCP_WORLD_SIZE
        # A request that waited has read its hit more than once.
        once = result.report.hit_tokens // 512 * LAYERS * DCP_WORLD_SIZE
        assert once > 0
        assert result.pages_verified == once if result.report.refusals == 0 else result.pages_verified > once


def test_equal_loads_give_equal_counts() -> None:
    first, second = demo(4), demo(4)
    assert (first.pages_written, first.pages_verified) == (second.pages_written, second.pages_verified)
    assert first.report.hit_tokens == second.report.hit_tokens


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("when", ["reads", "writes"])
@pytest.mark.parametrize(("shards", "group", "rank"), PLACES)
def test_a_wrong_row_on_one_rank_is_found_in_the_demo(
    shards: int, group: int, rank: int, when: str, fault: Callable[[list[int]], list[int]]
) -> None:
    with wrong_page(group, rank, "of a prefix hit is not what was written for it"):
        demo(shards, faulty(fault, group=group, rank=rank, when=when))


@pytest.mark.parametrize("shards", [8, 4, 1])
@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_wrong_row_is_found_on_every_rank(shards: int, group: int, rank: int) -> None:
    for fault in FAULTS:
        with wrong_page(group, rank):
            play(shards, small_ranks(shards, faulty(fault, group=group, rank=rank)))


def test_a_row_that_another_request_left_behind_is_found() -> None:
    left: list[int] = []

    def stale(row: list[int]) -> list[int]:
        old = left[: len(row)]
        left[:] = row
        return old + row[len(old) :]

    with wrong_page(1, 2):
        demo(1, faulty(stale, group=1, rank=2))


@pytest.mark.parametrize("shards", [8, 4, 2, 1])
def test_ranks_without_a_fault_pass(shards: int) -> None:
    ranks = small_ranks(shards, faulty(list, group=0, rank=0))
    coordinator = play(shards, ranks)
    assert coordinator.num_free_blocks == coordinator.num_blocks - 1
    # Four blocks, three for the other prefix's own part, and one for each request that finds all but its last block.
    # With 8 shards the groups are two sets, which share no ids.
    assert coordinator.stats()["taken_blocks"] == (4 + 3 + 1 + 1) * len(coordinator.sets)
    assert len(coordinator.sets) == (2 if shards == 8 else 1)
    assert ranks.pages_written == (4 + 3 + 1 + 1) * (MAIN_LAYERS + 1) * RANKS
    assert ranks.pages_verified == (1 + 3 + 3) * (MAIN_LAYERS + 1) * RANKS


class KeptHits(FingerprintedRanks):
    """Ranks that keep the last hit, to look at it again."""

    last: tuple[TraceRequest, PrefixHit]

    def hit(self, request: TraceRequest, hit: PrefixHit) -> None:
        super().hit(request, hit)
        self.last = (request, hit)


@pytest.mark.parametrize("shards", [8, 4, 1])
def test_one_wrong_byte_is_found_anywhere_and_named(shards: int) -> None:
    ranks = small_ranks(shards, KeptHits)
    assert isinstance(ranks, KeptHits)
    play(shards, ranks)
    request, hit = ranks.last
    for group_id, (block_size, layers, kv_shards) in enumerate([(64, MAIN_LAYERS, 8), (512 // shards, 1, shards)]):
        for rank in range(RANKS):
            for layer in range(layers):
                for at, block in enumerate(hit.block_ids[group_id]):
                    slot = (rank * 37 + layer * 11 + at * 5) % block_size
                    token = at * 512 + slot * kv_shards + rank % kv_shards
                    slots = ranks._groups[group_id].slots[rank]
                    slots[layer, block * block_size + slot] ^= 1
                    with pytest.raises(WrongPageError) as caught:
                        ranks.hit(request, hit)
                    assert str(caught.value) == (
                        f"group {group_id}, rank {rank}, layer {layer}, block {block}: token {token} of a prefix hit "
                        f"is not what was written for it"
                    )
                    slots[layer, block * block_size + slot] ^= 1
    ranks.hit(request, hit)


def test_a_hit_on_another_request_s_blocks_is_found() -> None:
    ranks = small_ranks(1, KeptHits)
    assert isinstance(ranks, KeptHits)
    play(1, ranks)
    _, hit = ranks.last
    ranks.hit(OTHER, hit)
    with wrong_page(0, words="token 512 "):
        ranks.hit(FIRST, hit)
    # Equal content at another place of the prefix is another page.
    with wrong_page(0):
        ranks.hit(TraceRequest(0, 1700, 0, (11, 0, 12, 14)), hit)


@pytest.mark.parametrize("shards", [8, 4, 1])
def test_a_block_handed_out_twice_is_found(shards: int) -> None:
    class Twice(FingerprintedRanks):
        """Ranks whose coordinator hands a hit's last block out again."""

        def allocated(self, request: TraceRequest, block_ids: tuple[list[int], ...], num_hit_tokens: int) -> None:
            shared = num_hit_tokens // 512
            if shared:
                again = [*block_ids[0]]
                again[shared] = again[shared - 1]
                block_ids = tuple(again for _ in block_ids)
            super().allocated(request, block_ids, num_hit_tokens)

    with wrong_page(0):
        demo(shards, Twice)
    # The second request's first new block is the one that it shares with the first.
    with wrong_page(0, 0, words="block 1: token 0 "):
        play(shards, small_ranks(shards, Twice))


def test_a_block_handed_out_twice_in_one_group_is_found() -> None:
    class TwiceInOne(FingerprintedRanks):
        """Ranks whose coordinator hands out the first request's second block again, in the indexer's group only."""

        def allocated(self, request: TraceRequest, block_ids: tuple[list[int], ...], num_hit_tokens: int) -> None:
            if request is OTHER:
                main, indexer = block_ids
                block_ids = (main, [*indexer[:-1], 2])
            super().allocated(request, block_ids, num_hit_tokens)

    with wrong_page(1, words="block 2: token 512 "):
        play(4, small_ranks(4, TwiceInOne))


def test_a_prefix_published_before_it_was_written_is_found() -> None:
    class Lazy(FingerprintedRanks):
        """Ranks that do not write the first request."""

        def allocated(self, request: TraceRequest, block_ids: tuple[list[int], ...], num_hit_tokens: int) -> None:
            if request is not FIRST:
                super().allocated(request, block_ids, num_hit_tokens)

    with wrong_page(0, words="block 1: token "):
        play(1, small_ranks(1, Lazy))


def patch_mapping(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the arguments of every slot mapping that the ranks use."""

    def wrong(positions: Any, block_ids: Any, **options: Any) -> Any:
        arguments = {"positions": positions, "block_ids": block_ids, **options}
        change(arguments)
        return slot_mapping(**arguments)

    monkeypatch.setattr(fingerprints, "slot_mapping", wrong)


def next_rank(arguments: dict[str, Any]) -> None:
    arguments["rank"] += 1


def next_rank_on_rank_3(arguments: dict[str, Any]) -> None:
    arguments["rank"] += arguments["rank"] == 3


def pairs_of_tokens(arguments: dict[str, Any]) -> None:
    arguments["interleave"] = 2


def whole_pages(arguments: dict[str, Any]) -> None:
    arguments["interleave"] = 64


def half_the_shards(arguments: dict[str, Any]) -> None:
    arguments["kv_shards"] = max(1, arguments["kv_shards"] // 2)


def twice_the_shards(arguments: dict[str, Any]) -> None:
    arguments["kv_shards"] *= 2


def next_token(arguments: dict[str, Any]) -> None:
    arguments["positions"] = arguments["positions"] + 1


def next_block(arguments: dict[str, Any]) -> None:
    # Another name for a block is as good as the first one as long as all of a rank use it. Pages go by the row itself.
    arguments["block_ids"] = [1 + block_id % 19 for block_id in arguments["block_ids"]]


ALWAYS = [
    next_rank,
    next_rank_on_rank_3,
    pairs_of_tokens,
    whole_pages,
    half_the_shards,
    twice_the_shards,
    next_token,
]


@pytest.mark.parametrize("change", ALWAYS)
@pytest.mark.parametrize("shards", [8, 4, 1])
def test_a_wrong_slot_mapping_is_found(
    monkeypatch: pytest.MonkeyPatch, shards: int, change: Callable[[dict[str, Any]], None]
) -> None:
    patch_mapping(monkeypatch, change)
    with pytest.raises(WrongPageError, match=r"^group \d"):
        demo(shards)


@pytest.mark.parametrize("change", [*ALWAYS, next_block])
@pytest.mark.parametrize("shards", [8, 4, 1])
def test_a_slot_mapping_that_finds_other_slots_than_were_written_is_found(
    monkeypatch: pytest.MonkeyPatch, shards: int, change: Callable[[dict[str, Any]], None]
) -> None:
    ranks = small_ranks(shards)
    patch_mapping(monkeypatch, change)
    with wrong_page(words="the slot mapping of tokens ["):
        play(shards, ranks, ROUNDS)


@pytest.mark.parametrize("shards", [4, 2, 1])
def test_a_wrong_slot_mapping_of_the_indexer_alone_is_found(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    ranks = small_ranks(shards)

    def next_token_of_the_indexer(arguments: dict[str, Any]) -> None:
        if arguments["block_size"] == 512 // shards:
            next_token(arguments)

    patch_mapping(monkeypatch, next_token_of_the_indexer)
    with wrong_page(1, words="the slot mapping of tokens ["):
        play(shards, ranks, ROUNDS)


@pytest.mark.parametrize("shards", [4, 1])
def test_kernel_pages_in_another_order_than_slots_are_found(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Written and read alike, so that only the slot mapping tells."""

    def backwards(block_ids: list[int], *, block_size: int, kernel_block_size: int) -> Any:
        pages = kernel_block_ids(block_ids, block_size=block_size, kernel_block_size=kernel_block_size)
        return pages.reshape(len(block_ids), -1)[:, ::-1].reshape(-1).copy()

    monkeypatch.setattr(fingerprints, "kernel_block_ids", backwards)
    with wrong_page(1, words="the slot mapping of tokens ["):
        demo(shards)


@pytest.mark.parametrize("shards", [4, 1])
def test_kernel_pages_of_another_block_are_found(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    """Page b + j for block b, right for the main group only, so that the indexer's blocks overlap."""

    def overlapping(block_ids: list[int], *, block_size: int, kernel_block_size: int) -> Any:
        pages = kernel_block_ids(block_ids, block_size=block_size, kernel_block_size=kernel_block_size)
        per_block = block_size // kernel_block_size
        return pages - [(per_block - 1) * block_id for block_id in block_ids for _ in range(per_block)]

    monkeypatch.setattr(fingerprints, "kernel_block_ids", overlapping)
    with wrong_page(1):
        demo(shards)


@pytest.mark.parametrize("shards", [4, 1])
def test_groups_that_share_memory_are_found(monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    class Overlapping(CachePool):
        """A pool that puts every group at its beginning."""

        def group(self, group_id: Any) -> Any:
            view = super().group(group_id)
            return self.backing.as_strided(view.shape, view.stride(), 0)

    monkeypatch.setattr(fingerprints, "CachePool", Overlapping)
    with wrong_page(0):
        demo(shards)


def test_layers_that_share_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overlapping(CachePool):
        """A pool whose layers begin a block early, where the last block of the layer before lies."""

        def group(self, group_id: Any) -> Any:
            view = super().group(group_id)
            layer, block, byte = view.stride()
            return self.backing.as_strided(view.shape, (layer - 2 * block, block, byte), view.storage_offset())

    monkeypatch.setattr(fingerprints, "CachePool", Overlapping)
    with wrong_page(0):
        demo(8)


def test_ranks_that_share_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CachePool] = []

    class Shared(CachePool):
        """A pool in the memory of the first."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, backing=made[0].backing if made else None)
            made.append(self)

    monkeypatch.setattr(fingerprints, "CachePool", Shared)
    with wrong_page(0):
        demo(8)


def test_shrunk_groups_keep_all_but_their_bytes() -> None:
    groups = [
        GroupSpec("mla", 64, [LayerSpec("a", 64 * 656), LayerSpec("b", 64 * 132)], kv_shards=8),
        GroupSpec("mla", 512, [LayerSpec("c", 512 * 132)], kv_shards=1),
    ]
    assert shrunk(groups) == [
        GroupSpec("mla", 64, [LayerSpec("a", 64), LayerSpec("b", 64)], kv_shards=8),
        GroupSpec("mla", 512, [LayerSpec("c", 512)], kv_shards=1),
    ]


@pytest.mark.parametrize(("block_size", "ranks", "span"), [(64, 4, 256), (128, 8, 1024), (512, 2, 1024)])
def test_blocks_of_another_span_than_the_trace_s_are_refused(block_size: int, ranks: int, span: int) -> None:
    groups = [GroupSpec("mla", block_size, [LayerSpec("layer", block_size)], kv_shards=ranks)]
    with pytest.raises(ConfigError, match=rf"^group 0 spans {span} tokens per block, a trace's blocks 512$"):
        FingerprintedRanks(groups, num_blocks=4, dcp_world_size=ranks)
