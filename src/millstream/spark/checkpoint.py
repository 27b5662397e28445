"""What Spark's own checkpoint says: the query's id, and the offsets of an epoch.

Rules
-----
- Spark writes the offsets of an epoch before it runs it and never changes them; after a crash it offers the same
  epoch with the same offsets. The journal is bound to both (G1, G6).
- The checkpoint may lie on any Hadoop file system; a local one is read without asking the JVM.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from millstream.errors import UserError
from millstream.protocol.epochs import NO_EPOCH, Epoch
from millstream.store.journal import digest_of


def query_id(spark: SparkSession, checkpoint: str) -> str | None:
    """The id of the Spark query that owns a checkpoint; None if there is no checkpoint."""
    data = _read(spark, checkpoint, "metadata")
    if data is None:
        return None
    try:
        return str(json.loads(data)["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint}/metadata is damaged: found {data[:80]!r}, expected Spark's query id") from error


def offsets_digest(spark: SparkSession, checkpoint: str, epoch: int) -> str:
    """A digest of the source offsets of an epoch."""
    data = _read(spark, checkpoint, f"offsets/{epoch}")
    if data is None:
        raise UserError(f"{checkpoint}/offsets/{epoch} is missing: Spark's checkpoint was deleted while the query ran")
    return digest_of(data)


def last_finished(spark: SparkSession, checkpoint: str) -> Epoch:
    """The last epoch that Spark has noted as finished; `NO_EPOCH` if there is none."""
    if _is_local(checkpoint):
        folder = _local(checkpoint) / "commits"
        found = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    else:
        path_object, files = _hadoop(spark, checkpoint, "commits")
        found = (
            [status.getPath().getName() for status in files.listStatus(path_object)]
            if files.exists(path_object)
            else []
        )
    return Epoch(max((int(name) for name in found if name.isdigit()), default=NO_EPOCH))


def _is_local(checkpoint: str) -> bool:
    return "://" not in checkpoint or checkpoint.startswith("file://")


def _local(checkpoint: str) -> Path:
    """As Hadoop reads such a path: nothing in it is quoted, and `#` and `?` are characters like any other."""
    return Path(checkpoint.removeprefix("file://"))


def _hadoop(spark: SparkSession, checkpoint: str, name: str) -> tuple[Any, Any]:
    jvm: Any = spark.sparkContext._jvm
    path_object = jvm.org.apache.hadoop.fs.Path(f"{checkpoint.rstrip('/')}/{name}")
    return path_object, path_object.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())


def _read(spark: SparkSession, checkpoint: str, name: str) -> bytes | None:
    if _is_local(checkpoint):
        path = _local(checkpoint) / name
        return path.read_bytes() if path.exists() else None
    path_object, files = _hadoop(spark, checkpoint, name)
    if not files.exists(path_object):
        return None
    stream = files.open(path_object)
    try:
        jvm: Any = spark.sparkContext._jvm
        return bytes(jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
    finally:
        stream.close()
