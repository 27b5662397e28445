"""Who is left out when nothing gets through between some: all that are left reach each other, and the driver them."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from millstream.protocol.reach import DRIVER, Link, broken_links, cut_off

WORKERS = [str(number) for number in range(6)]
LINKS = [frozenset((one, other)) for one in [*WORKERS, DRIVER] for other in WORKERS if one != other]


def seen(cuts: Collection[Link], dead: Collection[str] = ()) -> dict[str, list[str]]:
    """What is found out in a network with these links cut, and these agents dead."""

    def reaches(one: str) -> list[str]:
        return [other for other in WORKERS if other not in (one, *dead) and frozenset((one, other)) not in cuts]

    return {DRIVER: reaches(DRIVER), **{one: reaches(one) for one in reaches(DRIVER)}}


@given(st.sets(st.sampled_from(LINKS)), st.sets(st.sampled_from(WORKERS)))
def test_no_link_is_said_to_be_broken_that_is_not_and_none_stays_among_those_who_are_left(
    cuts: set[Link], dead: set[str]
) -> None:
    broken = broken_links(seen(cuts, dead), WORKERS)
    assert broken <= cuts
    left = {*WORKERS, DRIVER} - set(cut_off(broken, {}))
    assert DRIVER in left
    asked = set(seen(cuts, dead)) & left
    assert not any(link <= asked for link in cuts - {link for link in cuts if link & dead})


def test_agents_that_are_dead_break_no_link() -> None:
    assert not broken_links(seen((), dead=["2", "3"]), WORKERS)


def test_who_is_cut_off_from_all_others_is_left_out_alone() -> None:
    cuts = [frozenset(("1", other)) for other in WORKERS if other != "1"]
    assert cut_off(broken_links(seen(cuts), WORKERS), {"1": range(9)}) == ("1",)


def test_who_is_cut_off_from_the_driver_is_left_out_however_many_it_reaches() -> None:
    cuts = [frozenset(("1", DRIVER))]
    assert cut_off(broken_links(seen(cuts), WORKERS), {"1": range(9)}) == ("1",)


def test_of_two_halves_all_of_one_go() -> None:
    half = WORKERS[:3]
    cuts = [frozenset((one, other)) for one in half for other in WORKERS if other not in half]
    gone = cut_off(broken_links(seen(cuts), WORKERS), {worker: [0] for worker in half})
    assert sorted(gone) == WORKERS[3:], "those without slots"
