"""NEXMark on Spark: the SQL generator is the NumPy one, the twins are right, and so is what runs as a stream."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import millstream as ms
from millstream.control.cli import main
from millstream.nexmark import KINDS, QUERIES, Parameters, generate
from millstream.nexmark.events import rows_of
from millstream.nexmark.frames import batch, closed_loop

pytestmark = pytest.mark.spark

DISORDERED = Parameters(events=3000, group=170, delayed=10, delay_us=5_000_000, seed=3, dilation=100)
LONG = Parameters(events=2500, events_per_second=2500, dilation=36 * 3600, group=30, delayed=10, delay_us=10**9)
"""A day and a half, so that all kinds of windows close."""


@pytest.mark.parametrize("kind", KINDS)
def test_the_generator_in_sql_is_the_one_in_numpy_however_it_is_spread(spark: SparkSession, kind: str) -> None:
    found = batch(spark, DISORDERED, kind, tasks=3).toArrow()
    expected = generate(DISORDERED, kind)
    assert found.cast(expected.schema).equals(expected)


def test_the_twin_of_every_query_gives_what_plain_python_gives(spark: SparkSession) -> None:
    frames = {kind: spark.createDataFrame(generate(LONG, kind)).coalesce(1).cache() for kind in KINDS}
    try:
        for query in QUERIES.values():
            found, expected = query.twin(frames).toArrow(), query.expected(LONG)
            assert found.column_names == [column.split()[0] for column in query.output.split(", ")]
            assert expected, query.name
            assert Counter(rows_of(found)) == Counter(expected), query.name
    finally:
        for frame in frames.values():
            frame.unpersist()


def test_a_query_in_a_closed_loop_gives_what_plain_python_gives(spark: SparkSession, tmp_path: Path) -> None:
    query, sink = QUERIES["q4"], ms.Memory()
    given = Parameters(events=2500, events_per_second=2500, dilation=2 * 3600, group=70, delayed=10, delay_us=10**8)
    origins = {kind: closed_loop(given, kind, per_epoch=1000) for kind in query.reads}
    running = query.build(origins, sink).start(spark, str(tmp_path / "store"))
    try:
        running.wait_epoch(2, timeout=120)  # the last of the events
    finally:
        running.stop()
    assert Counter(tuple(row.values()) for row in sink.rows()) == Counter(query.expected(given))
    assert len([table for table in sink.epochs.values() if table.num_rows]) > 1, "results come on the way"
    assert not any(running.status().late.values())


def test_the_command_runs_a_query_rescales_it_and_compares_it_with_its_twin(
    spark: SparkSession, tmp_path: Path
) -> None:
    given = Parameters(events=2500, dilation=43_200)
    options = ["--events", "2500", "--per-epoch", "500", "--dilation", "43200", "--store", str(tmp_path)]
    rescale = ["--slots", "2", "--rescale", "0:3", "--strategy", "all-at-once"]
    ended = CliRunner().invoke(main, ["nexmark", "q5", *options, *rescale, "--json"])
    assert ended.exit_code == 0, ended.output
    told: dict[str, Any] = json.loads(ended.stdout)
    assert told["verified"] is True
    assert told["rows"] == told["expected"] == len(QUERIES["q5"].expected(given))
    assert (told["late"], told["missing"], told["unexpected"]) == (0, [], [])
    [rescaled] = told["rescales"]
    assert rescaled["ended_in"] > rescaled["began_in"] >= 0
    assert told["slots"] == 3
