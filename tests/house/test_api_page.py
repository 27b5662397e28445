"""The API reference is what the docstrings say, and has every public name and member."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import millstream
import millstream.testing

ROOT = Path(__file__).resolve().parents[2]
API: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "api.py"))
PACKAGES = [millstream, millstream.testing]


def test_the_page_is_what_the_docstrings_say() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == API["page"](), "run `make docs`"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_is_on_the_page_once(package: ModuleType) -> None:
    headings = re.findall(r"^### (\w+)$", API["page"](), re.MULTILINE)
    for name in package.__all__:
        assert headings.count(name) == 1, name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_member_says_what_it_is(package: ModuleType) -> None:
    entries = API["entries"](package)
    assert sorted(entry.name for entry in entries) == sorted(package.__all__)
    silent = [entry.name for entry in entries if not entry.doc]
    silent += [f"{entry.name}.{member.name}" for entry in entries for member in entry.members if not member.doc]
    assert not silent


def test_a_page_has_signatures_attributes_bases_and_what_is_inherited_from_what_is_not_public() -> None:
    entries = {entry.name: entry for entry in API["entries"](millstream)}
    members = {name: {member.name: member for member in entry.members} for name, entry in entries.items()}
    assert entries["Query"].signatures == ("Query(name: str)",)
    assert {"source", "start"} <= members["Query"].keys(), "of its own, and of the base that nobody sees"
    assert entries["TimerBatch"].bases == ("Batch",)
    assert "count" not in members["TimerBatch"], "said at Batch"
    assert members["Batch"]["epoch"].type == "int"
    assert members["Value"]["exists"].signatures == ("exists() -> bool", "exists(batch: Batch) -> NDArray[bool]")
    assert "watermark" in entries["EVENT_TIME"].doc


def test_a_name_of_a_module_that_no_section_knows_is_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {title: modules for title, modules in API["SECTIONS"].items() if title != "Sinks"}
    monkeypatch.setitem(API["page"].__globals__, "SECTIONS", others)  # not taken out: put back, it would come last
    page = API["page"]()
    assert "\n## Sinks\n\n### Parquet\n" in page, "a section is made from the name of the module"
    assert page.index("## Sinks") < page.index("## Errors")


def test_examples_become_blocks_of_code() -> None:
    assert API["markdown"]("Adds.\n\n>>> 1 + 1\n2\n\nOr not.") == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nOr not."
