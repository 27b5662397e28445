"""What ends Spark's jobs before they are over: a limit on their time, for code that has never run before; or something
that makes their result useless.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from py4j.protocol import Py4JError
from pyspark import SparkContext

_LOG = logging.getLogger("millstream")

LATE = "late"
LOOK_S = 0.2


@dataclass(slots=True)
class Ended:
    """Why jobs were ended: `LATE`, or what the watch said; empty if they were not."""

    why: str = ""


def _said(watch: Callable[[], str] | None) -> str:
    """What a watch says. That it cannot tell just now is no reason to stop watching."""
    try:
        return watch() if watch is not None else ""
    except Exception as error:
        _LOG.debug("jobs could not be watched: %s", error)
        return ""


@contextmanager
def time_limit(
    sc: SparkContext,
    seconds: float | None,
    watch: Callable[[], str] | None = None,
) -> Iterator[Ended]:
    """Cancels the jobs that this thread starts inside the block if it lasts longer, or as soon as `watch`, which is
    called now and then, says why they should be.

    Spark interrupts the tasks of a stream's jobs when these are cancelled, and ends their Python workers.
    """
    ended = Ended()
    if seconds is None and watch is None:
        yield ended
        return
    tag = f"millstream-{secrets.token_hex(6)}"
    over = threading.Event()
    deadline = None if seconds is None else time.monotonic() + seconds

    def look() -> None:
        while True:
            left = float("inf") if deadline is None else deadline - time.monotonic()
            if over.wait(left if watch is None else max(0.0, min(left, LOOK_S))):
                return
            late = deadline is not None and time.monotonic() >= deadline
            why = LATE if late else _said(watch)
            if why and not over.is_set():
                ended.why = why
                try:
                    sc.cancelJobsWithTag(tag)
                except (Py4JError, OSError) as error:  # the session is gone, and with it the jobs
                    _LOG.debug("jobs are not cancelled: %s", error)
                return

    sc.addJobTag(tag)
    thread = threading.Thread(target=look, name="millstream-watch-jobs", daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        sc.removeJobTag(tag)
