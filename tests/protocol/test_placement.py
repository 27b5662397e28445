"""Placement: slots stay, workers are used, and a worker that is drained empties."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from millstream.protocol.placement import place

names = st.sets(st.integers(0, 8).map(str), min_size=1, max_size=6)


@given(st.sets(st.integers(0, 30), max_size=20), names, names, st.sets(st.integers(0, 8).map(str)), st.data())
def test_slots_stay_and_those_without_a_place_go_to_the_emptiest(
    slots: set[int], old: set[str], new: set[str], closing: set[str], data: st.DataObject
) -> None:
    before = place(sorted(slots), old, {})
    kept = {slot for slot in slots if data.draw(st.booleans())} | set(data.draw(st.sets(st.integers(31, 35))))
    placed = place(sorted(kept), new, before, old, closing)
    assert set(placed) == kept
    assert set(placed.values()) <= new
    opened = new - closing or new
    load = Counter(placed.values())
    for slot, worker in placed.items():
        if worker in new - opened:
            assert before[slot] == worker, "a worker that is closing got a slot"
        if before.get(slot) in new and worker != before[slot]:
            assert worker in opened - old, "a slot has moved to a worker that was there before"
    for worker in opened - old:
        assert max(load[other] for other in opened) - load[worker] < 2, "a new worker has too little"
    assert placed == place(sorted(kept), new, placed, new, closing), "it is at rest"


def test_when_slots_go_the_others_stay() -> None:
    before = place(range(6), ["0", "1"], {})
    assert place([0, 2, 4], ["0", "1"], before, ["0", "1"]) == {0: "0", 2: "0", 4: "0"}
    assert place([0, 2, 4, 7], ["0", "1"], before, ["0", "1"])[7] == "1"


def test_a_new_worker_is_used_at_once_and_a_lost_ones_slots_are_shared_out() -> None:
    before = place(range(6), ["0", "1"], {})
    joined = place(range(6), ["0", "1", "2"], before, ["0", "1"])
    assert Counter(joined.values()) == {"0": 2, "1": 2, "2": 2}
    assert sum(joined[slot] != before[slot] for slot in range(6)) == 2
    assert Counter(place(range(6), ["1", "2"], joined, ["0", "1", "2"]).values()) == {"1": 3, "2": 3}


def test_a_worker_that_closes_keeps_what_it_has_until_it_is_closed() -> None:
    before = place(range(4), ["0", "1"], {})
    closing = place(range(5), ["0", "1"], before, closing=["0"])
    assert {slot: closing[slot] for slot in range(4)} == before
    assert closing[4] == "1"
    assert set(place(range(4), ["0", "1"], before, closed=["0"]).values()) == {"1"}
    assert place(range(2), ["0"], {}, closed=["0"]) == {0: "0", 1: "0"}, "there is no other"
    assert place(range(2), [], {}) == {}
