"""Graphs of several levels: any acyclic shape gives what a sequential run gives, also when tasks run twice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from graphs import PAIRS, Last, Oracle, Shape, Sum, build
from millstream.engine.host import host
from millstream.engine.route import route
from millstream.engine.spec import SlotTask
from millstream.errors import UserError
from millstream.model.query import Query
from millstream.protocol.epochs import Report
from millstream.testing import Simulated
from millstream.testing.simulated import InProcess, to_batch

shapes = st.lists(
    st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 7), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(shape=shapes, seed=st.integers(0, 2**32), slots=st.integers(1, 4))
@settings(max_examples=40)
def test_any_shape_gives_what_a_sequential_run_gives(shape: Shape, seed: int, slots: int) -> None:
    query = build(shape)
    rng = random.Random(seed)
    sim = Simulated(query, {"s0": PAIRS, "s1": PAIRS}, slots=slots, map_tasks=3)
    oracle = Oracle(query)
    for epoch in range(4):
        records = {s: [(rng.randrange(30), rng.randrange(9)) for _ in range(rng.randrange(25))] for s in ("s0", "s1")}
        sim.feed(**records)
        expected = oracle.feed(records)
        for number in range(len(shape)):
            assert Counter(sim.delivered[f"out{number}"][epoch]) == expected[f"step{number}"]
            assert Counter(sim.delivered[f"odd{number}"][epoch]) == expected[f"step{number}.odd"]
    for number in range(len(shape)):
        assert dict(sim.state(f"step{number}")) == dict(oracle.totals[f"step{number}"])


def test_inputs_are_applied_in_their_order_and_a_source_may_be_read_at_any_level() -> None:
    """`left` is two levels down, `right` is the source itself: it waits for the level, and comes after."""
    query = ms.Query("late")
    events = query.source("events", None)
    once = events.key_by("k").compute("once", Sum(100))
    twice = once.key_by("k").compute("twice", Sum(100))
    last = query.compute("last", Last, left=twice.key_by("k"), right=events.key_by("k"))
    last.sink("out", ms.Memory())
    last.output("rights").sink("rights", ms.Memory())
    sim = Simulated(query, {"events": PAIRS}, slots=3)
    assert [step.level for step in sim.graph.steps] == [1, 2, 3]
    sim.feed(events=[(1, 5), (1, 6), (2, 7)])
    assert sorted(sim.delivered["out"][0]) == [(1, 11, -1), (1, 11, 5), (1, 11, 6), (2, 7, -1), (2, 7, 7)]
    assert sorted(sim.delivered["rights"][0]) == [(1,), (1,), (2,)]
    sim.feed(events=[(1, 1)])
    assert sim.delivered["out"][1] == [(1, 23, 6), (1, 23, 1)]


def test_every_record_is_applied_once_per_reader_whatever_the_shape() -> None:
    """A stream with three readers on two levels is made once, and split once per key."""
    calls: list[str] = []

    class Called(Sum):
        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            calls.append(self.name)
            return super().on_batch(batch)

        def __init__(self, name: str) -> None:
            super().__init__(50)
            self.name = name

    query = ms.Query("fan")
    first = query.source("events", None).key_by("k").compute("first", Called("first"))
    second = first.key_by("k").compute("second", Called("second"))
    first.key_by("k").compute("other", Called("other"))
    query.compute("third", Called("third"), a=second.key_by("k"), b=first.key_by("k"))
    sim = Simulated(query, {"events": PAIRS}, slots=1)
    sim.feed(events=[(1, 5), (2, 6)])
    assert sorted(calls) == ["first", "other", "second", "third"]
    assert len(sim.driver.journal.history.recent[sim.driver.journal.history.epoch].records) == 4


class Dice(ms.Computation):
    """Not deterministic: a second run of its task makes other productions."""

    output = PAIRS

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        yield batch.output(batch.keys, np.array([random.randrange(2**60) for _ in range(len(batch))]))


class RunsTwice(InProcess):
    """Slot 0 of level 2 consumes the first run of the level before it, every other slot the second one: what happens
    on Spark when an executor dies after part of its output was consumed."""

    times = 0

    def execute(
        self, spec: Any, task: Any, slots: Any, records: Any, limit_s: float | None = None
    ) -> tuple[list[Report], int]:
        if self.times:
            return super().execute(spec, task, slots, records)
        self.times += 1
        source = spec.graph.sources[0]
        sent = [list(route(spec, task, [("events", to_batch(records["events"], source.schema))], 0, self.store))]

        def level(number: int, sent: list[list[bytes]], mine: SlotTask) -> Any:
            return host(spec, task, number, mine, [payloads[mine.slot] for payloads in sent], self.store)

        runs = [[list(level(1, sent, mine).payloads(task, self.store)) for mine in slots] for _ in range(2)]
        last = [level(2, runs[0 if mine.slot == 0 else 1], mine) for mine in slots]
        return [report for one in last for report in one.reports], 1


def test_two_versions_of_a_level_in_one_job_are_caught_by_their_receipts() -> None:
    query = ms.Query("dice")
    thrown = query.source("events", None).key_by("k").compute("dice", Dice)
    thrown.key_by("k").compute("sum", Sum(1000)).sink("out", ms.Memory())
    thrown.sink("thrown", ms.Memory())
    sim = Simulated(query, {"events": PAIRS}, slots=3)
    sim.driver.executor = RunsTwice(sim.store, 2)  # type: ignore[attr-defined]
    sim.feed(events=[(key, 0) for key in range(20)])
    assert sim.driver.last is not None
    assert sim.driver.last.attempts == 2
    assert Counter(sim.delivered["thrown"][0]) == Counter(sim.delivered["out"][0])
    assert dict(sim.state("sum")) == dict(sim.delivered["thrown"][0])


def test_a_failure_of_any_level_stops_the_epoch_with_its_step() -> None:
    class Refuses(Sum):
        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            if 13 in batch.keys.to_pylist():
                raise ValueError("thirteen")
            return super().on_batch(batch)

    for refusing in range(3):
        query = ms.Query("chain")
        stream = query.source("events", None)
        for number in range(3):
            kind = Refuses if number == refusing else Sum
            stream = stream.key_by("k").compute(f"step{number}", kind(100))
        sim = Simulated(query, {"events": PAIRS}, slots=2)
        sim.feed(events=[(1, 1)])
        with pytest.raises(ms.StepError, match=f"step 'step{refusing}' failed in epoch 1: ValueError: thirteen"):
            sim.feed(events=[(13, 1), (1, 1)])
        assert sim.epoch == 0
        sim.feed(events=[(1, 1)])
        assert dict(sim.state("step2")) == {1: 4}  # 1, then 1 + (1 + (1 + 1))


def test_what_cannot_be_a_graph_is_refused_with_the_step() -> None:
    def refuse(match: str, build: Any, schemas: Mapping[str, str] | None = None) -> None:
        query = ms.Query("q")
        events, names = query.source("events", None), query.source("names", None)
        with pytest.raises(UserError, match=match):
            build(query, events, names)
            Simulated(query, schemas or {"events": PAIRS, "names": "k string, v long"})

    class Silent(ms.Computation):
        def on_record(self, row: Any, at: ms.At) -> None: ...

    refuse(
        "step 'b' reads 'a', which declares no output",
        lambda q, e, n: e.key_by("k").compute("a", Silent).key_by("k").compute("b", Silent),
    )
    refuse(
        "step 'j': the key of 'names' is STRING, that of 'events' is BIGINT",
        lambda q, e, n: q.compute("j", Last, left=e.key_by("k"), right=n.key_by("k")),
    )
    refuse(
        "step 'u': the streams 'events' .* and 'names' .* were united, but differ",
        lambda q, e, n: e.union(n).key_by("v").compute("u", Silent),
    )
    refuse(
        "step 'a' has no output 'even'; it declares odd",
        lambda q, e, n: e.key_by("k").compute("a", Sum(2)).output("even"),
    )
    refuse("'events' has no named outputs", lambda q, e, n: e.output("odd"))
    refuse("input 'left' is .*, expected stream.key_by", lambda q, e, n: q.compute("j", Last, left=e))
    refuse("a stream of another query", lambda q, e, n: ms.Query("r").compute("j", Last, left=e.key_by("k")))
    refuse("give its inputs by name", lambda q, e, n: q.compute("j", Last))
    refuse("union names a stream twice", lambda q, e, n: e.union(e))
    refuse(
        "sink 'o' receives several streams",
        lambda q, e, n: e.key_by("k").compute("a", Sum(2)).union(n).sink("o", ms.Memory()),
    )


def test_a_production_for_an_output_that_is_not_declared_names_the_outputs() -> None:
    class Wrong(Sum):
        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            yield batch.output_to("even", batch.keys, batch.keys)

    class WrongRecord(Last):
        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield ms.to("lefts", at.key)

    for kind, known in ((Wrong(2), "'odd'"), (WrongRecord(), "'rights'")):
        query = ms.Query("wrong")
        query.source("events", None).key_by("k").compute("step", kind)
        with pytest.raises(ms.StepError, match=f"no output '(even|lefts)'; the computation declares {known}"):
            Simulated(query, {"events": PAIRS}).feed(events=[(1, 1)])


def test_a_key_may_have_no_record_in_one_of_several_inputs() -> None:
    found: dict[str, Any] = {}

    class Look(ms.Computation):
        def on_batch(self, batch: ms.Batch) -> None:
            left = batch.input("left")
            found.update(
                keys=batch.keys.to_pylist(),
                sum=left.sum("v").tolist(),
                count=left.count().tolist(),
                min=left.min("v").to_pylist(),
                first=left.first("v").to_pylist(),
                last=left.last("v").to_pylist(),
                rows=left.rows.num_rows,
            )
            with pytest.raises(UserError, match="several inputs: say of which"):
                batch.sum("v")
            with pytest.raises(UserError, match="no input 'middle'; the step has left, right"):
                batch.input("middle")

    query = ms.Query("look")
    a, b = query.source("a", None), query.source("b", None)
    query.compute("look", Look, left=a.key_by("k"), right=b.key_by("k"))
    sim = Simulated(query, {"a": PAIRS, "b": PAIRS}, slots=1)
    sim.feed(a=[(1, 5), (1, 3), (4, 9)], b=[(2, 1), (3, 1), (1, 0)])
    by_key = {key: i for i, key in enumerate(found["keys"])}
    assert sorted(by_key) == [1, 2, 3, 4]
    for name, expected in {
        "sum": {1: 8, 2: 0, 3: 0, 4: 9},
        "count": {1: 2, 2: 0, 3: 0, 4: 1},
        "min": {1: 3, 2: None, 3: None, 4: 9},
        "first": {1: 5, 2: None, 3: None, 4: 9},
        "last": {1: 3, 2: None, 3: None, 4: 9},
    }.items():
        assert {key: found[name][at] for key, at in by_key.items()} == expected, name
    assert found["rows"] == 3


def words() -> Query:
    """A graph with everything in it."""
    query = ms.Query("words")
    lines, more = query.source("lines", None), query.source("more-lines", None)
    pairs = lines.union(more).map_batches("pairs", lambda batch: batch, output=PAIRS)
    sums = pairs.key_by("k").compute("sums", Sum(10))
    odd = sums.output("odd").map_batches("halved", lambda batch: batch, output=PAIRS)
    odd.sink("halves", ms.Memory())
    last = query.compute("last", Last, left=odd.key_by("k"), right=pairs.key_by("k"))
    last.sink("out", ms.Memory())
    return query


def test_explain_prints_the_levels() -> None:
    assert words().explain().splitlines() == [
        "query words: 2 levels, one Spark job per epoch",
        "level 0: route, maps",
        "  source lines",
        "  source more-lines",
        "  map pairs <- lines, more-lines",
        "level 1: host, maps",
        "  step sums (Sum) <- pairs by k",
        "  map halved <- sums.odd",
        "  sink halves (Memory) <- halved",
        "level 2: host",
        "  step last (Last) <- halved by k, pairs by k",
        "  sink out (Memory) <- last",
    ]


def test_the_drawings_have_every_node_and_edge() -> None:
    dot, mermaid = words().to_dot().splitlines(), words().to_mermaid().splitlines()
    assert '  "lines" -> "pairs";' in dot
    assert '  "sums" -> "halved" [label="odd"];' in dot
    assert '  "halved" -> "last" [label="by k"];' in dot
    assert '  "more-lines" [shape=cds];' in dot
    assert "  n_more_dash_lines([more-lines])" in mermaid
    assert "  n_sums -->|odd| n_halved" in mermaid
    assert sum("->" in line for line in dot) == sum("-->" in line for line in mermaid) == 8


def test_maps_run_where_their_streams_are_made_and_keep_the_order() -> None:
    """On sources and on productions, after one another, of united streams; what they return goes to steps and sinks."""
    seen: list[tuple[str, int]] = []

    def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
        seen.append(("doubled", batch.num_rows))
        return pa.record_batch({"v": pc.multiply(batch["v"], 2), "k": batch["k"]})  # columns in any order

    def positive(batch: pa.RecordBatch) -> pa.Table | None:
        kept = batch.filter(pc.greater(batch["v"], 0))
        return pa.Table.from_batches([kept]) if kept.num_rows else None

    query = ms.Query("mapped")
    a, b = query.source("a", None), query.source("b", None)
    both = a.union(b).map_batches("doubled", doubled, output=PAIRS)
    last = query.compute("last", Last, left=both.map_batches("positive", positive, output=PAIRS).key_by("k"))
    renamed = last.map_batches(
        "renamed", lambda batch: batch.rename_columns(["k", "x", "v"]).select(["k", "v"]), output=PAIRS
    )
    renamed.sink("out", ms.Memory())
    renamed.key_by("k").compute("sum", Sum(100))
    sim = Simulated(query, {"a": PAIRS, "b": PAIRS}, slots=2, map_tasks=1)
    sim.feed(a=[(1, 5), (1, -6), (1, 7)], b=[(1, 4), (2, 1)])
    assert seen == [("doubled", 3), ("doubled", 2)]
    assert dict(sim.state("last", "left")) == {1: 8, 2: 2}, "a map of united streams keeps their order"
    assert sorted(sim.delivered["out"][0]) == [(1, -1), (1, -1), (1, -1), (2, -1)]
    assert dict(sim.state("sum")) == {1: -3, 2: -1}


@pytest.mark.parametrize("level", [0, 1])
def test_a_map_that_fails_stops_the_epoch_with_its_name_and_leaves_no_trace(level: int) -> None:
    def bad(batch: pa.RecordBatch) -> Any:
        values = batch["v"].to_pylist()
        if 13 in values:
            raise ValueError("thirteen")
        if 14 in values:
            return batch.select(["k"])
        if 15 in values:
            return pa.record_batch({"k": batch["k"], "v": pa.array(["x"] * len(batch))})
        return values if 16 in values else batch

    query = ms.Query("bad")
    stream = query.source("events", None)
    if level:
        stream = stream.key_by("k").compute("first", Sum(100))
    stream.map_batches("bad", bad, output=PAIRS).key_by("k").compute("sum", Sum(100))
    sim = Simulated(query, {"events": PAIRS}, slots=2)
    for value, match in {
        13: "ValueError: thirteen",
        14: "returned the columns k; the output has k, v",
        15: "output column 'v'",
        16: "returned list; return a pyarrow RecordBatch or Table, or None",
    }.items():
        with pytest.raises(ms.StepError, match=f"step 'bad' failed in epoch 0: .*{match}"):
            sim.feed(events=[(1, value)])
    sim.feed(events=[(1, 1)])
    assert dict(sim.state("sum")) == {1: 1}


def test_maps_that_cannot_be_are_refused() -> None:
    query = ms.Query("q")
    events = query.source("events", None)
    with pytest.raises(UserError, match="map 'm': found 'fn', expected a function"):
        events.map_batches("m", "fn", output=PAIRS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="map 'm': output=''; give the schema"):
        events.map_batches("m", lambda batch: batch, output="")
    with pytest.raises(UserError, match="map 'events': the query 'q' already has a source of that name"):
        events.map_batches("events", lambda batch: batch, output=PAIRS)
    mapped = events.map_batches("m", lambda batch: batch, output=PAIRS)
    mapped.key_by("k").compute("sum", Sum(2))
    mapped.sink("out", ms.Memory())
    with pytest.raises(UserError, match="sink 'out' receives the map of sources 'm'; only what comes out of a step"):
        Simulated(query, {"events": PAIRS})


def test_a_sink_or_a_feedback_of_what_is_partly_straight_from_a_source_is_refused() -> None:
    """The part that no step makes would be missing."""
    query = ms.Query("q")
    again = query.feedback("again", schema="k long")
    events = query.source("events", None)
    made = events.union(again).key_by("k").compute("pass", Passing)
    mixed = made.union(query.source("more", None)).map_batches("mixed", lambda batch: batch, output="k long")
    mixed.sink("out", ms.Memory())
    schemas = {"events": "k long", "more": "k long"}
    made.feed_back(again)
    with pytest.raises(UserError, match="sink 'out' receives the map 'mixed', which reads more than what comes out of"):
        Simulated(query, schemas)
    del query.sinks["out"]
    Simulated(query, schemas)
    query.feedbacks["again"] = replace(query.feedbacks["again"], stream="mixed")
    with pytest.raises(UserError, match="feedback 'again' is written by 'mixed'; only what comes out of a step"):
        Simulated(query, schemas)


class Passing(ms.Computation):
    output = "k long"

    def on_record(self, row: Any, at: ms.At) -> Any:
        yield (at.key,)
