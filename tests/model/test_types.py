"""Types: DDL and Arrow, there and back, as Spark has them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import UserError
from millstream.model.types import (
    SPARK_METADATA_KEY,
    check_key_type,
    format_schema,
    format_type,
    is_fixed_number,
    parse_schema,
    parse_type,
)

LONG, DOUBLE, STRING = pa.int64(), pa.float64(), pa.string()
POINT = parse_type("struct<x: bigint not null, y: string>")

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
