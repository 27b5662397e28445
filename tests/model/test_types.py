"""Types: DDL and Arrow, and user values becoming exactly what was declared."""

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
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import UserError
from millstream.model.types import (
    SPARK_METADATA_KEY,
    array_from,
    check_key_type,
    conform,
    format_schema,
    format_type,
    is_fixed_number,
    parse_schema,
    parse_type,
    python_values,
)

LONG, DOUBLE, STRING = pa.int64(), pa.float64(), pa.string()
POINT = parse_type("struct<x: bigint not null, y: string>")
UTC = dt.UTC

SCALARS = [
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    LONG,
    pa.float32(),
    DOUBLE,
    STRING,
    pa.binary(),
    pa.date32(),
    pa.timestamp("us", tz="UTC"),
    pa.timestamp("us"),
    pa.duration("us"),
]

SPARK_DDLS = [
    "boolean",
    "byte",
    "tinyint",
    "short",
    "SMALLINT",
    "int",
    "Integer",
    "long",
    "bigint",
    "float",
    "real",
    "double",
    "decimal",
    "dec(5)",
    "numeric ( 38 , 38 )",
    "string",
    "string collate utf8_binary",
    "binary",
    "date",
    "timestamp",
    "timestamp_ltz",
    "timestamp(6)",
    "timestamp with local time zone",
    "timestamp_ntz",
    "timestamp without time zone",
    "interval day",
    "interval DAY TO second",
    "interval hour to minute",
    "interval second",
    "array<int>",
    "array<array<map<string,array<timestamp>>>>",
    "map<int, string>",
    "map<struct<a: int>, array<decimal(3,1)>>",
    "struct<>",
    "struct<a: int, b string NOT NULL COMMENT 'it\\'s', c:array<struct<d:date not null>>>",
    "struct<`a b`: int, `c``d` long, 1a int, select int, `` int>",
    r"struct<a int comment 'x\n\u0041\101\%\q''' /* note */ 'y', b int comment ''> -- end",
]

UNSUPPORTED_DDLS = {
    "interval": "calendar INTERVAL",
    "interval year to month": "months in an INT",
    "interval month": "months in an INT",
    "variant": "variant_get",
    "void": "CAST\\(NULL AS STRING\\)",
    "time": "cast it to STRING",
    "time(6)": "cast it to STRING",
    "geometry(4326)": "st_asbinary",
    "geography(4326)": "st_asbinary",
    "string collate UNICODE_CI": "collation UNICODE_CI",
    "timestamp_ntz(9)": "precision 6",
}

MALFORMED_DDLS = {
    "": 1,
    "int int": 5,
    "bool": 1,
    "`int`": 1,
    "int(3)": 4,
    "array": 6,
    "array<int": 10,
    "array<int not null>": 11,
    "map<int>": 8,
    "struct<a>": 9,
    "struct<a int,>": 14,
    "struct<1 int>": 8,
    "struct<1e5 int>": 8,
    "struct<a-b int>": 9,
    "struct<a int comment 'x' not null>": 26,
    "struct<a int comment x>": 22,
    "char": 5,
    "decimal()": 9,
    "decimal(5,-1)": 11,
    "decimal(39)": 1,
    "decimal(5,6)": 1,
    "decimal(0)": 1,
    "interval second to day": 20,
    "interval day to day": 17,
    "double precision": 8,
}


def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.one_of(
        inner.map(lambda t: pa.list_(pa.field("element", t))),
        st.tuples(inner, inner).map(lambda kv: pa.map_(pa.field("key", kv[0], nullable=False), kv[1])),
        fields(inner, min_size=0).map(pa.struct),
    )


def fields(types: st.SearchStrategy[pa.DataType], min_size: int) -> st.SearchStrategy[list[pa.Field]]:
    one = st.builds(
        lambda name, t, nullable: pa.field(name, t, nullable=nullable),
        st.text(st.characters(codec="utf-8"), max_size=5),
        types,
        st.booleans(),
    )
    return st.lists(one, min_size=min_size, max_size=3, unique_by=lambda field: field.name.lower())


decimals = st.integers(1, 38).flatmap(lambda p: st.integers(0, p).map(lambda s: pa.decimal128(p, s)))
types = st.recursive(st.sampled_from(SCALARS) | decimals, nested, max_leaves=6)


def spelled_out(t: pa.DataType) -> str:
    """The type with what `==` leaves out: the names of lists' and maps' children."""
    return str(pa.schema([pa.field("t", t)]).to_string(truncate_metadata=False)) + repr(
        [t.field(i) for i in range(t.num_fields)]
    )


# ---------------------------------------------------------------------------------------------------- DDL


@given(types)
def test_parsing_the_formatted_type_gives_the_type_back(t: pa.DataType) -> None:
    assert parse_type(format_type(t)) == t


@given(fields(types, min_size=1))
def test_parsing_the_formatted_schema_gives_the_schema_back(of: list[pa.Field]) -> None:
    assert parse_schema(format_schema(pa.schema(of))) == pa.schema(of)


@given(st.text(st.characters(codec="utf-8")))
def test_a_comment_survives_formatting_and_parsing(comment: str) -> None:
    quoted = comment.replace("\\", "\\\\").replace("'", "\\'")
    schema = parse_schema(f"a int comment '{quoted}'")
    assert parse_schema(format_schema(schema)).equals(schema, check_metadata=True)


def test_the_canonical_form_is_that_of_spark() -> None:
    schema = parse_schema("a: int not null comment 'it''s', `b c` struct<d long, `e``f`: map<string,array<dec>>>")
    assert format_schema(schema) == (
        "a INT NOT NULL COMMENT 'it\\'s', `b c` STRUCT<d: BIGINT, `e``f`: MAP<STRING, ARRAY<DECIMAL(10,0)>>>"
    )


def test_a_schema_is_a_list_of_fields_or_one_struct() -> None:
    expected = pa.schema([pa.field("a", pa.int32(), nullable=False), pa.field("struct", STRING)])
    assert parse_schema("a int not null, struct string") == expected
    assert parse_schema("a: int NOT NULL, struct: string") == expected
    assert parse_schema("struct<a int not null, struct string>") == expected


def test_char_and_varchar_are_strings() -> None:
    assert {parse_type(ddl) for ddl in ("char(3)", "character(3)", "VARCHAR (10)")} == {STRING}


def test_a_comment_is_kept_where_spark_keeps_it() -> None:
    field = parse_schema("a int comment 'x'").field("a")
    assert field.metadata == {SPARK_METADATA_KEY: b'{"comment": "x"}'}


@pytest.mark.parametrize(("ddl", "advice"), UNSUPPORTED_DDLS.items())
def test_an_unsupported_type_is_refused_with_advice(ddl: str, advice: str) -> None:
    with pytest.raises(UserError, match=advice) as caught:
        parse_type(f"array<{ddl}>")
    assert "supported types are" in str(caught.value)


@pytest.mark.parametrize(("ddl", "column"), MALFORMED_DDLS.items())
def test_a_syntax_error_is_shown_at_its_column(ddl: str, column: int) -> None:
    with pytest.raises(UserError) as caught:
        parse_type(ddl)
    message = str(caught.value)
    assert repr(ddl) in message
    assert f"column {column})" in message
    assert message.endswith(f"  {ddl}\n  {' ' * (column - 1)}^")


def test_a_syntax_error_in_a_later_line_shows_that_line() -> None:
    with pytest.raises(UserError, match=r"line 2, column 3(?s:.*)\n  b !int\n    \^"):
        parse_schema("a int,\nb !int")


@pytest.mark.parametrize("ddl", ["a int, A string", "x struct<`b`: int, B: int>", "x array<struct<a:int,a:int>>"])
def test_a_repeated_name_is_refused_whatever_its_case(ddl: str) -> None:
    with pytest.raises(UserError, match="repeats"):
        parse_schema(ddl)


@pytest.mark.parametrize(
    "t",
    [
        pa.uint8(),
        pa.large_string(),
        pa.timestamp("ns"),
        pa.timestamp("us", tz="Europe/Oslo"),
        pa.null(),
        pa.time64("us"),
        pa.decimal128(5, -2),
        pa.list_(pa.field("element", LONG, nullable=False)),
        pa.map_(STRING, pa.field("value", LONG, nullable=False)),
    ],
)
def test_a_type_without_ddl_is_not_formatted(t: pa.DataType) -> None:
    with pytest.raises(UserError, match="no words for"):
        format_type(t)


@pytest.mark.spark
def test_types_are_those_of_sparks_parser_and_arrow_conversion(spark: Any) -> None:
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import _parse_datatype_json_string

    parser = spark._jsparkSession.sessionState().sqlParser()
    for ddl in SPARK_DDLS:
        by_spark = to_arrow_type(_parse_datatype_json_string(parser.parseDataType(ddl).json()), timezone="UTC")
        ours = parse_type(ddl)
        assert ours.equals(by_spark, check_metadata=True), ddl
        assert spelled_out(ours) == spelled_out(by_spark), ddl
        assert parser.parseDataType(format_type(ours)).json(), ddl
    for ddl in MALFORMED_DDLS.keys() - {"decimal(0)"}:
        with pytest.raises(Exception, match=r"\[[A-Z_.]+\]"):
            parser.parseDataType(ddl)


# ------------------------------------------------------------------------------------------- kinds of types


@pytest.mark.parametrize("t", [*SCALARS, pa.decimal128(10, 2)])
def test_every_scalar_can_be_a_key(t: pa.DataType) -> None:
    check_key_type(t)


@pytest.mark.parametrize("t", [pa.list_(LONG), pa.map_(STRING, LONG), POINT, pa.null(), pa.time64("us")])
def test_nothing_else_can_be_a_key(t: pa.DataType) -> None:
    with pytest.raises(UserError, match="a key is"):
        check_key_type(t)


def test_fixed_numbers_are_booleans_integers_and_floats() -> None:
    assert [t for t in SCALARS if is_fixed_number(t)] == SCALARS[:7]
    assert not is_fixed_number(pa.decimal128(10, 2))


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
    assert spelled_out(result.type) == spelled_out(t)
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
    ]
    for array in arrays:
        values = python_values(array)
        assert values == array.to_pylist()
        assert [type(value) for value in values] == [type(value) for value in array.to_pylist()]
