"""What NEXMark's queries must give, in plain Python: one loop after the other, over all events at once.

Rules
-----
- For tests on the simulator, where there is no Spark. It shares nothing with `queries` and with `twins`.
- Results are lists of tuples in any order. Events are dicts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

Events = Mapping[str, Sequence[Mapping[str, Any]]]
"""The events of each kind."""
Result = list[tuple[Any, ...]]

_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


def q1(events: Events) -> Result:
    return [(bid["auction"], bid["bidder"], bid["price"] * 908 // 1000, bid["ts"]) for bid in events["bids"]]


def q2(events: Events) -> Result:
    return [(bid["auction"], bid["price"]) for bid in events["bids"] if bid["auction"] % 123 == 0]


def q3(events: Events) -> Result:
    people = {person["id"]: person for person in events["people"] if person["state"] in ("OR", "ID", "CA")}
    found = []
    for auction in events["auctions"]:
        person = people.get(auction["seller"])
        if person is not None and auction["category"] == 10:
            found.append((person["name"], person["city"], person["state"], auction["id"]))
    return found


def q4(events: Events) -> Result:
    return _averages(events, "category", None)


def q6(events: Events) -> Result:
    return _averages(events, "seller", 10)


def _averages(events: Events, by: str, last: int | None) -> Result:
    offers = _by_auction(events["bids"])
    closings = []
    for auction in events["auctions"]:
        prices = [bid["price"] for bid in offers[auction["id"]] if auction["ts"] <= bid["ts"] < auction["expires"]]
        if prices:
            closings.append((auction["expires"], auction["id"], auction[by], max(prices)))
    prices_of: dict[Any, list[int]] = defaultdict(list)
    found = []
    for _, auction_id, key, price in sorted(closings):
        prices_of[key].append(price)
        counted = prices_of[key][-last:] if last else prices_of[key]
        found.append((key, auction_id, sum(counted) / len(counted)))
    return found


def _by_auction(bids: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for bid in bids:
        found[bid["auction"]].append(bid)
    return found


def _windows(ts: datetime, size: timedelta, every: timedelta) -> Iterator[datetime]:
    """The starts of the windows that hold a time."""
    start = _BEGINNING + (ts - _BEGINNING) // every * every
    while start + size > ts:
        yield start
        start -= every


def _hottest(events: Events, size: timedelta, every: timedelta) -> Result:
    counts: dict[datetime, Counter[int]] = defaultdict(Counter)
    for bid in events["bids"]:
        for start in _windows(bid["ts"], size, every):
            counts[start][bid["auction"]] += 1
    return [
        (start, start + size, auction, count)
        for start, counted in counts.items()
        for auction, count in counted.items()
        if count == max(counted.values())
    ]


def q5(events: Events) -> Result:
    return _hottest(events, timedelta(minutes=60), timedelta(minutes=1))


def nbq5(events: Events) -> Result:
    return _hottest(events, timedelta(seconds=60), timedelta(seconds=10))


def q7(events: Events) -> Result:
    minute = timedelta(minutes=1)
    windows: dict[datetime, list[tuple[int, int, int]]] = defaultdict(list)
    for bid in events["bids"]:
        [start] = _windows(bid["ts"], minute, minute)
        windows[start].append((bid["price"], bid["auction"], bid["bidder"]))
    return [
        (start, start + minute, auction, bidder, price)
        for start, bids in windows.items()
        for price, auction, bidder in set(bids)
        if price == max(bids)[0]
    ]


def q8(events: Events) -> Result:
    half_day = timedelta(hours=12)
    people = {person["id"]: person for person in events["people"]}
    found = []
    for auction in events["auctions"]:
        person = people.get(auction["seller"])
        if person is not None:
            windows = [list(_windows(each["ts"], half_day, half_day)) for each in (person, auction)]
            if windows[0] == windows[1]:
                found.append((person["id"], person["name"], auction["id"]))
    return found


def nbqx(events: Events) -> Result:
    four_hours = timedelta(hours=4)
    auctions, offers = {auction["id"]: auction for auction in events["auctions"]}, _by_auction(events["bids"])
    found = []
    for number, auction in auctions.items():
        for bid in offers[number]:
            windows = [list(_windows(each["ts"], four_hours, four_hours)) for each in (auction, bid)]
            if windows[0] == windows[1]:
                found.append(_offer("tumbling", auction, bid))
        for minutes in (30, 60, 90, 120):
            low = high = auction["ts"]
            gap = timedelta(minutes=minutes)
            before = sorted((bid["ts"] for bid in offers[number] if bid["ts"] <= low), reverse=True)
            after = sorted(bid["ts"] for bid in offers[number] if bid["ts"] > high)
            for ts in before:
                low = ts if low - ts < gap else low
            for ts in after:
                high = ts if ts - high < gap else high
            found += [_offer(f"{minutes} minutes", auction, bid) for bid in offers[number] if low <= bid["ts"] <= high]
    return found


def _offer(part: str, auction: Mapping[str, Any], bid: Mapping[str, Any]) -> tuple[Any, ...]:
    return part, auction["id"], auction["seller"], bid["bidder"], bid["price"], bid["ts"]


ORACLES: dict[str, Callable[[Events], Result]] = {
    "q1": q1,
    "q2": q2,
    "q3": q3,
    "q4": q4,
    "q5": q5,
    "q6": q6,
    "q7": q7,
    "q8": q8,
    "nbq5": nbq5,
    "nbq8": q8,
    "nbqx": nbqx,
}
