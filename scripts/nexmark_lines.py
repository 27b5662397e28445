"""Counts the lines of code of the NEXMark queries, and writes the table of docs/nexmark.md.

Rules
-----
- Counted is what a query needs of its file: its function, and all functions, classes and constants of the file that it
  reaches. What two queries share counts for both.
- Blank lines, comments and docstrings do not count, nor imports. Both files have the same formatter.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "nexmark.md"
FOLDER = ROOT / "src" / "millstream" / "nexmark"
BEGIN, END = "<!-- lines:begin -->\n", "<!-- lines:end -->\n"
QUERIES = ("q1", "q2", "q3", "q4", "q5", "q6", "q7", "q8", "nbq5", "nbq8", "nbqx")
PAPER = {"q1": 16, "q2": 18, "q3": 41, "q4": 74, "q5": 46, "q6": 74, "q7": 54, "q8": 29}
"""What Megaphone's Table 1 says of its own implementations, in Rust."""


class Counted:
    """A file, of which parts can be counted."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.lines = text.splitlines()
        self.parts: dict[str, ast.stmt] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.parts[node.name] = node
            elif isinstance(node, ast.Assign):
                for name in ast.walk(ast.Tuple(node.targets)):
                    if isinstance(name, ast.Name):
                        self.parts[name.id] = node

    def needed(self, name: str) -> set[ast.stmt]:
        """The parts that a part needs, itself included."""
        found: set[ast.stmt] = set()
        waiting = [name]
        while waiting:
            node = self.parts[waiting.pop()]
            if node not in found:
                found.add(node)
                waiting += [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in self.parts]
        return found

    def count(self, name: str) -> int:
        """How many lines of code a part needs."""
        return len(set().union(*(self._code(node) for node in self.needed(name))))

    def _code(self, node: ast.stmt) -> set[int]:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        numbers = set(range(first, (node.end_lineno or node.lineno) + 1))
        for each in ast.walk(node):
            if (
                isinstance(each, ast.Expr)
                and isinstance(each.value, ast.Constant)
                and isinstance(each.value.value, str)
            ):
                numbers -= set(range(each.lineno, (each.end_lineno or each.lineno) + 1))
        return {number for number in numbers if not re.fullmatch(r"\s*(#.*)?", self.lines[number - 1])}


def table() -> str:
    """The table of the page."""
    ours, plain = Counted(FOLDER / "queries.py"), Counted(FOLDER / "twins.py")
    rows = [
        "| query | Millstream, a stream | Spark, a batch | Megaphone, from its paper |",
        "| --- | --- | --- | --- |",
    ]
    for name in QUERIES:
        rows.append(f"| {name.upper()} | {ours.count(name)} | {plain.count(name)} | {PAPER.get(name, '')} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Writes the table into the page."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    main()
