"""State on Spark is read through the workers' cache; where it is cold, it is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from jobs import TotalBatch
from millstream.store.objects import open_store

pytestmark = pytest.mark.spark


def cached(directory: Path) -> dict[str, Path]:
    """The segments in the caches below a directory, by name; those that were fetched end in `.part`."""
    return {path.name: path for path in directory.rglob("*.arrow*")}


def test_state_is_read_through_the_workers_cache_and_a_cold_one_fetches(spark: SparkSession, tmp_path: Path) -> None:
    feed, store = Feed(tmp_path / "in", "user string, amount long"), tmp_path / "store"
    feed.add([(f"user {number}", 1) for number in range(3000)])

    def run(cache: str) -> dict[str, int]:
        query = ms.Query("cached")
        query.source("events", feed.stream(spark)).key_by("user").compute("sums", TotalBatch)
        running = query.start(
            spark,
            store=str(store),
            trigger={"availableNow": True},
            cache_dir=str(tmp_path / cache),
            cache_bytes=1 << 30,
            fetch_limit=1e8,
        )
        running.await_termination()
        return {row[0]: row[1] for row in running.state("sums").collect()}

    assert len(run("warm")) == 3000
    written = {item.name.rsplit("/", 1)[-1] for item in open_store(str(store)).list("segments/")}
    warm = cached(tmp_path / "warm")
    assert set(warm) == written, "what the workers wrote is in their cache; nothing was fetched"
    assert all(path.stat().st_nlink == 2 for path in warm.values())
    feed.add([(f"user {number}", 1) for number in range(1500)])
    assert sum(run("cold").values()) == 4500
    cold = cached(tmp_path / "cold")
    assert {f"{name}.part" for name in written} <= set(cold), "what was written before had to be fetched"
    assert len(cold) > len(written)
    assert len({path.parent for path in cold.values()}) == 1, "all Python processes of a worker share one directory"


def test_settings_that_cannot_be_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    query = ms.Query("refused")
    query.source("events", Feed(tmp_path / "in", "user string, amount long").stream(spark)).key_by("user").compute(
        "sums", TotalBatch
    )
    for wrong, text in (
        ({"cache_dir": "relative"}, "cache_dir='relative': give an absolute path"),
        ({"cache_bytes": 0}, "cache_bytes=0: give a whole number"),
        ({"cache_bytes": 1.5}, "cache_bytes=1.5: give a whole number"),
        ({"fetch_limit": 0}, "fetch_limit=0: give a number of bytes a second above 0"),
        ({"fetch_limit": float("nan")}, "fetch_limit=nan: give a number"),
        ({"replicas": -1}, "replicas=-1: give a whole number from 0 to 16"),
        ({"replica_placement": "best"}, "replica_placement='best': give 'size' or 'load'"),
    ):
        with pytest.raises(ms.UserError, match=text):
            query.start(spark, store=str(tmp_path / "store"), **wrong)  # type: ignore[arg-type]
