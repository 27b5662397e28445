"""The journal: one sequence of entries `journal/<k>`, each a conditional create.

Rules
-----
- Entry k is made only by a driver that has read entries 0..k-1. Whoever finds entry k taken by another has been
  fenced by a newer claim, and stops (G3). "Taken" is judged by the nonce inside: the reply to our own create may
  have been lost, in which case the entry is ours.
- Every entry carries the digest of the one before it and ends with a digest of itself. A truncated, altered or
  missing entry is named and refused, never skipped (G6).
- A snapshot is the sum of all entries up to one that names it. It only saves reading: it counts only because that
  entry names it and its digest. One is made every `SNAPSHOT_EVERY` entries, whatever they are, between two attempts:
  a driver that fails at every start must not make the next start slower without end.
- A snapshot that is damaged is passed over: the one before it counts, and the entries since, as long as they are there.
  The next driver writes another one with its first entry.
- Whoever only looks goes on from where it was, and begins again if it has not looked for `LOOK_AGAIN_S`.
- Old entries are deleted behind a snapshot, so a driver that slept could find "its" number free again. Therefore a
  driver whose last look is older than `LOOK_AGAIN_S` lists the journal after it has written: if there is anything
  beyond its entry, it has been fenced and its entry counts for nobody. Entries are kept at least `KEEP_S` after
  they were written, which is much longer, so a driver that did not sleep need not look.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
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

FORMAT_VERSION = 6
SNAPSHOT_EVERY = 64
LOOK_AGAIN_S = 60.0
KEEP_S = 900.0

_LOG = logging.getLogger("millstream")

_KINDS: dict[str, Any] = {"Claim": Claim, "Plan": Plan, "Abort": Abort, "Commit": Commit}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds an entry in its object. `epoch` is the last committed one, with this entry counted."""

    number: int
    kind: str
    generation: int
    nonce: str
    previous: str
    at_ms: int
    epoch: int
    snapshot: str | None
    body: Any


class JournalReader:
    """The journal as one sees it who only looks. `told` is called with each entry that is read, in order.

    >>> from millstream.store.objects import open_store
    >>> store = open_store("memory://")
    >>> driver = Journal.open(store)
    >>> driver.claim()
    >>> reader = JournalReader.look(store)
    >>> driver.claim()
    >>> reader.follow()
    >>> reader.history.generation
    2
    """

    def __init__(self, store: ObjectStore, told: Callable[[Envelope], None] = lambda envelope: None) -> None:
        self.store, self._told = store, told
        self.store_id = ""
        self._forget()
        self._looked_at = _clock()

    def _forget(self) -> None:
        self.history = History()
        self.next_number = 0
        self._previous = ""
        self._snapshot_at = -1
        self._damaged: set[int] = set()

    @classmethod
    def look(cls, store: ObjectStore, told: Callable[[Envelope], None] = lambda envelope: None) -> JournalReader:
        """Reads the journal of a store that has one. Writes nothing, whatever it finds."""
        reader = cls(store, told)
        found = stored_format(store)
        if found is not None:
            reader.store_id = found
            reader._read()
        if reader.next_number == 0:
            raise UserError(f"there is no query in the store {store.uri}: none was ever started there")
        return reader

    def follow(self) -> None:
        """Reads what was written since. One who has not looked for a while may have missed that entries were deleted,
        and begins again."""
        began = _clock()
        if began - self._looked_at > LOOK_AGAIN_S:
            self._forget()
            self._read()
        else:
            while (data := self.store.get(names.journal_entry(self.next_number))) is not None:
                self._advance(*self._decoded(self.next_number, data))
        self._looked_at = began

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
        damaged: DamagedObject | None = None
        for envelope, digest in self._snapshots(numbers):
            if until is not None and envelope.epoch > until:
                continue
            try:
                self.history = read_snapshot(self.store, envelope.snapshot or "")
            except DamagedObject as error:
                damaged = damaged or error
                self._damaged.add(envelope.number)
                _LOG.warning(
                    "%s is damaged: found %s, expected %s. What is before it in the journal is read instead, and the "
                    "next driver writes another snapshot",
                    *(error.name, error.found, error.expected),
                )
                continue
            self.next_number, self._previous, self._snapshot_at = envelope.number + 1, digest, envelope.number
            self._told(envelope)
            return
        if numbers and 0 not in numbers:
            if damaged is not None:  # and what was before it has been deleted
                raise damaged
            raise DamagedObject(names.journal_entry(0), "nothing", "the first journal entry, or a snapshot beyond it")

    def _snapshots(self, numbers: set[int]) -> Iterator[tuple[Envelope, str]]:
        """Of the entries with these numbers those that name a snapshot, newest first, each with its digest.

        A snapshot without an entry is of a driver that was fenced, or died or failed in between; there may be many.
        """
        written = {names.snapshot_number(item.name) for item in self.store.list(names.SNAPSHOTS)}
        for number in sorted(written & numbers, reverse=True):
            envelope, digest = self._entry(number, chained=False)
            if envelope.snapshot:
                yield envelope, digest

    def _entry(self, number: int, chained: bool = True) -> tuple[Envelope, str]:
        name = names.journal_entry(number)
        data = self.store.get(name)
        if data is None:
            raise DamagedObject(name, "nothing", "a journal entry: later ones exist")
        return self._decoded(number, data, chained)

    def _decoded(self, number: int, data: memoryview, chained: bool = True) -> tuple[Envelope, str]:
        name = names.journal_entry(number)
        envelope, digest = decode_entry(name, bytes(data))
        if envelope.number != number:
            raise DamagedObject(name, f"entry {envelope.number}", f"entry {number}")
        if chained and envelope.previous != self._previous:
            raise DamagedObject(name, f"a successor of {envelope.previous}", f"a successor of {self._previous}")
        return envelope, digest

    def _advance(self, envelope: Envelope, digest: str) -> None:
        self.history = self.history.after(envelope.body)
        self.next_number, self._previous = envelope.number + 1, digest
        if envelope.snapshot and envelope.number not in self._damaged:
            self._snapshot_at = envelope.number
        self._told(envelope)


class Journal(JournalReader):
    """The journal as one driver sees and writes it.

    >>> from millstream.store.objects import open_store
    >>> journal = Journal.open(open_store("memory://"))
    >>> journal.claim()
    >>> journal.history.generation
    1
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._generation = Generation(0)

    @classmethod
    def open(cls, store: ObjectStore) -> Journal:
        """Reads the journal of a store, making the store if it is empty. Claims nothing."""
        journal = cls(store)
        journal.store_id = check_format(store)
        journal._read()
        return journal

    # -- writing

    def claim(self, fetch_limit: int = 0, beat_s: float = 1.0) -> None:
        """Takes the store over: every older driver is fenced from here on."""
        for _ in range(64):
            generation = Generation(self.history.generation + 1)
            self._generation = generation
            try:
                self.append(Claim(generation, f"{socket.gethostname()}:{os.getpid()}", fetch_limit, beat_s))
                return
            except Fenced:  # another driver claimed at the same moment: read on and claim above it
                self._forget()
                self._read()
        raise ConflictError(f"could not claim the store {self.store.uri}: other drivers keep claiming it")

    def append(self, entry: Entry) -> None:
        """Adds an entry. Raises `Fenced` if a newer driver has the store; then nothing was added."""
        after = self.history.after(entry)  # an impossible entry is our bug: found before it is written
        due = after.plan is None and (self.next_number - self._snapshot_at >= SNAPSHOT_EVERY or bool(self._damaged))
        envelope = Envelope(
            number=self.next_number,
            kind=type(entry).__name__,
            generation=self._generation,
            nonce=secrets.token_hex(8),
            previous=self._previous,
            at_ms=time.time_ns() // 1_000_000,
            epoch=after.epoch,
            snapshot=_write_snapshot(self.store, self.next_number, after) if due else None,
            body=entry,
        )
        data, digest = encode_entry(envelope)
        self._create(envelope, data)
        self.history, self.next_number, self._previous = after, envelope.number + 1, digest
        if due:
            self._snapshot_at, self._damaged = envelope.number, set()

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

    def check_ours(self) -> None:
        """Raises `Fenced` if another driver has written since. Not to be called beside an `append`."""
        name = names.journal_entry(self.next_number)
        if self.store.get(name) is not None:
            raise self._fenced(name)

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

    # -- letting go

    def obsolete(self) -> list[str]:
        """Entries and snapshots that no restart reads any more, and that are old enough for rule 4.

        The last snapshot that lies before every retained epoch stays, with all entries after it, so that any
        retained epoch can be read. It is read first: once the entries before it are gone, all depends on it.
        """
        oldest = self.history.oldest
        entries = {names.entry_number(item.name): item for item in self.store.list(names.JOURNAL)}
        snapshots = self._snapshots(set(entries))
        keep_from = 0
        for envelope, _ in snapshots:
            if envelope.epoch <= oldest:
                try:
                    read_snapshot(self.store, envelope.snapshot or "")
                except DamagedObject:  # one before it must do, and all entries since
                    continue
                keep_from = envelope.number
                break
        old = [item.name for number, item in entries.items() if number < keep_from and item.age_s > KEEP_S]
        return old + [
            item.name
            for item in self.store.list(names.SNAPSHOTS)
            if item.age_s > KEEP_S and names.snapshot_number(item.name) < keep_from
        ]


def check_format(store: ObjectStore) -> str:
    """Writes format version and id into an empty store; refuses a store of another version. Returns the id."""
    found = stored_format(store)
    if found is None:
        if any(True for _ in store.list(names.JOURNAL)):
            raise DamagedObject(names.FORMAT, "nothing", "the format version of a store with a journal")
        line = msgspec.json.encode({"millstream": FORMAT_VERSION, "id": secrets.token_hex(8)})
        store.create(names.FORMAT, signed(line))
        found = stored_format(store)
    return found or ""


def stored_format(store: ObjectStore) -> str | None:
    """The id of a store, or None if it has no format yet; refuses one of another version."""
    found = store.get(names.FORMAT)
    if found is None:
        return None
    line, _, digest = bytes(found).partition(b"\n")
    try:
        decoded = msgspec.json.decode(line)
        version, store_id = decoded["millstream"], str(decoded.get("id", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedObject(names.FORMAT, repr(line[:40]), '{"millstream": <version>, "id": ...}') from error
    if (digest or version == FORMAT_VERSION) and bytes(found) != signed(line):  # versions before 6 have none
        told = digest.decode(errors="replace").strip()
        raise DamagedObject(names.FORMAT, f"bytes with digest {digest_of(line)}", f"digest {told!r}")
    if version != FORMAT_VERSION:
        raise UserError(
            f"the store {store.uri} has format version {version}, this Millstream reads version {FORMAT_VERSION}. "
            "Use the Millstream release that wrote it, or a new store."
        )
    return store_id


def history_at(store: ObjectStore, epoch: Epoch) -> History:
    """The history as of a retained epoch, read from the journal."""
    reader = JournalReader(store)
    reader._read(until=epoch)
    return reader.history


def _clock() -> float:
    """Seconds that also pass while the machine is suspended, where the system can tell."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


# -- bytes ---------------------------------------------------------------------------------------------------


def digest_of(data: bytes | memoryview) -> str:
    """The digest that names the exact bytes of an object."""
    return xxhash.xxh3_64_hexdigest(data)


def signed(line: bytes) -> bytes:
    """A line of JSON, and one with its digest."""
    return line + b"\n" + digest_of(line).encode() + b"\n"


def encode_entry(envelope: Envelope) -> tuple[bytes, str]:
    """An entry's bytes, and their digest."""
    line = msgspec.json.encode(envelope)
    return signed(line), digest_of(line)


def decode_entry(name: str, data: bytes) -> tuple[Envelope, str]:
    """Reads an entry back; raises `DamagedObject` if a single bit is not as written."""
    line, _, rest = data.partition(b"\n")
    digest = digest_of(line)
    if data != signed(line):
        raise DamagedObject(name, f"bytes with digest {digest}", f"digest {rest.decode(errors='replace').strip()!r}")
    raw = msgspec.json.decode(line)
    if raw["kind"] not in _KINDS:
        raise UserError(
            f"journal entry {name!r} is a {raw['kind']!r}, which this release does not know; use a newer one"
        )
    body = msgspec.convert(raw["body"], _KINDS[raw["kind"]], str_keys=True)
    return Envelope(**{**raw, "body": body}), digest


def _write_snapshot(store: ObjectStore, number: int, history: History) -> str:
    """Stores the sum up to entry `number`; the reference by which that entry names it."""
    name, data = names.snapshot(number), _encode_history(history)
    store.put(name, data)
    return f"{name}#{digest_of(data)}"


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
        "attempts": history.attempts,
        "clock_ms": history.clock_ms,
        "clocks": history.clocks,
        "watermarks": history.watermarks,
        "late": history.late,
        "dead_letters": history.dead_letters,
        "passed": history.passed,
        "control": history.control,
        "outcomes": history.outcomes,
        "workers": history.workers,
        "fetch_limit": history.fetch_limit,
        "owner": history.owner,
        "beat_s": history.beat_s,
        "modified": history.modified,
        "samples": history.samples,
        "tried": history.tried,
        "took_ms": history.took_ms,
        "replicas": history.replicas,
        "rates": history.rates,
        "idle": history.idle,
        "written": history.written,
        "spark_offsets": history.spark_offsets,
    }
    return msgspec.json.encode(flat)


def read_snapshot(store: ObjectStore, reference: str) -> History:
    """The history in a snapshot; `reference` is its name and digest, as the entry that names it gives them."""
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
