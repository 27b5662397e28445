"""Adapting on the simulator: loads are in every commit, what policies decide is sent as commands, results are exact."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.control.running import RunningQuery
from millstream.control.start import _policy
from millstream.engine.adapting import Adapter, busy_of
from millstream.protocol.adaptation import Adaptive, Balance, Decision, Memory
from millstream.protocol.epochs import Commit, Epoch, History, Report
from millstream.protocol.layout import Layout
from millstream.protocol.statistics import Load
from millstream.protocol.survey import Facts
from millstream.store.journal import decode_entry
from millstream.store.keys import KeyColumns
from millstream.testing import Simulated
from words import simulated


def commits(sim: Simulated) -> list[Commit]:
    names = sorted(item.name for item in sim.store.list("journal/"))
    entries = [decode_entry(name, bytes(sim.store.get(name) or b""))[0].body for name in names]
    return [entry for entry in entries if isinstance(entry, Commit)]


def skewed(rng: random.Random, count: int) -> list[tuple[str]]:
    """90 % of the records have one of the few words in the first tenth of the key space."""
    return [(rng.choice(HOT) if rng.random() < 0.9 else rng.choice(ALL),) for _ in range(count)]


def in_first_tenth(words: list[str]) -> list[str]:
    hashes = KeyColumns((pa.array(words),)).hashes()
    return [word for word, point in zip(words, hashes, strict=True) if point < np.uint64((1 << 64) // 10)]


ALL = [f"word {i}" for i in range(4000)]
HOT = in_first_tenth(ALL)


class Told:
    """A policy that is told what to say."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.seen = list(answers), list[Facts]()

    def decide(self, facts: Facts, memory: Memory) -> tuple[Decision, Memory]:
        self.seen.append(facts)
        answer = self.answers.pop(0) if self.answers else Decision("nothing")
        if isinstance(answer, Exception):
            raise answer
        return answer, memory


def test_every_commit_says_what_each_part_of_the_key_space_had_to_do() -> None:
    sim = simulated(bin_bits=6)
    sim.feed(words=[("a",), ("b",), ("a",)])
    sim.feed(words=[])
    [first, second] = commits(sim)
    load = Load.unpack(first.loads["count"])
    assert load.bits == 6
    assert int(load.records.sum()) == 3
    assert sorted(load.records.tolist()) == [1, 2]
    assert int(load.bytes.sum()) == sum(ref.bytes for ref in first.added)
    assert int(load.micros.sum()) > 0
    assert second.loads == {}


def test_a_skewed_load_is_balanced_in_a_few_epochs_and_the_counts_are_exact() -> None:
    rng = random.Random(7)
    policy = Adaptive((Balance(least_busy=0.0),))
    sim = simulated(bin_bits=8, slots=4, workers=("0", "1", "2", "3"), adapt=policy)
    totals: Counter[str] = Counter()
    shares = []
    for _ in range(14):
        fed = skewed(rng, 1500)
        totals.update(word for (word,) in fed)
        table = sim.driver.tables["count"]
        sim.feed(words=fed)
        load = Load.unpack(commits(sim)[-1].loads["count"])
        owners = table.lookup((load.cells.astype(np.uint64)) << np.uint64(64 - load.bits))
        slots = np.bincount(owners.astype(np.int64), load.records, 4)
        shares.append(float(slots.max() / slots.mean()))
    assert sim.driver.adapter is not None
    decided = [each for each in sim.driver.adapter.decided if each.command >= 0]
    assert decided, "nothing was done"
    assert "times its fair share" in decided[0].decision.why
    outcome = sim.outcome(decided[0].command)
    assert outcome is not None
    assert (outcome.verb, outcome.state) == ("balance", "done")
    assert shares[0] > 2
    assert shares[-1] < 1.5
    assert dict(sim.state("count")) == dict(totals)


def test_a_dry_run_only_tells() -> None:
    rng = random.Random(7)
    sim = simulated(bin_bits=8, slots=4, adapt=Adaptive((Balance(least_busy=0.0),)), adapt_dry_run=True)
    before = sim.driver.tables
    for _ in range(5):
        sim.feed(words=skewed(rng, 800))
    assert sim.driver.adapter is not None
    assert any(each.decision.acts for each in sim.driver.adapter.decided)
    assert all(each.command == -1 for each in sim.driver.adapter.decided)
    assert sim.driver.tables == before
    assert sim.driver.journal.history.outcomes == {}


def test_a_policy_that_fails_is_told_of_and_asked_again() -> None:
    policy = Told(ValueError("no idea"), Decision("better now"))
    sim = simulated(adapt=policy)
    sim.feed(words=[("a",)])
    sim.feed(words=[("a",)])
    assert sim.driver.adapter is not None
    assert [each.decision.why for each in sim.driver.adapter.decided] == [
        "the policy failed: ValueError: no idea",
        "better now",
    ]
    assert dict(sim.state("count")) == {"a": 2}
    facts = policy.seen[-1]
    assert facts.epoch == 1
    assert set(facts.workers) == {"0", "1"}
    assert facts.moving == 0


@pytest.mark.parametrize("given", [3, "yes", object()])
def test_what_is_no_policy_is_refused(given: Any) -> None:
    with pytest.raises(ms.UserError, match="adapt="):
        _policy(given)


def test_a_hot_key_gets_a_slot_to_itself_with_as_many_bins_as_there_are_by_default() -> None:
    rng = random.Random(3)
    sim = simulated(slots=4, workers=("0", "1", "2", "3"), adapt=Adaptive((Balance(least_busy=0.0),)))
    share = []
    for _ in range(16):
        fed = ["hot" if rng.random() < 0.5 else rng.choice(ALL) for _ in range(2000)]
        owners = sim.driver.tables["count"].lookup(KeyColumns((pa.array(fed),)).hashes())
        share.append(np.bincount(owners.astype(np.int64), minlength=4).max() / fed.count("hot"))
        sim.feed(words=[(word,) for word in fed])
    assert share[0] > 1.15, "the slot of the hot key had others at first"
    assert share[-1] < 1.05


def test_workers_that_are_asked_for_are_waited_for_and_routing_is_everybodys_work() -> None:
    asked: list[int] = []
    policy = Told(Decision("more", more=2), Decision("nothing"))
    adapter = Adapter(policy, lambda plan: 0, lambda total: asked.append(total) or total - 1)
    layout = Layout("s", {})
    for epoch, cores in ((0, {"a": 1.0}), (1, {"a": 1.0}), (2, {"a": 1.0, "b": 1.0, "c": 1.0})):
        adapter.after_commit(replace(History(), epoch=Epoch(epoch)), layout, {}, {}, cores, backlog=float(epoch))
    assert asked == [3], "in all"
    assert [(facts.asked, facts.backlog) for facts in policy.seen] == [(0, 0.0), (2, 1.0), (0, 2.0)]
    told = Told(Decision("more", more=2))
    adapter = Adapter(told, lambda plan: 0, lambda total: asked.append(total) or total - 1, True)
    adapter.after_commit(History(), layout, {}, {}, {"a": 1.0})
    assert asked == [3], "a dry run asks for nobody"

    reports = [Report(0, {}, timings_ms={"cpu": 300.0, "route": 400.0}), Report(1, {}, timings_ms={"cpu": 100.0})]
    busy = busy_of(reports, {0: "a", 1: "b"}, {"a": 1.0, "b": 1.0}, 1.0)
    assert busy == pytest.approx({"a": 0.5, "b": 0.3})


def test_a_backlog_that_spark_cannot_tell_fails_no_query() -> None:
    offsets = {"startOffset": {"a": 1}, "endOffset": {"a": 3}, "latestOffset": {"a": 9}}
    told = SimpleNamespace(json=json.dumps({"sources": [offsets, {"startOffset": 4, "endOffset": 5}]}))
    for query, expected in (
        (SimpleNamespace(_spark_query=SimpleNamespace(lastProgress=told)), 3.0),
        (SimpleNamespace(_spark_query=SimpleNamespace(lastProgress=None)), 0.0),
        (SimpleNamespace(_spark_query=SimpleNamespace(lastProgress=SimpleNamespace(json="{}"))), 0.0),
        (SimpleNamespace(), 0.0),
    ):
        assert RunningQuery._backlog(cast("Any", query)) == expected
