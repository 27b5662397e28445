"""The graph as users build it: named sources, streams, keyed streams, steps and sinks. Pure data.

Rules
-----
- Every source, step and sink has a name, and names are unique in a query: a step's name is the address of its state.
- A stream is a source, the output of a step (under the step's name), a named output of a step (`step.name`), or a map
  of streams (under the map's name).
- A step reads streams that exist when it is added, so a graph has no cycle. Only what is fed back is written later,
  and arrives in the next epoch.
- Building refuses what can be seen to be wrong at once; everything else is checked by `graph.resolve` before the
  first epoch. Errors name the step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.computation import Computation, check_computation
from millstream.model.entries import KeyedEntries, StreamEntries
from millstream.model.explain import explain, to_dot, to_mermaid
from millstream.model.feedback import FeedbackNode
from millstream.model.letters import DEAD_LETTER, ON_ERROR, STOP
from millstream.model.sinks import Sink
from millstream.model.times import EventTime
from millstream.model.times import event_time as event_time_of
from millstream.model.transform import Transform
from millstream.model.types import parse_schema
from millstream.model.updates import check_updates

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]{0,99}\Z")


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A named source: a streaming frame, or a function of a reader that gives one."""

    name: str
    origin: Any
    unbounded: bool = False
    time: EventTime | None = None


LATE = ("drop", "process", "output")
"""What a step may do with late records."""

PRODUCTIONS = ("weak", "strong")
"""Whether what a step's task made is made again, or sent again, when Spark runs the task again."""

ONLY_INPUT = "input"
"""What the input of a step is called that has just one."""


@dataclass(frozen=True, slots=True)
class InputNode:
    """What a step reads: a stream, by a key. Streams that were united are inputs of one name."""

    name: str
    stream: str
    key: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepNode:
    """A named step: what it reads, in the order in which records of one key are applied, and what it runs."""

    name: str
    inputs: tuple[InputNode, ...]
    computation: Computation
    late: str = "drop"
    on_error: str = STOP
    productions: str = "weak"


@dataclass(frozen=True, slots=True)
class MapNode:
    """A named, stateless function of the record batches of streams. It runs wherever they are made."""

    name: str
    streams: tuple[str, ...]
    fn: Callable[[pa.RecordBatch], Any] | Transform
    output: pa.Schema
    time: str | None = None
    """The column of what it returns that is the event time, if it says so itself."""


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
    maps: dict[str, MapNode] = field(default_factory=dict)
    sinks: dict[str, SinkNode] = field(default_factory=dict)
    feedbacks: dict[str, FeedbackNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("query", self.name)

    def __repr__(self) -> str:
        edges = [f"{stream} -> {node.name}" for node in self.maps.values() for stream in node.streams]
        edges += [f"{given.stream} -> {step.name}" for step in self.steps.values() for given in step.inputs]
        edges += [f"{sink.input} -> [{sink.name}]" for sink in self.sinks.values()]
        edges += [f"{node.stream} ~> {node.name}" for node in self.feedbacks.values() if node.stream]
        return f"Query({self.name!r}): {', '.join(edges) or 'empty'}"

    def source(
        self,
        name: str,
        frame: Any,
        *,
        event_time: str | None = None,
        lateness: str | timedelta | None = None,
        percentile: float | None = None,
        watermark: Callable[[], datetime | None] | str | None = None,
        idle_after: str | timedelta = "1 minute",
        max_ahead: str | timedelta = "1 hour",
        partition: str | Sequence[str] | None = None,
        expected: Iterable[Any] = (),
        unbounded: bool = False,
    ) -> Stream:
        """Adds a source: a streaming DataFrame, or a function of a reader, `lambda read: read.format(...).load()`.

        >>> import millstream as ms
        >>> query = ms.Query("shop")
        >>> clicks = query.source("clicks", lambda read: read.table("clicks"), event_time="ts", lateness="10 seconds")

        A frame that would read its whole backlog in one epoch is refused at the start unless `unbounded` is true;
        a function's reader has default limits, which its own options override. Without Spark, None will do.

        `event_time` names a timestamp column. The source's watermark then follows its records: `lateness` behind the
        newest of them; or, with a `percentile` such as 0.99, as far as that share of an epoch's records is not late;
        or it is stated by `watermark`: a function, which the driver calls before each epoch, and which returns a
        datetime, or None for "no news"; or a timestamp column, of which the newest value counts, and null says
        nothing. A source that is silent for `idle_after` does not hold others back. A time more
        than `max_ahead` ahead of the driver's clock does not move the watermark.

        Where a source has partitions that run at different speeds, `partition` names the column that tells them apart
        (of Kafka, `["topic", "partition"]`). Each then has a watermark, and the source the least of those that are not
        silent. Without it, the newest record of the fastest partition makes those of a slow one late. A partition holds
        the source back once it was heard; those that are `expected` do so from the start.

        >>> orders = query.source("orders", None, event_time="ts", lateness="10 seconds", partition="shop")
        """
        time = event_time_of(
            name, event_time, lateness, percentile, idle_after, max_ahead, watermark, partition, expected
        )
        self._take("source", name)
        self.sources[name] = SourceNode(name, frame, unbounded, time)
        return Stream(self, (name,))

    def feedback(self, name: str, schema: str) -> Stream:
        """A stream that steps may read now and that is written later, with `feed_back`: for graphs with a cycle.

        What is written to it in an epoch is read in the next one.

        >>> import millstream as ms
        >>> class Countdown(ms.Computation):
        ...     output = "key string, n long"
        ...
        ...     def on_record(self, row, at):
        ...         if row.n > 0:
        ...             yield at.key, row.n - 1
        >>> query = ms.Query("loop")
        >>> again = query.feedback("again", schema="key string, n long")
        >>> counts = query.source("start", None).union(again).key_by("key").compute("count", Countdown)
        >>> stream = counts.feed_back(again)
        >>> query
        Query('loop'): start -> count, again -> count, count ~> again
        """
        self._take("feedback", name)
        if not isinstance(schema, str) or not schema.strip():
            raise UserError(f"feedback {name!r}: schema={schema!r}; give the schema of its records, as Spark DDL")
        try:
            self.feedbacks[name] = FeedbackNode(name, parse_schema(schema))
        except UserError as error:
            raise UserError(f"feedback {name!r}: {error}") from error
        return Stream(self, (name,))

    def compute(
        self,
        name: str,
        computation: type[Computation] | Computation,
        *,
        late: str | None = None,
        on_error: str = STOP,
        productions: str = "weak",
        **inputs: KeyedStream,
    ) -> Stream:
        """Adds a step with several named inputs, each with its own key; returns the stream of its productions.

        The keys must have the same types: equal keys of all inputs meet. In `on_record`, `at.input` says where a
        record is from; in `on_batch`, `batch.input("name")` is the part of one input. Within an epoch, records of a
        key are applied input by input, in the order given here. For `late`, `on_error` and
        `productions`, see `KeyedStream.compute`.

        >>> import millstream as ms
        >>> class Match(ms.Computation):
        ...     paid = ms.Value("boolean", default=False)
        ...     output = "id long"
        ...
        ...     def on_record(self, row, at):
        ...         if at.input == "payment":
        ...             self.paid.set(True)
        ...         elif not self.paid.get():
        ...             yield (at.key,)
        >>> query = ms.Query("orders")
        >>> orders, payments = query.source("orders", None), query.source("payments", None)
        >>> unpaid = query.compute("match", Match, payment=payments.key_by("order"), order=orders.key_by("id"))
        >>> query
        Query('orders'): payments -> match, orders -> match
        """
        if not inputs:
            raise UserError(f"step {name!r}: give its inputs by name, such as left=stream.key_by('id')")
        nodes = []
        for given, keyed in inputs.items():
            check_name(f"step {name!r}: input", given)
            if not isinstance(keyed, KeyedStream):
                raise UserError(f"step {name!r}: input {given!r} is {keyed!r}, expected stream.key_by(...)")
            if keyed.query is not self:
                raise UserError(f"step {name!r}: input {given!r} is a stream of another query")
            nodes += [InputNode(given, stream, keyed.key) for stream in keyed.streams]
        return self._add_step(name, tuple(nodes), computation, late, on_error, productions)

    def _add_step(
        self,
        name: str,
        inputs: tuple[InputNode, ...],
        computation: type[Computation] | Computation,
        late: str | None,
        on_error: str,
        productions: str,
    ) -> Stream:
        for option, given, known in (
            ("late", late, LATE),
            ("on_error", on_error, ON_ERROR),
            ("productions", productions, PRODUCTIONS),
        ):
            if given is not None and given not in known:
                raise UserError(f"step {name!r}: {option}={given!r}; give one of {', '.join(map(repr, known))}")
        self._take("step", name)
        try:
            checked = check_computation(computation)
        except UserError as error:
            raise UserError(f"step {name!r}: {error}") from error
        if late is None:
            wanted = "process" in checked.takes_late and all(self._is_late(each.stream) for each in inputs)
            late = "process" if wanted else "drop"
        if late not in checked.takes_late:
            fine = " or ".join(map(repr, checked.takes_late))
            raise UserError(f"step {name!r}: late={late!r}; {checked!r} would give wrong results: use {fine}")
        try:
            check_updates(self, name, tuple(given.stream for given in inputs), checked)
        except UserError:
            for suffix in ("partial", "best", "left", "right"):  # what the library has put in front of the step
                self.maps.pop(f"{name}-{suffix}", None)
            raise
        if late == "output" and "late" in checked.outputs:
            raise UserError(f"step {name!r}: late='output' makes an output 'late', and the computation declares one")
        if on_error == DEAD_LETTER and DEAD_LETTER in checked.outputs:
            raise UserError(
                f"step {name!r}: on_error='dead_letter' makes an output 'dead_letter', and the computation declares "
                "one; give its own another name"
            )
        self.steps[name] = StepNode(name, inputs, checked, late, on_error, productions)
        return Stream(self, (name,))

    def _is_late(self, stream: str) -> bool:
        """Whether a stream has nothing but records that were too late for a step."""
        if stream in self.maps:
            return all(map(self._is_late, self.maps[stream].streams))
        step, _, output = stream.partition(".")
        return output == "late" and step in self.steps

    def explain(self) -> str:
        """The levels of the query: what runs in which stage of an epoch's one Spark job.

        >>> import millstream as ms
        >>> class Seen(ms.Computation):
        ...     def on_record(self, row, at): ...
        >>> query = ms.Query("words")
        >>> stream = query.source("lines", None).key_by("word").compute("seen", Seen)
        >>> print(query.explain())
        query words: 1 level, one Spark job per epoch
        level 0: route
          source lines
        level 1: host
          step seen (Seen) <- lines by word
        """
        return explain(self)

    def to_dot(self) -> str:
        """The graph in Graphviz's language."""
        return to_dot(self)

    def to_mermaid(self) -> str:
        """The graph as a Mermaid flow chart, which GitHub and many editors draw.

        >>> import millstream as ms
        >>> class Seen(ms.Computation):
        ...     def on_record(self, row, at): ...
        >>> query = ms.Query("words")
        >>> stream = query.source("lines", None).key_by("word").compute("seen", Seen)
        >>> print(query.to_mermaid())
        flowchart LR
          n_lines([lines])
          n_seen[seen]
          n_lines -->|by word| n_seen
        """
        return to_mermaid(self)

    def _take(self, what: str, name: str) -> None:
        check_name(what, name)
        for kind, taken in (
            ("source", self.sources),
            ("step", self.steps),
            ("map", self.maps),
            ("sink", self.sinks),
            ("feedback", self.feedbacks),
        ):
            if name in taken:
                raise UserError(f"{what} {name!r}: the query {self.name!r} already has a {kind} of that name")


@dataclass(frozen=True, slots=True)
class Stream(StreamEntries):
    """A named edge: the records of a source, or the productions of a step. Several, if they were united.

    Made by `Query.source`, by `compute`, and by the methods below. Any number of steps and sinks may read one.
    """

    query: Query
    streams: tuple[str, ...]

    @property
    def name(self) -> str:
        """The stream's name; of several, all of them."""
        return " + ".join(self.streams)

    if not TYPE_CHECKING:  # type checkers see by themselves what is missing

        def __getattr__(self, name: str) -> Any:
            hint = f": key it first, as stream.key_by(...).{name}(...)" if hasattr(KeyedStream, name) else ""
            raise AttributeError(f"a stream has no {name!r}{hint}")

    def output(self, name: str) -> Stream:
        """A named output of the step that made this stream: one that its computation declares in `outputs`, or
        "late" or "dead_letter", if the step makes one.

        >>> import millstream as ms
        >>> class Split(ms.Computation):
        ...     outputs = {"large": "id long, amount long"}
        ...
        ...     def on_record(self, row, at):
        ...         if row.amount > 100:
        ...             yield ms.to("large", at.key, row.amount)
        >>> query = ms.Query("orders")
        >>> split = query.source("orders", None).key_by("id").compute("split", Split)
        >>> split.output("large").name
        'split.large'
        """
        step = self.query.steps.get(self.streams[0]) if len(self.streams) == 1 else None
        if step is None:
            raise UserError(f"{self.name!r} has no named outputs; ask the stream that compute() returned")
        made = {"late": step.late == "output", DEAD_LETTER: step.on_error == DEAD_LETTER}
        if name not in step.computation.outputs and not made.get(name):
            known = ", ".join(step.computation.outputs) or "none"
            raise UserError(f"step {step.name!r} has no output {name!r}; it declares {known}")
        return Stream(self.query, (f"{step.name}.{name}",))

    def union(self, *others: Stream) -> Stream:
        """This stream and others of the same schema, as one.

        Within an epoch, a step that reads it applies the first one's records of a key first; after a map, the order
        is that of the tasks that made the records.
        """
        for other in others:
            if not isinstance(other, Stream) or other.query is not self.query:
                raise UserError(f"stream {self.name!r}: union takes streams of the same query, found {other!r}")
        streams = [name for stream in (self, *others) for name in stream.streams]
        if len(set(streams)) != len(streams):
            raise UserError(f"union names a stream twice: {', '.join(streams)}")
        return Stream(self.query, tuple(streams))

    def map_batches(
        self, name: str, fn: Callable[[pa.RecordBatch], Any], *, output: str, event_time: str | None = None
    ) -> Stream:
        """A stateless function of record batches: Arrow in, Arrow out, without an exchange.

        `fn` gets a `pyarrow.RecordBatch` of the stream's columns and returns one, or a table, whose columns are those
        of `output` (a schema in Spark's DDL), or None for no records. How many records a call gets is not defined, and
        neither is how often it is called; so it must treat each record by itself.

        What a step produces has its event time beside its columns. Of that, `fn` returns as many records as it gets,
        in their order, or says with `event_time` which column of what it returns is the event time. To leave records
        out, see `filter`.

        >>> import millstream as ms, pyarrow as pa, pyarrow.compute as pc
        >>> def shout(batch):
        ...     return pa.record_batch({"word": pc.utf8_upper(batch["word"])})
        >>> query = ms.Query("words")
        >>> loud = query.source("lines", None).map_batches("shout", shout, output="word string")
        >>> query
        Query('words'): lines -> shout
        """
        if not callable(fn):
            raise UserError(f"map {name!r}: found {fn!r}, expected a function of a record batch")
        if not isinstance(output, str) or not output.strip():
            raise UserError(f"map {name!r}: output={output!r}; give the schema of what it returns, as Spark DDL")
        try:
            schema = parse_schema(output)
        except UserError as error:
            raise UserError(f"map {name!r}: {error}") from error
        if event_time is not None and (
            event_time not in schema.names or not pa.types.is_timestamp(schema.field(event_time).type)
        ):
            raise UserError(f"map {name!r}: event_time={event_time!r} is no column of type TIMESTAMP of its output")
        return self._add_map(name, fn, schema, event_time)

    def _add_map(
        self,
        name: str,
        fn: Callable[[pa.RecordBatch], Any] | Transform,
        schema: pa.Schema,
        event_time: str | None = None,
    ) -> Stream:
        for stream in self.streams:
            if stream in self.query.feedbacks:
                raise UserError(
                    f"map {name!r} reads the feedback {stream!r}; map what is fed back before it is, and read it with "
                    "key_by(...).compute(...)"
                )
        self.query._take("map", name)
        self.query.maps[name] = MapNode(name, self.streams, fn, schema, event_time)
        return Stream(self.query, (name,))

    def feed_back(self, later: Stream) -> Stream:
        """Writes the stream to one that `Query.feedback` made, whose readers get it in the next epoch.

        Returns this stream, so that it can go on.
        """
        node = self.query.feedbacks.get(later.name) if isinstance(later, Stream) else None
        if node is None or later.query is not self.query:
            raise UserError(f"stream {self.name!r}: feed_back takes what query.feedback(...) returned, found {later!r}")
        if len(self.streams) != 1:
            raise UserError(f"feedback {node.name!r} is written by several streams ({self.name}); unite them in a step")
        if node.stream:
            raise UserError(
                f"feedback {node.name!r} is written by {node.stream!r} and {self.name!r}; it has one writer: give each "
                "a feedback of its own, and unite them where they are read"
            )
        self.query.feedbacks[node.name] = replace(node, stream=self.name)
        return self

    def key_by(self, *columns: str) -> KeyedStream:
        """The stream, keyed by one or several of its columns. Null is a key like any other."""
        if not columns:
            raise UserError(f"stream {self.name!r}: key_by needs at least one column")
        for column in columns:
            if not isinstance(column, str):
                raise UserError(f"stream {self.name!r}: key_by takes column names, found {column!r}")
        if len(set(columns)) != len(columns):
            raise UserError(f"stream {self.name!r}: key_by names a column twice: {', '.join(columns)}")
        return KeyedStream(self.query, self.streams, columns)

    def sink(self, name: str, sink: Sink) -> Stream:
        """Delivers the stream to `Parquet(...)`, `ForeachBatch(...)` or `Memory()`; returns the stream, so that it can
        go on."""
        if not isinstance(sink, Sink):
            raise UserError(f"sink {name!r}: found {sink!r}, expected Parquet(...), ForeachBatch(...) or Memory()")
        if len(self.streams) != 1:
            raise UserError(f"sink {name!r} receives several streams ({self.name}); give each a sink of its own")
        for node in self.query.sinks.values():
            if sink.is_place_of(node.sink):
                raise UserError(f"sink {name!r} writes to the place of the sink {node.name!r}; give each its own")
        self.query._take("sink", name)
        self.query.sinks[name] = SinkNode(name, self.name, sink)
        return self


@dataclass(frozen=True, slots=True)
class KeyedStream(KeyedEntries):
    """A stream and the columns that make its key. Made by `Stream.key_by`."""

    query: Query
    streams: tuple[str, ...]
    key: tuple[str, ...]

    def compute(
        self,
        name: str,
        computation: type[Computation] | Computation,
        *,
        late: str | None = None,
        on_error: str = STOP,
        productions: str = "weak",
    ) -> Stream:
        """Adds a step that runs a computation on every key; returns the stream of its productions.

        `computation` is a class that needs no arguments, or an instance. `late` says what becomes of records that are
        older than the watermark of the epoch before, or have no event time: "drop" counts and drops them, "process"
        treats them like others, and "output" sends them to the output `late`, unseen by the computation, with their own
        event time. The default is "process" for what reads nothing but an output `late`, else "drop".

        `on_error` says what becomes of a record that the computation fails on: "stop" stops the query; "dead_letter"
        sends it to the output `dead_letter` (step, key, record, error, epoch), and its key stays as before it.

        `productions` says what happens when Spark runs a task again of which others have already consumed the output:
        "weak" runs the computation again, and if it does not come to the same, the epoch; "strong" stores what it made
        and sends that again. State and sinks are exactly once either way.

        For a step with several inputs, see `Query.compute`.
        """
        inputs = tuple(InputNode(ONLY_INPUT, stream, self.key) for stream in self.streams)
        return self.query._add_step(name, inputs, computation, late, on_error, productions)


def check_name(what: str, name: object) -> None:
    """Names become parts of stored objects' names, so they are limited."""
    if not isinstance(name, str) or not _NAME.match(name):
        raise UserError(
            f"{what} {name!r}: a name is a letter or underscore followed by up to 99 letters, digits, '_' or '-'"
        )
