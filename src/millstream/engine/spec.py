"""What a worker must know to run its part of an epoch.

Rules
-----
- A `Spec` is the same for all epochs until the graph changes: it travels as bytes and is unpacked once per process.
- An `EpochTask` is what changes with every attempt; a `SlotTask` is one slot's share of it. A task receives only its
  own slice of the manifest.
- A lane is a stream, keyed: records that share stream, key and routing table travel once, however many steps of
  the level read them.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from millstream.model.computation import Computation
from millstream.model.graph import Graph, Step
from millstream.protocol.keyspace import Range
from millstream.protocol.manifest import Family, Manifest, Piece
from millstream.protocol.routing import RoutingTable
from millstream.store.names import Maker

HASH_COLUMN = "__hash"


@dataclass(frozen=True, slots=True)
class Spec:
    """A query as its workers see it. `codes` holds each step's computation, pickled: a fresh copy per task."""

    graph: Graph
    store_id: str
    store_uri: str
    store_options: dict[str, str]
    codes: dict[str, bytes]

    def new_computation(self, step: str) -> Computation:
        """A fresh copy of a step's computation."""
        computation: Computation = pickle.loads(self.codes[step])
        return computation

    def pack(self, dumps: Any) -> bytes:
        """As bytes; `dumps` is a pickler that can carry user classes."""
        packed: bytes = dumps(self)
        return packed


@lru_cache(maxsize=16)
def unpack(data: bytes) -> Spec:
    """The spec in these bytes; unpacked once per process."""
    spec: Spec = pickle.loads(data)
    return spec


def code_hash(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Lane:
    """A keyed stream on its way to one or several steps."""

    stream: str
    key: tuple[str, ...]
    table: RoutingTable
    steps: tuple[str, ...]


def levels_of(graph: Graph, tables: Mapping[str, RoutingTable]) -> tuple[tuple[Lane, ...], ...]:
    """The lanes into each level of the graph, from the one that reads the sources."""
    depth = max(step.level for step in graph.steps)
    by_level = [tuple(step for step in graph.steps if step.level == level) for level in range(1, depth + 1)]
    return tuple(_lanes_of(steps, tables) for steps in by_level)


def _lanes_of(steps: tuple[Step, ...], tables: Mapping[str, RoutingTable]) -> tuple[Lane, ...]:
    """The lanes into the steps of one level, in a fixed order."""
    grouped: dict[tuple[Any, ...], Lane] = {}
    for step in steps:
        table = tables[step.name]
        address = (step.input, step.key, table.firsts, table.slots)
        lane = grouped.get(address)
        names = (*lane.steps, step.name) if lane else (step.name,)
        grouped[address] = Lane(step.input, step.key, table, names)
    return tuple(grouped.values())


@dataclass(frozen=True, slots=True)
class EpochTask:
    """What all tasks of an attempt share."""

    epoch: int
    maker: Maker
    clock_ms: int
    slot_count: int
    levels: tuple[tuple[Lane, ...], ...]


@dataclass(frozen=True, slots=True)
class SlotTask:
    """One slot's share of an attempt: the ranges it owns of each step, and its slice of the manifest.

    `busy` are segments of it that a compaction is reading: they may be read, but not taken up.
    """

    slot: int
    owned: dict[str, tuple[Range, ...]]
    pieces: list[tuple[str, str, list[Piece]]]
    busy: frozenset[str] = frozenset()

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(data: bytes) -> SlotTask:
        return msgspec.msgpack.decode(data, type=SlotTask)


def slot_tasks(
    graph: Graph,
    tables: Mapping[str, RoutingTable],
    manifest: Manifest,
    slot_count: int,
    busy: frozenset[str] = frozenset(),
) -> list[SlotTask]:
    """The share of every slot."""
    tasks = []
    for slot in range(slot_count):
        owned = {step.name: tables[step.name].ranges.get(slot, ()) for step in graph.steps}  # type: ignore[call-overload]
        pieces = [
            (step.name, state, manifest.pieces(Family(step.name, state), owned[step.name]))
            for step in graph.steps
            for state in step.states
        ]
        mine = frozenset(piece.segment.name for _, _, found in pieces for piece in found)
        tasks.append(SlotTask(slot, owned, pieces, busy & mine))
    return tasks
