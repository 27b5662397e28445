"""Segments: immutable Arrow files of state, sorted by (hash, key), and the process-wide cache that maps them.

Rules
-----
- A segment is written once, whole, under a name nobody else uses, and never changes.
- A segment is used only after its length and digest have been found to be those of the manifest. A truncated or
  altered file is named (`DamagedObject`) and never read as state.
- Reading maps the file: state larger than memory is the normal case, and what a process holds privately does not
  grow with state. Where the store is not a local directory, the file is fetched once into a local directory first.
- A range of the key space is a slice of every segment, found by two binary searches.

- A segment of timers can also be read by time: a column holds the row numbers in the order of the rows' times, so
  that the few that are due among millions are found by a binary search.

A file is one Arrow IPC record batch, uncompressed, with the columns `hash` (uint64), `k0`, `k1`... (the key), `value`
(the declared type, or the bytes of a Python object) and, only where they are needed: `sub` (uint64, the hash of the
subkey, which is then the last column of the key), `dead` (bool, tombstones), `until` (int64, when a row expires),
`by_time` (uint32, of timers) and `filter` (uint16, the bytes of a filter of the segment's hashes).
"""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import DamagedObject
from millstream.protocol.keyspace import LAST, Hashes, Range, clip
from millstream.protocol.manifest import Family, SegmentRef
from millstream.store import names
from millstream.store.filters import FILTER_FROM, HashFilter, filter_of
from millstream.store.journal import digest_of
from millstream.store.keys import KeyColumns, Mask, Rows
from millstream.store.objects import ObjectStore
from millstream.store.rows import StateRows

MAX_SEGMENT_BYTES = 128 << 20
"""A larger write is cut into several segments of consecutive ranges."""

OPEN_SEGMENTS = 4096


class Segment:
    """A mapped segment."""

    def __init__(self, ref: SegmentRef, batch: pa.RecordBatch) -> None:
        self.ref, self.batch = ref, batch
        self.hashes: Hashes = np.frombuffer(batch.column("hash").buffers()[1], np.uint64)[: batch.num_rows]

    @cached_property
    def keys(self) -> KeyColumns:
        columns: list[pa.Array] = []
        while f"k{len(columns)}" in self.batch.schema.names:
            columns.append(self.batch.column(f"k{len(columns)}"))
        return KeyColumns(tuple(columns))

    @property
    def values(self) -> pa.Array:
        return self.batch.column("value")

    @property
    def has_subs(self) -> bool:
        """Whether the rows have subkeys."""
        return "sub" in self.batch.schema.names

    @cached_property
    def subs(self) -> Hashes:
        """The hashes of the subkeys, of a segment that has them."""
        return self._numbers("sub", np.uint64)

    @cached_property
    def until(self) -> npt.NDArray[np.int64] | None:
        """When the rows expire; None if they do not."""
        return self._numbers("until", np.int64) if "until" in self.batch.schema.names else None

    @cached_property
    def filter(self) -> HashFilter | None:
        """A filter of the hashes, if the segment has one."""
        return HashFilter(self._numbers("filter", np.uint16)) if "filter" in self.batch.schema.names else None

    def _numbers(self, column: str, dtype: Any) -> npt.NDArray[Any]:
        return np.frombuffer(self.batch.column(column).buffers()[1], dtype)[: self.batch.num_rows]

    @property
    def has_dead(self) -> bool:
        """Whether any row is a tombstone."""
        return "dead" in self.batch.schema.names

    def dead(self, rows: Rows | slice) -> Mask:
        """Which of these rows are tombstones."""
        if not self.has_dead:
            count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
            return np.zeros(count, np.bool_)
        column = self.batch.column("dead")
        chosen = column[rows] if isinstance(rows, slice) else column.take(pa.array(rows))
        result: Mask = chosen.to_numpy(zero_copy_only=False)
        return result

    def absent(self, rows: Rows, now: int | None) -> Mask:
        """Which of these rows are tombstones, or have expired."""
        gone = self.dead(rows)
        if now is not None and self.until is not None:
            gone = gone | (self.until[rows] <= now)
        return gone

    def rows_between(self, after: int, until: int) -> Rows:
        """The rows of timers whose times lie after the one and not after the other."""
        numbers = self._numbers("by_time", np.uint32)
        times = np.frombuffer(self.values.field(0).buffers()[1], np.int64)[: self.batch.num_rows]
        live = len(numbers) - self.ref.tombstones
        edges = [_first_above(times, numbers, live, bound) for bound in (after, until)]
        found: Rows = numbers[edges[0] : edges[1]].astype(np.int64)
        return found

    def rows_in(self, span: Range) -> slice:
        """The rows whose hashes lie in a range."""
        start = int(np.searchsorted(self.hashes, np.uint64(span.first), side="left"))
        return slice(start, int(np.searchsorted(self.hashes, np.uint64(span.last), side="right")))


def _first_above(times: npt.NDArray[np.int64], numbers: npt.NDArray[np.uint32], live: int, bound: int) -> int:
    """Where the first time above a bound stands in the order of times; reads a few rows only."""
    low, high = 0, live
    while low < high:
        middle = (low + high) // 2
        if times[numbers[middle]] > bound:
            high = middle
        else:
            low = middle + 1
    return low


def write_segments(
    store: ObjectStore,
    family: Family,
    maker: names.Maker,
    slot: int,
    order: int,
    owned: tuple[Range, ...],
    rows: StateRows,
    timers: bool = False,
    filtered: bool = False,
) -> list[SegmentRef]:
    """Writes rows as one segment, or several if they are large.

    `owned` are the ranges that the writer speaks for; all rows lie in them. `timers` says that the values have times,
    `filtered` that the segment is to have a filter.
    """
    hashes, dead = rows.hashes, rows.dead
    columns = {
        "hash": pa.array(hashes),
        **{f"k{i}": column for i, column in enumerate(rows.keys.columns)},
        "value": rows.values,
    }
    if rows.subs is not None:
        columns["sub"] = pa.array(rows.subs)
    if rows.until is not None:
        columns["until"] = pa.array(rows.until)
    if dead.any():
        columns["dead"] = pa.array(dead)
    batch = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
    refs = []
    first = 0
    for start, stop in _cuts(hashes, batch.nbytes):
        last = LAST if stop == len(hashes) else int(hashes[stop]) - 1
        part = batch.slice(start, stop - start)
        span = None
        if timers:
            part, span = _by_time(part)
        if filtered and part.num_rows >= FILTER_FROM:
            part = part.append_column("filter", pa.array(filter_of(hashes[start:stop])))
        data = encode_batch(part)
        tombstones = int(dead[start:stop].sum())
        ref = SegmentRef(
            names.segment(family, maker, slot),
            family,
            order,
            part.num_rows,
            len(data),
            digest_of(data),
            clip(owned, [Range(first, last)]),
            tombstones,
            span,
        )
        store.put(ref.name, data)
        refs.append(ref)
        first = last + 1
    return refs


_NEVER = (2**63 - 1, -(2**63))
"""The span of a segment of timers in which all are gone."""


def _by_time(part: pa.RecordBatch) -> tuple[pa.RecordBatch, tuple[int, int]]:
    """The rows with a column of row numbers in the order of times, those of tombstones last; and the span of times."""
    times = pc.struct_field(part.column("value"), "time").to_numpy(zero_copy_only=False)
    live = np.arange(part.num_rows)
    if "dead" in part.schema.names:
        live = np.flatnonzero(~part.column("dead").to_numpy(zero_copy_only=False))
    ordered = live[np.argsort(times[live], kind="stable")]
    numbers = np.full(part.num_rows, part.num_rows, np.uint32)
    numbers[: len(ordered)] = ordered
    span = (int(times[ordered[0]]), int(times[ordered[-1]])) if len(ordered) else _NEVER
    return part.append_column("by_time", pa.array(numbers)), span


def _cuts(hashes: Hashes, size: int) -> list[tuple[int, int]]:
    """Where to cut so that no part is much larger than the limit and no hash is in two parts."""
    if not len(hashes):
        return []
    parts = -(-size // MAX_SEGMENT_BYTES)
    edges = [0]
    for part in range(1, parts):
        at = int(np.searchsorted(hashes, hashes[part * len(hashes) // parts], side="left"))
        if at > edges[-1]:
            edges.append(at)
    return list(zip(edges, [*edges[1:], len(hashes)], strict=True))


def encode_batch(batch: pa.RecordBatch) -> memoryview:
    """One record batch as an Arrow IPC file. Measured first: a stream that grows needs twice the memory."""
    measure = pa.MockOutputStream()
    with pa.ipc.new_file(measure, batch.schema) as writer:
        writer.write_batch(batch)
    data = pa.allocate_buffer(measure.size())
    with pa.FixedSizeBufferWriter(data) as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(data).cast("B")


def read_checked(store: ObjectStore, name: str, size: int, digest: str) -> pa.Buffer:
    """The bytes of an object, mapped where it is a file, if they are those that were written."""
    try:
        return _checked(store, name, size, digest)
    except DamagedObject:
        if store.path(name) is not None or store.uri.startswith("memory:"):
            raise
        _copy_of(store.uri, name).unlink(missing_ok=True)  # the local copy may be damaged rather than the object
        return _checked(store, name, size, digest)


def _checked(store: ObjectStore, name: str, size: int, digest: str) -> pa.Buffer:
    mapped = _mapped(store, name, size)
    if mapped.size != size:
        raise DamagedObject(name, f"{mapped.size} bytes", f"{size} bytes")
    found = digest_of(memoryview(mapped))
    if found != digest:
        raise DamagedObject(name, f"bytes with digest {found}", f"digest {digest}")
    return mapped


def _mapped(store: ObjectStore, name: str, size: int) -> pa.Buffer:
    if store.uri.startswith("memory:"):
        data = store.get(name)
        if data is None:
            raise DamagedObject(name, "nothing", f"{size} bytes")
        return pa.py_buffer(data)
    path = store.path(name) or _fetched(store, name, size)
    try:
        return pa.memory_map(str(path), "r").read_buffer() if path.stat().st_size else pa.py_buffer(b"")
    except FileNotFoundError as error:
        raise DamagedObject(name, "nothing", f"{size} bytes") from error


def _fetched(store: ObjectStore, name: str, size: int) -> Path:
    """A local copy of an object of a remote store. Named by the object, so fetching twice is harmless."""
    path = _copy_of(store.uri, name)
    if not path.exists() or path.stat().st_size != size:
        data = store.get(name)
        if data is None:
            raise DamagedObject(name, "nothing", f"{size} bytes")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as staged:
            staged.write(data)
        Path(staged.name).rename(path)
    return path


def _copy_of(uri: str, name: str) -> Path:
    root = Path(tempfile.gettempdir()) / f"millstream-{os.getuid()}"
    return root / digest_of(uri.encode()) / name.replace("/", "__")


class SegmentCache:
    """The mapped segments of one process. A cache only: whoever asks gets the right segment, cached or not."""

    def __init__(self, limit: int = OPEN_SEGMENTS) -> None:
        self._limit = limit
        self._open: OrderedDict[tuple[str, str], Segment] = OrderedDict()
        self._wanted: dict[tuple[str, int], set[str]] = {}

    def open(self, store: ObjectStore, ref: SegmentRef) -> Segment:
        key = (store.uri, ref.name)
        segment = self._open.get(key)
        if segment is None:
            data = read_checked(store, ref.name, ref.bytes, ref.digest)
            segment = Segment(ref, pa.ipc.open_file(pa.BufferReader(data)).get_batch(0))
            self._open[key] = segment
            if len(self._open) > self._limit:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(key)
        return segment

    def settle(self, uri: str, slot: int, refs: Sequence[SegmentRef]) -> None:
        """Says what a slot's state consists of now. Segments that no slot seen here needs are let go, so that
        deleted files give their space back."""
        self._wanted[(uri, slot)] = {ref.name for ref in refs}
        wanted = {(store, name) for (store, _), names_ in self._wanted.items() for name in names_}
        for key in [key for key in self._open if key not in wanted]:
            del self._open[key]
            _copy_of(*key).unlink(missing_ok=True)


CACHE = SegmentCache()
"""The cache of this process: Spark reuses Python workers, so it outlives tasks."""
