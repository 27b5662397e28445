"""One trial of the recovery benchmark, in a process of its own: an executor is killed, or state is handed over.

    kill        records flow at a fixed rate, an executor is killed with SIGKILL, and again, and again
    handover    records flow, and a quarter of the state goes from half of the slots to the others, in one round
    throughput  epochs of a million records follow each other without a pause

A kill while one of NEXMark's queries runs is a trial of `bench.rhino_trials`.

How it measures
---------------
- What recovery, a stall and quiet time are, says `bench.standstills`. Spark's own query has recovered with an epoch
  that took twice as long as usual, or began after Spark had noticed.
- Before each kill and each handover the replacement has come up, all hold what they should, and latency is as it was;
  then records flow for a while, which is the quiet time that a handover is compared with.
- `store` is the variant without replicas (the papers' RhinoDFS): state comes from the store, inside the epoch.
- What workers fetch, and what they take from each other, is limited: all of them together, as if they shared a wire.
- The answer is checked at the end: the counts in the state add up to the records that were handed over.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import millstream as ms
from bench import workloads
from bench.contenders import Found, progress, serve, state_settings
from bench.open_loop import Feed
from bench.rhino_trials import Reconfiguration
from bench.rhino_trials import run as run_nexmark
from bench.spark_restart import commits_of, flow, reports, until
from bench.standstills import breakdown, executors, kill, kill_one, missing_s, ready, stalls_of
from bench.trials import BYTES_PER_KEY, CHUNK, PER_EPOCH, Leg, Rig, Trial, cluster, has_counted, settled

_WAIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Recovery:
    """What to run and on how much. `variant` is `replica`, `store` or `spark`."""

    name: str
    label: str
    kind: str
    variant: str
    state_bytes: int
    bins: int
    rate: float
    workers: int
    limit: int
    """Bytes a second that all workers together may fetch, and may take from each other; 0 for no limit."""
    kills: int
    warm_s: float
    hold_s: float
    bases: str = ""
    network: bool = False
    """Whether workers are on hosts of their own, with wires of 1 Gbit/s, which then limit what they give each other."""

    @property
    def trial(self) -> Trial:
        """What the rig of the migration benchmark is told."""
        return Trial(
            self.name, self.label, "millstream", "half", (), self.bins, 1, self.rate, self.state_bytes, self.workers,
            self.limit, self.warm_s, self.hold_s, bases=self.bases,
        )  # fmt: skip


class Killing(Rig):
    """A rig whose queries have replicas, and whose executors can be killed."""

    def __init__(self, asked: Recovery, folder: Path) -> None:
        super().__init__(asked.trial, folder)
        self.asked = asked

    @contextmanager
    def session(self) -> Iterator[SparkSession]:
        """A session with new workers."""
        with cluster(self.asked.workers, self.folder, network=self.asked.network) as spark:
            yield spark

    def start(self, spark: SparkSession, feed: Feed, slots: int, observe: Any = None) -> Any:
        query = ms.Query("bench")
        query.source("records", feed.frame(self.keys, CHUNK)).key_by("k").compute("count", workloads.CountBatch)
        each = self.asked.limit / self.asked.workers or None
        return query.start(
            spark,
            str(self.folder / "store"),
            slots=slots,
            bins=self.asked.bins,
            observe=observe,
            cache_dir=str(self.folder / "caches"),
            fetch_limit=each,
            replicas=1 if self.asked.variant == "replica" else 0,
            replicate_limit=None if self.asked.network else each,
        )

    def rest(self, running: Any, seen: dict[int, Any], rows: Callable[[], list[list[Any]]], rate: float) -> float:
        """Waits until all workers have slots, all replicas are there, and the query has settled; when that was. Then
        lets records flow for a while."""
        replicated = self.asked.variant == "replica"
        self._until(running, lambda: self._gathered(running, seen) and ready(running, self.asked.workers, replicated))
        self._settle(running, seen, rows, rate)
        settled_at = time.monotonic()
        self._flow(running, seen, self.asked.hold_s)
        return settled_at

    def kill(self, done: Callable[[], None]) -> Found:
        """Kills executors while records flow."""
        commits: dict[int, float] = {}
        kills: list[Found] = []
        with self.session() as spark:
            feed = Feed(spark, self.asked.rate, self.offset, self.steps_done)

            def observe(moment: str, epoch: int) -> None:
                if moment == "committed":
                    commits[epoch] = time.monotonic()

            running = self.start(spark, feed, self.asked.workers, observe)
            first = running.epoch + 1
            feed.begin()
            seen: dict[int, Any] = {}

            def wait(over: Callable[[], bool]) -> None:
                self._until(running, lambda: self._gathered(running, seen) and over())

            for _ in range(self.asked.kills):
                self._flow(running, seen, self.asked.warm_s)
                self.rest(running, seen, lambda: self._rows(seen, first, commits, feed.start), feed.rate)
                kills.append(kill_one(spark, running, seen, commits, wait, feed.start))
                done()
            self._flow(running, seen, self.asked.warm_s)
            handed = feed.end()
            self._until(running, partial(self._has_counted, running, seen, first, handed))
            self.records += handed
            self.offset = feed.offset
            facts = running.replicas()
            running.stop()
        return {
            "kills": kills,
            "rate": feed.rate,
            "epochs": self._rows(seen, first, commits, feed.start),
            "given": facts.given,
            "fetched": facts.fetched,
            "made": facts.made,
        }

    def _has_counted(self, running: Any, seen: dict[int, Any], first: int, records: int) -> bool:
        self._gathered(running, seen)
        return sum(f.records.get("count", 0) for epoch, f in seen.items() if epoch >= first) >= records

    @staticmethod
    def _gathered(running: Any, seen: dict[int, Any]) -> bool:
        return has_counted(running, seen, 0)

    @staticmethod
    def _rows(seen: dict[int, Any], first: int, commits: dict[int, float], start: float) -> list[list[Any]]:
        rows, record = [], 0
        for epoch in sorted(number for number in seen if number >= first):
            facts = seen[epoch]
            end, at = record + facts.records.get("count", 0), commits[epoch] - start
            rows.append(
                [epoch, record, end, at - facts.duration_ms / 1000, at, facts.parts_ms["run"], facts.fetched_bytes]
            )
            record = end
        return rows

    def throughput(self, epochs: int) -> Found:
        """Fills more state, in epochs of a million records; how long each takes, from commit to commit."""
        commits: dict[int, float] = {}
        with self.session() as spark:
            feed = Feed(spark, self.asked.rate, self.offset)

            def observe(moment: str, epoch: int) -> None:
                if moment == "committed":
                    commits[epoch] = time.monotonic()

            running = self.start(spark, feed, self.asked.workers, observe)
            self._until(running, lambda: running.epoch >= 0)
            chunks, seen = self.keys // CHUNK, dict[int, Any]()
            took: list[float] = []
            for number in range(epochs):
                begun = time.monotonic()
                feed.fill(range(chunks, chunks + PER_EPOCH))
                chunks += PER_EPOCH
                self._until(running, partial(has_counted, running, seen, (number + 1) * PER_EPOCH * CHUNK))
                took.append(time.monotonic() - begun)
                progress(number, epochs)
            facts = running.replicas()
            self.keys = self.records = chunks * CHUNK
            self.offset = feed.offset
            running.stop()
        return {
            "epochs_s": took,
            "records": PER_EPOCH * CHUNK,
            "given": facts.given,
            "made": facts.made,
            "lacking": facts.lacking,
        }


def run_millstream(asked: Recovery, folder: Path) -> Found:
    """Fills the state and goes through the trial."""
    rig = Killing(asked, folder)
    steps = asked.kills + 3
    rig.step(steps)
    even = Leg("even", asked.workers, lambda running, *_: None)
    filled = rig.fill(even)
    rig.step(steps)
    if asked.kind == "throughput":
        found = rig.throughput(asked.kills)
    elif asked.kind == "handover":
        found = _handover(rig)
    else:
        found = rig.kill(lambda: rig.step(steps))
    rig.check()
    return {"filled": filled, **found}


def _handover(rig: Killing) -> Found:
    """A quarter of the state goes to the other half of the slots in one round, and later back."""
    legs, half = [], rig.asked.workers // 2
    commits: dict[int, float] = {}
    with rig.session() as spark:
        feed = Feed(spark, rig.asked.rate, rig.offset, 1)

        def observe(moment: str, epoch: int) -> None:
            if moment == "committed":
                commits[epoch] = time.monotonic()

        running = rig.start(spark, feed, rig.asked.workers, observe)
        first = running.epoch + 1
        feed.begin()
        seen: dict[int, Any] = {}
        rig._flow(running, seen, rig.asked.warm_s)
        for turn in range(rig.asked.kills):
            settled_at = rig.rest(running, seen, lambda: rig._rows(seen, first, commits, feed.start), feed.rate)
            strategy = ms.AllAtOnce(prepared=rig.asked.variant == "replica")
            low, high = list(range(half)), list(range(half, rig.asked.workers))
            plan = (
                running.plan_move(slots=low, share=0.5, to=high, strategy=strategy)
                if turn % 2 == 0
                else running.plan_rescale(rig.asked.workers, strategy=strategy)
            )
            asked_at = time.monotonic()
            handle = running.apply(plan)

            def over(handle: Any = handle) -> bool:
                """Whether two epochs have been committed after it."""
                outcome = handle.outcome if rig._gathered(running, seen) else None
                return outcome is not None and outcome.over and max(list(commits)) >= outcome.last + 2

            rig._until(running, over)
            outcome = handle.wait(_WAIT_S)
            ended = commits[outcome.last]
            rig._flow(running, seen, max(3.0, missing_s(settled_at, asked_at, ended)))
            legs.append({
                "bytes": plan.bytes, "rounds": len(plan.rounds), "state": outcome.state, "seconds": ended - asked_at,
                **stalls_of(list(commits.values()), settled_at, asked_at, ended),
                "parts_ms": seen[outcome.last].parts_ms if outcome.last in seen else {},
                "usual_parts_ms": _usual([f.parts_ms for number, f in seen.items() if number < outcome.began][-12:]),
                "fetched": sum(f.fetched_bytes for number, f in seen.items() if number >= outcome.began),
                "breakdown": breakdown(running, [handle.number]),
            })  # fmt: skip
            rig.step(rig.asked.kills + 3)
        handed = feed.end()
        rig._until(running, partial(rig._has_counted, running, seen, first, handed))
        rig.records += handed
        rig.offset = feed.offset
        running.stop()
    return {"legs": legs, "rate": feed.rate}


def _usual(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each.get(name, 0.0) for each in parts) for name in parts[0]} if parts else {}


def run_spark(asked: Recovery, folder: Path) -> Found:
    """Spark's own count with RocksDB state loses executors, on the same cluster."""
    settings = {
        **state_settings("RocksDBStateStoreProvider"),
        "spark.sql.shuffle.partitions": str(asked.workers),
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        "spark.python.unix.domain.socket.enabled": "false",
    }
    kills = []
    with cluster(asked.workers, folder, settings, asked.network) as spark:
        feed = Feed(spark, asked.rate)
        chunks = -(-asked.state_bytes // (BYTES_PER_KEY * CHUNK * 2)) * 2
        frame = feed.frame(chunks * CHUNK, CHUNK)
        writer = frame.groupBy("k").count().writeStream.outputMode("update").format("noop")
        query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
        for at in range(0, chunks, 2):
            feed.fill(range(at, at + 2))
            until(query, lambda at=at: sum(int(r["numInputRows"]) for r in reports(query)) >= at + 2)
            progress(at, chunks + 8)
        skipped = len(reports(query))
        clock = time.time() - time.monotonic()
        feed.begin()

        def rows() -> list[list[Any]]:
            return commits_of(reports(query)[skipped:], clock + feed.start, feed.per_tick)

        for _ in range(asked.kills):
            flow(query, asked.warm_s)
            until(query, lambda: settled(rows(), feed.rate) and len(executors(spark)) == asked.workers)
            flow(query, asked.hold_s)
            steady = [b[4] - a[4] for a, b in zip(rows()[-8:], rows()[-7:], strict=False)]
            killed, noticed = kill(spark, min(executors(spark)))
            detected = noticed - feed.start
            usual = statistics.median(row[4] - row[3] for row in rows()[-8:])

            def without(row: list[Any], detected: float = detected, usual: float = usual) -> bool:
                return row[4] > detected and (row[4] - row[3] > 2 * usual or row[3] > detected)

            until(query, lambda without=without: any(map(without, rows())))
            after = next(filter(without, rows()))
            before = max(row[4] for row in rows() if row[4] < after[4])
            kills.append({
                "slots": 1, "noticed_s": noticed - killed, "recovery_s": after[4] - detected,
                "stall_s": after[4] - before, "steady_s": max(steady, default=0.0), "attempts": 1, "fetched": 0,
                "parts_ms": {}, "at": killed - feed.start,
            })  # fmt: skip
        feed.end()
        query.stop()
    return {"filled": {"keys": chunks * CHUNK}, "kills": kills, "rate": feed.rate, "epochs": rows()}


def main() -> None:
    """Runs the trial that the first argument describes, in the current directory."""

    def run() -> Found:
        given = json.loads(sys.argv[1])
        if "query" in given:
            return run_nexmark(Reconfiguration(**given), Path.cwd())
        asked = Recovery(**given)
        return (run_spark if asked.variant == "spark" else run_millstream)(asked, Path.cwd())

    serve(run)
