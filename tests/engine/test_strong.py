"""Strong and weak productions: a task that is run again sends the same bytes, or is caught by its receipts (G1, G2)."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import pytest

import millstream as ms
from millstream.engine import strong
from millstream.engine.route import route
from millstream.engine.spec import EpochTask, SlotTask
from millstream.engine.strong import host_once
from millstream.errors import StepError, StoreUnavailable, UserError
from millstream.model.query import Query
from millstream.protocol.epochs import Report
from millstream.store import names
from millstream.store.objects import Data, open_store
from millstream.testing import FaultyStore, Simulated
from millstream.testing.simulated import InProcess, to_batch

ROWS = {"rows": "k long"}
CALLS: list[str] = []


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    CALLS.clear()


class Noise(ms.Computation):
    """Gives every record something random, and remembers what it gave last."""

    last = ms.Value("string")
    output = "k long, noise string"

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        CALLS.append("noise")
        noise = [uuid.uuid4().hex for _ in range(len(batch))]
        self.last.write(batch, noise)
        yield batch.output(batch.keys, noise)


class Keep(ms.Computation):
    """Keeps what it is given."""

    kept = ms.Value("string")
    output = "k long, noise string"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        CALLS.append("keep")
        self.kept.set(row.noise)
        yield row.k, row.noise


def noisy(productions: str, keep: str = "weak") -> Query:
    query = ms.Query("noisy")
    made = query.source("rows", None).key_by("k").compute("noise", Noise, productions=productions)
    made.key_by("noise").compute("keep", Keep, productions=keep).sink("out", ms.Memory())
    return query


class Twice(InProcess):
    """Runs the tasks of a level a second time once all of the next level's even slots have consumed the first output;
    the odd ones consume the second. As Spark does when a worker dies in between."""

    level, until = 1, 1
    """Which level; and for how many attempts of an epoch."""

    def execute(
        self, spec: Any, task: EpochTask, slots: Sequence[SlotTask], records: Any, limit_s: float | None = None
    ) -> tuple[list[Report], int]:
        self.spec = spec
        batch = to_batch(records["rows"], self.spec.graph.sources[0].schema)
        sent: list[list[Any]] = [list(route(self.spec, task, [("rows", batch)], 0, self.store))]
        versions = [sent, sent]
        for level in range(1, task.depth + 1):
            versions = [
                [self._hosted(task, level, mine, versions[mine.slot % 2]) for mine in slots],
                [self._hosted(task, level, mine, versions[mine.slot % 2]) for mine in slots]
                if level == self.level and task.maker.number < self.until
                else [],
            ]
            versions[1] = versions[1] or versions[0]
            if level < task.depth:
                versions = [[list(one.payloads(task, self.store)) for one in each] for each in versions]
        return [report for one in versions[1] for report in one.reports], 1

    def _hosted(self, task: EpochTask, level: int, mine: SlotTask, sent: list[list[Any]]) -> Any:
        payloads = [each[mine.slot] for each in sent]
        return host_once(self.spec, task, level, mine, payloads, self.store)


def twice(query: Query, level: int = 1, until: int = 1, store: Any = None) -> Simulated:
    sim = Simulated(query, ROWS, store, slots=2)
    executor = sim.driver.executor
    assert isinstance(executor, InProcess)
    sim.driver.executor = again = Twice(executor.store, 1)
    again.level, again.until = level, until
    return sim


def attempts(sim: Simulated) -> int:
    assert sim.driver.last is not None
    return sim.driver.last.attempts


def same_everywhere(sim: Simulated, keys: int) -> None:
    """What the first step remembers, what the second was given, and what was delivered are one and the same."""
    given = dict(sim.state("noise"))
    assert len(given) == keys
    assert dict(sim.outputs("out")) == given
    assert {noise: noise for noise in given.values()} == dict(sim.state("keep"))


def test_strong_sends_the_same_bytes_again_and_needs_one_attempt() -> None:
    sim = twice(noisy("strong"))
    sim.feed(rows=[(k,) for k in range(40)])
    assert attempts(sim) == 1
    assert CALLS.count("noise") == 2, "one call for each slot, though the task of each was run twice"
    same_everywhere(sim, 40)


def test_weak_is_made_again_and_the_receipts_catch_that_it_differs() -> None:
    sim = twice(noisy("weak"))
    sim.feed(rows=[(k,) for k in range(40)])
    assert attempts(sim) == 2
    assert CALLS.count("noise") == 2 * 2 + 2
    same_everywhere(sim, 40)
    sim = twice(noisy("weak"), until=4)
    with pytest.raises(UserError, match=r"failed 4 times(?s:.*)receipts differ: .* of producer 1\.0"):
        sim.feed(rows=[(k,) for k in range(40)])


def test_a_task_of_the_last_level_is_not_run_again_either() -> None:
    sim = twice(noisy("weak", keep="strong"), level=2)
    sim.feed(rows=[(k,) for k in range(40)])
    assert attempts(sim) == 1
    assert CALLS.count("keep") == 40
    same_everywhere(sim, 40)


def test_of_two_runs_side_by_side_the_first_to_store_wins() -> None:
    """Neither finds the object before it runs: both run user code, and both send what one of them made."""

    class Blind(FaultyStore):
        asked: ClassVar = Counter[str]()

        def get(self, name: str) -> memoryview | None:
            self.asked[name] += 1
            if name.startswith(names.STRONG) and self.asked[name] <= 2:  # the third time it is asked by who lost
                return None
            return super().get(name)

    sim = twice(noisy("strong"))
    assert isinstance(sim.driver.executor, InProcess)
    sim.driver.executor.store = blind = Blind(sim.store)
    sim.feed(rows=[(k,) for k in range(40)])
    assert CALLS.count("noise") == 4
    assert [n for name, n in blind.asked.items() if name.startswith(names.STRONG)] == [3, 3]
    assert attempts(sim) == 1
    same_everywhere(sim, 40)


def test_a_damaged_object_is_as_good_as_none() -> None:
    class Damages(FaultyStore):
        def create(self, name: str, data: Data) -> bool:
            if name.startswith(names.STRONG) and "-a0-" in name:
                data = bytearray(data)
                data[len(data) // 2] ^= 1
            return super().create(name, data)

    sim = twice(noisy("strong"))
    assert isinstance(sim.driver.executor, InProcess)
    sim.driver.executor.store = Damages(sim.store)
    sim.feed(rows=[(k,) for k in range(40)])
    assert attempts(sim) == 2, "the receipts caught it"
    same_everywhere(sim, 40)


def test_what_failed_is_not_kept() -> None:
    class Fails(Noise):
        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            raise ValueError("not today")

    query = ms.Query("noisy")
    query.source("rows", None).key_by("k").compute("noise", Fails, productions="strong")
    store = open_store("memory://")
    sim = Simulated(query, ROWS, store)
    with pytest.raises(StepError, match="not today"):
        sim.feed(rows=[(1,)])
    kept = [item.name for item in store.list(names.STRONG)]
    assert kept == ["strong/g1-e0-a0-1.0"] or kept == ["strong/g1-e0-a0-1.1"], "only that of the slot without records"


@pytest.mark.parametrize("operation", ["get", "create"])
def test_a_store_that_does_not_answer_costs_an_attempt_at_most(operation: str) -> None:
    class Refuses(FaultyStore):
        refused = False

        def _before(self) -> bool:
            return False

        def get(self, name: str) -> memoryview | None:
            return self._asked("get", name) or super().get(name)

        def create(self, name: str, data: Data) -> bool:
            self._asked("create", name)
            return super().create(name, data)

        def _asked(self, what: str, name: str) -> None:
            if what == operation and name.startswith(names.STRONG) and not self.refused:
                self.refused = True
                raise StoreUnavailable("busy")

    sim = Simulated(noisy("strong"), ROWS, slots=2)
    assert isinstance(sim.driver.executor, InProcess)
    sim.driver.executor.store = Refuses(sim.store)
    sim.feed(rows=[(k,) for k in range(40)])
    assert attempts(sim) == (1 if operation == "get" else 2)
    same_everywhere(sim, 40)


def test_kept_objects_are_collected_when_their_attempt_has_ended() -> None:
    sim = Simulated(noisy("strong", "strong"), ROWS, slots=2)
    for _ in range(3):
        sim.feed(rows=[(1,)])
    assert len(list(sim.store.list(names.STRONG))) == 3 * 2 * 2
    sim.driver.upkeep.collect(sim.driver.journal)
    assert list(sim.store.list(names.STRONG)) == []
    sim.feed(rows=[(1,)])
    assert sim.epoch == 3


def test_large_parts_are_stored_once_and_sent_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strong, "INLINE_LIMIT", 2000)
    sim = twice(noisy("strong"))
    sim.feed(rows=[(k,) for k in range(400)])
    kept = [item.bytes for item in sim.store.list(names.STRONG)]
    assert max(kept) < 4000, "only what is small is in it"
    assert len(list(sim.store.list(names.OVERFLOW))) == 2 * 2, "one for each pair of slots, made once"
    assert attempts(sim) == 1
    same_everywhere(sim, 400)


def test_strong_and_weak_come_to_the_same_where_code_is_deterministic(rng: random.Random) -> None:
    from jobs import EVENTS, Oracle, Total, TotalBatch

    def build(productions: str) -> Query:
        query = ms.Query("totals")
        events = query.source("events", frame=None).key_by("user")
        events.compute("records", Total, productions=productions).sink("records_out", ms.Memory())
        events.compute("batches", TotalBatch).sink("batches_out", ms.Memory())
        return query

    store, oracle, delivered = open_store("memory://"), Oracle(), None
    for number in range(8):  # it can be changed with every restart
        sim = Simulated(build("strong" if number % 2 else "weak"), EVENTS, store, slots=2)
        sim.delivered = delivered = delivered or sim.delivered
        events = [(f"u{rng.randrange(9)}", rng.randrange(9)) for _ in range(30)]
        sim.feed(events=events)
        oracle.feed(events)
    oracle.check(sim)


def test_other_kinds_of_productions_are_refused() -> None:
    with pytest.raises(UserError, match="productions='sure'; give one of 'weak', 'strong'"):
        noisy("sure")
