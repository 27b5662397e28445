"""Handing over: has the next rounds of migrations prepared, and written through when they are due. See
`protocol.handover` for the rules. What is remembered here is never journaled: a driver that takes over does without.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from millstream.engine.placing import Placer
from millstream.engine.replicating import Replicator
from millstream.protocol.epochs import History, Report
from millstream.protocol.handover import MOST_ROUNDS, Coming, of_round, upcoming
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.routing import RoutingTable
from millstream.protocol.steering import Outcome

CHECK_FROM = 64 << 20
"""So many bytes are checked within an epoch without anybody noticing."""
CHECK_WAIT_S = 15.0
"""How long a round whose bytes are there waits at most until they have been checked."""


class Handover:
    """The migrations of one driver, as far as they are prepared."""

    def __init__(self, replicator: Replicator | None, placer: Placer) -> None:
        self._replicator, self._placer = replicator, placer
        self._plans: dict[int, MigrationPlan] = {}
        self._coming: dict[str, Coming] = {}
        self._lacks: dict[str, tuple[int, int]] = {}  # as of the last time that it was asked
        self._writing: frozenset[int] = frozenset()
        self._busy: frozenset[str] = frozenset()  # the workers that had tasks in the last epoch
        self._unchecked: dict[str, int] = {}  # by worker, of what was about to move there in the last epoch
        self._complete: dict[tuple[int, int], float] = {}  # since when nothing is lacking for a round
        self.due: frozenset[str] = frozenset()
        """What is about to move next, and after that."""
        self.unchecked: frozenset[int] = frozenset()
        """The migrations whose next round should wait until its targets have checked what it brings."""
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
        self._lacks, due = {}, set()
        found = {}
        for number in plans:
            due |= {key for key in coming for more in (0, 1) if of_round(key, number, done[number] + more)}
            mine = [key for key in coming if of_round(key, number, done[number])]
            self._lacks |= {key: self._replicator.lacks_of_move(key, history) for key in mine}
            found[number] = max((self._lacks[key] for key in mine), default=(0, 0))
        self.due, self.unchecked = frozenset(due), self._to_check(plans, done, placed, found)
        return found

    def _to_check(
        self,
        plans: Mapping[int, MigrationPlan],
        done: Mapping[int, int],
        placed: Mapping[int, str],
        lacking: Mapping[int, tuple[int, int]],
    ) -> frozenset[int]:
        """The migrations whose next round brings much that is there, and has not been checked there."""
        now, known = time.monotonic(), self._complete
        rounds = {(number, done[number]): older for number, (_, older) in lacking.items()}
        self._complete = {each: known.get(each, now) for each, older in rounds.items() if not older or each in known}
        found = set()
        for (number, at), since in self._complete.items():
            sizes: dict[str, int] = {}
            for move in plans[number].rounds[at] if at < len(plans[number].rounds) else ():
                worker = placed.get(move.target, "")
                if worker != placed.get(move.origin):
                    sizes[worker] = sizes.get(worker, 0) + move.bytes
            told = self._unchecked if number in self.through else sizes
            left = [told.get(worker, 0) for worker in sizes if worker in self._busy]
            if now - since < CHECK_WAIT_S and max(left, default=0) > CHECK_FROM:
                found.add(number)
        return frozenset(found)

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
            lacks = [self._lacks.get(key) or self._replicator.lacks_of_move(key, history) for key in mine]
            if mine and not any(older for _, older in lacks):
                due += mine
                writing.add(number)
        self._writing = frozenset(writing)
        return self._replicator.through(due, tables)

    def committed(
        self, epoch: int, reports: Sequence[Report], slots: Sequence[int], workers: Mapping[str, Sequence[int]]
    ) -> None:
        """The epoch that was asked about last is committed, with these reports, of tasks of these slots."""
        self.through = self._writing
        where = {slot: worker for worker, each in workers.items() for slot in each}
        self._busy, self._unchecked = frozenset(workers), {}
        for report in reports:
            worker, left = where.get(slots[report.slot], ""), report.timings_ms.get("unchecked")
            if left is not None:
                self._unchecked[worker] = max(self._unchecked.get(worker, 0), int(left))
        if self._replicator is not None:
            self._replicator.sent_through(epoch, reports)
