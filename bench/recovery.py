"""Recovery and handover: how long a query stands still when a worker dies, or when state goes elsewhere.

    python -m bench.recovery                            kill, handover, throughput, spark
    python -m bench.recovery --only kill --rounds 3     some parts
    python -m bench.recovery --quick                    a smoke run: sizes too small to say anything
    python -m bench.recovery --from FILE [--from FILE]  tables of earlier runs, together

A trial is described in `bench.recovery_trials`. Each part compares a small state with a large one, and replicas with
the store alone. Raw numbers and the machine go to `bench/results/`, after every single trial.
"""

from __future__ import annotations

import dataclasses
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench import migration
from bench.command import RESULTS, machine, show_facts
from bench.migration import load, names_of
from bench.race import Part, Run, run_contender
from bench.recovery_trials import Recovery
from bench.report import Judgement, NoRatio, Target, judge, targets_table

PARTS = ("kill", "handover", "throughput", "spark")
_MAIN = "from bench.recovery_trials import main; main()"


def trials(given: dict[str, Any], parts: Sequence[str], small: int, large: int, spark: int) -> list[Recovery]:
    """The trials of a round."""

    def one(kind: str, variant: str, size: int, **changes: Any) -> Recovery:
        name = f"{kind}-{variant}-{size // 1_000_000}"
        label = f"{kind}, {variant}, {size / 1e6:,.0f} MB"
        return Recovery(**{**given, "name": name, "label": label, "kind": kind, "variant": variant,
                           "state_bytes": size, **changes})  # fmt: skip

    found = []
    if "kill" in parts:
        found += [one("kill", "replica", small), one("kill", "replica", large), one("kill", "store", large)]
    if "spark" in parts:
        found.append(one("kill", "spark", spark, bases=""))
    if "handover" in parts:
        found += [one("handover", variant, size) for variant in ("replica", "store") for size in (small, large)]
    if "throughput" in parts:
        found += [one("throughput", variant, small, kills=12) for variant in ("replica", "store")]
    return found


# -- what comes of it -------------------------------------------------------------------------------------------------


def of(runs: Sequence[Run], kind: str, variant: str, place: int = -1) -> list[Run]:
    """The runs of a kind and variant: those with the least state (0) or the most (-1)."""
    found = [
        run for run in runs if "found" in run and (run["asked"]["kind"], run["asked"]["variant"]) == (kind, variant)
    ]
    sizes = sorted({run["asked"]["state_bytes"] for run in found})
    if not sizes:
        raise NoRatio(f"{kind}, {variant}: not measured")
    return [run for run in found if run["asked"]["state_bytes"] == sizes[place]]


def recoveries(runs: Sequence[Run]) -> list[float]:
    """How long each recovery took."""
    return [kill["recovery_s"] for run in runs for kill in run["found"]["kills"]]


def stalls(runs: Sequence[Run], name: str = "stall_s") -> list[float]:
    """The longest times between commits during handovers."""
    return [leg[name] for run in runs for leg in run["found"]["legs"]]


def per_second(runs: Sequence[Run]) -> float:
    """Records in a second, of the median epoch after the first three."""
    return statistics.median(run["found"]["records"] / took for run in runs for took in run["found"]["epochs_s"][3:])


def _recovery(one: tuple[str, int], other: tuple[str, int]) -> Callable[[Part, Sequence[Run]], float]:
    def ratio(part: Part, runs: Sequence[Run]) -> float:
        first, second = (recoveries(of(runs, "kill", variant, place)) for variant, place in (one, other))
        return statistics.median(first) / statistics.median(second)

    return ratio


def _handover(part: Part, runs: Sequence[Run]) -> float:
    if len({run["asked"]["state_bytes"] for run in runs if run["asked"]["kind"] == "handover"}) < 2:
        raise NoRatio("handover: not measured with two sizes")
    large, small = (statistics.median(stalls(of(runs, "handover", "replica", place))) for place in (-1, 0))
    return large / small


def _against_steady(part: Part, runs: Sequence[Run]) -> float:
    legs = [leg for run in of(runs, "handover", "replica") for leg in run["found"]["legs"]]
    return statistics.median(leg["stall_s"] / leg["steady_s"] for leg in legs)


def _throughput(part: Part, runs: Sequence[Run]) -> float:
    return per_second(of(runs, "throughput", "replica")) / per_second(of(runs, "throughput", "store"))


TARGETS = (
    Target("", "stall of a prepared handover, the large state / the small", False, 1.3, 1.0, _handover),
    Target("", "longest stall of a prepared handover / steady", False, 1.2, 1.0, _against_steady),
    Target("", "recovery, the large state / the small", False, 1.3, 1.0, _recovery(("replica", -1), ("replica", 0))),
    Target("", "recovery, replicas / store only", False, 1 / 5, 1 / 15, _recovery(("replica", -1), ("store", -1))),
    Target("", "recovery, replicas / Spark's own", False, 1 / 5, 1 / 20, _recovery(("replica", -1), ("spark", -1))),
    Target("", "throughput, one replica / none", True, 0.9, 0.97, _throughput),
)  # fmt: skip


def judged(runs: Sequence[Run]) -> list[Judgement]:
    """All targets."""
    return [judge(target, Part("recovery", "", (), 1), runs) for target in TARGETS]


def _rows(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    for label in dict.fromkeys(run["asked"]["label"] for run in runs):
        found = [run["found"] for run in runs if run["asked"]["label"] == label and "found" in run]
        for name, text in (("kills", "recovery_s"), ("legs", "stall_s")):
            times = [item for one in found for item in one.get(name, [])]
            if times:
                values = sorted(item[text] for item in times)
                steady = statistics.median(item["steady_s"] for item in times)
                noticed = [item["noticed_s"] for item in times if "noticed_s" in item]
                yield (
                    label,
                    f"{statistics.median(values):.2f} s ({values[0]:.2f}-{values[-1]:.2f}, n={len(values)})",
                    f"{statistics.median(noticed):.2f} s" if noticed else "",
                    f"{steady:.2f} s",
                    f"{statistics.median(item['fetched'] for item in times) / 1e6:,.1f} MB",
                )
        epochs = [one["records"] / took for one in found for took in one.get("epochs_s", [])[3:]]
        if epochs:
            yield label, f"{statistics.median(epochs) / 1e6:.3f} M records/s (n={len(epochs)})", "", "", ""


def show(console: Console, runs: Sequence[Run], quick: bool = False) -> None:
    """Prints every trial, and the targets."""
    table = Table(title="Recovery and handover", title_justify="left")
    for column in (
        "trial",
        "recovery, stall or throughput",
        "noticed after",
        "steady, at most",
        "fetched in the epoch",
    ):
        table.add_column(column, no_wrap=True)
    for row in _rows(runs):
        table.add_row(*row)
    console.print(table)
    for run in runs:
        if "failed" in run:
            console.print(f"{run['asked']['label']} failed: {' '.join(str(run['failed']).split())[:600]}", style="red")
    title = "Targets (of a quick run: its sizes are too small for them to mean anything)" if quick else "Targets"
    console.print(targets_table(judged(runs), title))


@click.command()
@click.option(
    "--only",
    default=",".join(PARTS),
    show_default=True,
    callback=lambda c, o, v: names_of(c, o, v, PARTS),
    help="The parts to run, with commas.",
)
@click.option(
    "--variants",
    default="replica,store",
    show_default=True,
    callback=lambda c, o, v: names_of(c, o, v, ("replica", "store")),
    help="Replicas, the store alone, or both.",
)
@click.option("--small-mb", type=click.IntRange(1), default=64, show_default=True, help="The smaller state.")
@click.option("--large-mb", type=click.IntRange(1), default=4000, show_default=True, help="The larger state.")
@click.option(
    "--spark-mb", type=click.IntRange(1), default=64, show_default=True, help="The state of Spark's own query."
)
@click.option("--bins", type=click.IntRange(8), default=512, show_default=True, help="Bins, a power of two.")
@click.option("--rate", type=click.FloatRange(40), default=5_000, show_default=True, help="Records per second.")
@click.option("--workers", type=click.IntRange(2), default=4, show_default=True, help="Executors of one core.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=125_000_000,
    show_default=True,
    help="Bytes a second that all workers together may fetch, and may take from each other; 0 for no limit.",
)
@click.option("--kills", type=click.IntRange(1), default=3, show_default=True, help="Kills, or handovers, of a trial.")
@click.option("--warm", "warm_s", type=float, default=8.0, show_default=True, help="Seconds before anything counts.")
@click.option("--hold", "hold_s", type=float, default=8.0, show_default=True, help="Seconds of steady records.")
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Repetitions of every trial.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="A folder for filled stores, which later runs go on with; by default they are removed at the end.",
)
@click.option("--timeout", type=float, default=3600.0, show_default=True, help="Seconds that a trial may take.")
@click.option("--quick", is_flag=True, help="A smoke run: sizes too small to say anything.")
@click.option("--name", default=None, help="Of the file in bench/results; the time by default.")
@click.option(
    "--from",
    "earlier",
    type=click.Path(path_type=Path, exists=True),
    multiple=True,
    help="Show the files of earlier runs, several together; nothing is measured.",
)
def main(
    only: tuple[str, ...],
    variants: tuple[str, ...],
    small_mb: int,
    large_mb: int,
    spark_mb: int,
    bins: int,
    rate: float,
    workers: int,
    limit: int,
    kills: int,
    warm_s: float,
    hold_s: float,
    rounds: int,
    keep: Path | None,
    timeout: float,
    quick: bool,
    name: str | None,
    earlier: tuple[Path, ...],
) -> None:
    """Measure recovery from a killed worker, handovers of state, and what replicas cost."""
    console = Console(width=None if Console().is_terminal else 140)
    if bins & (bins - 1):
        raise click.BadParameter(f"{bins} is not a power of two", param_hint="--bins")
    if earlier:
        facts, runs = load(earlier)
        show(console, runs, bool(facts.get("quick")))
        return
    if quick:
        small_mb, large_mb, spark_mb, kills, warm_s, hold_s, rounds = 2, 8, 2, 1, 3.0, 3.0, 1
    bases = keep.resolve() if keep is not None else Path(tempfile.mkdtemp(prefix="millstream-bench-filled-"))
    bases.mkdir(parents=True, exist_ok=True)
    given = {
        "bins": bins, "rate": rate, "workers": workers, "limit": limit, "kills": kills, "warm_s": warm_s,
        "hold_s": hold_s, "bases": str(bases),
    }  # fmt: skip
    facts = {"benchmark": "recovery", "quick": quick, "machine": machine(), "asked": given}
    show_facts(console, facts)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name or time.strftime('recovery-%Y%m%d-%H%M%S')}.json"
    runs = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    chosen = trials(given, only, small_mb * 1_000_000, large_mb * 1_000_000, spark_mb * 1_000_000)
    chosen = [trial for trial in chosen if trial.variant in (*variants, "spark")]
    sequence = [(round_, trial) for round_ in range(rounds) for trial in chosen]
    try:
        for round_, trial in sequence:
            begun = time.monotonic()
            found = run_contender(trial, timeout, lambda done, of: None, _MAIN)
            run: Run = {
                "asked": dataclasses.asdict(trial),
                "round": round_,
                "seconds": time.monotonic() - begun,
                **found,
            }
            runs.append(run)
            migration.save(path, facts, runs, judged)
            told = "failed" if "failed" in run else "done"
            console.print(f"{trial.label}, round {round_ + 1} of {rounds}: {told} ({run['seconds']:.0f} s)")
    except KeyboardInterrupt:
        facts["interrupted"] = True
        migration.save(path, facts, runs, judged)
        console.print("Stopped; what has been measured is kept.")
    finally:
        if keep is None:
            shutil.rmtree(bases, ignore_errors=True)
    show(console, runs, quick)
    console.print(f"Numbers: {path}", highlight=False)
    if any("failed" in run for run in runs):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
