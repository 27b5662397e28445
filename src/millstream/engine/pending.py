"""How many timers are pending, from the manifest alone.

Rules
-----
- Nothing is read: it costs as much as the manifest has segments, however many timers there are.
- It errs upwards: a timer that was moved, deleted or has fired is counted until the segment that holds it is merged,
  or all times in it have been reached. So it is exact where there is one segment.
- Where a merge has replaced a part of a segment, the rest is estimated by its width: hashes are spread evenly.
"""

from __future__ import annotations

from millstream.model.graph import Graph, Step
from millstream.model.timers import Timer
from millstream.model.times import EVENT_TIME
from millstream.protocol.epochs import History
from millstream.protocol.keyspace import width
from millstream.protocol.manifest import Family
from millstream.protocol.time import NO_TIME


def pending_timers(graph: Graph, history: History) -> dict[str, int]:
    """For each step with timers, about how many of them are pending."""
    return {
        step.name: sum(_pending(history, step, timer) for timer in step.timers.values())
        for step in graph.steps
        if step.timers
    }


def _pending(history: History, step: Step, timer: Timer) -> int:
    event = timer.kind == EVENT_TIME
    reached = history.watermarks.get(step.name, NO_TIME) if event else history.clock_ms * 1000
    count = 0
    for piece in history.manifest.pieces(Family(step.name, timer.name)):
        segment = piece.segment
        if segment.span is not None and segment.span[1] > reached:
            live = segment.rows - segment.tombstones
            count += -(-live * width(piece.ranges) // width(segment.covers))
    return count
