"""What every contender computes: a count per key, written once for each interface; and the input they share.

The input is Spark's `rate-micro-batch` source, which gives the same rows in the same epochs to everybody: `value` 0, 1,
2... with a fixed number of rows per epoch. The key is `pmod(xxhash64(value), keys)`, so keys are drawn uniformly and
an epoch of as many rows as there are keys touches about 63 % of them.

This module is imported by name in Spark's Python workers, so it holds nothing but user code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import millstream as ms

PARTITIONS = 2
COUNTED = "k long, total long"


def records(spark: SparkSession, rows: int, keys: int) -> DataFrame:
    """`rows` records per epoch, of `keys` keys drawn uniformly: the column `k`."""
    return _rate(spark, rows).select(sql.pmod(sql.xxhash64("value"), sql.lit(keys)).alias("k"))


def new_keys(spark: SparkSession, rows: int) -> DataFrame:
    """`rows` records per epoch, each of a key that was not there before: 0, 1, 2..."""
    return _rate(spark, rows).select(sql.col("value").alias("k"))


BASE_MICROS = 1_767_225_600_000_000
"""The event time of record 0: the first of January 2026."""

TIMERS_MICROS = BASE_MICROS + 86_400_000_000
"""From when on the timers of the timer workload are due."""


def timed(spark: SparkSession, rows: int, keys: int, span_us: int, hot: bool = False) -> DataFrame:
    """The same with the column `ts`, an event time that goes on by `span_us` in each epoch. With `hot`, nine of ten
    records are of key 0."""
    k = sql.pmod(sql.xxhash64("value"), sql.lit(keys))
    if hot:
        k = sql.when(sql.pmod(sql.col("value"), sql.lit(10)) < 9, 0).otherwise(k)
    micros = sql.lit(BASE_MICROS) + (sql.col("value") * sql.lit(span_us / rows)).cast("long")
    return _rate(spark, rows).select(k.cast("long").alias("k"), sql.timestamp_micros(micros).alias("ts"))


def with_timers(spark: SparkSession, rows: int, pending: int, wanted: bool) -> DataFrame:
    """Records of new keys, each of which sets a timer (if `wanted`): a millisecond apart, in an order of their own."""
    micros = sql.lit(TIMERS_MICROS) + sql.pmod(sql.col("value") * 7919, sql.lit(pending)) * 1000
    at = sql.timestamp_micros(micros) if wanted else sql.lit(None).cast("timestamp")
    ts = sql.timestamp_micros(sql.lit(BASE_MICROS))
    return _rate(spark, rows).select(sql.col("value").alias("k"), ts.alias("ts"), at.alias("at"))


def without_timers(spark: SparkSession, rows: int, keys: int, going: bool) -> DataFrame:
    """Records that set none. With `going`, event time goes on by a second in each epoch, so a thousand are due."""
    start = TIMERS_MICROS if going else BASE_MICROS
    step = sql.floor((sql.col("value") - keys) / rows) * 1_000_000 if going else sql.lit(0)
    ts = sql.timestamp_micros((sql.lit(start) + step).cast("long"))
    k = sql.pmod(sql.xxhash64("value"), sql.lit(keys))
    return _rate(spark, rows).select(k.alias("k"), ts.alias("ts"), sql.lit(None).cast("timestamp").alias("at"))


def with_body(frame: DataFrame, size: int) -> DataFrame:
    """The records, each with a text of `size` characters."""
    return frame.select("k", sql.lpad(sql.col("k").cast("string"), size, "x").alias("body"))


def _rate(spark: SparkSession, rows: int) -> DataFrame:
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows)
    return source.option("numPartitions", PARTITIONS).load()


class CountBatch(ms.Computation):
    """Counts the records of each key, a whole batch at a time. Produces nothing: state only."""

    total = ms.Value("long", default=0)

    def on_batch(self, batch: ms.Batch) -> None:
        self.total.write(batch, self.total.read(batch) + batch.count())


class CountBatchOut(ms.Computation):
    """The same, with a production per key and epoch: the key and its count, as Spark's update mode gives."""

    total = ms.Value("long", default=0)
    output = COUNTED

    def on_batch(self, batch: ms.Batch) -> Iterable[pa.RecordBatch]:
        totals = self.total.read(batch) + batch.count()
        self.total.write(batch, totals)
        yield batch.output(batch.keys, totals)


class CountRecord(ms.Computation):
    """Counts record by record, with a production per record: more productions than `CountRows`, one per key."""

    total = ms.Value("long", default=0)
    output = COUNTED

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        total = self.total.get() + 1
        self.total.set(total)
        yield at.key, total


class CountWithTimers(ms.Computation):
    """Counts, and sets a timer where a record asks for one. A timer that fires counts, too."""

    total = ms.Value("long", default=0)
    fired = ms.Value("long", default=0)
    wake = ms.Timer(ms.EVENT_TIME)

    def on_batch(self, batch: ms.Batch) -> None:
        self.total.write(batch, self.total.read(batch) + batch.count())
        at = batch.last("at")
        asked = at.is_valid().to_numpy(zero_copy_only=False)
        if asked.any():
            self.wake.set(batch, at.cast(pa.timestamp("us")).to_numpy(zero_copy_only=False), where=asked)

    @wake.fires
    def woken(self, batch: ms.TimerBatch) -> None:
        self.fired.write(batch, self.fired.read(batch) + 1)


class LatestBody(ms.Computation):
    """Reads the text of each key and replaces it by that of the key's last record. For states of many bytes."""

    body = ms.Value("string")

    def on_batch(self, batch: ms.Batch) -> None:
        self.body.read(batch)
        self.body.write(batch, batch.last("body"))


class CountRows(StatefulProcessor):
    """The count for Spark's row-based `transformWithState`: one call, and one production, per key and epoch."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.total = handle.getValueState("total", "total long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self.total.get()
        total = (before[0] if before is not None else 0) + sum(1 for _ in rows)
        self.total.update((total,))
        yield Row(k=key[0], total=total)

    def close(self) -> None:
        pass


def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: every batch goes to Python and comes back."""
    yield from batches


def drop(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For `mapInArrow`: every batch goes to Python, and nothing comes back."""
    for _ in batches:
        pass
    yield from ()


INSTANCES = 80
"""Of the stateful map: as many as in the paper."""


class StatefulMap(ms.Computation):
    """The SMQ of the BTW'19 paper: counts what its instance has received so far, and appends that number."""

    received = ms.Value("long", default=0)
    output = "n long, created timestamp, received long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        received = self.received.get() + 1
        self.received.set(received)
        yield row.n, row.created, received


def every_fifth(batch: pa.RecordBatch) -> Any:
    """Lets every fifth record pass."""
    return batch["n"].to_numpy() % 5 == 0


def every_second(batch: pa.RecordBatch) -> Any:
    """Lets every second record pass."""
    return batch["n"].to_numpy() % 2 == 1


def fifth_auctions(batch: pa.RecordBatch) -> Any:
    """Lets every fifth auction pass."""
    return batch["id"].to_numpy() % 5 == 0


def second_auctions(batch: pa.RecordBatch) -> Any:
    """Lets every second auction pass."""
    return batch["id"].to_numpy() % 2 == 1


class CountInDoubles(CountBatch):
    """The count per key, in another type."""

    total = ms.Value("double", default=0.0)
