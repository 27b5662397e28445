"""Placement: which worker each slot should run on. Chosen anew at each attempt, never journaled.

Rules
-----
- A slot stays where it is while its worker is there: what it needs is cached there.
- A slot that has no place goes to the worker with the fewest: so the slots of a lost worker are shared out. A slot that
  has one moves only to a worker that is new, from the fullest, as long as that has two more. So a new worker is used
  as soon as it is reported; and where slots come and go, none of the others has to fetch all its state somewhere else.
- A worker that is closing keeps the slots it has, which are being emptied, and gets no other. One that is closed has
  none, as long as there is another worker.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def place(
    slots: Sequence[int],
    workers: Collection[str],
    before: Mapping[int, str],
    known: Collection[str] = (),
    closing: Collection[str] = (),
    closed: Collection[str] = (),
) -> dict[int, str]:
    """The worker of every slot; empty if there are no workers. `known` are the workers that were there before.

    >>> place([0, 1, 2], ["a", "b"], {})
    {0: 'a', 1: 'b', 2: 'a'}
    >>> place([0, 1, 2], ["b", "c"], {0: "a", 1: "b", 2: "a"})
    {0: 'c', 1: 'b', 2: 'b'}
    """
    present = sorted(workers, key=_by_number)
    usable = [worker for worker in present if worker not in closed] or present
    opened = [worker for worker in usable if worker not in closing] or usable
    if not present:
        return {}
    held: dict[str, list[int]] = {worker: [] for worker in usable}
    homeless: list[int] = []
    for slot in sorted(slots):
        held.get(before.get(slot, ""), homeless).append(slot)
    order = {worker: number for number, worker in enumerate(opened)}
    for slot in homeless:
        held[min(opened, key=lambda worker: (len(held[worker]), order[worker]))].append(slot)
    fresh = [worker for worker in opened if worker not in known]
    while fresh:
        fullest = max(opened, key=lambda worker: (len(held[worker]), -order[worker]))
        emptiest = min(fresh, key=lambda worker: (len(held[worker]), order[worker]))
        if len(held[fullest]) - len(held[emptiest]) < 2:
            break
        held[emptiest].append(held[fullest].pop())
    return dict(sorted((slot, worker) for worker in held for slot in held[worker]))


def _by_number(worker: str) -> tuple[int, str]:
    """Executors are numbered; the order is theirs."""
    return (int(worker), "") if worker.isdigit() else (-1, worker)
