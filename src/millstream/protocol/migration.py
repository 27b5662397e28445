"""Migration plans: which ranges go from which slot to which, in which epochs. Values; nothing here acts.

Rules
-----
- A plan names the store and, for every step it touches, the routing version it was made for. It is carried out from
  exactly those versions, or refused (G8).
- A round is what moves at one epoch; rounds follow each other `gap` epochs apart. After every round the table is valid,
  so a plan may end after any of them.
- A move names the slot that it takes its range from, and that slot owns the whole range when its round comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from millstream.protocol.conditions import Condition
from millstream.protocol.keyspace import Range
from millstream.protocol.pacing import MoveCosts, RoundLoad, epochs_of, hosts_of, rounds_together
from millstream.protocol.routing import RoutingTable, RoutingVersion, Slot

SHOWN = 12
"""How many pairs of slots a plan prints."""


@dataclass(frozen=True, slots=True)
class Move:
    """One range of a step goes from a slot to another.

    `bytes` is the estimated size of its state, `bins` how many bins, or parts of bins, it is made of.
    """

    step: str
    range: Range
    origin: Slot
    target: Slot
    bytes: int = 0
    bins: int = 1


@dataclass(frozen=True, slots=True)
class Start:
    """When the first round is due: at once, or at an epoch, a wall time, when a watermark reaches an event time, or
    when a condition on the query's numbers holds."""

    epoch: int | None = None
    clock_ms: int | None = None
    event_time: int | None = None
    condition: Condition | None = None

    def reached(self, epoch: int, clock_ms: int, watermark: int, numbers: Mapping[str, float]) -> bool:
        """Whether it is time: `watermark` is the least of the steps that the plan touches, in microseconds."""
        return (
            (self.epoch is None or epoch >= self.epoch)
            and (self.clock_ms is None or clock_ms >= self.clock_ms)
            and (self.event_time is None or watermark >= self.event_time)
            and (self.condition is None or self.condition.holds(numbers))
        )


AT_ONCE = Start()


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """What a migration will do. `print` shows it; a plan without rounds changes nothing."""

    store: str
    verb: str
    versions: dict[str, RoutingVersion]
    rounds: tuple[tuple[Move, ...], ...]
    gap: int = 0
    start: Start = AT_ONCE
    strategy: str = ""
    bin_bits: dict[str, int] = field(default_factory=dict)
    """Steps whose number of bins changes with the first round."""
    drains: str = ""
    """The worker that is to be emptied."""
    generation: int = 0
    """Of the driver that has this worker, if one is to be emptied: its name means nothing to others."""
    fetch_limit: int = 0
    """The bytes per second at which a worker fetches what it does not hold; 0 if that is not known."""
    placement: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The slots of each worker, when it was planned. Others are taken to get workers of their own."""
    prepared: bool = False
    """Whether a round waits until its targets hold what it brings them (see `protocol.handover`)."""
    budget: int = 0
    """How many bytes a worker may still lack then."""
    deadline_s: float = 0.0
    """How many seconds a round may wait."""
    protocol: str = ""
    """By which protocol it is carried out (see `protocol.costs`)."""
    expected: dict[str, str] = field(default_factory=dict)
    """What it is expected to cost by each protocol, in words."""
    slowdown: float = 0.0
    """How many times as long as without it an epoch may take: rounds are then carried out together as far as that goes.
    0 if each round has an epoch of its own."""
    costs: MoveCosts = field(default_factory=MoveCosts)
    """What moving was thought to cost when it was planned."""

    def after(self, tables: Mapping[str, RoutingTable], number: int) -> dict[str, RoutingTable]:
        """The tables after round `number`, of the steps that it changes."""
        moves: dict[str, list[tuple[Range, Slot]]] = {}
        if number == 0:
            moves = {step: [] for step in self.bin_bits}
        for move in self.rounds[number]:
            moves.setdefault(move.step, []).append((move.range, move.target))
        return {
            step: tables[step].assign(found, self.bin_bits.get(step) if number == 0 else None)
            for step, found in moves.items()
        }

    @property
    def bytes(self) -> int:
        """The estimated size of all that moves."""
        return sum(move.bytes for moves in self.rounds for move in moves)

    @property
    def bins(self) -> int:
        """How many bins move. One that several steps move together counts once."""
        return sum(bins for bins, _ in _Sums(self).pairs.values())

    @property
    def expected_rounds(self) -> list[tuple[Move, ...]]:
        """What moves at each epoch, if nothing costs more or less than was thought when it was planned."""
        if not self.slowdown:
            return list(self.rounds)
        costs = self.costs.held() if self.prepared else self.costs
        together = epochs_of(self.rounds, hosts_of(self.placement), self.slowdown, costs)
        return [tuple(move for moves in rounds for move in moves) for rounds in together]

    @property
    def epochs(self) -> int:
        """How many epochs it takes, from the first round to the last; if it is paced, about."""
        count = len(self.expected_rounds)
        return count + self.gap * max(0, count - 1)

    @property
    def expected_s(self) -> float:
        """About how many seconds it takes once it has begun; 0 if it is not known how long an epoch takes."""
        if not self.costs.epoch_s:
            return 0.0
        costs = self.costs.held() if self.prepared else self.costs
        extra, hosts = 0.0, hosts_of(self.placement)
        for moves in self.expected_rounds:
            load = RoundLoad(hosts)
            load.add(moves)
            extra += costs.of(load.bytes, load.bins)
        return self.epochs * self.costs.epoch_s + extra

    @property
    def stall_bytes(self) -> int:
        """The most that one worker receives in one round: what the slowest epoch waits for."""
        return _Sums(self).to_one_worker

    def expected_stall_s(self, bytes_per_second: float) -> float:
        """How long the slowest epoch waits, if nothing is at its target yet and each worker fetches at this rate."""
        return self.stall_bytes / bytes_per_second

    def __str__(self) -> str:
        versions: dict[RoutingVersion, list[str]] = {}
        for step, version in self.versions.items():
            versions.setdefault(version, []).append(repr(step))
        made_for = "; ".join(f"{version} of {_some(steps)}" for version, steps in versions.items())
        what = f"{self.verb} {self.drains}" if self.drains else self.verb
        by = f" by {self.strategy}" if self.strategy else ""
        return "\n  ".join([f"{what}{by}, from routing version {made_for}", *self._lines()])

    def _lines(self) -> Iterator[str]:
        for bits in sorted(set(self.bin_bits.values())):
            steps = [repr(step) for step, found in self.bin_bits.items() if found == bits]
            yield f"{1 << bits:,} bins for {_some(steps)}"
        if any(self.rounds):
            yield from self._moves()
        elif not self.bin_bits:
            yield "nothing to move"
        if self.rounds:
            yield self._beginning()

    def _moves(self) -> Iterator[str]:
        sums = _Sums(self)
        pairs = sums.pairs
        shown = sorted(pairs, key=lambda pair: (-pairs[pair][1], -pairs[pair][0], pair))[:SHOWN]
        for origin, target in sorted(shown):
            yield f"slot {origin} -> slot {target}: {_load_text(*pairs[origin, target])}"
        if len(pairs) > SHOWN:
            rest = [pairs[pair] for pair in pairs.keys() - set(shown)]
            yield f"{len(rest):,} other pairs of slots: {_load_text(*map(sum, zip(*rest, strict=True)))}"
        total = _load_text(*map(sum, zip(*pairs.values(), strict=True)))
        if self.slowdown:
            yield f"in all: {total}, over about {_count(self.epochs, 'epoch')}"
        else:
            yield f"in all: {total}, in {_count(len(self.rounds), 'round')} over {_count(self.epochs, 'epoch')}"
        one_slot = _load_text(*sums.to_one_slot)
        yield f"at most: {_load_text(*sums.in_one_round)} in a round; {one_slot} to one slot in a round"
        if self.fetch_limit:
            stall = self.expected_stall_s(self.fetch_limit)
            unprepared = " if nothing is prepared" if self.prepared else ""
            rate = f"at {size_text(self.fetch_limit)}/s for each worker"
            yield f"expected stall: up to {stall:.3g} s in an epoch, {rate}{unprepared}"
        if self.expected_s:
            yield f"takes about {duration_text(self.expected_s)}, with epochs of {duration_text(self.costs.epoch_s)}"
        for name, cost in self.expected.items():
            yield f"{name}: {cost}{' (chosen)' if name == self.protocol else ''}"

    def _beginning(self) -> str:
        due = []
        if self.start.epoch is not None:
            due.append(f"at epoch {self.start.epoch}")
        if self.start.clock_ms is not None:
            due.append(f"at {_moment(self.start.clock_ms * 1000)}")
        if self.start.event_time is not None:
            due.append(f"when watermarks reach {_moment(self.start.event_time)}")
        if self.start.condition is not None:
            due.append(f"when {self.start.condition}")
        return "starts " + (" and ".join(due) or "at once")


def rounds_at_once(plan: MigrationPlan, done: int, costs: MoveCosts) -> int:
    """How many rounds the next epoch of a plan carries out, of which so many are done: one, unless it is paced."""
    if not plan.slowdown:
        return 1
    costs = costs.held() if plan.prepared else costs
    return rounds_together(plan.rounds, done, hosts_of(plan.placement), plan.slowdown, costs)


class _Sums:
    """Loads, each a pair of bins and bytes: of each pair of slots, and the largest of a round and of a slot in a round.

    A bin that several steps move in one round counts once. `to_one_worker` are the most bytes that a worker receives in
    a round.
    """

    def __init__(self, plan: MigrationPlan) -> None:
        self.pairs: dict[tuple[Slot, Slot], tuple[int, int]] = {}
        self.to_one_worker = 0
        hosts = {slot: worker for worker, slots in plan.placement.items() for slot in slots}
        self.in_one_round = self.to_one_slot = (0, 0)
        for moves in plan.expected_rounds:
            counted: set[tuple[Slot, Slot, Range]] = set()
            received: dict[Slot, tuple[int, int]] = {}
            for move in moves:
                way, what = (move.origin, move.target), (move.origin, move.target, move.range)
                bins = 0 if what in counted else move.bins
                counted.add(what)
                before = self.pairs.get(way, (0, 0))
                self.pairs[way] = (before[0] + bins, before[1] + move.bytes)
                before = received.get(move.target, (0, 0))
                received[move.target] = (before[0] + bins, before[1] + move.bytes)
            at_worker: dict[object, int] = {}
            for slot, (_, size) in received.items():
                host = hosts.get(slot, slot)
                at_worker[host] = at_worker.get(host, 0) + size
            self.to_one_worker = max(self.to_one_worker, *at_worker.values(), 0)
            loads = list(received.values())
            if loads:
                whole = (sum(bins for bins, _ in loads), sum(size for _, size in loads))
                self.in_one_round = max(self.in_one_round, whole, key=_by_bytes)
                self.to_one_slot = max(self.to_one_slot, *loads, key=_by_bytes)


def _by_bytes(load: tuple[int, int]) -> tuple[int, int]:
    return load[1], load[0]


def _load_text(bins: int, size: int) -> str:
    return f"{_count(bins, 'bin')}, {size_text(size)}"


def size_text(size: float) -> str:
    """Bytes for people.

    >>> size_text(999), size_text(1_250_000)
    ('999 B', '1.25 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB"


_LENGTHS = (("day", 86_400), ("hour", 3_600), ("minute", 60))


def duration_text(seconds: float) -> str:
    """A duration for people: the two largest units, and one from ten on.

    >>> [duration_text(seconds) for seconds in (0.25, 7.5, 100, 5000, 27_117_712.4, 86_400)]
    ['0.25 s', '7.5 s', '1 minute 40 s', '1 hour 23 minutes', '313 days', '1 day']
    """
    if abs(seconds) < 59.5:
        return f"{seconds:.3g} s"
    left, parts = round(abs(seconds)), []
    for name, size in (*_LENGTHS, ("s", 1)):
        whole, left = divmod(left, size)
        if whole:
            parts.append(f"{whole:,} s" if name == "s" else _count(whole, name))
        if whole >= 10 or len(parts) == 2 or (parts and not whole):
            break
    return ("-" if seconds < 0 else "") + " ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _some(items: Sequence[str]) -> str:
    return ", ".join(items[:SHOWN]) + (f" and {len(items) - SHOWN} more" if len(items) > SHOWN else "")


def _moment(micros: int) -> str:
    return str(np.datetime64(micros // 1000, "ms")).replace("T", " ") + " UTC"
