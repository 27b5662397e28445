"""Queries on real Spark: results against Spark's own groupBy, restarts, sinks, and everything that is refused."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import shutil
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from feeds import Feed
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import millstream as ms
from jobs import Total, TotalBatch
from millstream.engine.spec import Spec
from millstream.model.graph import Graph
from millstream.spark.session import check_session, pause_trouble
from millstream.spark.tasks import store_of
from millstream.store.journal import Journal
from millstream.store.objects import open_store

pytestmark = pytest.mark.spark
NOW = {"availableNow": True}
EVENTS = "user string, amount long"


class Count(ms.Computation):
    total = ms.Value("long", default=0)

    def on_batch(self, batch: ms.Batch) -> None:
        self.total.write(batch, self.total.read(batch) + batch.count())


class CountRecords(ms.Computation):
    total = ms.Value("long", default=0)

    def on_record(self, row: Any, at: ms.At) -> None:
        self.total.set(self.total.get() + 1)


class Basket(ms.Computation):
    """State of every shape: struct, array, and any Python object."""

    stats = ms.Value("struct<n: long, biggest: double>")
    items = ms.Value("array<string>", default=[])
    seen = ms.Value(object, default=set())
    output = "user string, n long, items array<string>, best struct<n: long, biggest: double>"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        stats = self.stats.get() or {"n": 0, "biggest": 0.0}
        stats = {"n": stats["n"] + 1, "biggest": max(stats["biggest"], float(row.amount))}
        self.stats.set(stats)
        self.items.set([*self.items.get(), str(row.amount)])
        self.seen.set(self.seen.get() | {row.amount})
        yield {"user": at.key, "n": len(self.seen.get()), "items": self.items.get(), "best": stats}


class Fails(ms.Computation):
    total = ms.Value("long", default=0)

    def on_record(self, row: Any, at: ms.At) -> None:
        if row.amount < 0:
            raise ValueError(f"cannot take {row.amount}")
        self.total.set(self.total.get() + row.amount)


def run_all(query: ms.Query, spark: SparkSession, store: Path, **options: Any) -> ms.RunningQuery:
    running = query.start(spark, store=str(store), trigger=NOW, **options)
    running.await_termination()
    return running


def rows(frame: DataFrame) -> Counter[str]:
    return Counter(str(tuple(row)) for row in frame.collect())


def test_counts_by_every_scalar_type_and_by_tuples_are_those_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    """One query, one step per key type, side by side; Spark's groupBy is the oracle for each."""
    nan = float("nan")
    columns: dict[str, list[Any]] = {
        "boolean": [True, False, None],
        "byte": [1, -128, None, 127],
        "short": [300, -1, None],
        "int": [2**31 - 1, 0, None, -1],
        "long": [2**63 - 1, -(2**63), None, 0, 7],
        "float": [0.0, -0.0, nan, None, 1.5],
        "double": [0.0, -0.0, nan, None, float("inf")],
        "decimal(20,2)": [Decimal("1.10"), Decimal("-99999999999999.99"), None],
        "string": ["", "a", None, "Mühle", "a" * 100],
        "binary": [b"", b"\0", None, b"\xff\x00"],
        "date": [dt.date(1969, 12, 31), dt.date(2026, 11, 15), None],
        "timestamp": [dt.datetime(1969, 1, 1, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, 1, tzinfo=dt.UTC), None],
        "timestamp_ntz": [dt.datetime(1969, 1, 1), dt.datetime(2026, 1, 1), None],
        "interval day to second": [dt.timedelta(0), dt.timedelta(days=-3, microseconds=5), None],
    }
    names = [f"c{i}" for i in range(len(columns))]
    feed = Feed(tmp_path / "in", ", ".join(f"{n} {t}" for n, t in zip(names, columns, strict=True)))
    for epoch in range(3):
        feed.add([[values[(row * 7 + epoch) % len(values)] for values in columns.values()] for row in range(60)])
    query = ms.Query("types")
    source = query.source("events", feed.stream(spark))
    for name in names:
        source.key_by(name).compute(f"by_{name}", Count)
    source.key_by("c4", "c8", "c0").compute("by_tuple", Count)
    source.key_by("c5", "c13").compute("by_records", CountRecords)
    running = run_all(query, spark, tmp_path / "store", slots=3)
    data = feed.batch(spark)
    for name in names:
        expected = data.groupBy(name).count()
        assert rows(running.state(f"by_{name}")) == rows(expected), f"keyed by {columns.keys()}"
    assert rows(running.state("by_tuple")) == rows(data.groupBy("c4", "c8", "c0").count())
    assert rows(running.state("by_records")) == rows(data.groupBy("c5", "c13").count())


def test_state_may_be_structs_arrays_and_python_objects(spark: SparkSession, tmp_path: Path) -> None:
    feed, out = Feed(tmp_path / "in", EVENTS), ms.Memory()
    feed.add([("anna", 3), ("bert", 5), ("anna", 3)])
    feed.add([("anna", 9), (None, 1)])
    query = ms.Query("baskets")
    query.source("events", feed.stream(spark)).key_by("user").compute("basket", Basket).sink("out", out)
    running = run_all(query, spark, tmp_path / "store")
    by_user = {row["user"]: row for row in out.rows()}
    assert by_user["anna"] == {
        "user": "anna",
        "n": 2,
        "items": ["3", "3", "9"],
        "best": {"n": 3, "biggest": 9.0},
    }
    assert by_user[None]["items"] == ["1"]
    items = {row[0]: row[1] for row in running.state("basket", state="items").collect()}
    assert items == {"anna": ["3", "3", "9"], "bert": ["5"], None: ["1"]}
    seen = {row[0]: pickle.loads(row[1]) for row in running.state("basket", state="seen").collect()}
    assert seen == {"anna": {3, 9}, "bert": {5}, None: {1}}


def test_several_sources_are_applied_in_their_order_and_a_restart_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    first, second = Feed(tmp_path / "a", EVENTS), Feed(tmp_path / "b", "user string, clicks int, page string")
    first.add([("anna", 1), ("bert", 2)])
    second.add([("anna", 10, "x"), (None, 1, "y")])

    def build() -> tuple[ms.Query, ms.Memory]:
        query, out = ms.Query("two"), ms.Memory()
        query.source("orders", first.stream(spark)).key_by("user").compute("orders_total", Total).sink("out", out)
        query.source("clicks", second.stream(spark)).key_by("user").compute("clicks_count", Count)
        return query, out

    query, _ = build()
    run_all(query, spark, tmp_path / "store")
    first.add([("anna", 4)])
    second.add([("anna", 1, "z")])
    query, out = build()
    running = run_all(query, spark, tmp_path / "store")
    assert out.rows() == [{"user": "anna", "total": 5, "before": 1}]
    assert {r[0]: r[1] for r in running.state("clicks_count").collect()} == {"anna": 2, None: 1}
    assert running.status().records == {"orders_total": 1, "clicks_count": 1}


def test_epochs_in_a_parquet_sink_appear_once_and_whole(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    for epoch in range(4):
        feed.add([(f"u{i % 5}", i) for i in range(20 * epoch)])  # the first epoch has no records, so no file

    def build() -> ms.Query:
        query = ms.Query("sunk")
        sums = query.source("events", feed.stream(spark)).key_by("user").compute("sums", TotalBatch)
        sums.sink("files", ms.Parquet(str(tmp_path / "out")))
        return query

    run_all(build(), spark, tmp_path / "store")
    files = sorted(p.name for p in (tmp_path / "out").glob("*.parquet"))
    assert files == [f"epoch-{n:012d}.parquet" for n in (1, 2, 3)]
    plain = rows(spark.read.parquet(str(tmp_path / "out")))
    bytes_before = {name: (tmp_path / "out" / name).read_bytes() for name in files}
    lines = [json.loads(p.read_text()) for p in sorted((tmp_path / "out" / "_manifest").iterdir())]
    assert [line["file"] for line in lines] == files
    assert sum(line["rows"] for line in lines) == plain.total()
    # Spark forgets that it finished the last epoch: it is offered, and delivered, again.
    last = max((tmp_path / "store" / "spark-checkpoint" / "commits").glob("[0-9]*"), key=lambda p: int(p.name))
    last.unlink()
    for crc in last.parent.glob(f".{last.name}.crc"):
        crc.unlink()
    (tmp_path / "out" / "_manifest" / f"{3:012d}.json").unlink()  # as if it died between the file and its line
    run_all(build(), spark, tmp_path / "store")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == bytes_before
    assert [json.loads(p.read_text()) for p in sorted((tmp_path / "out" / "_manifest").iterdir())] == lines
    assert rows(spark.read.parquet(str(tmp_path / "out"))) == plain
    # What a process that died in the middle of a delivery leaves behind is not read.
    (tmp_path / "out" / "_staging").mkdir(exist_ok=True)
    (tmp_path / "out" / "_staging" / "half").write_bytes(b"PAR1 and not much more")
    assert rows(spark.read.parquet(str(tmp_path / "out"))) == plain
    # The folder of another query is not overwritten, and nothing is dropped in silence.
    other = Feed(tmp_path / "other", EVENTS)
    other.add([])
    other.add([("someone else", 1)])
    query = ms.Query("reused")
    sums = query.source("events", other.stream(spark)).key_by("user").compute("sums", TotalBatch)
    sums.sink("files", ms.Parquet(str(tmp_path / "out")))
    with pytest.raises(ms.UserError, match="exists with other content"):
        run_all(query, spark, tmp_path / "store2")


def test_a_foreach_sink_gets_the_same_epoch_and_rows_again(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1), ("bert", 2)])
    feed.add([("anna", 3)])
    calls: list[tuple[int, list[tuple[Any, ...]]]] = []
    fail = [True]

    def write(frame: DataFrame, epoch: int) -> None:
        calls.append((epoch, [tuple(row) for row in frame.collect()]))
        if epoch == 1 and fail[0]:
            raise RuntimeError("the database is away")

    def build() -> ms.Query:
        query = ms.Query("each")
        query.source("events", feed.stream(spark)).key_by("user").compute("sums", Total).sink(
            "db", ms.ForeachBatch(write)
        )
        return query

    with pytest.raises(
        ms.SinkError, match="'db' failed in epoch 1: RuntimeError: the database is away.*delivered again"
    ):
        run_all(build(), spark, tmp_path / "store")
    fail[0] = False
    run_all(build(), spark, tmp_path / "store")
    assert [epoch for epoch, _ in calls][:3] == [0, 1, 1]
    assert all(not rows for _, rows in calls[3:])  # the ticker's, if it has ticked meanwhile
    assert calls[1] == calls[2]
    assert calls[2][1] == [("anna", 4, 1)]


def test_a_raise_in_user_code_stops_the_query_and_mended_code_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])
    feed.add([("bert", 2), ("anna", -4), ("carl", 1)])

    class Mended(Fails):
        def on_record(self, row: Any, at: ms.At) -> None:
            self.total.set(self.total.get() + abs(row.amount))

    def build(kind: type[ms.Computation]) -> ms.Query:
        query = ms.Query("fails")
        query.source("events", feed.stream(spark)).key_by("user").compute("sums", kind)
        return query

    with pytest.raises(ms.StepError) as caught:
        run_all(build(Fails), spark, tmp_path / "store")
    error = caught.value
    assert (error.step, error.epoch, error.key) == ("sums", 1, "'anna'")
    assert "amount=-4" in error.record
    assert "cannot take -4" in str(error)
    running = run_all(build(Mended), spark, tmp_path / "store")
    assert {r[0]: r[1] for r in running.state("sums").collect()} == {"anna": 5, "bert": 2, "carl": 1}


def test_a_stop_comes_between_epochs_and_past_epochs_are_readable(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    for epoch in range(5):
        feed.add([("anna", epoch), ("bert", 1)])
    query = ms.Query("stops")
    query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
    running = query.start(spark, store=str(tmp_path / "store"))
    running.wait_epoch(2, timeout=120)
    running.stop()
    assert not running.active
    running.await_termination()
    running.stop()  # twice does not matter
    at_2 = {r[0]: r[1] for r in running.state("count", epoch=2).collect()}
    assert at_2 == {"anna": 3, "bert": 3}
    assert {r[0]: r[1] for r in running.state("count", epoch=0).collect()} == {"anna": 1, "bert": 1}
    with pytest.raises(ms.UserError, match="epoch 99 is not retained"):
        running.state("count", epoch=99)
    with pytest.raises(ms.UserError, match="no step 'cuont'; the query has count"):
        running.state("cuont")


def test_an_idle_query_ticks(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])
    query = ms.Query("idle")
    query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
    running = query.start(spark, store=str(tmp_path / "store"))
    running.wait_epoch(3, timeout=120)  # one file only: the other epochs are the ticker's
    running.stop()
    assert {r[0]: r[1] for r in running.state("count").collect()} == {"anna": 1}


def test_a_source_may_be_a_function_of_a_named_reader(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])
    feed.add([("anna", 2)])

    def build() -> ms.Query:
        query = ms.Query("named")
        query.source(
            "events", lambda read: read.schema(EVENTS).option("maxFilesPerTrigger", 1).parquet(str(feed.folder))
        ).key_by("user").compute("sums", TotalBatch)
        return query

    run_all(build(), spark, tmp_path / "store")
    feed.add([("anna", 5)])
    running = run_all(build(), spark, tmp_path / "store")
    assert running.epoch >= 2
    assert {r[0]: r[1] for r in running.state("sums").collect()} == {"anna": 8}
    assert (tmp_path / "store" / "spark-checkpoint" / "sources" / "events").exists()


def test_a_missing_or_foreign_spark_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])

    def build() -> ms.Query:
        query = ms.Query("bound")
        query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
        return query

    run_all(build(), spark, tmp_path / "one")
    run_all(build(), spark, tmp_path / "two")
    mine, kept = tmp_path / "one" / "spark-checkpoint", tmp_path / "kept"
    mine.rename(kept)
    with pytest.raises(ms.UserError, match="belongs to the Spark query .*, but its checkpoint is missing"):
        run_all(build(), spark, tmp_path / "one")
    shutil.copytree(tmp_path / "two" / "spark-checkpoint", mine)
    with pytest.raises(ms.UserError, match="but its checkpoint belongs to the Spark query"):
        run_all(build(), spark, tmp_path / "one")
    shutil.rmtree(mine)
    kept.rename(mine)
    feed.add([("anna", 1)])
    running = run_all(build(), spark, tmp_path / "one")
    assert {r[0]: r[1] for r in running.state("count").collect()} == {"anna": 2}
    # a new store with an old checkpoint would miss the epochs before
    with pytest.raises(ms.UserError, match="has finished epoch 1, but the store's last commit is epoch -1"):
        run_all(build(), spark, tmp_path / "three", checkpoint=str(mine))


def test_what_cannot_run_is_refused_before_the_first_epoch(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", "user string, amount long, tags map<string,long>")
    store = str(tmp_path / "store")

    def query(key: str = "user", frame: Any = None) -> ms.Query:
        built = ms.Query("wrong")
        built.source("events", feed.stream(spark) if frame is None else frame).key_by(key).compute("count", Count)
        return built

    def refuse(match: str, built: ms.Query, **options: Any) -> None:
        with pytest.raises(ms.UserError, match=match):
            built.start(spark, **{"store": store, **options})

    refuse("step 'count': no column 'usr' to key by; the input has user, amount, tags", query("usr"))
    refuse("step 'count': column 'tags' cannot be a key", query("tags"))
    refuse("is a batch DataFrame", query(frame=spark.range(3)))
    refuse("expected a streaming DataFrame or a function", query(frame="events"))
    unbounded = spark.readStream.schema(EVENTS).parquet(str(feed.folder))
    refuse("has no limit on how much one epoch reads", query(frame=unbounded))
    collated = feed.stream(spark).selectExpr("collate(user, 'UTF8_LCASE') as user", "amount")
    refuse("source 'events'.*user.*collat", query(frame=collated))
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    refuse("useLargeVarTypes is true, expected false", query())
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "false")
    refuse("trigger=.*'banana'", query(), trigger={"processingTime": "banana"})
    refuse("slots=0", query(), slots=0)
    refuse("bins=1000: give a power of two", query(), bins=1000)
    refuse("a memory store is seen by one process only", query(), store="memory://")
    refuse("cannot use .* as a store", query(), store="/proc/nowhere")
    refuse("retain=0", query(), retain=0)
    with pytest.raises(ms.UserError, match="expected a SparkSession"):
        query().start("local[2]", store=store)  # type: ignore[arg-type]
    assert not (tmp_path / "store" / "journal").exists(), "a refused start writes no journal entry"


def test_a_driver_whose_store_is_claimed_by_another_stops_and_says_so(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])

    def build() -> ms.Query:
        query = ms.Query("rivals")
        query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
        return query

    running = build().start(spark, store=str(tmp_path / "store"))
    running.wait_epoch(0, timeout=120)
    with pytest.raises(ms.UserError, match="a query named 'rivals' already runs here"):
        build().start(spark, store=str(tmp_path / "store"))
    rival = Journal.open(open_store(str(tmp_path / "store")))
    rival.claim()
    with pytest.raises(ms.Fenced, match="has been replaced: generation 2"):
        running.await_termination(timeout=120)
    again = run_all(build(), spark, tmp_path / "store")
    assert {r[0]: r[1] for r in again.state("count").collect()} == {"anna": 1}


def test_code_that_workers_cannot_load_is_refused_with_its_step(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that only the driver can import."""
    (tmp_path / "only_here.py").write_text(
        "import millstream as ms\n\n\n"
        "class Count(ms.Computation):\n    total = ms.Value('long')\n    def on_batch(self, batch): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    query = ms.Query("elsewhere")
    stream = Feed(tmp_path / "in", EVENTS).stream(spark)
    query.source("events", stream).key_by("user").compute("count", only_here.Count)
    with pytest.raises(
        ms.UserError, match=r"computation of step 'count' cannot be loaded .*No module named 'only_here'"
    ):
        query.start(spark, store=str(tmp_path / "store"))
    assert not (tmp_path / "store" / "journal").exists()


@pytest.mark.parametrize("log", ["offsets", "sources"])
def test_a_stream_ended_by_an_older_driver_in_sparks_log_is_started_again(
    log: str, spark: SparkSession, tmp_path: Path
) -> None:
    """The entry that Spark is about to write is there already, as from a driver that has yet to find itself fenced."""
    feed, checkpoint = Feed(tmp_path / "in", EVENTS), tmp_path / "store" / "spark-checkpoint"
    feed.add([("anna", 1)])

    def observe(moment: str, epoch: int) -> None:
        if (moment, epoch) != ("delivered", 2):
            return
        feed.add([("anna", 1), ("bert", 1)])
        if log == "offsets":
            shutil.copy(checkpoint / "offsets" / "2", checkpoint / "offsets" / "3")
        else:
            version, entry = (checkpoint / "sources" / "0" / "0").read_text().splitlines()
            changed = json.loads(entry)
            changed["path"] = changed["path"].replace("000000.parquet", "000001.parquet")
            changed["batchId"] = 1
            (checkpoint / "sources" / "0" / "1").write_text(f"{version}\n{json.dumps(changed)}")

    query = ms.Query("disturbed")
    query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
    running = query.start(spark, store=str(tmp_path / "store"), observe=observe)
    running.wait_epoch(6, timeout=120)
    assert running.active
    running.stop()
    assert {r[0]: r[1] for r in running.state("count").collect()} == {"anna": 2, "bert": 1}


def test_starting_a_query_leaves_the_settings_of_the_session_alone(spark: SparkSession, tmp_path: Path) -> None:
    def settings() -> dict[str, str]:
        return dict(spark.conf.getAll)

    feed, before = Feed(tmp_path / "in", EVENTS), settings()
    feed.add([("anna", 1)])
    feed.add([("anna", 1)])
    query = ms.Query("polite")
    query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
    run_all(query, spark, tmp_path / "store")
    assert settings() == before


def test_two_queries_that_start_in_one_session_keep_their_limits_and_its_settings(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed, before = Feed(tmp_path / "in", EVENTS), dict(spark.conf.getAll)
    for _ in range(4):
        feed.add([("anna", 1)])
    running = []
    for name in ("first", "second", "third"):
        query = ms.Query(name)
        query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
        running.append(query.start(spark, store=str(tmp_path / name), trigger=NOW))
    for each in running:
        each.await_termination()
        assert each.epoch >= 3, "each file is an epoch of its own"
        assert [tuple(row) for row in each.state("count").collect()] == [("anna", 4)]
    assert dict(spark.conf.getAll) == before


def test_a_query_of_function_sources_is_of_the_users_session(spark: SparkSession, tmp_path: Path) -> None:
    """Not started twice, with the user's settings, and with state that the user's SQL can read."""
    feed, zones = Feed(tmp_path / "in", EVENTS), []
    feed.add([("anna", 1)])

    def build() -> ms.Query:
        def read(reader: Any) -> DataFrame:
            zones.append(reader._spark.conf.get("spark.sql.session.timeZone"))
            frame: DataFrame = reader.schema(EVENTS).option("maxFilesPerTrigger", 1).parquet(str(feed.folder))
            return frame

        query = ms.Query("ours")
        query.source("events", read).key_by("user").compute("count", Count)
        return query

    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        running = build().start(spark, store=str(tmp_path / "store"))
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert zones == ["Asia/Tokyo"]
    running.wait_epoch(0, timeout=120)
    with pytest.raises(ms.UserError, match="a query named 'ours' already runs here; stop it first"):
        build().start(spark, store=str(tmp_path / "other"))
    running.stop()
    running.state("count").createOrReplaceTempView("counts")
    assert [tuple(row) for row in spark.sql("from counts").collect()] == [("anna", 1)]
    spark.catalog.dropTempView("counts")


def test_wait_epoch_waits_for_an_epoch_that_is_delivered_again(spark: SparkSession, tmp_path: Path) -> None:
    feed, away, delivered = Feed(tmp_path / "in", EVENTS), threading.Event(), threading.Event()
    feed.add([("anna", 1)])

    def write(frame: DataFrame, epoch: int) -> None:
        if not away.is_set():
            raise RuntimeError("the database is away")
        delivered.wait(60)

    def build() -> ms.Query:
        query = ms.Query("again")
        sums = query.source("events", feed.stream(spark)).key_by("user").compute("sums", Total)
        sums.sink("db", ms.ForeachBatch(write))
        return query

    with pytest.raises(ms.SinkError):
        run_all(build(), spark, tmp_path / "store")
    away.set()
    running = build().start(spark, store=str(tmp_path / "store"))
    assert running.epoch == 0
    with pytest.raises(TimeoutError, match="epoch 0 was not reached within 0.5 s"):
        running.wait_epoch(0, timeout=0.5)
    delivered.set()
    assert running.wait_epoch(0, timeout=60) >= 0
    running.stop()


def test_a_driver_that_was_replaced_says_so_whatever_ended_it(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])

    def write(frame: DataFrame, epoch: int) -> None:
        Journal.open(open_store(str(tmp_path / "store"))).claim()
        raise RuntimeError("what was to be delivered is gone")

    query = ms.Query("replaced")
    query.source("events", feed.stream(spark)).key_by("user").compute("sums", Total).sink("db", ms.ForeachBatch(write))
    with pytest.raises(ms.Fenced, match="has been replaced: generation 2") as caught:
        run_all(query, spark, tmp_path / "store")
    assert isinstance(caught.value.__cause__, ms.SinkError)


def test_a_path_may_have_any_character(spark: SparkSession, tmp_path: Path) -> None:
    feed, store = Feed(tmp_path / "in", EVENTS), tmp_path / "a#b c?d%20e"
    feed.add([("anna", 1)])
    for expected in (1, 2):
        query = ms.Query("odd")
        query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
        running = run_all(query, spark, store)
        assert [tuple(row) for row in running.state("count").collect()] == [("anna", expected)]
        feed.add([("anna", 1)])


def test_a_stream_that_is_ended_again_and_again_is_not_started_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for Spark's stream: that two writers collide nine times is hard to arrange."""
    started: list[int] = []

    class Stream:
        def awaitTermination(self) -> None:  # noqa: N802
            raise RuntimeError("[CONCURRENT_STREAM_LOG_UPDATE] ...")

    running = object.__new__(ms.RunningQuery)
    running._error, running._stopping, running._between = None, False, threading.Condition()
    running._reopening, running._driver = False, SimpleNamespace(not_opened=lambda reason: False)  # type: ignore[assignment]
    running._spark_query = Stream()  # type: ignore[assignment]
    monkeypatch.setattr(ms.RunningQuery, "epoch", 5)
    monkeypatch.setattr(ms.RunningQuery, "_cause", lambda self, error: error)
    monkeypatch.setattr(ms.RunningQuery, "_open_sources", lambda self: None)
    monkeypatch.setattr(ms.RunningQuery, "_start_stream", lambda self, writer: (started.append(1), Stream())[1])
    running._watch()
    assert len(started) == 8


def test_a_state_that_is_read_too_late_is_no_longer_retained_rather_than_damaged(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.engine.upkeep.GARBAGE_EVERY", 2)
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])

    def build() -> ms.Query:
        query = ms.Query("late")
        query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
        return query

    cache = tmp_path / "cache"
    early = run_all(build(), spark, tmp_path / "store", retain=1, cache_dir=str(cache)).state("count")
    for _ in range(6):
        feed.add([("anna", 1)])
    running = run_all(build(), spark, tmp_path / "store", retain=1, cache_dir=str(cache))
    assert running.status().upkeep_trouble is None
    shutil.rmtree(cache)  # which may still have it
    with pytest.raises(PySparkException, match=r"the state of epoch 0 is no longer retained: epochs from \d+ on are"):
        early.collect()
    assert [tuple(row) for row in running.state("count").collect()] == [("anna", 7)]


def test_wait_epoch_raises_what_a_sink_raised(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])

    def write(frame: DataFrame, epoch: int) -> None:
        raise RuntimeError("the database is away")

    query = ms.Query("waits")
    query.source("events", feed.stream(spark)).key_by("user").compute("sums", Total).sink("db", ms.ForeachBatch(write))
    running = query.start(spark, store=str(tmp_path / "store"))
    with pytest.raises(ms.SinkError, match="'db' failed in epoch 0: RuntimeError: the database is away"):
        running.wait_epoch(0, timeout=120)


def test_a_stop_from_inside_an_epoch_is_refused_rather_than_waiting_for_itself(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed, caught = Feed(tmp_path / "in", EVENTS), []
    feed.add([("anna", 1)])
    started = threading.Event()

    def write(frame: DataFrame, epoch: int) -> None:
        started.wait(60)
        try:
            running.stop()
        except ms.UserError as error:
            caught.append(str(error))

    query = ms.Query("inside")
    query.source("events", feed.stream(spark)).key_by("user").compute("sums", Total).sink("db", ms.ForeachBatch(write))
    running = query.start(spark, store=str(tmp_path / "store"))
    started.set()
    running.wait_epoch(0, timeout=120)
    running.stop()
    assert "called from inside an epoch" in caught[0]


def test_a_file_of_an_epoch_written_by_another_arrow_release_is_taken_for_what_it_is(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The driver died between file and manifest, and the next one would write other bytes for the same rows."""
    feed, out = Feed(tmp_path / "in", EVENTS), tmp_path / "out"
    feed.add([("anna", 1), ("bert", 2)])

    def build() -> ms.Query:
        query = ms.Query("released")
        sums = query.source("events", feed.stream(spark)).key_by("user").compute("sums", Total)
        sums.sink("files", ms.Parquet(str(out)))
        return query

    run_all(build(), spark, tmp_path / "store")
    [file] = out.glob("*.parquet")
    table, ours = pq.read_table(file), file.read_bytes()
    pq.write_table(table, file, compression="zstd")
    other = file.read_bytes()
    assert other != ours
    shutil.rmtree(out / "_manifest")
    (tmp_path / "store" / "spark-checkpoint" / "commits" / "0").unlink()  # so that Spark offers the epoch again
    run_all(build(), spark, tmp_path / "store")
    assert file.read_bytes() == other
    [line] = (out / "_manifest").iterdir()
    assert json.loads(line.read_bytes())["rows"] == 2


def test_dynamic_allocation_that_takes_executors_away_between_epochs_is_told_of(spark: SparkSession) -> None:
    allocated = {"spark.dynamicAllocation.enabled": "true"}
    hourly, quick = {"processingTime": "1 hour"}, {"processingTime": "5 seconds"}
    assert "1 hour apart" in pause_trouble(spark, allocated, hourly)
    longer = {**allocated, "spark.dynamicAllocation.executorIdleTimeout": "2h"}
    assert [
        pause_trouble(spark, *each) for each in (({}, hourly), (allocated, quick), (allocated, {}), (longer, hourly))
    ] == [""] * 4


def test_a_connect_session_is_refused() -> None:
    """Not a real Connect session, which needs packages that this project does not: a stand-in of that module."""
    stand_in = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(ms.UserError, match="Spark Connect session.*Use a classic session"):
        check_session(stand_in)


def test_a_start_says_which_versions_of_spark_work(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pyspark.__version__", "4.1.4")
    query = ms.Query("old")
    query.source("events", Feed(tmp_path / "in", EVENTS).stream(spark)).key_by("user").compute("count", Count)
    with pytest.raises(ms.UserError, match=r"found PySpark 4.1.4; Millstream runs on PySpark 4.3"):
        query.start(spark, str(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_a_damaged_segment_stops_a_query_on_spark_with_its_name(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "in", EVENTS)
    feed.add([("anna", 1)])

    def build() -> ms.Query:
        query = ms.Query("damaged")
        query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
        return query

    run_all(build(), spark, tmp_path / "store")
    [segment] = (tmp_path / "store" / "segments").rglob("*.arrow")
    original = segment.read_bytes()
    segment.unlink()
    segment.write_bytes(original[:-200] + bytes([original[-200] ^ 1]) + original[-199:])  # a new file: none is mapped
    feed.add([("anna", 1)])
    with pytest.raises(ms.DamagedObject, match=segment.name):  # the workers' own cache has the segment as it was
        run_all(build(), spark, tmp_path / "store", cache_dir=str(tmp_path / "cold"))
    segment.write_bytes(original)
    running = run_all(build(), spark, tmp_path / "store")
    assert {r[0]: r[1] for r in running.state("count").collect()} == {"anna": 2}


def test_whatever_is_damaged_in_a_store_is_named_and_what_is_put_back_goes_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of object that a restart reads, cut short, with a bit flipped, and removed; each on its own copy.

    It is put back after one of the three, another one for each object.
    """
    monkeypatch.setattr("millstream.store.journal.SNAPSHOT_EVERY", 8)
    feed, whole = Feed(tmp_path / "in", EVENTS), tmp_path / "whole"
    for _ in range(7):
        feed.add([("anna", 1), ("bert", 1)])

    def build() -> ms.Query:
        query = ms.Query("damaged")
        query.source("events", feed.stream(spark)).key_by("user").compute("count", Count)
        return query

    history = run_all(build(), spark, whole)._driver.journal
    feed.add([("anna", 1)])
    snapshot = max(path.name for path in (whole / "snapshots").iterdir())
    named, last = int(snapshot.split("-")[0]), history.next_number - 1
    assert named < last - 1
    damaged = "stored object '{}' is damaged"
    cases = {
        "format": {"remove": damaged},
        f"journal/{named:020d}": {"remove": damaged},
        f"journal/{last - 1:020d}": {"remove": damaged},
        f"journal/{last:020d}": {"remove": "Spark's checkpoint has finished epoch 6, but the store's last commit is"},
        f"snapshots/{snapshot}": dict.fromkeys(("cut", "flip", "remove"), "goes on"),
        next(iter(history.history.manifest.segments())).name: {"remove": damaged},
    }
    for number, (name, expected) in enumerate(cases.items()):
        for place, kind in enumerate(("cut", "flip", "remove")):
            broken = tmp_path / kind / name  # a place of its own: workers may have mapped what was whole
            shutil.copytree(whole, broken)
            target, original = broken / name, (whole / name).read_bytes()
            target.unlink()
            if kind != "remove":
                middle = len(original) // 2
                flipped = original[:middle] + bytes([original[middle] ^ 4]) + original[middle + 1 :]
                target.write_bytes(original[:middle] if kind == "cut" else flipped)
            match = expected.get(kind, damaged).format(name)
            if "goes on" not in match:
                with pytest.raises(ms.UserError, match=match):
                    run_all(build(), spark, broken, cache_dir=str(broken / "cache"))  # what ran before has the objects
                if place != number % 3:
                    continue
                target.write_bytes(original)
            running = run_all(build(), spark, broken, cache_dir=str(broken / "cache"))
            found = {row[0]: row[1] for row in running.state("count").collect()}
            assert found == {"anna": 8, "bert": 7}, f"{kind} {name}"


def test_a_sink_may_hold_what_cannot_be_sent_to_workers(spark: SparkSession, tmp_path: Path) -> None:
    feed, lock, seen = Feed(tmp_path / "in", EVENTS), threading.Lock(), []
    feed.add([("anna", 1)])

    def write(frame: DataFrame, epoch: int) -> None:
        with lock:
            seen.extend(frame.collect())

    query = ms.Query("locked")
    totals = query.source("events", feed.stream(spark)).key_by("user").compute("sums", Total)
    totals.sink("each", ms.ForeachBatch(write))
    run_all(query, spark, tmp_path / "store")
    assert [tuple(row) for row in seen] == [("anna", 1, None)]


def test_another_store_in_the_place_of_the_drivers_is_not_written_to(tmp_path: Path) -> None:
    """What a worker does that joined later and sees an empty directory where the store should be."""
    spec = Spec(Graph("q", (), (), (), (), {}), "the driver's", str(tmp_path / "nothing"), {}, {})
    with pytest.raises(ms.StoreUnavailable, match="is not there here; mount the same directory"):
        store_of(spec)
    Journal.open(open_store(str(tmp_path / "other")))
    with pytest.raises(ms.StoreUnavailable, match="is another store on this worker"):
        store_of(replace(spec, store_uri=str(tmp_path / "other")))
