"""Rhino's workloads at the size of one machine: NBQ5, NBQ8 and NBQX, and an open loop of NEXMark's events for them.

The queries are those of `millstream.nexmark.queries`, with the paper's windows (its section 5.1.2), and its sizes of
records: 206 bytes for a person, 269 for an auction, 32 for a bid. Keys are drawn uniformly, as in the paper.

What differs from the paper
---------------------------
- Scale. Event time goes by the number of the event, so how many events a window holds is a matter of choice: state is
  filled, as fast as it goes, with as many events as the wanted size takes, and then events come at a rate. For NBQ5 the
  fill is one window; for the others the longest window lasts beyond the fill and all that comes in ten minutes, so it
  does not close in a trial (nor does it in the paper's).
- A stream of each kind has the same bytes per second, as in the paper; but all are one stream of numbered events, of
  which each source keeps its own. The rate is that of all events.
- NBQ5 has a second step, which finds the hottest auctions of each window.

The loop
--------
- A feed hands Spark ranges of positions in NEXMark's stream, one for each tick of its clock. How many records a tick
  has follows from a pace, which may change with time.
- Latencies are counted in ticks: each is due when it begins, whatever it holds. So a maximum is exact, and a percentile
  goes by time rather than by records.
- When all is measured, the last events of the stream are handed over, which end its time: every window closes, and what
  has been produced is compared with the same query in Spark's own batch SQL, on the events that were handed over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

import millstream as ms
from bench.open_loop import TICK_S, Feed
from millstream.nexmark.catalogue import QUERIES
from millstream.nexmark.frames import events_of
from millstream.nexmark.parameters import Parameters

NAMES = ("nbq8", "nbq5", "nbqx")
TITLES = {
    "nbq5": "NBQ5 (sliding windows, read-modify-write)",
    "nbq8": "NBQ8 (a windowed join, append)",
    "nbqx": "NBQX (four session joins and a windowed join)",
}
WINDOWS_S = {"nbq5": 60, "nbq8": 12 * 3600, "nbqx": 4 * 3600}
"""The longest windows, in event time."""
LIVE_S = 600
"""For so many seconds after the fill no window of NBQ8 and NBQX closes."""
BYTES_PER_EVENT = {"nbq5": 25, "nbq8": 290, "nbqx": 345}
"""About how much state an event of the fill leaves."""
_TURNS = {"nbq5": (1, 15, 48), "nbq8": (4, 3, 1), "nbqx": (1, 3, 25)}
"""How many people, auctions and bids come in turn: as many bytes of each kind that the query reads."""
_LIFE_S = 1800
"""How long bids are made for an auction of NBQX, in event time."""
_CHUNK = 100_000
_PIECES = 4
_BEYOND = 10
"""The end of the stream is so many windows away."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How many records a second come, over time: `levels` rates, evenly spaced up to `most`, each for `step_s` seconds,
    up and down again. With one level the rate does not change.

    >>> pace = Pace(800.0, 4, 10.0)
    >>> [pace.rate_at(second) for second in (0, 10, 20, 30, 40, 50, 60)], pace.period_s
    ([200.0, 400.0, 600.0, 800.0, 600.0, 400.0, 200.0], 60.0)
    """

    most: float
    levels: int = 1
    step_s: float = 10.0

    @property
    def period_s(self) -> float:
        """After how long it begins again; 0 if it does not change."""
        return 2 * (self.levels - 1) * self.step_s

    def rate_at(self, at_s: float) -> float:
        """The rate at a time after the start."""
        if self.levels == 1:
            return self.most
        step = int(at_s % self.period_s // self.step_s)
        level = min(step, 2 * (self.levels - 1) - step)
        return self.most * (level + 1) / self.levels

    def count(self, tick: int) -> int:
        """The records of a tick."""
        return max(1, round(self.rate_at(tick * TICK_S) * TICK_S))


@dataclass(frozen=True, slots=True)
class Workload:
    """A query and the events for it."""

    query: str
    fill: int
    """How many events the state is filled with."""
    given: Parameters

    def build(self, feed: EventFeed, folder: Path) -> ms.Query:
        """The query on a feed; what it produces goes to a folder `out`."""
        positions = feed.positions()
        origins = {kind: events_of(positions, self.given, kind) for kind in QUERIES[self.query].reads}
        return QUERIES[self.query].build(origins, ms.Parquet(str(folder / "out")))

    @property
    def closing(self) -> tuple[int, int]:
        """The positions of the last turn of the stream."""
        end = self.given.events or 0
        return end - self.given.turn, end

    def check(self, spark: SparkSession, feed: EventFeed, folder: Path) -> int:
        """Refuses a wrong answer; how many rows the right one has."""
        ranges = [spark.range(first, end).toDF("position") for first, end in feed.handed()]
        positions = reduce(DataFrame.unionByName, ranges)
        query = QUERIES[self.query]
        twin = query.twin({kind: events_of(positions, self.given, kind) for kind in query.reads})
        produced = spark.read.schema(query.output).parquet(str(folder / "out"))
        names = produced.columns
        signed = produced.withColumn("times", sql.lit(1)).unionByName(
            twin.select(*names).withColumn("times", sql.lit(-1))
        )
        totals = signed.groupBy(*names).agg(sql.sum("times").alias("times"), sql.count("*").alias("rows"))
        found = totals.agg(sql.sum("rows"), sql.count_if(sql.col("times") != 0)).collect()[0]
        rows, wrong = int(found[0] or 0), int(found[1])
        if wrong or not rows:
            raise RuntimeError(f"wrong answer: {wrong} rows are missing or too many, {rows // 2} are expected")
        return rows // 2


def workload(query: str, state_bytes: int, rate: float) -> Workload:
    """A query with as many events as a size of its state takes, for events that then come at a rate.

    >>> workload("nbq8", 29_000_000, 1000.0).fill
    100000
    """
    people, auctions, bids = _TURNS[query]
    turn = people + auctions + bids
    fill = max(turn, state_bytes // BYTES_PER_EVENT[query])
    within = fill if query == "nbq5" else max(2 * fill, fill + round(rate * LIVE_S))
    unit = 60 if query == "nbq5" else 3600
    born = within * auctions // turn
    lives = {"nbq5": born, "nbqx": born * _LIFE_S // WINDOWS_S[query]}
    given = Parameters(
        events=turn * (_BEYOND * within // turn + 1),
        events_per_second=-(-within // unit),
        dilation=WINDOWS_S[query] // unit,
        people=people,
        auctions=auctions,
        bids=bids,
        hot_auctions=1,
        hot_sellers=1,
        hot_bidders=1,
        in_flight=max(100, lives.get(query, 0)),
        active_people=_BEYOND * within,
        person_bytes=206,
        auction_bytes=269,
        bid_bytes=32,
    )
    return Workload(query, fill, given)


class EventFeed(Feed):
    """Hands ranges of positions to Spark. Its clock counts ticks, and its rate is that of ticks."""

    def __init__(self, spark: SparkSession, work: Workload, pace: Pace) -> None:
        super().__init__(spark, 1 / TICK_S)
        self.work, self.pace = work, pace
        self.position = 0
        """How far the stream has been handed over."""
        self._closed = False

    def positions(self) -> DataFrame:
        """The column `position` of all that is handed over."""
        words = sql.split("value", ":")
        first, end = words[0].cast("long"), words[1].cast("long")
        handed = DataFrame(self._stream.toDF(), self._spark)
        return handed.select(sql.explode(sql.sequence(first, end - 1)).alias("position"))

    def handed(self) -> list[tuple[int, int]]:
        """The ranges of all positions that have been handed over."""
        return [(0, self.position), *([self.work.closing] if self._closed else [])]

    def fill_all(self, committed: Callable[[int], Any]) -> None:
        """Hands over the events of the fill, in chunks; `committed` waits until the last one has been committed, given
        its offset."""
        while self.position < self.work.fill:
            piece = -(-min(_CHUNK, self.work.fill - self.position) // _PIECES)
            self._hand_ranges([self._next(piece) for _ in range(_PIECES)])
            committed(self.offset)

    def close(self) -> None:
        """Hands over the end of the stream, once the clock has ended."""
        self._closed = True
        self._hand_ranges([self.work.closing])

    def _next(self, count: int) -> tuple[int, int]:
        first, self.position = self.position, self.position + count
        return first, self.position

    def _hand_over(self, numbers: list[int]) -> None:
        self._hand_ranges([self._next(self.pace.count(tick)) for tick in numbers], numbers[-1] + 1)

    def _hand_ranges(self, ranges: list[tuple[int, int]], ticks: int | None = None) -> None:
        self.reached[self.offset + 1] = self.ticks if ticks is None else ticks
        self._stream.addData(self._jvm.PythonUtils.toSeq([f"{first}:{end}" for first, end in ranges]))
        self.offset += 1
