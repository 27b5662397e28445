"""Aggregates, taken apart: which columns of partial results each of them keeps, and what it makes of them at the end.

Rules
-----
- An aggregate is bound to a schema before anything runs; what does not fit is refused then, and the error names it.
- The same parts are made of single records, of records combined before the exchange, and of stored totals.
- If parts may meet in any order, `first`, `last` and `collect` go by time: then their parts hold the times of values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.library.reduce import (
    ADD,
    CONCAT,
    EARLIEST,
    FIRST,
    FOLD,
    LAST,
    LATEST,
    MAX,
    MIN,
    Mask,
    Part,
    combine,
    reduce_runs,
    sorted_lists,
)
from millstream.model.arrays import array_from, python_values
from millstream.model.batch import Batch, InputBatch
from millstream.model.maps import Map
from millstream.model.state import Value
from millstream.model.times import Times
from millstream.model.types import describe_type, format_type, parse_type

LONG, DOUBLE = pa.int64(), pa.float64()
_COUNT = pa.decimal256(19, 0)
_MEAN = b"mean"
"""What the column of a sum says of the type of its mean, as metadata."""
_SUM_DIGITS, _MEAN_DIGITS = 10, 4
"""How many digits more than its column a sum of decimals has, and a mean; of the latter's, all behind the point."""


@dataclass(frozen=True, slots=True)
class Aggregate:
    """How the records of a key become one value. Made by `count`, `sum`, `min`, `max`, `mean`, `first`, `last`,
    `collect` and `combine`."""

    op: str
    column: str | None = None
    fold: Callable[[Any, Any], Any] | None = None
    lift: Callable[[Any], Any] | None = None
    type: str | None = None

    def __repr__(self) -> str:
        return f"{self.op}({'' if self.column is None else repr(self.column)})"


_SHAPES = {
    "count": [("", ADD)],
    "sum": [("", ADD)],
    "min": [("", MIN)],
    "max": [("", MAX)],
    "mean": [("_sum", ADD), ("_n", ADD)],
    "first": [("", FIRST)],
    "last": [("", LAST)],
    "collect": [("", CONCAT)],
    "combine": [("", FOLD)],
}
"""For each aggregate, its parts: what follows its name, and how they are reduced."""

_BY_TIME = {"first": EARLIEST, "last": LATEST, "collect": CONCAT}
"""How the parts are reduced of aggregates that can go by time."""


@dataclass(frozen=True, slots=True)
class Bound:
    """An aggregate whose parts have known types."""

    name: str
    aggregate: Aggregate
    parts: list[Part]
    by_time: bool = False
    mean: pa.DataType = DOUBLE
    """The type of a mean, which that of its sum does not always tell."""

    @property
    def is_decimal(self) -> bool:
        """Whether it is a mean of decimals."""
        return self.aggregate.op == "mean" and pa.types.is_decimal(self.mean)

    @property
    def output(self) -> pa.DataType:
        """The type of its value."""
        kind = self.parts[0].kind
        if self.aggregate.op == "mean":
            return self.mean
        if not self.by_time:
            return kind
        if self.aggregate.op == "collect":
            return pa.list_(pa.field("element", kind.value_type.field("value").type))
        return kind.field("value").type

    def lifted(self, records: pa.RecordBatch, micros: Times | None) -> list[pa.Array]:
        """The parts of single records, one row each."""
        op, column = self.aggregate.op, self.aggregate.column
        if column is None:
            return [pa.array(np.ones(records.num_rows, np.int64))]
        values = records.column(column)
        if op == "count":
            return [_ones(values)]
        kind = self.parts[0].kind
        if op == "mean":
            return [values.cast(kind, safe=pa.types.is_decimal(kind)), _ones(values)]
        if self.by_time:
            struct = kind.value_type if op == "collect" else kind
            values = pa.StructArray.from_arrays([pa.array(micros), values], fields=list(struct))
        if op == "collect":
            return [pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32), values, type=kind)]
        if self.aggregate.lift is not None:
            made = [None if value is None else self.aggregate.lift(value) for value in python_values(values)]
            return [array_from(made, kind)]
        return [values if values.type == kind else values.cast(kind)]

    def result(self, parts: Sequence[pa.Array]) -> pa.Array:
        """The value that the parts stand for."""
        if self.by_time:
            return sorted_lists(parts[0], self.output) if self.aggregate.op == "collect" else parts[0].flatten()[1]
        if self.aggregate.op != "mean":
            return parts[0]
        total, count = parts
        count = pc.if_else(pc.equal(count, 0), pa.scalar(None, LONG), count)
        if not pa.types.is_decimal(total.type):
            return pc.divide(total, count.cast(DOUBLE))
        exact = pc.divide(total.cast(pa.decimal256(total.type.precision, total.type.scale)), count.cast(_COUNT))
        try:
            return pc.round(exact, self.output.scale, "half_towards_infinity").cast(self.output)
        except pa.ArrowInvalid as error:
            raise UserError(
                f"the mean {self.name!r} does not fit {describe_type(self.output)}; take a column of fewer digits"
            ) from error


def _mean_type(kind: pa.DataType) -> pa.DataType:
    """The type of the mean of a column, as Spark has it: of decimals with four digits more, all behind the point."""
    if not pa.types.is_decimal(kind):
        return DOUBLE
    return pa.decimal128(min(38, kind.precision + _MEAN_DIGITS), min(38, kind.scale + _MEAN_DIGITS))


def _ones(values: pa.Array) -> pa.Array:
    """1 where there is a value, 0 where there is null."""
    if not values.null_count:
        return pa.array(np.ones(len(values), np.int64))
    return values.is_valid().cast(LONG)


def _bound(name: str, aggregate: Aggregate, kinds: Sequence[pa.DataType], by_time: bool) -> Bound:
    if by_time and aggregate.op in _BY_TIME:
        return Bound(name, aggregate, [Part(name, kinds[0], _BY_TIME[aggregate.op])], True)
    shape = zip(_SHAPES[aggregate.op], kinds, strict=True)
    return Bound(name, aggregate, [Part(name + suffix, kind, op, aggregate.fold) for (suffix, op), kind in shape])


def _with_times(aggregate: Aggregate, kinds: list[pa.DataType]) -> list[pa.DataType]:
    """The types of parts that hold the times of their values, if the aggregate can go by time."""
    if aggregate.op not in _BY_TIME:
        return kinds
    kind = kinds[0].value_type if aggregate.op == "collect" else kinds[0]
    struct = pa.struct([pa.field("at", LONG), pa.field("value", kind)])
    return [pa.list_(pa.field("element", struct)) if aggregate.op == "collect" else struct]


def _kinds(name: str, aggregate: Aggregate, schema: pa.Schema) -> list[pa.DataType]:
    """The types of an aggregate's parts, for records with this schema."""
    op, column = aggregate.op, aggregate.column
    if column is None:
        return [LONG]
    if column not in schema.names:
        raise UserError(f"{name}={aggregate!r}: no column {column!r}; the input has {', '.join(schema.names)}")
    kind = schema.field(column).type
    if op == "count":
        return [LONG]
    if op == "sum":
        return [_sum_type(name, aggregate, kind)]
    if op == "mean":
        total = _sum_type(name, aggregate, kind)
        return [total if pa.types.is_decimal(kind) else DOUBLE, LONG]
    if op in ("min", "max") and pa.types.is_nested(kind):
        raise UserError(f"{name}={aggregate!r}: {column!r} is {describe_type(kind)}, which has no order")
    if op == "collect":
        return [pa.list_(pa.field("element", kind))]
    return [kind if aggregate.type is None else parse_type(aggregate.type)]


def _sum_type(name: str, aggregate: Aggregate, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_integer(kind):
        return LONG
    if pa.types.is_floating(kind):
        return DOUBLE
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(38, kind.precision + _SUM_DIGITS), kind.scale)
    if pa.types.is_duration(kind) and aggregate.op == "sum":
        return kind
    raise UserError(f"{name}={aggregate!r}: {aggregate.column!r} is {describe_type(kind)}, expected numbers")


class Totals:
    """Several aggregates: their parts, how they are stored, and their results.

    `lifted` says that records come as parts already, in columns of their own. `by_time` says that parts may meet in
    any order, so that what has an order goes by time.
    """

    def __init__(
        self, aggregates: Mapping[str, Aggregate], schema: pa.Schema, lifted: bool = False, by_time: bool = False
    ) -> None:
        self.from_parts = lifted
        self.bound = []
        for name, aggregate in aggregates.items():
            mean = DOUBLE
            if lifted:
                told = schema.field(f"__{name}{_SHAPES[aggregate.op][0][0]}").metadata or {}
                mean = parse_type(told[_MEAN].decode()) if _MEAN in told else DOUBLE
                kinds = [schema.field(f"__{name}{suffix}").type for suffix, _ in _SHAPES[aggregate.op]]
            else:
                kinds = _kinds(name, aggregate, schema)
                kinds = _with_times(aggregate, kinds) if by_time else kinds
                if aggregate.op == "mean":
                    mean = _mean_type(schema.field(aggregate.column).type)
            self.bound.append(replace(_bound(name, aggregate, kinds, by_time), mean=mean))
        self.parts = [part for bound in self.bound for part in bound.parts]
        self.fields = [pa.field(part.name, part.kind) for part in self.parts]
        if len({part.name for part in self.parts}) != len(self.parts):
            raise UserError(f"aggregates keep {', '.join(part.name for part in self.parts)}: a name twice; rename one")
        self.lone = len(self.parts) == 1 and self.bound[0].aggregate.op == "count"

    @property
    def outputs(self) -> list[pa.Field]:
        """The columns of the results."""
        return [pa.field(bound.name, bound.output) for bound in self.bound]

    @property
    def columns(self) -> list[pa.Field]:
        """The columns of partial results on their way to the step."""
        return [
            pa.field(
                column_of(part), part.kind, metadata={_MEAN: format_type(bound.mean)} if bound.is_decimal else None
            )
            for bound in self.bound
            for part in bound.parts
        ]

    @property
    def struct(self) -> pa.DataType:
        """All parts in one."""
        return pa.struct(self.fields)

    def state(self, name: str) -> Value:
        """What keeps the totals of a key: a number if there is but a count, else a struct of the parts."""
        declared = Value("long", default=0) if self.lone else Value(format_type(self.struct))
        declared.name = name
        return declared

    def map_state(self, name: str) -> Map:
        """What keeps the totals of a key by time."""
        declared = Map("timestamp", "long", default=0) if self.lone else Map("timestamp", format_type(self.struct))
        declared.name = name
        return declared

    def present(self, totals: Any) -> Mask:
        """Where there are totals, in what a map holds."""
        if isinstance(totals, np.ndarray):
            found: Mask = totals > 0
            return found
        valid: Mask = totals.is_valid().to_numpy(zero_copy_only=False)
        return valid

    def lifted(self, records: pa.RecordBatch, micros: Times | None = None) -> list[pa.Array]:
        """The parts of single records; of those that go by time, with their times."""
        return [column for bound in self.bound for column in bound.lifted(records, micros)]

    def given(self, batch: Batch | InputBatch, micros: Times | None = None) -> list[pa.Array]:
        """The parts of a batch's records, one row for each record."""
        if self.from_parts:
            return [batch.column(column_of(part)) for part in self.parts]
        return self.lifted(batch.rows, micros)

    def reduced(self, batch: Batch | InputBatch) -> list[pa.Array]:
        """The parts of a batch's records, one row for each key."""
        found = self.given(batch)
        return [reduce_runs(part, column, batch.starts) for part, column in zip(self.parts, found, strict=True)]

    def combined(self, old: Sequence[pa.Array], new: Sequence[pa.Array], present: Mask) -> list[pa.Array]:
        """The parts that are stored, where there are any, and new ones, as one."""
        return [combine(part, a, b, present) for part, a, b in zip(self.parts, old, new, strict=True)]

    def stored(self, totals: Any) -> list[pa.Array]:
        """The parts, from what a state or a column of structs holds."""
        if isinstance(totals, np.ndarray):
            return [pa.array(totals)]
        return list(totals.flatten())

    def storable(self, parts: Sequence[pa.Array]) -> pa.Array:
        """The parts as they are stored."""
        return parts[0] if self.lone else pa.StructArray.from_arrays(list(parts), fields=self.fields)

    def results(self, parts: Sequence[pa.Array]) -> list[pa.Array]:
        """The values of the aggregates."""
        given = iter(parts)
        return [bound.result([next(given) for _ in bound.parts]) for bound in self.bound]


def column_of(part: Part) -> str:
    """The column of a part, on its way to the step: names that keys do not have."""
    return f"__{part.name}"
