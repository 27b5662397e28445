"""The generator without Spark: the same events as `expressions`, in NumPy and Arrow.

Rules
-----
- It is written from the parameters, not from the SQL, so that the comparison of the two says something.
- For tests and the simulator: it is quick enough for some hundred thousand events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import UserError
from millstream.nexmark import parameters as words
from millstream.nexmark.parameters import AUCTIONS, BIDS, KINDS, PEOPLE, Parameters

Numbers = npt.NDArray[np.int64]

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)
_SPARK_SEED = 42


def generate(given: Parameters, kind: str, first: int = 0, stop: int | None = None) -> pa.Table:
    """The events of a kind at the positions from `first` to before `stop`, in their order; to the end, if there is one.

    >>> generate(Parameters(events=100), "auctions").column("id").to_pylist()
    [1000, 1001, 1002, 1003, 1004, 1005]
    """
    if kind not in KINDS:
        raise UserError(f"NEXMark: no kind of events {kind!r}; there are {', '.join(KINDS)}")
    if given.events is not None:
        stop = given.events if stop is None else min(stop, given.events)
    if stop is None:
        raise UserError("NEXMark: a stream without end; say how far, with stop=")
    positions = np.arange(first, max(first, stop), dtype=np.int64)
    within = positions % given.group
    numbers = positions - within + within * words.SCRAMBLE % given.group
    place = numbers % given.turn
    low = given.first_place(kind)
    mine = (place >= low) & (place < low + {PEOPLE: given.people, AUCTIONS: given.auctions, BIDS: given.bids}[kind])
    return _Events(given, kind, positions[mine], numbers[mine]).table()


def epochs(given: Parameters, kinds: Sequence[str], cuts: Sequence[int]) -> Iterator[dict[str, list[tuple[Any, ...]]]]:
    """The stream in epochs, as records for `Simulated.feed`: an epoch begins at each of the cuts, which are positions.

    >>> [len(epoch["bids"]) for epoch in epochs(Parameters(events=100), ["bids"], [10, 60])]
    [6, 46, 40]
    """
    edges = [0, *cuts, given.events]
    for first, stop in pairwise(edges):
        tables = {kind: generate(given, kind, first or 0, stop) for kind in kinds}
        yield {kind: rows_of(table) for kind, table in tables.items()}


def rows_of(table: pa.Table) -> list[tuple[Any, ...]]:
    """A table as tuples."""
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def spark_hash(first: Numbers, second: int) -> Numbers:
    """Spark's xxhash64 of two numbers.

    >>> spark_hash(np.array([0, 1]), 7).tolist()
    [-2655039576142263734, 9148010362968143645]
    """
    with np.errstate(over="ignore"):
        seeds = _hash_long(first.astype(np.uint64), np.uint64(_SPARK_SEED))
        return _hash_long(np.uint64(second), seeds).view(np.int64)


def _hash_long(value: Any, seed: Any) -> npt.NDArray[np.uint64]:
    """XXH64 of one number of eight bytes."""
    mixed = (seed + _P5 + np.uint64(8)) ^ (_rotated(value * _P2, 31) * _P1)
    mixed = _rotated(mixed, 27) * _P1 + _P4
    mixed = (mixed ^ (mixed >> np.uint64(33))) * _P2
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _P3
    return np.asarray(mixed ^ (mixed >> np.uint64(32)))


def _rotated(value: Any, bits: int) -> Any:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


class _Events:
    """Events of one kind, column by column."""

    def __init__(self, given: Parameters, kind: str, positions: Numbers, numbers: Numbers) -> None:
        self.given, self.kind, self.numbers = given, kind, numbers
        turns, places = np.divmod(numbers, given.turn)
        self.person = turns * given.people + np.minimum(places, given.people - 1)
        self.auction = turns * given.auctions + np.minimum(places - given.people, given.auctions - 1)
        self.us = self._times(numbers)
        self.mark = self._times(positions - positions % given.group)
        if given.delayed:
            behind = 1 + self.draw("delay", given.delay_us)
            self.us = self.us - np.where(self.draw("is_delayed", 100) < given.delayed, behind, 0)
            self.mark = self.mark - given.delay_us
        self.mark = np.where(positions == given.last_position(kind), words.END_US, self.mark)

    def _times(self, numbers: Numbers) -> Numbers:
        times: Numbers = words.START_US + numbers * (1_000_000 * self.given.dilation) // self.given.events_per_second
        return times

    def table(self) -> pa.Table:
        columns = {PEOPLE: self._people, AUCTIONS: self._auctions, BIDS: self._bids}[self.kind]()
        columns["mark"] = _stamps(self.mark)
        return pa.table(columns)

    def _people(self) -> dict[str, Any]:
        first, last = self.pick("first_name", words.FIRST_NAMES), self.pick("last_name", words.LAST_NAMES)
        hosts, towns = self.pick("host", words.HOSTS), self.draw("town", len(words.TOWNS))
        people = list(zip(first, last, hosts, strict=True))
        texts = {
            "name": [f"{one} {two}" for one, two, _ in people],
            "email": [f"{one}.{two}@{host}".lower() for one, two, host in people],
            "credit_card": [f"{card:016d}" for card in self.draw("card", 10**16).tolist()],
            "city": [words.TOWNS[town][0] for town in towns],
            "state": [words.TOWNS[town][1] for town in towns],
        }
        extra = self.extra(self.given.person_bytes - 16, *texts.values())
        return {"id": words.FIRST_ID + self.person, **texts, "ts": _stamps(self.us), "extra": extra}

    def _auctions(self) -> dict[str, Any]:
        given = self.given
        adjectives, nouns = self.pick("adjective", words.ADJECTIVES), self.pick("noun", words.NOUNS)
        conditions = self.pick("condition", words.ADJECTIVES)
        texts = {
            "item": [f"{adjective} {noun}" for adjective, noun in zip(adjectives, nouns, strict=True)],
            "description": [f"one {noun}, {condition}" for noun, condition in zip(nouns, conditions, strict=True)],
        }
        initial_bid = self.price("initial_bid")
        seller = self.hot_or_active(self.person, given.hot_sellers, given.active_people, "is_hot", "choice", 0)
        return {
            "id": words.FIRST_ID + self.auction,
            **texts,
            "initial_bid": initial_bid,
            "reserve": initial_bid + self.price("reserve"),
            "ts": _stamps(self.us),
            "expires": _stamps(self.us + 1 + self.draw("length", given.longest_us)),
            "seller": words.FIRST_ID + seller,
            "category": words.FIRST_CATEGORY + self.draw("category", words.CATEGORIES),
            "extra": self.extra(given.auction_bytes - 56, *texts.values()),
        }

    def _bids(self) -> dict[str, Any]:
        given = self.given
        auction = self.hot_or_active(self.auction, given.hot_auctions, given.in_flight, "is_hot", "choice", 0)
        bidder = self.hot_or_active(self.person, given.hot_bidders, given.active_people, "is_hot_bidder", "bidder", 1)
        return {
            "auction": words.FIRST_ID + auction,
            "bidder": words.FIRST_ID + bidder,
            "price": self.price("price"),
            "ts": _stamps(self.us),
            "extra": self.extra(given.bid_bytes - 32),
        }

    def draw(self, field: str, below: Any) -> Numbers:
        """A number from 0 to below a limit."""
        drawn: Numbers = np.mod(spark_hash(self.numbers, self.given.salt(field)), below)
        return drawn

    def pick(self, field: str, texts: Sequence[str]) -> list[str]:
        return [texts[place] for place in self.draw(field, len(texts))]

    def price(self, field: str) -> Numbers:
        """A price in cents, log-uniform from 1 to a million."""
        decade, rest = np.divmod(self.draw(field, words.DECADES << 16), 1 << 16)
        step, within = np.divmod(rest, 1024)
        steps = np.array(words.STEPS)
        between = steps[step] * (1024 - within) + steps[step + 1] * within
        cents: Numbers = 100 * 10**decade * between >> 26
        return cents

    def hot_or_active(self, newest: Numbers, ratio: int, active: int, is_hot: str, choice: str, beside: int) -> Numbers:
        """The ids of hot ones, and of others among the newest."""
        hot = np.minimum(newest - newest % words.HOT_EVERY + beside, newest)
        return np.where(self.draw(is_hot, ratio) > 0, hot, newest - self.draw(choice, np.minimum(newest + 1, active)))

    def extra(self, size: int, *texts: list[str]) -> list[str]:
        """Texts that fill records up to their size."""
        used = [sum(map(len, each)) for each in zip(*texts, strict=True)] if texts else [0] * len(self.numbers)
        digits = spark_hash(self.numbers, self.given.salt("extra")).view(np.uint64).tolist()
        lengths = (max(0, size - taken) for taken in used)
        return [(f"{each:016X}" * -(-length // 16))[:length] for each, length in zip(digits, lengths, strict=True)]


def _stamps(us: Numbers) -> pa.Array:
    return pa.array(us, pa.timestamp("us", "UTC"))
