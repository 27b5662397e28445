"""Reading stored productions, so that sinks get the same bytes however often they are delivered (G2).

Rules
-----
- Only stored bytes are delivered, after the commit that names them, checked against its digests.
- The order of an epoch's productions is that of the commit: slots ascending, then as produced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from millstream.model.query import SinkNode
from millstream.protocol.epochs import Output
from millstream.store.objects import ObjectStore
from millstream.store.segments import read_checked


class Deliverer(Protocol):
    """Delivers an epoch's productions to one kind of sink. Called again with the same arguments after a crash."""

    def deliver(self, sink: SinkNode, schema: pa.Schema, outputs: Sequence[Output], epoch: int) -> None: ...


def read_productions(store: ObjectStore, schema: pa.Schema, outputs: Sequence[Output]) -> pa.Table:
    """The productions of one stream and epoch, whole and checked."""
    batches = [read_production(store, output) for output in outputs]
    return pa.Table.from_batches(batches, schema=schema)


def read_production(store: ObjectStore, output: Output) -> pa.RecordBatch:
    """What one slot produced."""
    data = read_checked(store, output.name, output.bytes, output.digest)
    return pa.ipc.open_file(pa.BufferReader(data)).get_batch(0)
