"""Merging segments: the work behind a compaction, and behind reading state as a whole.

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
from millstream.store.keys import KeyColumns, Mask, arrange, concat_keys
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
    store: ObjectStore, cache: SegmentCache, pieces: Sequence[Piece], span: Range, drop_dead: bool
) -> StateRows:
    """The newest row of every key in a range, from pieces that are ordered newest first."""
    hashes, keys, values, dead = [], [], [], []
    for piece in pieces:
        segment = cache.open(store, piece.segment)
        for part in clip(piece.ranges, [span]):
            rows = segment.rows_in(part)
            length = rows.stop - rows.start
            hashes.append(segment.hashes[rows])
            keys.append(segment.keys.part(rows.start, length))
            values.append(segment.values.slice(rows.start, length))
            dead.append(segment.dead(rows))
    all_hashes, all_keys = np.concatenate(hashes), concat_keys(keys)
    order, starts = arrange(all_hashes, all_keys)
    newest = order[starts]  # the arrangement is stable and pieces come newest first
    is_dead = np.concatenate(dead)[newest]
    if drop_dead and is_dead.any():
        newest, is_dead = newest[~is_dead], is_dead[~is_dead]
    return StateRows(
        all_hashes[newest], all_keys.take(newest), pa.concat_arrays(values).take(pa.array(newest)), is_dead
    )


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
    )
    inputs = tuple(Input(piece.segment.name, clip(piece.ranges, [job.range])) for piece in job.pieces)
    return Edit(job.family, job.range, inputs, tuple(outputs))
