"""Which stored objects nobody can need any more.

Rules
-----
- Only objects whose fate the journal has settled are released: those of an older generation, or of an attempt of
  this generation that has ended. What a newer driver writes carries a newer generation and is never touched, so a
  zombie's garbage collection is harmless (G3).
- A segment is needed while the manifest names it, and until the epoch that dropped it is the oldest retained one.
- Productions are needed while their epoch is retained: until then Spark, or a reader, may ask for them again.
"""

from __future__ import annotations

from collections.abc import Collection

from millstream.protocol.epochs import History


def settled(history: History, generation: int, kind: str, epoch: int, number: int, live: Collection[int]) -> bool:
    """Whether the journal, as this driver knows it, says that the maker of an object is over.

    `live` are the compactions of this driver that run or wait to be applied.
    """
    if generation != history.generation:
        return generation < history.generation
    if kind == "c":
        return number not in live
    return (
        epoch <= history.epoch
        or (epoch == history.epoch + 1 and history.plan is None and number < history.attempts)
        or (history.plan is not None and epoch == history.plan.epoch and number < history.plan.attempt)
    )


def needed_segments(history: History) -> set[str]:
    """The segments of the manifest and those dropped within the retained epochs."""
    return {ref.name for ref in history.manifest.segments()} | set(history.released)


def needed_productions(history: History) -> set[str]:
    """The productions of the retained epochs."""
    return {output.name for committed in history.recent.values() for output in committed.outputs}
