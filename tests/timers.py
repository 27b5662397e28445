"""Computations with timers, for tests with and without Spark."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import millstream as ms

DAY = datetime(2026, 1, 1, tzinfo=UTC)
COMMANDS = "k long, ts timestamp, verb string, tag string, due long"


def at(seconds: float) -> datetime:
    return DAY + timedelta(seconds=seconds)


class Obey(ms.Computation):
    """Sets, moves and deletes timers as records say, and reports what fires."""

    alarm = ms.Timer(ms.EVENT_TIME, payload="string")
    fired = ms.Value("long", default=0)
    output = "k long, tag string, time timestamp, payload string, n long"

    def on_record(self, row: Any, at: ms.At) -> None:
        if row.verb == "set":
            self.alarm.set(DAY + timedelta(seconds=row.due), tag=row.tag, payload=f"due {row.due}")
        elif row.verb == "delete":
            self.alarm.delete(tag=row.tag)

    @alarm.fires
    def ring(self, at: ms.At) -> Iterable[Any]:
        self.fired.set(self.fired.get() + 1)
        yield at.key, at.tag, at.time, at.payload, self.fired.get()


class Patience(ms.Computation):
    """Reports a key that has been silent for two seconds of wall time."""

    silence = ms.Timer(ms.WALL_TIME)
    output = "k long"

    def on_record(self, row: Any, at: ms.At) -> None:
        self.silence.set(timedelta(seconds=2))

    @silence.fires
    def silent(self, at: ms.At) -> Iterable[Any]:
        yield (at.key,)
