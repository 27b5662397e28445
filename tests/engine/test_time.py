"""Event time (G7): watermarks never go back, lateness is judged by the epoch before, times travel with records."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.errors import StepError, UserError
from millstream.model.query import Query
from millstream.store.objects import open_store
from millstream.testing import Crash, FaultyStore, Simulated

EVENTS = "k long, ts timestamp"
DAY = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return DAY + timedelta(seconds=seconds)


def events(*pairs: tuple[int, float | None]) -> list[tuple[int, datetime | None]]:
    return [(key, None if seconds is None else at(seconds)) for key, seconds in pairs]


class Seen(ms.Computation):
    """Passes on what it is told of time."""

    output = "k long, time timestamp, watermark timestamp"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield at.key, at.time, at.watermark


class Keys(ms.Computation):
    """The same over whole columns, one production per key."""

    output = "k long"

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        yield batch.output(batch.keys)


def chain(late: str = "drop", **time: Any) -> Query:
    """Three levels; `third` reads `second` and the source itself."""
    query = ms.Query("chain")
    source = query.source("events", None, event_time="ts", **time)
    first = source.key_by("k").compute("first", Seen, late=late)
    second = first.key_by("k").compute("second", Keys)
    third = query.compute("third", Seen, a=second.key_by("k"), b=source.key_by("k"))
    for stream in (first, second, third):
        stream.sink(f"{stream.name}_out", ms.Memory())
    if late == "output":
        first.output("late").sink("late_out", ms.Memory())
    return query


def test_the_watermark_follows_the_newest_record_and_reaches_the_last_level_in_the_same_epoch() -> None:
    sim = Simulated(chain(lateness="10 seconds"), {"events": EVENTS}, slots=3)
    assert sim.watermark("third") is None
    sim.feed(events=events((1, 100), (2, 30), (3, 60)))
    for name in ("events", "first", "second", "third"):
        assert sim.watermark(name) == at(90), name
    assert sim.late("first") == 0, "the records of one epoch do not make each other late"
    sim.feed(events=events((1, 95), (2, 50)))
    assert sim.watermark("third") == at(90), "it never goes back"
    assert sim.late("first") == 1
    assert sim.late("third") == 1, "a step that reads the source judges for itself"
    rows = sim.delivered["first_out"][1]
    assert rows == [(1, at(95), at(90))]


def test_a_production_has_the_time_of_its_record_and_is_never_late_for_the_next_step() -> None:
    sim = Simulated(chain("process", lateness="0 seconds"), {"events": EVENTS}, slots=2)
    sim.feed(events=events((1, 100)))
    sim.feed(events=events((1, 40)))  # late, and processed by `first` only
    assert sim.delivered["first_out"][1] == [(1, at(40), at(100))]
    assert sim.delivered["second_out"][1] == [(1,)], "its production was raised to the watermark"
    assert sim.delivered["third_out"][1] == [(1, at(100), at(100))]
    assert sim.late("first") == sim.late("second") == 0
    assert sim.late("third") == 1


def test_late_records_can_be_had_as_a_stream() -> None:
    sim = Simulated(chain("output", lateness="0 seconds"), {"events": EVENTS}, slots=2)
    sim.feed(events=events((1, 100)))
    sim.feed(events=events((1, 40), (2, 100), (3, None)))
    assert sorted(sim.delivered["late_out"][1], key=str) == [(1, at(40)), (3, None)]
    assert sim.delivered["first_out"][1] == [(2, at(100), at(100))]
    assert sim.late("first") == 2


def test_a_source_that_falls_silent_holds_the_others_back_for_a_while_only() -> None:
    query = ms.Query("two")
    a = query.source("a", None, event_time="ts", idle_after="30 seconds")
    b = query.source("b", None, event_time="ts", idle_after="30 seconds")
    query.compute("both", Seen, a=a.key_by("k"), b=b.key_by("k"))
    sim = Simulated(query, {"a": EVENTS, "b": EVENTS})
    sim.feed(a=events((1, 10)), b=events((1, 5)))
    assert sim.watermark("both") == at(5)
    sim.feed(a=events((1, 20)))
    assert sim.watermark("both") == at(5), "b may still come"
    sim.advance_clock("31 seconds")
    sim.feed(a=events((1, 40)))
    assert sim.watermark("both") == at(40)
    sim.feed(b=events((1, 6)))
    assert sim.late("both") == 1
    assert sim.watermark("both") == at(40), "it comes back far behind, and does not pull anybody back"
    sim.advance_clock("1 hour")
    assert sim.watermark("both") == at(40), "if all are silent, time stands still"


def test_a_silent_source_holds_nobody_back_through_steps_either_and_a_restart_is_no_silence() -> None:
    def build(store: Any, now: datetime) -> Simulated:
        query = ms.Query("far")
        a = query.source("a", None, event_time="ts", idle_after="30 seconds")
        b = query.source("b", None, event_time="ts", idle_after="30 seconds")
        passed = a.key_by("k").compute("pass", Seen)
        query.compute("both", Keys, a=passed.key_by("k"), b=b.key_by("k"))
        return Simulated(query, {"a": EVENTS, "b": EVENTS}, store, now=now)

    store = open_store("memory://")
    sim = build(store, at(0))
    sim.feed(a=events((1, 5)), b=events((1, 10)))
    assert sim.watermark("both") == at(5)
    sim.advance_clock("31 seconds")
    sim.feed(b=events((1, 40)))
    assert sim.watermark("pass") == at(5)
    assert sim.watermark("both") == at(40), "it does not wait for a step that waits for a"
    sim = build(store, at(7200))
    sim.feed(a=events((1, 60)))
    assert sim.watermark("both") == at(40), "that nobody looked for two hours does not make b silent"
    sim.feed(a=events((1, 70)), b=events((1, 50)))
    assert sim.late("both") == 0
    assert sim.watermark("both") == at(50)


def test_a_source_whose_times_cannot_be_used_is_silent() -> None:
    query = ms.Query("useless")
    a = query.source("a", None, event_time="ts", idle_after="30 seconds")
    b = query.source("b", None, event_time="ts", idle_after="30 seconds")
    query.compute("both", Seen, a=a.key_by("k"), b=b.key_by("k"))
    sim = Simulated(query, {"a": EVENTS, "b": EVENTS}, now=at(0))
    for second in range(5):
        sim.feed(a=events((1, None), (1, 10**9)), b=events((1, 10 * second)))
        sim.now += timedelta(seconds=10)
    sim.feed(a=events((1, None)), b=events((1, 50)))
    assert sim.watermark("both") == at(50)


def test_timed_and_untimed_streams_may_be_united() -> None:
    query = ms.Query("mixed")
    a, b = query.source("a", None, event_time="ts"), query.source("b", None)
    first = a.union(b).key_by("k").compute("first", Seen)
    first.key_by("k").compute("second", Seen).sink("out", ms.Memory())
    sim = Simulated(query, {"a": EVENTS, "b": EVENTS}, slots=1)
    sim.feed(b=events((1, 7)))
    sim.feed(a=events((1, 10)))
    sim.feed(a=events((1, 20)), b=events((1, 1)))
    assert [row[1] for row in sim.outputs("out")[1:]] == [at(10), at(20), at(10)]
    assert sim.late("first") == 0


def test_a_production_that_has_no_time_has_none_for_the_next_step_either() -> None:
    """Before there is a watermark it could be raised to; it is not late all the same."""

    class Columns(ms.Computation):
        output = "k long, none boolean"

        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            yield batch.output(batch.keys, np.isnat(batch.times[batch.starts]))

    class Soon(ms.Computation):
        ring = ms.Timer(ms.EVENT_TIME)

        def on_record(self, row: Any, at: ms.At) -> None:
            assert at.time is None
            self.ring.set(timedelta(seconds=1))

        @ring.fires
        def rings(self, at: ms.At) -> None: ...

    query = ms.Query("timeless")
    a, b = query.source("a", None, event_time="ts"), query.source("b", None)
    first = a.union(b).key_by("k").compute("first", Seen)
    first.key_by("k").compute("second", Columns).sink("out", ms.Memory())
    sim = Simulated(query, {"a": EVENTS, "b": EVENTS})
    sim.feed(b=events((1, 7)))
    assert sim.outputs("out") == [(1, True)]
    assert sim.late("second") == 0
    first.key_by("k").compute("soon", Soon)
    sim = Simulated(query, {"a": EVENTS, "b": EVENTS})
    with pytest.raises(UserError, match="timer 'ring': the record has no event time to count from"):
        sim.feed(b=events((1, 7)))


def test_productions_of_on_batch_have_the_newest_time_of_their_key_where_there_is_one_for_each() -> None:
    query = ms.Query("own")
    source = query.source("events", None, event_time="ts")
    source.key_by("k").compute("keys", Keys).key_by("k").compute("seen", Seen).sink("out", ms.Memory())
    sim = Simulated(query, {"events": EVENTS}, slots=1, now=at(0))
    sim.feed(events=events((1, 10), (2, 10.0**9), (1, 12)))
    assert {row[0]: row[1] for row in sim.outputs("out")} == {1: at(12), 2: at(10**9)}


def test_names_that_travel_beside_the_columns_are_refused() -> None:
    class Own(ms.Computation):
        output = "k long, __time long"

        def on_record(self, row: Any, at: ms.At) -> None: ...

    query = ms.Query("q")
    query.source("events", None).key_by("k").compute("own", Own)
    with pytest.raises(UserError, match="step 'own' has a column '__time', a name that Millstream uses itself"):
        Simulated(query, {"events": EVENTS})
    query = ms.Query("q")
    query.source("events", None).key_by("k").compute("seen", Seen)
    with pytest.raises(UserError, match="source 'events' has a column '__hash'"):
        Simulated(query, {"events": "k long, __hash long"})


def test_a_watermark_may_be_stated_by_a_function() -> None:
    """An injector: here, the time of the oldest file that is not finished."""
    unfinished = [at(50), at(70)]
    query = ms.Query("files")
    source = query.source("files", None, event_time="ts", watermark=lambda: min(unfinished, default=None))
    source.key_by("k").compute("seen", Seen)
    sim = Simulated(query, {"files": EVENTS})
    sim.feed(files=events((1, 1000)))
    assert sim.watermark("seen") == at(50), "whatever the records say"
    unfinished.remove(at(50))
    sim.feed()
    assert sim.watermark("seen") == at(70)
    unfinished.clear()
    sim.feed()
    assert sim.watermark("seen") == at(70), "no news"
    unfinished.append("yesterday")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="source 'files': its watermark function failed: .*expected a datetime"):
        sim.feed()
    unfinished.clear()
    sim.feed()
    assert sim.epoch == 3


class OldestUnfinished:
    """The creation time, which is the name, of the oldest file that is being written, as of the call before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, None

    def __call__(self) -> datetime | None:
        before, unfinished = self.found, [at(float(path.stem)) for path in self.folder.glob("*.part")]
        self.found = min(unfinished, default=None)
        return before


def test_the_watermark_of_files_is_the_creation_time_of_the_oldest_that_is_not_finished(tmp_path: Path) -> None:
    query = ms.Query("files")
    source = query.source("files", None, event_time="ts", watermark=OldestUnfinished(tmp_path))
    source.key_by("k").compute("seen", Seen).sink("out", ms.Memory())
    sim = Simulated(query, {"files": EVENTS})
    for created in (10, 20, 30):
        (tmp_path / f"{created}.part").touch()
    sim.feed()
    sim.feed()
    assert sim.watermark("seen") == at(10)
    (tmp_path / "10.part").rename(tmp_path / "10")  # after Spark has listed the files of epoch 2
    sim.feed(files=[])
    assert sim.watermark("seen") == at(10), "what was finished just now has not been read"
    (tmp_path / "30.part").rename(tmp_path / "30")
    sim.feed(files=events((1, 10), (3, 30)))
    assert sim.watermark("seen") == at(20), "30 is finished, 20 is not"
    (tmp_path / "20.part").rename(tmp_path / "20")
    sim.feed(files=events((2, 20)))
    sim.feed()
    assert sim.watermark("seen") == at(20), "nothing is being written: no news"
    assert (sim.late("seen"), len(sim.outputs("out"))) == (0, 3)


STATING = "k long, ts timestamp, wm timestamp"


def stating(*rows: tuple[int, float | None, float | None]) -> list[tuple[Any, ...]]:
    return [(key, *(None if s is None else at(s) for s in seconds)) for key, *seconds in rows]


def test_a_watermark_may_be_stated_by_a_column() -> None:
    query = ms.Query("stating")
    source = query.source("events", None, event_time="ts", watermark="wm", max_ahead="1 hour")
    source.key_by("k").compute("seen", Seen).sink("out", ms.Memory())
    sim = Simulated(query, {"events": STATING}, slots=2, map_tasks=3, now=at(0))
    sim.feed(events=stating((1, 500, None), (2, 400, None)))
    assert sim.watermark("seen") is None, "event times state nothing"
    sim.feed(events=stating((1, 60, 40), (2, 50, 10), (3, 70, None)))
    assert sim.watermark("events") == sim.watermark("seen") == at(40), "the newest of those that were stated"
    assert sim.late("seen") == 0
    sim.feed(events=stating((1, 39, 30), (2, 40, 30)))
    assert sim.watermark("seen") == at(40), "it never goes back"
    assert sim.late("seen") == 1
    sim.feed(events=stating((1, 60, 4 * 3600.0), (2, 60, 50)))
    assert sim.watermark("seen") == at(50), "further ahead of the clock than max_ahead"
    assert len(sim.outputs("out")) == 8


def test_a_source_that_sends_records_but_states_nothing_is_not_silent() -> None:
    query = ms.Query("quiet")
    a = query.source("a", None, event_time="ts", watermark="wm", idle_after="30 seconds")
    b = query.source("b", None, event_time="ts")
    query.compute("both", Seen, a=a.key_by("k"), b=b.key_by("k"))
    sim = Simulated(query, {"a": STATING, "b": EVENTS}, now=at(0))
    sim.feed(a=stating((1, 5, 5)), b=events((1, 10)))
    for step in range(5):
        sim.now += timedelta(seconds=20)
        sim.feed(a=stating((1, 10 + step, None)), b=events((1, 20 + step)))
    assert sim.watermark("both") == at(5), "its records come, so its word is waited for"
    sim.advance_clock("31 seconds")
    sim.feed(b=events((1, 90)))
    assert sim.watermark("both") == at(90)


def test_a_percentile_watermark_leaves_the_slowest_behind() -> None:
    query = ms.Query("most")
    query.source("events", None, event_time="ts", percentile=0.9).key_by("k").compute("seen", Seen)
    sim = Simulated(query, {"events": EVENTS}, map_tasks=1)
    sim.feed(events=events(*((key, float(key)) for key in range(100))))
    assert sim.watermark("seen") == at(9)
    sim.feed(events=events((1, 3), (1, 9), (1, 200)))
    assert sim.late("seen") == 1


def test_one_bad_clock_does_not_end_time() -> None:
    query = ms.Query("clocks")
    query.source("events", None, event_time="ts", max_ahead="1 hour").key_by("k").compute("seen", Seen).sink(
        "out", ms.Memory()
    )
    sim = Simulated(query, {"events": EVENTS}, now=at(0))
    sim.feed(events=events((1, 10), (2, 3600), (3, 10 * 366 * 86400.0)))
    assert sim.watermark("seen") == at(3600)
    assert len(sim.delivered["out"][0]) == 3, "it is a record like any other, only not a clock"
    sim.feed(events=events((1, 3600)))
    assert sim.late("seen") == 0


def test_a_record_without_a_time_is_late_and_counted() -> None:
    sim = Simulated(chain(lateness="1 second"), {"events": EVENTS})
    sim.feed(events=events((1, None), (2, 5)))
    assert sim.late("first") == 1
    assert sim.watermark("first") == at(4)


def test_on_batch_sees_times_and_may_give_its_productions_times_of_their_own() -> None:
    seen: list[Any] = []

    class Stamped(ms.Computation):
        output = "k long"
        outputs = {"old": "k long"}  # noqa: RUF012

        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            seen.append((batch.watermark, sorted(batch.times.tolist())))
            yield batch.timed(batch.output(batch.keys), np.full(len(batch), np.datetime64("2026-01-01T00:01:17")))
            stamps = pa.array([at(0)] * len(batch), pa.timestamp("us", "UTC"))
            yield batch.timed(batch.output_to("old", batch.keys), stamps)
            with pytest.raises(UserError, match="1 times found, 2 expected"):
                batch.timed(batch.output(batch.keys), [np.datetime64("2026-01-01")])

    query = ms.Query("stamped")
    stamped = query.source("events", None, event_time="ts").key_by("k").compute("stamped", Stamped)
    stamped.key_by("k").compute("new", Seen).sink("new_out", ms.Memory())
    stamped.output("old").key_by("k").compute("old", Seen).sink("old_out", ms.Memory())
    sim = Simulated(query, {"events": EVENTS}, slots=1)
    sim.feed(events=events((1, 10), (2, 20)))
    sim.feed(events=events((1, 30), (2, 40)))
    naive = [[at(s).replace(tzinfo=None) for s in pair] for pair in ((10, 20), (30, 40))]
    assert seen == [(None, naive[0]), (at(20), naive[1])]
    assert sorted(sim.delivered["new_out"][1]) == [(1, at(77), at(20)), (2, at(77), at(20))]
    assert sorted(sim.delivered["old_out"][1]) == [(1, at(20), at(20)), (2, at(20), at(20))], "raised to the watermark"


def test_a_production_of_on_record_may_have_a_time_of_its_own() -> None:
    class Stamped(ms.Computation):
        output = "k long, n long"
        outputs = {"side": "k long, n long"}  # noqa: RUF012

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield at.key, 0
            yield at.timed((at.key, 1), DAY + timedelta(seconds=77))
            yield at.timed(ms.to("side", at.key, 2), DAY)
            yield at.timed({"k": at.key, "n": 3}, DAY + timedelta(seconds=88))

    query = ms.Query("own")
    stamped = query.source("events", None, event_time="ts").key_by("k").compute("stamped", Stamped)
    stamped.union(stamped.output("side")).key_by("n").compute("seen", Seen).sink("out", ms.Memory())
    sim = Simulated(query, {"events": EVENTS}, slots=1)
    sim.feed(events=events((1, 10)))
    sim.feed(events=events((1, 20)))
    assert sorted(sim.delivered["out"][1]) == [
        (0, at(20), at(10)),
        (1, at(77), at(10)),
        (2, at(10), at(10)),
        (3, at(88), at(10)),
    ], "a time before the watermark is raised to it"

    class Wrong(Stamped):
        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield at.timed((at.key, 1), "noon")  # type: ignore[arg-type]

    query = ms.Query("wrong")
    query.source("events", None, event_time="ts").key_by("k").compute("wrong", Wrong)
    with pytest.raises(StepError, match="at.timed: found 'noon', expected a datetime"):
        Simulated(query, {"events": EVENTS}).feed(events=events((1, 10)))


def test_a_map_of_productions_that_returns_other_rows_must_say_their_time() -> None:
    query = ms.Query("mapped")
    first = query.source("events", None, event_time="ts").key_by("k").compute("first", Seen)
    first.map_batches("less", lambda batch: batch.slice(1), output=Seen.output).key_by("k").compute("second", Seen)
    sim = Simulated(query, {"events": EVENTS}, slots=1)
    with pytest.raises(StepError, match=r"less.*returned 1 records for 2, whose event times stand beside them"):
        sim.feed(events=events((1, 10), (1, 20)))
    with pytest.raises(UserError, match="event_time='k' is no column of type TIMESTAMP of its output"):
        first.map_batches("wrong", lambda batch: batch, output=Seen.output, event_time="k")
    bare = ms.Query("bare")
    mapped = bare.source("events", None).map_batches("m", lambda batch: batch, output=EVENTS, event_time="ts")
    mapped.key_by("k").compute("second", Seen)
    with pytest.raises(UserError, match="map 'm': event_time='ts', but what it reads has no event time"):
        Simulated(bare, {"events": EVENTS})


@pytest.mark.parametrize("slots", [1, 3])
def test_what_a_filter_lets_through_keeps_its_time_wherever_epochs_end(slots: int) -> None:
    query = ms.Query("filtered")
    first = query.source("events", None, event_time="ts").key_by("k").compute("first", Seen)
    odd = first.filter("odd", lambda batch: np.array([moment.second % 2 == 1 for moment in batch["time"].to_pylist()]))
    odd.key_by("k").compute("second", Seen).sink("out", ms.Memory())
    records = events(*((k, second) for second in range(10, 20) for k in range(3)))
    whole, single = (Simulated(query, {"events": EVENTS}, slots=slots) for _ in range(2))
    whole.feed(events=records)
    for record in records:
        single.feed(events=[record])
    expected = sorted((k, at(second)) for second in range(11, 20, 2) for k in range(3))
    assert sorted(row[:2] for row in whole.outputs("out")) == expected
    assert sorted(row[:2] for row in single.outputs("out")) == expected


def test_a_filter_returns_a_boolean_for_each_record() -> None:
    query = ms.Query("filtered")
    query.source("events", None).filter("wrong", lambda batch: [1]).key_by("k").compute("first", Seen)
    with pytest.raises(StepError, match="wrong.*returned 1 values of type int64 for 2 records"):
        Simulated(query, {"events": EVENTS}, map_tasks=1).feed(events=events((1, 10), (1, 20)))
    with pytest.raises(UserError, match="filter 'x': found 7, expected a function"):
        query.source("other", None).filter("x", 7)  # type: ignore[arg-type]


def test_times_travel_through_maps() -> None:
    def twice(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.concat_batches([batch, batch])

    query = ms.Query("mapped")
    source = query.source("events", None, event_time="ts")
    same = source.map_batches("same", lambda batch: batch, output=EVENTS)
    first = same.key_by("k").compute("first", Seen)
    double = first.map_batches("double", twice, output=Seen.output, event_time="time")
    double.key_by("k").compute("second", Seen).sink("out", ms.Memory())
    sim = Simulated(query, {"events": EVENTS}, slots=1, map_tasks=1)
    sim.feed(events=events((1, 10), (1, 20)))
    assert sim.delivered["out"][0] == [(1, at(second), None) for second in (10, 20, 10, 20)]
    with pytest.raises(UserError, match="map 'lost': its output must keep 'ts', a TIMESTAMP, which is the event time"):
        query.source("other", None, event_time="ts").map_batches("lost", lambda b: b, output="k long").key_by(
            "k"
        ).compute("x", Seen)
        Simulated(query, {"events": EVENTS, "other": EVENTS})


def test_what_is_wrong_about_time_is_refused_with_the_source_or_step() -> None:
    def refuse(match: str, schema: str = EVENTS, late: str = "drop", **time: Any) -> None:
        with pytest.raises(UserError, match=match):
            query = ms.Query("q")
            query.source("events", None, **time).key_by("k").compute("seen", Seen, late=late)
            Simulated(query, {"events": schema})

    refuse("source 'events': no column 'tss' for its event time; it has k, ts", event_time="tss")
    refuse("source 'events': the event time 'k' is BIGINT, expected TIMESTAMP", event_time="k")
    refuse("source 'events': lateness, percentile, watermark and partition need event_time", lateness="1 second")
    refuse("give one of lateness, percentile and watermark", event_time="ts", lateness="1 second", percentile=0.9)
    refuse("lateness='soon': give a duration such as '10 seconds'", event_time="ts", lateness="soon")
    refuse("idle_after='-1 second'", event_time="ts", idle_after="-1 second")
    refuse("percentile=99; give a share between 0 and 1", event_time="ts", percentile=99)
    refuse("source 'events': no column 'now' for its watermark; it has k, ts", event_time="ts", watermark="now")
    refuse("source 'events': the watermark 'k' is BIGINT, expected TIMESTAMP", event_time="ts", watermark="k")
    refuse("watermark=7; give a function that returns a datetime or None, or the name", event_time="ts", watermark=7)
    refuse("give one of lateness, percentile and watermark", event_time="ts", lateness="1 second", watermark="ts")
    refuse("step 'seen': late='keep'; give one of 'drop', 'process', 'output'", event_time="ts", late="keep")
    refuse("step 'seen': late='output', but no input has event time", late="output")


class Oracle:
    """Watermark and late records of one step that reads two sources, one record after the other."""

    def __init__(self, lateness: int) -> None:
        self.lateness, self.marks, self.before, self.late = lateness, {"a": -1e9, "b": -1e9}, -1e9, 0
        self.kept: Counter[int] = Counter()

    def feed(self, **records: list[tuple[int, int]]) -> None:
        for name, rows in records.items():
            for key, second in rows:
                if second < self.before:
                    self.late += 1
                else:
                    self.kept[key] += 1
                self.marks[name] = max(self.marks[name], second - self.lateness)
        self.before = max(self.before, min(self.marks.values()))


class Count(ms.Computation):
    total = ms.Value("long", default=0)

    def on_batch(self, batch: ms.Batch) -> None:
        totals = self.total.read(batch)
        for part in batch.inputs.values():
            totals = totals + part.count()
        self.total.write(batch, totals)


@given(seed=st.integers(0, 2**32), slots=st.integers(1, 3), lateness=st.integers(0, 20))
@settings(max_examples=25)
def test_whatever_comes_when_and_dies_when_lateness_is_that_of_a_sequential_run(
    seed: int, slots: int, lateness: int
) -> None:
    rng = random.Random(seed)
    store, oracle = open_store("memory://"), Oracle(lateness)
    second = timedelta(seconds=lateness)

    def build(over: Any) -> Simulated:
        query = ms.Query("two")
        a = query.source("a", None, event_time="ts", lateness=second)
        b = query.source("b", None, event_time="ts", lateness=second)
        query.compute("count", Count, a=a.key_by("k"), b=b.key_by("k"))
        return Simulated(query, {"a": EVENTS, "b": EVENTS}, over, slots=slots)

    sim = build(store)
    for epoch in range(8):
        rows = {
            name: [(rng.randrange(5), epoch * 10 + rng.randrange(-40, 20)) for _ in range(rng.randrange(12))]
            for name in ("a", "b")
        }
        if rng.random() < 0.3:  # dies somewhere in the epoch, and does it again
            with pytest.raises((Crash, IndexError)):
                build(FaultyStore(store, rng.randrange(1, 14), "crash_after")).feed(
                    epoch=epoch, **{name: events(*pairs) for name, pairs in rows.items()}
                )
                raise IndexError  # it had fewer operations
            sim = build(store)
        sim.feed(epoch=epoch, **{name: events(*pairs) for name, pairs in rows.items()})
        oracle.feed(**rows)
        assert sim.watermark("count") == (None if oracle.before == -1e9 else at(oracle.before))
        assert sim.late("count") == oracle.late
    assert dict(sim.state("count")) == dict(oracle.kept)


def test_late_records_of_inputs_with_different_columns_are_counted_together() -> None:
    query = ms.Query("apart")
    left = query.source("left", None, event_time="ts").key_by("k")
    right = query.source("right", None, event_time="ts").key_by("id")
    query.compute("seen", Seen, left=left, right=right)
    sim = Simulated(query, {"left": "k long, ts timestamp", "right": "id long, x string, ts timestamp"}, slots=1)
    sim.feed(left=[(1, at(9))], right=[(1, "a", at(9))])
    sim.feed(left=[(1, at(3))], right=[(1, "a", at(4)), (2, "b", None)])
    assert sim.late("seen") == 3


def test_what_a_computation_sends_to_its_own_output_late_is_counted() -> None:
    class Judge(ms.Computation):
        outputs: ClassVar[Mapping[str, str]] = {"late": "k long"}
        output = "k long"

        def on_record(self, row: Any, at: ms.At) -> Any:
            yield ms.to("late", at.key) if row.x > 5 else (at.key,)

    counts = {}
    for late in ("process", "drop"):
        query = ms.Query("judged")
        source = query.source("s", None, event_time="ts")
        source.key_by("k").compute("judge", Judge, late=late).output("late").sink("late", ms.Memory())
        sim = Simulated(query, {"s": "k long, x long, ts timestamp"})
        sim.feed(s=[(1, 9, DAY), (2, 3, DAY), (3, 7, DAY)])
        counts[late] = sim.late("judge"), len(sim.outputs("late"))
    assert counts == {"process": (2, 2), "drop": (0, 2)}
