"""Controlling a query from any process that can reach its store: `millstream.connect`.

Rules
-----
- It looks and sends commands, and nothing else: it claims nothing, makes no store where there is none, and the driver
  does not know of it. Any number of processes may be connected.
- What it tells is what is committed. It reads the journal on from where it was.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, overload

import pyarrow as pa

from millstream.control.handle import Handle
from millstream.control.modify import Asking
from millstream.control.overview import Overview, Pulse, driver_gone, live, overview_of
from millstream.control.verbs import Verbs, When, start_of
from millstream.engine.bundles import Bundle
from millstream.engine.by_value import by_value
from millstream.engine.described import described_graph
from millstream.engine.modifying import counted_forms
from millstream.engine.replicating import ReplicaFacts
from millstream.engine.spec import Spec
from millstream.engine.state import chosen_state, read_state
from millstream.errors import DamagedObject, StoreUnavailable, UserError
from millstream.model.change import Calls
from millstream.protocol.epochs import Epoch, History
from millstream.protocol.migration import MigrationPlan
from millstream.protocol.modification import Modification
from millstream.protocol.steering import Ask
from millstream.store.code import put_code
from millstream.store.control_log import ControlLog
from millstream.store.journal import JournalReader, history_at
from millstream.store.objects import ObjectStore, open_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def connect(store: str, *, options: Mapping[str, str] | None = None, token: str | None = None) -> Control:
    """Connects to the query of a store, from any process that can read and write there.

    - `store`: as given to `Query.start`; `options` are what `store_options` are there.
    - `token`: the one that the query was started with, if it was. It is needed for changes, not for looking.

    No driver needs to run: what is asked for then waits in the store until one does.

    >>> import millstream as ms
    >>> ms.connect("/no/such/place")
    Traceback (most recent call last):
    millstream.errors.UserError: there is no store at '/no/such/place': no such directory on this machine
    """
    if not isinstance(store, str) or not store:
        raise UserError(f"store={store!r}: give a directory or a URI such as s3://bucket/path")
    if store.startswith("memory:"):
        raise UserError("a memory store is seen by one process only: there is nothing to connect to")
    try:
        opened = open_store(store, options, make=False)
    except StoreUnavailable:
        raise UserError(f"there is no store at {store!r}: no such directory on this machine") from None
    return Control(opened, token, dict(options or {}))


class Control(Verbs):
    """A query, seen from elsewhere than its driver. Made by `connect`.

    It has the verbs of `RunningQuery`: plans, `apply`, `cancel`, `status` and `state`.
    """

    def __init__(self, store: ObjectStore, token: str | None = None, options: Mapping[str, str] | None = None) -> None:
        self._pulse = Pulse()
        self._reader = JournalReader.look(store, self._pulse.told)
        self._looking = threading.Lock()
        self._log, self._options = ControlLog(store, token), dict(options or {})
        self._plans: dict[int, MigrationPlan] = {}

    def __repr__(self) -> str:
        return f"<Control of {self.name!r}, epoch {self.epoch}>"

    @property
    def name(self) -> str:
        """The query's name; "?" before its first commit."""
        return str((self._reader.history.graph or {}).get("query", "?"))

    @property
    def epoch(self) -> int:
        """The last committed epoch; -1 before the first."""
        return self._look().epoch

    def status(self) -> Overview:
        """What the store tells now."""
        history = self._look()
        self._plans = {outcome.number: plan for outcome in live(history) if (plan := self._plan(outcome.number))}
        return overview_of(history, self._pulse, self._plans, self._unheard(history), self._gone(history))

    def _gone(self, history: History) -> str:
        return driver_gone(history, self._pulse, time.time_ns() // 10**6)

    def _unheard(self, history: History) -> dict[int, str]:
        return self._log.unheard(history.control)

    def replicas(self) -> ReplicaFacts:
        """Who holds the state of which slots beside their own workers, as of the last commit; how far that is behind,
        only the query's own process knows."""
        return ReplicaFacts(groups=dict(self._look().replicas))

    @overload
    def state(self, step: str, spark: None = None, epoch: int | None = None, state: str | None = None) -> pa.Table: ...
    @overload
    def state(
        self, step: str, spark: SparkSession, epoch: int | None = None, state: str | None = None
    ) -> DataFrame: ...
    def state(
        self, step: str, spark: SparkSession | None = None, epoch: int | None = None, state: str | None = None
    ) -> pa.Table | DataFrame:
        """The state of a step: the key's columns, and the value under the state's name.

        With a Spark session a DataFrame, which workers read, and which must be read while its epoch is retained;
        without one an Arrow table, read here and now. `epoch` may be any retained epoch, the last commit by default;
        `state` is needed only where a step declares several. Python objects come as pickled bytes. The query's code is
        not needed; but values whose type has changed, and that have not been converted yet, only the driver can read.
        """
        history = self._look()
        if history.graph is None:
            raise UserError("no epoch has been committed yet, so there is no state")
        if epoch is not None and epoch != history.epoch:
            history = self._history_at(epoch, history)
        graph, store = described_graph(history.graph or {}), self._reader.store
        chosen, name = chosen_state(graph, step, state)
        forms = counted_forms(store, history, chosen, name)
        if spark is None:
            return read_state(store, chosen, name, history, forms)
        from pyspark import cloudpickle

        from millstream.spark.frames import state_frame

        packed = {(step, name): forms.pack(cloudpickle.dumps)} if forms.current else {}
        spec = Spec(graph, self._reader.store_id, store.uri, self._options, {}, forms=packed)
        return state_frame(spark, spec.pack(cloudpickle.dumps), chosen, name, history)

    def modify(
        self, *, wait: bool = True, timeout: float | None = None, at: When = None, rehearse: bool = True
    ) -> Asking:
        """A change of the graph, for a `with` block, as of `RunningQuery.modify`: when it ends, the change is sent to
        the driver, which checks it, and waited for. The code that it brings travels through the store."""
        history = self._look()
        start = start_of(at, history)

        def send(calls: Calls, text: str, trial: bool, bundles: Iterable[Bundle]) -> Handle:
            self._log.check_token()
            for each in bundles:
                put_code(self._reader.store, each.data)
            code = put_code(self._reader.store, _packed(calls))
            ask = Modification(self._store_id(), history.version, code, text, start, trial=trial, rehearse=rehearse)
            return self._handle(self._sent("modify", ask))

        return Asking(send, wait, timeout)

    # -- inside

    def _look(self) -> History:
        with self._looking:  # several threads may wait for handles
            self._reader.follow()
            return self._reader.history

    def _send(self, verb: str, ask: Ask, history: History) -> int:
        return self._log.send(verb, ask, history.control)

    def _store_id(self) -> str:
        return self._reader.store_id

    def _plan(self, number: int) -> MigrationPlan | None:
        """The plan of a command under way. Only its sizes are shown, so that no token is needed."""
        if number in self._plans:
            return self._plans[number]
        found = self._log.read(number)
        return found if isinstance(found, MigrationPlan) else None

    def _history_at(self, epoch: int, history: History) -> History:
        if not max(0, history.oldest) <= epoch <= history.epoch:
            raise UserError(f"epoch {epoch} is not retained; epochs {max(0, history.oldest)}..{history.epoch} are")
        try:
            return history_at(self._reader.store, Epoch(epoch))
        except DamagedObject:
            oldest = self._look().oldest  # the driver may have gone on meanwhile
            if epoch >= oldest:
                raise
            raise UserError(f"epoch {epoch} is no longer retained; epochs from {oldest} on are") from None


def _packed(calls: Calls) -> bytes:
    """A change as it is stored, with the code that it brings by value."""
    if calls.plain:
        return pickle.dumps(((), pickle.dumps(calls)))
    from pyspark import cloudpickle

    try:
        return pickle.dumps(((), by_value(calls, cloudpickle)))
    except Exception as error:
        raise UserError(f"the change cannot be stored: {type(error).__name__}: {error}") from error
