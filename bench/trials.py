"""One trial of the migration benchmark, in a process of its own: state is filled, records flow, and state moves.

A trial goes through the legs of a scenario, once for each strategy:

    half      slots 0..n/2 have given half of their bins to the others; the way back is measured (as in Megaphone)
    rescale   from half as many slots as workers to as many (`grow`), and back (`shrink`)
    drain     everything leaves the worker of slot 0

How it measures
---------------
- Every leg has a Spark session of its own, so that executors and their caches are new: a target has nothing of what it
  is about to get. Before anything is measured, records flow for a while, so that every slot has what it owns.
- A leg is: warm, steady, migration, after. The clock goes on through all of them. `warm` lasts until what piled up
  while workers were starting is done with, or else it would be counted as "steady". What is kept is raw: the records
  and the commit of each epoch, and when each phase began; `bench.migration_report` makes numbers of it.
- `steady` and `after` together last at least as long as the migration: "steady" is judged over an equal time.
- The answer is checked at the end of a trial: the counts in the state add up to the records that were handed over.
- A store that has been filled is kept for later trials (`Trial.bases`), which begin with links to its objects; one of
  more state, or of more bins, goes on from the largest that is there.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import millstream as ms
from bench import workloads
from bench.contenders import Found, progress, serve, shared_settings
from bench.namespaces import Network
from bench.open_loop import Feed
from bench.resident import Sampler
from bench.standalone import standalone

EXECUTOR_MB = 900
CHUNK = 250_000
PER_EPOCH = 4
"""Chunks that an epoch fills state with."""
BYTES_PER_KEY = 24
_WAIT_S = 1800.0
_SETTLE_S = 300.0
_SETTLED_EPOCHS = 6


@dataclass(frozen=True, slots=True)
class Trial:
    """What to run and on how much. `strategies` are names of `STRATEGIES`, in the order in which they are tried."""

    name: str
    label: str
    kind: str
    scenario: str
    strategies: tuple[str, ...]
    bins: int
    batch: int
    rate: float
    state_bytes: int
    workers: int
    fetch_limit: int
    warm_s: float
    hold_s: float
    sweep: str = ""
    """Which sweep it is a point of; empty if none."""
    bases: str = ""
    """Where filled stores are kept for other trials; empty for nowhere."""


STRATEGIES: dict[str, Callable[[Trial], Any]] = {
    "all-at-once": lambda trial: ms.AllAtOnce(prepared=False),
    "fluid": lambda trial: ms.Fluid(prepared=False),
    "batched": lambda trial: ms.Batched(trial.batch, prepared=False),
    "matched": lambda trial: ms.Matched(prepared=False),
    "prepared": lambda trial: ms.Batched(trial.batch, prepared=True),
}
"""All but `prepared` fetch what moves inside the epochs: nothing is at its target before."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A migration that is measured. `before` prepares it, unmeasured, in the session before."""

    name: str
    slots: int
    plan: Callable[[Any, Trial, Any], Any]
    before: Callable[[Any, Trial], Any] | None = None


def legs(trial: Trial) -> list[Leg]:
    """The legs of a trial's scenario."""
    few, many = max(1, trial.workers // 2), trial.workers
    back = Leg("back", many, lambda running, _, by: running.plan_rescale(many, strategy=by), _away)
    grow = Leg("grow", few, lambda running, _, by: running.plan_rescale(many, strategy=by))
    shrink = Leg("shrink", many, lambda running, _, by: running.plan_rescale(few, strategy=by))
    drain = Leg("drain", many, lambda running, _, by: running.plan_drain(_worker_of(running, 0), strategy=by))
    return {"half": [back], "rescale": [grow, shrink], "drain": [drain]}[trial.scenario]


def _away(running: Any, trial: Trial) -> Any:
    """Half of the bins of half of the slots go to the other half: 25 % of the state."""
    half = trial.workers // 2
    low, high = list(range(half)), list(range(half, trial.workers))
    return running.plan_move(slots=low, share=0.5, to=high, strategy=ms.AllAtOnce(prepared=False))


def _worker_of(running: Any, slot: int) -> str:
    return next(str(worker) for worker, held in running.status().workers.items() if slot in held)


class Rig:
    """A store that is gone on with in one session after the other."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        self.trial, self.folder = trial, folder
        self.offset = -1
        self.keys = 0
        self.records = 0
        """How many have been handed over in all."""
        self.steps_done = 0

    @contextmanager
    def session(self) -> Iterator[SparkSession]:
        """A session with new workers."""
        with cluster(self.trial.workers, self.folder) as spark:
            yield spark

    def start(self, spark: SparkSession, feed: Feed, slots: int, observe: Any = None) -> Any:
        query = ms.Query("bench")
        frame = feed.frame(self.keys, CHUNK)
        query.source("records", frame).key_by("k").compute("count", workloads.CountBatch)
        settings, _ = cache_settings(self.trial, self.folder)
        return query.start(
            spark,
            str(self.folder / "store"),
            slots=slots,
            bins=self.trial.bins,
            observe=observe,
            replicas=0,
            **settings,
        )

    def step(self, of: int) -> None:
        """One more step of the trial is done."""
        self.steps_done += 1
        progress(self.steps_done, of)

    def prepare(self, running: Any, leg: Leg) -> None:
        """Brings the query to where a leg begins: its number of slots, evenly, and what it asks for on top."""
        for make in (lambda *_: running.plan_rescale(leg.slots, strategy=ms.AllAtOnce(prepared=False)), leg.before):
            plan = make(running, self.trial) if make is not None else None
            if plan is not None and plan.rounds:
                running.apply(plan).wait(_WAIT_S)

    def fill(self, first: Leg) -> Found:
        """Fills the state with new keys, a few chunks an epoch, up to the wanted size, or goes on with what an earlier
        trial has filled."""
        begun, trial, told = time.monotonic(), self.trial, self._take_base()
        if not told or (told["asked_bytes"], told["bins"]) != (trial.state_bytes, trial.bins):
            told = self._fill_on(first, told)
            self._keep_base(told)
        self.keys = self.records = told["keys"]
        self.offset = told["offset"]
        with self.session() as spark:
            running = self.start(spark, Feed(spark, trial.rate, self.offset), first.slots)
            self.prepare(running, first)
            running.stop()
        return {**told, "seconds": time.monotonic() - begun}

    def _fill_on(self, first: Leg, base: Found) -> Found:
        """Goes on filling; what there is to say of the store then."""
        begun, trial = time.monotonic(), self.trial
        chunks, size, seen = base.get("keys", 0) // CHUNK, base.get("state_bytes", 0), dict[int, Any]()
        already = chunks * CHUNK
        with self.session() as spark:
            feed = Feed(spark, trial.rate, base.get("offset", -1))
            running = self.start(spark, feed, first.slots)
            if base and base["bins"] != trial.bins:
                running.apply(running.plan_bins(trial.bins)).wait(_WAIT_S)
            most = 4 + 2 * trial.state_bytes // (BYTES_PER_KEY * CHUNK)
            while size < trial.state_bytes:
                if chunks > most:
                    raise RuntimeError(f"{chunks * CHUNK} keys take {size} bytes only, of {trial.state_bytes}")
                feed.fill(range(chunks, chunks + PER_EPOCH))
                chunks += PER_EPOCH
                self._until(running, partial(has_counted, running, seen, chunks * CHUNK - already))
                size = running.status().state_bytes
            running.stop()
        full = [facts for facts in seen.values() if facts.records.get("count", 0) == PER_EPOCH * CHUNK]
        per_record = [facts.duration_ms * 1e6 / (PER_EPOCH * CHUNK) for facts in full]
        return {
            "keys": chunks * CHUNK,
            "state_bytes": size,
            "asked_bytes": trial.state_bytes,
            "bins": trial.bins,
            "offset": feed.offset,
            "filled_s": base.get("filled_s", 0.0) + time.monotonic() - begun,
            "epoch_ns_per_record": statistics.median(per_record) if per_record else base["epoch_ns_per_record"],
        }

    def _take_base(self) -> Found:
        """Begins with the largest kept store that is not too large; what is known of it, nothing if there is none."""
        kept = [json.loads(path.read_text()) for path in Path(self.trial.bases or "none").glob("*.json")]
        fits = [
            told for told in kept if told["asked_bytes"] <= self.trial.state_bytes and told["bins"] <= self.trial.bins
        ]
        if not fits:
            return {}
        best = max(fits, key=lambda told: (told["asked_bytes"], told["bins"]))
        _link(Path(self.trial.bases) / _base_name(best), self.folder / "store")
        return dict(best)

    def _keep_base(self, told: Found) -> None:
        if self.trial.bases:
            base = Path(self.trial.bases) / _base_name(told)
            _link(self.folder / "store", base)
            base.with_name(f"{base.name}.json").write_text(json.dumps(told))

    def leg(self, leg: Leg, strategy: str, following: Leg | None) -> Found:
        """Measures a leg, and then prepares the next one."""
        trial, commits = self.trial, {}
        with self.session() as spark:
            feed = Feed(spark, trial.rate, self.offset, self.steps_done)

            def observe(moment: str, epoch: int) -> None:
                if moment == "committed":
                    commits[epoch] = time.monotonic()

            running = self.start(spark, feed, leg.slots, observe)
            first = running.epoch + 1
            feed.begin()
            seen: dict[int, Any] = {}
            with Sampler(feed.start) as sampler:
                self._flow(running, seen, trial.warm_s)
                self._settle(running, seen, lambda: _numbered(_since(seen, first), commits, feed.start), feed.rate)
                steady = feed.now()
                self._flow(running, seen, trial.hold_s)
                status = running.status()
                plan = leg.plan(running, trial, STRATEGIES[strategy](trial))
                applied = feed.now()
                handle = running.apply(plan)
                self._until(running, lambda: _gather(running, seen) and handle.progress().state not in _UNDER_WAY)
                outcome = handle.outcome
                ended = commits[outcome.last] - feed.start
                self._flow(running, seen, max(2.0, ended - applied))
                done = feed.now()
            handed = feed.end()
            self._until(running, lambda: _gather(running, seen) and _counted(seen, first) >= handed)
            self.records += handed
            self.offset = feed.offset
            if following is not None:
                self.prepare(running, following)
            after = running.status()
            running.stop()
        return {
            "leg": leg.name,
            "strategy": strategy,
            "rate": feed.rate,
            "phases": {"warm": 0.0, "steady": steady, "migration": applied, "migrated": ended, "end": done},
            "plan": {
                "text": str(plan), "bytes": plan.bytes, "bins": plan.bins, "rounds": len(plan.rounds),
                "epochs": plan.epochs,
            },
            "outcome": {"began": outcome.began, "last": outcome.last, "done": outcome.done, "state": outcome.state},
            "epochs": _numbered(_since(seen, first), commits, feed.start),
            "memory": sampler.samples,
            "state_bytes": status.state_bytes,
            "segments": [status.segments, after.segments],
            "workers": {worker: list(held) for worker, held in status.workers.items()},
        }  # fmt: skip

    def check(self) -> None:
        """Reads the whole state, and refuses a wrong answer."""
        with self.session() as spark:
            running = self.start(spark, Feed(spark, self.trial.rate, self.offset), self.trial.workers)
            row = running.state("count").selectExpr("count(*)", "sum(total)").collect()[0]
            running.stop()
        if tuple(row) != (self.keys, self.records):
            raise RuntimeError(f"wrong answer: found (keys, records) {tuple(row)}, expected {self.keys, self.records}")

    def _flow(self, running: Any, seen: dict[int, Any], seconds: float) -> None:
        """Lets records flow for a time."""
        until = time.monotonic() + seconds
        self._until(running, lambda: _gather(running, seen) and time.monotonic() >= until)

    def _settle(self, running: Any, seen: dict[int, Any], rows: Callable[[], list[list[Any]]], rate: float) -> None:
        """Waits until records wait for no more than the epoch before theirs, and their own."""
        deadline = time.monotonic() + _SETTLE_S
        while not settled(rows(), rate):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the query did not keep up with {rate:,.0f} records/s within {_SETTLE_S:.0f} s")
            self._flow(running, seen, 0.5)

    @staticmethod
    def _until(running: Any, over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _WAIT_S
        while not over():
            if not running.active:
                running.await_termination()  # raises what ended it
                raise RuntimeError("the query ended by itself")
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing came of it within {_WAIT_S:.0f} s; the last commit is {running.epoch}")
            time.sleep(0.05)


_UNDER_WAY = ("sent", "waiting", "running")


def settled(rows: list[list[Any]], rate: float) -> bool:
    """Whether the last epochs (see `_numbered`) have left nothing of an earlier backlog: the oldest record of an epoch
    has waited for the epoch before and its own, so for twice the time between commits."""
    last = [row for row in rows if row[2] > row[1]][-_SETTLED_EPOCHS - 1 :]
    if len(last) <= _SETTLED_EPOCHS:
        return False
    between = statistics.median(b[4] - a[4] for a, b in itertools.pairwise(last))
    return all(row[4] - row[1] / rate <= 2.5 * between for row in last[1:])


def _base_name(told: Found) -> str:
    return f"{told['asked_bytes']}-{told['bins']}"


def _link(source: Path, target: Path) -> None:
    """A copy, without its bytes if possible: neither a store nor Spark's checkpoint changes a file in place."""

    def link_or_copy(one: str, other: str) -> None:
        try:
            os.link(one, other)
        except OSError:
            shutil.copy2(one, other)

    shutil.copytree(source, target, copy_function=link_or_copy)


def _since(seen: dict[int, Any], first: int) -> list[Any]:
    return [seen[number] for number in sorted(seen) if number >= first]


def has_counted(running: Any, seen: dict[int, Any], records: int) -> bool:
    return _gather(running, seen) and _counted(seen, 0) >= records


def _gather(running: Any, seen: dict[int, Any]) -> bool:
    """Takes the facts of epochs before they are forgotten."""
    for facts in list(running.recent)[-50:]:
        seen.setdefault(facts.epoch, facts)
    return True


def _counted(seen: dict[int, Any], first: int) -> int:
    return sum(facts.records.get("count", 0) for epoch, facts in seen.items() if epoch >= first)


def _numbered(epochs: list[Any], commits: dict[int, float], start: float) -> list[list[Any]]:
    """Of each epoch: number, its first record and the one after its last, when it was planned and committed, how long
    it ran, in ms, and how much its workers fetched."""
    rows, first = [], 0
    for facts in epochs:
        end, committed = first + facts.records.get("count", 0), commits[facts.epoch] - start
        began, run_ms = committed - facts.duration_ms / 1000, facts.parts_ms["run"]
        rows.append([facts.epoch, first, end, began, committed, run_ms, facts.fetched_bytes])
        first = end
    return rows


def cache_settings(trial: Trial, folder: Path) -> tuple[dict[str, Any], str]:
    """What `start` is told of workers' caches, and what to say of it."""
    if "fetch_limit" not in inspect.signature(ms.Query.start).parameters:
        return {}, "none (no worker caches in this version)"
    if not trial.fetch_limit:
        return {"cache_dir": str(folder / "caches")}, "not limited"
    each = max(1, trial.fetch_limit // trial.workers)
    return (
        {"cache_dir": str(folder / "caches"), "fetch_limit": each},
        f"up to {trial.fetch_limit / 1e6:,.0f} MB/s in all, {each / 1e6:,.0f} per worker",
    )


_MEMORY = {"spark.driver.memory": "2g", "spark.executor.memory": f"{EXECUTOR_MB}m"}


@contextmanager
def cluster(
    workers: int, folder: Path, settings: dict[str, str] | None = None, network: bool = False
) -> Iterator[SparkSession]:
    """Executors of one core on this machine. Nothing of them is left when it ends.

    With `network` they belong to a standalone cluster, and each is on a host of its own (see `bench.namespaces`).
    """
    if network:
        with standalone(folder / "cluster", workers, network=_network(), memory=f"{EXECUTOR_MB}m") as hosts:
            own = {**hosts.settings(), **_MEMORY, "spark.decommission.enabled": "false", **(settings or {})}
            with _session(workers, folder, hosts.master, own) as spark:
                yield spark
        return
    with _session(workers, folder, f"local-cluster[{workers},1,{EXECUTOR_MB}]", settings or {}) as spark:
        yield spark


@cache
def _network() -> Network:
    """The hosts of this process."""
    return Network()


@contextmanager
def _session(workers: int, folder: Path, master: str, settings: dict[str, str]) -> Iterator[SparkSession]:
    chosen = {
        **shared_settings(folder),
        **_MEMORY,
        "spark.executor.cores": "1",
        "spark.sql.streaming.numRecentProgressUpdates": "100",
        **settings,
    }
    spark = ms.session("bench", master=master, settings=chosen)
    spark.sparkContext.setLogLevel("ERROR")
    application = spark.sparkContext.applicationId
    try:
        deadline = time.monotonic() + 120
        while _executors(spark) < workers:
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {_executors(spark)} of {workers} executors have come up within 120 s")
            time.sleep(0.1)
        yield spark
    finally:
        spark.stop()
        home = os.environ.get("SPARK_HOME") or str(Path(inspect.getfile(SparkSession)).parents[1])
        shutil.rmtree(Path(home) / "work" / application, ignore_errors=True)


def _executors(spark: SparkSession) -> int:
    context: Any = spark.sparkContext._jsc.sc()
    return int(context.getExecutorIds().size())


def run_millstream(trial: Trial, folder: Path) -> Found:
    """All strategies of a scenario, one after the other, on one store."""
    rig, scenario = Rig(trial, folder), legs(trial)
    sequence = [(leg, strategy) for strategy in trial.strategies for leg in scenario]
    rig.step(of := len(sequence) + 2)
    filled = rig.fill(scenario[0])
    found = []
    for place, (leg, strategy) in enumerate(sequence):
        rig.step(of)
        following = sequence[place + 1][0] if place + 1 < len(sequence) else None
        found.append(rig.leg(leg, strategy, following))
    rig.step(of)
    rig.check()
    return {"filled": filled, "legs": found, "fetch": cache_settings(trial, folder)[1]}


def main() -> None:
    """Runs the trial that the first argument describes, in the current directory."""

    def run() -> Found:
        given = json.loads(sys.argv[1])
        trial = Trial(**{**given, "strategies": tuple(given["strategies"])})
        if trial.kind == "spark":
            from bench.spark_restart import run_spark  # it is made of what is here

            return run_spark(trial, Path.cwd())
        return run_millstream(trial, Path.cwd())

    serve(run)
