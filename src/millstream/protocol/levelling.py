"""Levelling: which cells go where, so that no slot has much more to do than its share. Arrays in, owners out.

Rules
-----
- The share of a slot goes with its room: what of a core it can have. A slot without room gives all that it has.
- A slot that has more than its share gives only what is too much, and nobody gets more than lacks; where a cell is too
  large for that, only if the most loaded slot is better off. So the worst slot never gets worse.
- Few cells move: first those with the most load for their bytes. Cells of about the same density count as equal, and
  then neighbours go together, so that tables stay small.
- A cell goes where its state is held already, as long as nobody is further from the fair share for it than is
  tolerated.
- The same facts give the same owners: nothing is random.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millstream.protocol.statistics import Floats
from millstream.protocol.strategies import Numbers

Flags = npt.NDArray[np.bool_]

_IDLE = 1e-3
"""What state that has nothing to do counts for: this share of all load, where it has to go somewhere."""
_STEPS = 12
"""How often the level is halved in search of one that the budget can pay for."""
_REPAIRS = 64
"""How many cells that are too large to be shared out evenly are moved one by one."""
_DUST = 0.01
"""A move that helps by less than this share of what is fair is not made."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How far to go: within `tolerance` of the fair share, moving at most `bytes`, and no cell with more than
    `cell_bytes`. Slots that are over their share by no more than `over` give nothing: it would help nobody."""

    tolerance: float = 0.05
    over: float = 0.0
    bytes: float = float("inf")
    cell_bytes: float = float("inf")


def fair_shares(loads: Floats, room: Floats) -> Floats:
    """What of all load each slot should have.

    >>> fair_shares(np.array([6.0, 3.0]), np.array([1.0, 0.0, 0.5])).tolist()
    [6.0, 0.0, 3.0]
    """
    shares: Floats = loads.sum() * room / room.sum()
    return shares


def levelled(
    owners: Numbers,
    loads: Floats,
    sizes: Floats,
    room: Floats,
    limits: Limits = Limits(),  # noqa: B008  a value
    *,
    stays: Flags | None = None,
    near: Flags | None = None,
) -> Numbers:
    """The owner of each cell, when slots are level, as far as cells and limits allow.

    The cells of slots without room go whatever the limits say; those that `stay` do not go. `near[a, b]` says whether
    slot b is where the state of slot a is held.

    >>> levelled(np.array([0, 0, 0, 1]), np.array([1.0, 1, 1, 1]), np.ones(4), np.ones(2)).tolist()
    [0, 0, 1, 1]
    """
    return _Levelling(owners, loads, sizes, room, limits, stays, near).done()


class _Levelling:
    def __init__(
        self,
        owners: Numbers,
        loads: Floats,
        sizes: Floats,
        room: Floats,
        limits: Limits,
        stays: Flags | None,
        near: Flags | None,
    ) -> None:
        self.owners, self.loads, self.sizes, self.room, self.limits = owners, loads, sizes, room, limits
        self.near = near
        self.fair = fair_shares(loads, room)
        self.forced: Flags = room[owners] == 0
        self.movable: Flags = ~self.forced & (loads > 0) & (sizes <= limits.cell_bytes)
        if stays is not None:
            self.movable &= ~stays
        self.final = owners.copy()
        self.have = np.bincount(owners[~self.forced], loads[~self.forced], len(room))
        self.left = limits.bytes - float(sizes[self.forced].sum())

    def done(self) -> Numbers:
        given = np.concatenate([np.flatnonzero(self.forced), self._given()])
        gives = self.owners[given]
        self.have = np.bincount(self.owners, self.loads, len(self.room))
        self.worst = self.have / np.maximum(self.room, 1e-12)
        self.have -= np.bincount(gives, self.loads[given], len(self.room))
        large = self.loads[given] > self.limits.tolerance * self.fair.max(initial=0.0)
        self._place(given[large])
        self._pour(np.sort(given[~large]))
        self._repair()
        return self.final

    def _given(self) -> Numbers:
        """The cells that slots give because they have too much: as many as the budget pays for."""
        lowest = 1 + self.limits.tolerance / 2
        over = self.have > self.fair * max(lowest, 1 + self.limits.over)
        found = np.flatnonzero(self.movable & over[self.owners])
        if not len(found):
            return found
        density = self.loads[found] / (self.sizes[found] + max(1.0, float(self.sizes.mean())))
        order = np.lexsort((-found, -np.floor(np.log2(density)), self.owners[found]))
        found = found[order]
        owners, loads, sizes = self.owners[found], self.loads[found], self.sizes[found]
        heads = np.searchsorted(owners, owners)

        def picked(level: float) -> Flags:
            excess = (self.have - self.fair * level)[owners]
            fits = loads <= excess
            sums = np.cumsum(loads * fits)
            flags: Flags = fits & (sums - (sums - loads * fits)[heads] <= excess)
            return flags

        best = picked(lowest)
        if sizes[best].sum() > self.left:
            low, high = lowest, float((self.have[owners] / self.fair[owners]).max())
            best = np.zeros(len(found), bool)
            for _ in range(_STEPS):
                level = (low + high) / 2
                flags = picked(level)
                if sizes[flags].sum() <= self.left:
                    best, high = flags, level
                else:
                    low = level
        self.left -= float(sizes[best].sum())
        return found[best]

    def _place(self, cells: Numbers) -> None:
        """Large cells, the largest first, each to the slot that lacks most."""
        lacks = np.where(self.room > 0, self.fair - self.have, -np.inf)
        most = float(self.fair.max(initial=0.0))
        for cell in cells[np.argsort(-self.loads[cells], kind="stable")].tolist():
            giver, load = int(self.owners[cell]), float(self.loads[cell])
            mine, lacks[giver] = lacks[giver], -np.inf
            if self.near is None:
                taker = int(lacks.argmax())
            else:
                taker = int((lacks + self.limits.tolerance * most * self.near[giver]).argmax())
            lacks[giver] = mine
            after = (self.have[taker] + load) / max(float(self.room[taker]), 1e-12)
            if not self.forced[cell] and after > self.worst[giver] - _DUST * most:
                taker = giver
            self.final[cell] = taker
            self.have[taker] += load
            lacks[taker] -= load

    def _pour(self, cells: Numbers) -> None:
        """Small cells, those of each giver in order, into what slots lack."""
        owners = self.owners[cells]
        weights = self.loads + _IDLE * (self.loads.sum() or 1.0) * (self.sizes + 1.0) / (self.sizes + 1.0).sum()
        amounts = np.bincount(owners, weights[cells], len(self.room))
        level, full = self._level(float(amounts.sum())), self.fair * (1 + self.limits.tolerance / 2)
        givers = np.unique(owners)
        for giver in givers[np.argsort(-amounts[givers], kind="stable")].tolist():
            mine = cells[owners == giver]
            held = np.zeros(len(self.room), bool) if self.near is None else self.near[giver]
            lacks = np.where(held, np.maximum(level * self.room, full), level * self.room) - self.have
            lacks[(self.room == 0) | (np.arange(len(lacks)) == giver)] = -np.inf
            takers = np.flatnonzero(lacks > 0)
            if not len(takers):
                takers = np.array([np.argmax(lacks)])
            takers = takers[np.lexsort((-lacks[takers], ~held[takers]))]
            middles = np.cumsum(weights[mine]) - weights[mine] / 2
            at = np.searchsorted(np.cumsum(np.maximum(lacks[takers], 0.0)), middles, side="right")
            self.final[mine] = takers[np.minimum(at, len(takers) - 1)]
            self.have += np.bincount(self.final[mine], self.loads[mine], len(self.room))

    def _level(self, amount: float) -> float:
        """How much all slots have, for their room, when so much has been poured into those with the least."""
        slots = np.flatnonzero(self.room > 0)
        slots = slots[np.argsort(self.have[slots] / self.room[slots], kind="stable")]
        levels = (amount + np.cumsum(self.have[slots])) / np.cumsum(self.room[slots])
        reached = np.flatnonzero(levels >= self.have[slots] / self.room[slots])
        return float(levels[reached[-1]]) if len(reached) else 0.0

    def _repair(self) -> None:
        """While the worst slot is above what is tolerated: one cell of it goes where the two come closest."""
        usable = np.maximum(self.room, 1e-12)
        for _ in range(_REPAIRS):
            ratios = np.where(self.room > 0, self.have / usable, -np.inf)
            giver = int(np.argmax(ratios))
            fair = float(self.fair[giver])
            if self.have[giver] <= fair * (1 + max(self.limits.tolerance, self.limits.over)):
                return
            taker = int(np.argmin(np.where(self.room > 0, ratios, np.inf)))
            ours, theirs = float(self.room[giver]), float(self.room[taker])
            mine = np.flatnonzero(
                (self.final == giver) & (self.owners == giver) & self.movable & (self.sizes <= self.left)
            )[::-1]
            after = np.maximum(
                (self.have[giver] - self.loads[mine]) / ours, (self.have[taker] + self.loads[mine]) / theirs
            )
            if not len(mine) or after.min() > ratios[giver] - _DUST * fair / ours:
                return
            cell = int(mine[np.argmin(after)])
            self.final[cell] = taker
            self.have[giver] -= self.loads[cell]
            self.have[taker] += self.loads[cell]
            self.left -= float(self.sizes[cell])
