"""Drivers and executors that are killed at each state of the life of a modification: it is whole or it is nothing, and
every record is counted once, by the code that was there in its epoch. The change brings a source, too: Spark's stream
begins anew for it, and what a driver had read of it when it died is read again.

With `MILLSTREAM_KILLED=all` only; by default in the simulator (test_modified_under_fire.py, test_modification_life.py).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from modified_job import FILES, MORE, ROWS
from processes import HERE, run

ALL = os.environ.get("MILLSTREAM_KILLED") == "all"
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(not ALL, reason="takes minutes: MILLSTREAM_KILLED=all"),
]

SCRIPT = HERE / "modified_job.py"
STATES = ["proposed", "validated", "prepared", "planned", "executed", "committed"]


def check(found: dict[str, Any]) -> None:
    assert found["state"] == "committed", found["reason"]
    numbers = [str(first + n) for first in (0, MORE) for n in range(FILES * ROWS)]
    assert found["records"] == dict.fromkeys(numbers, 1), "each record of both sources went to the sink once"
    assert sum(found["counts"]) == 2 * FILES * ROWS, "and was counted once, in state that was carried over"
    for epoch, met in found["epochs"].items():
        if met:
            assert met.keys() == {"new" if int(epoch) >= found["epoch"] else "old"}, epoch


@pytest.mark.parametrize("state", STATES)
def test_a_driver_that_is_killed_leaves_the_whole_change_or_none(state: str, tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "local[2]", f"driver:{state}", script=SCRIPT)
    assert code == -signal.SIGKILL, err
    code, found, err = run(tmp_path, "local[2]", "plain", script=SCRIPT)
    assert code == 0, err
    check(found)


def test_an_executor_that_is_killed_leaves_the_whole_change(tmp_path: Path) -> None:
    code, found, err = run(
        tmp_path, "local-cluster[2,1,700]", "+".join(f"executor:{state}" for state in STATES), script=SCRIPT
    )
    assert code == 0, err
    for state in STATES:
        print(state, found[state]["epoch"], found[state]["epochs"])
        assert found[state]["killed"]
        check(found[state])
