"""The pictures of Rhino's experiments: latency over time, before, during and after a change (the paper's figures 4, 6).

A panel for each query, with all variants on one scale and one axis of time, which begins with the command. The first
round is shown; tables have all of them. It is made only of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.latency import timeline
from bench.migration_pictures import logarithmic, plt
from bench.race import Run
from bench.report import size_text
from bench.rhino_queries import TITLES, Pace
from bench.rhino_report import ADAPT, KINDS, LABELS, PREPARED, STORE, Change, changes, grouped

_COLOURS = {PREPARED: "#1f6f8b", STORE: "#c8553d", ADAPT: "#6a994e"}
_QUIET = "#777777"
_AROUND_S = 20.0


def draw(runs: Sequence[Run], folder: Path, name: str) -> list[Path]:
    """Draws a picture for each kind of change; the files written."""
    written = []
    first = [each for each in changes(runs) if each.round == 0]
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        for kind in KINDS:
            found = [each for each in first if each.key[0] == kind]
            if found:
                figure = _picture(kind, found)
                path = folder / f"{name}-{kind}.png"
                figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
                plt.close(figure)
                written.append(path)
    return written


def _picture(kind: str, found: Sequence[Change]) -> Any:
    groups = grouped(found)
    queries = list(dict.fromkeys(query for query, _ in groups))
    figure, all_axes = plt.subplots(
        len(queries), 1, figsize=(9, 1.2 + 2.8 * len(queries)), squeeze=False, layout="constrained"
    )
    for axes, query in zip(all_axes[:, 0], queries, strict=True):
        _panel(axes, [group[0] for (name, _), group in groups.items() if name == query])
    figure.supxlabel("seconds after the command, by when a record was due (| where the change has ended)", fontsize=10)
    asked = found[0].trial
    limit = f"{asked['limit'] / 1e6:,.0f} MB/s for all workers" if asked["limit"] else "fetches not limited"
    figure.suptitle(f"{KINDS[kind]}\n{asked['workers']} executors of one core, {limit}", fontsize=11)
    return figure


def _panel(axes: Any, several: Sequence[Change]) -> None:
    period = max(float(each.facts["period_s"]) for each in several)
    around = max(_AROUND_S, period)
    for each in several:
        shown = [
            moment
            for moment in timeline(each.epochs, each.rate)
            if -around <= moment.at_s - each.began_s <= each.duration_s + around
        ]
        at, colour = [moment.at_s - each.began_s for moment in shown], _COLOURS[each.strategy]
        state = size_text(each.facts["state_bytes"])
        label = f"{LABELS[each.strategy]}: max {each.migrating.most:.2f} s, {state} of state"
        axes.plot(at, [moment.most * 1000 for moment in shown], color=colour, lw=1.6, label=label)
        axes.plot(at, [moment.median * 1000 for moment in shown], color=colour, lw=0.7, alpha=0.6)
        axes.plot([each.duration_s], [each.steady.most * 1000], "|", color=colour, ms=16, mew=2)
    axes.axvline(0, color=_QUIET, lw=0.8, ls="--")
    logarithmic(axes.yaxis)
    axes.set_ylabel("latency, ms (log scale)")
    axes.grid(axis="y", which="both", color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    asked = several[0].trial
    rate = f"{asked['rate']:,.0f} events/s" if not period else f"up to {asked['rate']:,.0f} events/s"
    axes.set_title(f"{TITLES[asked['query']]}, {rate}: max, and thin the median", fontsize=10, loc="left")
    if period:
        _rates(axes, several[0])
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False, fontsize=9)


def _rates(axes: Any, each: Change) -> None:
    """The rate, shaded behind the latencies."""
    pace = Pace(each.trial["rate"], each.trial["levels"], each.trial["step_s"])
    left, right = (float(edge) for edge in axes.get_xlim())
    at = [left + (right - left) * step / 2000 for step in range(2001)]
    at = [second for second in at if each.began_s + second >= 0]
    beside = axes.twinx()
    beside.fill_between(at, [pace.rate_at(each.began_s + second) for second in at], color="#f3e3b3", lw=0, alpha=0.6)
    axes.set_xlim(left, right)
    beside.set_ylim(0, pace.most * 2)
    beside.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value <= pace.most else "")
    beside.set_ylabel("events/s (shaded)")
    beside.set_zorder(axes.get_zorder() - 1)
    axes.patch.set_visible(False)
