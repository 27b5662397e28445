"""All tests in two processes at once: `make test` starts both, and each takes the next test that nobody has taken.

Rules
-----
- One half goes through the tests from the front, the other from the back; they meet wherever they meet. A test belongs
  to the half that makes its file in the folder they share, so each is run once, whatever the order.
- What starts Spark in processes of its own comes first, then what uses this process's session, the slow ones first,
  then what needs no Spark. So they meet among short tests, and most of the time only one of them runs Spark.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--half", metavar="END:FOLDER", help="be one of two processes that share the tests (halves.py)")


def pytest_configure(config: pytest.Config) -> None:
    if half := config.getoption("--half"):
        end, _, folder = half.partition(":")
        config.pluginmanager.register(Half(Path(folder), from_the_back=end == "back"))


class Half:
    """A plugin for one of the two processes."""

    def __init__(self, folder: Path, from_the_back: bool) -> None:
        self.folder, self.from_the_back = folder, from_the_back

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=weight, reverse=True)
        if self.from_the_back:
            items.reverse()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        mine = self.folder / hashlib.sha256(item.nodeid.encode()).hexdigest()
        try:
            mine.touch(exist_ok=False)
        except FileExistsError:
            return True  # nothing is left to do about it here
        return None


def weight(item: pytest.Item) -> int:
    if item.get_closest_marker("spark") is None:
        return 0
    if "spark" not in getattr(item, "fixturenames", ()):
        return 3
    return 1 if item.get_closest_marker("slow") is None else 2
