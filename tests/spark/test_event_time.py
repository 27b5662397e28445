"""Event time and timers on real Spark: the same as simulated, across restarts, and on an idle stream."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
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


class Delayed(ms.Computation):
    """Keeps records back until they are ten seconds old, and holds time for them."""

    waiting = ms.Value(object, default=[])
    ready = ms.Timer(ms.EVENT_TIME)
    oldest = ms.Hold()
    output = "k long, n long"

    def on_record(self, row: Any, at: ms.At) -> None:
        self.keep([*self.waiting.get(), (at.time, row.n)])

    @ready.fires
    def send(self, at: ms.At) -> Iterable[Any]:
        (moment, n), *rest = self.waiting.get()
        self.keep(rest)
        yield at.timed((at.key, n), moment)

    def keep(self, waiting: list[Any]) -> None:
        self.waiting.set(sorted(waiting))
        if waiting:
            self.oldest.set(min(waiting)[0])
            self.ready.set(min(waiting)[0] + timedelta(seconds=10))
        else:
            self.oldest.release()


class Times(ms.Computation):
    output = "k long, n long, time timestamp"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield at.key, row.n, at.time


def test_what_a_step_with_a_hold_sends_late_is_not_late_across_a_restart(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    schema, out = "k long, ts timestamp, n long", ms.Memory()

    def held(origin: Any, out: ms.Memory) -> ms.Query:
        query = ms.Query("held")
        events = query.source("events", origin, event_time="ts").key_by("k")
        events.compute("delayed", Delayed).key_by("k").compute("times", Times).sink("out", out)
        return query

    feed, simulated = Feed(tmp_path / "in", schema), Simulated(held(None, ms.Memory()), {"events": schema})
    sent: list[tuple[Any, ...]] = []
    for start in range(2):
        for epoch in range(2):
            mark = 16 * start + 8 * epoch
            rows = [(rng.randrange(5), at(mark + rng.randrange(9)), 100 * mark + n) for n in range(20)]
            feed.add(rows)
            simulated.feed(events=rows)
            sent += rows
        running = held(feed.stream(spark), out).start(
            spark, store=str(tmp_path / "store"), slots=3, trigger={"availableNow": True}
        )
        running.await_termination()
        newest, found = max(moment for _, moment, _ in sent), {row["n"]: row["time"] for row in out.rows()}
        due = newest - timedelta(seconds=10)
        assert found == {n: moment for _, moment, n in sent if moment <= due}, "each once, with its own time"
        marks = running.status().watermarks
        assert marks["delayed"] == newest
        assert marks["times"] == min(moment for _, moment, _ in sent if moment > due), "the oldest that is held"
        assert marks["times"] == simulated.watermark("times")
        assert not running.status().late
