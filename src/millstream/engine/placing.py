"""Placing: remembers where slots are, for whoever runs them. What it remembers is never journaled; see
`protocol.placement` for the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from millstream.protocol.placement import place, warmed


class Replicas(Protocol):
    """What placement is told of replicas."""

    @property
    def kept(self) -> bool:
        """Whether slots have any."""
        ...

    def lacks(self, slot: int, worker: str) -> int:
        """How many bytes of a slot's state a worker lacks; a few count as none."""
        ...

    def ready(self, slot: int, worker: str) -> bool:
        """Whether a slot need not wait any longer to go to a worker."""
        ...

    def starting(self, worker: str) -> bool:
        """Whether a worker is not to be given work just now, because what it needs is being started there."""
        ...

    def warm(self, waiting: Mapping[int, str]) -> None:
        """Has workers hold the state of slots that are to go there."""
        ...


class Placer:
    """Where slots are. `workers` gives those that are there now."""

    def __init__(self, workers: Callable[[], Collection[str]]) -> None:
        self._workers = workers
        self._known: frozenset[str] = frozenset()
        self._promised: dict[int, str] = {}
        self.placed: dict[int, str] = {}
        self.idle: tuple[str, ...] = ()
        """The workers that got no slots."""
        self.replicas: Replicas | None = None
        """What is known of replicas; placement goes by them."""

    def place(self, slots: Sequence[int], closing: Collection[str], closed: Collection[str]) -> dict[int, str]:
        """The worker that each slot is tried on first, from now on."""
        workers, before = self._workers(), {**self._promised, **self.placed}
        self._promised = {slot: worker for slot, worker in self._promised.items() if slot not in slots}
        replicas, waiting = self.replicas, {}
        if replicas is None:
            self.placed = place(slots, workers, before, self._known, closing, closed)
        else:
            wished = place(
                slots, workers, before, self._known, closing, closed, replicas.lacks, starting=replicas.starting
            )
            self.placed = warmed(wished, before, workers, replicas.ready)
            waiting = {slot: worker for slot, worker in wished.items() if self.placed[slot] != worker}
            replicas.warm(waiting)
        if not waiting:
            self._known = frozenset(each for each in workers if replicas is None or not replicas.starting(each))
        self.idle = tuple(sorted(set(workers) - {*self.placed.values(), *closing, *closed}))
        return self.placed

    def promise(
        self,
        slots: Sequence[int],
        closing: Collection[str],
        closed: Collection[str],
        brings: Callable[[int, str], int] = lambda slot, worker: 0,
    ) -> dict[int, str]:
        """Where slots are, and where these, which may not be there yet, will be placed first; `brings` is how much a
        worker lacks of what is about to come to a slot."""
        workers, both = self._workers(), sorted({*slots, *self.placed})
        before = {**self._promised, **self.placed}
        found = place(both, workers, before, workers, closing, closed, brings=brings)
        self._promised = {slot: found[slot] for slot in slots if slot in found and slot not in self.placed}
        return {**found, **self.placed}
