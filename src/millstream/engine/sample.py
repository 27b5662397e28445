"""A sample of recent input: a few records of each source, as the map tasks of an epoch have seen them.

Rules
-----
- Bounded in rows, bytes and tasks, whatever the input. It travels with the payload of the first slot and its report.
- It is kept by the driver alone, for rehearsals of modifications, and is that of the last epoch with records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

SAMPLE_ROWS = 8
"""Of each source and map task."""
SAMPLE_BYTES = 64 << 10
SAMPLE_PARTS = 4
"""From how many map tasks a sample of a source is put together."""

Samples = Mapping[str, Sequence[bytes]]
"""For each source, record batches as Arrow streams."""


def sample_of(records: pa.RecordBatch) -> bytes:
    """The first records of a batch, as an Arrow stream; nothing if they are too large.

    >>> few = sample_of(pa.record_batch({"n": list(range(1000))}))
    >>> pa.ipc.open_stream(few).read_all()["n"].to_pylist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    few = records.take(pa.array(range(min(SAMPLE_ROWS, records.num_rows))))  # a copy: a slice has all the bytes
    while few.num_rows and few.nbytes > SAMPLE_BYTES:
        few = few.take(pa.array(range(few.num_rows // 2)))
    if not few.num_rows:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, few.schema) as writer:
        writer.write_batch(few)
    return bytes(sink.getvalue())
