"""A Bloom filter of a segment's hashes: says of most hashes that are not there that they are not, at one read each.

Rules
-----
- It never rules out a hash that is there (G1): it saves work and decides nothing.
- It is a column of the segment, 16 bits for each row, so it is mapped and checked with the rest of it.
- A hash sets four bits of one 64-bit word. The word is chosen by the upper half of the hash, so that hashes in order
  read the filter in order. About one in two hundred hashes that are not there is let through.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from millstream.protocol.keyspace import Hashes
from millstream.store.keys import Mask

FILTER_FROM = 64
"""Segments of fewer rows have no filter: searching them costs less."""


def filter_of(hashes: Hashes) -> npt.NDArray[np.uint16]:
    """The filter of these hashes, which are in order, as one number for each of them."""
    words = np.zeros(-(-len(hashes) // 4), np.uint64)
    places = _places(hashes, len(hashes) // 4)
    starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
    words[places[starts]] = np.bitwise_or.reduceat(_bits(hashes), starts)
    return words.view(np.uint16)[: len(hashes)]


class HashFilter:
    """The filter in a segment's column."""

    def __init__(self, column: npt.NDArray[np.uint16]) -> None:
        count = len(column) // 4
        self._words: Hashes = column[: count * 4].view(np.uint64)

    def may_hold(self, hashes: Hashes) -> Mask:
        """Which of these hashes may be in the segment."""
        bits = _bits(hashes)
        held: Mask = (self._words[_places(hashes, len(self._words))] & bits) == bits
        return held


def _places(hashes: Hashes, words: int) -> npt.NDArray[np.int64]:
    return (((hashes >> np.uint64(32)) * np.uint64(words)) >> np.uint64(32)).astype(np.int64)


def _bits(hashes: Hashes) -> Hashes:
    one, six = np.uint64(1), np.uint64(63)
    bits = one << (hashes & six)
    for shift in (6, 12, 18):
        bits |= one << ((hashes >> np.uint64(shift)) & six)
    return bits
