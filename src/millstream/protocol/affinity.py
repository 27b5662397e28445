"""Affinity: of the slots that a plan moves bins to, which gets which; and where slots that are new should run. State
goes where it lies already, be it as a replica or because one worker has both slots.

Rules
-----
- How much each slot gives and gets stays as it was planned, but for what one bin weighs more or less; only who gets
  what of whom changes. No bin moves that would not, and none stays that would move.
- Bins of one slot that go to one other stay neighbours as far as they were.
- A new slot goes to a worker with the fewest slots. Only among these it is the one that lacks the least of what comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from millstream.protocol.migration import Move
from millstream.protocol.strategies import Numbers

Replicas = Mapping[int, Collection[str]]
"""The workers that hold a replica of each slot."""


def has(worker: str, slot: int, hosts: Mapping[int, str], replicas: Replicas) -> bool:
    """Whether a worker has the state of a slot: it runs it, or holds a replica."""
    return hosts.get(slot) == worker or worker in replicas.get(slot, ())


def nearer(
    owners: Numbers, final: Numbers, weights: npt.NDArray[np.float64], hosts: Mapping[int, str], replicas: Replicas
) -> Numbers:
    """Owners with the same loads as `final` has, of which more have the state of what they get.

    Slot 2 has a replica of slot 1, and slot 3 of slot 0:

    >>> hosts, replicas = {0: "a", 1: "b", 2: "c", 3: "d"}, {0: ["d"], 1: ["c"]}
    >>> nearer(np.array([0, 0, 1, 1]), np.array([0, 2, 1, 3]), np.ones(4), hosts, replicas).tolist()
    [0, 3, 1, 2]
    """
    picked = np.flatnonzero(owners != final)
    origins, targets = owners[picked], final[picked]
    givers, takers = np.unique(origins).tolist(), np.unique(targets).tolist()
    if len(takers) < 2 or len(givers) < 2 or set(givers) & set(takers):
        return final
    room = np.bincount(targets, weights[picked], max(takers) + 1)
    before = room.copy()
    at: dict[str, list[int]] = {}
    for taker in takers:
        if taker in hosts:
            at.setdefault(hosts[taker], []).append(taker)
    chosen = np.full(len(picked), -1, np.int64)
    order = np.argsort(origins, kind="stable")
    ends = np.searchsorted(origins[order], givers, side="right")
    for giver, left in zip(givers, np.split(order, ends[:-1]), strict=True):
        near = [hosts.get(giver, ""), *sorted(replicas.get(giver, ()))]
        for taker in (taker for worker in dict.fromkeys(near) for taker in at.get(worker, ())):
            heavy = weights[picked[left]]
            fits = int(np.searchsorted(_middles(heavy), room[taker], side="right"))
            chosen[left[:fits]] = taker
            room[taker] -= heavy[:fits].sum()
            left = left[fits:]
    left = np.flatnonzero(chosen < 0)  # the others get what is left, in the order of the key space
    edges = np.cumsum(np.maximum(room[takers], 0.0))
    taken = np.searchsorted(edges, _middles(weights[picked[left]]), side="right")
    chosen[left] = np.array(takers)[np.minimum(taken, len(takers) - 1)]
    after = np.bincount(chosen, weights[picked], max(takers) + 1)
    gained = _near(origins, chosen, weights[picked], hosts, replicas)
    if (np.abs(after - before) > weights[picked].max()).any() or gained <= _near(
        origins, targets, weights[picked], hosts, replicas
    ):
        return final
    found = final.copy()
    found[picked] = chosen
    return found


def _near(
    origins: Numbers,
    targets: Numbers,
    weights: npt.NDArray[np.float64],
    hosts: Mapping[int, str],
    replicas: Replicas,
) -> float:
    """How much goes to a worker that has it."""
    ways, which = np.unique(np.stack([origins, targets]), axis=1, return_inverse=True)
    there = [target in hosts and has(hosts[target], origin, hosts, replicas) for origin, target in ways.T.tolist()]
    return float(weights[np.array(there)[which.ravel()]].sum())


def _middles(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Where the middle of each lies, if they lie in a row: it belongs to whoever has room up to there."""
    found: npt.NDArray[np.float64] = np.cumsum(weights) - weights / 2
    return found


def brought(moves: Iterable[Move], hosts: Mapping[int, str], replicas: Replicas) -> Callable[[int, str], int]:
    """How many bytes of what comes to a slot a worker lacks."""
    coming: dict[int, dict[int, int]] = {}
    for move in moves:
        known = coming.setdefault(move.target, {})
        known[move.origin] = known.get(move.origin, 0) + move.bytes

    def lacks(slot: int, worker: str) -> int:
        known = coming.get(slot, {})
        return sum(size for origin, size in known.items() if not has(worker, origin, hosts, replicas))

    return lacks
