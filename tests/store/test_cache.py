"""Reading segments range by range, through a worker's cache: what is read, what is fetched, and what may go wrong."""

from __future__ import annotations

import datetime as dt
import itertools
import multiprocessing
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DamagedObject
from millstream.protocol.keyspace import LAST, WHOLE, Hashes, Range, clip
from millstream.protocol.manifest import Family, Piece, SegmentRef
from millstream.store import cache as cache_module
from millstream.store import chunks, names
from millstream.store import segments as segments_module
from millstream.store.cache import CacheSettings, Limiter, WorkerCache, open_cache
from millstream.store.chunks import Index, chunks_of, file_size, index_of
from millstream.store.due import due_between
from millstream.store.keys import KeyColumns, arrange
from millstream.store.least import least_between
from millstream.store.lookup import locate
from millstream.store.merge import newest_rows
from millstream.store.names import Maker
from millstream.store.objects import ObjectStore, open_store
from millstream.store.rows import StateRows
from millstream.store.segments import SegmentCache, write_segments
from millstream.testing.faults import FaultyStore

FAMILY = Family("step", "state")
MAKER = Maker(1, 0, "a", 0)

TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "long": pa.int64(),
    "double": pa.float64(),
    "decimal": pa.decimal128(20, 2),
    "string": pa.string(),
    "binary": pa.binary(),
    "large binary": pa.large_binary(),
    "fixed binary": pa.binary(7),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "duration": pa.duration("us"),
    "null": pa.null(),
    "list": pa.list_(pa.string()),
    "large list": pa.large_list(pa.int16()),
    "fixed list": pa.list_(pa.int32(), 3),
    "map": pa.map_(pa.string(), pa.list_(pa.int64())),
    "struct": pa.struct([("a", pa.string()), ("b", pa.bool_()), ("c", pa.struct([("d", pa.list_(pa.int8()))]))]),
    "list of lists": pa.list_(pa.list_(pa.struct([("x", pa.string()), ("y", pa.float32())]))),
}


def some_value(kind: pa.DataType, rng: random.Random) -> Any:
    """A value of a type; now and then null."""
    types = pa.types
    if types.is_null(kind) or rng.random() < 0.1:
        return None
    if types.is_map(kind):
        keys = sorted({some_text(rng) for _ in range(rng.randrange(3))})
        return [(key, some_value(kind.item_type, rng)) for key in keys]
    if types.is_list(kind) or types.is_large_list(kind):
        return [some_value(kind.value_type, rng) for _ in range(rng.randrange(4))]
    if types.is_fixed_size_list(kind):
        return [rng.randrange(100) for _ in range(kind.list_size)]
    if types.is_struct(kind):
        return {field.name: some_value(field.type, rng) for field in kind}
    if types.is_string(kind):
        return some_text(rng)
    if types.is_fixed_size_binary(kind) and not types.is_decimal(kind):
        return rng.randbytes(kind.byte_width)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return rng.randbytes(rng.randrange(20))
    if types.is_decimal(kind):
        return Decimal(rng.randrange(-(10**9), 10**9)) / 100
    if types.is_date(kind):
        return dt.date(2000, 1, 1) + dt.timedelta(rng.randrange(9999))
    if types.is_timestamp(kind):
        return dt.datetime(2000, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=rng.randrange(10**15))
    if types.is_duration(kind):
        return dt.timedelta(microseconds=rng.randrange(10**15))
    if types.is_boolean(kind):
        return rng.random() < 0.5
    return rng.random() if types.is_floating(kind) else rng.randrange(100)


def some_text(rng: random.Random) -> str:
    return "".join(rng.choices("abcäöü", k=rng.randrange(15)))


class CountingStore(FaultyStore):
    """Counts the bytes that are read in ranges; nothing else may be read."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.read = 0

    def get_ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview] | None:
        self.read += sum(end - start for start, end in spans)
        return super().get_ranges(name, spans)

    def get(self, name: str) -> memoryview | None:
        raise AssertionError(f"{name} was read whole")


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a segment of some kilobytes has many."""
    monkeypatch.setattr(chunks, "CHUNK", 64)


def rows_of(count: int, values: pa.Array | None = None, seed: int = 0) -> StateRows:
    """State of some keys, in order."""
    keys = KeyColumns((pa.array(np.random.default_rng(seed).permutation(count * 3)[:count].astype(np.int64)),))
    hashes = keys.hashes()
    order, _ = arrange(hashes, keys)
    values = values if values is not None else pa.array(np.arange(count))
    return StateRows(hashes[order], keys.take(order), values, np.zeros(count, np.bool_))


def written(
    store: ObjectStore,
    rows: StateRows,
    cache: SegmentCache | None = None,
    covers: tuple[Range, ...] = (WHOLE,),
    **how: Any,
) -> SegmentRef:
    [ref] = write_segments(store, cache or SegmentCache(), FAMILY, MAKER, 0, 0, covers, rows, **how)
    return ref


def attached(store: ObjectStore, directory: Path, limit: int = 1 << 30, rate: float | None = None) -> SegmentCache:
    cache = SegmentCache()
    cache.attach(store.uri, WorkerCache(directory, limit, rate))
    return cache


def some_ranges(rng: random.Random, count: int) -> tuple[Range, ...]:
    edges = sorted(rng.randrange(LAST) for _ in range(2 * count))
    return tuple(Range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True))


def read_rows(store: ObjectStore, cache: SegmentCache, piece: Piece) -> list[tuple[int, Any]]:
    rows = newest_rows(store, cache, [piece], [WHOLE], drop_dead=False)
    return list(zip(rows.hashes.tolist(), rows.values.to_pylist(), strict=True))


# -- the index -----------------------------------------------------------------------------------------------


@given(st.integers(1, 20 * chunks.CHUNK))
def test_the_length_of_the_file_follows_from_that_of_the_object(size: int) -> None:
    assert file_size(size + 16 * chunks_of(size)) == size


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=200),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), min_size=1, max_size=4),
)
def test_windows_hold_all_rows_of_their_ranges_and_no_more_than_the_fences_allow(
    points: list[int], count: int, spans: list[tuple[int, int]]
) -> None:
    """Also where many rows share a hash, and where there are more fences than rows."""
    hashes: Hashes = np.sort(np.array(points, np.uint64))
    fences = hashes[np.arange(count) * len(hashes) // count]
    index = Index(len(hashes), [0] * count, fences)
    ranges: list[Range] = []
    for first, last in sorted((min(s), max(s)) for s in spans):
        if not ranges or first > ranges[-1].last:
            ranges.append(Range(first, last))
    windows = index.windows(ranges)
    inside = [i for i, point in enumerate(hashes.tolist()) if any(point in span for span in ranges)]
    assert set(inside) <= {row for window in windows for row in range(window.start, window.stop)}
    for window in windows:
        for span in window.ranges:
            mine = [i for i, point in enumerate(hashes.tolist()) if point in span]
            assert all(window.start <= row < window.stop for row in mine)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(windows))
    surplus = sum(window.stop - window.start for window in windows) - len(inside)
    assert surplus <= len(ranges) * (2 + chunks.GAP) * -(-len(hashes) // count)


def test_an_index_vouches_for_the_bytes_it_was_made_of_and_no_others() -> None:
    data = memoryview(os.urandom(3 * chunks.CHUNK + 5))
    index = Index.read(memoryview(index_of(data, np.arange(9, dtype=np.uint64))), 9)
    assert len(index.digests) == 4
    assert index.vouches(3, data[3 * chunks.CHUNK :])
    assert not index.vouches(2, data[: chunks.CHUNK])


# -- what is read, and what is fetched -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.usefixtures("small_chunks")
def test_any_ranges_of_any_type_are_read_as_from_the_whole_segment(
    kind: str, rng: random.Random, tmp_path: Path
) -> None:
    plain = open_store(str(tmp_path / "store"))
    values = pa.array([some_value(TYPES[kind], rng) for _ in range(400)], TYPES[kind])
    ref = written(plain, rows_of(400, values))
    everything = read_rows(plain, SegmentCache(), Piece(ref, ref.covers))
    assert len(everything) == 400
    store = CountingStore(plain)
    for number in range(25):
        ranges = some_ranges(rng, rng.choice([1, 1, 2, 5]))
        expected = [row for row in everything if any(row[0] in span for span in ranges)]
        cold = attached(store, tmp_path / f"cache-{number}")
        assert read_rows(store, cold, Piece(ref, ranges)) == expected
        assert read_rows(store, cold, Piece(ref, ranges)) == expected, "and from the same views again"
        more = some_ranges(rng, 2)
        assert read_rows(store, cold, Piece(ref, more)) == [
            row for row in everything if any(row[0] in span for span in more)
        ]
    memory = open_store("memory://")
    ref = written(memory, rows_of(400, values))
    assert read_rows(memory, SegmentCache(), Piece(ref, ranges)) == expected


@pytest.mark.parametrize("kind", TYPES)
def test_no_more_is_fetched_than_the_range_and_a_few_chunks(kind: str, rng: random.Random, tmp_path: Path) -> None:
    plain = open_store(str(tmp_path / "store"))
    some = [some_value(TYPES[kind], rng) for _ in range(2000)]
    values = pa.array([some[i % len(some)] for i in range(200_000)], TYPES[kind])
    ref = written(plain, rows_of(200_000, values))
    store, share = CountingStore(plain), 64
    width = (LAST + 1) // share
    part = Range(17 * width, 18 * width - 1)
    cache = attached(store, tmp_path / "cache")
    [view, *more] = cache.open(store, Piece(ref, (part,)))
    assert not more
    assert len(view[0].hashes) < ref.rows / share * 2
    buffers = sum(buffer is not None for column in view[0].batch.columns for buffer in column.buffers())
    index = ref.bytes - file_size(ref.bytes)
    allowed = file_size(ref.bytes) / share * 1.2 + (2 * buffers + 4) * chunks.CHUNK + index
    assert 0 < store.read <= allowed
    assert store.read == cache.traffic.fetched
    before = store.read
    cache.open(store, Piece(ref, (part,)))
    assert store.read == before, "it is here"
    other = SegmentCache()
    other.attach(store.uri, WorkerCache(tmp_path / "cache"))
    other.open(store, Piece(ref, (part,)))
    assert store.read == before, "another process of the worker finds it, too"
    assert other.traffic.fetched == 0 < other.traffic.found
    cache.open(store, Piece(ref, (Range(part.last + 1, part.last + width),)))
    assert store.read - before <= allowed - index, "and the neighbour costs no more"


@pytest.mark.parametrize("sort_at", [1, 16])
@pytest.mark.usefixtures("small_chunks")
def test_lookups_and_timers_are_the_same_in_views_as_in_the_whole(
    sort_at: int, rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "_SORT_AT", sort_at)
    store = CountingStore(open_store(str(tmp_path / "store")))
    count = 3000
    tags = pa.array([rng.choice(["", "a", "b"]) for _ in range(count)])
    keys = KeyColumns.canonical([pa.array([rng.randrange(800) for _ in range(count)]), tags])
    hashes, subs = KeyColumns(keys.columns[:1]).hashes(), keys.subs()
    order, starts = arrange(hashes, keys, subs)
    chosen = order[starts]
    kind = pa.struct([("time", pa.int64())])
    timers = pa.array([{"time": rng.randrange(10_000)} for _ in chosen], kind)
    dead = np.array([rng.random() < 0.2 for _ in chosen])
    rows = StateRows(hashes[chosen], keys.take(chosen), timers, dead, subs[chosen])
    ref = written(store.inner, rows, timers=True)
    plain, found = SegmentCache(), 0
    plain.open(store.inner, Piece(ref, ref.covers))
    for number in range(40):
        ranges = some_ranges(rng, rng.choice([1, 2, 4]))
        piece, cold = Piece(ref, ranges), attached(store, tmp_path / f"cache-{number}")
        after, until = sorted(rng.sample(range(10_000), 2))
        mine = due_between(store, cold, [piece], kind, after, until)
        whole = due_between(store.inner, plain, [piece], kind, after, until)
        assert (mine is None) == (whole is None)
        if mine is not None and whole is not None:
            found += len(mine.hashes)
            assert mine.hashes.tolist() == whole.hashes.tolist()
            assert mine.keys.to_pylist() == whole.keys.to_pylist()
            assert mine.timers.to_pylist() == whole.timers.to_pylist()
        assert least_between(store, cold, [piece], after, until) == least_between(
            store.inner, plain, [piece], after, until
        )
        asked = (rows.hashes, rows.keys, rows.subs)
        assert (
            locate(store, cold, [piece], *asked)
            .arrow(kind)
            .equals(locate(store.inner, plain, [piece], *asked).arrow(kind))
        )
        assert cold.open(store, piece)[0][0].batch.num_rows < len(chosen), "these were views"
    assert found > 100


@pytest.mark.usefixtures("small_chunks")
def test_a_range_without_rows_has_no_rows(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    rows = rows_of(500)
    ref = written(store, rows)
    gap = int(np.argmax(np.diff(rows.hashes)))
    for empty in (
        Range(int(rows.hashes[gap]) + 1, int(rows.hashes[gap + 1]) - 1),
        Range(0, int(rows.hashes[0]) - 1),
        Range(int(rows.hashes[-1]) + 1, LAST),
    ):
        piece, cold = Piece(ref, (empty,)), attached(store, tmp_path / str(empty))
        assert read_rows(store, cold, piece) == []
        assert not locate(store, cold, [piece], rows.hashes, rows.keys).present.any()


@pytest.mark.usefixtures("small_chunks")
def test_a_segment_with_a_filter_is_found_in_by_view_and_is_merged_with_one(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    rows = rows_of(2000)
    ref = written(store, rows, filtered=True)
    half = Range(0, LAST // 3)
    [(view, _)] = attached(store, tmp_path / "cache").open(store, Piece(ref, (half,)))
    assert view.filter is None
    assert view.filtered
    found = locate(store, attached(store, tmp_path / "other"), [Piece(ref, (half,))], rows.hashes, rows.keys)
    assert found.present.tolist() == [int(point) in half for point in rows.hashes]
    [(whole, _)] = attached(store, tmp_path / "third").open(store, Piece(ref, ref.covers))
    assert whole.filter is not None


# -- what a worker keeps -------------------------------------------------------------------------------------


def test_what_a_worker_writes_is_never_fetched_and_takes_no_space(tmp_path: Path) -> None:
    store = CountingStore(open_store(str(tmp_path / "store")))
    cache = attached(store, tmp_path / "cache")
    rows = rows_of(5000)
    ref = written(store, rows, cache)
    path = store.path(ref.name)
    assert path is not None
    assert path.stat().st_nlink == 2
    assert len(read_rows(store, cache, Piece(ref, ref.covers))) == 5000
    assert read_rows(store, attached(store, tmp_path / "cache"), Piece(ref, (Range(0, LAST // 9),)))
    assert store.read == 0 == cache.traffic.fetched


def test_what_a_worker_writes_is_copied_where_it_cannot_be_linked(tmp_path: Path) -> None:
    store = CountingStore(open_store("memory://"))
    cache = attached(store, tmp_path / "cache")
    ref = written(store, rows_of(5000), cache)
    assert len(read_rows(store, cache, Piece(ref, ref.covers))) == 5000
    assert store.read == 0


def test_a_store_elsewhere_is_read_through_a_cache_in_any_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("SPARK_LOCAL_DIRS", raising=False)
    store = CountingStore(open_store("memory://"))
    store.uri = "stand-in://bucket"
    ref = written(store.inner, rows_of(5000))
    cache = SegmentCache()
    assert len(read_rows(store, cache, Piece(ref, ref.covers))) == 5000
    assert store.read == ref.bytes
    assert list((tmp_path / "millstream-cache").rglob("*.part"))


def test_segments_that_no_slot_of_the_worker_needs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_NEW_S", -1.0)
    monkeypatch.setattr(cache_module, "_NOTE_EVERY_S", 0.0)
    store = open_store(str(tmp_path / "store"))
    one, two = attached(store, tmp_path / "cache"), attached(store, tmp_path / "cache")
    refs = [written(store, rows_of(50, seed=i), one) for i in range(3)]

    def here() -> set[str]:
        return {path.name for path in (tmp_path / "cache").iterdir() if path.name.endswith(".arrow")}

    one.settle(store.uri, 0, refs[:2])
    assert here() == {names.base(ref.name) for ref in refs[:2]}
    two.settle(store.uri, 1, refs[1:2])
    assert here() == {names.base(ref.name) for ref in refs[:2]}, "slot 0 needs the other one, in another process"
    one.settle(store.uri, 0, [])
    assert here() == {names.base(refs[1].name)}
    monkeypatch.setattr(cache_module, "_NOTE_S", -1.0)  # slot 1 has not been seen for long
    one.settle(store.uri, 2, refs[2:])
    assert here() == set()


def test_the_cache_keeps_to_its_limit_and_what_is_mapped_stays_readable(tmp_path: Path) -> None:
    store = CountingStore(open_store(str(tmp_path / "store")))
    refs = [written(store.inner, rows_of(20_000, seed=i)) for i in range(6)]
    limit = 2 * refs[0].bytes + chunks.CHUNK
    cache = attached(store, tmp_path / "cache", limit)
    views = [cache.open(store, Piece(ref, ref.covers)) for ref in refs]
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").glob("*.part"))
    assert 0 < taken <= limit * 17 // 16
    for number, [(view, _)] in enumerate(views):
        assert view.hashes.tolist() == rows_of(20_000, seed=number).hashes.tolist(), "evicted, and still mapped"
    before = store.read
    assert len(read_rows(store, cache, Piece(refs[0], refs[0].covers))) == 20_000
    assert store.read > before, "what was evicted is fetched again"


def test_a_file_that_another_process_evicts_is_fetched_into_a_new_one(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    rows = rows_of(50_000)
    ref = written(store, rows)
    cache = attached(store, tmp_path / "cache")
    left, right = Range(0, LAST // 50), Range(LAST // 2, LAST // 2 + LAST // 50)
    first = read_rows(store, cache, Piece(ref, (left,)))
    for path in (tmp_path / "cache").glob("*.part"):
        path.unlink()
    assert read_rows(store, cache, Piece(ref, (left,))) == first, "it is mapped"
    both = read_rows(store, cache, Piece(ref, (left, right)))
    assert [hash_ for hash_, _ in both] == [h for h in rows.hashes.tolist() if h in left or h in right]
    assert list((tmp_path / "cache").glob("*.part")), "what is fetched now can be found by others"


# -- what may go wrong ---------------------------------------------------------------------------------------


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[tuple[CountingStore, SegmentRef, Path]]:
    """A segment that a process has fetched, and its file in the cache."""
    store = CountingStore(open_store(str(tmp_path / "store")))
    ref = written(store.inner, rows_of(20_000))
    read_rows(store, attached(store, tmp_path / "cache"), Piece(ref, ref.covers))
    [path] = (tmp_path / "cache").glob("*.part")
    return store, ref, path


@pytest.mark.parametrize(
    "damage", ["flipped bit", "flipped bit in the index", "half a chunk", "holes only", "truncated", "empty", "longer"]
)
def test_whatever_a_process_left_behind_is_checked_and_what_is_wrong_is_fetched(
    damage: str, filled: tuple[CountingStore, SegmentRef, Path]
) -> None:
    """As after a kill in the middle of a fetch, or on a disk that fails."""
    store, ref, path = filled
    data = bytearray(path.read_bytes())
    size, fetched = file_size(ref.bytes), 0
    if damage == "flipped bit":
        data[size // 2] ^= 4
    elif damage == "flipped bit in the index":
        data[-3] ^= 4
    elif damage == "half a chunk":
        data[chunks.CHUNK // 2 : chunks.CHUNK] = bytes(chunks.CHUNK // 2)
    elif damage == "holes only":
        data = bytearray(len(data))
    elif damage == "truncated":
        del data[-1:]
    elif damage == "empty":
        data.clear()
    else:
        data += b"x"
    path.write_bytes(data)
    before = store.read
    found = read_rows(store, attached(store, path.parent), Piece(ref, ref.covers))
    fetched = store.read - before
    assert [h for h, _ in found] == rows_of(20_000).hashes.tolist()
    if damage in ("flipped bit", "half a chunk"):
        assert fetched == chunks.CHUNK, "nothing but what was wrong"
    assert 0 < fetched <= ref.bytes


def test_a_link_that_is_damaged_is_given_up_and_the_object_of_the_store_is_not_touched(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    cache = attached(store, tmp_path / "cache")
    ref = written(store, rows_of(20_000), cache)
    path = store.path(ref.name)
    assert path is not None
    good = path.read_bytes()
    path.write_bytes(good[:5000] + b"?" + good[5001:])
    with pytest.raises(DamagedObject, match=ref.name):
        read_rows(store, cache, Piece(ref, ref.covers))
    assert path.read_bytes() == good[:5000] + b"?" + good[5001:]
    path.unlink()  # restored from a copy
    path.write_bytes(good)
    assert len(read_rows(store, cache, Piece(ref, ref.covers))) == 20_000


@pytest.mark.parametrize("damage", ["flip", "flip in the index", "truncate", "remove"])
def test_a_damaged_object_of_the_store_is_named(damage: str, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    ref = written(store, rows_of(20_000))
    path = store.path(ref.name)
    assert path is not None
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "flip in the index":
        data[-1] ^= 1
    else:
        del data[-100:]
    path.unlink()
    if damage != "remove":
        path.write_bytes(data)
    for cache in (SegmentCache(), attached(store, tmp_path / "cache")):
        with pytest.raises(DamagedObject, match=ref.name):
            read_rows(store, cache, Piece(ref, ref.covers))


def test_a_directory_that_is_no_directory_costs_memory_and_no_result(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    store = CountingStore(open_store(str(tmp_path / "store")))
    cache = attached(store, tmp_path / "cache" / "below", rate=1e12)
    ref = written(store, rows_of(20_000), cache)
    cache.settle(store.uri, 0, [ref])
    part = Range(0, LAST // 20)
    assert 0 < len(read_rows(store, cache, Piece(ref, (part,)))) < 2000
    assert store.read < ref.bytes
    assert len(read_rows(store, cache, Piece(ref, ref.covers))) == 20_000


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_disk_costs_memory_and_no_result(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path / "small")], check=True)
    try:
        store = CountingStore(open_store(str(tmp_path / "store")))
        cache = attached(store, tmp_path / "small" / "cache")
        refs = [written(store, rows_of(40_000, seed=i), cache) for i in range(2)]
        for seed, ref in enumerate(refs):
            found = read_rows(store, cache, Piece(ref, ref.covers))
            assert [h for h, _ in found] == rows_of(40_000, seed=seed).hashes.tolist()
            cache.settle(store.uri, 0, [ref])
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "small")], check=True)


def _reader(store_path: str, directory: str, ref: SegmentRef, seed: int, answers: Any) -> None:
    store, rng = open_store(store_path, make=False), random.Random(seed)
    expected = rows_of(30_000).hashes.tolist()
    for _ in range(30):
        cache = attached(store, Path(directory))
        ranges = some_ranges(rng, 3)
        found = [h for h, _ in read_rows(store, cache, Piece(ref, ranges))]
        if found != [h for h in expected if any(h in span for span in ranges)]:
            answers.put(f"seed {seed}: {ranges}")
            return
        if rng.random() < 0.2:
            for path in Path(directory).glob("*.part"):
                path.unlink(missing_ok=True)
    answers.put("")


def test_processes_share_a_cache_and_may_evict_what_others_read(tmp_path: Path, seed: int) -> None:
    store = open_store(str(tmp_path / "store"))
    ref = written(store, rows_of(30_000))
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    readers = [
        context.Process(target=_reader, args=(str(tmp_path / "store"), str(tmp_path / "cache"), ref, seed + i, answers))
        for i in range(3)
    ]
    for reader in readers:
        reader.start()
    assert [answers.get(timeout=120) for _ in readers] == [""] * 3
    for reader in readers:
        reader.join()


# -- the limit on fetching -----------------------------------------------------------------------------------


def test_fetches_share_the_rate_whoever_makes_them(tmp_path: Path) -> None:
    now, slept = [1000.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    one, two = (Limiter(tmp_path / "pace", 1000, lambda: now[0], sleep) for _ in range(2))
    assert one.reserve(2000) == 1002.0
    assert two.reserve(500) == 1002.5, "after the first one"
    assert one.wait(1002.0) == 2.0
    assert two.wait(1002.5) == 0.5
    assert now == [1002.5]
    assert slept == [2.0, 0.5]
    now[0] = 2000.0
    assert one.reserve(1000) == 2001.0, "what was not used is not saved up"
    now[0] = 2005.0
    assert one.wait(2001.0) == 0.0, "it took longer by itself"
    (tmp_path / "pace").write_bytes(b"??")
    assert two.reserve(1000) == 2006.0


def test_only_what_is_fetched_is_paid_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(Limiter, "reserve", lambda self, count: reserved.append(count) or 0.0)
    store = CountingStore(open_store(str(tmp_path / "store")))
    here = attached(store, tmp_path / "here", rate=1.0)
    ref = written(store, rows_of(20_000), here)
    read_rows(store, here, Piece(ref, ref.covers))
    assert reserved == []
    there = attached(store, tmp_path / "there", rate=1.0)
    read_rows(store, there, Piece(ref, (Range(0, LAST // 100),)))
    assert sum(reserved) == store.read == there.traffic.fetched > 0
    assert there.traffic.chunks <= store.read // 16


# -- where caches are ----------------------------------------------------------------------------------------


def test_caches_of_processes_that_are_gone_are_removed_by_the_next_one(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    owner = cache_module.identity(ended.pid)
    ended.wait()
    root, other = (tmp_path / "millstream-cache" / store for store in ("some-store", "another"))
    (other / owner).mkdir(parents=True)
    for name in (owner, "elsewhere+1+1", "not ours"):
        (root / name).mkdir(parents=True)
        (root / name / "file").write_text("x")
    settings_ = CacheSettings(str(tmp_path))
    mine = open_cache(settings_, "some-store", os.getpid())
    assert {path.name for path in root.iterdir()} == {mine.directory.name, "elsewhere+1+1", "not ours"}
    assert list(other.iterdir()) == [], "those of other stores, too"
    os.utime(other, (0, 0))
    again = open_cache(settings_, "some-store", os.getpid())
    assert again.directory == mine.directory
    assert mine.directory.is_dir()
    assert not other.exists()


def test_the_directory_is_that_of_spark_unless_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path}/one,{tmp_path}/two")
    assert str(open_cache(CacheSettings(), "id").directory).startswith(f"{tmp_path}/one/millstream-cache/id/")
    assert str(open_cache(CacheSettings(f"{tmp_path}/mine"), "id").directory).startswith(f"{tmp_path}/mine/")


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_clipping_a_piece_to_its_views_loses_no_range(seed: int) -> None:
    rng = random.Random(seed)
    hashes = rows_of(1000, seed=seed % 7).hashes
    index = Index(1000, [0] * 50, hashes[np.arange(50) * 1000 // 50])
    ranges = some_ranges(rng, 4)
    found = [span for window in index.windows(ranges) for span in window.ranges]
    for span in ranges:
        rows = [point for point in hashes.tolist() if point in span]
        assert span in found or not rows
    assert clip(tuple(found), ranges) == tuple(found)


def test_the_cache_keeps_to_its_limit_where_what_is_written_is_copied(tmp_path: Path) -> None:
    """A store that is no directory of this file system: nothing is ever fetched, and still there is an end to it."""
    store = CountingStore(open_store("memory://"))
    first = written(store.inner, rows_of(20_000, seed=99))
    limit = 2 * first.bytes + chunks.CHUNK
    cache = attached(store, tmp_path / "cache", limit)
    refs = [written(store, rows_of(20_000, seed=i), cache) for i in range(8)]
    taken = sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").glob("*.arrow"))
    assert 0 < taken <= limit * 17 // 16
    for number, ref in enumerate(refs):
        assert len(read_rows(store, cache, Piece(ref, ref.covers))) == 20_000, number
