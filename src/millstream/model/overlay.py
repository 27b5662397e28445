"""What a batch has written to pairs of key and subkey so far: the side of a handle that lies over what is stored.

Rules
-----
- Writes are a log of columns, newest last; a pair is a number, and a write says which row of the log it put there.
  Writes are kept as sorted runs, each at least twice as long as the next: many small writes after a large one cost what
  they are, whatever the number of keys, of subkeys, and of what is stored.
- No loop over pairs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.model.batch import Batch
from millstream.model.kinds import Mask, Rows

GONE = -1
"""The row of a pair that was deleted."""


class Overlay:
    """Which pairs of a batch were touched, and which row of a log each of them has now."""

    def __init__(self, keys: int, kind: pa.DataType) -> None:
        self._keys = max(keys, 1)
        self._subkeys: pa.Array = pa.nulls(0, kind)
        self._runs: list[tuple[Rows, Rows]] = []
        """Ids in order, each once, and their rows; newest last."""

    def ids(self, places: Rows, subkeys: pa.Array) -> Rows:
        """The numbers of pairs; subkeys that are new get a number, too. One subkey stands for all places."""
        if not len(subkeys):
            return np.empty(0, np.int64)
        codes = pc.index_in(subkeys, value_set=self._subkeys)
        if codes.null_count:
            fresh = pc.unique(subkeys.filter(codes.is_null()))
            self._subkeys = pa.concat_arrays([self._subkeys, fresh])
            codes = pc.index_in(subkeys, value_set=self._subkeys)
        numbers: Rows = places + self._keys * codes.to_numpy().astype(np.int64)
        return numbers

    def places(self, ids: Rows) -> Rows:
        """The places of the keys of pairs."""
        return ids % self._keys

    def subkeys(self, ids: Rows) -> pa.Array:
        """The subkeys of pairs."""
        return self._subkeys.take(pa.array(ids // self._keys))

    def ranks(self, ids: Rows) -> Rows:
        """Numbers in the order of the pairs' subkeys."""
        ranks: Rows = pc.rank(self._subkeys, tiebreaker="dense").to_numpy().astype(np.int64)
        return ranks[ids // self._keys]

    def put(self, ids: Rows, rows: Rows) -> None:
        """Pairs have these rows now, or are gone. Of a pair that occurs twice, the last counts."""
        if len(ids):
            self._runs.append(_newest([(ids, rows)]))
            while len(self._runs) > 1 and len(self._runs[-2][0]) < 2 * len(self._runs[-1][0]):
                self._runs[-2:] = [_newest(self._runs[-2:])]

    def current(self, ids: Rows) -> tuple[Mask, Rows]:
        """Which of these pairs were touched, and their rows."""
        known, rows = np.zeros(len(ids), np.bool_), np.full(len(ids), GONE)
        for touched, theirs in reversed(self._runs):
            asked = np.flatnonzero(~known)
            at = np.minimum(np.searchsorted(touched, ids[asked]), len(touched) - 1)
            hits = touched[at] == ids[asked]
            known[asked[hits]], rows[asked[hits]] = True, theirs[at[hits]]
        return known, rows

    def touched(self) -> tuple[Rows, Rows]:
        """All pairs that were touched, in order of their numbers, and their rows."""
        if len(self._runs) > 1:
            self._runs = [_newest(self._runs)]
        return self._runs[0] if self._runs else (np.empty(0, np.int64), np.empty(0, np.int64))


def _newest(runs: list[tuple[Rows, Rows]]) -> tuple[Rows, Rows]:
    """Of each id the last row, in the order of ids."""
    ids, rows = np.concatenate([run[0] for run in runs]), np.concatenate([run[1] for run in runs])
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    last = order[np.append(ordered[1:] != ordered[:-1], True)]
    return ids[last], rows[last]


class Column:
    """Values that are kept by row number, as they come."""

    def __init__(self, kind: pa.DataType) -> None:
        self._parts: list[pa.Array] = [pa.nulls(0, kind)]
        self._count = 0

    def add(self, values: pa.Array) -> Rows:
        """Keeps values; their rows."""
        rows = np.arange(self._count, self._count + len(values))
        self._parts.append(values)
        self._count += len(values)
        return rows

    def take(self, rows: Rows) -> pa.Array:
        """The values of some rows; null where a row is `GONE`."""
        if len(self._parts) > 1:
            self._parts = [pa.concat_arrays(self._parts)]
        none = rows == GONE
        return self._parts[0].take(pa.array(rows, mask=none) if none.any() else pa.array(rows))


def places_in(whole: Batch, batch: Batch, name: str) -> Rows:
    """The places in the whole batch of the keys of a batch: of itself, or of a part of it."""
    if batch is whole:
        return np.arange(len(batch))
    if batch.whole is not whole:
        raise UserError(f"{name}: give the batch that on_batch or the callback was called with")
    return batch.places


def mask_of(batch: Batch, where: Any) -> Mask:
    """Which keys of a batch are meant: all, or those where a mask is true."""
    chosen = np.ones(len(batch), np.bool_) if where is None else np.asarray(where, np.bool_)
    if len(chosen) != len(batch):
        raise UserError(f"where has {len(chosen)} entries, {len(batch)} expected, one for each of batch.keys")
    return chosen
