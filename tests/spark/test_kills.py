"""Real processes, really killed: the driver at every named moment, workers and executors in the middle of an epoch.

By default at the moments that differ most (all with `MILLSTREAM_KILLED=all`; in the simulator, test_crashes.py).
All on three levels with timers and two outputs: after each, state and outputs are the oracle's (G1, G2, G6, G7).
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from killed_job import run as run_here
from processes import aborts, add_input, check, epochs_of, job, reported, run
from pyspark.sql import SparkSession

from millstream.engine.driver import MOMENTS

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ALL = os.environ.get("MILLSTREAM_KILLED") == "all"
MODES = ("mixed", "levels", "strong", *(("executor", "drain") if ALL else ()))
KILLED_AT = MOMENTS if ALL else ("executed", "committed", "delivering")


def test_a_driver_killed_at_every_named_moment_is_followed_exactly(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    """One store, killed once at each moment, each time in a later epoch."""
    add_input(tmp_path, rng, files=2 * (len(KILLED_AT) + 2))
    for number, moment in enumerate(KILLED_AT):
        code, _, err = run(tmp_path, "local[2]", "plain", f"{moment}:{number + 1}")
        assert code == -signal.SIGKILL, err
    result = run_here(spark, tmp_path, "plain")
    assert result["epoch"] >= len(KILLED_AT) + 1
    check(tmp_path, result)
    uncommitted = [moment for moment in KILLED_AT if moment in ("planned", "executed")]
    assert aborts(tmp_path) == ["the driver that planned it has ended"] * len(uncommitted)


def test_a_python_worker_killed_after_it_wrote_is_run_again(tmp_path: Path, rng: random.Random) -> None:
    add_input(tmp_path, rng, files=8)
    code, result, err = run(tmp_path, "local[2]", "worker")
    assert code == 0, err
    assert (tmp_path / "killed").exists()
    check(tmp_path, result)
    assert result["attempts"]["2"] == 2
    assert len(aborts(tmp_path)) == 1


@dataclass(frozen=True)
class Killed:
    """What queries have left whose executors were killed, by mode."""

    folder: Path
    results: dict[str, Any]

    def check(self, mode: str) -> tuple[Path, dict[str, Any]]:
        assert (self.folder / mode / "killed").exists()
        check(self.folder / mode, self.results[mode])
        return self.folder / mode, self.results[mode]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """One cluster for all of them: it gets a new executor for each that is killed."""
    folder = tmp_path_factory.mktemp("killed")
    for mode in MODES:
        add_input(folder / mode, random.Random(mode), files=8)
    code, results, err = run(folder, "local-cluster[2,1,900]", "+".join(MODES))
    assert code == 0, err
    return Killed(folder, results)


@pytest.mark.skipif("executor" not in MODES, reason="takes half a minute: MILLSTREAM_KILLED=all")
def test_an_executor_killed_in_the_middle_of_an_epoch_costs_no_record(killed: Killed) -> None:
    killed.check("executor")


def test_a_new_executor_is_used(killed: Killed) -> None:
    used = [set(killed.results[mode]["used"]) for mode in ("mixed", "levels", "strong")]
    assert all(len(workers) >= 2 for workers in used), "the next query runs on the executor that came instead"
    assert len(set.union(*used)) >= 4, "of which each of the first two queries has killed one"


@pytest.mark.skipif("drain" not in MODES, reason="takes half a minute: MILLSTREAM_KILLED=all")
def test_a_drained_executor_has_no_slot_left(killed: Killed) -> None:
    check(killed.folder / "drain", killed.results["drain"])
    assert len(killed.results["drain"]["workers"]) == 1
    assert killed.results["drain"]["moved"][0] == "done"


def test_a_route_output_made_twice_is_caught_by_its_receipts(killed: Killed) -> None:
    """Slot 0 consumed one version of a route output, slot 1 another: the attempt is aborted and run again."""
    folder, _ = killed.check("mixed")
    [reason] = aborts(folder)
    assert reason.startswith("receipts differ")
    assert " of producer 0." in reason


def test_the_output_of_a_level_made_twice_is_caught_by_its_receipts(killed: Killed) -> None:
    """The executor dies while level 2 runs: slot 0 consumed one version of a level-1 output, slot 1 the other."""
    folder, _ = killed.check("levels")
    [reason] = aborts(folder)
    assert reason.startswith("receipts differ")
    assert " of producer 1." in reason


def test_strong_productions_are_sent_again_and_the_attempt_counts(killed: Killed) -> None:
    """The same death, and the same code that is not deterministic: but what was made first is what is sent again."""
    folder, result = killed.check("strong")
    assert aborts(folder) == []
    assert set(result["attempts"].values()) == {1}
    calls = Counter(map(int, (folder / "calls").read_text().split()))
    once = {epoch: len(events) for epoch, events in enumerate(epochs_of(folder, result["epoch"])) if events}
    assert calls == once, "no task with strong productions called the computation twice"


def test_ctrl_c_stops_between_two_epochs_and_a_restart_goes_on(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    """SIGINT arrives in the middle of an epoch: that epoch is committed, nothing is aborted, no traceback is shown."""
    add_input(tmp_path, rng, files=8)
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
    check(tmp_path, run_here(spark, tmp_path, "plain"))
