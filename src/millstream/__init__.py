"""Millstream: stateful stream processing on Spark whose running queries can be changed while they run."""

from millstream.control.connect import Control, connect
from millstream.control.handle import Handle
from millstream.control.modify import Modify
from millstream.control.running import RunningQuery, Status
from millstream.control.start import Query
from millstream.engine.adapting import Decided
from millstream.engine.replicating import ReplicaFacts
from millstream.errors import (
    ConflictError,
    DamagedObject,
    Fenced,
    InvariantViolation,
    MillstreamError,
    SinkError,
    StepError,
    StoreUnavailable,
    UserError,
)
from millstream.library.aggregates import collect, combine, count, first, last, max, mean, min, sum
from millstream.library.dedupe import Dedupe
from millstream.library.windows import sessions, sliding, tumbling
from millstream.model.bags import Bag
from millstream.model.batch import Batch, InputBatch, TimerBatch, to
from millstream.model.carry import carry, convert, drop, fresh
from millstream.model.computation import At, Computation
from millstream.model.holds import Hold
from millstream.model.maps import Map
from millstream.model.query import KeyedStream, Stream
from millstream.model.sinks import ForeachBatch, Memory, Parquet
from millstream.model.state import Value
from millstream.model.timers import Timer
from millstream.model.times import EVENT_TIME, WALL_TIME
from millstream.protocol.adaptation import Adaptive, Balance, Decision, GiveBack, Isolate, Scale
from millstream.protocol.conditions import metric
from millstream.protocol.strategies import AllAtOnce, Batched, Fluid, Matched, Paced
from millstream.spark.session import session

__version__ = "0.1.0"

__all__ = [
    "EVENT_TIME",
    "WALL_TIME",
    "Adaptive",
    "AllAtOnce",
    "At",
    "Bag",
    "Balance",
    "Batch",
    "Batched",
    "Computation",
    "ConflictError",
    "Control",
    "DamagedObject",
    "Decided",
    "Decision",
    "Dedupe",
    "Fenced",
    "Fluid",
    "ForeachBatch",
    "GiveBack",
    "Handle",
    "Hold",
    "InputBatch",
    "InvariantViolation",
    "Isolate",
    "KeyedStream",
    "Map",
    "Matched",
    "Memory",
    "MillstreamError",
    "Modify",
    "Paced",
    "Parquet",
    "Query",
    "ReplicaFacts",
    "RunningQuery",
    "Scale",
    "SinkError",
    "Status",
    "StepError",
    "StoreUnavailable",
    "Stream",
    "Timer",
    "TimerBatch",
    "UserError",
    "Value",
    "carry",
    "collect",
    "combine",
    "connect",
    "convert",
    "count",
    "drop",
    "first",
    "fresh",
    "last",
    "max",
    "mean",
    "metric",
    "min",
    "session",
    "sessions",
    "sliding",
    "sum",
    "to",
    "tumbling",
]
