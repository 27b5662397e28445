"""Feedback (G1, G5): what is fed back arrives in the next epoch, once, whatever fails in between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.engine import upkeep
from millstream.engine.feedback import fed_back
from millstream.engine.spec import EpochTask, lanes_of
from millstream.errors import DamagedObject, StoreUnavailable, UserError
from millstream.model.query import Query
from millstream.protocol.routing import RoutingTable
from millstream.store import names
from millstream.store.objects import ObjectStore, open_store
from millstream.testing import Crash, FaultyStore, Simulated

PAIRS = "k long, n long"
DAY = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return DAY + timedelta(seconds=seconds)


class Countdown(ms.Computation):
    """Counts what a key sees, and sends one less to the next key."""

    seen = ms.Value("long", default=0)
    output = PAIRS

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.seen.set(self.seen.get() + 1)
        if row.n > 0:
            yield (row.k * 7 + 1) % 13, row.n - 1


def loop() -> Query:
    query = ms.Query("loop")
    again = query.feedback("again", schema=PAIRS)
    counted = query.source("start", None).union(again).key_by("k").compute("count", Countdown)
    counted.feed_back(again).sink("out", ms.Memory())
    return query


class Oracle:
    """The same, in dictionaries."""

    def __init__(self) -> None:
        self.seen: Counter[int] = Counter()
        self.pending: list[tuple[int, int]] = []

    def feed(self, start: list[tuple[int, int]]) -> Counter[tuple[int, int]]:
        made = []
        for key, n in [*start, *self.pending]:
            self.seen[key] += 1
            if n > 0:
                made.append(((key * 7 + 1) % 13, n - 1))
        self.pending = made
        return Counter(made)


def build(store: ObjectStore | None = None, slots: int = 3, **options: Any) -> Simulated:
    return Simulated(loop(), {"start": PAIRS}, store, slots=slots, **options)


def test_a_loop_turns_once_an_epoch_until_nothing_is_fed_back() -> None:
    sim = build()
    sim.feed(start=[(0, 3), (5, 1)])
    assert sorted(sim.delivered["out"][0]) == [(1, 2), (10, 0)]
    assert dict(sim.state("count")) == {0: 1, 5: 1}, "not in the same epoch"
    sim.feed()
    assert sim.delivered["out"][1] == [(8, 1)]
    assert dict(sim.state("count")) == {0: 1, 5: 1, 1: 1, 10: 1}
    sim.feed(start=[(8, 0)])
    assert dict(sim.state("count"))[8] == 2, "what is fed back and what is new meet"
    sim.feed()
    for _ in range(3):
        sim.feed()
        assert sim.delivered["out"][sim.epoch] == []
    assert sum(n for _, n in sim.state("count")) == 7


def test_what_is_pending_at_a_stop_is_delivered_at_the_next_start() -> None:
    store, oracle = open_store("memory://"), Oracle()
    for epoch in range(8):
        sim = build(store)
        start = [(key, 5) for key in range(13)] if epoch == 0 else []
        sim.feed(start=start)
        expected = oracle.feed(start)
        assert Counter(sim.delivered["out"][epoch]) == expected
    assert dict(sim.state("count")) == dict(oracle.seen)


def test_a_driver_that_dies_at_any_moment_loses_and_repeats_nothing_that_was_fed_back() -> None:
    start = [(key, 4) for key in range(13)]
    for moment in ("planned", "executed", "committed", "delivering", "delivered"):
        for epoch in range(4):
            store, oracle = open_store("memory://"), Oracle()

            def die(now: str, number: int, moment: str = moment, epoch: int = epoch) -> None:
                if (now, number) == (moment, epoch):
                    raise Crash("killed")

            sim = build(store, observe=die)
            for number in range(7):
                given = {"start": start} if number == 0 else {}
                try:
                    sim.feed(epoch=number, **given)
                except Crash:
                    sim = build(store)
                    sim.feed(epoch=number, **given)
                oracle.feed(given.get("start", []))
            assert dict(sim.state("count")) == dict(oracle.seen), f"{moment} of epoch {epoch}"


def test_a_store_that_fails_on_any_operation_loses_and_repeats_nothing_that_was_fed_back() -> None:
    start = [(key, 2) for key in range(13)]
    for fault in ("refuse", "lose", "crash", "crash_after"):
        operation = 0
        while True:
            operation += 1
            store, oracle = open_store("memory://"), Oracle()
            build(store, slots=2).feed(start=start)
            oracle.feed(start)
            broken = FaultyStore(store, operation, fault)
            with suppress(Crash, StoreUnavailable):
                failing = build(broken, slots=2)
                failing.feed()
                failing.feed()
            sim = build(store, slots=2)
            while sim.epoch < 4:
                sim.feed()
            for _ in range(4):
                oracle.feed([])
            assert dict(sim.state("count")) == dict(oracle.seen), f"{fault} of operation {operation}"
            if broken.operations < operation:  # it never came to that
                break
        assert operation > 20


@given(seed=st.integers(0, 2**32), slots=st.integers(1, 4))
@settings(max_examples=25)
def test_any_life_of_a_loop_is_that_of_a_list(seed: int, slots: int) -> None:
    rng = random.Random(seed)
    store, oracle = open_store("memory://"), Oracle()
    sim = build(store, slots)
    for epoch in range(12):
        start = [(rng.randrange(13), rng.randrange(6)) for _ in range(rng.randrange(8))]
        if rng.random() < 0.3:
            with pytest.raises((Crash, IndexError)):
                build(FaultyStore(store, rng.randrange(1, 25), "crash_after"), slots).feed(epoch=epoch, start=start)
                raise IndexError  # it had fewer operations
            sim = build(store, slots)
        sim.feed(epoch=epoch, start=start)
        expected = oracle.feed(start)
        assert Counter(sim.delivered["out"][epoch]) == expected
    assert dict(sim.state("count")) == dict(oracle.seen)


def test_objects_of_feedback_are_kept_as_long_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "GARBAGE_EVERY", 1)
    store = open_store("memory://")
    sim = build(store, retain=0)
    sim.feed(start=[(1, 60)])
    for _ in range(70):
        sim.feed()
    assert sum(n for _, n in sim.state("count")) == 61
    assert list(store.list(f"{names.PRODUCTIONS}again/")) == []


def test_an_object_of_feedback_that_is_damaged_is_named_and_never_used() -> None:
    for data in (None, b"something else"):
        store = open_store("memory://")
        build(store).feed(start=[(1, 2)])
        [found] = store.list(f"{names.PRODUCTIONS}again/")
        store.delete([found.name])
        if data is not None:
            store.put(found.name, data)
        with pytest.raises(DamagedObject, match=found.name):
            build(store).feed()
        assert build(store).epoch == 0


class Relay(ms.Computation):
    """Two feedbacks out, and what it was told by which input."""

    output = PAIRS
    outputs: ClassVar = {"left": PAIRS, "right": PAIRS}

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield at.key, row.n
        if row.n > 0:
            yield ms.to("left", at.key, row.n - 1)
            yield ms.to("right", at.key, row.n - 2)


class Order(ms.Computation):
    """What a key saw, in order."""

    output = "k long, epoch long, input string, n long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield row.k, at.epoch, at.input, row.n


def test_feedback_may_lead_to_any_level_by_any_key_and_from_several_steps() -> None:
    """`relay` feeds two streams; both are read on level 2 by another key, and the first by itself, too."""
    query = ms.Query("many")
    left, right = query.feedback("left", PAIRS), query.feedback("right", PAIRS)
    relay = query.source("start", None).union(left).key_by("k").compute("relay", Relay)
    order = query.compute("order", Order, now=relay.key_by("n"), l=left.key_by("n"), r=right.key_by("n"))
    relay.output("left").feed_back(left)
    relay.output("right").feed_back(right)
    order.sink("out", ms.Memory())
    sim = Simulated(query, {"start": PAIRS}, slots=2)
    sim.feed(start=[(1, 2), (2, 1)])
    for _ in range(4):
        sim.feed()
    found = Counter(sim.outputs("out"))
    expected = [
        (1, 0, "now", 2),
        (2, 0, "now", 1),
        (1, 1, "now", 1),
        (2, 1, "now", 0),
        (1, 1, "l", 1),
        (2, 1, "l", 0),
        (1, 1, "r", 0),
        (2, 1, "r", -1),
        (1, 2, "now", 0),
        (1, 2, "l", 0),
        (1, 2, "r", -1),
    ]
    assert found == Counter(expected)


def test_what_is_fed_back_comes_before_what_is_new_and_in_the_order_in_which_it_was_made() -> None:
    class Trail(ms.Computation):
        output = PAIRS
        outputs: ClassVar = {"trail": PAIRS}

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield ms.to("trail", at.key, row.n)
            if row.n < 10:
                yield at.key, row.n + 10
                yield at.key, row.n + 20

    query = ms.Query("trail")
    again = query.feedback("again", PAIRS)
    trail = again.union(query.source("start", None)).key_by("k").compute("step", Trail)
    trail.feed_back(again)
    trail.output("trail").sink("out", ms.Memory())
    sim = Simulated(query, {"start": PAIRS}, slots=1)
    sim.feed(start=[(1, 1), (1, 2)])
    sim.feed(start=[(1, 3)])
    assert sim.delivered["out"][1] == [(1, 11), (1, 21), (1, 12), (1, 22), (1, 3)]


@pytest.mark.parametrize("productions", ["weak", "strong"])
def test_a_step_of_either_kind_of_productions_may_feed_back(productions: str) -> None:
    query = ms.Query("kinds")
    again = query.feedback("again", PAIRS)
    keyed = query.source("start", None).union(again).key_by("k")
    keyed.compute("count", Countdown, productions=productions).feed_back(again)
    store, oracle = open_store("memory://"), Oracle()
    for epoch in range(6):
        start = [(key, 4) for key in range(13)] if epoch == 0 else []
        sim = Simulated(query, {"start": PAIRS}, store, slots=2)
        sim.feed(start=start)
        oracle.feed(start)
    assert dict(sim.state("count")) == dict(oracle.seen)


# -- time -------------------------------------------------------------------------------------------------------------

TIMED = "k long, n long, ts timestamp"


class Passing(ms.Computation):
    """Goes round n times, and says what it sees of time; a timer rings at 50."""

    alarm = ms.Timer(ms.EVENT_TIME)
    output = PAIRS
    outputs: ClassVar = {"seen": "k long, n long, time timestamp, watermark timestamp"}

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield ms.to("seen", at.key, row.n, at.time, at.watermark)
        self.alarm.set(DAY + timedelta(seconds=50))
        if row.n > 0:
            yield at.key, row.n - 1

    @alarm.fires
    def rang(self, at: ms.At) -> Iterable[Any]:
        yield ms.to("seen", at.key, -1, at.time, at.watermark)


def test_pending_feedback_keeps_time_back_and_is_never_late() -> None:
    query = ms.Query("timed")
    again = query.feedback("again", PAIRS)
    source = query.source("start", None, event_time="ts")
    passing = query.compute("pass", Passing, fed=again.key_by("k"), new=source.key_by("k"))
    passing.feed_back(again)
    passing.output("seen").sink("out", ms.Memory())
    passing.output("seen").key_by("k").compute("after", Order)
    sim = Simulated(query, {"start": TIMED}, slots=2, now=DAY)
    sim.feed(start=[(1, 3, at(10)), (2, 0, at(20))])
    assert sim.watermark("pass") == at(20)
    sim.feed(start=[(2, 0, at(100))])
    assert sorted(sim.delivered["out"][1]) == [(1, 2, at(10), at(20)), (2, 0, at(100), at(20))], "it is not late"
    assert sim.watermark("start") == at(100)
    assert sim.watermark("pass") == sim.watermark("after") == at(20), "held, though not taken back"
    sim.feed(start=[(2, 0, at(30))])
    assert sim.late("pass") == 0
    assert sim.watermark("pass") == at(20)
    sim.feed()
    assert sim.watermark("pass") == at(20)
    assert not [row for row in sim.outputs("out") if row[1] == -1], "no alarm as long as the loop turns"
    sim.feed()
    assert sim.watermark("pass") == sim.watermark("after") == at(100), "and on it goes"
    assert sorted(sim.delivered["out"][4]) == [(1, -1, at(50), at(20)), (2, -1, at(50), at(20))]


def test_a_loop_without_event_time_has_none_and_one_with_a_silent_source_holds_nobody_back() -> None:
    sim = build()
    sim.feed(start=[(1, 5)])
    assert sim.graph.times == {}
    assert sim.watermark("count") is None
    query = ms.Query("silent")
    again = query.feedback("again", PAIRS)
    source = query.source("start", None, event_time="ts", idle_after="30 seconds")
    other = query.source("other", None, event_time="ts")
    passing = query.compute("pass", Passing, fed=again.key_by("k"), new=source.key_by("k"))
    passing.feed_back(again)
    query.compute("both", Order, a=passing.key_by("k"), b=other.key_by("k"))
    sim = Simulated(query, {"start": TIMED, "other": TIMED}, slots=2, now=DAY)
    sim.feed(start=[(1, 1, at(10))], other=[(1, 1, at(10))])
    sim.advance_clock("1 minute")
    sim.feed(other=[(1, 1, at(70))])
    assert sim.watermark("pass") == at(10)
    assert sim.watermark("both") == at(70)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_feedback_is_refused() -> None:
    def fresh() -> tuple[Query, Any, Any]:
        query = ms.Query("q")
        again = query.feedback("again", schema=PAIRS)
        return query, again, query.source("start", None)

    def refuse(query: Query, match: str) -> None:
        with pytest.raises(UserError, match=match):
            Simulated(query, {"start": PAIRS})

    query, again, start = fresh()
    start.union(again).key_by("k").compute("count", Countdown)
    refuse(query, "feedback 'again': nobody writes it; connect a stream with stream.feed_back")
    query, again, start = fresh()
    start.key_by("k").compute("count", Countdown).feed_back(again)
    refuse(query, "feedback 'again': nobody reads it")
    query, again, start = fresh()
    again.key_by("k").compute("count", Countdown)
    start.feed_back(again)
    refuse(query, "feedback 'again' is written by 'start'; only what comes out of a step can be fed back")
    query, again, start = fresh()
    start.union(again).key_by("k").compute("order", Order).feed_back(again)
    refuse(
        query, "feedback 'again' is declared as k BIGINT, n BIGINT, but 'order', which is fed back, is k BIGINT, epoch"
    )

    class Silent(Countdown):
        output = ""

    query, again, start = fresh()
    start.union(again).key_by("k").compute("silent", Silent).feed_back(again)
    refuse(query, "feedback 'again' is written by step 'silent', which declares no output")
    query, again, start = fresh()
    start.union(again).key_by("k").compute("count", Countdown).feed_back(again)
    again.sink("out", ms.Memory())
    refuse(query, "sink 'out' receives the feedback 'again'; only what comes out of a step can be sunk")
    query, again, start = fresh()
    start.union(again).key_by("nothing").compute("count", Countdown).feed_back(again)
    refuse(query, "step 'count': no column 'nothing' to key by")

    query = ms.Query("q")
    again, start = query.feedback("again", PAIRS), query.source("start", None, event_time="ts")
    start.key_by("k").compute("count", Countdown).feed_back(again)
    again.key_by("k").compute("pass", Passing)
    with pytest.raises(UserError, match="step 'pass': its timer 'alarm' waits for event time, but all time here is"):
        Simulated(query, {"start": TIMED})


def test_what_is_seen_to_be_wrong_with_feedback_is_refused_at_once() -> None:
    query = ms.Query("q")
    again, start = query.feedback("again", PAIRS), query.source("start", None)
    counted = start.union(again).key_by("k").compute("count", Countdown)
    with pytest.raises(UserError, match="feedback 'again': the query 'q' already has a feedback of that name"):
        query.feedback("again", PAIRS)
    with pytest.raises(UserError, match="feedback 'start': the query 'q' already has a source of that name"):
        query.feedback("start", PAIRS)
    with pytest.raises(UserError, match="step 'again': the query 'q' already has a feedback of that name"):
        start.key_by("k").compute("again", Countdown)
    with pytest.raises(UserError, match="feedback 'b': schema=''; give the schema of its records"):
        query.feedback("b", "")
    with pytest.raises(UserError, match="feedback 'c': "):
        query.feedback("c", "k lonk")
    with pytest.raises(UserError, match="map 'm' reads the feedback 'again'; map what is fed back before it is"):
        again.map_batches("m", lambda batch: batch, output=PAIRS)
    with pytest.raises(UserError, match="map 'sums-partial' reads the feedback 'again'; .* read it with key_by"):
        again.key_by("k").aggregate("sums", total=ms.sum("n"))
    with pytest.raises(UserError, match="stream 'count': feed_back takes what query.feedback"):
        counted.feed_back(start)
    with pytest.raises(UserError, match="stream 'count': feed_back takes what query.feedback"):
        counted.feed_back(ms.Query("other").feedback("again", PAIRS))
    with pytest.raises(UserError, match="feedback 'again' is written by several streams"):
        counted.union(start).feed_back(again)
    other = start.key_by("k").compute("other", Countdown)
    counted.feed_back(again)
    with pytest.raises(UserError, match="feedback 'again' is written by 'count' and 'other'; it has one writer"):
        other.feed_back(again)


def test_a_restart_with_another_loop_is_refused() -> None:
    store = open_store("memory://")
    build(store).feed(start=[(1, 5)])
    query = ms.Query("loop")
    counted = query.source("start", None).key_by("k").compute("count", Countdown)
    counted.sink("out", ms.Memory())
    with pytest.raises(UserError, match="feedbacks: was {'again': .*now missing"):
        Simulated(query, {"start": PAIRS}, store, slots=3)


def test_a_loop_is_explained_and_drawn() -> None:
    assert loop().explain().splitlines() == [
        "query loop: 1 level, one Spark job per epoch",
        "level 0: route",
        "  source start",
        "  feedback again <- count, next epoch",
        "level 1: host",
        "  step count (Countdown) <- start by k, again by k",
        "  sink out (Memory) <- count",
    ]
    assert '  "count" -> "again" [label="next epoch", style=dashed];' in loop().to_dot().splitlines()
    assert '  "again" -> "count" [label="by k"];' in loop().to_dot().splitlines()
    assert "  n_count -.->|next epoch| n_again" in loop().to_mermaid().splitlines()
    assert repr(loop()).endswith("count ~> again")


def test_a_slot_takes_what_the_table_of_this_epoch_gives_it_whoever_wrote_it() -> None:
    store = open_store("memory://")
    sim = build(store, slots=3)
    sim.feed(start=[(key, 2) for key in range(200)])
    history = sim.driver.journal.history
    outputs = tuple(output for output in history.last_outputs if output.stream == "again")
    assert len(outputs) == 3
    lanes = lanes_of(sim.graph, {"count": RoutingTable.even(5, 12)})
    task = EpochTask(1, names.Maker(1, 1, "a", 0), 0, 5, lanes, {}, fed={"again": outputs})
    [number] = [number for number, lane in enumerate(lanes) if lane.stream == "again"]
    found: Counter[int] = Counter()
    for slot in range(5):
        for part in fed_back(task, 1, slot, store):
            assert part.lane == number
            schema = pa.schema([("__hash", pa.uint64()), ("k", pa.int64()), ("n", pa.int64())])
            keyed = pa.ipc.read_record_batch(part.read(store), schema)
            assert set(lanes[number].table.lookup(keyed.column(0).to_numpy())) == {slot}
            found.update(keyed.column(1).to_pylist())
    assert found == Counter((key * 7 + 1) % 13 for key in range(200))
    assert list(fed_back(task, 2, 0, store)) == []
