"""A graph of three levels with timers and two outputs, and a sequential oracle for it."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import millstream as ms
from millstream.model.query import Query
from timers import at

EVENTS = {"events": "k long, ts timestamp, v long"}
Event = tuple[int, Any, int]
GROUPS = 5  # enough for every one of two or three slots to have some


class Scores(ms.Computation):
    """Level 1: sums up a key until it has been silent for ten seconds, then closes it. Passes every record on."""

    total = ms.Value("long", default=0)
    silence = ms.Timer(ms.EVENT_TIME)
    output = "g long, k long, v long"
    outputs: ClassVar = {"closed": "k long, total long"}

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.total.set(self.total.get() + row.v)
        self.silence.set(timedelta(seconds=10))
        yield at.key % GROUPS, at.key, row.v

    @silence.fires
    def close_it(self, at: ms.At) -> Iterable[Any]:
        yield ms.to("closed", at.key, self.total.get())
        self.total.delete()


class Groups(ms.Computation):
    """Level 2, whole columns: the grand total of each group, once per epoch."""

    grand = ms.Value("long", default=0)
    output = "g long, grand long"

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        totals = self.grand.read(batch) + batch.sum("v")
        self.grand.write(batch, totals)
        yield batch.output(batch.keys, totals)


class Final(ms.Computation):
    """Level 3: meets groups with what level 1 has closed, and reminds of it five seconds later, on another output."""

    latest = ms.Value("long")
    closes = ms.Map("long", "long")
    reminder = ms.Timer(ms.EVENT_TIME, payload="long")
    output = "k long, what string, n long"
    outputs: ClassVar = {"reminders": "k long, closes long"}

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        if at.input == "groups":
            self.latest.set(row.grand)
            yield at.key, "group", row.grand
        else:
            self.closes.set(row.total, (self.closes.get(row.total) or 0) + 1)
            self.reminder.set(timedelta(seconds=5), payload=row.total)
            yield at.key, "closed", row.total

    @reminder.fires
    def remind(self, at: ms.At) -> Iterable[Any]:
        yield ms.to("reminders", at.key, self.closes.get(at.payload))


def three_levels(
    first: str = "weak",
    second: str = "weak",
    scores_as: Any = Scores,
    groups_as: Any = Groups,
    origin: Any = None,
    sinks: Sequence[Any] = (),
) -> Query:
    """`first` and `second` say what the productions of the first two levels are, `sinks` where the outputs go."""
    out, reminders = sinks or (ms.Memory(), ms.Memory())
    query = ms.Query("levels")
    events = query.source("events", origin, event_time="ts")
    scores = events.key_by("k").compute("scores", scores_as, late="process", productions=first)
    grouped = scores.key_by("g").compute("groups", groups_as, late="process", productions=second)
    closed = scores.output("closed").key_by("k")
    final = query.compute("final", Final, late="process", groups=grouped.key_by("g"), closed=closed)
    final.sink("out", out)
    final.output("reminders").sink("reminders_out", reminders)
    return query


def some_events(rng: random.Random, mark: int, count: int = 20) -> list[Event]:
    """Events around a time, in seconds."""
    return [(rng.randrange(8), at(mark - rng.randrange(12)), rng.randrange(1, 9)) for _ in range(count)]


def a_history(rng: random.Random, epochs: int) -> list[list[Event]]:
    """Epochs with some time between them, the last of them far ahead, so that all timers have fired."""
    marks = [0]
    for _ in range(epochs - 2):
        marks.append(marks[-1] + rng.randrange(3, 12))
    return [*(some_events(rng, mark) for mark in marks), [(0, at(marks[-1] + 100), 1)]]


class Oracle:
    """The same, one record after the other, in dictionaries. Times are in seconds."""

    def __init__(self) -> None:
        self.mark = -(10**9)
        self.totals: dict[int, int] = {}
        self.silences: dict[int, int] = {}
        self.grand: dict[int, int] = {}
        self.latest: dict[int, int] = {}
        self.closes: dict[tuple[int, int], int] = {}
        self.reminders: dict[int, tuple[int, int]] = {}
        self.out: list[Counter[Any]] = []
        self.reminded: list[Counter[Any]] = []

    def feed(self, events: Sequence[Event]) -> None:
        out: Counter[Any] = Counter()
        reminded: Counter[Any] = Counter()
        before = self.mark
        sums: dict[int, int] = defaultdict(int)
        for k, moment, v in events:
            second = round((moment - at(0)).total_seconds())
            self.mark = max(self.mark, second)
            self.totals[k] = self.totals.get(k, 0) + v
            self.silences[k] = second + 10
            sums[k % GROUPS] += v
        for g, total in sums.items():
            self.grand[g] = self.grand.get(g, 0) + total
            self.latest[g] = self.grand[g]
            out[g, "group", self.grand[g]] += 1
        for k in [k for k, due in self.silences.items() if due <= self.mark]:
            total, due = self.totals.pop(k), self.silences.pop(k)
            self.closes[k, total] = self.closes.get((k, total), 0) + 1
            self.reminders[k] = (max(due, before) + 5, total)
            out[k, "closed", total] += 1
        for k in [k for k, (due, _) in self.reminders.items() if due <= self.mark]:
            _, total = self.reminders.pop(k)
            reminded[k, self.closes[k, total]] += 1
        self.out.append(out)
        self.reminded.append(reminded)

    def check(self, sim: Any) -> None:
        """State of all levels and both outputs of every epoch equal the oracle's."""
        self.check_state(sim)
        for sink, expected in (("out", self.out), ("reminders_out", self.reminded)):
            assert sorted(sim.delivered[sink]) == list(range(len(expected)))
            for epoch, rows in enumerate(expected):
                assert Counter(sim.delivered[sink][epoch]) == rows, f"{sink}, epoch {epoch}"

    def check_state(self, sim: Any) -> None:
        assert dict(sim.state("scores")) == self.totals
        assert dict(sim.state("groups")) == self.grand
        assert dict(sim.state("final", "latest")) == self.latest
        assert {(k, total): n for k, total, n in sim.state("final", "closes")} == self.closes
