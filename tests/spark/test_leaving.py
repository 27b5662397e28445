"""Workers that leave: one that Spark announces as going away is drained by itself, and one that is drained is empty
when that is reported. Neither gets another task, and results are those of a sequential run."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import HERE, check_counts, run

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_workers_that_leave_get_no_more_tasks_and_lose_nothing(tmp_path: Path) -> None:
    code, found, err = run(tmp_path, "local-cluster[3,1,700]", "leave", script=HERE / "leaving_job.py")
    assert code == 0, err
    assert found["outcome"] == ["done", True, True]
    assert found["workers"], "one is left, with all slots"
    assert found["tasks"]["announced"] == 0
    assert found["tasks"]["drained"] == 0
    assert found["tasks"]["last"] > 0
    check_counts(tmp_path, found)
