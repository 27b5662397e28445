"""Workers of a Spark standalone cluster come and go under a running query, and wires between them are cut. Results are
those of a sequential run.

With `MILLSTREAM_KILLED=all` only; by default test_leaving.py has executors that are decommissioned and drained.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from processes import HERE, check_counts, run

from bench.namespaces import why_not

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("MILLSTREAM_KILLED") != "all", reason="takes minutes: MILLSTREAM_KILLED=all"),
]

JOB = HERE / "standalone_job.py"


def left_behind(folder: Path) -> list[str]:
    """The processes that have to do with a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes()
            if str(folder).encode() in words:
                found.append(words.replace(b"\0", b" ").decode()[:200])
    return found


def test_a_cluster_that_grows_and_shrinks_costs_nothing_but_moves_of_slots(tmp_path: Path) -> None:
    code, found, err = run(tmp_path, "-", "elastic", script=JOB)
    assert code == 0, err
    assert found["joined"]
    assert found["fetched by joining"] == 0
    assert found["more slots"] == ["done", 6, 3]
    assert found["fetched by more slots"] == 0
    assert found["decommissioned"], "its slots went to where their replicas were"
    assert found["killed"], "so did those of a worker that was killed"
    check_counts(tmp_path, found)
    assert left_behind(tmp_path) == []


def test_policies_ask_dynamic_allocation_for_executors_and_give_back_what_they_have_drained(
    tmp_path: Path,
) -> None:
    code, found, err = run(tmp_path, "-", "allocation", script=JOB)
    assert code == 0, err
    assert found["asked for"] == 1
    assert found["fetched by one more"] == 0
    assert found["drained"] == ["done", True, ""]
    assert found["fetched by draining"] == 0
    assert found["executors"] == 2, "none was started for the one that was given back"
    assert found["kept"]
    check_counts(tmp_path, found)


def test_a_worker_that_is_cut_off_is_left_out_and_comes_back(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    code, found, err = run(tmp_path, "-", "partitions", script=JOB)
    assert code == 0, err
    assert found["cut off from its peers"], "its slots went to where their replicas were"
    assert found["cut off from the driver"]
    assert found["still there"], "Spark had given it up while it was alive"
    assert found["another"], "another executor has taken its place"
    check_counts(tmp_path, found)
    assert left_behind(tmp_path) == []
