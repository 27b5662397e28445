"""A query that runs: `status`, `wait_epoch`, `await_termination`, `stop`, `state`, and the verbs that change it.

Rules
-----
- A query stops between two epochs, never inside one; also on Ctrl-C. Whatever stops it, the last commit is intact.
- What went wrong is raised as what it was: the user's step, the damaged object, the driver that took over.
- An older driver may still write into Spark's own logs until it finds itself fenced (G3), and Spark ends whichever of
  the two comes second. So a stream that ends that way is started again if the store is still ours.
- A stream has the sources that it was started with. When others should be read, it is ended between two epochs and
  another one begins, which Spark lets go on where each source is. If Spark cannot read what a modification brings, that
  is aborted, and the stream begins without it.
- Whatever ended a driver that has been replaced, it says that it has been replaced: the rest follows from that.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millstream.control.handle import Handle
from millstream.control.modify import Modify
from millstream.control.overview import HeldBack, held_back
from millstream.control.verbs import Verbs, When, start_of
from millstream.engine.adapting import Decided
from millstream.engine.driver import Driver, EpochFacts, live_slots
from millstream.engine.pending import pending_timers
from millstream.engine.replicating import ReplicaFacts
from millstream.engine.state import check_same_step, chosen_state
from millstream.engine.version import Workshop
from millstream.errors import DamagedObject, Fenced, MillstreamError, UserError
from millstream.model.rewrite import Rewrite
from millstream.model.times import moment
from millstream.protocol.epochs import Epoch, History
from millstream.protocol.modification import Modification
from millstream.protocol.steering import Ask
from millstream.spark.checkpoint import damage_told, query_id, read_offsets
from millstream.spark.frames import state_frame
from millstream.spark.quiet import quiet_stop
from millstream.spark.session import prepared_session
from millstream.spark.sources import Sources, backlog_of, first_lines, only
from millstream.spark.ticker import SOON_S, Ticker
from millstream.store.code import put_code
from millstream.store.journal import Journal, digest_of, history_at

_POLL_S = 0.05
_NOTED_S = 5.0
_RESTARTS = 8  # without an epoch in between
_TWO_WRITERS = ("CONCURRENT_STREAM_LOG_UPDATE", "Multiple streaming jobs detected", "Multiple streaming queries are")
"""How Spark says, in its three logs, that another driver wrote the entry that it was about to write."""

_LOST = (Py4JError, OSError)
"""What calls into a JVM raise that is gone."""

_LOG = logging.getLogger("millstream")


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of a running query. Made by `RunningQuery.status`."""

    name: str
    """The name of the query."""
    active: bool
    """Whether epochs are run."""
    epoch: int
    """The last committed epoch; -1 before the first."""
    slots: int
    """How many slots host the state."""
    workers: dict[str, tuple[int, ...]]
    """The slots that were placed on each worker in the last committed epoch."""
    records: dict[str, int]
    """How many records each step had in the last epoch that this driver ran."""
    epoch_ms: float
    """How long that epoch took, from its plan to its commit."""
    parts_ms: dict[str, float]
    """Its parts: `plan`, `run` and `commit`; of `run`, what the slowest slots needed for `steps`, and for `fetch`."""
    attempts: int
    """How many attempts it took."""
    elsewhere: int
    """How many tasks have run on another worker than they were placed on, in all epochs that this driver ran. They have
    to fetch what that worker lacks, unless it holds a replica."""
    state_bytes: int
    """The size of the state in the store."""
    converting: dict[str, int]
    """Of each state whose type has changed (`step.state`), how many bytes are still to be converted, in the background.
    Until they are, they are converted as they are read."""
    segments: int
    """In how many segments the state lies."""
    compactions: int
    """How many compactions have finished."""
    upkeep_trouble: str | None
    """What went wrong in the last round of upkeep, or None."""
    watermarks: dict[str, datetime | None]
    """The watermark of each source and step with event time."""
    held_back: dict[str, HeldBack]
    """Of each source with partitions: the one that holds it back, and how far it is behind the one that leads."""
    late: dict[str, int]
    """How many late records each step has dropped, or sent to its output `late`. With windows: late for all of them."""
    partly_late: dict[str, int]
    """How many records were late for some of their windows only, of each step with windows that overlap."""
    missed_windows: dict[str, int]
    """How many windows these records, and those that were late for all, missed."""
    dead_letters: dict[str, int]
    """How many records each step has sent to its output `dead_letter`."""
    timers: dict[str, int]
    """About how many timers of each step are pending: counted from the manifest, it errs upwards."""
    passed: dict[str, datetime | None]
    """The watermark that each step with holds has passed on."""
    clock: datetime | None
    """The time in the last epoch's plan."""
    unobserved: dict[str, int] = field(default_factory=dict)
    """How often each kind of observation (samples, loads, displays) has failed. None of them fails an epoch; the log
    says why the first of each kind did."""

    @property
    def lags(self) -> dict[str, timedelta]:
        """How far the watermark of each source and step is behind the clock of the last epoch's plan."""
        now = self.clock
        return {} if now is None else {name: now - mark for name, mark in self.watermarks.items() if mark is not None}

    @property
    def records_per_second(self) -> float:
        """Records of the last epoch over the time from its plan to its commit, all steps added up.

        Delivery, and Spark's own work between two epochs, are not part of that time.
        """
        return sum(self.records.values()) / self.epoch_ms * 1000 if self.epoch_ms else 0.0


class RunningQuery(Verbs):
    """A started query. Made by `Query.start`.

    It runs until it is stopped, or fails; with the trigger available-now, until it has taken what is there. The last
    commit is intact whatever ends it, and `Query.start` on the same store goes on from there.
    """

    def __init__(
        self,
        spark: SparkSession,
        driver: Driver,
        sources: Sources,
        checkpoint: str,
        trigger: dict[str, Any],
        finished: Callable[[], Epoch],
    ) -> None:
        self._spark, self._driver, self._checkpoint = spark, driver, checkpoint
        self._between = threading.Condition()
        self._busy = False
        self._stopping = False
        self._error: BaseException | None = None
        self._query_id: str | None = None
        self._epoch_thread: int | None = None
        self.recent: deque[EpochFacts] = deque(maxlen=1000)
        """Facts of the last epochs this driver ran, up to 1000: records, durations, attempts, bytes fetched."""
        self._elsewhere = 0
        self._sources, self._trigger, self._finished = sources, trigger, finished
        self._prepared, self._ticker = ExitStack(), Ticker()
        self._reading: dict[str, str] = {}
        self._reopening = False
        writer = self._open_sources()
        driver.claim()
        self._delivered = finished()
        self._spark_query = self._start_stream(writer)
        self._watcher = threading.Thread(target=self._watch, name="millstream-watch", daemon=True)
        self._watcher.start()

    def __repr__(self) -> str:
        return f"<RunningQuery {self.name!r}, epoch {self.epoch}, {'active' if self.active else 'stopped'}>"

    # -- inside Spark's stream thread

    def _on_epoch(self, frame: DataFrame, batch_id: int) -> None:
        with self._between:
            if self._stopping or self._reopening:
                raise StoppedBetweenEpochs
            self._busy, self._epoch_thread = True, threading.get_ident()
        try:
            self._prepared.close()
            if self._query_id is None:
                self._query_id = query_id(self._spark, self._checkpoint) or ""
            epoch = Epoch(batch_id)
            before = self._driver.last
            reading = list(self._reading)
            if self._driver.adapter is not None:
                self._driver.backlog = self._backlog()
            offsets = read_offsets(self._spark, self._checkpoint, batch_id)
            self._driver.run_epoch(
                epoch,
                self._query_id,
                digest_of(offsets),
                lambda wanted: only(frame, reading, wanted),
                zlib.compress(offsets),
            )
            if self._driver.last is not None and self._driver.last is not before:
                self.recent.append(self._driver.last)
                self._elsewhere += self._driver.last.elsewhere
            self._delivered = epoch
            if self._reading != {name: called for name, (_, called) in self._driver.reads().items()}:
                self._reopening = True
                ending = (self._spark_query, epoch)
                threading.Thread(target=self._end_stream, args=ending, name="millstream-reopen", daemon=True).start()
        except BaseException as error:
            self._error = self._cause(error)
            raise
        finally:
            with self._between:
                self._busy, self._epoch_thread = False, None
                self._between.notify_all()
            self._hurry()

    def _backlog(self) -> float:
        """What Spark tells of the last epoch's sources. If it cannot, no query fails: there may be no stream yet."""
        try:
            progress = self._spark_query.lastProgress
            return backlog_of(json.loads(progress.json)["sources"]) if progress is not None else 0.0
        except Exception as error:
            _LOG.debug("the backlog is not known: %s", error)
            return 0.0

    # -- beside it

    def _open_sources(self) -> DataStreamWriter:
        """A stream of the sources that should be read now."""
        reads = self._driver.reads()
        frame = self._sources.stream(reads.values(), "availableNow" in self._trigger)
        writer = _writer(frame, self._trigger, self._checkpoint, self._driver.graph.name, self._on_epoch)
        self._reading = {name: called for name, (_, called) in reads.items()}
        self._driver.opened(self._reading)
        return writer

    def _end_stream(self, stream: StreamingQuery, epoch: Epoch) -> None:
        """Ends a stream whose sources are no longer those that should be read; the watcher opens another."""
        try:
            with quiet_stop(self._spark, stream):
                self._stop_stream(stream, epoch)
        except Exception as error:  # Spark, or the way to it, is gone: the watcher sees that, too
            _LOG.debug("could not end the stream: %s", error)

    def _stop_stream(self, stream: StreamingQuery, epoch: Epoch) -> None:
        """Stops a stream once Spark has noted its last epoch, which would be delivered again otherwise."""
        deadline = time.monotonic() + _NOTED_S
        while stream.isActive and self._finished() < epoch and time.monotonic() < deadline:
            time.sleep(_POLL_S / 5)
        stream.stop()

    def _start_stream(self, writer: DataStreamWriter) -> StreamingQuery:
        session, now = self._sources.session, "availableNow" in self._trigger
        self._prepared.enter_context(prepared_session(session, self._checkpoint, now))
        try:
            stream = writer.start()
        except PySparkException as error:
            self._prepared.close()
            raise UserError(f"Spark cannot run the query {self.name!r}: {first_lines(error)}") from error
        if not now:
            self._ticker.follow(stream)
        return stream

    def _hurry(self) -> None:
        """Has the next epoch follow at once while a command is under way, however idle the query is."""
        live = [outcome for outcome in self._driver.journal.history.outcomes.values() if not outcome.over]
        if any(outcome.state == "running" and not outcome.since_ms for outcome in live):
            self._ticker.hurry()
        elif any(outcome.state in ("running", "proposed", "validated") for outcome in live):
            self._ticker.hurry(SOON_S)  # it waits for what is made beside the epochs

    def _watch(self) -> None:
        """Lives as long as the query: waits for the end of Spark's stream, and starts it again where it should be."""
        restarts, epoch = 0, self.epoch
        while True:
            problem = self._stream_ended()
            if self._error is not None or self._stopping or (problem is None and not self._reopening):
                return
            if problem is not None and not self._reopening:
                cause = self._cause(problem)
                if isinstance(cause, Fenced):
                    self._error = cause
                    return
                restarts, epoch = (restarts + 1, epoch) if epoch == self.epoch else (1, self.epoch)
                if restarts <= _RESTARTS and any(text in str(problem) for text in _TWO_WRITERS):
                    _LOG.warning("an older driver wrote into Spark's log at the same time; the stream is started again")
                elif not self._driver.not_opened(f"Spark cannot read its sources: {first_lines(problem)}"):
                    return
            try:
                self._reopen()
            except _LOST:
                return
            except Exception as error:
                self._error = error
                return

    def _stream_ended(self) -> Exception | None:
        """Waits for the end of Spark's stream; what ended it, if it was not a stop."""
        try:
            self._spark_query.awaitTermination()
            return None
        except Exception as problem:  # of Spark, or of the way to its process; `_raise_error` tells the user
            return problem

    def _reopen(self) -> None:
        """Starts another stream, of the sources that should be read now."""
        try:
            writer = self._open_sources()  # which runs users' code, so nobody has to wait for it
        except UserError as error:
            if not self._driver.not_opened(str(error)):
                raise
            writer = self._open_sources()
        with self._between:
            if not self._stopping:
                self._spark_query = self._start_stream(writer)
                self._reopening = False

    def _cause(self, error: BaseException) -> BaseException:
        """What an error comes from: that this driver has been replaced, if it has."""
        try:
            self._driver.journal.check_ours()
        except Fenced as fenced:
            fenced.__cause__ = error
            return fenced
        except Exception as other:
            _LOG.debug("could not look at the journal: %s", other)
        return error

    # -- for users

    @property
    def name(self) -> str:
        """The query's name."""
        return self._driver.graph.name

    @property
    def epoch(self) -> int:
        """The last committed epoch; -1 before the first."""
        return self._driver.journal.history.epoch

    @property
    def active(self) -> bool:
        """Whether epochs are still run."""
        return self._watcher.is_alive()

    def status(self) -> Status:
        """What is known now. Cheap; may be called as often as one likes."""
        history, last = self._driver.journal.history, self._driver.last
        sizes = [segment.bytes for segment in history.manifest.segments()]
        return Status(
            self.name,
            self.active,
            history.epoch,
            len(live_slots(self._driver.tables)),
            dict(history.workers),
            dict(last.records) if last else {},
            last.duration_ms if last else 0.0,
            dict(last.parts_ms) if last else {},
            last.attempts if last else 0,
            self._elsewhere,
            sum(sizes),
            self._driver.modifier.converting(history),
            len(sizes),
            self._driver.upkeep.compactions,
            self._driver.upkeep.trouble,
            {
                **{name: moment(clock.watermark) for name, clock in history.clocks.items()},
                **{name: moment(mark) for name, mark in history.watermarks.items()},
            },
            held_back(history),
            {step: count.records for step, count in history.late.items() if count.records},
            {step: count.partly for step, count in history.late.items() if count.partly},
            {step: count.windows for step, count in history.late.items() if count.windows},
            dict(history.dead_letters),
            pending_timers(self._driver.graph, history),
            {name: moment(mark) for name, mark in history.passed.items()},
            moment(history.clock_ms * 1000) if history.clock_ms else None,
            dict(self._driver.fence.counts),
        )

    def replicas(self) -> ReplicaFacts:
        """Who holds the state of which slots beside their own workers, and how far that is behind."""
        replicator = self._driver.replicator
        return ReplicaFacts() if replicator is None else replicator.facts()

    def decisions(self) -> list[Decided]:
        """What has been decided about the query's load, and why: the last 256 decisions that differ from the one
        before, if it was started with `adapt`."""
        adapter = self._driver.adapter
        return [] if adapter is None else list(adapter.decided)

    def wait_epoch(self, epoch: int, timeout: float | None = None) -> int:
        """Waits until an epoch is committed and delivered; returns the last committed epoch.

        Ctrl-C stops the query between two epochs, and then raises `KeyboardInterrupt`.
        """
        self._refuse_inside("wait_epoch()")
        deadline = None if timeout is None else time.monotonic() + timeout
        with _interrupts() as interrupted, self._between:
            while self._delivered < epoch:
                if interrupted.is_set():
                    break
                if not self.active and not self._busy:
                    self._raise_error()
                    raise UserError(f"the query {self.name!r} ended at epoch {self.epoch}, before epoch {epoch}")
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(
                        f"epoch {epoch} was not reached within {timeout} s; the last commit is {self.epoch}"
                    )
                self._between.wait(_POLL_S)
        if interrupted.is_set():
            self.stop()
            raise KeyboardInterrupt
        return self.epoch

    def await_termination(self, timeout: float | None = None) -> bool:
        """Waits until the query ends, and raises what ended it. Ctrl-C stops it between two epochs, cleanly.

        Returns whether it has ended within the timeout. A second Ctrl-C does not wait for the epoch to end.
        """
        self._refuse_inside("await_termination()")
        deadline = None if timeout is None else time.monotonic() + timeout
        with _interrupts() as interrupted:
            while self.active:
                if interrupted.is_set():
                    self.stop()
                    break
                if deadline is not None and time.monotonic() > deadline:
                    return False
                time.sleep(_POLL_S)
        self._close()
        self._raise_error()
        return True

    def stop(self) -> None:
        """Stops the query after the epoch that is being run. Returns when it has stopped."""
        self._refuse_inside("stop()")
        self._ticker.close()
        with quiet_stop(self._spark, self._spark_query):
            with self._between:
                self._stopping = True
                while self._busy:
                    self._between.wait(_POLL_S)
            try:
                self._stop_stream(self._spark_query, Epoch(self._delivered))
                self._watcher.join()
            finally:
                self._close()

    def state(self, step: str, epoch: int | None = None, state: str | None = None) -> DataFrame:
        """The state of a step as a DataFrame: the key's columns, and the value under the state's name.

        `epoch` may be any retained epoch; the last commit by default. The frame must be read while that epoch is
        retained, or it fails and says so. `state` is needed only where a step declares several. Python objects come
        as pickled bytes, in a column of type binary.
        """
        graph, history = self._driver.graph, self._driver.journal.history
        chosen, name = chosen_state(graph, step, state)
        if epoch is not None and not max(0, history.oldest) <= epoch <= history.epoch:
            raise UserError(f"epoch {epoch} is not retained; epochs {max(0, history.oldest)}..{history.epoch} are")
        if epoch is not None and epoch != history.epoch:
            history = self._history_at(Epoch(epoch))
            check_same_step(chosen, history)
        return state_frame(self._spark, self._driver.modifier.version.spec, chosen, name, history)

    def modify(
        self, *, wait: bool = True, timeout: float | None = None, at: When = None, rehearse: bool = True
    ) -> Modify:
        """A change of the graph, for a `with` block: when it ends, the change is checked, sent, and waited for.

            with running.modify() as change:
                change.insert("dedupe", ms.Dedupe("event_id", within="1 hour"), after="words", before="count")
                change.replace("count", Better, state={"total": ms.carry()})

        All of it takes effect in one epoch, or none of it does. `wait=False` does not wait for that; `timeout` are the
        seconds to wait. `at` is as of plans: an epoch, a datetime, `(EVENT_TIME, datetime)`, or a condition. Before it
        takes effect, the new graph runs over a few records of recent input, on no state, unless `rehearse` is false.
        """
        version, history = self._driver.current()
        start = start_of(at, history)

        def send(rewrite: Rewrite, text: str) -> Handle:
            code = put_code(self._driver.store, self._workshop.pack(rewrite))
            ask = Modification(self._store_id(), history.version, code, text, start, rehearse=rehearse)
            return self._handle(self._sent("modify", ask))

        return Modify(version, self._workshop.build, send, wait, timeout)

    # -- inside

    def _look(self) -> History:
        return self._driver.journal.history

    @property
    def _workshop(self) -> Workshop:
        return self._driver.modifier.workshop

    def _send(self, verb: str, ask: Ask, history: History) -> int:
        number = self._driver.listener.log.send(verb, ask, history.control)
        self._ticker.hurry()
        return number

    def _unheard(self, history: History) -> dict[int, str]:
        return self._driver.listener.log.unheard(history.control)

    def _store_id(self) -> str:
        return self._driver.journal.store_id

    def _may_wait(self) -> None:
        self._refuse_inside("wait()")

    def _ended(self) -> str:
        if self._stopping:
            return f"the query {self.name!r} is being stopped"
        return "" if self.active else f"the query {self.name!r} has ended"

    def _history_at(self, epoch: Epoch) -> History:
        try:
            return history_at(self._driver.store, epoch)
        except DamagedObject:
            oldest = Journal.open(self._driver.store).history.oldest  # another driver may have gone on meanwhile
            if epoch >= oldest:
                raise
            raise UserError(f"epoch {epoch} is no longer retained; epochs from {oldest} on are") from None

    def _refuse_inside(self, call: str) -> None:
        if self._epoch_thread == threading.get_ident():
            raise UserError(
                f"{call} was called from inside an epoch, by a sink's function or an observer: it would wait for "
                "itself. Call it from another thread"
            )

    def _close(self) -> None:
        self._ticker.close()
        with suppress(*_LOST):  # the session may be gone
            self._prepared.close()
        self._driver.close()

    def _raise_error(self) -> None:
        if isinstance(self._error, MillstreamError):
            raise self._error
        if self._error is not None and not isinstance(self._error, StoppedBetweenEpochs):
            raise self._error
        try:
            problem = None if self._stopping else self._spark_query.exception()
        except _LOST as error:
            raise UserError(
                f"the connection to Spark is lost: {type(error).__name__}. Its process has ended, or the session was "
                "stopped under the query. Start the query again: it goes on from its last commit"
            ) from error
        if isinstance(problem, StreamingQueryException):
            text = first_lines(problem)
            raise UserError(f"Spark ended the query {self.name!r}: {text}{damage_told(text)}") from problem


def _writer(
    frame: DataFrame, trigger: dict[str, Any], checkpoint: str, name: str, on_epoch: Callable[[DataFrame, int], None]
) -> DataStreamWriter:
    """Everything that Spark may refuse before it starts, so that a store is not claimed for nothing."""
    writer = frame.writeStream.foreachBatch(on_epoch).option("checkpointLocation", checkpoint).queryName(name)
    try:
        return writer.trigger(**trigger) if trigger else writer
    except (PySparkException, Py4JError) as error:
        raise UserError(f"trigger={trigger!r}: {first_lines(error)}") from error


class StoppedBetweenEpochs(Exception):
    """Ends Spark's stream thread when a stop is asked for just as it begins an epoch. Never reaches users."""


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turns Ctrl-C into an event while it lasts, so that it ends a query between two epochs. A second one raises."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def interrupted(number: int, frame: object) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
