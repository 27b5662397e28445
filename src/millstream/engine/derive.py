"""Maps: stateless functions of streams, run where the streams are made, without an exchange.

Rules
-----
- A map sees the records of a stream as its producer made them, and keeps their order.
- What a map returns has exactly the declared columns and types, or the epoch fails with its name.
- An exception in it is the user's failure, as one in a computation is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from millstream.engine.spec import Spec
from millstream.errors import UserError
from millstream.model.batch import output_column
from millstream.model.graph import Map


class MapFailure(Exception):
    """The function of a map raised, or returned what does not fit. Never leaves the task."""

    def __init__(self, name: str, cause: BaseException) -> None:
        self.name, self.cause = name, cause
        super().__init__(str(cause))


def derive(spec: Spec, streams: Mapping[str, pa.RecordBatch]) -> dict[str, pa.RecordBatch]:
    """These streams, and all that maps make of them."""
    found = dict(streams)
    for each in spec.graph.maps:
        given = [found[stream] for stream in each.streams if stream in found and found[stream].num_rows]
        made = [batch for records in given for batch in _applied(spec, each, records)]
        if made:
            found[each.name] = made[0] if len(made) == 1 else pa.concat_batches(made)
    return found


def _applied(spec: Spec, each: Map, records: pa.RecordBatch) -> list[pa.RecordBatch]:
    try:
        returned = spec.function(each.name)(records)
        return [] if returned is None else [_conformed(returned, each.output)]
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
