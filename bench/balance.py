"""Load balancing: a skewed query is balanced while records flow: prepared, from the store alone, and by itself.

    python -m bench.balance                                 NBQ8, NBQ5 and NBQX
    python -m bench.balance --strategy batched:16 --rounds 3
    python -m bench.balance --quick                         a smoke run: too small to say anything
    python -m bench.balance --from FILE [--from FILE]       tables and pictures of earlier runs, together

Rhino's section 5.4.2. A trial is described in `bench.rhino_trials`, the queries in `bench.rhino_queries`, and what
becomes of the raw facts in `bench.rhino_report`.
"""

from __future__ import annotations

from bench.rhino_command import benchmark
from bench.rhino_trials import VARIANTS
from bench.trial_command import command

main = command(
    benchmark("balance", "Measure what it does to latency when a skewed query is balanced.", ("balance",), VARIANTS)
)

if __name__ == "__main__":
    main()
