"""Sources that come and go while the query runs: a new one is read from the epoch on in which its change takes effect,
and whatever happens on the way, nothing of the others is lost or counted twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import millstream as ms
from millstream.engine.driver import MOMENTS
from millstream.errors import UserError
from millstream.model.change import Change
from millstream.protocol.conditions import metric
from millstream.protocol.migration import Start
from millstream.protocol.modification import Applied, called
from millstream.protocol.planner import plan_rescale
from millstream.protocol.strategies import Fluid
from millstream.testing import CRASH, Simulated

SCHEMAS = {"words": "word string", "more": "word string", "other": "word string, at timestamp"}


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


class Fails(Count):
    def on_record(self, row: Any, at: Any) -> Any:
        raise ValueError("never")


def counting() -> ms.Query:
    query = ms.Query("words")
    query.source("words", None).key_by("word").compute("count", Count).sink("out", ms.Memory())
    return query


def with_more(change: Change) -> Change:
    """A second source, which the same step reads."""
    change.source("more", None)
    change.insert("both", map=lambda batch: batch, output="word string", after=["words", "more"], before="count")
    return change


def counts(sim: Simulated, step: str = "count") -> Counter[str]:
    return Counter(dict(sim.state(step)))


def test_a_source_comes_and_is_read_from_the_first_epoch_of_its_change_on() -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",), ("b",)])
    number = sim.send(with_more(sim.modify()))
    sim.feed(words=[("a",)])
    known = sim.outcome(number)
    assert known is not None
    assert known.state == "prepared", "everything is ready but the stream, which has one source"
    sim.feed(words=[("a",)], more=[("c",), ("a",)])
    known = sim.outcome(number)
    assert known is not None
    assert (known.state, known.began) == ("committed", 2)
    assert counts(sim) == {"a": 4, "b": 1, "c": 1}
    assert called(sim.driver.journal.history.modified, [source.name for source in sim.graph.sources]) == {
        "words": "words",
        "more": "more__2",
    }


def test_a_source_comes_with_a_branch_of_its_own_and_goes_again() -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    change = sim.modify()
    change.source("more", None).key_by("word").compute("seen", Count).sink("seen_out", ms.Memory())
    sim.send(change)
    sim.feed()
    sim.feed(more=[("x",)], words=[("a",)])
    assert counts(sim, "seen") == {"x": 1}
    change = sim.modify()
    change.remove("seen", cut=True)
    change.remove("more")
    sim.send(change)
    sim.feed(words=[("a",)])
    assert [source.name for source in sim.graph.sources] == ["words"]
    assert counts(sim) == {"a": 3}
    with pytest.raises(UserError, match="no source 'more'"):
        sim.feed(more=[("x",)])
    sim.send(with_more(sim.modify()))
    sim.feed()
    sim.feed(more=[("y",)])
    assert counts(sim) == {"a": 3, "y": 1}
    assert called(sim.driver.journal.history.modified, ["more"]) == {"more": "more__5"}, "another than the first one"


def test_a_source_that_went_has_left_no_time_behind() -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    change = sim.modify()
    stream = change.source("other", None, event_time="at", lateness="1 second")
    stream.key_by("word").compute("timed", Count)
    sim.send(change)
    sim.feed()
    sim.feed(other=[("a", sim.now)])
    assert sim.watermark("other") is not None
    change = sim.modify()
    change.remove("timed")
    change.remove("other")
    sim.send(change)
    sim.feed()
    assert sim.driver.journal.history.clocks == {}
    assert sim.driver.journal.history.samples.keys() == {"words"}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_driver_that_dies_in_the_first_epoch_loses_nothing_of_the_others(moment: str) -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    number = sim.send(with_more(sim.modify()))
    sim.feed(words=[("a",)])
    sim.offer({"words": [("b",)]}, crash=CRASH.at(moment))
    for _ in range(4):
        sim.feed(words=[("c",)])
    known = sim.outcome(number)
    assert known is not None
    assert known.state == "committed"
    assert counts(sim) == {"a": 2, "b": 1, "c": 4}
    applied = sim.driver.journal.history.modified[-1]
    assert applied.sources == {"more": f"more__{applied.epoch}"}, "under a name that no lost epoch has used"
    sim.feed(more=[("d",)])
    assert counts(sim)["d"] == 1


def test_a_change_that_is_rolled_back_leaves_the_stream_as_it_was() -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    change = sim.modify()
    change.source("more", None).key_by("word").compute("seen", Fails)
    number = sim.send(change)
    sim.feed(words=[("a",)])
    sim.feed(words=[("a",)], more=[("x",)])
    known = sim.outcome(number)
    assert known is not None
    assert known.state == "rolled back"
    assert "never" in known.reason
    assert list(sim.driver.reads()) == ["words"]
    assert counts(sim) == {"a": 3}


def test_sources_are_not_asked_for_before_the_change_may_begin() -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    number = sim.send(with_more(sim.modify()), at=Start(condition=metric("records") > 2))
    for _ in range(3):
        sim.feed(words=[("a",)])
        assert list(sim.driver.reads()) == ["words"]
    sim.feed(words=[("a",)] * 3)
    sim.feed(words=[("a",)] * 3)
    assert list(sim.driver.reads()) == ["words", "more"]
    sim.feed(more=[("b",)])
    known = sim.outcome(number)
    assert known is not None
    assert known.state == "committed"
    assert counts(sim) == {"a": 10, "b": 1}


def test_a_condition_need_not_hold_again_when_the_stream_is_there() -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    number = sim.send(with_more(sim.modify()), at=Start(condition=metric("records") > 2))
    sim.feed(words=[("a",)] * 3)
    sim.feed(words=[("a",)])
    assert list(sim.driver.reads()) == ["words", "more"]
    sim.feed(words=[("a",)], more=[("b",)])
    known = sim.outcome(number)
    assert known is not None
    assert known.state == "committed"
    assert counts(sim) == {"a": 6, "b": 1}


def test_sources_that_were_opened_for_nothing_are_opened_anew() -> None:
    """When the stream is there, a migration moves the step that the change would take out."""
    sim = Simulated(counting(), SCHEMAS, bin_bits=2)
    sim.feed(words=[("a",)])
    change = sim.modify()
    change.source("more", None).key_by("word").compute("seen", Count)
    change.remove("count", cut=True)
    number = sim.send(change)
    sim.feed(words=[("a",)])
    first = sim.driver.reads()["more"][1]
    sim.apply(plan_rescale(sim.layout, 4, strategy=Fluid()))
    sim.feed(words=[("a",)], more=[("lost",)])
    assert list(sim.driver.reads()) == ["words"], "what was read of it is spent"
    sim.feed(words=[("a",)])
    known = sim.outcome(number)
    assert known is not None
    assert known.state == "prepared"
    while "more" not in sim.driver.reads():
        sim.feed(words=[("a",)])
    assert sim.driver.reads()["more"][1] != first
    sim.feed(more=[("lost",), ("b",)])
    assert counts(sim, "seen") == {"lost": 1, "b": 1}, "from its beginning"


def test_a_restart_with_either_query_goes_on_with_the_same_source() -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    sim.send(with_more(sim.modify()))
    sim.feed()
    sim.feed(more=[("b",)])
    names = {name: known for name, (_, known) in sim.driver.reads().items()}
    assert names == {"words": "words", "more": "more__2"}
    for query in (counting(), with_more(Change(counting())).query):
        sim.restart(query)
        assert {name: known for name, (_, known) in sim.driver.reads().items()} == names
        sim.feed(more=[("b",)])
    assert counts(sim) == {"a": 1, "b": 3}


def test_what_brought_a_source_can_be_undone_and_what_took_one_out_cannot() -> None:
    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    brought = sim.send(with_more(sim.modify()))
    sim.feed()
    sim.feed(more=[("b",)])
    sim.revert(brought)
    sim.feed(words=[("a",)])
    assert list(sim.driver.reads()) == ["words"]
    assert counts(sim) == {"a": 2, "b": 1}
    change = sim.modify()
    change.source("more", None).key_by("word").compute("seen", Count)
    sim.send(change)
    sim.feed()
    sim.feed()
    change = sim.modify()
    change.remove("seen")
    change.remove("more")
    taken = sim.send(change)
    sim.feed()
    with pytest.raises(UserError, match="a source was taken out"):
        sim.revert(taken)


def test_names_of_sources_follow_the_last_change() -> None:
    one = Applied(0, "", 1, "", "", sources={"more": "more__1"})
    gone = Applied(1, "", 2, "", "", sources={"more": None})
    again = Applied(2, "", 3, "", "", sources={"more": "more__3"})
    assert called([one, gone, again], ["more", "words"]) == {"more": "more__3", "words": "words"}


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda change: change.source("words", None), "already has a source of that name"),
        (lambda change: change.source("more", 7), "a function of a reader"),
        (lambda change: change.remove("words"), "read by count; say reconnect"),
        (lambda change: change.remove("words", reconnect=True), "say cut=True"),
        (lambda change: change.remove("words", cut=True), "'count' would be left without an input"),
        (lambda change: change.remove("nothing"), "no step, map, sink or source"),
    ],
)
def test_bad_changes_of_sources_say_what_is_wrong(ask: Any, message: str) -> None:
    change = Change(counting())
    with pytest.raises(UserError, match=message):
        ask(change)
    assert change.rewrite.empty


def test_a_source_cannot_come_under_the_name_of_one_that_goes_in_the_same_change() -> None:
    query = counting()
    query.source("more", None).key_by("word").compute("seen", Count)
    change = Change(query)
    change.remove("seen")
    change.remove("more")
    with pytest.raises(UserError, match="give the new one another name"):
        change.source("more", None)


def test_a_watermark_function_that_fails_in_the_first_epoch_rolls_the_change_back() -> None:
    def broken() -> Any:
        raise OSError("no such topic")

    sim = Simulated(counting(), SCHEMAS)
    sim.feed(words=[("a",)])
    change = sim.modify()
    stream = change.source("other", None, event_time="at", watermark=broken)
    stream.key_by("word").compute("timed", Count)
    number = sim.send(change)
    sim.feed(words=[("a",)])
    sim.feed(words=[("a",)])
    known = sim.outcome(number)
    assert known is not None
    assert known.state == "rolled back"
    assert "no such topic" in known.reason
    assert counts(sim) == {"a": 3}
