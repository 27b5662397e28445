"""Lines of Spark's log that mean nothing here, or that a stop makes: they are left out.

Rules
-----
- Only messages that are known are left out, each with the reason beside it; the levels of loggers are as they were.
- What a logger cannot be told is left as it is: no query fails for what it logs.
- It is the log of the driver's JVM. Executors have their own, which nobody looks at unless something is wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

MEANINGLESS: tuple[tuple[str, str], ...] = (
    ("Failed to cancel job group .* Cannot find active jobs for it.*", "a stop between two epochs finds no job to end"),
    (
        "Could not report metrics as number leaves in trigger logical plan did not match .*",
        "the ticker is planned away, and every other source reports what it read",
    ),
    (
        "Activating the wrapper implementation of Trigger.AvailableNow for source .RateStreamV2.*",
        "that is the ticker, which has no records",
    ),
    ("Disabling AQE since AQE is not supported in stateful workloads.*", "an epoch's frame has nothing to adapt"),
    (
        "Interrupted while joining on: .*",
        "a stop that comes while Hadoop waits for a program that it has started to set the mode of a file",
    ),
)
"""Messages of Spark as regular expressions, and why each is left out."""

_DENIED: set[int] = set()
"""The JVMs whose log leaves them out, by the identity of their gateway."""

_LOG = logging.getLogger("millstream")


def silence(spark: SparkSession) -> None:
    """Leaves the meaningless messages out of the driver's log, once for each JVM."""
    jvm: Any = spark.sparkContext._jvm
    if id(jvm) in _DENIED:
        return
    _DENIED.add(id(jvm))
    for message, _ in MEANINGLESS:
        _deny(jvm, message)


@contextmanager
def quiet_stop(spark: SparkSession, stream: StreamingQuery) -> Iterator[None]:
    """Leaves out, while it lasts, that a stream ends with an error: that is how it is stopped."""
    try:
        denied = _deny(spark.sparkContext._jvm, f"Query .*runId = {stream.runId}.* terminated with error.*")
    except (Py4JError, OSError):  # Spark is gone
        denied = None
    try:
        yield
    finally:
        if denied is not None:
            try:
                denied[0].removeFilter(denied[1])
            except (Py4JError, OSError) as error:
                _LOG.debug("the filter stays in Spark's log: %s", error)


def _deny(jvm: Any, message: str) -> tuple[Any, Any] | None:
    """Has Spark's log leave out what matches; the root of its loggers and the filter.

    There a filter sees only what is logged; one of the whole configuration would see what is not enabled, too.
    """
    try:
        core = jvm.org.apache.logging.log4j.core
        root = jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration().getRootLogger()
        result = core.Filter.Result
        made = core.filter.RegexFilter.createFilter(f"(?s){message}", None, False, result.DENY, result.NEUTRAL)
        root.addFilter(made)
    except (Py4JError, TypeError, OSError) as error:  # another way to log, or no JVM any more
        _LOG.debug("Spark's log is left as it is: %s", error)
        return None
    return root, made
