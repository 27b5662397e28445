"""One trial of the modification benchmark, in a process of its own: records flow, and the graph changes.

    smq       the stateful map query of the BTW'19 paper (its section 6.3.1): source, stateful map, sink
    q8        NEXMark Q8, time-dilated
    spark     the stateful map's counts as plain Structured Streaming: stopped, changed, and started again
    convert   a count per key whose state is given another type, while records come as fast as they are taken

On `smq` and `q8`, one after the other and each measured by itself: a filter is inserted that lets every fifth record
pass, its function is replaced, and everything leaves one worker.

How it measures
---------------
- An open loop, as of `bench.migration`: which records an epoch had is taken from the offsets in Spark's own log, so it
  does not depend on what the graph does with them.
- A leg is: steady, change, after. What is kept is raw; `bench.modification_report` makes numbers of it.
- The answer is checked at the end, by which graph was there in which epoch: for `smq` every instance's count, for `q8`
  every pair, for `convert` all counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.streaming.query import StreamingQuery

import millstream as ms
from bench import workloads
from bench.contenders import Found, progress, serve, state_settings
from bench.open_loop import Feed
from bench.spark_restart import commits_of, flow, reports, until
from bench.trials import CHUNK, PER_EPOCH, Leg, Rig, cluster, has_counted, settled
from bench.trials import Trial as Migration
from millstream.nexmark.catalogue import QUERIES
from millstream.nexmark.events import generate
from millstream.nexmark.frames import events_of
from millstream.nexmark.parameters import Parameters

_WAIT_S = 600.0
_CONVERT_S = 900.0


@dataclass(frozen=True, slots=True)
class Trial:
    """What to run and on how much."""

    name: str
    label: str
    kind: str
    rate: float
    workers: int
    warm_s: float
    hold_s: float
    state_bytes: int = 0
    bases: str = ""
    """Where filled stores are kept, those of `bench.migration` too; empty for nowhere."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A query to be changed: how it is built on a feed, the filter that comes, and how its answer is checked."""

    build: Callable[[Feed, Path], ms.Query]
    after: str
    before: str
    first: Any
    second: Any
    check: Callable[[Any, list[tuple[int, int, int]]], None]
    """Is given the running query, and for each epoch its first record, the one after its last, and which graph it had:
    0 before the filter, 1 and 2 with its two functions."""


def numbered(feed: Feed) -> DataFrame:
    """The records of a feed: their number, and when each is created."""
    start = sql.timestamp_micros(sql.lit(time.time_ns() // 1000) + (sql.col("n") * (1e6 / feed.rate)).cast("long"))
    return feed.numbers().select("n", start.alias("created"), sql.pmod("n", sql.lit(workloads.INSTANCES)).alias("i"))


def _smq(feed: Feed, folder: Path) -> ms.Query:
    query = ms.Query("smq")
    made = query.source("numbers", numbered(feed), unbounded=True).key_by("i").compute("map", workloads.StatefulMap)
    made.sink("disk", ms.Parquet(str(folder / "out")))
    return query


def _check_smq(running: Any, epochs: list[tuple[int, int, int]]) -> None:
    passes = (lambda n: True, lambda n: n % 5 == 0, lambda n: n % 2 == 1)
    expected: dict[int, int] = {}
    for first, end, graph in epochs:
        for n in range(first, end):
            if passes[graph](n):
                instance = n % workloads.INSTANCES
                expected[instance] = expected.get(instance, 0) + 1
    found = {row[0]: row[1] for row in running.state("map").collect()}
    if found != expected:
        raise RuntimeError(f"wrong answer: {sum(found.values())} records counted, expected {sum(expected.values())}")


_Q8 = Parameters(dilation=2000)


def _q8(feed: Feed, folder: Path) -> ms.Query:
    positions = feed.numbers().select(sql.col("n").alias("position"))
    origins = {kind: events_of(positions, _Q8, kind) for kind in QUERIES["q8"].reads}
    return QUERIES["q8"].build(origins, ms.Parquet(str(folder / "out")))


def _check_q8(running: Any, epochs: list[tuple[int, int, int]]) -> None:
    passes = (lambda n: True, lambda n: n % 5 == 0, lambda n: n % 2 == 1)
    window = timedelta(hours=12)
    last = max(end for _, end, _ in epochs)
    people = {(row["id"], _window(row["ts"], window)) for row in generate(_Q8, "people", 0, last).to_pylist()}
    expected = set()
    for first, end, graph in epochs:
        for row in generate(_Q8, "auctions", first, end).to_pylist() if end > first else ():
            if passes[graph](row["id"]) and (row["seller"], _window(row["ts"], window)) in people:
                expected.add((row["seller"], row["id"]))
    rows = running.spark.read.parquet(running.out).select("id", "id_auction").collect()
    found = {tuple(row) for row in rows}
    if len(rows) != len(found) or found != expected:
        raise RuntimeError(f"wrong answer: {len(rows)} pairs, {len(found)} of them different, expected {len(expected)}")


def _window(at: Any, size: timedelta) -> int:
    return int(at.timestamp() // size.total_seconds())


WORKLOADS = {
    "smq": Workload(_smq, "numbers", "map", workloads.every_fifth, workloads.every_second, _check_smq),
    "q8": Workload(
        _q8, "auctions", "auctions_needed", workloads.fifth_auctions, workloads.second_auctions, _check_q8
    ),
}  # fmt: skip


class Watched:
    """A running query and what its epochs were."""

    def __init__(self, spark: SparkSession, feed: Feed, query: ms.Query, folder: Path, **settings: Any) -> None:
        self.spark, self.feed, self.out = spark, feed, str(folder / "out")
        self._offsets = folder / "store" / "spark-checkpoint" / "offsets"
        self.epochs: list[list[Any]] = []
        self._records = 0
        self._planned = 0.0
        self.offset = -1
        """How far the feed has been committed."""
        self.running = query.start(spark, str(folder / "store"), observe=self._observe, **settings)
        self.state = self.running.state

    def _observe(self, moment: str, epoch: int) -> None:
        if moment == "planned":
            self._planned = time.monotonic()
        if moment == "committed":
            now = time.monotonic()
            lines = (self._offsets / str(epoch)).read_text().splitlines()
            self.offset = int(lines[2]) if lines[2].isdigit() else -1
            end = self.feed.reached.get(self.offset, 0) * self.feed.per_tick
            took = now - self._planned
            row = [epoch, self._records, end, self._planned - self.feed.start, now - self.feed.start, took * 1000, 0]
            self.epochs.append(row)
            self._records = end

    def flow(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= until_s)

    def until(self, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not over():
            if not self.running.active:
                self.running.await_termination()
                raise RuntimeError("the query ended by itself")
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing came of it within {_WAIT_S:.0f} s")
            time.sleep(0.05)


def run_live(trial: Trial, folder: Path) -> Found:
    """Changes a query three times while records flow."""
    workload = WORKLOADS[trial.kind]
    with cluster(trial.workers, folder) as spark:
        feed = Feed(spark, trial.rate)
        watched = Watched(spark, feed, workload.build(feed, folder), folder, slots=trial.workers)
        running = watched.running
        feed.begin()
        wall = time.time() - time.monotonic() + feed.start  # of the clock's start
        progress(1, of := 6)
        watched.flow(trial.warm_s)
        watched.until(lambda: settled(watched.epochs, feed.rate))

        def inserted() -> Any:
            with running.modify(wait=False) as change:
                change.insert("few", keep=workload.first, after=workload.after, before=workload.before)
            return change.handle

        def replaced() -> Any:
            with running.modify(wait=False) as change:
                change.replace("few", keep=workload.second)
            return change.handle

        def drained() -> Any:
            worker = next(iter(sorted(running.status().workers)))
            return running.apply(running.plan_drain(worker, strategy=ms.AllAtOnce()))

        found, graphs = [], []
        for number, (name, change) in enumerate((("insert", inserted), ("replace", replaced), ("drain", drained))):
            progress(2 + number, of)
            found.append(_leg(watched, name, change, trial.hold_s, wall))
            if name != "drain":
                graphs.append(found[-1]["outcome"]["began"])
        handed = feed.end()
        watched.until(lambda: bool(watched.epochs) and watched.epochs[-1][2] >= handed)
        progress(5, of)
        running.wait_epoch(watched.epochs[-1][0], _WAIT_S)
        of_epoch = [(row[1], row[2], sum(row[0] >= began for began in graphs)) for row in watched.epochs]
        workload.check(watched, of_epoch)
        running.stop()
    return {"legs": [{**leg, "epochs": watched.epochs, "rate": feed.rate} for leg in found]}


def _leg(watched: Watched, name: str, change: Callable[[], Any], hold_s: float, wall: float) -> Found:
    """Measures one change."""
    feed, steady = watched.feed, watched.feed.now()
    watched.flow(hold_s)
    asked = feed.now()
    handle = change()
    sent = feed.now()
    watched.until(lambda: handle.outcome is not None and handle.outcome.over)
    outcome = handle.wait(_WAIT_S)
    committed = {row[0]: row[4] for row in watched.epochs}
    watched.flow(max(2.0, hold_s))
    reached = {state: at / 1000 - wall for state, at in outcome.reached_ms.items()}
    planned = next(row[3] for row in watched.epochs if row[0] == outcome.began)
    return {
        "leg": name,
        "strategy": name,
        "phases": {"steady": steady, "migration": asked, "migrated": committed[outcome.last], "end": feed.now()},
        "events": {
            "asked": asked, "sent": sent, "heard": outcome.heard_ms / 1000 - wall, **reached, "planned": planned,
            "committed": committed[outcome.last],
            **({"empty": outcome.empty_ms / 1000 - wall} if outcome.empty_ms else {}),
        },
        "outcome": {"began": outcome.began, "last": outcome.last, "text": outcome.text, "state": outcome.state},
        "plan": {"text": outcome.text, "bytes": outcome.bytes, "bins": 0, "rounds": outcome.rounds, "epochs": 1},
        "memory": [],
        "state_bytes": watched.running.status().state_bytes,
    }  # fmt: skip


# -- plain Spark ------------------------------------------------------------------------------------------------------


def run_spark(trial: Trial, folder: Path) -> Found:
    """The counts of the instances by Structured Streaming: stopped, given the filter, and started again; first in the
    same session, and then as an application, with a session and executors of its own."""
    settings = {
        **state_settings("RocksDBStateStoreProvider"),
        "spark.sql.shuffle.partitions": str(trial.workers),
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        "spark.python.unix.domain.socket.enabled": "false",
    }
    clock, legs, told = time.time() - time.monotonic(), [], list[Any]()
    with cluster(trial.workers, folder, settings) as spark:
        feed = Feed(spark, trial.rate)
        query = _start(numbered(feed), folder)
        feed.begin()
        progress(1, 4)
        flow(query, trial.warm_s)
        until(query, lambda: settled(commits_of(reports(query), clock + feed.start, feed.per_tick), feed.rate))
        steady = feed.now()
        flow(query, trial.hold_s)
        stopping = feed.now()
        query.stop()
        told += reports(query)
        stopped = feed.now()
        query = _start(numbered(feed).where("n % 5 = 0"), folder)
        until(query, lambda: len(reports(query)) > 0)
        legs.append(_restarted("session", steady, stopping, stopped, feed.now(), len(told)))
        progress(2, 4)
        steady = feed.now()
        flow(query, trial.hold_s)
        legs[0]["phases"]["end"] = stopping = feed.now()
        query.stop()
        told += reports(query)
        feed.end()
    progress(3, 4)
    with cluster(trial.workers, folder, settings) as spark:
        stopped = feed.now()
        feed = feed.gone_on(spark, _committed(folder / "checkpoint"))
        query = _start(numbered(feed).where("n % 2 = 1"), folder)
        until(query, lambda: len(reports(query)) > 0)
        legs.append(_restarted("application", steady, stopping, stopped, feed.now(), len(told)))
        flow(query, trial.hold_s)
        legs[1]["phases"]["end"] = feed.now()
        told += reports(query)
        feed.end()
        query.stop()
    epochs = commits_of(told, clock + feed.start, feed.per_tick)
    for leg in legs:
        leg["outcome"] |= dict.fromkeys(("began", "last"), epochs[leg["outcome"].pop("place")][0])
    return {"legs": [{**leg, "epochs": epochs, "rate": feed.rate} for leg in legs]}


def _restarted(name: str, steady: float, stopping: float, stopped: float, again: float, place: int) -> Found:
    """A restart, as far as it is known; `place` is that of its first epoch among all."""
    return {
        "leg": name, "strategy": "spark",
        "phases": {"steady": steady, "migration": stopping, "migrated": again, "end": again},
        "events": {"asked": stopping, "stopped": stopped, "committed": again},
        "outcome": {"text": "stop and restart", "place": place},
        "plan": {"text": "stop and restart", "bytes": 0, "bins": 0, "rounds": 1, "epochs": 1},
        "memory": [], "state_bytes": 0,
    }  # fmt: skip


def _committed(checkpoint: Path) -> int:
    """The offset of the feed up to which Spark has noted all as done."""
    last = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    return int((checkpoint / "offsets" / str(last)).read_text().splitlines()[2])


def _start(frame: DataFrame, folder: Path) -> StreamingQuery:
    writer = frame.groupBy("i").count().writeStream.outputMode("update").format("noop")
    return writer.option("checkpointLocation", str(folder / "checkpoint")).start()


# -- conversion -------------------------------------------------------------------------------------------------------


def run_convert(trial: Trial, folder: Path) -> Found:
    """Throughput of a closed loop, before a state is given another type, while that is under way, and after."""
    like = Migration(
        trial.name, trial.label, "millstream", "rescale", (), 256, 4, trial.rate, trial.state_bytes, trial.workers, 0,
        trial.warm_s, trial.hold_s, bases=trial.bases,
    )  # fmt: skip
    rig = Rig(like, folder)
    progress(1, 5)
    filled = rig.fill(Leg("convert", trial.workers, lambda *_: None))
    with rig.session() as spark:
        feed = Feed(spark, trial.rate, rig.offset)
        running = rig.start(spark, feed, trial.workers)
        loop = Loop(running, feed, rig.keys // CHUNK)
        progress(2, 5)
        loop.run(lambda since: time.monotonic() - since > trial.warm_s)
        steady = loop.run(lambda since: time.monotonic() - since > trial.hold_s)
        progress(3, 5)
        with running.modify() as change:
            change.replace("count", workloads.CountInDoubles, state={"total": ms.carry("double")})
        left = [sum(running.status().converting.values())]
        begun = time.monotonic()

        def converted(since: float) -> bool:
            left.append(sum(running.status().converting.values()))
            return not left[-1] or time.monotonic() - since > _CONVERT_S

        during = loop.run(converted)
        took = time.monotonic() - begun
        progress(4, 5)
        after = loop.run(lambda since: time.monotonic() - since > trial.hold_s)
        rows = running.state("count").selectExpr("count(*)", "cast(sum(total) as long)").collect()[0]
        running.stop()
    handed = rig.records + loop.handed
    if tuple(rows) != (rig.keys, handed):
        raise RuntimeError(f"wrong answer: found (keys, records) {tuple(rows)}, expected {rig.keys, handed}")
    return {
        "filled": filled,
        "steady": steady, "during": during, "after": after, "seconds": took, "bytes": [left[0], left[-1]],
        "state_bytes": filled["state_bytes"],
    }  # fmt: skip


class Loop:
    """A closed loop over known keys: the next records are handed over when the last have been committed."""

    def __init__(self, running: Any, feed: Feed, chunks: int) -> None:
        self._running, self._feed, self._chunks = running, feed, chunks
        self._seen: dict[int, Any] = {}
        self.handed = 0

    def run(self, over: Callable[[float], bool]) -> list[list[float]]:
        """Goes on until it is over, which is given when it began; seconds and records of each turn."""
        since, found = time.monotonic(), []
        while not over(since):
            first = self.handed // CHUNK
            before = time.monotonic()
            self._feed.fill((first + place) % self._chunks for place in range(PER_EPOCH))
            self.handed += PER_EPOCH * CHUNK
            while not has_counted(self._running, self._seen, self.handed):
                if not self._running.active:
                    self._running.await_termination()
                    raise RuntimeError("the query ended by itself")
                if time.monotonic() - before > _WAIT_S:
                    raise RuntimeError(f"an epoch was not over within {_WAIT_S:.0f} s")
                time.sleep(0.01)
            found.append([time.monotonic() - before, float(PER_EPOCH * CHUNK)])
        return found


def main() -> None:
    """Runs the trial that the first argument describes, in the current directory."""
    runs = {"smq": run_live, "q8": run_live, "spark": run_spark, "convert": run_convert}

    def run() -> Found:
        trial = Trial(**json.loads(sys.argv[1]))
        return runs[trial.kind](trial, Path.cwd())

    serve(run)
