"""From the raw facts of trials to numbers: what a migration did to latency, for how long, and the targets.

Rules
-----
- A migration lasts from the moment its command is sent to the commit of its last epoch. Its latencies are those of all
  records that were committed after it began, up to the first commit after its end: records that had to wait for its
  last epoch are in that one.
- "Steady" is the same query over an equal time without a migration: the last seconds before it, and if it lasted
  longer than those, the last seconds of what came after it.
- The stall of a migration, and of a restart, is the longest time between two commits in a row.
- A ratio is taken within one run of a trial where both sides are there; of several rounds the median counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.latency import PERCENTILES, Done, Histogram, histogram_of, span_of
from bench.race import Part, Run
from bench.report import Judgement, NoRatio, Target, judge, ratio_text, size_text, targets_table

ALL, FLUID, BATCHED, MATCHED, SPARK = "all-at-once", "fluid", "batched", "matched", "spark"
NAMES = {
    ALL: "all at once",
    FLUID: "fluid",
    BATCHED: "batched",
    MATCHED: "matched",
    SPARK: "Spark: stop, repartition, restart",
}

NOISE = 0.8
"""A migration cannot shorten latencies: a ratio below it only says that the steady time was not steady."""

COLD = 0.5
"""The share of what moved that must have been fetched for a migration to count as one to cold caches."""


@dataclass(frozen=True)
class Leg:
    """One measured migration: `facts` as the trial reported them."""

    trial: dict[str, Any]
    round: int
    facts: dict[str, Any]

    @property
    def strategy(self) -> str:
        return str(self.facts["strategy"])

    @property
    def name(self) -> str:
        return str(self.facts["leg"])

    @property
    def fetches(self) -> str:
        """What limited them; the trial itself knows whether anything did."""
        return f"fetches: {self.facts.get('fetch') or 'not said'}"

    @property
    def rate(self) -> float:
        return float(self.facts["rate"])

    @cached_property
    def epochs(self) -> list[Done]:
        """Those with records, in order."""
        return [Done(e[1], e[2], e[4], e[3]) for e in self.facts["epochs"] if e[2] > e[1]]

    @property
    def began_s(self) -> float:
        return float(self.facts["phases"]["migration"])

    @property
    def ended_s(self) -> float:
        return float(self.facts["phases"]["migrated"])

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.began_s

    @cached_property
    def until_s(self) -> float:
        """The first commit after the end."""
        return min((e.committed_s for e in self.epochs if e.committed_s > self.ended_s), default=self.ended_s)

    def committed(self, since_s: float, until_s: float) -> list[Done]:
        """The epochs that were committed after a moment, up to another."""
        return [done for done in self.epochs if since_s < done.committed_s <= until_s]

    def histogram(self, epochs: Sequence[Done]) -> Histogram:
        """The latencies of all records of epochs."""
        return histogram_of(span for done in epochs if (span := span_of(done, self.rate)) is not None)

    @cached_property
    def migrating(self) -> Histogram:
        """The latencies of the migration."""
        return self.histogram(self.committed(self.began_s, self.until_s))

    @cached_property
    def steady(self) -> Histogram:
        """The latencies of an equal time without it."""
        return self.histogram([done for since, until in self.quiet() for done in self.committed(since, until)])

    def quiet(self) -> list[tuple[float, float]]:
        """The times without a migration that together last as long as it did."""
        phases = self.facts["phases"]
        wanted = self.until_s - self.began_s
        before = max(float(phases["steady"]), self.began_s - wanted)
        found = [(before, self.began_s)]
        missing = wanted - (self.began_s - before)
        end = float(phases["end"])
        if missing > 0 and end > self.until_s:
            found.append((max(self.until_s, end - missing), end))
        return found

    @cached_property
    def stall_s(self) -> float:
        """The longest time between two commits."""
        times = [done.committed_s for done in self.epochs]
        pairs = itertools.pairwise(times)
        return max((b - a for a, b in pairs if b > self.began_s and a <= self.ended_s), default=0.0)

    @property
    def fetched_bytes(self) -> int:
        """What workers fetched while the migration lasted."""
        return sum(int(e[6]) for e in self.facts["epochs"] if self.began_s < e[4] <= self.until_s)

    def peak_bytes(self, spans: Sequence[tuple[float, float]], which: int = 1) -> int:
        """The most resident memory (or private, `which` 2) of all workers within some times."""
        found = [sample[which] for sample in self.facts["memory"] if any(a < sample[0] <= b for a, b in spans)]
        if not found:
            raise NoRatio("no memory samples")
        return int(max(found))

    @property
    def memory_ratio(self) -> float:
        return self.peak_bytes([(self.began_s, self.until_s)]) / self.peak_bytes(self.quiet())


def legs_of(runs: Sequence[Run]) -> Iterator[Leg]:
    """All legs of all runs that succeeded."""
    for run in runs:
        for facts in run.get("found", {}).get("legs", []):
            yield Leg(run["asked"], run["round"], {"fetch": run["found"].get("fetch", ""), **facts})


def of(runs: Sequence[Run], scenario: str, strategy: str, leg: str = "", sweep: str = "") -> list[Leg]:
    """The legs of a scenario with a strategy; those of sweeps only if asked for."""
    found = [
        each
        for each in legs_of(runs)
        if each.trial["scenario"] == scenario
        and each.strategy == strategy
        and each.trial["sweep"] == sweep
        and (not leg or each.name == leg)
    ]
    if not found:
        failed = [run["failed"] for run in runs if "failed" in run and run["asked"]["scenario"] == scenario]
        reason = " ".join(str(failed[-1]).split())[:160] if failed else "not measured"
        raise NoRatio(f"{scenario}, {strategy}: {reason}")
    for each in found:
        moved, fetched = each.facts["plan"]["bytes"], each.fetched_bytes
        if fetched < COLD * moved:
            raise NoRatio(f"{each.name}, {strategy}: {size_text(moved)} moved, {size_text(fetched)} fetched: not cold")
    return found


# -- targets ----------------------------------------------------------------------------------------------------------


def _median(found: Sequence[float]) -> float:
    return statistics.median(found)


def _against_spark(part: Part, runs: Sequence[Run]) -> float:
    live = [leg.stall_s for leg in of(runs, "rescale", BATCHED)]
    return max(live) / _median([leg.stall_s for leg in of(runs, "spark", SPARK)])


def _against_steady(part: Part, runs: Sequence[Run]) -> float:
    found = _median([leg.migrating.most / leg.steady.most for leg in of(runs, "half", BATCHED)])
    if found < NOISE:
        raise NoRatio(f"{found:.2f}x: waiting was longer without a migration than with it; the machine was not quiet")
    return found


def _against_all_at_once(part: Part, runs: Sequence[Run]) -> float:
    """At the largest state that both were measured with: what all at once costs grows with it."""
    most: dict[tuple[int, str], dict[str, list[float]]] = {}
    for sweep in ("", "both"):
        for leg in (leg for strategy in (ALL, BATCHED) for leg in _if_any(runs, strategy, sweep)):
            place = (leg.trial["state_bytes"], leg.trial["sweep"])
            most.setdefault(place, {}).setdefault(leg.strategy, []).append(leg.migrating.most)
    both = [state for state, found in most.items() if ALL in found and BATCHED in found]
    if not both:
        raise NoRatio("no state has both strategies")
    return _median(most[max(both)][BATCHED]) / _median(most[max(both)][ALL])


def _if_any(runs: Sequence[Run], strategy: str, sweep: str) -> list[Leg]:
    known = any(leg.strategy == strategy and leg.trial["sweep"] == sweep for leg in legs_of(runs))
    return of(runs, "half", strategy, sweep=sweep) if known else []


def _grown(strategy: str) -> Callable[[Part, Sequence[Run]], float]:
    def ratio(part: Part, runs: Sequence[Run]) -> float:
        by_size: dict[int, list[float]] = {}
        for leg in of(runs, "half", strategy, sweep="both"):
            by_size.setdefault(leg.trial["state_bytes"], []).append(leg.migrating.most)
        small, large = min(by_size), max(by_size)
        if large < 7.9 * small:
            raise NoRatio(f"state grew {large / small:.1f} times only, expected 8")
        return _median(by_size[large]) / _median(by_size[small])

    return ratio


def _memory(part: Part, runs: Sequence[Run]) -> float:
    return _memory_of(of(runs, "half", BATCHED))


def _planning(part: Part, runs: Sequence[Run]) -> float:
    found = [plan["seconds"] for run in runs for plan in run.get("found", {}).get("planning", [])]
    if not found:
        raise NoRatio("not measured")
    return float(max(found))


def _routing(table: str) -> Callable[[Part, Sequence[Run]], float]:
    def ratio(part: Part, runs: Sequence[Run]) -> float:
        costs = [run["found"]["ns_per_record"] for run in runs if "ns_per_record" in run.get("found", {})]
        epochs = [
            run["found"]["filled"]["epoch_ns_per_record"]
            for run in runs
            if "epoch_ns_per_record" in run.get("found", {}).get("filled", {})
        ]
        if not costs or not epochs:
            raise NoRatio("needs the part `routing`, and a trial")
        more = costs[-1][table] - costs[-1]["modulo"]
        epoch = min(epochs)
        return float(epoch / (epoch - more))

    return ratio


MIGRATION_TARGETS = (
    Target("", "longest stall, live rescale / Spark's stop, repartition, restart", False, 1 / 20, 1 / 100,
           _against_spark),
    Target("", "max latency, batched / steady", False, 2, 1.1, _against_steady),
    Target("", "max latency, batched / all at once, most state", False, 1 / 5, 1 / 20, _against_all_at_once),
    Target("", "max latency, batched, 8 times the state and bins", False, 1.2, 1.0, _grown(BATCHED)),
    Target("", "max latency, fluid, 8 times the state and bins", False, 1.2, 1.0, _grown(FLUID)),
    Target("", "resident memory, batched / steady", False, 1.1, 1.0, _memory),
    Target("", "planning 2^16 bins over 1,000 slots / 1 s", False, 1.0, 0.1, _planning),
    Target("", "a full epoch, routed by table / by modulo", False, 1.05, 1.0, _routing("table")),
    Target("", "the same with a table as scattered as can be", False, 1.05, 1.0, _routing("scattered")),
)  # fmt: skip


def judged(runs: Sequence[Run]) -> list[Judgement]:
    """All targets."""
    part = Part("migration", "", (), 1)
    return [judge(target, part, runs) for target in MIGRATION_TARGETS]


# -- tables -----------------------------------------------------------------------------------------------------------


def show(console: Console, runs: Sequence[Run], quick: bool = False) -> None:
    """Prints every trial, the sweeps, and the targets."""
    for scenario in ("half", "rescale", "drain", "spark"):
        found = [leg for leg in legs_of(runs) if leg.trial["scenario"] == scenario and not leg.trial["sweep"]]
        if found:
            console.print(latencies_table(scenario, found))
    for sweep in ("state", "bins", "both"):
        found = [leg for leg in legs_of(runs) if leg.trial["sweep"] == sweep]
        if found:
            console.print(sweep_table(sweep, found))
    for run in runs:
        if "failed" in run:
            reason = " ".join(str(run["failed"]).split())[:600]
            console.print(Text(f"{run['asked']['label']}, round {run['round'] + 1}, failed: {reason}", style="red"))
        if "ns_per_record" in run.get("found", {}):
            costs = ", ".join(f"{name} {cost:.1f}" for name, cost in run["found"]["ns_per_record"].items())
            console.print(f"Routing, ns per record: {costs}", highlight=False)
    title = "Targets"
    if quick:
        title += " (of a quick run: its sizes are too small for the ratios to mean anything)"
    console.print(targets_table(judged(runs), title))


def latencies_table(scenario: str, legs: Sequence[Leg]) -> Table:
    """The percentiles of each strategy, all rounds together, and of the steady times beside it."""
    first = legs[0]
    title = (
        f"{TITLES[scenario]}: {size_text(first.facts['state_bytes'])} of state, {first.trial['bins']:,} bins, "
        f"{first.rate:,.0f} records/s, {first.trial['workers']} workers, {first.fetches}"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("latency, ms")
    for percent in PERCENTILES:
        table.add_column("max" if percent == 100 else f"{percent:g} %", justify="right")
    for name in ("max/steady", "stall", "lasted", "moved", "fetched", "epochs", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for (name, strategy), group in grouped(legs).items():
        label = f"{name}: {NAMES[strategy]}" if scenario == "rescale" else NAMES[strategy]
        migrating, steady = Histogram(), Histogram()
        for leg in group:
            migrating.merge(leg.migrating)
            steady.merge(leg.steady)
        table.add_row(
            label,
            *(_ms(migrating.percentile(percent)) for percent in PERCENTILES),
            ratio_text(_median([leg.migrating.most / leg.steady.most for leg in group])),
            f"{_ms(max(leg.stall_s for leg in group))} ms",
            f"{_median([leg.duration_s for leg in group]):,.1f} s",
            size_text(group[0].facts["plan"]["bytes"]) if group[0].facts["plan"]["bytes"] else "",
            size_text(_median([leg.fetched_bytes for leg in group])),
            f"{group[0].facts['plan']['epochs']:,}",
            _ratio_or_why(partial(_memory_of, group)),
        )
        table.add_row(
            Text("   steady, as long", style="dim"),
            *(Text(_ms(steady.percentile(percent)), style="dim") for percent in PERCENTILES),
        )
    return table


TITLES = {
    "half": "Half of the bins of half of the slots come back",
    "rescale": "Twice as many slots, and back",
    "drain": "A worker is drained",
    "spark": "What Spark offers",
}


def grouped(legs: Sequence[Leg]) -> dict[tuple[str, str], list[Leg]]:
    """Legs by their name and strategy, in a fixed order."""
    found: dict[tuple[str, str], list[Leg]] = {}
    for leg in sorted(legs, key=lambda leg: (leg.name, list(NAMES).index(leg.strategy))):
        found.setdefault((leg.name, leg.strategy), []).append(leg)
    return found


def sweep_table(sweep: str, legs: Sequence[Leg]) -> Table:
    """Maximum latency and duration of every point."""
    table = Table(title=SWEEPS[sweep], title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for name in ("state", "bins", "strategy", "max, ms", "steady max, ms", "max/steady", "lasted"):
        table.add_column(name, justify="left" if name == "strategy" else "right")
    for (size, bins), points in sweep_points(legs).items():
        for (_, strategy), group in grouped(points).items():
            most, steady = ([getattr(leg, name).most for leg in group] for name in ("migrating", "steady"))
            table.add_row(
                size_text(size),
                f"{bins:,}",
                NAMES[strategy],
                _ms(_median(most)),
                _ms(_median(steady)),
                ratio_text(_median([leg.migrating.most / leg.steady.most for leg in group])),
                f"{_median([leg.duration_s for leg in group]):,.1f} s",
            )
    return table


SWEEPS = {
    "state": "State varies, bins do not",
    "bins": "Bins vary, state does not",
    "both": "State and bins vary in proportion",
}


def sweep_points(legs: Sequence[Leg]) -> dict[tuple[int, int], list[Leg]]:
    """Legs by state and bins, the smallest first."""
    found: dict[tuple[int, int], list[Leg]] = {}
    for leg in sorted(legs, key=lambda leg: (leg.trial["state_bytes"], leg.trial["bins"])):
        found.setdefault((leg.trial["state_bytes"], leg.trial["bins"]), []).append(leg)
    return found


def _memory_of(legs: Sequence[Leg]) -> float:
    return _median([leg.memory_ratio for leg in legs])


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}"


def _ratio_or_why(ratio: Callable[[], float]) -> str:
    try:
        return ratio_text(ratio())
    except NoRatio as error:
        return str(error)
