"""Bad records on real Spark: dead letters reach their sink, their keys stay, and the status counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms

pytestmark = pytest.mark.spark


class Refunds(ms.Computation):
    """Sums amounts, and fails on a negative one after it has added it."""

    total = ms.Value("long", default=0)
    output = "k long, total long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.total.set(self.total.get() + row.v)
        yield at.key, self.total.get()
        if row.v < 0:
            raise ValueError(f"a refund of {-row.v}")


class RefundsBatch(ms.Computation):
    """The same for all keys at once."""

    total = ms.Value("long", default=0)
    output = "k long, total long"

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        if (batch.column("v").to_numpy() < 0).any():
            raise ValueError("a refund")
        self.total.write(batch, self.total.read(batch) + batch.sum("v"))
        yield batch.output(batch.keys, self.total.read(batch))


def test_bad_records_go_to_a_sink_and_their_keys_go_on(spark: SparkSession, tmp_path: Path) -> None:
    feed, out, dead = Feed(tmp_path / "in", "k long, v long"), ms.Memory(), ms.Memory()
    epochs = [[(k, v) for k in range(20) for v in (k, -1 if (k + n) % 7 == 0 else 1, 5)] for n in range(2)]
    for rows in epochs:
        feed.add(rows)
    query = ms.Query("refunds")
    pairs = query.source("pairs", feed.stream(spark)).key_by("k")
    records = pairs.compute("records", Refunds, on_error="dead_letter")
    batches = pairs.compute("batches", RefundsBatch, on_error="dead_letter")
    records.sink("out", out)
    records.output("dead_letter").union(batches.output("dead_letter")).map_batches(
        "all", lambda batch: batch, output="step string, key string, record string, error string, epoch long"
    ).sink("dead", dead)
    running = query.start(spark, store=str(tmp_path / "store"), slots=2, trigger={"availableNow": True})
    running.await_termination()
    letters: Counter[Any] = Counter()
    totals, whole = Counter[int](), Counter[int]()
    for epoch, rows in enumerate(epochs):
        bad = {k for k, v in rows if v < 0}
        for k, v in rows:
            totals[k] += max(v, 0)
            whole[k] += 0 if k in bad else v
            if v < 0:
                letters["records", str(k), f"Row(k={k}, v={v})", "ValueError: a refund of 1", epoch] += 1
            if k in bad:
                letters["batches", str(k), f"Row(k={k}, v={v})", "ValueError: a refund", epoch] += 1
    assert Counter(tuple(row.values()) for row in dead.rows()) == letters
    assert {row[0]: row[1] for row in running.state("records").collect()} == dict(totals)
    assert {row[0]: row[1] for row in running.state("batches").collect()} == {k: n for k, n in whole.items() if n}
    assert len(out.rows()) == sum(v >= 0 for rows in epochs for _, v in rows)
    assert running.status().dead_letters == Counter(step for step, *_ in letters.elements())
