"""Modifications one by one: what restarts, names, plans, reverts and retained epochs make of them."""

from __future__ import annotations

from typing import Any

import millstream as ms
from millstream.model.carry import carry, drop, fresh
from millstream.model.change import Change
from millstream.protocol import planner
from millstream.protocol.steering import Outcome
from millstream.testing import Simulated

WORDS = {"words": "word string, n long"}
AT_ONCE = ms.AllAtOnce()


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
