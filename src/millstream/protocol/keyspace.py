"""The key space: every key hashes to a point of a 64-bit space, and state is addressed by ranges of it.

Rules
-----
- The hash is part of the on-disk format: stable across processes, platforms and releases. Changing any constant
  here makes every store unreadable; `tests/protocol/test_keyspace.py` holds known answers.
- The hash only *places* a key. It never identifies one: exact keys are stored and compared (G1), so a collision
  costs a comparison, not an answer.
- Integers are hashed by value, whatever their width, by a bijection: two different 64-bit integers never collide.
- Everything is vectorised: no Python loop over keys, strings or bins.

Definition
----------
`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by D. Stafford, "Mix13").

    integer v            mix(v + GOLDEN)
    bytes b_0..b_(n-1)   mix(SEED + n*LENGTH + sum_i mix(w_i + (i+1)*GOLDEN)), w_i the i-th little-endian 8-byte
                         word of the bytes, the last one padded with zeros
    null                 mix(NULL)
    tuple (c_1..c_m)     h_0 = m;  h_i = mix(h_(i-1)*TUPLE + hash(c_i));  the hash is h_m   (m >= 2)

A sum of mixed words can be computed for a whole column at once, however long its longest string is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import numpy.typing as npt

from millstream.errors import UserError

Hashes = npt.NDArray[np.uint64]
Bin = NewType("Bin", int)

LAST = (1 << 64) - 1
"""The last point of the key space."""

DEFAULT_BIN_BITS = 12

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_SEED = np.uint64(0x6D696C6C73747265)
_LENGTH = np.uint64(0xD1B54A32D192ED03)
_TUPLE = np.uint64(0xA0761D6478BD642F)
_NULL = np.uint64(0xE7037ED1A0B428DB)

_BLOCK = 1 << 15  # elements mixed at a time: the working set stays in the second-level cache


def mix(values: Hashes) -> Hashes:
    """A bijection of the 64-bit integers that spreads every input bit over the whole word. Works in place."""
    scratch = np.empty(min(len(values), _BLOCK), np.uint64)
    for start in range(0, len(values), _BLOCK):
        x = values[start : start + _BLOCK]
        t = scratch[: len(x)]
        for shift, factor in ((30, _C1), (27, _C2), (31, None)):
            np.right_shift(x, np.uint64(shift), out=t)
            np.bitwise_xor(x, t, out=x)
            if factor is not None:
                np.multiply(x, factor, out=x)
    return values


def hash_integers(values: npt.NDArray[np.int64] | Hashes) -> Hashes:
    """Hashes of 64-bit integers (signed ones by their two's complement)."""
    return mix(values.view(np.uint64) + _GOLDEN)


def hash_strings(offsets: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> Hashes:
    """Hashes of `len(offsets) - 1` byte strings; string i is `data[offsets[i]:offsets[i + 1]]`."""
    starts = offsets[:-1]
    lengths = np.diff(offsets)
    words_of = (lengths + 7) >> 3
    total = int(words_of.sum())
    sums = np.zeros(len(starts), np.uint64)
    if total:
        padded = np.empty(len(data) + 8, np.uint8)
        padded[: len(data)] = data
        padded[len(data) :] = 0
        at_any_byte: Hashes = np.ndarray((len(data) + 1,), "<u8", padded, strides=(1,))
        ends = np.cumsum(words_of)
        first_word = ends - words_of
        position = np.arange(total, dtype=np.int64) - np.repeat(first_word, words_of)
        words = at_any_byte[np.repeat(starts, words_of) + (position << 3)]
        tail = lengths & 7
        cut = tail != 0  # strings whose last word reaches beyond their end
        keep_bits = (tail[cut] << 3).astype(np.uint64)
        words[ends[cut] - 1] &= (np.uint64(1) << keep_bits) - np.uint64(1)
        words += (position + 1).view(np.uint64) * _GOLDEN
        mix(words)
        filled = words_of != 0
        sums[filled] = np.add.reduceat(words, first_word[filled])
    sums += _SEED
    sums += lengths.view(np.uint64) * _LENGTH
    return mix(sums)


def hash_nulls(count: int) -> Hashes:
    """The hash of null, `count` times."""
    return mix(np.full(count, _NULL))


def hash_tuples(columns: Sequence[Hashes]) -> Hashes:
    """Hashes of tuples, from the hashes of their members. A tuple of one is its member."""
    if len(columns) == 1:
        return columns[0]
    result = np.full(len(columns[0]), np.uint64(len(columns)))
    for column in columns:
        result *= _TUPLE
        result += column
        mix(result)
    return result


@dataclass(frozen=True, slots=True, order=True)
class Range:
    """The points `first..last` of the key space, both included (so that the whole space is a range)."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last <= LAST:
            raise UserError(f"not a range of the key space: first {self.first:#x}, last {self.last:#x}")

    def __str__(self) -> str:
        return f"{self.first:016x}-{self.last:016x}"

    def __contains__(self, point: int) -> bool:
        return self.first <= point <= self.last

    @property
    def width(self) -> int:
        return self.last - self.first + 1

    def overlap(self, other: Range) -> Range | None:
        """The points in both, or None.

        >>> Range(0, 9).overlap(Range(5, 20))
        Range(first=5, last=9)
        """
        first, last = max(self.first, other.first), min(self.last, other.last)
        return Range(first, last) if first <= last else None


WHOLE = Range(0, LAST)


def width(ranges: Sequence[Range]) -> int:
    """How many points lie in these disjoint ranges."""
    return sum(item.width for item in ranges)


def coalesce(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same points in the fewest ranges, in order.

    >>> coalesce([Range(10, 19), Range(0, 9), Range(30, 39)])
    (Range(first=0, last=19), Range(first=30, last=39))
    """
    merged: list[Range] = []
    for item in sorted(ranges):
        if merged and item.first <= merged[-1].last + 1:
            merged[-1] = Range(merged[-1].first, max(merged[-1].last, item.last))
        else:
            merged.append(item)
    return tuple(merged)


def clip(ranges: Sequence[Range], within: Sequence[Range]) -> tuple[Range, ...]:
    """The points of `ranges` that are also in `within`; both are in order and disjoint."""
    result, i, j = [], 0, 0
    while i < len(ranges) and j < len(within):
        one, other = ranges[i], within[j]
        first, last = max(one.first, other.first), min(one.last, other.last)
        if first <= last:
            result.append(one if (first, last) == (one.first, one.last) else Range(first, last))
        if one.last < other.last:
            i += 1
        else:
            j += 1
    return tuple(result)


def subtract(ranges: Sequence[Range], holes: Sequence[Range]) -> tuple[Range, ...]:
    """The points of `ranges` that are in none of `holes`; both are in order and disjoint.

    >>> subtract([Range(0, 9)], [Range(3, 5), Range(8, 20)])
    (Range(first=0, last=2), Range(first=6, last=7))
    """
    result, at = [], 0
    for item in ranges:
        first = item.first
        while at < len(holes) and holes[at].last < first:
            at += 1
        reached = at
        while reached < len(holes) and holes[reached].first <= item.last:
            if first < holes[reached].first:
                result.append(Range(first, holes[reached].first - 1))
            first = holes[reached].last + 1
            reached += 1
        if first <= item.last:
            result.append(item if first == item.first else Range(first, item.last))
    return tuple(result)


def bin_range(number: Bin, bits: int) -> Range:
    """The range of one of the 2^bits bins.

    >>> print(bin_range(Bin(1), 4))
    1000000000000000-1fffffffffffffff
    """
    width = 1 << (64 - bits)
    return Range(number * width, (number + 1) * width - 1)


def bin_edges(parts: int, bits: int) -> list[int]:
    """The first points of `parts` consecutive ranges that cover the space, cut at bins, as even as bins allow."""
    bins = 1 << bits
    if not 1 <= parts <= bins:
        raise UserError(f"cannot cut {bins} bins into {parts} parts; give between 1 and {bins}")
    return [(part * bins // parts) << (64 - bits) for part in range(parts)]
