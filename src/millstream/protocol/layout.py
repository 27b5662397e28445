"""The layout: where the state of a query lies, as plans and policies are made from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from millstream.protocol.manifest import Manifest
from millstream.protocol.routing import RoutingTable


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

    @property
    def owners(self) -> set[int]:
        """The slots that own something of some step."""
        return {slot for table in self.tables.values() for slot in table.slots}

    @property
    def slots(self) -> set[int]:
        """The slots that something can move to: up to the highest that owns something."""
        return set(range(max(self.owners, default=-1) + 1))
