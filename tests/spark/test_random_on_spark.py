"""Random queries on real Spark: the same as simulated, and as the sequential oracle says, across a restart.

`MILLSTREAM_SEED` is the first seed, `MILLSTREAM_SPARK_QUERIES` how many queries are tried.
"""

from __future__ import annotations

import os
import pickle
import random
from collections import Counter
from pathlib import Path

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from millstream.testing import Simulated
from random_queries import (
    DAY,
    ROW,
    Oracle,
    Row,
    Shape,
    Weather,
    build,
    by_key,
    compare,
    shape_from,
    sink_name,
    states_of,
)

pytestmark = pytest.mark.spark

QUERIES = int(os.environ.get("MILLSTREAM_SPARK_QUERIES", "20"))
EPOCHS, PER_START = 4, 2


def worth_its_time(rng: random.Random) -> tuple[Shape, list[dict[str, list[Row]]]]:
    """A query with two steps or more and timers, and epochs of which much comes out."""
    while True:
        shape, weather = shape_from(rng, on_spark=True), Weather(rng)
        epochs = [weather.records(shape, 25) for _ in range(EPOCHS)]
        oracle = Oracle(shape, DAY)
        made = sum(len(rows) for records in epochs for rows in oracle.feed(records, DAY).values())
        timers = any(step.kind in ("windows", "session", "alarm") for step in shape.steps)
        if timers and len(shape.steps) > 1 and made >= 40:
            return shape, epochs


@pytest.mark.parametrize("number", range(QUERIES))
def test_a_random_query_on_spark_is_that_of_the_simulator_and_of_a_sequential_run(
    number: int, spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    shape, epochs = worth_its_time(random.Random(seed + number))
    print(f"MILLSTREAM_SEED={seed + number} MILLSTREAM_SPARK_QUERIES=1 makes this query again: {shape.nodes}")
    letters = [f"{step.name}.dead_letter" for step in shape.steps if step.picky]
    sinks = {sink_name(stream): ms.Memory() for stream in (*shape.sunk, *letters)}
    feeds = {source.name: Feed(tmp_path / source.name, ROW) for source in shape.sources}
    sim = Simulated(build(shape), dict.fromkeys(feeds, ROW), now=DAY, slots=2)
    oracle = Oracle(shape, DAY)
    expected: dict[str, list[Row]] = {stream: [] for stream in shape.sunk}
    for epoch, records in enumerate(epochs):
        for name, feed in feeds.items():
            feed.add(records.get(name, []))
        sim.feed(**records)
        for stream, rows in oracle.feed(records, DAY).items():
            expected[stream] += rows
        if epoch % PER_START != PER_START - 1:
            continue
        query = build(shape, {name: feed.stream(spark) for name, feed in feeds.items()}, sinks)
        running = query.start(spark, store=str(tmp_path / "store"), slots=3, trigger={"availableNow": True})
        running.await_termination()
        status = running.status()
        for step in shape.steps:
            assert status.late.get(step.name, 0) == sim.late(step.name) == oracle.late[step.name], step.name
        for name in (*feeds, *query.steps):
            assert status.watermarks.get(name) == sim.watermark(name) == oracle.watermark(name), name
    for stream, rows in expected.items():
        on_spark = [tuple(row.values()) for row in sinks[sink_name(stream)].rows()]
        compare(shape, stream, on_spark, rows)
        compare(shape, stream, sim.outputs(sink_name(stream)), rows)
    for step in shape.steps:
        for name in states_of(step):
            wanted = oracle.state(step.name, name)
            assert by_key(step, sim.state(step.name, name)) == wanted, f"{step.name}.{name}"
            collected = [tuple(row) for row in running.state(step.name, state=name).collect()]
            if step.kind == "windows":
                collected = [(*row[:-1], pickle.loads(row[-1])) for row in collected]
            assert by_key(step, collected) == wanted, f"{step.name}.{name}"
    for stream in letters:
        on_spark = [tuple(row.values()) for row in sinks[sink_name(stream)].rows()]
        assert Counter(on_spark) == Counter(sim.outputs(sink_name(stream))), stream
