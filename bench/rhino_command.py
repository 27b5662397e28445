"""What the commands `scaling`, `balance` and `rates` have in common: their options, and how these make trials.

Each of them runs `bench.rhino_trials` for some queries and variants, and shows what `bench.rhino_report` and
`bench.rhino_pictures` make of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from bench import rhino_report as report
from bench.rhino_pictures import draw
from bench.rhino_queries import NAMES
from bench.rhino_trials import Reconfiguration
from bench.trial_command import Benchmark, bins, named, number, wires

MAIN = "from bench.rhino_trials import main; main()"
SIZES_MB = {"nbq8": 400, "nbq5": 6, "nbqx": 100}
"""The paper has 220 GB, 26 MB and 170 GB: as large, as small, and in between."""
QUICK = {"queries": ("nbq8",), "variants": ("prepared", "store"), "workers": 2, "rate": 2_000.0, "warm_s": 1.0,
         "hold_s": 2.0, "state_mb": 4}  # fmt: skip


def options(variants: Sequence[str], rate: float) -> list[click.Option]:
    """The options of all three."""
    return [
        *queries(),
        named("variants", variants, "What is compared: replicas and prepared moves, or the store alone."),
        click.Option(
            ["--strategy"],
            default="all-at-once",
            show_default=True,
            callback=_strategy,
            help="How moves are spread over epochs: all-at-once, fluid, matched, or batched:N.",
        ),
        bins(256),
        number("rate", click.FloatRange(40), rate, "Events per second."),
        number("workers", click.IntRange(2), 4, "Executors of one core; an even number."),
        *wires(),
        number("warm warm_s", float, 20.0, "Seconds before anything counts."),
        number("hold hold_s", float, 30.0, "Seconds of steady records."),
    ]


def queries(which: str = "") -> list[click.Option]:
    """The options for queries and the size of their state; `which` says of what, if not of all trials."""
    mega = ", ".join(f"{size} for {query}" for query, size in SIZES_MB.items())
    return [
        named("queries", NAMES, f"The queries to run{which}, with commas."),
        click.Option(["--state-mb"], type=click.IntRange(1), help=f"The size of the state{which} [default: {mega}]"),
    ]


def _strategy(context: click.Context, parameter: click.Parameter, value: str) -> str:
    kind, _, count = value.partition(":")
    if value not in ("all-at-once", "fluid", "matched") and not (kind == "batched" and count.isdigit() and int(count)):
        raise click.BadParameter(f"{value!r}; there are all-at-once, fluid, matched, batched:N", context, parameter)
    return value


def trials(asked: dict[str, Any], kinds: Sequence[str]) -> list[Reconfiguration]:
    """The trials of a round."""
    if asked["workers"] % 2 and set(kinds) != {"kill"}:
        raise click.BadParameter(f"{asked['workers']} is odd", param_hint="--workers")
    names = ("strategy", "bins", "rate", "workers", "limit", "warm_s", "hold_s", "levels", "step_s", "kills", "network")
    given = {name: asked[name] for name in names if name in asked}
    return [
        Reconfiguration(
            name=f"{kind}-{query}-{variant}",
            label=f"{kind}, {query}, {report.LABELS[variant]}",
            kind=kind,
            query=query,
            variant=variant,
            state_bytes=(asked["state_mb"] or SIZES_MB[query]) * 1_000_000,
            **given,
        )
        for kind in kinds
        for query in asked["queries"]
        for variant in asked["variants"]
    ]


def benchmark(
    name: str,
    text: str,
    kinds: Sequence[str],
    variants: Sequence[str] = (report.PREPARED, report.STORE),
    rate: float = 4_000,
    more: Sequence[click.Option] = (),
    quick: dict[str, Any] | None = None,
) -> Benchmark:
    """A benchmark of some kinds of changes. With several kinds there is an option `--only`."""
    only = [named("only", kinds, "The kinds of changes, with commas.")] if len(kinds) > 1 else []
    held = [variant for variant in variants if variant != report.STORE]
    return Benchmark(
        name,
        text,
        MAIN,
        [*only, *options(variants, rate), *more],
        {**QUICK, **({"only": tuple(kinds[:1])} if only else {}), **(quick or {})},
        lambda asked: trials(asked, asked.get("only", kinds)),
        lambda runs: report.judged(runs, kinds, held),
        lambda console, runs, is_quick: report.show(console, runs, is_quick, kinds, held),
        draw,
    )
