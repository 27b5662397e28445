"""placeholder: replaced by the helper's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millstream.errors import UserError


@dataclass(frozen=True, slots=True)
class Carry:
    type: Any = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Fresh:
    pass


@dataclass(frozen=True, slots=True)
class Drop:
    pass


@dataclass(frozen=True, slots=True)
class Convert:
    fn: Any
    source: str | None = None
    batch: bool = False


def carry(type: Any = None, *, source: str | None = None) -> Carry:
    return Carry(type, source)


def fresh() -> Fresh:
    return Fresh()


def drop() -> Drop:
    return Drop()


def lift_of(rule: Any, old: Any, new: Any) -> Any:
    if old.stored_text != new.stored_text:
        raise UserError(f"is {old.stored_text}, and would be {new.stored_text}")
    return None
