"""Agents: workers give each other what they have, and whatever goes wrong costs time, not results."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from millstream.protocol.compaction import Job
from millstream.protocol.keyspace import WHOLE, Range
from millstream.protocol.manifest import Family, Piece
from millstream.protocol.replication import Order, Recipe, Want
from millstream.spark import agents as agents_module
from millstream.spark.agents import SparkAgents
from millstream.store import agent as agent_module
from millstream.store import cache as cache_module
from millstream.store import names, replica
from millstream.store.agent import AgentServer, FlightPeer, Settings
from millstream.store.cache import Limiter, WorkerCache
from millstream.store.keys import KeyColumns, arrange
from millstream.store.merge import merge, newest_rows
from millstream.store.names import Maker
from millstream.store.objects import ObjectStore, open_store
from millstream.store.replica import Keeper
from millstream.store.rows import StateRows
from millstream.store.segments import SegmentCache, write_segments
from millstream.testing.faults import FaultyStore

FAMILY = Family("step", "state")
TOKEN, QUERY = "a token", "a query"
ALL = (WHOLE,)
HALF = (Range(0, (1 << 63) - 1),)


def rows(count: int, seed: int) -> StateRows:
    """Rows of random keys."""
    rng = np.random.default_rng(seed)
    keys = KeyColumns((pa.array(rng.integers(0, 1 << 40, count)),))
    hashes = rng.integers(0, 1 << 64, count, np.uint64, endpoint=False) if count else np.zeros(0, np.uint64)
    order, starts = arrange(hashes, keys, None)
    chosen = order[starts]
    values = pa.array([f"{seed} {i:0100d}" for i in range(len(chosen))])
    return StateRows(hashes[chosen], keys.take(chosen), values, np.zeros(len(chosen), np.bool_))


class Site:
    """A store, and workers with caches and agents of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plain = open_store(str(folder / "store"))
        self.store = FaultyStore(self.plain)
        self.servers: dict[str, AgentServer] = {}
        self.all: list[AgentServer] = []
        self.threads: list[threading.Thread] = []

    def cache(self, worker: str, limit: int = 1 << 30) -> WorkerCache:
        return WorkerCache(self.folder / worker, limit)

    def agent(self, worker: str, token: str = TOKEN, query: str = QUERY, limit: int = 1 << 30) -> AgentServer:
        server = AgentServer(Settings("127.0.0.1", token, query, ""), self.store, self.cache(worker, limit))
        self.serve(server)
        self.servers[worker] = server
        self.all.append(server)
        return server

    def serve(self, server: flight.FlightServerBase) -> None:
        self.threads.append(threading.Thread(target=server.serve, daemon=True))
        self.threads[-1].start()

    def written(self, worker: str, seed: int, order: int, count: int = 3000) -> Piece:
        """A segment that a worker has just written."""
        cache = SegmentCache()
        cache.attach(self.store.uri, self.cache(worker))
        maker = Maker(1, order, "a", 0)
        [ref] = write_segments(self.store, cache, FAMILY, maker, 0, order, ALL, rows(count, seed))
        return Piece(ref, ALL)

    def copied(self, worker: str) -> None:
        """Makes files of a worker's cache its own, as if the store were elsewhere."""
        for path in (self.folder / worker).iterdir():
            if path.is_file():
                data = path.read_bytes()
                path.unlink()
                path.write_bytes(data)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield made
    for server in made.all:
        server.shutdown()
    for thread in made.threads:
        thread.join(20)
        assert not thread.is_alive()
    for number, handler in before.items():  # a server puts its own in their place, and of several the last one stays
        signal.signal(number, handler)


def held(keeper: Keeper, order: Order) -> bool:
    """Has a keeper do all that it can; whether nothing is lacking."""
    keeper.tell(order)
    for _ in range(1000):
        if not keeper.work():
            break
    return not any(keeper.progress().lacks.values())


def read(store: ObjectStore, worker: WorkerCache, piece: Piece) -> tuple[list[Any], int]:
    """What a worker reads of a piece, and how much it had to fetch from the store."""
    cache = SegmentCache()
    cache.attach(store.uri, worker)
    found = newest_rows(store, cache, [piece], piece.ranges, drop_dead=True)
    return found.values.to_pylist(), cache.traffic.fetched


def test_a_replica_comes_from_the_peer_and_is_read_without_the_store(site: Site) -> None:
    piece = site.written("a", 1, 0)
    origin, target = site.agent("a"), site.agent("b")
    assert held(target.keeper, Order(0, (Want("slot 0", (piece,), (origin.address,)),)))
    assert target.keeper.traffic.given >= piece.segment.bytes
    assert target.keeper.traffic.fetched == 0
    values, fetched = read(site.store, site.cache("b"), piece)
    assert fetched == 0
    assert sorted(values) == sorted(rows(3000, 1).values.to_pylist())


def test_only_the_ranges_that_count_are_sent(site: Site) -> None:
    piece = replace(site.written("a", 1, 0, 60_000), ranges=HALF)
    origin, target = site.agent("a"), site.agent("b")
    assert held(target.keeper, Order(0, (Want("slot 0", (piece,), (origin.address,)),)))
    assert 0.4 * piece.segment.bytes < target.keeper.traffic.given < 0.65 * piece.segment.bytes
    assert read(site.store, site.cache("b"), piece)[1] == 0


def test_what_is_held_is_not_sent_again(site: Site) -> None:
    first = site.written("a", 1, 0)
    origin, target = site.agent("a"), site.agent("b")
    assert held(target.keeper, Order(0, (Want("slot 0", (first,), (origin.address,)),)))
    before = target.keeper.traffic.given
    second = site.written("a", 2, 1)
    assert held(target.keeper, Order(1, (Want("slot 0", (second, first), (origin.address,)),)))
    assert target.keeper.traffic.given - before < 1.2 * second.segment.bytes
    again = site.agent("b")  # an agent that takes its place finds what it left
    assert held(again.keeper, Order(1, (Want("slot 0", (second, first), (origin.address,)),)))
    assert again.keeper.traffic.given == 0


@pytest.mark.parametrize("together", [True, False])
def test_many_segments_are_brought_without_looking_through_the_cache_for_each(
    site: Site, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "SMALL", 1 << 18 if together else 0)
    looked: list[str] = []
    scan = os.scandir

    def counted(path: Any) -> Any:
        looked.append(str(path))
        return scan(path)

    monkeypatch.setattr(cache_module.os, "scandir", counted)
    monkeypatch.setattr(cache_module.time, "monotonic", lambda: 100.0)  # whatever takes a while does not, here
    origin, target = site.agent("a"), site.agent("b")
    pieces = tuple(site.written("a", seed, seed, 50) for seed in range(40))
    assert held(target.keeper, Order(1, (Want("slot 0", pieces, (origin.address,)),)))
    assert looked.count(str(site.folder / "b")) < 8
    assert site.cache("b").has(pieces[-1].segment.name)


def test_what_a_task_sends_is_held_if_it_is_what_it_should_be(site: Site) -> None:
    piece, target, small = site.written("a", 1, 1), site.agent("b"), site.agent("c", limit=1000)
    peer = FlightPeer(target.address, TOKEN, QUERY)
    data = bytes(site.store.get(piece.segment.name) or b"")
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1
    cases = [
        (piece.segment, bytes(flipped)),
        (piece.segment, data[:-1]),
        (replace(piece.segment, name="state/../../passwd"), data),
        (replace(piece.segment, name=f"{piece.segment.name}x", digest="0" * 16), data),
    ]
    for ref, sent in cases:
        with pytest.raises(OSError, match="does not answer"):
            peer.take(ref, sent)
    assert not list(site.folder.rglob("passwd"))
    before = site.store.operations
    peer.take(piece.segment, data)
    assert target.keeper.tell(Order(1, (Want("slot 0", (piece,)),))).lacks == {"slot 0": ()}
    assert site.store.operations == before
    values, fetched = read(site.store, site.cache("b"), piece)
    assert (len(values), fetched) == (piece.segment.rows, 0)
    with pytest.raises(OSError, match="no room"):
        FlightPeer(small.address, TOKEN, QUERY).take(piece.segment, data)


def test_a_chain_goes_on_around_a_member_that_is_gone(site: Site) -> None:
    piece = site.written("a", 1, 0)
    origin, middle, last = site.agent("a"), site.agent("b"), site.agent("c")
    assert held(middle.keeper, Order(0, (Want("slot 0", (piece,), (origin.address,)),)))
    assert held(last.keeper, Order(0, (Want("slot 0", (piece,), (middle.address, origin.address)),)))
    assert middle.sent >= piece.segment.bytes > origin.sent - middle.sent
    more = site.written("a", 2, 1)
    address = middle.address
    middle.shutdown()
    assert held(last.keeper, Order(1, (Want("slot 0", (more, piece), (address, origin.address)),)))
    assert last.keeper.traffic.fetched == 0


def test_each_member_of_a_chain_waits_for_the_one_before_and_the_origin_sends_once(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "ASK_AGAIN_S", 0.0)
    pieces = tuple(site.written("a", seed, 3 - seed) for seed in (1, 2, 3))
    origin, middle, last = site.agent("a"), site.agent("b"), site.agent("c")
    wanted = Order(0, (Want("slot 0", pieces, (middle.address, origin.address), chained=True),))
    last.keeper.tell(wanted)
    for _ in range(3):
        last.keeper.work()
    assert (origin.sent, last.keeper.traffic.fetched) == (0, 0), "it waits"
    assert not last.keeper.trouble
    assert held(middle.keeper, Order(0, (Want("slot 0", pieces, (origin.address, last.address)),)))
    sent = origin.sent
    assert held(last.keeper, wanted)
    assert origin.sent == sent
    assert last.keeper.traffic.given == middle.keeper.traffic.given
    assert last.keeper.traffic.fetched == 0


@pytest.mark.parametrize("why", ["it gets nothing", "it is gone", "its bytes are wrong"])
def test_a_member_of_a_chain_that_gets_nowhere_is_not_waited_for(
    site: Site, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    piece = site.written("a", 1, 0)
    site.copied("a")
    origin, middle = site.agent("a"), site.agent("b")
    if why == "it is gone":
        middle.shutdown()
    if why == "its bytes are wrong":
        (site.folder / "b" / names.base(piece.segment.name)).write_bytes(bytes(piece.segment.bytes))
    last = Keeper(site.store, site.cache("c"), lambda address: FlightPeer(address, TOKEN, QUERY), lambda: now[0])
    wanted = Order(0, (Want("slot 0", (piece,), (middle.address, origin.address), chained=True),))
    for _ in range(20):
        if held(last, wanted):
            break
        now[0] += 1.0
    assert held(last, wanted)
    assert last.traffic.given >= piece.segment.bytes
    assert last.traffic.fetched == 0
    assert now[0] <= replica.CHAIN_S + 1


def test_a_piece_that_the_one_before_has_wrong_waits_for_a_while_and_others_do_not(site: Site) -> None:
    now = [0.0]
    wrong, large = site.written("a", 1, 0, 60_000), site.written("a", 2, 1, 60_000)
    origin, middle = site.agent("a"), site.agent("b")
    chain = (middle.address, origin.address)
    last = Keeper(site.store, site.cache("c"), lambda address: FlightPeer(address, TOKEN, QUERY), lambda: now[0])
    pieces: tuple[Piece, ...] = (wrong, large)
    assert held(middle.keeper, Order(0, (Want("slot 0", pieces, (origin.address,)),)))
    path = next((site.folder / "b").glob(names.base(wrong.segment.name) + "*"))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(bytes(40))
    for step in range(100):
        small = tuple(site.written("a", 2 * step + k, step + 2, 50) for k in (3, 4))
        pieces = (*small, *pieces)
        assert held(middle.keeper, Order(step + 1, (Want("slot 0", pieces, (origin.address,)),)))
        held(last, Order(step + 1, (Want("slot 0", pieces, chain, chained=True),)))
        lacks = last.progress().lacks["slot 0"]
        assert set(lacks) <= {wrong.segment.name}, "only what is wrong there waits"
        if not lacks:
            break
        now[0] += 1.0
    assert replica.CHAIN_S < now[0] <= replica.CHAINED_S + 1, "as long as others come"
    assert last.traffic.fetched == 0


def test_who_has_kept_one_piece_waiting_in_vain_does_not_keep_the_next_one(site: Site) -> None:
    now = [0.0]
    pieces = tuple(site.written("a", seed, seed, 60_000 if seed % 2 else 100) for seed in range(12))
    origin, middle = site.agent("a"), site.agent("b")
    last = Keeper(site.store, site.cache("c"), lambda address: FlightPeer(address, TOKEN, QUERY), lambda: now[0])
    wanted = Order(0, (Want("slot 0", pieces, (middle.address, origin.address), chained=True),))
    while not held(last, wanted):
        now[0] += 1.0
        assert now[0] < 2 * replica.CHAIN_S
    assert last.traffic.fetched == 0


def test_what_a_peer_has_only_in_part_is_sent_in_part(site: Site) -> None:
    piece = site.written("a", 1, 0, 60_000)
    origin, middle, last = site.agent("a"), site.agent("b"), site.agent("c")
    half = replace(piece, ranges=HALF)
    assert held(middle.keeper, Order(0, (Want("slot 0", (half,), (origin.address,)),)))
    assert held(last.keeper, Order(0, (Want("slot 0", (piece,), (middle.address,)),)))
    assert middle.sent < 0.65 * piece.segment.bytes, "no holes"
    assert last.keeper.traffic.given > 0.9 * middle.sent
    assert last.keeper.traffic.fetched > 0.3 * piece.segment.bytes
    assert read(site.store, site.cache("c"), piece)[1] == 0


def test_small_segments_are_asked_for_together_and_each_is_checked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = tuple(site.written("a", seed, seed, 100) for seed in range(20))
    site.copied("a")
    wrong, lost, short = (site.folder / "a" / names.base(piece.segment.name) for piece in pieces[3:6])
    data = bytearray(wrong.read_bytes())
    data[len(data) // 2] ^= 1
    wrong.write_bytes(data)
    lost.unlink()
    short.write_bytes(short.read_bytes()[:-1])
    origin, target = site.agent("a"), site.agent("b")
    calls: list[int] = []
    asked = FlightPeer._asked

    def counted(self: FlightPeer, asks: Any) -> Any:
        calls.append(len(asks))
        return asked(self, asks)

    monkeypatch.setattr(FlightPeer, "_asked", counted)
    assert held(target.keeper, Order(0, (Want("slot 0", pieces, (origin.address,)),)))
    assert calls[0] == 20
    assert 3 <= len(calls) < 12, "what was wrong is asked for again by itself"
    progress = target.keeper.progress()
    assert progress.given > 16 * pieces[0].segment.bytes
    assert 0 < progress.fetched <= 3 * pieces[0].segment.bytes * 1.1
    for piece in pieces:
        values, fetched = read(site.store, site.cache("b"), piece)
        assert (len(values), fetched) == (100, 0)
    stored = WorkerCache(site.folder / "c")
    few = Keeper(site.store, stored, lambda address: FlightPeer(address, TOKEN, QUERY))
    monkeypatch.setattr(replica, "MANY", 4)
    calls.clear()
    assert held(few, Order(0, (Want("slot 0", pieces[6:], (origin.address,)),)))
    assert max(calls) == 4


def test_a_piece_that_fails_as_nobody_thought_of_holds_up_no_others(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = site.written("a", 1, 1), site.written("a", 2, 0)
    origin, target = site.agent("a"), site.agent("b")
    bring = Keeper._bring

    def fails(self: Keeper, want: Want, piece: Piece) -> bool:
        if piece is first:
            raise MemoryError
        return bring(self, want, piece)

    monkeypatch.setattr(Keeper, "_bring", fails)
    target.keeper.tell(Order(0, (Want("slot 0", (first, second), (origin.address,)),)))
    with pytest.raises(MemoryError):
        target.keeper.work()
    assert target.keeper.work()
    assert target.keeper.progress().lacks == {"slot 0": (first.segment.name,)}


def test_an_agent_that_is_told_to_end_does_not_first_bring_what_it_has_begun(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, began, never = site.agent("a"), threading.Event(), threading.Event()

    def slow(self: Keeper) -> bool:
        began.set()
        return never.wait(60)

    monkeypatch.setattr(Keeper, "work", slow)
    threads = [threading.Thread(target=work, daemon=True) for work in (server.work, server.until_over)]
    for thread in threads:
        thread.start()
    assert began.wait(20)
    FlightPeer(server.address, TOKEN, QUERY).call("end")
    threads[1].join(20)
    assert not threads[1].is_alive()
    assert threads[0].is_alive()
    never.set()
    threads[0].join(20)


def test_a_peer_with_a_flipped_bit_is_found_out_and_the_store_is_asked(site: Site) -> None:
    piece = site.written("a", 1, 0, 20_000)
    site.copied("a")
    path = site.folder / "a" / names.base(piece.segment.name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    origin, target = site.agent("a"), site.agent("b")
    assert held(target.keeper, Order(0, (Want("slot 0", (piece,), (origin.address,)),)))
    assert 0 < target.keeper.traffic.fetched <= 32 << 10, "one chunk"
    assert read(site.store, site.cache("b"), piece) == (read(site.store, site.cache("new"), piece)[0], 0)


def test_a_replica_whose_bit_flips_on_its_disk_is_mended_by_whoever_reads_it(site: Site) -> None:
    piece = site.written("a", 1, 0, 20_000)
    origin, target = site.agent("a"), site.agent("b")
    assert held(target.keeper, Order(0, (Want("slot 0", (piece,), (origin.address,)),)))
    [path] = (path for path in (site.folder / "b").iterdir() if path.is_file() and ".arrow" in path.name)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    values, fetched = read(site.store, site.cache("b"), piece)
    assert 0 < fetched <= 32 << 10
    assert values == read(site.store, site.cache("new"), piece)[0]


class Liar(flight.FlightServerBase):  # type: ignore[misc]
    """A server that is no agent of ours: it gives other bytes, none at all, or what are no bytes, in turn."""

    turn = 0

    def do_get(self, context: Any, ticket: Any) -> Any:
        self.turn += 1
        answers = [[b"x" * 99], [], [None], [1.5], [b"x" * (1 << 17)], [b"x"]]
        turn = self.turn % len(answers)
        column = pa.array(answers[turn], pa.float64() if turn == 3 else pa.large_binary())
        begins: list[list[Any]] = [[0], [], [0], [0], [-(1 << 62)], [None if self.turn % 5 else 0.5]]
        return flight.RecordBatchStream(pa.table({"ask": [0] * len(column), "at": begins[turn], "data": column}))

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        yield b"\xc1 garbage"


@pytest.mark.parametrize("who", ["another token", "another query", "a liar", "nobody"])
def test_a_peer_that_is_not_the_one_that_was_meant_gives_nothing_and_the_store_does(site: Site, who: str) -> None:
    piece = site.written("a", 1, 0)
    liar = Liar("grpc://127.0.0.1:0")
    site.serve(liar)
    address = {
        "another token": lambda: site.agent("a", token="another").address,
        "another query": lambda: site.agent("a", query="another").address,
        "a liar": lambda: f"127.0.0.1:{liar.port}",
        "nobody": lambda: "127.0.0.1:1",
    }[who]()
    target = site.agent("b")
    assert held(target.keeper, Order(0, (Want("slot 0", (piece,), (address,)),)))
    assert target.keeper.traffic.given == 0
    assert target.keeper.traffic.fetched >= piece.segment.bytes
    peer = FlightPeer(address, TOKEN, QUERY)
    with pytest.raises(OSError, match="agent"):
        peer.progress()
    liar.shutdown()


class Started:
    """Stands for Spark, whose tasks have started agents at these addresses."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.addresses = addresses

    def run_located(self, tasks: Sequence[bytes], work: Any, places: Any) -> list[bytes]:
        return [msgspec.msgpack.encode(agents_module.Started(*each)) for each in self.addresses.items()]


@pytest.mark.parametrize("who", ["another token", "another query", "a liar", "nobody"])
def test_the_driver_goes_on_without_an_agent_that_is_not_the_one_that_was_meant(site: Site, who: str) -> None:
    piece = site.written("a", 1, 0)
    liar = Liar("grpc://127.0.0.1:0")
    site.serve(liar)
    spark: Any = Started({})
    agents = SparkAgents(spark, lambda: {"1": "127.0.0.1"}, Settings("", "", QUERY, ""))
    address = {
        "another token": lambda: site.agent("a").address,
        "another query": lambda: site.agent("a", token=agents._settings.token, query="another").address,
        "a liar": lambda: f"127.0.0.1:{liar.port}",
        "nobody": lambda: "127.0.0.1:1",
    }[who]()
    spark.addresses["1"] = address
    assert agents.start(["1"]) == {"1": address}
    with pytest.raises(OSError, match="agent"):
        agents.tell("1", Order(0, (Want("slot 0", (piece,)),)))
    with pytest.raises(OSError, match="agent"):
        agents.progress("1")
    assert agents.compact("1", Job(FAMILY, ALL, (piece,), bottom=True), Maker(1, 1, "c", 0), 0) is None
    agents.end()
    liar.shutdown()


def test_an_agent_tells_whom_it_reaches(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "REACH_S", 0.5)
    asked, answers, stranger = site.agent("a"), site.agent("b"), site.agent("c", token="another")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # as behind a cut: it is connected to, and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        peer = FlightPeer(asked.address, TOKEN, QUERY)
        assert peer.reach([answers.address, stranger.address, address], 5.0) == [answers.address]
        peer.close()


def test_an_agent_gives_nothing_but_segments(site: Site) -> None:
    (site.folder / "secret").write_text("secret")
    (site.folder / "a").mkdir()
    (site.folder / "a" / "pace").write_text("1234")
    origin = site.agent("a")
    peer = FlightPeer(origin.address, TOKEN, QUERY)
    for name in ("../secret", "pace", "slots/0", "/etc/hostname", "..", ""):
        assert peer.give(name, [(0, 4)]) is None
    piece = site.written("a", 1, 0)
    assert peer.give(piece.segment.name, [(0, 1 << 40)]) is None, "more than anybody needs"
    assert peer.give(piece.segment.name, [(8, 4)]) is None
    assert [(at, bytes(data)) for at, data in peer.give(piece.segment.name, [(0, 6)]) or ()] == [(0, b"ARROW1")]


def test_a_compaction_is_done_again_at_the_replica_instead_of_being_sent(site: Site) -> None:
    pieces = tuple(site.written("a", seed, seed) for seed in (3, 2, 1))
    origin, target = site.agent("a"), site.agent("b")
    assert held(target.keeper, Order(0, (Want("slot 0", pieces, (origin.address,)),)))
    before = target.keeper.traffic.given
    job = Job(FAMILY, ALL, pieces, bottom=True)
    edit = FlightPeer(origin.address, TOKEN, QUERY).compact(job, Maker(1, 3, "c", 0), 0, 60.0)
    merged = tuple(Piece(ref, ref.covers) for ref in edit.outputs)
    recipes = (Recipe(job, edit.outputs),)
    for path in (site.folder / "b").iterdir():
        os.utime(path, (1, 1))  # they are old, and nothing but the recipe needs them
    worker = target.keeper._worker
    worker._noted, worker._swept = {}, -1e9
    assert held(target.keeper, Order(1, (Want("slot 0", merged, (origin.address,)),), recipes))
    assert target.keeper.traffic.given == before
    assert target.keeper.made >= sum(ref.bytes for ref in edit.outputs)
    assert read(site.store, site.cache("b"), merged[0])[1] == 0


def test_what_was_made_anew_and_could_not_be_kept_is_not_held(site: Site) -> None:
    pieces = tuple(site.written("a", seed, seed) for seed in (2, 1))
    origin, target = site.agent("a"), site.agent("b")
    assert held(target.keeper, Order(0, (Want("slot 0", pieces, (origin.address,)),)))
    job = Job(FAMILY, ALL, pieces, bottom=True)
    edit = FlightPeer(origin.address, TOKEN, QUERY).compact(job, Maker(1, 3, "c", 0), 0, 60.0)
    merged = tuple(Piece(ref, ref.covers) for ref in edit.outputs)
    for ref in edit.outputs:
        (site.folder / "b" / f"{names.base(ref.name)}.{os.getpid()}").mkdir()  # in the way
    assert held(target.keeper, Order(1, (Want("slot 0", merged, (origin.address,)),), (Recipe(job, edit.outputs),)))
    assert names.base(merged[0].segment.name) in site.cache("b").objects()


def test_a_compaction_that_cannot_be_done_again_is_fetched(site: Site) -> None:
    pieces = tuple(site.written("a", seed, seed) for seed in (2, 1))
    origin, target = site.agent("a"), site.agent("b")
    cache = SegmentCache()
    cache.attach(site.store.uri, site.cache("a"))
    job = Job(FAMILY, ALL, pieces, bottom=True)
    edit = merge(site.store, cache, job, Maker(1, 2, "c", 0), 0)
    merged = tuple(Piece(ref, ref.covers) for ref in edit.outputs)
    order = Order(1, (Want("slot 0", merged, (origin.address,)),), (Recipe(job, edit.outputs),))
    assert held(target.keeper, order), "it has none of what went in"
    assert target.keeper.made == 0
    assert target.keeper.traffic.given >= merged[0].segment.bytes


def test_a_cache_that_is_too_small_holds_what_fits_and_says_so(site: Site) -> None:
    pieces = tuple(site.written("a", seed, seed) for seed in (2, 1))
    limit = pieces[0].segment.bytes * 3 // 2
    origin, target = site.agent("a"), site.agent("b", limit=limit)
    assert not held(target.keeper, Order(0, (Want("slot 0", pieces, (origin.address,)),)))
    progress = target.keeper.progress()
    assert progress.lacks["slot 0"] == (pieces[1].segment.name,)
    assert "full" in progress.trouble
    assert target.keeper.traffic.given < limit
    for piece in pieces:
        assert read(site.store, site.cache("b", limit), piece)[0]


def test_a_disk_that_cannot_be_written_keeps_nothing_and_says_so(site: Site) -> None:
    piece = site.written("a", 1, 0)
    (site.folder / "b").write_text("not a directory")
    keeper = Keeper(site.store, site.cache("b"), lambda address: FlightPeer(address, TOKEN, QUERY))
    assert not held(keeper, Order(0, (Want("slot 0", (piece,), (site.agent("a").address,)),)))
    assert "cannot be written" in keeper.progress().trouble


def test_a_store_and_peers_that_fail_are_tried_again(site: Site) -> None:
    piece = site.written("a", 1, 0)
    now = [0.0]
    keeper = Keeper(site.store, site.cache("b"), lambda address: FlightPeer(address, TOKEN, QUERY), lambda: now[0])
    site.store.fail_at = site.store.operations + 1
    order = Order(0, (Want("slot 0", (piece,), ("127.0.0.1:1",)),))
    assert not held(keeper, order)
    assert keeper.progress().trouble
    now[0] += 10.0
    assert held(keeper, order)


def test_an_order_that_comes_late_changes_nothing(site: Site) -> None:
    first, second = site.written("a", 1, 0), site.written("a", 2, 1)
    origin, target = site.agent("a"), site.agent("b")
    assert held(target.keeper, Order(5, (Want("slot 0", (second,), (origin.address,)),)))
    target.keeper.tell(Order(4, (Want("slot 0", (first,), (origin.address,)),)))
    assert target.keeper.progress().number == 5


def test_an_agent_that_no_driver_speaks_to_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "LEASE_S", 0.2)
    server = site.agent("a")
    thread = threading.Thread(target=server.until_over, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_an_agent_takes_no_more_in_a_second_than_it_may(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(agent_module, "Limiter", partial(Limiter, clock=lambda: 0.0, sleep=slept.append))
    piece = site.written("a", 1, 0, count=20_000)
    site.agent("a")
    limit = piece.bytes / 1.5
    slow = AgentServer(Settings("127.0.0.1", TOKEN, QUERY, "", limit=limit), site.store, site.cache("b"))
    site.serve(slow)
    site.all.append(slow)
    site.copied("a")
    assert held(slow.keeper, Order(0, (Want("w", (piece,), (site.servers["a"].address,)),)))
    assert slow.keeper.progress().given >= 0.9 * piece.bytes
    assert max(slept) > 1.0  # by a clock that stands still; a part may be had at once


def test_what_is_sent_to_an_agent_that_has_enough_to_do_is_refused_and_later_taken(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    piece = site.written("a", 1, 0)
    data = bytes(site.plain.get(piece.segment.name) or b"")
    target = site.agent("b")
    peer = FlightPeer(target.address, TOKEN, QUERY)
    monkeypatch.setattr(agent_module, "TAKE_S", 20.0)
    monkeypatch.setattr(agent_module, "AT_ONCE", len(data))
    with target._taking(len(data)), pytest.raises(OSError, match="as much as can be taken at once"):
        peer.take(piece.segment, data)
    with pytest.raises(OSError, match="as much as"):  # with what the message has beside it, it is more
        peer.take(piece.segment, data)
    monkeypatch.setattr(agent_module, "AT_ONCE", 2 * len(data))
    peer.take(piece.segment, data)
    peer.close()
    assert held(target.keeper, Order(0, (Want("w", (piece,)),)))
    assert target.keeper.progress().fetched == 0


def test_what_an_agent_had_when_it_was_killed_is_not_taken_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.store.held.FETCH_TOGETHER", 1 << 16)
    piece = site.written("a", 1, 0, count=20_000)
    site.copied("a")
    origin = site.agent("a").address
    wanted = Order(0, (Want("w", (piece,), (origin,)),))
    first = site.agent("b")
    given = FlightPeer.give

    class Killed(BaseException):
        pass

    def until_killed(self: FlightPeer, name: str, spans: Any) -> Any:
        if first.keeper.progress().given > piece.bytes / 2:
            raise Killed
        return given(self, name, spans)

    monkeypatch.setattr(FlightPeer, "give", until_killed)
    with pytest.raises(Killed):
        held(first.keeper, wanted)
    monkeypatch.setattr(FlightPeer, "give", given)
    second = site.agent("b")
    assert held(second.keeper, wanted)
    assert second.keeper.progress().given < 0.6 * piece.bytes
    assert read(site.store, site.cache("b"), piece) == read(site.store, site.cache("a"), piece)
