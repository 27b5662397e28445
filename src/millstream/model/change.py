"""A change of a running query, as users write it: insert, replace, remove, rename, or any stream of their own.

Rules
-----
- A change edits a copy of the query. The query that runs is not touched, and a change that is not asked for is nothing.
- What can be seen to be wrong at once is refused at once, by name; the rest when the change is resolved: the new graph
  must be as good as one that is started (`graph.resolve`), and every state must have its rule (`model.transfers`).
- Names stay unique, and a name is the address of state: a step that is renamed takes its state along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.carry import ALL_OTHERS, Carry, Convert, Drop, Fresh, convert
from millstream.model.computation import Computation, check_computation
from millstream.model.query import InputNode, Query, StepNode, Stream, check_name
from millstream.model.rewrite import KINDS, Rewrite, copied, ordered, readers_of, rewired, rewrite_of
from millstream.model.sinks import Parquet, Sink
from millstream.model.types import format_schema

Names = str | Sequence[str]
VERBS = ("source", "insert", "sink", "replace", "remove", "rename", "shadow", "cut_over")
SHADOW = "_shadow"
"""How the name of a step that is built beside another one ends."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """Stands in a call for code that is in a bundle: the bundle's hash, and `module:Name`."""

    sha: str
    entry: str


@dataclass(frozen=True, slots=True)
class Calls:
    """A change as the calls that make it, for those who do not have the query: verb and arguments of each."""

    calls: tuple[tuple[str, dict[str, Any]], ...] = ()

    def rewrite(self, query: Query, load: Callable[[str, str], Any]) -> Rewrite:
        """What the calls make of a query; `load` gets code out of bundles."""
        change, bundles = Change(query), list[str]()

        def loaded(given: Any) -> Any:
            if isinstance(given, Shipped):
                bundles.append(given.sha)
                return load(given.sha, given.entry)
            if isinstance(given, Convert) and isinstance(given.fn, Shipped):
                return convert(loaded(given.fn), source=given.source, batch=given.batch)
            if isinstance(given, Mapping):
                return {name: loaded(each) for name, each in given.items()}
            return given

        for verb, arguments in self.calls:
            if verb not in VERBS:
                raise UserError(f"a change cannot {verb!r}; it can {', '.join(VERBS)}")
            arguments = loaded(arguments)
            try:
                getattr(change, verb)(**arguments)
            except TypeError as error:
                raise UserError(f"{verb}: {error}") from error
        return replace(change.rewrite, bundles=tuple(dict.fromkeys(bundles)))

    @property
    def plain(self) -> bool:
        """Whether all code that it brings is in bundles, so that it can be pickled by anyone."""
        return all(_is_plain(given) for _, arguments in self.calls for given in arguments.values())


def _is_plain(given: Any) -> bool:
    if isinstance(given, Mapping):
        return all(map(_is_plain, given.values()))
    if isinstance(given, list | tuple):
        return all(map(_is_plain, given))
    if isinstance(given, Convert):
        return isinstance(given.fn, Shipped)
    return given is None or isinstance(given, str | bool | Shipped | Carry | Fresh | Drop | Parquet)


Verb = TypeVar("Verb", bound=Callable[..., Any])


def _all_or_nothing(verb: Verb) -> Verb:
    """A verb of a change that is refused has changed nothing: whoever goes on has what was there before."""

    @functools.wraps(verb)
    def whole(change: Change, *args: Any, **given: Any) -> Any:
        nodes = {kind: dict(getattr(change.query, kind)) for kind in KINDS}
        were, states = dict(change._were), dict(change._states)
        try:
            return verb(change, *args, **given)
        except BaseException:
            for kind, known in nodes.items():
                setattr(change.query, kind, known)
            change._were, change._states = were, states
            raise

    return cast(Verb, whole)


class Change:
    """What is to become of a query. Made by `modify()` of a running query.

    >>> import millstream as ms
    >>> from millstream.model.change import Change
    >>> class Seen(ms.Computation):
    ...     output = "word string"
    ...
    ...     def on_record(self, row, at):
    ...         yield (at.key,)
    >>> query = ms.Query("words")
    >>> words = query.source("words", None).key_by("word").compute("seen", Seen).sink("out", ms.Memory())
    >>> change = Change(query)
    >>> change.insert("short", keep=lambda batch: [len(w) < 9 for w in batch["word"].to_pylist()], after="words")
    >>> change.query
    Query('words'): words -> short, words -> seen, seen -> [out]
    """

    def __init__(self, query: Query) -> None:
        self._before = query
        self.query = copied(query)
        """The query as it will be."""
        self._were = {name: name for name in query.steps}
        """What the steps that go on were called before."""
        self._states: dict[str, dict[str, Any]] = {}

    @property
    def rewrite(self) -> Rewrite:
        """The change so far, as a value."""
        renamed = {old: new for new, old in self._were.items() if old != new}
        gone = [name for name in self._before.steps if name not in self._were.values() and name in self.query.steps]
        states = {name: rules for name, rules in self._states.items() if name in self._were}
        return rewrite_of(self._before, self.query, renamed, states, gone)

    def stream(self, name: str) -> Stream:
        """A stream of the query, by the name of its source, step, output (`step.output`) or map: what is built on it
        with `key_by`, `compute`, `map_batches`, `sink` and so on is part of the change."""
        self._check_stream(name)
        return Stream(self.query, (name,))

    @_all_or_nothing
    def source(self, name: str, frame: Callable[[Any], Any], **options: Any) -> Stream:
        """Adds a source: a function of a reader, with the options of `Query.source`. It is read from its beginning, as
        Spark understands that, from the epoch on in which the change takes effect."""
        if name in self._before.sources and name not in self.query.sources:
            raise UserError(f"source {name!r}: this change removes one of that name; give the new one another name")
        made = self.query.source(name, frame, **options)
        if frame is not None and (not callable(frame) or hasattr(frame, "isStreaming")):
            raise UserError(
                f"source {name!r}: found {frame!r}; a source that comes while the query runs is a function of a "
                "reader: lambda read: read.format(...).load()"
            )
        return made

    @_all_or_nothing
    def insert(
        self,
        name: str,
        computation: type[Computation] | Computation | None = None,
        *,
        after: Names,
        before: Names | None = None,
        key: Names | None = None,
        keep: Callable[[pa.RecordBatch], Any] | None = None,
        map: Callable[[pa.RecordBatch], Any] | None = None,
        output: str | None = None,
        late: str | None = None,
        on_error: str = "stop",
        productions: str = "weak",
    ) -> None:
        """Adds a step that reads the stream `after`, or several that are united.

        `before` names those that shall read it in the place of `after`: steps, maps or sinks; nobody by default, so
        that it is a branch of its own. Give one of: a `computation`, keyed by `key` (if left out, as the step `before`
        is; `Dedupe` knows its own); a filter, `keep`, as of `Stream.filter`; or a function of batches, `map`, with
        its `output`, as of `Stream.map_batches`.
        """
        given = [each is not None for each in (computation, keep, map)].count(True)
        if given != 1:
            raise UserError(f"insert {name!r}: give one of a computation, keep=... and map=..., found {given}")
        _check_function("insert", name, keep or map)
        streams = _several("after", after)
        for stream in streams:
            self._check_stream(stream)
        readers = _several("before", before) if before is not None else ()
        for reader in readers:
            if not any(reader in readers_of(self.query, stream) for stream in streams):
                known = sorted({each for stream in streams for each in readers_of(self.query, stream)})
                raise UserError(
                    f"insert {name!r}: {reader!r} does not read {' + '.join(streams)}; those that do: "
                    f"{', '.join(known) or 'none'}"
                )
        source = Stream(self.query, tuple(streams))
        if computation is not None:
            columns = self._key_of(name, computation, key, streams, readers)
            keyed = source.key_by(*columns)
            made = keyed.compute(name, computation, late=late, on_error=on_error, productions=productions)
        elif keep is not None:
            made = source.filter(name, keep)
        else:
            assert map is not None
            made = source.map_batches(name, map, output=output or "")
        for reader in readers:
            rewired(self.query, reader, dict.fromkeys(streams, made.name))
            self._once(reader)

    @_all_or_nothing
    def sink(self, name: str, sink: Sink, *, after: str) -> None:
        """Adds a sink for the stream `after`."""
        self.stream(after).sink(name, sink)

    def _once(self, reader: str) -> None:
        """Lets one read each stream once where it has come to read it twice."""
        if reader in self.query.steps:
            node = self.query.steps[reader]
            self.query.steps[reader] = replace(node, inputs=tuple(dict.fromkeys(node.inputs)))
        elif reader in self.query.maps:
            each = self.query.maps[reader]
            self.query.maps[reader] = replace(each, streams=tuple(dict.fromkeys(each.streams)))

    def _key_of(
        self, name: str, computation: Any, key: Names | None, streams: Sequence[str], readers: Sequence[str]
    ) -> Sequence[str]:
        if key is not None:
            return _several("key", key)
        own = getattr(computation, "id", None)  # of a Dedupe
        if isinstance(own, tuple):
            return own
        keys = {
            given.key
            for reader in readers
            if reader in self.query.steps
            for given in self.query.steps[reader].inputs
            if given.stream in streams
        }
        if len(keys) != 1:
            raise UserError(f"insert {name!r}: say by which columns its records are keyed: key='user'")
        return keys.pop()

    @_all_or_nothing
    def replace(
        self,
        name: str,
        computation: type[Computation] | Computation | Callable[[pa.RecordBatch], Any] | None = None,
        *,
        state: Mapping[str, Any] | Any = None,
        key: Names | None = None,
        late: str | None = None,
        on_error: str | None = None,
        productions: str | None = None,
        keep: Callable[[pa.RecordBatch], Any] | None = None,
        map: Callable[[pa.RecordBatch], Any] | None = None,
        output: str | None = None,
    ) -> None:
        """Gives a step another computation, or a map or filter another function.

        `state` says for every state, timer and hold of the old computation and of the new one what becomes of it, by
        its name: `carry()`, `carry(type)`, `convert(fn)`, `fresh()`, or, for an old one, `drop()`. `carry()` alone
        carries all, as they are; `{"total": carry(float), ...: carry()}`, with three dots, all that are not named.
        What has no rule is an error that lists it. `key` and the other options stay as they are unless they are given.
        """
        if name in self.query.maps:
            if isinstance(state, Mapping) and state:
                raise UserError(f"replace {name!r}: it is a map, and stores nothing; found a rule for {min(state)!r}")
            self._replace_map(name, computation, keep, map, output)
            return
        if name not in self.query.steps:
            raise UserError(
                f"replace {name!r}: the query has no step or map of that name; {self._named('steps')}, "
                f"{self._named('maps')}"
            )
        if keep is not None or map is not None:
            raise UserError(f"replace {name!r}: it is a step; give it a computation, not keep= or map=")
        node = self.query.steps[name]
        try:
            checked = node.computation if computation is None else check_computation(computation)
        except UserError as error:
            raise UserError(f"replace {name!r}: {error}") from error
        inputs = self._keyed_anew("replace", node, key)
        scratch = copied(self.query)  # the checks of `compute`, under the same name
        del scratch.steps[name]
        scratch._add_step(
            name, inputs, checked, late or node.late, on_error or node.on_error, productions or node.productions
        )
        self.query.steps[name] = scratch.steps[name]
        rules = state if isinstance(state, Mapping) else {...: state}
        self._states[name] = {ALL_OTHERS if name is ... else name: rule for name, rule in rules.items()}

    @staticmethod
    def _keyed_anew(verb: str, node: StepNode, key: Names | None) -> tuple[InputNode, ...]:
        if key is None:
            return node.inputs
        columns = tuple(_several("key", key))
        if len({given.name for given in node.inputs}) > 1:
            raise UserError(f"{verb} {node.name!r}: it has several inputs, each with a key of its own; insert it anew")
        return tuple(InputNode(given.name, given.stream, columns) for given in node.inputs)

    def _replace_map(self, name: str, function: Any, keep: Any, map: Any, output: str | None) -> None:
        each = self.query.maps[name]
        if [given is not None for given in (function, keep, map)].count(True) != 1:
            raise UserError(f"replace {name!r}: it is a map; give one of a function, keep=... and map=...")
        if function is not None and callable(getattr(each.fn, "keep", None)):  # of a filter, which stays one
            keep = function
        elif function is not None:
            map = function
        _check_function("replace", name, keep or map)
        scratch = copied(self.query)
        del scratch.maps[name]
        stream = Stream(scratch, each.streams)
        if keep is not None:
            stream.filter(name, keep)
        else:
            shown = output if output is not None else format_schema(each.output)
            stream.map_batches(name, map, output=shown, event_time=each.time)
        self.query.maps[name] = scratch.maps[name]

    @_all_or_nothing
    def remove(self, name: str, *, reconnect: bool = False, cut: bool = False) -> None:
        """Takes out a step, a map, a sink or a source. The state of a step is dropped. Nothing can take the place of a
        source, so what reads it must be cut, or be removed first.

        If others read it, say what they shall do: with `reconnect` they read what it read (but nobody gets that for its
        late records and dead letters: those are cut), with `cut` they lose that input, and its sinks go with it.
        """
        if reconnect and cut:
            raise UserError(f"remove {name!r}: reconnect and cut exclude each other")
        if name in self.query.sinks:
            del self.query.sinks[name]
            return
        holder = next((nodes for nodes in self._holders() if name in nodes), None)
        if holder is None:
            raise UserError(
                f"remove {name!r}: the query has no step, map, sink or source of that name; {self._named('steps')}"
            )
        made = [name, *(f"{name}.{each}" for each in self._outputs(name))]
        readers = {reader for stream in made for reader in readers_of(self.query, stream) if reader != name}
        if readers and not reconnect and not cut:
            raise UserError(
                f"remove {name!r}: it is read by {', '.join(sorted(readers))}; say reconnect=True for them to read "
                "what it read, or cut=True for them to do without"
            )
        if reconnect:
            self._reconnect(name, readers, made)
        else:
            for reader in sorted(readers):
                self._cut(name, reader, made)
        del holder[name]
        self._states.pop(name, None)
        self._were.pop(name, None)

    def _holders(self) -> tuple[dict[str, Any], ...]:
        return self.query.steps, self.query.maps, self.query.sources

    def _reconnect(self, name: str, readers: Collection[str], made: Sequence[str]) -> None:
        if name in self.query.sources:
            raise UserError(
                f"remove {name!r}: a source reads nothing that others could read in its place; say cut=True"
            )
        streams = (
            self.query.maps[name].streams
            if name in self.query.maps
            else tuple(given.stream for given in self.query.steps[name].inputs)
        )
        if len(streams) != 1:
            raise UserError(f"remove {name!r}: it reads {', '.join(streams)}; only one stream can take its place")
        letters = [f"{name}.{each}" for each in ("late", "dead_letter") if f"{name}.{each}" in made]
        for reader in sorted(readers):
            if any(reader in readers_of(self.query, stream) for stream in letters):
                self._cut(name, reader, letters)
            rewired(self.query, reader, dict.fromkeys(made, streams[0]))
            self._once(reader)

    def _cut(self, name: str, reader: str, made: Sequence[str]) -> None:
        rewired(self.query, reader, dict.fromkeys(made))
        left: Sequence[Any] = (None,)
        if reader in self.query.steps:
            left = self.query.steps[reader].inputs
        elif reader in self.query.maps:
            left = self.query.maps[reader].streams
        elif reader in self.query.feedbacks:
            left = ()
        if not left:
            raise UserError(f"remove {name!r}: {reader!r} would be left without an input; remove it first")

    @_all_or_nothing
    def shadow(
        self,
        name: str,
        computation: type[Computation] | Computation | None = None,
        *,
        key: Names | None = None,
        late: str | None = None,
        on_error: str | None = None,
        productions: str | None = None,
    ) -> None:
        """Builds what a step shall become beside it: a step of another key, or another computation, which reads the
        same streams, under the name of the step with `_shadow` at its end. Nobody reads it until a later change lets it
        take the step's place, with `cut_over`. Its state begins empty, and can be looked at meanwhile."""
        if name not in self.query.steps:
            raise UserError(f"shadow {name!r}: the query has no step of that name; {self._named('steps')}")
        node = self.query.steps[name]
        inputs = self._keyed_anew("shadow", node, key)
        self.query._add_step(
            f"{name}{SHADOW}",
            inputs,
            node.computation if computation is None else computation,
            late or node.late,
            on_error or node.on_error,
            productions or node.productions,
        )

    @_all_or_nothing
    def cut_over(self, name: str) -> None:
        """Lets the step that `shadow` has built take the place of the one it was built for, whose state is dropped.
        What the old one had sent to its readers stays sent."""
        built = f"{name}{SHADOW}"
        for each in (name, built):
            if each not in self.query.steps:
                raise UserError(f"cut_over {name!r}: the query has no step {each!r}; {self._named('steps')}")
        outputs = [name, *(f"{name}.{each}" for each in self._outputs(name))]
        known = {built, *(f"{built}.{each}" for each in self._outputs(built))}
        swapped: dict[str, str | None] = {stream: built + stream.removeprefix(name) for stream in outputs}
        for reader in sorted({reader for stream in outputs for reader in readers_of(self.query, stream)} - {name}):
            lost = [stream for stream in outputs if reader in readers_of(self.query, stream)]
            missing = [stream for stream in lost if swapped[stream] not in known]
            if missing:
                raise UserError(
                    f"cut_over {name!r}: {reader!r} reads {missing[0]!r}, and {built!r} makes no such output"
                )
            rewired(self.query, reader, swapped)
        self.remove(name)
        self.rename(built, name)
        self.query.steps = ordered(self.query)

    @_all_or_nothing
    def rename(self, old: str, new: str) -> None:
        """Calls a step otherwise. Its state goes with it."""
        if old not in self.query.steps:
            raise UserError(f"rename {old!r}: the query has no step of that name; {self._named('steps')}")
        check_name("step", new)
        self.query._take("step", new)
        outputs = self._outputs(old)
        node = self.query.steps[old]
        self.query.steps = {
            (new if name == old else name): (replace(node, name=new) if name == old else each)
            for name, each in self.query.steps.items()
        }
        swapped: dict[str, str | None] = {old: new, **{f"{old}.{each}": f"{new}.{each}" for each in outputs}}
        for reader in {reader for stream in swapped for reader in readers_of(self.query, stream)}:
            rewired(self.query, reader, swapped)
        if old in self._were:  # or else it was inserted by this very change
            self._were[new] = self._were.pop(old)
        if old in self._states:
            self._states[new] = self._states.pop(old)

    def _outputs(self, name: str) -> list[str]:
        node = self.query.steps.get(name)
        return [] if node is None else [*node.computation.outputs, "late", "dead_letter"]

    def _check_stream(self, name: str) -> None:
        step, dot, output = name.partition(".") if isinstance(name, str) else ("", "", "")
        if dot and step in self.query.steps:
            Stream(self.query, (step,)).output(output)
            return
        if dot or not any(name in getattr(self.query, kind) for kind in ("sources", "steps", "maps", "feedbacks")):
            streams = [*self.query.sources, *self.query.steps, *self.query.maps, *self.query.feedbacks]
            raise UserError(f"no stream {name!r}; the query has {', '.join(streams)}")

    def _named(self, kind: str) -> str:
        return f"its {kind} are {', '.join(getattr(self.query, kind)) or 'none'}"


def _check_function(verb: str, name: str, given: Any) -> None:
    if isinstance(given, Computation) or (isinstance(given, type) and issubclass(given, Computation)):
        kind = given if isinstance(given, type) else type(given)
        raise UserError(
            f"{verb} {name!r}: found the computation {kind.__name__}, expected a function of a record batch"
        )


def _several(what: str, given: Names) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"{what}={given!r}: give a name, or several")
    return names
