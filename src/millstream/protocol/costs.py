"""What a migration will cost by each protocol, before it is begun. The cost model of Madsen and Zhou (CIKM 2015,
section 5), in the quantities of this system.

Rules
-----
- Three protocols. `direct` asks nobody where replicas are: it cuts over at once, and what the target does not happen to
  have is fetched inside the epoch. `cpa` has bins go where replicas of them are (`protocol.affinity`) and cuts over at
  once: what these lack, the segments since the replica's epoch, is fetched inside the epoch, in place of the paper's
  replay. `cpal` does the same, but leaves the origin in charge until the target lacks next to nothing.
- The *stall* is what the longest epoch takes longer, and *completion* the time from the command to the last round.
- `auto` takes the least stall. Among those whose stalls differ by no more than the plan's own allowance (`stall_s`), it
  takes the one that is complete first.
- Numbers are estimates, from bytes and from rates, as measured since the query was started, or else assumed: they are
  there to choose by, and to be told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from millstream.protocol.affinity import brought
from millstream.protocol.layout import RATE, Layout
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.placement import place
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
        return f"stall {_seconds(self.stall_s)}, complete in {_seconds(self.completion_s)}"


def _seconds(many: float) -> str:
    return "under 0.001 s" if 0 < many < 0.001 else f"{many:.3g} s"


def cost(plan: MigrationPlan, protocol: str, measured: Measured, state_bytes: int, held: float = 0.0) -> Cost:
    """The cost of a plan by a protocol; `held` is the share of what moves that lies at its target already.

    >>> from millstream.protocol.keyspace import Range
    >>> from millstream.protocol.migration import Move
    >>> plan = MigrationPlan("s", "move", {"count": 0}, ((Move("count", Range(0, 9), 0, 1, 250_000_000),),))
    >>> print(cost(plan, "direct", Measured(epoch_s=0.5), 10**9))
    stall 2 s, complete in 2.5 s
    >>> print(cost(plan, "cpa", Measured(epoch_s=0.5), 10**9, held=0.8))
    stall 0.4 s, complete in 0.9 s
    >>> print(cost(plan, "cpal", Measured(epoch_s=0.5), 10**9, held=0.8))
    stall 0 s, complete in 0.9 s
    """
    rounds, most = max(1, len(plan.expected_rounds)), plan.stall_bytes
    share = plan.bytes / state_bytes if state_bytes else 0.0
    delta = measured.written * share / rounds  # what an epoch writes of what one round moves
    steady = plan.epochs * measured.epoch_s
    ahead = plan.bytes * (1.0 - held)
    if protocol == "cpal":
        stall = min(delta, most) / measured.fetch_rate
        completion = steady + delta * rounds / measured.fetch_rate
        return Cost(stall, max(completion, ahead / measured.give_rate + measured.epoch_s))
    lacking = min(most, most * (1.0 - held) + delta)
    return Cost(lacking / measured.fetch_rate, steady + min(plan.bytes, ahead + delta * rounds) / measured.fetch_rate)


def choice(found: Mapping[str, Cost], stall_s: float) -> str:
    """The protocol that `auto` takes.

    >>> choice({"direct": Cost(4.0, 9.0), "cpa": Cost(0.05, 5.0), "cpal": Cost(0.01, 8.0)}, 0.1)
    'cpa'
    """
    least = min(cost.stall_s for cost in found.values())
    good = [name for name in PROTOCOLS if name in found and found[name].stall_s <= least + stall_s]
    return min(good, key=lambda name: found[name].completion_s)


def by_protocol(
    plan: MigrationPlan, layout: Layout, strategy: Strategy, near: Callable[[], MigrationPlan] | None = None
) -> MigrationPlan:
    """The plan with what it is expected to cost by each protocol, and the one that it is carried out by; `near` makes
    it such that more of it goes where replicas are, which is what `cpa` and `cpal` do."""
    several = len(layout.workers) > 1
    chosen = strategy.protocol or (
        "direct" if not (several if strategy.prepared is None else strategy.prepared) else "cpal"
    )
    expected: dict[str, str] = {}
    plans = dict.fromkeys(PROTOCOLS, plan)
    if several and any(plan.rounds):
        if near is not None:
            plans["cpa"] = plans["cpal"] = near()
        measured = Measured(layout.epoch_s or 1.0, layout.fetch_rate, layout.give_rate, layout.written)
        total = _total(layout)
        found = {name: cost(each, name, measured, total, _held(each, layout, name)) for name, each in plans.items()}
        expected = {name: str(each) for name, each in found.items()}
        chosen = choice(found, strategy.stall_s) if chosen == "auto" else chosen
    chosen = "direct" if chosen == "auto" else chosen
    return replace(plans[chosen], protocol=chosen, prepared=chosen == "cpal", expected=expected)


def _total(layout: Layout) -> int:
    return sum(segment.bytes for segment in layout.manifest.segments())


def _held(plan: MigrationPlan, layout: Layout, protocol: str) -> float:
    """The share of what moves that lies at its target's worker already: it runs the origin too, or has a replica."""
    moves = [move for moves in plan.rounds for move in moves]
    hosts, slots = layout.hosts, {*layout.hosts, *(move.target for move in moves)}
    lacks = brought(moves, hosts, layout.replicas)
    brings = lacks if protocol != "direct" else lambda slot, worker: 0
    placed = place(sorted(slots), layout.workers, hosts, layout.workers, brings=brings)
    lacking = sum(lacks(target, placed[target]) for target in {move.target for move in moves})
    return 1.0 - lacking / plan.bytes if plan.bytes else 0.0
