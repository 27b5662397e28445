"""The manifest: which segments, and which ranges of each, make the state of every step at an epoch.

Rules
-----
- A manifest is a value. A commit changes it in two ways only: segments added by the epoch, and edits that replace
  pieces of older segments by a merged one (G3: nothing else enters).
- A family is one declared state of one step. Its pieces are read newest first; `order` is the epoch of the newest
  update a segment may hold, and for any point of the key space no two pieces of a family share an order.
- An edit names its inputs. It is applied only where they are all still there, unchanged in its ranges, whoever owns
  these by then; otherwise it is refused and its outputs are garbage.
- A segment once dropped never comes back, so that whoever deletes it late, or from an old view, harms nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from millstream.errors import InvariantViolation
from millstream.protocol.keyspace import Range, clip, subtract, width
from millstream.protocol.routing import RoutingTable, Slot


class Family(NamedTuple):
    """The address of one declared state: step and state name."""

    step: str
    state: str


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """All one needs to know to read a segment and to check that it is the one that was written.

    `covers` are the ranges it speaks for: those its writer owned, whether or not a key was there. `span` is that of
    the times in a segment of timers, from the first to the last; None for other segments. `form` says how often the
    type of the family's values had changed when they were written (see `store.forms`).
    """

    name: str
    family: Family
    order: int
    rows: int
    bytes: int
    digest: str
    covers: tuple[Range, ...]
    tombstones: int = 0
    span: tuple[int, int] | None = None
    form: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment and the ranges of it that count."""

    segment: SegmentRef
    ranges: tuple[Range, ...]

    @property
    def bytes(self) -> int:
        """The estimated size of what counts: hashes are spread evenly, so bytes go with width."""
        return round(self.segment.bytes * width(self.ranges) / width(self.segment.covers))


@dataclass(frozen=True, slots=True)
class Input:
    """What an edit read of one segment."""

    name: str
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """The outcome of a merge: in `ranges`, the segments `inputs` are replaced by `outputs`."""

    family: Family
    ranges: tuple[Range, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[SegmentRef, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The pieces of every family."""

    families: dict[Family, dict[str, Piece]] = field(default_factory=dict)

    def pieces(self, family: Family, within: Sequence[Range] | None = None) -> list[Piece]:
        """The pieces of a family, newest first, clipped to `within`."""
        found = []
        for piece in self.families.get(family, {}).values():
            ranges = piece.ranges if within is None else clip(piece.ranges, within)
            if ranges:
                found.append(piece if ranges == piece.ranges else Piece(piece.segment, ranges))
        found.sort(key=lambda piece: -piece.segment.order)
        return found

    def shares(self, family: Family, table: RoutingTable) -> dict[Slot, list[Piece]]:
        """What `pieces` says of the ranges of each slot of a table, found for all slots at once.

        A piece is cut where the table is, so the work goes with what is found, not with slots times pieces.
        """
        found: dict[Slot, list[Piece]] = {}
        for piece in self.pieces(family):
            parts: dict[Slot, list[Range]] = {}
            for span in piece.ranges:
                for part, slot in table.cut(span):
                    parts.setdefault(slot, []).append(part)
            for slot, ranges in parts.items():
                found.setdefault(slot, []).append(piece if len(parts) == 1 else Piece(piece.segment, tuple(ranges)))
        return found

    def bytes_below(self, family: Family, form: int) -> int:
        """About how many bytes of a family are of an older form than this one."""
        return sum(piece.bytes for piece in self.families.get(family, {}).values() if piece.segment.form < form)

    def segments(self) -> Iterable[SegmentRef]:
        """Every segment that counts somewhere."""
        for pieces in self.families.values():
            for piece in pieces.values():
                yield piece.segment

    def admits(self, edit: Edit) -> bool:
        """Whether every input of the edit still counts in the ranges that were read, and in no more."""
        pieces = self.families.get(edit.family, {})
        return all(
            taken.name in pieces and clip(pieces[taken.name].ranges, edit.ranges) == taken.ranges
            for taken in edit.inputs
        )

    def edited(self, edits: Sequence[Edit]) -> tuple[Manifest, tuple[str, ...]]:
        """The manifest after these edits, and the names of the segments that no longer count anywhere."""
        families, dropped = dict(self.families), []
        for edit in edits:
            if not Manifest(families).admits(edit):
                raise InvariantViolation(f"edit of {edit.family} in {edit.ranges[0]}... does not fit the manifest")
            pieces = dict(families[edit.family])
            for taken in edit.inputs:
                rest = subtract(pieces[taken.name].ranges, edit.ranges)
                if rest:
                    pieces[taken.name] = replace(pieces[taken.name], ranges=rest)
                else:
                    del pieces[taken.name]
                    dropped.append(taken.name)
            families[edit.family] = _with(pieces, edit.outputs)
        return Manifest(families), tuple(dropped)

    def transferred(self, families: Mapping[Family, Family | None]) -> tuple[Manifest, tuple[str, ...]]:
        """The manifest in which families belong to other ones, or to none; and the segments that no longer count."""
        kept = {family: pieces for family, pieces in self.families.items() if family not in families}
        dropped: list[str] = []
        for old, new in families.items():
            pieces = self.families.get(old, {})
            if new is None:
                dropped += pieces
                continue
            if new in kept:
                raise InvariantViolation(f"{old} is carried to {new}, which has state of its own")
            kept[new] = {
                name: Piece(replace(piece.segment, family=new), piece.ranges) for name, piece in pieces.items()
            }
        return Manifest(kept), tuple(dropped)

    def added(self, segments: Sequence[SegmentRef]) -> Manifest:
        """The manifest with these new segments."""
        families = dict(self.families)
        grouped: dict[Family, list[SegmentRef]] = {}
        for segment in segments:
            grouped.setdefault(segment.family, []).append(segment)
        for family, refs in grouped.items():
            families[family] = _with(dict(families.get(family, {})), refs)
        return Manifest(families)


def _with(pieces: dict[str, Piece], segments: Iterable[SegmentRef]) -> dict[str, Piece]:
    for segment in segments:
        if segment.name in pieces:
            raise InvariantViolation(f"segment {segment.name} enters the manifest twice")
        pieces[segment.name] = Piece(segment, segment.covers)
    return pieces
