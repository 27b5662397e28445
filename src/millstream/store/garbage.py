"""Deleting what nobody needs: carries out what `protocol.retention` says.

Rules
-----
- Deletes only what the journal released (G3), the journal's own entries only behind a snapshot, commands only once
  they are over, and what was being written by a process that died.
- The last command that was heard stays: whoever looks at the control log alone sees which number comes next.
- Runs beside the epochs, never inside one, and may stop or fail at any point: the next run finds the rest.
"""

from __future__ import annotations

from collections.abc import Collection

from millstream.protocol.epochs import History
from millstream.protocol.retention import needed_productions, needed_segments, settled
from millstream.store import names
from millstream.store.journal import KEEP_S
from millstream.store.objects import STAGING, ObjectStore

ABANDONED_S = 3600.0
"""Nothing takes that long to write: what is still staged then was left by a process that died."""


def unneeded(store: ObjectStore, history: History, live: Collection[int]) -> list[str]:
    """The objects of state, productions, overflow and strong tasks that can go, as of this history."""
    found = []
    for prefix, needed in (
        (names.SEGMENTS, needed_segments(history)),
        (names.PRODUCTIONS, needed_productions(history)),
        (names.OVERFLOW, set[str]()),
        (names.STRONG, set[str]()),
    ):
        for item in store.list(prefix):
            maker = names.maker_of(item.name)
            if item.name in needed or maker is None:
                continue
            if settled(history, maker.generation, maker.kind, maker.epoch, maker.number, live):
                found.append(item.name)
    return found


def old_commands(store: ObjectStore, history: History) -> list[str]:
    """The commands that are over, and that every sender knows by now to have been heard."""
    return [
        item.name
        for item in store.list(names.CONTROL)
        if (number := names.command_number(item.name)) is not None
        and number < history.control - 1
        and (number not in history.outcomes or history.outcomes[number].over)
        and item.age_s > KEEP_S
    ]


def clear_staging(store: ObjectStore) -> None:
    """Deletes what processes that died were writing."""
    store.delete([item.name for item in store.list(STAGING) if item.age_s > ABANDONED_S])
