"""The graph, resolved: levels, schemas, states, all validated, and described so that a restart can compare.

Rules
-----
- A graph is a value: everything an epoch needs to know of the query except where state lies.
- `resolve` refuses before the first epoch what would fail in one: unknown columns, types that cannot be keys, streams
  that lead nowhere. Errors name the step.
- The level of a step is one more than the highest level of its inputs; sources have level 0. All steps of a level
  run in one stage.
- `describe` holds all that stored state depends on and nothing that may change freely, such as code: a restart whose
  description differs is refused, with a text that says what changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.computation import Computation, declared_states, output_schema
from millstream.model.query import Query, SinkNode, check_name
from millstream.model.sinks import Sink
from millstream.model.state import Value
from millstream.model.types import check_key_type, format_schema, format_type


@dataclass(frozen=True, slots=True)
class Source:
    """A source with its schema. Its index is its place in the order of records."""

    name: str
    index: int
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class Step:
    """A step with everything that running it takes."""

    name: str
    level: int
    input: str
    input_schema: pa.Schema
    key: tuple[str, ...]
    computation: Computation
    states: dict[str, Value]
    output: pa.Schema | None

    @property
    def key_types(self) -> tuple[pa.DataType, ...]:
        return tuple(self.input_schema.field(name).type for name in self.key)


@dataclass(frozen=True, slots=True)
class Graph:
    """A validated query."""

    name: str
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    sinks: tuple[SinkNode, ...]

    @property
    def stored_streams(self) -> frozenset[str]:
        """Streams whose productions are stored because a sink receives them."""
        return frozenset(sink.input for sink in self.sinks)

    def without_code(self) -> Graph:
        """The graph as workers need it: computations travel apart, and sinks stay with the driver."""
        steps = tuple(replace(step, computation=Computation()) for step in self.steps)
        return replace(self, steps=steps, sinks=tuple(replace(sink, sink=Sink()) for sink in self.sinks))

    def describe(self) -> dict[str, Any]:
        """What stored state depends on, as JSON."""
        return {
            "query": self.name,
            "sources": {s.name: {"place": s.index, "schema": format_schema(s.schema)} for s in self.sources},
            "steps": {
                step.name: {
                    "input": step.input,
                    "key": [f"{n} {format_type(t)}" for n, t in zip(step.key, step.key_types, strict=True)],
                    "state": {name: state.stored_text for name, state in step.states.items()},
                    "output": format_schema(step.output) if step.output is not None else "",
                }
                for step in self.steps
            },
            "sinks": {sink.name: sink.input for sink in self.sinks},
        }


def resolve(query: Query, schemas: Mapping[str, pa.Schema]) -> Graph:
    """Validates a query whose sources have these schemas."""
    if not query.sources:
        raise UserError(f"query {query.name!r} has no source")
    if not query.steps:
        raise UserError(f"query {query.name!r} has no step; add one with stream.key_by(...).compute(...)")
    sources = tuple(Source(name, i, schemas[name]) for i, name in enumerate(query.sources))
    streams: dict[str, pa.Schema | None] = {source.name: source.schema for source in sources}
    levels = dict.fromkeys(streams, 0)
    steps = []
    for node in query.steps.values():
        schema, level = streams[node.input], levels[node.input] + 1
        if schema is None:
            raise UserError(f"step {node.name!r} reads {node.input!r}, which declares no output")
        if level > 1:
            raise UserError(
                f"step {node.name!r} reads the output of step {node.input!r}: chains of steps are not supported yet; "
                "let both read the source, or write the first output to a sink and read it from there"
            )
        _check_key(node.name, node.key, schema)
        output = output_schema(node.computation)
        states = declared_states(type(node.computation))
        for state in states:
            check_name(f"step {node.name!r}: state", state)
        steps.append(Step(node.name, level, node.input, schema, node.key, node.computation, states, output))
        streams[node.name], levels[node.name] = output, level
    for sink in query.sinks.values():
        if sink.input in query.sources:
            raise UserError(
                f"sink {sink.name!r} receives the source {sink.input!r}; only the output of a step can be sunk"
            )
        if streams[sink.input] is None:
            raise UserError(f"sink {sink.name!r} receives step {sink.input!r}, which declares no output")
    return Graph(query.name, sources, tuple(steps), tuple(query.sinks.values()))


def _check_key(step: str, key: tuple[str, ...], schema: pa.Schema) -> None:
    for name in key:
        if name not in schema.names:
            raise UserError(f"step {step!r}: no column {name!r} to key by; the input has {', '.join(schema.names)}")
        try:
            check_key_type(schema.field(name).type)
        except UserError as error:
            raise UserError(f"step {step!r}: column {name!r} cannot be a key: {error}") from error


def differences(stored: Mapping[str, Any], given: Mapping[str, Any], path: str = "") -> list[str]:
    """What changed between two descriptions, one line each.

    >>> differences({"steps": {"count": {"key": ["word string"]}}}, {"steps": {"count": {"key": ["user string"]}}})
    ["steps.count.key: was ['word string'], now ['user string']"]
    """
    lines = []
    for name in [*stored, *(name for name in given if name not in stored)]:
        where = f"{path}.{name}" if path else name
        if name not in given:
            lines.append(f"{where}: was {stored[name]!r}, now missing")
        elif name not in stored:
            lines.append(f"{where}: is new: {given[name]!r}")
        elif isinstance(stored[name], Mapping) and isinstance(given[name], Mapping):
            lines.extend(differences(stored[name], given[name], where))
        elif stored[name] != given[name]:
            lines.append(f"{where}: was {stored[name]!r}, now {given[name]!r}")
    return lines
