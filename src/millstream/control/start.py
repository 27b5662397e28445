"""Starting a query: everything is checked before the first epoch.

Rules
-----
- Checks come in the order of what they cost: the graph, the session, the store, the journal, Spark's checkpoint, the
  workers. Nothing is written before the graph and the session have been found good.
- The store is claimed last, so a start that is refused leaves a running driver alone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from millstream.control.running import RunningQuery
from millstream.control.workshop import SparkWorkshop
from millstream.engine.driver import Driver, Observer, Options
from millstream.errors import UserError
from millstream.model.graph import resolve
from millstream.model.query import Query as QueryData
from millstream.protocol.adaptation import Adaptive, Policy
from millstream.protocol.compaction import DEFAULT_BUDGET
from millstream.protocol.epochs import check_start
from millstream.protocol.keyspace import DEFAULT_BIN_BITS
from millstream.spark.checkpoint import last_finished, mend, query_id
from millstream.spark.executor import SparkExecutor
from millstream.spark.quiet import silence
from millstream.spark.session import between_epochs, check_session, pause_trouble
from millstream.spark.sinks import SparkDeliverer
from millstream.spark.sources import Sources
from millstream.store.agent import Settings
from millstream.store.cache import DEFAULT_CACHE_BYTES, CacheSettings
from millstream.store.journal import Journal
from millstream.store.objects import ObjectStore, open_store

_LOG = logging.getLogger("millstream")

_EVOLUTION = {
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "true",
    "spark.sql.streaming.offsetLog.formatVersion": "2",
}


class Query(QueryData):
    """A named graph of sources, steps and sinks. Build it, look at it, and start it on Spark.

    >>> import millstream as ms
    >>> class Count(ms.Computation):
    ...     total = ms.Value("long", default=0)
    ...     output = "word string, total long"
    ...
    ...     def on_record(self, row, at):
    ...         self.total.set(self.total.get() + 1)
    ...         yield at.key, self.total.get()
    >>> query = ms.Query("wordcount")
    >>> words = query.source("words", lambda read: read.text("texts"))
    >>> counts = words.key_by("value").compute("count", Count).sink("totals", ms.Parquet("totals"))
    >>> query
    Query('wordcount'): words -> count, count -> [totals]
    """

    def start(
        self,
        spark: SparkSession,
        store: str,
        *,
        slots: int = 2,
        bins: int = 1 << DEFAULT_BIN_BITS,
        trigger: Mapping[str, Any] | None = None,
        checkpoint: str | None = None,
        store_options: Mapping[str, str] | None = None,
        retain: int = 8,
        compaction_budget: int = DEFAULT_BUDGET,
        cache_dir: str | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        fetch_limit: float | None = None,
        replicas: int | None = None,
        replicate_limit: float | None = None,
        replica_placement: str = "size",
        adapt: bool | Policy = False,
        adapt_dry_run: bool = False,
        token: str | None = None,
        modify_timeout: float = 60.0,
        observe: Observer | None = None,
    ) -> RunningQuery:
        """Starts the query on a store, or goes on where the store's last commit is. Everything is checked first.

        - `store`: a directory, or an `s3://`, `gs://` or `az://` URI; `store_options` go to obstore.
        - `slots`: how many parallel instances at first; a restart keeps what the store says.
        - `bins`: the granularity of later moves, a power of two; it costs nothing.
        - `trigger`: as Spark's: `{"processingTime": "5 seconds"}`, `{"availableNow": True}`; without it, epochs
          follow each other as long as there is data.
        - `checkpoint`: where Spark keeps its own offsets; beside a local store by default.
        - `retain`: how many past epochs of state stay readable.
        - `compaction_budget`: how many bytes one compaction may read; more is quicker overall, less is smoother.
        - `cache_dir`: below which directory each worker keeps the state it reads and writes; by default the first of
          Spark's local directories.
        - `cache_bytes`: how many bytes of it each worker keeps; what the store has on the same disk does not count.
        - `fetch_limit`: how many bytes a second each worker may fetch from the store; not limited by default.
        - `replicas`: on how many other workers the state of each slot is held, too, so that a slot whose worker is lost
          goes on at once; 0 for none. By default one as soon as workers are on two hosts, and none before: on one host
          they cost throughput and protect from little. The store has all state in any case.
        - `replicate_limit`: how many bytes a second each worker may take from others; not limited by default.
        - `replica_placement`: where replicas lie: `"size"` fills workers evenly; `"load"` moves them to workers whose
          load falls when that of the slot rises, so that load which has to go finds its state where there is room.
        - `adapt`: whether the query balances its own load, and with which policy; True for `Adaptive()`. What it
          decides is sent as commands, and told by `RunningQuery.decisions`; with `adapt_dry_run` it is only told.
        - `token`: guards the store: from then on, commands to the running query need it, and so does a restart.
        - `modify_timeout`: how many seconds a modification may take to be tried out on workers, and its first epoch.
        - `observe`: called with a moment (`planned`, `executed`, `committed`, `delivering`, `delivered`) and the epoch.
        """
        cache = _cache(cache_dir, cache_bytes, fetch_limit)
        if not isinstance(modify_timeout, int | float) or not modify_timeout > 0:
            raise UserError(f"modify_timeout={modify_timeout!r}: give a number of seconds above 0")
        options = replace(
            _options(slots, bins, retain, compaction_budget, token),
            fetch_limit=int(fetch_limit or 0),
            modify_timeout=float(modify_timeout),
            replicas=_replicas(replicas),
            by_load=_by_load(replica_placement),
            adapt=_policy(adapt),
            adapt_dry_run=bool(adapt_dry_run),
        )
        chosen = _trigger(trigger)
        check_session(spark)
        silence(spark)
        options = replace(options, beat_s=between_epochs(spark, chosen))
        if trouble := pause_trouble(spark, dict(spark.sparkContext.getConf().getAll()), chosen):
            _LOG.warning("%s", trouble)
        users = spark
        _refuse_twice(spark, self.name)
        named = all(callable(node.origin) and not isinstance(node.origin, DataFrame) for node in self.sources.values())
        if named:
            spark = _cloned(spark)
            for key, value in _EVOLUTION.items():
                spark.conf.set(key, value)
        sources = Sources(spark, named)
        resolve(self, sources.schemas(self.sources.values()))  # before the store is touched
        opened = _open(store, store_options)
        place = _checkpoint_place(opened, checkpoint)
        finished = last_finished(spark, place)
        journal = Journal.open(opened)
        mend(spark, place, journal.history)
        workshop = SparkWorkshop(
            spark, opened, journal.store_id, store_options or {}, cache, sources, float(modify_timeout)
        )
        version = workshop.build(self)
        peers = Settings(
            "", "", journal.store_id, opened.uri, dict(store_options or {}), cache, limit=_rate(replicate_limit)
        )
        executor, deliverer = SparkExecutor(spark, peers), SparkDeliverer(spark, opened, version.spec)
        driver = Driver(version, journal, workshop, executor, deliverer, options, observe)
        driver.check_graph()
        driver.listener.log.guard()
        check_start(driver.journal.history, query_id(spark, place), finished, last_finished(spark, place))
        trouble = workshop.try_out(driver.modifier.version)
        if trouble:
            raise UserError(trouble)
        deliverer.mend(driver.graph.sinks, driver.graph.schema_of, driver.journal.history)
        running = RunningQuery(users, driver, sources, place, chosen, finished=lambda: last_finished(spark, place))
        _STARTED.add(running)
        return running


_STARTED: weakref.WeakSet[RunningQuery] = weakref.WeakSet()


def _refuse_twice(spark: SparkSession, name: str) -> None:
    """Refuses a name that is taken: by a query of this process, or by any stream of the session."""
    taken = [active.name for active in spark.streams.active]
    taken += [running.name for running in _STARTED if running.active]
    if name in taken:
        raise UserError(f"a query named {name!r} already runs here; stop it first")


def _cloned(spark: SparkSession) -> SparkSession:
    """A session with the user's settings, views and functions, whose settings can be changed without theirs."""
    return SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())


def _trigger(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """A trigger that Spark can run epochs by."""
    chosen = dict(given or {})
    if not chosen or (set(chosen) == {"availableNow"} and chosen["availableNow"] is True):
        return chosen
    if set(chosen) == {"processingTime"} and isinstance(chosen["processingTime"], str) and chosen["processingTime"]:
        return chosen
    raise UserError(
        f"trigger={given!r}: give {{'processingTime': '5 seconds'}}, {{'availableNow': True}}, or nothing to run "
        "epochs as long as there is data"
    )


def _options(slots: int, bins: int, retain: int, budget: int, token: str | None) -> Options:
    if not isinstance(slots, int) or slots < 1:
        raise UserError(f"slots={slots!r}: give a whole number of at least 1")
    if not isinstance(bins, int) or bins < 1 or bins & (bins - 1) or bins > 1 << 32:
        raise UserError(f"bins={bins!r}: give a power of two up to 2**32")
    if slots > bins:
        raise UserError(f"slots={slots} with bins={bins}: there cannot be more slots than bins")
    if retain < 1:
        raise UserError(f"retain={retain!r}: give at least 1; the state before the last epoch must stay readable")
    if budget < 1 << 20:
        raise UserError(f"compaction_budget={budget!r}: give at least 1 MiB (1048576)")
    if token is not None and (not isinstance(token, str) or not token):
        raise UserError("token: give a text that is not empty, or leave it out")
    return Options(slots, bins.bit_length() - 1, retain, budget, token)


def _replicas(count: int | None) -> int | None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 16):
        raise UserError(f"replicas={count!r}: give a whole number from 0 to 16, or None for one if there are two hosts")
    return count


def _by_load(placement: str) -> bool:
    if placement not in ("size", "load"):
        raise UserError(f"replica_placement={placement!r}: give 'size' or 'load'")
    return placement == "load"


def _policy(given: bool | Policy) -> Policy | None:
    if isinstance(given, bool):
        return Adaptive() if given else None
    if not callable(getattr(given, "decide", None)):
        raise UserError(f"adapt={given!r}: give True, False, or a policy: something with decide(facts, memory)")
    return given


def _rate(rate: float | None) -> float | None:
    if rate is not None and (not isinstance(rate, int | float) or not 0 < rate < float("inf")):
        raise UserError(f"replicate_limit={rate!r}: give a number of bytes a second above 0, or None for no limit")
    return rate


def _cache(directory: str | None, limit: int, rate: float | None) -> CacheSettings:
    if directory is not None and (not isinstance(directory, str) or not Path(directory).is_absolute()):
        raise UserError(f"cache_dir={directory!r}: give an absolute path; it is made on every worker")
    if not isinstance(limit, int) or limit < 1:
        raise UserError(f"cache_bytes={limit!r}: give a whole number of bytes, at least 1")
    if rate is not None and (not isinstance(rate, int | float) or not 0 < rate < float("inf")):
        raise UserError(f"fetch_limit={rate!r}: give a number of bytes a second above 0, or None for no limit")
    return CacheSettings(directory, limit, rate)


def _open(uri: str, options: Mapping[str, str] | None) -> ObjectStore:
    if not isinstance(uri, str) or not uri:
        raise UserError(f"store={uri!r}: give a directory or a URI such as s3://bucket/path")
    if uri.startswith("memory:"):
        raise UserError("a memory store is seen by one process only, and Spark's workers are others; give a directory")
    return open_store(uri, options)


def _checkpoint_place(store: ObjectStore, given: str | None) -> str:
    if given:
        return given if "://" in given else f"file://{Path(given).expanduser().absolute()}"
    beside = store.path("spark-checkpoint")
    if beside is None:
        raise UserError(
            f"the store {store.uri} is not a local directory: say where Spark may keep its own checkpoint, with "
            "checkpoint='hdfs://...' or any other path that Spark can write to"
        )
    return f"file://{beside}"
