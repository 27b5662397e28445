"""Pages with code: what stands in them, what it is expected to print, and how to run it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Block(NamedTuple):
    """A block of a page. The mark is a comment right before it: `no-run`, `file: name`, or the file it is from."""

    page: Path
    line: int
    language: str
    mark: str
    code: str
    shows: str | None = None
    """What the page says that it prints."""

    @property
    def needs_spark(self) -> bool:
        return bool(re.search(r"\bspark\b|\brunning\b|\bpyspark\b", self.code))

    def run(self, namespace: dict[str, Any]) -> None:
        """Runs the block; a traceback names the line of the page."""
        exec(compile("\n" * self.line + self.code, str(self.page), "exec"), namespace)

    def printed(self, namespace: dict[str, Any]) -> str:
        """Runs the block; gives what it prints."""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.run(namespace)
        return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines())


def fences_of(page: Path) -> list[Block]:
    """All blocks of a page, in order. A block of text or a drawing is what the block before it prints."""
    text, found = page.read_text(), []
    for match in _FENCE.finditer(text):
        line = text[: match.start("code")].count("\n")
        block = Block(page, line, match["language"], match["mark"] or "", match["code"])
        if block.language in ("text", "mermaid") and found and found[-1].language in ("python", "shell"):
            found[-1] = found[-1]._replace(shows=block.code.strip("\n"))
        found.append(block)
    return found


def blocks_of(page: Path) -> list[Block]:
    """The blocks of Python that are to be run."""
    return [b for b in fences_of(page) if b.language == "python" and not b.mark.startswith(("no-run", "file:"))]
