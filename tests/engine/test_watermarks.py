"""Watermarks of sources that fall silent, and of partitions that run at different speeds (G7). A sequential oracle
recomputes every watermark from the records alone."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import permutations
from typing import Any

import pyarrow as pa
import pytest

import millstream as ms
from millstream.control.overview import Pulse, overview_of
from millstream.engine.route import partition_names
from millstream.errors import UserError
from millstream.protocol.time import NO_TIME
from millstream.store.objects import open_store
from millstream.testing import Simulated

DAY = datetime(2026, 1, 1, tzinfo=UTC)
EVENTS = "k long, ts timestamp"
PARTED = "k long, ts timestamp, part string"


def at(seconds: float) -> datetime:
    return DAY + timedelta(seconds=seconds)


class Passed(ms.Computation):
    """Passes every record on."""

    output = "k long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield (at.key,)


def united(names: str, **time: Any) -> ms.Query:
    """One window over sources of these names, and a step behind it."""
    query = ms.Query("united")
    first, *others = [query.source(name, None, event_time="ts", **time) for name in names]
    stream = first.union(*others) if others else first
    counts = stream.key_by("k").window(ms.tumbling("10 seconds")).count("windows")
    counts.sink("out", ms.Memory())
    counts.key_by("k").compute("behind", Passed)
    return query


# -- silent sources -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [*permutations("abc"), ("ab", "c"), ("a", "bc"), ("abc",)], ids="-".join)
def test_the_watermark_does_not_depend_on_the_order_in_which_sources_fall_silent(order: tuple[str, ...]) -> None:
    sim = Simulated(united("abc", idle_after="30 seconds"), dict.fromkeys("abc", EVENTS), now=at(0))
    newest = {"a": 100, "b": 55, "c": 30}
    sim.feed(**{name: [(1, at(seconds))] for name, seconds in newest.items()})
    assert sim.watermark("windows") == at(30)
    talking = set("abc")
    for gone in order:
        talking -= set(gone)
        for _ in range(4):
            sim.now += timedelta(seconds=10)
            sim.feed(**{name: [(2, at(newest[name]))] for name in sorted(talking)})
        least = min((newest[name] for name in talking), default=100)
        assert sim.watermark("windows") == at(max(30, least))
    assert sim.watermark("windows") == sim.watermark("behind") == at(100)
    closed = {row[1] for row in sim.outputs("out") if row[0] == 1}
    assert closed == {at(30), at(50)}, "the window of the source that led stays open: its end has not come"


def test_windows_of_the_source_that_led_close_when_all_fall_silent_in_one_epoch() -> None:
    sim = Simulated(united("ab", idle_after="30 seconds"), dict.fromkeys("ab", EVENTS), now=at(0))
    sim.feed(a=[(1, at(5)), (1, at(100))], b=[(1, at(1))])
    assert sim.outputs("out") == []
    sim.advance_clock("31 seconds")
    assert [row[1:] for row in sim.outputs("out")] == [(at(0), at(10), 2)]
    sim.feed(b=[(1, at(2))])
    assert sim.late("windows") == 1, "b comes back far behind"
    assert sim.watermark("windows") == at(100), "and moves nothing backwards"


def test_what_is_pending_binds_silent_sources() -> None:
    class Keeps(ms.Computation):
        hold = ms.Hold()
        output = "k long"

        def on_record(self, row: Any, at: ms.At) -> None:
            if row.k == 1:
                self.hold.set(row.ts)

    query = ms.Query("bound")
    a, b = (query.source(name, None, event_time="ts", idle_after="30 seconds") for name in "ab")
    held = a.union(b).key_by("k").compute("holds", Keeps)
    held.key_by("k").compute("behind", Passed)
    sim = Simulated(query, dict.fromkeys("ab", EVENTS), now=at(0), slots=3)
    sim.feed(a=[(1, at(20)), (2, at(100))], b=[(3, at(10))])
    sim.advance_clock("31 seconds")
    assert sim.watermark("holds") == at(100)
    assert sim.watermark("behind") == at(20), "what is held back is held back, however silent all is"


@pytest.mark.parametrize("idle_after", ["0 seconds", timedelta(0), timedelta(seconds=-1), "-1 second"])
def test_a_source_cannot_be_idle_at_once(idle_after: Any) -> None:
    with pytest.raises(UserError, match="source 'a': idle_after"):
        ms.Query("q").source("a", None, event_time="ts", idle_after=idle_after)


# -- partitions ---------------------------------------------------------------------------------------------------


def parted(partition: Any = "part", **time: Any) -> ms.Query:
    query = ms.Query("parted")
    source = query.source("s", None, event_time="ts", partition=partition, **time)
    source.key_by("k").window(ms.tumbling("10 seconds")).count("windows", late="output").sink("out", ms.Memory())
    return query


def test_a_partition_that_lags_makes_none_of_its_records_late() -> None:
    for partition, late in (("part", 0), (None, 1)):
        sim = Simulated(parted(partition), {"s": PARTED}, slots=2)
        sim.feed(s=[(1, at(1000), "fast"), (1, at(5), "slow")])
        sim.feed(s=[(1, at(2000), "fast"), (1, at(9), "slow")])
        assert sim.late("windows") == late, partition
        assert sim.watermark("s") == (at(9) if partition else at(2000))


def test_a_new_partition_joins_at_the_watermark_of_the_source() -> None:
    sim = Simulated(parted(), {"s": PARTED})
    sim.feed(s=[(1, at(100), "a")])
    sim.feed(s=[(1, at(40), "b")])
    assert sim.watermark("s") == at(100), "b is behind, and does not pull the source back"
    assert sim.late("windows") == 1
    sim.feed(s=[(1, at(200), "a")])
    assert sim.watermark("s") == at(100), "but now holds it"
    sim.feed(s=[(1, at(150), "b")])
    assert sim.watermark("s") == at(150)


def test_an_idle_partition_leaves_and_comes_back_without_moving_anything_backwards() -> None:
    sim = Simulated(parted(idle_after="30 seconds"), {"s": PARTED}, now=at(0))
    sim.feed(s=[(1, at(100), "a"), (1, at(10), "b")])
    assert sim.watermark("s") == at(10)
    sim.now += timedelta(seconds=31)
    sim.feed(s=[(1, at(200), "a")])
    assert sim.watermark("s") == at(200), "b is silent"
    sim.feed(s=[(1, at(20), "b")])
    assert sim.watermark("s") == at(200)
    sim.feed(s=[(1, at(300), "a")])
    assert sim.watermark("s") == at(200), "b is one of them again"
    sim.advance_clock("31 seconds")
    assert sim.watermark("s") == at(300), "all are silent: the greatest counts"
    assert sim.driver.journal.history.clocks["s"].partitions == {}


@pytest.mark.parametrize("order", list(permutations("abc")), ids="".join)
def test_the_order_in_which_partitions_fall_silent_makes_no_difference(order: tuple[str, ...]) -> None:
    sim = Simulated(parted(idle_after="30 seconds"), {"s": PARTED}, now=at(0))
    newest = {"a": 100, "b": 55, "c": 30}
    for talking in ("abc", *(order[gone:] for gone in (1, 2, 3))):
        for _ in range(4):
            sim.now += timedelta(seconds=10)
            sim.feed(s=[(1, at(newest[name]), name) for name in talking])
    assert sim.watermark("s") == sim.watermark("windows") == at(100)


def test_expected_partitions_hold_the_source_back_before_they_were_heard() -> None:
    sim = Simulated(parted(expected=["a", "b"], idle_after="30 seconds"), {"s": PARTED}, now=at(0))
    sim.feed(s=[(1, at(100), "a")])
    assert sim.watermark("s") is None
    sim.feed(s=[(1, at(5), "b")])
    assert sim.watermark("s") == at(5)
    assert sim.late("windows") == 0
    other = Simulated(parted(expected=["a", "b"], idle_after="30 seconds"), {"s": PARTED}, now=at(0))
    other.now += timedelta(seconds=31)
    other.feed(s=[(1, at(100), "a")])
    other.now += timedelta(seconds=31)
    other.feed(s=[(1, at(100), "a")])
    assert other.watermark("s") == at(100), "one that is never heard is waited for as long as idle_after"


class Oracle:
    """The watermark of a source with partitions, record by record, after MillWheel's rule."""

    def __init__(self, lateness: float, idle: float, now: float) -> None:
        self.lateness, self.idle = lateness, idle
        self.marks: dict[str, float] = {}
        self.active: dict[str, float] = {}
        self.began, self.mark, self.greatest = now, -1e18, -1e18

    def epoch(self, records: Iterable[tuple[str, float]], now: float) -> int:
        """Takes an epoch's records; how many of them were late for windows of ten seconds."""
        records = list(records)
        late = sum(seconds // 10 * 10 + 10 <= self.mark for _, seconds in records)
        heard = {name for name, _ in records}
        for name in list(self.marks):
            if now - max(self.active[name], self.began) > self.idle and name not in heard:
                del self.marks[name]
        before = self.mark
        for name, seconds in records:
            self.marks[name] = max(self.marks.get(name, before), seconds - self.lateness)
            self.active[name] = now
            self.greatest = max(self.greatest, self.marks[name])
        self.mark = max(before, min(self.marks.values(), default=self.greatest))
        return late


@pytest.mark.parametrize("number", range(12))
def test_random_partitions_follow_the_oracle(number: int, seed: int) -> None:
    rng = random.Random(f"{seed}-{number}")
    store, now = open_store("memory://"), 0
    query = parted(lateness="3 seconds", idle_after="30 seconds")
    sim = Simulated(query, {"s": PARTED}, store, now=at(0), slots=rng.randint(1, 3), map_tasks=rng.randint(1, 3))
    oracle, late = Oracle(3, 30, 0), 0
    speeds = {f"p{each}": rng.choice([0.2, 1.0, 1.0, 3.0]) for each in range(rng.randint(1, 6))}
    for _ in range(40):
        now += rng.randint(1, 15)
        sim.now = at(now)
        if rng.random() < 0.1:
            sim.restart()
            oracle.began = now
        names = [name for name in speeds if rng.random() < 0.5]
        records = [
            (name, int(now * speeds[name]) - rng.randint(0, 8)) for name in names for _ in range(rng.randint(1, 3))
        ]
        late += oracle.epoch(records, now)
        sim.feed(s=[(rng.randint(0, 5), at(seconds), name) for name, seconds in records])
        mark = sim.driver.journal.history.clocks["s"].watermark
        assert (None if mark == NO_TIME else sim.watermark("s")) == (None if oracle.mark < -1e17 else at(oracle.mark))
        assert sim.late("windows") == late


def test_ten_thousand_partitions() -> None:
    query = ms.Query("many")
    source = query.source("s", None, event_time="ts", partition=["topic", "number"])
    source.key_by("k").compute("pass", Passed)
    sim = Simulated(query, {"s": "k long, ts timestamp, topic string, number int"}, slots=4)
    for epoch in range(3):
        sim.feed(s=[(n, at(epoch * 100 + n % 97 + (n != 4321)), f"t{n % 10}", n // 10) for n in range(10_000)])
        if epoch == 1:
            sim.restart()
    clock = sim.driver.journal.history.clocks["s"]
    assert len(clock.partitions) == 10_000
    assert sim.watermark("s") == at(200 + 1)
    sim.feed(s=[(n, at(1000 + n % 97), f"t{n % 10}", n // 10) for n in range(10_000) if n != 4321])
    assert sim.watermark("s") == at(200 + 4321 % 97)
    shown = overview_of(sim.driver.journal.history, Pulse(), {}, {})
    assert shown.held_back["s"].name == "t1/432"
    assert shown.held_back["s"].behind == at(1000 + 96) - at(200 + 4321 % 97)


def test_a_percentile_counts_by_partition() -> None:
    sim = Simulated(parted(percentile=0.5), {"s": PARTED}, map_tasks=1)
    sim.feed(s=[(1, at(100 + n), "a") for n in range(11)] + [(1, at(50 + n), "b") for n in range(11)])
    assert sim.watermark("s") == at(55)


def test_a_column_states_the_watermark_by_partition() -> None:
    query = ms.Query("stated")
    source = query.source("s", None, event_time="ts", watermark="mark", partition="part")
    source.key_by("k").compute("pass", Passed)
    sim = Simulated(query, {"s": "k long, ts timestamp, part int, mark timestamp"})
    sim.feed(s=[(1, at(100), 1, at(50)), (1, at(90), 2, at(40)), (1, at(95), 2, None)])
    assert sim.watermark("s") == at(40)


def test_a_source_may_lose_and_gain_its_partitions_at_a_restart() -> None:
    sim = Simulated(parted(), {"s": PARTED})
    sim.feed(s=[(1, at(100), "a"), (1, at(10), "b")])
    sim.restart(parted(None))
    sim.feed(s=[(1, at(90), "a")])
    assert sim.watermark("s") == at(90)
    sim.restart(parted())
    sim.feed(s=[(1, at(300), "a"), (1, at(95), "c")])
    assert sim.watermark("s") == at(95)


def test_names_of_partitions() -> None:
    assert partition_names([pa.array([3, None, 3])]).to_pylist() == ["3", "null", "3"]
    columns = [pa.array(["x", "x", "y", None]), pa.array([1, 2, 1, 1]), pa.array(["", "", "", "z"])]
    assert partition_names(columns).to_pylist() == ["x/1/", "x/2/", "y/1/", "null/1/z"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partition": "part"}, "need event_time"),
        ({"event_time": "ts", "partition": 3}, "give the name of a column"),
        ({"event_time": "ts", "partition": []}, "name at least one column"),
        ({"event_time": "ts", "partition": "part", "watermark": lambda: None}, "of the whole source"),
        ({"event_time": "ts", "expected": ["a"]}, "give partition="),
        ({"event_time": "ts", "partition": "part", "expected": "a"}, "give a list"),
        ({"event_time": "ts", "partition": ["a", "b"], "expected": ["a"]}, "values of a, b"),
    ],
)
def test_partitions_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ms.Query("q").source("s", None, **options)


@pytest.mark.parametrize(("partition", "message"), [("gone", "no column 'gone'"), ("ts", "expected STRING")])
def test_a_partition_is_a_column_of_the_source(partition: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Simulated(parted(partition), {"s": PARTED})


def test_a_partition_whose_records_state_nothing_is_not_silent() -> None:
    query = ms.Query("stated")
    source = query.source("s", None, event_time="ts", watermark="mark", partition="part", idle_after="10 seconds")
    source.key_by("k").compute("pass", Passed)
    sim = Simulated(query, {"s": "k long, ts timestamp, part int, mark timestamp"}, now=at(0))
    sim.feed(s=[(1, at(50), 1, at(50)), (1, at(60), 2, at(60))])
    for second in range(5, 40, 5):
        sim.now = at(second)
        sim.feed(s=[(1, at(50 + second), 1, None), (1, at(60 + second), 2, at(60 + second))])
    assert sim.watermark("s") == at(50), "the first partition is there, and has stated no more"
    assert sim.late("pass") == 0


def test_partitions_may_be_expected_from_a_restart_on() -> None:
    sim = Simulated(parted(None), {"s": PARTED}, now=at(0))
    sim.feed(s=[(1, at(100), "a")])
    sim.restart(parted(expected=["a", "b"]))
    sim.feed(s=[(1, at(500), "a")])
    assert sim.watermark("s") == at(100), "b is expected"
    sim.feed(s=[(1, at(300), "b")])
    assert sim.watermark("s") == at(300)
