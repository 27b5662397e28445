"""What windows and joins know of late records: how many there are behind the rows they get, and what these missed.

Rules
-----
- Rows that were combined before the exchange say how many records they stand for: in the column of a plain `count()`,
  or if there is none in one of their own.
- A late record goes to the output `late` as it came, with its own event time and the windows that it missed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.library.parts import LONG, Aggregate, column_of
from millstream.library.reduce import ADD, Part
from millstream.library.windows import END, START, Window, micros_in, timestamps
from millstream.model.lateness import Late, LateRule
from millstream.model.times import NULL_TIME, Times
from millstream.model.types import TIMESTAMP

RECORDS = Part("records of a row", LONG, ADD)
"""How many records a combined row stands for: a name that no aggregate has."""
OWN_TIME = "__own_time"
"""The event time of a record that is judged by the end of its window."""
MISSED = "missed_windows"
_MADE = (START, OWN_TIME, MISSED)
_WINDOW = pa.struct([pa.field(START, TIMESTAMP), pa.field(END, TIMESTAMP)])
_WINDOWS = pa.list_(pa.field("element", _WINDOW))


def counter_of(aggregates: Mapping[str, Aggregate]) -> str:
    """The column that says how many records a combined row stands for."""
    plain = [name for name, each in aggregates.items() if each.op == "count" and each.column is None]
    return f"__{plain[0]}" if plain else column_of(RECORDS)


def late_schema(schema: pa.Schema) -> pa.Schema:
    """The columns of late records: their own, and the windows that they missed here, not those of a step before."""
    if MISSED in schema.names and schema.field(MISSED).type != _WINDOWS:
        raise UserError(f"the input has a column {MISSED!r}, which the output late makes itself; rename it")
    own = [field for field in schema if field.name not in _MADE]
    return pa.schema([*own, pa.field(MISSED, _WINDOWS)])


def late_records(rows: pa.RecordBatch, starts: Times, ends: Times, counts: Times) -> tuple[pa.RecordBatch, Times]:
    """Late records as they came; each missed so many of these windows, which follow each other."""
    own = [rows.column(name) for name in rows.schema.names if name not in _MADE]
    windows = pa.StructArray.from_arrays([timestamps(starts), timestamps(ends)], fields=list(_WINDOW))
    offsets = pa.array(np.concatenate(([0], np.cumsum(counts))), pa.int32())
    missed = pa.ListArray.from_arrays(offsets, windows, type=_WINDOWS)
    made = pa.RecordBatch.from_arrays([*own, missed], schema=late_schema(rows.schema))
    return made, rows.column(OWN_TIME).to_numpy()


class WindowLateness(LateRule):
    """Of rows that lie in panes, and are late if all windows that hold their pane have closed."""

    def __init__(self, window: Window, counter: str | None) -> None:
        """`counter` is the column that says how many records a row stands for; None if each is one."""
        self.window, self.counter = window, counter

    def count(self, late: Mapping[str, pa.RecordBatch]) -> Late:
        counted = windows = 0
        for rows in late.values():
            records = records_of(rows, self.counter)
            counted += int(records.sum())
            windows += int((records * self._windows(rows)[1]).sum())
        return Late(counted, 0, windows)

    def schema(self, inputs: pa.Schema) -> pa.Schema:
        return late_schema(inputs)

    def records(self, late: pa.RecordBatch, times: Times) -> tuple[pa.RecordBatch, Times]:
        firsts, counts = self._windows(late)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        ends = np.repeat(firsts, counts) + self.window.every * within
        return late_records(late, ends - self.window.size, ends, counts)

    def _windows(self, rows: pa.RecordBatch) -> tuple[Times, Times]:
        """The end of the first window of each row, and how many windows it is in: none if it has no time."""
        panes = pc.fill_null(rows.column(START).view(pa.int64()), NULL_TIME).to_numpy()
        timed = panes != NULL_TIME
        panes = np.where(timed, panes, 0)
        firsts, lasts = self.window.first_end(panes), self.window.last_end(panes)
        return firsts, np.where(timed, (lasts - firsts) // self.window.every + 1, 0)

    def in_part(self, panes: Times, records: Times, watermark: int) -> Late:
        """What records that are not late missed all the same, of windows that overlap: those that have closed."""
        missed = np.maximum((watermark - self.window.first_end(panes)) // self.window.every + 1, 0)
        return Late(0, int(records[missed > 0].sum()), int((records * missed).sum()))


class SessionLateness(LateRule):
    """Of sessions, which judge records themselves."""

    counts_itself = True


class BucketLateness(LateRule):
    """Of records that lie in buckets of time; a right record of an interval in two, and late if the later one is."""

    def __init__(self, bucket: str, width: int, twice: bool) -> None:
        self.bucket, self.width, self.twice = bucket, width, twice

    def count(self, late: Mapping[str, pa.RecordBatch]) -> Late:
        right = late.get("right")
        if right is None or not self.twice:
            return super().count(late)
        left = late["left"].num_rows if "left" in late else 0
        times, buckets = right.column("__at").to_numpy(), micros_in(pc.fill_null(right.column(self.bucket), 0))
        timeless = int(np.count_nonzero(times == NULL_TIME)) // 2
        earlier = int(np.count_nonzero((times != NULL_TIME) & (times >= buckets + self.width)))
        later = int(np.count_nonzero(times != NULL_TIME)) - earlier
        return Late(left + later + timeless, max(0, earlier - later))


def records_of(rows: pa.RecordBatch, counter: str | None) -> Times:
    """How many records each row stands for."""
    if counter is None:
        return np.ones(rows.num_rows, np.int64)
    found: Times = rows.column(counter).to_numpy()
    return found
