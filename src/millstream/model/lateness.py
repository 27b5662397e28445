"""Lateness: how the late records of a step are counted, and what its output `late` has of them.

Rules
-----
- A record is late if it is older than the watermark by which it is judged. One that is late for some of its windows
  only is counted as partly late, and is not late. The windows that records missed are counted by themselves.
- What goes to the output `late` keeps its own event time, so whoever reads it judges it by that.
- A computation whose rows are not its records, such as one of windows, has a rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa

from millstream.model.times import Times


class Late(NamedTuple):
    """How many records were late, how many were late for some of their windows only, and how many windows all of them
    missed."""

    records: int = 0
    partly: int = 0
    windows: int = 0


class LateRule:
    """The rule of a step whose rows are its records."""

    counts_itself = False
    """Whether the computation says itself how many records were late, with `Batch._note_late`."""

    def count(self, late: Mapping[str, pa.RecordBatch]) -> Late:
        """Counts late rows, by the input that they came by."""
        return Late(sum(rows.num_rows for rows in late.values()))

    def schema(self, inputs: pa.Schema) -> pa.Schema:
        """The columns of the output `late`, from those of the input."""
        return inputs

    def records(self, late: pa.RecordBatch, times: Times) -> tuple[pa.RecordBatch, Times]:
        """What the output `late` has of these rows, and its event times."""
        return late, times


AS_THEY_ARE = LateRule()
