"""The benchmark: Millstream beside Spark's own operators, on the same input, in one run.

    python -m bench.throughput                          everything
    python -m bench.throughput --only throughput,state  some parts
    python -m bench.throughput --quick                  a smoke run: sizes too small to say anything
    python -m bench.throughput --from FILE              tables and pictures of an earlier run

What is measured is in `bench.plan`, how in `bench.contenders`, and `bench.command` does it.
"""

from __future__ import annotations

from bench import plan
from bench.command import benchmark
from bench.race import Part


def parts(quick: bool, rounds: int, scale: float) -> list[Part]:
    """All parts."""
    return plan.parts(plan.QUICK if quick else plan.FULL, rounds, scale)


main = benchmark(
    "Measure Millstream beside Spark's own stateful operators.",
    "throughput",
    parts,
    "Multiplies the bytes of state in the part `memory`.",
)

if __name__ == "__main__":
    main()
