"""Whether a Python value fits a declared type, by a look at it.

Rules
-----
- True is a promise: `arrays.array_from` takes the value as it is. False says nothing; only converting it tells.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pyarrow as pa


@lru_cache(maxsize=256)
def fitting(kind: pa.DataType) -> Callable[[Any], bool]:
    """A function that says of values of the common types whether they fit.

    >>> small = fitting(pa.int8())
    >>> small(7), small(300), small("7")
    (True, False, False)
    """
    if pa.types.is_signed_integer(kind):
        low, high = -(1 << (kind.bit_width - 1)), (1 << (kind.bit_width - 1)) - 1
        return lambda value: type(value) is int and low <= value <= high
    if kind == pa.string():
        return lambda value: type(value) is str and value.isascii()
    if kind == pa.float64():
        return lambda value: type(value) is float
    if kind == pa.bool_():
        return lambda value: type(value) is bool
    return lambda value: False
