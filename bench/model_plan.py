"""What the benchmark of the programming model measures: its parts, their contenders and their sizes.

windows   tumbling windows: a count per key and window
sliding   windows of 60 slides
joins     two streams, joined within windows
timers    epochs beside millions of pending timers, of which none or a thousand are due
levels    what one more level of steps costs
strong    strong productions against weak ones
skew      nine of ten records on one key, against uniform keys
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.contenders import Contender
from bench.race import Part

MILLION, THOUSAND = 1_000_000, 1_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything. Pairs are (warm-up epochs, measured epochs)."""

    rows: int
    keys: int
    fast: tuple[int, int]
    slow: tuple[int, int]
    sliding_rows: int
    sliding_keys: int
    sliding_slow: tuple[int, int]
    sliding_fast: tuple[int, int]
    join_rows: int
    pending: int
    preload: int
    timer_rows: int
    timer_epochs: tuple[int, int]
    level_rows: int
    level_epochs: tuple[int, int]


FULL = Sizes(
    rows=MILLION,
    keys=100 * THOUSAND,
    fast=(40, 30),
    slow=(5, 6),
    sliding_rows=MILLION,
    sliding_keys=10 * THOUSAND,
    sliding_slow=(2, 3),
    sliding_fast=(40, 30),
    join_rows=200 * THOUSAND,
    pending=5 * MILLION,
    preload=MILLION,
    timer_rows=100 * THOUSAND,
    timer_epochs=(20, 40),
    level_rows=100 * THOUSAND,
    level_epochs=(20, 40),
)

QUICK = Sizes(
    rows=20 * THOUSAND,
    keys=2 * THOUSAND,
    fast=(2, 3),
    slow=(1, 2),
    sliding_rows=2 * THOUSAND,
    sliding_keys=100,
    sliding_slow=(1, 2),
    sliding_fast=(2, 3),
    join_rows=5 * THOUSAND,
    pending=50 * THOUSAND,
    preload=25 * THOUSAND,
    timer_rows=5 * THOUSAND,
    timer_epochs=(2, 4),
    level_rows=5 * THOUSAND,
    level_epochs=(2, 4),
)


def parts(quick: bool, rounds: int, scale: float = 1.0) -> list[Part]:
    """All parts; `rounds` are for those that compare contenders."""
    sizes = QUICK if quick else FULL
    return [
        Part("windows", "Tumbling windows", _windows(sizes), rounds),
        Part("sliding", "Sliding windows of 60 slides", _sliding(sizes), rounds),
        Part("joins", "Joins within windows", _joins(sizes), rounds),
        Part("timers", "Epochs beside pending timers", _timers(sizes), rounds),
        Part("levels", "One more level", _levels(sizes), rounds),
        Part("strong", "Strong and weak productions", _strong(sizes), rounds),
        Part("skew", "One hot key", _skew(sizes), rounds),
    ]


def _windows(sizes: Sizes) -> tuple[Contender, ...]:
    shape = (sizes.rows, sizes.keys)
    many = (sizes.rows, sizes.rows)
    return (
        Contender("rocksdb", "Spark window().count(), RocksDB", "spark-tumbling", *shape, *sizes.slow),
        Contender("millstream", "Millstream tumbling windows", "millstream-tumbling", *shape, *sizes.fast),
        Contender("rocksdb-many", "Spark, as many keys as records", "spark-tumbling", *many, *sizes.slow),
        Contender("millstream-many", "Millstream, as many keys", "millstream-tumbling", *many, *sizes.fast),
    )


def _sliding(sizes: Sizes) -> tuple[Contender, ...]:
    shape = (sizes.sliding_rows, sizes.sliding_keys)
    return (
        Contender("rocksdb", "Spark window().count(), RocksDB", "spark-sliding", *shape, *sizes.sliding_slow),
        Contender("millstream", "Millstream sliding windows", "millstream-sliding", *shape, *sizes.sliding_fast),
    )


def _joins(sizes: Sizes) -> tuple[Contender, ...]:
    shape = (sizes.join_rows, sizes.join_rows)
    return (
        Contender("rocksdb", "Spark stream-stream join, RocksDB", "spark-join", *shape, *sizes.slow),
        Contender("millstream", "Millstream windowed join", "millstream-join", *shape, *sizes.fast),
    )


def _timers(sizes: Sizes) -> tuple[Contender, ...]:
    shape = (sizes.timer_rows, sizes.pending, *sizes.timer_epochs)
    return (
        Contender("none", "no timer pending", "millstream-timers", *shape, preload_rows=sizes.preload),
        Contender(
            "pending", f"{sizes.pending:,} pending", "millstream-timers-pending", *shape, preload_rows=sizes.preload
        ),
        Contender("due", "the same, 1,000 due per epoch", "millstream-timers-due", *shape, preload_rows=sizes.preload),
    )


def _levels(sizes: Sizes) -> tuple[Contender, ...]:
    shape = (sizes.level_rows, sizes.level_rows, *sizes.level_epochs)
    return tuple(
        Contender(f"levels-{depth}", f"{depth} level{'s' * (depth > 1)}", f"millstream-levels-{depth}", *shape)
        for depth in (1, 2, 3)
    )


def _strong(sizes: Sizes) -> tuple[Contender, ...]:
    shape = (sizes.rows, sizes.rows, *sizes.fast)
    return (
        Contender("weak", "weak productions into a second level", "millstream-weak", *shape),
        Contender("strong", "strong productions", "millstream-strong", *shape),
    )


def _skew(sizes: Sizes) -> tuple[Contender, ...]:
    shape = (sizes.rows, sizes.keys, *sizes.fast)
    return (
        Contender("uniform", "uniform keys", "millstream-uniform", *shape),
        Contender("hot", "90 % on one key", "millstream-hot", *shape),
    )
