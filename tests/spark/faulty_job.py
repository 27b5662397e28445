"""A query whose store fails on the k-th operation, for every k; run as a process of its own by test_faults.py.

    python faulty_job.py FOLDER MASTER MODE [ROLE]

The driver and the Python workers are real processes that share the count of operations (faults/sitecustomize.py has
the modes and roles). For each k the query is started on the same store with new input, meets the fault, and ends or
goes on; then state and sink must equal a sequential count of the files up to the offset of the last committed epoch.
When a run has fewer operations than k, one of each kind is hit. In mode `levels` the query has three levels, with
timers and two outputs, and one of each kind is hit that `ON_LEVELS` lists. Prints one JSON line.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from killed_job import Bells, Count
from processes import add_input, arm, delivered, disarm
from pyspark.sql import SparkSession

import millstream as ms
from millstream.engine import upkeep
from millstream.engine.state import read_state
from millstream.model.graph import Step, resolve
from millstream.store import journal
from millstream.store.objects import open_store

FILES = 2
KINDS = [
    ("driver", "list", "journal/"),
    ("driver", "create", "journal/"),
    ("driver", "put", "snapshots/"),
    ("driver", "create", "epoch-"),
    ("driver", "create", "_manifest/"),
    ("driver", "delete", "segments/"),
    ("worker", "put", "segments/"),
    ("worker", "put", "productions/"),
]


ON_LEVELS = [
    ("refuse", "put", "segments/second/"),
    ("lose", "put", "productions/third.even/"),
    ("lose", "create", "-2.0"),
    ("kill_after", "create", "-2.1"),
    ("kill_after", "put", "segments/third/bell/"),
]
"""What is done to operations of workers on the second and third level; the second has strong productions."""


class Faulty:
    """The query, its input, and what has become of it."""

    def __init__(self, spark: SparkSession, folder: Path, levels: bool) -> None:
        self.spark, self.folder, self.levels = spark, folder, levels
        self.rng = random.Random(7)
        self.files: list[Counter[str]] = []

    def run(self) -> None:
        """Runs until all input is read. There is new input only if none was left: the work must not pile up."""
        if self.committed() == len(self.files):
            for _ in range(FILES):
                self.files.append(Counter())
                add_input(self.folder, self.rng, 1, self.files[-1])
        reader = self.spark.readStream.schema("key long").option("maxFilesPerTrigger", 1)
        build(reader.parquet(str(self.folder / "in")), self.folder, self.levels).start(
            self.spark, store=str(self.folder / "store"), trigger={"availableNow": True}, retain=1
        ).await_termination()

    def check(self, when: str) -> None:
        """The state of every step equals the count of the files that are committed."""
        opened = self.journal()
        expected = sum(self.files[: self.committed()], Counter())
        for each in steps(self.levels):
            found = read_state(opened.store, each, "total", opened.history).to_pylist()
            assert {str(row["key"]): row["total"] for row in found} == dict(expected), f"{when}: {each.name}"

    def check_everything(self) -> None:
        """All files are committed and delivered."""
        assert self.committed() == len(self.files)
        self.check("at the end")
        assert delivered(self.folder) == sum(self.files, Counter())

    def committed(self) -> int:
        """How many files Spark had read with the last commit. Not one per epoch: some are of the ticker alone."""
        epoch = self.journal().history.epoch
        if epoch < 0:
            return 0
        offsets = (self.folder / "store" / "spark-checkpoint" / "offsets" / str(epoch)).read_text()
        [offset] = re.findall(r'"logOffset":(\d+)', offsets)
        return int(offset) + 1

    def journal(self) -> journal.Journal:
        return journal.Journal.open(open_store(str(self.folder / "store")))

    def meet(self, fault: dict[str, Any]) -> str:
        """Runs with a fault, and checks; which operation it hit, and what came of it."""
        arm(self.folder, **fault)
        try:
            self.run()
            outcome = "went on"
        except ms.UserError as error:
            if "injected" not in str(error) and "kill" not in fault["mode"]:
                raise
            outcome = "stopped"
        fired = disarm(self.folder)
        hit = f"{fired.rsplit(' ', 1)[0]}: {outcome}" if fired else ""
        print(fault, hit, flush=True)
        self.check(f"{fault}: {hit}")
        return hit


def main(folder: Path, master: str, mode: str, role: str) -> None:
    upkeep.GARBAGE_EVERY, journal.SNAPSHOT_EVERY, journal.KEEP_S = 3, 4, 0.0  # so that they come often
    settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}
    spark = ms.session("faulty", master=master, settings=settings)
    spark.sparkContext.setLogLevel("OFF")
    levels = mode == "levels"
    faulty, hits = Faulty(spark, folder, levels), []
    kinds = [(mode, *kind) for kind in KINDS]
    if levels:
        kinds = [(how, "worker", operation, match) for how, operation, match in ON_LEVELS]
    else:
        while hit := faulty.meet({"at": len(hits) + 1, "mode": mode, **({"role": role} if role else {})}):
            hits.append(hit)
    for how, actor, operation, match in kinds:  # which ones the k-th were depends on where epochs fell
        if role in ("", actor):
            fault = {"at": 1, "mode": how, "role": actor, "operations": [operation], "match": match}
            hits.append(next(filter(None, (faulty.meet(fault) for _ in range(8)))))
    faulty.meet({"at": 0, "mode": mode})
    faulty.check_everything()
    print("RESULT " + json.dumps(hits), flush=True)
    spark.stop()


class Pass(ms.Computation):
    """Counts the records of each key, and passes them on."""

    total = ms.Value("long", default=0)
    output = "key long"

    def on_batch(self, batch: ms.Batch) -> Any:
        self.total.write(batch, self.total.read(batch) + batch.count())
        yield batch.output(batch.column("key"))


def build(origin: Any, folder: Path, levels: bool) -> ms.Query:
    query = ms.Query("faulty")
    events, out = query.source("events", origin).key_by("key"), ms.Parquet(str(folder / "out"))
    if not levels:
        events.compute("count", Count).sink("out", out)
        return query
    second = events.compute("first", Pass).key_by("key").compute("second", Pass, productions="strong")
    third = second.key_by("key").compute("third", Bells)
    third.sink("out", out)
    third.output("even").sink("even_out", ms.Parquet(str(folder / "even")))
    return query


def steps(levels: bool) -> tuple[Step, ...]:
    query = build(None, Path("unused"), levels)
    return resolve(query, {"events": pa.schema([("key", pa.int64())])}).steps


def step() -> Step:
    return steps(levels=False)[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else "")
