"""What a row holds, what a job may name, and the pieces it is copied in."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from lockstep_kv import ArgumentTypeError, ConfigError
from lockstep_kv.offload import CpuCopyEngine, GpuCopyEngine, HostPool, RowFormat
from lockstep_kv.offload.transfers import Direction, Pieces, plan_transfer

if TYPE_CHECKING:
    from torch import Tensor


def pages(blocks: int = 5, page: int = 8) -> Tensor:
    numbers: Tensor = torch.arange(blocks * page, dtype=torch.uint8)
    return numbers.view(blocks, page)


def two_sets() -> RowFormat:
    return RowFormat([[pages(), pages(page=3)], [pages(7, 20)]], blocks_per_row=2)


def test_a_row_holds_blocks_of_the_largest_set() -> None:
    row_format = two_sets()
    assert [one.bytes_per_block for one in row_format.sets] == [11, 20]
    assert [one.num_blocks for one in row_format.sets] == [5, 7]
    assert row_format.row_bytes == 48
    assert [layer.row_offset for layer in row_format.sets[0].layers] == [0, 8]
    assert str(row_format.device) == "cpu"


def test_tensors_are_used_in_place() -> None:
    tensor = pages()
    row_format = RowFormat([[tensor]], blocks_per_row=1)
    assert row_format.sets[0].tensors[0].data_ptr() == tensor.data_ptr() == row_format.sets[0].layers[0].address


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([], "sets must hold a set, got none"),
        ([[]], "sets[0] must hold a tensor, got none"),
        ([[pages()], [pages()[0]]], "sets[1][0] must have shape (num_blocks, page), got (8,)"),
        ([[pages().view(5, 2, 4)]], "sets[0][0] must have shape (num_blocks, page), got (5, 2, 4)"),
        ([[pages()[:, :0]]], "sets[0][0] must have shape (num_blocks, page), got (5, 0)"),
        ([[pages(), pages()[:4]]], "sets[0][1] must have 5 blocks as sets[0][0] has, got 4"),
        ([[pages()[:, ::2]]], "sets[0][0] must have contiguous pages, got strides (8, 2) of shape (5, 4)"),
        ([[pages().t()]], "sets[0][0] must have contiguous pages, got strides (1, 8) of shape (8, 5)"),
        (
            [[pages()[:1].expand(5, 8)]],
            "sets[0][0] must have pages that do not overlap, got strides (0, 1) of shape (5, 8)",
        ),
        (
            [[pages().to("meta")]],
            "sets[0][0] must be a plain tensor on a CPU or CUDA device, got torch.strided meta",
        ),
        (
            [[torch.eye(3).to_sparse()]],
            "sets[0][0] must be a plain tensor on a CPU or CUDA device, got torch.sparse_coo cpu",
        ),
    ],
)
def test_bad_tensors(sets: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RowFormat(sets, blocks_per_row=1)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("sets", "blocks_per_row", "message"),
    [
        (pages(), 1, "sets must be a list of lists of tensors, got Tensor"),
        ([pages()], 1, "sets[0] must be a list of tensors, got Tensor"),
        ([[pages().numpy()]], 1, "sets[0][0] must be a tensor, got ndarray"),
        ([[pages()]], 1.0, "blocks_per_row must be an int, got float 1.0"),
    ],
)
def test_wrong_types_of_tensors(sets: Any, blocks_per_row: Any, message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        RowFormat(sets, blocks_per_row=blocks_per_row)
    assert str(caught.value) == message


def test_a_row_holds_at_least_one_block() -> None:
    with pytest.raises(ConfigError, match="blocks_per_row must be between 1 and 2147483647, got 0"):
        RowFormat([[pages()]], blocks_per_row=0)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ((2, [1], [0], [0]), "set_id must be between 0 and 1, got 2"),
        ((-1, [1], [0], [0]), "set_id must be between 0 and 1, got -1"),
        ((0, [1, 0], [0, 1], [0, 0]), "blocks must be between 1 and 4, got 0"),
        ((0, [1, -2], [0, 1], [0, 0]), "blocks must be between 1 and 4, got -2"),
        ((0, [5], [0], [0]), "blocks must be between 1 and 4, got 5"),
        ((1, [7], [0], [0]), "blocks must be between 1 and 6, got 7"),
        ((0, [1], [4], [0]), "rows must be between 0 and 3, got 4"),
        ((0, [1], [-1], [0]), "rows must be between 0 and 3, got -1"),
        ((0, [1], [0], [2]), "slots must be between 0 and 1, got 2"),
        ((0, [1], [0], [-1]), "slots must be between 0 and 1, got -1"),
        ((0, [1, 2], [0], [0, 0]), "rows must be as many as blocks, 2, got 1"),
        ((0, [1, 2], [0, 1], [0]), "slots must be as many as blocks, 2, got 1"),
        ((0, [], [0], []), "rows must be as many as blocks, 0, got 1"),
        ((0, [[1]], [0], [0]), "blocks must be a flat sequence, got shape (1, 1)"),
        ((0, [2**63], [0], [0]), "blocks must fit in 64 bits, got 9223372036854775808"),
    ],
)
@pytest.mark.parametrize("way", ["submit_store", "submit_load"])
def test_bad_jobs_copy_nothing(way: str, job: tuple[Any, ...], message: str) -> None:
    refused(way, job, ConfigError, message)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ((0.0, [1], [0], [0]), "set_id must be an int, got float 0.0"),
        ((0, [1.0], [0], [0]), "blocks must be ints, got list [1.0]"),
        ((0, [True], [0], [0]), "blocks must be ints, got list [True]"),
        ((0, [1], ["0"], [0]), "rows must be ints, got list ['0']"),
        ((0, [1], [0], None), "slots must be ints, got NoneType None"),
    ],
)
@pytest.mark.parametrize("way", ["submit_store", "submit_load"])
def test_wrong_types_in_jobs_copy_nothing(way: str, job: tuple[Any, ...], message: str) -> None:
    refused(way, job, ArgumentTypeError, message)


@pytest.mark.parametrize(
    ("way", "job", "message"),
    [
        ("submit_store", (0, [1, 2], [3, 3], [1, 1]), "rows and slots must name a place once, got row 3 slot 1"),
        ("submit_load", (0, [1, 2, 1], [0, 1, 2], [0, 0, 0]), "blocks must name a block once, got 1"),
    ],
)
def test_two_copies_to_one_place_are_refused(way: str, job: tuple[Any, ...], message: str) -> None:
    refused(way, job, ConfigError, message)


def refused(way: str, job: tuple[Any, ...], error: type[Exception], message: str) -> None:
    """Submit a job that is to be refused, and see that nothing has changed and that its id can still be used."""
    row_format = two_sets()
    pool = HostPool(4 * 48, 48, pinned=False)
    pool.memory.fill_(9)
    before = [tensor.clone() for one in row_format.sets for tensor in one.tensors]
    engine = CpuCopyEngine(row_format, pool)
    with pytest.raises(error) as caught:
        getattr(engine, way)(0, *job)
    assert str(caught.value) == message
    assert engine.finished() == []
    assert (pool.memory == 9).all()
    assert all(torch.equal(*pair) for pair in zip(before, [t for s in row_format.sets for t in s.tensors], strict=True))
    engine.submit_store(0, 0, [1], [0], [0])
    engine.shutdown()
    assert [(done.job_id, done.ok) for done in engine.finished()] == [(0, True)]


def test_one_source_may_be_copied_to_several_places() -> None:
    row_format = two_sets()
    engine = CpuCopyEngine(row_format, HostPool(4 * 48, 48, pinned=False))
    engine.submit_store(0, 0, [1, 1], [0, 1], [0, 1])
    engine.submit_load(1, 0, [2, 3], [2, 2], [0, 0])
    engine.shutdown()
    assert [done.ok for done in engine.finished()] == [True, True]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.uint16)])
def test_ids_come_as_any_sequence(kind: Any) -> None:
    pool = HostPool(4 * 48, 48, pinned=False)
    job = plan_transfer(two_sets(), pool, Direction.STORE, 0, kind([4, 2, 3]), kind([3, 0, 0]), kind([1, 1, 0]))
    assert job.blocks.tolist() == [3, 2, 4]
    assert job.host_offsets.tolist() == [0, 11, 3 * 48 + 11]
    assert (job.num_bytes, job.set_id) == (33, 0)


def test_engines_need_rows_that_are_long_enough() -> None:
    with pytest.raises(ConfigError, match="pool must have rows of 48 bytes, got 47"):
        CpuCopyEngine(two_sets(), HostPool(480, 47, pinned=False))
    with pytest.raises(ArgumentTypeError, match="pool must be a HostPool, got int"):
        CpuCopyEngine(two_sets(), 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="row_format must be a RowFormat, got list"):
        CpuCopyEngine([], HostPool(480, 48, pinned=False))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="row_format must have its tensors on a CUDA device, got cpu"):
        GpuCopyEngine(two_sets(), HostPool(480, 48, pinned=False))


def piece_sizes(sets: list[Tensor], blocks: list[int], rows: list[int], slots: list[int]) -> list[int]:
    row_format = RowFormat([sets], blocks_per_row=2)
    pool = HostPool(8 * row_format.row_bytes, row_format.row_bytes, pinned=False)
    transfer = plan_transfer(row_format, pool, Direction.LOAD, 0, blocks, rows, slots)
    pieces = Pieces.of(transfer, row_format.sets[0], pool.memory.data_ptr())
    assert pieces.sizes.sum() == transfer.num_bytes
    return list(pieces.sizes)


def test_neighbours_on_both_sides_are_one_piece() -> None:
    # Rows of 2 slots of 16 bytes: no padding between rows.
    layer = pages(9, 16)
    assert piece_sizes([layer], [3, 4, 5, 6], [1, 1, 2, 2], [0, 1, 0, 1]) == [64]
    # In any order, as long as the two sides agree.
    assert piece_sizes([layer], [6, 3, 5, 4], [2, 1, 2, 1], [1, 0, 0, 1]) == [64]
    # Neighbours on one side only.
    assert piece_sizes([layer], [3, 5, 7], [1, 1, 2], [0, 1, 0]) == [16, 16, 16]
    assert piece_sizes([layer], [3, 4, 5], [1, 3, 5], [0, 0, 0]) == [16, 16, 16]
    assert piece_sizes([layer], [4, 3], [1, 1], [0, 1]) == [16, 16]
    assert piece_sizes([layer], [], [], []) == []
    # Padding at the end of a row divides pieces.
    assert piece_sizes([pages(9, 12)], [3, 4, 5, 6], [1, 1, 2, 2], [0, 1, 0, 1]) == [24, 24]


def test_layers_that_lie_side_by_side_are_one_piece() -> None:
    blocks = pages(9, 24)
    together = [blocks[:, :8], blocks[:, 8:]]
    assert piece_sizes(together, [3, 4, 6], [1, 1, 2], [0, 1, 0]) == [48, 24]
    assert piece_sizes(together[::-1], [3, 4], [1, 1], [0, 1]) == [16, 8, 16, 8]


def test_pieces_stay_inside_an_allocation() -> None:
    """Two allocations may happen to be neighbours, but no single copy may reach from one into the other."""
    memory = mmap.mmap(-1, 4096)
    first, second = (torch.frombuffer(memory, dtype=torch.uint8, count=16, offset=at).view(2, 8) for at in (0, 16))
    whole = torch.frombuffer(memory, dtype=torch.uint8, count=32).view(4, 8)
    assert first.data_ptr() + 16 == second.data_ptr()
    # The last block of the first and the first block of the second: reached by a set of layers one block apart.
    assert piece_sizes([whole[:2], whole[1:3]], [1], [0], [0]) == [16]
    neighbours = [first, torch.frombuffer(memory, dtype=torch.uint8, count=16, offset=8).view(2, 8)]
    assert piece_sizes(neighbours, [1], [0], [0]) == [8, 8]
