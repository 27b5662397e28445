"""The command of a benchmark of trials: options, rounds, what is kept, tables and pictures.

A trial is a dataclass with a `label`; it runs in a process of its own (`bench.race`). What a benchmark adds is how
options make trials, and what becomes of their runs.

Rules
-----
- Numbers and the machine are written to `bench/results/` after every single trial, so an interrupted benchmark keeps
  what it has.
- A smoke run (`quick`) decides the options that were not given.
- The exit code is 1 if a trial failed; a missed target is a result, not an error.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.markup import escape

from bench.command import RESULTS, machine, show_facts
from bench.migration import load, names_of, save
from bench.race import Run, run_contender
from bench.report import Judgement

Trials = Callable[[dict[str, Any]], Sequence[Any]]
"""From the values of options to the trials of a round. If it fills stores, `bases` is a folder for them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Benchmark:
    """What there is to say of a benchmark of trials."""

    name: str
    help: str
    main: str
    """What the process of a trial runs."""
    options: Sequence[click.Option]
    quick: dict[str, Any]
    """The options of a smoke run."""
    trials: Trials
    judged: Callable[[Sequence[Run]], list[Judgement]]
    show: Callable[[Console, Sequence[Run], bool], None]
    draw: Callable[[Sequence[Run], Path, str], list[Path]] | None = None
    fills: bool = False
    """Whether its trials leave filled stores to each other."""


def named(option: str, known: Sequence[str], text: str, default: Sequence[str] = ()) -> click.Option:
    """An option that takes some of the known names, with commas; by default all of them."""
    return click.Option(
        [f"--{option}"],
        default=",".join(default or known),
        show_default=True,
        callback=lambda context, parameter, value: names_of(context, parameter, value, known),
        help=text,
    )


def number(option: str, kind: Any, default: float, text: str) -> click.Option:
    """An option that takes a number. `option` is its name, and after a blank that of its value, if that is another."""
    flag, *value = option.split()
    return click.Option([f"--{flag}", *value], type=kind, default=default, show_default=True, help=text)


def wires() -> list[click.Option]:
    """The options for what bytes cost."""
    return [
        number(
            "limit",
            click.IntRange(0),
            125_000_000,
            "Bytes a second that all workers together may fetch, and may take from each other; 0 for no limit.",
        ),
        click.Option(
            ["--network"],
            is_flag=True,
            help="Workers on hosts of their own, in network namespaces with wires of 1 Gbit/s, which then limit what "
            "they take from each other. Needs root.",
        ),
    ]


def bins(default: int) -> click.Option:
    """The option for the number of bins."""

    def checked(context: click.Context, parameter: click.Parameter, value: int) -> int:
        if value & (value - 1):
            raise click.BadParameter(f"{value} is not a power of two", context, parameter)
        return value

    return click.Option(
        ["--bins"],
        type=click.IntRange(8),
        default=default,
        show_default=True,
        callback=checked,
        help="Bins, a power of two.",
    )


def command(benchmark: Benchmark) -> click.Command:
    """The command line of a benchmark."""
    keep = click.Option(
        ["--keep"],
        type=click.Path(path_type=Path, file_okay=False),
        help="A folder for filled stores, which later runs go on with; by default they are removed at the end.",
    )
    publish = click.Option(["--publish"], type=click.Path(path_type=Path), help="Draw the pictures into this folder.")
    common = [
        number("rounds", click.IntRange(1), 1, "Repetitions of every trial."),
        *([keep] if benchmark.fills else []),
        number("timeout", float, 3600.0, "Seconds that a trial may take."),
        click.Option(["--quick"], is_flag=True, help="A smoke run: sizes too small to say anything."),
        click.Option(["--name"], help="Of the files in bench/results; the time by default."),
        *([publish] if benchmark.draw else []),
        click.Option(
            ["--from", "earlier"],
            type=click.Path(path_type=Path, exists=True),
            multiple=True,
            help="Show the files of earlier runs, several together; nothing is measured.",
        ),
    ]

    def run(
        rounds: int,
        timeout: float,
        quick: bool,
        name: str | None,
        earlier: tuple[Path, ...],
        keep: Path | None = None,
        publish: Path | None = None,
        **asked: Any,
    ) -> None:
        console = Console(width=None if Console().is_terminal else 160)
        if earlier:
            facts, runs = load(earlier)
            _finish(benchmark, console, facts, runs, publish or earlier[0].parent, earlier[0].stem)
            return
        if quick:
            asked = {**asked, **{name: value for name, value in benchmark.quick.items() if not _is_given(name)}}
        facts = {"benchmark": benchmark.name, "quick": quick, "machine": machine(), "asked": asked}
        show_facts(console, facts)
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{name or time.strftime(f'{benchmark.name}-%Y%m%d-%H%M%S')}.json"
        with _bases(keep) as bases:
            trials = benchmark.trials({**asked, "bases": bases} if benchmark.fills else asked)
            runs = _measure(benchmark, console, trials, rounds, timeout, path, facts)
        _finish(benchmark, console, facts, runs, publish or RESULTS, path.stem)
        console.print(f"Numbers: {path}", highlight=False)
        if any("failed" in run for run in runs):
            raise SystemExit(1)

    return click.Command(benchmark.name, params=[*benchmark.options, *common], callback=run, help=benchmark.help)


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) == ParameterSource.COMMANDLINE


@contextmanager
def _bases(keep: Path | None) -> Iterator[str]:
    """A folder for filled stores; it is removed at the end, unless it is to be kept."""
    folder = keep.resolve() if keep is not None else Path(tempfile.mkdtemp(prefix="millstream-bench-filled-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield str(folder)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _measure(
    benchmark: Benchmark,
    console: Console,
    trials: Sequence[Any],
    rounds: int,
    timeout: float,
    path: Path,
    facts: dict[str, Any],
) -> list[Run]:
    """Runs all trials, round after round; what has been measured, also if that was interrupted."""
    runs: list[Run] = []
    for number_ in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number_, signal.default_int_handler)
    try:
        for round_ in range(rounds):
            for trial in trials:
                label = f"{trial.label}, round {round_ + 1} of {rounds}"
                begun = time.monotonic()
                with console.status(label) as shown:

                    def moved(done: int, of: int, shown: Any = shown, label: str = label) -> None:
                        shown.update(f"{label}: {done}/{of}")

                    found = run_contender(trial, timeout, moved, benchmark.main)
                took = time.monotonic() - begun
                runs.append({"asked": dataclasses.asdict(trial), "round": round_, "seconds": took, **found})
                save(path, facts, runs, benchmark.judged)
                told = f"failed: {' '.join(str(found['failed']).split())[:300]}" if "failed" in found else "done"
                console.print(f"{label}: {escape(told)} [dim]({took:.0f} s)[/dim]", highlight=False)
    except KeyboardInterrupt:
        facts["interrupted"] = True
        save(path, facts, runs, benchmark.judged)
        console.print("Stopped; what has been measured is kept.")
    return runs


def _finish(
    benchmark: Benchmark, console: Console, facts: dict[str, Any], runs: Sequence[Run], folder: Path, name: str
) -> None:
    benchmark.show(console, runs, bool(facts.get("quick")))
    if len(commits := facts.get("commits", ())) > 1:
        told = ", ".join(commit[:12] for commit in dict.fromkeys(commits))
        told = f"Files of {len(commits)} runs, of commit {told}: a ratio between files is not one within a run."
        console.print(told, style="yellow", highlight=False)
    if benchmark.draw is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for picture in benchmark.draw(runs, folder, name):
            console.print(f"Picture: {picture}", highlight=False)
