"""What `millstream demo` and `millstream nexmark` show: a live picture in a terminal, plain lines anywhere else.

Rules
-----
- A display is told facts and decides nothing. Both kinds are told the same.
- Plain output has no control codes and no characters outside ASCII. It has a line for every happening, and at most
  one a second for epochs.
- The live picture fits any width; what does not fit the height is the oldest happenings. It stays on the screen when
  it ends.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from millstream.protocol.migration import size_text

_PLAIN_EPOCHS_EVERY_S = 1.0
_WIDEST = 100
_BARS = "▁▂▃▄▅▆▇█"
_LABELS_WIDTH = 8
_TIMES_WIDTH = 7
_FRAME_HEIGHT = 13


@dataclass(frozen=True, slots=True)
class Moving:
    """How far a migration has come."""

    done: int
    rounds: int
    bins_done: int
    bins: int

    def __str__(self) -> str:
        return f"{self.done} of {self.rounds} rounds, {self.bins_done:,d} of {self.bins:,d} bins"


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known after an epoch."""

    epoch: int
    records: int
    """Of all epochs so far."""
    records_per_second: float
    epoch_ms: float
    state_bytes: int
    segments: int
    slots: int
    moving: Moving | None = None
    """The migration that goes on, if one does."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result: what was looked at, what was found, and whether that is good (None: neither)."""

    subject: str
    found: str
    good: bool | None = None


class Display(Protocol):
    """What the demo tells. Use it as a context; it ends what is shown live."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def happened(self, text: str, style: str = "") -> None:
        """Something happened that a reader should know of. `style` is a rich style."""
        ...

    def driver(self, text: str, style: str = "") -> None:
        """What the driver is doing now."""
        ...

    def progress(self, progress: Progress) -> None:
        """An epoch was committed and delivered."""
        ...

    def killed(self) -> None:
        """The epoch that was running did not get to its commit."""
        ...

    def chart(self, lines: Sequence[str]) -> None:
        """A drawing in ASCII, with `#` and `:` for what is filled and half filled. After the context was left."""
        ...

    def note(self, text: str) -> None:
        """A remark after the context was left."""
        ...

    def verdict(self, good: bool, headline: str, findings: Sequence[Finding]) -> None:
        """How it ended. Told last, after the context was left."""
        ...


def open_display(title: str, epochs: int, out: TextIO | None = None) -> Display:
    """The display that suits standard output."""
    out = out or sys.stdout
    console = Console(file=out, highlight=False)
    if out.isatty() and not console.is_dumb_terminal:
        return LiveDisplay(console, title, epochs)
    return PlainDisplay(out, title, epochs)


class PlainDisplay:
    """Lines for a log file."""

    def __init__(self, out: TextIO, title: str, epochs: int) -> None:
        self._out, self._title, self._epochs = out, title, epochs
        self._began = time.monotonic()
        self._last_line = -_PLAIN_EPOCHS_EVERY_S

    def __enter__(self) -> Self:
        self._write(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.flush()

    def happened(self, text: str, style: str = "") -> None:
        self._write(f"{self._elapsed():6.1f} s  {text}")

    def driver(self, text: str, style: str = "") -> None:
        pass  # Every change of it that matters is also told as a happening.

    def progress(self, progress: Progress) -> None:
        now = self._elapsed()
        if now - self._last_line < _PLAIN_EPOCHS_EVERY_S and progress.epoch + 1 < self._epochs:
            return
        self._last_line = now
        state = f"state {size_text(progress.state_bytes)} in {progress.segments} segments"
        self._write(
            f"{now:6.1f} s  epoch {progress.epoch:3d}: {progress.records:9,d} records counted,"
            f" {progress.records_per_second:7,.0f}/s, {progress.epoch_ms:5,.0f} ms, {progress.slots} slots,"
            f" {state if progress.moving is None else f'moving: {progress.moving}'}"
        )

    def killed(self) -> None:
        pass

    def chart(self, lines: Sequence[str]) -> None:
        self._write("\n".join(["", *lines]))

    def note(self, text: str) -> None:
        self._write(f"\n{text}")

    def verdict(self, good: bool, headline: str, findings: Sequence[Finding]) -> None:
        width = max(len(finding.subject) for finding in findings)
        marks = {True: "ok", False: "WRONG", None: ""}
        lines = [f"  {marks[item.good]:5}  {item.subject:{width}}  {item.found}" for item in findings]
        self._write("\n".join(["", f"Verdict: {'EXACT' if good else 'WRONG'}. {headline}", *lines]))

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _write(self, text: str) -> None:
        print(text.encode("ascii", "replace").decode("ascii"), file=self._out, flush=True)


class LiveDisplay:
    """A picture that is redrawn several times a second."""

    def __init__(self, console: Console, title: str, epochs: int) -> None:
        self._console, self._title, self._epochs = console, title, epochs
        self._began = time.monotonic()
        self._ended: float | None = None
        self._happenings: list[tuple[float, str, str]] = []
        self._latest: Progress | None = None
        self._down = self._has_moved = False
        self._driver = Text("not started yet")
        self._times_ms: list[float | None] = []
        """The time of each epoch, in the order in which they were run; None for one that was killed."""
        self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = time.monotonic()
        self._live.stop()

    def happened(self, text: str, style: str = "") -> None:
        self._happenings.append((time.monotonic() - self._began, text, style))

    def driver(self, text: str, style: str = "") -> None:
        self._driver = Text(text, style=style)

    def progress(self, progress: Progress) -> None:
        self._latest, self._down = progress, False
        self._has_moved = self._has_moved or progress.moving is not None
        self._times_ms.append(progress.epoch_ms)

    def killed(self) -> None:
        self._down = True
        self._times_ms.append(None)

    def chart(self, lines: Sequence[str]) -> None:
        drawing = "\n".join(lines)
        if not self._console.options.ascii_only:
            drawing = drawing.translate({ord("#"): "█", ord(":"): "▄"})
        text = Text(drawing, no_wrap=True, overflow="crop")
        text.highlight_regex("[█▄]+", "cyan")
        self._console.print(text, width=self._width())

    def note(self, text: str) -> None:
        self._console.print(Text(text), width=self._width(), soft_wrap=False)

    def verdict(self, good: bool, headline: str, findings: Sequence[Finding]) -> None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        marks = {True: Text("✓", style="bold green"), False: Text("✗", style="bold red"), None: Text()}
        if self._console.options.ascii_only:
            marks = {True: Text("ok"), False: Text("WRONG"), None: Text()}
        for item in findings:
            grid.add_row(marks[item.good], item.subject, item.found)
        colour = "green" if good else "red"
        panel = Panel(
            Group(Text(headline, style="bold"), Text(), grid),
            title=Text(" EXACT " if good else " WRONG ", style=f"bold reverse {colour}"),
            border_style=colour,
            padding=(0, 2),
            width=self._width(),
        )
        self._console.print(panel)

    # -- drawing

    def _width(self) -> int:
        # Two columns stay free for the "^C" that a terminal echoes: if it wrapped, the picture would be torn.
        return min(self._console.width - 2, _WIDEST)

    def _picture(self) -> RenderableType:
        inner = self._width() - 6
        facts = Table.grid(padding=(0, 2), expand=True)
        facts.add_column(style="dim", no_wrap=True, width=_LABELS_WIDTH)
        facts.add_column(overflow="fold", ratio=1)
        room = max(8, inner - _LABELS_WIDTH - 2)
        for label, value in self._facts(room):
            facts.add_row(label, value)
        told = Table.grid(padding=(0, 2), expand=True)
        told.add_column(style="dim", no_wrap=True, justify="right", width=_TIMES_WIDTH)
        told.add_column(overflow="fold", ratio=1)
        for moment, text, style in self._fitting(max(8, inner - _TIMES_WIDTH - 2)):
            told.add_row(f"{moment:.1f} s", Text(text, style=style))
        seconds = int((self._ended or time.monotonic()) - self._began)
        return Panel(
            Group(facts, Padding(told, (1, 0, 0, 0))),
            title=Text(f" {self._title} ", style="bold", overflow="ellipsis"),
            subtitle=Text(f" {seconds // 60}:{seconds % 60:02d} ", style="dim"),
            padding=(0, 2),
            width=self._width(),
        )

    def _fitting(self, room: int) -> list[tuple[float, str, str]]:
        """The happenings that fit the height, the newest; all of them in the last picture."""
        if self._ended is not None:
            return self._happenings
        left = self._console.height - _FRAME_HEIGHT
        chosen: list[tuple[float, str, str]] = []
        for item in reversed(self._happenings):
            left -= math.ceil(len(item[1]) / room)
            if left < 0 and chosen:
                break
            chosen.insert(0, item)
        return chosen

    def _facts(self, room: int) -> list[tuple[str, RenderableType]]:
        latest = self._latest
        done = latest.epoch + 1 if latest else 0
        bar = self._bar(done, self._epochs, f"{done} of {self._epochs}", room)
        records = latency = Text("-", style="dim")
        state = Text("-", style="dim")
        if latest is not None:
            now = "" if self._down else f", {latest.records_per_second:,.0f} a second"
            records = Text(f"{latest.records:,d} counted{now}")
            latency = Text(("-" if self._down else f"{latest.epoch_ms:,.0f} ms").ljust(10))
            latency.append_text(self._strip(room - 10))
            state = Text(f"{size_text(latest.state_bytes)} in {latest.segments} segments, {latest.slots} slots")
        facts: list[tuple[str, RenderableType]] = [
            ("epochs", bar),
            ("records", records),
            ("latency", latency),
            ("state", state),
            ("driver", self._driver),
        ]
        moving = latest.moving if latest is not None else None
        if moving is not None:
            facts.insert(4, ("moving", self._bar(moving.done, moving.rounds, str(moving), room)))
        elif self._has_moved:  # or the picture would change its height once more
            facts.insert(4, ("moving", Text("-", style="dim")))
        return facts

    def _bar(self, done: int, total: int, text: str, room: int) -> Table:
        bar = Table.grid(padding=(0, 1))
        length = min(46, room - len(text) - 2)
        if length < 6:
            bar.add_row(text)
        else:
            bar.add_row(ProgressBar(total, done, width=length), text)
        return bar

    def _strip(self, room: int) -> Text:
        """The latest epochs' times as bars, with a cross where the driver was killed."""
        strip = Text()
        times = self._times_ms[-max(0, room) :] if room > 0 else []
        known = [time_ms for time_ms in times if time_ms is not None]
        if not known or self._console.options.ascii_only:
            return strip
        # The first epoch of a fresh JVM is many times slower than the rest; it may not flatten all others.
        top = max(1.0, 2 * statistics.median(known))
        for time_ms in times:
            if time_ms is None:
                strip.append("✗", style="bold red")
            else:
                strip.append(_BARS[min(len(_BARS) - 1, int(time_ms / top * len(_BARS)))], style="cyan")
        return strip
