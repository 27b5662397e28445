"""Dead letters: the records that a computation fails on, told apart from those it does not.

Rules
-----
- A record that raises, or that sets or yields what does not fit its declaration, changes nothing: state, timers and
  productions are as before it, and the next record of the key goes on from there (G1).
- A timer whose callback raises has fired; what the callback changed is undone.
- What could not be read from the store is no fault of a record, and never becomes a letter.
- Nothing here runs for a step that does not ask for letters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from millstream.errors import DamagedObject, StoreUnavailable
from millstream.model.fits import fitting
from millstream.model.holds import RecordHold
from millstream.model.times import moment
from millstream.model.types import parse_schema

if TYPE_CHECKING:
    from millstream.model.computation import _RecordRun
    from millstream.model.timers import RecordTimer

STOP, DEAD_LETTER = "stop", "dead_letter"
ON_ERROR = (STOP, DEAD_LETTER)
"""What a step may do with a record that fails."""

OUTPUT = DEAD_LETTER
"""The name of the output."""

SCHEMA = parse_schema("step string, key string, record string, error string, epoch long")

TEXT_LIMIT = 2000
"""Characters of a key, record or error."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A record or timer that failed: its key, itself and the error as text, and its event time."""

    key: str
    record: str
    error: str
    micros: int


def as_batch(step: str, epoch: int, letters: Sequence[Letter]) -> pa.RecordBatch:
    """Letters as productions of a step."""
    columns = [
        [step] * len(letters),
        [letter.key for letter in letters],
        [letter.record for letter in letters],
        [letter.error for letter in letters],
        [epoch] * len(letters),
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def bounded(text: str) -> str:
    """A text of user data as it is stored."""
    return plain(text[:TEXT_LIMIT])[:TEXT_LIMIT]


def plain(text: str) -> str:
    """A text that can be stored: halves of characters, which Python's may hold, are spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()


def cause_text(cause: BaseException) -> str:
    """What was raised, in one text. The exception is the user's, so even its text may fail."""
    try:
        told = str(cause)
    except Exception as error:
        told = f"(its text cannot be had: {type(error).__name__})"
    return bounded(f"{type(cause).__name__}: {told}")


def timer_text(name: str, micros: int, tag: str) -> str:
    """How a timer is named where a record would be."""
    return f"timer {name!r} at {moment(micros)}, tag {tag!r}"


class RecordHandle(Protocol):
    """What a handle of state or timers offers in `on_record`, for the current key."""

    index: int

    def saved(self) -> Any:
        """What `restore` needs to undo all that follows. Only what was saved last can be restored."""
        ...

    def restore(self, saved: Any) -> None: ...

    def check(self) -> None:
        """Raises if the value of the current key does not fit what was declared."""
        ...


class Guarded:
    """Calls the methods of a computation in a run of records: what one of the calls raises becomes a letter."""

    def __init__(self, run: _RecordRun, convert: Callable[[list[Any]], Any], schemas: Mapping[str, pa.Schema]) -> None:
        self._run, self._on_record, self._convert = run, run.computation.on_record, convert
        self._handles: list[RecordHandle] = run.handles
        self._fits = None if "" not in schemas else [fitting(field.type) for field in schemas[""]]
        self.letters: list[Letter] = []

    def on_record(self, record: Any, at: Any) -> list[Any] | None:
        return self.called(self._on_record, record, at)

    def endless(self, error: Exception, timer: RecordTimer, micros: int, tag: str) -> None:
        """A timer that keeps setting itself is not called again."""
        self._run.timer, self._run.at.micros, self._run.at.tag = timer, micros, tag
        self._note(error)

    def called(self, fn: Callable[..., Any], *arguments: Any) -> list[Any] | None:
        """What a call yields, all of it; None if it failed."""
        saved = [handle.saved() for handle in self._handles]
        try:
            yielded = fn(*arguments)
            produced = None if yielded is None else list(yielded)
            for handle in self._handles:
                handle.check()
            if produced and not all(map(self._plain_fit, produced)):
                self._convert(produced)
        except (DamagedObject, StoreUnavailable, MemoryError):  # no fault of the record
            raise
        except (Exception, SystemExit) as error:
            for handle, before in zip(self._handles, saved, strict=True):
                handle.restore(before)
            self._note(error)
            return None
        return produced

    def _note(self, error: BaseException) -> None:
        run = self._run
        if run.timer is not None:  # whoever was to release the key's holds may never be called again
            for handle in self._handles:
                if isinstance(handle, RecordHold):
                    handle.release()
        key, record = bounded(repr(run.keys[run.index])), bounded(run.subject())
        self.letters.append(Letter(key, record, cause_text(error), run.stamp))

    def _plain_fit(self, item: Any) -> bool:
        """Whether a production surely fits, by a look at it; if not, converting it tells."""
        fits = self._fits
        if fits is None or type(item) is not tuple or len(item) != len(fits):
            return False
        return all(fit(value) for fit, value in zip(fits, item, strict=True))
