"""Keys, lookup and merge against a dictionary: whatever the keys, also when two of them share a hash."""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.engine.state import parts_of
from millstream.protocol import keyspace
from millstream.protocol.compaction import choose
from millstream.protocol.keyspace import LAST, WHOLE, Range
from millstream.protocol.manifest import Family, Manifest
from millstream.store import keys as keys_module
from millstream.store.keys import KeyColumns, arrange
from millstream.store.lookup import locate
from millstream.store.merge import merge, newest_rows
from millstream.store.names import Maker
from millstream.store.objects import open_store
from millstream.store.rows import StateRows
from millstream.store.segments import SegmentCache, write_segments

FAMILY = Family("step", "state")
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "boolean": (pa.bool_(), st.booleans()),
    "byte": (pa.int8(), st.integers(-128, 127)),
    "short": (pa.int16(), st.integers(-3, 3)),
    "int": (pa.int32(), st.integers(-5, 5)),
    "long": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float32(), st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf, -math.inf])),
    "double": (pa.float64(), st.sampled_from([0.0, -0.0, 1e-300, math.nan, math.inf])),
    "decimal": (pa.decimal128(20, 2), st.decimals(-9, 9, places=2)),
    "string": (pa.string(), st.text(max_size=12)),
    "binary": (pa.binary(), st.binary(max_size=12)),
    "date": (pa.date32(), st.dates(dt.date(1960, 1, 1), dt.date(2040, 1, 1))),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        st.datetimes(timezones=st.just(dt.UTC), min_value=dt.datetime(1950, 1, 1)),
    ),
    "timestamp_ntz": (pa.timestamp("us"), st.datetimes(min_value=dt.datetime(1950, 1, 1))),
    "duration": (pa.duration("us"), st.timedeltas(dt.timedelta(-3), dt.timedelta(3))),
}


def identity(value: Any) -> Any:
    """Spark's equality in Python: NaN is NaN, -0.0 is 0.0."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_grouping_is_that_of_spark_for_every_scalar_type(kind: str) -> None:
    arrow, values = KINDS[kind]

    @given(st.lists(st.none() | values, max_size=40))
    @settings(max_examples=60)
    def check(column: list[Any]) -> None:
        keys = KeyColumns.canonical([pa.array(column, arrow)])
        order, starts = arrange(keys.hashes(), keys)
        groups = [sorted(part.tolist()) for part in np.split(order, starts[1:])] if column else []
        expected: dict[Any, list[int]] = {}
        for row, value in enumerate(column):
            expected.setdefault(identity(value), []).append(row)
        assert sorted(groups) == sorted(expected.values())
        for part in np.split(order, starts[1:]):
            assert part.tolist() == sorted(part.tolist()), "rows of a key keep their order"

    check()


def test_integers_hash_by_value_whatever_their_width() -> None:
    hashes = [KeyColumns((pa.array([-7], t),)).hashes()[0] for t in (pa.int8(), pa.int16(), pa.int32(), pa.int64())]
    assert len(set(hashes)) == 1


def test_slices_hash_as_what_they_show() -> None:
    column = pa.array(["a", None, "bb", "ccc", "", "bb"])
    whole = KeyColumns((column,)).hashes()
    assert (KeyColumns((column[2:5],)).hashes() == whole[2:5]).all()
    numbers = pa.array([Decimal("1.10"), None, Decimal("-2.00")], pa.decimal128(10, 2))
    assert (KeyColumns((numbers[1:],)).hashes() == KeyColumns((numbers,)).hashes()[1:]).all()


def unmix(x: int) -> int:
    """The inverse of the mix, so that collisions can be made."""
    mask = LAST
    x = x ^ (x >> 31) ^ (x >> 62)
    x = (x * pow(0x94D049BB133111EB, -1, 1 << 64)) & mask
    x = x ^ (x >> 27) ^ (x >> 54)
    x = (x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & mask
    return x ^ (x >> 30) ^ (x >> 60)


def signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def colliding_pair() -> tuple[tuple[int, int], tuple[int, int]]:
    """Two different pairs of longs with one hash."""
    h = lambda v: int(keyspace.hash_integers(np.array([v], np.int64))[0])  # noqa: E731
    factor = 0xA0761D6478BD642F

    def first(a: int) -> int:
        return int(keyspace.mix(np.array([(2 * factor + h(a)) & LAST], np.uint64))[0])

    wanted = (first(1) * factor + h(2)) & LAST
    needed = (wanted - first(77) * factor) & LAST
    return (1, 2), (77, signed((unmix(needed) - 0x9E3779B97F4A7C15) & LAST))


def test_two_keys_with_one_hash_have_their_own_state() -> None:
    one, two = colliding_pair()
    store, cache = open_store("memory://"), SegmentCache()
    keys = KeyColumns((pa.array([one[0], two[0]]), pa.array([one[1], two[1]])))
    hashes = keys.hashes()
    assert hashes[0] == hashes[1]
    order, starts = arrange(hashes, keys)
    assert len(starts) == 2
    keys, hashes = keys.take(order), hashes[order]
    manifest = Manifest().added(
        write_segments(
            store, cache, FAMILY, Maker(1, 0, "a", 0), 0, 0, (WHOLE,), alive(hashes, keys, pa.array([10, 20]))
        )
    )
    pieces = manifest.pieces(FAMILY)
    expected = {tuple(key): 10 * (i + 1) for i, key in enumerate(keys.to_pylist())}
    for key in (one, two):
        asked = KeyColumns((pa.array([key[0]]), pa.array([key[1]])))
        assert locate(store, cache, pieces, asked.hashes(), asked).numbers(0, np.int64)[0] == expected[key]
    both = locate(store, cache, pieces, hashes, keys)
    assert both.numbers(0, np.int64).tolist() == [10, 20]


def test_null_and_the_integer_that_shares_its_hash_are_two_keys() -> None:
    twin = signed((0xE7037ED1A0B428DB - 0x9E3779B97F4A7C15) & LAST)
    keys = KeyColumns((pa.array([twin, None, twin, None]),))
    assert len(set(keys.hashes().tolist())) == 1
    order, starts = arrange(keys.hashes(), keys)
    assert len(starts) == 2
    assert sorted(part.tolist() for part in np.split(order, starts[1:])) == [[0, 2], [1, 3]]


def alive(hashes: Any, keys: KeyColumns, values: pa.Array) -> StateRows:
    return StateRows(hashes, keys, values, np.zeros(len(hashes), np.bool_))


small_keys = st.sampled_from(["a", "b", "c", "dd", "ee", "", None, "f", "g", "h"])
updates = st.lists(st.dictionaries(small_keys, st.none() | st.integers(0, 99), min_size=1), min_size=1, max_size=14)


@given(updates, st.booleans(), st.integers(1, 4000))
@settings(max_examples=80)
def test_any_history_of_writes_deletes_and_merges_reads_as_a_dictionary(
    history: list[dict[Any, int | None]], weak_hash: bool, budget: int
) -> None:
    """None as a value is a deletion. With the weak hash, all keys share three hashes."""
    original = keys_module.KeyColumns.hashes

    def weak(self: KeyColumns) -> Any:
        return (original(self) % np.uint64(3)) << np.uint64(60)

    store, cache, manifest, model = open_store("memory://"), SegmentCache(), Manifest(), {}
    with pytest.MonkeyPatch.context() as patch:
        if weak_hash:
            patch.setattr(keys_module.KeyColumns, "hashes", weak)
        for epoch, changes in enumerate(history):
            keys = KeyColumns((pa.array(list(changes), pa.string()),))
            hashes = keys.hashes()
            order, _ = arrange(hashes, keys)
            values = [list(changes.values())[i] for i in order]
            dead = np.array([value is None for value in values])
            refs = write_segments(
                store, cache, FAMILY, Maker(1, epoch, "a", 0), 0, epoch, (WHOLE,),
                StateRows(hashes[order], keys.take(order), pa.array([v or 0 for v in values], pa.int64()), dead),
            )  # fmt: skip
            manifest = manifest.added(refs)
            for key, value in changes.items():
                model.pop(key, None)
                if value is not None:
                    model[key] = value
            job = choose(FAMILY, manifest.pieces(FAMILY), budget=budget, fan_in=2)
            if job is not None:
                manifest, _ = manifest.edited([merge(store, cache, job, Maker(1, epoch, "c", epoch), 0)])
            everything = {}
            for span, pieces in parts_of(manifest.pieces(FAMILY)):
                rows = newest_rows(store, cache, pieces, [span], drop_dead=True)
                everything.update(zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True))
            assert everything == model
            asked = KeyColumns((pa.array(["a", "b", "c", "dd", "ee", "", None, "f", "g", "h", "never"]),))
            order, _ = arrange(asked.hashes(), asked)
            asked = asked.take(order)
            found = locate(store, cache, manifest.pieces(FAMILY), asked.hashes(), asked)
            read = dict(zip(asked.to_pylist(), found.arrow(pa.int64()).to_pylist(), strict=True))
            assert {key: value for key, value in read.items() if value is not None} == model
            assert found.present.tolist() == [key in model for key in asked.to_pylist()]


def write_epoch(store: Any, manifest: Manifest, epoch: int, rows: int, rng: np.random.Generator) -> Manifest:
    keys = KeyColumns((pa.array(np.unique(rng.integers(0, 20_000, rows))),))
    hashes = keys.hashes()
    order, _ = arrange(hashes, keys)
    return manifest.added(
        write_segments(
            store, SegmentCache(), FAMILY, Maker(1, epoch, "a", 0), 0, epoch, (WHOLE,),
            alive(hashes[order], keys.take(order), pa.array(np.full(len(keys), epoch))),
        )
    )  # fmt: skip


def test_compaction_keeps_the_stack_low_and_every_job_within_its_budget(seed: int) -> None:
    rng = np.random.default_rng(seed)
    store, cache, manifest = open_store("memory://"), SegmentCache(), Manifest()
    budget, heights, read = 200_000, [], 0
    for epoch in range(120):
        manifest = write_epoch(store, manifest, epoch, 500, rng)
        job = choose(FAMILY, manifest.pieces(FAMILY), budget=budget)
        if job is not None:
            assert job.bytes <= budget * 1.01
            read += job.bytes
            manifest, _ = manifest.edited([merge(store, cache, job, Maker(1, epoch, "c", epoch), 0)])
        points = rng.integers(0, LAST, 50, dtype=np.uint64)
        heights.append(
            max(len([p for p in manifest.pieces(FAMILY) if any(int(x) in r for r in p.ranges)]) for x in points)
        )
    assert max(heights) <= 24, f"seed {seed}"
    assert sum(len(p) for p in manifest.families.values()) <= 60


def test_a_tombstone_outlives_a_merge_that_does_not_reach_the_bottom() -> None:
    store, cache = open_store("memory://"), SegmentCache()
    keys = KeyColumns((pa.array([1]),))
    manifest = Manifest()
    for epoch, dead in ((0, False), (1, True), (2, True)):
        manifest = manifest.added(
            write_segments(
                store, cache, FAMILY, Maker(1, epoch, "a", 0), 0, epoch, (WHOLE,),
                StateRows(keys.hashes(), keys, pa.array([epoch]), np.array([dead])),
            )
        )  # fmt: skip
    from millstream.protocol.compaction import Job

    pieces = manifest.pieces(FAMILY)
    upper = merge(store, cache, Job(FAMILY, (WHOLE,), tuple(pieces[:2]), bottom=False), Maker(1, 2, "c", 0), 0)
    manifest, dropped = manifest.edited([upper])
    assert len(dropped) == 2
    assert upper.outputs[0].tombstones == 1
    assert not locate(store, cache, manifest.pieces(FAMILY), keys.hashes(), keys).present.any()
    whole = merge(
        store, cache, Job(FAMILY, (WHOLE,), tuple(manifest.pieces(FAMILY)), bottom=True), Maker(1, 2, "c", 1), 0
    )
    assert whole.outputs == ()
    manifest, _ = manifest.edited([whole])
    assert manifest.families[FAMILY] == {}


def test_an_edit_whose_inputs_changed_is_not_admitted() -> None:
    rng = np.random.default_rng(1)
    store, cache, manifest = open_store("memory://"), SegmentCache(), Manifest()
    for epoch in range(4):
        manifest = write_epoch(store, manifest, epoch, 100, rng)
    job = choose(FAMILY, manifest.pieces(FAMILY))
    assert job is not None
    edit = merge(store, cache, job, Maker(1, 4, "c", 0), 0)
    assert manifest.admits(edit)
    after, _ = manifest.edited([edit])
    assert not after.admits(edit)


def test_a_large_write_becomes_several_segments_of_consecutive_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    from millstream.store import segments

    monkeypatch.setattr(segments, "MAX_SEGMENT_BYTES", 4000)
    store, manifest = open_store("memory://"), Manifest()
    manifest = write_epoch(store, manifest, 0, 1000, np.random.default_rng(2))
    pieces = sorted(manifest.pieces(FAMILY), key=lambda p: p.ranges[0].first)
    assert len(pieces) > 3
    assert keyspace.coalesce([r for p in pieces for r in p.ranges]) == (WHOLE,)
    for piece in pieces:
        assert piece.segment.bytes < 8000
    rows = newest_rows(store, SegmentCache(), manifest.pieces(FAMILY), [Range(0, LAST)], drop_dead=True)
    assert len(rows.hashes) == sum(p.segment.rows for p in pieces)


@pytest.mark.parametrize("spread", ["even", "upper halves equal", "few values"])
def test_many_hashes_are_sorted_stably_whatever_their_upper_halves(spread: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    hashes = rng.integers(0, LAST, 40_000, dtype=np.uint64, endpoint=True)
    if spread == "upper halves equal":
        hashes = (hashes & np.uint64(0xFFFF)) | (hashes & np.uint64(0x7 << 61))
    elif spread == "few values":
        hashes = rng.choice(hashes[:20], len(hashes))
    order, ordered = keys_module._sorted(hashes)
    assert (order == np.argsort(hashes, kind="stable")).all()
    assert (ordered == hashes[order]).all()


@pytest.mark.parametrize("runs", [1, 2, 5, 15, 16, 17, 40])
def test_hashes_in_runs_and_in_no_order_are_arranged_alike(runs: int) -> None:
    draws = np.random.default_rng(runs)
    parts = [np.sort(draws.integers(0, 50_000, 60_000 // runs)) for _ in range(runs)]
    keys = np.concatenate(parts).astype(np.int64)
    hashes = keys.astype(np.uint64) << np.uint64(20)
    for chosen in (np.arange(len(keys)), draws.permutation(len(keys))):
        order, starts = arrange(hashes[chosen], KeyColumns.canonical([pa.array(keys[chosen])]))
        assert (order == np.argsort(keys[chosen], kind="stable")).all()
        assert len(starts) == len(np.unique(keys))
