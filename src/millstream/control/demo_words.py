"""What `millstream demo` counts: its query, its text, and the count that the result is compared with.

Rules
-----
- The text is the same on every machine, and so is what each epoch reads of it.
- The comparison does not trust Millstream. The text is counted again in plain Python, and compared with the state and
  with what the sink holds.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.streaming.readwriter import DataStreamReader

import millstream as ms
from millstream.errors import UserError

SEED = 1787
FILES_PER_EPOCH = 2
WORDS_PER_LINE = 10
DISTINCT_WORDS = 30_000
FIRST_WORDS = "the mill stream and water of wheel stone grain flour race pond sluice miller"
"""The most frequent words; all others are made of syllables."""


class WordCount(ms.Computation):
    """How often each word was seen. Every record yields the total so far: 1, 2, 3, ... for each word."""

    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[tuple[str, int]]:
        total = self.total.get() + 1
        self.total.set(total)
        yield at.key, total


def word_count(folder: Path) -> ms.Query:
    """The demo's query: text files in, totals out to Parquet."""

    def words(read: DataStreamReader) -> DataFrame:
        lines = read.option("maxFilesPerTrigger", FILES_PER_EPOCH).text(str(folder / "text"))
        return lines.select(sql.explode(sql.split("value", " ")).alias("word"))

    query = ms.Query("wordcount")
    query.source("words", words).key_by("word").compute("count", WordCount).sink("totals", ms.Parquet(_sink(folder)))
    return query


def _sink(folder: Path) -> str:
    return str(folder / "totals")


# -- its input, and the count to compare with ---------------------------------------------------------------------


def vocabulary(size: int = DISTINCT_WORDS) -> list[str]:
    """Words that can be read aloud, all different, the same on every machine.

    >>> vocabulary(20)[:3], vocabulary(20)[-2:]
    (['the', 'mill', 'stream'], ['bebu', 'beda'])
    """
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = FIRST_WORDS.split()
    number = len(syllables)  # so that every made word has two syllables or more, and none is made twice
    while len(words) < size:
        word, rest = "", number
        while rest:
            rest, place = divmod(rest, len(syllables))
            word = syllables[place] + word
        words.append(word)
        number += 1
    return words


def write_text(folder: Path, epochs: int, words: int) -> None:
    """Text as Zipf would have it, in numbered files, `FILES_PER_EPOCH` for each epoch."""
    folder.mkdir()
    rng, known = random.Random(SEED), vocabulary()
    weights = list(accumulate(1 / (rank + 2) for rank in range(len(known))))
    files = epochs * FILES_PER_EPOCH
    for index in range(files):
        count = words * (index + 1) // files - words * index // files
        chosen = rng.choices(known, cum_weights=weights, k=count)
        lines = [" ".join(chosen[at : at + WORDS_PER_LINE]) for at in range(0, count, WORDS_PER_LINE)]
        path = folder / f"{index:05d}.txt"
        path.write_text("\n".join(lines) + "\n")
        # Spark reads files in the order of their times, and these may all have been written within one tick.
        os.utime(path, (1_500_000_000 + index, 1_500_000_000 + index))


def count_words(folder: Path) -> Counter[str]:
    """The count by the simplest means there are: one loop over the same files."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.iterdir()):
        with path.open() as lines:
            for line in lines:
                counts.update(line.split())
    return counts


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the state and the sink say, against the sequential count."""

    expected: Counter[str]
    state: dict[str, int]
    state_wrong: list[str]
    """Words whose total in the state is wrong."""
    sink: dict[str, int]
    """The last total of every word in the sink."""
    sink_rows: int
    sink_wrong: list[str]
    """Words whose totals in the sink are not 1, 2, ... n, each of them once."""

    @property
    def exact(self) -> bool:
        return not self.state_wrong and not self.sink_wrong


def compare(expected: Counter[str], state: pa.Table, sink: pa.Table) -> Comparison:
    """Compares; both tables have the columns `word` and `total`."""
    totals = dict(zip(state["word"].to_pylist(), state["total"].to_pylist(), strict=True))
    twice = [word for word, times in Counter(state["word"].to_pylist()).items() if times > 1]
    state_wrong = {word for word in expected.keys() | totals.keys() if expected.get(word) != totals.get(word)}
    kinds = ("count", "min", "max", "count_distinct")
    grouped = sink.group_by("word").aggregate([("total", kind) for kind in kinds])
    columns = [grouped[f"total_{kind}"].to_pylist() for kind in kinds]
    seen = dict(zip(grouped["word"].to_pylist(), zip(*columns, strict=True), strict=True))
    # n numbers, all different, the least of them 1 and the greatest n: that is 1..n, each once.
    sink_wrong = [
        word
        for word in expected.keys() | seen.keys()
        if seen.get(word) != (expected[word], 1, expected[word], expected[word])
    ]
    last = {word: facts[2] for word, facts in seen.items()}
    return Comparison(
        expected, totals, sorted(state_wrong.union(twice)), last, sink.num_rows, sorted(sink_wrong, key=str)
    )


def read_sink(folder: Path) -> pa.Table:
    files = sorted(Path(_sink(folder)).glob("epoch-*.parquet"))
    if not files:
        raise UserError(f"the sink {_sink(folder)} is empty")
    return pa.concat_tables([pq.read_table(file) for file in files])
