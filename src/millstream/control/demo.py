"""`millstream demo`: a word count whose driver is killed halfway, and the proof that every word was counted once.

Rules
-----
- Nothing is staged except the moment: the driver is a process of its own, it ends by SIGKILL together with its JVM and
  its workers, and the next one knows only what is in the store. So that the kill hits the same moment on every
  machine, the driver stands still at it (an epoch has run, its commit is not written) until the signal arrives.
- The verdict does not trust Millstream. The text is counted again in plain Python, and compared with the state and
  with what the sink holds.
- Whatever ends the demo (the end, an error, Ctrl-C, SIGTERM, a closed terminal), no process and, unless asked for, no
  file is left. A driver whose parent has vanished ends itself.
- The driver reports to its parent in JSON lines on the standard output it was started with. Everything else that it or
  Spark writes goes to a log file, whose end is shown if the driver fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as sql
from pyspark.sql.streaming.readwriter import DataStreamReader

import millstream as ms
from millstream.control.display import Display, Finding, Progress, open_display
from millstream.errors import ConflictError, InvariantViolation, MillstreamError, UserError

TITLE = "Millstream demo: a word count, killed halfway"
SEED = 1787
FILES_PER_EPOCH = 2
WORDS_PER_LINE = 10
DISTINCT_WORDS = 30_000
FIRST_WORDS = "the mill stream and water of wheel stone grain flour race pond sluice miller"
"""The most frequent words; all others are made of syllables."""
_SILENCE_S = 300.0
"""A driver that reports nothing for so long is given up."""
_LOG_TAIL = 25


# -- the query ----------------------------------------------------------------------------------------------------


class WordCount(ms.Computation):
    """How often each word was seen. Every record yields the total so far: 1, 2, 3, ... for each word."""

    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[tuple[str, int]]:
        total = self.total.get() + 1
        self.total.set(total)
        yield at.key, total


def word_count(folder: Path) -> ms.Query:
    """The demo's query: text files in, totals out to Parquet."""

    def words(read: DataStreamReader) -> DataFrame:
        lines = read.option("maxFilesPerTrigger", FILES_PER_EPOCH).text(str(folder / "text"))
        return lines.select(sql.explode(sql.split("value", " ")).alias("word"))

    query = ms.Query("wordcount")
    query.source("words", words).key_by("word").compute("count", WordCount).sink("totals", ms.Parquet(_sink(folder)))
    return query


def _sink(folder: Path) -> str:
    return str(folder / "totals")


# -- its input, and the count to compare with ---------------------------------------------------------------------


def vocabulary(size: int = DISTINCT_WORDS) -> list[str]:
    """Words that can be read aloud, all different, the same on every machine.

    >>> vocabulary(20)[:3], vocabulary(20)[-2:]
    (['the', 'mill', 'stream'], ['bebu', 'beda'])
    """
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = FIRST_WORDS.split()
    number = len(syllables)  # so that every made word has two syllables or more, and none is made twice
    while len(words) < size:
        word, rest = "", number
        while rest:
            rest, place = divmod(rest, len(syllables))
            word = syllables[place] + word
        words.append(word)
        number += 1
    return words


def write_text(folder: Path, epochs: int, words: int) -> None:
    """Text as Zipf would have it, in numbered files, `FILES_PER_EPOCH` for each epoch."""
    folder.mkdir()
    rng, known = random.Random(SEED), vocabulary()
    weights = list(accumulate(1 / (rank + 2) for rank in range(len(known))))
    files = epochs * FILES_PER_EPOCH
    for index in range(files):
        count = words * (index + 1) // files - words * index // files
        chosen = rng.choices(known, cum_weights=weights, k=count)
        lines = [" ".join(chosen[at : at + WORDS_PER_LINE]) for at in range(0, count, WORDS_PER_LINE)]
        path = folder / f"{index:05d}.txt"
        path.write_text("\n".join(lines) + "\n")
        # Spark reads files in the order of their times, and these may all have been written within one tick.
        os.utime(path, (1_500_000_000 + index, 1_500_000_000 + index))


def count_words(folder: Path) -> Counter[str]:
    """The count by the simplest means there are: one loop over the same files."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.iterdir()):
        with path.open() as lines:
            for line in lines:
                counts.update(line.split())
    return counts


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the state and the sink say, against the sequential count."""

    expected: Counter[str]
    state: dict[str, int]
    state_wrong: list[str]
    """Words whose total in the state is wrong."""
    sink: dict[str, int]
    """The last total of every word in the sink."""
    sink_rows: int
    sink_wrong: list[str]
    """Words whose totals in the sink are not 1, 2, ... n, each of them once."""

    @property
    def exact(self) -> bool:
        return not self.state_wrong and not self.sink_wrong


def compare(expected: Counter[str], state: pa.Table, sink: pa.Table) -> Comparison:
    """Compares; both tables have the columns `word` and `total`."""
    totals = dict(zip(state["word"].to_pylist(), state["total"].to_pylist(), strict=True))
    twice = [word for word, times in Counter(state["word"].to_pylist()).items() if times > 1]
    state_wrong = {word for word in expected.keys() | totals.keys() if expected.get(word) != totals.get(word)}
    kinds = ("count", "min", "max", "count_distinct")
    grouped = sink.group_by("word").aggregate([("total", kind) for kind in kinds])
    columns = [grouped[f"total_{kind}"].to_pylist() for kind in kinds]
    seen = dict(zip(grouped["word"].to_pylist(), zip(*columns, strict=True), strict=True))
    # n numbers, all different, the least of them 1 and the greatest n: that is 1..n, each once.
    sink_wrong = [
        word
        for word in expected.keys() | seen.keys()
        if seen.get(word) != (expected[word], 1, expected[word], expected[word])
    ]
    last = {word: facts[2] for word, facts in seen.items()}
    return Comparison(
        expected, totals, sorted(state_wrong.union(twice)), last, sink.num_rows, sorted(sink_wrong, key=str)
    )


def _read_sink(folder: Path) -> pa.Table:
    files = sorted(Path(_sink(folder)).glob("epoch-*.parquet"))
    if not files:
        raise UserError(f"the sink {_sink(folder)} is empty")
    return pa.concat_tables([pq.read_table(file) for file in files])


# -- the driver's process -----------------------------------------------------------------------------------------


def _drive(folder: Path, hold: int | None) -> int:
    """What runs in the driver's process: the query until its input is used up, then the state to a file."""
    # The JVM inherits descriptor 1 and may write anything to it, so the reports go through a copy it does not get.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def report(event: str, **facts: object) -> None:
        reports.write(json.dumps({"event": event, **facts}, default=str) + "\n")  # a status has datetimes
        reports.flush()

    try:
        _count(folder, hold, report)
    except MillstreamError as error:
        kind = next(k for k in (ConflictError, InvariantViolation, MillstreamError) if isinstance(error, k))
        report("failed", kind=kind.__name__, text=str(error))
        return 1
    return 0


def _count(folder: Path, hold: int | None, report: Any) -> None:
    spark = ms.session("millstream-demo", master="local[2]", settings=_spark_settings(folder))
    spark.sparkContext.setLogLevel("ERROR")
    report("session", version=spark.version)
    running: list[ms.RunningQuery] = []
    known = threading.Event()

    def observe(moment: str, epoch: int) -> None:
        facts: dict[str, object] = {}
        if moment == "delivered":
            known.wait()  # The first epoch may be there before `start` has returned.
            status = running[0].status()
            facts = dataclasses.asdict(status) | {"records_per_second": status.records_per_second}
        report("moment", moment=moment, at=epoch, **facts)
        if moment == "executed" and epoch == hold:
            threading.Event().wait()

    running.append(
        word_count(folder).start(spark, str(folder / "store"), trigger={"availableNow": True}, observe=observe)
    )
    known.set()
    running[0].await_termination()
    pq.write_table(running[0].state("count").toArrow(), folder / "state.parquet")
    report("counted")
    spark.stop()


def _spark_settings(folder: Path) -> dict[str, str]:
    place = folder / "spark"
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "1g",
        # A JVM that is killed cleans nothing up, so all it writes has to lie in our folder.
        "spark.local.dir": str(place),
        "spark.sql.warehouse.dir": str(place / "warehouse"),
        # The quick compiler only: in a JVM that lives for half a minute, the thorough one doubles the CPU time.
        "spark.driver.extraJavaOptions": f'"-Djava.io.tmpdir={place}" -XX:-UsePerfData -XX:TieredStopAtLevel=1',
    }
    if len(str(place)) > 55:
        # Spark puts sockets there, named with some 40 characters, and the path of a socket ends at 104 or 108.
        settings["spark.python.unix.domain.socket.enabled"] = "false"
    return settings


def _end_with_parent() -> NoReturn:
    """Ends this process and its JVM when the parent's end of standard input closes; workers follow their JVM."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


# -- the parent's view of it --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a session."""

    pid: int
    name: str


def processes_of(session: int) -> list[Process]:
    """The living processes of a session. PySpark's workers leave their process group, but not their session."""
    found = []
    for pid, state, name in _all_processes():
        try:
            if state not in "ZX" and os.getsid(pid) == session:
                found.append(Process(pid, name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def _all_processes() -> Iterator[tuple[int, str, str]]:
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-A", "-o", "pid=,stat=,comm="], capture_output=True, text=True, check=False)
        for line in listed.stdout.splitlines():
            pid, state, name = line.split(None, 2)
            yield int(pid), state[0], Path(name).name
        return
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            # The name stands in parentheses and may itself contain any character.
            yield int(entry.name), text[text.rindex(")") + 2], text[text.index("(") + 1 : text.rindex(")")]


class DriverProcess:
    """A driver in a process and session of its own."""

    def __init__(self, folder: Path, number: int, hold: int | None, java_home: str) -> None:
        self.log = folder / f"driver-{number}.log"
        command = [sys.executable, "-m", "millstream.control.demo", "--child", str(folder)]
        if hold is not None:
            command += ["--hold", str(hold)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=_environment(folder, java_home),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._reports: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._reports.put(json.loads(line))
            except ValueError:  # the end of a line that was being written when the driver was killed
                break
        self._reports.put(None)

    def reports(self) -> Iterator[dict[str, Any]]:
        """What the driver reports, until it ends. Raises if it fails, or says nothing for too long."""
        while True:
            try:
                report = self._reports.get(timeout=_SILENCE_S)
            except queue.Empty:
                raise UserError(f"the driver has reported nothing for {_SILENCE_S:.0f} s{self._tail()}") from None
            if report is None:
                code = self._process.wait()
                if code != 0:
                    raise UserError(f"the driver ended unexpectedly with code {code}{self._tail()}")
                return
            if report["event"] == "failed":
                kinds = {"ConflictError": ConflictError, "InvariantViolation": InvariantViolation}
                raise kinds.get(report["kind"], UserError)(f"the driver failed: {report['text']}")
            yield report

    def kill(self) -> tuple[int, list[Process]]:
        """SIGKILL to the driver, then to all that it started. Its exit code, and what else was killed.

        Returns when they are gone.
        """
        others: dict[int, Process] = {}
        if self._process.poll() is None:
            # Listed first: a JVM that finds its driver gone ends by itself, and would not be seen.
            others = {item.pid: item for item in processes_of(self.pid) if item.pid != self.pid}
            os.kill(self.pid, signal.SIGKILL)
        for pid in others:
            _kill(pid)
        code = self._process.wait()
        deadline = time.monotonic() + 30
        while left := processes_of(self.pid):
            others |= {item.pid: item for item in left}
            for item in left:
                _kill(item.pid)
            if time.monotonic() > deadline:
                raise UserError(f"processes {', '.join(str(item.pid) for item in left)} do not end; kill them by hand")
            time.sleep(0.02)
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        return code, list(others.values())

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        if not lines:
            return "; it logged nothing"
        return "; its log ends with:\n  " + "\n  ".join(line[:300] for line in lines[-_LOG_TAIL:])


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _environment(folder: Path, java_home: str) -> dict[str, str]:
    """The environment of a driver: nothing of another Spark, and all temporary files in our folder."""
    other_spark = ("SPARK_HOME", "SPARK_CONF_DIR", "SPARK_REMOTE", "PYSPARK_SUBMIT_ARGS", "PYSPARK_GATEWAY_PORT")
    env = {name: value for name, value in os.environ.items() if name not in other_spark}
    env["JAVA_HOME"] = java_home
    env["PYSPARK_PYTHON"] = env["PYSPARK_DRIVER_PYTHON"] = sys.executable
    env["TMPDIR"] = env["SPARK_LOCAL_DIRS"] = str(folder / "spark")
    if paths := env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths.split(os.pathsep) if path)
    return env


# -- the demo -----------------------------------------------------------------------------------------------------


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
        found = compare(expected, pq.read_table(self._folder / "state.parquet"), _read_sink(self._folder))
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


def _main() -> int:
    parser = argparse.ArgumentParser(description="The driver of `millstream demo`; started by it, not by hand.")
    parser.add_argument("--child", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--hold", type=int, metavar="EPOCH")
    given = parser.parse_args()
    # By its name, so that workers import the computation instead of receiving a copy of `__main__`.
    from millstream.control import demo

    return demo._drive(given.child, given.hold)


if __name__ == "__main__":
    sys.exit(_main())
