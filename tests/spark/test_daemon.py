"""Python workers are forked from a process that has imported what tasks need, and one that is killed is replaced."""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def told(_: Any) -> tuple[int, float, str, bool, int]:
    """Of the worker that runs it: its number, a random one, what it was forked from, whether that has imported all, and
    how many objects it will never look at for garbage."""
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode()
    return os.getpid(), np.random.random(), parent, "millstream.engine.host" in sys.modules, gc.get_freeze_count()


def test_a_worker_that_is_killed_is_replaced_by_one_that_has_all_it_needs(spark: SparkSession) -> None:
    found = spark.sparkContext.parallelize([0], 1).map(told).collect()[0]
    again = spark.sparkContext.parallelize([0], 1).map(told).collect()[0]
    for worker, _, parent, imported, frozen in (found, again):
        assert "millstream.spark.daemon" in parent.split("\0")
        assert imported
        assert frozen > 10_000
        assert worker != os.getpid()
    os.kill(again[0], signal.SIGKILL)
    after = spark.sparkContext.parallelize([0], 1).map(told).collect()[0]
    assert after[0] != again[0]
    assert after[1] not in (found[1], again[1]), "it does not draw the same numbers again"
    assert after[2:4] == again[2:4], "a fork of the same process"
