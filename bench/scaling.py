"""Scaling: a query gets twice as many slots while records flow, with prepared state and from the store alone.

    python -m bench.scaling                                 out and up, of NBQ8, NBQ5 and NBQX
    python -m bench.scaling --only up --queries nbq8 --rounds 3
    python -m bench.scaling --quick                         a smoke run: too small to say anything
    python -m bench.scaling --from FILE [--from FILE]       tables and pictures of earlier runs, together

Rhino's section 5.4.1. A trial is described in `bench.rhino_trials`, the queries in `bench.rhino_queries`, and what
becomes of the raw facts in `bench.rhino_report`.
"""

from __future__ import annotations

from bench.rhino_command import benchmark
from bench.trial_command import command

main = command(
    benchmark("scaling", "Measure what it does to latency when a running query gets more slots.", ("out", "up"))
)

if __name__ == "__main__":
    main()
