"""State goes where it lies already: who gets which bin, and where new slots run. Loads are as without it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from millstream.protocol.affinity import brought, has, nearer
from millstream.protocol.keyspace import Range
from millstream.protocol.layout import Layout
from millstream.protocol.manifest import Family, Manifest, SegmentRef
from millstream.protocol.migration import Move
from millstream.protocol.placement import place
from millstream.protocol.planner import plan_balance, plan_drain, plan_rescale
from millstream.protocol.routing import RoutingTable, Slot
from millstream.protocol.strategies import AllAtOnce, Strategy

GB = 10**9


@some.composite
def planned(draw: some.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[int, str], dict[int, list[str]]]:
    """Bins of some slots of which some go to others, on workers that hold replicas."""
    givers = draw(some.lists(some.integers(0, 5), min_size=1, max_size=6, unique=True))
    takers = draw(some.lists(some.integers(6, 11), min_size=1, max_size=6, unique=True))
    owners = np.array(draw(some.lists(some.sampled_from(givers), min_size=1, max_size=40)))
    targets = np.array(draw(some.lists(some.sampled_from(takers), min_size=len(owners), max_size=len(owners))))
    stays = np.array(draw(some.lists(some.booleans(), min_size=len(owners), max_size=len(owners))))
    weights = np.array(draw(some.lists(some.integers(1, 9), min_size=len(owners), max_size=len(owners))), float)
    workers = [f"w{number}" for number in range(draw(some.integers(1, 6)))]
    hosts = {slot: draw(some.sampled_from(workers)) for slot in [*givers, *takers] if draw(some.integers(0, 4))}
    replicas = {slot: draw(some.lists(some.sampled_from(workers), max_size=2, unique=True)) for slot in givers}
    return owners, np.where(stays, owners, targets), weights, hosts, replicas


@given(planned())
def test_who_gets_what_changes_and_nothing_else(case: tuple[np.ndarray, ...]) -> None:
    owners, final, weights, hosts, replicas = case
    found = nearer(owners, final, weights, hosts, replicas)  # type: ignore[arg-type]
    moved = owners != final
    assert ((owners != found) == moved).all()
    heaviest = weights[moved].max(initial=0.0)
    before, after = (np.bincount(each[moved], weights[moved], 12) for each in (final, found))
    assert (np.abs(before - after) <= heaviest).all()
    assert _near(owners, found, weights, hosts, replicas) >= _near(owners, final, weights, hosts, replicas)


@given(planned())
def test_bins_of_equal_weight_give_every_slot_as_many_as_before(case: tuple[np.ndarray, ...]) -> None:
    owners, final, weights, hosts, replicas = case
    found = nearer(owners, final, np.ones_like(weights), hosts, replicas)  # type: ignore[arg-type]
    assert np.bincount(found, minlength=12).tolist() == np.bincount(final, minlength=12).tolist()


def _near(owners: np.ndarray, final: np.ndarray, weights: np.ndarray, hosts: object, replicas: object) -> float:
    known, held = dict(hosts), dict(replicas)  # type: ignore[call-overload]
    return sum(
        weight
        for origin, target, weight in zip(owners.tolist(), final.tolist(), weights.tolist(), strict=True)
        if origin != target and target in known and has(known[target], origin, known, held)
    )


def layout(tables: RoutingTable, size: int, replicas: dict[int, list[str]], idle: tuple[str, ...] = ()) -> Layout:
    everything = (Range(0, 2**64 - 1),)
    segments = [SegmentRef("all", Family("count", "total"), 7, 1, size, "", everything)]
    placement = {f"w{slot}": [slot] for slot in sorted(set(tables.slots))}
    return Layout("s", {"count": tables}, Manifest().added(segments), placement, replicas=replicas, idle=idle)


def pairs(plan: object) -> set[tuple[int, int]]:
    return {(move.origin, move.target) for moves in plan.rounds for move in moves}  # type: ignore[attr-defined]


SKEWED = RoutingTable.even(4, 4).assign(
    [(Range(1 << 63, (1 << 63) + (1 << 61) - 1), Slot(0)), (Range(3 << 62, (3 << 62) + (1 << 61) - 1), Slot(1))]
)
"""Slots 0 and 1 have six bins each, 2 and 3 two each."""


@pytest.mark.parametrize("protocol", ["cpa", "cpal", "auto"])
def test_bins_go_where_replicas_are_and_are_not_fetched(protocol: str) -> None:
    crossed = layout(SKEWED, GB, {0: ["w3"], 1: ["w2"]})
    direct = plan_rescale(crossed, 4, strategy=AllAtOnce(protocol="direct"))
    plan = plan_rescale(crossed, 4, strategy=AllAtOnce(protocol=protocol))
    assert pairs(direct) == {(0, 2), (1, 3)}
    assert pairs(plan) == {(0, 3), (1, 2)}
    assert direct.bytes == plan.bytes
    assert "stall 1 s" in plan.expected["direct"]
    assert "stall 0 s" in plan.expected["cpa"]
    assert plan.protocol == ("cpa" if protocol == "auto" else protocol)
    assert plan.prepared == (protocol == "cpal")


def test_a_drain_and_a_balance_go_where_replicas_are_too() -> None:
    drained = layout(RoutingTable.even(4, 6), GB, {0: ["w2"], 1: ["w2"], 3: ["w1"]})
    assert pairs(plan_balance(layout(SKEWED, GB, {0: ["w3"], 1: ["w2"]}), strategy=AllAtOnce())) == {(0, 3), (1, 2)}
    plan = plan_drain(drained, "w3", strategy=AllAtOnce(protocol="cpa"))
    assert sum(len(moves) for moves in plan.rounds) >= 1
    assert plan.drains == "w3"


@pytest.mark.parametrize("strategy", [AllAtOnce(prepared=False), AllAtOnce(protocol="direct")])
def test_direct_migration_does_not_look_for_replicas(strategy: Strategy) -> None:
    plan = plan_rescale(layout(SKEWED, GB, {0: ["w3"], 1: ["w2"]}), 4, strategy=strategy)
    assert pairs(plan) == {(0, 2), (1, 3)}
    assert not plan.prepared


def test_without_replicas_at_the_targets_auto_lets_them_catch_up() -> None:
    plan = plan_rescale(layout(SKEWED, GB, {}), 4, strategy=AllAtOnce(protocol="auto"))
    assert plan.protocol == "cpal"
    assert plan.prepared


def test_a_query_whose_slots_are_on_one_of_several_workers_is_prepared_by_default() -> None:
    one = layout(RoutingTable.even(1, 4), GB, {})
    assert plan_rescale(one, 4).protocol == "direct"  # there is nobody to prepare anything
    spread = plan_rescale(layout(RoutingTable.even(1, 4), GB, {}, idle=("w1", "w2")), 4)
    assert spread.protocol == "cpal"
    assert set(spread.expected) == {"direct", "cpa", "cpal"}


def test_of_the_emptiest_workers_a_new_slot_goes_to_the_one_that_has_what_comes() -> None:
    hosts, replicas = {0: "a", 1: "b", 2: "c"}, {0: ["b"], 1: ["c"], 2: ["a"]}
    moves = [Move("count", Range(0, 9), Slot(origin), Slot(3 + origin), GB) for origin in (2, 1, 0)]
    lacks = brought(moves, hosts, replicas)
    assert lacks(3, "c") == GB
    assert lacks(3, "b") == lacks(3, "a") == 0
    found = place(range(6), ["a", "b", "c"], hosts, ["a", "b", "c"], brings=lacks)
    assert found == {0: "a", 1: "b", 2: "c", 3: "a", 4: "b", 5: "c"}
    turned = [Move("count", Range(0, 9), Slot(2 - slot), Slot(3 + slot), GB) for slot in range(3)]
    found = place(range(6), ["a", "b", "c"], hosts, ["a", "b", "c"], brings=brought(turned, hosts, {}))
    assert found == {0: "a", 1: "b", 2: "c", 3: "c", 4: "b", 5: "a"}  # each beside the slot that it comes from


def test_what_an_epoch_writes_is_what_replicas_lack() -> None:
    known = layout(SKEWED, GB, {0: ["w3"], 1: ["w2"]})
    plan = plan_rescale(replace(known, written=4 * 10**8), 4, strategy=AllAtOnce(protocol="auto"))
    # A quarter of the state moves, in one round, so a quarter of what is written is lacking.
    assert plan.expected["cpa"] == "stall 0.8 s, complete in 1.8 s"
    assert plan.expected["direct"] == "stall 1 s, complete in 3 s"
