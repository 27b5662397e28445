"""Allocation: constraints always hold, each way keeps its promise, and algorithm 3 is what the paper says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream import UserError
from millstream.protocol import allocation
from millstream.protocol.allocation import balanced, baseline, correlated, even, improved, score, usable
from millstream.protocol.loads import Allocation, Loads, Moment, Share

WAYS: dict[str, Callable[[Loads, int], Allocation]] = {
    "baseline": baseline,
    "even": even,
    "correlated": correlated,
    "bounded": lambda loads, r: correlated(loads, r, spread=1.2, grain=0.0),
}
GRAIN = 0.2718  # No correlation of small whole numbers is a multiple of it, so that it does not matter how sums round.


@st.composite
def known(draw: st.DrawFn, bins: int = 10, workers: int = 5) -> Loads:
    """Loads of a few bins, on workers that may share hosts."""
    count, of = draw(st.integers(1, workers)), draw(st.integers(0, bins))
    periods = draw(st.integers(1, 5))
    load = st.lists(st.integers(0, 9), min_size=periods, max_size=periods)
    history = draw(st.lists(load, min_size=of, max_size=of))
    primary = draw(st.lists(st.integers(0, count - 1), min_size=of, max_size=of))
    hosts = draw(st.none() | st.lists(st.sampled_from("abc"), min_size=count, max_size=count))
    other = draw(st.none() | st.lists(st.integers(0, 9), min_size=count, max_size=count))
    return loads_of(np.array(history, float).reshape(of, periods), primary, count, hosts, other)


def loads_of(history: Any, primary: Any, workers: Any, hosts: Any = None, other: Any = None) -> Loads:
    return Loads(history, primary, workers, hosts, other)


def moment_of(load: Any, primary: Any, places: Any, capacity: Any, other: Any = None) -> Moment:
    return Moment(load, primary, Allocation(np.array(places, np.int32)), capacity, other)


def options_of(loads: Loads, bin_: int) -> list[int]:
    """Where the replicas of a bin may lie, said once more in other words."""
    home = int(loads.primary[bin_])
    hosts = np.asarray(loads.hosts).tolist()
    if len(set(hosts)) > 1:
        return [worker for worker in range(loads.workers) if hosts[worker] != hosts[home]]
    return [worker for worker in range(loads.workers) if worker != home]


def assert_allowed(loads: Loads, found: Allocation, r: int) -> None:
    assert found.places.shape == (len(loads.primary), r)
    short = 0
    for bin_, row in enumerate(found.places.tolist()):
        options = options_of(loads, bin_)
        placed = [worker for worker in row if worker >= 0]
        assert row[: len(placed)] == placed, "what is missing comes last"
        assert len(placed) == len(set(placed)) == min(r, len(options))
        assert set(placed) <= set(options)
        short += r - len(placed)
    assert found.missing == short


# -- constraint 1 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@given(known(), st.integers(1, 4))
def test_every_bin_has_the_replicas_it_can_have_where_it_can_have_them(way: str, loads: Loads, r: int) -> None:
    assert_allowed(loads, WAYS[way](loads, r), r)


@pytest.mark.parametrize("way", WAYS)
@given(known(), st.integers(1, 3))
def test_the_same_loads_give_the_same_allocation(way: str, loads: Loads, r: int) -> None:
    again = loads_of(loads.history.copy(), loads.primary.copy(), loads.workers, loads.hosts, loads.other)
    assert WAYS[way](loads, r).places.tolist() == WAYS[way](again, r).places.tolist()


@pytest.mark.parametrize("way", WAYS)
def test_a_single_worker_has_no_replicas_and_a_single_host_has_some(way: str) -> None:
    alone = WAYS[way](loads_of([[1.0], [2.0]], [0, 0], 1), 2)
    assert alone.places.tolist() == [[-1, -1], [-1, -1]]
    assert alone.missing == 4
    one_host = WAYS[way](loads_of([[1.0], [2.0]], [0, 1], 3, ["a", "a", "a"]), 2)
    assert [sorted(row) for row in one_host.places.tolist()] == [[1, 2], [0, 2]]


@pytest.mark.parametrize("way", WAYS)
def test_no_replica_is_on_the_host_of_its_bin_even_if_that_leaves_fewer(way: str) -> None:
    found = WAYS[way](loads_of([[1.0], [2.0]], [0, 3], 4, ["a", "a", "a", "b"]), 2)
    assert found.places.tolist()[0] == [3, -1]
    assert set(found.places.tolist()[1]) < {0, 1, 2}
    assert found.missing == 1


# -- even -------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(known(bins=4, workers=4), st.integers(1, 2))
def test_oracle_no_allocation_is_more_even(loads: Loads, r: int) -> None:
    def spread(rows: list[tuple[int, ...]]) -> list[int]:
        counts = np.bincount([worker for row in rows for worker in row] or [0], minlength=loads.workers)
        return sorted((counts - (not any(rows))).tolist(), reverse=True)

    choices = [
        list(combinations(options_of(loads, bin_), min(r, len(options_of(loads, bin_)))))
        for bin_ in range(len(loads.primary))
    ]
    least = min(spread(list(rows)) for rows in product(*choices))
    found = even(loads, r).places.tolist()
    assert spread([tuple(worker for worker in row if worker >= 0) for row in found]) == least


@given(st.integers(2, 9), st.integers(1, 40), st.integers(1, 3))
def test_where_bins_are_spread_replicas_are_so_too(workers: int, bins: int, r: int) -> None:
    loads = loads_of(np.ones((bins, 1)), np.arange(bins) % workers, workers)
    counts = even(loads, r).counts(workers)
    assert counts.max() - counts.min() <= 1


def test_replicas_are_even_if_those_of_half_the_bins_can_lie_on_a_third_only() -> None:
    primary = np.repeat([0, 1, 2, 3], [600, 600, 0, 0])
    counts = even(loads_of(np.ones((1200, 1)), primary, 4)).counts(4)
    assert counts.tolist() == [300, 300, 300, 300]


def test_the_baseline_goes_everywhere() -> None:
    counts = baseline(loads_of(np.ones((4000, 1)), np.arange(4000) % 8, 8)).counts(8)
    assert counts.sum() == 4000
    assert 400 < counts.min() < counts.max() < 600


# -- algorithm 3 ------------------------------------------------------------------------------------------------------


def correlations(loads: Loads) -> list[list[float]]:
    """Of each bin with each worker; 0 where one of them does not change."""
    workers = loads.of_workers

    def one(x: Any, y: Any) -> float:
        x, y = x - x.mean(), y - y.mean()
        size = float(np.sqrt((x * x).sum() * (y * y).sum()))
        return float((x * y).sum()) / size if size > 1e-9 else 0.0

    return [[one(row, workers[worker]) for worker in range(loads.workers)] for row in loads.history]


def algorithm_3(loads: Loads, r: int, spread: float, grain: float) -> list[list[int]]:
    """The paper's algorithm, as it is written there: all bins are looked at for every turn."""
    step = np.float32(grain)
    values = [[float(np.float32(int(value / grain)) * step) for value in row] for row in correlations(loads)]
    load = loads.history.mean(axis=1).tolist()
    limit = spread if spread == float("inf") else spread * sum(load) * r / loads.workers
    given_, counts = [0.0] * loads.workers, [0] * loads.workers
    found: list[list[int]] = [[] for _ in load]
    options = [options_of(loads, bin_) for bin_ in range(len(load))]
    levels = [sorted({values[bin_][worker] for worker in options[bin_]}) for bin_ in range(len(load))]
    at = [0] * len(load)

    def lost(bin_: int) -> float:
        after = levels[bin_][at[bin_] + 1 :]
        return (after[0] - levels[bin_][at[bin_]]) * load[bin_] if after else 0.0

    def put(bin_: int, worker: int) -> None:
        found[bin_].append(worker)
        given_[worker] += load[bin_]
        counts[worker] += 1

    while waiting := [bin_ for bin_ in range(len(load)) if len(found[bin_]) < min(r, len(options[bin_]))]:
        bin_ = max(waiting, key=lambda bin_: (lost(bin_), -bin_))
        free = [worker for worker in options[bin_] if worker not in found[bin_]]
        fitting = [
            worker
            for worker in free
            if values[bin_][worker] == levels[bin_][at[bin_]] and given_[worker] + load[bin_] <= limit
        ]
        if fitting:
            put(bin_, min(fitting, key=lambda worker: (given_[worker], counts[worker], worker)))
        elif at[bin_] + 1 < len(levels[bin_]):
            at[bin_] += 1
        else:
            for worker in sorted(free, key=lambda worker: (given_[worker], values[bin_][worker], worker)):
                if len(found[bin_]) < min(r, len(options[bin_])):
                    put(bin_, worker)
    return found


@given(known(), st.integers(1, 3), st.sampled_from([float("inf"), 3.0, 1.5, 1.0, 0.3]))
def test_oracle_every_turn_is_that_of_the_paper(loads: Loads, r: int, spread: float) -> None:
    found = correlated(loads, r, spread=spread, grain=GRAIN).places.tolist()
    expected = algorithm_3(loads, r, spread, GRAIN)
    assert [[worker for worker in row if worker >= 0] for row in found] == expected


@given(known(), st.integers(1, 3), st.sampled_from([0.0, 0.1, 0.5]), st.integers(1, 4))
def test_its_score_is_the_least_there_is(loads: Loads, r: int, grain: float, near: int) -> None:
    with mock.patch.object(allocation, "NEAR", near):
        found = score(loads, correlated(loads, r, grain=grain))
    assert found <= min(score(loads, even(loads, r)), score(loads, baseline(loads, r))) + grain + 1e-5
    if not grain:
        load = loads.history.mean(axis=1)
        best = [
            sorted(row[worker] for worker in options_of(loads, bin_))[:r]
            for bin_, row in enumerate(correlations(loads))
        ]
        total = sum(float(load[bin_]) * len(row) for bin_, row in enumerate(best))
        least = sum(float(load[bin_]) * sum(row) for bin_, row in enumerate(best)) / total if total else 0.0
        assert found == pytest.approx(least, abs=1e-5)


@given(known(), st.integers(1, 3), st.sampled_from([1.0, 1.5]), st.integers(1, 3))
def test_however_few_places_a_bin_knows_at_first_it_finds_its_replicas(
    loads: Loads, r: int, spread: float, near: int
) -> None:
    with mock.patch.object(allocation, "NEAR", near):
        assert_allowed(loads, correlated(loads, r, spread=spread, grain=GRAIN), r)


def test_the_load_that_replicas_stand_for_is_bounded() -> None:
    """Ten bins rise, and all would go where load falls."""
    rising, falling = [1, 2, 3, 4], [40, 30, 20, 10]
    loads = loads_of([rising] * 10 + [falling], [0] * 10 + [1], 4)
    assert correlated(loads, grain=0.1).counts(4).tolist()[1] == 10
    for spread in (1.0, 1.5):
        found = correlated(loads, spread=spread, grain=0.1).places[:10, 0]
        limit = spread * loads.mean.sum() / 4
        assert (found == 1).sum() == int(limit / 2.5)
        assert abs(int((found == 2).sum()) - int((found == 3).sum())) <= 1, "the next best are equally good"


def test_the_most_sensitive_goes_first() -> None:
    """Both would like worker 1, which has room for one; the second would lose more, for its load is larger."""
    loads = loads_of([[1, 2, 3], [2, 4, 6], [9, 6, 3]], [0, 0, 1], 3, other=[0, 0, 0])
    spread = 4 * 3 / float(loads.mean.sum())
    found = correlated(loads, spread=spread, grain=0.1).places[:, 0].tolist()
    assert found[:2] == [2, 1]


def test_equally_good_places_are_filled_evenly() -> None:
    flat = correlated(loads_of(np.full((40, 6), 3.0), np.zeros(40, int), 5))
    assert flat.counts(5).tolist() == [0, 10, 10, 10, 10]
    idle = correlated(loads_of(np.zeros((40, 6)), np.zeros(40, int), 5))
    assert idle.counts(5).tolist() == [0, 10, 10, 10, 10]


def test_correlations_that_may_be_chance_do_not_count() -> None:
    """Loads without any relation: with every difference some worker looks best; without, none does."""
    rng = np.random.default_rng(7)
    common = rng.uniform(1, 2, 30)
    history = np.concatenate([np.tile(common, (40, 1)), rng.uniform(1, 2, (4, 30))])
    loads = loads_of(history, [0] * 40 + [1, 2, 3, 4], 5)
    assert correlated(loads, grain=0.0).counts(5).max() > 35
    assert correlated(loads).places[:40].max() == 4
    assert np.ptp(np.bincount(correlated(loads).places[:40, 0], minlength=5)[1:]) <= 2


# -- whether a new allocation is worth it -----------------------------------------------------------------------------


@given(known(), st.integers(1, 3), st.sampled_from([0.0, 0.05, 0.4]), st.sampled_from([baseline, even]))
def test_a_better_allocation_is_taken_up_to_the_threshold_and_no_further(
    loads: Loads, r: int, threshold: float, way: Callable[[Loads, int], Allocation]
) -> None:
    before, best = way(loads, r), correlated(loads, r, grain=0.0)
    after = improved(loads, before, threshold=threshold, grain=0.0)
    assert_allowed(loads, after, r)
    gap = score(loads, before) - score(loads, best)
    if gap <= threshold - 1e-5:
        assert after is before, "it is not worth its transfers"
    assert score(loads, after) - score(loads, best) <= threshold + 1e-5
    moved = (after.places != before.places).sum(axis=1)
    if moved.sum():
        gains = known_gains(loads, before, best)
        most = sum(sorted(gains, reverse=True)[: int(moved.sum()) - 1])
        assert gap * weight(loads, best) - most > threshold * weight(loads, best) - 1e-4, "one move fewer would do"


def weight(loads: Loads, allocated: Allocation) -> float:
    return float((loads.mean[:, None] * (allocated.places >= 0)).sum())


def known_gains(loads: Loads, before: Allocation, after: Allocation) -> list[float]:
    """At least what each change of place can gain: the worst of what leaves for the best of what comes, and so on."""
    gains = []
    values = correlations(loads)
    for bin_, (old, new) in enumerate(zip(before.places.tolist(), after.places.tolist(), strict=True)):
        leave = sorted((values[bin_][worker] for worker in set(old) - set(new)), reverse=True)
        come = sorted(values[bin_][worker] for worker in set(new) - set(old))
        gains += [float(loads.mean[bin_]) * (out - into) for out, into in zip(leave, come, strict=True)]
    return gains


@given(known(), st.integers(1, 3), st.data())
def test_whatever_was_there_before_constraint_1_holds_afterwards(loads: Loads, r: int, data: st.DataObject) -> None:
    worker = st.integers(-1, loads.workers - 1)
    count = len(loads.primary)
    rows = data.draw(st.lists(st.lists(worker, min_size=r, max_size=r), min_size=count, max_size=count))
    before = Allocation(np.array(rows, np.int32).reshape(-1, r))
    spread = data.draw(st.sampled_from([float("inf"), 1.5, 1.0]))
    after = improved(loads, before, threshold=data.draw(st.sampled_from([0.0, 0.3, 9.0])), spread=spread)
    order = np.argsort(after.places < 0, axis=1, kind="stable")
    assert_allowed(loads, Allocation(np.take_along_axis(after.places, order, axis=1)), r)


@example(seed=0)
@given(st.integers(0, 50))
def test_a_replica_that_can_stay_does_so_at_a_threshold_that_is_never_reached(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loads = loads_of(rng.uniform(0, 1, (30, 8)), rng.integers(0, 6, 30), 6)
    before = even(loads, 2)
    moved = loads.primary.copy()
    moved[3] = before.places[3, 1]  # a bin has gone to its replica, which is none any more
    after = improved(loads_of(loads.history, moved, 6), before, threshold=2.0)
    changed = np.argwhere(after.places != before.places).tolist()
    assert changed == [[3, 1]]


# -- how good an allocation turns out to be ---------------------------------------------------------------------------


def test_a_replica_is_usable_if_its_bin_alone_fits_there() -> None:
    load = [4.0, 4.0, 3.0, 5.0, 1.0]
    primary = [0, 0, 0, 1, 2]
    places = [[1], [2], [1], [0], [0]]
    # Worker 0 has 11 of 10, worker 1 has 5, worker 2 has 1 and 6 of its own.
    assert usable(moment_of(load, primary, places, [10.0, 10.0, 10.0], [0.0, 0.0, 6.0])) == Share(2, 3)
    assert usable(moment_of(load, primary, places, [10.0, 8.0, 11.0], [0.0, 0.0, 6.0])) == Share(2, 3)
    nothing = usable(moment_of(load, primary, places, [20.0, 20.0, 20.0]))
    assert nothing == Share(0, 0)
    assert np.isnan(nothing.ratio)
    assert (Share(1, 2) + Share(2, 2)).ratio == 0.75


def test_a_missing_replica_does_not_count() -> None:
    assert usable(moment_of([4.0, 4.0], [0, 0], [[1, -1], [2, 1]], [5.0, 5.0, 1.0])) == Share(2, 3)


def test_a_bin_with_a_replica_where_there_is_room_moves_first_and_they_change_places() -> None:
    before = moment_of([3.0, 4.0, 5.0], [0, 0, 0], [[2], [1], [2]], [9.0, 9.0, 6.0])
    after, assisted = balanced(before)
    assert assisted == Share(1, 1)
    assert after.primary.tolist() == [0, 1, 0]
    assert after.allocation.places.tolist() == [[2], [0], [2]]


def test_without_a_replica_there_the_smallest_bin_that_is_enough_moves() -> None:
    after, assisted = balanced(moment_of([2.0, 4.0, 6.0], [0, 0, 0], [[2], [2], [2]], [9.0, 9.0, 1.0]))
    assert assisted == Share(0, 1)
    assert after.primary.tolist() == [0, 1, 0]
    assert after.allocation.places.tolist() == [[2], [2], [2]]


@given(known(), st.integers(1, 2), st.lists(st.integers(0, 20), min_size=5, max_size=5))
def test_balancing_overloads_nobody_and_moves_nothing_twice(loads: Loads, r: int, capacity: list[int]) -> None:
    load = loads.history[:, -1]
    bears = np.array(capacity[: loads.workers], float)
    before = Moment(load, loads.primary, even(loads, r), bears)
    after, assisted = balanced(before)
    moved = before.primary != after.primary
    there = (before.allocation.places == after.primary[:, None]).any(axis=1)
    assert assisted == Share(int((moved & there).sum()), int(moved.sum()))
    over = before.of_workers > before.full
    assert (after.of_workers[~over] <= after.full[~over]).all()
    assert over[before.primary[moved]].all()
    assert (after.allocation.places[moved & ~there] == before.allocation.places[moved & ~there]).all()
    assert not (after.allocation.places == after.primary[:, None]).any(), "a bin lies on its replica"
    assert usable(before).part <= usable(before).whole
    assert (before.primary == loads.primary).all(), "what was given is as it was"


# -- bad input --------------------------------------------------------------------------------------------------------

ONE = loads_of([[1.0], [1.0]], [0, 1], 2)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: loads_of([[1.0]], [0], 0), "workers=0: replicas need workers to lie on"),
        (lambda: loads_of([[1.0]], [0], True), "workers=True"),
        (lambda: loads_of([1.0, 2.0], [0, 1], 2), r"history has shape \(2,\); expected bins x periods"),
        (lambda: loads_of([[], []], [0, 1], 2), "at least one period"),
        (lambda: loads_of([[1.0], [1.0, 2.0]], [0, 1], 2), "history: expected numbers, all rows of the same length"),
        (lambda: loads_of([["much"]], [0], 2), "history: expected numbers"),
        (lambda: loads_of([[1.0], [float("nan")]], [0, 1], 2), "history of bin 1: found nan, expected loads of 0 or"),
        (lambda: loads_of([[1.0], [float("inf")]], [0, 1], 2), "found inf"),
        (lambda: loads_of([[-1.0]], [0], 2), "history of bin 0: found -1.0"),
        (lambda: loads_of([[1.0]], [0, 1], 2), r"primary has shape \(2,\) of int64; expected whole numbers, 1 bins"),
        (lambda: loads_of([[1.0]], [0.5], 2), "float64; expected whole numbers"),
        (lambda: loads_of([[1.0]], [2], 2), "primary: found worker 2, expected 0 to 1"),
        (lambda: loads_of([[1.0]], [-1], 2), "primary: found worker -1"),
        (lambda: loads_of([[1.0]], [0], 2, ["a"]), r"hosts has shape \(1,\); expected the host of each of 2 workers"),
        (lambda: loads_of([[1.0]], [0], 2, None, [1.0]), r"other has shape \(1, 1\)"),
        (lambda: loads_of([[1.0]], [0], 2, None, [1.0, -2.0]), "other of worker 1: found -2.0"),
        (lambda: even(ONE, 0), "r=0: expected a whole number of replicas, 1 or more"),
        (lambda: baseline(ONE, 1.5), "r=1.5"),  # type: ignore[arg-type]
        (lambda: correlated(ONE, True), "r=True"),
        (lambda: correlated(ONE, grain=-1), "grain=-1"),
        (lambda: correlated(ONE, grain=float("nan")), "grain=nan"),
        (lambda: correlated(ONE, spread=0), "spread=0"),
        (lambda: improved(ONE, even(ONE), threshold=-0.1), "threshold=-0.1"),
        (lambda: improved(ONE, Allocation(np.array([[1]], np.int32))), r"now has shape \(1, 1\)"),
        (lambda: score(ONE, Allocation(np.array([[1], [7]], np.int32))), "allocation: found worker 7"),
        (lambda: moment_of([1.0], [0], [[1]], 3.0), "two numbers for each worker"),
        (lambda: moment_of([1.0], [0], [[1]], [3.0, 3.0], [1.0]), "two numbers for each worker"),
        (lambda: moment_of([float("nan")], [0], [[1]], [3.0, 3.0]), "load of bin 0: found nan"),
        (lambda: moment_of([1.0], [0], [[2]], [3.0, 3.0]), "allocation: found worker 2"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make()


def test_loads_of_any_size_are_taken() -> None:
    huge = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [2.0, 2.0, 2.0]])
    for factor in (1e-300, 1.0, 1e200):
        loads = loads_of(huge * factor, [0, 1, 2], 3)
        assert correlated(loads, grain=0.1).places[:2].tolist() == [[1], [0]]


# -- scale ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many() -> Loads:
    """Twenty thousand bins on two hundred workers of forty hosts; their loads follow one of eight tides."""
    rng = np.random.default_rng(3)
    bins, workers, periods = 20_000, 200, 32
    primary = rng.integers(0, workers, bins)
    hours = np.arange(periods) / 24
    tides = 1.5 + np.sin(2 * np.pi * (hours[None] + np.arange(8)[:, None] / 8))
    history = tides[primary % 8] * rng.uniform(0.5, 2, (bins, 1)) * rng.uniform(0.8, 1.2, (bins, periods))
    return loads_of(history, primary, workers, np.arange(workers) // 5)


def test_twenty_thousand_bins_are_spread_to_the_replica(many: Loads) -> None:
    counts = even(many, 2).counts(many.workers)
    assert counts.tolist() == [200] * 200


def test_twenty_thousand_bins_go_where_load_falls_and_no_worker_gets_too_many(many: Loads) -> None:
    found = correlated(many, 2)
    assert many.allowed[many.primary[:, None], found.places].all()
    assert (found.places[:, 0] != found.places[:, 1]).all()
    assert score(many, found) < -0.8
    bounded = correlated(many, 2, spread=1.05)
    given_ = np.bincount(bounded.places.ravel(), np.repeat(many.mean, 2), many.workers)
    assert given_.max() <= 1.05 * many.mean.sum() * 2 / many.workers * (1 + 1e-9)
    assert score(many, bounded) < -0.5
    assert improved(many, found) is found
