"""Handover: a range changes hands when its state is already where it goes. Facts in, decision out.

Rules
-----
- Three phases: while a round is *prepared*, the target's worker copies what the range has; it *catches up* with what
  epochs write meanwhile; at an epoch the round is *cut over*. Until then the origin is in charge, and nothing but the
  routing table says who is: so there is no moment with two owners, or none (G4), whatever dies when.
- A round is cut over when the worker that lacks most of it lacks no more than the plan's `budget`, in bytes: these are
  fetched inside the epoch, and every key waits for the slowest slot. Otherwise the round is postponed; until there is
  nothing lacking but what the last epochs have written, of which there would be as much after the next ones. Then one
  more epoch *writes through*: the origins send what they write to the targets, too, before it is committed; and so do
  those of a round that is due next, in every epoch. After that the round is cut over, and as a rule nothing is lacking.
- Before a round that brings much is cut over, its targets check what they hold of it, while the origin goes on: else
  the first epoch afterwards would. That is waited for a while only, and never fails a migration.
- If that takes longer than the plan's `deadline_s`, the migration ends where it is: the rounds that are done stay, and
  of all others the origins stay in charge.
- Several rounds are prepared ahead, as many as `AHEAD` bytes allow, so that the epochs need not wait for each other.

`direct` migration prepares nothing: what the target does not happen to have is fetched inside the epoch. `cpa` goes to
where replicas are, and cuts over at once; `cpal` leaves the origin in charge while the target catches up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from millstream.protocol.keyspace import Range, coalesce
from millstream.protocol.migration import MigrationPlan

AHEAD = 512 << 20
MOST_ROUNDS = 32


@dataclass(frozen=True, slots=True)
class Coming:
    """Ranges of steps that are about to move to a worker."""

    worker: str
    parts: tuple[tuple[str, tuple[Range, ...]], ...]


def upcoming(
    number: int, plan: MigrationPlan, done: int, placed: Mapping[int, str], together: int = 1
) -> dict[str, Coming]:
    """What the next rounds of a migration bring to which worker, by a name for each; the next round first. All that
    will be carried out `together` are among them.

    `placed` says where slots run, or will. What moves between slots of one worker is there already.
    """
    found: dict[str, Coming] = {}
    ahead = 0
    for at in range(done, min(len(plan.rounds), done + max(MOST_ROUNDS, together))):
        size = sum(move.bytes for move in plan.rounds[at])
        if at >= done + together and ahead + size > AHEAD:
            break
        ahead += size
        parts: dict[str, dict[str, list[Range]]] = {}
        for move in plan.rounds[at]:
            worker = placed.get(move.target)
            if worker is not None and worker != placed.get(move.origin):
                parts.setdefault(worker, {}).setdefault(move.step, []).append(move.range)
        for worker, steps in sorted(parts.items()):
            ranges = tuple((step, coalesce(spans)) for step, spans in sorted(steps.items()))
            found[round_key(number, at, worker)] = Coming(worker, ranges)
    return found


def round_key(number: int, at: int, worker: str) -> str:
    """The name of what round `at` of a command brings to a worker."""
    return f"{number}.{at}.{worker}"


def keys_of(coming: Collection[str], number: int, done: int, until: int) -> list[str]:
    """The names, among these, of what the rounds of a command bring from `done` to before `until`."""
    rounds = {f"{number}.{at}" for at in range(done, until)}
    return [key for key in coming if ".".join(key.split(".", 2)[:2]) in rounds]
