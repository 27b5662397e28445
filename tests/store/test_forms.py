"""Values of older forms against a dictionary: whatever is written, deleted, merged, taken up and changed meanwhile."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millstream as ms
from millstream.errors import InvariantViolation, UserError
from millstream.model.carry import convert, lift_of
from millstream.model.kinds import State
from millstream.protocol.compaction import Job, choose
from millstream.protocol.keyspace import LAST, WHOLE, Range, clip, coalesce
from millstream.protocol.manifest import Edit, Family, Input, Manifest, Piece, SegmentRef
from millstream.store.due import due_between
from millstream.store.forms import NO_FORMS, Forms, LiftFailure, sealed, unpacked
from millstream.store.keys import KeyColumns, Mask, arrange
from millstream.store.least import least_between
from millstream.store.lookup import entries_of, locate
from millstream.store.merge import merge, newest_rows
from millstream.store.names import Maker
from millstream.store.objects import open_store
from millstream.store.rows import StateRows
from millstream.store.segments import SegmentCache, write_segments

FAMILY = Family("step", "state")
POISON = -1
"""What stands in the rows of what was deleted."""

ALLOWED: set[int] = set()
"""The numbers that a conversion may be given now."""
SEEN: list[int] = []
"""Those that conversions were given."""

# A value is a number in some clothes. As it goes from form to form it changes in a way that shows how often it did.
STEPS: tuple[Callable[[Any], Any], ...] = (lambda n: 3 * n + 1, lambda n: 2 * n + 0.5, lambda n: n - 7)


def in_form(number: int, form: int) -> Any:
    for step in STEPS[:form]:
        number = step(number)
    return number


ORIGINAL = [{in_form(number, form): number for number in range(5000)} for form in range(len(STEPS) + 1)]


def stepped(form: int, number: Any) -> Any:
    assert number != POISON, "what was deleted has been converted"
    SEEN.append(ORIGINAL[form][number])
    assert SEEN[-1] in ALLOWED, f"{SEEN[-1]} has been converted, though it is not there"
    return STEPS[form](number)


def plain_0(value: Any) -> Any:
    return stepped(0, value)


def plain_1(value: Any) -> Any:
    return stepped(1, value)


def plain_2(value: Any) -> Any:
    return stepped(2, value)


def dressed_0(value: Any) -> Any:
    return {"n": stepped(0, value["n"])}


def dressed_1(value: Any) -> Any:
    return {"n": stepped(1, value["n"]), "more": "x"}


def dressed_2(value: Any) -> Any:
    assert value["more"] == "x"
    return {"n": stepped(2, value["n"])}


PLAIN, DRESSED = (plain_0, plain_1, plain_2), (dressed_0, dressed_1, dressed_2)


@dataclass(frozen=True)
class Kind:
    """A kind of state in four forms, and how a number is dressed in one of them."""

    states: tuple[State, ...]
    fns: tuple[Callable[[Any], Any], ...] = PLAIN
    dress: Callable[[Any, int], Any] = lambda number, form: number
    undress: Callable[[Any], Any] = lambda value: value

    @property
    def subbed(self) -> bool:
        return self.states[0].subkey_type is not None

    def forms(self, current: int) -> Forms:
        forms = Forms(self.states[0].stored_type)
        for number in range(current):
            old, new = self.states[number], self.states[number + 1]
            lift = lift_of(convert(self.fns[number]), old, new)
            assert lift is not None
            forms = forms.then(lift, new.stored_type)
        return forms

    def stored(self, numbers: list[Any], form: int) -> pa.Array:
        """Numbers as they are stored in a form."""
        state = self.states[form]
        values = [self.dress(number, form) for number in numbers]
        if state.is_object:
            values = [pickle.dumps(value) for value in values]
        return pa.array([[value] for value in values] if isinstance(state, ms.Bag) else values, state.stored_type)

    def numbers(self, stored: pa.Array, form: int) -> list[Any]:
        state, values = self.states[form], stored.to_pylist()
        if isinstance(state, ms.Bag):
            values = [value for [value] in values]
        if state.is_object:
            values = [pickle.loads(value) for value in values]
        return [self.undress(value) for value in values]


def dressed(number: Any, form: int) -> Any:
    return {"n": number, "more": "x"} if form == 2 else {"n": number}


def undressed(value: Any) -> Any:
    return value["n"]


STRUCTS = ("struct<n: int>", "struct<n: long>", "struct<n: double, more: string>", "struct<n: double>")
NUMBERS = ("int", "long", "double", "double")
KINDS = {
    "value": Kind(tuple(ms.Value(kind, default=0) for kind in NUMBERS)),
    "struct": Kind(tuple(ms.Value(kind) for kind in STRUCTS), DRESSED, dressed, undressed),
    "object": Kind(tuple(ms.Value(object) for _ in NUMBERS), DRESSED, dressed, undressed),
    "map": Kind(tuple(ms.Map("string", kind) for kind in NUMBERS)),
    "map of objects": Kind(tuple(ms.Map("string", object) for _ in NUMBERS), DRESSED, dressed, undressed),
    "bag": Kind(tuple(ms.Bag(kind) for kind in NUMBERS)),
    "bag of structs": Kind(tuple(ms.Bag(kind) for kind in STRUCTS), DRESSED, dressed, undressed),
}
FOR_EVER = 2**63 - 1


class World:
    """A family and what should be in it: by key and subkey the number, and until when."""

    def __init__(self, kind: Kind, rng: random.Random, ttl: bool) -> None:
        self.kind, self.rng, self.ttl = kind, rng, ttl
        self.store, self.cache, self.manifest = open_store("memory://"), SegmentCache(), Manifest()
        self.model: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.form, self.forms, self.now, self.epoch, self.next = 0, NO_FORMS, 0, 0, 1
        self.ever: dict[int, int] = {}
        ALLOWED.clear()

    @property
    def packed(self) -> bytes:
        return pickle.dumps(self.forms) if self.form else b""

    def live(self) -> dict[tuple[Any, ...], int]:
        return {key: number for key, (number, until) in self.model.items() if until > self.now}

    def columns(self, keys: list[tuple[Any, ...]]) -> KeyColumns:
        columns = [pa.array([key[0] for key in keys], pa.string())]
        if self.kind.subbed:
            columns.append(pa.array([key[1] for key in keys], self.kind.states[0].subkey_type))
        return KeyColumns.canonical(columns)

    def hashes(self, keys: KeyColumns) -> Any:
        return KeyColumns(keys.columns[:1]).hashes()

    def change_form(self) -> None:
        self.form += 1
        self.forms = self.kind.forms(self.form)

    def some_keys(self) -> list[tuple[Any, ...]]:
        names = self.rng.sample("abcdefghij", self.rng.randrange(1, 7))
        if not self.kind.subbed:
            return [(name,) for name in names]
        if isinstance(self.kind.states[0], ms.Bag):
            return [(name, self.rng.choice([self.epoch, max(self.epoch - 1, 0)])) for name in names]
        return [(name, self.rng.choice(["x", "y"])) for name in names]

    def write(self, take_up: bool) -> None:
        """Writes and deletes under some keys; what is written may take up the newest segments."""
        changes = {key: None if self.rng.random() < 0.3 else self.number() for key in self.some_keys()}
        keys = self.columns(list(changes))
        hashes, subs = self.hashes(keys), keys.subs() if self.kind.subbed else None
        order, _ = arrange(hashes, keys, subs)
        until = np.array([self.now + self.rng.randrange(1, 9) if self.ttl else FOR_EVER for _ in changes])
        for (key, number), end in zip(changes.items(), until.tolist(), strict=True):
            self.model.pop(key, None)
            if number is not None:
                self.model[key] = number, end
                self.ever[number] = end
        numbers = [POISON if number is None else in_form(number, self.form) for number in changes.values()]
        rows = StateRows(
            hashes,
            keys,
            self.kind.stored(numbers, self.form),
            np.array([number is None for number in changes.values()]),
            subs,
            until if self.ttl else None,
        ).take(order)
        self.allow(self.live().values())
        pieces = self.manifest.pieces(FAMILY)
        taken = pieces[: self.rng.randrange(1, 3)] if take_up else []
        taken = taken if all(piece.ranges == (WHOLE,) for piece in taken) else []
        if taken:
            bottom = len(taken) == len(pieces)
            rows = newest_rows(self.store, self.cache, taken, [WHOLE], bottom, rows, self.now, self.forms)
        refs = self.written(rows)
        if taken:
            inputs = tuple(Input(piece.segment.name, piece.ranges) for piece in taken)
            self.manifest, _ = self.manifest.edited([Edit(FAMILY, (WHOLE,), inputs, tuple(refs))])
        else:
            self.manifest = self.manifest.added(refs)
        self.epoch += 1

    def number(self) -> int:
        self.next += 1
        return self.next

    def written(self, rows: StateRows) -> list[SegmentRef]:
        maker = Maker(1, self.epoch, "a", 0)
        return write_segments(
            self.store, self.cache, FAMILY, maker, 0, self.epoch, (WHOLE,), rows, form=self.form, filtered=True
        )

    def allow(self, numbers: Any) -> None:
        ALLOWED.clear()
        ALLOWED.update(numbers)

    def merge(self, job: Job) -> None:
        """A merge may meet what newer pieces have replaced; never what has expired or was deleted."""
        self.allow(number for number, until in self.ever.items() if until > self.now)
        edit = merge(
            self.store,
            self.cache,
            replace(job, now=self.now, forms=self.packed),
            Maker(1, self.epoch, "c", self.number()),
            0,
        )
        assert all(ref.form == self.form for ref in edit.outputs)
        self.manifest, _ = self.manifest.edited([edit])

    def merge_some(self) -> None:
        """Consecutive pieces, within a range."""
        pieces = self.manifest.pieces(FAMILY)
        orders = sorted({piece.segment.order for piece in pieces}, reverse=True)
        if not orders:
            return
        first = self.rng.randrange(len(orders))
        window = orders[first : first + self.rng.randrange(1, 4)]
        low, high = sorted(self.rng.sample(range(0, LAST, LAST // 16), 2))
        ranges = (WHOLE,) if self.rng.random() < 0.3 else (Range(low, high),)
        chosen = [piece for piece in pieces if piece.segment.order in window and clip(piece.ranges, ranges)]
        if chosen:
            covered = coalesce([part for piece in chosen for part in clip(piece.ranges, ranges)])
            self.merge(Job(FAMILY, covered, tuple(chosen), window[-1] == orders[-1]))

    def check(self) -> None:
        """Everything, and only that, is read; and nothing else is converted."""
        live, pieces = self.live(), self.manifest.pieces(FAMILY)
        expected = {key: in_form(number, self.form) for key, number in live.items()}
        self.allow(live.values())
        state = self.kind.states[self.form]
        rows = (
            newest_rows(self.store, self.cache, pieces, [WHOLE], True, now=self.now, forms=self.forms)
            if pieces
            else None
        )
        if rows is not None:
            assert dict(zip(self.listed(rows.keys), self.kind.numbers(rows.values, self.form), strict=True)) == expected
        asked = dict.fromkeys((name, *key[1:]) for name in "abcdefghijk" for key in self.model or self.some_keys())
        keys = self.columns(list(asked))
        subs = keys.subs() if self.kind.subbed else None
        order, _ = arrange(self.hashes(keys), keys, subs)
        keys, subs = keys.take(order), None if subs is None else subs[order]
        SEEN.clear()
        found = locate(self.store, self.cache, pieces, self.hashes(keys), keys, subs, self.now, self.forms)
        listed = self.listed(keys)
        assert found.present.tolist() == [key in expected for key in listed]
        assert not SEEN, "nothing was taken yet"
        if state.is_numpy:
            numbers = found.numbers(0, state.numpy_type).tolist()
            assert numbers == [expected.get(key, 0) for key in listed]
        else:
            there = found.only(np.flatnonzero(found.present)).arrow(state.stored_type)
            numbers = self.kind.numbers(there, self.form)
            assert numbers == [expected[key] for key in listed if key in expected]
        if self.kind.subbed:
            self.check_entries(pieces, expected, state)

    def check_entries(self, pieces: list[Piece], expected: dict[tuple[Any, ...], Any], state: State) -> None:
        names = KeyColumns.canonical([pa.array(self.rng.sample("abcdefghijk", 4))])
        order, _ = arrange(names.hashes(), names)
        names = names.take(order)
        listed = [name for (name,) in self.listed(names)]
        self.allow(number for key, number in self.live().items() if key[0] in listed)
        kinds = (state.subkey_type, state.stored_type)
        found = entries_of(self.store, self.cache, pieces, names.hashes(), names, kinds, self.now, self.forms)
        numbers = self.kind.numbers(found.values, self.form)
        entries = zip([listed[place] for place in found.places], found.subkeys.to_pylist(), strict=True)
        wanted = [key for name in listed for key in sorted(key for key in expected if key[0] == name)]
        assert list(zip(entries, numbers, strict=True)) == [(key, expected[key]) for key in wanted]

    def listed(self, keys: KeyColumns) -> list[tuple[Any, ...]]:
        return list(zip(*(column.to_pylist() for column in keys.columns), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ttl", [False, True], ids=["kept", "expiring"])
def test_any_history_with_changes_of_form_reads_as_a_dictionary(kind: str, ttl: bool, seed: int) -> None:
    for number in range(4):
        rng = random.Random(f"{seed} {kind} {ttl} {number}")
        world = World(KINDS[kind], rng, ttl)
        acts = ["write"] * 14 + ["take up"] * 5 + ["merge"] * 5 + ["choose"] * 5 + ["time"] * 5 * ttl
        acts += ["form"] * rng.randrange(1, 4)
        rng.shuffle(acts)
        for act in ["write", *acts]:
            if act == "form":
                world.change_form()
            elif act == "time":
                world.now += rng.randrange(1, 4)
            elif act == "merge":
                world.merge_some()
            elif act == "choose":
                job = choose(FAMILY, world.manifest.pieces(FAMILY), rng.randrange(500, 9000), 2, world.form)
                if job is not None:
                    world.merge(job)
            else:
                world.write(act == "take up")
            world.check()
        converted(world, 2500)


def converted(world: World, budget: int) -> int:
    """Merges until nothing is left to do; how many jobs it took."""
    jobs = 0
    before = world.manifest.bytes_below(FAMILY, world.form)
    while True:
        job = choose(FAMILY, world.manifest.pieces(FAMILY), budget, form=world.form)
        if job is None:
            break
        assert job.bytes <= budget * 1.01
        jobs += 1
        world.merge(job)
        left = world.manifest.bytes_below(FAMILY, world.form)
        assert left <= before
        assert jobs < 1000, "it does not end"
        before = left
        world.check()
    assert before == 0
    assert all(piece.segment.form == world.form for piece in world.manifest.pieces(FAMILY))
    return jobs


def test_one_large_segment_of_an_older_form_is_rewritten_a_budget_at_a_time() -> None:
    store, cache = open_store("memory://"), SegmentCache()
    keys = KeyColumns((pa.array(np.arange(20_000)),))
    order, _ = arrange(keys.hashes(), keys)
    rows = StateRows(
        keys.hashes()[order], keys.take(order), pa.array(np.arange(20_000)[order]), np.zeros(20_000, np.bool_)
    )
    refs = write_segments(store, cache, FAMILY, Maker(1, 0, "a", 0), 0, 0, (WHOLE,), rows)
    manifest = Manifest().added(refs)
    assert choose(FAMILY, manifest.pieces(FAMILY), 50_000) is None, "nothing else calls for it"
    forms = Forms(pa.float64(), (halved,))
    left = [manifest.bytes_below(FAMILY, 1)]
    assert left[0] == refs[0].bytes
    jobs = 0
    while (job := choose(FAMILY, manifest.pieces(FAMILY), 50_000, form=1)) is not None:
        jobs += 1
        assert job.bytes <= 50_500
        assert job.bottom
        edit = merge(store, cache, replace(job, forms=pickle.dumps(forms)), Maker(1, 0, "c", jobs), 0)
        manifest, _ = manifest.edited([edit])
        left.append(manifest.bytes_below(FAMILY, 1))
        found = locate(store, cache, manifest.pieces(FAMILY), rows.hashes, rows.keys, forms=forms)
        assert found.numbers(0.0, np.float64).tolist() == [n / 2 for n in rows.values.to_pylist()]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    assert jobs >= refs[0].bytes // 50_000


def halved(values: pa.Array) -> pa.Array:
    return pa.array([n / 2 for n in values.to_pylist()], pa.float64())


def test_merges_that_cannot_wait_go_before_conversions_and_convert() -> None:
    def piece(order: int, size: int, form: int) -> Piece:
        return Piece(SegmentRef(f"s{order}", FAMILY, order, 9, size, "", (WHOLE,), form=form), (WHOLE,))

    large = piece(0, 900, 0)
    few = choose(FAMILY, [*(piece(order, 10, 1) for order in range(4, 0, -1)), large], 1000, form=1)
    assert few is not None
    assert few.pieces == (large,)
    crowd = [piece(order, 10, 1) for order in range(8, 0, -1)]
    many = choose(FAMILY, [*crowd, large], 1000, form=1)
    assert many is not None
    assert many.pieces == tuple(crowd)
    assert not many.bottom
    assert choose(FAMILY, [*crowd[:3], large], 1000) is None


def test_a_run_of_an_older_form_between_others_is_rewritten_alone() -> None:
    def piece(order: int, form: int, *ranges: Range) -> Piece:
        return Piece(SegmentRef(f"s{order}", FAMILY, order, 9, 100, "", ranges, form=form), ranges)

    left, right = Range(0, LAST // 2), Range(LAST // 2 + 1, LAST)
    pieces = [piece(4, 2, WHOLE), piece(3, 1, WHOLE), piece(2, 0, left), piece(1, 2, right), piece(0, 1, WHOLE)]
    job = choose(FAMILY, pieces, 10_000, form=2)
    assert job is not None
    assert [each.segment.order for each in job.pieces] == [3, 2, 0]
    assert job.ranges == (left,), "on the right another one lies in between"
    assert job.bottom
    job = choose(
        FAMILY, [Piece(each.segment, clip(each.ranges, [right])) for each in pieces if each != pieces[2]], form=2
    )
    assert job is not None
    assert [each.segment.order for each in job.pieces] == [3]
    assert not job.bottom


def test_timers_are_found_by_their_times_whatever_the_form_of_their_payloads() -> None:
    old, new = ms.Timer(payload="long"), ms.Timer(payload="double")
    old.name = new.name = "t"
    store, cache, manifest = open_store("memory://"), SegmentCache(), Manifest()
    lift = lift_of(convert(plain_0), old, new)
    assert lift is not None
    forms = Forms(old.arrow_type).then(lift, new.arrow_type)

    def write(epoch: int, form: int, timers: dict[str, tuple[int, int] | None]) -> None:
        nonlocal manifest
        keys = KeyColumns.canonical([pa.array(list(timers)), pa.array([""] * len(timers))])
        hashes, subs = KeyColumns(keys.columns[:1]).hashes(), keys.subs()
        order, _ = arrange(hashes, keys, subs)
        given = [timer or (0, POISON) for timer in timers.values()]
        values = (old, new)[form].encode([time for time, _ in given], [payload for _, payload in given])
        dead = np.array([timer is None for timer in timers.values()])
        rows = StateRows(hashes, keys, values, dead, subs).take(order)
        maker = Maker(1, epoch, "a", 0)
        refs = write_segments(store, cache, FAMILY, maker, 0, epoch, (WHOLE,), rows, timers=True, form=form)
        manifest = manifest.added(refs)

    base = 2**60  # beyond what a double tells apart
    write(0, 0, {"a": (base + 1, 1), "b": (base + 2, 2), "c": (base + 3, 3), "d": (base + 9, 9)})
    write(1, 0, {"b": None, "c": (base + 4, 4)})
    write(2, 1, {"e": (base + 2, 100)})
    for merged in (False, True):
        if merged:
            pieces = manifest.pieces(FAMILY)
            ALLOWED.clear()
            ALLOWED.update([4, 100])
            upper = Job(FAMILY, (WHOLE,), tuple(pieces[:2]), False, forms=pickle.dumps(forms))
            manifest, _ = manifest.edited([merge(store, cache, upper, Maker(1, 2, "c", 0), 0)])
        pieces = manifest.pieces(FAMILY)
        ALLOWED.clear()
        SEEN.clear()
        assert least_between(store, cache, pieces, 0, base + 99) == base + 1
        assert least_between(store, cache, pieces, base + 1, base + 99) == base + 2
        assert least_between(store, cache, pieces, base + 2, base + 99) == base + 4
        assert not SEEN
        ALLOWED.update([1, 4])  # not 9, which is not due
        due = due_between(store, cache, pieces, new.arrow_type, base, base + 5, forms)
        assert due is not None
        found = dict(zip(due.key_columns[0].to_pylist(), due.timers.to_pylist(), strict=True))
        assert found == {
            "a": {"time": base + 1, "payload": 4.0},
            "c": {"time": base + 4, "payload": 13.0},
            "e": {"time": base + 2, "payload": 100.0},
        }


def mask(*given: bool) -> Mask:
    return np.array(given)


def test_a_lift_sees_what_is_wanted_and_the_rest_is_null() -> None:
    given: list[Any] = []

    def spy(values: pa.Array) -> pa.Array:
        given.append(values.to_pylist())
        return values.cast(pa.int64())

    forms = Forms(pa.int64(), (spy,))
    values = pa.array([1, 2, None, 4], pa.int32())
    assert forms.lift(values, 0, mask(False, True, True, False)).to_pylist() == [None, 2, None, None]
    assert forms.lift(values, 0, mask(False, False, False, False)).equals(pa.nulls(4, pa.int64()))
    assert forms.lift(values, 0).to_pylist() == [1, 2, None, 4]
    assert given == [[2, None], [1, 2, None, 4]]
    current = pa.array([1, 2], pa.int64())
    assert forms.lift(current, 1, mask(False, True)) is current
    assert NO_FORMS.lift(current, 0) is current
    assert unpacked(b"") is NO_FORMS


@pytest.mark.parametrize(
    ("lift", "named"),
    [
        (lambda values: values, "gave int32, expected int64"),
        (lambda values: values.cast(pa.int64())[1:], "a conversion of 2 stored values gave 1"),
        (lambda values: 1 / 0, "ZeroDivisionError: division by zero"),
    ],
)
def test_a_lift_that_does_not_do_its_part_is_named(lift: Any, named: str) -> None:
    with pytest.raises(LiftFailure, match=named):
        Forms(pa.int64(), (lift,)).lift(pa.array([1, 2], pa.int32()), 0)


def test_what_is_sealed_reads_its_own_form_only_and_a_newer_form_is_our_bug() -> None:
    forms = sealed(pa.int64(), 2)
    values = pa.array([1])
    assert forms.lift(values, 2) is values
    with pytest.raises(UserError, match="what converts its values is not known here"):
        forms.lift(values, 1)
    with pytest.raises(InvariantViolation, match="form 3 found, the current one is 2"):
        forms.lift(values, 3)
    assert unpacked(pickle.dumps(forms)).lift(values, 2) is values
