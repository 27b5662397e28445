"""Finding the least time of a family of timers.

Rules
-----
- The search begins where the last one ended, so rows that no longer count are passed over once, not in every epoch;
  and it ends with the first that counts: many timers, even many of one time, cost a few reads.
- Of a key and tag only the newest row counts, as in `due`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from millstream.protocol.manifest import Piece
from millstream.store.keys import Rows
from millstream.store.lookup import locate
from millstream.store.objects import ObjectStore
from millstream.store.segments import Segment, SegmentCache, numbers_of

LOOK_AT = 1024
"""How many rows are looked at together."""


def least_between(
    store: ObjectStore, cache: SegmentCache, pieces: Sequence[Piece], after: int, until: int
) -> int | None:
    """The least of the times that lie after the one and not after the other; None if there is none."""
    least: int | None = None
    for piece in sorted(pieces, key=lambda piece: piece.segment.span or (0, 0)):
        span, last = piece.segment.span, until if least is None else least - 1
        if span is None or span[0] > last or span[1] <= after:
            continue
        for segment, _ in cache.open(store, piece):
            rows = segment.rows_between(after, until if least is None else least - 1)
            for start in range(0, len(rows), LOOK_AT):
                found = _least_of(store, cache, pieces, segment, rows[start : start + LOOK_AT])
                if found is not None:
                    least = found
                    break
    return least


def _least_of(
    store: ObjectStore, cache: SegmentCache, pieces: Sequence[Piece], segment: Segment, rows: Rows
) -> int | None:
    """The least time of some rows of a segment, of those that are the newest of their key."""
    rows = np.sort(rows)  # as they stand in the segment: in order of hashes
    times = numbers_of(segment.values.field(0), np.int64)[rows]
    newest = locate(store, cache, pieces, segment.hashes[rows], segment.keys.take(rows), segment.subs[rows])
    counts = newest.present & (newest.times(0) == times)
    return int(times[counts].min()) if counts.any() else None
