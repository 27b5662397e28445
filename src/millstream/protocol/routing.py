"""The routing table of a step: an interval map from ranges of the key space to slots, with a version.

Rules
-----
- Every point of the key space has exactly one slot (G4): the intervals are consecutive, the first begins at 0.
- Neighbouring intervals have different slots: a table is as small as the assignment allows. Bins are only the
  granularity at which tables are cut, so their number costs nothing (2^20 bins on 4 slots are 4 intervals).
- A table is a value. A change makes a new table whose version is one higher (G8).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NewType

import numpy as np
import numpy.typing as npt

from millstream.errors import InvariantViolation, UserError
from millstream.protocol.keyspace import LAST, Hashes, Range, bin_edges

Slot = NewType("Slot", int)
RoutingVersion = NewType("RoutingVersion", int)


@dataclass(frozen=True)
class RoutingTable:
    """Which slot owns which range.

    >>> table = RoutingTable.even(slots=4, bin_bits=12)
    >>> table.slot_of(0), table.slot_of(LAST), table.version
    (0, 3, 0)
    """

    version: RoutingVersion
    bin_bits: int
    firsts: tuple[int, ...]
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        if not self.firsts or self.firsts[0] != 0 or len(self.firsts) != len(self.slots):
            raise InvariantViolation(f"routing table does not cover the key space: {self.firsts} -> {self.slots}")
        if (self._first_array[1:] <= self._first_array[:-1]).any():
            raise InvariantViolation(f"routing table is out of order: {self.firsts}")
        if (self._slot_array[1:] == self._slot_array[:-1]).any():
            raise InvariantViolation("routing table has neighbouring intervals of one slot")

    @classmethod
    def even(cls, slots: int, bin_bits: int) -> RoutingTable:
        """The first table of a query: consecutive bins, the same number for each slot."""
        if slots < 1:
            raise UserError(f"a query needs at least one slot, found slots={slots}")
        return cls(
            RoutingVersion(0),
            bin_bits,
            tuple(bin_edges(slots, bin_bits)),
            tuple(Slot(s) for s in range(slots)),
        )

    @cached_property
    def _first_array(self) -> Hashes:
        return np.array(self.firsts, np.uint64)

    @cached_property
    def _slot_array(self) -> npt.NDArray[np.int32]:
        return np.array(self.slots, np.int32)

    @property
    def slot_count(self) -> int:
        """How many tasks host this table: slots are numbered from 0."""
        return max(self.slots) + 1

    def lookup(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """The slot of every hash."""
        return self._slot_array[np.searchsorted(self._first_array, hashes, side="right") - 1]

    def slot_of(self, point: int) -> Slot:
        """The slot of one point."""
        return Slot(int(self.lookup(np.array([point], np.uint64))[0]))

    def owners_of(self, span: Range) -> set[Slot]:
        """The slots that own something of a range."""
        edges = np.array([span.first, span.last], np.uint64)
        first, last = np.searchsorted(self._first_array, edges, side="right") - 1
        return set(self.slots[int(first) : int(last) + 1])

    def cut(self, span: Range) -> Iterator[tuple[Range, Slot]]:
        """The parts of a range, in order, each with its slot.

        >>> [(part.first >> 60, slot) for part, slot in RoutingTable.even(slots=4, bin_bits=4).cut(Range(0, 1 << 63))]
        [(0, 0), (4, 1), (8, 2)]
        """
        index, first = bisect_right(self.firsts, span.first) - 1, span.first
        while index + 1 < len(self.firsts) and self.firsts[index + 1] <= span.last:
            yield Range(first, self.firsts[index + 1] - 1), self.slots[index]
            index, first = index + 1, self.firsts[index + 1]
        yield span if first == span.first else Range(first, span.last), self.slots[index]

    @cached_property
    def ranges(self) -> dict[Slot, tuple[Range, ...]]:
        """For every slot that owns something, its ranges in order."""
        owned: dict[Slot, list[Range]] = {}
        for first, last, slot in self.intervals():
            owned.setdefault(slot, []).append(Range(first, last))
        return {slot: tuple(ranges) for slot, ranges in owned.items()}

    def intervals(self) -> Iterable[tuple[int, int, Slot]]:
        """(first, last, slot) of every interval, in order."""
        lasts = [first - 1 for first in self.firsts[1:]] + [LAST]
        return zip(self.firsts, lasts, self.slots, strict=True)

    def assign(self, moves: Sequence[tuple[Range, Slot]], bin_bits: int | None = None) -> RoutingTable:
        """The next version, in which each of these disjoint ranges belongs to the slot beside it; perhaps with another
        number of bins."""
        begins = np.array([moved.first for moved, _ in moves], np.uint64)
        order = np.argsort(begins)
        begins, ends = begins[order], np.array([moved.last for moved, _ in moves], np.uint64)[order]
        if (begins[1:] <= ends[:-1]).any():
            raise InvariantViolation("moves of one round overlap")
        firsts = np.unique(np.concatenate([self._first_array, begins, ends[ends < np.uint64(LAST)] + np.uint64(1)]))
        owners = self.lookup(firsts)
        if len(moves):
            inside = np.searchsorted(begins, firsts, side="right") - 1
            taken = (inside >= 0) & (firsts <= ends[inside])
            owners[taken] = np.array([slot for _, slot in moves], np.int32)[order][inside[taken]]
        kept = np.concatenate([[True], owners[1:] != owners[:-1]])
        return RoutingTable(
            RoutingVersion(self.version + 1),
            self.bin_bits if bin_bits is None else bin_bits,
            tuple(firsts[kept].tolist()),
            tuple(Slot(slot) for slot in owners[kept].tolist()),
        )

    def renumbered(self, numbers: Mapping[Slot, int]) -> RoutingTable:
        """The same table with other names for the slots."""
        return replace(self, slots=tuple(Slot(numbers[slot]) for slot in self.slots))
