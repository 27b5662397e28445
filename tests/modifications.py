"""Random modifications of random queries: each is made twice, as a `Change` of the query and as one of its shape.

What a modification makes of state is plain data (`Effect`), by which the sequential oracle goes on. It is applied in
the epoch in which the modification was committed, as the outcome says, and not at all if it was not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, ClassVar

import pyarrow as pa

import millstream as ms
from millstream.model.carry import carry, convert, drop, fresh
from millstream.model.change import Change
from millstream.model.query import Query
from random_queries import (
    CAN_FAIL,
    LIMIT,
    MAPS,
    NEEDS_ORDER,
    NEEDS_TIME,
    ROW,
    Cell,
    InputShape,
    Made,
    MapShape,
    Oracle,
    OracleStep,
    Record,
    Running,
    Shape,
    StepShape,
    Stream,
    as_time,
    build,
    computation_of,
    first,
    outputs_of,
    shape_from,
    sink_name,
)

# -- more computations -----------------------------------------------------------------------------------------------


class Ratio(ms.Computation):
    """A total of another type."""

    total = ms.Value("double", default=0.0)
    output = ROW

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.total.set(self.total.get() + row.v / 2)
        yield first(at.key), int(self.total.get() * 2) % LIMIT, at.time


class Amount(ms.Computation):
    """A total of another name."""

    amount = ms.Value("long", default=0)
    output = ROW

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.amount.set(self.amount.get() + row.v + 1)
        yield first(at.key), self.amount.get() % LIMIT, at.time


class Words(ms.Computation):
    """A bag and a map of other types, beside each other."""

    values = ms.Bag("string")
    entries = ms.Map("long", "double", default=0.0)
    output = ROW

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.values.append(f"n{row.v}")
        self.entries.set(row.v % 2, self.entries.get(row.v % 2) + row.v)
        yield first(at.key), (len(self.values.read()) + int(self.entries.get(0))) % LIMIT, at.time


WITHIN = 10


def only_even(batch: pa.RecordBatch) -> list[bool]:
    return [v % 2 == 0 for v in batch["v"].to_pylist()]


class Bomb(Running):
    """Fails in the first epoch in which it has a record, as long as its fuse burns: until it has been committed, which
    the test tells."""

    burning: ClassVar[set[str]] = set()

    def __init__(self, name: str, mode: str) -> None:
        super().__init__(False)
        self.name, self.mode = name, mode

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        if self.name in Bomb.burning and self.mode == "raises":
            raise ValueError("bang")
        yield from super().on_record(row, at)
        if self.name in Bomb.burning:
            yield "not", "this", "schema", 4


class Uncopied(Running):
    def __deepcopy__(self, memo: Any) -> Any:
        raise OSError("it holds a socket")


@dataclass(frozen=True)
class Kept:
    """What a kind of computation stores: states by name with their types, and its timer, if it has one."""

    states: dict[str, str]
    timer: str = ""
    clock: str = ""


KEPT: dict[str, Kept] = {
    "running": Kept({"total": "long", "last": "long?"}),
    "sum": Kept({"total": "long"}),
    "windows": Kept({"sums": "object"}, "close", "payload"),
    "session": Kept({"n": "long"}, "end", "event"),
    "quiet": Kept({"n": "long"}, "silence", "wall"),
    "alarm": Kept({"total": "long"}, "ring", "event"),
    "tally": Kept({"entries": "map"}),
    "table": Kept({"entries": "map"}),
    "basket": Kept({"values": "bag"}),
    "fading": Kept({"total": "expiring"}),
    "ratio": Kept({"total": "double"}),
    "amount": Kept({"amount": "long"}),
    "words": Kept({"values": "bag of strings", "entries": "map of doubles"}),
    "dedupe": Kept({"newest": "dedupe newest", "older": "dedupe older"}),
}
ORDERED = (*NEEDS_ORDER, "ratio", "amount", "words", "dedupe")
TIMED = (*NEEDS_TIME, "dedupe")

Turn = Callable[[Any], Any]
"""What makes a new value of an old one."""


def twisted(x: int) -> int:
    """Not idempotent, and not to be done twice or never unnoticed."""
    return x * 2 + 1


def halved(x: float) -> int:
    return int(x) * 3 + 1


def each_twisted(sums: dict[int, int]) -> dict[int, int]:
    return {start: twisted(x) for start, x in sums.items()}


def as_word(x: int) -> str:
    return f"w{x}"


def as_number(x: str) -> int:
    return int(x[1:]) + 1


def turns(old: str, new: str) -> list[tuple[str, Turn | None]]:
    """How values of one type may become those of another: the rule, and what it does to a value."""
    ways: dict[tuple[str, str], list[tuple[str, Turn | None]]] = {
        ("long", "double"): [("double", float)],
        ("double", "long"): [("convert", halved)],
        ("map", "map of doubles"): [("double", float)],
        ("map of doubles", "map"): [("convert", halved)],
        ("bag", "bag of strings"): [("convert", as_word)],
        ("bag of strings", "bag"): [("convert", as_number)],
    }
    if old == new:
        same: list[tuple[str, Turn | None]] = [("carry", None)]
        if old in ("long", "map", "bag"):
            same.append(("convert", twisted))
        return same + ([("convert", each_twisted)] if old == "object" else [])
    return ways.get((old, new), [])


# -- shapes with sinks -----------------------------------------------------------------------------------------------


@dataclass
class Sunk(Shape):
    """A shape whose sinks have names of their own: a stream may have none, or several."""

    sinks: dict[str, str] = field(default_factory=dict)

    @property
    def sunk(self) -> list[str]:
        return sorted({stream for stream in self.sinks.values() if not stream.endswith(".dead_letter")})


Node = MapShape | StepShape


class FilterShape(MapShape):
    """A map that is a filter: event times go through it beside the columns."""


def map_shape(name: str, reads: tuple[str, ...], kind: str) -> tuple[MapShape, dict[str, Any]]:
    """A map, and how a change calls it."""
    if kind == "even":
        return FilterShape(name, reads, kind), {"keep": only_even}
    return MapShape(name, reads, kind), {"map": MAPS[kind][0], "output": ROW}


def with_sinks(shape: Shape) -> Sunk:
    sinks = {sink_name(stream): stream for stream in shape.sunk}
    letters = {sink_name(f"{step.name}.dead_letter"): f"{step.name}.dead_letter" for step in shape.steps if step.picky}
    return Sunk(shape.sources, shape.nodes, shape.streams, {**sinks, **letters})


def reads_of(node: Node) -> list[str]:
    return list(node.reads) if isinstance(node, MapShape) else [name for each in node.inputs for name in each.streams]


def made_by(node: Node) -> list[str]:
    if isinstance(node, MapShape):
        return [node.name]
    made = [f"{node.name}.{output}" if output else node.name for output in outputs_of(node)]
    return [*made, *([f"{node.name}.dead_letter"] if node.picky else [])]


def rewired(node: Node, streams: Mapping[str, str | None]) -> Node | None:
    """A node that reads others in the place of some; None if nothing is left for it."""

    def swapped(names: Iterable[str]) -> tuple[str, ...]:
        found = [streams.get(name, name) for name in names]
        return tuple(dict.fromkeys(name for name in found if name is not None))

    if isinstance(node, MapShape):
        node = replace(node, reads=swapped(node.reads))
        return node if node.reads else None
    inputs = tuple(replace(each, streams=swapped(each.streams)) for each in node.inputs)
    inputs = tuple(each for each in inputs if each.streams)
    return replace(node, inputs=inputs) if inputs else None


def resolved(shape: Sunk) -> Sunk | None:
    """The shape with its nodes in order and its streams as they are then; None if it is no query, or one of which the
    oracle cannot say what it does."""
    streams = {source.name: Stream(source.name, "column" * source.timed, "all") for source in shape.sources}
    nodes: list[Node] = []
    waiting = list(shape.nodes)
    while waiting:
        node = next((each for each in waiting if all(name in streams for name in reads_of(each))), None)
        if node is None:
            return None
        waiting.remove(node)
        nodes.append(node)
        found = mapped(node, streams) if isinstance(node, MapShape) else stepped(node, streams)
        if found is None:
            return None
        streams |= found
    unmade = {source.name for source in shape.sources}
    for node in nodes:
        if isinstance(node, MapShape) and any(name in unmade for name in node.reads):
            unmade.add(node.name)
    letters = {name for node in nodes for name in made_by(node) if name.endswith(".dead_letter")}
    if any(stream in unmade or (stream not in streams and stream not in letters) for stream in shape.sinks.values()):
        return None
    if not any(isinstance(node, StepShape) for node in nodes) or len(nodes) > 9:
        return None
    return Sunk(shape.sources, nodes, streams, dict(shape.sinks))


def mapped(node: MapShape, streams: Mapping[str, Stream]) -> dict[str, Stream] | None:
    read = [streams[name] for name in node.reads]
    if len({stream.time for stream in read}) > 1 or len(set(node.reads)) < len(node.reads):
        return None
    own = isinstance(node, FilterShape)
    if node.kind == "even" and read[0].time == "beside" and not own:
        return None  # a function may not leave rows out whose times it does not see
    time = "beside" if own and read[0].time else read[0].time
    return {node.name: Stream(node.name, time, read[0].order if len(read) == 1 else "")}


def stepped(step: StepShape, streams: Mapping[str, Stream]) -> dict[str, Stream] | None:
    read = [(streams[name], each.key) for each in step.inputs for name in each.streams]
    timed = any(stream.time for stream, _ in read)
    ordered = all(stream.order == "all" or (stream.order == "k" and "k" in key) for stream, key in read)
    if (
        (step.kind in TIMED and not timed)
        or (step.kind in ORDERED and not ordered)
        or (step.late != "drop" and not timed)
    ):
        return None
    if step.kind == "dedupe" and not all(stream.time == "column" for stream, _ in read):
        return None  # productions may have no time before there is a watermark, which it refuses
    width = len(step.inputs[0].key)
    keeps_key = width == 1 and not (step.kind == "sum" and step.number)
    by_k = all(key == ("k",) and stream.order for stream, key in read)
    found = {}
    for output in outputs_of(step):
        order = by_k if output == "late" or step.kind == "dedupe" else keeps_key
        full = f"{step.name}.{output}" if output else step.name
        found[full] = Stream(full, "beside" * timed, "k" * order)
    return found


def computation(step: StepShape) -> ms.Computation:
    made: dict[str, Callable[[], ms.Computation]] = {
        "ratio": Ratio,
        "amount": Amount,
        "words": Words,
        "dedupe": lambda: ms.Dedupe(*step.inputs[0].key, within=timedelta(seconds=WITHIN)),
    }
    return made[step.kind]() if step.kind in made else computation_of(step)


def query_of(shape: Shape) -> Query:
    return build(shape)


def first_shape(rng: random.Random) -> Sunk:
    while True:
        found = resolved(with_sinks(shape_from(rng)))
        if found is not None:
            return found


# -- what becomes of state -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """Where the state of a step is from: the step, and for each of its states and its timer the old one, and what is
    done to its values. All of them as they are, if nothing is said."""

    step: str
    states: dict[str, tuple[str, Turn | None]] | None = None


@dataclass(frozen=True)
class Effect:
    """A shape, and where the state of its steps is from. Steps that are not named begin empty."""

    shape: Sunk
    taken: dict[str, Taken]


def inverse(before: Sunk, effect: Effect) -> Effect | None:
    """What undoes an effect; None if something was converted."""
    back: dict[str, Taken] = {}
    for name, taken in effect.taken.items():
        states = taken.states
        if states is not None:
            if any(turn is not None for _, turn in states.values()):
                return None
            states = {old: (new, None) for new, (old, _) in states.items()}
        back[taken.step] = Taken(name, states)
    return Effect(before, back)


class ModifiedStep(OracleStep):
    """More kinds of steps."""

    def state(self, name: str, clock: int) -> dict[Any, Any]:
        if name == "entries":
            kept = {key: cell.state[name] for key, cell in self.cells.items() if cell.state.get(name)}
            return {(*_parts(key), sub): value for key, found in kept.items() for sub, value in found.items()}
        return super().state(name, clock)

    def _ratio(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        made: Made = []
        for record in records:
            cell.state["total"] = total = cell.state.get("total", 0.0) + record.v / 2
            made.append(("", (first(key), int(total * 2) % LIMIT, as_time(record.time)), record.time))
        return made

    def _amount(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        made: Made = []
        for record in records:
            cell.state["amount"] = amount = cell.state.get("amount", 0) + record.v + 1
            made.append(("", (first(key), amount % LIMIT, as_time(record.time)), record.time))
        return made

    def _words(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        made: Made = []
        values, entries = cell.state.setdefault("values", []), cell.state.setdefault("entries", {})
        for record in records:
            values.append(f"n{record.v}")
            entries[record.v % 2] = entries.get(record.v % 2, 0.0) + record.v
            v = (len(values) + int(entries.get(0, 0.0))) % LIMIT
            made.append(("", (first(key), v, as_time(record.time)), record.time))
        return made

    def _dedupe(self, key: Any, cell: Cell, records: list[Record], clock: int) -> Made:
        made: Made = []
        passed = cell.state.setdefault("newest", [])
        for record in records:
            if all(abs(record.time - time) >= WITHIN * 1_000_000 for time in passed):
                passed.append(record.time)
                made.append(("", record.row, record.time))
        return made


def _parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


class ModifiedOracle(Oracle):
    """An oracle whose shape changes between two epochs."""

    def __init__(self, shape: Sunk, now: datetime) -> None:
        super().__init__(shape, now)
        self.steps = {step.name: ModifiedStep(step) for step in shape.steps}

    def modify(self, effect: Effect) -> None:
        steps: dict[str, OracleStep] = {}
        sources = {source.name for source in effect.shape.sources}
        marks = {name: mark for name, mark in self.marks.items() if name in sources}
        late = type(self.late)()
        for step in effect.shape.steps:
            made = steps[step.name] = ModifiedStep(step)
            taken = effect.taken.get(step.name)
            if taken is None:
                continue
            old = self.steps[taken.step]
            made.cells = old.cells if taken.states is None else self._cells(old, taken.states, KEPT[step.kind].timer)
            late[step.name] = self.late[taken.step]
            if taken.step in self.marks:
                marks[step.name] = self.marks[taken.step]
        self.shape, self.steps, self.marks, self.late = effect.shape, steps, marks, late

    def _cells(self, old: OracleStep, states: Mapping[str, tuple[str, Turn | None]], timer: str) -> dict[Any, Cell]:
        found: dict[Any, Cell] = {}
        for key, cell in old.cells.items():
            new = found[key] = Cell()
            for name, (source, turn) in states.items():
                if name == timer:
                    new.timers = dict(cell.timers)
                elif cell.state.get(source) is not None:
                    new.state[name] = turned(cell.state[source], turn)
        return found


def turned(value: Any, turn: Turn | None) -> Any:
    if turn is None or turn is each_twisted:
        return value if turn is None else turn(value)
    if isinstance(value, dict):
        return {sub: turn(each) for sub, each in value.items()}
    return [turn(each) for each in value] if isinstance(value, list) else turn(value)


def states_of(step: StepShape) -> list[str]:
    return [] if step.kind == "dedupe" else list(KEPT[step.kind].states)


def by_key(step: StepShape, name: str, rows: Sequence[tuple[Any, ...]]) -> dict[Any, Any]:
    if name != "values":
        return {row[:-1]: row[-1] for row in rows}
    found: dict[Any, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row[-2]):
        found.setdefault(row[:-2], []).extend(row[-1])
    return found


# -- random changes --------------------------------------------------------------------------------------------------

VERBS = ("insert map", "insert step", "branch", "replace", "replace map", "remove", "cut", "rename", "key")
BAD = ("raises", "schema", "uncopied", "forgets")


class Editor:
    """Makes one change: of the query, and of the shape. What has been thought of may not be possible: then `apply` says
    so, and has changed neither."""

    def __init__(self, change: Change, shape: Sunk, rng: random.Random, number: int, used: set[str]) -> None:
        self.change, self.shape, self.rng, self.number = change, shape, rng, number
        self.used = used | {step.name for step in shape.steps}
        """The names that steps have had: one that is free may be another's."""
        self.taken = {step.name: Taken(step.name) for step in shape.steps}
        self.done: list[str] = []

    @property
    def effect(self) -> Effect:
        return Effect(self.shape, self.taken)

    def apply(self, verb: str) -> bool:
        """Does one thing more; whether it could be done."""
        shape = getattr(self, f"_{verb.replace(' ', '_')}")()
        found = None if shape is None else resolved(shape)
        if found is None:
            return False
        self.shape = found
        self.done.append(verb)
        return True

    def bad(self, mode: str) -> None:
        """Puts something in that does not work."""
        name = self._fresh("bad")
        if mode == "forgets":
            steps = [step for step in self.shape.steps if step.name in self.taken]
            if steps:
                step = self.rng.choice(steps)
                self.change.replace(step.name, computation(step))
                self.done.append(mode)
                return
            mode = "uncopied"
        made = Uncopied(False) if mode == "uncopied" else Bomb(name, mode)
        source = self.rng.choice(self.shape.sources).name
        step = StepShape(name, (InputShape("input", (source,), ("k",)),), "running", 0, "drop", False)
        found = resolved(replace_nodes(self.shape, [*self.shape.nodes, step]))
        if found is None:
            return  # too large
        self.change.insert(name, made, after=source, key="k")
        self.shape = found
        self.done.append(mode)
        Bomb.burning.add(name)

    # -- what may be done

    def _fresh(self, kind: str) -> str:
        self.number += 1
        free = sorted(self.used - {node.name for node in self.shape.nodes})
        if free and kind in "yz" and self.rng.random() < 0.4:
            return self.rng.choice(free)
        self.used.add(f"{kind}{self.number}")
        return f"{kind}{self.number}"

    def _pick(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """One or two streams, and some of those that read them."""
        streams = list(self.shape.streams)
        after = tuple(dict.fromkeys(self.rng.choices(streams, k=self.rng.choice((1, 1, 1, 2)))))
        readers = [node.name for node in self.shape.nodes if set(reads_of(node)) & set(after)]
        readers += [sink for sink, stream in self.shape.sinks.items() if stream in after]
        return after, tuple(self.rng.sample(readers, self.rng.randint(0, len(readers))))

    def _put_between(self, node: Node, after: Sequence[str], before: Sequence[str]) -> Sunk | None:
        nodes: list[Node] = []
        for each in self.shape.nodes:
            found = rewired(each, dict.fromkeys(after, node.name)) if each.name in before else each
            if found is None:
                return None
            nodes.append(found)
        sinks = {sink: node.name if sink in before else stream for sink, stream in self.shape.sinks.items()}
        return Sunk(self.shape.sources, [*nodes, node], {}, sinks)

    def _insert_map(self) -> Sunk | None:
        after, before = self._pick()
        if not before:
            return None
        node, given = map_shape(self._fresh("f"), after, self.rng.choice(tuple(MAPS)))
        shape = self._put_between(node, after, before)
        if shape is None or resolved(shape) is None:
            return None
        self.change.insert(node.name, after=list(after), before=list(before), **given)
        return shape

    def _step(self, after: Sequence[str]) -> StepShape:
        kind = self.rng.choice(tuple(KEPT))
        key = self.rng.choice((("k",), ("k",), ("v",), ("k", "v")))
        late = self.rng.choice(("drop", "drop", "output") if kind == "dedupe" else ("drop", "process", "output"))
        if not any(self.shape.streams[name].time for name in after):
            late = "drop"
        number = {"sum": self.rng.choice((0, 3)), "quiet": self.rng.choice((0, 15))}.get(kind, 0)
        picky = kind in CAN_FAIL and self.rng.random() < 0.3
        return StepShape(self._fresh("y"), (InputShape("input", tuple(after), key),), kind, number, late, picky)

    def _insert_step(self, alone: bool = False) -> Sunk | None:
        after, before = self._pick()
        before = () if alone else before
        if not alone and not before:
            return None
        step = self._step(after)
        shape = self._put_between(step, after, before)
        if shape is None:
            return None
        sinks = {f"to_{stream.replace('.', '_')}_{self.number}": stream for stream in made_by(step)}
        shape.sinks.update(sinks)
        if resolved(shape) is None:
            return None
        self.change.insert(
            step.name,
            computation(step),
            after=after,
            before=before or None,
            key=step.inputs[0].key,
            late=step.late,
            on_error="dead_letter" if step.picky else "stop",
        )
        for sink, stream in sinks.items():
            self.change.stream(stream).sink(sink, ms.Memory())
        return shape

    def _branch(self) -> Sunk | None:
        return self._insert_step(alone=True)

    def _replace(self, key: tuple[str, ...] | None = None) -> Sunk | None:
        rng = self.rng
        old = rng.choice(self.shape.steps)
        if old.name in {name for name, taken in self.taken.items() if taken.states is not None}:
            return None  # once is enough for a change
        kind = rng.choice(tuple(KEPT)) if rng.random() < 0.8 else old.kind
        if kind == "dedupe" and (old.named or old.late == "process"):
            return None
        number = {"sum": rng.choice((0, 3)), "quiet": rng.choice((0, 15))}.get(kind, 0)
        inputs = old.inputs
        if key is not None:
            if old.named or old.inputs[0].key == key:
                return None
            inputs = (replace(old.inputs[0], key=key),)
        step = replace(old, kind=kind, number=number, picky=kind in CAN_FAIL and old.picky, inputs=inputs)
        if {*made_by(old)} - {*made_by(step)} & self._read():
            return None
        gone = [name for name in made_by(old) if name not in made_by(step)]
        sinks = {sink: stream for sink, stream in self.shape.sinks.items() if stream not in gone}
        shape = Sunk(self.shape.sources, [step if each is old else each for each in self.shape.nodes], {}, sinks)
        if resolved(shape) is None:
            return None
        for sink in set(self.shape.sinks) - set(sinks):
            self.change.remove(sink)
        empty = key is not None and len(key) != len(old.inputs[0].key)
        rules, states = self._rules(old, step, empty)
        on_error = "dead_letter" if step.picky else "stop"
        self.change.replace(step.name, computation(step), state=rules, key=key, late=step.late, on_error=on_error)
        if old.name in self.taken:
            self.taken[old.name] = Taken(self.taken[old.name].step, states)
        return shape

    def _read(self) -> set[str]:
        return {name for node in self.shape.nodes for name in reads_of(node)}

    def _key(self) -> Sunk | None:
        return self._replace(self.rng.choice((("k",), ("v",), ("k", "v"))))

    def _rules(self, old: StepShape, new: StepShape, empty: bool) -> tuple[Any, dict[str, tuple[str, Turn | None]]]:
        """A rule for everything that is stored, and what it means."""
        rng, were, are = self.rng, KEPT[old.kind], KEPT[new.kind]
        inserted = old.name not in self.taken
        rules: dict[str, Any] = {}
        states: dict[str, tuple[str, Turn | None]] = {}
        free = list(were.states)
        whole = old.kind == new.kind and not empty
        if whole and not inserted and rng.random() < 0.3:
            every = [*were.states, *([were.timer] if were.timer else [])]
            return carry(), {name: (name, None) for name in every}
        keep = not empty and not inserted and rng.random() < 0.8
        for name, kind in are.states.items():
            ways = [(source, rule, turn) for source in free for rule, turn in turns(were.states[source], kind)]
            if (new.kind in ("windows", "dedupe") and not whole) or not ways or not keep:
                rules[name] = fresh()
                continue
            source, rule, turn = rng.choice(ways)
            if new.kind == "dedupe" and source != name:
                source, rule, turn = name, "carry", None
            free.remove(source)
            given = None if source == name else source
            if rule == "convert":
                rules[name] = convert(turn, source=given)  # type: ignore[arg-type]
            else:
                rules[name] = carry(None if rule == "carry" else rule, source=given)
            states[name] = (source, turn)
        if are.timer:
            together = new.kind != "windows" or (whole and keep)
            if keep and together and were.timer and were.clock == are.clock and (rng.random() < 0.7 or whole):
                rules[are.timer] = carry(source=None if were.timer == are.timer else were.timer)
                states[are.timer] = (were.timer, None)
            else:
                rules[are.timer] = fresh()
        carried = {source for source, _ in states.values()}
        for name in (*were.states, *([were.timer] if were.timer else [])):
            if name not in carried and name not in rules:
                rules[name] = drop()
        return rules, states

    def _replace_map(self) -> Sunk | None:
        maps = [node for node in self.shape.nodes if isinstance(node, MapShape)]
        if not maps:
            return None
        old = self.rng.choice(maps)
        new, given = map_shape(old.name, old.reads, self.rng.choice(tuple(MAPS)))
        nodes = [new if each is old else each for each in self.shape.nodes]
        shape = replace_nodes(self.shape, nodes)
        if resolved(shape) is not None:
            self.change.replace(old.name, **given)
        return shape

    def _remove(self, cut: bool = False) -> Sunk | None:
        node = self.rng.choice(self.shape.nodes)
        made, reads = made_by(node), reads_of(node)
        if not cut and len(reads) != 1:
            return None
        swapped: dict[str, str | None] = dict.fromkeys(made, None if cut else reads[0])
        letters = [name for name in made if name.rpartition(".")[2] in ("late", "dead_letter")]
        swapped |= dict.fromkeys(letters)
        nodes: list[Node] = []
        for each in self.shape.nodes:
            if each is not node:
                found = rewired(each, swapped)
                if found is None:
                    return None
                nodes.append(found)
        pairs = ((sink, swapped.get(stream, stream)) for sink, stream in self.shape.sinks.items())
        shape = Sunk(self.shape.sources, nodes, {}, {sink: stream for sink, stream in pairs if stream is not None})
        if resolved(shape) is None:
            return None
        read = set(made) & {*self._read(), *self.shape.sinks.values()}
        self.change.remove(node.name, **({"cut": True} if cut else {"reconnect": True}) if read else {})
        self.taken.pop(node.name, None)
        return shape

    def _cut(self) -> Sunk | None:
        return self._remove(cut=True)

    def _rename(self) -> Sunk | None:
        step = self.rng.choice(self.shape.steps)
        new = self._fresh("z")
        swapped: dict[str, str | None] = {name: new + name.removeprefix(step.name) for name in made_by(step)}
        nodes = [rewired(replace(each, name=new) if each is step else each, swapped) for each in self.shape.nodes]
        sinks = {sink: swapped.get(stream, stream) for sink, stream in self.shape.sinks.items()}
        self.change.rename(step.name, new)
        if step.name in self.taken:
            self.taken[new] = self.taken.pop(step.name)
        return Sunk(self.shape.sources, nodes, {}, sinks)  # type: ignore[arg-type]


def replace_nodes(shape: Sunk, nodes: list[Node]) -> Sunk:
    return Sunk(shape.sources, nodes, {}, dict(shape.sinks))
