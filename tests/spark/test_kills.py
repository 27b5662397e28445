"""Real processes, really killed: the driver at every named moment, workers and executors in the middle of an epoch.

After each, state and outputs equal a sequential recomputation (G1, G2, G6).
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from processes import aborts, check, delivered, job, make_input, reported, run

from millstream.engine.driver import MOMENTS

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_driver_killed_at_every_named_moment_is_followed_exactly(tmp_path: Path, rng: random.Random) -> None:
    """One store, killed once at each moment, each time in a later epoch."""
    counts = make_input(tmp_path, rng, files=2 * (len(MOMENTS) + 2))
    for number, moment in enumerate(MOMENTS):
        code, _, err = run(tmp_path, "local[2]", "plain", f"{moment}:{number + 1}")
        assert code == -signal.SIGKILL, err
    code, result, err = run(tmp_path, "local[2]", "plain")
    assert code == 0, err
    assert result["epoch"] >= len(MOMENTS) + 1
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


def test_the_output_of_a_level_made_twice_is_caught_by_its_receipts(tmp_path: Path, rng: random.Random) -> None:
    """The executor dies while level 2 runs: slot 0 consumed one version of a level-1 output, slot 1 the other."""
    counts = make_input(tmp_path, rng, files=8)
    code, result, err = run(tmp_path, "local-cluster[2,1,900]", "levels")
    assert code == 0, err
    assert (tmp_path / "mixed-killed").exists()
    check(tmp_path, result, counts)
    check_bells(tmp_path, result, counts)
    [reason] = aborts(tmp_path)
    assert reason.startswith("receipts differ")
    assert " of producer 1." in reason


def test_strong_productions_are_sent_again_and_the_attempt_counts(tmp_path: Path, rng: random.Random) -> None:
    """The same death, and the same code that is not deterministic: but what was made first is what is sent again."""
    counts = make_input(tmp_path, rng, files=6)
    code, result, err = run(tmp_path, "local-cluster[2,1,900]", "strong")
    assert code == 0, err
    assert (tmp_path / "mixed-killed").exists()
    check(tmp_path, result, counts)
    check_bells(tmp_path, result, counts)
    assert aborts(tmp_path) == []
    assert set(result["attempts"].values()) == {1}
    calls = Counter((tmp_path / "noise-calls").read_text().splitlines())
    assert {call for call in calls if call.startswith("2 ")} == {"2 0", "2 1"}
    assert set(calls.values()) == {1}, "no task with strong productions called the computation twice"


def check_bells(folder: Path, result: dict[str, Any], counts: Counter[str]) -> None:
    """State and both outputs of the third level, which its timers make, equal the counts."""
    assert result["bells"] == dict(counts)
    assert delivered(folder / "bells") == counts
    rung = [row for file in (folder / "bells" / "out").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    even = [row for file in (folder / "even" / "out").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert Counter((row["key"], row["total"]) for row in even) == Counter(
        (row["key"], row["total"]) for row in rung if row["total"] % 2 == 0
    )


def test_ctrl_c_stops_between_two_epochs_and_a_restart_goes_on(tmp_path: Path, rng: random.Random) -> None:
    """SIGINT arrives in the middle of an epoch: that epoch is committed, nothing is aborted, no traceback is shown."""
    counts = make_input(tmp_path, rng, files=8)
    with job(tmp_path, "local[2]", "endless") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("PLANNED 3"):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    # Spark's own daemon may complain of a broken pipe while it is shut down; nothing of ours does.
    assert "killed_job.py" not in err
    assert "src/millstream" not in err
    stopped_at = reported(out)["epoch"]
    assert stopped_at >= 3
    assert aborts(tmp_path) == []
    code, result, err = run(tmp_path, "local[2]", "plain")
    assert code == 0, err
    check(tmp_path, result, counts)
