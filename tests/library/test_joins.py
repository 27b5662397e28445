"""Joins against plain Python: incremental, windowed and interval, over epochs, slots, late records and restarts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from oracle import Watermark, at, plain, rows

import millstream as ms
from millstream.model.bags import BatchBag
from millstream.store.objects import open_store
from millstream.testing import Simulated

SCHEMAS = {"l": "k string, ts timestamp, x long", "r": "id string, ts timestamp, x long, y string"}


def build(**options: Any) -> ms.Query:
    query = ms.Query("joined")
    left = query.source("l", None, event_time="ts", lateness="10 seconds", max_ahead="1000 days")
    right = query.source("r", None, event_time="ts", lateness="10 seconds", max_ahead="1000 days")
    left.key_by("k").join("joined", right.key_by("id"), **options).sink("out", ms.Memory())
    return query


def random_epochs(rng: random.Random) -> list[tuple[list[Any], list[Any]]]:
    """Records of both sides that drift forward in time, out of order, some of them late."""
    now, number, epochs = 0, 0, []
    for _ in range(25):
        now += rng.randrange(40)
        sides: list[list[Any]] = []
        for wide in (False, True):
            side = []
            for _ in range(rng.choice([0, 1, 15])):
                number += 1
                time = None if rng.random() < 0.03 else at(now + rng.randint(-70, 15))
                record = (rng.choice(["a", "b", "c", None]), time, number)
                side.append((*record, rng.choice(["u", None])) if wide else record)
            sides.append(side)
        epochs.append((sides[0], sides[1]))
    return epochs


def paired(left: Any, right: Any) -> tuple[Any, ...]:
    return (*left, *right[1:])


def run(query: ms.Query, oracle: Callable[[list[Any], list[Any]], list[Any]], rng: random.Random) -> int:
    store, produced = open_store("memory://"), 0
    sim = Simulated(query, SCHEMAS, store, slots=3, map_tasks=3)
    for number, (left, right) in enumerate(random_epochs(rng)):
        if number in (9, 17):
            sim = Simulated(query, SCHEMAS, store, map_tasks=2)
        sim.feed(l=left, r=right)
        expected = oracle(left, right)
        assert rows(sim.delivered["out"].get(sim.epoch, [])) == rows(expected)
        produced += len(expected)
    return produced


def test_all_pairs_of_equal_keys_are_produced_once_when_the_later_one_comes(rng: random.Random) -> None:
    lefts: list[Any] = []
    rights: list[Any] = []
    seen: Counter[Any] = Counter()

    def oracle(left: list[Any], right: list[Any]) -> list[Any]:
        lefts.extend(left)
        rights.extend(right)
        now = Counter(plain(paired(a, b)) for a in lefts for b in rights if a[0] == b[0] and a[0] is not None)
        new = now - seen
        seen.update(new)
        return list(new.elements())

    query = build()
    assert run(query, oracle, rng) > 20
    sim = Simulated(query, SCHEMAS)
    assert sim.graph.schema_of("joined").names == ["k", "ts", "x", "ts_right", "x_right", "y"]


@pytest.mark.parametrize("options", [{}, {"window": ms.tumbling("1 hour")}, {"between": ("0 seconds", "1 hour")}])
def test_what_is_kept_of_a_side_is_read_only_where_the_other_has_new_records(
    options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []
    kept = BatchBag._kept

    def spy(bag: BatchBag, places: Any) -> Any:
        looked.extend([bag._declared.name] * len(places))
        return kept(bag, places)

    monkeypatch.setattr(BatchBag, "_kept", spy)
    sim = Simulated(build(**options), SCHEMAS, slots=1)
    for number in range(3):
        sim.feed(l=[("a", at(number), number), ("b", at(number), number)])
    assert set(looked) == {"rights"}
    looked.clear()
    sim.feed(r=[("a", at(5), 1, "u")])
    assert set(looked) == {"lefts"}
    assert len(sim.outputs("out")) == 3
    for source in ("l", "r"):
        sim.feed(**{source: [("c", at(20_000), 1, "u")[: len(SCHEMAS[source].split(","))]]})
    if options:
        assert [row[0] for row in sim.state("joined", "lefts")] == ["c"], "timers that were set again fire once"


class BucketOracle:
    """What can be joined while its bucket is open: `close` says when that of a pair closes."""

    def __init__(self, close: Callable[[Any, Any], list[Any]], match: Callable[[Any, Any], bool]) -> None:
        self.close, self.match = close, match
        self.marks = Watermark(10), Watermark(10)
        self.kept: tuple[list[Any], list[Any]] = ([], [])

    def __call__(self, left: list[Any], right: list[Any]) -> list[Any]:
        for mark, records in zip(self.marks, (left, right), strict=True):
            mark.epoch(record[1] for record in records)
        before = min(mark.before for mark in self.marks if mark.before is not None)
        for side, records in enumerate((left, right)):
            for record in records:
                if record[0] is not None and record[1] is not None:
                    open_ = {bucket for bucket, end in self.close(side, record[1]) if end > before}
                    self.kept[side].append((record, open_, True))
        pairs = [
            paired(a, b)
            for a, mine, new_a in self.kept[0]
            for b, theirs, new_b in self.kept[1]
            if a[0] == b[0] and mine & theirs and (new_a or new_b) and self.match(a[1], b[1])
        ]
        now = min(mark.now for mark in self.marks)
        for side in (0, 1):
            kept = []
            for record, open_, _ in self.kept[side]:
                still = {bucket for bucket, end in self.close(side, record[1]) if end > now} & open_
                kept.append((record, still, False))
            self.kept[side][:] = kept
        return pairs


def test_a_windowed_join_pairs_records_of_one_window(rng: random.Random) -> None:
    def close(side: int, time: Any) -> list[Any]:
        start = at((time - at(0)) // timedelta(seconds=30) * 30)
        return [(start, start + timedelta(seconds=30))]

    oracle = BucketOracle(close, lambda a, b: True)
    assert run(build(window=ms.tumbling("30 seconds")), oracle, rng) > 5


@pytest.mark.parametrize(("lower", "upper"), [(-20, 30), (5, 25), (-40, -10), (0, 0), (-100, 3)])
def test_an_interval_join_pairs_records_that_are_so_far_apart(lower: int, upper: int, rng: random.Random) -> None:
    width = timedelta(seconds=upper - lower) or timedelta(microseconds=1)
    kept = max(2 * width, width - timedelta(seconds=lower))
    epoch = at(0).replace(year=1970, hour=0)

    def close(side: int, time: Any) -> list[Any]:
        first = (time - epoch + (timedelta(seconds=lower) if side == 0 else timedelta(0))) // width
        buckets = [first] if side == 0 else [first, first - 1]
        return [(bucket, epoch + bucket * width + kept) for bucket in buckets]

    def match(a: Any, b: Any) -> bool:
        return timedelta(seconds=lower) <= b - a <= timedelta(seconds=upper)

    text = tuple(f"-{-each} seconds" if each < 0 else timedelta(seconds=each) for each in (lower, upper))
    assert run(build(between=text), BucketOracle(close, match), rng) > (-1 if lower == upper else 5)


def test_an_interval_of_nothing_pairs_records_of_one_time() -> None:
    sim = Simulated(build(between=("0 seconds", "0 seconds")), SCHEMAS)
    sim.feed(l=[("a", at(1), 1), ("a", at(2), 2)], r=[("a", at(2), 3, "u")])
    sim.feed(r=[("a", at(1), 4, "u"), ("a", at(1.000001), 5, "u")])
    assert rows(sim.outputs("out")) == rows([("a", at(2), 2, at(2), 3, "u"), ("a", at(1), 1, at(1), 4, "u")])


def test_what_can_meet_nothing_any_more_is_forgotten() -> None:
    for options in ({"window": ms.tumbling("1 minute")}, {"between": ("-1 minute", "1 minute")}):
        sim = Simulated(build(**options), SCHEMAS)
        sim.feed(l=[("a", at(0), 1), ("b", at(0), 2)], r=[("a", at(59), 3, "u")])
        assert rows(sim.outputs("out")) == rows([("a", at(0), 1, at(59), 3, "u")])
        assert len(sim.state("joined", "lefts")) == 2
        sim.feed(l=[("c", at(600), 1)], r=[("c", at(600), 3, "u")])
        assert {row[0] for row in sim.state("joined", "lefts") + sim.state("joined", "rights")} == {"c"}


def test_pairs_carry_the_later_of_their_times() -> None:
    query = ms.Query("timed")
    left = query.source("l", None, event_time="ts", max_ahead="1000 days").key_by("k")
    right = query.source("r", None, event_time="ts", max_ahead="1000 days").key_by("id")
    joined = left.join("joined", right, between=("-1 hour", "1 hour"))
    joined.key_by("k").window(ms.tumbling("1 minute")).count("w").sink("out", ms.Memory())
    sim = Simulated(query, SCHEMAS)
    sim.feed(l=[("a", at(10), 1), ("a", at(70), 2)], r=[("a", at(50), 3, "u")])
    sim.feed(l=[("z", at(9999), 1)], r=[("z", at(9999), 1, "u")])
    assert rows(sim.outputs("out")) == rows([("a", at(0), at(60), 1), ("a", at(60), at(120), 1)])


def test_streams_of_several_keys_and_no_other_columns_join_too() -> None:
    query = ms.Query("bare")
    left, right = query.source("l", None), query.source("r", None)
    left.key_by("a", "b").join("both", right.key_by("b", "a")).sink("out", ms.Memory())
    sim = Simulated(query, {"l": "a long, b long", "r": "a long, b long"})
    sim.feed(l=[(1, 2), (1, 2), (3, None)], r=[(2, 1), (2, None), (None, 3)])
    assert rows(sim.outputs("out")) == rows([(1, 2), (1, 2)])


def other() -> ms.KeyedStream:
    return ms.Query("other").source("r", None).key_by("id")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": ms.sliding("1 hour", every="1 minute")}, "only tumbling windows"),
        ({"window": "1 minute"}, "as a window"),
        ({"between": "1 minute"}, "give two durations"),
        ({"between": ("1 hour", "1 minute")}, "longer than the second"),
        ({"between": ("1 minute", "1 hour"), "window": ms.tumbling("1 hour")}, "not both"),
    ],
)
def test_joins_that_cannot_be_are_refused_where_they_are_written(options: Any, message: str) -> None:
    with pytest.raises(ms.UserError, match=message):
        build(**options)


def test_joins_that_do_not_fit_their_streams_are_refused_before_the_first_epoch() -> None:
    query = ms.Query("bad")
    left, right = query.source("l", None).key_by("k"), query.source("r", None)
    with pytest.raises(ms.UserError, match=r"expected stream.key_by"):
        left.join("a", right)  # type: ignore[arg-type]
    with pytest.raises(ms.UserError, match="1 and 2 columns"):
        left.join("a", right.key_by("id", "x"))
    with pytest.raises(ms.UserError, match="another query"):
        left.join("a", other())
    left.join("b", right.key_by("id"), window=ms.tumbling("1 minute"))
    with pytest.raises(ms.UserError, match="map 'b-left': a join with a window or an interval needs event time"):
        Simulated(query, SCHEMAS)
    clash = ms.Query("clash")
    clash.source("l", None).key_by("k").join("j", clash.source("r", None).key_by("k"), suffix="")
    with pytest.raises(ms.UserError, match="step 'j': both sides have a column 'x', and 'x' is taken"):
        Simulated(clash, {"l": "k long, x long", "r": "k long, x long"})
