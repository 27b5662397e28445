"""Real processes whose store fails, or who share it with a driver that should be dead.

After each, state and outputs equal a sequential recomputation (G1, G2, G3, G6).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from faulty_job import ON_LEVELS, steps
from killed_job import run as run_here
from processes import (
    HERE,
    add_input,
    all_delivered,
    arm,
    check,
    disarm,
    epochs_of,
    job,
    oracle_of,
    reported,
    run,
    wait_stopped,
)
from pyspark.sql import SparkSession

from millstream.engine.state import read_state
from millstream.protocol.epochs import Epoch
from millstream.store.journal import Journal, history_at
from millstream.store.objects import open_store

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ALL = os.environ.get("MILLSTREAM_KILLED") == "all"


@pytest.mark.parametrize(("mode", "role"), [("lose", ""), *([("refuse", ""), ("kill_after", "worker")] if ALL else [])])
def test_a_store_that_fails_on_any_operation_of_any_process_costs_no_record(
    mode: str, role: str, tmp_path: Path
) -> None:
    """The k-th operation of driver and workers together, for every k: the job itself checks the counts after each."""
    disarm(tmp_path)
    code, hits, err = run(tmp_path, "local[2]", mode, role, script=HERE / "faulty_job.py")
    assert code == 0, err
    print("\n".join(hits))
    assert any(hit.endswith(": went on") for hit in hits)
    assert role or any(hit.endswith(": stopped") for hit in hits)


@pytest.mark.skipif(not ALL, reason="takes half a minute: MILLSTREAM_KILLED=all")
def test_a_store_that_fails_on_levels_two_and_three_costs_no_record(tmp_path: Path) -> None:
    """Timers, two outputs, strong productions: operations are refused, replies lost, workers killed after one."""
    disarm(tmp_path)
    code, hits, err = run(tmp_path, "local[2]", "levels", script=HERE / "faulty_job.py")
    assert code == 0, err
    print("\n".join(hits))
    assert len(hits) == len(ON_LEVELS)
    assert all(hit.endswith(": went on") for hit in hits), "each costs an attempt, and none the query"


def test_a_driver_killed_inside_a_delivery_delivers_once(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    """Before the file, between the file and its line in the manifest, and after that line."""
    add_input(tmp_path, rng, files=12)
    for mode, match in (("kill", ".parquet"), ("kill_after", ".parquet"), ("kill_after", "_manifest/")):
        arm(tmp_path, at=2, mode=mode, operations=["create"], match=match)
        code, _, err = run(tmp_path, "local[2]", "plain")
        assert code == -signal.SIGKILL, err
        assert match in disarm(tmp_path)
        assert not all_delivered(tmp_path)
    check(tmp_path, run_here(spark, tmp_path, "plain"))


@pytest.mark.parametrize("moment", ["planned", "executed", "committed"] if ALL else ["executed"])
def test_a_driver_that_slept_while_another_took_over_is_fenced_and_harms_nothing(
    moment: str, spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    """It sleeps with all its processes in the middle of an epoch, and wakes when the other has finished."""
    add_input(tmp_path, rng, files=8)
    with job(tmp_path, "local[2]", "endless", f"{moment}:2:stop") as sleeper:
        wait_stopped(sleeper)
        run_here(spark, tmp_path, "plain")
        os.killpg(sleeper.pid, signal.SIGCONT)
        _, said = sleeper.communicate(timeout=120)
    assert sleeper.returncode == 1
    assert "Fenced: this driver (generation 1) has been replaced: generation 2" in said
    add_input(tmp_path, rng, files=2)
    check(tmp_path, run_here(spark, tmp_path, "plain"))


@pytest.mark.skipif(not ALL, reason="takes half a minute: MILLSTREAM_KILLED=all")
def test_the_garbage_collection_of_a_driver_that_slept_deletes_nothing_that_is_needed(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    """It sleeps between listing the store and deleting what it found, while another driver goes on."""
    add_input(tmp_path, rng, files=16)
    arm(tmp_path, at=2, mode="stop", operations=["delete"], match="segments/", role="driver")
    with job(tmp_path, "local[2]", "endless") as sleeper:
        wait_stopped(sleeper)
        doomed = disarm(tmp_path).split()[2:-1]
        run_here(spark, tmp_path, "plain")
        os.kill(sleeper.pid, signal.SIGCONT)
        _, said = sleeper.communicate(timeout=120)
    assert "Fenced: this driver (generation 1) has been replaced: generation 2" in said
    assert doomed
    store = open_store(str(tmp_path / "store"))
    assert [name for name in doomed if store.get(name) is not None] == [], "it slept through its own deletion"
    history = Journal.open(store).history
    [groups] = [step for step in steps(levels=True) if step.name == "groups"]
    for epoch in range(max(0, history.oldest), history.epoch + 1):
        found = read_state(store, groups, "grand", history_at(store, Epoch(epoch))).to_pylist()
        assert {row["g"]: row["grand"] for row in found} == oracle_of(epochs_of(tmp_path, epoch)).grand
    add_input(tmp_path, rng, files=2)
    check(tmp_path, run_here(spark, tmp_path, "plain"))


@pytest.mark.skipif(not ALL, reason="takes half a minute: MILLSTREAM_KILLED=all")
def test_of_two_drivers_that_both_run_the_newer_one_goes_on(tmp_path: Path, rng: random.Random) -> None:
    add_input(tmp_path, rng, files=4)
    with job(tmp_path, "local[2]", "endless") as older:
        wait_delivered(tmp_path)
        with job(tmp_path, "local[2]", "endless") as newer:
            _, said = older.communicate(timeout=120)
            assert older.returncode == 1
            assert "Fenced: this driver (generation 1) has been replaced: generation 2" in said
            add_input(tmp_path, rng, files=4)
            wait_delivered(tmp_path)
            newer.send_signal(signal.SIGINT)
            out, err = newer.communicate(timeout=120)
    assert newer.returncode == 0, err
    check(tmp_path, reported(out))


def wait_delivered(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while not all_delivered(folder):
        assert time.monotonic() < deadline, "the input was not delivered in time"
        time.sleep(0.2)


def test_a_driver_whose_jvm_is_killed_says_so_and_a_restart_goes_on(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    add_input(tmp_path, rng, files=8)
    code, _, err = run(tmp_path, "local[2]", "jvm")
    assert code == 1
    assert "connection to Spark is lost" in err or "Spark could not finish the job" in err, err
    assert "millstream.errors." in err
    check(tmp_path, run_here(spark, tmp_path, "plain"))


def test_a_disk_that_fills_up_under_spark_stops_the_query_and_more_space_lets_it_go_on(
    spark: SparkSession, tmp_path: Path, rng: random.Random
) -> None:
    """A real file system, small, and then larger, with the store, Spark's checkpoint and the sink on it."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    try:
        add_input(tmp_path, rng, files=60)
        shutil.move(tmp_path / "in", small / "in")
        code, _, err = run(small, "local[2]", "plain")
        assert code == 1
        assert "No space left" in err, err
        assert "Free some space, then start the query again" in err or "Spark ended the query" in err, err
        before = Journal.open(open_store(str(small / "store"))).history.epoch
        assert 0 <= before < 29
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        check(small, run_here(spark, small, "plain"))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)
