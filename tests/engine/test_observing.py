"""Observations fail no epoch: extreme values through the whole of it, and every observation made to raise in turn."""

from __future__ import annotations

import datetime as dt
import logging
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.control.verbs import start_of
from millstream.engine import driver, host, observing, route
from millstream.protocol.adaptation import Balance
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.planner import plan_rescale
from millstream.testing import Simulated

UTC = dt.UTC


def query_of(kind: str) -> ms.Query:
    """A query that keeps the last value of each key, and passes it on."""

    class Last(ms.Computation):
        last = ms.Value(kind)
        output = f"k string, v {kind}"

        def on_record(self, row: Any, at: ms.At) -> Any:
            self.last.set(row.v)
            yield at.key, row.v

    query = ms.Query("last")
    query.source("s", None).key_by("k").compute("step", Last).sink("out", ms.Memory())
    return query


def nested(depth: int) -> tuple[str, Any]:
    """A type of arrays and structs so deep, and a value of it."""
    kind, value = "string", "at the bottom"
    for level in range(depth):
        kind = f"array<{kind}>" if level % 2 else f"struct<a: {kind}>"
        value = [value] if level % 2 else {"a": value}
    return kind, value


DEEP, AT_THE_BOTTOM = nested(10)
EXTREMES: dict[str, list[Any]] = {
    "boolean": [True, False, None],
    "tinyint": [-128, 127],
    "smallint": [-(2**15), 2**15 - 1],
    "int": [-(2**31), 2**31 - 1],
    "long": [-(2**63), 2**63 - 1, None],
    "float": [math.inf, -math.inf, -0.0, 2.0**-149],
    "double": [math.inf, -math.inf, -0.0, 5e-324, None],
    "decimal(38, 18)": [Decimal("-99999999999999999999.999999999999999999"), None],
    "string": ["", "\x00", "\U0001f600" * 1000, None],
    "binary": [b"", bytes(range(256)), None],
    "date": [dt.date(1, 1, 1), dt.date(9999, 12, 31), None],
    "timestamp": [dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), None],
    "timestamp_ntz": [dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999), None],
    "interval day to second": [dt.timedelta(days=-100_000_000), dt.timedelta(days=100_000_000), None],
    "map<string, array<int>>": [[], [("a", [1, None]), ("b", None)], None],
    DEEP: [AT_THE_BOTTOM, None],
}


@pytest.mark.parametrize("kind", EXTREMES)
def test_extreme_values_of_every_type_pass_through(kind: str) -> None:
    sim = Simulated(query_of(kind), {"s": f"k string, v {kind}"})
    sim.feed(s=[(str(number), value) for number, value in enumerate(EXTREMES[kind])])
    assert sorted(sim.outputs("out")) == [(str(number), value) for number, value in enumerate(EXTREMES[kind])]
    assert sim.driver.fence.counts == {}


def test_nan_passes_through() -> None:
    sim = Simulated(query_of("double"), {"s": "k string, v double"})
    sim.feed(s=[("a", math.nan)])
    assert math.isnan(sim.outputs("out")[0][1])


@pytest.mark.parametrize("size", [0, 1, (64 << 10) - 1, 64 << 10, 1 << 20, 64 << 20])
@pytest.mark.parametrize("kind", ["string", "binary"])
def test_values_of_any_size_pass_through(kind: str, size: int) -> None:
    value: Any = "x" * size if kind == "string" else b"x" * size
    sim = Simulated(query_of(kind), {"s": f"k string, v {kind}"})
    sim.feed(s=[("large first", value), ("small", value[:1])])
    sim.restart()
    sim.feed(s=[("small", value[:1]), ("large last", value)])
    assert {key: len(found) for key, found in sim.outputs("out")} == {
        "large first": size,
        "small": min(1, size),
        "large last": size,
    }
    assert sim.driver.fence.counts == {}


@pytest.mark.parametrize("when", [dt.datetime(1, 1, 1, tzinfo=UTC), dt.datetime(9999, 12, 31, 23, 59, tzinfo=UTC)])
def test_windows_at_the_ends_of_the_calendar_have_edges_that_only_numpy_can_hold(when: dt.datetime) -> None:
    query, memory = ms.Query("edges"), ms.Memory()
    source = query.source("s", None, event_time="ts", lateness="1 hour")
    source.key_by("k").window(ms.sliding("2 hours", every="1 hour")).count("n", early=True).sink("out", memory)
    sim = Simulated(query, {"s": "k string, ts timestamp"})
    sim.feed(s=[("a", when)])
    outside = [row for row in sim.outputs("out") if any(isinstance(cell, np.datetime64) for cell in row)]
    assert outside
    assert {str(cell)[:5] for row in outside for cell in row if isinstance(cell, np.datetime64)} <= {"0000-", "10000"}


OBSERVED = [
    (route, "sample_of", "a sample of the input"),
    (driver, "worth_keeping", "a sample of the input"),
    (host, "_load", "the load of a step"),
    (driver, "loads_together", "the load of steps"),
    (driver, "loads_of", "the load of slots"),
    (driver, "sources_of", "where state came from"),
    (driver, "busy_of", "the load of workers"),
    (driver, "numbers_of", "the numbers for conditions"),
]


def test_every_observation_may_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("cannot be observed")

    def observer(moment: str, epoch: int) -> None:
        raise RuntimeError("a display is broken")

    for module, name, _ in OBSERVED:
        monkeypatch.setattr(module, name, broken)
    caplog.set_level(logging.WARNING, "millstream")
    query = query_of("long")
    sim = Simulated(query, {"s": "k string, v long"}, observe=observer, adapt=Balance())
    for epoch in range(3):
        sim.feed(s=[("a", epoch), ("b", epoch)])
        if not epoch:
            sim.apply(waiting_rescale(sim))
    assert dict(sim.state("step")) == {"a": 2, "b": 2}
    counts = sim.driver.fence.counts
    assert {what for _, _, what in OBSERVED} <= set(counts)
    assert counts["an epoch at the moment 'committed'"] == 3
    told = [record.getMessage() for record in caplog.records]
    logged = [text for text in told if "cannot be observed, and is left out" in text]
    assert len(logged) == len(counts), "each kind is logged once"


def waiting_rescale(sim: Simulated) -> MigrationPlan:
    """A rescale that waits for a number of the query."""
    start = start_of(ms.metric("records") > 10**9, sim.driver.journal.history)
    return plan_rescale(sim.layout, 3, at=start)


def test_a_fence_lets_a_crash_pass() -> None:
    def gone() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observing.Fence()("anything", None, gone)
