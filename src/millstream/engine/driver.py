"""The driver's loop: decide, plan, run, judge, commit, deliver. One epoch at a time.

Rules
-----
- Nothing runs before its plan is journaled, and nothing counts before its commit is (G3, G6).
- What to do is decided by `protocol.epochs`; this file gathers the facts and carries the decision out.
- An attempt that Spark failed, or whose receipts differ, is aborted and planned again, at most `MAX_ATTEMPTS` times.
  One whose user code raised is aborted and stops the query.
- Sinks receive an epoch after its commit and before the next plan, in order.
- The named moments of an epoch (`MOMENTS`) are announced to an observer: displays listen, and tests kill there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millstream.engine.delivery import Deliverer
from millstream.engine.listening import Listener
from millstream.engine.spec import EpochTask, SlotTask, code_hash, epoch_task, rules_of, slot_tasks
from millstream.engine.upkeep import Upkeep
from millstream.errors import DamagedObject, MillstreamError, StepError, UserError
from millstream.model.graph import Graph, differences
from millstream.model.times import micros
from millstream.protocol.compaction import DEFAULT_BUDGET, Job
from millstream.protocol.epochs import (
    Abort,
    Attempt,
    Commit,
    Epoch,
    Failure,
    History,
    Plan,
    Redeliver,
    Reject,
    Report,
    decide,
    judge,
)
from millstream.protocol.keyspace import DEFAULT_BIN_BITS
from millstream.protocol.manifest import Edit
from millstream.protocol.planner import Layout
from millstream.protocol.routing import RoutingTable, Slot
from millstream.protocol.steering import Facts, Steering, remembered, steer
from millstream.protocol.time import idle_sources
from millstream.store.control_log import ControlLog
from millstream.store.journal import Journal
from millstream.store.names import Maker

MAX_ATTEMPTS = 4
MOMENTS = ("planned", "executed", "committed", "delivering", "delivered")
Observer = Callable[[str, int], None]


class ExecutionFailed(MillstreamError):
    """The executor could not finish an attempt, for reasons that are not user code: it is worth another try."""


class Executor(Protocol):
    """What runs the parts of an epoch: Spark, or one process in tests."""

    def execute(self, task: EpochTask, slots: Sequence[SlotTask], records: Any) -> tuple[list[Report], int]:
        """Runs an attempt over the epoch's records; the reports of all slots, and the number of producers."""
        ...

    def place(self, slots: Sequence[int], closing: Collection[str], closed: Collection[str]) -> dict[int, str]:
        """The worker that each slot will be tried on first, from now on; see `protocol.placement`."""
        ...

    def compact(self, jobs: Sequence[tuple[Job, Maker, int]]) -> list[Edit]:
        """Runs compactions, each on behalf of a slot."""
        ...


@dataclass(frozen=True, slots=True)
class Options:
    """How a query runs; the values of `Query.start`."""

    slots: int = 2
    bin_bits: int = DEFAULT_BIN_BITS
    retain: int = 8
    compaction_budget: int = DEFAULT_BUDGET
    token: str | None = None
    fetch_limit: int = 0


@dataclass(slots=True)
class EpochFacts:
    """What is known of the last epoch, for displays."""

    epoch: int
    records: dict[str, int]
    duration_ms: float
    parts_ms: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    fetched_bytes: int = 0
    """How much state its workers did not have, and fetched from the store."""


class Driver:
    """Runs the epochs of one query on one store."""

    def __init__(
        self,
        graph: Graph,
        journal: Journal,
        codes: Mapping[str, bytes],
        executor: Executor,
        deliverer: Deliverer,
        options: Options,
        observe: Observer | None = None,
        background: bool = True,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.graph, self.journal, self.executor, self.deliverer = graph, journal, executor, deliverer
        self.store, self.options = journal.store, options
        self.upkeep = Upkeep(self.store, graph, executor, options.compaction_budget, background)
        self.last: EpochFacts | None = None
        self._clock, self._rules = clock, rules_of(graph)
        self._since_ms = 0
        self.listener = Listener(ControlLog(self.store, options.token))
        self._observe = observe or (lambda moment, epoch: None)
        self._code = {name: code_hash(code) for name, code in codes.items()}

    def check_graph(self) -> None:
        """Refuses a query whose graph is not the one the stored state was made with."""
        stored = self.journal.history.graph
        changed = differences(stored, self.graph.describe()) if stored is not None else []
        if changed:
            raise UserError(
                f"the query {self.graph.name!r} differs from the one that wrote the store {self.store.uri}:\n  "
                + "\n  ".join(changed)
                + "\nState of the old graph would be misread or lost. Start the old graph, or use a new store."
            )

    def claim(self) -> None:
        """Takes the store over, and ends an attempt that an earlier driver left open."""
        self.listener.log.guard()
        self.journal.claim(self.options.fetch_limit)
        self._since_ms = max(self._clock(), self.journal.history.clock_ms)
        left = self.journal.history.plan
        if left is not None:
            self.journal.append(Abort(left.epoch, left.attempt, "the driver that planned it has ended"))

    @property
    def tables(self) -> dict[str, RoutingTable]:
        """The routing table of every step, the initial one before the first epoch."""
        stored = self.journal.history.tables
        return {
            step.name: stored.get(step.name) or RoutingTable.even(self.options.slots, self.options.bin_bits)
            for step in self.graph.steps
        }

    def run_epoch(self, epoch: Epoch, spark_query: str, offsets: str, records: Any) -> None:
        """Runs and commits an epoch, or redelivers it if it is committed already. Raises if neither can be done."""
        decision = decide(self.journal.history, epoch, spark_query, offsets)
        if isinstance(decision, Redeliver):
            self._deliver(epoch)
            return
        started = time.perf_counter()
        troubles: list[str] = []
        while len(troubles) < MAX_ATTEMPTS:
            trouble = self._attempt(epoch, spark_query, offsets, records, started, len(troubles))
            if trouble is None:
                self._deliver(epoch)
                self.upkeep.after_commit(self.journal)
                return
            troubles.append(trouble)
        raise UserError(
            f"epoch {epoch} failed {MAX_ATTEMPTS} times; the last commit is intact. The attempts ended with:\n  "
            + "\n  ".join(troubles)
        )

    def _attempt(
        self, epoch: Epoch, spark_query: str, offsets: str, records: Any, started: float, tries: int
    ) -> str | None:
        """One attempt. None if it was committed, else why not."""
        history = self.journal.history
        known = history.graph is not None
        edits = self.upkeep.edits_for(history.manifest)
        clock_ms = max(self._clock(), history.clock_ms)
        steering = self._steer(epoch, clock_ms)
        tables = steering.tables
        plan = Plan(
            epoch,
            Attempt(history.attempts),
            spark_query,
            offsets,
            clock_ms,
            self._code,
            None if known else self.graph.describe(),
            {name: table for name, table in tables.items() if history.tables.get(name) != table},
            edits,
            idle_sources(self._rules, history.clocks, clock_ms, self._since_ms),
            self.stated(),
            steering.outcomes,
            steering.control,
        )
        self.journal.append(plan)
        self._observe("planned", epoch)
        planned = time.perf_counter()
        try:
            share = _share(tables, self.executor.place(live_slots(tables), *draining(history, plan)))
            reports, producers = self._execute(plan, share, records)
        except ExecutionFailed as error:
            self.journal.append(Abort(epoch, plan.attempt, str(error)[:2000]))
            return str(error)
        self._observe("executed", epoch)
        executed = time.perf_counter()
        verdict = judge(len(share.slots), producers, reports, self.graph.depth)
        if isinstance(verdict, Reject):
            self.journal.append(Abort(epoch, plan.attempt, verdict.reason[:2000]))
            if verdict.failure is not None:
                raise _step_error(verdict.failure, epoch)
            if verdict.damage is not None:
                raise DamagedObject(verdict.damage.name, verdict.damage.found, verdict.damage.expected)
            return verdict.reason
        oldest = Epoch(max(history.oldest, epoch - self.options.retain, 0))
        self.journal.append(
            Commit(
                epoch,
                plan.attempt,
                verdict.added,
                verdict.edits,
                verdict.outputs,
                verdict.records,
                oldest,
                verdict.clocks,
                verdict.watermarks,
                verdict.late,
                verdict.dead_letters,
                verdict.passed,
                None if share.workers == history.workers else share.workers,
            )
        )
        self.upkeep.applied(edits)
        ended = time.perf_counter()
        parts = {
            "plan": (planned - started) * 1000,
            "run": (executed - planned) * 1000,
            "steps": _slowest(reports, "steps"),
            "fetch": _slowest(reports, "fetch"),
            "commit": (ended - executed) * 1000,
        }
        fetched = int(sum(report.timings_ms.get("fetched", 0.0) for report in reports))
        self.last = EpochFacts(epoch, verdict.records, (ended - started) * 1000, parts, tries + 1, fetched)
        self._observe("committed", epoch)
        return None

    def stated(self) -> dict[str, int]:
        """The watermarks that users' functions state now."""
        found = {}
        for source in self.graph.sources:
            if source.time is not None and source.time.stated is not None:
                try:
                    value = source.time.stated()
                    if value is not None:
                        found[source.name] = micros(value, "watermark")
                except Exception as error:
                    raise UserError(
                        f"source {source.name!r}: its watermark function failed: {type(error).__name__}: {error}"
                    ) from error
        return found

    def _steer(self, epoch: Epoch, clock_ms: int) -> Steering:
        """What commands and migrations make of the routing tables at this epoch."""
        history = self.journal.history
        facts = Facts(
            self.journal.store_id,
            history.generation,
            epoch,
            clock_ms,
            self.tables,
            history.watermarks,
            history.control,
            history.outcomes,
            self.listener.plans(history),
            self.listener.unread,
            history.workers,
        )
        return steer(facts, self.listener.hear(history))

    def _execute(self, plan: Plan, share: Share, records: Any) -> tuple[list[Report], int]:
        history = self.journal.history
        maker = Maker(history.generation, plan.epoch, "a", plan.attempt)
        manifest, _ = history.manifest.edited(plan.edits)
        task = epoch_task(self.graph, plan, maker, share.tables, history, len(share.slots))
        slots = slot_tasks(self.graph, share.tables, manifest, share.slots, self.upkeep.busy())
        return self.executor.execute(task, slots, records)

    def _deliver(self, epoch: Epoch) -> None:
        outputs = self.journal.history.recent[epoch].outputs
        for sink in self.graph.sinks:
            self._observe("delivering", epoch)
            self.deliverer.deliver(
                sink, self.graph.schema_of(sink.input), [o for o in outputs if o.stream == sink.input], epoch
            )
        self._observe("delivered", epoch)

    def close(self) -> None:
        """Ends the upkeep. The journal needs no closing."""
        self.upkeep.close()


def _slowest(reports: Sequence[Report], part: str) -> float:
    """How long a part of an epoch's tasks took: at the slowest slot of each level, all levels added up."""
    slowest: dict[int, float] = {}
    for report in reports:
        slowest[report.level] = max(slowest.get(report.level, 0.0), report.timings_ms.get(part, 0.0))
    return sum(slowest.values())


@dataclass(frozen=True, slots=True)
class Share:
    """Who does what in an attempt. Its tasks are numbered from 0; `slots` are the slots that they are.

    `tables` name slots by the number of their task.
    """

    slots: tuple[Slot, ...]
    tables: dict[str, RoutingTable]
    workers: dict[str, tuple[int, ...]]


def live_slots(tables: Mapping[str, RoutingTable]) -> tuple[Slot, ...]:
    """The slots that own something of any step: one that has lost everything is gone."""
    return tuple(sorted({slot for table in tables.values() for slot in table.slots}))


def layout_of(store_id: str, history: History) -> Layout:
    """Where the state of a query lies, for plans to be made from."""
    return Layout(store_id, history.tables, history.manifest, history.workers, history.fetch_limit, history.generation)


def draining(history: History, plan: Plan) -> tuple[frozenset[str], frozenset[str]]:
    """The workers that are being emptied, and those that have been, by this driver."""
    outcomes = remembered(history.outcomes, plan.outcomes).values()
    mine = [outcome for outcome in outcomes if outcome.drains and outcome.generation == history.generation]
    closing = frozenset(outcome.drains for outcome in mine if outcome.state == "running")
    return closing, frozenset(outcome.drains for outcome in mine if outcome.state == "done")


def _share(tables: Mapping[str, RoutingTable], placed: Mapping[int, str]) -> Share:
    slots = live_slots(tables)
    numbers = {slot: number for number, slot in enumerate(slots)}
    workers: dict[str, list[int]] = {}
    for slot, worker in placed.items():
        workers.setdefault(worker, []).append(slot)
    return Share(
        slots,
        {step: table.renumbered(numbers) for step, table in tables.items()},
        {worker: tuple(sorted(held)) for worker, held in sorted(workers.items())},
    )


def _step_error(failure: Failure, epoch: int) -> StepError:
    return StepError(failure.step, epoch, failure.key, failure.record, failure.cause, failure.trace)
