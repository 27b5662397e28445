"""Strategies: every move has one round, rounds have no hole, and each strategy keeps its promise about a round."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream import AllAtOnce, Batched, Fluid, Matched, UserError
from millstream.protocol.strategies import Strategy

Moves = list[tuple[int, int]]

PAIRS = st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda pair: pair[0] != pair[1])
MOVES = st.lists(PAIRS, min_size=1, max_size=120)
ONE_WAY = st.lists(st.tuples(st.integers(0, 7), st.integers(8, 15)), min_size=1, max_size=200)
"""Moves between slots that only give and slots that only receive, as every planner makes them."""


def rounds_of(strategy: Strategy, moves: Moves) -> list[Moves]:
    origins, targets = np.array(moves, np.int64).T
    numbers = strategy.rounds(origins, targets)
    assert len(numbers) == len(moves)
    assert set(numbers.tolist()) == set(range(int(numbers.max()) + 1)), "a round is empty"
    assert numbers.tolist() == strategy.rounds(origins, targets).tolist(), "the same moves, the same rounds"
    return [
        [move for move, at in zip(moves, numbers.tolist(), strict=True) if at == n] for n in range(max(numbers) + 1)
    ]


def most_moves_of_a_slot(moves: Moves) -> int:
    return max(Counter(slot for move in moves for slot in move).values())


@given(MOVES)
def test_all_at_once_is_one_round(moves: Moves) -> None:
    assert rounds_of(AllAtOnce(), moves) == [moves]


@given(MOVES)
def test_fluid_moves_one_bin_per_round(moves: Moves) -> None:
    assert [len(found) for found in rounds_of(Fluid(), moves)] == [1] * len(moves)


@given(MOVES, st.integers(1, 40))
def test_batched_fills_every_round_but_the_last(moves: Moves, n: int) -> None:
    sizes = [len(found) for found in rounds_of(Batched(n), moves)]
    assert sizes == [n] * (len(moves) // n) + [len(moves) % n] * (len(moves) % n > 0)


@given(MOVES)
def test_at_any_point_every_target_has_its_share(moves: Moves) -> None:
    totals = Counter(target for _, target in moves)
    received: Counter[int] = Counter()
    for done, [(_, target)] in enumerate(rounds_of(Fluid(), moves), 1):
        received[target] += 1
        for slot, total in totals.items():
            # A bin counts from the middle of its place, and others with the same place may come first.
            assert abs(received[slot] - done * total / len(moves)) <= 1 + total / len(moves) * len(totals)


def test_a_round_loads_all_targets_and_origins_alike() -> None:
    to_all = [(origin, 8 + target) for origin in range(8) for target in range(8) for _ in range(8)]
    for found in rounds_of(Batched(64), to_all):
        assert set(Counter(target for _, target in found).values()) == {8}
        assert max(Counter(origin for origin, _ in found).values()) <= 16


def test_bins_that_go_the_same_way_go_in_order() -> None:
    moves = [(0, 2)] * 6 + [(1, 3)] * 6
    origins, targets = np.array(moves).T
    assert Batched(4).rounds(origins, targets).tolist() == [0, 0, 1, 1, 2, 2] * 2


def assert_disjoint(rounds: list[Moves]) -> None:
    for found in rounds:
        slots = [slot for move in found for slot in move]
        assert len(slots) == len(set(slots)), f"moves of one round share a slot: {found}"


@given(ONE_WAY)
@example([(0, 8)] * 100)
@example([(origin, 8 + target) for origin in range(8) for target in range(8)])
def test_matched_takes_as_many_rounds_as_its_busiest_slot_has_moves(moves: Moves) -> None:
    rounds = rounds_of(Matched(), moves)
    assert_disjoint(rounds)
    assert len(rounds) == most_moves_of_a_slot(moves)


@given(MOVES)
def test_matched_takes_less_than_twice_that_if_a_slot_gives_and_receives(moves: Moves) -> None:
    rounds = rounds_of(Matched(), moves)
    assert_disjoint(rounds)
    assert most_moves_of_a_slot(moves) <= len(rounds) < 2 * most_moves_of_a_slot(moves)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: AllAtOnce(gap=-1), r"AllAtOnce\(gap=-1\): expected a whole number of epochs, 0 or more"),
        (lambda: Fluid(gap=1.5), "gap=1.5"),
        (lambda: Matched(gap="2"), "gap='2'"),
        (lambda: Matched(gap=True), "gap=True"),
        (lambda: Batched(0), r"Batched\(n=0\): expected a whole number of bins, 1 or more"),
        (lambda: Batched(2.0), "n=2.0"),
        (lambda: Batched(4, gap=-3), "gap=-3"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        make()


def test_a_strategy_prints_as_it_is_written() -> None:
    written = ["AllAtOnce()", "Fluid(gap=3)", "Batched(64)", "Batched(8, gap=1)", "Matched()"]
    assert [str(s) for s in (AllAtOnce(), Fluid(gap=3), Batched(64), Batched(8, gap=1), Matched())] == written
