"""The pool of host rows: sizes, places, and everything that it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from lockstep_kv import ArgumentTypeError, ConfigError, LockstepKVError
from lockstep_kv.offload import HostPool, host_pool

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("row_bytes", "stride"), [(1, 16), (16, 16), (17, 32), (4096, 4096), (5000, 5008)])
@pytest.mark.parametrize("alignment", [16, 64, 4096, 1 << 16])
def test_rows_are_aligned_and_apart(row_bytes: int, stride: int, alignment: int) -> None:
    pool = HostPool(stride * 7 + stride - 1, row_bytes, pinned=False, alignment=alignment)
    assert (pool.num_rows, pool.row_bytes, pool.row_stride, pool.pinned) == (7, row_bytes, stride, False)
    assert (pool.memory.numel(), pool.memory.dtype) == (7 * stride, torch.uint8)
    assert pool.memory.data_ptr() % alignment == 0
    assert pool.memory.count_nonzero() == 0
    for index in range(7):
        row = pool.row(index)
        assert (row.shape, row.dtype, row.is_contiguous()) == ((row_bytes,), torch.uint8, True)
        assert row.data_ptr() == pool.memory.data_ptr() + index * stride
        row.fill_(index + 1)
    for index in range(7):
        assert (pool.row(index) == index + 1).all()
    pool.close()


def test_a_closed_pool_has_no_rows() -> None:
    pool = HostPool(64, 16, pinned=False)
    kept = pool.row(1)
    kept.fill_(3)
    pool.close()
    pool.close()
    assert (kept == 3).all()
    with pytest.raises(LockstepKVError, match="the host pool is closed"):
        pool.row(0)
    with pytest.raises(LockstepKVError, match="the host pool is closed"):
        _ = pool.memory


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 16), "num_bytes must be between 1 and 9223372036854775807, got 0"),
        ((-1, 16), "num_bytes must be between 1 and 9223372036854775807, got -1"),
        ((2**63, 16), "num_bytes must be between 1 and 9223372036854775807, got 9223372036854775808"),
        ((64, 0), "row_bytes must be between 1 and 9223372036854775791, got 0"),
        ((64, -16), "row_bytes must be between 1 and 9223372036854775791, got -16"),
        ((31, 17), "num_bytes must hold one row of 32 bytes, got 31"),
        ((64, 16, 0), "alignment must be between 16 and 1073741824, got 0"),
        ((64, 16, 8), "alignment must be between 16 and 1073741824, got 8"),
        ((64, 16, 48), "alignment must be a power of two, got 48"),
    ],
)
def test_bad_sizes(arguments: tuple[int, ...], message: str) -> None:
    num_bytes, row_bytes, *alignment = arguments
    options = {"alignment": alignment[0]} if alignment else {}
    with pytest.raises(ConfigError) as caught:
        HostPool(num_bytes, row_bytes, pinned=False, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_bytes": 64.0}, "num_bytes must be an int, got float 64.0"),
        ({"num_bytes": True}, "num_bytes must be an int, got bool True"),
        ({"num_bytes": "64"}, "num_bytes must be an int, got str '64'"),
        ({"row_bytes": None}, "row_bytes must be an int, got NoneType None"),
        ({"alignment": 16.0}, "alignment must be an int, got float 16.0"),
        ({"pinned": 1}, "pinned must be a bool, got int"),
    ],
)
def test_wrong_types(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        HostPool(**{"num_bytes": 64, "row_bytes": 16, "pinned": False, **arguments})
    assert str(caught.value) == message


def test_more_than_the_host_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_bytes must fit in the host's free memory of \d+ bytes, got 9007199"):
        HostPool(2**53, 16, pinned=False)


def test_what_the_system_refuses_to_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "host_bytes_left", lambda: None)
    for size in (2**62, 2**63 - 1):
        with pytest.raises(ConfigError, match=r"^num_bytes: the system refuses to map \d+ bytes: [^\n]+$"):
            HostPool(size, 16, pinned=False)


def test_a_container_s_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    1000 kB\n")
    monkeypatch.setattr(host_pool, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_pool, "_CGROUP", tmp_path)
    assert host_pool.host_bytes_left() == 1_024_000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_pool.host_bytes_left() == 1_024_000
    (tmp_path / "memory.max").write_text("500000\n")
    (tmp_path / "memory.current").write_text("499000\n")
    assert host_pool.host_bytes_left() == 1000
    with pytest.raises(ConfigError, match="num_bytes must fit in the host's free memory of 1000 bytes, got 1001"):
        HostPool(1001, 16, pinned=False)
    HostPool(1000, 16, pinned=False).close()
    (tmp_path / "memory.current").write_text("600000\n")
    assert host_pool.host_bytes_left() == 0
    (tmp_path / "meminfo").write_text("nothing of the kind\n")
    (tmp_path / "memory.max").unlink()
    assert host_pool.host_bytes_left() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_page_locked_memory_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="pinned must be False where there is no CUDA device, got True"):
        HostPool(64, 16, pinned=True)
