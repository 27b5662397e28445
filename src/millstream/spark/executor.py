"""Attempts and compactions as Spark jobs, each slot on its worker.

Rules
-----
- One job per attempt: route, exchange, host, reports.
- Placement is chosen anew at each attempt from the executors that Spark reports, and is never part of a plan. One that
  Spark is about to take away (decommissioning) gets no more tasks from Spark, so it has no more slots either.
- A worker that has been drained is decommissioned, so that Spark runs nothing else there: that is up to this session's
  scheduler alone. Where `spark.decommission.enabled` is set, the executor then ends by itself.
- Where replicas are kept, a task of a lost worker that Spark runs anywhere else gives up instead of fetching its state,
  and the next attempt runs it where a replica is. The job is cancelled only if it is not over soon after the loss:
  Spark interrupts the tasks of cancelled jobs, and with them go their Python workers and what these have mapped.
- Spark learns from its own timeouts that nothing gets through between two executors, which takes minutes, and then runs
  the same tasks there again. So while a job takes long, agents are asked whom they reach, and a worker that is cut off
  (`protocol.reach`) is left out for a while: Spark runs nothing there, and the next attempt does without it.
- A job that Spark gives up is an `ExecutionFailed`: the attempt is aborted and planned again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from py4j.protocol import Py4JError
from pyspark import RDD
from pyspark.errors import PySparkException
from pyspark.serializers import NoOpSerializer
from pyspark.sql import DataFrame, SparkSession

from millstream.engine.driver import ExecutionFailed, TookTooLong, WorkerLost
from millstream.engine.placing import Placer
from millstream.engine.spec import EpochTask, SlotTask
from millstream.protocol.compaction import Job
from millstream.protocol.epochs import Report
from millstream.protocol.manifest import Edit
from millstream.protocol.reach import Link, broken_links, cut_off
from millstream.spark import tasks
from millstream.spark.agents import SparkAgents
from millstream.spark.exchange import Exchange, Places
from millstream.spark.limits import LATE, time_limit
from millstream.spark.population import Population
from millstream.spark.session import is_local
from millstream.store.agent import Settings
from millstream.store.names import Maker

GRACE_S = 0.4
"""How long a job of a lost worker may go on."""
STUCK_S = 10.0
"""How long no task of a job finishes before it is looked whether all workers reach each other, and how often then."""
AGAIN_S = 3.0
"""How long after that it is looked again, if some do not."""

_LOG = logging.getLogger("millstream")


class SparkExecutor:
    """Runs attempts on a Spark session."""

    def __init__(self, spark: SparkSession, settings: Settings | None = None) -> None:
        self._spark = spark
        self._exchange = Exchange(spark.sparkContext)
        self._local = is_local(spark)
        self._workers: dict[str, str] = {}
        self._lost_at = 0.0
        self._look_at = 0.0
        self._finished_before = -1
        self._suspect: frozenset[Link] = frozenset()
        self._cores: dict[str, float] = {}
        self.placer = Placer(lambda: ["driver"] if self._local else self.workers())
        self._leaving: frozenset[str] = frozenset()
        self._population = Population(spark, lambda: self._population.present() - self._decommissioned())
        self.agents: SparkAgents | None = None
        if settings is not None and not self._local:
            self.agents = SparkAgents(self._exchange, self.workers, settings)

    def execute(
        self, spec: bytes, task: EpochTask, slots: Sequence[SlotTask], records: DataFrame, limit_s: float | None = None
    ) -> tuple[list[Report], int]:
        used = {self.placer.placed[slot.home] for slot in slots if slot.home in self.placer.placed}
        replicas = self.placer.replicas
        patient = any(slot.patience < 0 for slot in slots)
        self._population.try_again()
        follow = replicas is not None and replicas.kept and not patient
        self._look_at = time.monotonic() + STUCK_S
        self._finished_before, self._suspect = -1, frozenset()

        def watch() -> str:
            return (self._lost(used) if follow else "") or self._parted()

        watch_it = watch if self.agents is not None else None
        with time_limit(self._spark.sparkContext, limit_s, watch_it) as ended:
            try:
                return self._run(spec, task, slots, records)
            except ExecutionFailed as error:
                if ended.why == LATE:
                    raise TookTooLong(
                        f"the first epoch of the modification was not over within {limit_s:g} s (modify_timeout)"
                    ) from error
                if ended.why:
                    raise WorkerLost(ended.why) from error
                raise

    def _lost(self, used: Collection[str]) -> str:
        """Which of the workers that an attempt uses is gone, as a sentence."""
        gone = sorted(set(used) - self._population.present())
        self._lost_at = (self._lost_at or time.monotonic()) if gone else 0.0
        if not gone or time.monotonic() - self._lost_at < GRACE_S:
            return ""
        return f"worker {gone[0]} is lost; its slots go to where their replicas are"

    def _parted(self) -> str:
        """Which workers are cut off from others, as a sentence; they are left out from now on. Now and then only."""
        if self.agents is None or time.monotonic() < self._look_at:
            return ""
        finished = self._finished()
        if finished != self._finished_before:  # it goes on, if slowly
            self._finished_before, self._suspect = finished, frozenset()
            self._look_at = time.monotonic() + STUCK_S
            return ""
        workers = list(self.workers())
        looked = broken_links(self.agents.reached(), workers) & self.agents.links
        broken, self._suspect = looked & self._suspect, looked
        self._look_at = time.monotonic() + (AGAIN_S if looked and not broken else STUCK_S)
        slots: dict[str, list[int]] = {worker: [] for worker in workers}
        for slot, worker in self.placer.placed.items():
            slots.setdefault(worker, []).append(slot)
        told = []
        for worker in cut_off(broken, slots):
            if len(self.workers()) > 1:
                others = sorted(end for link in broken if worker in link for end in link - {worker})
                try:
                    self._population.leave_out([worker])
                except Py4JError as error:
                    _LOG.warning("worker %s is cut off, and Spark goes on using it: %s", worker, _reason(error))
                    continue
                told.append(f"worker {worker} is left out: nothing gets through to {', '.join(others)}")
        if told:
            _LOG.warning("%s", "; ".join(told))
        return "; ".join(told)

    def _finished(self) -> int:
        """How many tasks of the jobs that run have finished."""
        tracker = self._spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
        return sum(stage.numCompletedTasks for stage in stages if stage is not None)

    def _run(
        self, spec: bytes, task: EpochTask, slots: Sequence[SlotTask], records: DataFrame
    ) -> tuple[list[Report], int]:
        through = {worker for slot in slots for worker in slot.through}
        doors = self.agents.doors(through) if self.agents is not None and through else None
        try:
            messages: RDD[bytes] = RDD(
                records._jdf.toArrowBatchRdd().toJavaRDD(), self._spark.sparkContext, NoOpSerializer()
            )
            found, producers = self._exchange.run(
                messages,
                tasks.router(spec, task),
                [tasks.hoster(spec, task, level, doors) for level in range(1, task.depth + 1)],
                [slot.pack() for slot in slots],
                self.places([slot.home for slot in slots]),
            )
        except (Py4JError, PySparkException, OSError) as error:
            raise ExecutionFailed(_reason(error)) from error
        return [report for data in found for report in msgspec.msgpack.decode(data, type=list[Report])], producers

    def compact(self, spec: bytes, jobs: Sequence[tuple[Job, Maker, int]]) -> list[Edit]:
        if self.agents is not None and len(jobs) == 1:
            job, maker, slot = jobs[0]
            edit = self.agents.compact(self.placer.placed.get(slot, ""), job, maker, slot)
            if edit is not None:
                return [edit]
        try:
            found = self._exchange.run_located(
                [msgspec.msgpack.encode(job) for job in jobs],
                tasks.compactor(spec),
                self.places([slot for _, _, slot in jobs]),
            )
        except (Py4JError, PySparkException, OSError) as error:
            raise ExecutionFailed(_reason(error)) from error
        return [msgspec.msgpack.decode(data, type=Edit) for data in found]

    def places(self, slots: Sequence[int]) -> Places:
        """Where each of these slots should run, as Spark writes it."""
        hosts, placed = self._workers, self.placer.placed
        return tuple(
            (f"executor_{hosts[placed[slot]]}_{placed[slot]}",) if placed.get(slot) in hosts else () for slot in slots
        )

    def retire(self, workers: Collection[str]) -> dict[str, str]:
        others = set(self.workers()) - set(workers)
        context: Any = self._spark.sparkContext._jsc.sc()
        if self._local or not others:
            return dict.fromkeys(workers, "there is no other worker by now, so Spark goes on using it")
        try:
            told = set(workers) & set(self._workers)
            if told:
                self._population.give_back(told)
            running = context.taskScheduler().runningTasksByExecutors()
            busy = {worker for worker in workers if running.contains(worker) and running.apply(worker) > 0}
        except Py4JError:
            why = "it has no slots, but this cluster's scheduler cannot be told to run nothing else there"
            return dict.fromkeys(workers, why)
        return {worker: "" for worker in workers if worker not in busy | told}  # what was just told may be on its way

    def close(self) -> None:
        with suppress(Py4JError, OSError):  # the session may be gone
            self._population.restore()

    def cores(self) -> dict[str, float]:
        if self._local:
            return {"driver": float(self._spark.sparkContext.defaultParallelism)}
        workers = self.workers()
        if self._cores.keys() != workers.keys():
            found = {summary.id(): float(summary.totalCores()) for summary in self._summaries()}
            self._cores = {worker: found.get(worker) or 1.0 for worker in workers}
        return self._cores

    def request(self, total: int) -> int:
        return 0 if self._local else self._population.ask(total)

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
        present = self._population.present()
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
