"""Modifications on real Spark: the graph of a running query changes between two epochs, or does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from feeds import Feed
from pyspark.sql import SparkSession

import millstream as ms
from millstream.control.cli import main

pytestmark = pytest.mark.spark


class Sum(ms.Computation):
    total = ms.Value("long", default=0)
    output = "user string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + row.amount)
        yield at.key, self.total.get()


class Half(ms.Computation):
    total = ms.Value("double", default=0.0)
    output = "user string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + row.amount / 2)
        yield at.key, int(self.total.get() * 10)


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "value long, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


class Failing(Count):
    def on_record(self, row: Any, at: Any) -> Any:
        if row.value % 7 == 3:
            raise ValueError("no threes")
        yield from super().on_record(row, at)


class Stuck(Count):
    def on_record(self, row: Any, at: Any) -> Any:
        while row.value % 7 == 3:
            time.sleep(0.1)
        yield from super().on_record(row, at)


class Seen(ms.Computation):
    times = ms.Value("long", default=0)
    output = "user string, times long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.times.set(self.times.get() + 1)
        yield at.key, self.times.get()


class Case:
    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder = spark, folder
        self.feed = Feed(folder / "in", "user string, amount long")
        self.out, self.seen = ms.Memory(), ms.Memory()
        self.feed.add([("a", 1), ("b", 2)])
        self.running = self.start()

    def start(self) -> ms.RunningQuery:
        query = ms.Query("modified")
        query.source("events", self.feed.stream(self.spark)).key_by("user").compute("sums", Sum).sink("out", self.out)
        running = query.start(self.spark, str(self.folder / "store"))
        running.wait_epoch(0, timeout=120)
        return running

    def add(self, *rows: tuple[str, int]) -> None:
        """An epoch with these records; it waits until they have been counted."""
        before = sum(facts.records.get("sums", 0) for facts in self.running.recent)
        self.feed.add(rows)
        deadline = time.monotonic() + 120
        while sum(facts.records.get("sums", 0) for facts in self.running.recent) < before + len(rows):
            assert time.monotonic() < deadline
            self.running.wait_epoch(self.running.epoch + 1, timeout=120)

    def sums(self) -> dict[str, Any]:
        return {row.user: row.total for row in self.running.state("sums", state="total").collect()}


@pytest.fixture
def case(spark: SparkSession, tmp_path: Path) -> Iterator[Case]:
    made = Case(spark, tmp_path)
    yield made
    made.running.stop()


def test_steps_are_replaced_inserted_and_taken_out_while_the_query_runs(case: Case) -> None:
    with case.running.modify(timeout=60) as change:
        change.replace("sums", Half, state={"total": ms.carry(float)})
        change.stream("sums").key_by("user").compute("seen", Seen).sink("seen_out", case.seen)
        told = str(change.preview())
    assert "replace step sums" in told
    assert "sums.total is converted" in told
    assert change.handle.outcome is not None
    assert change.handle.outcome.state == "committed"
    case.add(("a", 1), ("c", 4))
    assert case.sums() == {"a": 1.5, "b": 2.0, "c": 2.0}
    assert {row.user: row.times for row in case.running.state("seen").collect()} == {"a": 1, "c": 1}
    control = ms.connect(str(case.folder / "store"))
    with control.modify(timeout=60) as asked:
        asked.insert("large", keep=lambda batch: [n > 10 for n in batch["amount"].to_pylist()], after="events",
                     before="sums")  # fmt: skip
        asked.remove("seen", cut=True)
    case.running.wait_epoch(case.running.epoch + 1, timeout=60)
    case.feed.add([("a", 1)])
    case.add(("b", 20))
    assert case.sums() == {"a": 1.5, "b": 12.0, "c": 2.0}
    assert [past.text for past in control.history()] == [
        "replace step sums; insert step seen; insert sink seen_out", "insert large; remove seen",
    ]  # fmt: skip
    case.running.stop()
    case.running = case.start()  # the query as it was at first
    assert list(case.running._driver.graph.describe()["maps"]) == ["large"]
    case.add(("b", 20))
    assert case.sums() == {"a": 1.5, "b": 22.0, "c": 2.0}
    for _ in range(4):
        case.add(("c", 20))
    assert case.running.status().upkeep_trouble is None, "what merges old values converts them"


def test_what_fails_or_hangs_in_its_first_epoch_is_rolled_back(spark: SparkSession, tmp_path: Path) -> None:
    query = ms.Query("rolled-back")
    records = query.source("r", lambda read: read.format("rate-micro-batch").option("rowsPerBatch", 20).load())
    records.key_by("value").compute("counts", Count)
    running = query.start(spark, str(tmp_path / "store"), modify_timeout=20)
    try:
        running.wait_epoch(1, timeout=120)
        for computation, told in ((Failing, "ValueError: no threes"), (Stuck, "not over within 20 s")):
            rolled_back = pytest.raises(ms.UserError, match=f"(?s)was rolled back: .*{told}")
            with rolled_back, running.modify(rehearse=False, timeout=120) as change:
                change.replace("counts", computation, state=ms.carry())
        running.wait_epoch(running.epoch + 1, timeout=120)
        assert running._driver.journal.history.version == 0
    finally:
        running.stop()
    counted = [(row.value, row.total) for row in running.state("counts").collect()]
    assert sorted(counted) == [(value, 1) for value in range(20 * (running.epoch + 1))], "each record once"


def test_what_can_be_seen_to_be_wrong_changes_nothing(case: Case) -> None:
    lock = threading.Lock()

    class Unsendable(Sum):
        def __init__(self) -> None:
            self.lock = lock

    epoch = case.running.epoch
    for change_it, told in (
        (lambda change: change.replace("sums", Half), "nothing is said of total"),
        (lambda change: change.replace("sums", Half, state={"total": ms.carry()}), "carried|saying so"),
        (lambda change: change.replace("sums", Unsendable(), state=ms.carry()), "cannot be sent|cannot be stored"),
        (lambda change: change.remove("sums"), "it is read by out"),
        (lambda change: None, "changes nothing"),
    ):
        with pytest.raises(ms.UserError, match=told), case.running.modify(timeout=60) as change:
            change_it(change)
    with pytest.raises(ZeroDivisionError), case.running.modify() as change:
        change.replace("sums", Half, state={"total": ms.carry(float)})
        _ = 1 / 0
    sampled = pytest.raises(ms.UserError, match="aborted: .*fails on a sample of recent input.*amuont")
    with sampled, case.running.modify(timeout=60) as change:
        change.insert("typo", keep=lambda batch: batch["amuont"], after="events", before="sums")
    assert case.running.active
    assert case.running.epoch >= epoch
    case.add(("a", 1))
    assert case.sums() == {"a": 2, "b": 2}
    assert case.running._driver.journal.history.version == 0


RULES = """
import millstream as ms


class Cents(ms.Computation):
    total = ms.Value("decimal(20,2)")
    output = "user string, total decimal(20,2)"

    def on_record(self, row, at):
        self.total.set((self.total.get() or 0) + row.amount)
        yield at.key, self.total.get()


def exactly(total):
    from decimal import Decimal

    return Decimal(total) + Decimal("0.25")
"""


def test_code_and_converters_come_from_files_on_the_command_line(case: Case, tmp_path: Path) -> None:
    rules = tmp_path / "rules.py"
    rules.write_text(RULES)
    store, out = str(case.folder / "store"), str(tmp_path / "parquet")
    arguments = ["--replace", f"sums={rules}:Cents", "--convert", f"total={rules}:exactly", "--remove", "out"]
    result = CliRunner().invoke(main, ["modify", store, *arguments, "--parquet", f"told={out}", "--after", "sums"])
    assert result.exit_code == 0, result.output
    case.add(("a", 1))
    assert case.sums() == {"a": Decimal("2.25"), "b": Decimal("2.25")}, (
        "one was converted to be added to, one to be read"
    )
    assert [tuple(row) for row in case.spark.read.parquet(out).collect()] == [("a", Decimal("2.25"))]
    case.running.stop()
    case.running = case.start()  # as it was at first: what converts the value of b is in the store
    case.add(("b", 1))
    assert case.sums() == {"a": Decimal("2.25"), "b": Decimal("3.25")}
