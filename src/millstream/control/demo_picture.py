"""The timeline of `millstream demo` as a PNG.

Rules
-----
- matplotlib is not among the requirements. Without it, or where the file cannot be written, one line says what to do,
  and the demo is none the worse for it.
- Both axes of time are linear and from zero. What is longer than the scale is drawn at its end with its number.
"""

from __future__ import annotations

import logging
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.control.demo_timeline import EpochSeen, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TIME, _MOVES, _MOVES_TEXT, _KILL, _QUIET = "#1f6f8b", "#f6e3b4", "#7a5a00", "#b3261e", "#666666"
_SCALE = 3.0
"""The height of the picture, in medians; more if an epoch took longer that is not the first of its JVM."""


def write_picture(timeline: Timeline, path: Path) -> str:
    """Draws the timeline into a file, if it can be; what to tell of it."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # which tells at length where it keeps its fonts
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "No picture was drawn: that needs matplotlib, which `pip install 'millstream[bench]'` brings."
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    _draw_times(above, timeline)
    _draw_slots(below, timeline)
    figure.suptitle(
        "A word count is rescaled while it runs; then its driver is killed in a second rescale", fontsize=12
    )
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    try:
        figure.savefig(path, dpi=150, facecolor="white", format="png")
    except OSError as error:
        return f"The picture could not be written to {path}: {error.strerror or error}. --picture says where else."
    return f"The timeline is in {path}"


def _draw_times(axes: Axes, timeline: Timeline) -> None:
    drivers = _by_driver(timeline)
    median = statistics.median(seen.ms for seen in timeline.epochs)
    top = max([_SCALE * median, *(1.1 * seen.ms for epochs in drivers for seen in epochs[1:])])
    label: str | None = "time of an epoch, from plan to commit"
    for epochs in drivers:
        times = [min(seen.ms, top) for seen in epochs]
        axes.plot([seen.at_s for seen in epochs], times, color=_TIME, lw=1.2, marker="o", ms=3.5, label=label, zorder=3)
        label, first = None, epochs[0]
        if first.ms > top:
            text = f"epoch {first.epoch}: {first.ms:,.0f} ms\n(first of a JVM)"
            _write(axes, text, (first.at_s, top), (6, -4), "top", _QUIET)
    _shade(axes, timeline)
    for row, each in enumerate(timeline.migrations):
        begun = next(seen for seen in timeline.epochs if seen.epoch == each.first)
        # One line for each, so that they do not meet if their epochs are short.
        text, below = f"{each.text}, epochs {each.first} to {each.last}", len(timeline.migrations) - 1 - row
        _write(axes, text, (_began_s(begun), top), (0, 4 + 13 * below), "bottom", _MOVES_TEXT)
    _mark_kill(axes, timeline, top * 0.62)
    axes.set_ylim(0, top)
    axes.set_ylabel("epoch time, ms")
    axes.spines[["top", "right"]].set_visible(False)


def _mark_kill(axes: Axes, timeline: Timeline, height: float) -> None:
    back, killed = _by_driver(timeline)[1][0], timeline.killed_at_s
    axes.axvline(killed, color=_KILL, lw=1.5, label="SIGKILL")
    axes.axvline(back.at_s, color=_KILL, lw=1, ls=":", label="the next driver's first commit")
    axes.annotate("", (back.at_s, height), (killed, height), arrowprops={"arrowstyle": "->", "color": _KILL})
    text = f"killed in epoch {timeline.killed_in};\ndriver 2 commits it\n{back.at_s - killed:.1f} s later"
    axes.text((killed + back.at_s) / 2, height * 1.03, text, color=_KILL, ha="center", va="bottom", fontsize=9)


def _write(axes: Axes, text: str, at: tuple[float, float], off: tuple[int, int], va: Any, color: str) -> None:
    axes.annotate(text, at, off, textcoords="offset points", va=va, fontsize=9, color=color, annotation_clip=False)


def _draw_slots(axes: Axes, timeline: Timeline) -> None:
    first, second = _by_driver(timeline)
    for epochs, end in ((first, timeline.killed_at_s), (second, second[-1].at_s)):
        slots = [seen.slots for seen in epochs]
        axes.step([*map(_began_s, epochs), end], [*slots, slots[-1]], where="post", color=_TIME, lw=2, zorder=3)
    _shade(axes, timeline)
    axes.axvline(timeline.killed_at_s, color=_KILL, lw=1.5)
    most = max(seen.slots for seen in timeline.epochs)
    axes.set_ylim(0, most + 0.7)
    axes.set_yticks(range(most + 1))
    axes.set_ylabel("slots")
    axes.set_xlabel("seconds since the demo began")
    axes.spines[["top", "right"]].set_visible(False)


def _shade(axes: Axes, timeline: Timeline) -> None:
    """Where state moved; no epoch ran between the kill and the next driver's first."""
    label: str | None = "state moves"
    for each in timeline.migrations:
        for epochs in _by_driver(timeline):
            moved = [seen for seen in epochs if each.first <= seen.epoch <= each.last]
            if moved:
                end = timeline.killed_at_s if moved[-1].epoch == timeline.killed_in - 1 else moved[-1].at_s
                axes.axvspan(_began_s(moved[0]), end, color=_MOVES, lw=0, zorder=0, label=label)
                label = None


def _by_driver(timeline: Timeline) -> list[list[EpochSeen]]:
    """The epochs of the driver that was killed, and those of the next."""
    first = [seen for seen in timeline.epochs if seen.epoch < timeline.killed_in]
    return [first, [seen for seen in timeline.epochs if seen.epoch >= timeline.killed_in]]


def _began_s(seen: EpochSeen) -> float:
    """When an epoch was planned: from then on it has the slots it has."""
    return seen.at_s - seen.ms / 1000
