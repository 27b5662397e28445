"""A map whose output follows from its input's schema, and which sees and sets the event times of records.

Rules
-----
- `bind` is called once, before the first epoch, with the schema of the stream; what it returns travels to workers.
- `apply` is stateless, as the function of any map is, and keeps the order of records.
- The event times of what it returns travel beside the columns, whatever they were in the input.
"""

from __future__ import annotations

import pyarrow as pa

from millstream.model.times import Times


class Transform:
    """Base class of maps that steps of the library put in front of themselves."""

    output: pa.Schema
    """What a bound transform returns."""

    def bind(self, schema: pa.Schema, timed: bool) -> Transform:
        """A copy for a stream with this schema, with `output` set; `timed` says whether it has event time."""
        raise NotImplementedError

    def apply(self, records: pa.RecordBatch, micros: Times | None) -> tuple[pa.RecordBatch, Times | None] | None:
        """What becomes of records and their event times in microseconds; None for nothing."""
        raise NotImplementedError
