"""What travels from a producer task to a slot: one payload, with the producer's receipt in its head.

Rules
-----
- Each producer sends every slot exactly one payload, empty or not.
- The receipt is a digest over everything the producer sends to all slots, made before anything is sent. Two payloads
  of one producer with different receipts come from two runs of it (G1).
- A part may be on its way to a later level: whoever receives it passes it on as it is, under its first sender's name.
- Reports travel in payloads, too, each to one slot only. They are not part of the receipt: a second run of a task
  writes objects of other names, and is still the same if it sends the same records.
- A payload has a bounded size. Larger bodies go through the store, and the payload holds their name and digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import pyarrow as pa
import xxhash

from millstream.errors import InvariantViolation
from millstream.protocol.epochs import Report
from millstream.protocol.time import Mark, SeenTimes
from millstream.store import names
from millstream.store.journal import digest_of
from millstream.store.objects import ObjectStore
from millstream.store.segments import read_checked

INLINE_LIMIT = 256 << 20
"""Bytes of one payload that travel through the shuffle; a Java array ends at 2 GiB, a worker's memory before that."""


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A body that went through the store."""

    name: str
    bytes: int
    digest: str


class Section(msgspec.Struct, frozen=True, array_like=True):
    """A record batch of one lane: `bytes` of them follow the head, or lie in the store."""

    lane: int
    producer: str
    bytes: int
    stored: Stored | None = None


class Head(msgspec.Struct, frozen=True, array_like=True):
    """Who sent a payload (level, then number among its producers), the receipt, and what is in it.

    `seen` is what a map task saw of event times; `watermarks` are those of sources and steps, as a host knows them.
    `samples` are a few records of each source that a map task read, `cpu_ms` its CPU time, and `unobserved` what it
    could not observe; the first slot gets these.
    """

    producer: str
    receipt: str
    sections: list[Section]
    reports: list[Report]
    seen: dict[str, SeenTimes] = {}
    watermarks: dict[str, Mark] = {}
    samples: dict[str, bytes] = {}
    cpu_ms: float = 0.0
    unobserved: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Part:
    """A record batch of a lane, and the producer that made it."""

    lane: int
    producer: str
    body: pa.Buffer | Stored

    @property
    def order(self) -> tuple[int, ...]:
        """Sorts parts by level and number of their producer."""
        return in_order(self.producer)

    def read(self, store: ObjectStore) -> pa.Buffer:
        """The message, from the store if that is where it is."""
        if isinstance(self.body, Stored):
            return read_checked(store, self.body.name, self.body.bytes, self.body.digest)
        return self.body


Parts = list[list[Part]]
"""What each slot is sent, in order."""


def encode(
    parts: Parts,
    producer: str,
    store: ObjectStore,
    maker: names.Maker,
    reports: Mapping[int, Sequence[Report]] | None = None,
    seen: Mapping[str, SeenTimes] | None = None,
    watermarks: Mapping[str, Mark] | None = None,
    inline_limit: int = INLINE_LIMIT,
    samples: Mapping[str, bytes] | None = None,
    cpu_ms: float = 0.0,
    unobserved: Mapping[str, str] | None = None,
) -> Iterator[bytes]:
    """The payload of each slot, in order of slots; `reports` by the slot that gets them."""
    found = buffers(parts, producer, store, maker, reports, seen, watermarks, inline_limit, samples, cpu_ms, unobserved)
    return map(b"".join, found)


def buffers(
    parts: Parts,
    producer: str,
    store: ObjectStore,
    maker: names.Maker,
    reports: Mapping[int, Sequence[Report]] | None,
    seen: Mapping[str, SeenTimes] | None,
    watermarks: Mapping[str, Mark] | None,
    inline_limit: int,
    samples: Mapping[str, bytes] | None = None,
    cpu_ms: float = 0.0,
    unobserved: Mapping[str, str] | None = None,
) -> Iterator[list[bytes | memoryview]]:
    """The payload of each slot, as buffers that need only be joined."""
    times = dict(seen or {}), dict(watermarks or {})
    receipt = _receipt(parts, msgspec.msgpack.encode(times))
    for slot, mine in enumerate(parts):
        sections, bodies, inline = [], [], 0
        for part in mine:
            body = part.body
            if isinstance(body, pa.Buffer) and inline + body.size > inline_limit:
                data = memoryview(body).cast("B")
                stored = Stored(names.overflow(maker, producer), body.size, digest_of(data))
                store.put(stored.name, data)
                body = stored
            if isinstance(body, Stored):
                sections.append(Section(part.lane, part.producer, 0, body))
            else:
                inline += body.size
                sections.append(Section(part.lane, part.producer, body.size))
                bodies.append(memoryview(body))
        told = list((reports or {}).get(slot, ()))
        observed = (dict(samples or {}), cpu_ms, dict(unobserved or {})) if slot == 0 else ()
        head = msgspec.msgpack.encode(Head(producer, receipt, sections, told, *times, *observed))
        padding = bytes(-len(head) % 8)  # so that columns of 8-byte values are aligned
        yield [len(head).to_bytes(8, "little"), head, padding, *bodies]


def _receipt(parts: Parts, times: bytes) -> str:
    state = xxhash.xxh3_64(times)
    for slot, mine in enumerate(parts):
        for part in mine:
            size = part.body.bytes if isinstance(part.body, Stored) else part.body.size
            state.update(f"{slot}:{part.lane}:{part.producer}:{size};".encode())
            state.update(part.body.digest.encode() if isinstance(part.body, Stored) else memoryview(part.body))
    return state.hexdigest()


def decode(payload: bytes | memoryview) -> tuple[Head, list[Part]]:
    """The head of a payload and its parts."""
    size = int.from_bytes(payload[:8], "little")
    head = msgspec.msgpack.decode(memoryview(payload)[8 : 8 + size], type=Head)
    whole = pa.py_buffer(payload)
    at = 8 + size + -size % 8
    parts = []
    for section in head.sections:
        body = section.stored or whole.slice(at, section.bytes)
        parts.append(Part(section.lane, section.producer, body))
        at += section.bytes
    if at != len(payload):
        raise InvariantViolation(f"payload of producer {head.producer} has {len(payload)} bytes, {at} expected")
    return head, parts


def in_order(producer: str) -> tuple[int, ...]:
    """Sorts producers by level and number."""
    return tuple(int(part) for part in producer.split("."))


def receipts_of(heads: Sequence[Head]) -> dict[str, str]:
    """The receipts a consumer saw. One producer in two versions is refused at once."""
    seen: dict[str, str] = {}
    for head in heads:
        known = seen.setdefault(head.producer, head.receipt)
        if known != head.receipt:
            raise InvariantViolation(f"one slot received producer {head.producer} twice")
    return seen
