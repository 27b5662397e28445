"""A sample of recent input: a few records of each source, as the map tasks of an epoch have seen them.

Rules
-----
- Bounded in rows, bytes and tasks, whatever the input. It travels with the payload of the first slot and its report.
- Rehearsals of modifications use that of the last epoch with records of a source. A smaller one goes into a commit now
  and then (`EVERY`), so that a driver that takes over has something to rehearse with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

SAMPLE_ROWS = 8
"""Of each source and map task."""
SAMPLE_BYTES = 64 << 10
SAMPLE_PARTS = 4
"""From how many map tasks a sample of a source is put together."""

KEPT_BYTES = 16 << 10
"""Of each source, in a commit."""
EVERY = 16
"""After how many epochs a commit has a sample again; one with the first records of a source has one, too."""

Samples = Mapping[str, Sequence[bytes]]
"""For each source, record batches as Arrow streams."""


def sample_of(records: pa.RecordBatch) -> bytes:
    """The first records of a batch, as an Arrow stream; nothing if they are too large.

    >>> few = sample_of(pa.record_batch({"n": list(range(1000))}))
    >>> pa.ipc.open_stream(few).read_all()["n"].to_pylist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    few = records.slice(0, SAMPLE_ROWS)
    while few.num_rows and few.nbytes > SAMPLE_BYTES:
        few = few.slice(0, few.num_rows // 2)
    return _written(few) if few.num_rows else b""


def _written(records: pa.RecordBatch) -> bytes:
    """As an Arrow stream, which has the bytes of these records only, also if they are a slice."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, records.schema) as writer:
        writer.write_batch(records)
    return bytes(sink.getvalue())


def _cut(part: bytes, room: int) -> bytes:
    """A sample of as many of its records as there is room for; nothing if there is not for one."""
    if len(part) <= room:
        return part
    [few] = pa.ipc.open_stream(part)
    while few.num_rows > 1:
        few = few.slice(0, few.num_rows // 2)
        written = _written(few)
        if len(written) <= room:
            return written
    return b""


def worth_keeping(samples: Samples, known: Samples, epoch: int) -> dict[str, tuple[bytes, ...]]:
    """What of an epoch's samples goes into its commit, where the commits before have left others.

    >>> few = sample_of(pa.record_batch({"n": [1, 2]}))
    >>> worth_keeping({"a": [few], "b": [few]}, {"b": [few]}, epoch=3) == {"a": (few,)}
    True
    """
    found = {}
    for source, parts in samples.items():
        if source in known and epoch % EVERY:
            continue
        room = KEPT_BYTES
        kept = []
        for part in parts:
            small = _cut(part, room)
            if small:
                kept.append(small)
                room -= len(small)
        if kept:
            found[source] = tuple(kept)
    return found
