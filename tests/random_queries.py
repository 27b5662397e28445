"""Random queries, random epochs for them, and a sequential oracle that shares no code with the engine.

A `Shape` is a query as plain data, made from a seed. `build` makes it a query, `Oracle` runs it in dictionaries: one
record after the other, by the rules of the guide. All streams have the columns k, v and t.

What is compared must be defined. Between records of different keys there is no order, so every stream says for which
key its order is defined (`Stream.order`), and only steps that do not care read one whose order is not.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import millstream as ms
from millstream.model.query import Query

ROW = "k long, v long, t timestamp"
DAY = datetime(2026, 1, 1, tzinfo=UTC)
FAR = datetime(2100, 1, 1, tzinfo=UTC)
"""What a bad clock says: further ahead than any source may be."""
LIMIT = 1009
"""Values stay below it, however many levels add them up."""
BAD = 7
"""The value that picky computations refuse."""

# -- computations ----------------------------------------------------------------------------------------------------


def first(key: Any) -> Any:
    """The part of a key that goes into the column k."""
    return key[0] if isinstance(key, tuple) else key


def firsts(batch: ms.Batch) -> list[Any]:
    return batch.key_columns[0].to_pylist()


def newest(batch: ms.Batch) -> Any:
    """The newest event time of each key, NaT where it has none."""
    found = np.full(len(batch), np.iinfo(np.int64).min)
    for part in batch.inputs.values():
        owners = np.repeat(np.arange(len(batch)), part.count())
        np.maximum.at(found, owners, part.times.view(np.int64))
    return found.view("datetime64[us]")


def stamps(times: Any) -> pa.Array:
    return pa.array(times).cast(pa.timestamp("us", "UTC"))


class Running(ms.Computation):
    """Sensitive to the order of a key's records: every production depends on the record before."""

    total = ms.Value("long", default=0)
    last = ms.Value("long")
    output = ROW
    outputs: ClassVar = {"odd": ROW}

    def __init__(self, picky: bool) -> None:
        self.picky = picky

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        before, total = self.last.get(), self.total.get() + row.v
        self.last.set(row.v)
        self.total.set(total)
        yield first(at.key), (total * 3 + (7 if before is None else before)) % LIMIT, at.time
        if total % 2:
            yield ms.to("odd", {"k": first(at.key), "v": total % LIMIT, "t": at.time})
        if total % 5 == 0:
            self.total.delete()
        if self.picky and row.v == BAD:
            raise ValueError("bad")


class Sum(ms.Computation):
    """One production per key and epoch, over whole columns; perhaps under another key."""

    total = ms.Value("long", default=0)
    output = ROW
    outputs: ClassVar = {"odd": ROW}

    def __init__(self, modulus: int, picky: bool) -> None:
        self.modulus, self.picky = modulus, picky

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        totals = self.total.read(batch)
        for part in batch.inputs.values():
            totals = totals + part.sum("v")
            if self.picky and BAD in part.column("v").to_pylist():
                raise ValueError("bad")
        self.total.write(batch, totals)
        self.total.delete(batch, where=totals % 7 == 0)
        keys = [key if key is None or not self.modulus else key % self.modulus for key in firsts(batch)]
        yield batch.output(keys, totals % LIMIT, [None] * len(keys))  # with the newest time of each key
        odd = np.flatnonzero(totals % 2 == 1)
        made = batch.output_to("odd", [keys[i] for i in odd], totals[odd] % LIMIT, [None] * len(odd))
        yield batch.timed(made, newest(batch)[odd]) if batch.timed_input else made


class Windows(ms.Computation):
    """Twenty seconds of event time each, told apart by tag."""

    sums = ms.Value(object)
    close = ms.Timer(ms.EVENT_TIME, payload="long")
    output = ROW
    outputs: ClassVar = {}

    def on_record(self, row: Any, at: ms.At) -> None:
        if at.time is None:
            return
        start = int((at.time - DAY) // timedelta(seconds=20)) * 20
        sums = self.sums.get() or {}
        self.sums.set({**sums, start: sums.get(start, 0) + row.v})
        self.close.set(DAY + timedelta(seconds=start + 20), tag=f"w{start}", payload=start)

    @close.fires
    def closed(self, at: ms.At) -> Iterable[Any]:
        sums = self.sums.get()
        yield first(at.key), sums.pop(at.payload) % LIMIT, at.time
        if sums:
            self.sums.set(sums)
        else:
            self.sums.delete()


class Session(ms.Computation):
    """A timer that moves on with the newest record, and that its own callback may set again."""

    n = ms.Value("long", default=0)
    end = ms.Timer(ms.EVENT_TIME)
    output = ROW

    def __init__(self, picky: bool) -> None:
        self.picky = picky

    def on_record(self, row: Any, at: ms.At) -> None:
        self.n.set(self.n.get() + row.v % 3 + 1)
        if at.time is not None:
            due, current = at.time + timedelta(seconds=15), self.end.get()
            if current is None or current < due:
                self.end.set(timedelta(seconds=15))

    @end.fires
    def ended(self, at: ms.At) -> Iterable[Any]:
        n = self.n.get()
        yield {"k": first(at.key), "v": n % LIMIT, "t": at.time}
        if n > 4:
            self.n.set(n - 4)
            self.end.set(timedelta(seconds=5))
        else:
            self.n.delete()
        if self.picky and n % 5 == 0:
            raise ValueError("bad")


class Quiet(ms.Computation):
    """Wall time: reports a key that has been silent for a while, or at once."""

    n = ms.Value("long", default=0)
    silence = ms.Timer(ms.WALL_TIME)
    output = ROW

    def __init__(self, delay: int) -> None:
        self.delay = delay

    def on_record(self, row: Any, at: ms.At) -> None:
        self.n.set(self.n.get() + row.v)
        self.silence.set(timedelta(seconds=self.delay))

    @silence.fires
    def silent(self, at: ms.At) -> Iterable[Any]:
        yield first(at.key), self.n.get() % LIMIT, at.time
        self.n.delete()


class Alarm(ms.Computation):
    """Event-time timers over whole columns."""

    total = ms.Value("long", default=0)
    ring = ms.Timer(ms.EVENT_TIME)
    output = ROW

    def on_batch(self, batch: ms.Batch) -> None:
        totals = self.total.read(batch)
        for part in batch.inputs.values():
            totals = totals + part.sum("v")
        self.total.write(batch, totals)
        times = newest(batch)
        self.ring.set(batch, times + np.timedelta64(12, "s"), where=~np.isnat(times))

    @ring.fires
    def rang(self, batch: ms.TimerBatch) -> Iterable[Any]:
        yield batch.output(firsts(batch), self.total.read(batch) % LIMIT, stamps(batch.times))
        self.total.delete(batch)


class Tally(ms.Computation):
    """A map per key, one record at a time: entries come, go, and go all at once."""

    entries = ms.Map("long", "long", default=0)
    output = ROW

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        value = self.entries.get(row.v % 4) + row.v + 1
        self.entries.set(row.v % 4, value)
        if value % 3 == 0:
            self.entries.delete(row.v % 4)
        found = self.entries.items()
        total = sum(value for _, value in found)
        yield first(at.key), (total * 5 + len(found)) % LIMIT, at.time
        if total > 50:
            self.entries.clear()


class Table(ms.Computation):
    """A map per key, over whole columns."""

    entries = ms.Map("long", "long", default=0)
    output = ROW

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        sums: Counter[tuple[int, int]] = Counter()
        for part in batch.inputs.values():
            owners = np.repeat(np.arange(len(batch)), part.count()).tolist()
            for place, v in zip(owners, part.column("v").to_pylist(), strict=True):
                sums[place, v % 3] += v
        places, subkeys = [place for place, _ in sums], [subkey for _, subkey in sums]
        values = self.entries.read(batch, places, subkeys) + np.array(list(sums.values()))
        self.entries.write(batch, places, subkeys, values)
        found = self.entries.items(batch)
        totals = np.bincount(found.places, found.values, len(batch)).astype(np.int64)
        self.entries.clear(batch, where=totals % 11 == 0)
        yield batch.output(firsts(batch), totals % LIMIT, [None] * len(batch))


class Basket(ms.Computation):
    """A bag per key, emptied when it is full."""

    values = ms.Bag("long")
    output = ROW

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.values.append(row.v)
        values = self.values.read()
        if len(values) == 5:
            yield first(at.key), mixed(values), at.time
            self.values.clear()


class Fading(ms.Computation):
    """A value that is forgotten after a while of wall time without a write."""

    total = ms.Value("long", default=0, ttl=timedelta(seconds=33.5))
    output = ROW

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.total.set(self.total.get() + row.v)
        yield first(at.key), self.total.get() % LIMIT, at.time


def mixed(values: Sequence[int]) -> int:
    """A number that depends on all values and their order."""
    found = 0
    for value in values:
        found = (found * 31 + value) % LIMIT
    return found


def add_one(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.set_column(1, "v", pc.add(batch["v"], 1))


def only_even(batch: pa.RecordBatch) -> pa.RecordBatch | None:
    kept = batch.filter(pa.array([v % 2 == 0 for v in batch["v"].to_pylist()]))
    return kept if kept.num_rows else None


MAPS: dict[str, tuple[Callable[..., Any], Callable[[int], int | None]]] = {
    "add": (add_one, lambda v: v + 1),
    "even": (only_even, lambda v: v if v % 2 == 0 else None),
}

# -- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stream:
    """A stream as the generator knows it. `time`: "column", "beside", or none. `order`: "all" if any two records have a
    defined order, "k" if those of equal k have, or none."""

    name: str
    time: str = ""
    order: str = ""


@dataclass(frozen=True)
class SourceShape:
    name: str
    timed: bool
    lateness: int
    idle: int


@dataclass(frozen=True)
class MapShape:
    name: str
    reads: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class InputShape:
    name: str
    streams: tuple[str, ...]
    key: tuple[str, ...]


@dataclass(frozen=True)
class StepShape:
    name: str
    inputs: tuple[InputShape, ...]
    kind: str
    number: int
    late: str
    picky: bool
    """Whether it fails on some records, which become dead letters."""

    @property
    def named(self) -> bool:
        return self.inputs[0].name != "input"


@dataclass
class Shape:
    """A query. `nodes` are maps and steps, in an order in which each comes after what it reads."""

    sources: list[SourceShape] = field(default_factory=list)
    nodes: list[MapShape | StepShape] = field(default_factory=list)
    streams: dict[str, Stream] = field(default_factory=dict)

    @property
    def steps(self) -> list[StepShape]:
        return [node for node in self.nodes if isinstance(node, StepShape)]

    @property
    def sunk(self) -> list[str]:
        """The streams that have a sink: all that steps make."""
        made = [f"{step.name}{'.' * bool(output)}{output}" for step in self.steps for output in outputs_of(step)]
        return [name for name in self.streams if name in made]


KINDS = ("running", "sum", "windows", "session", "quiet", "alarm", "tally", "table", "basket", "fading")
NEEDS_TIME = ("windows", "session", "alarm")
NEEDS_ORDER = ("running", "tally", "basket", "fading")
NEEDS_CLOCK = ("quiet", "fading")
CAN_FAIL = ("running", "sum", "session")


def outputs_of(step: StepShape) -> list[str]:
    return ["", *(["odd"] if step.kind in ("running", "sum") else []), *(["late"] if step.late == "output" else [])]


def shape_from(rng: random.Random, on_spark: bool = False) -> Shape:
    """A random query. On Spark the clock cannot be told: no wall time, and no source falls silent."""
    shape = Shape()
    for number in range(rng.choice((1, 2, 2, 3))):
        idle = 10**7 if on_spark else rng.choice((10**7, 20, 50))
        shape.sources.append(SourceShape(f"s{number}", rng.random() < 0.75, rng.choice((0, 5, 30)), idle))
        shape.streams[f"s{number}"] = Stream(f"s{number}", "column" * shape.sources[-1].timed, "all")
    for number in range(rng.choice((0, 0, 1))):
        add_map(shape, rng, f"m{number}", list(shape.streams.values()), True)
    for number in range(rng.randint(1, 4)):
        add_step(shape, rng, f"x{number}", on_spark)
        if rng.random() < 0.2:
            made = [stream for stream in shape.streams.values() if stream.name.partition(".")[0] == f"x{number}"]
            add_map(shape, rng, f"mx{number}", made, False)
    return shape


def add_map(shape: Shape, rng: random.Random, name: str, choice: Sequence[Stream], of_sources: bool) -> None:
    """Maps of productions keep the number of rows: else their event times are those of a whole call."""
    read = rng.choice(choice)
    alike = [stream for stream in choice if stream.time == read.time and stream is not read]
    reads = [read, rng.choice(alike)] if alike and rng.random() < 0.4 else [read]
    kind = rng.choice(tuple(MAPS)) if of_sources else "add"
    shape.nodes.append(MapShape(name, tuple(stream.name for stream in reads), kind))
    shape.streams[name] = Stream(name, read.time, read.order if len(reads) == 1 else "")


def add_step(shape: Shape, rng: random.Random, name: str, on_spark: bool) -> None:
    streams = list(shape.streams.values())
    weights = [1 + 2 * (stream.time == "beside") for stream in streams]  # rather deep than wide

    def some(count: int) -> tuple[Stream, ...]:
        return tuple(dict.fromkeys(rng.choices(streams, weights, k=count)))

    width = rng.choice((1, 1, 1, 2))
    given: list[tuple[str, tuple[Stream, ...]]]
    if rng.random() < 0.35:
        given = [(f"in{i}", some(rng.choice((1, 1, 2)))) for i in range(rng.choice((2, 2, 3)))]
    else:
        given = [("input", some(rng.choice((1, 1, 2))))]
    inputs = []
    for input_name, united in given:
        key = ("k", "v") if width == 2 else rng.choice((("k",), ("k",), ("v",)))
        inputs.append(InputShape(input_name, tuple(stream.name for stream in united), key))
    read = [(stream, each.key) for each in inputs for stream in map(shape.streams.__getitem__, each.streams)]
    timed = any(stream.time for stream, _ in read)
    ordered = all(stream.order == "all" or (stream.order == "k" and "k" in key) for stream, key in read)
    kinds = [kind for kind in KINDS if (timed or kind not in NEEDS_TIME) and (ordered or kind not in NEEDS_ORDER)]
    kind = rng.choice([kind for kind in kinds if not (on_spark and kind in NEEDS_CLOCK)])
    late = rng.choice(("drop", "process", "output")) if timed else "drop"
    number = {"sum": rng.choice((0, 0, 3)), "quiet": rng.choice((0, 15, 40))}.get(kind, 0)
    step = StepShape(name, tuple(inputs), kind, number, late, kind in CAN_FAIL and rng.random() < 0.3)
    shape.nodes.append(step)
    keeps_key = width == 1 and not (kind == "sum" and number)
    by_k = all(key == ("k",) and stream.order for stream, key in read)
    for output in outputs_of(step):
        order = by_k if output == "late" else keeps_key
        full = f"{name}.{output}" if output else name
        shape.streams[full] = Stream(full, "beside" * timed, "k" * order)


def computation_of(step: StepShape) -> ms.Computation:
    made: dict[str, Callable[[], ms.Computation]] = {
        "running": lambda: Running(step.picky),
        "sum": lambda: Sum(step.number, step.picky),
        "windows": Windows,
        "session": lambda: Session(step.picky),
        "quiet": lambda: Quiet(step.number),
        "alarm": Alarm,
        "tally": Tally,
        "table": Table,
        "basket": Basket,
        "fading": Fading,
    }
    return made[step.kind]()


def build(
    shape: Shape, origins: Mapping[str, Any] | None = None, sinks: Mapping[str, ms.Memory] | None = None
) -> Query:
    """The query of a shape, with a sink for every stream that a step makes, named after it."""
    query = ms.Query("random")
    streams: dict[str, ms.Stream] = {}
    for source in shape.sources:
        time: dict[str, Any] = {}
        if source.timed:
            time = {"event_time": "t", "lateness": timedelta(seconds=source.lateness)}
            time["idle_after"] = timedelta(seconds=source.idle)
        streams[source.name] = query.source(source.name, (origins or {}).get(source.name), **time)
    for node in shape.nodes:
        if isinstance(node, MapShape):
            read = united(streams, node.reads)
            streams[node.name] = read.map_batches(node.name, MAPS[node.kind][0], output=ROW)
            continue
        keyed = {each.name: united(streams, each.streams).key_by(*each.key) for each in node.inputs}
        rules = {"late": node.late, "on_error": "dead_letter" if node.picky else "stop"}
        if node.named:
            made = query.compute(node.name, computation_of(node), **rules, **keyed)
        else:
            made = keyed["input"].compute(node.name, computation_of(node), **rules)
        if node.picky:
            name = sink_name(f"{node.name}.dead_letter")
            made.output("dead_letter").sink(name, sinks[name] if sinks is not None else ms.Memory())
        for output in outputs_of(node):
            full = f"{node.name}.{output}" if output else node.name
            streams[full] = made.output(output) if output else made
            name = sink_name(full)
            streams[full].sink(name, sinks[name] if sinks is not None else ms.Memory())
    return query


def united(streams: Mapping[str, ms.Stream], names: Sequence[str]) -> ms.Stream:
    return streams[names[0]].union(*(streams[name] for name in names[1:])) if len(names) > 1 else streams[names[0]]


def sink_name(stream: str) -> str:
    return "to_" + stream.replace(".", "_")


# -- epochs ----------------------------------------------------------------------------------------------------------

Row = tuple[int | None, int, datetime | None]


class Weather:
    """Makes the records of epochs: time goes on, some records come late, few have no time or a mad one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.frontier = rng, 60.0

    def records(self, shape: Shape, most: int) -> dict[str, list[Row]]:
        rng = self.rng
        self.frontier += rng.choice((0, 3, 10, 30))
        return {
            source.name: [self._row() for _ in range(rng.randint(0, most))]
            for source in shape.sources
            if rng.random() < 0.8
        }

    def _row(self) -> Row:
        rng = self.rng
        chance = rng.random()
        time: datetime | None = self.moment(rng.choice((-60, -25, -8, -3, 0, 0, 2)) + rng.randrange(1000) / 1000)
        if chance < 0.04:
            time = None
        elif chance < 0.06:
            time = FAR
        return (rng.choice((*range(6), None)), rng.randrange(10), time)

    def moment(self, ahead: float) -> datetime:
        return DAY + timedelta(seconds=self.frontier + ahead)


# -- the oracle ------------------------------------------------------------------------------------------------------

NEVER = -(2**63)
"""Before all times, and what stands for no time."""
ALWAYS = 2**63
"""After all times."""
SECOND = 1_000_000


def micros(time: datetime | None) -> int:
    return NEVER if time is None else (time - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def as_time(number: int) -> datetime | None:
    try:
        return None if number == NEVER else datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=number)
    except OverflowError:
        return None


@dataclass(frozen=True)
class Record:
    """A record and its event time; a source's is in its column t, a production's beside its columns."""

    k: int | None
    v: int
    t: datetime | None
    time: int

    @property
    def row(self) -> Row:
        return (self.k, self.v, self.t)


@dataclass
class Cell:
    """What a step keeps of one key: state by name, and timers: tag -> (time, payload)."""

    state: dict[str, Any] = field(default_factory=dict)
    timers: dict[str, tuple[int, Any]] = field(default_factory=dict)


Made = list[tuple[str, Row, int]]
"""Output, row and event time of productions."""


class OracleStep:
    """One step in a dictionary from keys to cells."""

    def __init__(self, shape: StepShape) -> None:
        self.shape, self.cells = shape, dict[Any, Cell]()
        self.letters: list[str] = []
        """The keys of the dead letters of the epoch."""

    def run(self, records: Mapping[Any, list[Record]], mark: int, clock: int) -> Made:
        """Applies an epoch: the records of every key, then its timers."""
        made: Made = []
        self.letters = []
        for key, mine in records.items():
            made += getattr(self, f"_{self.shape.kind}")(key, self.cells.setdefault(key, Cell()), mine, clock)
        limit = clock if self.shape.kind == "quiet" else mark
        for key, cell in self.cells.items():
            while due := [(time, tag) for tag, (time, _) in cell.timers.items() if time <= limit]:
                time, tag = min(due)
                payload = cell.timers.pop(tag)[1]
                made += getattr(self, f"_{self.shape.kind}_fires")(key, cell.state, cell.timers, time, payload)
        return made

    def state(self, name: str, clock: int) -> dict[Any, Any]:
        """The state by key; of a map, by key and subkey."""
        kept = {key: cell.state[name] for key, cell in self.cells.items() if cell.state.get(name) not in (None, {}, [])}
        if name == "entries":
            return {(*parts(key), sub): value for key, found in kept.items() for sub, value in found.items()}
        if self.shape.kind == "fading":
            kept = {key: total for key, (total, written) in kept.items() if clock - written < 33.5 * SECOND}
        return {parts(key): value for key, value in kept.items()}

    def _running(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        made: Made = []
        for record in records:
            if self.shape.picky and record.v == BAD:
                self.letters.append(repr(key))
                continue
            total, time = cell.state.get("total", 0) + record.v, as_time(record.time)
            made.append(("", (first(key), (total * 3 + cell.state.get("last", 7)) % LIMIT, time), record.time))
            cell.state |= {"total": total, "last": record.v}
            if total % 2:
                made.append(("odd", (first(key), total % LIMIT, time), record.time))
            if total % 5 == 0:
                del cell.state["total"]
        return made

    def _sum(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        if self.shape.picky and any(record.v == BAD for record in records):
            self.letters += [repr(key)] * len(records)
            return []
        total = cell.state.pop("total", 0) + sum(record.v for record in records)
        if total % 7:
            cell.state["total"] = total
        k = first(key)
        k = k if k is None or not self.shape.number else k % self.shape.number
        time = max(record.time for record in records)
        return [(output, (k, total % LIMIT, None), time) for output in ("", "odd")[: 1 + total % 2]]

    def _windows(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        for record in records:
            if as_time(record.time) is not None:
                start = (record.time - micros(DAY)) // (20 * SECOND) * 20
                sums = cell.state.setdefault("sums", {})
                sums[start] = sums.get(start, 0) + record.v
                cell.timers[f"w{start}"] = (micros(DAY) + (start + 20) * SECOND, start)
        return []

    def _windows_fires(self, key: Any, state: dict[str, Any], timers: Any, time: int, payload: Any) -> Made:
        total = state["sums"].pop(payload)
        if not state["sums"]:
            del state["sums"]
        return [("", (first(key), total % LIMIT, as_time(time)), time)]

    def _session(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        for record in records:
            cell.state["n"] = cell.state.get("n", 0) + record.v % 3 + 1
            if as_time(record.time) is not None:
                due = record.time + 15 * SECOND
                cell.timers[""] = max(cell.timers.get("", (due, None)), (due, None), key=lambda timer: timer[0])
        return []

    def _session_fires(self, key: Any, state: dict[str, Any], timers: Any, time: int, payload: Any) -> Made:
        if self.shape.picky and state.get("n", 0) % 5 == 0:
            self.letters.append(repr(key))
            return []
        n = state.pop("n", 0)
        if n > 4:
            state["n"] = n - 4
            timers[""] = (time + 5 * SECOND, None)
        return [("", (first(key), n % LIMIT, as_time(time)), time)]

    def _quiet(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        cell.state["n"] = cell.state.get("n", 0) + sum(record.v for record in records)
        cell.timers[""] = (clock + self.shape.number * SECOND, None)
        return []

    def _quiet_fires(self, key: Any, state: dict[str, Any], timers: Any, time: int, payload: Any) -> Made:
        return [("", (first(key), state.pop("n", 0) % LIMIT, as_time(time)), NEVER)]

    def _alarm(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        cell.state["total"] = cell.state.get("total", 0) + sum(record.v for record in records)
        time = max(record.time for record in records)
        if as_time(time) is not None:
            cell.timers[""] = (time + 12 * SECOND, None)
        return []

    def _alarm_fires(self, key: Any, state: dict[str, Any], timers: Any, time: int, payload: Any) -> Made:
        return [("", (first(key), state.pop("total", 0) % LIMIT, as_time(time)), time)]

    def _tally(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        made: Made = []
        entries = cell.state.setdefault("entries", {})
        for record in records:
            entries[record.v % 4] = entries.get(record.v % 4, 0) + record.v + 1
            if entries[record.v % 4] % 3 == 0:
                del entries[record.v % 4]
            total = sum(entries.values())
            made.append(("", (first(key), (total * 5 + len(entries)) % LIMIT, as_time(record.time)), record.time))
            if total > 50:
                entries.clear()
        return made

    def _table(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        entries = cell.state.setdefault("entries", {})
        for record in records:
            entries[record.v % 3] = entries.get(record.v % 3, 0) + record.v
        total = sum(entries.values())
        if total % 11 == 0:
            entries.clear()
        return [("", (first(key), total % LIMIT, None), max(record.time for record in records))]

    def _basket(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        made: Made = []
        values = cell.state.setdefault("values", [])
        for record in records:
            values.append(record.v)
            if len(values) == 5:
                made.append(("", (first(key), mixed(values), as_time(record.time)), record.time))
                values.clear()
        return made

    def _fading(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        made: Made = []
        total, written = cell.state.get("total", (0, clock))
        if clock - written > 33.5 * SECOND:
            total = 0
        for record in records:
            total += record.v
            made.append(("", (first(key), total % LIMIT, as_time(record.time)), record.time))
        cell.state["total"] = (total, clock)
        return made


def parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


class Oracle:
    """A shape, run one record after the other. Clocks are in milliseconds, times in microseconds."""

    def __init__(self, shape: Shape, now: datetime) -> None:
        self.shape = shape
        self.steps = {step.name: OracleStep(step) for step in shape.steps}
        self.marks: dict[str, int] = {}
        """The watermark of every source and step with event time that has run."""
        self.stood: dict[str, int] = {}
        """How far the time of each stream has come, whether it holds others back or not."""
        self.active: dict[str, int] = {}
        self.late: Counter[str] = Counter()
        self.clock = 0
        self.since = micros(now) // 1000

    def restarted(self, now: datetime) -> None:
        """A new driver watches: that nobody looked is not silence."""
        self.since = max(micros(now) // 1000, self.clock)

    def feed(
        self, records: Mapping[str, Sequence[Row]], now: datetime, stated: Mapping[str, int] | None = None
    ) -> dict[str, list[Row]]:
        """An epoch; the rows of every stream that a step makes."""
        clock = max(micros(now) // 1000, self.clock)
        held = self._clocks(records, clock, stated or {})
        streams: dict[str, list[Record]] = {
            source.name: [
                Record(*row, micros(row[2]) if source.timed else NEVER) for row in records.get(source.name, ())
            ]
            for source in self.shape.sources
        }
        for node in self.shape.nodes:
            if isinstance(node, MapShape):
                change = MAPS[node.kind][1]
                changed = [(change(r.v), r) for name in node.reads for r in streams[name]]
                streams[node.name] = [Record(r.k, v, r.t, r.time) for v, r in changed if v is not None]
                if all(name in held for name in node.reads):
                    held[node.name] = min(held[name] for name in node.reads)
                    self.stood[node.name] = max(self.stood[name] for name in node.reads)
            else:
                self._step(node, streams, held, clock)
        self.clock = clock
        return {name: [record.row for record in streams[name]] for name in self.shape.sunk}

    def _clocks(self, records: Mapping[str, Sequence[Row]], clock: int, stated: Mapping[str, int]) -> dict[str, int]:
        """Moves the sources on; how far each holds others back."""
        held = {}
        for source in self.shape.sources:
            if not source.timed:
                continue
            name = source.name
            idle = name in self.active and clock - max(self.active[name], self.since) > source.idle * 1000
            sane = [
                t
                for t in (micros(row[2]) for row in records.get(name, ()))
                if NEVER < t <= clock * 1000 + 3600 * SECOND
            ]
            if sane or name not in self.active:
                self.active[name] = clock
            reached = stated.get(name, max(sane) - source.lateness * SECOND if sane else NEVER)
            self.marks[name] = max(self.marks.get(name, NEVER), reached)
            held[name] = ALWAYS if idle and not sane and name not in stated else self.marks[name]
            self.stood[name] = self.marks[name]
        return held

    def _step(self, step: StepShape, streams: dict[str, list[Record]], held: dict[str, int], clock: int) -> None:
        before = self.marks.get(step.name, NEVER)
        inputs = [(each, name) for each in step.inputs for name in each.streams]
        grouped: dict[Any, list[Record]] = {}
        late: list[Record] = []
        for each, name in inputs:
            for record in streams[name]:
                if name in held and step.late != "process" and (record.time < before or record.time == NEVER):
                    late.append(record)
                    continue
                key = tuple(getattr(record, column) for column in each.key)
                grouped.setdefault(key if len(key) > 1 else key[0], []).append(record)
        self.late[step.name] += len(late)
        timed = [held[name] for _, name in inputs if name in held]
        mark = before
        if timed:
            furthest = max(self.stood[name] for _, name in inputs if name in held)
            mark = max(before, furthest if min(timed) == ALWAYS else min(timed))
            self.marks[step.name] = mark
        made = self.steps[step.name].run(grouped, mark, clock * 1000)
        for output in outputs_of(step):
            full = f"{step.name}.{output}" if output else step.name
            found = [(row, time) for to, row, time in made if to == output]
            if output == "late":
                found = [(record.row, record.time) for record in late]
            if output == "late":  # its own time
                found = [(row, time if time != NEVER else max(before, NEVER + 1)) for row, time in found]
                streams[full] = [Record(*row, time if timed else NEVER) for row, time in found]
            else:
                streams[full] = [Record(*row, max(time, before, NEVER + 1) if timed else NEVER) for row, time in found]
            if timed:
                held[full] = ALWAYS if min(timed) == ALWAYS else mark
                self.stood[full] = mark

    def state(self, step: str, name: str) -> dict[Any, Any]:
        return self.steps[step].state(name, self.clock * 1000)

    def watermark(self, name: str) -> datetime | None:
        return as_time(self.marks.get(name, NEVER))


# -- comparing -------------------------------------------------------------------------------------------------------


def compare(shape: Shape, stream: str, found: Sequence[Any], expected: Sequence[Row]) -> None:
    """The same rows; and for each k in the same order, where there is one."""
    assert Counter(found) == Counter(expected), stream
    if shape.streams[stream].order:
        assert by_k(found) == by_k(expected), f"{stream}: the order of a key's rows"


def by_k(rows: Sequence[Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(row)
    return found


def states_of(step: StepShape) -> list[str]:
    named = {"running": ["total", "last"], "windows": ["sums"], "session": ["n"], "quiet": ["n"], "basket": ["values"]}
    return ["entries"] if step.kind in ("tally", "table") else named.get(step.kind, ["total"])


def by_key(step: StepShape, rows: Sequence[tuple[Any, ...]]) -> dict[Any, Any]:
    """State as rows of keys, perhaps a subkey, and a value; of a bag, its parts in the order of their epochs."""
    if step.kind != "basket":
        return {row[:-1]: row[-1] for row in rows}
    found: dict[Any, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row[-2]):
        found.setdefault(row[:-2], []).extend(row[-1])
    return found


def compare_letters(oracle: Oracle, step: StepShape, found: Sequence[Any], epoch: int) -> None:
    expected = [(step.name, key, "ValueError: bad", epoch) for key in oracle.steps[step.name].letters]
    assert Counter((name, key, error, at) for name, key, _, error, at in found) == Counter(expected)
