"""How many executors there are: more are asked for, some are given back, and some are left out for a while.

Rules
-----
- Spark is told how many executors in all there should be, never how many more: without dynamic allocation it does not
  know how many there are, and would take what it is asked for as the most that it may ever have.
- A standalone cluster without dynamic allocation uses all its workers, as long as it is not told any number. So it is
  told none, unless executors end that it would start again.
- An executor that is given back is decommissioned: it gets no more tasks. Where `spark.decommission.enabled` is set it
  ends by itself, and Spark would start another in its place; so Spark is told to have that many less.
- One that is left out is ended, if the cluster manager reaches it: else tasks would go on asking it for the broadcasts
  that it has. Another executor is let start in its place later, each time after twice as long, or when the query ends:
  the session outlives it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

AGAIN_S = 60.0
"""How long a worker is left out at first."""
MOST_S = 960.0
"""How long at most."""
END_S = 10.0
"""How long it is waited for Spark to forget an executor that is left out; a standalone cluster takes five seconds."""
ALL = (1 << 31) - 1
"""As many executors as there is room for."""

_LOG = logging.getLogger("millstream")


class Population:
    """The executors of a session. `usable` gives those that Spark gives tasks to."""

    def __init__(self, spark: SparkSession, usable: Callable[[], Collection[str]]) -> None:
        self._sc, self._usable = spark.sparkContext, usable
        self._told = False  # whether Spark was told a number for good
        self._less = 0
        self._often = 0
        self._again = -MOST_S
        self._warned = False

    def _set(self, key: str) -> bool:
        return str(self._sc.getConf().get(key, "false")).lower() == "true"

    def _uses_all(self) -> bool:
        """Whether Spark uses all that the cluster has, because it was not told a number."""
        standalone = str(self._sc.master).startswith(("spark://", "local-cluster"))
        return standalone and not self._told and not self._set("spark.dynamicAllocation.enabled")

    def ask(self, total: int) -> int:
        """Asks for so many in all; how many of these are not there yet. To ask for as many once more, while those who
        were asked for are on their way, changes nothing."""
        more = total - len(self._usable())
        if more <= 0:
            return 0
        if self._uses_all():
            self._warn(more, "Spark uses all that this cluster has; a worker that joins it will be used")
            return 0
        try:
            if self._tell(max(total, self._expected())):
                return more
            self._warn(more, "this cluster's scheduler takes no requests")
        except Py4JError as error:
            self._warn(more, str(error).splitlines()[0])
        return 0

    def _warn(self, more: int, why: str) -> None:
        if not self._warned:
            _LOG.warning("%s more workers are needed, but %s", more, why)
        self._warned = True

    def _expected(self) -> int:
        """How many there are, or will be."""
        backend: Any = self._sc._jsc.sc().schedulerBackend()
        numbers = backend.getRequestedTotalExecutors().values().toSeq()
        asked = sum(numbers.apply(i) for i in range(numbers.size()))
        there = len(self._usable())
        return there if asked == ALL else max(asked, there)

    def present(self) -> set[str]:
        """All that Spark knows, whether it gives them tasks or not."""
        ids: Any = self._sc._jsc.sc().getExecutorIds()
        return {ids.apply(i) for i in range(ids.size())}

    def _tell(self, total: int) -> bool:
        context: Any = self._sc._jsc.sc()
        jvm: Any = self._sc._jvm
        nowhere = jvm.PythonUtils.toScalaMap(jvm.java.util.HashMap())
        return bool(context.requestTotalExecutors(max(1, total), 0, nowhere))

    def give_back(self, workers: Collection[str]) -> None:
        """Lets nothing more run on executors, for good. Raises `Py4JError` if the scheduler cannot do that."""
        if self._set("spark.decommission.enabled"):
            self._told = self._tell(self._expected() - len(workers)) or self._told
        self._decommission(workers, "drained by Millstream")

    def leave_out(self, workers: Collection[str]) -> None:
        """Does without executors until later. Others may reach them, or not."""
        context: Any = self._sc._jsc.sc()
        try:
            if self._tell(self._expected() - len(workers)):
                self._less += len(workers)
        except Py4JError as error:
            _LOG.debug("%s", error)  # then others are started at once, and left out, too
        self._decommission(workers, "cut off from others")
        for worker in sorted(workers):
            context.killAndReplaceExecutor(worker)
        deadline = time.monotonic() + END_S
        while set(workers) & self.present() and time.monotonic() < deadline:
            time.sleep(0.1)
        now = time.monotonic()
        self._often = 0 if now > self._again + MOST_S else self._often + 1
        self._again = now + min(MOST_S, AGAIN_S * 2**self._often)

    def try_again(self) -> None:
        """Lets Spark start executors for those that were left out, if it is time."""
        if time.monotonic() >= self._again:
            self.restore()

    def restore(self) -> None:
        """Lets Spark start executors for those that were left out."""
        if not self._less:
            return
        less, self._less = self._less, 0
        try:
            self._tell(ALL if self._uses_all() else self._expected() + less)
        except Py4JError as error:
            _LOG.warning("Spark starts no others for workers that were left out: %s", str(error).splitlines()[0])

    def _decommission(self, workers: Collection[str], why: str) -> None:
        backend: Any = self._sc._jsc.sc().schedulerBackend()
        jvm: Any = self._sc._jvm
        for worker in sorted(workers):
            info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo(why, jvm.scala.Option.apply(None))
            backend.decommissionExecutor(worker, info, False, False)
