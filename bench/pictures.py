"""The pictures of a benchmark run, as PNG files: rates side by side, epoch time against state, a run's epochs.

Scales are logarithmic where sizes differ by orders of magnitude, and linear from zero where a ratio is to be seen.
A picture is made only of what was measured: a part that was left out, or failed, has none.
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

from bench.race import Part, Run, best_run, epoch_times, median_ms, rate
from bench.report import WARMUP_OF_STEADY, rate_text, ratio_text

_OURS, _SPARK, _MARK, _QUIET = "#1f6f8b", "#b8b8b8", "#c8553d", "#666666"


def draw(measured: Sequence[tuple[Part, Sequence[Run]]], folder: Path, name: str) -> list[Path]:
    """Draws what there is to draw; the files written."""
    makers = {"throughput": (_rates, "rates"), "state": (_state, "state"), "steady": (_steady, "epochs")}
    written = []
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        for part, runs in measured:
            if part.name not in makers:
                continue
            maker, suffix = makers[part.name]
            figure = maker(part, runs)
            if figure is not None:
                path = folder / f"{name}-{suffix}.png"
                figure.savefig(path, dpi=150, bbox_inches="tight", facecolor="white")
                plt.close(figure)
                written.append(path)
    return written


def _rates(part: Part, runs: Sequence[Run]) -> Any:
    """Two panels of bars: whole batches, and record by record. Spark's bars say how many times as fast ours is."""
    groups = [
        [c for c in part.contenders if c.kind not in ("spark-rows", "millstream-record")],
        [c for c in part.contenders if c.kind in ("spark-rows", "millstream-record")],
    ]
    shown = [[(c, run) for c in group if (run := best_run(runs, c.name)) is not None] for group in groups]
    shown = [sorted(group, key=lambda item: rate(item[1])) for group in shown if group]
    if not shown:
        return None
    figure, all_axes = plt.subplots(
        len(shown),
        1,
        figsize=(9, 1.3 + 0.48 * sum(len(group) + 1 for group in shown)),
        gridspec_kw={"height_ratios": [len(group) + 0.6 for group in shown]},
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    top = max(rate(run) for group in shown for _, run in group)
    for axes, group in zip(all_axes[:, 0], shown, strict=True):
        ours = {c.name: rate(run) for c, run in group}
        reference = "batch" if "batch" in ours else "record" if "record" in ours else None
        for place, (contender, run) in enumerate(group):
            spark, speed = contender.kind.startswith("spark"), rate(run)
            axes.barh(place, speed, color=_SPARK if spark else _OURS, height=0.68)
            text = f"{rate_text(speed)}/s"
            if spark and reference is not None:
                verb = "on_batch" if reference == "batch" else "on_record"
                text += f"   ({verb} is {ratio_text(ours[reference] / speed)} this)"
            axes.text(speed * 1.08, place, text, va="center", fontsize=9)
        axes.set_yticks(range(len(group)), [contender.label for contender, _ in group])
        axes.set_xscale("log")
        axes.set_title(_shape_text(group), fontsize=10, loc="left", color=_QUIET)
        axes.tick_params(axis="y", length=0)
    low = min(rate(run) for group in shown for _, run in group)
    all_axes[-1, 0].set_xlim(low / 4, top * 2)
    all_axes[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: rate_text(value)))
    all_axes[-1, 0].xaxis.set_minor_formatter(NullFormatter())
    all_axes[-1, 0].set_xlabel("records per second (log scale)")
    figure.suptitle("Counting per key: throughput on two cores", fontsize=12)
    return figure


def _shape_text(group: Sequence[tuple[Any, Run]]) -> str:
    rows = sorted({contender.rows for contender, _ in group})
    keys = max(contender.keys for contender, _ in group)
    return f"{' or '.join(f'{number:,}' for number in rows)} records per epoch, {keys:,} keys"


def _state(part: Part, runs: Sequence[Run]) -> Any:
    """Median epoch time (with the middle half of the epochs) against keys, and where the targets lie."""
    found = [(c.keys, run) for c in part.contenders if (run := best_run(runs, c.name)) is not None]
    if len(found) < 2:
        return None
    keys = [count for count, _ in found]
    medians = [median_ms(run) for _, run in found]
    quarters = [statistics.quantiles(epoch_times(run), n=4) for _, run in found if len(epoch_times(run)) > 1]
    figure, axes = plt.subplots(figsize=(7.5, 4.3), layout="constrained")
    highest = list(medians)
    if len(quarters) == len(found):
        low = [time - q[0] for time, q in zip(medians, quarters, strict=True)]
        high = [q[2] - time for time, q in zip(medians, quarters, strict=True)]
        axes.errorbar(keys, medians, [low, high], color=_OURS, fmt="none", capsize=4, label="middle half of the epochs")
        highest = [q[2] for q in quarters]
    axes.plot(keys, medians, color=_OURS, marker="o", label="median epoch")
    for count, time, above in zip(keys, medians, highest, strict=True):
        text = f"{time:,.0f} ms\n{ratio_text(time / medians[0])}"
        axes.annotate(
            text,
            (count, above),
            (0, 6),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1},
        )
    for factor, what in ((3, "target"), (1.5, "aim")):
        label = f"{what}: {factor:g} times the time at {keys[0]:,} keys"
        axes.axhline(factor * medians[0], color=_QUIET, ls="--" if what == "target" else ":", lw=1, label=label)
    axes.set_xscale("log")
    axes.set_xlim(keys[0] / 2, keys[-1] * 2)
    axes.set_ylim(0, max(3.4 * medians[0], 1.3 * max(highest)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: rate_text(value).replace(" ", "")))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("keys in state (log scale)")
    axes.set_ylabel("epoch time, ms")
    axes.set_title(f"Epochs of {part.contenders[0].rows:,} records of random keys", fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=9)
    return figure


def _steady(part: Part, runs: Sequence[Run]) -> Any:
    """The time of every epoch in order; logarithmic if the first ones tower over the rest."""
    run = best_run(runs, part.contenders[0].name)
    if run is None:
        return None
    times = epoch_times(run)
    numbers = [epoch["epoch"] for epoch in run["found"]["epochs"]]
    counted = times[WARMUP_OF_STEADY:] or times
    median = statistics.median(counted)
    log = max(times) > 8 * median
    figure, axes = plt.subplots(figsize=(9, 4), layout="constrained")
    axes.plot(numbers, times, color=_OURS, lw=1.1)
    if len(times) > WARMUP_OF_STEADY:
        axes.axvspan(numbers[0], numbers[WARMUP_OF_STEADY], color="#eeeeee", lw=0, label="warming up")
    axes.axhline(median, color=_QUIET, lw=1, ls=":", label=f"median after warming up: {median:,.0f} ms")
    axes.axhline(3 * median, color=_QUIET, lw=1, ls="--", label="target: 3 times the median")
    slowest = max(range(len(times) - len(counted), len(times)), key=lambda at: times[at])
    label = f"slowest after warming up: epoch {numbers[slowest]}, {times[slowest]:,.0f} ms"
    label += f" ({ratio_text(times[slowest] / median)})"
    axes.plot([numbers[slowest]], [times[slowest]], "o", color=_MARK, label=label)
    if log:
        axes.set_yscale("log")
        axes.set_ylim(min(times) / 1.3, max(times) * 1.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, max(max(times), 3 * median) * 1.1)
    axes.set_xlim(numbers[0], numbers[-1])
    axes.set_xlabel("epoch")
    axes.set_ylabel("epoch time, ms (log scale)" if log else "epoch time, ms")
    given = part.contenders[0]
    axes.set_title(f"{len(times)} epochs of {given.rows:,} records, {given.keys:,} keys", fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=9)
    return figure
