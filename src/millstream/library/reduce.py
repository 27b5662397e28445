"""Columns of partial results: how the rows of a group become one, and how new ones join those that are stored.

Rules
-----
- A part is a column and an associative operation: rows may be reduced in any bracketing, never in another order.
- `reduce_runs` is for rows that lie together by group, `reduce_keys` for rows in any order; both keep the order of rows
  within a group, and give the same results.
- Nulls say nothing to `add`, `min` and `max`: the result is null where all are. `first`, `last` and `concat` keep them.
- NaN is the greatest of numbers, as in Spark.
- Sums of integers wrap around. Sums of decimals are made in twice the width, and are refused if they do not fit.
- No Python loop over rows or groups, except for a user's own function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.model.arrays import array_from, python_values
from millstream.model.types import describe_type

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

ADD, MIN, MAX, FIRST, LAST, CONCAT, FOLD = "add", "min", "max", "first", "last", "concat", "fold"
EARLIEST, LATEST = "earliest", "latest"
"""Of structs of a time and a value: the one with the least time, of several the first; and the other way round."""

_PLAIN = {ADD: np.add, MIN: np.minimum, MAX: np.maximum}
_FLOAT = {ADD: np.add, MIN: np.fmin, MAX: np.maximum}  # fmin passes NaN over, maximum passes it on
_KERNEL = {ADD: "sum", MIN: "min", MAX: "max"}
_PORTION = 4_000_000
_SKIP = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)


@dataclass(frozen=True, slots=True)
class Part:
    """A column of partial results: its name, its type, and what makes one of two. `fold` is a user's function."""

    name: str
    kind: pa.DataType
    op: str
    fold: Callable[[Any, Any], Any] | None = None


def reduce_runs(part: Part, column: pa.Array, starts: Rows) -> pa.Array:
    """One row for each run of rows; `starts` says where they begin, and none is empty."""
    if len(starts) == len(column):
        return column
    if part.op == FIRST:
        return column.take(pa.array(starts))
    if part.op == LAST:
        return column.take(pa.array(np.append(starts[1:], len(column)) - 1))
    if part.op in (EARLIEST, LATEST):
        return column.take(pa.array(_furthest(column.flatten()[0].to_numpy(), starts, part.op == LATEST)))
    if part.op == CONCAT:
        return _joined_lists(column, starts)
    if part.op == FOLD:
        return _folded(part, column, starts)
    if _is_number(part.kind):
        return _reduced_numbers(part, column, starts)
    runs = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(column)))
    table = pa.table({"run": runs, "value": _widened(part, column)}).group_by("run", use_threads=False)
    kernel = _KERNEL[part.op]
    reduced = table.aggregate([("value", kernel, _SKIP)]).column(f"value_{kernel}")
    return _narrowed(part, _single(reduced))


def _widened(part: Part, column: pa.Array) -> pa.Array:
    """What is to be added, so wide that no sum overflows."""
    if part.op != ADD or not pa.types.is_decimal(part.kind):
        return column
    return column.cast(pa.decimal256(76, part.kind.scale))


def _narrowed(part: Part, reduced: pa.Array) -> pa.Array:
    """A reduced column in the type of its part."""
    if part.op != ADD or not pa.types.is_decimal(part.kind):
        return reduced.cast(part.kind)
    try:
        return reduced.cast(part.kind)
    except pa.ArrowInvalid as error:
        raise UserError(
            f"the sum {part.name!r} does not fit {describe_type(part.kind)}; sum a column of fewer digits, or of DOUBLE"
        ) from error


def _furthest(times: Rows, starts: Rows, latest: bool) -> Rows:
    """The row of each run with the least time, the first of them; or with the greatest, the last of them."""
    counts = np.diff(starts, append=len(times))
    bounds = (np.maximum if latest else np.minimum).reduceat(times, starts)
    rows = np.flatnonzero(times == np.repeat(bounds, counts))
    found: Rows = rows[np.searchsorted(rows, starts + counts) - 1 if latest else np.searchsorted(rows, starts)]
    return found


def reduce_ranges(part: Part, column: pa.Array, starts: Rows, ends: Rows) -> pa.Array:
    """One row for each range of rows, from start to before end; ranges may overlap, and none is empty."""
    if part.op == FIRST:
        return column.take(pa.array(starts))
    if part.op == LAST:
        return column.take(pa.array(ends - 1))
    if part.op == ADD and pa.types.is_integer(part.kind):
        values, valid = _numbers(column)
        sums = np.concatenate(([0], np.cumsum(values if valid is None else np.where(valid, values, 0))))
        counts = None if valid is None else np.concatenate(([0], np.cumsum(valid)))
        some = None if counts is None else counts[ends] > counts[starts]
        return _column(sums[ends] - sums[starts], some, part.kind)
    lengths = ends - starts
    made = []
    for first, stop in _portions(lengths):
        mine = lengths[first:stop]
        begins = np.cumsum(mine) - mine
        rows = np.arange(int(mine.sum())) + np.repeat(starts[first:stop] - begins, mine)
        made.append(reduce_runs(part, column.take(pa.array(rows)), begins))
    return pa.concat_arrays(made) if made else column[:0]


def _portions(lengths: Rows) -> Iterator[tuple[int, int]]:
    """Cuts ranges into portions of about as many rows as fit well into memory."""
    numbers = np.cumsum(lengths) // _PORTION
    edges = np.append(np.flatnonzero(np.diff(numbers, prepend=-1)), len(lengths))
    return pairwise(edges.tolist())


def reduce_keys(
    parts: Sequence[Part], columns: Sequence[pa.Array], keys: Sequence[pa.Array]
) -> tuple[list[pa.Array], list[pa.Array]]:
    """One row for each distinct key, in the order in which they come first: the keys, and the reduced columns.

    Keys are equal as they are in state.
    """
    keys = [_as_in_state(column) for column in keys]
    names = [f"key{number}" for number in range(len(keys))]
    quick = [number for number, part in enumerate(parts) if _has_kernel(part, columns[number])]
    table = dict(zip(names, keys, strict=True))
    table |= {f"part{number}": _widened(parts[number], columns[number]) for number in quick}
    wanted: list[Any] = [(f"part{number}", _KERNEL[parts[number].op], _SKIP) for number in quick]
    if len(quick) < len(parts):
        table["place"] = pa.array(np.arange(len(keys[0])))
        wanted.append(("place", "list"))
    found = pa.table(table).group_by(names, use_threads=False).aggregate(wanted)
    reduced: dict[int, pa.Array] = {}
    for number in quick:
        part = parts[number]
        reduced[number] = _narrowed(part, _single(found.column(f"part{number}_{_KERNEL[part.op]}")))
    if len(quick) < len(parts):
        order, starts = _runs(_single(found.column("place_list")))
        for number, part in enumerate(parts):
            if number not in reduced:
                reduced[number] = reduce_runs(part, columns[number].take(pa.array(order)), starts)
    return [_single(found.column(name)) for name in names], [reduced[number] for number in range(len(parts))]


def group_rows(keys: Sequence[pa.Array]) -> tuple[Rows, Rows]:
    """Rows by distinct key, in the order in which keys come first: their order, and where each key begins in it."""
    names = [f"key{number}" for number in range(len(keys))]
    keys = [_as_in_state(column) for column in keys]
    table = pa.table([*keys, pa.array(np.arange(len(keys[0])))], names=[*names, "place"])
    places = _single(table.group_by(names, use_threads=False).aggregate([("place", "list")]).column("place_list"))
    return _runs(places)


def finder(places: Rows, times: Rows) -> Callable[[Rows, Rows], Rows]:
    """A function that says where pairs of a key and a time would stand among these, which are in order: before the
    first that is not less. It goes by ranks, as distances in time may be too large for a number."""
    known, ranks = np.unique(times, return_inverse=True)
    line = places * (len(known) + 1) + ranks

    def find(wanted: Rows, limits: Rows) -> Rows:
        found: Rows = np.searchsorted(line, wanted * (len(known) + 1) + np.searchsorted(known, limits))
        return found

    return find


def _as_in_state(column: pa.Array) -> pa.Array:
    """A column of a key in which what state takes for equal is the same: -0.0 and 0.0, and all NaNs."""
    if not pa.types.is_floating(column.type):
        return column
    values, valid = _numbers(column)
    values = values + values.dtype.type(0)  # -0.0 + 0.0 is 0.0
    values[np.isnan(values)] = np.nan
    return _column(values, valid, column.type)


def _runs(places: pa.Array) -> tuple[Rows, Rows]:
    offsets = places.offsets.to_numpy().astype(np.int64)
    return places.flatten().to_numpy(), offsets[:-1] - offsets[0]


def combine(part: Part, old: pa.Array, new: pa.Array, present: Mask) -> pa.Array:
    """What is stored, where anything is, and what is new, as one."""
    if part.op == LAST:
        return new
    if part.op == FIRST:
        return pc.if_else(pa.array(present), old, new)
    if part.op in _PLAIN and _is_number(part.kind) and not new.null_count:
        before, valid = _numbers(old)
        after, _ = _numbers(new)
        known = present if valid is None else present & valid
        return _column(np.where(known, _function(part)(before, after), after), None, part.kind)
    if not present.any():
        return new
    places = np.flatnonzero(present)
    both = pa.concat_arrays([old.take(pa.array(places)), new])
    starts = np.arange(len(new)) + np.cumsum(present) - present
    order = np.empty(len(both), np.int64)
    order[starts[places]] = np.arange(len(places))
    order[starts + present] = np.arange(len(places), len(both))
    return reduce_runs(part, both.take(pa.array(order)), starts)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _is_number(kind: pa.DataType) -> bool:
    """Whether the values are numbers of a fixed width, to NumPy."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_duration(kind)
        or pa.types.is_date32(kind)
    )


def _function(part: Part) -> Any:
    return (_FLOAT if pa.types.is_floating(part.kind) else _PLAIN)[part.op]


def _numbers(column: pa.Array) -> tuple[npt.NDArray[Any], Mask | None]:
    """The values, whatever stands where they are null; and where they are not, None if nowhere."""
    kind = column.type
    dtype = kind.to_pandas_dtype() if pa.types.is_integer(kind) or pa.types.is_floating(kind) else np.int64
    data = column.buffers()[1]
    wide = np.int32 if pa.types.is_date32(kind) else dtype
    if data is None:
        values = np.zeros(len(column), wide)
    else:
        values = np.frombuffer(data, wide)[column.offset : column.offset + len(column)]
    return values, column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None


def _column(values: npt.NDArray[Any], valid: Mask | None, kind: pa.DataType) -> pa.Array:
    plain = pa.array(values, mask=None if valid is None else ~valid)
    return plain if plain.type == kind else plain.view(kind)


def _reduced_numbers(part: Part, column: pa.Array, starts: Rows) -> pa.Array:
    values, valid = _numbers(column)
    if valid is None:
        return _column(_function(part).reduceat(values, starts), None, part.kind)
    counted = np.concatenate(([0], np.cumsum(valid)))
    begins = counted[starts]
    some = np.append(begins[1:], counted[-1]) > begins
    reduced = np.zeros(len(starts), values.dtype)
    if some.any():
        reduced[some] = _function(part).reduceat(values[valid], begins[some])
    return _column(reduced, some, part.kind)


def _has_kernel(part: Part, column: pa.Array) -> bool:
    """Whether Arrow reduces it while it groups, with the same result."""
    if part.op not in _KERNEL or pa.types.is_duration(part.kind):
        return False
    if part.op == ADD or not pa.types.is_floating(part.kind):
        return True
    return not np.isnan(_numbers(column)[0]).any()  # Arrow passes NaN over


# -- lists, and a user's function -------------------------------------------------------------------------------------


def sorted_lists(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Lists of structs of a time and a value: the values in the order of their times, and as they stood if equal."""
    lengths = column.value_lengths().to_numpy()
    times, values = column.flatten().flatten()
    order = np.lexsort((times.to_numpy(), np.repeat(np.arange(len(lengths)), lengths)))
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    return pa.ListArray.from_arrays(offsets, values.take(pa.array(order)), type=kind)


def _joined_lists(column: pa.Array, starts: Rows) -> pa.Array:
    offsets = column.offsets.to_numpy()
    ends = np.append(offsets[starts], offsets[-1])
    return pa.ListArray.from_arrays(pa.array(ends - ends[0], pa.int32()), column.flatten(), type=column.type)


def _folded(part: Part, column: pa.Array, starts: Rows) -> pa.Array:
    assert part.fold is not None
    values, ends = python_values(column), [*starts[1:].tolist(), len(column)]
    folded = []
    for start, end in zip(starts.tolist(), ends, strict=True):
        result = None
        for value in values[start:end]:
            if value is not None:
                result = value if result is None else part.fold(result, value)
        folded.append(result)
    return array_from(folded, part.kind)


def _single(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
