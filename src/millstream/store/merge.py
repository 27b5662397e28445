"""Merging segments: the work behind a compaction, behind reading state as a whole, and behind taking up a small
segment while a new one is written.

Rules
-----
- The merged segment answers every lookup as its inputs did: of each key the newest row survives (G1).
- A tombstone survives unless the oldest segments of its range take part: below it something older may still lie.
- The cost is that of the rows in the range, not of the segments: a range is a slice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from millstream.protocol.compaction import Job
from millstream.protocol.keyspace import Hashes, Range, clip, coalesce
from millstream.protocol.manifest import Edit, Input, Piece
from millstream.store import names
from millstream.store.keys import KeyColumns, Mask, Rows, arrange, concat_keys
from millstream.store.objects import ObjectStore
from millstream.store.segments import SegmentCache, write_segments


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of state, sorted by (hash, key), one per key."""

    hashes: Hashes
    keys: KeyColumns
    values: pa.Array
    dead: Mask


def newest_rows(
    store: ObjectStore,
    cache: SegmentCache,
    pieces: Sequence[Piece],
    span: Range,
    drop_dead: bool,
    newer: StateRows | None = None,
) -> StateRows:
    """The newest row of every key in a range, from pieces that are ordered newest first, and rows newer than all."""
    sources = [] if newer is None else [newer]
    for piece in pieces:
        segment = cache.open(store, piece.segment)
        for part in clip(piece.ranges, [span]):
            rows = segment.rows_in(part)
            length = rows.stop - rows.start
            sources.append(
                StateRows(
                    segment.hashes[rows],
                    segment.keys.part(rows.start, length),
                    segment.values.slice(rows.start, length),
                    segment.dead(rows),
                )
            )
    all_hashes = np.concatenate([source.hashes for source in sources])
    all_keys = concat_keys([source.keys for source in sources])
    if all_keys.injective:
        newest = _overlaid([source.hashes for source in sources])
    else:
        order, starts = arrange(all_hashes, all_keys)
        newest = order[starts]  # the arrangement is stable and sources come newest first
    is_dead = np.concatenate([source.dead for source in sources])[newest]
    if drop_dead and is_dead.any():
        newest, is_dead = newest[~is_dead], is_dead[~is_dead]
    values = pa.concat_arrays([source.values for source in sources]).take(pa.array(newest))
    return StateRows(all_hashes[newest], all_keys.take(newest), values, is_dead)


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
    """Merges what lies in the job's range of its pieces and says how the manifest changes."""
    rows = newest_rows(store, cache, job.pieces, job.range, drop_dead=job.bottom)
    outputs = write_segments(
        store,
        job.family,
        maker,
        slot,
        max(piece.segment.order for piece in job.pieces),
        coalesce([span for piece in job.pieces for span in clip(piece.ranges, [job.range])]),
        rows.hashes,
        rows.keys,
        rows.values,
        rows.dead,
        timers=any(piece.segment.span is not None for piece in job.pieces),
    )
    inputs = tuple(Input(piece.segment.name, clip(piece.ranges, [job.range])) for piece in job.pieces)
    return Edit(job.family, job.range, inputs, tuple(outputs))
