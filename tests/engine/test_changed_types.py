"""Steps whose states have changed their types: they see, write and fire what was stored before in the new types."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import timedelta
from typing import Any

import pytest

import millstream as ms
from millstream.errors import StepError
from millstream.model.carry import Rule, carry, convert
from millstream.protocol.manifest import Family
from millstream.testing import Simulated

SCHEMA = {"s": "k long, x long"}


class Before(ms.Computation):
    total = ms.Value("int", default=0)
    last = ms.Value(object)
    per = ms.Map("long", "int")
    seen = ms.Bag("int")
    again = ms.Timer(ms.WALL_TIME, payload="int")
    output = "k long, x long, total double"

    def on_record(self, row: Any, at: Any) -> Any:
        if row.x is None:
            self.total.delete()
            self.last.delete()
            self.per.clear()
            self.seen.clear()
            self.again.delete()
            return
        self.total.set(self.total.get() + row.x)
        self.last.set((row.x,))
        self.per.set(row.x % 3, row.x)
        self.seen.append(row.x)
        self.again.set(timedelta(hours=1), payload=row.x)
        yield at.key, row.x, float(self.total.get())

    @again.fires
    def once_more(self, at: Any) -> Any:
        yield at.key, at.payload, -1.0


class After(ms.Computation):
    total = ms.Value("double", default=0.0)
    last = ms.Value(object)
    per = ms.Map("long", "long")
    seen = ms.Bag("string")
    again = ms.Timer(ms.WALL_TIME, payload="string")
    output = "k long, x long, total double"

    def on_record(self, row: Any, at: Any) -> Any:
        if row.x is None:
            self.total.delete()
            self.last.delete()
            self.per.clear()
            self.seen.clear()
            self.again.delete()
            return
        self.total.set(self.total.get() + row.x)
        self.last.set({"x": row.x})
        self.per.set(row.x % 3, row.x)
        self.seen.append(f"n{row.x}")
        self.again.set(timedelta(hours=1), payload=f"n{row.x}")
        yield at.key, row.x, self.total.get()

    @again.fires
    def once_more(self, at: Any) -> Any:
        assert at.payload.startswith("n")
        yield at.key, int(at.payload[1:]), -1.0


def with_n(x: int) -> str:
    return f"n{x}"


def named(last: tuple[int]) -> dict[str, int]:
    assert isinstance(last, tuple), "it has been converted twice"
    return {"x": last[0]}


def scaled(total: int) -> float:
    return total * 10 + 0.5


RULES: dict[str, Rule] = {
    "total": convert(scaled),
    "last": convert(named),
    "per": carry(),
    "seen": convert(with_n),
    "again": convert(with_n),
}


def query_of(computation: type, **given: Any) -> ms.Query:
    query = ms.Query("q")
    query.source("s", None).key_by("k").compute("step", computation, **given).sink("out", ms.Memory())
    return query


def changed(sim: Simulated, computation: type, rules: dict[str, Rule]) -> None:
    """Replaces the step."""
    change = sim.modify()
    change.replace("step", computation, state=rules)
    number = sim.send(change)
    sim.feed()
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "committed", outcome.reason


def state_of(sim: Simulated, name: str, epoch: int | None = None) -> list[tuple[Any, ...]]:
    return sorted(sim.state("step", name, epoch), key=lambda row: row[:-1] if name == "last" else row)


def left_of(sim: Simulated) -> int:
    manifest = sim.driver.journal.history.manifest
    return sum(manifest.bytes_below(Family("step", name), 1) for name in RULES)


class Model:
    """What `Before` and then `After` should make of records."""

    def __init__(self) -> None:
        self.total: dict[int, float] = {}
        self.last: dict[int, int] = {}
        self.per: dict[int, dict[int, int]] = defaultdict(dict)
        self.seen: dict[int, list[int]] = defaultdict(list)

    def apply(self, rows: list[tuple[int, int | None]]) -> list[tuple[int, int, float]]:
        made = []
        for k, x in rows:
            if x is None:
                for each in (self.total, self.last, self.per, self.seen):
                    each.pop(k, None)  # type: ignore[attr-defined]
            else:
                self.total[k] = self.total.get(k, 0) + x
                self.last[k], self.per[k][x % 3] = x, x
                self.seen[k].append(x)
                made.append((k, x, float(self.total[k])))
        return made


def records(rng: random.Random, keys: int, count: int) -> list[tuple[int, int | None]]:
    return [(rng.randrange(keys), None if rng.random() < 0.1 else rng.randrange(100)) for _ in range(count)]


@pytest.mark.parametrize("budget", [3000, 1 << 20])
def test_a_step_goes_on_with_other_types_as_if_all_had_been_converted(
    budget: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state(name: str) -> list[tuple[Any, ...]]:
        return state_of(sim, name)

    sim, model = Simulated(query_of(Before), SCHEMA, compaction_budget=budget, slots=2), Model()
    for size in (200, 60, 3, 20, 4):
        rows = records(rng, 60, size)
        sim.feed(s=rows)
        model.apply(rows)
    with monkeypatch.context() as patch:
        patch.setattr(sim.driver.upkeep, "_round", lambda journal: None)
        changed(sim, After, RULES)
    model.total = {k: scaled(int(total)) for k, total in model.total.items()}
    assert left_of(sim) > 0, "nothing was rewritten for it"
    for round_ in range(60):
        if round_ < 12:
            rows = records(rng, 70, rng.choice([1, 5, 40]))
            before = len(sim.outputs("out"))
            sim.feed(s=rows)
            assert sorted(sim.outputs("out")[before:]) == sorted(model.apply(rows))
        else:
            sim.feed()
        assert state("total") == sorted(model.total.items())
        assert state("last") == sorted(((k, {"x": x}) for k, x in model.last.items()), key=lambda row: row[0])
        assert state("per") == sorted((k, m, x) for k, per in model.per.items() for m, x in per.items())
        found: dict[int, list[str]] = defaultdict(list)
        for k, _, values in state("seen"):
            found[k] += values
        assert found == {k: [f"n{x}" for x in seen] for k, seen in model.seen.items()}
        if round_ >= 12 and not left_of(sim):
            break
    assert not left_of(sim), "an idle query goes on converting to the end"
    compact, jobs = sim.driver.executor.compact, []

    def noted(spec: Any, asked: Any) -> Any:
        jobs.extend(job for job, _, _ in asked)
        return compact(spec, asked)

    monkeypatch.setattr(sim.driver.executor, "compact", noted)
    for _ in range(12):
        rows = records(rng, 70, 20)
        sim.feed(s=rows)
        model.apply(rows)
    assert jobs
    assert not any(job.forms for job in jobs), "agents can merge what is of one form, and do it again elsewhere"
    assert state("total") == sorted(model.total.items())
    assert sim.driver.upkeep.trouble is None
    before = len(sim.outputs("out"))
    sim.advance_clock("2 hours")
    assert sorted(sim.outputs("out")[before:]) == sorted((k, x, -1.0) for k, x in model.last.items())


class Sum(ms.Computation):
    total = ms.Value("long", default=0)
    output = "k long, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        if row.x is not None:
            self.total.set(self.total.get() + row.x)
            yield at.key, self.total.get()


class Swallowing(ms.Computation):
    total = ms.Value("long", default=0)
    output = "k long, total long"

    def on_batch(self, batch: Any) -> Any:
        try:
            self.total.read(batch)
        except Exception:
            return


class Waking(ms.Computation):
    later = ms.Timer(ms.WALL_TIME, payload="long")
    output = "k long, x long"

    def on_record(self, row: Any, at: Any) -> None:
        self.later.set(timedelta(hours=1), payload=row.x)

    @later.fires
    def now(self, at: Any) -> Any:
        yield at.key, at.payload


def no_sevens(n: int) -> int:
    if n == 7:
        raise ValueError("no sevens")
    return n + 1


@pytest.mark.parametrize("given", [{}, {"on_error": "dead_letter"}], ids=["stopping", "with dead letters"])
@pytest.mark.parametrize("computation", [Sum, Swallowing])
def test_a_stored_value_that_cannot_be_converted_stops_the_step_once_it_is_read(
    computation: type, given: dict[str, Any]
) -> None:
    sim = Simulated(query_of(Sum, **given), SCHEMA, slots=1)
    sim.feed(s=[(k, 7 if k == 3 else 10 * k) for k in range(10)])
    changed(sim, computation, {"total": convert(no_sevens)})
    sim.feed(s=[(k, 1) for k in range(10) if k != 3])  # so many that the older segment would be taken up
    sim.feed(s=[(1, 1)])
    if computation is Sum:
        assert sim.outputs("out")[-1] == (1, 13)
    before = sim.epoch
    for _ in range(2):
        with pytest.raises(StepError, match="no sevens") as caught:
            sim.feed(s=[(3, 1)])
        assert caught.value.step == "step"
        assert "the value 7 could not be taken from BIGINT to BIGINT" in str(caught.value)
        assert "ValueError: no sevens" in str(sim.driver.upkeep.trouble)
    assert sim.epoch == before
    sim.feed(s=[(2, None)])


def test_a_payload_that_cannot_be_converted_stops_the_step_when_its_timer_is_due() -> None:
    sim = Simulated(query_of(Waking), SCHEMA, slots=1)
    sim.feed(s=[(1, 7)])
    sim.advance_clock("30 minutes")
    sim.feed(s=[(2, 8)])
    changed(sim, Waking, {"later": convert(no_sevens)})
    sim.feed(s=[(3, 9)])
    with pytest.raises(StepError, match="no sevens"):
        sim.advance_clock("31 minutes")


def test_an_older_epoch_is_shown_in_the_types_of_now() -> None:
    sim = Simulated(query_of(Sum), SCHEMA, slots=1, retain=5)
    sim.feed(s=[(1, 10)])
    sim.feed(s=[(1, 10), (2, 5)])
    changed(sim, Sum, {"total": convert(no_sevens)})
    assert state_of(sim, "total") == [(1, 21), (2, 6)]
    sim.feed(s=[(1, 10)])
    assert state_of(sim, "total") == [(1, 31), (2, 6)]
    found = [state_of(sim, "total", epoch) for epoch in range(4)]
    assert found == [[(1, 11)], [(1, 21), (2, 6)], [(1, 21), (2, 6)], [(1, 31), (2, 6)]]
