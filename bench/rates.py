"""Varying data rates: the rate goes up and down in steps, and all of one slot goes to the others on the way.

    python -m bench.rates                                   NBQ8, NBQ5 and NBQX
    python -m bench.rates --queries nbq8 --levels 15 --step 10
    python -m bench.rates --quick                           a smoke run: too small to say anything
    python -m bench.rates --from FILE [--from FILE]         tables and pictures of earlier runs, together

Rhino's section 5.5, which has NBQ8 only, 15 levels and 10 seconds for each. A trial is described in
`bench.rhino_trials`, the queries in `bench.rhino_queries`, and what becomes of the raw facts in `bench.rhino_report`.
"""

from __future__ import annotations

import click

from bench.rhino_command import benchmark
from bench.trial_command import command, number

_MORE = [
    number("levels", click.IntRange(2), 8, "How many rates there are, evenly spaced up to the highest."),
    number("step step_s", click.FloatRange(0.1), 3.0, "Seconds that each of them lasts, up and down again."),
]

main = command(
    benchmark(
        "rates",
        "Measure what it does to latency when state moves while the data rate changes.",
        ("rates",),
        more=_MORE,
        quick={"levels": 3, "step_s": 1.0},
    )
)

if __name__ == "__main__":
    main()
