"""The command that a benchmark is: it runs parts, shows tables, and keeps numbers and pictures.

Raw numbers, the machine, and pictures go to `bench/results/`. The file is written after every single run, so an
interrupted benchmark keeps what it has. The exit code is 1 if a contender failed; a missed target is a result, not an
error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import report
from bench.contenders import Contender
from bench.pictures import draw
from bench.race import ROOT, Part, Run, Watcher, epoch_times, java_home, median_ms, race, rate

RESULTS = Path(__file__).resolve().parent / "results"
Parts = Callable[[bool, int, float], list[Part]]
"""The parts of a benchmark: quick or not, rounds of those that compare, and a scale of what takes most space."""

Measured = list[tuple[Part, list[Run]]]


class _Display(Watcher):
    """A bar for the contender that runs, and a line for each that has ended."""

    def __init__(self, console: Console, parts: Sequence[Part]) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        runs = sum(part.rounds * len(part.contenders) for part in parts)
        self._all = self._progress.add_task("all runs", total=runs)
        self._one = self._progress.add_task("", total=None)
        self._where = ""

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def began(self, part: Part, contender: Contender, round_: int) -> None:
        self._where = f"{part.name}, round {round_ + 1} of {part.rounds}: {contender.label}"
        self._progress.reset(self._one, total=None, description=self._where)

    def moved(self, done: int, of: int) -> None:
        self._progress.update(self._one, completed=done, total=of)

    def ended(self, contender: Contender, run: Run) -> None:
        if epoch_times(run):
            told = f"{median_ms(run):,.0f} ms, {report.rate_text(rate(run))} records/s"
        else:
            told = f"[red]failed: {escape(' '.join(str(run.get('failed', 'no epochs')).split())[:300])}[/red]"
        self._console.print(f"{self._where}: {told} [dim]({run['seconds']:.0f} s)[/dim]", highlight=False)
        self._progress.advance(self._all)


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("millstream", "pyspark", "pyarrow", "numpy", "pandas", "protobuf")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory,
        "load_at_start": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "java": _said([f"{java_home()}/bin/java", "-version"]).splitlines()[:1],
        "packages": {name: metadata.version(name) for name in packages},
        "commit": _said(["git", "-C", str(ROOT), "rev-parse", "HEAD"]).strip(),
        "uncommitted": len(_said(["git", "-C", str(ROOT), "status", "--porcelain"]).splitlines()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def save(path: Path, facts: dict[str, Any], measured: Measured) -> None:
    """Writes everything that is known so far."""
    judged = report.judgements(measured)
    data = {
        **facts,
        "targets": [
            {"part": j.target.part, "ratio": j.target.text, "at_least": j.target.at_least, "target": j.target.limit,
             "aim": j.target.aim, "found": j.found, "verdict": j.verdict}
            for j in judged
        ],
        "parts": [{**dataclasses.asdict(part), "runs": runs} for part, runs in measured],
    }  # fmt: skip
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps(data, indent=1) + "\n")
    staged.replace(path)


def load(path: Path) -> tuple[dict[str, Any], Measured]:
    """Reads what `save` wrote."""
    data = json.loads(path.read_text())
    measured = []
    for item in data.pop("parts"):
        contenders = tuple(Contender(**given) for given in item["contenders"])
        measured.append((Part(item["name"], item["title"], contenders, item["rounds"]), item["runs"]))
    data.pop("targets", None)
    return data, measured


def benchmark(title: str, name: str, parts: Parts, scaled: str = "") -> click.Command:
    """The command of a benchmark."""
    names = tuple(part.name for part in parts(True, 1, 1.0))

    def run(
        only: str,
        quick: bool,
        rounds: int,
        timeout: float,
        name: str,
        publish: Path | None,
        earlier: Path | None,
        scale: float = 1.0,
    ) -> None:
        console = Console() if sys.stdout.isatty() else Console(width=120)
        RESULTS.mkdir(parents=True, exist_ok=True)
        interrupted = False
        if earlier is not None:
            facts, measured = load(earlier)
            name = earlier.stem
        else:
            wanted = _chosen(only, names, parts(quick, rounds, scale))
            facts, measured = {"quick": quick, "scale": scale, "machine": machine()}, []
            interrupted = _measure(console, wanted, timeout, RESULTS / f"{name}.json", facts, measured)
        report.show(console, measured, facts["quick"])
        show_facts(console, facts)
        written = [RESULTS / f"{name}.json" if earlier is None else earlier, *draw(measured, RESULTS, name)]
        if publish is not None:
            publish.mkdir(parents=True, exist_ok=True)
            written = [Path(shutil.copy2(path, publish)) for path in written]
        console.print("\n".join(str(path) for path in written), highlight=False)
        if interrupted:
            sys.exit(130)
        sys.exit(1 if any("failed" in run for _, runs in measured for run in runs) else 0)

    options = [
        click.Option(["--only"], default=",".join(names), help=f"Parts to measure, by commas: {', '.join(names)}."),
        click.Option(["--quick"], is_flag=True, help="Small sizes: shows that everything runs, and nothing else."),
        click.Option(
            ["--rounds"], default=2, show_default=True, help="Interleaved rounds of the parts that compare contenders."
        ),
        click.Option(
            ["--timeout"], default=1800.0, show_default=True, help="Seconds that one run of a contender may take."
        ),
        click.Option(["--name"], default=name, show_default=True, help="The results are called bench/results/NAME.*"),
        click.Option(
            ["--publish"],
            type=click.Path(path_type=Path, file_okay=False),
            help="Copy numbers and pictures there, too.",
        ),
        click.Option(
            ["--from", "earlier"], type=click.Path(path_type=Path, exists=True), help="Show an earlier run's file."
        ),
    ]
    if scaled:
        options.append(click.Option(["--scale"], default=1.0, show_default=True, help=scaled))
    return click.Command(name, params=list(options), callback=run, help=title)


def _chosen(only: str, names: Sequence[str], parts: list[Part]) -> list[Part]:
    asked = {name.strip() for name in only.split(",") if name.strip()}
    unknown = sorted(asked - set(names))
    if unknown or not asked:
        raise click.BadParameter(f"no part {', '.join(unknown)!r}; there are {', '.join(names)}", param_hint="--only")
    return [part for part in parts if part.name in asked]


def _measure(
    console: Console, parts: list[Part], timeout: float, path: Path, facts: dict[str, Any], measured: Measured
) -> bool:
    """Runs all parts into `measured`; whether it was interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with _Display(console, parts) as display:
        for part in parts:
            runs: list[Run] = []
            measured.append((part, runs))

            def keep(run: Run, runs: list[Run] = runs) -> None:
                runs.append(run)
                save(path, facts, measured)

            try:
                race(part, timeout, display, keep)
            except KeyboardInterrupt:
                facts["interrupted"] = True
                save(path, facts, measured)
                return True
    return False


def show_facts(console: Console, facts: dict[str, Any]) -> None:
    """Says what the numbers are taken on, and whether it is quiet."""
    on = facts["machine"]
    console.print(
        f"{on['time']}, {on['cores']} cores ({on['processor']}), {on['memory_bytes'] / 1e9:.0f} GB, "
        f"{(on['java'] or ['no Java'])[0]}, Python {on['python']}, "
        + ", ".join(f"{name} {version}" for name, version in on["packages"].items())
        + f"; commit {on['commit'][:12]} with {on['uncommitted']} uncommitted files; load {on['load_at_start']:.2f}",
        highlight=False,
    )
    if on["load_at_start"] > 0.5:
        console.print("[yellow]The machine was not quiet at the start: ratios may be off.[/yellow]")
