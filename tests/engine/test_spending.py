"""What epochs spend on state, and the rates that follow: told when they mean something, and when they are others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream.engine.spending import ENOUGH, Rates, arrived, sources_of
from millstream.protocol.epochs import History, Report
from millstream.protocol.layout import RATE, Layout
from millstream.protocol.routing import RoutingTable


def report(slot: int, fetch: float = 0.0, **read: int) -> Report:
    return Report(slot, {}, timings_ms={"fetch": fetch}, read=read)


def test_a_rate_is_told_once_it_means_something_and_again_when_it_is_another() -> None:
    rates = Rates()
    rates.fetched([report(0, fetched=ENOUGH // 2, fetch=100.0)])
    assert rates.told({}, {}, {}) is None, "too little was fetched"
    rates.fetched([report(0, fetched=ENOUGH // 4, fetch=50.0), report(1, fetched=ENOUGH // 4, fetch=50.0), report(2)])
    known = rates.told({}, {}, {})
    assert known == {"store": ENOUGH / 0.2}
    assert rates.told({}, {}, known) is None
    agents = {"store": (ENOUGH, 0.2), "replica": (ENOUGH * 10, 0.5)}
    more = rates.told(agents, {}, known)
    assert more == {"store": ENOUGH / 0.2, "replica": ENOUGH * 20}
    assert rates.told(agents, {}, more) is None
    assert rates.told({**agents, "store": (ENOUGH, 5.0)}, {}, more) != more


def test_what_was_found_is_a_replica_where_a_slot_has_just_come_or_got_ranges() -> None:
    before = History(
        tables={"count": RoutingTable.even(4, 4)}, workers={"a": (0, 1), "b": (2, 3)}
    )  # fmt: skip
    assert arrived({}, before, before.workers) == set()
    assert arrived({}, before, {"a": (0, 1, 2), "b": (3,)}) == {2}
    assert arrived({"count": RoutingTable.even(2, 4)}, before, {"a": (0,), "b": (1,)}) == {0, 1}
    reports = [report(0, found=10), report(1, found=20, fetched=5), report(1), report(0, found=1)]
    assert sources_of(reports, (7, 2), {2}) == {"cache": 11, "replica": 20, "store": 5}


@pytest.mark.parametrize(
    ("limit", "rates", "fetch", "give"),
    [
        (0, {}, RATE, RATE),
        (1000, {}, 1000, 1000),
        (0, {"store": 50.0}, 50, 50),
        (1000, {"store": 5000.0, "replica": 70.0}, 1000, 70),
        (1000, {"store": 20.0}, 20, 20),
    ],
)
def test_plans_count_on_what_was_measured_within_the_limit(
    limit: int, rates: dict[str, float], fetch: float, give: float
) -> None:
    layout = replace(Layout("s", {}), fetch_limit=limit, rates=rates)
    assert (layout.fetch_rate, layout.give_rate) == (fetch, give)
