"""Python objects as bytes. What cannot be stored, or read again, is said with the name of the state or timer."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from millstream.errors import UserError


def dumped(what: str, value: Any) -> bytes:
    """A Python object as bytes."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        raise UserError(f"{what}: {_shown(value)} cannot be pickled: {error}") from error


def dumped_all(what: str, values: Iterable[Any]) -> list[bytes]:
    """Python objects as bytes."""
    return [dumped(what, value) for value in values]


def loaded(what: str, data: bytes) -> Any:
    """The Python object in these bytes."""
    try:
        return pickle.loads(data)
    except Exception as error:
        raise UserError(
            f"{what}: what is stored cannot be unpickled: {type(error).__name__}: {error}. Its class must be "
            "importable where it is read, and able to read what older code has written"
        ) from error


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # the value is the user's, so even its text may fail
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."
