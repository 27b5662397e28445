"""Aggregates of tumbling windows.

Rules
-----
- The window is part of the step's key, so a key's windows are as far apart in the state as two keys are: nothing is
  kept in collections, and a hot key has no long list.
- A window has one timer, at its end, set with its first record. When it fires, the window is produced and deleted.
- With early results, every epoch that changes a window produces it too, marked as not final.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from millstream.library.lateness import WindowLateness, counter_of
from millstream.library.parts import Aggregate
from millstream.library.totals import Aggregates
from millstream.library.windows import END, START, Window, micros_in, timestamps
from millstream.model.batch import Batch, Timed, TimerBatch
from millstream.model.timers import Timer
from millstream.model.times import EVENT_TIME, Times
from millstream.model.types import TIMESTAMP, format_schema
from millstream.model.updates import EARLY

FINAL = "final"


class TumblingTotals(Aggregates):
    """Keeps aggregates of each key and window, until the window closes. The last column of its key is the start."""

    end = Timer(EVENT_TIME)

    def __init__(
        self, aggregates: Mapping[str, Aggregate], window: Window, early: bool = False, lifted: bool = True
    ) -> None:
        super().__init__(aggregates, lifted)
        self.window, self.early = window, early
        self.makes_updates = EARLY if early else ""
        self.late_rule = WindowLateness(window, counter_of(aggregates) if lifted else None)
        self.stored_as = f"{window!r}: {self.stored_as}"

    def output_ddl(self, schema: pa.Schema, key: tuple[str, ...]) -> str:
        return format_schema(pa.schema(window_fields(schema, key[:-1], self.folding.outputs, self.early)))

    def on_batch(self, batch: Batch) -> Iterator[Timed]:
        known = self.totals.exists(batch)
        totals = self.added(batch)
        ends = micros_in(batch.key_columns[-1]) + self.window.size
        self.end.set(batch, ends.view("datetime64[us]"), where=~known)
        if self.early:
            yield self._produced(batch, totals, ends, False)

    @end.fires
    def closed(self, batch: TimerBatch) -> Iterator[Timed]:
        """Produces the windows whose end has come."""
        totals = self.folding.stored(self.totals.read(batch))
        self.totals.delete(batch)
        yield self._produced(batch, totals, batch.micros, True)

    def _produced(self, batch: Batch, totals: list[pa.Array], ends: Times, final: bool) -> Timed:
        """Productions carry the last time of their window, so that a window of windows holds them."""
        marks = [pa.repeat(final, len(batch))] if self.early else []
        made = batch.output(*batch.key_columns, timestamps(ends), *self.folding.results(totals), *marks)
        return batch.timed(made, (ends - 1).view("datetime64[us]"))


def window_fields(schema: pa.Schema, key: tuple[str, ...], aggregates: list[pa.Field], early: bool) -> list[pa.Field]:
    """The columns that windows produce."""
    fields = [pa.field(name, schema.field(name).type) for name in key]
    fields += [pa.field(START, TIMESTAMP), pa.field(END, TIMESTAMP), *aggregates]
    return fields + ([pa.field(FINAL, pa.bool_())] if early else [])
