"""One contender, run in a process of its own, which `bench.race` starts.

How it measures
---------------
- The time of an epoch is Spark's own `triggerExecution` for every contender, Millstream included: from the moment a
  micro-batch is constructed until its offsets are committed. The first `warmup` epochs are not counted.
- All run on `local[2]` with two input partitions and two slots, which is two shuffle partitions for Spark. Spark's
  contenders have Spark's default settings otherwise (`transformWithState` does not even work with the unix domain
  sockets that Millstream uses); Millstream's have those of `millstream.session`.
- Spark writes to the `noop` sink in update mode. Millstream without a sink does the same: productions are computed,
  and go nowhere.
- Millstream's answer is checked: the counts in its state add up to the records it was given.

What it prints: lines that begin with a mark, each followed by JSON: progress, and at the end a result or a failure.
It ends when its standard input is closed, so it does not outlive whoever started it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

import millstream as ms
from bench import workloads

PROGRESS, RESULT, FAILED = "@bench-progress ", "@bench-result ", "@bench-failed "
SLOTS = 2
_POLL_S = 0.1
_STATE_STORES = "org.apache.spark.sql.execution.streaming.state."


@dataclass(frozen=True, slots=True)
class Contender:
    """What to run and on how much. `kind` is a function of `KINDS`, here or in `bench.model_contenders`."""

    name: str
    label: str
    kind: str
    rows: int
    keys: int
    warmup: int
    epochs: int
    bins: int = 1 << 12
    parquet: bool = False
    preload_rows: int = 0
    """Records per epoch while state is filled with `keys` keys (state size), or up to `state_bytes` (memory)."""
    state_bytes: int = 0


Found = dict[str, Any]
"""What a contender reports: `epochs`, the measured ones in order, and whatever facts belong to it."""


# -- Spark's own ------------------------------------------------------------------------------------------------------


def spark_session(folder: Path, **settings: str) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").appName("bench")
    for key, value in {**shared_settings(folder), **settings}.items():
        builder = builder.config(key, value)
    return _quiet(builder.getOrCreate())


def millstream_session(folder: Path) -> SparkSession:
    return _quiet(ms.session("bench", master="local[2]", settings=shared_settings(folder)))


def shared_settings(folder: Path) -> dict[str, str]:
    return {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "4g",
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={folder} -XX:-UsePerfData",
        "spark.sql.shuffle.partitions": str(SLOTS),
        "spark.sql.streaming.numRecentProgressUpdates": "100000",
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }


def _quiet(spark: SparkSession) -> SparkSession:
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _spark_counts(asked: Contender, folder: Path, provider: str) -> Found:
    spark = spark_session(folder, **state_settings(provider))
    counted = workloads.records(spark, asked.rows, asked.keys).groupBy("k").count()
    return run_spark(asked, folder, counted)


def _spark_rows(asked: Contender, folder: Path) -> Found:
    spark = spark_session(folder, **state_settings("RocksDBStateStoreProvider"))
    grouped = workloads.records(spark, asked.rows, asked.keys).groupBy("k")
    counted = grouped.transformWithState(workloads.CountRows(), workloads.COUNTED, "Update", "None")
    return run_spark(asked, folder, counted)


def state_settings(provider: str) -> dict[str, str]:
    return {
        "spark.sql.streaming.stateStore.providerClass": _STATE_STORES + provider,
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    }


def _spark_map(asked: Contender, folder: Path) -> Found:
    passed = workloads.records(spark_session(folder), asked.rows, asked.keys)
    return run_spark(asked, folder, passed.mapInArrow(workloads.pass_through, passed.schema), mode="append")


def _spark_map_drop(asked: Contender, folder: Path) -> Found:
    passed = workloads.records(millstream_session(folder), asked.rows, asked.keys)
    return run_spark(asked, folder, passed.mapInArrow(workloads.drop, passed.schema), mode="append")


def run_spark(asked: Contender, folder: Path, frame: DataFrame, mode: str = "update") -> Found:
    writer = frame.writeStream.outputMode(mode).format("noop")
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start()
    wanted = asked.warmup + asked.epochs
    while _last_batch(query) < wanted - 1:
        if not query.isActive:
            raise RuntimeError(f"Spark ended the query: {query.exception()}")
        progress(_last_batch(query) + 1, wanted)
        time.sleep(_POLL_S)
    epochs = _epochs_of(query)
    query.stop()
    return {"epochs": epochs[asked.warmup : wanted]}


def _last_batch(query: StreamingQuery) -> int:
    last = query.lastProgress
    return -1 if last is None else int(last["batchId"])


def _epochs_of(query: StreamingQuery) -> list[Found]:
    """The epochs that read records, in order: what Spark says of each."""
    found = []
    for progress in query.recentProgress:
        rows = sum(s["numInputRows"] for s in progress["sources"] if "RatePerMicroBatch" in s["description"])
        if rows:
            spent = {name: int(ms_) for name, ms_ in progress["durationMs"].items()}
            found.append({"epoch": progress["batchId"], "rows": rows, "ms": spent["triggerExecution"], "spark": spent})
    return found


# -- Millstream -------------------------------------------------------------------------------------------------------


Build = Callable[[ms.Query], Any]
"""Adds everything to a query."""


def _counting(asked: Contender, frame: DataFrame, step: Any, folder: Path) -> Build:
    def build(query: ms.Query) -> None:
        counted = query.source("records", frame).key_by("k").compute("count", step)
        if asked.parquet:
            counted.sink("out", ms.Parquet(str(folder / "out")))

    return build


class Measured:
    """A Millstream query that is being measured: epochs as Spark times them, with what Millstream knows of them."""

    def __init__(self, asked: Contender, spark: SparkSession, build: Build, folder: Path) -> None:
        query = ms.Query("bench")
        build(query)
        self.running = query.start(spark, str(folder / "store"), slots=SLOTS, bins=asked.bins)
        self.first = self.running.epoch + 1
        """The first epoch of this run: a store that was filled before goes on counting."""
        [self._query] = [active for active in spark.streams.active if active.name == "bench"]
        self._compactions: dict[int, int] = {}

    def wait(self, epochs: int, each: Callable[[], bool] | None = None) -> None:
        """Waits until this run has committed and delivered `epochs` epochs, or `each` says that it is enough."""
        while (last := _last_batch(self._query)) < self.first + epochs - 1:
            if not self.running.active:
                self.running.await_termination()  # raises what ended it
                raise RuntimeError("the query ended by itself")
            self._compactions.setdefault(self.running.epoch, self.running.status().compactions)
            progress(max(0, last - self.first + 1), epochs)
            if each is not None and each():
                break
            time.sleep(_POLL_S)

    def stop(self) -> list[Found]:
        """Stops, and gives all epochs of this run, in order."""
        self.status = self.running.status()
        epochs = _epochs_of(self._query)
        self.running.stop()
        facts = {item.epoch: dataclasses.asdict(item) for item in self.running.recent}
        before = 0
        for epoch in epochs:
            epoch["millstream"] = facts.get(epoch["epoch"], {})
            after = self._compactions.get(epoch["epoch"], before)
            epoch["compactions"] = after - before  # how many were seen to end by then
            before = after
        return [epoch for epoch in epochs if epoch["epoch"] >= self.first]

    def facts(self) -> Found:
        """What the state looked like when the run was stopped."""
        return {
            "state_bytes": self.status.state_bytes,
            "segments": self.status.segments,
            "compactions": self.status.compactions,
            "upkeep_trouble": self.status.upkeep_trouble,
        }


def _millstream_counts(asked: Contender, folder: Path, step: Any) -> Found:
    spark = millstream_session(folder)
    frame = workloads.records(spark, asked.rows, asked.keys)
    run, found = measured(asked, spark, _counting(asked, frame, step, folder), folder)
    _check_counts(run, asked.rows)
    return found


def measured(asked: Contender, spark: SparkSession, build: Build, folder: Path) -> tuple[Measured, Found]:
    """Runs a query for as many epochs as are asked for."""
    run = Measured(asked, spark, build, folder)
    wanted = asked.warmup + asked.epochs
    run.wait(wanted)
    epochs = run.stop()
    return run, {"epochs": epochs[asked.warmup : wanted], "warmup": epochs[: asked.warmup], **run.facts()}


def _check_counts(run: Measured, rows: int) -> None:
    total = run.running.state("count").agg({"total": "sum"}).collect()[0][0]
    expected = (run.running.epoch + 1) * rows
    if total != expected:
        raise RuntimeError(f"wrong answer: the counts add up to {total}, {expected} records were read")


def _millstream_state(asked: Contender, folder: Path) -> Found:
    """Fills the state with `keys` keys in large epochs, then reads and writes keys of it at random in small ones."""
    spark = millstream_session(folder)
    preload = -(-asked.keys // asked.preload_rows)
    rows = asked.keys // preload
    fresh = workloads.new_keys(spark, rows).where(f"k < {rows * preload}")  # what comes until it has stopped adds none
    filling = Measured(asked, spark, _counting(asked, fresh, workloads.CountBatch, folder), folder)
    filling.wait(preload)
    filled = filling.stop()
    frame = workloads.records(spark, asked.rows, rows * preload)
    _, found = measured(asked, spark, _counting(asked, frame, workloads.CountBatch, folder), folder)
    return {**found, "preload": filled[:preload]}


def _millstream_memory(asked: Contender, folder: Path) -> Found:
    """Fills the state up to a number of bytes, starts new workers, and watches them during small epochs."""
    body, free, needed = 100, shutil.disk_usage(folder).free, 4 * asked.state_bytes
    if free < needed:
        raise RuntimeError(f"{free >> 20} MiB free on disk, expected {needed >> 20}: four times the state")
    spark = millstream_session(folder)
    frame = workloads.with_body(workloads.new_keys(spark, asked.preload_rows), body)
    filling = Measured(asked, spark, _counting(asked, frame, workloads.LatestBody, folder), folder)
    most = 2 * -(-asked.state_bytes // (asked.preload_rows * (body + 20)))  # a bound, should state never get so large
    filling.wait(most, lambda: filling.running.status().state_bytes >= asked.state_bytes)
    filled = filling.stop()
    if filling.status.state_bytes < asked.state_bytes:
        raise RuntimeError(f"state grew to {filling.status.state_bytes} bytes only, of {asked.state_bytes}")
    spark.stop()  # its workers end with it: what they held while filling is not measured
    spark = millstream_session(folder)
    frame = workloads.with_body(workloads.records(spark, asked.rows, asked.preload_rows * len(filled)), body)
    run = Measured(asked, spark, _counting(asked, frame, workloads.LatestBody, folder), folder)
    samples: list[int] = []
    run.wait(asked.warmup)

    def sample() -> bool:
        private = list(worker_memory(os.getpid()))
        if private:
            samples.append(max(private))
        return False

    run.wait(asked.warmup + asked.epochs, sample)
    epochs = run.stop()
    if not samples:
        raise RuntimeError("no Python worker was seen below this process; the memory of workers needs Linux's /proc")
    return {
        "epochs": epochs[asked.warmup : asked.warmup + asked.epochs],
        "private_peak_bytes": max(samples),
        "private_median_bytes": int(statistics.median(samples)),
        "private_samples": samples,
        "filled_bytes": filling.status.state_bytes,
        **run.facts(),
    }


def worker_memory(ancestor: int) -> Iterator[int]:
    """The private memory (RssAnon, in bytes) of every Python worker below a process: a child of Spark's daemon, or of
    Millstream's."""
    parents: dict[int, int] = {}
    daemons: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if any(word.endswith(b".daemon") for word in (entry / "cmdline").read_bytes().split(b"\0")):
                    daemons.add(int(entry.name))
            except (OSError, IndexError):
                continue  # it has just ended
    for pid in daemons:
        if parents[pid] in daemons and ancestor in _ancestors(pid, parents):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            for line in status.splitlines():
                if line.startswith("RssAnon:"):
                    yield int(line.split()[1]) * 1024


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while pid in parents:
        pid = parents[pid]
        yield pid


# -- the process ------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Contender, Path], Found]] = {
    "spark-rocksdb": lambda asked, folder: _spark_counts(asked, folder, "RocksDBStateStoreProvider"),
    "spark-hdfs": lambda asked, folder: _spark_counts(asked, folder, "HDFSBackedStateStoreProvider"),
    "spark-rows": _spark_rows,
    "spark-map": _spark_map,
    "spark-map-drop": _spark_map_drop,
    "millstream-batch": lambda asked, folder: _millstream_counts(asked, folder, workloads.CountBatch),
    "millstream-batch-out": lambda asked, folder: _millstream_counts(asked, folder, workloads.CountBatchOut),
    "millstream-record": lambda asked, folder: _millstream_counts(asked, folder, workloads.CountRecord),
    "millstream-state": _millstream_state,
    "millstream-memory": _millstream_memory,
}

_shown = (-1, -1)


def progress(done: int, of: int) -> None:
    global _shown
    if (done, of) != _shown:
        _shown = (done, of)
        _say(PROGRESS, {"done": done, "of": of})


def _say(mark: str, what: Found) -> None:
    print(mark + json.dumps(what), flush=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


def main() -> None:
    """Runs the contender that the first argument describes, in the current directory."""
    asked = Contender(**json.loads(sys.argv[1]))

    def run() -> Found:
        from bench.model_contenders import MODEL_KINDS  # it is made of what is here

        return {**KINDS, **MODEL_KINDS}[asked.kind](asked, Path.cwd())

    serve(run)


def serve(run: Callable[[], Found]) -> None:
    """Runs something, says what came of it, and ends the process; also when whoever started it is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        found = run()
    except BaseException as error:
        traceback.print_exc()
        _say(FAILED, {"reason": f"{type(error).__name__}: {error}"[:6000]})
        os._exit(1)
    _say(RESULT, found)
    os._exit(0)  # nothing to wait for: the JVM ends with our end of its pipe
