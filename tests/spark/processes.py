"""Jobs as processes of their own: their input, running them, arming faults in them, and checking what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.protocol.epochs import Abort
from millstream.store.journal import decode_entry
from millstream.store.objects import open_store
from three_levels import GROUPS, Event, Oracle
from timers import at

HERE = Path(__file__).parent
JOB = HERE / "killed_job.py"
TYPES = (pa.int64(), pa.timestamp("us", "UTC"), pa.int64())
SINKS = ("out", "reminders")
STATES = (("scores", "total"), ("groups", "grand"), ("final", "latest"), ("final", "closes"))


def add_input(folder: Path, rng: random.Random, files: int, keys: int = 50, events: int = 60) -> None:
    """Adds files of events to a job's input, some seconds after those before.

    A file has no key in common with the one before or after it, with which it may share an epoch, and all its events
    of a key are of one time: so it does not matter in which order Spark takes the two. It may take any two neighbours
    together, because a stream that runs may look while only some of the files are there.
    """
    (folder / "in").mkdir(parents=True, exist_ok=True)
    first = len(list((folder / "in").glob("*.parquet")))
    for number in range(first, first + files):
        pair, chosen = number // 2, rng.sample(range(number % 2, keys, 2), keys // 3)
        rows = [(k, at(7 * pair - (5 * k + pair) % 12), rng.randrange(1, 9)) for k in rng.choices(chosen, k=events)]
        staged = folder / "in" / f".{number}"
        columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), TYPES, strict=True)]
        pq.write_table(pa.table(columns, ["k", "ts", "v"]), staged)
        os.utime(staged, (1_700_000_000 + number, 1_700_000_000 + number))
        staged.rename(folder / "in" / f"{number:06d}.parquet")


def events_of(file: Path) -> list[Event]:
    return [(row["k"], row["ts"], row["v"]) for row in pq.read_table(file).to_pylist()]


def epochs_of(folder: Path, last: int) -> list[list[Event]]:
    """The events of every epoch up to the last, as Spark's own logs say."""
    checkpoint = folder / "store" / "spark-checkpoint"
    entry_of: dict[str, int] = {}  # a file source counts its log's entries: offsets name them
    for entry in (checkpoint / "sources" / "0").glob("[0-9]*"):
        for line in entry.read_text().splitlines()[1:]:
            found = json.loads(line)
            entry_of[Path(found["path"]).name] = found["batchId"]
    epochs, before = [], -1
    for epoch in range(last + 1):
        [offset] = re.findall(r'"logOffset":(-?\d+)', (checkpoint / "offsets" / str(epoch)).read_text())
        names = sorted(name for name, entry in entry_of.items() if before < entry <= int(offset))
        epochs.append([event for name in names for event in events_of(folder / "in" / name)])
        before = int(offset)
    return epochs


def arm(folder: Path, **fault: Any) -> None:
    """Makes an operation of the next job's processes fail; see faults/sitecustomize.py."""
    disarm(folder)
    staged = folder / "faults" / "staged"
    staged.write_text(json.dumps(fault))
    staged.rename(folder / "faults" / "armed")


def disarm(folder: Path) -> str:
    """Lets all operations succeed again; which one failed, if any."""
    faults = folder / "faults"
    faults.mkdir(parents=True, exist_ok=True)
    (faults / "armed").unlink(missing_ok=True)
    fired = (faults / "fired").read_text() if (faults / "fired").exists() else ""
    for name in ("fired", "count"):
        (faults / name).unlink(missing_ok=True)
    return fired


@contextlib.contextmanager
def job(folder: Path, master: str, mode: str, more: str = "", script: Path = JOB) -> Iterator[subprocess.Popen[str]]:
    """A job in its own process group, of which nothing is left behind."""
    command = [sys.executable, str(script), str(folder), master, mode, *([more] if more else [])]
    environment, importable = dict(os.environ), [HERE, HERE.parent, HERE.parent.parent]
    if (folder / "faults").exists():
        environment["MILLSTREAM_TEST_FAULTS"] = str(folder / "faults")
        importable.insert(0, HERE / "faults")
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, importable), environment.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        yield process
    finally:
        end(process)
        process.wait()


def end(process: subprocess.Popen[str]) -> None:
    """Kills all that a job has started. Nobody waits for its JVM: while one with a cluster of its own shuts down, it
    ends its executors one by one and goes on to replace them, which can take minutes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(folder: Path, master: str, mode: str, more: str = "", script: Path = JOB) -> tuple[int, Any, str]:
    """Runs a job to its end: exit code, what it reported, and the end of its errors."""
    with job(folder, master, mode, more, script) as process:
        ending = Thread(target=lambda: (process.wait(), end(process)))
        ending.start()
        out, err = process.communicate(timeout=600)
        ending.join()
    return process.returncode, reported(out), err[-6000:]


def wait_stopped(process: subprocess.Popen[str], timeout: float = 120) -> None:
    """Waits until a process has stopped itself (SIGSTOP)."""
    deadline = time.monotonic() + timeout
    while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline, "it did not stop"
        time.sleep(0.05)


def reported(out: str) -> Any:
    """What a job reported, or nothing if it did not come to that."""
    found = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("RESULT ")]
    return found[0] if found else None


def all_delivered(folder: Path) -> bool:
    """Whether the grand totals in the sink are those of the whole input."""
    expected: Counter[int] = Counter()
    for file in (folder / "in").glob("*.parquet"):
        for k, _, v in events_of(file):
            expected[k % GROUPS] += v
    found = [row for file in sorted((folder / "out").glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
    return {row["k"]: row["n"] for row in found if row["what"] == "group"} == expected


@dataclass
class Left:
    """What a job has left behind, as the oracle looks at it."""

    states: dict[tuple[str, str], Any]
    delivered: dict[str, dict[int, list[tuple[Any, ...]]]] = field(default_factory=dict)

    def state(self, step: str, state: str = "") -> Any:
        return next(rows for (name, which), rows in self.states.items() if name == step and which.startswith(state))


def oracle_of(epochs: list[list[Event]]) -> Oracle:
    oracle = Oracle()
    for events in epochs:
        oracle.feed(events)
    return oracle


def check(folder: Path, result: dict[str, Any]) -> None:
    """All input was read; state of all levels and both outputs of every epoch are those of a sequential run. State has
    moved in every epoch but the first, until all had that was to move."""
    check_counts(folder, result)
    state, done, rounds, began = result["moved"]
    assert (began, done) == (1, min(rounds, result["epoch"]))
    assert state == ("done" if done == rounds else "running")
    assert done > 2


def check_counts(folder: Path, result: dict[str, Any]) -> None:
    """All of that but for what has moved."""
    epochs = epochs_of(folder, result["epoch"])
    assert sum(map(len, epochs)) == sum(len(events_of(file)) for file in (folder / "in").glob("*.parquet"))
    left = Left(dict(zip(STATES, result["states"], strict=True)))
    for place, sink in zip(SINKS, ("out", "reminders_out"), strict=True):
        left.delivered[sink] = {epoch: [] for epoch in range(len(epochs))}
        files = sorted(path.name for path in (folder / place).glob("*.parquet"))
        for name in files:
            rows = pq.read_table(folder / place / name).to_pylist()
            left.delivered[sink][int(name[len("epoch-") : -len(".parquet")])] = [tuple(row.values()) for row in rows]
        lines = [json.loads(path.read_bytes()) for path in sorted((folder / place / "_manifest").iterdir())]
        assert [line["file"] for line in lines] == files
    oracle = oracle_of(epochs)
    oracle.check(left)
    assert sum(reminded.total() for reminded in oracle.reminded) > 0, "timers of the third level fired"


def aborts(folder: Path) -> list[str]:
    """The reasons of all aborts in the journal."""
    store = open_store(str(folder / "store"))
    entries = sorted(item.name for item in store.list("journal/"))
    bodies = [decode_entry(name, bytes(store.get(name) or b""))[0].body for name in entries]
    return [body.reason for body in bodies if isinstance(body, Abort)]
