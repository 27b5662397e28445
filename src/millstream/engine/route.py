"""Routing (the papers' F): records in, one payload per slot out.

Rules
-----
- A record goes to the slot that the plan's table names for its key's hash (G4), and nowhere else.
- Records of a lane keep their order within a producer.
- Memory is bounded by the records of one Spark partition of one epoch, in columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from millstream.engine.payload import Bodies, encode
from millstream.engine.spec import HASH_COLUMN, EpochTask, Lane
from millstream.store.keys import KeyColumns
from millstream.store.objects import ObjectStore

FLUSH_BYTES = 128 << 20
"""What is gathered before it is split."""


def route(
    task: EpochTask, batches: Iterable[tuple[str, pa.RecordBatch]], producer: int, store: ObjectStore
) -> Iterator[bytes]:
    """The payload of each slot, from batches of named streams."""
    bodies: Bodies = [[] for _ in range(task.slot_count)]
    waiting: dict[str, list[pa.RecordBatch]] = {}
    gathered = 0
    for stream, batch in batches:
        waiting.setdefault(stream, []).append(batch)
        gathered += batch.nbytes
        if gathered >= FLUSH_BYTES:
            _split(task, waiting, bodies)
            waiting, gathered = {}, 0
    _split(task, waiting, bodies)
    return encode(bodies, f"0.{producer}", store, task.maker)


def _split(task: EpochTask, waiting: dict[str, list[pa.RecordBatch]], bodies: Bodies) -> None:
    gathered = {
        stream: batches[0] if len(batches) == 1 else pa.concat_batches(batches) for stream, batches in waiting.items()
    }
    for number, lane in enumerate(task.levels[0]):
        records = gathered.get(lane.stream)
        if records is None or not records.num_rows:
            continue
        for slot, part in _by_slot(records, lane):
            bodies[slot].append((number, part.serialize()))


def _by_slot(records: pa.RecordBatch, lane: Lane) -> Iterator[tuple[int, pa.RecordBatch]]:
    keys = KeyColumns.canonical([records.column(name) for name in lane.key])
    hashes = keys.hashes()
    keyed = records.add_column(0, HASH_COLUMN, pa.array(hashes))
    if len(lane.table.firsts) == 1:
        yield lane.table.slots[0], keyed
        return
    slots = lane.table.lookup(hashes)
    narrow = (
        np.uint8 if lane.table.slot_count <= 1 << 8 else np.uint16 if lane.table.slot_count <= 1 << 16 else np.uint32
    )
    order = np.argsort(slots.astype(narrow), kind="stable")  # a radix sort: linear in the records
    counts = np.bincount(slots, minlength=lane.table.slot_count)
    sorted_records = keyed.take(pa.array(order))
    ends = np.cumsum(counts)
    for slot in np.flatnonzero(counts):
        yield int(slot), sorted_records.slice(int(ends[slot] - counts[slot]), int(counts[slot]))
