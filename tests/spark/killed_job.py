"""A query that is killed from inside or outside; run as a process of its own by test_kills.py.

    python killed_job.py FOLDER MASTER MODE [MOMENT:EPOCH[:stop]]

MODE says what the computation does, once, at its worst moment:
    plain            nothing; MOMENT:EPOCH names where the driver kills itself (SIGKILL), or with `:stop`, where it
                     and its JVM stop until somebody lets them go on (SIGSTOP)
    worker           the Python worker kills itself after the first step has written its segments
    executor         the executor kills itself in the middle of an epoch
    levels           as mixed, one level down: what is made again is the output of a step that is not deterministic; a
                     third level has timers and two outputs
    strong           as levels, with strong productions
    mixed            slot 1's executor kills itself after slot 0 has consumed its route output, which is made from a
                     source that differs when it is read again
    endless          nothing; the query runs until it is stopped
    jvm              the driver kills its JVM in the middle of an epoch
Prints one JSON line with what happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

import millstream as ms
from millstream.engine import upkeep
from millstream.engine.driver import Observer

KILL_AT = tuple(sys.argv[4].split(":")) if len(sys.argv) > 4 else ("", "-1")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def only_once(folder: Path, name: str) -> bool:
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "key long, total long"

    def on_batch(self, batch: ms.Batch) -> Any:
        totals = self.total.read(batch) + batch.count()
        self.total.write(batch, totals)
        yield batch.output(batch.keys, totals)


class Noise(ms.Computation):
    """Passes records on with something random: a second run of its task makes another output."""

    output = "key long, noise string"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_batch(self, batch: ms.Batch) -> Any:
        with (self.folder / "noise-calls").open("a") as calls:
            calls.write(f"{batch.epoch} {TaskContext.get().partitionId()}\n")  # type: ignore[union-attr]
        keys = batch.column("key")
        yield batch.output(keys, [uuid.uuid4().hex for _ in range(len(keys))])


class Trap(ms.Computation):
    """Runs after `Count` in the same task, or in mode `levels` a level below `Noise`. Passes records on."""

    total = ms.Value("long", default=0)
    output = "key long"

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.mode = folder, mode

    def on_batch(self, batch: ms.Batch) -> Any:
        slot = TaskContext.get().partitionId()  # type: ignore[union-attr]
        if batch.epoch == 2 and self.mode == "worker" and only_once(self.folder, "worker-killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if batch.epoch == 2 and self.mode == "executor" and slot == 1 and only_once(self.folder, "executor-killed"):
            self.kill_executor()
        if (
            batch.epoch == 2
            and self.mode in ("mixed", "levels", "strong")
            and slot == 1
            and not (self.folder / "mixed-killed").exists()
        ):
            deadline = time.monotonic() + 60
            while not (self.folder / "slot-0-done").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(1.0)  # slot 0 has handed its result to Spark by then, or Spark would run it again
            if only_once(self.folder, "mixed-killed"):
                self.kill_executor()
        self.total.write(batch, self.total.read(batch) + batch.count())
        if batch.epoch == 2 and slot == 0:
            (self.folder / "slot-0-done").touch()
        yield batch.output(batch.column("key"))

    def kill_executor(self) -> None:
        executor = parent_of(parent_of(os.getpid()))
        os.kill(executor, signal.SIGKILL)
        time.sleep(60)


class Bells(ms.Computation):
    """Counts records when a timer fires, once for each key and epoch, and sends the even totals elsewhere too."""

    waiting = ms.Value("long", default=0)
    total = ms.Value("long", default=0)
    bell = ms.Timer(ms.WALL_TIME)
    output = "key long, total long"
    outputs: ClassVar = {"even": "key long, total long"}

    def on_record(self, row: Any, at: ms.At) -> None:
        self.waiting.set(self.waiting.get() + 1)
        self.bell.set(timedelta(0))

    @bell.fires
    def ring(self, at: ms.At) -> Any:
        self.total.set(self.total.get() + self.waiting.get())
        self.waiting.delete()
        yield at.key, self.total.get()
        if self.total.get() % 2 == 0:
            yield ms.to("even", at.key, self.total.get())


def observe(moment: str, epoch: int) -> None:
    if sys.argv[3] == "endless" and moment == "planned":
        print(f"PLANNED {epoch}", flush=True)
    if (moment, str(epoch)) == KILL_AT[:2]:
        if KILL_AT[2:] == ("stop",):
            os.killpg(0, signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def build(spark: SparkSession, folder: Path, mode: str) -> ms.Query:
    frame = spark.readStream.schema("key long").option("maxFilesPerTrigger", 2).parquet(str(folder / "in"))
    if mode == "mixed":
        frame = frame.withColumn("noise", sql.expr("reflect('java.util.UUID', 'randomUUID')"))
    query = ms.Query("killed")
    events = query.source("events", frame)
    events.key_by("key").compute("count", Count).sink("out", ms.Parquet(str(folder / "out")))
    if mode in ("levels", "strong"):
        productions = "strong" if mode == "strong" else "weak"
        events = events.key_by("key").compute("noise", Noise(folder), productions=productions)
    trap = events.key_by("key").compute("trap", Trap(folder, mode))
    if mode in ("levels", "strong"):
        bells = trap.key_by("key").compute("bells", Bells)
        bells.sink("bells_out", ms.Parquet(str(folder / "bells" / "out")))
        bells.output("even").sink("even_out", ms.Parquet(str(folder / "even" / "out")))
    return query


def run(spark: SparkSession, folder: Path, mode: str, notify: Observer | None = None) -> dict[str, Any]:
    """Runs the query to its end; what it leaves."""
    trigger = None if mode == "endless" else {"availableNow": True}
    query = build(spark, folder, mode)
    running = query.start(spark, store=str(folder / "store"), slots=2, trigger=trigger, observe=notify)
    running.await_termination()
    return {
        "epoch": running.epoch,
        "attempts": {facts.epoch: facts.attempts for facts in running.recent},
        "state": {str(r[0]): r[1] for r in running.state("count").collect()},
        "trap": {str(r[0]): r[1] for r in running.state("trap").collect()},
        "bells": {str(r[0]): r[1] for r in running.state("bells", state="total").collect()}
        if "bells" in query.steps
        else None,
    }


def main(folder: Path, master: str, mode: str) -> None:
    upkeep.GARBAGE_EVERY = 3
    settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g", "spark.executor.memory": "700m"}
    spark = ms.session("killed", master=master, settings={**settings, "spark.executor.cores": "1"})
    spark.sparkContext.setLogLevel("OFF")
    jvm = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]

    def notify(moment: str, epoch: int) -> None:
        if mode == "jvm" and (moment, epoch) == ("planned", 2):
            os.kill(jvm, signal.SIGKILL)
        observe(moment, epoch)

    print("RESULT " + json.dumps(run(spark, folder, mode, notify)), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
