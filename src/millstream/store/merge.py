"""Merging segments: the work behind a compaction, behind reading state as a whole, and behind taking up a small
segment while a new one is written.

Rules
-----
- The merged segment answers every lookup as its inputs did: of each key the newest row survives (G1).
- A tombstone survives unless the oldest segments of its range take part: below it something older may still lie. A
  row that has expired goes under the same condition; readers take it for absent anyway.
- What comes out is of the current form: values of older forms are lifted (see `forms`), those that survive.
- The cost is that of the rows in the range, not of the segments: a range is a slice.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from millstream.protocol.compaction import Job
from millstream.protocol.keyspace import Hashes, Range, clip, coalesce
from millstream.protocol.manifest import Edit, Input, Piece, SegmentRef
from millstream.store import names
from millstream.store.forms import NO_FORMS, Forms, sealed, unpacked
from millstream.store.keys import Mask, Rows, arrange
from millstream.store.objects import ObjectStore
from millstream.store.rows import StateRows, joined_rows
from millstream.store.segments import SegmentCache, encoded, put_segments


def newest_rows(
    store: ObjectStore,
    cache: SegmentCache,
    pieces: Sequence[Piece],
    within: Sequence[Range],
    drop_dead: bool,
    newer: StateRows | None = None,
    now: int | None = None,
    forms: Forms = NO_FORMS,
) -> StateRows:
    """The newest row of every key within ranges, from pieces that are ordered newest first, and rows newer than all.

    With `drop_dead`, tombstones are left out, and rows that have expired by `now`.
    """
    sources = [] if newer is None else [newer]
    found = [forms.current] * len(sources)  # the form of each
    for piece in pieces:
        parts: list[StateRows] = []
        for segment, ranges in cache.open(store, _clipped(piece, within)):
            for part in ranges:
                rows = segment.rows_in(part)
                length = rows.stop - rows.start
                parts.append(
                    StateRows(
                        segment.hashes[rows],
                        segment.keys.part(rows.start, length),
                        segment.values.slice(rows.start, length),
                        segment.dead(rows),
                        segment.subs[rows] if segment.has_subs else None,
                        None if segment.until is None else segment.until[rows],
                    )
                )
        if parts:
            sources.append(joined_rows(parts) if len(parts) > 1 else parts[0])
            found.append(piece.segment.form)
    lifting = any(form != forms.current for form in found)
    everything = joined_rows([_blank(source, forms.kind) for source in sources] if lifting else sources)
    if everything.keys.injective():
        newest = _overlaid([source.hashes for source in sources])
    else:
        order, starts = arrange(everything.hashes, everything.keys, everything.subs)
        newest = order[starts]  # the arrangement is stable and sources come newest first
    if not drop_dead and not lifting:
        return everything.take(newest)
    gone = everything.dead[newest]
    if now is not None and everything.until is not None:
        gone = gone | (everything.until[newest] <= now)
    there = newest[~gone]
    newest = there if drop_dead else newest
    if lifting:
        wanted = np.zeros(len(everything.hashes), np.bool_)
        wanted[there] = True
        everything = replace(everything, values=_lifted(sources, found, forms, wanted))
    return everything.take(newest)


def _blank(rows: StateRows, kind: pa.DataType) -> StateRows:
    """Rows whose values are yet to come."""
    return replace(rows, values=pa.nulls(len(rows.hashes), kind))


def _lifted(sources: Sequence[StateRows], found: Sequence[int], forms: Forms, wanted: Mask) -> pa.Array:
    """The values of all sources in the current form; those that are not wanted may be null."""
    lifted, passed = [], 0
    for source, form in zip(sources, found, strict=True):
        count = len(source.hashes)
        lifted.append(forms.lift(source.values, form, wanted[passed : passed + count]))
        passed += count
    return pa.concat_arrays(lifted)


def _clipped(piece: Piece, within: Sequence[Range]) -> Piece:
    """What counts of a piece within ranges: no more of it is read."""
    ranges = clip(piece.ranges, within)
    return piece if ranges == piece.ranges else Piece(piece.segment, ranges)


def _overlaid(sources: Sequence[Hashes]) -> Rows:
    """Of sorted hashes, newest source first, where the newest of each stands in all of them, in order of hashes.

    For keys whose hashes tell them apart. Each source is searched for in what is merged already, and only what is new
    is put in between: less work than sorting everything again.
    """
    merged, rows = sources[0], np.arange(len(sources[0]))
    passed = len(merged)
    for hashes in sources[1:]:
        at = np.searchsorted(merged, hashes)
        fresh = np.ones(len(hashes), np.bool_)
        inside = at < len(merged)
        fresh[inside] = merged[at[inside]] != hashes[inside]
        chosen = np.flatnonzero(fresh)
        places = at[chosen] + np.arange(len(chosen))
        old = np.ones(len(merged) + len(chosen), np.bool_)
        old[places] = False
        next_merged, next_rows = np.empty(len(old), np.uint64), np.empty(len(old), np.int64)
        next_merged[places], next_merged[old] = hashes[chosen], merged
        next_rows[places], next_rows[old] = chosen + passed, rows
        merged, rows = next_merged, next_rows
        passed += len(hashes)
    return rows


def merge(store: ObjectStore, cache: SegmentCache, job: Job, maker: names.Maker, slot: int) -> Edit:
    """Merges what lies in the job's ranges of its pieces and says how the manifest changes."""
    outputs = put_segments(store, cache, maker, slot, _merged(store, cache, job))
    inputs = tuple(Input(piece.segment.name, clip(piece.ranges, job.ranges)) for piece in job.pieces)
    return Edit(job.family, job.ranges, inputs, tuple(outputs))


def remade(
    store: ObjectStore, cache: SegmentCache, job: Job, known: Sequence[SegmentRef]
) -> Iterator[tuple[SegmentRef, memoryview]]:
    """What a merge that was done elsewhere has made, made again: of the segments that are known to have come out of it
    those that come out of it here, too, byte for byte."""
    by_digest = {(ref.digest, ref.bytes): ref for ref in known}
    for ref, data in _merged(store, cache, job):
        found = by_digest.get((ref.digest, len(data)))
        if found is not None:
            yield found, data


def _merged(store: ObjectStore, cache: SegmentCache, job: Job) -> Iterator[tuple[SegmentRef, memoryview]]:
    forms = unpacked(job.forms) if job.forms else sealed(pa.null(), job.pieces[0].segment.form)
    rows = newest_rows(store, cache, job.pieces, job.ranges, drop_dead=job.bottom, now=job.now, forms=forms)
    views = [view for piece in job.pieces for view, _ in cache.open(store, _clipped(piece, job.ranges))]
    return encoded(
        job.family,
        max(piece.segment.order for piece in job.pieces),
        coalesce([span for piece in job.pieces for span in clip(piece.ranges, job.ranges)]),
        rows,
        timers=any(piece.segment.span is not None for piece in job.pieces),
        filtered=any(view.filtered for view in views),
        form=forms.current,
    )


def give_memory_back() -> None:
    """A merge needs more memory than what follows it, and allocators would keep it for ever."""
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)
