"""Which epochs may run and which attempts count: pure decisions, one by one."""

from __future__ import annotations

import pytest

from millstream.errors import InvariantViolation, UserError
from millstream.protocol.epochs import (
    Accept,
    Committed,
    Damage,
    Epoch,
    Failure,
    History,
    Redeliver,
    Reject,
    Report,
    Run,
    check_start,
    decide,
    judge,
)

HISTORY = History(spark_query="q", epoch=Epoch(4), recent={Epoch(4): Committed("offsets", (), {})})


def report(slot: int, **seen: str) -> Report:
    return Report(slot, seen or {"0.0": "same"}, records={"count": 2})


def test_the_next_epoch_runs_and_the_last_one_is_redelivered() -> None:
    assert decide(HISTORY, Epoch(5), "q", "any") == Run(Epoch(5))
    assert decide(HISTORY, Epoch(4), "q", "offsets") == Redeliver(Epoch(4))
    assert decide(History(), Epoch(0), "new", "any") == Run(Epoch(0))


@pytest.mark.parametrize(
    ("epoch", "query", "offsets"), [(3, "q", "x"), (6, "q", "x"), (4, "q", "x"), (5, "other", "x")]
)
def test_everything_else_is_refused(epoch: int, query: str, offsets: str) -> None:
    with pytest.raises(UserError):
        decide(HISTORY, Epoch(epoch), query, offsets)


@pytest.mark.parametrize(("finished", "fits"), [(2, False), (3, True), (4, True), (5, False)])
def test_spark_may_be_one_epoch_behind_and_never_ahead(finished: int, fits: bool) -> None:
    if fits:
        check_start(HISTORY, "q", Epoch(finished), Epoch(finished))
    else:
        with pytest.raises(UserError, match="do not belong together"):
            check_start(HISTORY, "q", Epoch(finished), Epoch(finished))


@pytest.mark.parametrize(
    ("before", "after", "fits"), [(3, 4, True), (4, 9, True), (2, 3, True), (5, 6, False), (1, 2, False)]
)
def test_an_older_driver_may_go_on_while_a_newer_one_looks(before: int, after: int, fits: bool) -> None:
    """What Spark has finished is looked at before the journal is read, and after it."""
    if fits:
        check_start(HISTORY, "q", Epoch(before), Epoch(after))
    else:
        with pytest.raises(UserError, match="do not belong together"):
            check_start(HISTORY, "q", Epoch(before), Epoch(after))


def test_an_attempt_whose_receipts_agree_is_accepted_whole() -> None:
    assert judge(2, 1, [report(1), report(0)]) == Accept((), (), (), {"count": 4})


def test_an_attempt_with_two_versions_of_a_producer_is_run_again() -> None:
    verdict = judge(2, 1, [report(0), report(1, **{"0.0": "other"})])
    assert isinstance(verdict, Reject)
    assert "receipts differ: slot 1 consumed version other of producer 0.0" in verdict.reason
    assert verdict.failure is verdict.damage is None


def test_failures_damage_and_trouble_come_before_receipts() -> None:
    failure = Failure("count", "'a'", "r", "ValueError: x", "")
    assert judge(2, 1, [report(0), Report(1, {}, failure=failure)]) == Reject("step count: ValueError: x", failure)
    damage = Damage("segments/x", "nothing", "7 bytes")
    assert judge(2, 1, [report(0), Report(1, {}, damage=damage)]) == Reject("segments/x is damaged", damage=damage)
    assert judge(2, 1, [report(0), Report(1, {}, trouble="busy")]) == Reject("slot 1: busy")


def test_reports_that_are_missing_doubled_or_of_other_producers_are_our_bug() -> None:
    for reports in ([report(0)], [report(0), report(0)], [report(0), report(2)]):
        with pytest.raises(InvariantViolation):
            judge(2, 1, reports)
    with pytest.raises(InvariantViolation):
        judge(2, 2, [report(0), report(1)])
    with pytest.raises(InvariantViolation):
        judge(2, 1, [report(0), report(1, **{"0.9": "same"})])
