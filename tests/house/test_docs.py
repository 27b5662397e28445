"""What the documentation says is true: its code runs, its links lead somewhere, its tables are those of the code."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import millstream
from millstream import Query
from millstream.control.cli import main
from millstream.protocol.epochs import TRANSITIONS
from millstream.spark.session import SETTINGS
from millstream.testing import run_transcript
from pages import ROOT, blocks_of

DOCS = sorted((ROOT / "docs").glob("*.md"))
READERS = [ROOT / "README.md", *DOCS]
PAGES = [*READERS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
EXAMPLE = ROOT / "examples" / "wordcount.py"
TEXTS = {"1.txt": "the mill and the stream\nthe mill\n", "2.txt": "  a stream\n\nof water\n"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- code -----------------------------------------------------------------------------------------------------


def write_texts(folder: Path, names: list[str]) -> Counter[str]:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(TEXTS[name])
    return Counter(word for path in folder.iterdir() for word in path.read_text().split())


def latest_totals(out: Path) -> dict[str, int]:
    """The last total that the sink holds for each word, and a check that none was skipped or repeated."""
    totals: Counter[str] = Counter()
    for file in sorted(out.glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            assert row["total"] == totals[row["word"]] + 1
            totals[row["word"]] = row["total"]
    return dict(totals)


def test_the_word_count_of_the_readme_is_the_example() -> None:
    assert blocks_of(ROOT / "README.md")[0].code == EXAMPLE.read_text()
    assert len(EXAMPLE.read_text().splitlines()) < 60


@pytest.mark.spark
@pytest.mark.slow
def test_the_code_of_the_readme_runs_and_goes_on(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "texts", tmp_path / "counts", tmp_path / "store"]
    monkeypatch.setattr(sys, "argv", ["wordcount.py", *map(str, folders)])
    for names in (["1.txt"], ["2.txt"]):
        expected = write_texts(folders[0], names)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        for block in blocks_of(ROOT / "README.md"):
            block.run(namespace)
        assert {row.word: row.total for row in namespace["running"].state("count").collect()} == expected
        assert latest_totals(folders[1]) == expected


def test_the_vectorised_word_count_of_the_readme_counts() -> None:
    from millstream.testing import Simulated

    namespace: dict[str, Any] = {"ms": millstream}
    blocks_of(ROOT / "README.md")[1].run(namespace)
    query = millstream.Query("words")
    query.source("words", None).key_by("word").compute("count", namespace["FastWordCount"])
    sim = Simulated(query, {"words": "word string"})
    for words in ("a b a", "b c"):
        sim.feed(words=[(word,) for word in words.split()])
    assert dict(sim.state("count")) == {"a": 2, "b": 2, "c": 1}


@pytest.mark.parametrize("page", ["guide.md", "testing.md"])
def test_the_code_of_a_page_that_needs_no_spark_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(ROOT / "docs" / page):
        if not block.needs_spark:
            block.run(namespace)


def test_the_code_of_the_library_runs() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = blocks_of(ROOT / "docs" / "library.md")
    assert blocks
    for block in blocks:
        block.run(namespace)


def test_the_transcript_of_the_page_on_testing_is_true(tmp_path: Path) -> None:
    page = ROOT / "docs" / "testing.md"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks_of(page)[0].run(namespace)
    found = re.search(r"^```\n(# A visit.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    (tmp_path / "shown.txt").write_text(found[1])
    run_transcript(namespace["build"](), tmp_path / "shown.txt")


@pytest.mark.spark
@pytest.mark.slow
def test_the_code_of_the_guide_runs(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(ROOT / "docs" / "guide.md"):
        block.run(namespace)


@pytest.mark.spark
@pytest.mark.slow
def test_the_example_runs_as_a_program(tmp_path: Path) -> None:
    expected = write_texts(tmp_path / "texts", list(TEXTS))
    folders = [str(tmp_path / name) for name in ("texts", "counts", "store")]
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), *folders],
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert latest_totals(tmp_path / "counts") == expected
    assert re.search(r"\|\s*the\|\s*3\|", ended.stdout)


MODULES = ["millstream", *(found.name for found in pkgutil.walk_packages(millstream.__path__, "millstream."))]


@pytest.mark.parametrize("module", MODULES)
def test_doctests_pass(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


# -- links and names ------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


@pytest.mark.parametrize("name", ["guide.md", "tutorial.md"])
def test_the_contents_of_a_long_page_name_all_its_chapters(name: str) -> None:
    text = prose(ROOT / "docs" / name)
    contents = re.findall(r"\]\(#([^)]+)\)", text[: text.index("\n## ")])
    chapters = [
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.+)$", text, re.M)
    ]
    assert contents == chapters


def commands(page: Path, program: str) -> set[str]:
    """The words that follow a program's name where it is typed: in code, or at the start of a line of a block."""
    text = page.read_text()
    found = re.findall(rf"`{program} ([a-z]+)", text)
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found += re.findall(rf"^{program} ([a-z]+)", block, re.MULTILINE)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert commands(page, "make") <= targets
    assert commands(page, "millstream") <= set(main.commands)


def test_the_readme_names_what_to_run_first() -> None:
    assert {"demo", "test", "bench"} <= commands(ROOT / "README.md", "make")


@pytest.mark.parametrize("page", READERS, ids=name_of)
def test_tests_that_are_named_exist(page: Path) -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:def )?(test_\w+|Test\w+)", path.read_text(), re.MULTILINE)
    }
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(re.findall(r"`(test_\w+|Test[A-Z]\w+)`", page.read_text())) <= defined | files


# -- tables ---------------------------------------------------------------------------------------------------


def marked(page: str, mark: str) -> str:
    """What stands between two marks of a page."""
    found = re.search(rf"<!-- {mark}:begin -->\n(.*?)<!-- {mark}:end -->", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None, f"{page} has no block {mark}"
    return found[1]


def test_the_diagram_of_the_journal_is_its_state_machine() -> None:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> resting"]
    lines += [f"    {state} --> {after}: {entry}" for (state, entry), after in TRANSITIONS.items()]
    assert marked("docs/architecture.md", "transitions") == "\n".join([*lines, "```", ""])


def test_the_table_of_settings_is_that_of_the_code() -> None:
    lines = ["| setting | value | why |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | `{value}` | {why} |" for name, (value, why) in SETTINGS.items()]
    assert marked("docs/guide.md", "settings") == "\n".join([*lines, ""])


def test_the_known_answers_of_the_hash_are_those_that_are_tested() -> None:
    tested = runpy.run_path(str(ROOT / "tests" / "protocol" / "test_keyspace.py"))
    integers, strings = ["0", "1", "-1", "2^63-1"], ['""', '"a"', '"millstream"', '"12345678"', '"Mühle"']
    answers = [
        *zip([f"the integer {value}" for value in integers], tested["KNOWN_INTEGERS"], strict=True),
        *zip([f"the string `{value}`" for value in strings], tested["KNOWN_STRINGS"], strict=True),
        ("null", tested["KNOWN_NULL"]),
        ('the tuple of the integer 1 and the string `"a"`', tested["KNOWN_PAIR"]),
    ]
    lines = ["| key | hash |", "| --- | --- |", *(f"| {key} | `{int(answer, 16):#018x}` |" for key, answer in answers)]
    assert marked("docs/format.md", "hash") == "\n".join([*lines, ""])


def test_every_argument_of_start_is_in_the_guide_with_its_default() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    for parameter in list(inspect.signature(Query.start).parameters.values())[1:]:
        required = parameter.default is inspect.Parameter.empty
        default = "required" if required else f"`{parameter.default!r}`"
        assert f"| `{parameter.name}` | {default} | " in guide


def test_every_member_of_a_status_and_of_a_batch_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    wanted = [name for name in vars(millstream.Status) if not name.startswith("_")]
    missing = [name for name in wanted if f"`{name}`" not in guide]
    missing += [n for n in vars(millstream.Batch) if not n.startswith("_") and f"batch.{n}" not in guide]
    assert not missing


def test_every_public_error_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    errors = [n for n in millstream.__all__ if isinstance(getattr(millstream, n), type(Exception))]
    errors = [n for n in errors if issubclass(getattr(millstream, n), Exception)]
    assert errors
    assert [n for n in errors if f"`ms.{n}`" not in guide] == []


# -- words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [*READERS, ROOT / "CHANGELOG.md"], ids=name_of)
def test_no_page_uses_a_word_that_is_not_ours(page: Path) -> None:
    text = page.read_text()
    for word in (
        r"\butils?\b",
        r"\bhelpers?\b",
        re.escape(f"{ROOT.parent}/"),
        r"/root/",
        r"/home/",
        r"/tmp/",
        r"localhost",
    ):
        assert not re.search(word, text, re.IGNORECASE), word
    if page.name == "glossary.md":  # which says what things are called elsewhere
        return
    for word in (r"\bmanagers?\b", r"\bbatch id\b"):
        assert not re.search(word, text, re.IGNORECASE), word
    for paragraph in re.split(r"\n\n|\n(?=[|\-] )", prose(page)):
        if re.search(r"\bcheckpoints?\b", paragraph):
            assert "Spark" in paragraph, f"whose checkpoint? {paragraph[:80]}"
        if re.search(r"\bpartitions?\b", paragraph):
            assert re.search(r"Spark|source|Kafka|watermark", paragraph), f"whose partition? {paragraph[:80]}"
