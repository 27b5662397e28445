"""The driver's loop: decide, plan, run, judge, commit, deliver. One epoch at a time.

Rules
-----
- Nothing runs before its plan is journaled, and nothing counts before its commit is (G3, G6).
- What to do is decided by `protocol.epochs`; this file gathers the facts and carries the decision out.
- An attempt that Spark failed, or whose receipts differ, is aborted and planned again, at most `MAX_ATTEMPTS` times.
  One whose user code raised is aborted and stops the query.
- A version of the graph takes effect with a plan and is real with its commit (`engine.modifying`). If user code fails
  in the first epoch of one, that attempt is aborted, and the next one runs the version before.
- A version reads its own sources only, whatever the stream of epochs offers. Which ones it should offer, `reads` says.
- Sinks receive an epoch after its commit and before the next plan, in order.
- The named moments of an epoch (`MOMENTS`) are announced to an observer: displays listen, and tests kill there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from millstream.engine.adapting import Adapter, busy_of
from millstream.engine.delivery import Deliverer
from millstream.engine.handing import Handover
from millstream.engine.listening import Listener
from millstream.engine.modifying import Modifier
from millstream.engine.observing import DriverFence, loads_together, slowest
from millstream.engine.placing import Placer
from millstream.engine.replicating import FEW, Agents, Replicator
from millstream.engine.sample import worth_keeping
from millstream.engine.spec import EpochTask, SlotTask, epoch_task, rules_of, slot_tasks
from millstream.engine.spending import Rates, arrived, loads_of, sources_of
from millstream.engine.upkeep import Upkeep
from millstream.engine.version import Version, Workshop
from millstream.errors import DamagedObject, MillstreamError, StepError, UserError
from millstream.model.graph import Graph
from millstream.model.query import SourceNode
from millstream.model.times import micros
from millstream.protocol.adaptation import Policy
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
    planned_manifest,
)
from millstream.protocol.keyspace import DEFAULT_BIN_BITS
from millstream.protocol.layout import Layout
from millstream.protocol.manifest import Edit
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.modification import Candidate, Modification, called, routed_on
from millstream.protocol.pacing import GUESSED, Learning, RoundLoad, hosts_of
from millstream.protocol.routing import RoutingTable, Slot
from millstream.protocol.steering import Facts, Outcome, Spent, Steering, draining, leaving, remembered, steer
from millstream.protocol.time import NO_TIME, idle_sources, leaving_partitions
from millstream.store.control_log import ControlLog
from millstream.store.journal import Journal
from millstream.store.names import Maker

MAX_ATTEMPTS = 4
MAX_LOST = 16
"""How many attempts of an epoch may end because workers were lost; these do not count as attempts."""
PATIENT_FOR = 256
"""For how many epochs tasks fetch their state wherever Spark runs them, after one has run elsewhere and no worker was
lost: it will do so again."""
MOMENTS = ("planned", "executed", "committed", "delivering", "delivered")
Observer = Callable[[str, int], None]
Offered = Callable[[Sequence[str]], Any]
"""The records of an epoch: those of the sources that are named."""

NOTHING_OPENED: tuple[int, dict[str, str]] = (-1, {})


class ExecutionFailed(MillstreamError):
    """The executor could not finish an attempt, for reasons that are not user code: it is worth another try."""


class WorkerLost(ExecutionFailed):
    """An attempt was ended because a worker is gone whose slots have replicas elsewhere."""


class TookTooLong(ExecutionFailed):
    """An attempt was ended because it took longer than it may."""


class Executor(Protocol):
    """What runs the parts of an epoch: Spark, or one process in tests."""

    @property
    def agents(self) -> Agents | None:
        """The agents of its workers, if they can have any."""
        ...

    def execute(
        self, spec: Any, task: EpochTask, slots: Sequence[SlotTask], records: Any, limit_s: float | None = None
    ) -> tuple[list[Report], int]:
        """Runs an attempt of a version over the epoch's records; the reports of all slots, and the number of producers.

        With a limit, an attempt that takes longer is ended with `TookTooLong`.
        """
        ...

    @property
    def placer(self) -> Placer:
        """Which worker each slot is tried on."""
        ...

    def cores(self) -> dict[str, float]:
        """The workers that are there now, and how many tasks each runs at a time."""
        ...

    def request(self, total: int) -> int:
        """Asks for so many workers in all; how many of these will come that are not there yet, which may be none."""
        ...

    def retire(self, workers: Collection[str]) -> dict[str, str]:
        """Lets nothing more run on these workers, which have no slots. An empty text for those on which nothing runs
        now, and for those of which that cannot be brought about, why not."""
        ...

    def compact(self, spec: Any, jobs: Sequence[tuple[Job, Maker, int]]) -> list[Edit]:
        """Runs compactions for a version, each on behalf of a slot."""
        ...

    def close(self) -> None:
        """Takes back what it has told others for this query alone."""
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
    modify_timeout: float = 60.0
    replicas: int | None = 0
    """None is one as soon as workers are on two hosts, and none before."""
    by_load: bool = False
    adapt: Policy | None = None
    adapt_dry_run: bool = False
    beat_s: float = 1.0
    """How long it is from one epoch to the next when there is nothing to do."""


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
    elsewhere: int = 0
    """How many of its tasks ran on another worker than they were placed on."""
    sources: dict[str, int] = field(default_factory=dict)
    """Where the bytes of state came from that its tasks had not read before: from the `cache` of a worker that had them
    for itself, from one that held them as a `replica` or because they were about to move there, or from the `store`.
    Those that were checked before anybody needed them are `ahead`."""
    prepared_bytes: int = 0
    """How many of the latter are of ranges that are about to move."""


class Driver:
    """Runs the epochs of one query on one store."""

    def __init__(
        self,
        version: Version,
        journal: Journal,
        workshop: Workshop,
        executor: Executor,
        deliverer: Deliverer,
        options: Options,
        observe: Observer | None = None,
        background: bool = True,
        clock: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.journal, self.executor, self.deliverer = journal, executor, deliverer
        self.store, self.options = journal.store, options
        self.modifier = Modifier(self.store, version, workshop, background, clock, 2 * options.modify_timeout)
        self.upkeep = Upkeep(self.store, lambda: self.modifier.version, executor, options.compaction_budget, background)
        self.replicator: Replicator | None = None
        if executor.agents is not None:
            self.replicator = Replicator(
                executor.agents,
                options.replicas,
                background,
                self.upkeep.recipes,
                self.upkeep.ahead,
                by_load=options.by_load,
            )
            self.upkeep.replicated = self.replicator.has_made
            executor.placer.replicas = self.replicator
        self.handover = Handover(self.replicator, executor.placer)
        self.adapter: Adapter | None = None
        if options.adapt is not None:
            self.adapter = Adapter(options.adapt, self._send, executor.request, options.adapt_dry_run)
        self.last: EpochFacts | None = None
        self.backlog = 0.0
        """How many epochs like the last one it takes to do what waits in the sources; told by whoever knows them."""
        self._clock = clock
        self._since_ms = 0
        self._changing = threading.Lock()
        self._committed_at = time.perf_counter()
        self._stood_ms = 0.0
        self._wanted = -1
        self._lost = 0
        self._spark_offsets = b""
        self._rates, self._learning = Rates(), Learning(journal.history.rates)
        self._asked: dict[int, object] = {}
        self._loads: dict[int, float] = {}
        self._patient_until = -1
        self._opened = NOTHING_OPENED
        self.listener = Listener(ControlLog(self.store, options.token))
        self.fence = DriverFence()
        """Makes what is observed of epochs."""
        self._observer = observe or (lambda moment, epoch: None)

    @property
    def graph(self) -> Graph:
        """The graph of the version that runs."""
        return self.modifier.version.graph

    def current(self) -> tuple[Version, History]:
        """The version that runs, and the history that it belongs to."""
        with self._changing:
            return self.modifier.version, self.journal.history

    def check_graph(self) -> None:
        """Refuses a query whose graph is not one that the stored state was made with."""
        self.modifier.catch_up(self.journal.history)

    def claim(self) -> None:
        """Takes the store over, and ends an attempt that an earlier driver left open."""
        self.listener.log.guard()
        self.journal.claim(self.options.fetch_limit, self.options.beat_s)
        self._since_ms = max(self._clock(), self.journal.history.clock_ms)
        left = self.journal.history.plan
        if left is not None:
            self.journal.append(Abort(left.epoch, left.attempt, "the driver that planned it has ended"))

    @property
    def tables(self) -> dict[str, RoutingTable]:
        """The routing table of every step, the initial one before the first epoch."""
        known = self.journal.history.tables
        if known:
            return known
        first = RoutingTable.even(self.options.slots, self.options.bin_bits)
        return {step.name: first for step in self.graph.steps}

    def _observe(self, moment: str, epoch: Epoch) -> None:
        """Tells the observer of a moment. It is a display: it may not keep an epoch from going on."""
        self.fence(f"an epoch at the moment {moment!r}", None, lambda: self._observer(moment, epoch))

    def run_epoch(
        self, epoch: Epoch, spark_query: str, offsets: str, records: Offered, spark_offsets: bytes = b""
    ) -> None:
        """Runs and commits an epoch, or redelivers it if it is committed already. Raises if neither can be done.

        `offsets` is a digest of those of its sources, and `spark_offsets` what Spark's checkpoint holds of them.
        """
        self._spark_offsets = spark_offsets
        decision = decide(self.journal.history, epoch, spark_query, offsets)
        if isinstance(decision, Redeliver):
            self._deliver(epoch)
            return
        started = time.perf_counter()
        troubles: list[str] = []
        self._lost = 0
        while len(troubles) - self._lost < MAX_ATTEMPTS:
            trouble = self._attempt(epoch, spark_query, offsets, records, started, len(troubles))
            if trouble is None:
                self._deliver(epoch)
                self.upkeep.after_commit(self.journal)
                if self.replicator is not None:
                    self.replicator.after_commit(self.journal.history, self._loads)
                return
            troubles.append(trouble)
        raise UserError(
            f"epoch {epoch} failed {MAX_ATTEMPTS} times; the last commit is intact. The attempts ended with:\n  "
            + "\n  ".join(troubles)
        )

    def _attempt(
        self, epoch: Epoch, spark_query: str, offsets: str, records: Offered, started: float, tries: int
    ) -> str | None:
        """One attempt. None if it was committed, else why not."""
        history = self.journal.history
        edits = self.upkeep.edits_for(history.manifest)
        clock_ms = max(self._clock(), history.clock_ms)
        steering = self._steer(epoch, clock_ms)
        self._wanted = steering.wanted
        changed = steering.changed
        version = self.modifier.of(changed)
        before = history if changed is None else history.followed(changed)
        tables = steering.tables
        if changed is not None:
            names = [step.name for step in version.graph.steps]
            tables = routed_on(steering.tables, changed, names, history.version)
        try:
            stated = self.stated(version.graph)
        except UserError as error:
            if changed is None:
                raise
            self.modifier.failed(changed, str(error), by_user=True)
            return str(error)
        rules = rules_of(version.graph)
        plan = Plan(
            epoch,
            Attempt(history.attempts),
            spark_query,
            offsets,
            clock_ms,
            version.code,
            version.graph.describe() if history.graph is None or changed is not None else None,
            {name: table for name, table in tables.items() if before.tables.get(name) != table},
            edits,
            idle_sources(rules, before.clocks, clock_ms, self._since_ms),
            leaving_partitions(rules, before.clocks, clock_ms, self._since_ms),
            stated,
            steering.outcomes,
            steering.control,
            changed,
            self._spark_offsets,
        )
        self.journal.append(plan)
        self._observe("planned", epoch)
        planned = time.perf_counter()
        try:
            outcomes = remembered(history.outcomes, plan.outcomes)
            placed = self.executor.placer.place(live_slots(tables), *draining(outcomes.values(), history.generation))
            through = self.handover.writing(outcomes, tables, history, epoch)
            share = _share(tables, placed)
            kept = bool(placed) and self.replicator is not None and self.replicator.kept and self._lost < MAX_LOST
            patience = FEW if kept and epoch > self._patient_until else -1
            reports, producers = self._execute(version, plan, share, before, records, patience, through)
        except WorkerLost as error:
            self._lost += 1
            self.journal.append(Abort(plan.epoch, plan.attempt, str(error)[:2000]))
            return str(error)
        except ExecutionFailed as error:
            self._abort(plan, str(error), by_user=isinstance(error, TookTooLong))
            return str(error)
        self._observe("executed", epoch)
        executed = time.perf_counter()
        verdict = judge(len(share.slots), producers, reports, version.graph.depth)
        if isinstance(verdict, Reject) and any(report.gave_up for report in reports):
            self._lost += 1
            if set(share.workers) <= set(self.executor.cores()):  # Spark does as it likes, and will do so again
                self._patient_until = epoch + PATIENT_FOR
            self.journal.append(Abort(plan.epoch, plan.attempt, verdict.reason[:2000]))
            return verdict.reason
        if isinstance(verdict, Reject):
            told = verdict.reason if verdict.failure is None else _told(_step_error(verdict.failure, epoch))
            self._abort(plan, told if changed is not None else verdict.reason, by_user=verdict.failure is not None)
            if verdict.failure is not None and changed is None:
                raise _step_error(verdict.failure, epoch)
            if verdict.damage is not None:
                raise DamagedObject(verdict.damage.name, verdict.damage.found, verdict.damage.expected)
            return verdict.reason
        oldest = Epoch(max(history.oldest, epoch - self.options.retain, 0))
        self.fence.reported(reports)
        samples = next((report.samples for report in reports if report.samples), {})
        few: dict[str, tuple[bytes, ...]] = self.fence(
            "a sample of the input", {}, lambda: worth_keeping(samples, before.samples, epoch)
        )
        loads: dict[str, bytes] = self.fence("the load of steps", {}, lambda: loads_together(reports))
        rates = self.fence("the rates of fetching", None, lambda: self._told_rates(history))
        replicas = self.replicator.holders if self.replicator is not None else {}
        commit = Commit(
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
            few,
            loads,
            round((executed - started) * 1000),
            None if replicas == history.replicas else replicas,
            rates,
            None if self.executor.placer.idle == history.idle else self.executor.placer.idle,
        )
        with self._changing:
            self.journal.append(commit)
            if changed is not None:
                self.modifier.committed(changed)
        self._opened = NOTHING_OPENED
        self.upkeep.applied(edits)
        self.handover.committed(epoch, reports, share.slots, share.workers)
        now = time.perf_counter()
        adapter, between_s = self.adapter, now - self._committed_at
        if adapter is not None:
            self.fence("the load of workers", None, lambda: self._adapt(adapter, commit, reports, share, between_s))
        self._stood_ms = (now - self._committed_at) * 1000 if changed is not None and changed.sources else 0.0
        self._committed_at = now
        self.modifier.seen(samples, () if changed is None else changed.sources)
        ended = time.perf_counter()
        parts = {
            "plan": (planned - started) * 1000,
            "run": (executed - planned) * 1000,
            "steps": slowest(reports, "steps"),
            "fetch": slowest(reports, "fetch"),
            "load": slowest(reports, "load"),
            "commit": (ended - executed) * 1000,
        }
        self.fence("the rates of fetching", None, lambda: self._rates.fetched(reports))
        if not tries:
            reading_s = (parts["fetch"] + parts["load"]) / 1000
            took_s = ended - started
            self.fence("the costs of moving", None, lambda: self._learn(history, plan.outcomes, took_s, reading_s))
        self._loads = self.fence("the load of slots", {}, lambda: loads_of(reports, share.slots))
        sources: dict[str, int] = self.fence(
            "where state came from",
            {},
            lambda: sources_of(reports, share.slots, arrived(plan.tables, before, share.workers)),
        )
        self.last = EpochFacts(
            epoch,
            verdict.records,
            (ended - started) * 1000,
            parts,
            tries + 1,
            sources.get("store", 0),
            sum(bool(report.elsewhere) for report in reports),
            sources,
            sum(report.read.get("coming", 0) for report in reports),
        )
        self._observe("committed", epoch)
        return None

    def _adapt(self, adapter: Adapter, commit: Commit, reports: Sequence[Report], share: Share, took_s: float) -> None:
        history, cores = self.journal.history, self.executor.cores()
        gone = draining(history.outcomes.values(), history.generation)
        cores = {worker: many for worker, many in cores.items() if worker not in gone[0] | gone[1]}
        placed = {slot: worker for worker, slots in share.workers.items() for slot in slots}
        hosts = {number: placed.get(slot, "") for number, slot in enumerate(share.slots)}
        layout = layout_of(self.journal.store_id, history)
        adapter.after_commit(history, layout, commit.loads, busy_of(reports, hosts, cores, took_s), cores, self.backlog)

    def _told_rates(self, history: History) -> dict[str, float] | None:
        taken = self.replicator.taken() if self.replicator is not None else {}
        return self._rates.told(taken, self._learning.told(), history.rates)

    def _learn(self, before: History, outcomes: Sequence[Outcome], took_s: float, reading_s: float) -> None:
        """Learns what moving costs from an epoch that took so long, and whose tasks fetched and opened state for so
        long, and which changed these outcomes."""
        load, prepared = RoundLoad(hosts_of(before.workers)), False
        for outcome in outcomes:
            ask, known = self._asked.get(outcome.number), before.outcomes.get(outcome.number)
            if isinstance(ask, MigrationPlan):
                prepared = prepared or ask.prepared
                for moves in ask.rounds[0 if known is None else known.done : outcome.done]:
                    load.add(moves)
        if load.bins:
            self._learning.moved(load, took_s, reading_s, prepared)
        else:
            self._learning.quiet(took_s)

    def _send(self, plan: MigrationPlan) -> int:
        return self.listener.log.send(plan.verb, plan, self.journal.history.control)

    def _abort(self, plan: Plan, reason: str, by_user: bool) -> None:
        """Ends an attempt that leaves nothing. A modification in it may not be tried again."""
        self.journal.append(Abort(plan.epoch, plan.attempt, reason[:2000]))
        if plan.changed is not None:
            self.modifier.failed(plan.changed, reason, by_user)

    def stated(self, graph: Graph) -> dict[str, int]:
        """The watermarks that users' functions state now."""
        found = {}
        for source in graph.sources:
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
        plans, heard = self.listener.plans(history), self.listener.hear(history)
        asked = self._asked = {**plans, **{each.number: each.ask for each in heard}}
        rate = layout_of("", history).fetch_rate
        costs = self.fence("the costs of moving", GUESSED, lambda: self._learning.costs(rate))
        facts = Facts(
            self.journal.store_id,
            history.generation,
            epoch,
            clock_ms,
            self.tables,
            history.watermarks,
            history.control,
            history.outcomes,
            plans,
            self.listener.unread,
            history.workers,
            history.version,
            {number: self._with_sources(number, one) for number, one in self.modifier.consider(asked, history).items()},
            max(self.last.duration_ms, self._stood_ms) if self.last and self.last.epoch == history.epoch else 0.0,
            self._numbers(history, clock_ms) if any(map(has_condition, asked.values())) else {},
            self._emptied(history),
            self.handover.lacking(asked, history, *draining(history.outcomes.values(), history.generation), costs),
            self.handover.through,
            self.handover.unchecked,
            self._since_ms,
            _spent(self.last) if self.last and self.last.epoch == history.epoch else Spent(),
            costs,
        )
        return steer(facts, heard)

    def _numbers(self, history: History, clock_ms: int) -> dict[str, float]:
        numbers: dict[str, float] = self.fence(
            "the numbers for conditions", {}, lambda: numbers_of(history, self.last, clock_ms)
        )
        return numbers

    def _emptied(self, history: History) -> dict[str, str]:
        """Which of the workers that have been drained are empty by now, and were not before."""
        left = {each.drains for each in history.outcomes.values() if leaving(each, history.generation)}
        return self.executor.retire(left) if left else {}

    def _with_sources(self, number: int, candidate: Candidate) -> Candidate:
        """A candidate that knows what its sources are called, or that waits for them."""
        changed, (opened_for, names) = candidate.changed, self._opened
        if changed is None or not changed.brings:
            return candidate
        if number != opened_for:
            return replace(candidate, waits=True)
        return replace(candidate, changed=replace(changed, sources={**changed.sources, **names}))

    def reads(self) -> dict[str, tuple[SourceNode, str]]:
        """The sources that a stream should read now, and what it should call each: those of the version that runs, and
        of a modification that waits for nothing else."""
        history, version = self.journal.history, self.modifier.version
        names = called(history.modified, version.query.sources)
        found = {name: (version.query.sources[name], known) for name, known in names.items()}
        for node in self.modifier.brought(self._wanted):
            found[node.name] = (node, f"{node.name}__{history.epoch + 1}")
        return found

    def opened(self, names: Mapping[str, str]) -> None:
        """A stream has begun that reads these sources under these names. Those that a modification waits for have
        records for it from the next epoch on; once that is committed without it, they are spent."""
        brought = {node.name: names[node.name] for node in self.modifier.brought(self._wanted) if node.name in names}
        self._opened = (self._wanted, brought) if brought else NOTHING_OPENED

    def not_opened(self, reason: str) -> bool:
        """The sources of the modification that waits cannot be read. Whether there was one."""
        waiting, self._wanted, self._opened = self._wanted, -1, NOTHING_OPENED
        return self.modifier.aborted(waiting, reason)

    def _execute(
        self,
        version: Version,
        plan: Plan,
        share: Share,
        before: History,
        records: Offered,
        patience: int,
        through: Mapping[int, dict[str, tuple[str, ...]]],
    ) -> tuple[list[Report], int]:
        maker = Maker(before.generation, plan.epoch, "a", plan.attempt)
        manifest, _ = planned_manifest(self.journal.history, plan)
        task = epoch_task(version.graph, plan, maker, share.tables, before, len(share.slots))
        where = {slot: worker for worker, slots in share.workers.items() for slot in slots}
        held = self.replicator.held(share.workers, self.handover.due) if self.replicator is not None else {}
        slots = [
            replace(
                slot,
                worker=where.get(slot.home, ""),
                patience=patience,
                through=through.get(slot.home, {}),
                coming=tuple(held[slot.home][0]) if slot.home in held else (),
                soon=tuple(held[slot.home][1]) if slot.home in held else (),
            )
            for slot in slot_tasks(version.graph, share.tables, manifest, share.slots, self.upkeep.busy())
        ]
        limit_s = None if plan.changed is None else self.options.modify_timeout
        names = [source.name for source in version.graph.sources]
        return self.executor.execute(version.spec, task, slots, records(names), limit_s)

    def _deliver(self, epoch: Epoch) -> None:
        outputs = self.journal.history.recent[epoch].outputs
        for sink in self.graph.sinks:
            self._observe("delivering", epoch)
            self.deliverer.deliver(
                sink, self.graph.schema_of(sink.input), [o for o in outputs if o.stream == sink.input], epoch
            )
        self._observe("delivered", epoch)

    def close(self) -> None:
        """Ends the upkeep, and the replicas. The journal needs no closing."""
        self.upkeep.close()
        if self.replicator is not None:
            self.replicator.close()
        self.executor.close()


@dataclass(frozen=True, slots=True)
class Share:
    """Who does what in an attempt. Its tasks are numbered from 0; `slots` are the slots that they are.

    `tables` name slots by the number of their task.
    """

    slots: tuple[Slot, ...]
    tables: dict[str, RoutingTable]
    workers: dict[str, tuple[int, ...]]


def _spent(last: EpochFacts) -> Spent:
    return Spent(last.parts_ms.get("fetch", 0.0), last.parts_ms.get("load", 0.0), last.sources, last.prepared_bytes)


def numbers_of(history: History, last: EpochFacts | None, clock_ms: int) -> dict[str, float]:
    """What is known of the numbers that conditions are made of (`protocol.conditions`)."""
    found = {
        "state_bytes": float(sum(segment.bytes for segment in history.manifest.segments())),
        "late": float(sum(count.records for count in history.late.values())),
        "dead_letters": float(sum(history.dead_letters.values())),
    }
    marks = [mark for mark in history.watermarks.values() if mark != NO_TIME]
    if marks:
        found["lag_s"] = clock_ms / 1000 - min(marks) / 10**6
    if last is not None and last.epoch == history.epoch:
        found["epoch_ms"] = last.duration_ms
        found["records"] = float(sum(last.records.values()))
        found["fetched_bytes"] = float(last.fetched_bytes)
    return found


def has_condition(ask: object) -> bool:
    """Whether a command waits for a condition to hold."""
    return isinstance(ask, MigrationPlan | Modification) and ask.start.condition is not None


def live_slots(tables: Mapping[str, RoutingTable]) -> tuple[Slot, ...]:
    """The slots that own something of any step: one that has lost everything is gone."""
    return tuple(sorted({slot for table in tables.values() for slot in table.slots}))


def layout_of(store_id: str, history: History) -> Layout:
    """Where the state of a query lies, for plans to be made from."""
    return Layout(
        store_id,
        history.tables,
        history.manifest,
        history.workers,
        history.fetch_limit,
        history.generation,
        history.replicas,
        history.took_ms / 1000,
        history.rates,
        history.idle,
        history.written,
    )


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


def _told(error: StepError) -> str:
    """Why a modification was rolled back: the query goes on, so there is nothing to be started again."""
    where = ", ".join(f"{what} {given}" for what, given in (("key", error.key), ("record", error.record)) if given)
    text = f"step {error.step!r} failed in epoch {error.epoch}: {error.cause}{f' ({where})' if where else ''}"
    return "\n".join(filter(None, [text, error.trace.rstrip()]))


def _step_error(failure: Failure, epoch: int) -> StepError:
    return StepError(failure.step, epoch, failure.key, failure.record, failure.cause, failure.trace)
