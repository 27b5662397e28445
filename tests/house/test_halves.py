"""`make test` runs every test once, in two processes, and fails if one of them fails, in either."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pages import ROOT

TESTS = """
import os, pytest
from pathlib import Path

def note(name):
    with Path("ran").open("a") as ran:
        ran.write(name + "\\n")
    assert name != os.environ["FAILS"], "as it was told to"

@pytest.fixture
def spark(): ...

@pytest.mark.spark
def test_process(): note("process")

@pytest.mark.spark
def test_session(spark): note("session")

@pytest.mark.parametrize("number", range(20))
def test_plain(number): note(f"plain{number}")
"""


@pytest.mark.parametrize("fails", ["", "process", "plain19"])
def test_every_test_is_run_once_and_a_failure_in_either_half_is_shown(fails: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from halves import pytest_addoption, pytest_configure\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = spark\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    environment = {**os.environ, "FAILS": fails, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, str(ROOT / "scripts" / "test.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    expected = Counter(["process", "session", *(f"plain{number}" for number in range(20))])
    assert Counter((tmp_path / "ran").read_text().split()) == expected
    assert done.returncode == bool(fails), done.stdout
    assert ("AssertionError: as it was told to" in done.stdout) == bool(fails), done.stdout
    assert done.stdout.count(" passed") >= 1
