"""Allocation: on which workers the replicas of bins lie, so that a bin that has to move finds one where there is room.

Rules
-----
- Constraint 1 always holds (`Loads.allowed`). A bin for which it leaves fewer places than asked for has fewer replicas,
  and the allocation says how many are `missing`.
- `baseline` asks for nothing else. `even` also gives all workers the same number of replicas, or one more (constraint
  2), or comes as near to that as constraint 1 lets it.
- `correlated` puts a replica where load falls when the load of its bin rises: what it minimises is the `score`. It goes
  through the bins in the order of what would be lost if each did not get its best place, the most sensitive first. One
  whose place is taken stands back, by what the place after the next would cost. What the replicas of a worker stand for
  may be bounded (`spread`, its constraint 2). If that leaves a bin no place, it goes where there is least.
- Equally good places are filled evenly. Correlations of so few periods that they may be chance count as none (`grain`).
- A new allocation costs transfers: `improved` takes of it only what it takes to be within a threshold of it.
- Nothing is random: the same facts give the same allocation.

The paper is CIKM 2015, section 6: its key group is a bin, its checkpoint a replica, its node a worker. Where it leaves
open what the correlation of a bin with a worker is, here it is that of their loads; the load of a worker is that of its
bins and of what else runs there. Time grows with bins x workers, memory with bins and with workers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from millstream.errors import UserError
from millstream.protocol.loads import Allocation, Flags, Floats, Loads, Moment, Numbers, Share, Workers, checked_workers

Singles = npt.NDArray[np.float32]

THRESHOLD = 0.05
UNBOUNDED = float("inf")
NEAR = 16
"""How many of its best places a bin looks at first. Few bins need more."""
_ROWS = 4096


# -- the three ways to allocate ---------------------------------------------------------------------------------------


def baseline(loads: Loads, r: int = 1) -> Allocation:
    """Each replica anywhere that constraint 1 allows, as a hash of bin and worker says (rendezvous hashing).

    >>> baseline(Loads([[1], [1], [1]], [0, 1, 1], 2)).places.tolist()
    [[1], [0], [0]]
    """
    places = np.full((len(loads.possible(r)), r), -1, np.int32)
    for rows in _pieces(np.arange(len(places))):
        keys = _noise(rows, loads.workers)
        keys[~loads.allowed[loads.primary[rows]]] = UNBOUNDED
        found = _least(keys, min(r, loads.workers))
        allowed = np.isfinite(np.take_along_axis(keys, found, axis=1))
        places[rows, : found.shape[1]] = np.where(allowed, found, -1)
    return Allocation(_filled_first(places))


def even(loads: Loads, r: int = 1) -> Allocation:
    """All workers have the same number of replicas, or one more, as far as constraint 1 allows.

    >>> even(Loads([[1]] * 4, [0, 0, 0, 0], 3)).counts(3).tolist()
    [0, 2, 2]
    """
    wanted = loads.possible(r)
    places = np.full((len(wanted), r), -1, np.int32)
    counts = np.zeros(loads.workers, np.int64)
    # Bins of one worker often follow each other: in that order, the workers that they cannot use would stay behind.
    for rows in _pieces(np.argsort(_noise(np.arange(len(wanted)), 1)[:, 0], kind="stable")):
        for bin_, noise in zip(rows.tolist(), _noise(rows, loads.workers), strict=True):
            keys = np.where(loads.allowed[loads.primary[bin_]], counts + noise, UNBOUNDED)
            found = _least(keys[None], int(wanted[bin_]))[0, : wanted[bin_]]
            places[bin_, : len(found)] = found
            counts[found] += 1
    _level(loads, places, counts)
    return Allocation(places)


def correlated(loads: Loads, r: int = 1, *, spread: float = UNBOUNDED, grain: float | None = None) -> Allocation:
    """Replicas where load falls when that of their bins rises (algorithm 3).

    `spread` bounds what the replicas of a worker stand for: to so many times the mean. The default is that of the
    paper's experiments, without bound. Correlations count in steps of `grain`, and those below one step as none: by
    default 2 / sqrt(periods), which of twenty correlations of unrelated loads one exceeds by chance. With a grain of 0
    every difference counts. Of equally good places, that with the least load of replicas is taken.

    >>> up, down, flat = [1, 2, 3, 4], [4, 3, 2, 1], [2, 2, 2, 2]
    >>> correlated(Loads([up, down, flat], [0, 1, 2], 3), grain=0.1).places.tolist()
    [[1], [0], [0]]
    """
    grain = float(2 / np.sqrt(loads.history.shape[1])) if grain is None else grain
    if not grain >= 0 or not spread > 0:
        raise UserError(f"grain={grain!r}, spread={spread!r}: expected 0 or more, and more than 0")
    wanted = loads.possible(r)
    places = np.full((len(wanted), r), -1, np.int32)
    for bin_, found in enumerate(_Turns(loads, wanted.tolist(), _limit(loads, r, spread), grain).run()):
        places[bin_, : len(found)] = found
    return Allocation(places)


def score(loads: Loads, allocation: Allocation) -> float:
    """How bad an allocation is, from -1 to 1: the mean correlation of bins with the workers of their replicas.

    Each replica counts as much as the load of its bin. (The paper takes the sum: this is it, over that of the loads.)
    """
    places = checked_workers("allocation", allocation.places, (len(loads.primary), -1), loads.workers, -1)
    weights = np.where(places >= 0, loads.mean[:, None], 0.0)
    total = float(weights.sum())
    return float((_Correlations(loads, 0.0).at(places) * weights).sum() / total) if total else 0.0


def improved(
    loads: Loads,
    now: Allocation,
    *,
    threshold: float = THRESHOLD,
    spread: float = UNBOUNDED,
    grain: float | None = None,
) -> Allocation:
    """The allocation `now`, or one that is worth its transfers: its score is within `threshold` of `correlated`.

    Replicas change place in the order of what that gains, until the score is that good. Those that have no place, or
    one that constraint 1 does not allow any more, get another in any case. If nothing changes, the result is `now`.
    """
    old = checked_workers("now", now.places, (len(loads.primary), -1), loads.workers, -1).copy()
    if not threshold >= 0:
        raise UserError(f"threshold={threshold!r}: expected a difference of scores, 0 or more")
    broken = (old >= 0) & (~loads.allowed[loads.primary[:, None], old] | _repeated(old))
    old[broken] = -1
    r = old.shape[1]
    new = correlated(loads, r, spread=spread, grain=grain).places
    known, load = _Correlations(loads, 0.0), loads.mean
    worth = [known.at(places) * load[:, None] for places in (old, new)]
    enough = threshold * float((load[:, None] * (new >= 0)).sum())
    forced, moves = [], []
    for bin_ in np.flatnonzero((np.sort(old, axis=1) != np.sort(new, axis=1)).any(axis=1)).tolist():
        before, after = old[bin_].tolist(), new[bin_].tolist()
        leave = sorted((at for at in range(r) if before[at] not in after or before[at] < 0), key=lambda at: before[at])
        come = [at for at in range(r) if after[at] >= 0 and after[at] not in before]
        for here, there in zip(leave, come, strict=False):
            if before[here] < 0:
                forced.append((0.0, bin_, here, after[there]))
            else:
                gain = float(worth[0][bin_, here] - worth[1][bin_, there])
                moves.append((gain, bin_, here, after[there]))
    if not forced and not broken.any() and sum(gain for gain, *_ in moves) <= enough:
        return now
    return Allocation(_carried_out(loads, old, forced, moves, enough, _limit(loads, r, spread)))


_Change = tuple[float, int, int, int]
"""What a change gains, the bin, which of its replicas, and where that goes."""


def _carried_out(
    loads: Loads, old: Workers, forced: list[_Change], moves: list[_Change], enough: float, limit: float
) -> Workers:
    """The places after all forced changes, and as many of the others as it takes for no more than `enough` to be left.

    One that would exceed the bound waits until others have made room; if all wait for each other, all are made.
    """
    load = loads.mean
    given = np.bincount(old[old >= 0], np.broadcast_to(load[:, None], old.shape)[old >= 0], loads.workers)
    left = sum(gain for gain, *_ in moves)
    waiting = [*forced, *sorted(moves, key=lambda move: (-move[0], move[1:]))]
    due, bound = len(forced), limit
    while due or (left > enough and waiting):
        still: list[_Change] = []
        for at, (gain, bin_, here, there) in enumerate(waiting):
            if at >= due and left <= enough:
                still.append(waiting[at])
            elif at < due or given[there] + load[bin_] <= bound:
                if old[bin_, here] >= 0:
                    given[old[bin_, here]] -= load[bin_]
                given[there] += load[bin_]
                old[bin_, here] = there
                left -= gain
            else:
                still.append(waiting[at])
        if len(still) == len(waiting):
            bound = UNBOUNDED
        waiting, due = still, 0
    return old


# -- algorithm 3 ------------------------------------------------------------------------------------------------------


class _Correlations:
    """The correlations of bins with workers, a piece of them at a time."""

    def __init__(self, loads: Loads, grain: float) -> None:
        self.grain = np.float32(grain)
        self.bins = _standard(loads.history)
        self.workers = _standard(loads.of_workers)

    def rows(self, bins: Numbers) -> Singles:
        """Of these bins with all workers, in whole grains."""
        found: Singles = self.bins[bins] @ self.workers.T
        return np.trunc(found / self.grain) * self.grain if self.grain else found

    def at(self, places: Workers) -> Floats:
        """Of each bin with the workers of its row, and not in grains; anything where that is -1."""
        found = np.empty(places.shape)
        for rows in _pieces(np.arange(len(places))):
            found[rows] = np.einsum("bt,brt->br", self.bins[rows], self.workers[places[rows]])
        return found


def _standard(history: Floats) -> Singles:
    """Each row with mean 0 and length 1, so that products are correlations; all 0 if it never changes."""
    tops = history.max(axis=1, keepdims=True)
    deviations = history / np.where(tops > 0, tops, 1)
    deviations -= deviations.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(deviations, axis=1, keepdims=True)
    changes = lengths > 1e-9 * np.sqrt(history.shape[1])
    return np.where(changes, deviations / np.where(changes, lengths, 1), 0).astype(np.float32)


class _Turns:
    """Bins take turns, the most sensitive first. A turn is for a level: the places of a bin that are equally good.

    A bin knows the `NEAR` best of its places. If these are taken, it looks for as many again, among all that are open:
    what is full stays full.
    """

    def __init__(self, loads: Loads, wanted: list[int], limit: float, grain: float) -> None:
        self.loads, self.wanted, self.limit = loads, wanted, limit
        self.load: list[float] = loads.mean.tolist()
        self.known = _Correlations(loads, grain)
        self.given, self.counts = [0.0] * loads.workers, [0] * loads.workers
        self.taken: list[list[int]] = [[] for _ in wanted]
        self.near = min(NEAR, loads.workers)
        self.values = np.empty((len(wanted), self.near), np.float32)
        self.options = np.empty((len(wanted), self.near), np.int32)
        self.heap: list[tuple[float, int, int]] = []
        self.later: dict[int, tuple[list[float], list[int]]] = {}

    def run(self) -> list[list[int]]:
        """The places of each bin, the best first."""
        for rows in _pieces(np.arange(len(self.wanted))):
            values = self.known.rows(rows)
            values[~self.loads.allowed[self.loads.primary[rows]]] = UNBOUNDED
            self.values[rows], self.options[rows] = self._best(values, _noise(rows, self.loads.workers))
        best = self.values[:, 0].astype(np.float64)
        after = np.where(self.values > best[:, None], self.values, UNBOUNDED).min(axis=1, initial=UNBOUNDED)
        lost, known = np.zeros(len(best)), np.isfinite(after)
        lost[known] = (after[known] - best[known]) * self.loads.mean[known]
        self.heap = [(-least, bin_, 0) for bin_, least in enumerate(lost.tolist()) if self.wanted[bin_]]
        heapq.heapify(self.heap)
        while self.heap:
            _, bin_, at = heapq.heappop(self.heap)
            self._turn(bin_, at)
        return self.taken

    def _turn(self, bin_: int, at: int) -> None:
        values, options = self.later.get(bin_) or (self.values[bin_].tolist(), self.options[bin_].tolist())
        mine, load, given = self.taken[bin_], self.load[bin_], self.given
        level = [w for w, value in zip(options[at:], values[at:], strict=True) if value == values[at]]
        fitting = [w for w in level if w not in mine and given[w] + load <= self.limit]
        if fitting:
            self._put(bin_, min(fitting, key=lambda w: (given[w], self.counts[w], w)))
        else:
            at += len(level)
        if len(mine) == self.wanted[bin_]:
            self.later.pop(bin_, None)
        elif at < len(values) and values[at] < UNBOUNDED:
            self._push(bin_, at, values)
        else:
            self._look_further(bin_)

    def _put(self, bin_: int, worker: int) -> None:
        self.taken[bin_].append(worker)
        self.given[worker] += self.load[bin_]
        self.counts[worker] += 1

    def _push(self, bin_: int, at: int, values: list[float]) -> None:
        after = next((value for value in values[at:] if value > values[at]), UNBOUNDED)
        lost = (after - values[at]) * self.load[bin_] if after < UNBOUNDED else 0.0
        heapq.heappush(self.heap, (-lost, bin_, at))

    def _look_further(self, bin_: int) -> None:
        """For the best of all places that are open, or if none is, for those with the least load of replicas."""
        one, given = np.array([bin_]), np.array(self.given)
        row = self.known.rows(one)
        free = self.loads.allowed[self.loads.primary[bin_]].copy()
        free[self.taken[bin_]] = False
        fitting = free & (given + self.load[bin_] <= self.limit)
        if fitting.any():
            values, options = self._best(np.where(fitting, row, UNBOUNDED), _noise(one, len(given)))
            self.later[bin_] = values[0].tolist(), options[0].tolist()
            self._push(bin_, 0, self.later[bin_][0])
            return
        order = np.lexsort((row[0], given, ~free))
        for worker in order[: self.wanted[bin_] - len(self.taken[bin_])].tolist():
            self._put(bin_, worker)
        self.later.pop(bin_, None)

    def _best(self, values: Singles, noise: Singles) -> tuple[Singles, Workers]:
        """The least values of each row, in order, and their workers. Which of equal ones is a matter of hashes."""
        # Without that, all bins would know the same few of a thousand equally good workers.
        found = _least(values + noise * max(float(self.known.grain) / 2, 1e-6), self.near).astype(np.int32)
        least = np.take_along_axis(values, found, axis=1)
        order = np.lexsort((found, least))
        return np.take_along_axis(least, order, axis=1), np.take_along_axis(found, order, axis=1)


# -- even numbers -----------------------------------------------------------------------------------------------------


def _level(loads: Loads, places: Workers, counts: Numbers) -> None:
    """Moves replicas along chains of workers, from one with many to one with two fewer, while there is a chain.

    When there is none left, no allocation is more even (Harvey et al. 2003, on semi-matchings).
    """
    while True:
        for level in np.unique(counts)[::-1].tolist():
            chain = _chain(loads, places, counts, level) if level > counts.min() + 1 else []
            if chain:
                break
        else:
            return
        for bin_, here, there in chain:
            places[bin_, places[bin_] == here] = there
            counts[here] -= 1
            counts[there] += 1


def _chain(loads: Loads, places: Workers, counts: Numbers, level: int) -> list[tuple[int, int, int]]:
    """Changes of place (bin, from, to): a worker with `level` replicas has one less then, and one with few one more."""
    came: dict[int, tuple[int, int]] = {}
    queue = np.flatnonzero(counts == level).tolist()
    seen = counts == level
    for here in queue:
        holders = np.flatnonzero((places == here).any(axis=1))
        for bins in _pieces(holders):
            if seen.all():
                break
            free = loads.allowed[loads.primary[bins]] & ~seen
            for column in places[bins].T:
                free[np.flatnonzero(column >= 0), column[column >= 0]] = False
            for there in np.flatnonzero(free.any(axis=0)).tolist():
                came[there] = int(bins[free[:, there].argmax()]), here
                seen[there] = True
                queue.append(there)
                if counts[there] <= level - 2:
                    return _back(came, there)
    return []


def _back(came: dict[int, tuple[int, int]], last: int) -> list[tuple[int, int, int]]:
    chain = []
    while last in came:
        bin_, here = came[last]
        chain.append((bin_, here, last))
        last = here
    return chain


# -- how good an allocation turns out to be ---------------------------------------------------------------------------


def usable(moment: Moment) -> Share:
    """Of the replicas of all bins on overloaded workers, those that are usable (the paper's figure 8).

    One is usable if its bin, alone, could move to it without overloading the worker that it lies on.
    """
    loads = moment.of_workers
    places = moment.allocation.places
    asked = (loads > moment.full)[moment.primary][:, None] & (places >= 0)
    fits = (loads[places] + moment.load[:, None]) <= moment.full[places]
    return Share(int((asked & fits).sum()), int(asked.sum()))


def balanced(moment: Moment) -> tuple[Moment, Share]:
    """What becomes of a period when load is balanced, and which moves of that are replica-assisted (figure 7).

    A move is assisted if a replica of the bin lies where it goes; the two then change places. The balancer is greedy,
    and pairs workers as Flux does (the paper's [18]): as long as one is overloaded, the one most above its capacity
    gives a bin to the one with the most room. Of its bins that fit there, those with a replica there come first. Of
    these, it gives the smallest that ends the overload, or the largest if none does.
    """
    load, primary, places = moment.load, moment.primary.copy(), moment.allocation.places.copy()
    loads, full = moment.of_workers, moment.full
    givers = loads > full
    helped = moves = 0
    while givers.any():
        excess = np.where(givers, loads - full, -UNBOUNDED)
        giver, taker = int(excess.argmax()), int((full - loads).argmax())
        fitting = np.flatnonzero((primary == giver) & (load > 0) & (loads[taker] + load <= full[taker]))
        if not len(fitting):
            givers[giver] = False
            continue
        near = fitting[(places[fitting] == taker).any(axis=1)]
        some = near if len(near) else fitting
        ending = some[load[some] >= excess[giver]]
        bin_ = int(ending[load[ending].argmin()] if len(ending) else some[load[some].argmax()])
        places[bin_, places[bin_] == taker] = giver
        primary[bin_] = taker
        loads[giver] -= load[bin_]
        loads[taker] += load[bin_]
        givers[giver] = loads[giver] > full[giver]
        helped, moves = helped + bool(len(near)), moves + 1
    after = Moment(load, primary, Allocation(places), moment.capacity, moment.other)
    return after, Share(helped, moves)


# -- numbers ----------------------------------------------------------------------------------------------------------


def _pieces(bins: Numbers) -> Iterator[Numbers]:
    return (bins[begin : begin + _ROWS] for begin in range(0, len(bins), _ROWS))


def _noise(bins: Numbers, workers: int) -> Singles:
    """A number from 0 to 1 for each of these bins and each worker: a hash of both."""
    one, other = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)
    rows = bins.astype(np.uint32)[:, None] * one
    mixed = (rows ^ rows >> np.uint32(15)) + np.arange(1, workers + 1, dtype=np.uint32) * other
    for factor in (other, one):
        mixed ^= mixed >> np.uint32(16)
        mixed *= factor
    mixed ^= mixed >> np.uint32(15)
    found: Singles = (mixed >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    return found


def _least(keys: Singles | Floats, k: int) -> Numbers:
    """The columns of the k least of each row, in any order."""
    if k >= keys.shape[1]:
        return np.broadcast_to(np.arange(keys.shape[1]), keys.shape)
    return np.argpartition(keys, k - 1, axis=1)[:, :k]


def _filled_first(places: Workers) -> Workers:
    """Each row with its places in front."""
    return np.take_along_axis(places, np.argsort(places < 0, axis=1, kind="stable"), axis=1)


def _repeated(places: Workers) -> Flags:
    """Which entries stand in their row already, further left."""
    found = np.zeros(places.shape, np.bool_)
    for at in range(1, places.shape[1]):
        found[:, at] = (places[:, :at] == places[:, at : at + 1]).any(axis=1)
    return found


def _limit(loads: Loads, r: int, spread: float) -> float:
    return UNBOUNDED if spread == UNBOUNDED else spread * float(loads.mean.sum()) * r / loads.workers
