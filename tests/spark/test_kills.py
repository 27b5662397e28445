"""Real processes, really killed: the driver at every named moment, workers and executors in the middle of an epoch.

After each, state and outputs equal a sequential recomputation (G1, G2, G6).
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from processes import aborts, check, job, make_input, reported, run

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
    [reason] = aborts(tmp_path)
    assert reason.startswith("receipts differ")
    assert " of producer 1." in reason


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
