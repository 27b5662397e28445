"""What becomes of stored state when a graph changes: which family goes on as which, and which are dropped.

Rules
-----
- A family is a state, a timer or a hold of a step. Those of a step that was not replaced go on as they are, under the
  step's new name if it has one; those of a step that was taken out are dropped.
- For a step that was replaced, each family of the old computation and each of the new one must have a rule. What has
  none is an error that lists all that is missing.
- State is kept by key: a step whose key has other types cannot carry any.
- A step that was not replaced must store what it stored before: what it reads may have changed what it is bound to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream.errors import UserError
from millstream.model.carry import ALL_OTHERS, Carry, Convert, Drop, Fresh, lift_of
from millstream.model.graph import Graph, Step
from millstream.model.query import Query
from millstream.model.rewrite import Rewrite, rewrite_of
from millstream.model.types import format_type

Address = tuple[str, str]
"""A step and one of its families."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """Where families go, None for those that are dropped, and how values of those are made new that have another type.
    Families that stay as they are are not named. `steps` are those that are called otherwise, or gone."""

    families: dict[Address, Address | None] = field(default_factory=dict)
    lifts: dict[Address, Any] = field(default_factory=dict)
    steps: dict[str, str | None] = field(default_factory=dict)
    fresh: tuple[Address, ...] = ()
    kept: tuple[Address, ...] = ()
    """Of steps that were replaced, what stays as it is."""

    def lines(self) -> list[str]:
        """What happens, in words."""
        found = [f"{step}.{name} is kept as it is" for step, name in self.kept]
        for (step, name), to in self.families.items():
            if to is None:
                found.append(f"{step}.{name} is dropped")
            elif to != (step, name):
                found.append(f"{step}.{name} is carried to {to[0]}.{to[1]}")
        found += [f"{step}.{name} is converted, as it is read and in the background" for step, name in self.lifts]
        return found + [f"{step}.{name} begins empty" for step, name in self.fresh]


def transfers(old: Graph, new: Graph, rewrite: Rewrite) -> Transfers:
    """What becomes of the state of one graph in the other; refuses what has not been said."""
    before, after = ({step.name: step for step in graph.steps} for graph in (old, new))
    names = {name: rewrite.renamed.get(name, name) for name in before}
    families: dict[Address, Address | None] = {}
    lifts: dict[Address, Any] = {}
    fresh: list[Address] = []
    for name, step in before.items():
        target = None if name in rewrite.gone else after.get(names[name])
        if target is None:
            families.update({(name, family): None for family in step.families})
        elif names[name] in rewrite.states:
            _replaced(step, target, rewrite.states[names[name]], families, lifts, fresh)
        else:
            _kept(step, target, families)
    known = {to for name, to in names.items() if name not in rewrite.gone}
    fresh += [(step.name, family) for step in new.steps if step.name not in known for family in step.families]
    steps: dict[str, str | None] = {name: to for name, to in names.items() if to != name and to in after}
    steps.update({name: None for name, to in names.items() if to not in after or name in rewrite.gone})
    moved = {address: to for address, to in families.items() if to != address}
    kept = [
        address for address, to in families.items() if to == address and to[0] in rewrite.states and to not in lifts
    ]
    return Transfers(moved, lifts, steps, tuple(fresh), tuple(kept))


def inverse(old: Graph, new: Graph, before: Query, after: Query, rewrite: Rewrite, moved: Transfers) -> Rewrite | None:
    """The rewrite that undoes another, which made `after` of `before`; None if state was converted, and cannot be
    changed back, or if a source was taken out, which would be read from its beginning again. What was dropped begins
    empty again."""
    if moved.lifts or rewrite.taken.get("sources"):
        return None
    were, are = ({step.name: step.families for step in graph.steps} for graph in (old, new))
    names = {to: name for name, to in rewrite.renamed.items()}
    back = {to: address for address, to in moved.families.items() if to is not None}
    states: dict[str, dict[str, Any]] = {}
    for name in rewrite.states:
        then = names.get(name, name)
        rules: dict[str, Any] = {}
        for family in are[name]:
            if (name, family) in moved.fresh:
                rules[family] = Drop()
            else:
                rules[back.get((name, family), (then, family))[1]] = Carry(source=family)
        rules.update({family: Fresh() for family in were[then] if not isinstance(rules.get(family), Carry)})
        states[then] = rules
    kept = {rewrite.renamed.get(name, name) for name in were if name not in rewrite.gone}
    gone = [name for name in are if name not in kept and name in were]
    return rewrite_of(after, before, names, states, gone)


def _kept(step: Step, target: Step, families: dict[Address, Address | None]) -> None:
    if step.key_types != target.key_types:
        raise UserError(
            f"step {target.name!r}: its key was {_types(step)}, and would be {_types(target)}; replace it, and say "
            "what becomes of its state"
        )
    was, now = (dict(each.describe()["state"]) for each in (step, target))
    if was != now or step.computation.stored_as != target.computation.stored_as:
        raise UserError(
            f"step {target.name!r} stores {was}, and would store {now}, because what it reads changes; replace it, and "
            "say what becomes of its state"
        )
    families.update({(step.name, family): (target.name, family) for family in step.families})


def _replaced(
    step: Step,
    target: Step,
    given: Mapping[str, Any],
    families: dict[Address, Address | None],
    lifts: dict[Address, Any],
    fresh: list[Address],
) -> None:
    rules = _rules(step, target, given)
    taken: dict[str, str] = {}
    for name, rule in rules.items():
        if isinstance(rule, Fresh):
            fresh.append((target.name, name))
        elif isinstance(rule, Carry | Convert):
            source = rule.source or name
            if source not in step.families:
                raise UserError(
                    f"step {target.name!r}: {name!r} shall be carried from {source!r}, but the old computation has "
                    f"{', '.join(step.families) or 'nothing stored'}"
                )
            if name not in target.families:
                raise UserError(
                    f"step {target.name!r}: {name!r} shall be carried, but the new computation has "
                    f"{', '.join(target.families) or 'nothing stored'}; say drop()"
                )
            if source in taken:
                raise UserError(f"step {target.name!r}: {source!r} is carried twice, to {taken[source]!r} and {name!r}")
            if step.key_types != target.key_types:
                raise UserError(
                    f"step {target.name!r}: {name!r} cannot be carried: the key was {_types(step)}, and would be "
                    f"{_types(target)}; say fresh(), or build the new one beside it first, with shadow() and cut_over()"
                )
            taken[source] = name
            families[step.name, source] = (target.name, name)
            lift = _lift(step, target, source, name, rule)
            if lift is not None:
                lifts[target.name, name] = lift
    for name in step.families:
        if name not in taken:
            families[step.name, name] = None


def _lift(step: Step, target: Step, source: str, name: str, rule: Carry | Convert) -> Any:
    try:
        return lift_of(rule, step.declared(source), target.declared(name))
    except UserError as error:
        raise UserError(f"step {target.name!r}: {error}") from error


def _rules(step: Step, target: Step, given: Mapping[str, Any]) -> dict[str, Any]:
    """A rule for every family of the new step, and for the old ones that are dropped."""
    rules = dict(given)
    others = rules.pop(ALL_OTHERS, None)
    if others is not None and others != Carry():
        raise UserError(
            f"step {target.name!r}: state={others!r}; give a rule for each state by its name, or carry() for all"
        )
    if others is not None:
        sources = {rule.source for rule in rules.values() if isinstance(rule, Carry | Convert) and rule.source}
        for name in (*step.families, *target.families):
            if name not in rules and name not in sources:
                rules[name] = others if name in step.families else Fresh()
    for name, rule in rules.items():
        if not isinstance(rule, Carry | Convert | Fresh | Drop):
            raise UserError(
                f"step {target.name!r}: the rule for {name!r} is {rule!r}; give carry(), carry(type), convert(fn), "
                "fresh() or drop()"
            )
        if name not in step.families and name not in target.families:
            known = ", ".join(dict.fromkeys((*step.families, *target.families))) or "nothing"
            raise UserError(f"step {target.name!r}: a rule for {name!r}, but what is stored is {known}")
        if isinstance(rule, Drop) and name in target.families:
            raise UserError(f"step {target.name!r}: {name!r} is dropped, but the new computation has it; say fresh()")
    carried = {rule.source or name for name, rule in rules.items() if isinstance(rule, Carry | Convert)}
    missing = [name for name in target.families if name not in rules]
    missing += [name for name in step.families if name not in carried and name not in rules and name not in missing]
    if missing:
        raise UserError(
            f"step {target.name!r}: nothing is said of {', '.join(missing)}. Say of each what becomes of it, such as "
            f"state={{{missing[0]!r}: ms.carry()}}, or --carry {missing[0]}: carry, convert, fresh, or drop for what "
            "is no longer there"
        )
    return rules


def _types(step: Step) -> str:
    return ", ".join(map(format_type, step.key_types))
