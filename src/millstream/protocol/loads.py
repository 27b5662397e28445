"""Loads: what is known of how loaded bins and workers are, over some periods or in one, and where replicas lie.

Rules
-----
- What is given is checked here, once: shapes fit, loads are finite and not negative, every worker is there. What is not
  so is a `UserError` that says what was found. The functions of `allocation` rely on it.
- A replica never lies on the worker of its bin, nor where another replica of the bin lies; and not on the host of its
  bin, if there is another host (constraint 1 of the paper, CIKM 2015, section 6). `Loads.allowed` says so.
- Bins and workers are numbered from 0. A place is the number of a worker, or -1 where a replica has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from millstream.errors import UserError

Floats = npt.NDArray[np.float64]
Workers = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Loads:
    """How loaded each bin was in each of the last periods, and which worker has it: what an allocation is made from.

    `hosts` names the host of each worker; without it each is a host of its own. `other` is the load of each worker
    that no bin accounts for, one number or one for each period.

    >>> Loads([[1, 2], [2, 1]], [0, 1], 3)
    2 bins on 3 workers of 3 hosts, over 2 periods
    >>> Loads([[1, 2], [2, float("nan")]], [0, 1], 3)
    Traceback (most recent call last):
    millstream.errors.UserError: history of bin 1: found nan, expected loads of 0 or more
    """

    history: Floats
    primary: Workers
    workers: int
    hosts: npt.NDArray[Any] | None = None
    other: Floats | None = None

    def __post_init__(self) -> None:
        if isinstance(self.workers, bool) or not isinstance(self.workers, int | np.integer) or self.workers < 1:
            raise UserError(
                f"workers={self.workers!r}: replicas need workers to lie on; give a whole number, 1 or more"
            )
        history = checked_loads("history", self.history)
        if history.ndim != 2 or not history.shape[1]:
            raise UserError(f"history has shape {history.shape}; expected bins x periods, and at least one period")
        hosts = np.arange(self.workers) if self.hosts is None else np.asarray(self.hosts)
        if hosts.shape != (self.workers,):
            raise UserError(f"hosts has shape {hosts.shape}; expected the host of each of {self.workers} workers")
        other = checked_loads("other", np.zeros(self.workers) if self.other is None else self.other)
        other = other[:, None] if other.ndim == 1 else other
        if other.shape not in {(self.workers, 1), (self.workers, history.shape[1])}:
            raise UserError(
                f"other has shape {other.shape}; expected a load for each of {self.workers} workers, "
                f"or one in each of {history.shape[1]} periods"
            )
        object.__setattr__(self, "history", history)
        object.__setattr__(self, "primary", checked_workers("primary", self.primary, (len(history),), self.workers, 0))
        object.__setattr__(self, "hosts", np.unique(hosts, return_inverse=True)[1])
        object.__setattr__(self, "other", other)

    def __repr__(self) -> str:
        bins, periods = self.history.shape
        hosts = len(np.unique(np.asarray(self.hosts)))
        return f"{bins:,} bins on {self.workers:,} workers of {hosts:,} hosts, over {periods:,} periods"

    @cached_property
    def mean(self) -> Floats:
        """The mean load of each bin."""
        found: Floats = self.history.mean(axis=1)
        return found

    @cached_property
    def of_workers(self) -> Floats:
        """The load of each worker in each period."""
        periods = [np.bincount(self.primary, column, self.workers) for column in self.history.T]
        found: Floats = np.stack(periods, axis=1) + np.asarray(self.other)
        return found

    @cached_property
    def allowed(self) -> Flags:
        """For each worker, where the replicas of its bins may lie."""
        hosts = np.asarray(self.hosts)
        elsewhere: Flags = hosts[:, None] != hosts
        return elsewhere if elsewhere.any() else ~np.eye(self.workers, dtype=np.bool_)

    def possible(self, r: int) -> Numbers:
        """How many replicas each bin can have, of `r`."""
        if isinstance(r, bool) or not isinstance(r, int | np.integer) or r < 1:
            raise UserError(f"r={r!r}: expected a whole number of replicas, 1 or more")
        found: Numbers = np.minimum(self.allowed.sum(axis=1), r)[self.primary]
        return found


@dataclass(frozen=True, eq=False)
class Allocation:
    """The workers on which the replicas of each bin lie, one row for each bin; -1 where there is no place for one."""

    places: Workers

    @property
    def missing(self) -> int:
        """How many replicas have no place."""
        return int((self.places < 0).sum())

    def counts(self, workers: int) -> Numbers:
        """How many replicas each of so many workers has."""
        return np.bincount(self.places[self.places >= 0], minlength=workers)


@dataclass(frozen=True, eq=False)
class Moment:
    """One later period: how loaded each bin is, where it and its replicas are, and how much each worker bears.

    A worker is overloaded if its bins and its `other` load exceed its `capacity`.
    """

    load: Floats
    primary: Workers
    allocation: Allocation
    capacity: Floats
    other: Floats | None = None

    def __post_init__(self) -> None:
        load, capacity = checked_loads("load", self.load), checked_loads("capacity", self.capacity)
        other = checked_loads("other", np.zeros(capacity.shape) if self.other is None else self.other)
        if load.ndim != 1 or capacity.ndim != 1 or not len(capacity) or other.shape != capacity.shape:
            raise UserError(
                f"load, capacity and other have shapes {load.shape}, {capacity.shape} and {other.shape}; "
                "expected a load for each bin, and two numbers for each worker"
            )
        places = checked_workers("allocation", self.allocation.places, (len(load), -1), len(capacity), -1)
        object.__setattr__(self, "load", load)
        object.__setattr__(self, "primary", checked_workers("primary", self.primary, load.shape, len(capacity), 0))
        object.__setattr__(self, "allocation", Allocation(places))
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "other", other)

    @property
    def of_workers(self) -> Floats:
        """The load of each worker."""
        return np.asarray(self.other) + np.bincount(self.primary, self.load, len(self.capacity))

    @property
    def full(self) -> Floats:
        """What each worker bears, and what sums of loads may be off by."""
        return self.capacity * (1 + 1e-9)


@dataclass(frozen=True)
class Share:
    """A part of a whole, counted."""

    part: int = 0
    whole: int = 0

    def __add__(self, more: Share) -> Share:
        return Share(self.part + more.part, self.whole + more.whole)

    @property
    def ratio(self) -> float:
        """From 0 to 1; not a number if the whole is nothing."""
        return self.part / self.whole if self.whole else float("nan")


def checked_loads(name: str, given: npt.ArrayLike) -> Floats:
    """Loads, as an array; or a `UserError`."""
    try:
        found = np.asarray(given, np.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name}: expected numbers, all rows of the same length ({error})") from None
    wrong = np.argwhere(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        first = tuple(wrong[0].tolist())
        of = f" of {'bin' if name in ('history', 'load') else 'worker'} {first[0]}" if first else ""
        raise UserError(f"{name}{of}: found {found[first]}, expected loads of 0 or more")
    return found


def checked_workers(name: str, given: npt.ArrayLike, shape: tuple[int, ...], workers: int, least: int) -> Workers:
    """Numbers of workers, as an array; or a `UserError`. A -1 in the shape stands for any length."""
    try:
        found = np.asarray(given)
    except ValueError as error:
        raise UserError(f"{name}: expected numbers of workers, all rows of the same length ({error})") from None
    fits = found.ndim == len(shape) and all(want in (-1, has) for has, want in zip(found.shape, shape, strict=True))
    if not fits or (found.size and found.dtype.kind not in "iu"):
        expected = " x ".join("replicas" if want < 0 else f"{want} bins" for want in shape)
        raise UserError(f"{name} has shape {found.shape} of {found.dtype}; expected whole numbers, {expected}")
    if found.size and not least <= found.min() <= found.max() < workers:
        outside = found.min() if found.min() < least else found.max()
        raise UserError(f"{name}: found worker {outside}, expected {least} to {workers - 1}")
    return found.astype(np.int32)
