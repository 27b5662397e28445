"""One trial of Rhino's experiments, in a process of its own: state is filled, events flow, and the query is changed.

    out      from half as many slots as executors to as many: state goes to executors that had none
    up       from as many slots as executors to twice as many, on the same executors (the paper's section 5.4.1)
    balance  half of the bins of half of the slots have gone to the others, and come back (5.4.2)
    rates    the rate goes up and down in steps; on the way all of one slot goes to the others (5.5)
    kill     an executor is killed, and again, and again (fault tolerance); `bench.recovery` runs these

Variants
--------
- `prepared`: every slot has a replica, and what moves is at its target before the routing table changes.
- `store`: no replicas, and what moves is fetched from the store inside the epoch: the paper's RhinoDFS.
- `adapt`: as `prepared`, but nobody asks for anything: the query balances its own load (`ms.Balance`, also where
  workers have little to do), from the moment on at which the others are given their command.

How it measures
---------------
- One session for the whole trial: executors have in their caches what their slots have written and what replication
  has brought them, as in a cluster that has run for long. A skew is made before there is any state.
- A trial is: fill, warm, steady, change, after. What is kept is raw: when each epoch began and was committed, and which
  ticks of the feed it had; `bench.rhino_report` makes numbers of it.
- With changing rates, the change comes at the same point of a period in every trial, and "steady" is the same part of
  the period before.
- Recovery from a kill, and where the time and the bytes of a change went, is measured as in `bench.standstills`.
- What workers fetch from the store, and what they take from each other, is limited: all of them together, as if they
  shared a wire.
- The answer is checked at the end: every row that was produced, against Spark's own batch SQL.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import millstream as ms
from bench.contenders import Found, progress, serve
from bench.modification_trials import Watched
from bench.rhino_queries import EventFeed, Pace, workload
from bench.standstills import breakdown, kill_one, ready
from bench.trials import cluster, settled
from millstream.control.nexmark_run import strategy_of
from millstream.protocol.adaptation import Decision, Memory
from millstream.protocol.survey import Facts

VARIANTS = ("prepared", "store", "adapt")
_WAIT_S = 900.0
_AT = 0.25
"""Where in a period of changing rates the change comes: halfway up."""
_STEPS = ("start", "fill", "warm", "change", "end", "check")
_FETCHING_S = 60.0
_QUIET_EPOCHS = 5
_ACTS_S = 60.0


@dataclass(frozen=True, slots=True)
class Reconfiguration:
    """What to run and on how much."""

    name: str
    label: str
    kind: str
    query: str
    variant: str
    state_bytes: int
    strategy: str
    bins: int
    rate: float
    workers: int
    limit: int
    """Bytes a second that all workers together may fetch, and may take from each other; 0 for no limit."""
    warm_s: float
    hold_s: float
    levels: int = 1
    step_s: float = 10.0
    kills: int = 1
    network: bool = False
    """Whether workers are on hosts of their own, with wires of 1 Gbit/s, which then limit what they give each other."""

    @property
    def pace(self) -> Pace:
        """How the rate changes."""
        return Pace(self.rate, self.levels, self.step_s)

    @property
    def slots(self) -> int:
        """With how many it begins."""
        return max(1, self.workers // 2) if self.kind == "out" else self.workers

    def plan(self, running: Any) -> Any:
        """What is to be done."""
        strategy = dataclasses.replace(strategy_of(self.strategy), prepared=self.variant != "store")
        if self.kind == "rates":
            return running.plan_move(slots=[0], to=list(range(1, self.workers)), strategy=strategy)
        return running.plan_rescale(self.workers * (2 if self.kind == "up" else 1), strategy=strategy)


class Gate:
    """A policy that does nothing until it is opened."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.is_open = False

    def decide(self, facts: Facts, memory: Memory) -> tuple[Decision, Memory]:
        """Asks the policy, if it may."""
        if not self.is_open:
            return Decision("not yet"), memory
        decided: tuple[Decision, Memory] = self._policy.decide(facts, memory)
        return decided


class Changing(Watched):
    """A running query whose epochs' facts are kept."""

    def __init__(self, spark: Any, feed: EventFeed, asked: Reconfiguration, folder: Path) -> None:
        self.asked, self.facts, self.commits = asked, dict[int, Any](), dict[int, float]()
        self.gate = Gate(ms.Adaptive((ms.Balance(least_busy=0.0),)))
        each = asked.limit / asked.workers or None
        super().__init__(
            spark,
            feed,
            feed.work.build(feed, folder),
            folder,
            slots=asked.slots,
            bins=asked.bins,
            cache_dir=str(folder / "caches"),
            fetch_limit=each,
            replicas=0 if asked.variant == "store" else 1,
            replicate_limit=None if asked.network else each,
            adapt=self.gate if asked.variant == "adapt" else False,
        )

    def until(self, over: Callable[[], bool]) -> None:
        """Waits, and takes the facts of epochs before they are forgotten."""

        def gathered() -> bool:
            for facts in list(self.running.recent)[-50:]:
                self.facts.setdefault(facts.epoch, facts)
            return over()

        super().until(gathered)

    def _observe(self, moment: str, epoch: int) -> None:
        super()._observe(moment, epoch)
        if moment == "committed":
            self.commits[epoch] = time.monotonic()

    def rest(self) -> None:
        """Lets events flow until all workers have slots again, all replicas are there, and the query has settled."""
        self.flow(self.asked.warm_s)
        workers = self.asked.workers if self.asked.kind == "kill" else 1
        self.until(lambda: ready(self.running, workers, self.asked.variant != "store"))
        self.until(lambda: settled(self.rows(), self.feed.rate))

    def fetched_all(self, last: int) -> None:
        """Waits until some epochs after the last one of a change have fetched nothing: what a slot did not have comes
        when a record asks for it."""
        deadline = self.feed.now() + _FETCHING_S

        def over() -> bool:
            later = [row[6] for row in self.rows() if row[0] > last and row[0] in self.facts][-_QUIET_EPOCHS:]
            return self.feed.now() > deadline or (len(later) == _QUIET_EPOCHS and not any(later))

        self.until(over)

    def rows(self) -> list[list[Any]]:
        """The epochs with records: number, first tick and the one after the last, when planned and committed, how long
        the workers' part took, in ms, and how much they fetched."""
        found = []
        for epoch, first, end, planned, committed, took, _ in self.epochs:
            if end > first:
                known = self.facts.get(epoch)
                run_ms, fetched = (known.parts_ms.get("run", took), known.fetched_bytes) if known else (took, 0)
                found.append([epoch, first, end, planned, committed, run_ms, fetched])
        return found

    def committed_s(self, epoch: int) -> float:
        """When an epoch was committed."""
        return float(next(row[4] for row in self.epochs if row[0] == epoch))


def run(asked: Reconfiguration, folder: Path) -> Found:
    """Goes through a trial."""
    work = workload(asked.query, asked.state_bytes, asked.rate)
    times = [time.monotonic()]

    def step() -> None:
        times.append(time.monotonic())
        progress(len(times) - 1, len(_STEPS))

    with cluster(asked.workers, folder, network=asked.network) as spark:
        feed = EventFeed(spark, work, asked.pace)
        watched = Changing(spark, feed, asked, folder)
        running = watched.running
        if asked.kind == "balance":
            _skew(watched)
        step()
        feed.fill_all(lambda offset: watched.until(lambda: watched.offset >= offset))
        step()
        watched.epochs.clear()
        feed.begin()
        watched.rest()
        step()
        found = _kills(watched) if asked.kind == "kill" else _leg(watched)
        step()
        ticks = feed.end()
        watched.until(lambda: watched.epochs[-1][2] >= ticks)
        found |= {"epochs": watched.rows(), "rate": feed.rate}
        feed.close()
        watched.until(lambda: watched.offset >= feed.offset)
        running.wait_epoch(running.epoch, _WAIT_S)
        running.stop()
        step()
        rows = work.check(spark, feed, folder)
        step()
    took = {name: end - begun for name, (begun, end) in zip(_STEPS, itertools.pairwise(times), strict=True)}
    measured = found if asked.kind == "kill" else {"legs": [found]}
    return {**measured, "events": feed.position, "filled": work.fill, "rows": rows, "took_s": took}


def _skew(watched: Changing) -> None:
    """Half of the bins of half of the slots go to the others, before there is any state."""
    running, workers = watched.running, watched.asked.workers
    watched.until(lambda: running.epoch >= 0)
    half = workers // 2
    low, high = list(range(half)), list(range(half, workers))
    plan = running.plan_move(slots=low, share=0.5, to=high, strategy=ms.AllAtOnce(prepared=False))
    running.apply(plan).wait(_WAIT_S)


def _kills(watched: Changing) -> Found:
    """Kills executors while events flow."""
    kills = []
    for turn in range(watched.asked.kills):
        if turn:
            watched.rest()
        watched.flow(watched.asked.hold_s)
        facts, start = watched.facts, watched.feed.start
        kills.append(kill_one(watched.spark, watched.running, facts, watched.commits, watched.until, start))
    watched.flow(watched.asked.hold_s)
    return {"kills": kills}


def _leg(watched: Changing) -> Found:
    """Measures the change."""
    asked, feed, running = watched.asked, watched.feed, watched.running
    period, steady = asked.pace.period_s, feed.now()
    watched.flow(asked.hold_s)
    if period:
        watched.flow(max(0.0, period - asked.hold_s))
        watched.flow((_AT * period - feed.now()) % period)
    state_bytes = running.status().state_bytes
    text = "the query balances its own load"
    epoch, began_s = running.epoch, feed.now()
    if asked.variant == "adapt":
        outcomes = _adapted(watched)
    else:
        plan = asked.plan(running)
        text, began_s = str(plan), feed.now()
        handle = running.apply(plan)
        watched.until(lambda: handle.outcome is not None and handle.outcome.over)
        outcomes = [handle.wait(_WAIT_S)]
    if any(outcome.state != "done" for outcome in outcomes):
        raise RuntimeError(f"the change is {outcomes[-1].state}: {outcomes[-1].reason}")
    last = max(outcome.last for outcome in outcomes)
    watched.until(lambda: any(row[0] == last for row in watched.epochs))
    ended_s = watched.committed_s(last)
    watched.fetched_all(last)
    watched.flow(max(period, asked.hold_s, ended_s - began_s))
    rows = watched.rows()
    return {
        "leg": asked.kind,
        "strategy": asked.variant,
        "phases": {
            "steady": steady,
            "migration": began_s,
            "migrated": ended_s,
            "end": feed.now(),
            "fetched": max([row[4] for row in rows if row[0] > last and row[6]], default=ended_s),
        },
        "plan": {
            "text": text,
            "bytes": sum(outcome.bytes for outcome in outcomes),
            "rounds": sum(outcome.rounds for outcome in outcomes),
            "epochs": last - epoch,
        },
        "breakdown": breakdown(running, [outcome.number for outcome in outcomes]),
        "later_bytes": sum(row[6] for row in rows if row[0] > last),
        "period_s": period,
        "memory": [],
        "state_bytes": state_bytes,
    }


def _adapted(watched: Changing) -> list[Any]:
    """Lets the query balance itself, until it has had nothing more to do for a while; what became of its commands."""
    running = watched.running
    watched.gate.is_open = True

    def commands() -> list[int]:
        return [decided.command for decided in running.decisions() if decided.command >= 0]

    deadline = time.monotonic() + _ACTS_S
    watched.until(lambda: bool(commands()) or time.monotonic() > deadline)
    if not commands():
        told = "; ".join(str(decided) for decided in list(running.decisions())[-3:])
        raise RuntimeError(f"nothing was decided within {_ACTS_S:.0f} s: {told}")
    known = -1
    while len(commands()) != known:
        known = len(commands())
        for number in commands():
            handle = running.handle(number)
            watched.until(lambda handle=handle: handle.outcome is not None and handle.outcome.over)
        watched.flow(watched.asked.hold_s)
    return [running.handle(number).wait(_WAIT_S) for number in commands()]


def main() -> None:
    """Runs the trial that the first argument describes, in the current directory."""
    serve(lambda: run(Reconfiguration(**json.loads(sys.argv[1])), Path.cwd()))
