"""The layout: where the state of a query lies, as plans and policies are made from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from millstream.protocol.manifest import Manifest
from millstream.protocol.routing import RoutingTable

RATE = 125_000_000
"""The bytes in a second that a worker is taken to fetch, where nothing is known: 1 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the state of a query lies: what plans are made from.

    `placement` says which slots each worker has; `fetch_limit` is the rate at which a worker fetches what it does not
    hold, in bytes per second, or 0 if that is not known.
    """

    store: str
    tables: Mapping[str, RoutingTable]
    manifest: Manifest = field(default_factory=Manifest)
    placement: Mapping[str, Collection[int]] = field(default_factory=dict)
    fetch_limit: int = 0
    generation: int = 0
    """Of the driver that has these workers."""
    replicas: Mapping[int, Collection[str]] = field(default_factory=dict)
    """The workers that hold replicas of each slot."""
    epoch_s: float = 0.0
    """How long the last epoch took; 0 if that is not known."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """The bytes in a second that a worker was seen to get from the `store`, and from another as a `replica`; and what
    was learned of the costs of moving (see `protocol.pacing`)."""
    idle: Collection[str] = ()
    """The workers that have no slots."""
    written: int = 0
    """The bytes of state that an epoch writes, of all slots."""

    @property
    def steady_s(self) -> float:
        """How long an epoch takes in which nothing moves; 0 if that is not known."""
        return self.rates.get("steady_s") or self.epoch_s

    @property
    def workers(self) -> set[str]:
        """All workers."""
        return {*self.placement, *self.idle}

    @property
    def hosts(self) -> dict[int, str]:
        """The worker of each slot."""
        return {slot: worker for worker, slots in self.placement.items() for slot in slots}

    @property
    def fetch_rate(self) -> float:
        """The bytes in a second that a worker fetches: as measured, at most the limit."""
        measured = self.rates.get("store") or float(self.fetch_limit or RATE)
        return min(measured, self.fetch_limit) if self.fetch_limit else measured

    @property
    def give_rate(self) -> float:
        """The bytes in a second that a worker gets from another; as many as it fetches, if that is not known."""
        return self.rates.get("replica") or self.fetch_rate

    @property
    def owners(self) -> set[int]:
        """The slots that own something of some step."""
        return {slot for table in self.tables.values() for slot in table.slots}

    @property
    def slots(self) -> set[int]:
        """The slots that something can move to: up to the highest that owns something."""
        return set(range(max(self.owners, default=-1) + 1))
