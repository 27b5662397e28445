"""Observations: what an epoch tells of itself. None of them can fail it.

Rules
-----
- Samples, loads, costs, rates and displays are worth less than the epoch that they are of. Each is made through a
  `Fence`: what goes wrong is caught there and counted, the default stands in, and the epoch goes on.
- A task tells its driver which of its observations failed, with its report. The driver logs the first failure of each
  kind, and counts all of them (`Status.unobserved`).
- The modules that make observations are imported only where `tests/house/test_observations.py` allows it, and there
  used only inside a fence.
- An error of user code, of the store or of the protocol is no observation, and never passes through here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from millstream.protocol.epochs import Report
from millstream.protocol.statistics import Load, evened, together

Made = TypeVar("Made")

TEXT_LIMIT = 200

_LOG = logging.getLogger("millstream")


class Fence:
    """Makes observations, and remembers which of them failed.

    >>> fence = Fence()
    >>> fence("the sum", 0, lambda: 1 + 1)
    2
    >>> fence("the ratio", 0.0, lambda: 1 / 0)
    0.0
    >>> fence.failed
    {'the ratio': 'ZeroDivisionError: division by zero'}
    """

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        """The first error of each observation that failed."""
        self.counts: Counter[str] = Counter()

    def __call__(self, what: str, default: Made, make: Callable[[], Made]) -> Made:
        """What `make` returns; or the default, if it raises."""
        try:
            return make()
        except Exception as error:
            self.counts[what] += 1
            self.failed.setdefault(what, f"{type(error).__name__}: {error}"[:TEXT_LIMIT])
            return default


class DriverFence(Fence):
    """The driver's fence. It knows what failed in tasks, too, and logs each kind of observation once."""

    def __call__(self, what: str, default: Made, make: Callable[[], Made]) -> Made:
        known = set(self.failed)
        made = super().__call__(what, default, make)
        self._log_new(known)
        return made

    def reported(self, reports: Sequence[Report]) -> None:
        """Takes note of what failed in the tasks of an epoch."""
        known = set(self.failed)
        for report in reports:
            for what, error in report.unobserved.items():
                self.counts[what] += 1
                self.failed.setdefault(what, error)
        self._log_new(known)

    def _log_new(self, known: set[str]) -> None:
        for what in self.failed.keys() - known:
            _LOG.warning("%s cannot be observed, and is left out: %s. Epochs go on", what, self.failed[what])


def loads_together(reports: Sequence[Report]) -> dict[str, bytes]:
    """The load of every step, of all slots together, packed."""
    parts: dict[str, list[Load]] = {}
    for report in reports:
        for step, data in report.loads.items():
            parts.setdefault(step, []).append(Load.unpack(data))
    return {step: evened(together(loads)).pack() for step, loads in parts.items()}


def slowest(reports: Sequence[Report], part: str) -> float:
    """How long a part of an epoch's tasks took: at the slowest slot of each level, all levels added up."""
    times: dict[int, float] = {}
    for report in reports:
        times[report.level] = max(times.get(report.level, 0.0), report.timings_ms.get(part, 0.0))
    return sum(times.values())
