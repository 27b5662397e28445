"""What others have brought to a worker is checked before a slot needs it: nothing is fetched for that, nothing is
relied on that is not right, and what is not there is left to whoever needs it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pyarrow as pa
import pytest
from test_cache import CountingStore, attached, read_rows, small_chunks, some_ranges, written
from test_touched import some_rows

from millstream.protocol.keyspace import LAST, Range
from millstream.protocol.manifest import Piece
from millstream.store import chunks, names
from millstream.store import segments as segments_module
from millstream.store.cache import WorkerCache
from millstream.store.held import Fetcher, Traffic
from millstream.store.objects import open_store
from millstream.store.segments import SegmentCache, bring

__all__ = ["small_chunks"]
pytestmark = pytest.mark.usefixtures("small_chunks")


class Scene:
    """A segment of the store, and a worker whose agent has brought some ranges of it."""

    def __init__(self, folder: Path, rng: random.Random, ranges: tuple[Range, ...]) -> None:
        self.store = CountingStore(open_store(str(folder / "store")))
        self.ref = written(self.store.inner, some_rows(rng, 3000, pa.string(), text=True, subkeys=False))
        self.piece, self.folder = Piece(self.ref, ranges), folder / "cache"
        self.cache = attached(self.store, self.folder)
        traffic = Traffic()
        bring(WorkerCache(self.folder), self.piece, Fetcher(self.store.inner, None, traffic), traffic)

    def check_ahead(self, pieces: list[Piece] | None = None, seconds: float = 60.0) -> int:
        self.cache.settle(self.store.uri, 0, [], pieces or [self.piece])
        return self.cache.check_ahead(self.store, pieces or [self.piece], time.perf_counter() + seconds)

    @property
    def path(self) -> Path:
        return self.folder / f"{names.base(self.ref.name)}.part"


def halves(rng: random.Random) -> tuple[Range, ...]:
    return some_ranges(rng, 2)


def whole(_: random.Random) -> tuple[Range, ...]:
    return (Range(0, LAST),)


@pytest.mark.parametrize("ranges_of", [halves, whole])
def test_what_was_checked_ahead_is_not_read_again_when_it_is_needed(
    ranges_of: object, rng: random.Random, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, rng, ranges_of(rng))  # type: ignore[operator]
    assert scene.check_ahead() == 0
    ahead = scene.cache.traffic.ahead
    assert ahead > 0
    scene.check_ahead()
    assert scene.cache.traffic.ahead == ahead, "once"
    found = read_rows(scene.store, scene.cache, scene.piece)
    assert found == read_rows(scene.store.inner, SegmentCache(), scene.piece)
    assert found, "there are rows in these ranges"
    assert (scene.cache.traffic.found, scene.cache.traffic.fetched) == (0, 0)


def test_it_goes_on_where_it_stopped_and_stops_when_its_time_is_over(rng: random.Random, tmp_path: Path) -> None:
    scene = Scene(tmp_path, rng, whole(rng))
    assert scene.check_ahead(seconds=-1) == scene.piece.bytes
    assert scene.cache.traffic.ahead == 0
    counts = []
    while not counts or (len(counts) < 1000 and counts[-1] < chunks.file_size(scene.ref.bytes)):
        scene.check_ahead(seconds=0.001)
        counts.append(scene.cache.traffic.ahead + scene.cache.traffic.found)
    assert counts == sorted(counts)
    assert scene.cache._open[(scene.store.uri, scene.ref.name)].whole is not None


def test_what_is_not_here_is_not_fetched_for_this(rng: random.Random, tmp_path: Path) -> None:
    first, second, third, fourth = (Range(LAST // 4 * at, LAST // 4 * (at + 1) - 1) for at in range(4))
    scene = Scene(tmp_path, rng, (first, third))
    scene.check_ahead([Piece(scene.ref, (second, fourth))])
    other = written(scene.store.inner, some_rows(rng, 500, pa.int64(), text=False, subkeys=False))
    scene.check_ahead([Piece(other, other.covers)])
    assert scene.cache.traffic.fetched == 0
    assert not (scene.folder / f"{names.base(other.name)}.part").exists()
    for ranges in ((second, fourth), (first, third)):
        piece = Piece(scene.ref, ranges)
        assert read_rows(scene.store, scene.cache, piece) == read_rows(scene.store.inner, SegmentCache(), piece)


def test_what_was_not_here_is_not_looked_for_again_at_once(rng: random.Random, tmp_path: Path) -> None:
    scene = Scene(tmp_path, rng, whole(rng))
    data, size = scene.path.read_bytes(), chunks.file_size(scene.ref.bytes)
    holed = bytearray(data)
    holed[size // 2 : size // 2 + 2 * chunks.CHUNK] = bytes(2 * chunks.CHUNK)
    scene.path.write_bytes(holed)
    scene.check_ahead()
    before = scene.cache.traffic.ahead
    assert 0 < before < size
    scene.path.write_bytes(data)
    scene.check_ahead()
    assert scene.cache.traffic.ahead == before
    scene.cache._open[(scene.store.uri, scene.ref.name)]._not_before = 0.0
    scene.check_ahead()
    assert scene.cache._open[(scene.store.uri, scene.ref.name)].whole is not None


def test_a_slot_s_own_state_is_checked_where_there_is_no_cache_too(rng: random.Random, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    rows = some_rows(rng, 3000, pa.int64(), text=False, subkeys=False)
    ref = written(store, rows)
    piece, cache = Piece(ref, ref.covers), SegmentCache()
    assert cache.check_ahead(store, [piece], time.perf_counter() + 60) == piece.bytes, "nobody has read from it yet"
    cache._opened(store, ref, in_memory=False)
    assert cache.check_ahead(store, [piece], time.perf_counter() + 60) == 0
    assert cache._open[(store.uri, ref.name)].whole is not None


@pytest.mark.parametrize("damage", ["a bit", "evicted", "cut", "before"])
def test_what_is_damaged_or_gone_is_left_to_whoever_needs_it(damage: str, rng: random.Random, tmp_path: Path) -> None:
    scene = Scene(tmp_path, rng, whole(rng))
    if damage == "before":
        scene.check_ahead(seconds=0.0005)
    if damage in ("a bit", "before"):
        data = bytearray(scene.path.read_bytes())
        for at in rng.sample(range(chunks.file_size(scene.ref.bytes) // 2, chunks.file_size(scene.ref.bytes)), 3):
            data[at] ^= 1
        scene.path.unlink()
        scene.path.write_bytes(data)
    elif damage == "evicted":
        scene.path.unlink()
    else:
        scene.path.unlink()
        scene.path.write_bytes(b"too short")
    scene.check_ahead()
    found = read_rows(scene.store, scene.cache, scene.piece)
    assert found == read_rows(scene.store.inner, SegmentCache(), scene.piece)


def test_no_more_is_checked_ahead_than_may_stay_in_memory(
    rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, rng, whole(rng))
    monkeypatch.setattr(segments_module, "AHEAD_MOST", scene.piece.bytes - 1)
    scene.check_ahead()
    assert scene.cache.traffic.ahead == 0
    monkeypatch.setattr(segments_module, "AHEAD_MOST", scene.piece.bytes)
    scene.check_ahead()
    assert scene.cache.traffic.ahead > 0


def test_what_may_soon_be_needed_stays_open_and_goes_when_it_is_not_any_more(
    rng: random.Random, tmp_path: Path
) -> None:
    scene = Scene(tmp_path, rng, whole(rng))
    scene.check_ahead()
    scene.cache.settle(scene.store.uri, 0, [], [scene.piece])
    assert scene.cache._open
    scene.cache.settle(scene.store.uri, 0, [], [])
    assert not scene.cache._open
