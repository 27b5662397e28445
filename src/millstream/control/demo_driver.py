"""The drivers of `millstream demo`: what runs in their processes, and how the parent sees and ends them.

Rules
-----
- A driver has a process and a session of its own. It ends by SIGKILL together with its JVM and its workers, and the
  next one knows only what is in the store.
- It reports to its parent in JSON lines on the standard output it was started with. Everything else that it or Spark
  writes goes to a log file, whose end is shown if it fails.
- At the moments it is told to hold, a driver stands still until its parent lets it go on, so that what the parent does
  then hits the same epoch on every machine.
- A driver whose parent has vanished ends itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow.parquet as pq

import millstream as ms
from millstream.control.demo_words import word_count
from millstream.errors import ConflictError, InvariantViolation, MillstreamError, UserError

_SILENCE_S = 300.0
"""A driver that reports nothing for so long is given up."""
_LOG_TAIL = 25

Moment = tuple[str, int]
"""A moment of an epoch, as observers are told of them, and the epoch."""


# -- the driver's process -----------------------------------------------------------------------------------------


def _drive(folder: Path, holds: Sequence[Moment]) -> int:
    """What runs in the driver's process: the query until its input is used up, then the state to a file."""
    # The JVM inherits descriptor 1 and may write anything to it, so the reports go through a copy it does not get.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gate = threading.Semaphore(0)
    threading.Thread(target=_listen_to_parent, args=(gate,), daemon=True).start()

    def report(event: str, **facts: object) -> None:
        reports.write(json.dumps({"event": event, **facts}, default=str) + "\n")  # a status has datetimes
        reports.flush()

    try:
        _count(folder, holds, gate, report)
    except MillstreamError as error:
        kind = next(k for k in (ConflictError, InvariantViolation, MillstreamError) if isinstance(error, k))
        report("failed", kind=kind.__name__, text=str(error))
        return 1
    return 0


def _count(folder: Path, holds: Sequence[Moment], gate: threading.Semaphore, report: Any) -> None:
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
        if (moment, epoch) in holds:
            gate.acquire()

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


def _listen_to_parent(gate: threading.Semaphore) -> NoReturn:
    """Every byte on standard input opens the gate once. When the parent's end of it closes, this process and its JVM
    end; workers follow their JVM."""
    while os.read(0, 1):
        gate.release()
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

    def __init__(self, folder: Path, number: int, holds: Sequence[Moment], java_home: str) -> None:
        self.log = folder / f"driver-{number}.log"
        command = [sys.executable, "-m", "millstream.control.demo_driver", "--child", str(folder)]
        for moment, epoch in holds:
            command += ["--hold", moment, str(epoch)]
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
                report = json.loads(line)
            except ValueError:  # the end of a line that was being written when the driver was killed
                break
            self._reports.put({**report, "seen": time.monotonic()})
        self._reports.put(None)

    def reports(self) -> Iterator[dict[str, Any]]:
        """What the driver reports, until it ends. Raises if it fails, or says nothing for too long.

        Each report has the time at which it was `seen`. Who stops in between goes on with another call.
        """
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

    def go_on(self) -> None:
        """Lets a driver that holds go on."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and `reports` will tell why
            self._process.stdin.write(b".")
            self._process.stdin.flush()

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
                with suppress(BrokenPipeError):
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


def _main() -> int:
    parser = argparse.ArgumentParser(description="The driver of `millstream demo`; started by it, not by hand.")
    parser.add_argument("--child", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--hold", nargs=2, action="append", default=[], metavar=("MOMENT", "EPOCH"))
    given = parser.parse_args()
    return _drive(given.child, [(moment, int(epoch)) for moment, epoch in given.hold])


if __name__ == "__main__":
    sys.exit(_main())
