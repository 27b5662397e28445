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
- Moves and partial merges leave pieces that lie beside each other rather than above. Where a slot has more of them
  than its bytes account for, those of one window of ages are merged wherever they lie: all that is older stays below
  the result, and all that is newer above it. So ten thousand small moves do not leave ten thousand pieces.
- Pieces of an older form are rewritten, a budget's worth at a time, even where nothing else calls for it: so a change
  of a state's type is carried through by itself, on an idle query too. Only merges that cannot wait come first, and
  they rewrite as well.
"""

from __future__ import annotations

import builtins  # a job has bytes of its own
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from millstream.protocol.keyspace import Range, clip, coalesce, width
from millstream.protocol.manifest import Family, Piece

DEFAULT_BUDGET = 32 << 20
FAN_IN = 4
_RATIO = 2.0
_CROWD = 24
"""The pieces of a slot that are never too many, however small."""


@dataclass(frozen=True, slots=True)
class Job:
    """Merge what these pieces (newest first) hold in `ranges`. `bottom`: nothing older lies there.

    `now` is the time by which rows with a time-to-live have expired; None if the family has none. `forms` says how
    values of older forms are lifted (see `store.forms`), packed; nothing if all pieces are of one form.
    """

    family: Family
    ranges: tuple[Range, ...]
    pieces: tuple[Piece, ...]
    bottom: bool
    now: int | None = None
    forms: builtins.bytes = b""
    converts: bool = False
    """Whether it is only there to bring values into the form they have now."""

    @property
    def bytes(self) -> int:
        return sum(Piece(p.segment, clip(p.ranges, self.ranges)).bytes for p in self.pieces)


def choose(
    family: Family, pieces: Sequence[Piece], budget: int = DEFAULT_BUDGET, fan_in: int = FAN_IN, form: int = 0
) -> Job | None:
    """The next job among these pieces of a family (a slot's, newest first), or None if they are in good shape and none
    is of an older form than `form`.

    Of all parts of the key space in which one run of pieces should be merged, the one with the most pieces, and of such
    the widest. A part may consist of many stretches: what a slot owns, or was left of a segment, may be scattered. Or
    what lies beside each other, if that is more.
    """
    merged = _merged(family, pieces, budget, fan_in) if len(pieces) >= fan_in else None
    urgent = merged is not None and len(merged.pieces) >= 2 * fan_in
    if urgent or all(piece.segment.form >= form for piece in pieces):
        return merged
    rewritten = _converted(family, pieces, budget, form)
    return None if rewritten is None else replace(rewritten, converts=True)


def _merged(family: Family, pieces: Sequence[Piece], budget: int, fan_in: int) -> Job | None:
    above, beside = _above(family, pieces, budget, fan_in), _beside(family, pieces, budget, fan_in)
    if above is None or beside is None:
        return above or beside
    return beside if len(beside.pieces) > len(above.pieces) else above


def _above(family: Family, pieces: Sequence[Piece], budget: int, fan_in: int) -> Job | None:
    """Merges pieces that lie above each other."""
    weights = [piece.segment.bytes / width(piece.segment.covers) for piece in pieces]

    def run_of(stack: Sequence[int], points: int) -> slice | None:
        if len(stack) < fan_in:
            return None
        return _run_of_similar([weights[index] for index in stack], fan_in, budget // 8 / points)

    return _widest(family, pieces, budget, run_of)


def _converted(family: Family, pieces: Sequence[Piece], budget: int, form: int) -> Job | None:
    """Rewrites the newest pieces of an older form that lie above each other, or one alone."""

    def run_of(stack: Sequence[int], points: int) -> slice | None:
        older = [pieces[index].segment.form < form for index in stack]
        if not any(older):
            return None
        start = older.index(True)
        return slice(start, older.index(False, start) if False in older[start:] else len(stack))

    return _widest(family, pieces, budget, run_of)


def _widest(family: Family, pieces: Sequence[Piece], budget: int, run_of: RunOf) -> Job | None:
    """Merges the run of the most pieces, where it lies, as far as the budget allows."""
    parts: dict[tuple[tuple[str, ...], bool], tuple[tuple[Piece, ...], list[Range]]] = {}
    for stretch, run, bottom in _stretches(pieces, run_of):
        named = tuple(piece.segment.name for piece in run)
        parts.setdefault((named, bottom), (run, []))[1].append(stretch)
    if not parts:
        return None
    (_, bottom), (run, ranges) = max(parts.items(), key=lambda part: (len(part[1][0]), width(part[1][1])))
    return _fit(Job(family, tuple(ranges), run, bottom), budget)


def _beside(family: Family, pieces: Sequence[Piece], budget: int, fan_in: int) -> Job | None:
    """Merges the most pieces of one window of ages that the budget allows, if there are too many in all."""
    sizes = [piece.bytes for piece in pieces]
    if len(pieces) <= _CROWD + fan_in * sum(sizes) // budget:
        return None
    # Pieces of one order are of one epoch and lie in different places: a window has all of them, or none.
    edges = [i for i in range(len(pieces)) if not i or pieces[i].segment.order != pieces[i - 1].segment.order]
    edges.append(len(pieces))
    best, weight, first = (0, 0), 0, 0
    for last in range(1, len(edges)):
        weight += sum(sizes[edges[last - 1] : edges[last]])
        while weight > budget:
            weight -= sum(sizes[edges[first] : edges[first + 1]])
            first += 1
        best = max(best, (edges[first], edges[last]), key=lambda window: window[1] - window[0])
    window = pieces[best[0] : best[1]]
    if len(window) < 2 * fan_in:
        return None
    ranges = coalesce([part for piece in window for part in piece.ranges])
    return Job(family, ranges, tuple(window), best[1] == len(pieces))


RunOf = Callable[[Sequence[int], int], slice | None]
"""Which of the pieces that lie above each other, newest first, are to be merged; they do so in that many points."""


def _stretches(pieces: Sequence[Piece], run_of: RunOf) -> Iterator[tuple[Range, tuple[Piece, ...], bool]]:
    """The widest parts of the key space in which the same run of pieces should be merged, and whether it is the oldest.

    One sweep over the ends of all ranges: a slot may own many.
    """
    events = [(part.first, index) for index, piece in enumerate(pieces) for part in piece.ranges]
    events += [(part.last + 1, ~index) for index, piece in enumerate(pieces) for part in piece.ranges]
    events.sort()
    stack: list[int] = []  # of the pieces at the point that the sweep has reached, newest first
    pending: tuple[Range, tuple[int, ...], bool] | None = None
    reached = 0
    for point, event in events:
        if point > reached:
            run = run_of(stack, point - reached)
            chosen = () if run is None else tuple(stack[run])
            bottom = run is not None and run.stop == len(stack)
            if pending and pending[1:] == (chosen, bottom) and pending[0].last == reached - 1:
                pending = (Range(pending[0].first, point - 1), chosen, bottom)
            else:
                if pending:
                    yield pending[0], tuple(pieces[index] for index in pending[1]), pending[2]
                pending = (Range(reached, point - 1), chosen, bottom) if chosen else None
            reached = point
        if event >= 0:
            insort(stack, event)
        else:
            stack.remove(~event)
    if pending:
        yield pending[0], tuple(pieces[index] for index in pending[1]), pending[2]


def _run_of_similar(weights: Sequence[float], fan_in: int, small: float) -> slice | None:
    """The newest run of enough pieces none of which outweighs all newer ones of the run by far.

    Weights are in bytes per point. Enough is `fan_in`, and twice that where the run weighs more than `small`.
    """

    def enough(count: int) -> bool:
        return count >= (fan_in if weight <= small else 2 * fan_in)

    start, weight = 0, 0.0
    for index, density in enumerate(weights):
        if index > start and density > _RATIO * weight:
            if enough(index - start):
                return slice(start, index)
            start, weight = index, 0.0  # too few small ones: they wait, but do not hide what lies below
        weight += density
    return slice(start, len(weights)) if enough(len(weights) - start) else None


def _fit(job: Job, budget: int) -> Job:
    """The job, or as much of its ranges, from the left, as the budget allows."""
    total = job.bytes
    if total <= budget:
        return job
    room = max(1, width(job.ranges) * budget // total)
    kept: list[Range] = []
    for part in job.ranges:
        if room <= 0:
            break
        kept.append(part if part.width <= room else Range(part.first, part.first + room - 1))
        room -= part.width
    return replace(job, ranges=tuple(kept))
