"""The page on NEXMark: its table is counted, its code runs, and it names every parameter, option and query."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path
from typing import Any

import click

import millstream as ms
from millstream.control.nexmark_command import NAMES, nexmark
from millstream.nexmark import QUERIES, Parameters
from pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "nexmark.md"
LINES: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "nexmark_lines.py"))


def test_the_table_of_lines_is_what_the_script_counts() -> None:
    assert LINES["BEGIN"] + LINES["table"]() + LINES["END"] in PAGE.read_text(), "run `make docs`"
    assert LINES["QUERIES"] == NAMES == tuple(QUERIES)


def test_lines_are_counted_with_what_they_need_and_without_what_is_said(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        '"""Text."""\nimport os\n\nA, B = 1, 2\nUNUSED = 3\n\n\n'
        "@os.register\nclass Part:\n    '''Text,\n    of two lines.'''\n\n    x = A  # counts\n\n\n"
        "def query(a):\n    # does not\n    '''Text.'''\n    return Part(\n        a\n    )\n\n\n"
        "def other():\n    query(1)\n"
    )
    counted = LINES["Counted"](tmp_path / "code.py")
    assert counted.count("A") == 1
    assert counted.count("Part") == 4
    assert counted.count("query") == 8
    assert counted.count("other") == 10


def test_every_parameter_option_and_query_is_on_the_page() -> None:
    text = PAGE.read_text()
    missing = [field.name for field in dataclasses.fields(Parameters) if f"`{field.name}`" not in text]
    for option in nexmark.params:
        if isinstance(option, click.Option):
            missing += [name for name in option.opts if f"`{name}" not in text and f"`--no-{name[2:]}`" not in text]
    missing += [name for name in NAMES if f"| {name.upper()} | " not in text]
    assert missing == []


def test_the_defaults_on_the_page_are_those_of_the_code() -> None:
    text = PAGE.read_text()
    given = Parameters()
    for names in (
        ("events_per_second",),
        ("dilation",),
        ("people", "auctions", "bids"),
        ("hot_auctions",),
        ("hot_sellers", "hot_bidders"),
        ("in_flight",),
        ("active_people",),
        ("person_bytes", "auction_bytes", "bid_bytes"),
        ("delayed", "delay_us"),
        ("group",),
        ("seed",),
    ):
        shown = ", ".join(f"`{name}`" for name in names)
        assert f"| {shown} | {', '.join(str(getattr(given, name)) for name in names)} | " in text
    for option in nexmark.params:
        if isinstance(option, click.Option) and option.metavar == "N" and isinstance(option.default, int):
            assert f"| `{option.opts[0]} N` | {option.default} | " in text
    assert {name: query.dilation for name, query in QUERIES.items() if query.dilation != 1} == {"q5": 60, "q8": 79}


def test_the_code_of_the_page_that_needs_no_spark_runs() -> None:
    namespace: dict[str, Any] = {"ms": ms}
    blocks = [block for block in blocks_of(PAGE) if not block.needs_spark]
    assert blocks
    for block in blocks:
        block.run(namespace)
