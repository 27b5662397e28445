"""One value per key: how it is declared, and the handles through which a computation reads and writes it.

Rules
-----
- A state with a default never holds null: absent keys read as the default. Without a default they read as null.
- One rule for arrays: **what can hold a null is an Arrow array, what cannot is NumPy.** So a number or boolean with
  a default is NumPy; everything else is Arrow; Python objects come as a NumPy array of objects.
- Nothing changes but through a handle: `get()` and `set()` copy what can be changed, so that mutating a value that
  was read or written changes nothing, wherever one epoch ends and the next begins.
- Handles live for one batch of one slot. What a failed batch wrote is gone with them.
"""

from __future__ import annotations

from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.model.arrays import array_from, python_values
from millstream.model.batch import Batch
from millstream.model.copies import copier
from millstream.model.fits import fitting
from millstream.model.kinds import Changed, Mask, State, check_fit, encoded_values, object_array
from millstream.model.overlay import mask_of
from millstream.model.pickled import dumped, dumped_all, loaded
from millstream.model.times import WALL_TIME


class Value(State):
    """One value per key, declared on the class of a computation.

    >>> import millstream as ms
    >>> class Seen(ms.Computation):
    ...     count = ms.Value("long", default=0)
    ...     pages = ms.Value("array<string>", default=[])
    ...     model = ms.Value(object)
    ...
    ...     def on_record(self, row, at):
    ...         self.count.set(self.count.get() + 1)
    ...         self.pages.set([*self.pages.get(), row.page])

    `type` is a Spark DDL type (`"long"`, `"array<string>"`, `"struct<n: long, sum: double>"`) or `object` for any
    Python value that can be pickled. Inside `on_record`, `get()`, `set(value)`, `delete()` and `exists()` concern the
    current key; inside `on_batch`, `read(batch)`, `write(batch, values)`, `delete(batch)` and `exists(batch)` concern
    all keys of the batch at once.

    A key without a value reads as a copy of the default, or as None. A state with a default never holds null.

    With a `ttl`, such as "1 hour", a value is absent that long after it was last written: by the driver's clock, or
    with `ttl_time=EVENT_TIME` when the watermark has passed the newest record of the key by as much. `bloom=True` is
    for keys that are mostly new: it saves the search for them.
    """

    def __init__(
        self,
        type: str | type[object] = "",
        *,
        default: Any = None,
        ttl: Any = None,
        ttl_time: str = WALL_TIME,
        bloom: bool = False,
    ) -> None:
        super().__init__(type, default=default, ttl=ttl, ttl_time=ttl_time, bloom=bloom)

    # What users call is on the handle that replaces this declaration on the running instance; these signatures are
    # here so that editors and type checkers know them.

    def get(self) -> Any:
        """The value of the current key, the default if there is none. In `on_record`."""
        raise self._unbound("get")

    def set(self, value: Any) -> None:
        """Sets the value of the current key. In `on_record`."""
        raise self._unbound("set")

    @overload
    def exists(self) -> bool: ...
    @overload
    def exists(self, batch: Batch) -> Mask: ...
    def exists(self, batch: Batch | None = None) -> bool | Mask:
        """Whether the current key (in `on_record`), or each key of the batch (in `on_batch`), has a value."""
        raise self._unbound("exists")

    def delete(self, batch: Batch | None = None, where: Mask | None = None) -> None:
        """Deletes the value of the current key, or of the keys of the batch (those where `where` is true)."""
        raise self._unbound("delete")

    def read(self, batch: Batch) -> Any:
        """The values of the keys of a batch, aligned with `batch.keys`. In `on_batch`."""
        raise self._unbound("read")

    def write(self, batch: Batch, values: Any, where: Mask | None = None) -> None:
        """Sets the values of the keys of a batch (of those where `where` is true). In `on_batch`."""
        raise self._unbound("write")


class Stored(Protocol):
    """What a handle needs to know of the store: the values of the batch's keys before this epoch."""

    def present(self) -> Mask: ...
    def numbers(self, default: Any, dtype: Any) -> npt.NDArray[Any]: ...
    def arrow(self, kind: pa.DataType) -> pa.Array: ...


class BatchValue:
    """The handle of a `Value` in a computation that has `on_batch`."""

    def __init__(self, declared: Value, batch: Batch, stored: Stored) -> None:
        self._declared, self._batch, self._stored = declared, batch, stored
        self._values: Any = None
        self._present: Mask | None = None
        self._changed: Mask | None = None

    def read(self, batch: Batch) -> Any:
        self._check(batch)
        values = self._current()
        if batch is not self._batch:
            places = batch.places
            values = values[places] if isinstance(values, np.ndarray) else values.take(pa.array(places))
        if self._declared.is_object:
            default, what = self._declared.fresh_default, self._declared.what
            return object_array([default() if data is None else loaded(what, data) for data in values])
        return values.copy() if isinstance(values, np.ndarray) else values

    def _current(self) -> Any:
        """The values as they are now, not to be handed out: Python objects as their bytes, None where absent."""
        if self._values is None:
            self._values = self._load()
        return self._values

    def exists(self, batch: Batch) -> Mask:
        self._check(batch)
        present = self._now_present()
        return present.copy() if batch is self._batch else present[batch.places]

    def write(self, batch: Batch, values: Any, where: Mask | None = None) -> None:
        self._check(batch)
        if len(values) != len(batch):
            raise UserError(
                f"{self._declared.name}.write: {len(values)} values found, {len(batch)} expected, "
                "one for each of batch.keys"
            )
        declared = self._declared
        if declared.is_object:
            fresh: Any = object_array(dumped_all(declared.what, values))
        else:
            fresh = declared.encode_given(values)
            if declared.is_numpy:
                fresh = fresh.to_numpy(zero_copy_only=False)
        if batch is not self._batch:
            self._put(*self._spread(batch, fresh, where))
        elif where is None:
            self._values, self._present = fresh, np.ones(len(batch), np.bool_)
            self._changed = np.ones(len(batch), np.bool_)
        else:
            self._put(fresh, mask_of(batch, where))

    def delete(self, batch: Batch, where: Mask | None = None) -> None:
        self._check(batch)
        chosen = mask_of(batch, where)
        if batch is not self._batch:
            _, chosen = self._spread(batch, self._absent(len(batch)), chosen)
        self._put(self._absent(len(self._batch)), chosen)
        assert self._present is not None
        self._present = self._present & ~chosen

    def changes(self) -> Changed | None:
        if self._changed is None or not self._changed.any():
            return None
        assert self._present is not None
        values = self._values
        encoded = pa.array(values, self._declared.arrow_type) if isinstance(values, np.ndarray) else values
        return _changed(self._changed, encoded, ~self._present)

    def _check(self, batch: Batch) -> None:
        if batch is not self._batch and batch.whole is not self._batch:
            raise UserError(f"{self._declared.name}: give the batch that on_batch or the callback was called with")

    def _spread(self, batch: Batch, fresh: Any, where: Any) -> tuple[Any, Mask]:
        """Values of some keys as values of all, and which they are."""
        chosen = mask_of(batch, where)
        mask = np.zeros(len(self._batch), np.bool_)
        mask[batch.places[chosen]] = True
        if isinstance(fresh, np.ndarray):
            spread = np.empty(len(self._batch), fresh.dtype)
            spread[batch.places] = fresh
            return spread, mask
        index = np.zeros(len(self._batch), np.int64)
        index[batch.places] = np.arange(len(batch))
        return fresh.take(pa.array(index)), mask

    def _now_present(self) -> Mask:
        if self._present is None:
            self._present = self._stored.present()
        return self._present

    def _load(self) -> Any:
        declared = self._declared
        if declared.is_numpy:
            return self._stored.numbers(declared.default, declared.numpy_type)
        loaded = self._stored.arrow(declared.arrow_type)
        if declared.is_object:
            return object_array(python_values(loaded))
        if declared.default is not None:
            default = array_from([declared.default], declared.arrow_type)[0]
            return pc.if_else(pa.array(self._now_present()), loaded, default)
        return loaded

    def _absent(self, count: int) -> Any:
        declared = self._declared
        if declared.is_numpy:
            return np.full(count, declared.default, declared.numpy_type)
        if declared.is_object:
            return np.full(count, None, np.object_)
        if declared.default is not None:
            return array_from([declared.default] * count, declared.arrow_type)
        return pa.nulls(count, declared.arrow_type)

    def _put(self, fresh: Any, where: Mask) -> None:
        current = self._current()
        if isinstance(current, np.ndarray):
            self._values = current.copy()
            self._values[where] = fresh[where]
        else:
            self._values = pc.if_else(pa.array(where), fresh, current)
        self._present = self._now_present() | where
        self._changed = where.copy() if self._changed is None else self._changed | where


class RecordValue:
    """The handle of a `Value` in a computation that has `on_record`: all keys loaded, one of them current."""

    __slots__ = ("_declared", "_dirty", "_fits", "_present", "_values", "index")

    def __init__(self, declared: Value, batch: Batch, stored: Stored) -> None:
        self._declared = declared
        self.index = 0
        self._present = bytearray(stored.present().tobytes())
        self._dirty = bytearray(len(batch))
        self._values = self._load(stored)
        self._fits = fitting(declared.arrow_type)

    def _load(self, stored: Stored) -> list[Any]:
        declared = self._declared
        if declared.is_numpy:
            numbers: list[Any] = stored.numbers(declared.default, declared.numpy_type).tolist()
            return numbers
        values: list[Any] = python_values(stored.arrow(declared.arrow_type))
        if declared.default is None:
            return values
        return [v if p else declared.default for v, p in zip(values, self._present, strict=True)]

    def get(self) -> Any:
        return self._values[self.index]

    def set(self, value: Any) -> None:
        index = self.index
        self._values[index] = value
        self._dirty[index] = self._present[index] = 1

    def exists(self) -> bool:
        return bool(self._present[self.index])

    def delete(self) -> None:
        index = self.index
        self._values[index] = self._declared.default
        self._dirty[index], self._present[index] = 1, 0

    def saved(self) -> tuple[Any, int, int]:
        """For `restore`: the current key as it is."""
        index = self.index
        return self._values[index], self._present[index], self._dirty[index]

    def restore(self, saved: tuple[Any, int, int]) -> None:
        index = self.index
        self._values[index], self._present[index], self._dirty[index] = saved

    def check(self) -> None:
        """Raises if the value of the current key does not fit the declared type."""
        index = self.index
        if self._dirty[index] and self._present[index]:
            check_fit(self._declared, self._fits, self._values[index], index)

    def changes(self) -> Changed | None:
        changed = np.frombuffer(self._dirty, np.bool_)
        if not changed.any():
            return None
        gone = ~np.frombuffer(self._present, np.bool_)
        return _changed(changed, self._encode(changed & ~gone), gone)

    def _encode(self, kept: Mask) -> pa.Array:
        default = self._declared.default
        values = [value if keep else default for value, keep in zip(self._values, kept, strict=True)]
        return encoded_values(self._declared, values, range(len(values)))


class CopiedRecordValue(RecordValue):
    """The same for values that can be changed in place: structs, arrays and maps."""

    __slots__ = ("_copied",)

    def __init__(self, declared: Value, batch: Batch, stored: Stored) -> None:
        super().__init__(declared, batch, stored)
        self._copied = copier(declared.arrow_type)

    def get(self) -> Any:
        return self._copied(self._values[self.index])

    def set(self, value: Any) -> None:
        super().set(self._copied(value))


class PickledRecordValue(RecordValue):
    """The same for Python objects: they are kept as bytes, so what is read or written is always a copy."""

    __slots__ = ()

    def _load(self, stored: Stored) -> list[Any]:
        values: list[Any] = stored.arrow(pa.binary()).to_pylist()
        return values

    def get(self) -> Any:
        if not self._present[self.index]:
            return self._declared.fresh_default()
        return loaded(self._declared.what, self._values[self.index])

    def set(self, value: Any) -> None:
        super().set(dumped(self._declared.what, value))

    def delete(self) -> None:
        super().delete()
        self._values[self.index] = None

    def check(self) -> None:
        """Nothing is left to find: `set` refuses what cannot be pickled."""

    def _encode(self, kept: Mask) -> pa.Array:
        return pa.array([value if keep else None for value, keep in zip(self._values, kept, strict=True)], pa.binary())


def _changed(changed: Mask, values: pa.Array, gone: Mask) -> Changed:
    """What changed, from masks and values of all keys."""
    places = np.flatnonzero(changed)
    if len(places) == len(changed):
        return Changed(places, None, values, gone)
    return Changed(places, None, values.take(pa.array(places)), gone[places])
