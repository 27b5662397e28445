"""`millstream demo`: a word count that is rescaled while it runs, whose driver is then killed, and the proof that every
word was counted once.

Rules
-----
- Nothing is staged except the moments. The driver is a process of its own. What it is asked to do while it runs comes
  from this one, by way of the store, as it would from any other. It ends by SIGKILL together with its JVM and its
  workers, and the next one knows only what is in the store.
- So that everything hits the same epochs on every machine, the driver stands still when it is time: after an epoch,
  until a rescale is asked for; and in an epoch that has run and is not committed, until the signal arrives.
- The verdict does not trust Millstream: it is that of `demo_verdict`.
- Whatever ends the demo (the end, an error, Ctrl-C, SIGTERM, a closed terminal), no process is left, and no file but
  the picture, unless more was asked for.
"""

from __future__ import annotations

import math
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pyarrow.parquet as pq

import millstream as ms
from millstream.control.connect import Control
from millstream.control.demo_driver import DriverProcess, Moment
from millstream.control.demo_picture import write_picture
from millstream.control.demo_timeline import EpochSeen, Migration, Timeline, chart
from millstream.control.demo_verdict import Kill, Rescaled, Result
from millstream.control.demo_words import FILES_PER_EPOCH, compare, count_words, read_sink, write_text
from millstream.control.display import Display, Moving, Progress, open_display
from millstream.control.handle import Handle
from millstream.errors import UserError
from millstream.protocol.migration import MigrationPlan

TITLE = "Millstream demo: a word count, rescaled while it runs, then killed"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is asked for at which epoch. The last rescale is under way when the driver is killed.

    >>> Schedule(40)
    Schedule(epochs=40)
    >>> Schedule(40).grow, Schedule(40).shrink, Schedule(40).kill, Schedule(40).rounds
    (10, 25, 30, 10)
    >>> Schedule(8).grow, Schedule(8).shrink, Schedule(8).kill, Schedule(8).rounds
    (2, 5, 6, 2)
    """

    epochs: int

    @property
    def rounds(self) -> int:
        """How many rounds a rescale has at most."""
        return self.epochs // 4

    @property
    def grow(self) -> int:
        """The epoch of the first round of the rescale from 2 to 4 slots."""
        return self.epochs // 4

    @property
    def shrink(self) -> int:
        """The same of the rescale from 4 to 3."""
        return self.epochs * 5 // 8

    @property
    def kill(self) -> int:
        """The epoch whose commit the first driver does not live to see."""
        return self.shrink + self.rounds // 2


def run_demo(epochs: int, words: int, keep: bool, picture: Path, java_home: str) -> int:
    """Runs the demo; the exit code: 0 if the result is exact, 1 if it is not."""
    drivers: list[DriverProcess] = []
    folder = Path(tempfile.mkdtemp(prefix="millstream-demo-")).resolve()
    display = open_display(TITLE, epochs)
    try:
        with _ending_signals():
            (folder / "spark").mkdir()
            with display:
                result = _Demo(folder, epochs, words, java_home, display, drivers).run()
            display.chart(chart(result.timeline))
            display.note(write_picture(result.timeline, picture))
            result.tell(display)
        return 0 if result.exact else 1
    finally:
        with _undisturbed():
            for driver in drivers:
                driver.kill()
            if keep:
                shutil.rmtree(folder / "spark", ignore_errors=True)
                print(f"Kept in {folder}: text, store, totals (the sink), state.parquet, driver-*.log", flush=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Rescale:
    """A rescale that was asked for."""

    slots: tuple[int, int]
    at: int
    plan: MigrationPlan
    handle: Handle


@dataclass(slots=True)
class _Seen:
    """What was seen of a driver."""

    session_at: float = 0.0
    first_epoch: int = -1
    """The first epoch that it planned."""
    commit_at: float = 0.0
    """When it first committed."""


class _Demo:
    """One run: what is known while it goes on."""

    def __init__(
        self,
        folder: Path,
        epochs: int,
        words: int,
        java_home: str,
        display: Display,
        drivers: list[DriverProcess],
    ) -> None:
        self._folder, self._words, self._java_home = folder, words, java_home
        self._schedule = Schedule(epochs)
        self._display, self._drivers = display, drivers
        self._began = time.monotonic()
        self._records = 0
        self._control: Control | None = None
        self._rescales: list[_Rescale] = []
        self._moving: _Rescale | None = None
        self._epochs: list[EpochSeen] = []
        self._commit_at = 0.0

    def run(self) -> Result:
        show, when, epochs = self._display.happened, self._schedule, self._schedule.epochs
        write_text(self._folder / "text", epochs, self._words)
        show(f"{self._words:,d} words of text written to {epochs * FILES_PER_EPOCH} files, from a fixed seed")

        first = self._start([("delivered", when.grow - 1), ("delivered", when.shrink - 1), ("executed", when.kill)])
        show(f"driver 1 starts, pid {first.pid}")
        seen = _Seen()
        self._follow(first, seen, ("delivered", when.grow - 1))
        live = self._rescale(4, when.grow)
        first.go_on()
        self._follow(first, seen, ("delivered", when.shrink - 1))
        cut = self._rescale(3, when.shrink)
        first.go_on()
        self._follow(first, seen, ("executed", when.kill))
        show(f"epoch {when.kill} has run and is not committed: the worst moment to lose the driver", "yellow")
        code, others = first.kill()
        killed_at = time.monotonic()
        done_by_first = cut.handle.progress().done
        java = next((f"its JVM (pid {item.pid})" for item in others if item.name == "java"), "its JVM")
        workers = len([item for item in others if item.name != "java"])
        self._display.killed()
        show(f"SIGKILL: driver 1 (pid {first.pid}), {java} and {workers} Python workers are gone", "bold red")

        second, after = self._start([]), _Seen()
        show(f"driver 2 starts on the same store, pid {second.pid}")
        self._follow(second, after, None)
        show("all text is counted; driver 2 has ended")

        self._display.driver("ended; comparing with a sequential count")
        expected = count_words(self._folder / "text")
        found = compare(expected, pq.read_table(self._folder / "state.parquet"), read_sink(self._folder))
        show("state and sink compared with a sequential count of the same text")
        self._display.driver("ended", "dim")
        recovery = (after.session_at - killed_at, after.commit_at - killed_at)
        return Result(
            found,
            self._rescaled(live, done_by_first),
            self._rescaled(cut, done_by_first),
            Kill(when.kill, after.first_epoch, code, len(others) + 1, *recovery),
            self._timeline(killed_at),
            time.monotonic() - self._began,
        )

    def _start(self, holds: Sequence[Moment]) -> DriverProcess:
        driver = DriverProcess(self._folder, len(self._drivers) + 1, holds, self._java_home)
        self._drivers.append(driver)
        self._display.driver(f"pid {driver.pid}: starting Python, Java and Spark", "yellow")
        return driver

    def _strategy(self, bins: int) -> ms.Batched:
        """Rounds enough to be looked at, although so little state would move in one."""
        return ms.Batched(math.ceil(bins / self._schedule.rounds), merge=False)

    def _rescale(self, slots: int, at: int) -> _Rescale:
        """Asks the running query for another number of slots, as any process can that reaches its store."""
        if self._control is None:
            self._control = ms.connect(str(self._folder / "store"))
        bins = self._control.plan_rescale(slots).bins
        plan = self._control.plan_rescale(slots, strategy=self._strategy(bins))
        now = self._epochs[-1].slots
        self._display.happened(f"this process asks for {slots} slots instead of {now}, by way of the store:", "yellow")
        for line in str(plan).splitlines():
            self._display.happened(f"  {line}", "dim")
        asked = _Rescale((now, slots), at, plan, self._control.apply(plan))
        self._rescales.append(asked)
        self._moving = asked
        return asked

    def _follow(self, driver: DriverProcess, seen: _Seen, until: Moment | None) -> None:
        """Follows a driver to a moment at which it holds, or to its end."""
        number = len(self._drivers)
        for report in driver.reports():
            match report:
                case {"event": "session", "version": version}:
                    seen.session_at = report["seen"]
                    self._display.happened(f"driver {number}: Spark {version} is up")
                    self._display.driver(f"pid {driver.pid}: opening the store, starting workers", "yellow")
                case {"event": "moment", "moment": moment, "at": epoch}:
                    self._display.driver(f"pid {driver.pid}: epoch {epoch} {moment}", "green")
                    if moment == "planned" and seen.first_epoch < 0:
                        seen.first_epoch = epoch
                        self._display.happened(self._beginning(epoch), "bold green" if number > 1 else "")
                    elif moment == "committed":
                        self._commit_at = report["seen"]
                        if not seen.commit_at:
                            seen.commit_at = report["seen"]
                            if number > 1:
                                self._display.happened(f"driver {number}: epoch {epoch} is committed", "green")
                    elif moment == "delivered":
                        self._delivered(report)
                    if (moment, epoch) == until:
                        return
                case {"event": "counted"}:
                    self._display.driver(f"pid {driver.pid}: ending", "dim")
        if until is not None:
            raise UserError(f"the driver ended before epoch {until[1]}, in which it was to stand still")

    def _beginning(self, epoch: int) -> str:
        driver = len(self._drivers)
        if epoch == 0:
            return f"driver {driver}: the store is empty; it begins with epoch 0"
        return f"driver {driver}: the last commit is epoch {epoch - 1}; it goes on with epoch {epoch} and the rescale"

    def _delivered(self, report: dict[str, Any]) -> None:
        epoch, slots = report["at"], report["slots"]
        self._epochs.append(EpochSeen(epoch, self._commit_at - self._began, report["epoch_ms"], slots))
        self._records += sum(report["records"].values())
        self._display.progress(
            Progress(
                epoch,
                self._records,
                report["records_per_second"],
                report["epoch_ms"],
                report["state_bytes"],
                report["segments"],
                slots,
                self._moved(),
            )
        )
        if self._moving is not None and (outcome := self._moving.handle.outcome) is not None and outcome.over:
            self._moving = None
            what = f"{outcome.state} with {outcome.done} of {outcome.rounds} rounds"
            reason = f": {outcome.reason}" if outcome.reason else ""
            style = "bold green" if outcome.state == "done" else "bold red"
            self._display.happened(f"the rescale is {what} in epoch {epoch}; there are {slots} slots{reason}", style)

    def _moved(self) -> Moving | None:
        """How far the rescale that goes on has come."""
        if self._moving is None:
            return None
        plan, done = self._moving.plan, self._moving.handle.progress().done
        bins = [sum(move.bins for move in moves) for moves in plan.rounds]
        return Moving(done, len(bins), sum(bins[:done]), sum(bins))

    def _rescaled(self, asked: _Rescale, done_by_first: int) -> Rescaled:
        outcome = asked.handle.outcome
        slots = {seen.epoch: seen.slots for seen in self._epochs}
        last = outcome.last if outcome is not None else -1
        found = (slots.get(asked.at - 1, 0), slots.get(last, 0))
        return Rescaled(asked.slots, found, asked.at, asked.plan.bins, outcome, done_by_first)

    def _timeline(self, killed_at: float) -> Timeline:
        moves = []
        for asked in self._rescales:
            outcome = asked.handle.outcome
            if outcome is not None and outcome.began >= 0:
                text = f"{asked.slots[0]} to {asked.slots[1]} slots"
                moves.append(Migration(outcome.began, outcome.last, text))
        epochs = tuple(sorted(self._epochs, key=lambda seen: seen.epoch))
        return Timeline(epochs, tuple(moves), self._schedule.kill, killed_at - self._began)


@contextmanager
def _ending_signals() -> Iterator[None]:
    """Lets SIGTERM and a closed terminal end the demo the way Ctrl-C does: through everything that cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps impatient signals out of the cleaning up, which takes well under a second."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
