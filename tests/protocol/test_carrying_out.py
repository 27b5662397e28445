"""Steering carries plans out, with gaps and starts, to the tables that they say; or it refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hypothesis import assume, given
from hypothesis import strategies as st

from millstream import AllAtOnce, Batched, Fluid, Matched
from millstream.protocol.keyspace import Bin, bin_range
from millstream.protocol.layout import Layout
from millstream.protocol.migration import MigrationPlan, Start
from millstream.protocol.planner import plan_bins, plan_drain, plan_move, plan_rescale, plan_split
from millstream.protocol.routing import RoutingTable, Slot
from millstream.protocol.steering import Cancel, Facts, Heard, Outcome, remembered, steer

BITS = 4
SECOND = 1000
STRATEGIES = st.one_of(
    st.builds(AllAtOnce, gap=st.integers(0, 3)),
    st.builds(Fluid, gap=st.integers(0, 3)),
    st.builds(Batched, st.integers(1, 5), gap=st.integers(0, 3)),
    st.builds(Matched, gap=st.integers(0, 3)),
)
STARTS = st.one_of(
    st.just(Start()),
    st.builds(Start, epoch=st.integers(0, 6)),
    st.builds(Start, clock_ms=st.integers(0, 6).map(lambda n: n * SECOND)),
    st.builds(Start, event_time=st.integers(1, 6)),
)


@st.composite
def starting_points(draw: st.DrawFn) -> Layout:
    """Two steps whose tables have seen some moves."""
    tables = {step: RoutingTable.even(draw(st.integers(1, 4)), BITS) for step in ("a", "b")}
    for step, number, slot in draw(
        st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 15), st.integers(0, 4)), max_size=6)
    ):
        tables[step] = tables[step].assign([(bin_range(Bin(number), BITS), Slot(slot))])
    return Layout("mine", tables, placement={"x": [0, 1], "y": [2, 3, 4]})


@st.composite
def plans(draw: st.DrawFn, layout: Layout) -> MigrationPlan:
    strategy, start = draw(STRATEGIES), draw(STARTS)
    steps = draw(st.sampled_from([None, "a", ["a", "b"]]))
    verb = draw(st.sampled_from(["rescale", "move", "split", "drain", "bins"]))
    if verb == "rescale":
        plan = plan_rescale(layout, draw(st.integers(1, 6)), steps=steps, strategy=strategy, at=start)
    elif verb == "move":
        slot = draw(st.sampled_from(sorted(layout.tables["a"].slots)))
        target = draw(st.sampled_from(sorted(layout.slots)))
        assume(slot != target)
        share = draw(st.sampled_from([0.1, 0.5, 1.0]))
        plan = plan_move(layout, slots=slot, share=share, to=target, steps="a", strategy=strategy, at=start)
    elif verb == "split":
        slot = layout.tables["a"].slots[0]
        assume(all(bins_of(table, slot) != 1 for table in layout.tables.values()))
        plan = plan_split(layout, slot, strategy=strategy, at=start)
    elif verb == "drain":
        assume(not layout.owners <= {0, 1})
        plan = plan_drain(layout, "x", steps=steps, strategy=strategy, at=start)
    else:
        plan = plan_bins(layout, 1 << draw(st.integers(3, 8)), steps=steps, at=start)
    assume(plan.rounds)
    return plan


def bins_of(table: RoutingTable, slot: int) -> int:
    return sum(table.slot_of(bin_range(Bin(number), BITS).first) == slot for number in range(1 << BITS))


def applied(
    plan: MigrationPlan, tables: Mapping[str, RoutingTable], rounds: int | None = None
) -> dict[str, RoutingTable]:
    found = dict(tables)
    for number in range(len(plan.rounds) if rounds is None else rounds):
        found.update(plan.after(found, number))
    return found


@dataclass
class Query:
    """A query as far as steering sees it: one epoch after the other, a second and a microsecond of event time each."""

    tables: dict[str, RoutingTable]
    epoch: int = 0
    control: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    plans: dict[int, MigrationPlan] = field(default_factory=dict)
    changed: list[int] = field(default_factory=list)
    """The epochs that began with other tables."""

    def run(self, *asks: MigrationPlan | Cancel) -> None:
        facts = Facts(
            store="mine",
            generation=0,
            epoch=self.epoch,
            clock_ms=self.epoch * SECOND,
            tables=self.tables,
            watermarks={"a": self.epoch, "b": self.epoch + 3},
            control=self.control,
            outcomes=self.outcomes,
            plans=self.plans,
        )
        heard = [Heard(self.control + place, "plan", ask) for place, ask in enumerate(asks)]
        steering = steer(facts, heard)
        again = steer(facts, heard)
        assert again == steering, "another attempt decides the same"
        self.plans |= {one.number: one.ask for one in heard if isinstance(one.ask, MigrationPlan)}
        if steering.tables != self.tables:
            self.changed.append(self.epoch)
        self.tables, self.control = steering.tables, steering.control
        self.outcomes = remembered(self.outcomes, steering.outcomes)
        self.epoch += 1


def first_epoch(plan: MigrationPlan) -> int:
    """When it is due in a `Query`: whatever measures the time, it is as much as the epoch."""
    start = plan.start
    if start.epoch is not None:
        return start.epoch
    if start.clock_ms is not None:
        return start.clock_ms // SECOND
    if start.event_time is not None:
        return start.event_time if "a" in plan.versions else start.event_time - 3
    return 0


@given(st.data(), starting_points())
def test_steering_reaches_the_tables_that_the_plan_says(data: st.DataObject, layout: Layout) -> None:
    plan = data.draw(plans(layout))
    assume(plan.start.event_time is None or "a" in plan.versions)
    query = Query(dict(layout.tables))
    query.run(plan)
    for _ in range(100):
        if query.outcomes[0].over:
            break
        query.run()
    outcome = query.outcomes[0]
    assert (outcome.state, outcome.done) == ("done", len(plan.rounds)), outcome
    assert query.tables == applied(plan, layout.tables)
    began = first_epoch(plan)
    assert (outcome.began, outcome.last) == (began, began + plan.epochs - 1)
    expected = [began + number * (plan.gap + 1) for number, moves in enumerate(plan.rounds) if moves or plan.bin_bits]
    assert query.changed == expected


@given(st.data(), starting_points(), st.integers(0, 12))
def test_a_cancel_leaves_the_tables_of_the_rounds_that_are_done(data: st.DataObject, layout: Layout, when: int) -> None:
    plan = data.draw(plans(layout))
    assume(plan.start.event_time is None or "a" in plan.versions)
    query = Query(dict(layout.tables))
    query.run(plan)
    for _ in range(when):
        query.run()
    over, tables = query.outcomes[0].over, query.tables
    query.run(Cancel(0))
    assert query.outcomes[1].state == ("refused" if over else "done")
    assert query.outcomes[0].state == ("done" if over else "cancelled")
    assert query.tables == tables == applied(plan, layout.tables, query.outcomes[0].done)
    for _ in range(8):
        query.run()
    assert query.tables == tables, "and nothing comes after it"


@given(st.data(), starting_points())
def test_of_two_plans_for_one_table_the_second_is_refused(data: st.DataObject, layout: Layout) -> None:
    first = replace(data.draw(plans(layout)), start=Start())
    second = replace(data.draw(plans(layout)), start=Start(epoch=data.draw(st.integers(0, 30))))
    shared = {move.step for moves in first.rounds for move in moves} & set(second.versions)
    assume(shared)
    query = Query(dict(layout.tables))
    query.run(first, second)
    while not all(outcome.over for outcome in query.outcomes.values()):
        query.run()
    assert [query.outcomes[number].state for number in (0, 1)] == ["done", "refused"]
    assert query.outcomes[1].stale
    assert query.tables == applied(first, layout.tables)
    reason = query.outcomes[1].reason
    if "stale" in reason:
        expected, found = layout.tables, query.tables
        named = next(step for step in second.versions if f"step '{step}'" in reason)
        assert f"made for routing version {expected[named].version} of step '{named}', found" in reason
        assert expected[named].version < found[named].version
    else:
        assert "is moving ranges of step" in reason
