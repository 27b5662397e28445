"""An overview of a query, from its journal alone: what `status` and `watch` show.

Rules
-----
- It tells what is committed. What only the driver knows, such as where the time of an epoch goes, is not in it; nor
  whether a driver runs, but only when one last wrote.
- Nothing is read for it but the journal: sizes are those in the manifest, and within a segment bytes go with width.
"""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np

from millstream.control.handle import Progress, progress_of
from millstream.model.times import moment
from millstream.protocol.epochs import Commit, History, Plan
from millstream.protocol.migration import MigrationPlan, duration_text
from millstream.protocol.planner import bytes_in
from millstream.protocol.steering import Outcome
from millstream.protocol.time import slowest_partition
from millstream.store.journal import Envelope

_REMEMBERED = 32
_BEATS = 3
"""After how many epochs' time without a word a driver whose process has ended is not coming back."""
_PAUSE_S = 15.0
"""How much longer one is waited for whose process cannot be seen."""
_RUNNING_S = 300.0
"""The same while an epoch has been planned that may be running."""


@dataclass(frozen=True, slots=True)
class Overview:
    """A snapshot of a query, as its store tells it. Made by `Control.status`."""

    name: str
    """The name of the query."""
    epoch: int
    """The last committed epoch; -1 before the first."""
    generation: int
    """How many drivers have taken the store over so far."""
    written: datetime
    """When a driver last wrote to the journal, by its own clock."""
    records: dict[str, int]
    """How many records each step had in the last epoch."""
    records_per_second: float
    """Records of the last epochs, up to 32, over the time between their commits, all steps added up."""
    epoch_ms: float
    """How long the last epoch took, from its plan to its commit."""
    slots: dict[int, int]
    """The slots that own something, and about how many bytes of state each has."""
    workers: dict[str, tuple[int, ...]]
    """The workers, and the slots that were placed on each."""
    replicas: dict[int, tuple[str, ...]]
    """The workers that hold a replica of each slot, in the order of the chain; how far these are behind, only the
    query's own process knows."""
    state_bytes: int
    """The size of the state in the store."""
    segments: int
    """In how many segments the state lies."""
    watermarks: dict[str, datetime | None]
    """The watermark of each source and step with event time."""
    held_back: dict[str, HeldBack]
    """Of each source with partitions: the one that holds it back, and how far it is behind the one that leads."""
    late: dict[str, int]
    """How many late records each step has dropped, or sent to its output `late`. With windows: late for all of them."""
    partly_late: dict[str, int]
    """How many records were late for some of their windows only, of each step with windows that overlap."""
    missed_windows: dict[str, int]
    """How many windows these records, and those that were late for all, missed."""
    dead_letters: dict[str, int]
    """How many records each step has sent to its output `dead_letter`."""
    clock: datetime | None
    """The time in the last epoch's plan."""
    commands: dict[int, Progress]
    """The commands that are under way, and how far each has come."""
    unheard: dict[int, str]
    """The commands in the control log that no committed epoch has heard: number and verb."""
    driver_gone: str
    """Why no driver seems to run the query; empty if one does, as far as the store can tell."""

    @property
    def lags(self) -> dict[str, timedelta]:
        """How far the watermark of each source and step is behind the clock of the last epoch's plan."""
        now = self.clock
        return {} if now is None else {name: now - mark for name, mark in self.watermarks.items() if mark is not None}


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The partition that holds a source back."""

    name: str
    """The partition: the values of the columns that name it."""
    behind: timedelta
    """How far its watermark is behind that of the partition that leads."""

    def __str__(self) -> str:
        return f"partition {self.name}, {duration_text(self.behind.total_seconds())} behind"


def held_back(history: History) -> dict[str, HeldBack]:
    """The partition that holds each source back, where one does."""
    slowest = {name: slowest_partition(clock) for name, clock in history.clocks.items()}
    return {
        name: HeldBack(each.name, timedelta(microseconds=each.behind_us))
        for name, each in slowest.items()
        if each is not None
    }


class Pulse:
    """What the envelopes of a journal tell: when it was written, and how quickly epochs follow each other."""

    def __init__(self) -> None:
        self.written_ms = 0
        self.epoch_ms = 0.0
        self._planned: tuple[int, int, int] | None = None
        self._epoch = -1
        self._commits: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED + 1)

    def told(self, envelope: Envelope) -> None:
        """An entry was read."""
        self.written_ms = envelope.at_ms
        if isinstance(envelope.body, Plan):
            self._planned = (envelope.body.epoch, envelope.body.attempt, envelope.at_ms)
        elif isinstance(envelope.body, Commit):
            commit = envelope.body
            if commit.epoch <= self._epoch:
                return  # read again
            if commit.epoch != self._epoch + 1:
                self._commits.clear()
            self._epoch = commit.epoch
            if self._planned is not None and self._planned[:2] == (commit.epoch, commit.attempt):
                self.epoch_ms = float(max(0, envelope.at_ms - self._planned[2]))
            self._commits.append((envelope.at_ms, sum(commit.records.values())))

    @property
    def records_per_second(self) -> float:
        """Over the epochs that were seen, from commit to commit; 0 until there are two."""
        took_ms = self._commits[-1][0] - self._commits[0][0] if self._commits else 0
        return sum(count for _, count in list(self._commits)[1:]) / took_ms * 1000 if took_ms > 0 else 0.0


def driver_gone(history: History, pulse: Pulse, now_ms: int) -> str:
    """Why no driver seems to run a query; empty if one does.

    The journal says when a driver last wrote, how long it is between two epochs, and which process it is. A process of
    this host that has ended is no driver. One that has not written for much longer than an epoch takes is taken for
    gone; an epoch that has been planned may take longer.
    """
    silent_s = max(0.0, (now_ms - pulse.written_ms) / 1000)
    beats_s = _BEATS * (history.beat_s + pulse.epoch_ms / 1000)
    host, _, process = history.owner.rpartition(":")
    here = host == socket.gethostname() and process.isdigit()
    ended = here and not _is_alive(int(process))
    if here and not ended and history.plan is not None:
        return ""  # it lives, and runs an epoch, however long that takes
    limit_s = beats_s if ended else beats_s + (_RUNNING_S if history.plan is not None else _PAUSE_S)
    if silent_s <= limit_s:
        return ""
    last = f"its last commit was epoch {history.epoch}" if history.epoch >= 0 else "it has committed no epoch"
    ago = f"{duration_text(silent_s)} ago"
    if ended:
        return f"no driver is running: process {process} has ended; {last}, and it last wrote {ago}"
    return f"no driver seems to be running: {last}, and it last wrote {ago}"


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True


def overview_of(
    history: History, pulse: Pulse, plans: Mapping[int, MigrationPlan], unheard: Mapping[int, str], gone: str = ""
) -> Overview:
    """The overview of a query whose commands under way have these plans, as far as they are known."""
    segments = list(history.manifest.segments())
    recent = history.recent.get(history.epoch)
    return Overview(
        str((history.graph or {}).get("query", "?")),
        history.epoch,
        history.generation,
        datetime.fromtimestamp(pulse.written_ms / 1000, UTC),
        dict(recent.records) if recent else {},
        pulse.records_per_second,
        pulse.epoch_ms,
        bytes_by_slot(history),
        dict(history.workers),
        dict(history.replicas),
        sum(segment.bytes for segment in segments),
        len(segments),
        {
            **{name: moment(clock.watermark) for name, clock in history.clocks.items()},
            **{name: moment(mark) for name, mark in history.watermarks.items()},
        },
        held_back(history),
        {step: count.records for step, count in history.late.items() if count.records},
        {step: count.partly for step, count in history.late.items() if count.partly},
        {step: count.windows for step, count in history.late.items() if count.windows},
        dict(history.dead_letters),
        moment(history.clock_ms * 1000) if history.clock_ms else None,
        {outcome.number: progress_of(outcome, plans.get(outcome.number), history.epoch) for outcome in live(history)},
        dict(unheard),
        gone,
    )


def live(history: History) -> list[Outcome]:
    """The commands that are under way, in their order."""
    return [history.outcomes[number] for number in sorted(history.outcomes) if not history.outcomes[number].over]


def bytes_by_slot(history: History) -> dict[int, int]:
    """The slots that own something, and about how many bytes of state each has."""
    found: Counter[int] = Counter()
    for step, table in history.tables.items():
        sizes = bytes_in(history.manifest, step, np.array(table.firsts, np.uint64))
        for slot, size in zip(table.slots, sizes.tolist(), strict=True):
            found[int(slot)] += size
    return dict(sorted(found.items()))
