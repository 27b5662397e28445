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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.computation import (
    Computation,
    declared_holds,
    declared_states,
    declared_timers,
    is_vectorised,
    output_schemas,
)
from millstream.model.feedback import FeedbackNode, check_feedbacks, timed_feedbacks
from millstream.model.holds import Hold
from millstream.model.kinds import State
from millstream.model.lateness import AS_THEY_ARE, LateRule
from millstream.model.letters import DEAD_LETTER, STOP
from millstream.model.letters import SCHEMA as LETTERS
from millstream.model.query import ONLY_INPUT, InputNode, MapNode, Query, SinkNode, StepNode, check_name
from millstream.model.sinks import Sink
from millstream.model.timers import Timer
from millstream.model.times import EVENT_TIME, EventTime
from millstream.model.transform import Transform
from millstream.model.types import check_key_type, format_schema, format_type
from millstream.model.updates import check_updates


@dataclass(frozen=True, slots=True)
class Source:
    """A source with its schema. Its index is its place in the order of records."""

    name: str
    index: int
    schema: pa.Schema
    time: EventTime | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """What a step reads, with its schema. United streams are inputs of one name.

    `time` is the column that holds the event time, empty if it travels beside the columns, None if there is none.
    """

    name: str
    stream: str
    schema: pa.Schema
    key: tuple[str, ...]
    time: str | None = None

    @property
    def key_types(self) -> tuple[pa.DataType, ...]:
        return tuple(self.schema.field(name).type for name in self.key)


@dataclass(frozen=True, slots=True)
class Step:
    """A step with everything that running it takes. `outputs` are by name, the unnamed one under \"\"."""

    name: str
    level: int
    inputs: tuple[Input, ...]
    computation: Computation
    states: dict[str, State]
    outputs: dict[str, pa.Schema]
    late: str = "drop"
    timers: dict[str, Timer] = field(default_factory=dict)
    vectorised: bool = False
    on_error: str = STOP
    strong: bool = False
    holds: dict[str, Hold] = field(default_factory=dict)
    driven: bool = True
    """Whether its time goes on by itself, and not only when something is fed back."""
    late_rule: LateRule = AS_THEY_ARE
    """How its late records are counted: beside the computation, which travels to workers apart."""

    @property
    def dead_letters(self) -> bool:
        """Whether records that fail are sent to an output."""
        return self.on_error == DEAD_LETTER

    def declared(self, name: str) -> State | Timer:
        """What a family of the step holds; a hold is stored as a timer."""
        if name in self.states:
            return self.states[name]
        return self.timers[name] if name in self.timers else self.holds[name].timer

    @property
    def families(self) -> tuple[str, ...]:
        """What is stored for the step: states, timers and holds."""
        return (*self.states, *self.timers, *self.holds)

    @property
    def timed(self) -> bool:
        """Whether any input has event time, so that the step has a watermark."""
        return any(given.time is not None for given in self.inputs)

    @property
    def key(self) -> tuple[str, ...]:
        """The names of the key's columns: those of the first input."""
        return self.inputs[0].key

    @property
    def key_types(self) -> tuple[pa.DataType, ...]:
        return self.inputs[0].key_types

    def stream(self, output: str) -> str:
        """The name of the stream of an output."""
        return f"{self.name}.{output}" if output else self.name

    def describe(self) -> dict[str, Any]:
        """What stored state depends on. Dead letters can be asked for at any restart."""
        inputs = {
            given.name: {
                "stream": " + ".join(each.stream for each in self.inputs if each.name == given.name),
                "key": [f"{n} {format_type(t)}" for n, t in zip(given.key, given.key_types, strict=True)],
            }
            for given in self.inputs
        }
        only = inputs.get(ONLY_INPUT)
        return {
            **({"input": only["stream"], "key": only["key"]} if only else {"inputs": inputs}),
            "state": {
                **{name: state.stored_text for name, state in self.states.items()},
                **{name: timer.stored_text for name, timer in self.timers.items()},
                **{name: hold.stored_text for name, hold in self.holds.items()},
            },
            **({"stored as": self.computation.stored_as} if self.computation.stored_as else {}),
            "output": format_schema(self.outputs[""]) if "" in self.outputs else "",
            **{
                f"output {name}": format_schema(schema)
                for name, schema in self.outputs.items()
                if name and not (name == DEAD_LETTER and self.dead_letters)
            },
        }


@dataclass(frozen=True, slots=True)
class Graph:
    """A validated query. `maps` stand in an order in which each comes after those it reads."""

    name: str
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    maps: tuple[MapNode, ...]
    sinks: tuple[SinkNode, ...]
    times: dict[str, str]
    """For each stream with event time: the column that holds it, or nothing if it travels beside the columns."""
    feedbacks: tuple[FeedbackNode, ...] = ()

    @property
    def stored_streams(self) -> frozenset[str]:
        """Streams whose productions are stored because a sink receives them."""
        return frozenset(sink.input for sink in self.sinks)

    @property
    def depth(self) -> int:
        """The number of levels of steps."""
        return max(step.level for step in self.steps)

    def schema_of(self, stream: str) -> pa.Schema:
        """The schema of a stream that a step or a map produces."""
        made = {step.stream(output): schema for step in self.steps for output, schema in step.outputs.items()}
        return made[stream] if stream in made else next(each.output for each in self.maps if each.name == stream)

    def origins_of(self, stream: str) -> tuple[str, ...]:
        """The sources, steps and feedbacks that a stream comes from: several, if it is a map of several."""
        mapped = next((each for each in self.maps if each.name == stream), None)
        if mapped is not None:
            return tuple(origin for each in mapped.streams for origin in self.origins_of(each))
        return (stream.partition(".")[0],)

    def readers_of(self, step: str) -> tuple[str, ...]:
        """The steps that read what a step produces, as it is or through maps."""
        return tuple(
            each.name for each in self.steps if any(step in self.origins_of(given.stream) for given in each.inputs)
        )

    def without_code(self) -> Graph:
        """The graph as workers need it: computations travel apart, and sinks stay with the driver."""
        steps = tuple(replace(step, computation=Computation()) for step in self.steps)
        maps = tuple(replace(each, fn=_no_code) for each in self.maps)
        sources = tuple(
            replace(each, time=replace(each.time, stated=None) if each.time else None) for each in self.sources
        )
        return replace(
            self,
            sources=sources,
            steps=steps,
            maps=maps,
            sinks=tuple(replace(sink, sink=Sink()) for sink in self.sinks),
        )

    def describe(self) -> dict[str, Any]:
        """What stored state depends on, as JSON."""
        return {
            "query": self.name,
            "sources": {s.name: {"place": s.index, "schema": format_schema(s.schema)} for s in self.sources},
            "steps": {step.name: step.describe() for step in self.steps},
            "maps": {m.name: {"input": " + ".join(m.streams), "output": format_schema(m.output)} for m in self.maps},
            "sinks": {sink.name: sink.input for sink in self.sinks},
            **({"feedbacks": self._describe_feedbacks()} if self.feedbacks else {}),
        }

    def _describe_feedbacks(self) -> dict[str, Any]:
        return {
            node.name: {
                "input": node.stream,
                "schema": format_schema(node.schema),
                **({"event time": True} if node.name in self.times else {}),
            }
            for node in self.feedbacks
        }


def resolve(query: Query, schemas: Mapping[str, pa.Schema]) -> Graph:
    """Validates a query whose sources have these schemas."""
    if not query.sources:
        raise UserError(f"query {query.name!r} has no source")
    if not query.steps:
        raise UserError(f"query {query.name!r} has no step; add one with stream.key_by(...).compute(...)")
    sources = tuple(Source(name, i, schemas[name], node.time) for i, (name, node) in enumerate(query.sources.items()))
    times = {source.name: _time_column(source) for source in sources if source.time is not None}
    for source in sources:
        _check_columns(f"source {source.name!r}", source.schema)
    check_feedbacks(query)
    for node in query.steps.values():
        check_updates(query, node.name, tuple(given.stream for given in node.inputs), node.computation)
    for later in query.feedbacks.values():
        _check_columns(f"feedback {later.name!r}", later.schema)
    driven = set(times)  # streams whose time goes on by itself, and not only when something is fed back
    times.update(dict.fromkeys(timed_feedbacks(query), ""))
    streams = {source.name: source.schema for source in sources}
    streams |= {later.name: later.schema for later in query.feedbacks.values()}
    levels = dict.fromkeys(streams, 0)
    unmade = set(streams)  # streams that are, or are partly, of a source or a feedback: no step makes that part
    steps: list[Step] = []
    maps: list[MapNode] = []
    waiting = list(query.maps.values())

    def add_maps() -> None:
        """Those whose streams are all known; a map may read a map."""
        while ready := [node for node in waiting if all(stream in streams for stream in node.streams)]:
            for node in ready:
                waiting.remove(node)
                _check_united(f"map {node.name!r}", [(stream, streams[stream]) for stream in node.streams])
                if isinstance(node.fn, Transform):
                    node = _bound_map(node, node.fn, streams[node.streams[0]], times)
                _check_columns(f"map {node.name!r}", node.output)
                maps.append(node)
                streams[node.name] = node.output
                levels[node.name] = max(levels[stream] for stream in node.streams)
                unmade.update([node.name] if unmade & set(node.streams) else [])
                _add_map_time(node, times)
                driven.update([node.name] if driven & set(node.streams) else [])

    add_maps()
    for node in query.steps.values():
        inputs = tuple(_input(node, given, streams, times) for given in node.inputs)
        _check_inputs(node.name, inputs)
        untimed = all(given.time is None for given in inputs)
        computation = _bound(node, inputs)
        states = declared_states(computation)
        for state, declared in states.items():
            check_name(f"step {node.name!r}: state", state)
            if declared.ttl_time == EVENT_TIME and untimed:
                raise UserError(
                    f"step {node.name!r}: the ttl of its state {state!r} is of event time, but no input has any; give "
                    "the source event_time=..., or use WALL_TIME"
                )
        level = 1 + max(levels[given.stream] for given in inputs)
        outputs = output_schemas(computation)
        for schema in outputs.values():
            _check_columns(f"step {node.name!r}", schema)
        if node.late == "output":
            outputs["late"] = _late_schema(node.name, inputs, computation.late_rule)
        if node.on_error == DEAD_LETTER:
            outputs[DEAD_LETTER] = LETTERS
        timers = declared_timers(computation)
        for name, timer in timers.items():
            check_name(f"step {node.name!r}: timer", name)
            if timer.kind == EVENT_TIME and untimed:
                raise UserError(
                    f"step {node.name!r}: its timer {name!r} waits for event time, but no input has any; give the "
                    "source event_time=..., or make it a timer of WALL_TIME"
                )
            if timer.kind == EVENT_TIME and not driven & {given.stream for given in inputs}:
                raise UserError(
                    f"step {node.name!r}: its timer {name!r} waits for event time, but all time here is that of what "
                    "is fed back, and stands still when nothing is; read a source with event_time too, or use WALL_TIME"
                )
        holds = declared_holds(computation)
        for name in holds:
            check_name(f"step {node.name!r}: hold", name)
            if untimed:
                raise UserError(
                    f"step {node.name!r}: its hold {name!r} keeps a watermark back, but no input has event time; give "
                    "the source event_time=..."
                )
        step = Step(
            node.name,
            level,
            inputs,
            computation,
            states,
            outputs,
            node.late,
            timers,
            is_vectorised(type(computation)),
            node.on_error,
            node.productions == "strong",
            holds,
            bool(driven & {given.stream for given in inputs}),
            computation.late_rule,
        )
        steps.append(step)
        for output, schema in step.outputs.items():
            streams[step.stream(output)], levels[step.stream(output)] = schema, level
            if step.timed:
                times[step.stream(output)] = ""
            if driven & {given.stream for given in inputs}:
                driven.add(step.stream(output))
        add_maps()
    if waiting:
        silent = next(stream for stream in waiting[0].streams if stream not in streams)
        raise UserError(f"map {waiting[0].name!r} reads {silent!r}, which declares no output")
    for sink in query.sinks.values():
        if levels.get(sink.input) == 0:
            what = "source" if sink.input in query.sources else "map of sources"
            what = "feedback" if sink.input in query.feedbacks else what
            raise UserError(
                f"sink {sink.name!r} receives the {what} {sink.input!r}; only what comes out of a step can be sunk"
            )
        if sink.input in unmade:
            raise UserError(
                f"sink {sink.name!r} receives the map {sink.input!r}, which reads more than what comes out of steps; "
                "only that can be sunk"
            )
        if sink.input not in streams:
            raise UserError(f"sink {sink.name!r} receives step {sink.input!r}, which declares no output")
    for later in query.feedbacks.values():
        _check_written(later, streams, unmade)
    return Graph(
        query.name,
        sources,
        tuple(steps),
        tuple(maps),
        tuple(query.sinks.values()),
        times,
        tuple(query.feedbacks.values()),
    )


def _check_written(node: FeedbackNode, streams: Mapping[str, pa.Schema], unmade: Collection[str]) -> None:
    if node.stream not in streams:
        raise UserError(f"feedback {node.name!r} is written by step {node.stream!r}, which declares no output")
    if node.stream in unmade:
        raise UserError(
            f"feedback {node.name!r} is written by {node.stream!r}; only what comes out of a step can be fed back"
        )
    if streams[node.stream] != node.schema:
        raise UserError(
            f"feedback {node.name!r} is declared as {format_schema(node.schema)}, but {node.stream!r}, which is fed "
            f"back, is {format_schema(streams[node.stream])}"
        )


def _check_columns(who: str, schema: pa.Schema) -> None:
    taken = [name for name in schema.names if name in ("__hash", "__time")]
    if taken:
        raise UserError(f"{who} has a column {taken[0]!r}, a name that Millstream uses itself; rename it")


def _time_column(source: Source) -> str:
    assert source.time is not None
    for column, what in ((source.time.column, "event time"), (source.time.stating, "watermark")):
        if column is None:
            continue
        if column not in source.schema.names:
            names = ", ".join(source.schema.names)
            raise UserError(f"source {source.name!r}: no column {column!r} for its {what}; it has {names}")
        if not pa.types.is_timestamp(source.schema.field(column).type):
            found = format_type(source.schema.field(column).type)
            raise UserError(f"source {source.name!r}: the {what} {column!r} is {found}, expected TIMESTAMP")
    for column in source.time.partition:
        if column not in source.schema.names:
            names = ", ".join(source.schema.names)
            raise UserError(f"source {source.name!r}: no column {column!r} for its partition; it has {names}")
        kind = source.schema.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_date(kind)):
            raise UserError(
                f"source {source.name!r}: the partition {column!r} is {format_type(kind)}, expected STRING, a whole "
                "number or DATE; cast it"
            )
    return source.time.column


def _add_map_time(node: MapNode, times: dict[str, str]) -> None:
    """A map keeps the column that holds the event time; times that travel beside the columns it cannot lose."""
    found = {times[stream] for stream in node.streams if stream in times}
    if node.time is not None:
        if not all(stream in times for stream in node.streams):
            raise UserError(f"map {node.name!r}: event_time={node.time!r}, but what it reads has no event time")
        times[node.name] = node.time
        return
    if not found:
        return
    own = isinstance(node.fn, Transform)  # its times travel beside the columns, wherever they came from
    if (len(found) > 1 and not own) or any(stream not in times for stream in node.streams):
        raise UserError(f"map {node.name!r}: its streams were united, but do not have their event time in one column")
    column = "" if own else found.pop()
    if column and (column not in node.output.names or not pa.types.is_timestamp(node.output.field(column).type)):
        raise UserError(f"map {node.name!r}: its output must keep {column!r}, a TIMESTAMP, which is the event time")
    times[node.name] = column


def _bound_map(node: MapNode, fn: Transform, schema: pa.Schema, times: Mapping[str, str]) -> MapNode:
    """A map whose output follows from the schema of its streams."""
    try:
        bound = fn.bind(schema, all(stream in times for stream in node.streams))
    except UserError as error:
        raise UserError(f"map {node.name!r}: {error}") from error
    return replace(node, fn=bound, output=bound.output)


def _bound(node: StepNode, inputs: tuple[Input, ...]) -> Computation:
    """A computation whose states and outputs follow from the schemas of its inputs."""
    try:
        return node.computation.bind({given.name: given.schema for given in inputs}, inputs[0].key)
    except UserError as error:
        raise UserError(f"step {node.name!r}: {error}") from error


def _late_schema(step: str, inputs: tuple[Input, ...], rule: LateRule) -> pa.Schema:
    schemas = [given.schema for given in inputs]
    if any(schema != schemas[0] for schema in schemas):
        raise UserError(
            f"step {step!r}: late='output' needs inputs of one schema; use late='process' and look at at.time"
        )
    if all(given.time is None for given in inputs):
        raise UserError(f"step {step!r}: late='output', but no input has event time")
    try:
        return rule.schema(schemas[0])
    except UserError as error:
        raise UserError(f"step {step!r}: {error}") from error


def _input(node: StepNode, given: InputNode, streams: Mapping[str, pa.Schema], times: Mapping[str, str]) -> Input:
    if given.stream not in streams:
        raise UserError(f"step {node.name!r} reads {given.stream!r}, which declares no output")
    _check_key(node.name, given.key, streams[given.stream])
    return Input(given.name, given.stream, streams[given.stream], given.key, times.get(given.stream))


def _check_inputs(step: str, inputs: tuple[Input, ...]) -> None:
    """United streams must have one schema, and the keys of all inputs the same types."""
    first = inputs[0]
    for given in inputs[1:]:
        if given.key_types != first.key_types:
            found = ", ".join(format_type(kind) for kind in given.key_types)
            expected = ", ".join(format_type(kind) for kind in first.key_types)
            raise UserError(
                f"step {step!r}: the key of {given.stream!r} is {found}, that of {first.stream!r} is {expected}; equal "
                "keys of all inputs must meet, so give them the same types"
            )
        _check_united(f"step {step!r}", [(each.stream, each.schema) for each in inputs if each.name == given.name])


def _check_united(who: str, streams: Sequence[tuple[str, pa.Schema]]) -> None:
    first, expected = streams[0]
    for name, schema in streams[1:]:
        if schema != expected:
            raise UserError(
                f"{who}: the streams {first!r} ({format_schema(expected)}) and {name!r} ({format_schema(schema)}) were "
                "united, but differ"
            )


def _no_code(batch: pa.RecordBatch) -> None:
    """Stands for a function that travels apart."""


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
