"""Placement: which worker each slot should run on. Chosen anew at each attempt, never journaled.

Rules
-----
- A slot stays where it is while its worker is there: what it needs is cached there.
- No worker has two slots more than another: a slot moves only from the fullest to the emptiest worker. So a new worker
  is used as soon as it is reported, and the slots of a lost one are shared out.
- A worker that is to be avoided gets no slot, as long as there is another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def place(
    slots: Sequence[int], workers: Collection[str], before: Mapping[int, str], avoid: Collection[str] = ()
) -> dict[int, str]:
    """The worker of every slot; empty if there are no workers.

    >>> place([0, 1, 2], ["a", "b"], {})
    {0: 'a', 1: 'b', 2: 'a'}
    >>> place([0, 1, 2], ["b", "c"], {0: "a", 1: "b", 2: "a"})
    {0: 'c', 1: 'b', 2: 'b'}
    """
    allowed = [worker for worker in sorted(workers, key=_by_number) if worker not in avoid]
    allowed = allowed or sorted(workers, key=_by_number)
    if not allowed:
        return {}
    held: dict[str, list[int]] = {worker: [] for worker in allowed}
    homeless: list[int] = []
    for slot in sorted(slots):
        held.get(before.get(slot, ""), homeless).append(slot)
    order = {worker: number for number, worker in enumerate(allowed)}
    for slot in homeless:
        held[min(allowed, key=lambda worker: (len(held[worker]), order[worker]))].append(slot)
    while True:
        fullest = max(allowed, key=lambda worker: (len(held[worker]), -order[worker]))
        emptiest = min(allowed, key=lambda worker: (len(held[worker]), order[worker]))
        if len(held[fullest]) - len(held[emptiest]) < 2:
            break
        held[emptiest].append(held[fullest].pop())
    return dict(sorted((slot, worker) for worker in held for slot in held[worker]))


def _by_number(worker: str) -> tuple[int, str]:
    """Executors are numbered; the order is theirs."""
    return (int(worker), "") if worker.isdigit() else (-1, worker)
