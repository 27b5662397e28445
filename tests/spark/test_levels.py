"""Graphs of several levels on real Spark: exact, one job per epoch, nothing computed twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from feeds import Feed
from pyspark import TaskContext
from pyspark.sql import SparkSession

import millstream as ms
from graphs import PAIRS, Oracle, Shape, Sum, build

pytestmark = pytest.mark.spark


class Counted(Sum):
    """Notes every call in a file that all workers see."""

    def __init__(self, modulus: int, folder: Path) -> None:
        super().__init__(modulus)
        self.folder = folder

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        slot = TaskContext.get().partitionId()  # type: ignore[union-attr]
        with (self.folder / "calls").open("a") as calls:
            calls.write(f"{self.modulus} {batch.epoch} {slot}\n")
        return super().on_batch(batch)


SHAPES: dict[str, Shape] = {
    # moduli are distinct, so that they tell the steps apart
    "chain": [([0], 97, True), ([2], 89, True), ([4], 83, True)],
    "diamond": [([0, 1], 97, True), ([2], 89, False), ([3, 0], 83, False), ([4, 6, 1], 79, False)],
    "wide": [([0], 97, True), ([0], 89, True), ([1], 83, True), ([2, 4, 6], 79, True)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_graph_on_spark_is_exact_in_one_job_per_epoch_and_computes_nothing_twice(
    name: str, spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    feeds = [Feed(tmp_path / source, PAIRS) for source in ("s0", "s1")]
    records = [{s: [(rng.randrange(40), rng.randrange(9)) for _ in range(60)] for s in ("s0", "s1")} for _ in range(3)]
    for epoch in records:
        for feed, rows in zip(feeds, epoch.values(), strict=True):
            feed.add(rows)
    query = build(SHAPES[name], [feed.stream(spark) for feed in feeds], lambda modulus: Counted(modulus, tmp_path))
    oracle = Oracle(query)
    before = len(jobs(spark))
    running = query.start(spark, store=str(tmp_path / "store"), slots=3, trigger={"availableNow": True})
    running.await_termination()
    after = jobs(spark)
    made: Counter[str] = Counter()
    for epoch, rows_of in enumerate(records):
        expected = oracle.feed(rows_of)
        for number in range(len(SHAPES[name])):
            for stream, sink in ((f"step{number}", f"out{number}"), (f"step{number}.odd", f"odd{number}")):
                table = query.sinks[sink].sink.epochs.get(epoch)  # type: ignore[attr-defined]
                found = Counter(tuple(row.values()) for row in table.to_pylist()) if table is not None else Counter()
                assert found == expected[stream], f"epoch {epoch}, {stream}"
                made[stream] += sum(found.values())
    assert all(made.values()), "every stream had something in it"
    for step in query.steps:
        assert {row[0]: row[1] for row in running.state(step).collect()} == dict(oracle.totals[step])
    calls = Counter((tmp_path / "calls").read_text().splitlines())
    assert set(calls.values()) == {1}, "a step ran twice for one slot and epoch"
    depth = max(step.level for step in running._driver.graph.steps)
    stages = Counter(after[before:])
    assert stages == {1: 1, depth + 1: running.epoch + 1}, "one job per epoch; the first one is the start's"


def jobs(spark: SparkSession) -> list[int]:
    """The number of stages of every job so far."""
    listed: Any = spark.sparkContext._jsc.sc().statusStore().jobsList(None)  # type: ignore[union-attr]
    found = [(listed.apply(i).jobId(), listed.apply(i).stageIds().size()) for i in range(listed.size())]
    return [stages for _, stages in sorted(found)]
