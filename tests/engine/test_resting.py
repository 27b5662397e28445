"""Upkeep that rewrites values of an older type: a little at a time, and then it rests."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest

import millstream as ms
from millstream.engine.upkeep import REST
from millstream.model.carry import carry
from millstream.testing import Simulated


class Total(ms.Computation):
    total = ms.Value("long", default=0)

    def on_record(self, row: Any, at: Any) -> None:
        self.total.set(self.total.get() + 1)


class Doubles(ms.Computation):
    total = ms.Value("double", default=0.0)

    def on_record(self, row: Any, at: Any) -> None:
        self.total.set(self.total.get() + 1)


def test_one_merge_of_a_round_only_rewrites_and_upkeep_rests_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    query = ms.Query("resting")
    query.source("s", None).key_by("k").compute("count", Total)
    sim = Simulated(query, {"s": "k long"}, slots=4, background=True)
    upkeep, rewritten, rests = sim.driver.upkeep, Counter[Any](), list[float]()
    compact = sim.driver.executor.compact

    def counted(spec: Any, jobs: Any) -> Any:
        rewritten[threading.current_thread()] += sum(job.converts for job, _, _ in jobs)  # each round has a thread
        return compact(spec, jobs)

    monkeypatch.setattr(sim.driver.executor, "compact", counted)
    monkeypatch.setattr(upkeep._ended, "wait", rests.append)
    sim.feed(s=[(k,) for k in range(400)])
    change = sim.modify()
    change.replace("count", Doubles, state={"total": carry("double")})
    number = sim.send(change)
    deadline = time.monotonic() + 60
    while (outcome := sim.outcome(number)) is None or not outcome.over or sim.driver.modifier.converting(
        sim.driver.journal.history
    ):  # fmt: skip
        assert time.monotonic() < deadline, outcome
        sim.feed(s=[(1,)])
        time.sleep(0.005)
    assert outcome.state == "committed", outcome.reason
    sim.driver.close()
    assert rewritten.total() >= 4, "what each slot had, by itself"
    assert max(rewritten.values()) == 1
    assert len(rests) == rewritten.total()
    assert all(rest >= 0 for rest in rests)
    assert REST > 0
    assert dict(sim.state("count"))[1] > 1.0
    assert dict(sim.state("count"))[2] == 1.0
