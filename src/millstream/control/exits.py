"""How a command of the command line ends: its exit code, and what it says of an error.

Rules
-----
- 0 good; 1 an error, a refusal or a wrong result; 2 wrong usage; 3 somebody else was quicker: plan again; 4 not over
  in time; 70 our bug; 130 Ctrl-C.
- An error of ours is one text on standard error, red in a terminal, without a traceback. Anything else is a bug and
  shows its traceback.
"""

from __future__ import annotations

import os

import click

from millstream.errors import ConflictError, InvariantViolation, MillstreamError

EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ConflictError, 3),
    (InvariantViolation, 70),
    (MillstreamError, 1),
    (TimeoutError, 4),
)
INTERRUPTED = 130


def code_of(error: Exception) -> int:
    """The exit code of an error of ours."""
    return next(code for kind, code in EXIT_CODES if isinstance(error, kind))


def complain(error: Exception) -> None:
    """Says what went wrong."""
    _red(str(error))
    if isinstance(error, InvariantViolation):
        _red("This is a bug in Millstream: please report it, with the text above and `millstream --version`.")


def _red(text: str) -> None:
    # `color=False` removes colours, None leaves it to click, which keeps them for terminals only.
    click.secho(text, fg="red", err=True, color=False if os.environ.get("NO_COLOR") else None)
