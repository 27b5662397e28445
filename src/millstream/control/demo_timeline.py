"""What happened in `millstream demo`, epoch by epoch, and a drawing of it in text.

Rules
-----
- A timeline is a value; `chart` and `demo_picture` draw the same one.
- The chart is plain ASCII, and fits 80 columns for any number of epochs. What is longer than its scale is marked as
  such: the first epoch of a fresh JVM takes several times as long as the others, and may not flatten them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP = 3
"""How many epochs a fresh JVM is given before its times are looked at."""
_COLUMNS = 64
_ROWS = 6
_SCALE = 2.0
"""The chart's height, in medians."""


@dataclass(frozen=True, slots=True)
class EpochSeen:
    """An epoch that was committed."""

    epoch: int
    at_s: float
    """When it was, since the demo began."""
    ms: float
    """The time from its plan to its commit."""
    slots: int


@dataclass(frozen=True, slots=True)
class Migration:
    """State moved, from an epoch to another, both included."""

    first: int
    last: int
    text: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """All epochs in order, and what happened to them."""

    epochs: tuple[EpochSeen, ...]
    migrations: tuple[Migration, ...]
    killed_in: int
    """The epoch that was killed; it was run again."""
    killed_at_s: float

    def moved(self, epoch: int) -> bool:
        """Whether state moved in an epoch."""
        return any(each.first <= epoch <= each.last for each in self.migrations)

    def longest_ms(self, first: int, last: int) -> float | None:
        """The longest time of these epochs, those of a fresh JVM left out; None if no other is among them."""
        fresh = {*range(WARM_UP), *range(self.killed_in, self.killed_in + WARM_UP)}
        return max(
            (seen.ms for seen in self.epochs if first <= seen.epoch <= last and seen.epoch not in fresh), default=None
        )


@dataclass(frozen=True, slots=True)
class _Column:
    first: int
    ms: float
    slots: str
    moved: bool
    killed: bool = False


def chart(timeline: Timeline) -> list[str]:
    """The time of each epoch as a bar, with the slots, the migrations and the kill below.

    >>> epochs = tuple(EpochSeen(n, n / 2, 900.0 if n in (0, 8) else 300.0, 2 if n < 4 else 4) for n in range(12))
    >>> print("\\n".join(chart(Timeline(epochs, (Migration(4, 6, "2 to 4 slots"),), 8, 6.0))))
    Time of each epoch, from its plan to its commit
      600 ms |+        +
      500 ms |#        #
      400 ms |#        #
      300 ms |######## ####
      200 ms |######## ####
      100 ms |########x####
             +-------------
       epoch  0    5     10
       slots  22224444x4444
                  mmm x
              m state moves   x SIGKILL   + longer than the scale
    """
    columns = list(_columns(timeline))
    top = _rounded(_SCALE * statistics.median(seen.ms for seen in timeline.epochs))
    lines = ["Time of each epoch, from its plan to its commit"]
    for row in range(_ROWS, 0, -1):
        bars = "".join(_cell(column, row, top) for column in columns)
        lines.append(f"{top * row / _ROWS:5,.0f} ms |{bars}".rstrip())
    lines.append(f"{'':8} +{'-' * len(columns)}")
    lines.append(f"{'epoch':>8}  {_numbers(columns)}")
    lines.append(f"{'slots':>8}  {''.join(column.slots for column in columns)}")
    marks = "".join("x" if column.killed else "m" if column.moved else " " for column in columns)
    lines.append(f"{'':8}  {marks}".rstrip())
    lines.append(f"{'':8}  m state moves   x SIGKILL   + longer than the scale")
    if (size := _per_column(timeline)) > 1:
        lines.append(f"{'':8}  a column is {size} epochs, and as high as the longest of them")
    return lines


def _columns(timeline: Timeline) -> Sequence[_Column]:
    size = _per_column(timeline)
    columns: list[_Column] = []
    for parts in (
        [seen for seen in timeline.epochs if seen.epoch < timeline.killed_in],
        [seen for seen in timeline.epochs if seen.epoch >= timeline.killed_in],
    ):
        if columns:
            columns.append(_Column(-1, 0.0, "x", False, killed=True))
        for start in range(0, len(parts), size):
            group = parts[start : start + size]
            slots = group[-1].slots
            columns.append(
                _Column(
                    group[0].epoch,
                    max(seen.ms for seen in group),
                    str(slots) if slots < 10 else "+",
                    any(timeline.moved(seen.epoch) for seen in group),
                )
            )
    return columns


def _per_column(timeline: Timeline) -> int:
    return max(1, math.ceil(len(timeline.epochs) / _COLUMNS))


def _cell(column: _Column, row: int, top: float) -> str:
    if column.killed:
        return "x" if row == 1 else " "
    if row == _ROWS and column.ms > top:
        return "+"
    filled = column.ms / top * _ROWS - (row - 1)
    return "#" if filled >= 0.75 else ":" if filled >= 0.25 else " "


def _numbers(columns: Sequence[_Column]) -> str:
    """The numbers of epochs below their columns, as many as have room."""
    text = ""
    for place, column in enumerate(columns):
        if not column.killed and place >= len(text) + (2 if text else 0) and column.first % 5 == 0:
            text = text.ljust(place) + str(column.first)
    return text


def _rounded(ms: float) -> float:
    """The next height that is not less, so that each row has a round number."""
    unit = 10.0 ** math.floor(math.log10(max(1.0, ms / _ROWS)))
    return _ROWS * next(unit * step for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if unit * step >= ms / _ROWS)
