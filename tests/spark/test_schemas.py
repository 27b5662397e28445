"""A schema that changes under a source, on real Spark: nulls where Spark reads nulls, else a stop to be mended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from feeds import Feed
from pyspark.sql import DataFrame, SparkSession

import millstream as ms

pytestmark = pytest.mark.spark

PAIRS = "k long, v long"
MISMATCH = r"(?s)failed 4 times; the last commit is intact.*000003.parquet.*column \[v\]. Expected Spark type bigint"


class Seen(ms.Computation):
    output = "k long, v long, source string"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield row.k, row.v, at.input


def test_files_of_another_schema_read_as_null_or_stop_the_query_and_mended_ones_let_it_go_on(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed, texts = Feed(tmp_path / "in", PAIRS), tmp_path / "texts"
    texts.mkdir()

    def add(**columns: Any) -> Path:
        """A file with columns of its own."""
        feed.add([])
        path = feed.folder / f"{feed.count - 1:06d}.parquet"
        pq.write_table(pa.table(columns), path)
        return path

    def files(schema: str) -> DataFrame:
        return spark.readStream.schema(schema).option("maxFilesPerTrigger", 9).parquet(str(feed.folder))

    out = ms.Memory()

    def start(origin: Any) -> None:
        query = ms.Query("schemas")
        parquet = query.source("parquet", origin)
        json = query.source("json", lambda read: read.schema(PAIRS).json(str(texts)))
        both = query.compute("seen", Seen, parquet=parquet.key_by("k"), json=json.key_by("k"))
        both.sink("out", out)
        query.start(spark, store=str(tmp_path / "store"), slots=2, trigger={"availableNow": True}).await_termination()

    feed.add([(1, 10)])
    add(k=[2])
    add(k=[3], v=[30], more=["x"])
    (texts / "1.json").write_text('{"k": 4, "v": "many"}\n{"k": 5}\n{"k": 6, "v": 60, "more": 1}\n')
    start(files(PAIRS))
    found = {(row["k"], row["v"], row["source"]) for row in out.rows()}
    assert found == {
        (1, 10, "parquet"),
        (2, None, "parquet"),
        (3, 30, "parquet"),
        (4, None, "json"),
        (5, None, "json"),
        (6, 60, "json"),
    }
    bad = add(k=[7], v=["many"])
    with pytest.raises(ms.UserError, match=MISMATCH):
        start(files(PAIRS))
    pq.write_table(pa.table({"k": [7], "v": [70]}), bad)
    start(files(PAIRS))
    assert [(row["k"], row["v"]) for row in out.rows()][-1] == (7, 70)
    with pytest.raises(
        ms.UserError, match="sources.parquet.schema: was 'k BIGINT, v BIGINT', now 'k BIGINT, v STRING'"
    ):
        start(files("k long, v string"))
