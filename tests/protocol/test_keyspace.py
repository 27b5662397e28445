"""The hash is part of the format: known answers, collisions made on purpose, and the algebra of ranges."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import UserError
from millstream.protocol import keyspace
from millstream.protocol.keyspace import LAST, Range, clip, coalesce, hash_integers, hash_strings, hash_tuples, subtract

MASK = (1 << 64) - 1


def scalar_mix(x: int) -> int:
    """The definition, in plain Python."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def scalar_integer(value: int) -> int:
    return scalar_mix((value + 0x9E3779B97F4A7C15) & MASK)


def scalar_string(data: bytes) -> int:
    total = 0x6D696C6C73747265 + len(data) * 0xD1B54A32D192ED03
    for position in range(0, len(data), 8):
        word = int.from_bytes(data[position : position + 8].ljust(8, b"\0"), "little")
        total += scalar_mix((word + (position // 8 + 1) * 0x9E3779B97F4A7C15) & MASK)
    return scalar_mix(total & MASK)


def columns_of(strings: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.cumsum([0, *map(len, strings)]).astype(np.int64)
    return offsets, np.frombuffer(b"".join(strings), np.uint8)


def test_known_answers_never_change() -> None:
    assert [hex(h) for h in hash_integers(np.array([0, 1, -1, 2**63 - 1]))] == KNOWN_INTEGERS
    words = [b"", b"a", b"millstream", b"12345678", "Mühle".encode()]
    assert [hex(h) for h in hash_strings(*columns_of(words))] == KNOWN_STRINGS
    assert hex(keyspace.hash_nulls(1)[0]) == KNOWN_NULL
    pair = [hash_integers(np.array([1])), hash_strings(*columns_of([b"a"]))]
    assert hex(hash_tuples(pair)[0]) == KNOWN_PAIR


KNOWN_INTEGERS: list[str] = ["0xe220a8397b1dcdaf", "0x910a2dec89025cc1", "0xe4d971771b652c20", "0x2a67d7552e039ea7"]
KNOWN_STRINGS: list[str] = [
    "0xca7d67be98703ffd",
    "0x58f2f938fec4cb8d",
    "0x6cda98904f0425e7",
    "0xbe32ffe4c89aa35",
    "0x9a2a7fd6ac496f48",
]
KNOWN_NULL = "0x9a63c6065bd325c1"
KNOWN_PAIR = "0xc566482aaae3cf06"


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_the_vectorised_integer_hash_is_its_definition(values: list[int]) -> None:
    assert hash_integers(np.array(values, np.int64)).tolist() == [scalar_integer(v) for v in values]


@given(st.lists(st.binary(max_size=40)))
def test_the_vectorised_string_hash_is_its_definition(strings: list[bytes]) -> None:
    assert hash_strings(*columns_of(strings)).tolist() == [scalar_string(s) for s in strings]


def test_hashes_are_the_same_in_every_block() -> None:
    values = np.arange(100_000)
    whole = hash_integers(values)
    assert (whole[40_000:40_010] == hash_integers(values[40_000:40_010])).all()
    assert len(np.unique(whole)) == len(values)


def test_hashing_leaves_its_input_alone() -> None:
    values = np.arange(10)
    hash_integers(values)
    assert values.tolist() == list(range(10))


def test_keys_spread_evenly_over_bins() -> None:
    for hashes in (
        hash_integers(np.arange(1 << 16)),
        hash_strings(*columns_of([b"user-%d" % i for i in range(1 << 16)])),
    ):
        per_bin = np.bincount((hashes >> np.uint64(58)).astype(np.int64), minlength=64)
        assert per_bin.min() > 800
        assert per_bin.max() < 1250


ranges = st.tuples(st.integers(0, 400), st.integers(0, 400)).map(lambda p: Range(min(p), max(p)))


@given(st.lists(ranges), st.lists(ranges))
def test_range_algebra_is_that_of_sets_of_points(parts: list[Range], others: list[Range]) -> None:
    def points(items: tuple[Range, ...] | list[Range]) -> set[int]:
        return {p for item in items for p in range(item.first, item.last + 1)}

    whole = coalesce(parts)
    assert points(whole) == points(parts)
    holes = coalesce(others)
    rest = subtract(whole, holes)
    assert points(rest) == points(parts) - points(others)
    assert points(clip(whole, holes)) == points(parts) & points(others)
    assert all(a.last < b.first for a, b in pairwise(rest))
    assert all(a.last + 1 < b.first for a, b in pairwise(whole))


def test_a_range_outside_the_space_is_refused() -> None:
    with pytest.raises(UserError, match="not a range"):
        Range(5, 4)
    with pytest.raises(UserError, match="not a range"):
        Range(0, LAST + 1)
