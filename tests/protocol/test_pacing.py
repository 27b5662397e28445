"""Pacing: how much one epoch takes on, what is learned of costs, and a closed loop of both against a world whose true
costs nobody was told."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from millstream import AllAtOnce, Batched, Fluid, Matched, Paced, UserError
from millstream.protocol.keyspace import WHOLE
from millstream.protocol.layout import Layout
from millstream.protocol.manifest import Family, Manifest, SegmentRef
from millstream.protocol.migration import MigrationPlan, rounds_at_once
from millstream.protocol.pacing import (
    BIN_S,
    FREE_S,
    GUESSED,
    MOST_BIN_S,
    SHORTEST_EPOCH_S,
    Learning,
    MoveCosts,
    RoundLoad,
    costs_of,
    merged,
)
from millstream.protocol.planner import plan_move, plan_rescale
from millstream.protocol.routing import RoutingTable
from millstream.protocol.strategies import Strategy


def layout(state_bytes: int, slots: int = 1, bits: int = 12, rates: Mapping[str, float] | None = None) -> Layout:
    """One step with so much state, evenly spread over its bins."""
    segment = SegmentRef("s0", Family("count", "total"), 1, 1, state_bytes, "", (WHOLE,))
    return Layout("s", {"count": RoutingTable.even(slots, bits)}, Manifest().added([segment]), rates=rates or {})


def load_of(rounds: Sequence[Sequence[object]]) -> RoundLoad:
    load = RoundLoad({})
    for moves in rounds:
        load.add(moves)  # type: ignore[arg-type]
    return load


# -- a plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [Paced(), Matched(), Batched(1), Batched(64), AllAtOnce()], ids=str)
def test_a_tiny_state_takes_an_epoch_or_two(strategy: Strategy) -> None:
    plan = plan_rescale(layout(55_000), 4, strategy=strategy)
    assert plan.bins == 3072
    assert plan.epochs <= 2


@pytest.mark.parametrize("strategy", [Fluid(), Matched(merge=False), Batched(1, merge=False)], ids=str)
def test_rounds_stay_apart_if_they_are_to(strategy: Strategy) -> None:
    assert plan_rescale(layout(55_000), 4, strategy=strategy).epochs == 3072


def test_rounds_that_cost_something_are_not_merged() -> None:
    large = plan_rescale(layout(4_000_000_000), 4, strategy=Matched())
    assert large.epochs == plan_rescale(layout(4_000_000_000), 4, strategy=Matched(merge=False)).epochs


def test_merging_leaves_every_round_below_what_is_free_or_as_it_was(rng: random.Random) -> None:
    for _ in range(200):
        rounds = np.sort(np.array([rng.randrange(30) for _ in range(100)]))
        rounds = np.unique(rounds, return_inverse=True)[1]
        sizes = np.array([rng.choice([0, 10, 10**4, 10**6]) for _ in rounds], float)
        costs = MoveCosts(byte_s=rng.choice([1e-9, 1e-8]), bin_s=rng.choice([0.0, 1e-5]))
        found = merged(rounds, sizes, costs)
        assert (np.diff(found) >= 0).all(), "the order stays"
        for number in np.unique(found):
            mine = found == number
            whole = costs.of(sizes[mine].sum(), mine.sum())
            assert whole <= FREE_S or len(np.unique(rounds[mine])) == 1
        for before in np.unique(rounds):
            assert len(np.unique(found[rounds == before])) == 1, "no round is cut"


def test_a_paced_plan_keeps_each_epoch_within_its_budget_and_says_how_long_it_takes() -> None:
    known = {"steady_s": 0.5, "move_byte_s": 1e-8, "move_bin_s": 1e-6}
    plan = plan_rescale(layout(400_000_000, rates=known), 4, strategy=Paced(1.2))
    costs = costs_of(known, 125e6)
    assert costs == MoveCosts(1e-8, 1e-6, 0.5)
    for moves in plan.expected_rounds:
        load = load_of([moves])
        assert costs.of(load.bytes, load.bins) <= 0.2 * 0.5
    assert 8 <= plan.epochs <= 16, "100 MB to each of three slots, and 10 MB fit an epoch"
    assert plan.expected_s == pytest.approx(plan.epochs * 0.5 + 1.0, rel=0.1)
    assert f"takes about {plan.expected_s:.3g} s, with epochs of 0.5 s" in str(plan)
    assert f"over about {plan.epochs} epochs" in str(plan)


def test_a_bin_that_is_larger_than_the_budget_goes_alone() -> None:
    plan = plan_move(layout(4_000_000_000, slots=2, bits=2), bins=[0, 1], to=1, strategy=Paced())
    assert [len(moves) for moves in plan.rounds] == [1, 1]
    assert rounds_at_once(plan, 0, GUESSED) == 1


def test_a_plan_that_is_not_paced_goes_round_by_round_whatever_moving_costs() -> None:
    plan = plan_rescale(layout(55_000), 4, strategy=Fluid())
    assert rounds_at_once(plan, 0, MoveCosts(0.0, 0.0)) == 1


def test_what_is_prepared_costs_what_it_takes_to_open_it() -> None:
    plan = plan_rescale(layout(1_000_000_000, rates={"steady_s": 1.0}), 4, strategy=Paced(prepared=True))
    assert plan.prepared
    unprepared = plan_rescale(layout(1_000_000_000, rates={"steady_s": 1.0}), 4, strategy=Paced(prepared=False))
    assert plan.epochs < unprepared.epochs


@pytest.mark.parametrize("slowdown", [1, 0.5, True, "fast", float("nan"), 101])
def test_a_slowdown_is_a_factor_above_one(slowdown: float) -> None:
    with pytest.raises(UserError, match="expected a factor above 1"):
        Paced(slowdown)


# -- what is learned --------------------------------------------------------------------------------------------------


def test_costs_are_learned_from_epochs_and_remembered_by_commits() -> None:
    learning = Learning({})
    assert learning.costs(125e6) == MoveCosts(8e-9, BIN_S, 0.0)
    for _ in range(40):
        learning.quiet(0.3)
    load = RoundLoad({})
    load.bins, load._received = 1000, {0: 10_000_000}
    for _ in range(40):
        learning.moved(load, 0.3 + 0.2 + 0.05, 0.2, prepared=False)
    costs = learning.costs(125e6)
    assert costs.epoch_s == pytest.approx(0.3)
    assert costs.byte_s == pytest.approx(0.2 / 10_000_000)
    assert costs.bin_s == pytest.approx(0.05 / 1000, rel=0.05)
    assert Learning(learning.told()).costs(125e6) == costs


def test_noise_of_epochs_does_not_make_bins_dear(rng: random.Random) -> None:
    learning = Learning({})
    load = RoundLoad({})
    load.bins = 1000
    for _ in range(300):
        learning.quiet(max(0.05, rng.gauss(0.2, 0.04)))
        learning.moved(load, max(0.05, rng.gauss(0.2, 0.04)), 0.0, prepared=False)
    assert learning.costs(125e6).bin_s < 5e-5, "the truth is nothing, and an epoch varies by 4e-5 s for each bin"


def test_the_long_first_epochs_of_a_process_are_forgotten_soon() -> None:
    learning = Learning({})
    for took_s in (3.0, 0.9, *[0.2] * 6):
        learning.quiet(took_s)
    assert learning.costs(125e6).epoch_s < 0.25


# -- both together ----------------------------------------------------------------------------------------------------


def carried_out(
    plan: MigrationPlan, truth: MoveCosts, rng: random.Random, noise: float
) -> tuple[list[float], list[float]]:
    """How long each epoch of a plan takes in a world with other costs than were thought; and what moving added."""
    learning, done = Learning({"steady_s": truth.epoch_s}), 0
    times, extras = [], []
    while done < len(plan.rounds):
        count = rounds_at_once(plan, done, learning.costs(125e6))
        load = load_of(plan.rounds[done : done + count])
        extra = truth.of(load.bytes, load.bins)
        took = truth.epoch_s * rng.uniform(1 - noise, 1 + noise) + extra
        learning.moved(load, took, load.bytes * truth.byte_s, prepared=False)
        times.append(took)
        extras.append(extra)
        done += count
    return times, extras


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("dearer", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("slowdown", [1.1, 1.5])
def test_epochs_come_to_be_within_the_slowdown_whatever_the_true_costs(
    slowdown: float, dearer: float, noise: float, rng: random.Random
) -> None:
    truth = MoveCosts(8e-9 * dearer, 2e-6 * dearer, 0.5)
    known = {"steady_s": 0.5}
    plan = plan_rescale(layout(20_000_000_000, rates=known), 4, strategy=Paced(slowdown))
    _, extras = carried_out(plan, truth, rng, noise)
    budget = (slowdown - 1) * 0.5
    settled = extras[12:]
    assert settled
    least = max(truth.of(load.bytes, load.bins) for load in map(load_of, [[moves] for moves in plan.rounds]))
    assert sorted(settled)[int(0.9 * len(settled))] <= max(1.25 * budget, least)
    if dearer < 1 and not noise:
        assert max(extras) > 0.5 * budget, "what is cheap is not taken in small steps"
        assert len(extras) < plan.epochs


def test_dear_bins_are_found_to_be_dear(rng: random.Random) -> None:
    truth = MoveCosts(8e-9, 5e-5, 0.5)
    plan = plan_rescale(layout(55_000, rates={"steady_s": 0.5}), 4, strategy=Paced())
    times, _ = carried_out(plan, truth, rng, 0.0)
    assert len(times) <= 4, "a tiny state is through before much can be learned"
    again = plan_rescale(layout(55_000, rates={"steady_s": 0.5, "move_bin_s": 5e-5}), 4, strategy=Paced())
    assert max(carried_out(again, truth, rng, 0.0)[0]) <= 0.5 * 1.1 + 0.16
    assert truth.bin_s < MOST_BIN_S
    assert truth.epoch_s > SHORTEST_EPOCH_S
