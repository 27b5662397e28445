"""Conditions on a query's own numbers: what a change may wait for.

Rules
-----
- A condition is data, so that it travels with a command; it is judged by the driver, before each epoch, from the
  numbers of the last one. What it decided is journaled with the plan, as every other reason for a change is.
- A number that is not known (there is no event time, or the driver has not run an epoch yet) fulfils nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millstream.errors import UserError

METRICS = {
    "lag_s": "how far the least watermark is behind the driver's clock, in seconds",
    "epoch_ms": "how long the last epoch took, in milliseconds",
    "records": "how many records all steps read in the last epoch",
    "fetched_bytes": "how much state workers fetched in the last epoch",
    "state_bytes": "the size of all state",
    "late": "how many records have been too late, so far",
    "dead_letters": "how many records have become dead letters, so far",
}
"""The numbers that conditions can be made of."""

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


@dataclass(frozen=True, slots=True)
class Condition:
    """Something that can be true of a query's numbers. Made by comparing a `metric`.

    >>> str(metric("lag_s") > 30)
    'lag_s > 30'
    """

    metric: str
    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric} {self.sign} {self.bound:g}"

    def holds(self, numbers: Mapping[str, float]) -> bool:
        """Whether it is true of these numbers."""
        return self.metric in numbers and _OPERATORS[self.sign](numbers[self.metric], self.bound)

    @property
    def trouble(self) -> str:
        """Why it can never be judged; empty if it can."""
        if self.metric not in METRICS:
            return f"there is no number {self.metric[:40]!r}; there are {', '.join(METRICS)}"
        if self.sign not in _OPERATORS:
            return f"{self.sign[:10]!r} compares nothing; give one of {' '.join(_OPERATORS)}"
        return ""


@dataclass(frozen=True, slots=True)
class Metric:
    """One of a query's numbers. Compare it with a value, and it is a condition."""

    name: str

    def __gt__(self, bound: float) -> Condition:
        return self._compared(">", bound)

    def __ge__(self, bound: float) -> Condition:
        return self._compared(">=", bound)

    def __lt__(self, bound: float) -> Condition:
        return self._compared("<", bound)

    def __le__(self, bound: float) -> Condition:
        return self._compared("<=", bound)

    def _compared(self, sign: str, bound: float) -> Condition:
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound != bound:
            raise UserError(f"{self.name} {sign} {bound!r}: compare it with a number")
        return Condition(self.name, sign, float(bound))


def metric(name: str) -> Metric:
    """A number of a running query, to make a condition of: `at=ms.metric("lag_s") > 30`.

    >>> metric("lag")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    millstream.errors.UserError: metric('lag'): there is no number 'lag'; there are lag_s, epoch_ms, ...
    """
    if name not in METRICS:
        raise UserError(f"metric({name!r}): there is no number {name!r}; there are {', '.join(METRICS)}")
    return Metric(name)
