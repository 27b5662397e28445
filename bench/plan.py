"""What is measured: the parts of the benchmark, their contenders and their sizes.

Sizes come from `FULL`, or from `QUICK`, which only shows that everything runs: its ratios say nothing.

    throughput  rate at 1M rows per epoch and 1M keys, and record by record at 100k
    state       epoch time against the number of keys in state
    bins        epoch time against the number of bins
    smallest    the time of an epoch of 1,000 rows
    steady      the time of every epoch of a run with steady input
    memory      private memory of a Python worker against the size of state
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.contenders import Contender
from bench.race import Part

MILLION, THOUSAND = 1_000_000, 1_000
GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything. Pairs are (warm-up epochs, measured epochs)."""

    rows: int
    record_rows: int
    record_rows_large: int
    fast: tuple[int, int]
    slow: tuple[int, int]
    slowest: tuple[int, int]
    state_keys: tuple[int, ...]
    state_rows: int
    state_preload_rows: int
    state_epochs: tuple[int, int]
    bins: tuple[int, ...]
    bins_rows: int
    bins_epochs: tuple[int, int]
    smallest_rows: int
    smallest_keys: int
    smallest_epochs: tuple[int, int]
    steady_rows: int
    steady_keys: int
    steady_epochs: int
    memory_bytes: tuple[int, ...]
    memory_preload_rows: int
    memory_rows: int
    memory_epochs: tuple[int, int]


FULL = Sizes(
    rows=MILLION,
    record_rows=100 * THOUSAND,
    record_rows_large=MILLION,
    fast=(40, 30),
    slow=(3, 8),
    slowest=(2, 4),
    state_keys=(100 * THOUSAND, MILLION, 10 * MILLION, 50 * MILLION),
    state_rows=100 * THOUSAND,
    state_preload_rows=2_500_000,
    state_epochs=(30, 60),
    bins=(1 << 4, 1 << 12, 1 << 20),
    bins_rows=200 * THOUSAND,
    bins_epochs=(15, 40),
    smallest_rows=THOUSAND,
    smallest_keys=MILLION,
    smallest_epochs=(20, 60),
    steady_rows=200 * THOUSAND,
    steady_keys=MILLION,
    steady_epochs=200,
    memory_bytes=(GB // 2, 4 * GB),
    memory_preload_rows=MILLION,
    memory_rows=100 * THOUSAND,
    memory_epochs=(10, 40),
)

QUICK = Sizes(
    rows=50 * THOUSAND,
    record_rows=2 * THOUSAND,
    record_rows_large=20 * THOUSAND,
    fast=(2, 4),
    slow=(1, 2),
    slowest=(1, 2),
    state_keys=(10 * THOUSAND, 100 * THOUSAND, MILLION),
    state_rows=10 * THOUSAND,
    state_preload_rows=250 * THOUSAND,
    state_epochs=(3, 6),
    bins=(1 << 4, 1 << 12, 1 << 20),
    bins_rows=10 * THOUSAND,
    bins_epochs=(3, 6),
    smallest_rows=THOUSAND,
    smallest_keys=MILLION,
    smallest_epochs=(3, 6),
    steady_rows=20 * THOUSAND,
    steady_keys=100 * THOUSAND,
    steady_epochs=30,
    memory_bytes=(GB // 50, GB // 6),
    memory_preload_rows=100 * THOUSAND,
    memory_rows=10 * THOUSAND,
    memory_epochs=(3, 10),
)


def parts(sizes: Sizes, rounds: int = 2, scale: float = 1.0) -> list[Part]:
    """All parts. `rounds` are for the parts that compare; `scale` multiplies the bytes of state in `memory`."""
    return [
        Part("throughput", "Throughput", _throughput(sizes), rounds),
        Part("state", "Epoch time against keys in state", _state(sizes), 1),
        Part("bins", "Epoch time against bins", _bins(sizes), rounds),
        Part("smallest", "The smallest epoch", _smallest(sizes), rounds),
        Part("steady", "Every epoch of a steady run", _steady(sizes), 1),
        Part("memory", "Private memory of a worker", _memory(sizes, scale), 1),
    ]


def _throughput(sizes: Sizes) -> tuple[Contender, ...]:
    rows, small, large = sizes.rows, sizes.record_rows, sizes.record_rows_large
    return (
        Contender("map", "Spark mapInArrow, passed through", "spark-map", rows, rows, *sizes.fast),
        Contender("map-drop", "Spark mapInArrow, dropped, tuned", "spark-map-drop", rows, rows, *sizes.fast),
        Contender("rocksdb", "Spark count(), RocksDB", "spark-rocksdb", rows, rows, *sizes.slow),
        Contender("hdfs", "Spark count(), HDFS-backed", "spark-hdfs", rows, rows, *sizes.slow),
        Contender("batch", "Millstream on_batch", "millstream-batch", rows, rows, *sizes.fast),
        Contender(
            "batch-parquet",
            "Millstream on_batch, to Parquet",
            "millstream-batch-out",
            rows,
            rows,
            *sizes.fast,
            parquet=True,
        ),
        Contender("rows", "Spark transformWithState, out per key", "spark-rows", small, small, *sizes.slowest),
        Contender("record", "Millstream on_record, out per record", "millstream-record", small, small, *sizes.fast),
        Contender(
            "record-large", f"Millstream on_record, {large:,} rows", "millstream-record", large, small, *sizes.fast
        ),
    )


def _state(sizes: Sizes) -> tuple[Contender, ...]:
    return tuple(
        Contender(
            f"keys-{keys}",
            f"{keys:,} keys",
            "millstream-state",
            sizes.state_rows,
            keys,
            *sizes.state_epochs,
            preload_rows=sizes.state_preload_rows,
        )
        for keys in sizes.state_keys
    )


def _bins(sizes: Sizes) -> tuple[Contender, ...]:
    rows = sizes.bins_rows
    return tuple(
        Contender(
            f"bins-{bins}",
            f"2^{bins.bit_length() - 1} bins",
            "millstream-batch",
            rows,
            5 * rows,
            *sizes.bins_epochs,
            bins=bins,
        )
        for bins in sizes.bins
    )


def _smallest(sizes: Sizes) -> tuple[Contender, ...]:
    shape = (sizes.smallest_rows, sizes.smallest_keys, *sizes.smallest_epochs)
    return (
        Contender("rocksdb", "Spark count(), RocksDB", "spark-rocksdb", *shape),
        Contender("hdfs", "Spark count(), HDFS-backed", "spark-hdfs", *shape),
        Contender("batch", "Millstream on_batch", "millstream-batch", *shape),
    )


def _steady(sizes: Sizes) -> tuple[Contender, ...]:
    rows, keys, epochs = sizes.steady_rows, sizes.steady_keys, sizes.steady_epochs
    return (Contender("batch", f"Millstream on_batch, {epochs} epochs", "millstream-batch", rows, keys, 0, epochs),)


def _memory(sizes: Sizes, scale: float) -> tuple[Contender, ...]:
    found = []
    for size in sizes.memory_bytes:
        wanted = int(size * scale)
        label = f"{wanted / GB:.3g} GB of state"
        shape = (sizes.memory_rows, 0, *sizes.memory_epochs)
        preload = min(sizes.memory_preload_rows, max(1, wanted // 1000))  # small states in several epochs, too
        found.append(
            Contender(f"state-{wanted}", label, "millstream-memory", *shape, preload_rows=preload, state_bytes=wanted)
        )
    return tuple(found)
