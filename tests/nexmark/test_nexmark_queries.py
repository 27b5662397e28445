"""NEXMark's queries on the simulator, against plain Python: the results do not depend on where epochs are cut."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import millstream as ms
from migrations import Commander
from millstream.model.types import parse_schema
from millstream.nexmark import QUERIES, NexmarkQuery, Parameters, epochs
from millstream.protocol.planner import plan_rescale
from millstream.testing import CRASH, Simulated

EVENTS = {query.name: 2500 if "bids" in query.reads else 10_000 for query in QUERIES.values()} | {
    "q2": 10_000,
    "nbqx": 1200,
}
"""How many events a query gets: more, if it finds or reads little, and fewer, if it does much with them."""
SPANS = {"q5": 3 * 3600, "q8": 72 * 3600, "nbq5": 200, "nbq8": 72 * 3600, "nbqx": 72 * 3600}
"""How many seconds of event time the events of a query last for, so that several of its windows close."""
LEFT = {"q3": {"lefts", "rights"}, "q4": {"total", "count"}, "q6": {"prices"}}
"""What may be kept when time is over: all else is forgotten."""


def parameters(query: NexmarkQuery, seed: int, disordered: bool) -> Parameters:
    span = SPANS.get(query.name, 600)
    disorder = {"group": 70, "delayed": 10, "delay_us": span * 20_000} if disordered else {}
    count = EVENTS[query.name]
    return Parameters(events=count, events_per_second=count, dilation=span, seed=seed, **disorder)


def run(query: NexmarkQuery, given: Parameters, cuts: list[int], **options: Any) -> Simulated:
    sim = Simulated(query.build(), query.schemas, **options)
    for records in epochs(given, query.reads, cuts):
        sim.feed(**records)
    return sim


@pytest.mark.parametrize("disordered", [False, True], ids=["in order", "disordered"])
@pytest.mark.parametrize("query", QUERIES.values(), ids=lambda query: query.name)
def test_a_query_gives_what_plain_python_gives_wherever_epochs_are_cut(
    query: NexmarkQuery, disordered: bool, rng: random.Random
) -> None:
    for seed, epochs_count in ((0, 1), (1, 4), (2, 10)):
        given = parameters(query, seed, disordered)
        expected = Counter(query.expected(given))
        assert len(expected) >= 5, "nothing is shown"
        cuts = sorted(rng.sample(range(1, EVENTS[query.name]), epochs_count - 1))
        sim = run(query, given, cuts, slots=rng.choice([1, 3]), map_tasks=rng.choice([1, 2, 3]))
        assert Counter(sim.outputs("out")) == expected
        assert all(sim.late(step.name) == 0 for step in sim.graph.steps)
        kept = {name for step in sim.graph.steps for name in step.states if sim.state(step.name, name)}
        assert kept == LEFT.get(query.name, set()), "what is over is forgotten"


@pytest.mark.parametrize("query", [QUERIES[name] for name in ("q4", "q8", "nbqx")], ids=lambda query: query.name)
def test_a_query_goes_on_after_a_crash(query: NexmarkQuery) -> None:
    given = parameters(query, 5, True)
    sim = Simulated(query.build(), query.schemas, slots=2)
    for number, records in enumerate(epochs(given, query.reads, [600, 1200, 1800])):
        last = list(records)[-1]
        if number in (1, 3):
            records[last] = [*records[last][:50], CRASH, *records[last][50:]]
        sim.feed(**records)
    assert Counter(sim.outputs("out")) == Counter(query.expected(given))


@pytest.mark.parametrize("query", [each for each in QUERIES.values() if each.is_stateful], ids=lambda each: each.name)
def test_a_query_gives_the_same_while_its_state_moves(query: NexmarkQuery, seed: int) -> None:
    given, rng = parameters(query, 7, True), random.Random(f"{seed} {query.name}")
    sim = Simulated(query.build(), query.schemas, slots=2, bin_bits=6)
    commander = Commander(sim, rng)
    for records in epochs(given, query.reads, sorted(rng.sample(range(1, EVENTS[query.name]), 11))):
        commander.command()
        if sim.epoch == 4:
            plan = plan_rescale(sim.layout, 4, strategy=ms.Batched(9, merge=False))
            commander.send(plan)  # so that something moves for any seed
        sim.feed(**records)
        commander.check()
    commander.end()
    assert commander.seen["mid-stream rounds"] > 0, "nothing has moved"
    assert Counter(sim.outputs("out")) == Counter(query.expected(given))


@pytest.mark.parametrize("query", QUERIES.values(), ids=lambda query: query.name)
def test_the_catalogue_says_what_a_query_is(query: NexmarkQuery) -> None:
    sim = Simulated(query.build(), query.schemas)
    [sink] = sim.graph.sinks
    assert sink.name == "out"
    columns = [column.split()[0] for column in query.output.split(", ")]
    given = parameters(query, 0, False)
    assert all(len(row) == len(columns) for row in query.expected(given))
    assert any(step.states for step in sim.graph.steps) == query.is_stateful
    assert set(query.reads) == {source.name for source in sim.graph.sources}


def test_the_productions_of_a_query_have_the_columns_of_the_catalogue() -> None:
    for query in QUERIES.values():
        sink = ms.Memory()
        built = query.build(sink=sink)
        assert built.sinks["out"].sink is sink
        sim = Simulated(built, query.schemas)
        schema = sim.graph.schema_of(sim.graph.sinks[0].input)
        assert schema.equals(parse_schema(query.output))


def test_sessions_of_different_gaps_find_different_pairs() -> None:
    query = QUERIES["nbqx"]
    parts = Counter(row[0] for row in query.expected(parameters(query, 0, False)))
    assert len(parts) == 5
    assert len(set(parts.values())) == 5
