"""Joins of two keyed streams: of all records, of those in one window, and of those within an interval of time.

Rules
-----
- Inner and incremental: a pair is produced in the epoch in which its later record comes, once. Pairs are made by index
  arithmetic over whole columns.
- Records whose key holds a null join nothing, as in SQL, and are not kept.
- A join with a window or an interval keeps records in buckets of time: the bucket is part of the step's key, has one
  timer, and is cleared when no record can come any more that is not late for it.
- For an interval, buckets are as wide as the interval: a left record is in the one bucket where its interval begins, a
  right record in the two that it can be met from. So no pair is made twice, and the exact condition is a filter.
- What is kept of a side is read only for keys with new records of the other side: a stream that meets nothing costs
  what it appends.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import UserError
from millstream.library.lateness import BucketLateness
from millstream.library.partial import check_free, check_key
from millstream.library.reduce import Rows
from millstream.library.windows import Window, check_window, micros_in, timestamps
from millstream.model.bags import Bag
from millstream.model.batch import Batch, InputBatch, Timed, TimerBatch
from millstream.model.computation import Computation
from millstream.model.query import KeyedStream, Stream
from millstream.model.timers import Timer
from millstream.model.times import EVENT_TIME, NULL_TIME, Times, micros_of
from millstream.model.transform import Transform
from millstream.model.types import TIMESTAMP, format_schema, format_type

BUCKET, AT = "__bucket", "__at"


@dataclass(frozen=True, slots=True)
class Buckets:
    """How a join cuts time: the width of buckets, and how long after its start one is kept. In microseconds.

    `lower` and `upper` bound the right record's time less the left one's; None if being in one bucket is enough.
    """

    width: int
    kept: int
    offset: int = 0
    lower: int | None = None
    upper: int | None = None

    def starts(self, micros: Times, left: bool) -> Times:
        """The bucket of each record; of a right record of an interval, the later of its two."""
        shifted = micros + self.lower if left and self.lower is not None else micros
        starts = shifted - (shifted - self.offset) % self.width
        starts[micros == NULL_TIME] = NULL_TIME
        return starts

    @property
    def text(self) -> str:
        """What makes a pair, in words."""
        if self.lower is None:
            return repr(Window(self.width, self.width, self.offset))
        return f"between {self.lower} and {self.upper} microseconds"

    def both(self, left: bool) -> bool:
        """Whether a record is in the bucket before, too."""
        return self.lower is not None and not left


def window_buckets(window: Window) -> Buckets:
    """The buckets of a join of windows."""
    if window.gap or window.size != window.every:
        raise UserError(f"join: found {window!r} as a window; only tumbling windows can be joined")
    return Buckets(window.size, window.size, window.offset)


def interval_buckets(between: Any) -> Buckets:
    """The buckets of a join of intervals."""
    if not isinstance(between, (tuple, list)) or len(between) != 2:
        raise UserError(f"join: between={between!r}; give two durations, such as ('-5 minutes', '10 minutes')")
    lower, upper = (_signed(each) for each in between)
    if lower > upper:
        raise UserError(f"join: between={between!r}; the first duration is longer than the second")
    width = max(upper - lower, 1)
    return Buckets(width, max(2 * width, width - lower), 0, lower, upper)


def _signed(given: Any) -> int:
    if isinstance(given, timedelta):
        return given // timedelta(microseconds=1)
    if isinstance(given, str) and given.strip().startswith("-"):
        return -micros_of(given.strip()[1:], "between")
    return micros_of(given, "between")


def join(left: KeyedStream, name: str, right: KeyedStream, window: Any, between: Any, suffix: str) -> Stream:
    """Adds a step that joins two keyed streams."""
    if not isinstance(right, KeyedStream):
        raise UserError(f"step {name!r}: found {right!r} to join with, expected stream.key_by(...)")
    if len(left.key) != len(right.key):
        raise UserError(f"step {name!r}: the keys have {len(left.key)} and {len(right.key)} columns; give as many")
    if right.query is not left.query:
        raise UserError(f"step {name!r}: the right stream is of another query")
    if window is not None and between is not None:
        raise UserError(f"step {name!r}: give window= or between=, not both")
    buckets = None
    try:
        if window is not None:
            buckets = window_buckets(check_window(window))
        if between is not None:
            buckets = interval_buckets(between)
    except UserError as error:
        raise UserError(f"step {name!r}: {error}") from error
    sides = []
    for keyed, which in ((left, "left"), (right, "right")):
        side = Side(keyed.key, buckets, which == "left")
        stream = Stream(keyed.query, keyed.streams)._add_map(f"{name}-{which}", side, pa.schema([]))
        sides.append(stream.key_by(*keyed.key, *([] if buckets is None else [BUCKET])))
    step = Join(right.key, suffix) if buckets is None else BucketJoin(right.key, suffix, buckets)
    late = "process" if buckets is None else "drop"
    return left.query.compute(name, step, late=late, left=sides[0], right=sides[1])


class Side(Transform):
    """One side of a join on its way to the step: without null keys, with its time, and in its buckets."""

    def __init__(self, key: tuple[str, ...], buckets: Buckets | None, left: bool) -> None:
        self.key, self.buckets, self.left = key, buckets, left

    def bind(self, schema: pa.Schema, timed: bool) -> Side:
        bound = copy.copy(self)
        check_key(self.key, schema)
        for name in (BUCKET, AT):
            check_free(name, schema.names)
        if self.buckets is not None and not timed:
            raise UserError("a join with a window or an interval needs event time; give the source event_time=...")
        extra = [pa.field(AT, pa.int64())] + ([] if self.buckets is None else [pa.field(BUCKET, TIMESTAMP)])
        bound.output = pa.schema([*schema, *extra])
        return bound

    def apply(self, records: pa.RecordBatch, micros: Times | None) -> tuple[pa.RecordBatch, Times | None]:
        nulls = [name for name in self.key if records.column(name).null_count]
        if nulls:
            valid = np.logical_and.reduce([records.column(n).is_valid().to_numpy(zero_copy_only=False) for n in nulls])
            records = records.filter(pa.array(valid))
            micros = None if micros is None else micros[valid]
        at = np.full(records.num_rows, NULL_TIME, np.int64) if micros is None else micros
        if self.buckets is None:
            return pa.RecordBatch.from_arrays([*records.columns, pa.array(at)], schema=self.output), micros
        starts = self.buckets.starts(at, self.left)
        if self.buckets.both(self.left):
            twice = pa.array(np.tile(np.arange(len(at)), 2))
            records, at = records.take(twice), np.tile(at, 2)
            starts = np.concatenate([starts, starts - self.buckets.width])
        columns = [*records.columns, pa.array(at), timestamps(np.where(at == NULL_TIME, NULL_TIME, starts))]
        judged = np.where(at == NULL_TIME, NULL_TIME, starts + (self.buckets.kept - 1))
        return pa.RecordBatch.from_arrays(columns, schema=self.output), judged


@dataclass(frozen=True, slots=True)
class _Records:
    """Records of one side by key: columns, and where each key's begin and how many they are."""

    columns: list[pa.Array]
    starts: Rows
    counts: Rows

    @staticmethod
    def old(lists: pa.Array, fields: Sequence[pa.Field]) -> _Records:
        counts = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        columns = lists.flatten().flatten() if len(fields) else []
        return _Records(columns, np.cumsum(counts) - counts, counts)

    @staticmethod
    def new(part: InputBatch, fields: Sequence[pa.Field]) -> _Records:
        return _Records([part.column(field.name) for field in fields], part.starts, part.count())

    @property
    def at(self) -> Times:
        """Their event times."""
        found: Times = self.columns[-1].to_numpy()
        return found

    @property
    def places(self) -> Rows:
        """The key of each record."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def _pairs(left: _Records, right: _Records) -> tuple[Rows, Rows, Rows]:
    """All pairs of records of one key: which key, which left and which right record."""
    places = left.places
    repeats = right.counts[places]
    total = int(repeats.sum())
    if not total:
        none = np.empty(0, np.int64)
        return none, none, none
    mine = np.repeat(np.arange(len(places)), repeats)
    within = np.arange(total) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    return places[mine], mine, right.starts[places][mine] + within


class Join(Computation):
    """Joins all records of two streams. What has come is kept for ever."""

    lefts: Bag
    rights: Bag
    columns: dict[str, list[pa.Field]]
    buckets: Buckets | None = None
    harm_of_updates = "would keep every version of a row, and pair each of them"

    def __init__(self, right_key: tuple[str, ...], suffix: str) -> None:
        self.right_key, self.suffix = right_key, suffix

    def bind(self, inputs: Mapping[str, pa.Schema], key: tuple[str, ...]) -> Computation:
        bound = copy.copy(self)
        keys = {"left": key, "right": (*self.right_key, BUCKET)}
        bound.columns = {}
        for side, schema in inputs.items():
            own = [pa.field(field.name, field.type) for field in schema if field.name not in keys[side]]
            bound.columns[side] = own
            declared = Bag(format_type(pa.struct(own)))
            declared.name = f"{side}s"
            setattr(bound, declared.name, declared)
        shown = [pa.field(name, inputs["left"].field(name).type) for name in key if name != BUCKET]
        shown += bound.columns["left"][:-1]
        taken = {field.name.lower() for field in shown}
        for field in bound.columns["right"][:-1]:
            name = field.name + self.suffix if field.name.lower() in taken else field.name
            if name.lower() in taken:
                raise UserError(f"both sides have a column {field.name!r}, and {name!r} is taken; give another suffix=")
            taken.add(name.lower())
            shown.append(pa.field(name, field.type))
        if not shown:
            raise UserError("the join has no columns")
        bound.output = format_schema(pa.schema(shown))  # type: ignore[misc]
        return bound

    def on_batch(self, batch: Batch) -> Iterator[pa.RecordBatch | Timed]:
        yield from self.joined(batch)

    def joined(self, batch: Batch) -> Iterator[pa.RecordBatch | Timed]:
        """Produces the new pairs, and keeps the new records."""
        left, right = batch.input("left"), batch.input("right")
        new_left = _Records.new(left, self.columns["left"])
        new_right = _Records.new(right, self.columns["right"])
        old_left = _Records.old(self.lefts.read(batch, where=new_right.counts > 0), self.columns["left"])
        old_right = _Records.old(self.rights.read(batch, where=new_left.counts > 0), self.columns["right"])
        self.met(batch, old_left.counts + old_right.counts == 0)
        yield from self._produced(batch, old_left, new_right)
        yield from self._produced(batch, new_left, old_right)
        yield from self._produced(batch, new_left, new_right)
        for bag, new, side in ((self.lefts, new_left, "left"), (self.rights, new_right, "right")):
            if len(new.columns[-1]):
                rows = pa.StructArray.from_arrays(new.columns, fields=self.columns[side])
                bag.append(batch, rows, new.places)

    def met(self, batch: Batch, fresh: Any) -> None:
        """Called with the keys of which nothing that was kept before has been read."""

    def _produced(self, batch: Batch, left: _Records, right: _Records) -> Iterator[pa.RecordBatch | Timed]:
        places, mine, theirs = _pairs(left, right)
        if not len(places):
            return
        first, second = left.at[mine], right.at[theirs]
        if self.buckets is not None and self.buckets.lower is not None and self.buckets.upper is not None:
            apart = second - first
            inside = np.flatnonzero((apart >= self.buckets.lower) & (apart <= self.buckets.upper))
            places, mine, theirs, first, second = (each[inside] for each in (places, mine, theirs, first, second))
        keys = batch.key_columns if self.buckets is None else batch.key_columns[:-1]
        made = batch.output(
            *(column.take(pa.array(places)) for column in keys),
            *(column.take(pa.array(mine)) for column in left.columns[:-1]),
            *(column.take(pa.array(theirs)) for column in right.columns[:-1]),
        )
        times = np.maximum(first, second)
        yield batch.timed(made, times.view("datetime64[us]")) if batch.timed_input else made


class BucketJoin(Join):
    """Joins the records of a bucket of time, and clears it when its time is over."""

    over = Timer(EVENT_TIME)

    def __init__(self, right_key: tuple[str, ...], suffix: str, buckets: Buckets) -> None:
        super().__init__(right_key, suffix)
        self.buckets: Buckets = buckets
        self.late_rule = BucketLateness(BUCKET, buckets.width, buckets.both(left=False))
        self.stored_as = buckets.text

    def met(self, batch: Batch, fresh: Any) -> None:
        """Sets the timers; again, where a bucket has records of one side, which were not read."""
        ends = micros_in(batch.key_columns[-1]) + self.buckets.kept
        self.over.set(batch, ends.view("datetime64[us]"), where=fresh)

    @over.fires
    def cleared(self, batch: TimerBatch) -> None:
        """Forgets the records of buckets whose time is over."""
        self.lefts.clear(batch)
        self.rights.clear(batch)
