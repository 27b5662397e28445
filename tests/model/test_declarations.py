"""What users declare: refused at once where it is wrong, with the step's name; inherited as Python users expect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.model.computation import declared_states
from millstream.model.graph import resolve
from millstream.model.query import Query
from millstream.model.types import parse_schema
from millstream.testing import Simulated

SCHEMA = {"events": "user string, amount long"}


class Base(ms.Computation):
    total = ms.Value("long", default=0)

    def on_record(self, row: Any, at: ms.At) -> None:
        self.total.set(self.total.get() + row.amount)


def run(computation: Any, events: list[tuple[Any, ...]], **options: Any) -> Simulated:
    query = Query("q")
    stream = query.source("events", None).key_by("user").compute("step", computation)
    if computation.output:
        stream.sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA, **options)
    sim.feed(events=events)
    return sim


def refused(match: str, computation: Any) -> None:
    with pytest.raises(ms.UserError, match=match):
        Query("q").source("events", None).key_by("user").compute("step", computation)


def test_state_without_a_type_is_refused() -> None:
    with pytest.raises(ms.UserError, match="a Value needs a type"):
        ms.Value()
    with pytest.raises(ms.UserError, match="give a Spark DDL type"):
        ms.Value(int)  # type: ignore[arg-type]
    with pytest.raises(ms.UserError, match="lnog"):
        ms.Value("lnog")
    with pytest.raises(ms.UserError, match="expected"):
        ms.Value("long", default="zero")


def test_the_class_of_a_state_instead_of_a_state_is_refused() -> None:
    class Wrong(ms.Computation):
        total = ms.Value  # type: ignore[assignment]

        def on_record(self, row: Any, at: ms.At) -> None: ...

    refused("step 'step': Wrong.total is the class Value itself", Wrong)


def test_a_computation_that_does_nothing_is_refused() -> None:
    class Nothing(ms.Computation):
        pass

    refused("step 'step': Nothing has neither on_record nor on_batch", Nothing)
    refused("step 'step': str is not a Computation", str)
    refused("step 'step': found 7", 7)


def test_a_class_that_needs_arguments_must_be_passed_as_an_instance() -> None:
    class Scaled(Base):
        def __init__(self, factor: int) -> None:
            self.factor = factor

        def on_record(self, row: Any, at: ms.At) -> None:
            self.total.set(self.total.get() + self.factor * row.amount)

    refused("cannot be made without arguments", Scaled)
    assert run(Scaled(10), [("a", 1), ("a", 2)]).state("step") == [("a", 30)]


def test_an_output_that_is_no_schema_is_refused() -> None:
    class Wrong(Base):
        output = "user strnig"

    refused("step 'step'.*strnig", Wrong)


def test_names_are_unique_and_fit_for_paths() -> None:
    query = Query("q")
    stream = query.source("events", None)
    stream.key_by("user").compute("sum", Base)
    with pytest.raises(ms.UserError, match="already has a step of that name"):
        stream.key_by("user").compute("sum", Base)
    with pytest.raises(ms.UserError, match="already has a source of that name"):
        stream.key_by("user").compute("events", Base)
    for name in ("a/b", "", "1x", "..", "ü", 7):
        with pytest.raises(ms.UserError, match="a name is a letter or underscore"):
            stream.key_by("user").compute(name, Base)  # type: ignore[arg-type]


def test_a_stream_without_a_key_says_what_it_lacks() -> None:
    stream = ms.Query("q").source("events", None)
    with pytest.raises(
        AttributeError, match=r"a stream has no 'compute': key it first, as stream.key_by\(...\).compute"
    ):
        stream.compute("sum", Base)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="a stream has no 'computed'$"):
        _ = stream.computed  # type: ignore[attr-defined]


def test_what_leads_nowhere_is_refused() -> None:
    schemas = {"events": parse_schema(SCHEMA["events"])}
    query = Query("q")
    with pytest.raises(ms.UserError, match="has no source"):
        resolve(query, {})
    stream = query.source("events", None)
    with pytest.raises(ms.UserError, match="has no step"):
        resolve(query, schemas)
    with pytest.raises(ms.UserError, match="at least one column"):
        stream.key_by()
    with pytest.raises(ms.UserError, match="names a column twice"):
        stream.key_by("user", "user")
    out = stream.key_by("user").compute("sum", Base)
    out.sink("out", ms.Memory())
    with pytest.raises(ms.UserError, match="sink 'out' receives step 'sum', which declares no output"):
        resolve(query, schemas)
    query = Query("q")
    query.source("events", None).sink("raw", ms.Memory()).key_by("user").compute("sum", Base)
    with pytest.raises(ms.UserError, match="only what comes out of a step can be sunk"):
        resolve(query, schemas)
    with pytest.raises(ms.UserError, match="expected Parquet"):
        stream.sink("bad", "file.parquet")  # type: ignore[arg-type]


def test_state_is_inherited_and_overridden_as_python_users_expect() -> None:
    class Derived(Base):
        total = ms.Value("double", default=0.5)
        extra = ms.Value("string")

    assert {name: s.type_text for name, s in declared_states(Derived).items()} == {"total": "DOUBLE", "extra": "STRING"}
    assert declared_states(Base)["total"].type_text == "BIGINT"

    class Hidden(Base):
        total = 7  # type: ignore[assignment]

    refused("Hidden.total hides the state 'total'", Hidden)


def test_a_state_or_timer_cannot_take_a_name_that_computations_use_themselves() -> None:
    class Said(Base):
        output = ms.Value("long")  # type: ignore[assignment]

    refused("Said.output is a state, but 'output' means something else", Said)


def test_a_state_or_timer_may_be_called_setup_or_close() -> None:
    class Shut(ms.Computation):
        setup = ms.Value("long", default=0)  # type: ignore[assignment]
        close = ms.Timer(ms.WALL_TIME)  # type: ignore[assignment]
        output = "key string, n long"

        def on_record(self, row: Any, at: ms.At) -> None:
            self.setup.set(self.setup.get() + 1)
            self.close.set(timedelta(seconds=1))

        @close.fires
        def report(self, at: ms.At) -> Any:
            yield at.key, self.setup.get()

    query = ms.Query("shut")
    query.source("s", frame=None).key_by("key").compute("step", Shut).sink("out", ms.Memory())
    sim = Simulated(query, {"s": "key string"})
    sim.feed(s=[("a",), ("a",)])
    sim.advance_clock("1 minute")
    assert sim.outputs("out") == [("a", 2)]


def test_assigning_to_a_state_is_refused_where_it_happens() -> None:
    class Assigning(Base):
        def on_record(self, row: Any, at: ms.At) -> None:
            self.total = self.total.get() + row.amount  # type: ignore[assignment]

    query = ms.Query("q")
    query.source("events", None).key_by("user").compute("sum", Assigning)
    with pytest.raises(ms.StepError, match="self.total = 5: 'total' is a state; change it with its methods"):
        Simulated(query, {"events": "user string, amount long"}).feed(events=[("a", 5)])


def test_setup_and_close_surround_every_attempt_also_a_failed_one() -> None:
    calls: list[str] = []

    class Noisy(Base):
        def setup(self) -> None:
            calls.append("setup")

        def close(self) -> None:
            calls.append("close")

        def on_record(self, row: Any, at: ms.At) -> None:
            if row.amount == 13:
                raise ValueError("unlucky")

    run(Noisy(), [("a", 1)], slots=1)
    assert calls == ["setup", "close"]
    with pytest.raises(ms.StepError, match="unlucky"):
        run(Noisy(), [("a", 13)], slots=1)
    assert calls == ["setup", "close"] * 2


def test_nothing_but_declared_state_survives_an_epoch() -> None:
    class Sticky(Base):
        count = 0

        def on_record(self, row: Any, at: ms.At) -> None:
            self.count += 1
            self.total.set(self.count)

    sim = run(Sticky(), [("a", 1), ("a", 1)], slots=1)
    sim.feed(events=[("a", 1)])
    assert sim.state("step") == [("a", 1)]


def test_a_default_is_not_shared_between_keys() -> None:
    class Gather(ms.Computation):
        items = ms.Value(object, default=[])

        def on_record(self, row: Any, at: ms.At) -> None:
            items = self.items.get()
            items.append(row.amount)
            self.items.set(items)

    assert sorted(run(Gather, [("a", 1), ("b", 2), ("a", 3)], slots=1).state("step")) == [("a", [1, 3]), ("b", [2])]


def test_deleting_a_value_gives_the_default_back() -> None:
    class Toggle(Base):
        output = "user string, before long, there boolean"

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield at.key, self.total.get(), self.total.exists()
            if row.amount:
                self.total.set(row.amount)
            else:
                self.total.delete()

    sim = run(Toggle, [("a", 5), ("a", 0), ("a", 7)])
    sim.feed(events=[("a", 0)])
    sim.feed(events=[("a", 1)])
    assert sim.outputs("out") == [
        ("a", 0, False),
        ("a", 5, True),
        ("a", 0, False),
        ("a", 7, True),
        ("a", 0, False),
    ]


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (lambda at: [(at.key,)], "1 values found, 2 expected"),
        (lambda at: [(at.key, "one")], "output column 'n'.*'one'"),
        (lambda at: [at.key], "yield tuples or dicts"),
        (lambda at: [{"user": at.key}], "the output's columns are user, n"),
        (lambda at: 5, "on_record, or a callback, returned something of type int; yield productions"),
    ],
)
def test_productions_of_the_wrong_shape_name_the_step(bad: Any, match: str) -> None:
    class Wrong(ms.Computation):
        output = "user string, n long"

        def on_record(self, row: Any, at: ms.At) -> Any:
            return bad(at)

    with pytest.raises(ms.StepError, match=rf"(?s)step 'step' failed.*{match}"):
        run(Wrong(), [("a", 1)])


def test_state_of_the_wrong_type_names_step_state_and_key() -> None:
    class Wrong(Base):
        def on_record(self, row: Any, at: ms.At) -> None:
            self.total.set("many" if at.key == "bert" else 1)

    with pytest.raises(ms.StepError, match="(?s)step 'step' failed.*state 'total'.*'many'") as caught:
        run(Wrong(), [("anna", 1), ("bert", 1), ("carl", 1)])
    assert caught.value.key == "'bert'"


def test_state_that_cannot_be_pickled_names_the_key() -> None:
    class Wrong(ms.Computation):
        thing = ms.Value(object)

        def on_record(self, row: Any, at: ms.At) -> None:
            self.thing.set(lambda: 1)

    with pytest.raises(ms.StepError, match="(?s)state 'thing'.*pickle") as caught:
        run(Wrong, [("anna", 1)])
    assert caught.value.key == "'anna'"


def test_state_used_outside_a_running_step_says_so() -> None:
    with pytest.raises(ms.UserError, match="outside on_record / on_batch"):
        Base().total.get()


class Vectorised(ms.Computation):
    number = ms.Value("long", default=0)
    text = ms.Value("string")
    thing = ms.Value(object)
    flag = ms.Value("boolean", default=False)
    output = "user string, number long, low long, high long, first long, last long"

    def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
        assert isinstance(self.number.read(batch), np.ndarray)
        assert isinstance(self.flag.read(batch), np.ndarray)
        assert isinstance(self.text.read(batch), pa.Array)
        assert self.thing.read(batch).dtype == object
        assert len(batch) == len(batch.keys)
        self.number.write(batch, self.number.read(batch) + batch.sum("amount"))
        self.text.write(batch, [f"{n}" for n in self.number.read(batch)])
        self.thing.write(batch, [{n} for n in batch.count()])
        self.flag.write(batch, ~self.flag.read(batch), where=batch.count() > 1)
        yield batch.output(
            batch.keys, self.number.read(batch), batch.min("amount"), batch.max("amount"),
            batch.first("amount"), batch.last("amount"),
        )  # fmt: skip


def test_on_batch_reads_writes_and_aggregates_by_key() -> None:
    sim = run(Vectorised(), [("a", 3), ("b", 1), ("a", -4), (None, 2), ("a", 5)], slots=2, map_tasks=1)
    sim.feed(events=[("a", 1), ("b", None), ("b", 2)])
    assert sorted(sim.state("step", "number"), key=str) == [("a", 5), ("b", 3), (None, 2)]
    assert dict(sim.state("step", "text")) == {"a": "5", "b": "3", None: "2"}
    assert dict(sim.state("step", "thing")) == {"a": {1}, "b": {2}, None: {1}}
    assert dict(sim.state("step", "flag")) == {"a": True, "b": True}
    first = {row[0]: row[1:] for row in sim.delivered["out"][0]}
    assert first == {"a": (4, -4, 5, 3, 5), "b": (1, 1, 1, 1, 1), None: (2, 2, 2, 2, 2)}
    second = {row[0]: row[1:] for row in sim.delivered["out"][1]}
    assert second["b"] == (3, 2, 2, None, 2)


def test_on_batch_with_a_tuple_key_gives_its_columns() -> None:
    class Pairs(ms.Computation):
        n = ms.Value("long", default=0)
        output = "user string, amount long, n long"

        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            assert pa.types.is_struct(batch.keys.type)
            n = self.n.read(batch) + batch.count()
            self.n.write(batch, n)
            yield batch.output(*batch.key_columns, n)

    query = Query("q")
    query.source("events", None).key_by("user", "amount").compute("pairs", Pairs).sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA)
    sim.feed(events=[("a", 1), ("a", 2), ("a", 1), (None, None)])
    assert sorted(sim.state("pairs"), key=str) == [("a", 1, 2), ("a", 2, 1), (None, None, 1)]


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (lambda self, b: self.number.write(b, [1, 2, 3]), "3 values found, 1 expected"),
        (lambda self, b: self.number.write(b, [None]), "cannot hold null"),
        (lambda self, b: [b.output(b.keys)], "1 output columns found, 6 expected"),
        (lambda self, b: [b.output(user=b.keys, nmber=[1])], "unknown \\['nmber'\\], missing"),
        (lambda self, b: [b.output(b.keys, [1, 2], [1], [1], [1], [1])], "different lengths"),
        (lambda self, b: b.sum("user"), "sum needs a column of integers or floats"),
        (lambda self, b: b.sum("nothing"), "no column 'nothing'; the input has user, amount"),
        (lambda self, b: [1], "on_batch, or a callback, yielded 1"),
    ],
)
def test_wrong_use_of_a_batch_names_the_step(use: Any, match: str) -> None:
    class Wrong(Vectorised):
        def on_batch(self, batch: ms.Batch) -> Any:
            return use(self, batch)

    with pytest.raises(ms.StepError, match=rf"(?s)step 'step' failed.*{match}"):
        run(Wrong(), [("a", 1)])


def test_mutating_what_was_read_or_written_changes_nothing_wherever_epochs_end() -> None:
    class Gather(ms.Computation):
        items = ms.Value("array<long>", default=[])
        things = ms.Value(object, default=deque())

        def on_record(self, row: Any, at: ms.At) -> None:
            kept = [*self.items.get(), row.amount]
            self.items.set(kept)
            kept.append(99)  # after set: not stored
            self.items.get().append(98)  # what get() returned: not stored
            things = self.things.get()
            things.append(row.amount)
            self.things.set(things)
            things.append(97)
            self.things.get().clear()

    events = [("a", 1), ("b", 5), ("a", 2), ("a", 3)]
    one = run(Gather, events, slots=1)
    many = run(Gather, events[:1], slots=1)
    for event in events[1:]:
        many.feed(events=[event])
    for sim in (one, many):
        assert dict(sim.state("step", "items")) == {"a": [1, 2, 3], "b": [5]}
        assert dict(sim.state("step", "things")) == {"a": deque([1, 2, 3]), "b": deque([5])}


def test_a_null_in_a_column_that_is_not_null_is_refused_before_the_commit() -> None:
    class Wrong(ms.Computation):
        output = "user string NOT NULL, n long"

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            yield at.key, 1

    with pytest.raises(ms.StepError, match="output column 'user' is NOT NULL, but 1 of its values are null"):
        run(Wrong, [(None, 1)])


def test_a_raise_in_setup_or_close_is_a_failure_of_the_step() -> None:
    class BadClose(Base):
        def close(self) -> None:
            raise OSError("cannot close")

    class BadSetup(Base):
        def setup(self) -> None:
            raise OSError("cannot open")

    with pytest.raises(ms.StepError, match="step 'step' failed in epoch 0: OSError: cannot close"):
        run(BadClose, [("a", 1)])
    with pytest.raises(ms.StepError, match="step 'step' failed in epoch 0: OSError: cannot open"):
        run(BadSetup, [("a", 1)])


def test_a_restart_may_change_a_default_but_not_add_one_or_swap_sources() -> None:
    def build(default: int | None, swapped: bool = False) -> Query:
        class Sum(ms.Computation):
            total = ms.Value("long", default=default)

            def on_record(self, row: Any, at: ms.At) -> None:
                self.total.set((self.total.get() or 0) + 1)

        query = Query("q")
        for name in ("b", "a") if swapped else ("a", "b"):
            query.source(name, None).key_by("user").compute(f"sum_{name}", Sum)
        return query

    schemas = {"a": SCHEMA["events"], "b": SCHEMA["events"]}
    sim = Simulated(build(0), schemas)
    sim.feed(a=[("x", 1)], b=[])
    Simulated(build(5), schemas, sim.store)
    with pytest.raises(ms.UserError, match=r"state.total: was 'BIGINT NOT NULL', now 'BIGINT'"):
        Simulated(build(None), schemas, sim.store)
    with pytest.raises(ms.UserError, match=r"sources.a.place: was 0, now 1"):
        Simulated(build(0, swapped=True), schemas, sim.store)


def test_arrays_that_were_written_or_produced_may_be_changed_afterwards() -> None:
    class Reuses(ms.Computation):
        number = ms.Value("long", default=0)
        maybe = ms.Value("long")
        things = ms.Value(object, default=[])
        output = "n long"

        def on_batch(self, batch: ms.Batch) -> Iterable[Any]:
            numbers = np.full(len(batch), 1)
            lists = [[1] for _ in range(len(batch))]
            self.number.write(batch, numbers)
            self.maybe.write(batch, numbers)
            self.things.write(batch, lists)
            yield batch.output(numbers)
            numbers *= 100
            lists[0].append(99)
            self.things.read(batch)[0].append(98)

    sim = run(Reuses, [("a", 1)])
    assert sim.state("step", "number") == sim.state("step", "maybe") == [("a", 1)]
    assert sim.state("step", "things") == [("a", [1])]
    assert sim.outputs("out") == [(1,)]


def test_a_production_that_does_not_fit_names_the_key_that_yielded_it() -> None:
    class Wrong(ms.Computation):
        output = "user string, n long"

        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            if at.key == "bert":
                yield 5
            yield {"user": at.key, "n": 1}

    with pytest.raises(ms.StepError, match="on_record, or a callback, yielded 5") as caught:
        run(Wrong, [("anna", 1), ("bert", 1), ("carl", 1)], slots=1)
    assert caught.value.key == "'bert'"


def test_an_exit_in_user_code_is_a_failure_of_the_step() -> None:
    class Exits(Base):
        def on_record(self, row: Any, at: ms.At) -> None:
            raise SystemExit(3)

    with pytest.raises(ms.StepError, match="SystemExit"):
        run(Exits, [("a", 1)])
