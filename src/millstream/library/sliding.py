"""Aggregates of sliding windows.

Rules
-----
- A record is counted in one pane, however many windows it falls into. A key's panes are a map, by their starts.
- A key has one timer, at the end of its next window that holds anything. When it fires, all windows whose end has come
  are combined from their panes, panes that no later window holds are dropped, and the timer is set anew. So the cost is
  that of a key's panes and of its windows, however many close at once.
- Within a window, panes are combined in the order of time, and records of a pane in that of processing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from millstream.library.lateness import WindowLateness, counter_of, records_of
from millstream.library.parts import Aggregate
from millstream.library.reduce import Rows, finder, reduce_ranges, reduce_runs
from millstream.library.totals import Aggregates
from millstream.library.tumbling import window_fields
from millstream.library.windows import START, Window, micros_in, timestamps
from millstream.model.batch import Batch, Timed, TimerBatch
from millstream.model.computation import Computation
from millstream.model.maps import Items, Map
from millstream.model.timers import Timer
from millstream.model.times import EVENT_TIME, NULL_TIME, Times, micros
from millstream.model.types import format_schema
from millstream.model.updates import EARLY

_NEVER = np.iinfo(np.int64).max


class SlidingTotals(Aggregates):
    """Keeps aggregates of each key and pane, and combines them when a window closes."""

    totals: Map  # type: ignore[assignment]
    end = Timer(EVENT_TIME)
    late_rule: WindowLateness

    def __init__(
        self, aggregates: Mapping[str, Aggregate], window: Window, early: bool = False, lifted: bool = True
    ) -> None:
        super().__init__(aggregates, lifted)
        self.window, self.early = window, early
        self.makes_updates = EARLY if early else ""
        self.late_rule = WindowLateness(window, counter_of(aggregates) if lifted else None)
        self.stored_as = f"{window!r}: {self.stored_as}"

    def bind(self, inputs: Mapping[str, pa.Schema], key: tuple[str, ...]) -> Computation:
        bound = super().bind(inputs, key)
        assert isinstance(bound, SlidingTotals)
        bound.totals = bound.folding.map_state("totals")
        return bound

    def output_ddl(self, schema: pa.Schema, key: tuple[str, ...]) -> str:
        return format_schema(pa.schema(window_fields(schema, key, self.folding.outputs, self.early)))

    def on_batch(self, batch: Batch) -> Iterator[Timed]:
        places = np.repeat(np.arange(len(batch)), batch.count())
        panes = micros_in(batch.column(START))
        opened = NULL_TIME
        if batch.watermark is not None:
            mark = micros(batch.watermark)
            opened = self.window.first_end(mark)
            if len(panes) and self.window.first_end(int(panes.min())) <= mark:
                rule = self.late_rule
                batch._note_late(rule.in_part(panes, records_of(batch.rows, rule.counter), mark))
        order = np.lexsort((panes, places))
        places, panes = places[order], panes[order]
        starts = np.flatnonzero((np.diff(places, prepend=-1) != 0) | (np.diff(panes, prepend=NULL_TIME) != 0))
        places, panes = places[starts], panes[starts]
        folding = self.folding
        new = [
            reduce_runs(part, column.take(pa.array(order)), starts)
            for part, column in zip(folding.parts, folding.given(batch), strict=True)
        ]
        stored = self.totals.read(batch, places, timestamps(panes))
        present = folding.present(stored)
        totals = folding.combined(folding.stored(stored), new, present)
        self.totals.write(batch, places, timestamps(panes), folding.storable(totals))
        self._wake(batch, places[~present], np.maximum(self.window.first_end(panes[~present]), opened))
        if self.early:
            yield from self._changed(batch, places, panes, opened)

    def _wake(self, batch: Batch, places: Rows, ends: Times) -> None:
        """Sets the timers of keys with new panes, if their next window ends before the one that is waited for."""
        if not len(places):
            return
        sooner = np.full(len(batch), _NEVER)
        np.minimum.at(sooner, places, ends)
        waiting = self.end.get(batch).view(np.int64)
        earlier = (sooner != _NEVER) & ((waiting == NULL_TIME) | (sooner < waiting))
        self.end.set(batch, sooner.view("datetime64[us]"), where=earlier)

    def _changed(self, batch: Batch, places: Rows, panes: Times, opened: int) -> Iterator[Timed]:
        """Early results: the open windows that hold any of these panes."""
        owners, ends = self._holding(places, panes, np.full(len(batch), opened))
        yield self._produced(batch, self.totals.items(batch), owners, ends, False)

    def _holding(self, places: Rows, panes: Times, since: Times, until: int = _NEVER) -> tuple[Rows, Times]:
        """The windows that hold any of these panes, which are in order, and end in this time: of which keys, and their
        ends. A pane adds those that do not hold the one before."""
        lasts = self.window.last_end(panes)
        firsts = np.maximum(self.window.first_end(panes), since[places])
        follows = np.flatnonzero(places[1:] == places[:-1])
        firsts[follows + 1] = np.maximum(firsts[follows + 1], lasts[follows] + self.window.every)
        counts = np.maximum((np.minimum(lasts, until) - firsts) // self.window.every + 1, 0)
        return np.repeat(places, counts), _steps(firsts, counts, self.window.every)

    @end.fires
    def closed(self, batch: TimerBatch) -> Iterator[Timed]:
        """Produces the windows whose end has come."""
        window, items = self.window, self.totals.items(batch)
        panes = micros_in(items.subkeys)
        lasts = window.last_end(panes)
        limit = min(batch.limit, int(lasts.max()))
        yield self._produced(batch, items, *self._holding(items.places, panes, batch.micros, limit), True)
        over = lasts <= limit
        self.totals.delete(batch, items.places[over], items.subkeys.filter(pa.array(over)))
        left = np.full(len(batch), _NEVER)
        np.minimum.at(left, items.places[~over], window.first_end(panes[~over]))
        following = np.maximum(left, window.first_end(limit))
        self.end.set(batch, following.view("datetime64[us]"), where=left != _NEVER)

    def _produced(self, batch: Batch, items: Items, owners: Rows, ends: Times, final: bool) -> Timed:
        """Windows, from the panes of their keys."""
        find = finder(items.places, micros_in(items.subkeys))
        first, last = find(owners, ends - self.window.size), find(owners, ends)
        columns = zip(self.folding.parts, self.folding.stored(items.values), strict=True)
        results = self.folding.results([reduce_ranges(part, column, first, last) for part, column in columns])
        marks = [pa.repeat(final, len(owners))] if self.early else []
        keys = [column.take(pa.array(owners)) for column in batch.key_columns]
        made = batch.output(*keys, timestamps(ends - self.window.size), timestamps(ends), *results, *marks)
        return batch.timed(made, (ends - 1).view("datetime64[us]"))


def _steps(firsts: Times, counts: Rows, step: int) -> Times:
    """From each of the first times on, as many as are counted."""
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    steps: Times = np.repeat(firsts, counts) + step * within
    return steps
