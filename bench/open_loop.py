"""An open loop: records come at a fixed rate, whether or not the query keeps up.

A feed is a clock. Every tick (25 ms) it hands Spark one number, the tick's, and SQL makes the tick's records of it: the
event number n, and from that the key. Spark's own `rate` source would do the same once a second only, which is longer
than most of what is to be seen here; `rate-micro-batch` waits for the query, and so is no open loop at all.

Rules
-----
- Record n is created at `start + n / rate`. A tick that is handed over late, because the driver was busy, makes the
  latency of its records longer, and changes nothing else.
- Ticks are handed over in order and Spark reads all there are, so the numbers of epochs' records, added up, say which
  records those are.
- While state is filled there is no clock: a chunk of new keys is handed over when the one before has been committed.
- Each feed draws other keys (`seed`): those that an earlier one has drawn are in small, young segments, where they are
  found without a look at the rest of the state.
- A feed goes on where the checkpoint of another one has ended: `offset` is what Spark counts, the calls so far.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

TICK_S = 0.025
PARTITIONS = 2


class Feed:
    """Hands numbers to Spark. Times are `time.monotonic`; those of records are seconds after `start`."""

    def __init__(self, spark: SparkSession, rate: float, offset: int = -1, seed: int = 0) -> None:
        self._jvm: Any = spark.sparkContext._jvm
        self._spark, self._seed = spark, seed
        self.per_tick = max(1, round(rate * TICK_S))
        self.rate = self.per_tick / TICK_S
        jvm: Any = self._jvm
        runtime = jvm.org.apache.spark.sql.execution.streaming.runtime
        encoder = jvm.org.apache.spark.sql.Encoders.STRING()  # a small Long would travel as an Integer
        self._stream = runtime.MemoryStream.apply(spark._jsparkSession, PARTITIONS, encoder)
        if offset >= 0:
            at = runtime.LongOffset(offset)
            for name in ("currentOffset", "startOffset", "lastOffsetCommitted"):
                getattr(self._stream, f"{name}_$eq")(at)
        self.offset = offset
        self.start = 0.0
        self.ticks = 0
        """How many have been handed over."""
        self.reached: dict[int, int] = {}
        """For each of Spark's offsets, how many ticks there are up to it."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._trouble: BaseException | None = None

    def frame(self, keys: int, chunk: int) -> DataFrame:
        """The column `k`: for ticks, uniform among `keys` keys; for chunks, every key of the chunk once."""
        handed = DataFrame(self._stream.toDF(), self._spark).select(sql.col("value").cast("long"))
        tick, size = sql.col("value") >= 0, sql.lit(chunk)
        first = sql.when(tick, sql.col("value") * self.per_tick).otherwise((-sql.col("value") - 1) * size)
        count = sql.when(tick, sql.lit(self.per_tick)).otherwise(size)
        numbered = handed.select(tick.alias("tick"), sql.explode(sql.sequence(first, first + count - 1)).alias("n"))
        drawn = sql.pmod(sql.xxhash64("n", sql.lit(self._seed)), sql.lit(max(1, keys)))
        return numbered.select(sql.when(sql.col("tick"), drawn).otherwise(sql.col("n")).cast("long").alias("k"))

    def numbers(self) -> DataFrame:
        """The column `n`: the number of each record, ticks only."""
        handed = DataFrame(self._stream.toDF(), self._spark).select(sql.col("value").cast("long"))
        first, count = sql.col("value") * self.per_tick, sql.lit(self.per_tick)
        return handed.select(sql.explode(sql.sequence(first, first + count - 1)).alias("n"))

    def fill(self, chunks: Iterable[int]) -> None:
        """Hands over chunks, of new keys or of known ones, all at once."""
        self._hand_over([-number - 1 for number in chunks])

    def begin(self) -> None:
        """Starts the clock."""
        self.start = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Stops the clock; how many records there are in all."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._trouble is not None:
            raise self._trouble
        return self.ticks * self.per_tick

    def gone_on(self, spark: SparkSession, offset: int) -> Feed:
        """A feed for another session, of the same clock, that goes on after this one's `offset`: what was handed over
        since is handed over again, and what came in between at once."""
        other = Feed(spark, self.rate, offset, self._seed)
        other.start, other.ticks, other.reached = self.start, self.reached.get(offset, 0), dict(self.reached)
        for later in range(offset + 1, self.offset + 1):
            other._hand_over(list(range(other.ticks, self.reached[later])))
            other.ticks = self.reached[later]
        other._thread = threading.Thread(target=other._run, name="feed", daemon=True)
        other._thread.start()
        return other

    def now(self) -> float:
        """The time, in seconds after the start."""
        return time.monotonic() - self.start

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                due = int(self.now() / TICK_S)
                if due > self.ticks:
                    self.reached[self.offset + 1] = due
                    self._hand_over(list(range(self.ticks, due)))
                    self.ticks = due
                self._ended.wait(max(0.001, (self.ticks + 1) * TICK_S - self.now()))
        except BaseException as error:
            self._trouble = error

    def _hand_over(self, numbers: list[int]) -> None:
        self._stream.addData(self._jvm.PythonUtils.toSeq([str(number) for number in numbers]))
        self.offset += 1
