"""Adapting: after each commit, asks a policy what to do about the query's load, and has it done by commands.

Rules
-----
- What is decided is sent as any other command: it is durable, answered, shown in the history, and can be cancelled.
- A policy that fails is told of, and asked again after the next epoch. It never fails the query.
- What was decided, and why, is remembered for those who ask. With `dry_run` nothing is done about it.
- A new driver begins with no loads and an empty memory: it has seen a few epochs before it does anything.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from millstream.errors import MillstreamError
from millstream.protocol.adaptation import Decision, Memory, Policy
from millstream.protocol.epochs import History, Report
from millstream.protocol.layout import Layout
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.modification import LIFE
from millstream.protocol.statistics import Load, Loads
from millstream.protocol.survey import Facts, Worker

KEPT = 256
WAITS = 64
"""For how many epochs workers that were asked for are waited for."""

_LOG = logging.getLogger("millstream")


@dataclass(frozen=True, slots=True)
class Decided:
    """What was decided after an epoch. Made by `RunningQuery.decisions`."""

    epoch: int
    """After which epoch."""
    decision: Decision
    """What, and why."""
    command: int = -1
    """The number of the command that was sent; -1 if none was."""

    def __str__(self) -> str:
        sent = f" (command {self.command})" if self.command >= 0 else ""
        return f"after epoch {self.epoch}{sent}: {self.decision}"


class Adapter:
    """Asks one policy, for one driver.

    `send` sends a plan as a command and gives its number; `request` asks for so many workers in all, and says how many
    of these will come that are not there yet.
    """

    def __init__(
        self,
        policy: Policy,
        send: Callable[[MigrationPlan], int],
        request: Callable[[int], int],
        dry_run: bool = False,
    ) -> None:
        self._policy, self._send, self._request, self._dry_run = policy, send, request, dry_run
        self._memory = Memory()
        self._loads: dict[str, Loads] = {}
        self._wanted, self._since = 0, 0  # workers in all, and since which epoch
        self.decided: deque[Decided] = deque(maxlen=KEPT)

    def after_commit(
        self,
        history: History,
        layout: Layout,
        loads: Mapping[str, bytes],
        busy: Mapping[str, float],
        cores: Mapping[str, float],
        backlog: float = 0.0,
    ) -> None:
        """Looks at an epoch. `loads` are the steps', `busy` is the share of its cores that each worker was at work, and
        `backlog` how many epochs like the last one it takes to do what waits in the sources."""
        for step, data in loads.items():
            self._loads[step] = self._loads.get(step, Loads()).after(history.epoch, Load.unpack(data))
        moves = [outcome for outcome in history.outcomes.values() if outcome.state not in LIFE]
        facts = Facts(
            history.epoch,
            layout,
            {step: each for step, each in self._loads.items() if step in layout.tables},
            {worker: Worker(many, busy.get(worker, 0.0)) for worker, many in cores.items()},
            backlog=backlog,
            moving=sum(not outcome.over for outcome in moves),
            asked=max(0, self._wanted - len(cores)) if history.epoch - self._since < WAITS else 0,
            held=layout.replicas,
            moved=[(outcome.last, outcome.bytes) for outcome in moves if outcome.over and outcome.last >= 0],
        )
        try:
            decision, self._memory = self._policy.decide(facts, self._memory)
            command = self._carried_out(decision, history.epoch, len(cores))
        except Exception as error:
            _LOG.exception("adapting failed and will be tried again")
            decision, command = Decision(f"the policy failed: {type(error).__name__}: {error}"), -1
        if not self.decided or decision != self.decided[-1].decision or command >= 0:
            self.decided.append(Decided(history.epoch, decision, command))

    def _carried_out(self, decision: Decision, epoch: int, workers: int) -> int:
        if not decision.acts or self._dry_run:
            return -1
        if decision.more:
            self._wanted, self._since = workers + self._request(workers + decision.more), epoch
        if decision.gives:
            self._wanted = 0
        if decision.plan is None or not decision.plan.rounds:
            return -1
        try:
            number = self._send(decision.plan)
        except MillstreamError as error:
            _LOG.warning("what was decided could not be sent, and will be decided again: %s", error)
            return -1
        _LOG.info("adapting: %s", decision.why)
        return number


def busy_of(
    reports: Sequence[Report], hosts: Mapping[int, str], cores: Mapping[str, float], took_s: float
) -> dict[str, float]:
    """The share of its cores that each worker was at work, from the CPU time of its tasks; `hosts` is by number of
    task, `took_s` the time from one commit to the next. Routing goes wherever Spark likes: all have their share of it.
    """
    routed = sum(report.timings_ms.get("route", 0.0) for report in reports) / 1000 / max(1.0, sum(cores.values()))
    found = {worker: routed * many for worker, many in cores.items()}
    for report in reports:
        worker = report.elsewhere or hosts.get(report.slot, "")
        found[worker] = found.get(worker, 0.0) + report.timings_ms.get("cpu", 0.0) / 1000
    return {worker: spent / max(1e-3, took_s) / cores.get(worker, 1.0) for worker, spent in found.items()}
