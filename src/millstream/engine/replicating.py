"""Replicating: has workers hold the state of each other's slots, and what is about to move to them.

Rules
-----
- It runs beside the epochs, in a thread of its own. No epoch waits for it, and what it does never changes a result:
  only how much of what a slot needs is there already where it goes.
- After every commit each worker is told, as a whole, what to hold: first what is about to move there, then the replicas
  that it is a member of the group for. The agents take what they lack from each other.
- What a worker lacks is known from its last answer. Whatever was not in the order that it answered for, it lacks; but
  for what the tasks of the last epochs have sent it, and it has acknowledged.
- Where nobody says how many replicas there are to be, there are none while all workers are on one host, which they
  would not outlive, and one of each slot as soon as there is a second host.
- A new worker is left alone until its agent has started: the task that starts it takes a core, and tasks of slots would
  wait for that core, for as long as `spark.locality.wait` says.
- A worker whose agent does not answer holds nothing, as far as is known here; another agent is started there, now and
  then. What moves to a worker that cannot be told anything, or has no room, is not waited for.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol
from zlib import crc32

from millstream.engine.load_history import LoadHistory
from millstream.protocol.epochs import History, Report
from millstream.protocol.handover import Coming
from millstream.protocol.keyspace import Range, clip, coalesce
from millstream.protocol.manifest import Manifest, Piece
from millstream.protocol.replication import (
    SLACK,
    Groups,
    Order,
    Progress,
    Recipe,
    Want,
    by_load,
    replica_groups,
    upstream,
)
from millstream.protocol.routing import RoutingTable
from millstream.protocol.steering import draining

EVERY_S = 0.1
"""How often workers are asked how far they are, while they lack something."""
BEAT_S = 5.0
"""How often otherwise."""
LAG = 1
"""So many epochs before the last one have just been written."""
FEW = 4 << 20
"""What a worker may lack of a slot without it making a difference to where the slot goes."""
WARM_S = 600.0
"""How long a slot waits at most for a new worker to hold its state."""
START_S = 30.0
"""How long it waits for an agent there."""
ASKED_TOGETHER = 16
"""How many workers are asked at a time."""
AGAIN_S = 60.0
"""How long after an agent was started another one is, at most; at first it is a second."""
_LOG = logging.getLogger("millstream")


class Agents(Protocol):
    """The agents of the workers, as the driver reaches them."""

    def hosts(self) -> Mapping[str, str]:
        """The workers that are there now, and the host of each."""
        ...

    def start(self, workers: Sequence[str]) -> dict[str, str]:
        """Starts agents on these workers; the addresses of those that have one now."""
        ...

    def tell(self, worker: str, order: Order) -> Progress:
        """Gives an agent its order; how far it is with it. Raises `OSError` if it does not answer."""
        ...

    def progress(self, worker: str) -> Progress:
        """How far an agent is with its order."""
        ...

    def forget(self, worker: str) -> None:
        """An agent does not answer any more, or its worker is gone."""
        ...

    def end(self) -> None:
        """Ends all of them."""
        ...


@dataclass(slots=True)
class _Told:
    """What a worker was told last, and how far it is. `names` are the segments of each want."""

    order: Order
    names: dict[str, frozenset[str]]
    progress: Progress


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """What is known of a query's replicas. Made by `RunningQuery.replicas`."""

    groups: Groups = field(default_factory=dict)
    """The workers that hold a replica of each slot, or are about to, in the order of the chain; from elsewhere
    (`Control.replicas`), only those that have the state of the last commit, but for a few megabytes or what the last
    epochs have written."""
    lacking: dict[int, int] = field(default_factory=dict)
    """Of each slot, how many bytes of the last commit the best of its replicas lacks."""
    given: int = 0
    """Bytes that workers have given each other so far."""
    fetched: int = 0
    """Bytes that agents have fetched from the store."""
    made: int = 0
    """Bytes of compacted segments that replicas have made themselves."""
    agents: dict[str, str] = field(default_factory=dict)
    """The workers that have an agent, and its address."""
    troubles: dict[str, str] = field(default_factory=dict)
    """What last went wrong at a worker."""


class Replicator:
    """Keeps replicas for one driver."""

    def __init__(
        self,
        agents: Agents,
        count: int | None,
        background: bool = True,
        recipes: Callable[[], Sequence[Recipe]] = tuple,
        ahead: Callable[[], Mapping[int, Sequence[Piece]]] = dict,
        clock: Callable[[], float] = time.monotonic,
        by_load: bool = False,
    ) -> None:
        self._loads = LoadHistory() if by_load else None
        self._agents, self._count, self._background, self._clock = agents, count, background, clock
        self._recipes, self._ahead = recipes, ahead
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._starting: threading.Thread | None = None
        self._history: History | None = None
        self._coming: dict[str, Coming] = {}
        self._addresses: dict[str, str] = {}
        self._told: dict[str, _Told] = {}
        self._again: dict[str, tuple[float, int]] = {}  # when to start an agent again, and how often that was tried
        self._expected: dict[tuple[str, str], float] = {}  # by move and worker, since when it is about to come
        self._alone: dict[str, float] = {}  # since when a worker is there and has no agent
        self._silent: dict[str, float] = {}  # since when a worker has not been heard of
        self._pool = ThreadPoolExecutor(ASKED_TOGETHER, "millstream-asking") if background else None
        self._shares: tuple[History | None, dict[int, list[Piece]]] = (None, {})
        self._troubles: dict[str, str] = {}
        self._warming: dict[tuple[int, str], float] = {}
        self._through: dict[int, dict[str, set[str]]] = {}  # by epoch and worker, the segments that it was sent
        self._went_by_load = False  # whether groups have gone by load, so that they are not to go by bytes again
        self.groups: Groups = {}
        self.holders: Groups = {}
        """The members of each slot's group that had its state when they were asked last, but for about as much as the
        last epochs have written, or a few bytes. Others were only asked to hold it."""

    @property
    def kept(self) -> bool:
        """Whether slots have replicas; without, agents only prepare migrations, and warm up new workers."""
        return bool(self._count)

    # -- in the driver's thread

    def after_commit(self, history: History, loads: Mapping[int, float] = MappingProxyType({})) -> None:
        """Has replicas follow a commit; `loads` are those that slots had in its epoch."""
        self._history = history
        if self._loads is not None:
            self._loads.add(loads)
        self._go_on()

    def expect(self, coming: Mapping[str, Coming]) -> None:
        """Has workers hold what is about to move to them, by name of the move; those named before count no more."""
        if dict(coming) != self._coming:
            with self._lock:
                self._coming = dict(coming)
            now = self._clock()
            moves = [(key, move.worker) for key, move in coming.items()]
            self._expected = {move: self._expected.get(move, now) for move in moves}
            if self._history is not None:
                self._go_on()

    def through(
        self, due: Collection[str], tables: Mapping[str, RoutingTable]
    ) -> dict[int, dict[str, tuple[str, ...]]]:
        """Which slots should send what they write to which workers, of which steps: those that own, by these tables,
        what is due to move next."""
        found: dict[int, dict[str, tuple[str, ...]]] = {}
        for key in due:
            coming = self._coming.get(key)
            if coming is None or not self.has_agent(coming.worker):
                continue
            for step, ranges in coming.parts:
                slots = {slot for span in ranges for _, slot in tables[step].cut(span)} if step in tables else set()
                for slot in sorted(slots):
                    known = found.setdefault(slot, {})
                    known[coming.worker] = (*(each for each in known.get(coming.worker, ()) if each != step), step)
        return found

    def sent_through(self, epoch: int, reports: Sequence[Report]) -> None:
        """Takes note of what the tasks of an epoch have sent to whom."""
        got: dict[str, set[str]] = {}
        for report in reports:
            for worker, names in report.through.items():
                got.setdefault(worker, set()).update(names)
        with self._lock:
            self._through = {known: sent for known, sent in self._through.items() if known >= epoch - 1 - LAG}
            if got:
                self._through[epoch] = got

    def _go_on(self) -> None:
        if not self._background:
            self.turn()
        elif self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(target=self._run, name="millstream-replicas", daemon=True)
            self._thread.start()
        self._woken.set()

    def has_agent(self, worker: str) -> bool:
        """Whether a worker can be told anything."""
        return worker in self._addresses

    def _bytes(self, key: str, worker: str, pieces: Sequence[Piece]) -> int:
        """How many bytes of these pieces a worker lacks, as far as is known; `key` is that of the want."""
        with self._lock:
            told = self._told.get(worker)
            known = told.names.get(key, frozenset()) if told is not None else frozenset()
            lacking = set(told.progress.lacks.get(key, ())) if told is not None else set()
            sent = {name for got in self._through.values() for name in got.get(worker, ())}
        here = (known - lacking) | sent
        return sum(piece.bytes for piece in pieces if piece.segment.name not in here)

    def held(
        self, workers: Mapping[str, Sequence[int]], due: Collection[str]
    ) -> dict[int, tuple[list[Piece], list[Piece]]]:
        """What workers hold, as far as is known, beside the state of their own slots: of the moves that are due, and
        for other reasons; shared out among the slots that each has, in the same way every time."""
        with self._lock:
            known = {worker: self._told[worker] for worker in workers if worker in self._told}
        found: dict[int, tuple[list[Piece], list[Piece]]] = {}
        for worker, told in known.items():
            both: tuple[list[Piece], list[Piece]] = ([], [])
            for want in told.order.wants:
                lacks = set(told.progress.lacks.get(want.key, ()))
                both[want.key not in due].extend(each for each in want.pieces if each.segment.name not in lacks)
            slots = workers[worker]
            found |= {slot: ([], []) for slot in slots}
            for kind, pieces in enumerate(both):
                for piece in pieces:
                    found[slots[crc32(piece.segment.name.encode()) % len(slots)]][kind].append(piece)
        return found

    def lacks(self, slot: int, worker: str) -> int:
        """How many bytes of a slot's state, as of the last commit, a worker lacks; a few count as none."""
        history = self._history
        lacking = 0 if history is None else self._bytes(f"slot {slot}", worker, self._pieces(history).get(slot, []))
        return lacking if lacking > FEW else 0

    def ready(self, slot: int, worker: str) -> bool:
        """Whether a worker has the state of a slot, or cannot be made to have it."""
        began = self._warming.get((slot, worker))
        waited = 0.0 if began is None else self._clock() - began
        if not self.has_agent(worker):
            return waited > START_S
        return waited > WARM_S or not self.lacks(slot, worker) or self._full(worker)

    def starting(self, worker: str) -> bool:
        """Whether a worker's agent has not started yet, and may be about to."""
        now = self._clock()
        alone = now - self._alone.setdefault(worker, now)
        return self._history is not None and not self.has_agent(worker) and alone <= START_S

    def _full(self, worker: str) -> bool:
        with self._lock:
            told = self._told.get(worker)
        return told is not None and told.progress.full

    def warm(self, waiting: Mapping[int, str]) -> None:
        """Has workers hold the state of slots that are to go there, from now on."""
        now = self._clock()
        self._warming = {item: self._warming.get(item, now) for item in waiting.items()}

    def lacks_of_move(self, key: str, history: History) -> tuple[int, int]:
        """How many bytes of what is about to move a worker lacks, and how many of these are not of the last epochs: of
        what those have written, it lacks as much however long one waits."""
        coming = self._coming.get(key)
        if coming is None or not self._can_be_prepared(key, coming.worker):
            return 0, 0
        pieces = pieces_of(history.manifest, coming.parts)
        older = [piece for piece in pieces if piece.segment.order < history.epoch - LAG]
        return self._bytes(key, coming.worker, pieces), self._bytes(key, coming.worker, older)

    def has_made(self, slot: int, recipe: Recipe) -> bool:
        """Whether all who need what came out of a compaction for a slot have it, as far as that can be expected: its
        replicas, and whoever has some of its ranges by now, or is about to."""
        history, pieces = self._history, [Piece(made, made.covers) for made in recipe.outputs]
        if history is None:
            return True
        needed = self._needed(slot, pieces, history, _placed(history))
        return not any(
            self._bytes(_ahead(slot), worker, parts)
            for worker, parts in needed.items()
            if self.has_agent(worker) and not self._full(worker)
        )

    def _needed(
        self, slot: int, made: Sequence[Piece], history: History, placed: Mapping[int, str]
    ) -> dict[str, list[Piece]]:
        """Who needs what of that which a compaction has made for a slot, but for the worker that made it: its replicas
        all of it, and others the ranges that they have by now, or are about to have."""
        members = [*self.groups.get(slot, ()), *(worker for warmed, worker in self._warming if warmed == slot)]
        found: dict[str, list[Piece]] = {worker: list(made) for worker in members}
        with self._lock:
            coming = list(self._coming.values())
        for piece in made:
            step = piece.segment.family.step
            within: dict[str, list[Range]] = {}
            for move in coming:
                for known, ranges in move.parts:
                    if known == step:
                        within.setdefault(move.worker, []).extend(ranges)
            if step in history.tables:
                for span in piece.ranges:
                    for part, owner in history.tables[step].cut(span):
                        within.setdefault(placed.get(owner, ""), []).append(part)
            for worker, spans in within.items():
                ranges = clip(piece.ranges, coalesce(spans))
                if ranges and worker not in members and worker != placed.get(slot):
                    found.setdefault(worker, []).append(Piece(piece.segment, ranges))
        return found

    def _can_be_prepared(self, key: str, worker: str) -> bool:
        """Whether it is of any use to wait: not where there is no agent, nor where there is no room."""
        if worker in self._told:
            return not self._full(worker)
        return self._clock() - max(self._expected.get((key, worker), 0.0), self._silent.get(worker, 0.0)) < START_S

    def _pieces(self, history: History) -> dict[int, list[Piece]]:
        known, shares = self._shares
        if known is not history:
            shares = slot_pieces(history)
            self._shares = (history, shares)
        return shares

    def facts(self) -> ReplicaFacts:
        """What is known now."""
        history, groups = self._history, dict(self.groups)
        with self._lock:
            progress = [told.progress for told in self._told.values()]
        lacking = {}
        if history is not None:
            for slot, pieces in self._pieces(history).items():
                members = groups.get(slot, ())
                if members:
                    lacking[slot] = min(self._bytes(f"slot {slot}", worker, pieces) for worker in members)
        return ReplicaFacts(
            groups,
            lacking,
            sum(each.given for each in progress),
            sum(each.fetched for each in progress),
            sum(each.made for each in progress),
            dict(self._addresses),
            dict(self._troubles),
        )

    def taken(self) -> dict[str, tuple[int, float]]:
        """How many bytes agents have got, from other workers and from the store, and how many seconds that took."""
        with self._lock:
            progress = [told.progress for told in self._told.values()]
        return {
            "replica": (sum(each.given for each in progress), sum(each.given_s for each in progress)),
            "store": (sum(each.fetched for each in progress), sum(each.fetched_s for each in progress)),
        }

    def close(self) -> None:
        """Ends the thread, and the agents."""
        self._ended.set()
        self._woken.set()
        for thread in (self._thread, self._starting):
            if thread is not None:
                thread.join(timeout=30)
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._agents.end()

    # -- in its own

    def _run(self) -> None:
        wait_s = EVERY_S
        seen: dict[str, Progress] = {}
        while not self._ended.is_set():
            try:
                complete = self.turn()
            except Exception:  # replicas are behind then, and nothing else is
                complete = True
                _LOG.exception("replicating failed and will be tried again")
            with self._lock:
                now = {worker: told.progress for worker, told in self._told.items()}
            wait_s = EVERY_S if now != seen and not complete else min(BEAT_S, 2 * wait_s)
            seen = now
            self._woken.wait(BEAT_S if complete else wait_s)
            self._woken.clear()

    def turn(self) -> bool:
        """Tells every worker what to hold. Whether all have it."""
        history = self._history
        if history is None or self._ended.is_set():
            return True
        hosts = self._agents.hosts()
        if not hosts:  # nobody answers just now
            return False
        if self._count is None and len({*hosts.values()}) > 1:
            self._count = 1  # and it stays: if one of two hosts is lost, what the other one holds is needed
        self._start(hosts)
        placed = _placed(history)
        shares = self._pieces(history)
        sizes = {slot: sum(piece.bytes for piece in pieces) for slot, pieces in shares.items()}
        usable = {worker: host for worker, host in hosts.items() if worker in self._addresses}
        for worker in set(placed.values()) & set(hosts):  # its slots have replicas, even if it has no agent
            usable.setdefault(worker, hosts[worker])
        leaving: frozenset[str] = frozenset().union(*draining(history.outcomes.values(), history.generation))
        groups = replica_groups(
            sizes, placed, usable, self._count or 0, self.groups, leaving, math.inf if self._went_by_load else SLACK
        )
        known = self._loads.taken() if self._loads is not None else {}
        if known:
            staying = {worker: host for worker, host in usable.items() if worker not in leaving}
            groups, self._went_by_load = by_load(groups, placed, staying, known), True
        self.groups = groups
        with self._lock:
            coming = dict(self._coming)
        complete = True
        ahead = {slot: self._needed(slot, made, history, placed) for slot, made in self._ahead().items()}
        asked = sorted(self._addresses)
        orders = [self._order(worker, history, shares, placed, coming, ahead) for worker in asked]
        for worker, order, progress in self._answers(asked, orders):
            if isinstance(progress, OSError):
                self._lost(worker, str(progress))
                complete = False
                continue
            self._heard(worker, order, progress)
            complete = complete and not any(progress.lacks.values())
        self.holders = self._who_holds(history, shares, sizes)
        return complete

    def _answers(
        self, asked: Sequence[str], orders: Sequence[Order]
    ) -> Iterator[tuple[str, Order, Progress | OSError]]:
        """What each says to its order, as they answer: one that does not must not hold up others."""
        if self._pool is None:
            yield from ((*each, self._ask(*each)) for each in zip(asked, orders, strict=True))
            return
        asking = {self._pool.submit(self._ask, *each): each for each in zip(asked, orders, strict=True)}
        for answer in as_completed(asking):
            yield (*asking[answer], answer.result())

    def _ask(self, worker: str, order: Order) -> Progress | OSError:
        before = self._told.get(worker)
        try:
            if before is not None and before.order == order:
                return self._agents.progress(worker)
            return self._agents.tell(worker, order)
        except OSError as error:
            return error

    def _heard(self, worker: str, order: Order, progress: Progress) -> None:
        if progress.trouble:
            self._troubles[worker] = progress.trouble
        else:
            self._troubles.pop(worker, None)
        names = {want.key: frozenset(piece.segment.name for piece in want.pieces) for want in order.wants}
        now = self._clock()
        with self._lock:
            if names.keys() == progress.lacks.keys():
                self._told[worker] = _Told(order, names, progress)
                self._silent.pop(worker, None)
            else:  # it speaks of another order, so what it has of this one is not known
                self._told.pop(worker, None)
                self._silent.setdefault(worker, now)
        if now > self._again.get(worker, (math.inf, 0))[0] + AGAIN_S:  # it has been there for long
            del self._again[worker]

    def _who_holds(self, history: History, shares: Mapping[int, Sequence[Piece]], sizes: Mapping[int, int]) -> Groups:
        written = (1 + LAG) * history.written / max(1, sum(sizes.values()))
        found = {}
        for slot, members in self.groups.items():
            few, pieces = max(FEW, written * sizes.get(slot, 0)), shares.get(slot, ())
            found[slot] = tuple(worker for worker in members if self._bytes(f"slot {slot}", worker, pieces) <= few)
        return found

    def _start(self, hosts: Mapping[str, str]) -> None:
        """Sees to it that every worker has an agent."""
        for worker in set(self._addresses) - set(hosts):
            self._lost(worker, "")
        now = self._clock()
        self._alone = {worker: self._alone.get(worker, now) for worker in hosts if worker not in self._addresses}
        wanted = [
            worker
            for worker in sorted(hosts)
            if worker not in self._addresses and self._again.get(worker, (now, 0))[0] <= now
        ]
        busy = self._starting is not None and self._starting.is_alive()
        if not wanted or len(hosts) < 2 or busy:
            return
        if not self._background:
            self._start_now(wanted)
            return
        # A new executor may take seconds to run its first task, and the others' replicas must not wait for it.
        self._starting = threading.Thread(target=self._start_now, args=(wanted,), name="millstream-agents", daemon=True)
        self._starting.start()

    def _start_now(self, wanted: Sequence[str]) -> None:
        found = self._agents.start(wanted)
        for worker in wanted:
            self._put_off(worker)
        with self._lock:
            self._addresses = {**self._addresses, **found}
        self._woken.set()

    def _put_off(self, worker: str) -> None:
        """If the worker's agent has to be started again, that is not at once, and later each time."""
        _, often = self._again.get(worker, (0.0, 0))
        self._again[worker] = (self._clock() + min(AGAIN_S, 2.0**often), often + 1)

    def _lost(self, worker: str, why: str) -> None:
        with self._lock:
            self._addresses = {known: address for known, address in self._addresses.items() if known != worker}
            self._told.pop(worker, None)
            self._silent.setdefault(worker, self._clock())
            for got in self._through.values():
                got.pop(worker, None)
        self._agents.forget(worker)
        if why:
            self._troubles[worker] = why
            _LOG.warning("worker %s: %s", worker, why)

    def _order(
        self,
        worker: str,
        history: History,
        shares: Mapping[int, Sequence[Piece]],
        placed: Mapping[int, str],
        coming: Mapping[str, Coming],
        ahead: Mapping[int, Mapping[str, Sequence[Piece]]],
    ) -> Order:
        wants = []
        for key, move in coming.items():
            if move.worker == worker:
                pieces = pieces_of(history.manifest, move.parts)
                holders = self._holders(history, move, placed)
                asked = tuple(self._addresses[other] for other in holders if other != worker)
                wants.append(Want(key, tuple(pieces), asked))
        for slot, members in self.groups.items():
            if worker in members or (slot, worker) in self._warming:
                chain = upstream(slot, worker, placed, self.groups)
                origins = tuple(self._addresses[other] for other in chain if other in self._addresses)
                ahead_of = members[: members.index(worker)] if worker in members else ()
                first = next((other for other in chain if other in self._addresses), "")
                chained = first in ahead_of and not self._full(first)
                wants.append(Want(f"slot {slot}", tuple(shares.get(slot, ())), origins, chained))
        for slot, needed in ahead.items():
            if worker in needed:
                chain = upstream(slot, worker, placed, self.groups)
                asked = tuple(self._addresses[other] for other in chain if other in self._addresses)
                wants.append(Want(_ahead(slot), tuple(needed[worker]), asked))
        wanted = {piece.segment.name for want in wants for piece in want.pieces}
        recipes = tuple(each for each in self._recipes() if any(made.name in wanted for made in each.outputs))
        return Order(history.epoch, tuple(wants), recipes)

    def _holders(self, history: History, move: Coming, placed: Mapping[int, str]) -> list[str]:
        """The workers that have what is about to move: those of its slots first, then those of their replicas."""
        slots = {
            slot
            for step, ranges in move.parts
            if step in history.tables
            for span in ranges
            for _, slot in history.tables[step].cut(span)
        }
        chain = [placed[slot] for slot in sorted(slots) if slot in placed]
        chain += [member for slot in sorted(slots) for member in self.groups.get(slot, ())]
        return [worker for worker in dict.fromkeys(chain) if worker in self._addresses]


def _ahead(slot: int) -> str:
    """The key of what compactions have made for a slot and no epoch has taken up yet."""
    return f"ahead {slot}"


def _placed(history: History) -> dict[int, str]:
    return {slot: worker for worker, slots in history.workers.items() for slot in slots}


def slot_pieces(history: History) -> dict[int, list[Piece]]:
    """What the state of each slot consists of."""
    found: dict[int, list[Piece]] = {}
    for family in history.manifest.families:
        if family.step in history.tables:
            for slot, pieces in history.manifest.shares(family, history.tables[family.step]).items():
                found.setdefault(slot, []).extend(pieces)
    return found


def pieces_of(manifest: Manifest, parts: Sequence[tuple[str, tuple[Range, ...]]]) -> list[Piece]:
    """What the state of some ranges of steps consists of."""
    within = dict(parts)
    return [
        piece
        for family in manifest.families
        if family.step in within
        for piece in manifest.pieces(family, within[family.step])
    ]
