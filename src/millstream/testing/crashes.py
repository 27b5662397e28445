"""Crashes inside an epoch: markers among its records, and at the named moments of the driver.

Rules
-----
- `CRASH` among the records of a source: an attempt runs the records before it (those of earlier sources, then those of
  its own source), through every step; what that writes is in the store. Then the process is gone, and nothing of the
  epoch is committed.
- `CRASH.at(moment)`: the process is gone when the driver announces that moment. Where it stands among the records does
  not matter.
- Each crash happens once, and a new driver is offered the whole epoch again, as Spark does. Markers are no records.
- A crash that was asked for and did not happen is an error: the test would prove less than it says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.engine.driver import MOMENTS
from millstream.errors import UserError
from millstream.testing.faults import Crash

Records = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, slots=True)
class CrashMarker:
    """Stands among the records of an epoch where the process is to die. Use `CRASH` and `CRASH.at(moment)`.

    >>> CRASH.at("committed")
    CRASH.at('committed')
    """

    moment: str = ""

    def at(self, moment: str) -> CrashMarker:
        """A crash at one of the driver's moments: planned, executed, committed, delivering, delivered."""
        if moment not in MOMENTS:
            raise UserError(f"CRASH.at({moment!r}): give one of {', '.join(map(repr, MOMENTS))}")
        return CrashMarker(moment)

    def __repr__(self) -> str:
        return f"CRASH.at({self.moment!r})" if self.moment else "CRASH"


CRASH = CrashMarker()
"""The process dies when the epoch has got this far."""


class MarkerReached(Crash):
    """The process is gone because a marker said so; `Simulated` starts another."""


@dataclass(slots=True)
class Crashes:
    """What an epoch is still to meet: the records before each marker, and moments of the driver."""

    stops: list[Records] = field(default_factory=list)
    moments: list[str] = field(default_factory=list)

    def next_stop(self) -> Records | None:
        """The records that the next attempt runs before it dies; None if it does not die among them."""
        return self.stops.pop(0) if self.stops else None

    def reach(self, moment: str) -> None:
        """Dies if this is a moment to do so."""
        if moment in self.moments:
            self.moments.remove(moment)
            raise MarkerReached(f"CRASH.at({moment!r})")

    def left(self) -> list[CrashMarker]:
        """Those that have not happened."""
        return [CRASH for _ in self.stops] + [CRASH.at(moment) for moment in self.moments]


def without_markers(
    records: Records, sources: Sequence[str], crash: CrashMarker | None = None
) -> tuple[Records, Crashes]:
    """The records of an epoch, with sources in the order of the query, and the crashes that stood among them.

    >>> records, crashes = without_markers({"words": ["a", CRASH, "b"]}, ["words"])
    >>> records, crashes.stops
    ({'words': ['a', 'b']}, [{'words': ['a']}])
    """
    plain: dict[str, list[Any]] = {}
    crashes = Crashes()
    for name in sources:
        if name not in records:
            continue
        plain[name] = []
        for record in records[name]:
            if not isinstance(record, CrashMarker):
                plain[name].append(record)
            elif record.moment:
                crashes.moments.append(record.moment)
            else:
                crashes.stops.append({known: list(rows) for known, rows in plain.items()})
    if crash is not None and crash.moment:
        crashes.moments.append(crash.moment)
    elif crash is not None:
        crashes.stops.append(plain)
    return plain, crashes
