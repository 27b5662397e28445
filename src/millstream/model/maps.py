"""A map per key: how it is declared, and the handles through which a computation reads and writes its entries.

Rules
-----
- An entry is stored by itself: setting one of a million reads and writes one. Keys of entries are scalars, never null.
- In `on_batch`, entries are pairs: `places` says which of `batch.keys`, `subkeys` which entry of it. Only what is asked
  for is read.
- In `on_record`, the entries of a key are all read when the first of them is asked for; setting and deleting read
  nothing.
- As with `Value`: what is read or written is a copy, and what a failed batch wrote is gone with its handles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.model.arrays import array_from, python_values
from millstream.model.batch import Batch
from millstream.model.copies import copier
from millstream.model.fits import fitting
from millstream.model.kinds import Changed, Mask, Rows, State, check_fit, encoded_values, object_array
from millstream.model.overlay import GONE, Column, Overlay, mask_of, places_in
from millstream.model.pickled import dumped, dumped_all, loaded
from millstream.model.state import Stored
from millstream.model.times import WALL_TIME
from millstream.model.types import check_key_type, format_type, parse_type

LOAD_ENTRIES = 200_000
"""About how many entries `on_record` reads ahead."""


class Map(State):
    """A map per key, from scalars to values, of which only those entries are read that are asked for.

    >>> import millstream as ms
    >>> class Pages(ms.Computation):
    ...     visits = ms.Map("string", "long", default=0)
    ...     output = "user string, page string, visits long"
    ...
    ...     def on_record(self, row, at):
    ...         self.visits.set(row.page, self.visits.get(row.page) + 1)
    ...         yield at.key, row.page, self.visits.get(row.page)

    `subkey` and `type` are Spark DDL types; values may also be `object`, any Python value that can be pickled. Inside
    `on_record`: `get(subkey)`, `set(subkey, value)`, `exists(subkey)`, `delete(subkey)`, `items()` in the order of
    subkeys, and `clear()`. Inside `on_batch` the same for many entries at once, with `places` that say of which of
    `batch.keys` each entry is: `read(batch, places, subkeys)`, `write(batch, places, subkeys, values)`,
    `exists(batch, places, subkeys)`, `delete(batch, places, subkeys)`, `items(batch)` and `clear(batch)`.

    A `ttl` counts for each entry by itself; see `Value`.
    """

    def __init__(
        self,
        subkey: str = "",
        type: str | type[object] = "",
        *,
        default: Any = None,
        ttl: Any = None,
        ttl_time: str = WALL_TIME,
    ) -> None:
        super().__init__(type, default=default, ttl=ttl, ttl_time=ttl_time)
        if not isinstance(subkey, str) or not subkey:
            raise UserError('a Map needs the types of its keys and values, such as Map("string", "long")')
        self.subkey_type = parse_type(subkey)
        check_key_type(self.subkey_type)
        if pa.types.is_floating(self.subkey_type):
            raise UserError(f"Map({subkey!r}, ...): floating-point numbers cannot be keys of a map; use decimal")

    @property
    def subkey_text(self) -> str:
        return format_type(self.subkey_type)

    @property
    def stored_text(self) -> str:
        return f"MAP {self.subkey_text} {super().stored_text}"

    # What users call is on the handle that replaces this declaration on the running instance.

    def get(self, subkey: Any) -> Any:
        """The value of an entry of the current key, the default if there is none. In `on_record`."""
        raise self._unbound("get")

    def set(self, subkey: Any, value: Any) -> None:
        """Sets an entry of the current key. In `on_record`."""
        raise self._unbound("set")

    @overload
    def exists(self, batch: Any) -> bool: ...
    @overload
    def exists(self, batch: Batch, places: Any, subkeys: Any) -> Mask: ...
    def exists(self, batch: Any, places: Any = None, subkeys: Any = None) -> bool | Mask:
        """Whether the current key has an entry (in `on_record`), or whether pairs of a batch are there."""
        raise self._unbound("exists")

    def delete(self, batch: Any, places: Any = None, subkeys: Any = None) -> None:
        """Deletes an entry of the current key (in `on_record`), or pairs of a batch."""
        raise self._unbound("delete")

    @overload
    def items(self) -> list[tuple[Any, Any]]: ...
    @overload
    def items(self, batch: Batch, where: Mask | None = None) -> Items: ...
    def items(self, batch: Batch | None = None, where: Mask | None = None) -> Any:
        """All entries of the current key, or of the keys of a batch (of those where `where` is true)."""
        raise self._unbound("items")

    def clear(self, batch: Batch | None = None, where: Mask | None = None) -> None:
        """Deletes all entries of the current key, or of the keys of a batch (of those where `where` is true)."""
        raise self._unbound("clear")

    def read(self, batch: Batch, places: Any, subkeys: Any) -> Any:
        """The values of pairs of a batch; null where there is none, or the default. In `on_batch`."""
        raise self._unbound("read")

    def write(self, batch: Batch, places: Any, subkeys: Any, values: Any) -> None:
        """Sets pairs of a batch; of a pair that occurs twice, the last counts. In `on_batch`."""
        raise self._unbound("write")


@dataclass(frozen=True, slots=True)
class Items:
    """Entries of the keys of a batch, ordered by place and then by subkey."""

    places: Rows
    """Of which of `batch.keys` each entry is."""
    subkeys: pa.Array
    """Their subkeys."""
    values: Any
    """Their values: NumPy where the map has a default and its values are numbers or booleans, else Arrow; an array of
    Python objects for a map of objects."""


class StoredEntries(Protocol):
    """What a handle needs to know of the store. Places are in order."""

    def look(self, places: Rows, subkeys: pa.Array) -> Stored:
        """What is stored under pairs."""
        ...

    def entries(self, places: Rows) -> tuple[Rows, pa.Array, pa.Array]:
        """All that is stored under keys: places, subkeys and values, ordered by place and then by subkey."""
        ...


class BatchMap:
    """The handle of a `Map` in a computation that has `on_batch`."""

    def __init__(self, declared: Map, batch: Batch, stored: StoredEntries) -> None:
        self._declared, self._batch, self._stored = declared, batch, stored
        assert declared.subkey_type is not None
        self._over = Overlay(len(batch), declared.subkey_type)
        self._values = Column(declared.arrow_type)

    def read(self, batch: Batch, places: Any, subkeys: Any) -> Any:
        whole, keys = self._pairs(batch, places, subkeys)
        known, rows = self._over.current(self._over.ids(whole, keys))
        values = self._values.take(rows)
        if not known.all():
            values = self._merged(values, known, whole, keys)
        return self._shown(values)

    def _merged(self, values: pa.Array, known: Mask, places: Rows, subkeys: pa.Array) -> pa.Array:
        """Values of touched pairs, and stored ones of all others."""
        asked = np.flatnonzero(~known)
        asked = asked[np.argsort(places[asked], kind="stable")]
        stored = self._stored.look(places[asked], subkeys.take(pa.array(asked))).arrow(self._declared.arrow_type)
        at = np.arange(len(values))
        at[asked] = len(values) + np.arange(len(asked))
        return pa.concat_arrays([values, stored]).take(pa.array(at))

    def exists(self, batch: Batch, places: Any, subkeys: Any) -> Mask:
        whole, keys = self._pairs(batch, places, subkeys)
        known, rows = self._over.current(self._over.ids(whole, keys))
        present: Mask = rows != GONE
        asked = np.flatnonzero(~known)
        if len(asked):
            asked = asked[np.argsort(whole[asked], kind="stable")]
            present[asked] = self._stored.look(whole[asked], keys.take(pa.array(asked))).present()
        return present

    def write(self, batch: Batch, places: Any, subkeys: Any, values: Any) -> None:
        whole, keys = self._pairs(batch, places, subkeys)
        if len(values) != len(whole):
            raise UserError(f"{self._declared.name}.write: {len(values)} values found, {len(whole)} expected")
        if self._declared.is_object:
            encoded = pa.array(dumped_all(self._declared.what, values), pa.binary())
        else:
            encoded = self._declared.encode_given(values)
        self._over.put(self._over.ids(whole, keys), self._values.add(encoded))

    def delete(self, batch: Batch, places: Any, subkeys: Any) -> None:
        whole, keys = self._pairs(batch, places, subkeys)
        self._over.put(self._over.ids(whole, keys), np.full(len(whole), GONE))

    def items(self, batch: Batch, where: Mask | None = None) -> Items:
        whole, subkeys, values = self._entries(batch, where)
        inside = np.full(len(self._batch), -1)
        inside[places_in(self._batch, batch, self._declared.name)] = np.arange(len(batch))
        return Items(inside[whole], subkeys, self._shown(values))

    def clear(self, batch: Batch, where: Mask | None = None) -> None:
        whole, subkeys, _ = self._entries(batch, where)
        self._over.put(self._over.ids(whole, subkeys), np.full(len(whole), GONE))

    def changes(self) -> Changed | None:
        ids, rows = self._over.touched()
        if not len(ids):
            return None
        return Changed(self._over.places(ids), self._over.subkeys(ids), self._filled(rows), rows == GONE)

    def _filled(self, rows: Rows) -> pa.Array:
        """Values as they are stored: a state with a default holds no null, not even where a row is gone."""
        values = self._values.take(rows)
        if self._declared.default is None or self._declared.is_object:
            return values
        return values.fill_null(pa.scalar(self._declared.default, values.type)) if values.null_count else values

    def _entries(self, batch: Batch, where: Mask | None) -> tuple[Rows, pa.Array, pa.Array]:
        """All entries of the chosen keys as they are now, by place in the whole batch and subkey."""
        chosen = places_in(self._batch, batch, self._declared.name)[mask_of(batch, where)]
        chosen = np.sort(chosen)
        whole, subkeys, values = self._stored.entries(chosen)
        ids, rows = self._over.touched()
        if not len(ids):
            return whole, subkeys, values
        known, _ = self._over.current(self._over.ids(whole, subkeys))
        ids, rows = ids[rows != GONE], rows[rows != GONE]
        mine = np.isin(self._over.places(ids), chosen)
        ids, rows = ids[mine], rows[mine]
        kept = pa.array(~known)
        whole = np.concatenate([whole[~known], self._over.places(ids)])
        subkeys = pa.concat_arrays([subkeys.filter(kept), self._over.subkeys(ids)])
        values = pa.concat_arrays([values.filter(kept), self._values.take(rows)])
        table = pa.table({"place": whole, "subkey": subkeys})
        order = pc.sort_indices(table, [("place", "ascending"), ("subkey", "ascending")])
        return whole[order.to_numpy()], subkeys.take(order), values.take(order)

    def _pairs(self, batch: Batch, places: Any, subkeys: Any) -> tuple[Rows, pa.Array]:
        name, kind = self._declared.name, self._declared.subkey_type
        given = np.asarray(places, np.int64)
        keys = array_from(subkeys, kind)
        if len(given) != len(keys):
            raise UserError(f"{name}: {len(given)} places and {len(keys)} subkeys found; give one for each entry")
        if keys.null_count:
            raise UserError(f"{name}: {keys.null_count} of the subkeys are null; a key of a map cannot be")
        if len(given) and (given.min() < 0 or given.max() >= len(batch)):
            raise UserError(
                f"{name}: places from {given.min()} to {given.max()} found, the batch has {len(batch)} keys"
            )
        return places_in(self._batch, batch, name)[given], keys

    def _shown(self, values: pa.Array) -> Any:
        declared = self._declared
        if declared.is_object:
            default, what = declared.fresh_default, declared.what
            return object_array([default() if data is None else loaded(what, data) for data in values.to_pylist()])
        if declared.default is not None and values.null_count:
            values = values.fill_null(pa.scalar(declared.default, values.type))
        if not declared.is_numpy:
            return values
        numbers = values.to_numpy(zero_copy_only=False)
        return numbers if numbers.flags.writeable else numbers.copy()


_DELETED = object()

Kept = TypeVar("Kept")


class ReadAhead(Generic[Kept]):
    """The stored entries of keys, read when they are first asked for. Keys are visited in order, so the next ones are
    read as well: twice as many each time, until that gives very many entries, or few of them are asked for."""

    def __init__(self, stored: StoredEntries, count: int, make: Callable[[list[tuple[Any, Any]]], Kept]) -> None:
        self._stored, self._count, self._make = stored, count, make
        self._loaded: dict[int, Kept] = {}
        self._ahead = 64
        self._last, self._unasked = 0, set[int]()  # how many were read last, and those of them nobody has asked for

    def of(self, index: int) -> Kept:
        """The entries of a key."""
        self._unasked.discard(index)
        if index not in self._loaded:
            used = 2 * len(self._unasked) <= self._last
            places = np.arange(index, min(index + self._ahead, self._count))
            places = places[[place not in self._loaded for place in places.tolist()]]
            owners, subkeys, values = self._stored.entries(places)
            pairs = list(zip(python_values(subkeys), python_values(values), strict=True))
            edges = np.searchsorted(owners, places, side="left").tolist()
            ends = [*edges[1:], len(pairs)]
            for place, start, end in zip(places.tolist(), edges, ends, strict=True):
                self._loaded[place] = self._make(pairs[start:end])
            self._ahead = max(1, self._ahead * 2 if used and len(owners) < LOAD_ENTRIES // 2 else self._ahead // 2)
            self._last, self._unasked = len(places), set(places.tolist()) - {index}
        return self._loaded[index]


class RecordMap:
    """The handle of a `Map` in a computation that has `on_record`: one of the keys is current."""

    def __init__(self, declared: Map, batch: Batch, stored: StoredEntries) -> None:
        self._declared = declared
        self.index = 0
        self._ahead = ReadAhead(stored, len(batch), dict)
        self._changed: dict[int, dict[Any, Any]] = {}
        self._undo: list[tuple[Any, Any]] | None = None
        self._copied = copier(declared.arrow_type)
        self._fits = fitting(declared.arrow_type)

    def get(self, subkey: Any) -> Any:
        value = self._now(self._exact(subkey))
        return self._declared.fresh_default() if value is _DELETED else self._out(value)

    def exists(self, subkey: Any) -> bool:
        return self._now(self._exact(subkey)) is not _DELETED

    def set(self, subkey: Any, value: Any) -> None:
        if self._declared.is_object:
            value = dumped(self._declared.what, value)
        else:
            value = self._copied(value)
        self._put(self._exact(subkey), value)

    def delete(self, subkey: Any) -> None:
        self._put(self._exact(subkey), _DELETED)

    def items(self) -> list[tuple[Any, Any]]:
        current = {**self._stored_now(), **self._changed.get(self.index, {})}
        return [(subkey, self._out(current[subkey])) for subkey in sorted(current) if current[subkey] is not _DELETED]

    def clear(self) -> None:
        for subkey in {**self._stored_now(), **self._changed.get(self.index, {})}:
            self._put(subkey, _DELETED)

    def saved(self) -> None:
        """From now on, changes can be undone."""
        self._undo = []

    def restore(self, _: None) -> None:
        """Undoes what was changed since `saved`."""
        mine = self._changed.get(self.index, {})
        for subkey, before in reversed(self._undo or []):
            if before is None:
                mine.pop(subkey, None)
            else:
                [mine[subkey]] = before
        self._undo = []

    def check(self) -> None:
        """Raises if a value that was set since `saved` does not fit the declared type."""
        mine = self._changed.get(self.index, {})
        for subkey, _ in self._undo or ():
            value = mine[subkey]
            if value is not _DELETED and not self._declared.is_object:
                check_fit(self._declared, self._fits, value, self.index)

    def changes(self) -> Changed | None:
        places = np.repeat(list(self._changed), [len(entries) for entries in self._changed.values()]).astype(np.int64)
        if not len(places):
            return None
        subkeys = [subkey for entries in self._changed.values() for subkey in entries]
        values = [value for entries in self._changed.values() for value in entries.values()]
        gone = np.array([value is _DELETED for value in values], np.bool_)
        default = None if self._declared.is_object else self._declared.default
        plain = [default if value is _DELETED else value for value in values]
        encoded = encoded_values(self._declared, plain, places)
        return Changed(places, array_from(subkeys, self._declared.subkey_type), encoded, gone)

    def _put(self, subkey: Any, value: Any) -> None:
        mine = self._changed.setdefault(self.index, {})
        if self._undo is not None:
            self._undo.append((subkey, [mine[subkey]] if subkey in mine else None))
        mine[subkey] = value

    def _now(self, subkey: Any) -> Any:
        mine = self._changed.get(self.index)
        if mine is not None and subkey in mine:
            return mine[subkey]
        return self._stored_now().get(subkey, _DELETED)

    def _out(self, value: Any) -> Any:
        if self._declared.is_object:
            return loaded(self._declared.what, value)
        return self._copied(value)

    def _stored_now(self) -> dict[Any, Any]:
        """The stored entries of the current key."""
        return self._ahead.of(self.index)

    def _exact(self, subkey: Any) -> Any:
        """The subkey as a value of the declared type, as it is when it is read from the store."""
        return exact_subkey(self._declared, subkey)


def exact_subkey(declared: Map, subkey: Any) -> Any:
    """A subkey as it is when it is read from the store; refused if it is not of the declared type."""
    kind = declared.subkey_type
    plain = type(subkey)
    if (plain is str and pa.types.is_string(kind)) or (
        plain is int and kind == pa.int64() and -(2**63) <= subkey < 2**63
    ):
        return subkey
    if subkey is None:
        raise UserError(f"{declared.name}: a key of a map cannot be None")
    try:
        return array_from([subkey], kind)[0].as_py()
    except UserError as error:
        raise UserError(f"{declared.name}: its key: {error}") from error
