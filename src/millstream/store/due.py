"""Finding the timers that are due.

Rules
-----
- A segment is opened only if its span reaches into the time that is asked for: pending timers cost nothing.
- Of a key and tag only the newest row counts: a timer that was moved or deleted is not due, whatever older segments
  say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millstream.protocol.keyspace import Hashes
from millstream.protocol.manifest import Piece
from millstream.store.forms import NO_FORMS, Forms
from millstream.store.keys import KeyColumns, arrange, concat_keys
from millstream.store.lookup import locate
from millstream.store.objects import ObjectStore
from millstream.store.segments import SegmentCache


@dataclass(frozen=True, slots=True)
class DueTimers:
    """Timers that are due: hashes and keys (the last column of which is the tag), and the timers as stored."""

    hashes: Hashes
    keys: KeyColumns
    timers: pa.StructArray

    @property
    def key_columns(self) -> tuple[pa.Array, ...]:
        """The columns of the key itself."""
        return self.keys.columns[:-1]

    @property
    def tags(self) -> pa.Array:
        return self.keys.columns[-1]


def due_between(
    store: ObjectStore,
    cache: SegmentCache,
    pieces: Sequence[Piece],
    kind: pa.DataType,
    after: int,
    until: int,
    forms: Forms = NO_FORMS,
) -> DueTimers | None:
    """The timers whose times lie after the one and not after the other; None if there are none."""
    hashes, keys, subs = [], [], []
    for piece in pieces:
        span = piece.segment.span
        if span is None or span[0] > until or span[1] <= after:
            continue
        for segment, ranges in cache.open(store, piece):
            rows = segment.rows_between(after, until)
            found = segment.hashes[rows]
            inside = np.zeros(len(rows), np.bool_)
            for part in ranges:
                inside |= (found >= np.uint64(part.first)) & (found <= np.uint64(part.last))
            if inside.any():
                hashes.append(found[inside])
                keys.append(segment.keys.take(rows[inside]))
                subs.append(segment.subs[rows[inside]])
    if not hashes:
        return None
    all_hashes, all_keys = np.concatenate(hashes), concat_keys(keys)
    all_subs = np.concatenate(subs)
    order, starts = arrange(all_hashes, all_keys, all_subs)
    firsts = order[starts]
    distinct, chosen = all_hashes[firsts], all_keys.take(firsts)
    newest = locate(store, cache, pieces, distinct, chosen, all_subs[firsts], forms=forms)
    times = newest.times(after)
    due = np.flatnonzero(newest.present & (times > after) & (times <= until))
    if not len(due):
        return None
    return DueTimers(distinct[due], chosen.take(due), newest.only(due).arrow(kind))
