"""Cells of a transcript: every value of every type has one text, and the text gives the value back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import UserError
from millstream.model.arrays import array_from
from millstream.model.types import parse_schema, parse_type
from millstream.testing.cells import format_cell, format_rows, parse_cell, parse_row, split_row

moments = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "tinyint": st.integers(-128, 127),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32),
    "double": st.floats(),
    "decimal(10, 2)": st.decimals(-1000, 1000, places=2),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(["null", "", " ", "|", '"', "#", "a | b", "\\", "a\nb", "\u2028", "x "]),
    "binary": st.binary(max_size=5),
    "date": st.dates(),
    "timestamp": moments.map(lambda moment: moment.replace(tzinfo=UTC)),
    "timestamp_ntz": moments,
    "interval day to second": st.timedeltas(timedelta(days=-400), timedelta(days=400)),
}


@st.composite
def typed_values(draw: st.DrawFn) -> tuple[str, Any]:
    """A type as DDL, and a value of it; nested up to twice."""

    def any_type(depth: int) -> tuple[str, st.SearchStrategy[Any]]:
        shape = draw(st.sampled_from(["scalar", "array", "map", "struct"] if depth else ["scalar"]))
        if shape == "scalar":
            name = draw(st.sampled_from(sorted(SCALARS)))
            return name, st.none() | SCALARS[name]
        inner, values = any_type(depth - 1)
        if shape == "array":
            return f"array<{inner}>", st.none() | st.lists(values, max_size=3)
        if shape == "map":
            key = draw(st.sampled_from(["string", "bigint", "date"]))
            pairs = st.lists(st.tuples(SCALARS[key], values), max_size=3, unique_by=lambda pair: pair[0])
            return f"map<{key}, {inner}>", st.none() | pairs
        return f"struct<x: {inner}, `y z`: bigint>", st.none() | st.fixed_dictionaries(
            {"x": values, "y z": st.none() | SCALARS["bigint"]}
        )

    ddl, values = any_type(2)
    return ddl, draw(values)


@given(typed_values())
@settings(max_examples=400)
def test_every_value_has_one_text_which_gives_it_back(typed: tuple[str, Any]) -> None:
    ddl, value = typed
    kind = parse_type(ddl)
    [stored] = array_from([value], kind).to_pylist()
    text = format_cell(stored, kind)
    assert "\n" not in text
    assert split_row(f"|   {text} | {text}|") == [text, text]
    again = parse_cell(text, kind)
    assert format_cell(again, kind) == text
    assert again == stored or "nan" in repr(stored), "NaN equals nothing, but has one text"


@pytest.mark.parametrize(
    ("ddl", "text", "value"),
    [
        ("long", "+7", 7),
        ("double", "1e3", 1000.0),
        ("double", "-infinity", float("-inf")),
        ("timestamp", "2026-01-31", datetime(2026, 1, 31, tzinfo=UTC)),
        ("timestamp", "2026-01-31T12:00:00.5+02:00", datetime(2026, 1, 31, 10, 0, 0, 500000, UTC)),
        ("interval day to second", "-1 hour 30 minutes", timedelta(hours=-1, minutes=-30)),
        ("string", '"null"', "null"),
        ("string", "two words", "two words"),
        ("string", '"tab\\t"', "tab\t"),
        ("array<double>", "[1, 2.5, null]", [1.0, 2.5, None]),
        ("map<long, string>", '[[1, "a"]]', [(1, "a")]),
    ],
)
def test_what_people_write_is_understood(ddl: str, text: str, value: Any) -> None:
    assert parse_cell(text, parse_type(ddl)) == value


@pytest.mark.parametrize(
    ("ddl", "text", "message"),
    [
        ("long", "1.5", "found '1.5', expected BIGINT: a whole number such as 17"),
        ("long", "1_000", "found '1_000', expected BIGINT"),
        ("tinyint", "300", "found '300': expected TINYINT"),
        ("boolean", "yes", "found 'yes', expected BOOLEAN: true or false"),
        ("decimal(4, 2)", "1.234", "found '1.234': expected DECIMAL"),
        ("binary", "ff", "found 'ff', expected BINARY: hexadecimal digits such as 0x00ff"),
        ("timestamp_ntz", "2026-01-31 12:00+01:00", "a time without a zone"),
        ("string", "", 'found an empty cell; write null for no value, and "" for an empty text'),
        ("string", 'a "b"', "in double quotes where it has bars, quotes or spaces around it"),
        ("array<long>", "[1, 2", r"found '\[1, 2', expected ARRAY<BIGINT>: JSON such as \[1, 2\]"),
        ("array<long>", "[true]", "expected ARRAY<BIGINT>"),
        ("struct<n: long>", '{"m": 1}', "expected STRUCT<n: BIGINT>"),
    ],
)
def test_what_is_not_a_value_of_the_type_is_refused_with_an_example(ddl: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_cell(text, parse_type(ddl))


def test_rows_stand_in_columns_with_numbers_to_the_right() -> None:
    schema = parse_schema("word string not null, n long")
    assert format_rows([("a", "7"), ("apple", "100")], schema) == ["| a     |   7 |", "| apple | 100 |"]
    assert parse_row("|a| null |", schema) == ("a", None)
    with pytest.raises(UserError, match="column 'word': found null, but it is NOT NULL"):
        parse_row("| null | 1 |", schema)
