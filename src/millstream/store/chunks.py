"""How a segment is cut up, so that any range of it can be read, and checked, without the rest.

Rules
-----
- The object is an Arrow file and behind it its index. The index has a digest for each chunk of `CHUNK` bytes of the
  file, and as many fences: the hashes of rows that are spread evenly over the segment. The manifest has the digest of
  the index: so the index vouches for every chunk, and the manifest for the index.
- Fences say between which rows a range of the key space lies, before any row has been read. The window is a little
  wider than the range, by at most the rows between two fences at either end.
- From the layout of an Arrow batch follows which bytes hold a window of rows. Where they are told by offsets in the
  file, as in strings and lists, the offsets must be there first: bytes are asked for in rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from millstream.protocol.keyspace import Hashes, Range

CHUNK = 32 << 10
"""Part of the format of stores."""

GAP = 4
"""Windows with fewer fences between them are one: their chunks would be the same, or neighbours."""

Span = tuple[int, int]
"""Some bytes of an object: the first, and the one after the last."""


def chunks_of(size: int) -> int:
    """How many chunks a file of this length has."""
    return -(-size // CHUNK)


def file_size(size: int) -> int:
    """How long the Arrow file is in an object of this length; its index is the rest, 16 bytes for each chunk."""
    return size - 16 * -(-size // (CHUNK + 16))


def index_of(file: memoryview, hashes: Hashes) -> bytes:
    """The index of a file of rows with these hashes."""
    count = chunks_of(len(file))
    digests = np.fromiter(
        (xxhash.xxh3_64_intdigest(file[at : at + CHUNK]) for at in range(0, len(file), CHUNK)), "<u8", count
    )
    return digests.tobytes() + hashes[_fence_rows(len(hashes), count)].astype("<u8").tobytes()


def _fence_rows(rows: int, count: int) -> npt.NDArray[np.int64]:
    return np.arange(count) * rows // count


class Window(NamedTuple):
    """Rows from `start` to before `stop`: all those in the ranges, and a few others."""

    start: int
    stop: int
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """What is known of a segment without reading its rows."""

    rows: int
    digests: list[int]
    fences: Hashes

    @classmethod
    def read(cls, data: memoryview, rows: int) -> Index:
        both = np.frombuffer(data, "<u8")
        count = len(both) // 2
        return cls(rows, both[:count].tolist(), both[count:])

    def vouches(self, chunk: int, data: memoryview | bytes) -> bool:
        """Whether these are the bytes of a chunk."""
        return xxhash.xxh3_64_intdigest(data) == self.digests[chunk]

    def windows(self, ranges: Sequence[Range]) -> list[Window]:
        """Where the rows of ranges lie, in order. Ranges without a row have no window."""
        count = len(self.fences)
        found: list[tuple[int, int, tuple[Range, ...]]] = []
        for span in ranges:
            first = max(0, int(np.searchsorted(self.fences, np.uint64(span.first), side="left")) - 1)
            last = int(np.searchsorted(self.fences, np.uint64(span.last), side="right"))
            if last <= first:
                continue
            if found and first - found[-1][1] <= GAP:
                start, stop, others = found[-1]
                found[-1] = (start, max(stop, last), (*others, span))
            else:
                found.append((first, last, (span,)))
        return [Window(a * self.rows // count, b * self.rows // count, spans) for a, b, spans in found]


# -- the bytes of a window of rows ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Node:
    """A column, or what is nested in one: its buffers, and its children."""

    kind: pa.DataType
    buffers: list[pa.Buffer | None]
    children: list[_Node]


class UnknownLayout(Exception):
    """A type of which it is not known where the bytes of some rows are: all of them must be read."""


def spans_of(batch: pa.RecordBatch, base: int, columns: Sequence[str], start: int, stop: int) -> Iterator[list[Span]]:
    """The bytes of some rows of some columns, in rounds: those of a round must be there before the next is asked for.

    The batch lies as a file in memory at address `base`. Spans are relative to it.
    """
    nodes = [_node(column.type, iter(column.buffers())) for column in map(batch.column, columns)]
    return together([_rounds(node, base, start, stop - start) for node in nodes])


def metadata_of(file: memoryview) -> Iterator[list[Span]]:
    """The bytes of an Arrow file of one record batch that are not rows, in rounds."""
    size, tail = len(file), 10  # it ends with the length of the footer, and a mark of six bytes
    yield [(0, 16), (size - tail, size)]
    at, footer = 8, int.from_bytes(file[size - tail : size - 6], "little")
    for _ in range(2):  # two messages, the schema and the batch: four bytes, the length of what follows, and that
        yield [(at, at + 8), (size - tail - footer, size)]
        length = int.from_bytes(file[at + 4 : at + 8], "little")
        yield [(at, at + 8 + length)]
        at += 8 + length


def together(walks: Sequence[Iterator[list[Span]]]) -> Iterator[list[Span]]:
    """The rounds of several, each round together."""
    walks = list(walks)
    while walks:
        rounds = [(walk, next(walk, None)) for walk in walks]
        walks = [walk for walk, spans in rounds if spans is not None]
        if walks:
            yield [span for _, spans in rounds if spans is not None for span in spans]


def _node(kind: pa.DataType, buffers: Iterator[pa.Buffer | None]) -> _Node:
    types = pa.types
    if types.is_null(kind):
        own, inner = 1, []
    elif types.is_struct(kind):
        own, inner = 1, [kind.field(i).type for i in range(kind.num_fields)]
    elif types.is_map(kind):
        own, inner = 2, [pa.struct([kind.key_field, kind.item_field])]
    elif types.is_list(kind) or types.is_large_list(kind):
        own, inner = 2, [kind.value_type]
    elif types.is_fixed_size_list(kind):
        own, inner = 1, [kind.value_type]
    elif offset_type(kind) is not None:
        own, inner = 3, []
    elif (
        types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind) or types.is_boolean(kind)
    ):
        own, inner = 2, []
    else:
        raise UnknownLayout(str(kind))
    mine = [next(buffers) for _ in range(own)]
    return _Node(kind, mine, [_node(each, buffers) for each in inner])


def offset_type(kind: pa.DataType) -> type[np.int32] | type[np.int64] | None:
    """The type of the offsets of a column, if it has any."""
    types = pa.types
    if types.is_string(kind) or types.is_binary(kind) or types.is_list(kind) or types.is_map(kind):
        return np.int32
    if types.is_large_string(kind) or types.is_large_binary(kind) or types.is_large_list(kind):
        return np.int64
    return None


def _rounds(node: _Node, base: int, start: int, length: int) -> Iterator[list[Span]]:
    kind = node.kind
    spans = _bits(node.buffers[0], base, start, length)
    numbers = offset_type(kind)
    if numbers is not None:
        yield spans + _bytes(node.buffers[1], base, start, length + 1, np.dtype(numbers).itemsize)
        first, end = _offsets(node.buffers[1], numbers, start, length)
        if node.children:
            yield from _rounds(node.children[0], base, first, end - first)
        else:
            yield _bytes(node.buffers[2], base, first, end - first, 1)
    elif pa.types.is_struct(kind):
        yield from together([iter([spans]), *(_rounds(child, base, start, length) for child in node.children)])
    elif pa.types.is_fixed_size_list(kind):
        child = _rounds(node.children[0], base, start * kind.list_size, length * kind.list_size)
        yield from together([iter([spans]), child])
    elif pa.types.is_boolean(kind):
        yield spans + _bits(node.buffers[1], base, start, length)
    elif pa.types.is_null(kind):
        yield spans
    else:
        yield spans + _bytes(node.buffers[1], base, start, length, kind.bit_width // 8)


def _bytes(buffer: pa.Buffer | None, base: int, start: int, length: int, width: int) -> list[Span]:
    if buffer is None or not buffer.size or not length:
        return []
    at = buffer.address - base
    return [(at + start * width, at + min((start + length) * width, buffer.size))]


def _bits(buffer: pa.Buffer | None, base: int, start: int, length: int) -> list[Span]:
    if buffer is None or not buffer.size or not length:
        return []
    at = buffer.address - base
    return [(at + start // 8, at + (start + length + 7) // 8)]


def _offsets(buffer: pa.Buffer | None, kind: type[np.int32] | type[np.int64], start: int, length: int) -> Span:
    if buffer is None or not buffer.size or not length:
        return 0, 0
    numbers = np.frombuffer(buffer, kind)
    return int(numbers[start]), int(numbers[start + length])
