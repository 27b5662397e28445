"""Draining a worker: its slots stay until they are empty, and its name means something to its driver only."""

from __future__ import annotations

import millstream as ms
from jobs import EVENTS, two_steps
from millstream.protocol.planner import plan_drain, plan_rescale
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
    number = sim.apply(plan_drain(sim.layout, "1", strategy=ms.Batched(2)))
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
