"""What `millstream watch` and `millstream status` show: a live picture in a terminal, plain lines anywhere else.

Rules
-----
- Both show an `Overview`, and read nothing else but the answers to commands.
- Plain output has no control codes. Of a query that goes on quickly not every epoch is shown, but the one that is seen
  whenever one looks.
- The picture fits any width, and shows at most `_MOST` slots, watermarks and commands, and how many there are beyond.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millstream.control.handle import Progress
from millstream.control.overview import Overview
from millstream.protocol.migration import duration_text, size_text
from millstream.protocol.steering import Outcome

if TYPE_CHECKING:
    from millstream.control.connect import Control

_MOST = 16
_ENDED = 4
_REASON = 120
_WIDEST = 100


def follow(control: Control, every: float, once: bool, as_json: bool) -> None:
    """Shows a query until Ctrl-C, or once."""
    if once:
        overview = control.status()
        click.echo(_encoded(overview) if as_json else "\n".join(lines(overview)))
        return
    try:
        if as_json or not sys.stdout.isatty():
            _print(control, every, as_json)
        else:
            _draw(control, every)
    except KeyboardInterrupt:
        return


def _print(control: Control, every: float, as_json: bool) -> None:
    shown: Overview | None = None
    while True:
        overview = control.status()
        if shown is None or _state(shown) != _state(overview):
            click.echo(_encoded(overview) if as_json else line(overview))
            sys.stdout.flush()
            shown = overview
        time.sleep(every)


def _state(overview: Overview) -> tuple[object, ...]:
    """What is worth another line when it changes."""
    gone = bool(overview.driver_gone)  # its text says how long ago, which goes on changing
    return overview.epoch, overview.generation, overview.commands, overview.unheard, gone


def _draw(control: Control, every: float) -> None:
    with Live(auto_refresh=False) as live:
        while True:
            live.update(picture(control.status(), control.commands(), live.console.width), refresh=True)
            time.sleep(every)


def _encoded(overview: Overview) -> str:
    return msgspec.json.encode(overview).decode()


# -- text -------------------------------------------------------------------------------------------------------------


def line(overview: Overview) -> str:
    """An overview in one line."""
    parts = [
        f"epoch {overview.epoch}",
        f"{overview.records_per_second:,.0f} records/s",
        f"{overview.epoch_ms:,.0f} ms",
        f"{size_text(overview.state_bytes)} on {len(overview.slots)} slots",
    ]
    parts += [f"command {number} {progress}" for number, progress in overview.commands.items()]
    if overview.unheard:
        parts.append(f"{len(overview.unheard)} not heard yet")
    if overview.driver_gone:
        parts.append(overview.driver_gone)
    return "; ".join(parts)


def lines(overview: Overview) -> Iterator[str]:
    """An overview in a few lines."""
    yield f"query      {overview.name}"
    yield f"epoch      {overview.epoch}, last write {_ago(overview.written)}, generation {overview.generation}"
    if overview.driver_gone:
        yield f"driver     {overview.driver_gone}"
    yield f"records    {overview.records_per_second:,.0f} a second; " + (
        ", ".join(f"{step} {count:,d}" for step, count in overview.records.items()) or "none in the last epoch"
    )
    yield f"latency    {overview.epoch_ms:,.0f} ms from plan to commit"
    yield f"state      {size_text(overview.state_bytes)} in {overview.segments} segments"
    if replicas := _replicas(overview):
        yield f"replicas   {replicas}"
    for worker, slots in _placed(overview).items():
        yield f"worker     {worker}: " + _some([f"slot {slot} {_size(overview, slot)}" for slot in slots])
    for name, mark in overview.watermarks.items():
        yield f"watermark  {name}: {_mark(overview, name, mark)}"
    for counts, what in (
        (overview.late, "late"),
        (overview.partly_late, "late part"),
        (overview.missed_windows, "missed"),
        (overview.dead_letters, "dead"),
    ):
        for step, count in counts.items():
            yield f"{what:9}  {step}: {count:,d}"
    for number, progress in overview.commands.items():
        yield f"command    {number} {progress}"
    for number, name in overview.unheard.items():
        yield f"unheard    command {number} ({name}) in the control log"


def _placed(overview: Overview) -> dict[str, list[int]]:
    """The slots of each worker; those whose worker is not known last."""
    placed = {worker: [slot for slot in slots if slot in overview.slots] for worker, slots in overview.workers.items()}
    known = {slot for slots in placed.values() for slot in slots}
    rest = [slot for slot in overview.slots if slot not in known]
    return {**placed, "?": rest} if rest else placed


def _size(overview: Overview, slot: int) -> str:
    """How many bytes a slot has, and who else has them."""
    others = overview.replicas.get(slot)
    return size_text(overview.slots[slot]) + (f" (also on {', '.join(others)})" if others else "")


def _replicas(overview: Overview) -> str:
    """On how many other workers slots are, and which of them are on none; empty if all are."""
    counts = {slot: len(overview.replicas.get(slot, ())) for slot in overview.slots}
    found = sorted({*counts.values()} - {0})
    if not found:
        return ""
    some = _count(found[0], "other worker") if len(found) == 1 else f"{found[0]} to {found[-1]} other workers"
    alone = [f"slot {slot}" for slot, count in counts.items() if not count]
    return f"each slot on {some}" + (f", except {_some(alone)}" if alone else "")


def _mark(overview: Overview, name: str, mark: datetime | None) -> str:
    if mark is None:
        return "none yet"
    lag = overview.lags.get(name)
    behind = f", {duration_text(lag.total_seconds())} behind" if lag is not None else ""
    held = f", held back by {overview.held_back[name]}" if name in overview.held_back else ""
    return f"{mark:%Y-%m-%d %H:%M:%S}{behind}{held}"


def _ago(then: datetime) -> str:
    return f"{duration_text(max(0.0, (datetime.now(UTC) - then).total_seconds()))} ago"


def _some(texts: Sequence[str]) -> str:
    rest = f" and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return (", ".join(texts[:_MOST]) or "no slot") + rest


def _count(number: int, what: str) -> str:
    return f"{number:,d} {what}" if number == 1 else f"{number:,d} {what}s"


# -- picture ----------------------------------------------------------------------------------------------------------


def picture(overview: Overview, outcomes: Sequence[Outcome], width: int) -> RenderableType:
    """An overview as a panel, with the commands under way as bars, and how the last ones ended."""
    parts: list[RenderableType] = [_facts(overview), "", _slots(overview)]
    if overview.commands or any(outcome.over for outcome in outcomes):
        parts += ["", _commands(overview, outcomes)]
    return Panel(
        Group(*parts),
        title=Text(f" {overview.name} ", style="bold"),
        subtitle=Text(" Ctrl-C ends this view, not the query ", style="dim"),
        padding=(0, 2),
        width=min(_WIDEST, width),
    )


def _facts(overview: Overview) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("epoch", f"{overview.epoch}   {overview.epoch_ms:,.0f} ms, last write {_ago(overview.written)}")
    facts.add_row("records", f"{overview.records_per_second:,.0f} a second")
    facts.add_row("state", f"{size_text(overview.state_bytes)} in {overview.segments} segments")
    if replicas := _replicas(overview):
        facts.add_row("replicas", replicas)
    for name, mark in list(overview.watermarks.items())[:_MOST]:
        facts.add_row("watermark", f"{name}   {_mark(overview, name, mark)}")
    if overview.unheard:
        names = _some([f"command {number} ({name})" for number, name in overview.unheard.items()])
        facts.add_row("unheard", Text(names, style="yellow"))
    if overview.driver_gone:
        facts.add_row("driver", Text(overview.driver_gone, style="red"))
    return facts


def _slots(overview: Overview) -> Table:
    slots = Table.grid(padding=(0, 2))
    slots.add_column(no_wrap=True)
    most = max([1, *overview.slots.values()])
    rows = [(worker, place, slot) for worker, held in _placed(overview).items() for place, slot in enumerate(held)]
    for worker, place, slot in rows[:_MOST]:
        slots.add_row(
            Text("" if place else f"worker {worker}", style="bold"),
            f"slot {slot}",
            ProgressBar(most, overview.slots[slot], width=24, complete_style="cyan", finished_style="cyan"),
            _size(overview, slot),
        )
    for worker in [worker for worker, held in _placed(overview).items() if not held][:_MOST]:
        slots.add_row(Text(f"worker {worker}", style="bold"), Text("no slot", style="dim"))
    if len(rows) > _MOST:
        slots.add_row("", f"and {len(rows) - _MOST} more")
    return slots


def _commands(overview: Overview, outcomes: Sequence[Outcome]) -> Table:
    verbs = {outcome.number: outcome.verb for outcome in outcomes}
    styles = {"done": "green", "committed": "green", "cancelled": "yellow"}
    table = Table.grid(padding=(0, 2))
    for number, progress in list(overview.commands.items())[:_MOST]:
        bar = ProgressBar(max(1, progress.rounds), progress.done, width=24)
        table.add_row(Text(f"command {number} {verbs.get(number, '')}", style="bold"), bar, _rounds(progress))
    for outcome in [outcome for outcome in outcomes if outcome.over][-_ENDED:]:
        state = Text(outcome.state, style=styles.get(outcome.state, "red"))
        table.add_row(
            Text(f"command {outcome.number} {outcome.verb}", style="dim"), state, Text(outcome.reason[:_REASON])
        )
    return table


def _rounds(progress: Progress) -> str:
    size = f"{size_text(progress.bytes_done)} of {size_text(progress.bytes)}"
    return f"{progress.state}, {progress.done} of {_count(progress.rounds, 'round')}, {size}"
