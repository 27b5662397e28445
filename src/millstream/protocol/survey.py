"""The survey: what is known of a query's load, and what follows from it for each slot.

Rules
-----
- Facts are gathered by the driver after a commit. Nothing here asks for more, or remembers anything.
- What each slot has to do follows from the load of cells and the routing tables, so it can be said of tables that do
  not exist yet as well.
- What is fair for a slot goes with its room: what of a core it can have on its worker.
- Where state lies is looked at only when a plan is made: to see that nothing is to do takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from millstream.protocol.layout import Layout
from millstream.protocol.levelling import Flags, fair_shares
from millstream.protocol.manifest import Manifest
from millstream.protocol.planner import Cells, bins_of, bytes_in
from millstream.protocol.statistics import MAX_BITS, Floats, Loads, within
from millstream.protocol.strategies import Numbers


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker: how many tasks it runs at a time, and how busy it was in the last epoch.

    `busy` is the CPU time of its tasks, divided by its cores and by the time from one commit to the next. So it is low
    where epochs wait for data.
    """

    cores: float = 1.0
    busy: float = 0.0


_ROUNDS = 4
"""How often it is asked again what is fair when what is too much is not counted."""


@dataclass(frozen=True)
class Facts:
    """What a decision is made from, after the commit of `epoch`."""

    epoch: int
    layout: Layout
    loads: Mapping[str, Loads]
    """Of the steps."""
    workers: Mapping[str, Worker] = field(default_factory=dict)
    """Those that are there, with slots or without, but not those that are being drained."""
    backlog: float = 0.0
    """The records that wait in the sources: how many epochs like the last one they would take."""
    moving: int = 0
    """How many migrations are under way, or waiting."""
    asked: int = 0
    """How many workers have been asked for that are not there yet."""
    held: Mapping[int, Collection[str]] = field(default_factory=dict)
    """The workers that hold a replica of a slot's state."""
    moved: Sequence[tuple[int, int]] = ()
    """Migrations that are over: the epoch of the last round of each, and its bytes. Read by a memory that is empty."""
    pace: int = 0
    """The most bytes that a round may move; 0 is no limit. Set by `Adaptive`, for policies to plan by."""
    churn: float = np.inf
    """The most bytes that may move within a window, in multiples of the state."""
    spent: int = 0
    """The bytes that have moved within the window."""

    @cached_property
    def survey(self) -> Survey:
        """What each slot has to do, as far as it is known."""
        return Survey.of(self)

    @cached_property
    def bins(self) -> list[Cells]:
        """The cells of all steps, with their bytes; they take longer to find than the survey."""
        manifest, found = self.layout.manifest, self.survey.cells
        return [replace(c, bytes=np.stack([bytes_in(manifest, step, c.firsts) for step in c.steps])) for c in found]

    @cached_property
    def sizes(self) -> Floats:
        """The bytes of each cell."""
        return np.concatenate([cells.bytes.sum(axis=0) for cells in self.bins]).astype(float)

    @property
    def budget(self) -> float:
        """How many bytes a plan may move now."""
        return max(0.0, self.churn * float(self.sizes.sum()) - self.spent) if self.churn < np.inf else np.inf

    @property
    def demand(self) -> float:
        """How many cores are at work."""
        return sum(worker.busy * worker.cores for worker in self.workers.values())


@dataclass(frozen=True)
class Survey:
    """What each cell and each slot has to do: CPU time, or if some step's is not known, records; a mean by epoch.

    `room` is what of a core each slot can have, 0 if it has nothing to do with the query. A cell that has more than
    what is fair for a whole slot counts in `loads` as so much: it cannot be split, so the most that can be done is to
    leave it alone. `raw` has what it really has.
    """

    cells: list[Cells]
    owners: Numbers
    raw: Floats
    loads: Floats
    records: float
    """How many records a slot had, in all the epochs that count."""
    slots: tuple[int, ...]
    hosts: Mapping[int, str]
    room: Floats

    @classmethod
    def of(cls, facts: Facts) -> Survey:
        """From the tables and loads alone: where state lies is not looked at."""
        cells = bins_of(replace(facts.layout, manifest=Manifest()), MAX_BITS)
        known = [loads for step, loads in facts.loads.items() if step in facts.layout.tables and loads.sums[0].any()]
        timed = all(loads.sums[2].any() for loads in known)
        found = [np.zeros(len(each.owners)) for each in cells]
        for each, row in zip(cells, found, strict=True):
            for step in each.steps:
                if step in facts.loads:
                    row += within(facts.loads[step].micros if timed else facts.loads[step].records, each.firsts)
        slots = tuple(sorted(facts.layout.owners))
        hosts = {slot: worker for slot, worker in facts.layout.hosts.items() if slot in slots}
        room = rooms(slots, hosts, facts.workers)
        raw = np.concatenate(found)
        return cls(
            cells,
            np.concatenate([each.owners for each in cells]),
            raw,
            _capped(raw, room),
            sum(float(loads.sums[0].sum()) for loads in known) / len(slots),
            slots,
            hosts,
            room,
        )

    @cached_property
    def real(self) -> Floats:
        """How many times its fair share each slot has of what cells really have."""
        fair = np.maximum(fair_shares(self.raw, self.room), 1e-300)
        return np.where(self.room > 0, np.bincount(self.owners, self.raw, len(self.room)) / fair, 0.0)

    @cached_property
    def fair(self) -> Floats:
        """What each slot should have."""
        return fair_shares(self.loads, self.room)

    @cached_property
    def ratios(self) -> Floats:
        """How many times its fair share each slot has."""
        return self._ratios(self.owners)

    @property
    def chance(self) -> float:
        """By how much of its fair share a slot may differ for no reason: few records are no evidence."""
        return 4 / float(np.sqrt(max(1.0, self.records)))

    @property
    def worst(self) -> int:
        """The slot that has most."""
        return int(np.argmax(self.ratios))

    def worst_after(self, final: Numbers) -> float:
        """How many times its fair share the worst slot has if these are the owners."""
        return float(self._ratios(final).max())

    def _ratios(self, owners: Numbers) -> Floats:
        held = np.bincount(owners, self.loads, len(self.room))
        return np.where(self.fair > 0, held / np.maximum(self.fair, 1e-300), 0.0)

    def grown(self, slots: Sequence[int], hosts: Mapping[int, str], workers: Mapping[str, Worker]) -> Survey:
        """The same cells, with these slots on these workers."""
        room = rooms(slots, hosts, workers)
        room = np.append(room, np.zeros(max(0, max(self.slots) + 1 - len(room))))
        return replace(self, loads=_capped(self.raw, room), slots=tuple(slots), hosts=hosts, room=room)

    def near(self, held: Mapping[int, Collection[str]]) -> Flags | None:
        """Which slots are on a worker that holds a replica of which slot's state."""
        if not held:
            return None
        found = np.zeros((len(self.room), len(self.room)), bool)
        for slot, workers in held.items():
            if slot < len(found):
                found[slot, [other for other, host in self.hosts.items() if host in workers]] = True
        return found

    def parts(self, final: Numbers, cells: Sequence[Cells]) -> list[tuple[Cells, Numbers]]:
        """Owners of all cells, group by group."""
        ends = np.cumsum([len(each.owners) for each in cells])[:-1]
        return list(zip(cells, np.split(final, ends), strict=True))


def _capped(raw: Floats, room: Floats) -> Floats:
    """Loads, none above what is fair for a slot when what is above is not counted."""
    loads = raw
    for _ in range(_ROUNDS):
        limit = float(fair_shares(loads, room).max())
        if loads.max(initial=0.0) <= limit:
            break
        loads = np.minimum(loads, limit)
    return loads


def rooms(slots: Collection[int], hosts: Mapping[int, str], workers: Mapping[str, Worker]) -> Floats:
    """What of a core each slot can have: its worker's cores, shared by its slots, and at most one.

    >>> rooms([0, 1, 2], {0: "a", 1: "a", 2: "b"}, {"a": Worker(1.0), "b": Worker(4.0)}).tolist()
    [0.5, 0.5, 1.0]
    """
    found = np.zeros(max(slots) + 1)
    counts: dict[str, int] = {}
    for slot in slots:
        host = hosts.get(slot, "")
        counts[host] = counts.get(host, 0) + 1
    for slot in slots:
        host = hosts.get(slot, "")
        found[slot] = min(1.0, workers[host].cores / counts[host]) if host in workers else 1.0
    return found
