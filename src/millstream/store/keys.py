"""Exact keys in columns: canonical form, hashes, equality and grouping, for whole batches at once.

Rules
-----
- Equality is Spark's groupBy: null equals null, NaN equals NaN, -0.0 equals 0.0, nothing else is folded.
- Two keys are the same only if their columns are equal. The hash decides where to look, never what is found (G1).
- Keys are ordered by (hash, key); the order of two keys with one hash is that of their canonical columns, and is the
  same in every process.
- Rows with a subkey (the last column: a timer's tag, an entry of a map) lie at the hash of the key alone, and are
  ordered by (hash, hash of the subkey, key): a key may have millions of them.
- No loop over rows, except over the rows of a hash that two different keys share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.protocol.keyspace import Hashes, hash_integers, hash_nulls, hash_strings, hash_tuples

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_RADIX_FROM = 1 << 14
_FEW_RUNS = 16
"""Up to so many runs that are in order already, merging them is quicker than sorting."""


@dataclass(frozen=True)
class KeyColumns:
    """The key columns of some rows, in canonical form."""

    columns: tuple[pa.Array, ...]

    def __len__(self) -> int:
        return len(self.columns[0])

    @classmethod
    def canonical(cls, columns: Sequence[pa.Array]) -> KeyColumns:
        """Columns as given, with -0.0 and the many NaNs folded into 0.0 and one NaN."""
        return cls(tuple(_fold_floats(column) if pa.types.is_floating(column.type) else column for column in columns))

    def take(self, rows: Rows) -> KeyColumns:
        return KeyColumns(tuple(column.take(pa.array(rows)) for column in self.columns))

    def part(self, start: int, length: int) -> KeyColumns:
        return KeyColumns(tuple(column.slice(start, length) for column in self.columns))

    def injective(self, subbed: bool = False) -> bool:
        """Whether equal hashes mean equal keys here: one column of 64-bit integers or less, without a null; two of
        them where the last is a subkey and has a hash of its own."""
        return len(self.columns) == 1 + subbed and all(
            _bits(column[:0]) is not None and column.null_count == 0 for column in self.columns
        )

    def hashes(self) -> Hashes:
        """Where each key lies in the key space."""
        return hash_tuples([_hash_column(column) for column in self.columns])

    def subs(self) -> Hashes:
        """The hashes of the subkeys: of the last column."""
        return _hash_column(self.columns[-1])

    def same(self, rows: Rows | slice, other: KeyColumns, other_rows: Rows | slice) -> Mask:
        """For each pair of rows, whether the keys are equal."""
        result: Mask | None = None
        for mine, theirs in zip(self.columns, other.columns, strict=True):
            equal = _equal(mine, rows, theirs, other_rows)
            result = equal if result is None else result & equal
        assert result is not None
        return result

    def identities(self, rows: Rows) -> list[tuple[Any, ...]]:
        """Comparable, hashable Python values that are equal exactly where the keys are. For few rows."""
        columns = []
        for column in self.columns:
            taken = column.take(pa.array(rows))
            bits = _bits(taken)
            plain = taken.to_pylist() if bits is None else bits.tolist()
            columns.append(
                [(1, v) if ok else (0, 0) for v, ok in zip(plain, taken.is_valid().to_pylist(), strict=True)]
            )
        return list(zip(*columns, strict=True))

    def to_pylist(self) -> list[Any]:
        """The keys as users see them: a scalar, or a tuple where there are several columns."""
        lists = [column.to_pylist() for column in self.columns]
        return lists[0] if len(lists) == 1 else list(zip(*lists, strict=True))


def concat_keys(parts: Sequence[KeyColumns]) -> KeyColumns:
    return KeyColumns(tuple(pa.concat_arrays(list(column)) for column in zip(*(p.columns for p in parts), strict=True)))


def arrange(hashes: Hashes, keys: KeyColumns, subs: Hashes | None = None) -> tuple[Rows, Rows]:
    """Sorts rows by (hash, key), or (hash, sub, key), keeping the given order among rows of one key.

    Returns the order, and the index in that order at which each distinct key begins.
    """
    if subs is None:
        order, ordered = _sorted(hashes)
        again = ordered[1:] == ordered[:-1]
    else:
        by_sub = np.argsort(subs, kind="stable")
        order, ordered = _sorted(hashes[by_sub])
        order = by_sub[order]
        inner = subs[order]
        again = (ordered[1:] == ordered[:-1]) & (inner[1:] == inner[:-1])
    repeats = np.flatnonzero(again) + 1
    fresh = np.ones(len(order), np.bool_)
    fresh[repeats] = False
    if len(repeats) and not keys.injective(subs is not None):
        differing = repeats[~keys.same(order[repeats], keys, order[repeats - 1])]
        if len(differing):
            _separate(order, fresh, keys, differing)
    return order, np.flatnonzero(fresh)


def _sorted(hashes: Hashes) -> tuple[Rows, Hashes]:
    """The stable order of hashes, and the hashes in that order.

    Rows of segments come in a few runs, which are merged. Otherwise, two radix passes over 16 bits each sort by the
    upper half of the hash, in linear time; hashes are spread evenly, so the few whose upper halves are equal are put
    right afterwards. About twice as fast as sorting whole hashes.
    """
    if len(hashes) < _RADIX_FROM or np.count_nonzero(hashes[1:] < hashes[:-1]) < _FEW_RUNS:
        order: Rows = np.argsort(hashes, kind="stable")  # a merge of the runs it finds
        return order, hashes[order]
    upper = (hashes >> np.uint64(32)).astype(np.uint32)
    low = np.argsort(upper.astype(np.uint16), kind="stable")
    order = low[np.argsort((upper >> np.uint32(16)).astype(np.uint16)[low], kind="stable")]
    ordered = hashes[order]
    wrong = np.flatnonzero(ordered[1:] < ordered[:-1])
    if len(wrong):
        halves = ordered >> np.uint64(32)
        torn = np.unique(halves[wrong])
        spans = zip(np.searchsorted(halves, torn, "left"), np.searchsorted(halves, torn, "right"), strict=True)
        places = np.concatenate([np.arange(start, stop) for start, stop in spans])
        order[places] = order[places[np.argsort(ordered[places], kind="stable")]]
        ordered = hashes[order]
    return order, ordered


def _separate(order: Rows, fresh: Mask, keys: KeyColumns, differing: Rows) -> None:
    """Sorts by key within each hash that several keys share, and marks where each key begins. In place."""
    edges = np.append(np.flatnonzero(fresh), len(order))
    for run in np.unique(np.searchsorted(edges, differing, side="right") - 1):
        start, stop = edges[run], edges[run + 1]
        rows = order[start:stop]
        identities = keys.identities(rows)
        ranked = sorted(range(len(rows)), key=lambda i, ids=identities: ids[i])  # type: ignore[misc]
        order[start:stop] = rows[ranked]
        for at in range(1, len(ranked)):
            fresh[start + at] = identities[ranked[at]] != identities[ranked[at - 1]]


# -- columns -------------------------------------------------------------------------------------------------


def _fold_floats(column: pa.Array) -> pa.Array:
    values = column.to_numpy(zero_copy_only=False) + 0.0  # -0.0 + 0.0 is 0.0
    values[np.isnan(values)] = np.nan
    mask = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    return pa.array(values.astype(column.type.to_pandas_dtype(), copy=False), column.type, mask=mask)


def _buffer(column: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    """The values of a fixed-width column, whatever stands where it is null."""
    data = column.buffers()[1]
    if data is None:
        return np.zeros(len(column), dtype)
    return np.frombuffer(data, dtype)[column.offset : column.offset + len(column)]


_WIDTHS = {pa.int8(): "i1", pa.int16(): "i2", pa.int32(): "i4", pa.int64(): "i8", pa.date32(): "i4"}


def _bits(column: pa.Array) -> npt.NDArray[np.int64] | None:
    """A 64-bit integer for each value that is equal exactly where values are; None for types without one."""
    kind = column.type
    if kind in _WIDTHS:
        return _buffer(column, _WIDTHS[kind]).astype(np.int64, copy=False)
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return _buffer(column, np.int64)
    if pa.types.is_boolean(kind):
        filled = column.fill_null(False) if column.null_count else column
        flags: npt.NDArray[np.int64] = filled.to_numpy(zero_copy_only=False).astype(np.int64)
        return flags
    if pa.types.is_float32(kind):
        wide: npt.NDArray[np.int64] = _buffer(column, np.float32).astype(np.float64).view(np.int64)
        return wide
    if pa.types.is_float64(kind):
        return _buffer(column, np.int64)
    return None


def _hash_column(column: pa.Array) -> Hashes:
    bits = _bits(column)
    if bits is not None:
        hashes = hash_integers(bits)
    elif pa.types.is_string(column.type) or pa.types.is_binary(column.type):
        raw, data = column.buffers()[1], column.buffers()[2]
        offsets = (
            np.zeros(1, np.int64)
            if raw is None or not len(column)
            else np.frombuffer(raw, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
        )
        first, last = int(offsets[0]), int(offsets[-1])
        letters = np.frombuffer(data, np.uint8)[first:last] if data is not None else np.zeros(0, np.uint8)
        hashes = hash_strings(offsets - first, letters)
    elif pa.types.is_decimal128(column.type):
        width = 16
        letters = _buffer(column, "V16").view(np.uint8)
        hashes = hash_strings(np.arange(len(column) + 1, dtype=np.int64) * width, letters)
    else:
        raise UserError(f"a column of type {column.type} cannot be a key")
    if column.null_count:
        nulls = column.is_null().to_numpy(zero_copy_only=False)
        hashes[nulls] = hash_nulls(int(nulls.sum()))
    return hashes


def _equal(mine: pa.Array, rows: Rows | slice, theirs: pa.Array, other_rows: Rows | slice) -> Mask:
    a, b = _taken(mine, rows), _taken(theirs, other_rows)  # first: the columns may be those of a large segment
    left, right = _bits(a), _bits(b)
    equal: Mask
    if left is not None and right is not None:
        equal = left == right
    else:
        equal = pc.fill_null(pc.equal(a, b), False).to_numpy(zero_copy_only=False)
    if not (a.null_count or b.null_count):
        return equal
    absent, absent_too = _nulls(a), _nulls(b)
    return np.where(absent | absent_too, absent & absent_too, equal)


def _taken(column: pa.Array, rows: Rows | slice) -> pa.Array:
    return column[rows] if isinstance(rows, slice) else column.take(pa.array(rows))


def _nulls(column: pa.Array) -> Mask:
    mask: Mask = column.is_null().to_numpy(zero_copy_only=False)
    return mask
