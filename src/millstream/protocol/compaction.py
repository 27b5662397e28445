"""Which segments to merge next: a choice that keeps lookups short without ever writing much at once.

Rules
-----
- A job merges consecutive pieces (by age) of one family within one range, so the merged segment can take the place
  of its inputs in the newest-first order.
- A job reads at most `budget` bytes. Where a merge would read more, its range is cut down until it fits, and the
  rest of the range follows in later jobs: compaction is incremental, however large the state.
- Pieces of similar size are merged (size tiers): a byte is rewritten about once per tier, and a family holds about
  `fan_in` pieces per tier. Large runs wait until they have twice as many: they cost most to merge, and lookups find
  most keys in the newer ones of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from millstream.protocol.keyspace import Range, clip, width
from millstream.protocol.manifest import Family, Manifest, Piece

DEFAULT_BUDGET = 32 << 20
FAN_IN = 4
_RATIO = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """Merge what these pieces (newest first) hold in `range`. `bottom`: nothing older lies in the range.

    `now` is the time by which rows with a time-to-live have expired; None if the family has none.
    """

    family: Family
    range: Range
    pieces: tuple[Piece, ...]
    bottom: bool
    now: int | None = None

    @property
    def bytes(self) -> int:
        return sum(Piece(p.segment, clip(p.ranges, [self.range])).bytes for p in self.pieces)


def choose(
    manifest: Manifest,
    family: Family,
    owned: Sequence[Range],
    budget: int = DEFAULT_BUDGET,
    fan_in: int = FAN_IN,
) -> Job | None:
    """The next job of a family within the ranges of a slot, or None if it is in good shape.

    Of all stretches of the key space in which one run of pieces should be merged, the one with the most pieces.
    """
    pieces = manifest.pieces(family, owned)
    best: Job | None = None
    for span in owned:
        for stretch, run, bottom in _stretches(pieces, span, fan_in, budget // 8):
            if best is None or len(run) > len(best.pieces):
                best = Job(family, stretch, run, bottom)
    return best if best is None else _fit(best, budget)


def _stretches(
    pieces: Sequence[Piece], span: Range, fan_in: int, small: int
) -> Iterator[tuple[Range, tuple[Piece, ...], bool]]:
    """The widest parts of a range in which the same run of pieces should be merged, and whether it is the oldest."""
    cuts = {span.first, span.last + 1}
    for piece in pieces:
        for part in clip(piece.ranges, [span]):
            cuts.update((part.first, part.last + 1))
    edges = sorted(cuts)
    pending: tuple[Range, tuple[Piece, ...], bool] | None = None
    for first, end in pairwise(edges):
        stack = [piece for piece in pieces if any(first in part for part in piece.ranges)]
        run = _run_of_similar(stack, fan_in, small / (end - first))
        if run is None:
            if pending:
                yield pending
            pending = None
            continue
        chosen, bottom = tuple(stack[run]), run.stop == len(stack)
        if pending and pending[1] == chosen and pending[2] == bottom:
            pending = (Range(pending[0].first, end - 1), chosen, bottom)
        else:
            if pending:
                yield pending
            pending = (Range(first, end - 1), chosen, bottom)
    if pending:
        yield pending


def _run_of_similar(stack: Sequence[Piece], fan_in: int, small: float) -> slice | None:
    """The newest run of enough pieces none of which outweighs all newer ones of the run by far.

    Enough is `fan_in`, and twice that where the run weighs more than `small` (bytes per point, as the weights).
    """

    def enough(count: int) -> bool:
        return count >= (fan_in if weight <= small else 2 * fan_in)

    start, weight = 0, 0.0
    for index, piece in enumerate(stack):
        density = piece.segment.bytes / width(piece.segment.covers)
        if index > start and density > _RATIO * weight:
            if enough(index - start):
                return slice(start, index)
            start, weight = index, 0.0  # too few small ones: they wait, but do not hide what lies below
        weight += density
    return slice(start, len(stack)) if enough(len(stack) - start) else None


def _fit(job: Job, budget: int) -> Job:
    """The job, or as much of its range, from the left, as the budget allows."""
    total = job.bytes
    if total <= budget:
        return job
    wide = max(1, job.range.width * budget // total)
    return replace(job, range=Range(job.range.first, job.range.first + wide - 1))
