"""What a user sees on standard error: no trace of a stop, of Ctrl-C or of the ticker, and errors as before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import HERE, run

from millstream.spark.quiet import MEANINGLESS

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_stop_and_ctrl_c_leave_no_trace(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "local[2]", "", script=HERE / "quiet_job.py")
    assert code == 0, err
    assert "\tat " not in err
    assert "Traceback" not in err
    for message, _ in MEANINGLESS:
        assert not re.search(message, err)
    assert "Failed to do something else" in err, "only what is meaningless is left out"
