"""Combining before the exchange: records of one key (and window) become one row where they are made.

Rules
-----
- It is a map, so it runs in the task that has the records; the step combines what all tasks made, in their order.
- Grouping pays if keys repeat. If a sample says that they hardly do, every record becomes a row of its own.
- Only columns that an aggregate needs travel, beside the key.
- With `keep` records travel as they are, with the start of their window; with `own_time` their event time as well, for
  steps that give late ones back.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from millstream.errors import UserError
from millstream.library.lateness import OWN_TIME, RECORDS, counter_of
from millstream.library.parts import LONG, Aggregate, Totals, column_of
from millstream.library.reduce import MAX, MIN, Part, reduce_keys
from millstream.library.windows import START, Window, timestamps
from millstream.model.times import Times
from millstream.model.transform import Transform
from millstream.model.types import TIMESTAMP

_SAMPLE = 4096
_WORTH = 2.0
"""How many records a group must have on average, by the sample's estimate, to make grouping worth its while."""

_NEWEST = Part("time", LONG, MAX)
SPAN = [Part("session_from", LONG, MIN), Part("session_to", LONG, MAX)]
"""The times of the first and the last record of a piece of a session."""


class Partial(Transform):
    """Aggregates records by key, and by pane if there are windows, task by task.

    Rows of panes say how many records they stand for (see `library.lateness`).
    """

    def __init__(
        self,
        key: tuple[str, ...],
        aggregates: Mapping[str, Aggregate],
        window: Window | None,
        keep: bool = False,
        own_time: bool = False,
    ) -> None:
        self.key, self.aggregates, self.window, self.keep, self.own_time = key, aggregates, window, keep, own_time

    def bind(self, schema: pa.Schema, timed: bool) -> Partial:
        bound = copy.copy(self)
        bound.totals = Totals(self.aggregates, schema, by_time=self.window is not None and self.window.gap > 0)
        check_key(self.key, schema)
        if self.window is not None and not timed:
            raise UserError("a window needs event time; give the source event_time=...")
        fields = list(schema) if self.keep else [schema.field(name) for name in self.key]
        if self.window is not None:
            check_free(START, [field.name for field in fields])
            fields.append(pa.field(START, TIMESTAMP))
        if self.own_time:
            check_free(OWN_TIME, [field.name for field in fields])
            fields.append(pa.field(OWN_TIME, LONG))
        if not self.keep:
            bound.span = SPAN if self.window is not None and self.window.gap else []
            if self.window is not None and counter_of(self.aggregates) == column_of(RECORDS):
                bound.span = [*bound.span, RECORDS]
            made = bound.totals.columns + [pa.field(column_of(part), part.kind) for part in bound.span]
            for part in made:
                check_free(part.name, self.key)
            fields += made
        bound.output = pa.schema(fields)
        return bound

    totals: Totals
    span: list[Part]

    def apply(self, records: pa.RecordBatch, micros: Times | None) -> tuple[pa.RecordBatch, Times | None]:
        if self.window is None:
            return self._by_key(records, micros)
        assert micros is not None
        starts = self.window.panes(micros)
        if self.keep:
            columns = [*records.columns, timestamps(starts), *([pa.array(micros)] if self.own_time else [])]
            kept = pa.RecordBatch.from_arrays(columns, schema=self.output)
            return kept, self.window.judged(starts)
        keys = [records.column(name) for name in self.key]
        ones = pa.array(np.ones(len(micros), np.int64)) if RECORDS in self.span else None
        parts = self.totals.lifted(records, micros)
        parts += [ones if part == RECORDS else pa.array(micros) for part in self.span]
        one = (starts[0] == starts).all()
        given = keys if one else [*keys, pa.array(starts)]
        if repeats(given):
            found, parts = reduce_keys([*self.totals.parts, *self.span], parts, given)
            keys = found[: len(keys)]
            starts = np.full(len(keys[0]), starts[0]) if one else found[-1].to_numpy()
        made = pa.RecordBatch.from_arrays([*keys, timestamps(starts), *parts], schema=self.output)
        return made, self.window.judged(starts)

    def _by_key(self, records: pa.RecordBatch, micros: Times | None) -> tuple[pa.RecordBatch, Times | None]:
        keys = [records.column(name) for name in self.key]
        parts = self.totals.lifted(records)
        if repeats(keys):
            times = [] if micros is None else [pa.array(micros)]
            keys, parts = reduce_keys([*self.totals.parts, *[_NEWEST] * len(times)], [*parts, *times], keys)
            if micros is not None:
                micros = parts.pop().to_numpy()
        return pa.RecordBatch.from_arrays([*keys, *parts], schema=self.output), micros


def repeats(keys: Sequence[pa.Array]) -> bool:
    """Whether keys repeat so often that grouping them pays, as far as a sample tells.

    Of n drawn at random from g groups of one size, about n * n / 2g repeat another: that estimates g. Groups that are
    larger than others only add repeats.
    """
    rows = len(keys[0])
    if rows <= _SAMPLE:
        return rows > 1
    places = pa.array((np.arange(_SAMPLE) * 2654435761) % rows)  # far apart, in no pattern, and always the same
    names = [f"key{number}" for number in range(len(keys))]
    sample = pa.table([key.take(places) for key in keys], names=names)
    repeated: int = _SAMPLE - sample.group_by(names, use_threads=False).aggregate([]).num_rows
    return 2.0 * repeated * rows / _SAMPLE**2 >= _WORTH


def check_key(key: Sequence[str], schema: pa.Schema) -> None:
    """Refuses a key that records do not have."""
    for name in key:
        if name not in schema.names:
            raise UserError(f"no column {name!r} to key by; the input has {', '.join(schema.names)}")


def check_free(name: str, taken: Sequence[str]) -> None:
    """Refuses a column that the library needs itself."""
    if name.lower() in (other.lower() for other in taken):
        raise UserError(f"the input has a column {name!r}, which this step makes itself; rename it with map_batches")
