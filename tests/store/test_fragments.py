"""State whose ranges change hands all the time: what is merged then, that it reads the same, and that it stays few."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from jobs import EVENTS, two_steps
from millstream.engine.state import parts_of
from millstream.protocol import compaction
from millstream.protocol.compaction import choose
from millstream.protocol.keyspace import Bin, bin_range
from millstream.protocol.manifest import Edit, Family, Manifest
from millstream.protocol.planner import plan_move
from millstream.protocol.routing import RoutingTable, Slot
from millstream.store.keys import KeyColumns, arrange
from millstream.store.lookup import locate
from millstream.store.merge import merge, newest_rows
from millstream.store.names import Maker
from millstream.store.objects import open_store
from millstream.store.rows import StateRows
from millstream.store.segments import SegmentCache, write_segments
from millstream.testing import Simulated

FAMILY = Family("step", "state")
BITS, SLOTS = 6, 4


class Shifting:
    """A state of some keys, each epoch written by whoever owns what then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store, self.cache = open_store("memory://"), SegmentCache()
        self.manifest, self.model = Manifest(), dict[int, int]()
        self.table = RoutingTable.even(SLOTS, BITS)
        self.epoch = 0

    def move(self, bins: int) -> None:
        moves = [
            (bin_range(Bin(number), BITS), Slot(self.rng.randrange(SLOTS)))
            for number in self.rng.sample(range(1 << BITS), bins)
        ]
        self.table = self.table.assign(moves)

    def write(self, keys: int) -> None:
        changes = {self.rng.randrange(300): self.rng.choice([None, self.epoch]) for _ in range(keys)}
        columns = KeyColumns((pa.array(list(changes), pa.int64()),))
        hashes = columns.hashes()
        order, _ = arrange(hashes, columns)
        values = [list(changes.values())[place] for place in order]
        rows = StateRows(
            hashes[order], columns.take(order), pa.array([value or 0 for value in values], pa.int64()),
            np.array([value is None for value in values]),
        )  # fmt: skip
        owners = self.table.lookup(rows.hashes)
        for slot, owned in self.table.ranges.items():
            mine = rows.take(np.flatnonzero(owners == slot))
            if len(mine.hashes):
                maker = Maker(1, self.epoch, "a", 0)
                self.manifest = self.manifest.added(
                    write_segments(self.store, self.cache, FAMILY, maker, int(slot), self.epoch, owned, mine)
                )
        for key, value in changes.items():
            self.model.pop(key, None)
            if value is not None:
                self.model[key] = value
        self.epoch += 1

    def merged(self, budget: int) -> list[Edit]:
        """What all slots merge, by what they own now."""
        edits = []
        for slot, pieces in self.manifest.shares(FAMILY, self.table).items():
            job = choose(FAMILY, pieces, budget)
            if job is not None:
                maker = Maker(1, self.epoch, "c", self.epoch * SLOTS + slot)
                edits.append(merge(self.store, self.cache, job, maker, int(slot)))
        return edits

    def apply(self, edits: list[Edit]) -> int:
        """Those that still fit."""
        fitting = [edit for edit in edits if self.manifest.admits(edit)]
        self.manifest, _ = self.manifest.edited(fitting)
        return len(fitting)

    def check(self) -> None:
        everything: dict[Any, Any] = {}
        everywhere = self.manifest.pieces(FAMILY)
        for number in range(1 << BITS):
            at = bin_range(Bin(number), BITS).first
            orders = [piece.segment.order for piece in everywhere if any(at in part for part in piece.ranges)]
            assert len(set(orders)) == len(orders), "no two pieces of a point have one order"
        for span, pieces in parts_of(everywhere):
            rows = newest_rows(self.store, self.cache, pieces, [span], drop_dead=True)
            everything.update(zip(rows.keys.to_pylist(), rows.values.to_pylist(), strict=True))
        assert everything == self.model
        asked = KeyColumns((pa.array(range(300), pa.int64()),))
        order, _ = arrange(asked.hashes(), asked)
        asked = asked.take(order)
        for slot, pieces in self.manifest.shares(FAMILY, self.table).items():
            mine = asked.take(np.flatnonzero(self.table.lookup(asked.hashes()) == slot))
            found = locate(self.store, self.cache, pieces, mine.hashes(), mine)
            read = dict(zip(mine.to_pylist(), found.arrow(pa.int64()).to_pylist(), strict=True))
            assert read == {key: self.model.get(key) for key in read}


@pytest.mark.parametrize("budget", [2_000, 20_000, 1 << 20])
@pytest.mark.parametrize("number", range(3))
def test_whoever_owns_what_merges_change_no_answer(
    number: int, budget: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_CROWD", 2)
    state = Shifting(seed + number)
    late: list[Edit] = []
    applied = beside = 0
    for _ in range(60):
        state.move(state.rng.choice([0, 1, 8]))
        state.write(state.rng.choice([1, 20]))
        applied += state.apply(late)
        late = state.merged(budget)
        beside += sum(len(edit.inputs) > 8 for edit in late)
        if state.rng.random() < 0.5:
            applied, late = applied + state.apply(late), []
        state.check()
    assert applied > 10, "or else nothing was tried"
    assert beside > 0 or budget < 20_000


def test_however_often_ranges_move_few_pieces_are_left(seed: int) -> None:
    state = Shifting(seed)
    counts = []
    for _ in range(300):
        state.move(2)
        state.write(20)
        state.apply(state.merged(1 << 20))
        counts.append(max(len(pieces) for pieces in state.manifest.shares(FAMILY, state.table).values()))
    state.check()
    assert max(counts) <= 40, "about the size of a crowd, not of the number of moves"


def test_a_fluid_migration_of_many_bins_leaves_few_segments() -> None:
    sim = Simulated(two_steps(), EVENTS, slots=4, bin_bits=8)
    sim.feed(events=[(f"k{n}", n) for n in range(400)])
    rng = random.Random(1)
    for _ in range(4):
        bins = rng.sample(range(256), 48)
        number = sim.apply(plan_move(sim.layout, bins=bins, to=[rng.randrange(4)], strategy=ms.Fluid()))
        for place in range(50):
            sim.feed(events=[(f"k{rng.randrange(400)}", place) for _ in range(20)])
        outcome = sim.outcome(number)
        assert outcome is not None
        assert outcome.state == "done"
    history = sim.driver.journal.history
    for step in sim.driver.graph.steps:
        for state in step.families:
            shares = history.manifest.shares(Family(step.name, state), history.tables[step.name])
            assert max(len(pieces) for pieces in shares.values()) <= 32
