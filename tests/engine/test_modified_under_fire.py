"""Random modifications, migrations, cancels, crashes, store faults and restarts, against a sequential oracle of the
graph that was active in each epoch (G1-G8).

`MILLSTREAM_SEED` is the first seed, `MILLSTREAM_MODIFIED` how many queries are tried. A failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from migrations import Commander
from millstream.engine.driver import MOMENTS
from millstream.errors import StoreUnavailable
from millstream.protocol.modification import LIFE, undoing
from millstream.store.objects import open_store
from millstream.testing import CRASH, Crash, FaultyStore, Simulated
from modifications import (
    BAD,
    VERBS,
    Bomb,
    Editor,
    Effect,
    ModifiedOracle,
    by_key,
    first_shape,
    inverse,
    query_of,
    states_of,
)
from random_queries import DAY, FAR, ROW, Weather, compare, compare_letters, micros

LIVES = int(os.environ.get("MILLSTREAM_MODIFIED", "50"))
FAULTS = ("refuse", "lose", "crash", "crash_after")


class Life:
    """One random query, modified again and again."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.first = shape = first_shape(rng)
        self.store = FaultyStore(open_store("memory://"))
        self.background = rng.random() < 0.1
        self.sim = Simulated(
            query_of(shape),
            {source.name: ROW for source in shape.sources},
            self.store,
            map_tasks=rng.randint(1, 3),
            now=DAY,
            slots=rng.randint(1, 3),
            bin_bits=rng.randint(2, 4),
            retain=rng.randint(1, 3),
            compaction_budget=1 << 20,
            background=self.background,
        )
        self.shape = shape
        self.oracle, self.weather = ModifiedOracle(shape, DAY), Weather(rng)
        self.commander = Commander(self.sim, rng)
        self.under_way: dict[int, tuple[Effect | None, list[str]]] = {}
        self.undone: dict[int, Effect | None] = {}
        self.queries: list[Any] = []
        self.named, self.used = 0, set[str]()
        self.had = {step.name for step in shape.steps}
        self.letters: Counter[str] = Counter()
        self.last: dict[int, str] = {}
        self.seen: Counter[str] = Counter()

    def run(self, epochs: int) -> None:
        for number in range(epochs):
            if number:
                self.modify()
            self.commander.command()
            chance = self.rng.random()
            if chance < 0.1:
                self.restart()
            timed = [source.name for source in self.shape.sources if source.timed]
            if chance < 0.8:
                self.sim.now += timedelta(seconds=self.rng.choice((0, 0, 1, 30)))
                self.feed()
            elif chance < 0.9 or not timed:
                self.clock(self.rng.choice((1, 16, 45, 70)))
            else:
                self.watermark(self.rng.choice(timed), self.weather.moment(self.rng.randrange(-20, 20)))
        for _ in range(20):
            if not self.queries:
                self.modify()
                self.feed()
        assert self.queries, "a life without a modification shows nothing"
        for source in [source.name for source in self.shape.sources if source.timed]:
            self.watermark(source, FAR + timedelta(days=1))
        self.clock(100)
        self.compare_states()
        self.end()

    # -- modifications

    def modify(self) -> None:
        """Perhaps asks for a modification, or for one to be undone; perhaps cancels one."""
        chance = self.rng.random()
        if chance < 0.1 and self.under_way:
            self.sim.cancel(self.rng.choice(sorted(self.under_way)))
        elif chance < 0.25 and self.undone:
            self.revert(max(self.undone))
        elif chance < 0.8:
            editor = Editor(self.sim.modify(), self.shape, self.rng, self.named, self.used)
            for _ in range(self.rng.choice((1, 1, 2, 3))):
                if not any(editor.apply(self.rng.choice(VERBS)) for _ in range(20)):
                    break
            effect: Effect | None = editor.effect
            if self.rng.random() < 0.15:
                editor.bad(self.rng.choice(BAD))
                effect = None if set(editor.done) & {"uncopied", "forgets"} else editor.effect
            self.named, self.used = editor.number, {name for name in editor.used if not name.startswith(("f", "bad"))}
            if editor.done:
                number = self.sim.send(editor.change, rehearse=self.rng.random() < 0.5)
                self.under_way[number] = effect, editor.done

    def revert(self, number: int) -> None:
        effect = self.undone[number]
        if undoing(self.sim.driver.journal.history.modified, number)[1]:
            assert effect is None, "only what was converted cannot be undone"
            return
        asked = self.sim.revert(number)
        assert effect is not None, "what was converted cannot be undone"
        self.under_way[asked] = effect, ["revert"]

    def committed(self) -> None:
        """Has a modification been committed by this epoch? Then the oracle goes on with it."""
        history = self.sim.driver.journal.history
        if len(history.modified) == len(self.queries):
            return
        assert len(history.modified) == len(self.queries) + 1, "two in one epoch"
        applied = history.modified[-1]
        assert applied.epoch == self.sim.epoch
        effect, verbs = self.under_way[applied.number]
        assert effect is not None, f"{verbs} was committed"
        self.undone = {**self.undone, applied.number: inverse(self.shape, effect)}
        self.letters = Counter(
            {name: self.letters[taken.step] for name, taken in effect.taken.items() if self.letters[taken.step]}
        )
        self.shape = effect.shape
        Bomb.burning.difference_update(step.name for step in effect.shape.steps)
        self.oracle.modify(effect)
        self.queries.append(self.sim.driver.modifier.version.query)
        self.seen.update(f"{verb} committed" for verb in verbs)
        self.seen["modified"] += 1
        self.seen["several at once"] += len(verbs) > 1
        self.seen["a name again"] += any(
            name in self.had and (name not in effect.taken or effect.taken[name].step != name)
            for name in (step.name for step in effect.shape.steps)
        )
        self.had |= {step.name for step in effect.shape.steps}

    def answers(self) -> None:
        """Every command is answered once: a modification goes through its life, and never back."""
        outcomes = self.sim.driver.journal.history.outcomes
        committed = {applied.number for applied in self.sim.driver.journal.history.modified}
        for number in list(self.under_way):
            outcome = outcomes.get(number)
            if outcome is None:
                continue
            before = self.last.get(number, "proposed")
            assert outcome.state in reachable(before), (before, outcome)
            self.last[number] = outcome.state
            assert (outcome.state == "committed") == (number in committed), outcome
            if outcome.over:
                verbs = self.under_way.pop(number)[1]
                self.seen[outcome.state] += 1
                self.seen.update(f"{verb} {outcome.state}" for verb in verbs if verb in BAD)
                if outcome.state == "aborted":
                    expected = ["nothing is said of", "cannot be copied"]
                    expected += ["fails on a sample"] if set(verbs) & {"raises", "schema"} else []
                    assert any(text in outcome.reason for text in expected), (verbs, outcome)
                if outcome.state == "rolled back":
                    assert set(verbs) & {"raises", "schema"} or "injected" in outcome.reason, (verbs, outcome)

    # -- epochs

    def restart(self) -> None:
        self.any_query()
        self.sim.restart(map_tasks=self.rng.randint(1, 3))
        self.oracle.restarted(self.sim.now)

    def any_query(self) -> None:
        """A driver that takes over may be given the query as it was at any time."""
        self.sim.query = self.rng.choice((query_of(self.first), *self.queries, *self.queries[-1:]))

    def feed(self) -> None:
        records: dict[str, list[Any]] = dict(self.weather.records(self.shape, 9))
        given = {name: list(rows) for name, rows in records.items()}
        crash = self.crash() if given else None
        if crash is not None:
            rows = self.rng.choice(list(given.values()))
            rows.insert(self.rng.randint(0, len(rows)), crash)
        self.compare(records, crash, None, lambda: self.sim.feed(**given))

    def clock(self, seconds: int) -> None:
        crash = self.crash()
        self.sim.now += timedelta(seconds=seconds)
        self.compare({}, crash, None, lambda: self.sim.offer({}, crash=crash))

    def watermark(self, source: str, to: Any) -> None:
        crash = self.crash()
        self.compare({}, crash, {source: micros(to)}, lambda: self.sim.advance_watermark(to, source, crash=crash))

    def crash(self) -> Any:
        if self.rng.random() < 0.65:
            return None
        moments = MOMENTS if self.shape.sinks else tuple(each for each in MOMENTS if each != "delivering")
        return self.rng.choice((CRASH, CRASH, *map(CRASH.at, moments)))

    def fail(self, records: Any, run: Callable[[], None]) -> bool | None:
        """Runs an epoch while the store fails once. Whether it was committed before its driver was replaced; None if it
        was not replaced."""
        number, rng = self.sim.epoch + 1, self.rng
        self.store.fail_at = fails = self.store.operations + rng.randint(1, 30)
        self.store.mode = rng.choice(FAULTS)
        try:
            run()
            return None
        except (Crash, StoreUnavailable):
            self.store.fail_at = 0
            self.sim.restart()
            committed = self.sim.epoch == number
            if committed:
                self.sim.offer(records, number)
            else:
                run()
            return committed
        finally:
            self.store.fail_at = 0
            self.seen[f"store: {self.store.mode}"] += self.store.operations >= fails

    def compare(self, records: Any, crash: Any, stated: Any, run: Callable[[], None]) -> None:
        """Runs an epoch here and there, and compares what it led to."""
        sim = self.sim
        self.any_query()
        done: bool | None = None
        if crash is None and self.rng.random() < 0.3 and not self.background:
            done = self.fail(records, run)
        else:
            run()
            if crash is not None:
                done = crash.moment in ("committed", "delivering", "delivered")
        if done is False:
            self.oracle.restarted(sim.now)
        self.committed()
        expected = self.oracle.feed(records, sim.now, stated)
        if done is True:
            self.oracle.restarted(sim.now)
        for sink, stream in self.shape.sinks.items():
            found = sim.delivered.get(sink, {}).get(sim.epoch, [])
            if stream.endswith(".dead_letter"):
                step = next(step for step in self.shape.steps if stream == f"{step.name}.dead_letter")
                compare_letters(self.oracle, step, found, sim.epoch)
                self.letters[step.name] += len(found)
                assert sim.dead_letters(step.name) == self.letters[step.name], stream
            else:
                compare(self.shape, stream, found, expected[stream])
                self.seen["rows"] += len(found)
        assert {sink for sink, epochs in sim.delivered.items() if sim.epoch in epochs} <= set(self.shape.sinks)
        for step in self.shape.steps:
            assert sim.late(step.name) == self.oracle.late[step.name], f"late at {step.name}"
            assert sim.watermark(step.name) == self.oracle.watermark(step.name), f"watermark of {step.name}"
        assert {step.name for step in sim.graph.steps} == {step.name for step in self.shape.steps}
        self.seen[repr(crash)] += 1
        self.commander.check()
        self.answers()
        if self.rng.random() < 0.2:
            self.compare_states()

    def compare_states(self) -> None:
        for step in self.shape.steps:
            for name in states_of(step):
                found = by_key(step, name, self.sim.state(step.name, name))
                assert found == self.oracle.state(step.name, name), f"{step.name}.{name}"
        families = {
            family.step for family, pieces in self.sim.driver.journal.history.manifest.families.items() if pieces
        }
        assert families <= {step.name for step in self.shape.steps}
        assert set(self.sim.driver.tables) == {step.name for step in self.shape.steps}

    def end(self) -> None:
        for number, outcome in self.sim.driver.journal.history.outcomes.items():
            if number in self.commander.sent:
                assert (outcome.state == "done") == (outcome.done == outcome.rounds)
                self.seen[f"migration {outcome.state}"] += 1
        self.sim.driver.close()


def reachable(state: str) -> set[str]:
    found, left = {state}, [state]
    while left:
        more = set(LIFE.get(left.pop(), ())) - found
        found |= more
        left += more
    return found


def test_modified_queries_are_those_of_a_sequential_run_of_each_graph_in_its_epochs(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for number in range(seed, seed + LIVES):
        life: Life | None = None
        try:
            Bomb.burning.clear()
            life = Life(number)
            monkeypatch.setattr("millstream.engine.step.TAKE_UP", life.rng.choice((0, 2)))
            monkeypatch.setattr("millstream.engine.upkeep.GARBAGE_EVERY", life.rng.choice((0, 3)))
            monkeypatch.setattr("millstream.store.journal.SNAPSHOT_EVERY", life.rng.choice((3, 8, 64)))
            life.run(9)
        except BaseException as error:
            error.add_note(f"MILLSTREAM_SEED={number} MILLSTREAM_MODIFIED=1 makes this query again")
            if life is not None:
                error.add_note(f"epoch {life.sim.epoch}, {life.shape.nodes}\n{life.sim.graph!r}"[:3000])
                error.add_note("\n".join(map(str, life.sim.driver.journal.history.outcomes.values()))[:3000])
            raise
        seen += life.seen
        seen["compactions"] += life.sim.driver.upkeep.compactions
    if os.environ.get("MILLSTREAM_SHOW"):
        print(seen)
    if LIVES >= 100:
        wanted = [
            *(f"{verb} committed" for verb in (*VERBS, "revert")),
            *(f"{mode} rolled back" for mode in ("raises", "schema")),
            *(f"{mode} aborted" for mode in BAD),
            *(
                "cancelled",
                "refused",
                "several at once",
                "a name again",
                "compactions",
                "migration done",
                "migration refused",
            ),
            *(f"store: {mode}" for mode in FAULTS),
            *("CRASH", *(repr(CRASH.at(moment)) for moment in MOMENTS)),
        ]
        assert [name for name in wanted if seen[name] < 3] == []
        assert seen["modified"] > LIVES * 3
