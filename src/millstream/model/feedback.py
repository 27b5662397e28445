"""Feedback: a stream that steps may read before anybody writes it. What is fed back arrives in the next epoch.

Rules
-----
- The graph of an epoch has no cycle: a stream that is fed back is read like a source, on level 0, and what is written
  to it waits for the next epoch.
- It has one writer, and at least one reader; its schema is declared, because it is read before its writer is known.
- It has event time if its writer has, and that may depend on what reads it; so it is found from the sources on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from millstream.errors import UserError

if TYPE_CHECKING:
    from millstream.model.query import Query


@dataclass(frozen=True, slots=True)
class FeedbackNode:
    """A stream that is fed back: its name and schema, and the stream that is written to it, empty as long as there is
    none."""

    name: str
    schema: pa.Schema
    stream: str = ""


def check_feedbacks(query: Query) -> None:
    """Refuses streams that are fed back but not written, or not read."""
    read = {given.stream for step in query.steps.values() for given in step.inputs}
    for node in query.feedbacks.values():
        if not node.stream:
            raise UserError(f"feedback {node.name!r}: nobody writes it; connect a stream with stream.feed_back(...)")
        if node.name not in read:
            raise UserError(f"feedback {node.name!r}: nobody reads it; give it to a step, keyed, or remove it")


def timed_feedbacks(query: Query) -> set[str]:
    """The streams of feedback that have event time."""
    reads = {step.name: {given.stream for given in step.inputs} for step in query.steps.values()}
    reads |= {each.name: set(each.streams) for each in query.maps.values()}
    reads |= {node.name: {node.stream} for node in query.feedbacks.values()}
    timed = {name for name, source in query.sources.items() if source.time is not None}
    while fresh := [
        name
        for name, streams in reads.items()
        if name not in timed and any(stream.partition(".")[0] in timed for stream in streams)
    ]:
        timed.update(fresh)
    return timed & query.feedbacks.keys()
