"""A Spark session that suits Millstream, and the checks that `start` makes of any session.

Rules
-----
- Every setting has its reason beside it. A session that a user built is checked, not changed, but for the two
  settings of `prepared_session`; what cannot work is refused before the first epoch, saying what to set.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyspark
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from millstream.errors import UserError
from millstream.spark.ticker import EVERY_S

SETTINGS: dict[str, tuple[str, str]] = {
    "spark.shuffle.reduceLocality.enabled": (
        "false",
        "only Millstream's placement decides where a slot runs, not where most of its input happens to lie",
    ),
    "spark.locality.wait": (
        "10s",
        "a slot waits for its own worker, where its segments are mapped, before it moves",
    ),
    "spark.python.unix.domain.socket.enabled": (
        "true",
        "roughly halves what it costs to start a Python task (it does not get on with Spark's transformWithState)",
    ),
    "spark.python.daemon.module": (
        "millstream.spark.daemon",
        "Python workers begin with all that tasks need imported: one that was lost costs milliseconds, not a second",
    ),
    "spark.python.worker.reuse": ("true", "mapped segments and unpacked code are cached in Python workers"),
    "spark.shuffle.io.retryWait": (
        "500ms",
        "whoever was reading from an executor when it died finds out at the next try; by default that is after 5 s",
    ),
    "spark.shuffle.io.maxRetries": ("10", "so that one that is alive, and does not answer, is given five seconds"),
    "spark.shuffle.io.connectionCreationTimeout": (
        "10s",
        "and so that ten tries do not last for twenty minutes where nothing comes back at all",
    ),
    "spark.shuffle.compress": (
        "false",
        "payloads are Arrow columns on their way to a neighbour: compressing costs more",
    ),
    "spark.sql.adaptive.enabled": (
        "false",
        "an epoch's frame has nothing to adapt, and re-planning costs time",
    ),
    "spark.sql.execution.arrow.maxRecordsPerBatch": (
        "200000",
        "large Arrow batches: the cost per batch is spread over more records",
    ),
    "spark.executorEnv.MALLOC_MMAP_THRESHOLD_": (
        "67108864",
        "arrays of a few MB come from the heap of a Python worker again and again, instead of fresh pages that the "
        "kernel has to clear each time",
    ),
    "spark.executorEnv.MALLOC_TRIM_THRESHOLD_": ("268435456", "and stay with the worker between two epochs"),
    "spark.ui.showConsoleProgress": ("false", "progress bars of jobs that last milliseconds only flicker"),
}

WORKING_VERSIONS = ("4.3",)
"""The versions of PySpark that queries run on."""

_WORKER_ENV = "spark.executorEnv."
_AVAILABLE_NOW = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"
_FILES = "spark.sql.streaming.checkpointFileManagerClass"
_LOCAL_FILES = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
_LONGEST_SOCKET_FOLDER = 50  # the path of a socket ends at 108 characters, and Spark adds its own


def session(
    name: str = "millstream", master: str | None = None, settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Builds (or finds) a session with the settings that suit Millstream; `settings` come on top.

    Without `master`, Spark's own configuration decides, else `local[*]`. A session whose `master` is given as local
    listens on loopback only.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # else workers run whatever `python3` is on the path
    if master is not None and master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    for key, (value, _) in SETTINGS.items():
        if key.startswith(_WORKER_ENV):  # a local master's workers inherit the driver's environment
            os.environ.setdefault(key.removeprefix(_WORKER_ENV), value)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, (value, _) in SETTINGS.items():
        builder = builder.config(key, value)
    if len(tempfile.gettempdir()) > _LONGEST_SOCKET_FOLDER:
        builder = builder.config("spark.python.unix.domain.socket.enabled", "false")
    for key, value in (settings or {}).items():
        builder = builder.config(key, str(value))
    return builder.getOrCreate()


def check_version(version: str) -> None:
    """Refuses a PySpark that queries do not run on.

    >>> check_version("4.0.1")
    Traceback (most recent call last):
    millstream.errors.UserError: found PySpark 4.0.1; Millstream runs on PySpark 4.3: pip install 'pyspark==4.3.*'
    """
    if not any(version == works or version.startswith(f"{works}.") for works in WORKING_VERSIONS):
        latest = WORKING_VERSIONS[-1]
        raise UserError(
            f"found PySpark {version}; Millstream runs on PySpark {' and '.join(WORKING_VERSIONS)}: "
            f"pip install 'pyspark=={latest}.*'"
        )


def is_local(spark: SparkSession) -> bool:
    """Whether driver and workers are one JVM, so that there is nothing to place."""
    master = str(spark.sparkContext.master)
    return master == "local" or master.startswith("local[")


def check_session(spark: Any) -> SparkSession:
    """Refuses what cannot run a query, with the reason and what to do."""
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UserError(
            "this is a Spark Connect session; Millstream places tasks and carries its own exchange, which Connect "
            "does not offer. Use a classic session: millstream.session(), or SparkSession.builder.master(...)"
        )
    check_version(pyspark.__version__)
    if not isinstance(spark, SparkSession):
        raise UserError(f"found {spark!r}, expected a SparkSession; millstream.session() makes one")
    if spark.sparkContext._jsc is None:
        raise UserError("this Spark session has been stopped; make a new one with millstream.session()")
    if str(spark.conf.get("spark.sql.execution.arrow.useLargeVarTypes", "false")).lower() == "true":
        raise UserError(
            "spark.sql.execution.arrow.useLargeVarTypes is true, expected false; records travel as plain types"
        )
    if not is_local(spark):
        conf = spark.sparkContext.getConf()
        wrong = []
        if conf.get("spark.shuffle.reduceLocality.enabled", "true") != "false":
            wrong.append("spark.shuffle.reduceLocality.enabled is true, expected false")
        if str(conf.get("spark.locality.wait", "3s")).rstrip("smh ") in ("0", ""):
            wrong.append(f"spark.locality.wait is {conf.get('spark.locality.wait')!r}, expected a few seconds")
        if wrong:
            raise UserError(
                "slots could not be kept on their workers with this session: "
                + "; ".join(wrong)
                + ". These settings are static: build the session with millstream.session(), or set them before"
            )
    return spark


def pause_trouble(spark: SparkSession, settings: Mapping[str, str], trigger: Mapping[str, Any]) -> str:
    """What dynamic allocation does to a query whose epochs are far apart: Spark takes executors away in between, and
    with them all that their workers hold. Empty if it does not come to that."""
    allocated = settings.get("spark.dynamicAllocation.enabled", "false").lower() == "true"
    kept = settings.get("spark.dynamicAllocation.minExecutors", "0") not in ("", "0")
    if not allocated or kept or "processingTime" not in trigger:
        return ""
    jvm: Any = spark.sparkContext._jvm
    idle = settings.get("spark.dynamicAllocation.executorIdleTimeout", "60s")
    after_s = jvm.org.apache.spark.network.util.JavaUtils.timeStringAsSec(idle)
    if between_epochs(spark, trigger) < after_s:
        return ""
    return (
        f"epochs are {trigger['processingTime']} apart, and Spark takes executors away that have been idle for {idle} "
        "(spark.dynamicAllocation.executorIdleTimeout): each epoch would begin with workers that hold no state. Set a "
        "longer time, or spark.dynamicAllocation.minExecutors"
    )


def between_epochs(spark: SparkSession, trigger: Mapping[str, Any]) -> float:
    """How many seconds it is from one epoch to the next when there is nothing to do."""
    if "processingTime" not in trigger:
        return EVERY_S
    try:
        jvm: Any = spark.sparkContext._jvm
        interval = jvm.org.apache.spark.sql.streaming.Trigger.ProcessingTime(str(trigger["processingTime"]))
        return max(EVERY_S, float(interval.intervalMs()) / 1000)
    except (Py4JError, PySparkException):  # Spark refuses it, and says why, when the stream begins
        return EVERY_S


_LOCK = threading.Lock()
_BORROWED: dict[tuple[str, str], tuple[str | None, int]] = {}
"""Settings that queries being started have changed: by session and key, the user's value and how many need ours."""


@contextmanager
def prepared_session(spark: SparkSession, checkpoint: str, available_now: bool) -> Iterator[None]:
    """Sets what a streaming query reads from its session, where the user has not; afterwards all is as it was.

    Spark reads them until it begins the first epoch. Several queries may be starting in one session.

    - For available-now: the ticker's source does not know that trigger, and without Spark's wrapper one such source
      makes Spark read the whole backlog of all sources in one epoch, whatever their limits.
    - For a checkpoint on a local disk: Spark's default way to write its logs starts external programs for each file
      where Hadoop has no native library, which costs as much as a small epoch. Neither way is atomic there; which
      driver's epochs count is decided by the journal alone.
    """
    wanted = {_AVAILABLE_NOW: "true"} if available_now else {}
    with _LOCK:
        session = str(spark._jsparkSession.sessionUUID())
        if checkpoint.startswith("file:") and ((session, _FILES) in _BORROWED or spark.conf.get(_FILES, None) is None):
            wanted[_FILES] = _LOCAL_FILES
        for key, value in wanted.items():
            old, users = _BORROWED.get((session, key), (spark.conf.get(key, None), 0))
            _BORROWED[session, key] = (old, users + 1)
            spark.conf.set(key, value)
    try:
        yield
    finally:
        with _LOCK:
            for key in wanted:
                old, users = _BORROWED.pop((session, key))
                if users > 1:
                    _BORROWED[session, key] = (old, users - 1)
                elif old is None:
                    spark.conf.unset(key)
                else:
                    spark.conf.set(key, old)
