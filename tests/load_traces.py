"""A query in miniature that adapts itself: cells that get records, slots on workers, epochs, and a policy in the loop.

It is a model, of one step. An epoch takes as long as its slowest worker, and at least `interval_us`; what it takes
longer is backlog. Slots go where `protocol.placement` puts them, a plan's rounds follow one by one, and a worker that
was asked for comes some epochs later. Nothing fails, and moving bytes costs no time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from millstream.protocol.adaptation import Decision, Memory, Policy
from millstream.protocol.keyspace import WHOLE
from millstream.protocol.layout import Layout
from millstream.protocol.manifest import Family, Manifest, SegmentRef
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.placement import place
from millstream.protocol.routing import RoutingTable
from millstream.protocol.statistics import Floats, Load, Loads, cell_bits, together
from millstream.protocol.strategies import Numbers
from millstream.protocol.survey import Facts, Worker

CELLS = 4096
STEP = "count"
Trace = Callable[[int], Floats]
"""How many records each of the finest cells gets in an epoch, on average."""


# -- traces -----------------------------------------------------------------------------------------------------------


def uneven(total: float, seed: int, spread: float = 0.3) -> Floats:
    """Records of all cells, some with more than others."""
    weights = np.random.default_rng(seed).lognormal(0.0, spread, CELLS)
    shares: Floats = weights / weights.sum()
    return total * shares


def steady(total: float, seed: int) -> Trace:
    base = uneven(total, seed)
    return lambda epoch: base


def skewed(
    total: float, seed: int, begins: int = 0, hot: float = 0.1, has: float = 0.9, scattered: bool = False
) -> Trace:
    """From an epoch on, a share of the cells (side by side, or anywhere) has most of the records."""
    base = uneven(total, seed)
    count = round(hot * CELLS)
    rng = np.random.default_rng(seed + 1)
    chosen = rng.permutation(CELLS)[:count] if scattered else np.arange(count)
    after = base.copy()
    others = np.ones(CELLS, bool)
    others[chosen] = False
    after[chosen] *= total * has / base[chosen].sum()
    after[others] *= total * (1 - has) / base[others].sum()
    return lambda epoch: after if epoch >= begins else base


def diurnal(total: float, seed: int, period: int = 200, swing: float = 0.8) -> Trace:
    """Up and down like a day: `total` is the mean, and a day begins at its lowest."""
    base = uneven(total, seed)
    return lambda epoch: base * (1 - swing * np.cos(2 * np.pi * epoch / period))


def burst(total: float, seed: int, begins: int, ends: int, factor: float = 4.0) -> Trace:
    """So many times the records for some epochs, on the first eighth of the cells."""
    base = uneven(total, seed)
    high = base.copy()
    high[: CELLS // 8] *= factor
    return lambda epoch: high if begins <= epoch < ends else base


def drifting(total: float, seed: int, every: int = 40, hot: int = 24, has: float = 0.5) -> Trace:
    """A few hot keys have a good part of the records; every so many epochs a third of them is others."""
    base = uneven(total * (1 - has), seed)

    def rates(epoch: int) -> Floats:
        found = base.copy()
        for key in range(hot):
            turn = (epoch + key % 3 * every // 3) // every
            found[np.random.default_rng([seed, key, turn]).integers(CELLS)] += total * has / hot
        return found

    return rates


# -- the query --------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What an epoch was like, and what was decided after it."""

    epoch: int
    worst: float
    """How many times the mean the busiest slot had to do, of what there was in this epoch."""
    worst_worker: float
    took: float
    """How long it took, in intervals."""
    busy: float
    """What share of all cores was at work."""
    workers: int
    slots: int
    moved: int
    """The bytes that moved into this epoch."""
    decision: Decision
    busy_with: bool
    """Whether a migration was under way when it was decided."""


@dataclass
class Mill:
    """A query that runs a trace under a policy."""

    trace: Trace
    policy: Policy
    slots: int = 8
    workers: dict[str, float] = field(default_factory=lambda: {str(n): 2.0 for n in range(4)})
    bin_bits: int = 12
    seed: int = 0
    state_bytes: int = 4_096_000_000
    cost_us: float = 10.0
    interval_us: float = 1_000_000.0
    arrival: int = 3
    """After how many epochs a worker that was asked for is there."""
    held: dict[int, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.table = RoutingTable.even(self.slots, self.bin_bits)
        segment = SegmentRef("s", Family(STEP, "total"), 0, 1, self.state_bytes, "", (WHOLE,))
        self.manifest = Manifest().added([segment])
        self.hosts = place(range(self.slots), self.workers, {})
        self.loads, self.memory = Loads(), Memory()
        self.plan: MigrationPlan | None = None
        self.done = 0
        self.lag = 0.0
        self.coming: list[int] = []
        self.closed: set[str] = set()
        self.named = len(self.workers)
        self.seen: list[Seen] = []
        self.ways: list[tuple[int, Numbers, Numbers]] = []
        """Of every round: its epoch, and the owners of the finest cells before and after."""

    @property
    def layout(self) -> Layout:
        placement: dict[str, list[int]] = {}
        for slot, host in self.hosts.items():
            placement.setdefault(host, []).append(slot)
        return Layout("mine", {STEP: self.table}, self.manifest, placement)

    def owners(self, bits: int = 12) -> Numbers:
        firsts = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
        return self.table.lookup(firsts).astype(np.int64)

    def run(self, epochs: int) -> list[Seen]:
        for _ in range(epochs):
            self._epoch()
        return self.seen

    def _epoch(self) -> None:
        epoch = len(self.seen)
        moved = self._round(epoch)
        known = set(self.workers)
        for due in [due for due in self.coming if due <= epoch]:
            self.coming.remove(due)
            self.workers[str(self.named)] = 2.0
            self.named += 1
        live = sorted(set(self.table.slots))
        closing = {self.plan.drains} if self.plan is not None else set()
        self.hosts = place(live, self.workers, self.hosts, known, closing, self.closed)

        counts = self.rng.poisson(self.trace(epoch))
        owners = self.owners()
        by_slot = np.bincount(owners, counts * self.cost_us, max(live) + 1)
        by_worker = dict.fromkeys(self.workers, 0.0)
        slowest = 0.0
        for slot in live:
            by_worker[self.hosts[slot]] += by_slot[slot]
            slowest = max(slowest, by_slot[slot])
        took = max(self.interval_us, slowest, *(by_worker[name] / cores for name, cores in self.workers.items()))
        self.lag = max(0.0, self.lag + took / self.interval_us - 1)

        bits = cell_bits(self.table.bin_bits)
        parts = []
        for slot in live:
            mine = (counts * (owners == slot)).reshape(1 << bits, -1).sum(axis=1)
            parts.append(Load.of(mine, bytes=int(mine.sum()) * 20, micros=int(by_slot[slot])))
        load = Load.unpack(together(parts).pack())
        assert load.records.sum() == counts.sum()
        self.loads = self.loads.after(epoch, load)

        cores = sum(self.workers.values())
        facts = Facts(
            epoch,
            self.layout,
            {STEP: self.loads},
            {
                name: Worker(n, by_worker[name] / n / took)
                for name, n in self.workers.items()
                if name not in self.closed
            },
            backlog=self.lag,
            moving=int(self.plan is not None),
            asked=len(self.coming),
            held=self.held,
        )
        decision, self.memory = self.policy.decide(facts, self.memory)
        per_core = [by_worker[name] / n for name, n in self.workers.items()]
        self.seen.append(
            Seen(
                epoch,
                float(by_slot.max() / (by_slot.sum() / len(live))),
                float(max(per_core) / (sum(by_worker.values()) / cores)),
                took / self.interval_us,
                sum(by_worker.values()) / cores / took,
                len(self.workers),
                len(live),
                moved,
                decision,
                self.plan is not None,
            )
        )
        self.coming += [epoch + self.arrival] * decision.more
        if decision.plan is not None and decision.plan.rounds:
            assert self.plan is None, "two migrations at once"
            assert decision.plan.versions == {STEP: self.table.version}
            self.plan, self.done = decision.plan, 0

    def _round(self, epoch: int) -> int:
        """The next round of the plan that is under way, if there is one."""
        if self.plan is None:
            return 0
        before = self.owners()
        moves = self.plan.rounds[self.done]
        for move in moves:
            assert self.table.owners_of(move.range) == {move.origin}
        self.table = self.plan.after({STEP: self.table}, self.done).get(STEP, self.table)
        self.ways.append((epoch, before, self.owners()))
        self.done += 1
        if self.done == len(self.plan.rounds):
            if self.plan.drains:
                self.workers.pop(self.plan.drains)
            self.plan = None
        return sum(move.bytes for move in moves)

    # -- what it came to ----------------------------------------------------------------------------------------------

    @property
    def decided(self) -> list[int]:
        """The epochs after which something was done."""
        return [seen.epoch for seen in self.seen if seen.decision.acts]

    def returns(self, window: int) -> int:
        """How many times a cell came back to a slot that it had left less than `window` epochs before."""
        left: dict[tuple[int, int], int] = {}
        count = 0
        for epoch, before, after in self.ways:
            for cell in np.flatnonzero(before != after).tolist():
                count += left.get((cell, int(after[cell])), -window) > epoch - window
                left[cell, int(before[cell])] = epoch
        return count

    def most_moved(self, window: int) -> int:
        """The most bytes that moved in so many epochs in a row."""
        sums = np.concatenate([[0], np.cumsum([seen.moved for seen in self.seen])])
        return int(max(sums[end] - sums[max(0, end - window)] for end in range(1, len(sums))))

    def settled(self, bound: float, begins: int = 0) -> int:
        """After how many epochs the busiest slot has stayed below so many times the mean; -1 if it has not."""
        above = [seen.epoch for seen in self.seen if seen.epoch >= begins and seen.worst > bound]
        last = max(above, default=begins - 1)
        return last + 1 - begins if last < self.seen[-1].epoch else -1
