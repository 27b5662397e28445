"""Dead letters: a record that fails leaves its key as it was and goes to an output, and all others count (G1, G2)."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream.engine.sift import sift
from millstream.errors import DamagedObject, StepError, StoreUnavailable, UserError
from millstream.model.arrays import array_from
from millstream.model.computation import RecordFailure
from millstream.model.fits import fitting
from millstream.model.query import Query
from millstream.store import names
from millstream.store.objects import open_store
from millstream.store.segments import CACHE
from millstream.testing import Crash, FaultyStore, Simulated
from timers import at

COMMANDS = "k long, ts timestamp, verb string, v long, due long"
Command = tuple[int, Any, str, int, int]

BAD = (
    "boom",
    "misfit state",
    "misfit list",
    "misfit output",
    "misfit name",
    "unpicklable",
    "misfit map",
    "misfit bag",
    "exit",
)
"""Verbs of records that fail, each in its own way and after it has changed all it can."""


class Fussy(ms.Computation):
    """Obeys records one by one, and fails on some of them, after it has changed everything."""

    total = ms.Value("long", default=0)
    seen = ms.Value("array<long>", default=[])
    notes = ms.Value(object)
    counts = ms.Map("string", "long")
    log = ms.Bag("long")
    alarm = ms.Timer(ms.EVENT_TIME, payload="string")
    output = "k long, what string, n long"
    outputs: ClassVar = {"side": "k long"}

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.total.set(self.total.get() + row.v)
        self.seen.set([*self.seen.get(), row.v])
        yield at.key, row.verb, self.total.get()
        yield ms.to("side", at.key)
        self.notes.set({row.verb, *(self.notes.get() or ())})
        self.counts.set(row.verb, (self.counts.get(row.verb) or 0) + 1)
        self.log.append(row.v)
        if row.verb.startswith("set"):
            self.alarm.set(at_second(row.due), tag=str(row.due % 2), payload=row.verb)
        elif row.verb == "forget":
            self.total.delete()
            self.counts.delete("add")
            self.log.clear()
            self.alarm.delete(tag="0")
        elif row.verb in BAD:
            self.alarm.set(at_second(0), tag="0", payload="set ok")  # due at once
            self.alarm.delete(tag="1")
            self.seen.delete()
            if row.v % 2:
                self.log.clear()
                self.counts.clear()
            yield from self.fail(row.verb, at.key)

    def fail(self, verb: str, key: int) -> Iterator[Any]:
        if verb == "misfit state":
            self.total.set("many")
        elif verb == "misfit list":
            self.seen.set([1, "two"])
        elif verb == "misfit map":
            self.counts.set("add", "many")
        elif verb == "misfit bag":
            self.log.append("many")
        elif verb == "misfit output":
            yield key, "huge", 2**70
        elif verb == "misfit name":
            yield ms.to("nowhere", key)
        elif verb == "unpicklable":
            self.notes.set(lambda: 0)
        elif verb == "exit":
            raise SystemExit(3)
        else:
            raise ValueError(verb)

    @alarm.fires
    def ring(self, at: ms.At) -> Iterable[Any]:
        self.total.set(self.total.get() + 1000)
        yield at.key, f"ring {at.tag}", 0
        if at.payload == "set chain":
            self.alarm.set(timedelta(seconds=1), tag=f"{at.tag}+", payload="set ok")
        if at.payload == "set bad":
            self.total.delete()
            self.counts.clear()
            self.log.append(7)
            self.alarm.set(timedelta(seconds=1), tag=f"{at.tag}+", payload="set ok")
            self.alarm.delete(tag="0" if at.tag == "1" else "1")
            raise ValueError("no bell")


def at_second(due: int) -> Any:
    return at(due)


class Key:
    """What the oracle knows of a key."""

    def __init__(self) -> None:
        self.total: int | None = None
        self.seen: list[int] | None = None
        self.notes: set[str] | None = None
        self.counts: Counter[str] = Counter()
        self.log: list[int] = []
        self.timers: dict[str, tuple[int, str]] = {}


class Oracle:
    """The same, one record after the other, in dictionaries; those that fail are left out."""

    def __init__(self) -> None:
        self.keys: dict[int, Key] = defaultdict(Key)
        self.mark = 0
        self.made: list[Counter[Any]] = []
        self.letters: list[Counter[Any]] = []

    def feed(self, commands: list[Command], mark: int) -> None:
        made: Counter[Any] = Counter()
        letters: Counter[Any] = Counter()
        self.mark = max(self.mark, mark)
        for k, _, verb, v, due in commands:
            key = self.keys[k]
            if verb in BAD:
                letters[str(k), f"'{verb}', v={v}, due={due})"] += 1
                continue
            key.total = (key.total or 0) + v
            key.seen = [*(key.seen or []), v]
            key.notes = {verb, *(key.notes or ())}
            key.counts[verb] += 1
            key.log.append(v)
            made[k, verb, key.total] += 1
            if verb.startswith("set"):
                key.timers[str(due % 2)] = (due, verb)
            elif verb == "forget":
                key.total = None
                del key.counts["add"]
                key.log = []
                key.timers.pop("0", None)
        for k, key in self.keys.items():
            while ready := sorted((due, tag) for tag, (due, _) in key.timers.items() if due <= self.mark):
                due, tag = ready[0]
                _, payload = key.timers.pop(tag)
                if payload == "set bad":
                    letters[str(k), f"timer 'alarm' at {at(due)}, tag '{tag}'"] += 1
                    continue
                key.total = (key.total or 0) + 1000
                made[k, f"ring {tag}", 0] += 1
                if payload == "set chain":
                    key.timers[f"{tag}+"] = (due + 1, "set ok")
        self.made.append(made)
        self.letters.append(letters)

    def check(self, sim: Simulated) -> None:
        for epoch, (made, letters) in enumerate(zip(self.made, self.letters, strict=True)):
            assert Counter(sim.delivered["out"][epoch]) == made, f"epoch {epoch}"
            assert {row[0] for row in sim.delivered["dead"][epoch]} <= {"fussy"}
            assert {row[4] for row in sim.delivered["dead"][epoch]} <= {epoch}
            found = Counter((row[1], shown(row[2])) for row in sim.delivered["dead"][epoch])
            assert found == letters, f"epoch {epoch}"
        for state in ("total", "seen", "notes"):
            expected = {k: getattr(key, state) for k, key in self.keys.items()}
            expected = {k: value for k, value in expected.items() if value is not None}
            assert dict(sim.state("fussy", state)) == expected
        if "counts" in sim.graph.steps[0].states:
            counts = {(k, verb): n for k, key in self.keys.items() for verb, n in key.counts.items()}
            assert {(k, verb): n for k, verb, n in sim.state("fussy", "counts")} == counts
            logs: dict[int, list[int]] = defaultdict(list)
            for k, _, values in sorted(sim.state("fussy", "log")):  # one row for each epoch
                logs[k] += values
            assert logs == {k: key.log for k, key in self.keys.items() if key.log}
        assert sim.dead_letters("fussy") == sum(letters.total() for letters in self.letters)


def shown(record: str) -> str:
    """What tells a record or timer apart from others, in the text of a letter."""
    return record.partition("verb=")[2] or record


def fussy(kind: type[ms.Computation] = Fussy, **options: Any) -> Query:
    query = ms.Query("fussy")
    source = query.source("commands", None, event_time="ts")
    step = source.key_by("k").compute("fussy", kind, late="process", on_error="dead_letter", **options)
    step.sink("out", ms.Memory())
    step.output("dead_letter").sink("dead", ms.Memory())
    return query


def state_watermark(sim: Simulated, mark: int) -> None:
    """The next epochs state this watermark."""
    sim._stated = {"commands": int(at(mark).timestamp() * 1_000_000)}


def some_commands(rng: random.Random, mark: int, count: int = 25) -> list[Command]:
    good = ["add", "add", "set ok", "set chain", "set bad", "forget"]
    return [
        (rng.randrange(6), at(mark), rng.choice([*good, *BAD]), rng.randrange(-3, 9), mark + rng.randrange(-4, 12))
        for _ in range(count)
    ]


@pytest.mark.parametrize("number", range(4))
def test_records_that_fail_leave_no_trace_and_all_others_count_whatever_dies(number: int, seed: int) -> None:
    """on_record, against the oracle; the driver dies now and then, and is followed by another."""
    rng = random.Random(seed + number)
    store, oracle, delivered = open_store("memory://"), Oracle(), None
    mark, sim = 0, Simulated(fussy(), {"commands": COMMANDS}, store, slots=2)
    delivered = sim.delivered
    for epoch in range(12):
        mark += rng.randrange(6)
        commands = some_commands(rng, mark)
        if rng.random() < 0.4:
            moment = rng.choice(["planned", "executed", "committed"])

            def die(at: str, _: int, moment: str = moment) -> None:
                if at == moment:
                    raise Crash(moment)

            sim.driver._observe = die
            state_watermark(sim, mark)
            with pytest.raises(Crash):
                sim.feed(epoch=epoch, commands=commands)
            sim = Simulated(fussy(), {"commands": COMMANDS}, store, slots=2)
            sim.delivered = delivered
        state_watermark(sim, mark)
        sim.feed(epoch=epoch, commands=commands)
        oracle.feed(commands, mark)
    state_watermark(sim, mark + 100)
    sim.feed()
    oracle.feed([], mark + 100)
    oracle.check(sim)
    assert sim.dead_letters("fussy") > 50
    errors = {row[3].split(":")[0] for row in sim.outputs("dead")}
    assert errors == {"ValueError", "SystemExit", "BadState", "UserError"}


commands_of_epochs = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.sampled_from(["add", "set ok", "set chain", "set bad", "forget", *BAD]),
                st.integers(-2, 3),
                st.integers(-3, 9),
            ),
            max_size=8,
        ),
    ),
    max_size=6,
)


@given(epochs=commands_of_epochs)
def test_any_life_with_bad_records_is_that_of_the_good_ones(epochs: Any) -> None:
    sim, oracle, mark = Simulated(fussy(), {"commands": COMMANDS}, slots=1), Oracle(), 0
    for passed, commands in [*epochs, (50, [])]:
        mark += passed
        rows = [(k, at(mark), verb, v, mark + due) for k, verb, v, due in commands]
        state_watermark(sim, mark)
        sim.feed(commands=rows)
        oracle.feed(rows, mark)
    oracle.check(sim)


# -- whole columns -----------------------------------------------------------------------------------------------------


class FussyBatch(ms.Computation):
    """Keys as whole columns; fails as a whole where one record or timer is bad."""

    total = ms.Value("long", default=0)
    notes = ms.Value(object)
    alarm = ms.Timer(ms.EVENT_TIME, payload="string")
    output = "k long, what string, n long"

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        verbs = batch.column("verb").to_pylist()
        sets = pc.starts_with(batch.last("verb"), "set").to_numpy(zero_copy_only=False)
        due = np.array([at(second).replace(tzinfo=None) for second in batch.last("due").to_pylist()], "datetime64[us]")
        self.alarm.set(batch, due, where=sets, payload=batch.last("verb"))
        totals = self.total.read(batch) + batch.sum("v")
        self.total.write(batch, ["many"] * len(batch) if "misfit state" in verbs else totals)
        notes = [lambda: 0] * len(batch) if "unpicklable" in verbs else ["seen"] * len(batch)
        self.notes.write(batch, notes)
        yield batch.output(batch.keys, ["sum"] * len(batch), totals)
        if "misfit output" in verbs:
            yield pa.record_batch({"k": batch.keys})
        if set(BAD) & set(verbs):
            raise ValueError("boom")

    @alarm.fires
    def ring(self, batch: ms.TimerBatch) -> Iterable[Any]:
        self.total.write(batch, self.total.read(batch) + 1000)
        yield batch.output(batch.keys, ["ring"] * len(batch), [0] * len(batch))
        if "set bad" in batch.payloads.to_pylist():
            raise ValueError("no bell")


class BatchOracle(Oracle):
    """The same key by key: one that fails in an epoch is as without its records; its due timers fire."""

    def feed(self, commands: list[Command], mark: int) -> None:
        made: Counter[Any] = Counter()
        letters: Counter[Any] = Counter()
        self.mark = max(self.mark, mark)
        by_key: dict[int, list[Command]] = {k: [] for k in self.keys}
        for command in commands:
            by_key.setdefault(command[0], []).append(command)
        for k, mine in by_key.items():
            key = self.keys[k]
            waiting = key.timers.get("")
            timer = (mine[-1][4], mine[-1][2]) if mine and mine[-1][2].startswith("set") else waiting
            rings = timer is not None and timer[0] <= self.mark
            if any(verb in BAD for _, _, verb, _, _ in mine) or (rings and timer is not None and timer[1] == "set bad"):
                for _, _, verb, v, due in mine:
                    letters[str(k), f"'{verb}', v={v}, due={due})"] += 1
                if waiting is not None and waiting[0] <= self.mark:
                    del key.timers[""]
                    if waiting[1] == "set bad":
                        letters[str(k), f"timer 'alarm' at {at(waiting[0])}, tag ''"] += 1
                    else:
                        key.total = (key.total or 0) + 1000
                        made[k, "ring", 0] += 1
                continue
            if mine:
                key.total = (key.total or 0) + sum(command[3] for command in mine)
                key.notes = "seen"  # type: ignore[assignment]
                made[k, "sum", key.total] += 1
            if timer is not None:
                key.timers[""] = timer
            if rings:
                del key.timers[""]
                key.total = (key.total or 0) + 1000
                made[k, "ring", 0] += 1
        self.made.append(made)
        self.letters.append(letters)

    def check(self, sim: Simulated) -> None:
        sim.state = lambda step, state: [] if state == "seen" else Simulated.state(sim, step, state)  # type: ignore
        super().check(sim)


@given(epochs=commands_of_epochs, slots=st.integers(1, 2))
def test_any_batches_with_bad_keys_are_those_of_the_good_ones(epochs: Any, slots: int) -> None:
    sim, oracle, mark = Simulated(fussy(FussyBatch), {"commands": COMMANDS}, slots=slots), BatchOracle(), 0
    for passed, commands in [*epochs, (50, [])]:
        mark += passed
        rows = [(k, at(mark), "add" if verb == "forget" else verb, v, mark + due) for k, verb, v, due in commands]
        state_watermark(sim, mark)
        sim.feed(commands=rows)
        oracle.feed(rows, mark)
    oracle.check(sim)


def test_a_few_bad_keys_among_many_are_found_by_halves(rng: random.Random) -> None:
    calls: list[int] = []

    class Counted(ms.Computation):
        total = ms.Value("long", default=0)
        output = "k long, total long"

        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            calls.append(len(batch))
            if pc.any(pc.equal(batch.column("v"), -1)).as_py():
                raise ValueError("negative")
            self.total.write(batch, self.total.read(batch) + batch.sum("v"))
            yield batch.output(batch.keys, self.total.read(batch))

    sim = Simulated(fussy(Counted), {"commands": COMMANDS}, slots=1)
    bad = set(rng.sample(range(1000), 3))
    sim.feed(commands=[(k, at(0), "", -1 if k in bad else k, 0) for k in range(1000)])
    assert dict(sim.state("fussy")) == {k: k for k in range(1000) if k not in bad}
    assert {row[1] for row in sim.outputs("dead")} == {str(k) for k in bad}
    assert {row[3] for row in sim.outputs("dead")} == {"ValueError: negative"}
    assert len(sim.outputs("out")) == 997
    assert len(calls) <= 2 + 2 * 3 * 10, "a logarithmic number of calls for each bad key"


def test_keys_that_fail_only_together_stop_the_query() -> None:
    class Together(ms.Computation):
        output = "k long"

        def on_batch(self, batch: ms.Batch) -> None:
            if len(batch) > 1:
                raise ValueError("too many")

    sim = Simulated(fussy(Together), {"commands": COMMANDS}, slots=1)
    with pytest.raises(StepError, match="too many"):
        sim.feed(commands=[(k, at(0), "", 0, 0) for k in range(4)])
    assert sim.epoch == -1


@given(bad=st.sets(st.integers(0, 40)), count=st.integers(1, 41))
def test_sifting_finds_exactly_the_keys_that_fail(bad: set[int], count: int) -> None:
    def attempt(keys: Any) -> list[int]:
        places: list[int] = np.flatnonzero(keys).tolist()
        if bad & set(places):
            raise RecordFailure("", "", ValueError(str(sorted(bad & set(places)))))
        return places

    good, failed = sift(count, attempt)
    assert set(failed) == {place for place in bad if place < count}
    assert good == ([place for place in range(count) if place not in bad] or None)
    assert all(str(failure.cause) == str([place]) for place, failure in failed.items())


# -- what is not a record's fault --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vectorised", [False, True])
@pytest.mark.parametrize("kind", ["damaged", "unavailable"])
def test_state_that_cannot_be_read_is_never_a_dead_letter(kind: str, vectorised: bool) -> None:
    """Not even if user code turns the exception into another."""

    class Looks(ms.Computation):
        alarm = ms.Timer()
        count = ms.Value("long", default=0)
        output = "k long"

        def on_record(self, row: Any, at: ms.At) -> None:
            try:
                self.alarm.get(tag="x")
            except Exception as error:
                raise KeyError("lost") from error
            self.alarm.set(at_second(100), tag="x")
            self.count.set(self.count.get() + 1)

        @alarm.fires
        def ring(self, at: Any) -> None: ...

    class LooksBatch(Looks):
        def on_batch(self, batch: ms.Batch) -> None:
            try:
                self.alarm.get(batch, tag="x")
            except Exception as error:
                raise KeyError("lost") from error
            self.alarm.set(batch, [np.datetime64("2026-02-01")] * len(batch), tag="x")
            self.count.write(batch, self.count.read(batch) + batch.count())

    sim = Simulated(fussy(LooksBatch if vectorised else Looks), {"commands": COMMANDS}, slots=1)
    sim.feed(commands=[(1, at(0), "", 0, 0)])
    CACHE._open.clear()
    [segment] = [item.name for item in sim.store.list(names.SEGMENTS) if "/alarm/" in item.name]
    if kind == "damaged":
        sim.store.delete([segment])
        with pytest.raises(DamagedObject, match=segment):
            sim.feed(commands=[(1, at(0), "", 0, 0)])
        assert sim.epoch == 0
    else:

        class Once(FaultyStore):
            def get(self, name: str) -> memoryview | None:
                if name == segment and self.fail_at == 0:
                    self.fail_at = -1
                    raise StoreUnavailable("busy")
                return self.inner.get(name)

        sim.driver.executor.store = Once(sim.store)  # type: ignore[attr-defined]
        sim.feed(commands=[(1, at(0), "", 0, 0)])
        assert sim.driver.last is not None
        assert sim.driver.last.attempts == 2
        assert dict(sim.state("fussy")) == {1: 2}
    assert sim.outputs("dead") == []


@pytest.mark.parametrize("moment", ["setup", "close"])
def test_setup_and_close_are_no_records_fault(moment: str) -> None:
    def fail(self: Any) -> None:
        raise OSError("no connection")

    for kind in (Fussy, FussyBatch):
        broken = type("Broken", (kind,), {moment: fail})
        sim = Simulated(fussy(broken), {"commands": COMMANDS})
        with pytest.raises(StepError, match="no connection"):
            sim.feed(commands=[(1, at(0), "boom", 1, 0), (2, at(0), "add", 1, 0)])


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_a_query_that_stopped_at_a_bad_record_goes_on_with_dead_letters() -> None:
    def build(**options: Any) -> Query:
        query = ms.Query("shop")
        query.source("commands", None).key_by("k").compute("count", Picky, **options).sink("out", ms.Memory())
        return query

    class Picky(ms.Computation):
        total = ms.Value("long", default=0)
        output = "k long"

        def on_record(self, row: Any, at: ms.At) -> None:
            self.total.set(self.total.get() + row.v)
            if row.v < 0:
                raise ValueError("negative")

    store, rows = open_store("memory://"), [(1, at(0), "", 2, 0), (1, at(0), "", -1, 0), (1, at(0), "", 3, 0)]
    with pytest.raises(StepError, match="negative"):
        Simulated(build(), {"commands": COMMANDS}, store).feed(commands=rows)
    sim = Simulated(build(on_error="dead_letter"), {"commands": COMMANDS}, store)
    sim.feed(commands=rows)
    assert dict(sim.state("count")) == {1: 5}
    sim = Simulated(build(), {"commands": COMMANDS}, store)
    sim.feed(commands=[(1, at(0), "", 1, 0)])
    assert dict(sim.state("count")) == {1: 6}
    assert sim.dead_letters("count") == 1


def test_letters_are_a_stream_with_event_time_like_any_other() -> None:
    class Times(ms.Computation):
        output = "step string, time timestamp"

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield row.step, at.time

    for kind in (Fussy, FussyBatch):
        query = fussy(kind)
        letters = ms.model.query.Stream(query, ("fussy.dead_letter",))
        letters.key_by("key").compute("times", Times).sink("times_out", ms.Memory())
        sim = Simulated(query, {"commands": COMMANDS}, slots=2)
        sim.feed(commands=[(1, at(5), "set bad", 1, 20)])
        sim.feed(commands=[(2, at(7), "boom", 1, 0)])
        sim.advance_watermark(at(30))
        assert sim.outputs("times_out") == [("fussy", at(7)), ("fussy", at(20))]
        assert [row[2] for row in sim.outputs("dead")][
            1
        ] == f"timer 'alarm' at {at(20)}, tag '{0 if kind is Fussy else ''}'"


def test_a_timer_that_keeps_setting_itself_is_a_dead_letter_and_its_key_goes_on() -> None:
    class Endless(ms.Computation):
        again = ms.Timer()
        other = ms.Timer()
        rung = ms.Value("long", default=0)
        output = "k long, what string, n long"

        def on_record(self, row: Any, at: ms.At) -> None:
            self.again.set(timedelta(0), tag="x")
            self.other.set(timedelta(seconds=1))

        @again.fires
        def once_more(self, at: ms.At) -> None:
            self.again.set(timedelta(0), tag="x")

        @other.fires
        def ring(self, at: ms.At) -> None:
            self.rung.set(self.rung.get() + 1)

    sim = Simulated(fussy(Endless), {"commands": COMMANDS})
    state_watermark(sim, 5)
    sim.feed(commands=[(1, at(0), "", 0, 0)])
    [(_, key, record, error, _)] = sim.outputs("dead")
    assert (key, record) == ("1", f"timer 'again' at {at(0)}, tag 'x'")
    assert "fired more than 10,000 times in one epoch" in error
    assert dict(sim.state("fussy")) == {1: 1}


def test_whatever_text_a_failure_has_the_letter_can_be_stored() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Fails(ms.Computation):
        output = "k string"

        def on_record(self, row: Any, at: ms.At) -> None:
            raise [ValueError("half \ud800"), Odd(), ValueError("x" * 5000)][row.v]

    query = ms.Query("texts")
    step = query.source("rows", None).key_by("k").compute("texts", Fails, on_error="dead_letter")
    step.output("dead_letter").sink("dead", ms.Memory())
    sim = Simulated(query, {"rows": "k string, v long"}, slots=1)
    sim.feed(rows=[("a", 0), ("a", 1), ("a", 2), ("b" * 5000, 1)])
    letters = sim.outputs("dead")
    assert "ValueError: half \\ud800" in {row[3] for row in letters}
    assert "Odd: (its text cannot be had: RuntimeError)" in {row[3] for row in letters}
    assert max(len(text) for row in letters for text in row[:4]) == 2000


def test_what_is_wrong_with_dead_letters_is_refused() -> None:
    class Own(Fussy):
        outputs: ClassVar = {"dead_letter": "k long"}

    stream = ms.Query("q").source("commands", None, event_time="ts").key_by("k")
    with pytest.raises(UserError, match="on_error='ignore'; give one of 'stop', 'dead_letter'"):
        stream.compute("a", Fussy, on_error="ignore")
    with pytest.raises(UserError, match="makes an output 'dead_letter', and the computation declares one"):
        stream.compute("b", Own, on_error="dead_letter")
    with pytest.raises(UserError, match="step 'c' has no output 'dead_letter'"):
        stream.compute("c", Fussy).output("dead_letter")
    assert stream.compute("d", Own).output("dead_letter").name == "d.dead_letter"


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.just([1]))
kinds = st.sampled_from([pa.int8(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.bool_(), pa.date32()])


@given(value=plain, kind=kinds)
def test_what_surely_fits_is_taken(value: Any, kind: pa.DataType) -> None:
    if fitting(kind)(value):
        assert array_from([value], kind).to_pylist() == [value] or value != value


def test_a_due_timer_of_a_key_that_failed_is_over() -> None:
    class Asks(FussyBatch):
        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            if pc.all(pc.equal(batch.column("verb"), "ask")).as_py():
                pending = np.isnat(self.alarm.get(batch))
                yield batch.output(batch.keys, ["over" if none else "pending" for none in pending], [0] * len(batch))
            else:
                yield from super().on_batch(batch)

    sim = Simulated(fussy(Asks), {"commands": COMMANDS}, slots=1)
    sim.feed(commands=[(k, at(0), "set ok" if k else "set bad", 1, 10 + 10 * (k == 2)) for k in range(3)])
    sim.advance_watermark(at(10))
    assert [row[1] for row in sim.outputs("dead")] == ["0"]
    sim.feed(commands=[(k, at(10), "ask", 0, 0) for k in range(3)])
    assert sorted(sim.delivered["out"][2]) == [(0, "over", 0), (1, "over", 0), (2, "pending", 0)]
