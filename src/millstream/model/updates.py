"""Updates: streams whose rows take the place of earlier ones, and steps that would take them for new facts.

Rules
-----
- A stream is updating if its step says so: an aggregate produces a row for each key that an epoch changes, and each row
  supersedes the one before. Through maps and unions it stays one. (No step of the library reads what is fed back.)
- A computation of the user's is trusted: with what it is given, and with what it makes. So is a filter behind early
  results of windows, which have a column that tells the final ones.
- A step of the library that would count superseded rows is refused when the graph is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream.errors import UserError

if TYPE_CHECKING:
    from millstream.model.computation import Computation
    from millstream.model.query import Query

EARLY = "early results of windows, and each takes the place of the one before"
"""What windows with early results produce; the final ones can be told apart."""


@dataclass(frozen=True, slots=True)
class Updating:
    """The step that makes a stream updating, and what it produces, in words."""

    step: str
    rows: str


def updating(query: Query, stream: str) -> list[Updating]:
    """What makes a stream updating; nothing if its rows are facts."""
    if stream in query.maps:
        node = query.maps[stream]
        found = [each for name in node.streams for each in updating(query, name)]
        is_filter = callable(getattr(node.fn, "keep", None))
        return [each for each in found if not (is_filter and each.rows == EARLY)]
    if stream in query.steps and query.steps[stream].computation.makes_updates:
        return [Updating(stream, query.steps[stream].computation.makes_updates)]
    return []


def check_updates(query: Query, step: str, streams: tuple[str, ...], computation: Computation) -> None:
    """Refuses a step that would take updates for new facts."""
    if not computation.harm_of_updates:
        return
    for stream in streams:
        for found in updating(query, stream):
            first = "read its windows once they have closed, without early=True or behind stream.filter(...) on `final`"
            raise UserError(
                f"step {step!r} would take the updates of step {found.step!r} for new facts. {found.step!r} produces "
                f"{found.rows}; {step!r} {computation.harm_of_updates}. To mend it, "
                + (first if found.rows == EARLY else "aggregate within windows, which produce each result once")
                + f", or put a computation of your own between {found.step!r} and {step!r} that keeps the latest row "
                "of each key and passes on what has changed since"
            )
