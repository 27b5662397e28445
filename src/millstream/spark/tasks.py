"""What runs in Spark's Python workers. Thin: the work itself is in `engine` and `store`.

Rules
-----
- Functions here are imported by name on the worker, so what travels with every epoch is data only.
- Whatever can be reported as data is (see `engine.host`); what fails a task here is worth Spark's own retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.serializers import pack_long

from millstream.engine.rehearsal import rehearse
from millstream.engine.route import route
from millstream.engine.sample import Samples
from millstream.engine.shipping import ensure
from millstream.engine.spec import EpochTask, Here, SlotTask, Spec, unpack
from millstream.engine.strong import host_once
from millstream.errors import StoreUnavailable
from millstream.protocol.compaction import Job
from millstream.protocol.manifest import Edit, SegmentRef
from millstream.store.agent import FlightPeer
from millstream.store.cache import CacheSettings, executor, executor_id, open_cache
from millstream.store.journal import check_format
from millstream.store.merge import give_memory_back, merge
from millstream.store.names import Maker
from millstream.store.objects import ObjectStore, open_store
from millstream.store.segments import CACHE


@lru_cache(maxsize=16)
def _store(uri: str, options: tuple[tuple[str, str], ...], store_id: str, cache: CacheSettings) -> ObjectStore:
    store = open_store(uri, dict(options), make=False)
    found = check_format(store)
    if found != store_id:
        raise StoreUnavailable(
            f"{uri} is another store on this worker (id {found}) than on the driver (id {store_id}); mount the same one"
        )
    CACHE.attach(store.uri, open_cache(cache, store_id))
    return store


def store_of(spec: Spec) -> ObjectStore:
    """The store of a query, which must be the driver's, read through this worker's cache; opened once per process.

    A worker that joined later and sees an empty directory in its place must not write state there.
    """
    store = _store(spec.store_uri, tuple(sorted(spec.store_options.items())), spec.store_id, spec.cache)
    ensure(store, spec.bundles)
    return store


def router(spec_bytes: bytes, task: EpochTask) -> Any:
    return partial(_route, spec_bytes, task)


def _route(spec_bytes: bytes, task: EpochTask, producer: int, messages: Iterable[bytes]) -> Iterator[bytes]:
    spec = unpack(spec_bytes)
    payloads = route(spec, task, _batches(spec, messages), producer, store_of(spec))
    for slot, payload in enumerate(payloads):
        yield pack_long(slot)  # type: ignore[no-untyped-call]
        yield payload


def _batches(spec: Spec, messages: Iterable[bytes]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Record batches by source, from messages of the frame that `sources.unite` makes."""
    sources = spec.graph.sources
    schema = united_schema(spec)
    for message in messages:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(message), schema)
        tags = batch.column(0).to_numpy()
        for source in sources:
            chosen = tags == source.index
            if not chosen.any():
                continue
            struct = batch.column(1 + source.index)
            if not chosen.all():
                struct = struct.filter(pa.array(chosen))
            yield source.name, pa.RecordBatch.from_arrays(struct.flatten(), schema=source.schema)


def united_schema(spec: Spec) -> pa.Schema:
    """The schema of the united frame: a tag, and one struct per source."""
    fields = [pa.field("source", pa.int32())]
    for source in spec.graph.sources:
        fields.append(pa.field(f"s{source.index}", pa.struct(list(source.schema))))
    return pa.schema(fields)


@dataclass(frozen=True, slots=True)
class Doors:
    """How a task reaches the agents of other workers."""

    token: str
    query: str
    addresses: dict[str, str]

    def give(self, worker: str, ref: SegmentRef, data: bytes) -> None:
        """Sends a segment to a worker."""
        if worker not in self.addresses:
            raise OSError(f"worker {worker} has no agent")
        _peer(self.addresses[worker], self.token, self.query).take(ref, data)


@lru_cache(maxsize=16)
def _peer(address: str, token: str, query: str) -> FlightPeer:
    return FlightPeer(address, token, query)


def hoster(spec_bytes: bytes, task: EpochTask, level: int, doors: Doors | None = None) -> Any:
    return partial(_host, spec_bytes, task, level, doors)


def _host(
    spec_bytes: bytes, task: EpochTask, level: int, doors: Doors | None, pairs: Iterable[tuple[bytes, bytes]]
) -> Iterator[Any]:
    spec = unpack(spec_bytes)
    mine: SlotTask | None = None
    payloads = []
    for place, payload in pairs:
        if place:
            mine = SlotTask.unpack(place)
        if payload:
            payloads.append(payload)
    assert mine is not None, "a located partition without its slot"
    store = store_of(spec)
    here = Here(executor_id(executor()), None if doors is None else doors.give)
    hosted = host_once(spec, task, level, mine, payloads, store, here)
    if level == spec.graph.depth:
        yield msgspec.msgpack.encode(hosted.reports)
        return
    for slot, sent in enumerate(hosted.payloads(task, store)):
        yield pack_long(slot)  # type: ignore[no-untyped-call]
        yield sent


def compactor(spec_bytes: bytes) -> Any:
    return partial(_compact, spec_bytes)


def _compact(spec_bytes: bytes, tasks: Iterable[bytes]) -> Iterator[bytes]:
    spec = unpack(spec_bytes)
    for data in tasks:
        job, maker, slot = msgspec.msgpack.decode(data, type=tuple[Job, Maker, int])
        edit: Edit = merge(store_of(spec), CACHE, job, maker, slot)
        give_memory_back()
        yield msgspec.msgpack.encode(edit)


def prober(spec_bytes: bytes, name: str, expected: bytes, samples: Samples | None = None) -> Any:
    return partial(_probe, spec_bytes, name, expected, samples)


def _probe(
    spec_bytes: bytes, name: str, expected: bytes, samples: Samples | None, number: int, _: Iterable[int]
) -> Iterator[str]:
    """Whether this worker can unpack the query and see the store: an empty string, or what is wrong. The first one also
    rehearses it, if there are samples."""
    part = "query"
    try:
        spec = unpack(spec_bytes)
        if spec.bundles:
            part = "code that was sent"
            store_of(spec)
        for step in spec.graph.steps:
            part = f"computation of step {step.name!r}"
            spec.new_computation(step.name)
        for each in spec.graph.maps:
            part = f"function of map {each.name!r}"
            spec.function(each.name)
        for step_name, state in spec.forms:
            part = f"conversion of {state!r} of step {step_name!r}"
            spec.forms_of(step_name, state)
    except Exception as error:
        yield f"the {part} cannot be loaded on a worker: {type(error).__name__}: {error}"
        return
    try:
        found = store_of(spec).get(name)
    except Exception as error:
        yield f"a worker cannot read the store: {error}"
        return
    if found is None or bytes(found) != expected:
        yield f"a worker does not see the store {spec.store_uri}: an object that the driver wrote is not there"
    else:
        yield rehearse(spec, samples) if samples and number == 0 else ""
