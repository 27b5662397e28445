"""Which keys of a batch a computation fails on, when all that is known is that it failed on the batch.

Rules
-----
- A computation treats each key by itself, so a batch fails because some of its keys do. It is run again with halves of
  the keys until those are alone; then once with all others.
- A run of some of the keys changes nothing: only the result of the last one is used.
- Keys that fail together but not apart are not a record's fault: the failure stays one of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from millstream.model.computation import RecordFailure, StepFailure
from millstream.store.keys import Mask, Rows

Result = TypeVar("Result")


def sift(count: int, attempt: Callable[[Mask], Result]) -> tuple[Result | None, dict[int, RecordFailure]]:
    """The result for all keys that do not fail, None if all do; and why each of the others fails, by its place.

    `attempt` runs the computation on the keys of a mask, and raises `RecordFailure` if it fails.
    """
    failed: dict[int, RecordFailure] = {}
    good = np.ones(count, np.bool_)
    while good.any():
        try:
            return attempt(good), failed
        except RecordFailure as error:
            _check(error)
            found = _alone(np.flatnonzero(good), error, count, attempt)
            if not found:
                raise
            failed.update(found)
            good[list(found)] = False
    return None, failed


def _alone(
    places: Rows, error: RecordFailure, count: int, attempt: Callable[[Mask], object]
) -> dict[int, RecordFailure]:
    """Those of some keys that fail alone; together they failed with `error`."""
    if len(places) == 1:
        return {int(places[0]): error}
    found: dict[int, RecordFailure] = {}
    for half in np.array_split(places, 2):
        keys = np.zeros(count, np.bool_)
        keys[half] = True
        try:
            attempt(keys)
        except RecordFailure as own:
            _check(own)
            found.update(_alone(half, own, count, attempt))
    return found


def _check(error: RecordFailure) -> None:
    """Raises what is no record's fault."""
    if isinstance(error, StepFailure):
        raise error
    if isinstance(error.cause, MemoryError):
        raise StepFailure(error.cause) from error
