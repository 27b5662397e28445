"""Workers that leave a running query, one announced by Spark and one by a drain; run as a process by test_leaving.py.

    python leaving_job.py FOLDER MASTER MODE

Prints one JSON line with what happened.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import SINKS, STATES, add_input
from pyspark.sql import SparkSession

import millstream as ms
from three_levels import EVENTS, three_levels


def tasks_of(spark: SparkSession) -> dict[str, int]:
    """How many tasks each executor has been given so far."""
    summaries: Any = spark.sparkContext._jsc.sc().statusStore().executorList(True)  # type: ignore[union-attr]
    return {summaries.apply(i).id(): summaries.apply(i).totalTasks() for i in range(summaries.size())}


def announce(spark: SparkSession, worker: str) -> None:
    """What a cluster manager does before it takes an executor away."""
    jvm: Any = spark.sparkContext._jvm
    info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo("spot instance", jvm.scala.Option.apply(None))
    backend: Any = spark.sparkContext._jsc.sc().schedulerBackend()  # type: ignore[union-attr]
    assert backend.decommissionExecutor(worker, info, False, False)


def until(running: ms.RunningQuery, over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not over():
        assert running.active, running.await_termination()
        assert time.monotonic() < deadline, running.status()
        time.sleep(0.05)


def main(folder: Path, master: str) -> None:
    settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g", "spark.executor.memory": "600m"}
    settings["spark.executor.extraJavaOptions"] = os.environ.get("SPARK_SUBMIT_OPTS", "")
    settings["spark.ui.liveUpdate.period"] = "0"  # or else the number of tasks may be that of a while ago
    spark = ms.session("leaving", master=master, settings={**settings, "spark.executor.cores": "1"})
    spark.sparkContext.setLogLevel("OFF")
    rng = random.Random(1)
    add_input(folder, rng, files=4)
    frame = spark.readStream.schema(EVENTS["events"]).option("maxFilesPerTrigger", 2).parquet(str(folder / "in"))
    query = three_levels("weak", origin=frame, sinks=[ms.Parquet(str(folder / sink)) for sink in SINKS])
    running = query.start(spark, str(folder / "store"), slots=3)
    until(running, lambda: len(running.status().workers) == 3)
    announced, drained, last = sorted(running.status().workers)
    announce(spark, announced)
    add_input(folder, rng, files=2)
    until(running, lambda: announced not in running.status().workers)
    outcome = running.apply(running.plan_drain(drained, strategy=ms.Batched(512, merge=False))).wait(120)
    time.sleep(1)  # for what Spark notes of tasks that have ended
    given, epoch = tasks_of(spark), running.epoch
    add_input(folder, rng, files=4)
    running.wait_epoch(epoch + 4, timeout=120)
    after = tasks_of(spark)
    running.stop()
    told = {
        "outcome": (outcome.state, outcome.drains == drained, outcome.empty_ms > 0),
        "workers": list(running.status().workers) == [last],
        "tasks": {name: after[worker] - given[worker] for name, worker in
                  (("announced", announced), ("drained", drained), ("last", last))},
        "epoch": running.epoch,
        "states": [[list(row) for row in running.state(step, state=state).collect()] for step, state in STATES],
    }  # fmt: skip
    print("RESULT " + json.dumps(told, default=str), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
