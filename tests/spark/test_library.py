"""The library of steps on real Spark: all of it in one query, the same as simulated, across a restart."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

from millstream.testing import Simulated
from steps import SCHEMA, Records, build

pytestmark = pytest.mark.spark


def test_all_steps_of_the_library_on_spark_give_what_they_give_simulated(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    feed, simulated = Feed(tmp_path / "in", SCHEMA), Simulated(build(None)[0], {"s": SCHEMA})
    records, found = Records(rng), Counter[Any]()
    for _ in range(2):
        for _ in range(3):
            rows = records.epoch()
            feed.add(rows)
            simulated.feed(s=rows)
        query, sinks = build(feed.stream(spark))
        running = query.start(spark, store=str(tmp_path / "store"), slots=3, trigger={"availableNow": True})
        running.await_termination()
        found.update((name, *row.values()) for name, sink in sinks.items() for row in sink.rows())
        assert running.status().late.get("tumbling", 0) == simulated.late("tumbling")
    expected = Counter((name, *row) for name in sinks for row in simulated.outputs(f"{name}-out"))
    assert {name for name, *_ in expected} == set(sinks), "every step produces"
    assert found == expected
