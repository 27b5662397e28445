"""A query as text and as a drawing: its levels, and what flows where.

Rules
-----
- The level of a step is one more than the highest level of what it reads; a map runs where its streams are made, so it
  has their level. This is what an epoch runs: one stage per level, in one Spark job.
- What is fed back has level 0, as a source has: it was written in the epoch before. Drawings show it dashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.model.query import Query


NEXT = "next epoch"


def levels(query: Query) -> dict[str, int]:
    """The level of every source, map and step, by name."""
    found = dict.fromkeys([*query.sources, *query.feedbacks], 0)
    reads = {step.name: {given.stream for given in step.inputs} for step in query.steps.values()}
    maps = {each.name: set(each.streams) for each in query.maps.values()}
    waiting = {**reads, **maps}
    while waiting:
        for name, streams in list(waiting.items()):
            origins = [stream.partition(".")[0] for stream in streams]
            if all(origin in found for origin in origins):
                found[name] = max(found[origin] for origin in origins) + (name in reads)
                del waiting[name]
    return found


def explain(query: Query) -> str:
    """The levels of a query, a line for everything that runs in each."""
    at = levels(query)
    lines = [f"query {query.name}: {_counted(max(at.values(), default=0), 'level')}, one Spark job per epoch"]
    for level in range(max(at.values(), default=0) + 1):
        lines.append(
            f"level {level}: " + ("route" if level == 0 else "host") + (", maps" if _maps(query, level) else "")
        )
        lines += [f"  source {name}" for name in query.sources if at[name] == level]
        if level == 0:
            lines += [
                f"  feedback {node.name} <- {node.stream or 'nobody'}, {NEXT}" for node in query.feedbacks.values()
            ]
        for step in query.steps.values():
            if at[step.name] == level:
                reads = ", ".join(f"{given.stream} by {' and '.join(given.key)}" for given in step.inputs)
                lines.append(f"  step {step.name} ({type(step.computation).__name__}) <- {reads}")
        lines += [f"  map {query.maps[n].name} <- {', '.join(query.maps[n].streams)}" for n in _maps(query, level)]
        for sink in query.sinks.values():
            if at[sink.input.partition(".")[0]] == level:
                lines.append(f"  sink {sink.name} ({type(sink.sink).__name__}) <- {sink.input}")
    return "\n".join(lines)


def _maps(query: Query, level: int) -> list[str]:
    at = levels(query)
    return [name for name in query.maps if at[name] == level]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def edges(query: Query) -> Iterator[tuple[str, str, str]]:
    """(from, to, label) of every edge."""
    for each in query.maps.values():
        for stream in each.streams:
            yield stream.partition(".")[0], each.name, stream.partition(".")[2]
    for step in query.steps.values():
        for given in step.inputs:
            origin, _, output = given.stream.partition(".")
            yield origin, step.name, f"{output + ' ' if output else ''}by {', '.join(given.key)}"
    for sink in query.sinks.values():
        origin, _, output = sink.input.partition(".")
        yield origin, sink.name, output


def late_edges(query: Query) -> Iterator[tuple[str, str, str]]:
    """(from, to, label) of every edge that leads into the next epoch."""
    for node in query.feedbacks.values():
        if node.stream:
            origin, _, output = node.stream.partition(".")
            yield origin, node.name, f"{output + ' ' if output else ''}{NEXT}"


def to_dot(query: Query) -> str:
    """The graph in Graphviz's language."""
    shapes: dict[str, Iterable[str]] = {
        "cds": query.sources,
        "box": query.steps,
        "ellipse": query.maps,
        "cylinder": query.sinks,
        "larrow": query.feedbacks,
    }
    lines = [f'digraph "{query.name}" {{', "  rankdir=LR;"]
    for shape, names in shapes.items():
        lines += [f'  "{name}" [shape={shape}];' for name in names]
    lines += [f'  "{a}" -> "{b}"' + (f' [label="{label}"]' if label else "") + ";" for a, b, label in edges(query)]
    lines += [f'  "{a}" -> "{b}" [label="{label}", style=dashed];' for a, b, label in late_edges(query)]
    return "\n".join([*lines, "}"])


def to_mermaid(query: Query) -> str:
    """The graph as a Mermaid flow chart."""
    shapes: dict[str, Iterable[str]] = {
        "([{}])": query.sources,
        "[{}]": query.steps,
        "({})": query.maps,
        "[({})]": query.sinks,
        ">{}]": query.feedbacks,
    }
    lines = ["flowchart LR"]
    for shape, names in shapes.items():
        lines += [f"  {_id(name)}{shape.format(name)}" for name in names]
    lines += [f"  {_id(a)} -->" + (f"|{label}|" if label else "") + f" {_id(b)}" for a, b, label in edges(query)]
    lines += [f"  {_id(a)} -.->|{label}| {_id(b)}" for a, b, label in late_edges(query)]
    return "\n".join(lines)


def _id(name: str) -> str:
    return "n_" + name.replace("-", "_dash_")  # Mermaid has reserved words, and takes no dashes
