"""A rewrite: how one query becomes another. Pure data, made by comparing the two.

Rules
-----
- A rewrite names what is put in (new or other than before), what is taken out, which steps are called otherwise, and
  what becomes of the state of those that were replaced. Applied to the query it was made from, it gives the new one.
- Steps stand in an order in which each comes after those that it reads, so a rewrite that makes a cycle is refused.
- Streams follow names: whoever read a step that is renamed reads it under its new name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from millstream.errors import UserError
from millstream.model.feedback import FeedbackNode
from millstream.model.query import InputNode, MapNode, Query, SinkNode, SourceNode, StepNode

KINDS = ("sources", "steps", "maps", "sinks", "feedbacks")
"""The kinds of named things that a query has, as its fields are called."""

CODED: dict[str, tuple[str, ...]] = {
    "steps": ("name", "inputs"),
    "maps": ("name", "streams"),
    "sinks": ("name", "input"),
}
"""The kinds that have code, and what of them is not code."""

Node = SourceNode | StepNode | MapNode | SinkNode | FeedbackNode


@dataclass(frozen=True, slots=True)
class Rewrite:
    """How a query changes. `put` and `taken` are by kind; `renamed` are steps, old name to new one; `states` are the
    rules for the state of replaced steps, by their new name."""

    put: dict[str, dict[str, Any]] = field(default_factory=dict)
    taken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    bundles: tuple[str, ...] = ()
    """The hashes of the bundles that its code is from."""
    gone: tuple[str, ...] = ()
    """Steps that are taken out though another one has their name afterwards."""
    rewired: tuple[str, ...] = ()
    """Steps, maps and sinks that are put in only to be called otherwise or to read others: their code is that of the
    query, whatever it is when the rewrite is applied."""

    @property
    def touched(self) -> tuple[str, ...]:
        """The names of all that is put in or taken out."""
        names = {name for kind in KINDS for name in (*self.put.get(kind, {}), *self.taken.get(kind, ()))}
        return tuple(sorted(names))

    @property
    def empty(self) -> bool:
        """Whether nothing would change."""
        return not any(self.put.values()) and not any(self.taken.values())


def copied(query: Query) -> Query:
    """A query of its own with the same nodes."""
    return Query(query.name, *(dict(getattr(query, kind)) for kind in KINDS))


def rewrite_of(
    before: Query,
    after: Query,
    renamed: Mapping[str, str] | None = None,
    states: Mapping[str, Any] | None = None,
    gone: Iterable[str] = (),
) -> Rewrite:
    """What makes one query of another."""
    put: dict[str, dict[str, Any]] = {}
    taken: dict[str, tuple[str, ...]] = {}
    for kind in KINDS:
        old, new = getattr(before, kind), getattr(after, kind)
        put[kind] = {name: node for name, node in new.items() if old.get(name) is not node}
        taken[kind] = tuple(name for name in old if name not in new)
    made = Rewrite(put, taken, dict(renamed or {}), dict(states or {}), gone=tuple(gone))
    rewired = [name for kind in CODED for name, node in put[kind].items() if _same_code(made, before, kind, node)]
    return replace(made, rewired=tuple(rewired))


def _same_code(rewrite: Rewrite, before: Query, kind: str, node: Any) -> bool:
    own = _own(rewrite, before, kind, node)
    return own is not None and all(
        was is now or (isinstance(was, str) and was == now)
        for was, now in ((getattr(own, name), getattr(node, name)) for name in _code_fields(kind, node))
    )


def _code_fields(kind: str, node: Any) -> list[str]:
    return [each.name for each in fields(node) if each.name not in CODED[kind]]


def _own(rewrite: Rewrite, query: Query, kind: str, node: Any) -> Any:
    """What a query has where a rewrite puts a node; nothing if that is new."""
    name = node.name
    if kind == "steps":
        name = next((old for old, new in rewrite.renamed.items() if new == name), name)
        if name == node.name and (name in rewrite.gone or name in rewrite.renamed):
            return None
    return getattr(query, kind).get(name)


def rewritten(query: Query, rewrite: Rewrite) -> Query:
    """The query after a rewrite, its steps in an order in which they can be resolved."""
    found = copied(query)
    for kind in KINDS:
        nodes = getattr(found, kind)
        for name in rewrite.taken.get(kind, ()):
            if name not in nodes:
                raise UserError(f"the query {query.name!r} has no {kind[:-1]} {name!r} to take out")
            del nodes[name]
        for name, node in rewrite.put.get(kind, {}).items():
            own = _own(rewrite, query, kind, node) if name in rewrite.rewired else None
            nodes[name] = node if own is None else replace(own, **{each: getattr(node, each) for each in CODED[kind]})
    found.steps = ordered(found)
    return found


def ordered(query: Query) -> dict[str, StepNode]:
    """The steps so that each comes after those it reads, as near to their present order as that allows."""
    made_by: dict[str, set[str]] = {}  # for each stream, the steps that must come first

    def steps_behind(stream: str, on_the_way: tuple[str, ...] = ()) -> set[str]:
        if stream in on_the_way:
            raise UserError(f"the map {stream!r} would read itself, through {' -> '.join(on_the_way)}")
        if stream not in made_by:
            mapped = query.maps.get(stream)
            if mapped is not None:
                behind = {step for each in mapped.streams for step in steps_behind(each, (*on_the_way, stream))}
            else:
                name = stream.partition(".")[0]
                behind = {name} if name in query.steps else set()
            made_by[stream] = behind
        return made_by[stream]

    waiting = {
        name: {step for given in node.inputs for step in steps_behind(given.stream)}
        for name, node in query.steps.items()
    }
    found: dict[str, StepNode] = {}
    while waiting:
        ready = next((name for name, behind in waiting.items() if behind <= set(found)), None)
        if ready is None:
            raise UserError(
                f"the steps {', '.join(sorted(waiting))} would read each other in a circle; what is fed back must go "
                "through query.feedback(...)"
            )
        del waiting[ready]
        found[ready] = query.steps[ready]
    return found


def readers_of(query: Query, stream: str) -> list[str]:
    """The steps, maps, sinks and feedbacks that read a stream, by name."""
    found = [name for name, node in query.steps.items() if any(given.stream == stream for given in node.inputs)]
    found += [name for name, each in query.maps.items() if stream in each.streams]
    found += [name for name, sink in query.sinks.items() if sink.input == stream]
    return found + [name for name, later in query.feedbacks.items() if later.stream == stream]


def rewired(query: Query, reader: str, streams: Mapping[str, str | None]) -> None:
    """Lets one reader read other streams in the place of some; None in the place of one cuts it off."""
    if reader in query.steps:
        node = query.steps[reader]
        query.steps[reader] = replace(node, inputs=tuple(_swapped(node.inputs, streams)))
    elif reader in query.maps:
        each = query.maps[reader]
        given = (streams.get(stream, stream) for stream in each.streams)
        query.maps[reader] = replace(each, streams=tuple(stream for stream in given if stream is not None))
    elif reader in query.sinks:
        sink = query.sinks[reader]
        to = streams.get(sink.input, sink.input)
        if to is None:
            del query.sinks[reader]
        else:
            query.sinks[reader] = replace(sink, input=to)
    elif reader in query.feedbacks:
        later = query.feedbacks[reader]
        query.feedbacks[reader] = replace(later, stream=streams.get(later.stream, later.stream) or "")


def _swapped(inputs: Iterable[InputNode], streams: Mapping[str, str | None]) -> Iterable[InputNode]:
    for given in inputs:
        to = streams.get(given.stream, given.stream)
        if to is not None:
            yield given if to == given.stream else replace(given, stream=to)
