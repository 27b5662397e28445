"""state_machine, unary and binary."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from oracle import at, plain, rows

import millstream as ms
from millstream.store.objects import open_store
from millstream.testing import Simulated


def switch(key: str, record: Any, state: int | None) -> tuple[int | None, list[Any]]:
    """Counts to three, then begins anew."""
    now = (state or 0) + record.x
    return (None, [(key, now)]) if now >= 3 else (now, [])


def test_a_state_machine_keeps_what_it_returns_and_drops_none() -> None:
    query = ms.Query("machine")
    machine = query.source("s", None).key_by("k").state_machine("m", switch, state="int", output="k string, n int")
    machine.sink("out", ms.Memory())
    sim = Simulated(query, {"s": "k string, x int"})
    sim.feed(s=[("a", 1), ("b", 2)])
    sim.feed(s=[("a", 1), ("a", 1), ("a", 1), ("c", 4)])
    assert rows(sim.outputs("out")) == rows([("a", 3), ("c", 4)])
    assert dict(sim.state("m")) == {"a": 1, "b": 2}


def test_a_state_machine_that_returns_no_pair_is_told_so() -> None:
    query = ms.Query("machine")
    query.source("s", None).key_by("k").state_machine("m", lambda key, row, state: 5, output="k string")
    with pytest.raises(ms.StepError, match=r"returned 5; return \(new state or None, productions\)"):
        Simulated(query, {"s": "k string"}).feed(s=[("a",)])
    with pytest.raises(ms.UserError, match="expected a function"):
        query.source("t", None).key_by("k").state_machine("n", None, output="k string")  # type: ignore[arg-type]


def remind(when: Any, record: Any, state: Any, later: Any) -> Any:
    """Sees every record three times: when it comes, and twice about five minutes after; and counts what it sees."""
    state.set((state.get() or 0) + 1)
    if record != "again" and record.x < 10:
        later.at(timedelta(minutes=5, seconds=record.x), "again")
        later.at(when.time + timedelta(minutes=5, seconds=-record.x), record._replace(x=record.x + 10))
    yield when.key, when.time, "again" if record == "again" else str(record.x), state.get()


def test_posted_records_come_back_in_the_order_of_their_times_also_after_a_restart() -> None:
    query, store = ms.Query("remind"), open_store("memory://")
    source = query.source("s", None, event_time="ts", max_ahead="1000 days")
    output = "k string, at timestamp, what string, seen long"
    source.key_by("k").unary("u", remind, state="long", output=output).sink("out", ms.Memory())
    schema = {"s": "k string, x long, ts timestamp"}
    Simulated(query, schema, store).feed(s=[("a", 1, at(0)), ("a", 2, at(0))])
    sim = Simulated(query, schema, store)
    sim.advance_watermark(at(297))
    assert sim.outputs("out") == []
    sim.advance_watermark(at(301))
    again = [("a", at(298), "12", 3), ("a", at(299), "11", 4), ("a", at(301), "again", 5)]
    assert list(map(plain, sim.outputs("out"))) == list(map(plain, again))
    sim.advance_watermark(at(400))
    assert plain(sim.outputs("out")[3:]) == plain([("a", at(302), "again", 6)])
    assert sim.state("u") == [("a", 6)]


def test_posts_of_one_time_come_back_in_the_order_of_posting_and_leave_nothing_behind() -> None:
    def echo(when: Any, record: Any, state: Any, later: Any) -> Any:
        if isinstance(record, int):
            yield when.key, record
            if record == 11:
                later.at(when.time, 12)
        else:
            for number in range(record.x):
                later.at(at(10), number)

    query = ms.Query("ties")
    source = query.source("s", None, event_time="ts", max_ahead="1000 days")
    source.key_by("k").unary("u", echo, output="k string, n long").sink("out", ms.Memory())
    sim = Simulated(query, {"s": "k string, x long, ts timestamp"}, slots=1)
    sim.feed(s=[("a", 12, at(0)), ("b", 1, at(0))])
    sim.advance_watermark(at(9))
    assert len(sim.state("u", "posted")) == 2
    sim.advance_watermark(at(20))
    assert [row[1] for row in sim.outputs("out") if row[0] == "a"] == list(range(13))
    assert sim.state("u", "posted") == []


def test_records_on_which_a_machine_fails_become_letters() -> None:
    def broken(*arguments: Any) -> Any:
        raise ValueError("broken")

    query = ms.Query("letters")
    one, two = query.source("one", None, event_time="ts"), query.source("two", None, event_time="ts")
    made = [
        one.key_by("k").state_machine("m", broken, output="k long", on_error="dead_letter", productions="strong"),
        one.key_by("k").unary("u", broken, output="k long", on_error="dead_letter"),
        one.key_by("k").binary("b", two.key_by("k"), broken, output="k long", on_error="dead_letter"),
    ]
    for stream in made:
        stream.output("dead_letter").sink(f"dead_{stream.name}", ms.Memory())
    sim = Simulated(query, {"one": "k long, ts timestamp", "two": "k long, ts timestamp"})
    sim.feed(one=[(1, at(0))], two=[(1, at(0))])
    assert [len(sim.outputs(f"dead_{name}")) for name in "mub"] == [1, 1, 2]


def meet(when: Any, left: Any, right: Any, state: Any, later_left: Any, later_right: Any) -> Any:
    """Answers each question, at once or when the answer comes; asks again after a minute."""
    known = state.get() or {"answer": None, "open": 0}
    if right is not None:
        known["answer"] = right.answer
    if left is not None and known["answer"] is None:
        later_left.at(timedelta(minutes=1), left)
    if left is not None and known["answer"] is not None:
        yield when.key, left.question, known["answer"]
    state.set(known)


def test_two_streams_share_a_state() -> None:
    query = ms.Query("meet")
    asked = query.source("asked", None, event_time="ts", max_ahead="1000 days")
    answered = query.source("answered", None, event_time="ts", max_ahead="1000 days")
    met = asked.key_by("k").binary("b", answered.key_by("id"), meet, output="k long, question string, answer string")
    met.sink("out", ms.Memory())
    sim = Simulated(
        query, {"asked": "k long, question string, ts timestamp", "answered": "id long, answer string, ts timestamp"}
    )
    sim.feed(asked=[(1, "why?", at(0)), (2, "who?", at(0))], answered=[(2, "me", at(0))])
    sim.feed(asked=[(2, "where?", at(10))], answered=[(1, "so", at(10))])
    assert rows(sim.outputs("out")) == rows([(2, "where?", "me")])
    sim.feed(asked=[(3, "when?", at(70))], answered=[(3, "now", at(70))])
    assert rows(sim.outputs("out")) == rows([(2, "where?", "me"), (1, "why?", "so"), (2, "who?", "me")])


def test_without_event_time_records_can_be_posted_by_the_clock() -> None:
    query = ms.Query("clock")
    keyed = query.source("s", None).key_by("k")
    keyed.unary(
        "u",
        lambda at, record, state, later: later.at(timedelta(seconds=3), "x") if record != "x" else [(at.key,)],
        output="k long",
        timer=ms.WALL_TIME,
    ).sink("out", ms.Memory())
    sim = Simulated(query, {"s": "k long"})
    sim.feed(s=[(1,)])
    sim.advance_clock("2 seconds")
    assert sim.outputs("out") == []
    sim.advance_clock("1 second")
    assert sim.outputs("out") == [(1,)]
