"""Holds: how a step keeps the watermark back that it passes on, per key.

Rules
-----
- While any key holds at a time, no step downstream sees a watermark beyond that time: the step may still yield
  productions as old as that, and they will not be late.
- A hold does not keep the step's own watermark back, by which its timers fire and records are late: a hold that one of
  its own timers is to release would never be released (G5).
- Time that has been passed on cannot be taken back: a hold for an earlier time is raised to it.
- A key has one hold of each name; setting it again moves it. It is stored as a timer without a callback is.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from millstream.errors import UserError
from millstream.model.batch import Batch
from millstream.model.batch_timers import BatchTimer
from millstream.model.overlay import mask_of
from millstream.model.timers import Look, RecordTimer, Timer
from millstream.model.times import EVENT_TIME, NULL_TIME, micros, stamps_of


class Hold:
    """Keeps the watermark back that the step passes on.

    In `on_record` and in callbacks, `set(when)`, `get()` and `release()` concern the current key; `when` is a datetime.

    In a computation with `on_batch`, `set(batch, times)`, `get(batch)` and `release(batch)` concern all keys of the
    batch, or those where a mask `where=` is true.

    >>> import millstream as ms
    >>> from datetime import timedelta
    >>> class FirstOfBurst(ms.Computation):
    ...     first = ms.Value("timestamp")
    ...     hold = ms.Hold()
    ...     over = ms.Timer(ms.EVENT_TIME)
    ...     output = "key string"
    ...
    ...     def on_record(self, row, at):
    ...         if not self.first.exists():
    ...             self.first.set(at.time)
    ...             self.hold.set(at.time)  # what `report` yields is as old as that, and must not be late
    ...         self.over.set(timedelta(minutes=5))
    ...
    ...     @over.fires
    ...     def report(self, at):
    ...         yield at.timed((at.key,), self.first.get())
    ...         self.first.delete()
    ...         self.hold.release()
    """

    def __init__(self) -> None:
        self.name = ""
        self.timer = Timer(EVENT_TIME)
        """What it is stored as."""

    def __set_name__(self, owner: object, name: str) -> None:
        self.name = self.timer.name = name

    def __repr__(self) -> str:
        return "Hold()"

    @property
    def stored_text(self) -> str:
        """What stored holds depend on."""
        return "HOLD"

    # What users call is on the handle that replaces this declaration on the running instance.

    @overload
    def set(self, when: datetime, /) -> None: ...
    @overload
    def set(self, when: Batch, times: Any, /, *, where: Any = None) -> None: ...
    def set(self, when: Any, times: Any = None, /, *, where: Any = None) -> None:
        """Holds the watermark at a time, for the current key or for the keys of a batch, or moves the hold."""
        raise self._unbound("set")

    def get(self, batch: Batch | None = None) -> Any:
        """At what time the current key, or the keys of a batch, hold: None or NaT if they do not."""
        raise self._unbound("get")

    def release(self, batch: Batch | None = None, *, where: Any = None) -> None:
        """Lets go, if the key, or the keys of a batch, hold."""
        raise self._unbound("release")

    def _unbound(self, verb: str) -> UserError:
        return UserError(f"{self.name}.{verb}() was called outside on_record or a callback: holds exist only there")


class RecordHold:
    """The handle of a `Hold`: all keys of the batch, one of them current. Nothing is held below `floor`."""

    def __init__(self, declared: Hold, count: int, floor: int, look: Look) -> None:
        self._name, self._floor = declared.name, floor
        self.timer = RecordTimer(declared.timer, NULL_TIME, count, look)

    @property
    def index(self) -> int:
        """The place of the current key."""
        return self.timer.index

    @index.setter
    def index(self, place: int) -> None:
        self.timer.index = place

    def set(self, when: datetime) -> None:
        if not isinstance(when, datetime):
            raise UserError(f"hold {self._name!r}: found {when!r}, expected a datetime, such as at.time")
        self.timer.change((self.index, ""), (max(micros(when), self._floor), None))

    def get(self) -> datetime | None:
        return self.timer.get()

    def release(self) -> None:
        self.timer.delete()

    def saved(self) -> int:
        """For `restore`: so that all that is set and released from now on can be undone."""
        return self.timer.saved()

    def restore(self, saved: int) -> None:
        self.timer.restore(saved)

    def check(self) -> None:
        """Nothing is left to find: `set` refuses what does not fit."""


class BatchHold:
    """The handle of a `Hold` in a computation with `on_batch`."""

    def __init__(self, declared: Hold, batch: Batch, floor: int, look: Look) -> None:
        self._name, self._floor = declared.name, floor
        self.timer = BatchTimer(declared.timer, batch, NULL_TIME, look, None)

    def set(self, batch: Batch, times: Any, *, where: Any = None) -> None:
        stamps = stamps_of(times, len(batch), f"hold {self._name!r}").view("datetime64[us]")
        if np.isnat(stamps[mask_of(batch, where)]).any():
            raise UserError(f"hold {self._name!r}: some of the times are NaT; say where= there is one")
        raised = stamps if self._floor == NULL_TIME else np.maximum(stamps, np.datetime64(self._floor, "us"))
        self.timer.set(batch, raised, where=where)

    def get(self, batch: Batch) -> npt.NDArray[np.datetime64]:
        return self.timer.get(batch)

    def release(self, batch: Batch, *, where: Any = None) -> None:
        self.timer.delete(batch, where=where)
