"""Control from elsewhere: it sees what is committed, asks, and is answered; the query is run by the simulator."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import millstream as ms
from millstream.control.connect import Control
from millstream.engine.described import described_graph
from millstream.engine.driver import MOMENTS
from millstream.protocol.keyspace import Range
from millstream.protocol.steering import Cancel
from millstream.store import names
from millstream.store.control_log import ControlLog
from millstream.store.journal import Journal
from millstream.store.objects import open_store
from millstream.testing import CRASH, FaultyStore, Simulated
from words import WORDS, files, running, simulated


@pytest.fixture
def sim() -> Simulated:
    made = simulated()
    made.feed(words=WORDS)
    return made


# -- looking


def test_what_is_no_store_is_refused_and_stays_none(tmp_path: Path) -> None:
    with pytest.raises(ms.UserError, match="there is no store at"):
        ms.connect(str(tmp_path / "nothing"))
    with pytest.raises(ms.UserError, match="there is no query in the store"):
        ms.connect(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ms.UserError, match="one process only"):
        ms.connect("memory://")
    with pytest.raises(ms.UserError, match="give a directory"):
        ms.connect(None)  # type: ignore[arg-type]


def test_looking_writes_nothing_and_fences_nobody(tmp_path: Path) -> None:
    sim = simulated(open_store(str(tmp_path)))
    sim.feed(words=WORDS)
    before = files(sim.store)
    control = ms.connect(str(tmp_path))
    control.status()
    control.plan_rescale(4)
    control.state("count")
    control.commands()
    assert files(sim.store) == before
    sim.feed(words=WORDS)
    assert control.epoch == 1


def test_the_status_is_what_is_committed(sim: Simulated) -> None:
    control = Control(sim.store)
    status = control.status()
    assert (status.name, status.epoch, status.generation) == ("words", 0, 1)
    assert status.records == {"count": len(WORDS)}
    assert sorted(status.slots) == [0, 1]
    assert sum(status.slots.values()) == pytest.approx(status.state_bytes, abs=2)
    assert sorted(slot for slots in status.workers.values() for slot in slots) == [0, 1]
    assert (status.commands, status.unheard, status.driver_gone) == ({}, {}, "")
    sim.feed(words=WORDS)
    control.apply(control.plan_rescale(4))
    assert (control.status().epoch, control.status().unheard) == (1, {0: "rescale"})
    assert repr(control) == "<Control of 'words', epoch 1>"


def test_before_the_first_commit_there_is_little_to_say() -> None:
    sim = simulated()
    control = Control(sim.store)
    assert (control.status().name, control.status().epoch) == ("?", -1)
    with pytest.raises(ms.UserError, match="no epoch has been committed yet"):
        control.plan_rescale(4)
    with pytest.raises(ms.UserError, match="no epoch has been committed yet"):
        control.state("count")


def test_polling_costs_one_read(sim: Simulated) -> None:
    for _ in range(10):
        sim.feed(words=WORDS)
    counted = FaultyStore(sim.store)
    control = Control(counted)
    counted.operations = 0
    assert control.epoch == 10
    assert counted.operations == 1


# -- state


def test_state_is_an_arrow_table_without_a_session(sim: Simulated) -> None:
    sim.feed(words=WORDS)
    control = Control(sim.store)
    table = control.state("count")
    assert table.column_names == ["word", "total"]
    assert sorted(zip(*table.to_pydict().values(), strict=True)) == sorted(sim.state("count"))
    past = control.state("count", epoch=0)
    assert sorted(zip(*past.to_pydict().values(), strict=True)) == sorted(sim.state("count", epoch=0))


def test_state_that_is_not_there_is_refused(sim: Simulated) -> None:
    control = Control(sim.store)
    with pytest.raises(ms.UserError, match="no step 'cuont'; the query has count"):
        control.state("cuont")
    with pytest.raises(ms.UserError, match="declares no state 'totel'; it has total"):
        control.state("count", state="totel")
    with pytest.raises(ms.UserError, match=r"epoch 7 is not retained; epochs 0\.\.0 are"):
        control.state("count", epoch=7)


class Everything(ms.Computation):
    """Every kind of state there is."""

    plain = ms.Value("struct<a: int, b: array<string>>")
    sure = ms.Value("double", default=0.0, ttl="1 hour")
    late = ms.Value("string", ttl="1 hour", ttl_time=ms.EVENT_TIME)
    thing = ms.Value(object)
    spans = ms.Map("interval day to second", "map<string, long>")
    names = ms.Map("string", object, ttl="1 hour", ttl_time=ms.EVENT_TIME)
    amounts = ms.Map("decimal(10, 2)", "long", default=0)
    bag = ms.Bag("struct<x: timestamp, y: date>")
    things = ms.Bag(object)
    alarm = ms.Timer(ms.EVENT_TIME, payload="long")
    held = ms.Hold()

    def on_record(self, row: Any, at: ms.At) -> None:
        self.plain.set({"a": row.n, "b": [str(row.n)]})
        self.sure.set(row.n / 2)
        self.late.set(str(row.n))
        self.thing.set({row.n})
        self.spans.set(timedelta(seconds=row.n), {"n": row.n})
        self.names.set(f"name {row.n}", (row.n,))
        self.amounts.set(row.n, row.n)
        self.bag.append({"x": at.time, "y": at.time.date() if at.time else None})
        self.things.append(row.n)
        self.alarm.set(at.time + timedelta(hours=1), payload=row.n)

    @alarm.fires
    def ring(self, at: ms.At) -> None:
        pass


def everything() -> Simulated:
    query = ms.Query("everything")
    source = query.source("in", None, event_time="ts", lateness="1 hour")
    source.key_by("a name", "span", "amount").compute("all", Everything)
    schema = "n int, `a name` string, span interval day to second, amount decimal(8,2), ts timestamp"
    sim = Simulated(query, {"in": schema})
    rng = random.Random(7)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for _ in range(3):
        sim.feed(**{"in": [_record(rng, start) for _ in range(20)]})
    return sim


def _record(rng: random.Random, start: datetime) -> tuple[Any, ...]:
    n = rng.randrange(6)
    return n, f"k{n % 3}", timedelta(minutes=n % 2), None, start + timedelta(minutes=rng.randrange(30))


def test_every_kind_of_state_can_be_read_without_the_code() -> None:
    sim = everything()
    control = Control(sim.store)
    with pytest.raises(ms.UserError, match="several states: say which of plain, sure"):
        control.state("all")
    with pytest.raises(ms.UserError, match="declares no state 'alarm'"):
        control.state("all", state="alarm")
    for step in sim.graph.steps:
        assert step.states
        for name, declared in step.states.items():
            table = control.state("all", state=name)
            assert table.num_rows > 0
            assert table.column_names[:3] == ["a name", "span", "amount"]
            if not declared.is_object:
                assert sorted(map(repr, zip(*table.to_pydict().values(), strict=True))) == sorted(
                    map(repr, sim.state("all", name))
                )


def test_what_is_made_from_a_description_describes_itself_in_the_same_words() -> None:
    graph = everything().graph.describe()
    [step] = described_graph(graph).steps
    found, told = step.describe(), graph["steps"]["all"]
    assert found["key"] == told["key"]
    assert found["state"] == {
        name: text.replace(" NOT NULL", "") for name, text in told["state"].items() if name not in ("alarm", "held")
    }


# -- asking


def test_a_rescale_from_elsewhere_is_carried_out_and_answered(sim: Simulated) -> None:
    control = Control(sim.store)
    plan = control.plan_rescale(4, strategy=ms.Batched(8, gap=1, merge=False))
    handle = control.apply(plan)
    assert handle.progress().state == "sent"
    assert handle.outcome is None
    with running(sim):
        outcome = handle.wait(timeout=60)
    assert (outcome.state, outcome.done, outcome.rounds) == ("done", len(plan.rounds), len(plan.rounds))
    assert outcome.last - outcome.began + 1 == plan.epochs
    assert sorted(control.status().slots) == [0, 1, 2, 3]
    sim.feed(words=WORDS)  # what the last round cost is told an epoch later, and nothing else changes
    [told] = control.commands()
    costs = {"stall_ms": 0.0, "fetch_ms": 0.0, "load_ms": 0.0, "sources": {}}
    assert replace(told, **costs) == replace(outcome, **costs)
    assert told == handle.outcome
    assert sum(told.sources.values()) >= sum(outcome.sources.values())
    assert told.stall_ms >= outcome.stall_ms
    assert dict(sim.state("count"))["the"] == 4 * (sim.epoch + 1), "not a record was lost or counted twice"


def test_progress_is_told_while_a_plan_is_carried_out(sim: Simulated) -> None:
    control = Control(sim.store)
    handle = control.apply(control.plan_rescale(4, strategy=ms.Batched(16, merge=False)))
    seen = []
    while not seen or seen[-1].state != "done":
        sim.feed(words=WORDS)
        seen.append(handle.progress())
        assert control.status().commands == ({0: seen[-1]} if seen[-1].state != "done" else {})
    assert [each.done for each in seen] == [1, 2]
    assert seen[-1].bytes_done == seen[-1].bytes == handle.plan.bytes  # type: ignore[union-attr]


def test_a_cancel_leaves_what_was_done(sim: Simulated) -> None:
    control = Control(sim.store)
    handle = control.apply(control.plan_rescale(4, strategy=ms.Fluid()))
    sim.feed(words=WORDS)
    asked = Control(sim.store).cancel(handle.number)
    sim.feed(words=WORDS)
    assert asked.wait(0).state == "done"
    assert handle.wait(0).state == "cancelled"
    assert 1 <= handle.wait(0).done < handle.wait(0).rounds
    assert control.plan_rescale(4).rounds, "there is a rest, which may be planned again"
    sim.feed(words=WORDS)
    assert dict(sim.state("count"))["the"] == 4 * (sim.epoch + 1)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_command_is_carried_out_once_whenever_the_driver_dies(sim: Simulated, moment: str) -> None:
    control = Control(sim.store)
    plan = control.plan_rescale(4, strategy=ms.Batched(8, merge=False))
    handle = control.apply(plan)
    for _ in plan.rounds:
        sim.feed(words=[*WORDS, CRASH.at(moment)])
    outcome = handle.wait(0)
    assert (outcome.state, outcome.done, outcome.last - outcome.began + 1) == ("done", 4, 4)
    assert sim.driver.tables["count"].version == 4, "each round has changed the table once"
    assert sim.driver.journal.history.control == 1
    assert control.status().generation == 5
    assert dict(sim.state("count"))["the"] == 4 * (sim.epoch + 1)


def test_of_two_who_plan_at_once_one_plans_again(sim: Simulated) -> None:
    one, other = Control(sim.store), Control(sim.store)
    plans = [one.plan_rescale(3), other.plan_rescale(5)]
    handles = [one.apply(plans[0]), other.apply(plans[1])]
    assert [handle.number for handle in handles] == [0, 1]
    sim.feed(words=WORDS)
    assert handles[0].wait(0).state == "done"
    with pytest.raises(ms.ConflictError, match="made for routing version 0 of step 'count', found 1; plan again"):
        handles[1].wait(0)
    again = other.apply(other.plan_rescale(5))
    sim.feed(words=WORDS)
    assert again.wait(0).state == "done"


def test_a_command_waits_for_a_driver(sim: Simulated) -> None:
    control = Control(sim.store)
    handle = control.apply(control.plan_rescale(4, strategy=ms.AllAtOnce()))
    with pytest.raises(TimeoutError, match="command 0 has not been heard yet, after 0 s. No epoch was committed"):
        handle.wait(timeout=0)
    sim.restart()
    sim.feed(words=WORDS)
    assert handle.wait(0).state == "done"


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda control: control.plan_rescale(0), "slots=0"),
        (lambda control: control.plan_rescale(1 << 7), "give at most 64 slots"),
        (lambda control: control.plan_rescale(4, steps="cuont"), "no step 'cuont'"),
        (lambda control: control.plan_rescale(4, strategy="fluid"), "strategy='fluid': give Paced"),
        (lambda control: control.plan_rescale(4, strategy=ms.Fluid(gap=-1)), "gap=-1"),
        (lambda control: control.plan_rescale(4, at=0), "epoch 0 is past"),
        (lambda control: control.plan_rescale(4, at=datetime(2020, 1, 1)), "is past: it is"),
        (lambda control: control.plan_rescale(4, at=(ms.EVENT_TIME, datetime(2020, 1, 1))), "has event time"),
        (lambda control: control.plan_rescale(4, at="now"), "at='now': give an epoch"),
        (lambda control: control.plan_move(bins=3, to=9), "slot"),
        (lambda control: control.plan_move(ranges=[(0, 9), (5, 20)], to=1), "overlap"),
        (lambda control: control.plan_move(ranges=[(9, 3)], to=1), "not a range of the key space"),
        (lambda control: control.plan_move(ranges=["x"], to=1), "give pairs of points"),
        (lambda control: control.plan_drain("w9"), "no worker 'w9'"),
        (lambda control: control.apply(3), "give a plan"),
        (lambda control: control.apply(control.plan_rescale(2)), "changes nothing"),
        (lambda control: control.cancel(-1), "give the number of a command"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_is_sent(sim: Simulated, ask: Any, reason: str) -> None:
    before = files(sim.store)
    with pytest.raises(ms.UserError, match=reason):
        ask(Control(sim.store))
    assert files(sim.store) == before


def test_a_plan_of_another_query_is_refused(sim: Simulated) -> None:
    other = simulated()
    other.feed(words=WORDS)
    plan = Control(other.store).plan_rescale(4)
    with pytest.raises(ms.UserError, match="made for another query"):
        Control(sim.store).apply(plan)
    ControlLog(sim.store).send("rescale", plan)  # past the check
    sim.feed(words=WORDS)
    with pytest.raises(ms.UserError, match="command 0 .* was refused: the plan was made for another query"):
        Control(sim.store).handle(0).wait(0)


def test_what_is_not_under_way_cannot_be_cancelled(sim: Simulated) -> None:
    control = Control(sim.store)
    with pytest.raises(ms.UserError, match=r"cancel\(7\): there is no command 7; none was ever sent"):
        control.cancel(7)
    done = control.apply(control.plan_rescale(4, strategy=ms.AllAtOnce()))
    with pytest.raises(ms.UserError, match="there is no command 7; the last one is 0"):
        control.cancel(7)
    assert control.cancel(0).number == 1, "one that was not heard yet can be cancelled"
    sim.feed(words=WORDS)
    assert done.wait(0).state == "cancelled"
    with pytest.raises(ms.UserError, match=r"command 0 \(rescale\) is not under way: it is cancelled"):
        done.cancel()
    ControlLog(sim.store).send("cancel", Cancel(7), 2)  # past the check
    sim.feed(words=WORDS)
    with pytest.raises(ms.UserError, match="command 7 is not under way: there is no such command"):
        control.handle(2).wait(0)


@pytest.mark.parametrize("data", [b"hello", b"", b"[" * 10**5, b'{"number": 0}', b"\xff" * 1000])
def test_rubbish_in_the_log_is_refused_and_recorded_and_the_query_goes_on(sim: Simulated, data: bytes) -> None:
    sim.store.put(names.command(0), data)
    control = Control(sim.store)
    handle = control.apply(control.plan_rescale(4, strategy=ms.AllAtOnce()))
    assert handle.number == 1
    sim.feed(words=WORDS)
    refused, done = control.commands()
    assert (refused.number, refused.state) == (0, "refused")
    assert "cannot be read as a command" in refused.reason
    assert done.state == "done"
    assert Journal.open(sim.store).history.outcomes[0] == refused


def test_a_range_may_start_in_the_middle_of_a_bin(sim: Simulated) -> None:
    control = Control(sim.store)
    handle = control.apply(control.plan_move(ranges=(5, 2**60), to=1))
    sim.feed(words=WORDS)
    assert handle.wait(0).state == "done"
    assert sim.driver.tables["count"].owners_of(Range(5, 2**60)) == {1}


def test_plans_that_wait_for_their_time() -> None:
    sim = simulated(now=datetime.now(UTC))
    sim.feed(words=WORDS)
    control = Control(sim.store)
    by_epoch = control.apply(control.plan_rescale(3, at=4, strategy=ms.AllAtOnce()))
    sim.feed(words=WORDS)
    assert by_epoch.progress().state == "waiting"
    while sim.epoch < 4:
        sim.feed(words=WORDS)
    assert (by_epoch.wait(0).state, by_epoch.wait(0).began) == ("done", 4)
    due = datetime.now(UTC) + timedelta(hours=1)
    by_clock = control.apply(control.plan_rescale(4, at=due, strategy=ms.AllAtOnce()))
    sim.advance_clock("59 minutes")
    assert by_clock.progress().state == "waiting"
    sim.advance_clock("2 minutes")
    assert by_clock.wait(0).state == "done"


# -- tokens


def test_a_guarded_query_takes_commands_with_its_token_only(tmp_path: Path) -> None:
    sim = simulated(open_store(str(tmp_path)), token="secret")
    sim.feed(words=WORDS)
    control = ms.connect(str(tmp_path))
    plan = control.plan_rescale(4, strategy=ms.AllAtOnce())
    assert control.status().epoch == 0, "looking needs no token"
    with pytest.raises(ms.UserError, match="is guarded: give the token"):
        control.apply(plan)
    with pytest.raises(ms.UserError, match="is not the token"):
        ms.connect(str(tmp_path), token="guess").apply(plan)
    handle = ms.connect(str(tmp_path), token="secret").apply(plan)
    sim.feed(words=WORDS)
    assert handle.wait(0).state == "done"
    assert control.status().commands == {}


def test_a_command_without_the_token_is_refused_and_recorded() -> None:
    sim = simulated(token="secret")
    sim.feed(words=WORDS)
    forged = b'{"number":0,"nonce":"x","verb":"cancel","kind":"Cancel","body":{"number":3},"sender":"eve","at_ms":1}'
    sim.store.put(names.command(0), forged)
    sim.feed(words=WORDS)
    [outcome] = Control(sim.store).commands()
    assert (outcome.state, outcome.sender) == ("refused", "eve")
    assert "not sealed with the token" in outcome.reason


@pytest.mark.parametrize(("first", "then"), [("secret", None), ("secret", "other")])
def test_a_guarded_store_is_not_taken_over_without_its_token(first: str, then: str | None) -> None:
    sim = simulated(token=first)
    sim.feed(words=WORDS)
    with pytest.raises(ms.UserError, match="guarded"):
        simulated(sim.store, token=then)
    sim.feed(words=WORDS)
    assert sim.driver.journal.history.generation == 1, "who is refused has not claimed"


def test_progress_of_a_guarded_query_is_seen_without_a_token() -> None:
    sim = simulated(token="secret")
    sim.feed(words=WORDS)
    control = Control(sim.store, "secret")
    control.apply(control.plan_rescale(4, strategy=ms.Batched(16, merge=False)))
    sim.feed(words=WORDS)
    [progress] = Control(sim.store).status().commands.values()
    assert 0 < progress.bytes_done < progress.bytes


def verbs_of(kind: type) -> Sequence[str]:
    return sorted(name for name in dir(kind) if not name.startswith("_"))


def test_there_is_no_verb_that_only_one_has() -> None:
    missing = {
        "active",
        "await_termination",
        "stop",
        "wait_epoch",
        "recent",
        "decisions",
    }  # of those who run the query themselves
    assert set(verbs_of(ms.RunningQuery)) - missing <= set(verbs_of(Control))


@pytest.mark.parametrize("seed", range(3))
def test_mutilated_commands_never_stop_a_query(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sim = simulated()
    sim.feed(words=WORDS)
    control = Control(sim.store)
    for number in range(40):
        strategy = ms.Batched(rng.randint(1, 40), gap=rng.randint(0, 1), merge=False)
        plan = control.plan_rescale(rng.randint(1, 6), strategy=strategy)
        whole = {
            "number": number,
            "nonce": "n",
            "verb": "rescale",
            "kind": "MigrationPlan",
            "sender": "me",
            "at_ms": 1,
            "body": msgspec.json.decode(msgspec.json.encode(plan)),
        }
        for _ in range(rng.randint(0, 3)):
            mutilate(rng, whole)
        sim.store.put(names.command(number), msgspec.json.encode(whole))
        sim.feed(words=WORDS)
        assert number in sim.driver.journal.history.outcomes
        assert dict(sim.state("count"))["the"] == 4 * (sim.epoch + 1)
    outcomes = control.commands()
    assert any(outcome.state == "refused" for outcome in outcomes)
    assert any(outcome.done for outcome in outcomes), "some were good"


def mutilate(rng: random.Random, thing: Any) -> None:
    """Replaces something inside, at any depth."""
    places = list(thing) if isinstance(thing, dict) else list(range(len(thing)))
    if not places:
        return
    place = rng.choice(places)
    if isinstance(thing[place], (dict, list)) and rng.random() < 0.7:
        mutilate(rng, thing[place])
    elif isinstance(thing[place], list) and thing[place]:
        rng.shuffle(thing[place])
    else:
        thing[place] = rng.choice([None, -1, 0, 1, 2, 2**40, 2**64 - 1, 10**30, "", "count", [], {}, [[]], 0.5, True])


def test_threads_may_share_one_control(sim: Simulated) -> None:
    """Each sends its own commands, and each command is answered once."""
    control = Control(sim.store)
    answered: list[int] = []

    def ask() -> None:
        for _ in range(3):
            number = ControlLog(sim.store).send("cancel", Cancel(999), sim.driver.journal.history.control)
            handle = control.handle(number)
            with pytest.raises(ms.UserError, match="not under way"):
                handle.wait(timeout=60)
            answered.append(handle.number)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    with running(sim):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(answered) == list(range(12))
    assert [command.number for command in control.commands()] == list(range(12))


def test_a_plan_that_can_no_longer_be_read_after_a_restart_ends_and_the_query_goes_on() -> None:
    store = open_store("memory://")
    sim = simulated(store)
    sim.feed(words=WORDS)
    control = Control(store)
    handle = control.apply(control.plan_rescale(4, strategy=ms.Fluid()))
    sim.feed(words=WORDS)
    assert handle.progress().state == "running"
    store.delete([names.command(handle.number)])
    sim.restart()
    sim.feed(words=WORDS)
    outcome = handle.outcome
    assert outcome is not None
    assert (outcome.state, outcome.done) == ("cancelled", 1)
    assert "can no longer be read" in outcome.reason
    assert dict(sim.state("count"))["the"] == 12
