"""The verbs on the command line: looking at a query (`status`, `watch`, `commands`), and moving its state (`rescale`,
`move`, `drain`, `balance`, `split`, `merge`, `bins`, `cancel`).

Rules
-----
- Each does what the method of the same name of `millstream.connect(STORE)` does, and says what came of it.
- With `--json`, standard output is one JSON object (of `watch`, one whenever something has changed), also for errors:
  `error`, `kind`, `exit_code`. Only wrong usage and Ctrl-C are told as text alone.
- A verb that changes something waits for its answer, unless it is told not to. Who stops waiting, by Ctrl-C or a
  timeout, takes nothing back: the command is in the store.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from millstream.control.arguments import NumbersType, SettingType, SpanType, StrategyType, WhenType
from millstream.control.exits import INTERRUPTED, code_of, complain
from millstream.errors import MillstreamError, UserError

if TYPE_CHECKING:
    from millstream.control.connect import Control
    from millstream.control.handle import Handle, Progress
    from millstream.protocol.migration import MigrationPlan
    from millstream.protocol.steering import Outcome
    from millstream.protocol.strategies import Strategy

TOKEN_VARIABLE = "MILLSTREAM_TOKEN"


# -- options ----------------------------------------------------------------------------------------------------------


Function = Callable[..., Any]
Option = Callable[[Function], Function]


def _options(*options: Option) -> Option:
    """Several options as one, in this order."""

    def added(function: Function) -> Function:
        for option in reversed(options):
            function = option(function)
        return function

    return added


_STORE = click.argument("store")
_LOOKING = _options(
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
_TOKEN = click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    show_envvar=True,
    metavar="TEXT",
    help="The token that the query was started with, if it was. Rather set the variable: others can see arguments.",
)
_WAITING = _options(
    click.option("--no-wait", is_flag=True, help="Do not wait for what becomes of it."),
    click.option(
        "--timeout",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        help="Wait no longer; the command stays, and the exit code is 4.",
    ),
)
_TERMS = _options(
    click.option("--step", "steps", multiple=True, metavar="NAME", help="This step alone; repeatable."),
    click.option(
        "--at",
        type=WhenType(),
        metavar="WHEN",
        help="Begin at an epoch (120), a time (2026-05-01T12:00:00Z, UTC unless it says otherwise), or an event time "
        "(event:2026-05-01T12:00:00Z) that the watermarks reach.",
    ),
    click.option("--dry-run", is_flag=True, help="Print the plan and change nothing."),
)
_PLANNING = _options(
    click.option(
        "--strategy",
        type=StrategyType(),
        default="batched:64",
        show_default=True,
        metavar="S",
        help="Which bins move together: all-at-once, fluid, batched:N or matched.",
    ),
    click.option(
        "--gap",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="Epochs between two rounds in which nothing moves.",
    ),
    _TERMS,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The options that several verbs share, as they were given."""

    control: Control
    as_json: bool
    no_wait: bool = False
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
        if self.no_wait:
            self._finish(told)
            return
        try:
            with _shown(handle, self.as_json) as tell:
                outcome = handle.wait(self.timeout, tell)
        except KeyboardInterrupt:
            click.echo(
                f"No longer waiting. The command goes on; `millstream cancel STORE {handle.number}` ends it.", err=True
            )
            click.get_current_context().exit(INTERRUPTED)
        told["outcome"] = msgspec.to_builtins(outcome)
        self.say(sentence(outcome))
        self._finish(told)

    def _finish(self, told: Mapping[str, Any]) -> None:
        if self.as_json:
            echo_json(told)


def _verb(*options: Option) -> Callable[[Function], click.Command]:
    """A command whose function gets an `Asked` first, and whose errors become JSON if that was asked for."""

    def decorate(function: Function) -> click.Command:
        @functools.wraps(function)
        def run(
            store: str,
            settings: tuple[tuple[str, str], ...],
            as_json: bool,
            no_wait: bool = False,
            timeout: float | None = None,
            dry_run: bool = False,
            token: str | None = None,
            **given: Any,
        ) -> None:
            from millstream.control.connect import connect

            try:
                control = connect(store, options=dict(settings), token=token or None)
                function(Asked(control, as_json, no_wait, timeout, dry_run), **given)
            except (MillstreamError, TimeoutError) as error:
                if as_json:
                    echo_json({"error": str(error), "kind": type(error).__name__, "exit_code": code_of(error)})
                complain(error)
                click.get_current_context().exit(code_of(error))

        return click.command()(_STORE(_options(*options, _LOOKING)(run)))

    return decorate


# -- the verbs --------------------------------------------------------------------------------------------------------


@_verb()
def status(asked: Asked) -> None:
    """Show how a query stands.

    STORE is what the query was started with: a directory, or an s3://, gs:// or az:// URI. Shown are epoch, slots,
    workers, watermarks and commands under way, as of the last commit. The store cannot tell whether a driver runs, but
    when one last wrote.
    """
    from millstream.control.watch import lines

    overview = asked.control.status()
    if asked.as_json:
        echo_json(overview)
    else:
        click.echo("\n".join(lines(overview)))


@_verb(
    click.option("--once", is_flag=True, help="Show it once and end."),
    click.option(
        "--every",
        type=click.FloatRange(min=0.05),
        default=0.5,
        show_default=True,
        metavar="SECONDS",
        help="How often to look.",
    ),
)
def watch(asked: Asked, once: bool, every: float) -> None:
    """Show a query as it goes on.

    In a terminal a live picture of the query of STORE, until Ctrl-C: epochs, records, watermarks, the slots of each
    worker with their bytes, and the progress of migrations. Anywhere else a line whenever something has changed, and
    with --json an object.
    """
    from millstream.control.watch import follow

    follow(asked.control, every, once, asked.as_json)


@_verb()
def commands(asked: Asked) -> None:
    """List what became of commands.

    Of those that were sent to the query of STORE, all that are under way, and the last 128 that are over.
    """
    outcomes = asked.control.commands()
    if asked.as_json:
        echo_json({"commands": outcomes})
        return
    for outcome in outcomes:
        click.echo(sentence(outcome))
        click.echo(f"  {_when(outcome.at_ms)}{outcome.sender or 'the sender is not known'}")
    if not outcomes:
        click.echo("No command has been heard.")


@_verb(click.argument("slots", type=click.IntRange(min=1)), _PLANNING, _WAITING, _TOKEN)
def rescale(asked: Asked, slots: int, **given: Any) -> None:
    """Change the number of slots.

    The query of STORE goes on while its bins move, until it has SLOTS slots with as many bins each.
    """
    asked.carry_out(asked.control.plan_rescale(slots, **_planned(**given)))


@_verb(
    click.option("--to", type=NumbersType(), required=True, metavar="SLOTS", help="Where it goes: 3, or 2,3 in parts."),
    click.option("--bins", type=NumbersType(), metavar="BINS", help="These bins: 7, 0-31 or 0-31,40."),
    click.option(
        "--range",
        "ranges",
        type=SpanType(),
        multiple=True,
        metavar="FIRST-LAST",
        help="This range of the key space, in hexadecimal, both ends included; repeatable.",
    ),
    click.option(
        "--from", "slots", type=NumbersType(), metavar="SLOTS", help="What these slots own, or a share of it."
    ),
    click.option(
        "--share",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        help="With --from, which share of the bins of each slot: 0.5.",
    ),
    _PLANNING,
    _WAITING,
    _TOKEN,
)
def move(
    asked: Asked,
    to: list[int],
    bins: list[int] | None,
    ranges: tuple[tuple[int, int], ...],
    slots: list[int] | None,
    share: float | None,
    **given: Any,
) -> None:
    """Move bins or ranges to other slots.

    Bins, ranges of the key space, or a share of what slots own, while the query of STORE runs:

    \b
      millstream move STORE --bins 0-31 --to 3
      millstream move STORE --from 0,1 --share 0.5 --to 2,3
    """
    if [bool(bins), bool(ranges), bool(slots)].count(True) != 1:
        raise click.UsageError("give one of --bins, --range and --from: what is to be moved")
    if share is not None and not slots:
        raise click.UsageError("--share goes with --from")
    plan = asked.control.plan_move(
        to=to, bins=bins, ranges=list(ranges) or None, slots=slots, share=share or 1.0, **_planned(**given)
    )
    asked.carry_out(plan)


@_verb(click.argument("worker"), _PLANNING, _WAITING, _TOKEN)
def drain(asked: Asked, worker: str, **given: Any) -> None:
    """Empty a worker.

    Everything that the slots of WORKER own goes to those of the others, so that it can be switched off. Workers are
    called as `millstream status` calls them.
    """
    asked.carry_out(asked.control.plan_drain(worker, **_planned(**given)))


@_verb(
    click.option(
        "--tolerance",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.05,
        show_default=True,
        metavar="SHARE",
        help="How far from the mean a slot may be.",
    ),
    _PLANNING,
    _WAITING,
    _TOKEN,
)
def balance(asked: Asked, tolerance: float, **given: Any) -> None:
    """Even out the slots.

    Bins move from the slots that have the most bytes to those that have the least, while the query of STORE runs.
    """
    asked.carry_out(asked.control.plan_balance(tolerance=tolerance, **_planned(**given)))


@_verb(
    click.argument("slot", type=click.IntRange(min=0)),
    click.option(
        "--into", type=click.IntRange(min=2), default=2, show_default=True, metavar="N", help="So many parts."
    ),
    _PLANNING,
    _WAITING,
    _TOKEN,
)
def split(asked: Asked, slot: int, into: int, **given: Any) -> None:
    """Cut a slot into several.

    SLOT of the query of STORE keeps the first part of what it owns, and new slots get the others.
    """
    asked.carry_out(asked.control.plan_split(slot, into, **_planned(**given)))


@_verb(
    click.argument("slot", type=click.IntRange(min=0)),
    click.argument("into", type=click.IntRange(min=0)),
    _PLANNING,
    _WAITING,
    _TOKEN,
)
def merge(asked: Asked, slot: int, into: int, **given: Any) -> None:
    """Join a slot to another.

    All that SLOT of the query of STORE owns goes to slot INTO, and SLOT disappears.
    """
    asked.carry_out(asked.control.plan_merge(slot, into, **_planned(**given)))


@_verb(click.argument("number", type=click.IntRange(min=1), metavar="BINS"), _TERMS, _WAITING, _TOKEN)
def bins(asked: Asked, number: int, steps: tuple[str, ...], at: Any) -> None:
    """Change the number of bins.

    BINS, a power of two, is how finely later plans can cut the state of the query of STORE. Nothing moves.
    """
    asked.carry_out(asked.control.plan_bins(number, steps=list(steps) or None, at=at))


@_verb(click.argument("number", type=click.IntRange(min=0)), _WAITING, _TOKEN)
def cancel(asked: Asked, number: int) -> None:
    """End a command that is under way.

    Command NUMBER ends after the rounds that it has done by then. What has moved stays where it is.
    """
    asked.follow(asked.control.cancel(number), {"command": None, "outcome": None})


COMMANDS: tuple[click.Command, ...] = (
    status, watch, commands, rescale, move, drain, balance, split, merge, bins, cancel,
)  # fmt: skip


# -- what is said -----------------------------------------------------------------------------------------------------


def _planned(strategy: Callable[[int], Strategy], gap: int, steps: tuple[str, ...], at: Any) -> dict[str, Any]:
    try:
        return {"strategy": strategy(gap), "steps": list(steps) or None, "at": at}
    except UserError as error:
        raise click.UsageError(str(error)) from error


def sentence(outcome: Outcome) -> str:
    """What has become of a command, in one line."""
    text = f"Command {outcome.number} ({outcome.verb}): {outcome.state}"
    if outcome.rounds:
        text += f", {outcome.done} of {outcome.rounds} rounds"
    if outcome.began >= 0:
        text += f", epochs {outcome.began}..{outcome.last}"
    return f"{text}: {outcome.reason}" if outcome.reason else text


def summary(plan: MigrationPlan) -> dict[str, Any]:
    """A plan in few words, for programs."""
    return {
        "verb": plan.verb,
        "strategy": plan.strategy,
        "gap": plan.gap,
        "versions": plan.versions,
        "rounds": len(plan.rounds),
        "epochs": plan.epochs,
        "moves": sum(len(moves) for moves in plan.rounds),
        "bins": plan.bins,
        "bytes": plan.bytes,
        "stall_bytes": plan.stall_bytes,
        "start": msgspec.to_builtins(plan.start),
    }


def echo_json(value: Any) -> None:
    """One JSON object, on one line."""
    click.echo(msgspec.json.encode(value).decode())


def _when(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC, " if at_ms else ""


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
