"""Views of one allocation: shapes, places, and writes that touch only what they should."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep_kv import ArgumentTypeError, ConfigError, GroupSpec, LayerSpec, plan_layout

torch = pytest.importorskip("torch")

from lockstep_kv.block_table import slot_mapping
from lockstep_kv.tensors import POISON, CachePool, _runs


def lockstep_pool(num_blocks: int = 3, **options: Any) -> CachePool:
    """Pool one main layer of 64 x 328 bfloat16 and one replicated indexer layer of 256 x 132 bfloat16."""
    groups = [
        GroupSpec("mla", 64, [LayerSpec("main", 64 * 328 * 2)], kv_shards=4),
        GroupSpec("mla", 256, [LayerSpec("indexer", 256 * 132 * 2)], kv_shards=1),
    ]
    layout = plan_layout(groups, dcp_world_size=4, num_blocks=num_blocks, max_model_len=256)
    return CachePool(layout, groups, **options)


def small_pool(**options: Any) -> CachePool:
    """Pool two main layers and a draft's indexer in one group, and two replicated indexers, in lockstep."""
    main = [LayerSpec("a", 4 * 6), LayerSpec("b", 4 * 6), LayerSpec("draft", 4 * 2)]
    groups = [
        GroupSpec("mla", 4, main, kv_shards=2),
        GroupSpec("mla", 8, [LayerSpec("x", 8 * 2), LayerSpec("y", 8 * 2)], kv_shards=1),
    ]
    layout = plan_layout(groups, dcp_world_size=2, num_blocks=5, max_model_len=32)
    return CachePool(layout, groups, **options)


def two_set_pool() -> CachePool:
    """Pool two sets of unequal pages, which lie block by block."""
    groups = [
        GroupSpec("full", 4, [LayerSpec("a", 16), LayerSpec("b", 16)], kv_shards=1),
        GroupSpec("full", 8, [LayerSpec("x", 8), LayerSpec("y", 8), LayerSpec("z", 8)], kv_shards=1),
    ]
    layout = plan_layout(groups, dcp_world_size=1, num_blocks=9, max_model_len=16)
    return CachePool(layout, groups)


def test_lockstep_pages_are_contiguous_kernel_pages() -> None:
    pool = lockstep_pool()
    main = pool.kernel_pages("main", 64, torch.bfloat16)
    indexer = pool.kernel_pages("indexer", 64, torch.bfloat16)
    assert (main.shape, main.is_contiguous()) == ((3, 64, 328), True)
    assert (indexer.shape, indexer.is_contiguous()) == ((12, 64, 132), True)
    assert {tensor.block_stride - tensor.page for tensor in pool.layout.tensors} == {0}
    assert pool.layer("indexer", torch.bfloat16).shape == (3, 256, 132)
    assert pool.layer("indexer").shape == (3, 256, 264)
    # Manager block 2 is kernel pages 8 to 11.
    pool.layer("indexer", torch.bfloat16)[2, 64:128] = 7
    assert (indexer[9] == 7).all()
    assert indexer.count_nonzero() == 64 * 132
    assert main.count_nonzero() == 0


def test_a_pool_starts_as_zeros_of_the_planned_size() -> None:
    pool = lockstep_pool()
    assert (pool.backing.numel(), pool.num_blocks) == (pool.layout.total_bytes, 3)
    assert pool.backing.count_nonzero() == 0


@pytest.mark.parametrize("make", [lockstep_pool, small_pool])
def test_layers_of_a_set_share_no_byte(make: Callable[[], CachePool]) -> None:
    pool = make()
    for number, tensor in enumerate(pool.layout.tensors, start=1):
        pool.layer(tensor.layer).fill_(number)
    for number, tensor in enumerate(pool.layout.tensors, start=1):
        assert (pool.layer(tensor.layer) == number).all()
    assert pool.backing.count_nonzero() == pool.layout.total_bytes


def test_sets_share_bytes_block_by_block() -> None:
    pool = two_set_pool()
    pool.layer("a")[3] = 1
    pool.layer("b")[3] = 2
    assert (pool.layer("x")[3] == 1).all()
    assert (pool.layer("z")[3] == 2).all()
    for name in "xyz":
        others = [block for block in range(9) if block != 3]
        assert pool.layer(name)[others].count_nonzero() == 0


def test_pages_of_a_shared_block_are_strided() -> None:
    pool = two_set_pool()
    layer = pool.layer("b", torch.int16)
    assert (layer.shape, layer.stride(), layer.storage_offset()) == ((9, 4, 2), (16, 2, 1), 8)
    assert pool.kernel_pages("b", 4, torch.int16).stride() == layer.stride()
    with pytest.raises(
        ConfigError, match="kernel_block_size must be 4 for layer 'b', got 2: its pages of 16 bytes lie 32"
    ):
        pool.kernel_pages("b", 2)
    group = pool.group(1)
    assert (group.shape, group.stride()) == ((3, 9, 8), (8, 32, 1))


def test_a_group_of_one_page_size_is_one_view() -> None:
    pool = small_pool()
    indexers = pool.group(1)
    assert (indexers.shape, indexers.is_contiguous()) == ((2, 5, 16), True)
    indexers[1, 2] = 9
    assert (pool.layer("y")[2] == 9).all()
    assert pool.backing.count_nonzero() == 16
    with pytest.raises(ConfigError, match=r"group_id 0 has layers with pages of \[8, 24\] bytes"):
        pool.group(0)
    assert lockstep_pool().group(0).shape == (1, 3, 64 * 328 * 2)


@pytest.mark.parametrize(
    "block_ids", [[2, 4], (4, 2, 4), torch.tensor([2, 4]), torch.tensor([4, 2], dtype=torch.int32)]
)
@pytest.mark.parametrize("group_ids", [None, [0], [1], [0, 1], []])
def test_zeroing_touches_these_blocks_only(block_ids: Any, group_ids: list[int] | None) -> None:
    pool = small_pool()
    pool.backing.fill_(1)
    pool.zero_blocks(block_ids, group_ids)
    chosen = [0, 1] if group_ids is None else group_ids
    for tensor in pool.layout.tensors:
        layer = pool.layer(tensor.layer)
        zero = [block for block in range(5) if layer[block].count_nonzero() == 0]
        assert zero == ([2, 4] if tensor.group_id in chosen else [])
        assert (layer[[0, 1, 3]] == 1).all()


def test_uneven_distances_between_layers_are_no_single_view() -> None:
    layers: list[Any] = [SimpleNamespace(offset=offset, page=8, block_stride=8) for offset in (0, 24, 48, 80)]
    assert [(run.offset, run.layers, run.layer_stride) for run in _runs(layers)] == [(0, 3, 24), (80, 1, 8)]


def test_poison_shows_until_something_is_written() -> None:
    pool = small_pool()
    pool.poison_blocks([1, 3])
    assert (pool.layer("x")[1] == 0xDB).all()
    assert pool.is_poisoned([1, 2, 3]) == [True, False, True]
    slots = slot_mapping([8, 9, 10], [1, 3], block_size=4, kernel_block_size=4, kv_shards=2, rank=1)
    flat = pool.kernel_pages("b", 4).view(-1, 6)
    flat[slots[slots >= 0]] = 5
    assert pool.is_poisoned([1, 3]) == [True, False]
    assert pool.is_poisoned([1, 3], [1]) == [True, True]
    assert pool.is_poisoned([3], [0]) == [False]
    assert pool.is_poisoned([]) == []
    pool.poison_blocks([2], [1], pattern=0x11)
    assert pool.is_poisoned([2], [1], pattern=0x11) == [True]
    assert pool.is_poisoned([2], [1]) == [False]
    assert pool.is_poisoned([2], pattern=0x11) == [False]


@pytest.mark.parametrize("make", [small_pool, two_set_pool])
def test_poison_covers_every_byte_of_a_block(make: Callable[[], CachePool]) -> None:
    pool = make()
    pool.poison_blocks(range(1, pool.num_blocks))
    assert pool.backing.count_nonzero() == (pool.num_blocks - 1) * pool.layout.bytes_per_block
    assert all(pool.is_poisoned(range(1, pool.num_blocks)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.zero_blocks([1, 0]), "block_ids must be between 1 and 4, got 0"),
        (lambda pool: pool.zero_blocks([1, 5]), "block_ids must be between 1 and 4, got 5"),
        (lambda pool: pool.zero_blocks([1, -1]), "block_ids must be between 1 and 4, got -1"),
        (lambda pool: pool.zero_blocks(torch.tensor([0])), "block_ids must be between 1 and 4, got 0"),
        (lambda pool: pool.zero_blocks([[1]]), "block_ids must be a flat sequence, got shape (1, 1)"),
        (lambda pool: pool.zero_blocks(1), "block_ids must be a flat sequence, got shape ()"),
        (lambda pool: pool.zero_blocks([2**63]), "block_ids must fit in 64 bits, got 9223372036854775808"),
        (lambda pool: pool.zero_blocks([1], 1), "group_ids must be a flat sequence, got shape ()"),
        (lambda pool: pool.zero_blocks([1], [0, 2]), "group_ids must be between 0 and 1, got 2"),
        (lambda pool: pool.poison_blocks([1], pattern=256), "pattern must be between 0 and 255, got 256"),
        (lambda pool: pool.is_poisoned([0]), "block_ids must be between 1 and 4, got 0"),
        (lambda pool: pool.layer("c"), "name 'c' is not a layer of this layout"),
        (
            lambda pool: pool.layer("a", torch.float32),
            "layer 'a' has records of 6 bytes: no whole torch.float32 of 4 bytes",
        ),
        (lambda pool: pool.kernel_pages("x", 3), "kernel_block_size must divide block_size 8 of layer 'x', got 3"),
        (lambda pool: pool.group(2), "group_id must be between 0 and 1, got 2"),
    ],
)
def test_bad_values_change_nothing(call: Callable[[CachePool], object], message: str) -> None:
    pool = small_pool()
    pool.backing.fill_(1)
    with pytest.raises(ConfigError) as caught:
        call(pool)
    assert str(caught.value) == message
    assert (pool.backing == 1).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool: pool.zero_blocks([True]), "block_ids must be ints, got list"),
        (lambda pool: pool.zero_blocks([1.0]), "block_ids must be ints, got list"),
        (lambda pool: pool.zero_blocks(torch.tensor([1.0])), "block_ids must be ints, got a tensor of torch.float32"),
        (lambda pool: pool.zero_blocks([1], ["0"]), "group_ids must be ints, got list"),
        (lambda pool: pool.poison_blocks([1], pattern=True), "pattern must be an int, got bool True"),
        (lambda pool: pool.layer(3), "name must be a str, got int"),
        (lambda pool: pool.layer("a", "int8"), "dtype must be a torch.dtype, got str"),
        (lambda pool: pool.kernel_pages("x", 4.0), "kernel_block_size must be an int, got float 4.0"),
        (lambda pool: pool.group(False), "group_id must be an int, got bool False"),
    ],
)
def test_wrong_types(call: Callable[[CachePool], object], message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        call(small_pool())
    assert str(caught.value).startswith(message)


def test_pages_that_hold_no_equal_records() -> None:
    groups = [GroupSpec("mla", 4, [LayerSpec("odd", 10)])]
    pool = CachePool(plan_layout(groups, dcp_world_size=1, num_blocks=3, max_model_len=4), groups)
    with pytest.raises(ConfigError, match="pages of 10 bytes do not hold 4 equal records"):
        pool.layer("odd")
    assert pool.group(0).shape == (1, 3, 10)


def test_a_layer_may_start_where_its_elements_cannot() -> None:
    groups = [GroupSpec("mla", 1, [LayerSpec("byte", 1), LayerSpec("wide", 4)])]
    pool = CachePool(plan_layout(groups, dcp_world_size=1, num_blocks=3, max_model_len=2), groups)
    with pytest.raises(ConfigError, match=r"layer 'wide' has a first page at 3 bytes: no whole torch.int32"):
        pool.layer("wide", torch.int32)
    assert pool.layer("wide").shape == (3, 1, 4)


def test_groups_of_another_layout_are_refused() -> None:
    pool = small_pool()
    for groups in (pool.groups[:1], pool.groups[::-1], lockstep_pool().groups, (*pool.groups, pool.groups[0])):
        with pytest.raises(ConfigError, match="groups must be those that the layout was planned for"):
            CachePool(pool.layout, groups)


def test_memory_may_come_from_elsewhere() -> None:
    size = small_pool().layout.total_bytes
    memory = torch.zeros(size + 10, dtype=torch.uint8)
    pool = small_pool(backing=memory[2:])
    pool.poison_blocks(range(1, 5))
    assert memory[:2].count_nonzero() == 0
    assert memory[2 + size :].count_nonzero() == 0
    assert pool.layer("x", torch.int16).shape == (5, 8, 1)
    with pytest.raises(ConfigError, match=r"layer 'x' has memory at 1 bytes: no whole torch\.int16"):
        small_pool(backing=memory[1:]).layer("x", torch.int16)
    with pytest.raises(ConfigError, match=f"backing must hold {size} bytes, got {size - 1}"):
        small_pool(backing=memory[: size - 1])
    for wrong in (memory.view(1, -1), memory[::2], torch.zeros(size)):
        with pytest.raises(ConfigError, match="backing must be a contiguous 1-D uint8 tensor, got torch"):
            small_pool(backing=wrong)


def test_offsets_beyond_32_bits() -> None:
    # Memory that is never touched is never backed by pages, so this needs almost none.
    num_blocks = 52_000
    size = num_blocks * (64 * 328 * 2 + 256 * 132 * 2)
    assert size > 2**32
    pool = lockstep_pool(num_blocks, backing=torch.empty(size, dtype=torch.uint8))
    last = num_blocks - 1
    pool.zero_blocks([last - 1, last])
    pool.poison_blocks([last])
    assert pool.is_poisoned([last - 1, last]) == [False, True]
    assert pool.backing[-1] == POISON
    assert (pool.kernel_pages("indexer", 64)[4 * last] == POISON).all()
    assert (pool.kernel_pages("indexer", 64)[4 * last - 1] == 0).all()


def test_other_devices_keep_the_geometry() -> None:
    pool = lockstep_pool(2**20, device="meta")
    assert pool.backing.device.type == "meta"
    indexer = pool.kernel_pages("indexer", 64, torch.bfloat16)
    assert (indexer.shape, indexer.is_contiguous()) == ((2**22, 64, 132), True)
    assert indexer.storage_offset() == 2**20 * 64 * 328
    pool.zero_blocks([1, 2**20 - 1])
