"""Upkeep: compaction and garbage collection, beside the epochs and never inside one.

Rules
-----
- No epoch waits for upkeep, not for the choice of what to merge either: one round at a time runs in the background,
  and an epoch only picks up finished edits. (A compaction is a Spark task like any other, so it shares the workers'
  cores with the epoch; its budget bounds that.)
- Values of an older type are rewritten where nothing else calls for it, one merge in a round, and then upkeep rests for
  `REST` times as long: so that is never more than a part of what one core does, however much there is to rewrite.
- A finished compaction is an edit. The next plan applies it if its inputs are unchanged (`Manifest.admits`);
  otherwise it is dropped, and its output is garbage. Where replicas are kept, it waits a little for them to have its
  output as well: until then, they have what went in.
- What a compaction of this driver has made, or may be making, is never garbage: which ones are live is read *before*
  the history that says what they have become (G3).
- A failure of upkeep is remembered and shown, and never fails the query: the next round tries again. Garbage is
  collected before anything is compacted, so that a full disk can recover.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from millstream.engine.state import now_of
from millstream.engine.version import Version
from millstream.protocol.compaction import Job, choose
from millstream.protocol.epochs import History
from millstream.protocol.manifest import Edit, Family, Manifest, Piece
from millstream.protocol.replication import Recipe
from millstream.store.forms import unpacked
from millstream.store.garbage import clear_staging, old_commands, unneeded
from millstream.store.journal import Journal
from millstream.store.names import Maker
from millstream.store.objects import ObjectStore

if TYPE_CHECKING:
    from millstream.engine.driver import Executor

REST = 3.0
RECIPES = 32
AHEAD_S = 600.0
"""How long an edit waits for replicas to have its output."""
MOST_AHEAD = 64
"""How many edits of a slot wait at most: what waits is not read from, so state would fall into ever more pieces."""
GARBAGE_EVERY = 16
"""Epochs between two garbage collections: each lists the store."""

_LOG = logging.getLogger("millstream")


class Upkeep:
    """The background work of one driver."""

    def __init__(
        self,
        store: ObjectStore,
        version: Callable[[], Version],
        executor: Executor,
        budget: int,
        background: bool,
    ) -> None:
        self._store, self._version, self._executor, self._budget = store, version, executor, budget
        self._background = background
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._finished: dict[int, Edit] = {}  # by number of the compaction
        self._running: dict[int, Job] = {}
        self._made: dict[tuple[str, ...], tuple[Recipe, int, float]] = {}  # by what came out: slot, and when it did
        self.replicated: Callable[[int, Recipe], bool] = lambda slot, recipe: True
        """Whether the replicas of a slot have what came out of a compaction."""
        self._applied: deque[Recipe] = deque(maxlen=RECIPES)
        self._next_number = 0
        self._collected_at = 0
        self._turn = 0
        self._ended = threading.Event()
        self.trouble: str | None = None
        """What went wrong in the last round, if anything."""
        self.compactions = 0
        """How many compactions have finished."""

    def edits_for(self, manifest: Manifest, waiting: bool = False) -> tuple[Edit, ...]:
        """The finished edits that fit the manifest, for a plan to apply; those that wait for replicas only if they are
        asked for. Those that no longer fit are dropped."""
        with self._lock:
            fitting: list[Edit] = []
            whole = manifest  # with those that wait, too: others may be made from what they made
            for number, edit in list(self._finished.items()):
                if not whole.admits(edit):
                    del self._finished[number]
                    self._made.pop(_outputs(edit), None)
                    continue
                whole, _ = whole.edited([edit])
                if manifest.admits(edit) and (waiting or not self._waits(edit)):
                    manifest, _ = manifest.edited([edit])
                    fitting.append(edit)
            return tuple(fitting)

    def busy(self) -> frozenset[str]:
        """The segments that compactions are reading now, or have read: taking them up would make that work useless."""
        with self._lock:
            jobs = [*self._running.values(), *(recipe.job for recipe, _, _ in self._made.values())]
            return frozenset(piece.segment.name for job in jobs for piece in job.pieces)

    def _waits(self, edit: Edit) -> bool:
        recipe, slot, since = self._made.get(_outputs(edit), (None, 0, 0.0))
        if recipe is None or time.monotonic() - since >= AHEAD_S:
            return False
        waiting = sum(other == slot for _, other, _ in self._made.values())
        return waiting <= MOST_AHEAD and not self.replicated(slot, recipe)

    def recipes(self) -> tuple[Recipe, ...]:
        """How the last compactions can be done again, those that are not committed yet, too."""
        with self._lock:
            return (*self._applied, *(recipe for recipe, _, _ in self._made.values()))

    def ahead(self) -> dict[int, list[Piece]]:
        """What compactions have made for each slot that no epoch has taken up yet."""
        found: dict[int, list[Piece]] = {}
        with self._lock:
            for recipe, slot, _ in self._made.values():
                found.setdefault(slot, []).extend(Piece(made, made.covers) for made in recipe.outputs)
        return found

    def applied(self, edits: Sequence[Edit]) -> None:
        """These edits have been committed."""
        with self._lock:
            for edit in edits:
                made = self._made.pop(_outputs(edit), None)
                if made is not None:
                    self._applied.append(made[0])
            self._finished = {number: edit for number, edit in self._finished.items() if edit not in edits}

    def after_commit(self, journal: Journal) -> None:
        """Starts a round unless one runs."""
        if self._ended.is_set() or (self._thread is not None and self._thread.is_alive()):
            return
        if self._background:
            self._thread = threading.Thread(
                target=self._round_beside, args=(journal,), name="millstream-upkeep", daemon=True
            )
            self._thread.start()
        else:
            self._round(journal)

    def _choose(self, version: Version, history: History) -> list[tuple[Job, Maker, int]]:
        manifest, _ = history.manifest.edited(self.edits_for(history.manifest, waiting=True))
        jobs: list[tuple[Job, Maker, int]] = []
        for step in version.graph.steps:
            for state in step.families:
                family = Family(step.name, state)
                packed = version.forms.get(family, b"")
                current = unpacked(packed).current
                for slot, pieces in manifest.shares(family, history.tables[step.name]).items():
                    job = choose(family, pieces, self._budget, form=current)
                    if job is not None:
                        older = any(piece.segment.form != current for piece in job.pieces)
                        job = replace(job, now=now_of(step, state, history), forms=packed if older else b"")
                        jobs.append((job, Maker(history.generation, history.epoch, "c", self._next_number), slot))
                        self._next_number += 1
        return jobs

    def _in_turn(self, jobs: list[tuple[Job, Maker, int]]) -> list[tuple[Job, Maker, int]]:
        """All jobs that merge what has to be merged, and one of those that only rewrite; these take turns."""
        rewriting = [item for item in jobs if item[0].converts]
        chosen = [item for item in jobs if not item[0].converts]
        if rewriting:
            self._turn += 1
            chosen.append(rewriting[self._turn % len(rewriting)])
        return chosen

    def _round_beside(self, journal: Journal) -> None:
        try:
            self._round(journal)
        except Exception as error:  # choosing what to merge failed: nothing has been touched
            self.trouble = f"{type(error).__name__}: {error}"
            _LOG.exception("upkeep failed and will be tried again")

    def _round(self, journal: Journal) -> None:
        troubles: list[str] = []
        collect = journal.history.epoch - self._collected_at >= GARBAGE_EVERY
        if collect:
            self._collected_at = journal.history.epoch
            try:
                self.collect(journal)
            except Exception as error:
                troubles.append(f"{type(error).__name__}: {error}")
        version, history = self._version(), journal.history
        if history.graph != version.graph.describe():
            return  # it is being modified just now
        jobs = self._choose(version, history)
        if self._background:
            jobs = self._in_turn(jobs)
        if not jobs and not collect:
            return
        with self._lock:
            self._running = {maker.number: job for job, maker, _ in jobs}
        for item in jobs:
            number, began = item[1].number, time.monotonic()
            if not self._ended.is_set():
                try:
                    [edit] = self._executor.compact(version.spec, [item])
                    with self._lock:
                        self._finished[number] = edit
                        if not item[0].forms:  # what converts values may need code that agents have not
                            made = (Recipe(item[0], edit.outputs), item[2], time.monotonic())
                            self._made[_outputs(edit)] = made
                        self.compactions += 1
                except Exception as error:
                    troubles.append(f"{type(error).__name__}: {error}")
            with self._lock:
                self._running.pop(number, None)
            if self._background and item[0].converts:
                self._ended.wait(REST * (time.monotonic() - began))
        if not self._ended.is_set():
            self.trouble = "; ".join(dict.fromkeys(troubles)) or None
            if self.trouble:
                _LOG.warning("upkeep failed and will be tried again: %s", self.trouble)

    def collect(self, journal: Journal) -> int:
        """Deletes what the journal has released; the number of objects."""
        with self._lock:
            live = {*self._running, *self._finished}
        history = journal.history  # after `live`: what was finished then is live, or applied here
        names = unneeded(self._store, history, live)
        names += journal.obsolete()
        names += old_commands(self._store, history)
        self._store.delete(names)
        clear_staging(self._store)
        return len(names)

    def close(self) -> None:
        """Lets no further round start and waits for the running one."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=30)


def _outputs(edit: Edit) -> tuple[str, ...]:
    """What an edit is known by: the names of what came out."""
    return tuple(made.name for made in edit.outputs)
