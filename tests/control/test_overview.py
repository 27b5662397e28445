"""What the journal's envelopes tell of the pace of a query."""

from __future__ import annotations

import pytest

from millstream.control.overview import Pulse
from millstream.protocol.epochs import Attempt, Commit, Epoch, Plan
from millstream.store.journal import Envelope


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
