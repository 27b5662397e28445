"""Commands that make no sense: each is refused with a reason, and changes nothing (bad input of live migration)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.protocol.keyspace import LAST, WHOLE, Bin, Range, bin_range
from millstream.protocol.migration import MigrationPlan, Move, Start
from millstream.protocol.routing import RoutingTable, RoutingVersion, Slot
from millstream.protocol.steering import Cancel, Facts, Heard, Outcome, Steering, remembered, steer

TABLES = {"count": RoutingTable.even(2, 4), "join": RoutingTable.even(2, 4)}
GOOD = MigrationPlan(
    "mine",
    "move",
    {"count": RoutingVersion(0)},
    tuple((Move("count", bin_range(Bin(number), 4), Slot(0), Slot(1), 10),) for number in range(3)),
)
HOUR_MS = 3_600_000


def facts(**changed: Any) -> Facts:
    # By name, so that facts which are added do not matter here.
    known = {name: Facts.__annotations__[name] for name in Facts.__slots__}
    base: dict[str, Any] = {
        "store": "mine",
        "generation": 1,
        "epoch": 10,
        "clock_ms": 100 * HOUR_MS,
        "tables": TABLES,
        "watermarks": {"count": 5_000_000},
        "control": 0,
        "outcomes": {},
        "plans": {},
    }
    return Facts(**{name: value for name, value in {**base, **changed}.items() if name in known})


def ask(what: MigrationPlan | Cancel | None, at: Facts | None = None, sent_ms: int = 100 * HOUR_MS) -> Steering:
    at = at or facts()
    return steer(at, [Heard(at.control, "move", what, "" if what else "it is nonsense", "me", sent_ms)])


def refusal(what: MigrationPlan | Cancel | None, at: Facts | None = None, sent_ms: int = 100 * HOUR_MS) -> Outcome:
    """The answer to a command that must be refused and change nothing."""
    at = at or facts()
    steering = ask(what, at, sent_ms)
    assert steering.tables == at.tables
    assert steering.control == at.control + 1, "it is not heard again"
    [outcome] = steering.outcomes
    assert outcome.state == "refused"
    return outcome


def one_move(first: int, last: int, origin: int, target: int, step: str = "count") -> MigrationPlan:
    return replace(GOOD, rounds=((Move(step, Range(first, last), Slot(origin), Slot(target)),),))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (None, "it is nonsense"),
        (replace(GOOD, store="yours"), "made for another query (store id 'yours', this is mine)"),
        (replace(GOOD, rounds=()), "moves nothing"),
        (replace(GOOD, versions={"cuont": RoutingVersion(0)}), "no step 'cuont'; the query has count, join"),
        (replace(GOOD, gap=-1), "gap=-1: give 0 or more"),
        (replace(GOOD, bin_bits={"cuont": 3}), "no step 'cuont'"),
        (replace(GOOD, bin_bits={"join": 3}), "whose version the plan does not give"),
        (replace(GOOD, bin_bits={"count": 33}), "2**33 bins"),
        (replace(one_move(0, 9, 0, 1, "join")), "whose version the plan does not give"),
        (one_move(0, 9, 0, -1), "slot -1, which cannot be: there are 2"),
        (one_move(0, 9, 0, 10**12), "slot 1000000000000, which cannot be"),
        (one_move(0, 9, 1, 0), "from slot 1: it is at 0"),
        (one_move(0, LAST, 0, 1), "from slot 0: it is at 0, 1"),
        (replace(GOOD, rounds=((*GOOD.rounds[0], *GOOD.rounds[0]),)), "overlaps another of its ranges"),
        (replace(GOOD, rounds=(GOOD.rounds[0], GOOD.rounds[0])), "round 1 takes"),
        (Cancel(7), "command 7 is not under way: there is no such command"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused_with_a_reason(plan: Any, reason: str) -> None:
    outcome = refusal(plan)
    assert reason in outcome.reason
    assert not outcome.stale, "planning again would not help"


def test_the_plan_that_those_were_made_from_is_good() -> None:
    [outcome] = ask(GOOD).outcomes
    assert (outcome.state, outcome.done) == ("running", 1)


def test_an_event_time_means_nothing_to_steps_without_one() -> None:
    plan = replace(GOOD, versions={"join": RoutingVersion(0)}, start=Start(event_time=9_000_000))
    plan = replace(plan, rounds=((Move("join", WHOLE, Slot(0), Slot(1)),),))
    assert "has event time" in refusal(plan).reason


def test_a_wall_time_that_passed_while_the_command_was_on_its_way_is_not_past() -> None:
    plan = replace(GOOD, start=Start(clock_ms=100 * HOUR_MS - 1000))
    [outcome] = ask(plan, sent_ms=100 * HOUR_MS - 2000).outcomes
    assert outcome.state == "running"
    assert "in the past" in refusal(plan, sent_ms=100 * HOUR_MS - 500).reason


def test_a_stale_plan_says_expected_and_found() -> None:
    moved = {**TABLES, "count": TABLES["count"].assign([(bin_range(Bin(0), 4), Slot(1))])}
    outcome = refusal(GOOD, facts(tables=moved))
    assert "made for routing version 0 of step 'count', found 1; plan again" in outcome.reason
    assert outcome.stale


def running(done: int = 1) -> dict[str, Any]:
    """Facts of a migration that is under way as command 0."""
    tables = {**TABLES, "count": TABLES["count"].assign([(bin_range(Bin(0), 4), Slot(1))])}
    outcome = Outcome(0, "move", "running", rounds=3, done=done, began=9, last=9)
    return {"tables": tables, "outcomes": {0: outcome}, "plans": {0: replace(GOOD, gap=5)}, "control": 1}


@pytest.mark.parametrize("start", [Start(), Start(epoch=10)], ids=["now", "due now"])
def test_a_step_that_is_being_moved_is_not_moved_by_another(start: Start) -> None:
    plan = replace(one_move(LAST, LAST, 1, 0), versions={"count": RoutingVersion(1)}, start=start)
    outcome = refusal(plan, facts(**running()))
    assert "command 0 (move) is moving ranges of step 'count', 1 of 3 rounds done; wait for it or" in outcome.reason
    assert outcome.stale


def test_what_is_over_cannot_be_cancelled() -> None:
    over = Outcome(0, "move", "done", rounds=3, done=3)
    assert "command 0 is not under way: it is done" in refusal(Cancel(0), facts(outcomes={0: over}, control=1)).reason


def test_a_cancel_ends_what_is_under_way_after_its_rounds() -> None:
    at = facts(**running())
    steering = ask(Cancel(0), at)
    assert steering.tables == at.tables
    assert [(o.number, o.state, o.done) for o in steering.outcomes] == [(0, "cancelled", 1), (1, "done", 0)]


NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 2**32, 2**63 - 1, -(2**63)]))
RANGES = st.one_of(
    st.builds(bin_range, st.integers(0, 15).map(Bin), st.just(4)),
    st.tuples(st.integers(0, LAST), st.integers(0, LAST)).map(lambda pair: Range(min(pair), max(pair))),
)
STEPS = st.sampled_from(["count", "join", "x" * 5000])
MOVES = st.builds(Move, STEPS, RANGES, NUMBERS, NUMBERS, NUMBERS)
STARTS = st.builds(Start, *[st.none() | NUMBERS] * 3)
PLANS = st.builds(
    MigrationPlan,
    st.sampled_from(["mine", "yours"]),
    st.text(max_size=5),
    st.dictionaries(STEPS, st.integers(0, 1), max_size=2),
    st.lists(st.lists(MOVES, max_size=3).map(tuple), max_size=4).map(tuple),
    NUMBERS,
    STARTS,
    st.text(max_size=5),
    st.dictionaries(STEPS, NUMBERS, max_size=2),
    st.text(max_size=300),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.one_of(PLANS, st.builds(Cancel, NUMBERS), st.none()), min_size=1, max_size=3))
def test_no_command_breaks_a_decision(asks: list[MigrationPlan | Cancel | None]) -> None:
    at = facts()
    plans: dict[int, MigrationPlan] = {}
    for number, what in enumerate(asks):
        if isinstance(what, MigrationPlan):
            plans[number] = what
    for epoch in range(10, 14):
        heard = [Heard(number, "?", what) for number, what in enumerate(asks) if number >= at.control]
        steering = steer(at, heard)
        assert all(len(outcome.reason) <= 1000 for outcome in steering.outcomes)
        outcomes = remembered(at.outcomes, steering.outcomes)
        live = {number: plan for number, plan in plans.items() if not outcomes[number].over}
        at = facts(epoch=epoch + 1, tables=steering.tables, outcomes=outcomes, plans=live, control=steering.control)
    assert sorted(at.outcomes) == list(range(len(asks)))


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        (Start(epoch=9), "epoch 9, which is past: the next one is 10"),
        (Start(clock_ms=99 * HOUR_MS), "1 hour in the past"),
        (Start(event_time=4_000_000), "the watermark is 1 s beyond it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_start_that_has_passed_is_refused_and_another_plan_can_help(start: Start, reason: str) -> None:
    outcome = refusal(replace(GOOD, start=start))
    assert reason in outcome.reason
    assert outcome.stale


def test_a_command_that_is_under_way_and_cannot_be_read_just_now_stands_in_the_way() -> None:
    """It may be moving anything: what another plan would take from where it is may be on its way elsewhere."""
    running = Outcome(0, "move", "running", rounds=3, done=1, began=8, last=9, generation=1)
    at = facts(control=1, outcomes={0: running}, plans={}, unread={0})
    outcome = refusal(GOOD, at)
    assert outcome.stale
    assert "command 0 (move) is under way, and cannot be read just now" in outcome.reason
