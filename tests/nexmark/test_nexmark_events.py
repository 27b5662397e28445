"""The NEXMark generator, in NumPy: proportions, ids, sizes and times are those of the parameters, however it is cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from millstream.errors import UserError
from millstream.nexmark import KINDS, SCHEMAS, Parameters, epochs, generate
from millstream.nexmark.events import rows_of, spark_hash
from millstream.nexmark.parameters import END, END_US, FIELDS, START, START_US, TOWNS

MANY = Parameters(events=50_000)
DISORDERED = Parameters(events=20_000, group=170, delayed=20, delay_us=2_000_000, dilation=30)


def us(table: pa.Table, column: str) -> Any:
    return table[column].cast(pa.int64()).to_numpy()


def test_one_person_three_auctions_and_46_bids_come_in_turn() -> None:
    assert [MANY.kind_of(position) for position in range(50)] == ["people"] + 3 * ["auctions"] + 46 * ["bids"]
    assert {kind: len(generate(MANY, kind)) for kind in KINDS} == {"people": 1000, "auctions": 3000, "bids": 46_000}


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_those_of_the_schema(kind: str) -> None:
    table = generate(Parameters(events=50), kind)
    assert table.column_names == [column.split()[0] for column in SCHEMAS[kind].split(", ")]
    assert not any(column.null_count for column in table.columns)


@pytest.mark.parametrize("kind", ["people", "auctions"])
def test_ids_count_up_from_1000(kind: str) -> None:
    ids = generate(MANY, kind)["id"].to_pylist()
    assert ids == list(range(1000, 1000 + len(ids)))


def test_all_but_one_in_two_bids_are_for_a_hot_auction_and_all_but_one_in_four_of_a_hot_bidder() -> None:
    bids = generate(MANY, "bids")
    auctions, bidders = bids["auction"].to_numpy() - 1000, bids["bidder"].to_numpy() - 1000
    turns = np.arange(len(bids)) // 46
    newest = 3 * turns + 2
    hot = auctions == newest // 100 * 100
    assert 0.49 < hot.mean() < 0.52
    assert (newest[~hot] - auctions[~hot]).max() == 99, "one of the hundred newest"
    assert (auctions >= 0).all()
    hot = bidders == np.minimum(turns // 100 * 100 + 1, turns)
    assert 0.74 < hot.mean() < 0.77
    assert ((bidders >= 0) & (bidders <= turns)).all(), "a bidder has come before"


def test_all_but_one_in_four_auctions_are_of_a_hot_seller_the_others_of_one_who_is_active() -> None:
    given = Parameters(events=50_000, active_people=40)
    auctions = generate(given, "auctions")
    sellers, turns = auctions["seller"].to_numpy() - 1000, np.arange(len(auctions)) // 3
    hot = sellers == turns // 100 * 100
    assert 0.73 < hot.mean() < 0.78
    assert (turns[~hot] - sellers[~hot]).max() == 39
    assert (turns - sellers).min() >= 0
    assert set(auctions["category"].to_pylist()) == {10, 11, 12, 13, 14}


def test_about_a_hundred_auctions_are_open_at_a_time() -> None:
    auctions = generate(MANY, "auctions")
    opens, expires = us(auctions, "ts"), us(auctions, "expires")
    assert (expires > opens).all()
    moments = np.linspace(opens[500], opens[-1], 50)
    open_then = [int(((opens <= moment) & (expires > moment)).sum()) for moment in moments]
    assert 85 < np.mean(open_then) < 115


@pytest.mark.parametrize(("kind", "size"), [("people", 200), ("auctions", 500), ("bids", 100)])
def test_records_have_the_size_that_was_asked_for(kind: str, size: int) -> None:
    def sizes(table: pa.Table) -> set[int]:
        columns = [column.to_pylist() for name, column in zip(table.column_names, table.columns, strict=True)][:-1]
        return {sum(len(value) if isinstance(value, str) else 8 for value in row) for row in zip(*columns, strict=True)}

    assert sizes(generate(Parameters(events=5000), kind)) == {size}
    small = Parameters(events=5000, person_bytes=0, auction_bytes=0, bid_bytes=0)
    assert set(generate(small, kind)["extra"].to_pylist()) == {""}


def test_prices_are_log_uniform_from_one_to_a_million() -> None:
    cents = generate(MANY, "bids")["price"].to_numpy()
    assert cents.min() >= 100
    assert cents.max() < 100_000_000
    decades = np.bincount(np.log10(cents / 100).astype(int), minlength=6) / len(cents)
    assert (np.abs(decades - 1 / 6) < 0.01).all()
    halves = np.log10(cents / 100) % 1 < 0.5
    assert abs(halves.mean() - 0.5) < 0.01, "within a decade, too"


def test_states_and_cities_belong_together_and_names_have_addresses() -> None:
    people = generate(MANY, "people").to_pylist()
    assert Counter((person["city"], person["state"]) for person in people).keys() == set(TOWNS)
    for person in people:
        assert person["email"].startswith(person["name"].lower().replace(" ", ".") + "@")
        assert len(person["credit_card"]) == 16
        assert person["credit_card"].isdigit()


def test_the_same_parameters_give_the_same_events_and_another_seed_others() -> None:
    again, other = Parameters(events=50_000), Parameters(events=50_000, seed=1)
    for kind in KINDS:
        assert generate(MANY, kind).equals(generate(again, kind))
        assert not generate(MANY, kind)["extra"].equals(generate(other, kind)["extra"])


@pytest.mark.parametrize("given", [Parameters(events=1000), Parameters(events=1000, group=130, delayed=5, delay_us=9)])
def test_events_do_not_depend_on_how_the_stream_is_cut(given: Parameters) -> None:
    whole = {kind: rows_of(generate(given, kind)) for kind in KINDS}
    for cuts in ([], [500], [1, 2, 3, 51, 52, 400, 999]):
        pieces = list(epochs(given, KINDS, cuts))
        assert len(pieces) == len(cuts) + 1
        assert {kind: [row for piece in pieces for row in piece[kind]] for kind in KINDS} == whole


def test_times_follow_the_rate_and_the_dilation() -> None:
    [first, *_, last] = us(generate(Parameters(events=10_050), "people"), "ts")
    assert (first, last) == (START_US, START_US + 1_000_000)
    [*_, last] = us(generate(Parameters(events=10_050, dilation=60), "people"), "ts")
    assert last == START_US + 60_000_000
    assert START.year == 2026


def test_groups_come_out_of_order_and_hold_the_same_events() -> None:
    plain, scrambled = Parameters(events=17_000), Parameters(events=17_000, group=170)
    numbers = [scrambled.number_of(position) for position in range(17_000)]
    assert sorted(numbers) == list(range(17_000))
    assert [number // 170 for number in numbers] == [position // 170 for position in range(17_000)]
    for kind in KINDS:
        one, two = (rows_of(generate(given, kind).drop_columns(["mark"])) for given in (plain, scrambled))
        assert one != two
        assert sorted(one) == sorted(two)


def test_so_many_events_of_a_hundred_are_delayed_by_no_more_than_was_said() -> None:
    late = Parameters(events=20_000, delayed=20, delay_us=2_000_000)
    bids, plain = (us(generate(given, "bids"), "ts") for given in (late, Parameters(events=20_000)))
    behind = plain - bids
    assert 0.18 < (behind > 0).mean() < 0.22
    assert 1_900_000 < behind.max() <= 2_000_000


@pytest.mark.parametrize("given", [MANY, DISORDERED, Parameters(events=5000, events_per_second=3_000_000)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_is_true_and_the_last_one_ends_time(given: Parameters, kind: str) -> None:
    table = generate(given, kind)
    times, marks = us(table, "ts"), us(table, "mark")
    to_come = np.minimum.accumulate(times[::-1])[::-1]
    assert (marks[:-1] <= to_come[1:]).all(), "nothing that follows is older"
    assert marks[-1] == END_US
    assert (marks[:-1] < END_US).all()
    assert table["mark"][-1].as_py() == END
    assert (np.diff(marks) >= 0).all()
    assert times.max() - marks[-2] < given.events_to_us(3 * 170) + given.delay_us + 1, "and it is not far behind"


def test_the_hash_is_that_of_spark() -> None:
    def expected(number: int, salt: int) -> int:
        seed = xxhash.xxh64(number.to_bytes(8, "little", signed=True), seed=42).intdigest()
        found = xxhash.xxh64(salt.to_bytes(8, "little"), seed=seed).intdigest()
        return found - (1 << 64) if found >= 1 << 63 else found

    numbers = [0, 1, 49, 10**12, -1]
    for salt in (0, 7, 12345):
        assert spark_hash(np.array(numbers), salt).tolist() == [expected(number, salt) for number in numbers]


def test_every_field_has_a_salt_of_its_own_for_every_seed() -> None:
    salts = [Parameters(seed=seed).salt(field) for seed in range(4) for field in FIELDS]
    assert len(set(salts)) == len(salts)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"events": 0}, "events=0; give a whole number of at least 1"),
        ({"events": 10}, "give at least 50"),
        ({"dilation": 1.5}, "dilation=1.5"),
        ({"hot_auctions": 0}, "hot_auctions=0"),
        ({"delayed": 101, "delay_us": 1}, "of a hundred"),
        ({"delayed": 5}, "delay_us"),
        ({"group": 7919}, "group=7919"),
        ({"events": 10**9, "dilation": 10**9}, "beyond the year 3000"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Parameters(**wrong)


def test_a_kind_that_does_not_exist_and_an_end_that_is_missing_are_named() -> None:
    with pytest.raises(UserError, match="no kind of events 'cars'"):
        generate(MANY, "cars")
    with pytest.raises(UserError, match="stop="):
        generate(Parameters(), "bids")
    assert len(generate(Parameters(), "bids", stop=100)) == 92
    with pytest.raises(UserError, match="no bids among 60 events in groups of 7869"):
        Parameters(events=60, group=7869).last_position("bids")
