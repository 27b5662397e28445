"""Routing (the papers' F): records in, one payload per slot out. For source records, and for productions of a level.

Rules
-----
- A record goes to the slot that the plan's table names for its key's hash (G4), and nowhere else.
- Records of a lane keep their order within a producer.
- A stream is split once per lane, whatever the level of its readers: what is for a later level is passed on there.
- Memory is bounded by the records of one Spark partition of one epoch, in columns.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from millstream.engine.derive import MapFailure, derive
from millstream.engine.observing import Fence
from millstream.engine.payload import Part, Parts, encode
from millstream.engine.sample import SAMPLE_PARTS, sample_of
from millstream.engine.spec import HASH_COLUMN, EpochTask, Lane, Spec, rules_of
from millstream.model.letters import bounded, cause_text, plain
from millstream.model.times import NULL_TIME, Times, times_of
from millstream.protocol.epochs import Failure, Report
from millstream.protocol.time import NO_TIME, SeenTimes, TimeRule, seen_together
from millstream.store.keys import KeyColumns
from millstream.store.objects import ObjectStore

FLUSH_BYTES = 128 << 20
"""What is gathered before it is split."""


def route(
    spec: Spec, task: EpochTask, batches: Iterable[tuple[str, pa.RecordBatch]], producer: int, store: ObjectStore
) -> Iterator[bytes]:
    """The payload of each slot, from batches of named sources.

    If the function of a map fails, a report of level 0 says so, and the payloads are empty.
    """
    name, began = f"0.{producer}", time.thread_time()
    parts: Parts = [[] for _ in range(task.slot_count)]
    waiting: dict[str, list[pa.RecordBatch]] = {}
    seen: dict[str, list[SeenTimes]] = {}
    samples: dict[str, bytes] = {}
    fence, gathered = Fence(), 0
    try:
        for stream, batch in batches:
            if stream not in samples and producer < SAMPLE_PARTS:
                samples[stream] = fence("a sample of the input", b"", partial(sample_of, batch))
            waiting.setdefault(stream, []).append(batch)
            gathered += batch.nbytes
            if gathered >= FLUSH_BYTES:
                _flush(spec, task, waiting, name, parts, seen)
                waiting, gathered = {}, 0
        _flush(spec, task, waiting, name, parts, seen)
    except MapFailure as error:
        report = Report(producer, {}, failure=failure_of(error.name, "", "", error.cause), level=0)
        return encode([[] for _ in parts], name, store, task.maker, {0: [report]})
    rules = rules_of(spec.graph)
    together = {source: seen_together(all_, rules[source].percentile is not None) for source, all_ in seen.items()}
    spent = (time.thread_time() - began) * 1000  # without what it takes to send it
    return encode(parts, name, store, task.maker, seen=together, samples=samples, cpu_ms=spent, unobserved=fence.failed)


def _flush(
    spec: Spec,
    task: EpochTask,
    waiting: dict[str, list[pa.RecordBatch]],
    producer: str,
    parts: Parts,
    seen: dict[str, list[SeenTimes]],
) -> None:
    gathered = {
        stream: batches[0] if len(batches) == 1 else pa.concat_batches(batches) for stream, batches in waiting.items()
    }
    rules = rules_of(spec.graph)
    for source in spec.graph.sources:
        if source.time is not None and source.name in gathered:
            records, rule = gathered[source.name], rules[source.name]
            names = partition_names([records.column(name) for name in rule.partition]) if rule.partition else None
            found = seen_in(times_of(records.column(source.time.column)), rule, task.clock_ms, names)
            if source.time.stating is not None:
                stated = seen_in(times_of(records.column(source.time.stating)), rule, task.clock_ms, names)
                heard = dict.fromkeys(found.partitions, NO_TIME)  # also those whose records state nothing
                found = replace(found, mark=stated.mark, partitions={**heard, **stated.partitions})
            seen.setdefault(source.name, []).append(found)
    split(task, derive(spec, gathered), producer, parts)


def seen_in(times: Times, rule: TimeRule, clock_ms: int, names: pa.DictionaryArray | None = None) -> SeenTimes:
    """What these event times say of a source; `names` are the partitions of the records, if it has any."""
    known = times != NULL_TIME
    sane = known & (times <= clock_ms * 1000 + rule.ahead_us)
    nulls, ahead = len(times) - int(known.sum()), int(known.sum() - sane.sum())
    mark, partitions = NO_TIME, dict[str, int]()
    if sane.any():
        usable = times[sane]
        mark = int(
            usable.max() if rule.percentile is None else np.quantile(usable, 1 - rule.percentile, method="lower")
        )
        if names is not None:
            partitions = _partition_marks(usable, names.filter(pa.array(sane)), rule.percentile)
    return SeenTimes(len(times), nulls, ahead, mark, partitions)


def _partition_marks(times: Times, names: pa.DictionaryArray, percentile: float | None) -> dict[str, int]:
    """The newest time of each partition, or the one at the percentile."""
    numbers, texts = names.indices.to_numpy(), names.dictionary.to_pylist()
    if percentile is None:
        newest = np.full(len(texts), NO_TIME)
        np.maximum.at(newest, numbers, times)
        return {text: mark for text, mark in zip(texts, newest.tolist(), strict=True) if mark != NO_TIME}
    order = np.lexsort((times, numbers))
    heard, begins, counts = np.unique(numbers[order], return_index=True, return_counts=True)
    at = order[begins + np.floor((1 - percentile) * (counts - 1)).astype(np.int64)]
    return {texts[number]: mark for number, mark in zip(heard.tolist(), times[at].tolist(), strict=True)}


def partition_names(columns: Sequence[pa.Array]) -> pa.DictionaryArray:
    """The name of each record's partition: the values of these columns as one text.

    >>> partition_names([pa.array(["a", "a", None]), pa.array([0, 1, 1])]).to_pylist()
    ['a/0', 'a/1', 'null/1']
    """
    first, *others = [column.dictionary_encode("encode") for column in columns]
    numbers, texts = first.indices.to_numpy(), first.dictionary.cast(pa.string()).fill_null("null").to_pylist()
    for column in others:
        values = column.dictionary.cast(pa.string()).fill_null("null").to_pylist()
        pairs, numbers = np.unique(numbers * np.int64(len(values)) + column.indices.to_numpy(), return_inverse=True)
        texts = [f"{texts[pair // len(values)]}/{values[pair % len(values)]}" for pair in pairs.tolist()]
    return pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), pa.array(texts, pa.string()))


def failure_of(name: str, key: str, record: str, cause: BaseException) -> Failure:
    """An exception in user code, as data."""
    trace = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__))
    return Failure(name, bounded(key), bounded(record), cause_text(cause), plain(trace[-4000:]))


def split(task: EpochTask, streams: Mapping[str, pa.RecordBatch], producer: str, parts: Parts) -> None:
    """Adds the records of streams to what each slot is sent."""
    for number, lane in enumerate(task.lanes):
        records = streams.get(lane.stream)
        if records is None or not records.num_rows:
            continue
        for slot, part in _by_slot(records, lane):
            parts[slot].append(Part(number, producer, part.serialize()))


def _by_slot(records: pa.RecordBatch, lane: Lane) -> Iterator[tuple[int, pa.RecordBatch]]:
    keys = KeyColumns.canonical([records.column(name) for name in lane.key])
    hashes = keys.hashes()
    keyed = records.add_column(0, HASH_COLUMN, pa.array(hashes))
    if len(lane.table.firsts) == 1:
        yield lane.table.slots[0], keyed
        return
    slots = lane.table.lookup(hashes)
    narrow = (
        np.uint8 if lane.table.slot_count <= 1 << 8 else np.uint16 if lane.table.slot_count <= 1 << 16 else np.uint32
    )
    order = np.argsort(slots.astype(narrow), kind="stable")  # a radix sort: linear in the records
    counts = np.bincount(slots, minlength=lane.table.slot_count)
    sorted_records = keyed.take(pa.array(order))
    ends = np.cumsum(counts)
    for slot in np.flatnonzero(counts):
        yield int(slot), sorted_records.slice(int(ends[slot] - counts[slot]), int(counts[slot]))
