"""Holds (G7): no step downstream sees a time that somebody holds; what was passed on never goes back."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.engine import step
from millstream.errors import StepError, UserError
from millstream.model.query import Query
from millstream.store import least
from millstream.store.objects import ObjectStore, open_store
from millstream.testing import Crash, FaultyStore, Simulated
from timers import COMMANDS, DAY, at


class Holding(ms.Computation):
    """Holds and lets go as records say, and says what it holds."""

    kept = ms.Hold()
    output = "k long, held timestamp"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        if row.verb == "set":
            self.kept.set(DAY + timedelta(seconds=row.due))
        elif row.verb == "release":
            self.kept.release()
        yield at.key, self.kept.get()


class HoldingBatch(ms.Computation):
    """The same over whole columns; of a key's commands the last one counts."""

    kept = ms.Hold()
    output = "k long, held timestamp"

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        verbs = np.array(batch.last("verb").to_pylist())
        times = np.datetime64(DAY.replace(tzinfo=None), "us") + batch.last("due").to_numpy() * np.timedelta64(1, "s")
        self.kept.set(batch, times, where=verbs == "set")
        self.kept.release(batch, where=verbs == "release")
        held = [
            None if moment is None else moment.replace(tzinfo=DAY.tzinfo) for moment in self.kept.get(batch).tolist()
        ]
        yield batch.output(batch.keys, held)


class Alarm(ms.Computation):
    """Fires for every key at 50, and passes on what it sees."""

    alarm = ms.Timer(ms.EVENT_TIME)
    output = "k long, what string"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.alarm.set(DAY + timedelta(seconds=50))
        yield at.key, f"{at.time:%M:%S}"

    @alarm.fires
    def rang(self, at: ms.At) -> Iterable[Any]:
        yield at.key, "alarm"


def holding(kind: type[ms.Computation] = Holding) -> Query:
    """A step that holds, one that reads it, and one that reads that."""
    query = ms.Query("holding")
    source = query.source("commands", None, event_time="ts")
    held = source.key_by("k").compute("hold", kind, late="process").sink("held", ms.Memory())
    after = held.key_by("k").compute("after", Alarm).sink("out", ms.Memory())
    after.key_by("k").compute("last", Alarm)
    return query


def build(query: Query, store: ObjectStore | None = None, slots: int = 2) -> Simulated:
    return Simulated(query, {"commands": COMMANDS}, store, slots=slots)


def hold_at(key: int, due: int, ts: int = 0) -> tuple[Any, ...]:
    return (key, at(ts), "set", "", due)


def let_go(key: int, ts: int = 0) -> tuple[Any, ...]:
    return (key, at(ts), "release", "", 0)


@pytest.mark.parametrize("kind", [Holding, HoldingBatch])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_hold_keeps_back_what_is_passed_on_within_the_epoch_and_not_the_step_itself(kind: Any, slots: int) -> None:
    sim = build(holding(kind), slots=slots)
    sim.feed(commands=[hold_at(1, 30), hold_at(2, 40), hold_at(3, 90, ts=70)])
    assert sim.watermark("hold") == at(70), "its own follows its input"
    assert sim.watermark("after") == sim.watermark("last") == at(30), "at once, and to the last level"
    sim.feed(commands=[let_go(1)])
    assert sim.watermark("after") == at(40)
    sim.advance_watermark(at(200))
    assert sim.watermark("after") == at(40)
    assert sorted(row[1] for row in sim.outputs("out")) == ["00:00", "00:00", "00:30", "01:10"], "no alarm"
    sim.feed(commands=[let_go(2)])
    assert sim.watermark("last") == at(90)
    assert sorted(row[1] for row in sim.delivered["out"][3]) == ["00:40", "alarm", "alarm", "alarm"]
    sim.feed(commands=[let_go(3)])
    assert sim.watermark("last") == sim.watermark("hold") == at(200)


@pytest.mark.parametrize("kind", [Holding, HoldingBatch])
def test_a_hold_for_a_time_that_was_passed_on_is_raised_to_it(kind: Any) -> None:
    sim = build(holding(kind))
    sim.feed(commands=[hold_at(1, 60, ts=50)])
    sim.feed(commands=[hold_at(1, 20), hold_at(2, 55, ts=80)])
    assert sorted(sim.delivered["held"][1]) == [(1, at(50)), (2, at(55))]
    assert sim.watermark("after") == at(50)
    sim.feed(commands=[let_go(1)])
    assert sim.watermark("after") == at(55)


def test_holds_survive_restarts_and_a_query_that_stands_idle() -> None:
    store = open_store("memory://")
    sim = build(holding(), store)
    sim.feed(commands=[hold_at(key, 10 + key) for key in range(20)])
    for _ in range(3):
        sim = build(holding(), store)
        sim.advance_watermark(at(500))
        assert (sim.watermark("hold"), sim.watermark("after")) == (at(500), at(10))
    sim.feed(commands=[let_go(key) for key in range(19)])
    sim = build(holding(), store)
    sim.feed()
    assert sim.watermark("after") == at(29)


def test_a_step_that_nobody_reads_may_hold() -> None:
    query = ms.Query("alone")
    source = query.source("commands", None, event_time="ts")
    source.key_by("k").compute("hold", Holding, late="process").sink("held", ms.Memory())
    sim = build(query)
    sim.feed(commands=[hold_at(1, 30), hold_at(2, 90, ts=80)])
    sim.feed(commands=[hold_at(2, 10)])
    assert sim.watermark("hold") == at(80)
    assert sim.delivered["held"][1] == [(2, at(30))]


def test_a_source_that_falls_silent_does_not_open_a_hold() -> None:
    query = ms.Query("silent")
    source = query.source("commands", None, event_time="ts", idle_after="30 seconds")
    other = query.source("other", None, event_time="ts")
    held = source.key_by("k").compute("hold", Holding)
    query.compute("both", Alarm, a=held.key_by("k"), b=other.key_by("k"))
    sim = Simulated(query, {"commands": COMMANDS, "other": "k long, ts timestamp"}, slots=2, now=at(0))
    sim.feed(commands=[hold_at(1, 30)], other=[(1, at(10))])
    sim.advance_clock("1 minute")
    sim.feed(other=[(1, at(100))])
    assert sim.watermark("hold") == at(0)
    assert sim.watermark("both") == at(30), "beyond the silent source, but not beyond what it holds"
    sim.feed(commands=[let_go(1, ts=20)])
    sim.advance_clock("1 minute")
    sim.feed(other=[(1, at(120))])
    assert sim.watermark("both") == at(120)


class Sorter(ms.Computation):
    """Keeps records back for 20 seconds and then sends them on, in order, with the times they came with."""

    waiting = ms.Value(object)
    ready = ms.Timer(ms.EVENT_TIME)
    oldest = ms.Hold()
    output = "k long, n long"

    def on_batch(self, batch: ms.Batch) -> None:
        kept = self.waiting.read(batch)
        starts = [*batch.starts.tolist(), batch.rows.num_rows]
        times, numbers = batch.times, batch.column("n").to_pylist()
        for i in range(len(batch)):
            fresh = [(times[p], numbers[p]) for p in range(starts[i], starts[i + 1])]
            kept[i] = sorted([*(kept[i] or []), *fresh])
        first = np.array([pairs[0][0] for pairs in kept])
        self.waiting.write(batch, kept)
        self.oldest.set(batch, first)
        self.ready.set(batch, first + np.timedelta64(20, "s"))

    @ready.fires
    def send(self, batch: ms.TimerBatch) -> Iterable[Any]:
        kept = self.waiting.read(batch)
        keys = batch.keys.to_pylist()
        due = [(key, *pair) for key, t, ps in zip(keys, batch.times, kept, strict=True) for pair in ps if pair[0] < t]
        rest = [[pair for pair in pairs if pair[0] >= t] for t, pairs in zip(batch.times, kept, strict=True)]
        self.waiting.write(batch, rest)
        some = np.array([bool(pairs) for pairs in rest])
        first = np.array([pairs[0][0] if pairs else np.datetime64("NaT", "us") for pairs in rest])
        self.oldest.release(batch, where=~some)
        self.oldest.set(batch, first, where=some)
        self.ready.set(batch, first + np.timedelta64(20, "s"), where=some)
        sent = batch.output([key for key, _, _ in due], [number for _, _, number in due])
        yield batch.timed(sent, np.array([t for _, t, _ in due], "datetime64[us]"))


class Sees(ms.Computation):
    output = "k long, n long, time timestamp"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield row.k, row.n, at.time


def test_what_is_kept_back_comes_with_its_own_time_and_is_not_late(rng: random.Random) -> None:
    query = ms.Query("sorted")
    source = query.source("events", None, event_time="ts", lateness="10 seconds")
    query_sorted = source.key_by("k").compute("sort", Sorter)
    query_sorted.key_by("k").compute("sees", Sees).sink("out", ms.Memory())
    sim = Simulated(query, {"events": "k long, n long, ts timestamp"}, slots=3)
    fed: list[tuple[Any, ...]] = []
    for epoch in range(12):
        rows = [(rng.randrange(4), epoch * 10 + i, at(epoch * 10 + rng.randrange(10))) for i in range(10)]
        sim.feed(events=rows)
        fed += rows
        after, before = sim.watermark("sees"), sim.watermark("sort")
        sent = {number for _, number, _ in sim.outputs("out")}
        waiting = [time for _, number, time in fed if number not in sent]
        assert after is not None
        assert after == min([before, *waiting]), "as far as possible, and no further"
    sim.advance_watermark(at(1000))
    assert sim.late("sees") == 0
    found = sim.outputs("out")
    assert sorted(found) == sorted((key, number, time) for key, number, time in fed)
    for key in range(4):
        times = [time for k, _, time in found if k == key]
        assert times == sorted(times)


class Oracle:
    """One record after the other, in a dictionary."""

    def __init__(self) -> None:
        self.holds: dict[int, int] = {}
        self.mark = self.passed = -(10**9)

    def feed(self, commands: list[tuple[int, int, str, int]]) -> None:
        for key, _, verb, due in commands:
            if verb == "set":
                self.holds[key] = max(due, self.passed)
            elif verb == "release":
                self.holds.pop(key, None)
        self.mark = max([self.mark, *(ts for _, ts, _, _ in commands)])
        self.passed = max(self.passed, min([self.mark, *self.holds.values()]))


@pytest.mark.parametrize("take_up", [0, 2])
@pytest.mark.parametrize("kind", [Holding, HoldingBatch])
@given(seed=st.integers(0, 2**32), slots=st.integers(1, 3))
@settings(max_examples=12)
def test_any_life_of_holds_is_that_of_a_dictionary(take_up: int, kind: Any, seed: int, slots: int) -> None:
    rng = random.Random(seed)
    store, oracle = open_store("memory://"), Oracle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "TAKE_UP", take_up)
        patch.setattr(least, "LOOK_AT", rng.choice([1, 3, 1024]))
        sim = build(holding(kind), store, slots)
        for epoch in range(14):
            rows = [
                (key, epoch * 5 + rng.randrange(-20, 6), rng.choice(["set", "release", "release"]), due)
                for key, due in (
                    (rng.randrange(8), epoch * 5 + rng.randrange(-30, 40)) for _ in range(rng.randrange(9))
                )
            ]
            if kind is HoldingBatch:  # of which the last command of a key and epoch counts
                rows = list({row[0]: row for row in rows}.values())
            commands = [(key, at(ts), verb, "", due) for key, ts, verb, due in rows]
            if rng.random() < 0.2:
                with pytest.raises((Crash, IndexError)):
                    build(holding(kind), FaultyStore(store, rng.randrange(1, 20), "crash_after"), slots).feed(
                        epoch=epoch, commands=commands
                    )
                    raise IndexError  # it had fewer operations
                sim = build(holding(kind), store, slots)
            elif rng.random() < 0.2:
                sim = build(holding(kind), store, slots)
            sim.feed(epoch=epoch, commands=commands)
            oracle.feed(rows)
            expected = None if oracle.mark == -(10**9) else at(oracle.passed)
            assert sim.watermark("after") == sim.watermark("last") == expected, f"epoch {epoch}"


@pytest.mark.parametrize("kind", [Holding, HoldingBatch])
def test_a_record_that_becomes_a_dead_letter_holds_nothing(kind: Any) -> None:
    class Fails(kind):  # type: ignore[misc]
        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield from super().on_record(row, at)
            if row.tag == "bad":
                raise ValueError("bad")

        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            yield from super().on_batch(batch)
            if "bad" in batch.column("tag").to_pylist():
                raise ValueError("bad")

    if kind is Holding:
        del Fails.on_batch
    query = ms.Query("letters")
    source = query.source("commands", None, event_time="ts")
    held = source.key_by("k").compute("hold", Fails, late="process", on_error="dead_letter")
    held.key_by("k").compute("after", Alarm)
    sim = build(query)
    sim.feed(commands=[hold_at(1, 40), hold_at(2, 60, ts=100)])
    sim.feed(commands=[(1, at(0), "release", "bad", 0), (3, at(0), "set", "bad", 10)])
    assert sim.dead_letters("hold") == 2
    assert sim.watermark("after") == at(40), "it holds as before"
    sim.feed(commands=[let_go(1)])
    assert sim.watermark("after") == at(60)


def test_many_holds_cost_a_look_at_a_few_of_them_and_stale_ones_are_passed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    real = least._least_of
    monkeypatch.setattr(step, "TAKE_UP", 0)
    monkeypatch.setattr(least, "_least_of", lambda *given: (looked.append(len(given[-1])), real(*given))[1])
    sim = build(holding(HoldingBatch), slots=1)
    sim.feed(commands=[hold_at(key, 30) for key in range(5000)] + [hold_at(9999, 100, ts=500)])
    assert sim.watermark("after") == at(30)
    assert looked == [least.LOOK_AT], "of thousands that hold at one time, the first ones are enough"
    looked.clear()
    sim.feed()
    assert looked == [least.LOOK_AT]
    looked.clear()
    sim.feed(commands=[let_go(key) for key in range(5000)])
    assert sim.watermark("after") == at(100)
    assert sum(looked) >= 5000
    looked.clear()
    sim.feed()
    assert sum(looked) == 1, "those that were let go are not looked at again"
    looked.clear()
    sim.feed(commands=[hold_at(key, 1000) for key in range(3000)])
    assert sum(looked) == 1, "nor those that are still ahead"


def test_what_is_wrong_with_a_hold_is_refused() -> None:
    query = ms.Query("q")
    query.source("commands", None).key_by("k").compute("hold", Holding)
    with pytest.raises(UserError, match="step 'hold': its hold 'kept' keeps a watermark back, but no input has event"):
        build(query)

    class Wrong(Holding):
        def on_record(self, row: Any, at: ms.At) -> None:  # type: ignore[override]
            self.kept.set(row.due)

    with pytest.raises(StepError, match="hold 'kept': found 30, expected a datetime, such as at.time"):
        build(holding(Wrong)).feed(commands=[hold_at(1, 30)])

    class Short(HoldingBatch):
        def on_batch(self, batch: ms.Batch) -> None:  # type: ignore[override]
            self.kept.set(batch, batch.times[:1])

    with pytest.raises(StepError, match="hold 'kept': 1 times found, 2 expected, one for each of batch.keys"):
        build(holding(Short), slots=1).feed(commands=[hold_at(1, 30), hold_at(2, 30)])

    class Nothing(HoldingBatch):
        def on_batch(self, batch: ms.Batch) -> None:  # type: ignore[override]
            self.kept.set(batch, np.full(len(batch), np.datetime64("NaT")))

    with pytest.raises(StepError, match="hold 'kept': some of the times are NaT; say where= there is one"):
        build(holding(Nothing)).feed(commands=[hold_at(1, 30)])
    with pytest.raises(UserError, match=r"kept.release\(\) was called outside on_record or a callback"):
        Holding().kept.release()

    class Assigns(Holding):
        def __init__(self) -> None:
            self.kept = DAY  # type: ignore[assignment]

    with pytest.raises(UserError, match="'kept' is a hold; change it with its methods"):
        Assigns()

    class Bare(Holding):
        kept = ms.Hold  # type: ignore[assignment]

    with pytest.raises(UserError, match="Bare.kept hides the hold 'kept' of a base class"):
        ms.Query("q").source("c", None, event_time="ts").key_by("k").compute("bare", Bare)
