"""User values -> Arrow arrays of exactly a declared type, and back to Python's values.

Rules kept here:

* No value changes silently. Conversions keep every value exactly, or raise `UserError` naming what was found
  and what was expected. Never converted: text to numbers, fractions to integers, booleans to numbers, times
  with a zone to times without one (or back). The one rounding allowed is of a Python float, which has no
  32-bit form, to FLOAT; and even that may not overflow.
* NaN is a number, not a null. Only None (and pandas' NA, NaT, and NaN among objects) is null.
* Nulls below the top level obey NOT NULL; at the top level that belongs to the field, so to the caller.
* Python values are looked at one by one only when something is wrong, or may be: plain ones cost a scan of
  their types and `pa.array`. (The first `pa.array` of a list in a process imports pandas, if it is installed.)
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.model.types import NESTED_FAMILIES, SUPPORTED_TYPES, describe_type, family_of

_WIDENINGS = frozenset({("integer", "float"), ("integer", "decimal")})
"""Conversions between families that can keep every value."""

_HINTS = {
    ("timestamp_ntz", "timestamp"): "its times have no zone: give them one (UTC?), or declare TIMESTAMP_NTZ",
    ("timestamp", "timestamp_ntz"): "its times have a zone: remove it, or declare TIMESTAMP",
    ("float", "integer"): "round and cast it to integers first (pandas turns integers with gaps to floats)",
    ("float", "decimal"): "make Decimals, or cast it, first",
}

# ------------------------------------------------------------------------------------ Arrow to exactly a type


def conform(column: pa.Array | pa.ChunkedArray, t: pa.DataType) -> pa.Array:
    """The column as one array of exactly type `t`, every value kept; UserError if it cannot be."""
    if isinstance(column, pa.ChunkedArray):
        column = _or_user_error(column.combine_chunks, t, f"Arrow type {column.type}")
    return _conform(column, t, "")


def _conform(column: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    found = column.type
    if pa.types.is_dictionary(found):
        return _conform(column.dictionary_decode(), t, path)
    if pa.types.is_run_end_encoded(found):
        return _conform(pc.run_end_decode(column), t, path)
    have, want = family_of(found), family_of(t)
    if have == "null":
        return pa.nulls(len(column), t)
    if have != want and (have, want) not in _WIDENINGS:
        raise _mismatch(t, f"Arrow type {found}", path, _HINTS.get((have, want), ""))
    if want == "struct":
        return _conform_struct(column, t, path)
    if want in NESTED_FAMILIES:
        return _conform_lists(column, t, path)
    if found == t:
        return column
    return _or_user_error(lambda: _cast(column, t), t, f"Arrow type {found}", path)


def _cast(column: pa.Array, t: pa.DataType) -> pa.Array:
    """A cast that fails rather than change a value."""
    if pa.types.is_integer(column.type) and pa.types.is_decimal(t):
        # Straight to `t`, Arrow would ask for room for the widest integer instead of those here.
        column = column.cast(pa.decimal256(76, t.scale))
    result = column.cast(t)
    if pa.types.is_floating(column.type) and column.type.bit_width > t.bit_width:
        kept = pc.or_(pc.equal(result.cast(column.type), column), pc.is_nan(column))
        if not pc.all(kept, min_count=0).as_py():
            changed = column.filter(pc.invert(kept))[0].as_py()
            raise pa.ArrowInvalid(f"{changed!r} would be rounded; cast it first if that is meant")
    return result


def _conform_struct(column: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    found, wanted = [field.name for field in column.type], [field.name for field in t]
    if Counter(found) != Counter(wanted):
        raise _mismatch(t, f"Arrow type {column.type}", path, _name_differences(found, wanted))
    named = dict(zip(found, column.flatten(), strict=True))
    children = [_conform(named[field.name], field.type, _below(path, field.name)) for field in t]
    return build_struct(children, column.is_null(), t, path)


def _conform_lists(column: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    nulls = column.is_null()
    if pa.types.is_map(t):
        column = column.cast(pa.list_(pa.struct([column.type.key_field, column.type.item_field])))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = column.flatten()
    parts = flat.flatten() if pa.types.is_map(t) else [flat]
    children = [
        _conform(part, field.type, _below(path, field.name)) for field, part in zip(_parts(t), parts, strict=True)
    ]
    return build_lists(lengths, children, nulls, t, path)


# --------------------------------------------------------------- nested arrays from their conformed children


def _parts(t: pa.DataType) -> list[pa.Field]:
    """The fields of which each element of a list or map is made."""
    return [t.key_field, t.item_field] if pa.types.is_map(t) else [t.value_field]


def build_struct(children: list[pa.Array], nulls: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    """A struct array; each child must be null wherever the struct is."""
    _check_not_null(t, children, nulls.true_count, path)
    return pa.StructArray.from_arrays(children, fields=list(t), mask=nulls)


def build_lists(lengths: Any, children: list[pa.Array], nulls: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    """An array of lists or maps, from the length of each and all elements, or keys and items."""
    _check_not_null(_parts(t), children, 0, path)
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if offsets[-1] > np.iinfo(np.int32).max:
        raise _mismatch(t, f"{offsets[-1]} elements in one array", path, "give smaller batches")
    kind = pa.MapArray if pa.types.is_map(t) else pa.ListArray
    return kind.from_arrays(pa.array(offsets.astype(np.int32)), *children, type=t, mask=nulls)


def _check_not_null(fields: Iterable[pa.Field], children: list[pa.Array], allowed: int, path: str) -> None:
    for field, child in zip(fields, children, strict=True):
        nulls = child.null_count - allowed
        if nulls and not field.nullable:
            raise _mismatch(field.type, f"{nulls} null(s)", _below(path, field.name), "it is NOT NULL")


# ------------------------------------------------------------------------------------- user values to a type


def array_from(values: Any, t: pa.DataType) -> pa.Array:
    """An array of exactly type `t` from NumPy, pandas or Arrow data, a pa.Scalar (as one row) or a sequence.

    In a sequence a struct is a dict, dataclass or NamedTuple with exactly the type's field names, or a plain
    tuple with one value per field; a map is a dict or a list of pairs.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return conform(values, t)
    if isinstance(values, pa.Scalar):
        return conform(pa.array([values], type=values.type), t)
    if isinstance(values, np.ndarray):
        return _from_numpy(values, t)
    pandas = sys.modules.get("pandas")  # not imported: if nobody has, this is not a Series
    if pandas is not None and isinstance(values, pandas.Series | pandas.Index):
        return _from_pandas(values, t)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray | memoryview):
        return _from_python(values, t, "")
    raise _mismatch(t, _show(values), "", "give a sequence of values, one per row")


_COARSE_UNITS = {"M": ("W", "h", "m"), "m": ("W", "D", "h", "m")}
"""NumPy units that Arrow lacks and that are a whole number of seconds."""


def _from_numpy(values: Any, t: pa.DataType) -> pa.Array:
    kind = values.dtype.kind
    if values.ndim != 1 and not (values.ndim > 1 and family_of(t) == "array"):
        raise _mismatch(t, f"a NumPy array of {values.ndim} dimensions", "", "give one value per row")
    if values.ndim != 1 or kind not in "biufUSmM":
        return _from_python(list(values), t, "")
    if kind in _COARSE_UNITS and np.datetime_data(values.dtype)[0] in _COARSE_UNITS[kind]:
        values = values.astype(f"{kind}8[s]")
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    return conform(_or_user_error(lambda: pa.array(native), t, f"a NumPy array of {values.dtype}"), t)


def _from_pandas(values: Any, t: pa.DataType) -> pa.Array:
    if not isinstance(values.dtype, np.dtype):
        array = _or_user_error(lambda: pa.array(values, from_pandas=True), t, f"a pandas {values.dtype}")
        return conform(array, t)
    if values.dtype != object:
        return _from_numpy(values.to_numpy(), t)
    keeps_nan = family_of(t) == "float"
    rows = [
        None if missing and not (keeps_nan and isinstance(value, float)) else value
        for value, missing in zip(values, values.isna(), strict=True)
    ]
    return _from_python(rows, t, "")


def _from_python(values: Sequence[Any], t: pa.DataType, path: str) -> pa.Array:
    kinds = set(map(type, values))
    if not kinds <= _PLAIN_TYPES:
        values = [_plain(value) for value in values]
        kinds = set(map(type, values))
    family = family_of(t)
    if family == "struct":
        return _structs_from_python(values, t, path)
    if family in NESTED_FAMILIES:
        return _lists_from_python(values, t, path)
    if family not in _PYTHON_TYPES:
        raise UserError(f"values cannot be made into {t}; {SUPPORTED_TYPES}")
    try:
        return _strict_array(values, kinds, t, family)
    except _CONVERSION_ERRORS as error:
        position, reason = _first_bad(values, t, family, error)
    row = "" if path else f" at position {position}"
    raise _mismatch(t, f"{_show(values[position])}{row}", path, reason)


def _structs_from_python(values: Sequence[Any], t: pa.DataType, path: str) -> pa.Array:
    names = [field.name for field in t]
    null_row = (None,) * len(names)
    rows = [null_row if value is None else _struct_row(value, names, t, path) for value in values]
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    children = [
        _from_python(column, field.type, _below(path, field.name)) for field, column in zip(t, columns, strict=True)
    ]
    return build_struct(children, _null_mask(values), t, path)


def _struct_row(value: Any, names: list[str], t: pa.DataType, path: str) -> tuple[Any, ...]:
    if isinstance(value, tuple) and not hasattr(value, "_asdict"):
        if len(value) != len(names):
            raise _mismatch(t, _show(value), path, f"it has {len(value)} values for {len(names)} fields")
        return value
    if isinstance(value, dict | Mapping):  # dict first, as it is quicker to tell
        named = value
    elif isinstance(value, tuple):
        named = value._asdict()  # type: ignore[attr-defined]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        raise _mismatch(t, _show(value), path, "a struct is a dict, tuple, NamedTuple or dataclass")
    if named.keys() != set(names):
        raise _mismatch(t, _show(value), path, _name_differences(named, names))
    return tuple(named[name] for name in names)


def _lists_from_python(values: Sequence[Any], t: pa.DataType, path: str) -> pa.Array:
    is_map = pa.types.is_map(t)
    elements_of = _map_entries if is_map else _list_elements
    rows = [() if value is None else elements_of(value, t, path) for value in values]
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    flat = [element for row in rows for element in row]
    columns = [[key for key, _ in flat], [item for _, item in flat]] if is_map else [flat]
    children = [
        _from_python(column, field.type, _below(path, field.name))
        for field, column in zip(_parts(t), columns, strict=True)
    ]
    return build_lists(lengths, children, _null_mask(values), t, path)


def _list_elements(value: Any, t: pa.DataType, path: str) -> Sequence[Any]:
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return value.tolist() if value.ndim == 1 and value.dtype.kind in "biuf" else list(value)
    if isinstance(value, list | tuple):
        return value
    raise _mismatch(t, _show(value), path, "an array is a list, tuple or NumPy array")


def _map_entries(value: Any, t: pa.DataType, path: str) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return value
    raise _mismatch(t, _show(value), path, "a map is a dict or a list of (key, value) tuples")


def _null_mask(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], type=pa.bool_())


# ------------------------------------------------------------------------------------------- Python's scalars

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "float": (float, int),
    "decimal": (Decimal, int),
    "string": (str,),
    "binary": (bytes, bytearray, memoryview),
    "date": (dt.date,),
    "timestamp": (dt.datetime,),
    "timestamp_ntz": (dt.datetime,),
    "interval": (dt.timedelta,),
}

_PLAIN_TYPES = {type(None), dict, list, tuple, *(kind for kinds in _PYTHON_TYPES.values() for kind in kinds)}


def _strict_array(values: Sequence[Any], kinds: set[type], t: pa.DataType, family: str) -> pa.Array:
    """`pa.array`, less the conversions it does silently. Raises one of `_CONVERSION_ERRORS`."""
    if not all(_accepts(kind, family) for kind in kinds):
        raise TypeError("")
    if family in ("timestamp", "timestamp_ntz"):
        found = "timestamp" if family == "timestamp_ntz" else "timestamp_ntz"
        if any(value is not None and (value.utcoffset() is None) == (found == "timestamp_ntz") for value in values):
            raise TypeError(_HINTS[found, family])
    if family in ("timestamp", "timestamp_ntz", "interval") and not kinds <= _PLAIN_TYPES:
        for value in values:  # pandas' subclasses of datetime and timedelta
            if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
                raise ValueError("it has nanoseconds, which would be lost")
    array = pa.array(values, type=t)
    if t == pa.float32() and pc.any(pc.is_inf(array)).as_py():
        wide = pa.array(values, type=pa.float64())
        if not pc.is_inf(array).equals(pc.is_inf(wide)):
            raise ValueError("it is out of range")
    return array


def _accepts(kind: type, family: str) -> bool:
    """Whether a Python type suits a family. A bool is no integer, a datetime no date, though subclasses."""
    if kind is type(None):
        return True
    if issubclass(kind, bool):
        return family == "boolean"
    if issubclass(kind, dt.datetime):
        return family in ("timestamp", "timestamp_ntz")
    return issubclass(kind, _PYTHON_TYPES[family])


def _first_bad(values: Sequence[Any], t: pa.DataType, family: str, error: Exception) -> tuple[int, str]:
    for position, value in enumerate(values):
        try:
            _strict_array([value], {type(value)}, t, family)
        except _CONVERSION_ERRORS as own_error:
            return position, str(own_error)
    raise error  # each is good alone: not a bad value, so not one to name


def _plain(value: Any) -> Any:
    """A NumPy, pandas or Arrow scalar as the plain Python value that it equals, if there is one."""
    if isinstance(value, pa.Scalar):
        return value.as_py()
    if isinstance(value, np.datetime64 | np.timedelta64):
        return _plain_numpy_time(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value


def _plain_numpy_time(value: Any) -> Any:
    if np.isnat(value):
        return None
    kind, unit = value.dtype.kind, np.datetime_data(value.dtype)[0]
    if unit not in ("W", "D", "h", "m", "s", "ms", "us", "ns"):
        return value
    if not (kind == "M" and unit == "D"):  # days are dates, all else has a time
        micros = value.astype(f"{kind}8[us]")
        if micros != value:
            return value
        value = micros
    plain = value.item()
    return plain if isinstance(plain, dt.date | dt.timedelta) else value


_LONG = 1000
"""From about this length on, NumPy makes a list of numbers quicker than Arrow does."""


def python_values(array: pa.Array | pa.ChunkedArray) -> list[Any]:
    """The values as Python's own: None for null, a dict for a struct, a list of (key, value) for a map.

    A date or time outside the years 1 to 9999, which Python has none for, comes as `numpy.datetime64`.
    """
    numbers = pa.types.is_integer(array.type) or pa.types.is_floating(array.type)
    quick = numbers and len(array) > _LONG and not array.null_count
    try:
        values: list[Any] = array.to_numpy().tolist() if quick else array.to_pylist()
    except (OverflowError, ValueError):
        return [_python_value(value) for value in array]
    return values


def python_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The rows as dictionaries, with values as those of `python_values`."""
    columns = [python_values(column) for column in table.columns]
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _python_value(value: pa.Scalar) -> Any:
    """One value as Python's own, or as NumPy's where Python has none."""
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        kind = value.type
    if pa.types.is_struct(kind):
        return {field.name: _python_value(value[number]) for number, field in enumerate(kind)}
    if pa.types.is_map(kind):
        return [(_python_value(entry[0]), _python_value(entry[1])) for entry in value.values]
    if pa.types.is_list(kind):
        return [_python_value(element) for element in value.values]
    return np.datetime64(value.value, "D") if pa.types.is_date(kind) else np.datetime64(value.value, "us")


# -------------------------------------------------------------------------------------------------- errors

_CONVERSION_ERRORS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def _or_user_error(convert: Callable[[], pa.Array], t: pa.DataType, found: str, path: str = "") -> pa.Array:
    try:
        return convert()
    except _CONVERSION_ERRORS as error:
        raise _mismatch(t, found, path, str(error)) from error


def _mismatch(t: pa.DataType, found: str, path: str, reason: str) -> UserError:
    place = f" in {path}" if path else ""
    return UserError(f"expected {describe_type(t)}{place}, found {found}" + (f": {reason}" if reason else ""))


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _name_differences(found: Iterable[Any], wanted: Iterable[Any]) -> str:
    lacking, unknown = set(wanted) - set(found), set(found) - set(wanted)
    parts = [f"it lacks {sorted(lacking)}"] if lacking else []
    parts += [f"it has unknown {sorted(map(str, unknown))}"] if unknown else []
    return " and ".join(parts) or "it repeats a name"


def _show(value: Any) -> str:
    text = repr(value)
    short = text if len(text) <= 80 else text[:77] + "..."
    return f"{short} ({type(value).__name__})"
