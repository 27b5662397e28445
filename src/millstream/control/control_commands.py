"""The verbs on the command line: looking at a query (`status`, `watch`, `commands`), and moving its state (`rescale`,
`move`, `drain`, `balance`, `split`, `merge`, `bins`, `cancel`).

Rules
-----
- Each does what the method of the same name of `millstream.connect(STORE)` does, and says what came of it.
- What they share is in `asked`. Of `watch`, `--json` prints an object whenever something has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import click

from millstream.control.arguments import NumbersType, SpanType, StrategyType
from millstream.control.asked import AT, TOKEN, WAITING, Asked, echo_json, options_of, sentence, verb
from millstream.errors import UserError
from millstream.protocol.strategies import DEADLINE_S, PROTOCOLS, STALL_S, Strategy

_TERMS = options_of(
    click.option("--step", "steps", multiple=True, metavar="NAME", help="This step alone; repeatable."),
    AT,
    click.option("--dry-run", is_flag=True, help="Print the plan and change nothing."),
)
_PLANNING = options_of(
    click.option(
        "--strategy",
        type=StrategyType(),
        default="paced",
        show_default=True,
        metavar="S",
        help="Which bins move together: paced (paced:1.5 lets an epoch take 1.5 times as long), all-at-once, fluid, "
        "batched:N or matched.",
    ),
    click.option(
        "--gap",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="N",
        help="Epochs between two rounds in which nothing moves.",
    ),
    click.option(
        "--merge/--no-merge",
        default=True,
        show_default=True,
        help="Whether rounds of batched and matched that cost next to nothing are one.",
    ),
    click.option(
        "--protocol",
        type=click.Choice((*PROTOCOLS, "auto")),
        help="How state changes hands: direct fetches it inside the epoch; cpa only what replicas lack; cpal has it at "
        "its target before; auto takes what is expected to be best. By default cpal, if there are several workers.",
    ),
    click.option(
        "--prepared/--no-prepared",
        default=None,
        help="Whether a round waits until its targets hold what it brings: in other words, --protocol cpal or direct.",
    ),
    click.option(
        "--stall",
        "stall_s",
        type=click.FloatRange(min=0),
        default=STALL_S,
        show_default=True,
        metavar="SECONDS",
        help="If rounds wait: about how much longer an epoch may then take, for what is still lacking.",
    ),
    click.option(
        "--deadline",
        "deadline_s",
        type=click.FloatRange(min=0),
        default=DEADLINE_S,
        show_default=True,
        metavar="SECONDS",
        help="If rounds wait: how long one may, before the migration is cancelled.",
    ),
    _TERMS,
)


# -- the verbs --------------------------------------------------------------------------------------------------------


@verb()
def status(asked: Asked) -> None:
    """Show how a query stands.

    STORE is what the query was started with: a directory, or an s3://, gs:// or az:// URI. Shown are epoch, slots,
    workers, replicas, watermarks and commands under way, as of the last commit; and whether a driver seems to run, by
    when one last wrote.
    """
    from millstream.control.watch import lines

    overview = asked.control.status()
    if asked.as_json:
        echo_json(overview)
    else:
        click.echo("\n".join(lines(overview)))


@verb(
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
    worker with their bytes and replicas, and the progress of migrations. Anywhere else a line whenever something has
    changed, and with --json an object.
    """
    from millstream.control.watch import follow

    follow(asked.control, every, once, asked.as_json)


@verb()
def commands(asked: Asked) -> None:
    """List what became of commands.

    Of those that were sent to the query of STORE, all that are under way or not heard yet, and the last 128 that are
    over.
    """
    outcomes, unheard = asked.control.commands(), asked.control.status().unheard
    if asked.as_json:
        echo_json({"commands": outcomes, "unheard": unheard})
        return
    for outcome in outcomes:
        click.echo(sentence(outcome))
        click.echo(f"  {_when(outcome.at_ms)}{outcome.sender or 'the sender is not known'}")
    for number, name in unheard.items():
        click.echo(f"Command {number} ({name}): not heard yet")
    if not outcomes and not unheard:
        click.echo("No command has been sent.")


@verb(click.argument("slots", type=click.IntRange(min=1)), _PLANNING, WAITING, TOKEN)
def rescale(asked: Asked, slots: int, **given: Any) -> None:
    """Change the number of slots.

    The query of STORE goes on while its bins move, until it has SLOTS slots with as many bins each.
    """
    asked.carry_out(asked.control.plan_rescale(slots, **_planned(**given)))


@verb(
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
    WAITING,
    TOKEN,
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


@verb(click.argument("worker"), _PLANNING, WAITING, TOKEN)
def drain(asked: Asked, worker: str, **given: Any) -> None:
    """Empty a worker.

    Everything that the slots of WORKER own goes to those of the others, so that it can be switched off. Workers are
    called as `millstream status` calls them.
    """
    asked.carry_out(asked.control.plan_drain(worker, **_planned(**given)))


@verb(
    click.option(
        "--tolerance",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.05,
        show_default=True,
        metavar="SHARE",
        help="How far from the mean a slot may be.",
    ),
    _PLANNING,
    WAITING,
    TOKEN,
)
def balance(asked: Asked, tolerance: float, **given: Any) -> None:
    """Even out the slots.

    Bins move from the slots that have the most bytes to those that have the least, while the query of STORE runs.
    """
    asked.carry_out(asked.control.plan_balance(tolerance=tolerance, **_planned(**given)))


@verb(
    click.argument("slot", type=click.IntRange(min=0)),
    click.option(
        "--into", type=click.IntRange(min=2), default=2, show_default=True, metavar="N", help="So many parts."
    ),
    _PLANNING,
    WAITING,
    TOKEN,
)
def split(asked: Asked, slot: int, into: int, **given: Any) -> None:
    """Cut a slot into several.

    SLOT of the query of STORE keeps the first part of what it owns, and new slots get the others.
    """
    asked.carry_out(asked.control.plan_split(slot, into, **_planned(**given)))


@verb(
    click.argument("slot", type=click.IntRange(min=0)),
    click.argument("into", type=click.IntRange(min=0)),
    _PLANNING,
    WAITING,
    TOKEN,
)
def merge(asked: Asked, slot: int, into: int, **given: Any) -> None:
    """Join a slot to another.

    All that SLOT of the query of STORE owns goes to slot INTO, and SLOT disappears.
    """
    asked.carry_out(asked.control.plan_merge(slot, into, **_planned(**given)))


@verb(click.argument("number", type=click.IntRange(min=1), metavar="BINS"), _TERMS, WAITING, TOKEN)
def bins(asked: Asked, number: int, steps: tuple[str, ...], at: Any) -> None:
    """Change the number of bins.

    BINS, a power of two, is how finely later plans can cut the state of the query of STORE. Nothing moves.
    """
    asked.carry_out(asked.control.plan_bins(number, steps=list(steps) or None, at=at))


@verb(
    click.argument("number", type=click.IntRange(min=0)),
    click.option("--dry-run", is_flag=True, help="Say what would be ended, and change nothing."),
    WAITING,
    TOKEN,
)
def cancel(asked: Asked, number: int) -> None:
    """End a command that is under way.

    Command NUMBER ends after the rounds that it has done by then. What has moved stays where it is.
    """
    if asked.dry_run:
        history = asked.control._look()
        trouble = asked.control._not_to_cancel(number, history)
        if trouble:
            raise UserError(trouble)
        known = history.outcomes.get(number)
        unheard = asked.control._unheard(history)
        asked.say(f"Would end: {sentence(known) if known else f'command {number} ({unheard[number]}), not heard yet'}")
        if asked.as_json:
            echo_json({"dry_run": True, "command": None, "outcome": known})
        return
    asked.follow(asked.control.cancel(number), {"command": None, "outcome": None})


COMMANDS: tuple[click.Command, ...] = (
    status, watch, commands, rescale, move, drain, balance, split, merge, bins, cancel,
)  # fmt: skip


def _planned(
    strategy: Callable[..., Strategy],
    steps: tuple[str, ...],
    at: Any,
    protocol: str | None,
    prepared: bool | None,
    **others: float,
) -> dict[str, Any]:
    """The arguments that all plans have; `others` are those that go to the strategy as they are."""
    if protocol is not None and prepared is not None:
        raise click.UsageError("give --protocol or --prepared (or --no-prepared), not both")
    try:
        made = strategy(protocol=protocol or "", prepared=prepared, **others)
        return {"strategy": made, "steps": list(steps) or None, "at": at}
    except UserError as error:
        raise click.UsageError(str(error)) from error


def _when(at_ms: int) -> str:
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC, " if at_ms else ""
