"""Low watermarks: what has been seen of event time, and what will not be seen any more.

Rules
-----
- A time is a whole number of microseconds since 1970. `NO_TIME` is before all others: nothing is known yet.
- Watermarks never go back (G7). The watermark of a step is the least of those of its inputs, and no source holds it
  back that has been silent for longer than its `idle_us`. If all its inputs are silent, it goes to the greatest of
  theirs: in which order they fell silent makes no difference. What it passes on is kept back by its holds, too.
- A source with partitions follows MillWheel's rule: each partition has a watermark, and that of the source is the least
  of them. A new partition begins at the source's watermark, so it never moves that back. One that is silent for longer
  than `idle_us` leaves; when it is heard again, it is new. Once all have left, the source goes to the greatest
  watermark that any of them had.
- A record is late if it is older than the watermark of the epoch before: the records of one epoch cannot make each
  other late, however large the backlog.
- One bad clock must not end everybody's time: an event time further ahead of the driver's clock than `ahead_us` does
  not move the watermark.
- The clock, the verdict on idleness and stated watermarks are read once, into the plan: a replay is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    partition: tuple[str, ...] = ()
    """The columns that name a record's partition; empty if the source is one."""
    expected: tuple[str, ...] = ()
    """The partitions that hold the source back before they were ever heard."""


@dataclass(frozen=True, slots=True)
class SeenTimes:
    """What a producer, or all of them, saw of a source's event times in an epoch.

    `mark` is what the rule makes of them: the newest time, or the one at the percentile; or the newest that the records
    state, where they state it. `partitions` has the same of each partition that said anything of time.
    """

    rows: int = 0
    nulls: int = 0
    ahead: int = 0
    mark: int = NO_TIME
    partitions: dict[str, int] = field(default_factory=dict)

    @property
    def heard(self) -> bool:
        """Whether the source said anything of time that can be used."""
        return self.mark != NO_TIME or self.rows > self.nulls + self.ahead


class PartitionClock(NamedTuple):
    """How far a partition is, and when a driver last saw a usable time of it."""

    watermark: int = NO_TIME
    active_ms: int = 0


@dataclass(frozen=True, slots=True)
class SourceClock:
    """How far a source is: its watermark, and when a driver last saw a usable time of it, by the driver's clock.

    `partitions` are those that are heard of; `greatest` is the greatest watermark that any of them has had.
    """

    watermark: int = NO_TIME
    active_ms: int = 0
    partitions: dict[str, PartitionClock] = field(default_factory=dict)
    greatest: int = NO_TIME


def first_clock(rule: TimeRule, clock_ms: int, known: SourceClock | None) -> SourceClock:
    """The clock that a source begins an epoch with. Where it has no partitions yet, those that are expected join."""
    clock = known or SourceClock(active_ms=clock_ms)
    if clock.partitions or clock.greatest != NO_TIME or not rule.expected:
        return clock
    return replace(clock, partitions={name: PartitionClock(clock.watermark, clock_ms) for name in rule.expected})


class SlowestPartition(NamedTuple):
    """The partition that holds its source back, and how far it is behind the one that is furthest."""

    name: str
    behind_us: int


def slowest_partition(clock: SourceClock) -> SlowestPartition | None:
    """The partition that holds a source back; None if the source has fewer than two, or all are at one time.

    >>> slowest_partition(SourceClock(partitions={"0": PartitionClock(50), "1": PartitionClock(80)}))
    SlowestPartition(name='0', behind_us=30)
    """
    if len(clock.partitions) < 2:
        return None
    name = min(clock.partitions, key=lambda each: (clock.partitions[each].watermark, each))
    least, most = clock.partitions[name].watermark, max(each.watermark for each in clock.partitions.values())
    return SlowestPartition(name, most - least) if NO_TIME < least < most else None


def seen_together(parts: Iterable[SeenTimes], percentile: bool) -> SeenTimes:
    """What several producers saw. Percentiles of parts do not add up, so the least of them counts: the cautious one."""
    rows = nulls = ahead = 0
    marks: list[int] = []
    partitions: dict[str, int] = {}
    further = min if percentile else max
    for part in parts:
        rows, nulls, ahead = rows + part.rows, nulls + part.nulls, ahead + part.ahead
        if part.mark != NO_TIME:
            marks.append(part.mark)
        for name, mark in part.partitions.items():
            partitions[name] = further(mark, partitions.get(name, mark))
    return SeenTimes(rows, nulls, ahead, further(marks) if marks else NO_TIME, partitions)


def advanced(
    rule: TimeRule,
    before: SourceClock,
    seen: SeenTimes,
    clock_ms: int,
    stated: int | None,
    leaving: Collection[str] = (),
) -> SourceClock:
    """The clock of a source after an epoch. The partitions that are `leaving` do so unless they are heard now."""
    after = replace(before, active_ms=clock_ms) if seen.heard or not before.active_ms else before
    if not rule.partition and before.partitions:  # the source had some before the query was started again
        after = replace(after, partitions={}, greatest=NO_TIME)
    reached = NO_TIME
    if stated is not None:
        reached = stated
    elif rule.stated:
        reached = NO_TIME
    elif rule.partition:
        after = _with_partitions(rule, after, seen.partitions, clock_ms, leaving)
        reached = min((each.watermark for each in after.partitions.values()), default=after.greatest)
    elif seen.mark != NO_TIME:
        reached = _reached(rule, seen.mark)
    return replace(after, watermark=max(before.watermark, reached))


def _reached(rule: TimeRule, mark: int) -> int:
    return mark if rule.percentile is not None else max(NO_TIME, mark - rule.lateness_us)


def _with_partitions(
    rule: TimeRule, clock: SourceClock, marks: Mapping[str, int], clock_ms: int, leaving: Collection[str]
) -> SourceClock:
    gone = set(leaving) - marks.keys()
    partitions = {name: each for name, each in clock.partitions.items() if name not in gone}
    new = PartitionClock(clock.watermark)
    for name, mark in marks.items():
        known = partitions.get(name, new).watermark
        partitions[name] = PartitionClock(max(known, _reached(rule, mark)), clock_ms)
    greatest = max((each.watermark for each in partitions.values()), default=NO_TIME)
    return replace(clock, partitions=partitions, greatest=max(clock.greatest, greatest))


def idle_sources(
    rules: Mapping[str, TimeRule], clocks: Mapping[str, SourceClock], clock_ms: int, since_ms: int
) -> tuple[str, ...]:
    """The sources that have been silent for longer than they may hold others back, since this driver watches them.

    That nobody looked for a while is not silence: a restart gives every source its time again.
    """
    return tuple(
        name
        for name, rule in rules.items()
        if name in clocks and not rule.stated and _silent(rule, clocks[name].active_ms, clock_ms, since_ms)
    )


def leaving_partitions(
    rules: Mapping[str, TimeRule], clocks: Mapping[str, SourceClock], clock_ms: int, since_ms: int
) -> dict[str, tuple[str, ...]]:
    """The same of the partitions of each source that has any."""
    found = {
        name: tuple(
            partition
            for partition, each in clocks[name].partitions.items()
            if _silent(rule, each.active_ms, clock_ms, since_ms)
        )
        for name, rule in rules.items()
        if name in clocks
    }
    return {name: partitions for name, partitions in found.items() if partitions}


def _silent(rule: TimeRule, active_ms: int, clock_ms: int, since_ms: int) -> bool:
    return (clock_ms - max(active_ms, since_ms)) * 1000 > rule.idle_us


class Mark(NamedTuple):
    """What a stream says of time to whoever reads it.

    `driver` is how far its time has come; the end of time if it is silent and holds nobody back. Then `stood` is how
    far it had come. `bound` is what must not be passed: a hold, or what was fed back and is pending. A bound keeps time
    back, and never moves it on.
    """

    driver: int = END_OF_TIME
    bound: int = END_OF_TIME
    stood: int = NO_TIME

    @property
    def silent(self) -> bool:
        """Whether the stream moves nobody's time on."""
        return self.driver == END_OF_TIME


def mark_of_inputs(marks: Iterable[Mark]) -> Mark:
    """What several streams say of time together."""
    inputs = list(marks)
    return Mark(
        min((mark.driver for mark in inputs), default=END_OF_TIME),
        min((mark.bound for mark in inputs), default=END_OF_TIME),
        max((mark.stood for mark in inputs), default=NO_TIME),
    )


def mark_of_slots(one: Mark, other: Mark) -> Mark:
    """What one stream says of time, as two slots see it."""
    return Mark(min(one.driver, other.driver), min(one.bound, other.bound), min(one.stood, other.stood))


def step_watermark(before: int, inputs: Mark) -> int:
    """The watermark of a step from what its inputs say together; how far they had come, if all are silent.

    >>> step_watermark(50, mark_of_inputs([Mark(stood=70), Mark(stood=50)]))
    70
    >>> step_watermark(50, mark_of_inputs([Mark(stood=70), Mark(60)]))
    60
    """
    return max(before, min(inputs.stood if inputs.silent else inputs.driver, inputs.bound))
