"""Every object name of a store, built and read here and nowhere else.

Rules
-----
- A name that holds state or productions carries who made it: generation, epoch and attempt, so that garbage is
  recognised by name alone, and something random, so that no two tasks ever write the same name (G3). The one exception
  is what a task with strong productions made: all runs of a task look for it under one name, and the first creates it.
- A compaction is not an attempt of an epoch; it is named by the epoch it started from and `c<number>`.
- Code is named by what it is: the SHA-256 of its bytes.
- Step, state and stream names go into paths; `model.query` limits what they may be.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

from millstream.protocol.manifest import Family

FORMAT = "format"
JOURNAL = "journal/"
SNAPSHOTS = "snapshots/"
SEGMENTS = "segments/"
PRODUCTIONS = "productions/"
OVERFLOW = "overflow/"
STRONG = "strong/"
CONTROL = "control/"
GUARD = "control-guard"
CODE = "code/"

_COMMAND = re.compile(rf"{CONTROL}([0-9]{{20}})")
_MADE_BY = re.compile(r"g(\d+)-e(\d+)-(a|c)(\d+)-")


class Maker(NamedTuple):
    """Who wrote an object: an attempt of an epoch, or a compaction (`kind` is "a" or "c")."""

    generation: int
    epoch: int
    kind: str
    number: int

    def __str__(self) -> str:
        return f"g{self.generation}-e{self.epoch}-{self.kind}{self.number}"


def journal_entry(number: int) -> str:
    return f"{JOURNAL}{number:020d}"


def entry_number(name: str) -> int:
    return int(name.rsplit("/", 1)[1])


def command(number: int) -> str:
    return f"{CONTROL}{number:020d}"


def command_number(name: str) -> int | None:
    """The number of a command, or None if the name is not one of ours."""
    found = _COMMAND.fullmatch(name)
    return int(found[1]) if found else None


def code(sha: str) -> str:
    return f"{CODE}{sha}"


def snapshot(number: int) -> str:
    return f"{SNAPSHOTS}{number:020d}-{secrets.token_hex(4)}"


def snapshot_number(name: str) -> int:
    return int(name.rsplit("/", 1)[1].split("-")[0])


def segment(family: Family, maker: Maker, slot: int) -> str:
    return f"{SEGMENTS}{family.step}/{family.state}/{maker}-s{slot}-{secrets.token_hex(6)}.arrow"


def production(stream: str, maker: Maker, slot: int) -> str:
    return f"{PRODUCTIONS}{stream}/{maker}-s{slot}-{secrets.token_hex(6)}.arrow"


def overflow(maker: Maker, producer: str) -> str:
    return f"{OVERFLOW}{maker}-{producer}-{secrets.token_hex(6)}"


def strong(maker: Maker, level: int, slot: int) -> str:
    return f"{STRONG}{maker}-{level}.{slot}"


def base(name: str) -> str:
    """The last part of a name, which by itself tells objects of state apart."""
    return name.rsplit("/", 1)[-1]


def maker_of(name: str) -> Maker | None:
    """Who made an object, or None if the name is not one of ours."""
    found = _MADE_BY.match(base(name))
    if found is None:
        return None
    generation, epoch, kind, number = found.groups()
    return Maker(int(generation), int(epoch), kind, int(number))
