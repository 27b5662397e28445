"""Attempts and compactions as Spark jobs, each slot on its worker.

Rules
-----
- One job per attempt: route, exchange, host, reports.
- Placement is chosen anew at each attempt from the executors that Spark reports, and is never part of a plan.
- A job that Spark gives up is an `ExecutionFailed`: the attempt is aborted and planned again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from py4j.protocol import Py4JError
from pyspark import RDD
from pyspark.errors import PySparkException
from pyspark.serializers import NoOpSerializer
from pyspark.sql import DataFrame, SparkSession

from millstream.engine.driver import ExecutionFailed, TookTooLong
from millstream.engine.spec import EpochTask, SlotTask
from millstream.protocol.compaction import Job
from millstream.protocol.epochs import Report
from millstream.protocol.manifest import Edit
from millstream.protocol.placement import place
from millstream.spark import tasks
from millstream.spark.exchange import Exchange, Places
from millstream.spark.limits import time_limit
from millstream.spark.session import is_local
from millstream.store.names import Maker


class SparkExecutor:
    """Runs attempts on a Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._exchange = Exchange(spark.sparkContext)
        self._local = is_local(spark)
        self._workers: dict[str, str] = {}
        self._placed: dict[int, str] = {}
        self._known: frozenset[str] = frozenset()

    def execute(
        self, spec: bytes, task: EpochTask, slots: Sequence[SlotTask], records: DataFrame, limit_s: float | None = None
    ) -> tuple[list[Report], int]:
        with time_limit(self._spark.sparkContext, limit_s) as late:
            try:
                return self._run(spec, task, slots, records)
            except ExecutionFailed as error:
                if late.is_set():
                    raise TookTooLong(
                        f"the first epoch of the modification was not over within {limit_s:g} s (modify_timeout)"
                    ) from error
                raise

    def _run(
        self, spec: bytes, task: EpochTask, slots: Sequence[SlotTask], records: DataFrame
    ) -> tuple[list[Report], int]:
        try:
            messages: RDD[bytes] = RDD(
                records._jdf.toArrowBatchRdd().toJavaRDD(), self._spark.sparkContext, NoOpSerializer()
            )
            found, producers = self._exchange.run(
                messages,
                tasks.router(spec, task),
                [tasks.hoster(spec, task, level) for level in range(1, task.depth + 1)],
                [slot.pack() for slot in slots],
                self.places([slot.home for slot in slots]),
            )
        except (Py4JError, PySparkException, OSError) as error:
            raise ExecutionFailed(_reason(error)) from error
        return [report for data in found for report in msgspec.msgpack.decode(data, type=list[Report])], producers

    def compact(self, spec: bytes, jobs: Sequence[tuple[Job, Maker, int]]) -> list[Edit]:
        try:
            found = self._exchange.run_located(
                [msgspec.msgpack.encode(job) for job in jobs],
                tasks.compactor(spec),
                self.places([slot for _, _, slot in jobs]),
            )
        except (Py4JError, PySparkException, OSError) as error:
            raise ExecutionFailed(_reason(error)) from error
        return [msgspec.msgpack.decode(data, type=Edit) for data in found]

    def place(self, slots: Sequence[int], closing: Collection[str], closed: Collection[str]) -> dict[int, str]:
        workers = ["driver"] if self._local else self.workers()
        self._placed = place(slots, workers, self._placed, self._known, closing, closed)
        self._known = frozenset(workers)
        return self._placed

    def places(self, slots: Sequence[int]) -> Places:
        """Where each of these slots should run, as Spark writes it."""
        hosts, placed = self._workers, self._placed
        return tuple(
            (f"executor_{hosts[placed[slot]]}_{placed[slot]}",) if placed.get(slot) in hosts else () for slot in slots
        )

    def workers(self) -> dict[str, str]:
        """The executors that Spark reports now: id and host."""
        context: Any = self._spark.sparkContext._jsc.sc()
        ids = context.getExecutorIds()
        present = {ids.apply(i) for i in range(ids.size())}
        if present != set(self._workers):
            summaries = context.statusStore().executorList(True)
            hosts = {}
            for i in range(summaries.size()):
                summary = summaries.apply(i)
                hosts[summary.id()] = summary.hostPort().rsplit(":", 1)[0]
            self._workers = {worker: hosts[worker] for worker in present if worker in hosts}
        return self._workers


def _reason(error: Exception) -> str:
    """The lines of a Spark failure that tell something."""
    text = str(getattr(error, "java_exception", None) or error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    told = lines if len(lines) <= 16 else [*lines[:6], "...", *lines[-9:]]  # a Python error stands at the end
    return "Spark could not finish the job: " + " | ".join(told)[:2000]
