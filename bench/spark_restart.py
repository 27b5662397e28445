"""What a Spark user can do today: stop the query, repartition its state offline, and start it again.

The same count per key on the same input, as `groupBy().count()` with RocksDB state, on the same executors. While
records keep coming, the query is stopped, `spark._streamingCheckpointManager.repartition` (Spark 4.2) doubles the
number of its state partitions, and the query is started again. The stall lasts from the last commit before to the first
one after.

Spark's epochs are taken from its own progress reports: a commit is the start of the trigger and how long it took.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from bench.contenders import Found, progress, state_settings
from bench.open_loop import Feed
from bench.resident import Sampler
from bench.trials import BYTES_PER_KEY, CHUNK, Trial, cluster, settled

_WAIT_S = 7200.0
_PER_EPOCH = 2


def run_spark(trial: Trial, folder: Path) -> Found:
    """Fills the state, lets records flow, and goes through stop, repartition and restart."""
    few, many = max(1, trial.workers // 2), trial.workers
    settings = {
        **state_settings("RocksDBStateStoreProvider"),
        "spark.sql.shuffle.partitions": str(few),
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        "spark.python.unix.domain.socket.enabled": "false",
    }
    with cluster(trial.workers, folder, settings) as spark:
        feed = Feed(spark, trial.rate)
        chunks = -(-trial.state_bytes // (BYTES_PER_KEY * CHUNK * _PER_EPOCH)) * _PER_EPOCH
        frame = feed.frame(chunks * CHUNK, CHUNK)
        started = time.monotonic()
        query = _start(frame, folder)
        for first in range(0, chunks, _PER_EPOCH):
            feed.fill(range(first, first + _PER_EPOCH))
            until(query, partial(_has_read, query, first + _PER_EPOCH))
            progress(first // _PER_EPOCH + 1, chunks // _PER_EPOCH + 4)
        filled = {"keys": chunks * CHUNK, "seconds": time.monotonic() - started}
        skipped = len(reports(query))
        clock = time.time() - time.monotonic()  # reports have wall time
        feed.begin()
        with Sampler(feed.start) as sampler:
            flow(query, trial.warm_s)
            until(
                query,
                lambda: settled(commits_of(reports(query)[skipped:], clock + feed.start, feed.per_tick), feed.rate),
            )
            steady = feed.now()
            flow(query, trial.hold_s)
            stopping = feed.now()
            query.stop()
            before = reports(query)[skipped:]
            stopped = feed.now()
            _repartition(spark, folder, many)
            repartitioned = feed.now()
            query = _start(frame, folder)
            until(query, lambda: len(reports(query)) > 0)
            again = feed.now()
            waiting = feed.ticks - sum(_input(report) for report in before)
            until(query, partial(_has_read, query, waiting))  # what has piled up meanwhile
            caught_up = feed.now()
            flow(query, min(trial.hold_s, 10.0))
            done = feed.now()
        feed.end()
        after = reports(query)
        partitions = int(after[-1]["stateOperators"][0]["numShufflePartitions"])
        query.stop()
    if partitions != many:
        raise RuntimeError(f"the query has {partitions} state partitions after the restart, expected {many}")
    return {
        "filled": filled,
        "legs": [{
            "leg": "restart", "strategy": "spark", "rate": feed.rate,
            "phases": {
                "warm": 0.0, "steady": steady, "migration": stopping, "stopped": stopped,
                "repartitioned": repartitioned, "restarted": again, "migrated": caught_up, "end": done,
            },
            "plan": {"text": f"{few} to {many} state partitions", "bytes": 0, "bins": 0, "rounds": 1, "epochs": 1},
            "epochs": commits_of([*before, *after], clock + feed.start, feed.per_tick),
            "memory": sampler.samples,
            "state_bytes": trial.state_bytes,
        }],
        "fetch": "not limited (the state is on this machine's disk)",
    }  # fmt: skip


def _start(frame: DataFrame, folder: Path) -> StreamingQuery:
    writer = frame.groupBy("k").count().writeStream.outputMode("update").format("noop")
    return writer.option("checkpointLocation", str(folder / "checkpoint")).start()


def _repartition(spark: SparkSession, folder: Path, partitions: int) -> None:
    manager: Any = spark._streamingCheckpointManager
    manager.repartition(str(folder / "checkpoint"), partitions, enforce_exactly_once_sink=False)


def reports(query: StreamingQuery) -> list[Any]:
    """What Spark says of the epochs with records."""
    return [report for report in query.recentProgress if report["numInputRows"]]


def _input(report: Any) -> int:
    """How many numbers of the feed an epoch has read: ticks or chunks, not what they are made into."""
    return int(report["numInputRows"])


def _has_read(query: StreamingQuery, numbers: int) -> bool:
    return sum(_input(report) for report in reports(query)) >= numbers


def commits_of(told: list[Any], start: float, per_tick: int) -> list[list[Any]]:
    """As those of `bench.trials`; `start` is the wall time of the clock's start."""
    rows, first = [], 0
    for report in told:
        began = datetime.fromisoformat(report["timestamp"].replace("Z", "+00:00")).timestamp() - start
        took = report["durationMs"]["triggerExecution"]
        end = first + _input(report) * per_tick
        rows.append([report["batchId"], first, end, began, began + took / 1000, took, 0])
        first = end
    return rows


def flow(query: StreamingQuery, seconds: float) -> None:
    """Lets records flow for a time."""
    end = time.monotonic() + seconds
    until(query, lambda: time.monotonic() >= end)


def until(query: StreamingQuery, over: Callable[[], bool]) -> None:
    """Waits for something, as long as the query runs."""
    deadline = time.monotonic() + _WAIT_S
    while not over():
        if not query.isActive:
            raise RuntimeError(f"Spark ended the query: {query.exception()}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing came of it within {_WAIT_S:.0f} s")
        time.sleep(0.2)
