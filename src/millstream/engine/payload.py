"""What travels from a producer task to a slot: one payload, with the producer's receipt in its head.

Rules
-----
- Each producer sends every slot exactly one payload, empty or not.
- The receipt is a digest over everything the producer sends to all slots, made before anything is sent. Two payloads
  of one producer with different receipts come from two runs of it (G1).
- A payload has a bounded size. Larger bodies go through the store, and the payload holds their name and digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import pyarrow as pa
import xxhash

from millstream.errors import InvariantViolation
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
    bytes: int
    stored: Stored | None = None


class Head(msgspec.Struct, frozen=True, array_like=True):
    """Who sent a payload (level, then number among its producers), the receipt, and what is in it."""

    producer: str
    receipt: str
    sections: list[Section]


Bodies = list[list[tuple[int, pa.Buffer]]]
"""For each slot, (lane, record batch message) in order."""


def encode(
    bodies: Bodies, producer: str, store: ObjectStore, maker: names.Maker, inline_limit: int = INLINE_LIMIT
) -> Iterator[bytes]:
    """The payload of each slot, in order of slots."""
    state = xxhash.xxh3_64()
    for slot, sections in enumerate(bodies):
        for lane, body in sections:
            state.update(f"{slot}:{lane}:{body.size};".encode())
            state.update(memoryview(body))
    receipt = state.hexdigest()
    for sections in bodies:
        heads, parts, inline = [], [], 0
        for lane, body in sections:
            inline += body.size
            if inline > inline_limit:
                inline -= body.size
                data = memoryview(body).cast("B")
                stored = Stored(names.overflow(maker, producer), body.size, digest_of(data))
                store.put(stored.name, data)
                heads.append(Section(lane, 0, stored))
            else:
                heads.append(Section(lane, body.size))
                parts.append(memoryview(body))
        head = msgspec.msgpack.encode(Head(producer, receipt, heads))
        padding = bytes(-len(head) % 8)  # so that columns of 8-byte values are aligned
        yield b"".join((len(head).to_bytes(8, "little"), head, padding, *parts))


def decode(payload: bytes, store: ObjectStore) -> tuple[Head, list[tuple[int, pa.Buffer]]]:
    """The head of a payload and its bodies, by lane."""
    size = int.from_bytes(payload[:8], "little")
    head = msgspec.msgpack.decode(memoryview(payload)[8 : 8 + size], type=Head)
    whole = pa.py_buffer(payload)
    at = 8 + size + -size % 8
    bodies = []
    for section in head.sections:
        if section.stored is not None:
            stored = section.stored
            bodies.append((section.lane, read_checked(store, stored.name, stored.bytes, stored.digest)))
        else:
            bodies.append((section.lane, whole.slice(at, section.bytes)))
            at += section.bytes
    if at != len(payload):
        raise InvariantViolation(f"payload of producer {head.producer} has {len(payload)} bytes, {at} expected")
    return head, bodies


def in_order(head: Head) -> tuple[int, ...]:
    """Sorts payloads by level and number of their producer."""
    return tuple(int(part) for part in head.producer.split("."))


def receipts_of(heads: Sequence[Head]) -> dict[str, str]:
    """The receipts a consumer saw. One producer in two versions is refused at once."""
    seen: dict[str, str] = {}
    for head in heads:
        known = seen.setdefault(head.producer, head.receipt)
        if known != head.receipt:
            raise InvariantViolation(f"one slot received producer {head.producer} twice")
    return seen
