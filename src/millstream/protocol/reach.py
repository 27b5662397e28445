"""Reach: which workers cannot work with the others, because nothing gets through between them. Facts in, decision out.

Rules
-----
- Facts are who could be reached by whom, at one time: the driver asked all agents, and each that answered asked all
  others. A link is broken if one end did not reach the other, although somebody else did: so the other is there. Of one
  whom nobody reached nothing is known: it may be dead, or busy, and that is for Spark to find out.
- All who are left must reach each other, because every worker sends records to every other; and the driver must reach
  all of them. So whoever the driver does not reach is left out; then, while any link is broken, the one with most.
- Between equals it is the one with fewer slots, and then the one that came last.
- One look is not enough: a link counts as broken if it was so in two looks, one some time after the other, and if it
  has ever been seen to work: between workers, ports may be closed for anything but Spark.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

DRIVER = "driver"

Link = frozenset[str]
Reached = Mapping[str, Collection[str]]
"""For the driver and each worker that answered it, the workers that it reached."""


def broken_links(reached: Reached, workers: Collection[str]) -> frozenset[Link]:
    """The links that let nothing through.

    >>> links = broken_links({"driver": ["1", "2"], "1": ["2"], "2": ["1", "3"]}, ["1", "2", "3", "4"])
    >>> sorted(sorted(link) for link in links)
    [['1', '3'], ['3', 'driver']]
    """
    there = {other for others in reached.values() for other in others}
    return frozenset(
        frozenset((one, other))
        for one, others in reached.items()
        for other in workers
        if other in there and other not in others and other != one
    )


def cut_off(broken: Collection[Link], slots: Mapping[str, Collection[int]]) -> tuple[str, ...]:
    """The workers to leave out. `slots` are those of each worker.

    >>> cut_off([frozenset(("1", "2")), frozenset(("1", "3"))], {"1": [0, 1], "2": [2], "3": [3]})
    ('1',)
    >>> cut_off([frozenset(("1", "2"))], {"1": [0], "2": [1, 2]})
    ('1',)
    """
    left = set(broken)
    found: list[str] = []
    while left:
        ends = {end for link in left for end in link if end != DRIVER}
        apart = {end for link in left if DRIVER in link for end in link - {DRIVER}}
        worst = max(
            apart or ends,
            key=lambda end: (sum(end in link for link in left), -len(slots.get(end, ())), _number(end)),
        )
        found.append(worst)
        left = {link for link in left if worst not in link}
    return tuple(found)


def _number(worker: str) -> tuple[int, str]:
    return (int(worker), "") if worker.isdigit() else (-1, worker)
