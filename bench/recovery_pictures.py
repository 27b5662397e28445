"""The picture of recoveries: latency over time around each kill, for replicas, for the store alone, and for Spark.

A panel for each trial, on one scale; every kill of the first round is drawn over the others, from shortly before it. It
is made only of what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.latency import Done, timeline
from bench.migration_pictures import logarithmic, plt
from bench.race import Run

_COLOURS = {"replica": "#1f6f8b", "prepared": "#1f6f8b", "store": "#c8553d", "spark": "#8a6d3b"}
_NAMES = {"replica": "replicas", "prepared": "replicas", "store": "store only (RhinoDFS)", "spark": "Spark's own query"}
_BEFORE_S, _AFTER_S = 5.0, 40.0


def draw(runs: Sequence[Run], folder: Path, name: str) -> list[Path]:
    """Draws what there is to be seen of kills; the files written."""
    found = [
        run for run in runs if run.get("found", {}).get("kills") and run["found"].get("epochs") and run["round"] == 0
    ]
    if not found:
        return []
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, all_axes = plt.subplots(
            len(found), 1, figsize=(9, 1.0 + 1.9 * len(found)), sharex=True, sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axes, run in zip(all_axes[:, 0], found, strict=True):
            _panel(axes, run)
        figure.supxlabel("seconds after the kill, by when a record was due", fontsize=10)
        figure.supylabel("longest latency, s (log scale)", fontsize=10)
        path = folder / f"{name}-kills.png"
        figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
        plt.close(figure)
    return [path]


def _panel(axes: Any, run: Run) -> None:
    asked, found = run["asked"], run["found"]
    epochs = [Done(row[1], row[2], row[4], row[3]) for row in found["epochs"]]
    moments = list(timeline(epochs, found["rate"]))
    for number, kill in enumerate(found["kills"]):
        others = [other["at"] - _BEFORE_S for other in found["kills"] if other["at"] > kill["at"]]
        until = min([kill["at"] + _AFTER_S, *others])
        shown = [moment for moment in moments if kill["at"] - _BEFORE_S <= moment.at_s <= until]
        axes.plot(
            [moment.at_s - kill["at"] for moment in shown],
            [moment.most for moment in shown],
            color=_COLOURS[asked["variant"]],
            lw=1.5,
            alpha=1.0 - 0.28 * number,
        )
    axes.axvline(0, color="#777777", lw=0.8, ls="--")
    logarithmic(axes.yaxis)
    axes.grid(axis="y", which="both", color="#eeeeee", lw=0.6)
    axes.set_axisbelow(True)
    took = ", ".join(f"{kill['recovery_s']:.1f}" for kill in found["kills"])
    state = f"{asked['state_bytes'] / 1e6:,.0f} MB of state" + (f" of {asked['query']}" if "query" in asked else "")
    axes.set_title(f"{_NAMES[asked['variant']]}, {state}: recovered in {took} s", fontsize=10, loc="left")
