"""The library of steps on real Spark: all of it in one query, the same as simulated, across a restart."""

from __future__ import annotations

import random
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from millstream.model.types import format_type
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


@pytest.mark.parametrize("kind", ["decimal(5,2)", "decimal(18,6)", "decimal(28,2)", "double", "int"])
def test_a_mean_is_what_spark_makes_of_the_same_records(spark: SparkSession, kind: str, rng: random.Random) -> None:
    def value() -> Any:
        number = rng.randint(-9999, 9999)
        return Decimal(number).scaleb(-2) if "decimal" in kind else number if kind == "int" else number / 8

    records = [(rng.randrange(9), rng.choice([None, value()])) for _ in range(200)]
    query = ms.Query("means")
    query.source("s", None).key_by("k").aggregate("mean", m=ms.mean("x")).sink("out", ms.Memory())
    sim = Simulated(query, {"s": f"k int, x {kind}"})
    sim.feed(s=records)
    frame = spark.createDataFrame(records, f"k int, x {kind}").groupBy("k").avg("x")
    assert sorted(map(tuple, frame.collect())) == sorted(sim.outputs("out"))
    assert format_type(sim.graph.schema_of("mean").field("m").type).lower() == frame.schema[1].dataType.simpleString()
