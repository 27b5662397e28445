"""Modifying: from a command to a version that can be run, beside the epochs; and back, if its first epoch fails.

Rules
-----
- Nothing of the running version is touched. A candidate is made from it, checked, and tried on workers, while epochs go
  on; what came of that is a fact for the next plan to decide from (`protocol.steering`).
- Preparing is idempotent: a driver that takes over prepares what its predecessor had under way anew, and so does the
  next epoch where the store could not be reached.
- A candidate whose first epoch failed in user code is not tried again. One whose epoch Spark failed is, a few times.
- All versions since the query's first can be made again: rewrites are stored by hash, and the journal names them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial

import msgspec
import pyarrow as pa

from millstream.engine.sample import Samples
from millstream.engine.shipping import ensure, load
from millstream.engine.version import Version, Workshop
from millstream.errors import MillstreamError, StoreUnavailable, UserError
from millstream.model.change import Calls
from millstream.model.graph import Graph, Step, differences
from millstream.model.kinds import State
from millstream.model.query import SourceNode
from millstream.model.rewrite import Rewrite, rewritten
from millstream.model.transfers import Transfers, inverse, transfers
from millstream.protocol.epochs import History
from millstream.protocol.manifest import Family
from millstream.protocol.modification import Candidate, Changed, Modification, missing_since
from millstream.store.code import get_code, put_code
from millstream.store.forms import NO_FORMS, sealed, unpacked
from millstream.store.forms import Forms as StateForms
from millstream.store.objects import ObjectStore

_LOG = logging.getLogger("millstream")

MAX_TRIES = 2
"""How often Spark may fail the first epoch of a modification."""
MAX_PLANS = 3
"""How often it may be planned in all, by one driver after the other: what ends the driver must not end each."""


class Modifier:
    """The versions of one driver: the one that runs, and those that are being prepared."""

    def __init__(
        self,
        store: ObjectStore,
        version: Version,
        workshop: Workshop,
        background: bool,
        clock: Callable[[], int],
        limit_s: float,
    ) -> None:
        self._limit_s, self._begun = limit_s, dict[int, float]()
        self._store, self.workshop, self._background, self._clock = store, workshop, background, clock
        self.version = version
        """The one that runs."""
        self._samples: Samples = {}
        self._lock = threading.Lock()
        self._candidates: dict[int, Candidate] = {}
        self._versions: dict[int, Version] = {}
        self._failed: dict[int, int] = {}

    # -- at a start

    def catch_up(self, history: History) -> None:
        """Goes on with the graph that the store was left with.

        The query that is given may be that graph, or any that it was before: then what has been modified since is
        applied to it again. Any other is refused.
        """
        self._samples = history.samples
        if history.graph is None:
            return
        version = self.version
        changed = differences(history.graph, version.graph.describe())
        since = missing_since(history.modified, version.digest, version.code)
        if changed and not since:
            often = f", modified {history.version} times since" if history.modified else ""
            raise UserError(
                f"the query {version.graph.name!r} differs from the one that wrote the store {self._store.uri}{often}:"
                "\n  "
                + "\n  ".join(changed)
                + "\nState of the old graph would be misread or lost. Start the old graph, "
                "or use a new store."
            )
        for applied in since or ():
            self.version, _, _ = self._built(self.version, applied.code)
            if self.version.digest != applied.after:
                raise UserError(
                    f"modification {applied.number} of the query {self.version.graph.name!r}, applied again, gives "
                    "another graph than it did; start the query as it was when it was modified, or as it is now"
                )
        if history.modified and history.modified[-1].forms:
            forms, bundles = self._stored_forms(history.modified[-1].forms)
            ensure(self._store, bundles)  # what converts values may be from there, even if the query's own code is not
            version = self.version
            bundles = tuple(dict.fromkeys((*version.bundles, *bundles)))
            self.version = self.workshop.build(version.query, forms, bundles, version.handed)

    # -- while it runs

    def consider(self, asked: Mapping[int, object], history: History) -> dict[int, Candidate]:
        """Prepares the modifications among these commands, and forgets all others; how far each has come."""
        wanted = {
            number: ask
            for number, ask in asked.items()
            if isinstance(ask, Modification) and ask.version == history.version
        }
        with self._lock:
            for number in [number for number in self._candidates if number not in wanted]:
                del self._candidates[number]
                self._versions.pop(number, None)
            for number, known in self._candidates.items():
                if known.state == "proposed" and time.monotonic() - self._begun[number] > self._limit_s:
                    reason = f"its code was not loaded and its graph not checked within {self._limit_s:g} s"
                    self._candidates[number] = self._reached(number, Candidate("aborted", reason))
            fresh = [number for number in wanted if number not in self._candidates]
            self._begun = {number: self._begun.get(number, time.monotonic()) for number in wanted}
            self._candidates.update({number: Candidate("proposed") for number in fresh})
            for number in [number for number in fresh if history.tried.get(number, 0) >= MAX_PLANS]:
                fresh.remove(number)
                reason = f"its first epoch was begun {MAX_PLANS} times and never ended: each time the driver was lost"
                self._candidates[number] = Candidate("rolled back", reason)
        for number in fresh:
            if self._background:
                threading.Thread(
                    target=self._prepare, args=(number, wanted[number]), name="millstream-modify", daemon=True
                ).start()
            else:
                self._prepare(number, wanted[number])
        with self._lock:
            return dict(self._candidates)

    def seen(self, samples: Samples, other: Iterable[str]) -> None:
        """Takes what an epoch has seen of its sources, and forgets what was seen of those that are others now."""
        kept = {name: few for name, few in self._samples.items() if name not in set(other)}
        self._samples = {**kept, **samples}

    def of(self, changed: Changed | None) -> Version:
        """The version that an attempt runs."""
        if changed is None:
            return self.version
        with self._lock:
            return self._versions[changed.number]

    def converting(self, history: History) -> dict[str, int]:
        """How many bytes of each state, as `step.state`, are of another type than it has now; nothing of those that are
        done."""
        found = {}
        for (step, state), data in self.version.forms.items():
            left = history.manifest.bytes_below(Family(step, state), unpacked(data).current)
            if left:
                found[f"{step}.{state}"] = left
        return found

    def failed(self, changed: Changed, reason: str, by_user: bool) -> None:
        """An attempt with a modification was aborted."""
        with self._lock:
            count = self._failed[changed.number] = self._failed.get(changed.number, 0) + 1
            if by_user or count >= MAX_TRIES:
                self._candidates[changed.number] = self._reached(changed.number, Candidate("rolled back", reason))

    def brought(self, number: int) -> list[SourceNode]:
        """The sources that a modification brings, once it is validated."""
        with self._lock:
            changed, version = self._candidates.get(number, Candidate("")).changed, self._versions.get(number)
        if changed is None or version is None:
            return []
        return [version.query.sources[name] for name in changed.brings]

    def aborted(self, number: int, reason: str) -> bool:
        """What a modification needs cannot be had. Whether it was under way."""
        with self._lock:
            known = number in self._candidates
            if known:
                self._candidates[number] = self._reached(number, Candidate("aborted", reason))
            return known

    def committed(self, changed: Changed) -> None:
        """The first epoch of a modification is committed."""
        with self._lock:
            self.version = self._versions.pop(changed.number)
            self._candidates.clear()
            self._versions.clear()

    # -- preparing

    def _prepare(self, number: int, ask: Modification) -> None:
        before = self.version
        try:
            version, rewrite, moved = self._built(before, ask.code)
            undo = inverse(before.graph, version.graph, before.query, version.query, rewrite, moved)
            stored = ("", "")
            if not ask.trial:
                undone_by = "" if undo is None else put_code(self._store, self.workshop.pack(undo))
                stored = (undone_by, put_code(self._store, _packed(version)) if version.forms else "")
            changed = _changed(number, ask, before, version, rewrite, moved, *stored)
            self._note(number, before, Candidate("validated", changed=changed), version)
            trouble = self.workshop.try_out(version, self._samples if ask.rehearse else {})
            state = Candidate("aborted", trouble) if trouble else Candidate("prepared", changed=changed)
        except StoreUnavailable as error:
            _LOG.warning("modification %d cannot be prepared now: %s", number, error)
            self._forget(number)
            return
        except MillstreamError as error:
            state = Candidate("aborted", str(error))
        except Exception as error:  # whatever loading or constructing the user's code raises
            state = Candidate("aborted", f"its code cannot be used: {type(error).__name__}: {error}")
        self._note(number, before, state)

    def _reached(self, number: int, candidate: Candidate) -> Candidate:
        """A candidate that has come to another state, with the time."""
        before = self._candidates.get(number, Candidate("")).reached_ms
        return replace(candidate, reached_ms={**before, candidate.state: self._clock()})

    def _forget(self, number: int) -> None:
        """The next epoch prepares it anew."""
        with self._lock:
            self._candidates.pop(number, None)
            self._versions.pop(number, None)

    def _note(self, number: int, before: Version, candidate: Candidate, version: Version | None = None) -> None:
        with self._lock:
            known = self._candidates.get(number)
            if known is not None and known.state != "aborted" and self.version is before:
                self._candidates[number] = self._reached(number, candidate)
                if version is not None:
                    self._versions[number] = version

    def _built(self, before: Version, code: str) -> tuple[Version, Rewrite, Transfers]:
        """A version with a stored rewrite applied to it, and what becomes of the state."""
        loaded = self.workshop.unpack(get_code(self._store, code))
        rewrite = loaded.rewrite(before.query, partial(load, self._store)) if isinstance(loaded, Calls) else loaded
        bundles = tuple(dict.fromkeys((*before.bundles, *rewrite.bundles)))
        query = rewritten(before.query, rewrite)
        put = {name for kind in ("steps", "maps") for name in rewrite.put.get(kind, ())}
        names = {rewrite.renamed.get(name, name) for name in before.handed}
        handed = frozenset(names | (put - set(rewrite.rewired)))
        version = self.workshop.build(query, {}, bundles, handed)
        moved = transfers(before.graph, version.graph, rewrite)
        forms = self._forms(before, version, moved)
        if forms:
            version = self.workshop.build(query, forms, bundles, handed)
        return version, rewrite, moved

    def _forms(self, before: Version, after: Version, moved: Transfers) -> dict[tuple[str, str], bytes]:
        """The forms of all states of a new version: those of the old one, under their new names, and one more for each
        whose type changes. Where state begins anew under a name that had forms, their number goes on."""
        kept = {address: data for address, data in before.forms.items() if address not in moved.families}
        for old, new in moved.families.items():
            if new is not None and old in before.forms:
                kept[new] = before.forms[old]
        for address, lift in moved.lifts.items():
            kind, known = stored_type(after.graph, address), unpacked(kept.get(address, b""))
            kept[address] = self.workshop.pack_forms(known.then(lift, kind))
        for address in moved.fresh:
            if address in before.forms:
                count = unpacked(before.forms[address]).current + 1
                kept[address] = self.workshop.pack_forms(sealed(stored_type(after.graph, address), count))
        return kept

    def _stored_forms(self, code: str) -> tuple[dict[tuple[str, str], bytes], tuple[str, ...]]:
        """Forms, and the bundles that must be there before they are looked into."""
        forms, bundles = _read_forms(self._store, code)
        return {(step, state): data for step, state, _, data in forms}, bundles


def _packed(version: Version) -> bytes:
    forms = [(step, state, unpacked(data).current, data) for (step, state), data in sorted(version.forms.items())]
    return msgspec.msgpack.encode((forms, version.bundles))


def _read_forms(store: ObjectStore, code: str) -> tuple[list[tuple[str, str, int, bytes]], tuple[str, ...]]:
    data = get_code(store, code)
    return msgspec.msgpack.decode(data, type=tuple[list[tuple[str, str, int, bytes]], tuple[str, ...]])


def counted_forms(store: ObjectStore, history: History, step: Step, state: str) -> StateForms:
    """The forms of a state for one who does not run users' code: only how many there are."""
    code = history.modified[-1].forms if history.modified else ""
    for of_step, of_state, count, _ in _read_forms(store, code)[0] if code else ():
        if (of_step, of_state) == (step.name, state):
            return sealed(step.states[state].stored_type, count)
    return NO_FORMS


def stored_type(graph: Graph, address: tuple[str, str]) -> pa.DataType:
    """The type of the values of a family, as they are stored."""
    declared = next(step for step in graph.steps if step.name == address[0]).declared(address[1])
    return declared.stored_type if isinstance(declared, State) else declared.arrow_type


def _changed(
    number: int,
    ask: Modification,
    before: Version,
    version: Version,
    rewrite: Rewrite,
    moved: Transfers,
    inverse: str,
    forms: str,
) -> Changed:
    families = tuple(
        (Family(*old), None if new is None else Family(*new)) for old, new in sorted(moved.families.items())
    )
    were = {name: moved.steps.get(name, name) for name in before.code}
    replaced = {
        name: before.code[name]
        for name, to in sorted(were.items())
        if to in version.code and version.code[to] != before.code[name]
    }
    return Changed(
        number,
        ask.code,
        before.digest,
        version.digest,
        ask.text[:2000],
        families,
        moved.steps,
        replaced,
        rewrite.touched,
        inverse,
        "\n".join(moved.lines())[:4000],
        forms,
        rewrite.taken.get("maps", ()),
        {
            **{name: "" for name in version.query.sources if name not in before.query.sources},
            **{name: None for name in before.query.sources if name not in version.query.sources},
        },
    )
