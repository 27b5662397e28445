"""Windows of event time: how users say them, and which of them a time falls into.

Rules
-----
- A window holds its start and not its end. Tumbling and sliding windows lie on a grid from 1970 UTC on, moved by
  `offset`.
- Panes are the pieces of time that no window cuts: a tumbling window is one, a sliding window several. For sessions
  they are an eighth of the gap: records that near are in one session.
- A record is late for a window only when the window has closed. So the time by which it is judged is the last
  microsecond of the last window that it falls into.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.times import NULL_TIME, Times, micros_of
from millstream.model.types import TIMESTAMP

START, END = "window_start", "window_end"
_FAR = 1 << 62
"""Times beyond it are of no calendar, and would overflow."""


@dataclass(frozen=True, slots=True)
class Window:
    """A way to cut event time into windows. Made by `tumbling`, `sliding` and `sessions`. In microseconds."""

    size: int
    every: int
    offset: int = 0
    gap: int = 0

    @property
    def pane(self) -> int:
        """The width of a pane."""
        return self.every if self.gap else math.gcd(self.size, self.every)

    def __repr__(self) -> str:
        if self.gap:
            return f"sessions(gap={_text(self.gap)!r})"
        moved = f", offset={_text(self.offset)!r}" if self.offset else ""
        if self.size == self.every:
            return f"tumbling({_text(self.size)!r}{moved})"
        return f"sliding({_text(self.size)!r}, every={_text(self.every)!r}{moved})"

    def panes(self, micros: Times) -> Times:
        """The starts of the panes that times fall into; `NULL_TIME` for those that fall into none."""
        if not len(micros):
            return micros
        low, high = int(micros.min()), int(micros.max())
        first = low - (low - self.offset) % self.pane
        if high < first + self.pane and low > -_FAR and high < _FAR:
            return np.full(len(micros), first, np.int64)
        starts = micros - (micros - self.offset) % self.pane
        if low <= -_FAR or high >= _FAR:
            starts[(micros <= -_FAR) | (micros >= _FAR)] = NULL_TIME
        return starts

    def first_end(self, after: Any) -> Any:
        """The end of the first window that ends after a time."""
        return after - (after - self.offset - self.size) % self.every + self.every

    def last_end(self, pane: Any) -> Any:
        """The end of the last window that holds a pane."""
        return pane - (pane - self.offset) % self.every + self.size

    def judged(self, panes: Times) -> Times:
        """The times by which records in these panes are judged to be late or not."""
        starts = panes if self.pane == self.every else panes - (panes - self.offset) % self.every
        times = starts + (self.size - 1)
        times[panes == NULL_TIME] = NULL_TIME
        return times


def tumbling(size: str | timedelta, *, offset: str | timedelta = timedelta(0)) -> Window:
    """Windows of one size, one after the other.

    >>> tumbling("1 minute")
    tumbling('0:01:00')
    """
    width = _positive("size", size)
    return Window(width, width, micros_of(offset, "offset"))


def sliding(size: str | timedelta, *, every: str | timedelta, offset: str | timedelta = timedelta(0)) -> Window:
    """Windows of one size that overlap: a new one begins `every` so often.

    >>> sliding("1 hour", every="1 minute")
    sliding('1:00:00', every='0:01:00')
    """
    width, step = _positive("size", size), _positive("every", every)
    if step > width:
        raise UserError(f"sliding({size!r}, every={every!r}): records between two windows would be lost; widen them")
    return Window(width, step, micros_of(offset, "offset"))


def sessions(gap: str | timedelta) -> Window:
    """Windows that follow the records: one ends when there has been none of the key for as long as `gap`.

    >>> sessions(gap="30 minutes")
    sessions(gap='0:30:00')
    """
    silence = _positive("gap", gap)
    return session_window(silence, max(1, silence // 8))


def session_window(gap: int, width: int) -> Window:
    """Sessions whose records are combined, and judged to be late, in pieces of this width: no wider than the gap."""
    return Window(width + gap - 1, width, 0, gap)


def check_window(given: Any) -> Window:
    """What was given as a window, checked."""
    if not isinstance(given, Window):
        raise UserError(f"found {given!r} as a window; give tumbling('1 minute'), sliding(...) or sessions(...)")
    return given


def timestamps(micros: Times) -> pa.Array:
    """Microseconds as a column of timestamps, null where there is no time."""
    missing = micros == NULL_TIME
    ints = pa.array(micros, mask=missing) if missing.any() else pa.array(micros)
    return ints.view(TIMESTAMP)


def micros_in(column: pa.Array) -> Times:
    """A column of timestamps without nulls in microseconds."""
    found: npt.NDArray[np.int64] = column.view(pa.int64()).to_numpy()
    return found


def _positive(what: str, given: str | timedelta) -> int:
    micros = micros_of(given, what)
    if not 0 < micros < _FAR:
        raise UserError(f"{what}={given!r}: give a duration of at least a microsecond")
    return micros


def _text(micros: int) -> str:
    return str(timedelta(microseconds=micros))
