"""Attempts and compactions as Spark jobs, each slot on its worker.

Rules
-----
- One job per attempt: route, exchange, host, reports.
- Placement is chosen anew at each attempt from the executors that Spark reports, and is never part of a plan. One that
  Spark is about to take away (decommissioning) gets no more tasks from Spark, so it has no more slots either.
- A worker that has been drained is decommissioned, so that Spark runs nothing else there: that is up to this session's
  scheduler alone. Where `spark.decommission.enabled` is set, the executor then ends by itself.
- A job that Spark gives up is an `ExecutionFailed`: the attempt is aborted and planned again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
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

_LOG = logging.getLogger("millstream")


class SparkExecutor:
    """Runs attempts on a Spark session."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._exchange = Exchange(spark.sparkContext)
        self._local = is_local(spark)
        self._workers: dict[str, str] = {}
        self._placed: dict[int, str] = {}
        self._known: frozenset[str] = frozenset()
        self._leaving: frozenset[str] = frozenset()

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

    def retire(self, workers: Collection[str]) -> dict[str, str]:
        others = set(self.workers()) - set(workers)
        context: Any = self._spark.sparkContext._jsc.sc()
        jvm: Any = self._spark.sparkContext._jvm
        if self._local or not others:
            return dict.fromkeys(workers, "there is no other worker by now, so Spark goes on using it")
        try:
            told = set(workers) & set(self._workers)
            for worker in sorted(told):
                info = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo(
                    "drained by Millstream", jvm.scala.Option.apply(None)
                )
                context.schedulerBackend().decommissionExecutor(worker, info, False, False)
            running = context.taskScheduler().runningTasksByExecutors()
            busy = {worker for worker in workers if running.contains(worker) and running.apply(worker) > 0}
        except Py4JError:
            why = "it has no slots, but this cluster's scheduler cannot be told to run nothing else there"
            return dict.fromkeys(workers, why)
        return {worker: "" for worker in workers if worker not in busy | told}  # what was just told may be on its way

    def _summaries(self) -> Iterator[Any]:
        context: Any = self._spark.sparkContext._jsc.sc()
        summaries = context.statusStore().executorList(True)
        return (summaries.apply(i) for i in range(summaries.size()))

    def _decommissioned(self) -> frozenset[str]:
        """The executors that get no more tasks because they are about to go."""
        if self._local:
            return frozenset()
        context: Any = self._spark.sparkContext._jsc.sc()
        try:
            leaving = context.schedulerBackend().executorsPendingDecommission()
            found = frozenset(filter(None, str(leaving.keysIterator().mkString(",")).split(",")))
        except Py4JError:  # a scheduler that does not decommission, or one that was just changing it
            return self._leaving
        for worker in sorted(found - self._leaving):
            _LOG.info("worker %s is being decommissioned: its slots go to others", worker)
        self._leaving = found
        return found

    def workers(self) -> dict[str, str]:
        """The executors that Spark reports now and gives tasks to: id and host."""
        context: Any = self._spark.sparkContext._jsc.sc()
        ids = context.getExecutorIds()
        present = {ids.apply(i) for i in range(ids.size())}
        present = present - self._decommissioned() or present
        if present != set(self._workers):
            hosts = {summary.id(): summary.hostPort().rsplit(":", 1)[0] for summary in self._summaries()}
            self._workers = {worker: hosts[worker] for worker in present if worker in hosts}
        return self._workers


def _reason(error: Exception) -> str:
    """The lines of a Spark failure that tell something."""
    text = str(getattr(error, "java_exception", None) or error)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("at ")]
    told = lines if len(lines) <= 16 else [*lines[:6], "...", *lines[-9:]]  # a Python error stands at the end
    return "Spark could not finish the job: " + " | ".join(told)[:2000]
