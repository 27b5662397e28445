"""The records of one slot and epoch, grouped by key.

Rules
-----
- `keys` are the distinct keys in hash order; everything computed per key is aligned with them.
- `rows` are the records grouped by key; within a key they stand in the order in which they are applied: source, map
  task, position.
- One rule for arrays: what can hold a null is an Arrow array, what cannot is NumPy.
- Grouping the records costs a copy of them, so it is done when first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.model.arrays import array_from
from millstream.model.types import format_schema

Rows = npt.NDArray[np.int64]


class Batch:
    """What `on_batch` is given. `len(batch)` is the number of distinct keys."""

    def __init__(
        self,
        records: pa.RecordBatch,
        order: Rows,
        starts: Rows,
        key_columns: Sequence[pa.Array],
        key_names: Sequence[str],
        output: pa.Schema | None,
        epoch: int,
    ) -> None:
        self._records, self._order, self._starts = records, order, starts
        self._output = output
        self._key_names = tuple(key_names)
        self.key_columns: tuple[pa.Array, ...] = tuple(key_columns)
        """The key's columns, one Arrow array each, aligned with `keys`."""
        self.epoch = epoch
        """The number of this epoch."""

    def __len__(self) -> int:
        return len(self._starts)

    def __repr__(self) -> str:
        return f"<Batch of {len(self._order)} records of {len(self)} keys, epoch {self.epoch}>"

    @cached_property
    def keys(self) -> pa.Array:
        """The distinct keys, in hash order: an Arrow array; of structs where the key has several columns."""
        if len(self.key_columns) == 1:
            return self.key_columns[0]
        return pa.StructArray.from_arrays(list(self.key_columns), names=list(self._key_names))

    @cached_property
    def rows(self) -> pa.RecordBatch:
        """The records, grouped by key."""
        return self._records.take(pa.array(self._order))

    @cached_property
    def starts(self) -> Rows:
        """Where each key's records begin in `rows`."""
        return self._starts

    def count(self) -> npt.NDArray[np.int64]:
        """The number of records of each key."""
        return np.diff(self._starts, append=len(self._order))

    def column(self, name: str) -> pa.Array:
        """A column of the records, in the order of `rows`."""
        return self._column(name).take(pa.array(self._order))

    def _column(self, name: str) -> pa.Array:
        if name not in self._records.schema.names:
            raise UserError(f"no column {name!r}; the input has {', '.join(self._records.schema.names)}")
        return self._records.column(name)

    def sum(self, name: str) -> npt.NDArray[Any]:
        """The sum of a number column for each key: int64, which wraps around, or float64. Nulls add nothing."""
        values = self.column(name)
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
            raise UserError(f"sum needs a column of integers or floats, {name!r} is {values.type}")
        dtype = np.float64 if pa.types.is_floating(values.type) else np.int64
        filled = pc.fill_null(values, 0) if values.null_count else values
        numbers = filled.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
        return np.add.reduceat(numbers, self._starts) if len(self) else np.zeros(0, dtype)

    def min(self, name: str) -> pa.Array:
        """The least value of a column for each key; null where all are."""
        return self._aggregate(name, "min")

    def max(self, name: str) -> pa.Array:
        """The greatest value of a column for each key; null where all are."""
        return self._aggregate(name, "max")

    def first(self, name: str) -> pa.Array:
        """The column's value in the first record of each key."""
        return self._column(name).take(pa.array(self._order[self._starts]))

    def last(self, name: str) -> pa.Array:
        """The column's value in the last record of each key."""
        ends = np.append(self._starts[1:], len(self._order)) - 1
        return self._column(name).take(pa.array(self._order[ends]))

    def _aggregate(self, name: str, function: str) -> pa.Array:
        group = np.repeat(np.arange(len(self)), self.count())
        table = pa.table({"group": group, "value": self.column(name)})
        result = table.group_by("group", use_threads=False).aggregate([("value", function)])
        return result.column(f"value_{function}").combine_chunks()

    def output(self, *columns: Any, **named: Any) -> pa.RecordBatch:
        """Productions: one array per column of the step's `output`, by position or by name.

        Arrays may be NumPy, Arrow, pandas or lists; they must have one length and fit the declared types.
        """
        if self._output is None:
            raise UserError("this computation declares no output, so it cannot produce")
        schema = self._output
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
