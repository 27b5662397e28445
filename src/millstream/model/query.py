"""The graph as users build it: named sources, streams, keyed streams, steps and sinks. Pure data.

Rules
-----
- Every source, step and sink has a name, and names are unique in a query: a step's name is the address of its state.
- Building refuses what can be seen to be wrong at once; everything else is checked by `graph.resolve` before the
  first epoch. Errors name the step.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from millstream.errors import UserError
from millstream.model.computation import Computation, check_computation
from millstream.model.sinks import Sink

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,99}\Z")


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A named source: a streaming frame, or a function of a reader that gives one."""

    name: str
    origin: Any
    unbounded: bool = False


@dataclass(frozen=True, slots=True)
class StepNode:
    """A named step: the stream it reads, by which key, and the computation it runs."""

    name: str
    input: str
    key: tuple[str, ...]
    computation: Computation


@dataclass(frozen=True, slots=True)
class SinkNode:
    """A named sink and the stream it receives."""

    name: str
    input: str
    sink: Sink


@dataclass
class Query:
    """A named graph of steps.

    >>> from millstream.model.computation import Computation
    >>> class Seen(Computation):
    ...     def on_record(self, row, at): ...
    >>> query = Query("words")
    >>> stream = query.source("lines", frame=None).key_by("word").compute("seen", Seen)
    >>> query
    Query('words'): lines -> seen
    """

    name: str
    sources: dict[str, SourceNode] = field(default_factory=dict)
    steps: dict[str, StepNode] = field(default_factory=dict)
    sinks: dict[str, SinkNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("query", self.name)

    def __repr__(self) -> str:
        edges = [f"{step.input} -> {step.name}" for step in self.steps.values()]
        edges += [f"{sink.input} -> [{sink.name}]" for sink in self.sinks.values()]
        return f"Query({self.name!r}): {', '.join(edges) or 'empty'}"

    def source(self, name: str, frame: Any, *, unbounded: bool = False) -> Stream:
        """Adds a source: a streaming DataFrame, or a function of a reader, `lambda read: read.format(...).load()`.

        A frame that would read its whole backlog in one epoch is refused at the start unless `unbounded` is true;
        a function's reader has default limits, which its own options override.
        """
        self._take("source", name)
        self.sources[name] = SourceNode(name, frame, unbounded)
        return Stream(self, name)

    def _take(self, what: str, name: str) -> None:
        check_name(what, name)
        for kind, taken in (("source", self.sources), ("step", self.steps), ("sink", self.sinks)):
            if name in taken:
                raise UserError(f"{what} {name!r}: the query {self.name!r} already has a {kind} of that name")


@dataclass(frozen=True, slots=True)
class Stream:
    """A named edge: the records of a source, or the productions of a step."""

    query: Query
    name: str

    def key_by(self, *columns: str) -> KeyedStream:
        """The stream, keyed by one or several of its columns. Null is a key like any other."""
        if not columns:
            raise UserError(f"stream {self.name!r}: key_by needs at least one column")
        for column in columns:
            if not isinstance(column, str):
                raise UserError(f"stream {self.name!r}: key_by takes column names, found {column!r}")
        if len(set(columns)) != len(columns):
            raise UserError(f"stream {self.name!r}: key_by names a column twice: {', '.join(columns)}")
        return KeyedStream(self.query, self.name, columns)

    def sink(self, name: str, sink: Sink) -> Stream:
        """Delivers the stream to a sink. Returns the stream, so that it can go on."""
        if not isinstance(sink, Sink):
            raise UserError(f"sink {name!r}: found {sink!r}, expected Parquet(...), ForeachBatch(...) or Memory()")
        self.query._take("sink", name)
        self.query.sinks[name] = SinkNode(name, self.name, sink)
        return self


@dataclass(frozen=True, slots=True)
class KeyedStream:
    """A stream and the columns that make its key."""

    query: Query
    name: str
    key: tuple[str, ...]

    def compute(self, name: str, computation: type[Computation] | Computation) -> Stream:
        """Adds a step that runs a computation on every key; returns the stream of its productions.

        `computation` is a class that needs no arguments, or an instance.
        """
        self.query._take("step", name)
        try:
            checked = check_computation(computation)
        except UserError as error:
            raise UserError(f"step {name!r}: {error}") from error
        self.query.steps[name] = StepNode(name, self.name, self.key, checked)
        return Stream(self.query, name)


def check_name(what: str, name: object) -> None:
    """Names become parts of stored objects' names, so they are limited."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise UserError(
            f"{what} {name!r}: a name is a letter or underscore followed by up to 99 letters, digits, '_' or '-'"
        )
