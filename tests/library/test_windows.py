"""Windows against plain Python: tumbling, sliding and sessions, with late records, early results and restarts."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from oracle import FAR, NOON, Watermark, aggregated, at, plain, rows

import millstream as ms
from millstream.library.sliding import SlidingTotals
from millstream.library.windows import Window
from millstream.store.objects import open_store
from millstream.testing import Simulated

SCHEMA = {"s": "k string, ts timestamp, x long"}
ALL = {
    "n": ms.count(),
    "known": ms.count("x"),
    "total": ms.sum("x"),
    "low": ms.min("x"),
    "high": ms.max("x"),
    "avg": ms.mean("x"),
    "f": ms.first("x"),
    "l": ms.last("x"),
    "every": ms.collect("x"),
}


EPOCH = NOON.replace(year=1970, hour=0)


def build(window: Window, *, lateness: float = 0, **options: Any) -> ms.Query:
    query = ms.Query("windows")
    source = query.source("s", None, event_time="ts", lateness=timedelta(seconds=lateness), max_ahead="1000 days")
    windows = source.key_by("k").window(window).aggregate("w", **ALL, **options)
    windows.sink("out", ms.Memory())
    if options.get("late") == "output":
        windows.output("late").sink("late", ms.Memory())
    return query


def starts_of(window: Window, time: datetime) -> list[datetime]:
    """The starts of the windows that a time falls into."""
    micros = (time - EPOCH) // timedelta(microseconds=1)
    last = micros - (micros - window.offset) % window.every
    found, start = [], last
    while start + window.size > micros:
        found.append(EPOCH + timedelta(microseconds=start))
        start -= window.every
    return found


class GridOracle:
    """Tumbling and sliding windows, one record at a time."""

    def __init__(self, window: Window, lateness: float) -> None:
        self.window, self.mark = window, Watermark(lateness)
        self.size = timedelta(microseconds=window.size)
        self.open: dict[Any, list[Any]] = defaultdict(list)
        self.partly = self.missed = 0

    def epoch(self, records: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """What is produced early, what finally, and which records are late."""
        self.mark.epoch(time for _, time, _ in records)
        changed, late = set(), []
        for key, time, value in records:
            starts = [] if time is None else starts_of(self.window, time)
            live = [start for start in starts if not self.mark.late(start + self.size - timedelta(microseconds=1))]
            gone = [(start, start + self.size) for start in starts if start not in live]
            self.missed += len(gone)
            self.partly += bool(gone and live)
            if not live:
                late.append((key, time, value, sorted(gone)))
            for start in live:
                self.open[key, start].append(self.entry(time, value))
                changed.add((key, start))
        early = [self.row(which) for which in changed]
        closing = [which for which in self.open if which[1] + self.size <= self.mark.now]
        final = [self.row(which) for which in closing]
        for which in closing:
            del self.open[which]
        return early, final, late

    def entry(self, time: datetime, value: Any) -> Any:
        return value

    def row(self, which: tuple[Any, datetime]) -> tuple[Any, ...]:
        key, start = which
        return (key, start, start + self.size, *aggregated(self.open[which]))


class PaneOracle(GridOracle):
    """Sliding windows: within a window, panes come in the order of time."""

    def entry(self, time: datetime, value: Any) -> Any:
        micros = (time - EPOCH) // timedelta(microseconds=1)
        return (micros - self.window.offset) // self.window.pane, value

    def row(self, which: tuple[Any, datetime]) -> tuple[Any, ...]:
        key, start = which
        return (key, start, start + self.size, *aggregated(value for _, value in sorted(self.open[which], key=first)))


def first(pair: tuple[Any, Any]) -> Any:
    return pair[0]


class SessionOracle:
    """Sessions of records, one key at a time: records and open sessions that are near each other are one. Records are
    late if the one they end up in has closed."""

    def __init__(self, gap: float, lateness: float) -> None:
        self.gap, self.mark = timedelta(seconds=gap), Watermark(lateness)
        self.open: dict[Any, list[list[Any]]] = defaultdict(list)
        self.partly = self.missed = 0

    def epoch(self, records: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        self.mark.epoch(time for _, time, _ in records)
        assert self.mark.before is not None
        early, final, late = [], [], [(*record, []) for record in records if record[1] is None]
        for key in {record[0] for record in records} | set(self.open):
            before = {id(record) for session in self.open[key] for record in session}
            mine = [record for session in self.open[key] for record in session]
            mine += [record for record in records if record[0] == key and record[1] is not None]
            sessions: list[list[Any]] = []
            for record in sorted(mine, key=lambda record: record[1]):
                if sessions and record[1] < sessions[-1][-1][1] + self.gap:
                    sessions[-1].append(record)
                else:
                    sessions.append([record])
            closed = [each for each in sessions if self.end(each) <= self.mark.before]
            late += [(*record, [(each[0][1], self.end(each))]) for each in closed for record in each]
            self.missed += sum(map(len, closed))
            sessions = [each for each in sessions if self.end(each) > self.mark.before]
            early += [self.row(each) for each in sessions if not before.issuperset(map(id, each))]
            final += [self.row(each) for each in sessions if self.end(each) <= self.mark.now]
            self.open[key] = [each for each in sessions if self.end(each) > self.mark.now]
        return early, final, late

    def end(self, session: list[Any]) -> datetime:
        last: datetime = session[-1][1]
        return last + self.gap

    def row(self, session: list[Any]) -> tuple[Any, ...]:
        return (session[0][0], session[0][1], self.end(session), *aggregated(value for _, _, value in session))


def random_epochs(rng: random.Random, count: int, spread: int, ahead: int) -> list[list[Any]]:
    """Records that drift forward in time, some late, some without a time or of a bad clock, some epochs empty."""
    epochs, now = [], 0
    for _ in range(count):
        now += rng.randrange(ahead)
        size = rng.choice([0, 1, 5, 40])
        epochs.append(
            [
                (
                    rng.choice(["a", "b", "c", None]),
                    rng.choice([None, FAR]) if rng.random() < 0.05 else at(now + rng.randint(-spread, spread // 3)),
                    rng.choice([None, 1, 2, 3, -5]),
                )
                for _ in range(size)
            ]
        )
    return epochs


def check(
    window: Window, oracle: Any, rng: random.Random, *, early: bool, late: str, lateness: float, tasks: int = 3
) -> None:
    """Epochs of the simulator and of the oracle, with a restart in between."""
    query, store, produced = build(window, lateness=lateness, early=early, late=late), open_store("memory://"), 0
    sim, dropped = Simulated(query, SCHEMA, store, slots=3, map_tasks=tasks), 0
    for number, records in enumerate(random_epochs(rng, 30, 90, 50)):
        if number in (11, 20):
            sim = Simulated(query, SCHEMA, store, map_tasks=tasks)
        sim.feed(s=records)
        unfinished, final, too_late = oracle.epoch(records)
        dropped += len(too_late)
        if early:
            final = [(*row, True) for row in final] + [(*row, False) for row in unfinished]
        assert rows(sim.delivered["out"].get(sim.epoch, [])) == rows(final)
        if late == "output":
            found = sim.delivered["late"].get(sim.epoch, [])
            windows = [(*row[:3], [tuple(window.values()) for window in row[3]]) for row in found]
            assert rows(windows) == rows(too_late)
        assert sim.late_count("w") == (dropped, oracle.partly, oracle.missed), "records, whatever combined them before"
        produced += len(final)
    assert min(produced, dropped) > 3


@pytest.mark.parametrize("options", [(False, "drop", 0), (True, "drop", 20), (True, "output", 5)])
@pytest.mark.parametrize("window", [ms.tumbling("1 minute"), ms.tumbling("45 seconds", offset="7 seconds")])
def test_tumbling_windows_are_those_of_plain_python(
    window: Window, options: tuple[bool, str, float], rng: random.Random
) -> None:
    early, late, lateness = options
    check(window, GridOracle(window, lateness), rng, early=early, late=late, lateness=lateness)


SLIDING = [
    ms.sliding("1 minute", every="10 seconds"),
    ms.sliding("50 seconds", every="20 seconds", offset="3 seconds"),
    ms.sliding("2 minutes", every="1 minute"),
]


@pytest.mark.parametrize("options", [(False, "drop", 0), (True, "drop", 20), (True, "output", 5)])
@pytest.mark.parametrize("window", SLIDING, ids=repr)
def test_sliding_windows_are_those_of_plain_python(
    window: Window, options: tuple[bool, str, float], rng: random.Random
) -> None:
    early, late, lateness = options
    check(window, PaneOracle(window, lateness), rng, early=early, late=late, lateness=lateness)


def test_panes_too_far_apart_to_be_counted_harm_no_window() -> None:
    micro = timedelta(microseconds=1)
    query = ms.Query("far")
    source = query.source("s", None, event_time="ts", lateness="1 minute", max_ahead="1000 days")
    source.key_by("k").window(ms.sliding(3 * micro, every=micro)).count("w", early=True).sink("out", ms.Memory())
    sim = Simulated(query, {"s": "k long, ts timestamp"}, slots=1)
    sim.feed(s=[(key, NOON) for key in range(1000)] + [(5, FAR)])
    sim.advance_watermark(at(60))
    expected = [(key, NOON - back * micro, 1) for key in range(1000) for back in range(3)]
    far = [(5, FAR - back * micro, 1, False) for back in range(3)]
    found = [(row[0], row[1], *row[3:]) for row in sim.outputs("out")]
    assert rows(found) == rows([(*row, final) for row in expected for final in (False, True)] + far)


def test_many_panes_of_a_key_close_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    closed = SlidingTotals.closed
    monkeypatch.setattr(SlidingTotals, "closed", lambda self, batch: [calls.append(1), *closed(self, batch)][1:])
    panes = 300
    sim = Simulated(build(ms.sliding("10 seconds", every="1 second"), lateness=10_000), SCHEMA, slots=1)
    sim.feed(s=[("a", at(3 * second), second) for second in range(panes)])
    sim.feed(s=[("b", at(second), 1) for second in (0, 5, 50)])
    sim.advance_watermark(at(3 * panes + 100))
    found = {(row[0], row[1]): row for row in sim.outputs("out")}
    assert len(found) == len(sim.outputs("out"))
    for second in range(-9, 3 * panes - 2):
        values = [value for value in range(panes) if second <= 3 * value < second + 10]
        assert plain(found["a", at(second)][3:]) == plain(aggregated(values))
    assert sorted(start for key, start in found if key == "b") == [at(s) for s in (*range(-9, 6), *range(41, 51))]
    assert len(calls) == 1
    assert sim.state("w") == []


@pytest.mark.parametrize(
    "options", [(False, "drop", 0, 3), (True, "drop", 20, 1), (True, "output", 5, 2), (False, "output", 0, 3)]
)
@pytest.mark.parametrize("gap", [8, 30])
def test_sessions_are_those_of_plain_python(
    gap: int, options: tuple[bool, str, float, int], rng: random.Random
) -> None:
    early, late, lateness, tasks = options
    oracle = SessionOracle(gap, lateness)
    check(ms.sessions(f"{gap} seconds"), oracle, rng, early=early, late=late, lateness=lateness, tasks=tasks)


@pytest.mark.parametrize("late", ["drop", "output"])
def test_a_record_that_falls_into_an_open_session_is_not_late_however_old_it_is(late: str) -> None:
    sim = Simulated(build(ms.sessions("10 seconds"), late=late), SCHEMA, slots=1)
    sim.feed(s=[("a", at(second), 1) for second in range(0, 101, 5)])
    sim.feed(s=[("b", at(105), 1)])
    sim.feed(
        s=[("a", at(50), 1), ("a", at(-9), 1), ("a", at(-18), 1), ("a", at(-28), 1), ("b", None, 1), ("c", None, 1)]
    )
    assert sim.late("w") == 3, "one that is connected through another counts, one that is further away is late"
    sim.feed(s=[("c", None, 1), ("d", at(0), 1)])
    assert sim.late("w") == 5
    sim.advance_watermark(at(1000))
    assert rows(row[:4] for row in sim.outputs("out")) == rows(
        [("a", at(-18), at(110), 24), ("b", at(105), at(115), 1)]
    )
    assert sim.state("w") == []


@pytest.mark.parametrize("late", ["drop", "output"])
@pytest.mark.parametrize("tasks", [1, 2, 3])
def test_first_last_and_all_values_of_a_session_go_by_time_whatever_the_partitions(tasks: int, late: str) -> None:
    sim = Simulated(build(ms.sessions("10 seconds"), late=late), SCHEMA, map_tasks=tasks)
    times = [3, 1, 2, 1, 3, 3, 1, 2.5, 0.5, 0.5, 9, 4]
    sim.feed(s=[("a", at(time), number) for number, time in enumerate(times)])
    sim.feed(s=[("a", at(0.5), 12), ("a", at(9), 13), ("a", at(3), 14)])
    sim.advance_watermark(at(100))
    assert [row[-3:] for row in sim.outputs("out")] == [(8, 13, [8, 9, 12, 1, 3, 6, 2, 7, 0, 4, 5, 14, 11, 10, 13])]


def test_a_record_is_late_only_when_its_window_has_closed() -> None:
    query = ms.Query("late")
    source = query.source("s", None, event_time="ts", max_ahead="1000 days")
    source.key_by("k").window(ms.tumbling("1 minute")).count("w").sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA)
    sim.feed(s=[("a", at(50), 1)])
    sim.feed(s=[("a", at(0), 1), ("a", at(-1), 1), ("a", None, 1)])
    assert sim.late("w") == 2
    sim.advance_watermark(at(60))
    sim.feed(s=[("a", at(59), 1), ("a", at(60), 1)])
    assert sim.late("w") == 3
    sim.advance_watermark(at(1000))
    assert rows(sim.outputs("out")) == rows([("a", at(0), at(60), 2), ("a", at(60), at(120), 1)])
    assert sim.state("w") == [], "nothing is kept of windows that have closed"


def test_windows_of_windows_hold_what_closed_in_them() -> None:
    query = ms.Query("nested")
    source = query.source("s", None, event_time="ts", max_ahead="1000 days")
    minutes = source.key_by("k").window(ms.tumbling("1 minute")).count("minutes")
    hours = (
        minutes.key_by("k").window(ms.tumbling("1 hour")).aggregate("hours", n=ms.sum("count"), most=ms.max("count"))
    )
    hours.sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA, slots=2)
    sim.feed(s=[("a", at(second), 1) for second in (0, 1, 70, 3599, 3600)])
    sim.advance_watermark(at(3600))
    assert rows(sim.outputs("out")) == rows([("a", at(0), at(3600), 4, 2)]), "in the epoch in which the minute closes"
    sim.advance_watermark(at(7200))
    assert rows(sim.outputs("out")[1:]) == rows([("a", at(3600), at(7200), 1, 1)])
    assert sim.late("hours") == 0


def test_windows_of_united_streams_take_times_from_columns_and_from_steps() -> None:
    query = ms.Query("united")
    source = query.source("s", None, event_time="ts", max_ahead="1000 days")
    passed = source.dedupe("once", id="k", within="1 second")
    both = source.union(passed)
    both.key_by("k").window(ms.tumbling("1 minute")).count("w").sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA)
    sim.feed(s=[("a", at(10), 1), ("a", at(10), 2), ("b", at(70), 3)])
    sim.advance_watermark(at(120))
    assert rows(sim.outputs("out")) == rows([("a", at(0), at(60), 3), ("b", at(60), at(120), 2)])


def test_times_of_no_calendar_fall_into_no_window() -> None:
    query = build(ms.tumbling("1 minute"))
    sim = Simulated(query, SCHEMA)
    sim.feed(
        s=[("a", datetime.min.replace(tzinfo=UTC), 1), ("a", datetime.max.replace(tzinfo=UTC), 1), ("a", at(0), 1)]
    )
    sim.advance_watermark(at(100))
    assert [row[:4] for row in sim.outputs("out") if row[1].year == 2026] == [("a", at(0), at(60), 1)]


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: ms.tumbling("0 seconds"), "at least a microsecond"),
    (lambda: ms.tumbling("a while"), "give a duration"),
    (lambda: ms.sliding("1 minute", every="2 minutes"), "would be lost"),
    (lambda: build("1 minute"), r"give tumbling\('1 minute'\)"),  # type: ignore[arg-type]
    (lambda: build(ms.tumbling("1 minute"), late="process"), "'drop' or 'output'"),
    (lambda: build(ms.tumbling("1 minute"), early=ms.count()), "'early' is an option here; choose another name"),
    (lambda: build(ms.tumbling("1 minute"), late=ms.sum("x")), "'late' is an option here; choose another name"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_windows_that_cannot_be_are_refused_where_they_are_written(bad: Callable[[], Any], message: str) -> None:
    with pytest.raises(ms.UserError, match=message):
        bad()


@pytest.mark.parametrize(
    "window", [ms.tumbling("1 minute"), ms.sliding("1 minute", every="30 seconds"), ms.sessions("1 minute")], ids=repr
)
def test_keys_on_which_ones_own_function_fails_become_letters(window: Window) -> None:
    query = ms.Query("letters")
    source = query.source("s", None, event_time="ts", max_ahead="1000 days")
    inverse = ms.combine("x", lambda a, b: a + b, type="double", lift=lambda x: 1 / x)
    windows = source.key_by("k").window(window).aggregate("w", on_error="dead_letter", n=ms.count(), total=inverse)
    windows.sink("out", ms.Memory())
    windows.output("dead_letter").sink("dead", ms.Memory())
    sim = Simulated(query, SCHEMA, map_tasks=2)
    sim.feed(s=[("a", at(1), 2), ("b", at(1), 4), ("b", at(2), 0), ("a", at(3), 4)])
    sim.advance_watermark(at(1000))
    assert {(row[0], *row[3:]) for row in sim.outputs("out")} == {("a", 2, 0.75)}
    assert len(sim.outputs("dead")) == 2
    assert all("division by zero" in str(row) and "x=" in str(row) for row in sim.outputs("dead"))


def test_windows_that_do_not_fit_the_stream_are_refused_before_the_first_epoch() -> None:
    query = ms.Query("untimed")
    query.source("s", None).key_by("k").window(ms.tumbling("1 minute")).count("w")
    with pytest.raises(ms.UserError, match="map 'w-partial': a window needs event time"):
        Simulated(query, SCHEMA)
    source = ms.Query("taken").source("s", None, event_time="ts")
    with pytest.raises(ms.UserError, match="'window_start', which this step makes itself"):
        source.key_by("window_start").window(ms.tumbling("1 minute")).count("w")
    with pytest.raises(ms.UserError, match="'window_end' is a column of the key, or of the window"):
        source.key_by("k").window(ms.tumbling("1 minute")).aggregate("v", window_end=ms.count())
