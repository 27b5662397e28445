"""Timers: what a computation wants to be told of at a later time, per key.

Rules
-----
- A timer is declared on the class, with a callback. A key may have several of one timer, told apart by tag; setting one
  again moves it.
- Timers of a key fire in the order of their times, once each, after the epoch's records: those of event time when the
  step's watermark has reached them, those of wall time when the clock in the plan has (G7). Of equal times, timers that
  are declared first come first, and then it goes by tag.
- One that is set for a time already reached fires in the same epoch. A key whose timers keep setting themselves for
  times that do not advance is stopped after `FIRE_LIMIT` of them.
- Handles live for one batch of one slot, as those of state do: what a failed batch set is gone with them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar, overload

import numpy as np
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.arrays import array_from, python_values
from millstream.model.batch import Batch, Rows
from millstream.model.kinds import Changed, Mask
from millstream.model.pickled import dumped, loaded
from millstream.model.times import EVENT_TIME, NULL_TIME, WALL_TIME, Times, micros, moment
from millstream.model.types import format_type, parse_type

Fn = TypeVar("Fn", bound=Callable[..., Any])

FIRE_LIMIT = 10_000
"""How many timers of one key may be set by callbacks and fire in one epoch without their times advancing."""

_UNTOUCHED = object()
_END = 2**63 - 1
TAG = pa.string()
TIME = "time"


class Timer:
    """A timer of event time or wall time, with an optional payload of a declared type, declared on a computation.

    >>> import millstream as ms
    >>> from datetime import timedelta
    >>> class Sessions(ms.Computation):
    ...     clicks = ms.Value("long", default=0)
    ...     silence = ms.Timer(ms.EVENT_TIME)
    ...     output = "user string, clicks long"
    ...
    ...     def on_record(self, row, at):
    ...         self.clicks.set(self.clicks.get() + 1)
    ...         self.silence.set(timedelta(minutes=30))
    ...
    ...     @silence.fires
    ...     def ended(self, at):
    ...         yield at.key, self.clicks.get()
    ...         self.clicks.delete()

    In `on_record` and in callbacks, `set(when)`, `get()` and `delete()` concern the current key. `when` is a datetime,
    or a timedelta from now: from the record's or timer's time, or for wall time from the epoch's clock.

    In a computation with `on_batch`, `set(batch, times)`, `get(batch)` and `delete(batch)` concern all keys of the
    batch, or those where a mask `where=` is true, and the callback is given a `TimerBatch`.

    A key may have several timers of one name, told apart by `tag`. Setting one again moves it.
    """

    def __init__(self, kind: str = EVENT_TIME, *, payload: str | type[object] | None = None) -> None:
        if kind not in (EVENT_TIME, WALL_TIME):
            raise UserError(f"Timer({kind!r}): give EVENT_TIME or WALL_TIME")
        if payload is not None and payload is not object and not isinstance(payload, str):
            raise UserError(f"Timer(payload={payload!r}): give a Spark DDL type such as 'long', or object")
        self.name = ""
        self.kind = kind
        self.is_object = payload is object
        self.payload_type: pa.DataType | None = None
        if payload is not None:
            self.payload_type = pa.binary() if self.is_object else parse_type(str(payload))
        self.callback: str | None = None

    def __set_name__(self, owner: object, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        payload = f", payload={self.payload_text!r}" if self.payload_type is not None else ""
        return f"Timer({self.kind!r}{payload})"

    @property
    def payload_text(self) -> str:
        """The payload's type in canonical DDL."""
        return "object" if self.is_object else "" if self.payload_type is None else format_type(self.payload_type)

    @property
    def stored_text(self) -> str:
        """What stored timers depend on."""
        return f"TIMER {self.kind}" + (f" {self.payload_text}" if self.payload_text else "")

    @property
    def arrow_type(self) -> pa.DataType:
        """How a timer is stored, beside its key and tag."""
        fields = [pa.field(TIME, pa.int64())]
        if self.payload_type is not None:
            fields.append(pa.field("payload", self.payload_type))
        return pa.struct(fields)

    def fires(self, fn: Fn) -> Fn:
        """Decorates the callback, `def report(self, at)`, which is given `at.time`, `at.tag` and `at.payload`."""
        self.callback = fn.__name__
        return fn

    def encode(self, times: Any, payloads: Any) -> pa.Array:
        """Timers as they are stored; payloads of objects as bytes."""
        arrays = [pa.array(times, pa.int64())]
        if self.payload_type is not None:
            arrays.append(array_from(payloads, self.payload_type))
        return pa.StructArray.from_arrays(arrays, fields=list(self.arrow_type))

    # What users call is on the handle that replaces this declaration on the running instance.

    @overload
    def set(self, when: datetime | timedelta, /, *, tag: str = "", payload: Any = None) -> None: ...
    @overload
    def set(self, when: Batch, times: Any, /, *, where: Any = None, tag: str = "", payload: Any = None) -> None: ...
    def set(self, when: Any, times: Any = None, /, *, where: Any = None, tag: str = "", payload: Any = None) -> None:
        """Sets the timer of the current key, or those of the keys of a batch, or moves them."""
        raise self._unbound("set")

    def get(self, batch: Batch | None = None, *, tag: str = "") -> Any:
        """When the timer of the current key, or those of the keys of a batch, are due: None or NaT if not set."""
        raise self._unbound("get")

    def delete(self, batch: Batch | None = None, *, where: Any = None, tag: str = "") -> None:
        """Deletes the timer of the current key, or those of the keys of a batch, if they are set."""
        raise self._unbound("delete")

    def _unbound(self, verb: str) -> UserError:
        return UserError(f"{self.name}.{verb}() was called outside on_record or a callback: timers exist only there")


@dataclass(frozen=True, slots=True)
class Due:
    """Stored timers that are due: the places of their keys in the batch, tags, times and payloads."""

    places: Rows
    tags: pa.Array
    times: Times
    payloads: pa.Array | None

    def only(self, keys: Mask) -> Due:
        """The timers of some of the keys of the batch."""
        mine = keys[self.places]
        places = (np.cumsum(keys) - 1)[self.places[mine]]
        mask = pa.array(mine)
        payloads = None if self.payloads is None else self.payloads.filter(mask)
        return Due(places, self.tags.filter(mask), self.times[mine], payloads)

    def listed(self) -> Iterable[tuple[int, str, int, Any]]:
        """One by one."""
        payloads = [None] * len(self.places) if self.payloads is None else python_values(self.payloads)
        return zip(self.places.tolist(), self.tags.to_pylist(), self.times.tolist(), payloads, strict=True)


Look = Callable[[Rows, pa.Array], Times]
"""Finds the times of stored timers by the places of their keys, in order, and tags; `NULL_TIME` where none is set."""


class RecordTimer:
    """The handle of a `Timer`: all keys of the batch, one of them current."""

    def __init__(self, declared: Timer, limit: int, count: int, look: Look) -> None:
        self.declared, self.limit, self._count, self._look = declared, limit, count, look
        self.index = 0
        self.now = limit
        """From what time a timedelta counts: set before each record and timer."""
        self.changed: dict[tuple[int, str], tuple[int, Any] | None] = {}
        self.fresh: list[tuple[int, str]] = []
        """What was set and is due already, since it was last looked at."""
        self._known: dict[str, dict[int, int]] = {}
        self._undo: list[tuple[tuple[int, str], Any]] | None = None
        """What was there before each change since it was last asked for; None if nobody asks."""

    def saved(self) -> int:
        """For `restore`: so that all that is set and deleted from now on can be undone."""
        self._undo = []
        return len(self.fresh)

    def restore(self, saved: int) -> None:
        for place, before in reversed(self._undo or ()):
            if before is _UNTOUCHED:
                del self.changed[place]
            else:
                self.changed[place] = before
        self._undo = []
        del self.fresh[saved:]

    def check(self) -> None:
        """Nothing is left to find: `set` refuses what does not fit."""

    def change(self, place: tuple[int, str], timer: tuple[int, Any] | None) -> None:
        """Sets or deletes the timer of a key and tag."""
        if self._undo is not None:
            self._undo.append((place, self.changed.get(place, _UNTOUCHED)))
        self.changed[place] = timer

    def set(self, when: datetime | timedelta, *, tag: str = "", payload: Any = None) -> None:
        name = self.declared.name
        check_tag(name, tag)
        if isinstance(when, timedelta):
            if self.now == NULL_TIME:
                raise UserError(f"timer {name!r}: the record has no event time to count from; give a datetime")
            at = self.now + when // timedelta(microseconds=1)
        else:
            at = micros(when, f"timer {name!r}")
        if not abs(at) < _END:
            raise UserError(f"timer {name!r}: {when!r} from now is beyond the end of time")
        if payload is not None and self.declared.payload_type is None:
            raise UserError(f"timer {name!r} has no payload; declare it as Timer(..., payload='string')")
        if self.declared.is_object:
            payload = dumped(f"timer {name!r}: its payload", payload)
        elif self.declared.payload_type is not None:
            try:
                array_from([payload], self.declared.payload_type)
            except UserError as error:
                raise UserError(f"timer {name!r}: its payload: {error}") from error
        self.change((self.index, tag), (at, payload))
        if at <= self.limit:
            self.fresh.append((self.index, tag))

    def delete(self, *, tag: str = "") -> None:
        check_tag(self.declared.name, tag)
        self.change((self.index, tag), None)

    def get(self, *, tag: str = "") -> datetime | None:
        place = (self.index, tag)
        if place in self.changed:
            found = self.changed[place]
            return None if found is None else moment(found[0])
        known = self._known.get(tag)
        if known is None:
            known = self._known[tag] = {}
            everyone = np.array([self.index])  # a tag may be of one key only
        elif self.index not in known:
            everyone = np.arange(self._count)  # it is not: then all keys at once
        else:
            return moment(known[self.index])
        tags = pa.repeat(pa.scalar(tag, TAG), len(everyone))
        known.update(zip(everyone.tolist(), self._look(everyone, tags).tolist(), strict=True))
        return moment(known[self.index])

    def taken(self, index: int, tag: str, at: int, stored: Any) -> tuple[bool, Any]:
        """Takes a timer that is due: whether it is still set for that time, and its payload."""
        place = (index, tag)
        current = self.changed.get(place, (at, stored))
        if current is None or current[0] != at:
            return False, None
        self.changed[place] = None
        payload = current[1]
        if self.declared.is_object and payload is not None:
            payload = loaded(f"timer {self.declared.name!r}: its payload", payload)
        return True, payload

    def changes(self) -> Changed | None:
        """What was set, moved and deleted, and what has fired."""
        if not self.changed:
            return None
        found = list(self.changed.values())
        timers = self.declared.encode(
            [0 if timer is None else timer[0] for timer in found],
            [None if timer is None else timer[1] for timer in found],
        )
        return Changed(
            np.array([place for place, _ in self.changed], np.int64),
            pa.array([tag for _, tag in self.changed], TAG),
            timers,
            np.array([timer is None for timer in found], np.bool_),
        )


def check_tag(name: str, tag: object) -> None:
    """Refuses what is not a text."""
    if not isinstance(tag, str):
        raise UserError(f"timer {name!r}: tag={tag!r}; give a text")


Endless = Callable[[UserError, RecordTimer, int, str], None]
"""What becomes of a timer that keeps setting itself: it is not called again."""


def _stop(error: UserError, timer: RecordTimer, at: int, tag: str) -> None:
    raise error


class Agenda:
    """The timers that are due, key by key, each key's in the order of their times; of equal times in the order in which
    timers are declared, and then of tags."""

    def __init__(self, timers: dict[str, RecordTimer], due: dict[str, Due], endless: Endless | None = None) -> None:
        self._timers, self._endless = timers, endless or _stop
        self._heaps: dict[int, list[tuple[int, int, str, int, str, Any]]] = {}
        self._ranks = {name: rank for rank, name in enumerate(timers)}
        self._given = 0
        """Timers of a higher number were set by callbacks."""
        self._number = 0
        for name, found in due.items():
            for index, tag, at, payload in found.listed():
                self._push(index, at, name, tag, payload)
        self.gather()
        self._given = self._number

    def gather(self) -> None:
        """Takes up what was set meanwhile and is due already."""
        for name, timer in self._timers.items():
            for index, tag in timer.fresh:
                current = timer.changed.get((index, tag))
                if current is not None and current[0] <= timer.limit:
                    self._push(index, current[0], name, tag, current[1])
            timer.fresh.clear()

    def _push(self, index: int, at: int, name: str, tag: str, payload: Any) -> None:
        self._number += 1
        entry = (at, self._ranks[name], tag, self._number, name, payload)
        heapq.heappush(self._heaps.setdefault(index, []), entry)

    def due_keys(self) -> list[int]:
        """The keys with timers that are due, in the order of the batch."""
        return sorted(self._heaps)

    def of(self, index: int) -> Iterable[tuple[RecordTimer, int, str, Any]]:
        """The due timers of a key, in the order of their times, including those that callbacks set meanwhile."""
        stuck, reached = 0, NULL_TIME
        heap = self._heaps[index]
        while heap:
            at, _, tag, number, name, stored = heapq.heappop(heap)
            valid, payload = self._timers[name].taken(index, tag, at, stored)
            if not valid:
                continue
            stuck = stuck + 1 if number > self._given and at <= reached else 0
            reached = max(reached, at)
            if stuck > FIRE_LIMIT:
                error = UserError(
                    f"timer {name!r} fired more than {FIRE_LIMIT:,} times in one epoch without its time advancing: its "
                    "callback keeps setting timers that are due already"
                )
                self._endless(error, self._timers[name], at, tag)
                continue
            yield self._timers[name], at, tag, payload
            self.gather()
