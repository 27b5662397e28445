"""Runs contenders one after the other, each in a process of its own with a JVM of its own, in interleaved rounds.

Rules
-----
- One contender at a time: the machine belongs to it. Rounds are interleaved (a b c, a b c), so that a noisy minute
  does not fall on one contender only; the best round counts.
- A contender that fails, hangs or dies is a result like any other, with the reason.
- Nothing is left behind, however a run ends: each contender has a folder for everything that it, Spark and the JVM
  write, and a session for all its processes. Both are removed, on Ctrl-C too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import FAILED, PROGRESS, RESULT, Contender

ROOT = Path(__file__).resolve().parent.parent
_GRACE_S = 10.0
_MAIN = "from bench.contenders import main; main()"

Run = dict[str, Any]
"""One run of one contender: `contender`, `round`, `seconds`, and `found` or `failed`."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark: contenders that are compared with each other."""

    name: str
    title: str
    contenders: tuple[Contender, ...]
    rounds: int


class Watcher:
    """What is told of the progress; this one says nothing."""

    def began(self, part: Part, contender: Contender, round_: int) -> None: ...

    def moved(self, done: int, of: int) -> None: ...

    def ended(self, contender: Contender, run: Run) -> None: ...


def race(part: Part, timeout_s: float, watcher: Watcher, keep: Callable[[Run], None]) -> None:
    """Runs all rounds of a part; `keep` is given each run as soon as it has ended."""
    for round_ in range(part.rounds):
        for contender in part.contenders:
            watcher.began(part, contender, round_)
            started = time.monotonic()
            found = run_contender(contender, timeout_s, watcher.moved)
            run: Run = {"contender": contender.name, "round": round_, "seconds": time.monotonic() - started, **found}
            keep(run)
            watcher.ended(contender, run)


def run_contender(asked: Any, timeout_s: float, moved: Callable[[int, int], None], main: str = _MAIN) -> Run:
    """Runs one contender in a process; `{"found": ...}`, or `{"failed": reason}`.

    `asked` is a dataclass that `main` is given: a `Contender`, or what another benchmark runs.
    """
    with _folder() as folder:
        errors = folder / "stderr"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", main, json.dumps(dataclasses.asdict(asked))],
                cwd=folder,
                env=_environment(folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            for mark, told in _marked_lines(process, time.monotonic() + timeout_s):
                if mark == PROGRESS:
                    moved(told["done"], told["of"])
                elif mark == RESULT:
                    return {"found": told}
                else:
                    return {"failed": told["reason"]}
            code = process.wait()
            return {"failed": f"it ended with code {code} and no result: {_last_words(errors)}"}
        except TimeoutError:
            return {"failed": f"no result within {timeout_s:.0f} s"}
        finally:
            _end(process)


def _marked_lines(process: subprocess.Popen[bytes], deadline: float) -> Iterator[tuple[str, Any]]:
    assert process.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if not selector.select(min(left, 1.0)):
                continue
            data = os.read(process.stdout.fileno(), 1 << 20)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace")
                for mark in (PROGRESS, RESULT, FAILED):
                    if text.startswith(mark):
                        yield mark, json.loads(text.removeprefix(mark))


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="millstream-bench-"))
    try:
        yield folder
    finally:
        for _ in range(20):  # a JVM that is just being ended may still write
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.1)


def _environment(folder: Path) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "JAVA_HOME": java_home(),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder),
        "TMPDIR": str(folder),
    }


def java_home() -> str:
    """The Java of the environment, else the one that the project's own script finds."""
    if "JAVA_HOME" not in os.environ:
        script = ROOT / "scripts" / "java.sh"
        os.environ["JAVA_HOME"] = subprocess.run(
            ["bash", str(script)], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
    return os.environ["JAVA_HOME"]


def _last_words(errors: Path) -> str:
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:] or "it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a contender and everything it started: its JVM, and the JVM's Python daemons, which lead other groups."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()  # which ends it, and with it the JVM, and with that the daemons
    deadline = time.monotonic() + _GRACE_S
    while (left := _in_session(process.pid)) and time.monotonic() < deadline:
        process.poll()
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    process.stdout.close()


def _in_session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, _, session = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
            except (OSError, ValueError):
                continue
            if int(session) == leader and (state != "Z" or int(entry.name) == leader):
                found.append(int(entry.name))
    return found


# -- reading runs -----------------------------------------------------------------------------------------------------


def epoch_times(run: Run) -> list[float]:
    """The times of the measured epochs, in milliseconds; none if the run failed."""
    return [float(epoch["ms"]) for epoch in run.get("found", {}).get("epochs", [])]


def best_run(runs: Sequence[Run], contender: str) -> Run | None:
    """The run of a contender with the smallest median epoch time; None if there is none that succeeded."""
    good = [run for run in runs if run["contender"] == contender and epoch_times(run)]
    return min(good, key=median_ms, default=None)


def median_ms(run: Run) -> float:
    """The median epoch time of a run."""
    return statistics.median(epoch_times(run))


def rate(run: Run) -> float:
    """Records per second at the median epoch time."""
    rows = statistics.median(int(epoch["rows"]) for epoch in run["found"]["epochs"])
    return rows / median_ms(run) * 1000


def failure(runs: Sequence[Run], contender: str) -> str:
    """Why a contender has no result, in one line."""
    reasons = [run["failed"] for run in runs if run["contender"] == contender and "failed" in run]
    return " ".join(str(reasons[-1]).split()) if reasons else "not measured"
