"""Event time and timers on real Spark: the same as simulated, across restarts, and on an idle stream."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from millstream.testing import Simulated
from timers import COMMANDS, Obey, Patience, at

pytestmark = pytest.mark.spark


def build(origin: Any, out: ms.Memory) -> ms.Query:
    query = ms.Query("obey")
    source = query.source("commands", origin, event_time="ts", lateness="5 seconds")
    source.key_by("k").compute("obey", Obey, late="output").sink("out", out)
    return query


def test_watermarks_and_timers_on_spark_are_those_of_the_simulator_across_restarts(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    feed, simulated = Feed(tmp_path / "in", COMMANDS), Simulated(build(None, ms.Memory()), {"commands": COMMANDS})
    out, mark = ms.Memory(), 0
    rang: list[tuple[Any, ...]] = []
    for _ in range(3):
        for _ in range(4):
            mark += rng.randrange(12)
            rows = [
                (
                    rng.randrange(9),
                    at(mark + rng.randrange(-9, 3)),
                    rng.choice(["set", "set", "delete"]),
                    tag,
                    mark + due,
                )
                for tag, due in zip("ab" * 10, rng.choices(range(-5, 12), k=20), strict=True)
            ]
            feed.add(rows)
            simulated.feed(commands=rows)
        running = build(feed.stream(spark), out).start(
            spark, store=str(tmp_path / "store"), slots=3, trigger={"availableNow": True}
        )
        running.await_termination()
        status = running.status()
        assert status.watermarks == {name: simulated.watermark(name) for name in ("commands", "obey")}
        assert status.late.get("obey", 0) == simulated.late("obey")
        assert set(status.lags) == {"commands", "obey"}
        assert 0 < status.timers["obey"] < 1000
    rang = [tuple(row.values()) for row in out.rows()]
    assert Counter(rang) == Counter(simulated.outputs("out"))
    assert simulated.late("obey") > 0
    assert len(rang) > 20


def test_wall_time_timers_fire_on_an_idle_stream(spark: SparkSession, tmp_path: Path) -> None:
    feed, out = Feed(tmp_path / "in", "k long"), ms.Memory()
    feed.add([(1,), (2,)])
    query = ms.Query("patience")
    query.source("pings", feed.stream(spark)).key_by("k").compute("patience", Patience).sink("out", out)
    running = query.start(spark, store=str(tmp_path / "store"))
    deadline = time.monotonic() + 60
    while len(out.rows()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    running.stop()
    assert sorted(row["k"] for row in out.rows()) == [1, 2]
    assert 0 not in out.epochs or out.epochs[0].num_rows == 0, "not before their time"
