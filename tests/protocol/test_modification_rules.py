"""Modification as a decision: which ones a query lacks, what undoes one, and where state, tables and counts go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import InvariantViolation
from millstream.protocol.keyspace import WHOLE
from millstream.protocol.manifest import Family, Manifest, SegmentRef
from millstream.protocol.modification import (
    LIFE,
    Applied,
    Candidate,
    Changed,
    Modification,
    followed,
    missing_since,
    routed_on,
    undoing,
)
from millstream.protocol.routing import RoutingTable, Slot
from millstream.protocol.steering import STATES, Cancel, Facts, Heard, steer

# -- versions --------------------------------------------------------------------------------------------------------


class Versions:
    """A query that is modified at random: its steps, each with its code, after every modification."""

    def __init__(self, draw: Any) -> None:
        self.graphs: list[dict[str, str]] = [{name: f"{name}0" for name in draw(st.sets(st.sampled_from("abc")))}]
        self.modified: list[Applied] = []
        for number in range(draw(st.integers(1, 6))):
            before = self.graphs[-1]
            after, replaced, names = dict(before), dict[str, str](), dict[str, str | None]()
            for name in [name for name in sorted(before) if draw(st.booleans())]:
                verb = draw(st.sampled_from(["replace", "remove", "rename", "again"]))
                new = draw(st.sampled_from("abcdef"))
                if verb == "replace":
                    replaced[name], after[name] = before[name], draw(st.sampled_from([f"{name}0", f"{name}1", "x"]))
                    if after[name] == before[name]:
                        del replaced[name]
                elif verb == "rename" and new not in after and new not in before:
                    after[new], names[name] = after.pop(name), new
                elif verb in ("remove", "again"):
                    names[name] = None
                    del after[name]
                    if verb == "again":
                        after[name] = draw(st.sampled_from([f"{name}0", "y"]))
            for name in draw(st.sets(st.sampled_from("def"), max_size=1)):
                after.setdefault(name, draw(st.sampled_from([f"{name}0", "z"])))
            self.modified.append(
                Applied(number, f"code {number}", number, digest(before), digest(after), "", replaced, names=names)
            )
            self.graphs.append(after)


def digest(graph: dict[str, str]) -> str:
    """What is stored depends on the steps, not on their code."""
    return " ".join(sorted(graph))


@given(st.data())
def test_from_whichever_version_a_query_is_what_it_lacks_makes_it_the_last(data: st.DataObject) -> None:
    versions = Versions(data.draw)
    place = data.draw(st.integers(0, len(versions.graphs) - 1))
    mine = versions.graphs[place]
    since = missing_since(versions.modified, digest(mine), mine)
    assert since is not None
    found = dict(mine)
    for applied in since:  # as the rewrites would
        before, after = versions.graphs[applied.number], versions.graphs[applied.number + 1]
        assert digest(found) == digest(before)
        kept = {applied.names.get(name, name): name for name in found if applied.names.get(name, name) is not None}
        found = {
            name: found[kept[name]]
            if name in kept and before[kept[name]] == code and kept[name] not in applied.replaced
            else code
            for name, code in after.items()
        }
    assert found == versions.graphs[-1]


@given(st.data())
def test_code_of_a_users_own_is_left_to_him_and_another_graph_is_refused(data: st.DataObject) -> None:
    versions = Versions(data.draw)
    mine = dict.fromkeys(data.draw(st.sampled_from(versions.graphs)), "mended")
    since = missing_since(versions.modified, digest(mine), mine)
    assert since is not None
    assert not since or since[0].before == digest(mine)
    assert missing_since(versions.modified, "another", mine) is None


def test_a_query_lacks_nothing_if_nothing_was_modified() -> None:
    assert missing_since([], "any", {}) is None


def test_what_is_replaced_tells_versions_of_one_graph_apart() -> None:
    modified = [
        Applied(0, "c", 0, "g", "g", replaced={"a": "1"}),
        Applied(1, "c", 1, "g", "h", names={"a": "b"}),
        Applied(2, "c", 2, "h", "h", replaced={"b": "2"}),
    ]
    assert missing_since(modified, "g", {"a": "1"}) == modified
    assert missing_since(modified, "g", {"a": "2"}) == modified[1:]
    assert missing_since(modified, "h", {"b": "2"}) == modified[2:]
    assert missing_since(modified, "h", {"b": "3"}) == []
    assert missing_since(modified, "g", {"a": "mine"}) == modified[1:], "the last of that graph, with the user's code"


# -- undoing ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd"), min_size=1), st.booleans()), max_size=6))
def test_a_modification_is_undone_unless_a_later_one_touched_the_same_or_it_cannot_be(given_: Any) -> None:
    modified = [
        Applied(
            10 + number, "c", number, "", "", touched=tuple(sorted(touched)), inverse=f"undo {number}" if can else ""
        )
        for number, (touched, can) in enumerate(given_)
    ]
    assert undoing(modified, 99)[0] == ""
    for place, applied in enumerate(modified):
        code, trouble = undoing(modified, applied.number)
        clash = [later for later in modified[place + 1 :] if set(later.touched) & set(applied.touched)]
        assert bool(code) != bool(trouble)
        assert (code == applied.inverse) == (bool(applied.inverse) and not clash) or not applied.inverse
        if clash:
            assert f"command {clash[0].number} " in trouble


# -- names -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_what_is_known_of_steps_follows_their_names(data: st.DataObject) -> None:
    known = data.draw(st.dictionaries(st.sampled_from("abcdef"), st.integers(), max_size=6))
    names = data.draw(st.permutations("abcdef"))
    steps = {old: data.draw(st.sampled_from([new, None])) for old, new in zip("abcdef", names, strict=True)}
    found = followed(known, steps)
    assert found == {steps[name]: said for name, said in known.items() if steps[name] is not None}
    assert list(found.values()) == [said for name, said in known.items() if steps[name] is not None]


@given(st.integers(0, 5), st.data())
def test_tables_of_new_and_renamed_steps_have_versions_that_none_has_had(version: int, data: st.DataObject) -> None:
    tables = {name: RoutingTable.even(data.draw(st.integers(1, 3)), 2) for name in "abc"}
    for name in "abc":
        for _ in range(data.draw(st.integers(0, 3))):
            tables[name] = tables[name].assign([(WHOLE, Slot(0))])
    steps: dict[str, str | None] = data.draw(
        st.sampled_from([{}, {"a": None}, {"a": "b", "b": "a"}, {"c": "d", "a": None}])
    )
    after = [*followed(dict.fromkeys("abc"), steps), "new"]
    found = routed_on(tables, Changed(0, "", "", "", steps=steps), after, version)
    assert list(found) == after
    for name in after:
        old = next((old for old in "abc" if steps.get(old, old) == name), None)
        if old == name:
            assert found[name] == tables[name]
        else:
            assert found[name].version > max(table.version for table in tables.values())
            assert found[name].version > version << 32
        if old is not None:
            assert replace(found[name], version=tables[old].version) == tables[old]
    everything_new = routed_on(tables, Changed(0, "", "", "", steps=dict.fromkeys("abc")), ["z"], version)
    assert everything_new["z"].slots == tables["a"].slots


# -- families --------------------------------------------------------------------------------------------------------


def ref(name: str, family: Family) -> SegmentRef:
    return SegmentRef(name, family, 0, 1, 1, "", (WHOLE,))


@given(st.data())
def test_families_are_carried_whole_or_dropped_whole(data: st.DataObject) -> None:
    names = [Family(step, state) for step in "ab" for state in "xy"]
    held = data.draw(st.sets(st.sampled_from(names)))
    manifest = Manifest().added([ref(f"{f.step}{f.state}{n}", f) for f in sorted(held) for n in range(2)])
    targets = data.draw(st.permutations([*names, Family("c", "x"), Family("c", "y")]))
    chosen = data.draw(st.sets(st.sampled_from(names)))
    moved = {
        old: data.draw(st.sampled_from([new, None])) for old, new in zip(names, targets, strict=False) if old in chosen
    }
    clash = [new for old, new in moved.items() if new is not None and new not in moved and new in held]
    if clash:
        with pytest.raises(InvariantViolation, match="which has state of its own"):
            manifest.transferred(moved)
        return
    found, dropped = manifest.transferred(moved)
    kept = {segment.name: segment.family for segment in found.segments()}
    for segment in manifest.segments():
        to = moved.get(segment.family, segment.family)
        assert (segment.name in dropped) == (to is None)
        assert kept.get(segment.name) == to
    assert len(kept) + len(dropped) == len(list(manifest.segments()))
    for family, pieces in found.families.items():
        assert all(piece.segment.family == family and piece.ranges == (WHOLE,) for piece in pieces.values())


# -- the life of one -------------------------------------------------------------------------------------------------


def test_every_state_leads_to_an_end_and_only_its_first_epoch_makes_it_real() -> None:
    ends = {state for state, follows in STATES.items() if not follows}
    assert ends == {"done", "refused", "cancelled", "committed", "aborted", "rolled back"}
    assert [state for state, follows in LIFE.items() if "committed" in follows] == ["active"]
    assert [state for state, follows in LIFE.items() if "rolled back" in follows] == ["active"]
    for state in LIFE:
        assert reachable(state) & ends


def reachable(state: str) -> set[str]:
    found, left = {state}, [state]
    while left:
        more = set(STATES[left.pop()]) - found
        found |= more
        left += more
    return found


CHANGED = Changed(0, "code", "before", "after")
CANDIDATES = st.sampled_from(
    [
        None,
        Candidate("proposed"),
        Candidate("validated", changed=CHANGED),
        Candidate("prepared", changed=CHANGED),
        Candidate("aborted", "bad"),
        Candidate("rolled back", "worse"),
    ]
)


@given(st.lists(st.tuples(CANDIDATES, CANDIDATES, st.sampled_from(["", "", "", "cancel", "abort"])), max_size=12))
def test_whatever_is_prepared_when_modifications_go_forwards_and_one_of_a_version_takes_effect(epochs: Any) -> None:
    """Two are asked for. Drivers come and go and prepare them anew, attempts are aborted, the second is cancelled."""
    asks = {number: Modification("s", 0, f"code {number}") for number in (0, 1)}
    waiting = [Heard(number, "modify", ask) for number, ask in asks.items()]
    facts = Facts("s", 1, 0, 0, {"a": RoutingTable.even(1, 2)}, {}, 0, {}, {})
    effects: list[int] = []
    for epoch, (first, second, event) in enumerate(epochs):
        if event == "cancel" and not waiting:
            waiting = [Heard(2 + epoch, "cancel", Cancel(1))]
        candidates = {
            number: replace(each, changed=each.changed and replace(each.changed, number=number))
            for number, each in enumerate((first, second))
            if each is not None
        }
        plans = {number: ask for number, ask in asks.items() if number in facts.outcomes}
        facts = replace(facts, epoch=epoch, plans=plans, candidates=candidates, version=len(effects))
        made = steer(facts, waiting)
        if event == "abort":
            continue  # nothing of it has happened, and what was heard is heard again
        waiting = []
        for outcome in made.outcomes:
            if outcome.number in asks:
                known = facts.outcomes.get(outcome.number)
                assert known is None or not known.over
                assert outcome.state in reachable("proposed" if known is None else known.state), (known, outcome)
        taken = {outcome.number for outcome in made.outcomes if outcome.state == "committed"}
        assert taken == ({made.changed.number} if made.changed is not None else set())
        effects += taken
        facts = replace(facts, outcomes={**facts.outcomes, **{o.number: o for o in made.outcomes}})
    assert len(effects) <= 1
    assert {number for number, outcome in facts.outcomes.items() if outcome.state == "committed"} == set(effects)
