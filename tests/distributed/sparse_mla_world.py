"""Start the processes of a DCP group, run all modes in them, and bring back what each rank has seen."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from sparse_mla_modes import MODES, Mode
from sparse_mla_rank import Rank, row_slices
from sparse_mla_scheduler import Admission, Plan, Scheduler
from sparse_mla_wire import Sent, Wire
from torch.multiprocessing.spawn import ProcessException, spawn

__all__ = ["Computed", "Decisions", "Held", "RankRun", "Run", "run_world"]

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Computed:
    """What one work gave. logits: shape (n, vocab). chosen: shape (layers, n, top_k)."""

    request: str
    start: int
    logits: torch.Tensor
    chosen: torch.Tensor


@dataclass(frozen=True)
class Held:
    """What one rank's pages held of a request when it ended.

    positions: shape (held,). records: shape (layers, held, record).
    """

    request: str
    kind: str
    positions: torch.Tensor
    records: torch.Tensor


@dataclass
class RankRun:
    """What one rank has computed, held and sent."""

    computed: list[Computed] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    sent: dict[str, Sent] = field(default_factory=dict)


@dataclass
class Decisions:
    """What rank 0 decided. finished: all tokens of every request. free_blocks: in the end."""

    trace: list[Plan]
    admissions: list[Admission]
    preempted: list[str]
    finished: dict[str, tuple[int, ...]]
    stats: dict[str, int]
    lockstep: list[bool]
    free_blocks: int


@dataclass
class Run:
    """One mode on all ranks."""

    mode: Mode
    ranks: list[RankRun]
    decisions: Decisions


def run_world(ranks: int) -> dict[str, Run]:
    """Run all modes of this many ranks, each rank a process of its own, once in a session.

    Returns the runs by the mode's name.
    """
    outcome = _outcome(ranks)
    if isinstance(outcome, ProcessException):
        raise outcome
    return outcome


@cache
def _outcome(ranks: int) -> dict[str, Run] | ProcessException:
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(_main, args=(ranks, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            return error
        found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
        decisions = torch.load(Path(folder) / "decisions.pt", weights_only=False)
    return {
        mode.name: Run(mode, [of_rank[mode.name] for of_rank in found], decisions[mode.name]) for mode in MODES[ranks]
    }


def _main(rank: int, ranks: int, folder: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=_TIMEOUT)
    groups = Wire.of_world().groups
    runs: dict[str, RankRun] = {}
    decisions: dict[str, Decisions] = {}
    for mode in MODES[ranks]:
        wire = Wire(rank, groups)
        scheduler = Scheduler(mode.config()) if rank == 0 else None
        runs[mode.name] = _run_mode(Rank(mode, rank, wire), scheduler)
        if scheduler is not None:
            decisions[mode.name] = _decisions(scheduler)
    torch.save(runs, Path(folder) / f"{rank}.pt")
    if rank == 0:
        torch.save(decisions, Path(folder) / "decisions.pt")
    dist.barrier()
    dist.destroy_process_group()


def _run_mode(rank: Rank, scheduler: Scheduler | None) -> RankRun:
    """Compute step after step as rank 0, which has the scheduler, decides."""
    run = RankRun(sent=rank.wire.sent)
    while (plan := _shared(scheduler.plan() if scheduler else None)) is not None:
        logits, chosen = rank.step(plan)
        sampled: dict[str, int] = {}
        for work, rows in zip(plan.works, row_slices(plan), strict=True):
            run.computed.append(Computed(work.name, work.start, logits[rows], chosen[:, rows]))
            if work.samples:
                sampled[work.name] = int(logits[rows][-1].argmax())
            if work.ends:
                for kind in rank.mode.kinds:
                    positions, records = rank.records(kind, work, work.start + len(work.tokens))
                    run.held.append(Held(work.name, kind.name, positions, records))
        if scheduler is not None:
            scheduler.update(sampled)
    return run


def _shared(plan: Plan | None) -> Plan | None:
    """Rank 0's plan, on every rank."""
    box = [plan]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _decisions(scheduler: Scheduler) -> Decisions:
    coordinator = scheduler.coordinator
    return Decisions(
        trace=scheduler.trace,
        admissions=scheduler.admissions,
        preempted=scheduler.preempted,
        finished=scheduler.finished,
        stats=coordinator.stats(),
        lockstep=[one.is_lockstep for one in coordinator.sets],
        free_blocks=coordinator.num_free_blocks,
    )
