"""User code: a `Computation` declares state and output, and implements `on_record` or `on_batch`.

Rules
-----
- `on_batch` is the primitive: one call per slot and epoch. `on_record` is built on it: the state of all keys of the
  batch is read at once, records are applied key by key, and everything written is stored at once.
- Records of a key are applied in order, and what one record yields is drained before the next is seen.
- A copy of the computation lives for one slot and attempt. Only declared state survives it.
- A failure names the key and the record, and leaves no trace in state or productions (G1).
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Any, ClassVar

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.arrays import python_values
from millstream.model.batch import Batch, output_column
from millstream.model.state import BadState, BatchValue, RecordValue, Stored, Value, record_handle
from millstream.model.types import format_schema, parse_schema


class At:
    """Where and when a record is processed: `at.key` and `at.epoch`."""

    __slots__ = ("epoch", "key")

    def __init__(self, epoch: int) -> None:
        self.key: Any = None
        self.epoch = epoch


class Computation:
    """Base class of user code.

    >>> class WordCount(Computation):
    ...     total = Value("long", default=0)
    ...     output = "word string, total long"
    ...
    ...     def on_record(self, row, at):
    ...         self.total.set(self.total.get() + 1)
    ...         yield at.key, self.total.get()
    >>> declared_states(WordCount)
    {'total': Value('BIGINT', default=0)}
    """

    output: ClassVar[str] = ""
    """The schema of what this computation yields, as Spark DDL; empty if it yields nothing."""

    def setup(self) -> None:
        """Called once before the first batch of a slot and attempt."""

    def close(self) -> None:
        """Called once after the last one, also when a batch failed."""

    def on_record(self, row: Any, at: At) -> Iterable[Any] | None:
        """Called for each record; yields productions: tuples or dicts that fit `output`."""
        raise NotImplementedError

    def on_batch(self, batch: Batch) -> Iterable[pa.RecordBatch] | None:
        """Called once per slot and epoch; yields `batch.output(...)`. Built on `on_record` unless overridden."""
        raise NotImplementedError


def declared_states(kind: type) -> dict[str, Value]:
    """The states a computation declares, those of base classes included; later declarations override."""
    states: dict[str, Value] = {}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            if isinstance(member, Value):
                states[name] = member
            elif name in states:
                raise UserError(
                    f"{kind.__name__}.{name} hides the state {name!r} of a base class with {member!r}; "
                    "override a state with another state, or choose another name"
                )
            elif isinstance(member, type) and issubclass(member, Value):
                raise UserError(f"{kind.__name__}.{name} is the class Value itself; write {name} = Value('long')")
    return states


def is_vectorised(kind: type) -> bool:
    """Whether a computation has `on_batch` of its own."""
    return kind.on_batch is not Computation.on_batch  # type: ignore[attr-defined]


def check_computation(given: Any) -> Computation:
    """An instance of what was passed to `compute`: a class without arguments, or an instance."""
    if isinstance(given, type):
        if not issubclass(given, Computation):
            raise UserError(f"{given.__name__} is not a Computation; derive it from millstream.Computation")
        try:
            given = given()
        except TypeError as error:
            raise UserError(
                f"{given.__name__}() cannot be made without arguments ({error}); pass an instance instead"
            ) from error
    if not isinstance(given, Computation):
        raise UserError(f"found {given!r}, expected a Computation class or instance")
    kind = type(given)
    declared_states(kind)
    output_schema(given)
    if not is_vectorised(kind) and kind.on_record is Computation.on_record:
        raise UserError(f"{kind.__name__} has neither on_record nor on_batch")
    return given


def output_schema(computation: Computation) -> pa.Schema | None:
    """The declared output as an Arrow schema; None if nothing is produced."""
    text = computation.output
    if not isinstance(text, str):
        raise UserError(f"{type(computation).__name__}.output must be a DDL string, found {text!r}")
    return parse_schema(text) if text.strip() else None


# -- running ----------------------------------------------------------------------------------------------------


class RecordFailure(Exception):
    """User code raised. Carries what the error report needs; never leaves the host."""

    def __init__(self, key: str, record: str, cause: BaseException) -> None:
        self.key, self.record, self.cause = key, record, cause
        super().__init__(str(cause))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch led to: productions, and the handles that know what changed."""

    productions: pa.RecordBatch | None
    handles: Mapping[str, BatchValue | RecordValue]


def run_batch(
    computation: Computation, states: Mapping[str, Value], batch: Batch, stored: Callable[[Value], Stored]
) -> Outcome:
    """Runs a computation over a batch. Raises `RecordFailure` if user code does."""
    schema = output_schema(computation)
    if is_vectorised(type(computation)):
        handles: dict[str, BatchValue | RecordValue] = {n: BatchValue(s, batch, stored(s)) for n, s in states.items()}
        vars(computation).update(handles)
        try:
            productions = _collect_batches(computation.on_batch(batch), schema)
        except (Exception, SystemExit) as error:
            raise RecordFailure("", "", error) from error
    else:
        cells = {name: record_handle(state, batch, stored(state)) for name, state in states.items()}
        vars(computation).update(cells)
        produced, ends = _apply_records(computation, batch, list(cells.values()))
        try:
            productions = _from_rows(produced, schema)
        except Exception as error:
            raise RecordFailure(_key_of_misfit(batch, produced, ends, schema), "", error) from error
        handles = dict(cells)
    return Outcome(productions, handles)


def changes_of(handle: BatchValue | RecordValue, batch: Batch) -> Any:
    """What a handle changed; a value that does not fit its type is a failure of its key."""
    try:
        return handle.changes()
    except BadState as error:
        raise RecordFailure(repr(_keys(batch)[error.index]), "", error) from error
    except Exception as error:
        raise RecordFailure("", "", error) from error


def _apply_records(computation: Computation, batch: Batch, cells: list[RecordValue]) -> tuple[list[Any], list[int]]:
    """All productions, and where those of each key end."""
    records, keys = _rows_as_tuples(batch.rows), _keys(batch)
    bounds = [*batch.starts.tolist(), len(records)]
    on_record, at = computation.on_record, At(batch.epoch)
    produced: list[Any] = []
    ends: list[int] = []
    extend = produced.extend
    index = position = 0
    collecting = gc.isenabled()
    gc.disable()  # many small tuples and no cycles: the collector would walk all of them again and again
    try:
        for index, key in enumerate(keys):
            at.key = key
            for cell in cells:
                cell.index = index
            for position in range(bounds[index], bounds[index + 1]):
                yielded = on_record(records[position], at)
                if yielded is not None:
                    extend(yielded)
            ends.append(len(produced))
    except (Exception, SystemExit) as error:
        raise RecordFailure(repr(keys[index]), repr(records[position]), error) from error
    finally:
        if collecting:
            gc.enable()
    return produced, ends


def _key_of_misfit(batch: Batch, produced: list[Any], ends: list[int], schema: pa.Schema | None) -> str:
    """The key whose production is the first that does not fit."""
    for index, item in enumerate(produced):
        try:
            _from_rows([item], schema)
        except Exception:
            return repr(_keys(batch)[bisect_right(ends, index)])
    return ""


def _keys(batch: Batch) -> list[Any]:
    lists = [python_values(column) for column in batch.key_columns]
    return lists[0] if len(lists) == 1 else list(zip(*lists, strict=True))


def _rows_as_tuples(rows: pa.RecordBatch) -> list[Any]:
    """Named tuples of the input's columns; names that Python does not allow become `_0`, `_1`..."""
    row_type = namedtuple("Row", rows.schema.names, rename=True)  # type: ignore[misc]
    columns = zip(*(python_values(column) for column in rows.columns), strict=True)
    return list(map(tuple.__new__, repeat(row_type), columns))  # as _make does, without a Python call per record


def _collect_batches(yielded: Any, schema: pa.Schema | None) -> pa.RecordBatch | None:
    if yielded is None:
        return None
    batches = [yielded] if isinstance(yielded, pa.RecordBatch) else list(yielded)
    for item in batches:
        if schema is None:
            raise UserError("on_batch yielded productions, but the computation declares no output")
        if not isinstance(item, pa.RecordBatch) or item.schema != schema:
            found = format_schema(item.schema) if isinstance(item, pa.RecordBatch) else repr(item)
            raise UserError(f"on_batch yielded {found}; yield batch.output(...) for {format_schema(schema)}")
    return pa.concat_batches(batches) if batches else None


def _from_rows(produced: list[Any], schema: pa.Schema | None) -> pa.RecordBatch | None:
    if not produced:
        return None
    if schema is None:
        raise UserError(f"on_record yielded {produced[0]!r}, but the computation declares no output")
    kinds = set(map(type, produced))
    if not all(issubclass(kind, (tuple, list, dict)) for kind in kinds):
        odd = next(item for item in produced if not isinstance(item, (tuple, list, dict)))
        raise UserError(f"on_record yielded {odd!r}; yield tuples or dicts that fit {format_schema(schema)}")
    if any(issubclass(kind, dict) for kind in kinds):
        produced = [_dict_as_tuple(item, schema) if isinstance(item, dict) else item for item in produced]
    if set(map(len, produced)) != {len(schema)}:
        odd = next(item for item in produced if len(item) != len(schema))
        raise UserError(
            f"on_record yielded {odd!r}: {len(odd)} values found, {len(schema)} expected ({format_schema(schema)})"
        )
    arrays = []
    for index, field in enumerate(schema):
        arrays.append(output_column(field, list(map(itemgetter(index), produced))))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _dict_as_tuple(item: dict[str, Any], schema: pa.Schema) -> tuple[Any, ...]:
    if item.keys() != set(schema.names):
        raise UserError(f"on_record yielded {item!r}; the output's columns are {', '.join(schema.names)}")
    return tuple(item[name] for name in schema.names)
