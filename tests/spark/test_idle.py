"""An idle query on real Spark: it ticks, and the epochs of a command follow each other without waiting for a tick."""

from __future__ import annotations

from pathlib import Path

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from millstream.spark import ticker
from words import Count

pytestmark = pytest.mark.spark


@pytest.fixture
def idle(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ms.RunningQuery:
    """A query that has read its words, and whose ticker does not tick by itself any more."""
    monkeypatch.setattr(ticker, "EVERY_S", 3600.0)
    feed = Feed(tmp_path / "in", "word string")
    feed.add([(f"word {n}",) for n in range(3000)])
    query = ms.Query("idle")
    query.source("words", feed.stream(spark)).key_by("word").compute("count", Count)
    running = query.start(spark, str(tmp_path / "store"), slots=1)
    running.wait_epoch(0, timeout=120)
    return running


def test_the_epochs_of_a_command_follow_each_other_at_once(idle: ms.RunningQuery) -> None:
    try:
        rescale = idle.plan_rescale(2, strategy=ms.Batched(200, merge=False))
        assert len(rescale.rounds) == 11
        outcome = idle.apply(rescale).wait(timeout=120)
        assert (outcome.state, outcome.done) == ("done", 11)
        before = idle.epoch
        with pytest.raises(TimeoutError):
            idle.wait_epoch(before + 3, timeout=3)
    finally:
        idle.stop()


@pytest.mark.parametrize("strategy", [ms.Paced(), ms.Matched()], ids=str)
def test_a_tiny_state_goes_to_four_slots_and_back_in_a_few_epochs(
    idle: ms.RunningQuery, strategy: ms.Paced | ms.Matched
) -> None:
    try:
        before = idle.epoch
        for slots in (4, 1):
            plan = idle.plan_rescale(slots, strategy=strategy)
            assert plan.bins == 3072
            assert idle.apply(plan).wait(timeout=120).state == "done"
            assert idle.status().slots == slots
        assert idle.epoch - before <= 10, "3,072 bins went one by one, one a second, before"
        assert idle.state("count").count() == 3000
    finally:
        idle.stop()


def test_an_idle_query_ticks_and_goes_on_ticking_after_a_restart(spark: SparkSession, tmp_path: Path) -> None:
    for _ in range(3):
        query = ms.Query("ticking")
        feed = Feed(tmp_path / "in", "word string")
        query.source("words", feed.stream(spark)).key_by("word").compute("count", Count)
        running = query.start(spark, str(tmp_path / "store"))
        try:
            running.wait_epoch(running.epoch + 3, timeout=120)
        finally:
            running.stop()
