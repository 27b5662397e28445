"""Statistics: what each part of the key space had to do in an epoch, and how that goes on from epoch to epoch.

Rules
-----
- Load is measured in cells: 2^bits equal ranges of the key space, as many as the step has bins, but at most 2^12. A
  cell is a bin, or several; so what is measured does not grow with the number of bins.
- Records are counted exactly, cell by cell. What a slot knows only as a whole, as its CPU time, is shared out among its
  cells by records, so that the cells have exactly what the slot had.
- A load belongs to cells, not to slots: it stays true when a bin moves.
- Parts add up: `together` of the loads of all slots is the load of the step, in whatever order they come.
- Recent epochs count more: what an epoch weighs halves every `half_life` epochs. If load is suddenly elsewhere, what
  was before is forgotten at once: a mean of before and after is the load of no epoch.

What it costs, for a million hashes and 4,096 cells: `cells_of` takes 1.3 ms, with counts 5 ms; `cells_of_sorted` takes
0.2 ms however many there are. A load of 4,096 cells, none of them empty, is packed into 25 kB in 0.3 ms, one of 256
cells (`coarser`) into 2 kB. `Loads.after` takes 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from millstream.errors import InvariantViolation, UserError
from millstream.protocol.keyspace import Hashes
from millstream.protocol.strategies import Numbers

Floats = npt.NDArray[np.float64]
Bytes = bytes  # in a class that has a member of that name

MAX_BITS = 12
"""Load is measured in at most 2^12 cells."""
HISTORY_BITS = 8
"""The last epochs are remembered one by one in at most 2^8 cells."""
_FORMAT = 1


def cell_bits(bin_bits: int) -> int:
    """In how many cells, as a power of two, the load of a step with 2^bin_bits bins is measured.

    >>> cell_bits(4), cell_bits(20)
    (4, 12)
    """
    return min(bin_bits, MAX_BITS)


def cells_of(hashes: Hashes, bits: int, counts: Numbers | None = None) -> Numbers:
    """How many of the hashes lie in each of the 2^bits cells; with `counts`, each hash counts so often.

    >>> cells_of(np.array([0, 1, 1 << 63], np.uint64), 1)
    array([2, 1])
    """
    if not bits:
        return np.array([len(hashes) if counts is None else counts.sum()], np.int64)
    cells = (hashes >> np.uint64(64 - bits)).view(np.int64)
    if counts is None:
        return np.bincount(cells, minlength=1 << bits).astype(np.int64, copy=False)
    return np.bincount(cells, counts, 1 << bits).astype(np.int64)


def cells_of_sorted(hashes: Hashes, bits: int) -> Numbers:
    """What `cells_of` says of hashes that are in order: it looks for the edges of cells only.

    >>> cells_of_sorted(np.array([0, 1, 1 << 63], np.uint64), 1)
    array([2, 1])
    """
    if not bits:
        return np.array([len(hashes)], np.int64)
    edges = np.arange(1, 1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    return np.diff(np.searchsorted(hashes, edges), prepend=0, append=len(hashes)).astype(np.int64, copy=False)


def shared_out(total: int, by: Numbers) -> Numbers:
    """A whole number in parts that are in proportion, and add up to it.

    >>> shared_out(10, np.array([1, 0, 2]))
    array([3, 0, 7])
    """
    whole = int(by.sum())
    if not whole:
        return np.zeros(len(by), np.int64)
    parts: Numbers = np.diff(np.rint(np.cumsum(by) / whole * total), prepend=0.0).astype(np.int64)
    return parts


# -- one epoch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """What the cells of a step had to do in an epoch. Only cells that had something are there, in order.

    A record is whatever made the computation run: a record of a stream, or a timer. `bytes` are those of state that was
    written, `micros` is CPU time in microseconds.

    >>> part = Load.of(np.array([3, 0, 1, 0]), micros=100)
    >>> part.cells.tolist(), part.records.tolist(), part.micros.tolist()
    ([0, 2], [3, 1], [75, 25])
    """

    bits: int
    cells: Numbers
    records: Numbers
    bytes: Numbers
    micros: Numbers

    @classmethod
    def of(cls, counts: Numbers, bytes: int | Numbers = 0, micros: int | Numbers = 0) -> Load:
        """The load of a slot, from how many records each cell had. A single number is shared out by records."""
        bits = len(counts).bit_length() - 1
        if len(counts) != 1 << bits or bits > MAX_BITS:
            raise UserError(f"{len(counts)} cells: expected a power of two, up to {1 << MAX_BITS}")
        columns = [counts, *(shared_out(x, counts) if isinstance(x, int) else x for x in (bytes, micros))]
        return cls._dense(bits, np.stack(columns).astype(np.int64, copy=False))

    @classmethod
    def _dense(cls, bits: int, columns: Numbers) -> Load:
        cells = np.flatnonzero(columns.any(axis=0))
        return cls(bits, cells, *columns[:, cells])

    @property
    def columns(self) -> Numbers:
        """Records, bytes and CPU time of all cells, as three rows."""
        found = np.zeros((3, 1 << self.bits), np.int64)
        found[:, self.cells] = self.records, self.bytes, self.micros
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Load) and self.bits == other.bits and bool((self.columns == other.columns).all())

    __hash__ = None  # type: ignore[assignment]

    def coarser(self, bits: int) -> Load:
        """The same in fewer cells: nothing is lost but where it was.

        >>> Load.of(np.array([3, 0, 1, 0])).coarser(1).records.tolist()
        [3, 1]
        """
        if bits >= self.bits:
            return self
        return Load._dense(bits, self.columns.reshape(3, 1 << bits, -1).sum(axis=2))

    def pack(self) -> Bytes:
        """As bytes, for a commit.

        >>> len(Load.of(np.array([3, 0, 1, 0]), micros=100).pack())
        13
        """
        begins = np.flatnonzero(np.diff(self.cells, prepend=-2) != 1)
        lengths = np.diff(begins, append=len(self.cells))
        firsts = self.cells[begins]
        gaps = firsts - np.append(0, (firsts + lengths)[:-1]) if len(firsts) else firsts
        head = np.array([_FORMAT, self.bits, len(begins)], np.int64)
        return _varints(np.concatenate([head, gaps, lengths, self.records, self.bytes, self.micros]))

    @classmethod
    def unpack(cls, data: Bytes) -> Load:
        """What was packed.

        >>> Load.unpack(Load.of(np.array([3, 0, 1, 0]), micros=100).pack()).micros.tolist()
        [75, 25]
        """
        numbers = _numbers(data)
        if len(numbers) < 3 or numbers.min() < 0 or numbers[0] != _FORMAT or numbers[1] > MAX_BITS:
            raise InvariantViolation(f"not a packed load: {data[:16].hex()}...")
        bits, runs = int(numbers[1]), int(numbers[2])
        gaps, lengths, rest = numbers[3 : 3 + runs], numbers[3 + runs : 3 + 2 * runs], numbers[3 + 2 * runs :]
        most = max(runs, gaps.max(initial=0), lengths.max(initial=0))
        count = int(lengths.sum()) if most <= 1 << bits else 0
        if most > 1 << bits or len(lengths) != runs or len(rest) != 3 * count or gaps.sum() + count > 1 << bits:
            raise InvariantViolation(f"a packed load of 2^{bits} cells has {runs} runs and {len(rest)} numbers")
        firsts = np.cumsum(gaps) + np.cumsum(lengths) - lengths
        cells = np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths) + np.arange(count)
        return cls(bits, cells, *rest.reshape(3, count))


def together(parts: Sequence[Load]) -> Load:
    """The loads of several slots as one: in as many cells as the coarsest of them has.

    >>> together([Load.of(np.array([1, 0])), Load.of(np.array([2, 5]))]).records.tolist()
    [3, 5]
    """
    bits = min((part.bits for part in parts), default=0)
    total = np.zeros((3, 1 << bits), np.int64)
    for part in parts:
        mine = part.coarser(bits)
        total[:, mine.cells] += np.stack([mine.records, mine.bytes, mine.micros])
    return Load._dense(bits, total)


def evened(load: Load) -> Load:
    """The same with CPU time by records: every record of the step counts alike. What a slot takes beside its records is
    then nobody's: it would stay if they went, and it makes the records of idle slots look expensive.

    >>> evened(Load.of(np.array([3, 1]), micros=np.array([10, 30]))).micros.tolist()
    [30, 10]
    """
    return replace(load, micros=shared_out(int(load.micros.sum()), load.records))


def _varints(numbers: Numbers) -> bytes:
    """Seven bits of a number to a byte, the lowest first; the last byte of each number is below 128."""
    values = numbers.astype(np.uint64)
    sizes = np.ones(len(values), np.int64)
    for place in range(1, 10):
        sizes += values >= np.uint64(1 << 7 * place)
    begins = np.cumsum(sizes) - sizes
    out = np.zeros(int(sizes.sum()), np.uint8)
    for place in range(int(sizes.max(initial=0))):
        some = np.flatnonzero(sizes > place)
        digits = (values[some] >> np.uint64(7 * place)) & np.uint64(127)
        out[begins[some] + place] = digits.astype(np.uint8) | (np.uint8(128) * (sizes[some] > place + 1))
    return out.tobytes()


def _numbers(data: bytes) -> Numbers:
    digits = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(digits < 128)
    if not len(ends) or ends[-1] != len(digits) - 1:
        raise InvariantViolation(f"{len(digits)} bytes do not end with a number")
    begins = np.append(0, ends[:-1] + 1)
    places = np.arange(len(digits)) - np.repeat(begins, ends + 1 - begins)
    if places.max() > 9:
        raise InvariantViolation("a number has more than 64 bits")
    values = (digits & 127).astype(np.uint64) << (places * 7).astype(np.uint64)
    return np.add.reduceat(values, begins).view(np.int64)


# -- many epochs ------------------------------------------------------------------------------------------------------


def _nothing() -> Floats:
    return np.zeros((3, 1))


def _none() -> npt.NDArray[np.float32]:
    return np.zeros((0, 1), np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """How a step's load has been of late: its mean, in which recent epochs count more, and the last epochs one by one.

    A value: `after` makes the next one.

    >>> loads = Loads(half_life=1.0)
    >>> for epoch, count in enumerate([8, 8, 2]):
    ...     loads = loads.after(epoch, Load.of(np.array([count, count])))
    >>> loads.records.round(2).tolist(), loads.history[:, 0].tolist()
    ([4.57, 4.57], [8.0, 8.0, 2.0])
    """

    half_life: float = 2.0
    """After how many epochs an epoch weighs half as much."""
    kept: int = 32
    """How many epochs are remembered one by one."""
    jump: float = 0.2
    """If this share of the records, or more, is suddenly in other cells than before, the mean begins anew."""
    bits: int = 0
    epoch: int = -1
    """The last epoch that is in it; -1 if none is."""
    weight: float = 0.0
    """How many epochs are in the mean, each counted as much as it weighs."""
    sums: Floats = field(default_factory=_nothing)
    history: npt.NDArray[np.float32] = field(default_factory=_none)
    """The CPU time, or if that is not known the records, of the last epochs (rows, the newest last) in at most 2^8
    cells: what tells which ranges are busy at the same time."""

    def __post_init__(self) -> None:
        if not self.half_life > 0 or self.kept < 1:
            raise UserError(f"half_life={self.half_life}, kept={self.kept}: expected numbers of epochs above 0")

    def after(self, epoch: int, load: Load) -> Loads:
        """With the load of one more epoch. If the number of cells has grown, the mean begins anew."""
        new = load.columns.astype(float)
        sums = self.sums
        if load.bits < self.bits:
            sums = sums.reshape(3, 1 << load.bits, -1).sum(axis=2)
        weight = self.weight
        if load.bits > self.bits or not weight or self._jumped(sums[0], new[0]):
            sums, weight = np.zeros_like(new), 0.0
        decay = 0.5 ** (max(1, epoch - self.epoch) / self.half_life)
        return replace(
            self,
            bits=load.bits,
            epoch=epoch,
            weight=weight * decay + 1.0,
            sums=sums * decay + new,
            history=self._remembered(new),
        )

    def _jumped(self, before: Floats, now: Floats) -> bool:
        """Whether records are in other cells than before: more of them than chance brings about."""
        old, new = _coarse(before), _coarse(now)
        if not old.any() or not new.any():
            return False
        shares = old / old.sum()
        moved = 0.5 * float(np.abs(new / new.sum() - shares).sum())
        chance = 0.8 * float(np.sqrt(shares).sum()) / float(np.sqrt(new.sum()))
        return moved > self.jump + chance

    def _remembered(self, new: Floats) -> npt.NDArray[np.float32]:
        row = _coarse(new[2] if new[2].any() else new[0]).astype(np.float32)
        rows, cells = self.history.shape
        old = self.history
        if len(row) < cells:
            old = old.reshape(rows, len(row), -1).sum(axis=2)
        elif len(row) > cells:  # spread evenly
            old = np.repeat(old, len(row) // cells, axis=1) * np.float32(cells / len(row))
        return np.concatenate([old, row[None]])[-self.kept :]

    @property
    def records(self) -> Floats:
        """The mean records of each cell in an epoch."""
        return self._mean(0)

    @property
    def bytes(self) -> Floats:
        """The mean bytes of each cell in an epoch."""
        return self._mean(1)

    @property
    def micros(self) -> Floats:
        """The mean CPU time of each cell in an epoch, in microseconds."""
        return self._mean(2)

    def _mean(self, row: int) -> Floats:
        mean: Floats = self.sums[row] / max(self.weight, 1e-300)
        return mean


def _coarse(row: Floats) -> Floats:
    return row.reshape(1 << HISTORY_BITS, -1).sum(axis=1) if len(row) > 1 << HISTORY_BITS else row


def within(cells: Floats, firsts: Hashes) -> Floats:
    """What consecutive ranges have of a row of cells: they begin at `firsts`, and the last ends the space.

    Within a cell, load goes with width.

    >>> within(np.array([4.0, 0.0]), np.array([0, 1 << 62, 1 << 63], np.uint64)).tolist()
    [2.0, 2.0, 0.0]
    """
    edges = np.append(firsts.astype(float), 2.0**64) * (len(cells) / 2.0**64)
    sums = np.concatenate([[0.0], np.cumsum(cells)])
    return np.diff(np.interp(edges, np.arange(len(cells) + 1), sums))
