"""Three levels with timers and two outputs, killed from inside or outside; run as a process by test_kills.py.

    python killed_job.py FOLDER MASTER MODE [MOMENT:EPOCH[:stop]]

MODE says what is done to the query, once, at its worst moment:
    plain            nothing; MOMENT:EPOCH names where the driver kills itself (SIGKILL), or with `:stop`, where it
                     and its JVM stop until somebody lets them go on (SIGSTOP)
    worker           a Python worker kills itself on level 2, when level 1 has written its segments
    executor         an executor kills itself on level 2
    mixed            slot 1's executor kills itself on level 1 after slot 0 has consumed its route output, which is made
                     from a source that differs when it is read again
    levels           the same one level down: what is made again is the output of a step that is not deterministic
    strong           as levels, with strong productions
    drain            nothing is killed: one of the two workers is drained
    endless          nothing; the query runs until it is stopped
    jvm              the driver kills its JVM in the middle of an epoch
Whatever is killed, state is moving meanwhile: from the second epoch on, each takes some of slot 0's bins to slot 1.
With a cluster as MASTER there may be several modes, joined by `+`, each with a folder of its own inside FOLDER.
Prints one JSON line with what happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from processes import SINKS, STATES
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

import millstream as ms
from millstream.engine import upkeep
from millstream.engine.driver import Observer
from three_levels import EVENTS, Groups, Scores, three_levels

KILL_AT = tuple(sys.argv[4].split(":")) if len(sys.argv) > 4 else ("", "-1")
MADE_TWICE = ("mixed", "levels", "strong")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def only_once(folder: Path, name: str) -> bool:
    try:
        (folder / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Trap:
    """What happens, once, to the process that runs a computation in epoch 2."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.folder, self.mode = folder, mode

    def step_on(self, epoch: int) -> None:
        if epoch != 2:
            return
        slot = TaskContext.get().partitionId()  # type: ignore[union-attr]
        if self.mode == "worker" and only_once(self.folder, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.mode == "executor" and slot == 1 and only_once(self.folder, "killed"):
            kill_executor()
        if self.mode in MADE_TWICE and slot == 1 and not (self.folder / "killed").exists():
            (self.folder / "waiting").touch()
            wait_for(self.folder / "other-done")
            if only_once(self.folder, "killed"):
                kill_executor()


def kill_executor() -> None:
    os.kill(parent_of(parent_of(os.getpid())), signal.SIGKILL)
    time.sleep(60)


def wait_for(path: Path, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was not there in time"
        time.sleep(0.05)


class TrappedScores(Scores):
    def __init__(self, trap: Trap) -> None:
        self.trap = trap

    def on_record(self, row: Any, at: ms.At) -> Any:
        self.trap.step_on(at.epoch)
        return super().on_record(row, at)


class TrappedGroups(Groups):
    def __init__(self, trap: Trap) -> None:
        self.trap = trap

    def on_batch(self, batch: ms.Batch) -> Any:
        self.trap.step_on(batch.epoch)
        return super().on_batch(batch)


class NoisyScores(Scores):
    """Passes records on with something random: a second run of its task makes another output. Notes every call."""

    output = "g long, k long, v long, noise string"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_record(self, row: Any, at: ms.At) -> Any:
        with (self.folder / "calls").open("a") as calls:
            calls.write(f"{at.epoch}\n")
        for made in super().on_record(row, at):
            yield (*made, uuid.uuid4().hex)


def observe(moment: str, epoch: int) -> None:
    if sys.argv[3] == "endless" and moment == "planned":
        print(f"PLANNED {epoch}", flush=True)
    if (moment, str(epoch)) == KILL_AT[:2]:
        if KILL_AT[2:] == ("stop",):
            os.killpg(0, signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def build(spark: SparkSession, folder: Path, mode: str) -> ms.Query:
    frame = spark.readStream.schema(EVENTS["events"]).option("maxFilesPerTrigger", 2).parquet(str(folder / "in"))
    scores: Any = Scores
    groups: Any = TrappedGroups(Trap(folder, mode))
    if mode == "mixed":
        frame = frame.withColumn("noise", sql.expr("reflect('java.util.UUID', 'randomUUID')"))
        scores, groups = TrappedScores(Trap(folder, mode)), Groups
    elif mode in ("levels", "strong"):
        scores = NoisyScores(folder)
    first = "strong" if mode == "strong" else "weak"
    sinks = [ms.Parquet(str(folder / sink)) for sink in SINKS]
    return three_levels(first, scores_as=scores, groups_as=groups, origin=frame, sinks=sinks)


def run(spark: SparkSession, folder: Path, mode: str, notify: Observer | None = None) -> dict[str, Any]:
    """Runs the query to its end; what it leaves."""
    trigger = None if mode == "endless" else {"availableNow": True}
    query, store = build(spark, folder, mode), str(folder / "store")

    used: set[str] = set()

    def notify_and_move(moment: str, epoch: int) -> None:
        if moment == "committed":
            used.update(ms.connect(store).status().workers)
        if (moment, epoch) == ("committed", 0):
            control = ms.connect(store)
            if mode == "drain":
                plan = control.plan_drain(min(control.status().workers), strategy=ms.Batched(700, merge=False))
            else:
                plan = control.plan_move(slots=0, share=0.75, to=1, strategy=ms.Batched(128, merge=False))
            control.apply(plan)
        if notify is not None:
            notify(moment, epoch)

    running = query.start(spark, store=store, slots=2, trigger=trigger, observe=notify_and_move, replicas=0)
    running.await_termination()
    [move] = running.commands()
    return {
        "workers": running.status().workers,
        "used": sorted(used),
        "moved": (move.state, move.done, move.rounds, move.began),
        "epoch": running.epoch,
        "attempts": {facts.epoch: facts.attempts for facts in running.recent},
        "states": [[list(row) for row in running.state(step, state=state).collect()] for step, state in STATES],
    }


def watch(spark: SparkSession, folder: Path) -> None:
    """While slot 1 waits in its trap: says when Spark has the result of the other slot's task of that stage."""
    wait_for(folder / "waiting", 600)
    tracker, completed = spark.sparkContext.statusTracker(), 0
    while not completed:
        time.sleep(0.05)
        for stage in sorted(tracker.getActiveStageIds())[-1:]:
            info = tracker.getStageInfo(stage)
            completed = info.numCompletedTasks if info is not None else 0
    (folder / "other-done").touch()


def main(folder: Path, master: str, mode: str) -> None:
    upkeep.GARBAGE_EVERY = 3
    settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g", "spark.executor.memory": "700m"}
    settings["spark.executor.extraJavaOptions"] = os.environ.get("SPARK_SUBMIT_OPTS", "")
    spark = ms.session("killed", master=master, settings={**settings, "spark.executor.cores": "1"})
    spark.sparkContext.setLogLevel("OFF")
    jvm = int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]

    def notify(moment: str, epoch: int) -> None:
        if mode == "jvm" and (moment, epoch) == ("planned", 2):
            os.kill(jvm, signal.SIGKILL)
        observe(moment, epoch)

    if not master.startswith("local-cluster"):
        found: Any = run(spark, folder, mode, notify)
    else:
        found = {each: on_cluster(spark, folder / each, each) for each in mode.split("+")}
    print("RESULT " + json.dumps(found), flush=True)
    spark.stop()


def on_cluster(spark: SparkSession, folder: Path, mode: str) -> dict[str, Any]:
    """Runs the query when both executors are there, which they may not be after the last one that was killed."""
    deadline = time.monotonic() + 120
    while spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 3:  # type: ignore[union-attr]
        assert time.monotonic() < deadline, "an executor has not come back"
        time.sleep(0.05)
    if mode in MADE_TWICE:
        threading.Thread(target=watch, args=(spark, folder), daemon=True).start()
    return run(spark, folder, mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
