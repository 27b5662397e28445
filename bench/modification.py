"""Changing the graph of a running query: what it does to latency, how long it takes, and beside a restart on Spark.

    python -m bench.modification                            smq, q8, spark, convert
    python -m bench.modification --only smq,spark --rounds 3
    python -m bench.modification --quick                    a smoke run: too short to say anything
    python -m bench.modification --from FILE [--from FILE]  tables and pictures of earlier runs, together

A trial is described in `bench.modification_trials`, and what becomes of the raw facts in `bench.modification_report`.
Raw numbers, the machine and pictures go to `bench/results/`, after every single trial.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from bench import migration
from bench import modification_report as report
from bench.command import RESULTS, machine, show_facts
from bench.migration import load, names_of
from bench.modification_trials import Trial
from bench.race import Run, run_contender

PARTS = ("smq", "q8", "spark", "convert")
_LABELS = {
    "smq": "stateful map query",
    "q8": "NEXMark Q8",
    "spark": "plain Spark, stopped and started again",
    "convert": "a state is given another type",
}
_MAIN = "from bench.modification_trials import main; main()"


def save(path: Path, facts: dict[str, Any], runs: Sequence[Run]) -> None:
    """Writes everything that is known so far."""
    migration.save(path, facts, runs, report.judged)


@click.command()
@click.option(
    "--only",
    default=",".join(PARTS),
    show_default=True,
    callback=lambda c, o, v: names_of(c, o, v, PARTS),
    help="The parts to run, with commas.",
)
@click.option("--rate", type=click.FloatRange(40), default=2_000, show_default=True, help="Records per second.")
@click.option("--workers", type=click.IntRange(2), default=2, show_default=True, help="Executors of one core.")
@click.option(
    "--state-mb", type=click.IntRange(1), default=1200, show_default=True, help="The size of the state of `convert`."
)
@click.option(
    "--warm", "warm_s", type=float, default=20.0, show_default=True, help="Seconds of records before anything counts."
)
@click.option("--hold", "hold_s", type=float, default=15.0, show_default=True, help="Seconds of steady records.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Repetitions of every trial.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="A folder for filled stores, those of `bench migration` too; by default they are removed at the end.",
)
@click.option("--timeout", type=float, default=3600.0, show_default=True, help="Seconds that a trial may take.")
@click.option("--quick", is_flag=True, help="A smoke run: too short to say anything.")
@click.option("--name", default=None, help="Of the files in bench/results; the time by default.")
@click.option("--publish", type=click.Path(path_type=Path), default=None, help="Draw the pictures into this folder.")
@click.option(
    "--from",
    "earlier",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Show the files of earlier runs, several together; nothing is measured.",
)
def main(
    only: tuple[str, ...],
    rate: float,
    workers: int,
    state_mb: int,
    warm_s: float,
    hold_s: float,
    rounds: int,
    keep: Path | None,
    timeout: float,
    quick: bool,
    name: str | None,
    publish: Path | None,
    earlier: tuple[Path, ...],
) -> None:
    """Measure what it costs to change the graph of a running query."""
    console = Console(width=None if Console().is_terminal else 160)
    if earlier:
        facts, runs = load(earlier)
        _finish(console, facts, runs, publish or earlier[0].parent, earlier[0].stem)
        return
    if quick:
        rate, workers, state_mb, warm_s, hold_s, rounds = min(rate, 1_000), 2, min(state_mb, 12), 4.0, 4.0, 1
    bases = keep.resolve() if keep is not None else Path(tempfile.mkdtemp(prefix="millstream-bench-filled-"))
    bases.mkdir(parents=True, exist_ok=True)
    trials = [
        Trial(part, _LABELS[part], part, rate, workers, warm_s, hold_s, state_mb * 1_000_000, str(bases))
        for part in PARTS
        if part in only
    ]
    facts = {"benchmark": "modification", "quick": quick, "machine": machine()}
    show_facts(console, facts)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name or time.strftime('modification-%Y%m%d-%H%M%S')}.json"
    runs = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        for round_ in range(rounds):
            for trial in trials:
                label = f"{trial.label}, round {round_ + 1} of {rounds}"
                with console.status(label) as shown:
                    begun = time.monotonic()
                    found = run_contender(
                        trial,
                        timeout,
                        lambda done, of, shown=shown, label=label: shown.update(f"{label}: {done}/{of}"),
                        _MAIN,
                    )
                run: Run = {"asked": _asked(trial), "round": round_, "seconds": time.monotonic() - begun, **found}
                runs.append(run)
                save(path, facts, runs)
                told = f"failed: {' '.join(str(run['failed']).split())[:300]}" if "failed" in run else "done"
                console.print(f"{label}: {escape(told)} [dim]({run['seconds']:.0f} s)[/dim]", highlight=False)
    except KeyboardInterrupt:
        facts["interrupted"] = True
        save(path, facts, runs)
        console.print("Stopped; what has been measured is kept.")
    finally:
        if keep is None:
            shutil.rmtree(bases, ignore_errors=True)
    _finish(console, facts, runs, publish or RESULTS, path.stem)
    console.print(f"Numbers: {path}", highlight=False)
    if any("failed" in run for run in runs):
        raise SystemExit(1)


def _asked(trial: Trial) -> dict[str, Any]:
    return {**dataclasses.asdict(trial), "scenario": trial.kind, "sweep": ""}


def _finish(console: Console, facts: dict[str, Any], runs: Sequence[Run], folder: Path, name: str) -> None:
    report.show(console, runs, bool(facts.get("quick")))
    folder.mkdir(parents=True, exist_ok=True)
    for picture in report.draw(runs, folder, name):
        console.print(f"Picture: {picture}", highlight=False)


if __name__ == "__main__":
    main()
