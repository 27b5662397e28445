"""Prepared handovers on the simulator: what moves is there before it is needed, or is waited for, or is given up."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest

import millstream as ms
from millstream.control.verbs import past_of
from millstream.engine import handing, host, replicating
from millstream.protocol.pacing import Learning, MoveCosts
from millstream.protocol.planner import plan_move, plan_rescale
from millstream.protocol.replication import Progress
from millstream.store import chunks, segments
from millstream.testing.agents import InProcessAgents
from replicated import Run


@pytest.fixture(autouse=True)
def every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicating, "FEW", 0)
    monkeypatch.setattr(segments.CACHE, "_open", OrderedDict())  # as in a process that has run nothing else


def test_a_prepared_rescale_waits_for_its_bytes_and_fetches_none_inside_an_epoch(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(5)
    run.agents.pieces = 0
    plan = plan_rescale(run.sim.layout, 9, strategy=ms.Batched(8, stall_s=0))
    assert plan.prepared
    number = run.sim.apply(plan)
    states = []
    for _ in range(60):
        run.feed(1, words=5)
        outcome = run.sim.outcome(number)
        assert outcome is not None
        states.append((outcome.state, outcome.done, outcome.lacking))
        run.agents.pieces = 2 if len(states) > 2 else 0
        if outcome.over:
            break
        run.sim.feed()  # nothing is written, so targets can catch up
        outcome = run.sim.outcome(number)
        assert run.fetched == 0
    assert states[0][0] == "running"
    assert any(lacking for _, _, lacking in states), "it had to wait"
    assert outcome.state == "done"
    run.check()


def test_a_prepared_move_of_little_state_does_not_wait(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(2)
    number = run.sim.apply(plan_move(run.sim.layout, bins=[0, 1, 2], to=5, strategy=ms.AllAtOnce()))
    run.feed(1)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "done"
    run.check()


def test_a_round_that_is_not_prepared_in_time_leaves_its_origin_in_charge(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(5)
    run.agents.pieces = 0
    before = run.sim.driver.tables["count"]
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.Batched(8, stall_s=0, deadline_s=30)))
    run.feed(1)
    for _ in range(4):
        run.sim.advance_clock("10 seconds")
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert (outcome.state, outcome.done) == ("cancelled", 0)
    assert "was not prepared within 30 s" in outcome.reason
    assert run.sim.driver.tables["count"] == before
    run.feed(2)
    run.check()


def test_a_target_that_dies_while_it_is_prepared_is_replaced(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(5)
    run.agents.pieces = 1
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.Batched(16, merge=False)))
    run.feed(2, words=5)
    run.sim.workers = ("0", "2")
    for _ in range(60):
        run.feed(1, words=5)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "done"
    run.check()


@pytest.mark.parametrize("waits", [False, True])
def test_a_migration_that_can_never_catch_up_with_what_is_written_is_cut_over(
    tmp_path: Path, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if waits:  # without the rule that is tested here, it would wait for ever
        monkeypatch.setattr(replicating, "LAG", -100)
    run = Run(tmp_path)
    run.feed(5)
    run.agents.late = True
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.AllAtOnce(stall_s=0)))
    run.feed(12)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert outcome.state == ("running" if waits else "done")
    run.check()


@pytest.mark.parametrize("strategy", [ms.AllAtOnce(stall_s=0), ms.Batched(4, stall_s=0), ms.Batched(16, gap=2)])
@pytest.mark.parametrize("reached", [True, False])
def test_what_is_written_while_a_range_changes_hands_is_sent_to_its_target(
    tmp_path: Path, strategy: ms.Strategy, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not reached:

        def refuse(self: InProcessAgents, *given: Any) -> None:
            raise OSError("nobody answers")

        monkeypatch.setattr(InProcessAgents, "give", refuse)
    run = Run(tmp_path)
    run.feed(5)
    run.agents.late = True  # what an epoch writes is not at a replica before the next one begins
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=strategy))
    fetched, left = 0, 60
    while left:
        run.feed(1)
        fetched += run.fetched
        outcome = run.sim.outcome(number)
        assert outcome is not None
        left = min(left - 1, 2) if outcome.over and left > 2 else left - 1
    assert outcome.state == "done"
    run.check()
    assert (fetched == 0) is (reached and strategy.stall_s == 0)


@pytest.mark.parametrize("strategy", [ms.AllAtOnce(), ms.Batched(8, merge=False)])
def test_lookups_check_what_they_touch_wherever_slots_go(
    tmp_path: Path, strategy: ms.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "LOOK_FROM", 0)
    monkeypatch.setattr(host, "CHECK_AHEAD_S", -1.0)
    monkeypatch.setattr(host, "CHECK_COMING_S", -1.0)
    monkeypatch.setattr(chunks, "CHUNK", 256)
    looked = Counter[bool]()
    look = segments._Open.look

    def counted(self: Any, *given: Any) -> Any:
        found = look(self, *given)
        looked[found is not None and found is not self.whole] += 1
        return found

    monkeypatch.setattr(segments._Open, "look", counted)
    run = Run(tmp_path)
    run.feed(6, words=1500)
    for workers, slots in ((("0", "2"), 4), (("0", "2", "5"), 7), (("0", "5"), 3)):
        run.sim.workers = workers
        run.sim.apply(plan_rescale(run.sim.layout, slots, strategy=strategy))
        run.feed(6, words=20)
    run.check()
    assert looked[True] > 20, "some lookups had only a part of a segment checked"


@pytest.mark.parametrize("prepared", [True, False])
def test_a_migration_tells_where_its_state_came_from_and_what_that_took(tmp_path: Path, prepared: bool) -> None:
    run = Run(tmp_path)
    run.feed(5)
    run.agents.pieces = 0
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.AllAtOnce(prepared=prepared, stall_s=0)))
    run.feed(1)
    run.agents.pieces = 1000
    run.sim.advance_clock("5 seconds")
    run.feed(4)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "done"
    past = past_of(outcome)
    assert past.breakdown is not None
    print(past.breakdown)
    assert past.breakdown.preparing_s == (5 if prepared else 0)
    assert past.breakdown.loading_s > 0
    assert past.breakdown.fetching_s == 0 or not prepared  # a few bytes of a disk may take no time
    assert ("store" in past.breakdown.sources) is not prepared
    moved = past.breakdown.sources["replica" if prepared else "store"]
    assert moved > outcome.bytes / 4, "what moves between workers"


def test_what_is_about_to_come_and_replicas_are_checked_before_a_slot_needs_them(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(4)
    assert run.sim.driver.last is not None
    assert run.sim.driver.last.sources["ahead"] > 0, "replicas"
    run.agents.pieces = 0
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.AllAtOnce(prepared=True, stall_s=0)))
    run.feed(1)
    run.agents.pieces = 2  # some of what it lacks comes with every epoch
    checked = 0
    while True:
        run.feed(1, words=5)
        outcome = run.sim.outcome(number)
        assert outcome is not None
        if outcome.state == "done":
            break
        checked += run.sim.driver.last.prepared_bytes
    run.feed(1)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert checked > 0
    assert outcome.sources["ahead"] >= checked
    assert outcome.sources.get("replica", 0) < checked, "what came last has not been checked"
    assert "checked ahead" in str(past_of(outcome).breakdown)
    run.agents.pieces = 1000
    run.feed(2)
    run.sim.workers = ("0", "2")
    run.feed(1, words=5)
    assert (run.fetched, run.sim.driver.last.sources.get("store", 0)) == (0, 0)
    run.check()


def test_what_was_checked_ahead_is_not_checked_again_where_a_worker_has_several_slots(tmp_path: Path) -> None:
    run = Run(tmp_path, slots=6, workers=("0", "1"))
    run.feed(3, words=2000)
    written, checked = [], []
    for _ in range(8):
        before = {name for pieces in run.sim.driver.journal.history.manifest.families.values() for name in pieces}
        run.feed(1, words=20)
        assert run.sim.driver.last is not None
        now = run.sim.driver.journal.history.manifest.families.values()
        written.append(sum(each.bytes for pieces in now for name, each in pieces.items() if name not in before))
        checked.append(run.sim.driver.last.sources.get("ahead", 0))
    assert sum(checked[2:]) <= sum(written), "what is new, and that once"
    run.check()


def test_a_migration_that_was_cancelled_while_it_waited_does_not_go_on_counting(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(5)
    run.agents.pieces = 0
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.AllAtOnce(prepared=True, stall_s=0)))
    run.feed(2)
    run.sim.cancel(number)
    run.agents.pieces = 1000
    run.feed(2)
    before = run.sim.outcome(number)
    assert before is not None
    assert before.state == "cancelled"
    run.feed(4)
    assert run.sim.outcome(number) == before


@pytest.mark.parametrize("ends", ["checked", "waited", "late"])
def test_a_round_that_brings_much_waits_until_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    monkeypatch.setattr(handing, "CHECK_FROM", 0)
    monkeypatch.setattr(handing, "CHECK_WAIT_S", 1e9)
    monkeypatch.setattr(host, "CHECK_AHEAD_S", -1.0)
    monkeypatch.setattr(host, "CHECK_COMING_S", -1.0)  # nobody has time to check anything
    run = Run(tmp_path)
    run.feed(5)
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.AllAtOnce(prepared=True, deadline_s=60)))
    run.feed(4)
    waiting = run.sim.outcome(number)
    assert waiting is not None
    assert (waiting.state, waiting.done) == ("running", 0)
    assert waiting.lacking == 0, "all is there"
    if ends == "checked":
        monkeypatch.setattr(host, "CHECK_COMING_S", 60.0)
    elif ends == "waited":
        monkeypatch.setattr(handing, "CHECK_WAIT_S", 0.0)
    else:
        run.sim.advance_clock("61 seconds")
    run.feed(2)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "done", "that it was not checked is no reason to give up"
    assert ("ahead" in outcome.sources) is (ends == "checked")
    run.check()


def test_what_cannot_be_prepared_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.feed(5)
    monkeypatch.setattr(InProcessAgents, "start", lambda self, workers: {})
    monkeypatch.setattr(replicating, "START_S", 0.0)
    for worker in ("0", "1", "2"):
        run.replicas._lost(worker, "its port is blocked")
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.AllAtOnce(stall_s=0)))
    run.feed(2)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "done"
    run.check()


def test_an_agent_that_does_not_answer_for_once_makes_no_round_look_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    run = Run(tmp_path)
    run.replicas._clock = lambda: now[0]
    run.feed(5)
    run.agents.pieces = 0
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.AllAtOnce(stall_s=0)))
    run.feed(1)
    now[0] += 10 * replicating.START_S
    with monkeypatch.context() as patch:

        def silent(self: InProcessAgents, worker: str, *_: Any) -> Progress:
            raise OSError("it is busy")

        patch.setattr(InProcessAgents, "tell", silent)
        patch.setattr(InProcessAgents, "progress", silent)
        run.feed(1)
    for _ in range(2):
        run.feed(1)
        outcome = run.sim.outcome(number)
        assert outcome is not None
        assert (outcome.state, run.fetched) == ("running", 0)
        assert outcome.lacking > 0
        now[0] += 2.0  # then they are started again
    run.agents.pieces = 1 << 30
    run.feed(3)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert (outcome.state, run.fetched) == ("done", 0)
    run.check()


@pytest.mark.parametrize("protocol", ["direct", "cpa", "cpal", "auto"])
def test_each_protocol_moves_state_and_says_what_it_was_expected_to_cost(tmp_path: Path, protocol: str) -> None:
    run = Run(tmp_path)
    run.feed(5)
    plan = plan_rescale(run.sim.layout, 9, strategy=ms.Batched(16, protocol=protocol))
    assert plan.protocol == (protocol if protocol != "auto" else "cpal"), "the least stall, and as soon complete"
    assert list(plan.expected) == ["direct", "cpa", "cpal"]
    assert "complete in" in str(plan)
    number = run.sim.apply(plan)
    fetched = 0
    for _ in range(60):
        run.feed(1, words=50)
        fetched += run.fetched
        outcome = run.sim.outcome(number)
        assert outcome is not None
        if outcome.over:
            break
    assert outcome.state == "done"
    if plan.protocol == "cpal":
        assert fetched == 0
    else:
        assert fetched > 0, "what replicas have not is fetched"
    assert set(run.sim.driver.tables["count"].slots) == set(range(9))
    run.check()


class Known(Learning):
    """Costs that do not depend on how busy this machine is."""

    def __init__(self) -> None:
        super().__init__({})

    def costs(self, fetch_rate: float) -> MoveCosts:
        return MoveCosts(epoch_s=0.1)


@pytest.mark.parametrize("pieces", [1, 1 << 30])
def test_rounds_of_a_paced_plan_go_together_once_all_they_bring_is_there(tmp_path: Path, pieces: int) -> None:
    run = Run(tmp_path)
    run.feed(5)
    run.agents.pieces = pieces
    run.sim.driver._learning = Known()
    plan = plan_rescale(run.sim.layout, 9, strategy=ms.Paced(1.001, stall_s=0))
    assert plan.prepared
    assert len(plan.rounds) > 4
    number = run.sim.apply(plan)
    together = []
    for _ in range(200):
        before = run.sim.outcome(number)
        run.feed(1, words=5)
        outcome = run.sim.outcome(number)
        assert outcome is not None
        together.append(outcome.done - (0 if before is None else before.done))
        assert run.fetched == 0, "nothing is fetched inside an epoch"
        if outcome.over:
            break
        run.sim.feed()
    assert outcome.state == "done"
    assert max(together) > 1
    run.check()


def test_a_prepared_plan_to_many_new_slots_fetches_nothing_inside_an_epoch(tmp_path: Path) -> None:
    """More rounds are carried out together than are prepared ahead by default."""
    run = Run(tmp_path, bin_bits=8)
    run.feed(5)
    plan = plan_rescale(run.sim.layout, 100, strategy=ms.Paced(1.001, stall_s=0))
    assert plan.prepared
    number = run.sim.apply(plan)
    for _ in range(60):
        run.feed(1, words=5)
        assert run.fetched == 0
        run.sim.feed()
        outcome = run.sim.outcome(number)
        assert outcome is not None
        if outcome.over:
            break
    assert outcome.state == "done"
    run.check()
