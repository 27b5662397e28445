"""The journal: one sequence, conditional creates, claims that fence, snapshots that only save reading."""

from __future__ import annotations

import pytest

from millstream.errors import DamagedObject, Fenced, InvariantViolation, UserError
from millstream.protocol.epochs import TRANSITIONS, Abort, Attempt, Claim, Commit, Epoch, Generation, History, Plan
from millstream.protocol.keyspace import WHOLE
from millstream.protocol.manifest import Family, SegmentRef
from millstream.protocol.routing import RoutingTable
from millstream.store import journal as journal_module
from millstream.store import names
from millstream.store.journal import SNAPSHOT_EVERY, Journal, JournalReader, decode_entry, encode_entry, history_at
from millstream.store.objects import ObjectStore, open_store
from millstream.testing import Crash, FaultyStore


def plan(epoch: int, attempt: int = 0) -> Plan:
    tables = {"count": RoutingTable.even(2, 12)} if epoch == 0 else {}
    return Plan(Epoch(epoch), Attempt(attempt), "spark", f"offsets-{epoch}", 0, {}, {"query": "q"}, tables)


def commit(epoch: int, attempt: int = 0, retain: int = 4) -> Commit:
    ref = SegmentRef(f"segments/count/total/{epoch}", Family("count", "total"), epoch, 1, 1, "d", (WHOLE,))
    return Commit(Epoch(epoch), Attempt(attempt), (ref,), (), (), {"count": 1}, Epoch(max(0, epoch - retain)))


def run(journal: Journal, first: int, last: int) -> None:
    for epoch in range(first, last + 1):
        journal.append(plan(epoch))
        journal.append(commit(epoch))


def test_a_journal_read_again_is_the_same_history() -> None:
    store = open_store("memory://")
    written = Journal.open(store)
    written.claim()
    run(written, 0, 99)
    read = Journal.open(store)
    assert read.history == written.history
    assert read.next_number == written.next_number
    assert history_at(store, Epoch(97)).epoch == 97
    assert len(list(history_at(store, Epoch(97)).manifest.segments())) == 98


def test_a_newer_claim_fences_the_older_driver_at_its_next_entry() -> None:
    store = open_store("memory://")
    old = Journal.open(store)
    old.claim()
    run(old, 0, 1)
    old.append(plan(2))
    new = Journal.open(store)
    new.claim()
    with pytest.raises(Fenced, match="generation 1.*replaced.*generation 2"):
        old.append(commit(2))
    assert Journal.open(store).history.epoch == 1


def test_two_drivers_that_claim_at_once_get_two_generations() -> None:
    store = open_store("memory://")
    first, second = Journal.open(store), Journal.open(store)
    first.claim()
    second.claim()
    assert (first.history.generation, second.history.generation) == (1, 2)
    with pytest.raises(Fenced):
        first.append(plan(0))


@pytest.mark.parametrize("mode", ["lose", "refuse"])
def test_a_create_whose_reply_is_lost_is_resolved_by_reading_back(mode: str) -> None:
    store = open_store("memory://")
    journal = Journal.open(store)
    journal.claim()
    journal.append(plan(0))
    journal.store = FaultyStore(store, fail_at=1, mode=mode)
    if mode == "lose":
        journal.append(commit(0))
        assert journal.history.epoch == 0
    else:
        with pytest.raises(journal_module.StoreUnavailable):
            journal.append(commit(0))
        assert Journal.open(store).history.epoch == -1


def test_a_driver_that_slept_while_its_number_was_deleted_is_still_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://")
    old = Journal.open(store)
    old.claim()
    run(old, 0, 0)
    new = Journal.open(store)
    new.claim()
    run(new, 1, 80)
    monkeypatch.setattr(journal_module, "KEEP_S", -1.0)
    gone = new.obsolete()
    assert names.journal_entry(old.next_number) in gone
    store.delete(gone)
    monkeypatch.setattr(journal_module, "LOOK_AGAIN_S", -1.0)  # it slept longer than this
    with pytest.raises(Fenced):
        old.append(plan(1))
    assert Journal.open(store).history == new.history


def test_deleting_what_is_obsolete_leaves_every_retained_epoch_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "KEEP_S", -1.0)
    store = open_store("memory://")
    journal = Journal.open(store)
    journal.claim()
    run(journal, 0, 130)
    store.delete(journal.obsolete())
    assert sum(1 for _ in store.list(names.JOURNAL)) < 100
    assert Journal.open(store).history == journal.history
    for epoch in range(126, 131):
        assert history_at(store, Epoch(epoch)).epoch == epoch


def test_nothing_young_is_obsolete() -> None:
    journal = Journal.open(open_store("memory://"))
    journal.claim()
    run(journal, 0, 80)
    assert journal.obsolete() == []


def test_an_entry_with_any_bit_flipped_is_refused() -> None:
    store = open_store("memory://")
    journal = Journal.open(store)
    journal.claim()
    data = bytes(store.get(names.journal_entry(0)) or b"")
    envelope, digest = decode_entry("e", data)
    assert encode_entry(envelope) == (data, digest)
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        with pytest.raises(DamagedObject):
            decode_entry("e", flipped)
        with pytest.raises(DamagedObject):
            decode_entry("e", data[:at])


def test_an_entry_that_was_replaced_by_a_well_formed_one_breaks_the_chain() -> None:
    stores: list[ObjectStore] = []
    for _ in range(2):
        store = open_store("memory://")
        journal = Journal.open(store)
        journal.claim()
        run(journal, 0, 2)
        stores.append(store)
    name = names.journal_entry(3)
    stores[0].delete([name])
    stores[0].create(name, bytes(stores[1].get(name) or b""))
    with pytest.raises(DamagedObject, match="successor"):
        Journal.open(stores[0])


def test_impossible_entries_are_refused_before_they_are_written() -> None:
    journal = Journal.open(open_store("memory://"))
    journal.claim()
    with pytest.raises(InvariantViolation):
        journal.append(commit(0))
    journal.append(plan(0))
    with pytest.raises(InvariantViolation):
        journal.append(plan(0, 1))
    with pytest.raises(InvariantViolation):
        journal.append(Abort(Epoch(0), Attempt(7), "not this one"))
    journal.append(Abort(Epoch(0), Attempt(0), "why not"))
    with pytest.raises(InvariantViolation):
        journal.append(plan(1))
    journal.append(plan(0, 1))


def test_the_journal_takes_exactly_the_entries_of_its_table() -> None:
    resting = History().after(Claim(Generation(1), "me"))
    running = resting.after(plan(0))
    entries = {
        "Claim": Claim(Generation(2), "you"),
        "Plan": plan(0),
        "Abort": Abort(Epoch(0), Attempt(0), "why not"),
        "Commit": commit(0),
    }
    for state, history in (("resting", resting), ("running", running)):
        for kind, entry in entries.items():
            if (state, kind) in TRANSITIONS:
                after = history.after(entry)
                assert ("resting" if after.plan is None else "running") == TRANSITIONS[(state, kind)]
            else:
                with pytest.raises(InvariantViolation, match=f"{kind} cannot follow while {state}"):
                    history.after(entry)


def test_a_driver_that_sleeps_right_after_a_create_is_fenced_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still for it until it has written, then jumps: it must look before its next entry counts."""
    store, now = open_store("memory://"), [0.0]
    monkeypatch.setattr(journal_module, "_clock", lambda: now[0])
    old = Journal.open(store)
    old.claim()
    run(old, 0, 0)
    inner = old.store.create

    class Sleepy(FaultyStore):
        def create(self, name: str, data: object) -> bool:
            written = inner(name, data)  # type: ignore[arg-type]
            if self.fail_at:
                self.fail_at = 0
                new = Journal.open(store)
                new.claim()
                new.append(Abort(Epoch(1), Attempt(0), "the driver that planned it has ended"))
                new.append(plan(1, 1))
                new.append(commit(1, 1))
                run(new, 2, 80)
                monkeypatch.setattr(journal_module, "KEEP_S", -1.0)
                store.delete(new.obsolete())
                now[0] += 10_000.0
            return written

    old.store = Sleepy(store, fail_at=1)
    with pytest.raises(Fenced):
        old.append(plan(1))
        old.append(commit(1))


def test_a_store_of_another_format_is_refused_with_advice() -> None:
    store = open_store("memory://")
    store.put(names.FORMAT, b'{"millstream": 99}')
    with pytest.raises(UserError, match="format version 99, this Millstream reads version 6"):
        Journal.open(store)
    store.put(names.FORMAT, b"nonsense")
    with pytest.raises(DamagedObject, match="format"):
        Journal.open(store)


def test_a_format_of_which_a_bit_is_flipped_is_refused() -> None:
    store = open_store("memory://")
    Journal.open(store).claim()
    written = bytes(store.get(names.FORMAT) or b"")
    for place in range(len(written)):
        for bit in (0, 3, 7):
            damaged = bytearray(written)
            damaged[place] ^= 1 << bit
            store.delete([names.FORMAT])
            store.put(names.FORMAT, damaged)
            with pytest.raises((DamagedObject, UserError), match="format"):
                Journal.open(store)


def test_an_older_format_without_a_digest_is_named_by_its_version() -> None:
    store = open_store("memory://")
    store.put(names.FORMAT, b'{"millstream":5,"id":"3f9c0d5e7a1b2c48"}\n')
    with pytest.raises(UserError, match="format version 5, this Millstream reads version 6"):
        Journal.open(store)


def test_a_store_that_lost_its_format_is_refused() -> None:
    store = open_store("memory://")
    Journal.open(store).claim()
    store.delete([names.FORMAT])
    with pytest.raises(DamagedObject, match="format"):
        Journal.open(store)


@pytest.mark.parametrize("dies", ["after its snapshot", "after its claim", "after its plan"])
def test_a_driver_that_dies_at_every_start_makes_no_start_slower_without_end(dies: str) -> None:
    """No epoch is ever committed, so entries pile up: snapshots keep what a start reads within bounds."""
    inner = open_store("memory://")
    operations = []
    for number in range(5 * SNAPSHOT_EVERY):
        counted = FaultyStore(inner)
        journal = Journal.open(counted)
        operations.append(counted.operations)
        if dies == "after its snapshot" and journal.next_number == SNAPSHOT_EVERY - 1:
            counted.fail_at, counted.mode = counted.operations + 2, "crash"
            with pytest.raises(Crash):
                journal.claim()
            continue
        journal.claim()
        assert journal.history.generation == number + 1
        left = journal.history.plan
        if left is not None:
            journal.append(Abort(left.epoch, left.attempt, "died"))
        if dies == "after its plan":
            assert journal.history.attempts == number
            journal.append(plan(0, number))
    assert max(operations) <= SNAPSHOT_EVERY + 8


def test_entries_are_kept_while_the_snapshot_that_replaces_them_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(journal_module, "KEEP_S", -1.0)
    store = open_store("memory://")
    journal = Journal.open(store)
    journal.claim()
    run(journal, 0, 99)
    whole = journal.obsolete()
    assert names.journal_entry(0) in whole
    for item in list(store.list(names.SNAPSHOTS)):
        store.delete([item.name])
        store.put(item.name, b"damaged")
    assert journal.obsolete() == []


# -- those who only look


def test_a_reader_sees_what_the_driver_has_written_and_writes_nothing() -> None:
    store = open_store("memory://")
    driver = Journal.open(store)
    driver.claim()
    told: list[str] = []
    reader = JournalReader.look(store, lambda envelope: told.append(envelope.kind))
    run(driver, 0, SNAPSHOT_EVERY)
    before = sorted(item.name for item in store.list(""))
    reader.follow()
    assert reader.history == driver.history
    assert told == ["Claim", *["Plan", "Commit"] * (SNAPSHOT_EVERY + 1)]
    assert sorted(item.name for item in store.list("")) == before


def test_a_reader_goes_on_from_where_it_was() -> None:
    counted = FaultyStore(open_store("memory://"))
    driver = Journal.open(counted.inner)
    driver.claim()
    run(driver, 0, 20)
    reader = JournalReader.look(counted)
    counted.operations = 0
    reader.follow()
    assert counted.operations == 1, "it looks for the next entry alone"


def test_a_reader_that_slept_does_not_believe_what_stands_in_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("memory://")
    driver = Journal.open(store)
    driver.claim()
    reader, now = JournalReader.look(store), journal_module._clock()
    asleep = Journal.open(store)
    asleep._generation = driver._generation
    run(driver, 0, 2 * SNAPSHOT_EVERY)
    monkeypatch.setattr(journal_module, "KEEP_S", -1.0)
    store.delete(driver.obsolete())
    with pytest.raises(Fenced):
        monkeypatch.setattr(journal_module, "_clock", lambda: now + journal_module.LOOK_AGAIN_S + 1)
        asleep.append(plan(0))  # its number is free again, and the entry counts for nobody
    reader.follow()
    assert reader.history == driver.history


def test_looking_at_what_is_no_store_makes_none() -> None:
    store = open_store("memory://")
    with pytest.raises(UserError, match="there is no query in the store"):
        JournalReader.look(store)
    assert list(store.list("")) == []
    Journal.open(store)
    with pytest.raises(UserError, match="none was ever started"):
        JournalReader.look(store)


def damaged_snapshot(store: ObjectStore, number: int) -> str:
    """Damages the snapshot of this place, from the newest on; its name."""
    name = sorted((item.name for item in store.list(names.SNAPSHOTS)), key=names.snapshot_number)[-1 - number]
    data = bytearray(store.get(name) or b"")
    data[len(data) // 2] ^= 1
    store.delete([name])
    store.put(name, data)
    return name


@pytest.mark.parametrize("newest", [True, False])
def test_a_damaged_snapshot_is_passed_over(newest: bool, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store("memory://")
    written = Journal.open(store)
    written.claim()
    run(written, 0, 150)
    many = sum(1 for _ in store.list(names.SNAPSHOTS))
    assert many > 2
    name = damaged_snapshot(store, 0 if newest else 1)
    read = Journal.open(store)
    assert read.history == written.history
    assert history_at(store, Epoch(149)).epoch == 149
    if newest:
        assert f"{name} is damaged: found digest" in caplog.text
        read.claim()
        assert sum(1 for _ in store.list(names.SNAPSHOTS)) == many + 1, "another one is written at once"
        caplog.clear()
        assert Journal.open(store).history == read.history
    assert caplog.text == "", "and nobody looks at the damaged one again"


def test_all_snapshots_may_be_damaged_while_all_entries_are_there() -> None:
    store = open_store("memory://")
    written = Journal.open(store)
    written.claim()
    run(written, 0, 150)
    for number in range(sum(1 for _ in store.list(names.SNAPSHOTS))):
        damaged_snapshot(store, number)
    assert Journal.open(store).history == written.history


def test_a_damaged_snapshot_whose_entries_are_gone_is_refused() -> None:
    store = open_store("memory://")
    written = Journal.open(store)
    written.claim()
    run(written, 0, 150)
    for number in range(sum(1 for _ in store.list(names.SNAPSHOTS))):
        damaged_snapshot(store, number)
    store.delete([names.journal_entry(0)])
    with pytest.raises(DamagedObject, match="snapshots/"):
        Journal.open(store)


def test_a_format_that_has_lost_its_digest_is_refused() -> None:
    store = open_store("memory://")
    Journal.open(store).claim()
    line = bytes(store.get(names.FORMAT) or b"").partition(b"\n")[0]
    store.delete([names.FORMAT])
    store.put(names.FORMAT, line + b"\n")
    with pytest.raises(DamagedObject, match="format"):
        Journal.open(store)
