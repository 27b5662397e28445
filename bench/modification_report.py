"""From the raw facts of modification trials to numbers, tables and pictures.

Rules
-----
- A change lasts from the moment it is asked for to the commit of its epoch. Its latencies, those of the steady time
  beside it, and its stall are defined as those of a migration (`bench.migration_report`).
- "Epochs to effect" are those that were planned after its code had been prepared on workers, up to the one in which it
  took effect: 1 if it was the very next.
- A ratio is taken within one run; of several rounds the median counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.latency import timeline
from bench.migration_report import Leg, legs_of
from bench.race import Part, Run
from bench.report import Judgement, NoRatio, Target, judge, ratio_text, size_text, targets_table

TITLES = {
    "insert": "A filter is inserted",
    "replace": "Its function is replaced",
    "drain": "A worker is drained",
    "session": "Stop, insert the filter, start, in the same session",
    "application": "The same as an application, with new executors",
}
WORKLOADS = {"smq": "Stateful map query", "q8": "NEXMark Q8", "spark": "Plain Spark, stopped and started again"}
_PHASES = (
    ("asked", "heard", "the command is sent, and heard at the next epoch", "#cfd8dc"),
    ("heard", "validated", "the new graph is checked", "#90caf9"),
    ("validated", "prepared", "code is shipped, loaded and rehearsed on workers", "#ffcc80"),
    ("prepared", "planned", "waiting for the next epoch", "#e6ee9c"),
    ("planned", "committed", "its first epoch", "#a5d6a7"),
)
_BEFORE_S = 6.0


def kind_of(leg: Leg) -> str:
    """The workload of a leg."""
    return str(leg.trial["kind"])


def epochs_to_effect(leg: Leg) -> int:
    """How many epochs were planned after the change was prepared, up to the one that it took effect in."""
    prepared, began = leg.facts["events"]["prepared"], leg.facts["outcome"]["began"]
    return sum(1 for epoch in leg.facts["epochs"] if epoch[3] >= prepared - 1e-3 and epoch[0] <= began)


def _legs(runs: Sequence[Run], kinds: Sequence[str], names: Sequence[str]) -> list[Leg]:
    found = [leg for leg in legs_of(runs) if kind_of(leg) in kinds and leg.name in names]
    if not found:
        raise NoRatio("not measured")
    return found


def _latency(part: Part, runs: Sequence[Run]) -> float:
    legs = _legs(runs, ("smq", "q8"), ("insert", "replace"))
    places = {(kind_of(leg), leg.name) for leg in legs}
    return max(
        statistics.median(
            leg.migrating.most / leg.steady.most for leg in legs if (kind_of(leg), leg.name) == place
        )
        for place in places
    )  # fmt: skip


def _epochs(part: Part, runs: Sequence[Run]) -> float:
    return float(max(epochs_to_effect(leg) for leg in _legs(runs, ("smq", "q8"), ("insert", "replace"))))


def _stall(part: Part, runs: Sequence[Run]) -> float:
    """Code that has changed is in no process that runs, so Spark's is that of an application."""
    spark = statistics.median(leg.stall_s for leg in _legs(runs, ("spark",), ("application",)))
    return max(leg.stall_s for leg in _legs(runs, ("smq",), ("insert", "replace"))) / spark


def rates(run: Run) -> tuple[float, float]:
    """Records a second while nothing is converted, before or after, whichever is more; and while state is."""
    before, during, after = (
        sum(records for _, records in rows) / sum(seconds for seconds, _ in rows)
        for rows in (run["found"]["steady"], run["found"]["during"], run["found"]["after"])
    )
    return max(before, after), during


def _conversion(part: Part, runs: Sequence[Run]) -> float:
    found = [run for run in runs if run["asked"]["kind"] == "convert" and "found" in run]
    if not found:
        raise NoRatio("not measured")
    for run in found:
        if run["found"]["bytes"][1]:
            raise NoRatio(f"{size_text(run['found']['bytes'][1])} were left when the time was over")
    return statistics.median(during / quiet for quiet, during in map(rates, found))


MODIFICATION_TARGETS = (
    Target("", "max latency, insert or replace / steady", False, 1.5, 1.1, _latency),
    Target("", "epochs from prepared to effect", False, 2, 1, _epochs),
    Target("", "longest stall / Spark's stop and restart", False, 1 / 20, 1 / 100, _stall),
    Target("", "throughput, state converted in the background / steady", True, 0.7, 0.9, _conversion),
)


def judged(runs: Sequence[Run]) -> list[Judgement]:
    """All targets."""
    return [judge(target, Part("modification", "", (), 1), runs) for target in MODIFICATION_TARGETS]


# -- tables -----------------------------------------------------------------------------------------------------------


def show(console: Console, runs: Sequence[Run], quick: bool = False) -> None:
    """Prints every change, the conversion, and the targets."""
    for kind, title in WORKLOADS.items():
        legs = [leg for leg in legs_of(runs) if kind_of(leg) == kind]
        if legs:
            console.print(_changes_table(title, legs))
    for run in runs:
        if "failed" in run:
            reason = " ".join(str(run["failed"]).split())[:600]
            console.print(Text(f"{run['asked']['label']}, round {run['round'] + 1}, failed: {reason}", style="red"))
        elif run["asked"]["kind"] == "convert":
            quiet, during = rates(run)
            found = run["found"]
            console.print(
                f"Conversion of {size_text(found['bytes'][0])} of {size_text(found['state_bytes'])} in "
                f"{found['seconds']:.0f} s: {during:,.0f} records/s, {quiet:,.0f} without it, "
                f"{ratio_text(during / quiet)}; {size_text(found['bytes'][1])} left",
                highlight=False,
            )
    title = "Targets"
    if quick:
        title += " (of a quick run: it is too short for the ratios to mean anything)"
    console.print(targets_table(judged(runs), title))


def _changes_table(title: str, legs: Sequence[Leg]) -> Table:
    first = legs[0]
    told = f"{title}: {first.rate:,.0f} records/s, {first.trial['workers']} workers"
    table = Table(title=told, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("change")
    for name in ("max", "steady max", "max/steady", "stall", "in all", "heard", "validated", "prepared", "effect"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("epochs", justify="right")
    for name in dict.fromkeys(leg.name for leg in legs):
        group = [leg for leg in legs if leg.name == name]
        events = [leg.facts["events"] for leg in group]
        cells = [_since(events, event) for event in ("heard", "validated", "prepared", "committed")]
        modified = all("prepared" in each for each in events)
        table.add_row(
            TITLES[name],
            f"{max(leg.migrating.most for leg in group) * 1000:,.0f} ms",
            f"{statistics.median(leg.steady.most for leg in group) * 1000:,.0f} ms",
            ratio_text(statistics.median(leg.migrating.most / leg.steady.most for leg in group)),
            f"{max(leg.stall_s for leg in group) * 1000:,.0f} ms",
            f"{statistics.median(leg.duration_s for leg in group):.1f} s",
            *cells,
            str(max(map(epochs_to_effect, group))) if modified else "",
        )
    return table


def _since(events: Sequence[dict[str, float]], event: str) -> str:
    """After how many seconds something had happened, in the median."""
    if not all(event in each for each in events):
        return ""
    return f"{statistics.median(each[event] - each['asked'] for each in events):.2f} s"


# -- pictures ---------------------------------------------------------------------------------------------------------


def draw(runs: Sequence[Run], folder: Path, name: str) -> list[Path]:
    """Event timelines as the paper draws them, with the latency of records below; the files written."""
    written = []
    for kind, title in WORKLOADS.items():
        legs = [leg for leg in legs_of(runs) if kind_of(leg) == kind and leg.round == 0]
        if not legs:
            continue
        with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
            figure = _timelines(title, legs)
        path = folder / f"{name}-{kind}.png"
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
        plt.close(figure)
        written.append(path)
    return written


def _timelines(title: str, legs: Sequence[Leg]) -> Any:
    figure, all_axes = plt.subplots(
        len(legs), 1, figsize=(9, 1.6 + 2.3 * len(legs)), squeeze=False, layout="constrained"
    )
    for axes, leg in zip(all_axes[:, 0], legs, strict=True):
        events, began = leg.facts["events"], leg.began_s
        end = max(leg.duration_s, events.get("empty", began) - began)
        for first, last, label, colour in _PHASES:
            if first in events and last in events:
                axes.axvspan(events[first] - began, events[last] - began, color=colour, lw=0, label=label)
        if "stopped" in events:
            axes.axvspan(0, events["stopped"] - began, color="#cfd8dc", lw=0, label="the query is stopped")
            axes.axvspan(events["stopped"] - began, leg.duration_s, color="#ffcc80", lw=0, label="it starts again")
        if "empty" in events:
            axes.axvline(events["empty"] - began, color="#6a994e", lw=1, ls="--", label="the worker is empty")
        shown = [m for m in timeline(leg.epochs, leg.rate) if -_BEFORE_S <= m.at_s - began <= end + _BEFORE_S]
        at = [moment.at_s - began for moment in shown]
        axes.plot(at, [moment.most * 1000 for moment in shown], color="#1f6f8b", lw=1.6, label="max latency")
        axes.plot(at, [moment.median * 1000 for moment in shown], color="#777777", lw=1, label="median latency")
        axes.axhline(leg.steady.most * 1000, color="#777777", lw=0.8, ls=":", label="steady max")
        axes.set_xlim(-_BEFORE_S, end + _BEFORE_S)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("ms")
        axes.set_title(
            f"{TITLES[leg.name]}: {leg.duration_s:.2f} s in all, longest stall {leg.stall_s * 1000:,.0f} ms",
            fontsize=10,
            loc="left",
        )
    all_axes[-1, 0].set_xlabel("seconds after the change was asked for, by the creation of the record")
    known: dict[str, Any] = {}
    for axes in all_axes[:, 0]:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    first = legs[0]
    figure.suptitle(f"{title}\n{first.rate:,.0f} records/s, {first.trial['workers']} workers", fontsize=11)
    return figure
