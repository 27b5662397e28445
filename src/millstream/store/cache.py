"""The cache of a worker: a directory with its slots' segments, whole or in part, shared by its Python processes.

Rules
-----
- It decides what a read costs, never what it gives: every process checks what it finds here (see `held`), and whatever
  is missing, damaged or gone is fetched from the store. Any file may vanish at any time; what is mapped stays readable.
- What a slot of this worker writes is here at once: as a link where the store is a directory of the same file system,
  which takes no space, else as a copy. So only state that has moved is ever fetched.
- Every slot that runs here leaves a note of the segments it needs. Files that nobody needs are removed, so that what
  was deleted in the store gives its space back; the notes of slots that have not been seen for a while count no more.
- It takes up to `limit` bytes, and a sixteenth more for each process; links to what the store has do not count. What
  nobody needs goes first, then what is held for others only, then what nobody here reads, then what was opened and
  filled the longest time ago.
- A directory that cannot be written to costs memory, and never a result.
- A directory belongs to a process, the worker's. When that one has ended, its agent removes it, or whoever waits in the
  place of an agent that has ended before; if there is none, the next process does that opens a cache beside it.

A directory has `<object>` (whole) or `<object>.part` (sparse) for each segment, `slots/<number>` with the notes, and
`pace` and `pace-peers`, the times at which the next fetch may begin, from the store and from others.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import logging
import os
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from millstream.store import names
from millstream.store.held import Gone, InMemory, NoRoom, PartFile, Place, Whole
from millstream.store.objects import Data, ObjectStore

DEFAULT_CACHE_BYTES = 16 << 30

_PART = ".part"
_NO_OBJECTS = ("pace", "pace-peers")
_NEW_S = 60.0
"""Files younger than this stay, needed or not: the note may be yet to come."""
_NOTE_S = 600.0
"""Notes older than this do not count."""
_EMPTY_S = 3600.0
"""Nobody who makes a directory for a store takes that long to make one in it."""
_NOTE_EVERY_S = 5.0
"""How often a slot notes what it needs, and what nobody needs is looked for. Much less than the time that files stay in
any case: a file that is needed is in a note by then."""
_MEASURED_S = 1.0
"""For so long it is known how much room there is, but for what other processes of the worker have brought since."""
_PLENTY_S = 10.0
"""The same where there is plenty."""

_LOG = logging.getLogger("millstream")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """How workers keep what they read: in which directory, how many bytes at most, and how many bytes a second they may
    fetch from the store; None is no limit, or for the directory, the first of Spark's own."""

    directory: str | None = None
    limit: int = DEFAULT_CACHE_BYTES
    fetch_limit: float | None = None


class Limiter:
    """Holds the fetches of all processes that share a file down to a rate, as if they shared a wire.

    >>> import tempfile, pathlib
    >>> now = 100.0
    >>> limiter = Limiter(pathlib.Path(tempfile.mkdtemp()) / "pace", rate=1000, clock=lambda: now, sleep=lambda s: None)
    >>> limiter.reserve(500), limiter.reserve(1000)
    (100.5, 101.5)
    """

    def __init__(
        self,
        path: Path,
        rate: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path, self._rate, self._clock, self._sleep = path, rate, clock, sleep
        self._free = 0.0  # if the file cannot be used, this process keeps to the rate by itself

    def reserve(self, count: int, took_s: float = 0.0) -> float:
        """The time at which so many bytes have come over, after all that were asked for before. If they have come
        already, that began `took_s` ago."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            self._free = self._after(self._free, count, took_s)
            return self._free
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            data = os.pread(descriptor, 8, 0)
            end = self._after(struct.unpack("<d", data)[0] if len(data) == 8 else self._free, count, took_s)
            self._free = end
            with contextlib.suppress(OSError):
                os.pwrite(descriptor, struct.pack("<d", end), 0)
            return end
        finally:
            os.close(descriptor)

    def _after(self, free: float, count: int, took_s: float) -> float:
        return max(free, self._clock() - took_s) + count / self._rate

    def wait(self, until: float) -> float:
        """Waits for a time; how many seconds it took."""
        left = until - self._clock()
        if left > 0:
            self._sleep(left)
        return max(0.0, left)


class WorkerCache:
    """The cache directory of one worker, as one of its processes sees it."""

    def __init__(self, directory: Path, limit: int = DEFAULT_CACHE_BYTES, fetch_limit: float | None = None) -> None:
        self.directory, self._limit = directory, limit
        self.pace = Limiter(directory / "pace", fetch_limit) if fetch_limit else None
        self._noted: dict[int | str, float] = {}
        self._swept = time.monotonic()
        self._unmeasured = limit  # what was written since the size was last measured; at first nobody knows
        self._room, self._measured = 0, -_PLENTY_S
        self._warned = False
        self._make()

    def _make(self) -> None:
        with self._trying():
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.directory / "slots").mkdir(exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        """Goes on without the directory where it cannot be used, and says so once."""
        try:
            yield
        except OSError as error:
            self.warn(error)

    def warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _LOG.warning("the cache in %s cannot be written (%s): what is read takes memory", self.directory, error)

    def _path(self, name: str) -> Path:
        return self.directory / names.base(name)

    def place_of(self, name: str, size: int) -> Place:
        """Where an object is. Raises `Gone` if there is nothing of it, or if it is of no use."""
        path = self._path(name)
        return self._found(path) or PartFile(path.with_name(path.name + _PART), size, create=False)

    def place(self, name: str, size: int) -> Place:
        """Where an object is, or is to be."""
        path = self._path(name)
        part = path.with_name(path.name + _PART)
        for _ in range(2):
            try:
                return self._found(path) or PartFile(part, size)
            except (NoRoom, OSError) as error:
                self.warn(error)
                break
            except Gone:  # a file of another length, or no directory: both can be mended
                self._make()
        return InMemory(size)

    @staticmethod
    def _found(path: Path) -> Whole | None:
        try:
            return Whole.mapped(path, own=True)
        except FileNotFoundError:
            return None

    def keep(self, store: ObjectStore, name: str, data: Data) -> int:
        """Puts what was just written to the store here, too; how many bytes that takes."""
        path, origin = self._path(name), store.path(name)
        if origin is not None:
            with contextlib.suppress(OSError):
                os.link(origin, path)
                return 0
        with self._trying():
            staged = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
            try:
                staged.write_bytes(data)
                staged.rename(path)
                return len(data)
            except OSError:
                staged.unlink(missing_ok=True)
                raise
        return 0

    def drop(self, name: str) -> None:
        """Removes an object, if there is anything of it here."""
        with self._trying():
            for path in (self._path(name), self._path(name).with_name(names.base(name) + _PART)):
                path.unlink(missing_ok=True)

    def note(self, slot: int | str, needs: Collection[str]) -> None:
        """Notes what a slot needs now, or what is held for another reason, which has a name; and removes what nobody
        needs. Both from time to time only."""
        now = time.monotonic()
        if now - self._noted.get(slot, -_NOTE_EVERY_S) < _NOTE_EVERY_S:
            return
        self._noted[slot] = now
        with self._trying():
            path = self.directory / "slots" / str(slot)
            staged = path.with_name(f"{slot}.{os.getpid()}.{threading.get_ident()}")
            staged.write_bytes(msgspec.msgpack.encode([names.base(name) for name in needs]))
            staged.rename(path)
            if now - self._swept >= _NOTE_EVERY_S:
                self._swept = now
                self.sweep()

    def sweep(self) -> None:
        """Removes what no slot needs."""
        needed, now = {*self._needed(own=True), *self._needed(own=False)}, time.time()
        for path, name, found in self._files():
            if name not in needed and now - found.st_mtime > _NEW_S:
                Path(path).unlink(missing_ok=True)

    def _needed(self, own: bool) -> set[str]:
        """What this worker's slots need; or else, what is held for other reasons."""
        needed: set[str] = set()
        now = time.time()
        for path in (self.directory / "slots").iterdir():
            if path.name.isdigit() is not own:
                continue
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                if now - path.stat().st_mtime > _NOTE_S:
                    path.unlink(missing_ok=True)
                else:
                    needed.update(msgspec.msgpack.decode(path.read_bytes(), type=list[str]))
        return needed

    def _files(self) -> list[tuple[str, str, os.stat_result]]:
        found = []
        for entry in os.scandir(self.directory):
            if entry.name not in _NO_OBJECTS and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.path, entry.name.removesuffix(_PART), entry.stat()))
        return found

    def read(self, name: str, spans: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]] | None:
        """What is here of some bytes of an object, each part with where it begins. The reader has to check it. None if
        nothing of the object is here."""
        if not self.knows(name):
            return None
        base = names.base(name)
        for path in (self.directory / base, self.directory / (base + _PART)):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except OSError:
                continue
            try:
                parts = [part for span in spans for part in _written(descriptor, *span)]
                return [(start, os.pread(descriptor, end - start, start)) for start, end in parts]
            except OSError:
                return None
            finally:
                os.close(descriptor)
        return None

    @staticmethod
    def knows(name: str) -> bool:
        """Whether this is the name of an object that may be here, and of no other file."""
        base = names.base(name)
        return names.maker_of(base) is not None and base == Path(base).name

    def objects(self) -> set[str]:
        """The objects of which there is something here, by the last part of their names."""
        with self._trying():
            return {entry.name.removesuffix(_PART) for entry in os.scandir(self.directory)}
        return set()

    def has(self, name: str) -> bool:
        """Whether there is something of an object here."""
        path = self._path(name)
        return path.exists() or path.with_name(path.name + _PART).exists()

    def has_room(self, count: int) -> bool:
        """Whether there is room for so many bytes without removing anything. All files are looked at for a no, and now
        and then; for each of thousands of segments, that would take longer than bringing them."""
        now = time.monotonic()
        known_for = _MEASURED_S if self._room < self._limit // 4 else _PLENTY_S
        if now - self._measured > known_for or self._room < count:
            self._room, self._measured = self._limit, now
            with self._trying():
                self._room -= sum(stat.st_blocks * 512 for _, _, stat in self._files() if stat.st_nlink == 1)
        return self._room >= count

    def fetched(self, count: int, name: str, mapped: Collection[str]) -> list[str]:
        """Takes note that so much of an object was brought or copied here. Makes room if there is too much by now: the
        names of what had to go. `mapped` are the objects that this process reads from: they go last."""
        self._unmeasured += count
        self._room -= count
        if self._unmeasured <= self._limit // 16:
            return []
        self._unmeasured = 0
        gone: list[str] = []
        with self._trying():
            files = [(path, known, stat) for path, known, stat in self._files() if stat.st_nlink == 1]
            size = sum(stat.st_blocks * 512 for _, _, stat in files)
            if size <= self._limit:
                return []
            own, others = self._needed(own=True), self._needed(own=False)
            reading, current = {names.base(other) for other in mapped}, names.base(name)
            files.sort(key=lambda f: ((f[1] in own) * 2 or f[1] in others, f[1] in reading, f[2].st_mtime))
            for path, known, stat in files:
                if size <= self._limit:
                    break
                if known != current:
                    Path(path).unlink(missing_ok=True)
                    gone.append(known)
                    size -= stat.st_blocks * 512
        return gone


def _written(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of a span of a sparse file that have been written, as far as the file system knows."""
    while start < end:
        try:
            start = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # it is not known; ENXIO says that nothing is there from here on
                yield start, end
            return
        if start >= end:
            return
        hole = min(end, os.lseek(descriptor, start, os.SEEK_HOLE))
        yield start, hole
        start = hole


# -- where caches are ----------------------------------------------------------------------------------------


def open_cache(settings: CacheSettings, store_id: str, owner: int | None = None) -> WorkerCache:
    """The cache of a worker, which is the process `owner`; that of Spark's executor, if it is not said.

    Spark tells its Python processes the executor's own directories in `SPARK_LOCAL_DIRS`, and removes them with it.
    """
    base = settings.directory or os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0] or tempfile.gettempdir()
    root = Path(base) / "millstream-cache" / store_id
    owner = executor() if owner is None else owner
    directory = root / identity(owner)
    _remove_orphans(root.parent)
    if owner == os.getpid():
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return WorkerCache(directory, settings.limit, settings.fetch_limit)


def executor() -> int:
    """The process that this Python process works for: Spark's Java process, whose daemon has forked it."""
    parent = os.getppid()
    if _proc(parent, "cmdline").rstrip(b"\0").endswith(b"\0pyspark.worker"):  # what a daemon is told to fork
        fields = _proc(parent, "stat").rsplit(b")", 1)[-1].split()
        return int(fields[1]) if len(fields) > 1 else parent
    return parent


@lru_cache(maxsize=8)
def executor_id(process: int) -> str:
    """The id of the executor whose Java process this is, which stands in its command line; empty if it is none."""
    words = _proc(process, "cmdline").split(b"\0")
    at = words.index(b"--executor-id") + 1 if b"--executor-id" in words else len(words)
    return os.fsdecode(words[at]) if at < len(words) else ""


def identity(process: int) -> str:
    """A name that no other process has had on this host: its number, and when it started."""
    fields = _proc(process, "stat").rsplit(b")", 1)[-1].split()
    started = fields[19].decode() if len(fields) > 19 else "0"
    return f"{socket.gethostname()}+{process}+{started}"


def _proc(process: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{what}").read_bytes()
    except OSError:
        return b""


def _remove_orphans(caches: Path) -> None:
    """Removes the caches of processes of this host that are gone, whichever store they were of."""
    with contextlib.suppress(OSError):
        for root in caches.iterdir():
            for directory in root.iterdir():
                host, _, process = directory.name.rpartition("+")[0].rpartition("+")
                if host != socket.gethostname() or not process.isdigit():
                    continue
                if not _alive(int(process)) or identity(int(process)) != directory.name:
                    shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # it has others
                if time.time() - root.stat().st_mtime > _EMPTY_S:
                    root.rmdir()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
