"""Whose fault is it? Every error Millstream raises answers that by its class.

- `UserError`: yours to fix (a wrong argument, a raise in your code, a damaged disk). Retrying changes nothing.
- `ConflictError`: somebody else was quicker (another driver, a newer plan). Look again, then retry.
- `InvariantViolation`: our bug. The query stopped rather than continue with a state it cannot vouch for.

A message says what happened, what was found and expected, and what to do.
"""

from __future__ import annotations


class MillstreamError(Exception):
    """Base of every error raised by Millstream."""


class UserError(MillstreamError):
    """Something the user gave or runs is wrong; the text says what to do."""


class StepError(UserError):
    """User code of a step raised. State is as of the last commit; mend the code and start again.

    Has `step`, `epoch`, `key`, `record`, `cause` and `trace`.
    """

    def __init__(self, step: str, epoch: int, key: str, record: str, cause: str, trace: str = "") -> None:
        self.step, self.epoch, self.key, self.record, self.cause, self.trace = (
            step,
            epoch,
            key,
            record,
            cause,
            trace,
        )
        parts = [f"step {step!r} failed in epoch {epoch}: {cause}"]
        if key:
            parts.append(f"  key:    {key}")
        if record:
            parts.append(f"  record: {record}")
        parts.append("  Nothing of this epoch was committed. Mend the computation and start the query again.")
        if trace:
            parts.append(trace.rstrip())
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[type[StepError], tuple[str, int, str, str, str, str]]:
        return StepError, (self.step, self.epoch, self.key, self.record, self.cause, self.trace)


class SinkError(UserError):
    """The function of a sink raised. The epoch is committed; it is delivered again when the query is started again.

    Has `sink`, `epoch` and `cause`.
    """

    def __init__(self, sink: str, epoch: int, cause: str) -> None:
        self.sink, self.epoch, self.cause = sink, epoch, cause
        super().__init__(
            f"sink {sink!r} failed in epoch {epoch}: {cause}. The epoch is committed and its productions are stored: "
            "mend the sink and start the query again, and they are delivered again."
        )

    def __reduce__(self) -> tuple[type[SinkError], tuple[str, int, str]]:
        return SinkError, (self.sink, self.epoch, self.cause)


class DamagedObject(UserError):
    """A stored object is missing, truncated or altered. It is named and never used.

    Has `name`, `found` and `expected`.
    """

    def __init__(self, name: str, found: str, expected: str) -> None:
        self.name, self.found, self.expected = name, found, expected
        super().__init__(
            f"stored object {name!r} is damaged: found {found}, expected {expected}. "
            "It was not used. Restore this object from a copy of the store, then start the query again."
        )

    def __reduce__(self) -> tuple[type[DamagedObject], tuple[str, str, str]]:
        return DamagedObject, (self.name, self.found, self.expected)


class StoreUnavailable(UserError):
    """The store could not be read or written (no space, no permission, no network)."""


class ConflictError(MillstreamError):
    """The world moved on since you looked; look again and retry."""


class Fenced(ConflictError):
    """A newer driver has claimed the store; this one may no longer write to it."""


class InvariantViolation(MillstreamError):
    """Millstream found itself in a state that must not exist. Please report it."""
