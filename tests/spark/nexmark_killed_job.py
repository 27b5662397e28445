"""NEXMark on executors that are killed while state moves; run as a process by test_nexmark_killed.py.

    python nexmark_killed_job.py FOLDER MASTER QUERY[+QUERY...]

For each query, on one cluster of two executors of one core: from the first commit on a migration is under way, one bin
after the other, and in a later epoch, once its plan is journaled, an executor that hosts a slot is killed (SIGKILL, by
its pid). Prints one JSON line: for each query whether the result is what plain Python gives, and what happened.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import millstream as ms
from millstream.nexmark import QUERIES, Parameters
from millstream.nexmark.frames import closed_loop

EPOCHS, PER_EPOCH, KILLED_IN = 5, 120, 2
SPANS = {"q5": 3 * 3600, "q8": 72 * 3600, "nbq5": 200, "nbq8": 72 * 3600, "nbqx": 36 * 3600}


def executors(application: str) -> list[int]:
    """The pids of the executors of an application on this machine."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                told = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--app-id" in told and application.encode() in told and b"java" in told[0]:
                found.append(int(folder.name))
    return sorted(found)


class Killer:
    """Asks for a migration after the first commit; kills an executor once the plan of a later epoch is journaled."""

    def __init__(self, application: str, store: str) -> None:
        self.application, self.store = application, store
        self.killed: list[int] = []
        self.number = -1

    def observe(self, moment: str, epoch: int) -> None:
        if (moment, epoch) == ("committed", 0):
            control = ms.connect(self.store)
            self.number = control.apply(control.plan_rescale(3, strategy=ms.Fluid())).number
        if (moment, epoch) == ("planned", KILLED_IN) and not self.killed:
            pid = executors(self.application)[0]
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)


def run(spark: Any, folder: Path, name: str) -> dict[str, Any]:
    query, sink = QUERIES[name], ms.Memory()
    more = 1 if "bids" in query.reads else 10  # of the others, people and auctions are few among all events
    events, span = EPOCHS * PER_EPOCH * more, SPANS.get(name, 600)
    given = Parameters(
        events=events, events_per_second=events, dilation=span, group=30, delayed=10, delay_us=span * 20_000
    )
    expected = Counter(query.expected(given))
    store = str(folder / name)
    killer = Killer(spark.sparkContext.applicationId, store)
    origins = {kind: closed_loop(given, kind, PER_EPOCH * more) for kind in query.reads}
    running = query.build(origins, sink).start(spark, store, slots=2, bins=16, observe=killer.observe)
    running.wait_epoch(EPOCHS - 1, timeout=240)
    running.stop()
    outcome = running.handle(killer.number).outcome
    return {
        "exact": Counter(tuple(row.values()) for row in sink.rows()) == expected,
        "expected": len(expected),
        "killed": len(killer.killed),
        "began": outcome.began if outcome is not None else -1,
        "done": outcome.done if outcome is not None else 0,
        "workers": sorted(running.status().workers),
    }


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[3].split("+")
    spark = ms.session(
        "nexmark-killed",
        master=sys.argv[2],
        settings={
            "spark.ui.enabled": "false",
            "spark.executor.memory": "700m",
            "spark.sql.shuffle.partitions": "2",
            "spark.local.dir": str(folder),
            "spark.sql.session.timeZone": "UTC",
        },
    )
    spark.sparkContext.setLogLevel("OFF")
    results = {}
    for name in names:
        deadline = time.monotonic() + 120
        while len(executors(spark.sparkContext.applicationId)) < 2:  # the one that comes instead of a killed one
            assert time.monotonic() < deadline
            time.sleep(0.1)
        results[name] = run(spark, folder, name)
    print("RESULT " + json.dumps(results), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
