"""Every stateful query of NEXMark while random migrations, cancels, crashes and store faults go on (G1, G2, G4-G6, G8).

A schedule is one run: where epochs are cut, what is commanded before each, where it dies. `MILLSTREAM_SEED` is the seed
of the first schedule, `MILLSTREAM_SCHEDULES` how many each query is given. A failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from migrations import STRATEGIES, Commander, random_strategy
from millstream.engine.driver import MOMENTS
from millstream.errors import StoreUnavailable
from millstream.nexmark import QUERIES, NexmarkQuery, Parameters, epochs
from millstream.protocol.planner import plan_rescale
from millstream.store.objects import open_store
from millstream.testing import CRASH, Crash, FaultyStore, Simulated

SCHEDULES = int(os.environ.get("MILLSTREAM_SCHEDULES", "10"))
SPANS = {"q5": 3 * 3600, "q8": 72 * 3600, "nbq5": 200, "nbq8": 72 * 3600, "nbqx": 72 * 3600}
EVENTS = {query.name: 300 if "bids" in query.reads else 1000 for query in QUERIES.values()} | {"nbqx": 200}
STATEFUL = [query for query in QUERIES.values() if query.is_stateful]


@cache
def reference(name: str) -> tuple[Parameters, Counter[Any]]:
    """The events of a query, and what it must give for them."""
    span = SPANS.get(name, 600)
    disorder = {"group": 30, "delayed": 10, "delay_us": span * 20_000}
    count = EVENTS[name]
    given = Parameters(events=count, events_per_second=count, dilation=span, seed=3, **disorder)
    expected = Counter(QUERIES[name].expected(given))
    assert expected, "nothing would be shown"
    return given, expected


class Schedule:
    """One run of a query."""

    def __init__(self, query: NexmarkQuery, seed: int, caches: Path) -> None:
        self.query, self.rng = query, random.Random(f"{seed} {query.name}")
        self.store = FaultyStore(open_store("memory://"))
        options = {"slots": self.rng.randint(1, 3), "bin_bits": self.rng.randint(3, 5), "compaction_budget": 1 << 20}
        if seed % 8 == 0:  # workers with caches of their own, so that what moves is fetched
            options["cache_dir"] = caches / str(seed)
            options["replicas"] = 1
        self.sim = Simulated(query.build(), query.schemas, self.store, **options)
        self.commander = Commander(self.sim, self.rng)
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        given, expected = reference(self.query.name)
        cuts = sorted(self.rng.sample(range(1, given.events), self.rng.randint(3, 6)))
        for number, records in enumerate(epochs(given, self.query.reads, cuts)):
            if number == 1:  # so that in every schedule something moves
                slots = self.rng.choice([count for count in range(1, 6) if count != len(self.sim.layout.owners)])
                self.commander.send(plan_rescale(self.sim.layout, slots, strategy=random_strategy(self.rng)))
            else:
                self.commander.command()
            self.feed(number, records)
            self.commander.check()
            last = self.sim.driver.last
            self.seen["epochs that fetched"] += last is not None and last.fetched_bytes > 0
        self.commander.end()
        assert self.commander.seen["mid-stream rounds"] > 0, "nothing has moved"
        assert Counter(self.sim.outputs("out")) == expected
        return self.seen + self.commander.seen

    def is_moving(self) -> bool:
        """Whether some rounds of a migration are done, and some are not."""
        outcomes = self.sim.driver.journal.history.outcomes.values()
        return any(each.state == "running" and 0 < each.done < each.rounds for each in outcomes)

    def feed(self, number: int, records: dict[str, list[Any]]) -> None:
        """An epoch; in some the process dies, or the store fails once."""
        chance = self.rng.random()
        if chance < 0.15 and records:
            moment = self.rng.choice((None, *MOMENTS))
            rows = self.rng.choice(list(records.values()))
            rows.insert(self.rng.randint(0, len(rows)), CRASH if moment is None else CRASH.at(moment))
            self.seen["deaths in the middle of a migration"] += self.is_moving()
            self.sim.feed(number, **records)
            self.seen["crashes"] += 1
        elif chance < 0.35:
            self.store.fail_at = self.store.operations + self.rng.randint(1, 30)
            self.store.mode = self.rng.choice(("refuse", "lose", "crash", "crash_after"))
            try:
                self.sim.feed(number, **records)
            except (Crash, StoreUnavailable):
                self.store.fail_at = 0
                self.sim.restart()
                self.sim.feed(number, **records)
                self.seen["store faults"] += 1
            self.store.fail_at = 0
        else:
            self.sim.feed(number, **records)


@pytest.mark.parametrize("query", STATEFUL, ids=lambda query: query.name)
def test_results_are_those_of_plain_python_whatever_moves_and_dies(
    query: NexmarkQuery, seed: int, tmp_path: Path
) -> None:
    seen: Counter[str] = Counter()
    count = SCHEDULES if query.name != "nbqx" else SCHEDULES // 4  # which does so much more
    for number in range(seed, seed + count):
        try:
            seen += Schedule(query, number, tmp_path).run()
        except BaseException as error:
            error.add_note(f"MILLSTREAM_SEED={number} MILLSTREAM_SCHEDULES=1 makes this schedule again")
            raise
    print(query.name, dict(seen))
    if count >= 50:
        wanted = ["done", "cancelled", "refused", "crashes", "store faults", "epochs that fetched", *STRATEGIES]
        wanted.append("deaths in the middle of a migration")
        assert [name for name in wanted if seen[name] < 3] == []
