"""Feedback on real Spark: pending records outlive a stop, and an idle query goes on until none is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms

pytestmark = pytest.mark.spark

PAIRS = "k long, n long"


class Countdown(ms.Computation):
    seen = ms.Value("long", default=0)
    output = PAIRS

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.seen.set(self.seen.get() + 1)
        if row.n > 0:
            yield row.k + 1, row.n - 1


def test_a_loop_that_was_stopped_goes_on_at_the_next_start_without_new_records(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed = Feed(tmp_path / "in", PAIRS)
    feed.add([(key, 4) for key in range(20)])

    def start(**options: Any) -> ms.RunningQuery:
        query = ms.Query("loop")
        again = query.feedback("again", schema=PAIRS)
        counted = query.source("start", feed.stream(spark)).union(again).key_by("k").compute("count", Countdown)
        counted.feed_back(again)
        return query.start(spark, store=str(tmp_path / "store"), slots=3, **options)

    running = start(trigger={"availableNow": True})
    running.await_termination()
    ended = running.epoch
    assert ended < 4, "the loop has come to its end already"
    running = start()
    running.wait_epoch(4, timeout=120)
    running.stop()
    expected = Counter(key + step for key in range(20) for step in range(5))
    found = {row["k"]: row["seen"] for row in running.state("count").collect()}
    assert found == expected, f"stopped after epoch {ended}, and again after {running.epoch}"
