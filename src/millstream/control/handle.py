"""The handle of a command: what has become of it, told by the journal.

Rules
-----
- A command is answered by commits alone: what an attempt that was aborted had decided has not happened.
- A handle only looks. It may be made anywhere and as often as one likes, also for the command of somebody else, and
  nothing changes when it is dropped.
- A refusal is raised as what it is: `ConflictError` if planning again can help, `UserError` if it cannot; so is a
  modification that was aborted or rolled back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from millstream.errors import ConflictError, UserError
from millstream.protocol.epochs import History
from millstream.protocol.migration import MigrationPlan, size_text
from millstream.protocol.modification import LIFE
from millstream.protocol.steering import Outcome, leaving

_FIRST_POLL_S, _LONGEST_POLL_S = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a command has come. Made by `Handle.progress`."""

    state: str
    """`sent` until the driver has heard it, then as of its `Outcome`."""
    done: int
    """How many rounds have been carried out."""
    rounds: int
    """How many there are."""
    bytes_done: int
    """About how many bytes of state have moved."""
    bytes: int
    """About how many bytes there are to move."""
    epochs: int
    """For how many epochs it has been running, those between its rounds included."""

    def __str__(self) -> str:
        if not self.rounds:
            return self.state
        size = f"{size_text(self.bytes_done)} of {size_text(self.bytes)}"
        return f"{self.state}: {self.done} of {self.rounds} rounds, {size}, {self.epochs} epochs"


class Handle:
    """What has become of a command. Made by `apply` and `cancel`.

    `number` is the command's place in the control log.
    """

    def __init__(
        self,
        number: int,
        look: Callable[[], History],
        cancel: Callable[[int], Handle],
        plan: MigrationPlan | None = None,
        ended: Callable[[], str] = lambda: "",
        may_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """`look` reads the journal, `ended` says why nobody will go on with it, if that is known, and `may_wait` raises
        where one would wait for oneself."""
        self.number, self.plan = number, plan
        self._look, self._cancel, self._ended, self._may_wait = look, cancel, ended, may_wait

    def __repr__(self) -> str:
        return f"<Handle of command {self.number}: {self.progress()}>"

    @property
    def outcome(self) -> Outcome | None:
        """What has become of it so far; None until the driver has heard it."""
        return self._found(self._look())

    def progress(self) -> Progress:
        """How far it has come."""
        history = self._look()
        return progress_of(self._found(history), self.plan, history.epoch)

    def wait(self, timeout: float | None = None, tell: Callable[[Progress], None] | None = None) -> Outcome:
        """Waits until it is done or cancelled, and says which. `tell` is called with the progress, again and again.
        A drain is waited for until its worker is empty: it has no slots, and Spark runs nothing on it.

        Raises `ConflictError` if it was refused because its plan is stale, so that one may plan again; `UserError` if
        it was refused for what it says; `TimeoutError` if it is not over after `timeout` seconds. In that case it
        stays in the control log, and goes on, or is heard by the next driver.
        """
        self._may_wait()
        deadline = None if timeout is None else time.monotonic() + timeout
        first = history = self._look()
        pause = _FIRST_POLL_S
        while True:
            outcome = self._found(history)
            if tell is not None:
                tell(progress_of(outcome, self.plan, history.epoch))
            if outcome is not None and outcome.over and not leaving(outcome, history.generation):
                return _raised(outcome)
            ended = self._ended()
            if ended:
                history = self._look()  # it may have been answered by the very last epoch
                outcome = self._found(history)
                if outcome is not None and outcome.over:
                    return _raised(outcome)
                raise UserError(f"{self._standing(outcome)}, and {ended}. It goes on when the query is started again")
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(self._late(timeout or 0, first, history))
            time.sleep(pause if left is None else min(pause, left))
            pause = min(_LONGEST_POLL_S, pause * 1.5)
            history = self._look()

    def cancel(self) -> Handle:
        """Asks that it end after the rounds it has done by then; the handle of that command.

        The routing table is then the one that those rounds have made, and `wait` says `cancelled`.
        """
        return self._cancel(self.number)

    def _found(self, history: History) -> Outcome | None:
        found = history.outcomes.get(self.number)
        if found is None and self.number < history.control:
            raise UserError(
                f"command {self.number} was answered so long ago that the answer is no longer kept: commands up to "
                f"{history.control - 1} have been heard"
            )
        return found

    def _standing(self, outcome: Outcome | None) -> str:
        if outcome is None:
            return f"command {self.number} has not been heard yet"
        if outcome.state in ("waiting", *LIFE):
            waits = "waits for its time" if outcome.state in ("waiting", "prepared") else f"is {outcome.state}"
            return f"command {self.number} ({outcome.verb}) {waits}"
        return f"command {self.number} ({outcome.verb}) has done {outcome.done} of {outcome.rounds} rounds"

    def _late(self, timeout: float, first: History, last: History) -> str:
        text = f"{self._standing(self._found(last))}, after {timeout:g} s"
        if last.epoch == first.epoch and last.generation == first.generation:
            text += (
                f". No epoch was committed meanwhile (the last is {last.epoch}): perhaps no driver runs the query, or "
                "an epoch takes longer. The command stays in the control log, and is carried out when one runs"
            )
        else:
            text += f". Epochs {first.epoch + 1}..{last.epoch} were committed meanwhile; the command goes on"
        return f"{text}; cancel it, with its number, if it shall not be"


def progress_of(outcome: Outcome | None, plan: MigrationPlan | None, epoch: int) -> Progress:
    """How far a command has come, as of an epoch."""
    sizes = [sum(move.bytes for move in moves) for moves in plan.rounds] if plan is not None else []
    if outcome is None:
        return Progress("sent", 0, len(sizes), 0, sum(sizes), 0)
    total = outcome.bytes
    moved = sum(sizes[: outcome.done]) if sizes else total * outcome.done // max(1, outcome.rounds)
    until = outcome.last if outcome.over else epoch
    epochs = until - outcome.began + 1 if outcome.began >= 0 else 0
    return Progress(outcome.state, outcome.done, outcome.rounds, moved, total, epochs)


def _raised(outcome: Outcome) -> Outcome:
    if outcome.state not in ("refused", "aborted", "rolled back"):
        return outcome
    text = f"command {outcome.number} ({outcome.verb}) was {outcome.state}: {outcome.reason}"
    raise ConflictError(text) if outcome.stale else UserError(text)
