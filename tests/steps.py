"""A query of all steps of the library, for tests of the whole of it."""

from __future__ import annotations

import random
from datetime import datetime
from typing import Any

import millstream as ms
from timers import at

SCHEMA = "k long, ts timestamp, x double"


def fold(key: int, record: Any, state: int | None) -> tuple[int | None, list[Any]]:
    """Says so when a key has had three records, and begins anew."""
    seen = (state or 0) + 1
    return (None, [(key, seen)]) if seen == 3 else (seen, [])


def build(origin: Any) -> tuple[ms.Query, dict[str, ms.Memory]]:
    """The query, and the sink of each step."""
    query = ms.Query("library")
    source = query.source("s", origin, event_time="ts", lateness="5 seconds", max_ahead="10000 days")
    keyed = source.key_by("k")
    tumbling = keyed.window(ms.tumbling("10 seconds"))
    steps = {
        "counts": keyed.count("counts"),
        "totals": keyed.aggregate("totals", total=ms.sum("x"), most=ms.max("x"), own=ms.combine("x", max)),
        "tumbling": tumbling.count("tumbling", early=True),
        "sliding": keyed.window(ms.sliding("10 seconds", every="2 seconds")).aggregate("sliding", avg=ms.mean("x")),
        "sessions": keyed.window(ms.sessions("4 seconds")).count("sessions"),
        "joined": keyed.join("joined", keyed, between=("-1 second", "0 seconds")),
        "best": keyed.top_n("best", 2, by="x"),
        "once": source.dedupe("once", id="k", within="5 seconds"),
        "thirds": keyed.state_machine("thirds", fold, state="long", output="k long, n long", late="process"),
    }
    final = steps["tumbling"].filter("final-only", lambda rows: rows["final"])
    minutes = final.key_by("k").window(ms.tumbling("1 minute"))
    steps["minutes"] = minutes.aggregate("minutes", n=ms.sum("count"))
    sinks = {name: ms.Memory() for name in steps}
    for name, stream in steps.items():
        stream.sink(f"{name}-out", sinks[name])
    return query, sinks


class Records:
    """Random records that drift forward in time, some of them late."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now = rng, 0

    def epoch(self) -> list[tuple[int, datetime, float]]:
        self.now += self.rng.randrange(5, 40)
        return [
            (self.rng.randrange(5), at(self.now + self.rng.randrange(-9, 3)), self.rng.randrange(99) / 2)
            for _ in range(25)
        ]
