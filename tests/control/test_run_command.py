"""`millstream run`: a query in a file is started, shown, and gone on with; a bad file is an error that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from millstream.control.cli import main

QUERY = """
from pyspark.sql import functions as sql
import millstream as ms

def words(read):
    return read.text({folder!r}).select(sql.explode(sql.split("value", " ")).alias("word"))

def query(spark):
    made = ms.Query("ran")
    made.source("words", words).key_by("word").count("count").sink("out", ms.Parquet({out!r}))
    return made

policy = ms.Adaptive((ms.Balance(),))
nothing = 3
"""


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["run", *words])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("text", "name", "told"),
    [
        (None, "", "there is no file"),
        ("1 / 0", "", "ZeroDivisionError"),
        ("other = 1", "", "has no 'query'; it has no query"),
        ("import millstream as ms\na = ms.Query('a')", ":b", "it has a"),
    ],
)
def test_a_file_without_a_query_is_an_error_that_says_why(
    tmp_path: Path, text: str | None, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.control.cli.find_java", lambda: "")
    monkeypatch.setattr("millstream.spark.session.session", lambda *_, **__: None)
    file = tmp_path / "bad_query.py"
    if text is not None:
        file.write_text(text)
    code, output = run(f"{file}{name}", "--store", str(tmp_path / "store"))
    assert code == 1
    assert told in output


def test_a_dry_run_without_adapting_is_wrong_usage(tmp_path: Path) -> None:
    code, output = run(str(tmp_path / "x.py"), "--store", "s", "--dry-run")
    assert code == 2
    assert "--dry-run is for --adapt" in output


@pytest.mark.spark
def test_a_query_runs_to_its_end_and_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("the mill and the stream\n")
    file = tmp_path / "ran_query.py"
    file.write_text(QUERY.format(folder=str(tmp_path / "in"), out=str(tmp_path / "out")))
    arguments = (str(file), "--store", str(tmp_path / "store"), "--now", "--adapt", "--dry-run")
    code, output = run(*arguments)
    assert code == 0, output
    assert "ran has ended after epoch 0" in output
    assert "after epoch 0: " in output  # what was decided, if only to do nothing
    (tmp_path / "in" / "b.txt").write_text("the wheel\n")
    code, output = run(
        *arguments[:4], "--policy", "policy", "--checkpoint", str(tmp_path / "store" / "spark-checkpoint")
    )
    assert code == 0, output
    assert "ran has ended after epoch 1" in output
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert max(row[-1] for row in rows if row["word"] == "the") == 3
    code, output = run(f"{file}:nothing", "--store", str(tmp_path / "store"))
    assert code == 1
    assert "'nothing' is int, expected a Query" in output
    code, output = run(*arguments[:3], "--policy", "none")
    assert code == 1
    assert "has no 'none'; --policy names a policy" in output
    code, output = run(*arguments[:3], "--policy", "nothing")
    assert code == 1
    assert "adapt=3" in output
