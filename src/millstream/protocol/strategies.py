"""Strategies: how the moves of a plan are spread over epochs. What moves is decided elsewhere.

Rules
-----
- A move is one bin that goes from an origin slot to a target slot. A strategy gives every move a round, from 0 without
  a hole; the moves of a round happen at one epoch.
- The order is spread: at any point of a plan every target has received its share of what it will receive, within one
  bin, and every origin has given about its share; so no epoch falls on one slot alone. Bins of one origin that go to
  one target go in the order of the key space: neighbours travel together, and tables stay small on the way.
- The same moves give the same rounds: nothing is random.
- Rounds that cost next to nothing together are merged (`protocol.pacing`), but for those of `Fluid`, and for strategies
  with `merge=False`.

`Matched` colours the edges of a graph: slots are its vertices, moves its edges, rounds its colours. Megaphone (section
4.4) groups migrations that do not interfere by bipartite matching; here, two moves interfere if they share a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millstream.errors import UserError

Numbers = npt.NDArray[np.int64]

PROTOCOLS = ("direct", "cpa", "cpal")
"""See `protocol.costs`."""
STALL_S = 0.02
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """How moves are spread over epochs. `gap` is the number of epochs between two rounds in which nothing moves. Rounds
    that cost next to nothing are one, unless `merge` is false.

    `prepared` says whether a round waits until its targets hold what it brings (see `protocol.handover`); by default
    it does where there are several workers. `protocol` says the same in the words of `protocol.costs`: `direct` and
    `cpa` do not wait, `cpal` does, and `auto` is whichever is expected to be best. If it waits, `stall_s` is about how
    many seconds an epoch may take longer for what is still lacking, and `deadline_s` how many seconds a round may wait.
    """

    gap: int = 0
    merge: bool = True
    prepared: bool | None = None
    protocol: str = ""
    stall_s: float = STALL_S
    deadline_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        _check(self, "gap", self.gap, 0)
        if self.merge not in (True, False):
            raise UserError(f"{type(self).__name__}(merge={self.merge!r}): expected True or False")
        if self.prepared not in (None, True, False):
            raise UserError(f"{type(self).__name__}(prepared={self.prepared!r}): expected True, False or None")
        if self.protocol not in ("", "auto", *PROTOCOLS):
            given = f"{type(self).__name__}(protocol={self.protocol!r})"
            raise UserError(f"{given}: expected 'auto', {', '.join(map(repr, PROTOCOLS))}, or nothing")
        if self.protocol and self.prepared is not None:
            raise UserError(f"{type(self).__name__}: give prepared= or protocol=, not both")
        for name, value in (("stall_s", self.stall_s), ("deadline_s", self.deadline_s)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise UserError(f"{type(self).__name__}({name}={value!r}): expected a number of seconds, 0 or more")

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._arguments())})"

    def _arguments(self) -> list[str]:
        told: list[tuple[str, float | None, float | None]] = [("gap", self.gap, 0), ("merge", self.merge, True)]
        told += [("prepared", self.prepared, None)]
        told += [("stall_s", self.stall_s, STALL_S), ("deadline_s", self.deadline_s, DEADLINE_S)]
        named = [f"protocol={self.protocol!r}"] if self.protocol else []
        return named + [
            f"{name}={value:g}" if name.endswith("_s") else f"{name}={value}"
            for name, value, usual in told
            if value != usual
        ]

    def rounds(self, origins: Numbers, targets: Numbers) -> Numbers:
        """The round of each move, given the slots that the moves come from and go to."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Paced(Strategy):
    """As much per epoch as lets it take `slowdown` times as long as an epoch in which nothing moves. The default.

    What a byte and a bin cost is learned on the way, so rounds grow and shrink. A small state takes an epoch or two.
    """

    slowdown: float = 1.1

    def __post_init__(self) -> None:
        Strategy.__post_init__(self)
        given = self.slowdown
        if isinstance(given, bool) or not isinstance(given, int | float) or not 1 < given <= 100:
            raise UserError(f"Paced(slowdown={given!r}): expected a factor above 1, such as 1.1, and at most 100")

    def _arguments(self) -> list[str]:
        return [f"{self.slowdown:g}", *Strategy._arguments(self)]

    def rounds(self, origins: Numbers, targets: Numbers) -> Numbers:
        """The place of each move in the spread order, in which they are made into rounds by what they cost."""
        return _spread(origins, targets)


@dataclass(frozen=True, slots=True)
class AllAtOnce(Strategy):
    """Everything moves at one epoch: the shortest migration, and the longest stall."""

    def rounds(self, origins: Numbers, targets: Numbers) -> Numbers:
        """The round of each move: the first."""
        return np.zeros(len(origins), np.int64)


@dataclass(frozen=True, slots=True)
class Fluid(Strategy):
    """One bin per epoch, whatever it costs: the longest migration, and the shortest stall."""

    def rounds(self, origins: Numbers, targets: Numbers) -> Numbers:
        """The round of each move: its place in the spread order."""
        return _spread(origins, targets)


@dataclass(frozen=True, slots=True)
class Batched(Strategy):
    """`n` bins per epoch, spread over origins and targets: the longer the migration, the shorter the stall."""

    n: int

    def __post_init__(self) -> None:
        Strategy.__post_init__(self)
        _check(self, "n", self.n, 1)

    def _arguments(self) -> list[str]:
        return [str(self.n), *Strategy._arguments(self)]

    def rounds(self, origins: Numbers, targets: Numbers) -> Numbers:
        """The round of each move: `n` to each, in the spread order.

        >>> Batched(2).rounds(np.array([0, 0, 1, 1]), np.array([2, 2, 3, 3])).tolist()
        [0, 1, 0, 1]
        """
        return _spread(origins, targets) // self.n


@dataclass(frozen=True, slots=True)
class Matched(Strategy):
    """As many bins per epoch as there are pairs of slots to exchange them: a slot gives one bin, or receives one.

    Let d be the most moves that any slot takes part in. If no slot both gives and receives there are d rounds, which is
    the least possible; if one does, at most 2d - 1.
    """

    def rounds(self, origins: Numbers, targets: Numbers) -> Numbers:
        """The round of each move, so that moves of one round have no slot in common.

        >>> Matched().rounds(np.array([0, 0, 1, 1]), np.array([2, 3, 2, 3])).tolist()
        [0, 1, 1, 0]
        """
        return _coloured(origins, targets)


def _check(strategy: Strategy, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(
            f"{type(strategy).__name__}({name}={value!r}): expected a whole number of "
            f"{'bins' if name == 'n' else 'epochs'}, {least} or more"
        )


def _share(groups: Numbers, order: Numbers) -> npt.NDArray[np.float64]:
    """For each item, how far through its group it is (between 0 and 1), when items are taken in this order."""
    sorted_ = order[np.argsort(groups[order], kind="stable")]
    _, begins, counts = np.unique(groups[sorted_], return_index=True, return_counts=True)
    ranks = np.arange(len(groups)) - np.repeat(begins, counts)
    shares = np.empty(len(groups))
    shares[sorted_] = (ranks + 0.5) / np.repeat(counts, counts)
    return shares


def _spread(origins: Numbers, targets: Numbers) -> Numbers:
    """The place of each move in an order in which every target receives evenly, and every origin gives evenly."""
    given = np.argsort(_share(origins, np.arange(len(origins))), kind="stable")
    order = np.argsort(_share(targets, given)[given], kind="stable")
    places = np.empty(len(origins), np.int64)
    places[given[order]] = np.arange(len(origins))
    return places


def _coloured(origins: Numbers, targets: Numbers) -> Numbers:
    """A colour for each edge, so that edges that meet have different ones."""
    colours = np.empty(len(origins), np.int64)
    if not len(origins):
        return colours
    slots, ends = np.unique(np.concatenate([origins, targets]), return_inverse=True)
    lefts, rights = ends[: len(origins)], ends[len(origins) :]
    degrees = np.bincount(ends)
    sided = not np.intersect1d(lefts, rights).size
    painter = _Painter(len(slots), int(degrees.max()) if sided else 2 * int(degrees.max()) - 1)
    order = np.argsort(lefts * len(slots) + rights, kind="stable")
    _, begins = np.unique((lefts * len(slots) + rights)[order], return_index=True)
    for edges in np.split(order, begins[1:]):
        left, right = int(lefts[edges[0]]), int(rights[edges[0]])
        painter.paint(left, right, edges.tolist())
    for edge, colour in painter.colour.items():
        colours[edge] = colour
    return colours


class _Painter:
    """Edges with colours. `used[v]` has a bit for every colour at vertex v, `at[v]` says which edge has it.

    With 2d - 1 colours an edge always finds one that is free at both ends. With d colours, and two sides, it may find
    one that is free at the left end and another that is free at the right one; exchanging the two along the path that
    begins at the right end frees the first there too, and the path never comes to the left end (König 1916).
    """

    def __init__(self, vertices: int, limit: int) -> None:
        self.all = (1 << limit) - 1
        self.used = [0] * vertices
        self.at: list[dict[int, int]] = [{} for _ in range(vertices)]
        self.colour: dict[int, int] = {}
        self.ends: dict[int, tuple[int, int]] = {}

    def paint(self, left: int, right: int, edges: list[int]) -> None:
        """Colours the edges between two vertices."""
        common = self.all & ~(self.used[left] | self.used[right])
        for edge, colour in zip(edges, _lowest(common, len(edges)), strict=False):
            self._set(edge, left, right, colour)
        for edge in edges[common.bit_count() :]:
            self._set(edge, left, right, self._freed(left, right))

    def _set(self, edge: int, left: int, right: int, colour: int) -> None:
        self.colour[edge], self.ends[edge] = colour, (left, right)
        for end in (left, right):
            self.at[end][colour] = edge
            self.used[end] |= 1 << colour

    def _freed(self, left: int, right: int) -> int:
        """A colour that is free at the left end, after it has been made free at the right one."""
        [here] = _lowest(self.all & ~self.used[left], 1)
        [there] = _lowest(self.all & ~self.used[right], 1)
        path, vertex, colour = [], right, here
        while colour in self.at[vertex]:
            edge = self.at[vertex][colour]
            path.append(edge)
            one, other = self.ends[edge]
            vertex, colour = other if vertex == one else one, there if colour == here else here
        for edge in path:
            for end in self.ends[edge]:
                del self.at[end][self.colour[edge]]
                self.used[end] &= ~(1 << self.colour[edge])
        for edge in path:
            self._set(edge, *self.ends[edge], there if self.colour[edge] == here else here)
        return here


def _lowest(bits: int, count: int) -> list[int]:
    """The numbers of the lowest bits that are set, `count` of them if there are as many."""
    if count == 1:
        return [(bits & -bits).bit_length() - 1] if bits else []
    raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(raw, bitorder="little"))[:count].tolist()
    return found
