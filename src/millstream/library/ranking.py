"""The best records of each key: `keyed.top_n(...)`.

Rules
-----
- Of records that are equal in the column they are ranked by, earlier ones come first. Nulls come last, NaN is the
  greatest of numbers.
- A task sends at most n records of a key, if that leaves a good part of its records behind. The step keeps n of each
  key, and produces them when any of them is new.
- Event time plays no part, so no record is late.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.library.partial import check_free, check_key
from millstream.library.reduce import Rows, group_rows
from millstream.model.batch import Batch
from millstream.model.computation import Computation
from millstream.model.query import KeyedStream, Stream
from millstream.model.state import Value
from millstream.model.times import Times
from millstream.model.transform import Transform
from millstream.model.types import describe_type, format_schema, format_type

RANK = "rank"


def top_n(keyed: KeyedStream, name: str, n: int, by: str, descending: bool) -> Stream:
    """Adds a step that keeps the best records of each key."""
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise UserError(f"step {name!r}: top_n keeps {n!r} records; give a whole number of at least 1")
    if by in keyed.key:
        raise UserError(f"step {name!r}: by={by!r} is the key itself, which is the same in all its records")
    best = Stream(keyed.query, keyed.streams)._add_map(
        f"{name}-best", Best(keyed.key, n, by, descending), pa.schema([])
    )
    return best.key_by(*keyed.key).compute(name, TopN(n, by, descending), late="process")


class Best(Transform):
    """Lets only the best records of each key of a task through."""

    def __init__(self, key: tuple[str, ...], n: int, by: str, descending: bool) -> None:
        self.key, self.n, self.by, self.descending = key, n, by, descending

    def bind(self, schema: pa.Schema, timed: bool) -> Best:
        bound = copy.copy(self)
        check_key(self.key, schema)
        check_free(RANK, schema.names)
        if self.by not in schema.names:
            raise UserError(f"no column {self.by!r} to rank by; the input has {', '.join(schema.names)}")
        if pa.types.is_nested(schema.field(self.by).type):
            kind = describe_type(schema.field(self.by).type)
            raise UserError(f"the column {self.by!r} to rank by is {kind}, which has no order")
        bound.output = schema
        return bound

    def apply(self, records: pa.RecordBatch, micros: Times | None) -> tuple[pa.RecordBatch, Times | None]:
        order, starts = group_rows([records.column(name) for name in self.key])
        counts = np.diff(starts, append=len(order))
        if np.maximum(counts - self.n, 0).sum() * 4 < len(order):
            return records, micros  # too few would stay behind to be worth a sort
        runs = np.repeat(np.arange(len(starts)), counts)
        ranked = ranking(records.column(self.by).take(pa.array(order)), self.descending)
        kept = np.sort(order[_best(ranked, runs, self.n)[0]])
        return records.take(pa.array(kept)), None if micros is None else micros[kept]


class TopN(Computation):
    """Keeps the n best records of each key."""

    makes_updates = "all ranks of a key when one of them changes, and they take the place of those before"
    harm_of_updates = "would rank every version of a row: one key would be shown several times"

    top: Value

    def __init__(self, n: int, by: str, descending: bool) -> None:
        self.n, self.by, self.descending = n, by, descending
        self.stored_as = f"the {n} {'greatest' if descending else 'least'} by {by}"

    def bind(self, inputs: Mapping[str, pa.Schema], key: tuple[str, ...]) -> Computation:
        bound = copy.copy(self)
        [schema] = inputs.values()
        bound.columns = [pa.field(field.name, field.type) for field in schema if field.name not in key]
        bound.top = Value(format_type(pa.list_(pa.field("element", pa.struct(bound.columns)))))
        bound.top.name = "top"
        keys = [pa.field(name, schema.field(name).type) for name in key]
        produced = pa.schema([*keys, pa.field(RANK, pa.int64()), *bound.columns])
        bound.output = format_schema(produced)  # type: ignore[misc]
        return bound

    columns: Sequence[pa.Field]

    def on_batch(self, batch: Batch) -> Iterator[pa.RecordBatch]:
        stored = self.top.read(batch)
        lengths = pc.fill_null(pc.list_value_length(stored), 0).to_numpy()
        old = stored.flatten()
        new = [batch.column(field.name) for field in self.columns]
        both = [pa.concat_arrays(list(pair)) for pair in zip(old.flatten(), new, strict=True)]
        runs = np.concatenate([np.repeat(np.arange(len(batch)), counts) for counts in (lengths, batch.count())])
        by = next(number for number, field in enumerate(self.columns) if field.name == self.by)
        kept, ranks = _best(ranking(both[by], self.descending), runs, self.n)
        changed = np.bincount(runs[kept], kept >= len(old), len(batch)) > 0
        rows = [column.take(pa.array(kept)) for column in both]
        offsets = np.concatenate(([0], np.cumsum(np.bincount(runs[kept], minlength=len(batch)))))
        structs = pa.StructArray.from_arrays(rows, fields=list(self.columns))
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), structs, type=stored.type)
        self.top.write(batch, lists, where=changed)
        shown = np.flatnonzero(changed[runs[kept]])
        keys = [column.take(pa.array(runs[kept][shown])) for column in batch.key_columns]
        yield batch.output(*keys, ranks[shown], *(column.take(pa.array(shown)) for column in rows))


def ranking(column: pa.Array, descending: bool) -> Rows:
    """The place of each value among all, from best to worst; of equal ones the earlier is better."""
    if pa.types.is_floating(column.type):
        values = column.to_numpy(zero_copy_only=False).astype(np.float64)  # a copy; nulls are NaN here
        nan, null = np.isnan(values), column.is_null().to_numpy(zero_copy_only=False)
        values[nan] = 0
        special = np.where(null, 2, np.where(nan, -1 if descending else 1, 0))
        order = np.lexsort((-values if descending else values, special))
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return places
    how = "descending" if descending else "ascending"
    ranks: Rows = pc.rank(column, sort_keys=how, tiebreaker="first").to_numpy().astype(np.int64)
    return ranks


def _best(ranked: Rows, runs: Rows, n: int) -> tuple[Rows, Rows]:
    """The n best of each run, run by run from best to worst; and their ranks, from 1 on."""
    order = np.argsort(runs * (len(runs) + 1) + ranked)
    begins = np.flatnonzero(np.diff(runs[order], prepend=-1))
    within = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    chosen = within < n
    return order[chosen], within[chosen] + 1
