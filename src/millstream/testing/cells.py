"""Values as people write them in a table of a text file, by their declared types.

Rules
-----
- `parse_cell(format_cell(value, t), t) == value` for every value of every type that DDL can say.
- Equal values have equal texts, so rows are compared as texts: NaN equals NaN.
- Text stands as it is, in one piece between the bars; what would be misread so is quoted as in JSON. Arrays, maps and
  structs are JSON. Null is `null`; an empty cell is nothing at all, and refused.
- Times are UTC unless they say otherwise.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.arrays import array_from
from millstream.model.times import micros_of
from millstream.model.types import NESTED_FAMILIES, describe_type, family_of

_PLAIN = re.compile(r"[^\s|\"](?:[^|\"\x00-\x1f]*[^\s|\"])?\Z")
"""Text that needs no quotes."""

_EXAMPLES = {
    "boolean": "true or false",
    "integer": "a whole number such as 17",
    "float": "a number such as 1.5, NaN or -Infinity",
    "decimal": "a number such as 1.50",
    "binary": "hexadecimal digits such as 0x00ff",
    "date": "a date such as 2026-01-31",
    "timestamp": "a time such as 2026-01-31 12:00 or 2026-01-31 12:00:00.5+02:00",
    "timestamp_ntz": "a time without a zone, such as 2026-01-31 12:00",
    "interval": "a duration such as 1 hour 30 minutes",
    "array": "JSON such as [1, 2]",
    "map": 'JSON such as {"a": 1}, or [["a", 1]] for keys that are not text',
    "struct": 'JSON such as {"n": 1}',
}


def parse_cell(text: str, kind: pa.DataType) -> Any:
    """The value that a cell stands for.

    >>> parse_cell("2026-01-31 12:00", pa.timestamp("us", tz="UTC")).isoformat()
    '2026-01-31T12:00:00+00:00'
    """
    if text == "null":
        return None
    family = family_of(kind)
    try:
        if family in NESTED_FAMILIES:
            value = _from_json(json.loads(text, parse_float=Decimal), kind)
        elif family == "string":
            value = _text(text)
        else:
            value = _PARSERS[family](text)
    except (ValueError, KeyError, TypeError, InvalidOperation, UserError) as error:
        raise _unreadable(text, kind) from error
    try:
        return array_from([value], kind).to_pylist()[0]
    except UserError as error:
        raise UserError(f"found {text!r}: {error}") from error


def _unreadable(text: str, kind: pa.DataType) -> UserError:
    if not text:
        return UserError('found an empty cell; write null for no value, and "" for an empty text')
    example = _EXAMPLES.get(family_of(kind), "text, in double quotes where it has bars, quotes or spaces around it")
    return UserError(f"found {text!r}, expected {describe_type(kind)}: {example}")


def _text(text: str) -> str:
    if text.startswith('"'):
        found = json.loads(text)
        if isinstance(found, str):
            return found
    if not text or '"' in text:
        raise ValueError(text)
    return text


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text):
        raise ValueError(text)
    return int(text)


def _float(text: str) -> float:
    if not re.fullmatch(r"[+-]?(\d+\.?\d*(e[+-]?\d+)?|Infinity)|NaN", text, re.IGNORECASE):
        raise ValueError(text)
    return float(text)


def _binary(text: str) -> bytes:
    if not text.startswith("0x"):
        raise ValueError(text)
    return bytes.fromhex(text[2:])


def _timestamp(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    return found.astimezone(UTC) if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _timestamp_ntz(text: str) -> datetime:
    found = datetime.fromisoformat(text)
    if found.tzinfo is not None:
        raise ValueError(text)
    return found


def _interval(text: str) -> timedelta:
    behind = text.startswith("-")
    found = timedelta(microseconds=micros_of(text.removeprefix("-"), "interval"))
    return -found if behind else found


_PARSERS: dict[str, Callable[[str], Any]] = {
    "boolean": _boolean,
    "integer": _integer,
    "float": _float,
    "decimal": Decimal,
    "binary": _binary,
    "date": date.fromisoformat,
    "timestamp": _timestamp,
    "timestamp_ntz": _timestamp_ntz,
    "interval": _interval,
}


def _from_json(found: Any, kind: pa.DataType) -> Any:
    """A value out of JSON. Types that JSON lacks are texts, as in a cell."""
    family = family_of(kind)
    if found is None:
        return None
    if family == "array":
        return [_from_json(each, kind.value_type) for each in _checked(found, list)]
    if family == "struct":
        given = _checked(found, dict)
        if set(given) != {field.name for field in kind}:
            raise ValueError(found)
        return {field.name: _from_json(given[field.name], field.type) for field in kind}
    if family == "map":
        pairs = list(found.items()) if isinstance(found, dict) else _checked(found, list)
        return [(_from_json(key, kind.key_type), _from_json(value, kind.item_type)) for key, value in pairs]
    if family == "string":
        return _checked(found, str)
    if isinstance(found, bool):
        return _PARSERS[family]("true" if found else "false")
    if isinstance(found, int | float | Decimal) and family in ("integer", "float", "decimal"):
        return _PARSERS[family](json.dumps(found) if isinstance(found, float) else str(found))  # NaN is a float
    return _PARSERS[family](_checked(found, str))


def _checked(found: Any, kind: type) -> Any:
    if not isinstance(found, kind):
        raise TypeError(found)
    return found


def format_cell(value: Any, kind: pa.DataType) -> str:
    """A value as it stands in a table."""
    if value is None:
        return "null"
    family = family_of(kind)
    if family in NESTED_FAMILIES:
        return json.dumps(_to_json(value, kind), ensure_ascii=False)
    if family == "string":
        return value if _PLAIN.match(value) and value != "null" else json.dumps(value, ensure_ascii=False)
    return _scalar(value, kind)


def _scalar(value: Any, kind: pa.DataType) -> str:
    match family_of(kind):
        case "boolean":
            return "true" if value else "false"
        case "float":
            if math.isnan(value):
                return "NaN"
            if math.isinf(value):
                return "Infinity" if value > 0 else "-Infinity"
            return str(np.float32(value)) if pa.types.is_float32(kind) else repr(value)
        case "binary":
            return f"0x{value.hex()}"
        case "timestamp" | "timestamp_ntz":
            return format_time(value)
        case "interval":
            return _duration(value)
        case _:
            return str(value)


def format_time(value: datetime) -> str:
    """A moment in UTC, without what is zero anyway: `2026-01-31 12:00`."""
    plain = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo is not None else value
    return plain.isoformat(" ", "minutes" if not (plain.second or plain.microsecond) else "auto")


def _duration(value: timedelta) -> str:
    rest = abs(value) // timedelta(microseconds=1)
    parts = []
    for unit, size in (("day", 86_400_000_000), ("hour", 3_600_000_000), ("minute", 60_000_000), ("second", 1_000_000)):
        count, rest = divmod(rest, size)
        if count:
            parts.append(f"{count} {unit}" + ("s" if count > 1 else ""))
    if rest:
        parts.append(f"{rest} microsecond" + ("s" if rest > 1 else ""))
    return ("-" if value < timedelta(0) else "") + (" ".join(parts) or "0 seconds")


def _to_json(value: Any, kind: pa.DataType) -> Any:
    family = family_of(kind)
    if value is None or family in ("boolean", "integer", "string"):
        return value
    if family == "array":
        return [_to_json(each, kind.value_type) for each in value]
    if family == "struct":
        return {field.name: _to_json(value[field.name], field.type) for field in kind}
    if family == "map":
        pairs = [(_to_json(key, kind.key_type), _to_json(each, kind.item_type)) for key, each in value]
        return dict(pairs) if family_of(kind.key_type) == "string" else [list(pair) for pair in pairs]
    if family == "float" and math.isfinite(value):
        return float(_scalar(value, kind))
    return _scalar(value, kind)


# -- rows ----------------------------------------------------------------------------------------------------------


def split_row(line: str) -> list[str]:
    """The cells of a row: what stands between its bars, without the spaces around it.

    >>> split_row('| apple | "a | b" | [1, 2] |')
    ['apple', '"a | b"', '[1, 2]']
    """
    if len(line) < 2 or not line.endswith("|"):
        raise UserError("a row ends with a bar: | a | b |")
    cells, quoted, escaped, begin = [], False, False, 1
    for place, character in enumerate(line[1:], start=1):
        if escaped:
            escaped = False
        elif quoted and character == "\\":
            escaped = True
        elif character == '"':
            quoted = not quoted
        elif character == "|" and not quoted:
            cells.append(line[begin:place].strip())
            begin = place + 1
    if quoted:
        raise UserError('a double quote is not closed; a text that has one is written as in JSON: "5\\" wide"')
    return cells


def parse_row(line: str, schema: pa.Schema) -> tuple[Any, ...]:
    """The values of a row, by the types of its columns."""
    cells = split_row(line)
    if len(cells) != len(schema):
        columns = ", ".join(schema.names)
        raise UserError(f"{len(cells)} cells found, {len(schema)} expected: {columns}")
    values = []
    for cell, field in zip(cells, schema, strict=True):
        try:
            value = parse_cell(cell, field.type)
        except UserError as error:
            raise UserError(f"column {field.name!r}: {error}") from error
        if value is None and not field.nullable:
            raise UserError(f"column {field.name!r}: found null, but it is NOT NULL")
        values.append(value)
    return tuple(values)


def format_row(row: Sequence[Any], schema: pa.Schema) -> tuple[str, ...]:
    """The cells of a row."""
    return tuple(format_cell(value, field.type) for value, field in zip(row, schema, strict=True))


def format_rows(rows: Sequence[Sequence[str]], schema: pa.Schema) -> list[str]:
    """Rows of cells as lines, in columns; numbers stand to the right."""
    numbers = [family_of(field.type) in ("integer", "float", "decimal") for field in schema]
    widths = [max((len(row[index]) for row in rows), default=0) for index in range(len(schema))]
    return [
        "| "
        + " | ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        )
        + " |"
        for row in rows
    ]
