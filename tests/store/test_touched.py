"""Lookups in large segments: what they touch is checked, nothing else is read, and the answers are the same."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_cache import TYPES, CountingStore, attached, small_chunks, some_value, written

from millstream.errors import DamagedObject
from millstream.protocol.keyspace import Hashes
from millstream.protocol.manifest import Piece, SegmentRef
from millstream.store import chunks, names
from millstream.store import segments as segments_module
from millstream.store.keys import KeyColumns, Rows, arrange
from millstream.store.lookup import entries_of, locate
from millstream.store.objects import ObjectStore, open_store
from millstream.store.rows import StateRows
from millstream.store.segments import SegmentCache

__all__ = ["small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks", "all_large")


@pytest.fixture
def all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "LOOK_FROM", 0)


def some_rows(rng: random.Random, count: int, kind: pa.DataType, text: bool, subkeys: bool) -> StateRows:
    """State of random keys, with tombstones; every third key is not there."""
    numbers = [rng.randrange(3 * count) // 3 * 3 for _ in range(count)]
    columns: list[pa.Array] = [pa.array([f"key {number}" for number in numbers] if text else numbers)]
    if subkeys:
        columns.append(pa.array([rng.choice(["", "a", "b", "c"]) for _ in range(count)]))
    keys = KeyColumns.canonical(columns)
    hashes, subs = KeyColumns(keys.columns[:1]).hashes(), keys.subs() if subkeys else None
    order, starts = arrange(hashes, keys, subs)
    chosen = order[starts]
    values = pa.array([some_value(kind, rng) for _ in chosen], kind)
    dead = np.array([rng.random() < 0.1 for _ in chosen])
    return StateRows(hashes[chosen], keys.take(chosen), values, dead, None if subs is None else subs[chosen])


def some_keys(rng: random.Random, rows: StateRows, many: int) -> tuple[Hashes, KeyColumns, Hashes | None]:
    """Some of the keys, in order, and a few that are not there."""
    at: Rows = np.array(sorted(rng.sample(range(len(rows.hashes)), many)))
    hashes = rows.hashes[at]
    hashes[::7] += np.uint64(1)
    return hashes, rows.keys.take(at), None if rows.subs is None else rows.subs[at]


def checked(cache: SegmentCache, store: ObjectStore, ref: SegmentRef) -> list[int]:
    return np.flatnonzero(cache._open[(store.uri, ref.name)].held._sound).tolist()


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("text", [False, True])
def test_looked_up_keys_are_those_of_the_whole_segment(kind: str, text: bool, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{seed} {kind} {text}")
    store = open_store(str(tmp_path / "store"))
    for subkeys in (False, True):
        rows = some_rows(rng, 2000, TYPES[kind], text, subkeys)
        ref = written(store, rows)
        piece, whole = Piece(ref, ref.covers), SegmentCache()
        whole.open(store, piece)
        partly = 0
        for _ in range(12):
            cache = SegmentCache()
            hashes, keys, subs = some_keys(rng, rows, rng.choice([1, 3, 40]))
            mine, theirs = (locate(store, each, [piece], hashes, keys, subs) for each in (cache, whole))
            assert mine.arrow(TYPES[kind]).equals(theirs.arrow(TYPES[kind]))
            partly += len(checked(cache, store, ref)) < len(cache._open[(store.uri, ref.name)].held.index.digests)
            if subkeys:
                kinds = (pa.string(), TYPES[kind])
                one, other = (
                    entries_of(store, each, [piece], hashes, KeyColumns(keys.columns[:1]), kinds)
                    for each in (SegmentCache(), whole)
                )
                assert one.places.tolist() == other.places.tolist()
                assert one.values.equals(other.values)
                assert one.subkeys.equals(other.subkeys)
        flat = not pa.types.is_nested(TYPES[kind]) and not pa.types.is_null(TYPES[kind])
        assert (partly > 0) is flat, "of others, all is checked"


@pytest.mark.parametrize("text", [False, True])
def test_nothing_is_read_but_what_was_checked(text: bool, rng: random.Random, tmp_path: Path) -> None:
    store = CountingStore(open_store(str(tmp_path / "store")))
    rows = some_rows(rng, 3000, pa.string(), text, subkeys=True)
    ref = written(store.inner, rows)
    piece, data = Piece(ref, ref.covers), bytes(store.inner.get(ref.name) or b"")
    for number in range(20):
        hashes, keys, subs = some_keys(rng, rows, rng.choice([1, 5, 20]))
        first = SegmentCache()
        expected = locate(store.inner, first, [piece], hashes, keys, subs).arrow(pa.string())
        right = set(checked(first, store.inner, ref))
        folder = tmp_path / f"cache-{number}"
        cache = attached(store, folder)
        size = chunks.file_size(len(data))
        others = bytearray(rng.randbytes(size)) + data[size:]
        for chunk in right:
            span = slice(chunk * chunks.CHUNK, min((chunk + 1) * chunks.CHUNK, size))
            others[span] = data[span]
        (folder / f"{names.base(ref.name)}.part").write_bytes(others)
        assert locate(store, cache, [piece], hashes, keys, subs).arrow(pa.string()).equals(expected)
        assert cache.traffic.fetched == 0, "all that it needs was there"


def test_what_is_wrong_is_fetched_and_where_there_is_nobody_to_ask_it_is_named(
    rng: random.Random, tmp_path: Path
) -> None:
    store = CountingStore(open_store(str(tmp_path / "store")))
    rows = some_rows(rng, 3000, pa.int64(), text=False, subkeys=False)
    ref = written(store.inner, rows)
    piece, data = Piece(ref, ref.covers), bytes(store.inner.get(ref.name) or b"")
    hashes, keys, _ = some_keys(rng, rows, 20)
    first = SegmentCache()
    expected = locate(store.inner, first, [piece], hashes, keys).arrow(pa.int64())
    wrong = rng.choice(checked(first, store.inner, ref))
    spoilt = bytearray(data)
    spoilt[wrong * chunks.CHUNK] ^= 1
    cache = attached(store, tmp_path / "cache")
    (tmp_path / "cache" / f"{names.base(ref.name)}.part").write_bytes(spoilt)
    assert locate(store, cache, [piece], hashes, keys).arrow(pa.int64()).equals(expected)
    assert 0 < cache.traffic.fetched <= 2 * chunks.CHUNK
    path = store.inner.path(ref.name)
    assert path is not None
    path.write_bytes(spoilt)
    with pytest.raises(DamagedObject):
        locate(store.inner, SegmentCache(), [piece], hashes, keys)
