"""Low watermarks: what has been seen of event time, and what will not be seen any more.

Rules
-----
- A time is a whole number of microseconds since 1970. `NO_TIME` is before all others: nothing is known yet.
- Watermarks never go back (G7). The watermark of a step is the least of those of its inputs, and no source holds it
  back that has been silent for longer than its `idle_us`. What it passes on is kept back by its holds, too.
- A record is late if it is older than the watermark of the epoch before: the records of one epoch cannot make each
  other late, however large the backlog.
- One bad clock must not end everybody's time: an event time further ahead of the driver's clock than `ahead_us` does
  not move the watermark.
- The clock, the verdict on idleness and stated watermarks are read once, into the plan: a replay is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

NO_TIME = -(2**63)
"""Before all times."""

END_OF_TIME = 2**63 - 1
"""After all times: what does not hold a watermark back."""


@dataclass(frozen=True, slots=True)
class TimeRule:
    """How the watermark of a source follows from its records.

    With a `percentile`, such as 0.99, the watermark goes as far as that share of an epoch's records is not late;
    otherwise `lateness_us` behind the newest. `stated` says that it comes from elsewhere.
    """

    lateness_us: int = 0
    percentile: float | None = None
    idle_us: int = 60_000_000
    ahead_us: int = 3_600_000_000
    stated: bool = False


@dataclass(frozen=True, slots=True)
class SeenTimes:
    """What a producer, or all of them, saw of a source's event times in an epoch.

    `mark` is what the rule makes of them: the newest time, or the one at the percentile; or the newest that the records
    state, where they state it.
    """

    rows: int = 0
    nulls: int = 0
    ahead: int = 0
    mark: int = NO_TIME

    @property
    def heard(self) -> bool:
        """Whether the source said anything of time that can be used."""
        return self.mark != NO_TIME or self.rows > self.nulls + self.ahead


@dataclass(frozen=True, slots=True)
class SourceClock:
    """How far a source is: its watermark, and when a driver last saw a usable time of it, by the driver's clock."""

    watermark: int = NO_TIME
    active_ms: int = 0


def seen_together(parts: Iterable[SeenTimes], percentile: bool) -> SeenTimes:
    """What several producers saw. Percentiles of parts do not add up, so the least of them counts: the cautious one."""
    rows = nulls = ahead = 0
    marks: list[int] = []
    for part in parts:
        rows, nulls, ahead = rows + part.rows, nulls + part.nulls, ahead + part.ahead
        if part.mark != NO_TIME:
            marks.append(part.mark)
    mark = (min(marks) if percentile else max(marks)) if marks else NO_TIME
    return SeenTimes(rows, nulls, ahead, mark)


def advanced(rule: TimeRule, before: SourceClock, seen: SeenTimes, clock_ms: int, stated: int | None) -> SourceClock:
    """The clock of a source after an epoch."""
    after = replace(before, active_ms=clock_ms) if seen.heard or not before.active_ms else before
    reached = NO_TIME
    if stated is not None:
        reached = stated
    elif rule.stated:
        reached = NO_TIME
    elif seen.mark != NO_TIME:
        reached = seen.mark if rule.percentile is not None else max(NO_TIME, seen.mark - rule.lateness_us)
    return replace(after, watermark=max(before.watermark, reached))


def idle_sources(
    rules: Mapping[str, TimeRule], clocks: Mapping[str, SourceClock], clock_ms: int, since_ms: int
) -> tuple[str, ...]:
    """The sources that have been silent for longer than they may hold others back, since this driver watches them.

    That nobody looked for a while is not silence: a restart gives every source its time again.
    """
    return tuple(
        name
        for name, rule in rules.items()
        if name in clocks
        and not rule.stated
        and (clock_ms - max(clocks[name].active_ms, since_ms)) * 1000 > rule.idle_us
    )


class Mark(NamedTuple):
    """What a stream says of time to whoever reads it.

    `driver` is how far its time has come; the end of time if it stands still and holds nobody back. `bound` is what
    must not be passed: a hold, or what was fed back and is pending. A bound keeps time back, and never moves it on.
    """

    driver: int = END_OF_TIME
    bound: int = END_OF_TIME


def least_mark(marks: Iterable[Mark]) -> Mark:
    """What several streams say of time together."""
    found = list(marks)
    return Mark(
        min((mark.driver for mark in found), default=END_OF_TIME),
        min((mark.bound for mark in found), default=END_OF_TIME),
    )


def step_watermark(before: int, given: Mark) -> int:
    """The watermark of a step from what its inputs say together; it stands still if none of them goes on."""
    return before if given.driver == END_OF_TIME else max(before, min(given))
