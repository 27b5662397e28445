"""How long plans take: 2^16 bins over 1,000 slots, with state everywhere, by every strategy.

    python -m bench.planning

The limit is a second for a plan, the aim a tenth; what the driver does with a plan happens inside an epoch, and is to
take less than a tenth. The least of three runs counts, in seconds of this process: others may use the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from millstream import AllAtOnce, Batched, Fluid, Matched
from millstream.protocol.layout import Layout
from millstream.protocol.manifest import Family, Manifest, SegmentRef
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.planner import plan_balance, plan_drain, plan_move, plan_rescale
from millstream.protocol.routing import RoutingTable
from millstream.protocol.steering import Facts, Heard, steer
from millstream.protocol.strategies import Strategy

BITS, SLOTS, SEGMENTS = 16, 1000, 4
LIMIT_S, AIM_S = 1.0, 0.1
T = TypeVar("T")
STRATEGIES = [AllAtOnce(), Batched(64, merge=False), Matched(merge=False), Fluid()]


def layout(slots: int) -> Layout:
    """A query whose every slot has some segments."""
    table = RoutingTable.even(slots, BITS)
    refs = [
        SegmentRef(f"{slot}-{order}", Family("count", "total"), order, 1000, 10**6 + 1000 * slot, "", ranges)
        for slot, ranges in table.ranges.items()
        for order in range(SEGMENTS)
    ]
    placement = {f"worker {number}": range(number, slots, 10) for number in range(10)}
    return Layout("bench", {"count": table}, Manifest().added(refs), placement)


def least_s(work: Callable[[], T]) -> tuple[float, T]:
    """The least processor time of three runs, and what came of the last."""
    times = []
    for _ in range(3):
        begun = time.process_time()
        result = work()
        times.append(time.process_time() - begun)
    return min(times), result


def plans(strategy: Strategy) -> Iterator[tuple[str, Layout, Callable[[], MigrationPlan]]]:
    """What is planned: its name, where the state lies, and how the plan is made."""
    many, half = layout(SLOTS), layout(SLOTS // 2)
    every, low, high = list(range(SLOTS)), list(range(SLOTS // 2)), list(range(SLOTS // 2, SLOTS))
    yield "rescale 500 to 1,000", half, partial(plan_rescale, half, SLOTS, strategy=strategy)
    yield "rescale 1,000 to 500", many, partial(plan_rescale, many, SLOTS // 2, strategy=strategy)
    yield "move half of half", many, partial(plan_move, many, slots=low, share=0.5, to=high, strategy=strategy)
    yield "move nearly all", many, partial(plan_move, many, slots=every, to=[*every[1:], 0], strategy=strategy)
    yield "drain one of ten", many, partial(plan_drain, many, "worker 3", strategy=strategy)
    yield "balance", many, partial(plan_balance, many, strategy=strategy)


@click.command()
def main() -> None:
    """Measure how long plans take to make, to print, to read and to check."""
    table = Table(title=f"2^{BITS} bins over {SLOTS:,} slots, {SEGMENTS} segments each", title_justify="left")
    for name in (
        "plan",
        "strategy",
        "bins",
        "rounds",
        "ms",
        f"of {LIMIT_S:g} s",
        f"of {AIM_S:g} s",
        "print",
        "steer, ms",
    ):
        table.add_column(name, justify="left" if name in ("plan", "strategy") else "right")
    for strategy in STRATEGIES:
        for verb, known, work in plans(strategy):
            took, plan = least_s(work)
            printing, _ = least_s(plan.__str__)
            received = msgspec.json.decode(msgspec.json.encode(plan), type=MigrationPlan)
            facts = Facts("bench", 1, 0, 0, dict(known.tables), {}, 0, {}, {})
            steering, _ = least_s(partial(steer, facts, [Heard(0, "move", received)]))
            row = [verb, str(strategy), f"{plan.bins:,}", f"{len(plan.rounds):,}", f"{took * 1000:,.0f}"]
            row += [
                f"{took / LIMIT_S:.2f}x",
                f"{took / AIM_S:.2f}x",
                f"{printing * 1000:,.0f}",
                f"{steering * 1000:,.0f}",
            ]
            table.add_row(*row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
