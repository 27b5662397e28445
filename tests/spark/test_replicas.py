"""Replicas on real executors: agents and Python workers that are killed are replaced, a prepared rescale fetches
nothing inside an epoch, and the slots of an executor that is killed go on where their replicas are. Nothing is left
behind, and results are those of a sequential run."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import HERE, check_counts, run

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_replicas_outlive_agents_rescales_and_executors(tmp_path: Path) -> None:
    code, found, err = run(tmp_path, "local-cluster[3,1,700]", "all", script=HERE / "replicas_job.py")
    assert code == 0, err
    assert found["agents"] == 3, "one for each executor"
    assert found["given"] > 0, "they have given each other state"
    assert found["other agents"]
    assert found["at home"]
    assert found["fetched by other Python workers"] == 0, "what was in the cache stays there"
    assert (found["rescaled to 6"], found["rescaled to 4"]) == ("done", "done")
    assert found["fetched by rescales"] == 0
    assert found["where replicas are"]
    assert found["left behind"] == []
    check_counts(tmp_path, found)
