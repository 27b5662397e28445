"""The control log: commands to a running query, one object each, from any process that can write to the store.

Rules
-----
- Command k is a conditional create of `control/<k>`, made when k-1 is there: commands are durable and ordered, and the
  driver, which journals how far it has read, carries each out once.
- What a command says is judged by the driver. Whatever cannot be read as a command is heard as one that makes no
  sense, and is refused by its number; it never stops a query.
- A sender whose write may or may not have happened reads back and compares the nonce.
- A store may be guarded by a token. It never lies in the store: `control-guard` holds a salt and a check of it, and
  each command a seal: an HMAC over its number and content, with a key made from token and salt. So a command can be
  neither forged without the token, nor repeated, nor taken to another store.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import os
import secrets
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from millstream.errors import ConflictError, DamagedObject, StoreUnavailable, UserError
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.modification import Modification
from millstream.protocol.steering import Ask, Cancel, Heard
from millstream.store import names
from millstream.store.objects import ObjectStore

MAX_COMMAND_BYTES = 64 << 20
_KINDS: dict[str, Any] = {"MigrationPlan": MigrationPlan, "Cancel": Cancel, "Modification": Modification}


@dataclass(frozen=True, slots=True)
class Command:
    """What is stored. `body` is the JSON of the plan or whatever else `kind` says."""

    number: int
    nonce: str
    verb: str
    kind: str
    body: msgspec.Raw
    sender: str
    at_ms: int
    seal: str = ""


class ControlLog:
    """The control log of a store, for senders and for the driver.

    >>> from millstream.store.objects import open_store
    >>> log = ControlLog(open_store("memory://"))
    >>> log.send("cancel", Cancel(7))
    0
    >>> log.hear(0).ask, log.hear(1)
    (Cancel(number=7), None)
    """

    def __init__(self, store: ObjectStore, token: str | None = None) -> None:
        self.store, self._token = store, token
        self._key: bytes | None = None

    def send(self, verb: str, ask: Ask, from_number: int = 0) -> int:
        """Adds a command; its number.

        `from_number` is how far the driver has heard, as a journal says that was read just now: older commands may
        have been deleted, and one that took such a number would never be heard.
        """
        self.check_token()
        body = msgspec.Raw(msgspec.json.encode(ask))
        command = Command(0, secrets.token_hex(8), verb, type(ask).__name__, body, _sender(), time.time_ns() // 10**6)
        if len(body) + 1000 > MAX_COMMAND_BYTES:
            raise UserError(
                f"the plan has {len(body):,} bytes, and a command may have {MAX_COMMAND_BYTES:,}: make several plans "
                "that move less each"
            )
        taken = {names.command_number(item.name) for item in self.store.list(names.CONTROL)}
        number = from_number
        for _ in range(256):
            while number in taken:
                number += 1
            command = replace(command, number=number)
            if self._create(command):
                return number
            number += 1
        raise ConflictError(f"could not add a command to the store {self.store.uri}: others keep adding theirs")

    def _create(self, command: Command) -> bool:
        data = msgspec.json.encode(replace(command, seal=self._seal(command)))
        try:
            return self.store.create(names.command(command.number), data) or self._is_ours(command)
        except StoreUnavailable:  # the reply may have been lost, and not the command
            if self._is_ours(command):
                return True
            raise

    def _is_ours(self, command: Command) -> bool:
        data = self.store.get(names.command(command.number))
        found = None if data is None else _decoded(data)
        return isinstance(found, Command) and found.nonce == command.nonce

    def hear(self, number: int) -> Heard | None:
        """The command of a number, or None if there is none yet. Whatever stands there, only a store that cannot be
        read raises; with a token, `guard` comes first."""
        data = self.store.get(names.command(number))
        if data is None:
            return None
        command = _decoded(data)
        if isinstance(command, str):
            return Heard(number, "?", None, command)
        at_ms = command.at_ms if 0 <= command.at_ms < 1 << 53 else 0
        told = Heard(number, _line(command.verb, 40), None, "", _line(command.sender, 200), at_ms)
        if command.number != number:
            return replace(told, trouble=f"it says that it is command {command.number}, and stands at {number}")
        if not hmac.compare_digest(command.seal.encode(), self._seal(command).encode()):
            return replace(told, trouble="it is not sealed with the token of this store" if self._token else _UNGUARDED)
        if command.kind not in _KINDS:
            kind = _line(command.kind, 40)
            return replace(told, trouble=f"it is a {kind!r}, expected one of {', '.join(_KINDS)}")
        ask = _asked(command)
        return replace(told, trouble=ask) if isinstance(ask, str) else replace(told, ask=ask)

    def unheard(self, from_number: int) -> dict[int, str]:
        """The commands from a number on, which the driver has not heard: number and verb."""
        found = {}
        for item in self.store.list(names.CONTROL):
            number = names.command_number(item.name)
            if number is not None and number >= from_number:
                data = self.store.get(item.name)
                command = None if data is None else _decoded(data)
                found[number] = _line(command.verb, 40) if isinstance(command, Command) else "?"
        return dict(sorted(found.items()))

    def read(self, number: int) -> MigrationPlan | Modification | None:
        """What a command that the driver has taken on asks for: no seal is looked at again."""
        data = self.store.get(names.command(number))
        command = None if data is None else _decoded(data)
        if not isinstance(command, Command) or command.kind not in _KINDS:
            return None
        ask = _asked(command)
        return ask if isinstance(ask, MigrationPlan | Modification) else None

    # -- the guard

    def guard(self) -> None:
        """Guards the store with this log's token, if it has one and the store has none; refuses a wrong one."""
        if self._token and self.store.get(names.GUARD) is None:
            salt = secrets.token_hex(16)
            check = _sealed(_stretched(self._token, salt), _CHECKED)
            self.store.create(names.GUARD, msgspec.json.encode(Guard(salt, check)))
        self.check_token()

    def check_token(self) -> None:
        """Refuses a token that is missing, wrong, or not wanted."""
        data = self.store.get(names.GUARD)
        if data is None and self._token:
            raise UserError(
                f"the store {self.store.uri} is not guarded, so a token means nothing here. Leave it out, or start the "
                "query with it: start(token=...)"
            )
        if data is None:
            return
        if not self._token:
            raise UserError(f"the store {self.store.uri} is guarded: give the token that it was guarded with")
        self._key = self._unlocked(data)

    def _unlocked(self, data: memoryview) -> bytes:
        try:
            guard = msgspec.json.decode(bytes(data), type=Guard)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedObject(names.GUARD, _line(str(error), 200), "a salt and a check") from None
        key = _stretched(self._token or "", guard.salt)
        if not hmac.compare_digest(_sealed(key, _CHECKED).encode(), guard.check.encode()):
            raise UserError(f"this is not the token that the store {self.store.uri} is guarded with")
        return key

    def _seal(self, command: Command) -> str:
        if not self._token:
            return ""
        if self._key is None:
            self.check_token()
        return _sealed(self._key or b"", msgspec.json.encode(replace(command, seal="")))


_UNGUARDED = "it is sealed with a token, and this query was started without one"
_CHECKED = b"millstream"


@dataclass(frozen=True, slots=True)
class Guard:
    """What a store knows of its token: enough to tell another from it, and too little to find it quickly."""

    salt: str
    check: str


def _stretched(token: str, salt: str) -> bytes:
    """The key of a store: each guess at its token costs a tenth of a second, and none counts for two stores."""
    return hashlib.scrypt(token.encode(), salt=salt.encode(), n=2**14, r=8, p=1)


def _sealed(key: bytes, data: bytes) -> str:
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def _decoded(data: memoryview) -> Command | str:
    """A command, or why it is none."""
    if len(data) > MAX_COMMAND_BYTES:
        return f"it has {len(data)} bytes, more than {MAX_COMMAND_BYTES}"
    try:
        return msgspec.json.decode(bytes(data), type=Command)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"it cannot be read as a command: {_line(str(error), 400)}"


def _asked(command: Command) -> Ask | str:
    """What a command of a known kind asks for, or why that cannot be known."""
    try:
        ask: Ask = msgspec.json.decode(bytes(command.body), type=_KINDS[command.kind])
        return ask if _fits(ask) else f"its {command.kind} cannot be read: it has a number beyond 64 bits"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UserError) as error:  # a range may be wrong
        return f"its {command.kind} cannot be read: {_line(str(error), 400)}"


def _fits(ask: Ask) -> bool:
    """Whether all numbers are such as one can calculate with."""
    if isinstance(ask, Cancel):
        return _is_long(ask.number)
    start = ask.start
    if isinstance(ask, Modification):
        return all(map(_is_long, [ask.version, start.epoch, start.clock_ms, start.event_time]))
    few = [ask.gap, ask.fetch_limit, start.epoch, start.clock_ms, start.event_time]
    moves = [move for moves in ask.rounds for move in moves]
    return all(map(_is_long, [*few, *ask.versions.values(), *ask.bin_bits.values()])) and all(
        _is_long(move.origin) and _is_long(move.target) and _is_long(move.bytes) and _is_long(move.bins)
        for move in moves
    )


def _is_long(number: int | None) -> bool:
    return number is None or -(1 << 63) <= number < 1 << 63


def _line(text: str, most: int) -> str:
    """A text from elsewhere as one that may be printed: one line without control characters, and not too long."""
    return "".join(each if each.isprintable() else "?" for each in text[:most])


def _sender() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "?"
    return f"{user}@{socket.gethostname()}:{os.getpid()}"
