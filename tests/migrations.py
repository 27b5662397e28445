"""Random commands to a simulated query, and what must hold of the tables whatever was commanded (G4, G5, G8)."""

from __future__ import annotations

import random
from collections import Counter

import millstream as ms
from millstream.engine.driver import live_slots
from millstream.errors import UserError
from millstream.protocol import planner
from millstream.protocol.keyspace import clip, width
from millstream.protocol.migration import AT_ONCE, MigrationPlan, Start
from millstream.store.names import maker_of
from millstream.testing import Simulated

STRATEGIES = ("AllAtOnce", "Fluid", "Batched", "Matched", "Paced")
VERBS = ("rescale", "move", "drain", "balance", "split", "merge", "bins")


def random_strategy(rng: random.Random) -> planner.Strategy:
    gap = rng.choice((0, 0, 0, 1, 2))
    kinds = (
        lambda: ms.AllAtOnce(gap=gap),
        lambda: ms.Fluid(gap=gap),
        lambda: ms.Batched(rng.randint(1, 9), gap=gap, merge=rng.random() < 0.3),
        lambda: ms.Matched(gap=gap, merge=rng.random() < 0.3),
        lambda: ms.Paced(rng.choice((1.001, 1.1)), gap=gap),
    )
    return rng.choice(kinds)()


def random_plan(layout: planner.Layout, epoch: int, rng: random.Random, most_slots: int = 6) -> MigrationPlan | None:
    """A plan made from where state lies after an epoch; None if what was thought of cannot be planned."""
    strategy, verb = random_strategy(rng), rng.choice(VERBS)
    steps = rng.choice((None, None, rng.choice(sorted(layout.tables))))
    start = rng.choice((AT_ONCE, AT_ONCE, AT_ONCE, Start(epoch=epoch + rng.randint(1, 3))))
    slots = sorted(layout.owners)
    try:
        match verb:
            case "rescale":
                count = rng.randint(1, most_slots)
                return planner.plan_rescale(layout, count, steps=steps, strategy=strategy, at=start)
            case "move":
                to = rng.choice(sorted(layout.slots))
                bits = min(table.bin_bits for table in layout.tables.values())
                bins = rng.sample(range(1 << bits), min(1 << bits, rng.randint(1, 12)))
                return planner.plan_move(layout, to=to, bins=bins, steps=steps, strategy=strategy, at=start)
            case "drain":
                worker = rng.choice(sorted(layout.placement))
                return planner.plan_drain(layout, worker, steps=steps, strategy=strategy, at=start)
            case "balance":
                return planner.plan_balance(layout, steps=steps, strategy=strategy, at=start)
            case "split":
                return planner.plan_split(layout, rng.choice(slots), 2, steps=steps, strategy=strategy, at=start)
            case "merge":
                one, other = rng.choice(slots), rng.choice(slots)
                return planner.plan_merge(layout, one, other, steps=steps, strategy=strategy, at=start)
            case _:
                return planner.plan_bins(layout, 1 << rng.randint(3, 8), steps=steps, at=start)
    except UserError:
        return None


class Commander:
    """Sends random commands, and watches what becomes of them."""

    def __init__(self, sim: Simulated, rng: random.Random) -> None:
        self.sim, self.rng = sim, rng
        self.sent: dict[int, MigrationPlan] = {}
        self.seen: Counter[str] = Counter()

    def command(self) -> None:
        """Perhaps sends one; perhaps cancels one; perhaps workers come or go."""
        sim, rng = self.sim, self.rng
        if sim.epoch < 0:
            return
        chance = rng.random()
        if chance < 0.45:
            plan = random_plan(sim.layout, sim.epoch, rng)
            if plan is not None and plan.rounds:
                self.send(plan)
        elif chance < 0.55 and self.sent:
            sim.cancel(rng.choice(sorted(self.sent)))
        elif chance < 0.65:
            sim.workers = tuple(str(rng.randint(0, 5)) for _ in range(rng.randint(1, 3)))

    def send(self, plan: MigrationPlan) -> None:
        self.sent[self.sim.apply(plan)] = plan

    def check(self) -> None:
        """What must hold after every epoch."""
        history, tables = self.sim.driver.journal.history, self.sim.driver.tables
        slots = live_slots(tables)
        for segment in history.manifest.segments():
            maker = maker_of(segment.name)
            if segment.order == history.epoch and maker is not None and maker.kind == "a":
                owner = slots[int(segment.name.rsplit("-s", 1)[1].split("-")[0])]
                owned = tables[segment.family.step].ranges[owner]
                assert width(clip(segment.covers, owned)) == width(segment.covers), "written by another slot (G4)"
        for family, pieces in history.manifest.families.items():
            assert all(piece.ranges for piece in pieces.values()), family
        placed = {slot for held in history.workers.values() for slot in held}
        assert placed == set(slots)
        assert set(history.workers) <= set(self.sim.workers)

    def end(self) -> None:
        """What must hold when all is over; counts what has happened."""
        for number, outcome in self.sim.driver.journal.history.outcomes.items():
            self.seen[f"{outcome.verb} {outcome.state}"] += 1
            self.seen[outcome.state] += 1
            if number in self.sent:
                plan = self.sent[number]
                epochs = range(outcome.began, self.sim.epoch, plan.gap + 1)  # those before the last one
                self.seen["mid-stream rounds"] += sum(
                    bool(moves) for moves, _ in zip(plan.rounds[: outcome.done], epochs, strict=False)
                )
                assert outcome.done <= outcome.rounds == len(plan.rounds)
                assert (outcome.state == "done") == (outcome.done == outcome.rounds)
                if outcome.state == "refused":
                    # The plans were right when they were made; a log that could not be read may have been heard later.
                    assert outcome.stale or "which is past" in outcome.reason, outcome.reason
                self.seen[plan.strategy.split("(")[0]] += outcome.done > 0
