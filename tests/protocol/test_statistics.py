"""Loads: counted exactly, shared out without a rest, packed small; and means that follow what goes on, not chance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import UserError
from millstream.errors import InvariantViolation
from millstream.protocol.keyspace import Hashes
from millstream.protocol.statistics import (
    HISTORY_BITS,
    MAX_BITS,
    Floats,
    Load,
    Loads,
    cells_of,
    cells_of_sorted,
    shared_out,
    together,
    within,
)
from millstream.protocol.strategies import Numbers

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=50).map(lambda found: np.array(found, np.uint64))
BITS = st.integers(0, MAX_BITS)


@st.composite
def load(draw: st.DrawFn, bits: st.SearchStrategy[int] = BITS, most: int = 2**40) -> Load:
    """Any load: some cells, often neighbours, with any numbers."""
    size = 1 << draw(bits)
    rows = np.zeros((3, size), np.int64)
    for _ in range(draw(st.integers(0, 5))):
        first = draw(st.integers(0, size - 1))
        last = min(size, first + draw(st.integers(1, 4)))
        for row in rows:
            row[first:last] = draw(st.integers(0, most))
    return Load.of(rows[0], rows[1], rows[2])


# -- counting ---------------------------------------------------------------------------------------------------------


@given(HASHES, BITS)
def test_every_hash_is_counted_in_its_cell(hashes: Hashes, bits: int) -> None:
    expected = [0] * (1 << bits)
    for value in hashes.tolist():
        expected[value >> (64 - bits)] += 1
    assert cells_of(hashes, bits).tolist() == expected
    assert cells_of_sorted(np.sort(hashes), bits).tolist() == expected
    assert cells_of(hashes, bits, np.full(len(hashes), 3)).tolist() == [3 * count for count in expected]


@given(st.integers(0, 2**50), st.lists(st.integers(0, 2**30), min_size=1, max_size=30))
def test_what_is_shared_out_adds_up_and_goes_with_records(total: int, by: list[int]) -> None:
    parts = shared_out(total, np.array(by))
    assert parts.sum() == (total if any(by) else 0)
    assert (parts >= 0).all()
    for part, share in zip(parts.tolist(), by, strict=True):
        assert share or not part, "a cell without records has nothing"
        if any(by):
            assert abs(part - total * share / sum(by)) <= 1 + total * 1e-9


def test_a_load_needs_a_power_of_two_of_cells() -> None:
    with pytest.raises(UserError, match="3 cells: expected a power of two, up to 4096"):
        Load.of(np.array([1, 2, 3]))


# -- adding and packing -----------------------------------------------------------------------------------------------


@given(st.lists(load(), max_size=4))
def test_loads_add_up_in_any_order(parts: list[Load]) -> None:
    whole = together(parts)
    assert whole == together(parts[::-1])
    for column in ("records", "bytes", "micros"):
        assert getattr(whole, column).sum() == sum(getattr(part, column).sum() for part in parts)
    if len(parts) > 1:
        assert whole == together([parts[0], together(parts[1:])])


@given(load(), BITS)
def test_fewer_cells_lose_nothing_but_where_it_was(found: Load, bits: int) -> None:
    coarse = found.coarser(bits)
    assert coarse.bits == min(bits, found.bits)
    assert (coarse.columns.sum(axis=1) == found.columns.sum(axis=1)).all()


@given(load(most=2**62))
def test_what_is_packed_is_unpacked(found: Load) -> None:
    again = Load.unpack(found.pack())
    assert again == found
    assert again.cells.tolist() == found.cells.tolist()


@given(st.binary(max_size=60))
def test_bytes_that_were_never_packed_are_refused_or_are_some_load(data: bytes) -> None:
    try:
        found = Load.unpack(data)
    except InvariantViolation:
        return
    assert (np.diff(found.cells) > 0).all()
    assert Load.unpack(found.pack()) == found


@given(load(), st.data())
def test_a_load_that_was_cut_off_is_refused(found: Load, data: st.DataObject) -> None:
    packed = found.pack()
    with pytest.raises(InvariantViolation):
        Load.unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


def test_a_packed_load_is_small(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.poisson(244, 4096)
    full = Load.of(counts, bytes=int(counts.sum()) * 20, micros=int(counts.sum()))
    sparse = Load.of(np.where(rng.random(4096) < 0.05, counts, 0), micros=10**6)
    print(f"4,096 cells: {len(full.pack()):,} B; 5% of them: {len(sparse.pack()):,} B; 256 cells: ", end="")
    print(f"{len(full.coarser(8).pack()):,} B")
    assert len(full.pack()) < 7 * 4096
    assert len(sparse.pack()) < 7 * 300
    assert len(full.coarser(8).pack()) < 2500


# -- many epochs ------------------------------------------------------------------------------------------------------


def after(loads: Loads, rows: list[Numbers], first: int = 0) -> Loads:
    for epoch, row in enumerate(rows, first):
        loads = loads.after(epoch, Load.of(row, micros=int(row.sum()) * 7))
    return loads


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4), st.integers(1, 40), st.floats(0.5, 20))
def test_the_mean_of_what_is_always_the_same_is_that(row: list[int], epochs: int, half_life: float) -> None:
    loads = after(Loads(half_life), [np.array(row)] * epochs)
    assert loads.records == pytest.approx(np.array(row, float))
    assert loads.micros.sum() == pytest.approx(7.0 * sum(row))
    assert len(loads.history) == min(epochs, loads.kept)


def test_an_epoch_weighs_half_after_the_half_life() -> None:
    rows = [np.array([100, 100])] * 200 + [np.array([0, 0])] * 4
    assert after(Loads(half_life=4.0), rows).records[0] == pytest.approx(50)


def test_epochs_that_were_not_seen_count_as_time_that_has_passed() -> None:
    loads = Loads(half_life=1.0).after(0, Load.of(np.array([8, 8])))
    assert loads.after(1, Load.of(np.array([2, 2]))).records[0] == pytest.approx((4 + 2) / 1.5)
    assert loads.after(3, Load.of(np.array([2, 2]))).records[0] == pytest.approx((1 + 2) / 1.125)


def test_load_that_is_suddenly_elsewhere_is_known_at_once() -> None:
    before, now = np.array([1000] * 8 + [0] * 8), np.array([0] * 8 + [1000] * 8)
    loads = after(Loads(half_life=10.0), [before] * 20 + [now])
    assert loads.records.tolist() == now.tolist()
    assert loads.history[:, 0].tolist() == [7000.0] * 20 + [0.0], "the epochs one by one are not forgotten"


@pytest.mark.parametrize("records", [20, 200, 5000, 10**6])
def test_chance_is_no_reason_to_forget(records: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [rng.poisson(records / 4096, 4096) for _ in range(60)]
    assert after(Loads(half_life=10.0), rows).weight > 10, "all epochs are in the mean"


def test_more_load_everywhere_is_no_reason_to_forget() -> None:
    rows = [np.full(16, 100)] * 20 + [np.full(16, 900)]
    assert after(Loads(half_life=10.0), rows).weight > 5


def test_the_mean_begins_anew_with_more_cells_and_goes_on_with_fewer() -> None:
    loads = after(Loads(), [np.array([10, 30])] * 3)
    more = loads.after(3, Load.of(np.array([5, 5, 15, 15]), micros=400))
    assert more.records.tolist() == [5, 5, 15, 15]
    assert more.history.tolist() == [[35, 35, 105, 105]] * 3 + [[50, 50, 150, 150]], "what was is spread evenly"
    fewer = loads.after(3, Load.of(np.array([40])))
    assert fewer.records.tolist() == pytest.approx([40])


def test_the_last_epochs_are_kept_one_by_one_in_few_cells() -> None:
    loads = after(Loads(kept=4), [np.full(4096, count) for count in range(9)])
    assert loads.history.shape == (4, 1 << HISTORY_BITS)
    assert loads.history[:, 0].tolist() == [5 * 16 * 7, 6 * 16 * 7, 7 * 16 * 7, 8 * 16 * 7]


def test_a_history_is_a_value() -> None:
    one = after(Loads(), [np.array([1, 2])])
    sums, history = one.sums.copy(), one.history.copy()
    one.after(1, Load.of(np.array([9, 9])))
    assert (one.sums == sums).all()
    assert (one.history == history).all()


@given(
    st.lists(st.floats(0, 1e6), min_size=8, max_size=8),
    st.sets(st.integers(1, 2**64 - 1), max_size=9).map(lambda cuts: np.array([0, *sorted(cuts)], np.uint64)),
)
def test_what_ranges_have_of_cells_adds_up(row: list[float], firsts: Hashes) -> None:
    cells: Floats = np.array(row)
    found = within(cells, firsts)
    assert (found >= -1e-6).all()
    assert found.sum() == pytest.approx(cells.sum(), abs=1e-3)
    assert within(cells, np.arange(8, dtype=np.uint64) << np.uint64(61)) == pytest.approx(cells, abs=1e-6 * cells.sum())


@pytest.mark.parametrize("wrong", [{"half_life": 0.0}, {"half_life": -1.0}, {"kept": 0}])
def test_a_mean_over_no_epochs_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="expected numbers of epochs above 0"):
        Loads(**wrong)  # type: ignore[arg-type]
