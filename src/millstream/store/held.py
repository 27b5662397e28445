"""An object as far as it is here: in a directory of the store, in a worker's cache, in memory; checked chunk by chunk.

Rules
-----
- A chunk is relied on only once this process has found its bytes to have the digest that the index gives. Nobody
  keeps a record of what is here: bytes with that digest are here, others are not, whoever wrote them and wherever that
  process died. So there is no record that could be wrong.
- What is not here is fetched and checked, and only then put in its place. Two processes that fetch the same chunk write
  the same bytes, and nobody sees others.
- Others than the store may be asked first (`Peer`). What they give is checked in the same way, and what they do not
  have, or have wrong, is asked of the next. Bytes of the store that are not those that were written are named
  (`DamagedObject`) and never used.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.errors import DamagedObject
from millstream.protocol.manifest import SegmentRef
from millstream.store import chunks
from millstream.store.chunks import Index, Span, file_size
from millstream.store.journal import digest_of
from millstream.store.objects import ObjectStore

FETCH_TOGETHER = 4 << 20
"""About how much is fetched at a time, so that those who share a limit take turns."""


class Gone(Exception):
    """The place is of no use: its file was evicted, is damaged, or cannot be written. Another must be found."""


class NoRoom(Gone):
    """The cache cannot be used: no space, no permission, a disk that fails."""


class Whole:
    """Bytes that are all there, or should be: in a file, which may be the store's own, or in memory. They are never
    written to; `path` is that of a file that goes if it turns out to be damaged."""

    def __init__(self, buffer: pa.Buffer, path: Path | None = None) -> None:
        self.buffer, self._path = buffer, path

    @classmethod
    def mapped(cls, path: Path, own: bool) -> Whole:
        """A file; `own` says that it is in a cache, and may go."""
        data = pa.memory_map(str(path), "r").read_buffer() if path.stat().st_size else pa.py_buffer(b"")
        return cls(data, path if own else None)

    def read(self, spans: Sequence[Span]) -> Iterator[memoryview | bytes]:
        view = memoryview(self.buffer)
        return (view[start:end] for start, end in spans)

    def give_up(self) -> NoReturn:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        raise Gone(f"{self._path} is damaged")


class PartFile:
    """A sparse file, filled bit by bit, perhaps by several processes."""

    def __init__(self, path: Path, size: int, create: bool = True) -> None:
        self._path = path
        with self._opened(os.O_CREAT if create else 0) as descriptor:
            found = os.fstat(descriptor)
            if found.st_size not in (0, size):
                path.unlink(missing_ok=True)
                raise Gone(f"{path} has {found.st_size} bytes")
            os.ftruncate(descriptor, size)
            os.utime(descriptor)  # it is used
            self._inode = (found.st_dev, found.st_ino)  # it is mapped, so no other file can have its number
            self.buffer = pa.memory_map(f"/dev/fd/{descriptor}", "r").read_buffer()

    @contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        try:
            descriptor = os.open(self._path, os.O_RDWR | flags, 0o600)
        except FileNotFoundError as error:
            raise Gone(f"{self._path} was evicted") from error
        except OSError as error:
            raise NoRoom(str(error)) from error
        try:
            yield descriptor
        except OSError as error:
            raise NoRoom(str(error)) from error
        finally:
            os.close(descriptor)

    @contextmanager
    def _same(self) -> Iterator[int]:
        """The file that is mapped."""
        with self._opened() as descriptor:
            found = os.fstat(descriptor)
            if (found.st_dev, found.st_ino) != self._inode or found.st_size != self.buffer.size:
                raise Gone(f"{self._path} is another file now")
            yield descriptor

    def read(self, spans: Sequence[Span]) -> Iterator[memoryview | bytes]:
        """Not through the mapping: looking at what is not there would take memory, on some file systems for good."""
        with self._same() as descriptor:
            for start, end in spans:
                yield os.pread(descriptor, end - start, start)

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        with self._same() as descriptor:
            for start, data in pieces:
                while data:
                    written = os.pwrite(descriptor, data, start)
                    start, data = start + written, data[written:]


class InMemory:
    """Memory that nobody shares: what is not written to takes no space."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self.buffer = pa.py_buffer(self._memory)

    def read(self, spans: Sequence[Span]) -> Iterator[memoryview | bytes]:
        view = memoryview(self._memory)
        return (view[start:end] for start, end in spans)

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        for start, data in pieces:
            self._memory[start : start + len(data)] = data


Place = Whole | PartFile | InMemory
"""Where the bytes of an object are, or are to be. `read` gives the bytes as they are here, anything where they are not;
`write` puts bytes where they belong. Both may raise `Gone`."""


@dataclass(slots=True)
class Traffic:
    """What reading has cost a process so far."""

    fetched: int = 0
    """Bytes fetched from the store."""
    given: int = 0
    """Bytes that peers gave."""
    chunks: int = 0
    """How many chunks those were."""
    found: int = 0
    """Bytes that were here when they were first needed."""
    ahead: int = 0
    """Bytes that were checked before anybody needed them."""
    fetch_s: float = 0.0
    """How long fetching took, with waiting."""
    waited_s: float = 0.0
    """How much of that was waiting for the limit."""
    give_s: float = 0.0
    """How long peers took to give what they gave."""
    open_s: float = 0.0
    """How long it took to open what had not been read before: fetching, checking and mapping it."""

    def since(self, before: Traffic) -> Traffic:
        return Traffic(
            self.fetched - before.fetched,
            self.given - before.given,
            self.chunks - before.chunks,
            self.found - before.found,
            self.ahead - before.ahead,
            self.fetch_s - before.fetch_s,
            self.waited_s - before.waited_s,
            self.give_s - before.give_s,
            self.open_s - before.open_s,
        )


class Pace(Protocol):
    """What fetches are held back by."""

    def reserve(self, count: int) -> float:
        """The time at which so many bytes have come over."""
        ...

    def wait(self, until: float) -> float:
        """Waits for that time; how many seconds it took."""
        ...


class Peer(Protocol):
    """Somebody who may have bytes of the store's objects: another worker."""

    def give(self, name: str, spans: Sequence[Span]) -> Sequence[tuple[int, memoryview]] | None:
        """What it has of some bytes of an object, each part with where it begins; None if it has nothing of the object,
        or does not answer."""
        ...


def is_right(ref: SegmentRef, data: memoryview) -> bool:
    """Whether these are all the bytes of a segment's object."""
    size = file_size(ref.bytes)
    if len(data) != ref.bytes or digest_of(data[size:]) != ref.digest:
        return False
    index, step = Index.read(data[size:], ref.rows), chunks.CHUNK
    return all(index.vouches(at // step, data[at : min(at + step, size)]) for at in range(0, size, step))


class Fetcher:
    """Brings bytes from the store, at a certain pace, and counts them. It knows of peers who may have them, too."""

    def __init__(self, store: ObjectStore, pace: Pace | None, traffic: Traffic, peers: Sequence[Peer] = ()) -> None:
        self._store, self._pace, self.traffic, self.peers = store, pace, traffic, peers

    def fetch(self, name: str, spans: Sequence[Span]) -> Sequence[memoryview]:
        began = time.perf_counter()
        total = sum(end - start for start, end in spans)
        until = self._pace.reserve(total) if self._pace is not None else 0.0
        found = self._store.get_ranges(name, spans)
        if found is None:
            raise DamagedObject(name, "nothing", f"at least {max(end for _, end in spans)} bytes")
        for data, (start, end) in zip(found, spans, strict=True):
            if len(data) != end - start:
                raise DamagedObject(name, f"{len(data)} bytes from byte {start}", f"{end - start} bytes")
        if self._pace is not None:
            self.traffic.waited_s += self._pace.wait(until)
        self.traffic.fetched += total
        self.traffic.fetch_s += time.perf_counter() - began
        return found


class Nobody(Fetcher):
    """Stands in for a fetcher where nothing is to be fetched."""

    def fetch(self, name: str, spans: Sequence[Span]) -> Sequence[memoryview]:
        raise Gone(f"{name} is not here")


class Held:
    """A segment's object in a place, with what of it has been found to be right.

    Without a fetcher the place is the store itself, and must be right.
    """

    def __init__(self, ref: SegmentRef, place: Place, fetcher: Fetcher | None, traffic: Traffic) -> None:
        self.ref, self._place, self.fetcher, self._traffic = ref, place, fetcher, traffic
        self.size = file_size(ref.bytes)
        if place.buffer.size != ref.bytes:
            self._refuse(f"{place.buffer.size} bytes", f"{ref.bytes} bytes")
        self.file: pa.Buffer = place.buffer.slice(0, self.size)
        self.index = Index.read(memoryview(self._index()), ref.rows)
        self._sound: npt.NDArray[np.bool_] = np.zeros(len(self.index.digests), np.bool_)

    @property
    def complete(self) -> bool:
        """Whether all of it should be here without fetching."""
        return isinstance(self._place, Whole)

    def _index(self) -> memoryview | bytes:
        span = (self.size, self.ref.bytes)
        [data] = self._place.read([span])
        if digest_of(data) == self.ref.digest:
            return bytes(data)
        fetcher = self._refuse(f"an index with digest {digest_of(data)}", f"digest {self.ref.digest}")
        for peer in fetcher.peers:
            for start, data in peer.give(self.ref.name, [span]) or ():
                if start == span[0] and digest_of(data) == self.ref.digest:
                    self._traffic.given += len(data)
                    self._put([(span[0], memoryview(data))])
                    return bytes(data)
        [data] = fetcher.fetch(self.ref.name, [span])
        if digest_of(data) != self.ref.digest:
            raise DamagedObject(self.ref.name, f"an index with digest {digest_of(data)}", f"digest {self.ref.digest}")
        self._put([(span[0], memoryview(data))])
        return data

    def _refuse(self, found: str, expected: str) -> Fetcher:
        """What is here is not right: whoever can bring what is, if there is anybody."""
        if self.fetcher is None:
            raise DamagedObject(self.ref.name, found, expected)
        if isinstance(self._place, Whole):
            self._place.give_up()
        return self.fetcher

    def need(self, spans: Sequence[Span]) -> None:
        """Sees to it that these bytes are here, and right."""
        unknown: list[int] = self.unknown(spans).tolist()
        if not unknown:
            return
        here = zip(unknown, self._place.read([self._span(chunk) for chunk in unknown]), strict=True)
        missing = [chunk for chunk, data in here if not self.index.vouches(chunk, data)]
        if missing:
            start, end = self._span(missing[0])
            fetcher = self._refuse(f"other bytes from {start} to {end}", "those that were written")
            self._fetch(fetcher, missing)
        spans = [self._span(chunk) for chunk in set(unknown) - set(missing)]
        self._traffic.found += sum(end - start for start, end in spans)
        self._sound[unknown] = True

    def unknown(self, spans: Sequence[Span]) -> npt.NDArray[np.int64]:
        """The chunks of these bytes that have not been checked, in order."""
        wanted = np.zeros(len(self._sound), np.bool_)
        for start, end in spans:
            wanted[start // chunks.CHUNK : -(-end // chunks.CHUNK)] = True
        return np.flatnonzero(wanted & ~self._sound)

    def are_here(self, numbers: npt.NDArray[np.int64]) -> bool:
        """Whether some chunks are here, and right. Nothing is fetched, and nothing is given up if they are not."""
        runs = _runs(numbers[~self._sound[numbers]].tolist())
        spans = [(self._span(first)[0], self._span(last)[1]) for first, last in runs]
        for (first, last), (start, _), data in zip(runs, spans, self._place.read(spans), strict=True):
            view = memoryview(data)
            for chunk in range(first, last + 1):
                begin, end = self._span(chunk)
                if not self.index.vouches(chunk, view[begin - start : end - start]):
                    return False
                self._sound[chunk] = True
                self._traffic.found += end - begin
        return True

    def _put(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        assert not isinstance(self._place, Whole), "refused before anything was fetched"
        self._place.write(pieces)

    def _span(self, chunk: int) -> Span:
        return chunk * chunks.CHUNK, min((chunk + 1) * chunks.CHUNK, self.size)

    def _fetch(self, fetcher: Fetcher, missing: list[int]) -> None:
        for peer in fetcher.peers:
            missing = self._given(peer, missing)
        step = max(1, FETCH_TOGETHER // chunks.CHUNK)
        for at in range(0, len(missing), step):
            runs = _runs(missing[at : at + step])
            spans = [(self._span(first)[0], self._span(last)[1]) for first, last in runs]
            pieces = []
            for (first, last), (start, _), data in zip(runs, spans, fetcher.fetch(self.ref.name, spans), strict=True):
                for chunk in range(first, last + 1):
                    begin, end = self._span(chunk)
                    if not self.index.vouches(chunk, data[begin - start : end - start]):
                        raise DamagedObject(
                            self.ref.name, f"other bytes from {begin} to {end}", "those that were written"
                        )
                pieces.append((start, data))
            self._put(pieces)
            self._traffic.chunks += len(missing[at : at + step])

    def _given(self, peer: Peer, missing: list[int]) -> list[int]:
        """Takes what a peer has of these chunks; those that it has not, or not right."""
        step = max(1, FETCH_TOGETHER // chunks.CHUNK)
        left: list[int] = []
        for at in range(0, len(missing), step):
            runs = _runs(missing[at : at + step])
            spans = [(self._span(first)[0], self._span(last)[1]) for first, last in runs]
            began = time.perf_counter()
            found = peer.give(self.ref.name, spans)
            if found is None:
                return left + missing[at:]
            wanted = dict.fromkeys(missing[at : at + step], True)
            pieces: list[tuple[int, memoryview]] = []
            for start, data in found:
                for chunk in range(-(-start // chunks.CHUNK), -(-(start + len(data)) // chunks.CHUNK)):
                    if not wanted.get(chunk):
                        continue
                    begin, end = self._span(chunk)
                    part = data[begin - start : end - start]
                    if self.index.vouches(chunk, part):
                        pieces.append((begin, part))
                        wanted[chunk] = False
            left += [chunk for chunk, lacking in wanted.items() if lacking]
            self._put(pieces)
            self._traffic.given += sum(len(part) for _, part in pieces)
            self._traffic.give_s += time.perf_counter() - began
            self._traffic.chunks += len(pieces)
        return left


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers in order, as runs without a gap: the first and the last of each."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs
