"""Crashes that a test puts into an epoch: `CRASH` among the records, and at the driver's moments (G1, G2, G6)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import millstream as ms
from jobs import EVENTS, Oracle, two_steps
from millstream.engine.driver import MOMENTS
from millstream.errors import UserError
from millstream.model.query import Query
from millstream.protocol.epochs import Abort
from millstream.store.journal import Journal
from millstream.testing import CRASH, FaultyStore, Simulated
from timers import COMMANDS, Obey, Patience, at

ROWS: list[Any] = [("a", 1), ("b", 2), ("a", 3), (None, 4), ("c", 5), ("b", 6)]


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which attempts the journal says were aborted."""
    found: list[str] = []
    append = Journal.append

    def note(self: Journal, entry: Any) -> None:
        if isinstance(entry, Abort):
            found.append(f"{entry.epoch}.{entry.attempt}")
        append(self, entry)

    monkeypatch.setattr(Journal, "append", note)
    return found


@pytest.mark.parametrize("place", range(len(ROWS) + 1))
def test_a_crash_at_any_place_among_the_records_leaves_no_trace(place: int, aborted: list[str]) -> None:
    sim, oracle = Simulated(two_steps(), EVENTS, slots=3, map_tasks=2), Oracle()
    sim.feed(events=ROWS)
    generation = sim.driver.journal.history.generation
    sim.feed(events=[*ROWS[:place], CRASH, *ROWS[place:]])
    sim.feed(events=ROWS[:2])
    for rows in (ROWS, ROWS, ROWS[:2]):
        oracle.feed(rows)
    oracle.check(sim)
    assert aborted == ["1.0"], "the new driver ended the attempt that the old one had planned"
    assert sim.driver.journal.history.generation == generation + 1


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_crash_at_any_moment_leaves_no_trace_and_delivers_the_same_again(moment: str) -> None:
    sim, oracle = Simulated(two_steps(), EVENTS, slots=2), Oracle()
    generation = sim.driver.journal.history.generation
    sim.feed(events=[CRASH.at(moment), *ROWS])
    sim.feed(events=ROWS)
    oracle.feed(ROWS)
    oracle.feed(ROWS)
    oracle.check(sim)
    assert sim.driver.journal.history.generation == generation + 1
    first = [sink for sink, epoch in sim.deliveries if epoch == 0]
    assert first == ["records_out", "batches_out"] * (2 if moment == "delivered" else 1)


def test_records_before_the_crash_have_run_and_are_run_again() -> None:
    seen: list[tuple[str, int]] = []

    class Notes(ms.Computation):
        output = "v long"

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            seen.append((at.input, row.v))
            yield (row.v,)

    query = ms.Query("notes")
    left, right = query.source("left", None), query.source("right", None)
    query.compute("note", Notes, left=left.key_by("k"), right=right.key_by("k")).sink("out", ms.Memory())
    sim = Simulated(query, {"left": "k long, v long", "right": "k long, v long"}, slots=1)
    before = {item.name for item in sim.store.list("")}
    sim.feed(right=[(1, 30), CRASH, (1, 40)], left=[(1, 10), CRASH, (1, 20)])
    assert seen == [
        ("left", 10),  # as far as the first marker
        *[("left", 10), ("left", 20), ("right", 30)],  # a new driver, as far as the second
        *[("left", 10), ("left", 20), ("right", 30), ("right", 40)],
    ]
    assert sim.outputs("out") == [(10,), (20,), (30,), (40,)]
    written = [item.name for item in sim.store.list("") if item.name not in before and "productions" in item.name]
    assert len(written) == 3, "what the dead attempts wrote is there, and is not used"


def test_crashes_of_one_epoch_happen_in_the_order_in_which_it_reaches_them() -> None:
    moments: list[str] = []
    sim = Simulated(two_steps(), EVENTS, observe=lambda moment, epoch: moments.append(moment))
    sim.feed(events=[CRASH.at("committed"), ("a", 1), CRASH, CRASH.at("planned"), ("b", 2)])
    assert moments == [
        *["planned"],
        *["planned"],  # and dies among the records
        *["planned", "executed", "committed"],
        *["delivering", "delivering", "delivered"],
    ]
    assert dict(sim.state("batches")) == {"a": 1, "b": 2}


@pytest.mark.parametrize("crash", [CRASH, *(CRASH.at(moment) for moment in MOMENTS)], ids=repr)
def test_timers_fire_once_when_the_process_dies_as_they_fire(crash: Any) -> None:
    query = ms.Query("timers")
    query.source("commands", None, event_time="ts").key_by("k").compute("obey", Obey).sink("rang", ms.Memory())
    sim = Simulated(query, {"commands": COMMANDS})
    sim.feed(commands=[(1, at(0), "set", "x", 50), (2, at(0), "set", "y", 60)])
    sim.advance_watermark(at(55), crash=crash)
    sim.advance_watermark(at(70))
    assert [row[:2] for row in sim.outputs("rang")] == [(1, "x"), (2, "y")]
    assert dict(sim.state("obey", "fired")) == {1: 1, 2: 1}

    query = ms.Query("silence")
    query.source("pings", None).key_by("k").compute("patience", Patience).sink("out", ms.Memory())
    sim = Simulated(query, {"pings": "k long"})
    sim.feed(pings=[(1,)])
    sim.advance_clock("3 seconds", crash=crash)
    sim.advance_clock("3 seconds")
    assert sim.outputs("out") == [(1,)]


def test_a_crash_that_does_not_happen_is_an_error() -> None:
    sim = Simulated(two_steps(), EVENTS)
    sim.feed(events=ROWS)
    with pytest.raises(UserError, match=r"epoch 0 is finished, and did not reach CRASH, CRASH.at\('executed'\)"):
        sim.feed(epoch=0, events=[*ROWS, CRASH, CRASH.at("executed")])  # a replay runs nothing
    sim.feed(epoch=0, events=[*ROWS, CRASH.at("delivered")])
    sim.feed(events=ROWS)
    assert sim.epoch == 1
    with pytest.raises(UserError, match="CRASH.at\\('later'\\): give one of 'planned', 'executed', 'committed'"):
        CRASH.at("later")


def test_a_failure_of_user_code_is_reported_by_the_attempt_that_counts() -> None:
    class Picky(ms.Computation):
        def on_record(self, row: Any, at: ms.At) -> None:
            if row.amount < 0:
                raise ValueError("negative")

    query = ms.Query("picky")
    query.source("events", None).key_by("user").compute("picky", Picky)
    sim = Simulated(query, EVENTS)
    with pytest.raises(ms.StepError, match="negative"):
        sim.feed(events=[("a", -1), CRASH])
    sim.feed(events=[("a", 1)])
    assert sim.epoch == 0


class Doubling(ms.Computation):
    total = ms.Value("long", default=0)
    output = "user string, total long"

    def __init__(self, times: int) -> None:
        self.times = times

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.total.set(self.total.get() + self.times * row.amount)
        yield at.key, self.total.get()


def doubling(times: int, step: str = "double") -> Query:
    query = ms.Query("doubling")
    query.source("events", None).key_by("user").compute(step, Doubling(times)).sink("out", ms.Memory())
    return query


def test_a_restart_goes_on_with_the_same_state_and_may_bring_other_code() -> None:
    sim = Simulated(doubling(1), EVENTS)
    sim.feed(events=[("a", 1)])
    sim.restart()
    sim.feed(events=[("a", 1)])
    sim.restart(doubling(10), map_tasks=5)
    sim.feed(events=[("a", 1), CRASH])
    assert sim.outputs("out") == [("a", 1), ("a", 2), ("a", 12)]
    with pytest.raises(UserError, match="steps.double: was .*, now missing"):
        sim.restart(doubling(1, "other"))
    sim.feed(events=[("a", 1)])
    assert sim.state("double") == [("a", 22)], "a start that is refused leaves the running one alone"


def test_crashes_and_a_failing_store_go_together() -> None:
    """The store does not answer the driver that follows a crash: the test sees that, and may start another."""
    sim = Simulated(two_steps(), EVENTS)
    sim.feed(events=ROWS)
    faulty = FaultyStore(sim.store)
    sim.store = faulty
    sim.restart()
    faulty.fail_at, before = faulty.operations + 2, sim.driver
    with pytest.raises(ms.StoreUnavailable):
        sim.restart()
    assert sim.driver is before
    sim.restart()
    sim.feed(events=[*ROWS, CRASH])
    oracle = Oracle()
    oracle.feed(ROWS)
    oracle.feed(ROWS)
    oracle.check(sim)


def test_a_source_that_the_query_does_not_have_is_refused() -> None:
    sim = Simulated(two_steps(), EVENTS)
    with pytest.raises(UserError, match="no source 'evnets'; the query has events"):
        sim.feed(evnets=ROWS)
    with pytest.raises(UserError, match="source 'events' has no event time; those that have: none"):
        sim.advance_watermark(at(0), "events")
    with pytest.raises(UserError, match="give the schema of source 'events'"):
        Simulated(two_steps(), {})
