"""The control log: durable, ordered, heard as what it is, whatever somebody puts there."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DamagedObject, StoreUnavailable, UserError
from millstream.protocol.epochs import History
from millstream.protocol.keyspace import Range
from millstream.protocol.migration import MigrationPlan, Move, Start
from millstream.protocol.routing import RoutingVersion, Slot
from millstream.protocol.steering import Cancel, Heard, Outcome
from millstream.store import control_log, garbage, names
from millstream.store.control_log import ControlLog
from millstream.store.garbage import old_commands
from millstream.store.objects import ObjectStore, open_store
from millstream.testing import FaultyStore

PLAN = MigrationPlan(
    "id",
    "rescale",
    {"count": RoutingVersion(3)},
    ((Move("count", Range(0, 2**64 - 1), Slot(0), Slot(1), 12),),),
    gap=2,
    start=Start(epoch=7),
    strategy="Fluid()",
    bin_bits={"count": 8},
    drains="w1",
)


@pytest.fixture
def store() -> ObjectStore:
    return open_store("memory://")


def heard(log: ControlLog, number: int = 0) -> Heard:
    found = log.hear(number)
    assert found is not None
    return found


def stored(store: ObjectStore, number: int = 0) -> dict[str, Any]:
    found = store.get(names.command(number))
    assert found is not None
    decoded: dict[str, Any] = msgspec.json.decode(bytes(found))
    return decoded


# -- sending and hearing


def test_what_was_sent_is_heard_as_it_was(store: ObjectStore) -> None:
    log = ControlLog(store)
    assert [log.send("rescale", PLAN), log.send("cancel", Cancel(0))] == [0, 1]
    first, second = heard(log, 0), heard(log, 1)
    assert (first.verb, first.ask, first.trouble) == ("rescale", PLAN, "")
    assert (second.verb, second.ask, second.trouble) == ("cancel", Cancel(0), "")
    assert "@" in first.sender
    assert first.at_ms > 0
    assert log.hear(2) is None


def test_senders_at_once_get_a_number_each(store: ObjectStore) -> None:
    numbers: list[int] = []
    barrier = threading.Barrier(8)

    def send(which: int) -> None:
        barrier.wait()
        numbers.append(ControlLog(store).send("cancel", Cancel(which)))

    threads = [threading.Thread(target=send, args=(which,)) for which in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(8))
    asks = [heard(ControlLog(store), number).ask for number in range(8)]
    assert sorted(ask.number for ask in asks if isinstance(ask, Cancel)) == list(range(8)), "each is there once"


@pytest.mark.parametrize("mode", ["refuse", "lose"])
def test_a_command_whose_reply_was_lost_is_there_once(store: ObjectStore, mode: str) -> None:
    clean = FaultyStore(store)
    ControlLog(clean).send("cancel", Cancel(0))
    for operation in range(1, clean.operations + 1):
        faulty = FaultyStore(store, operation, mode)
        before = len(list(store.list(names.CONTROL)))
        try:
            number = ControlLog(faulty).send("cancel", Cancel(operation))
        except StoreUnavailable:
            assert len(list(store.list(names.CONTROL))) == before, "an error means that nothing was sent"
        else:
            assert number == before
            assert heard(ControlLog(store), number).ask == Cancel(operation)
            assert len(list(store.list(names.CONTROL))) == before + 1


def test_numbers_go_on_where_the_driver_has_heard(store: ObjectStore) -> None:
    log = ControlLog(store)
    assert log.send("cancel", Cancel(0), from_number=40) == 40
    assert log.send("cancel", Cancel(0), from_number=40) == 41


def test_strangers_in_the_folder_do_not_lead_commands_astray(store: ObjectStore) -> None:
    for name in ("control/notes.txt", "control/12", "control/sub/00000000000000000003", names.command(900)):
        store.put(name, b"?")
    assert ControlLog(store).send("cancel", Cancel(0)) == 0


def test_a_plan_that_is_too_large_is_refused_before_it_is_sent(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_log, "MAX_COMMAND_BYTES", 1100)
    with pytest.raises(UserError, match="a command may have 1,100"):
        ControlLog(store).send("rescale", PLAN)
    assert not list(store.list(names.CONTROL))


# -- what cannot be a command


def whole(**changed: Any) -> bytes:
    asked = {"kind": "Cancel", "body": {"number": 3}}
    return msgspec.json.encode({"number": 0, "nonce": "n", "verb": "v", **asked, "sender": "s", "at_ms": 5, **changed})


def body(**changed: Any) -> bytes:
    return whole(kind="MigrationPlan", body={**msgspec.to_builtins(PLAN), **changed})


DEEP = b'{"number":0,"nonce":"","verb":"v","kind":"Cancel","body":' + b"[" * 10**5 + b"]" * 10**5 + b"}"


@pytest.mark.parametrize(
    ("data", "trouble"),
    [
        (b"", "cannot be read as a command"),
        (b"hello", "cannot be read as a command"),
        (b"\xff\xfe\x00", "cannot be read as a command"),
        (b"[1, 2]", "Expected `object`"),
        (b"{}", "missing required field"),
        (DEEP, "cannot be read as a command"),
        (whole(number=4), "it says that it is command 4, and stands at 0"),
        (whole(number="0"), "Expected `int`"),
        (whole(kind="Shutdown"), "it is a 'Shutdown', expected one of MigrationPlan, Cancel"),
        (whole(kind="MigrationPlan"), "its MigrationPlan cannot be read"),
        (whole(body=None), "its Cancel cannot be read"),
        (whole(seal="\u00e9"), "sealed with a token"),
        (whole(verb="a\n\x1b[31mred" + "x" * 100, body=3), "its Cancel cannot be read"),
        (body(rounds=[[{"step": "count", "range": {"first": 9, "last": 3}, "origin": 0, "target": 1}]]), "not a range"),
        (body(gap="1"), "Expected `int`"),
        (body(gap=2**63), "beyond 64 bits"),
        (body(start={"clock_ms": -(10**4000)}), "beyond 64 bits"),
        (body(versions={"count": 10**4000}), "beyond 64 bits"),
        (body(rounds=[[{**msgspec.to_builtins(PLAN.rounds[0][0]), "target": 2**64}]]), "beyond 64 bits"),
        (whole(body={"number": 10**4000}), "beyond 64 bits"),
        (whole().replace(b'"number":3', b'"number":' + b"9" * 5000), "out of range"),
        (body(versions=[1]), "Expected `object`"),
    ],
    ids=str,
)
def test_what_is_no_command_is_heard_as_one_that_makes_no_sense(store: ObjectStore, data: bytes, trouble: str) -> None:
    store.put(names.command(0), data)
    found = heard(ControlLog(store))
    assert found.ask is None
    assert trouble in found.trouble
    assert found.verb.isprintable()
    assert len(found.verb) <= 40
    assert found.trouble.isprintable()
    assert len(found.trouble) < 600


def test_what_is_too_large_is_not_decoded(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(names.command(0), whole())
    assert heard(ControlLog(store)).ask == Cancel(3)
    monkeypatch.setattr(control_log, "MAX_COMMAND_BYTES", 50)
    assert "bytes, more than 50" in heard(ControlLog(store)).trouble


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["number", "nonce", "verb", "kind", "body", "sender", "at_ms", "seal", "other"])
ODD = st.dictionaries(FIELDS, JSON, max_size=3)
CHANGED_PLANS = st.dictionaries(
    st.sampled_from(["store", "verb", "versions", "rounds", "gap", "start", "strategy", "bin_bits", "drains"]), JSON
)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.binary(), ODD.map(lambda odd: whole(**odd)), CHANGED_PLANS.map(lambda odd: body(**odd))))
def test_nothing_that_stands_in_the_log_raises(data: bytes) -> None:
    store = open_store("memory://")
    store.put(names.command(0), data)
    found = heard(ControlLog(store))
    assert (found.ask is None) == bool(found.trouble)
    msgspec.json.decode(msgspec.json.encode(found.sender + found.verb + found.trouble))
    assert 0 <= found.at_ms < 1 << 53


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 7))
def test_a_bit_that_is_not_as_it_was_sealed_is_noticed(place: int, bit: int) -> None:
    changed = bytearray(_SENT)
    changed[place % len(changed)] ^= 1 << bit
    _SEALED.store.delete([names.command(0)])
    _SEALED.store.put(names.command(0), bytes(changed))
    assert heard(_SEALED).ask is None


_SEALED = ControlLog(open_store("memory://"), "secret")
_SEALED.guard()
_SEALED.send("cancel", Cancel(3))
_SENT = bytes(_SEALED.store.get(names.command(0)) or b"")


# -- tokens


def test_a_guarded_store_takes_commands_with_its_token_only(store: ObjectStore) -> None:
    driver = ControlLog(store, "secret")
    driver.guard()
    ControlLog(store, "secret").guard()
    assert heard(driver, ControlLog(store, "secret").send("cancel", Cancel(1))).ask == Cancel(1)
    with pytest.raises(UserError, match="is guarded: give the token"):
        ControlLog(store).send("cancel", Cancel(1))
    with pytest.raises(UserError, match="is not the token"):
        ControlLog(store, "Secret").send("cancel", Cancel(1))
    with pytest.raises(UserError, match="is guarded: give the token"):
        ControlLog(store).guard()
    assert len(list(store.list(names.CONTROL))) == 1


def test_a_token_that_nobody_wants_is_refused(store: ObjectStore) -> None:
    with pytest.raises(UserError, match="is not guarded, so a token means nothing"):
        ControlLog(store, "secret").send("cancel", Cancel(1))
    assert not list(store.list(names.CONTROL))


def test_a_command_that_was_put_past_the_guard_is_refused(store: ObjectStore) -> None:
    driver = ControlLog(store, "secret")
    driver.guard()
    store.put(names.command(0), whole())
    assert "not sealed with the token" in heard(driver).trouble
    store.put(names.command(1), msgspec.json.encode({**stored(store), "number": 1, "seal": "0" * 64}))
    assert "not sealed with the token" in heard(driver, 1).trouble


def test_a_sealed_command_can_be_neither_repeated_nor_taken_elsewhere(store: ObjectStore) -> None:
    driver = ControlLog(store, "secret")
    driver.guard()
    driver.send("cancel", Cancel(1))
    again = {**stored(store), "number": 1}
    store.put(names.command(1), msgspec.json.encode(again))
    assert "not sealed" in heard(driver, 1).trouble, "the number is part of what is sealed"
    other = open_store("memory://")
    elsewhere = ControlLog(other, "secret")
    elsewhere.guard()
    other.put(names.command(0), bytes(store.get(names.command(0)) or b""))
    assert "not sealed" in heard(elsewhere).trouble, "so is the store"


def test_the_token_lies_nowhere_in_the_store(store: ObjectStore) -> None:
    log = ControlLog(store, "hush-hush")
    log.guard()
    log.send("cancel", Cancel(1))
    for item in [*store.list(names.CONTROL), *store.list("")]:
        assert b"hush" not in bytes(store.get(item.name) or b"")


@pytest.mark.parametrize("data", [b"", b"{}", b'{"salt":1,"check":2}', b"[" * 10**5])
def test_a_damaged_guard_is_named(store: ObjectStore, data: bytes) -> None:
    store.put(names.GUARD, data)
    with pytest.raises(DamagedObject, match="control-guard"):
        ControlLog(store, "secret").check_token()


# -- letting go


def test_commands_are_deleted_when_they_are_over_and_old(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ControlLog(store)
    for _ in range(6):
        log.send("cancel", Cancel(0))
    store.put("control/notes.txt", b"mine")
    over, live = Outcome(1, "cancel", "refused"), Outcome(2, "move", "running")
    history = History(control=5, outcomes={1: over, 2: live})
    assert old_commands(store, history) == [], "none is old"
    monkeypatch.setattr(garbage, "KEEP_S", -1.0)
    assert sorted(old_commands(store, history)) == [names.command(number) for number in (0, 1, 3)]
    store.delete(old_commands(store, history))
    assert old_commands(store, history) == []
    assert log.send("cancel", Cancel(0), history.control) == 6
    assert old_commands(store, replace(history, control=0)) == []
