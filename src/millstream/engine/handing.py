"""Handing over: has the next rounds of migrations prepared, and written through when they are due. See
`protocol.handover` for the rules. What is remembered here is never journaled: a driver that takes over does without.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from millstream.engine.placing import Placer
from millstream.engine.replicating import Replicator
from millstream.protocol.epochs import History, Report
from millstream.protocol.handover import MOST_ROUNDS, Coming, of_round, upcoming
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.routing import RoutingTable
from millstream.protocol.steering import Outcome


class Handover:
    """The migrations of one driver, as far as they are prepared."""

    def __init__(self, replicator: Replicator | None, placer: Placer) -> None:
        self._replicator, self._placer = replicator, placer
        self._plans: dict[int, MigrationPlan] = {}
        self._coming: dict[str, Coming] = {}
        self._writing: frozenset[int] = frozenset()
        self.through: frozenset[int] = frozenset()
        """The migrations whose next round was written through in the last epoch, as far as that can be done."""

    def lacking(
        self, asked: Mapping[int, object], history: History, closing: Collection[str], closed: Collection[str]
    ) -> dict[int, tuple[int, int]]:
        """Has the next rounds of migrations prepared; how many bytes are lacking for the next one of each."""
        if self._replicator is None:
            return {}
        plans = {number: ask for number, ask in asked.items() if isinstance(ask, MigrationPlan) and ask.prepared}
        closing = {*closing, *(plan.drains for plan in plans.values() if plan.drains)}
        done = {number: history.outcomes[number].done if number in history.outcomes else 0 for number in plans}
        ahead = [plan.rounds[done[number] : done[number] + MOST_ROUNDS] for number, plan in plans.items()]
        targets = sorted({move.target for rounds in ahead for moves in rounds for move in moves})
        placed = self._placer.promise(targets, closing, closed) if plans else {}
        coming: dict[str, Coming] = {}
        for number, plan in sorted(plans.items()):
            coming.update(upcoming(number, plan, done[number], placed))
        self._plans, self._coming = plans, coming
        self._replicator.expect(coming)
        found = {}
        for number in plans:
            mine = [key for key in coming if of_round(key, number, done[number])]
            found[number] = max((self._replicator.lacks_of_move(key, history) for key in mine), default=(0, 0))
        return found

    def writing(
        self, outcomes: Mapping[int, Outcome], tables: Mapping[str, RoutingTable], history: History, epoch: int
    ) -> dict[int, dict[str, tuple[str, ...]]]:
        """Which slots send what they write in this epoch to which workers, of which steps: for the rounds that are due
        at the next one, if they lack nothing else. `outcomes` and `tables` are those of this epoch."""
        due: list[str] = []
        writing = set()
        if self._replicator is None:
            return {}
        for number, plan in self._plans.items():
            outcome = outcomes.get(number)
            if outcome is None or outcome.state != "running" or epoch < outcome.last + plan.gap:
                continue
            mine = [key for key in self._coming if of_round(key, number, outcome.done)]
            if mine and not any(self._replicator.lacks_of_move(key, history)[1] for key in mine):
                due += mine
                writing.add(number)
        self._writing = frozenset(writing)
        return self._replicator.through(due, tables)

    def committed(self, epoch: int, reports: Sequence[Report]) -> None:
        """The epoch that was asked about last is committed, with these reports."""
        self.through = self._writing
        if self._replicator is not None:
            self._replicator.sent_through(epoch, reports)
