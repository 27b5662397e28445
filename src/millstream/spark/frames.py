"""Stored productions and state as Spark DataFrames, read by the workers, not by the driver.

Rules
-----
- A frame holds exactly what the journal names: objects are checked against their digests when they are read.
- The rows of a frame keep the order of the objects behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from millstream.engine.delivery import read_production
from millstream.engine.spec import unpack
from millstream.engine.state import now_of, parts_of, read_part, state_schema
from millstream.errors import DamagedObject, UserError
from millstream.model.graph import Step
from millstream.protocol.epochs import History, Output
from millstream.protocol.keyspace import Range
from millstream.protocol.manifest import Family, Piece
from millstream.spark.tasks import store_of
from millstream.store.journal import Journal


def productions_frame(
    spark: SparkSession, spec_bytes: bytes, schema: pa.Schema, outputs: Sequence[Output]
) -> DataFrame:
    """The productions of one stream and epoch."""
    return _frame(
        spark,
        schema,
        [msgspec.msgpack.encode(output) for output in outputs],
        partial(_production, spec_bytes),
    )


def _production(spec_bytes: bytes, item: bytes) -> pa.RecordBatch:
    return read_production(store_of(unpack(spec_bytes)), msgspec.msgpack.decode(item, type=Output))


def state_frame(spark: SparkSession, spec_bytes: bytes, step: Step, state: str, history: History) -> DataFrame:
    """All state of one declaration as of a history: the key's columns, and the value under the state's name."""
    schema = state_schema(step, state)
    parts = parts_of(history.manifest.pieces(Family(step.name, state)))
    items = [msgspec.msgpack.encode(part) for part in parts]
    now = now_of(step, state, history)
    family = (step.name, state)
    return _frame(spark, schema, items, partial(_state_part, spec_bytes, schema, family, history.epoch, now))


def _state_part(
    spec_bytes: bytes, schema: pa.Schema, family: tuple[str, str], epoch: int, now: int | None, item: bytes
) -> pa.RecordBatch:
    span, pieces = msgspec.msgpack.decode(item, type=tuple[Range, list[Piece]])
    spec = unpack(spec_bytes)
    store = store_of(spec)
    try:
        return read_part(store, schema, span, pieces, now, spec.forms_of(*family))
    except DamagedObject:
        oldest = Journal.open(store).history.oldest
        if epoch >= oldest:
            raise
        raise UserError(
            f"the state of epoch {epoch} is no longer retained: epochs from {oldest} on are. Call state() again, read "
            "the frame sooner, or give start() a larger retain"
        ) from None


def _frame(
    spark: SparkSession, schema: pa.Schema, items: list[bytes], read: Callable[[bytes], pa.RecordBatch]
) -> DataFrame:
    """A frame with one partition per item, read on a worker."""
    spark_schema = from_arrow_schema(schema)
    if not items:
        return spark.createDataFrame([], spark_schema)
    numbers = spark.range(0, len(items), 1, len(items))
    return numbers.mapInArrow(partial(_read_items, items, read), spark_schema)


def _read_items(
    items: list[bytes], read: Callable[[bytes], pa.RecordBatch], numbers: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield read(items[number])
