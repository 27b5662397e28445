"""Resident memory of workers over time, from Linux's /proc: executors' Java processes, and their Python workers.

Memory that processes share, such as mapped segments, counts for each of them: it is the sum of what `ps` would show.
Private memory (`RssAnon`) is kept beside it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

EVERY_S = 0.25
_LOOK_EVERY_S = 2.0
_WORKERS = (b"CoarseGrainedExecutorBackend", b"pyspark.daemon", b"pyspark/daemon.py")


class Sampler:
    """Samples while it is open. `samples` are the time, the resident and the private bytes of all workers."""

    def __init__(self, since: float) -> None:
        self.samples: list[tuple[float, int, int]] = []
        self._since = since
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resident", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        looked, found = -_LOOK_EVERY_S, []
        while not self._ended.wait(EVERY_S):
            now = time.monotonic()
            if now - looked >= _LOOK_EVERY_S:
                looked, found = now, list(workers(os.getpid()))
            sizes = [size for pid in found if (size := memory(pid)) is not None]
            if sizes:
                self.samples.append((now - self._since, sum(size[0] for size in sizes), sum(size[1] for size in sizes)))


def workers(ancestor: int) -> Iterator[int]:
    """The processes below this one that are executors, or Python workers of executors."""
    parents: dict[int, int] = {}
    commands: dict[int, bytes] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                commands[int(entry.name)] = (entry / "cmdline").read_bytes()
            except (OSError, IndexError):
                continue  # it has just ended
    for pid, command in commands.items():
        if any(name in command for name in _WORKERS):
            above = pid
            while above in parents and above != ancestor:
                above = parents[above]
            if above == ancestor:
                yield pid


def memory(pid: int) -> tuple[int, int] | None:
    """The resident and the private bytes of a process; None if it has ended."""
    found = {}
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmRSS", "RssAnon"):
                found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return (found["VmRSS"], found["RssAnon"]) if len(found) == 2 else None
