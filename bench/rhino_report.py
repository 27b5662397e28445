"""From the raw facts of Rhino's experiments to numbers: what a change did to latency, where its time went, and targets.

Rules
-----
- A change lasts from its command to the commit of its last epoch; its latencies, and those of an equal time without it,
  are as in `bench.migration_report`, but counted in ticks of the feed (see `bench.rhino_queries`), and up to the last
  epoch that fetched state: what was not prepared is fetched when records ask for it, also in later epochs.
- "Steady" is a time as long as the change; "all before" is the whole steady time of the trial, which is longer, so that
  what happens seldom is more likely to be in it.
- With changing rates, "steady" is the same part of the period before: as many records, at the same rates.
- A ratio is of two numbers of the same trial, or of two variants of the same query; of several rounds the median
  counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.latency import Histogram
from bench.migration_report import Leg
from bench.race import Part, Run
from bench.report import (
    SPENDING,
    Judgement,
    NoRatio,
    Target,
    judge,
    ratio_text,
    size_text,
    spending_cells,
    targets_table,
)
from bench.rhino_queries import NAMES

PREPARED, STORE, ADAPT = "prepared", "store", "adapt"
LABELS = {PREPARED: "prepared, with replicas", STORE: "store only (RhinoDFS)", ADAPT: "by itself (adapt=Balance)"}
KINDS = {
    "out": "Scale out: twice as many slots, on executors that had none",
    "up": "Scale up: twice as many slots, on the same executors",
    "balance": "Load balancing: half of the bins of half of the slots come back",
    "rates": "Changing rates: all of one slot goes to the others",
}
LIMIT, AIM = 1.2, 1.0
EPOCHS, EPOCHS_AIM = 20, 5
"""Within how many epochs a query is to have balanced itself."""


class Change(Leg):
    """A measured change of a query."""

    @property
    def key(self) -> tuple[str, str]:
        """What was done, to which query."""
        return str(self.trial["kind"]), str(self.trial["query"])

    @cached_property
    def until_s(self) -> float:
        """The first commit after the end, and after the last epoch that fetched state."""
        last = max(self.ended_s, float(self.facts["phases"].get("fetched", 0.0)))
        return min((done.committed_s for done in self.epochs if done.committed_s > last), default=last)

    @cached_property
    def before(self) -> Histogram:
        """The latencies of all the steady time before it."""
        return self.histogram(self.committed(float(self.facts["phases"]["steady"]), self.began_s))

    def quiet(self) -> list[tuple[float, float]]:
        """The times without the change that it is compared with."""
        period, lasted = float(self.facts.get("period_s", 0.0)), self.until_s - self.began_s
        if not period:
            return super().quiet()
        return [(self.began_s - period, self.began_s - period + min(lasted, period))]


def changes(runs: Sequence[Run]) -> Iterator[Change]:
    """All changes of the trials that succeeded."""
    for run in runs:
        for facts in run.get("found", {}).get("legs", []):
            yield Change(run["asked"], run["round"], facts)


def of(runs: Sequence[Run], kind: str, query: str, variant: str) -> list[Change]:
    """The changes of a kind, a query and a variant."""
    found = [each for each in changes(runs) if each.key == (kind, query) and each.strategy == variant]
    if not found:
        raise NoRatio(f"{kind}, {query}, {variant}: not measured")
    return found


def against_steady(kind: str, query: str, variant: str = PREPARED) -> Callable[[Part, Sequence[Run]], float]:
    """The longest latency during a change, over that of an equal time without it."""

    def ratio(part: Part, runs: Sequence[Run]) -> float:
        return statistics.median(each.migrating.most / each.steady.most for each in of(runs, kind, query, variant))

    return ratio


def epochs_until_balanced(kind: str, query: str) -> Callable[[Part, Sequence[Run]], float]:
    """How many epochs passed from when a query was free to balance itself to its last round of doing so."""

    def epochs(part: Part, runs: Sequence[Run]) -> float:
        return _median(each.facts["plan"]["epochs"] for each in of(runs, kind, query, ADAPT))

    return epochs


def targets(kinds: Sequence[str], variants: Sequence[str] = (PREPARED,)) -> list[Target]:
    """What the changes of a benchmark are held to. The issue that asks for these numbers has them for load balancing;
    the others are held to the same."""
    counted = [
        Target(
            "", f"{kind}, {query}, {LABELS[ADAPT]}: epochs to the last round", False, EPOCHS, EPOCHS_AIM,
            epochs_until_balanced(kind, query), " epochs",
        )
        for kind in kinds
        for query in NAMES
        if ADAPT in variants
    ]  # fmt: skip
    return counted + [
        Target(
            "", f"{kind}, {query}, {LABELS[variant]}: max latency / steady max", False, LIMIT, AIM,
            against_steady(kind, query, variant),
        )
        for kind in kinds
        for query in NAMES
        for variant in variants
    ]  # fmt: skip


def judged(runs: Sequence[Run], kinds: Sequence[str], variants: Sequence[str] = (PREPARED,)) -> list[Judgement]:
    """All targets."""
    return [judge(target, Part("rhino", "", (), 1), runs) for target in targets(kinds, variants)]


# -- tables -----------------------------------------------------------------------------------------------------------


def show(console: Console, runs: Sequence[Run], quick: bool, kinds: Sequence[str], variants: Sequence[str]) -> None:
    """Prints every kind of change, where the time went, and the targets."""
    for kind in kinds:
        found = [each for each in changes(runs) if each.key[0] == kind]
        if found:
            console.print(latency_table(kind, found))
            console.print(breakdown_table(found))
    for run in runs:
        if "failed" in run:
            console.print(f"{run['asked']['label']} failed: {' '.join(str(run['failed']).split())[:600]}", style="red")
    title = "Targets (of a quick run: its sizes are too small for them to mean anything)" if quick else "Targets"
    console.print(targets_table([each for each in judged(runs, kinds, variants) if each.found is not None], title))


def grouped(found: Sequence[Change]) -> dict[tuple[str, str], list[Change]]:
    """Changes by query and variant, in a fixed order."""
    groups: dict[tuple[str, str], list[Change]] = {}
    for each in sorted(found, key=lambda one: (NAMES.index(one.key[1]), list(LABELS).index(one.strategy))):
        groups.setdefault((each.key[1], each.strategy), []).append(each)
    return groups


def latency_table(kind: str, found: Sequence[Change]) -> Table:
    """What a kind of change did to latency."""
    table = Table(title=KINDS[kind], title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("latency, ms", no_wrap=True)
    for name in ("median", "99 %", "max", "max/steady", "max/all before", "max/store only", "stall", "lasted", "n"):
        table.add_column(name, justify="right", no_wrap=True)
    groups = grouped(found)
    for (query, variant), group in groups.items():
        during, steady = Histogram(), Histogram()
        for each in group:
            during.merge(each.migrating)
            steady.merge(each.steady)
        stored = groups.get((query, STORE), [])
        table.add_row(
            f"{query}, {LABELS[variant]}",
            *_latencies(during),
            ratio_text(_median(each.migrating.most / each.steady.most for each in group)),
            ratio_text(_median(each.migrating.most / each.before.most for each in group)),
            ratio_text(_most(group) / _most(stored)) if stored and variant != STORE else "",
            f"{max(each.stall_s for each in group) * 1000:,.0f} ms",
            f"{_median(each.duration_s for each in group):,.1f} s",
            str(len(group)),
        )
        table.add_row(
            Text("   steady, as long", style="dim"), *(Text(text, style="dim") for text in _latencies(steady))
        )
    return table


def breakdown_table(found: Sequence[Change]) -> Table:
    """Where the time of changes went and where their bytes came from, as in Rhino's table 1; medians of all rounds.
    `later` was fetched from the store in epochs after the change, when records asked for it."""
    table = Table(title="Where time and bytes went", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("change", no_wrap=True)
    for name in ("state", "moved", *SPENDING, "later"):
        table.add_column(name, justify="right", no_wrap=True)
    for (query, variant), group in grouped(found).items():
        table.add_row(
            f"{query}, {LABELS[variant]}",
            size_text(_median(each.facts["state_bytes"] for each in group)),
            size_text(_median(each.facts["plan"]["bytes"] for each in group)),
            *spending_cells([each.facts["breakdown"] for each in group]),
            size_text(_median(each.facts["later_bytes"] for each in group)),
        )
    return table


def _latencies(histogram: Histogram) -> list[str]:
    if not histogram.total:
        return ["", "", ""]
    return [f"{histogram.percentile(percent) * 1000:,.0f}" for percent in (50, 99, 100)]


def _most(group: Sequence[Change]) -> float:
    return _median(each.migrating.most for each in group)


def _median(numbers: Any) -> float:
    return float(statistics.median(list(numbers)))
