"""What Spark's own checkpoint says: the query's id, and the offsets of an epoch.

Rules
-----
- Spark writes the offsets of an epoch before it runs it and never changes them; after a crash it offers the same
  epoch with the same offsets. The journal is bound to both (G1, G6).
- The checkpoint may lie on any Hadoop file system; a local one is read without asking the JVM.
- What is damaged in it is mended at a start, where the journal says what was there: the query's id, the offsets of the
  last two epochs, and that an epoch was finished. The offsets of an epoch that was never committed are deleted, and
  Spark plans it again. What else is damaged is named, with what it means.
"""

from __future__ import annotations

import json
import logging
import re
import zlib
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from millstream.errors import UserError
from millstream.protocol.epochs import NO_EPOCH, Epoch, History

_LOG = logging.getLogger("millstream")


def query_id(spark: SparkSession, checkpoint: str) -> str | None:
    """The id of the Spark query that owns a checkpoint; None if there is no checkpoint."""
    data = _read(spark, checkpoint, "metadata")
    if data is None:
        return None
    try:
        return str(json.loads(data)["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint}/metadata is damaged: found {data[:80]!r}, expected Spark's query id") from error


def read_offsets(spark: SparkSession, checkpoint: str, epoch: int) -> bytes:
    """The source offsets of an epoch, as Spark has written them."""
    data = _read(spark, checkpoint, f"offsets/{epoch}")
    if data is None:
        raise UserError(f"{checkpoint}/offsets/{epoch} is missing: Spark's checkpoint was deleted while the query ran")
    return data


def mend(spark: SparkSession, checkpoint: str, history: History) -> None:
    """Mends what is damaged in the checkpoint of this store, as far as the journal says what was there.

    Nothing is written into another one, nor into one that is older or newer than the store: a start refuses these.
    """
    offsets, commits = (_numbers(spark, checkpoint, folder) for folder in ("offsets", "commits"))
    if not commits or commits[-1] not in (history.epoch - 1, history.epoch) or not _is_of(spark, checkpoint, history):
        return
    wanted = {"metadata": json.dumps({"id": history.spark_query}, separators=(",", ":")).encode()}
    known = {epoch: data for epoch, data in history.spark_offsets.items() if epoch <= commits[-1] + 1}
    wanted |= {f"offsets/{epoch}": zlib.decompress(data) for epoch, data in known.items()}
    wanted[f"commits/{commits[-1]}"] = _FINISHED
    for name, data in wanted.items():
        trouble = _trouble(spark, checkpoint, name)
        if trouble:
            _write(spark, checkpoint, name, data)
            _LOG.warning("%s/%s %s; it was written again, as the store has it", checkpoint, name, trouble)
    following = history.epoch + 1
    trouble = _trouble(spark, checkpoint, f"offsets/{following}") if following in offsets else ""
    if trouble:
        _delete(spark, checkpoint, f"offsets/{following}")
        told = "%s/offsets/%d %s; it was deleted, and Spark plans the epoch again, as it was never committed"
        _LOG.warning(told, checkpoint, following, trouble)


def _is_of(spark: SparkSession, checkpoint: str, history: History) -> bool:
    """Whether a checkpoint is that of a store: by the query's id; if that is damaged, by the offsets that are whole."""
    if history.spark_query is None:
        return False
    if not _trouble(spark, checkpoint, "metadata"):
        return query_id(spark, checkpoint) == history.spark_query
    return any(
        _read(spark, checkpoint, f"offsets/{epoch}") == zlib.decompress(data)
        for epoch, data in history.spark_offsets.items()
    )


_FINISHED = b'v1\n{"nextBatchWatermarkMs":0}'
"""What Spark writes when an epoch is finished that has no event time of Spark's own."""


def damage_told(text: str) -> str:
    """What an error of Spark's about its checkpoint means, and what to do; empty if it is about something else."""
    if not re.search(r"Failed to read log file|Checksum error|Incomplete log file|batch \d+ doesn't exist", text):
        return ""
    return (
        ". A file of Spark's own checkpoint is damaged, and the store does not have what was in it. Below `sources` "
        "Spark notes what a source has read, and it cannot go on without that. Nothing of the store was touched. Put "
        "the file back from a copy of the checkpoint that is as old as the store's last commit, or start with a new "
        "store and a new checkpoint"
    )


def _trouble(spark: SparkSession, checkpoint: str, name: str) -> str:
    """What is wrong with a file of the checkpoint; empty if nothing is."""
    data = _read(spark, checkpoint, name)
    if data is None:
        return "is missing"
    if _is_local(checkpoint):
        path = _local(checkpoint) / name
        sums = path.with_name(f".{path.name}.crc")
        if sums.exists() and not _matches(data, sums.read_bytes()):
            return "does not match its checksum"
    try:
        lines = data.decode().split("\n")
        whole = name == "metadata" or (bool(re.fullmatch(r"v\d+", lines.pop(0))) and all(lines))
        whole = whole and isinstance(json.loads(lines[0]), dict)  # what follows are offsets, as sources write them
    except (ValueError, IndexError):
        whole = False
    return "" if whole else f"cannot be read (it begins with {data[:40]!r})"


def _matches(data: bytes, sums: bytes) -> bool:
    """Whether a file matches the checksums that Hadoop keeps beside it: of each so many bytes, after a head."""
    size = int.from_bytes(sums[4:8], "big")
    if sums[:4] != b"crc\x00" or not size:
        return True
    found = b"".join(zlib.crc32(data[at : at + size]).to_bytes(4, "big") for at in range(0, len(data), size))
    return found == sums[8:]


def last_finished(spark: SparkSession, checkpoint: str) -> Epoch:
    """The last epoch that Spark has noted as finished; `NO_EPOCH` if there is none."""
    return Epoch(max(_numbers(spark, checkpoint, "commits"), default=NO_EPOCH))


def _numbers(spark: SparkSession, checkpoint: str, folder: str) -> list[int]:
    """The numbers of the files in a folder of the checkpoint, in order."""
    if _is_local(checkpoint):
        path = _local(checkpoint) / folder
        found = [each.name for each in path.iterdir()] if path.is_dir() else []
    else:
        path_object, files = _hadoop(spark, checkpoint, folder)
        found = (
            [status.getPath().getName() for status in files.listStatus(path_object)]
            if files.exists(path_object)
            else []
        )
    return sorted(int(name) for name in found if name.isdigit())


def _write(spark: SparkSession, checkpoint: str, name: str, data: bytes) -> None:
    path_object, files = _hadoop(spark, checkpoint, name)
    stream = files.create(path_object, True)
    try:
        stream.write(data, 0, len(data))
    finally:
        stream.close()


def _delete(spark: SparkSession, checkpoint: str, name: str) -> None:
    path_object, files = _hadoop(spark, checkpoint, name)
    files.delete(path_object, False)


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
