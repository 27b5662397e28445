"""A life of a query with replicas on real executors, in which something is killed, frozen, damaged or full in each
phase of replication and of handover; run as a process by test_replicas_under_fire.py, which lists the cases.

    python under_fire_job.py FOLDER MASTER LIFE CASES

LIFE is one of `LIVES`: how the query is started this time. CASES are joined by `+`; each begins when all executors are
there with their agents, or most of them where it does not matter who is killed, and ends when all records so far are
counted, each once. What happened is appended to
FOLDER/told, a line of JSON for each case, because some cases end this process. The last line that is printed has the
state at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from processes import SINKS, STATES, add_input, events_of
from pyspark.sql import SparkSession
from replicas_job import agents, executors, family, processes

import millstream as ms
from millstream.engine import driver as driver_module
from millstream.engine import replicating
from millstream.engine.replicating import slot_pieces
from millstream.engine.state import read_state
from millstream.store import names
from millstream.store.agent import NAME
from three_levels import EVENTS, GROUPS, Groups, three_levels

T = TypeVar("T")

RATE = 100_000.0
"""Bytes a second that a worker takes from others: an epoch writes about as many, so replication is under way for about
a second after each."""
LIVES: dict[str, dict[str, Any]] = {
    "handover": {"replicas": 1, "replicate_limit": RATE},
    "chain": {"replicas": 2, "replicate_limit": RATE},
    "slow": {"replicas": 9, "replicate_limit": 2000.0},
    "small": {"replicas": 9, "cache_bytes": 20_000},
    "disk": {"replicas": 1},
}
KEYS, ROWS = 2000, 1500
CRAWLING = 100_000
"""Bytes a second that a slow disk writes: about half of what an epoch puts there."""
DROPPED_S = 5
"""After how long Spark drops an executor that is silent."""


class Regrouped(Groups):
    """The same, in other words."""

    def on_batch(self, batch: ms.Batch) -> Any:
        yield from super().on_batch(batch)


class Trap:
    """Kills, once, at a moment of an epoch: `planned`, `executed` or `committed` of the one in which something changes
    hands, or of a modification's first; `catch up`: the commit of one in which a migration was waiting for bytes; or
    `writing`: when one in which origins write through has been executed."""

    def __init__(self, moment: str, of: str, kill: Callable[[], None]) -> None:
        self.moment, self.of, self.kill = moment, of, kill
        self.epoch, self.sprung = -1, False

    def reach(self, moment: str, epoch: int, history: Any, writes: bool) -> None:
        if moment == "planned":
            plan = history.plan
            found = plan.tables if self.of == "migration" else plan.changed is not None
            self.epoch = epoch if found else -1
        waiting = [each for each in history.outcomes.values() if each.state == "running" and each.lacking]
        now = "catch up" if self.moment == "catch up" and moment == "committed" and waiting else moment
        now = "writing" if self.moment == "writing" and moment == "executed" and writes else now
        if not self.sprung and now == self.moment and (epoch == self.epoch or now in ("catch up", "writing")):
            self.sprung = True
            self.kill()


class Life:
    """A query that runs, and what can be done to it."""

    def __init__(self, spark: SparkSession, folder: Path, life: str, workers: int) -> None:
        self.spark, self.folder, self.count = spark, folder, workers
        self.application = spark.sparkContext.applicationId
        self.members = min(LIVES[life]["replicas"], workers - 1)
        self.trap: Trap | None = None
        self.expected: Counter[int] = Counter()
        self.seen = 0
        self.feed()
        frame = spark.readStream.schema(EVENTS["events"]).option("maxFilesPerTrigger", 2).parquet(str(folder / "in"))
        query = three_levels("weak", origin=frame, sinks=[ms.Parquet(str(folder / sink)) for sink in SINKS])
        self.running = query.start(
            spark,
            str(folder / "store"),
            slots=4,
            observe=self._observe,
            cache_dir=str(folder / "caches"),
            **LIVES[life],
        )

    def _observe(self, moment: str, epoch: int) -> None:
        if self.trap is not None:
            driver = self.running._driver
            self.trap.reach(moment, epoch, driver.journal.history, bool(driver.handover._writing))

    # -- what goes in, and what must come out

    def feed(self) -> None:
        """Adds records: an epoch of them, or two."""
        there = len(list((self.folder / "in").glob("*.parquet")))
        add_input(self.folder, random.Random(there), 2, KEYS, ROWS)
        for file in sorted((self.folder / "in").glob("*.parquet"))[self.seen :]:
            self.seen += 1
            for k, _, v in events_of(file):
                self.expected[k % GROUPS] += v

    def counted(self) -> bool:
        """Whether every record so far is in the state of the last commit, once."""
        return dict(self.state("groups", "grand")) == self.expected

    def state(self, step: str, state: str) -> list[list[Any]]:
        """State of the last commit, without Spark."""
        driver = self.running._driver
        chosen = next(each for each in driver.graph.steps if each.name == step)
        rows = read_state(driver.store, chosen, state, driver.journal.history).to_pylist()
        return [list(row.values()) for row in rows]

    def until(self, what: str, over: Callable[[], T], within_s: float = 90) -> T:
        deadline = time.monotonic() + within_s
        while True:
            found = over()
            if found:
                return found
            if not self.running.active:
                self.running.await_termination()
            assert self.running.active, f"ended while waiting: {what}"
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {within_s} s: {what}; {self.running.status()} {self.facts()}")
            time.sleep(0.02)

    def go_on(self) -> None:
        """More records, and all of them are counted."""
        self.feed()
        self.until("all is counted", self.counted)

    def facts(self) -> Any:
        return self.running.replicas()

    # -- who is there

    @property
    def placed(self) -> dict[int, str]:
        return dict(self.running._driver.executor.placer.placed)

    def whole(self) -> bool:
        """Whether all executors are there and have agents, and every slot has as many replicas as it should."""
        facts, there = self.facts(), executors(self.application)
        full = all(len(facts.groups.get(slot, ())) == self.members for slot in self.placed)
        return len(there) == self.count and set(facts.agents) == set(there) and bool(self.placed) and full

    def kill(self, *workers: str) -> None:
        """Kills executors, all at once."""
        known = executors(self.application)
        for worker in workers:
            os.kill(known[worker], signal.SIGKILL)

    # -- replication under way

    def replication(self, party: str, how: str) -> dict[str, Any]:
        """Somebody of a slot's chain dies, or does not answer, while the others lack what was just written."""
        self.feed()
        [slot] = self.until("something is lacking", self._behind)
        facts, placed = self.facts(), self.placed
        chain = dict(zip(("origin", "first", "second"), (placed[slot], *facts.groups[slot]), strict=False))
        worker = chain[party]
        victim = agents(executors(self.application)).get(worker, 0)
        told = {"lacking": facts.lacking[slot]}
        match how:
            case "executor":
                self.kill(worker)
            case "agent":
                os.kill(victim, signal.SIGKILL)
            case "naps":
                os.kill(victim, signal.SIGSTOP)
                time.sleep(1.0)
                os.kill(victim, signal.SIGCONT)
            case "frozen":
                os.kill(victim, signal.SIGSTOP)
                self.go_on()  # no epoch waits for it
                self.until("another agent", lambda: victim not in agents(executors(self.application)).values())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGCONT)
                self.until("it is gone", lambda: not alive([victim]))
        return told

    def _behind(self) -> list[int]:
        """The slot whose replicas lack most, if any lack something."""
        facts = self.facts()
        behind = [slot for slot, lacking in facts.lacking.items() if lacking and slot in self.placed]
        behind = [slot for slot in behind if len(facts.groups.get(slot, ())) == self.members]
        return sorted(behind, key=lambda slot: facts.lacking[slot])[-1:]

    # -- handover under way

    def handover(self, party: str, moment: str) -> dict[str, Any]:
        """State moves to a worker that lacks it; its target, its origin or this driver dies at a moment of that.
        If it was over before such a moment came, more records come, and more moves."""
        origin, target = self._movable()
        known = {"origin": self.placed[origin], "target": self.placed[target]}

        def kill() -> None:
            if party == "driver":
                self.tell({"killed at": moment})
                os.kill(os.getpid(), signal.SIGKILL)
            if party == "agent":
                os.kill(agents(executors(self.application))[known["target"]], signal.SIGKILL)
            else:
                self.kill(known[party])

        trap = self.trap = Trap(moment, "migration", kill)
        handle = self.running.apply(self._plan(origin, target))

        def sprung() -> bool:
            nonlocal handle
            if not trap.sprung and handle.outcome is not None and handle.outcome.over:
                self.feed()
                origin, target = self._movable()
                known.update(origin=self.placed[origin], target=self.placed[target])
                handle = self.running.apply(self._plan(origin, target))
            return trap.sprung

        self.feed()
        self.until("the moment", sprung)
        self.go_on()
        outcome = handle.wait(60)
        assert outcome.state == "done", outcome
        return {}

    def _plan(self, origin: int, target: int) -> Any:
        strategy = ms.AllAtOnce(prepared=True, stall_s=0)
        return self.running.plan_move(slots=origin, share=0.5, to=target, strategy=strategy)

    def _movable(self) -> tuple[int, int]:
        """The largest slot, and one on a worker that has no replica of it; or on any other, if all have one."""
        self.until("slots are on several workers", lambda: len(set(self.placed.values())) > 1)
        sizes = {slot: sum(piece.bytes for piece in pieces) for slot, pieces in self._pieces().items()}
        groups, placed = self.facts().groups, self.placed
        origin = max(placed, key=lambda slot: sizes.get(slot, 0))
        others = [slot for slot in placed if placed[slot] != placed[origin]]
        free = [slot for slot in others if placed[slot] not in groups.get(origin, ())] or others
        return origin, min(free, key=lambda slot: sizes.get(slot, 0))

    def _pieces(self) -> dict[int, list[Any]]:
        return slot_pieces(self.running._driver.journal.history)

    def deadline(self) -> dict[str, Any]:
        """State would move to a worker that cannot catch up: it stays, and the answer says why."""
        origin, target = self._movable()
        strategy = ms.AllAtOnce(prepared=True, stall_s=0, deadline_s=2)
        handle = self.running.apply(self.running.plan_move(slots=origin, share=0.5, to=target, strategy=strategy))
        outcome = handle.wait(60)
        assert (outcome.state, outcome.done) == ("cancelled", 0), outcome
        assert "was not prepared within 2 s" in outcome.reason
        return {"reason": outcome.reason}

    # -- a modification under way

    def modification(self, moment: str) -> dict[str, Any]:
        """An executor dies in the first epoch of a modification, while state moves, too."""
        origin, target = self._movable()
        done = sum(past.verb == "modify" for past in self.running.history())
        trap = self.trap = Trap(moment, "modification", lambda: self.kill(self.placed[origin]))
        handle = self.running.apply(self._plan(origin, target))
        with self.running.modify(wait=False) as change:
            change.replace("groups", (Regrouped, Groups)[done % 2], state=ms.carry())
        self.feed()
        self.until("the moment", lambda: trap.sprung)
        self.go_on()
        assert handle.wait(60).state == "done"
        self.until("the change", lambda: self.running.history()[-1].state in ("committed", "rolled back", "aborted"))
        past = self.running.history()[-1]
        assert past.state == "committed", past
        return {}

    # -- more than one

    def several(self, count: str) -> dict[str, Any]:
        """Executors die at once: two, or all of them."""
        there = sorted(executors(self.application))
        chosen = there if count == "all" else random.Random(self.seen).sample(there, int(count))
        self.feed()
        self.kill(*chosen)
        return {"killed": chosen}

    # -- back from the dead

    def back(self) -> dict[str, Any]:
        """An executor, its Python workers and its agent stand still until Spark has dropped it, and then go on."""
        worker = self.placed[min(self.placed)]
        pid = executors(self.application)[worker]
        frozen = sorted({*family(pid), *agents({worker: pid}).values()})
        for process in frozen:
            os.kill(process, signal.SIGSTOP)
        self.go_on()
        assert worker not in self.running.status().workers
        still = alive(frozen)
        for process in still:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        self.until("all of it is gone", lambda: not alive(frozen))
        return {"frozen": len(frozen), "continued": len(still)}

    # -- disks

    def damaged(self) -> dict[str, Any]:
        """What workers hold of a slot is not what was written, and that slot's own worker dies."""
        self.until("nothing is lacking", lambda: not any(self.facts().lacking.values()))
        placed, groups, pieces = self.placed, self.facts().groups, self._pieces()
        slot = max(placed, key=lambda slot: len(pieces.get(slot, ())))
        damaged = 0
        for holder in groups[slot]:
            own = {piece.segment.name for other in placed if placed[other] == holder for piece in pieces.get(other, ())}
            chosen = {names.base(piece.segment.name) for piece in pieces[slot] if piece.segment.name not in own}
            process = executors(self.application)[holder]
            for child in family(process)[1:]:  # what its Python processes have checked, they rely on
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            for path in self._cache(process).iterdir():
                if path.name.removesuffix(".part") in chosen:
                    damaged += 1
                    with path.open("r+b") as file:
                        file.write(os.urandom(path.stat().st_size))
        epoch = self.running.epoch
        self.kill(placed[slot])
        self.go_on()
        fetched = sum(facts.fetched_bytes for facts in self.running.recent if facts.epoch > epoch)
        assert damaged
        assert fetched
        return {"files": damaged, "fetched": fetched}

    def _cache(self, process: int) -> Path:
        [found] = (self.folder / "caches" / "millstream-cache").glob(f"*/*+{process}+*")
        return found

    def full(self) -> dict[str, Any]:
        """The disk with all caches is full, and an executor dies; then there is room again."""
        place = self.folder / "caches"
        if not place.is_mount():
            return {"skipped": "there is no disk that can be made small"}
        self.until("it is small", lambda: remount(place, used_of(place) + 4096))  # it may be filling up just now
        self.go_on()
        self.go_on()
        why = self.until(
            "somebody says so", lambda: [why for why in self.facts().troubles.values() if "No space" in why]
        )
        self.kill(self.placed[min(self.placed)])
        self.go_on()
        assert remount(place, 256 << 20)
        return {"trouble": why[0]}

    def crawling(self) -> dict[str, Any]:
        """The disk with all caches has become slow, and an executor dies; then it is fast again."""
        group, device = (self.folder / "slow").read_text().split()
        limit = Path(group, "blkio.throttle.write_bps_device")
        limit.write_text(f"{device} {CRAWLING}")
        self.go_on()
        self.go_on()
        self.kill(self.placed[min(self.placed)])
        self.go_on()
        limit.write_text(f"{device} 0")
        return {}

    def tell(self, told: dict[str, Any]) -> None:
        with (self.folder / "told").open("a") as file:
            file.write(json.dumps(told, default=str) + "\n")

    def meet(self, case: str) -> None:
        """A case, from whole to exact."""
        name, *arguments = case.split("/")
        began, epoch = time.monotonic(), self.running.epoch
        needs_all = name in ("replication", "handover", "damaged") and "driver" not in arguments
        self.until("enough are there", self.whole if needs_all else lambda: len(self.facts().agents) > 1)
        ready = time.monotonic()
        self.tell({"begun": case})
        print(case, flush=True)
        told = getattr(self, name)(*arguments)
        self.trap = None
        self.go_on()
        facts = [each for each in self.running.recent if each.epoch > epoch]
        told["attempts"] = max((each.attempts for each in facts), default=0)
        told["longest"] = max((round(each.duration_ms), each.epoch, each.fetched_bytes) for each in facts)
        told["seconds"] = [round(ready - began, 1), round(time.monotonic() - ready, 1)]
        self.tell({"case": case, **told})
        print(case, told, flush=True)


def used_of(place: Path) -> int:
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def remount(place: Path, size: int) -> bool:
    """Makes a disk larger or smaller; whether it could be."""
    command = ["mount", "-o", f"remount,size={size}", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def alive(wanted: Iterable[int]) -> list[int]:
    """Those of processes that have not ended."""
    found = []
    for process in wanted:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(process)
    return found


def main(folder: Path, master: str, life: str, cases: list[str]) -> None:
    replicating.FEW = driver_module.FEW = 0  # every byte counts: there are few
    if (folder / "slow").exists():  # its disk can be made so, for processes of a group
        Path((folder / "slow").read_text().split()[0], "cgroup.procs").write_text(str(os.getpid()))
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.memory": "1g",
        "spark.executor.memory": "600m",
        "spark.executor.cores": "1",
        "spark.executor.extraJavaOptions": os.environ.get("SPARK_SUBMIT_OPTS", ""),
        "spark.executor.heartbeatInterval": "1s",
        "spark.network.timeout": f"{DROPPED_S}s",
        "spark.network.timeoutInterval": "1s",
        "spark.sql.streaming.minBatchesToRetain": "100000",  # the oracle reads which records were whose
    }
    spark = ms.session("under-fire", master=master, settings=settings)
    spark.sparkContext.setLogLevel("OFF")
    found = Life(spark, folder, life, int(master.split("[")[1].split(",")[0]))
    began = time.monotonic()
    found.until("all is counted", found.counted)
    found.until("what was under way is over", lambda: all(each.over for each in found.running.commands()))
    outcomes = [(each.verb, each.state) for each in found.running.commands()]
    found.tell({"life": life, "seconds": round(time.monotonic() - began, 1), "commands": outcomes})
    for case in cases:
        found.meet(case)
    left = agents(executors(found.application)).values()
    found.running.stop()
    deadline = time.monotonic() + 20
    while alive(left) and time.monotonic() < deadline:
        time.sleep(0.1)
    states = [found.state(step, state) for step, state in STATES]
    told = {
        "epoch": found.running.epoch,
        "states": states,
        "left behind": sorted(set(left) & set(processes(NAME.encode()))),
    }
    print("RESULT " + json.dumps(told, default=str), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4].split("+"))
