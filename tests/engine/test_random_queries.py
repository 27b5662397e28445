"""Random queries, records, late data, crashes, restarts and commands, against a sequential oracle (G1, G2, G4-G8).

`MILLSTREAM_SEED` is the first seed, `MILLSTREAM_QUERIES` how many queries are tried. A failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from migrations import STRATEGIES, VERBS, Commander
from millstream.engine.driver import MOMENTS
from millstream.errors import StoreUnavailable
from millstream.store import chunks
from millstream.store.objects import open_store
from millstream.store.segments import CACHE, Segment
from millstream.testing import CRASH, Crash, FaultyStore, Simulated
from random_queries import (
    DAY,
    FAR,
    KINDS,
    ROW,
    Oracle,
    Shape,
    Weather,
    build,
    by_key,
    compare,
    compare_letters,
    micros,
    shape_from,
    sink_name,
    states_of,
)

QUERIES = int(os.environ.get("MILLSTREAM_QUERIES", "200"))


class Life:
    """One random query, from its first epoch to its last."""

    def __init__(self, seed: int, cache_dir: Path | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.shape = shape_from(rng)
        self.store = FaultyStore(open_store("memory://"))
        self.sim = Simulated(
            build(self.shape),
            {source.name: ROW for source in self.shape.sources},
            self.store,
            map_tasks=rng.randint(1, 4),
            now=DAY,
            slots=rng.randint(1, 3),
            bin_bits=rng.randint(2, 7),
            retain=rng.randint(1, 3),
            compaction_budget=1 << 20,
            cache_dir=cache_dir,
        )
        self.oracle, self.weather = Oracle(self.shape, DAY), Weather(rng)
        self.commander = Commander(self.sim, rng)
        self.seen: Counter[str] = Counter()

    def run(self, epochs: int) -> None:
        timed = [source.name for source in self.shape.sources if source.timed]
        for _ in range(epochs):
            self.commander.command()
            chance = self.rng.random()
            if chance < 0.1:
                self.sim.restart(map_tasks=self.rng.randint(1, 4))
                self.oracle.restarted(self.sim.now)
            if chance < 0.75:
                self.sim.now += timedelta(seconds=self.rng.choice((0, 0, 1, 30)))
                self.feed()
            elif chance < 0.9 or not timed:
                self.clock(self.rng.choice((1, 16, 45, 70)))
            else:
                self.watermark(self.rng.choice(timed), self.weather.moment(self.rng.randrange(-20, 20)))
        for source in timed:
            self.watermark(source, FAR + timedelta(days=1))
        self.clock(100)
        for step in self.shape.steps:
            for name in states_of(step):
                found = by_key(step, self.sim.state(step.name, name))
                assert found == self.oracle.state(step.name, name), f"{step.name}.{name}"
        self.commander.end()
        self.seen += self.commander.seen
        self.seen.update(step.kind for step in self.shape.steps)
        self.seen.update(f"late={step.late}" for step in self.shape.steps)
        self.seen[f"depth {self.sim.graph.depth}"] += 1

    def feed(self) -> None:
        records: dict[str, list[Any]] = dict(self.weather.records(self.shape, 9))
        given = {name: list(rows) for name, rows in records.items()}
        crash = self.crash() if given else None
        if crash is not None:
            rows = self.rng.choice(list(given.values()))
            rows.insert(self.rng.randint(0, len(rows)), crash)
        self.compare(records, crash, None, lambda: self.sim.feed(**given))

    def clock(self, seconds: int) -> None:
        crash = self.crash()
        self.sim.now += timedelta(seconds=seconds)
        self.compare({}, crash, None, lambda: self.sim.offer({}, crash=crash))

    def watermark(self, source: str, to: Any) -> None:
        crash = self.crash()
        self.compare({}, crash, {source: micros(to)}, lambda: self.sim.advance_watermark(to, source, crash=crash))

    def crash(self) -> Any:
        if self.rng.random() < 0.65:
            return None
        return self.rng.choice((CRASH, CRASH, *map(CRASH.at, MOMENTS)))

    def fail(self, records: Any, run: Callable[[], None]) -> bool | None:
        """Runs an epoch while the store fails once. Whether it was committed before its driver was replaced; None if it
        was not replaced."""
        number, rng = self.sim.epoch + 1, self.rng
        self.store.fail_at = fails = self.store.operations + rng.randint(1, 30)
        self.store.mode = rng.choice(("refuse", "lose", "crash", "crash_after"))
        try:
            run()
            return None
        except (Crash, StoreUnavailable):
            self.store.fail_at = 0
            self.sim.restart()
            committed = self.sim.epoch == number
            if committed:
                self.sim.offer(records, number)
            else:
                run()
            return committed
        finally:
            self.store.fail_at = 0
            self.seen[f"store: {self.store.mode}"] += self.store.operations >= fails

    def compare(self, records: Any, crash: Any, stated: Any, run: Callable[[], None]) -> None:
        """Runs an epoch here and there, and compares what it led to."""
        committed: bool | None = None
        if crash is None and self.rng.random() < 0.3:
            committed = self.fail(records, run)
        else:
            run()
            if crash is not None:
                committed = crash.moment in ("committed", "delivering", "delivered")
        now = self.sim.now
        if committed is False:
            self.oracle.restarted(now)
        expected = self.oracle.feed(records, now, stated)
        if committed is True:
            self.oracle.restarted(now)
        for stream, rows in expected.items():
            compare(self.shape, stream, self.sim.delivered[sink_name(stream)].get(self.sim.epoch, []), rows)
            self.seen["rows"] += len(rows)
            self.seen["late rows"] += len(rows) if stream.endswith(".late") else 0
        for step in self.shape.steps:
            if step.picky:
                letters = self.sim.delivered[sink_name(f"{step.name}.dead_letter")].get(self.sim.epoch, [])
                compare_letters(self.oracle, step, letters, self.sim.epoch)
                self.seen["dead letters"] += len(letters)
            assert self.sim.late(step.name) == self.oracle.late[step.name], f"late at {step.name}"
            assert self.sim.watermark(step.name) == self.oracle.watermark(step.name), f"watermark of {step.name}"
        for source in self.shape.sources:
            if source.timed:
                assert self.sim.watermark(source.name) == self.oracle.watermark(source.name), source.name
        self.seen[repr(crash)] += 1
        self.commander.check()


def test_any_query_with_any_records_and_crashes_is_that_of_a_sequential_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for number in range(seed, seed + QUERIES):
        life: Life | None = None
        try:
            life = Life(number)
            monkeypatch.setattr("millstream.engine.step.TAKE_UP", life.rng.choice((0, 2)))  # with compactions, or few
            life.run(6)
        except BaseException as error:
            error.add_note(f"MILLSTREAM_SEED={number} MILLSTREAM_QUERIES=1 makes this query again")
            if life is not None:
                error.add_note(f"epoch {life.sim.epoch}, {life.shape.nodes}\n{life.sim.query.explain()}")
            raise
        seen += life.seen
        seen["compactions"] += life.sim.driver.upkeep.compactions
    if QUERIES >= 100:
        wanted = [
            "compactions",
            *(f"store: {mode}" for mode in ("refuse", "lose", "crash", "crash_after")),
            *KINDS,
            "depth 3",
            "dead letters",
            "late=output",
            "late rows",
            "CRASH",
            *(f"{verb} done" for verb in VERBS),
            *("cancelled", "refused", *STRATEGIES),
        ]
        assert [name for name in (*wanted, *(repr(CRASH.at(m)) for m in MOMENTS)) if seen[name] < 5] == []


def test_a_seed_gives_one_query() -> None:
    shapes: list[Shape] = [shape_from(random.Random(17)) for _ in range(2)]
    assert shapes[0] == shapes[1]


def test_workers_with_caches_of_their_own_lead_to_the_same(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """State is fetched where it moved to, in chunks so small that even a segment of a few rows is read in part."""
    monkeypatch.setattr(chunks, "CHUNK", 64)
    monkeypatch.setattr(chunks, "GAP", 0)
    views: Counter[str] = Counter()
    plain = Segment.__init__

    def counted(self: Segment, ref: Any, batch: Any, filtered: bool, *more: Any) -> None:
        views["partial" if batch.num_rows < ref.rows else "whole"] += 1
        plain(self, ref, batch, filtered, *more)

    monkeypatch.setattr(Segment, "__init__", counted)
    before = CACHE.traffic.fetched
    for number in range(seed, seed + max(1, QUERIES // 4)):
        life = Life(number, tmp_path / str(number))
        try:
            life.run(6)
        except BaseException as error:
            error.add_note(f"MILLSTREAM_SEED={number} MILLSTREAM_QUERIES=1 makes this query again")
            raise
    if QUERIES >= 100:
        assert views["partial"] > 50
        assert views["whole"] > 100
        assert CACHE.traffic.fetched > before
