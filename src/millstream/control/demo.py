"""`millstream demo`: a word count whose driver is killed halfway, and the proof that every word was counted once.

Rules
-----
- Nothing is staged except the moment: the driver is a process of its own, it ends by SIGKILL together with its JVM and
  its workers, and the next one knows only what is in the store. So that the kill hits the same moment on every
  machine, the driver stands still at it (an epoch has run, its commit is not written) until the signal arrives.
- The verdict does not trust Millstream: it is the comparison of `demo_words`.
- Whatever ends the demo (the end, an error, Ctrl-C, SIGTERM, a closed terminal), no process and, unless asked for, no
  file is left.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pyarrow.parquet as pq

from millstream.control.demo_driver import DriverProcess
from millstream.control.demo_words import FILES_PER_EPOCH, Comparison, compare, count_words, read_sink, write_text
from millstream.control.display import Display, Finding, Progress, open_display
from millstream.errors import UserError

TITLE = "Millstream demo: a word count, killed halfway"


def run_demo(epochs: int, words: int, keep: bool, java_home: str) -> int:
    """Runs the demo; the exit code: 0 if the result is exact, 1 if it is not."""
    drivers: list[DriverProcess] = []
    folder = Path(tempfile.mkdtemp(prefix="millstream-demo-")).resolve()
    display = open_display(TITLE, epochs)
    try:
        with _ending_signals():
            (folder / "spark").mkdir()
            with display:
                result = _Demo(folder, epochs, words, java_home, display, drivers).run()
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
class Result:
    """Everything the verdict tells."""

    comparison: Comparison
    epochs: int
    killed_in: int
    first_after: int
    """The first epoch that the second driver ran."""
    kill_code: int
    killed: int
    """How many processes, the driver included."""
    to_session_s: float
    to_commit_s: float
    """From the kill to the new Spark session, and to the first commit."""
    total_s: float

    @property
    def exact(self) -> bool:
        return self.comparison.exact and self._hit

    @property
    def _hit(self) -> bool:
        """Whether the kill was what it should be: by signal, and before the commit."""
        return self.kill_code == -signal.SIGKILL and self.first_after == self.killed_in

    def _miss(self) -> str:
        return f"exit code {self.kill_code}, and driver 2 began with epoch {self.first_after}"

    def tell(self, display: Display) -> None:
        found = self.comparison
        records, distinct = found.expected.total(), len(found.expected)
        if self.exact:
            headline = f"All {records:,d} records were counted exactly once, across a SIGKILL."
        elif found.exact:
            headline = "The counts are right, but the kill did not hit the moment it was meant for."
        else:
            headline = "The counts differ from a sequential count of the same text."
        top = found.expected.most_common(1)[0][0]
        display.verdict(
            self.exact,
            headline,
            [
                Finding("sequential count", f"{records:,d} records, {distinct:,d} distinct words"),
                Finding(
                    "state",
                    f"{sum(found.state.values()):,d} records, {len(found.state):,d} distinct words, "
                    + _wrong_words(found.state_wrong),
                    not found.state_wrong,
                ),
                Finding(
                    "Parquet sink",
                    f"{found.sink_rows:,d} rows: the totals 1, 2, ... n of {len(found.sink):,d} words, "
                    + _wrong_words(found.sink_wrong),
                    not found.sink_wrong,
                ),
                Finding(
                    "for example",
                    f"{top!r}: {found.expected[top]:,d} counted, {found.state.get(top, 0):,d} in the state, "
                    f"{found.sink.get(top, 0):,d} in the sink",
                ),
                Finding(
                    "SIGKILL",
                    f"{self.killed} processes, in epoch {self.killed_in} before its commit; "
                    + (f"driver 2 ran epoch {self.first_after} again" if self._hit else self._miss()),
                    self._hit,
                ),
                Finding(
                    "recovery",
                    f"{self.to_commit_s:.1f} s from the kill to the next commit, "
                    f"{self.to_session_s:.1f} s of it until Spark was up",
                ),
                Finding("altogether", f"{self.epochs} epochs, {self.total_s:.0f} s"),
            ],
        )


def _wrong_words(words: list[str]) -> str:
    if not words:
        return "none wrong"
    return f"{len(words):,d} wrong, such as {', '.join(repr(word) for word in words[:3])}"


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
        self._folder, self._epochs, self._words, self._java_home = folder, epochs, words, java_home
        self._display, self._drivers = display, drivers
        self._records = 0

    def run(self) -> Result:
        began = time.monotonic()
        show = self._display.happened
        write_text(self._folder / "text", self._epochs, self._words)
        show(f"{self._words:,d} words of text written to {self._epochs * FILES_PER_EPOCH} files, from a fixed seed")
        victim = self._epochs // 2

        first = self._start(hold=victim)
        show(f"driver 1 starts, pid {first.pid}")
        self._follow(first, victim)
        show(f"epoch {victim} has run and is not committed: the worst moment to lose the driver", "yellow")
        code, others = first.kill()
        killed_at = time.monotonic()
        java = next((f"its JVM (pid {item.pid})" for item in others if item.name == "java"), "its JVM")
        workers = len([item for item in others if item.name != "java"])
        self._display.killed()
        show(f"SIGKILL: driver 1 (pid {first.pid}), {java} and {workers} Python workers are gone", "bold red")

        second = self._start(hold=None)
        show(f"driver 2 starts on the same store, pid {second.pid}")
        session_at, first_after, commit_at = self._follow(second, None)
        show("all text is counted; driver 2 has ended")

        self._display.driver("ended; comparing with a sequential count")
        expected = count_words(self._folder / "text")
        found = compare(expected, pq.read_table(self._folder / "state.parquet"), read_sink(self._folder))
        show("state and sink compared with a sequential count of the same text")
        self._display.driver("ended", "dim")
        return Result(
            found,
            self._epochs,
            victim,
            first_after,
            code,
            len(others) + 1,
            session_at - killed_at,
            commit_at - killed_at,
            time.monotonic() - began,
        )

    def _start(self, hold: int | None) -> DriverProcess:
        driver = DriverProcess(self._folder, len(self._drivers) + 1, hold, self._java_home)
        self._drivers.append(driver)
        self._display.driver(f"pid {driver.pid}: starting Python, Java and Spark", "yellow")
        return driver

    def _follow(self, driver: DriverProcess, until_executed: int | None) -> tuple[float, int, float]:
        """Follows a driver to its end, or until it has executed an epoch.

        Returns when its session was there, the first epoch it planned, and when it first committed.
        """
        number, session_at, first_epoch, commit_at = len(self._drivers), 0.0, -1, 0.0
        for report in driver.reports():
            match report:
                case {"event": "session", "version": version}:
                    session_at = time.monotonic()
                    self._display.happened(f"driver {number}: Spark {version} is up")
                    self._display.driver(f"pid {driver.pid}: opening the store, starting workers", "yellow")
                case {"event": "moment", "moment": moment, "at": epoch}:
                    self._display.driver(f"pid {driver.pid}: epoch {epoch} {moment}", "green")
                    if moment == "planned" and first_epoch < 0:
                        first_epoch = epoch
                        self._display.happened(_beginning(number, epoch), "bold green" if number > 1 else "")
                    elif moment == "executed" and epoch == until_executed:
                        return session_at, first_epoch, commit_at
                    elif moment == "committed" and not commit_at:
                        commit_at = time.monotonic()
                        if number > 1:
                            self._display.happened(f"driver {number}: epoch {epoch} is committed", "green")
                    elif moment == "delivered":
                        self._display.progress(self._progress(report))
                case {"event": "counted"}:
                    self._display.driver(f"pid {driver.pid}: ending", "dim")
        if until_executed is not None:
            raise UserError(f"the driver ended before epoch {until_executed}, at which it was to be killed")
        return session_at, first_epoch, commit_at

    def _progress(self, report: dict[str, Any]) -> Progress:
        self._records += sum(report["records"].values())
        return Progress(
            report["at"],
            self._records,
            report["records_per_second"],
            report["epoch_ms"],
            report["state_bytes"],
            report["segments"],
            report["slots"],
        )


def _beginning(driver: int, epoch: int) -> str:
    if epoch == 0:
        return f"driver {driver}: the store is empty; it begins with epoch 0"
    return f"driver {driver}: the last commit is epoch {epoch - 1}; it goes on with epoch {epoch}"


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
