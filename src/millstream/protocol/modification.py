"""Modification: a change of the graph of a running query, as commands and the journal know it.

Rules
-----
- A modification names its code by hash. It is made for one version of the graph, and refused if that is no longer the
  one that runs (G8). At most one takes effect in an epoch.
- All that it changes takes effect with one plan: the graph, the steps' names, and which family of state belongs to
  whom. A commit makes it real; an attempt that is aborted has changed nothing (G3, G6).
- It waits for migrations that are moving a step it renames or takes out; these never wait for it (G5).
- If user code fails in its first epoch, the next attempt runs without it: it is rolled back as a whole.
- One that brings sources takes effect with the first epoch of a stream that reads them, or else their first records
  would be lost. So it is asked for (`Steering.wanted`) when all else is ready, and if it then does not come to it, it
  waits for another stream, in which its sources have other names and begin anew.

`LIFE` is its life cycle, and what may follow each state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from millstream.protocol.manifest import Family
from millstream.protocol.migration import AT_ONCE, Start
from millstream.protocol.routing import RoutingTable, RoutingVersion

VERSIONS_EACH = 1 << 32
"""How many versions a routing table may go through between two modifications."""

LIFE: dict[str, tuple[str, ...]] = {
    "proposed": ("validated", "aborted", "refused", "cancelled"),
    "validated": ("prepared", "aborted", "refused", "cancelled"),
    "prepared": ("active", "done", "aborted", "refused", "cancelled"),
    "active": ("committed", "rolled back"),
    "committed": (),
    "aborted": (),
    "rolled back": (),
}
"""`proposed`: heard. `validated`: the new graph is good. `prepared`: workers have its code. `active`: the plan of its
first epoch is journaled. `committed`: that epoch is. `aborted`: it was found wrong before anything changed. `rolled
back`: its first epoch failed."""


@dataclass(frozen=True, slots=True)
class Modification:
    """What a command asks for: the rewrite in the object `code`, of the graph of this version."""

    store: str
    version: int
    code: str
    text: str = ""
    """What it does, in words."""
    start: Start = AT_ONCE
    trial: bool = False
    """Whether it is only to be validated and prepared, and never takes effect."""
    rehearse: bool = True
    """Whether it is run over a sample of recent input first."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What a plan changes of the graph: by which command, and what becomes of steps and their state.

    `families` are those whose state goes on under another name, or not at all (None); all others stay. `steps` are the
    same of steps. `before` and `after` are digests of the descriptions of the two graphs.
    """

    number: int
    code: str
    before: str
    after: str
    text: str = ""
    families: tuple[tuple[Family, Family | None], ...] = ()
    steps: dict[str, str | None] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)
    """The fingerprints of the code that it takes the place of, by step or map, as they were called before."""
    touched: tuple[str, ...] = ()
    """The names of all that it puts in or takes out."""
    inverse: str = ""
    """The code that undoes it; empty if it cannot be undone."""
    told: str = ""
    """What becomes of state, in words."""
    forms: str = ""
    """Where the forms of all states are; empty if no type has ever changed."""
    maps: tuple[str, ...] = ()
    """The maps that it takes out."""
    sources: dict[str, str | None] = field(default_factory=dict)
    """The sources that it brings, and what each is called by the stream that reads it; None for one it takes out."""

    @property
    def brings(self) -> tuple[str, ...]:
        """The sources that a stream must read before it can take effect."""
        return tuple(name for name, called in self.sources.items() if called is not None)


@dataclass(frozen=True, slots=True)
class Applied:
    """A modification that was committed: enough to apply it again to the graph it was made for."""

    number: int
    code: str
    epoch: int
    before: str
    after: str
    text: str = ""
    replaced: dict[str, str] = field(default_factory=dict)
    touched: tuple[str, ...] = ()
    inverse: str = ""
    forms: str = ""
    names: dict[str, str | None] = field(default_factory=dict)
    """The steps and maps that are called otherwise since, or are gone."""
    sources: dict[str, str | None] = field(default_factory=dict)
    """As of `Changed`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """How far the preparation of a modification has come. `changed` is there once it is validated."""

    state: str
    reason: str = ""
    changed: Changed | None = None
    reached_ms: dict[str, int] = field(default_factory=dict)
    """When it came to the states it has been in, by the driver's clock."""
    waits: bool = False
    """Whether the stream that runs does not read its sources yet."""


def called(modified: Sequence[Applied], sources: Iterable[str]) -> dict[str, str]:
    """What each source is called by the stream that reads it: its own name, unless a modification has brought it. A
    name that comes back is another source, and must not begin where the first one was left.

    >>> called([], ["orders"])
    {'orders': 'orders'}
    """
    said = {name: given for applied in modified for name, given in applied.sources.items()}
    return {name: said.get(name) or name for name in sources}


def undoing(modified: Sequence[Applied], number: int) -> tuple[str, str]:
    """The code that undoes a modification; or why it cannot be undone."""
    found = next((applied for applied in modified if applied.number == number), None)
    if found is None:
        known = ", ".join(str(applied.number) for applied in modified) or "none"
        return "", f"command {number} is no modification that was committed; those are {known}"
    for later in modified[modified.index(found) + 1 :]:
        shared = sorted(set(found.touched) & set(later.touched))
        if shared:
            return "", f"command {later.number} ({later.text}) has changed {shared[0]!r} since; revert that first"
    if not found.inverse:
        return "", (
            f"what command {number} ({found.text}) did cannot be undone: state was converted, or a source was taken "
            "out; make another change instead"
        )
    return found.inverse, ""


def missing_since(modified: Sequence[Applied], digest: str, code: Mapping[str, str]) -> Sequence[Applied] | None:
    """Which modifications a query lacks, that has this description and this code: all since the version that it is.

    None if it is no version there ever was. Where only code was replaced the description is that of several versions,
    and the code tells which it is. Code that was never replaced, or is none of the replaced, is the user's to change:
    then it is the last version of that description.
    """
    places = [place for place, applied in enumerate(modified) if applied.before == digest]
    for place in places:
        if all(code[name] == fingerprint for name, fingerprint in _replaced_since(modified[place:], code).items()):
            return modified[place:]
    if modified and modified[-1].after == digest:
        return []
    return modified[places[-1] :] if places else None


def _replaced_since(modified: Sequence[Applied], names: Iterable[str]) -> dict[str, str]:
    """The fingerprints of the code of these steps and maps, as far as it was replaced."""
    found: dict[str, str] = {}
    called = {name: name for name in names}  # what still runs the code it had at first, by its present name
    for applied in modified:
        for name, fingerprint in applied.replaced.items():
            if name in called:
                found[called.pop(name)] = fingerprint
        called = followed(called, applied.names)
    return found


Said = TypeVar("Said")


def routed_on(
    tables: Mapping[str, RoutingTable], changed: Changed, steps: Iterable[str], version: int
) -> dict[str, RoutingTable]:
    """The tables of the steps after a change of the graph of this version.

    A step that is new is cut as the others are. It, and one that is called otherwise, gets a version that no table has
    ever had: a plan that was made for another step of its name must not fit (G8).
    """
    fresh = RoutingVersion((version + 1) * VERSIONS_EACH)
    known = followed(tables, changed.steps)
    renamed = {to for to in changed.steps.values() if to is not None}
    pattern = next((known[step] for step in steps if step in known), next(iter(tables.values())))
    found = {}
    for step in steps:
        table = known.get(step, pattern)
        found[step] = table if step in known and step not in renamed else replace(table, version=fresh)
    return found


def followed(by_step: Mapping[str, Said], steps: Mapping[str, str | None]) -> dict[str, Said]:
    """What is known of each step, under the names that steps have after a change; of those taken out nothing.

    >>> followed({"a": 1, "b": 2, "c": 3}, {"a": "d", "b": None})
    {'d': 1, 'c': 3}
    """
    found = {steps.get(name, name): said for name, said in by_step.items()}
    return {name: said for name, said in found.items() if name is not None}
