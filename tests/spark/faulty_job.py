"""A query whose store fails on the k-th operation, for every k; run as a process of its own by test_faults.py.

    python faulty_job.py FOLDER MASTER MODE [ROLE]

The driver and the Python workers are real processes that share the count of operations (faults/sitecustomize.py has
the modes and roles). For each k the query is started on the same store with new input, meets the fault, and ends or
goes on; then state and sink must equal a sequential count of the events of the committed epochs. When a run has fewer
operations than k, one of each kind is hit. In mode `levels` the query has three levels, with timers and two outputs,
the oracle decides, and one of each kind is hit that `ON_LEVELS` lists. Prints one JSON line.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from processes import SINKS, STATES, Left, add_input, arm, check_counts, disarm, epochs_of, events_of, oracle_of
from pyspark.sql import SparkSession

import millstream as ms
from millstream.engine import upkeep
from millstream.engine.state import read_state
from millstream.model.graph import Step, resolve
from millstream.model.types import parse_schema
from millstream.store import journal
from millstream.store.objects import open_store
from three_levels import EVENTS, Event, three_levels

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
    ("refuse", "put", "segments/groups/"),
    ("lose", "put", "productions/final.reminders/"),
    ("lose", "create", "-2.0"),
    ("kill_after", "create", "-2.1"),
    ("kill_after", "put", "segments/final/reminder/"),
]
"""What is done to operations of workers on the second and third level; the second has strong productions."""


class Faulty:
    """The query, its input, and what has become of it."""

    def __init__(self, spark: SparkSession, folder: Path, levels: bool) -> None:
        self.spark, self.folder, self.levels = spark, folder, levels
        self.rng = random.Random(7)

    def run(self) -> None:
        """Runs until all input is read. There is new input only if none was left: the work must not pile up."""
        if len(self.committed()) == len(self.all_events()):
            add_input(self.folder, self.rng, FILES)
        reader = self.spark.readStream.schema(EVENTS["events"]).option("maxFilesPerTrigger", 1)
        build(reader.parquet(str(self.folder / "in")), self.folder, self.levels).start(
            self.spark, store=str(self.folder / "store"), trigger={"availableNow": True}, retain=1
        ).await_termination()

    def check(self, when: str) -> None:
        """State equals that of a sequential run of the events that are committed."""
        found = self.states()
        if self.levels:
            oracle_of(self.epochs()).check_state(Left(found))
        else:
            assert dict(found["count", "total"]) == Counter(k for k, _, _ in self.committed()), when

    def check_everything(self) -> None:
        """All events are committed and delivered."""
        self.check("at the end")
        events, found = self.all_events(), self.states()
        assert len(self.committed()) == len(events)
        if self.levels:
            check_counts(self.folder, {"epoch": len(self.epochs()) - 1, "states": [found[place] for place in STATES]})
        else:
            assert delivered(self.folder) == Counter(k for k, _, _ in events)

    def states(self) -> dict[tuple[str, str], list[list[Any]]]:
        opened, found = self.journal(), {}
        for each in steps(self.levels):
            for name in (state for step, state in (*STATES, ("count", "total")) if step == each.name):
                rows = read_state(opened.store, each, name, opened.history).to_pylist()
                found[each.name, name] = [list(row.values()) for row in rows]
        return found

    def epochs(self) -> list[list[Event]]:
        return epochs_of(self.folder, self.journal().history.epoch)

    def committed(self) -> list[Event]:
        return [event for events in self.epochs() for event in events]

    def all_events(self) -> list[Event]:
        return [event for file in (self.folder / "in").glob("*.parquet") for event in events_of(file)]

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


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "key long, total long"

    def on_batch(self, batch: ms.Batch) -> Any:
        totals = self.total.read(batch) + batch.count()
        self.total.write(batch, totals)
        yield batch.output(batch.keys, totals)


def build(origin: Any, folder: Path, levels: bool) -> ms.Query:
    sinks = [ms.Parquet(str(folder / sink)) for sink in SINKS]
    if levels:
        return three_levels(second="strong", origin=origin, sinks=sinks)
    query = ms.Query("faulty")
    query.source("events", origin).key_by("k").compute("count", Count).sink("out", sinks[0])
    return query


def delivered(folder: Path) -> Counter[int]:
    """The last total of every key in the sink; fails if an epoch is there twice, or out of order."""
    totals: Counter[int] = Counter()
    for file in sorted((folder / "out").glob("*.parquet")):
        epoch = pq.read_table(file).to_pylist()
        assert len({row["key"] for row in epoch}) == len(epoch), "a key was delivered twice in an epoch"
        for row in epoch:
            assert row["total"] > totals[row["key"]], "an epoch was delivered twice, or out of order"
            totals[row["key"]] = row["total"]
    return totals


def steps(levels: bool) -> tuple[Step, ...]:
    query = build(None, Path("unused"), levels)
    return resolve(query, {"events": parse_schema(EVENTS["events"])}).steps


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else "")
