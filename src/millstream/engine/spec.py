"""What a worker must know to run its part of an epoch.

Rules
-----
- A `Spec` is the same for all epochs until the graph changes: it travels as bytes and is unpacked once per process.
- An `EpochTask` is what changes with every attempt; a `SlotTask` is one slot's share of it. A task receives only its
  own slice of the manifest.
- A lane is a stream, keyed, on its way to a level: records that share stream, key, routing table and level travel
  once, however many steps of the level read them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa

from millstream.model.computation import Computation
from millstream.model.graph import Graph, Step
from millstream.model.transform import Transform
from millstream.protocol.epochs import History, Output, Plan
from millstream.protocol.keyspace import Range
from millstream.protocol.manifest import Family, Manifest, Piece, SegmentRef
from millstream.protocol.routing import RoutingTable, Slot
from millstream.protocol.time import NO_TIME, SourceClock, TimeRule, first_clock
from millstream.store.cache import CacheSettings
from millstream.store.forms import Forms, unpacked
from millstream.store.names import Maker

HASH_COLUMN = "__hash"
TIME_COLUMN = "__time"
"""The event time of a production, beside its columns, in microseconds."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A query as its workers see it. `codes` holds the computation of each step and the function of each map, pickled:
    a computation is copied afresh for every task. `forms` holds, by step and name, those of the states and timers whose
    type has changed, packed."""

    graph: Graph
    store_id: str
    store_uri: str
    store_options: dict[str, str]
    codes: dict[str, bytes]
    cache: CacheSettings = field(default_factory=CacheSettings)
    forms: dict[tuple[str, str], bytes] = field(default_factory=dict)
    bundles: tuple[str, ...] = ()
    """The bundles that must be installed before any code is unpickled."""

    def new_computation(self, step: str) -> Computation:
        """A fresh copy of a step's computation."""
        computation: Computation = pickle.loads(self.codes[step])
        return computation

    def function(self, name: str) -> Callable[[pa.RecordBatch], Any] | Transform:
        """The function of a map; it keeps nothing, so one copy serves the whole process."""
        return _function(self.codes[name])

    def forms_of(self, step: str, state: str) -> Forms:
        """The forms of a declared state or timer."""
        return unpacked(self.forms.get((step, state), b""))

    def pack(self, dumps: Any) -> bytes:
        """As bytes; `dumps` is a pickler that can carry user classes."""
        packed: bytes = dumps(self)
        return packed


@lru_cache(maxsize=16)
def unpack(data: bytes) -> Spec:
    """The spec in these bytes; unpacked once per process."""
    spec: Spec = pickle.loads(data)
    return spec


@lru_cache(maxsize=64)
def _function(code: bytes) -> Callable[[pa.RecordBatch], Any] | Transform:
    fn: Callable[[pa.RecordBatch], Any] | Transform = pickle.loads(code)
    return fn


@dataclass(frozen=True, slots=True)
class Lane:
    """A keyed stream on its way to one or several steps of a level."""

    level: int
    stream: str
    key: tuple[str, ...]
    table: RoutingTable


def address(step: Step, number: int, table: RoutingTable) -> tuple[Any, ...]:
    """What the lane into a step's input is known by."""
    given = step.inputs[number]
    return (step.level, given.stream, given.key, table.firsts, table.slots)


def lanes_of(graph: Graph, tables: Mapping[str, RoutingTable]) -> tuple[Lane, ...]:
    """All lanes of a graph, in a fixed order: by level, then in the order of steps and their inputs."""
    lanes: dict[tuple[Any, ...], Lane] = {}
    for step in sorted(graph.steps, key=lambda step: step.level):
        table = tables[step.name]
        for number, given in enumerate(step.inputs):
            lanes.setdefault(address(step, number, table), Lane(step.level, given.stream, given.key, table))
    return tuple(lanes.values())


@dataclass(frozen=True, slots=True)
class EpochTask:
    """What all tasks of an attempt share."""

    epoch: int
    maker: Maker
    clock_ms: int
    slot_count: int
    lanes: tuple[Lane, ...]
    readers: dict[str, tuple[int, ...]]
    """For each step, the lane of each of its inputs."""
    clocks: dict[str, SourceClock] = field(default_factory=dict)
    """The clock of each source with event time, before the epoch."""
    before: dict[str, int] = field(default_factory=dict)
    """The watermark of each step before the epoch."""
    idle: tuple[str, ...] = ()
    leaving: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stated: dict[str, int] = field(default_factory=dict)
    clock_before_ms: int = 0
    """The clock of the last committed epoch's plan."""
    passed: dict[str, int] = field(default_factory=dict)
    """The watermark that each step with holds had passed on before the epoch."""
    fed: dict[str, tuple[Output, ...]] = field(default_factory=dict)
    """For each stream of feedback, what the epoch before wrote to it."""

    @property
    def depth(self) -> int:
        """The number of levels."""
        return max(lane.level for lane in self.lanes)


def rules_of(graph: Graph) -> dict[str, TimeRule]:
    """How the watermark of each source with event time follows."""
    found = {}
    for source in graph.sources:
        if source.time is not None:
            given = source.time
            found[source.name] = TimeRule(
                given.lateness,
                given.percentile,
                given.idle_after,
                given.max_ahead,
                given.is_stated,
                given.partition,
                given.expected,
            )
    return found


def epoch_task(
    graph: Graph, plan: Plan, maker: Maker, tables: Mapping[str, RoutingTable], history: History, slot_count: int
) -> EpochTask:
    """What the tasks of an attempt share, for a graph with these routing tables, after this history."""
    lanes = lanes_of(graph, tables)
    places = {
        (lane.level, lane.stream, lane.key, lane.table.firsts, lane.table.slots): i for i, lane in enumerate(lanes)
    }
    readers = {
        step.name: tuple(places[address(step, number, tables[step.name])] for number in range(len(step.inputs)))
        for step in graph.steps
    }
    return EpochTask(
        plan.epoch,
        maker,
        plan.clock_ms,
        slot_count,
        lanes,
        readers,
        {name: first_clock(rule, plan.clock_ms, history.clocks.get(name)) for name, rule in rules_of(graph).items()},
        {step.name: history.watermarks.get(step.name, NO_TIME) for step in graph.steps if step.timed},
        plan.idle,
        plan.leaving,
        plan.stated,
        history.clock_ms,
        {step.name: history.passed.get(step.name, NO_TIME) for step in graph.steps if step.holds},
        {
            node.name: tuple(output for output in history.last_outputs if output.stream == node.name)
            for node in graph.feedbacks
        },
    )


Give = Callable[[str, SegmentRef, bytes], None]
"""Sends a segment to a worker. Raises `OSError` if that one has not got it."""


@dataclass(frozen=True, slots=True)
class Here:
    """What a task knows of where it runs: the worker, if that is known, and how others are reached, if they can be."""

    worker: str = ""
    give: Give | None = None


@dataclass(frozen=True, slots=True)
class SlotTask:
    """One slot's share of an attempt: the ranges it owns of each step, and its slice of the manifest.

    `slot` is the number of its task in this attempt, from 0 without a gap, and `home` the slot that it is. `busy` are
    segments of it that a compaction is reading: they may be read, but not taken up.
    """

    slot: int
    home: int
    owned: dict[str, tuple[Range, ...]]
    pieces: list[tuple[str, str, list[Piece]]]
    busy: frozenset[str] = frozenset()
    worker: str = ""
    """Where it should run."""
    patience: int = -1
    """How many bytes of state may have to be fetched if it runs elsewhere; -1 for any number."""
    through: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The workers that are about to take over something of it, and of which steps: they are sent what it writes."""
    coming: tuple[Piece, ...] = ()
    """What its worker holds that is about to move there: it is checked first, and that may be waited for."""
    soon: tuple[Piece, ...] = ()
    """What its worker holds for others: it is checked ahead of time."""

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(data: bytes) -> SlotTask:
        return msgspec.msgpack.decode(data, type=SlotTask)


def slot_tasks(
    graph: Graph,
    tables: Mapping[str, RoutingTable],
    manifest: Manifest,
    slots: Sequence[int],
    busy: frozenset[str] = frozenset(),
) -> list[SlotTask]:
    """The share of each of these slots; the tables name them by their place among them."""
    shares = {
        (step.name, state): manifest.shares(Family(step.name, state), tables[step.name])
        for step in graph.steps
        for state in step.families
    }
    tasks = []
    for slot, home in enumerate(slots):
        here = Slot(slot)
        owned = {step.name: tables[step.name].ranges.get(here, ()) for step in graph.steps}
        pieces = [(step, state, found.get(here, [])) for (step, state), found in shares.items()]
        mine = frozenset(piece.segment.name for _, _, found in pieces for piece in found)
        tasks.append(SlotTask(slot, home, owned, pieces, busy & mine))
    return tasks
