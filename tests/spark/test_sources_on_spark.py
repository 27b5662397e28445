"""Sources that come and go on real Spark: the stream begins anew with others, and goes on where each of them is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from feeds import Feed
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

import millstream as ms
from millstream.control.cli import main
from millstream.errors import UserError

pytestmark = pytest.mark.spark


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


class Fails(Count):
    def on_record(self, row: Any, at: Any) -> Any:
        raise ValueError("never")


def reader(feed: Feed) -> Callable[[Any], Any]:
    schema, folder = from_arrow_schema(feed.schema), str(feed.folder)
    return lambda read: read.schema(schema).option("maxFilesPerTrigger", 1).parquet(folder)


class Case:
    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.words, self.more = Feed(folder / "words", "word string"), Feed(folder / "more", "word string")
        self.words.add([("a",), ("b",)])
        self.more.add([("x",)])
        self.running = self.start()

    def query(self) -> ms.Query:
        query = ms.Query("sources")
        query.source("words", reader(self.words)).key_by("word").compute("count", Count)
        return query

    def grown(self) -> ms.Query:
        """The query as it is with the second source, as a user would write it down later."""
        query = ms.Query("sources")
        words, more = query.source("words", reader(self.words)), query.source("more", reader(self.more))
        both = words.union(more).map_batches("both", lambda batch: batch, output="word string")
        both.key_by("word").compute("count", Count)
        return query

    def start(self, query: ms.Query | None = None) -> ms.RunningQuery:
        running = (query or self.query()).start(self.spark, str(self.folder / "store"))
        running.wait_epoch(0, timeout=120)
        return running

    def with_more(self, change: Any) -> None:
        change.source("more", reader(self.more))
        change.insert("both", map=lambda batch: batch, output="word string", after=["words", "more"], before="count")

    def counts(self, step: str = "count") -> dict[str, int]:
        return {row.word: row.total for row in self.running.state(step).collect()}

    def until(self, step: str = "count", **expected: int) -> None:
        deadline = time.monotonic() + 60
        while self.counts(step) != expected:
            assert time.monotonic() < deadline, (self.counts(step), expected, self.running.history())
            assert self.running.active, self.running.await_termination()
            time.sleep(0.1)


@pytest.fixture
def case(spark: SparkSession, tmp_path: Path) -> Iterator[Case]:
    made = Case(spark, tmp_path)
    yield made
    if made.running.active:
        made.running.stop()


def test_a_source_comes_goes_and_comes_again_and_restarts_go_on(case: Case) -> None:
    with case.running.modify(timeout=60) as change:
        case.with_more(change)
    case.until(a=1, b=1, x=1)
    case.words.add([("a",)])
    case.more.add([("x",), ("y",)])
    case.until(a=2, b=1, x=2, y=1)
    case.running.stop()
    for number, query in enumerate((case.query(), case.grown()), start=1):
        case.running = case.start(query)
        case.words.add([("c",)])
        case.more.add([("y",)])
        case.until(a=2, b=1, x=2, y=1 + number, c=number)
        case.running.stop()
    case.running = case.start()
    with case.running.modify(timeout=60) as change:
        change.remove("more", cut=True)
    case.words.add([("d",)])
    case.more.add([("z",)])
    case.until(a=2, b=1, x=2, y=3, c=2, d=1)
    with case.running.modify(timeout=60) as change:
        change.source("once-more", reader(case.more)).key_by("word").compute("seen", Count)
    case.until("seen", x=2, y=3, z=1)  # from its beginning
    assert case.counts() == {"a": 2, "b": 1, "x": 2, "y": 3, "c": 2, "d": 1}
    with case.running.modify(timeout=60) as change:
        for name in ("count", "both", "words"):  # the first source goes, and the last is where it was
            change.remove(name, cut=True)
    case.more.add([("z",)])
    case.until("seen", x=2, y=3, z=2)


def test_a_source_that_cannot_be_read_and_code_that_fails_leave_the_stream_as_it_was(case: Case) -> None:
    with (
        pytest.raises(UserError, match="nowhere"),
        case.running.modify(timeout=60) as change,
    ):
        change.source("lost", lambda read: read.schema("word string").parquet(str(case.folder / "nowhere")))
        change.stream("lost").key_by("word").compute("seen", Count)
    case.words.add([("a",)])
    case.until(a=2, b=1)
    with (
        pytest.raises(UserError, match="never"),
        case.running.modify(timeout=60, rehearse=False) as change,
    ):
        change.source("more", reader(case.more)).key_by("word").compute("seen", Fails)
    case.words.add([("a",)])
    case.until(a=3, b=1)
    with case.running.modify(timeout=60) as change:
        case.with_more(change)
    case.until(a=3, b=1, x=1)


def test_a_source_comes_from_another_process(case: Case) -> None:
    code = case.folder / "feeds_of_others.py"
    code.write_text(f"def more(read):\n    return read.schema('word string').parquet({str(case.more.folder)!r})\n")
    store = str(case.folder / "store")
    arguments = ["--source", f"more={code}:more", "--map", f"both={code}:same", "--output", "word string"]
    code.write_text(code.read_text() + "def same(batch):\n    return batch\n")
    where = ["--after", "words", "--after", "more", "--before", "count", "--timeout", "60"]
    result = CliRunner().invoke(main, ["modify", store, *arguments, *where])
    assert result.exit_code == 0, result.output
    case.until(a=1, b=1, x=1)


def test_frames_cannot_come_and_go(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", "word string")
    feed.add([("a",)])
    query = ms.Query("frames")
    query.source("words", feed.stream(spark)).key_by("word").compute("count", Count)
    running = query.start(spark, str(tmp_path / "store"))
    try:
        with pytest.raises(UserError, match="functions of a reader"), running.modify() as change:
            change.source("more", reader(feed)).key_by("word").compute("seen", Count)
    finally:
        running.stop()
