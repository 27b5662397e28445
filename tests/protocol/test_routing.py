"""Routing tables: every point has one slot, and bins cost nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvariantViolation, UserError
from millstream.protocol.keyspace import LAST, Range, width
from millstream.protocol.routing import RoutingTable, RoutingVersion, Slot


def test_an_even_table_gives_every_slot_the_same_share() -> None:
    table = RoutingTable.even(slots=3, bin_bits=12)
    shares = [width(table.ranges[Slot(s)]) for s in range(3)]
    assert sum(shares) == LAST + 1
    assert max(shares) - min(shares) <= (LAST + 1) >> 12


def test_a_million_bins_make_no_larger_table_than_sixteen() -> None:
    assert len(RoutingTable.even(4, 20).firsts) == len(RoutingTable.even(4, 4).firsts) == 4


def test_lookup_finds_the_interval_of_each_hash() -> None:
    table = RoutingTable(RoutingVersion(0), 12, (0, 100, 200), (Slot(1), Slot(0), Slot(1)))
    assert table.lookup(np.array([0, 99, 100, 199, 200, LAST], np.uint64)).tolist() == [1, 1, 0, 0, 1, 1]
    assert table.ranges == {1: (Range(0, 99), Range(200, LAST)), 0: (Range(100, 199),)}


@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255), st.integers(0, 5)), max_size=8))
def test_assigning_ranges_moves_exactly_those_points(moves: list[tuple[int, int, int]]) -> None:
    table = RoutingTable.even(4, 8)
    shift = 56
    expected = [table.slot_of(b << shift) for b in range(256)]
    assigned = []
    taken: set[int] = set()
    for a, b, slot in moves:
        first, last = min(a, b), max(a, b)
        if taken & set(range(first, last + 1)):
            continue
        taken |= set(range(first, last + 1))
        assigned.append((Range(first << shift, ((last + 1) << shift) - 1), Slot(slot)))
        for point in range(first, last + 1):
            expected[point] = Slot(slot)
    changed = table.assign(assigned)
    assert changed.version == table.version + 1
    assert changed.lookup(np.arange(256, dtype=np.uint64) << np.uint64(shift)).tolist() == expected


def test_ranges_that_overlap_cannot_be_assigned_together() -> None:
    with pytest.raises(InvariantViolation, match="overlap"):
        RoutingTable.even(4, 8).assign([(Range(0, 20), Slot(1)), (Range(20, 30), Slot(2))])


def test_a_table_with_a_hole_is_refused() -> None:
    with pytest.raises(InvariantViolation):
        RoutingTable(RoutingVersion(0), 12, (5,), (Slot(0),))
    with pytest.raises(UserError, match="at least one slot"):
        RoutingTable.even(0, 12)
    with pytest.raises(UserError, match="between 1 and 4"):
        RoutingTable.even(5, 2)
