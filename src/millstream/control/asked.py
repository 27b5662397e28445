"""What the verbs on the command line share: options, how a command is sent and waited for, and what is said of it.

Rules
-----
- With `--json`, standard output is one JSON object, also for errors: `error`, `kind`, `exit_code`. Only wrong usage and
  Ctrl-C are told as text alone.
- A verb that changes something waits for its answer while a driver runs, unless it is told not to. Where no driver
  runs, it says so at once, and waits only if it is told to. Who stops waiting takes nothing back: the command is in the
  store.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from millstream.control.arguments import SettingType, WhenType
from millstream.control.exits import INTERRUPTED, code_of, complain
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.control.connect import Control
    from millstream.control.handle import Handle, Progress
    from millstream.protocol.migration import MigrationPlan
    from millstream.protocol.steering import Outcome

TOKEN_VARIABLE = "MILLSTREAM_TOKEN"


# -- options ----------------------------------------------------------------------------------------------------------


Function = Callable[..., Any]
Option = Callable[[Function], Function]


def options_of(*options: Option) -> Option:
    """Several options as one, in this order."""

    def added(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return added


STORE = click.argument("store")
LOOKING = options_of(
    click.option(
        "--store-option",
        "settings",
        type=SettingType(),
        multiple=True,
        metavar="KEY=VALUE",
        help="A setting for the store's backend, as in `store_options` of `Query.start`; repeatable.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
)
TOKEN = click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    show_envvar=True,
    metavar="TEXT",
    help="The token that the query was started with, if it was. Rather set the variable: others can see arguments.",
)
WAITING = options_of(
    click.option(
        "--wait/--no-wait",
        "wait",
        default=None,
        help="Wait for what becomes of it, or do not. By default it is waited for while a driver runs.",
    ),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Wait no longer; the command stays, and the exit code is 4.",
    ),
)
AT = click.option(
    "--at",
    type=WhenType(),
    metavar="WHEN",
    help="Begin at an epoch (120), a time (2026-05-01T12:00:00Z, UTC unless it says otherwise), or an event time "
    "(event:2026-05-01T12:00:00Z) that the watermarks reach, or when a condition holds (when:lag_s>30).",
)


class _DriverGone(Exception):
    """The driver is gone while a command is waited for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that several verbs share, as they were given."""

    control: Control
    as_json: bool
    wait: bool | None = None
    timeout: float | None = None
    dry_run: bool = False

    def say(self, text: str) -> None:
        """Tells something to people."""
        if not self.as_json:
            click.echo(text)

    def carry_out(self, plan: MigrationPlan) -> None:
        """Shows a plan, sends it, and waits for it, as far as that was asked for."""
        self.say(str(plan))
        told: dict[str, Any] = {"plan": summary(plan), "dry_run": self.dry_run, "command": None, "outcome": None}
        if self.dry_run or not plan.rounds:
            self._finish(told)
        else:
            self.follow(self.control.apply(plan), told)

    def follow(self, handle: Handle, told: dict[str, Any]) -> None:
        """Waits for a command, unless it is not to be waited for, and tells what came of it."""
        told["command"] = handle.number
        self.say(f"Sent as command {handle.number}.")
        gone = self.control._gone(self.control._look())
        if self.wait is False or (gone and not self._waits):
            self._left_alone(gone, told)
        try:
            with _shown(handle, self.as_json) as tell:
                outcome = handle.wait(self.timeout, partial(self._watched, tell))
        except _DriverGone as gone_meanwhile:
            self._left_alone(str(gone_meanwhile), told)
        except KeyboardInterrupt:
            click.echo(
                f"No longer waiting. The command goes on; `millstream cancel STORE {handle.number}` ends it.", err=True
            )
            click.get_current_context().exit(INTERRUPTED)
        told["outcome"] = msgspec.to_builtins(outcome)
        self.say(f"{outcome.text}\nNothing was changed." if self.dry_run else sentence(outcome))
        self._finish(told)
        if outcome.state == "cancelled":  # it was asked for, and only a part of it was done
            click.get_current_context().exit(1)

    @property
    def _waits(self) -> bool:
        """Whether it was asked to wait, whoever runs."""
        return bool(self.wait) or self.timeout is not None

    def _watched(self, tell: Callable[[Progress], None] | None, progress: Progress) -> None:
        """Tells of progress; ends the waiting if the driver is gone by now."""
        if tell is not None:
            tell(progress)
        gone = "" if self._waits else self.control._gone(self.control._look())
        if gone:
            raise _DriverGone(gone)

    def _left_alone(self, gone: str, told: dict[str, Any]) -> NoReturn:
        """Ends without waiting, and says why if no driver runs."""
        if gone:
            told["driver_gone"] = gone
            self.say(f"{gone[0].upper()}{gone[1:]}. The command is carried out when one runs; --wait waits for that.")
        self._finish(told)
        click.get_current_context().exit(0 if self.wait is False else 4)
        raise AssertionError("a context that has exited goes on")

    def _finish(self, told: Mapping[str, Any]) -> None:
        if self.as_json:
            echo_json(told)


def verb(*options: Option) -> Callable[[Function], click.Command]:
    """A command whose function gets an `Asked` first, and whose errors become JSON if that was asked for."""

    def decorate(function: Function) -> click.Command:
        @functools.wraps(function)
        def run(
            store: str,
            settings: tuple[tuple[str, str], ...],
            as_json: bool,
            wait: bool | None = None,
            timeout: float | None = None,
            dry_run: bool = False,
            token: str | None = None,
            **given: Any,
        ) -> None:
            from millstream.control.connect import connect

            try:
                control = connect(store, options=dict(settings), token=token or None)
                function(Asked(control, as_json, wait, timeout, dry_run), **given)
            except (MillstreamError, TimeoutError) as error:
                if as_json:
                    echo_json({"error": str(error), "kind": type(error).__name__, "exit_code": code_of(error)})
                complain(error)
                click.get_current_context().exit(code_of(error))

        return click.command()(STORE(options_of(*options, LOOKING)(run)))

    return decorate


# -- what is said -----------------------------------------------------------------------------------------------------


def sentence(outcome: Outcome) -> str:
    """What has become of a command, in one line."""
    text = f"Command {outcome.number} ({outcome.verb}): {outcome.state}"
    if outcome.state == "committed":
        text += f" in epoch {outcome.began}"
    elif outcome.rounds:
        text += f", {outcome.done} of {outcome.rounds} rounds"
    if outcome.began >= 0 and outcome.state != "committed":
        text += f", epochs {outcome.began}..{outcome.last}"
    if outcome.empty_ms:
        text += f"; worker {outcome.drains} is empty"
    return f"{text}: {outcome.reason}" if outcome.reason else text


def summary(plan: MigrationPlan) -> dict[str, Any]:
    """A plan in few words, for programs."""
    return {
        "verb": plan.verb,
        "strategy": plan.strategy,
        "gap": plan.gap,
        "protocol": plan.protocol,
        "prepared": plan.prepared,
        "expected": plan.expected,
        "versions": plan.versions,
        "rounds": len(plan.rounds),
        "epochs": plan.epochs,
        "moves": sum(len(moves) for moves in plan.rounds),
        "bins": plan.bins,
        "bytes": plan.bytes,
        "stall_bytes": plan.stall_bytes,
        "fetch_limit": plan.fetch_limit,
        "expected_stall_s": plan.expected_stall_s(plan.fetch_limit) if plan.fetch_limit else None,
        "start": msgspec.to_builtins(plan.start),
    }


def echo_json(value: Any) -> None:
    """One JSON object, on one line."""
    click.echo(msgspec.json.encode(value).decode())


@contextmanager
def _shown(handle: Handle, as_json: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar while one waits, if there is a terminal to draw it in."""
    if as_json or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"command {handle.number}", total=None)

        def tell(progress: Progress) -> None:
            text = f"command {handle.number}: {progress.state}"
            bar.update(task, description=text, completed=progress.done, total=progress.rounds or None)

        yield tell
