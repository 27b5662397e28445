"""Aggregates of sessions: windows that end when a key has been silent for long enough.

Rules
-----
- Open sessions of a key are a map, by their starts. Records come as pieces, each within one session; pieces and open
  sessions that are less than the gap apart grow together.
- A key has one timer, at the end of the first of its sessions. When it fires, the sessions whose end has come are
  produced and deleted, and the timer is set anew.
- The step sees all records, and judges them itself: together with all that they connect, they are late if what they
  make has closed already. So no record is late that falls into an open session, however old it is. Those that are late
  are counted, and if somebody asked for them, sent to the output `late` with the session that they would have made.
- Pieces meet in any order. So `first`, `last` and `collect` go by event time, and where times are equal by the order of
  processing, which is that of what is stored and then of a batch's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from millstream.library.lateness import SessionLateness, counter_of, late_records, late_schema, records_of
from millstream.library.partial import SPAN
from millstream.library.parts import Aggregate, column_of
from millstream.library.reduce import FOLD, Mask, Rows, reduce_runs
from millstream.library.totals import Aggregates
from millstream.library.tumbling import window_fields
from millstream.library.windows import START, Window, micros_in, timestamps
from millstream.model.batch import Batch, Timed, TimerBatch
from millstream.model.computation import Computation
from millstream.model.lateness import Late
from millstream.model.maps import Map
from millstream.model.timers import Timer
from millstream.model.times import EVENT_TIME, NULL_TIME, Times, micros
from millstream.model.types import TIMESTAMP, format_schema, format_type
from millstream.model.updates import EARLY

_NEVER = np.iinfo(np.int64).max
_LAST = pa.field("last_record", TIMESTAMP)


class SessionTotals(Aggregates):
    """Keeps aggregates of each key's open sessions."""

    totals: Map  # type: ignore[assignment]
    end = Timer(EVENT_TIME)
    by_time = True
    late_rule = SessionLateness()

    def __init__(
        self,
        aggregates: Mapping[str, Aggregate],
        window: Window,
        early: bool = False,
        lifted: bool = True,
        sends_late: bool = False,
    ) -> None:
        super().__init__(aggregates, lifted)
        self.gap, self.early = window.gap, early
        self.makes_updates = EARLY if early else ""
        self.counter = counter_of(aggregates) if lifted else None
        self.stored_as = f"{window!r}: {self.stored_as}"
        if sends_late:
            self.outputs = {"late": f"{START} timestamp"}  # type: ignore[misc]  # its columns are known in bind

    def bind(self, inputs: Mapping[str, pa.Schema], key: tuple[str, ...]) -> Computation:
        bound = super().bind(inputs, key)
        assert isinstance(bound, SessionTotals)
        bound.fields = [_LAST, *bound.folding.fields]
        bound.totals = Map("timestamp", format_type(pa.struct(bound.fields)))
        bound.totals.name = "totals"
        if self.outputs:
            [schema] = inputs.values()
            bound.outputs = {"late": format_schema(late_schema(schema))}  # type: ignore[misc]
        return bound

    fields: list[pa.Field]

    def output_ddl(self, schema: pa.Schema, key: tuple[str, ...]) -> str:
        return format_schema(pa.schema(window_fields(schema, key, self.folding.outputs, self.early)))

    def on_batch(self, batch: Batch) -> Iterator[Timed]:
        items = self.totals.items(batch)
        stored = items.values.flatten()
        known = len(items.places)
        new_places = np.repeat(np.arange(len(batch)), batch.count())
        new_starts, new_lasts, given = self._pieces(batch)
        timeless = new_starts == NULL_TIME
        if timeless.any():
            new_places, new_starts, new_lasts = (each[~timeless] for each in (new_places, new_starts, new_lasts))
            given = [column.filter(pa.array(~timeless)) for column in given]
        places = np.concatenate([items.places, new_places])
        starts = np.concatenate([micros_in(items.subkeys), new_starts])
        lasts = np.concatenate([micros_in(stored[0]), new_lasts])
        parts = [pa.concat_arrays([old, new]) for old, new in zip(stored[1:], given, strict=True)]
        order = np.lexsort((starts, places))
        first = _begins(places[order], starts[order], lasts[order] + self.gap)
        session = np.empty(len(order), np.int64)
        session[order] = np.repeat(np.arange(len(first)), np.diff(first, append=len(order)))
        where, begins = places[order][first], starts[order][first]
        until = np.maximum.reduceat(lasts[order], first)
        changed = np.bincount(session, np.arange(len(session)) >= known, len(first)) > 0
        mark = NULL_TIME if batch.watermark is None else micros(batch.watermark)
        kept = until + self.gap > mark
        moved = changed[session[:known]] & (begins[session[:known]] != starts[:known])
        self.totals.delete(batch, items.places[moved], items.subkeys.filter(pa.array(moved)))
        totals = self._reduced(parts, order, first, session)
        fresh = changed & kept
        self._write(batch, where[fresh], begins[fresh], until[fresh], [c.filter(pa.array(fresh)) for c in totals])
        before = _earliest(len(batch), items.places, lasts[:known] + self.gap)
        after = _earliest(len(batch), where[kept], until[kept] + self.gap)
        self.end.set(batch, after.view("datetime64[us]"), where=(after != before) & (after != _NEVER))
        if self.early:
            yield self._produced(batch, fresh, where, begins, until, totals, False)
        own = session[known:]
        if timeless.any() or not kept[own].all():
            begun, ends = np.full(len(timeless), NULL_TIME), np.full(len(timeless), NULL_TIME)
            begun[~timeless], ends[~timeless] = begins[own], until[own] + self.gap
            late = timeless.copy()
            late[~timeless] = ~kept[own]
            yield from self._sent_late(batch, late, begun, ends)

    def _pieces(self, batch: Batch) -> tuple[Times, Times, list[pa.Array]]:
        """The times of the first and the last record of each piece, and its parts; if records come as they are, each
        is a piece. No time where there is none."""
        times = batch.column(START).view(pa.int64()).fill_null(NULL_TIME).to_numpy()
        if not self.lifted:
            return times, times, self.folding.given(batch, times)
        first, last = (batch.column(column_of(part)).to_numpy() for part in SPAN)
        return np.where(times == NULL_TIME, times, first), last, self.folding.given(batch)

    def _reduced(self, parts: list[pa.Array], order: Rows, first: Rows, session: Rows) -> list[pa.Array]:
        """The totals of each session. A user's function is given pieces by their starts, all else as they came."""
        as_they_came = np.argsort(session, kind="stable")
        return [
            reduce_runs(part, column.take(pa.array(order if part.op == FOLD else as_they_came)), first)
            for part, column in zip(self.folding.parts, parts, strict=True)
        ]

    def _sent_late(self, batch: Batch, late: Mask, begins: Times, ends: Times) -> Iterator[Timed]:
        """Counts the records that came too late, and sends them on if somebody asked for them."""
        records = records_of(batch.rows, self.counter)[late]
        timed = begins[late] != NULL_TIME
        batch._note_late(Late(int(records.sum()), 0, int(records[timed].sum())))
        if self.outputs:
            rows = batch.rows.filter(pa.array(late))
            made, times = late_records(rows, begins[late][timed], ends[late][timed], timed.astype(np.int64))
            yield batch.timed(batch.output_to("late", *made.columns), times.view("datetime64[us]"))

    def _write(self, batch: Batch, places: Rows, starts: Times, lasts: Times, totals: list[pa.Array]) -> None:
        values = pa.StructArray.from_arrays([timestamps(lasts), *totals], fields=self.fields)
        self.totals.write(batch, places, timestamps(starts), values)

    @end.fires
    def closed(self, batch: TimerBatch) -> Iterator[Timed]:
        """Produces the sessions whose end has come."""
        items = self.totals.items(batch)
        stored = items.values.flatten()
        lasts = micros_in(stored[0])
        over = lasts + self.gap <= batch.limit
        yield self._produced(batch, over, items.places, micros_in(items.subkeys), lasts, stored[1:], True)
        self.totals.delete(batch, items.places[over], items.subkeys.filter(pa.array(over)))
        following = _earliest(len(batch), items.places[~over], lasts[~over] + self.gap)
        self.end.set(batch, following.view("datetime64[us]"), where=following != _NEVER)

    def _produced(
        self, batch: Batch, chosen: Mask, places: Rows, starts: Times, lasts: Times, totals: list[pa.Array], final: bool
    ) -> Timed:
        mask, ends = pa.array(chosen), lasts[chosen] + self.gap
        results = self.folding.results([column.filter(mask) for column in totals])
        marks = [pa.repeat(final, len(ends))] if self.early else []
        keys = [column.take(pa.array(places[chosen])) for column in batch.key_columns]
        made = batch.output(*keys, timestamps(starts[chosen]), timestamps(ends), *results, *marks)
        return batch.timed(made, (ends - 1).view("datetime64[us]"))


def _begins(places: Rows, starts: Times, ends: Times) -> Rows:
    """Where sessions begin, among pieces in the order of key and start: where all before are over."""
    times, ranks = np.unique(ends, return_inverse=True)
    furthest = times[np.maximum.accumulate(places * len(times) + ranks) - places * len(times)]
    fresh = np.ones(len(places), np.bool_)
    fresh[1:] = (places[1:] != places[:-1]) | (starts[1:] >= furthest[:-1])
    return np.flatnonzero(fresh)


def _earliest(count: int, places: Rows, times: Times) -> Times:
    """The earliest time of each key; `_NEVER` if it has none."""
    found = np.full(count, _NEVER)
    np.minimum.at(found, places, times)
    return found
