"""Event time, as users declare it: durations, and how a source's watermark comes about.

Rules
-----
- Inside, a time is a whole number of microseconds since 1970, UTC, and a duration one of microseconds.
- What users see is `datetime` with a zone, and `timedelta`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import UserError

Times = npt.NDArray[np.int64]

EVENT_TIME: Literal["event"] = "event"
"""The time that records state. What waits for it is due when the step's watermark reaches it."""

WALL_TIME: Literal["wall"] = "wall"
"""The time of the driver's clock, as each epoch's plan states it."""

NULL_TIME = -(2**63)
"""What stands for "no event time" in arrays of times."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 7 * 86_400_000_000,
}
_DURATION = re.compile(r"\s*(\d+)\s*([a-z]+?)s?\s*\Z")


def micros_of(given: Any, what: str) -> int:
    """A duration in microseconds, from a text such as "10 seconds", or a timedelta.

    >>> micros_of("10 seconds", "lateness")
    10000000
    """
    if isinstance(given, timedelta) and given >= timedelta(0):
        return given // timedelta(microseconds=1)
    if isinstance(given, str):
        total, parts = 0, given.lower().replace("interval", "").strip()
        for part in re.findall(r"\d+\s*[a-z]+", parts):
            match = _DURATION.match(part)
            if match is None or match[2] not in _UNITS:
                break
            total += int(match[1]) * _UNITS[match[2]]
        else:
            if parts and re.fullmatch(r"(\d+\s*[a-z]+[\s,]*)+", parts):
                return total
    raise UserError(f"{what}={given!r}: give a duration such as '10 seconds', '1 hour 30 minutes', or a timedelta")


def moment(micros: int) -> datetime | None:
    """A time as users see it; None for no time, and for one that a datetime cannot hold."""
    if micros == NULL_TIME:
        return None
    try:
        return _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        return None


def micros(given: datetime, what: str = "time") -> int:
    """A moment in microseconds. Without a zone it is taken for UTC."""
    if not isinstance(given, datetime):
        raise UserError(f"{what}: found {given!r}, expected a datetime")
    aware = given if given.tzinfo is not None else given.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1)


def times_of(column: pa.Array) -> Times:
    """A column of event times in microseconds; null is `NULL_TIME`."""
    ints = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    return np.asarray(ints.fill_null(NULL_TIME).to_numpy(zero_copy_only=False), np.int64)


def stamps_of(given: Any, count: int, what: str) -> Times:
    """Times that users give for the keys of a batch, as `datetime64`; NaT is `NULL_TIME`."""
    found = np.asarray(given)
    try:
        if found.dtype.kind not in "MO":
            raise TypeError
        stamps = found.astype("datetime64[us]").view(np.int64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what}: found {given!r}, expected times, as datetime64") from error
    if stamps.shape != (count,):
        raise UserError(f"{what}: {stamps.size} times found, {count} expected, one for each of batch.keys")
    return stamps


@dataclass(frozen=True, slots=True)
class EventTime:
    """Where the event time of a source is, and how its watermark follows; durations in microseconds.

    `is_stated` says that a function states the watermark; the function itself stays with the driver. `stating` is the
    column whose values state it, if one does. `partition` are the columns that name the partition of a record.
    """

    column: str
    lateness: int
    percentile: float | None
    idle_after: int
    max_ahead: int
    is_stated: bool
    stated: Callable[[], datetime | None] | None
    stating: str | None = None
    partition: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()


def event_time(
    name: str,
    column: str | None,
    lateness: Any,
    percentile: Any,
    idle_after: Any,
    max_ahead: Any,
    watermark: Any,
    partition: Any = None,
    expected: Any = (),
) -> EventTime | None:
    """What was said of a source's event time, checked."""
    if column is None:
        if any(given is not None for given in (lateness, percentile, watermark, partition)):
            raise UserError(f"source {name!r}: lateness, percentile, watermark and partition need event_time, a column")
        return None
    if not isinstance(column, str):
        raise UserError(f"source {name!r}: event_time={column!r}; give the name of a timestamp column")
    given = [
        what
        for what, value in (("lateness", lateness), ("percentile", percentile), ("watermark", watermark))
        if value is not None
    ]
    if len(given) > 1:
        raise UserError(f"source {name!r}: give one of lateness, percentile and watermark, not {' and '.join(given)}")
    if percentile is not None and not (isinstance(percentile, float) and 0 < percentile < 1):
        raise UserError(f"source {name!r}: percentile={percentile!r}; give a share between 0 and 1, such as 0.99")
    stating = watermark if isinstance(watermark, str) else None
    if watermark is not None and stating is None and not callable(watermark):
        raise UserError(
            f"source {name!r}: watermark={watermark!r}; give a function that returns a datetime or None, or the name "
            "of a timestamp column"
        )
    columns = _partition(name, partition)
    if columns and watermark is not None and stating is None:
        raise UserError(
            f"source {name!r}: a function states the watermark of the whole source, so partition={partition!r} would "
            "change nothing: leave it out, or name a column in watermark="
        )
    try:
        return EventTime(
            column,
            micros_of(lateness if lateness is not None else timedelta(0), "lateness"),
            percentile,
            _above_zero(idle_after, "idle_after"),
            micros_of(max_ahead, "max_ahead"),
            watermark is not None and stating is None,
            None if stating else watermark,
            stating,
            columns,
            _expected(name, columns, expected),
        )
    except UserError as error:
        raise UserError(f"source {name!r}: {error}") from error


def _above_zero(given: Any, what: str) -> int:
    duration = micros_of(given, what)
    if not duration:
        raise UserError(
            f"{what}={given!r}: every source would be idle at once, and hold nobody back; give a duration above 0"
        )
    return duration


def _partition(name: str, given: Any) -> tuple[str, ...]:
    columns = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(columns, list | tuple) or not all(isinstance(each, str) and each for each in columns):
        raise UserError(f"source {name!r}: partition={given!r}; give the name of a column, or a list of names")
    if given is not None and not columns:
        raise UserError(f"source {name!r}: partition={given!r}; name at least one column, or leave it out")
    return tuple(columns)


def _expected(name: str, columns: tuple[str, ...], given: Any) -> tuple[str, ...]:
    """The names of partitions, as those of records are made: the values of the columns as one text."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise UserError(f"source {name!r}: expected={given!r}; give a list of partitions")
    names = []
    for value in given:
        values = value if isinstance(value, tuple) else (value,)
        if len(values) != max(1, len(columns)) or not columns:
            wanted = f"values of {', '.join(columns)}" if columns else "partition=, the column that names partitions"
            raise UserError(f"source {name!r}: expected has {value!r}; give {wanted}")
        names.append("/".join(map(str, values)))
    return tuple(dict.fromkeys(names))
