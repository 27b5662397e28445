"""Delivering productions to sinks.

Rules
-----
- An epoch is delivered after its commit, from stored bytes. After a crash it is delivered again, and looks the same.
- `Parquet` (G2): one file per epoch, named by the epoch, created only if it is not there, and visible only when
  whole; then one manifest line under `_manifest/`, which Spark's own reader ignores. An epoch without productions has
  no file.
- A file that was written and is gone is named at the next start, and written again as long as its epoch is retained.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from millstream.engine.delivery import read_productions
from millstream.errors import MillstreamError, SinkError, UserError
from millstream.model.query import SinkNode
from millstream.model.sinks import ForeachBatch, Memory, Parquet
from millstream.protocol.epochs import Epoch, History, Output
from millstream.spark.frames import productions_frame
from millstream.store.garbage import clear_staging
from millstream.store.objects import PERMISSIONS, ObjectStore, open_store

_MADE_OF = "millstream.made_of"
_SHOWN = 8
_LOG = logging.getLogger("millstream")


class SparkDeliverer:
    """Delivers to every kind of sink."""

    def __init__(self, spark: SparkSession, store: ObjectStore, spec_bytes: bytes) -> None:
        self._spark, self._store, self._spec_bytes = spark, store, spec_bytes
        self._targets: dict[str, ObjectStore] = {}

    def deliver(self, sink: SinkNode, schema: pa.Schema, outputs: Sequence[Output], epoch: int) -> None:
        match sink.sink:
            case Parquet():
                self._parquet(sink, schema, outputs, epoch)
            case Memory():
                table = read_productions(self._store, schema, outputs)
                sink.sink.epochs.setdefault(epoch, _own_copy(table))
            case ForeachBatch():
                self._foreach(sink, sink.sink, schema, outputs, epoch)
            case other:
                raise UserError(
                    f"sink {sink.name!r}: {type(other).__name__} is not a kind of sink that Spark delivers to"
                )

    def mend(self, sinks: Sequence[SinkNode], schema_of: Callable[[str], pa.Schema], history: History) -> None:
        """Names the files of Parquet sinks that are gone, and writes those again whose epochs are still retained."""
        for sink in sinks:
            gone = self._gone(sink) if isinstance(sink.sink, Parquet) else []
            again = {epoch for epoch in gone if self._written_again(sink, schema_of(sink.input), history, epoch)}
            kept = [_file(epoch) for epoch in gone if epoch in again]
            lost = [_file(epoch) for epoch in gone if epoch not in again]
            for files, what in ((kept, "written again"), (lost, "no longer in the store")):
                if files:
                    more = f" and {len(files) - _SHOWN:,} more" if len(files) > _SHOWN else ""
                    place, names = self._target(sink).uri, ", ".join(files[:_SHOWN]) + more
                    _LOG.warning("sink %r: %s is gone from %s; what it had was %s", sink.name, names, place, what)

    def _written_again(self, sink: SinkNode, schema: pa.Schema, history: History, epoch: int) -> bool:
        """Delivers an epoch again, if the store still has it, and in the columns that the sink has now."""
        known = history.recent.get(Epoch(epoch))
        outputs = [each for each in known.outputs if each.stream == sink.input] if known is not None else []
        try:
            self.deliver(sink, schema, outputs, epoch)
        except (MillstreamError, pa.ArrowException) as error:
            _LOG.warning("sink %r: epoch %d cannot be delivered again: %s", sink.name, epoch, error)
            return False
        return bool(outputs)

    def _gone(self, sink: SinkNode) -> list[int]:
        """The epochs whose files were written, as the manifest says, and are not there."""
        written = {item.name for item in self._target(sink).list("")}
        noted = (re.fullmatch(r"_manifest/(\d+)\.json", name) for name in written)
        return sorted(int(each[1]) for each in noted if each and _file(int(each[1])) not in written)

    def _target(self, sink: SinkNode) -> ObjectStore:
        """Where a Parquet sink writes."""
        if sink.name not in self._targets:
            assert isinstance(sink.sink, Parquet)
            # results are for others to read
            self._targets[sink.name] = open_store(sink.sink.path, {PERMISSIONS: "umask", **sink.sink.options})
            clear_staging(self._targets[sink.name])
        return self._targets[sink.name]

    def _parquet(self, sink: SinkNode, schema: pa.Schema, outputs: Sequence[Output], epoch: int) -> None:
        if not outputs:
            return
        target = self._target(sink)
        made_of = ",".join(output.digest for output in outputs)
        table = read_productions(self._store, schema, outputs)
        data = memoryview(parquet_bytes(table, made_of)).cast("B")
        file = _file(epoch)
        if not target.create(file, data) and _made_of(target.get(file)) != made_of:
            raise UserError(
                f"sink {sink.name!r}: {target.uri}/{file} exists with other content, so it is of another query or "
                "store. Nothing was overwritten. Give this sink a folder of its own, then start the query again"
            )
        line = {"epoch": epoch, "file": file, "rows": table.num_rows, "made_of": made_of}
        target.create(f"_manifest/{epoch:012d}.json", msgspec.json.encode(line))

    def _foreach(
        self, sink: SinkNode, declared: ForeachBatch, schema: pa.Schema, outputs: Sequence[Output], epoch: int
    ) -> None:
        frame = productions_frame(self._spark, self._spec_bytes, schema, outputs)
        try:
            declared.fn(frame, epoch)
        except Exception as error:
            raise SinkError(sink.name, epoch, f"{type(error).__name__}: {error}") from error


def _file(epoch: int) -> str:
    return f"epoch-{epoch:012d}.parquet"


def parquet_bytes(table: pa.Table, made_of: str) -> pa.Buffer:
    """A table as a Parquet file that says which productions it was made of."""
    out = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({_MADE_OF: made_of}), out)
    return out.getvalue()


def _made_of(data: memoryview | None) -> str | None:
    """What a Parquet file says it was made of. Not its bytes: another release of Arrow would write others."""
    if data is None:
        return None
    try:
        found = pq.read_schema(pa.BufferReader(pa.py_buffer(data))).metadata or {}
    except pa.ArrowInvalid:
        return None
    return str(found.get(_MADE_OF.encode(), b""), "utf-8")


def _own_copy(table: pa.Table) -> pa.Table:
    """A copy in memory: the original maps a file of the store, which will be deleted."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    copied: Any = pa.ipc.open_stream(out.getvalue()).read_all()
    return copied
