"""Listening: what the driver hears of the control log, and the plans of the commands under way.

Rules
-----
- Hearing changes nothing. How far the log has been read is journaled with the plan that acts on it.
- A log that cannot be read now is one in which nothing new stands: commands wait, epochs do not.
"""

from __future__ import annotations

import logging

from millstream.errors import StoreUnavailable
from millstream.protocol.epochs import History
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.modification import Modification
from millstream.protocol.steering import Heard
from millstream.store.control_log import ControlLog

AT_ONCE = 16
"""How many commands an epoch hears at most."""

_LOG = logging.getLogger("millstream")


class Listener:
    """Reads the control log for one driver."""

    def __init__(self, log: ControlLog) -> None:
        self.log = log
        self._plans: dict[int, MigrationPlan | Modification] = {}
        self.unread: frozenset[int] = frozenset()
        """The commands under way whose plans could not be read just now: they stand still."""

    def hear(self, history: History) -> list[Heard]:
        """The commands that have not been answered."""
        found: list[Heard] = []
        try:
            while len(found) < AT_ONCE:
                heard = self.log.hear(history.control + len(found))
                if heard is None:
                    break
                found.append(heard)
                if isinstance(heard.ask, MigrationPlan | Modification):
                    self._plans[heard.number] = heard.ask
        except StoreUnavailable as error:
            _LOG.warning("the control log cannot be read now: %s", error)
        return found

    def plans(self, history: History) -> dict[int, MigrationPlan | Modification]:
        """What the commands under way ask for; one that is no longer there, or is not as it was
        sealed, is missing."""
        live = [number for number, outcome in history.outcomes.items() if not outcome.over]
        unread = set()
        for number in live:
            if number not in self._plans:
                try:
                    heard = self.log.hear(number)  # a command that names code must still have its seal
                    if heard is not None and isinstance(heard.ask, MigrationPlan | Modification):
                        self._plans[number] = heard.ask
                except StoreUnavailable as error:
                    unread.add(number)
                    _LOG.warning("the plan of command %d cannot be read now: %s", number, error)
        self.unread = frozenset(unread)
        self._plans = {number: plan for number, plan in self._plans.items() if number in live}
        return dict(self._plans)
