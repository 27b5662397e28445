"""NEXMark's queries on Millstream: Q1 to Q8, and Rhino's NBQ5, NBQ8 and NBQX.

Rules
-----
- A query reads sources by the names of the kinds of events, and produces to the sink `out`.
- What a query produces in all does not depend on where epochs are cut: windows, auctions and sessions close by the
  watermark, and averages follow the order of event time. Sources state true watermarks, so nothing is late.
- When a window closes, all its keys close in that epoch, and the next level sees them together: so the greatest of a
  window is found without state.
- What a query needs besides its own function and classes is in this file: `lines` counts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import millstream as ms

Sources = Callable[[str], ms.Stream]
"""The stream of a kind of events."""

RATE = 908
"""Euros for a thousand dollars."""
EVERY_NTH_AUCTION = 123
STATES = ("OR", "ID", "CA")
CATEGORY = 10
LAST_AUCTIONS = 10
GAPS = (30, 60, 90, 120)
"""The gaps of NBQX's sessions, in minutes."""
NOW, MICRO = timedelta(0), np.timedelta64(1, "us")


def q1(read: Sources) -> ms.Stream:
    """Bids in another currency."""
    return read("bids").key_by("auction").compute("convert", ToEuros)


class ToEuros(ms.Computation):
    """Converts prices."""

    output = "auction long, bidder long, price long, ts timestamp"

    def on_batch(self, batch: ms.Batch) -> Iterator[pa.RecordBatch]:
        bids = batch.rows
        euros = pc.divide(pc.multiply(bids["price"], RATE), 1000)
        yield batch.output(bids["auction"], bids["bidder"], euros, bids["ts"])


def q2(read: Sources) -> ms.Stream:
    """Bids for some auctions."""
    chosen = read("bids").filter("chosen", lambda bids: bids["auction"].to_numpy() % EVERY_NTH_AUCTION == 0)
    return chosen.key_by("auction").compute("prices", Prices)


class Prices(ms.Computation):
    """Auctions and prices of bids."""

    output = "auction long, price long"

    def on_batch(self, batch: ms.Batch) -> Iterator[pa.RecordBatch]:
        yield batch.output(batch.rows["auction"], batch.rows["price"])


def q3(read: Sources) -> ms.Stream:
    """People who sell locally: an incremental join."""
    local = read("people").filter("local", lambda people: pc.is_in(people["state"], pa.array(STATES)))
    offered = read("auctions").filter("offered", lambda auctions: pc.equal(auctions["category"], CATEGORY))
    people = only(local, "people_needed", "id long, name string, city string, state string, ts timestamp")
    auctions = only(offered, "auctions_needed", "id long, seller long, ts timestamp")
    joined = people.key_by("id").join("sellers", auctions.key_by("seller"), suffix="_auction")
    return only(joined, "found", "name string, city string, state string, id_auction long")


def only(stream: ms.Stream, name: str, output: str) -> ms.Stream:
    """Some columns of a stream."""
    names = [column.split()[0] for column in output.split(", ")]
    return stream.map_batches(name, lambda records: records.select(names), output=output)


def q4(read: Sources) -> ms.Stream:
    """The average closing price of a category, after each closing."""
    return closed(read).key_by("category").compute("average", AveragePrice)


def closed(read: Sources) -> ms.Stream:
    """Auctions that have closed, with their highest bids."""
    auctions, bids = read("auctions").key_by("id"), read("bids").key_by("auction")
    return bids.query.compute("closing", Closing, auctions=auctions, bids=bids)


class Closing(ms.Computation):
    """Keeps the highest bid of an auction until it expires. A bid may come before its auction, and waits for it until
    the auction would be late."""

    auction = ms.Value("struct<seller: long, category: long, ts: timestamp, expires: timestamp>")
    best = ms.Value("long", default=0)
    early = ms.Bag("struct<price: long, ts: timestamp>")
    closes = ms.Timer(ms.EVENT_TIME)
    forget = ms.Timer(ms.EVENT_TIME)
    output = "auction long, seller long, category long, price long"

    def on_batch(self, batch: ms.Batch) -> None:
        came, auctions = self._opened(batch)
        opens, expires = (_micros(column) for column in auctions.flatten()[2:])
        bids, waiting = batch.input("bids"), self.early.read(batch, where=came)
        new = pa.StructArray.from_arrays([bids.column("price"), bids.column("ts")], ["price", "ts"])
        counts = np.concatenate([bids.count(), waiting.value_lengths().to_numpy()])
        places = np.repeat(np.tile(np.arange(len(batch)), 2), counts)
        prices, times = pa.concat_arrays([new, waiting.flatten()]).flatten()
        counting = (opens[places] <= _micros(times)) & (_micros(times) < expires[places])
        best = self.best.read(batch)
        np.maximum.at(best, places[counting], prices.to_numpy()[counting])
        self.best.write(batch, best, where=best > 0)
        self.early.clear(batch, where=came)
        self.forget.delete(batch, where=came)
        unknown = ~auctions.is_valid().to_numpy(zero_copy_only=False)
        lost = np.flatnonzero(unknown[places])
        self.early.append(batch, new.take(pa.array(lost)), places[lost])
        self.forget.set(batch, batch.newest() + MICRO, where=unknown)

    def _opened(self, batch: ms.Batch) -> tuple[Any, pa.StructArray]:
        """Which keys have a new auction, and the auctions of all that have one."""
        new, names = batch.input("auctions"), ["seller", "category", "ts", "expires"]
        came, known = new.count() > 0, self.auction.read(batch)
        opened = pa.StructArray.from_arrays([new.first(name) for name in names], names)
        self.auction.write(batch, opened, where=came)
        self.closes.set(batch, _micros(new.first("expires")).view("datetime64[us]"), where=came)
        return came, pc.if_else(pa.array(came), opened, known)

    @closes.fires
    def closed(self, batch: ms.TimerBatch) -> Iterator[Any]:
        seller, category, *_ = self.auction.read(batch).flatten()
        prices = self.best.read(batch)
        self.auction.delete(batch)
        self.best.delete(batch)
        made, sold = batch.output(batch.keys, seller, category, prices), prices > 0
        yield batch.timed(made.filter(pa.array(sold)), batch.times[sold])

    @forget.fires
    def forgotten(self, batch: ms.TimerBatch) -> None:
        self.early.clear(batch)


def _micros(column: pa.Array) -> Any:
    """Times in microseconds; null is before all bids."""
    return column.cast(pa.int64()).fill_null(0).to_numpy()


class AveragePrice(ms.Computation):
    """The average of all prices so far, after each of them; in the order of closing, then of auctions."""

    total = ms.Value("long", default=0)
    count = ms.Value("long", default=0)
    next = ms.Timer(ms.EVENT_TIME, payload="long")
    output = "category long, auction long, average double"

    def on_record(self, row: Any, at: ms.At) -> None:
        self.next.set(NOW, tag=f"{row.auction:019d}", payload=row.price)

    @next.fires
    def add(self, at: ms.At) -> Iterator[tuple[Any, ...]]:
        total, count = self.total.get() + at.payload, self.count.get() + 1
        self.total.set(total)
        self.count.set(count)
        yield at.key, int(at.tag), total / count


def q5(read: Sources) -> ms.Stream:
    """Hot items of the last hour, each minute."""
    return hottest(read, ms.sliding("60 minutes", every="1 minute"))


def hottest(read: Sources, window: Any) -> ms.Stream:
    """The auctions with the most bids in each window."""
    counts = read("bids").key_by("auction").window(window).count("bids_of")
    return counts.key_by("window_end").compute("hottest", Hottest)


class Greatest(ms.Computation):
    """The records of each key with the greatest value, of those that come in an epoch. All equals are produced."""

    by: str
    shown: tuple[str, ...]

    def on_batch(self, batch: ms.Batch) -> Iterator[pa.RecordBatch]:
        rows, places = batch.rows, np.repeat(np.arange(len(batch)), batch.count())
        greatest = rows.filter(pc.equal(rows[self.by], batch.max(self.by).take(pa.array(places))))
        yield batch.output(*(greatest[name] for name in self.shown))


class Hottest(Greatest):
    """The auctions with the most bids."""

    by, shown = "count", ("window_start", "window_end", "auction", "count")
    output = "window_start timestamp, window_end timestamp, auction long, count long"


def q6(read: Sources) -> ms.Stream:
    """The average price of a seller's last ten auctions, after each closing."""
    return closed(read).key_by("seller").compute("average", AverageOfLast)


class AverageOfLast(ms.Computation):
    """The average of the last prices, after each of them; in the order of closing, then of auctions."""

    prices = ms.Value("array<long>", default=[])
    next = ms.Timer(ms.EVENT_TIME, payload="long")
    output = "seller long, auction long, average double"

    def on_record(self, row: Any, at: ms.At) -> None:
        self.next.set(NOW, tag=f"{row.auction:019d}", payload=row.price)

    @next.fires
    def add(self, at: ms.At) -> Iterator[tuple[Any, ...]]:
        prices = [*self.prices.get(), at.payload][-LAST_AUCTIONS:]
        self.prices.set(prices)
        yield at.key, int(at.tag), sum(prices) / len(prices)


def q7(read: Sources) -> ms.Stream:
    """The highest bids of each minute."""
    bids = read("bids").key_by("auction", "bidder").window(ms.tumbling("1 minute"))
    return bids.aggregate("offers", price=ms.max("price")).key_by("window_end").compute("highest", Highest)


class Highest(Greatest):
    """The highest bids."""

    by, shown = "price", ("window_start", "window_end", "auction", "bidder", "price")
    output = "window_start timestamp, window_end timestamp, auction long, bidder long, price long"


def q8(read: Sources) -> ms.Stream:
    """New people who open an auction within twelve hours."""
    people = only(read("people"), "people_needed", "id long, name string, ts timestamp")
    auctions = only(read("auctions"), "auctions_needed", "id long, seller long, ts timestamp")
    window = ms.tumbling("12 hours")
    joined = people.key_by("id").join("sellers", auctions.key_by("seller"), window=window, suffix="_auction")
    return only(joined, "found", "id long, name string, id_auction long")


def nbq5(read: Sources) -> ms.Stream:
    """Hot items of the last minute, each ten seconds."""
    return hottest(read, ms.sliding("60 seconds", every="10 seconds"))


def nbq8(read: Sources) -> ms.Stream:
    """New people who open an auction within twelve hours; whole records are kept."""
    people, auctions = read("people").key_by("id"), read("auctions").key_by("seller")
    joined = people.join("sellers", auctions, window=ms.tumbling("12 hours"), suffix="_auction")
    return only(joined, "found", "id long, name string, id_auction long")


OFFERS = "part string, auction long, seller long, bidder long, price long, ts timestamp"


def nbqx(read: Sources) -> ms.Stream:
    """Auctions and their bids, joined in four sessions and a tumbling window at once."""
    auctions, bids = read("auctions").key_by("id"), read("bids").key_by("auction")
    whole = auctions.join("tumbling", bids, window=ms.tumbling("4 hours"), suffix="_bid")
    parts = [whole.map_batches("tumbling_offers", as_offers, output=OFFERS)]
    for gap in GAPS:
        parts.append(bids.query.compute(f"sessions_{gap}", SessionJoin(gap), auctions=auctions, bids=bids))
    return parts[0].union(*parts[1:]).map_batches("offers", lambda offers: offers, output=OFFERS)


def as_offers(pairs: pa.RecordBatch) -> pa.Table:
    """What the tumbling window joins, in the columns of all parts."""
    columns = [pairs["id"], pairs["seller"], pairs["bidder"], pairs["price"], pairs["ts_bid"]]
    return pa.record_batch([pa.repeat("tumbling", len(pairs)), *columns], OFFERS.replace(",", "").split()[::2])


class SessionJoin(ms.Computation):
    """Pairs of an auction and a bid in one session, once it is over. Records a gap or more apart are in two."""

    auctions = ms.Bag("struct<ts: timestamp, seller: long, extra: string>")
    bids = ms.Bag("struct<ts: timestamp, bidder: long, price: long, extra: string>")
    over = ms.Timer(ms.EVENT_TIME)
    output = OFFERS

    def __init__(self, gap: int) -> None:
        self.name, self.gap = f"{gap} minutes", timedelta(minutes=gap)
        self.stored_as = f"sessions with a gap of {self.name}"

    def on_record(self, row: Any, at: ms.At) -> None:
        if at.input == "auctions":
            self.auctions.append({"ts": row.ts, "seller": row.seller, "extra": row.extra})
        else:
            bid = {"ts": row.ts, "bidder": row.bidder, "price": row.price, "extra": row.extra}
            self.bids.append(bid)
        due, end = self.over.get(), row.ts + self.gap
        if due is None or end < due:
            self.over.set(end)

    @over.fires
    def ended(self, at: ms.At) -> Iterable[tuple[Any, ...]]:
        auctions, bids = self.auctions.read(), self.bids.read()
        times = sorted(record["ts"] for record in (*auctions, *bids))
        silences = (place for place in range(1, len(times)) if times[place] - times[place - 1] >= self.gap)
        count = next(silences, len(times))
        last = times[count - 1]
        if last + self.gap > at.time:
            self.over.set(last + self.gap)
            return
        for state, records in ((self.auctions, auctions), (self.bids, bids)):
            state.clear()
            for record in records:
                if record["ts"] > last:
                    state.append(record)
        if count < len(times):
            self.over.set(times[count] + self.gap)
        for auction in auctions:
            for bid in bids:
                if auction["ts"] <= last and bid["ts"] <= last:
                    yield self.name, at.key, auction["seller"], bid["bidder"], bid["price"], bid["ts"]
