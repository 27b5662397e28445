"""The library of steps on real Spark: all of it in one query, the same as simulated, across a restart."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from millstream.testing import Simulated
from timers import at

pytestmark = pytest.mark.spark

SCHEMA = "k long, ts timestamp, x double"


def fold(key: int, record: Any, state: int | None) -> tuple[int | None, list[Any]]:
    seen = (state or 0) + 1
    return (None, [(key, seen)]) if seen == 3 else (seen, [])


def build(origin: Any) -> tuple[ms.Query, dict[str, ms.Memory]]:
    query = ms.Query("library")
    source = query.source("s", origin, event_time="ts", lateness="5 seconds", max_ahead="10000 days")
    keyed = source.key_by("k")
    tumbling = keyed.window(ms.tumbling("10 seconds"))
    steps = {
        "counts": keyed.count("counts"),
        "totals": keyed.aggregate("totals", total=ms.sum("x"), most=ms.max("x"), own=ms.combine("x", max)),
        "tumbling": tumbling.count("tumbling", early=True),
        "sliding": keyed.window(ms.sliding("10 seconds", every="2 seconds")).aggregate("sliding", avg=ms.mean("x")),
        "sessions": keyed.window(ms.sessions("4 seconds")).count("sessions"),
        "joined": keyed.join("joined", keyed, between=("-1 second", "0 seconds")),
        "best": keyed.top_n("best", 2, by="x"),
        "once": source.dedupe("once", id="k", within="5 seconds"),
        "thirds": keyed.state_machine("thirds", fold, state="long", output="k long, n long", late="process"),
    }
    steps["minutes"] = (
        steps["tumbling"].key_by("k").window(ms.tumbling("1 minute")).aggregate("minutes", n=ms.sum("count"))
    )
    sinks = {name: ms.Memory() for name in steps}
    for name, stream in steps.items():
        stream.sink(f"{name}-out", sinks[name])
    return query, sinks


def test_all_steps_of_the_library_on_spark_give_what_they_give_simulated(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    feed, simulated = Feed(tmp_path / "in", SCHEMA), Simulated(build(None)[0], {"s": SCHEMA})
    now, found = 0, Counter[Any]()
    for _ in range(2):
        for _ in range(3):
            now += rng.randrange(5, 40)
            rows = [(rng.randrange(5), at(now + rng.randrange(-9, 3)), rng.randrange(99) / 2) for _ in range(25)]
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
