"""Grouping: what a slot received, by lane, and then by step and key.

Rules
-----
- Records are grouped once per lane and way of reading it, however many steps do.
- Records are judged late by the watermark of the epoch before, as they are grouped.
- A key is there if it has records or due timers; everything is aligned with the keys, which are in hash order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.engine.payload import Part
from millstream.engine.spec import HASH_COLUMN, TIME_COLUMN, EpochTask
from millstream.model.batch import InputBatch
from millstream.model.graph import Input as GraphInput
from millstream.model.graph import Step
from millstream.model.timers import Due
from millstream.model.times import NULL_TIME, Times, times_of
from millstream.protocol.keyspace import Hashes
from millstream.protocol.time import NO_TIME
from millstream.store.due import DueTimers
from millstream.store.keys import KeyColumns, Mask, Rows, arrange
from millstream.store.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Grouped:
    """The records of a step's inputs by key; `hashes` and `keys` are those of the distinct keys.

    `due` are the step's timers that are due, by name of the timer. Their keys need not have records.
    """

    inputs: dict[str, InputBatch]
    hashes: Hashes
    keys: KeyColumns
    count: int
    due: dict[str, Due]

    def only(self, keys: Mask) -> Grouped:
        """The part of some of the keys."""
        if keys.all():
            return self
        inputs = {name: part.only(keys) for name, part in self.inputs.items()}
        due = {name: timers.only(keys) for name, timers in self.due.items()}
        count = sum(part.rows_count for part in inputs.values())
        return Grouped(inputs, self.hashes[keys], self.keys.take(np.flatnonzero(keys)), count, due)

    def without_records(self) -> Grouped:
        """The same keys with their due timers only."""
        inputs = {name: part.none() for name, part in self.inputs.items()}
        return Grouped(inputs, self.hashes, self.keys, 0, self.due)


class Lanes:
    """What was received, by lane. Decoded and grouped once, however many steps read it."""

    def __init__(self, received: Sequence[Part], task: EpochTask, store: ObjectStore) -> None:
        self._task, self._store = task, store
        self._parts: dict[int, list[Part]] = {}
        for part in received:
            self._parts.setdefault(part.lane, []).append(part)
        self._known: dict[Any, tuple[Grouped | None, dict[str, pa.RecordBatch]]] = {}

    def grouped(self, step: Step, due: Mapping[str, DueTimers]) -> tuple[Grouped | None, dict[str, pa.RecordBatch]]:
        """The records and due timers for a step, None if there are none; and the late records that it is not to see, by
        input, with their event times beside them."""
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
    ) -> tuple[Grouped | None, dict[str, pa.RecordBatch]]:
        inputs: dict[str, list[_Timed]] = {given.name: [] for given in step.inputs}
        late: dict[str, list[pa.RecordBatch]] = {}
        for given, lane in zip(step.inputs, lanes, strict=True):
            for part in self._parts.get(lane, []):
                found = _Timed.read(part.read(self._store), given)
                if found.times is not None and step.late != "process" and given.stream not in self._task.fed:
                    found, dropped = found.judged(cut)
                    if dropped is not None:
                        late.setdefault(given.name, []).append(dropped)
                if found.keyed.num_rows:
                    inputs[given.name].append(found)
        grouped = _by_key(step, inputs, due) if due or any(inputs.values()) else None
        return grouped, {name: pa.concat_batches(batches) for name, batches in late.items()}


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

    def judged(self, cut: int) -> tuple[_Timed, pa.RecordBatch | None]:
        """Those that are not late; and those that are, if there are any, with their times beside their columns."""
        assert self.times is not None
        bad = (self.times < cut) | (self.times == NULL_TIME)
        if not bad.any():
            return self, None
        mask = pa.array(bad)
        dropped = self.keyed.filter(mask).remove_column(0)
        dropped = dropped.append_column(TIME_COLUMN, pa.array(self.times[bad]))
        return _Timed(self.keyed.filter(pc.invert(mask)), self.times[~bad]), dropped


_EARLIEST = NO_TIME + 1
"""The event time of a production that has none while there is no watermark: not late, as "no time" would be."""


def raised(times: Times, cut: int) -> Times:
    """Event times of productions: not below the watermark, and never "no time"."""
    return np.maximum(times, max(cut, _EARLIEST))


def own_times(times: Times, cut: int) -> Times:
    """Event times of late records: their own; of those that have none, as of productions."""
    return np.where(times == NULL_TIME, max(cut, _EARLIEST), times)


def _shown(times: Times | None) -> Times | None:
    """Event times as computations see them."""
    if times is None or times.min(initial=0) > _EARLIEST:
        return times
    return np.where(times == _EARLIEST, NULL_TIME, times)


def without_times(records: pa.RecordBatch) -> pa.RecordBatch:
    """Productions as sinks get them."""
    return records.drop_columns([TIME_COLUMN]) if TIME_COLUMN in records.schema.names else records


def _by_key(step: Step, inputs: Mapping[str, list[_Timed]], due: Mapping[str, DueTimers]) -> Grouped:
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
    return Grouped(parts, all_hashes[firsts], keys.take(firsts), count, timers)


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
