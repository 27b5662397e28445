"""What was fed back in the last epoch, on its way into this one.

Rules
-----
- The commit of an epoch names what it feeds back, with size and digest. Every attempt of the next epoch reads the same
  objects, so each record is applied once (G1), whatever failed in between.
- A slot takes the records that this epoch's routing table gives it, whoever wrote them under which table.
- They come before all other records of their stream, as those of a producer before all others.
- They never move a watermark on; while they are pending, they keep it back.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from millstream.engine.payload import Part
from millstream.engine.spec import HASH_COLUMN, EpochTask
from millstream.errors import DamagedObject
from millstream.protocol.epochs import Output
from millstream.protocol.time import END_OF_TIME, Mark
from millstream.store.journal import digest_of
from millstream.store.keys import KeyColumns
from millstream.store.objects import ObjectStore


def fed_back(task: EpochTask, level: int, slot: int, store: ObjectStore) -> Iterator[Part]:
    """The records of feedback for the steps of a slot and level."""
    read: dict[str, pa.RecordBatch] = {}
    for number, lane in enumerate(task.lanes):
        if lane.level != level:
            continue
        for index, output in enumerate(task.fed.get(lane.stream, ())):
            if output.name not in read:
                read[output.name] = _read(store, output)
            records = read[output.name]
            hashes = KeyColumns.canonical([records.column(name) for name in lane.key]).hashes()
            mine = np.flatnonzero(lane.table.lookup(hashes) == slot)
            if len(mine):
                keyed = records.add_column(0, HASH_COLUMN, pa.array(hashes)).take(pa.array(mine))
                yield Part(number, f"-1.{index}", keyed.serialize())


def fed_marks(task: EpochTask) -> dict[str, Mark]:
    """What each stream of feedback says of time: it never moves it on, and binds it to the least that is pending."""
    return {
        stream: Mark(
            bound=min((each.least_time for each in outputs if each.least_time is not None), default=END_OF_TIME)
        )
        for stream, outputs in task.fed.items()
    }


def _read(store: ObjectStore, output: Output) -> pa.RecordBatch:
    """An object as it was committed. Not mapped: it is read once, and a local copy would stay behind."""
    data = store.get(output.name)
    if data is None:
        raise DamagedObject(output.name, "nothing", f"{output.bytes} bytes")
    found = digest_of(data)
    if found != output.digest:
        raise DamagedObject(output.name, f"bytes with digest {found}", f"digest {output.digest}")
    return pa.ipc.open_file(pa.BufferReader(data)).get_batch(0)
