"""`millstream nexmark`: runs a NEXMark query on Spark, rescales it on the way, and compares with its batch twin.

Rules
-----
- The stream ends by itself: the last event of each kind states a watermark beyond all times. So the run is over when
  every source's watermark is there, and then every window has closed.
- The verdict does not trust Millstream: Spark computes the same result as a batch, and compares it row by row with what
  lies in the sink. An empty result proves nothing, and is no success.
- A folder that is given is kept, with what the events were made by: going on with other events is refused.
- Whatever Spark's JVM writes while it starts goes to a log, not into the display.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

import millstream as ms
from millstream.control.display import Display, Finding, Progress, open_display
from millstream.errors import UserError
from millstream.nexmark import QUERIES, NexmarkQuery, Parameters
from millstream.nexmark.frames import batches, closed_loop, open_loop
from millstream.nexmark.parameters import END, START
from millstream.protocol.strategies import AllAtOnce, Batched, Fluid, Matched, Paced, Strategy

_POLL_S = 0.05
_SHOWN = 3
"""So many rows that differ are shown."""
_MIGRATION_S = 600.0


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for on the command line."""

    query: str
    events: int
    per_epoch: int = 50_000
    rate: int | None = None
    dilation: int | None = None
    slots: int = 2
    rescales: tuple[tuple[int, int], ...] = ()
    strategy: str = "batched:256"
    store: str | None = None
    master: str = "local[2]"
    verify: bool = True
    as_json: bool = False

    @property
    def parameters(self) -> Parameters:
        """The events. In an open loop event time goes as the clock does, times the dilation."""
        dilation = QUERIES[self.query].dilation if self.dilation is None else self.dilation
        if self.rate is None:
            return Parameters(events=self.events, dilation=dilation)
        return Parameters(events=self.events, events_per_second=self.rate, dilation=dilation)

    @property
    def epochs(self) -> int:
        """How many epochs it takes; in an open loop about one a second."""
        return -(-self.events // (self.per_epoch if self.rate is None else self.rate))


@dataclass(slots=True)
class Rescaling:
    """A rescale on the way: what was asked, and what has become of it."""

    after: int
    slots: int
    handle: Any = None
    moves: str = ""
    began_in: int = -1
    ended_in: int = -1
    before_the_end: bool = False
    """Whether it was over while records still came."""

    @property
    def told(self) -> dict[str, Any]:
        """What is told of it as JSON."""
        names = ("after", "slots", "began_in", "ended_in", "before_the_end")
        return {name: getattr(self, name) for name in names}


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    epochs: int = 0
    seconds: float = 0.0
    slots: int = 0
    late: int = 0
    rows: int = 0
    expected: int | None = None
    """How many rows the twin has; None if it was not asked."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return self.expected is None or (self.expected > 0 and not self.missing and not self.unexpected)


def run_nexmark(asked: Request) -> int:
    """Runs a query; the exit code: 0 if the result is that of the twin, 1 if it is not."""
    folder = Path(asked.store or tempfile.mkdtemp(prefix="millstream-nexmark-")).expanduser().absolute()
    _check_folder(folder, asked)
    query = QUERIES[asked.query]
    out = open(os.devnull, "w") if asked.as_json else sys.stdout  # noqa: SIM115
    display = open_display(f"NEXMark {asked.query}: {query.title}", asked.epochs, out)
    try:
        with _session(asked.master, folder) as spark:
            rescalings = [Rescaling(*each) for each in sorted(asked.rescales)]
            with display:
                outcome = _Run(spark, query, asked, folder, rescalings, display).run()
            _tell(display, asked, outcome, rescalings)
        if asked.as_json:
            print(_as_json(asked, outcome, rescalings), flush=True)
        return 0 if outcome.good else 1
    finally:
        if asked.as_json:
            out.close()
        if asked.store is None:
            shutil.rmtree(folder, ignore_errors=True)


def strategy_of(name: str) -> Strategy:
    """The strategy of a name.

    >>> str(strategy_of("batched:64")), str(strategy_of("fluid"))
    ('Batched(64)', 'Fluid()')
    """
    kind, _, count = name.partition(":")
    if kind == "batched":
        return Batched(int(count))
    return {"all-at-once": AllAtOnce, "fluid": Fluid, "matched": Matched, "paced": Paced}[kind]()


def _check_folder(folder: Path, asked: Request) -> None:
    """Notes what the events are made by, or compares it with what is noted."""
    noted = folder / "nexmark.json"
    wanted = {"query": asked.query, "per_epoch": asked.per_epoch, "rate": asked.rate}
    wanted["parameters"] = dataclasses.asdict(asked.parameters)
    folder.mkdir(parents=True, exist_ok=True)
    if not noted.exists():
        noted.write_text(json.dumps(wanted))
        return
    found = json.loads(noted.read_text())
    if found != wanted:
        differs = [name for name in wanted if found.get(name) != wanted[name]]
        raise UserError(
            f"{folder} is of another run: {', '.join(differs)} differ. Give the same options to go on with it, or "
            "another folder"
        )


@contextmanager
def _session(master: str, folder: Path) -> Iterator[SparkSession]:
    """A Spark session: the one that runs here, else one of its own, which is quiet and ends."""
    active = SparkSession.getActiveSession()
    if active is not None:
        yield active
        return
    with _quiet_start(folder / "spark.log"):
        spark = ms.session(
            "millstream-nexmark",
            master,
            {"spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "4", "spark.driver.memory": "2g"},
        )
    spark.sparkContext.setLogLevel("ERROR")
    logging.getLogger("py4j").setLevel(logging.CRITICAL)  # which tells of every connection that an ending JVM closes
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _quiet_start(log: Path) -> Iterator[None]:
    """Lets what is started here write its errors to a log."""
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


class _Run:
    """One run: what is known while it goes on."""

    def __init__(
        self,
        spark: SparkSession,
        query: NexmarkQuery,
        asked: Request,
        folder: Path,
        rescalings: list[Rescaling],
        display: Display,
    ) -> None:
        self._spark, self._query, self._asked, self._folder = spark, query, asked, folder
        self._rescalings, self._display = rescalings, display
        self._shown, self._events = -1, 0

    def run(self) -> Outcome:
        given, show = self._asked.parameters, self._display.happened
        running = self._start(given)
        began = time.monotonic()
        show(f"{self._asked.events:,d} events, {given.gap_text} of event time; {self._asked.slots} slots")
        try:
            while not self._is_over(running):
                if not running.active:
                    running.await_termination()  # which raises what ended it
                    raise UserError("the query has ended before its events have")
                self._follow(running)
                time.sleep(_POLL_S)
            last = running.epoch
            running.wait_epoch(last)
            self._follow(running)
            seconds = time.monotonic() - began
            show(f"all events are in, and time is over: every window has closed, in epoch {last}")
            self._finish_rescalings(running)
        finally:
            running.stop()
        status = running.status()
        outcome = Outcome(last + 1, seconds, status.slots, sum(status.late.values()))
        self._display.driver("stopped", "dim")
        self._compare(outcome)
        return outcome

    def _start(self, given: Parameters) -> ms.RunningQuery:
        asked, tasks = self._asked, max(1, self._spark.sparkContext.defaultParallelism)
        origins = {
            kind: closed_loop(given, kind, asked.per_epoch, tasks)
            if asked.rate is None
            else open_loop(given, kind, asked.rate, tasks)
            for kind in self._query.reads
        }
        self._display.driver("starting workers", "yellow")
        query = self._query.build(origins, ms.Parquet(str(self._folder / "out")))
        return query.start(self._spark, str(self._folder / "store"), slots=asked.slots)

    def _is_over(self, running: ms.RunningQuery) -> bool:
        marks = running.status().watermarks
        return all(marks.get(kind) == END for kind in self._query.reads)

    def _follow(self, running: ms.RunningQuery) -> None:
        """Shows what has happened since, and rescales when it is time."""
        status = running.status()
        for facts in [facts for facts in list(running.recent) if facts.epoch > self._shown]:
            self._shown = facts.epoch
            before, self._events = self._events, self._events_by(facts.epoch, status)
            speed = (self._events - before) / facts.duration_ms * 1000 if facts.duration_ms else 0.0
            self._display.driver(f"epoch {facts.epoch} committed", "green")
            self._display.progress(
                Progress(
                    facts.epoch,
                    self._events,
                    speed,
                    facts.duration_ms,
                    status.state_bytes,
                    status.segments,
                    status.slots,
                )
            )
        self._look_at_rescalings(running, status.epoch)

    def _events_by(self, epoch: int, status: ms.Status) -> int:
        """How many events were in by an epoch; in an open loop by now, as the watermark says."""
        asked = self._asked
        if asked.rate is None:
            return min(asked.events, (epoch + 1) * asked.per_epoch)
        marks = [status.watermarks.get(kind) or START for kind in self._query.reads]
        reached = (min(marks) - START) / timedelta(seconds=1) * asked.rate / asked.parameters.dilation
        return min(asked.events, int(reached))

    def _look_at_rescalings(self, running: Any, epoch: int) -> None:
        """Begins the next rescale, one at a time, and notes the end of the one that goes on."""
        for each in self._rescalings:
            if each.handle is None and each.ended_in < 0:
                if epoch >= each.after:
                    plan = running.plan_rescale(slots=each.slots, strategy=strategy_of(self._asked.strategy))
                    if not plan.rounds:  # a store that is gone on with may have been rescaled before
                        each.ended_in = epoch
                        self._display.happened(f"epoch {epoch}: there are {each.slots} slots already", "dim")
                        continue
                    each.handle, each.began_in = running.apply(plan), epoch
                    self._display.happened(f"epoch {epoch}: rescale to {each.slots} slots, {plan.strategy}", "yellow")
                return
            if each.ended_in < 0 and each.handle is not None:
                if each.handle.progress().state not in ("done", "refused", "cancelled"):
                    return
                each.handle.wait()  # which raises if it was refused
                each.ended_in, each.before_the_end = epoch, not self._is_over(running)
                self._display.happened(f"epoch {epoch}: there are {running.status().slots} slots now", "bold green")

    def _finish_rescalings(self, running: ms.RunningQuery) -> None:
        """What is left when the events end is carried out all the same, on empty epochs."""
        deadline = time.monotonic() + _MIGRATION_S
        while any(each.ended_in < 0 for each in self._rescalings):
            if time.monotonic() > deadline:
                raise UserError(f"a rescale has not ended within {_MIGRATION_S:.0f} s after the last event")
            if not running.active:
                running.await_termination()
                raise UserError("the query has ended before its rescales have")
            self._follow(running)
            time.sleep(_POLL_S)

    def _compare(self, outcome: Outcome) -> None:
        """Compares what lies in the sink with the twin, as multisets of rows."""
        produced = self._produced()
        outcome.rows = produced.count()
        if not self._asked.verify:
            return
        self._display.driver("stopped; Spark computes the same as a batch", "dim")
        twin = self._query.twin(batches(self._spark, self._asked.parameters)).select(*produced.columns).cache()
        try:
            outcome.expected = twin.count()
            outcome.missing = _texts(twin.exceptAll(produced))
            outcome.unexpected = _texts(produced.exceptAll(twin))
        finally:
            twin.unpersist()

    def _produced(self) -> DataFrame:
        folder = self._folder / "out"
        if any(folder.glob("*.parquet")):
            return self._spark.read.parquet(str(folder))
        return self._spark.createDataFrame([], self._query.output)


def _texts(frame: DataFrame) -> list[str]:
    return [", ".join(f"{name}={value}" for name, value in row.asDict().items()) for row in frame.take(_SHOWN)]


def _tell(display: Display, asked: Request, outcome: Outcome, rescalings: list[Rescaling]) -> None:
    if outcome.expected is None:
        headline = f"{outcome.rows:,d} rows were produced. They were not compared."
    elif not outcome.expected:
        headline = "The result is empty, which proves nothing: give more events."
    elif outcome.good:
        headline = f"OK: all {outcome.rows:,d} rows are those that Spark computes as a batch."
    else:
        headline = "What was produced differs from what Spark computes as a batch."
    findings = [Finding("produced", f"{outcome.rows:,d} rows")]
    if outcome.expected is not None:
        findings.append(Finding("batch twin", f"{outcome.expected:,d} rows", outcome.good))
    findings += [Finding("missing", text, False) for text in outcome.missing]
    findings += [Finding("too many", text, False) for text in outcome.unexpected]
    for each in rescalings:
        when = "while records came" if each.before_the_end else "after the last record"
        findings.append(
            Finding("rescale", f"to {each.slots} slots, epochs {each.began_in} to {each.ended_in}, done {when}")
        )
    findings.append(Finding("late records", str(outcome.late), outcome.late == 0))
    speed = asked.events / outcome.seconds if outcome.seconds else 0.0
    findings.append(
        Finding(
            "altogether",
            f"{outcome.epochs} epochs, {outcome.seconds:.1f} s with the start of workers, {speed:,.0f} events a second",
        )
    )
    display.verdict(outcome.good, headline, findings)


def _as_json(asked: Request, outcome: Outcome, rescalings: list[Rescaling]) -> str:
    told = {
        **dataclasses.asdict(asked),
        **dataclasses.asdict(outcome),
        "parameters": dataclasses.asdict(asked.parameters),
        "rescales": [each.told for each in rescalings],
        "verified": outcome.good if outcome.expected is not None else None,
    }
    return json.dumps(told)
