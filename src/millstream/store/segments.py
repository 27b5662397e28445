"""Segments: immutable Arrow files of state, sorted by (hash, key), and the process-wide cache that maps them.

Rules
-----
- A segment is written once, whole, under a name nobody else uses, and never changes.
- A segment is used only after its length and digests have been found to be those of the manifest (see `held`). A
  truncated or altered file is named (`DamagedObject`) and never read as state.
- Whoever looks keys up in a large segment checks the chunks that this touches (see `touched`). So a slot that goes on
  elsewhere does not begin by reading all its state there.
- What a worker has is checked ahead of time, a little by every task and up to `AHEAD_MOST`: what its slots need, and
  what others have brought because a slot may soon go on there. What has not been checked when it is needed is slower.
- Reading maps a file: state larger than memory is the normal case, and what a process holds privately does not grow
  with state. It is the file in the worker's cache if there is one, else the store's own.
- A range of the key space is a slice of every segment. Who needs a range gets a view of it: the rows of the range and a
  few more, and nothing but their bytes is fetched or even looked at. A slot that needs all of a segment has one view.
- A view is a segment of its own to whoever looks things up in it: no search leaves it.
- A segment of timers can also be read by time: a column holds the row numbers in the order of the rows' times, so
  that the few that are due among millions are found by a binary search. A view of some rows sorts its own,
  if it is asked often enough.

The file in the object (see `chunks`) is one Arrow IPC record batch, uncompressed, with the columns `hash` (uint64),
`k0`, `k1`... (the key), `value` (the declared type, or the bytes of a Python object) and, only where they are needed:
`sub` (uint64, the hash of the subkey, which is then the last column of the key), `dead` (bool, tombstones), `until`
(int64, when a row expires), `by_time` (uint32, of timers) and `filter` (uint16, the bytes of a filter of the segment's
hashes).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import DamagedObject, StoreUnavailable
from millstream.protocol.keyspace import LAST, Hashes, Range, clip
from millstream.protocol.manifest import Family, Piece, SegmentRef
from millstream.store import names
from millstream.store.cache import CacheSettings, WorkerCache, open_cache
from millstream.store.chunks import Span, UnknownLayout, Window, chunks_of, index_of, metadata_of, spans_of, together
from millstream.store.filters import FILTER_FROM, HashFilter, filter_of
from millstream.store.held import Fetcher, Gone, Held, InMemory, Nobody, NoRoom, Place, Traffic, Whole
from millstream.store.journal import digest_of
from millstream.store.keys import KeyColumns, Mask, Rows
from millstream.store.objects import Data, ObjectStore
from millstream.store.rows import StateRows
from millstream.store.touched import Touched

MAX_SEGMENT_BYTES = 128 << 20
"""A larger write is cut into several segments of consecutive ranges."""

OPEN_SEGMENTS = 4096

LOOK_FROM = 4 << 20
"""Segments of fewer bytes are checked as a whole when they are opened."""
AHEAD_MOST = 2 << 30
"""How many bytes a process checks ahead for each slot, at most: no more than may still be in memory when it counts."""
_AHEAD_CHUNKS = 32
"""How many chunks are checked ahead before looking at the time."""
_AHEAD_AGAIN_S = 10.0
"""How long something that was not here is not looked for again."""

_TRIES = 2
"""How often a segment is looked for in the worker's cache; then it is read into memory."""
_KEEP_VIEWS = 8
"""How many sets of ranges of a segment are remembered: while state moves to a slot, every epoch has another one."""
_SORT_AT = 16
"""How often a view of timers is searched row by row before it is worth sorting."""
_FORGET_S = 600.0
"""A slot that has not run here for so long runs elsewhere."""


_OF_ALL_ROWS = ("by_time", "filter")
"""Columns that are of use only together with all rows."""


class Segment:
    """A mapped segment, or a view of some of its rows."""

    def __init__(self, ref: SegmentRef, batch: pa.RecordBatch, filtered: bool, touched: Touched | None = None) -> None:
        self.ref, self.batch, self._touched = ref, batch, touched
        self._asked = 0
        self.filtered = filtered
        """Whether the segment has a filter, even if a view of it has none."""
        self.hashes: Hashes = self._numbers("hash", np.uint64)

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
        """A filter of the hashes, if all rows are here and the segment has one."""
        return HashFilter(self._numbers("filter", np.uint16)) if "filter" in self.batch.schema.names else None

    def find(self, wanted: Hashes, side: Literal["left", "right"] = "left") -> Rows:
        """Where hashes, which are in order, stand among those of the rows; as `np.searchsorted`."""
        if self._touched is not None:
            return self._touched.find(self.hashes, wanted, side)
        return np.searchsorted(self.hashes, wanted, side=side)

    def _numbers(self, column: str, dtype: Any) -> npt.NDArray[Any]:
        return numbers_of(self.batch.column(column), dtype)

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
        """The rows of timers whose times lie after the one and not after the other, in the order of their times."""
        times = numbers_of(self.values.field(0), np.int64)
        self._asked += 1
        if "by_time" not in self.batch.schema.names and self._asked < _SORT_AT:
            rows = np.flatnonzero((times > after) & (times <= until))
            rows = rows[~self.dead(rows)]
            return rows[np.argsort(times[rows], kind="stable")]
        numbers, live = self._by_time
        edges = [_first_above(times, numbers, live, bound) for bound in (after, until)]
        found: Rows = numbers[edges[0] : edges[1]].astype(np.int64)
        return found

    @cached_property
    def _by_time(self) -> tuple[npt.NDArray[np.uint32], int]:
        """The row numbers in the order of times, those of tombstones last, and how many are not of tombstones."""
        if "by_time" in self.batch.schema.names:
            return self._numbers("by_time", np.uint32), self.batch.num_rows - self.ref.tombstones
        return _time_order(self.batch)

    def rows_in(self, span: Range) -> slice:
        """The rows whose hashes lie in a range."""
        start = int(np.searchsorted(self.hashes, np.uint64(span.first), side="left"))
        return slice(start, int(np.searchsorted(self.hashes, np.uint64(span.last), side="right")))


def numbers_of(column: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    """The values of a column of fixed width, whatever stands where it is null."""
    data = column.buffers()[1]
    found: npt.NDArray[Any] = np.frombuffer(b"" if data is None else data, dtype)
    return found[column.offset : column.offset + len(column)]


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
    cache: SegmentCache,
    family: Family,
    maker: names.Maker,
    slot: int,
    order: int,
    owned: tuple[Range, ...],
    rows: StateRows,
    timers: bool = False,
    filtered: bool = False,
    form: int = 0,
) -> list[SegmentRef]:
    """Writes rows as one segment, or several if they are large; the worker's cache has them, too."""
    return put_segments(store, cache, maker, slot, encoded(family, order, owned, rows, timers, filtered, form))


def put_segments(
    store: ObjectStore,
    cache: SegmentCache,
    maker: names.Maker,
    slot: int,
    parts: Iterable[tuple[SegmentRef, memoryview]],
) -> list[SegmentRef]:
    """Stores segments under names of their own."""
    refs = []
    for part, data in parts:
        ref = replace(part, name=names.segment(part.family, maker, slot))
        store.put(ref.name, data)
        cache.keep(store, ref, data)
        refs.append(ref)
    return refs


def encoded(
    family: Family,
    order: int,
    owned: tuple[Range, ...],
    rows: StateRows,
    timers: bool = False,
    filtered: bool = False,
    form: int = 0,
) -> Iterator[tuple[SegmentRef, memoryview]]:
    """Rows as the objects of one segment, or several if they are large, which are yet to be named. The same rows give
    the same bytes.

    `owned` are the ranges that the writer speaks for; all rows lie in them. `timers` says that the values have times,
    `filtered` that the segment is to have a filter, `form` in which form the values are.
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
    first = 0
    for start, stop in _cuts(hashes, batch.nbytes):
        last = LAST if stop == len(hashes) else int(hashes[stop]) - 1
        part = batch.slice(start, stop - start)
        span = None
        if timers:
            part, span = _by_time(part)
        if filtered and part.num_rows >= FILTER_FROM:
            part = part.append_column("filter", pa.array(filter_of(hashes[start:stop])))
        data, digest = _encode(part, hashes[start:stop])
        tombstones = int(dead[start:stop].sum())
        ref = SegmentRef(
            "",
            family,
            order,
            part.num_rows,
            len(data),
            digest,
            clip(owned, [Range(first, last)]),
            tombstones,
            span,
            form,
        )
        yield ref, data
        first = last + 1


_NEVER = (2**63 - 1, -(2**63))
"""The span of a segment of timers in which all are gone."""


def _by_time(part: pa.RecordBatch) -> tuple[pa.RecordBatch, tuple[int, int]]:
    """The rows with a column of row numbers in the order of times, those of tombstones last; and the span of times."""
    numbers, live = _time_order(part)
    times = numbers_of(part.column("value").field(0), np.int64)
    span = (int(times[numbers[0]]), int(times[numbers[live - 1]])) if live else _NEVER
    return part.append_column("by_time", pa.array(numbers)), span


def _time_order(part: pa.RecordBatch) -> tuple[npt.NDArray[np.uint32], int]:
    times = numbers_of(part.column("value").field(0), np.int64)
    live = np.arange(part.num_rows)
    if "dead" in part.schema.names:
        live = np.flatnonzero(~part.column("dead").to_numpy(zero_copy_only=False))
    numbers = np.full(part.num_rows, part.num_rows, np.uint32)
    numbers[: len(live)] = live[np.argsort(times[live], kind="stable")]
    return numbers, len(live)


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


def encode_batch(batch: pa.RecordBatch, spare: int = 0) -> memoryview:
    """One record batch as an Arrow IPC file, with a few bytes to spare behind it. Measured first: a stream that grows
    needs twice the memory."""
    data = pa.allocate_buffer(_measured(batch) + spare)
    with pa.FixedSizeBufferWriter(data) as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(data).cast("B")


def _measured(batch: pa.RecordBatch) -> int:
    measure = pa.MockOutputStream()
    with pa.ipc.new_file(measure, batch.schema) as writer:
        writer.write_batch(batch)
    size: int = measure.size()
    return size


def _encode(batch: pa.RecordBatch, hashes: Hashes) -> tuple[memoryview, str]:
    """A segment's object, and its digest: that of the index."""
    size = _measured(batch)
    data = encode_batch(batch, spare=16 * chunks_of(size))
    index = index_of(data[:size], hashes)
    data[size:] = index
    return data, digest_of(index)


def read_checked(store: ObjectStore, name: str, size: int, digest: str) -> pa.Buffer:
    """The bytes of an object that is no segment, mapped where it is a file, if they are those that were written."""
    data = _in_store(store, name, size).buffer
    if data.size != size:
        raise DamagedObject(name, f"{data.size} bytes", f"{size} bytes")
    found = digest_of(memoryview(data))
    if found != digest:
        raise DamagedObject(name, f"bytes with digest {found}", f"digest {digest}")
    return data


def _in_store(store: ObjectStore, name: str, size: int) -> Whole:
    """An object where the store has it: in a file of this machine, or else read into memory."""
    path = store.path(name)
    if path is not None:
        try:
            return Whole.mapped(path, own=False)
        except FileNotFoundError as error:
            raise DamagedObject(name, "nothing", f"{size} bytes") from error
    data = store.get(name)
    if data is None:
        raise DamagedObject(name, "nothing", f"{size} bytes")
    return Whole(pa.py_buffer(data))


View = tuple[Segment, tuple[Range, ...]]
"""A view of a segment, and the ranges that are to be looked up in it."""


class _Open:
    """A segment that this process reads from."""

    def __init__(self, held: Held) -> None:
        self.held, self.ref = held, held.ref
        for spans in metadata_of(memoryview(held.file)):
            held.need(spans)
        self._batch = pa.ipc.open_file(pa.BufferReader(held.file)).get_batch(0)
        self._filtered = "filter" in self._batch.schema.names
        self.whole: Segment | None = None
        """The view of all rows, if anybody has needed it."""
        self._views: dict[tuple[Range, ...], tuple[View, ...]] = {}
        self._touched: Touched | None = None
        self._partly: Segment | None = None  # all rows, of which only some have been checked
        self._not_before = 0.0

    def look(self, wanted: Hashes) -> Segment | None:
        """The rows for a lookup of some hashes, in order, if all that it touches is here; None if not, or if it is as
        well to have all of them."""
        if self.whole is not None:
            return self.whole
        if self.held.size < LOOK_FROM or not self.ref.rows or 2 * len(wanted) > len(self.held.index.digests):
            return None
        try:
            if self._touched is None or self._partly is None:
                self._touched = Touched(self.held.index, self._batch, self.held.file.address, self._columns)
                self._partly = Segment(self.ref, self._batch.select(self._columns), self._filtered, self._touched)
        except UnknownLayout:
            return None
        for numbers in self._touched.chunks(wanted):
            if 2 * len(numbers) > len(self.held.index.digests) or not self.held.are_here(numbers):
                return None
        return self._partly

    def views(self, ranges: tuple[Range, ...]) -> tuple[View, ...]:
        if self.whole is not None:
            return ((self.whole, ranges),)
        known = self._views.get(ranges)
        if known is None:
            windows = self.held.index.windows(ranges)
            if ranges == self.ref.covers or self._mostly(windows):
                self.held.need([(0, self.held.size)])
                self.whole, self._views = Segment(self.ref, self._batch, self._filtered), {}
                return ((self.whole, ranges),)
            known = self._views[ranges] = self._parts(windows or [Window(0, 0, ranges)])
            if len(self._views) > _KEEP_VIEWS:
                self._views.pop(next(iter(self._views)), None)
        return known

    def check_ahead(self, ranges: tuple[Range, ...], until: float) -> bool:
        """Checks what some ranges consist of, until a time. Whether all of it is here, and right; if something is not,
        it is left to whoever needs it."""
        if self.is_checked(ranges):
            return True
        if time.monotonic() < self._not_before:
            return False
        for spans in self._rounds(ranges):
            unknown = self.held.unknown(spans)
            for at in range(0, len(unknown), _AHEAD_CHUNKS):
                if time.perf_counter() >= until:
                    return False
                if not self.held.are_here(unknown[at : at + _AHEAD_CHUNKS]):
                    self._not_before = time.monotonic() + _AHEAD_AGAIN_S
                    return False
        self.views(ranges)
        return True

    def is_checked(self, ranges: tuple[Range, ...]) -> bool:
        """Whether there is nothing more to check in some ranges."""
        return self.whole is not None or ranges in self._views

    def _rounds(self, ranges: tuple[Range, ...]) -> Iterator[list[Span]]:
        """The bytes that `views` needs for some ranges, in rounds."""
        windows = self.held.index.windows(ranges)
        if ranges == self.ref.covers or self._mostly(windows):
            return iter([[(0, self.held.size)]])
        return self._spans(windows)

    def _spans(self, windows: Sequence[Window]) -> Iterator[list[Span]]:
        base = self.held.file.address
        return together([spans_of(self._batch, base, self._columns, each.start, each.stop) for each in windows])

    @property
    def _columns(self) -> list[str]:
        return [name for name in self._batch.schema.names if name not in _OF_ALL_ROWS]

    def _mostly(self, windows: Sequence[Window]) -> bool:
        """Whether one view of everything is the better one: it takes no more bytes, or not many more that are here."""
        rows = sum(window.stop - window.start for window in windows)
        return rows == self.ref.rows or (self.held.complete and 2 * rows >= self.ref.rows)

    def _parts(self, windows: Sequence[Window]) -> tuple[View, ...]:
        for spans in self._spans(windows):
            self.held.need(spans)
        batch = self._batch.select(self._columns)
        parts = [batch.slice(each.start, each.stop - each.start) for each in windows]
        return tuple(
            (Segment(self.ref, part, self._filtered), each.ranges) for part, each in zip(parts, windows, strict=True)
        )


def bring(worker: WorkerCache, piece: Piece, fetcher: Fetcher, traffic: Traffic) -> None:
    """Sees to it that all that counts of a segment is in a worker's cache."""
    place = worker.place(piece.segment.name, piece.segment.bytes)
    if isinstance(place, InMemory):
        raise NoRoom(f"the cache in {worker.directory} cannot be written")
    _Open(Held(piece.segment, place, fetcher, traffic)).views(piece.ranges)


class SegmentCache:
    """The segments that one process reads from. A cache only: whoever asks gets the right rows, cached or not, also if
    several threads ask at once (a rehearsal beside an epoch, in one process).

    Where a worker's cache is attached to a store, segments are read through it, and else from the store's own files.
    """

    def __init__(self, limit: int = OPEN_SEGMENTS) -> None:
        self._limit = limit
        self._open: OrderedDict[tuple[str, str], _Open] = OrderedDict()
        self._wanted: dict[tuple[str, int], tuple[frozenset[str], float]] = {}
        self._workers: dict[str, WorkerCache] = {}
        self.traffic = Traffic()

    def attach(self, uri: str, worker: WorkerCache) -> None:
        """Has the segments of a store read through a worker's cache."""
        self._workers[uri] = worker

    def apart(self) -> SegmentCache:
        """Another one with the same workers' caches, for another thread."""
        other = SegmentCache(self._limit)
        other._workers = self._workers
        return other

    def open(self, store: ObjectStore, piece: Piece, wanted: Hashes | None = None) -> tuple[View, ...]:
        """Views of all rows of a piece, in order; each with the ranges of the piece that are to be looked up in it.
        Where only some hashes are wanted, other rows may not have been checked."""
        key = (store.uri, piece.segment.name)
        found = self._open.get(key)
        if found is not None:
            with contextlib.suppress(KeyError):  # another thread has let go of it
                self._open.move_to_end(key)
            if found.whole is not None:
                return ((found.whole, piece.ranges),)
        before, began = self.traffic.fetched, time.perf_counter()
        views = self._views(store, piece, _TRIES, wanted)
        self.traffic.open_s += time.perf_counter() - began
        if self.traffic.fetched > before:
            self._make_room(key, self.traffic.fetched - before)
        return views

    def _views(self, store: ObjectStore, piece: Piece, tries: int, wanted: Hashes | None = None) -> tuple[View, ...]:
        key = (store.uri, piece.segment.name)
        try:
            found = self._open.get(key) or self._opened(store, piece.segment, in_memory=not tries)
            looked = found.look(wanted) if wanted is not None and not found.is_checked(piece.ranges) else None
            if looked is not None:
                return ((looked, piece.ranges),)
            return found.views(piece.ranges)
        except Gone as error:  # its file was evicted meanwhile, is damaged, or has no room to grow
            self._open.pop(key, None)
            if isinstance(error, NoRoom):
                self._workers[store.uri].warn(error)
                tries = 1
            return self._views(store, piece, tries - 1)

    def _make_room(self, key: tuple[str, str], count: int) -> None:
        """Has the worker's cache make room for what came, and lets go of what was evicted for it."""
        uri, name = key
        worker = self._workers[uri]
        gone = set(worker.fetched(count, name, [other for store, other in list(self._open) if store == uri]))
        for other in list(self._open):
            if other[0] == uri and names.base(other[1]) in gone:
                self._open.pop(other, None)

    def _opened(self, store: ObjectStore, ref: SegmentRef, in_memory: bool) -> _Open:
        worker = self._worker(store, ref.name)
        place: Place
        if worker is not None:
            place = InMemory(ref.bytes) if in_memory else worker.place(ref.name, ref.bytes)
            held = Held(ref, place, Fetcher(store, worker.pace, self.traffic), self.traffic)
        else:
            held = Held(ref, _in_store(store, ref.name, ref.bytes), None, self.traffic)
        opened = self._open[(store.uri, ref.name)] = _Open(held)
        if len(self._open) > self._limit:
            self._open.popitem(last=False)
        return opened

    def _worker(self, store: ObjectStore, name: str) -> WorkerCache | None:
        """The worker's cache; a store that is not on this machine has one in any case."""
        worker = self._workers.get(store.uri)
        if worker is None and store.path(name) is None and not store.uri.startswith("memory:"):
            worker = open_cache(CacheSettings(), digest_of(store.uri.encode()), os.getpid())
            self.attach(store.uri, worker)
        return worker

    def lacks(self, store: ObjectStore, pieces: Sequence[Piece]) -> int:
        """About how many bytes of pieces would have to be fetched: those of which there is nothing here."""
        if store.uri not in self._workers:
            return 0
        there = self._there(store)
        return sum(piece.bytes for piece in pieces if names.base(piece.segment.name) not in there)

    def object(self, store: ObjectStore, ref: SegmentRef) -> bytes | None:
        """A segment that was just written, as it lies in the worker's cache, or else in the store."""
        worker = self._workers.get(store.uri)
        found = worker.read(ref.name, [(0, ref.bytes)]) if worker is not None else None
        if found and len(found[0][1]) == ref.bytes:
            return found[0][1]
        data = store.get(ref.name)
        return None if data is None else bytes(data)

    def keep(self, store: ObjectStore, ref: SegmentRef, data: Data) -> None:
        """Puts a segment that was just written into the worker's cache."""
        worker = self._workers.get(store.uri)
        if worker is not None:
            copied = worker.keep(store, ref.name, data)
            if copied:
                self._make_room((store.uri, ref.name), copied)

    def check_ahead(self, store: ObjectStore, pieces: Sequence[Piece], until: float) -> int:
        """Checks, until a time, pieces that are here, whether a slot needs them or may do so soon. What is not here, or
        not right, is left to whoever needs it. How many bytes are left to check."""
        found, room, unchecked = self.traffic.found, AHEAD_MOST, 0
        there: set[str] | None = None
        for piece in pieces:
            key, room = (store.uri, piece.segment.name), room - piece.bytes
            opened = self._open.get(key)
            if room < 0 or (opened is not None and opened.is_checked(piece.ranges)):
                continue
            unchecked += piece.bytes
            if time.perf_counter() >= until:
                continue
            try:
                if opened is None and len(self._open) < self._limit // 2:
                    there = self._there(store) if there is None else there
                    opened = self._brought(store, piece.segment) if names.base(piece.segment.name) in there else None
                if opened is not None:
                    unchecked -= piece.bytes if opened.check_ahead(piece.ranges, until) else 0
            except (Gone, DamagedObject, StoreUnavailable, UnknownLayout, OSError):
                self._open.pop(key, None)
        self.traffic.ahead += self.traffic.found - found
        self.traffic.found = found
        return unchecked

    def _brought(self, store: ObjectStore, ref: SegmentRef) -> _Open:
        """A segment of which others have brought something to the worker's cache; nothing is fetched or made for it.
        Raises `Gone` if it cannot be opened with what is there."""
        worker = self._workers[store.uri]
        held = Held(ref, worker.place_of(ref.name, ref.bytes), Nobody(store, None, self.traffic), self.traffic)
        opened = _Open(held)
        held.fetcher = Fetcher(store, worker.pace, self.traffic)
        self._open[(store.uri, ref.name)] = opened
        return opened

    def _there(self, store: ObjectStore) -> set[str]:
        """The objects of which a worker's cache has something."""
        worker = self._workers.get(store.uri)
        return worker.objects() if worker is not None else set()

    def settle(self, uri: str, slot: int, refs: Sequence[SegmentRef], soon: Sequence[Piece] = ()) -> None:
        """Says what a slot's state consists of now, and what it may soon have more. Segments that no slot seen here
        needs are let go, so that deleted files give their space back."""
        needs, now = frozenset(ref.name for ref in refs), time.monotonic()
        if uri in self._workers:
            self._workers[uri].note(slot, needs)
        needs |= {piece.segment.name for piece in soon}
        before, _ = self._wanted.get((uri, slot), (None, now))
        self._wanted[(uri, slot)] = (needs, now)
        if before == needs:
            return
        for old in [slot_ for slot_, (_, seen) in list(self._wanted.items()) if now - seen > _FORGET_S]:
            self._wanted.pop(old, None)
        known = list(self._wanted.items())
        wanted = {(store, name) for (store, _), (names_, _) in known for name in names_}
        for key in list(self._open):
            if key not in wanted:
                self._open.pop(key, None)


CACHE = SegmentCache()
"""The cache of this process: Spark reuses Python workers, so it outlives tasks."""
