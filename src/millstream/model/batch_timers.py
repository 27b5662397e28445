"""Timers of whole columns: the handle of a `Timer` in a computation with `on_batch`.

Rules
-----
- Due timers stand in line by key and time, and by tag where times are equal. In each round the first of every key
  fires; one that was moved or deleted meanwhile, or has fired, is passed over.
- The cost is that of the timers touched and due, whatever the number of keys, of tags, and of timers pending.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.arrays import array_from, python_values
from millstream.model.batch import Batch, TimerBatch
from millstream.model.kinds import Changed, Mask, Rows, object_array
from millstream.model.overlay import GONE, Column, Overlay, mask_of, places_in
from millstream.model.pickled import dumped_all, loaded
from millstream.model.timers import FIRE_LIMIT, TAG, Due, Look, Timer, check_tag
from millstream.model.times import NULL_TIME, Times, stamps_of


@dataclass(frozen=True, slots=True)
class _Timers:
    """Some timers: which (key and tag in one number), for when, and their rows in the log."""

    ids: Rows
    times: Times
    rows: Rows

    def take(self, at: Rows | Mask) -> _Timers:
        return _Timers(self.ids[at], self.times[at], self.rows[at])


_NONE = _Timers(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


def _joined(parts: list[_Timers]) -> _Timers:
    return _Timers(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.rows for part in parts]),
    )


class BatchTimer:
    """The timers of all keys of a batch."""

    def __init__(self, declared: Timer, batch: Batch, limit: int, look: Look, due: Due | None) -> None:
        self.declared, self.limit, self.batch, self._look = declared, limit, batch, look
        self._over = Overlay(len(batch), TAG)
        self._times = Column(pa.int64())
        self._payloads = None if declared.payload_type is None else Column(declared.payload_type)
        self._line = _NONE
        """What is due, by key and time."""
        self._first, self._end = np.empty(0, np.int64), np.empty(0, np.int64)
        """For each key with due timers, where in the line its next one stands, and where they end."""
        self._fresh: list[_Timers] = []
        """What was set and is due, but not in the line yet."""
        if due is not None and len(due.places):
            rows = self._keep(due.times, due.payloads)
            self._fresh.append(_Timers(self._over.ids(due.places, due.tags), due.times, rows))

    # -- what users call ---------------------------------------------------------------------------------------------

    def set(self, batch: Batch, times: Any, *, where: Any = None, tag: Any = "", payload: Any = None) -> None:
        name = self.declared.name
        stamps = stamps_of(times, len(batch), f"timer {name!r}")
        places, chosen = places_in(self.batch, batch, name), mask_of(batch, where)
        stamps = stamps[chosen]
        if (stamps == NULL_TIME).any():
            raise UserError(f"timer {name!r}: some of the times are NaT; say where= there is one")
        given = self._given(batch, payload)
        rows = self._keep(stamps, None if given is None else given.filter(pa.array(chosen)))
        timers = _Timers(self._over.ids(places[chosen], self._tags(batch, tag, chosen)), stamps, rows)
        self._over.put(timers.ids, rows)
        due = stamps <= self.limit
        if due.any():
            self._fresh.append(timers.take(due))

    def delete(self, batch: Batch, *, where: Any = None, tag: Any = "") -> None:
        places, chosen = places_in(self.batch, batch, self.declared.name), mask_of(batch, where)
        ids = self._over.ids(places[chosen], self._tags(batch, tag, chosen))
        self._over.put(ids, np.full(len(ids), GONE))

    def get(self, batch: Batch, *, tag: Any = "") -> npt.NDArray[np.datetime64]:
        """When the timers of the keys are due; NaT where they are not set."""
        places, everyone = places_in(self.batch, batch, self.declared.name), mask_of(batch, None)
        tags = self._tags(batch, tag, everyone)
        known, rows = self._over.current(self._over.ids(places, tags))
        stamps = self._times_of(rows)
        unknown = np.flatnonzero(~known)
        if len(unknown):
            stamps[unknown] = self._look(places[unknown], tags.take(pa.array(unknown)))
        return stamps.view("datetime64[us]")

    # -- what the run calls ------------------------------------------------------------------------------------------

    def most_due(self) -> int:
        """The greatest number of timers that one key has in line."""
        self._line_up()
        return int((self._end - self._first).max(initial=0))

    def front(self) -> tuple[Rows, Times]:
        """The keys with due timers, in order, and the time of the first of each."""
        self._line_up()
        while len(self._first):
            known, rows = self._over.current(self._line.ids[self._first])
            over = known & (self._times_of(rows) != self._line.times[self._first])
            if not over.any():
                break
            self._pass(over)
        front = self._line.take(self._first)
        return self._over.places(front.ids), front.times

    def take(self, chosen: Mask) -> TimerBatch:
        """Takes the first due timers of some of the keys in front."""
        taken = self._line.take(self._first[chosen])
        known, rows = self._over.current(taken.ids)
        payloads = None if self._payloads is None else self._payloads.take(np.where(known, rows, taken.rows))
        self._pass(chosen)
        self._over.put(taken.ids, np.full(len(taken.ids), GONE))
        if self.declared.is_object and payloads is not None:
            what = f"timer {self.declared.name!r}: its payload"
            payloads = object_array([None if data is None else loaded(what, data) for data in payloads.to_pylist()])
        return TimerBatch(
            self.batch, self._over.places(taken.ids), taken.times, self._over.subkeys(taken.ids), payloads, self.limit
        )

    def changes(self) -> Changed | None:
        """What was set, moved and deleted, and what has fired."""
        ids, rows = self._over.touched()
        if not len(ids):
            return None
        gone = rows == GONE
        payloads = None if self._payloads is None else self._payloads.take(rows)
        timers = self.declared.encode(np.where(gone, 0, self._times_of(rows)), payloads)
        return Changed(self._over.places(ids), self._over.subkeys(ids), timers, gone)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _times_of(self, rows: Rows) -> Times:
        times: Times = self._times.take(rows).fill_null(NULL_TIME).to_numpy(zero_copy_only=False)
        return times if times.flags.writeable else times.copy()

    def _line_up(self) -> None:
        """Puts what was set meanwhile in its place in the line."""
        if not self._fresh:
            return
        counts = self._end - self._first
        passed = np.cumsum(counts) - counts
        rest = np.arange(counts.sum()) + np.repeat(self._first - passed, counts)
        joined = _joined([self._line.take(rest), *self._fresh])
        self._fresh = []
        places = self._over.places(joined.ids)
        order = np.lexsort((self._over.ranks(joined.ids), joined.times, places))
        self._line, places = joined.take(order), places[order]
        self._first = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        self._end = np.append(self._first[1:], len(places))

    def _pass(self, over: Mask) -> None:
        """Some keys go on to their next timer."""
        self._first = self._first + over
        left = self._first < self._end
        self._first, self._end = self._first[left], self._end[left]

    def _tags(self, batch: Batch, tag: Any, chosen: Mask) -> pa.Array:
        """The tags of the chosen keys, given one for all of them, or one for each key of the batch."""
        if not isinstance(tag, (pa.Array, pa.ChunkedArray, np.ndarray, list)):
            check_tag(self.declared.name, tag)
            return pa.repeat(pa.scalar(tag, TAG), int(chosen.sum()))
        tags = array_from(tag, TAG)
        if len(tags) != len(batch) or tags.null_count:
            raise UserError(
                f"timer {self.declared.name!r}: {len(tags)} tags found, {tags.null_count} of them null; {len(batch)} "
                "expected, one for each of batch.keys"
            )
        return tags.filter(pa.array(chosen))

    def _given(self, batch: Batch, payload: Any) -> pa.Array | None:
        """The payloads that were given, as they are stored."""
        name = self.declared.name
        if payload is None:
            return None
        if self.declared.payload_type is None:
            raise UserError(f"timer {name!r} has no payload; declare it as Timer(..., payload='string')")
        if len(payload) != len(batch):
            raise UserError(f"timer {name!r}: {len(payload)} payloads found, {len(batch)} expected")
        if self.declared.is_object:
            values = python_values(payload) if isinstance(payload, pa.Array) else payload
            payload = dumped_all(f"timer {name!r}: its payload", values)
        try:
            return array_from(payload, self.declared.payload_type)
        except UserError as error:
            raise UserError(f"timer {name!r}: its payload: {error}") from error

    def _keep(self, times: Times, payloads: pa.Array | None) -> Rows:
        if self._payloads is not None:
            kind = self.declared.payload_type
            self._payloads.add(pa.nulls(len(times), kind) if payloads is None else payloads)
        return self._times.add(pa.array(times, pa.int64()))


def fire_batches(timers: dict[str, BatchTimer]) -> Iterable[tuple[BatchTimer, TimerBatch]]:
    """The due timers, in as many rounds as a key has of them: in each round the first of every key."""
    handles = list(timers.values())
    reached = np.full(len(handles[0].batch), NULL_TIME)
    stuck, given = 0, sum(handle.most_due() for handle in handles)
    while stuck <= FIRE_LIMIT + given:
        fronts = [handle.front() for handle in handles]
        places = np.concatenate([front[0] for front in fronts])
        if not len(places):
            return
        times = np.concatenate([front[1] for front in fronts])
        owner = np.repeat(np.arange(len(fronts)), [len(front[0]) for front in fronts])
        order = np.lexsort((owner, times, places))
        firsts = order[np.concatenate(([True], places[order][1:] != places[order][:-1]))]
        stuck = 0 if (times[firsts] > reached[places[firsts]]).any() else stuck + 1
        reached[places[firsts]] = times[firsts]
        chosen = np.zeros(len(places), np.bool_)
        chosen[firsts] = True
        for number, handle in enumerate(handles):
            mine = chosen[owner == number]
            if mine.any():
                yield handle, handle.take(mine)
    raise UserError(
        f"timers fired more than {FIRE_LIMIT:,} times for one key in one epoch without their times advancing: a "
        "callback keeps setting timers that are due already"
    )
