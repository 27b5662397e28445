"""The keeper of a worker's replicas: brings what the worker should hold into its cache, one piece after the other.

Rules
-----
- It is told what to hold, as a whole, after every commit; what it holds already is never brought again. So replication
  is incremental, and one that was interrupted goes on where it was, chunk by chunk (see `held`).
- It takes from peers first, in the order it was given, and from the store at last. Whatever a peer gives is checked
  like any other bytes; one that does not answer is left out for a while.
- A segment that a compaction made is made anew here, if all that it was made from is here: so compactions do not cause
  state to be sent again. The result counts only if it has the digest that the manifest gives; otherwise it is fetched.
- It never takes more than the worker's cache may have: what does not fit is left out, and named.
- What the readers of the cache find there is checked by them, too: a keeper that is wrong costs time, and no result.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.errors import DamagedObject, MillstreamError, StoreUnavailable
from millstream.protocol.keyspace import Range, clip
from millstream.protocol.manifest import Piece, SegmentRef
from millstream.protocol.replication import Order, Progress, Recipe, Want
from millstream.store import names
from millstream.store.cache import WorkerCache
from millstream.store.held import Fetcher, Gone, Peer, Traffic
from millstream.store.merge import remade
from millstream.store.objects import Data, Listed, ObjectStore
from millstream.store.segments import SegmentCache, bring

SHUN_S = 5.0
"""How long a peer that did not answer is left out."""
RETRY_S = 1.0
"""How long a piece that could not be brought waits."""

_Known = tuple[str, tuple[Range, ...]]
"""A segment, and the ranges of it that are there."""


@dataclass(slots=True)
class Shunned:
    """A peer that is left out for a while after it has not answered."""

    peer: Peer
    clock: Callable[[], float]
    until: float = 0.0

    def give(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview] | None:
        if self.clock() < self.until:
            return None
        try:
            return self.peer.give(name, spans)
        except OSError:
            self.until = self.clock() + SHUN_S
            return None


class Keeper:
    """Holds the replicas of one worker. `tell` and `progress` may be called from any thread, `work` from one."""

    def __init__(
        self,
        store: ObjectStore,
        worker: WorkerCache,
        reach: Callable[[str], Peer],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._worker, self._reach, self._clock = store, worker, reach, clock
        self._lock = threading.Lock()
        self._order = Order(-1)
        self._held: dict[_Known, SegmentRef] = {}
        self._later: dict[_Known, float] = {}
        self._peers: dict[str, Shunned] = {}
        self.traffic = Traffic()
        self.made = 0
        self.refused = 0
        self.trouble = ""

    def tell(self, order: Order) -> Progress:
        """From now on, this is to be held. An order that is older than the last one changes nothing."""
        with self._lock:
            if order.number >= self._order.number:
                self._order = order
                wanted = {(piece.segment.name, piece.ranges) for want in order.wants for piece in want.pieces}
                inputs = {piece.segment.name for recipe in order.recipes for piece in recipe.job.pieces}
                there = self._worker.objects()
                self._held = {
                    held: ref
                    for held, ref in self._held.items()
                    if (held in wanted or held[0] in inputs) and names.base(held[0]) in there
                }
                self._later = {held: until for held, until in self._later.items() if held in wanted}
        return self.progress()

    def progress(self) -> Progress:
        """How far it has come."""
        with self._lock:
            order = self._order
            lacks = {want.key: self._lacks(want) for want in order.wants}
        self._worker.note("replicas", [piece.segment.name for want in order.wants for piece in want.pieces])
        return Progress(
            order.number,
            lacks,
            self.traffic.given,
            self.traffic.fetched,
            self.made,
            0,
            self.refused,
            self.trouble,
        )

    def _lacks(self, want: Want) -> tuple[str, ...]:
        return tuple(piece.segment.name for piece in want.pieces if not self._has(piece))

    def _has(self, piece: Piece) -> bool:
        return (piece.segment.name, piece.ranges) in self._held

    def work(self) -> bool:
        """Brings one piece that is not there. Whether there was one to be brought."""
        chosen = self._next()
        if chosen is None:
            return False
        want, piece, recipe = chosen
        held = (piece.segment.name, piece.ranges)
        try:
            if recipe is None or not self._make(recipe, piece):
                if not self._room(piece):
                    self.refused += 1
                    self._later[held] = self._clock() + 30 * RETRY_S
                    self.trouble = f"the cache is full: {piece.segment.name} has no room"
                    return True
                self._bring(want, piece)
        except (StoreUnavailable, DamagedObject, Gone, OSError) as error:
            self.trouble = f"{type(error).__name__}: {error}"[:500]
            self._later[held] = self._clock() + RETRY_S
            return True
        with self._lock:
            self._held[held] = piece.segment
        return True

    def _next(self) -> tuple[Want, Piece, Recipe | None] | None:
        now = self._clock()
        with self._lock:
            order = self._order
            for want in order.wants:
                for piece in want.pieces:
                    held = (piece.segment.name, piece.ranges)
                    if held not in self._held and self._later.get(held, now) <= now:
                        return want, piece, _recipe_of(order.recipes, piece.segment)
        return None

    def _bring(self, want: Want, piece: Piece) -> None:
        peers = [self._peer(address) for address in want.origins]
        fetcher = Fetcher(self._store, self._worker.pace, self.traffic, peers)
        before = self.traffic.given + self.traffic.fetched
        bring(self._worker, piece, fetcher, self.traffic)
        self._worker.fetched(self.traffic.given + self.traffic.fetched - before, piece.segment.name, [])

    def _peer(self, address: str) -> Shunned:
        found = self._peers.get(address)
        if found is None:
            found = self._peers[address] = Shunned(self._reach(address), self._clock)
        return found

    def _room(self, piece: Piece) -> bool:
        return self._worker.room() >= piece.bytes

    def _make(self, recipe: Recipe, piece: Piece) -> bool:
        """Makes a segment anew, if all that it is made from is here; whether it is the one that was asked for."""
        with self._lock:
            inputs = [(part.segment.name, clip(part.ranges, recipe.job.ranges)) for part in recipe.job.pieces]
            if not all(self._covers(name, ranges) for name, ranges in inputs):
                return False
        nothing = _Nothing(f"recipe:{self._store.uri}")
        cache = SegmentCache(len(inputs))
        cache.attach(nothing.uri, self._worker)
        found = False
        with contextlib.suppress(MillstreamError, Gone):
            for ref, data in remade(nothing, cache, recipe.job, recipe.outputs):
                self._worker.keep(nothing, ref.name, data)
                self.made += len(data)
                found = found or ref.name == piece.segment.name
        return found

    def _covers(self, name: str, ranges: tuple[Range, ...]) -> bool:
        return any(held == name and clip(ranges, spans) == ranges for held, spans in self._held)


def _recipe_of(recipes: Sequence[Recipe], ref: SegmentRef) -> Recipe | None:
    return next((recipe for recipe in recipes if any(ref.name == made.name for made in recipe.outputs)), None)


@dataclass(slots=True)
class _Nothing:
    """A store that has nothing: what is made anew is made from what is here, or not at all."""

    uri: str

    def create(self, name: str, data: Data) -> bool:
        raise StoreUnavailable(f"{name}: nothing is stored here")

    def put(self, name: str, data: Data) -> None:
        raise StoreUnavailable(f"{name}: nothing is stored here")

    def get(self, name: str) -> memoryview | None:
        return None

    def get_ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview] | None:
        return None

    def list(self, prefix: str) -> Iterator[Listed]:
        return iter(())

    def delete(self, names: Iterable[str]) -> None:
        return

    def path(self, name: str) -> Path | None:
        return None
