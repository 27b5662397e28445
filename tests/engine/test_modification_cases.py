"""Modifications one by one: what restarts, names, plans, reverts and retained epochs make of them."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import millstream as ms
from millstream.errors import UserError
from millstream.model.carry import carry, convert, drop, fresh
from millstream.model.change import Change
from millstream.protocol import planner
from millstream.protocol.migration import Start
from millstream.protocol.modification import Modification
from millstream.protocol.steering import Outcome
from millstream.store import names
from millstream.store.code import put_code
from millstream.store.control_log import ControlLog
from millstream.testing import CRASH, Simulated

WORDS = {"words": "word string, n long"}
AT_ONCE = ms.AllAtOnce()
DAY = datetime(2026, 1, 1, tzinfo=UTC)


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


class Sum(Count):
    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + row.n)
        yield at.key, self.total.get()


class Most(ms.Computation):
    most = ms.Value("long", default=0)
    output = "word string, total long"
    outputs = {"first": "word string, total long"}  # noqa: RUF012

    def on_record(self, row: Any, at: Any) -> Any:
        if self.most.get() == 0:
            yield ms.to("first", (at.key, row.total))
        self.most.set(max(self.most.get(), row.total))
        yield at.key, self.most.get()


class Least(Most):
    def on_record(self, row: Any, at: Any) -> Any:
        self.most.set(min(self.most.get() or row.total, row.total))
        yield at.key, self.most.get()


def counting(count: type = Count, most: type = Most) -> ms.Query:
    query = ms.Query("words")
    counts = query.source("words", None).key_by("word").compute("count", count)
    counts.key_by("word").compute("most", most).sink("out", ms.Memory())
    return query


def started(**options: Any) -> Simulated:
    sim = Simulated(counting(), WORDS, slots=3, bin_bits=3, **options)
    sim.feed(words=[("a", 1), ("b", 2), ("a", 3)])
    return sim


def applied(sim: Simulated, change: Change, words: Any = ()) -> Outcome:
    """A change that must be committed in the next epoch."""
    number = sim.send(change)
    sim.feed(words=list(words))
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "committed", outcome
    return outcome


def state(sim: Simulated, step: str) -> dict[Any, Any]:
    return dict(sim.state(step))


def last(sim: Simulated, sink: str = "out") -> list[tuple[Any, ...]]:
    return sorted(sim.delivered[sink].get(sim.epoch, []))


# -- restarts --------------------------------------------------------------------------------------------------------


def test_a_step_that_was_inserted_and_then_replaced_is_made_again_from_the_first_query() -> None:
    sim = started()
    change = sim.modify()
    change.insert("twice", Most, after="count", before="most")
    applied(sim, change)
    change = sim.modify()
    change.replace("twice", Least, state=carry())
    applied(sim, change, [("a", 1)])
    sim.restart()
    sim.feed(words=[("a", 1)])
    assert state(sim, "twice") == {"a": 3}
    assert last(sim) == [("a", 3)], "the least of what it saw"


def test_a_step_that_was_renamed_and_then_replaced_is_made_again_from_the_first_query() -> None:
    sim = started()
    change = sim.modify()
    change.rename("count", "tally")
    applied(sim, change)
    change = sim.modify()
    change.replace("tally", Sum, state=carry())
    applied(sim, change)
    sim.restart()
    sim.feed(words=[("a", 10)])
    assert state(sim, "tally") == {"a": 12, "b": 1}


def test_a_step_taken_out_and_another_of_its_name_replaced_is_made_again_from_the_first_query() -> None:
    sim = started()
    change = sim.modify()
    change.replace("count", Sum, state=carry())
    applied(sim, change)
    change = sim.modify()
    change.remove("most", cut=True)
    applied(sim, change)
    change = sim.modify()
    change.insert("most", Least, after="count", key="word")
    applied(sim, change, [("a", 1)])
    change = sim.modify()
    change.replace("most", Most, state=carry())
    applied(sim, change, [("a", 1)])
    for query in (None, counting(Sum), counting(Count)):
        sim.restart(query)
        assert state(sim, "count")["a"] == 4
        sim.feed()
    sim.feed(words=[("a", 10)])
    assert state(sim, "count")["a"] == 14, "the sum, from whichever version the query was"
    assert state(sim, "most")["a"] == 14


def test_code_that_a_restart_mends_counts_even_if_a_modification_has_rewired_the_step() -> None:
    sim = started()
    change = sim.modify()
    change.insert("all", keep=lambda batch: [True] * batch.num_rows, after="words", before="count")
    change.rename("most", "top")
    applied(sim, change)
    sim.restart(counting(Sum, Least))
    sim.feed(words=[("a", 100)])
    assert state(sim, "count")["a"] == 102
    assert state(sim, "top")["a"] == 2, "the least"


def test_a_sink_that_a_modification_has_rewired_is_that_of_the_query_at_a_restart() -> None:
    sim = started()
    change = sim.modify()
    change.remove("most", reconnect=True)
    applied(sim, change)
    mine = counting()
    sim.restart(mine)
    [sink] = sim.graph.sinks
    assert (sink.input, sink.sink is mine.sinks["out"].sink) == ("count", True)


def test_a_modification_before_the_first_epoch() -> None:
    sim = Simulated(counting(), WORDS, slots=3)
    change = sim.modify()
    change.rename("count", "tally")
    applied(sim, change, [("a", 1)])
    sim.restart()
    sim.feed(words=[("a", 1)])
    assert state(sim, "tally") == {"a": 2}


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_step_taken_out_and_put_in_again_by_one_change_begins_empty() -> None:
    sim = started()
    change = sim.modify()
    change.remove("most", cut=True)
    change.insert("most", Most, after="count", key="word")
    change.stream("most").sink("out", ms.Memory())
    outcome = applied(sim, change, [("c", 1)])
    assert state(sim, "most") == {"c": 1}
    sim.restart()
    sim.revert(outcome.number)
    sim.feed(words=[("a", 1)])
    assert state(sim, "most") == {"a": 3}, "what was dropped does not come back"


def test_a_step_takes_the_name_of_one_that_is_taken_out_by_the_same_change() -> None:
    sim = started()
    change = sim.modify()
    change.remove("most", cut=True)
    change.rename("count", "most")
    outcome = applied(sim, change, [("a", 1)])
    assert state(sim, "most") == {"a": 3, "b": 1}
    sim.revert(outcome.number)
    sim.feed(words=[("b", 1)])
    assert state(sim, "count") == {"a": 3, "b": 2}
    assert state(sim, "most") == {"b": 2}
    assert last(sim) == [("b", 2)]


def test_two_steps_swap_their_names_and_back() -> None:
    query = ms.Query("words")
    words = query.source("words", None).key_by("word")
    words.compute("a", Count).sink("counts", ms.Memory())
    words.compute("b", Sum).sink("sums", ms.Memory())
    sim = Simulated(query, WORDS)
    sim.feed(words=[("x", 5)])
    sim.apply(planner.plan_rescale(sim.layout, 3, steps="a", strategy=AT_ONCE))
    sim.feed()
    plan = planner.plan_rescale(sim.layout, 2, steps="a", strategy=AT_ONCE)
    sim.apply(planner.plan_rescale(sim.layout, 3, steps="b", strategy=AT_ONCE))
    sim.feed()
    change = sim.modify()
    change.rename("a", "c")
    change.rename("b", "a")
    change.rename("c", "b")
    outcome = applied(sim, change, [("x", 5)])
    assert (state(sim, "a"), state(sim, "b")) == ({"x": 10}, {"x": 2})
    assert (last(sim, "counts"), last(sim, "sums")) == ([("x", 2)], [("x", 10)])
    number = sim.apply(plan)
    sim.feed()
    refused = sim.outcome(number)
    assert refused is not None
    assert (refused.state, refused.stale) == ("refused", True), "it was made for the other step"
    sim.revert(outcome.number)
    sim.feed(words=[("x", 5)])
    assert (state(sim, "a"), state(sim, "b")) == ({"x": 3}, {"x": 15})
    sim.restart()
    sim.feed(words=[("x", 5)])
    assert (state(sim, "a"), state(sim, "b")) == ({"x": 4}, {"x": 20})


def test_a_step_removed_with_reconnect_leaves_its_input_to_all_who_read_its_outputs_but_not_to_dead_letters() -> None:
    query = ms.Query("words")
    words = query.source("words", None)
    counts = words.key_by("word").compute("count", Count, on_error="dead_letter")
    counts.output("dead_letter").sink("letters", ms.Memory())
    most = counts.key_by("word").compute("most", Most)
    most.union(most.output("first")).key_by("word").compute("least", Least).sink("out", ms.Memory())
    sim = Simulated(query, WORDS)
    sim.feed(words=[("a", 5)])
    change = sim.modify()
    change.remove("most", reconnect=True)
    applied(sim, change, [("a", 5), ("b", 5)])
    assert last(sim) == [("a", 1), ("b", 1)], "once, not once for each output"
    change = sim.modify()
    change.replace("least", Sum, state={"most": drop(), "total": fresh()})
    change.remove("count", reconnect=True)
    applied(sim, change, [("a", 5)])
    assert last(sim) == [("a", 5)]
    assert [sink.name for sink in sim.graph.sinks] == ["out"]


# -- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_for_a_step_that_was_taken_out_does_not_fit_another_one_of_its_name() -> None:
    sim = started()
    for slots in (1, 2, 3):
        sim.apply(planner.plan_rescale(sim.layout, slots, steps="most", strategy=AT_ONCE))
        sim.feed()
    plans = [planner.plan_rescale(sim.layout, 1, steps="most", strategy=AT_ONCE)]
    change = sim.modify()
    change.remove("most", cut=True)
    applied(sim, change)
    number = sim.apply(plans[0])
    sim.feed()
    assert "no step 'most'" in reason(sim, number)
    change = sim.modify()
    change.insert("most", Most, after="count", key="word")
    applied(sim, change)
    for slots in (1, 2, 3, 4):
        number = sim.apply(plans[0])
        sim.feed()
        assert "was made for routing version 3 of step 'most'" in reason(sim, number)
        sim.apply(planner.plan_rescale(sim.layout, slots, steps="most", strategy=AT_ONCE))
        sim.feed()


def test_steps_that_take_the_place_of_all_others_lie_where_those_did() -> None:
    query = ms.Query("words")
    query.source("words", None).key_by("word").compute("count", Count).sink("out", ms.Memory())
    sim = Simulated(query, WORDS, slots=2)
    sim.feed(words=[("a", 1)])
    sim.apply(planner.plan_rescale(sim.layout, 5, strategy=AT_ONCE))
    sim.feed()
    change = sim.modify()
    change.remove("count", cut=True)
    change.insert("sum", Sum, after="words", key="word")
    applied(sim, change, [("a", 7)])
    assert state(sim, "sum") == {"a": 7}
    assert len(set(sim.driver.tables["sum"].slots)) == 5


def reason(sim: Simulated, number: int) -> str:
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "refused", outcome
    return outcome.reason


def test_a_step_that_a_change_inserts_and_replaces_at_once_is_the_second() -> None:
    sim = started()
    change = sim.modify()
    change.insert("twice", Most, after="count", before="most")
    change.replace("twice", Least)
    outcome = applied(sim, change, [("a", 1), ("a", 1)])
    assert state(sim, "twice") == {"a": 3}
    sim.revert(outcome.number)
    sim.feed(words=[("a", 1)])
    assert [step.name for step in sim.graph.steps] == ["count", "most"]


# -- migrations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["rename", "remove", "again"])
def test_a_modification_waits_for_a_migration_of_a_step_that_it_renames_or_takes_out(verb: str) -> None:
    sim = started()
    moving = sim.apply(planner.plan_rescale(sim.layout, 1, steps="most", strategy=ms.Fluid()))
    change = sim.modify()
    if verb == "rename":
        change.rename("most", "top")
    else:
        change.remove("most", cut=True)
    if verb == "again":
        change.insert("most", Most, after="count", key="word")
    number = sim.send(change)
    for _ in range(40):
        sim.feed(words=[("a", 1)])
        moved, outcome = sim.outcome(moving), sim.outcome(number)
        assert moved is not None
        assert outcome is not None
        if moved.state == "running":
            assert outcome.state == "prepared"
        if outcome.over:
            break
    assert (moved.state, outcome.state) == ("done", "committed")
    assert moved.rounds > 3
    assert outcome.began >= moved.last
    assert state(sim, "count")["a"] == 2 + sim.epoch


def test_a_modification_does_not_wait_for_a_migration_of_another_step_nor_that_for_it() -> None:
    sim = started()
    moving = sim.apply(planner.plan_rescale(sim.layout, 1, steps="most", strategy=ms.Fluid()))
    sim.feed()
    change = sim.modify()
    change.rename("count", "tally")
    change.replace("most", Least, state=carry())  # its ranges go on moving, under the new code
    applied(sim, change, [("a", 1)])
    moved = sim.outcome(moving)
    assert moved is not None
    assert moved.state == "running"
    for _ in range(20):
        sim.feed(words=[("a", 1)])
    moved = sim.outcome(moving)
    assert moved is not None
    assert moved.state == "done"
    assert state(sim, "tally") == {"a": 23, "b": 1}
    assert state(sim, "most") == {"a": 2, "b": 1}
    assert len(set(sim.driver.tables["most"].slots)) == 1


def test_a_plan_that_waits_for_its_start_is_refused_if_its_step_is_another_one_by_then() -> None:
    sim = started()
    later = Start(epoch=sim.epoch + 3)
    plans = [planner.plan_rescale(sim.layout, 1, steps=step, strategy=AT_ONCE, at=later) for step in ("most", "count")]
    numbers = [sim.apply(plan) for plan in plans]
    change = sim.modify()
    change.rename("count", "tally")
    change.remove("most", cut=True)
    change.insert("most", Most, after="tally", key="word")
    applied(sim, change, [("a", 1)])
    for _ in range(3):
        sim.feed()
    assert "was made for routing version 0 of step 'most'" in reason(sim, numbers[0])
    assert "no step 'count'" in reason(sim, numbers[1])


# -- starts and reverts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["epoch", "clock", "event time"])
def test_a_modification_starts_when_it_is_told_to(kind: str) -> None:
    query = ms.Query("timed")
    query.source("words", None, event_time="ts").key_by("word").compute("count", Count).sink("out", ms.Memory())
    sim = Simulated(query, {"words": "word string, n long, ts timestamp"}, slots=2)
    sim.feed(words=[("a", 5, DAY)])
    starts = {
        "epoch": Start(epoch=3),
        "clock": Start(clock_ms=int((sim.now + timedelta(seconds=20)).timestamp() * 1000)),
        "event time": Start(event_time=int((DAY + timedelta(seconds=20)).timestamp() * 10**6)),
    }
    change = sim.modify()
    change.replace("count", Sum, state=carry())
    history = sim.driver.journal.history
    code = put_code(sim.store, sim._workshop.pack(change.rewrite))
    ask = Modification(sim.driver.journal.store_id, history.version, code, "later", starts[kind])
    number = ControlLog(sim.store).send("modify", ask, history.control)
    for epoch in (1, 2, 3, 4):
        sim.now += timedelta(seconds=10)
        sim.feed(words=[("a", 5, DAY + timedelta(seconds=10 * epoch))])
    outcome = sim.outcome(number)
    assert outcome is not None
    # A watermark is known after its epoch.
    assert (outcome.state, outcome.began) == ("committed", 3 if kind != "clock" else 2)
    assert dict(sim.state("count")) == {"a": outcome.began + 5 * (5 - outcome.began)}


def test_reverts_that_others_stand_in_the_way_of() -> None:
    sim = started()
    change = sim.modify()
    change.insert("twice", Most, after="count", before="most")
    inserted = applied(sim, change).number
    change = sim.modify()
    change.insert("branch", Most, after="twice", key="word")
    branched = applied(sim, change, [("a", 1)]).number
    number = sim.revert(inserted)
    sim.feed(words=[("a", 1)])
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "aborted"
    assert "twice" in outcome.reason
    assert {"twice", "branch"} <= {step.name for step in sim.graph.steps}
    sim.revert(branched)
    sim.feed()
    sim.revert(inserted)
    sim.feed(words=[("a", 1)])
    assert [step.name for step in sim.graph.steps] == ["count", "most"]
    assert state(sim, "count")["a"] == 5
    with pytest.raises(UserError, match="has changed 'most' since; revert that first"):
        sim.revert(inserted)


def test_undoing_the_undoing_brings_back_the_graph_and_not_what_was_dropped() -> None:
    sim = started()
    change = sim.modify()
    change.remove("most", reconnect=True)
    removed = applied(sim, change, [("a", 1)]).number
    assert last(sim) == [("a", 3)]
    back = sim.revert(removed)
    sim.feed(words=[("b", 1)])
    assert state(sim, "most") == {"b": 2}
    sim.revert(back)
    sim.restart()
    sim.feed(words=[("b", 1)])
    assert [step.name for step in sim.graph.steps] == ["count"]
    assert last(sim) == [("b", 3)]


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_segments_of_what_was_dropped_go_after_their_retention_and_code_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.store.journal.SNAPSHOT_EVERY", 2)
    sim = started(retain=2)
    code = {item.name for item in sim.store.list(names.CODE)}
    change = sim.modify()
    change.remove("most", cut=True)
    change.rename("count", "tally")
    applied(sim, change, [("a", 1)])
    code = {item.name for item in sim.store.list(names.CODE)} - code
    assert code

    def segments(step: str) -> set[str]:
        sim.driver.upkeep.collect(sim.driver.journal)
        return {item.name for item in sim.store.list(names.SEGMENTS) if f"/{step}/" in item.name}

    assert segments("most"), "an epoch that is retained has it"
    for _ in range(4):
        sim.feed(words=[("a", 1)])
    assert not segments("most")
    assert {item.name for item in sim.store.list(names.CODE)} >= code
    assert state(sim, "tally") == {"a": 7, "b": 1}, "what has another name is another matter"
    assert len(sim.driver.journal.history.modified) == 1
    sim.restart()
    assert len(sim.driver.journal.history.modified) == 1
    sim.feed(words=[("a", 1)])
    assert state(sim, "tally") == {"a": 8, "b": 1}


def test_epochs_before_a_modification_are_read_where_the_step_was_the_same_and_refused_where_it_was_not() -> None:
    class Text(ms.Computation):
        total = ms.Value("string", default="")
        output = "word string, total long"

        def on_record(self, row: Any, at: Any) -> Any:
            self.total.set(self.total.get() + "x")
            yield at.key, len(self.total.get())

    sim = started(retain=6)
    change = sim.modify()
    change.replace("count", Text, state={"total": fresh()})
    applied(sim, change, [("a", 1)])
    assert state(sim, "count") == {"a": "x"}
    assert dict(sim.state("most", epoch=0)) == {"a": 2, "b": 1}
    with pytest.raises(UserError, match="step 'count' was another one at epoch 0"):
        sim.state("count", epoch=0)
    assert dict(sim.state("count", epoch=1)) == {"a": "x"}


# -- time, holds and feedback ----------------------------------------------------------------------------------------

COMMANDS = "k long, ts timestamp, until long"


def at(seconds: float) -> datetime:
    return DAY + timedelta(seconds=seconds)


class Holding(ms.Computation):
    kept = ms.Hold()
    seen = ms.Value("long", default=0)
    output = "k long, ts timestamp, until long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        if row.until is None:
            self.kept.release()
        else:
            self.kept.set(DAY + timedelta(seconds=row.until))
        yield tuple(row)


class Careless(ms.Computation):
    """As `Holding`, and holds nothing."""

    seen = ms.Value("long", default=0)
    output = "k long, ts timestamp, until long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        yield tuple(row)


class Alarm(ms.Computation):
    ring = ms.Timer(ms.EVENT_TIME)
    output = "k long, ts timestamp"

    def on_record(self, row: Any, at: Any) -> None:
        self.ring.set(timedelta(seconds=10))

    @ring.fires
    def rang(self, at: Any) -> Any:
        yield at.key, at.time


def holding() -> Simulated:
    query = ms.Query("holds")
    held = query.source("commands", None, event_time="ts").key_by("k").compute("hold", Holding)
    held.key_by("k").compute("alarm", Alarm).sink("out", ms.Memory())
    sim = Simulated(query, {"commands": COMMANDS}, slots=3)
    sim.feed(commands=[(1, at(50), 30), (2, at(50), 70), (3, at(60), None)])
    assert (sim.watermark("hold"), sim.watermark("alarm")) == (at(60), at(30))
    return sim


def test_a_step_that_holds_goes_on_holding_under_another_name_and_after_it_is_replaced() -> None:
    class Other(Holding):
        pass

    sim = holding()
    change = sim.modify()
    change.rename("hold", "keep")
    number = sim.send(change)
    sim.feed(commands=[(3, at(100), None)])
    committed(sim, number)
    assert (sim.watermark("keep"), sim.watermark("alarm")) == (at(100), at(30))
    change = sim.modify()
    change.replace("keep", Other, state=carry())
    number = sim.send(change)
    sim.feed(commands=[(1, at(100), None)])
    committed(sim, number)
    assert sim.watermark("alarm") == at(70), "the other hold"
    sim.restart()
    assert dict(sim.state("keep")) == {1: 2, 2: 1, 3: 2}
    change = sim.modify()
    change.replace("keep", Careless, state={"seen": carry(), "kept": drop()})
    number = sim.send(change)
    sim.feed()
    committed(sim, number)
    assert sim.watermark("alarm") == at(100), "nobody holds it"
    change = sim.modify()
    change.replace("keep", Holding, state={"seen": carry(), "kept": fresh()})
    number = sim.send(change)
    sim.feed(commands=[(1, at(120), 110), (2, at(120), 20)])
    committed(sim, number)
    assert sim.watermark("keep") == at(120)
    assert sim.watermark("alarm") == at(100), "it was there already, and does not go back"
    assert dict(sim.state("keep")) == {1: 3, 2: 2, 3: 2}


def test_watermarks_do_not_go_back_when_steps_come_and_go_in_front() -> None:
    sim = holding()
    marks = [sim.watermark("alarm")]

    def changed(edit: Any, commands: Any) -> None:
        change = sim.modify()
        edit(change)
        number = sim.send(change)
        sim.feed(commands=commands)
        committed(sim, number)
        marks.append(sim.watermark("alarm"))

    changed(lambda change: change.insert("more", Holding, after="hold", before="alarm"), [(4, at(61), 10)])
    changed(lambda change: change.remove("hold", reconnect=True), [(4, at(200), None)])
    changed(lambda change: change.insert("late", Holding, after="more", before="alarm"), [(4, at(201), 150)])
    changed(lambda change: change.remove("more", reconnect=True), [(5, at(202), None)])
    changed(lambda change: change.remove("late", reconnect=True), [(5, at(90), None)])
    assert marks == sorted(marks)  # type: ignore[type-var]
    assert marks[-1] == at(202)
    assert sim.late("alarm") == 1
    change = sim.modify()
    change.rename("alarm", "bell")
    number = sim.send(change)
    sim.feed(commands=[(5, at(90), None)])
    committed(sim, number)
    assert sim.late("bell") == 2, "counted on"
    sim.advance_watermark(at(300))
    assert sorted(sim.delivered["out"][sim.epoch]) == [(4, at(211)), (5, at(212))]


class Countdown(ms.Computation):
    seen = ms.Value("long", default=0)
    output = "k long, n long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.seen.set(self.seen.get() + 1)
        if row.n > 0:
            yield (row.k * 7 + 1) % 13, row.n - 1


def test_what_is_on_its_way_through_a_feedback_arrives_whatever_becomes_of_the_steps() -> None:
    class Faster(Countdown):
        def on_record(self, row: Any, at: Any) -> Any:
            self.seen.set(self.seen.get() + 100)
            if row.n > 1:
                yield (row.k * 7 + 1) % 13, row.n - 2

    query = ms.Query("loop")
    again = query.feedback("again", schema="k long, n long")
    counted = query.source("start", None).union(again).key_by("k").compute("count", Countdown)
    counted.feed_back(again).sink("out", ms.Memory())
    sim = Simulated(query, {"start": "k long, n long"}, slots=3)
    seen: Counter[int] = Counter()
    sim.feed(start=[(0, 9)])
    pending, seen[0] = (1, 8), 1
    edits = [
        ("count", lambda change: change.rename("count", "tick"), 1, 1),
        ("tick", lambda change: change.replace("tick", Faster, state=carry()), 100, 2),
        ("tick", lambda change: change.insert("f", keep=everything, after="tick", before=["again", "out"]), 100, 2),
        ("tick", lambda change: change.rename("tick", "tock"), 100, 2),
    ]
    for _, edit, counts, less in edits:
        change = sim.modify()
        edit(change)  # type: ignore[no-untyped-call]
        number = sim.send(change)
        sim.feed(start=[CRASH.at("executed")])
        committed(sim, number)
        seen[pending[0]] += counts
        pending = ((pending[0] * 7 + 1) % 13, pending[1] - less)
        assert sim.delivered["out"][sim.epoch] == [pending]
    assert dict(sim.state("tock")) == seen
    change = sim.modify()
    with pytest.raises(UserError, match="'again' would be left without an input"):
        change.remove("f", cut=True)


def everything(batch: Any) -> list[bool]:
    return [True] * int(batch.num_rows)


def committed(sim: Simulated, number: int) -> None:
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "committed", outcome


def test_what_is_refused_has_changed_nothing_and_the_change_goes_on() -> None:
    sim = started()
    change = sim.modify()
    change.insert("all", keep=everything, after="words", before="count")
    before = repr(change.query)
    for refused in (
        lambda: change.remove("all", cut=True),
        lambda: change.insert("more", Most, after="count", before="most", key=7),  # type: ignore[arg-type]
        lambda: change.insert("more", Most, after=7),  # type: ignore[arg-type]
        lambda: change.rename("count", "most"),
        lambda: change.replace("count", "no", state=carry()),  # type: ignore[arg-type]
    ):
        with pytest.raises(UserError):
            refused()
        assert repr(change.query) == before
    applied(sim, change, [("a", 1)])
    assert state(sim, "count") == {"a": 3, "b": 1}


def test_a_conversion_that_fails_in_the_first_epoch_is_rolled_back_and_later_only_what_is_read_counts() -> None:
    def no_twos(total: int) -> int:
        if total == 2:
            raise ValueError("no twos")
        return total * 10

    sim = started()
    change = sim.modify()
    change.replace("count", Sum, state={"total": convert(no_twos)})
    number = sim.send(change, rehearse=False)
    sim.feed(words=[("a", 1), ("b", 1)])
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "rolled back"
    assert "no twos" in outcome.reason
    assert state(sim, "count") == {"a": 3, "b": 2}, "by the old code"
    sim.restart()
    sim.feed(words=[("a", 1)])
    assert state(sim, "count") == {"a": 4, "b": 2}
