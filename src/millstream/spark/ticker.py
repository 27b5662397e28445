"""The ticker: a source without records whose offsets make epochs, because Structured Streaming runs none without data.

Rules
-----
- An idle query runs an epoch a second. While a command is under way, it runs the next one at once: a thread of the
  driver moves the ticker's clock, which is Spark's manual clock of its rate source.
- With the trigger available-now the ticker goes by the system's clock, so that each run has an epoch at least.
- The offsets of the ticker may go back at a restart. Nothing reads what lies between them, so that does no harm.
- A stream always has the ticker: Spark refuses a checkpoint whose number of sources has changed, unless they have
  names.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

NAME = "millstream_ticker"
EVERY_S = 1.0
"""How often an idle query runs an epoch."""
SOON_S = 0.2
"""After how long it runs the next one while a round waits for what it brings to be there."""
_FIND_S = 60.0
_CLASS = "RateStreamMicroBatchStream"
_LOG = logging.getLogger("millstream")


def ticks(spark: SparkSession, named: bool, available_now: bool) -> DataFrame:
    """The ticker as a frame without records."""
    reader = spark.readStream.format("rate").option("rowsPerSecond", 1).option("numPartitions", 1)
    if not available_now:
        reader = reader.option("useManualClock", "true")
    # A limit of nothing is planned away: the offsets make epochs, but no task ever runs for them.
    return (reader.name(NAME) if named else reader).load().limit(0)


class Ticker:
    """Moves the clock of the ticker of one query, whose streams follow each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stream: StreamingQuery | None = None
        self._due = 0.0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="millstream-ticker", daemon=True)

    def follow(self, stream: StreamingQuery) -> None:
        """A stream has begun: its ticker is moved from now on."""
        with self._changed:
            self._stream = stream
            self._changed.notify_all()
        if not self._thread.is_alive() and not self._ended:
            self._thread = threading.Thread(target=self._run, name="millstream-ticker", daemon=True)
            self._thread.start()

    def hurry(self, after_s: float = 0.0) -> None:
        """There is something to do: the next epoch is due at once, or after some time."""
        with self._changed:
            self._due = min(self._due, time.monotonic() + after_s)
            self._changed.notify_all()

    def close(self) -> None:
        """Moves nothing any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while self._follow_one():
            pass

    def _follow_one(self) -> bool:
        """Moves the clock of one stream, until another one begins. Whether another is to be waited for."""
        with self._changed:
            self._changed.wait_for(lambda: self._stream is not None or self._ended)
            stream, self._stream = self._stream, None
            self._due = time.monotonic() + EVERY_S
        if self._ended or stream is None:
            return False
        try:
            source = self._find(stream)
            if source is None:
                return not self._ended
            clock, began_ms, tick = source.clock(), source.creationTimeMs(), 0
            while self._wait():
                tick += 1
                clock.setTime(began_ms + 1000 * tick)
        except Exception as error:  # Spark is gone, or going
            _LOG.debug("the ticker of a stream has ended: %s", error)
        return not self._ended

    def _wait(self) -> bool:
        """Waits until the next epoch is due. False if another stream has begun, or the query has ended."""
        with self._changed:
            while not self._ended and self._stream is None:
                left = self._due - time.monotonic()
                if left <= 0:
                    self._due = time.monotonic() + EVERY_S  # before the clock moves: who hurries from now on means more
                    return True
                self._changed.wait(left)
        return False

    def _find(self, stream: StreamingQuery) -> Any:
        """The ticker among the sources of a stream, which has them once its thread has begun."""
        deadline = time.monotonic() + _FIND_S
        while not self._ended and self._stream is None:
            sources = stream._jsq.streamingQuery().sources()
            found = [sources.apply(place) for place in range(sources.size())]
            tickers = [each for each in found if each.getClass().getSimpleName() == _CLASS]
            manual = [each for each in tickers if each.clock().getClass().getSimpleName() == "ManualClock"]
            if manual:
                return manual[-1]
            if not stream.isActive:
                return None
            if deadline < time.monotonic():
                _LOG.error("the ticker is not among the sources of the stream yet: an idle query runs no epochs")
                deadline = math.inf
            time.sleep(0.02 if deadline < math.inf else EVERY_S)
        return None
