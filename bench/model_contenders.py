"""The contenders of the benchmark of the programming model. How they are measured is in `bench.contenders`.

Event time goes on by the length of a window in each epoch (sliding windows: by one slide), so that each epoch opens
windows and closes older ones. All have ten seconds of lateness. Productions are computed and go nowhere, on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as sql

import millstream as ms
from bench import workloads
from bench.contenders import (
    Contender,
    Found,
    Measured,
    measured,
    millstream_session,
    run_spark,
    spark_session,
    state_settings,
)

WINDOW_S, SLIDES = 10, 60
_LATENESS = "10 seconds"
_SECOND = 1_000_000


def _rocksdb(folder: Path) -> Any:
    return spark_session(folder, **state_settings("RocksDBStateStoreProvider"))


# -- windows ----------------------------------------------------------------------------------------------------------


def _spark_window(asked: Contender, folder: Path, span_s: int, window: Callable[[], Any]) -> Found:
    spark = _rocksdb(folder)
    frame = workloads.timed(spark, asked.rows, asked.keys, span_s * _SECOND).withWatermark("ts", _LATENESS)
    return run_spark(asked, folder, frame.groupBy(window(), "k").count())


def _millstream_window(asked: Contender, folder: Path, span_s: int, window: Any) -> Found:
    spark = millstream_session(folder)
    frame = workloads.timed(spark, asked.rows, asked.keys, span_s * _SECOND)

    def build(query: ms.Query) -> None:
        source = query.source("records", frame, event_time="ts", lateness=_LATENESS)
        source.key_by("k").window(window).count("count")

    run, found = measured(asked, spark, build, folder)
    return {**found, "late": run.status.late}


# -- joins ------------------------------------------------------------------------------------------------------------


def _sides(spark: Any, asked: Contender) -> tuple[DataFrame, DataFrame]:
    left = workloads.timed(spark, asked.rows, asked.keys, WINDOW_S * _SECOND)
    return left.withColumn("a", sql.col("k") + 1), left.withColumn("b", sql.col("k") + 2)


def _spark_join(asked: Contender, folder: Path) -> Found:
    left, right = _sides(_rocksdb(folder), asked)
    windowed = [
        side.withWatermark("ts", _LATENESS).withColumn("w", sql.window("ts", f"{WINDOW_S} seconds")).drop("ts")
        for side in (left, right)
    ]
    return run_spark(asked, folder, windowed[0].join(windowed[1], ["k", "w"]), mode="append")


def _millstream_join(asked: Contender, folder: Path) -> Found:
    spark = millstream_session(folder)
    frames = _sides(spark, asked)

    def build(query: ms.Query) -> None:
        left, right = (
            query.source(name, frame, event_time="ts", lateness=_LATENESS).key_by("k")
            for name, frame in zip(("left", "right"), frames, strict=True)
        )
        left.join("join", right, window=ms.tumbling(f"{WINDOW_S} seconds"))

    return measured(asked, spark, build, folder)[1]


# -- timers -----------------------------------------------------------------------------------------------------------


def _timers(asked: Contender, folder: Path, pending: bool, due: bool) -> Found:
    """Fills the state with keys, with timers or not, then counts in epochs in which none or a thousand are due."""
    spark = millstream_session(folder)
    epochs = -(-asked.keys // asked.preload_rows)
    keys = epochs * asked.preload_rows
    fresh = workloads.with_timers(spark, asked.preload_rows, keys, pending).where(f"k < {keys}")
    filling = Measured(asked, spark, _waking(fresh), folder)
    filling.wait(epochs)
    filling.stop()
    frame = workloads.without_timers(spark, asked.rows, keys, due)
    run, found = measured(asked, spark, _waking(frame), folder)
    fired = run.running.state("count", state="fired").count()
    if due != (fired > 0):
        raise RuntimeError(f"{fired} timers fired, {'some' if due else 'none'} expected")
    return {**found, "fired": fired}


def _waking(frame: DataFrame) -> Callable[[ms.Query], Any]:
    def build(query: ms.Query) -> None:
        source = query.source("records", frame, event_time="ts", lateness="0 seconds")
        source.key_by("k").compute("count", workloads.CountWithTimers, late="process")

    return build


# -- levels, productions, skew ----------------------------------------------------------------------------------------


def _levels(asked: Contender, folder: Path, depth: int, **first: Any) -> Found:
    spark = millstream_session(folder)
    frame = workloads.records(spark, asked.rows, asked.keys)

    def build(query: ms.Query) -> None:
        stream = query.source("records", frame)
        for level in range(1, depth + 1):
            given = first if level == 1 else {}
            stream = stream.key_by("k").compute(f"count{level}", workloads.CountBatchOut, **given)

    return measured(asked, spark, build, folder)[1]


def _skew(asked: Contender, folder: Path, hot: bool) -> Found:
    spark = millstream_session(folder)
    frame = workloads.timed(spark, asked.rows, asked.keys, WINDOW_S * _SECOND, hot).select("k")
    return measured(asked, spark, lambda query: query.source("records", frame).key_by("k").count("count"), folder)[1]


MODEL_KINDS: dict[str, Callable[[Contender, Path], Found]] = {
    "spark-tumbling": lambda asked, folder: _spark_window(
        asked, folder, WINDOW_S, lambda: sql.window("ts", f"{WINDOW_S} seconds")
    ),
    "millstream-tumbling": lambda asked, folder: _millstream_window(
        asked, folder, WINDOW_S, ms.tumbling(f"{WINDOW_S} seconds")
    ),
    "spark-sliding": lambda asked, folder: _spark_window(
        asked, folder, 1, lambda: sql.window("ts", f"{SLIDES} seconds", "1 second")
    ),
    "millstream-sliding": lambda asked, folder: _millstream_window(
        asked, folder, 1, ms.sliding(f"{SLIDES} seconds", every="1 second")
    ),
    "spark-join": _spark_join,
    "millstream-join": _millstream_join,
    "millstream-timers": lambda asked, folder: _timers(asked, folder, pending=False, due=False),
    "millstream-timers-pending": lambda asked, folder: _timers(asked, folder, pending=True, due=False),
    "millstream-timers-due": lambda asked, folder: _timers(asked, folder, pending=True, due=True),
    "millstream-levels-1": lambda asked, folder: _levels(asked, folder, 1),
    "millstream-levels-2": lambda asked, folder: _levels(asked, folder, 2),
    "millstream-levels-3": lambda asked, folder: _levels(asked, folder, 3),
    "millstream-weak": lambda asked, folder: _levels(asked, folder, 2),
    "millstream-strong": lambda asked, folder: _levels(asked, folder, 2, productions="strong"),
    "millstream-uniform": lambda asked, folder: _skew(asked, folder, hot=False),
    "millstream-hot": lambda asked, folder: _skew(asked, folder, hot=True),
}
