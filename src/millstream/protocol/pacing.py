"""Pacing: how much of a migration one epoch takes on, by what moving costs.

Rules
-----
- Moves cost time by the bytes that the busiest worker receives, and by bins: routing tables grow, and state is read in
  more pieces. Both are learned from the epochs in which something moved, and guessed before there was one.
- A paced plan consists of small rounds. At each epoch as many of them are carried out together as fit the budget: the
  share of a steady epoch by which its strategy lets an epoch slow down. At least one is, however large it is.
- Of other strategies, rounds that cost next to nothing are carried out together, too, unless they are to stay apart.
- State that was prepared is at its target: it costs what it takes to open it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from millstream.protocol.migration import Move

Numbers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BIN_S = 2e-6
"""What a bin is taken to cost where nothing has moved yet. Measured: 3,072 bins without state, 1.2 ms."""
LEAST_BIN_S, MOST_BIN_S = 2e-7, 1e-3
"""No bin is believed to cost less, or more: an epoch's time also varies for other reasons."""
HELD_BYTE_S = 1e-9
"""What a byte costs that the target holds already: to open it."""
SHORTEST_EPOCH_S = 0.1
"""A steady epoch is not taken to be shorter: a tenth of less is less than epochs vary by."""
FREE_S = 0.004
"""Rounds that cost no more than this together are not worth an epoch each."""
GRAINS = 4
"""How many rounds of a paced plan make about one budget."""
KEPT = 0.8
"""How much of what was learned before counts beside one more epoch."""
KEPT_DOWN = 0.5
"""The same where an epoch was shorter than those before: the first ones, of a cold process, are long."""
KEPT_REST = 0.95
"""The same of what bins cost, which is little beside what epochs vary by."""
TELLING_BYTES, TELLING_BINS = 1 << 16, 1 << 8
"""Fewer bytes, or bins, say more about an epoch than about what one of them costs."""


@dataclass(frozen=True, slots=True)
class MoveCosts:
    """What moving costs, in seconds, and how long an epoch takes in which nothing moves (0 if that is not known).

    >>> round(MoveCosts(byte_s=1e-8, bin_s=1e-6).of(10**6, 1000), 3)
    0.011
    """

    byte_s: float = 8e-9
    bin_s: float = BIN_S
    epoch_s: float = 0.0

    def of(self, size: Any, bins: Any) -> Any:
        """What an epoch takes longer in which a worker receives so many bytes, and so many bins move; or of many."""
        return size * self.byte_s + bins * self.bin_s

    def budget_s(self, slowdown: float) -> float:
        """How much longer an epoch may take."""
        return (slowdown - 1.0) * max(self.epoch_s, SHORTEST_EPOCH_S)

    def held(self) -> MoveCosts:
        """What moving costs where the targets hold the state already."""
        return replace(self, byte_s=min(self.byte_s, HELD_BYTE_S))


GUESSED = MoveCosts()
"""What moving is taken to cost where nothing is known."""


class RoundLoad:
    """What some rounds bring together: the bytes to the worker that receives most, and the bins."""

    def __init__(self, hosts: Mapping[int, str]) -> None:
        """`hosts` are the workers of slots; a slot without one is taken to get a worker of its own."""
        self._hosts = hosts
        self._received: dict[object, int] = {}
        self.bins = 0

    def add(self, moves: Sequence[Move]) -> None:
        """One more round."""
        for move in moves:
            worker = self._hosts.get(move.target, move.target)
            self._received[worker] = self._received.get(worker, 0) + move.bytes
            self.bins += move.bins

    @property
    def bytes(self) -> int:
        """What the worker receives that receives most."""
        return max(self._received.values(), default=0)


def hosts_of(placement: Mapping[str, Collection[int]]) -> dict[int, str]:
    """The worker of each slot."""
    return {slot: worker for worker, slots in placement.items() for slot in slots}


def rounds_together(
    rounds: Sequence[Sequence[Move]], done: int, hosts: Mapping[int, str], slowdown: float, costs: MoveCosts
) -> int:
    """How many rounds of a paced plan one epoch carries out, after those that are done: at least one."""
    load, budget, count = RoundLoad(hosts), costs.budget_s(slowdown), 0
    for moves in islice(rounds, done, None):
        load.add(moves)
        if count and costs.of(load.bytes, load.bins) > budget:
            break
        count += 1
    return max(1, count)


def epochs_of(
    rounds: Sequence[Sequence[Move]], hosts: Mapping[int, str], slowdown: float, costs: MoveCosts
) -> Iterator[Sequence[Sequence[Move]]]:
    """The rounds of each epoch of a paced plan, if nothing costs more or less than is thought."""
    done = 0
    while done < len(rounds):
        count = rounds_together(rounds, done, hosts, slowdown, costs)
        yield rounds[done : done + count]
        done += count


# -- for planners --------------------------------------------------------------------------------------------------


def grained(places: Numbers, sizes: Floats, costs: MoveCosts, slowdown: float) -> Numbers:
    """The round of each move of a paced plan: in the order of their places, some to each, a large one alone.

    >>> costs = MoveCosts(byte_s=1e-8, bin_s=0.0, epoch_s=1.0)
    >>> grained(np.arange(5), np.array([1e6, 1e6, 9e6, 1e6, 1e6]), costs, 1.1).tolist()
    [0, 0, 1, 2, 2]
    """
    order = np.argsort(places, kind="stable")
    spent = costs.of(sizes[order], 1.0)
    grain = costs.budget_s(slowdown) / GRAINS
    middles = np.cumsum(spent) - spent / 2
    numbers = np.empty(len(order), np.int64)
    numbers[order] = np.unique(np.floor(middles / grain), return_inverse=True)[1]
    return numbers


def merged(rounds: Numbers, sizes: Floats, costs: MoveCosts) -> Numbers:
    """The round of each move, where rounds that follow each other are one if they cost next to nothing together.

    >>> costs = MoveCosts(byte_s=1e-9, bin_s=0.0)
    >>> merged(np.array([0, 1, 2, 3]), np.array([1e6, 2e6, 9e6, 1e6]), costs).tolist()
    [0, 0, 1, 2]
    """
    if not len(rounds):
        return rounds
    spent = costs.of(np.bincount(rounds, sizes), np.bincount(rounds))
    numbers, number, together = [0], 0, float(spent[0])
    for each in spent[1:].tolist():
        together += each
        if together > FREE_S:
            number, together = number + 1, each
        numbers.append(number)
    found: Numbers = np.array(numbers, np.int64)[rounds]
    return found


# -- for those who learn ----------------------------------------------------------------------------------------------


class Learning:
    """Learns what moving costs from one epoch after the other."""

    def __init__(self, known: Mapping[str, float]) -> None:
        """Begins with what was `told` before, perhaps by another driver."""
        self._epoch_s = known.get("steady_s", 0.0)
        self._byte_s = known.get("move_byte_s", 0.0)
        self._bin_s = known.get("move_bin_s", BIN_S)
        self._rest_s, self._bins = self._bin_s * 1000.0, 1000.0

    def quiet(self, took_s: float) -> None:
        """An epoch in which nothing moved."""
        kept = KEPT if took_s > self._epoch_s else KEPT_DOWN  # an epoch is longer than usual more often than shorter
        self._epoch_s = kept * self._epoch_s + (1 - kept) * took_s if self._epoch_s else took_s

    def moved(self, load: RoundLoad, took_s: float, reading_s: float, prepared: bool) -> None:
        """An epoch in which something moved, and how long its tasks took to fetch and open state."""
        if load.bytes >= TELLING_BYTES and not prepared and reading_s > 0:
            byte_s = reading_s / load.bytes
            self._byte_s = KEPT * self._byte_s + (1 - KEPT) * byte_s if self._byte_s else byte_s
        if self._epoch_s and load.bins >= TELLING_BINS:
            # Signed, so that what epochs vary by for other reasons evens out.
            self._rest_s = KEPT_REST * self._rest_s + took_s - self._epoch_s - reading_s
            self._bins = KEPT_REST * self._bins + load.bins
            self._bin_s = min(MOST_BIN_S, max(LEAST_BIN_S, self._rest_s / max(1.0, self._bins)))

    def costs(self, fetch_rate: float) -> MoveCosts:
        """What is known now; `fetch_rate` stands in where nothing was learned of bytes."""
        return MoveCosts(self._byte_s or 1.0 / fetch_rate, self._bin_s, self._epoch_s)

    def told(self) -> dict[str, float]:
        """What is to be remembered, as far as it is known."""
        found = {"steady_s": self._epoch_s, "move_byte_s": self._byte_s, "move_bin_s": self._bin_s}
        return {name: value for name, value in found.items() if value}


def costs_of(known: Mapping[str, Any], fetch_rate: float) -> MoveCosts:
    """What moving costs by what a commit has told."""
    return Learning(known).costs(fetch_rate)
