"""Megaphone's interfaces as thin layers: `state_machine`, `unary` and `binary`. A function of a record and its state.

Rules
-----
- They are computations by record: a Python call each, for what whole columns cannot say.
- A post-dated record comes back to the same function at its time, once, in the order of times, and of posting where
  times are equal: tags are numbers in the order of text. A key whose posts have all come back keeps nothing of them.
"""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.computation import At, Computation
from millstream.model.query import KeyedStream, Stream
from millstream.model.state import Value
from millstream.model.timers import Timer


def state_machine(
    keyed: KeyedStream, name: str, fold: Callable[..., Any], state: str | type[object], output: str, **options: str
) -> Stream:
    """Adds a step that runs a function of key, record and state."""
    return keyed.compute(name, StateMachine(_checked(name, fold), state, output), **options)


def unary(
    keyed: KeyedStream,
    name: str,
    fn: Callable[..., Any],
    state: str | type[object],
    output: str,
    timer: str,
    **options: str,
) -> Stream:
    """Adds a step that runs a function of time, record, state and what posts records for later."""
    return keyed.compute(name, Unary(_checked(name, fn), state, output, timer), **options)


def binary(
    left: KeyedStream,
    name: str,
    right: KeyedStream,
    fn: Callable[..., Any],
    state: str | type[object],
    output: str,
    timer: str,
    late: str | None,
    on_error: str,
    productions: str,
) -> Stream:
    """Adds a step that runs a function of two streams that share a state."""
    step = Binary(_checked(name, fn), state, output, timer)
    return left.query.compute(name, step, late=late, on_error=on_error, productions=productions, left=left, right=right)


def _checked(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(fn):
        raise UserError(f"step {name!r}: found {fn!r}, expected a function")
    return fn


def _state(kind: str | type[object], name: str) -> Value:
    declared = Value(kind)
    declared.name = name
    return declared


class StateMachine(Computation):
    """A function `fold(key, record, state)` that returns the new state, None to drop it, and what it produces."""

    def __init__(self, fold: Callable[..., Any], state: str | type[object], output: str) -> None:
        self.fold, self.output = fold, output  # type: ignore[misc]
        self.state = _state(state, "state")

    def on_record(self, row: Any, at: At) -> Iterable[Any]:
        returned = self.fold(at.key, row, self.state.get())
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise UserError(f"the function returned {returned!r}; return (new state or None, productions)")
        state, produced = returned
        if state is not None:
            self.state.set(state)
        elif self.state.exists():
            self.state.delete()
        return produced or ()


class Later:
    """Posts records for later: `later.at(when, record)`. `when` is a datetime, or a timedelta from now."""

    __slots__ = ("_posted", "_side", "_timer")

    def __init__(self, timer: Timer, posted: Value, side: str) -> None:
        self._timer, self._posted, self._side = timer, posted, side

    def at(self, when: datetime | timedelta, record: Any = None) -> None:
        """The function is called with this record, or any value, when its time has come."""
        posted = self._posted.get() or {"number": 0, "pending": 0}
        self._posted.set({"number": posted["number"] + 1, "pending": posted["pending"] + 1})
        is_row = isinstance(record, tuple) and hasattr(record, "_fields")
        payload = (self._side, is_row, tuple(record) if is_row else record)
        self._timer.set(when, tag=f"{posted['number']:019}", payload=payload)


class _Posting(Computation):
    """What `Unary` and `Binary` share."""

    def __init__(self, fn: Callable[..., Any], state: str | type[object], output: str, timer: str) -> None:
        self.fn, self.output = fn, output  # type: ignore[misc]
        self.state = _state(state, "state")
        self.posted = Value("struct<number: long, pending: long>")
        self.later = Timer(timer, payload=object)
        self.posted.name, self.later.name, self.later.callback = "posted", "later", "again"
        self.names: dict[str, list[str]] = {}

    def bind(self, inputs: Mapping[str, pa.Schema], key: tuple[str, ...]) -> Computation:
        bound = copy.copy(self)
        bound.names = {name: schema.names for name, schema in inputs.items()}
        return bound

    def on_record(self, row: Any, at: At) -> Iterable[Any] | None:
        return self.called(at.input, row, at)

    def again(self, at: At) -> Iterable[Any] | None:
        """A record that was posted has come."""
        posted = self.posted.get()
        if posted["pending"] > 1:
            self.posted.set({**posted, "pending": posted["pending"] - 1})
        else:
            self.posted.delete()
        side, is_row, record = at.payload
        if is_row:
            row_type: Any = namedtuple("Row", self.names[side], rename=True)  # type: ignore[misc]
            record = row_type._make(record)
        return self.called(side, record, at)

    def called(self, side: str, record: Any, at: At) -> Iterable[Any] | None:
        """Calls the function with a record of one side."""
        raise NotImplementedError


class Unary(_Posting):
    """A function `fn(at, record, state, later)`."""

    def called(self, side: str, record: Any, at: At) -> Iterable[Any] | None:
        found: Iterable[Any] | None = self.fn(at, record, self.state, Later(self.later, self.posted, side))
        return found


class Binary(_Posting):
    """A function `fn(at, left, right, state, later_left, later_right)`, of which one of left and right is None."""

    def called(self, side: str, record: Any, at: At) -> Iterable[Any] | None:
        both = [record if side == each else None for each in ("left", "right")]
        later = [Later(self.later, self.posted, each) for each in ("left", "right")]
        found: Iterable[Any] | None = self.fn(at, *both, self.state, *later)
        return found
