"""The facts of an epoch say how much state its workers had to fetch: what has moved, once, and nothing else."""

from __future__ import annotations

from pathlib import Path

import millstream as ms
from millstream.protocol.planner import plan_move
from millstream.store.objects import open_store
from millstream.testing import Simulated


class Count(ms.Computation):
    total = ms.Value("long", default=0)

    def on_batch(self, batch: ms.Batch) -> None:
        self.total.write(batch, self.total.read(batch) + batch.count())


def fetched(sim: Simulated) -> int:
    assert sim.driver.last is not None
    return sim.driver.last.fetched_bytes


def test_an_epoch_fetches_what_has_moved_and_nothing_else(tmp_path: Path) -> None:
    query = ms.Query("counts")
    query.source("records", None).key_by("k").compute("count", Count)
    records = [(number,) for number in range(5000)]
    store = open_store(str(tmp_path / "store"))
    sim = Simulated(query, {"records": "k long"}, store, slots=2, cache_dir=tmp_path / "caches")
    sim.feed(records=records)
    sim.feed(records=records)
    assert fetched(sim) == 0, "slots have what they wrote"
    sim.apply(plan_move(sim.layout, slots=0, share=0.5, to=1, strategy=ms.AllAtOnce()))
    moved = []
    for _ in range(4):
        sim.feed(records=records)
        moved.append(fetched(sim))
    assert [size > 0 for size in moved] == [True, False, False, False]
    assert moved[0] > 5000 // 5 * 16, "about a quarter of the keys, at least a hash and a value of each"
    assert dict(sim.state("count")) == dict.fromkeys(range(5000), sim.epoch + 1)
