"""User code: a `Computation` declares state and output, and implements `on_record` or `on_batch`.

Rules
-----
- `on_batch` is the primitive: one call per slot and epoch. `on_record` is built on it: the state of all keys of the
  batch is read at once, records are applied key by key, and everything written is stored at once.
- Records of a key are applied in order, and what one record yields is drained before the next is seen.
- A copy of the computation lives for one slot and attempt. Only declared state survives it.
- A failure names the key and the record, and leaves no trace in state or productions (G1).
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import repeat
from operator import itemgetter
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa

from millstream.errors import UserError
from millstream.model.arrays import python_values
from millstream.model.batch import Batch, Timed, To, output_column, output_of
from millstream.model.batch_timers import BatchTimer, fire_batches
from millstream.model.handles import Handle, batch_handle, record_handle
from millstream.model.holds import BatchHold, Hold, RecordHold
from millstream.model.kinds import BadState, Changed, State
from millstream.model.lateness import AS_THEY_ARE, Late, LateRule
from millstream.model.letters import Guarded, Letter, bounded, cause_text, timer_text
from millstream.model.timers import Agenda, Due, RecordTimer, Timer
from millstream.model.times import EVENT_TIME, NULL_TIME, Times, micros, moment
from millstream.model.types import format_schema, parse_schema


class At:
    """Where and when a record is processed, or a timer fires: what `on_record` and callbacks are given."""

    __slots__ = ("_watermark", "epoch", "input", "key", "micros", "payload", "tag")

    def __init__(self, epoch: int, watermark: int = NULL_TIME) -> None:
        self.micros = NULL_TIME
        self.key: Any = None
        """The key; a tuple if it has several columns."""
        self.input: str = ""
        """The name of the input that the record is from, of a step with several."""
        self.epoch: int = epoch
        """The number of the epoch."""
        self.tag: str = ""
        """In the callback of a timer: its tag."""
        self.payload: Any = None
        """In the callback of a timer: its payload, or None."""
        self._watermark = watermark

    @property
    def time(self) -> datetime | None:
        """The event time of the record, None if it has none; in the callback of a timer, the time it was set for."""
        return moment(self.micros)

    def timed(self, production: Any, when: datetime) -> Timed:
        """A production with an event time of its own, instead of that of the record or timer.

        A time before the watermark that the step has passed on is raised to it.
        """
        return Timed(production, micros(when, "at.timed"))

    @property
    def watermark(self) -> datetime | None:
        """The watermark by which records are judged: that of the epoch before. None if there is none yet."""
        return moment(self._watermark)


class Computation:
    """Base class of user code: declare state, timers and outputs, and implement `on_record` or `on_batch`.

    >>> import millstream as ms
    >>> from millstream.testing import Simulated
    >>> class WordCount(ms.Computation):
    ...     total = ms.Value("long", default=0)
    ...     output = "word string, total long"
    ...
    ...     def on_record(self, row, at):
    ...         self.total.set(self.total.get() + 1)
    ...         yield at.key, self.total.get()
    >>> query = ms.Query("words")
    >>> counts = query.source("words", None).key_by("word").compute("count", WordCount).sink("out", ms.Memory())
    >>> sim = Simulated(query, {"words": "word string"})
    >>> sim.feed(words=[("mill",), ("mill",)])
    >>> sim.outputs("out")
    [('mill', 1), ('mill', 2)]

    A fresh copy is made for each slot and attempt. Nothing on `self` survives but what is declared.
    """

    output: ClassVar[str] = ""
    """The schema of what this computation yields, as Spark DDL; empty if it yields nothing."""

    outputs: ClassVar[Mapping[str, str]] = {}
    """Named outputs and their schemas, besides the unnamed one: what is yielded as `to("name", ...)`."""

    stored_as: str = ""
    """What stored state depends on besides the types of states, in words; a restart that changes it is refused."""

    takes_late: ClassVar[tuple[str, ...]] = ("drop", "process", "output")
    """What a step may do with late records without giving wrong results."""

    makes_updates: str = ""
    """What it produces, in words, if rows take the place of earlier ones (see `model.updates`); otherwise empty."""

    harm_of_updates: str = ""
    """What it would do with such rows, in words, if that would be wrong."""

    late_rule: LateRule = AS_THEY_ARE
    """How late records are counted, and what the output `late` has of them."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses `self.total = ...` where `total` is declared: it would hide the state, and be gone with the epoch."""
        declared = getattr(type(self), name, None)
        if isinstance(declared, (State, Timer, Hold)) and not isinstance(value, (State, Timer, Hold)):
            what = "timer" if isinstance(declared, Timer) else "hold" if isinstance(declared, Hold) else "state"
            raise UserError(
                f"self.{name} = {value!r}: {name!r} is a {what}; change it with its methods, as self.{name}.set(...)"
            )
        super().__setattr__(name, value)

    def setup(self) -> None:
        """Called once before the first batch of a slot and attempt: the place to open a connection."""

    def close(self) -> None:
        """Called once after the last one, also when a batch failed."""

    def bind(self, inputs: Mapping[str, pa.Schema], key: tuple[str, ...]) -> Computation:
        """Called once before the first epoch, with the schemas of the inputs and the names of the key's columns.

        A computation whose output or states follow from them returns a copy that has these; others return themselves.
        """
        return self

    def on_record(self, row: Any, at: At) -> Iterable[Any] | None:
        """Called for each record; yields productions: tuples or dicts that fit `output`, or `to("name", ...)`."""
        raise NotImplementedError

    def on_batch(self, batch: Batch) -> Iterable[pa.RecordBatch] | None:
        """Called once per slot and epoch, with all of its records; yields `batch.output(...)` and
        `batch.output_to("name", ...)`. Built on `on_record` unless overridden.

        >>> import millstream as ms
        >>> from millstream.testing import Simulated
        >>> class FastWordCount(ms.Computation):
        ...     total = ms.Value("long", default=0)
        ...     output = "word string, total long"
        ...
        ...     def on_batch(self, batch):
        ...         totals = self.total.read(batch) + batch.count()
        ...         self.total.write(batch, totals)
        ...         yield batch.output(batch.keys, totals)
        >>> query = ms.Query("words")
        >>> counts = query.source("words", None).key_by("word").compute("count", FastWordCount)
        >>> sim = Simulated(query, {"words": "word string"})
        >>> sim.feed(words=[("mill",), ("mill",)])
        >>> sim.state("count")
        [('mill', 2)]
        """
        raise NotImplementedError


def declared_states(given: type | Computation) -> dict[str, State]:
    """The states a computation declares, those of base classes included; later declarations override."""
    return _declared(given, State, "state", 'Value("long")')


def declared_timers(given: type | Computation) -> dict[str, Timer]:
    """The timers a computation declares, those of base classes included; each must have a callback."""
    timers = _declared(given, Timer, "timer", "Timer(EVENT_TIME)")
    kind = given if isinstance(given, type) else type(given)
    for name, timer in timers.items():
        if timer.callback is None or not callable(getattr(kind, timer.callback, None)):
            raise UserError(
                f"{kind.__name__}: timer {name!r} has no callback; put @{name}.fires on the method it is to call"
            )
    return timers


def declared_holds(given: type | Computation) -> dict[str, Hold]:
    """The holds a computation declares, those of base classes included."""
    return _declared(given, Hold, "hold", "Hold()")


Declared = TypeVar("Declared")


def _declared(given: type | Computation, wanted: type[Declared], what: str, example: str) -> dict[str, Declared]:
    kind = given if isinstance(given, type) else type(given)
    found: dict[str, Declared] = {}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            if isinstance(member, wanted):
                if name in vars(Computation) and name not in ("setup", "close"):
                    raise UserError(
                        f"{kind.__name__}.{name} is a {what}, but {name!r} means something else to every computation: "
                        "choose another name"
                    )
                found[name] = member
            elif name in found:
                raise UserError(
                    f"{kind.__name__}.{name} hides the {what} {name!r} of a base class with {member!r}; "
                    f"override a {what} with another {what}, or choose another name"
                )
            elif isinstance(member, type) and issubclass(member, wanted):
                raise UserError(
                    f"{kind.__name__}.{name} is the class {member.__name__} itself; write {name} = {example}"
                )
    if not isinstance(given, type):
        found.update({name: member for name, member in vars(given).items() if isinstance(member, wanted)})
    return found


def is_vectorised(kind: type) -> bool:
    """Whether a computation has `on_batch` of its own."""
    return kind.on_batch is not Computation.on_batch  # type: ignore[attr-defined]


def check_computation(given: Any) -> Computation:
    """An instance of what was passed to `compute`: a class without arguments, or an instance."""
    if isinstance(given, type):
        if not issubclass(given, Computation):
            raise UserError(f"{given.__name__} is not a Computation; derive it from millstream.Computation")
        try:
            given = given()
        except TypeError as error:
            raise UserError(
                f"{given.__name__}() cannot be made without arguments ({error}); pass an instance instead"
            ) from error
    if not isinstance(given, Computation):
        raise UserError(f"found {given!r}, expected a Computation class or instance")
    kind = type(given)
    declared_states(kind)
    declared_timers(kind)
    declared_holds(kind)
    output_schemas(given)
    if not is_vectorised(kind) and kind.on_record is Computation.on_record:
        raise UserError(f"{kind.__name__} has neither on_record nor on_batch")
    return given


def output_schemas(computation: Computation) -> dict[str, pa.Schema]:
    """The declared outputs as Arrow schemas, by name; the unnamed one, if there is one, under \"\"."""
    kind, named = type(computation).__name__, computation.outputs
    if not isinstance(computation.output, str):
        raise UserError(f"{kind}.output must be a DDL string, found {computation.output!r}")
    if not isinstance(named, Mapping):
        raise UserError(f"{kind}.outputs must be a dict from names to DDL strings, found {named!r}")
    schemas = {"": parse_schema(computation.output)} if computation.output.strip() else {}
    for name, text in named.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise UserError(f"{kind}.outputs: {name!r} is not a name; use letters, digits and '_'")
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{kind}.outputs[{name!r}] must be a DDL string, found {text!r}")
        schemas[name] = parse_schema(text)
    return schemas


# -- running ----------------------------------------------------------------------------------------------------


class RecordFailure(Exception):
    """User code raised. Carries what the error report needs; never leaves the host."""

    def __init__(self, key: str, record: str, cause: BaseException) -> None:
        self.key, self.record, self.cause = key, record, cause
        super().__init__(key, record)


class StepFailure(RecordFailure):
    """`setup` or `close` raised: the failure of no record."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__("", "", cause)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a batch led to: productions by output, their event times, the handles that know what changed, the records
    that failed, if they become letters, and those that were late."""

    productions: dict[str, pa.RecordBatch]
    times: dict[str, Times]
    handles: Mapping[str, Handle]
    letters: Sequence[Letter] = ()
    late: Sequence[Late] = ()
    """What the computation has said of late records itself."""


def run_batch(
    computation: Computation,
    states: Mapping[str, State],
    batch: Batch,
    stored: Callable[[State], Any],
    timers: Mapping[str, RecordTimer | BatchTimer] | None = None,
    due: Mapping[str, Due] | None = None,
    guarded: bool = False,
    holds: Mapping[str, RecordHold | BatchHold] | None = None,
) -> Outcome:
    """Runs a computation over a batch, then the timers that are due. Raises `RecordFailure` if user code does.

    If it is guarded, what `on_record` or the callback of a timer raises becomes a letter instead.
    """
    vars(computation).update({**(timers or {}), **(holds or {})})
    schemas = output_schemas(computation)
    if is_vectorised(type(computation)):
        handles: dict[str, Handle] = {n: batch_handle(s, batch, stored(s)) for n, s in states.items()}
        vars(computation).update(handles)
        try:
            yielded = _call_batches(computation, batch, timers or {})
            productions, times = _collect_batches(yielded, schemas, batch)
        except (Exception, SystemExit) as error:
            raise RecordFailure("", "", error) from error
    else:
        cells = {name: record_handle(state, batch, stored(state)) for name, state in states.items()}
        vars(computation).update(cells)
        records = {name: timer for name, timer in (timers or {}).items() if isinstance(timer, RecordTimer)}
        handles_of_keys = [*cells.values(), *records.values(), *(holds or {}).values()]
        run = _RecordRun(computation, batch, handles_of_keys, records)
        guard = Guarded(run, lambda made: _from_yields(made, schemas, None), schemas) if guarded else None
        applied = _apply_records(run, guard, dict(due or {}))
        try:
            productions, times = _from_yields(applied.produced, schemas, applied.stamps)
        except Exception as error:
            raise RecordFailure(_key_of_misfit(batch, applied, schemas), "", error) from error
        return Outcome(productions, times, dict(cells), guard.letters if guard else ())
    return Outcome(productions, times, handles, late=tuple(batch._late))


def setup(computation: Computation) -> None:
    """Calls `setup()`; not a state or timer of that name, which a computation may declare."""
    method = type(computation).setup
    if callable(method):
        method(computation)


def close(computation: Computation) -> None:
    """Calls `close()`; not a state or timer of that name, which a computation may declare."""
    method = type(computation).close
    if callable(method):
        method(computation)


def letters_of(batch: Batch, timers: Mapping[str, Timer], due: Mapping[str, Due], cause: BaseException) -> list[Letter]:
    """All records and due timers of a batch as letters, with one cause."""
    keys, error, found = _keys(batch), cause_text(cause), []
    for part in batch.inputs.values():
        owners = np.repeat(np.arange(len(keys)), part.count()).tolist()
        for owner, row, stamp in zip(owners, _rows_as_tuples(part.rows), part.micros.tolist(), strict=True):
            found.append(Letter(bounded(repr(keys[owner])), bounded(repr(row)), error, stamp))
    for name, waiting in due.items():
        for place, tag, at, _ in waiting.listed():
            stamp = at if timers[name].kind == EVENT_TIME else NULL_TIME
            found.append(Letter(bounded(repr(keys[place])), bounded(timer_text(name, at, tag)), error, stamp))
    return found


def changes_of(handle: Handle | RecordTimer | BatchTimer, batch: Batch) -> Changed | None:
    """What a handle changed; a value that does not fit its type is a failure of its key."""
    try:
        return handle.changes()
    except BadState as error:
        raise RecordFailure(repr(_keys(batch)[error.index]), "", error) from error
    except Exception as error:
        raise RecordFailure("", "", error) from error


@dataclass(frozen=True, slots=True)
class _Applied:
    """All productions: those of records, with the places where each key's end, then those of timers, with their keys;
    and if there is event time, the times of them all."""

    produced: list[Any]
    ends: list[int]
    owners: list[int]
    stamps: list[int] | None

    def key_of(self, index: int) -> int:
        """The key that a production is of."""
        records = self.ends[-1] if self.ends else 0
        return bisect_right(self.ends, index) if index < records else self.owners[index - records]


def _apply_records(run: _RecordRun, guard: Guarded | None, due: dict[str, Due]) -> _Applied:
    """Applies the records key by key, then the timers that are due."""
    batch = run.batch
    if guard is not None:
        run.guard, run.on_record = guard, guard.on_record
    collecting = gc.isenabled()
    gc.disable()  # many small tuples and no cycles: the collector would walk all of them again and again
    try:
        if batch.timed_input:
            run.apply_timed()
        elif len(batch.inputs) == 1:
            run.apply_only()
        else:
            run.apply_all()
        if run.timers:
            run.fire(Agenda(run.timers, due, guard.endless if guard else None))
    except (Exception, SystemExit) as error:
        raise RecordFailure(repr(run.keys[run.index]), run.subject(), _explained(error)) from error
    finally:
        if collecting:
            gc.enable()
    return _Applied(run.produced, run.ends, run.owners, run.stamps if batch.timed_input else None)


class _RecordRun:
    """The records of a batch on their way through `on_record`. `index` and the rest say where it is, for errors."""

    def __init__(
        self, computation: Computation, batch: Batch, handles: list[Any], timers: dict[str, RecordTimer]
    ) -> None:
        self.computation = computation
        self.on_record: Callable[[Any, At], Iterable[Any] | None] = computation.on_record
        self.guard: Guarded | None = None
        self.batch, self.handles, self.timers = batch, handles, timers
        self.keys = _keys(batch)
        self.at = At(batch.epoch, batch._watermark)
        self.event_timers = [timer for timer in timers.values() if timer.declared.kind == EVENT_TIME]
        self.parts = []
        for name, part in batch.inputs.items():
            records = _rows_as_tuples(part.rows)
            self.parts.append((name, records, [*part.starts.tolist(), len(records)]))
        self.produced: list[Any] = []
        self.ends: list[int] = []
        self.owners: list[int] = []
        self.stamps: list[int] = []
        self.index = 0
        self.record: Any = None
        self.timer: RecordTimer | None = None

    def subject(self) -> str:
        """The record or timer that is being processed."""
        if self.timer is not None:
            return timer_text(self.timer.declared.name, self.at.micros, self.at.tag)
        return repr(self.record)

    @property
    def stamp(self) -> int:
        """The event time of what is being processed."""
        return NULL_TIME if self.timer is not None and self.timer.declared.kind != EVENT_TIME else self.at.micros

    def apply_only(self) -> None:
        """The quickest way, for one input without event time."""
        [(self.at.input, records, bounds)] = self.parts
        handles, at, on_record = self.handles, self.at, self.on_record
        produced, ends, extend = self.produced, self.ends, self.produced.extend
        for index, key in enumerate(self.keys):
            self.index = index
            at.key = key
            for handle in handles:
                handle.index = index
            for position in range(bounds[index], bounds[index + 1]):
                self.record = record = records[position]
                yielded = on_record(record, at)
                if yielded is not None:
                    extend(yielded)
            ends.append(len(produced))

    def apply_all(self) -> None:
        """Several inputs without event time."""
        at, on_record = self.at, self.on_record
        for index in range(len(self.keys)):
            self._begin(index)
            for at.input, records, bounds in self.parts:
                for position in range(bounds[index], bounds[index + 1]):
                    self.record = records[position]
                    yielded = on_record(self.record, at)
                    if yielded is not None:
                        self.produced.extend(yielded)
            self.ends.append(len(self.produced))

    def apply_timed(self) -> None:
        """Any inputs, with event time."""
        at, stamps, produced = self.at, self.stamps, self.produced
        all_times = [part.micros.tolist() for part in self.batch.inputs.values()]
        for index in range(len(self.keys)):
            self._begin(index)
            for (at.input, records, bounds), times in zip(self.parts, all_times, strict=True):
                for position in range(bounds[index], bounds[index + 1]):
                    self.record, at.micros = records[position], times[position]
                    for timer in self.event_timers:
                        timer.now = at.micros
                    yielded = self.on_record(self.record, at)
                    if yielded is not None:
                        produced.extend(yielded)
                        stamps += [at.micros] * (len(produced) - len(stamps))
            self.ends.append(len(produced))

    def fire(self, agenda: Agenda) -> None:
        """The timers that are due, key by key."""
        at, produced = self.at, self.produced
        at.input = ""
        for index in agenda.due_keys():
            self._begin(index)
            for timer, at.micros, at.tag, at.payload in agenda.of(index):
                self.timer, event = timer, timer.declared.kind == EVENT_TIME
                for each in self.event_timers:
                    each.now = at.micros if event else each.limit
                callback = getattr(self.computation, timer.declared.callback or "")
                yielded = callback(at) if self.guard is None else self.guard.called(callback, at)
                if yielded is not None:
                    before = len(produced)
                    produced.extend(yielded)
                    self.stamps += [at.micros if event else NULL_TIME] * (len(produced) - len(self.stamps))
                    self.owners += [index] * (len(produced) - before)

    def _begin(self, index: int) -> None:
        self.index, self.at.key = index, self.keys[index]
        for handle in self.handles:
            handle.index = index


def _explained(error: BaseException) -> BaseException:
    """A failure to go through what user code returned, as what it is; any other failure as it is."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    ours = trace is not None and trace.tb_frame.f_code.co_filename == __file__
    if isinstance(error, TypeError) and ours and "not iterable" in str(error):
        kind = str(error).partition("'")[2].partition("'")[0]
        return UserError(
            f"on_record, or a callback, returned something of type {kind}; yield productions, or return a list of "
            "them, or nothing"
        )
    return error


def _key_of_misfit(batch: Batch, applied: _Applied, schemas: Mapping[str, pa.Schema]) -> str:
    """The key whose production is the first that does not fit."""
    for index, item in enumerate(applied.produced):
        try:
            _from_yields([item], schemas, None)
        except Exception:  # whatever it raises, this is the one
            return repr(_keys(batch)[applied.key_of(index)])
    return ""


def _keys(batch: Batch) -> list[Any]:
    lists = [python_values(column) for column in batch.key_columns]
    return lists[0] if len(lists) == 1 else list(zip(*lists, strict=True))


def _rows_as_tuples(rows: pa.RecordBatch) -> list[Any]:
    """Named tuples of the input's columns; names that Python does not allow become `_0`, `_1`..."""
    row_type = namedtuple("Row", rows.schema.names, rename=True)  # type: ignore[misc]
    columns = zip(*(python_values(column) for column in rows.columns), strict=True)
    return list(map(tuple.__new__, repeat(row_type), columns))  # as _make does, without a Python call per record


def _call_batches(computation: Computation, batch: Batch, timers: Mapping[str, Any]) -> Iterator[Any]:
    """What `on_batch` yields, if there are records, and then what the callbacks of timers yield: with the times of the
    timers if it is one for each, else with the newest of them; timers of wall time give none."""
    if any(part.rows_count for part in batch.inputs.values()):
        yield from _listed(computation.on_batch(batch._of_records()))
    if timers:
        for timer, fired in fire_batches(dict(timers)):
            for item in _listed(getattr(computation, timer.declared.callback or "")(fired)):
                made = item.value if isinstance(item, To) else item
                if not isinstance(made, pa.RecordBatch):
                    yield item
                elif timer.declared.kind != EVENT_TIME:
                    yield Timed(item, np.full(made.num_rows, NULL_TIME))
                else:
                    aligned = made.num_rows == len(fired)
                    yield Timed(item, fired.micros if aligned else np.full(made.num_rows, fired.micros.max()))


def _listed(yielded: Any) -> Iterable[Any]:
    """What a method yielded or returned; what it should not have returned is found in the list."""
    if yielded is None:
        return ()
    whole = isinstance(yielded, (pa.RecordBatch, pa.Table, To, Timed, Mapping, str, bytes))
    return [yielded] if whole or not isinstance(yielded, Iterable) else yielded


def _collect_batches(
    yielded: Iterable[Any], schemas: Mapping[str, pa.Schema], given: Batch
) -> tuple[dict[str, pa.RecordBatch], dict[str, Times]]:
    found: dict[str, list[pa.RecordBatch]] = {}
    stamps: dict[str, list[Times]] = {}
    for item in yielded:
        times = item.micros if isinstance(item, Timed) else None
        item = item.productions if isinstance(item, Timed) else item
        name, batch = (item.name, item.value) if isinstance(item, To) else ("", item)
        if not name and "" not in schemas:
            raise UserError("on_batch, or a callback, yielded productions, but the computation declares no output")
        schema = output_of(schemas, name) if name else schemas[""]
        if not isinstance(batch, pa.RecordBatch) or batch.schema != schema:
            text = f"a table of {batch.column_names}" if isinstance(batch, pa.Table) else f"{batch!r}"[:200]
            text = format_schema(batch.schema) if isinstance(batch, pa.RecordBatch) else text
            wanted = f"batch.output_to({name!r}, ...)" if name else "batch.output(...)"
            raise UserError(f"on_batch, or a callback, yielded {text}; yield {wanted} for {format_schema(schema)}")
        found.setdefault(name, []).append(batch)
        if given.timed_input:
            stamps.setdefault(name, []).append(_newest(given, batch.num_rows) if times is None else times)
    productions = {name: pa.concat_batches(batches) for name, batches in found.items()}
    return productions, {name: np.concatenate(parts) for name, parts in stamps.items()}


def _newest(given: Batch, count: int) -> Times:
    """Event times of productions that were given none: the newest of each key, where there is one for each of the keys
    with records; else the newest of the batch."""
    records = given._of_records()
    newest = records.newest().view(np.int64)
    if count == len(records):
        return newest
    return np.full(count, newest.max(initial=NULL_TIME), np.int64)


def _from_yields(
    produced: list[Any], schemas: Mapping[str, pa.Schema], stamps: list[int] | None
) -> tuple[dict[str, pa.RecordBatch], dict[str, Times]]:
    """What `on_record` yielded, by output, and the event times of it, if there are any."""
    if not produced:
        return {}, {}
    kinds = set(map(type, produced))
    if Timed in kinds:
        if stamps is not None:
            stamps = [
                item.micros if isinstance(item, Timed) else stamp for item, stamp in zip(produced, stamps, strict=True)
            ]
        produced = [item.productions if isinstance(item, Timed) else item for item in produced]
        kinds = set(map(type, produced))
    if To not in kinds:
        times = {} if stamps is None else {"": np.array(stamps, np.int64)}
        return {"": _from_rows(produced, "", schemas)}, times
    by_name: dict[str, list[int]] = {}
    for index, item in enumerate(produced):
        by_name.setdefault(item.name if isinstance(item, To) else "", []).append(index)
    productions, times = {}, {}
    for name, indices in by_name.items():
        items = [item.value if isinstance(item, To) else item for item in map(produced.__getitem__, indices)]
        productions[name] = _from_rows(items, name, schemas)
        if stamps is not None:
            times[name] = np.array(stamps, np.int64)[indices]
    return productions, times


def _from_rows(produced: list[Any], name: str, schemas: Mapping[str, pa.Schema]) -> pa.RecordBatch:
    if not name and "" not in schemas:
        raise UserError(f"on_record, or a callback, yielded {produced[0]!r}, but the computation declares no output")
    schema = output_of(schemas, name) if name else schemas[""]
    kinds = set(map(type, produced))
    if not all(issubclass(kind, (tuple, list, dict)) for kind in kinds):
        odd = next(item for item in produced if not isinstance(item, (tuple, list, dict)))
        raise UserError(
            f"on_record, or a callback, yielded {odd!r}; yield tuples or dicts that fit {format_schema(schema)}"
        )
    if any(issubclass(kind, dict) for kind in kinds):
        produced = [_dict_as_tuple(item, schema) if isinstance(item, dict) else item for item in produced]
    if set(map(len, produced)) != {len(schema)}:
        odd = next(item for item in produced if len(item) != len(schema))
        raise UserError(
            f"on_record, or a callback, yielded {odd!r}: {len(odd)} values found, {len(schema)} expected "
            f"({format_schema(schema)})"
        )
    arrays = []
    for index, field in enumerate(schema):
        arrays.append(output_column(field, list(map(itemgetter(index), produced))))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _dict_as_tuple(item: dict[str, Any], schema: pa.Schema) -> tuple[Any, ...]:
    if item.keys() != set(schema.names):
        raise UserError(
            f"on_record, or a callback, yielded {item!r}; the output's columns are {', '.join(schema.names)}"
        )
    return tuple(item[name] for name in schema.names)
