"""A step whose key changes: its successor is built beside it, and takes its place with all it has gathered."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest

import millstream as ms
from millstream.engine.driver import MOMENTS
from millstream.errors import UserError
from millstream.model.change import Calls, Change
from millstream.testing import CRASH, Simulated

SCHEMAS = {"visits": "user string, country string"}
VISITS = [("u1", "at"), ("u2", "de"), ("u1", "de"), ("u3", "at")]


class ByUser(ms.Computation):
    total = ms.Value("long", default=0)
    output = "name string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


class Most(ms.Computation):
    most = ms.Value("long", default=0)
    output = "name string, most long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.most.set(max(self.most.get(), row.total))
        yield at.key, self.most.get()


class Loud(ByUser):
    outputs: ClassVar[dict[str, str]] = {"loud": "name string"}


def visits() -> ms.Query:
    query = ms.Query("visits")
    counted = query.source("visits", None).key_by("user").compute("count", ByUser)
    counted.sink("out", ms.Memory()).key_by("name").compute("most", Most)
    return query


def shadowed(sim: Simulated) -> Change:
    change = sim.modify()
    change.shadow("count", key="country")
    return change


def test_a_key_changes_by_way_of_a_shadow() -> None:
    sim = Simulated(visits(), SCHEMAS)
    sim.feed(visits=VISITS)
    sim.send(shadowed(sim))
    sim.feed(visits=VISITS)
    assert Counter(dict(sim.state("count"))) == {"u1": 4, "u2": 2, "u3": 2}
    assert Counter(dict(sim.state("count_shadow"))) == {"at": 2, "de": 2}, "from its first epoch on"
    sent = len(sim.outputs("out"))
    assert sent == 8, "nobody has heard of the shadow"
    change = sim.modify()
    change.cut_over("count")
    assert repr(change.query) == "Query('visits'): visits -> count, count -> most, count -> [out]"
    sim.send(change)
    sim.feed(visits=[("u9", "at")])
    assert Counter(dict(sim.state("count"))) == {"at": 3, "de": 2}
    assert sim.outputs("out")[sent:] == [("at", 3)]
    assert dict(sim.state("most"))["at"] == 3
    assert dict(sim.state("most"))["u1"] == 4, "what reads it goes on with what it has"


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cut_over_is_whole_whenever_the_driver_dies(moment: str) -> None:
    sim = Simulated(visits(), SCHEMAS)
    sim.feed(visits=VISITS)
    sim.send(shadowed(sim))
    sim.feed(visits=VISITS)
    change = sim.modify()
    change.cut_over("count")
    sim.send(change)
    sim.offer({"visits": [("u9", "at")]}, crash=CRASH.at(moment))
    sim.feed(visits=[("u9", "at")])
    sim.feed(visits=[("u9", "at")])
    assert Counter(dict(sim.state("count"))) == {"at": 5, "de": 2}
    assert len(sim.outputs("out")) == 11


def test_a_cut_over_can_be_undone_and_what_it_dropped_begins_empty() -> None:
    sim = Simulated(visits(), SCHEMAS)
    sim.feed(visits=VISITS)
    sim.send(shadowed(sim))
    sim.feed(visits=VISITS)
    change = sim.modify()
    change.cut_over("count")
    number = sim.send(change)
    sim.feed(visits=[("u9", "at")])
    sim.revert(number)
    sim.feed(visits=[("u1", "at")])
    assert Counter(dict(sim.state("count"))) == {"u1": 1}
    assert Counter(dict(sim.state("count_shadow"))) == {"at": 4, "de": 2}, "as if it had never been cut over"
    assert sim.outputs("out")[-1] == ("u1", 1)


def test_from_another_process_a_shadow_is_two_calls() -> None:
    query = visits()
    change = Calls((("shadow", {"name": "count", "key": "country"}),)).rewrite(query, lambda sha, entry: None)
    assert list(change.put["steps"]) == ["count_shadow"]


def test_bad_shadows_say_what_is_wrong() -> None:
    change = Change(visits())
    with pytest.raises(UserError, match="no step of that name; its steps are count, most"):
        change.shadow("nothing")
    with pytest.raises(UserError, match="no step 'count_shadow'"):
        change.cut_over("count")
    change.shadow("count", key="country")
    with pytest.raises(UserError, match="already has a step of that name"):
        change.shadow("count", key="country")
    query = ms.Query("loud")
    query.source("visits", None).key_by("user").compute("count", Loud).output("loud").sink("out", ms.Memory())
    other = Change(query)
    other.shadow("count", ByUser)
    with pytest.raises(UserError, match=r"'out' reads 'count.loud', and 'count_shadow' makes no such output"):
        other.cut_over("count")
    assert "count_shadow" in other.query.steps, "it has changed nothing"
