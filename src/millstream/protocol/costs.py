"""What a migration will cost by each protocol, before it is begun. The cost model of Madsen and Zhou (CIKM 2015,
section 5), in the quantities of this system.

Rules
-----
- Three protocols. `direct` cuts over at once, and what a range has is fetched inside the epoch. `cpa` cuts over at once
  where replicas are, and what these lack is fetched inside the epoch (the paper's replay: here the segments since the
  replica's epoch). `cpal` leaves the origin in charge until the target lacks next to nothing, and then cuts over.
- The *stall* is what the longest epoch takes longer, and *completion* the time from the command to the last round.
- `auto` takes the least stall. Among those whose stalls differ by no more than the plan's own allowance (`stall_s`), it
  takes the one that is complete first.
- Numbers are estimates, from bytes and from rates, as measured since the query was started, or else assumed: they are
  there to choose by, and to be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from millstream.protocol.layout import RATE, Layout
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.strategies import PROTOCOLS, Strategy


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a query's rates.

    `epoch_s` is how long an epoch takes; `fetch_rate` and `give_rate` are the bytes in a second that a worker gets from
    the store and from others; `written` are the bytes that an epoch writes, of all slots.
    """

    epoch_s: float = 1.0
    fetch_rate: float = RATE
    give_rate: float = RATE
    written: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one protocol would cost."""

    stall_s: float
    completion_s: float

    def __str__(self) -> str:
        return f"stall {self.stall_s:.3g} s, complete in {self.completion_s:.3g} s"


def costs(plan: MigrationPlan, measured: Measured, state_bytes: int, held: float = 0.0) -> dict[str, Cost]:
    """The cost of a plan by each protocol; `held` is the share of what moves that its targets have as replicas.

    >>> from millstream.protocol.keyspace import Range
    >>> from millstream.protocol.migration import Move
    >>> plan = MigrationPlan("s", "move", {"count": 0}, ((Move("count", Range(0, 9), 0, 1, 250_000_000),),))
    >>> for name, cost in costs(plan, Measured(epoch_s=0.5), 10**9, held=0.8).items():
    ...     print(name, cost)
    direct stall 2 s, complete in 2.5 s
    cpa stall 0.4 s, complete in 0.9 s
    cpal stall 0 s, complete in 0.9 s
    """
    rounds, most = max(1, len(plan.rounds)), plan.stall_bytes
    share = plan.bytes / state_bytes if state_bytes else 0.0
    delta = measured.written * share / rounds  # what an epoch writes of what one round moves
    steady = plan.epochs * measured.epoch_s
    fetched = {"direct": most, "cpa": min(most, most * (1.0 - held) + delta), "cpal": min(delta, most)}
    in_all = {"direct": plan.bytes, "cpa": plan.bytes * (1.0 - held) + delta * rounds, "cpal": delta * rounds}
    ahead = plan.bytes * (1.0 - held) / measured.give_rate
    found = {}
    for name in PROTOCOLS:
        stall = fetched[name] / measured.fetch_rate
        completion = steady + in_all[name] / measured.fetch_rate
        if name == "cpal":
            completion = max(completion, ahead + measured.epoch_s)
        found[name] = Cost(stall, completion)
    return found


def choice(found: Mapping[str, Cost], stall_s: float) -> str:
    """The protocol that `auto` takes.

    >>> choice({"direct": Cost(4.0, 9.0), "cpa": Cost(0.05, 5.0), "cpal": Cost(0.01, 8.0)}, 0.1)
    'cpa'
    """
    least = min(cost.stall_s for cost in found.values())
    good = [name for name in PROTOCOLS if name in found and found[name].stall_s <= least + stall_s]
    return min(good, key=lambda name: found[name].completion_s)


def by_protocol(plan: MigrationPlan, layout: Layout, strategy: Strategy) -> MigrationPlan:
    """The plan with what it is expected to cost by each protocol, and the one that it is carried out by."""
    several = len(layout.placement) > 1
    chosen = strategy.protocol or (
        "direct" if not (several if strategy.prepared is None else strategy.prepared) else "cpal"
    )
    expected: dict[str, str] = {}
    if several and any(plan.rounds):
        measured = Measured(layout.epoch_s or 1.0, layout.fetch_rate, layout.give_rate, _written(layout))
        found = costs(plan, measured, _total(layout), _held(plan, layout))
        if found["direct"].stall_s > 0.01:  # else there is nothing to choose between
            expected = {name: str(cost) for name, cost in found.items()}
        chosen = choice(found, strategy.stall_s) if chosen == "auto" else chosen
    chosen = "direct" if chosen == "auto" else chosen
    return replace(plan, protocol=chosen, prepared=chosen == "cpal", expected=expected)


def _total(layout: Layout) -> int:
    return sum(segment.bytes for segment in layout.manifest.segments())


def _written(layout: Layout) -> float:
    """The bytes of the newest segments: about what an epoch writes."""
    newest = max((segment.order for segment in layout.manifest.segments()), default=0)
    return float(sum(segment.bytes for segment in layout.manifest.segments() if segment.order == newest))


def _held(plan: MigrationPlan, layout: Layout) -> float:
    """The share of what moves that lies at its target's worker already: it runs the origin too, or has a replica."""
    hosts = {slot: worker for worker, slots in layout.placement.items() for slot in slots}
    there = sum(
        move.bytes
        for moves in plan.rounds
        for move in moves
        if move.target in hosts
        and (hosts[move.target] == hosts.get(move.origin) or hosts[move.target] in layout.replicas.get(move.origin, ()))
    )
    return there / plan.bytes if plan.bytes else 0.0
