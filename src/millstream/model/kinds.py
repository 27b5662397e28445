"""What all kinds of state have in common: a declared type of values, and perhaps a time-to-live.

Rules
-----
- State is declared on the class, with a type, so its schema is known before any user code runs.
- A time-to-live counts from the last write: on the driver's clock, as the plan states it, or in event time from the
  newest record of the key in the epoch of the write. What has expired reads as absent from that moment on, and its
  space is given back when segments are merged: when that happens changes no result. That a value expires is decided
  when it is written: another `ttl`, or none, counts for what is written from then on.
- A filter (`bloom=True`) changes nothing but the cost of looking for keys that are not there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.arrays import array_from
from millstream.model.times import EVENT_TIME, WALL_TIME, micros_of
from millstream.model.types import format_type, is_fixed_number, parse_type

Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

LONGEST_TTL = 1 << 60
"""In microseconds: what is added to a clock must not overflow."""

_UNCHANGEABLE = (type(None), bool, int, float, str, bytes, Decimal, date, time, timedelta)  # a datetime is a date


class State:
    """The base of `Value`, `Map` and `Bag`."""

    subkey_type: pa.DataType | None = None
    """The type of subkeys, of a kind that has several entries per key."""

    def __init__(
        self, type: Any, *, default: Any = None, ttl: Any = None, ttl_time: str = WALL_TIME, bloom: bool = False
    ) -> None:
        kind = self.__class__.__name__
        self.name = ""
        if type == "":
            raise UserError(f'a {kind} needs a type: a Spark DDL type such as {kind}("long"), or {kind}(object)')
        self.is_object = type is object or (isinstance(type, str) and type.strip().lower() == "object")
        if not self.is_object and not isinstance(type, str):
            raise UserError(f"{kind}({type!r}): give a Spark DDL type such as 'long', or object for any Python value")
        self.arrow_type: pa.DataType = pa.binary() if self.is_object else parse_type(str(type))
        self.default = default
        if default is not None and not self.is_object:
            self.default = array_from([default], self.arrow_type)[0].as_py()
        self.is_numpy = default is not None and not self.is_object and is_fixed_number(self.arrow_type)
        if ttl_time not in (EVENT_TIME, WALL_TIME):
            raise UserError(f"{kind}(ttl_time={ttl_time!r}): give EVENT_TIME or WALL_TIME")
        if ttl is None and ttl_time != WALL_TIME:
            raise UserError(f"{kind}(ttl_time=...) needs ttl, a duration such as '1 hour'")
        self.ttl: int | None = None if ttl is None else micros_of(ttl, "ttl")
        if self.ttl is not None and not 0 < self.ttl < LONGEST_TTL:
            raise UserError(
                f"{kind}(ttl={ttl!r}): give a duration above zero, and below {LONGEST_TTL // 10**6 // 86400:,} days"
            )
        self.ttl_time = ttl_time
        self.bloom = bool(bloom)

    def __set_name__(self, owner: object, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        parts = [repr(self.type_text)]
        if self.subkey_text:
            parts.insert(0, repr(self.subkey_text))
        if self.default is not None:
            parts.append(f"default={self.default!r}")
        if self.ttl is not None:
            parts.append(f"ttl={str(timedelta(microseconds=self.ttl))!r}")
        return f"{self.__class__.__name__}({', '.join(parts)})"

    @property
    def type_text(self) -> str:
        """The declared type in canonical DDL, or "object"."""
        return "object" if self.is_object else format_type(self.arrow_type)

    @property
    def subkey_text(self) -> str:
        """The type of the subkeys, where users declare one."""
        return ""

    @property
    def subkey_column(self) -> str:
        """What the column of subkeys is called where state is shown as a table."""
        return f"{self.name}_key"

    @property
    def stored_text(self) -> str:
        """What stored values depend on: the type, whether null can be among them, and by which clock they expire."""
        not_null = " NOT NULL" if self.default is not None else ""
        return self.type_text + not_null + (" TTL EVENT" if self.ttl_time == EVENT_TIME else "")

    @property
    def stored_type(self) -> pa.DataType:
        """The type of what is stored in one row."""
        return self.arrow_type

    @property
    def numpy_type(self) -> Any:
        """The NumPy type of the values, for those that come as NumPy."""
        return self.arrow_type.to_pandas_dtype()

    def fresh_default(self) -> Any:
        """The default, as one key may have it: a copy, unless it cannot be changed."""
        return self.default if isinstance(self.default, _UNCHANGEABLE) else copy.deepcopy(self.default)

    def encode(self, values: Any) -> pa.Array:
        """Values as an array of the declared type."""
        array = array_from(values, self.arrow_type)
        if self.default is not None and array.null_count:
            raise UserError(f"state {self.name!r} has a default, so it cannot hold null; delete the value instead")
        return array

    def encode_given(self, values: Any) -> pa.Array:
        """Values that were given for a batch; an error names the state."""
        try:
            return self.encode(values.copy() if isinstance(values, np.ndarray) else values)
        except UserError as error:
            named = str(error).startswith(f"{self.what} ")
            raise error if named else UserError(f"{self.what}: {error}") from error

    @property
    def what(self) -> str:
        """What errors call it."""
        return f"state {self.name!r}"

    def _unbound(self, verb: str) -> UserError:
        return UserError(
            f"{self.name}.{verb}() was called outside on_record / on_batch: state exists only while a step runs"
        )


@dataclass(frozen=True, slots=True)
class Changed:
    """What a handle gives back after a batch: for places of keys in it, and subkeys if the kind has them, the new
    values, and which are gone. Each place, or pair, occurs once."""

    places: Rows
    subkeys: pa.Array | None
    values: pa.Array
    gone: Mask


class BadState(UserError):
    """A value that does not fit its declared state; `index` is the key's place in the batch."""

    def __init__(self, state: str, index: int, why: str) -> None:
        self.state, self.index = state, index
        super().__init__(f"state {state!r}: {why}")


def encoded_values(declared: State, values: Sequence[Any], places: Iterable[int]) -> pa.Array:
    """Values of keys as they are stored; one that does not fit is a fault of the key at its place."""
    if declared.is_object:
        return pa.array(values, pa.binary())
    try:
        return declared.encode(values)
    except Exception as error:
        for place, value in zip(places, values, strict=True):
            try:
                declared.encode([value])
            except Exception as own:  # whatever it raises, this is the one
                raise BadState(declared.name, int(place), str(error)) from own
        raise


def object_array(values: list[Any]) -> npt.NDArray[np.object_]:
    """Python values as one array, whatever they are: lists and tuples stay single values."""
    result = np.empty(len(values), np.object_)
    result[:] = values
    return result


def check_fit(declared: State, fits: Callable[[Any], bool], value: Any, index: int) -> None:
    """Raises `BadState` if a value of a key does not fit its state; `fits` is that of the type."""
    if fits(value):
        return
    try:
        declared.encode([value])
    except Exception as error:
        raise BadState(declared.name, index, str(error)) from error
