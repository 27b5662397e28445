"""Strong productions: what a task made once is what it sends, however often it is run.

Rules
-----
- A task of a level with a strong step stores all that it leads to (reports, payloads, watermarks) in one object, under
  the name of its attempt, level and slot, before it sends anything. The first to store it wins; whoever comes later, be
  it a copy that runs beside it or one that runs after it, sends the winner's bytes. So the second run of a task whose
  code is not deterministic changes nothing: not productions, nor segments, nor timers (G1, G2).
- A task finds the object before it runs user code, if there is one.
- An object that is damaged is as good as none: the task sends what it made itself, and the receipts judge.
- What failed is not stored: a second run may succeed.
- Nobody needs the object once its attempt has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import xxhash

from millstream.engine.host import NOWHERE, Hosted, host
from millstream.engine.payload import INLINE_LIMIT
from millstream.engine.spec import EpochTask, Here, SlotTask, Spec
from millstream.errors import StoreUnavailable
from millstream.protocol.epochs import Report
from millstream.store import names
from millstream.store.objects import ObjectStore

_DIGEST = 16  # characters, at the beginning


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """What is in the object: the sizes of the payloads that follow, and of the last level the reports."""

    sizes: list[int]
    reports: list[Report]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a task made, as it lies in the store: as `Hosted`, but it can only be sent."""

    reports: list[Report]
    sent: list[memoryview]

    def payloads(self, task: EpochTask, store: ObjectStore) -> Iterator[memoryview]:
        """For the slots of the next level."""
        return iter(self.sent)


def host_once(
    spec: Spec,
    task: EpochTask,
    level: int,
    mine: SlotTask,
    payloads: Iterable[bytes | memoryview],
    store: ObjectStore,
    here: Here = NOWHERE,
) -> Hosted | Kept:
    """As `host`; but where a step of the level has strong productions, what the first of all runs led to."""
    if not any(step.strong for step in spec.graph.steps if step.level == level):
        return host(spec, task, level, mine, payloads, store, here)
    name = names.strong(task.maker, level, mine.slot)
    try:
        known = _read(store, name)
    except StoreUnavailable:
        known = None  # if it is there, this one cannot be stored, and is not sent
    if known is not None:
        return known
    hosted = host(spec, task, level, mine, payloads, store, here)
    own = hosted.reports[-1]
    if own.failure or own.damage or own.trouble:
        return hosted
    try:
        data = _packed(hosted, task, store, last=level == spec.graph.depth)
        if not store.create(name, data):
            known = _read(store, name)
    except StoreUnavailable as error:
        hosted.reports[-1] = replace(own, trouble=str(error))
        return hosted
    return known or _unpacked(memoryview(data))


def _packed(hosted: Hosted, task: EpochTask, store: ObjectStore, last: bool) -> bytes:
    """The object. Large parts lie in the store by themselves, so that the whole takes no more memory than a payload."""
    payloads: list[Sequence[bytes | memoryview]] = []
    if not last:
        payloads = list(hosted.buffers(task, store, INLINE_LIMIT // task.slot_count))
    sizes = [sum(map(len, buffers)) for buffers in payloads]
    head = msgspec.msgpack.encode(_Head(sizes, hosted.reports if last else []))
    parts: list[bytes | memoryview] = [len(head).to_bytes(8, "little"), head, _padding(len(head))]
    for buffers, size in zip(payloads, sizes, strict=True):
        parts += [*buffers, _padding(size)]
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return b"".join((digest.hexdigest().encode(), *parts))


def _padding(size: int) -> bytes:
    """So that every payload is aligned as a payload of its own is."""
    return bytes(-size % 8)


def _read(store: ObjectStore, name: str) -> Kept | None:
    """What was stored first, if it is there as it was written."""
    data = store.get(name)
    if data is None or xxhash.xxh3_64_hexdigest(data[_DIGEST:]).encode() != bytes(data[:_DIGEST]):
        return None
    return _unpacked(data)


def _unpacked(data: memoryview) -> Kept:
    at = _DIGEST + 8
    size = int.from_bytes(data[_DIGEST:at], "little")
    head = msgspec.msgpack.decode(data[at : at + size], type=_Head)
    at += size + -size % 8
    sent = []
    for size in head.sizes:
        sent.append(data[at : at + size])
        at += size + -size % 8
    return Kept(head.reports, sent)
