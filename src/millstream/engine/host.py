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
- What is written takes up the newest segments that are no larger than itself: it costs little more than the write,
  and where most keys change in every epoch, nothing is left for compaction.
- Nothing here is remembered between tasks but caches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.engine.derive import MapFailure, derive
from millstream.engine.feedback import fed_back, fed_marks
from millstream.engine.payload import INLINE_LIMIT, Head, Part, Parts, buffers, decode, receipts_of
from millstream.engine.route import failure_of, split
from millstream.engine.sift import sift
from millstream.engine.spec import HASH_COLUMN, TIME_COLUMN, EpochTask, SlotTask, Spec, rules_of
from millstream.errors import DamagedObject, StoreUnavailable
from millstream.model.batch import Batch, InputBatch
from millstream.model.batch_timers import BatchTimer
from millstream.model.computation import (
    Outcome,
    RecordFailure,
    StepFailure,
    changes_of,
    close,
    letters_of,
    run_batch,
    setup,
)
from millstream.model.graph import Input as GraphInput
from millstream.model.graph import Step
from millstream.model.handles import Handle
from millstream.model.holds import BatchHold, RecordHold
from millstream.model.kinds import Changed, State
from millstream.model.letters import DEAD_LETTER, Letter, as_batch
from millstream.model.timers import Due, Look, RecordTimer, Timer
from millstream.model.times import EVENT_TIME, NULL_TIME, Times, times_of
from millstream.protocol.epochs import Damage, Output, Report
from millstream.protocol.keyspace import Hashes, Range
from millstream.protocol.manifest import Edit, Family, Input, Piece, SegmentRef
from millstream.protocol.time import END_OF_TIME, NO_TIME, SourceClock, advanced, seen_together, step_watermark
from millstream.store import names
from millstream.store.due import DueTimers, due_between
from millstream.store.journal import digest_of
from millstream.store.keys import KeyColumns, Mask, Rows, arrange, concat_keys
from millstream.store.least import least_between
from millstream.store.lookup import Found, entries_of, locate
from millstream.store.merge import newest_rows
from millstream.store.objects import ObjectStore
from millstream.store.rows import StateRows
from millstream.store.segments import CACHE, encode_batch, write_segments

Looked = TypeVar("Looked")

TAKE_UP = 2
"""How many times the rows it writes a task may take up from older segments."""


@dataclass(slots=True)
class Hosted:
    """What a slot's part of a level led to: reports, its own last, and what each slot of the next level is sent."""

    level: int
    slot: int
    reports: list[Report]
    parts: Parts
    watermarks: dict[str, int]
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
    spec: Spec, task: EpochTask, level: int, mine: SlotTask, payloads: Iterable[bytes | memoryview], store: ObjectStore
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
    try:
        for part in received:
            if task.lanes[part.lane].level > level:
                hosted.parts[mine.slot].append(part)  # it was routed to this slot of a later level
        received = [*fed_back(task, level, mine.slot, store), *received]
        report = _run_level(spec, task, hosted, mine, received, report, store)
    except DamagedObject as error:
        report = replace(report, damage=Damage(error.name, error.found, error.expected))
    except StoreUnavailable as error:
        report = replace(report, trouble=str(error))
    hosted.reports.append(report)
    return hosted


def _watermarks(
    spec: Spec, task: EpochTask, level: int, heads: Sequence[Head]
) -> tuple[dict[str, int], dict[str, int], dict[str, SourceClock]]:
    """The watermarks of this epoch: of all sources and steps up to a level, as they hold back later levels; of the
    steps of the level, as they are committed; and on level 1 the sources' clocks.

    A step whose inputs are all idle stays where it is, and holds nobody back.
    """
    graph, rules = spec.graph, rules_of(spec.graph)
    marks = fed_marks(task)
    reached: dict[str, int] = {}
    clocks: dict[str, SourceClock] = {}
    if level == 1:
        for source, rule in rules.items():
            parts = [head.seen[source] for head in heads if source in head.seen]
            seen = seen_together(parts, rule.percentile is not None)
            clocks[source] = advanced(rule, task.clocks[source], seen, task.clock_ms, task.stated.get(source))
            silent = source in task.idle and not seen.heard and source not in task.stated
            marks[source] = END_OF_TIME if silent else clocks[source].watermark
    for head in heads:
        for name, mark in head.watermarks.items():
            marks[name] = min(mark, marks.get(name, END_OF_TIME))
    for step in graph.steps:
        if step.level == level and step.timed:
            inputs = [graph.watermark_of(given.stream, marks) for given in step.inputs if given.time is not None]
            reached[step.name] = step_watermark(task.before[step.name], inputs)
            marks[step.name] = END_OF_TIME if min(inputs) == END_OF_TIME else reached[step.name]
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
    began = time.perf_counter()
    pieces = {Family(step, state): found for step, state, found in mine.pieces}
    CACHE.settle(store.uri, mine.slot, [piece.segment for found in pieces.values() for piece in found])
    lanes = _Lanes(received, task, store)
    done = _Done()
    for step in spec.graph.steps:
        if step.level != hosted.level:
            continue
        run = _StepRun(spec, task, mine, step, pieces, store, done)
        due = run.due(hosted.reached)
        grouped, late = lanes.grouped(step, due)
        done.records[step.name] = 0 if grouped is None else grouped.count
        done.late[step.name] = 0 if late is None else late.num_rows
        made = {} if late is None or step.late != "output" else {step.stream("late"): late}
        try:
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
                run.store_productions(node.name, streams[node.stream])
        split(task, streams, f"{hosted.level}.{mine.slot}", hosted.parts)
        if step.holds:
            run.pass_on(hosted.watermarks)
    timings = {"steps": (time.perf_counter() - began) * 1000}
    return replace(
        report,
        added=tuple(done.added),
        edits=tuple(done.edits),
        outputs=tuple(done.outputs),
        records=done.records,
        late=done.late,
        passed=done.passed,
        timings_ms=timings,
        dead_letters=done.dead_letters,
    )


@dataclass(slots=True)
class _Done:
    """What the steps of a level have written so far."""

    added: list[SegmentRef] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """The records of a step's inputs by key; `hashes` and `keys` are those of the distinct keys.

    `due` are the step's timers that are due, by name of the timer. Their keys need not have records.
    """

    inputs: dict[str, InputBatch]
    hashes: Hashes
    keys: KeyColumns
    count: int
    due: dict[str, Due]

    def only(self, keys: Mask) -> _Grouped:
        """The part of some of the keys."""
        if keys.all():
            return self
        inputs = {name: part.only(keys) for name, part in self.inputs.items()}
        due = {name: timers.only(keys) for name, timers in self.due.items()}
        count = sum(part.rows_count for part in inputs.values())
        return _Grouped(inputs, self.hashes[keys], self.keys.take(np.flatnonzero(keys)), count, due)


@dataclass(slots=True)
class _Ran:
    """What a run of a step led to, and what is to be written of each state and timer: nothing is yet."""

    outcome: Outcome
    rows: dict[str, StateRows]


class _Lanes:
    """What was received, by lane. Decoded and grouped once, however many steps read it."""

    def __init__(self, received: Sequence[Part], task: EpochTask, store: ObjectStore) -> None:
        self._task, self._store = task, store
        self._parts: dict[int, list[Part]] = {}
        for part in received:
            self._parts.setdefault(part.lane, []).append(part)
        self._known: dict[Any, tuple[_Grouped | None, pa.RecordBatch | None]] = {}

    def grouped(self, step: Step, due: Mapping[str, DueTimers]) -> tuple[_Grouped | None, pa.RecordBatch | None]:
        """The records and due timers for a step, None if there are none; and the late records it is not to see."""
        lanes = self._task.readers[step.name]
        cut = self._task.before.get(step.name, NO_TIME)
        if due:
            return self._group(step, lanes, cut, due)
        known = (lanes, tuple(given.name for given in step.inputs), cut, step.late)
        if known not in self._known:
            self._known[known] = self._group(step, lanes, cut, {})
        return self._known[known]

    def _group(
        self, step: Step, lanes: tuple[int, ...], cut: int, due: Mapping[str, DueTimers]
    ) -> tuple[_Grouped | None, pa.RecordBatch | None]:
        inputs: dict[str, list[_Timed]] = {given.name: [] for given in step.inputs}
        late: list[pa.RecordBatch] = []
        for given, lane in zip(step.inputs, lanes, strict=True):
            for part in self._parts.get(lane, []):
                found = _Timed.read(part.read(self._store), given)
                if found.times is not None and step.late != "process" and given.stream not in self._task.fed:
                    found, dropped = found.judged(cut)
                    late += dropped if step.late == "output" else [each.select([TIME_COLUMN]) for each in dropped]
                if found.keyed.num_rows:
                    inputs[given.name].append(found)
        grouped = _by_key(step, inputs, due) if due or any(inputs.values()) else None
        return grouped, pa.concat_batches(late) if late else None


@dataclass(frozen=True, slots=True)
class _Timed:
    """Records of one input with their hashes in the first column, and their event times, if they have any."""

    keyed: pa.RecordBatch
    times: Times | None

    @staticmethod
    def read(message: pa.Buffer, given: GraphInput) -> _Timed:
        schema = given.schema.insert(0, pa.field(HASH_COLUMN, pa.uint64()))
        if given.time == "":
            schema = schema.append(pa.field(TIME_COLUMN, pa.int64()))
        keyed = pa.ipc.read_record_batch(message, schema)
        if given.time is None:
            return _Timed(keyed, None)
        if given.time == "":
            return _Timed(keyed.drop_columns([TIME_COLUMN]), keyed.column(TIME_COLUMN).to_numpy())
        return _Timed(keyed, times_of(keyed.column(given.time)))

    def judged(self, cut: int) -> tuple[_Timed, list[pa.RecordBatch]]:
        """Those that are not late; and those that are, as productions: with their time beside their columns."""
        assert self.times is not None
        bad = (self.times < cut) | (self.times == NULL_TIME)
        if not bad.any():
            return self, []
        mask = pa.array(bad)
        dropped = self.keyed.filter(mask).remove_column(0)
        dropped = dropped.append_column(TIME_COLUMN, pa.array(_raised(self.times[bad], cut)))
        return _Timed(self.keyed.filter(pc.invert(mask)), self.times[~bad]), [dropped]


_EARLIEST = NO_TIME + 1
"""The event time of a production that has none while there is no watermark: not late, as "no time" would be."""


def _raised(times: Times, cut: int) -> Times:
    """Event times of productions: not below the watermark, and never "no time"."""
    return np.maximum(times, max(cut, _EARLIEST))


def _shown(times: Times | None) -> Times | None:
    """Event times as computations see them."""
    if times is None or times.min(initial=0) > _EARLIEST:
        return times
    return np.where(times == _EARLIEST, NULL_TIME, times)


def without_times(records: pa.RecordBatch) -> pa.RecordBatch:
    """Productions as sinks get them."""
    return records.drop_columns([TIME_COLUMN]) if TIME_COLUMN in records.schema.names else records


def _by_key(step: Step, inputs: Mapping[str, list[_Timed]], due: Mapping[str, DueTimers]) -> _Grouped:
    """Groups the records of all inputs, and due timers, by key: a stable sort of all of them, cut apart again."""
    keyed: dict[str, _Timed] = {}
    hashes, columns = [], []
    for given in {each.name: each for each in step.inputs}.values():
        timed = any(each.time is not None for each in step.inputs if each.name == given.name)
        keyed[given.name] = found = _joined(given, inputs[given.name], timed)
        hashes.append(found.keyed.column(0).to_numpy())
        columns.append([found.keyed.column(name) for name in given.key])
    for waiting in due.values():
        hashes.append(waiting.hashes)
        columns.append(list(waiting.key_columns))
    all_hashes: Hashes = hashes[0] if len(hashes) == 1 else np.concatenate(hashes)
    joined = columns[0] if len(columns) == 1 else [pa.concat_arrays(list(same)) for same in zip(*columns, strict=True)]
    keys = KeyColumns.canonical(joined)
    order, starts = arrange(all_hashes, keys)
    firsts = order[starts]
    parts: dict[str, InputBatch] = {}
    begin = 0
    for name, found in keyed.items():
        records, end = found.keyed.remove_column(0), begin + found.keyed.num_rows
        if len(keyed) == 1 and not due:
            parts[name] = InputBatch(records, order, starts, _shown(found.times))
        else:
            mine = (order >= begin) & (order < end)
            parts[name] = InputBatch(records, order[mine] - begin, _count_before(mine, starts), _shown(found.times))
        begin = end
    count = begin
    timers: dict[str, Due] = {}
    if due:
        place = np.empty(len(order), np.int64)
        place[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(order)))
    for name, waiting in due.items():
        end = begin + len(waiting.hashes)
        fields = waiting.timers.flatten()
        payloads = fields[1] if len(fields) > 1 else None
        timers[name] = Due(place[begin:end], waiting.tags, fields[0].to_numpy(), payloads)
        begin = end
    return _Grouped(parts, all_hashes[firsts], keys.take(firsts), count, timers)


def _joined(given: GraphInput, found: list[_Timed], timed: bool) -> _Timed:
    """The records of one input in one piece. An input of united streams is timed if any of them is."""
    if len(found) == 1 and (found[0].times is not None) == timed:
        return found[0]
    none = pa.RecordBatch.from_pylist([], given.schema.insert(0, pa.field(HASH_COLUMN, pa.uint64())))
    times = None
    if timed:
        known = [np.full(each.keyed.num_rows, NULL_TIME) if each.times is None else each.times for each in found]
        times = np.concatenate([np.empty(0, np.int64), *known])
    return _Timed(pa.concat_batches([none, *(each.keyed for each in found)]), times)


def _count_before(mine: Mask, starts: Rows) -> Rows:
    """How many of the marked rows stand before each start."""
    counted: Rows = np.concatenate(([0], np.cumsum(mine)))[starts]
    return counted


class _StepRun:
    """One step, one slot, one attempt."""

    def __init__(
        self,
        spec: Spec,
        task: EpochTask,
        mine: SlotTask,
        step: Step,
        pieces: Mapping[Family, list[Piece]],
        store: ObjectStore,
        done: _Done,
    ) -> None:
        self.spec, self.task, self.mine, self.step, self.pieces, self.store, self.done = (
            spec,
            task,
            mine,
            step,
            pieces,
            store,
            done,
        )
        self.trouble: DamagedObject | StoreUnavailable | None = None

    def _bounds(self, timer: Timer, marks: Mapping[str, int]) -> tuple[int, int]:
        """The time that a timer's kind had reached before the epoch, and has reached with it."""
        if timer.kind == EVENT_TIME:
            return self.task.before[self.step.name], marks[self.step.name]
        return self.task.clock_before_ms * 1000, self.task.clock_ms * 1000

    def due(self, marks: Mapping[str, int]) -> dict[str, DueTimers]:
        """The timers of the step that are due."""
        found = {}
        for name, timer in self.step.timers.items():
            after, until = self._bounds(timer, marks)
            pieces = self.pieces.get(Family(self.step.name, name), [])
            waiting = due_between(self.store, CACHE, pieces, timer.arrow_type, after, until)
            if waiting is not None:
                found[name] = waiting
        return found

    def apply(self, grouped: _Grouped, marks: Mapping[str, int]) -> dict[str, pa.RecordBatch]:
        """Runs the step over its records and due timers; the productions by stream."""
        letters: list[Letter] = []
        if self.step.dead_letters and self.step.vectorised:
            ran, failed = sift(len(grouped.hashes), lambda keys: self._ran(grouped.only(keys), marks))
            ran = ran or _Ran(Outcome({}, {}, {}), {})
            for place, failure in failed.items():
                alone = grouped.only(np.arange(len(grouped.hashes)) == place)
                letters += letters_of(self._batch(alone), self.step.timers, alone.due, failure.cause)
            self._count_as_fired(ran, grouped.only(np.isin(np.arange(len(grouped.hashes)), list(failed))))
        else:
            ran = self._ran(grouped, marks)
            letters += ran.outcome.letters
        for name, rows in ran.rows.items():
            declared = self.step.declared(name)
            self._write_rows(Family(self.step.name, name), rows, declared)
        return self._made(ran.outcome, letters)

    def _made(self, outcome: Outcome, letters: Sequence[Letter]) -> dict[str, pa.RecordBatch]:
        """The productions by stream, letters among them, with their event times if there are any."""
        made, times = dict(outcome.productions), dict(outcome.times)
        if letters:
            made[DEAD_LETTER] = as_batch(self.step.name, self.task.epoch, letters)
            if self.step.timed:
                times[DEAD_LETTER] = np.array([letter.micros for letter in letters], np.int64)
        for output in times:
            stamps = _raised(times[output], self._passed())
            made[output] = made[output].append_column(TIME_COLUMN, pa.array(stamps))
        return {self.step.stream(output): productions for output, productions in made.items()}

    def _batch(self, grouped: _Grouped) -> Batch:
        before = self.task.before.get(self.step.name, NO_TIME)
        columns = grouped.keys.columns
        return Batch(grouped.inputs, columns, self.step.key, self.step.outputs, self.task.epoch, before)

    def _ran(self, grouped: _Grouped, marks: Mapping[str, int]) -> _Ran:
        """Runs the step, and makes of what it changed what is to be written."""
        hashes, keys = grouped.hashes, grouped.keys
        batch = self._batch(grouped)
        timers: dict[str, RecordTimer | BatchTimer] = {}
        for name, given in self.step.timers.items():
            limit, look = self._bounds(given, marks)[1], self._look(given, hashes, keys)
            if self.step.vectorised:
                timers[name] = BatchTimer(given, batch, limit, look, grouped.due.get(name))
            else:
                timers[name] = RecordTimer(given, limit, len(hashes), look)
        holds: dict[str, RecordHold | BatchHold] = {}
        for name, hold in self.step.holds.items():
            passed, look = self._passed(), self._look(hold.timer, hashes, keys)
            if self.step.vectorised:
                holds[name] = BatchHold(hold, batch, passed, look)
            else:
                holds[name] = RecordHold(hold, len(hashes), passed, look)
        outcome = self._run(batch, hashes, keys, timers, grouped.due, holds)
        rows = {}
        for name, state in outcome.handles.items():
            changes = self._changes(state, batch)
            if changes is not None:
                rows[name] = _rows_of(changes, hashes, keys, self._until(self.step.states[name], batch, marks))
        for name, timer in {**timers, **{name: hold.timer for name, hold in holds.items()}}.items():
            changes = self._changes(timer, batch)
            if changes is not None:
                rows[name] = _rows_of(changes, hashes, keys, None)
        return _Ran(outcome, rows)

    def _passed(self) -> int:
        """The watermark that the step has passed on before the epoch: none of its productions is older."""
        before = self.task.before.get(self.step.name, NO_TIME)
        return self.task.passed.get(self.step.name, before)

    def pass_on(self, marks: dict[str, int]) -> None:
        """Keeps the watermark that the step passes on back to the least of its holds, as they are after the epoch."""
        name = self.step.name
        passed, mark = self.task.passed[name], marks[name]
        least = END_OF_TIME
        for hold in self.step.holds.values():
            pieces = self._pieces_after(Family(name, hold.name))
            after = max(passed - 1, NO_TIME)
            found = least_between(self.store, CACHE, pieces, hold.timer.arrow_type, after, min(mark, least))
            least = least if found is None else found
        self.done.passed[name] = step_watermark(passed, [mark], least)
        marks[name] = END_OF_TIME if min(mark, least) == END_OF_TIME else self.done.passed[name]

    def _pieces_after(self, family: Family) -> list[Piece]:
        """The pieces of a family with what this epoch has written, newest first."""
        edits = [edit for edit in self.done.edits if edit.family == family]
        written = [ref for ref in self.done.added if ref.family == family]
        written += [ref for edit in edits for ref in edit.outputs]
        taken = {given.name for edit in edits for given in edit.inputs}
        older = [piece for piece in self.pieces.get(family, []) if piece.segment.name not in taken]
        return [*(Piece(ref, ref.covers) for ref in written), *older]

    def _look(self, timer: Timer, hashes: Hashes, keys: KeyColumns) -> Look:
        """Finds stored timers of keys of the batch."""

        def look(places: Rows, tags: pa.Array) -> Times:
            tagged = KeyColumns.canonical([*keys.take(places).columns, tags])
            found = self._stored(timer.name, hashes[places], tagged, subbed=True).arrow(timer.arrow_type)
            times: Times = pc.struct_field(found, "time").fill_null(NULL_TIME).to_numpy(zero_copy_only=False)
            return times

        return look

    def _changes(self, handle: Handle | RecordTimer | BatchTimer, batch: Batch) -> Changed | None:
        try:
            return changes_of(handle, batch)
        finally:
            self._check_lookups()

    def _count_as_fired(self, ran: _Ran, failed: _Grouped) -> None:
        """The due timers of keys that failed are over, though nothing else of the keys changes."""
        for name, due in failed.due.items():
            count, declared = len(due.places), self.step.timers[name]
            if count:
                payloads = None if declared.payload_type is None else [None] * count
                gone = Changed(due.places, due.tags, declared.encode([0] * count, payloads), np.ones(count, np.bool_))
                fired = _rows_of(gone, failed.hashes, failed.keys, None)
                ran.rows[name] = _together(ran.rows[name], fired) if name in ran.rows else fired

    def _run(
        self,
        batch: Batch,
        hashes: Hashes,
        keys: KeyColumns,
        timers: Mapping[str, RecordTimer | BatchTimer],
        due: Mapping[str, Due],
        holds: Mapping[str, RecordHold | BatchHold],
    ) -> Outcome:
        computation = self.spec.new_computation(self.step.name)
        try:
            setup(computation)
        except (Exception, SystemExit) as error:
            raise StepFailure(error) from error

        def stored(state: State) -> _LazyState | _LazyEntries:
            now = self._now(state)
            if state.subkey_type is None:
                return self._stored(state.name, hashes, keys, now=now)
            return _LazyEntries(self, state, hashes, keys, now)

        try:
            outcome = run_batch(
                computation, self.step.states, batch, stored, timers, due, self.step.dead_letters, holds
            )
        except RecordFailure:
            with contextlib.suppress(Exception):  # the first failure is the one to report
                close(computation)
            self._check_lookups()
            raise
        self._check_lookups()
        try:
            close(computation)
        except (Exception, SystemExit) as error:
            raise StepFailure(error) from error
        return outcome

    def _stored(
        self, name: str, hashes: Hashes, keys: KeyColumns, subbed: bool = False, now: int | None = None
    ) -> _LazyState:
        """What is stored under these keys of a state or timer of the step."""
        pieces = self.pieces.get(Family(self.step.name, name), [])
        subs = keys.subs() if subbed else None
        return _LazyState(partial(locate, self.store, CACHE, pieces, hashes, keys, subs, now), self._guarded)

    def _guarded(self, look: Callable[[], Looked]) -> Looked:
        """Looks something up. User code sees the exception too if it fails, and might swallow it: it is remembered."""
        try:
            return look()
        except (DamagedObject, StoreUnavailable) as error:
            self.trouble = error
            raise

    def _check_lookups(self) -> None:
        """State that could not be read is our trouble, whatever user code made of it."""
        if self.trouble is not None:
            raise self.trouble

    def _now(self, declared: State) -> int | None:
        """The time by which values of a state have expired; None if they do not."""
        if declared.ttl is None:
            return None
        if declared.ttl_time == EVENT_TIME:
            return self.task.before[self.step.name]
        return self.task.clock_ms * 1000

    def _until(self, declared: State, batch: Batch, marks: Mapping[str, int]) -> Times | None:
        """When what is written now expires, for each key."""
        if declared.ttl is None:
            return None
        if declared.ttl_time != EVENT_TIME:
            return np.full(len(batch), self.task.clock_ms * 1000 + declared.ttl)
        newest = batch.newest().view(np.int64)
        newest[newest == NULL_TIME] = max(marks[self.step.name], NO_TIME + 1)
        return np.minimum(newest, END_OF_TIME - declared.ttl) + declared.ttl

    def _write_rows(self, family: Family, rows: StateRows, declared: State | Timer) -> None:
        owned = self.mine.owned[self.step.name]
        pieces = self.pieces.get(family, [])
        taken = self._taken_up(pieces, len(rows.hashes), owned)
        if taken:
            bottom = len(taken) == len(pieces)
            now = self._now(declared) if isinstance(declared, State) else None
            rows = newest_rows(self.store, CACHE, taken, owned[0], drop_dead=bottom, newer=rows, now=now)
        refs = write_segments(
            self.store,
            family,
            self.task.maker,
            self.mine.slot,
            self.task.epoch,
            owned,
            rows,
            timers=isinstance(declared, Timer),
            filtered=isinstance(declared, State) and declared.bloom,
        )
        if taken:
            inputs = tuple(Input(piece.segment.name, piece.ranges) for piece in taken)
            self.done.edits.append(Edit(family, owned[0], inputs, tuple(refs)))
        else:
            self.done.added += refs

    def _taken_up(self, pieces: list[Piece], written: int, owned: tuple[Range, ...]) -> list[Piece]:
        """The newest pieces that are together at most `TAKE_UP` times as large as what is written."""
        taken: list[Piece] = []
        room = TAKE_UP * written
        for piece in pieces:
            room -= piece.segment.rows
            if room < 0 or piece.ranges != owned or len(owned) != 1 or piece.segment.name in self.mine.busy:
                break
            taken.append(piece)
        return taken

    def store_productions(self, stream: str, productions: pa.RecordBatch) -> None:
        """Stores what a sink receives, or the next epoch; that with its event times."""
        if not productions.num_rows:
            return
        least = pc.min(productions.column(TIME_COLUMN)).as_py() if TIME_COLUMN in productions.schema.names else None
        data = encode_batch(productions)
        name = names.production(stream, self.task.maker, self.mine.slot)
        self.store.put(name, data)
        self.done.outputs.append(
            Output(stream, self.mine.slot, name, productions.num_rows, len(data), digest_of(data), least)
        )


def _rows_of(changes: Changed, hashes: Hashes, keys: KeyColumns, until: Times | None) -> StateRows:
    """What a handle changed, in the order of keys."""
    all_of_them = len(changes.places) == len(hashes) and changes.subkeys is None
    mine = keys if all_of_them else keys.take(changes.places)
    found = hashes if all_of_them else hashes[changes.places]
    expiry = None if until is None else until[changes.places]
    if changes.subkeys is None:
        return StateRows(found, mine, changes.values, changes.gone, None, expiry)
    full = KeyColumns.canonical([*mine.columns, changes.subkeys])
    subs = full.subs()
    order, _ = arrange(found, full, subs)
    return StateRows(found, full, changes.values, changes.gone, subs, expiry).take(order)


def _together(rows: StateRows, more: StateRows) -> StateRows:
    """Rows with subkeys of different keys, in one piece."""
    assert rows.subs is not None
    assert more.subs is not None
    hashes, subs = np.concatenate([rows.hashes, more.hashes]), np.concatenate([rows.subs, more.subs])
    keys = concat_keys([rows.keys, more.keys])
    order, _ = arrange(hashes, keys, subs)
    values, dead = pa.concat_arrays([rows.values, more.values]), np.concatenate([rows.dead, more.dead])
    return StateRows(hashes, keys, values, dead, subs).take(order)


class _LazyState:
    """The stored values of a batch's keys, looked up when first asked for."""

    def __init__(self, look: Callable[[], Found], guarded: Callable[[Callable[[], Found]], Found]) -> None:
        self._look, self._guarded = look, guarded
        self._known: Found | None = None

    def _found(self) -> Found:
        if self._known is None:
            self._known = self._guarded(self._look)
        return self._known

    def present(self) -> Mask:
        return self._found().present

    def numbers(self, default: Any, dtype: Any) -> npt.NDArray[Any]:
        return self._found().numbers(default, dtype)

    def arrow(self, kind: pa.DataType) -> pa.Array:
        return self._found().arrow(kind)


class _LazyEntries:
    """The stored entries of a batch's keys, of a state with subkeys."""

    def __init__(self, run: _StepRun, state: State, hashes: Hashes, keys: KeyColumns, now: int | None) -> None:
        self._run, self._state, self._hashes, self._keys, self._now = run, state, hashes, keys, now

    def look(self, places: Rows, subkeys: pa.Array) -> _LazyState:
        full = KeyColumns.canonical([*self._keys.take(places).columns, subkeys])
        return self._run._stored(self._state.name, self._hashes[places], full, subbed=True, now=self._now)

    def entries(self, places: Rows) -> tuple[Rows, pa.Array, pa.Array]:
        run, state = self._run, self._state
        pieces = run.pieces.get(Family(run.step.name, state.name), [])
        kinds = (state.subkey_type, state.stored_type)
        mine = self._keys.take(places)
        found = run._guarded(lambda: entries_of(run.store, CACHE, pieces, self._hashes[places], mine, kinds, self._now))
        return places[found.places], found.subkeys, found.values
