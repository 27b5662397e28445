"""Late records: their own time, the windows that they missed, and how many they are, however they were combined."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import millstream as ms
from millstream.control.overview import Pulse, overview_of
from millstream.testing import Simulated

DAY = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = {"s": "k long, ts timestamp"}


def at(seconds: float) -> datetime:
    return DAY + timedelta(seconds=seconds)


class Times(ms.Computation):
    """The event time of each record, as it is told."""

    output = "k long, time timestamp"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield at.key, at.time


def source(query: ms.Query) -> ms.KeyedStream:
    return query.source("s", None, event_time="ts").key_by("k")


WINDOWS = [ms.tumbling("1 minute"), ms.sliding("1 minute", every="30 seconds"), ms.sessions("10 seconds")]


@pytest.mark.parametrize("window", [None, *WINDOWS], ids=repr)
def test_a_late_record_keeps_its_own_time(window: Any) -> None:
    query = ms.Query("q")
    if window is None:
        step = source(query).compute("step", Times, late="output")
    else:
        step = source(query).window(window).count("step", late="output")
    step.output("late").key_by("k").compute("seen", Times).sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA)
    sim.feed(s=[(1, at(1000))])
    sim.feed(s=[(1, at(7)), (2, at(8)), (3, None)])
    assert sim.late("step") == 3
    assert sorted(sim.outputs("out"))[:2] == [(1, at(7)), (2, at(8))]
    assert len(sim.outputs("out")) == 3
    assert sim.late("seen") == 0, "who reads late records alone wants them"


def test_a_larger_window_behind_takes_late_records_where_they_belong() -> None:
    query = ms.Query("q")
    minutes = source(query).window(ms.tumbling("1 minute")).count("minutes", late="output")
    hours = minutes.output("late").key_by("k").window(ms.tumbling("1 hour")).count("hours", late="output")
    hours.sink("hourly", ms.Memory())
    hours.output("late").sink("lost", ms.Memory())
    sim = Simulated(query, SCHEMA, now=at(20_000))
    sim.feed(s=[(1, at(3600 + 600))])
    sim.feed(s=[(1, at(3600 + 30)), (1, at(30))])
    sim.feed(s=[(1, at(9000))])
    assert [row[:4] for row in sim.outputs("hourly")] == [(1, at(3600), at(7200), 1)]
    [(key, when, missed)] = sim.outputs("lost")
    assert (key, when) == (1, at(30))
    assert missed == [{"window_start": at(0), "window_end": at(3600)}]


def test_a_late_record_names_the_windows_that_it_missed() -> None:
    query = ms.Query("q")
    source(query).window(ms.sliding("1 minute", every="30 seconds")).count("w", late="output").output("late").sink(
        "late", ms.Memory()
    )
    sim = Simulated(query, SCHEMA)
    sim.feed(s=[(1, at(1000))])
    sim.feed(s=[(1, at(70))])
    [(_, when, missed)] = sim.outputs("late")
    assert when == at(70)
    assert [tuple(window.values()) for window in missed] == [(at(30), at(90)), (at(60), at(120))]


@pytest.mark.parametrize("aggregates", [{"n": ms.count()}, {"last": ms.max("ts")}, {"n": ms.count("ts")}], ids=str)
@pytest.mark.parametrize("late", ["drop", "output"])
def test_records_are_counted_however_they_were_combined(aggregates: dict[str, Any], late: str) -> None:
    query = ms.Query("q")
    windows = source(query).window(ms.sliding("1 minute", every="20 seconds"))
    windows.aggregate("w", late=late, **aggregates).sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA, map_tasks=1)
    sim.feed(s=[(1, at(100))])
    sim.feed(s=[(1, at(5))] * 40 + [(1, at(65))] * 10 + [(1, at(99))] * 3)
    # Windows end every 20 s; those up to second 100 have closed. At 5: ends 20, 40, 60. At 65: 80, 100, and 120 is
    # open. At 99: 100 has closed, 120 and 140 are open.
    assert sim.late_count("w") == (40, 13, 40 * 3 + 10 * 2 + 3 * 1)
    shown = overview_of(sim.driver.journal.history, Pulse(), {}, {})
    assert (shown.late, shown.partly_late, shown.missed_windows) == ({"w": 40}, {"w": 13}, {"w": 143})
    sim.restart()
    assert sim.late("w") == 40


def test_a_right_record_of_an_interval_counts_once_though_it_is_in_two_buckets() -> None:
    query = ms.Query("q")
    sides = [query.source(name, None, event_time="ts").key_by("k") for name in ("l", "r")]
    sides[0].join("j", sides[1], between=("0 seconds", "10 seconds")).sink("out", ms.Memory())
    sim = Simulated(query, {"l": "k long, ts timestamp", "r": "k long, ts timestamp"})
    sim.feed(l=[(1, at(1000))], r=[(1, at(1000))])
    sim.feed(r=[(1, at(5))] * 7, l=[(1, at(5))] * 2)
    assert sim.late("j") == 9


def test_what_a_computation_sends_to_its_own_output_late_keeps_its_time() -> None:
    class Judges(ms.Computation):
        outputs = {"late": "k long"}  # noqa: RUF012

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            if at.watermark is not None and at.time < at.watermark:
                yield ms.to("late", at.key)

    query = ms.Query("q")
    own = source(query).compute("own", Judges, late="process")
    own.output("late").key_by("k").compute("seen", Times).sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA)
    sim.feed(s=[(1, at(100))])
    sim.feed(s=[(1, at(7))])
    assert sim.outputs("out") == [(1, at(7))]
    assert sim.late("own") == 1


def test_through_a_map_late_records_stay_late_records() -> None:
    query = ms.Query("q")
    late = source(query).compute("step", Times, late="output").output("late")
    late.filter("some", lambda rows: [k < 5 for k in rows["k"].to_pylist()]).key_by("k").compute("seen", Times)
    assert query.steps["seen"].late == "process"
    both = query.source("other", None, event_time="ts").union(late)
    both.key_by("k").compute("mixed", Times)
    assert query.steps["mixed"].late == "drop"


def test_late_records_may_be_deduplicated() -> None:
    query = ms.Query("q")
    late = source(query).window(ms.tumbling("1 minute")).count("w", late="output").output("late")
    late.key_by("k").compute("once", ms.Dedupe("k", within="1 hour"))
    assert query.steps["once"].late == "drop", "it takes nothing else"


def test_an_aggregate_may_have_any_name() -> None:
    query = ms.Query("q")
    windows = source(query).window(ms.sliding("1 minute", every="30 seconds"))
    windows.aggregate("w", late_records=ms.max("ts"), records=ms.max("k")).sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA)
    sim.feed(s=[(1, at(1000)), (1, at(990))])
    sim.feed(s=[(1, at(5)), (1, at(6))])
    assert sim.late("w") == 2


def test_a_column_of_the_name_that_the_output_makes_is_refused() -> None:
    query = ms.Query("q")
    source(query).window(ms.tumbling("1 minute")).count("w", late="output")
    with pytest.raises(ms.UserError, match="the input has a column 'missed_windows'"):
        Simulated(query, {"s": "k long, ts timestamp, missed_windows string"})
