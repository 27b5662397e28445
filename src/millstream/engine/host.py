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
- What is written takes up the newest segments that are no larger than itself: it costs little more than the write,
  and where most keys change in every epoch, nothing is left for compaction.
- Nothing here is remembered between tasks but caches.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.engine.derive import MapFailure, derive
from millstream.engine.payload import Part, Parts, decode, encode, receipts_of
from millstream.engine.route import failure_of, split
from millstream.engine.spec import HASH_COLUMN, EpochTask, SlotTask, Spec
from millstream.errors import DamagedObject, StoreUnavailable
from millstream.model.batch import Batch, InputBatch
from millstream.model.computation import Outcome, RecordFailure, changes_of, run_batch
from millstream.model.graph import Step
from millstream.model.state import Value
from millstream.protocol.epochs import Damage, Output, Report
from millstream.protocol.keyspace import Hashes, Range
from millstream.protocol.manifest import Edit, Family, Input, Piece, SegmentRef
from millstream.store import names
from millstream.store.journal import digest_of
from millstream.store.keys import KeyColumns, Mask, Rows, arrange
from millstream.store.lookup import Found, locate
from millstream.store.merge import StateRows, newest_rows
from millstream.store.objects import ObjectStore
from millstream.store.segments import CACHE, SegmentCache, encode_batch, write_segments

TAKE_UP = 2
"""How many times the rows it writes a task may take up from older segments."""


@dataclass(slots=True)
class Hosted:
    """What a slot's part of a level led to: reports, its own last, and what each slot of the next level is sent."""

    level: int
    slot: int
    reports: list[Report]
    parts: Parts

    def payloads(self, task: EpochTask, store: ObjectStore) -> Iterator[bytes]:
        """For the slots of the next level. The reports go to the one of the same number."""
        return encode(self.parts, f"{self.level}.{self.slot}", store, task.maker, {self.slot: self.reports})


def host(
    spec: Spec, task: EpochTask, level: int, mine: SlotTask, payloads: Iterable[bytes], store: ObjectStore
) -> Hosted:
    """Runs one slot's part of a level and reports what it did, or what kept it from doing it. Levels count from 1."""
    started = time.perf_counter()
    decoded = [decode(payload) for payload in payloads]
    receipts = receipts_of([head for head, _ in decoded])
    hosted = Hosted(level, mine.slot, [], [[] for _ in range(task.slot_count)])
    for head, _ in decoded:
        hosted.reports += head.reports
    received = sorted((part for _, parts in decoded for part in parts), key=lambda part: part.order)
    report = Report(mine.slot, receipts, level=level)
    try:
        for part in received:
            if task.lanes[part.lane].level > level:
                hosted.parts[mine.slot].append(part)  # it was routed to this slot of a later level
        report = _run_level(spec, task, hosted, mine, received, report, store)
    except DamagedObject as error:
        report = replace(report, damage=Damage(error.name, error.found, error.expected))
    except StoreUnavailable as error:
        report = replace(report, trouble=str(error))
    hosted.reports.append(
        replace(report, timings_ms={**report.timings_ms, "all": (time.perf_counter() - started) * 1e3})
    )
    return hosted


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
    lanes = _Lanes(received, store)
    done = _Done()
    for step in spec.graph.steps:
        if step.level != hosted.level:
            continue
        grouped = lanes.grouped(step, task.readers[step.name])
        done.records[step.name] = 0 if grouped is None else grouped.count
        if grouped is None:
            continue
        run = _StepRun(spec, task, mine, step, pieces, store, done)
        try:
            streams = derive(spec, run.apply(grouped))
        except RecordFailure as error:
            return replace(report, failure=failure_of(step.name, error.key, error.record, error.cause))
        except MapFailure as error:
            return replace(report, failure=failure_of(error.name, "", "", error.cause))
        for stream in sorted(spec.graph.stored_streams & streams.keys()):
            run.store_productions(stream, streams[stream])
        split(task, streams, f"{hosted.level}.{mine.slot}", hosted.parts)
    timings = {"steps": (time.perf_counter() - began) * 1000}
    return replace(
        report,
        added=tuple(done.added),
        edits=tuple(done.edits),
        outputs=tuple(done.outputs),
        records=done.records,
        timings_ms=timings,
    )


@dataclass(slots=True)
class _Done:
    """What the steps of a level have written so far."""

    added: list[SegmentRef] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """The records of a step's inputs by key; `hashes` and `keys` are those of the distinct keys."""

    inputs: dict[str, InputBatch]
    hashes: Hashes
    keys: KeyColumns
    count: int


class _Lanes:
    """What was received, by lane. Decoded and grouped once, however many steps read it."""

    def __init__(self, received: Sequence[Part], store: ObjectStore) -> None:
        self._store = store
        self._parts: dict[int, list[Part]] = {}
        for part in received:
            self._parts.setdefault(part.lane, []).append(part)
        self._known: dict[tuple[tuple[int, ...], tuple[str, ...]], _Grouped | None] = {}

    def grouped(self, step: Step, lanes: tuple[int, ...]) -> _Grouped | None:
        """The records for a step, from the lanes of its inputs; None if there are none."""
        known = (lanes, tuple(given.name for given in step.inputs))
        if known not in self._known:
            self._known[known] = self._group(step, lanes)
        return self._known[known]

    def _group(self, step: Step, lanes: tuple[int, ...]) -> _Grouped | None:
        by_input: dict[str, list[pa.RecordBatch]] = {given.name: [] for given in step.inputs}
        for given, lane in zip(step.inputs, lanes, strict=True):
            schema = given.schema.insert(0, pa.field(HASH_COLUMN, pa.uint64()))
            for part in self._parts.get(lane, []):
                by_input[given.name].append(pa.ipc.read_record_batch(part.read(self._store), schema))
        if not any(by_input.values()):
            return None
        return _by_key(step, by_input)


def _by_key(step: Step, by_input: Mapping[str, list[pa.RecordBatch]]) -> _Grouped:
    """Groups the records of all inputs by key: a stable sort of all of them, cut apart again by input."""
    keyed: dict[str, pa.RecordBatch] = {}
    hashes, columns = [], []
    for given in {each.name: each for each in step.inputs}.values():
        schema = given.schema.insert(0, pa.field(HASH_COLUMN, pa.uint64()))
        batches = by_input[given.name]
        none = pa.RecordBatch.from_pylist([], schema)
        keyed[given.name] = batches[0] if len(batches) == 1 else pa.concat_batches([none, *batches])
        hashes.append(keyed[given.name].column(0).to_numpy())
        columns.append([keyed[given.name].column(name) for name in given.key])
    all_hashes: Hashes = hashes[0] if len(hashes) == 1 else np.concatenate(hashes)
    joined = columns[0] if len(columns) == 1 else [pa.concat_arrays(list(same)) for same in zip(*columns, strict=True)]
    keys = KeyColumns.canonical(joined)
    order, starts = arrange(all_hashes, keys)
    firsts = order[starts]
    inputs: dict[str, InputBatch] = {}
    begin = 0
    for name, batch in keyed.items():
        records, end = batch.remove_column(0), begin + batch.num_rows
        if len(keyed) == 1:
            inputs[name] = InputBatch(records, order, starts)
        else:
            mine = (order >= begin) & (order < end)
            inputs[name] = InputBatch(records, order[mine] - begin, _count_before(mine, starts))
        begin = end
    return _Grouped(inputs, all_hashes[firsts], keys.take(firsts), len(order))


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

    def apply(self, grouped: _Grouped) -> dict[str, pa.RecordBatch]:
        """Runs the step over its records; the productions by stream."""
        hashes, keys = grouped.hashes, grouped.keys
        batch = Batch(grouped.inputs, keys.columns, self.step.key, self.step.outputs, self.task.epoch)
        outcome = self._run(batch, hashes, keys)
        self._write_state(batch, outcome, hashes, keys)
        return {self.step.stream(output): batch for output, batch in outcome.productions.items()}

    def _run(self, batch: Batch, hashes: Hashes, keys: KeyColumns) -> Outcome:
        computation = self.spec.new_computation(self.step.name)
        try:
            computation.setup()
        except (Exception, SystemExit) as error:
            raise RecordFailure("", "", error) from error

        lookups: list[_LazyState] = []

        def stored(state: Value) -> _LazyState:
            found = self.pieces.get(Family(self.step.name, state.name), [])
            lookups.append(_LazyState(self.store, CACHE, found, hashes, keys))
            return lookups[-1]

        try:
            outcome = run_batch(computation, self.step.states, batch, stored)
        except RecordFailure:
            with contextlib.suppress(Exception):  # the first failure is the one to report
                computation.close()
            self._check(lookups)
            raise
        self._check(lookups)
        try:
            computation.close()
        except (Exception, SystemExit) as error:
            raise RecordFailure("", "", error) from error
        return outcome

    @staticmethod
    def _check(lookups: list[_LazyState]) -> None:
        """State that could not be read is our trouble, whatever user code made of it."""
        for lookup in lookups:
            if lookup.trouble is not None:
                raise lookup.trouble

    def _write_state(self, batch: Batch, outcome: Outcome, hashes: Hashes, keys: KeyColumns) -> None:
        owned = self.mine.owned[self.step.name]
        for name, handle in outcome.handles.items():
            changes = changes_of(handle, batch)
            if changes is None:
                continue
            changed, values, gone = changes
            rows = StateRows(hashes, keys, values, gone)
            if not changed.all():
                at = np.flatnonzero(changed)
                rows = StateRows(hashes[at], keys.take(at), values.take(pa.array(at)), gone[at])
            family = Family(self.step.name, name)
            pieces = self.pieces.get(family, [])
            taken = self._taken_up(pieces, len(rows.hashes), owned)
            if taken:
                bottom = len(taken) == len(pieces)
                rows = newest_rows(self.store, CACHE, taken, owned[0], drop_dead=bottom, newer=rows)
            refs = write_segments(
                self.store,
                family,
                self.task.maker,
                self.mine.slot,
                self.task.epoch,
                owned,
                rows.hashes,
                rows.keys,
                rows.values,
                rows.dead,
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
        """Stores what a sink receives."""
        if not productions.num_rows:
            return
        data = encode_batch(productions)
        name = names.production(stream, self.task.maker, self.mine.slot)
        self.store.put(name, data)
        self.done.outputs.append(Output(stream, self.mine.slot, name, productions.num_rows, len(data), digest_of(data)))


class _LazyState:
    """The stored values of a batch's keys, looked up when first asked for."""

    def __init__(
        self, store: ObjectStore, cache: SegmentCache, pieces: list[Piece], hashes: Hashes, keys: KeyColumns
    ) -> None:
        self._arguments = (store, cache, pieces, hashes, keys)
        self._found: Found | None = None
        self.trouble: DamagedObject | StoreUnavailable | None = None
        """Why it could not be looked up. User code sees the exception too, and might swallow it."""

    def _look(self) -> Found:
        if self._found is None:
            try:
                self._found = locate(*self._arguments)
            except (DamagedObject, StoreUnavailable) as error:
                self.trouble = error
                raise
        return self._found

    def present(self) -> Mask:
        return self._look().present

    def numbers(self, default: Any, dtype: Any) -> npt.NDArray[Any]:
        return self._look().numbers(default, dtype)

    def arrow(self, kind: pa.DataType) -> pa.Array:
        return self._look().arrow(kind)
