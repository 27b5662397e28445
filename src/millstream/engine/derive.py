"""Maps: stateless functions of streams, run where the streams are made, without an exchange.

Rules
-----
- A map sees the records of a stream as its producer made them, and keeps their order.
- Event times that travel beside the columns stay with the records: a map returns as many as it got, or says in which
  column their event time is.
- What a map returns has exactly the declared columns and types, or the epoch fails with its name.
- An exception in it is the user's failure, as one in a computation is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from millstream.engine.spec import TIME_COLUMN, Spec
from millstream.errors import UserError
from millstream.model.batch import output_column
from millstream.model.query import MapNode
from millstream.model.times import Times, times_of
from millstream.model.transform import Transform


class MapFailure(Exception):
    """The function of a map raised, or returned what does not fit. Never leaves the task."""

    def __init__(self, name: str, cause: BaseException) -> None:
        self.name, self.cause = name, cause
        super().__init__(name)


def derive(spec: Spec, streams: Mapping[str, pa.RecordBatch]) -> dict[str, pa.RecordBatch]:
    """These streams, and all that maps make of them."""
    found = dict(streams)
    for each in spec.graph.maps:
        given = [stream for stream in each.streams if stream in found and found[stream].num_rows]
        made = [batch for stream in given for batch in _applied(spec, each, found[stream], stream)]
        if made:
            found[each.name] = made[0] if len(made) == 1 else pa.concat_batches(made)
    return found


def _applied(spec: Spec, each: MapNode, records: pa.RecordBatch, stream: str) -> list[pa.RecordBatch]:
    times = records.column(TIME_COLUMN) if TIME_COLUMN in records.schema.names else None
    plain = records.drop_columns([TIME_COLUMN]) if times is not None else records
    try:
        fn = spec.function(each.name)
        if isinstance(fn, Transform):
            column = spec.graph.times.get(stream)
            micros = None if column is None else times_of(plain.column(column)) if times is None else times.to_numpy()
            return _transformed(fn, plain, micros)
        returned = fn(plain)
        if returned is None:
            return []
        made = _conformed(returned, each.output)
        if times is not None and each.time is None:
            if made.num_rows != len(times):
                raise UserError(
                    f"returned {made.num_rows} records for {len(times)}, whose event times stand beside them: return "
                    "as many, leave records out with stream.filter(...), or say which column is the event time, with "
                    "map_batches(..., event_time=...)"
                )
            made = made.append_column(TIME_COLUMN, times)
        return [made]
    except (Exception, SystemExit) as error:
        raise MapFailure(each.name, error) from error


def _transformed(fn: Transform, records: pa.RecordBatch, micros: Times | None) -> list[pa.RecordBatch]:
    made = fn.apply(records, micros)
    if made is None:
        return []
    batch, stamps = made
    return [batch if stamps is None else batch.append_column(TIME_COLUMN, pa.array(stamps))]


def _conformed(returned: Any, schema: pa.Schema) -> pa.RecordBatch:
    if isinstance(returned, pa.Table):
        columns = {name: returned.column(name).combine_chunks() for name in returned.column_names}
    elif isinstance(returned, pa.RecordBatch):
        columns = dict(zip(returned.schema.names, returned.columns, strict=True))
    else:
        raise UserError(f"returned {type(returned).__name__}; return a pyarrow RecordBatch or Table, or None")
    if set(columns) != set(schema.names):
        raise UserError(f"returned the columns {', '.join(columns)}; the output has {', '.join(schema.names)}")
    arrays = [output_column(field, columns[field.name]) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
