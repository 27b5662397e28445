"""Random lives of a query against a dictionary: feeds, replays, crashes anywhere, rivals, late zombies (G1-G3, G6)."""

from __future__ import annotations

import contextlib
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jobs import EVENTS, Event, Oracle, two_steps
from millstream.engine import step
from millstream.errors import Fenced, MillstreamError
from millstream.store.objects import open_store
from millstream.testing import Crash, FaultyStore, Simulated

TAKE_UP = step.TAKE_UP
events_of_an_epoch = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None, "dd", ""]), st.integers(-3, 7)), max_size=12
)


class LifeOfAQuery(RuleBasedStateMachine):
    """`offered` is what Spark's checkpoint holds: the epochs it has given out, each with its records."""

    def __init__(self) -> None:
        super().__init__()
        self.store = open_store("memory://")
        self.offered: list[list[Event]] = []
        self.finished = 0  # epochs that Spark noted as finished
        self.delivered: Any = None
        self.zombies: list[Simulated] = []
        self.sim = self.start(self.store)

    def start(self, store: Any) -> Simulated:
        sim = Simulated(two_steps(), EVENTS, store, slots=2, retain=2, compaction_budget=3000)
        if self.delivered is None:
            self.delivered = sim.delivered
        sim.delivered = self.delivered
        return sim

    def catch_up(self) -> None:
        """What Spark does: offers every epoch that it has not noted as finished, in order, with the same records."""
        while self.finished < len(self.offered):
            self.sim.feed(epoch=self.finished, events=self.offered[self.finished])
            self.finished += 1

    @rule(events=events_of_an_epoch)
    def feed(self, events: list[Event]) -> None:
        self.offered.append(events)
        self.catch_up()

    @rule(
        events=events_of_an_epoch,
        operation=st.integers(1, 40),
        mode=st.sampled_from(["refuse", "lose", "crash", "crash_after"]),
    )
    def fail_somewhere_and_restart(self, events: list[Event], operation: int, mode: str) -> None:
        self.offered.append(events)
        with contextlib.suppress(Crash, MillstreamError):
            self.sim = self.start(FaultyStore(self.store, operation, mode))
            self.catch_up()
        self.sim = self.start(self.store)
        self.catch_up()

    @rule(moment=st.sampled_from(["planned", "executed", "committed", "delivered"]), events=events_of_an_epoch)
    def die_at_a_moment_and_restart(self, moment: str, events: list[Event]) -> None:
        self.offered.append(events)

        def die(at: str, epoch: int) -> None:
            if at == moment:
                raise Crash(moment)

        self.sim.driver._observe = die
        with contextlib.suppress(Crash):
            self.catch_up()
        self.sim = self.start(self.store)
        self.catch_up()

    @rule()
    def a_rival_takes_over(self) -> None:
        self.zombies.append(self.sim)
        self.sim = self.start(self.store)

    @precondition(lambda self: self.zombies)
    @rule(events=events_of_an_epoch, data=st.data())
    def a_zombie_wakes(self, events: list[Event], data: st.DataObject) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        zombie.driver.upkeep.collect(zombie.driver.journal)
        try:
            zombie.feed(events=events)
        except Fenced:
            return
        raise AssertionError("a zombie wrote a journal entry that counts")

    @rule(times=st.sampled_from([0, 2, 100]))
    def take_up_more_or_less(self, times: int) -> None:
        step.TAKE_UP = times

    def teardown(self) -> None:
        step.TAKE_UP = TAKE_UP

    @rule()
    def collect_garbage(self) -> None:
        self.sim.driver.upkeep.collect(self.sim.driver.journal)

    @invariant()
    def state_and_outputs_are_the_oracles(self) -> None:
        oracle = Oracle()
        for events in self.offered:
            oracle.feed(events)
        oracle.check(self.sim)


LifeOfAQuery.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestLifeOfAQuery = LifeOfAQuery.TestCase
