"""A bag per key: values that are appended without reading what is there.

Rules
-----
- What an epoch appends to a key is one row, a list, under the number of the epoch. So appending costs what is appended,
  and reading gives the values in the order in which they were appended.
- Clearing writes a tombstone for each of those rows; only the key's own are looked for.
- As with `Value`: what is read or appended is a copy, and what a failed batch appended is gone with its handles.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.batch import Batch
from millstream.model.copies import copier
from millstream.model.fits import fitting
from millstream.model.kinds import Changed, Mask, Rows, State, check_fit, encoded_values
from millstream.model.maps import ReadAhead, StoredEntries
from millstream.model.overlay import mask_of, places_in
from millstream.model.pickled import dumped, dumped_all, loaded
from millstream.model.times import WALL_TIME


class Bag(State):
    """Any number of values per key, appended without reading what is there.

    >>> import millstream as ms
    >>> class Basket(ms.Computation):
    ...     items = ms.Bag("struct<item: string, price: double>", ttl="1 day")
    ...     output = "user string, total double"
    ...
    ...     def on_record(self, row, at):
    ...         if row.item is not None:
    ...             self.items.append((row.item, row.price))
    ...         else:
    ...             yield at.key, sum(each["price"] for each in self.items.read())
    ...             self.items.clear()

    `type` is a Spark DDL type, or `object` for any Python value that can be pickled. Inside `on_record`:
    `append(value)`, `read()` (a list, in the order of appending), `exists()` and `clear()`. Inside `on_batch`:
    `append(batch, values)` with a value for each record, or for each of `places`; `read(batch)`, an Arrow array of
    lists, one for each of `batch.keys`, or `read(batch, where=mask)`; `exists(batch)` and `clear(batch)`.

    A `ttl` counts from the epoch of each append; see `Value`.
    """

    def __init__(self, type: str | type[object] = "", *, ttl: Any = None, ttl_time: str = WALL_TIME) -> None:
        super().__init__(type, ttl=ttl, ttl_time=ttl_time)
        self.subkey_type = pa.int64()

    @property
    def subkey_column(self) -> str:
        return f"{self.name}_epoch"

    @property
    def stored_text(self) -> str:
        return f"BAG {super().stored_text}"

    @property
    def stored_type(self) -> pa.DataType:
        return pa.list_(self.arrow_type)

    # What users call is on the handle that replaces this declaration on the running instance.

    def append(self, value: Any, values: Any = None, places: Any = None) -> None:
        """Appends a value to the current key's bag (in `on_record`), or values to those of a batch."""
        raise self._unbound("append")

    def read(self, batch: Batch | None = None, where: Mask | None = None) -> Any:
        """The values of the current key (a list), or of the keys of a batch (an Arrow array of lists); of those where
        `where` is true, others are not looked up and have empty lists."""
        raise self._unbound("read")

    def exists(self, batch: Batch | None = None) -> Any:
        """Whether the current key's bag, or that of each key of a batch, holds anything."""
        raise self._unbound("exists")

    def clear(self, batch: Batch | None = None, where: Mask | None = None) -> None:
        """Empties the bag of the current key, or those of the keys of a batch (of those where `where` is true)."""
        raise self._unbound("clear")


class _Bags:
    """The bags of all keys of a batch: what is stored, read when it is asked for, and which were cleared."""

    def __init__(self, declared: Bag, batch: Batch, stored: StoredEntries) -> None:
        self._declared, self._batch, self._stored = declared, batch, stored
        self._cleared = np.zeros(len(batch), np.bool_)

    def _kept(self, places: Rows) -> tuple[Rows, pa.Array]:
        """What is stored and not cleared, of keys in order: places and lists."""
        places = places[~self._cleared[places]]
        owners, _, lists = self._stored.entries(places)
        return owners, lists

    def _tombstones(self) -> tuple[Rows, pa.Array]:
        owners, epochs, _ = self._stored.entries(np.flatnonzero(self._cleared))
        return owners, epochs

    def _changed(self, places: Rows, values: pa.Array) -> Changed | None:
        """From what was appended, in order, with the places of the keys it was appended to."""
        gone, epochs = self._tombstones() if self._cleared.any() else (np.empty(0, np.int64), pa.nulls(0, pa.int64()))
        if not len(places) and not len(gone):
            return None
        order = np.argsort(places, kind="stable")
        ordered = places[order]
        starts = np.flatnonzero(np.concatenate((np.ones(min(len(ordered), 1), np.bool_), ordered[1:] != ordered[:-1])))
        offsets = pa.array(np.append(starts, len(ordered)).astype(np.int32))
        appended = pa.ListArray.from_arrays(offsets, values.take(pa.array(order)))
        kind = self._declared.stored_type
        return Changed(
            np.concatenate([ordered[starts], gone]),
            pa.concat_arrays([pa.array(np.full(len(starts), self._batch.epoch), pa.int64()), epochs]),
            pa.concat_arrays([appended.cast(kind), pa.nulls(len(gone), kind)]),
            np.concatenate([np.zeros(len(starts), np.bool_), np.ones(len(gone), np.bool_)]),
        )


class BatchBag(_Bags):
    """The handle of a `Bag` in a computation that has `on_batch`."""

    def __init__(self, declared: Bag, batch: Batch, stored: StoredEntries) -> None:
        super().__init__(declared, batch, stored)
        self._places: list[Rows] = []
        self._values: list[pa.Array] = []

    def append(self, batch: Batch, values: Any, places: Any = None) -> None:
        name = self._declared.name
        if places is None:
            places = np.repeat(np.arange(len(batch)), batch.count())
        given = np.asarray(places, np.int64)
        if len(given) != len(values):
            raise UserError(
                f"{name}.append: {len(values)} values found, {len(given)} expected, one for each record or place"
            )
        if len(given) and (given.min() < 0 or given.max() >= len(batch)):
            raise UserError(
                f"{name}: places from {given.min()} to {given.max()} found, the batch has {len(batch)} keys"
            )
        if self._declared.is_object:
            encoded = pa.array(dumped_all(self._declared.what, values), pa.binary())
        else:
            encoded = self._declared.encode_given(values)
        self._places.append(places_in(self._batch, batch, name)[given])
        self._values.append(encoded)

    def read(self, batch: Batch, where: Mask | None = None) -> Any:
        wanted, chosen = places_in(self._batch, batch, self._declared.name), mask_of(batch, where)
        owners, lists = self._kept(np.sort(wanted[chosen]))
        appended, values = self._appended()
        inside = np.full(len(self._batch), -1)
        inside[wanted[chosen]] = np.flatnonzero(chosen)
        stored_owner = (
            np.repeat(owners, lists.value_lengths().to_numpy(zero_copy_only=False)) if len(owners) else owners
        )
        owner = inside[np.concatenate([stored_owner, appended])]
        everything = pa.concat_arrays([lists.flatten(), values])
        mine = np.flatnonzero(owner >= 0)
        order = mine[np.argsort(owner[mine], kind="stable")]
        counts = np.bincount(owner[mine], minlength=len(wanted))
        offsets = pa.array(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        taken = everything.take(pa.array(order))
        if self._declared.is_object:
            objects = [loaded(self._declared.what, data) for data in taken.to_pylist()]
            edges = offsets.to_pylist()
            return [objects[start:stop] for start, stop in pairwise(edges)]
        return pa.ListArray.from_arrays(offsets, taken)

    def exists(self, batch: Batch) -> Mask:
        wanted = places_in(self._batch, batch, self._declared.name)
        present = np.zeros(len(self._batch), np.bool_)
        present[self._kept(np.sort(wanted))[0]] = True
        present[self._appended()[0]] = True
        return present[wanted]

    def clear(self, batch: Batch, where: Mask | None = None) -> None:
        chosen = places_in(self._batch, batch, self._declared.name)[mask_of(batch, where)]
        self._cleared[chosen] = True
        places, values = self._appended()
        kept = ~np.isin(places, chosen)
        self._places, self._values = [places[kept]], [values.filter(pa.array(kept))]

    def changes(self) -> Changed | None:
        return self._changed(*self._appended())

    def _appended(self) -> tuple[Rows, pa.Array]:
        if len(self._places) != 1:
            self._places = [np.concatenate([np.empty(0, np.int64), *self._places])]
            self._values = [pa.concat_arrays([pa.nulls(0, self._declared.arrow_type), *self._values])]
        return self._places[0], self._values[0]


class RecordBag(_Bags):
    """The handle of a `Bag` in a computation that has `on_record`: one of the keys is current."""

    def __init__(self, declared: Bag, batch: Batch, stored: StoredEntries) -> None:
        super().__init__(declared, batch, stored)
        self.index = 0
        self._added: dict[int, list[Any]] = {}
        self._ahead = ReadAhead(stored, len(batch), _in_order)
        self._copied = copier(declared.arrow_type)
        self._fits = fitting(declared.arrow_type)
        self._before: tuple[bool, int, list[Any]] = (False, 0, [])

    def append(self, value: Any) -> None:
        if self._declared.is_object:
            value = dumped(self._declared.what, value)
        else:
            value = self._copied(value)
        self._added.setdefault(self.index, []).append(value)

    def read(self) -> list[Any]:
        current = [*self._stored_now(), *self._added.get(self.index, ())]
        if self._declared.is_object:
            return [loaded(self._declared.what, data) for data in current]
        return [self._copied(value) for value in current]

    def exists(self) -> bool:
        return bool(self._added.get(self.index) or self._stored_now())

    def clear(self) -> None:
        self._cleared[self.index] = True
        self._added.pop(self.index, None)

    def saved(self) -> tuple[bool, int, list[Any]]:
        """What `restore` needs to undo the changes that follow."""
        mine = self._added.get(self.index, [])
        self._before = bool(self._cleared[self.index]), len(mine), mine
        return self._before

    def restore(self, before: tuple[bool, int, list[Any]]) -> None:
        """Undoes what was changed since `saved`."""
        self._cleared[self.index], count, mine = before
        self._added[self.index] = mine
        del mine[count:]

    def check(self) -> None:
        """Raises if a value that was appended since `saved` does not fit the declared type."""
        _, count, mine = self._before
        added = self._added.get(self.index, [])
        if not self._declared.is_object:
            for value in added[count:] if added is mine else added:
                check_fit(self._declared, self._fits, value, self.index)

    def changes(self) -> Changed | None:
        places = np.repeat(list(self._added), [len(values) for values in self._added.values()]).astype(np.int64)
        values = [value for added in self._added.values() for value in added]
        encoded = encoded_values(self._declared, values, places) if values else pa.nulls(0, self._declared.arrow_type)
        return self._changed(places, encoded)

    def _stored_now(self) -> list[Any]:
        return [] if self._cleared[self.index] else self._ahead.of(self.index)


def _in_order(entries: list[tuple[int, list[Any]]]) -> list[Any]:
    return [value for _, values in entries for value in values]
