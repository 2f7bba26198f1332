"""Leads random lives through vLLM's `KVCacheManager` and ours for as long as wanted: `python -m tests.differential`."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from rounds import Rounds


def main(
    hours: Annotated[float, typer.Option(min=0.0, help="How long to go on.")] = 0.0,
    minutes: Annotated[float, typer.Option(min=0.0, help="How long to go on.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the first round; random if it is not given.")] = None,
) -> None:
    """Lead random lives until the time is over.

    A difference is made small and printed as a test; the exit status is 1 then.
    """
    seconds = hours * 3600 + minutes * 60
    if not seconds:
        raise typer.BadParameter("give --hours, --minutes or both: nothing is led in no time")
    rounds = Rounds(random.randrange(2**32) if seed is None else seed)
    typer.echo(f"seed {rounds.seed}")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns) as progress:
            task = progress.add_task("0 steps", total=seconds)
            started = progress.get_time()

            def tell(so_far: Rounds) -> None:
                description = f"{so_far.lives:,} lives, {so_far.steps:,} steps"
                progress.update(task, completed=progress.get_time() - started, description=description)

            rounds.lead_for(seconds, tell)
    except Exception as error:  # noqa: BLE001 - whatever differs
        typer.echo(f"\nround with seed {rounds.seed}: {type(error).__name__} {error}\n\n{rounds.smallest}")
        raise typer.Exit(1) from None
    typer.echo(f"{rounds.lives:,} lives, {rounds.steps:,} steps, no difference; the next seed is {rounds.seed}")
    for name, count in sorted(rounds.seen.items()):
        typer.echo(f"  {name}: {count:,}")


if __name__ == "__main__":
    typer.run(main)
