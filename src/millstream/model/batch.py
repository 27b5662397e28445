"""The records of one slot and epoch, grouped by key.

Rules
-----
- `keys` are the distinct keys in hash order; everything computed per key is aligned with them.
- `rows` are the records grouped by key; within a key they stand in the order in which they are applied: stream,
  producer, position.
- A step with several inputs has one part per input, `batch.input(name)`, aligned with the keys of the whole batch: a
  key may have no record in a part.
- One rule for arrays: what can hold a null is an Arrow array, what cannot is NumPy.
- Grouping the records costs a copy of them, so it is done when first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.model.arrays import array_from
from millstream.model.lateness import Late
from millstream.model.times import NULL_TIME, Times, moment, times_of
from millstream.model.types import format_schema

Rows = npt.NDArray[np.int64]


class InputBatch:
    """The records of one input, grouped by the keys of the batch. Made by `Batch.input`.

    Everything per key is aligned with `batch.keys`; a key may have no record here.
    """

    def __init__(self, records: pa.RecordBatch, order: Rows, starts: Rows, times: Times | None = None) -> None:
        self._records, self._order, self._starts, self._times = records, order, starts, times

    def only(self, keys: npt.NDArray[np.bool_]) -> InputBatch:
        """The records of some of the keys."""
        counts = self.count()
        starts = np.cumsum(counts[keys]) - counts[keys]
        return InputBatch(self._records, self._order[np.repeat(keys, counts)], starts, self._times)

    def none(self) -> InputBatch:
        """The same keys without a record."""
        return InputBatch(self._records, self._order[:0], np.zeros_like(self._starts), self._times)

    @cached_property
    def rows(self) -> pa.RecordBatch:
        """The records, grouped by key."""
        return self._records.take(pa.array(self._order))

    @property
    def starts(self) -> Rows:
        """Where each key's records begin in `rows`."""
        return self._starts

    @property
    def rows_count(self) -> int:
        """How many records there are."""
        return len(self._order)

    @property
    def timed(self) -> bool:
        """Whether the records have event time."""
        return self._times is not None

    @cached_property
    def times(self) -> npt.NDArray[np.datetime64]:
        """The event times of the records, in the order of `rows`: `datetime64[us]`, NaT where there is none."""
        return self.micros.view("datetime64[us]")

    @cached_property
    def micros(self) -> Times:
        """The same as whole numbers of microseconds since 1970."""
        if self._times is None:
            return np.full(len(self._order), NULL_TIME, np.int64)
        return self._times[self._order]

    def count(self) -> npt.NDArray[np.int64]:
        """The number of records of each key."""
        return np.diff(self._starts, append=len(self._order))

    def column(self, name: str) -> pa.Array:
        """A column of the records, in the order of `rows`."""
        return self._column(name).take(pa.array(self._order))

    def sum(self, name: str) -> npt.NDArray[Any]:
        """The sum of a number column for each key: int64, which wraps around, or float64. Nulls add nothing."""
        values = self.column(name)
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise UserError(f"sum needs a column of integers or floats, {name!r} is {values.type}")
        dtype = np.float64 if pa.types.is_floating(values.type) else np.int64
        filled = pc.fill_null(values, 0) if values.null_count else values
        numbers = filled.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        sums = np.zeros(len(self._starts), dtype)
        some = self.count() > 0
        if some.any():
            sums[some] = np.add.reduceat(numbers, self._starts[some])
        return sums

    def min(self, name: str) -> pa.Array:
        """The least value of a column for each key; null where all are, or where there is no record."""
        return self._aggregate(name, "min")

    def max(self, name: str) -> pa.Array:
        """The greatest value of a column for each key; null where all are, or where there is no record."""
        return self._aggregate(name, "max")

    def first(self, name: str) -> pa.Array:
        """The column's value in the first record of each key; null where there is none."""
        return self._picked(name, self._starts)

    def last(self, name: str) -> pa.Array:
        """The column's value in the last record of each key; null where there is none."""
        return self._picked(name, np.append(self._starts[1:], len(self._order)) - 1)

    def _column(self, name: str) -> pa.Array:
        if name not in self._records.schema.names:
            raise UserError(f"no column {name!r}; the input has {', '.join(self._records.schema.names)}")
        return self._records.column(name)

    def _picked(self, name: str, positions: Rows) -> pa.Array:
        none = self.count() == 0
        if not none.any():
            return self._column(name).take(pa.array(self._order[positions]))
        chosen = np.zeros(len(positions), np.int64)
        chosen[~none] = self._order[positions[~none]]
        return self._column(name).take(pa.array(chosen, mask=none))

    def _aggregate(self, name: str, function: str) -> pa.Array:
        counts = self.count()
        group = np.repeat(np.arange(len(counts)), counts)
        table = pa.table({"group": group, "value": self.column(name)})
        result = table.group_by("group", use_threads=False).aggregate([("value", function)])
        found = result.column(f"value_{function}").combine_chunks()
        none = counts == 0
        return found.take(pa.array(np.cumsum(~none) - 1, mask=none)) if none.any() else found


class Batch:
    """What `on_batch` is given: the records of a slot and epoch. `len(batch)` is the number of distinct keys.

    Everything per key is aligned with `batch.keys`. What can hold a null is an Arrow array, what cannot is NumPy.
    In a step with several inputs, ask `batch.input("name")` for records, counts and sums.
    """

    def __init__(
        self,
        inputs: Mapping[str, InputBatch],
        key_columns: Sequence[pa.Array],
        key_names: Sequence[str],
        outputs: Mapping[str, pa.Schema],
        epoch: int,
        watermark: int = NULL_TIME,
    ) -> None:
        self._outputs = outputs
        self._watermark = watermark
        self.whole: Batch | None = None
        self._late: list[Late] = []
        self.places: Rows = np.arange(0)
        self._key_names = tuple(key_names)
        self.inputs: dict[str, InputBatch] = dict(inputs)
        """The parts of the batch, by the name of the input."""
        self.key_columns: tuple[pa.Array, ...] = tuple(key_columns)
        """The key's columns, one Arrow array each, aligned with `keys`."""
        self.epoch: int = epoch
        """The number of this epoch."""

    def __len__(self) -> int:
        return len(self.key_columns[0])

    def __repr__(self) -> str:
        records = sum(len(part._order) for part in self.inputs.values())
        return f"<Batch of {records} records of {len(self)} keys, epoch {self.epoch}>"

    @cached_property
    def keys(self) -> pa.Array:
        """The distinct keys, in hash order: an Arrow array; of structs where the key has several columns."""
        if len(self.key_columns) == 1:
            return self.key_columns[0]
        return pa.StructArray.from_arrays(list(self.key_columns), names=list(self._key_names))

    def input(self, name: str) -> InputBatch:
        """The part of one input, of a step that has several. A key may have no record in it."""
        if name not in self.inputs:
            raise UserError(f"no input {name!r}; the step has {', '.join(self.inputs)}")
        return self.inputs[name]

    def _of_records(self) -> Batch:
        """The keys that have records, if others are here because of a timer: the batch itself if there are none."""
        counts = np.add.reduce([part.count() for part in self.inputs.values()])
        if counts.all():
            return self
        places = np.flatnonzero(counts)
        inputs = {
            name: InputBatch(part._records, part._order, part._starts[places], part._times)
            for name, part in self.inputs.items()
        }
        return self._part(places, inputs)

    def _part(self, places: Rows, inputs: Mapping[str, InputBatch]) -> Batch:
        columns = [column.take(pa.array(places)) for column in self.key_columns]
        part = Batch(inputs, columns, self._key_names, self._outputs, self.epoch, self._watermark)
        part.whole, part.places = self, places
        return part

    def _note_late(self, count: Late) -> None:
        """Counts records that the computation has found to be late, or late for some of their windows."""
        (self.whole or self)._late.append(count)

    def newest(self) -> npt.NDArray[np.datetime64]:
        """The newest event time of each key's records, over all inputs; NaT where there is none."""
        newest = np.full(len(self), NULL_TIME, np.int64)
        for part in self.inputs.values():
            some = part.count() > 0
            if some.any():
                newest[some] = np.maximum(newest[some], np.maximum.reduceat(part.micros, part.starts[some]))
        return newest.view("datetime64[us]")

    @cached_property
    def _only(self) -> InputBatch:
        if not self.inputs:
            raise UserError("this is a batch of timers, which has no records: it has keys, times, tags and payloads")
        if len(self.inputs) > 1:
            raise UserError(
                f"the step has several inputs: say of which, as batch.input({next(iter(self.inputs))!r}).rows"
            )
        return next(iter(self.inputs.values()))

    @property
    def timed_input(self) -> bool:
        """Whether any input has event time."""
        if self.whole is not None:
            return self.whole.timed_input
        return any(part.timed for part in self.inputs.values())

    @property
    def watermark(self) -> datetime | None:
        """The watermark by which records were judged: that of the epoch before. None if there is none yet."""
        return moment(self._watermark)

    @property
    def rows(self) -> pa.RecordBatch:
        """The records, grouped by key."""
        return self._only.rows

    @property
    def times(self) -> npt.NDArray[np.datetime64]:
        """The event times of the records, in the order of `rows`: `datetime64[us]`, NaT where there is none."""
        return self._only.times

    @property
    def starts(self) -> Rows:
        """Where each key's records begin in `rows`."""
        return self._only.starts

    def count(self) -> npt.NDArray[np.int64]:
        """The number of records of each key."""
        return self._only.count()

    def column(self, name: str) -> pa.Array:
        """A column of the records, in the order of `rows`."""
        return self._only.column(name)

    def sum(self, name: str) -> npt.NDArray[Any]:
        """The sum of a number column for each key: int64, which wraps around, or float64. Nulls add nothing."""
        return self._only.sum(name)

    def min(self, name: str) -> pa.Array:
        """The least value of a column for each key; null where all are."""
        return self._only.min(name)

    def max(self, name: str) -> pa.Array:
        """The greatest value of a column for each key; null where all are."""
        return self._only.max(name)

    def first(self, name: str) -> pa.Array:
        """The column's value in the first record of each key."""
        return self._only.first(name)

    def last(self, name: str) -> pa.Array:
        """The column's value in the last record of each key."""
        return self._only.last(name)

    def output(self, *columns: Any, **named: Any) -> pa.RecordBatch:
        """Productions: one array per column of the step's `output`, by position or by name.

        Arrays may be NumPy, Arrow, pandas or lists; they must have one length and fit the declared types.
        """
        if "" not in self._outputs:
            raise UserError("this computation declares no output, so it cannot produce")
        return _productions(self._outputs[""], columns, named)

    def output_to(self, name: str, *columns: Any, **named: Any) -> To:
        """Productions of a named output, as `output` makes those of the unnamed one."""
        return To(name, _productions(output_of(self._outputs, name), columns, named))

    def timed(self, productions: pa.RecordBatch | To, times: Any) -> Timed:
        """Productions with event times of their own: `datetime64` or Arrow timestamps, one for each.

        Without it, if there is one production for each key, they have the newest event time of that key; else all have
        the newest of the batch. A time before the watermark is raised to it.
        """
        made = productions.value if isinstance(productions, To) else productions
        if isinstance(times, (pa.Array, pa.ChunkedArray)):
            stamps = times_of(times.combine_chunks() if isinstance(times, pa.ChunkedArray) else times)
        else:
            stamps = np.asarray(times, "datetime64[us]").view(np.int64)
        if len(stamps) != made.num_rows:
            raise UserError(f"{len(stamps)} times found, {made.num_rows} expected, one for each production")
        return Timed(productions, stamps)


class TimerBatch(Batch):
    """What the callback of a timer is given in a computation with `on_batch`: keys whose timer is due, one timer each.

    A key with several due timers comes again in another call, so that its timers fire in the order of their times.
    """

    def __init__(
        self, whole: Batch, places: Rows, micros: Times, tags: pa.Array, payloads: pa.Array | None, limit: int
    ) -> None:
        columns = [column.take(pa.array(places)) for column in whole.key_columns]
        super().__init__({}, columns, whole._key_names, whole._outputs, whole.epoch, whole._watermark)
        self.whole, self.places, self.micros, self.limit = whole, places, micros, limit
        self.tags: pa.Array = tags
        """The tags of the timers, aligned with `keys`."""
        self.payloads: Any = payloads
        """The payloads of the timers, aligned with `keys`; None if the timer has none."""

    def __repr__(self) -> str:
        return f"<TimerBatch of {len(self)} timers, epoch {self.epoch}>"

    @property
    def times(self) -> npt.NDArray[np.datetime64]:
        """The times of the timers, aligned with `keys`."""
        return self.micros.view("datetime64[us]")

    @property
    def reached(self) -> datetime | None:
        """How far time has come in this epoch, the watermark or the clock: all timers up to it fire."""
        return moment(self.limit)


class Timed:
    """Productions with event times of their own. Made by `Batch.timed`, and for one of them by `At.timed`."""

    __slots__ = ("micros", "productions")

    def __init__(self, productions: Any, micros: Any) -> None:
        self.productions, self.micros = productions, micros


class To:
    """A production on its way to a named output. Made by `to` and `Batch.output_to`."""

    __slots__ = ("name", "value")

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value

    def __repr__(self) -> str:
        return f"to({self.name!r}, {self.value!r})"


def to(name: str, *values: Any) -> To:
    """A production of a named output, in `on_record`: the values, or one dict or tuple of them.

    >>> to("spikes", "rain", 7)
    to('spikes', ('rain', 7))
    """
    one = len(values) == 1 and isinstance(values[0], (tuple, list, dict))
    return To(name, values[0] if one else values)


def output_of(outputs: Mapping[str, pa.Schema], name: str) -> pa.Schema:
    """The schema of a named output."""
    if not name or name not in outputs:
        known = ", ".join(repr(known) for known in outputs if known) or "none"
        raise UserError(f"no output {name!r}; the computation declares {known} in `outputs`")
    return outputs[name]


def _productions(schema: pa.Schema, columns: tuple[Any, ...], named: Mapping[str, Any]) -> pa.RecordBatch:
    if columns and named:
        raise UserError("give output columns either by position or by name")
    if named:
        unknown = sorted(set(named) - set(schema.names))
        missing = [name for name in schema.names if name not in named]
        if unknown or missing:
            raise UserError(f"output has {', '.join(schema.names)}; unknown {unknown}, missing {missing}")
        columns = tuple(named[name] for name in schema.names)
    if len(columns) != len(schema):
        raise UserError(f"{len(columns)} output columns found, {len(schema)} expected: {format_schema(schema)}")
    arrays = []
    for field, column in zip(schema, columns, strict=True):
        arrays.append(output_column(field, column))
    lengths = {len(array) for array in arrays}
    if len(lengths) > 1:
        found = ", ".join(f"{n}: {len(a)}" for n, a in zip(schema.names, arrays, strict=True))
        raise UserError(f"output columns have different lengths ({found})")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def output_column(field: pa.Field, values: Any) -> pa.Array:
    """Values as a column of an output; an error names the column."""
    try:
        array = array_from(values.copy() if isinstance(values, np.ndarray) else values, field.type)
    except UserError as error:
        raise UserError(f"output column {field.name!r}: {error}") from error
    if not field.nullable and array.null_count:
        raise UserError(f"output column {field.name!r} is NOT NULL, but {array.null_count} of its values are null")
    return array
