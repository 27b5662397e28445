"""The pictures of the migration benchmark: what Megaphone's figures show, of Millstream.

    timeline   latency over time, one panel for each strategy, the migration shaded (figures 1 and 7-12)
    ccdf       the share of records that waited longer than a time (figures 13-15)
    sweep      maximum latency against duration, for several sizes (figures 16-18)
    memory     resident memory over time (figure 19)
    spark      a live rescale, and Spark's stop, repartition and restart, on one scale

A picture shows the first round; tables have all of them. It is made only of what was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.latency import Moment, timeline
from bench.migration_report import ALL, BATCHED, FLUID, MATCHED, NAMES, SPARK, SWEEPS, TITLES, Leg, grouped, legs_of
from bench.migration_report import sweep_points as points_of
from bench.race import Run
from bench.report import size_text

_COLOURS = {ALL: "#c8553d", FLUID: "#6a994e", BATCHED: "#1f6f8b", MATCHED: "#8e6c8a", SPARK: "#8a8a8a"}
_SHADE, _QUIET = "#f3e3b3", "#777777"
_MARKERS = "osD^vP*X"
_BEFORE_S = 10.0


def draw(runs: Sequence[Run], folder: Path, name: str) -> list[Path]:
    """Draws what there is to draw; the files written."""
    figures: dict[str, Any] = {}
    legs = [leg for leg in legs_of(runs) if leg.round == 0]
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        for scenario in ("half", "rescale", "drain"):
            found = [leg for leg in legs if leg.trial["scenario"] == scenario and not leg.trial["sweep"]]
            for leg_name in dict.fromkeys(leg.name for leg in found):
                several = [leg for leg in found if leg.name == leg_name]
                mark = scenario if leg_name in (scenario, "back") else f"{scenario}-{leg_name}"
                figures[f"{mark}-timeline"] = _timelines(several)
                figures[f"{mark}-ccdf"] = _ccdf(several)
                figures[f"{mark}-memory"] = _memory(several)
        for sweep in SWEEPS:
            several = [leg for leg in legs if leg.trial["sweep"] == sweep]
            if several:
                figures[f"sweep-{sweep}"] = _sweep(sweep, several)
        restart = [leg for leg in legs if leg.strategy == SPARK]
        live = [leg for leg in legs if leg.trial["scenario"] == "rescale" and leg.strategy == BATCHED]
        if restart and live:
            figures["spark"] = _against_spark(live[0], restart[0])
        written = []
        for suffix, figure in figures.items():
            path = folder / f"{name}-{suffix}.png"
            figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
            plt.close(figure)
            written.append(path)
    return written


def _about(leg: Leg) -> str:
    return f"{size_text(leg.facts['state_bytes'])} of state, {leg.trial['bins']:,} bins, {_load(leg)}"


def _load(leg: Leg) -> str:
    return f"{leg.rate:,.0f} records/s, {leg.trial['workers']} workers, {leg.fetches}"


def _title(leg: Leg) -> str:
    title = TITLES[leg.trial["scenario"]]
    return f"{title} ({leg.name})" if leg.trial["scenario"] == "rescale" else title


def _moments(leg: Leg) -> list[Moment]:
    return list(timeline(leg.epochs, leg.rate))


def logarithmic(*both: Any) -> None:
    """Log scales, with enough numbers on them to read a value that is not a power of ten."""
    for axis in both:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def _timelines(legs: Sequence[Leg]) -> Any:
    ordered = [group[0] for group in grouped(legs).values()]
    figure, all_axes = plt.subplots(
        len(ordered), 1, figsize=(9, 1.2 + 1.9 * len(ordered)), sharey=True, squeeze=False, layout="constrained"
    )
    longest = max(leg.duration_s for leg in ordered)
    for axes, leg in zip(all_axes[:, 0], ordered, strict=True):
        shown = [
            moment for moment in _moments(leg) if -_BEFORE_S <= moment.at_s - leg.began_s <= leg.duration_s + _BEFORE_S
        ]
        at = [moment.at_s - leg.began_s for moment in shown]
        colour = _COLOURS[leg.strategy]
        axes.axvspan(0, leg.duration_s, color=_SHADE, lw=0, label="migration")
        axes.plot(at, [moment.most * 1000 for moment in shown], color=colour, lw=1.6, label="max")
        axes.plot(at, [moment.p99 * 1000 for moment in shown], color=colour, lw=1, ls="--", label="99 %")
        axes.plot(at, [moment.median * 1000 for moment in shown], color=_QUIET, lw=1, label="median")
        axes.axhline(leg.steady.most * 1000, color=_QUIET, lw=0.8, ls=":", label="steady max")
        logarithmic(axes.yaxis)
        axes.set_xlim(-_BEFORE_S, (longest if longest < 4 * leg.duration_s else leg.duration_s) + _BEFORE_S)
        axes.set_title(
            f"{NAMES[leg.strategy]}: epochs {leg.facts['plan']['epochs']:,}, {leg.duration_s:.1f} s, "
            f"max {leg.migrating.most * 1000:,.0f} ms",
            fontsize=10,
            loc="left",
        )
        axes.set_ylabel("ms (log)")
        axes.grid(axis="y", which="both", color="#eeeeee", lw=0.6)
        axes.set_axisbelow(True)
    all_axes[-1, 0].set_xlabel("seconds after the migration began, by the creation of the record")
    handles, labels = all_axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(f"{_title(ordered[0])}: latency\n{_about(ordered[0])}", fontsize=11)
    return figure


def _ccdf(legs: Sequence[Leg]) -> Any:
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for (_, strategy), group in grouped(legs).items():
        leg = group[0]
        for seen, style in ((leg.migrating, "-"), (leg.steady, ":")):
            points = [(latency * 1000, above) for latency, above in seen.ccdf() if above > 0]
            points = [(points[0][0], 1.0), *points, (seen.most * 1000, points[-1][1])] if points else []
            axes.step(
                [latency for latency, _ in points],
                [above for _, above in points],
                where="pre",
                color=_COLOURS[strategy],
                ls=style,
                lw=1.6 if style == "-" else 1,
                label=NAMES[strategy] if style == "-" else None,
            )
    axes.plot([], [], color=_QUIET, ls=":", lw=1, label="the same query, steady, as long")
    axes.set_yscale("log")
    logarithmic(axes.xaxis)
    axes.set_xlabel("latency, ms (log scale)")
    axes.set_ylabel("share of records above (log scale)")
    axes.grid(color="#eeeeee", lw=0.6)
    axes.legend(loc="lower left", frameon=False, fontsize=9)
    axes.set_title(f"{_title(legs[0])}: latency of every record\n{_about(legs[0])}", fontsize=11)
    return figure


def _memory(legs: Sequence[Leg]) -> Any:
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    for (_, strategy), group in grouped(legs).items():
        leg = group[0]
        shown = [s for s in leg.facts["memory"] if -_BEFORE_S <= s[0] - leg.began_s <= leg.duration_s + _BEFORE_S]
        if not shown:
            continue
        label = f"{NAMES[strategy]} (until {leg.duration_s:.0f} s)"
        at, colour = [sample[0] - leg.began_s for sample in shown], _COLOURS[strategy]
        axes.plot(at, [sample[1] / 1e6 for sample in shown], color=colour, lw=1.6, label=label)
        axes.plot(at, [sample[2] / 1e6 for sample in shown], color=colour, lw=1, ls=":")
        axes.plot([leg.duration_s], [statistics.median(s[1] for s in shown) / 1e6], "|", color=colour, ms=14, mew=2)
    axes.plot([], [], color=_QUIET, ls=":", lw=1, label="private memory only")
    axes.axvline(0, color=_QUIET, lw=0.8, ls="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds after the migration began")
    axes.set_ylabel("resident memory of all workers, MB")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize=9)
    axes.set_title(f"{_title(legs[0])}: memory\n{_about(legs[0])}", fontsize=11)
    return figure


def _sweep(sweep: str, legs: Sequence[Leg]) -> Any:
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    points = points_of(legs)
    for strategy in dict.fromkeys(leg.strategy for leg in legs):
        line = []
        for marker, several in zip(_MARKERS, points.values(), strict=False):
            found = [leg for leg in several if leg.strategy == strategy]
            if found:
                line.append((found[0].duration_s, found[0].migrating.most * 1000, marker))
        axes.plot([x for x, _, _ in line], [y for _, y, _ in line], color=_COLOURS[strategy], lw=1.4)
        for x, y, marker in line:
            axes.plot([x], [y], marker, color=_COLOURS[strategy], ms=7)
        axes.plot([], [], color=_COLOURS[strategy], lw=1.6, label=NAMES[strategy])
    for marker, (size, bins) in zip(_MARKERS, points, strict=False):
        axes.plot([], [], marker, color=_QUIET, label=f"{size_text(size)}, {bins:,} bins")
    logarithmic(axes.xaxis, axes.yaxis)
    most = [leg.migrating.most * 1000 for leg in legs]
    axes.set_ylim(min(most) / 2, max(most) * 2)
    axes.set_xlabel("duration of the migration, s (log scale)")
    axes.set_ylabel("max latency, ms (log scale)")
    axes.grid(which="both", color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    axes.set_title(f"{SWEEPS[sweep]}\n{_load(legs[0])}", fontsize=11)
    return figure


def _against_spark(live: Leg, restart: Leg) -> Any:
    figure, axes = plt.subplots(figsize=(9, 4.4), layout="constrained")
    for leg in (restart, live):
        shown = [moment for moment in _moments(leg) if moment.at_s - leg.began_s >= -_BEFORE_S]
        share = restart.trial["state_bytes"] / live.trial["state_bytes"]
        fewer = f", with {share:.0%} of the keys" if share < 0.99 else ""
        name = f"{NAMES[SPARK]}{fewer}" if leg is restart else "Millstream: live rescale, batched"
        label = f"{name}: longest stall {leg.stall_s:.1f} s"
        at = [moment.at_s - leg.began_s for moment in shown]
        axes.plot(at, [moment.most * 1000 for moment in shown], color=_COLOURS[leg.strategy], lw=1.6, label=label)
        axes.plot([leg.duration_s], [leg.steady.most * 1000], "|", color=_COLOURS[leg.strategy], ms=14, mew=2)
    logarithmic(axes.yaxis)
    axes.set_xlabel("seconds after the rescale began, by the creation of the record (| where it has ended)")
    axes.set_ylabel("max latency, ms (log scale)")
    axes.grid(axis="y", which="both", color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, fontsize=9)
    axes.set_title(f"Twice as many slots or state partitions\n{_about(live)}", fontsize=11)
    return figure
