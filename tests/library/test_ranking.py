"""top_n against plain Python."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from oracle import rows

import millstream as ms
from millstream.library.ranking import Best
from millstream.testing import Simulated


def build(n: int, **options: Any) -> ms.Query:
    query = ms.Query("best")
    query.source("s", None).key_by("k").top_n("best", n, **options).sink("out", ms.Memory())
    return query


def place(score: Any, descending: bool) -> Any:
    if score is None:
        return (2, 0)
    if isinstance(score, str):
        return (0, tuple(-ord(c) for c in score) if descending else score)
    if math.isnan(score):
        return (-1, 0) if descending else (1, 0)
    return (0, -score if descending else score)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("kind", ["long", "double", "string"])
def test_the_best_records_of_a_key_are_those_of_plain_python(kind: str, descending: bool, rng: random.Random) -> None:
    scores: dict[str, list[Any]] = {
        "long": [None, *range(8)],
        "double": [None, math.nan, -math.inf, math.inf, 0.5, -1.5, 2.0],
        "string": [None, "a", "b", "c", "d"],
    }
    sim = Simulated(build(3, by="score", descending=descending), {"s": f"k string, score {kind}, id long"}, slots=3)
    seen: dict[Any, list[Any]] = defaultdict(list)
    number = 0
    for _ in range(12):
        records = []
        for _ in range(rng.choice([0, 1, 12])):
            number += 1
            records.append((rng.choice(["a", "b", None]), rng.choice(scores[kind]), number))
        before = {key: best[:3] for key, best in seen.items()}
        for key, score, id_ in records:
            seen[key].append((score, id_))
        for best in seen.values():
            best.sort(key=lambda record: (place(record[0], descending), record[1]))
        changed = [key for key, best in seen.items() if best[:3] != before.get(key)]
        expected = [(key, rank + 1, *record) for key in changed for rank, record in enumerate(seen[key][:3])]
        sim.feed(s=records)
        assert rows(sim.delivered["out"].get(sim.epoch, [])) == rows(expected)
    assert number > 5


def test_a_task_sends_at_most_n_records_of_a_key() -> None:
    records = pa.record_batch({"k": np.arange(10_000) % 7, "score": np.arange(10_000)})
    sent, _ = Best(("k",), 5, "score", True).bind(records.schema, False).apply(records, None)
    assert sorted(sent.column("score").to_pylist()) == list(range(9965, 10_000))


@pytest.mark.parametrize(
    ("n", "by", "message"),
    [
        (0, "score", "at least 1"),
        (3, "k", "is the key itself"),
        (3, "height", "no column 'height' to rank by; the input has k, score, xs"),
        (3, "xs", "has no order"),
    ],
)
def test_rankings_that_cannot_be_are_refused(n: int, by: str, message: str) -> None:
    with pytest.raises(ms.UserError, match=message):
        Simulated(build(n, by=by), {"s": "k string, score long, xs array<long>"})
