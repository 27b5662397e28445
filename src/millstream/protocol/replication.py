"""Replica groups: which workers hold the state of a slot beside the one that it runs on. Facts in, decision out.

Rules
-----
- A group never has the slot's own worker, nor a worker twice. It has no worker of that worker's host as long as there
  are others enough on other hosts; and its members are on different hosts, as far as there are that many.
- Workers are filled as bins are packed: the largest slots first, each to the workers with the fewest bytes of replicas.
- As little as possible moves: a member stays while its worker is there and may be a member, unless that worker has more
  than `SLACK` times its share, and another has room; once they have gone by load, they stay even then. A worker that is
  being drained is a member of nothing, unless there is only one other.
- By load (`by_load`), members go where load falls when that of the slot rises, so that what has to leave a worker that
  has too much of it finds its state where there is room; as far as that is worth the transfers (see `allocation`), and
  never at the price of a member.
- A slot whose worker is gone keeps the members that it has, and gets no others, until it has a worker again: they are
  what it goes on from.
- A group is a chain: each member takes what it lacks from the one before it, the first from the slot's own worker, and
  waits for that one as long as it gets on: so a worker sends what it has written once, however many replicas there are.
  If that cannot give it, from the one before that, and so on around; in the end, from the store.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from millstream.protocol.allocation import improved
from millstream.protocol.compaction import Job
from millstream.protocol.loads import Allocation, Loads
from millstream.protocol.manifest import Piece, SegmentRef

SLACK = 1.5

Groups = dict[int, tuple[str, ...]]
"""For each slot, the workers that hold a replica of it, in the order of the chain."""


def replica_groups(
    sizes: Mapping[int, int],
    placed: Mapping[int, str],
    hosts: Mapping[str, str],
    count: int,
    before: Mapping[int, Sequence[str]],
    leaving: Collection[str] = (),
    slack: float = SLACK,
) -> Groups:
    """The group of every slot: `count` members, or as many as there can be.

    `sizes` are the bytes of each slot, `placed` where each runs, `hosts` where each worker is; those that are `leaving`
    are no members where there are two others.

    >>> replica_groups({0: 5, 1: 3, 2: 2}, {0: "a", 1: "b", 2: "c"}, {"a": "x", "b": "x", "c": "y"}, 1, {})
    {0: ('c',), 1: ('c',), 2: ('a',)}
    """
    staying = sorted(set(hosts) - set(leaving))
    workers = staying if len(staying) > 1 else sorted(hosts)
    rooms = {hosts[worker] for worker in workers}
    slots = sorted((slot for slot in placed if placed[slot] in hosts), key=lambda slot: (-sizes.get(slot, 0), slot))
    total = sum(max(1, sizes.get(slot, 0)) for slot in slots) * min(count, max(0, len(workers) - 1))
    bound = slack * total / max(1, len(workers)) + max((sizes.get(slot, 0) for slot in slots), default=0)
    load = dict.fromkeys(workers, 0)
    groups: dict[int, list[str]] = {}
    many = {slot: max(0, min(count, len(workers) - (placed[slot] in load))) for slot in slots}
    for slot in slots:
        size = max(1, sizes.get(slot, 0))
        groups[slot] = []
        for worker in before.get(slot, ()):
            fits = worker in load and worker != placed[slot] and load[worker] + size <= bound
            if (
                fits
                and len(groups[slot]) < many[slot]
                and not _crowded(worker, slot, placed, groups[slot], hosts, rooms)
            ):
                groups[slot].append(worker)
                load[worker] += size
    for slot in slots:
        size = max(1, sizes.get(slot, 0))
        while len(groups[slot]) < many[slot]:
            free = [worker for worker in workers if worker != placed[slot] and worker not in groups[slot]]
            chosen = min(
                free,
                key=lambda worker: (
                    _crowded(worker, slot, placed, groups[slot], hosts, rooms),
                    load[worker],
                    _number(worker),
                ),
            )
            groups[slot].append(chosen)
            load[chosen] += size
    for slot in placed:
        if placed[slot] not in hosts:
            groups[slot] = [worker for worker in before.get(slot, ()) if worker in hosts]
    return {slot: tuple(groups[slot]) for slot in sorted(groups)}


def by_load(
    groups: Mapping[int, Sequence[str]],
    placed: Mapping[int, str],
    hosts: Mapping[str, str],
    history: Mapping[int, Sequence[float]],
) -> Groups:
    """The groups, with members that suit the loads that slots have had, period by period, if these are better enough.

    >>> day, night = [9, 1, 9, 1] * 4, [1, 9, 1, 9] * 4
    >>> groups, placed = {0: ["b"], 1: ["a"], 2: ["d"], 3: ["c"]}, {0: "a", 1: "b", 2: "c", 3: "d"}
    >>> by_load(groups, placed, dict(zip("abcd", "wxyz")), {0: day, 1: day, 2: night, 3: night})
    {0: ('c',), 1: ('d',), 2: ('a',), 3: ('b',)}
    """
    workers = sorted(hosts)
    numbers = {worker: number for number, worker in enumerate(workers)}
    slots = [slot for slot in sorted(groups) if groups[slot] and placed.get(slot) in numbers and slot in history]
    many = max((len(groups[slot]) for slot in slots), default=0)
    if len(slots) < 2 or not many or len(workers) < 3:
        return {slot: tuple(members) for slot, members in groups.items()}
    loads = Loads(
        np.array([history[slot] for slot in slots], float),
        np.array([numbers[placed[slot]] for slot in slots], np.int32),
        len(workers),
        np.array([hosts[worker] for worker in workers]),
    )
    now = np.full((len(slots), many), -1, np.int32)
    for row, slot in enumerate(slots):
        members = [numbers[member] for member in groups[slot] if member in numbers]
        now[row, : len(members)] = members
    found = improved(loads, Allocation(now), spread=SLACK).places
    better = {
        slot: tuple(workers[place] for place in found[row].tolist() if place >= 0) for row, slot in enumerate(slots)
    }
    # Allocation never puts two on one host. Where there are too few hosts for that, slots keep the members that they
    # have, even if these then have somewhat more than their share: a member less would be no gain.
    return {
        slot: better[slot] if len(better.get(slot, ())) >= len(members) > 0 else tuple(members)
        for slot, members in groups.items()
    }


def _crowded(
    worker: str,
    slot: int,
    placed: Mapping[int, str],
    group: Sequence[str],
    hosts: Mapping[str, str],
    rooms: Collection[str],
) -> bool:
    """Whether a worker's host has the slot, or a replica of it, while another of these hosts has neither."""
    taken = {hosts[placed[slot]], *(hosts[member] for member in group if member != worker)}
    return hosts[worker] in taken and any(host not in taken for host in rooms)


def _number(worker: str) -> tuple[int, str]:
    return (int(worker), "") if worker.isdigit() else (-1, worker)


def upstream(slot: int, worker: str, placed: Mapping[int, str], groups: Mapping[int, Sequence[str]]) -> tuple[str, ...]:
    """From whom a worker takes the state of a slot, in this order: along the chain towards its beginning, then the
    members behind. A worker that is no member takes it from the slot's own worker first.

    >>> upstream(0, "c", {0: "a"}, {0: ("b", "c", "d")})
    ('b', 'a', 'd')
    >>> upstream(0, "z", {0: "a"}, {0: ("b", "c")})
    ('a', 'b', 'c')
    """
    chain = [*([placed[slot]] if slot in placed else []), *groups.get(slot, ())]
    if worker not in chain:
        return tuple(chain)
    at = chain.index(worker)
    return (*reversed(chain[:at]), *chain[at + 1 :])


# -- what workers are asked for ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Want:
    """State that a worker should hold: the replica of a slot, or what is about to move there.

    `key` tells wants apart. `origins` are the addresses of those who may have it, in the order to ask them in. If it is
    `chained`, the first of them is to hold the same, and is waited for as long as it gets on with that.
    """

    key: str
    pieces: tuple[Piece, ...]
    origins: tuple[str, ...] = ()
    chained: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a compaction made a segment. Who has what it was made from makes it anew, instead of fetching it."""

    job: Job
    outputs: tuple[SegmentRef, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """All that a worker should hold beside its own slots' state, as of a commit; the most urgent first."""

    number: int
    wants: tuple[Want, ...] = ()
    recipes: tuple[Recipe, ...] = ()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker has come with the last order that it was given.

    `lacks` are the segments that are not there yet, by want. The rest are sums since its agent began: bytes that peers
    gave, that came from the store, that were made from recipes, that were sent to others; and what last went wrong.
    """

    number: int
    lacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    given: int = 0
    fetched: int = 0
    made: int = 0
    sent: int = 0
    given_s: float = 0.0
    fetched_s: float = 0.0
    """How long it took to get what peers gave, and what came from the store."""
    full: bool = False
    """Whether it waits because there is no room."""
    trouble: str = ""
