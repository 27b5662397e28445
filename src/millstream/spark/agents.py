"""The agents of Spark's executors: started by tasks, spoken to by the driver. See `store.agent`.

Rules
-----
- A task starts the agent of the executor that it runs on. Placement is a preference: a task that finds itself on
  another executor than it was sent to starts nothing, and says so.
- An executor that is gone has no agent. One whose agent does not answer may get another; the old one ends by itself.
"""

from __future__ import annotations

import importlib
import logging
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from millstream.protocol.compaction import Job
from millstream.protocol.manifest import Edit
from millstream.protocol.reach import DRIVER, Link
from millstream.protocol.replication import Order, Progress
from millstream.spark.exchange import Exchange
from millstream.spark.tasks import Doors
from millstream.store.agent import FlightPeer, Settings, launch
from millstream.store.cache import executor, executor_id
from millstream.store.names import Maker

COMPACT_S = 120.0
"""How long an agent may take for a compaction, which has a budget; then Spark does it."""

_LOG = logging.getLogger("millstream")


@dataclass(frozen=True, slots=True)
class Started:
    """What became of the start of an agent: the executor that the task ran on, and the address or what went wrong."""

    executor: str
    address: str = ""
    trouble: str = ""


class SparkAgents:
    """The agents of one driver. `workers` gives the executors that are there now, and the host of each."""

    def __init__(self, exchange: Exchange, workers: Any, settings: Settings) -> None:
        self._exchange, self._workers = exchange, workers
        self._settings = replace(settings, token=secrets.token_hex(16))
        self._peers: dict[str, FlightPeer] = {}
        self._addresses: dict[str, str] = {}  # also of agents that did not answer
        self.links: frozenset[Link] = frozenset()
        """The links that have been seen to let something through. Ports may be closed between workers that are not."""

    def hosts(self) -> Mapping[str, str]:
        try:
            found: Mapping[str, str] = dict(self._workers())
        except (Py4JError, OSError):
            return {}
        return found

    def start(self, workers: Sequence[str]) -> dict[str, str]:
        hosts = self.hosts()
        asked = [worker for worker in workers if worker in hosts]
        tasks = [(worker, replace(self._settings, host=hosts[worker])) for worker in asked]
        try:
            answers = self._exchange.run_located(
                [msgspec.msgpack.encode(task) for task in tasks],
                _start_here,
                tuple((f"executor_{hosts[worker]}_{worker}",) for worker in asked),
            )
        except (Py4JError, PySparkException, OSError) as error:
            _LOG.debug("agents could not be started: %s", error)
            return {}
        found = {}
        for data in answers:
            started = msgspec.msgpack.decode(data, type=Started)
            if started.address:
                found[started.executor] = started.address
                self._peers[started.executor] = self._peer(started.address)
                self._addresses[started.executor] = started.address
            elif started.trouble:
                _LOG.warning("worker %s has no agent: %s", started.executor, started.trouble)
        if found:
            self.reached()
        return found

    def _peer(self, address: str) -> FlightPeer:
        return FlightPeer(address, self._settings.token, self._settings.query)

    def doors(self, workers: Collection[str]) -> Doors | None:
        """How tasks reach the agents of these workers, if any of them has one."""
        found = {worker: peer.address for worker, peer in self._peers.copy().items() if worker in workers}
        return Doors(self._settings.token, self._settings.query, found) if found else None

    def tell(self, worker: str, order: Order) -> Progress:
        return self._of(worker).tell(order)

    def progress(self, worker: str) -> Progress:
        return self._of(worker).progress()

    def _of(self, worker: str) -> FlightPeer:
        found = self._peers.get(worker)
        if found is None:
            raise OSError(f"worker {worker} has no agent")
        return found

    def compact(self, worker: str, job: Job, maker: Maker, slot: int) -> Edit | None:
        """Has a worker's agent merge segments; None if it cannot be had."""
        known = self._peers.get(worker)
        if known is None or job.forms:  # values that are lifted may need code that only Spark's tasks have
            return None
        peer = self._peer(known.address)  # of its own: it takes long, and others must not wait
        try:
            return peer.compact(job, maker, slot, COMPACT_S)
        except OSError as error:
            _LOG.debug("%s", error)
            return None
        finally:
            peer.close()

    def reached(self) -> dict[str, list[str]]:
        """Who reaches whom now: the agents that answer the driver, and those that each of them reaches."""
        there = self.hosts()
        known = {worker: address for worker, address in dict(self._addresses).items() if worker in there}
        workers = {address: worker for worker, address in known.items()}

        def ask(worker: str) -> list[str] | None:
            peer = self._peer(known[worker])  # of its own, as for a compaction
            try:
                others = peer.reach([address for other, address in known.items() if other != worker])
                return [workers[address] for address in others if address in workers]
            except OSError as error:
                _LOG.debug("%s", error)
                return None
            finally:
                peer.close()

        with ThreadPoolExecutor(max(1, len(known))) as pool:
            answers = dict(zip(known, pool.map(ask, known), strict=True))
        found = {worker: others for worker, others in answers.items() if others is not None}
        reached = {DRIVER: list(found), **found}
        self.links |= {frozenset((one, other)) for one, others in reached.items() for other in others}
        return reached

    def forget(self, worker: str) -> None:
        peer = self._peers.pop(worker, None)
        if peer is not None:
            peer.close()

    def end(self) -> None:
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            try:
                peer.call("end", timeout=2.0)
            except OSError as error:
                _LOG.debug("%s", error)
            peer.close()


def _start_here(tasks: Iterable[bytes]) -> Iterator[bytes]:
    """Starts the agent of the executor that this task runs on, if it is the one that was meant."""
    importlib.import_module("millstream.spark.tasks")  # so that this process is ready for the first epoch, too
    for data in tasks:
        wanted, settings = msgspec.msgpack.decode(data, type=tuple[str, Settings])
        owner = executor()
        here = executor_id(owner)
        if here != wanted:
            yield msgspec.msgpack.encode(Started(here))
            continue
        try:
            started = Started(here, launch(replace(settings, owner=owner)))
        except OSError as error:
            started = Started(here, trouble=str(error))
        yield msgspec.msgpack.encode(started)
