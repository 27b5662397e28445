"""Time-to-live and filters: what has expired is absent, whatever is stored, and when it is removed changes nothing."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.protocol.keyspace import hash_integers
from millstream.store.filters import FILTER_FROM, HashFilter, filter_of
from millstream.testing import Simulated

START = datetime(2026, 1, 1, tzinfo=UTC)


class Recent(ms.Computation):
    total = ms.Value("long", default=0, ttl="10 seconds")
    parts = ms.Map("long", "long", ttl="10 seconds")
    seen = ms.Bag("long", ttl="10 seconds")
    output = "key string, total long, there boolean, parts array<long>, seen array<long>"

    def on_record(self, row: Any, at: Any) -> Any:
        there = self.total.exists()
        if row.n >= 0:
            self.total.set(self.total.get() + row.n)
            self.parts.set(row.n, row.n)
            self.seen.append(row.n)
        yield at.key, self.total.get(), there, [value for _, value in self.parts.items()], self.seen.read()


def query_of(computation: Any, **source: Any) -> ms.Query:
    query = ms.Query("recent")
    query.source("s", frame=None, **source).key_by("key").compute("step", computation).sink("out", ms.Memory())
    return query


def test_what_has_expired_on_the_clock_reads_as_absent() -> None:
    sim = Simulated(query_of(Recent), {"s": "key string, n long"}, now=START)
    sim.feed(s=[("a", 1)])
    sim.now += timedelta(seconds=6)
    sim.feed(s=[("a", 2)])
    sim.now += timedelta(seconds=6)
    sim.feed(s=[("a", -1)])
    assert sim.outputs("out")[-1] == ("a", 3, True, [2], [2])  # the value was written anew, entry 1 was not
    sim.now += timedelta(seconds=6)
    sim.feed(s=[("a", -1)])
    assert sim.outputs("out")[-1] == ("a", 0, False, [], [])
    assert sim.state("step", "total") == sim.state("step", "parts") == sim.state("step", "seen") == []


def test_state_of_an_earlier_epoch_is_as_it_was_then() -> None:
    sim = Simulated(query_of(Recent), {"s": "key string, n long"}, now=START)
    sim.feed(s=[("a", 1)])
    sim.advance_clock("1 minute")
    assert sim.state("step", "total") == []
    assert sim.state("step", "total", epoch=0) == [("a", 1)]


def test_removing_the_expired_changes_no_result_and_gives_space_back(seed: int) -> None:
    """Random keys and pauses, with an oracle; small budgets make merges happen all the time."""
    rng = random.Random(seed)
    sim = Simulated(query_of(Recent), {"s": "key string, n long"}, now=START, slots=2)
    known: dict[str, tuple[int, datetime]] = {}
    for epoch in range(80):
        sim.now += timedelta(seconds=rng.choice([0, 1, 3, 8]))
        key, n = f"k{rng.randrange(6)}", rng.randrange(5)
        sim.feed(s=[(key, n)])
        before, until = known.get(key, (0, sim.now))
        alive = until > sim.now
        known[key] = ((before if alive else 0) + n, sim.now + timedelta(seconds=10))
        found = sim.delivered["out"][epoch][0]
        assert found[:3] == (key, known[key][0], alive), f"seed {seed}, epoch {epoch}"
    sim.now += timedelta(minutes=1)
    for _ in range(40):
        sim.feed(s=[("other", 1)])
    rows = sum(ref.rows for ref in sim.driver.journal.history.manifest.segments() if ref.family.state == "total")
    assert rows < 20, f"seed {seed}: {rows} rows are left of one live key"


class Once(ms.Computation):
    """Lets a key pass once an hour of event time."""

    seen = ms.Value("boolean", ttl="1 hour", ttl_time=ms.EVENT_TIME, bloom=True)
    output = "key string"

    def on_batch(self, batch: ms.Batch) -> Any:
        new = ~self.seen.exists(batch)
        self.seen.write(batch, np.ones(len(batch), bool), where=new)
        yield batch.output(batch.keys.filter(pa.array(new)))


def test_event_time_decides_by_the_watermark() -> None:
    query = query_of(Once, event_time="at", lateness="0 seconds")
    sim = Simulated(query, {"s": "key string, at timestamp"}, now=START)
    sim.feed(s=[("a", START), ("b", START + timedelta(minutes=50))])
    sim.feed(s=[("a", START + timedelta(minutes=59))])
    assert sorted(sim.outputs("out")) == [("a",), ("b",)]
    sim.advance_watermark(START + timedelta(minutes=60))
    sim.feed(s=[("a", START + timedelta(minutes=61)), ("b", START + timedelta(minutes=61))])
    assert sorted(sim.outputs("out")) == [("a",), ("a",), ("b",)]
    assert [key for key, _ in sim.state("step")] in (["a", "b"], ["b", "a"])


def test_a_ttl_of_event_time_needs_event_time() -> None:
    with pytest.raises(ms.UserError, match="ttl of its state 'seen' is of event time, but no input has any"):
        Simulated(query_of(Once), {"s": "key string, at timestamp"})


def test_a_time_to_live_may_be_declared_later() -> None:
    class Plain(ms.Computation):
        total = ms.Value("long", default=0)

        def on_record(self, row: Any, at: Any) -> Any:
            self.total.set(self.total.get() + 1)

    class Mortal(Plain):
        total = ms.Value("long", default=0, ttl="10 seconds")

    def query(computation: Any) -> ms.Query:
        query = ms.Query("late")
        query.source("s", frame=None).key_by("key").compute("step", computation)
        return query

    sim = Simulated(query(Plain), {"s": "key string"}, now=START)
    sim.feed(s=[("old",), ("both",)])
    sim = Simulated(query(Mortal), {"s": "key string"}, sim.store, now=START)
    for _ in range(20):
        sim.feed(s=[("both",)])
    sim.advance_clock("1 minute")
    assert sim.state("step") == [("old", 1)]


@pytest.mark.parametrize("count", [FILTER_FROM, 65, 1000, 100_000])
def test_a_filter_lets_all_pass_that_are_there_and_few_others(count: int) -> None:
    hashes = np.sort(hash_integers(np.arange(count)))
    found = HashFilter(filter_of(hashes))
    assert len(filter_of(hashes)) == count
    assert found.may_hold(hashes).all()
    others = hash_integers(np.arange(10**6, 10**6 + 100_000))
    assert found.may_hold(others).mean() < 0.02


def test_new_keys_are_not_looked_for_where_there_is_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream.store import lookup

    searched: list[int] = []
    original = np.searchsorted

    def counting(found: Any, wanted: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(wanted, np.ndarray):
            searched.append(len(wanted))
        return original(found, wanted, *rest, **named)

    query = query_of(Once, event_time="at", lateness="0 seconds")
    sim = Simulated(query, {"s": "key string, at timestamp"}, now=START, slots=1)
    sim.feed(s=[(f"old {i}", START) for i in range(5000)])
    monkeypatch.setattr(lookup.np, "searchsorted", counting)
    sim.feed(s=[(f"new {i}", START) for i in range(1000)])
    assert sum(searched) < 100
    assert len(sim.outputs("out")) == 6000
    sim.feed(s=[(f"old {i}", START) for i in range(1000)])
    assert len(sim.outputs("out")) == 6000


class Kept(ms.Computation):
    """Entries without an end; `Fading` is what it was before."""

    entries = ms.Map("long", "long")
    output = "key string, entries long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.entries.set(row.n, row.n)
        yield at.key, len(self.entries.items())


class Fading(Kept):
    entries = ms.Map("long", "long", ttl="10 seconds")


@pytest.mark.parametrize("epochs", [1, 30])
def test_what_was_written_with_a_time_to_live_expires_also_when_that_is_taken_away(epochs: int) -> None:
    """However many merges there are in between."""
    sim = Simulated(query_of(Fading), {"s": "key string, n long"}, now=START)
    sim.feed(s=[("a", n) for n in range(20)])
    sim = Simulated(query_of(Kept), {"s": "key string, n long"}, sim.store, now=START + timedelta(seconds=20))
    for epoch in range(epochs):
        sim.feed(s=[("a", 100 + epoch)])
    assert sim.outputs("out")[-1] == ("a", epochs)
    assert len(sim.state("step")) == epochs
    sim.advance_clock("1 day")
    assert len(sim.state("step")) == epochs


def test_the_clock_by_which_values_expire_cannot_be_exchanged() -> None:
    class ByEvents(Kept):
        entries = ms.Map("long", "long", ttl="10 seconds", ttl_time=ms.EVENT_TIME)

    def query(computation: Any) -> ms.Query:
        return query_of(computation, event_time="at")

    sim = Simulated(query(ByEvents), {"s": "key string, n long, at timestamp"}, now=START)
    sim.feed(s=[("a", 1, START)])
    with pytest.raises(ms.UserError, match=r"was 'MAP BIGINT BIGINT TTL EVENT', now 'MAP BIGINT BIGINT'"):
        Simulated(query(Fading), {"s": "key string, n long, at timestamp"}, sim.store, now=START)


def test_a_time_to_live_beyond_all_clocks_is_refused() -> None:
    with pytest.raises(ms.UserError, match="above zero, and below"):
        ms.Value("long", ttl=timedelta.max)
