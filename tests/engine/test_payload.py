"""Payloads: one per slot, a receipt over all of them, and a size that is bounded whatever a lane holds."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millstream.engine.payload import Head, Part, decode, encode, in_order, receipts_of
from millstream.errors import DamagedObject, InvariantViolation
from millstream.protocol.epochs import Report
from millstream.store import names
from millstream.store.objects import open_store

MAKER = names.Maker(1, 7, "a", 0)


def body(size: int, fill: int) -> pa.Buffer:
    return pa.py_buffer(bytes([fill]) * size)


def parts(*slots: list[tuple[int, pa.Buffer]]) -> list[list[Part]]:
    return [[Part(lane, "0.3", data) for lane, data in mine] for mine in slots]


def test_what_is_encoded_is_decoded_and_every_slot_sees_the_same_receipt() -> None:
    store = open_store("memory://")
    sent = parts([(0, body(16, 1)), (2, body(8, 2))], [], [(1, body(24, 3))])
    decoded = [decode(payload) for payload in encode(sent, "0.3", store, MAKER)]
    assert [[(p.lane, p.producer, p.read(store).to_pybytes()) for p in found] for _, found in decoded] == [
        [(p.lane, p.producer, p.read(store).to_pybytes()) for p in mine] for mine in sent
    ]
    assert {head.producer for head, _ in decoded} == {"0.3"}
    assert len({head.receipt for head, _ in decoded}) == 1


def test_a_receipt_changes_with_any_byte_for_any_slot() -> None:
    store = open_store("memory://")

    def receipt(*sent: list[tuple[int, pa.Buffer]], report: int = 0) -> str:
        reports = {0: [Report(report, {})]}
        return decode(next(iter(encode(parts(*sent), "0.0", store, MAKER, reports))))[0].receipt

    base = receipt([(0, body(8, 1))], [(0, body(8, 1))])
    assert base == receipt([(0, body(8, 1))], [(0, body(8, 1))])
    assert base != receipt([(0, body(8, 1))], [(0, body(8, 2))])
    assert base != receipt([(0, body(8, 1))], [(1, body(8, 1))])
    assert base != receipt([(0, body(8, 1)), (0, body(8, 1))], [])
    assert base == receipt([(0, body(8, 1))], [(0, body(8, 1))], report=7), "a report is not what was produced"


def test_no_payload_outgrows_its_limit_however_many_parts_it_has() -> None:
    store = open_store("memory://")
    sent = parts([(lane, body(1000, lane)) for lane in range(50)])
    [payload] = encode(sent, "0.0", store, MAKER, inline_limit=4000)
    assert len(payload) < 4000 + 50 * 150
    assert sum(1 for _ in store.list(names.OVERFLOW)) == 46
    _, found = decode(payload)
    assert [part.read(store).to_pybytes() for part in found] == [part.read(store).to_pybytes() for part in sent[0]]
    [again] = encode([found], "1.0", store, MAKER, inline_limit=4000)
    assert sum(1 for _ in store.list(names.OVERFLOW)) == 46, "what is passed on is not stored again"
    store.delete([item.name for item in store.list(names.OVERFLOW)])
    with pytest.raises(DamagedObject, match="overflow/"):
        decode(again)[1][-1].read(store)


def test_payloads_are_ordered_by_number_not_by_text() -> None:
    assert sorted(["1.0", "0.10", "0.2", "0.1"], key=in_order) == ["0.1", "0.2", "0.10", "1.0"]


def test_one_slot_that_sees_two_versions_of_a_producer_is_our_bug() -> None:
    with pytest.raises(InvariantViolation, match=r"received producer 0\.1 twice"):
        receipts_of([Head("0.1", "a", [], []), Head("0.1", "b", [], [])])
