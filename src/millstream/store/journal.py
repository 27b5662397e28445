"""The journal: one sequence of entries `journal/<k>`, each a conditional create.

Rules
-----
- Entry k is made only by a driver that has read entries 0..k-1. Whoever finds entry k taken by another has been
  fenced by a newer claim, and stops (G3). "Taken" is judged by the nonce inside: the reply to our own create may
  have been lost, in which case the entry is ours.
- Every entry carries the digest of the one before it and ends with a digest of itself. A truncated, altered or
  missing entry is named and refused, never skipped (G6).
- A snapshot is the sum of all entries up to a commit that names it. It only saves reading: it counts only because
  that commit names it and its digest.
- Old entries are deleted behind a snapshot, so a driver that slept could find "its" number free again. Therefore a
  driver whose last look is older than `LOOK_AGAIN_S` lists the journal after it has written: if there is anything
  beyond its entry, it has been fenced and its entry counts for nobody. Entries are kept at least `KEEP_S` after
  they were written, which is much longer, so a driver that did not sleep need not look.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import xxhash

from millstream.errors import (
    ConflictError,
    DamagedObject,
    Fenced,
    StoreUnavailable,
    UserError,
)
from millstream.protocol.epochs import Abort, Claim, Commit, Entry, Epoch, Generation, History, Plan
from millstream.protocol.manifest import Family, Manifest, Piece
from millstream.store import names
from millstream.store.objects import ObjectStore

FORMAT_VERSION = 1
SNAPSHOT_EVERY = 32
LOOK_AGAIN_S = 60.0
KEEP_S = 900.0

_KINDS: dict[str, Any] = {"Claim": Claim, "Plan": Plan, "Abort": Abort, "Commit": Commit}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds an entry in its object."""

    number: int
    kind: str
    generation: int
    nonce: str
    previous: str
    at_ms: int
    body: Any


class Journal:
    """The journal as one driver sees and writes it.

    >>> from millstream.store.objects import open_store
    >>> journal = Journal.open(open_store("memory://"))
    >>> journal.claim()
    >>> journal.history.generation
    1
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.store_id = ""
        self.history = History()
        self.next_number = 0
        self._previous = ""
        self._generation = Generation(0)
        self._looked_at = _clock()

    # -- reading

    @classmethod
    def open(cls, store: ObjectStore) -> Journal:
        """Reads the journal of a store, making the store if it is empty. Claims nothing."""
        journal = cls(store)
        journal.store_id = check_format(store)
        journal._read()
        return journal

    def _read(self, until: Epoch | None = None) -> None:
        """Reads on from the newest fitting snapshot, to the end or to the commit of epoch `until`."""
        self._looked_at = _clock()
        numbers = {names.entry_number(item.name) for item in self.store.list(names.JOURNAL)}
        self._start_from_snapshot(numbers, until)
        for number in range(self.next_number, max(numbers, default=-1) + 1):
            if until is not None and self.history.epoch >= until:
                break
            self._advance(*self._entry(number))

    def _start_from_snapshot(self, numbers: set[int], until: Epoch | None) -> None:
        for number, commit, digest in self._snapshots():
            if until is None or commit.epoch <= until:
                self.history = read_snapshot(self.store, commit.snapshot or "")
                self.next_number, self._previous = number + 1, digest
                return
        if numbers and 0 not in numbers:
            raise DamagedObject(names.journal_entry(0), "nothing", "the first journal entry, or a snapshot beyond it")

    def _snapshots(self) -> Iterator[tuple[int, Commit, str]]:
        """The commits that name a snapshot, newest first: entry number, commit, digest of the entry."""
        for name in sorted((item.name for item in self.store.list(names.SNAPSHOTS)), reverse=True):
            number = names.snapshot_number(name)
            if self.store.get(names.journal_entry(number)) is None:
                continue  # written by a driver that was fenced or died before its commit
            envelope, digest = self._entry(number, chained=False)
            commit = envelope.body
            if isinstance(commit, Commit) and commit.snapshot and commit.snapshot.startswith(name + "#"):
                yield number, commit, digest

    def _entry(self, number: int, chained: bool = True) -> tuple[Envelope, str]:
        name = names.journal_entry(number)
        data = self.store.get(name)
        if data is None:
            raise DamagedObject(name, "nothing", "a journal entry: later ones exist")
        envelope, digest = decode_entry(name, bytes(data))
        if envelope.number != number:
            raise DamagedObject(name, f"entry {envelope.number}", f"entry {number}")
        if chained and envelope.previous != self._previous:
            raise DamagedObject(name, f"a successor of {envelope.previous}", f"a successor of {self._previous}")
        return envelope, digest

    def _advance(self, envelope: Envelope, digest: str) -> None:
        self.history = self.history.after(envelope.body)
        self.next_number, self._previous = envelope.number + 1, digest

    # -- writing

    def claim(self) -> None:
        """Takes the store over: every older driver is fenced from here on."""
        for _ in range(64):
            generation = Generation(self.history.generation + 1)
            self._generation = generation
            try:
                self.append(Claim(generation, f"{socket.gethostname()}:{os.getpid()}"))
                return
            except Fenced:  # another driver claimed at the same moment: read on and claim above it
                self.history, self.next_number, self._previous = History(), 0, ""
                self._read()
        raise ConflictError(f"could not claim the store {self.store.uri}: other drivers keep claiming it")

    def append(self, entry: Entry) -> None:
        """Adds an entry. Raises `Fenced` if a newer driver has the store; then nothing was added."""
        after = self.history.after(entry)  # an impossible entry is our bug: found before it is written
        envelope = Envelope(
            number=self.next_number,
            kind=type(entry).__name__,
            generation=self._generation,
            nonce=secrets.token_hex(8),
            previous=self._previous,
            at_ms=time.time_ns() // 1_000_000,
            body=entry,
        )
        data, digest = encode_entry(envelope)
        self._create(envelope, data)
        self.history, self.next_number, self._previous = after, envelope.number + 1, digest

    def _create(self, envelope: Envelope, data: bytes) -> None:
        name = names.journal_entry(envelope.number)
        began = _clock()
        try:
            written = self.store.create(name, data)
        except StoreUnavailable:
            if not self._is_ours(name, envelope.nonce):
                raise
            written = True
        if not written and not self._is_ours(name, envelope.nonce):
            raise self._fenced(name)
        if _clock() - self._looked_at > LOOK_AGAIN_S:
            beyond = [item.name for item in self.store.list(names.JOURNAL) if item.name > name]
            if beyond:
                raise self._fenced(max(beyond))
        self._looked_at = began  # not now: this thread may have slept since

    def _is_ours(self, name: str, nonce: str) -> bool:
        data = self.store.get(name)
        return data is not None and decode_entry(name, bytes(data))[0].nonce == nonce

    def _fenced(self, name: str) -> Fenced:
        data = self.store.get(name)
        other = decode_entry(name, bytes(data))[0] if data is not None else None
        who = f"generation {other.generation}" if other else "a newer driver"
        if other is not None and isinstance(other.body, Claim):
            who += f" ({other.body.owner})"
        return Fenced(
            f"this driver (generation {self._generation}) has been replaced: {who} has claimed the store "
            f"{self.store.uri}. This one stops and leaves the store alone. If that was not meant, see that only one "
            "driver runs the query."
        )

    def commit(self, commit: Commit) -> None:
        """Appends a commit, with a snapshot every `SNAPSHOT_EVERY` epochs."""
        if (commit.epoch + 1) % SNAPSHOT_EVERY == 0:
            after = self.history.after(commit)
            commit = _with_snapshot(self.store, self.next_number, after, commit)
        self.append(commit)

    # -- letting go

    def obsolete(self) -> list[str]:
        """Entries and snapshots that no restart reads any more, and that are old enough for rule 4.

        The last snapshot that lies before every retained epoch stays, with all entries after it, so that any
        retained epoch can be read.
        """
        keep_from = self._oldest_needed_entry()
        old = [
            i.name
            for i in self.store.list(names.JOURNAL)
            if i.age_s > KEEP_S and names.entry_number(i.name) < keep_from
        ]
        return old + [
            item.name
            for item in self.store.list(names.SNAPSHOTS)
            if item.age_s > KEEP_S and names.snapshot_number(item.name) < keep_from
        ]

    def _oldest_needed_entry(self) -> int:
        oldest = self.history.oldest
        return next((number for number, commit, _ in self._snapshots() if commit.epoch <= oldest), 0)


def check_format(store: ObjectStore) -> str:
    """Writes format version and id into an empty store; refuses a store of another version. Returns the id."""
    found = store.get(names.FORMAT)
    if found is None:
        if any(True for _ in store.list(names.JOURNAL)):
            raise DamagedObject(names.FORMAT, "nothing", "the format version of a store with a journal")
        fresh = {"millstream": FORMAT_VERSION, "id": secrets.token_hex(8)}
        store.create(names.FORMAT, msgspec.json.encode(fresh) + b"\n")
        found = store.get(names.FORMAT) or memoryview(b"")
    try:
        decoded = msgspec.json.decode(bytes(found))
        version, store_id = decoded["millstream"], str(decoded.get("id", ""))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise DamagedObject(names.FORMAT, repr(bytes(found)[:40]), '{"millstream": <version>, "id": ...}') from error
    if version != FORMAT_VERSION:
        raise UserError(
            f"the store {store.uri} has format version {version}, this Millstream reads version {FORMAT_VERSION}. "
            "Use the Millstream release that wrote it, or a new store."
        )
    return store_id


def history_at(store: ObjectStore, epoch: Epoch) -> History:
    """The history as of a retained epoch, read from the journal."""
    reader = Journal(store)
    reader._read(until=epoch)
    return reader.history


def _clock() -> float:
    """Seconds that also pass while the machine is suspended, where the system can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


# -- bytes ---------------------------------------------------------------------------------------------------


def digest_of(data: bytes | memoryview) -> str:
    """The digest that names the exact bytes of an object."""
    return xxhash.xxh3_64_hexdigest(data)


def encode_entry(envelope: Envelope) -> tuple[bytes, str]:
    """An entry's bytes: one line of JSON and one line with the digest of the first."""
    line = msgspec.json.encode(envelope)
    digest = digest_of(line)
    return line + b"\n" + digest.encode() + b"\n", digest


def decode_entry(name: str, data: bytes) -> tuple[Envelope, str]:
    """Reads an entry back; raises `DamagedObject` if a single bit is not as written."""
    line, _, rest = data.partition(b"\n")
    digest = digest_of(line)
    if rest != digest.encode() + b"\n":
        raise DamagedObject(name, f"bytes with digest {digest}", f"digest {rest.decode(errors='replace').strip()!r}")
    raw = msgspec.json.decode(line)
    if raw["kind"] not in _KINDS:
        raise UserError(
            f"journal entry {name!r} is a {raw['kind']!r}, which this release does not know; use a newer one"
        )
    body = msgspec.convert(raw["body"], _KINDS[raw["kind"]])
    return Envelope(**{**raw, "body": body}), digest


def _with_snapshot(store: ObjectStore, number: int, history: History, commit: Commit) -> Commit:
    name = names.snapshot(number)
    data = _encode_history(history)
    store.put(name, data)
    return replace(commit, snapshot=f"{name}#{digest_of(data)}")


def _encode_history(history: History) -> bytes:
    flat = {
        "generation": history.generation,
        "spark_query": history.spark_query,
        "graph": history.graph,
        "tables": history.tables,
        "epoch": history.epoch,
        "oldest": history.oldest,
        "pieces": [piece for pieces in history.manifest.families.values() for piece in pieces.values()],
        "released": history.released,
        "recent": history.recent,
    }
    return msgspec.json.encode(flat)


def read_snapshot(store: ObjectStore, reference: str) -> History:
    """The history in a snapshot; `reference` is its name and digest, as the commit gives them."""
    name, _, expected = reference.partition("#")
    data = store.get(name)
    found = "nothing" if data is None else f"digest {digest_of(data)}"
    if data is None or digest_of(data) != expected:
        raise DamagedObject(name, found, f"digest {expected}")
    flat = msgspec.json.decode(bytes(data))
    families: dict[Family, dict[str, Piece]] = {}
    for piece in msgspec.convert(flat.pop("pieces"), list[Piece]):
        families.setdefault(piece.segment.family, {})[piece.segment.name] = piece
    history = msgspec.convert({**flat, "manifest": {"families": {}}}, History, strict=False)
    return replace(history, manifest=Manifest(families))
