"""Records that are left out: `stream.filter(...)`.

Rules
-----
- It is a map, so it runs where the records are made, without an exchange; what passes keeps its columns, its order and
  its event time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.query import Stream
from millstream.model.times import Times
from millstream.model.transform import Transform


class Filter(Transform):
    """Lets the records through of which a function says so."""

    def __init__(self, keep: Callable[[pa.RecordBatch], Any]) -> None:
        self.keep = keep

    def bind(self, schema: pa.Schema, timed: bool) -> Filter:
        bound = copy.copy(self)
        bound.output = schema
        return bound

    def apply(self, records: pa.RecordBatch, micros: Times | None) -> tuple[pa.RecordBatch, Times | None]:
        found = self.keep(records)
        mask = found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
        mask = mask if isinstance(mask, pa.Array) else pa.array(mask)
        if not pa.types.is_boolean(mask.type) or len(mask) != records.num_rows:
            raise UserError(
                f"returned {len(mask)} values of type {mask.type} for {records.num_rows} records; return one boolean "
                "for each of them"
            )
        kept = mask.fill_null(False)
        if micros is None:
            return records.filter(kept), None
        return records.filter(kept), micros[np.asarray(kept.to_numpy(zero_copy_only=False), np.bool_)]


def filtered(stream: Stream, name: str, keep: Callable[[pa.RecordBatch], Any]) -> Stream:
    """Adds a filter."""
    if not callable(keep):
        raise UserError(f"filter {name!r}: found {keep!r}, expected a function of a record batch")
    return stream._add_map(name, Filter(keep), pa.schema([]))
