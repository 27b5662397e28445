"""Maps: stateless functions of streams, run where the streams are made, without an exchange.

Rules
-----
- A map sees the records of a stream as its producer made them, and keeps their order.
- Event times that travel beside the columns stay with the records if the map returns as many as it got; otherwise all
  get the oldest of them, which makes none late.
- What a map returns has exactly the declared columns and types, or the epoch fails with its name.
- An exception in it is the user's failure, as one in a computation is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.engine.spec import TIME_COLUMN, Spec
from millstream.errors import UserError
from millstream.model.batch import output_column
from millstream.model.query import MapNode


class MapFailure(Exception):
    """The function of a map raised, or returned what does not fit. Never leaves the task."""

    def __init__(self, name: str, cause: BaseException) -> None:
        self.name, self.cause = name, cause
        super().__init__(name)


def derive(spec: Spec, streams: Mapping[str, pa.RecordBatch]) -> dict[str, pa.RecordBatch]:
    """These streams, and all that maps make of them."""
    found = dict(streams)
    for each in spec.graph.maps:
        given = [found[stream] for stream in each.streams if stream in found and found[stream].num_rows]
        made = [batch for records in given for batch in _applied(spec, each, records)]
        if made:
            found[each.name] = made[0] if len(made) == 1 else pa.concat_batches(made)
    return found


def _applied(spec: Spec, each: MapNode, records: pa.RecordBatch) -> list[pa.RecordBatch]:
    times = records.column(TIME_COLUMN) if TIME_COLUMN in records.schema.names else None
    plain = records.drop_columns([TIME_COLUMN]) if times is not None else records
    try:
        returned = spec.function(each.name)(plain)
        if returned is None:
            return []
        made = _conformed(returned, each.output)
        if times is not None:
            if made.num_rows != len(times):
                times = pa.repeat(pc.min(times), made.num_rows)
            made = made.append_column(TIME_COLUMN, times)
        return [made]
    except (Exception, SystemExit) as error:
        raise MapFailure(each.name, error) from error


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
