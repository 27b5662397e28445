"""Transcripts: what goes into a query and what is to come out of it, in a text file that needs no Python to be read.

    # A word is counted once per record.
    source words: word string

    feed words
      | apple |
      | pear  |
    expect counts
      | apple | 1 |
      | pear  | 1 |

Rules
-----
- A statement begins at the beginning of a line. Lines that are indented, or begin with a bar, belong to the one above.
  Blank lines and lines that begin with `#` mean nothing.
- `feed`, `clock` and `watermark` run one epoch each. Rows of a sink are expected of the last one; late records,
  watermarks and state are those that have come about by then.
- Rows are compared as a whole, none missing and none in excess, in any order unless the line says `in order`.
- The first thing that is not as expected ends the run, with the line, and what was found beside what was expected. If
  the file is to be updated, every expectation becomes what was found instead, and everything else stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa

from millstream.engine.state import state_schema
from millstream.errors import MillstreamError, UserError
from millstream.model.query import Query
from millstream.model.types import TIMESTAMP, parse_schema
from millstream.testing.cells import format_row, format_rows, format_time, parse_cell, parse_row
from millstream.testing.crashes import CRASH, CrashMarker
from millstream.testing.simulated import Simulated

NAME = r"[A-Za-z_][\w\-]*"
ROWS = "rows begin and end with a bar: | a | b |"


class TranscriptMismatch(AssertionError):
    """A query did something else than its transcript says. Has `path` and `line`."""

    def __init__(self, path: str, line: int, text: str) -> None:
        self.path, self.line = path, line
        super().__init__(f"{path}, line {line}: {text}")


def run_transcript(query: Query, path: str | Path, *, update: bool = False, **options: Any) -> Simulated:
    """Runs a transcript, and returns the simulated query as it is at the end.

    With `update`, the file is rewritten: each expectation becomes what was found. An expectation may be left empty
    then, so a transcript is made by writing down what goes in, and reading what came out. Further arguments go to
    `Simulated`.
    """
    text = Path(path).read_text(encoding="utf-8")
    run = _Run(query, str(path), text, update, options)
    run.all()
    if update:
        Path(path).write_text(run.updated(), encoding="utf-8")
    return run.sim


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str


@dataclass(slots=True)
class _Statement:
    """A line, the lines that belong to it, and the statements that go on with it: `and`, after `feed`."""

    number: int
    text: str
    body: list[_Line] = field(default_factory=list)
    more: list[_Statement] = field(default_factory=list)


def _statements(path: str, text: str) -> list[_Statement]:
    found: list[_Statement] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        if raw[0].isspace() or line.startswith("|"):
            if not found:
                raise UserError(f"{path}, line {number}: {line!r} belongs to no statement; begin it without a space")
            last = found[-1].more[-1] if found[-1].more else found[-1]
            last.body.append(_Line(number, line))
        elif line.startswith("and "):
            if not found or not found[-1].text.startswith("feed"):
                raise UserError(f"{path}, line {number}: 'and' goes on with a 'feed': another source of the same epoch")
            found[-1].more.append(_Statement(number, line))
        else:
            found.append(_Statement(number, line))
    return found


class _Run:
    """A transcript on its way through a query."""

    def __init__(self, query: Query, path: str, text: str, update: bool, options: dict[str, Any]) -> None:
        self.query, self.path, self.update, self.options = query, path, update, options
        self.lines = text.split("\n")
        self.statements = _statements(path, text)
        self.schemas: dict[str, str] = {}
        self.line = 0
        self._sim: Simulated | None = None
        self._new: dict[int, list[str]] = {}
        """By number of the line, what stands in its place."""

    @property
    def sim(self) -> Simulated:
        """The query, started when it is first needed."""
        if self._sim is None:
            missing = [name for name in self.query.sources if name not in self.schemas]
            if missing:
                self.refuse(f"the transcript has no line 'source {missing[0]}: ...' with the columns of that source")
            self._sim = Simulated(self.query, self.schemas, **self.options)
        return self._sim

    def refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self.path}, line {self.line}: {problem}")

    def all(self) -> None:
        """Runs every statement."""
        for statement in self.statements:
            self.line = statement.number
            for pattern, act in _FORMS:
                match = re.fullmatch(pattern, statement.text)
                if match is not None:
                    self._act(act, statement, match)
                    break
            else:
                self.refuse(f"found {statement.text!r}; expected one of:\n  " + "\n  ".join(_GRAMMAR))
        self.line = len(self.lines)

    def _act(self, act: Callable[..., None], statement: _Statement, match: re.Match[str]) -> None:
        try:
            act(self, statement, **match.groupdict())
        except MillstreamError as error:
            where = f"{self.path}, line {self.line}"
            if isinstance(error, UserError) and type(error) is UserError and not str(error).startswith(where):
                raise UserError(f"{where}: {error}") from error
            error.add_note(where)
            raise

    # -- what comes in -----------------------------------------------------------------------------------------------

    def source(self, statement: _Statement, name: str, ddl: str) -> None:
        self._bare(statement)
        if self._sim is not None:
            self.refuse("sources are declared before anything else happens")
        if name not in self.query.sources:
            self.refuse(f"no source {name!r}; the query has {', '.join(self.query.sources)}")
        if name in self.schemas:
            self.refuse(f"source {name!r} is declared twice")
        parse_schema(ddl)
        self.schemas[name] = ddl

    def start(self, statement: _Statement, time: str) -> None:
        self._bare(statement)
        if self._sim is not None:
            self.refuse("'start' says when the clock starts: put it before the first epoch")
        self.options = {**self.options, "now": self._time(time)}

    def feed(self, statement: _Statement, name: str) -> None:
        records: dict[str, list[Any]] = {}
        if name == "nothing":
            if statement.more:
                self.line = statement.more[0].number
                self.refuse("'feed nothing' has no source to go on with")
            records = {self.sim.graph.sources[0].name: self._crashes(statement)}
        else:
            for part in (statement, *statement.more):
                self.line = part.number
                given = part.text.split()
                if len(given) != 2 or given[1] not in self.sim.query.sources:
                    self.refuse(f"found {part.text!r}; name one of the sources {', '.join(self.query.sources)}")
                if given[1] in records:
                    self.refuse(f"source {given[1]!r} is fed twice in one epoch")
                records[given[1]] = self._records(part, given[1])
            self.line = statement.number
        self.sim.offer(records)

    def _records(self, part: _Statement, source: str) -> list[Any]:
        schema = next(each.schema for each in self.sim.graph.sources if each.name == source)
        found: list[Any] = []
        for line in part.body:
            self.line = line.number
            if line.text.startswith("|"):
                found.append(parse_row(line.text, schema))
            else:
                found.append(self._crash(line.text))
        if not found:
            self.refuse("no rows; write 'feed nothing' for an epoch without records")
        return found

    def _crashes(self, statement: _Statement) -> list[Any]:
        found: list[Any] = []
        for line in statement.body:
            self.line = line.number
            found.append(self._crash(line.text))
        self.line = statement.number
        return found

    def _crash(self, text: str) -> CrashMarker:
        match = re.fullmatch(r"crash(?: at (?P<moment>\w+))?", text)
        if match is None:
            self.refuse(f"found {text!r}; expected 'crash', 'crash at committed', or a row: {ROWS}")
        return CRASH.at(match["moment"]) if match["moment"] else CRASH

    def clock(self, statement: _Statement, by: str | None, to: str | None) -> None:
        crash = self._one_crash(statement)
        if by is not None:
            return self.sim.advance_clock(by, crash=crash)
        ahead = self._time(to or "") - self.sim.now
        if ahead.total_seconds() < 0:
            self.refuse(f"the clock is at {format_time(self.sim.now)} and does not go back")
        return self.sim.advance_clock(ahead, crash=crash)

    def watermark(self, statement: _Statement, source: str | None, time: str) -> None:
        self.sim.advance_watermark(self._time(time), source, crash=self._one_crash(statement))

    def _one_crash(self, statement: _Statement) -> CrashMarker | None:
        crashes = self._crashes(statement)
        if len(crashes) > 1:
            self.refuse(f"{len(crashes)} crashes found, at most one expected")
        return crashes[0] if crashes else None

    def crash(self, statement: _Statement) -> None:
        self._bare(statement)
        self.sim.restart()

    def _time(self, text: str) -> datetime:
        found: datetime = parse_cell(text, TIMESTAMP)
        return found

    def _bare(self, statement: _Statement) -> None:
        for line in statement.body:
            self.line = line.number
            self.refuse(f"{statement.text.split()[0]!r} has nothing below it, found {line.text!r}")

    # -- what is expected --------------------------------------------------------------------------------------------

    def expect(self, statement: _Statement, name: str, ordered: str | None) -> None:
        node = self.query.sinks.get(name)
        if node is None:
            self.refuse(f"no sink {name!r}; the query has {', '.join(self.query.sinks) or 'none'}")
        if self.sim.epoch < 0:
            self.refuse("nothing has been fed yet")
        found = self.sim.delivered[name].get(self.sim.epoch, [])
        self._compare(statement, found, self.sim.graph.schema_of(node.input), ordered is not None)

    def state(self, statement: _Statement, step: str, name: str | None) -> None:
        chosen = next((each for each in self.sim.graph.steps if each.name == step), None)
        if chosen is None:
            self.refuse(f"no step {step!r}; the query has {', '.join(self.query.steps)}")
        if name is None and len(chosen.states) > 1:
            self.refuse(f"step {step!r} has several states; say which: {step}.{next(iter(chosen.states))}")
        if not chosen.states or (name is not None and name not in chosen.states):
            self.refuse(f"step {step!r} has the states {', '.join(chosen.states) or 'none'}")
        name = name or next(iter(chosen.states))
        if chosen.states[name].is_object:
            self.refuse(f"the state {name!r} holds Python objects, which have no text; look at it with Simulated.state")
        self._compare(statement, self.sim.state(step, name), state_schema(chosen, name), False)

    def late(self, statement: _Statement, count: str, step: str) -> None:
        self._bare(statement)
        if step not in self.query.steps:
            self.refuse(f"no step {step!r}; the query has {', '.join(self.query.steps)}")
        self._compare_line(statement, count, str(self.sim.late(step)))

    def mark(self, statement: _Statement, time: str, name: str) -> None:
        self._bare(statement)
        if name not in self.query.steps and name not in self.query.sources:
            known = ", ".join((*self.query.sources, *self.query.steps))
            self.refuse(f"no source or step {name!r}; the query has {known}")
        found = self.sim.watermark(name)
        expected = time if time == "none" else format_time(self._time(time))
        self._compare_line(statement, expected, "none" if found is None else format_time(found), time)

    def _compare_line(self, statement: _Statement, expected: str, found: str, written: str = "") -> None:
        if expected == found:
            return
        if self.update:
            self._new[statement.number] = [statement.text.replace(written or expected, found, 1)]
            return
        self._mismatch(statement, [f"expected {expected}, found {found}"])

    def _compare(self, statement: _Statement, rows: Sequence[Any], schema: pa.Schema, ordered: bool) -> None:
        """Compares rows with those below a statement."""
        expected = self._expected(statement, schema)
        found = [format_row(row, schema) for row in (rows if ordered else _sorted(rows))]
        same = expected == found if ordered or expected is None else Counter(expected) == Counter(found)
        if same:
            return
        if self.update:
            self._rewrite(statement, format_rows(found, schema) or ["nothing"])
        elif expected is None:
            self.line = statement.number
            self.refuse("no rows; write 'nothing' if that is what is expected (an update fills in what is found)")
        else:
            self._mismatch(statement, _beside(expected, found, schema, ordered))

    def _expected(self, statement: _Statement, schema: pa.Schema) -> list[tuple[str, ...]] | None:
        """The rows below a statement, as cells; None if there is nothing below it."""
        found: list[tuple[str, ...]] = []
        for line in statement.body:
            self.line = line.number
            if line.text.startswith("|"):
                found.append(format_row(parse_row(line.text, schema), schema))
            elif line.text != "nothing" or len(statement.body) > 1:
                self.refuse(f"found {line.text!r}; expected 'nothing' alone, or rows: {ROWS}")
        self.line = statement.number
        return found if statement.body else None

    def _mismatch(self, statement: _Statement, lines: Sequence[str]) -> NoReturn:
        text = "\n".join([f"{statement.text!r}, after epoch {self.sim.epoch}:", *lines])
        raise TranscriptMismatch(self.path, statement.number, text)

    # -- updating ----------------------------------------------------------------------------------------------------

    def _rewrite(self, statement: _Statement, rows: Sequence[str]) -> None:
        """Puts rows below a statement, in the place of those that are there."""
        first = statement.body[0].number if statement.body else None
        for line in statement.body:
            self._new[line.number] = []
        indented = [f"  {row}" for row in rows]
        if first is None:
            self._new[statement.number] = [statement.text, *indented]
        else:
            self._new[first] = indented

    def updated(self) -> str:
        """The text of the file with what was found."""
        kept = [self._new.get(number, [line]) for number, line in enumerate(self.lines, start=1)]
        return "\n".join(line for lines in kept for line in lines)


_FORMS: list[tuple[str, Callable[..., None]]] = [
    (rf"source (?P<name>{NAME}): *(?P<ddl>.+)", _Run.source),
    (r"start (?P<time>\S.+)", _Run.start),
    (rf"feed (?P<name>{NAME})", _Run.feed),
    (r"clock (?:\+ *(?P<by>.+)|(?P<to>[^+].*))", _Run.clock),
    (rf"watermark (?:of (?P<source>{NAME}) )?(?P<time>\S.+)", _Run.watermark),
    (r"crash", _Run.crash),
    (rf"expect late (?P<count>\d+) at (?P<step>{NAME})", _Run.late),
    (rf"expect watermark (?P<time>\S.*) at (?P<name>{NAME})", _Run.mark),
    (rf"expect (?P<name>{NAME})(?P<ordered> in order)?", _Run.expect),
    (rf"state (?P<step>{NAME})(?:\.(?P<name>{NAME}))?", _Run.state),
]

_GRAMMAR = [
    "source NAME: COLUMNS              the columns of a source, as Spark's DDL, for example: word string, n long",
    "start TIME                        when the clock starts, before the first epoch",
    "feed SOURCE, feed nothing         an epoch with the rows below; 'and SOURCE' goes on with another source",
    "clock +DURATION, clock TIME       an epoch without rows, at a later time",
    "watermark [of SOURCE] TIME        an epoch without rows, with the watermark of a source",
    "crash                             the process dies, and another one goes on; below an epoch: in its middle",
    "expect SINK [in order]            the rows that the last epoch sent to a sink",
    "expect late COUNT at STEP         how many records have been too late so far",
    "expect watermark TIME at STEP     how far the watermark is",
    "state STEP, state STEP.NAME       the whole state of a step",
]


def _sorted(rows: Sequence[Any]) -> list[Any]:
    try:
        return sorted(rows)
    except TypeError:  # nulls and such
        return sorted(rows, key=repr)


def _beside(
    expected: Sequence[tuple[str, ...]], found: Sequence[tuple[str, ...]], schema: pa.Schema, ordered: bool
) -> list[str]:
    """Expected rows on the left, found ones on the right, marked where they differ."""
    if ordered:
        pairs: list[tuple[Any, Any]] = list(zip_longest(expected, found))
    else:
        excess = list((Counter(found) - Counter(expected)).elements())
        missing = Counter(expected) - Counter(found)
        pairs, lacking = [], []
        for row in expected:
            if missing[row]:
                missing[row] -= 1
                lacking.append(row)
            else:
                pairs.append((row, row))
        pairs += zip_longest(lacking, excess)
    lines = iter(format_rows([row for pair in pairs for row in pair if row is not None], schema))
    texts = [tuple("" if row is None else next(lines) for row in pair) for pair in pairs]
    width = max((len(left) for left, _ in texts), default=0)
    width = max(width, len("expected"))
    marked = [(" " if one == other else "!", *text) for (one, other), text in zip(pairs, texts, strict=True)]
    return [
        f"    {'expected':{width}}   found",
        *(f"  {m} {left:{width}}   {right}".rstrip() for m, left, right in marked),
    ]
