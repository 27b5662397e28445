"""Jobs as processes of their own: their input, running them, arming faults in them, and checking what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millstream.protocol.epochs import Abort
from millstream.store.journal import decode_entry
from millstream.store.objects import open_store

HERE = Path(__file__).parent
JOB = HERE / "killed_job.py"


def add_input(folder: Path, rng: random.Random, files: int, counts: Counter[str]) -> None:
    """Adds files of random keys to a job's input, and the keys to the counts."""
    (folder / "in").mkdir(parents=True, exist_ok=True)
    first = len(list((folder / "in").glob("*.parquet")))
    for number in range(first, first + files):
        keys = [rng.randrange(50) for _ in range(200)]
        counts.update(map(str, keys))
        staged = folder / "in" / f".{number}"
        pq.write_table(pa.table({"key": pa.array(keys, pa.int64())}), staged)
        os.utime(staged, (1_700_000_000 + number, 1_700_000_000 + number))
        staged.rename(folder / "in" / f"{number:06d}.parquet")


def make_input(folder: Path, rng: random.Random, files: int) -> Counter[str]:
    """The input of a job; how often each key is in it."""
    counts: Counter[str] = Counter()
    add_input(folder, rng, files, counts)
    return counts


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
    environment = dict(os.environ)
    if (folder / "faults").exists():
        environment["MILLSTREAM_TEST_FAULTS"] = str(folder / "faults")
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(HERE / "faults"), str(HERE), environment.get("PYTHONPATH", "")]
        )
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run(folder: Path, master: str, mode: str, more: str = "", script: Path = JOB) -> tuple[int, Any, str]:
    """Runs a job to its end: exit code, what it reported, and the end of its errors."""
    with job(folder, master, mode, more, script) as process:
        out, err = process.communicate(timeout=600)
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


def delivered(folder: Path) -> Counter[str]:
    """The last total of every key in the sink; fails if an epoch is there twice, or out of order."""
    totals: Counter[str] = Counter()
    for file in sorted((folder / "out").glob("*.parquet")):
        epoch = pq.read_table(file).to_pylist()
        assert len({row["key"] for row in epoch}) == len(epoch), "a key was delivered twice in an epoch"
        for row in epoch:
            assert row["total"] > totals[str(row["key"])], "an epoch was delivered twice, or out of order"
            totals[str(row["key"])] = row["total"]
    return totals


def check(folder: Path, result: dict[str, Any], counts: Counter[str]) -> None:
    """State of both steps, files and manifest of the sink equal the counts."""
    assert result["state"] == dict(counts)
    assert result["trap"] == dict(counts)
    assert delivered(folder) == counts
    lines = [json.loads(path.read_bytes()) for path in sorted((folder / "out" / "_manifest").iterdir())]
    assert [line["file"] for line in lines] == sorted(path.name for path in (folder / "out").glob("*.parquet"))


def aborts(folder: Path) -> list[str]:
    """The reasons of all aborts in the journal."""
    store = open_store(str(folder / "store"))
    entries = sorted(item.name for item in store.list("journal/"))
    bodies = [decode_entry(name, bytes(store.get(name) or b""))[0].body for name in entries]
    return [body.reason for body in bodies if isinstance(body, Abort)]
