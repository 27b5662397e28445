"""The benchmark of the programming model: windows, joins, timers, levels and productions, beside Spark's own.

    python -m bench.model                        everything
    python -m bench.model --only windows,joins   some parts
    python -m bench.model --quick                a smoke run: sizes too small to say anything

What is measured is in `bench.model_plan`, how in `bench.model_contenders`, and `bench.command` does it.
"""

from __future__ import annotations

from bench.command import benchmark
from bench.model_plan import parts

main = benchmark("Measure the programming model: windows, joins, timers, levels and productions.", "model", parts)

if __name__ == "__main__":
    main()
