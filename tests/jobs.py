"""Computations and oracles that many tests share. Small enough to be right by reading."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import millstream as ms
from millstream.model.query import Query

EVENTS = {"events": "user string, amount long"}
Event = tuple[str | None, int]


class Total(ms.Computation):
    """Per user: the running sum, one production per record. Sensitive to loss, repetition and order."""

    total = ms.Value("long", default=0)
    last = ms.Value("long")
    output = "user string, total long, before long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        before = self.last.get()
        self.total.set(self.total.get() + row.amount)
        self.last.set(row.amount)
        yield at.key, self.total.get(), before


class TotalBatch(ms.Computation):
    """Per user: the sum, one production per key and epoch; users whose sum is a multiple of seven are forgotten."""

    total = ms.Value("long", default=0)
    output = "user string, total long"

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        totals = self.total.read(batch) + batch.sum("amount")
        self.total.write(batch, totals)
        self.total.delete(batch, where=totals % 7 == 0)
        yield batch.output(batch.keys, totals)


def two_steps(name: str = "totals") -> Query:
    """Two steps side by side on one source, each with a sink."""
    query = ms.Query(name)
    events = query.source("events", frame=None)
    events.key_by("user").compute("records", Total).sink("records_out", ms.Memory())
    events.key_by("user").compute("batches", TotalBatch).sink("batches_out", ms.Memory())
    return query


class Oracle:
    """The same, one record after the other, in dictionaries."""

    def __init__(self) -> None:
        self.total: Counter[str | None] = Counter()
        self.last: dict[str | None, int] = {}
        self.forgetful: dict[str | None, int] = {}
        self.records_out: list[dict[str | None, list[tuple[Any, ...]]]] = []
        self.batches_out: list[dict[str | None, tuple[Any, ...]]] = []

    def feed(self, events: Sequence[Event]) -> None:
        records: dict[str | None, list[tuple[Any, ...]]] = defaultdict(list)
        batches: dict[str | None, tuple[Any, ...]] = {}
        sums: Counter[str | None] = Counter()
        for user, amount in events:
            before = self.last.get(user)
            self.total[user] += amount
            self.last[user] = amount
            sums[user] += amount
            records[user].append((user, self.total[user], before))
        for user, amount in sums.items():
            value = self.forgetful.get(user, 0) + amount
            batches[user] = (user, value)
            self.forgetful[user] = value
            if value % 7 == 0:
                del self.forgetful[user]
        self.records_out.append(dict(records))
        self.batches_out.append(batches)

    def check(self, sim: Any) -> None:
        """Everything a simulated run shows equals the oracle."""
        assert dict(sim.state("records", "total")) == dict(self.total)
        assert dict(sim.state("records", "last")) == self.last
        assert dict(sim.state("batches")) == self.forgetful
        assert sorted(sim.delivered["records_out"]) == list(range(len(self.records_out)))
        for epoch, expected in enumerate(self.records_out):
            found: dict[str | None, list[tuple[Any, ...]]] = defaultdict(list)
            for row in sim.delivered["records_out"][epoch]:
                found[row[0]].append(row)
            assert found == expected
        for epoch, once in enumerate(self.batches_out):
            rows = sim.delivered["batches_out"][epoch]
            assert len(rows) == len(once)
            assert {row[0]: row for row in rows} == once
