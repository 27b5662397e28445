"""Bad input as users make it: each has a clear error, or does what the guide says, and the last commit stays intact."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.errors import StepError, UserError
from millstream.model.query import Query
from millstream.store.objects import ObjectStore, open_store
from millstream.testing import Simulated

DAY = datetime(2026, 1, 1, tzinfo=UTC)
EVENTS = "k long, ts timestamp"


def at(seconds: float) -> datetime:
    return DAY + timedelta(seconds=seconds)


def one_step(kind: Any, **time: Any) -> Query:
    query = ms.Query("q")
    stream = query.source("events", None, event_time="ts", **time).key_by("k").compute("step", kind, late="process")
    if (kind if isinstance(kind, type) else type(kind)).output:
        stream.sink("out", ms.Memory())
    return query


def feed(kind: Any, rows: Sequence[Any] = ((1, DAY), (2, DAY)), **time: Any) -> Simulated:
    sim = Simulated(one_step(kind, **time), {"events": EVENTS}, slots=1, now=DAY)
    sim.feed(events=list(rows))
    return sim


def refuse(kind: Any, match: str, key: str | None = None, store: ObjectStore | None = None) -> None:
    """The epoch fails with the step, the text and the key, and nothing of it is committed."""
    store = store or open_store("memory://")
    sim = Simulated(one_step(kind), {"events": EVENTS}, store, slots=1, now=DAY)
    before = sim.epoch
    with pytest.raises(StepError, match=rf"(?s)step 'step' failed in epoch {before + 1}: .*{match}") as caught:
        sim.feed(events=[(1, DAY), (2, DAY)])
    if key is not None:
        assert caught.value.key == key
    assert Simulated(one_step(kind), {"events": EVENTS}, store, slots=1, now=DAY).epoch == before


# -- times -------------------------------------------------------------------------------------------------------------


class Ring(ms.Computation):
    """Sets a timer for `when`, and says when it fires."""

    alarm = ms.Timer(ms.EVENT_TIME)
    output = "k long, time timestamp"

    def __init__(self, when: Any) -> None:
        self.when = when

    def on_record(self, row: Any, at: ms.At) -> None:
        self.alarm.set(self.when)

    @alarm.fires
    def ring(self, at: ms.At) -> Iterable[Any]:
        yield at.key, at.time


class RingBatch(Ring):
    """The same over whole columns."""

    alarm = ms.Timer(ms.EVENT_TIME)

    def on_batch(self, batch: ms.Batch) -> None:
        self.alarm.set(batch, self.when)

    @alarm.fires
    def ring(self, batch: Any) -> Iterable[Any]:
        yield batch.output(batch.keys, pa.array(batch.times).cast(pa.timestamp("us", "UTC")))


def test_a_timer_in_the_past_fires_at_once_however_long_ago() -> None:
    past = datetime(1900, 1, 1, tzinfo=UTC)
    for kind in (Ring(past), RingBatch(np.full(2, np.datetime64("1900-01-01", "us")))):
        assert sorted(feed(kind).outputs("out")) == [(1, past), (2, past)]
    assert feed(Ring(datetime.max)).outputs("out") == [], "and one at the end of time waits"


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (Ring("noon"), "timer 'alarm': found 'noon', expected a datetime"),
        (Ring(None), "timer 'alarm': found None, expected a datetime"),
        (Ring(timedelta.max), "timer 'alarm': .* from now is beyond the end of time"),
        (Ring(timedelta.min), "timer 'alarm': .* from now is beyond the end of time"),
        (RingBatch(["noon", "now"]), "timer 'alarm': found .*, expected times, as datetime64"),
        (RingBatch([1, 2]), "timer 'alarm': found .*, expected times, as datetime64"),
        (RingBatch([np.datetime64("2026-01-01")]), "timer 'alarm': 1 times found, 2 expected"),
        (RingBatch(np.datetime64("2026-01-01")), "timer 'alarm': 1 times found, 2 expected"),
        (RingBatch([np.datetime64("NaT")] * 2), "timer 'alarm': some of the times are NaT"),
    ],
)
def test_a_timer_for_what_is_no_time_is_refused(kind: Any, match: str) -> None:
    refuse(kind, match, "1" if type(kind) is Ring else None)


class Seen(ms.Computation):
    output = "k long, time timestamp"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield at.key, at.time


def test_an_event_time_that_is_null_or_far_ahead_is_a_record_but_no_clock() -> None:
    far = datetime.max.replace(tzinfo=UTC)
    sim = feed(Seen, [(1, None), (2, far), (3, at(1))], max_ahead="1 hour")
    assert sorted(sim.outputs("out")) == [(1, None), (2, far), (3, at(1))]
    assert sim.watermark("step") == at(1)
    sim = feed(Seen, [(1, None), (2, far)])
    assert sim.watermark("step") is None, "nobody has said anything of use"


def test_one_bad_clock_closes_no_window_also_where_the_watermark_is_a_percentile_or_a_column() -> None:
    rows = [(1, at(10)), (2, at(10**8)), (3, at(20))]
    assert feed(Ring(at(50)), rows).outputs("out") == []
    assert feed(Ring(at(50)), rows, percentile=0.1).outputs("out") == []
    assert feed(Ring(at(50)), rows, watermark="ts").outputs("out") == []


# -- keys and schemas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["array<long>", "map<string, long>", "struct<a: long>"])
def test_a_key_of_a_type_that_cannot_be_one_is_refused_before_the_first_epoch(kind: str) -> None:
    query = ms.Query("q")
    query.source("events", None).key_by("k").compute("step", Seen)
    with pytest.raises(UserError, match="step 'step': column 'k' cannot be a key: "):
        Simulated(query, {"events": f"k {kind}, ts timestamp"})


@pytest.mark.parametrize(("left", "right"), [("long", "int"), ("string", "binary"), ("decimal(9,2)", "decimal(9,3)")])
def test_keys_that_differ_in_type_are_refused_even_if_they_are_close(left: str, right: str) -> None:
    query = ms.Query("q")
    a, b = query.source("a", None), query.source("b", None)
    query.compute("step", Seen, a=a.key_by("k"), b=b.key_by("k"))
    with pytest.raises(
        UserError, match="step 'step': the key of 'b' is .*, that of 'a' is .*; equal keys of all inputs"
    ):
        Simulated(query, {"a": f"k {left}", "b": f"k {right}"})


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ("k long, ts timestamp, extra long", "sources.events.schema: was 'k BIGINT, ts TIMESTAMP', now 'k BIGINT, ts"),
        ("ts timestamp, k long", "sources.events.schema: was .*, now 'ts TIMESTAMP, k BIGINT'"),
        ("k string, ts timestamp", "steps.step.key: was \\['k BIGINT'\\], now \\['k STRING'\\]"),
        ("k long, ts string", "source 'events': the event time 'ts' is STRING, expected TIMESTAMP"),
        ("k long", "source 'events': no column 'ts' for its event time; it has k"),
    ],
)
def test_a_restart_whose_source_has_another_schema_is_refused_with_what_changed(schema: str, match: str) -> None:
    store = open_store("memory://")
    Simulated(one_step(Seen), {"events": EVENTS}, store).feed(events=[(1, DAY)])
    with pytest.raises(UserError, match=match):
        Simulated(one_step(Seen), {"events": schema}, store)
    assert Simulated(one_step(Seen), {"events": EVENTS}, store).epoch == 0


# -- shapes ------------------------------------------------------------------------------------------------------------


class Returns(ms.Computation):
    """Returns what it is told to, from `on_record`, or from a timer."""

    alarm = ms.Timer(ms.EVENT_TIME)
    output = "k long, n long"
    outputs: ClassVar = {"side": "k long"}

    def __init__(self, value: Any, late: bool) -> None:
        self.value, self.late = value, late

    def on_record(self, row: Any, at: ms.At) -> Any:
        if self.late:
            self.alarm.set(DAY)
            return None
        return self.value

    @alarm.fires
    def ring(self, at: ms.At) -> Any:
        return self.value


@pytest.mark.parametrize("late", [False, True], ids=["on_record", "timer"])
@pytest.mark.parametrize(
    ("value", "match"),
    [
        (5, "on_record, or a callback, returned something of type int; yield productions"),
        ((1, 2), "on_record, or a callback, yielded 1; yield tuples or dicts that fit k BIGINT, n BIGINT"),
        ({"k": 1, "n": 2}, "on_record, or a callback, yielded 'k'; yield tuples or dicts"),
        ([None], "on_record, or a callback, yielded None; yield tuples or dicts"),
        ([(1,)], "1 values found, 2 expected .k BIGINT, n BIGINT"),
        ([(1, "two")], "output column 'n': expected BIGINT, found 'two'"),
        ([(1, 2.5)], "output column 'n': expected BIGINT, found 2.5"),
        ([{"k": 1, "m": 2}], "the output's columns are k, n"),
        ([ms.to("sides", 1)], "no output 'sides'; the computation declares 'side'"),
        ([ms.to("side", 1, 2)], "2 values found, 1 expected .k BIGINT"),
    ],
)
def test_productions_of_the_wrong_shape_name_step_and_key(value: Any, match: str, late: bool) -> None:
    refuse(Returns(value, late), match, "1")


class ReturnsBatch(Returns):
    """The same over whole columns; the value may be a function of the batch."""

    alarm = ms.Timer(ms.EVENT_TIME)

    def on_batch(self, batch: ms.Batch) -> Any:
        if self.late:
            self.alarm.set(batch, np.full(len(batch), np.datetime64("2026-01-01", "us")))
            return None
        return self.value(batch) if callable(self.value) else self.value

    @alarm.fires
    def ring(self, batch: Any) -> Any:
        return self.value(batch) if callable(self.value) else self.value


@pytest.mark.parametrize("late", [False, True], ids=["on_batch", "timer"])
@pytest.mark.parametrize(
    ("value", "match"),
    [
        (5, "on_batch, or a callback, yielded 5; yield batch.output"),
        ([(1, 2)], "on_batch, or a callback, yielded .1, 2.; yield batch.output"),
        ({"k": [1], "n": [2]}, "on_batch, or a callback, yielded {'k'.*; yield batch.output"),
        (pa.table({"k": [1], "n": [2]}), "yielded a table of .'k', 'n'.; yield batch.output"),
        (pa.record_batch({"k": [1]}), "yielded k BIGINT; yield batch.output.* for k BIGINT, n BIGINT"),
        (lambda batch: batch.output(batch.keys), "1 output columns found, 2 expected"),
        (lambda batch: batch.output(batch.keys, [1]), "output columns have different lengths"),
        (lambda batch: batch.output(batch.keys, ["a", "b"]), "output column 'n': expected BIGINT, found 'a'"),
        (lambda batch: batch.output_to("sides", batch.keys), "no output 'sides'; the computation declares 'side'"),
        (lambda batch: batch.timed(batch.output([1, 2], [1, 2]), []), "0 times found, 2 expected"),
    ],
)
def test_columns_of_the_wrong_shape_name_the_step(value: Any, match: str, late: bool) -> None:
    refuse(ReturnsBatch(value, late), match)


# -- state -------------------------------------------------------------------------------------------------------------


class Keeps(ms.Computation):
    """Keeps something that cannot be kept, for the second key."""

    thing = ms.Value(object)
    things = ms.Map("long", object)
    bag = ms.Bag(object)
    alarm = ms.Timer(ms.EVENT_TIME, payload=object)

    def __init__(self, where: str) -> None:
        self.where = where

    def on_record(self, row: Any, at: ms.At) -> None:
        thing = threading.Lock() if at.key == 2 else 1
        if self.where == "value":
            self.thing.set(thing)
        elif self.where == "map":
            self.things.set(7, thing)
        elif self.where == "bag":
            self.bag.append(thing)
        else:
            self.alarm.set(DAY, payload=thing)

    @alarm.fires
    def ring(self, at: Any) -> None: ...


class KeepsBatch(Keeps):
    """The same over whole columns."""

    def on_batch(self, batch: ms.Batch) -> None:
        things = [threading.Lock() if key == 2 else 1 for key in batch.keys.to_pylist()]
        if self.where == "value":
            self.thing.write(batch, things)
        elif self.where == "map":
            self.things.write(batch, [0, 1], [7, 7], things)
        elif self.where == "bag":
            self.bag.append(batch, things)
        else:
            self.alarm.set(batch, np.full(len(batch), np.datetime64("2026-01-01", "us")), payload=things)


NAMES = {"value": "state 'thing'", "map": "state 'things'", "bag": "state 'bag'", "timer": "timer 'alarm': its payload"}


@pytest.mark.parametrize("where", NAMES)
def test_what_cannot_be_pickled_names_the_state_or_timer(where: str) -> None:
    refuse(Keeps(where), f"{NAMES[where]}: <.*lock.*> cannot be pickled: ", "2")
    refuse(KeepsBatch(where), f"{NAMES[where]}: <.*lock.*> cannot be pickled: ")


class Lost:
    """Can be stored, but not read again."""

    def __reduce__(self) -> Any:
        return _lost, ()


def _lost() -> None:
    raise ModuleNotFoundError("No module named 'gone'")


class Reads(ms.Computation):
    thing = ms.Value(object)

    def on_record(self, row: Any, at: ms.At) -> None:
        if at.epoch == 0:
            self.thing.set(Lost())
        else:
            self.thing.get()


class ReadsBatch(ms.Computation):
    thing = ms.Value(object)

    def on_batch(self, batch: ms.Batch) -> None:
        if batch.epoch == 0:
            self.thing.write(batch, [Lost()] * len(batch))
        else:
            self.thing.read(batch)


@pytest.mark.parametrize("kind", [Reads, ReadsBatch])
def test_what_cannot_be_unpickled_names_the_state(kind: Any) -> None:
    store = open_store("memory://")
    Simulated(one_step(kind), {"events": EVENTS}, store, slots=1).feed(events=[(1, DAY), (2, DAY)])
    refuse(
        kind,
        "state 'thing': what is stored cannot be unpickled: ModuleNotFoundError: No module named 'gone'",
        None,
        store,
    )


@pytest.mark.parametrize("values", [["many", "more"], [1.5, 2.0], [2**63, 1]])
def test_values_of_another_type_than_declared_name_the_state(values: list[Any]) -> None:
    class Typed(ms.Computation):
        total = ms.Value("long")

        def on_record(self, row: Any, at: ms.At) -> None:
            self.total.set(values[0])

    class TypedBatch(ms.Computation):
        total = ms.Value("long")

        def on_batch(self, batch: ms.Batch) -> None:
            self.total.write(batch, values)

    refuse(Typed, "state 'total': expected BIGINT, found ", "1")
    refuse(TypedBatch, "state 'total': expected BIGINT, found ")


# -- two that write one thing ------------------------------------------------------------------------------------------


def test_two_steps_cannot_write_one_stream_nor_two_sinks_one_place() -> None:
    query = ms.Query("q")
    events = query.source("events", None)
    a, b = events.key_by("k").compute("a", Seen), events.key_by("k").compute("b", Seen)
    with pytest.raises(UserError, match="step 'a': the query 'q' already has a step of that name"):
        events.key_by("k").compute("a", Seen)
    with pytest.raises(UserError, match="map 'a': the query 'q' already has a step of that name"):
        events.map_batches("a", lambda batch: batch, output=EVENTS)
    memory = ms.Memory()
    a.sink("out", memory)
    with pytest.raises(UserError, match="sink 'out': the query 'q' already has a sink of that name"):
        b.sink("out", ms.Memory())
    with pytest.raises(UserError, match="sink 'both' receives several streams .*; give each a sink of its own"):
        a.union(b).sink("both", ms.Memory())
    with pytest.raises(UserError, match="sink 'same' writes to the place of the sink 'out'; give each its own"):
        b.sink("same", memory)
    a.sink("files", ms.Parquet("/data/out"))
    with pytest.raises(UserError, match="sink 'more' writes to the place of the sink 'files'; give each its own"):
        b.sink("more", ms.Parquet("/data/out/"))
    with pytest.raises(UserError, match="feedback 'back' is written by 'a' and 'b'; it has one writer"):
        back = query.feedback("back", Seen.output)
        a.feed_back(back)
        b.feed_back(back)
