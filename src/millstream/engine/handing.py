"""Handing over: has the next rounds of migrations prepared, and written through when they are due. See
`protocol.handover` for the rules. What is remembered here is never journaled: a driver that takes over does without.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from millstream.engine.placing import Placer
from millstream.engine.replicating import Replicator
from millstream.protocol.affinity import brought
from millstream.protocol.epochs import History, Report
from millstream.protocol.handover import MOST_ROUNDS, Coming, keys_of, upcoming
from millstream.protocol.migration import MigrationPlan, rounds_at_once
from millstream.protocol.pacing import GUESSED, MoveCosts
from millstream.protocol.routing import RoutingTable
from millstream.protocol.steering import Outcome

CHECK_FROM = 64 << 20
"""So many bytes are checked within an epoch without anybody noticing."""
CHECK_WAIT_S = 15.0
"""How long a round whose bytes are there waits at most until they have been checked."""


@dataclass(frozen=True, slots=True)
class _Round:
    """The next round of a migration."""

    plan: MigrationPlan
    at: int
    until: int
    """Which rounds are carried out together, if not all of them are one."""
    lacks: dict[str, tuple[int, int]]
    """By worker: the bytes that are not there yet, all of them and those that are older than the last epoch."""
    complete: float
    """Since when nothing older is lacking; infinite if something is."""

    @property
    def most(self) -> tuple[int, int]:
        return max(self.lacks.values(), default=(0, 0))

    def brings(self, placed: Mapping[int, str]) -> dict[str, int]:
        """How many bytes come to each worker."""
        found: dict[str, int] = {}
        for moves in self.plan.rounds[self.at : self.until]:
            for move in moves:
                worker = placed.get(move.target, "")
                if worker != placed.get(move.origin):
                    found[worker] = found.get(worker, 0) + move.bytes
        return found


class Handover:
    """The migrations of one driver, as far as they are prepared."""

    def __init__(self, replicator: Replicator | None, placer: Placer) -> None:
        self._replicator, self._placer = replicator, placer
        self._coming: dict[str, Coming] = {}
        self._costs = GUESSED
        self._rounds: dict[int, _Round] = {}  # the next one of each migration, as of the last time that it was asked
        self._writing: dict[int, int] = {}  # by migration, before which round the last epoch's plan wrote through
        self._written: dict[int, int] = {}
        self._left: dict[str, int] = {}  # bytes to check of what was about to move to each worker that had tasks
        self.due: frozenset[str] = frozenset()
        """What is about to move next, and after that."""
        self.unchecked: frozenset[int] = frozenset()
        """The migrations whose next round should wait until its targets have checked what it brings."""
        self.through: frozenset[int] = frozenset()
        """The migrations whose next round was written through in the last epoch, as far as that can be done."""

    def lacking(
        self,
        asked: Mapping[int, object],
        history: History,
        closing: Collection[str],
        closed: Collection[str],
        costs: MoveCosts = GUESSED,
    ) -> dict[int, tuple[int, int]]:
        """Has the next rounds of migrations prepared; how many bytes are lacking for the next one of each, or for those
        that are carried out together. With what moving `costs`, a paced plan's are as many as `steer` will take."""
        if self._replicator is None:
            return {}
        near = {n: ask for n, ask in asked.items() if isinstance(ask, MigrationPlan) and ask.protocol != "direct"}
        plans = {number: plan for number, plan in near.items() if plan.prepared}
        closing = {*closing, *(plan.drains for plan in near.values() if plan.drains)}
        done = {number: history.outcomes[number].done if number in history.outcomes else 0 for number in near}
        until = {number: done[number] + rounds_at_once(plan, done[number], costs) for number, plan in near.items()}
        ahead = [
            move
            for number, plan in near.items()
            for moves in plan.rounds[done[number] : max(until[number], done[number] + MOST_ROUNDS)]
            for move in moves
        ]
        targets = sorted({move.target for move in ahead})
        brings = brought(ahead, self._placer.placed, history.replicas)
        placed = self._placer.promise(targets, closing, closed, brings) if near else {}
        coming: dict[str, Coming] = {}
        for number, plan in sorted(plans.items()):
            coming.update(upcoming(number, plan, done[number], placed, until[number] - done[number]))
        self._coming, self._costs = coming, costs
        self._replicator.expect(coming)
        before, now = self._rounds, time.monotonic()
        self._rounds = {}
        for number, plan in plans.items():
            lacks = self._lacks(keys_of(coming, number, done[number], until[number]), history)
            complete = now if not any(older for _, older in lacks.values()) else math.inf
            if number in before and before[number].at == done[number] and before[number].until >= until[number]:
                complete = min(complete, before[number].complete)
            self._rounds[number] = _Round(plan, done[number], until[number], lacks, complete)
        self.through = frozenset(number for number in self.through if self._written.get(number, 0) >= until[number])
        self.due = frozenset(key for n in plans for key in keys_of(coming, n, done[n], until[n] + 1))
        self.unchecked = frozenset(
            number
            for number, each in self._rounds.items()
            if 0 <= now - each.complete < CHECK_WAIT_S and self._to_check(number, each.brings(placed)) > CHECK_FROM
        )
        return {number: each.most for number, each in self._rounds.items()}

    def _lacks(self, keys: Collection[str], history: History) -> dict[str, tuple[int, int]]:
        """The bytes that each worker lacks of what comes under these names, and how many of them are older."""
        assert self._replicator is not None
        found: dict[str, tuple[int, int]] = {}
        for key in keys:
            lacking, older = self._replicator.lacks_of_move(key, history)
            known = found.get(self._coming[key].worker, (0, 0))
            found[self._coming[key].worker] = (known[0] + lacking, known[1] + older)
        return found

    def _to_check(self, number: int, brings: Mapping[str, int]) -> int:
        """The most that a worker has not checked of what a round brings to it. One without tasks checks nothing, so
        nobody waits for it."""
        left = self._left if number in self.through else brings
        return max((left[worker] for worker in brings if worker in self._left), default=0)

    def writing(
        self, outcomes: Mapping[int, Outcome], tables: Mapping[str, RoutingTable], history: History, epoch: int
    ) -> dict[int, dict[str, tuple[str, ...]]]:
        """Which slots send what they write in this epoch to which workers, of which steps: for the rounds that are due
        at the next one, if they lack nothing else. `outcomes` and `tables` are those of this epoch."""
        due: list[str] = []
        writing: dict[int, int] = {}
        if self._replicator is None:
            return {}
        for number, known in self._rounds.items():
            outcome = outcomes.get(number)
            if outcome is None or outcome.state != "running" or epoch < outcome.last + known.plan.gap:
                continue
            until = outcome.done + rounds_at_once(known.plan, outcome.done, self._costs)
            mine = keys_of(self._coming, number, outcome.done, until)
            lacks = self._lacks(mine, history)
            if mine and not any(older for _, older in lacks.values()):
                due += mine
                writing[number] = until
        self._writing = writing
        return self._replicator.through(due, tables)

    def committed(
        self, epoch: int, reports: Sequence[Report], slots: Sequence[int], workers: Mapping[str, Sequence[int]]
    ) -> None:
        """The epoch that was asked about last is committed, with these reports, of tasks of these slots."""
        self.through, self._written = frozenset(self._writing), self._writing
        where = {slot: worker for worker, each in workers.items() for slot in each}
        self._left = dict.fromkeys(workers, 0)
        for report in reports:
            worker = where.get(slots[report.slot])
            if worker is not None:
                self._left[worker] = max(self._left[worker], report.read.get("unchecked", 0))
        if self._replicator is not None:
            self._replicator.sent_through(epoch, reports)
