"""The control log: commands to a running query, one object each, from any process that can write to the store.

Rules
-----
- Command k is a conditional create of `control/<k>`, made when k-1 is there: commands are durable and ordered, and the
  driver, which journals how far it has read, carries each out once.
- What a command says is judged by the driver. Whatever cannot be read as a command is heard as one that makes no
  sense, and is refused by its number; it never stops a query.
- A store may be guarded by a token. It never lies in the store: `control-guard` holds a check of it, and each command
  a seal (an HMAC over its number and content), so that a command can be neither forged nor repeated.
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

from millstream.errors import ConflictError, UserError
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.steering import Cancel, Heard
from millstream.store import names
from millstream.store.objects import ObjectStore

MAX_COMMAND_BYTES = 64 << 20
_KINDS: dict[str, Any] = {"MigrationPlan": MigrationPlan, "Cancel": Cancel}


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

    def send(self, verb: str, ask: MigrationPlan | Cancel, from_number: int = 0) -> int:
        """Adds a command; its number. `from_number` is one that is known to be free or taken, with all before it."""
        self.check_token()
        body = msgspec.Raw(msgspec.json.encode(ask))
        command = Command(0, secrets.token_hex(8), verb, type(ask).__name__, body, _sender(), time.time_ns() // 10**6)
        numbers = [names.entry_number(item.name) for item in self.store.list(names.CONTROL)]
        number = max([from_number, *(found + 1 for found in numbers)])
        for _ in range(256):
            command = replace(command, number=number)
            data = msgspec.json.encode(replace(command, seal=self._seal(command)))
            if self.store.create(names.command(number), data) or self._is_ours(number, command.nonce):
                return number
            number += 1
        raise ConflictError(f"could not add a command to the store {self.store.uri}: others keep adding theirs")

    def hear(self, number: int) -> Heard | None:
        """The command of a number, or None if there is none yet."""
        data = self.store.get(names.command(number))
        if data is None:
            return None
        if len(data) > MAX_COMMAND_BYTES:
            return Heard(number, "?", None, f"it has {len(data)} bytes, more than {MAX_COMMAND_BYTES}")
        try:
            command = msgspec.json.decode(bytes(data), type=Command)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return Heard(number, "?", None, f"it cannot be read as a command: {error}")
        told = Heard(number, command.verb[:40], None, "", command.sender[:200], command.at_ms)
        if command.number != number:
            return replace(told, trouble=f"it says that it is command {command.number}, and stands at {number}")
        if not hmac.compare_digest(command.seal, self._seal(command)):
            return replace(told, trouble="it is not sealed with the token of this store" if self._token else _UNGUARDED)
        if command.kind not in _KINDS:
            return replace(told, trouble=f"it is a {command.kind[:40]!r}, expected one of {', '.join(_KINDS)}")
        try:
            return replace(told, ask=msgspec.json.decode(bytes(command.body), type=_KINDS[command.kind]))
        except (msgspec.DecodeError, UserError) as error:  # a range may be impossible
            return replace(told, trouble=f"its {command.kind} cannot be read: {error}")

    def guard(self) -> None:
        """Guards the store with this log's token, if it has one and the store has none; refuses a wrong one."""
        if self._token:
            salt = secrets.token_hex(16)
            check = {"salt": salt, "check": _check(self._token, salt)}
            self.store.create(names.GUARD, msgspec.json.encode(check))
        self.check_token()

    def check_token(self) -> None:
        """Refuses a token that is missing, wrong, or not wanted."""
        found = self.store.get(names.GUARD)
        if found is None:
            return
        guard = msgspec.json.decode(bytes(found))
        if not self._token:
            raise UserError(f"the store {self.store.uri} is guarded: give the token that it was guarded with")
        if not hmac.compare_digest(_check(self._token, guard["salt"]), guard["check"]):
            raise UserError(f"this is not the token that the store {self.store.uri} is guarded with")

    def _seal(self, command: Command) -> str:
        if not self._token:
            return ""
        unsealed = msgspec.json.encode(replace(command, seal=""))
        return hmac.new(self._token.encode(), unsealed, hashlib.sha256).hexdigest()

    def _is_ours(self, number: int, nonce: str) -> bool:
        """The reply to our own create may have been lost."""
        data = self.store.get(names.command(number))
        try:
            return data is not None and msgspec.json.decode(bytes(data), type=Command).nonce == nonce
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False


_UNGUARDED = "it is sealed with a token, and this query was started without one"


def _check(token: str, salt: str) -> str:
    return hashlib.scrypt(token.encode(), salt=salt.encode(), n=2**14, r=8, p=1).hex()


def _sender() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "?"
    return f"{user}@{socket.gethostname()}:{os.getpid()}"
