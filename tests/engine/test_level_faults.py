"""G1-G3, G6 and G7 on a graph of three levels with timers and two outputs: whatever fails, it is the oracle's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from millstream.engine import strong
from millstream.engine.host import NOWHERE
from millstream.engine.spec import EpochTask, Here, SlotTask
from millstream.errors import Fenced, MillstreamError
from millstream.protocol.epochs import Report
from millstream.store import names
from millstream.store.objects import ObjectStore, open_store
from millstream.testing import Crash, FaultyStore, Simulated
from millstream.testing.simulated import InProcess
from three_levels import EVENTS, Event, Oracle, a_history, three_levels

KINDS = {"weak": ("weak", "weak"), "strong": ("strong", "weak"), "all strong": ("strong", "strong")}


def run(sim: Simulated, history: Sequence[Sequence[Event]], delivered: Any, numbers: Iterable[int]) -> None:
    sim.delivered = delivered
    for number in numbers:
        sim.feed(epoch=number, events=history[number])


def expected(history: Sequence[Sequence[Event]]) -> Oracle:
    oracle = Oracle()
    for events in history:
        oracle.feed(events)
    return oracle


@pytest.mark.parametrize("kind", KINDS)
def test_three_levels_equal_a_sequential_run(kind: str, rng: random.Random) -> None:
    history = a_history(rng, 25)
    sim = Simulated(three_levels(*KINDS[kind]), EVENTS, slots=3, map_tasks=3)
    run(sim, history, sim.delivered, range(25))
    oracle = expected(history)
    oracle.check(sim)
    assert sum(reminded.total() for reminded in oracle.reminded) > 10, "timers of the third level fired"


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("weak", "lose"),
        ("weak", "crash_after"),
        *(("all strong", mode) for mode in ("refuse", "lose", "crash", "crash_after")),
    ],
)
def test_a_store_that_fails_on_any_operation_of_any_level_costs_nothing_but_a_restart(
    kind: str, mode: str, rng: random.Random
) -> None:
    """For every k: the k-th store operation of an epoch fails; a restart on the healthy store goes on exactly."""
    history = a_history(rng, 4)
    oracle = expected(history)
    begun = Simulated(three_levels(*KINDS[kind]), EVENTS)
    run(begun, history, begun.delivered, range(2))
    k, finished, met = 1, False, 0
    while not finished:
        store, delivered = open_store("memory://"), copy.deepcopy(begun.delivered)
        for item in begun.store.list(""):
            store.put(item.name, begun.store.get(item.name) or b"")
        faulty = FaultyStore(store, fail_at=k, mode=mode)
        try:
            sim = Simulated(three_levels(*KINDS[kind]), EVENTS, faulty)
            run(sim, history, delivered, [2])
            finished = faulty.operations < k
            assert sim.driver.last is not None
            met += sim.driver.last.attempts - 1
        except (Crash, MillstreamError):
            pass
        sim = Simulated(three_levels(*KINDS[kind]), EVENTS, store)
        run(sim, history, delivered, range(max(0, sim.epoch), 4))
        oracle.check(sim)
        k += 1
    assert k > 30, "an epoch of three levels touches the store more often"
    assert "crash" in mode or met > 5, "some failures cost an attempt only"


@pytest.mark.parametrize("moment", ["planned", "executed", "committed", "delivering", "delivered"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_of_three_levels_that_dies_at_any_moment_is_followed_exactly(
    kind: str, moment: str, rng: random.Random
) -> None:
    history, store = a_history(rng, 8), open_store("memory://")
    delivered: Any = None
    for epoch in range(8):  # it dies in every one of them

        def die(at: str, _: int) -> None:
            if at == moment:
                raise Crash(moment)

        sim = Simulated(three_levels(*KINDS[kind]), EVENTS, store, observe=die)
        delivered = delivered or sim.delivered
        with pytest.raises(Crash):
            run(sim, history, delivered, [epoch])
        sim = Simulated(three_levels(*KINDS[kind]), EVENTS, store)
        run(sim, history, delivered, [epoch])
    expected(history).check(sim)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_that_dies_between_two_tasks_of_a_level_is_followed_exactly(
    kind: str, level: int, rng: random.Random
) -> None:
    history, store = a_history(rng, 6), open_store("memory://")
    delivered: Any = None
    for epoch in range(6):
        sim = Simulated(three_levels(*KINDS[kind]), EVENTS, store, slots=2)
        delivered = delivered or sim.delivered
        before(sim, level, 1, crash)
        with pytest.raises(Crash):
            run(sim, history, delivered, [epoch])
        sim = Simulated(three_levels(*KINDS[kind]), EVENTS, store, slots=2)
        run(sim, history, delivered, [epoch])
    expected(history).check(sim)


def crash(*_: Any) -> None:
    raise Crash


def before(sim: Simulated, level: int, slot: int, act: Callable[..., None]) -> None:
    """Calls a function once, before the task of a level and slot is run."""
    executor = sim.driver.executor
    assert isinstance(executor, InProcess)
    sim.driver.executor = Interrupted(executor.store, executor.map_tasks, (level, slot), act)


class Interrupted(InProcess):
    """Calls a function before one of the tasks."""

    def __init__(self, store: ObjectStore, map_tasks: int, place: tuple[int, int], act: Any) -> None:
        super().__init__(store, map_tasks)
        self.at, self.act = place, act

    def execute(
        self, spec: Any, task: EpochTask, slots: Sequence[SlotTask], records: Any, limit_s: float | None = None
    ) -> tuple[list[Report], int]:
        original = strong.host

        def host(
            spec: Any,
            task: EpochTask,
            level: int,
            mine: SlotTask,
            payloads: Any,
            store: ObjectStore,
            here: Here = NOWHERE,
        ) -> Any:
            if (level, mine.slot) == self.at and self.act is not None:
                act, self.act = self.act, None
                act(spec, task, level, mine, payloads, store)
            return original(spec, task, level, mine, payloads, store, here)

        strong.host = host
        try:
            return super().execute(spec, task, slots, records)
        finally:
            strong.host = original


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", [2, 3])
def test_a_driver_that_was_replaced_while_a_level_ran_writes_nothing_that_counts(
    kind: str, level: int, rng: random.Random
) -> None:
    """The zombie goes on with level 2 or 3 after the other driver has committed the same epoch, and more."""
    history, store = a_history(rng, 8), open_store("memory://")
    zombie = Simulated(three_levels(*KINDS[kind]), EVENTS, store, slots=2)
    run(zombie, history, zombie.delivered, range(3))
    delivered = zombie.delivered
    rivals: list[Simulated] = []

    def take_over(*_: Any) -> None:
        rivals.append(Simulated(three_levels(*KINDS[kind]), EVENTS, store, slots=2))
        run(rivals[0], history, delivered, range(3, 6))

    before(zombie, level, 0, take_over)
    zombie.delivered = {sink: {} for sink in delivered}
    with pytest.raises(Fenced):
        zombie.feed(events=history[3])
    [rival] = rivals
    late = {item.name for item in store.list("") if names.maker_of(item.name) == (1, 3, "a", 0)}
    assert any(name.startswith(names.SEGMENTS) for name in late)
    assert any(name.startswith(names.PRODUCTIONS) for name in late)
    assert not late & {ref.name for ref in rival.driver.journal.history.manifest.segments()}
    run(rival, history, delivered, range(6, 8))
    expected(history).check(rival)
    rival.driver.upkeep.collect(rival.driver.journal)
    assert not late & {item.name for item in store.list("")}, "and what it wrote is collected"
    expected(history).check(rival)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_of_an_aborted_attempt_that_wakes_late_writes_nothing_that_counts(kind: str, rng: random.Random) -> None:
    """A level-2 task of attempt 0 comes to its end when attempt 1 and the epochs after it are committed."""
    history = a_history(rng, 8)
    sim = Simulated(three_levels(*KINDS[kind]), EVENTS, slots=2)
    run(sim, history, sim.delivered, range(3))
    asleep: list[Any] = []

    def sleep(*task: Any) -> None:
        asleep.append(task)
        raise ConnectionError("the worker is gone")

    healthy = sim.driver.executor
    before(sim, 2, 1, sleep)
    with pytest.raises(ConnectionError):
        sim.feed(epoch=3, events=history[3])
    sim.driver.executor = healthy
    sim.driver.claim()  # as a restart would; the attempt is aborted
    run(sim, history, sim.delivered, range(3, 6))
    [(spec, task, level, mine, payloads, store)] = asleep
    assert (task.epoch, level, mine.slot) == (3, 2, 1)
    present = {item.name for item in store.list("")}
    woken = strong.host_once(spec, task, level, mine, payloads, store)
    list(woken.payloads(task, store))
    wrote = {item.name for item in store.list("")} - present
    assert any(name.startswith(names.SEGMENTS) for name in wrote)
    assert any(name.startswith(names.STRONG) for name in wrote) == (kind == "all strong")
    run(sim, history, sim.delivered, range(6, 8))
    expected(history).check(sim)
    sim.driver.upkeep.collect(sim.driver.journal)
    assert not wrote & {item.name for item in store.list("")}
    expected(history).check(sim)
