"""What the library's aggregates must give, computed one record at a time in plain Python."""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)

FAR = datetime(2900, 1, 1, tzinfo=UTC)
"""Times from here on are those of a bad clock, which moves no watermark."""


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def greatest(values: list[float]) -> float:
    return math.nan if any(math.isnan(v) for v in values) else max(values)


def least(values: list[float]) -> float:
    real = [v for v in values if not math.isnan(v)]
    return min(real) if real else math.nan


def aggregated(values: Iterable[Any]) -> tuple[Any, ...]:
    """count, count of values, sum, min, max, mean, first, last, collect."""
    given = list(values)
    known = [v for v in given if v is not None]
    total = sum(known) if known else None
    return (
        len(given),
        len(known),
        total,
        least(known) if known else None,
        greatest(known) if known else None,
        total / len(known) if known and total is not None else None,
        given[0],
        given[-1],
        given,
    )


def plain(value: Any) -> Any:
    """Rows that can be compared: NaN equals NaN, and zones of one offset are the same."""
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, datetime):
        return value.astimezone(UTC).replace(tzinfo=None)
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    return value


def rows(found: Iterable[Any]) -> list[Any]:
    """Rows in an order of their own, for comparison."""
    return sorted(map(plain, found), key=repr)


class Watermark:
    """The watermark of a source that follows its newest record; `late` judges by that of the epoch before."""

    def __init__(self, lateness: float = 0) -> None:
        self.lateness, self.now, self.before = timedelta(seconds=lateness), datetime.min.replace(tzinfo=UTC), None

    def epoch(self, times: Iterable[datetime | None]) -> None:
        self.before = self.now
        known = [t for t in times if t is not None and t < FAR]
        if known:
            self.now = max(self.now, max(known) - self.lateness)

    def late(self, time: datetime | None) -> bool:
        return time is None or (self.before is not None and time < self.before)
