"""The aggregates that users name: `ms.count()`, `ms.sum("x")` and so on, for `aggregate` and for windows.

Some have the names of builtins, which they hide in this module; so it holds nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.errors import UserError
from millstream.library.parts import Aggregate
from millstream.model.types import parse_type


def count(column: str | None = None) -> Aggregate:
    """How many records there are, or how many have a value in a column.

    >>> count(), count("city")
    (count(), count('city'))
    """
    return Aggregate("count", None if column is None else _column("count", column))


def sum(column: str) -> Aggregate:
    """The sum of a column of numbers; null where all are. Integers give BIGINT, which wraps around, floats DOUBLE,
    decimals ten more digits, and an error if these are not enough."""
    return Aggregate("sum", _column("sum", column))


def min(column: str) -> Aggregate:
    """The least value of a column; null where all are. NaN is greater than any number."""
    return Aggregate("min", _column("min", column))


def max(column: str) -> Aggregate:
    """The greatest value of a column; null where all are. NaN is greater than any number."""
    return Aggregate("max", _column("max", column))


def mean(column: str) -> Aggregate:
    """The mean of a column of numbers: as DOUBLE, of DECIMAL(p, s) as DECIMAL(p + 4, s + 4), rounded half up, as in
    Spark; null where all are."""
    return Aggregate("mean", _column("mean", column))


def first(column: str) -> Aggregate:
    """The value of the first record in the order of processing; it may be null."""
    return Aggregate("first", _column("first", column))


def last(column: str) -> Aggregate:
    """The value of the last record in the order of processing; it may be null."""
    return Aggregate("last", _column("last", column))


def collect(column: str) -> Aggregate:
    """All values, nulls included, in the order of processing, as ARRAY. The whole array is the state of the key."""
    return Aggregate("collect", _column("collect", column))


def combine(
    column: str,
    fn: Callable[[Any, Any], Any],
    *,
    type: str | None = None,
    lift: Callable[[Any], Any] | None = None,
) -> Aggregate:
    """Your own function: `fn(earlier, later)` makes one value of two. Nulls are passed over; null where all are.

    It must be associative, as values are combined wherever they meet first, in order. If what is combined is not the
    column's value itself, `lift(value)` makes it, and `type` is its DDL type.

    >>> combine("tags", lambda a, b: sorted({*a, *b}), type="array<string>", lift=lambda tag: [tag])
    combine('tags')
    """
    if not callable(fn) or (lift is not None and not callable(lift)):
        raise UserError(f"combine({column!r}): give functions, found {fn!r} and lift={lift!r}")
    if type is not None:
        parse_type(type)
    if lift is not None and type is None:
        raise UserError(f"combine({column!r}): with lift, say of which type its results are, such as type='long'")
    return Aggregate("combine", _column("combine", column), fn, lift, type)


def _column(what: str, given: object) -> str:
    if not isinstance(given, str):
        raise UserError(f"{what}({given!r}): give the name of a column")
    return given
