"""Maps and bags against dictionaries and lists: any operations, in any order, over epochs, restarts and merges."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.model.bags import BatchBag
from millstream.model.maps import ReadAhead
from millstream.store import keys as keys_module
from millstream.testing import Simulated

SCHEMA = "key string, op string, sub long, n long"


class RecordOps(ms.Computation):
    """Does what its records say, and produces what it sees."""

    entries = ms.Map("long", "long", default=0)
    texts = ms.Map("long", object)
    seen = ms.Bag("long")
    output = "key string, what string"

    def on_record(self, row: Any, at: Any) -> Any:
        match row.op:
            case "set":
                self.entries.set(row.sub, row.n)
                self.texts.set(row.sub, {"n": row.n})
            case "add":
                self.entries.set(row.sub, self.entries.get(row.sub) + row.n)
            case "delete":
                self.entries.delete(row.sub)
            case "clear":
                self.entries.clear()
                self.texts.clear()
            case "append":
                self.seen.append(row.n)
            case "empty":
                self.seen.clear()
            case "look":
                there = self.entries.exists(row.sub)
                yield at.key, f"{there} {self.entries.items()} {self.texts.items()} {self.seen.read()}"


class Oracle:
    """The same with dictionaries and lists."""

    def __init__(self) -> None:
        self.entries: dict[Any, dict[int, int]] = defaultdict(dict)
        self.texts: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.seen: dict[Any, list[int]] = defaultdict(list)
        self.out: list[tuple[Any, str]] = []

    def apply(self, record: tuple[Any, str, int, int]) -> None:
        key, op, sub, n = record
        entries, texts, seen = self.entries[key], self.texts[key], self.seen[key]
        match op:
            case "set":
                entries[sub], texts[sub] = n, {"n": n}
            case "add":
                entries[sub] = entries.get(sub, 0) + n
            case "delete":
                entries.pop(sub, None)
            case "clear":
                entries.clear()
                texts.clear()
            case "append":
                seen.append(n)
            case "empty":
                seen.clear()
            case "look":
                self.out.append((key, f"{sub in entries} {sorted(entries.items())} {sorted(texts.items())} {seen}"))


def query_of(computation: Any) -> ms.Query:
    query = ms.Query("ops")
    query.source("ops", frame=None).key_by("key").compute("step", computation).sink("out", ms.Memory())
    return query


operations = st.tuples(
    st.sampled_from(["a", "b", "c", None, "dd"]),
    st.sampled_from(["set", "add", "delete", "clear", "append", "empty", "look", "look"]),
    st.integers(-2, 3),
    st.integers(0, 99),
)


@given(st.lists(st.lists(operations, max_size=12), min_size=1, max_size=10), st.booleans(), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_any_operations_on_records_read_as_dictionaries_and_lists(
    epochs: list[list[tuple[Any, str, int, int]]], weak_hash: bool, slots: int
) -> None:
    original = keys_module.KeyColumns.hashes

    def weak(self: Any) -> Any:
        return (original(self) % np.uint64(3)) << np.uint64(60)

    with pytest.MonkeyPatch.context() as patch:
        if weak_hash:
            patch.setattr(keys_module.KeyColumns, "hashes", weak)
        query, oracle = query_of(RecordOps), Oracle()
        sim = Simulated(query, {"ops": SCHEMA}, slots=slots)
        for number, records in enumerate(epochs):
            sim.feed(ops=records)
            for record in records:
                oracle.apply(record)
            if number % 3 == 2:
                sim = Simulated(query, {"ops": SCHEMA}, sim.store, slots=slots)  # a restart
                sim.delivered = {"out": {}}
        check_state(sim, oracle)
        mine = sim.outputs("out")
        assert sorted(mine, key=repr) == sorted(oracle.out[len(oracle.out) - len(mine) :], key=repr)


def check_state(sim: Simulated, oracle: Oracle) -> None:
    entries = {(key, sub): n for key, sub, n in sim.state("step", "entries")}
    assert entries == {(key, sub): n for key, found in oracle.entries.items() for sub, n in found.items()}
    texts = {(key, sub): value for key, sub, value in sim.state("step", "texts")}
    assert texts == {(key, sub): value for key, found in oracle.texts.items() for sub, value in found.items()}
    seen: dict[Any, list[int]] = defaultdict(list)
    for key, _, values in sorted(sim.state("step", "seen"), key=lambda row: row[1]):
        seen[key] += values
    assert seen == {key: values for key, values in oracle.seen.items() if values}


class BatchOps(ms.Computation):
    """In each epoch: adds n to each record's entry, deletes those with op "delete", appends all n, and looks."""

    entries = ms.Map("string", "long", default=0)
    seen = ms.Bag("long")
    output = "key string, entries array<struct<sub: string, n: long>>, seen array<long>, now long, there boolean"

    def on_batch(self, batch: ms.Batch) -> Any:
        places = np.repeat(np.arange(len(batch)), batch.count())
        subs, ns = batch.column("sub").cast(pa.string()), batch.column("n").to_numpy()
        ops = np.array(batch.column("op").to_pylist(), object)
        table = pa.table({"place": places, "sub": subs, "n": ns})
        sums = table.group_by(["place", "sub"], use_threads=False).aggregate([("n", "sum")])
        at, keys = sums["place"].to_numpy(), sums["sub"].combine_chunks()
        before = self.entries.read(batch, at, keys)
        self.entries.write(batch, at, keys, before + sums["n_sum"].to_numpy())
        gone = ops == "delete"
        self.entries.delete(batch, places[gone], subs.filter(pa.array(gone)))
        self.seen.append(batch, ns)
        cleared = np.zeros(len(batch), bool)
        cleared[places[ops == "clear"]] = True
        self.entries.clear(batch, where=cleared)
        self.seen.clear(batch, where=cleared)
        items = self.entries.items(batch)
        counts = np.bincount(items.places, minlength=len(batch))
        pairs = pa.StructArray.from_arrays([items.subkeys, pa.array(items.values)], ["sub", "n"])
        offsets = pa.array(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
        everyone, one = np.arange(len(batch)), ["1"] * len(batch)
        yield batch.output(
            batch.keys,
            pa.ListArray.from_arrays(offsets, pairs),
            self.seen.read(batch),
            self.entries.read(batch, everyone, one),
            self.entries.exists(batch, everyone, one),
        )


@pytest.mark.parametrize("slots", [1, 3])
def test_operations_on_batches_read_as_dictionaries_and_lists(slots: int, seed: int) -> None:
    rng = random.Random(seed)
    query = query_of(BatchOps)
    sim = Simulated(query, {"ops": SCHEMA}, slots=slots)
    entries: dict[Any, dict[str, int]] = defaultdict(dict)
    seen: dict[Any, list[int]] = defaultdict(list)
    for epoch in range(30):
        records = [
            (rng.choice("abcdefgh"), rng.choice(["add"] * 8 + ["delete", "clear"]), rng.randrange(4), rng.randrange(9))
            for _ in range(rng.randrange(12))
        ]
        sim.feed(ops=records)
        touched = {record[0] for record in records}
        for key, _, sub, n in records:
            entries[key][str(sub)] = entries[key].get(str(sub), 0) + n
            seen[key].append(n)
        for key, op, sub, _ in records:
            if op == "delete":
                entries[key].pop(str(sub), None)
        for key in {record[0] for record in records if record[1] == "clear"}:
            entries[key], seen[key] = {}, []
        expected = {
            key: ([{"sub": s, "n": n} for s, n in sorted(entries[key].items())], seen[key], entries[key].get("1", 0))
            for key in touched
        }
        found = {row[0]: row[1:] for row in sim.delivered["out"].get(epoch, [])}
        assert {key: row[:3] for key, row in found.items()} == expected, f"seed {seed}, epoch {epoch}"
        assert all(row[3] == ("1" in entries[key]) for key, row in found.items())


class Sliding(ms.Computation):
    """Timers and maps together: the callback is given some of the keys."""

    counts = ms.Map("timestamp", "long", default=0)
    rest = ms.Bag("string")
    close = ms.Timer(ms.EVENT_TIME)
    output = "key string, n long, rest array<string>"

    def on_batch(self, batch: ms.Batch) -> Any:
        places = np.repeat(np.arange(len(batch)), batch.count())
        times = batch.times.astype("datetime64[m]").astype("datetime64[us]")
        stamps = pa.array(times, pa.timestamp("us", "UTC"))
        self.counts.write(batch, places, stamps, np.ones(len(places), np.int64))
        self.rest.append(batch, batch.column("key"))
        self.close.set(batch, np.full(len(batch), np.datetime64("2026-01-01T01:00")))

    @close.fires
    def report(self, batch: ms.TimerBatch) -> Any:
        items = self.counts.items(batch)
        sums = np.bincount(items.places, items.values, len(batch)).astype(np.int64)
        rest = self.rest.read(batch)
        self.counts.clear(batch)
        self.rest.clear(batch)
        yield batch.output(batch.keys, sums, rest)


def at(minute: int) -> datetime:
    return datetime(2026, 1, 1, minute // 60, minute % 60, tzinfo=UTC)


def test_a_callback_reads_and_clears_the_maps_and_bags_of_its_keys_only() -> None:
    query = ms.Query("panes")
    source = query.source("s", frame=None, event_time="at", lateness="1 day")
    source.key_by("key").compute("panes", Sliding).sink("out", ms.Memory())
    sim = Simulated(query, {"s": "key string, at timestamp"}, now=at(0))
    sim.feed(s=[("a", at(1)), ("b", at(2)), ("a", at(3))])
    sim.feed(s=[("a", at(3)), ("b", at(7))])
    sim.advance_watermark(at(61))
    assert sorted(sim.outputs("out")) == [("a", 2, ["a", "a", "a"]), ("b", 2, ["b", "b"])]
    assert sim.state("panes", "counts") == sim.state("panes", "rest") == []


class Chosen(ms.Computation):
    """Reads the bags of keys whose records say so, after it has appended to all."""

    seen = ms.Bag("long")
    output = "key string, seen array<long>"

    def on_batch(self, batch: ms.Batch) -> Any:
        wanted = batch.max("wanted").to_numpy(zero_copy_only=False)
        self.seen.append(batch, batch.column("x"))
        yield batch.output(batch.keys, self.seen.read(batch, where=wanted))


def test_only_the_bags_that_are_asked_for_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    kept = BatchBag._kept
    monkeypatch.setattr(BatchBag, "_kept", lambda self, places: [looked.append(len(places)), kept(self, places)][1])
    query = ms.Query("chosen")
    query.source("s", None).key_by("key").compute("chosen", Chosen).sink("out", ms.Memory())
    sim = Simulated(query, {"s": "key string, x long, wanted boolean"}, slots=1)
    sim.feed(s=[("a", 1, True), ("b", 2, False), ("c", 3, False), ("a", 4, True)])
    sim.feed(s=[("a", 5, False), ("b", 6, True), ("c", 7, True), ("d", 8, False)])
    assert dict(sim.delivered["out"][0]) == {"a": [1, 4], "b": [], "c": []}
    assert dict(sim.delivered["out"][1]) == {"a": [], "b": [2, 6], "c": [3, 7], "d": []}
    assert looked == [1, 2]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: ms.Map("string"), "a Map needs a type"),
        (lambda: ms.Map("", "long"), "needs the types of its keys and values"),
        (lambda: ms.Map("double", "long"), "floating-point numbers cannot be keys"),
        (lambda: ms.Map("array<long>", "long"), "as the type of a key"),
        (lambda: ms.Bag(), "a Bag needs a type"),
        (lambda: ms.Value("long", ttl="soon"), "give a duration"),
        (lambda: ms.Value("long", ttl="0 seconds"), "above zero"),
        (lambda: ms.Value("long", ttl_time=ms.EVENT_TIME), "needs ttl"),
        (lambda: ms.Value("long", ttl="1 hour", ttl_time="tea"), "give EVENT_TIME or WALL_TIME"),
    ],
)
def test_declarations_that_cannot_be_are_refused(make: Any, match: str) -> None:
    with pytest.raises(ms.UserError, match=match):
        make()


class Misuse(ms.Computation):
    """Each record asks for one misuse."""

    entries = ms.Map("long", "long")
    seen = ms.Bag("int")
    things = ms.Bag(object)

    def on_record(self, row: Any, at: Any) -> Any:
        match row.op:
            case "null":
                self.entries.get(None)
            case "text":
                self.entries.set("x", 1)
            case "value":
                self.entries.set(1, "x")
            case "large":
                self.seen.append(2**40)
            case "unpicklable":
                self.things.append(lambda: 0)


@pytest.mark.parametrize(
    ("op", "match"),
    [
        ("null", "a key of a map cannot be None"),
        ("text", "entries: its key: expected BIGINT, found 'x'"),
        ("value", "state 'entries': expected BIGINT, found 'x'"),
        ("large", "state 'seen': expected INT"),
        ("unpicklable", "cannot be pickled"),
    ],
)
def test_what_does_not_fit_is_a_failure_of_its_key_and_leaves_no_trace(op: str, match: str) -> None:
    sim = Simulated(query_of_misuse(), {"ops": SCHEMA})
    with pytest.raises(ms.StepError, match=match) as caught:
        sim.feed(ops=[("fine", "none", 0, 0), ("guilty", op, 0, 0)])
    assert caught.value.key == "'guilty'"
    assert sim.epoch == -1


def query_of_misuse() -> ms.Query:
    query = ms.Query("misuse")
    query.source("ops", frame=None).key_by("key").compute("step", Misuse)
    return query


def test_outside_of_a_step_there_is_no_state() -> None:
    for use in (lambda: RecordOps.entries.get(1), lambda: RecordOps.seen.read(), lambda: RecordOps.entries.items()):
        with pytest.raises(ms.UserError, match="outside on_record / on_batch"):
            use()


def test_one_entry_of_many_is_written_alone() -> None:
    """A thousand entries, then one more: the epoch writes one row."""
    sim = Simulated(query_of(RecordOps), {"ops": SCHEMA}, slots=1, compaction_budget=1)
    sim.feed(ops=[("a", "set", sub, 1) for sub in range(1000)])
    sim.feed(ops=[("a", "set", 5, 2)])
    pieces = [p for p in sim.driver.journal.history.manifest.segments() if p.family.state == "entries"]
    assert sorted(ref.rows for ref in pieces) == [1, 1000]
    assert len(sim.state("step", "entries")) == 1000


def test_a_state_may_be_called_like_a_column_of_the_key() -> None:
    class Same(ms.Computation):
        key = ms.Value("long", default=0)

        def on_record(self, row: Any, at: Any) -> Any:
            self.key.set(self.key.get() + 1)

    query = ms.Query("same")
    query.source("ops", frame=None).key_by("key").compute("step", Same)
    sim = Simulated(query, {"ops": SCHEMA})
    sim.feed(ops=[("a", "", 0, 0), ("a", "", 0, 0)])
    assert sim.state("step") == [("a", 2)]


class Counting:
    """One entry for every key; counts the keys whose entries were read."""

    def __init__(self) -> None:
        self.read = 0

    def look(self, places: Any, subkeys: pa.Array) -> Any:
        raise NotImplementedError

    def entries(self, places: Any) -> tuple[Any, pa.Array, pa.Array]:
        self.read += len(places)
        return places, pa.array(places), pa.array(places * 10)


@pytest.mark.parametrize(("every", "most"), [(1, 1.0), (2, 2.1), (100, 5.0)])
def test_entries_of_the_keys_ahead_are_read_as_long_as_they_are_asked_for(every: int, most: float) -> None:
    stored, count = Counting(), 20_000
    ahead = ReadAhead(stored, count, dict)
    for index in range(0, count, every):
        assert ahead.of(index) == {index: 10 * index}
    assert stored.read <= most * count / every
