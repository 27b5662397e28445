"""Records that producers sent more than once: `stream.dedupe(...)`, and `Dedupe` as a computation.

Rules
-----
- Exact: a record passes unless one of its id has passed whose time is less than `within` away, before or after. That is
  decided by stored times alone; when what has expired is removed makes no difference.
- `newest` is the time of an id's newest record that passed, with a filter in front, so that new ids hardly read state.
  Other times that passed, less often needed, are in `older`.
- Both expire by the watermark. `newest` is only written with a record of that time, so it lives as long as it counts;
  and when it has expired, so have all older ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from datetime import timedelta

import numpy as np
import pyarrow as pa

from millstream.errors import UserError
from millstream.library.reduce import Mask, Rows, finder
from millstream.library.windows import micros_in, timestamps
from millstream.model.batch import Batch, Timed
from millstream.model.computation import Computation
from millstream.model.maps import Map
from millstream.model.query import Stream
from millstream.model.state import Value
from millstream.model.times import EVENT_TIME, NULL_TIME, Times, micros_of
from millstream.model.types import format_schema

_ROUNDS = 8
"""How often the first record of every id is looked for, before those that are left are gone through one by one."""


def dedupe(stream: Stream, name: str, id: str | tuple[str, ...], within: str | timedelta, late: str) -> Stream:
    """Adds a step that lets the first record of each id through."""
    step = Dedupe(*((id,) if isinstance(id, str) else id), within=within)
    return stream.key_by(*step.id).compute(name, step, late=late)


class Dedupe(Computation):
    """Lets a record through unless one with the same id, and a time less than `within` away, has passed before.

    The id is one or several columns, by which the stream must be keyed; what passes has the columns of the input.

    >>> Dedupe("event_id", within="1 hour")
    Dedupe('event_id', within='1:00:00')
    """

    newest: Value
    older: Map
    columns: tuple[str, ...]
    takes_late = ("drop", "output")  # what came before a late record may be forgotten

    def __init__(self, *id: str, within: str | timedelta) -> None:
        if not id or not all(isinstance(column, str) for column in id):
            raise UserError(f"Dedupe{id!r}: give the column, or columns, of the id")
        self.id, self.within = id, micros_of(within, "within")
        if self.within <= 0:
            raise UserError(f"Dedupe(within={within!r}): give a duration above zero")
        self.stored_as = f"within {timedelta(microseconds=self.within)}"

    def __repr__(self) -> str:
        names = ", ".join(map(repr, self.id))
        return f"Dedupe({names}, within={str(timedelta(microseconds=self.within))!r})"

    def bind(self, inputs: Mapping[str, pa.Schema], key: tuple[str, ...]) -> Computation:
        if set(key) != set(self.id):
            raise UserError(f"{self!r} reads a stream keyed by {', '.join(key)}; key it by {', '.join(self.id)}")
        [schema] = inputs.values()
        bound = copy.copy(self)
        expiry = timedelta(microseconds=self.within)
        bound.newest = Value("timestamp", ttl=expiry, ttl_time=EVENT_TIME, bloom=True)
        bound.older = Map("timestamp", "boolean", ttl=expiry, ttl_time=EVENT_TIME)
        bound.newest.name, bound.older.name = "newest", "older"
        bound.columns = tuple(schema.names)
        bound.output = format_schema(pa.schema([pa.field(each.name, each.type) for each in schema]))  # type: ignore[misc]
        return bound

    def on_batch(self, batch: Batch) -> Iterator[Timed]:
        places, times = np.repeat(np.arange(len(batch)), batch.count()), batch.times.view(np.int64)
        if (times == NULL_TIME).any():
            raise UserError("records that were fed back without event time cannot be told from duplicates")
        stored, known = self.newest.read(batch), self.newest.exists(batch)
        newest = stored.view(pa.int64()).fill_null(NULL_TIME).to_numpy()
        open_ = np.ones(len(places), np.bool_)
        if known.any():
            open_ = ~(known[places] & (np.abs(times - newest[places]) < self.within))
            self._compare(batch, known, places, times, open_)
        passed = self._first_come(places, times, open_)
        self._keep(batch, places[passed], times[passed], known, newest)
        rows = batch.rows.filter(pa.array(passed))
        yield batch.timed(batch.output(*rows.columns), times[passed].view("datetime64[us]"))

    def _compare(self, batch: Batch, known: Mask, places: Rows, times: Times, open_: Mask) -> None:
        """Takes out those that are near an older record: near one of its two neighbours in time."""
        items = self.older.items(batch, where=known)
        if not len(items.places):
            return
        passed = micros_in(items.subkeys)
        after = finder(items.places, passed)(places, times)
        for neighbour in (np.maximum(after - 1, 0), np.minimum(after, len(passed) - 1)):
            near = np.abs(times - passed[neighbour]) < self.within
            open_[near & (items.places[neighbour] == places)] = False

    def _first_come(self, places: Rows, times: Times, open_: Mask) -> Mask:
        """Which records pass, of those that nothing stored is near. In each round the first of every id does. Ids with
        many that pass are few, and left to a loop over their records."""
        passed = np.zeros(len(places), np.bool_)
        left = np.flatnonzero(open_)
        for _ in range(_ROUNDS):
            if not len(left):
                break
            owners = places[left]
            first = np.concatenate(([True], owners[1:] != owners[:-1]))
            passed[left[first]] = True
            theirs = times[left[first]][np.cumsum(first) - 1]
            left = left[np.abs(times[left] - theirs) >= self.within]
        passed[self._one_by_one(left, places, times)] = True
        return passed

    def _one_by_one(self, left: Rows, places: Rows, times: Times) -> list[int]:
        """The same, record by record. Of an id at most one passes in each span of time as wide as `within`, and only
        those of a record's own span and of the two beside it can be near."""
        found, spans = [], dict[tuple[int, int], int]()
        within = self.within
        for row, owner, time in zip(left.tolist(), places[left].tolist(), times[left].tolist(), strict=True):
            span = time // within
            before, after = spans.get((owner, span - 1)), spans.get((owner, span + 1))
            if (
                (owner, span) not in spans
                and (before is None or time - before >= within)
                and (after is None or after - time >= within)
            ):
                spans[owner, span] = time
                found.append(row)
        return found

    def _keep(self, batch: Batch, places: Rows, times: Times, known: Mask, newest: Times) -> None:
        """Keeps the times of what passed: of each id the newest, and all others."""
        latest = np.where(known, newest, NULL_TIME)
        np.maximum.at(latest, places, times)
        risen = latest != np.where(known, newest, NULL_TIME)
        self.newest.write(batch, timestamps(latest), where=risen)
        others = times != latest[places]
        replaced = np.flatnonzero(risen & known)
        if others.any() or len(replaced):
            where = np.concatenate([places[others], replaced])
            when = np.concatenate([times[others], newest[replaced]])
            self.older.write(batch, where, timestamps(when), np.ones(len(where), np.bool_))
