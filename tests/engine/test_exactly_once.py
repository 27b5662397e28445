"""G1, G2, G3 and G6 on simulated epochs: whatever fails, and wherever, state and outputs equal the oracle's."""

from __future__ import annotations

import random
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

import millstream as ms
from jobs import EVENTS, Event, Oracle, two_steps
from millstream.engine import step, upkeep
from millstream.errors import DamagedObject, Fenced, MillstreamError, StepError, StoreUnavailable, UserError
from millstream.store import garbage, names
from millstream.store.objects import open_store
from millstream.store.segments import CACHE
from millstream.testing import Crash, FaultyStore, Simulated


def some_events(rng: random.Random, count: int = 40, users: int = 12) -> list[Event]:
    return [(None if not (u := rng.randrange(users)) else f"user-{u}", rng.randrange(-5, 9)) for _ in range(count)]


@pytest.fixture
def only_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs take up no older segments, so that compaction has something to do."""
    monkeypatch.setattr(step, "TAKE_UP", 0)


@pytest.mark.parametrize("take_up", [0, 2, 100])
def test_state_and_outputs_equal_a_sequential_run(
    take_up: int, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "TAKE_UP", take_up)
    sim, oracle = Simulated(two_steps(), EVENTS, slots=3, map_tasks=4), Oracle()
    for _ in range(60):
        events = some_events(rng)
        sim.feed(events=events)
        oracle.feed(events)
    oracle.check(sim)
    assert (sim.driver.upkeep.compactions > 0) == (take_up == 0)


def test_an_epoch_without_records_commits(rng: random.Random) -> None:
    sim, oracle = Simulated(two_steps(), EVENTS), Oracle()
    for events in ([], some_events(rng), []):
        sim.feed(events=events)
        oracle.feed(events)
    oracle.check(sim)


@pytest.mark.parametrize("mode", ["refuse", "lose", "crash", "crash_after"])
def test_a_store_that_fails_on_any_operation_costs_nothing_but_a_restart(mode: str, rng: random.Random) -> None:
    """For every k: the k-th store operation of an epoch fails; a restart on the healthy store goes on exactly."""
    history = [some_events(rng) for _ in range(4)]
    k, finished = 1, False
    while not finished:
        store, oracle = open_store("memory://"), Oracle()
        sim = Simulated(two_steps(), EVENTS, store)
        for events in history[:2]:
            sim.feed(events=events)
            oracle.feed(events)
        delivered = sim.delivered
        faulty = FaultyStore(store, fail_at=k, mode=mode)
        try:
            sim = Simulated(two_steps(), EVENTS, faulty)
            sim.delivered = delivered
            sim.feed(events=history[2])
            finished = faulty.operations < k
        except (Crash, MillstreamError):
            pass
        sim = Simulated(two_steps(), EVENTS, store)
        sim.delivered = delivered
        for number in range(max(0, sim.epoch), 4):  # Spark offers the last epoch again if it did not note its end
            sim.feed(epoch=number, events=history[number])
        for events in history[2:]:
            oracle.feed(events)
        oracle.check(sim)
        k += 1
    assert k > 15, "an epoch that touches the store so rarely was not an epoch"


@pytest.mark.parametrize("moment", ["planned", "executed", "committed", "delivering", "delivered"])
def test_a_driver_that_dies_at_any_moment_is_followed_exactly(moment: str, rng: random.Random) -> None:
    history = [some_events(rng) for _ in range(5)]
    store, oracle = open_store("memory://"), Oracle()

    def die(at: str, epoch: int) -> None:
        if (at, epoch) == (moment, 3):
            raise Crash(moment)

    sim = Simulated(two_steps(), EVENTS, store, observe=die)
    with pytest.raises(Crash):
        for events in history:
            sim.feed(events=events)
    delivered = sim.delivered
    sim = Simulated(two_steps(), EVENTS, store)
    sim.delivered = delivered
    for number in range(3, 5):
        sim.feed(epoch=number, events=history[number])
    for events in history:
        oracle.feed(events)
    oracle.check(sim)


def test_an_epoch_that_spark_offers_again_is_delivered_again_with_the_same_bytes(rng: random.Random) -> None:
    store, events = open_store("memory://"), some_events(rng)
    sim = Simulated(two_steps(), EVENTS, store)
    sim.feed(events=events)
    again = Simulated(two_steps(), EVENTS, store)
    again.feed(epoch=0, events=events)
    assert again.delivered == sim.delivered
    assert again.epoch == 0


def test_an_older_driver_is_fenced_and_says_so(rng: random.Random) -> None:
    store, oracle = open_store("memory://"), Oracle()
    old = Simulated(two_steps(), EVENTS, store)
    first = some_events(rng)
    old.feed(events=first)
    new = Simulated(two_steps(), EVENTS, store)
    with pytest.raises(Fenced, match=r"generation 1.*has been replaced.*generation 2"):
        old.feed(events=some_events(rng))
    second = some_events(rng)
    new.feed(events=second)
    new.delivered["records_out"][0] = old.delivered["records_out"][0]
    new.delivered["batches_out"][0] = old.delivered["batches_out"][0]
    for events in (first, second):
        oracle.feed(events)
    oracle.check(new)


@pytest.mark.usefixtures("only_compaction")
def test_the_garbage_collection_of_a_zombie_harms_nobody(rng: random.Random) -> None:
    store, oracle = open_store("memory://"), Oracle()
    old = Simulated(two_steps(), EVENTS, store, retain=1)
    for _ in range(5):
        events = some_events(rng)
        old.feed(events=events)
        oracle.feed(events)
    new = Simulated(two_steps(), EVENTS, store, retain=1)
    new.delivered = old.delivered
    for _ in range(20):
        events = some_events(rng)
        new.feed(events=events)
        oracle.feed(events)
        old.driver.upkeep.collect(old.driver.journal)  # with what it knew when it was fenced
    oracle.check(new)
    again = Simulated(two_steps(), EVENTS, store, retain=1)
    again.delivered = new.delivered
    oracle.check(again)


@pytest.mark.usefixtures("only_compaction")
def test_garbage_collection_keeps_the_store_small(rng: random.Random) -> None:
    sim = Simulated(two_steps(), EVENTS, retain=2)
    sizes = []
    for _ in range(96):
        sim.feed(events=some_events(rng))
        sizes.append(sum(1 for _ in sim.store.list(names.SEGMENTS)) + sum(1 for _ in sim.store.list(names.PRODUCTIONS)))
    assert max(sizes[48:]) <= max(sizes[:48]) * 1.5
    assert max(sizes) < 250


def test_objects_of_an_attempt_that_never_committed_are_collected(rng: random.Random) -> None:
    store = open_store("memory://")

    def die(at: str, epoch: int) -> None:
        if (at, epoch) == ("executed", 1):
            raise Crash

    sim = Simulated(two_steps(), EVENTS, store, observe=die)
    history = [some_events(rng), some_events(rng)]
    sim.feed(events=history[0])
    with pytest.raises(Crash):
        sim.feed(events=history[1])
    orphans = {i.name for i in store.list(names.SEGMENTS) if "-e1-a0-" in i.name}
    assert orphans
    sim = Simulated(two_steps(), EVENTS, store)
    sim.feed(events=history[1])
    sim.driver.upkeep.collect(sim.driver.journal)
    assert not orphans & {i.name for i in store.list(names.SEGMENTS)}


@pytest.mark.usefixtures("only_compaction")
def test_past_epochs_stay_readable_while_they_are_retained(rng: random.Random) -> None:
    sim = Simulated(two_steps(), EVENTS, retain=6)
    states = []
    for _ in range(70):
        sim.feed(events=some_events(rng))
        states.append(dict(sim.state("records", "total")))
    for epoch in range(sim.epoch - 6, sim.epoch + 1):
        assert dict(sim.state("records", "total", epoch=epoch)) == states[epoch]


@pytest.mark.usefixtures("only_compaction")
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_segment_is_named_and_never_used(damage: str, rng: random.Random, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    sim = Simulated(two_steps(), EVENTS, store)
    history = [some_events(rng) for _ in range(3)]
    for events in history[:2]:
        sim.feed(events=events)
    victim = sorted(i.name for i in store.list(names.SEGMENTS) if "records/total" in i.name)[0]
    path = store.path(victim)
    assert path is not None
    original = path.read_bytes()
    CACHE._open.clear()  # as in a fresh worker
    if damage == "flip":
        middle = len(original) // 2
        path.write_bytes(original[:middle] + bytes([original[middle] ^ 16]) + original[middle + 1 :])
    elif damage == "truncate":
        path.write_bytes(original[:-1])
    else:
        path.unlink()
    sim = Simulated(two_steps(), EVENTS, store)
    with pytest.raises(DamagedObject, match=victim):
        sim.feed(events=[(f"user-{u}", 1) for u in range(12)])
    assert sim.epoch == 1
    path.write_bytes(original)
    CACHE._open.clear()
    sim.feed(events=history[2])
    assert sim.epoch == 2


@pytest.mark.parametrize("kind", ["journal/", "snapshots/"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_journal_entry_or_snapshot_is_never_used(
    kind: str, damage: str, rng: random.Random, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path))
    sim = Simulated(two_steps(), EVENTS, store)
    for _ in range(40):
        sim.feed(events=some_events(rng, 5))
    victims = sorted(i.name for i in store.list(kind))
    victim = victims[-3] if kind == "journal/" else victims[-1]
    path = store.path(victim)
    assert path is not None
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    elif damage == "truncate":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.unlink()
    if kind == "snapshots/":
        again = Simulated(two_steps(), EVENTS, store)  # all entries are still there: nothing is lost
        assert sorted(again.state("records", "total"), key=str) == sorted(sim.state("records", "total"), key=str)
        return
    with pytest.raises(DamagedObject, match=victim):
        Simulated(two_steps(), EVENTS, store)


def test_a_failing_record_is_reported_with_step_key_and_record_and_leaves_no_trace() -> None:
    store = open_store("memory://")
    sim, oracle = Simulated(two_steps(), EVENTS, store), Oracle()
    sim.feed(events=[("anna", 3)])
    oracle.feed([("anna", 3)])
    bad = [("anna", 1), ("bert", None), ("carl", 2)]
    with pytest.raises(StepError, match=r"step 'records' failed in epoch 1: TypeError") as caught:
        sim.feed(events=bad)
    assert caught.value.key == "'bert'"
    assert "amount=None" in caught.value.record
    assert sim.epoch == 0
    delivered = sim.delivered
    sim = Simulated(two_steps(), EVENTS, store)  # the code (here: the data) is mended
    sim.delivered = delivered
    sim.feed(events=[("anna", 1), ("carl", 2)])
    oracle.feed([("anna", 1), ("carl", 2)])
    oracle.check(sim)


def test_a_transient_failure_of_the_store_is_survived_without_a_restart(rng: random.Random) -> None:
    sim, oracle = Simulated(two_steps(), EVENTS), Oracle()
    events = some_events(rng)
    faulty = FaultyStore(sim.store, fail_at=2, mode="refuse")
    sim.driver.executor.store = faulty  # type: ignore[attr-defined]
    sim.feed(events=events)
    oracle.feed(events)
    oracle.check(sim)
    assert sim.driver.last is not None
    assert sim.driver.last.attempts == 2


def test_a_store_that_never_answers_ends_the_query_with_the_reason(rng: random.Random) -> None:
    sim = Simulated(two_steps(), EVENTS)

    class Broken(FaultyStore):
        def put(self, name: str, data: object) -> None:
            raise StoreUnavailable("No space left on device (os error 28)")

    sim.driver.executor.store = Broken(sim.store)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"failed 4 times.*last commit is intact(?s:.*)No space left"):
        sim.feed(events=some_events(rng))
    assert sim.epoch == -1


def test_a_foreign_or_rolled_back_checkpoint_is_refused(rng: random.Random) -> None:
    sim = Simulated(two_steps(), EVENTS)
    for _ in range(3):
        sim.feed(events=some_events(rng))
    with pytest.raises(UserError, match="offers epoch 0, but the store's last commit is epoch 2"):
        sim.feed(epoch=0, events=[])
    with pytest.raises(UserError, match="offers epoch 5"):
        sim.feed(epoch=5, events=[])
    with pytest.raises(UserError, match="committed for other source offsets"):
        sim.feed(epoch=2, events=[("other", 1)])
    with pytest.raises(UserError, match="belongs to the Spark query simulated"):
        sim.driver.run_epoch(3, "another", "x", lambda names: {})  # type: ignore[arg-type]


def test_a_changed_graph_is_refused_with_what_changed(rng: random.Random) -> None:
    from jobs import Total, TotalBatch

    sim = Simulated(two_steps(), EVENTS)
    sim.feed(events=some_events(rng))
    query = ms.Query("totals")
    events = query.source("events", frame=None)
    events.key_by("user", "amount").compute("records", Total).sink("records_out", ms.Memory())
    events.key_by("user").compute("extra", TotalBatch)
    with pytest.raises(UserError) as caught:
        Simulated(query, EVENTS, sim.store)
    text = str(caught.value)
    assert "steps.records.key: was ['user STRING'], now ['user STRING', 'amount BIGINT']" in text
    assert "steps.batches" in text
    assert "now missing" in text
    assert "steps.extra: is new" in text


def test_a_disk_that_fills_up_stops_the_query_and_more_space_lets_it_go_on(rng: random.Random, tmp_path: Path) -> None:
    """A real file system, small, and then larger."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    try:
        oracle, fed = Oracle(), 0
        history = [some_events(rng, 200, users=150) for _ in range(60)]
        sim = Simulated(two_steps(), EVENTS, open_store(str(small)))
        delivered = sim.delivered
        with pytest.raises(UserError, match=r"No space left"):
            for events in history:
                sim.feed(events=events)
                fed += 1
        assert 0 < fed < 60
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        sim = Simulated(two_steps(), EVENTS, open_store(str(small)))
        assert fed - 1 <= sim.epoch <= fed
        sim.delivered = delivered
        for number in range(fed, len(history)):
            sim.feed(epoch=number, events=history[number])
        for events in history:
            oracle.feed(events)
        oracle.check(sim)
    finally:
        CACHE._open.clear()
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.usefixtures("only_compaction")
def test_raising_retain_on_a_restart_offers_no_epoch_whose_objects_are_gone(rng: random.Random) -> None:
    store = open_store("memory://")
    sim = Simulated(two_steps(), EVENTS, store, retain=1)
    for _ in range(50):
        sim.feed(events=some_events(rng))
    sim.driver.upkeep.collect(sim.driver.journal)
    again = Simulated(two_steps(), EVENTS, store, retain=40)
    assert again.driver.journal.history.oldest == 48
    states = {49: sorted(again.state("records", "total"), key=str)}
    for _ in range(6):
        again.feed(events=some_events(rng))
        states[again.epoch] = sorted(again.state("records", "total"), key=str)
        again.driver.upkeep.collect(again.driver.journal)
    assert again.driver.journal.history.oldest == 48
    for epoch, expected in states.items():
        assert sorted(again.state("records", "total", epoch=epoch), key=str) == expected


@pytest.mark.usefixtures("only_compaction")
def test_an_upkeep_that_fails_is_shown_and_tried_again(rng: random.Random) -> None:
    sim, oracle = Simulated(two_steps(), EVENTS), Oracle()
    healthy = sim.driver.executor.compact

    def broken(spec: object, jobs: object) -> object:
        raise OSError("the disk is busy")

    sim.driver.executor.compact = broken  # type: ignore[method-assign, assignment]
    for number in range(24):
        if number == 12:
            assert sim.driver.upkeep.trouble == "OSError: the disk is busy"
            assert sim.driver.upkeep.compactions == 0
            sim.driver.executor.compact = healthy  # type: ignore[method-assign]
        events = some_events(rng)
        sim.feed(events=events)
        oracle.feed(events)
    assert sim.driver.upkeep.trouble is None
    assert sim.driver.upkeep.compactions > 0
    oracle.check(sim)


def test_what_a_process_left_half_written_is_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    sim = Simulated(two_steps(), EVENTS, store)
    sim.feed(events=[("anna", 1)])
    (tmp_path / "_staging").mkdir(exist_ok=True)
    (tmp_path / "_staging" / "left").write_bytes(b"half")
    sim.driver.upkeep.collect(sim.driver.journal)
    assert (tmp_path / "_staging" / "left").exists(), "it may still be being written"
    monkeypatch.setattr(garbage, "ABANDONED_S", -1.0)
    sim.driver.upkeep.collect(sim.driver.journal)
    assert not (tmp_path / "_staging" / "left").exists()


@pytest.mark.usefixtures("only_compaction")
def test_an_output_of_compaction_that_is_applied_while_the_round_goes_on_is_not_garbage(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two slots' compactions in one round: the first is applied by an epoch while the second still runs."""
    sim, oracle = Simulated(two_steps(), EVENTS, slots=2, retain=1, background=True), Oracle()
    healthy, hold, held = sim.driver.executor.compact, threading.Event(), threading.Event()
    calls = []

    def slow(spec: Any, jobs: Any) -> Any:
        calls.append(jobs)
        if len(calls) == 2:
            held.set()
            assert hold.wait(60)
        return healthy(spec, jobs)

    sim.driver.executor.compact = slow  # type: ignore[method-assign]
    monkeypatch.setattr(upkeep, "GARBAGE_EVERY", 0)  # every round collects, also the one with compactions
    while not held.is_set():
        events = some_events(rng)
        sim.feed(events=events)
        oracle.feed(events)
        if len(calls) == 1:
            held.wait(60)
    for _ in range(3):  # the first output becomes part of the manifest
        events = some_events(rng)
        sim.feed(events=events)
        oracle.feed(events)
    hold.set()
    sim.driver.upkeep.close()
    sim.driver.upkeep.collect(sim.driver.journal)
    present = {item.name for item in sim.store.list(names.SEGMENTS)}
    assert {ref.name for ref in sim.driver.journal.history.manifest.segments()} <= present
    assert any("-c" in ref.name for ref in sim.driver.journal.history.manifest.segments())
    oracle.check(sim)


@pytest.mark.parametrize("kind", ["damaged", "unavailable"])
def test_state_that_cannot_be_read_is_never_taken_for_absent_even_if_user_code_swallows_it(kind: str) -> None:
    class Swallows(ms.Computation):
        total = ms.Value("long", default=0)

        def on_batch(self, batch: ms.Batch) -> None:
            try:
                before = self.total.read(batch)
            except Exception:
                before = 0
            self.total.write(batch, before + batch.count())

    query = ms.Query("swallows")
    query.source("events", frame=None).key_by("user").compute("count", Swallows)
    sim = Simulated(query, EVENTS, slots=1)
    sim.feed(events=[("anna", 1)])
    CACHE._open.clear()
    [segment] = [item.name for item in sim.store.list(names.SEGMENTS)]
    if kind == "damaged":
        sim.store.delete([segment])
        with pytest.raises(DamagedObject, match=segment):
            sim.feed(events=[("anna", 1)])
        assert sim.epoch == 0
    else:

        class Once(FaultyStore):
            def get(self, name: str) -> memoryview | None:
                if name == segment and self.fail_at == 0:
                    self.fail_at = -1
                    raise StoreUnavailable("busy")
                return self.inner.get(name)

        sim.driver.executor.store = Once(sim.store)  # type: ignore[attr-defined]
        sim.feed(events=[("anna", 1)])
        assert sim.driver.last is not None
        assert sim.driver.last.attempts == 2
        assert sim.state("count") == [("anna", 2)]
