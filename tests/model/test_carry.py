"""What users say of states whose type changes: what is refused at once, and what becomes of values."""

from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle

import millstream as ms
from millstream.errors import UserError
from millstream.model.carry import Rule, carry, convert, drop, fresh, lift_of
from millstream.model.kinds import State


def named(declared: Any, name: str = "total") -> Any:
    declared.name = name
    return declared


def lifted(rule: Rule, old: Any, new: Any, values: list[Any]) -> list[Any]:
    """What becomes of values, after the lift has travelled."""
    lift = lift_of(rule, named(old), named(new))
    assert lift is not None
    kinds = [each.stored_type if isinstance(each, State) else each.arrow_type for each in (old, new)]
    result = pickle.loads(cloudpickle.dumps(lift))(pa.array(values, kinds[0]))
    assert result.type == kinds[1]
    result.validate(full=True)
    listed: list[Any] = result.to_pylist()
    return listed


WIDER = [
    ("int", "long", 2**31 - 1, 2**31 - 1),
    ("byte", "float", -7, -7.0),
    ("int", "double", 2**31 - 1, 2147483647.0),
    ("float", "double", 0.5, 0.5),
    ("int", "decimal(12, 2)", 7, Decimal("7.00")),
    ("decimal(5, 1)", "decimal(8, 3)", Decimal("1.5"), Decimal("1.500")),
    ("struct<a: int>", "struct<a: long, b: string>", {"a": 1}, {"a": 1, "b": None}),
    ("struct<a: int, b: int>", "struct<b: int, a: int>", {"a": 1, "b": 2}, {"a": 1, "b": 2}),
    ("array<struct<a: int>>", "array<struct<a: int, b: int>>", [{"a": 1}, None], [{"a": 1, "b": None}, None]),
    ("map<string, int>", "map<string, long>", [("x", 1), ("y", None)], [("x", 1), ("y", None)]),
    ("struct<a: int NOT NULL>", "struct<a: int>", {"a": 1}, {"a": 1}),
]


@pytest.mark.parametrize(("old", "new", "value", "expected"), WIDER)
def test_a_type_that_holds_every_value_needs_no_more_than_carry(old: str, new: str, value: Any, expected: Any) -> None:
    for rule in (carry(), carry(new)):
        assert lifted(rule, ms.Value(old), ms.Value(new), [value, None]) == [expected, None]


CASTS = [
    ("long", "double", 5, 5.0),
    ("long", "int", 5, 5),
    ("double", "long", 5.0, 5),
    ("double", "float", 0.5, 0.5),
    ("long", "string", 5, "5"),
    ("string", "long", "5", 5),
    ("boolean", "int", True, 1),
    ("struct<a: int, b: int>", "struct<a: int>", {"a": 1, "b": 2}, {"a": 1}),
    ("struct<a: struct<b: long, c: int>>", "struct<a: struct<b: double>>", {"a": {"b": 1, "c": 2}}, {"a": {"b": 1.0}}),
    ("array<long>", "array<double>", [1, 2], [1.0, 2.0]),
    ("struct<a: int>", "struct<a: int NOT NULL>", {"a": 1}, {"a": 1}),
]


@pytest.mark.parametrize(("old", "new", "value", "expected"), CASTS)
def test_what_may_change_or_lose_something_must_be_said(old: str, new: str, value: Any, expected: Any) -> None:
    with pytest.raises(UserError, match="cannot be carried to .* without saying so") as caught:
        lift_of(carry(), named(ms.Value(old)), named(ms.Value(new)))
    assert "state 'total'" in str(caught.value)
    for text in (ms.Value(old).type_text, ms.Value(new).type_text):
        assert text in str(caught.value)
    assert lifted(carry(new), ms.Value(old), ms.Value(new), [value, None]) == [expected, None]


@pytest.mark.parametrize(
    ("old", "new", "values", "shown"),
    [
        ("long", "int", [1, 2**40], str(2**40)),
        ("long", "double", [1, 2**53 + 1], str(2**53 + 1)),
        ("double", "long", [1.0, 1.5], "1.5"),
        ("double", "float", [0.5, 0.1], "0.1"),
        ("string", "long", ["1", "one"], "'one'"),
        ("struct<a: int>", "struct<a: int NOT NULL>", [{"a": 1}, {"a": None}], "{'a': None}"),
        ("array<long>", "array<int>", [[1], [2**40]], f"[{2**40}]"),
    ],
)
def test_a_value_that_a_cast_would_change_is_named_with_both_types(
    old: str, new: str, values: list[Any], shown: str
) -> None:
    with pytest.raises(UserError, match="could not be taken from") as caught:
        lifted(carry(new), ms.Value(old), ms.Value(new), values)
    assert f"the value {shown} could not" in str(caught.value)
    for text in ("state 'total'", ms.Value(old).type_text, ms.Value(new).type_text):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "old", "new", "why"),
    [
        (carry(), ms.Value("long"), ms.Map("string", "long"), "a Value stays a Value"),
        (convert(len), ms.Bag("long"), ms.Value("long"), "a Bag stays a Bag"),
        (carry(), ms.Timer(), ms.Value("long"), "a Timer stays a Timer"),
        (carry(), ms.Map("int", "long"), ms.Map("long", "long"), "the keys of its entries, INT, cannot change"),
        (carry(), ms.Timer(ms.EVENT_TIME), ms.Timer(ms.WALL_TIME), "timers of event time cannot become"),
        (
            carry(),
            ms.Value("long", ttl="1 hour"),
            ms.Value("long", ttl="1 hour", ttl_time=ms.EVENT_TIME),
            "its values expire by wall time, which cannot change",
        ),
        (carry("double"), ms.Value("long"), ms.Value("string"), "it is declared as STRING"),
        (carry("object"), ms.Value("long"), ms.Value(object), "nobody knows what Python objects hold"),
        (carry("long"), ms.Value(object), ms.Value("long"), "nobody knows what Python objects hold"),
        (carry("date"), ms.Value("boolean"), ms.Value("date"), "BOOLEAN cannot be carried to DATE"),
        (carry("array<long>"), ms.Value("long"), ms.Value("array<long>"), "cannot be carried to ARRAY<"),
        (
            carry("struct<a: int, b: int NOT NULL>"),
            ms.Value("struct<a: int>"),
            ms.Value("struct<a: int, b: int NOT NULL>"),
            "the new field 'b' is NOT NULL",
        ),
        (convert(len, batch=True), ms.Value(object), ms.Value("long"), "leave batch out"),
        (convert(len), ms.Timer(), ms.Timer(payload="long"), "a payload is missing"),
    ],
)
def test_what_cannot_be_is_refused_before_any_value_is_seen(rule: Rule, old: Any, new: Any, why: str) -> None:
    with pytest.raises(UserError) as caught:
        lift_of(rule, named(old), named(new))
    assert why in str(caught.value)
    assert "'total'" in str(caught.value)


def test_nothing_is_lifted_where_nothing_changes() -> None:
    for old, new in [
        (ms.Value("long", default=1), ms.Value("bigint", default=2)),
        (ms.Value("long", default=1), ms.Value("long")),
        (ms.Value(object), ms.Value(object, default=[])),
        (ms.Value("long", ttl="1 hour"), ms.Value("long", bloom=True)),
        (ms.Bag("long"), ms.Bag("long")),
        (ms.Map("string", "long"), ms.Map("string", "long")),
        (ms.Timer(payload="long"), ms.Timer(payload="long")),
        (ms.Hold(), ms.Hold()),
    ]:
        assert lift_of(carry(), named(old), named(new)) is None
    for rule in (fresh(), drop()):
        assert lift_of(rule, named(ms.Value("long")), named(ms.Bag("string"))) is None


def test_a_null_becomes_the_default_where_there_is_one() -> None:
    long, counted = ms.Value("long"), ms.Value("long", default=7)
    assert lifted(carry(), long, counted, [1, None]) == [1, 7]
    assert lifted(carry(), ms.Value("int"), ms.Value("long", default=7), [1, None]) == [1, 7]
    assert lifted(convert(str), long, ms.Value("string", default="-"), [1, None]) == ["1", "-"]
    assert lifted(convert(lambda n: None), long, ms.Value("string", default="-"), [1]) == ["-"]
    kind = "struct<a: int>"
    assert lifted(carry(), ms.Value(kind), ms.Value(kind, default={"a": 1}), [None]) == [{"a": 1}]
    assert lifted(carry(), ms.Map("string", "int"), ms.Map("string", "int", default=3), [None, 4]) == [3, 4]


def test_conversions_of_values_entries_and_what_bags_hold() -> None:
    def half(n: int) -> float:
        return n / 2

    assert lifted(convert(half), ms.Value("long"), ms.Value("double"), [1, None, 3]) == [0.5, None, 1.5]
    assert lifted(convert(half), ms.Map("string", "long"), ms.Map("string", "double"), [1, 2]) == [0.5, 1.0]
    bags = [[1, 2], [], None, [None, 3]]
    assert lifted(convert(half), ms.Bag("long"), ms.Bag("double"), bags) == [[0.5, 1.0], [], None, [None, 1.5]]
    assert lifted(carry(), ms.Bag("int"), ms.Bag("long"), bags) == bags
    assert lifted(convert(lambda n: {"n": n}), ms.Value("long"), ms.Value("struct<n: long>"), [1]) == [{"n": 1}]
    assert lifted(convert(lambda row: row["n"]), ms.Value("struct<n: long>"), ms.Value("long"), [{"n": 1}]) == [1]
    together = convert(lambda values: pc.multiply(values, 2), batch=True)
    assert lifted(together, ms.Value("long"), ms.Value("long"), [1, None, 3]) == [2, None, 6]
    assert lifted(together, ms.Bag("long"), ms.Bag("double"), bags) == [[2.0, 4.0], [], None, [None, 6.0]]


def test_conversions_of_python_objects_see_the_objects() -> None:
    values = [pickle.dumps(value) for value in ({"n": 1}, None)]
    found = lifted(convert(lambda it: it or "none"), ms.Value(object), ms.Value(object), [*values, None])
    assert [None if data is None else pickle.loads(data) for data in found] == [{"n": 1}, "none", None]
    assert lifted(convert(lambda it: it["n"]), ms.Value(object), ms.Value("long"), values[:1]) == [1]
    made = lifted(convert(lambda n: [n]), ms.Bag("long"), ms.Bag(object), [[1, 2]])
    assert [[pickle.loads(data) for data in bag] for bag in made] == [[[1], [2]]]


def test_timers_keep_their_times_and_only_payloads_change() -> None:
    bare, old, new = ms.Timer(), ms.Timer(payload="int"), ms.Timer(payload="long")
    stored = [{"time": 2**60 + 1, "payload": 5}, {"time": 2, "payload": None}]
    assert lifted(carry(), old, new, stored) == stored
    assert lifted(convert(lambda n: n * 2), old, new, stored) == [{**stored[0], "payload": 10}, stored[1]]
    assert lifted(carry(), bare, new, [{"time": 3}]) == [{"time": 3, "payload": None}]
    assert lifted(carry(), old, bare, stored) == [{"time": 2**60 + 1}, {"time": 2}]


def test_a_conversion_that_fails_names_the_value_and_both_types() -> None:
    def picky(n: int) -> Any:
        return {1: "1", 2: 2}.get(n) or 1 / 0

    for values, shown, why in [
        ([1, 2], "the value 2 could", "it became 2: expected STRING, found 2 (int)"),
        ([1, 3], "the value 3 could", "ZeroDivisionError: division by zero"),
    ]:
        with pytest.raises(UserError) as caught:
            lifted(convert(picky), ms.Value("long"), ms.Value("string"), values)
        for part in (shown, why, "state 'total'", "BIGINT", "STRING", "picky"):
            assert part in str(caught.value)
    for fn, why in [
        (lambda values: values.cast(pa.string())[1:], "1 new values found, 2 expected"),
        (lambda values: values, "expected STRING, found Arrow type int64"),
        (lambda values: 1 / 0, "ZeroDivisionError"),
    ]:
        with pytest.raises(UserError, match=why):
            lifted(convert(fn, batch=True), ms.Value("long"), ms.Value("string"), [1, 2])


def test_rules_say_what_they_are_and_refuse_what_is_none() -> None:
    assert carry("BIGINT", source="sum") == carry("long", source="sum")
    assert carry(object).kind == "object"
    assert (str(carry()), str(carry("double")), str(convert(len))) == ("carry()", "carry('DOUBLE')", "convert(len)")
    for wrong in (lambda: carry("longs"), lambda: carry(3), lambda: convert("fn")):  # type: ignore[arg-type]
        with pytest.raises(UserError):
            wrong()
