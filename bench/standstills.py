"""How long a query stands still, when an executor is killed and when state is handed over, and what it tells of it.

Trials of counts (`bench.recovery_trials`) and of NEXMark's queries (`bench.rhino_trials`) measure with this.

Rules
-----
- The executor with the most slots is killed, with SIGKILL. Recovery lasts from the moment at which Spark no longer
  reports it (looked for every 10 ms) to the next commit of an epoch that had to do without it: one that took a second
  attempt, or began after that moment. How long Spark takes to notice is told apart.
- A handover's stall is the longest time between two commits from the command to its end. It is compared with that of
  quiet time which lasts as long: before the command, but not before the query had settled, and what that is too short
  for after the end, from the second commit on.
- Where time and bytes of a migration went is what the query itself has measured. It tells that an epoch late.
- Facts and commits come from other threads while one looks: they are copied before they are gone through.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from bench.contenders import Found

LACKING = 8 << 20
"""Replicas that lack less are as good as there."""
_TIMES = ("scheduling_s", "preparing_s", "fetching_s", "loading_s")


def ready(running: Any, workers: int, replicated: bool) -> bool:
    """Whether so many workers have slots, and all replicas are there, if there are to be any."""
    if len(running.status().workers) < workers:
        return False
    if not replicated:
        return True
    known = running.replicas()
    return bool(known.groups) and all(known.groups.values()) and sum(known.lacking.values()) < LACKING


# -- kills ------------------------------------------------------------------------------------------------------------


def executors(spark: SparkSession) -> dict[str, int]:
    """The processes of a session's executors."""
    found, application = {}, spark.sparkContext.applicationId.encode()
    for path in Path("/proc").iterdir():
        try:
            words = (path / "cmdline").read_bytes().split(b"\0") if path.name.isdigit() else []
        except OSError:
            continue
        if b"--executor-id" in words and application in words:
            found[words[words.index(b"--executor-id") + 1].decode()] = int(path.name)
    return found


def kill(spark: SparkSession, victim: str) -> tuple[float, float]:
    """Kills an executor; when that was, and when Spark no longer reported it."""
    context: Any = spark.sparkContext._jsc.sc()
    process = executors(spark)[victim]
    killed = time.monotonic()
    os.kill(process, signal.SIGKILL)
    while victim in str(context.getExecutorIds().mkString(",")).split(","):
        time.sleep(0.01)
    return killed, time.monotonic()


def kill_one(
    spark: SparkSession,
    running: Any,
    seen: Mapping[int, Any],
    commits: Mapping[int, float],
    until: Callable[[Callable[[], bool]], None],
    start: float,
) -> Found:
    """Kills the executor with the most slots, and waits until the query has recovered. `seen` are the facts of epochs
    and `commits` when they were committed, both of which `until` keeps up to date while it waits for something."""
    held = running.status().workers
    victim = max(held, key=lambda worker: (len(held[worker]), worker))
    steady = [b - a for a, b in itertools.pairwise(sorted(commits.values())[-8:])]
    killed, detected = kill(spark, victim)

    def without(epoch: int) -> bool:
        facts = seen.get(epoch)
        if facts is None or commits[epoch] <= detected:
            return False
        return facts.attempts > 1 or commits[epoch] - facts.duration_ms / 1000 > detected

    until(lambda: any(map(without, list(commits))))
    epoch = min(filter(without, list(commits)))
    facts, recovered = seen[epoch], commits[epoch]
    return {
        "slots": len(held[victim]),
        "noticed_s": detected - killed,
        "recovery_s": recovered - detected,
        "stall_s": recovered - max(at for at in list(commits.values()) if at < recovered),
        "steady_s": max(steady, default=0.0),
        "attempts": facts.attempts,
        "fetched": facts.fetched_bytes,
        "parts_ms": facts.parts_ms,
        "sources": facts.sources,
        "planned_s": max(0.0, recovered - (facts.duration_ms - facts.parts_ms["plan"]) / 1000 - detected),
        "at": killed - start,
    }


# -- handovers --------------------------------------------------------------------------------------------------------


def missing_s(settled_at: float, asked_at: float, ended: float) -> float:
    """For how long it has to be quiet after a handover, to have been quiet for as long as the handover took."""
    return max(0.0, (ended - asked_at) - (asked_at - settled_at))


def stalls_of(commits: Collection[float], settled_at: float, asked_at: float, ended: float) -> Found:
    """The longest time between two commits of a handover, and of as much quiet time; all are times of one clock.

    >>> stalls_of([0, 60, 61, 62, 64, 67, 69, 70, 72, 90], settled_at=61, asked_at=62.5, ended=67)
    {'stall_s': 3, 'cut_over_s': 3, 'steady_s': 2, 'usual_s': 1.0, 'steady_window_s': 4.5}
    """
    gaps = list(itertools.pairwise(sorted(commits)))
    during = [b - a for a, b in gaps if asked_at < b <= ended]
    before = [(a, b) for a, b in gaps if settled_at <= a and b <= asked_at]
    # Where the time between two commits is longer than a handover took, there is still one to compare it with.
    quiet = [(a, b) for a, b in before if b > 2 * asked_at - ended] or before[-1:]
    window, missing = min(ended - asked_at, asked_at - settled_at), missing_s(settled_at, asked_at, ended)
    again = [b for _, b in gaps if b > ended][1:]
    if missing and again:
        quiet += [(a, b) for a, b in gaps if again[0] <= a and b <= again[0] + missing]
        window += min(missing, again[-1] - again[0])
    return {
        "stall_s": max(during, default=0.0),
        "cut_over_s": next((b - a for a, b in gaps if b == ended), 0.0),
        "steady_s": max((b - a for a, b in quiet), default=0.0),
        "usual_s": float(statistics.median([b - a for a, b in before or quiet] or [0.0])),
        "steady_window_s": window,
    }


def breakdown(running: Any, numbers: Collection[int]) -> Found:
    """What a query tells of where the time and the bytes of some of its migrations went, all together."""
    told = [past.breakdown for past in running.history() if past.number in numbers and past.breakdown is not None]
    if len(told) != len(numbers):
        raise RuntimeError(f"of the migrations {sorted(numbers)} only {len(told)} have told where their time went")
    sources: Counter[str] = Counter()
    for each in told:
        sources.update(each.sources)
    return {**{name: sum(getattr(each, name) for each in told) for name in _TIMES}, "sources": dict(sources)}
