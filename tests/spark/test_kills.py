"""Real processes, really killed: the driver at every named moment, workers and executors in the middle of an epoch.

After each, state and outputs equal a sequential recomputation (G1, G2, G6).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from millstream.engine.driver import MOMENTS
from millstream.protocol.epochs import Abort
from millstream.store.journal import decode_entry
from millstream.store.objects import open_store

pytestmark = [pytest.mark.spark, pytest.mark.slow]
JOB = Path(__file__).parent / "killed_job.py"


def make_input(folder: Path, rng: random.Random, files: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    (folder / "in").mkdir(parents=True)
    for number in range(files):
        keys = [rng.randrange(50) for _ in range(200)]
        counts.update(map(str, keys))
        pq.write_table(pa.table({"key": pa.array(keys, pa.int64())}), folder / "in" / f"{number:03d}.parquet")
        os.utime(folder / "in" / f"{number:03d}.parquet", (1_700_000_000 + number, 1_700_000_000 + number))
    return counts


def run(folder: Path, master: str, mode: str, kill_at: str = "") -> tuple[int, dict[str, Any], str]:
    """Runs the job in its own process group, and leaves nothing of it behind."""
    command = [sys.executable, str(JOB), str(folder), master, mode, *([kill_at] if kill_at else [])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    found = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("RESULT ")]
    return process.returncode, found[0] if found else {}, err[-3000:]


def check(folder: Path, result: dict[str, Any], counts: Counter[str]) -> None:
    assert result["state"] == dict(counts)
    assert result["trap"] == dict(counts)
    totals: Counter[str] = Counter()
    for file in sorted((folder / "out").glob("*.parquet")):
        epoch = pq.read_table(file).to_pylist()
        assert len({row["key"] for row in epoch}) == len(epoch), "a key was delivered twice in an epoch"
        for row in epoch:
            assert row["total"] > totals[str(row["key"])], "an epoch was delivered twice, or out of order"
            totals[str(row["key"])] = row["total"]
    assert totals == counts


def aborts(folder: Path) -> list[str]:
    store = open_store(str(folder / "store"))
    entries = sorted(item.name for item in store.list("journal/"))
    bodies = [decode_entry(name, bytes(store.get(name) or b""))[0].body for name in entries]
    return [body.reason for body in bodies if isinstance(body, Abort)]


def test_a_driver_killed_at_every_named_moment_is_followed_exactly(tmp_path: Path, rng: random.Random) -> None:
    """One store, killed once at each moment, each time in a later epoch."""
    counts = make_input(tmp_path, rng, files=2 * (len(MOMENTS) + 2))
    for number, moment in enumerate(MOMENTS):
        code, _, err = run(tmp_path, "local[2]", "plain", f"{moment}:{number + 1}")
        assert code == -signal.SIGKILL, err
    code, result, err = run(tmp_path, "local[2]", "plain")
    assert code == 0, err
    assert result["epoch"] == len(MOMENTS) + 1
    check(tmp_path, result, counts)
    assert aborts(tmp_path) == ["the driver that planned it has ended"] * 2  # planned, executed


def test_a_python_worker_killed_after_it_wrote_is_run_again(tmp_path: Path, rng: random.Random) -> None:
    counts = make_input(tmp_path, rng, files=8)
    code, result, err = run(tmp_path, "local[2]", "worker")
    assert code == 0, err
    assert (tmp_path / "worker-killed").exists()
    check(tmp_path, result, counts)
    assert result["attempts"]["2"] == 2
    assert len(aborts(tmp_path)) == 1


def test_an_executor_killed_in_the_middle_of_an_epoch_costs_no_record(tmp_path: Path, rng: random.Random) -> None:
    counts = make_input(tmp_path, rng, files=8)
    code, result, err = run(tmp_path, "local-cluster[2,1,900]", "executor")
    assert code == 0, err
    assert (tmp_path / "executor-killed").exists()
    check(tmp_path, result, counts)


def test_a_route_output_made_twice_is_caught_by_its_receipts(tmp_path: Path, rng: random.Random) -> None:
    """Slot 0 consumed one version of a route output, slot 1 another: the attempt is aborted and run again."""
    counts = make_input(tmp_path, rng, files=8)
    code, result, err = run(tmp_path, "local-cluster[2,1,900]", "mixed")
    assert code == 0, err
    assert (tmp_path / "mixed-killed").exists()
    check(tmp_path, result, counts)
    assert [reason.split(":")[0] for reason in aborts(tmp_path)] == ["receipts differ"]


def test_ctrl_c_stops_between_two_epochs_and_a_restart_goes_on(tmp_path: Path, rng: random.Random) -> None:
    """SIGINT arrives in the middle of an epoch: that epoch is committed, nothing is aborted, no traceback is shown."""
    counts = make_input(tmp_path, rng, files=8)
    command = [sys.executable, str(JOB), str(tmp_path), "local[2]", "endless"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("PLANNED 3"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    stopped_at = json.loads(out.splitlines()[-1].removeprefix("RESULT "))["epoch"]
    assert stopped_at >= 3
    assert aborts(tmp_path) == []
    code, result, err = run(tmp_path, "local[2]", "plain")
    assert code == 0, err
    check(tmp_path, result, counts)
