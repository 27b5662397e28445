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

from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream.protocol.keyspace import Range
from millstream.protocol.routing import RoutingTable, RoutingVersion, Slot


@dataclass(frozen=True, slots=True)
class Move:
    """One range of a step goes from a slot to another. `bytes` is the estimated size of its state."""

    step: str
    range: Range
    origin: Slot
    target: Slot
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """When the first round is due: at once, or at an epoch, a wall time, or when a watermark reaches an event time."""

    epoch: int | None = None
    clock_ms: int | None = None
    event_time: int | None = None

    def reached(self, epoch: int, clock_ms: int, watermark: int) -> bool:
        """Whether it is time: `watermark` is the least of the steps that the plan touches, in microseconds."""
        return (
            (self.epoch is None or epoch >= self.epoch)
            and (self.clock_ms is None or clock_ms >= self.clock_ms)
            and (self.event_time is None or watermark >= self.event_time)
        )


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """What a migration will do."""

    store: str
    verb: str
    versions: dict[str, RoutingVersion]
    rounds: tuple[tuple[Move, ...], ...]
    gap: int = 0
    start: Start = Start()
    strategy: str = ""
    bin_bits: dict[str, int] = field(default_factory=dict)
    """Steps whose number of bins changes with the first round."""
    drains: str = ""
    """The worker that is to be emptied."""

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
