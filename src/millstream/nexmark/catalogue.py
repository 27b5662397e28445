"""All NEXMark queries by name: what each reads, how it is built, and what it must give.

Rules
-----
- `build` makes a query for the simulator and for Spark alike; only the origins of its sources differ.
- A stream with an end closes everything: the last event of each kind states a watermark beyond all times. So what a
  query produces in all is what `twin` and `expected` compute, in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import millstream as ms
from millstream.nexmark import queries
from millstream.nexmark.events import generate
from millstream.nexmark.oracle import ORACLES
from millstream.nexmark.parameters import AUCTIONS, BIDS, PEOPLE, SCHEMAS, Parameters

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SINK = "out"


@dataclass(frozen=True, slots=True)
class NexmarkQuery:
    """A query of NEXMark."""

    name: str
    title: str
    reads: tuple[str, ...]
    """The kinds of events it reads: the names of its sources."""
    output: str
    """The columns of its productions, which go to the sink `out`."""
    dilation: int = 1
    """By how much event time goes faster, unless one says otherwise: that of Megaphone's figures."""
    is_stateful: bool = True

    @property
    def schemas(self) -> dict[str, str]:
        """The columns of its sources, for the simulator."""
        return {kind: SCHEMAS[kind] for kind in self.reads}

    def build(self, origins: Mapping[str, Any] | None = None, sink: Any = None) -> ms.Query:
        """The query. `origins` are its sources by kind (see `frames`), nothing for the simulator; `sink` takes what it
        produces, by default a `Memory`."""
        query = ms.Query(self.name)
        sources = {
            kind: query.source(
                kind,
                (origins or {}).get(kind),
                event_time="ts",
                watermark="mark",
                idle_after="100000 days",
                max_ahead="1000000 days",
            )
            for kind in self.reads
        }
        body: Callable[[queries.Sources], ms.Stream] = getattr(queries, self.name)
        body(sources.__getitem__).sink(SINK, ms.Memory() if sink is None else sink)
        return query

    def twin(self, frames: Mapping[str, DataFrame]) -> DataFrame:
        """What it must give, computed by Spark of frames of all events (see `frames.batches`)."""
        from millstream.nexmark import twins

        frame: DataFrame = getattr(twins, self.name)(frames.__getitem__)
        return frame

    def expected(self, given: Parameters) -> Sequence[tuple[Any, ...]]:
        """What it must give, computed in plain Python."""
        return ORACLES[self.name]({kind: generate(given, kind).to_pylist() for kind in self.reads})


_HOT = "window_start timestamp, window_end timestamp, auction long, count long"

QUERIES: dict[str, NexmarkQuery] = {
    query.name: query
    for query in (
        NexmarkQuery(
            "q1",
            "currency conversion: bids in euros",
            (BIDS,),
            "auction long, bidder long, price long, ts timestamp",
            is_stateful=False,
        ),
        NexmarkQuery("q2", "selection: bids for some auctions", (BIDS,), "auction long, price long", is_stateful=False),
        NexmarkQuery(
            "q3",
            "local items: people in OR, ID and CA who sell in category 10",
            (PEOPLE, AUCTIONS),
            "name string, city string, state string, id_auction long",
        ),
        NexmarkQuery(
            "q4",
            "the average closing price of each category, after each closing",
            (AUCTIONS, BIDS),
            "category long, auction long, average double",
        ),
        NexmarkQuery(
            "q5", "hot items: the auctions with the most bids in the last hour, each minute", (BIDS,), _HOT, dilation=60
        ),
        NexmarkQuery(
            "q6",
            "the average price of each seller's last ten auctions, after each closing",
            (AUCTIONS, BIDS),
            "seller long, auction long, average double",
        ),
        NexmarkQuery(
            "q7",
            "the highest bids of each minute",
            (BIDS,),
            "window_start timestamp, window_end timestamp, auction long, bidder long, price long",
        ),
        NexmarkQuery(
            "q8",
            "new people who open an auction within twelve hours",
            (PEOPLE, AUCTIONS),
            "id long, name string, id_auction long",
            dilation=79,
        ),
        NexmarkQuery(
            "nbq5", "Rhino's Q5: the auctions with the most bids in a minute, each ten seconds", (BIDS,), _HOT
        ),
        NexmarkQuery(
            "nbq8",
            "Rhino's Q8: whole records of people and auctions, joined within twelve hours",
            (PEOPLE, AUCTIONS),
            "id long, name string, id_auction long",
        ),
        NexmarkQuery(
            "nbqx",
            "Rhino's QX: auctions and bids, joined in four kinds of sessions and a tumbling window at once",
            (AUCTIONS, BIDS),
            queries.OFFERS,
        ),
    )
}
