"""Timers of whole columns: the handle of a `Timer` in a computation with `on_batch`.

Rules
-----
- What was set and deleted is a log of columns, newest last. It is sorted and folded when somebody asks, so that the
  cost is that of the timers touched, whatever the number of keys, of tags, and of timers pending.
- Due timers stand in line by key and time. In each round the first of every key fires; one that was moved or deleted
  meanwhile, or has fired, is passed over.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.arrays import array_from
from millstream.model.batch import Batch, Rows, TimerBatch
from millstream.model.state import object_array
from millstream.model.timers import FIRE_LIMIT, TAG, Due, Look, Mask, Timer, TimerChanges, check_tag
from millstream.model.times import NULL_TIME, Times

_GONE = NULL_TIME
"""The time of a timer that is not set."""

_NO_PAYLOAD = -1


@dataclass(frozen=True, slots=True)
class _Timers:
    """Some timers: which (tag and key in one number), for when, and the row of the payload."""

    ids: Rows
    times: Times
    payloads: Rows

    def take(self, at: Rows | Mask) -> _Timers:
        return _Timers(self.ids[at], self.times[at], self.payloads[at])


def _joined(parts: list[_Timers]) -> _Timers:
    return _Timers(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.payloads for part in parts]),
    )


_NONE = _Timers(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


class BatchTimer:
    """The timers of all keys of a batch."""

    def __init__(self, declared: Timer, batch: Batch, limit: int, look: Look, due: Due | None) -> None:
        self.declared, self.limit, self._batch, self._look = declared, limit, batch, look
        self._keys = max(len(batch), 1)
        self._codes: dict[str, int] = {}
        self._known = _NONE
        """What was touched, in order of ids."""
        self._log: list[_Timers] = []
        """What was touched since."""
        self._payloads: list[pa.Array] = []
        self._payload_count = 0
        self._line = _NONE
        """What is due, by key and time."""
        self._first, self._end = np.empty(0, np.int64), np.empty(0, np.int64)
        """For each key with due timers, where in the line its next one stands, and where they end."""
        self._fresh: list[_Timers] = []
        """What was set and is due, but not in the line yet."""
        if due is not None:
            payloads = np.full(len(due.places), _NO_PAYLOAD) if due.payloads is None else self._keep(due.payloads)
            self._fresh.append(_Timers(self._ids(due.places, due.tags), due.times, payloads))

    # -- what users call ---------------------------------------------------------------------------------------------

    def set(self, batch: Batch, times: Any, *, where: Any = None, tag: Any = "", payload: Any = None) -> None:
        name = self.declared.name
        stamps = np.asarray(times, "datetime64[us]").view(np.int64)
        if len(stamps) != len(batch):
            raise UserError(
                f"timer {name!r}: {len(stamps)} times found, {len(batch)} expected, one for each of batch.keys"
            )
        places, chosen = self._places(batch, where)
        if (stamps[chosen] == NULL_TIME).any():
            raise UserError(f"timer {name!r}: some of the times are NaT; say where= there is one")
        payloads = self._given(batch, payload)[chosen]
        timers = _Timers(self._ids(places, self._tags(batch, tag, chosen)), stamps[chosen], payloads)
        self._log.append(timers)
        due = timers.times <= self.limit
        if due.any():
            self._fresh.append(timers.take(due))

    def delete(self, batch: Batch, *, where: Any = None, tag: Any = "") -> None:
        places, chosen = self._places(batch, where)
        ids = self._ids(places, self._tags(batch, tag, chosen))
        self._log.append(_Timers(ids, np.full(len(ids), _GONE), np.full(len(ids), _NO_PAYLOAD)))

    def get(self, batch: Batch, *, tag: Any = "") -> npt.NDArray[np.datetime64]:
        """When the timers of the keys are due; NaT where they are not set."""
        places, chosen = self._places(batch, None)
        tags = self._tags(batch, tag, chosen)
        known, current = self._current(self._ids(places, tags))
        stamps = current.times
        unknown = np.flatnonzero(~known)
        if len(unknown):
            rest = tags if isinstance(tags, str) else tags.take(pa.array(unknown))
            rest = pa.repeat(pa.scalar(rest, TAG), len(unknown)) if isinstance(rest, str) else rest
            stamps[unknown] = self._look(places[unknown], rest)
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
            known, current = self._current(self._line.ids[self._first])
            over = known & (current.times != self._line.times[self._first])
            if not over.any():
                break
            self._first = self._first + over
            self._drop_finished()
        front = self._line.take(self._first)
        return front.ids % self._keys, front.times

    def take(self, chosen: Mask) -> TimerBatch:
        """Takes the first due timers of some of the keys in front."""
        at = self._first[chosen]
        taken = self._line.take(at)
        known, current = self._current(taken.ids)
        rows = np.where(known, current.payloads, taken.payloads)
        self._first = self._first + chosen
        self._drop_finished()
        self._log.append(_Timers(taken.ids, np.full(len(at), _GONE), np.full(len(at), _NO_PAYLOAD)))
        carried: Any = self._payload_rows(rows)
        if self.declared.is_object:
            carried = object_array([None if data is None else pickle.loads(data) for data in carried.to_pylist()])
        return TimerBatch(self._batch, taken.ids % self._keys, taken.times, self._tag_names(taken.ids), carried)

    def changes(self) -> TimerChanges | None:
        """What was set, moved and deleted, and what has fired."""
        self._settle()
        if not len(self._known.ids):
            return None
        gone = self._known.times == _GONE
        timers = self.declared.encode(np.where(gone, 0, self._known.times), self._payload_rows(self._known.payloads))
        return TimerChanges(self._known.ids % self._keys, self._tag_names(self._known.ids), timers, gone)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Folds the log: of each timer the newest entry counts."""
        if self._log:
            joined = _joined([self._known, *self._log])
            order = np.argsort(joined.ids, kind="stable")
            ids = joined.ids[order]
            self._known = joined.take(order[np.append(ids[1:] != ids[:-1], np.ones(min(len(ids), 1), np.bool_))])
            self._log = []

    def _current(self, ids: Rows) -> tuple[Mask, _Timers]:
        """Which of these timers were touched, and how they are now."""
        self._settle()
        none = np.full(len(ids), _NO_PAYLOAD)
        if not len(self._known.ids):
            return np.zeros(len(ids), np.bool_), _Timers(ids, np.full(len(ids), _GONE), none)
        at = np.minimum(np.searchsorted(self._known.ids, ids), len(self._known.ids) - 1)
        known = self._known.ids[at] == ids
        found = self._known.take(at)
        return known, _Timers(ids, np.where(known, found.times, _GONE), np.where(known, found.payloads, none))

    def _line_up(self) -> None:
        """Puts what was set meanwhile in its place in the line."""
        if not self._fresh:
            return
        counts = self._end - self._first
        passed = np.cumsum(counts) - counts
        rest = np.arange(counts.sum()) + np.repeat(self._first - passed, counts)
        joined = _joined([self._line.take(rest), *self._fresh])
        self._fresh = []
        places = joined.ids % self._keys
        order = np.lexsort((joined.times, places))
        self._line, places = joined.take(order), places[order]
        self._first = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
        self._end = np.append(self._first[1:], len(places))

    def _drop_finished(self) -> None:
        left = self._first < self._end
        self._first, self._end = self._first[left], self._end[left]

    def _ids(self, places: Rows, tags: pa.Array | str) -> Rows:
        if isinstance(tags, str):
            return places + self._keys * self._code(tags)
        coded = tags.dictionary_encode()
        codes = np.array([self._code(name) for name in coded.dictionary.to_pylist()], np.int64)
        numbers: Rows = places + self._keys * codes[coded.indices.to_numpy(zero_copy_only=False)]
        return numbers

    def _code(self, name: str) -> int:
        return self._codes.setdefault(name, len(self._codes))

    def _tag_names(self, ids: Rows) -> pa.Array:
        return pa.array(list(self._codes), TAG).take(pa.array(ids // self._keys))

    def _tags(self, batch: Batch, tag: Any, chosen: Mask) -> pa.Array | str:
        """The tags of the chosen keys: one for all of them, or one for each key of the batch."""
        if not isinstance(tag, (pa.Array, pa.ChunkedArray, np.ndarray, list)):
            check_tag(self.declared.name, tag)
            return str(tag)
        tags = array_from(tag, TAG)
        if len(tags) != len(batch) or tags.null_count:
            raise UserError(
                f"timer {self.declared.name!r}: {len(tags)} tags found, {tags.null_count} of them null; {len(batch)} "
                "expected, one for each of batch.keys"
            )
        return tags.filter(pa.array(chosen))

    def _given(self, batch: Batch, payload: Any) -> Rows:
        """Keeps the payloads that were given; the row of each key's."""
        name = self.declared.name
        if payload is None:
            return np.full(len(batch), _NO_PAYLOAD)
        if self.declared.payload_type is None:
            raise UserError(f"timer {name!r} has no payload; declare it as Timer(..., payload='string')")
        if len(payload) != len(batch):
            raise UserError(f"timer {name!r}: {len(payload)} payloads found, {len(batch)} expected")
        if self.declared.is_object:
            values = payload.to_pylist() if isinstance(payload, pa.Array) else payload
            payload = [pickle.dumps(value, protocol=5) for value in values]
        try:
            return self._keep(array_from(payload, self.declared.payload_type))
        except UserError as error:
            raise UserError(f"timer {name!r}: its payload: {error}") from error

    def _keep(self, payloads: pa.Array) -> Rows:
        rows = np.arange(self._payload_count, self._payload_count + len(payloads))
        self._payloads.append(payloads)
        self._payload_count += len(payloads)
        return rows

    def _payload_rows(self, rows: Rows) -> pa.Array | None:
        """These payloads; None if the timer has none."""
        kind = self.declared.payload_type
        if kind is None:
            return None
        if len(self._payloads) != 1:
            self._payloads = [pa.concat_arrays([pa.nulls(0, kind), *self._payloads])]
        return self._payloads[0].take(pa.array(rows, mask=rows == _NO_PAYLOAD))

    def _places(self, batch: Batch, where: Any) -> tuple[Rows, Mask]:
        """The places in the whole batch of the chosen keys, and which of the given keys they are."""
        if batch is not self._batch and batch.whole is not self._batch:
            raise UserError(f"{self.declared.name}: give the batch that on_batch or the callback was called with")
        chosen = np.ones(len(batch), np.bool_) if where is None else np.asarray(where, np.bool_)
        if len(chosen) != len(batch):
            raise UserError(f"where has {len(chosen)} entries, {len(batch)} expected, one for each of batch.keys")
        places = np.arange(len(batch)) if batch is self._batch else batch.places
        return places[chosen], chosen


def fire_batches(timers: dict[str, BatchTimer]) -> Iterable[tuple[BatchTimer, TimerBatch]]:
    """The due timers, in as many rounds as a key has of them: in each round the first of every key."""
    handles = list(timers.values())
    keys = max(len(handle._batch) for handle in handles)
    reached = np.full(keys, NULL_TIME)
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
