"""A query whose graph changes, with the driver or an executor killed at a state of the change; run as a process by
test_modified_killed.py.

    python modified_job.py FOLDER MASTER MODE

MODE is `plain`, `driver:STATE` or `executor:STATE`; several for executors, joined by `+`, each with a folder of its own
inside FOLDER. STATE is one of the life of a modification: `proposed`, `validated`, `prepared`; then `planned`,
`executed` and `committed` of its first epoch.

The change gives the step other code, and another type to its state, and brings a second source. Each record goes to the
sink once, with the name of the code that it met. The change is asked for once, by whoever starts the query first.
Prints one JSON line with what happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from millstream.engine.modifying import Modifier

FILES = 12
ROWS = 40
MORE = 1_000_000
"""From where on the numbers of the second source count, which has as many."""


class Old(ms.Computation):
    count = ms.Value("long", default=0)
    output = "n long, met string, count long"
    met = "old"

    def on_record(self, row: Any, at: ms.At) -> Any:
        self.count.set(self.count.get() + 1)
        yield row.n, self.met, self.count.get()


class New(Old):
    count = ms.Value("double", default=0.0)
    met = "new"

    def on_record(self, row: Any, at: ms.At) -> Any:
        self.count.set(self.count.get() + 1)
        yield row.n, self.met, int(self.count.get())


class Numbers:
    """Reads a folder, a file in each epoch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, read: Any) -> Any:
        return read.schema("n long").option("maxFilesPerTrigger", 1).parquet(self.folder).selectExpr("n", "n % 7 AS k")


def same(batch: Any) -> Any:
    return batch


def executors() -> Iterator[int]:
    """The processes of this job's executors."""
    group = os.getpgid(0)
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            command = (path / "cmdline").read_bytes()
            if b"CoarseGrainedExecutorBackend" in command and os.getpgid(int(path.name)) == group:
                yield int(path.name)
        except OSError:  # it has ended meanwhile
            continue


class Killer:
    """Kills something, once, at a state of the change."""

    def __init__(self, state: str, kill: Callable[[], None]) -> None:
        self.state, self.kill, self.done, self.first = state, kill, False, -1
        note = Modifier._note

        def noted(modifier: Any, number: int, before: Any, candidate: Any, version: Any = None) -> None:
            note(modifier, number, before, candidate, version)
            self.reach(candidate.state)

        Modifier._note = noted  # type: ignore[method-assign]

    def reach(self, state: str) -> None:
        if state == self.state and not self.done:
            self.done = True
            self.kill()


def run(spark: SparkSession, folder: Path, killer: Killer) -> dict[str, Any]:
    for name, first in (("in", 0), ("more", MORE)):
        feed = Feed(folder / name, "n long")
        while feed.count < FILES:
            feed.add([(first + feed.count * ROWS + place,) for place in range(ROWS)])
    query = ms.Query("modified")
    numbers = query.source("numbers", Numbers(str(folder / "in")))
    numbers.key_by("k").compute("count", Old).sink("out", ms.Parquet(str(folder / "out")))
    store = str(folder / "store")
    control: Any = None

    def observe(moment: str, epoch: int) -> None:
        nonlocal control
        if (moment, epoch) == ("committed", 1) and control is None:
            control = ms.connect(store)
            if not control.history():
                with control.modify(wait=False) as change:
                    change.replace("count", New, state={"count": ms.carry("double")})
                    change.source("more", Numbers(str(folder / "more")))
                    change.insert("both", map=same, output="n long, k long", after=["numbers", "more"], before="count")
                killer.reach("proposed")
        plan = running_driver[0].journal.history.plan if running_driver else None
        applied = running_driver[0].journal.history.modified if running_driver else ()
        if moment in ("planned", "executed") and plan is not None and plan.changed is not None:
            killer.reach(moment)
        if moment == "committed" and applied and applied[-1].epoch == epoch:
            killer.reach("committed")

    running_driver: list[Any] = []
    running = query.start(spark, store, slots=2, observe=observe, trigger={"processingTime": "200 milliseconds"})
    running_driver.append(running._driver)
    deadline = time.monotonic() + 180
    while sum(_read(folder)[0].values()) < 2 * FILES * ROWS or not is_over(running.history()):
        assert running.active, running.await_termination()
        assert time.monotonic() < deadline, (running.history(), running.status())
        time.sleep(0.1)
    running.stop()
    [past] = running.history()
    met, by_epoch = _read(folder)
    return {
        "state": past.state,
        "reason": past.reason,
        "epoch": past.first,
        "killed": killer.done,
        "records": met,
        "epochs": by_epoch,
        "counts": [row["count"] for row in running.state("count", state="count").collect()],
    }


def _read(folder: Path) -> tuple[dict[str, int], dict[int, dict[str, int]]]:
    """How often each record is in the sink, and what the records of each epoch have met."""
    import pyarrow.parquet as pq

    records: dict[str, int] = {}
    epochs: dict[int, dict[str, int]] = {}
    for path in sorted((folder / "out").glob("epoch-*.parquet")):
        met = epochs.setdefault(int(path.stem.removeprefix("epoch-")), {})
        for row in pq.read_table(path).to_pylist():
            records[str(row["n"])] = records.get(str(row["n"]), 0) + 1
            met[row["met"]] = met.get(row["met"], 0) + 1
    return records, epochs


def is_over(pasts: Any) -> bool:
    return bool(pasts) and pasts[0].state in ("committed", "aborted", "rolled back")


def kill_executor() -> None:
    os.kill(next(executors()), signal.SIGKILL)


def main(folder: Path, master: str, mode: str) -> None:
    settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g", "spark.executor.memory": "700m"}
    settings["spark.executor.extraJavaOptions"] = os.environ.get("SPARK_SUBMIT_OPTS", "")
    spark = ms.session("modified", master=master, settings={**settings, "spark.executor.cores": "1"})
    spark.sparkContext.setLogLevel("OFF")
    if not master.startswith("local-cluster"):
        state = mode.partition(":")[2]
        found: Any = run(spark, folder, Killer(state, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    else:
        found = {}
        for each in mode.split("+"):
            deadline = time.monotonic() + 120
            while spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() < 3:  # type: ignore[union-attr]
                assert time.monotonic() < deadline, "an executor has not come back"
                time.sleep(0.05)
            state = each.partition(":")[2]
            found[state] = run(spark, folder / state, Killer(state, kill_executor))
    print("RESULT " + json.dumps(found), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
