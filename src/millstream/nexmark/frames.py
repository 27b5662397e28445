"""The generator as Spark frames: a batch, a closed loop that goes as fast as it can, an open loop of a fixed rate.

Rules
-----
- All three are the same expressions over numbers that Spark counts up; only who counts differs.
- In a loop, each kind of event has a reader of its own that counts all events and keeps its own kind. Readers of a
  closed loop advance together, `per_epoch` events each epoch.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamReader

from millstream.errors import UserError
from millstream.nexmark.expressions import columns, is_kind, numbering, references
from millstream.nexmark.parameters import KINDS, Parameters

Origin = Callable[[DataStreamReader], DataFrame]


def events_of(positions: DataFrame, given: Parameters, kind: str) -> DataFrame:
    """The events of a kind, of a frame with a column `position`."""
    numbered = positions.selectExpr(*_named(numbering(given))).where(is_kind(given, kind))
    return numbered.selectExpr(*_named(references(given, kind))).selectExpr(*_named(columns(given, kind)))


def _named(texts: dict[str, str]) -> list[str]:
    return [f"{text} AS {name}" for name, text in texts.items()]


def batch(spark: SparkSession, given: Parameters, kind: str, tasks: int | None = None) -> DataFrame:
    """All events of a kind as a batch."""
    if given.events is None:
        raise UserError("NEXMark: a batch has an end; give Parameters(events=...)")
    positions = spark.range(0, given.events, numPartitions=tasks).withColumnRenamed("id", "position")
    return events_of(positions, given, kind)


def batches(spark: SparkSession, given: Parameters, tasks: int | None = None) -> dict[str, DataFrame]:
    """All events as batches, by kind."""
    return {kind: batch(spark, given, kind, tasks) for kind in KINDS}


def closed_loop(given: Parameters, kind: str, per_epoch: int, tasks: int = 2) -> Origin:
    """The origin of a source: so many events (of all kinds, of which it keeps one) each epoch, as fast as they go."""

    def origin(read: DataStreamReader) -> DataFrame:
        numbers = read.format("rate-micro-batch").option("rowsPerBatch", per_epoch).option("numPartitions", tasks)
        return events_of(numbers.load().selectExpr("value AS position"), given, kind)

    return origin


def open_loop(given: Parameters, kind: str, per_second: int, tasks: int = 2) -> Origin:
    """The origin of a source: so many events (of all kinds, of which it keeps one) a second, whether or not the query
    keeps up."""

    def origin(read: DataStreamReader) -> DataFrame:
        numbers = read.format("rate").option("rowsPerSecond", per_second).option("numPartitions", tasks)
        return events_of(numbers.load().selectExpr("value AS position"), given, kind)

    return origin
