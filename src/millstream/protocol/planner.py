"""The planner: from where state lies to a migration plan that puts it elsewhere. Pure functions of a `Layout`.

Rules
-----
- A plan is made in bins. Steps with the same routing table move together: a bin of a plan is a bin of all of them, and
  counts as one for the strategy. Where tables differ, the steps that make the same move make it in the same round.
- A table may be cut inside a bin (a range was moved by hand, or the number of bins was lowered). Each part of a bin
  with an owner of its own then counts as a bin. A rescale makes such bins whole: each goes to who owns most of it.
- No bin moves twice, and none that can stay moves. A plan for a table that is as asked already has no rounds.
- Steps with more than 2^20 bins are planned in 2^20 ranges of equal width, except where bins or ranges are named.
- Where it does not matter which slot gets which bin, those that have replicas do (`protocol.affinity`), by protocols
  that make use of them.
- Sizes are estimates: within a segment, bytes go with width.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, repeat

import numpy as np
import numpy.typing as npt

from millstream.errors import UserError
from millstream.protocol.affinity import nearer
from millstream.protocol.costs import by_protocol
from millstream.protocol.keyspace import LAST, Hashes, Range, width
from millstream.protocol.layout import Layout
from millstream.protocol.manifest import Manifest
from millstream.protocol.migration import AT_ONCE, MigrationPlan, Move, Start, size_text
from millstream.protocol.pacing import costs_of, grained, merged
from millstream.protocol.routing import Slot
from millstream.protocol.strategies import Batched, Fluid, Matched, Numbers, Paced, Strategy

FINEST_BITS = 20
DEFAULT = Paced()
TOLERANCE = 0.05
Steps = str | Sequence[str] | None
"""One step, several, or all."""


# -- the verbs --------------------------------------------------------------------------------------------------------


def plan_rescale(
    layout: Layout, slots: int, *, steps: Steps = None, strategy: Strategy = DEFAULT, at: Start = AT_ONCE
) -> MigrationPlan:
    """To the slots 0 to `slots - 1`, each with the same number of bins, or one more; as few bins move as possible.

    >>> from millstream.protocol.routing import RoutingTable
    >>> layout = Layout("s", {"count": RoutingTable.even(2, 12)})
    >>> print(plan_rescale(layout, 4, strategy=Batched(512, merge=False)))
    rescale by Batched(512, merge=False), from routing version 0 of 'count'
      slot 0 -> slot 2: 1,024 bins, 0 B
      slot 1 -> slot 3: 1,024 bins, 0 B
      in all: 2,048 bins, 0 B, in 4 rounds over 4 epochs
      at most: 512 bins, 0 B in a round; 256 bins, 0 B to one slot in a round
      starts at once
    """
    _whole("slots", slots, 1)
    found = _groups(layout, steps)
    for cells in found:
        if slots > 1 << cells.bits:
            raise UserError(
                f"slots={slots}: step {cells.steps[0]!r} has {1 << cells.bits} bins, and a slot needs one at least; "
                f"give at most {1 << cells.bits} slots, or plan more bins first"
            )
    wanted = [(cells, _rescaled(cells, slots)) for cells in found]
    near = [
        (cells, nearer(cells.owners, final, np.ones(len(final)), layout.hosts, layout.replicas))
        for cells, final in wanted
    ]
    return _plan(layout, "rescale", wanted, strategy, at, near=near)


def plan_move(
    layout: Layout,
    *,
    to: int | Sequence[int],
    bins: int | Sequence[int] | None = None,
    ranges: Range | Sequence[Range] | None = None,
    slots: int | Sequence[int] | None = None,
    share: float = 1.0,
    steps: Steps = None,
    strategy: Strategy = DEFAULT,
    at: Start = AT_ONCE,
) -> MigrationPlan:
    """What is named goes to the slot `to`; if that is several slots, to each the same number of neighbouring bins.

    Name bins by their numbers, or ranges of the key space, or slots and the `share` of the bins of each.

    >>> from millstream.protocol.routing import RoutingTable
    >>> layout = Layout("s", {"count": RoutingTable.even(4, 12)})
    >>> moves = plan_move(layout, slots=[0, 1], share=0.5, to=[2, 3]).rounds[0]
    >>> [(move.origin, move.target) for move in moves]
    [(0, 2), (1, 3)]
    """
    targets = _listed("to", to)
    _known_slots(layout, targets, "to")
    if [bins, ranges, slots].count(None) != 2:
        raise UserError("a move takes exactly one of bins=, ranges= and slots=")
    if slots is not None:
        chosen = _shares(layout, _groups(layout, steps), _listed("slots", slots), share)
    elif ranges is not None:
        chosen = _within(layout, steps, [ranges] if isinstance(ranges, Range) else list(ranges))
    else:
        assert bins is not None
        chosen = _numbered(layout, steps, _listed("bins", bins))
    wanted = []
    for cells, picked in chosen:
        final = cells.owners.copy()
        final[picked] = np.array(targets, np.int64)[np.arange(len(picked)) * len(targets) // max(1, len(picked))]
        wanted.append((cells, final))
    if all((final == cells.owners).all() for cells, final in wanted):
        raise UserError(f"all that is to move is at slot {_list(targets)} already; give another slot")
    return _plan(layout, "move", wanted, strategy, at)


def plan_drain(
    layout: Layout, worker: str, *, steps: Steps = None, strategy: Strategy = DEFAULT, at: Start = AT_ONCE
) -> MigrationPlan:
    """Everything that the slots of a worker own goes to those of the others, so that these end up even.

    Even in bytes, or if there is no state yet, in width. Only if that is of all steps, the worker leaves.
    """
    if not isinstance(worker, str) or worker not in layout.placement:
        raise UserError(f"no worker {worker!r}; the query runs on {_list(sorted(layout.placement)) or 'none'}")
    if len(layout.placement) == 1:
        raise UserError(
            f"worker {worker!r} is the only one with slots: rescale to more slots, or add a worker, then drain it"
        )
    leaving = np.array(sorted(layout.placement[worker]), np.int64)
    staying = sorted(layout.owners - set(leaving.tolist()))
    found = _groups(layout, steps)
    pool = _Pool(found)
    gone = np.isin(pool.owners, leaving)
    if gone.any() and not staying:
        raise UserError(
            f"worker {worker!r} has all slots, {_list(sorted(layout.owners))}: rescale to more slots, then drain it"
        )
    final = pool.owners.copy()
    if gone.any():
        final[gone] = np.array(staying)[_poured(pool.loads(max(layout.owners))[staying], pool.weights[gone])]
    whole = {name for cells in found for name in cells.steps} == set(layout.tables)
    drains = worker if whole else ""
    return _plan(layout, "drain", pool.split(final), strategy, at, drains, near=pool.nearer(layout, final))


def plan_balance(
    layout: Layout,
    *,
    tolerance: float = TOLERANCE,
    steps: Steps = None,
    strategy: Strategy = DEFAULT,
    at: Start = AT_ONCE,
) -> MigrationPlan:
    """Bins go from the slots with the most bytes to those with the least, until all are near the mean.

    Near is within `tolerance` of it, as a share; a bin that is larger than that may be in the way. Only slots that own
    something take part. If there is no state yet, widths are balanced.
    """
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise UserError(f"tolerance={tolerance!r}: expected a share, from 0 to less than 1")
    pool = _Pool(_groups(layout, steps))
    final = _balanced(pool, sorted(layout.owners), tolerance)
    return _plan(layout, "balance", pool.split(final), strategy, at, near=pool.nearer(layout, final))


def plan_split(
    layout: Layout,
    slot: int,
    into: int = 2,
    *,
    steps: Steps = None,
    strategy: Strategy = DEFAULT,
    at: Start = AT_ONCE,
) -> MigrationPlan:
    """The bins of a slot, in order, are cut into so many parts; it keeps the first, and new slots get the others.

    The new slots are the lowest numbers that own nothing.
    """
    _known_slots(layout, [slot], "slot")
    _whole("into", into, 2)
    free = [number for number in range(len(layout.owners) + into) if number not in layout.owners][: into - 1]
    parts = np.array([slot, *free], np.int64)
    wanted = []
    for cells, picked in _shares(layout, _groups(layout, steps), [slot], 1.0):
        if 0 < len(picked) < into:
            raise UserError(
                f"into={into}: slot {slot} has {len(picked)} bins of step {cells.steps[0]!r}; "
                f"give at most {len(picked)}, or plan more bins first"
            )
        final = cells.owners.copy()
        final[picked] = parts[np.arange(len(picked)) * into // max(1, len(picked))]
        wanted.append((cells, final))
    return _plan(layout, "split", wanted, strategy, at)


def plan_merge(
    layout: Layout,
    slot: int,
    into: int,
    *,
    steps: Steps = None,
    strategy: Strategy = DEFAULT,
    at: Start = AT_ONCE,
) -> MigrationPlan:
    """All that a slot owns goes to another; the slot disappears."""
    _known_slots(layout, [slot], "slot")
    _known_slots(layout, [into], "into")
    if slot == into:
        raise UserError(f"slot {slot} cannot be merged into itself; give another slot")
    wanted = []
    for cells, picked in _shares(layout, _groups(layout, steps), [slot], 1.0):
        final = cells.owners.copy()
        final[picked] = into
        wanted.append((cells, final))
    return _plan(layout, "merge", wanted, strategy, at)


def plan_bins(layout: Layout, bins: int, *, steps: Steps = None, at: Start = AT_ONCE) -> MigrationPlan:
    """Changes the number of bins. Nothing moves: where a table is cut inside one of the new bins, it stays so, until a
    rescale makes the bin whole.

    >>> from millstream.protocol.routing import RoutingTable
    >>> plan_bins(Layout("s", {"count": RoutingTable.even(4, 12)}), 256).bin_bits
    {'count': 8}
    """
    _whole("bins", bins, 1)
    if bins & (bins - 1) or bins > 1 << 32:
        raise UserError(f"bins={bins}: expected a power of two up to 2**32")
    names = _steps(layout, steps)
    for name in names:
        owners = len(set(layout.tables[name].slots))
        if bins < owners:
            raise UserError(f"bins={bins}: step {name!r} is on {owners} slots; rescale to at most {bins} slots first")
    bits = {name: bins.bit_length() - 1 for name in names if layout.tables[name].bin_bits != bins.bit_length() - 1}
    return MigrationPlan(
        layout.store,
        "bins",
        {name: layout.tables[name].version for name in (bits or names)},
        ((),) if bits else (),
        start=at,
        bin_bits=bits,
    )


def bins_of(layout: Layout, finest: int = FINEST_BITS) -> list[Cells]:
    """The bins of all steps, one group for each table; of a step with more than 2^finest bins, so many ranges.

    >>> from millstream.protocol.routing import RoutingTable
    >>> [found.owners.tolist() for found in bins_of(Layout("s", {"count": RoutingTable.even(2, 12)}), 2)]
    [[0, 0, 1, 1]]
    """
    return _groups(layout, None, finest=finest)


def plan_owners(
    layout: Layout, verb: str, wanted: Sequence[tuple[Cells, Numbers]], *, pace: int = 0, drains: str = ""
) -> MigrationPlan:
    """Gives each of these bins (see `bins_of`) the owner beside it: for those who have decided where each goes.

    A round has as many of them as `pace` bytes allow, spread over slots; a bin that is larger goes alone. 0 is no
    limit. `drains` names the worker that leaves.

    >>> from millstream.protocol.routing import RoutingTable
    >>> layout = Layout("s", {"count": RoutingTable.even(2, 12)})
    >>> [found] = bins_of(layout, 2)
    >>> [[move]] = plan_owners(layout, "balance", [(found, np.array([0, 1, 1, 1]))]).rounds
    >>> print(move.range, move.target)
    4000000000000000-7fffffffffffffff 1
    """
    return _plan(layout, verb, wanted, Fluid(), AT_ONCE, drains, pace)


# -- where state lies -------------------------------------------------------------------------------------------------


def bytes_in(manifest: Manifest, step: str, firsts: Hashes) -> Numbers:
    """The estimated bytes of a step's state in consecutive ranges: they begin at `firsts`, the last ends the space.

    What the ranges have adds up to what they have together, to the byte. Numbers are floats on the way, so that what a
    few of the 2^64 points have is not known well.

    >>> bytes_in(Manifest(), "count", np.array([0, 1 << 63], np.uint64))
    array([0, 0])
    """
    begins: list[int] = []
    ends: list[int] = []
    densities: list[float] = []
    for family, pieces in manifest.families.items():
        if family.step == step:
            for piece in pieces.values():
                density = piece.segment.bytes / width(piece.segment.covers)
                begins += [item.first for item in piece.ranges]
                ends += [item.last for item in piece.ranges]
                densities += [density] * len(piece.ranges)
    if not begins:
        return np.zeros(len(firsts), np.int64)
    slopes = np.array(densities)
    points = np.concatenate([np.array(begins, np.uint64).astype(float), np.array(ends, np.uint64).astype(float) + 1])
    order = np.argsort(points, kind="stable")
    points, slope = points[order], np.cumsum(np.concatenate([slopes, -slopes])[order])
    below = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(points))])
    edges = np.append(firsts.astype(float), float(LAST))
    found: Numbers = np.diff(np.rint(np.interp(edges, points, below))).astype(np.int64)
    return found


@dataclass(frozen=True, slots=True)
class Cells:
    """The bins of steps with the same table: for each its first and last point and its owner, in order.

    Where the table is cut inside a bin, its parts. `bytes` has a row for each step.
    """

    steps: tuple[str, ...]
    bits: int
    firsts: Hashes
    lasts: Hashes
    owners: Numbers
    bytes: npt.NDArray[np.int64]

    @property
    def widths(self) -> npt.NDArray[np.float64]:
        return (self.lasts - self.firsts).astype(float) + 1


def _steps(layout: Layout, steps: Steps) -> list[str]:
    if not layout.tables:
        raise UserError("the query has no step with state; there is nothing to move")
    if steps is not None and not isinstance(steps, Iterable):
        raise UserError(f"steps={steps!r}: expected the name of a step, or several")
    names = list(layout.tables) if steps is None else [steps] if isinstance(steps, str) else list(steps)
    if not names:
        raise UserError(f"no step was named; give some of {_list(sorted(layout.tables))}, or none for all")
    for name in names:
        if not isinstance(name, str) or name not in layout.tables:
            raise UserError(f"no step {name!r}; the query has {_list(sorted(layout.tables))}")
    return list(dict.fromkeys(names))


def _groups(layout: Layout, steps: Steps, cuts: Sequence[int] = (), finest: int = FINEST_BITS) -> list[Cells]:
    """The bins of these steps, cut at these points too; one group for each table."""
    grouped: dict[tuple[object, ...], list[str]] = {}
    for name in _steps(layout, steps):
        table = layout.tables[name]
        grouped.setdefault((table.bin_bits, table.firsts, table.slots), []).append(name)
    found = []
    for names in grouped.values():
        table = layout.tables[names[0]]
        bits = min(table.bin_bits, finest)
        grid = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits) if bits else np.zeros(1, np.uint64)
        extra = np.array([*table.firsts, *cuts], np.uint64)
        loose = extra[extra & np.uint64((1 << 64 - bits) - 1) != 0]
        firsts = np.union1d(grid, loose) if len(loose) else grid
        lasts = np.append(firsts[1:] - np.uint64(1), np.uint64(LAST))
        sizes = np.stack([bytes_in(layout.manifest, name, firsts) for name in names])
        found.append(Cells(tuple(names), bits, firsts, lasts, table.lookup(firsts).astype(np.int64), sizes))
    return found


class _Pool:
    """The bins of all groups together, with what each weighs: its bytes, or its width if there is no state at all."""

    def __init__(self, groups: Sequence[Cells]) -> None:
        self.groups = groups
        self.owners = np.concatenate([cells.owners for cells in groups])
        self.weights = np.concatenate([cells.bytes.sum(axis=0) for cells in groups]).astype(float)
        if not self.weights.any():
            self.weights = np.concatenate([cells.widths for cells in groups]) / 2.0**64

    def loads(self, last: int) -> npt.NDArray[np.float64]:
        """What each slot up to the last one has."""
        return np.bincount(self.owners, self.weights, last + 1).astype(float)

    def split(self, final: Numbers) -> list[tuple[Cells, Numbers]]:
        """Owners of all bins, group by group."""
        ends = np.cumsum([len(cells.owners) for cells in self.groups])[:-1]
        return list(zip(self.groups, np.split(final, ends), strict=True))

    def nearer(self, layout: Layout, final: Numbers) -> list[tuple[Cells, Numbers]]:
        """The same loads, with more bins where replicas of them are."""
        return self.split(nearer(self.owners, final, self.weights, layout.hosts, layout.replicas))


# -- what is to move --------------------------------------------------------------------------------------------------


def _rescaled(cells: Cells, slots: int) -> Numbers:
    """The owners when each of these slots has the same number of bins, or one more, and few have moved."""
    bins = 1 << cells.bits
    bin_of = (
        (cells.firsts >> np.uint64(64 - cells.bits)).astype(np.int64) if cells.bits else np.zeros_like(cells.owners)
    )
    owners = cells.owners
    if len(owners) > bins:  # some are cut: who has most of each
        order = np.lexsort((cells.owners, -cells.widths, bin_of))
        owners = cells.owners[order[np.flatnonzero(np.diff(bin_of[order], prepend=-1))]]
    counts = np.bincount(owners, minlength=slots)
    quotas = np.zeros_like(counts)
    quotas[:slots] = bins // slots
    quotas[np.argsort(-counts[:slots], kind="stable")[: bins % slots]] += 1
    giving = np.maximum(counts - quotas, 0)
    order = np.argsort(owners, kind="stable")
    left = np.cumsum(counts)[owners[order]] - np.arange(bins)  # how many bins its owner has from here on
    final = owners.copy()
    final[order[left <= giving[owners[order]]]] = np.repeat(np.arange(len(counts)), np.maximum(quotas - counts, 0))
    return final[bin_of]


def _poured(loads: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> Numbers:
    """Which receiver gets each item, so that all end up level: each gets consecutive items, until it lacks nothing."""
    ordered = np.sort(loads)
    levels = (weights.sum() + np.cumsum(ordered)) / np.arange(1, len(loads) + 1)
    lowest = int(np.flatnonzero(levels > ordered)[-1]) if (levels > ordered).any() else 0
    lacks = np.maximum(levels[lowest] - loads, 0)
    takers = np.flatnonzero(lacks > 0) if lacks.any() else np.arange(1)
    middles = np.cumsum(weights) - weights / 2
    at = np.searchsorted(np.cumsum(lacks[takers]), middles, side="right")
    return takers[np.minimum(at, len(takers) - 1)]


def _balanced(pool: _Pool, slots: Sequence[int], tolerance: float) -> Numbers:
    """The owners after bins have gone from the heaviest slot to the lightest for as long as that helps."""
    final = pool.owners.copy()
    loads = pool.loads(max(slots)).tolist()
    mean = sum(loads) / len(slots)
    order = np.argsort(pool.owners, kind="stable")
    begins = np.searchsorted(pool.owners[order], np.arange(max(slots) + 2))
    held = {slot: order[begins[slot] : begins[slot + 1]] for slot in slots}
    givers = [(-loads[slot], slot) for slot in slots if loads[slot] > mean]
    takers = [(loads[slot], slot) for slot in slots if loads[slot] < mean]
    heapq.heapify(givers)
    heapq.heapify(takers)
    while givers and takers:
        giver, taker = givers[0][1], takers[0][1]
        if loads[giver] <= mean * (1 + tolerance) and loads[taker] >= mean * (1 - tolerance):
            break
        run = _run(
            pool.weights[held[giver]], loads[giver] - loads[taker], min(loads[giver], 2 * mean - loads[taker]) - mean
        )
        if not len(run):
            heapq.heappop(givers)
            continue
        moved = held[giver][run]
        held[giver] = np.delete(held[giver], run)
        final[moved] = taker
        weight = float(pool.weights[moved].sum())
        loads[giver] -= weight
        loads[taker] += weight
        heapq.heapreplace(givers, (-loads[giver], giver))
        heapq.heapreplace(takers, (loads[taker], taker))
    return final


def _run(weights: npt.NDArray[np.float64], difference: float, wanted: float) -> Numbers:
    """The places of the items to give: the last ones, as long as they are no more than wanted.

    If none is so small, the smallest one, if giving it makes the difference between giver and taker smaller.
    """
    small = np.flatnonzero((weights <= wanted) & (weights > 0))
    if len(small):
        backwards = small[::-1]
        fits = int(np.searchsorted(np.cumsum(weights[backwards]), wanted, side="right"))
        return backwards[: max(1, fits)]
    some = np.flatnonzero((weights > 0) & (weights < difference))
    return some[[int(np.argmin(weights[some]))]] if len(some) else some


def _shares(layout: Layout, groups: Sequence[Cells], slots: Sequence[int], share: float) -> list[tuple[Cells, Numbers]]:
    """The last bins of each of these slots: so many that they are this share of its bins, and at least one."""
    _known_slots(layout, slots, "slots")
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise UserError(f"share={share!r}: expected more than 0, and at most 1")
    found = []
    for cells in groups:
        order = np.argsort(cells.owners, kind="stable")
        names = np.array(list(dict.fromkeys(slots)))
        begins, ends = (np.searchsorted(cells.owners[order], names, side=side).tolist() for side in ("left", "right"))
        kept = [order[end - _count(end - begin, share) : end] for begin, end in zip(begins, ends, strict=True)]
        found.append((cells, np.concatenate(kept)))
    if not any(len(picked) for _, picked in found):
        raise UserError(f"slot {_list(slots)} owns nothing; what there is lies at {_list(sorted(layout.owners))}")
    return found


def _count(bins: int, share: float) -> int:
    return min(bins, max(1, round(bins * share)))


def _within(layout: Layout, steps: Steps, ranges: Sequence[Range]) -> list[tuple[Cells, Numbers]]:
    if not ranges or not all(isinstance(item, Range) for item in ranges):
        raise UserError(f"ranges={ranges!r}: expected one Range or several")
    ordered = sorted(ranges)
    for one, other in pairwise(ordered):
        if one.overlap(other):
            raise UserError(f"the ranges {one} and {other} overlap; give each point once")
    cuts = [item.first for item in ordered] + [item.last + 1 for item in ordered if item.last < LAST]
    begins = np.array([item.first for item in ordered], np.uint64)
    ends = np.array([item.last for item in ordered], np.uint64)
    found = []
    for cells in _groups(layout, steps, cuts):
        inside = np.searchsorted(begins, cells.firsts, side="right") - 1
        found.append((cells, np.flatnonzero((inside >= 0) & (cells.firsts <= ends[inside]))))
    return found


def _numbered(layout: Layout, steps: Steps, bins: Sequence[int]) -> list[tuple[Cells, Numbers]]:
    names = _steps(layout, steps)
    if len(set(bins)) != len(bins):
        twice = next(number for number in bins if list(bins).count(number) > 1)
        raise UserError(f"bin {twice} is named twice; give each bin once")
    found: list[tuple[Cells, Numbers]] = []
    for bits in dict.fromkeys(layout.tables[name].bin_bits for name in names):
        same = [name for name in names if layout.tables[name].bin_bits == bits]
        for number in bins:
            if not 0 <= number < 1 << bits:
                raise UserError(f"no bin {number}: step {same[0]!r} has {1 << bits}, numbered from 0")
        size = 1 << (64 - bits)
        found += _within(layout, same, [Range(number * size, number * size + size - 1) for number in bins])
    return found


# -- the plan ---------------------------------------------------------------------------------------------------------


def _plan(
    layout: Layout,
    verb: str,
    wanted: Sequence[tuple[Cells, Numbers]],
    strategy: Strategy,
    start: Start,
    drains: str = "",
    pace: int | None = None,
    near: Sequence[tuple[Cells, Numbers]] | None = None,
) -> MigrationPlan:
    """The plan that gives every bin the owner that is wanted; or that of `near`, if the protocol has bins go where
    replicas are. With a pace, the strategy gives only the order."""
    if not isinstance(strategy, Strategy):
        raise UserError(f"strategy={strategy!r}: expected Paced(), AllAtOnce(), Fluid(), Batched(n) or Matched()")
    made = partial(_made, layout, verb, strategy=strategy, start=start, drains=drains, pace=pace)
    plan = made(wanted)
    others = near is not None and any((one[1] != two[1]).any() for one, two in zip(wanted, near, strict=True))
    return by_protocol(plan, layout, strategy, partial(made, near) if others else None)


def _made(
    layout: Layout,
    verb: str,
    wanted: Sequence[tuple[Cells, Numbers]],
    strategy: Strategy,
    start: Start,
    drains: str,
    pace: int | None,
) -> MigrationPlan:
    moving = [(cells, final, np.flatnonzero(cells.owners != final)) for cells, final in wanted]
    touched = [cells for cells, _, picked in moving if len(picked)] or [cells for cells, _ in wanted]
    rounds: list[list[Move]] = [[]] if drains else []
    costs = replace(costs_of(layout.rates, layout.fetch_rate), epoch_s=layout.steady_s)
    slowdown = strategy.slowdown if isinstance(strategy, Paced) and pace is None else 0.0
    if any(len(picked) for _, _, picked in moving):
        firsts = np.concatenate([cells.firsts[picked] for cells, _, picked in moving])
        lasts = np.concatenate([cells.lasts[picked] for cells, _, picked in moving])
        origins = np.concatenate([cells.owners[picked] for cells, _, picked in moving])
        targets = np.concatenate([final[picked] for _, final, picked in moving])
        units, unit_of = _units(firsts, lasts, origins, targets)
        numbers = strategy.rounds(origins[units], targets[units])
        sizes = np.concatenate([cells.bytes[:, picked].sum(axis=0) for cells, _, picked in moving])
        sizes = np.bincount(unit_of, sizes).astype(float)
        if pace is not None:
            numbers = _paced(numbers, sizes, pace)
        elif slowdown:
            numbers = grained(numbers, sizes, costs, slowdown)
        elif strategy.merge and isinstance(strategy, Batched | Matched):
            numbers = merged(numbers, sizes, costs)
        numbers = numbers[unit_of]
        rounds = [[] for _ in range(int(numbers.max()) + 1)]
        lengths = [len(picked) for _, _, picked in moving]
        masks = np.repeat(2.0 ** (np.arange(len(moving)) % 52), lengths)
        company = np.bincount(unit_of, masks).astype(np.int64)[unit_of]  # which groups make a move together
        ends = np.cumsum(lengths)[:-1]
        for (cells, final, picked), number, mates in zip(
            moving, np.split(numbers, ends), np.split(company, ends), strict=True
        ):
            if len(picked):
                _add_moves(rounds, cells, final, picked, number, mates)
    return MigrationPlan(
        layout.store,
        verb,
        {name: layout.tables[name].version for cells in touched for name in cells.steps},
        tuple(tuple(moves) for moves in rounds),
        strategy.gap,
        start,
        str(strategy) if pace is None else f"rounds of {size_text(pace)}" if pace else "one round",
        drains=drains,
        generation=layout.generation if drains else 0,
        fetch_limit=layout.fetch_limit,
        placement={worker: tuple(sorted(slots)) for worker, slots in sorted(layout.placement.items())},
        budget=round(strategy.stall_s * layout.fetch_rate),
        deadline_s=float(strategy.deadline_s),
        slowdown=slowdown,
        costs=costs,
    )


def _units(firsts: Hashes, lasts: Hashes, origins: Numbers, targets: Numbers) -> tuple[Numbers, Numbers]:
    """Which moves stand for those that are the same in several steps, in the order of the key space; and for each move,
    which of these it belongs to."""
    order = np.lexsort((targets, origins, lasts, firsts))
    new = np.zeros(len(order), bool)
    new[0] = True
    for column in (firsts, lasts, origins, targets):
        new[1:] |= column[order][1:] != column[order][:-1]
    unit_of = np.empty(len(order), np.int64)
    unit_of[order] = np.cumsum(new) - 1
    return order[new], unit_of


def _paced(places: Numbers, sizes: npt.NDArray[np.float64], pace: int) -> Numbers:
    """The round of each move: in the order of their places, as many to a round as have no more bytes than `pace`."""
    order = np.argsort(places, kind="stable")
    sums = np.cumsum(sizes[order])
    ends = [0]
    while pace and ends[-1] < len(order):
        before = sums[ends[-1] - 1] if ends[-1] else 0.0
        ends.append(max(ends[-1] + 1, int(np.searchsorted(sums, before + pace, side="right"))))
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.searchsorted(np.array(ends[1:-1], np.int64), np.arange(len(order)), side="right")
    return numbers


def _add_moves(
    rounds: list[list[Move]],
    cells: Cells,
    final: Numbers,
    picked: Numbers,
    numbers: Numbers,
    company: Numbers,
) -> None:
    """Adds the moves of these bins to their rounds.

    Neighbours that go the same way in the same round, with the same company, are one move.
    """
    order = np.argsort(numbers, kind="stable")
    picked, numbers = picked[order], numbers[order]
    origins, targets = cells.owners[picked], final[picked]
    begins = np.diff(picked, prepend=-2) != 1
    for column in (numbers, company[order], origins, targets):
        begins[1:] |= column[1:] != column[:-1]
    heads = np.flatnonzero(begins)
    counts = np.diff(np.append(heads, len(picked)))
    sizes = np.add.reduceat(cells.bytes[:, picked], heads, axis=1).tolist()
    ranges = list(map(Range, cells.firsts[picked[heads]].tolist(), cells.lasts[picked[heads + counts - 1]].tolist()))
    ways = [list(map(Slot, ends[heads].tolist())) for ends in (origins, targets)]
    edges = np.searchsorted(numbers[heads], np.arange(len(rounds) + 1)).tolist()
    for step, size in zip(cells.steps, sizes, strict=True):
        moves = list(map(Move, repeat(step), ranges, *ways, size, counts.tolist()))
        for number, (begin, end) in enumerate(pairwise(edges)):
            rounds[number] += moves[begin:end]


# -- arguments --------------------------------------------------------------------------------------------------------


def _whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}={value!r}: expected a whole number, {least} or more")


def _listed(name: str, value: int | Sequence[int]) -> list[int]:
    if isinstance(value, str) or not isinstance(value, int | Iterable):
        raise UserError(f"{name}={value!r}: expected a whole number, or several")
    numbers = [value] if isinstance(value, int) else list(value)
    for number in numbers:
        _whole(name, number, 0)
    if not numbers:
        raise UserError(f"{name}= is empty; give one number or several")
    return numbers


def _known_slots(layout: Layout, slots: Sequence[int], name: str) -> None:
    known = layout.slots
    for slot in slots:
        _whole(name, slot, 0)
        if slot not in known:
            raise UserError(f"no slot {slot}; the query has {_list(sorted(known))}")


def _list(items: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in items[:12])
    return shown if len(items) <= 12 else f"{shown} and {len(items) - 12} more"
