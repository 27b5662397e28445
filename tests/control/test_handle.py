"""The handle of a command: it says what the journal says, and raises what was refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from millstream.control.handle import Handle, Progress
from millstream.errors import ConflictError, UserError
from millstream.protocol.epochs import Epoch, Generation, History
from millstream.protocol.keyspace import Range
from millstream.protocol.migration import MigrationPlan, Move
from millstream.protocol.routing import RoutingVersion, Slot
from millstream.protocol.steering import Outcome

PLAN = MigrationPlan(
    "store",
    "move",
    {"count": RoutingVersion(0)},
    ((Move("count", Range(0, 9), Slot(0), Slot(1), 100),), (Move("count", Range(10, 19), Slot(0), Slot(1), 300),)),
)
SENT = Outcome(3, "move", "waiting", rounds=2, bytes=400)


class Told:
    """A journal that goes on by one step whenever somebody looks, and stands still at the last."""

    def __init__(self, *histories: History) -> None:
        self.histories, self.looks = list(histories), 0
        self.cancelled: list[int] = []

    def look(self) -> History:
        self.looks += 1
        return self.histories.pop(0) if len(self.histories) > 1 else self.histories[0]

    def cancel(self, number: int) -> Handle:
        self.cancelled.append(number)
        return self.handle()

    def handle(self, ended: Iterable[str] = ()) -> Handle:
        endings = iter(ended)
        return Handle(3, self.look, self.cancel, PLAN, lambda: next(endings, ""))


def at(epoch: int, outcome: Outcome | None = None) -> History:
    outcomes = {} if outcome is None else {outcome.number: outcome}
    return History(Generation(1), epoch=Epoch(epoch), control=0 if outcome is None else 4, outcomes=outcomes)


def test_waiting_ends_when_the_journal_says_that_it_is_done() -> None:
    done = replace(SENT, state="done", done=2, began=6, last=7)
    told = Told(at(5), at(5, SENT), at(6, replace(SENT, state="running", done=1, began=6, last=6)), at(7, done))
    assert told.handle().wait() == done
    assert told.looks == 4


def test_a_cancelled_command_is_no_error() -> None:
    cancelled = replace(SENT, state="cancelled", done=1, began=6, last=6)
    told = Told(at(7, cancelled))
    handle = told.handle()
    handle.cancel()
    assert told.cancelled == [3]
    assert handle.wait() == cancelled


@pytest.mark.parametrize(("stale", "error"), [(True, ConflictError), (False, UserError)])
def test_a_refusal_is_raised_as_what_it_is(stale: bool, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"command 3 \(move\) was refused: no way"):
        Told(at(5, replace(SENT, state="refused", reason="no way", stale=stale))).handle().wait()


def test_a_timeout_says_whether_anybody_runs_the_query() -> None:
    with pytest.raises(TimeoutError, match="has not been heard yet, after 0 s. No epoch .* perhaps no driver runs"):
        Told(at(5)).handle().wait(timeout=0)
    running = replace(SENT, state="running", done=1, began=6, last=6)
    with pytest.raises(TimeoutError, match=r"has done 1 of 2 rounds, after 0.001 s. Epochs 6..8 were committed"):
        Told(at(5), at(8, running)).handle().wait(timeout=0.001)


def test_a_query_that_has_ended_is_not_waited_for() -> None:
    with pytest.raises(UserError, match="has not been heard yet, and it was stopped. It goes on when"):
        Told(at(5)).handle(["it was stopped"]).wait()
    done = replace(SENT, state="done", done=2, began=6, last=7)
    assert Told(at(5), at(7, done)).handle(["it was stopped"]).wait() == done, "answered by the last epoch"


def test_an_answer_that_is_no_longer_kept_is_not_waited_for() -> None:
    with pytest.raises(UserError, match="so long ago"):
        Told(replace(at(900), control=300)).handle().wait()


def test_progress_counts_rounds_bytes_and_epochs() -> None:
    running = replace(SENT, state="running", done=1, began=6, last=6)
    assert Told(at(5)).handle().progress() == Progress("sent", 0, 2, 0, 400, 0)
    assert Told(at(5, SENT)).handle().progress() == Progress("waiting", 0, 2, 0, 400, 0)
    assert Told(at(8, running)).handle().progress() == Progress("running", 1, 2, 100, 400, 3)
    done = replace(running, state="done", done=2, last=9)
    assert Told(at(30, done)).handle().progress() == Progress("done", 2, 2, 400, 400, 4)
    assert str(Told(at(8, running)).handle().progress()) == "running: 1 of 2 rounds, 100 B of 400 B, 3 epochs"
