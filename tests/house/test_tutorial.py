"""The tutorial is true: its code runs and prints what it shows, and what it quotes from the examples is theirs."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pages import ROOT, Block, fences_of

PAGE = ROOT / "docs" / "tutorial.md"
FENCES = fences_of(PAGE)
QUOTES = [fence for fence in FENCES if fence.mark.startswith("examples/")]
EXAMPLES = {f"python {path.relative_to(ROOT)}\n" for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: f"line {quote.line}")
def test_what_is_quoted_is_in_the_example(quote: Block) -> None:
    rest = (ROOT / quote.mark).read_text()
    for paragraph in re.split(r"\n\n+", quote.code.strip("\n")):
        assert paragraph in rest, f"{quote.mark} does not have, or not in this order:\n{paragraph}"
        rest = rest.partition(paragraph)[2]


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    shell = {fence.code for fence in FENCES if fence.language == "shell"}
    assert {fence.language for fence in FENCES} == {"python", "shell", "text", "mermaid"}
    assert {fence.mark.partition("/")[0] for fence in FENCES} <= {"", "examples", "file: try"}
    setup = {fence.code for fence in FENCES[:1]}
    assert shell == setup | (shell & EXAMPLES) | {"python try/totals.py die\n", "python try/totals.py\n"}


def test_the_code_that_needs_no_spark_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "try").mkdir()
    namespace: dict[str, Any] = {"__name__": "__main__", "Path": Path}
    for fence in FENCES:
        if fence.language == "python" and not fence.needs_spark and not fence.mark.startswith("file:"):
            assert fence.printed(namespace) == (fence.shows or ""), f"line {fence.line}"


@pytest.mark.spark
@pytest.mark.slow
def test_the_code_prints_what_it_shows_and_survives_its_kill(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "try").mkdir()
    namespace: dict[str, Any] = {"__name__": "__main__"}
    # The session of all tests was started elsewhere, so paths have to be absolute.
    fences = [fence._replace(code=fence.code.replace('"try', f'"{tmp_path}/try')) for fence in FENCES]
    [program] = [fence for fence in fences if fence.mark == "file: try/totals.py"]
    (tmp_path / "try" / "totals.py").write_text(program.code)
    for fence in fences:
        if fence is program:
            continue
        if fence.language == "python":
            assert fence.printed(namespace) == (fence.shows or ""), f"line {fence.line}"
        elif fence.code == "python try/totals.py die\n":
            _die(tmp_path / "try" / "totals.py")
        elif fence.code == "python try/totals.py\n":
            monkeypatch.setattr(sys, "argv", ["try/totals.py"])
            assert program.printed({"__name__": "__main__"}) == fence.shows


def _die(program: Path) -> None:
    """The kill is a real one, so it takes a process of its own; Java, which stays behind, is ended with it."""
    errors = program.with_suffix(".err")
    with errors.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(program), "die"],
            env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            assert process.wait(240) == -signal.SIGKILL, errors.read_text()[-3000:]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_what_a_block_prints_is_compared_without_spaces_at_the_ends() -> None:
    block = Block(PAGE, 0, "python", "", "print('a  ')\nprint()\n")
    with redirect_stdout(io.StringIO()) as out:
        assert block.printed({}) == "a"
    assert out.getvalue() == "", "and does not reach the terminal"
