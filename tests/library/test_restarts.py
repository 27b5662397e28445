"""A restart with another window, interval, time or number is refused: what is stored would be misread."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from oracle import at

import millstream as ms
from millstream.store.objects import open_store
from millstream.testing import Simulated

SCHEMA = {"s": "k string, ts timestamp, x long, y long"}

Build = Callable[[Any, Any], ms.Stream]
"""Adds a step to a source, and to it keyed."""


def started(build: Build, store: Any) -> Simulated:
    query = ms.Query("restarted")
    source = query.source("s", None, event_time="ts", max_ahead="1000 days")
    build(source, source.key_by("k"))
    return Simulated(query, SCHEMA, store)


def windowed(window: Any, **aggregates: Any) -> Build:
    return lambda source, keyed: keyed.window(window).aggregate("w", **(aggregates or {"n": ms.count()}))


def joined(**options: Any) -> Build:
    return lambda source, keyed: keyed.join("j", keyed, **options)


def ranked(n: int, by: str = "x", **options: Any) -> Build:
    return lambda source, keyed: keyed.top_n("t", n, by=by, **options)


def deduped(within: str) -> Build:
    return lambda source, keyed: source.dedupe("d", id="k", within=within)


def totals(**aggregates: Any) -> Build:
    return lambda source, keyed: keyed.aggregate("a", **aggregates)


HARMFUL: list[tuple[Build, Build, str]] = [
    (windowed(ms.tumbling("10 seconds")), windowed(ms.tumbling("1 minute")), "was \"tumbling.'0:00:10'.*now"),
    (
        windowed(ms.tumbling("1 minute")),
        windowed(ms.tumbling("1 minute", offset="1 second")),
        "offset='0:00:01'",
    ),
    (
        windowed(ms.sliding("1 minute", every="10 seconds")),
        windowed(ms.sliding("2 minutes", every="10 seconds")),
        "sliding",
    ),
    (windowed(ms.sessions("10 seconds")), windowed(ms.sessions("11 seconds")), "sessions.gap='0:00:10'"),
    (windowed(ms.tumbling("1 hour"), n=ms.min("x")), windowed(ms.tumbling("1 hour"), n=ms.max("x")), "n=max"),
    (totals(n=ms.sum("x")), totals(n=ms.sum("y")), "n=sum.'x'.*n=sum.'y'"),
    (deduped("1 hour"), deduped("2 hours"), "was 'within 1:00:00', now 'within 2:00:00'"),
    (ranked(3), ranked(4), "was 'the 3 greatest by x', now 'the 4 greatest by x'"),
    (ranked(3), ranked(3, descending=False), "now 'the 3 least by x'"),
    (ranked(3), ranked(3, by="y"), "now 'the 3 greatest by y'"),
    (joined(window=ms.tumbling("1 hour")), joined(window=ms.tumbling("2 hours")), "tumbling.'1:00:00'"),
    (
        joined(between=("-1 second", "1 second")),
        joined(between=("-1 second", "2 seconds")),
        "now 'between -1000000 and 2000000 microseconds'",
    ),
]


@pytest.mark.parametrize(("before", "after", "message"), HARMFUL)
def test_what_stored_state_depends_on_cannot_change(before: Build, after: Build, message: str) -> None:
    store = open_store("memory://")
    started(before, store).feed(s=[("a", at(0), 1, 2)])
    with pytest.raises(ms.UserError, match=rf"steps\.\w\.stored as: .*{message}"):
        started(after, store)


def first(a: Any, b: Any) -> Any:
    return a


def second(a: Any, b: Any) -> Any:
    return b


HARMLESS: list[tuple[Build, Build]] = [
    (windowed(ms.sessions("10 seconds")), windowed(ms.sessions(timedelta(seconds=10)))),
    (totals(n=ms.combine("x", first)), totals(n=ms.combine("x", second))),
    (deduped("1 hour"), deduped("60 minutes")),
    (joined(window=ms.tumbling("1 hour")), joined(window=ms.tumbling("60 minutes"))),
    (
        windowed(ms.tumbling("1 hour"), n=ms.count()),
        windowed(ms.tumbling("1 hour"), n=ms.count(), productions="strong"),
    ),
]


@pytest.mark.parametrize(("before", "after"), HARMLESS)
def test_what_it_does_not_depend_on_can(before: Build, after: Build) -> None:
    store = open_store("memory://")
    started(before, store).feed(s=[("a", at(0), 1, 2)])
    started(after, store).feed(s=[("a", at(1), 1, 2)])
