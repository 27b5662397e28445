"""Upkeep: compaction and garbage collection, beside the epochs and never inside one.

Rules
-----
- Upkeep never blocks an epoch: one round at a time runs in the background; an epoch only picks up finished edits.
- A finished compaction is an edit. The next plan applies it if its inputs are unchanged (`Manifest.admits`);
  otherwise it is dropped, and its output is garbage.
- A failure of upkeep is remembered and shown, and never fails the query: the next round tries again. State grows
  slower to read, not wrong.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream.model.graph import Graph
from millstream.protocol.compaction import Job, choose
from millstream.protocol.epochs import History
from millstream.protocol.manifest import Edit, Family, Manifest
from millstream.store.garbage import unneeded
from millstream.store.journal import Journal
from millstream.store.names import Maker
from millstream.store.objects import ObjectStore

if TYPE_CHECKING:
    from millstream.engine.driver import Executor

GARBAGE_EVERY = 16
"""Epochs between two garbage collections: each lists the store."""

_LOG = logging.getLogger("millstream")


class Upkeep:
    """The background work of one driver."""

    def __init__(self, store: ObjectStore, graph: Graph, executor: Executor, budget: int, background: bool) -> None:
        self._store, self._graph, self._executor, self._budget = store, graph, executor, budget
        self._background = background
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._finished: dict[int, Edit] = {}  # by number of the compaction
        self._running: set[int] = set()
        self._next_number = 0
        self._stopped = False
        self.trouble: str | None = None
        """What went wrong in the last round, if anything."""
        self.compactions = 0
        """How many compactions have finished."""

    def edits_for(self, manifest: Manifest) -> tuple[Edit, ...]:
        """The finished edits that fit the manifest, for a plan to apply. Those that no longer fit are dropped."""
        with self._lock:
            fitting: list[Edit] = []
            for number, edit in list(self._finished.items()):
                if manifest.admits(edit):
                    manifest, _ = manifest.edited([edit])
                    fitting.append(edit)
                else:
                    del self._finished[number]
            return tuple(fitting)

    def applied(self, edits: Sequence[Edit]) -> None:
        """These edits have been committed."""
        with self._lock:
            self._finished = {number: edit for number, edit in self._finished.items() if edit not in edits}

    def after_commit(self, journal: Journal) -> None:
        """Starts a round unless one runs."""
        if self._stopped or (self._thread is not None and self._thread.is_alive()):
            return
        history = journal.history
        collect = history.epoch % GARBAGE_EVERY == 0
        jobs = self._choose(history)
        if not jobs and not collect:
            return
        if self._background:
            self._thread = threading.Thread(
                target=self._round,
                args=(journal, history, jobs, collect),
                name="millstream-upkeep",
                daemon=True,
            )
            self._thread.start()
        else:
            self._round(journal, history, jobs, collect)

    def _choose(self, history: History) -> list[tuple[Job, Maker, int]]:
        manifest, _ = history.manifest.edited(self.edits_for(history.manifest))
        jobs: list[tuple[Job, Maker, int]] = []
        for step in self._graph.steps:
            for slot, owned in history.tables[step.name].ranges.items():
                for state in step.states:
                    job = choose(manifest, Family(step.name, state), owned, self._budget)
                    if job is not None:
                        jobs.append((job, Maker(history.generation, history.epoch, "c", self._next_number), slot))
                        self._next_number += 1
        return jobs

    def _round(self, journal: Journal, history: History, jobs: list[tuple[Job, Maker, int]], collect: bool) -> None:
        try:
            with self._lock:
                self._running = {maker.number for _, maker, _ in jobs}
            for item in jobs:
                if self._stopped:
                    return
                [edit] = self._executor.compact([item])
                with self._lock:
                    self._finished[item[1].number] = edit
                    self._running.discard(item[1].number)
                    self.compactions += 1
            if collect:
                self.collect(journal, history)
            self.trouble = None
        except Exception as error:  # rule 3: shown, never fatal
            if not self._stopped:
                self.trouble = f"{type(error).__name__}: {error}"
                _LOG.warning("upkeep failed and will be tried again: %s", self.trouble)
        finally:
            with self._lock:
                self._running = set()

    def collect(self, journal: Journal, history: History) -> int:
        """Deletes what the journal has released; the number of objects."""
        with self._lock:
            live = self._running | set(self._finished)
        names = unneeded(self._store, history, live)
        names += journal.obsolete()
        self._store.delete(names)
        return len(names)

    def close(self) -> None:
        """Lets no further round start and waits for the running one."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join(timeout=30)
