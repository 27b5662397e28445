"""NEXMark's queries as a Spark user writes them for a batch: what the streaming queries must give in all.

Rules
-----
- Each is a function of frames, one for each kind of events, and shares nothing with `queries` but numbers that define
  the query. So it tests them.
- What a query needs besides its own function is in this file: `lines` counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as sql

Frames = Callable[[str], DataFrame]
"""The frame of a kind of events."""


def q1(read: Frames) -> DataFrame:
    return read("bids").selectExpr("auction", "bidder", "price * 908 div 1000 AS price", "ts")


def q2(read: Frames) -> DataFrame:
    return read("bids").where("auction % 123 = 0").select("auction", "price")


def q3(read: Frames) -> DataFrame:
    people = read("people").where("state IN ('OR', 'ID', 'CA')")
    auctions = read("auctions").where("category = 10").selectExpr("id AS id_auction", "seller")
    joined = people.join(auctions, people.id == auctions.seller)
    return joined.select("name", "city", "state", "id_auction")


def q4(read: Frames) -> DataFrame:
    so_far = Window.partitionBy("category").orderBy("expires", "auction").rowsBetween(Window.unboundedPreceding, 0)
    return closed(read).select("category", "auction", sql.avg("price").over(so_far).alias("average"))


def closed(read: Frames) -> DataFrame:
    auctions = read("auctions").selectExpr("id AS auction", "seller", "category", "ts AS opens", "expires")
    bids = read("bids").join(auctions, "auction").where("ts >= opens AND ts < expires")
    return bids.groupBy("auction", "seller", "category", "expires").agg(sql.max("price").alias("price"))


def q5(read: Frames) -> DataFrame:
    return hottest(read, "60 minutes", "1 minute")


def hottest(read: Frames, size: str, every: str) -> DataFrame:
    counts = read("bids").groupBy(sql.window("ts", size, every).alias("w"), "auction").count()
    most = sql.max("count").over(Window.partitionBy("w"))
    hot = counts.withColumn("most", most).where("count = most")
    return hot.selectExpr("w.start AS window_start", "w.end AS window_end", "auction", "count")


def q6(read: Frames) -> DataFrame:
    last_ten = Window.partitionBy("seller").orderBy("expires", "auction").rowsBetween(-9, 0)
    return closed(read).select("seller", "auction", sql.avg("price").over(last_ten).alias("average"))


def q7(read: Frames) -> DataFrame:
    bids = read("bids").withColumn("w", sql.window("ts", "1 minute"))
    highest = bids.withColumn("most", sql.max("price").over(Window.partitionBy("w"))).where("price = most")
    return highest.selectExpr("w.start AS window_start", "w.end AS window_end", "auction", "bidder", "price").distinct()


def q8(read: Frames) -> DataFrame:
    window = sql.window("ts", "12 hours").alias("w")
    people = read("people").select("id", "name", window)
    auctions = read("auctions").select(sql.col("seller").alias("id"), sql.col("id").alias("id_auction"), window)
    return people.join(auctions, ["id", "w"]).select("id", "name", "id_auction")


def nbq5(read: Frames) -> DataFrame:
    return hottest(read, "60 seconds", "10 seconds")


def nbq8(read: Frames) -> DataFrame:
    return q8(read)


def nbqx(read: Frames) -> DataFrame:
    parts = [sessions(read, minutes) for minutes in (30, 60, 90, 120)]
    window = sql.window("ts", "4 hours").alias("w")
    auctions = read("auctions").select(sql.col("id").alias("auction"), "seller", window)
    bids = read("bids").select("*", window).join(auctions, ["auction", "w"])
    whole = bids.selectExpr("'tumbling' AS part", "auction", "seller", "bidder", "price", "ts")
    return reduce(DataFrame.unionByName, [whole, *parts])


def sessions(read: Frames, minutes: int) -> DataFrame:
    auctions = read("auctions").selectExpr("id AS auction", "seller", "ts", "null AS bidder", "null AS price")
    bids = read("bids").selectExpr("auction", "null AS seller", "ts", "bidder", "price")
    by_time = Window.partitionBy("auction").orderBy("ts")
    both = auctions.unionByName(bids).withColumn("silence", sql.col("ts") - sql.lag("ts").over(by_time))
    begins = f"cast(silence >= INTERVAL {minutes} MINUTES AS int)"
    numbered = both.withColumn("session", sql.sum(sql.coalesce(sql.expr(begins), sql.lit(0))).over(by_time))
    sellers = numbered.where("seller IS NOT NULL").select("auction", "session", "seller")
    offers = numbered.where("bidder IS NOT NULL").drop("seller").join(sellers, ["auction", "session"])
    return offers.selectExpr(f"'{minutes} minutes' AS part", "auction", "seller", "bidder", "price", "ts")
