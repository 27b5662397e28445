"""Draining a worker: its slots stay until they are empty, and its name means something to its driver only."""

from __future__ import annotations

import millstream as ms
from jobs import EVENTS, two_steps
from millstream.control.asked import sentence
from millstream.protocol.planner import plan_drain, plan_rescale
from millstream.protocol.steering import leaving
from millstream.testing import Simulated


def a_query(**options: object) -> Simulated:
    sim = Simulated(two_steps(), EVENTS, slots=4, bin_bits=4, workers=("0", "1"), **options)  # type: ignore[arg-type]
    sim.feed(events=[("a", 1), ("b", 2), ("c", 3)])
    return sim


def workers(sim: Simulated) -> dict[str, tuple[int, ...]]:
    return sim.driver.journal.history.workers


def test_the_slots_of_a_worker_stay_there_until_they_are_empty() -> None:
    sim = a_query()
    before = workers(sim)
    number = sim.apply(plan_drain(sim.layout, "1", strategy=ms.Batched(2, merge=False)))
    held = []
    for _ in range(4):
        sim.feed(events=[("a", 1)])
        held.append(workers(sim))
    outcome = sim.outcome(number)
    assert outcome is not None
    assert (outcome.state, outcome.rounds) == ("done", 4)
    assert all(set(each["0"]) == set(before["0"]) for each in held), "nothing had to move as a whole"
    assert [("1" in each) for each in held] == [True, True, True, False]
    sim.apply(plan_rescale(sim.layout, 5, strategy=ms.AllAtOnce()))
    for _ in range(130):
        sim.cancel(999)  # many answers that are over do not make it forget
    for _ in range(10):
        sim.feed(events=[])
    assert set(workers(sim)) == {"0"}, "no slot is placed there"


def test_a_drain_ends_with_its_driver() -> None:
    sim = a_query()
    number = sim.apply(plan_drain(sim.layout, "1", strategy=ms.Fluid()))
    sim.feed(events=[("a", 1)])
    heard_later = plan_drain(sim.layout, "1", strategy=ms.AllAtOnce())
    sim.restart()
    other = sim.apply(heard_later)
    sim.feed(events=[("a", 1)])
    ended, refused = sim.outcome(number), sim.outcome(other)
    assert ended is not None
    assert (ended.state, ended.done) == ("cancelled", 1)
    assert "was one of driver 1, and this is driver 2" in ended.reason
    assert refused is not None
    assert (refused.state, refused.stale) == ("refused", True)


def test_a_worker_that_is_gone_is_not_drained() -> None:
    sim = a_query()
    plan = plan_drain(sim.layout, "1", strategy=ms.AllAtOnce())
    sim.workers = ("0", "2")
    sim.feed(events=[("a", 1)])
    number = sim.apply(plan)
    sim.feed(events=[("a", 1)])
    outcome = sim.outcome(number)
    assert outcome is not None
    assert (outcome.state, outcome.reason) == ("refused", "worker '1' is gone; there are 0, 2")


def test_it_is_told_when_a_drained_worker_is_empty() -> None:
    sim = a_query()
    number = sim.apply(plan_drain(sim.layout, "1", strategy=ms.AllAtOnce()))
    sim.feed(events=[("a", 1)])
    done = sim.outcome(number)
    assert done is not None
    assert (done.state, done.empty_ms) == ("done", 0), "that epoch may still have run something there"
    sim.feed(events=[("a", 1)])
    empty = sim.outcome(number)
    assert empty is not None
    assert empty.empty_ms > 0
    assert "worker 1 is empty" in sentence(empty)
    sim.feed(events=[("a", 1)])
    assert sim.outcome(number) == empty, "once"


def test_a_worker_that_is_not_empty_by_the_next_epoch_is_empty_later() -> None:
    sim = a_query()
    busy = {"1"}
    sim.driver.executor.retire = lambda workers: dict.fromkeys(set(workers) - busy, "")  # type: ignore[method-assign]
    number = sim.apply(plan_drain(sim.layout, "1", strategy=ms.AllAtOnce()))
    for _ in range(3):
        sim.feed(events=[("a", 1)])
    known = sim.outcome(number)
    assert known is not None
    assert (known.state, known.empty_ms) == ("done", 0)
    assert leaving(known, sim.driver.journal.history.generation)
    busy.clear()
    sim.feed(events=[("a", 1)])
    known = sim.outcome(number)
    assert known is not None
    assert known.empty_ms > 0


def test_a_worker_that_cannot_be_taken_out_of_service_is_not_waited_for() -> None:
    sim = a_query()
    sim.driver.executor.retire = lambda workers: dict.fromkeys(workers, "no way")  # type: ignore[method-assign]
    number = sim.apply(plan_drain(sim.layout, "1", strategy=ms.AllAtOnce()))
    sim.feed(events=[("a", 1)])
    sim.feed(events=[("a", 1)])
    known = sim.outcome(number)
    assert known is not None
    assert (known.state, known.reason, known.empty_ms) == ("done", "no way", 0)
    assert not leaving(known, sim.driver.journal.history.generation)


def test_only_a_drain_of_all_steps_lets_the_worker_leave() -> None:
    sim = a_query()
    some = plan_drain(sim.layout, "1", steps=sim.graph.steps[0].name)
    assert some.drains == ""
    assert plan_drain(sim.layout, "1").drains == "1"


def test_a_drain_is_refused_if_another_slot_has_come_to_the_worker() -> None:
    sim = a_query()
    plan = plan_drain(sim.layout, "1", strategy=ms.AllAtOnce())
    sim.workers = ("1",)
    sim.feed(events=[("a", 1)])
    assert len(workers(sim)["1"]) == 4
    number = sim.apply(plan)
    sim.feed(events=[("a", 1)])
    known = sim.outcome(number)
    assert known is not None
    assert (known.state, known.stale) == ("refused", True)
    assert "by now, which the plan does not empty" in known.reason
