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
- Numbers are estimates, from bytes and from measured rates: they are there to choose by, and to be told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millstream.protocol.migration import MigrationPlan

PROTOCOLS = ("direct", "cpa", "cpal")
RATE = 125_000_000
"""The bytes in a second that a worker is taken to fetch, where no limit is known: 1 Gbit/s."""


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

    >>> from millstream.protocol.planner import Layout, plan_rescale
    >>> from millstream.protocol.routing import RoutingTable
    >>> plan = plan_rescale(Layout("s", {"count": RoutingTable.even(2, 12)}), 4)
    >>> costs(plan, Measured(), 0)["direct"].stall_s
    0.0
    """
    rounds, most = max(1, len(plan.rounds)), plan.stall_bytes
    share = plan.bytes / state_bytes if state_bytes else 0.0
    delta = measured.written * share / rounds  # what an epoch writes of what one round moves
    steady = plan.epochs * measured.epoch_s
    fetched = {"direct": most, "cpa": most * (1.0 - held) + delta, "cpal": min(delta, most)}
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
