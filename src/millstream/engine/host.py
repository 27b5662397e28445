"""Hosting (the papers' S): one task per slot and level runs every step of that level.

Rules
-----
- Records are applied in the order (input of the step, producer, position): payloads arrive in any order and are sorted
  by the producer that made the records; producers are numbered in the order of sources, then of slots.
- The task reads the state of the manifest it was given and writes new objects only, under names of its own. Whether
  they count is decided by the driver, from this task's report (G3), which travels down the levels with the records.
- A level that failed sends on what it has, so that every later one still has a payload of every producer; the driver
  finds the failure among the reports.
- An exception in user code is data: it is reported, and never fails the Spark task.
- Records are judged late by the watermark of the epoch before; those that were fed back never are. The watermarks of
  this epoch follow from what all producers saw, so every slot finds the same ones, and they reach the last level
  within the epoch (G7).
- The watermark that a step passes on is kept back by the least of its holds, after this epoch's changes of them; each
  slot knows its own, and whoever reads the step takes the least of all slots.
- Whoever is about to take over something of a slot is sent what the slot writes, once the store has it. That one does
  not answer changes nothing but what it will have to fetch; it is not asked twice.
- What a worker holds is checked by its tasks, once they have done their own work, for a bounded time: first what is
  about to move there, then the slot's own state, then replicas. It never fails a task.
- Nothing here is remembered between tasks but caches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from millstream.engine.derive import MapFailure, derive
from millstream.engine.feedback import fed_back, fed_marks
from millstream.engine.grouping import Grouped, Lanes, without_times
from millstream.engine.observing import Fence
from millstream.engine.payload import INLINE_LIMIT, Head, Part, Parts, buffers, decode, in_order, receipts_of
from millstream.engine.route import failure_of, split
from millstream.engine.spec import TIME_COLUMN, EpochTask, Give, Here, SlotTask, Spec, rules_of
from millstream.engine.step import Done, StepRun
from millstream.errors import DamagedObject, StoreUnavailable
from millstream.model.computation import (
    RecordFailure,
)
from millstream.model.graph import Graph
from millstream.model.letters import DEAD_LETTER
from millstream.model.times import times_of
from millstream.protocol.epochs import Damage, Report
from millstream.protocol.manifest import Family
from millstream.protocol.statistics import Load, cell_bits, cells_of
from millstream.protocol.time import (
    Mark,
    SourceClock,
    advanced,
    mark_of_inputs,
    mark_of_slots,
    seen_together,
    step_watermark,
)
from millstream.store.held import Traffic
from millstream.store.objects import ObjectStore
from millstream.store.segments import CACHE

NOWHERE = Here()
MOST_THROUGH = 32 << 20
"""Larger segments are not written through: an epoch waits for it."""
MOST_THROUGH_S = 2.0
"""No more is begun to be sent after so long."""
CHECK_AHEAD_S = 0.02
"""How long a task goes on checking what its worker may need."""
CHECK_COMING_S = 0.05
"""The same, where something is about to move there."""


@dataclass(slots=True)
class Hosted:
    """What a slot's part of a level led to: reports, its own last, and what each slot of the next level is sent."""

    level: int
    slot: int
    reports: list[Report]
    parts: Parts
    watermarks: dict[str, Mark]
    """Of all sources and steps so far, as they hold back later levels."""
    reached: dict[str, int]
    """Of the steps of this level, as they are committed."""

    def payloads(self, task: EpochTask, store: ObjectStore) -> Iterator[bytes]:
        """For the slots of the next level. The reports go to the one of the same number."""
        return map(b"".join, self.buffers(task, store))

    def buffers(
        self, task: EpochTask, store: ObjectStore, inline_limit: int = INLINE_LIMIT
    ) -> Iterator[list[bytes | memoryview]]:
        """The same, each payload as buffers that need only be joined."""
        producer, reports = f"{self.level}.{self.slot}", {self.slot: self.reports}
        return buffers(self.parts, producer, store, task.maker, reports, None, self.watermarks, inline_limit)


def host(
    spec: Spec,
    task: EpochTask,
    level: int,
    mine: SlotTask,
    payloads: Iterable[bytes | memoryview],
    store: ObjectStore,
    here: Here = NOWHERE,
) -> Hosted:
    """Runs one slot's part of a level and reports what it did, or what kept it from doing it. Levels count from 1."""
    decoded = [decode(payload) for payload in payloads]
    receipts = receipts_of([head for head, _ in decoded])
    marks, reached, clocks = _watermarks(spec, task, level, [head for head, _ in decoded])
    hosted = Hosted(level, mine.slot, [], [[] for _ in range(task.slot_count)], marks, reached)
    for head, _ in decoded:
        hosted.reports += head.reports
    received = sorted((part for _, parts in decoded for part in parts), key=lambda part: part.order)
    report = Report(mine.slot, receipts, level=level, clocks=clocks, watermarks=reached)
    if level == 1 and mine.slot == 0:
        heads = [head for head, _ in decoded]
        report = replace(
            report,
            samples=_samples(heads),
            timings_ms={"route": sum(head.cpu_ms for head in heads)},
            unobserved={what: error for head in heads for what, error in head.unobserved.items()},
        )
    if here.worker and here.worker != mine.worker:
        report = replace(report, elsewhere=here.worker)
        if 0 <= mine.patience < _lacking(spec, level, mine, store):
            trouble = f"it ran on worker {here.worker} instead of {mine.worker}, which has not its state"
            hosted.reports.append(replace(report, trouble=trouble, gave_up=True))
            return hosted
    try:
        for part in received:
            if task.lanes[part.lane].level > level:
                hosted.parts[mine.slot].append(part)  # it was routed to this slot of a later level
        received = [*fed_back(task, level, mine.slot, store), *received]
        report = _run_level(spec, task, hosted, mine, received, report, store)
        if mine.through and here.give is not None and report.failure is None:
            report = _write_through(here.give, mine, report, store)
    except DamagedObject as error:
        report = replace(report, damage=Damage(error.name, error.found, error.expected))
    except StoreUnavailable as error:
        report = replace(report, trouble=str(error))
    hosted.reports.append(report)
    return hosted


def _lacking(spec: Spec, level: int, mine: SlotTask, store: ObjectStore) -> int:
    """About how many bytes of a slot's state for a level this worker would have to fetch."""
    steps = {step.name for step in spec.graph.steps if step.level == level}
    return CACHE.lacks(store, [piece for step, _, pieces in mine.pieces if step in steps for piece in pieces])


def _write_through(give: Give, mine: SlotTask, report: Report, store: ObjectStore) -> Report:
    """Sends what was written to those who are about to take it over; with the segments that each of them has got."""
    began = time.perf_counter()
    written = [*report.added, *(ref for edit in report.edits for ref in edit.outputs)]
    written = sorted((ref for ref in written if ref.bytes <= MOST_THROUGH), key=lambda ref: ref.bytes)
    found: dict[str, tuple[str, ...]] = {}
    for worker, steps in mine.through.items():
        sent: list[str] = []
        for ref in written:
            late = time.perf_counter() - began > MOST_THROUGH_S
            data = CACHE.object(store, ref) if ref.family.step in steps and not late else None
            if data is not None:
                try:
                    give(worker, ref, data)
                except OSError:
                    break
                sent.append(ref.name)
        found[worker] = tuple(sent)
    took = {"through": (time.perf_counter() - began) * 1000}
    return replace(report, through=found, timings_ms={**report.timings_ms, **took})


def _samples(heads: Sequence[Head]) -> dict[str, tuple[bytes, ...]]:
    found: dict[str, tuple[bytes, ...]] = {}
    for head in sorted(heads, key=lambda head: in_order(head.producer)):
        for source, few in head.samples.items():
            if few:
                found[source] = (*found.get(source, ()), few)
    return found


def _watermarks(
    spec: Spec, task: EpochTask, level: int, heads: Sequence[Head]
) -> tuple[dict[str, Mark], dict[str, int], dict[str, SourceClock]]:
    """The watermarks of this epoch: of all sources and steps up to a level, as they hold back later levels; of the
    steps of the level, as they are committed; and on level 1 the sources' clocks.

    A step whose inputs are all silent is silent, too: it holds nobody back but by what binds it.
    """
    graph, rules = spec.graph, rules_of(spec.graph)
    marks: dict[str, Mark] = fed_marks(task)
    reached: dict[str, int] = {}
    clocks: dict[str, SourceClock] = {}
    if level == 1:
        for source, rule in rules.items():
            parts = [head.seen[source] for head in heads if source in head.seen]
            seen = seen_together(parts, rule.percentile is not None)
            stated, leaving = task.stated.get(source), task.leaving.get(source, ())
            clocks[source] = advanced(rule, task.clocks[source], seen, task.clock_ms, stated, leaving)
            silent = source in task.idle and not seen.heard and source not in task.stated
            reached_now = clocks[source].watermark
            marks[source] = Mark(stood=reached_now) if silent else Mark(reached_now)
    for head in heads:
        for name, mark in head.watermarks.items():
            marks[name] = mark_of_slots(mark, marks[name]) if name in marks else mark
    for step in graph.steps:
        if step.level == level and step.timed:
            streams = [given.stream for given in step.inputs if given.time is not None]
            inputs = mark_of_inputs(marks[origin] for stream in streams for origin in graph.origins_of(stream))
            here = reached[step.name] = step_watermark(task.before[step.name], inputs)
            marks[step.name] = Mark(bound=inputs.bound, stood=here) if inputs.silent else Mark(here)
    return marks, reached, clocks


def _run_level(
    spec: Spec,
    task: EpochTask,
    hosted: Hosted,
    mine: SlotTask,
    received: Sequence[Part],
    report: Report,
    store: ObjectStore,
) -> Report:
    began, read, busy = time.perf_counter(), replace(CACHE.traffic), time.thread_time()
    pieces = {Family(step, state): found for step, state, found in mine.pieces}
    state = [piece for found in pieces.values() for piece in found]
    CACHE.settle(store.uri, mine.home, [piece.segment for piece in state], [*mine.coming, *mine.soon])
    lanes = Lanes(received, task, store)
    done, fence = Done(), Fence()
    for step in spec.graph.steps:
        if step.level != hosted.level:
            continue
        run = StepRun(spec, task, mine, step, pieces, store, done)
        spent, written = time.thread_time_ns(), len(done.added)
        try:
            due = run.due(hosted.reached)
            grouped, late = lanes.grouped(step, due)
            done.records[step.name] = 0 if grouped is None else grouped.count
            made = run.late(late)
            if grouped is not None:
                made.update(run.apply(grouped, hosted.reached))
            streams = derive(spec, made)
        except RecordFailure as error:
            return replace(report, failure=failure_of(step.name, error.key, error.record, error.cause))
        except MapFailure as error:
            return replace(report, failure=failure_of(error.name, "", "", error.cause))
        if step.dead_letters:
            letters = made.get(step.stream(DEAD_LETTER))
            done.dead_letters[step.name] = 0 if letters is None else letters.num_rows
        for stream in sorted(spec.graph.stored_streams & streams.keys()):
            run.store_productions(stream, without_times(streams[stream]))
        for node in spec.graph.feedbacks:
            if node.stream in streams:
                run.store_productions(node.name, _timed(spec.graph, node.stream, streams[node.stream]))
        split(task, streams, f"{hosted.level}.{mine.slot}", hosted.parts)
        if step.holds:
            run.pass_on(hosted.watermarks)
        if grouped is not None:
            size = sum(ref.bytes for ref in done.added[written:])
            bits = task.lanes[task.readers[step.name][0]].table.bin_bits
            micros = (time.thread_time_ns() - spent) // 1000
            load = fence("the load of a step", b"", partial(_load, grouped, bits, size, micros))
            if load:
                done.loads[step.name] = load
    ended, busy = time.perf_counter(), time.thread_time() - busy
    unchecked = CACHE.check_ahead(store, mine.coming, ended + CHECK_COMING_S)
    coming = CACHE.traffic.ahead - read.ahead
    for held in (state, mine.soon):
        CACHE.check_ahead(store, held, ended + CHECK_AHEAD_S)
    traffic = CACHE.traffic.since(read)
    sizes = {"found": traffic.found, "fetched": traffic.fetched, "ahead": traffic.ahead}
    sizes |= {"coming": coming, "unchecked": unchecked}
    return replace(
        report,
        added=tuple(done.added),
        edits=tuple(done.edits),
        outputs=tuple(done.outputs),
        records=done.records,
        late=done.late,
        passed=done.passed,
        timings_ms={**report.timings_ms, "steps": (ended - began) * 1000, "cpu": busy * 1000, **_cost(traffic)},
        read={name: size for name, size in sizes.items() if size},
        dead_letters=done.dead_letters,
        loads=done.loads,
        unobserved={**report.unobserved, **fence.failed},
    )


def _load(grouped: Grouped, bin_bits: int, size: int, micros: int) -> bytes:
    """What each part of the key space had to do: records and timers, bytes written, CPU time."""
    counts = np.zeros(len(grouped.hashes), np.int64)
    for part in grouped.inputs.values():
        counts += part.count()
    for due in grouped.due.values():
        counts += np.bincount(due.places, minlength=len(counts))
    return Load.of(cells_of(grouped.hashes, cell_bits(bin_bits), counts), size, micros).pack()


def _cost(read: Traffic) -> dict[str, float]:
    """Milliseconds that it took to read state that had not been read here before: to fetch it, of these to wait for the
    limit, and to load it."""
    found = {}
    if read.fetched or read.found:
        found["load"] = max(0.0, read.open_s - read.fetch_s) * 1000
    if read.fetched:
        found |= {"fetch": read.fetch_s * 1000, "fetch_wait": read.waited_s * 1000}
    return found


def _timed(graph: Graph, stream: str, records: pa.RecordBatch) -> pa.RecordBatch:
    """Records with their event time beside their columns, if they have any, wherever it was."""
    column = graph.times.get(stream)
    return records.append_column(TIME_COLUMN, pa.array(times_of(records.column(column)))) if column else records
