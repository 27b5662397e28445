"""Finding the newest value of many keys at once.

Rules
-----
- Newest first: a key is taken from the newest segment that holds it, and a tombstone there means "absent".
- Cost is O(keys x segments x log rows): one binary search per key and segment, all of them vectorised. Nothing is
  read but the pages the searches touch; state that is not asked for costs nothing.
- A hash that matches is followed by a comparison of the exact key (G1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.protocol.keyspace import Hashes, Range
from millstream.protocol.manifest import Piece
from millstream.store.keys import KeyColumns, Mask, Rows
from millstream.store.objects import ObjectStore
from millstream.store.segments import Segment, SegmentCache


@dataclass(frozen=True, slots=True)
class Found:
    """For each key, which segment holds its newest value (-1: none) and in which row."""

    segments: tuple[Segment, ...]
    source: npt.NDArray[np.int32]
    row: Rows

    @property
    def present(self) -> Mask:
        return self.source >= 0

    def numbers(self, default: Any, dtype: Any) -> npt.NDArray[Any]:
        """The values as NumPy, `default` where there is none. For types that fit and columns without nulls."""
        result = np.full(len(self.source), default, dtype)
        for index, segment in enumerate(self.segments):
            mine = np.flatnonzero(self.source == index)
            if len(mine):
                values = segment.values
                if pa.types.is_boolean(values.type):
                    result[mine] = values.take(pa.array(self.row[mine])).to_numpy(zero_copy_only=False)
                else:
                    data = np.frombuffer(values.buffers()[1], dtype)
                    result[mine] = data[self.row[mine]]
        return result

    def arrow(self, kind: pa.DataType) -> pa.Array:
        """The values as Arrow, null where there is none."""
        parts = [pa.nulls(1, kind)]
        index = np.zeros(len(self.source), np.int64)
        filled = 1
        for number, segment in enumerate(self.segments):
            mine = np.flatnonzero(self.source == number)
            if len(mine):
                parts.append(segment.values.take(pa.array(self.row[mine])))
                index[mine] = np.arange(filled, filled + len(mine))
                filled += len(mine)
        return pa.concat_arrays(parts).take(pa.array(index))


def locate(store: ObjectStore, cache: SegmentCache, pieces: Sequence[Piece], hashes: Hashes, keys: KeyColumns) -> Found:
    """Looks up distinct keys, sorted by hash, in pieces that are ordered newest first."""
    source = np.full(len(hashes), -1, np.int32)
    row = np.zeros(len(hashes), np.int64)
    pending: Rows = np.arange(len(hashes))
    wanted = hashes  # the hashes of what is pending
    segments: list[Segment] = []
    for piece in pieces:
        if not len(pending):
            break
        inside = _within(wanted, piece.ranges)
        asked = pending[inside]
        if not len(asked):
            continue
        segment = cache.open(store, piece.segment)
        hits, rows = _match(segment, hashes, wanted[inside], keys, asked)
        if len(hits):
            source[hits], row[hits] = len(segments), rows
            segments.append(segment)
            pending = pending[source[pending] < 0]
            wanted = hashes[pending]
    for index, segment in enumerate(segments):
        if segment.has_dead:
            mine = np.flatnonzero(source == index)
            source[mine[segment.dead(row[mine])]] = -1
    return Found(tuple(segments), source, row)


def _within(wanted: Hashes, ranges: Sequence[Range]) -> slice | Rows:
    """Where those of the wanted hashes (in order) stand that lie in the ranges."""
    parts = []
    for span in ranges:
        start = int(np.searchsorted(wanted, np.uint64(span.first), side="left"))
        stop = int(np.searchsorted(wanted, np.uint64(span.last), side="right"))
        parts.append(slice(start, stop))
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([np.arange(part.start, part.stop) for part in parts])


def _match(segment: Segment, hashes: Hashes, wanted: Hashes, keys: KeyColumns, asked: Rows) -> tuple[Rows, Rows]:
    """Which of the asked keys, whose hashes are wanted, are in the segment, and in which row."""
    at = np.searchsorted(segment.hashes, wanted)
    np.minimum(at, len(segment.hashes) - 1, out=at)
    candidates = segment.hashes[at] == wanted
    hits, rows = asked[candidates], at[candidates]
    if keys.injective and segment.keys.injective:
        return hits, rows
    found_hits, found_rows = [], []
    while len(hits):
        equal = segment.keys.same(rows, keys, hits)
        found_hits.append(hits[equal])
        found_rows.append(rows[equal])
        hits, rows = hits[~equal], rows[~equal] + 1  # another key with this hash: the next row may be ours
        inside = rows < len(segment.hashes)
        hits, rows = hits[inside], rows[inside]
        still = segment.hashes[rows] == hashes[hits]
        hits, rows = hits[still], rows[still]
    if not found_hits:
        return hits, rows
    return np.concatenate(found_hits), np.concatenate(found_rows)
