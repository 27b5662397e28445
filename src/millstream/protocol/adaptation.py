"""Adaptation: what a query does about its own load. Policies are pure functions from facts to a decision.

Rules
-----
- A policy is a fold: facts and memory in, a decision and the next memory out. It has no state of its own, so the same
  facts give the same decisions, and a driver that takes over begins with an empty memory.
- Never two at once: while a migration is under way, or is waiting, nothing is decided; nor for `cooldown` epochs after.
- Hysteresis: a policy acts when its number has been above a high mark for some epochs in a row, and goes on until the
  number is below a low mark.
- Churn is limited: whatever policies say, no round moves more than `pace` bytes (but a move that is larger, alone), and
  no `window` epochs see more bytes moved than `churn` times the state.
- A decision says why, with numbers; so does one that changes nothing. Who only prints decisions has a dry run.

Loads are of cells (`protocol.statistics`), not of slots, so what is decided is judged by what each slot will have then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from millstream.errors import UserError
from millstream.protocol.levelling import Flags, Limits, fair_shares, levelled
from millstream.protocol.migration import MigrationPlan, Move, size_text
from millstream.protocol.placement import place
from millstream.protocol.planner import TOLERANCE, Cells, plan_bins, plan_owners
from millstream.protocol.routing import Slot
from millstream.protocol.statistics import MAX_BITS
from millstream.protocol.strategies import Numbers
from millstream.protocol.survey import Facts, Survey, Worker

# -- what is decided --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, and why. `more` is how many workers to ask for; `gives` names the worker that can be given back once
    the plan, which drains it, is done.

    >>> print(Decision("balance: slot 0 has 1.02 times its fair share, and 1.25 is tolerated"))
    nothing to do
      balance: slot 0 has 1.02 times its fair share, and 1.25 is tolerated
    """

    why: str
    plan: MigrationPlan | None = None
    more: int = 0
    gives: str = ""

    @property
    def acts(self) -> bool:
        """Whether anything is to be done."""
        return bool(self.more or self.gives or (self.plan is not None and self.plan.rounds))

    def __str__(self) -> str:
        lines = self.why.splitlines()
        if self.more:
            lines.append(f"ask for {_count(self.more, 'worker')} more")
        if self.plan is not None and self.plan.rounds:
            lines += str(self.plan).splitlines()
        if self.gives:
            lines.append(f"then give worker {self.gives} back")
        return "\n  ".join(["to do" if self.acts else "nothing to do", *lines])


@dataclass(frozen=True, slots=True)
class Memory:
    """What is remembered from one decision to the next. `notes` are the policies' own, under names that begin with
    theirs. `last` is the epoch of the last action, or of the last round of its migration; -1 if there was none. `spent`
    are the migrations, each with the epoch of its last round and its bytes."""

    notes: Mapping[str, float] = field(default_factory=dict)
    last: int = -1
    spent: tuple[tuple[int, int], ...] = ()


class Policy(Protocol):
    """Anything that decides. What it asks for is done within the limits of `Adaptive`."""

    def decide(self, facts: Facts, memory: Memory) -> tuple[Decision, Memory]:
        """What to do after an epoch, and what to remember."""
        ...


def pressed(memory: Memory, name: str, epoch: int, above: bool, below: bool, persist: int) -> tuple[bool, Memory]:
    """Whether to act: once a number has been above its high mark `persist` epochs in a row, until it is below its low
    one.

    >>> memory, answers = Memory(), []
    >>> for epoch, number in enumerate([9, 9, 5, 1, 9]):
    ...     act, memory = pressed(memory, "x", epoch, number > 8, number < 2, persist=2)
    ...     answers.append(act)
    >>> answers
    [False, True, True, False, False]
    """
    on, since, seen = (memory.notes.get(f"{name}.{word}", -1.0) for word in ("on", "since", "seen"))
    if not above or since < 0 or epoch > seen + 1:
        since = epoch if above else -1.0
    acts = not below and (on > 0 or (above and epoch - since + 1 >= persist))
    told = {f"{name}.on": float(acts), f"{name}.since": float(since), f"{name}.seen": float(epoch)}
    return acts, replace(memory, notes={**memory.notes, **told})


def released(memory: Memory, name: str) -> Memory:
    """The memory of a policy that has done what there was to do: it begins anew."""
    return replace(memory, notes={**memory.notes, f"{name}.on": 0.0, f"{name}.since": -1.0})


_BALANCE, _ISOLATE = "balance", "isolate"


# -- the policies -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Balance:
    """Bins go from the slots with too much load to those with too little.

    It begins when the worst slot has had more than `high` times its fair share for `persist` epochs, and goes on until
    a plan brings that below `low`. It does nothing while the busiest worker is below `least_busy`, or where a plan
    would bring the worst slot down by less than `least_gain`. What may be chance does not count.
    """

    high: float = 1.25
    low: float = 1.1
    persist: int = 2
    tolerance: float = TOLERANCE
    least_gain: float = 0.1
    least_busy: float = 0.05

    def __post_init__(self) -> None:
        _check("Balance", 1 < self.low <= self.high and 0 <= self.tolerance < 1, "1 < low <= high, 0 <= tolerance < 1")

    def decide(self, facts: Facts, memory: Memory) -> tuple[Decision, Memory]:
        """A plan, if the worst slot has had too much for long enough."""
        unknown = _unknown(facts, self.least_busy)
        if unknown:
            return Decision(unknown), memory
        survey = facts.survey
        worst = float(survey.ratios[survey.worst])
        high = max(self.high, 1 + survey.chance)
        acts, memory = pressed(memory, _BALANCE, facts.epoch, worst > high, worst < self.low, self.persist)
        has = f"slot {survey.worst} has {worst:.2f} times its fair share"
        if not acts:
            word = f"{high:.2f} is tolerated" if worst <= high else f"waiting for {self.persist} epochs in a row"
            return Decision(f"{has}, and {word}"), memory
        final = _level(facts, survey, tolerance=self.tolerance, low=self.low)
        after = survey.worst_after(final)
        if after > worst - max(self.least_gain, survey.chance):
            return Decision(f"{has}, but no move that may be made helps: {_reason(facts)}"), memory
        plan = _planned(facts, "balance", final)
        if after <= self.low:
            memory = released(memory, _BALANCE)
        return Decision(f"{has}: {_moves(plan)}, after which the worst has {after:.2f} times", plan), memory


@dataclass(frozen=True, slots=True)
class Isolate:
    """A cell that alone has more than `share` of what is fair for its slot is set apart, if the slot has too much.

    If the step has few bins, it gets more: then it is known where in the range the load is, and parts of it can move.
    A range that is still hot in the finest cells is a key, or a few, and cannot be split: the other bins of its slot go
    elsewhere, until it is alone.
    """

    share: float = 0.5
    high: float = 1.25
    low: float = 1.1
    persist: int = 2
    least_gain: float = 0.1
    least_busy: float = 0.05

    def __post_init__(self) -> None:
        _check("Isolate", self.share > 0 and 1 < self.low <= self.high, "0 < share, 1 < low <= high")

    def decide(self, facts: Facts, memory: Memory) -> tuple[Decision, Memory]:
        """More bins, or moves that leave the hot range alone."""
        unknown = _unknown(facts, self.least_busy)
        if unknown:
            return Decision(unknown), memory
        survey = facts.survey
        fair = fair_shares(survey.raw, survey.room)[survey.owners]
        hot = np.flatnonzero(survey.raw > self.share * fair)
        if not len(hot):
            return Decision(f"no range has more than {self.share:.0%} of what is fair for a slot"), memory
        cell = int(hot[np.lexsort((-survey.raw[hot], -survey.real[survey.owners[hot]]))[0]])
        slot, share = int(survey.owners[cell]), float(survey.raw[cell] / fair[cell])
        worst, high = float(survey.real[slot]), max(self.high, 1 + survey.chance)
        acts, memory = pressed(memory, _ISOLATE, facts.epoch, worst > high, worst < self.low, self.persist)
        group, place_in = _group(survey, cell)
        has = f"{_where(group, place_in)} has {share:.0%} of what is fair for a slot, and slot {slot} "
        has += f"{worst:.2f} times its fair share"
        if not acts:
            word = f"{high:.2f} is tolerated" if worst <= high else f"waiting for {self.persist} epochs"
            return Decision(f"{has}; {word}"), memory
        if group.bits < MAX_BITS:
            bits = group.bits + min(MAX_BITS - group.bits, max(2, _up(np.log2(share / 0.25))))
            plan = plan_bins(facts.layout, 1 << bits, steps=group.steps)
            memory = replace(memory, notes={**memory.notes, f"{_BALANCE}.on": 1.0})  # it has waited long enough
            return Decision(f"{has}: it gets {1 << bits - group.bits} bins instead of one", plan), memory
        return self._apart(facts, cell, has), memory

    def _apart(self, facts: Facts, cell: int, has: str) -> Decision:
        survey = facts.survey
        slot = int(survey.owners[cell])
        others = survey.owners == slot
        others[cell] = False
        rest = float(survey.loads[others].sum())
        if rest <= 0.1 * survey.fair[slot]:
            return Decision(f"{has}: a single hot key cannot be split, and it is alone already; it is left there")
        final = _level(facts, survey, stays=np.arange(len(survey.owners)) == cell, low=self.low)
        if survey.worst_after(final) > survey.ratios.max() - max(self.least_gain, survey.chance):
            return Decision(f"{has}, but no move that may be made helps: {_reason(facts)}")
        plan = _planned(facts, "isolate", final)
        return Decision(f"{has}: the others of its slot give way, {_moves(plan)}", plan)


@dataclass(frozen=True, slots=True)
class Scale:
    """As many slots, and workers, as it takes for cores to be busy to the `target`.

    It grows when they have been busier than `high` for `persist` epochs: first slots, up to the cores that are there,
    then workers, up to `most_workers`. A backlog counts as work that is to be done within `catch_up` epochs, unless a
    slot has more than `even` times its fair share: then it is not cores that are lacking.

    If workers are fixed (`most_workers=None`), it shrinks the number of slots when cores have been below `low` for
    `persist_in` epochs, down to one for each worker. Giving workers back is what `GiveBack` does.
    """

    target: float = 0.6
    high: float = 0.8
    low: float = 0.3
    persist: int = 2
    persist_in: int = 8
    most_workers: int | None = None
    catch_up: int = 10
    even: float = 1.5

    def __post_init__(self) -> None:
        _check("Scale", 0 < self.low < self.target < self.high <= 1, "0 < low < target < high <= 1")

    def decide(self, facts: Facts, memory: Memory) -> tuple[Decision, Memory]:
        """More slots, a request for workers, both, or fewer slots."""
        if not facts.workers:
            return Decision("no worker is known"), memory
        survey = facts.survey
        usable = float(survey.room[list(survey.slots)].sum())
        even = float(survey.real.max()) <= self.even
        demand = facts.demand * (1 + (facts.backlog / self.catch_up if even else 0.0))
        busy = demand / usable
        has = f"{facts.demand:.1f} of {usable:.1f} cores are busy"
        if facts.backlog >= 0.05:
            has += f", with {_count(round(facts.backlog, 1), 'epoch')} of backlog{'' if even else ' by skew'}"
        has += f": {busy:.0%}"
        out, memory = pressed(memory, "scale.out", facts.epoch, busy > self.high, busy <= self.high, self.persist)
        low = self.most_workers is None and busy < self.low
        shrinks, memory = pressed(memory, "scale.in", facts.epoch, low, busy > self.target, self.persist_in)
        needed = max(1, _up(demand / self.target - 1e-9))
        if out:
            return self._grow(facts, needed, has), memory
        if shrinks and max(needed, len(facts.workers)) < len(survey.slots):
            return _to_slots(facts, max(needed, len(facts.workers)), has, self.target), memory
        return Decision(f"{has}, and {self.low:.0%} to {self.high:.0%} is tolerated"), memory

    def _grow(self, facts: Facts, needed: int, has: str) -> Decision:
        cores = _cores(facts.workers.values())
        decision = Decision(has)
        if min(needed, cores) > len(facts.survey.slots):
            decision = _to_slots(facts, min(needed, cores), has, self.target)
        each = cores / len(facts.workers)
        lacking = max(0, _up((needed - cores) / each)) - facts.asked
        allowed = max(0, (self.most_workers or 0) - len(facts.workers) - facts.asked)
        more = min(lacking, allowed)
        if more > 0:
            why = f"{decision.why}; {needed} cores are needed for {self.target:.0%}, and {cores} are there"
            return replace(decision, why=why, more=more)
        if decision.acts:
            return decision
        if facts.asked:
            return Decision(f"{has}; {_count(facts.asked, 'worker')} asked for are on their way")
        return Decision(f"{has}, but there are no more cores to be had")


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A worker is drained and given back if the others can do its work, busy to the `target` at most.

    That must have been so for `persist` epochs. Among those that will do, it is the one with the least state. The
    others must be able to do `cover` times the work: so what was given back is not asked for again at once.
    """

    target: float = 0.6
    persist: int = 8
    least_workers: int = 1
    cover: float = 1.1

    def __post_init__(self) -> None:
        _check("GiveBack", 0 < self.target <= 1 <= self.cover and self.least_workers >= 1, "0 < target <= 1 <= cover")

    def decide(self, facts: Facts, memory: Memory) -> tuple[Decision, Memory]:
        """The name of a worker and the plan that drains it."""
        if len(facts.workers) <= self.least_workers:
            return Decision(f"there are {len(facts.workers)} workers, and at least {self.least_workers} stay"), memory
        demand = facts.demand
        cores = sum(worker.cores for worker in facts.workers.values())
        spare = {
            name: demand / (cores - worker.cores)
            for name, worker in facts.workers.items()
            if demand * self.cover <= self.target * (cores - worker.cores)
        }
        below = not spare or facts.asked > 0 or facts.backlog >= 1
        acts, memory = pressed(memory, "give back", facts.epoch, not below, below, self.persist)
        has = f"{demand:.1f} of {cores:.0f} cores are busy"
        if below:
            return Decision(f"{has}: without one of {len(facts.workers)} workers it would be too much"), memory
        if not acts:
            return Decision(f"{has}: one worker could go, once that has been so for {self.persist} epochs"), memory
        survey = facts.survey
        slots = {name: [slot for slot in survey.slots if survey.hosts.get(slot) == name] for name in spare}
        bytes_of = np.bincount(survey.owners, facts.sizes, len(survey.room))
        sizes = {name: float(bytes_of[slots[name]].sum()) for name in spare}
        name = min(spare, key=lambda worker: (sizes[worker], len(slots[worker]), _natural(worker)))
        rest = {other: worker for other, worker in facts.workers.items() if other != name}
        staying = [slot for slot in survey.slots if slot not in slots[name]]
        needed = min(max(1, _up(demand * self.cover / self.target)), _cores(rest.values()))
        staying += _unused(survey.slots, max(0, needed - len(staying)))
        hosts = place(staying, rest, survey.hosts, known=rest)
        target = survey.grown(sorted(staying), hosts, rest)
        why = f"{has}: without worker {name}, which has {size_text(sizes[name])}, the others are {spare[name]:.0%} busy"
        plan = _planned(facts, "drain", _level(facts, target), drains=name)
        return Decision(why, plan, gives=name), memory


# -- the whole --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Adaptive:
    """Policies, asked in order until one has something to do; and the limits that all of them are under.

    >>> from millstream.protocol.layout import Layout
    >>> Adaptive().decide(Facts(3, Layout("s", {}), {}, moving=1), Memory())[0].why
    'a migration is under way: nothing is decided until it is done'
    """

    policies: Sequence[Policy] = field(default_factory=lambda: (Scale(), Isolate(), Balance()))
    cooldown: int = 3
    """For so many epochs after an action nothing is done."""
    pace: int = 256_000_000
    """The most bytes that one epoch may move; 0 is no limit."""
    churn: float = 1.0
    """The most bytes that may move within a window, in multiples of the state."""
    window: int = 32
    """So many epochs."""

    def __post_init__(self) -> None:
        good = self.cooldown >= 0 and self.pace >= 0 and self.churn > 0 and self.window >= 1
        _check("Adaptive", good, "cooldown >= 0, pace >= 0, churn > 0, window >= 1")

    def decide(self, facts: Facts, memory: Memory) -> tuple[Decision, Memory]:
        """What the first policy says that has something to do, cut to the limits."""
        memory = self._recalled(facts, memory)
        if facts.moving:
            last, spent = max(memory.last, facts.epoch), memory.spent
            if spent:  # its rounds may come later than was thought
                spent = (*spent[:-1], (max(spent[-1][0], facts.epoch), spent[-1][1]))
            why = "a migration is under way: nothing is decided until it is done"
            return Decision(why), replace(memory, last=last, spent=spent)
        if not facts.layout.tables:
            return Decision("the query has no step with state"), memory
        rest = memory.last + self.cooldown - facts.epoch
        if memory.last >= 0 and rest >= 0 and self.cooldown:
            return Decision(f"the last action was at epoch {memory.last}: {_count(rest + 1, 'epoch')} to wait"), memory
        spent = tuple(each for each in memory.spent if each[0] > facts.epoch + 1 - self.window)
        memory = replace(memory, spent=spent)
        facts = replace(facts, pace=self.pace, churn=self.churn, spent=sum(size for _, size in spent))
        reasons: list[str] = []
        for policy in self.policies:
            decision, memory = policy.decide(facts, memory)
            decision = self._cut(decision, facts)
            reasons.append(f"{_name(policy)}: {decision.why}")
            if decision.acts:
                return replace(decision, why="\n".join(reasons)), self._remembered(decision, facts, memory)
        return Decision("\n".join(reasons)), memory

    def _recalled(self, facts: Facts, memory: Memory) -> Memory:
        if memory.last >= 0 or memory.spent or not facts.moved:
            return memory
        return replace(memory, last=max(epoch for epoch, _ in facts.moved), spent=tuple(sorted(facts.moved)))

    def _cut(self, decision: Decision, facts: Facts) -> Decision:
        """The decision in rounds that the pace allows, as many as the churn limit does. A drain is whole or is not."""
        plan = decision.plan
        if plan is None or not plan.rounds:
            return decision
        plan = _paced(plan, self.pace)
        decision = replace(decision, plan=plan)
        if plan.bytes <= facts.budget:
            return decision
        limit = (
            f"{size_text(facts.spent)} of {size_text(facts.spent + facts.budget)} that {self.window} epochs may move"
        )
        limit = f"{decision.why}; but {limit} have moved already"
        sums = np.cumsum([sum(move.bytes for move in moves) for moves in plan.rounds])
        rounds = 0 if plan.drains else int(np.searchsorted(sums, facts.budget, side="right"))
        if not rounds:
            return replace(decision, why=f"{limit}, so that this has to wait", plan=None, gives="")
        why = f"{limit}, so that {rounds} of {len(plan.rounds)} rounds are left"
        plan = _renumbered(replace(plan, rounds=plan.rounds[:rounds]), facts.survey.slots)
        return replace(decision, why=why, plan=plan)

    def _remembered(self, decision: Decision, facts: Facts, memory: Memory) -> Memory:
        """Where nothing moves and no worker is asked for, there is nothing to wait for."""
        last, spent = facts.epoch if decision.more else memory.last, memory.spent
        if decision.plan is not None and (decision.plan.drains or any(decision.plan.rounds)):
            last = facts.epoch + decision.plan.epochs
            spent = (*spent, (last, decision.plan.bytes))
        return replace(memory, last=last, spent=spent)


# -- what policies have in common -------------------------------------------------------------------------------------


def _unknown(facts: Facts, least_busy: float) -> str:
    """Why the balance of load is no concern; empty if it is."""
    survey = facts.survey
    if len(survey.slots) < 2:
        return "there is one slot"
    if not survey.loads.any():
        return "no load is known yet"
    busiest = max((worker.busy for worker in facts.workers.values()), default=1.0)
    if busiest < least_busy:
        return f"the busiest worker is {busiest:.0%} busy: there is nothing to gain"
    return ""


def _level(
    facts: Facts, target: Survey, stays: Flags | None = None, tolerance: float = TOLERANCE, low: float = 1.0
) -> Numbers:
    """The owners when the load is on the slots of the target. Those below the low mark give nothing."""
    limits = Limits(tolerance, low - 1, facts.budget, facts.pace or np.inf)
    near = target.near(facts.held)
    return levelled(target.owners, target.loads, facts.sizes, target.room, limits, stays=stays, near=near)


def _planned(facts: Facts, verb: str, final: Numbers, drains: str = "") -> MigrationPlan:
    wanted = facts.survey.parts(final, facts.bins)
    plan = plan_owners(facts.layout, verb, wanted, pace=facts.pace, drains=drains)
    return _renumbered(plan, facts.survey.slots)


def _renumbered(plan: MigrationPlan, slots: Collection[int]) -> MigrationPlan:
    """The plan with the lowest numbers for the slots that it opens: not all that were thought of need get something."""
    opened = sorted({move.target for moves in plan.rounds for move in moves} - set(slots))
    names = dict(zip(opened, map(Slot, _unused(slots, len(opened))), strict=True))
    if all(old == new for old, new in names.items()):
        return plan
    rounds = (tuple(replace(m, target=names.get(m.target, m.target)) for m in moves) for moves in plan.rounds)
    return replace(plan, rounds=tuple(rounds))


def _to_slots(facts: Facts, count: int, has: str, target: float) -> Decision:
    """The plan that brings the load to so many slots: new ones beside those there are, or the rest of them."""
    survey = facts.survey
    slots, present = list(survey.slots), len(survey.slots)
    if count > present:
        slots = sorted([*slots, *_unused(slots, count - present)])
    while len(slots) > count:  # one less where there are most for a core
        crowd = {slot: sum(survey.hosts.get(other) == survey.hosts.get(slot) for other in slots) for slot in slots}
        cores = {slot: facts.workers.get(survey.hosts.get(slot, ""), Worker()).cores for slot in slots}
        slots.remove(max(slots, key=lambda slot: (crowd[slot] / cores[slot], slot)))
    hosts = place(slots, facts.workers, survey.hosts, known=facts.workers)
    final = _level(facts, survey.grown(slots, hosts, facts.workers))
    plan = _planned(facts, "rescale", final)
    why = f"{has}, and {count} slots are needed for {target:.0%} instead of {present}: {_moves(plan)}"
    return Decision(why, plan)


def _unused(slots: Collection[int], count: int) -> list[int]:
    """The lowest numbers that no slot has."""
    return [number for number in range(max(slots) + 1 + count) if number not in slots][:count]


def _group(survey: Survey, cell: int) -> tuple[Cells, int]:
    """The group that a cell belongs to, and its place in it."""
    for each in survey.cells:
        if cell < len(each.owners):
            return each, cell
        cell -= len(each.owners)
    raise IndexError(cell)


def _where(cells: Cells, cell: int) -> str:
    first, last = int(cells.firsts[cell]), int(cells.lasts[cell])
    steps = ", ".join(repr(step) for step in cells.steps[:3])
    return f"range {first:016x}-{last:016x} of step {steps}"


def _reason(facts: Facts) -> str:
    """Why levelling does not help."""
    survey = facts.survey
    mine = np.flatnonzero(survey.owners == survey.worst)
    hottest = int(mine[np.argmax(survey.loads[mine])])
    group, place_in = _group(survey, hottest)
    share = float(survey.loads[hottest] / survey.fair[survey.worst])
    if share > 0.5:
        return f"{_where(group, place_in)} alone has {share:.2f} times that, and what is one key cannot be split"
    if facts.sizes[mine].min() > facts.budget:
        return f"{size_text(facts.spent)} have moved already, and {size_text(facts.budget)} may"
    if facts.pace and facts.sizes[mine].min() > facts.pace:
        return f"its bins have more than the {size_text(facts.pace)} that a round may move"
    return "its bins are too coarse"


def _paced(plan: MigrationPlan, pace: int) -> MigrationPlan:
    """The same moves, in more rounds where one has too much. What several steps move together stays together."""
    if not pace or all(sum(move.bytes for move in moves) <= pace for moves in plan.rounds):
        return plan
    rounds: list[tuple[Move, ...]] = []
    for moves in plan.rounds:
        mates: dict[object, list[Move]] = {}
        for move in moves:
            mates.setdefault((move.range, move.origin, move.target), []).append(move)
        now: list[Move] = []
        size = 0
        for some in mates.values():
            more = sum(move.bytes for move in some)
            if now and size + more > pace:
                rounds.append(tuple(now))
                now, size = [], 0
            now += some
            size += more
        rounds.append(tuple(now))
    return replace(plan, rounds=tuple(rounds))


def _moves(plan: MigrationPlan) -> str:
    targets = {move.target for moves in plan.rounds for move in moves}
    text = f"{_count(plan.bins, 'bin')}, {size_text(plan.bytes)}, go to {_count(len(targets), 'slot')}"
    return f"{text} in {_count(len(plan.rounds), 'round')}"


def _count(number: float, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _cores(workers: Collection[Worker]) -> int:
    """How many slots workers can run at a time."""
    return sum(max(1, int(worker.cores)) for worker in workers)


def _up(number: float) -> int:
    return int(np.ceil(number))


def _natural(worker: str) -> tuple[int, str]:
    return (int(worker), "") if worker.isdigit() else (-1, worker)


def _name(policy: Policy) -> str:
    return type(policy).__name__


def _check(name: str, good: bool, wanted: str) -> None:
    if not good:
        raise UserError(f"{name}: expected {wanted}")
