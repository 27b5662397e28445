"""Replicas and prepared handover on the simulator: what dies, and when, changes what is fetched, and no result."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import millstream as ms
from millstream.control.verbs import past_of
from millstream.engine import driver as driver_module
from millstream.engine import handing, host, load_history, replicating, upkeep
from millstream.engine.replicating import Replicator
from millstream.protocol.epochs import History
from millstream.protocol.planner import plan_drain, plan_move, plan_rescale
from millstream.protocol.replication import Order, Progress
from millstream.protocol.routing import RoutingTable
from millstream.store import chunks, segments
from millstream.store.cache import WorkerCache
from millstream.testing import Simulated
from millstream.testing import agents as agents_module
from millstream.testing import simulated as simulated_module
from millstream.testing.agents import InProcessAgents
from millstream.testing.simulated import InProcess
from words import Count, simulated

WORDS = [f"word {i}" for i in range(2000)]


@pytest.fixture(autouse=True)
def every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicating, "FEW", 0)
    monkeypatch.setattr(segments.CACHE, "_open", OrderedDict())  # as in a process that has run nothing else


class Run:
    """A word count on workers with agents, and what its totals should be."""

    def __init__(self, folder: Path, seed: int = 1, **options: Any) -> None:
        given = {"slots": 6, "workers": ("0", "1", "2"), "cache_dir": folder / "caches", "replicas": 1}
        self.sim: Simulated = simulated(**{**given, **options})
        self.rng = random.Random(seed)
        self.totals: Counter[str] = Counter()

    def feed(self, epochs: int = 1, words: int = 500) -> None:
        for _ in range(epochs):
            chosen = self.rng.choices(WORDS, k=words)
            self.totals.update(chosen)
            self.sim.feed(words=[(word,) for word in chosen])

    def check(self) -> None:
        assert dict(self.sim.state("count")) == dict(self.totals)

    @property
    def replicas(self) -> Replicator:
        assert self.sim.driver.replicator is not None
        return self.sim.driver.replicator

    @property
    def agents(self) -> InProcessAgents:
        agents = self.sim.driver.executor.agents
        assert isinstance(agents, InProcessAgents)
        return agents

    @property
    def fetched(self) -> int:
        """Bytes that the last epoch fetched from the store."""
        assert self.sim.driver.last is not None
        return self.sim.driver.last.fetched_bytes


def test_the_slots_of_a_lost_worker_go_to_their_replicas_and_fetch_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(5)
    groups, before = run.replicas.groups, dict(run.sim.driver.journal.history.workers)
    run.sim.workers = ("0", "2")
    run.feed(1)
    after = run.sim.driver.journal.history.workers
    for slot in before["1"]:
        [worker] = [worker for worker, slots in after.items() if slot in slots]
        assert worker in groups[slot]
    assert run.fetched == 0
    run.feed(3)
    run.check()
    assert all(members for members in run.replicas.groups.values()), "the groups are mended"


def test_a_worker_lost_between_two_epochs_is_followed_by_its_replicas_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(5)
    run.sim.workers = ("0", "2")
    run.replicas.turn()  # as the thread does, before anything has been placed anew
    run.feed(1)
    assert run.fetched == 0
    run.check()


def test_without_replicas_a_lost_worker_costs_its_state(tmp_path: Path) -> None:
    run = Run(tmp_path, replicas=0)
    run.feed(5)
    run.sim.workers = ("0", "2")
    run.feed(1)
    assert run.fetched > 0
    run.check()


def test_replicas_go_where_load_falls_when_that_of_the_slot_rises_if_they_are_to() -> None:
    for way in (False, True):
        history = History(
            workers={"a": (0,), "b": (1,), "c": (2,), "d": (3,)}, tables={"count": RoutingTable.even(4, 4)}
        )
        replicator = Replicator(Four(), 1, background=False, by_load=way)
        for epoch in range(load_history.PERIOD * load_history.ENOUGH_PERIODS):
            day = epoch // load_history.PERIOD % 2
            replicator.after_commit(history, {0: 9 * day, 1: 9 * day, 2: 9 - 9 * day, 3: 9 - 9 * day})
        apart = [replicator.groups[slot][0] in ("cd", "ab")[slot // 2] for slot in range(4)]
        assert all(apart) is way, replicator.groups


class Four:
    """Four workers with agents that hold everything at once."""

    def hosts(self) -> dict[str, str]:
        return {worker: f"host {worker}" for worker in "abcd"}

    def start(self, workers: Sequence[str]) -> dict[str, str]:
        return {worker: worker for worker in workers}

    def tell(self, worker: str, order: Order) -> Progress:
        return Progress(order.number, {want.key: () for want in order.wants})

    def progress(self, worker: str) -> Progress:
        return Progress(-1)

    def forget(self, worker: str) -> None:
        return

    def end(self) -> None:
        return


def test_two_workers_lost_at_once_with_two_replicas_cost_nothing_and_with_one_something(tmp_path: Path) -> None:
    fetched = {}
    for count in (1, 2):
        run = Run(tmp_path / str(count), replicas=count, workers=("0", "1", "2", "3"), slots=8)
        run.feed(5)
        run.replicas.turn()  # the second in a chain waits for the first
        run.sim.workers = ("0", "3")
        run.feed(1)
        fetched[count] = run.fetched
        run.feed(2)
        run.check()
    assert fetched[2] == 0 < fetched[1]


def test_the_whole_cluster_may_go_and_come_back_cold(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(5)
    run.sim.workers = ("7", "8")
    run.feed(3)
    run.check()


def test_more_replicas_than_workers_are_as_many_as_there_can_be(tmp_path: Path) -> None:
    run = Run(tmp_path, replicas=9)
    run.feed(3)
    assert {len(members) for members in run.replicas.groups.values()} == {2}
    run.check()


def test_all_workers_lost_at_once_cost_no_attempt_and_the_next_loss_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "FEW", 0)
    run = Run(tmp_path)
    run.feed(5)
    executor = run.sim.driver.executor
    assert isinstance(executor, InProcess)
    run.sim.workers = ()
    executor.elsewhere = dict.fromkeys(range(6), "7")  # Spark runs them on the first one that comes
    run.feed(1)
    assert run.sim.driver.last is not None
    assert (run.sim.driver.last.attempts, run.sim.driver.last.elsewhere) == (1, 6)
    executor.elsewhere, run.sim.workers = {}, ("7", "8")
    run.feed(3)
    executor.elsewhere[0] = "9"
    run.feed(1)
    assert run.sim.driver.last.attempts == 2, "it gave up, where it would have had to fetch"
    run.check()


def test_caches_that_are_smaller_than_a_slot_cost_fetches_and_nothing_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(directory: Path) -> WorkerCache:
        return WorkerCache(directory, 3000)

    monkeypatch.setattr(agents_module, "WorkerCache", small)
    monkeypatch.setattr(simulated_module, "WorkerCache", small)
    run = Run(tmp_path)
    run.feed(4)
    assert any("full" in why for why in run.replicas.facts().troubles.values())
    run.sim.workers = ("0", "2")
    run.feed(1)
    assert run.fetched > 0
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.AllAtOnce(stall_s=0)))
    run.feed(2)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "done"
    run.sim.workers = ("0", "2", "3")
    run.feed(3)
    assert run.sim.driver.journal.history.workers.get("3"), "a new worker is used, though it has no room"
    run.check()


def test_a_worker_that_is_behind_costs_what_it_lacks_and_no_more(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(6)
    run.agents.pieces = 0
    run.feed(1)
    state = sum(segment.bytes for segment in run.sim.driver.journal.history.manifest.segments())
    run.sim.workers = ("0", "2")
    run.feed(1)
    assert 0 < run.fetched < state / 3
    run.check()


def test_a_new_worker_is_given_slots_once_it_holds_them(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=("0", "1"), slots=6)
    run.feed(4)
    run.agents.pieces = 3
    run.sim.workers = ("0", "1", "2")
    held = []
    for _ in range(30):
        run.feed(1, words=20)
        held.append(len(run.sim.driver.journal.history.workers.get("2", ())))
        assert run.fetched == 0
    assert held[0] == 0
    assert held[-1] == 2
    run.check()


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
    number = run.sim.apply(plan_rescale(run.sim.layout, 9, strategy=ms.Batched(16)))
    run.feed(2, words=5)
    run.sim.workers = ("0", "2")
    for _ in range(60):
        run.feed(1, words=5)
    outcome = run.sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "done"
    run.check()


@pytest.mark.parametrize("seed", range(8))
def test_random_lives_with_replicas_are_exact(tmp_path: Path, seed: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    run = Run(tmp_path, seed, replicas=rng.choice([1, 1, 2]), slots=rng.randrange(2, 7))
    names = iter(range(3, 1000))
    run.feed(2)
    for _ in range(25):
        run.agents.pieces = rng.choice([0, 1, 3, 1000])
        match rng.randrange(9):
            case 0 if len(run.sim.workers) > 1:
                lost = rng.choice(run.sim.workers)
                run.sim.workers = tuple(worker for worker in run.sim.workers if worker != lost)
            case 1 if len(run.sim.workers) < 5:
                run.sim.workers = (*run.sim.workers, str(next(names)))
            case 2:
                strategy = rng.choice(
                    [ms.AllAtOnce(), ms.Fluid(), ms.Batched(8, stall_s=0), ms.Matched(prepared=False)]
                )
                run.sim.apply(plan_rescale(run.sim.layout, rng.randrange(1, 9), strategy=strategy))
            case 3 if len(run.sim.driver.journal.history.workers) > 1 and rng.random() < 0.5:
                worker = rng.choice(sorted(run.sim.driver.journal.history.workers))
                run.sim.apply(plan_drain(run.sim.layout, worker, strategy=ms.Batched(8)))
            case 4:
                run.sim.restart()
            case 5 if rng.random() < 0.5:
                run.sim.workers = tuple(str(next(names)) for _ in range(rng.randrange(1, 4)))
            case 6:
                run.agents.keepers.pop(rng.choice(run.sim.workers), None)
            case 7:
                change = run.sim.modify()
                change.replace("count", rng.choice([Count, Recount]), state=ms.carry())
                run.sim.send(change)
        run.feed(1, words=rng.choice([0, 20, 200]))
    run.check()


class Recount(Count):
    """The same, by another name."""


def test_who_held_what_is_known_after_a_restart_from_entries_and_from_a_snapshot(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.feed(3)
    known = run.sim.driver.journal.history.replicas
    assert known
    run.sim.restart()
    assert run.sim.driver.journal.history.replicas == known
    for _ in range(80):  # more than there is between two snapshots
        run.sim.feed()
    run.sim.restart()
    assert run.sim.driver.journal.history.replicas
    assert run.sim.driver.journal.history.took_ms >= 0
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


def test_replicas_without_room_do_not_keep_compactions_from_counting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {}
    for full in (False, True):
        if full:
            monkeypatch.setattr(WorkerCache, "has_room", lambda self, count: False)
        run = Run(tmp_path / str(full))
        run.feed(30)
        counts[full] = len(list(run.sim.driver.journal.history.manifest.segments()))
        run.check()
    assert counts[True] <= 1.3 * counts[False], counts


@pytest.mark.parametrize("strategy", [ms.AllAtOnce(), ms.Batched(8)])
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


def test_a_task_that_runs_elsewhere_gives_up_once_and_then_fetches_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "FEW", 0)
    run = Run(tmp_path)
    run.feed(5)
    executor = run.sim.driver.executor
    assert isinstance(executor, InProcess)
    placed, groups = executor.placer.placed, run.replicas.groups
    [other] = {"0", "1", "2"} - {placed[0], *groups[0]}
    executor.elsewhere[0] = other
    run.feed(1)
    assert run.sim.driver.last is not None
    assert (run.sim.driver.last.attempts, run.sim.driver.last.elsewhere) == (2, 1)
    assert run.fetched > 0
    run.feed(1)
    assert (run.sim.driver.last.attempts, run.sim.driver.last.elsewhere) == (1, 1), "it is not tried again"
    run.check()


def test_a_task_that_runs_where_a_replica_is_does_not_give_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "FEW", 0)
    run = Run(tmp_path)
    run.feed(5)
    executor = run.sim.driver.executor
    assert isinstance(executor, InProcess)
    executor.elsewhere[0] = run.replicas.groups[0][0]
    run.feed(1)
    assert run.sim.driver.last is not None
    assert (run.sim.driver.last.attempts, run.sim.driver.last.elsewhere, run.fetched) == (1, 1, 0)
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
    assert plan.protocol == (protocol if protocol != "auto" else plan.protocol)
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


def test_what_a_compaction_made_waits_for_replicas_and_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "AHEAD_S", 1e9)
    run = Run(tmp_path, compaction_budget=1 << 20)
    run.agents.pieces = 0
    run.feed(30, words=60)
    made = run.sim.driver.upkeep.compactions
    assert made > 0
    history = run.sim.driver.journal.history
    assert not any(segment.name.split("/")[-1].split("-")[2].startswith("c") for segment in history.manifest.segments())
    run.agents.pieces = 1000
    run.feed(3, words=60)
    after = run.sim.driver.journal.history
    assert any(segment.name.split("/")[-1].split("-")[2].startswith("c") for segment in after.manifest.segments())
    run.check()


def test_who_was_only_asked_to_hold_a_replica_is_not_said_to_have_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.agents.pieces = 0  # they take nothing yet
    run.feed(4)
    assert all(run.replicas.groups.values())
    assert not any(run.sim.driver.journal.history.replicas.values())
    run.agents.pieces = 1 << 30
    run.feed(3)
    assert run.sim.driver.journal.history.replicas == run.replicas.groups
    run.check()


def test_a_worker_that_is_being_drained_gets_no_replicas(tmp_path: Path) -> None:
    run = Run(tmp_path, workers=("0", "1", "2", "3"), slots=8)
    run.feed(4)
    drain = run.sim.apply(plan_drain(run.sim.layout, "3", strategy=ms.Fluid()))
    run.feed(2)
    outcome = run.sim.outcome(drain)
    assert outcome is not None
    assert outcome.state == "running"
    assert all(members and "3" not in members for members in run.replicas.groups.values())
    run.feed(1)
    run.check()
