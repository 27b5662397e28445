"""Changing the graph on the command line (`modify`, `revert`), and what has been done to a query (`history`).

Rules
-----
- `modify` sends one change, which takes effect in one epoch or not at all. All names are those that the query has when
  it is typed: steps are replaced first, then sources are added, shadows built and cut over, then one thing is inserted,
  then sinks are, then some things are removed, and at last some steps are renamed.
- Code is named, bundled without being run, and travels through the store (`engine.bundles`). Nothing is written before
  all of what was typed can be understood, and the token is the right one.
- With `--dry-run` the driver is asked, too: only there is the query. It checks and prepares the change, and drops it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millstream.control.arguments import SettingType
from millstream.control.asked import AT, TOKEN, WAITING, Asked, echo_json, options_of, verb
from millstream.errors import UserError

if TYPE_CHECKING:
    from millstream.control.modify import Asking
    from millstream.control.verbs import Past
    from millstream.model.change import Shipped

Pairs = tuple[tuple[str, str], ...]
Names = tuple[str, ...]

_DRY_RUN = click.option(
    "--dry-run",
    is_flag=True,
    help="Let the driver check the change, prepare it and say what it would do, and change nothing.",
)


def _pairs(option: str, name: str, shape: str, help: str) -> Any:
    return click.option(option, name, type=SettingType(shape), multiple=True, metavar=shape, help=help)


def _names(option: str, name: str, metavar: str, help: str) -> Any:
    return click.option(option, name, multiple=True, metavar=metavar, help=help)


_CHANGES = options_of(
    _pairs(
        "--replace", "replaced", "STEP=TARGET",
        "Give a step another computation, or a map or filter another function; repeatable.",
    ),
    _pairs(
        "--source", "sources", "NAME=TARGET",
        "Add a source: a function of a reader that gives a streaming DataFrame; say with --insert, --filter or --map "
        "who reads it.",
    ),
    _pairs("--event-time", "event_times", "SOURCE=COLUMN", "The column of a new --source that is its event time."),
    _pairs("--lateness", "latenesses", "SOURCE=TIME", "How far the watermark of a new --source is behind: 10 seconds."),
    _names(
        "--shadow", "shadows", "STEP[=TARGET]",
        "Build what a step shall become beside it, as STEP_shadow, by another --key, with other code, or both; nobody "
        "reads it yet.",
    ),
    _names("--cut-over", "cuts", "STEP", "Let STEP_shadow take the place of STEP, whose state is dropped."),
    _pairs("--insert", "inserted", "NAME=TARGET", "Insert a step with this computation."),
    _pairs(
        "--filter", "filters", "NAME=TARGET",
        "Insert a filter: a function of a record batch that gives a boolean for each record.",
    ),
    _pairs("--map", "maps", "NAME=TARGET", "Insert a map: a function of a record batch that returns another one."),
    _pairs("--parquet", "sinks", "NAME=FOLDER", "Add a sink of Parquet files, for what is inserted or --after."),
    _names("--after", "after", "STREAM", "The stream that is read by what is inserted; several are united."),
    _names(
        "--before", "before", "READER",
        "A step, map or sink that reads what is inserted in the place of --after; repeatable. If there is none, it is "
        "a branch of its own.",
    ),
    _names(
        "--key", "key", "COLUMN",
        "A column of the key of the step that is inserted, or built by --shadow; repeatable. If there is none, as of "
        "the step --before, or as it was.",
    ),
    click.option("--output", metavar="DDL", help='The columns that the --map returns: "word string, n long".'),
    _names("--remove", "removed", "NAME", "Take out a step, with its state, or a map, a sink or a source; repeatable."),
    click.option("--reconnect", is_flag=True, help="Those that read what is removed shall read what that read."),
    click.option("--cut", is_flag=True, help="Those that read what is removed shall do without."),
    _pairs("--rename", "renamed", "OLD=NEW", "Call a step otherwise; its state goes with it; repeatable."),
)  # fmt: skip
_RULES = options_of(
    _names(
        "--carry", "carried", "STATE[:TYPE]",
        "Keep the values of this state of a replaced step, cast to the type if it says one (total:double); repeatable.",
    ),
    _pairs("--convert", "converted", "STATE=TARGET", "Make new values of the old ones by this function; repeatable."),
    _names("--fresh", "fresh", "STATE", "This state begins empty; repeatable."),
    _names("--drop", "dropped", "STATE", "This state is no longer there, and what was stored is dropped; repeatable."),
    click.option(
        "--carry-all",
        is_flag=True,
        help="Keep all state of the replaced steps that has no rule of its own; what is new there begins empty.",
    ),
)  # fmt: skip


@verb(
    _CHANGES,
    _RULES,
    AT,
    click.option("--no-rehearsal", is_flag=True, help="Do not run the new graph over a few recent records first."),
    _DRY_RUN,
    WAITING,
    TOKEN,
)
def modify(
    asked: Asked,
    at: Any,
    no_rehearsal: bool,
    replaced: Pairs,
    sources: Pairs,
    event_times: Pairs,
    latenesses: Pairs,
    shadows: Names,
    cuts: Names,
    inserted: Pairs,
    filters: Pairs,
    maps: Pairs,
    sinks: Pairs,
    removed: Names,
    reconnect: bool,
    cut: bool,
    renamed: Pairs,
    converted: Pairs,
    **given: Any,
) -> None:
    """Change the graph while the query runs.

    All that is asked for takes effect in one epoch of the query of STORE, or none of it does. The driver checks it, and
    runs the new graph over a few recent records, on no state. If the new code fails there, or in its first epoch, the
    query goes on as it was.

    \b
      millstream modify STORE --replace count=rules:Count --carry total --fresh seen
      millstream modify STORE --filter large=rules.py:is_large --after orders --before count
      millstream modify STORE --insert top=dist.whl:shop.top:Top --after count --key user
      millstream modify STORE --remove large --reconnect --rename count=totals
      millstream modify STORE --shadow count --key country
      millstream modify STORE --cut-over count --at when:lag_s<60

    TARGET is code: module:Name, path/file.py:Name or path/dist.whl:package.module:Name. It is not run here. It travels
    through the store, with what it imports from beside it, and is checked by its hash: whoever may write to the store
    may run code.

    Every state of a replaced step, of the old code and of the new, needs a rule: --carry, --convert, --fresh or
    --drop. If several steps are replaced, say STEP.STATE. All names are those of before the change. One command makes
    one insertion; Python makes several at once: millstream.connect(STORE).modify().
    """
    if asked.dry_run and asked.wait is False:
        raise click.UsageError("--dry-run waits for what the driver says; leave out --no-wait")
    if not any((replaced, sources, shadows, cuts, inserted, filters, maps, sinks, removed, renamed)):
        raise click.UsageError(
            "say what to change: --replace, --insert, --filter, --map, --source, --parquet, --shadow, --cut-over, "
            "--remove or --rename"
        )
    if (reconnect or cut) and not removed:
        raise click.UsageError("--reconnect and --cut go with --remove")
    if reconnect and cut:
        raise click.UsageError("--reconnect and --cut exclude each other")
    change = asked.control.modify(at=at, rehearse=not no_rehearsal)
    built = [(name, target) for name, _, target in (given_as.partition("=") for given_as in shadows)]
    brought = (*replaced, *sources, *(pair for pair in built if pair[1]), *inserted, *filters, *maps, *converted)
    code = {target: change.code(target) for _, target in brought}
    rules = _rules([name for name, _ in replaced], converted, code, given)
    for name, target in replaced:
        change.replace(name, code[target], **({"state": rules[name]} if rules[name] else {}))
    _add_sources(change, sources, event_times, latenesses, code)
    key = given["key"] if shadows else ()
    for name, target in built:
        change.shadow(name, code[target] if target else None, **({"key": list(key)} if key else {}))
    for name in cuts:
        change.cut_over(name)
    several = (*inserted, *filters, *maps)
    _insert(
        change,
        inserted,
        filters,
        maps,
        code,
        {**given, "key": () if shadows and not inserted else given["key"]},
        bool(sinks),
    )
    for name, folder in sinks:
        streams = [several[0][0]] if several else given["after"]
        if len(streams) != 1:
            raise click.UsageError(f"--parquet {name}={folder}: say which stream it is for: --after STREAM")
        change.sink(name, _parquet(folder), after=streams[0])
    for name in removed:
        change.remove(name, reconnect=reconnect, cut=cut)
    for old, new in renamed:
        change.rename(old, new)
    told: dict[str, Any] = {"change": str(change), "dry_run": asked.dry_run, "command": None, "outcome": None}
    asked.follow(change.send(trial=asked.dry_run), told)


def _add_sources(
    change: Asking, sources: Pairs, event_times: Pairs, latenesses: Pairs, code: Mapping[str, Shipped]
) -> None:
    options: dict[str, dict[str, str]] = {name: {} for name, _ in sources}
    for option, pairs in (("event_time", event_times), ("lateness", latenesses)):
        for name, value in pairs:
            if name not in options:
                raise click.UsageError(f"--{option.replace('_', '-')} {name}={value}: {name!r} is no new --source")
            options[name][option] = value
    for name, target in sources:
        change.source(name, code[target], **options[name])


def _parquet(folder: str) -> Any:
    from millstream.model.sinks import Parquet

    return Parquet(folder if "://" in folder else str(Path(folder).expanduser().absolute()))


def _insert(
    change: Asking,
    inserted: Pairs,
    filters: Pairs,
    maps: Pairs,
    code: Mapping[str, Shipped],
    given: Mapping[str, Any],
    also_sinks: bool,
) -> None:
    after, before, key, output = (given[name] for name in ("after", "before", "key", "output"))
    several = (*inserted, *filters, *maps)
    if len(several) > 1:
        names = ", ".join(name for name, _ in several)
        raise click.UsageError(
            f"{names}: one command inserts one thing; send several commands, or, for all in one epoch, do it in "
            "Python: millstream.connect(STORE).modify()"
        )
    if not several:
        if (after and not also_sinks) or before or key or output:
            raise click.UsageError(
                "--before and --output go with --insert, --filter or --map, --after also with --parquet, and --key "
                "with --insert or --shadow"
            )
        return
    [(name, target)] = several
    if not after:
        raise click.UsageError(f"say which stream {name!r} reads: --after STREAM")
    if key and not inserted:
        raise click.UsageError("--key goes with --insert: filters and maps have no key")
    if bool(maps) != bool(output):
        raise click.UsageError('--map and --output go together: --output "word string, n long"')
    arguments: dict[str, Any] = {"after": list(after)}
    arguments |= {what: list(names) for what, names in (("before", before), ("key", key)) if names}
    if inserted:
        change.insert(name, code[target], **arguments)
    elif filters:
        change.insert(name, keep=code[target], **arguments)
    else:
        change.insert(name, map=code[target], output=output, **arguments)


# -- rules ------------------------------------------------------------------------------------------------------------


def _rules(
    steps: Sequence[str], converted: Pairs, code: Mapping[str, Shipped], given: Mapping[str, Any]
) -> dict[str, Any]:
    """For each step that is replaced, its rules by state, or the one for all, or nothing."""
    from millstream.model.carry import ALL_OTHERS, Convert, carry, drop, fresh

    twice = next((step for step in steps if steps.count(step) > 1), None)
    if twice is not None:
        raise click.UsageError(f"--replace {twice}: it is replaced twice")
    found: dict[str, Any] = {step: {} for step in steps}
    typed: list[tuple[str, str, Any]] = [
        ("--convert", place, Convert(code[target]))  # type: ignore[arg-type]  # the driver has the function
        for place, target in converted
    ]
    typed += [("--carry", *_carried(text)) for text in given["carried"]]
    typed += [("--fresh", place, fresh()) for place in given["fresh"]]
    typed += [("--drop", place, drop()) for place in given["dropped"]]
    for option, place, rule in typed:
        step, state = _place(option, place, steps)
        if state in found[step]:
            raise click.UsageError(f"{option} {place}: there is another rule for it")
        found[step][state] = rule
    if given["carry_all"]:
        if not steps:
            raise click.UsageError("--carry-all is for steps that are replaced; say --replace STEP=TARGET")
        for rules in found.values():
            rules[ALL_OTHERS] = carry()
    return found


def _carried(text: str) -> tuple[str, Any]:
    from millstream.model.carry import carry

    place, colon, kind = text.partition(":")
    try:
        return place, carry(kind) if colon else carry()
    except UserError as error:
        raise click.UsageError(f"--carry {text}: {error}") from error


def _place(option: str, place: str, steps: Sequence[str]) -> tuple[str, str]:
    """Which state of which step a rule is for."""
    step, dot, state = place.rpartition(".")
    if not steps:
        raise click.UsageError(f"{option} {place}: rules are for steps that are replaced; say --replace STEP=TARGET")
    if not dot and len(steps) > 1:
        raise click.UsageError(f"{option} {place}: say of which step, as {', '.join(f'{s}.{place}' for s in steps)}")
    if dot and step not in steps:
        raise click.UsageError(f"{option} {place}: {step!r} is not replaced; what is: {', '.join(steps)}")
    return step or steps[0], state


# -- what was done ----------------------------------------------------------------------------------------------------


@verb(click.argument("number", type=click.IntRange(min=0)), _DRY_RUN, WAITING, TOKEN)
def revert(asked: Asked, number: int) -> None:
    """Undo a modification.

    The graph of the query of STORE becomes what it would be without command NUMBER, a modification that `millstream
    history` lists as committed. What later ones have changed in turn must be undone before it. State that it dropped
    begins empty; where it converted state, or took out a source, it cannot be undone.
    """
    if asked.dry_run and asked.wait is False:
        raise click.UsageError("--dry-run waits for what the driver says; leave out --no-wait")
    handle = asked.control.revert(number, trial=asked.dry_run)
    asked.follow(handle, {"reverts": number, "dry_run": asked.dry_run, "command": None, "outcome": None})


@verb()
def history(asked: Asked) -> None:
    """List what was done to a query.

    Every migration and modification of the query of STORE that was asked for: who asked and when, for what, the epochs
    that it changed, how long it took until it was over and how long its longest epoch was, and what came of it; of a
    migration, what the time went into, and where the state came from (with --json, and on a terminal). All
    that are under way are listed, and of those that are over the last 128.
    """
    pasts = asked.control.history()
    if asked.as_json:
        echo_json({"history": pasts})
    elif not pasts:
        click.echo("Nothing has been done to the query.")
    elif sys.stdout.isatty():
        _print_table(pasts)
    else:
        rows = [_TITLES, *(_row(past, f": {_reason(past)}" if past.reason else "") for past in pasts)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


_TITLES = ("no", "asked (UTC)", "by", "what", "epochs", "took", "stall", "outcome")


def _row(past: Past, reason: str = "") -> tuple[str, ...]:
    epochs = "" if past.first < 0 else str(past.first) if past.first == past.last else f"{past.first}..{past.last}"
    what = past.text.partition("\n")[0]
    return (
        str(past.number),
        f"{past.at:%Y-%m-%d %H:%M:%S}" if past.at else "?",
        past.sender or "?",
        what if what.startswith(past.verb) else f"{past.verb}: {what}" if what else past.verb,
        epochs,
        f"{past.seconds:.1f} s" if past.seconds else "",
        f"{past.stall_ms:.0f} ms" if past.stall_ms else "",
        past.state + reason,
    )


def _reason(past: Past) -> str:
    """What matters of a reason, which may end with a traceback."""
    return past.reason.partition("\n")[0]


def _print_table(pasts: Sequence[Past]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for title in _TITLES:
        numbers = title in ("no", "epochs", "took", "stall")
        table.add_column(title, overflow="fold", no_wrap=numbers, justify="right" if numbers else "left")
    colours = {"committed": "green", "done": "green", "refused": "red", "aborted": "red", "rolled back": "red"}
    for past in pasts:
        *cells, state = _row(past)
        table.add_row(*map(Text, cells), Text(state, style=colours.get(past.state, "")))
    console = Console()
    console.print(table)
    for past in pasts:
        if past.breakdown is not None:
            console.print(Text(f"{past.number} {past.state}: {past.breakdown}"))
        if past.reason:
            console.print(Text(f"{past.number} {past.state}: {_reason(past)}"))


COMMANDS: tuple[click.Command, ...] = (modify, revert, history)
