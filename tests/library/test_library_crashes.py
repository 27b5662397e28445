"""All steps of the library, with crashes at any moment of an epoch: the same productions as without."""

from __future__ import annotations

import random
from typing import Any

from millstream.store.objects import open_store
from millstream.testing import Crash, Simulated
from steps import SCHEMA, Records, build


def productions(rng: random.Random, crashes: random.Random | None) -> tuple[dict[Any, Any], int]:
    """What each sink got in each epoch, and how many crashes there were."""
    query, sinks = build(None)
    store, records, delivered, died = open_store("memory://"), Records(rng), {}, 0

    def observe(moment: str, epoch: int) -> None:
        if crashes is not None and crashes.random() < 0.2:
            raise Crash(moment)

    def started() -> Simulated:
        return Simulated(query, {"s": SCHEMA}, store, observe=observe, slots=2, map_tasks=3)

    sim = started()
    for epoch in range(14):
        given = records.epoch()
        while True:
            try:
                sim.feed(epoch=epoch, s=given)
                break
            except Crash:
                died += 1
                sim = started()
        for sink in sinks:
            delivered[sink, epoch] = sorted(sim.delivered[f"{sink}-out"].get(epoch, []))
    return delivered, died


def test_crashes_change_no_production_of_any_step(seed: int) -> None:
    expected, _ = productions(random.Random(seed), None)
    found, died = productions(random.Random(seed), random.Random(seed + 1))
    assert found == expected
    assert died > 5
    for sink in {sink for sink, _ in expected}:
        assert any(rows for (name, _), rows in expected.items() if name == sink), f"{sink} produced nothing"
