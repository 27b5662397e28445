"""What user code holds and what is kept are never the same object, and look the same before and after an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

import millstream as ms
from millstream.testing import Simulated


class Pair(NamedTuple):
    x: int
    at: list[int]


@dataclass
class Place:
    x: int
    at: list[int]


POINT = "struct<x: long, at: array<long>>"
GIVEN = {
    "tuple": lambda: (1, [2]),
    "named tuple": lambda: Pair(1, [2]),
    "dict": lambda: {"at": (2,), "x": 1},
    "dataclass": lambda: Place(1, [2]),
}


class Keeper(ms.Computation):
    """Says what it finds, of each kind of state, when it has set something and when it has not."""

    one = ms.Value(POINT)
    many = ms.Map("long", POINT)
    bag = ms.Bag(POINT)
    output = "key long, found string"

    def __init__(self, given: str) -> None:
        self.given = given

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        if row.set:
            value = GIVEN[self.given]()
            self.one.set(value)
            self.many.set(0, value)
            self.bag.append(value)
            if isinstance(value, dict):
                value["x"] = 99
        found = [self.one.get(), self.many.get(0), *self.bag.read()]
        yield at.key, repr(found)
        found[0]["at"].append(77)
        found[1]["x"] = 77


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("cuts", ["together", "apart"])
def test_what_is_set_is_read_in_one_shape_within_the_epoch_and_after_it(given: str, cuts: str) -> None:
    query = ms.Query("keeper")
    query.source("rows", None).key_by("key").compute("keep", Keeper(given)).sink("out", ms.Memory())
    sim = Simulated(query, {"rows": "key long, set boolean"})
    rows = [(1, True), (1, False), (1, False)]
    for epoch in [rows] if cuts == "together" else [[row] for row in rows]:
        sim.feed(rows=epoch)
    expected = repr([{"x": 1, "at": [2]}] * 3)
    assert [found for _, found in sim.outputs("out")] == [expected] * 3
