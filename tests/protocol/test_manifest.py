"""The manifest: what each slot is given of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.protocol.keyspace import LAST, Range, coalesce
from millstream.protocol.manifest import Family, Manifest, Piece, SegmentRef
from millstream.protocol.routing import RoutingTable, RoutingVersion, Slot

FAMILY = Family("step", "state")
_UNIT = (LAST + 1) // 64

spans = st.tuples(st.integers(0, 63), st.integers(0, 63)).map(
    lambda pair: Range(min(pair) * _UNIT, (max(pair) + 1) * _UNIT - 1)
)


@st.composite
def tables(draw: st.DrawFn) -> RoutingTable:
    owners = draw(st.lists(st.integers(0, 5), min_size=64, max_size=64))
    starts = [place for place in range(64) if place == 0 or owners[place] != owners[place - 1]]
    return RoutingTable(
        RoutingVersion(0), 6, tuple(place * _UNIT for place in starts), tuple(Slot(owners[place]) for place in starts)
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    pieces = {}
    for order, covers in enumerate(draw(st.lists(st.lists(spans, min_size=1), max_size=6))):
        ranges = coalesce(covers)
        segment = SegmentRef(f"s{order}", FAMILY, order, 1, 100, "", ranges)
        pieces[segment.name] = Piece(segment, ranges)
    return Manifest({FAMILY: pieces})


@given(manifests(), tables())
def test_the_shares_of_all_slots_are_what_each_would_be_given_alone(manifest: Manifest, table: RoutingTable) -> None:
    shares = manifest.shares(FAMILY, table)
    for slot, owned in table.ranges.items():
        expected = [(piece.segment.name, piece.ranges) for piece in manifest.pieces(FAMILY, owned)]
        assert [(piece.segment.name, piece.ranges) for piece in shares.pop(slot, [])] == expected
    assert not shares, "slots that own nothing are given nothing"


@given(spans, tables())
def test_a_range_is_cut_where_the_table_is(span: Range, table: RoutingTable) -> None:
    parts = list(table.cut(span))
    assert coalesce([part for part, _ in parts]) == (span,)
    for part, slot in parts:
        assert table.owners_of(part) == {slot}
    assert len(parts) == len({part.first for part, _ in parts})
