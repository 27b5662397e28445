"""Replicas on the simulator: what dies, and when, changes what is fetched, and no result."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

import millstream as ms
from millstream.engine import driver as driver_module
from millstream.engine import load_history, replicating, upkeep
from millstream.engine.placing import Placer
from millstream.engine.replicating import Replicator
from millstream.protocol.epochs import Epoch, History
from millstream.protocol.planner import plan_drain, plan_rescale
from millstream.protocol.replication import Order, Progress
from millstream.protocol.routing import RoutingTable
from millstream.store import segments
from millstream.store.cache import WorkerCache
from millstream.testing import agents as agents_module
from millstream.testing import simulated as simulated_module
from millstream.testing.agents import InProcessAgents
from millstream.testing.simulated import InProcess
from replicated import Run
from words import Count


@pytest.fixture(autouse=True)
def every_byte_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicating, "FEW", 0)
    monkeypatch.setattr(segments.CACHE, "_open", OrderedDict())  # as in a process that has run nothing else


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
                run.sim.apply(plan_drain(run.sim.layout, worker, strategy=ms.Batched(8, merge=False)))
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


def test_only_those_behind_another_member_of_a_chain_wait_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: dict[str, Order] = {}
    tell = InProcessAgents.tell

    def noted(self: InProcessAgents, worker: str, order: Order) -> Progress:
        orders[worker] = order
        return tell(self, worker, order)

    monkeypatch.setattr(InProcessAgents, "tell", noted)
    run = Run(tmp_path, replicas=3, workers=("0", "1", "2", "3", "4"), slots=5)
    run.feed(3)
    chained = {(want.key, worker): want.chained for worker, order in orders.items() for want in order.wants}
    for slot, members in run.replicas.groups.items():
        assert [chained[f"slot {slot}", member] for member in members] == [False, True, True]
    run.check()


class Hosts(Four):
    """Workers on hosts that a test names, and changes."""

    def __init__(self, **hosts: str) -> None:
        self.named = hosts

    def hosts(self) -> dict[str, str]:
        return self.named


def test_by_default_there_are_replicas_as_soon_as_there_is_a_second_host() -> None:
    history = History(workers={"a": (0,), "b": (1,)}, tables={"count": RoutingTable.even(2, 4)})
    hosts = Hosts(a="one", b="one")
    by_default = Replicator(hosts, None, background=False)
    by_default.after_commit(history)
    assert not by_default.kept
    assert not any(by_default.groups.values())
    asked_for = Replicator(hosts, 1, background=False)
    asked_for.after_commit(history)
    assert asked_for.groups == {0: ("b",), 1: ("a",)}, "who asks for replicas has them on one host, too"
    hosts.named = {"a": "one", "b": "one", "c": "other"}
    by_default.after_commit(history)
    assert by_default.kept
    assert by_default.groups == {0: ("c",), 1: ("c",)}
    hosts.named = {"a": "one", "b": "one"}
    by_default.after_commit(history)
    assert by_default.kept, "what the host that is left holds may be needed"


class OneCore(Four):
    """Workers with one core each, on which the start of an agent takes long; and a clock that the test moves.

    Tasks wait for the core of the worker that they are placed on, as under Spark's delay scheduling: until it is free,
    or until `LOCALITY_WAIT_S` has passed.
    """

    LOCALITY_WAIT_S = 10.0
    START_S = 15.0

    def __init__(self, workers: str) -> None:
        self.workers, self.now = workers, 0.0
        self.busy_until: dict[str, float] = {}

    def hosts(self) -> dict[str, str]:
        return {worker: f"host {worker}" for worker in self.workers}

    def start(self, workers: Sequence[str]) -> dict[str, str]:
        for worker in workers:
            self.busy_until.setdefault(worker, self.now + self.START_S)
        return {worker: worker for worker in workers if self.busy_until[worker] <= self.now}

    def scheduling_s(self, placed: dict[int, str]) -> float:
        """How long the last task of an epoch waits before it runs."""
        waits = [self.busy_until.get(worker, 0.0) - self.now for worker in placed.values()]
        return min(self.LOCALITY_WAIT_S, max([0.0, *waits]))


@pytest.mark.parametrize("stays", [True, False])
def test_no_epoch_waits_for_a_core_on_which_an_agent_is_started(stays: bool) -> None:
    """A worker joins, and perhaps takes the place of one that was lost. Its first epoch took ten seconds."""
    cluster = OneCore("ab")
    cluster.busy_until = {"a": 0.0, "b": 0.0}
    tables = {"count": RoutingTable.even(4, 4)}
    replicator = Replicator(cluster, 1, background=False, clock=lambda: cluster.now)
    placer = Placer(cluster.hosts)
    placer.replicas = replicator
    spent = 0.0
    for epoch in range(80):
        if epoch == 10:
            cluster.workers = "abc" if stays else "bc"
        placed = placer.place(range(4), (), ())
        spent += cluster.scheduling_s(placed)
        cluster.now += 1.0
        workers: dict[str, tuple[int, ...]] = {}
        for slot, worker in placed.items():
            workers[worker] = (*workers.get(worker, ()), slot)
        replicator.after_commit(History(epoch=Epoch(epoch), workers=workers, tables=tables))
    assert spent == 0.0
    assert "c" in placer.placed.values(), "once the agent has started, the new worker is used"
