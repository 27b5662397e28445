"""What the journal's envelopes tell of the pace of a query, and what its driver adds up from epoch to epoch."""

from __future__ import annotations

from typing import Any

import pytest

from millstream.control import running
from millstream.control.overview import Pulse
from millstream.control.running import RunningQuery
from millstream.protocol.epochs import Attempt, Commit, Epoch, Plan
from millstream.store.journal import Envelope
from millstream.testing.simulated import InProcess
from words import WORDS, simulated


def tell(pulse: Pulse, at_ms: int, body: Plan | Commit) -> None:
    pulse.told(Envelope(0, type(body).__name__, 1, "", "", at_ms, body.epoch, None, body))


def run(pulse: Pulse, epoch: int, at_ms: int, records: int, took_ms: int = 40) -> None:
    tell(pulse, at_ms - took_ms, Plan(Epoch(epoch), Attempt(0), "", "", 0, {}))
    tell(pulse, at_ms, Commit(Epoch(epoch), Attempt(0), (), (), (), {"a": records, "b": 1}, Epoch(0)))


def test_records_per_second_are_those_between_commits() -> None:
    pulse = Pulse()
    assert pulse.records_per_second == 0
    run(pulse, 0, 1000, 500)
    assert pulse.records_per_second == 0, "one commit has no length"
    run(pulse, 1, 1500, 99)
    run(pulse, 2, 2000, 199, took_ms=70)
    assert pulse.records_per_second == 300
    assert (pulse.epoch_ms, pulse.written_ms) == (70, 2000)


def test_what_is_read_again_counts_once() -> None:
    pulse = Pulse()
    for _ in range(2):
        run(pulse, 0, 1000, 0)
        run(pulse, 1, 2000, 99)
    assert pulse.records_per_second == 100


def test_what_was_missed_does_not_slow_the_query_down() -> None:
    pulse = Pulse()
    run(pulse, 0, 1000, 0)
    run(pulse, 50, 61_000, 9)
    assert pulse.records_per_second == 0
    run(pulse, 51, 61_500, 9)
    assert pulse.records_per_second == pytest.approx(20)


def test_an_attempt_that_was_aborted_does_not_count_as_time() -> None:
    pulse = Pulse()
    tell(pulse, 100, Plan(Epoch(0), Attempt(0), "", "", 0, {}))
    tell(pulse, 5000, Plan(Epoch(0), Attempt(1), "", "", 0, {}))
    tell(pulse, 5030, Commit(Epoch(0), Attempt(1), (), (), (), {}, Epoch(0)))
    assert pulse.epoch_ms == 30


class WithoutSpark(RunningQuery):
    """A running query to which epochs are given by hand."""

    def _open_sources(self) -> Any:
        self._reading = {name: called for name, (_, called) in self._driver.reads().items()}

    def _start_stream(self, writer: Any) -> Any:
        return None

    def _watch(self) -> None:
        return


def test_tasks_that_ran_elsewhere_are_added_up_for_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "query_id", lambda spark, checkpoint: "query")
    monkeypatch.setattr(running, "read_offsets", lambda spark, checkpoint, epoch: b"")
    monkeypatch.setattr(running, "only", lambda frame, reading, wanted: frame)
    sim = simulated(workers=("a", "b"))
    executor: Any = sim.driver.executor
    assert isinstance(executor, InProcess)
    query = WithoutSpark(None, sim.driver, None, "", {}, lambda: Epoch(-1))  # type: ignore[arg-type]
    assert query.status().elsewhere == 0
    counts = []
    for epoch, elsewhere in enumerate([{}, {0: "b"}, {0: "b", 1: "a"}, {}]):
        executor.elsewhere = elsewhere
        query._on_epoch({"words": WORDS}, epoch)  # type: ignore[arg-type]
        counts.append(query.status().elsewhere)
    assert counts == [0, 1, 3, 3]
    assert [facts.elsewhere for facts in query.recent] == [0, 1, 2, 0]
