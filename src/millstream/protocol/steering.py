"""Steering: what the commands that have been heard, and the migrations under way, change at an epoch.

Rules
-----
- A decision, from facts alone. It is made anew at every attempt and journaled with its plan: what an aborted attempt
  had decided has not happened, and a driver that takes over goes on where the last commit is (G5, G6).
- Commands are answered in order, each once: `History.control` says up to which number. An answer is an `Outcome`; it
  changes until the command is over.
- A plan is carried out from the routing versions it was made for, or refused (G8). At most one migration moves a step
  at a time.
- A command that makes no sense is refused with a reason, and changes nothing else.
- A modification that has been prepared takes effect in the next plan, unless it must wait (`protocol.modification`).
- What an epoch cost its commands is known once it is over, so the epoch after it tells: an outcome that is over may
  still gain what its last epoch cost, and nothing else but that its worker is empty.

`STATES` are those of an outcome, and what may follow each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from millstream.protocol.keyspace import LAST
from millstream.protocol.migration import MigrationPlan, Move, Start, duration_text, rounds_at_once
from millstream.protocol.modification import LIFE, Candidate, Changed, Modification
from millstream.protocol.pacing import MoveCosts
from millstream.protocol.routing import RoutingTable

STATES: dict[str, tuple[str, ...]] = {
    "waiting": ("running", "done", "refused", "cancelled"),
    "running": ("done", "cancelled"),
    "done": (),
    "refused": (),
    "cancelled": (),
    **LIFE,
}
MAX_BIN_BITS = 32
MAX_PIECES = 1 << 22
"""Of how many pieces the moves of a step may consist, all rounds together."""
KEPT_OUTCOMES = 128
"""How many outcomes of commands that are over are remembered."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has become of a command."""

    number: int
    """The number of the command."""
    verb: str
    """What it asked for."""
    state: str
    """`waiting`, `running`, `done`, `refused` or `cancelled`; of a modification `proposed`, `validated`, `prepared`,
    `committed`, `aborted` or `rolled back`."""
    reason: str = ""
    """Why it was refused, cancelled, aborted or rolled back."""
    rounds: int = 0
    """How many rounds it has."""
    done: int = 0
    """How many of them have been carried out."""
    began: int = -1
    """The epoch of the first; -1 before."""
    last: int = -1
    """The epoch of the last that was carried out; -1 before."""
    bytes: int = 0
    """About how many bytes of state it moves."""
    drains: str = ""
    generation: int = 0
    """Of the driver that began it: the names of workers mean something to that one only."""
    sender: str = ""
    """Who sent it: user, host and process."""
    at_ms: int = 0
    """When, by the sender's clock, in milliseconds since 1970."""
    stale: bool = False
    """Whether it was refused for what has changed meanwhile, so that planning again can help."""
    text: str = ""
    """What it does, in words."""
    heard_ms: int = 0
    """When the driver heard it, by the driver's clock."""
    over_ms: int = 0
    """When it was over, by the driver's clock; 0 before."""
    reached_ms: dict[str, int] = field(default_factory=dict)
    """Of a modification: when it came to be `validated` and `prepared`, by the driver's clock."""
    stall_ms: float = 0.0
    """How long the longest of its epochs took, as far as its driver has seen them. This and what follows of costs is
    told an epoch late: that of the last round comes with the first epoch after it is over."""
    since_ms: int = 0
    """Since when its next round has been waiting for what it brings to be there, by the driver's clock; 0 if it is
    not."""
    lacking: int = 0
    """How many bytes were lacking when that was last looked at."""
    empty_ms: int = 0
    """Of a drain: when nothing ran on the worker any more, by the driver's clock; 0 before."""
    began_ms: int = 0
    """When it began, by the driver's clock; 0 before."""
    waited_ms: int = 0
    """How long its rounds have waited for what they bring to be there, all together."""
    fetch_ms: float = 0.0
    """How long the tasks of its epochs have fetched state: the slowest of each epoch, all epochs together."""
    load_ms: float = 0.0
    """How long they took to check and map it."""
    sources: dict[str, int] = field(default_factory=dict)
    """Where the bytes came from that these had not read before: `cache`, `replica` or `store`; and those that were
    checked `ahead` while it waited. See `EpochFacts`."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return not STATES[self.state]


def leaving(outcome: Outcome, generation: int) -> bool:
    """Whether it is a drain that is done, by this driver, of a worker on which something still runs."""
    done = outcome.drains and outcome.state == "done" and outcome.generation == generation
    return bool(done and not outcome.empty_ms and not outcome.reason)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ends a migration after the rounds that it has done; the number is that of its command."""

    number: int


Ask = MigrationPlan | Cancel | Modification
"""What a command may ask for."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A command as the driver has read it: what it asks for, or why that cannot be known."""

    number: int
    verb: str
    ask: Ask | None
    trouble: str = ""
    sender: str = ""
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Spent:
    """What an epoch's tasks spent on state that they had not read before: milliseconds, and bytes by their source."""

    fetch_ms: float = 0.0
    load_ms: float = 0.0
    sources: Mapping[str, int] = field(default_factory=dict)
    coming: int = 0
    """How many bytes were checked of what was about to move."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a decision is made from. `plans` are what the commands ask for that are waiting or running, but for those
    that are `unread`, because the store cannot be read now. `workers` are those of the last epoch, and their slots.
    `version` is that of the graph, and `candidates` are the modifications that are being prepared.
    """

    store: str
    generation: int
    epoch: int
    clock_ms: int
    tables: dict[str, RoutingTable]
    watermarks: Mapping[str, int]
    control: int
    outcomes: Mapping[int, Outcome]
    plans: Mapping[int, MigrationPlan | Modification]
    unread: Collection[int] = ()
    workers: Mapping[str, Collection[int]] = field(default_factory=dict)
    version: int = 0
    candidates: Mapping[int, Candidate] = field(default_factory=dict)
    took_ms: float = 0.0
    """How long the last committed epoch took; 0 if that is not known."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What is known of `conditions.METRICS`."""
    empty: Mapping[str, str] = field(default_factory=dict)
    """The workers that have been drained and on which nothing runs; or why that cannot be brought about."""
    lacking: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Of migrations, how many bytes the worker that lacks most of the next round would have to fetch, and how many of
    these are older than the last epochs. Of those that are not here, nothing can be prepared."""
    through: Collection[int] = ()
    """The migrations whose next round was written through in the last epoch, as far as that can be done."""
    unchecked: Collection[int] = ()
    """The migrations whose next round should wait until its targets have checked what it brings."""
    started_ms: int = 0
    """When this driver began, by its clock: nothing was prepared while there was none."""
    spent: Spent = field(default_factory=Spent)
    """On state, in the last committed epoch."""
    costs: MoveCosts = field(default_factory=MoveCosts)
    """What moving costs, as far as it is known."""


@dataclass(frozen=True, slots=True)
class Steering:
    """What an epoch runs with: the tables, the answers that changed, and how far the control log has been read."""

    tables: dict[str, RoutingTable]
    outcomes: tuple[Outcome, ...]
    control: int
    changed: Changed | None = None
    """The modification that takes effect."""
    wanted: int = -1
    """The modification that waits for a stream with its sources, and for nothing else; -1 if none does."""


def remembered(known: Mapping[int, Outcome], changed: Sequence[Outcome]) -> dict[int, Outcome]:
    """The outcomes after these have changed: all that are not over, the last ones that are, and the drains that the
    newest driver has done, because no slot is placed on those workers."""
    found = {**known, **{outcome.number: outcome for outcome in changed}}
    newest = max((outcome.generation for outcome in found.values()), default=0)
    drained = {n for n, each in found.items() if each.drains and each.state == "done" and each.generation == newest}
    over = [number for number in sorted(found) if found[number].over and number not in drained]
    for number in over[:-KEPT_OUTCOMES]:
        del found[number]
    return found


def steer(facts: Facts, heard: Sequence[Heard]) -> Steering:
    """Answers the commands that were heard, and takes every migration that is due one round on."""
    course = _Course(facts)
    course.look_back()
    for command in heard:
        course.answer(command)
    course.go_on()
    course.modify()
    outcomes = tuple(course.changed[number] for number in sorted(course.changed))
    return Steering(course.tables, outcomes, course.control, course.modified, course.wanted)


class _Course:
    """A decision while it is being made."""

    def __init__(self, facts: Facts) -> None:
        self.facts, self.tables, self.control = facts, dict(facts.tables), facts.control
        self.live = {number: outcome for number, outcome in facts.outcomes.items() if not outcome.over}
        self.plans: dict[int, MigrationPlan] = {}
        self.modifications: dict[int, Modification] = {}
        for number, plan in facts.plans.items():
            if isinstance(plan, Modification):
                self.modifications[number] = plan
            else:
                self.plans[number] = plan
        self.changed: dict[int, Outcome] = {}
        self.modified: Changed | None = None
        self.wanted = -1

    def note(self, outcome: Outcome) -> None:
        if outcome.over and not outcome.over_ms:
            outcome = replace(outcome, over_ms=self.facts.clock_ms)
        self.changed[outcome.number] = outcome
        if outcome.over:
            self.live.pop(outcome.number, None)
        else:
            self.live[outcome.number] = outcome

    def look_back(self) -> None:
        """Notes how long the last epoch took, for the commands that had a part in it; and which workers are empty."""
        for number, outcome in self.facts.outcomes.items():
            mine = 0 <= outcome.began <= self.facts.epoch - 1 <= outcome.last
            seen = self._with_cost(outcome) if mine and self.facts.took_ms else self._while_waiting(outcome)
            if seen != outcome:
                self.changed[number] = seen
                if number in self.live:
                    self.live[number] = seen
            if outcome.drains in self.facts.empty and leaving(outcome, self.facts.generation):
                known, trouble = self.changed.get(number, outcome), self.facts.empty[outcome.drains]
                self.changed[number] = replace(known, reason=trouble, empty_ms=0 if trouble else self.facts.clock_ms)

    def _while_waiting(self, outcome: Outcome) -> Outcome:
        """With what the last epoch has checked ahead for it, if it was waiting then."""
        ahead = self.facts.spent.coming if outcome.since_ms and not outcome.over else 0
        return replace(outcome, sources=_summed(outcome.sources, {"ahead": ahead})) if ahead else outcome

    def _with_cost(self, outcome: Outcome) -> Outcome:
        """With what the last epoch, in which it had a part, took and spent."""
        spent = self.facts.spent
        return replace(
            outcome,
            stall_ms=max(outcome.stall_ms, round(self.facts.took_ms, 1)),
            fetch_ms=round(outcome.fetch_ms + spent.fetch_ms, 1),
            load_ms=round(outcome.load_ms + spent.load_ms, 1),
            sources=_summed(outcome.sources, {name: size for name, size in spent.sources.items() if name != "ahead"}),
        )

    def answer(self, heard: Heard) -> None:
        self.control = heard.number + 1
        outcome = Outcome(
            heard.number, heard.verb, "waiting", sender=heard.sender, at_ms=heard.at_ms, heard_ms=self.facts.clock_ms
        )
        if isinstance(heard.ask, MigrationPlan):
            plan = heard.ask
            total = sum(max(0, move.bytes) for moves in plan.rounds for move in moves)
            text = f"{plan.bins} bins, {plan.strategy}"[:200]
            outcome = replace(outcome, rounds=len(plan.rounds), bytes=min(total, 2**63 - 1), drains=plan.drains[:200])
            outcome = replace(outcome, text=text)
            outcome = self._judged(outcome, plan)
            if not outcome.over:
                self.plans[heard.number] = plan
        elif isinstance(heard.ask, Modification):
            outcome = self._proposed(replace(outcome, text=heard.ask.text[:2000]), heard.ask)
        elif isinstance(heard.ask, Cancel):
            outcome = self._cancel(heard.ask, outcome)
        else:
            outcome = replace(outcome, state="refused", reason=heard.trouble)
        self.note(outcome)

    def _cancel(self, ask: Cancel, outcome: Outcome) -> Outcome:
        target = self.live.get(ask.number)
        if target is None:
            known = self.changed.get(ask.number) or self.facts.outcomes.get(ask.number)
            found = f"it is {known.state}" if known else "there is no such command, or it ended long ago"
            return replace(outcome, state="refused", reason=f"command {ask.number} is not under way: {found}")
        self.note(replace(target, state="cancelled", reason=f"by command {outcome.number}"))
        return replace(outcome, state="done")

    def _proposed(self, outcome: Outcome, ask: Modification) -> Outcome:
        if ask.store != self.facts.store:
            reason = f"it was made for another query (store id {ask.store[:40]!r}, this is {self.facts.store})"
            return replace(outcome, state="refused", reason=reason)
        if ask.start.condition is not None and ask.start.condition.trouble:
            return replace(outcome, state="refused", reason=ask.start.condition.trouble)
        stale = self._outdated(ask)
        if stale:
            return replace(outcome, state="refused", reason=stale, stale=True)
        self.modifications[outcome.number] = ask
        return replace(outcome, state="proposed")

    def _outdated(self, ask: Modification) -> str:
        if ask.version == self.facts.version:
            return ""
        return (
            f"the modification is stale: it was made for version {ask.version} of the graph, found "
            f"{self.facts.version}; make it again"
        )

    def modify(self) -> None:
        """Takes modifications as far as they are prepared; the first that may take effect does."""
        for number in sorted(self.live):
            outcome = self.live[number]
            if outcome.state not in LIFE or number in self.facts.unread:
                continue
            ask, candidate = self.modifications.get(number), self.facts.candidates.get(number)
            if ask is None:
                self.note(replace(outcome, state="aborted", reason="its command can no longer be read"))
            elif self.modified is not None or self._outdated(ask):
                stale = self._outdated(ask) or f"command {self.modified.number if self.modified else 0} came first"
                self.note(replace(outcome, state="refused", reason=stale, stale=True))
            elif candidate is not None:
                self._take_on(outcome, ask, candidate)

    def _take_on(self, outcome: Outcome, ask: Modification, candidate: Candidate) -> None:
        outcome = replace(outcome, reached_ms={**outcome.reached_ms, **candidate.reached_ms})
        if candidate.state in ("aborted", "rolled back"):
            self.note(replace(outcome, state=candidate.state, reason=candidate.reason[:2000]))
        elif candidate.state == "prepared" and candidate.changed is not None and ask.trial:
            text = "\n".join(filter(None, [f"would {ask.text}", candidate.changed.told]))
            self.note(replace(outcome, state="done", text=text))
        elif candidate.state == "prepared" and not candidate.waits and self._may_change(ask, candidate):
            self.modified = candidate.changed
            epoch = self.facts.epoch
            self.note(replace(outcome, state="committed", rounds=1, done=1, began=epoch, last=epoch))
        else:
            if (
                candidate.state == "prepared"
                and self.wanted < 0
                and candidate.waits
                and self._may_change(ask, candidate)
            ):
                self.wanted = outcome.number
            if candidate.state in LIFE and _further(candidate.state, outcome.state):
                self.note(replace(outcome, state=candidate.state))

    def _may_change(self, ask: Modification, candidate: Candidate) -> bool:
        """Whether it is time, and nobody is moving what would be called otherwise, or gone."""
        facts, changed = self.facts, candidate.changed
        assert changed is not None
        watermark = min(facts.watermarks.values(), default=-(2**63))
        moving = {
            step
            for number, outcome in self.live.items()
            if outcome.state == "running" and number in self.plans
            for step in self.plans[number].versions
        }
        opened = bool(changed.brings) and not candidate.waits  # it was due when the stream was asked for
        due = opened or ask.start.reached(facts.epoch, facts.clock_ms, watermark, facts.numbers)
        due = due and not any(self.live[number].state == "running" for number in facts.unread if number in self.live)
        return due and not moving & set(changed.steps)

    def _judged(self, outcome: Outcome, plan: MigrationPlan, due: bool = False) -> Outcome:
        """The outcome as it was, or refused."""
        trouble = misfit(plan, self.facts, self.tables)
        late = "" if due else _past(plan, self.facts, outcome.at_ms)
        stale = "" if trouble else late or staleness(plan, self.tables) or _renamed(plan, self.facts)
        stale = stale or ("" if trouble else _moved_in(plan, self.facts))
        stale = stale or ("" if trouble else self._conflict(plan, due))
        # The moves fitted these versions when they were heard, and a version is one table.
        trouble = trouble or stale or ("" if due else _broken(plan, self.tables))
        return replace(outcome, state="refused", reason=trouble[:1000], stale=bool(stale)) if trouble else outcome

    def _conflict(self, plan: MigrationPlan, due: bool) -> str:
        """Which running migration moves one of the plan's steps, if any. A plan that is not due yet has time."""
        if not due and plan.start != Start():
            return ""
        for number, outcome in self.live.items():
            if outcome.state == "running" and number in self.facts.unread:
                return f"command {number} ({outcome.verb}) is under way, and cannot be read just now; plan again"
            shared = sorted(set(plan.versions) & set(self.plans[number].versions)) if number in self.plans else []
            if outcome.state == "running" and shared:
                return (
                    f"command {number} ({outcome.verb}) is moving ranges of step {shared[0]!r}, {outcome.done} of "
                    f"{outcome.rounds} rounds done; wait for it or cancel it, then plan again"
                )
        return ""

    def go_on(self) -> None:
        for number in sorted(self.live):
            outcome, plan = self.live[number], self.plans.get(number)
            if number in self.facts.unread or outcome.state in LIFE:
                continue
            if plan is None:
                self.note(replace(outcome, state="cancelled", reason="its command can no longer be read"))
            elif outcome.state == "running" and _renamed(plan, self.facts):
                self.note(replace(outcome, state="cancelled", reason=_renamed(plan, self.facts)))
            elif outcome.state == "running":
                if self.facts.epoch > outcome.last + plan.gap:
                    self._cut_over(outcome, plan)
            elif self._is_time(plan):
                outcome = self._judged(outcome, plan, due=True)
                if outcome.over:
                    self.note(outcome)
                else:
                    self._cut_over(self._begun(outcome), plan)

    def _begun(self, outcome: Outcome) -> Outcome:
        return replace(
            outcome,
            state="running",
            began=self.facts.epoch,
            generation=self.facts.generation,
            began_ms=self.facts.clock_ms,
        )

    def _is_time(self, plan: MigrationPlan) -> bool:
        facts = self.facts
        return plan.start.reached(facts.epoch, facts.clock_ms, _watermark(plan, facts), facts.numbers)

    def _cut_over(self, outcome: Outcome, plan: MigrationPlan) -> None:
        """Carries the next round out, or has it wait for what it brings."""
        lacking, older = self.facts.lacking.get(outcome.number, (0, 0)) if plan.prepared else (0, 0)
        since_ms = self._since(outcome)
        late = self.facts.clock_ms - since_ms > plan.deadline_s * 1000
        there = lacking <= plan.budget or (outcome.number in self.facts.through and not older)
        if there and (late or outcome.number not in self.facts.unchecked):
            waited_ms = self.facts.clock_ms - since_ms if outcome.since_ms else 0
            outcome = replace(outcome, since_ms=0, lacking=lacking, waited_ms=outcome.waited_ms + waited_ms)
            self._round(outcome, plan)
            return
        if late:
            reason = (
                f"round {outcome.done} was not prepared within {plan.deadline_s:g} s: {lacking:,} bytes are still "
                f"lacking where it goes, and {plan.budget:,} may. What has moved stays; the rest is where it was"
            )
            self.note(replace(outcome, state="cancelled", reason=reason))
        else:
            self.note(replace(outcome, since_ms=since_ms, lacking=lacking))

    def _since(self, outcome: Outcome) -> int:
        """Since when its next round has been waiting, or does from now on."""
        return max(outcome.since_ms or self.facts.clock_ms, min(self.facts.started_ms, self.facts.clock_ms))

    def _round(self, outcome: Outcome, plan: MigrationPlan) -> None:
        """Carries out the next round, or as many as are carried out together."""
        count = rounds_at_once(plan, outcome.done, self.facts.costs)
        for number in range(outcome.done, outcome.done + count):
            self.tables.update(plan.after(self.tables, number))
        done = outcome.done + count
        state = "done" if done == outcome.rounds else "running"
        self.note(replace(outcome, state=state, done=done, last=self.facts.epoch))


def _summed(known: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: known.get(name, 0) + more.get(name, 0) for name in {**known, **more}}


def _further(state: str, than: str) -> bool:
    """Whether a state of a modification comes after another. One that a new driver prepares again does not go back."""
    return list(LIFE).index(state) > list(LIFE).index(than)


def misfit(plan: MigrationPlan, facts: Facts, tables: Mapping[str, RoutingTable]) -> str:
    """Why a plan cannot be one for this query; empty if it can."""
    if plan.store != facts.store:
        return f"the plan was made for another query (store id {plan.store[:40]!r}, this is {facts.store})"
    if not plan.rounds:
        return "the plan moves nothing"
    unknown = sorted({*plan.versions, *plan.bin_bits} - set(tables))
    if unknown:
        return f"no step {unknown[0]!r}; the query has {', '.join(sorted(tables))}"
    if plan.gap < 0:
        return f"gap={plan.gap}: give 0 or more epochs"
    for step, bits in plan.bin_bits.items():
        if step not in plan.versions:
            return f"it changes the bins of step {step!r}, whose version the plan does not give"
        if not 0 <= bits <= MAX_BIN_BITS:
            return f"it gives step {step!r} 2**{bits} bins: give between 1 and 2**{MAX_BIN_BITS}"
    if plan.start.condition is not None and plan.start.condition.trouble:
        return plan.start.condition.trouble
    if plan.start.event_time is not None and facts.epoch > 0 and not set(plan.versions) & set(facts.watermarks):
        return f"it starts at an event time, and no step of {', '.join(sorted(plan.versions))} has event time"
    return ""


def _renamed(plan: MigrationPlan, facts: Facts) -> str:
    """Why the name of the worker that a plan drains no longer means that worker; empty if it does."""
    if plan.drains and plan.generation != facts.generation:
        return (
            f"worker {plan.drains[:40]!r} was one of driver {plan.generation}, and this is driver {facts.generation}, "
            "whose workers have other names; plan again"
        )
    if plan.drains and facts.workers and plan.drains not in facts.workers:
        return f"worker {plan.drains[:40]!r} is gone; there are {', '.join(sorted(facts.workers))}"
    return ""


def _moved_in(plan: MigrationPlan, facts: Facts) -> str:
    """Why a drain would not empty its worker: a slot has been placed there since it was planned."""
    if not plan.drains or plan.versions.keys() != facts.tables.keys():
        return ""
    emptied = {move.origin for moves in plan.rounds for move in moves}
    other = sorted(set(facts.workers.get(plan.drains, ())) - emptied)
    return f"worker {plan.drains[:40]!r} has slot {other[0]} by now, which the plan does not empty" if other else ""


def _past(plan: MigrationPlan, facts: Facts, sent_ms: int) -> str:
    """Which start is over as the plan is heard. A wall time may have passed while the command was on its way."""
    start = plan.start
    if start.epoch is not None and start.epoch < facts.epoch:
        return f"the plan starts at epoch {start.epoch}, which is past: the next one is {facts.epoch}"
    if start.clock_ms is not None and start.clock_ms < min(facts.clock_ms, sent_ms or facts.clock_ms):
        return f"the plan starts {duration_text((facts.clock_ms - start.clock_ms) / 1000)} in the past"
    if start.event_time is not None and _watermark(plan, facts) >= start.event_time:
        behind = (_watermark(plan, facts) - start.event_time) / 10**6
        return f"the plan starts at an event time that is past: the watermark is {duration_text(behind)} beyond it"
    return ""


def _watermark(plan: MigrationPlan, facts: Facts) -> int:
    """The least of the steps that a plan touches."""
    return min((facts.watermarks[step] for step in plan.versions if step in facts.watermarks), default=-(2**63))


def staleness(plan: MigrationPlan, tables: Mapping[str, RoutingTable]) -> str:
    """Which routing version a plan was not made for; empty if it was made for these (G8)."""
    for step, version in plan.versions.items():
        if tables[step].version != version:
            return (
                f"the plan is stale: it was made for routing version {version} of step {step!r}, "
                f"found {tables[step].version}; plan again"
            )
    return ""


def _broken(plan: MigrationPlan, tables: Mapping[str, RoutingTable]) -> str:
    """What is wrong with the moves themselves, round by round."""
    count = max(table.slot_count for table in tables.values())
    most = count + sum(map(len, plan.rounds))
    moves: dict[str, list[Move]] = {step: [] for step in plan.versions}
    numbers: dict[str, list[int]] = {step: [] for step in plan.versions}
    for number, together in enumerate(plan.rounds):
        for move in together:
            if move.step not in moves:
                return f"round {number} moves a range of step {move.step!r}, whose version the plan does not give"
            if not 0 <= move.target < most:
                return f"round {number} moves {move.range} to slot {move.target}, which cannot be: there are {count}"
            moves[move.step].append(move)
            numbers[move.step].append(number)
    return next(filter(None, (_misplaced(step, tables[step], moves[step], numbers[step]) for step in moves)), "")


def _misplaced(step: str, table: RoutingTable, moves: Sequence[Move], rounds: Sequence[int]) -> str:
    """Which range of a step is not where a move takes it from, or moves twice in a round.

    In whole columns, because a plan may have a round for each bin, and an epoch waits for the answer. The key space is
    cut at every edge of the table and of the moves. What each piece goes through, round by round, must be a chain: it
    begins at the piece's owner, and every move takes it from where the one before has brought it.
    """
    numbers = np.array(rounds, np.int64)
    firsts = np.array([move.range.first for move in moves], np.uint64)
    lasts = np.array([move.range.last for move in moves], np.uint64)
    order = np.lexsort((firsts, numbers))
    one, next_ = order[:-1], order[1:]
    clashes = next_[(numbers[one] == numbers[next_]) & (firsts[next_] <= lasts[one])]
    if len(clashes):
        clash = int(clashes[0])
        return (
            f"round {rounds[clash]} moves {moves[clash].range} of step {step!r}, which overlaps another of its ranges"
        )
    ends = lasts[lasts < np.uint64(LAST)] + np.uint64(1)
    points = np.unique(np.concatenate([np.array(table.firsts, np.uint64), firsts, ends]))
    froms = np.searchsorted(points, firsts)
    counts = np.searchsorted(points, lasts, side="right") - froms
    if counts.sum() > MAX_PIECES:
        return f"it moves step {step!r} in {counts.sum()} pieces, more than {MAX_PIECES}: plan less at a time"
    mover = np.repeat(np.arange(len(moves)), counts)
    piece = np.arange(len(mover)) + np.repeat(froms - (np.cumsum(counts) - counts), counts)
    order = np.lexsort((numbers[mover], piece))
    mover, piece = mover[order], piece[order]
    found = table.lookup(points)[piece].astype(np.int64)
    again = np.flatnonzero(piece[1:] == piece[:-1])
    found[again + 1] = np.array([move.target for move in moves], np.int64)[mover[again]]
    origins = np.array([move.origin if 0 <= move.origin < 1 << 31 else -1 for move in moves], np.int64)
    wrong = mover[found != origins[mover]]
    if not len(wrong):
        return ""
    first = int(wrong[np.argmin(numbers[wrong])])
    move = moves[first]
    where = ", ".join(map(str, np.unique(found[mover == first]).tolist()[:8]))
    return f"round {rounds[first]} takes {move.range} of step {step!r} from slot {move.origin}: it is at {where}"


def draining(outcomes: Iterable[Outcome], generation: int) -> tuple[frozenset[str], frozenset[str]]:
    """The workers that are being emptied, and those that have been, by this driver."""
    mine = [outcome for outcome in outcomes if outcome.drains and outcome.generation == generation]
    closing = frozenset(outcome.drains for outcome in mine if outcome.state == "running")
    return closing, frozenset(outcome.drains for outcome in mine if outcome.state == "done")
