"""The latency picture: state moves while records flow at a fixed rate, by every strategy, and as Spark does it.

    python -m bench.migration                               half, rescale, drain, spark, planning, routing
    python -m bench.migration --only half --rounds 3        some parts
    python -m bench.migration --only sweep --sweep both     a sweep: state, bins, or both in proportion
    python -m bench.migration --quick                       a smoke run: sizes too small to say anything
    python -m bench.migration --from FILE [--from FILE]     tables and pictures of earlier runs, together

A trial is described in `bench.trials`, Spark's alternative in `bench.spark_restart`, and what becomes of the raw facts
in `bench.migration_report`. Raw numbers, the machine and pictures go to `bench/results/`, after every single trial.
"""

from __future__ import annotations

import dataclasses
import json
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import migration_report as report
from bench import planning
from bench.command import RESULTS, machine, show_facts
from bench.migration_pictures import draw
from bench.race import Run, run_contender
from bench.routing_cost import measure
from bench.trials import STRATEGIES, Trial

PARTS = ("half", "rescale", "drain", "sweep", "spark", "planning", "routing")
SWEEPS = ("state", "bins", "both")
_MAIN = "from bench.trials import main; main()"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """The options that make trials."""

    strategies: tuple[str, ...]
    bins: int
    batch: int
    rate: float
    state_bytes: int
    workers: int
    fetch_limit: int
    warm_s: float
    hold_s: float
    spark_share: float
    bases: str = ""
    steps: tuple[int, ...] = (1, 2, 4, 8)

    def trial(self, scenario: str, strategies: Sequence[str] | None = None, **changes: Any) -> Trial:
        """A trial of a scenario, with these options but for some."""
        given: dict[str, Any] = {
            "name": scenario,
            "label": scenario,
            "kind": "millstream",
            "scenario": scenario,
            "strategies": tuple(strategies or self.strategies),
            "bins": self.bins,
            "batch": self.batch,
            "rate": self.rate,
            "state_bytes": self.state_bytes,
            "workers": self.workers,
            "fetch_limit": self.fetch_limit,
            "warm_s": self.warm_s,
            "hold_s": self.hold_s,
            "bases": self.bases,
        }
        return Trial(**{**given, **changes})


def trials(asked: Asked, parts: Sequence[str], sweeps: Sequence[str], round_: int) -> list[Trial]:
    """The trials of a round. Strategies take turns in coming first, so that none is always tried on a fresh store."""
    turned = asked.strategies[round_ % len(asked.strategies) :] + asked.strategies[: round_ % len(asked.strategies)]
    found = [asked.trial(scenario, turned) for scenario in ("half", "rescale", "drain") if scenario in parts]
    if "sweep" in parts:
        compared = [name for name in turned if name != "matched"]
        found += [point for sweep in sweeps for point in sweep_trials(asked, sweep, compared)]
    if "spark" in parts:
        size = int(asked.state_bytes * asked.spark_share)
        found.append(asked.trial("spark", ("spark",), kind="spark", state_bytes=size, fetch_limit=0))
    return found


def sweep_trials(asked: Asked, sweep: str, strategies: Sequence[str]) -> list[Trial]:
    """The points of a sweep, up to the state and the bins that are asked for. A batch is as many bins at each point."""
    found = []
    for step in asked.steps:
        part = asked.steps[-1] // step
        state = asked.state_bytes // part if sweep in ("state", "both") else asked.state_bytes
        bins = max(asked.workers * 4, asked.bins // part) if sweep in ("bins", "both") else asked.bins
        label = f"{sweep}: {state / 1e6:,.0f} MB, {bins:,} bins"
        found.append(
            asked.trial(
                "half",
                strategies,
                name=f"{sweep}-{step}",
                label=label,
                sweep=sweep,
                state_bytes=state,
                bins=bins,
            )
        )
    return found


def planned() -> list[dict[str, Any]]:
    """How long plans of 2^16 bins over 1,000 slots take to make."""
    found = []
    for strategy in planning.STRATEGIES:
        for verb, _, work in planning.plans(strategy):
            took, _ = planning.least_s(work)
            found.append({"plan": verb, "strategy": str(strategy), "seconds": took})
    return found


class _Display:
    """A bar for all trials, one for the trial that runs, and a line for each that has ended."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._all = self._progress.add_task("all trials", total=total)
        self._one = self._progress.add_task("", total=None)

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def began(self, label: str) -> None:
        self._progress.reset(self._one, total=None, description=label)

    def moved(self, done: int, of: int) -> None:
        self._progress.update(self._one, completed=done, total=of)

    def ended(self, label: str, run: Run) -> None:
        if "failed" in run:
            told = f"[red]failed: {escape(' '.join(str(run['failed']).split())[:300])}[/red]"
        else:
            told = ", ".join(
                f"{leg.name} {leg.strategy} max {leg.migrating.most * 1000:,.0f} ms" for leg in report.legs_of([run])
            )
        self._console.print(f"{label}: {told or 'done'} [dim]({run['seconds']:.0f} s)[/dim]", highlight=False)
        self._progress.advance(self._all)


def save(path: Path, facts: dict[str, Any], runs: Sequence[Run], judged: Any = report.judged) -> None:
    """Writes everything that is known so far, with what `judged` makes of the targets."""
    targets = [
        {"ratio": j.target.text, "target": j.target.limit, "aim": j.target.aim, "found": j.found, "verdict": j.verdict}
        for j in judged(runs)
    ]
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps({**facts, "targets": targets, "runs": runs}) + "\n")
    staged.replace(path)


def load(paths: Sequence[Path]) -> tuple[dict[str, Any], list[Run]]:
    """Reads what `save` wrote; the facts are those of the first file, with the `commits` of each."""
    files = [json.loads(path.read_text()) for path in paths]
    facts = {key: value for key, value in files[0].items() if key not in ("runs", "targets")}
    facts["commits"] = [file.get("machine", {}).get("commit", "unknown") for file in files]
    return facts, [run for file in files for run in file["runs"]]


def names_of(context: click.Context, option: click.Parameter, given: str, known: Sequence[str]) -> tuple[str, ...]:
    asked = tuple(name.strip() for name in given.split(",") if name.strip())
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise click.BadParameter(f"no {', '.join(unknown)!r}; there are {', '.join(known)}", context, option)
    return asked


def _steps(context: click.Context, option: click.Parameter, given: str) -> tuple[int, ...]:
    try:
        steps = tuple(int(step) for step in given.split(","))
    except ValueError:
        steps = ()
    if not steps or any(step < 1 or step & (step - 1) for step in steps) or list(steps) != sorted(set(steps)):
        raise click.BadParameter(f"{given!r}; give growing powers of two, as in 1,2,4,8", context, option)
    return steps


@click.command()
@click.option(
    "--only",
    default="half,rescale,drain,spark,planning,routing",
    show_default=True,
    callback=lambda c, o, v: names_of(c, o, v, PARTS),
    help="The parts to run, with commas.",
)
@click.option(
    "--strategies",
    default="all-at-once,fluid,batched,matched",
    show_default=True,
    callback=lambda c, o, v: names_of(c, o, v, tuple(STRATEGIES)),
    help="The strategies to compare.",
)
@click.option(
    "--sweep",
    "sweeps",
    default="both",
    show_default=True,
    callback=lambda c, o, v: names_of(c, o, v, SWEEPS),
    help="What the part `sweep` varies: state, bins, both.",
)
@click.option(
    "--steps",
    default="1,2,4,8",
    show_default=True,
    callback=lambda c, o, v: _steps(c, o, v),
    help="The points of a sweep, the last of which has the state and the bins that are asked for.",
)
@click.option("--state-mb", type=click.IntRange(1), default=1000, show_default=True, help="The size of the state.")
@click.option("--bins", type=click.IntRange(8), default=256, show_default=True, help="Bins, a power of two.")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Bins of a round of `batched`.")
@click.option("--rate", type=click.FloatRange(40), default=20_000, show_default=True, help="Records per second.")
@click.option(
    "--workers",
    type=click.IntRange(2),
    default=4,
    show_default=True,
    help="Executors of one core; an even number. `rescale` begins with half as many slots.",
)
@click.option(
    "--fetch-limit",
    type=click.IntRange(0),
    default=125_000_000,
    show_default=True,
    help="Bytes a second that all workers together may fetch from the store; 0 for no limit.",
)
@click.option(
    "--warm", "warm_s", type=float, default=25.0, show_default=True, help="Seconds of records before anything counts."
)
@click.option("--hold", "hold_s", type=float, default=30.0, show_default=True, help="Seconds of steady records.")
@click.option(
    "--spark-share",
    type=click.FloatRange(0.001, 1.0),
    default=1.0,
    show_default=True,
    help="The share of the keys that Spark's alternative is given: with fewer its stall is shorter.",
)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Repetitions of every trial.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="A folder for filled stores, which later runs go on with; by default they are removed at the end.",
)
@click.option("--timeout", type=float, default=7200.0, show_default=True, help="Seconds that a trial may take.")
@click.option("--quick", is_flag=True, help="A smoke run: sizes too small to say anything.")
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
    strategies: tuple[str, ...],
    sweeps: tuple[str, ...],
    steps: tuple[int, ...],
    state_mb: int,
    bins: int,
    batch: int,
    rate: float,
    workers: int,
    fetch_limit: int,
    warm_s: float,
    hold_s: float,
    spark_share: float,
    rounds: int,
    keep: Path | None,
    timeout: float,
    quick: bool,
    name: str | None,
    publish: Path | None,
    earlier: tuple[Path, ...],
) -> None:
    """Measure what migrations do to latency: by strategy, by size, and beside Spark's stop and restart."""
    console = Console(width=None if Console().is_terminal else 140)
    if bins & (bins - 1):
        raise click.BadParameter(f"{bins} is not a power of two", param_hint="--bins")
    if workers % 2:
        raise click.BadParameter(f"{workers} is odd", param_hint="--workers")
    if earlier:
        facts, runs = load(earlier)
        _finish(console, facts, runs, publish or earlier[0].parent, earlier[0].stem)
        return
    if quick:
        state_mb, bins, warm_s, hold_s, rounds, rate = min(state_mb, 12), min(bins, 32), 5.0, 5.0, 1, min(rate, 5_000)
    bases = keep.resolve() if keep is not None else Path(tempfile.mkdtemp(prefix="millstream-bench-filled-"))
    bases.mkdir(parents=True, exist_ok=True)
    asked = Asked(
        strategies, bins, batch, rate, state_mb * 1_000_000, workers, fetch_limit, warm_s, hold_s, spark_share,
        str(bases), steps,
    )  # fmt: skip
    facts = {"benchmark": "migration", "quick": quick, "machine": machine(), "asked": dataclasses.asdict(asked)}
    show_facts(console, facts)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name or time.strftime('migration-%Y%m%d-%H%M%S')}.json"
    runs = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sequence = [(round_, trial) for round_ in range(rounds) for trial in trials(asked, only, sweeps, round_)]
    try:
        for part, work in (("planning", lambda: {"planning": planned()}), ("routing", measure)):
            if part in only:
                runs.append({"asked": _in_process(asked, part), "round": 0, "seconds": 0.0, "found": work()})
                save(path, facts, runs)
        with _Display(console, len(sequence)) as display:
            for round_, trial in sequence:
                label = f"{trial.label}, round {round_ + 1} of {rounds}"
                display.began(label)
                begun = time.monotonic()
                found = run_contender(trial, timeout, display.moved, _MAIN)
                asked_for = dataclasses.asdict(trial)
                run: Run = {"asked": asked_for, "round": round_, "seconds": time.monotonic() - begun, **found}
                runs.append(run)
                save(path, facts, runs)
                display.ended(label, run)
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


def _in_process(asked: Asked, part: str) -> dict[str, Any]:
    return dataclasses.asdict(asked.trial(part, ()))


def _finish(console: Console, facts: dict[str, Any], runs: Sequence[Run], folder: Path, name: str) -> None:
    report.show(console, runs, bool(facts.get("quick")))
    folder.mkdir(parents=True, exist_ok=True)
    for picture in draw(runs, folder, name):
        console.print(f"Picture: {picture}", highlight=False)


if __name__ == "__main__":
    main()
