"""What is typed on the command line, as values: strategies, times, numbers, ranges, settings.

Rules
-----
- What cannot be read is wrong usage, and the text says what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from millstream.protocol.strategies import Strategy


class StrategyType(click.ParamType[Any]):
    """`paced`, `paced:SLOWDOWN`, `all-at-once`, `fluid`, `batched:N` or `matched`; a function of the strategy's other
    arguments, by name."""

    name = "strategy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from millstream.protocol.strategies import AllAtOnce, Batched, Fluid, Matched, Paced

        if not isinstance(value, str):
            return value
        plain: dict[str, Callable[..., Strategy]] = {
            "all-at-once": AllAtOnce,
            "fluid": Fluid,
            "matched": Matched,
            "paced": Paced,
        }
        if value in plain:
            return plain[value]
        if paced := re.fullmatch(r"paced:([0-9]{1,3}(?:\.[0-9]{1,3})?)", value):
            return partial(Paced, float(paced[1]))
        if batched := re.fullmatch(r"batched:([1-9][0-9]{0,8})", value):
            return partial(Batched, int(batched[1]))
        return self.fail(
            f"{value!r} is none of paced, paced:SLOWDOWN (such as paced:1.5), all-at-once, fluid, batched:N (such as "
            "batched:64) and matched",
            param,
            ctx,
        )


class WhenType(click.ParamType[Any]):
    """An epoch, an ISO time, `event:` and an ISO time, or `when:` and a condition."""

    name = "when"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        if re.fullmatch(r"[0-9]{1,15}", value):
            return int(value)
        if value.startswith("when:"):
            return self._condition(value.removeprefix("when:"), param, ctx)
        event, _, iso = value.rpartition("event:")
        try:
            moment = datetime.fromisoformat(iso)
        except ValueError:
            self.fail(
                f"{value!r} is neither an epoch (120), nor a time (2026-05-01T12:00:00Z), nor an event time "
                "(event:2026-05-01T12:00:00Z), nor a condition (when:lag_s>30)",
                param,
                ctx,
            )
        moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
        return ("event", moment) if value.startswith("event:") and not event else moment

    def _condition(self, text: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from millstream.protocol.conditions import METRICS, Condition

        told = re.fullmatch(r"\s*([a-z_]+)\s*(>=|<=|>|<)\s*(-?[0-9]+(?:\.[0-9]+)?)\s*", text)
        if told is None or told[1] not in METRICS:
            numbers = ", ".join(METRICS)
            self.fail(f"{text!r}: give a number and a bound, such as lag_s>30; the numbers are {numbers}", param, ctx)
        return Condition(told[1], told[2], float(told[3]))


class NumbersType(click.ParamType[Any]):
    """Whole numbers: `3`, `0-31`, `0-31,40`."""

    name = "numbers"
    most = 1 << 20

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        found: list[int] = []
        for part in value.split(","):
            ends = re.fullmatch(r"([0-9]{1,10})(?:-([0-9]{1,10}))?", part.strip())
            if ends is None:
                self.fail(f"{value!r}: give numbers such as 3, 0-31 or 0-31,40", param, ctx)
            first, last = int(ends[1]), int(ends[2] or ends[1])
            if last < first or last - first >= self.most:
                self.fail(f"{value!r}: {part.strip()} goes from {first} to {last}", param, ctx)
            found.extend(range(first, last + 1))
        return found


class SpanType(click.ParamType[Any]):
    """A range of the key space: two points of 16 hexadecimal digits, as plans print them."""

    name = "range"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        ends = re.fullmatch(r"([0-9a-fA-F]{16})-([0-9a-fA-F]{16})", value)
        if ends is None:
            self.fail(f"{value!r}: give two points of 16 hexadecimal digits, such as {'0' * 16}-{'7' + 'f' * 15}")
        return int(ends[1], 16), int(ends[2], 16)


class SettingType(click.ParamType[Any]):
    """`KEY=VALUE`, or two other things with a sign of equality between them, as `shape` says."""

    name = "setting"

    def __init__(self, shape: str = "KEY=VALUE") -> None:
        self.shape = shape

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        key, equals, setting = value.partition("=")
        if not key or not equals or (not setting and self.shape != "KEY=VALUE"):
            self.fail(f"{value!r}: give {self.shape}", param, ctx)
        return key, setting
