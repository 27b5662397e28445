"""Spending: what the tasks of epochs paid for state that they had not read before, from where it came and how fast.

Rules
-----
- Bytes that were found at a slot's worker count as its `cache`, unless the slot has just got the worker, or some of its
  ranges: then they were there for another reason, as a `replica` or because they were about to move there.
- Bytes that were checked before anybody needed them count as `ahead`, in the epoch in which they were checked. They
  cost nothing when a slot comes to need them.
- A rate is told once enough has been moved for it to mean something, and again only when it is another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from millstream.protocol.epochs import History, Report
from millstream.protocol.routing import RoutingTable

ENOUGH = 4 << 20
"""How many bytes must have been moved for a rate to be worth telling."""
WORTH = 256 << 10
"""What a task has fetched less than says more about the way to the store than about a rate."""
MEMORY = 1 << 30
"""How many bytes back fetches count in full."""
SIMILAR = 1.25
"""Rates that differ by less are the same."""


def arrived(changed: Mapping[str, RoutingTable], before: History, workers: Mapping[str, Sequence[int]]) -> set[int]:
    """The slots that have got something that they had not before: ranges, or another worker."""
    placed = {slot: worker for worker, slots in before.workers.items() for slot in slots}
    found = {slot for worker, slots in workers.items() for slot in slots if placed.get(slot, worker) != worker}
    for step, table in changed.items():
        known = before.tables[step].ranges if step in before.tables else {}
        found |= {int(slot) for slot, ranges in table.ranges.items() if known.get(slot) != ranges}
    return found


def sources_of(reports: Sequence[Report], slots: Sequence[int], arrived: Collection[int]) -> dict[str, int]:
    """The bytes that were read for the first time, by where they came from; `slots` are those of the tasks."""
    found: dict[str, int] = {}
    for report in reports:
        source = "replica" if slots[report.slot] in arrived else "cache"
        for name, key in ((source, "found"), ("store", "fetched"), ("ahead", "ahead")):
            size = report.read.get(key, 0)
            if size:
                found[name] = found.get(name, 0) + size
    return found


def loads_of(reports: Sequence[Report], slots: Sequence[int]) -> dict[int, float]:
    """How many records each slot had, of all steps."""
    found = dict.fromkeys(slots, 0.0)
    for report in reports:
        found[slots[report.slot]] += sum(report.records.values())
    return found


class Rates:
    """How fast workers get state, since this driver began."""

    def __init__(self) -> None:
        self._fetched, self._seconds = 0, 0.0

    def fetched(self, reports: Sequence[Report]) -> None:
        """Takes note of what tasks have fetched from the store."""
        large = [report for report in reports if report.read.get("fetched", 0) >= WORTH]
        self._fetched += sum(report.read["fetched"] for report in large)
        self._seconds += sum(report.timings_ms["fetch"] for report in large) / 1000
        if self._fetched > MEMORY:
            self._fetched, self._seconds = self._fetched // 2, self._seconds / 2

    def told(
        self, taken: Mapping[str, tuple[int, float]], learned: Mapping[str, float], known: Mapping[str, float]
    ) -> dict[str, float] | None:
        """All rates, and what was learned of the costs of moving, if one of them is another than is known; `taken` are
        bytes and seconds of others than tasks."""
        size, seconds = taken.get("store", (0, 0.0))
        sums = {**taken, "store": (size + self._fetched, seconds + self._seconds)}
        rates = {name: float(round(size / took)) for name, (size, took) in sums.items() if size >= ENOUGH and took > 0}
        rates |= learned
        other = [
            name for name, rate in rates.items() if not 1 / SIMILAR < rate / (known.get(name) or 1e-9) < SIMILAR
        ]  # fmt: skip
        return {**known, **rates} if other else None
