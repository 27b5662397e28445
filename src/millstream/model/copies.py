"""Copies of values of nested types, in the shape in which they are read back.

Rules
-----
- What user code holds is never what is kept: a struct, array or map is copied when it is set and when it is got, so
  that changing it in place changes nothing, wherever epochs end.
- A struct is a dict and an array is a list from the moment it is set: one may set a tuple or a dataclass, and what one
  gets is the same within the epoch and after it.
- A value that is not of the type is copied as it is; whoever encodes it says what is wrong with it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pyarrow as pa

Copier = Callable[[Any], Any]


def copier(kind: pa.DataType) -> Copier:
    """The function that copies values of a type.

    >>> copy_point = copier(pa.struct([("x", pa.int64()), ("y", pa.int64())]))
    >>> copy_point((1, 2)), copy_point({"x": 1, "y": 2}), copy_point(None)
    ({'x': 1, 'y': 2}, {'x': 1, 'y': 2}, None)
    """
    if pa.types.is_struct(kind):
        return _struct_copier(kind)
    if pa.types.is_list(kind):
        return _list_copier(kind)
    return copy.deepcopy if pa.types.is_nested(kind) else _same


def _same(value: Any) -> Any:
    return value


def _struct_copier(kind: pa.DataType) -> Copier:
    parts = [(kind.field(i).name, copier(kind.field(i).type)) for i in range(kind.num_fields)]
    known = {name for name, _ in parts}

    def copied(value: Any) -> Any:
        if value is None:
            return None
        if dataclasses.is_dataclass(value):
            value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        if isinstance(value, dict) and value.keys() == known:
            return {name: part(value[name]) for name, part in parts}
        if isinstance(value, tuple) and len(value) == len(parts):
            return {name: part(item) for (name, part), item in zip(parts, value, strict=True)}
        return copy.deepcopy(value)

    return copied


def _list_copier(kind: pa.DataType) -> Copier:
    part = copier(kind.value_type)

    def copied(value: Any) -> Any:
        return [part(item) for item in value] if isinstance(value, list | tuple) else copy.deepcopy(value)

    return copied
