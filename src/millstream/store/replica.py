"""The keeper of a worker's replicas: brings what the worker should hold into its cache, one piece after the other.

Rules
-----
- It is told what to hold, as a whole, after every commit; what it holds already is never brought again. So replication
  is incremental, and one that was interrupted goes on where it was, chunk by chunk (see `held`).
- It takes from peers first, in the order it was given, and from the store at last. Whatever a peer gives is checked
  like any other bytes; one that does not answer is left out for a while. Where the first of them is the one before in a
  chain, others are asked for a piece only if nothing has come from there for `CHAIN_S`, or if it has waited for
  `CHAINED_S`. Who has kept a piece waiting in vain is not waited for, until something comes from there again.
- A segment that a compaction made is made anew here, if all that it was made from is here: so compactions do not cause
  state to be sent again. The result counts only if it has the digest that the manifest gives; otherwise it is fetched.
- A worker that is about to hand something over sends what it writes here by itself, before the epoch is committed
  (`take`). Whether that ever counts is up to the manifest; what it never names goes with the rest that nobody needs.
- It never takes more than the worker's cache may have: what does not fit is left out, and named.
- What the readers of the cache find there is checked by them, too: a keeper that is wrong costs time, and no result.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from millstream.errors import DamagedObject, MillstreamError, StoreUnavailable
from millstream.protocol.keyspace import Range, clip, coalesce
from millstream.protocol.manifest import Piece, SegmentRef
from millstream.protocol.replication import Order, Progress, Recipe, Want
from millstream.store import names
from millstream.store.cache import WorkerCache
from millstream.store.held import FETCH_TOGETHER, Fetcher, Gone, Nobody, NoRoom, Peer, Traffic, is_right
from millstream.store.merge import give_memory_back, remade
from millstream.store.objects import Data, Listed, ObjectStore
from millstream.store.segments import SegmentCache, bring

SHUN_S = 5.0
"""How long a peer that did not answer is left out."""
SMALL = 256 << 10
"""Segments of at most so many bytes are asked for several at a time, whole."""
MANY = 256
"""How many at most."""
CHAIN_S = 10.0
"""How long whoever comes before in a chain is waited for if nothing comes from there."""
CHAINED_S = 60.0
"""How long a piece waits at most for it."""
ASK_AGAIN_S = 0.5
"""After which time it is asked again, at the earliest."""
MOST_CHAINED = 4
"""How many pieces wait for it at a time, but for small ones."""
ALONE_S = 5.0
"""How long what did not come together with others is asked for by itself."""
RETRY_S = 1.0
"""How long a piece that could not be brought waits."""
PAUSE_S = 30.0
"""How long everything waits where there is no room."""


class Giver(Peer, Protocol):
    """Another worker's agent."""

    def give_whole(self, sizes: Mapping[str, int]) -> dict[str, memoryview]:
        """Those of some objects, given with their sizes, that it has all of."""
        ...


@dataclass(slots=True)
class Shunned:
    """A peer that is left out for a while after it has not answered."""

    peer: Giver
    clock: Callable[[], float]
    until: float = 0.0
    gave: float = -math.inf
    """When something that was right last came from there."""
    stuck: bool = False
    """Whether it has kept somebody waiting in vain since."""

    def give(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[tuple[int, memoryview]] | None:
        if self.clock() < self.until:
            return None
        try:
            return self.peer.give(name, spans)
        except Exception:  # whatever answers there is not what was meant
            self.until = self.clock() + SHUN_S
            return None

    def give_whole(self, sizes: Mapping[str, int]) -> dict[str, memoryview]:
        if self.clock() < self.until:
            return {}
        try:
            return self.peer.give_whole(sizes)
        except Exception:  # as above
            self.until = self.clock() + SHUN_S
            return {}

    def came(self) -> None:
        """Something has come from there, and was right."""
        self.gave, self.stuck = self.clock(), False


class Keeper:
    """Holds the replicas of one worker. `tell` and `progress` may be called from any thread, `work` from one."""

    def __init__(
        self,
        store: ObjectStore,
        worker: WorkerCache,
        reach: Callable[[str], Giver],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._worker, self._reach, self._clock = store, worker, reach, clock
        self._lock = threading.Lock()
        self._order = Order(-1)
        self._held: dict[str, tuple[Range, ...]] = {}  # by segment, the ranges that are there
        self._later: dict[str, float] = {}
        self._chained: dict[str, float] = {}  # the segments that wait for the one before in a chain, and since when
        self._alone: dict[str, float] = {}  # those that did not come together with others, and until when that counts
        self._paused = 0.0
        self._peers: dict[str, Shunned] = {}
        self.traffic = Traffic()
        self.made = 0
        self.trouble = ""

    def tell(self, order: Order) -> Progress:
        """From now on, this is to be held. An order that is older than the last one changes nothing."""
        there = self._worker.objects()
        with self._lock:
            if order.number >= self._order.number:
                self._order = order
                wanted = set(_named(order))
                self._held = {
                    name: ranges for name, ranges in self._held.items() if name in wanted and names.base(name) in there
                }
                self._later = {name: until for name, until in self._later.items() if name in wanted}
                self._chained = {name: since for name, since in self._chained.items() if name in wanted}
                self._alone = {name: until for name, until in self._alone.items() if name in wanted}
        return self.progress()

    def progress(self) -> Progress:
        """How far it has come."""
        with self._lock:
            order = self._order
            lacks = {want.key: self._lacks(want) for want in order.wants}
            full = self._clock() < self._paused
        self._worker.note("replicas", _named(order))
        traffic = self.traffic
        return Progress(
            order.number, lacks, traffic.given, traffic.fetched, self.made, 0, traffic.give_s, traffic.fetch_s, full,
            self.trouble,
        )  # fmt: skip

    def _lacks(self, want: Want) -> tuple[str, ...]:
        return tuple(piece.segment.name for piece in want.pieces if not self._has(piece.segment.name, piece.ranges))

    def _has(self, name: str, ranges: tuple[Range, ...]) -> bool:
        held = self._held.get(name)
        return held is not None and (held == ranges or clip(ranges, held) == ranges)

    def work(self) -> bool:
        """Brings one piece that is not there. Whether there was one to be brought."""
        chosen = self._next()
        if chosen is None:
            return False
        want, piece, recipe = chosen
        name = piece.segment.name
        try:
            if recipe is None and self._bring_together(want, piece):
                return True
            if (recipe is None or not self._make(recipe, piece)) and not self._bring(want, piece):
                return True
        except NoRoom as error:  # of the disk, or of what the cache may have: others would find none either
            self._put_off(name, error, pause=True)
        except (StoreUnavailable, DamagedObject, Gone, OSError) as error:
            self._put_off(name, error)
        except Exception as error:  # a bug, or no memory: others must not wait behind it
            self._put_off(name, error)
            raise
        else:
            self._is_here(name, piece.ranges)
        return True

    def take(self, ref: SegmentRef, data: Data) -> None:
        """Holds a segment that was sent here by whoever has written it. Raises `OSError` if it cannot."""
        if not self._worker.knows(ref.name) or len(data) != ref.bytes:
            raise OSError(f"{ref.name!r} with {len(data)} bytes is no segment of {ref.bytes} bytes")
        nothing = _Nothing(f"sent:{self._store.uri}")
        try:
            self._check_room(ref, ref.bytes)
            self._took(ref.name, self._worker.keep(nothing, ref.name, data))
            bring(self._worker, Piece(ref, ref.covers), Fetcher(nothing, None, Traffic()), Traffic())
        except (DamagedObject, Gone) as error:
            self._worker.drop(ref.name)
            raise OSError(str(error)) from error
        with self._lock:
            self._held[ref.name] = ref.covers

    def _put_off(self, name: str, error: Exception, pause: bool = False) -> None:
        self.trouble = f"{type(error).__name__}: {error}"[:500]
        with self._lock:
            self._later[name] = self._clock() + RETRY_S
            if pause:
                self._paused = self._clock() + PAUSE_S

    def _next(self) -> tuple[Want, Piece, Recipe | None] | None:
        now = self._clock()
        with self._lock:
            order = self._order
            if now < self._paused:
                return None
            for want in order.wants:
                waiting = 0
                for piece in want.pieces:
                    name = piece.segment.name
                    if self._has(name, piece.ranges):
                        continue
                    if self._later.get(name, now) <= now:
                        return want, piece, _recipe_of(order.recipes, piece.segment)
                    waiting += name in self._chained and piece.segment.bytes > SMALL
                    if waiting == MOST_CHAINED:
                        break
        return None

    def _bring_together(self, want: Want, first: Piece) -> bool:
        """Brings small segments in one call, which new ones mostly are: this one, and others of which nothing is here.
        Whether there is nothing more to do about it now; otherwise it is to be brought by itself."""
        now, name = self._clock(), first.segment.name
        if not want.origins or not self._is_small(first) or self._alone.get(name, now) > now or self._worker.has(name):
            return False
        there, room = self._worker.objects(), FETCH_TOGETHER
        wanted: dict[str, SegmentRef] = {}
        with self._lock:
            made = {ref.name for recipe in self._order.recipes for ref in recipe.outputs}
            for piece in want.pieces:
                name, ref = piece.segment.name, piece.segment
                if ref.bytes > room or not self._is_small(piece) or self._has(name, piece.ranges) or name in made:
                    continue
                later = max(self._later.get(name, now), self._alone.get(name, now))
                if later <= now and names.base(name) not in there:
                    wanted[name] = ref
                    room -= ref.bytes
                if len(wanted) == MANY:
                    break
        if len(wanted) < 2:
            return False
        peer = self._peer(want.origins[0])
        began = time.perf_counter()
        found = peer.give_whole({name: ref.bytes for name, ref in wanted.items()})
        self.traffic.give_s += time.perf_counter() - began
        nothing = _Nothing(f"sent:{self._store.uri}")
        for name, data in found.items():
            ref = wanted[name]
            if is_right(ref, data):
                self._check_room(ref, ref.bytes)
                self._took(name, self._worker.keep(nothing, name, data))
                if not self._worker.has(name):
                    raise NoRoom(f"the cache in {self._worker.directory} cannot be written")
                self.traffic.given += ref.bytes
                self._is_here(name, ref.covers)
                peer.came()
                del wanted[name]
        for name in wanted:
            if not want.chained or not self._goes_on_waiting(name, peer):
                self._alone[name] = now + ALONE_S
        return first.segment.name not in wanted or self._later.get(first.segment.name, now) > now

    @staticmethod
    def _is_small(piece: Piece) -> bool:
        return piece.segment.bytes <= SMALL and piece.ranges == piece.segment.covers

    def _is_here(self, name: str, ranges: tuple[Range, ...]) -> None:
        self.trouble = ""
        with self._lock:
            self._chained.pop(name, None)
            self._held[name] = coalesce([*self._held.get(name, ()), *ranges])

    def _bring(self, want: Want, piece: Piece) -> bool:
        """Brings a piece; whether it is there. It is not if the one before in the chain is waited for."""
        name = piece.segment.name
        self._check_room(piece.segment, piece.bytes)
        peers = [self._peer(address) for address in want.origins]
        waits = bool(peers) and want.chained and self._may_wait(name, peers[0])
        given, fetched = self.traffic.given, self.traffic.fetched
        if waits:
            fetcher: Fetcher = Nobody(self._store, None, self.traffic, peers[:1])
        else:
            fetcher = Fetcher(self._store, self._worker.pace, self.traffic, peers)
        try:
            bring(self._worker, piece, fetcher, self.traffic)
        except Gone as error:
            if not waits or isinstance(error, NoRoom):
                raise
            if self.traffic.given > given:
                peers[0].came()
            self._goes_on_waiting(name, peers[0])
            return False
        finally:
            self._took(name, self.traffic.given + self.traffic.fetched - given - fetched)
        if waits:
            peers[0].came()
        return True

    def _may_wait(self, name: str, peer: Shunned) -> bool:
        """Whether to wait for the one before in the chain, rather than to ask anybody else."""
        now = self._clock()
        since = self._chained.get(name, now)
        if now - max(since, peer.gave) >= CHAIN_S:
            peer.stuck = True
        return peer.until <= now and not peer.stuck and now - since < CHAINED_S

    def _goes_on_waiting(self, name: str, peer: Shunned) -> bool:
        """Has a segment wait for a moment for the one before in the chain; whether it may."""
        if not self._may_wait(name, peer):
            return False
        now = self._clock()
        with self._lock:
            self._chained.setdefault(name, now)
            self._later[name] = now + ASK_AGAIN_S
        return True

    def _check_room(self, ref: SegmentRef, size: int) -> None:
        if not self._worker.has(ref.name) and not self._worker.has_room(size):
            raise NoRoom(f"the cache is full: there is no room for {ref.name}")

    def _took(self, name: str, count: int) -> None:
        """Has the cache make room if it has too much by now, and forgets what went for it."""
        gone = set(self._worker.fetched(count, name, []))
        if gone:
            with self._lock:
                self._held = {held: ranges for held, ranges in self._held.items() if names.base(held) not in gone}

    def _peer(self, address: str) -> Shunned:
        found = self._peers.get(address)
        if found is None:
            found = self._peers[address] = Shunned(self._reach(address), self._clock)
        return found

    def _make(self, recipe: Recipe, piece: Piece) -> bool:
        """Makes a segment anew, if all that it is made from is here; whether it is the one that was asked for, and is
        here now."""
        with self._lock:
            inputs = [(part.segment.name, clip(part.ranges, recipe.job.ranges)) for part in recipe.job.pieces]
            if not all(self._has(name, ranges) for name, ranges in inputs):
                return False
        for ref in recipe.outputs:
            self._check_room(ref, ref.bytes)
        nothing = _Nothing(f"recipe:{self._store.uri}")
        cache = SegmentCache(len(inputs))
        cache.attach(nothing.uri, self._worker)
        found = False
        with contextlib.suppress(MillstreamError, Gone):
            for ref, data in remade(nothing, cache, recipe.job, recipe.outputs):
                self._took(ref.name, self._worker.keep(nothing, ref.name, data))
                self.made += len(data)
                found = found or ref.name == piece.segment.name
        del cache
        give_memory_back()
        return found and self._worker.has(piece.segment.name)


def _named(order: Order) -> list[str]:
    """The segments that an order needs, those that others are made from, too."""
    found = [piece.segment.name for want in order.wants for piece in want.pieces]
    return found + [piece.segment.name for recipe in order.recipes for piece in recipe.job.pieces]


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
