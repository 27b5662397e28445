"""What slots had to do in the past, in periods of some epochs: what placing replicas by load goes by. It is never
journaled; a driver that takes over begins anew, and goes by bytes until it knows enough.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping

PERIOD = 16
"""How many epochs are a period."""
PERIODS = 96
"""How many periods are remembered."""
ENOUGH_PERIODS = 8
"""How many there must be to go by load."""


class LoadHistory:
    """What slots had to do, in periods of some epochs. Added to in one thread, and taken in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._period: list[Mapping[int, float]] = []
        self._periods: deque[dict[int, float]] = deque(maxlen=PERIODS)
        self._fresh = False

    def add(self, loads: Mapping[int, float]) -> None:
        """The loads of slots in an epoch."""
        with self._lock:
            self._period.append(dict(loads))
            if len(self._period) == PERIOD:
                slots = {slot for each in self._period for slot in each}
                self._periods.append({slot: sum(each.get(slot, 0.0) for each in self._period) for slot in slots})
                self._period, self._fresh = [], len(self._periods) >= ENOUGH_PERIODS

    def taken(self) -> dict[int, list[float]]:
        """The loads of each slot, period by period; empty unless there is another period than last time."""
        with self._lock:
            if not self._fresh:
                return {}
            self._fresh = False
            return {slot: [each.get(slot, 0.0) for each in self._periods] for slot in self._periods[-1]}
