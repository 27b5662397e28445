"""Plans: each reaches its table, moves nothing needlessly, and refuses what makes no sense."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import AllAtOnce, Batched, Fluid, Matched, Paced, UserError
from millstream.protocol.keyspace import LAST, WHOLE, Bin, Range, bin_range, width
from millstream.protocol.layout import Layout
from millstream.protocol.manifest import Family, Manifest, Piece, SegmentRef
from millstream.protocol.migration import MigrationPlan, Move, Start
from millstream.protocol.planner import (
    bytes_in,
    plan_balance,
    plan_bins,
    plan_drain,
    plan_merge,
    plan_move,
    plan_rescale,
    plan_split,
)
from millstream.protocol.routing import RoutingTable, RoutingVersion, Slot
from millstream.protocol.strategies import Strategy

BITS = 5
BINS = 1 << BITS
SIZE = 1 << (64 - BITS)

STRATEGIES = st.one_of(
    st.builds(AllAtOnce, gap=st.integers(0, 2)),
    st.builds(Fluid, gap=st.integers(0, 2)),
    st.builds(Batched, st.integers(1, 9), gap=st.integers(0, 2), merge=st.booleans()),
    st.builds(Matched, gap=st.integers(0, 2), merge=st.booleans()),
    st.builds(Paced, st.floats(1.01, 3.0), gap=st.integers(0, 2)),
)


def table_of(owners: Sequence[int], version: int = 0, bits: int = BITS) -> RoutingTable:
    """A table that gives every bin its owner."""
    ranges = [(bin_range(Bin(number), bits), Slot(slot)) for number, slot in enumerate(owners)]
    table = RoutingTable(RoutingVersion(version - 1), bits, (0,), (Slot(owners[0]),))
    return table.assign(ranges)


TABLES = st.builds(table_of, st.lists(st.integers(0, 6), min_size=BINS, max_size=BINS), st.integers(0, 3))
"""Any owners at all, with holes between the slots."""


@st.composite
def layouts(draw: st.DrawFn, state: bool = True) -> Layout:
    """One to three steps, some with the same table; state in some of their bins."""
    some = draw(st.lists(TABLES, min_size=1, max_size=2))
    steps = ["a", "b", "c"][: draw(st.integers(1, 3))]
    tables = {step: draw(st.sampled_from(some)) for step in steps}
    refs = []
    if state:
        for step in steps:
            for number, size in enumerate(draw(st.lists(st.integers(0, 5000), max_size=BINS))):
                refs.append(segment(step, bin_range(Bin(number), BITS), size=size))
    placement = {"w0": [0, 1], "w1": [2, 3, 4], "w2": [5, 6]}
    return Layout("mine", tables, Manifest().added(refs), placement)


COUNTER = iter(range(10**9))


def segment(step: str, *covers: Range, size: int, state: str = "total") -> SegmentRef:
    return SegmentRef(f"s{next(COUNTER)}", Family(step, state), 1, 1, size, "", covers)


def carried_out(plan: MigrationPlan, layout: Layout) -> dict[str, RoutingTable]:
    """The tables after all rounds. What every plan promises is checked on the way."""
    tables = dict(layout.tables)
    assert plan.store == layout.store
    assert plan.versions == {step: layout.tables[step].version for step in plan.versions}
    moved: dict[str, list[Range]] = {}
    for number, moves in enumerate(plan.rounds):
        assert moves or plan.bin_bits or plan.drains, "an empty round"
        for move in moves:
            assert tables[move.step].owners_of(move.range) == {move.origin}, f"round {number}: {move}"
            assert move.origin != move.target
            assert not any(move.range.overlap(other) for other in moved.get(move.step, [])), "it moves twice"
        for move in moves:
            moved.setdefault(move.step, []).append(move.range)
        tables.update(plan.after(tables, number))
    for step, ranges in moved.items():
        assert step in plan.versions
        for item in ranges:
            assert tables[step].owners_of(item).isdisjoint(layout.tables[step].owners_of(item))
    return tables


def owners_of(table: RoutingTable, bits: int = BITS) -> list[int]:
    points = np.array([bin_range(Bin(number), bits).first for number in range(1 << bits)], np.uint64)
    return list(map(int, table.lookup(points)))


def moved_bins(before: RoutingTable, after: RoutingTable) -> int:
    return sum(one != other for one, other in zip(owners_of(before), owners_of(after), strict=True))


def check_rounds(plan: MigrationPlan, strategy: Strategy) -> None:
    """What the strategy promises of every round; a bin of several steps is one."""
    assert plan.gap == strategy.gap
    for moves in plan.rounds:
        units = {(move.range, move.origin, move.target): move.bins for move in moves}
        if isinstance(strategy, Fluid):
            assert sum(units.values()) <= 1
        if isinstance(strategy, Batched) and not strategy.merge:
            assert sum(units.values()) <= strategy.n
        if isinstance(strategy, Matched) and not strategy.merge:
            ends = [slot for _, origin, target in units for slot in (origin, target)]
            assert len(ends) == len(set(ends))
    if isinstance(strategy, AllAtOnce):
        assert len(plan.rounds) <= 1


# -- rescale ----------------------------------------------------------------------------------------------------------


@given(layouts(), st.integers(1, BINS), STRATEGIES)
def test_a_rescale_is_even_and_moves_as_little_as_possible(layout: Layout, slots: int, strategy: Strategy) -> None:
    plan = plan_rescale(layout, slots, strategy=strategy)
    check_rounds(plan, strategy)
    tables = carried_out(plan, layout)
    for step, table in tables.items():
        counts = Counter(owners_of(table))
        assert set(counts) == set(range(slots))
        assert max(counts.values()) - min(counts.values()) <= 1
        # At least what slots beyond have must move, and at least what those that stay have too much or lack.
        before = Counter(owners_of(layout.tables[step]))
        held = sorted((before[slot] for slot in range(slots)), reverse=True)
        quotas = [BINS // slots + (place < BINS % slots) for place in range(slots)]
        least = BINS - sum(min(have, quota) for have, quota in zip(held, quotas, strict=True))
        assert moved_bins(layout.tables[step], table) == least
    again = Layout("mine", tables)
    assert plan_rescale(again, slots).rounds == ()


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 5), (1, 16), (16, 1)])
def test_growing_and_shrinking_back_leaves_few_intervals(before: int, after: int) -> None:
    layout = Layout("mine", {"a": RoutingTable.even(before, 12)})
    there = carried_out(plan_rescale(layout, after), layout)
    back = carried_out(plan_rescale(Layout("mine", there), before), Layout("mine", there))
    assert len(there["a"].firsts) <= before + after
    assert len(back["a"].firsts) <= 2 * (before + after)


def test_a_rescale_makes_bins_whole_that_were_cut() -> None:
    third = SIZE // 3
    cut = RoutingTable.even(2, BITS).assign([(Range(0, third), Slot(1)), (Range(SIZE, 2 * SIZE - third), Slot(1))])
    tables = carried_out(plan_rescale(Layout("mine", {"a": cut}), 2), Layout("mine", {"a": cut}))
    assert all(first % SIZE == 0 for first in tables["a"].firsts)
    assert tables["a"].slot_of(0) == 0, "slot 0 had most of the first bin"
    assert tables["a"].slot_of(SIZE) == 1, "slot 1 had most of the second"


# -- steps ------------------------------------------------------------------------------------------------------------


def test_steps_with_the_same_move_make_it_in_the_same_round() -> None:
    odd = RoutingTable.even(2, BITS).assign([(bin_range(Bin(0), BITS), Slot(1))])
    layout = Layout("mine", {"a": RoutingTable.even(2, BITS), "b": RoutingTable.even(2, BITS), "c": odd})
    plan = plan_move(layout, bins=[4, 5, 6], to=1, strategy=Fluid())
    assert [[(move.step, move.range) for move in moves] for moves in plan.rounds] == [
        [(step, bin_range(Bin(number), BITS)) for step in "abc"] for number in (4, 5, 6)
    ]
    assert plan.bins == 3


def test_a_plan_moves_the_steps_that_are_named_and_no_others() -> None:
    table = RoutingTable.even(2, BITS)
    layout = Layout("mine", {"a": table, "b": table, "c": table})
    assert set(plan_rescale(layout, 4, steps="b").versions) == {"b"}
    assert set(plan_rescale(layout, 4, steps=["c", "a"]).versions) == {"a", "c"}
    assert set(plan_rescale(layout, 4).versions) == {"a", "b", "c"}


# -- move, split, merge -----------------------------------------------------------------------------------------------


@given(layouts(), st.data(), STRATEGIES)
def test_a_move_brings_what_was_named_where_it_was_told_to(
    layout: Layout, data: st.DataObject, strategy: Strategy
) -> None:
    target = data.draw(st.sampled_from(sorted(layout.slots)))
    bins = data.draw(st.sets(st.integers(0, BINS - 1), min_size=1))
    if all(owners_of(table)[number] == target for table in layout.tables.values() for number in bins):
        return
    plan = plan_move(layout, bins=sorted(bins), to=target, strategy=strategy)
    check_rounds(plan, strategy)
    for step, table in carried_out(plan, layout).items():
        expected = [target if n in bins else slot for n, slot in enumerate(owners_of(layout.tables[step]))]
        assert owners_of(table) == expected


def test_a_range_need_not_end_where_a_bin_does() -> None:
    layout = Layout("mine", {"a": RoutingTable.even(2, BITS)})
    span = Range(SIZE // 2, 3 * SIZE + 7)
    plan = plan_move(layout, ranges=span, to=1, strategy=AllAtOnce())
    assert plan.rounds == ((Move("a", span, Slot(0), Slot(1), 0, 4),),)
    assert carried_out(plan, layout)["a"].ranges[Slot(1)][0] == span


def test_half_of_half_of_the_slots_and_back() -> None:
    layout = Layout("mine", {"a": RoutingTable.even(4, BITS)})
    plan = plan_move(layout, slots=[0, 1], share=0.5, to=[2, 3])
    away = carried_out(plan, layout)
    assert Counter(owners_of(away["a"])) == {0: 4, 1: 4, 2: 12, 3: 12}
    assert {(move.origin, move.target) for moves in plan.rounds for move in moves} == {(0, 2), (1, 3)}
    back = plan_move(Layout("mine", away), ranges=[move.range for moves in plan.rounds for move in moves], to=[0, 1])
    assert carried_out(back, Layout("mine", away))["a"].firsts == layout.tables["a"].firsts


@given(layouts(), st.integers(2, 4), st.data())
def test_a_split_keeps_the_first_part_and_opens_new_slots(layout: Layout, into: int, data: st.DataObject) -> None:
    slot = data.draw(st.sampled_from(sorted(layout.owners)))
    counts = [owners_of(table).count(slot) for table in layout.tables.values()]
    if any(0 < count < into for count in counts):
        with pytest.raises(UserError, match=f"into={into}: slot {slot} has"):
            plan_split(layout, slot, into)
        return
    plan = plan_split(layout, slot, into)
    targets = {move.target for moves in plan.rounds for move in moves}
    assert targets.isdisjoint(layout.owners)
    assert len(targets) == into - 1
    for step, table in carried_out(plan, layout).items():
        parts = [owners_of(table).count(owner) for owner in (slot, *sorted(targets))]
        assert max(parts) - min(parts) <= 1
        assert sum(parts) == owners_of(layout.tables[step]).count(slot)


def test_a_merge_undoes_a_split() -> None:
    layout = Layout("mine", {"a": RoutingTable.even(3, BITS)})
    split = carried_out(plan_split(layout, 1), layout)
    assert split["a"].slot_count == 4
    merged = carried_out(plan_merge(Layout("mine", split), 3, 1), Layout("mine", split))
    assert merged["a"].ranges == layout.tables["a"].ranges


# -- drain, balance ---------------------------------------------------------------------------------------------------


def loads_of(layout: Layout, tables: Mapping[str, RoutingTable]) -> Counter[int]:
    """The bytes of each slot, bin by bin."""
    loads: Counter[int] = Counter(dict.fromkeys(layout.owners, 0))
    for step, table in tables.items():
        sizes = bytes_in(layout.manifest, step, np.arange(BINS, dtype=np.uint64) * np.uint64(SIZE))
        for slot, size in zip(owners_of(table), sizes.tolist(), strict=True):
            loads[slot] += size
    return loads


@given(layouts(), st.sampled_from(["w0", "w1", "w2"]), STRATEGIES)
def test_a_drain_leaves_nothing_on_the_worker(layout: Layout, worker: str, strategy: Strategy) -> None:
    leaving = set(layout.placement[worker])
    if layout.owners <= leaving:
        with pytest.raises(UserError, match=f"worker '{worker}' has all slots"):
            plan_drain(layout, worker)
        return
    plan = plan_drain(layout, worker, strategy=strategy)
    check_rounds(plan, strategy)
    assert plan.drains == worker
    tables = carried_out(plan, layout)
    assert leaving.isdisjoint(slot for table in tables.values() for slot in table.slots)
    for step, table in tables.items():
        stayed = [slot for slot in owners_of(layout.tables[step]) if slot not in leaving]
        kept = [
            slot
            for slot, was in zip(owners_of(table), owners_of(layout.tables[step]), strict=True)
            if was not in leaving
        ]
        assert kept == stayed, "what was elsewhere stays"
    before, after = loads_of(layout, layout.tables), loads_of(layout, tables)
    gainers = [slot for slot in after if after[slot] > before[slot]]
    others = [slot for slot in after if slot not in leaving]
    largest = max(
        (move.bytes for moves in plan_drain(layout, worker, strategy=Fluid()).rounds for move in moves), default=0
    )
    if gainers and largest:
        # Whoever gained is at most a bin of each step above anybody who could have had it.
        bin_bytes = largest * len(layout.tables)
        assert max(after[slot] for slot in gainers) - min(after[slot] for slot in others) <= 2 * bin_bytes


def test_a_drain_without_state_goes_by_width() -> None:
    layout = Layout("mine", {"a": RoutingTable.even(4, 12)}, placement={"x": [0], "y": [1, 2, 3]})
    tables = carried_out(plan_drain(layout, "x"), layout)
    shares = [width(ranges) / 2**64 for _, ranges in sorted(tables["a"].ranges.items())]
    assert len(shares) == 3
    assert max(shares) - min(shares) < 2 / 4096


def test_a_worker_without_a_slot_is_drained_by_a_round_without_moves() -> None:
    layout = Layout("mine", {"a": RoutingTable.even(2, BITS)}, placement={"x": [0, 1], "y": []})
    assert plan_drain(layout, "y").rounds == ((),)


@given(layouts(), st.sampled_from([0.0, 0.05, 0.3]), STRATEGIES)
def test_balance_never_makes_it_worse_and_moves_only_downhill(
    layout: Layout, tolerance: float, strategy: Strategy
) -> None:
    plan = plan_balance(layout, tolerance=tolerance, strategy=strategy)
    check_rounds(plan, strategy)
    tables = carried_out(plan, layout)
    before, after = loads_of(layout, layout.tables), loads_of(layout, tables)
    mean = sum(before.values()) / len(before)
    if not mean:
        return  # widths are balanced then
    assert max(after.values()) <= max(before.values())
    assert min(after.values()) >= min(before.values())
    givers = {move.origin for moves in plan.rounds for move in moves}
    takers = {move.target for moves in plan.rounds for move in moves}
    assert not givers & takers
    assert all(before[slot] > mean for slot in givers)
    assert all(before[slot] < mean for slot in takers)
    if all(abs(load - mean) <= tolerance * mean for load in before.values()):
        assert not plan.rounds, "it was even enough"


@given(st.data(), st.integers(1, 4), st.sampled_from([0.05, 0.1]))
def test_balance_reaches_its_tolerance_where_bins_are_small(data: st.DataObject, slots: int, tolerance: float) -> None:
    owners = data.draw(st.lists(st.integers(0, slots - 1), min_size=256, max_size=256))
    refs = [segment("a", WHOLE, size=10**6), segment("a", bin_range(Bin(3), 4), size=data.draw(st.integers(0, 10**5)))]
    layout = Layout("mine", {"a": table_of(owners, bits=8)}, Manifest().added(refs))
    tables = carried_out(plan_balance(layout, tolerance=tolerance), layout)
    sizes = bytes_in(layout.manifest, "a", np.arange(256, dtype=np.uint64) << np.uint64(56))
    loads = np.bincount(owners_of(tables["a"], 8), sizes)[sorted(layout.owners)]
    assert max(abs(loads / loads.mean() - 1)) <= tolerance


def test_balance_brings_everybody_within_the_tolerance() -> None:
    owners = [0] * 20 + [1] * 10 + [2] * 2
    refs = [segment("a", bin_range(Bin(number), BITS), size=1000) for number in range(BINS)]
    layout = Layout("mine", {"a": table_of(owners)}, Manifest().added(refs))
    plan = plan_balance(layout, strategy=AllAtOnce())
    assert sorted(loads_of(layout, carried_out(plan, layout)).values()) == [10000, 11000, 11000]
    assert plan.bins == 9, "no more than the surplus of slot 0"
    assert len(plan.rounds[0]) <= 2, "neighbours go together"


def test_what_is_even_enough_has_nothing_to_move() -> None:
    layout = Layout("mine", {"a": RoutingTable.even(4, BITS)})
    assert "nothing to move" in str(plan_balance(layout))
    assert "nothing to move" in str(plan_rescale(layout, 4))


def test_one_hot_bin_stays_and_the_rest_gives_way() -> None:
    refs = [segment("a", bin_range(Bin(number), 2), size=size) for number, size in enumerate([900, 100, 100, 100])]
    layout = Layout("mine", {"a": table_of([0, 0, 1, 1], bits=2)}, Manifest().added(refs))
    [[move]] = plan_balance(layout, strategy=AllAtOnce()).rounds
    assert (move.range, move.origin, move.target) == (bin_range(Bin(1), 2), 0, 1)


# -- bins -------------------------------------------------------------------------------------------------------------


def test_the_number_of_bins_changes_and_nothing_moves() -> None:
    layout = Layout("mine", {"a": RoutingTable.even(3, 4), "b": RoutingTable.even(3, 8)})
    plan = plan_bins(layout, 256)
    assert plan.bin_bits == {"a": 8}
    tables = carried_out(plan, layout)
    assert (tables["a"].bin_bits, tables["a"].firsts) == (8, layout.tables["a"].firsts)
    fewer = carried_out(plan_bins(layout, 4), layout)
    assert fewer["a"].firsts == layout.tables["a"].firsts, "cuts inside a bin stay"
    assert set(
        Counter(owners_of(carried_out(plan_rescale(Layout("m", fewer), 2), Layout("m", fewer))["a"], 2)).values()
    ) == {2}
    assert plan_bins(layout, 256, steps="b").rounds == ()
    with pytest.raises(UserError, match="step 'a' is on 3 slots; rescale to at most 2"):
        plan_bins(layout, 2)


# -- bytes ------------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(0, 10**9)), max_size=6),
    st.lists(st.integers(1, 999), max_size=8),
)
def test_bytes_go_with_width_and_add_up(parts: list[tuple[int, int, int]], cuts: list[int]) -> None:
    unit = 1 << 54
    refs = [segment("a", Range(min(x, y) * unit, (max(x, y) + 1) * unit - 1), size=size) for x, y, size in parts]
    manifest = Manifest().added([*refs, segment("b", WHOLE, size=77)])
    firsts = [0, *(cut * unit for cut in sorted(set(cuts)))]
    found = bytes_in(manifest, "a", np.array(firsts, np.uint64)).tolist()
    assert abs(sum(found) - sum(size for *_, size in parts)) <= 1
    for first, end, size in zip(firsts, [*firsts[1:], LAST + 1], found, strict=True):
        shared = [(ref, ref.covers[0].overlap(Range(first, end - 1))) for ref in refs]
        expected = sum(ref.bytes * common.width / ref.covers[0].width for ref, common in shared if common)
        assert abs(size - expected) <= 1


def test_only_the_ranges_of_a_piece_that_count_are_counted() -> None:
    ref = segment("a", Range(0, (1 << 62) - 1), Range(1 << 63, LAST), size=3000)
    quarters = np.arange(4, dtype=np.uint64) << np.uint64(62)
    assert bytes_in(Manifest().added([ref]), "a", quarters).tolist() == [1000, 0, 1000, 1000]
    half = Manifest({ref.family: {ref.name: Piece(ref, (Range(0, (1 << 61) - 1),))}})
    assert bytes_in(half, "a", quarters).tolist() == [500, 0, 0, 0]


# -- what it says -----------------------------------------------------------------------------------------------------


def with_state() -> Layout:
    table = RoutingTable.even(2, 12)
    refs = [segment(step, WHOLE, size=size) for step, size in (("a", 3_000_000), ("b", 1_000_000))]
    return Layout("mine", {"a": table, "b": table}, Manifest().added(refs), fetch_limit=1_000_000)


def test_a_plan_says_what_it_does() -> None:
    plan = plan_rescale(
        with_state(), 4, strategy=Batched(256, gap=1, merge=False), at=Start(epoch=7, clock_ms=1_700_000_000_123)
    )
    assert str(plan).splitlines() == [
        "rescale by Batched(256, gap=1, merge=False), from routing version 0 of 'a', 'b'",
        "  slot 0 -> slot 2: 1,024 bins, 1 MB",
        "  slot 1 -> slot 3: 1,024 bins, 1 MB",
        "  in all: 2,048 bins, 2 MB, in 8 rounds over 15 epochs",
        "  at most: 256 bins, 250 kB in a round; 128 bins, 125 kB to one slot in a round",
        "  expected stall: up to 0.125 s in an epoch, at 1 MB/s for each worker",
        "  starts at epoch 7 and at 2023-11-14 22:13:20.123 UTC",
    ]
    assert (plan.bins, plan.bytes, plan.epochs, plan.stall_bytes) == (2048, 2_000_000, 15, 125_000)
    assert plan.expected_stall_s(500_000) == 0.25


def test_a_plan_of_many_pairs_prints_few_lines() -> None:
    layout = Layout("mine", {"a": RoutingTable.even(100, 12)})
    assert len(str(plan_rescale(layout, 200, strategy=Fluid())).splitlines()) < 20


@given(layouts(), st.integers(1, 9), STRATEGIES)
def test_a_plan_travels(layout: Layout, slots: int, strategy: Strategy) -> None:
    plan = plan_rescale(layout, slots, strategy=strategy)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=MigrationPlan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


# -- what makes no sense ----------------------------------------------------------------------------------------------

BASE = Layout(
    "mine", {"a": RoutingTable.even(2, BITS), "b": RoutingTable.even(2, BITS)}, placement={"x": [0], "y": [1]}
)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: plan_rescale(BASE, 0), "slots=0: expected a whole number, 1 or more"),
        (lambda: plan_rescale(BASE, 2.0), "slots=2.0"),  # type: ignore[arg-type]
        (lambda: plan_rescale(BASE, 33), "has 32 bins, and a slot needs one at least; give at most 32 slots"),
        (lambda: plan_rescale(BASE, 4, steps="c"), "no step 'c'; the query has a, b"),
        (lambda: plan_rescale(BASE, 4, steps=[]), "no step was named; give some of a, b"),
        (lambda: plan_rescale(BASE, 4, strategy="fluid"), "strategy='fluid': expected Paced"),  # type: ignore[arg-type]
        (lambda: plan_rescale(Layout("mine", {}), 4), "no step with state"),
        (lambda: plan_move(BASE, bins=3, to=2), "no slot 2; the query has 0, 1"),
        (lambda: plan_move(BASE, bins=3, to=-1), "to=-1"),
        (lambda: plan_move(BASE, bins=3, to=[]), "to= is empty"),
        (lambda: plan_move(BASE, bins=32, to=1), "no bin 32: step 'a' has 32, numbered from 0"),
        (lambda: plan_move(BASE, bins=[1, 2, 1], to=1), "bin 1 is named twice"),
        (lambda: plan_move(BASE, bins=3, to=0), "all that is to move is at slot 0 already"),
        (lambda: plan_move(BASE, to=0), "exactly one of bins=, ranges= and slots="),
        (lambda: plan_move(BASE, bins=1, slots=1, to=0), "exactly one of"),
        (lambda: plan_move(BASE, ranges=[Range(0, 9), Range(9, 20)], to=1), "overlap; give each point once"),
        (lambda: plan_move(BASE, ranges=[], to=1), "expected one Range or several"),
        (lambda: plan_move(BASE, slots=7, to=1), "no slot 7"),
        (lambda: plan_move(BASE, slots=0, share=0, to=1), "share=0: expected more than 0"),
        (lambda: plan_move(BASE, slots=0, share=1.1, to=1), "share=1.1"),
        (lambda: plan_drain(BASE, "z"), "no worker 'z'; the query runs on x, y"),
        (lambda: plan_drain(Layout("mine", BASE.tables, placement={"x": [0, 1]}), "x"), "'x' is the only one"),
        (lambda: plan_drain(Layout("mine", BASE.tables, placement={"x": [0, 1], "y": []}), "x"), "has all slots, 0, 1"),
        (lambda: plan_balance(BASE, tolerance=1), "tolerance=1: expected a share"),
        (lambda: plan_balance(BASE, tolerance=-0.1), "tolerance=-0.1"),
        (lambda: plan_split(BASE, 5), "no slot 5"),
        (lambda: plan_split(BASE, 0, 1), "into=1: expected a whole number, 2 or more"),
        (lambda: plan_split(BASE, 0, 17), "slot 0 has 16 bins of step 'a'; give at most 16"),
        (lambda: plan_merge(BASE, 0, 0), "cannot be merged into itself"),
        (lambda: plan_merge(BASE, 0, 3), "no slot 3"),
        (lambda: plan_bins(BASE, 48), "bins=48: expected a power of two"),
        (lambda: plan_bins(BASE, 0), "bins=0"),
        (lambda: plan_bins(BASE, 1), "is on 2 slots"),
    ],
)
def test_what_makes_no_sense_cannot_be_planned(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert reason in str(caught.value)


def test_a_slot_that_owns_nothing_has_nothing_to_give() -> None:
    layout = Layout("mine", {"a": table_of([0, 2] * (BINS // 2))})
    with pytest.raises(UserError, match="slot 1 owns nothing; what there is lies at 0, 2"):
        plan_move(layout, slots=1, to=0)
    assert plan_move(layout, slots=0, to=1).bins == BINS // 2, "but it can receive"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda layout: plan_move(layout, to=None, bins=1), "to=None: expected a whole number, or several"),
        (lambda layout: plan_move(layout, to=1, bins=1.5), "bins=1.5: expected a whole number, or several"),
        (lambda layout: plan_rescale(layout, 3, steps=5), "steps=5: expected the name of a step, or several"),
        (lambda layout: plan_rescale(layout, 3, steps=[["a"]]), "no step"),
        (lambda layout: plan_drain(layout, ["1"]), "no worker"),
    ],
)
def test_what_is_not_even_of_the_right_type_is_refused_with_a_text(wrong: Any, text: str) -> None:
    layout = Layout("mine", {"a": RoutingTable.even(2, 4)}, placement={"0": [0], "1": [1]})
    with pytest.raises(UserError, match=re.escape(text)):
        wrong(layout)
