"""A query in one process, without Spark: deterministic, and quick enough for thousands of runs.

Rules
-----
- It runs the code of `engine`, `store`, `protocol` and `model` that Spark runs; only the executor differs.
- An epoch is a list of records per source and per map task, given by the test. Feeding the same epoch again is a
  replay, as Spark does after a crash.
- Time stands still unless the test moves it: `advance_clock`, `advance_watermark`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from millstream.engine.delivery import read_productions
from millstream.engine.driver import Driver, Observer, Options
from millstream.engine.host import host
from millstream.engine.pending import pending_timers
from millstream.engine.route import route
from millstream.engine.spec import EpochTask, SlotTask, Spec
from millstream.engine.state import read_state
from millstream.errors import UserError
from millstream.model.arrays import array_from
from millstream.model.computation import Computation
from millstream.model.graph import resolve
from millstream.model.query import Query, SinkNode
from millstream.model.times import micros, micros_of, moment
from millstream.model.transform import Transform
from millstream.model.types import parse_schema
from millstream.protocol.compaction import Job
from millstream.protocol.epochs import Epoch, Output, Report
from millstream.protocol.manifest import Edit
from millstream.protocol.time import NO_TIME
from millstream.store.journal import Journal, digest_of, history_at
from millstream.store.merge import merge
from millstream.store.names import Maker
from millstream.store.objects import ObjectStore, open_store
from millstream.store.segments import SegmentCache

Records = Mapping[str, Sequence[Any]]


class LocalSpec(Spec):
    """A spec that never leaves the process, so computations are copied rather than pickled."""

    def new_computation(self, step: str) -> Computation:
        return copy.deepcopy(next(item.computation for item in self.graph.steps if item.name == step))

    def function(self, name: str) -> Callable[[pa.RecordBatch], Any] | Transform:
        return next(item.fn for item in self.graph.maps if item.name == name)


class InProcess:
    """Runs every part of an epoch here and now."""

    def __init__(self, spec: Spec, store: ObjectStore, map_tasks: int) -> None:
        self.spec, self.store, self.map_tasks = spec, store, map_tasks

    def execute(self, task: EpochTask, slots: Sequence[SlotTask], records: Any) -> tuple[list[Report], int]:
        producers = []
        for source in self.spec.graph.sources:
            rows = records.get(source.name, [])
            step = max(1, -(-len(rows) // self.map_tasks))
            for start in range(0, len(rows), step):
                producers.append([(source.name, to_batch(rows[start : start + step], source.schema))])
        sent = [list(route(self.spec, task, batches, number, self.store)) for number, batches in enumerate(producers)]
        for level in range(1, task.depth + 1):
            hosted = []
            for mine in slots:
                payloads = [payloads[mine.slot] for payloads in reversed(sent)]  # any order must do
                hosted.append(host(self.spec, task, level, SlotTask.unpack(mine.pack()), payloads, self.store))
            sent = [list(one.payloads(task, self.store)) for one in hosted]
        return [report for one in hosted for report in one.reports], len(producers)

    def compact(self, jobs: Sequence[tuple[Job, Maker, int]]) -> list[Edit]:
        return [merge(self.store, SegmentCache(), job, maker, slot) for job, maker, slot in jobs]


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
    `slots`, `bin_bits`, `retain` and `compaction_budget`. `background` does upkeep in a thread, as on Spark.
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
        now: datetime = datetime(2026, 1, 1, tzinfo=UTC),
        **options: Any,
    ) -> None:
        self.now = now
        self._stated: dict[str, int] = {}
        self.query, self.store = query, store if store is not None else open_store("memory://")
        graph = resolve(query, {name: parse_schema(ddl) for name, ddl in schemas.items()})
        spec = LocalSpec(graph, "", self.store.uri, {}, {})
        self.graph = graph
        self.delivered: dict[str, dict[int, list[tuple[Any, ...]]]] = {sink.name: {} for sink in graph.sinks}
        self.deliveries: list[tuple[str, int]] = []
        executor = InProcess(spec, self.store, map_tasks)
        self.driver = Driver(
            graph,
            Journal.open(self.store),
            {},
            executor,
            self,
            Options(**options),
            observe,
            background,
            lambda: micros(self.now) // 1000,
        )
        stated = self.driver.stated
        self.driver.stated = lambda: {**stated(), **self._stated}  # type: ignore[method-assign]
        self.driver.check_graph()
        self.driver.claim()

    def deliver(self, sink: SinkNode, schema: pa.Schema, outputs: Sequence[Output], epoch: int) -> None:
        table = read_productions(self.store, schema, outputs)
        rows = [tuple(row.values()) for row in table.to_pylist()]
        known = self.delivered[sink.name].setdefault(epoch, rows)
        assert known == rows, f"epoch {epoch} was delivered to {sink.name} with other productions before"
        self.deliveries.append((sink.name, epoch))

    @property
    def epoch(self) -> int:
        """The last committed epoch, -1 before the first."""
        return self.driver.journal.history.epoch

    def feed(self, epoch: int | None = None, **records: Sequence[Any]) -> None:
        """Runs an epoch with these records per source; an epoch that is committed already is a replay."""
        number = Epoch(self.epoch + 1 if epoch is None else epoch)
        offsets = digest_of(repr(sorted(records.items())).encode())
        self.driver.run_epoch(number, "simulated", offsets, records)

    def advance_clock(self, by: str | timedelta) -> None:
        """Moves the driver's clock, and runs an epoch without records."""
        self.now += timedelta(microseconds=micros_of(by, "by"))
        self.feed()

    def advance_watermark(self, to: datetime, source: str | None = None) -> None:
        """States the watermark of a source (the only one with event time, unless named), and runs an epoch."""
        timed = [each.name for each in self.graph.sources if each.time is not None]
        if source is None and len(timed) != 1:
            raise UserError(f"say which source: {', '.join(timed) or 'none has event time'}")
        self._stated = {source or timed[0]: micros(to)}
        try:
            self.feed()
        finally:
            self._stated = {}

    def watermark(self, step: str) -> datetime | None:
        """The watermark of a step, or of a source."""
        history = self.driver.journal.history
        if step in history.clocks:
            return moment(history.clocks[step].watermark)
        return moment(history.watermarks.get(step, NO_TIME))

    def late(self, step: str) -> int:
        """How many records were too late for a step so far."""
        return self.driver.journal.history.late.get(step, 0)

    def dead_letters(self, step: str) -> int:
        """How many records have failed in a step so far and become dead letters."""
        return self.driver.journal.history.dead_letters.get(step, 0)

    def pending(self, step: str) -> int:
        """How many timers of a step are pending, as `Status.timers` counts them: it errs upwards."""
        return pending_timers(self.graph, self.driver.journal.history).get(step, 0)

    def outputs(self, sink: str) -> list[tuple[Any, ...]]:
        """All productions that reached a sink, epoch by epoch."""
        return [row for epoch in sorted(self.delivered[sink]) for row in self.delivered[sink][epoch]]

    def state(self, step: str, state: str | None = None, epoch: int | None = None) -> list[tuple[Any, ...]]:
        """The state of a step as (key..., value) tuples, in hash order; of a `Map` (key..., subkey, value), of a `Bag`
        (key..., epoch, list of values)."""
        history = self.driver.journal.history
        if epoch is not None and epoch != history.epoch:
            history = history_at(self.store, Epoch(epoch))
        chosen = next(s for s in self.graph.steps if s.name == step)
        name = state or next(iter(chosen.states))
        table = read_state(self.store, chosen, name, history)
        rows = [tuple(row.values()) for row in table.to_pylist()]
        declared = chosen.states[name]
        if not declared.is_object:
            return rows
        if pa.types.is_list(declared.stored_type):
            return [(*row[:-1], [pickle.loads(data) for data in row[-1]]) for row in rows]
        return [(*row[:-1], pickle.loads(row[-1])) for row in rows]


def to_batch(rows: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    """Tuples as a record batch."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [array_from(list(column), field.type) for field, column in zip(schema, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
