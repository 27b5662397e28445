"""Control from elsewhere on real Spark: another process rescales a query that runs, and reads its state."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from jobs import Total

pytestmark = pytest.mark.spark
CLI = [sys.executable, "-m", "millstream.control.cli"]


def test_another_process_rescales_a_running_query(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", "user string, amount long")
    query = ms.Query("elsewhere")
    query.source("events", feed.stream(spark)).key_by("user").compute("sums", Total)
    expected: Counter[str] = Counter()
    for number in range(2):
        records = [(f"u{user}", user + number) for user in range(50)]
        feed.add(records)
        expected.update(dict(records))
    store = str(tmp_path / "store")
    running = query.start(spark, store=store, bins=64, token="secret")
    try:
        running.wait_epoch(1, timeout=120)
        control = ms.connect(store, token="secret")
        arguments = ["rescale", store, "3", "--strategy", "batched:16", "--timeout", "120", "--json"]
        ended = subprocess.run([*CLI, *arguments, "--token", "secret"], capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr
        assert json.loads(ended.stdout)["outcome"]["state"] == "done"
        assert sorted(control.status().slots) == [0, 1, 2]
        assert running.status().slots == 3
        there = {row.user: row.total for row in control.state("sums", spark, state="total").collect()}
        assert (
            there == expected == {row["user"]: row["total"] for row in control.state("sums", state="total").to_pylist()}
        )
        plan = control.plan_rescale(2)
    finally:
        running.stop()
    with pytest.raises(ms.UserError, match="so nobody would hear the command"):
        running.apply(plan)
    with pytest.raises(TimeoutError, match="No epoch was committed meanwhile"):
        control.apply(plan).wait(timeout=0)
