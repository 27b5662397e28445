"""Placement: which worker each slot should run on. Chosen anew at each attempt, never journaled.

Rules
-----
- A slot stays where it is while its worker is there: what it needs is cached there.
- A slot that has no place goes to the worker with the fewest: so the slots of a lost worker are shared out. A slot that
  has one moves only to a worker that is new, from the fullest, as long as that has two more. So a new worker is used
  as soon as it is reported; and where slots come and go, none of the others has to fetch all its state somewhere else.
- Where replicas are known, a slot that has no place goes to the worker that lacks the fewest of its bytes; and one that
  could go to a new worker stays until that one holds it. One that has no state yet goes to that of the workers with the
  fewest slots that lacks the fewest bytes of what is about to come (`brings`).
- A worker on which an agent is being started gets no slot that another one can have, and is new until it has started:
  the start takes a core there, and tasks would wait for it as long as `spark.locality.wait` says.
- A worker that is closing keeps the slots it has, which are being emptied, and gets no other. One that is closed has
  none, as long as there is another worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial


def place(
    slots: Sequence[int],
    workers: Collection[str],
    before: Mapping[int, str],
    known: Collection[str] = (),
    closing: Collection[str] = (),
    closed: Collection[str] = (),
    lacks: Callable[[int, str], int] = lambda slot, worker: 0,
    brings: Callable[[int, str], int] = lambda slot, worker: 0,
    starting: Callable[[str], bool] = lambda worker: False,
) -> dict[int, str]:
    """The worker of every slot; empty if there are no workers. `known` are the workers that were there before, `lacks`
    is how much of a slot's state a worker would have to fetch, and `brings` how much of what is about to come to it.
    A worker that is `starting` gets no slot, as long as another one can have it.

    >>> place([0, 1, 2], ["a", "b"], {})
    {0: 'a', 1: 'b', 2: 'a'}
    >>> place([0, 1, 2], ["b", "c"], {0: "a", 1: "b", 2: "a"})
    {0: 'c', 1: 'b', 2: 'b'}
    >>> place([0, 1, 2, 3], ["a", "b"], {0: "a", 1: "b"}, brings=lambda slot, worker: 9 if worker == "a" else 0)
    {0: 'a', 1: 'b', 2: 'b', 3: 'a'}
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

    def rank(slot: int, worker: str) -> tuple[int, int, int, int]:
        return lacks(slot, worker), len(held[worker]), brings(slot, worker), order[worker]

    started = [worker for worker in opened if not starting(worker)]
    for slot in homeless:
        held[min(started or opened, key=partial(rank, slot))].append(slot)
    fresh = [worker for worker in started if worker not in known]
    while fresh:
        fullest = max(opened, key=lambda worker: (len(held[worker]), -order[worker]))
        emptiest = min(fresh, key=lambda worker: (len(held[worker]), order[worker]))
        if len(held[fullest]) - len(held[emptiest]) < 2:
            break
        held[emptiest].append(held[fullest].pop())
    return dict(sorted((slot, worker) for worker in held for slot in held[worker]))


def warmed(
    wished: Mapping[int, str], before: Mapping[int, str], workers: Collection[str], ready: Callable[[int, str], bool]
) -> dict[int, str]:
    """The placement that was wished for; but a slot that has a place stays there until its new one is ready for it.

    >>> warmed({0: "b", 1: "c"}, {0: "a", 1: "gone"}, ["a", "b", "c"], lambda slot, worker: False)
    {0: 'a', 1: 'c'}
    """
    return {
        slot: worker
        if before.get(slot) in (None, worker) or before[slot] not in workers or ready(slot, worker)
        else before[slot]
        for slot, worker in wished.items()
    }


def _by_number(worker: str) -> tuple[int, str]:
    """Executors are numbered; the order is theirs."""
    return (int(worker), "") if worker.isdigit() else (-1, worker)
