"""Aggregates of all records of a key: `keyed.count(...)` and `keyed.aggregate(...)`.

Rules
-----
- Productions are updates: an epoch yields one row for each key that had records in it.
- Event time plays no part, so no record is late.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import pyarrow as pa

from millstream.errors import UserError
from millstream.library.aggregates import count
from millstream.library.partial import Partial
from millstream.library.parts import Aggregate, Totals
from millstream.model.batch import Batch
from millstream.model.computation import Computation
from millstream.model.letters import DEAD_LETTER, STOP
from millstream.model.query import KeyedStream, Stream
from millstream.model.state import Value
from millstream.model.types import format_schema


class Aggregates(Computation):
    """Keeps aggregates of the records of each key. It reads what `Partial` made of them."""

    totals: Value
    folding: Totals
    by_time = False
    """Whether what has an order goes by time."""
    makes_updates = "a row for each key that an epoch changes, and each takes the place of the one before"
    harm_of_updates = "would count every version of a row: a sum over the counts 1, 2 and 3 of a key would be 6, not 3"

    def __init__(self, aggregates: Mapping[str, Aggregate], lifted: bool = True) -> None:
        self.aggregates, self.lifted = aggregates, lifted
        self.stored_as = ", ".join(f"{name}={aggregate!r}" for name, aggregate in aggregates.items())

    def bind(self, inputs: Mapping[str, pa.Schema], key: tuple[str, ...]) -> Computation:
        bound = copy.copy(self)
        [schema] = inputs.values()
        bound.folding = Totals(self.aggregates, schema, self.lifted, self.by_time)
        bound.totals = bound.folding.state("totals")
        bound.output = bound.output_ddl(schema, key)  # type: ignore[misc]
        return bound

    def output_ddl(self, schema: pa.Schema, key: tuple[str, ...]) -> str:
        """The schema of the productions: the key, and the aggregates."""
        keys = [pa.field(name, schema.field(name).type) for name in key]
        return format_schema(pa.schema(keys + self.folding.outputs))

    def on_batch(self, batch: Batch) -> Iterator[pa.RecordBatch]:
        totals = self.added(batch)
        yield batch.output(*batch.key_columns, *self.folding.results(totals))

    def added(self, batch: Batch) -> list[pa.Array]:
        """Adds the records of a batch to the totals of their keys, which it returns."""
        folding = self.folding
        stored = folding.stored(self.totals.read(batch))
        totals = folding.combined(stored, folding.reduced(batch), self.totals.exists(batch))
        self.totals.write(batch, folding.storable(totals))
        return totals


def aggregate(
    keyed: KeyedStream, name: str, aggregates: Mapping[str, Aggregate], on_error: str = STOP, productions: str = "weak"
) -> Stream:
    """Adds a step that keeps aggregates of all records of each key.

    If records may fail, they come as they are: functions run in the step, and letters show records.
    """
    check_options(name, on_error=on_error, productions=productions)
    check_aggregates(name, keyed.key, aggregates)
    keep = on_error == DEAD_LETTER
    if not keep:
        keyed = combined(keyed, name, Partial(keyed.key, aggregates, None)).key_by(*keyed.key)
    step = Aggregates(aggregates, not keep)
    return keyed.compute(name, step, late="process", on_error=on_error, productions=productions)


def combined(keyed: KeyedStream, name: str, partial: Partial) -> Stream:
    """The stream of partial results in front of a step."""
    return Stream(keyed.query, keyed.streams)._add_map(f"{name}-partial", partial, pa.schema([]))


def counted() -> dict[str, Aggregate]:
    """The aggregates of `count`."""
    return {"count": count()}


def check_options(name: str, **options: object) -> None:
    """Refuses aggregates that have the name of an option."""
    for option, given in options.items():
        if isinstance(given, Aggregate):
            raise UserError(f"step {name!r}: {option}={given!r}; {option!r} is an option here; choose another name")


def check_aggregates(name: str, key: tuple[str, ...], aggregates: Mapping[str, Aggregate]) -> None:
    """Refuses what cannot be a column of results."""
    if not aggregates:
        raise UserError(f"step {name!r}: say what to compute, such as total=ms.sum('amount')")
    for column, given in aggregates.items():
        if not isinstance(given, Aggregate):
            raise UserError(f"step {name!r}: {column}={given!r}; give an aggregate such as ms.sum('amount')")
        if column.lower() in (taken.lower() for taken in key):
            raise UserError(f"step {name!r}: {column!r} is a column of the key, or of the window; choose another name")
