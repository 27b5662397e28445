"""Arrays: user values becoming exactly what was declared, or refused by name."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from millstream.errors import UserError
from millstream.model.arrays import array_from, conform, python_values
from millstream.model.types import parse_type

LONG, DOUBLE, STRING = pa.int64(), pa.float64(), pa.string()
POINT = parse_type("struct<x: bigint not null, y: string>")
UTC = dt.UTC


# --------------------------------------------------------------------------------------------------- conform


@pytest.mark.parametrize(
    ("column", "t"),
    [
        (pa.array([1, None, 127]), pa.int8()),
        (pa.array([1, 2], pa.uint64()), LONG),
        (pa.array([1.5, float("inf"), None], pa.float32()), DOUBLE),
        (pa.array([1.5, None]), pa.float32()),
        (pa.array([2**53, None]), DOUBLE),
        (pa.array([3, None]), pa.decimal128(5, 2)),
        (pa.array([Decimal("1.50")]), pa.decimal128(38, 10)),
        (pa.array(["a", None], pa.large_string()), STRING),
        (pa.array(["a", None], pa.string_view()), STRING),
        (pa.array(["a", None, "a"]).dictionary_encode(), STRING),
        (pa.array([b"ab"], pa.binary(2)), pa.binary()),
        (pa.array([dt.date(2020, 1, 2)], pa.date64()), pa.date32()),
        (pa.array([dt.datetime(2020, 1, 2)], pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array([dt.timedelta(1)], pa.duration("s")), pa.duration("us")),
        (pa.nulls(2), LONG),
        (pa.nulls(2), POINT),
        (pa.array([[1], None, [2, 3]], pa.list_(pa.int8())), parse_type("array<bigint>")),
        (pa.array([[1], None, [2]], pa.list_(pa.int8(), 1)), parse_type("array<bigint>")),
        (pa.array([[1], None, [2, 3]], pa.large_list(LONG)), parse_type("array<bigint>")),
        (pa.array([[1], None, [2, 3]], pa.list_view(LONG)), parse_type("array<bigint>")),
        (pa.array([[("a", 1)], None, []], pa.map_(STRING, pa.int8())), parse_type("map<string, bigint>")),
        (pa.array([{"y": "a", "x": 1}, None]), POINT),
    ],
)
@pytest.mark.parametrize("form", [lambda c: c, lambda c: c[1:], lambda c: pa.chunked_array([c[:1], c[1:]])])
def test_a_column_that_loses_nothing_conforms(
    column: pa.Array, t: pa.DataType, form: Callable[[pa.Array], Any]
) -> None:
    result = conform(form(column), t)
    result.validate(full=True)
    assert result.type == t
    assert [repr(result.type.field(i)) for i in range(t.num_fields)] == [repr(t.field(i)) for i in range(t.num_fields)]
    assert result.to_pylist() == [
        value if not isinstance(value, dict) else {"x": value["x"], "y": value["y"]}
        for value in form(column).to_pylist()
    ]


def test_a_zone_changes_but_not_the_instant() -> None:
    instant = dt.datetime(2020, 1, 2, 3, tzinfo=UTC)
    column = pa.array([instant], pa.timestamp("ms", tz="Europe/Oslo"))
    assert conform(column, pa.timestamp("us", tz="UTC")).to_pylist() == [instant]


@pytest.mark.parametrize(
    ("column", "t", "message"),
    [
        (pa.array([300]), pa.int8(), "expected TINYINT, found Arrow type int64.*300"),
        (pa.array(["1"]), LONG, "expected BIGINT, found Arrow type string"),
        (pa.array([1.0]), LONG, "expected BIGINT, found Arrow type double.*round"),
        (pa.array([True]), LONG, "expected BIGINT, found Arrow type bool"),
        (pa.array([1]), pa.bool_(), "expected BOOLEAN, found Arrow type int64"),
        (pa.array([1]), STRING, "expected STRING, found Arrow type int64"),
        (pa.array([0.5, 0.1]), pa.float32(), "expected FLOAT.*0.1 would be rounded"),
        (pa.array([2**53 + 1]), DOUBLE, "expected DOUBLE.*9007199254740993"),
        (pa.array([1.5]), pa.decimal128(5, 2), r"expected DECIMAL\(5,2\), found Arrow type double"),
        (pa.array([1000]), pa.decimal128(5, 2), r"expected DECIMAL\(5,2\), found Arrow type int64"),
        (pa.array([Decimal("1.55")]), pa.decimal128(5, 1), r"expected DECIMAL\(5,1\)"),
        (pa.array([1], pa.timestamp("ns")), pa.timestamp("us"), "TIMESTAMP_NTZ, found.*lose data"),
        (pa.array([1], pa.timestamp("us")), pa.timestamp("us", tz="UTC"), "expected TIMESTAMP, .*no zone"),
        (pa.array([1], pa.timestamp("us", tz="UTC")), pa.timestamp("us"), "TIMESTAMP_NTZ, .*have a zone"),
        (pa.array([1], pa.date32()), pa.timestamp("us"), "found Arrow type date32"),
        (pa.array([{"x": 1}]), POINT, r"lacks \['y'\]"),
        (pa.array([{"x": 1, "y": "a", "z": 1}]), POINT, r"unknown \['z'\]"),
        (pa.array([{"x": "a", "y": "a"}]), POINT, "expected BIGINT in x, found Arrow type string"),
        (pa.array([{"x": None, "y": "a"}, None]), POINT, "in x, found .*NOT NULL"),
        (pa.array([["a"]]), parse_type("array<bigint>"), "expected BIGINT in element"),
    ],
)
def test_a_column_that_would_change_is_refused(column: pa.Array, t: pa.DataType, message: str) -> None:
    with pytest.raises(UserError, match=message):
        conform(column, t)


def test_values_hidden_under_a_null_struct_do_not_matter() -> None:
    hidden = pa.StructArray.from_arrays(
        [pa.array([1, 2**40]), pa.array(["a", "b"])], ["x", "y"], mask=pa.array([False, True])
    )
    t = parse_type("struct<x: int not null, y: string>")
    assert conform(hidden, t).to_pylist() == [{"x": 1, "y": "a"}, None]


# ------------------------------------------------------------------------------------------------ array_from


class PointTuple(NamedTuple):
    y: str | None
    x: int


@dataclasses.dataclass
class PointData:
    y: str | None
    x: int


@pytest.mark.parametrize(
    ("values", "ddl", "expected"),
    [
        ([1, None, 3], "bigint", [1, None, 3]),
        ((), "bigint", []),
        (range(3), "bigint", [0, 1, 2]),
        ([np.int32(1), np.uint8(2), pa.scalar(3), pd.NA], "bigint", [1, 2, 3, None]),
        ([3, 1.5, np.float32(0.5)], "double", [3.0, 1.5, 0.5]),
        ([0.5, 3, float("inf")], "float", [0.5, 3.0, float("inf")]),
        ([True, np.bool_(False), None], "boolean", [True, False, None]),
        ([Decimal("1.5"), 2], "decimal(5,2)", [Decimal("1.50"), Decimal(2)]),
        (["a", np.str_("b"), None], "string", ["a", "b", None]),
        ([b"a", bytearray(b"b")], "binary", [b"a", b"b"]),
        (
            [dt.date(2020, 1, 2), np.datetime64("2020-01-03")],
            "date",
            [dt.date(2020, 1, 2), dt.date(2020, 1, 3)],
        ),
        ([pd.Timestamp("2020-01-02"), pd.NaT], "timestamp_ntz", [dt.datetime(2020, 1, 2), None]),
        ([np.datetime64(0, "ns"), np.datetime64("NaT")], "timestamp_ntz", [dt.datetime(1970, 1, 1), None]),
        (
            [dt.datetime(2020, 1, 2, 3, tzinfo=dt.timezone(dt.timedelta(hours=2)))],
            "timestamp",
            [dt.datetime(2020, 1, 2, 1, tzinfo=UTC)],
        ),
        (
            [dt.timedelta(1), np.timedelta64(5, "s")],
            "interval second",
            [dt.timedelta(1), dt.timedelta(seconds=5)],
        ),
        ([[1], (), None, np.array([2, 3])], "array<bigint>", [[1], [], None, [2, 3]]),
        (np.array([[1, 2], [3, 4]]), "array<bigint>", [[1, 2], [3, 4]]),
        ([{"a": 1}, None, [("b", None)]], "map<string,bigint>", [[("a", 1)], None, [("b", None)]]),
        (
            [[{"a": [(1, "x")]}]],
            "array<map<string,array<struct<n:int,s:string>>>>",
            [[[("a", [{"n": 1, "s": "x"}])]]],
        ),
        (pa.scalar(3), "bigint", [3]),
        (pa.array([3], pa.int8()), "bigint", [3]),
        (pa.chunked_array([[1], [2]]), "bigint", [1, 2]),
        (np.array([1, 2], "i2"), "bigint", [1, 2]),
        (np.array([1, 2], ">i8"), "bigint", [1, 2]),
        (np.arange(6)[::2], "double", [0.0, 2.0, 4.0]),
        (np.array(["a", "b"]), "string", ["a", "b"]),
        (np.array(["a", None], object), "string", ["a", None]),
        (np.array(["2020-01-02", "NaT"], "M8[D]"), "date", [dt.date(2020, 1, 2), None]),
        (np.array(["2020-01-02T03"], "M8[h]"), "timestamp_ntz", [dt.datetime(2020, 1, 2, 3)]),
        (np.array([1], "m8[D]"), "interval day", [dt.timedelta(1)]),
        (pd.Series([1, None], dtype="Int64"), "bigint", [1, None]),
        (pd.Series(["a", None, np.nan]), "string", ["a", None, None]),
        (pd.Series(["a", None], dtype="string"), "string", ["a", None]),
        (pd.Series(["a", "b"], dtype="category"), "string", ["a", "b"]),
        (pd.Series([1, 2], index=[7, 8]), "int", [1, 2]),
        (pd.to_datetime(pd.Series(["2020-01-02", None])), "timestamp_ntz", [dt.datetime(2020, 1, 2), None]),
        (
            pd.Series(pd.to_datetime(["2020-01-02"]).tz_localize("Europe/Oslo")),
            "timestamp",
            [dt.datetime(2020, 1, 1, 23, tzinfo=UTC)],
        ),
    ],
)
def test_values_of_the_declared_type_become_an_array(values: Any, ddl: str, expected: list[Any]) -> None:
    t = parse_type(ddl)
    result = array_from(values, t)
    result.validate(full=True)
    assert isinstance(result, pa.Array)
    assert result.type == t
    assert python_values(result) == expected


def test_a_struct_is_a_dict_tuple_named_tuple_or_dataclass() -> None:
    rows = [
        {"y": "a", "x": 1},
        (1, "a"),
        PointTuple("a", 1),
        PointData("a", 1),
        pa.scalar({"x": 1, "y": "a"}),
    ]
    assert array_from(rows, POINT).to_pylist() == [{"x": 1, "y": "a"}] * 5
    assert array_from([None, (1, None)], POINT).to_pylist() == [None, {"x": 1, "y": None}]
    assert array_from([], POINT).type == POINT
    assert array_from([{}, None], pa.struct([])).to_pylist() == [{}, None]


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.0, np.nan]),
        [1.0, float("nan")],
        pd.Series([1.0, np.nan]),
        pd.Series([1.0, np.nan], dtype=object),
    ],
)
def test_nan_stays_a_number(values: Any) -> None:
    result = array_from(values, DOUBLE)
    assert result.null_count == 0
    assert np.isnan(result[1].as_py())


@pytest.mark.parametrize(
    ("values", "ddl", "message"),
    [
        ([1, "2"], "bigint", r"expected BIGINT, found '2' \(str\) at position 1"),
        ([1, 1.5], "bigint", r"expected BIGINT, found 1.5 \(float\) at position 1"),
        ([1.0], "bigint", r"found 1.0 \(float\)"),
        ([1, True], "bigint", r"expected BIGINT, found True \(bool\) at position 1"),
        ([np.bool_(True)], "bigint", r"found True \(bool\)"),
        ([1, 300], "tinyint", r"expected TINYINT, found 300 \(int\) at position 1"),
        ([2**63], "bigint", r"found 9223372036854775808 \(int\)"),
        ([1], "boolean", r"expected BOOLEAN, found 1 \(int\)"),
        ([True], "double", r"expected DOUBLE, found True \(bool\)"),
        ([2**53 + 1], "double", r"found 9007199254740993 \(int\)"),
        ([1.0, 1e300], "float", r"found 1e\+300 \(float\) at position 1: it is out of range"),
        ([1.5], "decimal(5,2)", r"found 1.5 \(float\)"),
        ([Decimal("1.555")], "decimal(5,2)", r"found Decimal\('1.555'\)"),
        ([Decimal("NaN")], "decimal(5,2)", r"found Decimal\('NaN'\)"),
        ([1], "string", r"expected STRING, found 1 \(int\)"),
        ([b"a"], "string", r"expected STRING, found b'a' \(bytes\)"),
        (["a"], "binary", r"expected BINARY, found 'a' \(str\)"),
        (["\ud800"], "string", "surrogates"),
        ([dt.datetime(2020, 1, 2)], "date", r"expected DATE, found .* \(datetime\)"),
        ([dt.date(2020, 1, 2)], "timestamp_ntz", r"expected TIMESTAMP_NTZ, found .* \(date\)"),
        ([dt.datetime(2020, 1, 2)], "timestamp", "no zone"),
        ([dt.datetime(2020, 1, 2, tzinfo=UTC)], "timestamp_ntz", "have a zone"),
        ([pd.Timestamp(1)], "timestamp_ntz", "nanoseconds"),
        ([pd.Timedelta(1)], "interval second", "nanoseconds"),
        ([np.datetime64(1, "ns")], "timestamp_ntz", r"\(datetime64\)"),
        ([np.datetime64(1, "ns")], "bigint", r"\(datetime64\)"),
        ("abc", "string", "one per row"),
        (3, "bigint", "one per row"),
        (None, "bigint", "one per row"),
        ({1, 2}, "bigint", "one per row"),
        (["abc"], "array<string>", "an array is a list"),
        ([{"a": 1}, 3], "map<string,bigint>", "a map is a dict"),
        ([{None: 1}], "map<string,bigint>", "in key, found .*NOT NULL"),
        ([[1, "a"]], "array<bigint>", r"expected BIGINT in element, found 'a' \(str\)"),
        ([(1,)], "struct<x:int,y:int>", "1 values for 2 fields"),
        ([[1, 2]], "struct<x:int,y:int>", "a struct is a dict"),
        ([{"x": 1}], "struct<x:int,y:int>", r"lacks \['y'\]"),
        ([{"x": 1, "y": 2, "z": 3}], "struct<x:int,y:int>", r"unknown \['z'\]"),
        ([(None, 1)], "struct<x:int not null,y:int>", "in x, found .*NOT NULL"),
        ([(1, (2, "a"))], "struct<x:int,y:struct<p:int,q:int>>", r"expected INT in y.q, found 'a' \(str\)"),
        (np.array([1.5]), "bigint", "expected BIGINT, found Arrow type double"),
        (np.array([True]), "bigint", "expected BIGINT, found Arrow type bool"),
        (np.array(["1"]), "bigint", "expected BIGINT, found Arrow type string"),
        (np.array([[1]]), "bigint", "2 dimensions"),
        (np.array(1), "bigint", "0 dimensions"),
        (np.array([1 + 2j]), "double", r"\(complex\)"),
        (pd.Series([1.0, None]), "bigint", "integers with gaps"),
        (pa.scalar("a"), "bigint", "expected BIGINT, found Arrow type string"),
    ],
)
def test_values_of_another_type_are_refused_by_name(values: Any, ddl: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        array_from(values, parse_type(ddl))


def test_python_values_are_those_of_arrow() -> None:
    arrays = [
        pa.array([1, 2]),
        pa.array([1, None]),
        pa.array([True, False]),
        pa.array([0.5, 1.5], pa.float32()),
        pa.array(["a", None]),
        pa.array([b"a", None]),
        pa.array([Decimal("1.5")]),
        pa.array([dt.datetime(2020, 1, 2, tzinfo=UTC)], pa.timestamp("us", tz="UTC")),
        pa.array([{"x": 1}, None]),
        pa.array([[("a", 1)]], pa.map_(STRING, LONG)),
        pa.array([1, 2, 3])[1:],
        *(pa.array(range(100), t).take(pa.array(list(range(100)) * 20))[1:] for t in (pa.int8(), LONG, DOUBLE)),
        pa.array([0.5, None] * 1000),
    ]
    for array in arrays:
        values = python_values(array)
        assert values == array.to_pylist()
        assert [type(value) for value in values] == [type(value) for value in array.to_pylist()]
