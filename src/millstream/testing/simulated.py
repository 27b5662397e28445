"""A query in one process, without Spark: deterministic, and quick enough for thousands of runs.

Rules
-----
- It runs the code of `engine`, `store`, `protocol` and `model` that Spark runs; only the executor differs.
- An epoch is a list of records per source and per map task, given by the test. Feeding the same epoch again is a
  replay, as Spark does after a crash.
- Time stands still unless the test moves it: `advance_clock`, `advance_watermark`.
- A process that dies (`CRASH`, see `crashes`) is followed by a new driver on the same store. What was delivered and the
  clock are the world outside, and survive.
"""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pyarrow as pa

from millstream.engine.delivery import read_productions
from millstream.engine.driver import Driver, Observer, Options, layout_of
from millstream.engine.pending import pending_timers
from millstream.engine.placing import Placer
from millstream.engine.rehearsal import rehearse
from millstream.engine.route import route
from millstream.engine.sample import Samples
from millstream.engine.shipping import ensure
from millstream.engine.spec import EpochTask, Here, SlotTask, Spec
from millstream.engine.state import check_same_step, read_state
from millstream.engine.strong import host_once
from millstream.engine.version import Version, fingerprints
from millstream.errors import UserError
from millstream.model.arrays import array_from, python_rows
from millstream.model.change import Calls, Change
from millstream.model.computation import Computation
from millstream.model.graph import Graph, resolve
from millstream.model.query import Query, SinkNode
from millstream.model.rewrite import Rewrite
from millstream.model.times import micros, micros_of, moment
from millstream.model.transform import Transform
from millstream.model.types import parse_schema
from millstream.protocol.compaction import Job
from millstream.protocol.epochs import Epoch, LateCount, Output, Report
from millstream.protocol.layout import Layout
from millstream.protocol.manifest import Edit
from millstream.protocol.migration import AT_ONCE, MigrationPlan, Start
from millstream.protocol.modification import Modification, undoing
from millstream.protocol.steering import Cancel, Outcome
from millstream.protocol.time import NO_TIME
from millstream.store.cache import WorkerCache
from millstream.store.code import put_code
from millstream.store.control_log import ControlLog
from millstream.store.forms import Forms, unpacked
from millstream.store.journal import Journal, digest_of, history_at
from millstream.store.merge import merge
from millstream.store.names import Maker
from millstream.store.objects import ObjectStore, open_store
from millstream.store.segments import CACHE
from millstream.testing.agents import InProcessAgents
from millstream.testing.crashes import Crashes, CrashMarker, MarkerReached, Records, without_markers
from millstream.testing.faults import FaultyStore


class LocalSpec(Spec):
    """A spec that never leaves the process, so computations are copied rather than pickled."""

    def new_computation(self, step: str) -> Computation:
        return copy.deepcopy(next(item.computation for item in self.graph.steps if item.name == step))

    def function(self, name: str) -> Callable[[pa.RecordBatch], Any] | Transform:
        return next(item.fn for item in self.graph.maps if item.name == name)


_PACKED: dict[bytes, Rewrite | Calls] = {}
"""Rewrites of this process by what stands for them in stores."""


_FORMS: list[Forms] = []


class _Listed:
    """Stands for forms of this process: pickled, it is a number, and unpickled, it is they."""

    def __init__(self, place: int) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return _listed, (self.place,)


def _listed(place: int) -> Forms:
    return _FORMS[place]


class LocalWorkshop:
    """Makes versions that never leave the process. Rewrites that were made here stay here, too: what is stored is only
    a name for them."""

    def __init__(self, store: ObjectStore, schemas: Mapping[str, pa.Schema]) -> None:
        self._store, self._schemas = store, schemas

    def build(
        self,
        query: Query,
        forms: Mapping[tuple[str, str], bytes] = MappingProxyType({}),
        bundles: Sequence[str] = (),
        handed: frozenset[str] = frozenset(),
    ) -> Version:
        missing = [name for name in query.sources if name not in self._schemas]
        if missing:
            raise UserError(f"give the schema of source {missing[0]!r}, such as {{{missing[0]!r}: 'word string'}}")
        graph = resolve(query, self._schemas)
        spec = LocalSpec(graph, "", self._store.uri, {}, {}, forms=dict(forms))
        return Version(query, graph, fingerprints(query), spec, dict(forms), tuple(bundles), handed)

    def pack_forms(self, forms: Forms) -> bytes:
        _FORMS.append(forms)
        return pickle.dumps(_Listed(len(_FORMS) - 1))

    def try_out(self, version: Version, samples: Samples | None = None) -> str:
        for step in version.graph.steps:
            try:
                version.spec.new_computation(step.name)
            except Exception as error:
                return f"the computation of step {step.name!r} cannot be copied: {type(error).__name__}: {error}"
        return rehearse(version.spec, samples) if samples else ""

    def pack(self, rewrite: Rewrite | Calls) -> bytes:
        name = f"rewrite {len(_PACKED)} of process {os.getpid()}".encode()
        _PACKED[name] = rewrite
        return name

    def unpack(self, data: bytes) -> Rewrite | Calls:
        if data in _PACKED:
            return _PACKED[data]
        bundles, code = pickle.loads(data)  # from another process, or from one who only has the store
        ensure(self._store, bundles)
        loaded: Rewrite | Calls = pickle.loads(code)
        return loaded


class InProcess:
    """Runs every part of an epoch here and now."""

    def __init__(
        self,
        store: ObjectStore,
        map_tasks: int,
        crashes: Crashes | None = None,
        workers: Callable[[], Sequence[str]] = lambda: ("0",),
        cache_dir: Path | None = None,
        agents: bool = False,
    ) -> None:
        self.store, self.map_tasks, self.crashes = store, map_tasks, crashes or Crashes()
        self._workers, self._cache_dir = workers, cache_dir
        self._seen: dict[str, ObjectStore] = {}
        self.placer = Placer(workers)
        self.elsewhere: dict[int, str] = {}
        """The workers that slots run on instead of those that they are placed on."""
        self.agents: InProcessAgents | None = None
        if cache_dir is not None and agents:
            self.agents = InProcessAgents(FaultyStore(store), cache_dir, workers)

    def execute(
        self, spec: Spec, task: EpochTask, slots: Sequence[SlotTask], records: Any, limit_s: float | None = None
    ) -> tuple[list[Report], int]:
        before = self.crashes.next_stop()
        if before is not None:
            self._run(spec, task, slots, before)
            raise MarkerReached("CRASH")
        return self._run(spec, task, slots, records)

    def _run(
        self, spec: Spec, task: EpochTask, slots: Sequence[SlotTask], records: Records
    ) -> tuple[list[Report], int]:
        producers = []
        for source in spec.graph.sources:
            rows = records.get(source.name, [])
            step = max(1, -(-len(rows) // self.map_tasks))
            for start in range(0, len(rows), step):
                producers.append([(source.name, to_batch(rows[start : start + step], source.schema))])
        sent = [list(route(spec, task, batches, number, self.store)) for number, batches in enumerate(producers)]
        for level in range(1, task.depth + 1):
            hosted = []
            for mine in slots:
                payloads = [payloads[mine.slot] for payloads in reversed(sent)]  # any order must do
                worker = self.elsewhere.get(mine.home, self.placer.placed.get(mine.home, ""))
                here = Here(worker, None if self.agents is None else self.agents.give)
                store = self._store_at(worker)
                hosted.append(host_once(spec, task, level, SlotTask.unpack(mine.pack()), payloads, store, here))
            sent = [list[Any](one.payloads(task, self.store)) for one in hosted]
        return [report for one in hosted for report in one.reports], len(producers)

    def cores(self) -> dict[str, float]:
        return dict.fromkeys(self._workers(), 1.0)

    def request(self, total: int) -> int:
        return 0

    def close(self) -> None:
        """Nobody was told anything."""

    def retire(self, workers: Collection[str]) -> dict[str, str]:
        return {worker: "" for worker in workers if worker not in self.placer.placed.values()}

    def compact(self, spec: Spec, jobs: Sequence[tuple[Job, Maker, int]]) -> list[Edit]:
        sent = [msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=tuple[Job, Maker, int]) for job in jobs]
        placed = self.placer.placed
        return [
            merge(self._store_at(placed.get(slot, "")), CACHE.apart(), job, maker, slot) for job, maker, slot in sent
        ]

    def _store_at(self, worker: str) -> ObjectStore:
        """The store as a worker sees it: under another name, so that it keeps what it reads to itself."""
        if self._cache_dir is None:
            return self.store
        if worker not in self._seen:
            seen = self._seen[worker] = FaultyStore(self.store)
            seen.uri = f"{self.store.uri}#{self._cache_dir}/{worker}"
            CACHE.attach(seen.uri, WorkerCache(self._cache_dir / f"worker-{worker}"))
        return self._seen[worker]


class Simulated:
    """A query on simulated epochs, in this process and without Spark.

    >>> import millstream as ms
    >>> from millstream.testing import Simulated
    >>> class Count(ms.Computation):
    ...     total = ms.Value("long", default=0)
    ...     output = "word string, total long"
    ...
    ...     def on_record(self, row, at):
    ...         self.total.set(self.total.get() + 1)
    ...         yield at.key, self.total.get()
    >>> query = ms.Query("words")
    >>> counts = query.source("words", None).key_by("word").compute("count", Count).sink("out", ms.Memory())
    >>> sim = Simulated(query, {"words": "word string"})
    >>> sim.feed(words=[("a",), ("b",), ("a",)])
    >>> sorted(sim.state("count"))
    [('a', 2), ('b', 1)]
    >>> sorted(sim.outputs("out"))
    [('a', 1), ('a', 2), ('b', 1)]

    `schemas` gives the columns of each source. A `store` that is passed on to a second `Simulated` is a restart. `now`
    is where the clock starts. `observe` is called at each moment of an epoch, and may raise `Crash`. `options` are
    `slots`, `bin_bits`, `retain` and `compaction_budget`. `background` does upkeep in a thread, as on Spark. `workers`
    are those that slots are placed on; change the attribute and they have come or gone. With a `cache_dir`, each reads
    state through a cache of its own below it.
    """

    def __init__(
        self,
        query: Query,
        schemas: Mapping[str, str],
        store: ObjectStore | None = None,
        *,
        map_tasks: int = 2,
        observe: Observer | None = None,
        background: bool = False,
        workers: Sequence[str] = ("0", "1"),
        cache_dir: str | Path | None = None,
        now: datetime = datetime(2026, 1, 1, tzinfo=UTC),
        **options: Any,
    ) -> None:
        self.now = now
        self.query, self.store = query, store if store is not None else open_store("memory://")
        self.map_tasks, self.workers = map_tasks, tuple(workers)
        self._cache_dir = None if cache_dir is None else Path(cache_dir)
        self._schemas = {name: parse_schema(ddl) for name, ddl in schemas.items()}
        self._stated: dict[str, int] = {}
        self._crashes = Crashes()
        self._observe, self._background, self._options = observe, background, Options(**options)
        self._workshop = LocalWorkshop(self.store, self._schemas)
        self.delivered: dict[str, dict[int, list[tuple[Any, ...]]]] = {name: {} for name in query.sinks}
        self.deliveries: list[tuple[str, int]] = []
        self.driver = self._new_driver(query)

    @property
    def graph(self) -> Graph:
        """The graph that runs."""
        return self.driver.graph

    def _new_driver(self, query: Query) -> Driver:
        """A driver that has claimed the store."""
        driver = Driver(
            self._workshop.build(query),
            Journal.open(self.store),
            self._workshop,
            InProcess(
                self.store,
                self.map_tasks,
                self._crashes,
                lambda: self.workers,
                self._cache_dir,
                self._options.replicas != 0,
            ),
            self,
            self._options,
            self._announced,
            self._background,
            lambda: micros(self.now) // 1000,
        )
        stated = driver.stated
        driver.stated = lambda graph: {**stated(graph), **self._stated}  # type: ignore[method-assign]
        driver.check_graph()
        driver.claim()
        return driver

    def _announced(self, moment: str, epoch: int) -> None:
        if self._observe is not None:
            self._observe(moment, epoch)
        self._crashes.reach(moment)

    def restart(self, query: Query | None = None, *, map_tasks: int | None = None) -> None:
        """Ends the driver and starts another one on the same store, as a new process would.

        A query that is given takes the place of the old one: the same graph, perhaps with other code.
        """
        tasks, self.map_tasks = self.map_tasks, map_tasks or self.map_tasks
        try:
            driver = self._new_driver(query or self.query)
        except BaseException:
            self.map_tasks = tasks
            raise
        self.query = query or self.query
        self.driver.close()
        self.driver = driver

    def deliver(self, sink: SinkNode, schema: pa.Schema, outputs: Sequence[Output], epoch: int) -> None:
        table = read_productions(self.store, schema, outputs)
        rows = [tuple(row.values()) for row in python_rows(table)]
        known = self.delivered.setdefault(sink.name, {}).setdefault(epoch, rows)
        assert known == rows, f"epoch {epoch} was delivered to {sink.name} with other productions before"
        self.deliveries.append((sink.name, epoch))

    @property
    def epoch(self) -> int:
        """The last committed epoch, -1 before the first."""
        return self.driver.journal.history.epoch

    def feed(self, epoch: int | None = None, **records: Sequence[Any]) -> None:
        """Runs an epoch with these records per source; an epoch that is committed already is a replay.

        `CRASH` and `CRASH.at(moment)` among the records let the process die there; the epoch is then offered again
        to a new driver, until it is through.
        """
        self.offer(records, epoch)

    def offer(self, given: Records, epoch: int | None = None, crash: CrashMarker | None = None) -> None:
        """As `feed`, with the records in one dict: offers the epoch as Spark does, until a driver has finished it."""
        number = Epoch(self.epoch + 1 if epoch is None else epoch)
        names = list(self.driver.reads())  # those that come with a modification, too, from its first epoch on
        unknown = [name for name in given if name not in names]
        if unknown:
            raise UserError(f"no source {unknown[0]!r}; the query has {', '.join(names)}")
        records, wanted = without_markers(given, names, crash)
        self._crashes.stops, self._crashes.moments = wanted.stops, wanted.moments
        offsets = digest_of(repr(sorted(records.items())).encode())
        while True:
            try:
                self.driver.run_epoch(number, "simulated", offsets, lambda names: records)
                self.driver.opened({name: called for name, (_, called) in self.driver.reads().items()})
                break
            except MarkerReached:
                self.restart()
        left = self._crashes.left()
        if left:
            self._crashes.stops, self._crashes.moments = [], []
            raise UserError(f"epoch {number} is finished, and did not reach {', '.join(map(repr, left))}")

    def advance_clock(self, by: str | timedelta, *, crash: CrashMarker | None = None) -> None:
        """Moves the driver's clock, and runs an epoch without records, with a crash in it if one is given."""
        self.now += timedelta(microseconds=micros_of(by, "by"))
        self.offer({}, crash=crash)

    def advance_watermark(self, to: datetime, source: str | None = None, *, crash: CrashMarker | None = None) -> None:
        """States the watermark of a source (the only one with event time, unless named), and runs an epoch."""
        timed = [each.name for each in self.graph.sources if each.time is not None]
        if source is None and len(timed) != 1:
            raise UserError(f"say which source: {', '.join(timed) or 'none has event time'}")
        if source is not None and source not in timed:
            raise UserError(f"source {source!r} has no event time; those that have: {', '.join(timed) or 'none'}")
        self._stated = {source or timed[0]: micros(to)}
        try:
            self.offer({}, crash=crash)
        finally:
            self._stated = {}

    def watermark(self, step: str) -> datetime | None:
        """The watermark of a step, or of a source; None if it has none, or not yet."""
        names = [*(each.name for each in self.graph.sources), *(each.name for each in self.graph.steps)]
        if step not in names:
            raise UserError(f"no source or step {step!r}; the query has {', '.join(names)}")
        history = self.driver.journal.history
        if step in history.clocks:
            return moment(history.clocks[step].watermark)
        return moment(history.watermarks.get(step, NO_TIME))

    def late(self, step: str) -> int:
        """How many records were too late for a step so far: for all of their windows, if it has any."""
        return self.late_count(step).records

    def late_count(self, step: str) -> LateCount:
        """The same, with those that were late for some of their windows only (`partly`), and how many `windows` all of
        them missed."""
        return self.driver.journal.history.late.get(step, LateCount())

    def dead_letters(self, step: str) -> int:
        """How many records have failed in a step so far and become dead letters."""
        return self.driver.journal.history.dead_letters.get(step, 0)

    def pending(self, step: str) -> int:
        """How many timers of a step are pending, as `Status.timers` counts them: it errs upwards."""
        return pending_timers(self.graph, self.driver.journal.history).get(step, 0)

    @property
    def layout(self) -> Layout:
        """Where the state lies, for `millstream.protocol.planner` to make plans from."""
        history = self.driver.journal.history
        return replace(layout_of(self.driver.journal.store_id, history), tables=self.driver.tables)

    def apply(self, plan: MigrationPlan) -> int:
        """Sends a plan as a command, which the next epochs carry out; its number."""
        log = ControlLog(self.store, self._options.token)
        return log.send(plan.verb, plan, self.driver.journal.history.control)

    def modify(self) -> Change:
        """A change of the query that runs; see `send`."""
        return Change(self.driver.modifier.version.query)

    def send(self, change: Change, *, rehearse: bool = True, at: Start = AT_ONCE) -> int:
        """Sends a change as a command, which the next epochs carry out; its number. Unless told otherwise it is run
        over a sample of recent input first."""
        history = self.driver.journal.history
        code = put_code(self.store, self._workshop.pack(change.rewrite))
        ask = Modification(self.driver.journal.store_id, history.version, code, "a change", at, rehearse=rehearse)
        return ControlLog(self.store, self._options.token).send("modify", ask, history.control)

    def revert(self, number: int) -> int:
        """Sends the command that undoes a modification; its number."""
        history = self.driver.journal.history
        code, trouble = undoing(history.modified, number)
        if trouble:
            raise UserError(trouble)
        ask = Modification(self.driver.journal.store_id, history.version, code, f"revert {number}")
        return ControlLog(self.store, self._options.token).send("revert", ask, history.control)

    def cancel(self, number: int) -> int:
        """Sends the command that ends another one; its number."""
        log = ControlLog(self.store, self._options.token)
        return log.send("cancel", Cancel(number), self.driver.journal.history.control)

    def outcome(self, number: int) -> Outcome | None:
        """What has become of a command; None if no epoch has heard it yet."""
        return self.driver.journal.history.outcomes.get(number)

    def outputs(self, sink: str) -> list[tuple[Any, ...]]:
        """All productions that reached a sink, epoch by epoch."""
        if sink not in self.delivered:
            raise UserError(f"no sink {sink!r}; the query has {', '.join(self.delivered) or 'none'}")
        return [row for epoch in sorted(self.delivered[sink]) for row in self.delivered[sink][epoch]]

    def state(self, step: str, state: str | None = None, epoch: int | None = None) -> list[tuple[Any, ...]]:
        """The state of a step as (key..., value) tuples, in hash order; of a `Map` (key..., subkey, value), of a `Bag`
        (key..., epoch, list of values)."""
        history = self.driver.journal.history
        if epoch is not None and epoch != history.epoch:
            history = history_at(self.store, Epoch(epoch))
        chosen = next((each for each in self.graph.steps if each.name == step), None)
        if chosen is None:
            raise UserError(f"no step {step!r}; the query has {', '.join(each.name for each in self.graph.steps)}")
        name = state or next(iter(chosen.states), "")
        if name not in chosen.states:
            raise UserError(f"step {step!r} has no state {name!r}; it has {', '.join(chosen.states) or 'none'}")
        if epoch is not None:
            check_same_step(chosen, history)
        forms = unpacked(self.driver.modifier.version.forms.get((step, name), b""))
        table = read_state(self.store, chosen, name, history, forms)
        rows = [tuple(row.values()) for row in python_rows(table)]
        declared = chosen.states[name]
        if not declared.is_object:
            return rows
        if pa.types.is_list(declared.stored_type):
            return [(*row[:-1], [pickle.loads(data) for data in row[-1]]) for row in rows]
        return [(*row[:-1], pickle.loads(row[-1])) for row in rows]


def to_batch(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    """Tuples as a record batch."""
    for row in rows:
        if not isinstance(row, (tuple, list)) or len(row) != len(schema):
            raise UserError(f"found the record {row!r}, expected a tuple of {', '.join(schema.names)}")
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [array_from(list(column), field.type) for field, column in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
