"""Damage that a start mends, or names: Spark's own checkpoint, and files of the Parquet sink."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from words import Count

pytestmark = pytest.mark.spark


class Life:
    """A word count that takes what is there and ends, again and again."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.feed = Feed(folder / "in", "word string")
        self.checkpoint = folder / "store" / "spark-checkpoint"

    def run(self, retain: int = 8) -> ms.RunningQuery:
        self.feed.add([("a",), ("b",), ("a",)])
        query = ms.Query("mended")
        counts = query.source("words", self.feed.stream(self.spark)).key_by("word").compute("count", Count)
        counts.sink("out", ms.Parquet(str(self.folder / "out")))
        running = query.start(self.spark, str(self.folder / "store"), trigger={"availableNow": True}, retain=retain)
        running.await_termination()
        return running

    def check(self, running: ms.RunningQuery, files: int) -> None:
        assert dict(map(tuple, running.state("count").collect())) == {"a": 2 * files, "b": files}
        rows = self.spark.read.parquet(str(self.folder / "out")).count()
        assert rows == 3 * files


@pytest.fixture(scope="module")
def lived(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What three runs have left."""
    folder = tmp_path_factory.mktemp("lived")
    life = Life(spark, folder)
    for _ in range(3):
        life.run()
    return folder


@pytest.fixture
def life(spark: SparkSession, lived: Path) -> Life:
    """A copy of it, at the same place: Spark's checkpoint names its input by its path."""
    kept = lived.with_name(f"{lived.name}-kept")
    if not kept.exists():
        shutil.copytree(lived, kept)
    shutil.rmtree(lived)
    shutil.copytree(kept, lived)
    return Life(spark, lived)


MENDED = ["metadata", "offsets/1", "offsets/2", "commits/2"]


@pytest.mark.parametrize("how", ["empty", "garbage", "gone", "flipped"])
@pytest.mark.parametrize("name", MENDED)
def test_a_damaged_file_of_the_checkpoint_is_written_again(
    life: Life, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = life.checkpoint / name
    before = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "garbage": b"garbage\n", "flipped": before[:-3] + b"7" + before[-2:]}[how])
    caplog.set_level(logging.WARNING, "millstream")
    life.check(life.run(), 4)
    told = [
        record.getMessage()
        for record in caplog.records
        if "was written again, as the store has it" in record.getMessage()
    ]
    assert all(name in text for text in told)
    assert told or (name, how) == ("commits/2", "gone"), "Spark runs such an epoch again, and it is delivered again"


def test_offsets_of_an_epoch_that_was_never_committed_are_planned_again(life: Life) -> None:
    (life.checkpoint / "offsets" / "3").write_bytes(b"v1\n")
    life.check(life.run(), 4)


def test_what_a_source_has_noted_cannot_be_mended_and_is_explained(life: Life) -> None:
    sources = life.checkpoint / "sources" / "0"
    (sources / "2").write_bytes(b"")
    with pytest.raises(ms.UserError, match="a source has read, and it cannot go on without that") as refused:
        life.run()
    assert "sources/0/2" in str(refused.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", ["foreign", "foreign without an id", "rolled back"])
def test_a_checkpoint_that_is_refused_is_left_as_it_was(life: Life, what: str, tmp_path: Path) -> None:
    """Whoever put the wrong one there may still put both right."""
    other = Life(life.spark, tmp_path / "other")
    for _ in range(2):
        other.run()
    if what == "rolled back":
        for name in ("offsets", "commits"):
            for number in (1, 2):
                (life.checkpoint / name / str(number)).unlink()
    else:
        shutil.rmtree(life.checkpoint)
        shutil.copytree(other.checkpoint, life.checkpoint)
        if what == "foreign without an id":
            (life.checkpoint / "metadata").unlink()
    before = contents(life.checkpoint)
    with pytest.raises(ms.UserError, match="do not belong together|belongs to the Spark query"):
        life.run()
    assert contents(life.checkpoint) == before


def test_a_healthy_checkpoint_is_left_alone(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "millstream")
    life.check(life.run(), 4)
    assert not [record for record in caplog.records if "written again" in record.getMessage()]


def test_a_file_of_the_parquet_sink_that_is_gone_is_named_and_written_again(
    life: Life, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "millstream")
    (life.folder / "out" / "epoch-000000000001.parquet").unlink()
    life.check(life.run(), 4)
    assert "sink 'out': epoch-000000000001.parquet is gone from" in caplog.text
    assert "what it had was written again" in caplog.text


def test_a_file_of_an_epoch_that_is_no_longer_retained_is_named(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    life.run(retain=1)
    (life.folder / "out" / "epoch-000000000000.parquet").unlink()
    caplog.set_level(logging.WARNING, "millstream")
    running = life.run(retain=1)
    assert dict(map(tuple, running.state("count").collect())) == {"a": 10, "b": 5}
    assert "epoch-000000000000.parquet is gone from" in caplog.text
    assert "no longer in the store" in caplog.text
