"""Dedupe against plain Python: exact by time, out of order, over epochs, slots and restarts."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from oracle import Watermark, at, rows

import millstream as ms
from millstream.store.objects import open_store
from millstream.testing import Simulated

SCHEMA = {"s": "id string, part long, ts timestamp, x long"}


def build(within: float, **options: Any) -> ms.Query:
    query = ms.Query("once")
    lateness = options.pop("lateness", "60 seconds")
    source = query.source("s", None, event_time="ts", lateness=lateness, max_ahead="1000 days")
    once = source.dedupe("once", id=options.pop("id", "id"), within=timedelta(seconds=within), **options)
    once.sink("out", ms.Memory())
    return query


@pytest.mark.parametrize("within", [5, 40, 300])
def test_a_record_passes_unless_one_of_its_id_has_passed_that_is_near_in_time(within: int, rng: random.Random) -> None:
    query, store, mark = build(within), open_store("memory://"), Watermark(60)
    sim = Simulated(query, SCHEMA, store, slots=3, map_tasks=3)
    passed: dict[Any, list[Any]] = defaultdict(list)
    now, number, dropped, late = 0, 0, 0, 0
    for epoch in range(40):
        if epoch in (13, 27):
            sim = Simulated(query, SCHEMA, store, map_tasks=1)
        now += rng.choice([0, 3, 20, 90])
        records = []
        for _ in range(rng.choice([0, 2, 12])):
            number += 1
            time = None if rng.random() < 0.05 else at(now + rng.randint(-100, 20))
            records.append((rng.choice(["a", "b", "c", None]), 0, time, number))
        mark.epoch(time for _, _, time, _ in records)
        expected = []
        for record in records:
            id_, _, time, _ = record
            if mark.late(time):
                late += 1
            elif any(abs(time - other) < timedelta(seconds=within) for other in passed[id_]):
                dropped += 1
            else:
                passed[id_].append(time)
                expected.append(record)
        sim.feed(s=records)
        assert rows(sim.delivered["out"].get(sim.epoch, [])) == rows(expected)
        assert sim.late("once") == late
    assert min(dropped, late, len(passed["a"])) > 0


def test_an_id_of_several_columns_and_a_computation_of_ones_own_step() -> None:
    sim = Simulated(build(60, id=("id", "part")), SCHEMA)
    sim.feed(s=[("a", 1, at(0), 1), ("a", 2, at(0), 2), ("a", 1, at(59), 3), ("a", 1, at(60), 4)])
    assert sorted(row[3] for row in sim.outputs("out")) == [1, 2, 4]
    query = ms.Query("own")
    source = query.source("s", None, event_time="ts")
    source.key_by("id").compute("once", ms.Dedupe("id", within="1 minute")).sink("out", ms.Memory())
    again = Simulated(query, SCHEMA)
    again.feed(s=[("a", 1, at(0), 1), ("a", 2, at(0), 2)])
    assert [row[3] for row in again.outputs("out")] == [1]


def test_what_passes_keeps_its_time_and_what_has_expired_takes_no_space() -> None:
    query = ms.Query("timed")
    source = query.source("s", None, event_time="ts", max_ahead="1000 days")
    once = source.dedupe("once", id="id", within="1 minute")
    once.key_by("id").window(ms.tumbling("10 seconds")).count("w").sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA, slots=1)
    sim.feed(s=[("a", 0, at(5), 1), ("a", 0, at(7), 2), ("b", 0, at(15), 3)])
    for second in range(100, 1000, 100):
        sim.feed(s=[("c", 0, at(second), 4)])
    counted = [("a", at(0), at(10), 1), ("b", at(10), at(20), 1)]
    assert rows(sim.outputs("out")[:2]) == rows(counted)
    assert [row[0] for row in sim.state("once", "newest")] == ["c"]


@pytest.mark.parametrize("spread", [3, 30, 3000])
def test_an_id_of_which_many_pass_is_exact_too(spread: int, rng: random.Random) -> None:
    sim = Simulated(build(2, lateness="1 day"), SCHEMA, slots=1)
    passed: dict[str, list[int]] = defaultdict(list)
    for epoch in range(3):
        records, expected = [], []
        for number in range(400):
            id_, second = rng.choice(["a", "a", "b"]), rng.randint(0, spread)
            records.append((id_, 0, at(second), 1000 * epoch + number))
            if all(abs(second - other) >= 2 for other in passed[id_]):
                passed[id_].append(second)
                expected.append(1000 * epoch + number)
        sim.feed(s=records)
        assert sorted(row[3] for row in sim.delivered["out"].get(sim.epoch, [])) == expected


def test_many_records_of_one_id_take_few_rounds() -> None:
    step = ms.Dedupe("id", within="1 second")
    times = np.sort(np.random.default_rng(1).integers(0, 5_000_000, 100_000))
    passed = step._first_come(np.zeros(len(times), np.int64), times, np.ones(len(times), np.bool_))
    assert 5 <= passed.sum() <= 10
    assert np.diff(times[passed]).min() >= 1_000_000
    apart = np.arange(50_000) * 1_000_000
    assert step._first_come(np.zeros(len(apart), np.int64), apart, np.ones(len(apart), np.bool_)).all()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ms.UserError, match="above zero"):
        ms.Dedupe("id", within="0 seconds")
    with pytest.raises(ms.UserError, match="give the column, or columns, of the id"):
        ms.Dedupe(within="1 second")
    with pytest.raises(ms.UserError, match="would give wrong results: use 'drop' or 'output'"):
        build(60, late="process")
    keyed = ms.Query("own").source("s", None, event_time="ts").key_by("id")
    with pytest.raises(ms.UserError, match="'own': late='process'; Dedupe.* would give wrong results"):
        keyed.compute("own", ms.Dedupe("id", within="1 hour"), late="process")
    query = ms.Query("other")
    query.source("s", None, event_time="ts").key_by("part").compute("once", ms.Dedupe("id", within="1 hour"))
    with pytest.raises(ms.UserError, match="reads a stream keyed by part; key it by id"):
        Simulated(query, SCHEMA)
    untimed = ms.Query("untimed")
    untimed.source("s", None).dedupe("once", id="id", within="1 hour")
    with pytest.raises(ms.UserError, match="event_time"):
        Simulated(untimed, SCHEMA)


def test_the_watermark_of_the_epoch_itself_forgets_nothing_that_its_records_need() -> None:
    sim = Simulated(build(30), SCHEMA)
    sim.feed(s=[("a", 0, at(0), 1)])
    sim.feed(s=[("b", 0, at(1000), 2), ("a", 0, at(20), 3), ("a", 0, at(31), 4)])
    assert sorted(row[3] for row in sim.outputs("out")) == [1, 2, 4]
