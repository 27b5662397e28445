"""Timers (G7): once each, in the order of their times, never before their time, also across crashes and compactions."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.engine import step
from millstream.errors import UserError
from millstream.model.query import Query
from millstream.store.objects import open_store
from millstream.testing import Crash, FaultyStore, Simulated
from timers import COMMANDS, DAY, Obey, at


def obeying(kind: type[ms.Computation] = Obey) -> Query:
    query = ms.Query("obey")
    source = query.source("commands", None, event_time="ts")
    source.key_by("k").compute("obey", kind, late="process").sink("out", ms.Memory())
    return query


def rung(sim: Simulated, epoch: int | None = None) -> list[tuple[Any, ...]]:
    return [row[:3] for row in (sim.outputs("out") if epoch is None else sim.delivered["out"][epoch])]


def test_a_timer_fires_once_when_the_watermark_reaches_it_also_on_an_idle_stream() -> None:
    sim = Simulated(obeying(), {"commands": COMMANDS}, slots=2)
    sim.feed(commands=[(1, at(0), "set", "", 10), (2, at(0), "set", "", 20)])
    assert rung(sim, 0) == []
    sim.advance_watermark(at(9))
    assert rung(sim) == [], "never before its time"
    sim.advance_watermark(at(10))
    assert sim.delivered["out"][2] == [(1, "", at(10), "due 10", 1)]
    sim.advance_watermark(at(100))
    assert rung(sim, 3) == [(2, "", at(20))]
    sim.advance_watermark(at(200))
    assert len(rung(sim)) == 2


def test_timers_of_a_key_fire_in_the_order_of_their_times_and_can_be_moved_and_deleted() -> None:
    sim = Simulated(obeying(), {"commands": COMMANDS}, slots=1)
    sets = [(1, at(0), "set", tag, due) for tag, due in (("c", 30), ("a", 10), ("b", 20), ("d", 15))]
    sim.feed(commands=sets)
    sim.feed(commands=[(1, at(0), "set", "a", 40), (1, at(0), "delete", "d", 0)])
    sim.feed(commands=[(1, at(0), "set", "b", 5), (1, at(0), "set", "b", 35)])
    sim.advance_watermark(at(60))
    assert rung(sim) == [(1, "c", at(30)), (1, "b", at(35)), (1, "a", at(40))]


def test_a_timer_in_the_past_fires_in_the_same_epoch_after_the_records() -> None:
    sim = Simulated(obeying(), {"commands": COMMANDS})
    sim.feed(
        commands=[(1, at(100), "set", "late", 7), (1, at(100), "set", "gone", 8), (1, at(100), "delete", "gone", 0)]
    )
    assert rung(sim, 0) == [(1, "late", at(7))]


def test_callbacks_may_set_timers_and_the_due_ones_fire_in_the_same_epoch() -> None:
    class Heartbeat(ms.Computation):
        beat = ms.Timer(ms.EVENT_TIME)
        output = "k long, tag string, time timestamp"

        def on_record(self, row: Any, at: ms.At) -> None:
            if self.beat.get() is None:
                self.beat.set(timedelta(seconds=10))

        @beat.fires
        def again(self, at: ms.At) -> Iterable[Any]:
            yield at.key, at.tag, at.time
            self.beat.set(timedelta(seconds=10))

    sim = Simulated(obeying(Heartbeat), {"commands": COMMANDS})
    sim.feed(commands=[(1, at(0), "", "", 0)])
    sim.advance_watermark(at(35))
    assert rung(sim) == [(1, "", at(10)), (1, "", at(20)), (1, "", at(30))]
    sim.feed(commands=[(1, at(36), "", "", 0)])
    sim.advance_watermark(at(40))
    assert rung(sim)[3:] == [(1, "", at(40))], "get() knew that it is set"


def test_a_timer_that_keeps_setting_itself_is_stopped() -> None:
    class Endless(ms.Computation):
        again = ms.Timer()
        output = "k long"

        def on_record(self, row: Any, at: ms.At) -> None:
            self.again.set(timedelta(0))

        @again.fires
        def once_more(self, at: ms.At) -> None:
            self.again.set(timedelta(0))

    sim = Simulated(obeying(Endless), {"commands": COMMANDS})
    with pytest.raises(ms.StepError, match=r"timer 'again' fired more than 10,000 times in one epoch"):
        sim.feed(commands=[(1, at(0), "", "", 0)])

    class EndlessBatch(ms.Computation):
        again = ms.Timer()
        output = "k long"

        def on_batch(self, batch: ms.Batch) -> None:
            self.again.set(batch, batch.times)

        @again.fires
        def once_more(self, batch: ms.TimerBatch) -> None:
            self.again.set(batch, batch.times)

    sim = Simulated(obeying(EndlessBatch), {"commands": COMMANDS})
    with pytest.raises(ms.StepError, match=r"timers fired more than 10,000 times for one key in one epoch"):
        sim.feed(commands=[(1, at(0), "", "", 0)])


def test_however_many_timers_of_a_key_are_due_they_all_fire() -> None:
    """Stored ones, and those that a callback sets for later times, which a jump of the watermark makes due at once."""

    class Second(ms.Computation):
        beat = ms.Timer()
        beats = ms.Value("long", default=0)
        output = "k long"

        def on_record(self, row: Any, at: ms.At) -> None:
            for number in range(row.due):
                self.beat.set(timedelta(seconds=1), tag=str(number))

        @beat.fires
        def tick(self, at: ms.At) -> None:
            self.beats.set(self.beats.get() + 1)
            if at.tag == "0":
                self.beat.set(timedelta(seconds=1), tag="0")

    sim = Simulated(obeying(Second), {"commands": COMMANDS}, slots=1)
    sim.feed(commands=[(1, at(0), "", "", 10_500)])
    sim.advance_watermark(at(11_000))
    assert dict(sim.state("obey", "beats")) == {1: 10_500 + 10_999}


def test_on_batch_sees_only_keys_with_records_whatever_timers_of_others_are_due() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    class Watch(ms.Computation):
        alarm = ms.Timer()
        total = ms.Value("long", default=0)
        output = "k long, what string"

        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            seen.append((sorted(batch.keys.to_pylist()), batch.count().tolist()))
            np.maximum.reduceat(batch.column("due").to_numpy(), batch.starts)
            self.total.write(batch, self.total.read(batch) + batch.count())
            self.alarm.set(batch, batch.first("ts").cast(pa.timestamp("us")).to_numpy() + np.timedelta64(10, "s"))
            yield batch.output(batch.keys, ["count"] * len(batch))

        @alarm.fires
        def ring(self, batch: ms.TimerBatch) -> Iterable[Any]:
            assert batch.timed_input
            with pytest.raises(UserError, match="a batch of timers, which has no records"):
                batch.count()
            with pytest.raises(UserError, match="1 payloads found|has no payload"):
                self.alarm.set(batch, batch.times, payload=[1])
            with pytest.raises(UserError, match="tag=7; give a text"):
                self.alarm.delete(batch, tag=7)  # type: ignore[arg-type]
            self.total.write(batch, self.total.read(batch) + 100)
            yield batch.output(batch.keys, ["ring"] * len(batch))

    sim = Simulated(obeying(Watch), {"commands": COMMANDS}, slots=1)
    sim.feed(commands=[(1, at(0), "", "", 1), (2, at(0), "", "", 1)])
    sim.feed(commands=[(3, at(20), "", "", 1), (3, at(20), "", "", 1)])
    assert seen == [([1, 2], [1, 1]), ([3], [2])]
    assert sorted(sim.delivered["out"][1]) == [(1, "ring"), (2, "ring"), (3, "count")]
    assert dict(sim.state("obey", "total")) == {1: 101, 2: 101, 3: 2}


def test_wall_time_timers_follow_the_clock_of_the_plan() -> None:
    class Patience(ms.Computation):
        """Reports a key that has been silent for a minute."""

        silence = ms.Timer(ms.WALL_TIME)
        output = "k long, time timestamp"

        def on_record(self, row: Any, at: ms.At) -> None:
            self.silence.set(timedelta(minutes=1))

        @silence.fires
        def silent(self, at: ms.At) -> Iterable[Any]:
            yield at.key, at.time

    query = ms.Query("patience")
    query.source("pings", None).key_by("k").compute("patience", Patience).sink("out", ms.Memory())
    sim = Simulated(query, {"pings": "k long"}, now=at(0), slots=2)
    sim.feed(pings=[(1,), (2,)])
    sim.advance_clock("40 seconds")
    sim.feed(pings=[(1,)])
    sim.advance_clock("30 seconds")
    assert sim.outputs("out") == [(2, at(60))]
    sim.advance_clock("1 minute")
    assert sim.outputs("out") == [(2, at(60)), (1, at(100))]


def test_a_timer_carries_any_python_object_and_its_time_to_the_next_step() -> None:
    class Post(ms.Computation):
        """Megaphone's post-dated records."""

        later = ms.Timer(ms.EVENT_TIME, payload=object)
        output = "k long, n long"

        def on_record(self, row: Any, at: ms.At) -> None:
            self.later.set(timedelta(seconds=row.due), tag=row.tag, payload={"numbers": [row.due, {row.due}]})

        @later.fires
        def deliver(self, at: ms.At) -> Iterable[Any]:
            yield at.key, at.payload["numbers"][0]

    class Times(ms.Computation):
        output = "k long, tag string, time timestamp"

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield row.n, "", at.time

    query = ms.Query("post")
    post = query.source("commands", None, event_time="ts").key_by("k").compute("post", Post)
    post.key_by("n").compute("times", Times).sink("out", ms.Memory())
    sim = Simulated(query, {"commands": COMMANDS}, slots=2)
    sim.feed(commands=[(1, at(0), "", "a", 10), (1, at(0), "", "b", 20)])
    sim.advance_watermark(at(15))
    sim.advance_watermark(at(25))
    assert rung(sim) == [(10, "", at(10)), (20, "", at(20))]


def test_what_is_wrong_with_a_timer_is_refused() -> None:
    def refuse(match: str, kind: Any, timed: bool = True) -> None:
        with pytest.raises(UserError, match=match):
            query = ms.Query("q")
            time = {"event_time": "ts"} if timed else {}
            query.source("commands", None, **time).key_by("k").compute("step", kind)
            Simulated(query, {"commands": COMMANDS}).feed(commands=[(1, at(0), "", "", 0)])

    class Silent(ms.Computation):
        alarm = ms.Timer()

        def on_record(self, row: Any, at: ms.At) -> None: ...

    class Hides(Obey):
        alarm = 7  # type: ignore[assignment]

    class NoTime(Silent):
        alarm = ms.Timer()

        @alarm.fires
        def ring(self, at: ms.At) -> None: ...

    class Unpaid(NoTime):
        def on_record(self, row: Any, at: ms.At) -> None:
            self.alarm.set(at.time or DAY, payload=3)

    class Untimely(NoTime):
        def on_record(self, row: Any, at: ms.At) -> None:
            self.alarm.set("soon")  # type: ignore[arg-type]

    refuse("step 'step': Silent: timer 'alarm' has no callback; put @alarm.fires on the method", Silent)
    refuse("Hides.alarm hides the timer 'alarm' of a base class with 7", Hides)
    refuse("its timer 'alarm' waits for event time, but no input has any", NoTime, timed=False)
    refuse("timer 'alarm' has no payload; declare it", Unpaid)
    refuse("timer 'alarm': found 'soon', expected a datetime", Untimely)
    with pytest.raises(UserError, match="give EVENT_TIME or WALL_TIME"):
        ms.Timer("tomorrow")
    with pytest.raises(UserError, match="outside on_record or a callback"):
        ms.Timer().set(DAY)


def test_a_subclass_may_override_the_callback() -> None:
    class Quiet(Obey):
        def ring(self, at: ms.At) -> Iterable[Any]:
            return []

    sim = Simulated(obeying(Quiet), {"commands": COMMANDS})
    sim.feed(commands=[(1, at(50), "set", "", 10)])
    assert rung(sim) == []


def test_a_failing_callback_names_the_key_and_the_timer_and_leaves_no_trace() -> None:
    class Fails(Obey):
        def ring(self, at: ms.At) -> Iterable[Any]:
            raise ValueError("no bell")

    store = open_store("memory://")
    sim = Simulated(obeying(Fails), {"commands": COMMANDS}, store)
    sim.feed(commands=[(7, at(0), "set", "x", 10)])
    with pytest.raises(ms.StepError, match="ValueError: no bell") as caught:
        sim.advance_watermark(at(20))
    assert caught.value.key == "7"
    assert caught.value.record == f"timer 'alarm' at {at(10)}, tag 'x'"
    sim = Simulated(obeying(), {"commands": COMMANDS}, store)
    sim.advance_watermark(at(20))
    assert rung(sim) == [(7, "x", at(10))]


class Oracle:
    """Timers in a dictionary."""

    def __init__(self) -> None:
        self.timers: dict[tuple[int, str], int] = {}
        self.mark = 0
        self.fired: list[tuple[int, str, datetime]] = []

    def feed(self, commands: list[tuple[int, str, str, int]], mark: int) -> list[tuple[int, list[tuple[str, int]]]]:
        for key, verb, tag, due in commands:
            if verb == "set":
                self.timers[key, tag] = due
            else:
                self.timers.pop((key, tag), None)
        self.mark = max(self.mark, mark)
        by_key: dict[int, list[tuple[int, str]]] = {}
        for (key, tag), due in list(self.timers.items()):
            if due <= self.mark:
                by_key.setdefault(key, []).append((due, tag))
                del self.timers[key, tag]
        return [(key, [(tag, due) for due, tag in sorted(rung)]) for key, rung in sorted(by_key.items())]


def state_watermark(sim: Simulated, mark: int) -> None:
    sim.driver.stated = lambda graph: {"commands": int(at(mark).timestamp() * 1e6)}  # type: ignore[method-assign]


class ObeyBatch(ms.Computation):
    """`Obey` over whole columns. Within an epoch it applies the last command of each key and tag."""

    alarm = ms.Timer(ms.EVENT_TIME, payload="string")
    fired = ms.Value("long", default=0)
    output = Obey.output

    def on_batch(self, batch: ms.Batch) -> None:
        counts, rows = batch.count(), batch.rows.to_pylist()
        ends = np.cumsum(counts)
        for tag in "abc":
            dues = np.full(len(batch), np.datetime64("NaT"), "datetime64[us]")
            gone = np.zeros(len(batch), np.bool_)
            texts = [""] * len(batch)
            for place, (count, end) in enumerate(zip(counts, ends, strict=True)):
                mine = [row for row in rows[end - count : end] if row["tag"] == tag]
                if mine and mine[-1]["verb"] == "set":
                    dues[place] = np.datetime64(at(mine[-1]["due"]).replace(tzinfo=None), "us")
                    texts[place] = f"due {mine[-1]['due']}"
                elif mine:
                    gone[place] = True
            self.alarm.set(batch, dues, where=~np.isnat(dues), tag=tag, payload=texts)
            self.alarm.delete(batch, where=gone, tag=tag)

    @alarm.fires
    def ring(self, batch: ms.TimerBatch) -> Iterable[Any]:
        counts = self.fired.read(batch) + 1
        self.fired.write(batch, counts)
        assert self.fired.exists(batch).all()
        assert np.isnat(self.alarm.get(batch, tag="a")[[tag == "a" for tag in batch.tags.to_pylist()]]).all()
        times = pa.array(batch.times).cast(pa.timestamp("us", "UTC"))
        yield batch.output(batch.keys, batch.tags, times, batch.payloads, counts)


@pytest.mark.parametrize("kind", [Obey, ObeyBatch])
@pytest.mark.parametrize("take_up", [2, 0])
@given(seed=st.integers(0, 2**32), slots=st.integers(1, 3))
@settings(max_examples=20)
def test_any_life_of_timers_is_that_of_a_dictionary(take_up: int, kind: Any, seed: int, slots: int) -> None:
    """Sets, moves, deletions, crashes anywhere in an epoch, and compactions; with small segments taken up and not."""
    rng = random.Random(seed)
    store, oracle = open_store("memory://"), Oracle()
    patch = pytest.MonkeyPatch()
    patch.setattr("millstream.engine.step.TAKE_UP", take_up)
    try:
        sim = Simulated(obeying(kind), {"commands": COMMANDS}, store, slots=slots, compaction_budget=1 << 20)
        mark = 0
        for epoch in range(14):
            mark += rng.randrange(0, 8)
            commands = [
                (
                    rng.randrange(4),
                    rng.choice(["set", "set", "delete"]),
                    rng.choice("abc"),
                    mark + rng.randrange(-3, 30),
                )
                for _ in range(rng.randrange(6))
            ]
            rows = [(key, at(0), verb, tag, due) for key, verb, tag, due in commands]
            if rng.random() < 0.3:
                faulty = FaultyStore(store, rng.randrange(1, 14), "crash_after")
                with pytest.raises((Crash, IndexError)):
                    again = Simulated(obeying(kind), {"commands": COMMANDS}, faulty, slots=slots)
                    state_watermark(again, mark)
                    again.feed(epoch=epoch, commands=rows)
                    raise IndexError
                delivered = sim.delivered
                sim = Simulated(obeying(kind), {"commands": COMMANDS}, store, slots=slots)
                sim.delivered = delivered
            state_watermark(sim, mark)
            sim.feed(epoch=epoch, commands=rows)
            expected = oracle.feed(commands, mark)
            found: dict[int, list[tuple[str, int]]] = {}
            for key, tag, time, payload, _ in sim.delivered["out"].get(epoch, []):
                assert payload == f"due {round((time - DAY).total_seconds())}"
                found.setdefault(key, []).append((tag, round((time - DAY).total_seconds())))
            assert {key: sorted(rang, key=lambda r: (r[1], r[0])) for key, rang in found.items()} == dict(expected)
            for rang in found.values():
                assert [due for _, due in rang] == sorted(due for _, due in rang), "in the order of their times"
    finally:
        patch.undo()


def test_segments_of_timers_that_are_not_due_are_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.engine.step.TAKE_UP", 0)
    sim = Simulated(obeying(), {"commands": COMMANDS}, slots=1)
    for epoch in range(3):
        sim.feed(commands=[(key, at(0), "set", "", 1000 * (epoch + 1) + key) for key in range(100)])
    opened: list[str] = []
    original = step.CACHE.open
    monkeypatch.setattr(
        step.CACHE,
        "open",
        lambda store, piece, *more: (opened.append(piece.segment.name), original(store, piece, *more))[1],
    )
    sim.advance_watermark(at(999))
    assert opened == []
    sim.advance_watermark(at(3001))
    assert len([name for name in opened if "/alarm/" in name]) > 0
    assert sorted(rung(sim, 4)) == [(0, "", at(3000)), (1, "", at(3001))], "those of older segments were moved"


def test_pending_timers_are_counted_without_reading_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "TAKE_UP", 0)
    sim = Simulated(obeying(), {"commands": COMMANDS}, slots=1)
    assert sim.pending("obey") == 0
    sim.feed(commands=[(key, at(0), "set", tag, 10 + key) for key in range(50) for tag in "ab"])
    assert sim.pending("obey") == 100
    sim.feed(commands=[(key, at(0), "delete", "b", 0) for key in range(50)])
    sim.feed(commands=[(key, at(0), "set", "a", 500 + key) for key in range(50)])
    assert 50 <= sim.pending("obey") <= 150, "what was moved or deleted may be counted until segments are merged"
    for _ in range(20):
        sim.feed(commands=[(key, at(0), "set", "a", 500 + key) for key in range(50)])
        if sim.driver.upkeep.compactions:
            break
    sim.feed()
    assert len(list(sim.driver.journal.history.manifest.segments())) == 1
    assert sim.pending("obey") == 50
    reads: list[str] = []
    real = type(sim.store).get
    monkeypatch.setattr(type(sim.store), "get", lambda self, name: (reads.append(name), real(self, name))[1])
    assert sim.pending("obey") == 50
    assert reads == []
    sim.advance_watermark(at(10_000))
    assert sim.pending("obey") == 0, "all of them have fired, whether or not they have been merged away"


def test_timers_over_whole_columns_carry_objects_fire_in_rounds_and_give_their_times_to_productions() -> None:
    class Ladder(ms.Computation):
        """Each key climbs a ladder of timers; a second timer rings in between."""

        rung = ms.Timer(ms.EVENT_TIME, payload=object)
        other = ms.Timer(ms.EVENT_TIME)
        output = "k long, what string, n long"

        def on_batch(self, batch: ms.Batch) -> None:
            starts = np.full(len(batch), np.datetime64("2026-01-01T00:00:10"))
            self.rung.set(batch, starts, payload=[{"n": 1}] * len(batch))
            self.other.set(batch, starts + np.timedelta64(5, "s"))

        @rung.fires
        def climb(self, batch: ms.TimerBatch) -> Iterable[Any]:
            steps = np.array([each["n"] for each in batch.payloads])
            yield batch.output(batch.keys, ["rung"] * len(batch), steps)
            more = steps < 3
            payloads = [{"n": n + 1} for n in steps.tolist()]
            self.rung.set(batch, batch.times + np.timedelta64(10, "s"), where=more, payload=payloads)

        @other.fires
        def ring(self, batch: ms.TimerBatch) -> Iterable[Any]:
            assert batch.payloads is None
            yield batch.output(batch.keys, ["other"] * len(batch), np.zeros(len(batch), np.int64))

    class Times(ms.Computation):
        output = "k long, what string, time timestamp"

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield row.k, row.what, at.time

    query = ms.Query("ladder")
    ladder = query.source("commands", None, event_time="ts").key_by("k").compute("ladder", Ladder)
    ladder.key_by("k").compute("times", Times).sink("out", ms.Memory())
    sim = Simulated(query, {"commands": COMMANDS}, slots=1)
    sim.feed(commands=[(1, at(0), "", "", 0), (2, at(0), "", "", 0)])
    sim.advance_watermark(at(100))
    expected = [("rung", at(10)), ("other", at(15)), ("rung", at(20)), ("rung", at(30))]
    for key in (1, 2):
        assert [row[1:] for row in sim.outputs("out") if row[0] == key] == expected
    sim.advance_watermark(at(200))
    assert len(sim.outputs("out")) == 8


def test_a_timer_that_cannot_be_read_is_never_taken_for_unset_even_if_user_code_swallows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "TAKE_UP", 0)  # nothing else reads the segment

    class Swallows(Obey):
        def on_record(self, row: Any, at: ms.At) -> None:
            try:
                known = self.alarm.get(tag=row.tag)
            except Exception:
                known = None
            if known is None:
                self.alarm.set(DAY + timedelta(seconds=row.due), tag=row.tag)

    store = open_store(str(tmp_path))
    Simulated(obeying(), {"commands": COMMANDS}, store, slots=1).feed(commands=[(1, at(0), "set", "a", 50)])
    [segment] = (tmp_path / "segments" / "obey" / "alarm").iterdir()
    data = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
    step.CACHE._open.clear()
    with pytest.raises(ms.DamagedObject, match=segment.name):
        Simulated(obeying(Swallows), {"commands": COMMANDS}, store).feed(commands=[(1, at(0), "set", "a", 99)])


class Bells(ms.Computation):
    """Sets timers of two names and several tags, all for one time, and says in which order they ring."""

    second = ms.Timer(ms.EVENT_TIME)
    first = ms.Timer(ms.EVENT_TIME)
    output = "k long, bell string"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        for tag in ("b", "c", "a"):
            self.first.set(_noon(row), tag=tag)
            self.second.set(_noon(row), tag=tag)
        return ()

    @first.fires
    def ring_first(self, at: ms.At) -> Iterable[Any]:
        yield at.key, f"first {at.tag}"

    @second.fires
    def ring_second(self, at: ms.At) -> Iterable[Any]:
        yield at.key, f"second {at.tag}"


class BatchBells(Bells):
    """The same over whole columns."""

    second = ms.Timer(ms.EVENT_TIME)
    first = ms.Timer(ms.EVENT_TIME)

    def on_batch(self, batch: ms.Batch) -> None:
        noon = np.full(len(batch), np.datetime64(int(batch.column("v")[0].as_py()) * 10**6, "us"))
        for tag in ("b", "c", "a"):
            self.first.set(batch, noon, tag=tag)
            self.second.set(batch, noon, tag=tag)

    @first.fires
    def ring_first(self, batch: Any) -> Iterable[Any]:
        yield batch.output(batch.keys, [f"first {tag}" for tag in batch.tags.to_pylist()])

    @second.fires
    def ring_second(self, batch: Any) -> Iterable[Any]:
        yield batch.output(batch.keys, [f"second {tag}" for tag in batch.tags.to_pylist()])


def _noon(row: Any) -> datetime:
    return datetime.fromtimestamp(row.v, UTC)


@pytest.mark.parametrize("kind", [Bells, BatchBells])
@pytest.mark.parametrize("later", [False, True], ids=["in the same epoch", "in a later one"])
def test_timers_of_one_time_ring_as_declared_and_then_by_tag(kind: Any, later: bool) -> None:
    query = ms.Query("bells")
    source = query.source("events", None, event_time="ts", lateness="0 seconds")
    source.key_by("k").compute("bells", kind).sink("out", ms.Memory())
    sim = Simulated(query, {"events": "k long, ts timestamp, v long"}, now=at(1000))
    when = int(at(100).timestamp())
    sim.feed(events=[(1, at(0 if later else 100), when)])
    sim.advance_watermark(at(200))
    rung = [bell for _, bell in sim.outputs("out")]
    assert rung == [f"{name} {tag}" for name in ("second", "first") for tag in "abc"]


class Two(ms.Computation):
    """Yields two rows for each timer that is due."""

    alarm = ms.Timer(ms.EVENT_TIME)
    output = "k long"

    def on_batch(self, batch: ms.Batch) -> None:
        asked = batch.last("v").to_numpy() == 1
        self.alarm.set(batch, np.full(len(batch), np.datetime64(at(5).replace(tzinfo=None), "us")), where=asked)

    @alarm.fires
    def ring(self, batch: Any) -> Iterable[Any]:
        yield batch.output(np.repeat(batch.keys.to_numpy(), 2))


class When(ms.Computation):
    output = "k long, time timestamp"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield at.key, at.time


def test_rows_of_a_callback_on_columns_have_the_time_of_its_timers_and_not_of_other_records() -> None:
    query = ms.Query("two")
    source = query.source("events", None, event_time="ts", lateness="1 day")
    source.key_by("k").compute("two", Two).key_by("k").compute("when", When).sink("out", ms.Memory())
    sim = Simulated(query, {"events": "k long, ts timestamp, v long"}, now=at(9000), slots=1)
    sim.feed(events=[(1, at(0), 1)])
    sim._stated = {"events": int(at(6).timestamp() * 10**6)}
    sim.feed(events=[(2, at(5000), 0), (3, at(6000), 0)])
    assert sim.outputs("out") == [(1, at(5))] * 2
