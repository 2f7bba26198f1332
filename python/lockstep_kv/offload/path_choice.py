"""Which way a job is copied: the one that was faster, when measured on this machine, on the job most like it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

from lockstep_kv.errors import ConfigError
from lockstep_kv.offload.transfers import Direction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lockstep_kv.offload.path_cache import PathCache

__all__ = ["MEASURED_JOBS", "JobShape", "PathChooser"]

_logger = logging.getLogger(__name__)

# What is measured: so many bytes per piece, so many pieces, up to so many bytes in all.
_PIECE_BYTES = (1 << 10, 8 << 10, 64 << 10, 512 << 10)
_PIECES = (8, 64, 512, 4096)
_MAX_BYTES = 32 << 20


class JobShape(NamedTuple):
    """What the speed of a copy depends on; `piece_bytes` is the mean where pieces differ."""

    direction: Direction
    piece_bytes: int
    num_pieces: int


MEASURED_JOBS = tuple(
    JobShape(direction, piece_bytes, pieces)
    for direction in Direction
    for piece_bytes in _PIECE_BYTES
    for pieces in _PIECES
    if piece_bytes * pieces <= _MAX_BYTES
)
"""The jobs that are measured."""


class PathChooser:
    """Chooses among `paths`, by name.

    measure: takes a path and a `JobShape`, copies such a job that way and returns the seconds it took. What it raises
        takes the path out of the choice, with one line in the log.
    machine: what the measurements are valid for, the key in the cache.
    cache: where they are kept between processes; None keeps them in memory only.

    Measures at once unless the cache has the measurements or there is one path only. If no path can be measured, the
    first is taken for all jobs. Raises `ConfigError` for no paths.
    """

    def __init__(
        self,
        paths: Sequence[str],
        measure: Callable[[str, JobShape], float],
        *,
        machine: str,
        cache: PathCache | None,
    ) -> None:
        if not paths:
            raise ConfigError("paths must name a way to copy, got none")
        self.paths = tuple(paths)
        self._fastest: dict[JobShape, str] = {}
        if len(self.paths) == 1:
            return
        known = cache.load(machine) if cache is not None else None
        seconds = _from_cache(known, self.paths) if known is not None else None
        if known is not None and seconds is None:
            _logger.warning("what the cache holds on copies for %s is not used: it is of other jobs or broken", machine)
        if seconds is None:
            seconds = self._measured(measure)
            # A path that failed may work next time.
            if cache is not None and len(self.paths) == len(paths):
                cache.save(machine, _to_cache(seconds))
        self._fastest = {shape: min(taken, key=taken.__getitem__) for shape, taken in seconds.items()}

    def choose(self, direction: Direction, num_pieces: int, num_bytes: int) -> str:
        """Return the name of the path for a job of at least one piece."""
        if not self._fastest:
            return self.paths[0]
        # Beyond what is measured, a job takes longer in proportion to its pieces, whichever path it takes.
        num_pieces_at_most = max(1.0, _MAX_BYTES * num_pieces / num_bytes)
        size, count = math.log2(num_bytes / num_pieces), math.log2(min(num_pieces, num_pieces_at_most))

        def distance(shape: JobShape) -> float:
            return math.hypot(math.log2(shape.piece_bytes) - size, math.log2(shape.num_pieces) - count)

        return self._fastest[min((shape for shape in self._fastest if shape.direction is direction), key=distance)]

    def _measured(self, measure: Callable[[str, JobShape], float]) -> dict[JobShape, dict[str, float]]:
        """Measure all paths; leave out those that fail."""
        seconds: dict[JobShape, dict[str, float]] = {shape: {} for shape in MEASURED_JOBS}
        working = []
        for path in self.paths:
            try:
                taken = {shape: measure(path, shape) for shape in MEASURED_JOBS}
            except Exception as error:  # noqa: BLE001 - whatever is wrong with one path, the other may work
                text = " ".join(f"{type(error).__name__}: {error}".split())
                _logger.warning("copies by %s are not used, measuring them failed: %s", path, text)
                continue
            working.append(path)
            for shape, one in taken.items():
                seconds[shape][path] = one
        if not working:
            # No memory to measure with, perhaps. The paths may work all the same.
            self.paths = self.paths[:1]
            _logger.warning("copies are by %s, as nothing could be measured", self.paths[0])
            return {}
        self.paths = tuple(working)
        return seconds


def _to_cache(seconds: dict[JobShape, dict[str, float]]) -> list[object]:
    return [
        [shape.direction.value, shape.piece_bytes, shape.num_pieces, dict(taken)] for shape, taken in seconds.items()
    ]


def _from_cache(known: object, paths: tuple[str, ...]) -> dict[JobShape, dict[str, float]] | None:
    """Read measurements back; None if they are not of exactly these jobs and paths."""
    try:
        seconds = {
            JobShape(Direction(direction), piece_bytes, pieces): dict(taken)
            for direction, piece_bytes, pieces, taken in known  # type: ignore[attr-defined]
        }
    except (TypeError, ValueError, AttributeError):
        return None
    fits = set(seconds) == set(MEASURED_JOBS) and all(
        set(taken) == set(paths) and all(isinstance(one, float) and 0 <= one < math.inf for one in taken.values())
        for taken in seconds.values()
    )
    return seconds if fits else None
