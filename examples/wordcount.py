"""Counts the words of text files: python examples/wordcount.py INPUT OUTPUT STORE

INPUT is a folder of text files, OUTPUT receives Parquet files, STORE keeps the state. Run it again after adding
files to INPUT: it goes on where it stopped, and counts only what is new.
"""

import sys

from pyspark.sql import functions as sql

import millstream as ms

INPUT, OUTPUT, STORE = sys.argv[1:4]


class WordCount(ms.Computation):
    """How often each word has been seen, ever."""

    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row, at):
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


def words(read):
    """One row per word. `read` is Spark's `readStream`, with limits on what one epoch takes in."""
    lines = read.text(INPUT)
    return lines.select(sql.explode(sql.split("value", r"\s+")).alias("word")).where("word <> ''")


spark = ms.session("wordcount")

query = ms.Query("wordcount")
counts = query.source("words", words).key_by("word").compute("count", WordCount)
counts.sink("totals", ms.Parquet(OUTPUT))

# Without a trigger, the query waits for more files until you press Ctrl-C.
running = query.start(spark, store=STORE, trigger={"availableNow": True})
running.await_termination()
running.state("count").orderBy("total", ascending=False).show(10)
