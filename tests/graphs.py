"""Graphs of several levels and a sequential oracle for them, for tests with and without Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import millstream as ms
from millstream.model.query import Query

PAIRS = "k long, v long"
Pairs = list[tuple[int, int]]


class Sum(ms.Computation):
    """Per key the sum of all its values, whatever input they are from; sends (k % m, sum), and odd sums apart.

    One production per key and epoch, so the result does not depend on the order between keys.
    """

    total = ms.Value("long", default=0)
    output = PAIRS
    outputs: ClassVar = {"odd": PAIRS}

    def __init__(self, modulus: int) -> None:
        self.modulus = modulus

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        totals = self.total.read(batch)
        for part in batch.inputs.values():
            totals = totals + part.sum("v")
        self.total.write(batch, totals)
        keys = batch.keys.to_numpy()
        yield batch.output(keys % self.modulus, totals)
        odd = totals % 2 == 1
        yield batch.output_to("odd", keys[odd], totals[odd])


class Last(ms.Computation):
    """Remembers the last record of each input, one record at a time."""

    left = ms.Value("long", default=-1)
    right = ms.Value("long", default=-1)
    output = "k long, left long, right long"
    outputs: ClassVar = {"rights": "k long"}

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        (self.left if at.input == "left" else self.right).set(row.v)
        yield at.key, self.left.get(), self.right.get()
        if at.input == "right":
            yield ms.to("rights", at.key)


Shape = list[tuple[list[int], int, bool]]
"""For each step: which of the streams before it are read, its modulus, and whether they are united or named inputs."""


def build(shape: Shape, origins: Sequence[Any] = (None, None), kind: Callable[[int], Sum] = Sum) -> Query:
    """A query of that shape over two sources, with a sink for every output."""
    query = ms.Query("shape")
    streams = [query.source(f"s{number}", origin) for number, origin in enumerate(origins)]
    for number, (reads, modulus, united) in enumerate(shape):
        inputs = [streams[index % len(streams)] for index in dict.fromkeys(i % len(streams) for i in reads)]
        if united:
            step = inputs[0].union(*inputs[1:]).key_by("k").compute(f"step{number}", kind(modulus))
        else:
            named = {f"in{i}": stream.key_by("k") for i, stream in enumerate(inputs)}
            step = query.compute(f"step{number}", kind(modulus), **named)
        streams += [step, step.output("odd")]
        step.sink(f"out{number}", ms.Memory())
        step.output("odd").sink(f"odd{number}", ms.Memory())
    return query


class Oracle:
    """The same graph in dictionaries."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.moduli = {name: step.computation.modulus for name, step in query.steps.items()}  # type: ignore[attr-defined]
        self.totals: dict[str, Counter[int]] = {name: Counter() for name in query.steps}

    def feed(self, records: Mapping[str, Pairs]) -> dict[str, Counter[tuple[int, int]]]:
        streams = dict(records)
        for name, step in self.query.steps.items():
            seen: Counter[int] = Counter()
            touched: set[int] = set()
            for each in step.inputs:
                for key, value in streams[each.stream]:
                    seen[key] += value
                    touched.add(key)
            for key in touched:
                self.totals[name][key] += seen[key]
            streams[name] = [(key % self.moduli[name], self.totals[name][key]) for key in touched]
            streams[f"{name}.odd"] = [(k, self.totals[name][k]) for k in touched if self.totals[name][k] % 2 == 1]
        return {name: Counter(pairs) for name, pairs in streams.items()}
