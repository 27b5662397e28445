"""Holds and feedback keep time back and never move it on; and what holds is let go when nobody else would."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

import millstream as ms
from millstream.testing import Simulated

EVENTS = "k string, v long, ts timestamp"


def at(second: int) -> datetime:
    return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)


class Pass(ms.Computation):
    output = "k string, v long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield row.k, row.v


class Holder(Pass):
    """Holds at the time of its record, or later, as the record says."""

    hold = ms.Hold()

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        if row.v > 0 and at.time is not None:
            self.hold.set(at.time + timedelta(seconds=row.v))
        yield row.k, row.v


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("ahead", [1, 1800])
def test_a_hold_of_an_idle_step_moves_no_time_on(slots: int, ahead: int) -> None:
    query = ms.Query("idle")
    source = query.source("s", None, event_time="ts", lateness="10 seconds", idle_after="5 seconds")
    held = source.key_by("k").compute("held", Holder)
    held.key_by("k").compute("after", Pass).sink("out", ms.Memory())
    sim = Simulated(query, {"s": EVENTS}, slots=slots, now=at(100))
    sim.feed(s=[("a", ahead, at(100)), ("b", 0, at(100))])
    before = sim.watermark("after")
    sim.advance_clock("1 minute")
    assert sim.watermark("after") == before == at(90)
    sim.feed(s=[("b", -1, at(95))])
    assert ("b", -1) in sim.outputs("out")
    assert (sim.late("held"), sim.late("after")) == (0, 0)


def test_what_is_fed_back_moves_no_time_on_while_the_source_is_idle() -> None:
    class Loop(Pass):
        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            if row.v < 3:
                yield row.k, row.v + 1

    query = ms.Query("loop")
    source = query.source("s", None, event_time="ts", lateness="10 seconds", idle_after="5 seconds")
    again = query.feedback("again", schema="k string, v long")
    plain = source.key_by("k").compute("plain", Pass)
    plain.union(again).key_by("k").compute("loop", Loop).feed_back(again).sink("out", ms.Memory())
    sim = Simulated(query, {"s": EVENTS}, now=at(100))
    sim.feed(s=[("a", 1, at(100))])
    sim.advance_clock("20 seconds")
    assert sim.watermark("loop") == at(90)
    sim.feed(s=[("b", 2, at(95))])
    assert ("b", 3) in sim.outputs("out")
    assert sim.late("loop") == 0


def test_what_a_step_makes_of_feedback_alone_is_not_late_for_the_next() -> None:
    class Again(Pass):
        outputs = {"again": "k string, v long"}  # noqa: RUF012

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield ms.to("again", row.k, row.v + 10) if row.v == 1 else (row.k, row.v)

    query = ms.Query("side")
    source = query.source("s", None, event_time="ts")
    later = query.feedback("later", schema="k string, v long")
    first = source.key_by("k").compute("first", Again)
    first.output("again").feed_back(later)
    side = later.key_by("k").compute("side", Pass)
    first.union(side).key_by("k").compute("both", Pass).sink("out", ms.Memory())
    sim = Simulated(query, {"s": EVENTS}, now=at(100))
    sim.feed(s=[("x", 1, at(60)), ("y", 2, at(100))])
    sim.feed()
    assert sorted(sim.outputs("out")) == [("x", 11), ("y", 2)]
    assert sim.late("both") == 0


def test_a_map_that_says_its_time_may_be_fed_back() -> None:
    class Loop(ms.Computation):
        output = EVENTS

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            if row.v < 3:
                yield row.k, row.v + 1, row.ts

    query = ms.Query("mapped")
    again = query.feedback("again", schema=EVENTS)
    source = query.source("s", None, event_time="ts")
    loop = source.key_by("k").compute("first", Loop).union(again).key_by("k").compute("loop", Loop)
    loop.sink("out", ms.Memory())
    loop.map_batches("m", lambda batch: batch, output=EVENTS, event_time="ts").feed_back(again)
    sim = Simulated(query, {"s": EVENTS}, now=at(100))
    sim.feed(s=[("a", 0, at(10))])
    sim.feed()
    sim.feed()
    assert [v for _, v, _ in sim.outputs("out")] == [2, 3]


def test_event_time_cannot_come_to_a_loop_at_a_restart() -> None:
    def query(**time: Any) -> ms.Query:
        query = ms.Query("loop")
        again = query.feedback("again", schema="k string, v long")
        source = query.source("s", None, **time).key_by("k").compute("plain", Pass)
        source.union(again).key_by("k").compute("loop", Pass).feed_back(again)
        return query

    sim = Simulated(query(), {"s": EVENTS})
    sim.feed(s=[("a", 1, at(10))])
    with pytest.raises(ms.UserError, match="feedbacks.again.event time"):
        Simulated(query(event_time="ts"), {"s": EVENTS}, sim.store)


class Ordered(ms.Computation):
    """Fails on zero, in the callback that would have let go."""

    waiting = ms.Value("long")
    ready = ms.Timer(ms.EVENT_TIME)
    oldest = ms.Hold()
    output = "k string, v long"

    def on_record(self, row: Any, at: ms.At) -> None:
        assert at.time is not None
        self.waiting.set(row.v)
        self.oldest.set(at.time)
        self.ready.set(timedelta(seconds=10))

    @ready.fires
    def send(self, at: ms.At) -> Iterable[Any]:
        self.oldest.release()
        yield at.key, 100 // self.waiting.get()


class OrderedBatch(Ordered):
    ready = ms.Timer(ms.EVENT_TIME)

    def on_batch(self, batch: ms.Batch) -> None:
        self.waiting.write(batch, batch.last("v"))
        self.oldest.set(batch, batch.newest())
        self.ready.set(batch, batch.newest() + np.timedelta64(10, "s"))

    @ready.fires
    def send(self, batch: Any) -> Iterable[Any]:
        self.oldest.release(batch)
        yield batch.output(batch.keys, [100 // v for v in self.waiting.read(batch).to_pylist()])


@pytest.mark.parametrize("kind", [Ordered, OrderedBatch])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_timer_that_becomes_a_letter_lets_go_of_what_its_key_holds(kind: Any, slots: int) -> None:
    query = ms.Query("ordered")
    source = query.source("s", None, event_time="ts")
    ordered = source.key_by("k").compute("ordered", kind, on_error="dead_letter")
    ordered.key_by("k").compute("after", Pass).sink("out", ms.Memory())
    sim = Simulated(query, {"s": EVENTS}, slots=slots, now=at(0))
    sim.feed(s=[("bad", 0, at(1)), ("good", 5, at(1))])
    assert sim.watermark("after") == at(1)
    sim.feed(s=[("other", 1, at(600))])
    assert sim.dead_letters("ordered") == 1
    sim.feed(s=[("other", 1, at(700))])
    assert sim.watermark("after") == at(700)
    assert ("good", 20) in sim.outputs("out")


@pytest.mark.parametrize("kind", [Pass, None])
def test_a_lack_of_memory_is_no_fault_of_a_record(kind: Any) -> None:
    class Greedy(ms.Computation):
        def on_record(self, row: Any, at: ms.At) -> None:
            raise MemoryError

    class GreedyBatch(ms.Computation):
        def on_batch(self, batch: ms.Batch) -> None:
            raise MemoryError

    query = ms.Query("greedy")
    step = Greedy if kind else GreedyBatch
    query.source("s", None).key_by("k").compute("greedy", step, on_error="dead_letter")
    with pytest.raises(ms.StepError, match="MemoryError"):
        Simulated(query, {"s": EVENTS}).feed(s=[("a", 1, at(0)), ("b", 1, at(0))])
