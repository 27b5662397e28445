"""The agent of a worker: a small process beside Spark's, which gives other workers what this one has, and keeps the
replicas that this one should hold (see `replica`). Workers talk to each other here, by Arrow Flight, and nowhere else.

Rules
-----
- There is one per worker and query. It is started by a Spark task, on the address that Spark has for the executor, and
  ends with the executor, with the query, or when no driver has spoken to it for `LEASE_S`. If the executor has ended,
  nothing of it or its cache stays. If it goes on, and its cache is in a directory of the user's, which Spark does not
  clean up, a process of a few megabytes, one for all queries, waits for the end of the executor, and removes the cache.
- Every call carries the token of the query's driver, and the query: whoever has not both is refused. The token never
  stands in a command line or a file.
- Flow is controlled by whoever receives: nothing is sent that was not asked for, and nobody asks for more than
  `held.FETCH_TOGETHER` bytes before what came is on its disk. A slow disk slows down its own replicas, and fills
  nobody's memory.
- Nobody sends what was not asked for, but for one case: in the last epoch before a range changes hands, the origin's
  task sends what it writes to the target's agent (`take`), a segment at a time, and does not wait for long.
- Whoever is given something checks it. An agent that is wrong, or another server at its address, costs time.
- It runs at a lower priority than Spark's tasks. Compactions run here, so that no epoch's task waits behind one. It
  stays in the executor's session, with a process group of its own, which signals meant for Spark's processes do not
  reach: Linux shares out cores among sessions first (autogroups), so that in another one priority would not count.
"""

from __future__ import annotations

import contextlib
import hmac
import operator
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from millstream.errors import StoreUnavailable
from millstream.protocol.compaction import Job
from millstream.protocol.manifest import Edit, SegmentRef
from millstream.protocol.replication import Order, Progress
from millstream.store.cache import CacheSettings, Limiter, WorkerCache, identity, open_cache
from millstream.store.chunks import Span
from millstream.store.held import FETCH_TOGETHER
from millstream.store.journal import check_format
from millstream.store.merge import give_memory_back, merge
from millstream.store.names import Maker
from millstream.store.objects import ObjectStore, open_store
from millstream.store.replica import Keeper
from millstream.store.segments import SegmentCache

LEASE_S = 60.0
NICE = 5
START_S = 30.0
"""How long an agent may take to begin."""
LAST_S = 2.0
"""How long those that an agent is just answering may keep it from ending."""
CALL_S = 5.0
"""How long a peer may take to answer, in seconds, without what the bytes take by themselves."""
REACH_S = 5.0
"""How long it may take if it is only to be found out whether it answers at all."""
SLOWEST = 1 << 20
"""The bytes in a second that a peer gives at least; one that is slower does not answer."""
TAKE_S = 2.0
"""How long it may take to send an agent something: an epoch waits for it."""
AT_ONCE = 128 << 20
"""How many bytes an agent takes at a time from those that send it something."""
MOST = 64 << 20
"""The most bytes that one call may ask for, or send."""

T = TypeVar("T")

_SCHEMA = pa.schema([("ask", pa.int64()), ("at", pa.int64()), ("data", pa.large_binary())])
"""Parts of objects: which of what was asked for each belongs to, where it begins, and its bytes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What an agent is started with."""

    host: str
    token: str
    query: str
    """The id of the store."""
    uri: str
    options: dict[str, str] = field(default_factory=dict)
    cache: CacheSettings = field(default_factory=CacheSettings)
    owner: int = 0
    """The process of the worker: Spark's executor."""
    limit: float | None = None
    """How many bytes a second it may take from peers."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a peer asks for: bytes of an object, or if it is to be `whole`, all of them or nothing."""

    name: str
    spans: list[Span]
    whole: bool = False


# -- who may call ---------------------------------------------------------------------------------------------------


def credentials(token: str, query: str) -> list[tuple[bytes, bytes]]:
    """The headers of a call."""
    return [(b"x-millstream-token", token.encode()), (b"x-millstream-query", query.encode())]


class _Guard(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses whoever has not the token of this query."""

    def __init__(self, token: str, query: str) -> None:
        self._expected = dict(credentials(token, query))

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        for name, expected in self._expected.items():
            given = headers.get(name.decode(), [""])[0]
            data = given if isinstance(given, bytes) else str(given).encode()
            if not hmac.compare_digest(data, expected):
                raise flight.FlightUnauthenticatedError(f"{name.decode()} is not that of this agent")


# -- giving ---------------------------------------------------------------------------------------------------------


class AgentServer(flight.FlightServerBase):  # type: ignore[misc]
    """Answers peers and the driver."""

    def __init__(self, settings: Settings, store: ObjectStore, worker: WorkerCache) -> None:
        super().__init__(f"grpc://{settings.host}:0", middleware={"guard": _Guard(settings.token, settings.query)})
        pace = Limiter(worker.directory / "pace-peers", settings.limit) if settings.limit else None
        self.keeper = Keeper(store, worker, lambda address: FlightPeer(address, settings.token, settings.query, pace))
        self.address = f"{settings.host}:{self.port}"
        self.heard = time.monotonic()
        self.sent = 0
        self._store, self._worker = store, worker
        self._token, self._query = settings.token, settings.query
        self._merging = threading.Lock()
        self._counting, self._taken = threading.Lock(), 0
        self._told = threading.Event()
        self._ending = threading.Event()

    def do_get(self, context: Any, ticket: Any) -> Any:
        asks = msgspec.msgpack.decode(ticket.ticket, type=list[Ask])
        found = [self._worker.read(ask.name, ask.spans) for ask in asks] if _modest(asks) else [None]
        if all(parts is None for parts in found):
            raise flight.FlightServerError(f"nothing is here of {asks[0].name!r}" if asks else "nothing is asked for")
        answers = [
            some or () if not ask.whole or len(some or ()) == 1 else () for ask, some in zip(asks, found, strict=True)
        ]
        parts = [(number, *part) for number, some in enumerate(answers) for part in some]
        self.sent += sum(len(data) for _, _, data in parts)
        return flight.GeneratorStream(_SCHEMA, _batches(parts))

    @contextlib.contextmanager
    def _taking(self, size: int) -> Iterator[None]:
        """Refuses what is sent here while there is enough to do with what others have sent."""
        with self._counting:
            if self._taken + size > AT_ONCE:
                raise flight.FlightUnavailableError("others are sending as much as can be taken at once")
            self._taken += size
        try:
            yield
        finally:
            with self._counting:
                self._taken -= size

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        if action.type not in ("take", "reach"):  # these are others', and not the driver's
            self.heard = time.monotonic()
        body = action.body.to_pybytes()
        match action.type:
            case "tell":
                progress = self.keeper.tell(msgspec.msgpack.decode(body, type=Order))
                self._told.set()
                yield msgspec.msgpack.encode(self._with_sent(progress))
            case "progress":
                yield msgspec.msgpack.encode(self._with_sent(self.keeper.progress()))
            case "take":
                with self._taking(len(body)):
                    self.keeper.take(*msgspec.msgpack.decode(body, type=tuple[SegmentRef, bytes]))
                yield b""
            case "compact":
                yield msgspec.msgpack.encode(self._compact(*msgspec.msgpack.decode(body, type=tuple[Job, Maker, int])))
            case "reach":
                yield msgspec.msgpack.encode(self._reached(msgspec.msgpack.decode(body, type=list[str])))
            case "end":
                self._ending.set()
                yield b""
            case other:
                raise flight.FlightServerError(f"no action {other!r}")

    def _reached(self, addresses: Sequence[str]) -> list[str]:
        """Those of some agents that answer this one."""

        def answers(address: str) -> bool:
            peer = FlightPeer(address, self._token, self._query)
            try:
                peer.reach([], REACH_S)
            except OSError:
                return False
            finally:
                peer.close()
            return True

        with ThreadPoolExecutor(max(1, len(addresses))) as pool:
            return [address for address, there in zip(addresses, pool.map(answers, addresses), strict=True) if there]

    def _with_sent(self, progress: Progress) -> Progress:
        return replace(progress, sent=self.sent)

    def _compact(self, job: Job, maker: Maker, slot: int) -> Edit:
        with self._merging:
            cache = SegmentCache(len(job.pieces))
            cache.attach(self._store.uri, self._worker)
            edit = merge(self._store, cache, job, maker, slot)
            del cache
            give_memory_back()
            return edit

    def until_over(self) -> None:
        """Waits until the query has ended, or no driver has spoken to this agent for too long."""
        while not self._ending.wait(min(1.0, LEASE_S)):
            if time.monotonic() - self.heard > LEASE_S:
                self._ending.set()
        self._told.set()

    def work(self) -> None:
        """Keeps replicas until the end."""
        while not self._ending.is_set():
            try:
                busy = self.keeper.work()
            except Exception as error:  # a bug, which must not end what gives others their state
                self.keeper.trouble, busy = f"{type(error).__name__}: {error}"[:500], False
            if not busy:
                self._told.wait(0.5)
                self._told.clear()


def _modest(asks: Sequence[Ask]) -> bool:
    spans = [span for ask in asks for span in ask.spans]
    return all(0 <= start < end for start, end in spans) and sum(b - a for a, b in spans) <= MOST


def _batches(parts: Sequence[tuple[int, int, bytes]]) -> Iterator[pa.RecordBatch]:
    """The parts, in batches of about as much as is asked for at a time."""
    first, size = 0, 0
    for last, (_, _, data) in enumerate(parts, 1):
        size += len(data)
        if size >= FETCH_TOGETHER or last == len(parts):
            columns = zip(*parts[first:last], strict=True)
            yield pa.record_batch(
                [pa.array(each, field.type) for each, field in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
            )
            first, size = last, 0


# -- asking ---------------------------------------------------------------------------------------------------------


class FlightPeer:
    """Another worker's agent. What goes wrong on the way is an `OSError`."""

    def __init__(self, address: str, token: str, query: str, pace: Limiter | None = None) -> None:
        self.address = address
        self._headers, self._pace = credentials(token, query), pace
        self._client: flight.FlightClient | None = None

    def _options(self, size: int) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=CALL_S + size / SLOWEST, headers=self._headers)

    def _connected(self) -> flight.FlightClient:
        if self._client is None:
            # A channel of its own: gRPC would remember that nobody answered at an address, for whoever is there now.
            alone = [("grpc.use_local_subchannel_pool", 1)]
            self._client = flight.connect(f"grpc://{self.address}", generic_options=alone)
        return self._client

    def give(self, name: str, spans: Sequence[Span]) -> Sequence[tuple[int, memoryview]] | None:
        """What the agent has of some bytes of an object, each part with where it begins; None if it has nothing."""
        found = self._asked([Ask(name, list(spans))])
        return None if found is None else found[0]

    def give_whole(self, sizes: Mapping[str, int]) -> dict[str, memoryview]:
        """Those of some objects, given with their sizes, that it has all of."""
        found = self._asked([Ask(name, [(0, size)], whole=True) for name, size in sizes.items()]) or []
        return {name: parts[0][1] for name, parts in zip(sizes, found, strict=False) if len(parts) == 1}

    def _asked(self, asks: Sequence[Ask]) -> list[list[tuple[int, memoryview]]] | None:
        """The answer to each; None if the agent has nothing of all that."""
        size = sum(end - start for ask in asks for start, end in ask.spans)
        ticket, began = flight.Ticket(msgspec.msgpack.encode(asks)), time.monotonic()
        try:
            reader = self._connected().do_get(ticket, self._options(size))
            found: list[list[tuple[int, memoryview]]] = [[] for _ in asks]
            for chunk in reader:
                which, begins = (chunk.data.column(name).to_numpy().tolist() for name in ("ask", "at"))
                column = chunk.data.column("data")
                for i, (number, at) in enumerate(zip(which, begins, strict=True)):
                    found[number].append((operator.index(at), memoryview(column[i].as_buffer())))
        except flight.FlightServerError:
            return None
        except Exception as error:  # of the way there, or an answer that is none
            self.close()
            raise OSError(f"the agent at {self.address} does not answer: {_line(error)}") from error
        if self._pace is not None:  # by what came: nobody asks for more before this has been waited for
            came = sum(len(data) for parts in found for _, data in parts)
            self._pace.wait(self._pace.reserve(came, time.monotonic() - began))
        return found

    def call(self, action: str, body: bytes = b"", timeout: float = CALL_S) -> bytes:
        """Has the agent do something."""
        options = flight.FlightCallOptions(timeout=timeout, headers=self._headers)
        try:
            [result] = self._connected().do_action(flight.Action(action, body), options)
            answer: bytes = result.body.to_pybytes()
            return answer
        except Exception as error:
            self.close()
            raise OSError(f"the agent at {self.address} does not answer: {_line(error)}") from error

    def tell(self, order: Order) -> Progress:
        """Gives it an order; how far it is."""
        return _decoded(self.call("tell", msgspec.msgpack.encode(order)), Progress)

    def progress(self) -> Progress:
        """How far it is with its order."""
        return _decoded(self.call("progress"), Progress)

    def take(self, ref: SegmentRef, data: bytes) -> None:
        """Has it hold a segment."""
        if len(data) > MOST:
            raise OSError(f"{ref.name} has {len(data)} bytes, more than are sent at once")
        self.call("take", msgspec.msgpack.encode((ref, data)), TAKE_S)

    def compact(self, job: Job, maker: Maker, slot: int, timeout: float) -> Edit:
        """Has it merge segments."""
        return _decoded(self.call("compact", msgspec.msgpack.encode((job, maker, slot)), timeout), Edit)

    def reach(self, addresses: Sequence[str], timeout: float = 2 * REACH_S) -> list[str]:
        """Which of some other agents it reaches."""
        return _decoded(self.call("reach", msgspec.msgpack.encode(list(addresses)), timeout), list[str])

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(pa.ArrowException, OSError):
                client.close()


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise OSError(f"an agent's answer cannot be read: {error}") from error


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


# -- beginning and ending -------------------------------------------------------------------------------------------


def launch(settings: Settings) -> str:
    """Starts an agent beside this process; its address. One that the worker has of this query already is ended."""
    for other in agents_of(settings.owner, settings.query):
        with contextlib.suppress(OSError):
            os.kill(other, signal.SIGKILL)
    process = subprocess.Popen(
        [sys.executable, "-c", _MAIN, NAME, str(settings.owner), settings.query],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.msgpack.encode(settings))
        process.stdin.close()
        ready, _, _ = select.select([process.stdout], [], [], START_S)
        address = process.stdout.readline().decode().strip() if ready else ""
    except OSError as error:
        address, reason = "", str(error)
    else:
        reason = "it did not begin in time" if process.poll() is None else f"it ended with {process.returncode}"
    process.stdout.close()
    if not address:
        process.kill()
        process.wait()
        raise OSError(f"the agent could not be started: {reason}")
    _LAUNCHED[:] = [process, *(other for other in _LAUNCHED if other.poll() is None)]
    return address


def agents_of(owner: int, query: str) -> list[int]:
    """The processes that are agents of a worker and a query."""
    return _processes(NAME, str(owner), query)


def _processes(*last: str) -> list[int]:
    """The processes whose command lines end with these words."""
    found, wanted = [], [word.encode() for word in last]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().rstrip(b"\0").split(b"\0")[-len(wanted) :] == wanted:
                found.append(int(path.parent.name))
    return found


NAME = "millstream-agent"
WAITER = "millstream-waiter"
_MAIN = "from millstream.store.agent import main; main()"
_WAIT_AND_REMOVE = """
import glob, os, select, shutil, sys
worker, identity, _, _, root = sys.argv[1:]
ended = select.poll()
ended.register(int(worker), select.POLLIN)
while not ended.poll():
    pass
for directory in 2 * glob.glob(os.path.join(glob.escape(root), "*", glob.escape(identity))):
    shutil.rmtree(directory, ignore_errors=True)
"""

_LAUNCHED: list[subprocess.Popen[bytes]] = []
"""The agents that this process has started, so that it notices when they have ended."""


def main() -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a stopped group gets it when whoever began it has ended
    settings = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Settings)
    with contextlib.suppress(OSError):
        os.nice(NICE)
    store = open_store(settings.uri, settings.options, make=False)
    found = check_format(store)
    if found != settings.query:
        raise StoreUnavailable(f"{settings.uri} is another store here (id {found}), expected {settings.query}")
    worker = open_cache(settings.cache, settings.query, settings.owner)
    server = AgentServer(settings, store, worker)
    threading.Thread(target=_end_with, args=(settings.owner, worker.directory), daemon=True).start()
    threading.Thread(target=server.serve, daemon=True).start()
    print(server.address, flush=True)  # `launch` reads it
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        threading.Thread(target=server.work, daemon=True).start()
        server.until_over()  # whatever it is doing just then
        last = threading.Thread(target=server.shutdown, daemon=True)  # after the last answer
        last.start()
        last.join(LAST_S)
        if settings.cache.directory is not None:
            _give_way(settings.owner, worker.directory)
        if identity(settings.owner) != worker.directory.name:  # it has ended meanwhile
            _remove(worker.directory)
    finally:
        os._exit(0)


def _give_way(owner: int, directory: Path) -> None:
    """Becomes a process that does nothing but remove a worker's caches when it has ended, those of all queries; unless
    there is one already, or the worker has ended."""
    root = str(directory.parent.parent)
    if _processes(WAITER, str(owner), root):
        return
    with contextlib.suppress(OSError, AttributeError):
        worker = os.pidfd_open(owner)
        if identity(owner) == directory.name:  # else another process has its number by now
            os.set_inheritable(worker, True)
            words = ["-I", "-S", "-c", _WAIT_AND_REMOVE, str(worker), directory.name]
            os.execv(sys.executable, [sys.executable, *words, WAITER, str(owner), root])


def _remove(directory: Path) -> None:
    for _ in range(2):  # what somebody was just writing may have come in between
        shutil.rmtree(directory, ignore_errors=True)


def _end_with(process: int, directory: Path) -> NoReturn:
    """Ends this process when another one has ended, and removes the directory that belongs to that one."""
    try:
        descriptor = os.pidfd_open(process)
    except (OSError, AttributeError):
        while Path(f"/proc/{process}").exists():
            time.sleep(1.0)
    else:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while not poll.poll():
            pass
    _remove(directory)
    os._exit(0)
