"""Modifications in the simulator: steps are inserted, replaced, removed and renamed between two epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import millstream as ms
from millstream.errors import UserError
from millstream.model.carry import carry, convert, drop, fresh
from millstream.protocol.conditions import Condition, metric
from millstream.protocol.manifest import Family
from millstream.protocol.migration import Start
from millstream.protocol.modification import undoing
from millstream.protocol.planner import plan_rescale
from millstream.testing import Simulated

WORDS = {"words": "word string, n long"}


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


class Sum(ms.Computation):
    """What `Count` stores, counted otherwise."""

    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + row.n)
        yield at.key, self.total.get()


class Most(ms.Computation):
    most = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.most.set(max(self.most.get(), row.total))
        yield at.key, self.most.get()


class Fails(Sum):
    def on_record(self, row: Any, at: Any) -> Any:
        if row.n > 5:
            raise ValueError("too much")
        yield from super().on_record(row, at)


def counting() -> ms.Query:
    query = ms.Query("words")
    counts = query.source("words", None).key_by("word").compute("count", Count)
    counts.key_by("word").compute("most", Most).sink("out", ms.Memory())
    return query


def started(**options: Any) -> Simulated:
    sim = Simulated(counting(), WORDS, slots=3, **options)
    sim.feed(words=[("a", 1), ("b", 2), ("a", 3)])
    return sim


def last(sim: Simulated, sink: str = "out") -> list[tuple[Any, ...]]:
    return sorted(sim.delivered[sink].get(sim.epoch, []))


def test_a_step_is_replaced_and_keeps_its_state() -> None:
    sim = started()
    change = sim.modify()
    change.replace("count", Sum, state={"total": carry()})
    number = sim.send(change)
    sim.feed(words=[("a", 10), ("c", 5)])
    outcome = sim.outcome(number)
    assert outcome is not None
    assert (outcome.state, outcome.began) == ("committed", 1)
    assert sorted(sim.state("count")) == [("a", 12), ("b", 1), ("c", 5)]
    assert last(sim) == [("a", 12), ("c", 5)]


def test_what_was_replaced_stays_replaced_after_a_restart_with_the_old_code() -> None:
    sim = started()
    change = sim.modify()
    change.replace("count", Sum, state=carry())
    sim.send(change)
    sim.feed(words=[("a", 10)])
    sim.restart()
    sim.feed(words=[("a", 10)])
    assert sorted(sim.state("count")) == [("a", 22), ("b", 1)]
    other = counting()
    mine = ms.Query("words")
    counts = mine.source("words", None).key_by("word").compute("count", Fails)
    counts.key_by("word").compute("most", Most).sink("out", ms.Memory())
    sim.restart(mine)  # code of the user's own, and neither the old nor the new: theirs it is
    with pytest.raises(ms.StepError, match="too much"):
        sim.feed(words=[("a", 10)])
    sim.restart(other)
    sim.feed(words=[("a", 10)])
    assert sorted(sim.state("count")) == [("a", 32), ("b", 1)]


def test_a_modification_that_fails_in_its_first_epoch_is_rolled_back_whole() -> None:
    sim = started()
    change = sim.modify()
    change.replace("count", Fails, state={"total": carry()})
    change.insert("again", Most, after="most", key="word")
    number = sim.send(change)
    sim.feed(words=[("a", 10), ("c", 5)])
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "rolled back"
    assert "too much" in outcome.reason
    assert sorted(sim.state("count")) == [("a", 3), ("b", 1), ("c", 1)], "counted by the old code, once"
    assert [step.name for step in sim.graph.steps] == ["count", "most"]
    assert sim.driver.journal.history.version == 0
    sim.restart()
    sim.feed(words=[("a", 10)])
    assert ("a", 4) in sim.state("count")


def test_a_step_is_inserted_between_two_and_removed_again() -> None:
    sim = started()
    change = sim.modify()
    change.insert("large", keep=lambda batch: [n > 2 for n in batch["n"].to_pylist()], after="words", before="count")
    change.insert("twice", Most, after="count", before="most")
    change.stream("twice").sink("seen", ms.Memory())
    sim.send(change)
    sim.feed(words=[("a", 1), ("a", 3), ("d", 4)])
    assert sorted(sim.state("count")) == [("a", 3), ("b", 1), ("d", 1)]
    assert last(sim, "seen") == [("a", 3), ("d", 1)]
    assert last(sim) == [("a", 3), ("d", 1)]
    assert sorted(sim.state("twice")) == [("a", 3), ("d", 1)]
    change = sim.modify()
    change.remove("twice", reconnect=True)
    change.remove("large", reconnect=True)
    change.remove("seen")
    sim.send(change)
    sim.feed(words=[("a", 1)])
    assert sorted(sim.state("count")) == [("a", 4), ("b", 1), ("d", 1)]
    assert last(sim) == [("a", 4)]
    history = sim.driver.journal.history
    assert {family.step for family in history.manifest.families} == {"count", "most"}
    assert set(history.tables) == {"count", "most"}


def test_a_renamed_step_takes_its_state_along() -> None:
    sim = started()
    change = sim.modify()
    change.rename("count", "tally")
    sim.send(change)
    sim.feed(words=[("a", 1)])
    assert sorted(sim.state("tally")) == [("a", 3), ("b", 1)]
    assert last(sim) == [("a", 3)]
    sim.restart()
    sim.feed(words=[("a", 1)])
    assert sorted(sim.state("tally")) == [("a", 4), ("b", 1)]


class Average(ms.Computation):
    """What `Count` stores, as a double, and something of its own."""

    total = ms.Value("double", default=0.0)
    seen = ms.Value("boolean", default=False)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + 0.5)
        self.seen.set(True)
        yield at.key, int(self.total.get() * 10)


def test_values_are_converted_as_they_are_read_and_in_the_background() -> None:
    sim = started()
    change = sim.modify()
    change.replace("count", Average, state={"total": carry(float), "seen": fresh()})
    sim.send(change)
    sim.feed(words=[("a", 1)])
    assert sorted(sim.state("count", "total")) == [("a", 2.5), ("b", 1.0)]
    assert last(sim) == [("a", 25)]
    change = sim.modify()
    change.replace("count", Count, state={"total": convert(lambda old: int(old * 100)), "seen": drop()})
    sim.send(change)
    sim.feed(words=[("a", 1), ("c", 1)])
    assert sorted(sim.state("count")) == [("a", 251), ("b", 100), ("c", 1)]
    for _ in range(3):
        sim.restart()  # the query as it was at first: all of it is applied again
        sim.feed(words=[("c", 1)])
    assert sorted(sim.state("count")) == [("a", 251), ("b", 100), ("c", 4)]
    manifest = sim.driver.journal.history.manifest
    for _ in range(20):
        sim.feed(words=[("d", 1)])
        manifest = sim.driver.journal.history.manifest
    assert manifest.bytes_below(Family("count", "total"), 2) == 0, "all has been rewritten by now"
    assert sorted(sim.state("count")) == [("a", 251), ("b", 100), ("c", 4), ("d", 20)]


def test_a_modification_is_undone() -> None:
    sim = started()
    numbers = []
    for step in (Sum, Fails):
        change = sim.modify()
        change.replace("count", step, state=carry())
        numbers.append(sim.send(change))
        sim.feed(words=[("a", 1)])
    change = sim.modify()
    change.insert("twice", Most, after="count", before="most")
    numbers.append(sim.send(change))
    sim.feed(words=[("a", 5)])
    assert sorted(sim.state("count")) == [("a", 9), ("b", 1)]
    modified = sim.driver.journal.history.modified
    assert "has changed 'count' since; revert that first" in undoing(modified, numbers[0])[1]
    assert undoing(modified, 99)[1] == "command 99 is no modification that was committed; those are 0, 1, 2"
    sim.revert(numbers[1])
    sim.feed(words=[("a", 10)])
    assert sorted(sim.state("count")) == [("a", 19), ("b", 1)], "the sum again, which does not fail"
    assert "twice" in [step.name for step in sim.graph.steps]
    sim.revert(numbers[2])
    sim.feed(words=[("a", 10)])
    assert [step.name for step in sim.graph.steps] == ["count", "most"]
    assert last(sim) == [("a", 29)]


def test_a_change_waits_for_a_condition_on_the_numbers_of_the_query() -> None:
    sim = started()
    change = sim.modify()
    change.replace("count", Sum, state=carry())
    number = sim.send(change, at=Start(condition=metric("records") >= 8))
    sim.apply(replace(plan_rescale(sim.layout, 5), start=Start(condition=metric("lag_s") < 1e9)))
    for words in ([("a", 1)], [("a", 1)] * 4, [("a", 10)]):
        before = sim.outcome(number)
        assert before is None or before.state == "prepared"
        sim.feed(words=words)
    outcome = sim.outcome(number)
    assert outcome is not None
    assert (outcome.state, outcome.began) == ("committed", 3), "after the epoch of 4 words, which two steps read"
    assert sorted(sim.state("count")) == [("a", 17), ("b", 1)]
    assert len(set(sim.layout.tables["count"].slots)) == 3, "nothing here has a watermark, so nothing is known of lag"
    refused = sim.send(sim.modify(), at=Start(condition=Condition("mood", ">", 1)))
    sim.feed()
    told = sim.outcome(refused)
    assert told is not None
    assert (told.state, told.reason[:23]) == ("refused", "there is no number 'moo")
    for wrong in (lambda: metric("mood"), lambda: metric("records") > "a", lambda: metric("records") > float("nan")):
        with pytest.raises(UserError):
            wrong()


def test_every_state_must_have_its_rule() -> None:
    sim = started()
    change = sim.modify()
    change.replace("count", Most)
    with pytest.raises(UserError, match=r"nothing is said of most, total\."):
        refused(sim, change)
    change.replace("count", Most, state={"most": fresh(), "total": drop()})


def refused(sim: Simulated, change: Any) -> None:
    """Sends a change that is aborted, and raises why."""
    number = sim.send(change)
    before = sorted(sim.state("count"))
    sim.feed(words=[])
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "aborted"
    assert sorted(sim.state("count")) == before
    raise UserError(outcome.reason)
