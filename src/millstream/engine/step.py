"""One step, one slot, one attempt: its computation is run over what was grouped, and what changed is written.

Rules
-----
- The computation sees the state of the manifest that the task was given. What it changes is written as new objects
  only, once it has come through.
- What is written takes up the newest segments that are no larger than itself: it costs little more than the write, and
  where most keys change in every epoch, nothing is left for compaction.
- State that cannot be read is our trouble, whatever user code made of it.
- Stored values are seen in the current form, and written in it (see `store.forms`). One that cannot be converted is a
  failure of the step, and of no record, once it is read. While it is only in the way of being taken up, it stays where
  it is: what nobody asks for stops nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.engine.grouping import Grouped, own_times, raised
from millstream.engine.sift import sift
from millstream.engine.spec import TIME_COLUMN, EpochTask, SlotTask, Spec
from millstream.errors import DamagedObject, StoreUnavailable
from millstream.model.batch import Batch
from millstream.model.batch_timers import BatchTimer
from millstream.model.computation import (
    Outcome,
    RecordFailure,
    StepFailure,
    changes_of,
    close,
    letters_of,
    run_batch,
    setup,
)
from millstream.model.graph import Step
from millstream.model.handles import Handle
from millstream.model.holds import BatchHold, RecordHold
from millstream.model.kinds import Changed, State
from millstream.model.letters import DEAD_LETTER, Letter, as_batch
from millstream.model.timers import TAG, Due, Look, RecordTimer, Timer
from millstream.model.times import EVENT_TIME, NULL_TIME, Times
from millstream.protocol.epochs import LateCount, Output
from millstream.protocol.keyspace import Hashes, Range
from millstream.protocol.manifest import Edit, Family, Input, Piece, SegmentRef
from millstream.protocol.time import END_OF_TIME, NO_TIME, Mark, step_watermark
from millstream.store import names
from millstream.store.due import DueTimers, due_between
from millstream.store.forms import LiftFailure
from millstream.store.journal import digest_of
from millstream.store.keys import KeyColumns, Mask, Rows, arrange
from millstream.store.least import least_between
from millstream.store.lookup import Found, entries_of, locate
from millstream.store.merge import newest_rows
from millstream.store.objects import ObjectStore
from millstream.store.rows import StateRows, joined_rows
from millstream.store.segments import CACHE, encode_batch, write_segments

Looked = TypeVar("Looked")

TAKE_UP = 2
"""How many times the rows it writes a task may take up from older segments."""


@dataclass(slots=True)
class Done:
    """What the steps of a level have written so far."""

    added: list[SegmentRef] = field(default_factory=list)
    edits: list[Edit] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    records: dict[str, int] = field(default_factory=dict)
    late: dict[str, LateCount] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    loads: dict[str, bytes] = field(default_factory=dict)


@dataclass(slots=True)
class _Ran:
    """What a run of a step led to, and what is to be written of each state and timer: nothing is yet."""

    outcome: Outcome
    rows: dict[str, StateRows]

    @property
    def late(self) -> LateCount:
        """The records that the run has found to be late itself."""
        return sum((LateCount(*each) for each in self.outcome.late), LateCount())

    def and_also(self, other: _Ran) -> _Ran:
        """Together with what a run over other keys led to."""
        mine, theirs = self.outcome, other.outcome
        made = dict(mine.productions)
        for output, productions in theirs.productions.items():
            made[output] = pa.concat_batches([made[output], productions]) if output in made else productions
        times = dict(mine.times)
        for output, stamps in theirs.times.items():
            times[output] = np.concatenate([times[output], stamps]) if output in times else stamps
        rows = dict(self.rows)
        for name, more in other.rows.items():
            rows[name] = _together(rows[name], more) if name in rows else more
        return _Ran(Outcome(made, times, {}, late=(*mine.late, *theirs.late)), rows)


class StepRun:
    """One step, one slot, one attempt."""

    def __init__(
        self,
        spec: Spec,
        task: EpochTask,
        mine: SlotTask,
        step: Step,
        pieces: Mapping[Family, list[Piece]],
        store: ObjectStore,
        done: Done,
    ) -> None:
        self.spec, self.task, self.mine, self.step, self.pieces, self.store, self.done = (
            spec,
            task,
            mine,
            step,
            pieces,
            store,
            done,
        )
        self.trouble: DamagedObject | StoreUnavailable | LiftFailure | None = None

    def _bounds(self, timer: Timer, marks: Mapping[str, int]) -> tuple[int, int]:
        """The time that a timer's kind had reached before the epoch, and has reached with it."""
        if timer.kind == EVENT_TIME:
            return self.task.before[self.step.name], marks[self.step.name]
        return self.task.clock_before_ms * 1000, self.task.clock_ms * 1000

    def due(self, marks: Mapping[str, int]) -> dict[str, DueTimers]:
        """The timers of the step that are due. Raises `StepFailure` if one cannot be converted."""
        found = {}
        for name, timer in self.step.timers.items():
            after, until = self._bounds(timer, marks)
            pieces = self.pieces.get(Family(self.step.name, name), [])
            forms = self.spec.forms_of(self.step.name, name)
            try:
                waiting = due_between(self.store, CACHE, pieces, timer.arrow_type, after, until, forms)
            except LiftFailure as error:
                raise StepFailure(error) from error
            if waiting is not None:
                found[name] = waiting
        return found

    def apply(self, grouped: Grouped, marks: Mapping[str, int]) -> dict[str, pa.RecordBatch]:
        """Runs the step over its records and due timers; the productions by stream."""
        letters: list[Letter] = []
        if self.step.dead_letters and self.step.vectorised:
            ran, letters = self._sifted(grouped, marks)
        else:
            ran = self._ran(grouped, marks)
            letters += ran.outcome.letters
        for name, rows in ran.rows.items():
            declared = self.step.declared(name)
            self._write_rows(Family(self.step.name, name), rows, declared)
        self.done.late[self.step.name] += ran.late
        made = self._made(ran.outcome, letters)
        own = made.get(self.step.stream("late")) if self.step.late == "process" else None
        if own is not None and not self.step.late_rule.counts_itself:
            self.done.late[self.step.name] += LateCount(own.num_rows)
        return made

    def late(self, late: Mapping[str, pa.RecordBatch]) -> dict[str, pa.RecordBatch]:
        """Counts the late records that the step is not to see; what its output `late` has of them, if it has one."""
        rule = self.step.late_rule
        self.done.late[self.step.name] = LateCount(*rule.count(late)) if late else LateCount()
        if not late or self.step.late != "output":
            return {}
        whole = pa.concat_batches(list(late.values()))
        records, times = rule.records(whole.drop_columns([TIME_COLUMN]), whole.column(TIME_COLUMN).to_numpy())
        stamps = own_times(times, self.task.before.get(self.step.name, NO_TIME))
        return {self.step.stream("late"): records.append_column(TIME_COLUMN, pa.array(stamps))}

    def _sifted(self, grouped: Grouped, marks: Mapping[str, int]) -> tuple[_Ran, list[Letter]]:
        """Runs the step over the keys that it does not fail on. All records of the others become letters; their timers
        are due all the same, and those on whose callbacks it fails, too."""
        ran, failed = sift(len(grouped.hashes), lambda keys: self._ran(grouped.only(keys), marks))
        ran = ran or _Ran(Outcome({}, {}, {}), {})
        letters: list[Letter] = []
        for place, failure in failed.items():
            alone = grouped.only(np.arange(len(grouped.hashes)) == place)
            letters += letters_of(self._batch(alone), {}, {}, failure.cause)
        left = grouped.only(np.isin(np.arange(len(grouped.hashes)), list(failed)))
        if any(len(due.places) for due in left.due.values()):
            left = left.without_records()
            more, dead = sift(len(left.hashes), lambda keys: self._ran(left.only(keys), marks))
            ran = ran if more is None else ran.and_also(more)
            for place, failure in dead.items():
                alone = left.only(np.arange(len(left.hashes)) == place)
                letters += letters_of(self._batch(alone), self.step.timers, alone.due, failure.cause)
            self._count_as_fired(ran, left.only(np.isin(np.arange(len(left.hashes)), list(dead))))
        return ran, letters

    def _made(self, outcome: Outcome, letters: Sequence[Letter]) -> dict[str, pa.RecordBatch]:
        """The productions by stream, letters among them, with their event times if there are any."""
        made, times = dict(outcome.productions), dict(outcome.times)
        if letters:
            made[DEAD_LETTER] = as_batch(self.step.name, self.task.epoch, letters)
            if self.step.timed:
                times[DEAD_LETTER] = np.array([letter.micros for letter in letters], np.int64)
        for output in times:
            stamped = own_times if output == "late" else raised
            stamps = stamped(times[output], self._passed())
            made[output] = made[output].append_column(TIME_COLUMN, pa.array(stamps))
        return {self.step.stream(output): productions for output, productions in made.items()}

    def _batch(self, grouped: Grouped) -> Batch:
        before = self.task.before.get(self.step.name, NO_TIME)
        columns = grouped.keys.columns
        return Batch(grouped.inputs, columns, self.step.key, self.step.outputs, self.task.epoch, before)

    def _ran(self, grouped: Grouped, marks: Mapping[str, int]) -> _Ran:
        """Runs the step, and makes of what it changed what is to be written."""
        hashes, keys = grouped.hashes, grouped.keys
        batch = self._batch(grouped)
        timers: dict[str, RecordTimer | BatchTimer] = {}
        for name, given in self.step.timers.items():
            limit, look = self._bounds(given, marks)[1], self._look(given, hashes, keys)
            if self.step.vectorised:
                timers[name] = BatchTimer(given, batch, limit, look, grouped.due.get(name))
            else:
                timers[name] = RecordTimer(given, limit, len(hashes), look)
        holds: dict[str, RecordHold | BatchHold] = {}
        for name, hold in self.step.holds.items():
            passed, look = self._passed(), self._look(hold.timer, hashes, keys)
            if self.step.vectorised:
                holds[name] = BatchHold(hold, batch, passed, look)
            else:
                holds[name] = RecordHold(hold, len(hashes), passed, look)
        outcome = self._run(batch, hashes, keys, timers, grouped.due, holds)
        rows = {}
        for name, state in outcome.handles.items():
            changes = self._changes(state, batch)
            if changes is not None:
                rows[name] = _rows_of(changes, hashes, keys, self._until(self.step.states[name], batch, marks))
        for name, timer in {**timers, **{name: hold.timer for name, hold in holds.items()}}.items():
            changes = self._changes(timer, batch)
            if changes is not None:
                rows[name] = _rows_of(changes, hashes, keys, None)
        return _Ran(outcome, rows)

    def _passed(self) -> int:
        """The watermark that the step has passed on before the epoch: none of its productions is older."""
        before = self.task.before.get(self.step.name, NO_TIME)
        if (
            not self.step.driven
        ):  # its own time stands still: what it makes must not be late for those whose time does not
            readers = self.spec.graph.readers_of(self.step.name)
            before = max([before, *(self.task.before.get(reader, NO_TIME) for reader in readers)])
        return self.task.passed.get(self.step.name, before)

    def pass_on(self, marks: dict[str, Mark]) -> None:
        """Keeps the watermark that the step passes on back to the least of its holds, as they are after the epoch. A
        hold of a step that stands still binds whoever goes on."""
        name = self.step.name
        passed, mark = self.task.passed[name], marks[name]
        least = END_OF_TIME
        for hold in self.step.holds.values():
            pieces = self._pieces_after(Family(name, hold.name))
            after = max(passed - 1, NO_TIME)
            found = least_between(self.store, CACHE, pieces, after, min(mark.driver, least))
            least = least if found is None else found
        bound = min(mark.bound, least)
        here = self.done.passed[name] = step_watermark(passed, mark._replace(bound=bound))
        marks[name] = Mark(bound=bound, stood=here) if mark.silent else Mark(here)

    def _pieces_after(self, family: Family) -> list[Piece]:
        """The pieces of a family with what this epoch has written, newest first."""
        edits = [edit for edit in self.done.edits if edit.family == family]
        written = [ref for ref in self.done.added if ref.family == family]
        written += [ref for edit in edits for ref in edit.outputs]
        taken = {given.name for edit in edits for given in edit.inputs}
        older = [piece for piece in self.pieces.get(family, []) if piece.segment.name not in taken]
        return [*(Piece(ref, ref.covers) for ref in written), *older]

    def _look(self, timer: Timer, hashes: Hashes, keys: KeyColumns) -> Look:
        """Finds stored timers of keys of the batch."""

        def look(places: Rows, tags: pa.Array) -> Times:
            tagged = KeyColumns.canonical([*keys.take(places).columns, tags])
            return self._stored(timer.name, hashes[places], tagged, subbed=True).times(NULL_TIME)

        return look

    def _changes(self, handle: Handle | RecordTimer | BatchTimer, batch: Batch) -> Changed | None:
        try:
            return changes_of(handle, batch)
        finally:
            self._check_lookups()

    def _count_as_fired(self, ran: _Ran, failed: Grouped) -> None:
        """The due timers of keys that failed are over, and so are their holds: whoever was to release them may never be
        called again. Nothing else of the keys changes."""
        for name, due in failed.due.items():
            count, declared = len(due.places), self.step.timers[name]
            if count:
                payloads = None if declared.payload_type is None else [None] * count
                gone = Changed(due.places, due.tags, declared.encode([0] * count, payloads), np.ones(count, np.bool_))
                fired = _rows_of(gone, failed.hashes, failed.keys, None)
                ran.rows[name] = _together(ran.rows[name], fired) if name in ran.rows else fired
        for name, hold in self.step.holds.items():
            count = len(failed.hashes)
            if count:
                tags = pa.repeat(pa.scalar("", TAG), count)
                gone = Changed(np.arange(count), tags, hold.timer.encode([0] * count, None), np.ones(count, np.bool_))
                released = _rows_of(gone, failed.hashes, failed.keys, None)
                ran.rows[name] = _together(ran.rows[name], released) if name in ran.rows else released

    def _run(
        self,
        batch: Batch,
        hashes: Hashes,
        keys: KeyColumns,
        timers: Mapping[str, RecordTimer | BatchTimer],
        due: Mapping[str, Due],
        holds: Mapping[str, RecordHold | BatchHold],
    ) -> Outcome:
        computation = self.spec.new_computation(self.step.name)
        try:
            setup(computation)
        except (Exception, SystemExit) as error:
            raise StepFailure(error) from error

        def stored(state: State) -> _LazyState | _LazyEntries:
            now = self._now(state)
            if state.subkey_type is None:
                return self._stored(state.name, hashes, keys, now=now)
            return _LazyEntries(self, state, hashes, keys, now)

        try:
            outcome = run_batch(
                computation, self.step.states, batch, stored, timers, due, self.step.dead_letters, holds
            )
        except (RecordFailure, LiftFailure):
            with contextlib.suppress(Exception):  # the first failure is the one to report
                close(computation)
            self._check_lookups()
            raise
        self._check_lookups()
        try:
            close(computation)
        except (Exception, SystemExit) as error:
            raise StepFailure(error) from error
        return outcome

    def _stored(
        self, name: str, hashes: Hashes, keys: KeyColumns, subbed: bool = False, now: int | None = None
    ) -> _LazyState:
        """What is stored under these keys of a state or timer of the step."""
        pieces = self.pieces.get(Family(self.step.name, name), [])
        subs = keys.subs() if subbed else None
        forms = self.spec.forms_of(self.step.name, name)
        return _LazyState(partial(locate, self.store, CACHE, pieces, hashes, keys, subs, now, forms), self._guarded)

    def _guarded(self, look: Callable[[], Looked]) -> Looked:
        """Looks something up. User code sees the exception too if it fails, and might swallow it: it is remembered."""
        try:
            return look()
        except (DamagedObject, StoreUnavailable, LiftFailure) as error:
            self.trouble = error
            raise

    def _check_lookups(self) -> None:
        """State that could not be read is our trouble, whatever user code made of it."""
        if isinstance(self.trouble, LiftFailure):
            raise StepFailure(self.trouble) from self.trouble
        if self.trouble is not None:
            raise self.trouble

    def _now(self, declared: State) -> int:
        """The time by which values of a state have expired. One without a time-to-live may have had one."""
        if declared.ttl_time == EVENT_TIME:
            return self.task.before[self.step.name]
        return self.task.clock_ms * 1000

    def _until(self, declared: State, batch: Batch, marks: Mapping[str, int]) -> Times | None:
        """When what is written now expires, for each key."""
        if declared.ttl is None:
            return None
        if declared.ttl_time != EVENT_TIME:
            return np.full(len(batch), self.task.clock_ms * 1000 + declared.ttl)
        newest = batch.newest().view(np.int64)
        newest[newest == NULL_TIME] = max(marks[self.step.name], NO_TIME + 1)
        return np.minimum(newest, END_OF_TIME - declared.ttl) + declared.ttl

    def _write_rows(self, family: Family, rows: StateRows, declared: State | Timer) -> None:
        owned = self.mine.owned[self.step.name]
        pieces = self.pieces.get(family, [])
        forms = self.spec.forms_of(*family)
        taken = self._taken_up(pieces, len(rows.hashes), owned)
        if taken:
            bottom = len(taken) == len(pieces)
            now = self._now(declared) if isinstance(declared, State) else None
            try:
                rows = newest_rows(self.store, CACHE, taken, owned, bottom, newer=rows, now=now, forms=forms)
            except LiftFailure:
                taken = []
        refs = write_segments(
            self.store,
            CACHE,
            family,
            self.task.maker,
            self.mine.slot,
            self.task.epoch,
            owned,
            rows,
            timers=isinstance(declared, Timer),
            filtered=isinstance(declared, State) and declared.bloom,
            form=forms.current,
        )
        if taken:
            inputs = tuple(Input(piece.segment.name, piece.ranges) for piece in taken)
            self.done.edits.append(Edit(family, owned, inputs, tuple(refs)))
        else:
            self.done.added += refs

    def _taken_up(self, pieces: list[Piece], written: int, owned: tuple[Range, ...]) -> list[Piece]:
        """The newest pieces that are together at most `TAKE_UP` times as large as what is written."""
        taken: list[Piece] = []
        room = TAKE_UP * written
        for piece in pieces:
            room -= piece.segment.rows
            if room < 0 or piece.ranges != owned or piece.segment.name in self.mine.busy:
                break
            taken.append(piece)
        return taken

    def store_productions(self, stream: str, productions: pa.RecordBatch) -> None:
        """Stores what a sink receives, or the next epoch; that with its event times."""
        if not productions.num_rows:
            return
        least = pc.min(productions.column(TIME_COLUMN)).as_py() if TIME_COLUMN in productions.schema.names else None
        data = encode_batch(productions)
        name = names.production(stream, self.task.maker, self.mine.slot)
        self.store.put(name, data)
        self.done.outputs.append(
            Output(stream, self.mine.slot, name, productions.num_rows, len(data), digest_of(data), least)
        )


def _rows_of(changes: Changed, hashes: Hashes, keys: KeyColumns, until: Times | None) -> StateRows:
    """What a handle changed, in the order of keys."""
    all_of_them = len(changes.places) == len(hashes) and changes.subkeys is None
    mine = keys if all_of_them else keys.take(changes.places)
    found = hashes if all_of_them else hashes[changes.places]
    expiry = None if until is None else until[changes.places]
    if changes.subkeys is None:
        return StateRows(found, mine, changes.values, changes.gone, None, expiry)
    full = KeyColumns.canonical([*mine.columns, changes.subkeys])
    subs = full.subs()
    order, _ = arrange(found, full, subs)
    return StateRows(found, full, changes.values, changes.gone, subs, expiry).take(order)


def _together(rows: StateRows, more: StateRows) -> StateRows:
    """Rows of different keys, in one piece."""
    joined = joined_rows([rows, more])
    order, _ = arrange(joined.hashes, joined.keys, joined.subs)
    return joined.take(order)


class _LazyState:
    """The stored values of a batch's keys, looked up when first asked for."""

    def __init__(self, look: Callable[[], Found], guarded: Callable[[Callable[[], Any]], Any]) -> None:
        self._look, self._guarded = look, guarded
        self._known: Found | None = None

    def _found(self) -> Found:
        if self._known is None:
            known: Found = self._guarded(self._look)
            self._known = known
        return self._known

    def present(self) -> Mask:
        return self._found().present

    def times(self, default: int) -> Times:
        return self._found().times(default)

    def numbers(self, default: Any, dtype: Any) -> npt.NDArray[Any]:
        found = self._found()
        numbers: npt.NDArray[Any] = self._guarded(lambda: found.numbers(default, dtype))
        return numbers

    def arrow(self, kind: pa.DataType) -> pa.Array:
        found = self._found()
        return self._guarded(lambda: found.arrow(kind))


class _LazyEntries:
    """The stored entries of a batch's keys, of a state with subkeys."""

    def __init__(self, run: StepRun, state: State, hashes: Hashes, keys: KeyColumns, now: int | None) -> None:
        self._run, self._state, self._hashes, self._keys, self._now = run, state, hashes, keys, now

    def look(self, places: Rows, subkeys: pa.Array) -> _LazyState:
        full = KeyColumns.canonical([*self._keys.take(places).columns, subkeys])
        return self._run._stored(self._state.name, self._hashes[places], full, subbed=True, now=self._now)

    def entries(self, places: Rows) -> tuple[Rows, pa.Array, pa.Array]:
        run, state = self._run, self._state
        pieces = run.pieces.get(Family(run.step.name, state.name), [])
        kinds = (state.subkey_type, state.stored_type)
        mine, forms = self._keys.take(places), run.spec.forms_of(run.step.name, state.name)
        found = run._guarded(
            lambda: entries_of(run.store, CACHE, pieces, self._hashes[places], mine, kinds, self._now, forms)
        )
        return places[found.places], found.subkeys, found.values
