"""From runs to judgements: the ratios of contenders, the targets they are held to, and tables to read.

Rules
-----
- A ratio is of numbers of the same run of the benchmark, each contender with its best round (smallest median).
- What was not measured, or failed, has no ratio, and says why. Nothing is judged that was not measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.race import Part, Run, best_run, epoch_times, failure, median_ms, rate

WARMUP_OF_STEADY = 10
"""Epochs at the start of a steady run in which the JVM and the workers are still warming up."""


class NoRatio(Exception):
    """A ratio that cannot be had, and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio and what it should be. `at_least`: more is better; otherwise less is."""

    part: str
    text: str
    at_least: bool
    limit: float
    aim: float
    ratio: Callable[[Part, Sequence[Run]], float]
    unit: str = "x"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A target and what came of it."""

    target: Target
    found: float | None
    verdict: str
    """`aim reached`, `reached`, `missed`, or `no result: why`."""


def judge(target: Target, part: Part, runs: Sequence[Run]) -> Judgement:
    """Holds a target against the runs of its part."""
    try:
        found = target.ratio(part, runs)
    except NoRatio as error:
        return Judgement(target, None, f"no result: {error}")
    if target.at_least:
        reached, aimed = found >= target.limit, found >= target.aim
    else:
        reached, aimed = found <= target.limit, found <= target.aim
    return Judgement(target, found, "aim reached" if aimed else "reached" if reached else "missed")


def _best(runs: Sequence[Run], contender: str) -> Run:
    run = best_run(runs, contender)
    if run is None:
        raise NoRatio(f"{contender}: {failure(runs, contender)}")
    return run


def _rates(contender: str, against: str) -> Callable[[Part, Sequence[Run]], float]:
    return lambda part, runs: rate(_best(runs, contender)) / rate(_best(runs, against))


def _last_against_first(measure: Callable[[Run], float]) -> Callable[[Part, Sequence[Run]], float]:
    def ratio(part: Part, runs: Sequence[Run]) -> float:
        first, last = part.contenders[0].name, part.contenders[-1].name
        return measure(_best(runs, last)) / measure(_best(runs, first))

    return ratio


def _smallest(contender: str) -> Callable[[Part, Sequence[Run]], float]:
    def ratio(part: Part, runs: Sequence[Run]) -> float:
        spark = min(median_ms(_best(runs, name)) for name in ("rocksdb", "hdfs"))
        return median_ms(_best(runs, contender)) / spark

    return ratio


def slowest_against_median(times: Sequence[float], skipped: int) -> float:
    """The slowest epoch over the median, both of the epochs after the skipped ones."""
    counted = times[skipped:]
    if not counted:
        raise NoRatio(f"only {len(times)} epochs")
    return max(counted) / statistics.median(counted)


def _steady(skipped: int) -> Callable[[Part, Sequence[Run]], float]:
    return lambda part, runs: slowest_against_median(epoch_times(_best(runs, part.contenders[0].name)), skipped)


def private_bytes(run: Run) -> float:
    """The most private memory that any worker was seen to have during the measured epochs."""
    return float(run["found"]["private_peak_bytes"])


TARGETS = (
    Target("throughput", "on_batch rate / Spark count() rate, RocksDB", True, 12, 25, _rates("batch", "rocksdb")),
    Target("throughput", "on_batch rate / Spark count() rate, HDFS-backed", True, 5, 10, _rates("batch", "hdfs")),
    Target("throughput", "on_batch rate / mapInArrow rate", True, 0.35, 0.8, _rates("batch", "map")),
    Target("throughput", "on_record rate / transformWithState rate", True, 40, 100, _rates("record", "rows")),
    Target("smallest", "smallest epoch / Spark's smallest", False, 1.6, 1.0, _smallest("batch")),
    Target("state", "epoch time, most keys / fewest keys", False, 3, 1.5, _last_against_first(median_ms)),
    Target("bins", "epoch time, most bins / fewest bins", False, 1.1, 1.0, _last_against_first(median_ms)),
    Target("steady", "slowest epoch / median, all epochs", False, 3, 1.5, _steady(0)),
    Target(
        "steady",
        f"slowest epoch / median, after the first {WARMUP_OF_STEADY}",
        False,
        3,
        1.5,
        _steady(WARMUP_OF_STEADY),
    ),
    Target("memory", "private memory, largest state / smallest", False, 1.2, 1.0, _last_against_first(private_bytes)),
)


def _times(contender: str, against: str) -> Callable[[Part, Sequence[Run]], float]:
    return lambda part, runs: median_ms(_best(runs, contender)) / median_ms(_best(runs, against))


def _one_more_level(part: Part, runs: Sequence[Run]) -> float:
    """What the second and third level cost, on average, over what an epoch with one level takes."""
    times = [median_ms(_best(runs, contender.name)) for contender in part.contenders]
    return (times[-1] - times[0]) / (len(times) - 1) / times[0]


MODEL_TARGETS = (
    Target("windows", "tumbling windows rate / Spark's, RocksDB", True, 8, 20, _rates("millstream", "rocksdb")),
    Target(
        "windows",
        "the same with as many keys as records",
        True,
        8,
        20,
        _rates("millstream-many", "rocksdb-many"),
    ),
    Target("sliding", "sliding windows rate / Spark's, RocksDB", True, 8, 20, _rates("millstream", "rocksdb")),
    Target("joins", "windowed join rate / Spark's, RocksDB", True, 5, 15, _rates("millstream", "rocksdb")),
    Target("timers", "epoch time, pending timers / none", False, 1.1, 1.0, _times("pending", "none")),
    Target("timers", "epoch time, 1,000 due / none", False, 1.5, 1.2, _times("due", "none")),
    Target("levels", "one more level / an epoch with one", False, 0.6, 0.4, _one_more_level),
    Target("strong", "strong rate / weak rate", True, 0.7, 0.9, _rates("strong", "weak")),
    Target("skew", "rate with one hot key / with uniform keys", True, 0.5, 1.0, _rates("hot", "uniform")),
)


def judgements(measured: Sequence[tuple[Part, Sequence[Run]]]) -> list[Judgement]:
    """All targets of the parts that were measured."""
    return [
        judge(target, part, runs)
        for part, runs in measured
        for target in (*TARGETS, *MODEL_TARGETS)
        if target.part == part.name
    ]


# -- tables -----------------------------------------------------------------------------------------------------------


def show(console: Console, measured: Sequence[tuple[Part, Sequence[Run]]], quick: bool = False) -> None:
    """Prints every part and the targets; `quick` says that the sizes are not those of the targets."""
    for part, runs in measured:
        console.print(contenders_table(part, runs))
        if part.name == "steady":
            _show_slowest(console, part, runs)
    title = "Targets (of a quick run: its sizes are too small for the ratios to mean anything)" if quick else "Targets"
    console.print(targets_table(judgements(measured), title))


def contenders_table(part: Part, runs: Sequence[Run]) -> Table:
    """The contenders of a part: what each was given, its best round, and all its rounds."""
    memory = part.name == "memory"
    table = Table(title=part.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("contender")
    for name in ("rows/epoch", "keys", "median ms", "slowest ms", "records/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("private memory" if memory else "rounds, ms", justify="right")
    for contender in part.contenders:
        run = best_run(runs, contender.name)
        given = (contender.label, f"{contender.rows:,}", f"{contender.keys:,}" if contender.keys else "")
        if run is None:
            why = failure(runs, contender.name)[:300]
            table.add_row(*given, "", "", "", Text(f"failed: {why}" if why != "not measured" else why, style="red"))
            continue
        rounds = [median_ms(item) for item in runs if item["contender"] == contender.name and epoch_times(item)]
        last = size_text(private_bytes(run)) if memory else "  ".join(f"{time:,.0f}" for time in rounds)
        times = f"{median_ms(run):,.0f}", f"{max(epoch_times(run)):,.0f}"
        table.add_row(*given, *times, rate_text(rate(run)), last)
    return table


def _show_slowest(console: Console, part: Part, runs: Sequence[Run]) -> None:
    run = best_run(runs, part.contenders[0].name)
    if run is not None:
        console.print(slowest_table(run["found"]["epochs"]))


def slowest_table(epochs: Sequence[dict[str, Any]], count: int = 8) -> Table:
    """The slowest epochs and their parts.

    `plan`, `run` and `commit` are Millstream's. `around` is what else happened in Spark's `addBatch`: delivery, and
    Spark's own planning. `compactions` is how many were seen to end during the epoch.
    """
    table = Table(
        title=f"The slowest {min(count, len(epochs))} of {len(epochs)} epochs, ms",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for name in ("epoch", "all", "plan", "run", "commit", "around", "walCommit", "commitOffsets", "rest"):
        table.add_column(name, justify="right")
    table.add_column("compactions", justify="right")
    for epoch in sorted(epochs, key=lambda item: -item["ms"])[:count]:
        spark, own = epoch["spark"], epoch.get("millstream", {})
        parts = own.get("parts_ms", {})
        inside = spark.get("addBatch", 0)
        shown = [parts.get("plan", 0.0), parts.get("run", 0.0), parts.get("commit", 0.0)]
        outside = [spark.get("walCommit", 0), spark.get("commitOffsets", 0)]
        numbers = [*shown, inside - sum(shown), *outside, epoch["ms"] - inside - sum(outside)]
        cells = [f"{number:,.0f}" for number in numbers]
        table.add_row(str(epoch["epoch"]), f"{epoch['ms']:,}", *cells, str(epoch.get("compactions", "")))
    return table


_STYLES = {"aim reached": "bold green", "reached": "green", "missed": "bold red"}


def targets_table(judged: Sequence[Judgement], title: str = "Targets") -> Table:
    """Targets, what was found, and the verdict."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("ratio")
    for name in ("found", "target", "aim"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for item in judged:
        sign = "≥" if item.target.at_least else "≤"
        unit = item.target.unit
        found = "" if item.found is None else ratio_text(item.found).removesuffix("x") + unit
        verdict = Text(item.verdict[:200], style=_STYLES.get(item.verdict, "red"))
        limit, aim = f"{sign} {item.target.limit:g}{unit}", f"{sign} {item.target.aim:g}{unit}"
        table.add_row(item.target.text, found, limit, aim, verdict)
    return table


SPENDING = ("scheduling", "preparing", "fetching", "loading", "in cache", "from replicas", "from store", "ahead")
"""The columns of `spending_cells`."""


def spending_cells(parts: Sequence[dict[str, Any]]) -> list[str]:
    """Where the time of several changes went and where their bytes came from (see `bench.standstills`); medians.

    >>> times = {"scheduling_s": 0.02, "preparing_s": 7.5, "fetching_s": 0.0, "loading_s": 0.04}
    >>> print(*spending_cells([{**times, "sources": {"cache": 1_000_000}}]), sep=", ")
    0.02 s, 7.50 s, 0.00 s, 0.04 s, 1.0 MB, 0.0 MB, 0.0 MB, 0.0 MB
    """
    times = (statistics.median(part[f"{name}_s"] for part in parts) for name in SPENDING[:4])
    names = ("cache", "replica", "store", "ahead")
    sizes = (statistics.median(part["sources"].get(name, 0) for part in parts) for name in names)
    return [*(f"{time:.2f} s" for time in times), *(f"{size / 1e6:,.1f} MB" for size in sizes)]


def ratio_text(ratio: float) -> str:
    """A ratio in three digits.

    >>> ratio_text(0.0123), ratio_text(0.8234), ratio_text(12.34), ratio_text(123.4)
    ('0.012x', '0.82x', '12.3x', '123x')
    """
    digits = 3 if ratio < 0.1 else 2 if ratio < 10 else 1 if ratio < 100 else 0
    return f"{ratio:,.{digits}f}x"


def rate_text(per_second: float) -> str:
    """A rate in three digits.

    >>> rate_text(1_234_567), rate_text(45_600), rate_text(987)
    ('1.23 M', '45.6 k', '987')
    """
    for unit, name in ((1e6, " M"), (1e3, " k")):
        if per_second >= unit:
            return f"{per_second / unit:.3g}{name}"
    return f"{per_second:.0f}"


def size_text(size: float) -> str:
    """Bytes in megabytes.

    >>> size_text(123_456_789)
    '123 MB'
    """
    return f"{size / 1e6:,.0f} MB"
