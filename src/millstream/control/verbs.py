"""The verbs: what can be asked of a query while it runs, from its own process and from any other.

Rules
-----
- Planning changes nothing and sends nothing. A plan is made from the last commit, and says which routing versions those
  were; it is a value, and may be looked at, kept, and applied later.
- Applying sends one command. Whether it is carried out is for the driver to say, and its answer is in the journal: who
  asks from inside the driver's process learns it in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from millstream.control.handle import Handle
from millstream.engine.driver import layout_of
from millstream.errors import UserError
from millstream.model.times import micros
from millstream.protocol import planner
from millstream.protocol.conditions import Condition
from millstream.protocol.epochs import History
from millstream.protocol.keyspace import Range
from millstream.protocol.layout import Layout
from millstream.protocol.migration import AT_ONCE, MigrationPlan, Start, size_text
from millstream.protocol.modification import Modification, undoing
from millstream.protocol.planner import DEFAULT, TOLERANCE, Steps
from millstream.protocol.steering import Ask, Cancel, Outcome
from millstream.protocol.strategies import Strategy

_STRATEGIES = "Paced(), AllAtOnce(), Fluid(), Batched(n) or Matched()"
Span = Range | tuple[int, int]
"""A range of the key space: its first and its last point."""


When = int | datetime | tuple[Literal["event"], datetime] | Condition | None
"""An epoch, a wall time, an event time, a condition on the query's numbers, or at once."""


class Verbs:
    """The base of what controls a query."""

    # -- what a kind of control provides

    def _look(self) -> History:
        """The journal's sum, as of now."""
        raise NotImplementedError

    def _send(self, verb: str, ask: Ask, history: History) -> int:
        """Adds a command to the control log; its number."""
        raise NotImplementedError

    def _store_id(self) -> str:
        raise NotImplementedError

    def _unheard(self, history: History) -> dict[int, str]:
        """The commands that the driver has not heard: number and verb."""
        raise NotImplementedError

    def _gone(self, history: History) -> str:
        """Why no driver seems to run, if that is known."""
        return ""

    def _ended(self) -> str:
        """Why nobody will hear a command, if that is known."""
        return ""

    def _may_wait(self) -> None:
        """Raises where waiting for a command would be waiting for oneself."""

    # -- planning

    def plan_rescale(
        self,
        slots: int,
        *,
        steps: Steps = None,
        strategy: Strategy = DEFAULT,
        at: When = None,
    ) -> MigrationPlan:
        """A plan that leaves the query with so many slots, each with the same number of bins or one more.

        All plans have these arguments: `steps` are the names of those that move, all by default. `strategy` says which
        bins move together: `Paced(slowdown=1.1)`, `AllAtOnce()`, `Fluid()`, `Batched(n)` or `Matched()`, each with a
        `gap` of epochs between.
        `at` is for plans that are made ahead of time: an epoch, a datetime for wall time, `(EVENT_TIME, datetime)`
        for when the watermarks of the steps have reached it, or a condition such as `metric("lag_s") > 30`. By then the
        plan must not be stale.
        """
        history, start = self._begin(strategy, at)
        return planner.plan_rescale(self._layout(history), slots, steps=steps, strategy=strategy, at=start)

    def plan_move(
        self,
        *,
        to: int | Sequence[int],
        bins: int | Sequence[int] | None = None,
        ranges: Span | Sequence[Span] | None = None,
        slots: int | Sequence[int] | None = None,
        share: float = 1.0,
        steps: Steps = None,
        strategy: Strategy = DEFAULT,
        at: When = None,
    ) -> MigrationPlan:
        """A plan that takes what is named to the slot `to`, or to several, in equal parts.

        Name `bins` by their numbers, or `ranges` of the key space as pairs of points, both included, or `slots` and the
        `share` of the bins of each.
        """
        history, start = self._begin(strategy, at)
        return planner.plan_move(
            self._layout(history),
            to=to,
            bins=bins,
            ranges=_ranges(ranges),
            slots=slots,
            share=share,
            steps=steps,
            strategy=strategy,
            at=start,
        )

    def plan_drain(
        self,
        worker: str,
        *,
        steps: Steps = None,
        strategy: Strategy = DEFAULT,
        at: When = None,
    ) -> MigrationPlan:
        """A plan that takes everything away from the slots of a worker, so that those of the others end up even."""
        history, start = self._begin(strategy, at)
        return planner.plan_drain(self._layout(history), worker, steps=steps, strategy=strategy, at=start)

    def plan_balance(
        self,
        *,
        tolerance: float = TOLERANCE,
        steps: Steps = None,
        strategy: Strategy = DEFAULT,
        at: When = None,
    ) -> MigrationPlan:
        """A plan that takes bins from the slots with the most bytes to those with the least, until all are within
        `tolerance` of the mean."""
        history, start = self._begin(strategy, at)
        layout = self._layout(history)
        return planner.plan_balance(layout, tolerance=tolerance, steps=steps, strategy=strategy, at=start)

    def plan_split(
        self,
        slot: int,
        into: int = 2,
        *,
        steps: Steps = None,
        strategy: Strategy = DEFAULT,
        at: When = None,
    ) -> MigrationPlan:
        """A plan that cuts what a slot owns into so many parts; it keeps the first, and new slots get the others."""
        history, start = self._begin(strategy, at)
        return planner.plan_split(self._layout(history), slot, into, steps=steps, strategy=strategy, at=start)

    def plan_merge(
        self,
        slot: int,
        into: int,
        *,
        steps: Steps = None,
        strategy: Strategy = DEFAULT,
        at: When = None,
    ) -> MigrationPlan:
        """A plan that takes all that a slot owns to another, so that it disappears."""
        history, start = self._begin(strategy, at)
        return planner.plan_merge(self._layout(history), slot, into, steps=steps, strategy=strategy, at=start)

    def plan_bins(
        self,
        bins: int,
        *,
        steps: Steps = None,
        at: When = None,
    ) -> MigrationPlan:
        """A plan that changes the number of bins, a power of two: how finely later plans can cut. Nothing moves."""
        history, start = self._begin(DEFAULT, at)
        return planner.plan_bins(self._layout(history), bins, steps=steps, at=start)

    # -- doing

    def apply(self, plan: MigrationPlan) -> Handle:
        """Asks for a plan to be carried out. Returns at once; the handle waits, tells the progress, and cancels.

        The driver refuses a plan that is stale: one that was made for routing versions that are no longer so.
        """
        if not isinstance(plan, MigrationPlan):
            raise UserError(f"apply({plan!r}): give a plan, as plan_rescale() and the like make")
        if plan.store != self._store_id():
            raise UserError(
                f"the plan was made for another query (store id {plan.store}, this is {self._store_id()}); plan again"
            )
        if not plan.rounds:
            raise UserError(f"the plan ({plan.verb}) changes nothing: all is as it asks for already")
        return self._handle(self._sent(plan.verb, plan), plan)

    def cancel(self, number: int) -> Handle:
        """Asks for a command to end after the rounds that it has done by then; the handle of the asking.

        The routing table is then the one that those rounds have made.
        """
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise UserError(f"cancel({number!r}): give the number of a command")
        history = self._look()
        trouble = self._not_to_cancel(number, history)
        if trouble:
            raise UserError(f"cancel({number}): {trouble}")
        return self._handle(self._sent("cancel", Cancel(number)))

    def _not_to_cancel(self, number: int, history: History) -> str:
        """Why a command cannot be meant; empty if it can."""
        known = history.outcomes.get(number)
        if known is not None:
            return f"command {number} ({known.verb}) is not under way: it is {known.state}" if known.over else ""
        if number < history.control:
            return f"command {number} ended long ago"
        unheard = self._unheard(history)
        if number in unheard:
            return ""
        last = max([*unheard, history.control - 1])
        return f"there is no command {number}; " + (f"the last one is {last}" if last >= 0 else "none was ever sent")

    def revert(self, number: int, *, trial: bool = False) -> Handle:
        """Asks for a modification to be undone: for the graph to be as if it had not been made.

        State that it dropped is not brought back: it begins empty. One whose changes later modifications have changed
        in turn cannot be undone before those, and one that has converted state not at all. A `trial` is only checked by
        the driver, and changes nothing.
        """
        history = self._look()
        code, trouble = undoing(history.modified, number)
        if trouble:
            raise UserError(f"revert({number!r}): {trouble}")
        text = next(applied.text for applied in history.modified if applied.number == number)
        text = f"revert {number}: {text}"[:2000]
        ask = Modification(self._store_id(), history.version, code, text, trial=trial)
        return self._handle(self._sent("revert", ask))

    def history(self) -> list[Past]:
        """What has been done to the query by commands, in their order: who, when, what, and what came of it. Of the
        commands that are over, the last 128 are remembered."""
        return [past_of(outcome) for outcome in self.commands() if outcome.verb != "cancel"]

    def handle(self, number: int) -> Handle:
        """The handle of any command, from its number."""
        return self._handle(number)

    def commands(self) -> list[Outcome]:
        """What has become of the commands so far, in their order: of all that are under way, and of the last 128 that
        are over."""
        outcomes = self._look().outcomes
        return [outcomes[number] for number in sorted(outcomes)]

    # -- inside

    def _layout(self, history: History) -> Layout:
        """Where state lies, as of a history."""
        return layout_of(self._store_id(), history)

    def _sent(self, verb: str, ask: Ask) -> int:
        ended = self._ended()
        if ended:
            raise UserError(f"{verb}: {ended}, so nobody would hear the command")
        return self._send(verb, ask, self._look())

    def _handle(self, number: int, plan: MigrationPlan | None = None) -> Handle:
        return Handle(number, self._look, self.cancel, plan, self._ended, self._may_wait)

    def _begin(self, strategy: Strategy, at: When) -> tuple[History, Start]:
        """The history that a plan is made from, and when the plan starts."""
        if not isinstance(strategy, Strategy):
            raise UserError(f"strategy={strategy!r}: give {_STRATEGIES}")
        history = self._look()
        if not history.tables:
            raise UserError("no epoch has been committed yet, so nothing can be planned; wait for the first")
        return history, start_of(at, history)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What the time of a migration went into, and where the state came from that its epochs read for the first time. Of
    fetching and loading it is the slowest task that counts, in every epoch from the first round to the last.

    >>> print(Breakdown(0.04, 2.1, 0.0, 0.013, {"replica": 240_000_000}))
    scheduled in 0.04 s, prepared for 2.1 s, fetched for 0 s, loaded for 0.013 s; 240 MB from replicas
    """

    scheduling_s: float = 0.0
    """From when the driver heard it to when it began."""
    preparing_s: float = 0.0
    """How long its rounds waited for what they brought to be there; epochs went on meanwhile."""
    fetching_s: float = 0.0
    """How long its epochs fetched what was not there."""
    loading_s: float = 0.0
    """How long they took to check and map what was."""
    sources: dict[str, int] = field(default_factory=dict)
    """Bytes by where they came from: a worker's own `cache`, a `replica` (or what was prepared), or the `store`; and
    how many of them workers had checked `ahead`, before they were needed."""

    def __str__(self) -> str:
        times = (
            f"scheduled in {self.scheduling_s:.2g} s, prepared for {self.preparing_s:.2g} s, "
            f"fetched for {self.fetching_s:.2g} s, loaded for {self.loading_s:.2g} s"
        )
        known = {"cache": "caches", "replica": "replicas", "store": "the store"}
        sizes = [f"{size_text(self.sources[name])} from {text}" for name, text in known.items() if name in self.sources]
        if "ahead" in self.sources:
            sizes.append(f"{size_text(self.sources['ahead'])} checked ahead")
        return f"{times}; {', '.join(sizes)}" if sizes else times


@dataclass(frozen=True, slots=True)
class Past:
    """Something that was done, or asked, of a running query. Made by `history`."""

    number: int
    """Of the command."""
    verb: str
    """What was asked for."""
    text: str
    """The same, in words."""
    sender: str
    """Who asked: user, host and process."""
    at: datetime | None
    """When, by the sender's clock."""
    state: str
    """What became of it."""
    reason: str
    """Why, if it came to nothing."""
    first: int
    """The first epoch that it changed; -1 for none."""
    last: int
    """The last one."""
    seconds: float
    """From when the driver heard it to when it was over; 0 if it is not."""
    stall_ms: float
    """How long the longest of its epochs took."""
    breakdown: Breakdown | None = None
    """Of a migration that has begun: what its time went into."""


def past_of(outcome: Outcome) -> Past:
    """An outcome as something that has been."""
    took = (outcome.over_ms - outcome.heard_ms) / 1000 if outcome.over_ms and outcome.heard_ms else 0.0
    at = datetime.fromtimestamp(outcome.at_ms / 1000, UTC) if outcome.at_ms else None
    breakdown = None
    if outcome.began_ms:
        scheduling_s = max(0, outcome.began_ms - outcome.heard_ms) / 1000
        breakdown = Breakdown(
            scheduling_s, outcome.waited_ms / 1000, outcome.fetch_ms / 1000, outcome.load_ms / 1000, outcome.sources
        )
    return Past(
        outcome.number, outcome.verb, outcome.text, outcome.sender, at, outcome.state, outcome.reason, outcome.began,
        outcome.last, took, outcome.stall_ms, breakdown,
    )  # fmt: skip


def start_of(at: When, history: History) -> Start:
    """When a plan starts; refuses what is past."""
    match at:
        case None:
            return AT_ONCE
        case Condition():
            return Start(condition=at)
        case int() if not isinstance(at, bool):
            if at <= history.epoch:
                raise UserError(f"at={at}: epoch {at} is past, the last commit is epoch {history.epoch}")
            return Start(epoch=at)
        case datetime():
            if micros(at, "at") < time.time_ns() // 1000:
                raise UserError(f"at={at.isoformat()} is past: it is {datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} now")
            return Start(clock_ms=-(-micros(at, "at") // 1000))
        case ("event", datetime() as event):
            marks = [mark for mark in history.watermarks.values() if mark >= micros(event, "at")]
            if not history.watermarks:
                raise UserError("at: no step of this query has event time; give an epoch, or a datetime for wall time")
            if len(marks) == len(history.watermarks):
                raise UserError(f"at: the event time {event.isoformat()} is past, by all watermarks")
            return Start(event_time=micros(event, "at"))
    raise UserError(
        f"at={at!r}: give an epoch, a datetime for wall time, (EVENT_TIME, datetime), or a condition, such as "
        "metric('lag_s') > 30"
    )


def _ranges(given: Span | Sequence[Span] | None) -> list[Range] | None:
    if given is None:
        return None
    if not isinstance(given, Range | Iterable):
        raise UserError(f"ranges={given!r}: give pairs of points, such as (0, 2**63 - 1)")
    several = [given] if isinstance(given, Range) or _is_pair(given) else list(given)
    found = []
    for each in several:
        if isinstance(each, Range):
            found.append(each)
        elif isinstance(each, tuple) and _is_pair(each):
            found.append(Range(int(each[0]), int(each[1])))
        else:
            raise UserError(f"ranges={given!r}: give pairs of points, such as (0, 2**63 - 1)")
    return found


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(type(point) is int for point in given)
