"""Recovery and handover: how long a query stands still when a worker dies, or when state goes elsewhere.

    python -m bench.recovery                            kill, handover, throughput, spark, nexmark
    python -m bench.recovery --only kill --rounds 3     some parts
    python -m bench.recovery --quick                    a smoke run: sizes too small to say anything
    python -m bench.recovery --from FILE [--from FILE]  tables of earlier runs, together

A trial is described in `bench.recovery_trials`. Each part compares a small state with a large one, and replicas with
the store alone; `nexmark` kills workers of Rhino's queries (`bench.rhino_trials`), with and without replicas. Raw
numbers and the machine go to `bench/results/`, after every single trial.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from bench.race import Part, Run
from bench.recovery_pictures import draw
from bench.recovery_trials import Recovery
from bench.report import SPENDING, Judgement, NoRatio, Target, judge, spending_cells, targets_table
from bench.rhino_command import queries
from bench.rhino_command import trials as nexmark_trials
from bench.rhino_report import PREPARED, STORE
from bench.rhino_trials import Reconfiguration
from bench.trial_command import Benchmark, bins, command, named, number, wires

PARTS = ("kill", "handover", "throughput", "spark", "nexmark")
MAIN = "from bench.recovery_trials import main; main()"
_QUICK = {"small_mb": 2, "large_mb": 8, "spark_mb": 2, "kills": 1, "warm_s": 3.0, "hold_s": 3.0, "queries": ("nbq8",),
          "state_mb": 4, "events": 2_000.0}  # fmt: skip


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
    """The runs of a kind and variant that count keys: those with the least state (0) or the most (-1)."""
    counts = [run for run in runs if "found" in run and "query" not in run["asked"]]
    found = [run for run in counts if (run["asked"]["kind"], run["asked"]["variant"]) == (kind, variant)]
    sizes = sorted({run["asked"]["state_bytes"] for run in found})
    if not sizes:
        raise NoRatio(f"{kind}, {variant}: not measured")
    return [run for run in found if run["asked"]["state_bytes"] == sizes[place]]


def recoveries(runs: Sequence[Run]) -> list[float]:
    """How long each recovery took."""
    return [kill["recovery_s"] for run in runs for kill in run["found"]["kills"]]


def stalls(runs: Sequence[Run], name: str) -> list[float]:
    """Of handovers, the time between two commits when state changed hands (`cut_over_s`), the longest one from the
    command to the end (`stall_s`), the longest one in as much quiet time (`steady_s`), or the usual one before it
    (`usual_s`)."""
    return [leg[name] for run in runs for leg in run["found"]["legs"]]


def per_second(runs: Sequence[Run]) -> float:
    """Records in a second, of the median epoch after the first three."""
    return statistics.median(run["found"]["records"] / took for run in runs for took in run["found"]["epochs_s"][3:])


def _recovery(one: tuple[str, int], other: tuple[str, int]) -> Callable[[Part, Sequence[Run]], float]:
    def ratio(part: Part, runs: Sequence[Run]) -> float:
        first, second = (recoveries(of(runs, "kill", variant, place)) for variant, place in (one, other))
        return statistics.median(first) / statistics.median(second)

    return ratio


def _handover(name: str) -> Callable[[Part, Sequence[Run]], float]:
    def ratio(part: Part, runs: Sequence[Run]) -> float:
        if len({run["asked"]["state_bytes"] for run in runs if run["asked"]["kind"] == "handover"}) < 2:
            raise NoRatio("handover: not measured with two sizes")
        large, small = (statistics.median(stalls(of(runs, "handover", "replica", place), name)) for place in (-1, 0))
        return large / small

    return ratio


def _against_steady(part: Part, runs: Sequence[Run]) -> float:
    legs = [leg for run in of(runs, "handover", "replica") for leg in run["found"]["legs"] if "steady_window_s" in leg]
    if not legs or not all(leg["steady_s"] for leg in legs):
        raise NoRatio("handover: no quiet time to compare it with was measured")
    return statistics.median(leg["stall_s"] / leg["steady_s"] for leg in legs)


def _throughput(part: Part, runs: Sequence[Run]) -> float:
    return per_second(of(runs, "throughput", "replica")) / per_second(of(runs, "throughput", "store"))


TARGETS = (
    Target("", "stall of a prepared handover, the large state / the small", False, 1.3, 1.0, _handover("cut_over_s")),
    Target("", "the longest from command to end, the same", False, 1.3, 1.0, _handover("stall_s")),
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
                    f"{statistics.median(values):.2f} s (mean {statistics.mean(values):.2f}, "
                    f"{values[0]:.2f}-{values[-1]:.2f}, n={len(values)})",
                    f"{statistics.median(noticed):.2f} s" if noticed else "",
                    f"{steady:.2f} s",
                    f"{statistics.median(item['fetched'] for item in times) / 1e6:,.1f} MB",
                )
        for name, text in (("cut_over_s", "of these, the epoch of the cut-over"), ("usual_s", "an epoch before it")):
            values = sorted(leg[name] for one in found for leg in one.get("legs", []) if name in leg)
            if values:
                yield text, f"{statistics.median(values):.2f} s ({values[0]:.2f}-{values[-1]:.2f})", "", "", ""
        epochs = [one["records"] / took for one in found for took in one.get("epochs_s", [])[3:]]
        if epochs:
            yield label, f"{statistics.median(epochs) / 1e6:.3f} M records/s (n={len(epochs)})", "", "", ""


def _parts(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Where the time of recoveries and handovers went, and their bytes, as in Rhino's table 1; medians."""
    for label in dict.fromkeys(run["asked"]["label"] for run in runs):
        found = [run["found"] for run in runs if run["asked"]["label"] == label and "found" in run]
        parts = [
            {
                "scheduling_s": kill["planned_s"], "preparing_s": 0.0, "fetching_s": kill["parts_ms"]["fetch"] / 1000,
                "loading_s": kill["parts_ms"]["load"] / 1000, "sources": kill["sources"],
            }
            for one in found
            for kill in one.get("kills", [])
            if "planned_s" in kill
        ]  # fmt: skip
        parts += [leg["breakdown"] for one in found for leg in one.get("legs", []) if "breakdown" in leg]
        if parts:
            yield (label, *spending_cells(parts))


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
    table = Table(title="Where time and bytes went (medians)", title_justify="left")
    for column in ("trial", *SPENDING):
        table.add_column(column, no_wrap=True)
    for row in _parts(runs):
        table.add_row(*row)
    if table.row_count:
        console.print(table)
    for run in runs:
        if "failed" in run:
            console.print(f"{run['asked']['label']} failed: {' '.join(str(run['failed']).split())[:600]}", style="red")
    title = "Targets (of a quick run: its sizes are too small for them to mean anything)" if quick else "Targets"
    console.print(targets_table(judged(runs), title))


def chosen(asked: dict[str, Any]) -> Sequence[Recovery | Reconfiguration]:
    """The trials of a round, by the options."""
    names = ("bins", "rate", "workers", "limit", "kills", "warm_s", "hold_s", "bases", "network")
    small, large, spark = (asked[name] * 1_000_000 for name in ("small_mb", "large_mb", "spark_mb"))
    found = trials({name: asked[name] for name in names}, asked["only"], small, large, spark)
    counts = [trial for trial in found if trial.variant in (*asked["variants"], "spark")]
    if "nexmark" not in asked["only"]:
        return counts
    variants = [{"replica": PREPARED, "store": STORE}[name] for name in asked["variants"]]
    given = {**asked, "variants": variants, "rate": asked["events"], "strategy": "all-at-once"}
    return [*counts, *nexmark_trials(given, ("kill",))]


main = command(
    Benchmark(
        "recovery",
        "Measure recovery from a killed worker, handovers of state, and what replicas cost.",
        MAIN,
        [
            named("only", PARTS, "The parts to run, with commas."),
            named("variants", ("replica", "store"), "Replicas, the store alone, or both."),
            number("small-mb", click.IntRange(1), 64, "The smaller state."),
            number("large-mb", click.IntRange(1), 4000, "The larger state."),
            number("spark-mb", click.IntRange(1), 64, "The state of Spark's own query."),
            bins(512),
            number("rate", click.FloatRange(40), 5_000, "Records per second."),
            *queries(" of the part nexmark"),
            number("events", click.FloatRange(40), 4_000, "Events per second of the part nexmark."),
            number("workers", click.IntRange(2), 4, "Executors of one core."),
            *wires(),
            number("kills", click.IntRange(1), 3, "Kills, or handovers, of a trial."),
            number("warm warm_s", float, 8.0, "Seconds before anything counts."),
            number("hold hold_s", float, 8.0, "Seconds of steady records."),
        ],
        _QUICK,
        chosen,
        judged,
        show,
        draw,
        fills=True,
    )
)


if __name__ == "__main__":
    main()
