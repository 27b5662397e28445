"""Agents without processes: each worker's keeper runs here and now, and asks its peers directly."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millstream.protocol.manifest import SegmentRef
from millstream.protocol.replication import Order, Progress
from millstream.store.cache import WorkerCache
from millstream.store.objects import ObjectStore
from millstream.store.replica import Keeper


class InProcessAgents:
    """The agents of simulated workers, each with a cache below a directory. Whoever is no longer among the workers has
    lost its cache, too.

    `pieces` is how many pieces a worker brings when it is told, or asked how far it is: so that some are behind. One
    second goes by whenever one is told anything.
    """

    def __init__(
        self, store: ObjectStore, directory: Path, workers: Callable[[], Sequence[str]], pieces: int = 1 << 30
    ) -> None:
        self._store, self._directory, self._workers, self.pieces = store, directory, workers, pieces
        self.keepers: dict[str, Keeper] = {}
        self._now = 0.0
        self.late = False
        """Whether what an order asks for is brought only when the next one comes."""

    def cache(self, worker: str) -> WorkerCache:
        """The cache of a worker."""
        return WorkerCache(self._directory / f"worker-{worker}")

    def hosts(self) -> Mapping[str, str]:
        for worker in [worker for worker in self.keepers if worker not in self._workers()]:
            del self.keepers[worker]
            shutil.rmtree(self._directory / f"worker-{worker}", ignore_errors=True)
        return {worker: f"host {worker}" for worker in self._workers()}

    def start(self, workers: Sequence[str]) -> dict[str, str]:
        for worker in workers:
            self.keepers[worker] = Keeper(self._store, self.cache(worker), self._peer, lambda: self._now)
        return {worker: worker for worker in workers}

    def _peer(self, address: str) -> InProcessPeer:
        return InProcessPeer(self, address)

    def give(self, worker: str, ref: SegmentRef, data: bytes) -> None:
        """Sends a segment to a worker."""
        self._of(worker).take(ref, data)

    def tell(self, worker: str, order: Order) -> Progress:
        keeper = self._of(worker)
        self._now += 1.0
        if self.late:
            self._bring(keeper)
        keeper.tell(order)
        return self.progress(worker)

    def progress(self, worker: str) -> Progress:
        keeper = self._of(worker)
        if not self.late:
            self._bring(keeper)
        return keeper.progress()

    def _bring(self, keeper: Keeper) -> None:
        for _ in range(self.pieces):
            if not keeper.work():
                break

    def _of(self, worker: str) -> Keeper:
        if worker not in self.keepers or worker not in self._workers():
            raise OSError(f"worker {worker} does not answer")
        return self.keepers[worker]

    def forget(self, worker: str) -> None:
        self.keepers.pop(worker, None)

    def end(self) -> None:
        self.keepers.clear()


class InProcessPeer:
    """Another simulated worker."""

    def __init__(self, agents: InProcessAgents, worker: str) -> None:
        self._agents, self._worker = agents, worker

    def give(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[tuple[int, memoryview]] | None:
        if self._worker not in self._agents.keepers:
            raise OSError(f"worker {self._worker} does not answer")
        found = self._agents.cache(self._worker).read(name, spans)
        return None if found is None else [(start, memoryview(data)) for start, data in found]

    def give_whole(self, sizes: Mapping[str, int]) -> dict[str, memoryview]:
        found = {name: self.give(name, [(0, size)]) for name, size in sizes.items()}
        return {name: parts[0][1] for name, parts in found.items() if parts and len(parts) == 1}
