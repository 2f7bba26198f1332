"""Which way a job is copied: measured once per machine, kept in a file, chosen by the job most like it."""

from __future__ import annotations

import json
import logging
import math
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from lockstep_kv import ConfigError
from lockstep_kv.offload.path_cache import PathCache, default_cache_file
from lockstep_kv.offload.path_choice import MEASURED_JOBS, JobShape, PathChooser
from lockstep_kv.offload.transfers import Direction

if TYPE_CHECKING:
    from pathlib import Path

PATHS = ("dma", "kernel")


class Clock:
    """Kernels take a time per byte, DMA a time per piece; stores by kernels are slow. Counts what was measured."""

    def __init__(self, broken: str = "") -> None:
        self.calls: list[tuple[str, JobShape]] = []
        self.broken = broken

    def __call__(self, path: str, shape: JobShape) -> float:
        self.calls.append((path, shape))
        if path == self.broken:
            raise RuntimeError(f"{path}\ndoes not work")
        per_byte = 2e-10 if shape.direction is Direction.LOAD else 1e-6
        if path == "kernel":
            return shape.piece_bytes * shape.num_pieces * per_byte
        return shape.num_pieces * 5e-6


def chooser(measure: Clock, cache: PathCache | None = None, machine: str = "A", paths: Any = PATHS) -> PathChooser:
    return PathChooser(paths, measure, machine=machine, cache=cache)


@pytest.fixture
def cache(tmp_path: Path) -> PathCache:
    return PathCache(tmp_path / "deep" / "paths.json")


def test_the_faster_path_of_the_nearest_job_is_chosen() -> None:
    clock = Clock()
    choice = chooser(clock)
    assert clock.calls == [(path, shape) for path in PATHS for shape in MEASURED_JOBS]
    # Kernels win up to 25,000 bytes a piece, between the points of 8 and of 64 KiB: the border is at 22.6 KiB.
    for size, path in ((1, "kernel"), (1024, "kernel"), (22_000, "kernel"), (24_000, "dma"), (1 << 24, "dma")):
        for count in (1, 10, 500, 100_000):
            assert choice.choose(Direction.LOAD, count, size * count) == path, (size, count)
    assert choice.choose(Direction.STORE, 10, 10_240) == "dma"


def test_every_measured_job_is_its_own_nearest() -> None:
    def measure(path: str, shape: JobShape) -> float:
        # Alternate between the paths, so that a neighbour's answer would be wrong.
        kernel = (int(math.log2(shape.piece_bytes)) // 3 + int(math.log2(shape.num_pieces)) // 3) % 2
        return float((path == "kernel") != kernel)

    choice = PathChooser(PATHS, measure, machine="A", cache=None)
    answers = {
        shape: choice.choose(*shape[:1], shape.num_pieces, shape.piece_bytes * shape.num_pieces)
        for shape in MEASURED_JOBS
    }
    assert set(answers.values()) == set(PATHS)
    for shape, path in answers.items():
        assert measure(path, shape) == 0, shape


def test_one_path_needs_no_measuring() -> None:
    clock = Clock()
    assert chooser(clock, paths=["dma"]).choose(Direction.LOAD, 1, 1) == "dma"
    assert clock.calls == []
    with pytest.raises(ConfigError, match="paths must name a way to copy, got none"):
        chooser(clock, paths=[])


def test_measurements_are_kept_by_machine(cache: PathCache) -> None:
    first, second, other, again = Clock(), Clock(), Clock(), Clock()
    one = chooser(first, cache)
    two = chooser(second, PathCache(cache.file))
    chooser(other, cache, "B")
    chooser(again, cache, "A")
    assert [len(clock.calls) for clock in (first, second, other, again)] == [2 * len(MEASURED_JOBS), 0] * 2
    for size in (100, 100_000):
        assert one.choose(Direction.LOAD, 10, size) == two.choose(Direction.LOAD, 10, size)
    assert set(json.loads(cache.file.read_text())["machines"]) == {"A", "B"}
    assert [path.name for path in cache.file.parent.iterdir()] == ["paths.json"]
    # Other paths than those in the file are measured.
    more = Clock()
    assert chooser(more, cache, paths=("dma", "kernel", "third")).paths == ("dma", "kernel", "third")
    assert len(more.calls) == 3 * len(MEASURED_JOBS)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff\xfe",
        b'{"machines": {}}',
        b'{"format": 1}',
        b'{"format": 1, "machines": 3}',
        b'{"format": 1, "machines": {"A": 3}}',
        b'{"format": 1, "machines": {"A": [[1, 2]]}}',
        b'{"format": 1, "machines": {"A": [["load", 1024, 8, {"dma": 1.0, "kernel": 1.0}]]}}',
        b'{"format": 1, "machines": {"A": [["up", 1024, 8, {"dma": 1.0, "kernel": 1.0}]]}}',
        b'{"format": 1, "machines": {"A": [["load", [], 8, {}]]}}',
    ],
)
def test_a_broken_file_is_replaced(cache: PathCache, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    cache.file.parent.mkdir()
    cache.file.write_bytes(content)
    clock = Clock()
    with caplog.at_level(logging.WARNING, "lockstep_kv.offload"):
        chooser(clock, cache)
    assert len(clock.calls) == 2 * len(MEASURED_JOBS)
    (record,) = caplog.records
    assert "is not used" in record.getMessage()
    assert "\n" not in record.getMessage()
    unused = Clock()
    chooser(unused, cache)
    assert unused.calls == []


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf, "1", None, True])
def test_seconds_that_are_none_are_measured_again(cache: PathCache, wrong: Any) -> None:
    chooser(Clock(), cache)
    content = json.loads(cache.file.read_text())
    content["machines"]["A"][5][3]["kernel"] = wrong
    cache.file.write_text(json.dumps(content))
    clock = Clock()
    chooser(clock, cache)
    assert len(clock.calls) == 2 * len(MEASURED_JOBS)


def test_a_file_of_another_format_is_replaced(cache: PathCache) -> None:
    cache.file.parent.mkdir()
    cache.file.write_text('{"format": 2, "machines": {}}')
    chooser(Clock(), cache)
    assert json.loads(cache.file.read_text())["format"] == 1


def test_a_file_that_cannot_be_written_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    clock = Clock()
    with caplog.at_level(logging.WARNING, "lockstep_kv.offload"):
        choice = chooser(clock, PathCache(tmp_path / "file" / "paths.json"))
    assert choice.choose(Direction.LOAD, 1, 100) == "kernel"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"{tmp_path / 'file' / 'paths.json'} is not used",
        f"cannot write {tmp_path / 'file' / 'paths.json'}",
    ]


def test_a_path_that_does_not_work_is_left_out(cache: PathCache, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lockstep_kv.offload"):
        choice = chooser(Clock("kernel"), cache)
    assert choice.paths == ("dma",)
    assert choice.choose(Direction.LOAD, 1, 100) == "dma"
    assert [record.getMessage() for record in caplog.records] == [
        "copies by kernel are not used, measuring them failed: RuntimeError: kernel does not work"
    ]
    # It may work next time.
    assert not cache.file.exists()


def test_without_any_measurement_the_first_path_is_taken(cache: PathCache, caplog: pytest.LogCaptureFixture) -> None:
    def measure(path: str, shape: JobShape) -> float:
        raise MemoryError(f"{path} {shape}")

    with caplog.at_level(logging.WARNING, "lockstep_kv.offload"):
        choice = PathChooser(PATHS, measure, machine="A", cache=cache)
    assert choice.choose(Direction.LOAD, 1, 100) == "dma"
    assert choice.paths == ("dma",)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "copies by dma are not used",
        "copies by kernel are not used",
        "copies are by dma",
    ]
    assert not cache.file.exists()


def test_the_file_is_in_the_user_s_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_file() == tmp_path / "lockstep-kv" / "copy-paths.json"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert default_cache_file() == tmp_path / "home" / ".cache" / "lockstep-kv" / "copy-paths.json"
