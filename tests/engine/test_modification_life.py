"""The life of a modification: whatever fails in the epochs that hear, prepare and activate it, the query is wholly the
old graph or wholly the new one, in every epoch, and the command is answered once."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest

import millstream as ms
from millstream.engine.driver import MOMENTS
from millstream.errors import MillstreamError
from millstream.model.carry import convert
from millstream.model.change import Change
from millstream.protocol.epochs import Commit, Plan
from millstream.protocol.migration import AT_ONCE, Start
from millstream.protocol.modification import LIFE, Modification
from millstream.store.code import put_code
from millstream.store.control_log import ControlLog
from millstream.store.journal import JournalReader
from millstream.store.objects import ObjectStore, open_store
from millstream.testing import CRASH, Crash, FaultyStore, Simulated

WORDS = {"words": "word string, n long"}
FED = [[("a", 1), ("b", 2), ("a", 3)], [("b", 5)], [("a", 2), ("c", 4)], [("c", 1), ("b", 1)], [("a", 1)], [("c", 2)]]


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


class Sum(Count):
    def on_record(self, row: Any, at: Any) -> Any:
        self.total.set(self.total.get() + row.n)
        yield at.key, self.total.get()


class Most(ms.Computation):
    most = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: Any) -> Any:
        self.most.set(max(self.most.get(), row.total))
        yield at.key, self.most.get()


def counting() -> ms.Query:
    query = ms.Query("words")
    counts = query.source("words", None).key_by("word").compute("count", Count)
    counts.key_by("word").compute("most", Most).sink("out", ms.Memory())
    return query


def thrice(total: int) -> int:
    return total * 3 + 1


def changed(sim: Simulated) -> Change:
    """Everything at once: a step is converted and renamed, another is put in front, a third is added with a sink."""
    change = sim.modify()
    change.replace("count", Sum, state={"total": convert(thrice)})
    change.rename("count", "sum")
    change.insert("large", keep=lambda batch: [n > 1 for n in batch["n"].to_pylist()], after="words", before="sum")
    change.insert("seen", Count, after="sum", key="word")
    change.stream("seen").sink("told", ms.Memory())
    return change


def asked(sim: Simulated, change: Change, start: Start = AT_ONCE) -> int:
    history = sim.driver.journal.history
    code = put_code(sim.store, sim._workshop.pack(change.rewrite))
    ask = Modification(sim.driver.journal.store_id, history.version, code, "a change", start)
    return ControlLog(sim.store).send("modify", ask, history.control)


class Oracle:
    """The two graphs, one after the other."""

    def __init__(self, first: int | None) -> None:
        self.total: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.seen: Counter[str] = Counter()
        self.out: dict[int, list[tuple[str, int]]] = {}
        self.told: dict[int, list[tuple[str, int]]] = {}
        for epoch, rows in enumerate(FED):
            new = first is not None and epoch >= first
            if epoch == first:
                self.total = {word: thrice(total) for word, total in self.total.items()}
            self.out[epoch], self.told[epoch] = [], []
            for word, n in rows:
                if new and n <= 1:
                    continue
                total = self.total[word] = self.total.get(word, 0) + (n if new else 1)
                self.most[word] = max(self.most.get(word, 0), total)
                self.out[epoch].append((word, self.most[word]))
                if new:
                    self.seen[word] += 1
                    self.told[epoch].append((word, self.seen[word]))

    def check(self, sim: Simulated, first: int | None) -> None:
        new = first is not None
        assert dict(sim.state("sum" if new else "count")) == self.total
        assert dict(sim.state("most")) == self.most
        assert {epoch: sorted(rows) for epoch, rows in sim.delivered["out"].items()} == sorted_all(self.out)
        told = {epoch: sorted(rows) for epoch, rows in sim.delivered.get("told", {}).items()}
        assert told == {epoch: rows for epoch, rows in sorted_all(self.told).items() if new and epoch >= (first or 0)}
        if new:
            assert dict(sim.state("seen")) == dict(self.seen)
        assert {step.name for step in sim.graph.steps} == ({"sum", "most", "seen"} if new else {"count", "most"})


def sorted_all(rows: dict[int, list[tuple[str, int]]]) -> dict[int, list[tuple[str, int]]]:
    return {epoch: sorted(found) for epoch, found in rows.items()}


def answered(store: ObjectStore, number: int) -> tuple[list[str], int | None]:
    """The states that the journal gives a command, one after the other, and the epoch in which it took effect."""
    plans: list[Plan] = []
    states: list[str] = []
    first: list[int] = []

    def told(envelope: Any) -> None:
        if isinstance(envelope.body, Plan):
            plans.append(envelope.body)
        if isinstance(envelope.body, Commit):
            states.extend(outcome.state for outcome in plans[-1].outcomes if outcome.number == number)
            if plans[-1].changed is not None:
                assert plans[-1].changed.number == number
                first.append(plans[-1].epoch)

    JournalReader.look(store, told)
    assert len(first) <= 1, "it took effect twice"
    assert sum(not LIFE.get(state, ()) for state in dict.fromkeys(states)) == 1, "it was not answered once"
    assert (states[-1] == "committed") == bool(first)
    return states, first[0] if first else None


def check(sim: Simulated, number: int, wanted: int | None = None) -> None:
    states, first = answered(sim.store, number)
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == states[-1]
    ranks = [list(LIFE).index(state) for state in states if state in LIFE]
    assert ranks == sorted(ranks), "it went back"
    if wanted is not None:
        assert first == wanted
    Oracle(first).check(sim, first)


@pytest.mark.parametrize("again", ["first", "now"])
@pytest.mark.parametrize("moment", ["", *MOMENTS])
@pytest.mark.parametrize("dies", [1, 2, 3])
def test_a_driver_that_dies_while_a_modification_is_heard_waits_or_takes_effect(
    dies: int, moment: str, again: str
) -> None:
    """It is heard in epoch 1, waits in 2, and takes effect in 3; the next driver has the first query or that of now."""
    sim = Simulated(counting(), WORDS, slots=2, retain=6)
    for epoch, rows in enumerate(FED):
        if epoch == 1:
            number = asked(sim, changed(sim), Start(epoch=3))
        if epoch == 2:
            outcome = sim.outcome(number)
            assert outcome is not None
            assert outcome.state == "prepared"
        sim.query = sim.driver.modifier.version.query if again == "now" else sim.query
        marks = [CRASH.at(moment) if moment else CRASH] if epoch == dies else []
        sim.feed(words=[*rows, *marks])
    check(sim, number, 3)


@pytest.mark.parametrize("mode", ["refuse", "lose", "crash", "crash_after"])
def test_any_store_operation_may_fail_in_the_epochs_around_a_modification(mode: str) -> None:
    """For every k: the k-th operation of the epoch that hears and activates it fails, or its reply is lost."""
    k, finished, firsts = 1, False, Counter[int | None]()
    while not finished:
        store = open_store("memory://")
        sim = Simulated(counting(), WORDS, store, slots=2, retain=6)
        for rows in FED[:2]:
            sim.feed(words=rows)
        number, delivered = asked(sim, changed(sim)), sim.delivered
        faulty = FaultyStore(store, fail_at=k, mode=mode)
        try:
            sim = Simulated(counting(), WORDS, faulty, retain=6)
            sim.delivered = delivered
            sim.feed(words=FED[2])
            finished = faulty.operations < k
        except (Crash, MillstreamError):
            pass
        sim = Simulated(counting(), WORDS, store, retain=6)
        sim.delivered = delivered
        for epoch in range(max(0, sim.epoch), len(FED)):
            sim.feed(epoch=epoch, words=FED[epoch])
        check(sim, number)
        firsts[answered(store, number)[1]] += 1
        k += 1
    assert k > 20
    assert set(firsts) <= {2, 3}, "a fault that passes delays it by an epoch at most, and never ends it"


def test_a_driver_that_dies_before_it_prepares_leaves_that_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulated(counting(), WORDS, slots=2, retain=6)
    sim.feed(words=FED[0])
    number = asked(sim, changed(sim))
    with monkeypatch.context() as patch:
        patch.setattr(sim.driver.modifier, "_prepare", lambda *_: None)  # it is heard, and nothing comes of it
        sim.feed(words=FED[1])
    sim.restart()
    for rows in FED[2:]:
        sim.feed(words=rows)
    check(sim, number, 2)


@pytest.mark.parametrize("fails", ["once", "always"])
def test_a_first_epoch_that_fails_for_other_reasons_is_tried_again_and_then_without_it(fails: str) -> None:
    sim = Simulated(counting(), WORDS, slots=2, retain=6)
    for rows in FED[:2]:
        sim.feed(words=rows)
    number, store = asked(sim, changed(sim)), sim.driver.executor.store  # type: ignore[attr-defined]

    class Failing(FaultyStore):
        """Does not let workers write the state of the new step."""

        left = 1 if fails == "once" else 99

        def create(self, name: str, data: Any) -> bool:
            return self._checked(name) and self.inner.create(name, data)

        def put(self, name: str, data: Any) -> None:
            self._checked(name)
            self.inner.put(name, data)

        def _checked(self, name: str) -> bool:
            if "/sum/" in name and self.left:
                self.left -= 1
                raise ms.StoreUnavailable("busy")
            return True

    sim.driver.executor.store = Failing(store)  # type: ignore[attr-defined]
    for rows in FED[2:]:
        sim.feed(words=rows)
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == ("committed" if fails == "once" else "rolled back")
    check(sim, number, 2 if fails == "once" else None)


def test_a_modification_that_was_cancelled_while_it_waited_never_takes_effect() -> None:
    sim = Simulated(counting(), WORDS, slots=2, retain=6)
    for epoch, rows in enumerate(FED):
        if epoch == 1:
            number = asked(sim, changed(sim), Start(epoch=4))
        if epoch == 3:
            sim.cancel(number)
        sim.feed(words=[*rows, CRASH.at("planned")] if epoch == 3 else rows)
    states, first = answered(sim.store, number)
    assert (states, first) == (["prepared", "cancelled"], None)
    Oracle(None).check(sim, None)


def test_of_two_at_once_the_second_is_stale_and_if_the_first_fails_the_second_takes_effect() -> None:
    sim = Simulated(counting(), WORDS, slots=2, retain=6)
    sim.feed(words=FED[0])
    numbers = [asked(sim, changed(sim)), asked(sim, changed(sim))]
    for rows in FED[1:]:
        sim.feed(words=rows)
    check(sim, numbers[0], 1)
    assert answered_state(sim, numbers[1]) == ("refused", True)

    class Fails(Sum):
        def on_record(self, row: Any, at: Any) -> Any:
            raise ValueError("no")

    sim = Simulated(counting(), WORDS, slots=2, retain=6)
    sim.feed()
    sim.feed()
    bad = sim.modify()
    bad.replace("count", Fails, state={"total": ms.carry()})
    numbers = [asked(sim, bad), asked(sim, changed(sim))]
    sim.feed(words=[("a", 7)])
    assert answered_state(sim, numbers[0]) == ("rolled back", False)
    assert answered_state(sim, numbers[1]) == ("committed", False)
    assert dict(sim.state("sum")) == {"a": 7}


def answered_state(sim: Simulated, number: int) -> tuple[str, bool]:
    outcome = sim.outcome(number)
    assert outcome is not None
    return outcome.state, outcome.stale


@pytest.mark.parametrize("background", [False, True])
def test_a_change_that_ends_every_driver_is_given_up(background: bool) -> None:
    """Its first epoch is planned by one driver after the other, and none comes back from it."""
    deaths = 0

    def dies(moment: str, epoch: int) -> None:
        nonlocal deaths
        plan = sim.driver.journal.history.plan
        if moment == "planned" and plan is not None and plan.changed is not None:
            deaths += 1
            raise Crash(moment)

    sim = Simulated(counting(), WORDS, observe=dies, background=background)
    sim.feed(words=FED[0])
    number = sim.send(changed(sim))
    fed = 1
    while (outcome := sim.outcome(number)) is None or not outcome.over:
        assert fed < 200, outcome
        try:
            sim.feed(words=FED[1])
            fed += 1
        except Crash:
            sim.restart()
        time.sleep(0.01 if background else 0)
    assert (deaths, outcome.state) == (3, "rolled back")
    assert "each time the driver was lost" in outcome.reason
    assert dict(sim.state("count"))["b"] == fed
    sim.driver.close()
