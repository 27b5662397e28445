"""Finding the newest value of many keys at once.

Rules
-----
- Newest first: a key is taken from the newest segment that holds it, and a tombstone there means "absent".
- Cost is O(keys x segments x log rows): one binary search per key and segment, all of them vectorised. Nothing is
  read but the pages the searches touch; state that is not asked for costs nothing.
- A hash that matches is followed by a comparison of the exact key (G1).
- A row with a time-to-live is absent from the moment it expires, whether or not it has been removed: `now` decides.
- Where a segment has a filter, keys that it rules out are not searched for.
- Values of an older form are lifted when they are taken (see `forms`), and only those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.protocol.keyspace import Hashes, Range, hash_integers
from millstream.protocol.manifest import Piece
from millstream.store.forms import NO_FORMS, Forms
from millstream.store.keys import KeyColumns, Mask, Rows, arrange
from millstream.store.objects import ObjectStore
from millstream.store.segments import Segment, SegmentCache, numbers_of


@dataclass(frozen=True, slots=True)
class Found:
    """For each key, which segment holds its newest value (-1: none) and in which row."""

    segments: tuple[Segment, ...]
    source: npt.NDArray[np.int32]
    row: Rows
    forms: Forms = NO_FORMS

    @property
    def present(self) -> Mask:
        return self.source >= 0

    def numbers(self, default: Any, dtype: Any) -> npt.NDArray[Any]:
        """The values as NumPy, `default` where there is none. For types that fit and columns without nulls."""
        result = np.full(len(self.source), default, dtype)
        for index, segment in enumerate(self.segments):
            mine = np.flatnonzero(self.source == index)
            if len(mine):
                values, rows = segment.values, self.row[mine]
                if segment.ref.form != self.forms.current:
                    values, rows = self._taken(segment, rows), np.arange(len(mine))
                if pa.types.is_boolean(values.type):
                    result[mine] = values.take(pa.array(rows)).to_numpy(zero_copy_only=False)
                else:
                    result[mine] = numbers_of(values, dtype)[rows]
        return result

    def times(self, default: int) -> npt.NDArray[np.int64]:
        """Of timers the times, `default` where there is none. Nothing is lifted: they are the same in every form."""
        result = np.full(len(self.source), default, np.int64)
        for index, segment in enumerate(self.segments):
            mine = np.flatnonzero(self.source == index)
            if len(mine):
                result[mine] = numbers_of(segment.values.field(0), np.int64)[self.row[mine]]
        return result

    def only(self, places: Rows) -> Found:
        """The same for some of the keys."""
        return replace(self, source=self.source[places], row=self.row[places])

    def _taken(self, segment: Segment, rows: Rows) -> pa.Array:
        return self.forms.lift(segment.values.take(pa.array(rows)), segment.ref.form)

    def arrow(self, kind: pa.DataType) -> pa.Array:
        """The values as Arrow, null where there is none."""
        parts = [pa.nulls(1, kind)]
        index = np.zeros(len(self.source), np.int64)
        filled = 1
        for number, segment in enumerate(self.segments):
            mine = np.flatnonzero(self.source == number)
            if len(mine):
                parts.append(self._taken(segment, self.row[mine]))
                index[mine] = np.arange(filled, filled + len(mine))
                filled += len(mine)
        return pa.concat_arrays(parts).take(pa.array(index))


def locate(
    store: ObjectStore,
    cache: SegmentCache,
    pieces: Sequence[Piece],
    hashes: Hashes,
    keys: KeyColumns,
    subs: Hashes | None = None,
    now: int | None = None,
    forms: Forms = NO_FORMS,
) -> Found:
    """Looks up keys, sorted by hash, in pieces that are ordered newest first; with subkeys, whose hashes are `subs`."""
    source = np.full(len(hashes), -1, np.int32)
    row = np.zeros(len(hashes), np.int64)
    pending: Rows = np.arange(len(hashes))
    wanted = hashes  # the hashes of what is pending
    segments: list[Segment] = []
    for piece in pieces:
        if not len(pending):
            break
        inside = _within(wanted, piece.ranges)
        if not len(wanted[inside]):
            continue
        for segment, ranges in cache.open(store, piece, wanted[inside]):
            if ranges is not piece.ranges:
                inside = _within(wanted, ranges)
            hits, rows = _match(segment, hashes, wanted[inside], keys, pending[inside], subs)
            if len(hits):
                source[hits], row[hits] = len(segments), rows
                segments.append(segment)
                pending = pending[source[pending] < 0]
                wanted = hashes[pending]
    for index, segment in enumerate(segments):
        if segment.has_dead or (now is not None and segment.until is not None):
            mine = np.flatnonzero(source == index)
            source[mine[segment.absent(row[mine], now)]] = -1
    return Found(tuple(segments), source, row, forms)


@dataclass(frozen=True, slots=True)
class Entries:
    """All rows of some keys: the place of the key among those asked for, the subkey and the value of each, ordered by
    place and then by subkey."""

    places: Rows
    subkeys: pa.Array
    values: pa.Array


def entries_of(
    store: ObjectStore,
    cache: SegmentCache,
    pieces: Sequence[Piece],
    hashes: Hashes,
    keys: KeyColumns,
    kinds: tuple[pa.DataType, pa.DataType],
    now: int | None = None,
    forms: Forms = NO_FORMS,
) -> Entries:
    """All that is stored under keys, sorted by hash, in pieces that are ordered newest first; `kinds` are the types of
    subkeys and values."""
    parts: list[tuple[Rows, Segment, Rows]] = []
    for piece in pieces:
        asked = np.arange(len(hashes))[_within(hashes, piece.ranges)]
        if not len(asked):
            continue
        for segment, ranges in cache.open(store, piece, hashes[asked]):
            if ranges is not piece.ranges:
                asked = np.arange(len(hashes))[_within(hashes, ranges)]
            places, rows = _all_of(segment, hashes[asked], asked, keys)
            if len(places):
                parts.append((places, segment, rows))
    if not parts:
        return Entries(np.arange(0), pa.nulls(0, kinds[0]), pa.nulls(0, kinds[1]))
    places = np.concatenate([part[0] for part in parts])
    subs = np.concatenate([segment.subs[rows] for _, segment, rows in parts])
    subkeys = pa.concat_arrays([segment.keys.columns[-1].take(pa.array(rows)) for _, segment, rows in parts])
    absent = np.concatenate([segment.absent(rows, now) for _, segment, rows in parts])
    order, starts = arrange(hash_integers(places), KeyColumns((pa.array(places), subkeys)), subs)
    newest = order[starts]  # the arrangement is stable and the newest pieces come first
    newest = newest[~absent[newest]]
    table = pa.table({"place": places[newest], "subkey": subkeys.take(pa.array(newest))})
    ranks = pc.sort_indices(table, [("place", "ascending"), ("subkey", "ascending")]).to_numpy()
    chosen = newest[ranks]
    wanted = np.zeros(len(places), np.bool_)
    wanted[chosen] = True
    taken, passed = [], 0
    for _, segment, rows in parts:
        mine = wanted[passed : passed + len(rows)]
        taken.append(forms.lift(segment.values.take(pa.array(rows)), segment.ref.form, mine))
        passed += len(rows)
    values = pa.concat_arrays(taken)
    return Entries(places[chosen], subkeys.take(pa.array(chosen)), values.take(pa.array(chosen)))


def _all_of(segment: Segment, wanted: Hashes, asked: Rows, keys: KeyColumns) -> tuple[Rows, Rows]:
    """All rows of a segment of the asked keys, and whose they are."""
    low = segment.find(wanted)
    counts = segment.find(wanted, "right") - low
    total = int(counts.sum())
    places = np.repeat(asked, counts)
    rows = np.arange(total) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    theirs = KeyColumns(segment.keys.columns[:-1])
    if not total or (keys.injective() and theirs.injective()):
        return places, rows
    same = theirs.same(rows, keys, places)
    return places[same], rows[same]


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


def _match(
    segment: Segment, hashes: Hashes, wanted: Hashes, keys: KeyColumns, asked: Rows, subs: Hashes | None
) -> tuple[Rows, Rows]:
    """Which of the asked keys, whose hashes are wanted, are in the segment, and in which row."""
    if not len(segment.hashes):
        return asked[:0], asked[:0]
    if segment.filter is not None and len(wanted):
        likely = segment.filter.may_hold(wanted)
        asked, wanted = asked[likely], wanted[likely]
    at = segment.find(wanted)
    np.minimum(at, len(segment.hashes) - 1, out=at)
    candidates = segment.hashes[at] == wanted
    hits, rows = asked[candidates], at[candidates]
    if subs is not None and len(hits):
        ends = segment.find(wanted[candidates], "right")
        rows = _first_sub(segment.subs, rows, ends, subs[hits])
        equal = segment.subs[np.minimum(rows, ends - 1)] == subs[hits]
        hits, rows = hits[equal & (rows < ends)], rows[equal & (rows < ends)]
    if keys.injective(subs is not None) and segment.keys.injective(subs is not None):
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
        if subs is not None:
            still &= segment.subs[rows] == subs[hits]
        hits, rows = hits[still], rows[still]
    if not found_hits:
        return hits, rows
    return np.concatenate(found_hits), np.concatenate(found_rows)


def _first_sub(subs: Hashes, low: Rows, high: Rows, wanted: Hashes) -> Rows:
    """For each wanted sub, where the first that is not less stands among those from low to high: binary searches,
    all of them at once."""
    low, high = low.copy(), high.copy()
    while True:
        open_ = np.flatnonzero(low < high)
        if not len(open_):
            return low
        middle = (low[open_] + high[open_]) // 2
        less = subs[middle] < wanted[open_]
        low[open_[less]] = middle[less] + 1
        high[open_[~less]] = middle[~less]
