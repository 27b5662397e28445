"""What becomes of a state, or timer, when the step that declares it is replaced.

Rules
-----
- Nothing is guessed. `carry()` keeps values as they are, in a type that holds every value of the old one; whatever may
  lose or refuse a value must be said: `carry("double")`, `convert(fn)`, `fresh()`, `drop()`.
- What cannot be is refused when the rule is resolved, before any value is looked at, with both types in the error. A
  value that does not go through later is named, with both types: it is never changed silently, and never left out.
- Kinds do not change: a `Value` does not become a `Map`, and the keys of a map's entries, the tags and times of timers
  and the clock by which values expire stay what they are.
- A rule concerns values: those of a map's entries, each of those in a bag, the payload of a timer. A null stays null,
  and where the new state has a default, it becomes that: such a state never holds null.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError
from millstream.model.arrays import array_from, build_lists, build_struct, conform, python_values
from millstream.model.bags import Bag
from millstream.model.holds import Hold
from millstream.model.kinds import State
from millstream.model.maps import Map
from millstream.model.pickled import dumped_all, loaded
from millstream.model.state import Value
from millstream.model.timers import Timer
from millstream.model.types import family_of, format_type, parse_type

Declared = State | Timer | Hold

_KINDS = (Value, Map, Bag, Timer, Hold)

ALL_OTHERS = ""
"""Stands among the rules of a step for all its state that has no rule of its own."""


@dataclass(frozen=True, slots=True)
class Carry:
    """See `carry`. `kind` is None, "object", or a type in canonical DDL."""

    kind: str | None = None
    source: str | None = None

    def __str__(self) -> str:
        return "carry()" if self.kind is None else f"carry({self.kind!r})"


@dataclass(frozen=True, slots=True)
class Convert:
    """See `convert`."""

    fn: Callable[[Any], Any]
    source: str | None = None
    batch: bool = False

    def __str__(self) -> str:
        return f"convert({_name_of(self.fn)})"


@dataclass(frozen=True, slots=True)
class Fresh:
    """See `fresh`."""


@dataclass(frozen=True, slots=True)
class Drop:
    """See `drop`."""


Rule = Carry | Convert | Fresh | Drop

_PYTHON: dict[Any, str] = {float: "double", int: "long", str: "string", bool: "boolean", bytes: "binary"}
"""Types that may be called as Python calls them."""


def carry(type: str | type[object] | None = None, *, source: str | None = None) -> Carry:
    """Keeps the values of a state. `source` is the state's old name, if it had another one.

    Without a type, the new type must be the old one or hold every value of it: a wider number, a struct with more
    fields (null in older values). With a type, which is that of the new declaration, values are cast: `carry("double")`
    takes a long to a double, and a struct may lose fields. A value that the cast would change is an error. `float`,
    `int`, `str`, `bool` and `bytes` are double, long, string, boolean and binary.

    >>> carry(), carry(float, source="sum")
    (Carry(kind=None, source=None), Carry(kind='DOUBLE', source='sum'))
    """
    if type is None:
        return Carry(None, source)
    type = _PYTHON.get(type, type) if isinstance(type, builtins.type) else type
    if type is object or (isinstance(type, str) and type.strip().lower() == "object"):
        return Carry("object", source)
    if not isinstance(type, str):
        raise UserError(
            f"carry({type!r}): give a Spark DDL type such as 'double', or nothing to keep values as they are"
        )
    return Carry(format_type(parse_type(type)), source)


def convert(fn: Callable[[Any], Any], *, source: str | None = None, batch: bool = False) -> Convert:
    """Makes new values of the old ones: `fn` is given an old value as Python has it, and returns the new one.

    With `batch=True` it is given a pyarrow Array of old values and returns an array with one new value for each. It may
    be called at any later time, in any order, on any worker, and for a value more than once: it must depend on the
    value alone. It is not called for null.
    """
    if not callable(fn):
        raise UserError(f"convert({fn!r}): give a function of one old value")
    return Convert(fn, source, bool(batch))


def fresh() -> Fresh:
    """The state begins empty: whatever was stored under its name is dropped."""
    return Fresh()


def drop() -> Drop:
    """The state is gone, and so is what was stored."""
    return Drop()


def lift_of(rule: Rule, old: Declared, new: Declared) -> Lift | None:
    """What takes stored values of the old declaration to the new one; None if they can stay as they are, or are not
    kept. Raises `UserError` where the rule cannot be followed."""
    if isinstance(rule, Fresh | Drop):
        return None
    _check_kinds(rule, old, new)
    if isinstance(old, Hold) or isinstance(new, Hold):
        return None
    before, after = _type_text(old), _type_text(new)
    if isinstance(rule, Convert):
        _check_convert(rule, old, new)
        return Lift(rule, old, new)
    if rule.kind is not None and rule.kind != after:
        raise UserError(
            f"{_what(new)}: {rule} found, but it is declared as {after or 'without payload'}; give one type"
        )
    if before == after:
        return Lift(rule, old, new) if _may_have_nulls(old) and not _may_have_nulls(new) else None
    _check_cast(rule, old, new)
    return Lift(rule, old, new)


# -- what may be ------------------------------------------------------------------------------------------------


def _check_kinds(rule: Rule, old: Declared, new: Declared) -> None:
    kinds = [next(kind for kind in _KINDS if isinstance(given, kind)) for given in (old, new)]
    refused = f"{_what(new)}: {old!r} cannot become {new!r} by {rule}: "
    if kinds[0] is not kinds[1]:
        raise UserError(f"{refused}a {kinds[0].__name__} stays a {kinds[0].__name__}; use fresh(), or another name")
    if isinstance(old, Map) and isinstance(new, Map) and old.subkey_type != new.subkey_type:
        raise UserError(f"{refused}the keys of its entries, {old.subkey_text}, cannot change; use fresh()")
    if isinstance(old, State) and isinstance(new, State) and old.ttl_time != new.ttl_time:
        raise UserError(f"{refused}its values expire by {old.ttl_time} time, which cannot change; use fresh()")
    if isinstance(old, Timer) and isinstance(new, Timer) and old.kind != new.kind:
        raise UserError(f"{refused}timers of {old.kind} time cannot become timers of {new.kind} time; use fresh()")


def _check_convert(rule: Convert, old: State | Timer, new: State | Timer) -> None:
    if _item_type(old) is None or _item_type(new) is None:
        raise UserError(f"{_what(new)}: {old!r} cannot become {new!r} by {rule}: a payload is missing; use carry()")
    if rule.batch and (old.is_object or new.is_object):
        raise UserError(
            f"{_what(new)}: {old!r} cannot become {new!r} by {rule} with batch=True: Python objects are converted one "
            "by one; leave batch out"
        )


def _check_cast(rule: Carry, old: State | Timer, new: State | Timer) -> None:
    have, want = _item_type(old), _item_type(new)
    if have is None or want is None:
        return  # a payload comes, or goes with its declaration
    refused = f"{_what(new)}: {_type_text(old)} cannot be carried to {_type_text(new)}"
    if old.is_object or new.is_object:
        raise UserError(f"{refused}: nobody knows what Python objects hold; use convert(fn)")
    if rule.kind is None and not _holds_all(have, want):
        raise UserError(
            f"{refused} without saying so, since values may be changed, refused or lost: say "
            f"carry({_type_text(new)!r}), or convert(fn)"
        )
    try:
        _cast(pa.nulls(0, have), want)
    except (pa.ArrowException, UserError) as error:
        raise UserError(f"{refused}: {error}; use convert(fn)") from error


_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""Of signed integers."""


def _holds_all(have: pa.DataType, want: pa.DataType) -> bool:
    """Whether a type holds every value of another."""
    if have == want:
        return True
    families = family_of(have), family_of(want)
    match families:
        case ("integer", "integer") | ("float", "float"):
            return bool(have.bit_width <= want.bit_width)
        case ("integer", "float"):
            return bool(have.bit_width * 2 <= want.bit_width)
        case ("integer", "decimal"):
            return bool(_DIGITS[have.bit_width] <= want.precision - want.scale)
        case ("decimal", "decimal"):
            return bool(have.scale <= want.scale and have.precision - have.scale <= want.precision - want.scale)
        case ("struct", "struct"):
            older = {field.name: field for field in have}
            newer = {field.name for field in want}
            return older.keys() <= newer and all(
                _field_holds_all(older[field.name], field) if field.name in older else field.nullable for field in want
            )
        case ("array", "array"):
            return _field_holds_all(have.value_field, want.value_field)
        case ("map", "map"):
            return bool(have.key_type == want.key_type) and _field_holds_all(have.item_field, want.item_field)
    return False


def _field_holds_all(have: pa.Field, want: pa.Field) -> bool:
    return (want.nullable or not have.nullable) and _holds_all(have.type, want.type)


def _may_have_nulls(declared: State | Timer) -> bool:
    return isinstance(declared, Value | Map) and not declared.is_object and declared.default is None


# -- what is done -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lift:
    """Takes stored values of one declaration to another."""

    rule: Carry | Convert
    old: State | Timer
    new: State | Timer

    def __call__(self, stored: pa.Array) -> pa.Array:
        if isinstance(self.new, Timer):
            return self._timers(stored, self.new)
        if isinstance(self.new, Bag):
            nulls = stored.is_null()
            lengths = pc.fill_null(pc.list_value_length(stored), 0).to_numpy(zero_copy_only=False)
            return build_lists(lengths, [self._items(stored.flatten())], nulls, self.new.stored_type, "")
        items = self._items(stored)
        if self.new.default is not None and not self.new.is_object and items.null_count:
            items = pc.if_else(items.is_valid(), items, array_from([self.new.default], items.type)[0])
        return items

    def _timers(self, stored: pa.Array, new: Timer) -> pa.Array:
        times, payloads = stored.field(0), None
        if new.payload_type is not None:
            old = isinstance(self.old, Timer) and self.old.payload_type is not None
            payloads = self._items(stored.field(1)) if old else pa.nulls(len(stored), new.payload_type)
        columns = [times] if payloads is None else [times, payloads]
        return pa.StructArray.from_arrays(columns, fields=list(new.arrow_type))

    def _items(self, values: pa.Array) -> pa.Array:
        if isinstance(self.rule, Carry):
            return self._carried(values)
        return self._converted_together(values) if self.rule.batch else self._converted(values)

    def _carried(self, values: pa.Array) -> pa.Array:
        want = _item_type(self.new)
        try:
            return _cast(values, want)
        except (pa.ArrowException, UserError) as error:
            for row in range(len(values)):
                try:
                    _cast(values.slice(row, 1), want)
                except (pa.ArrowException, UserError) as own:
                    raise self._failed(values[row].as_py(), str(own)) from own
            raise self._failed(None, str(error)) from error

    def _converted_together(self, values: pa.Array) -> pa.Array:
        try:
            made = self.rule.fn(values)  # type: ignore[union-attr]
            items = array_from(made, _item_type(self.new))
        except Exception as error:
            raise self._failed(None, _reason(error)) from error
        if len(items) != len(values):
            raise self._failed(None, f"{len(items)} new values found, {len(values)} expected, one for each old one")
        return items

    def _converted(self, values: pa.Array) -> pa.Array:
        what = _what(self.old)
        given = python_values(values)
        if self.old.is_object:
            given = [None if data is None else loaded(what, data) for data in given]
        valid = values.is_valid().to_numpy(zero_copy_only=False)
        made: list[Any] = [None] * len(given)
        for row in np.flatnonzero(valid).tolist():
            try:
                made[row] = self.rule.fn(given[row])  # type: ignore[union-attr]
            except Exception as error:
                raise self._failed(given[row], _reason(error)) from error
        want = _item_type(self.new)
        if self.new.is_object:
            pickled: list[Any] = [None] * len(made)
            for row in np.flatnonzero(valid).tolist():
                [pickled[row]] = dumped_all(_what(self.new), made[row : row + 1])
            return pa.array(pickled, want)
        try:
            return array_from(made, want)
        except Exception as error:
            for before, after in zip(given, made, strict=True):
                try:
                    array_from([after], want)
                except Exception as own:
                    raise self._failed(before, f"it became {after!r}: {own}") from own
            raise self._failed(None, str(error)) from error

    def _failed(self, value: Any, reason: str) -> UserError:
        shown = "values" if value is None else f"the value {_bounded(repr(value))}"
        before, after = _type_text(self.old), _type_text(self.new)
        return UserError(
            f"{_what(self.new)}: {shown} could not be taken from {before} to {after} by {self.rule}: {reason}"
        )


def _cast(values: pa.Array, want: pa.DataType) -> pa.Array:
    """Values in another type, none of them changed. Fields of structs go by name: those that are new are null."""
    have = values.type
    if have == want:
        return values
    families = family_of(have), family_of(want)
    match families:
        case ("struct", "struct"):
            older = dict(zip([field.name for field in have], values.flatten(), strict=True))
            children = [
                _cast(older[field.name], field.type) if field.name in older else pa.nulls(len(values), field.type)
                for field in want
            ]
            for field in want:
                if field.name not in older and not field.nullable:
                    raise UserError(f"the new field {field.name!r} is NOT NULL, and older values have none")
            return build_struct(children, values.is_null(), want, "")
        case ("array", "array") | ("map", "map"):
            nulls = values.is_null()
            parts, wanted = [want.value_field] if families[0] == "array" else [want.key_field, want.item_field], values
            if families[0] == "map":
                wanted = values.cast(pa.list_(pa.struct([have.key_field, have.item_field])))
            lengths = pc.fill_null(pc.list_value_length(wanted), 0).to_numpy(zero_copy_only=False)
            flat = wanted.flatten()
            columns = flat.flatten() if families[0] == "map" else [flat]
            children = [_cast(column, field.type) for column, field in zip(columns, parts, strict=True)]
            return build_lists(lengths, children, nulls, want, "")
        case (one, other) if one == other or families in (("integer", "float"), ("integer", "decimal")):
            return conform(values, want)
    return values.cast(want)


# -- words ------------------------------------------------------------------------------------------------------


def _item_type(declared: State | Timer) -> pa.DataType | None:
    """The type of what a rule concerns."""
    return declared.payload_type if isinstance(declared, Timer) else declared.arrow_type


def _type_text(declared: State | Timer) -> str:
    return declared.payload_text if isinstance(declared, Timer) else declared.type_text


def _what(declared: Declared) -> str:
    kind = "timer" if isinstance(declared, Timer) else "hold" if isinstance(declared, Hold) else "state"
    return f"{kind} {declared.name!r}"


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _bounded(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
