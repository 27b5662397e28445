"""count and aggregate: every aggregate against plain Python, over epochs, tasks, slots and restarts."""

from __future__ import annotations

import datetime as dt
import math
import random
from collections import defaultdict
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import aggregated, rows

import millstream as ms
from millstream.library import partial, reduce
from millstream.library.parts import Aggregate
from millstream.store.objects import open_store
from millstream.testing import Simulated

ALL = {
    "n": ms.count(),
    "known": ms.count("x"),
    "total": ms.sum("x"),
    "low": ms.min("x"),
    "high": ms.max("x"),
    "avg": ms.mean("x"),
    "f": ms.first("x"),
    "l": ms.last("x"),
    "every": ms.collect("x"),
}


class Passed(ms.Computation):
    """Passes rows on as they are."""

    output = "k string, count long"

    def on_record(self, row: Any, at: ms.At) -> Any:
        yield at.key, row[1]


def build(aggregates: dict[str, Aggregate], *key: str) -> ms.Query:
    query = ms.Query("totals")
    query.source("s", None).key_by(*(key or ("k",))).aggregate("totals", **aggregates).sink("out", ms.Memory())
    return query


def test_a_count_is_a_row_for_each_key_that_an_epoch_changes() -> None:
    query = ms.Query("words")
    query.source("s", None).key_by("k").count("counts").sink("out", ms.Memory())
    sim = Simulated(query, {"s": "k string"}, slots=3, map_tasks=3)
    sim.feed(s=[("a",), ("b",), ("a",), (None,)])
    sim.feed()
    sim.feed(s=[("a",), (None,)])
    assert rows(sim.delivered["out"][0]) == rows([("a", 2), ("b", 1), (None, 1)])
    assert 1 not in sim.delivered["out"] or sim.delivered["out"][1] == []
    assert rows(sim.delivered["out"][2]) == rows([("a", 3), (None, 2)])
    assert dict(sim.state("counts")) == {"a": 3, "b": 1, None: 2}
    assert sim.graph.steps[0].outputs[""].names == ["k", "count"]


@pytest.mark.parametrize("kind", ["long", "int", "double", "float"])
def test_every_aggregate_of_numbers_is_that_of_plain_python(kind: str, rng: random.Random) -> None:
    whole = kind in ("long", "int")
    choices: list[Any] = [None, *range(-9, 10)] if whole else [None, math.nan, -0.0, 0.5, 1.5, -2.25, 8.0, math.inf]
    sim = Simulated(build(ALL), {"s": f"k string, x {kind}"}, slots=3, map_tasks=4)
    seen: dict[Any, list[Any]] = defaultdict(list)
    for _ in range(6):
        records = [(rng.choice(["a", "b", "c", None]), rng.choice(choices)) for _ in range(rng.choice([0, 1, 30]))]
        for key, value in records:
            seen[key].append(value)
        sim.feed(s=records)
        changed = {key for key, _ in records}
        expected = [(key, *aggregated(seen[key])) for key in changed]
        assert rows(sim.delivered["out"].get(sim.epoch, [])) == rows(expected)


def test_zeros_and_all_nans_are_one_key_each_and_their_records_stay_in_order(rng: random.Random) -> None:
    other: float = np.array([0x7FF8000000000123]).view(np.float64)[0].item()
    text = ms.combine("x", lambda a, b: a + b, type="string", lift=str)
    for kind in ("double", "float"):
        query = build({"f": ms.first("x"), "l": ms.last("x"), "every": ms.collect("x"), "text": text})
        sim = Simulated(query, {"s": f"k {kind}, x long"}, map_tasks=2)
        seen: dict[str, list[int]] = defaultdict(list)
        for epoch in range(4):
            records = [
                (rng.choice([0.0, -0.0, math.nan, other, 1.0, None]), 100 * epoch + number) for number in range(40)
            ]
            for key, number in records:
                seen[repr(key).lstrip("-")].append(number)
            sim.feed(s=records)
            found = {repr(row[0]): row[1:] for row in sim.delivered["out"][sim.epoch]}
            assert found == {k: (all_[0], all_[-1], all_, "".join(map(str, all_))) for k, all_ in seen.items()}


def test_a_sum_of_decimals_that_does_not_fit_is_an_error_wherever_it_is_made() -> None:
    query, large = build({"total": ms.sum("x")}), Decimal("9" * 38)
    at_once = Simulated(query, {"s": "k long, x decimal(38,0)"})
    with pytest.raises(ms.StepError, match=r"the sum 'total' does not fit DECIMAL\(38,0\)"):
        at_once.feed(s=[(1, large)] * 7)
    later = Simulated(query, {"s": "k long, x decimal(38,0)"})
    later.feed(s=[(1, large), (1, large.copy_negate()), (1, large)])
    later.feed(s=[(1, large.copy_negate()), (2, large)])
    assert rows(later.delivered["out"][1]) == rows([(1, Decimal(0)), (2, large)])
    with pytest.raises(ms.StepError, match="of fewer digits, or of DOUBLE"):
        later.feed(s=[(2, Decimal(1))])


def test_keys_on_which_ones_own_function_fails_become_letters() -> None:
    query = ms.Query("letters")
    both = ms.combine("x", lambda a, b: a + b if 13 not in (a, b) else a / 0)
    totals = query.source("s", None).key_by("k").aggregate("totals", on_error="dead_letter", total=both)
    totals.sink("out", ms.Memory())
    totals.output("dead_letter").sink("dead", ms.Memory())
    sim = Simulated(query, {"s": "k string, x long"}, map_tasks=2)
    sim.feed(s=[("a", 1), ("b", 1)])
    sim.feed(s=[("a", 13), ("b", 2), ("a", 3)])
    sim.feed(s=[("a", 5)])
    assert rows(sim.outputs("out")) == rows([("a", 1), ("b", 1), ("b", 3), ("a", 6)])
    assert len(sim.outputs("dead")) == 2
    with pytest.raises(ms.UserError, match="'on_error' is an option here"):
        build({"on_error": ms.count()})


def test_the_mean_of_large_integers_is_that_of_the_nearest_doubles() -> None:
    sim = Simulated(build({"avg": ms.mean("x")}), {"s": "k long, x long"})
    sim.feed(s=[(1, 2**53 + 1), (1, 2**63 - 1), (2, 2**53 + 1)])
    assert dict(sim.outputs("out")) == {1: (float(2**53) + float(2**63)) / 2, 2: float(2**53)}


def test_min_max_first_and_collect_take_any_type() -> None:
    aggregates = {"low": ms.min("x"), "high": ms.max("x"), "f": ms.first("x"), "every": ms.collect("x")}
    cases: dict[str, list[Any]] = {
        "string": ["b", "a", None],
        "binary": [b"b", b"a", None],
        "boolean": [True, False, None],
        "date": [dt.date(2026, 1, 2), dt.date(2026, 1, 1), None],
        "timestamp_ntz": [dt.datetime(2026, 1, 2), dt.datetime(2026, 1, 1), None],
        "decimal(10,2)": [Decimal("2.50"), Decimal("-1.00"), None],
        "interval day to second": [dt.timedelta(2), dt.timedelta(1), None],
        "tinyint": [3, 1, None],
    }
    for kind, values in cases.items():
        sim = Simulated(build(aggregates), {"s": f"k long, x {kind}"}, map_tasks=3)
        for value in (*values, values[1]):
            sim.feed(s=[(1, value), (1, values[0])])
        low, high = sorted(values[:2])
        assert sim.outputs("out")[-1][:4] == (1, low, high, values[0]), kind
        assert sim.outputs("out")[-1][4] == [v for value in (*values, values[1]) for v in (value, values[0])], kind


def test_sums_have_the_types_of_spark() -> None:
    query = build({"a": ms.sum("i"), "b": ms.sum("f"), "c": ms.sum("d"), "e": ms.sum("t"), "m": ms.mean("d")})
    sim = Simulated(query, {"s": "k long, i int, f float, d decimal(10,2), t interval day to second"})
    sim.feed(s=[(1, 2**31 - 1, 0.5, Decimal("0.25"), dt.timedelta(1))] * 3)
    sim.feed(s=[(1, None, None, None, None)])
    expected = (1, 3 * (2**31 - 1), 1.5, Decimal("0.75"), dt.timedelta(3), 0.25)
    assert sim.outputs("out")[0] == expected
    assert sim.outputs("out")[1] == expected
    assert sim.graph.schema_of("totals").field("c").type == pa.decimal128(20, 2)


def test_ones_own_function_is_called_with_earlier_and_later_values_and_nulls_are_passed_over() -> None:
    text = ms.combine("x", lambda a, b: a + b)
    longest = ms.combine("x", max, type="struct<size: long, x: string>", lift=lambda x: {"size": len(x), "x": x})
    tags = ms.combine("x", lambda a, b: sorted({*a, *b}), type="array<string>", lift=lambda x: [x])
    with pytest.raises(ms.StepError, match="'>' not supported"):
        Simulated(build({"longest": longest}), {"s": "k long, x string"}).feed(s=[(1, "a"), (1, "b")])
    sim = Simulated(build({"text": text, "tags": tags}), {"s": "k long, x string"}, map_tasks=3)
    sim.feed(s=[(1, "c"), (1, None), (2, None), (1, "a"), (1, "b")])
    assert rows(sim.outputs("out")) == rows([(1, "cab", ["a", "b", "c"]), (2, None, None)])
    sim.feed(s=[(1, "a"), (2, "z")])
    assert rows(sim.delivered["out"][1]) == rows([(1, "caba", ["a", "b", "c"]), (2, "z", ["z"])])


def test_keys_of_all_kinds_and_several_columns_meet_after_they_were_combined() -> None:
    day, moment = dt.date(2026, 1, 1), dt.datetime(2026, 1, 1)
    ddl = "a double, b decimal(5,2), c interval day to second, d boolean, e date, f timestamp_ntz, g binary, h tinyint"
    key = (math.nan, Decimal("1.00"), dt.timedelta(1), True, day, moment, b"x", 1)
    sim = Simulated(build({"n": ms.count()}, *"abcdefgh"), {"s": ddl}, map_tasks=3)
    nulls = (None,) * 8
    sim.feed(s=[key, nulls, key, (-0.0, *nulls[1:]), (0.0, *nulls[1:]), nulls])
    assert rows(sim.outputs("out")) == rows([(*key, 2), (*nulls, 2), (0.0, *nulls[1:], 2)])


def test_totals_go_on_after_a_restart_and_after_a_step() -> None:
    query = ms.Query("chain")
    first = query.source("s", None, event_time="ts").key_by("k").count("counts")
    facts = first.key_by("k").compute("as_facts", Passed)  # a computation of one's own is trusted
    facts.key_by("count").aggregate("of_counts", keys=ms.collect("k")).sink("out", ms.Memory())
    store, schema = open_store("memory://"), {"s": "k string, ts timestamp"}
    noon = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    Simulated(query, schema, store).feed(s=[("a", noon), ("b", None), ("a", noon)])
    again = Simulated(query, schema, store)
    again.feed(s=[("b", noon - dt.timedelta(9)), ("c", None)])
    assert rows(again.state("counts")) == rows([("a", 2), ("b", 2), ("c", 1)])
    assert again.late("counts") == again.late("of_counts") == 0
    assert rows(again.outputs("out")) == rows([(2, ["a", "b"]), (1, ["b", "c"])])


@pytest.mark.parametrize(
    ("aggregates", "message"),
    [
        ({}, "say what to compute"),
        ({"n": "count"}, r"give an aggregate such as ms.sum\('amount'\)"),
        ({"K": ms.count()}, "is a column of the key"),
        ({"n": ms.sum("y")}, r"map 'totals-partial': n=sum\('y'\): no column 'y'; the input has k, x"),
        ({"n": ms.sum("k")}, r"n=sum\('k'\): 'k' is STRING, expected numbers"),
        ({"n": ms.mean("k")}, r"n=mean\('k'\): 'k' is STRING, expected numbers"),
        ({"n": ms.max("xs")}, "has no order"),
        ({"m": ms.mean("x"), "m_n": ms.count()}, "a name twice"),
    ],
)
def test_aggregates_that_cannot_be_are_refused_before_the_first_epoch(aggregates: Any, message: str) -> None:
    with pytest.raises(ms.UserError, match=message):
        Simulated(build(aggregates), {"s": "k string, x long, xs array<long>"})


def test_bad_aggregates_are_refused_where_they_are_written() -> None:
    for bad in (
        lambda: ms.sum(1),  # type: ignore[arg-type]
        lambda: ms.combine("x", "y"),  # type: ignore[arg-type]
        lambda: ms.combine("x", max, lift=abs),
        lambda: ms.combine("x", max, type="nonsense"),
    ):
        with pytest.raises(ms.UserError):
            bad()
    with pytest.raises(ms.UserError, match="no column 'z' to key by"):
        Simulated(build({"n": ms.count()}, "z"), {"s": "k string"})
    with pytest.raises(ms.UserError, match="'__n', which this step makes itself"):
        Simulated(build({"n": ms.count()}, "__n"), {"s": "__n string"})


# -- combining before the exchange ------------------------------------------------------------------------------------


def sent(records: pa.RecordBatch, **aggregates: Aggregate) -> pa.RecordBatch:
    bound = partial.Partial(("k",), aggregates, None).bind(records.schema, False)
    made, _ = bound.apply(records, None)
    return made


def test_what_is_sent_is_a_row_for_each_key_if_keys_repeat_and_a_row_for_each_record_if_they_do_not() -> None:
    rows_, draws = 100_000, np.random.default_rng(1)
    hot = np.where(draws.random(rows_) < 0.9, 7, draws.integers(0, 10**9, rows_))
    for keys, most in ((draws.integers(0, 1000, rows_), 1000), (hot, 11_000), (np.zeros(rows_, np.int64), 1)):
        assert sent(pa.record_batch({"k": keys}), n=ms.count()).num_rows <= most
    distinct = sent(pa.record_batch({"k": np.arange(rows_)}), n=ms.count())
    assert distinct.column("__n").to_pylist() == [1] * rows_


columns = st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, math.nan, 1.5, -2.0, 0.25])), min_size=1)


@given(columns, st.sampled_from(["add", "min", "max", "first", "last"]))
def test_reducing_by_key_by_run_and_by_twos_is_the_same(given: list[tuple[int, Any]], op: str) -> None:
    part = reduce.Part("x", pa.float64(), op)
    keys = np.array([k for k, _ in given])
    column = pa.array([v for _, v in given], pa.float64())
    found, [by_key] = reduce.reduce_keys([part], [column], [pa.array(keys)])
    order = np.argsort(keys, kind="stable")
    distinct, starts = np.unique(keys[order], return_index=True)
    by_run = reduce.reduce_runs(part, column.take(pa.array(order)), starts)
    assert rows(zip(found[0].to_pylist(), by_key.to_pylist(), strict=True)) == rows(
        zip(distinct.tolist(), by_run.to_pylist(), strict=True)
    )
    one_by_one, known = pa.nulls(5, pa.float64()), np.zeros(5, np.bool_)
    for key, value in zip(keys, column, strict=True):
        mine = np.arange(5) == key
        fresh = pa.array([value.as_py()] * 5, pa.float64())
        joined = reduce.combine(part, one_by_one, fresh, known)
        one_by_one, known = (
            pa.array([joined[i].as_py() if mine[i] else one_by_one[i].as_py() for i in range(5)], pa.float64()),
            known | mine,
        )
    assert rows(by_run.to_pylist()) == rows(one_by_one[i].as_py() for i in np.flatnonzero(known))


@pytest.mark.parametrize(
    ("precision", "scale"), [(1, 0), (5, 2), (10, 10), (18, 3), (28, 2), (33, 4), (38, 18), (38, 38)]
)
def test_the_mean_of_decimals_is_a_decimal_rounded_half_up(precision: int, scale: int, rng: random.Random) -> None:
    query = build({"m": ms.mean("x")})
    sim = Simulated(query, {"s": f"k long, x decimal({precision},{scale})"})
    unit = Decimal(1).scaleb(-scale)
    most = min(10**precision - 1, 10**20)  # so that no sum overflows
    given: dict[int, list[Decimal | None]] = {}
    for _ in range(3):
        records = [(rng.randrange(6), rng.choice([None, rng.randint(-most, most) * unit])) for _ in range(40)]
        for key, value in records:
            given.setdefault(key, []).append(value)
        sim.feed(s=records)
    found = dict(sim.outputs("out"))
    with localcontext() as context:
        context.prec = 100
        digits = min(38, scale + 4)
        for key, values in given.items():
            known = [value for value in values if value is not None]
            mean = sum(known, Decimal(0)) / len(known) if known else None
            expected = None if mean is None else mean.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP)
            assert found[key] == expected
    kind = sim.graph.schema_of("totals").field("m").type
    assert kind == pa.decimal128(min(38, precision + 4), digits)


def test_a_mean_of_decimals_that_lies_in_the_middle_goes_away_from_zero() -> None:
    sim = Simulated(build({"m": ms.mean("x")}), {"s": "k long, x decimal(3,0)"})
    sim.feed(s=[(1, Decimal(1))] + [(1, Decimal(0))] * 31 + [(2, Decimal(-1))] + [(2, Decimal(0))] * 31)  # 0.03125
    assert dict(sim.outputs("out")) == {1: Decimal("0.0313"), 2: Decimal("-0.0313")}
