"""One suite of cases, run by the simulator and on Spark: outputs, state, watermarks and counts of late records agree.

A case is a query, and what its sources give in each epoch. Random queries are compared in test_random_on_spark.py.
"""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from millstream.testing import Simulated

pytestmark = pytest.mark.spark

UTC = dt.UTC
DAY = dt.datetime(2026, 1, 1, tzinfo=UTC)
EVENTS = "k long, ts timestamp, part string, x long"
Origins = Mapping[str, Any]
CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A query of sources with these schemas, and the records of each epoch by source."""

    build: Callable[[Origins], dict[str, ms.Stream]]
    schemas: dict[str, str]
    epochs: Sequence[Mapping[str, Sequence[Any]]]
    states: Sequence[str] = field(default=())


def at(seconds: float) -> dt.datetime:
    return DAY + dt.timedelta(seconds=seconds)


def case(
    *epochs: Sequence[Any] | Mapping[str, Sequence[Any]],
    schema: str = EVENTS,
    states: Sequence[str] = (),
    **others: str,
) -> Callable[[Callable[[Origins], dict[str, ms.Stream]]], None]:
    """Adds a case. Records are of the source `s`, unless an epoch says otherwise."""

    def added(build: Callable[[Origins], dict[str, ms.Stream]]) -> None:
        records = [each if isinstance(each, Mapping) else {"s": each} for each in epochs]
        CASES[build.__name__] = Case(build, {"s": schema, **others}, records, states)

    return added


def events(*rows: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    return [(k, None if s is None else at(s), part, x) for k, s, part, x in rows]


def timed(origins: Origins, **time: Any) -> ms.Stream:
    return ms.Query("agreement").source("s", origins["s"], event_time="ts", **time)


class Last(ms.Computation):
    """Keeps the last value of each key, and passes it on."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def bind(self, inputs: Any, key: Any) -> ms.Computation:
        return self

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.last.set(row.v)  # type: ignore[attr-defined]
        yield at.key, row.v


def last_of(kind: str) -> ms.Computation:
    made = type("LastOf", (Last,), {"last": ms.Value(kind), "output": f"k string, v {kind}"})
    made.__module__ = "__main__"  # by value: workers need not import it
    return made(kind)


STREAM = events((1, 100, "a", 1), (2, 30, "b", 2), (1, 60, "a", 3)), events((1, 95, "b", 4), (2, 50, "a", 5))
LATER = events((3, 400, "a", 6), (1, None, "a", 7)), events((1, 130, "b", 8), (3, 395, "b", 9), (2, 5, "b", 1))


@case(*STREAM, *LATER, states=("sums",))
def tumbling_with_late_records(origins: Origins) -> dict[str, ms.Stream]:
    windows = timed(origins, lateness="10 seconds").key_by("k").window(ms.tumbling("1 minute"))
    sums = windows.aggregate("sums", late="output", n=ms.count(), total=ms.sum("x"))
    return {"out": sums, "late": sums.output("late")}


@case(*STREAM, *LATER, states=("slid",))
def sliding_windows_of_which_some_are_missed(origins: Origins) -> dict[str, ms.Stream]:
    windows = timed(origins).key_by("k").window(ms.sliding("2 minutes", every="30 seconds"))
    return {"out": windows.aggregate("slid", most=ms.max("x"))}


@case(*STREAM, *LATER)
def sessions(origins: Origins) -> dict[str, ms.Stream]:
    windows = timed(origins, lateness="5 seconds").key_by("k").window(ms.sessions("45 seconds"))
    sessions = windows.aggregate("visits", late="output", every=ms.collect("x"))
    return {"out": sessions, "late": sessions.output("late")}


@case(*STREAM, *LATER)
def partitions_hold_the_watermark_back(origins: Origins) -> dict[str, ms.Stream]:
    stream = timed(origins, partition="part", expected=["a", "b"])
    return {"out": stream.key_by("k").window(ms.tumbling("30 seconds")).count("counts")}


@case(*STREAM, *LATER, states=("best",))
def the_best_of_each_key(origins: Origins) -> dict[str, ms.Stream]:
    return {"out": timed(origins).key_by("k").top_n("best", 2, by="x")}


@case(
    {"s": STREAM[0], "t": STREAM[1]},
    {"s": LATER[0], "t": LATER[1]},
    {"s": STREAM[1], "t": []},
    t=EVENTS,
)
def an_interval_join(origins: Origins) -> dict[str, ms.Stream]:
    left = timed(origins)
    right = left.query.source("t", origins["t"], event_time="ts")
    return {"out": left.key_by("k").join("pairs", right.key_by("k"), between=("-1 minute", "1 minute"))}


@case(*STREAM, STREAM[0], *LATER)
def duplicates_are_dropped(origins: Origins) -> dict[str, ms.Stream]:
    return {"out": timed(origins, lateness="2 minutes").dedupe("once", id=("k", "x"), within="10 minutes")}


@case(
    [("a", Decimal("1.10")), ("a", Decimal("2.25")), ("b", None)],
    [("a", Decimal("-7.00")), (None, Decimal("0.01"))],
    schema="k string, v decimal(9,2)",
    states=("means",),
)
def means_of_decimals(origins: Origins) -> dict[str, ms.Stream]:
    stream = ms.Query("agreement").source("s", origins["s"])
    return {"out": stream.key_by("k").aggregate("means", m=ms.mean("v"), s=ms.sum("v"))}


@case([(math.nan, 1), (-0.0, 2), (0.0, 3), (None, 4)], [(math.nan, 5), (math.inf, 6)], schema="k double, v long")
def keys_that_are_odd_numbers(origins: Origins) -> dict[str, ms.Stream]:
    return {"out": ms.Query("agreement").source("s", origins["s"]).key_by("k").aggregate("sums", s=ms.sum("v"))}


@case([(1, dt.datetime(1, 1, 1, tzinfo=UTC), "a", 1), (2, dt.datetime(9999, 12, 31, 23, 30, tzinfo=UTC), "a", 2)])
def the_ends_of_the_calendar(origins: Origins) -> dict[str, ms.Stream]:
    windows = timed(origins).key_by("k").window(ms.sliding("2 hours", every="1 hour"))
    return {"out": windows.count("counts", early=True)}


def large(kind: str, value: Any) -> None:
    @case([("a", value), ("b", value[:1])], [("b", value)], schema=f"k string, v {kind}", states=("step",))
    def large_value(origins: Origins) -> dict[str, ms.Stream]:
        stream = ms.Query("agreement").source("s", origins["s"])
        return {"out": stream.key_by("k").compute("step", last_of(kind))}

    CASES[f"{len(value)} of {kind}"] = CASES.pop("large_value")


for size in (0, 64 << 10, 64 << 20):
    large("binary", b"x" * size)


def nested(origins: Origins) -> dict[str, ms.Stream]:
    stream = ms.Query("agreement").source("s", origins["s"])
    return {"out": stream.key_by("k").compute("step", last_of(NESTED))}


NESTED, DEEP = "timestamp", [dt.datetime(1, 1, 1, tzinfo=UTC), None]
VALUES: list[Any] = list(DEEP)
for level in range(10):
    NESTED = f"array<{NESTED}>" if level % 2 else f"struct<a: {NESTED}>"
    VALUES = [[value] if level % 2 else {"a": value} for value in VALUES]
CASES["ten levels deep"] = Case(
    nested,
    {"s": f"k string, v {NESTED}"},
    [{"s": [("a", VALUES[0]), ("b", None)]}, {"s": [("a", VALUES[1])]}],
    ("step",),
)


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_agrees_with_spark(name: str, spark: SparkSession, tmp_path: Path) -> None:
    given = CASES[name]
    streams = given.build(dict.fromkeys(given.schemas))
    query = next(iter(streams.values())).query
    for sink, stream in streams.items():
        stream.sink(f"{sink}-sink", ms.Memory())
    sim = Simulated(query, given.schemas, slots=3, map_tasks=2)
    feeds = {source: Feed(tmp_path / source, schema) for source, schema in given.schemas.items()}
    for epoch in given.epochs:
        sim.feed(**epoch)
        for source, feed in feeds.items():
            feed.add(epoch.get(source, []))
    on_spark = given.build({source: feed.stream(spark) for source, feed in feeds.items()})
    sinks = {sink: ms.Memory() for sink in on_spark}
    for sink, stream in on_spark.items():
        stream.sink(f"{sink}-sink", sinks[sink])
    started = next(iter(on_spark.values())).query
    running = started.start(spark, str(tmp_path / "store"), slots=3, trigger={"availableNow": True})  # type: ignore[attr-defined]
    running.await_termination()
    status = running.status()
    assert status.unobserved == {}
    for sink, memory in sinks.items():
        expected = comparable(sim.outputs(f"{sink}-sink"))
        assert comparable(tuple(row.values()) for row in memory.rows()) == expected, sink
    assert any(sim.outputs(f"{sink}-sink") for sink in sinks), "a case without outputs says nothing"
    for step in given.states:
        assert comparable(map(tuple, running.state(step).collect())) == comparable(sim.state(step)), step
    for step in query.steps:
        counts = tuple(each.get(step, 0) for each in (status.late, status.partly_late, status.missed_windows))
        assert counts == tuple(sim.late_count(step)), step
    for source in (*given.schemas, *query.steps):
        assert status.watermarks.get(source) == sim.watermark(source), source


def comparable(rows: Iterable[Any]) -> Counter[str]:
    return Counter(repr(plain(row)) for row in rows)


def plain(value: Any) -> Any:
    """A value as both sides can have it: Spark's rows are tuples, and its times have no zone."""
    if isinstance(value, dict):
        return tuple(plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return tuple(map(plain, value))
    if isinstance(value, bytes | bytearray):
        return len(value), hash(bytes(value))
    if isinstance(value, dt.datetime):
        return (value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)).isoformat()
    if isinstance(value, float) and value == 0:
        return 0.0
    return str(value) if isinstance(value, np.datetime64) else value
