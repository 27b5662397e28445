"""A limit on the time that Spark's jobs may take, for code that has never run before."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from py4j.protocol import Py4JError
from pyspark import SparkContext


@contextmanager
def time_limit(sc: SparkContext, seconds: float | None) -> Iterator[threading.Event]:
    """Cancels the jobs that this thread starts inside the block if it lasts longer; the event then is set.

    Spark ends the Python workers of cancelled tasks that do not end by themselves (`spark.python.task.killTimeout`).
    """
    late = threading.Event()
    if seconds is None:
        yield late
        return
    tag = f"millstream-{secrets.token_hex(6)}"

    def cancel() -> None:
        late.set()
        try:
            sc.cancelJobsWithTag(tag)
        except (Py4JError, OSError):  # the session is gone, and with it the jobs
            return

    timer = threading.Timer(seconds, cancel)
    timer.daemon = True
    sc.addJobTag(tag)
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        sc.removeJobTag(tag)
