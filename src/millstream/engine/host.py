"""Hosting (the papers' S): one task per slot and level runs every step of that level.

Rules
-----
- Records are applied in the order (source, map task, position): payloads arrive in any order and are sorted by their
  producer first; producers are numbered in the order of sources.
- The task reads the state of the manifest it was given and writes new objects only, under names of its own. Whether
  they count is decided by the driver, from this task's report (G3).
- An exception in user code is data: it is reported, and never fails the Spark task.
- What is written takes up the newest segments that are no larger than itself: it costs little more than the write,
  and where most keys change in every epoch, nothing is left for compaction.
- Nothing here is remembered between tasks but caches.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.engine.payload import decode, in_order, receipts_of
from millstream.engine.spec import HASH_COLUMN, EpochTask, Lane, SlotTask, Spec
from millstream.errors import DamagedObject, StoreUnavailable
from millstream.model.batch import Batch
from millstream.model.computation import Outcome, RecordFailure, changes_of, run_batch
from millstream.model.graph import Step
from millstream.model.state import Value
from millstream.protocol.epochs import Damage, Failure, Output, Report
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

_RECORD_LIMIT = 2000  # characters of a key or record in an error


def host(
    spec: Spec, task: EpochTask, level: int, mine: SlotTask, payloads: Iterable[bytes], store: ObjectStore
) -> Report:
    """Runs one slot's part of a level and reports what it did, or what kept it from doing it."""
    try:
        return _host(spec, task, level, mine, payloads, store)
    except DamagedObject as error:
        return Report(mine.slot, {}, damage=Damage(error.name, error.found, error.expected))
    except StoreUnavailable as error:
        return Report(mine.slot, {}, trouble=str(error))


def _host(
    spec: Spec, task: EpochTask, level: int, mine: SlotTask, payloads: Iterable[bytes], store: ObjectStore
) -> Report:
    started = time.perf_counter()
    decoded = sorted((decode(payload, store) for payload in payloads), key=lambda item: in_order(item[0]))
    receipts = receipts_of([head for head, _ in decoded])
    pieces = {Family(step, state): found for step, state, found in mine.pieces}
    CACHE.settle(store.uri, mine.slot, [piece.segment for found in pieces.values() for piece in found])
    received = time.perf_counter()
    added: list[SegmentRef] = []
    edits: list[Edit] = []
    outputs: list[Output] = []
    records: dict[str, int] = {}
    steps = {step.name: step for step in spec.graph.steps}
    for number, lane in enumerate(task.levels[level]):
        bodies = [body for _, sections in decoded for at, body in sections if at == number]
        grouped = _group(lane, steps[lane.steps[0]].input_schema, bodies) if bodies else None
        for name in lane.steps:
            records[name] = 0 if grouped is None else len(grouped.order)
            if grouped is None:
                continue
            run = _StepRun(spec, task, mine, steps[name], pieces, store)
            try:
                run.apply(lane, grouped)
            except RecordFailure as error:
                return Report(mine.slot, receipts, failure=_failure(name, error))
            added += run.added
            edits += run.edits
            outputs += run.outputs
    ended = time.perf_counter()
    timings = {"receive": (received - started) * 1000, "steps": (ended - received) * 1000}
    return Report(mine.slot, receipts, tuple(added), tuple(edits), tuple(outputs), records, timings_ms=timings)


@dataclass(frozen=True, slots=True)
class _Grouped:
    """The records of a lane, and how they fall into keys: `hashes` and `keys` are those of the distinct keys."""

    records: pa.RecordBatch
    order: Rows
    starts: Rows
    hashes: Hashes
    keys: KeyColumns


def _group(lane: Lane, schema: pa.Schema, bodies: list[pa.Buffer]) -> _Grouped:
    """Decodes and groups the records of a lane: once, however many steps read it."""
    with_hash = schema.insert(0, pa.field(HASH_COLUMN, pa.uint64()))
    batches = [pa.ipc.read_record_batch(body, with_hash) for body in bodies]
    keyed = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    hashes: Hashes = keyed.column(0).to_numpy()
    records = keyed.remove_column(0)
    keys = KeyColumns.canonical([records.column(name) for name in lane.key])
    order, starts = arrange(hashes, keys)
    firsts = order[starts]
    return _Grouped(records, order, starts, hashes[firsts], keys.take(firsts))


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
    ) -> None:
        self.spec, self.task, self.mine, self.step, self.pieces, self.store = (
            spec,
            task,
            mine,
            step,
            pieces,
            store,
        )
        self.added: list[SegmentRef] = []
        self.edits: list[Edit] = []
        self.outputs: list[Output] = []

    def apply(self, lane: Lane, grouped: _Grouped) -> None:
        """Runs the step over the records of its lane."""
        hashes, keys = grouped.hashes, grouped.keys
        batch = Batch(
            grouped.records, grouped.order, grouped.starts, keys.columns, lane.key, self.step.output, self.task.epoch
        )
        outcome = self._run(batch, hashes, keys)
        self._write_state(batch, outcome, hashes, keys)
        self._store_productions(outcome.productions)

    def _run(self, batch: Batch, hashes: Hashes, keys: KeyColumns) -> Outcome:
        computation = self.spec.new_computation(self.step.name)
        try:
            computation.setup()
        except Exception as error:
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
        except Exception as error:
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
                self.edits.append(Edit(family, owned[0], inputs, tuple(refs)))
            else:
                self.added += refs

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

    def _store_productions(self, productions: pa.RecordBatch | None) -> None:
        stream = self.step.name
        if productions is None or not productions.num_rows or stream not in self.spec.graph.stored_streams:
            return
        data = encode_batch(productions)
        name = names.production(stream, self.task.maker, self.mine.slot)
        self.store.put(name, data)
        self.outputs.append(Output(stream, self.mine.slot, name, productions.num_rows, len(data), digest_of(data)))


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


def _failure(step: str, error: RecordFailure) -> Failure:
    cause = error.cause
    trace = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    text = f"{type(cause).__name__}: {cause}"
    return Failure(step, error.key[:_RECORD_LIMIT], error.record[:_RECORD_LIMIT], text[:_RECORD_LIMIT], trace[-4000:])
