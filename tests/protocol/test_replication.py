"""Replica groups: who holds whose state, and from whom it takes it."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millstream.protocol.replication import Groups, by_load, replica_groups, upstream


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, str], dict[str, str]]:
    """Sizes of slots, where they run, and the hosts of workers."""
    workers = [f"w{i}" for i in range(draw(st.integers(1, 8)))]
    hosts = {worker: f"h{draw(st.integers(0, 3))}" for worker in workers}
    slots = range(draw(st.integers(0, 12)))
    placed = {slot: draw(st.sampled_from(workers)) for slot in slots}
    return {slot: draw(st.integers(0, 1000)) for slot in slots}, placed, hosts


def check(groups: Groups, placed: dict[int, str], hosts: dict[str, str], count: int) -> None:
    assert set(groups) == set(placed)
    for slot, members in groups.items():
        assert len(members) == len(set(members)) == min(count, len(hosts) - 1)
        assert placed[slot] not in members
        assert set(members) <= set(hosts)


@given(clusters(), st.integers(0, 4))
def test_every_slot_has_as_many_replicas_as_there_can_be_and_none_on_its_own_worker(
    cluster: tuple[dict[int, int], dict[int, str], dict[str, str]], count: int
) -> None:
    sizes, placed, hosts = cluster
    check(replica_groups(sizes, placed, hosts, count, {}), placed, hosts, count)


@given(clusters(), st.integers(1, 3))
def test_the_hosts_of_a_group_differ_as_far_as_there_are_hosts(
    cluster: tuple[dict[int, int], dict[int, str], dict[str, str]], count: int
) -> None:
    sizes, placed, hosts = cluster
    for slot, members in replica_groups(sizes, placed, hosts, count, {}).items():
        used = {hosts[worker] for worker in (placed[slot], *members)}
        assert len(used) == min(len(members) + 1, len(set(hosts.values())))


@given(clusters(), st.integers(1, 3))
def test_groups_stay_as_they_are_when_nothing_has_changed(
    cluster: tuple[dict[int, int], dict[int, str], dict[str, str]], count: int
) -> None:
    sizes, placed, hosts = cluster
    once = replica_groups(sizes, placed, hosts, count, {})
    again = replica_groups(sizes, placed, hosts, count, once)
    assert {slot: set(group) for slot, group in again.items()} == {slot: set(group) for slot, group in once.items()}


@given(st.integers(3, 8), st.integers(1, 2), st.data())
def test_only_the_replicas_of_a_lost_worker_move(workers: int, count: int, data: st.DataObject) -> None:
    hosts = {f"w{i}": f"h{i}" for i in range(workers)}
    placed = {slot: f"w{slot % workers}" for slot in range(4 * workers)}
    sizes = dict.fromkeys(placed, 100)
    before = replica_groups(sizes, placed, hosts, count, {})
    lost = data.draw(st.sampled_from(sorted(hosts)))
    left = {worker: host for worker, host in hosts.items() if worker != lost}
    moved = {slot: worker if worker != lost else before[slot][0] for slot, worker in placed.items()}
    after = replica_groups(sizes, moved, left, count, before)
    check(after, moved, left, count)
    for slot, members in after.items():
        kept = [worker for worker in before[slot] if worker in left and worker != moved[slot]]
        assert set(kept) <= set(members)


def test_replicas_are_spread_by_their_bytes() -> None:
    hosts = {f"w{i}": f"h{i}" for i in range(4)}
    placed = {slot: f"w{slot % 4}" for slot in range(16)}
    groups = replica_groups(dict.fromkeys(placed, 100), placed, hosts, 2, {})
    load = Counter(worker for members in groups.values() for worker in members)
    assert max(load.values()) - min(load.values()) <= 2


def test_a_worker_takes_from_the_member_before_it_and_around_one_that_is_gone() -> None:
    placed, groups = {7: "a"}, {7: ("b", "c")}
    assert upstream(7, "b", placed, groups) == ("a", "c")
    assert upstream(7, "c", placed, groups) == ("b", "a")
    assert upstream(7, "c", {}, groups) == ("b",), "the slot's own worker is gone"


def test_a_slot_whose_worker_is_gone_keeps_its_replicas_until_it_has_another() -> None:
    hosts = {f"w{i}": f"h{i}" for i in range(3)}
    placed, sizes = {0: "w0", 1: "w1", 2: "w2"}, {0: 9, 1: 9, 2: 9}
    before = replica_groups(sizes, placed, hosts, 1, {})
    left = {worker: host for worker, host in hosts.items() if worker != "w1"}
    assert replica_groups(sizes, placed, left, 1, before)[1] == before[1]


def test_a_worker_that_is_being_drained_holds_no_replicas_while_there_are_two_others() -> None:
    sizes, placed = {0: 5, 1: 5, 2: 5, 3: 5}, {0: "a", 1: "b", 2: "c", 3: "d"}
    hosts = {worker: f"host {worker}" for worker in "abcd"}
    before = replica_groups(sizes, placed, hosts, 1, {})
    assert "d" in {member for members in before.values() for member in members}
    groups = replica_groups(sizes, placed, hosts, 1, before, leaving=["d"])
    assert all(len(members) == 1 and "d" not in members for members in groups.values())
    stayed = [slot for slot in before if "d" not in before[slot]]
    assert all(groups[slot] == before[slot] for slot in stayed)
    two = {"a": "x", "d": "y"}
    assert replica_groups({0: 5}, {0: "a"}, two, 1, {}, leaving=["d"]) == {0: ("d",)}


@given(st.integers(0, 1 << 30))
def test_placement_by_load_costs_no_member_however_few_hosts_there_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workers = {f"w{number}": f"h{rng.integers(1 + number // 2)}" for number in range(int(rng.integers(3, 7)))}
    placed = {slot: f"w{rng.integers(len(workers))}" for slot in range(int(rng.integers(2, 12)))}
    history = {slot: rng.random(12).tolist() for slot in placed}
    groups = replica_groups({}, placed, workers, 2, {})
    moved = by_load(groups, placed, workers, history)
    assert {slot: len(members) for slot, members in moved.items()} == {slot: len(groups[slot]) for slot in groups}
    for slot, members in moved.items():
        assert placed[slot] not in members
        assert len(set(members)) == len(members)


@given(st.integers(0, 1 << 30))
def test_what_went_by_load_does_not_go_back_by_bytes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workers = {f"w{number}": f"h{number}" for number in range(int(rng.integers(3, 7)))}
    slots = range(int(rng.integers(4, 20)))
    placed = {slot: f"w{rng.integers(len(workers))}" for slot in slots}
    sizes = {slot: int(rng.integers(1, 1000)) for slot in slots}
    history = {slot: rng.random(12).tolist() for slot in slots}
    moved = by_load(replica_groups(sizes, placed, workers, 1, {}), placed, workers, history)
    assert replica_groups(sizes, placed, workers, 1, moved, slack=math.inf) == moved
