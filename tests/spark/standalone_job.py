"""A query on a Spark standalone cluster whose workers come and go; run as a process by test_standalone.py.

    python standalone_job.py FOLDER - MODE

Prints one JSON line with what happened.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from processes import SINKS, STATES, add_input, all_delivered
from pyspark.sql import SparkSession
from replicas_job import settled, until

import millstream as ms
from bench.standalone import Standalone, standalone
from millstream.engine import replicating
from millstream.spark import executor, population
from three_levels import EVENTS, three_levels


class Turns:
    """A policy that is another one at times, or none."""

    now: Any = None

    def decide(self, facts: Any, memory: Any) -> tuple[ms.Decision, Any]:
        if self.now is None:
            return ms.Decision("nothing"), memory
        decision, memory = self.now.decide(facts, memory)
        if decision.plan is not None:  # it may not fetch a byte inside an epoch
            decision = replace(decision, plan=replace(decision.plan, budget=0))
        return decision, memory


class Life:
    """One life of one query on a cluster."""

    def __init__(
        self, cluster: Standalone, folder: Path, slots: int, settings: dict[str, str], adapt: Any = False
    ) -> None:
        replicating.FEW = 0  # every byte counts: there are few
        self.cluster, self.folder, self.rng = cluster, folder, random.Random(1)
        both = {**cluster.settings(), **settings}
        self.spark = ms.session("standalone", master=cluster.master, settings=both)
        self.spark.sparkContext.setLogLevel(os.environ.get("MILLSTREAM_TEST_SPARK_LOG", "OFF"))
        self.feed(6)
        frame = self.spark.readStream.schema(EVENTS["events"]).option("maxFilesPerTrigger", 2)
        sinks = [ms.Parquet(str(folder / sink)) for sink in SINKS]
        query = three_levels("weak", origin=frame.parquet(str(folder / "in")), sinks=sinks)
        self.running = query.start(self.spark, str(folder / "store"), slots=slots, adapt=adapt, replicas=1)
        self.told: dict[str, Any] = {}

    def feed(self, files: int = 2) -> None:
        add_input(self.folder, self.rng, files=files)

    def workers(self) -> dict[str, tuple[int, ...]]:
        """The workers that have slots, by the names that the cluster gives them."""
        hosts, names = hosts_of(self.spark), {address: name for name, address in self.cluster.addresses.items()}
        return {names[hosts[worker]]: slots for worker, slots in self.running.status().workers.items()}

    def present(self) -> set[str]:
        """The executors that Spark knows."""
        ids: Any = self.spark.sparkContext._jsc.sc().getExecutorIds()  # type: ignore[union-attr]
        return {ids.apply(i) for i in range(ids.size())}

    def settle(self, count: int) -> None:
        """Waits until so many workers have slots, and replicas of each other's."""
        until(self.running, lambda: len(self.running.status().workers) == count and settled(self.running, count))

    def groups(self) -> dict[int, set[str]]:
        """The workers that hold replicas of each slot."""
        hosts, names = hosts_of(self.spark), {address: name for name, address in self.cluster.addresses.items()}
        found = self.running.replicas().groups
        return {slot: {names[hosts[worker]] for worker in members} for slot, members in found.items()}

    def fetched(self, epoch: int) -> int:
        """How many bytes of state tasks have fetched since an epoch."""
        return sum(facts.fetched_bytes for facts in self.running.recent if facts.epoch > epoch)

    def without(self, name: str) -> bool:
        """Waits until a worker has no slots; whether they are where their replicas were."""
        before, groups = self.workers()[name], self.groups()
        self.feed()
        until(self.running, lambda: name not in self.workers())
        after = {slot: worker for worker, slots in self.workers().items() for slot in slots}
        return all(after[slot] in groups[slot] for slot in before)

    def fullest(self) -> str:
        workers = self.workers()
        return max(workers, key=lambda name: len(workers[name]))

    def end(self) -> None:
        """Takes in what is left, and tells."""
        until(self.running, lambda: all_delivered(self.folder))
        self.running.stop()
        self.told["epoch"] = self.running.epoch
        self.told["attempts"] = max(facts.attempts for facts in self.running.recent)
        self.told["states"] = [
            [list(row) for row in self.running.state(step, state=state).collect()] for step, state in STATES
        ]
        self.spark.stop()
        print("RESULT " + json.dumps(self.told, default=str), flush=True)


def hosts_of(spark: SparkSession) -> dict[str, str]:
    """The host of every executor that has ever been there."""
    summaries: Any = spark.sparkContext._jsc.sc().statusStore().executorList(False)  # type: ignore[union-attr]
    found = [summaries.apply(i) for i in range(summaries.size())]
    return {summary.id(): summary.hostPort().rsplit(":", 1)[0] for summary in found}


def elastic(folder: Path) -> None:
    """A worker joins, slots are added, a worker is told to go, another is killed."""
    with standalone(folder / "cluster", workers=2) as cluster:
        life = Life(cluster, folder, 4, {})
        told, running = life.told, life.running
        life.settle(2)

        epoch, name = running.epoch, cluster.add()
        life.feed()
        life.settle(3)
        told["joined"] = name in life.workers()
        told["fetched by joining"] = life.fetched(epoch)

        epoch = running.epoch
        handle = running.apply(running.plan_rescale(6, strategy=ms.Batched(1024, stall_s=0)))
        told["more slots"] = (handle.wait(120).state, running.status().slots, len(life.workers()))
        told["fetched by more slots"] = life.fetched(epoch)
        life.feed()
        life.settle(3)

        name = life.fullest()
        cluster.decommission(name)
        told["decommissioned"] = life.without(name)
        cluster.end(name)
        life.settle(2)

        name = life.fullest()
        cluster.kill(name)
        told["killed"] = life.without(name)
        life.end()


def allocation(folder: Path) -> None:
    """With dynamic allocation: executors stay while the query needs them. A policy asks for one more, as if there were
    much to do, and another one gives one back."""
    allocated = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "2",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.executorIdleTimeout": "3s",
    }
    with standalone(folder / "cluster", workers=3) as cluster:
        turns = Turns()
        life = Life(cluster, folder, 4, allocated, turns)
        told, running = life.told, life.running
        life.settle(2)
        epoch = running.epoch

        scale = ms.Scale(target=1e-4, high=2e-4, low=1e-5, persist=1, most_workers=3)
        turns.now = ms.Adaptive((scale,), cooldown=1)
        life.feed()
        life.settle(3)
        told["asked for"] = sum(each.decision.more for each in running.decisions())
        told["fetched by one more"] = life.fetched(epoch)

        epoch, first = running.epoch, sorted(running.status().workers)
        turns.now = ms.Adaptive((ms.GiveBack(target=1.0, cover=1.0, persist=1, least_workers=2),), cooldown=1)
        life.feed()
        until(running, lambda: any(each.decision.gives and each.command >= 0 for each in running.decisions()))
        [given] = [each for each in running.decisions() if each.decision.gives and each.command >= 0]
        worker = given.decision.gives
        until(running, lambda: any(each.number == given.command and each.empty_ms for each in running.commands()))
        [outcome] = [each for each in running.commands() if each.number == given.command]
        told["drained"] = (outcome.state, outcome.empty_ms > 0, outcome.reason)
        told["fetched by draining"] = life.fetched(epoch)
        life.feed()
        until(running, lambda: sum(len(cluster.executors(name)) for name in cluster.workers) == 2)
        running.wait_epoch(running.epoch + 3, timeout=120)  # by the ticks of an idle stream
        told["executors"] = sum(len(cluster.executors(name)) for name in cluster.workers)
        told["kept"] = sorted({*first, *life.present()} - {worker}) == sorted(running.status().workers)
        life.end()


def partitions(folder: Path) -> None:
    """A worker is cut off from its peers, and later one from the driver; both come back."""
    executor.STUCK_S, executor.AGAIN_S, population.AGAIN_S = 1.0, 0.5, 2.0
    soon = {
        "spark.executor.heartbeatInterval": "1s",
        "spark.storage.blockManagerHeartbeatTimeoutMs": "8s",
        "spark.network.timeoutInterval": "1s",
        "spark.standalone.executorRemoveDelayOnDisconnection": "1s",
    }
    with standalone(folder / "cluster", workers=3, network=True, daemons={"spark.worker.timeout": "8"}) as cluster:
        life = Life(cluster, folder, 6, soon)
        told = life.told
        life.settle(3)

        name = life.fullest()
        peers = [other for other in cluster.workers if other != name]
        for other in peers:
            cluster.cut(name, other)
        told["cut off from its peers"] = life.without(name)
        life.feed()
        until(life.running, lambda: all_delivered(folder))
        for other in peers:
            cluster.heal(name, other)
        life.feed()
        life.settle(3)  # its executor has ended, and another one has come

        name = life.fullest()
        [dead] = cluster.executors(name)
        cluster.cut(name, "driver")
        told["cut off from the driver"] = life.without(name)
        life.feed()
        until(life.running, lambda: all_delivered(folder) and len(life.present()) == 2)
        told["still there"] = dead in cluster.executors(name)  # Spark has given it up, and it does not know
        cluster.heal(name, "driver")
        life.feed()
        life.settle(3)
        until(life.running, lambda: dead not in cluster.executors(name))
        told["another"] = name in life.workers()
        life.end()


if __name__ == "__main__":
    {"elastic": elastic, "allocation": allocation, "partitions": partitions}[sys.argv[3]](Path(sys.argv[1]))
