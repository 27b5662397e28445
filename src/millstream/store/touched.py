"""Which chunks of a segment a lookup touches, so that these alone have to be checked before it is relied on.

Rules
-----
- Fences are known before any row is (see `chunks`). Between two of them lie all rows of a hash: so a search that is
  bounded by them reads no row elsewhere, and what it finds is right if the chunks of these rows are.
- All is done for many hashes at once, in whole columns. The cost is that of the hashes, whatever the segment holds.
- Where the bytes of rows are told by offsets in the file, the offsets must be right first: chunks come in rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.protocol.keyspace import Hashes
from millstream.store import chunks
from millstream.store.chunks import Index, UnknownLayout, offset_type
from millstream.store.keys import Rows

Chunks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Flat:
    """Bytes of a column that lie row by row: where they begin in the file, how many bits a row has, and how many there
    are: of offsets there is one more than there are rows."""

    at: int
    bits: int
    count: int

    def spans(self, starts: Rows, stops: Rows) -> tuple[Rows, Rows]:
        stops = np.minimum(stops + 1, self.count)
        return self.at + starts * self.bits // 8, self.at + (stops * self.bits + 7) // 8


@dataclass(frozen=True, slots=True)
class _Told:
    """Bytes of a column that are told by offsets."""

    at: int
    offsets: npt.NDArray[np.integer]

    def spans(self, starts: Rows, stops: Rows) -> tuple[Rows, Rows]:
        return self.at + self.offsets[starts].astype(np.int64), self.at + self.offsets[stops].astype(np.int64)


class Touched:
    """The rows of a segment between fences, and their chunks. `base` is where its file lies in memory.

    Raises `UnknownLayout` where the bytes of some rows cannot be told.
    """

    def __init__(self, index: Index, batch: pa.RecordBatch, base: int, columns: Sequence[str]) -> None:
        self._index = index
        self._flat: list[_Flat] = []
        self._told: list[_Told] = []
        for name in columns:
            column = batch.column(name)
            self._walk(column.type, iter(column.buffers()), base)

    def _walk(self, kind: pa.DataType, buffers: Iterator[pa.Buffer | None], base: int) -> None:
        self._add(next(buffers), base, 1)
        offsets = offset_type(kind)
        if pa.types.is_struct(kind):
            for i in range(kind.num_fields):
                self._walk(kind.field(i).type, buffers, base)
        elif offsets is not None and not pa.types.is_nested(kind):
            numbers, data = next(buffers), next(buffers)
            if numbers is not None and numbers.size:
                self._add(numbers, base, 8 * np.dtype(offsets).itemsize, self._index.rows + 1)
                if data is not None and data.size:
                    self._told.append(_Told(data.address - base, np.frombuffer(numbers, offsets)))
        elif pa.types.is_nested(kind) or pa.types.is_null(kind) or pa.types.is_dictionary(kind):
            raise UnknownLayout(str(kind))
        else:
            try:
                width = kind.bit_width
            except ValueError as error:
                raise UnknownLayout(str(kind)) from error
            self._add(next(buffers), base, width)

    def _add(self, buffer: pa.Buffer | None, base: int, bits: int, count: int | None = None) -> None:
        if buffer is not None and buffer.size:
            self._flat.append(_Flat(buffer.address - base, bits, self._index.rows if count is None else count))

    def rows(self, wanted: Hashes) -> tuple[Rows, Rows]:
        """For each hash, between which rows all rows that have it lie. The row after the last has another one, and is
        looked at too."""
        fences, count = self._index.fences, len(self._index.fences)
        first = np.maximum(np.searchsorted(fences, wanted, side="left") - 1, 0)
        last = np.searchsorted(fences, wanted, side="right")
        return first * self._index.rows // count, last * self._index.rows // count

    def chunks(self, wanted: Hashes) -> Iterator[Chunks]:
        """The chunks with the rows that looking for hashes, in order, may read; in rounds."""
        starts, stops = self.rows(wanted)
        fresh = np.ones(len(starts), np.bool_)
        fresh[1:] = (starts[1:] != starts[:-1]) | (stops[1:] != stops[:-1])
        starts, stops = starts[fresh], stops[fresh]
        for parts in (self._flat, self._told):
            found = [_between(*part.spans(starts, stops)) for part in parts]
            if found:
                yield np.unique(np.concatenate(found))

    def find(self, hashes: Hashes, wanted: Hashes, side: str) -> Rows:
        """As `np.searchsorted`, but nothing is read except between the fences."""
        low, high = self.rows(wanted)
        while True:
            open_ = np.flatnonzero(low < high)
            if not len(open_):
                return low
            middle = (low[open_] + high[open_]) // 2
            found = hashes[middle]
            before = found <= wanted[open_] if side == "right" else found < wanted[open_]
            low[open_[before]] = middle[before] + 1
            high[open_[~before]] = middle[~before]


def _between(starts: Rows, stops: Rows) -> Chunks:
    """The chunks of spans of bytes."""
    some = stops > starts
    first, last = starts[some] // chunks.CHUNK, (stops[some] - 1) // chunks.CHUNK
    counts = last - first + 1
    return np.asarray(np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts), np.int64)
