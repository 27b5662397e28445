"""A rehearsal: a version runs over a few records of recent input, on no state, before it is let near any.

Rules
-----
- It runs the very code of an epoch, in one slot, on a store in memory: nothing of it reaches the query's store or
  sinks.
- What user code raises there it would have raised in its first epoch. That it comes through proves nothing: state was
  empty, and the records were few.
"""

from __future__ import annotations

import time

import pyarrow as pa

from millstream.engine.route import route
from millstream.engine.sample import Samples
from millstream.engine.spec import SlotTask, Spec, epoch_task
from millstream.engine.strong import host_once
from millstream.protocol.epochs import Attempt, Epoch, Failure, History, Plan, Report
from millstream.protocol.keyspace import WHOLE
from millstream.protocol.routing import RoutingTable
from millstream.store.names import Maker
from millstream.store.objects import open_store

FAILS = "fails on a sample of recent input"


def rehearse(spec: Spec, samples: Samples) -> str:
    """Runs a version over samples; what went wrong, or nothing."""
    graph, store = spec.graph, open_store("memory://")
    plan = Plan(Epoch(0), Attempt(0), "", "", time.time_ns() // 10**6, {})
    tables = {step.name: RoutingTable.even(1, 0) for step in graph.steps}
    task = epoch_task(graph, plan, Maker(0, 0, "a", 0), tables, History(), 1)
    slot = SlotTask(0, 0, {step.name: (WHOLE,) for step in graph.steps}, [])
    known = {source.name: source.schema for source in graph.sources}
    batches = [
        (name, batch.select(known[name].names).cast(known[name]))
        for name, parts in samples.items()
        if name in known
        for part in parts
        for batch in pa.ipc.open_stream(part)
    ]
    payloads: list[bytes | memoryview] = list(route(spec, task, batches, 0, store))
    reports: list[Report] = []
    for level in range(1, task.depth + 1):
        hosted = host_once(spec, task, level, slot, payloads, store)
        reports, payloads = hosted.reports, list(hosted.payloads(task, store))
    return next((_told(report.failure) for report in reports if report.failure is not None), "")


def _told(failure: Failure) -> str:
    where = f", for the record {failure.record} of the key {failure.key}" if failure.record else ""
    return f"{failure.step!r} {FAILS}{where}: {failure.cause}\n{failure.trace}"
