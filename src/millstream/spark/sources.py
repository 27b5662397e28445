"""Many streaming sources as one frame: a tag, one struct column per source, and a ticker.

Rules
-----
- The order of sources is the order in which they were added; Spark's union keeps it, so map tasks are numbered by
  source first. That is the order in which records of a key are applied within an epoch.
- An epoch's input is bounded: a source that would read its whole backlog at once is refused unless the user insists.
  A source made from a reader gets default limits, which the user's own options override.
- The last source is the ticker, which makes epochs on an idle stream (`spark.ticker`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.readwriter import DataStreamReader
from pyspark.sql.types import ArrayType, DataType, MapType, StringType, StructField, StructType

from millstream.errors import UserError
from millstream.model.query import SourceNode
from millstream.model.types import format_schema, format_type
from millstream.spark.ticker import ticks

_KEPT = 256
DEFAULT_LIMITS = {"maxOffsetsPerTrigger": "1000000", "maxFilesPerTrigger": "1000"}

_LIMITS = {
    "maxoffsetspertrigger",
    "maxfilespertrigger",
    "maxbytespertrigger",
    "maxrowspertrigger",
    "rowsperbatch",
}
_BOUNDED_BY_NATURE = {"rate", "ratestreamprovider", "rate-micro-batch", "memory", "socket"}


class Sources:
    """The sources of a query on a session. Each is opened once for every name that streams know it by.

    If each is a function of a reader, they are known to Spark by names. Only then can some come and go while the others
    go on where they are.
    """

    def __init__(self, spark: SparkSession, named: bool) -> None:
        self.session, self.named = spark, named
        self._opened: dict[tuple[int, str], tuple[SourceNode, DataFrame, pa.Schema]] = {}

    def schemas(self, nodes: Iterable[SourceNode]) -> dict[str, pa.Schema]:
        """The schema of each source."""
        return {node.name: self._open(node, node.name)[1] for node in nodes}

    def stream(self, nodes: Iterable[tuple[SourceNode, str]], available_now: bool) -> DataFrame:
        """One frame of all of these, each under its name in Spark, and of the ticker."""
        frames = []
        for node, name in nodes:
            (frame, found), expected = self._open(node, name), self._open(node, node.name)[1]
            if found != expected:
                raise UserError(
                    f"source {node.name!r} has other columns than when it was first opened: found "
                    f"{format_schema(found)}, expected {format_schema(expected)}. Its records would be misread; let "
                    "the source name its columns"
                )
            frames.append(frame)
        return unite(self.session, frames, self.named, available_now)

    def _open(self, node: SourceNode, name: str) -> tuple[DataFrame, pa.Schema]:
        place = (id(node), name)
        if place not in self._opened:
            if len(self._opened) >= _KEPT:  # each preview of a change makes nodes of its own
                self._opened.clear()
            frame = open_source(self.session, node, name if self.named else None)
            self._opened[place] = (node, frame, arrow_schema(node.name, frame.schema))
        return self._opened[place][1:]


def open_source(spark: SparkSession, node: SourceNode, name: str | None) -> DataFrame:
    """The frame of a source: as given, or made by the user's function from a reader, which may have a name."""
    origin = node.origin
    if isinstance(origin, DataFrame):
        frame = origin
        if frame.isStreaming and not node.unbounded:
            _check_bounded(node.name, frame)
    elif callable(origin):
        reader: DataStreamReader = spark.readStream.options(**DEFAULT_LIMITS)
        if name is not None:
            reader = reader.name(name.replace("-", "_2d_"))  # Spark's names have no hyphens
        try:
            frame = origin(reader)
        except PySparkException as error:
            raise UserError(f"source {node.name!r} cannot be opened: {first_lines(error)}") from error
        if not isinstance(frame, DataFrame):
            raise UserError(
                f"source {node.name!r}: the function returned {frame!r}, expected a DataFrame; end it with .load()"
            )
    else:
        raise UserError(
            f"source {node.name!r}: found {origin!r}, expected a streaming DataFrame or a function of a reader"
        )
    if not frame.isStreaming:
        raise UserError(f"source {node.name!r} is a batch DataFrame; read it with spark.readStream")
    return frame


def first_lines(error: Exception) -> str:
    """The lines of one of Spark's errors that tell something."""
    text = str(getattr(error, "java_exception", None) or error)
    return " ".join([line.strip() for line in text.splitlines() if line.strip()][:3])


def arrow_schema(name: str, schema: StructType) -> pa.Schema:
    """A frame's schema in Arrow, with every field nullable: what Spark promises about nulls is not relied on."""
    fields: list[pa.Field] = []
    lowered = [column.name.lower() for column in schema.fields]
    twice = sorted({column.name for column in schema.fields if lowered.count(column.name.lower()) > 1})
    if twice:
        raise UserError(f"source {name!r} has several columns named {', '.join(twice)}; rename them")
    for column in schema.fields:
        try:
            [field] = to_arrow_schema(StructType([_nullable_field(column)]), timezone="UTC")
            format_type(field.type)
        except Exception as error:
            raise UserError(
                f"source {name!r}: column {column.name!r} has type {column.dataType.simpleString()}, which cannot be "
                f"carried; cast or drop it ({error})"
            ) from error
        fields.append(field)
    return pa.schema(fields)


def unite(spark: SparkSession, frames: list[DataFrame], named: bool, available_now: bool = False) -> DataFrame:
    """One frame for all sources and the ticker."""
    united = _tagged(frames, 0, frames[0])
    for index, frame in enumerate(frames[1:], start=1):
        united = united.union(_tagged(frames, index, frame))
    return united.union(_tagged(frames, None, ticks(spark, named, available_now)))


def only(frame: DataFrame, offered: Sequence[str], wanted: Sequence[str]) -> DataFrame:
    """The records of some of a stream's sources, in the shape that a stream of these alone would have."""
    if list(offered) == list(wanted):
        return frame
    places = [offered.index(name) for name in wanted]
    tags = [sql.when(sql.col("source") == place, sql.lit(i)) for i, place in enumerate(places)]
    chosen = frame.where(sql.col("source").isin(places))
    return chosen.select(
        sql.coalesce(*tags).alias("source"), *(sql.col(f"s{place}").alias(f"s{i}") for i, place in enumerate(places))
    )


def _tagged(frames: list[DataFrame], index: int | None, frame: DataFrame) -> DataFrame:
    """A frame in the common shape: the tag, and one struct column per source, null but for its own."""
    columns = []
    for i, other in enumerate(frames):
        if i == index:
            columns.append(sql.struct(*[_column(name) for name in frame.columns]).alias(f"s{i}"))
        else:
            columns.append(sql.lit(None).cast(_struct_of(other)).alias(f"s{i}"))
    return frame.select(sql.lit(index).cast("int").alias("source"), *columns)


def _column(name: str) -> Column:
    return sql.col("`" + name.replace("`", "``") + "`")


def _struct_of(frame: DataFrame) -> StructType:
    nullable = _nullable(frame.schema)
    assert isinstance(nullable, StructType)
    return nullable


def _nullable_field(field: StructField) -> StructField:
    return StructField(field.name, _nullable(field.dataType), True)


def _nullable(kind: DataType) -> DataType:
    if isinstance(kind, StringType) and kind.collation != "UTF8_BINARY":
        raise UserError(f"its collation is {kind.collation}, and keys are compared byte by byte")
    if isinstance(kind, StructType):
        return StructType([_nullable_field(field) for field in kind.fields])
    if isinstance(kind, ArrayType):
        return ArrayType(_nullable(kind.elementType), True)
    if isinstance(kind, MapType):
        return MapType(_nullable(kind.keyType), _nullable(kind.valueType), True)
    return kind


def _check_bounded(name: str, frame: DataFrame) -> None:
    """Refuses a frame one of whose sources has no limit on what an epoch reads."""
    leaves: Any = frame._jdf.queryExecution().analyzed().collectLeaves()
    for i in range(leaves.size()):
        leaf = leaves.apply(i)
        kind = leaf.getClass().getSimpleName()
        if kind == "StreamingRelationV2":
            source, options = leaf.sourceName(), set(leaf.extraOptions().keySet())
        elif kind == "StreamingRelation":
            source = leaf.dataSource().className()
            found = leaf.dataSource().options().keysIterator()
            options = set()
            while found.hasNext():
                options.add(found.next())
        else:
            continue
        if source.lower() in _BOUNDED_BY_NATURE or {str(option).lower() for option in options} & _LIMITS:
            continue
        raise UserError(
            f"source {name!r} ({source}) has no limit on how much one epoch reads, so its first epoch would read the "
            "whole backlog. Set one on the reader (maxOffsetsPerTrigger for Kafka, maxFilesPerTrigger or "
            "maxBytesPerTrigger for files), or insist with query.source(..., unbounded=True)"
        )


def backlog_of(sources: Iterable[Mapping[str, Any]]) -> float:
    """How many epochs like the last one it takes to read what waits in the sources, from Spark's report of it: the most
    that any of them needs. Offsets are taken to be evenly far apart, and sources that do not tell the latest count as
    read.

    >>> at = lambda *numbers: json.dumps({"topic": dict(enumerate(numbers))})
    >>> told = {"startOffset": at(0, 50), "endOffset": at(100, 150), "latestOffset": at(400, 250)}
    >>> backlog_of([told]), backlog_of([{**told, "latestOffset": "null"}]), backlog_of([{**told, "startOffset": None}])
    (2.0, 0.0, 0.0)
    """
    found = 0.0
    for source in sources:
        start, end, latest = (_numbers(source.get(f"{name}Offset")) for name in ("start", "end", "latest"))
        read = sum(max(0.0, end[at] - start[at]) for at in end if at in start)
        left = sum(max(0.0, latest[at] - end[at]) for at in latest if at in end)
        if read:
            found = max(found, left / read)
    return found


def _numbers(offset: Any, at: str = "") -> dict[str, float]:
    """The numbers in an offset, by where they stand."""
    if isinstance(offset, str):
        try:
            offset = json.loads(offset)
        except ValueError:
            return {}
    if isinstance(offset, dict):
        return {where: n for name, each in offset.items() for where, n in _numbers(each, f"{at}.{name}").items()}
    if isinstance(offset, int | float) and not isinstance(offset, bool):
        return {at: float(offset)}
    return {}
